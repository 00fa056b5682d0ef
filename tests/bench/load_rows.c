/* Rows: put, append, read and fetch.
 *
 * The rows of a session are larger than the caches, and operations walk through all of them, so
 * that what is read was not just written.  Before anything is timed all rows are put, read back
 * and compared byte by byte; CRCs are on throughout.
 */
#include "tests/bench/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    CHUNK_TOKENS = KV_BLOCK_TOKENS, /* 64 KB of the 8B shape's rows */
    LONG_TOKENS = 2048,             /* 1 MB of them */
    SCATTERED_ROWS = 256,
    LEASE_MS = 60000,
};

/* A cache's shape. */
struct shape {
    const char *name;
    uint32_t n_layers, n_heads, d;
};

static const struct shape shape_8b = {"8b", 32, 8, 128};
static const struct shape shape_smollm2 = {"smollm2", 30, 3, 64};

struct rows {
    struct bench *bench;
    const char *transport;
    struct kv_model_info model;
    uint32_t n_tokens;
    uint32_t n_heads, n_units;
    size_t row_bytes;
    size_t unit_bytes;
    struct bench_node node;
    bool has_node;
    struct kv_client *client;
    struct kv_session *session;
    struct kv_buffer *from; /* (unit, token, row_bytes): all rows */
    struct kv_buffer *to;   /* as large */

    /* The operation at hand. */
    uint32_t op_tokens; /* put, read: of one unit */
    uint32_t op_heads;  /* fetch: of one layer */
    uint32_t head_rows; /* fetch: per head */
    unsigned window;
    size_t n;
    bool times;
    uint32_t *ids; /* fetch: (n, op_heads, head_rows) */
    uint32_t counts[KV_HEADS_MAX];
};

static uint8_t *from_at(const struct rows *rows, uint32_t unit, uint32_t token)
{
    return (uint8_t *)kv_buffer_data(rows->from) + unit * rows->unit_bytes +
           token * rows->row_bytes;
}

/* ---- sessions ---------------------------------------------------------------------------- */

static bool open_session(struct rows *rows, struct kv_session **ret_session)
{
    struct kv_session_options options = {.lease_ms = LEASE_MS};
    struct kv_op *op = NULL;
    kv_status_t status = kv_open_begin(rows->client, &rows->model, &options, 0, &op);

    if (status == KV_OK)
        status = kv_wait(op);
    if (status == KV_OK)
        *ret_session = kv_op_session(op);
    else
        bench_finish_op(rows->client, "open", status, NULL);
    kv_op_free(op);
    return status == KV_OK;
}

static bool close_session(struct rows *rows, struct kv_session *session)
{
    struct kv_op *op;
    kv_status_t status = kv_close_begin(session, 0, &op);
    bool is_good = bench_finish_op(rows->client, "close", status, op);

    kv_session_free(session);
    return is_good;
}

/* ---- operations -------------------------------------------------------------------------- */

/* The i-th run of op_tokens tokens of one unit: all units' first, then all units' second... */
static void piece_of(const struct rows *rows, size_t i, uint32_t *ret_unit, uint32_t *ret_token)
{
    size_t pieces = rows->n_tokens / rows->op_tokens;

    *ret_unit = (uint32_t)(i % rows->n_units);
    *ret_token = (uint32_t)(i / rows->n_units % pieces) * rows->op_tokens;
}

static kv_status_t begin_put(void *arg, size_t i, struct kv_op **ret_op)
{
    struct rows *rows = arg;
    uint32_t unit, token;
    struct kv_rows box;
    struct kv_rows_io io = {.buffer = rows->from};

    piece_of(rows, i, &unit, &token);
    box = (struct kv_rows){unit / rows->n_heads, 1, unit % rows->n_heads, 1, token,
                           rows->op_tokens};
    io.offset = (size_t)(from_at(rows, unit, token) - (uint8_t *)kv_buffer_data(rows->from));
    return kv_put_begin(rows->session, &box, &io, 0, ret_op);
}

