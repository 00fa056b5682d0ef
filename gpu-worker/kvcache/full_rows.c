#include "gpu-worker/kvcache/full_rows.h"

#include "gpu-worker/kvcache/layer_reader.h"

#include <stdio.h>
#include <stdlib.h>

struct kvw_full_rows {
    struct kvw_session_setup setup;
    struct kvw_device *device;
    struct kvw_rows_shape shape;
    struct kvw_session *store;
    struct kvw_device_buffer **rows; /* (n_layers) */
    struct kvw_event *landed;        /* rows from the store are on the device */
    /* Reads what the session had when it was opened, during the first pass; NULL: not begun, or
     * ended. */
    struct kvw_layer_reader *reader;
    bool is_read;
    uint64_t wait_us;
};

static uint32_t n_layers(const struct kvw_full_rows *full_rows)
{
    return full_rows->setup.model->params.n_layers;
}

void kvw_full_rows_destroy(struct kvw_full_rows *full_rows)
{
    if (full_rows == NULL)
        return;
    kvw_layer_reader_destroy(full_rows->reader);
    kvw_session_destroy(full_rows->store);
    for (uint32_t i = 0; full_rows->rows != NULL && i < n_layers(full_rows); i++)
        full_rows->device->ops->buffer_destroy(full_rows->rows[i]);
    free(full_rows->rows);
    full_rows->device->ops->event_destroy(full_rows->landed);
    free(full_rows);
}

kv_status_t kvw_full_rows_create(const struct kvw_session_setup *setup,
                                 struct kvw_full_rows **ret_full_rows,
                                 char *detail,
                                 size_t detail_bytes)
{
    const struct kvw_model_params *params = &setup->model->params;
    struct kvw_full_rows *full_rows = calloc(1, sizeof(*full_rows));
    kv_status_t status = KV_NO_MEMORY;
    size_t row_bytes;

    if (full_rows == NULL)
        return KV_NO_MEMORY;
    full_rows->setup = *setup;
    full_rows->setup.prompt = NULL; /* the caller's, who may free it now */
    full_rows->setup.n_prompt = 0;
    full_rows->setup.share = NULL;
    full_rows->device = setup->model->device;
    full_rows->shape = kvw_session_rows_shape(setup);
    row_bytes = kvw_rows_shape_row_bytes(&full_rows->shape);
    if (full_rows->device->ops->event_create(full_rows->device, &full_rows->landed) != KV_OK)
        goto no_memory;
    full_rows->rows = calloc(params->n_layers, sizeof(full_rows->rows[0]));
    for (uint32_t i = 0; full_rows->rows != NULL && i < params->n_layers; i++)
        if (full_rows->device->ops->buffer_create(
                full_rows->device, params->n_kv_heads * (size_t)setup->capacity * row_bytes,
                &full_rows->rows[i]) != KV_OK)
            goto no_memory;
    if (full_rows->rows == NULL)
        goto no_memory;

    status = kvw_session_create(setup, &full_rows->store, detail, detail_bytes);
    if (status != KV_OK)
        goto err;
    *ret_full_rows = full_rows;
    return KV_OK;

no_memory:
    status = KV_NO_MEMORY;
    snprintf(detail, detail_bytes, "out of memory: %u tokens of %zu bytes", setup->capacity,
             row_bytes * params->n_kv_heads * params->n_layers);
err:
    kvw_full_rows_destroy(full_rows);
    return status;
}

struct kvw_session *kvw_full_rows_session(const struct kvw_full_rows *full_rows)
{
    return full_rows->store;
}

const struct kvw_rows_shape *kvw_full_rows_shape(const struct kvw_full_rows *full_rows)
{
    return &full_rows->shape;
}

const struct kvw_device_buffer *kvw_full_rows_of(const struct kvw_full_rows *full_rows,
                                                 uint32_t layer)
{
    return full_rows->rows[layer];
}

uint64_t kvw_full_rows_bytes(const struct kvw_full_rows *full_rows)
{
    return (uint64_t)n_layers(full_rows) * full_rows->rows[0]->bytes;
}

double kvw_full_rows_wait_s(const struct kvw_full_rows *full_rows)
{
    return (double)full_rows->wait_us / 1e6;
}

static void take(void *arg, const struct kv_rows *rows, const uint8_t *landed)
{
    struct kvw_full_rows *full_rows = arg;
    const size_t row_bytes = kvw_rows_shape_row_bytes(&full_rows->shape);
    const size_t head_bytes = rows->n_tokens * row_bytes;

    full_rows->device->ops->write(
        full_rows->device, KVW_STREAM_TRANSFER, full_rows->rows[rows->layer_begin],
        (struct kvw_place){rows->token_begin * row_bytes,
                           full_rows->shape.capacity * row_bytes},
        landed, head_bytes, (struct kvw_pieces){full_rows->shape.n_kv_heads, head_bytes});
    /* Their place in memory is used again. */
    full_rows->device->ops->event_record(full_rows->device, KVW_STREAM_TRANSFER,
                                         full_rows->landed);
    full_rows->device->ops->event_wait(full_rows->landed);
}

/* In the first pass: waits for the layer's rows before token_begin, which the session had. */
static kv_status_t
read_layer(struct kvw_full_rows *full_rows, uint32_t layer, uint32_t token_begin)
{
    const struct kvw_layer_reader_setup setup = {
        .client = full_rows->setup.client,
        .store = full_rows->store,
        .n_layers = n_layers(full_rows),
        .n_kv_heads = full_rows->shape.n_kv_heads,
        .row_bytes = kvw_rows_shape_row_bytes(&full_rows->shape),
        .n_tokens = token_begin,
        .arg = full_rows,
        .take = take,
    };
    kv_status_t status = KV_OK;

    if (!full_rows->is_read && token_begin > 0)
        status = kvw_layer_reader_pass(&full_rows->reader, &setup, layer, &full_rows->wait_us);
    if (status != KV_OK) {
        /* Who tries again reads all of them. */
        kvw_layer_reader_destroy(full_rows->reader);
        full_rows->reader = NULL;
    } else if (layer + 1 == setup.n_layers) {
        full_rows->is_read = true;
    }
    return status;
}

kv_status_t kvw_full_rows_put(struct kvw_full_rows *full_rows,
                              enum kvw_phase phase,
                              uint32_t layer,
                              uint32_t token_begin,
                              uint32_t n,
                              const struct kvw_device_buffer *k,
                              const struct kvw_device_buffer *v)
{
    const kv_status_t status = read_layer(full_rows, layer, token_begin);

    if (status != KV_OK)
        return status;
    full_rows->device->ops->rows_put(full_rows->device, &full_rows->shape, k, v, token_begin, n,
                                     full_rows->rows[layer]);
    return kvw_session_put(full_rows->store, phase, layer, token_begin, n,
                           full_rows->rows[layer], full_rows->shape.capacity, token_begin);
}
