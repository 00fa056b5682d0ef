#include "gpu-worker/commands/bench_rows.h"

#include "gpu-worker/device/device.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    READ_DEADLINE_MS = 60000,
    SHIFT_CHUNKS = 3, /* that a sequence begins behind the one before */
};

struct kvw_bench_rows {
    struct kvw_context *worker;
    uint32_t n;       /* recorded tokens */
    float *rows;      /* (n_layers, n_kv_heads, n, 2 d) */
    float *k, *v;     /* (KVW_FORWARD_CHUNK, n_kv_heads, d) */
    float *rotations; /* (KVW_FORWARD_CHUNK, n_rot / 2, 2), all the same */
    struct kvw_device_buffer *to_k, *to_v, *to_rotations; /* the same on the device */
    /* (n_kv_heads, KVW_FORWARD_CHUNK, 2 d), in turn: a layer's rows are being sent when the next ones
     * are made. */
    struct kvw_device_buffer *made[2];
    struct kvw_event *taken; /* of k, v and rotations there is a copy on the device */
};

static const struct kvw_model_params *params_of(const struct kvw_bench_rows *rows)
{
    return &rows->worker->model->params;
}

static size_t chunk_floats(const struct kvw_bench_rows *rows)
{
    return (size_t)KVW_FORWARD_CHUNK * params_of(rows)->n_kv_heads * params_of(rows)->d;
}

static kv_status_t alloc(struct kvw_bench_rows *rows)
{
    const struct kvw_model_params *params = params_of(rows);
    struct kvw_device *device = rows->worker->device;
    const size_t floats = chunk_floats(rows);
    const size_t rotations_bytes =
        (size_t)KVW_FORWARD_CHUNK * params->n_rot * sizeof(rows->rotations[0]);
    kv_status_t status;

    rows->rows = malloc((size_t)params->n_layers * params->n_kv_heads * rows->n * 2 *
                        params->d * sizeof(rows->rows[0]));
    rows->k = malloc(floats * sizeof(rows->k[0]));
    rows->v = malloc(floats * sizeof(rows->v[0]));
    rows->rotations = malloc(rotations_bytes);
    if (rows->rows == NULL || rows->k == NULL || rows->v == NULL || rows->rotations == NULL)
        return KV_NO_MEMORY;
    status = device->ops->buffer_create(device, floats * sizeof(rows->k[0]), &rows->to_k);
    if (status == KV_OK)
        status = device->ops->buffer_create(device, floats * sizeof(rows->v[0]), &rows->to_v);
    if (status == KV_OK)
        status = device->ops->buffer_create(device, rotations_bytes, &rows->to_rotations);
    for (int i = 0; status == KV_OK && i < 2; i++)
        status = device->ops->buffer_create(
            device, 2 * floats * kv_dtype_bytes(rows->worker->dtype), &rows->made[i]);
    if (status == KV_OK)
        status = device->ops->event_create(device, &rows->taken);
    if (status == KV_OK)
        device->ops->event_record(device, KVW_STREAM_COMPUTE, rows->taken);
    return status;
}

/* Reads the session's rows, layer by layer. */
static kv_status_t read_rows(struct kvw_bench_rows *rows, struct kv_session *session)
{
    const struct kvw_model_params *params = params_of(rows);
    const size_t layer_bytes =
        (size_t)params->n_kv_heads * rows->n * 2 * params->d * sizeof(rows->rows[0]);
    struct kv_buffer *buffer;
    kv_status_t status = kv_buffer_alloc(rows->worker->client, layer_bytes, &buffer);

    if (status != KV_OK)
        return status;
    for (uint32_t layer = 0; status == KV_OK && layer < params->n_layers; layer++) {
        const struct kv_rows box = {.layer_begin = layer, .n_layers = 1, .n_tokens = rows->n};
        struct kv_op *op;

        status = kv_read_begin(session, &box, &(struct kv_rows_io){.buffer = buffer},
                               READ_DEADLINE_MS, &op);
        if (status == KV_OK)
            status = kv_finish(op);
        if (status == KV_OK)
            memcpy((uint8_t *)rows->rows + layer * layer_bytes, kv_buffer_data(buffer),
                   layer_bytes);
    }
    kv_buffer_free(buffer);
    return status;
}