static kv_status_t begin_read(void *arg, size_t i, struct kv_op **ret_op)
{
    struct rows *rows = arg;
    uint32_t unit, token;
    struct kv_rows box;
    struct kv_rows_io io = {.buffer = rows->to};

    piece_of(rows, i, &unit, &token);
    box = (struct kv_rows){unit / rows->n_heads, 1, unit % rows->n_heads, 1, token,
                           rows->op_tokens};
    io.offset = (size_t)(from_at(rows, unit, token) - (uint8_t *)kv_buffer_data(rows->from));
    return kv_read_begin(rows->session, &box, &io, 0, ret_op);
}

/* All layers and heads of one token after the other. */
static kv_status_t begin_append(void *arg, size_t i, struct kv_op **ret_op)
{
    struct rows *rows = arg;
    size_t step_bytes = rows->n_units * rows->row_bytes;
    size_t steps = kv_buffer_bytes(rows->from) / step_bytes;
    struct kv_rows box = {0, rows->model.schema.n_layers, 0, 0, (uint32_t)i, 1};
    struct kv_rows_io io = {.buffer = rows->from, .offset = i % steps * step_bytes};

    return kv_append_begin(rows->session, &box, &io, 0, ret_op);
}

static void fetch_of(const struct rows *rows, size_t i, uint32_t *ret_layer, uint32_t *ret_head)
{
    uint32_t groups = rows->n_heads / rows->op_heads;

    *ret_layer = (uint32_t)(i / groups % rows->model.schema.n_layers);
    *ret_head = (uint32_t)(i % groups) * rows->op_heads;
}

static size_t fetch_bytes(const struct rows *rows)
{
    return (size_t)rows->op_heads * rows->head_rows * rows->row_bytes;
}

static size_t fetch_offset(const struct rows *rows, size_t i)
{
    return i % (kv_buffer_bytes(rows->to) / fetch_bytes(rows)) * fetch_bytes(rows);
}

static kv_status_t begin_fetch(void *arg, size_t i, struct kv_op **ret_op)
{
    struct rows *rows = arg;
    struct kv_fetch fetch = {
        .n_kv_heads = rows->op_heads,
        .n_ids = rows->counts,
        .ids = rows->ids + i * rows->op_heads * rows->head_rows,
        .snapshot = rows->n_tokens,
    };
    struct kv_rows_io io = {.buffer = rows->to, .offset = fetch_offset(rows, i)};

    fetch_of(rows, i, &fetch.layer, &fetch.kv_head_begin);
    return kv_fetch_begin(rows->session, &fetch, &io, 0, ret_op);
}

/* ---- measuring --------------------------------------------------------------------------- */

static bool measure(struct rows *rows,
                    kv_status_t (*begin)(void *load, size_t i, struct kv_op **ret_op),
                    size_t n,
                    size_t bytes,
                    struct bench_sample *ret_sample)
{
    struct bench_pipeline pipeline = {
        .client = rows->client,
        .window = rows->window,
        .n = n,
        .begin = begin,
        .load = rows,
    };
    struct bench_watch watch;
    bool is_good;

    if (!bench_watch_start(&watch, n))
        return false;
    is_good = bench_pipeline_run(&pipeline, &watch);
    if (rows->times)
        bench_watch_times(&watch, ret_sample);
    else
        bench_watch_rate(&watch, bytes, ret_sample);
    return is_good;
}

/* Into a new session each time: rows that are there already would only be compared. */
static bool measure_new(struct rows *rows,
                        kv_status_t (*begin)(void *load, size_t i, struct kv_op **ret_op),
                        size_t bytes,
                        struct bench_sample *ret_sample)
{
    struct kv_session *kept = rows->session;
    bool is_good;

