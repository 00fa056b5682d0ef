/* full - every query attends to every row before it.
 *
 * Keeps its own copy of the rows on the model's device, rounded to the element type, and
 * attends to that; the same rounded rows go to the store behind the computation.  So what
 * another method fetches from the store is, bit for bit, what this one attends to. */
#include "attention.h"
#include "write_behind.h"

#include <stdio.h>
#include <stdlib.h>

struct full {
    struct kv_attention base;
    struct kv_attention_setup setup;
    struct kv_device *device;
    struct kv_rows_shape shape;
    struct kv_session *session;
    struct kv_write_behind *writer;
    struct kv_device_buffer **rows; /* (n_layers) */
    uint64_t rows_attended;
    char detail[512];
};

static struct full *full_of(struct kv_attention *attention)
{
    return (struct full *)attention;
}

static uint32_t n_layers(const struct full *full)
{
    return full->setup.model->params.n_layers;
}

static void full_destroy(struct kv_attention *attention)
{
    struct full *full = full_of(attention);
    struct kv_op *op;

    kv_write_behind_destroy(full->writer);
    if (full->session != NULL && kv_close_begin(full->session, 0, &op) == KV_OK)
        kv_finish(op); /* else its lease ends */
    kv_session_free(full->session);
    for (uint32_t i = 0; full->rows != NULL && i < n_layers(full); i++)
        full->device->row->buffer_destroy(full->rows[i]);
    free(full->rows);
    free(full);
}

static kv_status_t open_session(struct full *full)
{
    const struct kv_session_options options = {.tokens_max = full->setup.capacity};
    struct kv_model_info *info = calloc(1, sizeof(*info));
    struct kv_op *op;
    kv_status_t status = KV_NO_MEMORY;

    if (info == NULL)
        return KV_NO_MEMORY;
    status = kv_model_info(full->setup.model, full->setup.dtype, info);
    if (status == KV_OK)
        status = kv_open_begin(full->setup.client, info, &options, 0, &op);
    if (status == KV_OK) {
        status = kv_wait(op);
        full->session = kv_op_session(op);
        kv_op_free(op);
    }
    free(info);
    return status;
}

static kv_status_t full_create(const struct kv_attention_setup *setup,
                               struct kv_attention **ret_attention,
                               char *detail,
                               size_t detail_bytes)
{
    const struct kv_model_params *params = &setup->model->params;
    struct full *full = calloc(1, sizeof(*full));
    kv_status_t status = KV_NO_MEMORY;
    size_t row_bytes;

    if (full == NULL)
        return KV_NO_MEMORY;
    full->base.row = &kv_attention_full;
    full->setup = *setup;
    full->device = setup->model->device;
    full->shape = (struct kv_rows_shape){
        .n_q_heads = params->n_q_heads,
        .n_kv_heads = params->n_kv_heads,
        .d = params->d,
        .capacity = setup->capacity,
        .dtype = setup->dtype,
    };
    row_bytes = kv_rows_shape_row_bytes(&full->shape);
    full->rows = calloc(params->n_layers, sizeof(full->rows[0]));
    for (uint32_t i = 0; full->rows != NULL && i < params->n_layers; i++)
        if (full->device->row->buffer_create(
                full->device, params->n_kv_heads * (size_t)setup->capacity * row_bytes,
                &full->rows[i]) != KV_OK)
            goto no_memory;
    if (full->rows == NULL)
        goto no_memory;

    status = open_session(full);
    /* A slot holds a layer of a chunk, or all layers of a step. */
    if (status == KV_OK)
        status = kv_write_behind_create(setup->client, full->session,
                                        params->n_kv_heads * row_bytes *
                                            (setup->chunk_tokens > params->n_layers
                                                 ? setup->chunk_tokens
                                                 : params->n_layers),
                                        &full->writer);
    if (status != KV_OK) {
        snprintf(detail, detail_bytes, "store: %s",
                 kv_client_detail(setup->client)[0] != '\0' ? kv_client_detail(setup->client)
                                                            : kv_status_name(status));
        goto err;
    }
    *ret_attention = &full->base;
    return KV_OK;

no_memory:
    status = KV_NO_MEMORY;
    snprintf(detail, detail_bytes, "memory: %u tokens of %zu bytes: refused", setup->capacity,
             row_bytes * params->n_kv_heads * params->n_layers);
err:
    full_destroy(&full->base);
    return status;
}

