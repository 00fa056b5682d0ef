#include "gpu-worker/kvcache/full_rows.h"

#include <stdio.h>
#include <stdlib.h>

struct kv_local_rows {
    struct kvw_session_setup setup;
    struct kv_device *device;
    struct kv_rows_shape shape;
    struct kv_store_session *store;
    struct kv_device_buffer **rows; /* (n_layers) */
};

static uint32_t n_layers(const struct kv_local_rows *local)
{
    return local->setup.model->params.n_layers;
}

void kv_local_rows_destroy(struct kv_local_rows *local)
{
    if (local == NULL)
        return;
    kv_store_session_destroy(local->store);
    for (uint32_t i = 0; local->rows != NULL && i < n_layers(local); i++)
        local->device->row->buffer_destroy(local->rows[i]);
    free(local->rows);
    free(local);
}

kv_status_t kv_local_rows_create(const struct kvw_session_setup *setup,
                                 struct kv_local_rows **ret_local,
                                 char *detail,
                                 size_t detail_bytes)
{
    const struct kv_model_params *params = &setup->model->params;
    struct kv_local_rows *local = calloc(1, sizeof(*local));
    kv_status_t status = KV_NO_MEMORY;
    size_t row_bytes;

    if (local == NULL)
        return KV_NO_MEMORY;
    local->setup = *setup;
    local->device = setup->model->device;
    local->shape = kvw_session_rows_shape(setup);
    row_bytes = kv_rows_shape_row_bytes(&local->shape);
    local->rows = calloc(params->n_layers, sizeof(local->rows[0]));
    for (uint32_t i = 0; local->rows != NULL && i < params->n_layers; i++)
        if (local->device->row->buffer_create(
                local->device, params->n_kv_heads * (size_t)setup->capacity * row_bytes,
                &local->rows[i]) != KV_OK)
            goto no_memory;
    if (local->rows == NULL)
        goto no_memory;

    status = kv_store_session_create(setup, &local->store, detail, detail_bytes);
    if (status != KV_OK)
        goto err;
    *ret_local = local;
    return KV_OK;

no_memory:
    status = KV_NO_MEMORY;
    snprintf(detail, detail_bytes, "memory: %u tokens of %zu bytes: refused", setup->capacity,
             row_bytes * params->n_kv_heads * params->n_layers);
err:
    kv_local_rows_destroy(local);
    return status;
}

struct kv_store_session *kv_local_rows_session(const struct kv_local_rows *local)
{
    return local->store;
}

const struct kv_rows_shape *kv_local_rows_shape(const struct kv_local_rows *local)
{
    return &local->shape;
}

const struct kv_device_buffer *kv_local_rows_of(const struct kv_local_rows *local,
                                                uint32_t layer)
{
    return local->rows[layer];
}

kv_status_t kv_local_rows_put(struct kv_local_rows *local,
                              enum kv_phase phase,
                              uint32_t layer,
                              uint32_t token_begin,
                              uint32_t n,
                              const struct kv_device_buffer *k,
                              const struct kv_device_buffer *v)
{
    local->device->row->rows_put(local->device, &local->shape, k, v, token_begin, n,
                                 local->rows[layer]);
    return kv_store_session_put(local->store, phase, layer, token_begin, n, local->rows[layer],
                                local->shape.capacity, token_begin);
}