int kvw_bench_record(struct kvw_context *worker,
                     const uint32_t *tokens,
                     uint32_t n,
                     struct kvw_bench_rows **ret_rows)
{
    const enum kv_dtype dtype = worker->dtype;
    const uint32_t capacity = worker->capacity;
    struct kvw_bench_rows *rows = calloc(1, sizeof(*rows));
    kv_status_t status = KV_NO_MEMORY;
    int outcome;

    assert(n > 0 && n % KVW_FORWARD_CHUNK == 0);
    if (rows != NULL) {
        rows->worker = worker;
        rows->n = n;
        status = alloc(rows);
    }
    if (status != KV_OK) {
        kvw_error(worker, "out of memory: rows of %" PRIu32 " tokens", n);
        kvw_bench_rows_free(rows);
        return KVW_FAILED;
    }
    /* In full precision: they are rounded once, after they are rotated. */
    worker->dtype = KV_FP32;
    worker->capacity = n;
    outcome = kvw_open_attention(worker, &kvw_method_full, &kvw_method_defaults, NULL, 0);
    worker->dtype = dtype;
    worker->capacity = capacity;
    if (outcome == KVW_DONE) {
        status = kvw_prefill(worker, "recorded text", tokens, n, 0);
        if (status == KV_OK)
            status = kvw_method_flush(worker->attention);
        if (status == KV_OK)
            status = read_rows(rows, kvw_session_handle(worker->attention->session));
        kvw_progress_end();
        if (status != KV_OK && !kvw_stop)
            kvw_step_error(worker, status);
        if (status != KV_OK)
            outcome = KVW_FAILED;
    }
    kvw_close_attention(worker);
    if (outcome == KVW_DONE)
        *ret_rows = rows;
    else
        kvw_bench_rows_free(rows);
    return outcome;
}

void kvw_bench_rows_free(struct kvw_bench_rows *rows)
{
    if (rows == NULL)
        return;
    rows->worker->device->ops->buffer_destroy(rows->to_k);
    rows->worker->device->ops->buffer_destroy(rows->to_v);
    rows->worker->device->ops->buffer_destroy(rows->to_rotations);
    rows->worker->device->ops->buffer_destroy(rows->made[0]);
    rows->worker->device->ops->buffer_destroy(rows->made[1]);
    rows->worker->device->ops->event_destroy(rows->taken);
    free(rows->rows);
    free(rows->k);
    free(rows->v);
    free(rows->rotations);
    free(rows);
}

/* Rotations from a recorded token's position to the one that it is to have. */
static void rotate_by(struct kvw_bench_rows *rows, uint32_t from, uint32_t to)
{
    const struct kvw_model_params *params = params_of(rows);
    struct kvw_device *device = rows->worker->device;
    const size_t bytes = params->n_rot * sizeof(rows->rotations[0]);

    device->ops->event_wait(rows->taken);
    kvw_model_rotations(params, to > from ? to - from : from - to, 1, rows->rotations);
    /* Back: the sines are those of the opposite angles. */
    for (uint32_t i = 1; to < from && i < params->n_rot; i += 2)
        rows->rotations[i] = -rows->rotations[i];
    for (uint32_t i = 1; i < KVW_FORWARD_CHUNK; i++)
        memcpy(rows->rotations + (size_t)i * params->n_rot, rows->rotations, bytes);
    device->ops->write(device, KVW_STREAM_COMPUTE, rows->to_rotations, (struct kvw_place){0, 0},
                       rows->rotations, 0, (struct kvw_pieces){1, KVW_FORWARD_CHUNK * bytes});
    device->ops->event_record(device, KVW_STREAM_COMPUTE, rows->taken);
}