/* A layer's new rows into a slot: (head, token, row). */
static kv_status_t
copy_rows(struct full *full, uint32_t layer, uint32_t token_begin, uint32_t n, size_t offset)
{
    const size_t row_bytes = kv_rows_shape_row_bytes(&full->shape);
    kv_status_t status;
    void *slot;

    status = kv_write_behind_slot(full->writer, &slot);
    if (status != KV_OK)
        return status;
    for (uint32_t head = 0; head < full->shape.n_kv_heads; head++)
        full->device->row->read(
            full->rows[layer], ((size_t)head * full->shape.capacity + token_begin) * row_bytes,
            (char *)slot + offset + (size_t)head * n * row_bytes, n * row_bytes);
    return KV_OK;
}

static kv_status_t full_attend(struct kv_attention *attention,
                               uint32_t layer,
                               uint32_t token_begin,
                               uint32_t n,
                               const struct kv_device_buffer *q,
                               const struct kv_device_buffer *k,
                               const struct kv_device_buffer *v,
                               struct kv_device_buffer *out)
{
    struct full *full = full_of(attention);
    const struct kv_device_row *device = full->device->row;
    const struct kv_rows rows = {
        .layer_begin = layer, .n_layers = 1, .token_begin = token_begin, .n_tokens = n};
    const size_t layer_bytes = full->shape.n_kv_heads * kv_rows_shape_row_bytes(&full->shape);
    kv_status_t status;

    device->rows_put(full->device, &full->shape, k, v, token_begin, n, full->rows[layer]);
    /* The rows of a single token wait in the slot for those of the other layers. */
    status = copy_rows(full, layer, token_begin, n, n == 1 ? layer * layer_bytes : 0);
    if (status == KV_OK && n > 1)
        status = kv_write_behind_send(full->writer, &rows, false);
    if (status != KV_OK)
        return status;
    device->rows_attend(full->device, &full->shape, q, full->rows[layer], token_begin, n, out);
    full->rows_attended += (uint64_t)full->shape.n_kv_heads *
                           ((uint64_t)n * token_begin + (uint64_t)n * (n + 1) / 2);
    return n > 1 ? kv_write_behind_poll(full->writer) : KV_OK;
}

static kv_status_t full_passed(struct kv_attention *attention, uint32_t token_begin, uint32_t n)
{
    struct full *full = full_of(attention);
    const struct kv_rows rows = {
        .n_layers = n_layers(full), .token_begin = token_begin, .n_tokens = 1};
    kv_status_t status = KV_OK;

    if (n == 1)
        status = kv_write_behind_send(full->writer, &rows, true);
    return status == KV_OK ? kv_write_behind_poll(full->writer) : status;
}

static kv_status_t full_flush(struct kv_attention *attention)
{
    return kv_write_behind_flush(full_of(attention)->writer);
}

static kv_status_t full_truncate(struct kv_attention *attention, uint32_t tokens)
{
    struct full *full = full_of(attention);
    struct kv_op *op;
    kv_status_t status = full_flush(attention);

    if (status == KV_OK) {
        status = kv_truncate_begin(full->session, tokens, 0, &op);
        if (status == KV_OK)
            status = kv_finish(op);
        if (status != KV_OK)
            snprintf(full->detail, sizeof(full->detail), "store: %s",
                     kv_client_detail(full->setup.client));
    }
    return status;
}

static void full_idle(struct kv_attention *attention)
{
    kv_write_behind_poll(full_of(attention)->writer);
}

static const char *full_detail(const struct kv_attention *attention)
{
    const struct full *full = (const struct full *)attention;

    return full->detail[0] != '\0' ? full->detail : kv_write_behind_detail(full->writer);
}

static void full_stats(const struct kv_attention *attention,
                       struct kv_attention_stats *ret_stats)
{
    const struct full *full = (const struct full *)attention;

    *ret_stats = (struct kv_attention_stats){
        .bytes_put = kv_write_behind_bytes(full->writer),
        .rows_attended = full->rows_attended,
        .rows_possible = full->rows_attended,
        .exposed_wait_s = kv_write_behind_wait_s(full->writer),
    };
}

const struct kv_attention_row kv_attention_full = {
    .name = "full",
    .summary = "every token attends to all before it",
    .create = full_create,
    .destroy = full_destroy,
    .attend = full_attend,
    .passed = full_passed,
    .truncate = full_truncate,
    .flush = full_flush,
    .idle = full_idle,
    .detail = full_detail,
    .stats = full_stats,
};