    if (!open_session(rows, &rows->session)) {
        rows->session = kept;
        return false;
    }
    is_good = measure(rows, begin, rows->n, bytes, ret_sample);
    is_good = close_session(rows, rows->session) && is_good;
    rows->session = kept;
    return is_good;
}

static bool measure_put(void *arg, struct bench_sample *ret_sample)
{
    struct rows *rows = arg;

    return measure_new(rows, begin_put, rows->op_tokens * rows->row_bytes, ret_sample);
}

static bool measure_append(void *arg, struct bench_sample *ret_sample)
{
    struct rows *rows = arg;

    return measure_new(rows, begin_append, rows->n_units * rows->row_bytes, ret_sample);
}

static bool measure_read(void *arg, struct bench_sample *ret_sample)
{
    struct rows *rows = arg;

    return measure(rows, begin_read, rows->n, rows->op_tokens * rows->row_bytes, ret_sample);
}

static bool measure_fetch(void *arg, struct bench_sample *ret_sample)
{
    struct rows *rows = arg;

    return measure(rows, begin_fetch, rows->n, fetch_bytes(rows), ret_sample);
}

/* ---- right before fast ------------------------------------------------------------------- */

static bool
same_bytes(const char *what, const uint8_t *got, const uint8_t *wanted, size_t bytes)
{
    if (memcmp(got, wanted, bytes) == 0)
        return true;
    bench_complain("%s: other bytes came back than were stored", what);
    return false;
}

/* Puts all rows into the session that stays, reads them back and compares. */
static bool put_and_check(struct rows *rows)
{
    struct bench_sample sample;
    size_t bytes = rows->n_units * rows->unit_bytes;
    uint32_t op_tokens = rows->op_tokens;
    size_t all;
    bool is_good;

    rows->op_tokens = rows->n_tokens % LONG_TOKENS == 0 ? LONG_TOKENS : CHUNK_TOKENS;
    all = (size_t)rows->n_units * (rows->n_tokens / rows->op_tokens);
    rows->window = 8;
    memset(kv_buffer_data(rows->to), 0, bytes);
    is_good = measure(rows, begin_put, all, 1, &sample) &&
              measure(rows, begin_read, all, 1, &sample) &&
              same_bytes("read", kv_buffer_data(rows->to), kv_buffer_data(rows->from), bytes);
    rows->op_tokens = op_tokens;
    return is_good;
}

static bool check_fetch(struct rows *rows)
{
    struct bench_sample sample;
    size_t n = kv_buffer_bytes(rows->to) / fetch_bytes(rows);

    if (n > rows->n)
        n = rows->n;
    if (!measure(rows, begin_fetch, n, 1, &sample))
        return false;
    for (size_t i = 0; i < n; i++) {
        const uint32_t *ids = rows->ids + i * rows->op_heads * rows->head_rows;
        const uint8_t *got = (uint8_t *)kv_buffer_data(rows->to) + fetch_offset(rows, i);
        uint32_t layer, head;

        fetch_of(rows, i, &layer, &head);
        for (uint32_t j = 0; j < rows->op_heads * rows->head_rows; j++) {
            uint32_t unit = layer * rows->n_heads + head + j / rows->head_rows;

            if (!same_bytes("fetch", got + j * rows->row_bytes, from_at(rows, unit, ids[j]),
                            rows->row_bytes))
                return false;
        }
    }
    return true;
}

/* ---- set-up ------------------------------------------------------------------------------ */

static void close_rows(struct rows *rows)
{
    free(rows->ids);
    rows->ids = NULL;
    /* The client frees the session and both buffers. */
    kv_client_close(rows->client);
    if (rows->has_node && !bench_node_stop(&rows->node))
        bench_complain("rows: the node did not stop");
}

static bool open_rows(struct bench *bench,
                      const char *transport,
                      const struct shape *shape,
                      uint32_t n_tokens,
                      struct rows *rows)
{
    uint64_t token_bytes;
    size_t bytes;
    uint32_t n_layers = shape->n_layers;

