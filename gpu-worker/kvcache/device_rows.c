#include "gpu-worker/kvcache/device_rows.h"

#include "gpu-worker/base/time.h"
#include "gpu-worker/kvcache/layer_reader.h"

#include <assert.h>
#include <stdlib.h>

enum {
    READ_TOKENS = 1024, /* of a layer, per read from the store */
    READS = 4,          /* outstanding at once */
    READ_DEADLINE_MS = 30000,
};

struct kvw_device_rows {
    struct kv_client *client;
    struct kvw_device *device;
    struct kvw_session *store;
    uint32_t n_layers;
    struct kvw_rows_shape shape;
    size_t row_bytes;
    struct kvw_device_buffer **all;  /* (n_layers) full; NULL: windowed */
    struct kvw_device_buffer **some; /* (n_layers) windowed: sinks, then the ring; NULL: full */
    uint32_t sinks, window;          /* of windowed rows */
    uint32_t n_tokens;               /* of the session */
    uint32_t begin; /* windowed: rows [begin, n_tokens) and sinks are present; full: 0 */
    /* Reads what the session had when it was opened, during the first pass; NULL: not begun, or
     * ended. */
    struct kvw_layer_reader *reader;
    bool is_read;
    bool is_incomplete;       /* a read has failed: they are unusable until read again */
    struct kvw_event *landed; /* rows from the store are on the device */
};

uint64_t kvw_device_rows_bytes(const struct kvw_device_rows *rows)
{
    struct kvw_device_buffer *const *buffers = rows->all != NULL ? rows->all : rows->some;

    return buffers != NULL ? (uint64_t)rows->n_layers * buffers[0]->bytes : 0;
}

const struct kvw_rows_shape *kvw_device_rows_shape(const struct kvw_device_rows *rows)
{
    return &rows->shape;
}

const struct kvw_device_buffer *kvw_device_rows_all(const struct kvw_device_rows *rows,
                                                    uint32_t layer)
{
    return rows->all[layer];
}

/* ---- buffers ----------------------------------------------------------------------------- */

static void buffers_destroy(struct kvw_device_rows *rows, struct kvw_device_buffer **buffers)
{
    for (uint32_t i = 0; buffers != NULL && i < rows->n_layers; i++)
        rows->device->ops->buffer_destroy(buffers[i]);
    free(buffers);
}

/* NULL: out of memory. */
static struct kvw_device_buffer **buffers_create(struct kvw_device_rows *rows, size_t capacity)
{
    struct kvw_device_buffer **buffers = calloc(rows->n_layers, sizeof(buffers[0]));

    for (uint32_t i = 0; buffers != NULL && i < rows->n_layers; i++) {
        if (rows->device->ops->buffer_create(
                rows->device, rows->shape.n_kv_heads * capacity * rows->row_bytes,
                &buffers[i]) != KV_OK) {
            buffers_destroy(rows, buffers);
            return NULL;
        }
    }
    return buffers;
}

kv_status_t kvw_device_rows_create(const struct kvw_session_setup *setup,
                                   struct kvw_session *store,
                                   struct kvw_device_rows **ret_rows)
{
    const struct kvw_model_params *params = &setup->model->params;
    struct kvw_device_rows *rows = calloc(1, sizeof(*rows));

    if (rows == NULL)
        return KV_NO_MEMORY;
    rows->client = setup->client;
    rows->device = setup->model->device;
    rows->store = store;
    rows->n_layers = params->n_layers;
    rows->shape = kvw_session_rows_shape(setup);
    rows->row_bytes = kvw_rows_shape_row_bytes(&rows->shape);
    if (rows->device->ops->event_create(rows->device, &rows->landed) == KV_OK)
        rows->all = buffers_create(rows, setup->capacity);
    if (rows->all == NULL) {
        kvw_device_rows_destroy(rows);
        return KV_NO_MEMORY;
    }
    *ret_rows = rows;
    return KV_OK;
}

void kvw_device_rows_destroy(struct kvw_device_rows *rows)
{
    if (rows == NULL)
        return;
    kvw_layer_reader_destroy(rows->reader);
    buffers_destroy(rows, rows->all);
    buffers_destroy(rows, rows->some);
    rows->device->ops->event_destroy(rows->landed);
    free(rows);
}