/* Makes a chunk of a layer's rows, those of recorded tokens from `from` on. */
static void make(struct kvw_bench_rows *rows, uint32_t layer, uint32_t from)
{
    const struct kvw_model_params *params = params_of(rows);
    const size_t n_heads = params->n_kv_heads, d = params->d;
    struct kvw_device *device = rows->worker->device;
    const struct kvw_rows_shape shape = {
        .n_q_heads = params->n_q_heads,
        .n_kv_heads = params->n_kv_heads,
        .d = params->d,
        .capacity = KVW_FORWARD_CHUNK,
        .dtype = rows->worker->dtype,
    };
    const size_t bytes = chunk_floats(rows) * sizeof(rows->k[0]);
    const struct kvw_pieces whole = {1, bytes};

    device->ops->event_wait(rows->taken);
    for (size_t head = 0; head < n_heads; head++) {
        const float *row = rows->rows + ((layer * n_heads + head) * rows->n + from) * 2 * d;

        for (size_t i = 0; i < KVW_FORWARD_CHUNK; i++, row += 2 * d) {
            memcpy(rows->k + (i * n_heads + head) * d, row, d * sizeof(row[0]));
            memcpy(rows->v + (i * n_heads + head) * d, row + d, d * sizeof(row[0]));
        }
    }
    device->ops->write(device, KVW_STREAM_COMPUTE, rows->to_k, (struct kvw_place){0, 0},
                       rows->k, 0, whole);
    device->ops->write(device, KVW_STREAM_COMPUTE, rows->to_v, (struct kvw_place){0, 0},
                       rows->v, 0, whole);
    device->ops->event_record(device, KVW_STREAM_COMPUTE, rows->taken);
    device->ops->rope(device, params->rope_style, rows->to_rotations, rows->to_k,
                      KVW_FORWARD_CHUNK, n_heads, d, params->n_rot);
    device->ops->rows_put(device, &shape, rows->to_k, rows->to_v, 0, KVW_FORWARD_CHUNK,
                          rows->made[layer % 2]);
}

/* Puts n rows into the session. */
static kv_status_t
put_rows(struct kvw_bench_rows *rows, struct kvw_session *session, uint32_t shift, uint32_t n)
{
    const struct kvw_model_params *params = params_of(rows);
    kv_status_t status = KV_OK;

    for (uint32_t begin = 0; status == KV_OK && begin < n; begin += KVW_FORWARD_CHUNK) {
        const uint32_t count = n - begin < KVW_FORWARD_CHUNK ? n - begin : KVW_FORWARD_CHUNK;
        const uint32_t from = (begin + shift) % rows->n;

        if (kvw_stop)
            return KV_CANCELLED;
        rotate_by(rows, from, begin);
        for (uint32_t layer = 0; status == KV_OK && layer < params->n_layers; layer++) {
            make(rows, layer, from);
            status = kvw_session_put(session, KVW_PREFILL, layer, begin, count,
                                     rows->made[layer % 2], KVW_FORWARD_CHUNK, 0);
        }
        if (status == KV_OK)
            status = kvw_session_end_pass(session, KVW_PREFILL, begin);
        kvw_progress("rows of a session", begin + count, n);
    }
    return status == KV_OK ? kvw_session_flush(session) : status;
}

kv_status_t kvw_bench_rows_fill(struct kvw_bench_rows *rows,
                                uint32_t sequence,
                                uint32_t n,
                                uint32_t capacity,
                                struct kvw_session **ret_session,
                                char *detail,
                                size_t detail_bytes)
{
    const struct kvw_session_setup setup = {
        .model = rows->worker->model,
        .client = rows->worker->client,
        .dtype = rows->worker->dtype,
        .capacity = capacity,
        .chunk_tokens = KVW_FORWARD_CHUNK,
        .is_kept = true,
        .trace = rows->worker->trace,
    };
    struct kvw_session *session;
    kv_status_t status = kvw_session_create(&setup, &session, detail, detail_bytes);

    if (status != KV_OK)
        return status;
    status = put_rows(rows, session, sequence * SHIFT_CHUNKS * KVW_FORWARD_CHUNK, n);
    if (status == KV_OK) {
        *ret_session = session;
        return KV_OK;
    }
    snprintf(detail, detail_bytes, "%s",
             kvw_session_detail(session)[0] != '\0' ? kvw_session_detail(session)
                                                    : kv_status_name(status));
    kvw_session_let_go(session);
    kvw_session_destroy(session);
    return status;
}