    memset(rows, 0, sizeof(*rows));
    rows->bench = bench;
    rows->transport = transport;
    rows->n_heads = shape->n_heads;
    rows->row_bytes = 2 * (size_t)shape->d * 2;
    token_bytes = rows->n_heads * rows->row_bytes;
    if (n_tokens == 0) {
        /* All layers, and as many tokens as make up the data. */
        n_tokens = (uint32_t)(bench->data_bytes / (token_bytes * n_layers)) / CHUNK_TOKENS *
                   CHUNK_TOKENS;
    } else {
        /* So many tokens, and as many layers. */
        n_layers = (uint32_t)(bench->data_bytes / (token_bytes * n_tokens));
    }
    if (n_layers > KV_LAYERS_MAX)
        n_layers = KV_LAYERS_MAX;
    if (n_layers == 0 || n_tokens < 2 * CHUNK_TOKENS) {
        bench_complain("--data: too small for shape %s", shape->name);
        return false;
    }
    rows->n_tokens = n_tokens;
    rows->n_units = n_layers * shape->n_heads;
    rows->unit_bytes = n_tokens * rows->row_bytes;
    bytes = rows->n_units * rows->unit_bytes;
    snprintf(rows->model.name, sizeof(rows->model.name), "bench-%s", shape->name);
    memcpy(rows->model.fingerprint.bytes, "kv_bench", 8);
    rows->model.fingerprint.bytes[15] = (uint8_t)shape->d;
    if (kv_schema_uniform(&rows->model.schema, n_layers, shape->n_heads, shape->d, shape->d,
                          KV_FP16) != KV_OK) {
        bench_complain("shape %s: not a schema", shape->name);
        return false;
    }

    rows->has_node = bench_node_start(bench, 1, 3 * bytes + (256u << 20), true, &rows->node);
    if (!rows->has_node)
        return false;
    rows->client = bench_client_open(&rows->node, transport);
    if (rows->client == NULL)
        return false;
    if (kv_buffer_alloc(rows->client, bytes, &rows->from) != KV_OK ||
        kv_buffer_alloc(rows->client, bytes, &rows->to) != KV_OK) {
        bench_complain("memory: 2 x %zu bytes: refused", bytes);
        return false;
    }
    bench_fill(kv_buffer_data(rows->from), bytes, 5);
    return open_session(rows, &rows->session) && put_and_check(rows);
}

/* Distinct and ascending within a head, as a selection is. */
static bool choose_ids(struct rows *rows)
{
    static uint64_t state = 7;
    uint32_t *id;

    free(rows->ids);
    rows->ids = malloc(rows->n * rows->op_heads * rows->head_rows * sizeof(*rows->ids));
    id = rows->ids;
    if (id == NULL)
        return false;
    for (uint32_t head = 0; head < rows->op_heads; head++)
        rows->counts[head] = rows->head_rows;
    for (size_t i = 0; i < rows->n * rows->op_heads; i++) {
        uint32_t wanted = rows->head_rows;

        for (uint32_t token = 0; wanted > 0; token++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            if ((state >> 33) % (rows->n_tokens - token) < wanted) {
                *id++ = token;
                wanted--;
            }
        }
    }
    return true;
}

/* ---- loads ------------------------------------------------------------------------------- */