/* A token's row in each head of a windowed buffer. */
static uint32_t place_of(const struct kvw_device_rows *rows, uint32_t token)
{
    return token < rows->sinks ? token : rows->sinks + token % rows->window;
}

static uint32_t n_places(const struct kvw_device_rows *rows)
{
    return rows->sinks + rows->window;
}

/* ---- from the store ---------------------------------------------------------------------- */

struct reading {
    struct kv_op *op;
    struct kv_rows box;
    size_t offset;
};

/* Tokens from `begin` on, to `end` at most, whose places follow each other. */
static uint32_t n_together(const struct kvw_device_rows *rows, uint32_t begin, uint32_t end)
{
    const uint32_t room =
        begin < rows->sinks ? rows->sinks - begin : n_places(rows) - place_of(rows, begin);

    return end - begin < room ? end - begin : room;
}

/* Copies received rows to the device. */
static void take(void *arg, const struct kv_rows *box, const uint8_t *landed)
{
    struct kvw_device_rows *rows = arg;
    const struct kvw_device_ops *device = rows->device->ops;
    const bool is_full = rows->all != NULL;
    const size_t head_places = is_full ? rows->shape.capacity : n_places(rows);
    struct kvw_device_buffer *to =
        is_full ? rows->all[box->layer_begin] : rows->some[box->layer_begin];

    for (uint32_t i = 0, n; i < box->n_tokens; i += n) {
        const uint32_t token = box->token_begin + i;
        const uint32_t place = is_full ? token : place_of(rows, token);

        n = is_full ? box->n_tokens : n_together(rows, token, box->token_begin + box->n_tokens);
        device->write(
            rows->device, KVW_STREAM_TRANSFER, to,
            (struct kvw_place){place * rows->row_bytes, head_places * rows->row_bytes},
            landed + i * rows->row_bytes, box->n_tokens * rows->row_bytes,
            (struct kvw_pieces){rows->shape.n_kv_heads, n * rows->row_bytes});
    }
    /* Their place in memory is used again. */
    device->event_record(rows->device, KVW_STREAM_TRANSFER, rows->landed);
    device->event_wait(rows->landed);
}

static kv_status_t
finish(struct kvw_device_rows *rows, struct reading *reading, const uint8_t *landed)
{
    kv_status_t status;

    if (reading->op == NULL)
        return KV_OK;
    status = kv_finish(reading->op);
    reading->op = NULL;
    if (status != KV_OK)
        return status;
    kvw_session_count_read(rows->store, &reading->box);
    take(rows, &reading->box, landed + reading->offset);
    return KV_OK;
}

/* Reads [begin, end) of all layers from the store, a few reads at a time. */
static kv_status_t
read_rows(struct kvw_device_rows *rows, uint32_t begin, uint32_t end, uint64_t *ret_wait_us)
{
    const uint64_t begin_us = kvw_now_us();
    const size_t piece_bytes = READ_TOKENS * rows->shape.n_kv_heads * rows->row_bytes;
    struct reading readings[READS] = {{NULL}};
    struct kv_buffer *buffer;
    kv_status_t status;
    unsigned next = 0;

    if (begin >= end)
        return KV_OK;
    status = kvw_session_flush(rows->store);
    if (status != KV_OK)
        return status;
    status = kv_buffer_alloc(rows->client, piece_bytes * READS, &buffer);
    if (status != KV_OK)
        return kvw_session_fail(rows->store, status);
    for (uint32_t layer = 0; status == KV_OK && layer < rows->n_layers; layer++) {
        for (uint32_t token = begin; status == KV_OK && token < end; token += READ_TOKENS) {
            struct reading *reading = &readings[next++ % READS];

            status = finish(rows, reading, kv_buffer_data(buffer));
            if (status != KV_OK)
                break;
            reading->offset = (size_t)(reading - readings) * piece_bytes;
            reading->box = (struct kv_rows){
                .layer_begin = layer,
                .n_layers = 1,
                .token_begin = token,
                .n_tokens = end - token < READ_TOKENS ? end - token : READ_TOKENS,
            };
            status =
                kv_read_begin(kvw_session_handle(rows->store), &reading->box,
                              &(struct kv_rows_io){.buffer = buffer, .offset = reading->offset},
                              READ_DEADLINE_MS, &reading->op);
        }
    }
    for (unsigned i = 0; i < READS; i++) {
        const kv_status_t last = finish(rows, &readings[i], kv_buffer_data(buffer));

        if (status == KV_OK)
            status = last;
    }
    kvw_session_fail(rows->store, status);
    /* A buffer in quarantine is freed with its client. */
    kv_buffer_free(buffer);
    *ret_wait_us += kvw_now_us() - begin_us;
    return status;
}

/* ---- forms ------------------------------------------------------------------------------- */

kv_status_t
kvw_device_rows_full(struct kvw_device_rows *rows, uint32_t tokens, uint64_t *ret_wait_us)
{
    kv_status_t status;

    if (!rows->is_read)
        rows->n_tokens = tokens; /* the session had them */
    assert(tokens == rows->n_tokens);
    if (rows->all != NULL && !rows->is_incomplete)
        return KV_OK;
    if (rows->all == NULL)
        rows->all = buffers_create(rows, rows->shape.capacity);
    if (rows->all == NULL)
        return KV_NO_MEMORY;
    buffers_destroy(rows, rows->some);
    rows->some = NULL;
    rows->begin = 0;
    status = read_rows(rows, 0, tokens, ret_wait_us);
    rows->is_incomplete = status != KV_OK;
    return status;
}

/* From full rows: sinks and window are copied on the device, all heads together. */
static void copy_narrow(struct kvw_device_rows *rows)
{
    for (uint32_t token = 0, n; token < rows->n_tokens; token += n) {
        if (token >= rows->sinks && rows->begin > token)
            token = rows->begin;
        n = n_together(rows, token, rows->n_tokens);
        for (uint32_t layer = 0; layer < rows->n_layers; layer++)
            rows->device->ops->copy(
                rows->device, KVW_STREAM_COMPUTE, rows->some[layer],
                (struct kvw_place){place_of(rows, token) * rows->row_bytes,
                                   n_places(rows) * rows->row_bytes},
                rows->all[layer],
                (struct kvw_place){token * rows->row_bytes,
                                   rows->shape.capacity * rows->row_bytes},
                (struct kvw_pieces){rows->shape.n_kv_heads, n * rows->row_bytes});
    }
}

kv_status_t kvw_device_rows_windowed(struct kvw_device_rows *rows,
                                     uint32_t sinks,
                                     uint32_t window,
                                     uint32_t tokens,
                                     uint64_t *ret_wait_us)
{
    const uint32_t begin = tokens > window ? tokens - window : 0;
    kv_status_t status = KV_OK;

    if (!rows->is_read && tokens > 0) {
        /* The first pass is a step, which needs few of the rows that the session had. */
        buffers_destroy(rows, rows->all);
        rows->all = NULL;
        rows->n_tokens = tokens;
        rows->is_read = true;
    }
    assert(tokens == rows->n_tokens && window > 0);
    if (rows->some != NULL && !rows->is_incomplete && rows->sinks == sinks &&
        rows->window == window && rows->begin <= begin)
        return KV_OK;
    buffers_destroy(rows, rows->some);
    rows->sinks = sinks;
    rows->window = window;
    rows->begin = begin;
    rows->some = buffers_create(rows, n_places(rows));
    if (rows->some == NULL)
        return KV_NO_MEMORY;
    if (rows->all != NULL && !rows->is_incomplete) {
        copy_narrow(rows);
        buffers_destroy(rows, rows->all);
        rows->all = NULL;
        return KV_OK;
    }
    buffers_destroy(rows, rows->all);
    rows->all = NULL;
    if (begin > sinks)
        status = read_rows(rows, 0, sinks < tokens ? sinks : tokens, ret_wait_us);
    if (status == KV_OK)
        status = read_rows(rows, begin > sinks ? begin : 0, tokens, ret_wait_us);
    rows->is_incomplete = status != KV_OK;
    return status;
}