/* Compares with bare messages, and over tcp with a socket pair. */
static bool compare(struct rows *rows,
                    const char *name,
                    const struct shape *shape,
                    bool (*measure_ours)(void *arg, struct bench_sample *ret_sample),
                    size_t bytes,
                    bool is_out,
                    unsigned n_rows)
{
    struct bench *bench = rows->bench;
    bool is_tcp = strcmp(rows->transport, "tcp") == 0;
    struct bench_exchange exchange = {
        .out_bytes = is_out ? bytes : 64,
        .back_bytes = is_out ? 64 : bytes,
        .window = rows->window,
        .n = rows->n,
        .times = rows->times,
    };
    struct bench_comparison comparison = {
        .name = name,
        .unit = rows->times ? "us" : "GB/s",
        .params = {.transport = rows->transport,
                   .shape = shape->name,
                   .window = rows->window,
                   .bytes = bytes,
                   .request_bytes = exchange.out_bytes,
                   .rows = n_rows},
        .n_sides = 2,
        .sides = {{NULL, measure_ours, rows}, {"bare message", bench_wire_measure, &exchange}},
    };
    struct bench_sample warm_up;
    bool is_good = bench_wire_open(bench, rows->transport, &exchange.wire) &&
                   bench_wire_measure(&exchange, &warm_up) && measure_ours(rows, &warm_up);

    if (is_good && is_tcp) {
        comparison.sides[comparison.n_sides++] =
            (struct bench_side){"polling socket pair", bench_socket_measure, &exchange};
        is_good = bench_socket_open(bench, &exchange.socket) &&
                  bench_socket_measure(&exchange, &warm_up);
    }
    is_good = is_good && bench_compare(bench, &comparison);
    bench_socket_close(exchange.socket);
    bench_wire_close(exchange.wire);
    return is_good;
}

static size_t count_of(const struct rows *rows, size_t bytes)
{
    return bench_count(rows->bench, kv_buffer_bytes(rows->from) / bytes * 2);
}

static bool run_put(struct bench *bench, const struct bench_load *load)
{
    const char *transport;
    bool is_good = true;

    for (unsigned i = 0; is_good && (transport = bench_transport(bench, i)) != NULL; i++) {
        struct rows rows;

        is_good = open_rows(bench, transport, &shape_8b, LONG_TOKENS, &rows);
        if (is_good) {
            rows.op_tokens = (uint32_t)(load->bytes / rows.row_bytes);
            rows.window = 8;
            /* One session's rows: no more can be put. */
            rows.n = count_of(&rows, load->bytes) / 2;
            is_good = compare(&rows, load->name, &shape_8b, measure_put, load->bytes, true,
                              rows.op_tokens);
        }
        close_rows(&rows);
    }
    return is_good;
}

static bool run_read(struct bench *bench, const struct bench_load *load)
{
    const char *transport;
    bool is_good = true;

    for (unsigned i = 0; is_good && (transport = bench_transport(bench, i)) != NULL; i++) {
        struct rows rows;

        is_good = open_rows(bench, transport, &shape_8b, LONG_TOKENS, &rows);
        if (is_good) {
            rows.op_tokens = (uint32_t)(load->bytes / rows.row_bytes);
            rows.window = 8;
            rows.n = count_of(&rows, load->bytes);
            is_good = compare(&rows, load->name, &shape_8b, measure_read, load->bytes, false,
                              rows.op_tokens);
        }
        close_rows(&rows);
    }
    return is_good;
}

/* Rows of all heads of a layer. */
static bool run_fetch(struct bench *bench, const struct bench_load *load)
{
    const char *transport;
    bool is_good = true;

    for (unsigned i = 0; is_good && (transport = bench_transport(bench, i)) != NULL; i++) {
        struct rows rows;

        is_good = open_rows(bench, transport, &shape_8b, LONG_TOKENS, &rows);
        if (is_good) {
            rows.op_heads = rows.n_heads;
            rows.head_rows = (uint32_t)(load->bytes / rows.row_bytes / rows.n_heads);
            rows.window = 8;
            rows.n = count_of(&rows, load->bytes);
            is_good = choose_ids(&rows) && check_fetch(&rows) &&
                      compare(&rows, load->name, &shape_8b, measure_fetch, load->bytes, false,
                              rows.op_heads * rows.head_rows);
        }
        close_rows(&rows);
    }
    return is_good;
}

static bool fetch_scattered(struct rows *rows, const char *name, unsigned window)
{
    struct bench *bench = rows->bench;
    struct bench_memory memory = {0};
    size_t bytes = fetch_bytes(rows);
    struct bench_exchange exchange = {
        .out_bytes = 64,
        .back_bytes = bytes,
        .window = window,
        .n = rows->n,
        .times = window == 1,
    };
    bool is_good;

    rows->window = window;
    rows->times = window == 1;
    is_good = bench_wire_open(bench, rows->transport, &exchange.wire) &&
              bench_memory_open(bench, &memory);
    memory.row_bytes = rows->row_bytes;
    memory.rows = SCATTERED_ROWS;
    memory.n = rows->n;
    memory.times = rows->times;
    is_good =
        is_good &&
        bench_compare(bench, &(struct bench_comparison){
                                 .name = name,
                                 .unit = rows->times ? "us" : "GB/s",
                                 .params = {.transport = rows->transport,
                                            .shape = shape_smollm2.name,
                                            .window = window,
                                            .bytes = bytes,
                                            .request_bytes = 64,
                                            .rows = SCATTERED_ROWS},
                                 .n_sides = 3,
                                 .sides = {{NULL, measure_fetch, rows},
                                           {"gather", bench_memory_gather, &memory},
                                           {"bare message", bench_wire_measure, &exchange}},
                             });
    bench_memory_close(&memory);
    bench_wire_close(exchange.wire);
    return is_good;
}

/* Rows of one head, scattered over many tokens. */
static bool run_fetch_rows(struct bench *bench, const struct bench_load *load)
{
    const char *transport;
    bool is_good = true;

    for (unsigned i = 0; is_good && (transport = bench_transport(bench, i)) != NULL; i++) {
        struct rows rows;

        is_good = open_rows(bench, transport, &shape_smollm2, 0, &rows);
        if (is_good) {
            rows.op_heads = 1;
            rows.head_rows = SCATTERED_ROWS;
            rows.n = bench_count(bench, 2000);
            rows.window = 8;
            is_good = choose_ids(&rows) && check_fetch(&rows) &&
                      fetch_scattered(&rows, load->name, 1) &&
                      fetch_scattered(&rows, load->name, 8);
        }
        close_rows(&rows);
    }
    return is_good;
}

static bool run_append(struct bench *bench, const struct bench_load *load)
{
    const struct shape *shape =
        strcmp(load->name, "append.8b") == 0 ? &shape_8b : &shape_smollm2;
    const char *transport;
    bool is_good = true;

    for (unsigned i = 0; is_good && (transport = bench_transport(bench, i)) != NULL; i++) {
        struct rows rows;

        is_good = open_rows(bench, transport, shape, 0, &rows);
        if (is_good) {
            rows.window = 1;
            rows.times = true;
            rows.n = bench_count(bench, 1000);
            is_good = compare(&rows, load->name, shape, measure_append,
                              rows.n_units * rows.row_bytes, true, rows.n_units);
        }
        close_rows(&rows);
    }
    return is_good;
}

const struct bench_load bench_row_loads[] = {
    {"put.64K", "64 KB of rows per operation, 8 in flight", run_put, 64 << 10},
    {"put.1M", "1 MB of rows per operation, 8 in flight", run_put, 1 << 20},
    {"read.64K", "64 KB of rows per operation, 8 in flight", run_read, 64 << 10},
    {"read.1M", "1 MB of rows per operation, 8 in flight", run_read, 1 << 20},
    {"fetch.64K", "64 KB of rows of 8 heads by id, 8 in flight", run_fetch, 64 << 10},
    {"fetch.1M", "1 MB of rows of 8 heads by id, 8 in flight", run_fetch, 1 << 20},
    {"fetch.rows", "256 scattered rows of 256 B, 1 and 8 in flight", run_fetch_rows, 0},
    {"append.smollm2", "one token's rows, 90 of 256 B", run_append, 0},
    {"append.8b", "one token's rows, 256 of 512 B", run_append, 0},
    {NULL, NULL, NULL, 0},
};