void kvw_device_rows_truncate(struct kvw_device_rows *rows, uint32_t tokens)
{
    if (!rows->is_read)
        return; /* how many there are is known when the first pass begins */
    assert(tokens <= rows->n_tokens);
    rows->n_tokens = tokens;
    /* Later rows have overwritten earlier ones in the ring: none of it is valid. */
    if (rows->some != NULL && tokens > 0)
        rows->begin = UINT32_MAX;
}

/* ---- rows -------------------------------------------------------------------------------- */

/* In the first pass: waits for the layer's rows before token_begin, which the session had. */
static kv_status_t read_layer(struct kvw_device_rows *rows,
                              uint32_t layer,
                              uint32_t token_begin,
                              uint64_t *ret_wait_us)
{
    const struct kvw_layer_reader_setup setup = {
        .client = rows->client,
        .store = rows->store,
        .n_layers = rows->n_layers,
        .n_kv_heads = rows->shape.n_kv_heads,
        .row_bytes = rows->row_bytes,
        .n_tokens = token_begin,
        .arg = rows,
        .take = take,
    };
    kv_status_t status = KV_OK;

    if (!rows->is_read && token_begin > 0)
        status = kvw_layer_reader_pass(&rows->reader, &setup, layer, ret_wait_us);
    if (status != KV_OK) {
        /* Who tries again reads all of them. */
        kvw_layer_reader_destroy(rows->reader);
        rows->reader = NULL;
    } else if (layer + 1 == rows->n_layers) {
        rows->is_read = true;
    }
    return status;
}

kv_status_t kvw_device_rows_put(struct kvw_device_rows *rows,
                                enum kvw_phase phase,
                                uint32_t layer,
                                uint32_t token_begin,
                                uint32_t n,
                                const struct kvw_device_buffer *k,
                                const struct kvw_device_buffer *v,
                                uint64_t *ret_wait_us)
{
    struct kvw_rows_shape shape = rows->shape;
    struct kvw_device_buffer *to = rows->all != NULL ? rows->all[layer] : rows->some[layer];
    const kv_status_t status = read_layer(rows, layer, token_begin, ret_wait_us);
    uint32_t first = token_begin;

    if (status != KV_OK)
        return status;

    if (rows->all == NULL) {
        assert(n == 1);
        shape.capacity = n_places(rows);
        first = place_of(rows, token_begin);
        if (token_begin + 1 > rows->window && rows->begin < token_begin + 1 - rows->window)
            rows->begin = token_begin + 1 - rows->window;
    }
    rows->device->ops->rows_put(rows->device, &shape, k, v, first, n, to);
    if (rows->n_tokens < token_begin + n)
        rows->n_tokens = token_begin + n;
    return kvw_session_put(rows->store, phase, layer, token_begin, n, to, shape.capacity,
                           first);
}

uint32_t kvw_device_rows_runs(const struct kvw_device_rows *rows,
                              uint32_t layer,
                              uint32_t head,
                              uint32_t begin,
                              uint32_t end,
                              struct kvw_row_run *runs,
                              uint32_t n_runs)
{
    for (uint32_t n; begin < end; begin += n) {
        assert(begin < rows->sinks || begin >= rows->begin);
        n = n_together(rows, begin, end);
        runs[n_runs++] = (struct kvw_row_run){
            .buffer = rows->some[layer],
            .first_row = (size_t)head * n_places(rows) + place_of(rows, begin),
            .n_rows = n,
        };
    }
    return n_runs;
}

void kvw_device_rows_check(const struct kvw_device_rows *rows)
{
    assert(rows->all == NULL || rows->some == NULL);
    assert(rows->n_tokens <= rows->shape.capacity);
    if (rows->all != NULL)
        assert(rows->begin == 0);
    if (rows->some == NULL)
        return;
    assert(rows->window > 0);
    if (rows->n_tokens > 0 && rows->begin != UINT32_MAX)
        assert(rows->begin <= rows->n_tokens && rows->n_tokens - rows->begin <= rows->window);
}
