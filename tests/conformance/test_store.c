/* test_store.c - what a store does for its clients, over any row of the table of transports.
 *
 * Embedded nodes with threads of their own, the real client library, nothing replaced.  main()
 * runs the suite over the row that is named, for 1 and 2 nodes with 1 and 2 data threads each.
 * What a row holds follows from its place and a salt (rows.h), so that every byte that comes
 * back is checked.
 */
#include "tests/support/cluster.h"
#include "tests/support/rows.h"
#include "tests/support/transport_fault.h"

#include "client/deadlines.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/log.h"
#include "kvserver/base/thread.h"
#include "kvserver/base/writers.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BUFFER_BYTES = 24 << 20,
    READ_TOKENS = 5000, /* at once */
    MEMORY_BYTES = 384 << 20,
    LEASE_MS = 10000, /* long enough for a machine that is busy */
    SKIPPED = 77,
};

/* What the suite runs over. */
static struct subject {
    const char *name;
    const struct kv_transport_ops *row;
    const char *transports;
    bool joins; /* tens of kilobytes of bulk data travel with their request or reply */
} subject;

static const struct subject subjects[] = {
    {"loopback", &kv_transport_loopback, NULL, true},
#ifdef KV_WITH_UCX
    {"tcp", &kv_transport_ucx, "tcp", true},
    {"shm", &kv_transport_ucx, "shm", false},
    {"auto", &kv_transport_ucx, "auto", false},
#endif
};

static struct {
    uint32_t n_nodes, n_threads;
} shape;

/* What every test of the group shares. */
static struct cluster cluster;

/* One client, with a buffer for rows going out and one for rows coming in. */
struct side {
    struct kv_client *client;
    struct kv_buffer *out, *in;
};

static void
open_side_as(struct side *side, const struct cluster *nodes, const struct cluster_client *setup)
{
    side->client = cluster_connect(nodes, setup);
    assert_int_equal(kv_buffer_alloc(side->client, BUFFER_BYTES, &side->out), KV_OK);
    assert_int_equal(kv_buffer_alloc(side->client, BUFFER_BYTES, &side->in), KV_OK);
}

static void open_side(struct side *side)
{
    open_side_as(side, &cluster, NULL);
}

static void close_side(struct side *side)
{
    kv_client_close(side->client);
    side->client = NULL;
}

/* What is about the control thread alone needs to be seen once. */
static bool is_first_shape(void)
{
    return shape.n_nodes == 1 && shape.n_threads == 1 && strcmp(subject.name, "loopback") == 0;
}

/* ---- operations, waited for -------------------------------------------------------------- */

static void expect(struct kv_op *op, kv_status_t begun, kv_status_t wanted, const char *what)
{
    kv_status_t status = begun == KV_OK ? kv_wait(op) : begun;

    if (status != wanted)
        fail_msg("%s: %s, not %s: %s", what, kv_status_name(status), kv_status_name(wanted),
                 begun == KV_OK ? kv_op_detail(op) : "at once");
    if (begun == KV_OK)
        kv_op_free(op);
}

static struct kv_session *open_session_as(struct side *side,
                                          const struct kv_model_info *model,
                                          const struct kv_session_options *options)
{
    struct kv_session *session;
    struct kv_op *op;

    assert_int_equal(kv_open_begin(side->client, model, options, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("open: %s", kv_op_detail(op));
    session = kv_op_session(op);
    assert_non_null(session);
    kv_op_free(op);
    return session;
}

static struct kv_session *open_session(struct side *side, const struct kv_model_info *model)
{
    return open_session_as(side, model, NULL);
}

static void close_session(struct kv_session *session)
{
    struct kv_op *op = NULL;
    kv_status_t status = kv_close_begin(session, 0, &op);

    expect(op, status, KV_OK, "close");
    kv_session_free(session);
}

static struct kv_session *fork_session(struct kv_session *session, uint32_t tokens)
{
    struct kv_session *child;
    struct kv_op *op;

    assert_int_equal(kv_fork_begin(session, tokens, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("fork: %s", kv_op_detail(op));
    child = kv_op_session(op);
    assert_non_null(child);
    kv_op_free(op);
    return child;
}

static void truncate_session(struct kv_session *session, uint32_t tokens, kv_status_t wanted)
{
    struct kv_op *op = NULL;
    kv_status_t status = kv_truncate_begin(session, tokens, 0, &op);

    expect(op, status, wanted, "truncate");
}

static uint32_t length(struct kv_session *session)
{
    uint32_t tokens;
    struct kv_op *op;

    assert_int_equal(kv_length_begin(session, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("length: %s", kv_op_detail(op));
    tokens = kv_op_tokens(op);
    kv_op_free(op);
    return tokens;
}

static struct kv_rows all_rows(struct kv_session *session, uint32_t begin, uint32_t count)
{
    return (struct kv_rows){
        .n_layers = kv_session_schema(session)->n_layers,
        .token_begin = begin,
        .n_tokens = count,
    };
}

static kv_status_t begin_put(struct side *side,
                             struct kv_session *session,
                             const struct kv_rows *box,
                             size_t offset,
                             uint64_t salt,
                             uint32_t deadline_ms,
                             struct kv_op **ret_op)
{
    struct kv_rows_io io = {.buffer = side->out, .offset = offset};
    size_t bytes = kv_rows_bytes(kv_session_schema(session), box);

    assert_in_range(bytes, 1, BUFFER_BYTES - offset);
    test_box((uint8_t *)kv_buffer_data(side->out) + offset, kv_session_schema(session), box,
             salt);
    return kv_put_begin(session, box, &io, deadline_ms, ret_op);
}

static void put_box(struct side *side,
                    struct kv_session *session,
                    const struct kv_rows *box,
                    uint64_t salt,
                    kv_status_t wanted)
{
    struct kv_op *op = NULL;
    kv_status_t status = begin_put(side, session, box, 0, salt, 0, &op);

    expect(op, status, wanted, "put");
}

static void put(struct side *side,
                struct kv_session *session,
                uint32_t begin,
                uint32_t count,
                uint64_t salt,
                kv_status_t wanted)
{
    struct kv_rows box = all_rows(session, begin, count);

    put_box(side, session, &box, salt, wanted);
}

static void append(struct side *side, struct kv_session *session, uint32_t token, uint64_t salt)
{
    struct kv_rows_io io = {.buffer = side->out};
    struct kv_rows box = all_rows(session, token, 1);
    struct kv_op *op = NULL;
    kv_status_t status;

    test_box(kv_buffer_data(side->out), kv_session_schema(session), &box, salt);
    status = kv_append_begin(session, &box, &io, 0, &op);
    expect(op, status, KV_OK, "append");
}

/* Reads a box and holds it against the salt. */
static void read_box(struct side *side,
                     struct kv_session *session,
                     const struct kv_rows *box,
                     uint64_t salt)
{
    struct kv_rows_io io = {.buffer = side->in};
    size_t bytes = kv_rows_bytes(kv_session_schema(session), box);
    struct kv_op *op = NULL;
    kv_status_t status;

    assert_in_range(bytes, 1, BUFFER_BYTES);
    memset(kv_buffer_data(side->in), 0xa5, bytes);
    status = kv_read_begin(session, box, &io, 0, &op);
    expect(op, status, KV_OK, "read");
    assert_true(test_is_box(kv_buffer_data(side->in), kv_session_schema(session), box, salt));
}

static void read_back(struct side *side,
                      struct kv_session *session,
                      uint32_t begin,
                      uint32_t count,
                      uint64_t salt)
{
    for (uint32_t step; count > 0; begin += step, count -= step) {
        step = count < READ_TOKENS ? count : READ_TOKENS;
        struct kv_rows box = all_rows(session, begin, step);
        read_box(side, session, &box, salt);
    }
}

/* Tries a read that must fail. */
/* A node that is busy may be too late to say what is missing. */
static void expect_missing(struct kv_op *op)
{
    kv_status_t status = kv_finish(op);

    assert_true(status == KV_NOT_READY || status == KV_DEADLINE);
}

static void read_fails(struct side *side,
                       struct kv_session *session,
                       uint32_t begin,
                       uint32_t count,
                       uint32_t deadline_ms,
                       kv_status_t wanted)
{
    struct kv_rows_io io = {.buffer = side->in};
    struct kv_rows box = all_rows(session, begin, count);
    struct kv_op *op = NULL;
    kv_status_t status = kv_read_begin(session, &box, &io, deadline_ms, &op);

    if (wanted == KV_NOT_READY && status == KV_OK)
        expect_missing(op);
    else
        expect(op, status, wanted, "read");
}

/* Fetches ragged counts of scattered ids of every head of a layer. */
static void fetch_layer(struct side *side,
                        struct kv_session *session,
                        uint32_t layer,
                        uint32_t n_tokens,
                        uint32_t n_ids_max,
                        uint64_t salt,
                        struct kv_random *random)
{
    const struct kv_layer_schema *schema = &kv_session_schema(session)->layers[layer];
    uint32_t n_ids[KV_HEADS_MAX], n_all = 0;
    struct kv_rows_io io = {.buffer = side->in};
    struct kv_fetch fetch = {.layer = layer, .n_ids = n_ids};
    struct kv_op *op = NULL;
    kv_status_t status;
    uint32_t *ids;

    for (uint32_t head = 0; head < schema->n_kv_heads; head++) {
        n_ids[head] = (uint32_t)kv_random_below(random, n_ids_max + 1);
        n_all += n_ids[head];
    }
    if (n_all == 0)
        n_all = n_ids[0] = 1;
    ids = malloc(n_all * sizeof(*ids));
    io.crcs = malloc(n_all * sizeof(*io.crcs));
    assert_true(ids != NULL && io.crcs != NULL);
    for (uint32_t i = 0; i < n_all; i++)
        ids[i] = (uint32_t)kv_random_below(random, n_tokens);
    fetch.ids = ids;
    memset(kv_buffer_data(side->in), 0xa5, (size_t)n_all * schema->row_bytes);
    status = kv_fetch_begin(session, &fetch, &io, 0, &op);
    expect(op, status, KV_OK, "fetch");

    const uint8_t *row = kv_buffer_data(side->in);
    uint32_t i = 0;
    for (uint32_t head = 0; head < schema->n_kv_heads; head++) {
        for (uint32_t j = 0; j < n_ids[head]; j++, i++, row += schema->row_bytes) {
            assert_true(test_is_row(row, schema->row_bytes, salt, layer, head, ids[i]));
            assert_int_equal(io.crcs[i],
                             kv_row_crc(session, row, schema->row_bytes, layer, head, ids[i]));
        }
    }
    free(io.crcs);
    free(ids);
}

/* A client behind a fault transport. */
struct faulty {
    struct side side;
    struct kv_transport *transport;
};

static void open_faulty(struct faulty *faulty, uint32_t retry_ms)
{
    assert_int_equal(fault_open(subject.row, subject.transports, &faulty->transport), KV_OK);
    open_side_as(
        &faulty->side, &cluster,
        &(struct cluster_client){.transport = faulty->transport, .retry_ms = retry_ms});
}

static void close_faulty(struct faulty *faulty)
{
    close_side(&faulty->side);
    faulty->transport->ops->close(faulty->transport);
}

static void poll_for(struct kv_client *client, uint64_t us)
{
    for (uint64_t begin = kv_clock_now(&kv_clock_real);
         kv_clock_now(&kv_clock_real) - begin < us;)
        kv_client_wait(client, 5000);
}

/* ---- models ------------------------------------------------------------------------------ */

enum {
    EVEN,      /* d_k = d_v, equal heads */
    UNEVEN,    /* 192/128 */
    KEYS_ONLY, /* no values */
    RAGGED,    /* other heads in each layer */
    N_MODELS,
};
static struct kv_model_info models[N_MODELS];

static void make_models(void)
{
    static const uint16_t even[] = {4, 4, 4, 4}, two[] = {3, 3}, keys[] = {2, 2, 2},
                          ragged[] = {1, 5, 8, 2};

    test_model(&models[EVEN], "even", 4, even, 64, 64);
    test_model(&models[UNEVEN], "uneven", 2, two, 192, 128);
    test_model(&models[KEYS_ONLY], "keys", 3, keys, 100, 0);
    test_model(&models[RAGGED], "ragged", 4, ragged, 32, 16);
}

/* ---- the suite --------------------------------------------------------------------------- */

/* Every operation, for one model. */
static void goes_through_all(const struct kv_model_info *model)
{
    struct kv_random random;
    struct kv_session *session, *child;
    struct side side;

    kv_random_init(&random, 1);
    open_side(&side);
    session = open_session(&side, model);
    assert_int_equal(length(session), 0);
    put(&side, session, 0, 64, 1, KV_OK);
    put(&side, session, 64, 64, 1, KV_OK);
    put(&side, session, 128, KV_BLOCK_TOKENS, 1, KV_OK);
    put(&side, session, 256, 1000, 1, KV_OK);
    for (uint32_t token = 1256; token < 1300; token++)
        append(&side, session, token, 1);
    assert_int_equal(length(session), 1300);

    read_back(&side, session, 0, 1300, 1);
    read_back(&side, session, 0, 1, 1);
    read_back(&side, session, 1299, 1, 1);
    read_back(&side, session, 127, 2, 1);
    read_back(&side, session, 100, 900, 1);
    for (uint32_t layer = 0; layer < model->schema.n_layers; layer++) {
        fetch_layer(&side, session, layer, 1300, 3, 1, &random);
        fetch_layer(&side, session, layer, 1300, 300, 1, &random);
        fetch_layer(&side, session, layer, 1300, 1500, 1, &random);
    }

    child = fork_session(session, 1290);
    assert_int_equal(length(child), 1290);
    for (uint32_t token = 0; token < 20; token++) {
        append(&side, session, 1300 + token, 1);
        append(&side, child, 1290 + token, 2);
    }
    read_back(&side, session, 0, 1320, 1);
    read_back(&side, child, 0, 1290, 1);
    read_back(&side, child, 1290, 20, 2);

    truncate_session(child, 1000, KV_OK);
    assert_int_equal(length(child), 1000);
    put(&side, child, 1000, 300, 3, KV_OK);
    read_back(&side, child, 0, 1000, 1);
    read_back(&side, child, 1000, 300, 3);
    read_back(&side, session, 0, 1320, 1);
    close_session(session);
    read_back(&side, child, 0, 1000, 1);
    read_back(&side, child, 1000, 300, 3);
    close_session(child);
    close_side(&side);
}

static void even_model(void **state)
{
    (void)state;
    goes_through_all(&models[EVEN]);
}

static void keys_and_values_of_other_sizes(void **state)
{
    (void)state;
    goes_through_all(&models[UNEVEN]);
}

static void keys_only(void **state)
{
    (void)state;
    goes_through_all(&models[KEYS_ONLY]);
}

static void other_heads_in_each_layer(void **state)
{
    (void)state;
    goes_through_all(&models[RAGGED]);
}

/* Rows that are not there yet: a read waits for them, to its deadline. */
static void reads_wait_for_rows(void **state)
{
    struct kv_rows_io io;
    struct kv_session *session;
    struct kv_op *reading, *op;
    struct kv_rows box;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[EVEN]);
    put(&side, session, 0, 100, 1, KV_OK);
    read_fails(&side, session, 50, 51, 300, KV_NOT_READY);
    read_fails(&side, session, 1000, 1, 50, KV_NOT_READY);

    io = (struct kv_rows_io){.buffer = side.in};
    box = all_rows(session, 50, 100);
    assert_int_equal(kv_read_begin(session, &box, &io, 0, &reading), KV_OK);
    kv_client_wait(side.client, 20000);
    assert_int_equal(kv_op_status(reading), KV_IN_PROGRESS);
    put(&side, session, 100, 30, 1, KV_OK);
    kv_client_wait(side.client, 20000);
    assert_int_equal(kv_op_status(reading), KV_IN_PROGRESS);
    put(&side, session, 130, 20, 1, KV_OK);
    expect(reading, KV_OK, KV_OK, "read");
    assert_true(test_is_box(kv_buffer_data(side.in), kv_session_schema(session), &box, 1));

    /* A fetch waits for its snapshot, even where its ids do not need it. */
    uint32_t n_ids[] = {1, 1, 1, 1}, ids[] = {0, 1, 2, 3};
    struct kv_fetch fetch = {.n_ids = n_ids, .ids = ids, .snapshot = 151};
    assert_int_equal(kv_fetch_begin(session, &fetch, &io, 200, &op), KV_OK);
    expect_missing(op);
    append(&side, session, 150, 1);
    assert_int_equal(kv_fetch_begin(session, &fetch, &io, 0, &op), KV_OK);
    expect(op, KV_OK, KV_OK, "fetch");
    close_session(session);
    close_side(&side);
}

/* ---- rows -------------------------------------------------------------------------------- */

static void puts_are_repeated(void **state)
{
    static const uint32_t counts[] = {8, 1000}; /* in the body, by bulk */
    struct kv_session *session;
    struct side side;

    (void)state;
    open_side(&side);
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t n = counts[i];

        session = open_session(&side, &models[EVEN]);
        put(&side, session, 0, n, 1, KV_OK);
        put(&side, session, 0, n, 1, KV_OK);
        put(&side, session, 0, n / 2, 1, KV_OK);
        put(&side, session, n / 2, n / 4, 1, KV_OK);
        put(&side, session, 0, n, 2, KV_CONFLICT);
        put(&side, session, n - 1, 1, 2, KV_CONFLICT);
        assert_int_equal(length(session), n);
        /* Some are there, the rest is new. */
        put(&side, session, n / 2, n, 1, KV_OK);
        assert_int_equal(length(session), n + n / 2);
        put(&side, session, n, n, 2, KV_CONFLICT);
        assert_int_equal(length(session), n + n / 2);
        read_back(&side, session, 0, n + n / 2, 1);
        close_session(session);
    }
    close_side(&side);
}

/* Rows overtake those before them: small ones begun in reverse, and messages held on their way.
 */
static void puts_out_of_order(void **state)
{
    static const uint32_t counts[] = {3, 40, 512};
    struct kv_session *session;
    struct kv_op *ops[8];
    struct faulty faulty;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[EVEN]);
    for (uint32_t j = 8; j-- > 0;) {
        struct kv_rows box = all_rows(session, j * 3, 3);

        assert_int_equal(begin_put(&side, session, &box, j * (2 << 20), 1, 0, &ops[j]), KV_OK);
    }
    for (uint32_t j = 0; j < 8; j++)
        expect(ops[j], KV_OK, KV_OK, "put");
    read_back(&side, session, 0, 24, 1);
    close_session(session);
    for (uint32_t i = 0; i < 6; i++) {
        uint32_t n = counts[i / 2];

        open_faulty(&faulty, 0);
        fault_add(faulty.transport,
                  &(struct fault_rule){FAULT_OUT, FAULT_HOLD,
                                       i % 2 ? KV_WIRE_BULK_REQUEST : KV_WIRE_REQUEST,
                                       KV_OP_PUT, 0, 5});
        session = open_session(&faulty.side, &models[EVEN]);
        for (uint32_t j = 0; j < 8; j++) {
            struct kv_rows box = all_rows(session, j * n, n);

            assert_int_equal(
                begin_put(&faulty.side, session, &box, j * (2 << 20), 1, 0, &ops[j]), KV_OK);
        }
        poll_for(faulty.side.client, 20000);
        fault_clear(faulty.transport);
        fault_release(faulty.transport);
        for (uint32_t j = 0; j < 8; j++)
            expect(ops[j], KV_OK, KV_OK, "put");
        read_back(&faulty.side, session, 0, 8 * n, 1);
        close_session(session);
        close_faulty(&faulty);
    }
    close_side(&side);
}

enum {
    LONG_MS = 100000, /* no test waits for so long */
};

/* The put is refused for want of rows before its own, and not because it took too long. */
static void expect_gap(struct kv_op *op)
{
    assert_int_equal(kv_wait(op), KV_NOT_READY);
    if (strstr(kv_op_detail(op), "nothing in progress fills the gap") == NULL)
        fail_msg("put: %s", kv_op_detail(op));
    kv_op_free(op);
}

/* Rows that never come: those behind them are refused at once, or when it is clear that those
 * before them never come. */
static void puts_behind_a_gap(void **state)
{
    static const uint32_t counts[] = {3, 40, 512};
    struct kv_session *session;
    struct kv_op *ops[3];
    struct faulty faulty;
    struct side side;

    (void)state;
    open_side(&side);
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t n = counts[i];

        session = open_session(&side, &models[EVEN]);
        struct kv_rows box = all_rows(session, 10, n);
        assert_int_equal(begin_put(&side, session, &box, 0, 1, LONG_MS, &ops[0]), KV_OK);
        expect_gap(ops[0]);
        assert_int_equal(length(session), 0);
        put(&side, session, 0, 10, 1, KV_OK);
        put(&side, session, 10, n, 1, KV_OK);
        read_back(&side, session, 0, 10 + n, 1);
        close_session(session);

        /* The first ones are held on their way and given up: those behind them wait, then do
         * not; the last ones, which have a gap of their own, are one's that is no more, too. */
        open_faulty(&faulty, LONG_MS);
        session = open_session(&faulty.side, &models[EVEN]);
        fault_add(faulty.transport, &(struct fault_rule){FAULT_OUT, FAULT_HOLD, KV_WIRE_REQUEST,
                                                         KV_OP_PUT, 0, 0});
        for (uint32_t j = 0; j < 3; j++) {
            box = all_rows(session, j * n + (j == 2), n);
            assert_int_equal(
                begin_put(&faulty.side, session, &box, j * (2 << 20), 1, LONG_MS, &ops[j]),
                KV_OK);
            if (j == 0)
                fault_clear(faulty.transport);
        }
        poll_for(faulty.side.client, 20000);
        assert_int_equal(kv_op_status(ops[1]), KV_IN_PROGRESS);
        assert_int_equal(kv_op_status(ops[2]), KV_IN_PROGRESS);
        kv_op_free(ops[0]);
        expect_gap(ops[1]);
        expect_gap(ops[2]);
        fault_release(faulty.transport);
        close_session(session);
        close_faulty(&faulty);
    }
    close_side(&side);
}

/* Layers and heads on their own, as workers of a tensor-parallel group write them. */
static void parts_of_the_box(void **state)
{
    struct kv_session *session;
    struct kv_rows box;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[EVEN]);
    for (uint32_t layer = 0; layer < 4; layer++) {
        box = (struct kv_rows){layer, 1, 0, 2, 0, 600};
        put_box(&side, session, &box, 1, KV_OK);
        assert_int_equal(length(session), 0);
        read_box(&side, session, &box, 1);
    }
    box = (struct kv_rows){0, 4, 2, 2, 0, 600};
    put_box(&side, session, &box, 1, KV_OK);
    assert_int_equal(length(session), 600);
    read_back(&side, session, 0, 600, 1);
    box = (struct kv_rows){1, 2, 1, 2, 77, 333};
    read_box(&side, session, &box, 1);
    box = (struct kv_rows){3, 1, 3, 1, 599, 1};
    read_box(&side, session, &box, 1);

    /* Boxes that do not fit. */
    static const struct kv_rows wrong[] = {
        {4, 1, 0, 0, 0, 1}, {0, 5, 0, 0, 0, 1},          {0, 0, 0, 0, 0, 1},
        {0, 1, 4, 1, 0, 1}, {0, 1, 3, 2, 0, 1},          {0, 1, 1, 0, 0, 1},
        {0, 1, 0, 0, 0, 0}, {0, 1, 0, 0, UINT32_MAX, 1}, {0, 1, 0, 0, 1, UINT32_MAX},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        struct kv_rows_io io = {.buffer = side.in};
        struct kv_op *op;

        assert_int_equal(kv_rows_bytes(kv_session_schema(session), &wrong[i]), 0);
        assert_int_equal(kv_read_begin(session, &wrong[i], &io, 0, &op), KV_INVALID);
        assert_int_equal(kv_put_begin(session, &wrong[i], &io, 0, &op), KV_INVALID);
    }
    close_session(session);
    close_side(&side);
}

/* CRCs that the caller has go in, those of what was read come out. */
static void crcs_pass_through(void **state)
{
    struct kv_session *session;
    struct kv_rows box;
    struct kv_rows_io io;
    struct kv_op *op = NULL;
    struct side side;
    uint32_t *crcs;
    kv_status_t status;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[RAGGED]);
    box = all_rows(session, 0, 300);
    test_box(kv_buffer_data(side.out), kv_session_schema(session), &box, 1);
    size_t n = kv_session_schema(session)->n_units * (size_t)300;
    crcs = calloc(n, sizeof(*crcs));
    assert_non_null(crcs);
    const uint8_t *row = kv_buffer_data(side.out);
    uint32_t *crc = crcs;
    for (uint32_t layer = 0; layer < 4; layer++) {
        const struct kv_layer_schema *schema = &kv_session_schema(session)->layers[layer];
        for (uint32_t head = 0; head < schema->n_kv_heads; head++)
            for (uint32_t token = 0; token < 300; token++, row += schema->row_bytes)
                *crc++ = kv_row_crc(session, row, schema->row_bytes, layer, head, token);
    }
    io = (struct kv_rows_io){.buffer = side.out, .crcs = crcs};
    crcs[n - 1] ^= 1;
    status = kv_put_begin(session, &box, &io, 0, &op);
    expect(op, status, KV_CORRUPT, "put");
    crcs[n - 1] ^= 1;
    status = kv_put_begin(session, &box, &io, 0, &op);
    expect(op, status, KV_OK, "put");
    uint32_t *back = calloc(n, sizeof(*back));
    assert_non_null(back);
    io = (struct kv_rows_io){.buffer = side.in, .crcs = back};
    status = kv_read_begin(session, &box, &io, 0, &op);
    expect(op, status, KV_OK, "read");
    assert_memory_equal(crcs, back, n * sizeof(*crcs));
    free(back);
    free(crcs);
    close_session(session);
    close_side(&side);
}

/* ---- lifecycle --------------------------------------------------------------------------- */

enum {
    FAMILY = 12,
    FAMILY_TOKENS = 700,
    FAMILY_STEPS = 400,
};

/* A session, and which salt each of its tokens was written with. */
struct member {
    struct kv_session *session;
    uint32_t n_tokens;
    uint64_t salts[FAMILY_TOKENS + 300];
};

static void read_member(struct side *side, const struct member *member, uint32_t begin)
{
    /* In runs of one salt. */
    while (begin < member->n_tokens) {
        uint32_t end = begin + 1;

        while (end < member->n_tokens && member->salts[end] == member->salts[begin])
            end++;
        read_back(side, member->session, begin, end - begin, member->salts[begin]);
        begin = end;
    }
}

/* Writes the CRCs that the rows of a box have in this session. */
static void crcs_of(const struct kv_session *session,
                    const struct kv_rows *box,
                    uint64_t salt,
                    uint32_t *crc)
{
    const kv_schema_t *schema = kv_session_schema(session);
    uint8_t row[1024];

    for (uint32_t layer = 0; layer < schema->n_layers; layer++) {
        const uint32_t row_bytes = schema->layers[layer].row_bytes;

        assert_in_range(row_bytes, 1, sizeof(row));
        for (uint32_t head = 0; head < schema->layers[layer].n_kv_heads; head++) {
            for (uint32_t i = 0; i < box->n_tokens; i++) {
                test_row(row, row_bytes, salt, layer, head, box->token_begin + i);
                *crc++ = kv_row_crc(session, row, row_bytes, layer, head, box->token_begin + i);
            }
        }
    }
}

/* Reads rows with their CRCs: both are those of the session. */
static void read_as_writer(struct side *side,
                           struct kv_session *session,
                           uint32_t begin,
                           uint32_t count,
                           uint64_t salt)
{
    struct kv_rows box = all_rows(session, begin, count);
    size_t n = kv_session_schema(session)->n_units * (size_t)count;
    uint32_t *crcs = calloc(2 * n, sizeof(*crcs));
    struct kv_rows_io io = {.buffer = side->in, .crcs = crcs};
    struct kv_op *op = NULL;
    kv_status_t status;

    assert_non_null(crcs);
    status = kv_read_begin(session, &box, &io, 0, &op);
    expect(op, status, KV_OK, "read");
    assert_true(test_is_box(kv_buffer_data(side->in), kv_session_schema(session), &box, salt));
    crcs_of(session, &box, salt, crcs + n);
    assert_memory_equal(crcs, crcs + n, n * sizeof(*crcs));
    free(crcs);
}

/* A row of another session is refused at its own place, by the node that gets it. */
static void rows_of_another_session_are_refused(void **state)
{
    struct kv_session *session, *other;
    struct kv_rows box;
    struct kv_op *op = NULL;
    struct side side;
    kv_status_t status;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[RAGGED]);
    other = open_session(&side, &models[RAGGED]);
    box = all_rows(session, 0, 300);
    size_t n = kv_session_schema(session)->n_units * (size_t)box.n_tokens;
    uint32_t *crcs = calloc(n, sizeof(*crcs));
    struct kv_rows_io io = {.buffer = side.out, .crcs = crcs};

    assert_non_null(crcs);
    test_box(kv_buffer_data(side.out), kv_session_schema(session), &box, 1);
    crcs_of(session, &box, 1, crcs);
    status = kv_put_begin(other, &box, &io, 0, &op);
    expect(op, status, KV_CORRUPT, "put");
    status = kv_put_begin(session, &box, &io, 0, &op);
    expect(op, status, KV_OK, "put");
    put(&side, other, 0, 300, 1, KV_OK);
    read_as_writer(&side, session, 0, 300, 1);
    read_as_writer(&side, other, 0, 300, 1);
    free(crcs);
    close_session(other);
    close_session(session);
    close_side(&side);
}

static struct kv_session *resume(struct side *side, const struct kv_ticket *ticket)
{
    struct kv_session *session;
    struct kv_op *op;

    assert_int_equal(kv_resume_begin(side->client, ticket, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("resume: %s", kv_op_detail(op));
    session = kv_op_session(op);
    assert_non_null(session);
    kv_op_free(op);
    return session;
}

/* A fork has its parent's rows with their writers, and writes its own; so has who resumes it,
 * and a parent that writes anew what its fork has is another writer. */
static void forks_keep_the_writers_of_their_rows(void **state)
{
    struct kv_session *parent, *child, *grandchild, *sessions[3];
    struct side side, other;
    uint32_t crcs[2];
    uint8_t row[1024];

    (void)state;
    open_side(&side);
    open_side(&other);
    parent = open_session(&side, &models[RAGGED]);
    put(&side, parent, 0, 300, 1, KV_OK);
    child = fork_session(parent, 200);
    put(&side, child, 200, 100, 2, KV_OK);
    grandchild = fork_session(child, 250);
    put(&side, grandchild, 250, 50, 3, KV_OK);
    truncate_session(parent, 150, KV_OK);
    put(&side, parent, 150, 150, 4, KV_OK);
    truncate_session(child, 100, KV_OK);
    put(&side, child, 100, 10, 5, KV_OK);
    close_session(fork_session(parent, 280));

    test_row(row, sizeof(row), 4, 0, 0, 160);
    crcs[0] = kv_row_crc(parent, row, 96, 0, 0, 160);
    crcs[1] = kv_row_crc(grandchild, row, 96, 0, 0, 160);
    assert_int_not_equal(crcs[0], crcs[1]);

    sessions[0] = parent;
    sessions[1] = child;
    sessions[2] = grandchild;
    for (unsigned round = 0; round < 2; round++) {
        struct side *by = round == 0 ? &side : &other;

        read_as_writer(by, sessions[0], 0, 150, 1);
        read_as_writer(by, sessions[0], 150, 150, 4);
        read_as_writer(by, sessions[1], 0, 100, 1);
        read_as_writer(by, sessions[1], 100, 10, 5);
        read_as_writer(by, sessions[2], 0, 200, 1);
        read_as_writer(by, sessions[2], 200, 50, 2);
        read_as_writer(by, sessions[2], 250, 50, 3);
        /* The same rows again are the same, whoever puts them. */
        put(by, sessions[2], 0, 200, 1, KV_OK);
        put(by, sessions[2], 200, 50, 2, KV_OK);
        put(by, sessions[0], 150, 150, 4, KV_OK);
        for (unsigned i = 0; i < 3 && round == 0; i++) {
            struct kv_ticket ticket;

            kv_session_ticket(sessions[i], &ticket);
            kv_session_free(sessions[i]);
            sessions[i] = resume(&other, &ticket);
        }
    }
    /* Who resumed it knows that a fork has rows of the parent's own. */
    crcs[0] = kv_row_crc(sessions[0], row, 96, 0, 0, 210);
    truncate_session(sessions[0], 205, KV_OK);
    crcs[1] = kv_row_crc(sessions[0], row, 96, 0, 0, 210);
    assert_int_not_equal(crcs[0], crcs[1]);
    truncate_session(sessions[0], 205, KV_OK); /* no fork has rows of the new one */
    assert_int_equal(kv_row_crc(sessions[0], row, 96, 0, 0, 210), crcs[1]);
    for (unsigned i = 0; i < 3; i++)
        close_session(sessions[i]);
    close_side(&other);
    close_side(&side);
}

/* A session has rows of so many writers, and is told so when it would have more. */
static void forks_of_forks_are_bounded(void **state)
{
    struct kv_session *session, *child;
    struct kv_op *op = NULL;
    kv_status_t status = KV_OK;
    struct side side;
    uint32_t n_forks = 0;

    (void)state;
    if (!is_first_shape()) /* thousands of forks: once is enough */
        return;
    open_side(&side);
    session = open_session(&side, &models[KEYS_ONLY]);
    for (;; n_forks++) {
        append(&side, session, n_forks, 1);
        assert_int_equal(kv_fork_begin(session, n_forks + 1, 0, &op), KV_OK);
        status = kv_wait(op);
        if (status != KV_OK)
            break;
        child = kv_op_session(op);
        kv_op_free(op);
        close_session(session);
        session = child;
    }
    assert_int_equal(status, KV_TOO_LARGE);
    assert_non_null(strstr(kv_op_detail(op), "too many forks of forks: limit 4096 writers"));
    kv_op_free(op);
    assert_int_equal(n_forks, KV_WRITER_RUNS_MAX - 1);
    read_as_writer(&side, session, 0, n_forks + 1, 1);
    truncate_session(session, 100, KV_OK);
    child = fork_session(session, 100);
    close_session(child);
    close_session(session);
    close_side(&side);
}

/* Random writes, forks, truncates and closes over a family of sessions, against a plain model.
 */
static void families_keep_apart(void **state)
{
    static struct member members[FAMILY];
    uint64_t seed = kv_clock_now(&kv_clock_real), salt = 0;
    struct kv_random random;
    struct side side;

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    kv_random_init(&random, seed);
    memset(members, 0, sizeof(members));
    open_side(&side);
    members[0].session = open_session(&side, &models[KEYS_ONLY]);
    for (unsigned step = 0; step < FAMILY_STEPS; step++) {
        struct member *member = &members[kv_random_below(&random, FAMILY)];
        uint32_t n = (uint32_t)kv_random_below(&random, 4) == 0
                         ? 1 + (uint32_t)kv_random_below(&random, 300)
                         : 1 + (uint32_t)kv_random_below(&random, 20);

        if (member->session == NULL)
            member = &members[0];
        switch (kv_random_below(&random, 6)) {
        case 0:
        case 1:
        case 2:
            if (member->n_tokens >= FAMILY_TOKENS)
                break;
            put(&side, member->session, member->n_tokens, n, ++salt, KV_OK);
            for (uint32_t i = 0; i < n; i++)
                member->salts[member->n_tokens++] = salt;
            break;
        case 3: {
            struct member *child = &members[1 + kv_random_below(&random, FAMILY - 1)];
            uint32_t tokens = (uint32_t)kv_random_below(&random, member->n_tokens + 1);

            if (child->session != NULL)
                break;
            child->session = fork_session(member->session, tokens);
            child->n_tokens = tokens;
            memcpy(child->salts, member->salts, sizeof(child->salts));
            break;
        }
        case 4: {
            uint32_t tokens = (uint32_t)kv_random_below(&random, member->n_tokens + 1);

            truncate_session(member->session, tokens, KV_OK);
            member->n_tokens = tokens;
            break;
        }
        default:
            if (member == &members[0] || kv_random_below(&random, 3) > 0) {
                read_member(&side, member,
                            (uint32_t)kv_random_below(&random, member->n_tokens + 1));
                break;
            }
            close_session(member->session);
            member->session = NULL;
        }
    }
    for (unsigned i = 0; i < FAMILY; i++) {
        if (members[i].session == NULL)
            continue;
        assert_int_equal(length(members[i].session), members[i].n_tokens);
        read_member(&side, &members[i], 0);
        close_session(members[i].session);
    }
    close_side(&side);
}

/* Memory in use now. */
static double lent(const struct cluster *nodes, struct kv_client *client)
{
    cluster_look(nodes);
    return cluster_total(client, "status", "memory_used_bytes");
}

static void forks_cost_bookkeeping_only(void **state)
{
    enum {
        FORKS = 1000,
        GROWTH_MAX = 24 << 20
    };
    static struct kv_session *forks[FORKS];
    struct kv_session *session;
    struct side side;
    double before, after;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[EVEN]);
    put(&side, session, 0, 1000, 1, KV_OK);
    before = lent(&cluster, side.client);
    for (unsigned i = 0; i < FORKS; i++)
        forks[i] = fork_session(session, 1000 - i % 300);
    after = lent(&cluster, side.client);
    assert_true(before >= 1000.0 * 4096);
    assert_true(after - before <= GROWTH_MAX);
    append(&side, forks[0], 1000, 2);
    append(&side, session, 1000, 3);
    read_back(&side, forks[0], 1000, 1, 2);
    read_back(&side, session, 1000, 1, 3);
    read_back(&side, forks[FORKS - 1], 0, 1000 - (FORKS - 1) % 300, 1);
    close_session(session);
    for (unsigned i = 0; i < FORKS; i++) {
        if (i % 100 == 0)
            read_back(&side, forks[i], 0, 1000 - i % 300, 1);
        close_session(forks[i]);
    }
    close_side(&side);
}

static void other_clients_take_up_sessions(void **state)
{
    struct kv_session *here, *there;
    struct kv_ticket ticket, wrong;
    struct side a, b;
    struct kv_op *op;
    kv_status_t status;

    (void)state;
    open_side(&a);
    open_side(&b);
    here = open_session(&a, &models[RAGGED]);
    put(&a, here, 0, 200, 1, KV_OK);
    kv_session_ticket(here, &ticket);
    there = resume(&b, &ticket);
    assert_memory_equal(kv_session_schema(there), kv_session_schema(here), sizeof(kv_schema_t));
    assert_int_equal(length(there), 200);
    read_back(&b, there, 0, 200, 1);
    append(&b, there, 200, 1);
    read_back(&a, here, 0, 201, 1);

    /* A fork leaves nobody behind. */
    close_session(fork_session(here, 100));
    read_back(&b, there, 0, 201, 1);
    append(&b, there, 201, 1);
    read_back(&a, here, 0, 202, 1);
    assert_int_equal(kv_session_generation(here), 1);

    /* A truncate leaves the other's handle behind. */
    for (unsigned i = 0; i < 2; i++) {
        const uint32_t tokens = length(here) - 10;

        truncate_session(here, tokens, KV_OK);
        read_fails(&b, there, 0, 10, 0, KV_STALE);
        put(&b, there, tokens, 1, 1, KV_STALE);
        truncate_session(there, 1, KV_STALE);
        kv_session_free(there);
        there = resume(&b, &ticket);
        assert_int_equal(kv_session_generation(there), kv_session_generation(here));
        read_back(&b, there, 0, tokens, 1);
        put(&b, there, tokens, 30, 1, KV_OK);
        read_back(&a, here, 0, tokens + 30, 1);
    }

    wrong = ticket;
    wrong.token.bytes[15] ^= 1;
    op = NULL;
    status = kv_resume_begin(b.client, &wrong, 0, &op);
    assert_int_equal(status, KV_OK);
    status = kv_finish(op);
    assert_true(status == KV_DENIED || status == KV_NOT_FOUND);
    wrong = ticket;
    wrong.session_id.bytes[0] ^= 1;
    status = kv_resume_begin(b.client, &wrong, 0, &op);
    expect(op, status, KV_NOT_FOUND, "resume");

    /* Its client goes without a word: the session stays. */
    close_side(&a);
    read_back(&b, there, 0, 100, 1);
    close_session(there);
    status = kv_resume_begin(b.client, &ticket, 0, &op);
    expect(op, status, KV_NOT_FOUND, "resume");
    close_side(&b);
}

static void impossible_lifecycles(void **state)
{
    struct kv_session *session;
    struct kv_op *op = NULL;
    struct side side;
    kv_status_t status;

    (void)state;
    open_side(&side);
    session =
        open_session_as(&side, &models[EVEN], &(struct kv_session_options){.tokens_max = 150});
    put(&side, session, 0, 100, 1, KV_OK);
    status = kv_fork_begin(session, 101, 0, &op);
    expect(op, status, KV_INVALID, "fork");
    read_back(&side, session, 0, 100, 1);
    put(&side, session, 100, 51, 1, KV_TOO_LARGE);
    put(&side, session, 100, 50, 1, KV_OK);
    read_fails(&side, session, 149, 2, 0, KV_TOO_LARGE);
    close_session(fork_session(session, 150));
    close_session(fork_session(session, 0));
    truncate_session(session, 0, KV_OK);
    put(&side, session, 0, 150, 2, KV_OK);
    read_back(&side, session, 0, 150, 2);

    /* Another schema under the same fingerprint. */
    struct kv_model_info other = models[EVEN];
    other.schema.layers[0].d_v++;
    status = kv_open_begin(side.client, &other, NULL, 0, &op);
    expect(op, status, KV_EXISTS, "open");
    close_session(session);
    close_side(&side);
}

/* ---- memory and leases ------------------------------------------------------------------- */

static void closed_sessions_give_memory_back(void **state)
{
    struct kv_session *session;
    struct side side;
    double idle = 0;

    (void)state;
    open_side(&side);
    /* The first round leaves pages for bookkeeping behind, which stay. */
    for (unsigned i = 0; i < 3; i++) {
        session = open_session(&side, &models[EVEN]);
        put(&side, session, 0, 3000, 1, KV_OK);
        assert_true(lent(&cluster, side.client) >= 3000.0 * 4096);
        truncate_session(session, 1000, KV_OK);
        put(&side, session, 1000, 500, 2, KV_OK);
        close_session(session);
        if (i == 0)
            idle = lent(&cluster, side.client);
        else
            assert_true(cluster_becomes(side.client, "status", "memory_used_bytes", idle));
    }
    assert_true(cluster_becomes(side.client, "status", "requests_in_flight", 0));
    close_side(&side);
}

/* A cluster of its own for what would disturb others. */
static bool open_own(struct cluster *own, uint64_t memory_per_thread, uint32_t lease_ms)
{
    struct cluster_setup setup = {
        .row = subject.row,
        .transports = subject.transports,
        .n_nodes = shape.n_nodes,
        .n_threads = shape.n_threads,
        .memory_bytes = memory_per_thread * shape.n_threads,
        .lease_ms = lease_ms,
    };

    return cluster_open(own, &setup);
}

/* Puts that are begun together may be begun in any order, also if there are more of them than
 * credits: those that wait for earlier rows leave credits to the puts that bring them. */
static void puts_in_any_order(void **state)
{
    enum {
        N_PUTS = 40,
        TOKENS_EACH = 10,
        CREDITS = 8,
        DEADLINE_MS = 20000,
    };
    const struct cluster_setup setup = {
        .row = subject.row,
        .transports = subject.transports,
        .n_nodes = 1,
        .n_threads = 1,
        .memory_bytes = 32 << 20,
        .credits = CREDITS,
    };
    struct kv_random random;
    struct cluster own;
    struct side side;

    (void)state;
    kv_random_init(&random, 4711);
    assert_true(cluster_open(&own, &setup));
    open_side_as(&side, &own, NULL);
    for (unsigned round = 0; round < 4; round++) {
        struct kv_session *session = open_session(&side, &models[EVEN]);
        struct kv_op *ops[N_PUTS];
        unsigned order[N_PUTS];

        for (unsigned i = 0; i < N_PUTS; i++)
            order[i] = N_PUTS - 1 - i;
        for (unsigned i = N_PUTS; round > 0 && i-- > 1;) {
            const unsigned other = (unsigned)kv_random_below(&random, i + 1);
            const unsigned swap = order[i];

            order[i] = order[other];
            order[other] = swap;
        }
        for (unsigned i = 0; i < N_PUTS; i++) {
            struct kv_rows box = all_rows(session, order[i] * TOKENS_EACH, TOKENS_EACH);
            const size_t bytes = kv_rows_bytes(kv_session_schema(session), &box);

            assert_int_equal(
                begin_put(&side, session, &box, i * bytes, 1, DEADLINE_MS, &ops[i]), KV_OK);
        }
        for (unsigned i = 0; i < N_PUTS; i++)
            expect(ops[i], KV_OK, KV_OK, "put");
        assert_int_equal(length(session), N_PUTS * TOKENS_EACH);
        read_back(&side, session, 0, N_PUTS * TOKENS_EACH, 1);
        close_session(session);
    }
    close_side(&side);
    cluster_close(&own);
}

/* A put of a sequence, of the layers' first heads (0: all heads). */
struct part {
    uint32_t layer_begin, n_layers, n_heads, token_begin, n_tokens;
};

/* Begins puts at once, in this order, with this many credits; all of them end well in time. */
static void puts_end(uint32_t credits, const struct part *parts, size_t n_parts)
{
    enum {
        PARTS_MAX = 8,
        DEADLINE_MS = 20000,
    };
    const struct cluster_setup setup = {
        .row = subject.row,
        .transports = subject.transports,
        .n_nodes = 1,
        .n_threads = 1,
        .memory_bytes = 64 << 20,
        .credits = credits,
    };
    struct kv_op *ops[PARTS_MAX];
    struct kv_session *session;
    struct cluster own;
    struct side side;
    size_t offset = 0;

    assert_true(cluster_open(&own, &setup));
    open_side_as(&side, &own, NULL);
    session = open_session(&side, &models[EVEN]);
    for (size_t i = 0; i < n_parts; i++) {
        const struct kv_rows box = {
            .layer_begin = parts[i].layer_begin,
            .n_layers = parts[i].n_layers,
            .n_kv_heads = parts[i].n_heads,
            .token_begin = parts[i].token_begin,
            .n_tokens = parts[i].n_tokens,
        };

        assert_int_equal(begin_put(&side, session, &box, offset, 1, DEADLINE_MS, &ops[i]),
                         KV_OK);
        offset += kv_rows_bytes(kv_session_schema(session), &box);
    }
    for (size_t i = 0; i < n_parts; i++)
        expect(ops[i], KV_OK, KV_OK, "put");
    close_session(session);
    close_side(&side);
    cluster_close(&own);
}

/* The last but one brings what the first waits for, and is begun after one that waits for the
 * first. */
static void puts_of_other_layers_pass(void **state)
{
    static const struct part parts[] = {
        {0, 2, 0, 32, 32}, {0, 1, 0, 64, 32}, {0, 2, 0, 96, 32}, {0, 2, 0, 128, 32},
        {1, 1, 0, 64, 32}, {0, 1, 0, 0, 32},  {1, 1, 0, 0, 32},
    };

    (void)state;
    puts_end(8, parts, sizeof(parts) / sizeof(parts[0]));
}

/* Puts of any layers, with any polls between them: one that was begun too early, with nothing
 * before it under way, is refused and begun again. */
static void puts_between_polls(void **state)
{
    enum {
        N_STEPS = 12,
        N_PUTS = N_STEPS * 4,
        TOKENS_EACH = 10,
        DEADLINE_MS = 30000,
        SOON_US = 15000000,
    };
    const struct cluster_setup setup = {
        .row = subject.row,
        .transports = subject.transports,
        .n_nodes = 1,
        .n_threads = 1,
        .memory_bytes = 32 << 20,
        .credits = 8,
    };
    struct cluster own;
    struct side side;

    (void)state;
    assert_true(cluster_open(&own, &setup));
    open_side_as(&side, &own, NULL);
    for (unsigned seed = 0; seed < 6; seed++) {
        struct kv_session *session = open_session(&side, &models[EVEN]);
        struct kv_op *ops[N_PUTS] = {NULL};
        struct kv_rows boxes[N_PUTS];
        size_t offsets[N_PUTS];
        size_t offset = 0;
        unsigned n_puts = 0, n_left;
        struct kv_random random;

        kv_random_init(&random, seed);
        for (uint32_t i = 0; i < N_STEPS; i++)
            for (uint32_t layer = 0, n; layer < 4; layer += n) {
                n = 1 + (uint32_t)kv_random_below(&random, 4 - layer);
                boxes[n_puts++] = (struct kv_rows){.layer_begin = layer,
                                                   .n_layers = n,
                                                   .token_begin = i * TOKENS_EACH,
                                                   .n_tokens = TOKENS_EACH};
            }
        for (unsigned i = n_puts; i-- > 1;) {
            const unsigned other = (unsigned)kv_random_below(&random, i + 1);
            const struct kv_rows swap = boxes[i];

            boxes[i] = boxes[other];
            boxes[other] = swap;
        }
        for (unsigned i = 0; i < n_puts; i++) {
            offsets[i] = offset;
            offset += kv_rows_bytes(kv_session_schema(session), &boxes[i]);
        }
        n_left = n_puts;
        for (unsigned i = 0; n_left > 0; i = (i + 1) % n_puts) {
            if (ops[i] != NULL && kv_op_status(ops[i]) == KV_NOT_READY) {
                assert_true(kv_op_elapsed_us(ops[i]) < SOON_US);
                kv_op_free(ops[i]);
                ops[i] = NULL;
            }
            if (ops[i] == NULL) {
                assert_int_equal(
                    begin_put(&side, session, &boxes[i], offsets[i], 1, DEADLINE_MS, &ops[i]),
                    KV_OK);
                n_left = n_puts;
            } else if (kv_op_status(ops[i]) == KV_OK) {
                n_left--;
                if (n_left > 0)
                    continue;
            } else {
                if (kv_op_status(ops[i]) != KV_IN_PROGRESS)
                    fail_msg("put: %s", kv_op_detail(ops[i]));
                n_left = n_puts;
            }
            for (uint64_t polls = kv_random_below(&random, 4); polls-- > 0;)
                kv_poll(side.client);
        }
        for (unsigned i = 0; i < n_puts; i++)
            expect(ops[i], KV_OK, KV_OK, "put");
        assert_int_equal(length(session), N_STEPS * TOKENS_EACH);
        read_back(&side, session, 0, N_STEPS * TOKENS_EACH, 1);
        close_session(session);
    }
    close_side(&side);
    cluster_close(&own);
}

/* The failure is KV_NOT_FOUND, for a reason whose words begin so. */
static void expect_ended(struct kv_op *op, kv_status_t begun, const char *why)
{
    assert_int_equal(begun, KV_OK);
    assert_int_equal(kv_wait(op), KV_NOT_FOUND);
    if (strstr(kv_op_detail(op), why) == NULL)
        fail_msg("not `%s`: %s", why, kv_op_detail(op));
    kv_op_free(op);
}

static void read_finds_ended(struct side *side, struct kv_session *session, const char *why)
{
    struct kv_rows_io io = {.buffer = side->in};
    struct kv_rows box = all_rows(session, 0, 10);
    struct kv_op *op = NULL;
    kv_status_t status = kv_read_begin(session, &box, &io, 0, &op);

    expect_ended(op, status, why);
}

/* Who comes too late is told why, by data threads and by the control thread, whoever has the
 * session's place by then; who only guesses is not. */
static void ended_sessions_are_told_of(void **state)
{
    struct kv_session *late, *closed, *other, *resumed;
    struct kv_ticket ticket, guess;
    struct kv_op *op = NULL;
    struct cluster own;
    struct side a, b;
    kv_status_t status;

    (void)state;
    assert_true(open_own(&own, 64 << 20, 0));
    open_side_as(&a, &own, NULL);
    open_side_as(&b, &own, NULL);
    late = open_session_as(&a, &models[EVEN], &(struct kv_session_options){.lease_ms = 1000});
    kv_session_ticket(late, &ticket);
    put(&a, late, 0, 10, 1, KV_OK);
    assert_true(
        cluster_becomes(b.client, "status", "sessions", 0)); /* nobody polls the other */
    other = open_session(&b, &models[EVEN]);
    put(&b, other, 0, 10, 2, KV_OK);
    read_finds_ended(&a, late, ": its lease of 1.0 s ended ");
    status = kv_renew_begin(late, 0, 0, &op);
    expect_ended(op, status, ": its lease of 1.0 s ended ");
    status = kv_resume_begin(b.client, &ticket, 0, &op);
    expect_ended(op, status, ": its lease of 1.0 s ended ");
    guess = ticket;
    guess.token.bytes[15] ^= 1;
    status = kv_resume_begin(b.client, &guess, 0, &op);
    expect_ended(op, status, ": no session with that token");
    kv_session_free(late);

    closed = open_session(&a, &models[EVEN]);
    put(&a, closed, 0, 10, 1, KV_OK);
    kv_session_ticket(closed, &ticket);
    resumed = resume(&b, &ticket);
    close_session(resumed);
    read_finds_ended(&a, closed, ": a client closed it ");
    status = kv_length_begin(closed, 0, &op);
    expect_ended(op, status, ": a client closed it ");
    kv_session_free(closed);
    read_back(&b, other, 0, 10, 2);
    close_side(&a);
    close_side(&b);
    cluster_close(&own);
}

/* The i-th of any number of models. */
static struct kv_model_info numbered_model(unsigned i)
{
    static const uint16_t heads = 1;
    struct kv_model_info model;
    char name[32];

    snprintf(name, sizeof(name), "model %u", i);
    test_model(&model, name, 1, &heads, 16, 16);
    return model;
}

static kv_status_t try_open(struct side *side,
                            const struct kv_model_info *model,
                            struct kv_session **ret_session,
                            char *detail,
                            size_t detail_bytes)
{
    struct kv_op *op;
    kv_status_t status = kv_open_begin(side->client, model, NULL, 0, &op);

    if (status != KV_OK) {
        snprintf(detail, detail_bytes, "%s", kv_client_detail(side->client));
        return status;
    }
    status = kv_wait(op);
    snprintf(detail, detail_bytes, "%s", kv_op_detail(op));
    *ret_session = kv_op_session(op);
    kv_op_free(op);
    return status;
}

/* 256 models in use are 256; those that nobody uses make room for others. */
static void models_that_nobody_uses_make_room(void **state)
{
    static struct kv_session *sessions[256];
    struct kv_model_info model;
    struct kv_session *session = NULL;
    struct cluster own;
    char detail[512];
    struct side side;

    (void)state;
    if (!is_first_shape())
        return;
    assert_true(open_own(&own, 64 << 20, 0));
    open_side_as(&side, &own, NULL);
    for (unsigned i = 0; i < 600; i++) {
        model = numbered_model(i);
        close_session(open_session(&side, &model));
    }
    assert_int_equal(cluster_number(side.client, 0, "status", "models"), 256);
    for (unsigned i = 0; i < 256; i++) {
        model = numbered_model(i);
        sessions[i] = open_session(&side, &model);
        put(&side, sessions[i], 0, 3, i, KV_OK);
    }
    model = numbered_model(1000);
    assert_int_equal(try_open(&side, &model, &session, detail, sizeof(detail)), KV_NO_MEMORY);
    assert_non_null(strstr(detail, "too many models in use: limit 256"));
    for (unsigned i = 0; i < 256; i++)
        read_back(&side, sessions[i], 0, 3, i);

    /* A fork uses it, too. */
    session = fork_session(sessions[7], 3);
    close_session(sessions[7]);
    assert_int_equal(try_open(&side, &model, &sessions[7], detail, sizeof(detail)),
                     KV_NO_MEMORY);
    read_back(&side, session, 0, 3, 7);
    close_session(session);
    sessions[7] = open_session(&side, &model);
    put(&side, sessions[7], 0, 3, 7, KV_OK);
    for (unsigned i = 0; i < 256; i++) {
        read_back(&side, sessions[i], 0, 3, i);
        close_session(sessions[i]);
    }
    close_side(&side);
    cluster_close(&own);
}

static void count_record(
    void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    (void)key;
    (void)key_bytes;
    (void)value;
    (void)value_bytes;
    ++*(unsigned *)arg;
}

/* What is on the disk is what the table has; after a restart nobody uses it. */
static void models_outlive_a_restart(void **state)
{
    struct kv_model_info model;
    unsigned n_records = 0;
    struct cluster own;
    struct side side;

    (void)state;
    if (!is_first_shape())
        return;
    assert_true(open_own(&own, 64 << 20, 0));
    open_side_as(&side, &own, NULL);
    for (unsigned i = 0; i < 300; i++) {
        model = numbered_model(i);
        close_session(open_session(&side, &model));
    }
    close_side(&side);
    cluster_end(&own, 0);
    (void)kv_disk_scan(own.disks[0], KV_DISK_RECORDS, "model/", 6, count_record, &n_records);
    assert_int_equal(n_records, 256);
    cluster_start(&own, 0);
    open_side_as(&side, &own, NULL);
    assert_int_equal(cluster_number(side.client, 0, "status", "models"), 256);
    for (unsigned i = 0; i < 600; i += 2) {
        model = numbered_model(i);
        close_session(open_session(&side, &model));
    }
    assert_int_equal(cluster_number(side.client, 0, "status", "models"), 256);
    close_side(&side);
    cluster_close(&own);
}

/* A model of `n_sizes` different sizes of rows, none of which another `number` has. */
static struct kv_model_info model_of_sizes(unsigned number, uint32_t n_sizes)
{
    static const uint16_t heads[KV_LAYERS_MAX] = {[0 ... KV_LAYERS_MAX - 1] = 1};
    struct kv_model_info model;
    char name[32];

    snprintf(name, sizeof(name), "sizes %u", number);
    test_model(&model, name, n_sizes, heads, 16, 16);
    for (uint32_t i = 0; i < n_sizes; i++)
        model.schema.layers[i].d_v = (uint16_t)(17 + 2 * (number * KV_ROW_SIZES_MAX + i));
    return model;
}

/* Models with many sizes of rows, more at once than there are size classes: each stores its
 * rows, and so do those that come later. */
static void sizes_of_rows_do_not_run_out(void **state)
{
    enum {
        N_AT_ONCE = 10,
        ROUNDS = 2
    };
    struct kv_session *sessions[N_AT_ONCE], *session = NULL;
    struct kv_model_info model;
    struct cluster own;
    char detail[512];
    struct side side;

    (void)state;
    if (!is_first_shape())
        return;
    assert_true(open_own(&own, MEMORY_BYTES, 0));
    open_side_as(&side, &own, NULL);
    model = model_of_sizes(0, KV_ROW_SIZES_MAX + 1);
    assert_int_equal(try_open(&side, &model, &session, detail, sizeof(detail)), KV_INVALID);
    assert_non_null(strstr(detail, "more than 16 different sizes of rows"));

    for (unsigned round = 0; round < ROUNDS; round++) {
        for (unsigned i = 0; i < N_AT_ONCE; i++) {
            model = model_of_sizes(round * N_AT_ONCE + i, KV_ROW_SIZES_MAX);
            assert_int_equal(kv_schema_finish(&model.schema, NULL, 0), KV_OK);
            sessions[i] = open_session(&side, &model);
        }
        for (unsigned i = 0; i < N_AT_ONCE; i += N_AT_ONCE - 1) {
            put(&side, sessions[i], 0, 300, i, KV_OK);
            append(&side, sessions[i], 300, i);
            read_back(&side, sessions[i], 0, 301, i);
        }
        for (unsigned i = 0; i < N_AT_ONCE; i++)
            close_session(sessions[i]);
    }
    close_side(&side);
    cluster_close(&own);
}

static void full_memory(void **state)
{
    struct kv_session *first, *second;
    struct cluster own;
    struct side side;
    uint32_t n_first = 0, n_second = 0, step = 200;
    kv_status_t status;

    (void)state;
    assert_true(open_own(&own, 24 << 20, 0));
    open_side_as(&side, &own, NULL);
    first = open_session(&side, &models[EVEN]);
    second = open_session(&side, &models[EVEN]);
    do {
        struct kv_rows box = all_rows(first, n_first, step);
        struct kv_op *op;

        assert_int_equal(begin_put(&side, first, &box, 0, 1, 0, &op), KV_OK);
        status = kv_finish(op);
        if (status != KV_OK)
            break;
        n_first += step;
        box = all_rows(second, n_second, step);
        assert_int_equal(begin_put(&side, second, &box, 0, 2, 0, &op), KV_OK);
        status = kv_finish(op);
        if (status == KV_OK)
            n_second += step;
    } while (status == KV_OK && n_first < 100000);
    assert_int_equal(status, KV_NO_MEMORY);
    assert_int_equal(length(first), n_first);
    assert_int_equal(length(second), n_second);
    read_back(&side, first, 0, n_first, 1);
    read_back(&side, second, 0, n_second, 2);

    /* An object does not fit either, and leaves nothing. */
    struct kv_object object = {.name = "large", .buffer = side.out, .bytes = 16 << 20};
    struct kv_op *op = NULL;
    status = kv_objects_begin(side.client, KV_OBJECT_PUT, &object, 1, 0, &op);
    expect(op, status, KV_NO_MEMORY, "object_put");
    status = kv_objects_begin(side.client, KV_OBJECT_EXISTS, &object, 1, 0, &op);
    expect(op, status, KV_NOT_FOUND, "object_exists");

    close_session(first);
    put(&side, second, n_second, step, 2, KV_OK);
    put(&side, second, n_second + step, step, 2, KV_OK);
    read_back(&side, second, 0, n_second + 2 * step, 2);
    close_session(second);
    close_side(&side);
    cluster_close(&own);
}

/* Objects fill the memory of a node, however placement deals them to its threads. */
static void threads_share_memory(void **state)
{
    const uint64_t node_bytes = (UINT64_C(64) << 20) * shape.n_threads;
    struct kv_object object = {.bytes = 4 << 20};
    struct cluster own;
    struct side side;
    struct kv_op *op = NULL;
    char name[16];
    uint32_t n = 0;
    kv_status_t status;

    (void)state;
    if (shape.n_nodes > 1)
        skip();
    assert_true(open_own(&own, 64 << 20, 0));
    open_side_as(&side, &own, NULL);
    object.name = name;
    object.buffer = side.out;
    do {
        snprintf(name, sizeof(name), "%u", n++);
        op = NULL;
        status = kv_objects_begin(side.client, KV_OBJECT_PUT, &object, 1, 0, &op);
        assert_int_equal(status, KV_OK);
        status = kv_finish(op);
    } while (status == KV_OK && n * object.bytes <= node_bytes);
    assert_int_equal(status, KV_NO_MEMORY);
    /* Queries have a sixteenth, and bookkeeping some pages of each thread. */
    assert_true((n - 1) * object.bytes >= node_bytes / 100 * 85);
    close_side(&side);
    cluster_close(&own);
}

static void leases_end(void **state)
{
    struct kv_session *session;
    struct cluster own;
    struct kv_ticket ticket;
    struct side side;
    struct kv_op *op = NULL;
    kv_status_t status;
    double idle;

    (void)state;
    if (shape.n_nodes != shape.n_threads) /* it takes its time */
        skip();
    assert_true(open_own(&own, 64 << 20, LEASE_MS));
    open_side_as(&side, &own, NULL);
    session = open_session(&side, &models[EVEN]);
    put(&side, session, 0, 2000, 1, KV_OK);
    assert_in_range(kv_session_lease_ms(session), 1, LEASE_MS);
    /* While the client is polled, its leases are renewed. */
    for (uint64_t begin = kv_clock_now(&kv_clock_real);
         kv_clock_now(&kv_clock_real) - begin < 1200 * LEASE_MS;)
        kv_client_wait(side.client, 50000);
    read_back(&side, session, 0, 2000, 1);
    close_session(session);
    idle = lent(&own, side.client);

    session = open_session(&side, &models[EVEN]);
    put(&side, session, 0, 2000, 1, KV_OK);
    kv_session_ticket(session, &ticket);
    kv_session_free(session);
    assert_true(cluster_becomes(side.client, "status", "sessions", 0));
    assert_true(cluster_becomes(side.client, "status", "memory_used_bytes", idle));
    status = kv_resume_begin(side.client, &ticket, 0, &op);
    expect(op, status, KV_NOT_FOUND, "resume");
    close_side(&side);
    cluster_close(&own);
}

/* ---- objects
 * ----------------------------------------------------------------------------- */

static void object(struct side *side,
                   enum kv_object_verb verb,
                   struct kv_object *object,
                   kv_status_t wanted)
{
    struct kv_op *op = NULL;
    kv_status_t status = kv_objects_begin(side->client, verb, object, 1, 0, &op);

    if (status == KV_OK)
        status = kv_wait(op);
    if (status != wanted)
        fail_msg("object %s, verb %d, %zu bytes: %s, not %s", object->name, (int)verb,
                 object->bytes, kv_status_name(status), kv_status_name(wanted));
    if (op != NULL)
        assert_int_equal(object->status, wanted);
    kv_op_free(op);
}

static void objects_of_all_sizes(void **state)
{
    static const size_t sizes[] = {
        0,        1,
        100,      (32 << 10) - 1,
        32 << 10, (32 << 10) + 1,
        64 << 10, (64 << 10) + 1,
        300000,   (1 << 20) - 1,
        1 << 20,  (1 << 20) + 1,
        5 << 20,  64 << 20,
    };
    struct kv_buffer *out, *in;
    struct side side;
    double idle;

    (void)state;
    open_side(&side);
    assert_int_equal(kv_buffer_alloc(side.client, (64 << 20) + 1, &out), KV_OK);
    assert_int_equal(kv_buffer_alloc(side.client, (64 << 20) + 1, &in), KV_OK);
    idle = lent(&cluster, side.client);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        char name[32];
        struct kv_object one = {.name = name, .buffer = out, .bytes = sizes[i]};

        snprintf(name, sizeof(name), "size %zu", sizes[i]);
        object(&side, KV_OBJECT_EXISTS, &one, KV_NOT_FOUND);
        object(&side, KV_OBJECT_DELETE, &one, KV_NOT_FOUND);
        one.buffer = in;
        object(&side, KV_OBJECT_GET, &one, KV_NOT_FOUND);
        one = (struct kv_object){.name = name, .buffer = out, .bytes = sizes[i]};
        test_fill(kv_buffer_data(out), sizes[i], i);
        object(&side, KV_OBJECT_PUT, &one, KV_OK);
        object(&side, KV_OBJECT_PUT, &one, KV_OK);
        one.bytes = 0;
        object(&side, KV_OBJECT_EXISTS, &one, KV_OK);
        assert_int_equal(one.bytes, sizes[i]);

        one = (struct kv_object){.name = name, .buffer = in, .bytes = sizes[i] + 1};
        memset(kv_buffer_data(in), 0xa5, sizes[i] + 1);
        object(&side, KV_OBJECT_GET, &one, KV_OK);
        assert_int_equal(one.bytes, sizes[i]);
        assert_true(test_is_filled(kv_buffer_data(in), sizes[i], i));
        assert_int_equal(((uint8_t *)kv_buffer_data(in))[sizes[i]], 0xa5);
        if (sizes[i] > 0) {
            one.bytes = sizes[i] - 1;
            memset(kv_buffer_data(in), 0xa5, 1);
            object(&side, KV_OBJECT_GET, &one, KV_TOO_LARGE);
            assert_int_equal(one.bytes, sizes[i]);
            assert_int_equal(((uint8_t *)kv_buffer_data(in))[0], 0xa5);

            one = (struct kv_object){.name = name, .buffer = out, .bytes = sizes[i]};
            ((uint8_t *)kv_buffer_data(out))[sizes[i] - 1] ^= 1;
            object(&side, KV_OBJECT_PUT, &one, KV_EXISTS);
            one.bytes = sizes[i] - 1;
            object(&side, KV_OBJECT_PUT, &one, KV_EXISTS);
        }
        one = (struct kv_object){.name = name, .buffer = out};
        object(&side, KV_OBJECT_DELETE, &one, KV_OK);
        object(&side, KV_OBJECT_EXISTS, &one, KV_NOT_FOUND);
    }
    struct kv_object large = {.name = "too large", .buffer = out, .bytes = (64 << 20) + 1};
    struct kv_op *op;
    assert_int_equal(kv_objects_begin(side.client, KV_OBJECT_PUT, &large, 1, 0, &op),
                     KV_TOO_LARGE);
    assert_true(cluster_becomes(side.client, "status", "memory_used_bytes", idle) ||
                cluster_total(side.client, "status", "memory_used_bytes") < idle);
    close_side(&side);
}

static void batches_of_objects(void **state)
{
    enum {
        BATCH = 100
    };
    static struct kv_object objects[BATCH];
    static char names[BATCH][16];
    struct kv_random random;
    struct side side;
    struct kv_op *op = NULL;
    size_t offset = 0;
    kv_status_t status;

    (void)state;
    kv_random_init(&random, 5);
    open_side(&side);
    for (unsigned i = 0; i < BATCH; i++) {
        size_t bytes =
            i % 10 == 0 ? kv_random_below(&random, 1200000) : kv_random_below(&random, 50000);

        snprintf(names[i], sizeof(names[i]), "batch-%u", i);
        objects[i] = (struct kv_object){
            .name = names[i], .buffer = side.out, .offset = offset, .bytes = bytes};
        test_fill((uint8_t *)kv_buffer_data(side.out) + offset, bytes, i);
        offset += bytes;
        assert_true(offset <= BUFFER_BYTES);
    }
    status = kv_objects_begin(side.client, KV_OBJECT_PUT, objects, BATCH, 0, &op);
    expect(op, status, KV_OK, "object_put");
    status = kv_objects_begin(side.client, KV_OBJECT_EXISTS, objects, BATCH, 0, &op);
    expect(op, status, KV_OK, "object_exists");
    for (unsigned i = 0; i < BATCH; i++)
        objects[i].buffer = side.in;
    memset(kv_buffer_data(side.in), 0xa5, BUFFER_BYTES);
    status = kv_objects_begin(side.client, KV_OBJECT_GET, objects, BATCH, 0, &op);
    expect(op, status, KV_OK, "object_get");
    for (unsigned i = 0; i < BATCH; i++)
        assert_true(test_is_filled((uint8_t *)kv_buffer_data(side.in) + objects[i].offset,
                                   objects[i].bytes, i));

    /* One that is not there spoils the operation's status, not the others. */
    struct kv_object gone = objects[50];
    object(&side, KV_OBJECT_DELETE, &gone, KV_OK);
    memset(kv_buffer_data(side.in), 0xa5, BUFFER_BYTES);
    status = kv_objects_begin(side.client, KV_OBJECT_GET, objects, BATCH, 0, &op);
    expect(op, status, KV_NOT_FOUND, "object_get");
    for (unsigned i = 0; i < BATCH; i++) {
        assert_int_equal(objects[i].status, i == 50 ? KV_NOT_FOUND : KV_OK);
        if (i != 50)
            assert_true(test_is_filled((uint8_t *)kv_buffer_data(side.in) + objects[i].offset,
                                       objects[i].bytes, i));
    }
    status = kv_objects_begin(side.client, KV_OBJECT_DELETE, objects, BATCH, 0, &op);
    expect(op, status, KV_NOT_FOUND, "object_delete");
    status = kv_objects_begin(side.client, KV_OBJECT_DELETE, objects, 0, 0, &op);
    expect(op, status, KV_OK, "object_delete");

    /* Tenants do not see each other. */
    struct side other;
    open_side_as(&other, &cluster, &(struct cluster_client){.tenant = 7});
    struct kv_object mine = {.name = "mine", .buffer = side.out, .bytes = 100};
    object(&side, KV_OBJECT_PUT, &mine, KV_OK);
    struct kv_object theirs = {.name = "mine", .buffer = other.out, .bytes = 100};
    object(&other, KV_OBJECT_EXISTS, &theirs, KV_NOT_FOUND);
    object(&other, KV_OBJECT_DELETE, &theirs, KV_NOT_FOUND);
    object(&side, KV_OBJECT_DELETE, &mine, KV_OK);
    close_side(&other);
    close_side(&side);
}

/* Objects that were put as evictable make room for rows and for other objects; those that were not
 * stay. */
static void cached_objects_make_room(void **state)
{
    enum {
        N = 300,
        BYTES = 1 << 20,
        STEP = 200
    };
    struct kv_object cached = {.bytes = BYTES, .evictable = true};
    struct kv_object kept = {.name = "kept", .bytes = BYTES};
    struct kv_session *session;
    struct cluster own;
    struct side side;
    uint32_t n_there = 0, n_tokens = 0;
    kv_status_t status;
    char name[16];

    (void)state;
    assert_true(open_own(&own, 32 << 20, 0));
    open_side_as(&side, &own, NULL);
    kept.buffer = side.out;
    test_fill(kv_buffer_data(side.out), BYTES, 7);
    object(&side, KV_OBJECT_PUT, &kept, KV_OK);
    cached.name = name;
    for (uint32_t i = 0; i < N; i++) {
        snprintf(name, sizeof(name), "cached-%u", i);
        cached.buffer = side.out;
        test_fill(kv_buffer_data(side.out), BYTES, i);
        object(&side, KV_OBJECT_PUT, &cached, KV_OK);
    }
    for (uint32_t i = 0; i < N; i++) {
        struct kv_op *op;

        snprintf(name, sizeof(name), "cached-%u", i);
        cached.buffer = side.in;
        assert_int_equal(kv_objects_begin(side.client, KV_OBJECT_GET, &cached, 1, 0, &op),
                         KV_OK);
        status = kv_finish(op);
        if (status == KV_OK) {
            assert_true(test_is_filled(kv_buffer_data(side.in), BYTES, i));
            n_there++;
        } else {
            assert_int_equal(status, KV_NOT_FOUND);
        }
    }
    assert_true(n_there > 0 && n_there < N);
    cluster_look(&own);
    assert_true(cluster_total(side.client, "stats", "objects_evicted") >= N - n_there);

    /* Until nothing is left to evict. */
    session = open_session(&side, &models[EVEN]);
    do {
        struct kv_rows box = all_rows(session, n_tokens, STEP);
        struct kv_op *op;

        assert_int_equal(begin_put(&side, session, &box, 0, 1, 0, &op), KV_OK);
        status = kv_finish(op);
        n_tokens += status == KV_OK ? STEP : 0;
    } while (status == KV_OK);
    assert_int_equal(status, KV_NO_MEMORY);
    read_back(&side, session, 0, n_tokens, 1);
    kept.buffer = side.in;
    object(&side, KV_OBJECT_GET, &kept, KV_OK);
    assert_true(test_is_filled(kv_buffer_data(side.in), BYTES, 7));
    close_session(session);
    close_side(&side);
    cluster_close(&own);
}

/* The parts of what a node and each of its threads have in memory are the whole, and say where rows
 * and objects are. */
static void memory_is_told(void **state)
{
    static const char *const parts[] = {"memory_rows_bytes",    "memory_codes_bytes",
                                        "memory_index_bytes",   "memory_objects_bytes",
                                        "memory_records_bytes", "memory_unused_bytes"};
    enum {
        N = 5,
        BYTES = 1 << 20,
        N_TOKENS = 2000
    };
    struct kv_object one = {.bytes = BYTES, .evictable = true};
    struct kv_session *session;
    struct cluster own;
    struct side side;
    double rows, whole = 0, sum = 0, by_thread = 0;
    char name[16];

    (void)state;
    assert_true(open_own(&own, 64 << 20, 0));
    open_side_as(&side, &own, NULL);
    cluster_look(&own);
    assert_int_equal(cluster_total(side.client, "status", "memory_rows_bytes"), 0);
    assert_int_equal(cluster_total(side.client, "status", "memory_objects_bytes"), 0);
    session = open_session(&side, &models[EVEN]);
    put(&side, session, 0, N_TOKENS, 1, KV_OK);
    cluster_look(&own);
    rows = cluster_total(side.client, "status", "memory_rows_bytes");
    assert_true(rows >= (double)N_TOKENS * kv_schema_token_bytes(kv_session_schema(session)));
    assert_true(rows <= cluster_total(side.client, "status", "memory_used_bytes"));
    one.name = name;
    one.buffer = side.out;
    for (unsigned i = 0; i < N; i++) {
        snprintf(name, sizeof(name), "%u", i);
        object(&side, KV_OBJECT_PUT, &one, KV_OK);
    }
    cluster_look(&own);
    assert_int_equal(cluster_total(side.client, "status", "memory_rows_bytes"), rows);
    assert_true(cluster_total(side.client, "status", "memory_objects_bytes") >= N * BYTES);
    assert_true(cluster_total(side.client, "status", "memory_objects_bytes") < 1.2 * N * BYTES);
    for (unsigned i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        sum += cluster_total(side.client, "status", parts[i]);
    whole = cluster_total(side.client, "status", "memory_used_bytes");
    assert_int_equal(sum, whole);
    assert_true(whole + cluster_total(side.client, "status", "memory_free_bytes") <=
                cluster_total(side.client, "status", "memory_bytes"));
    for (uint32_t node = 0; node < shape.n_nodes; node++) {
        const struct kv_table *table;
        struct kv_op *op;

        assert_int_equal(kv_table_begin(side.client, node, "threads", 0, &op), KV_OK);
        assert_int_equal(kv_wait(op), KV_OK);
        table = kv_op_table(op);
        assert_int_equal(table->n_rows, shape.n_threads);
        for (uint32_t i = 0; i < table->n_rows; i++) {
            const struct kv_cell *cells = &table->cells[i * table->n_columns];
            double parts_of_it = 0;

            for (unsigned j = 2; j < 8; j++)
                parts_of_it += cells[j].number;
            assert_int_equal(parts_of_it, cells[1].number);
            by_thread += cells[1].number;
        }
        kv_op_free(op);
    }
    assert_int_equal(by_thread, whole);
    close_session(session);
    assert_true(cluster_becomes(side.client, "status", "memory_rows_bytes", 0));
    close_side(&side);
    cluster_close(&own);
}

/* Returns the row of the table of a node's sessions that has this id, or NULL. */
static const struct kv_cell *row_of(const struct kv_table *table, const struct kv_id128 *id)
{
    char hex[33];

    for (int i = 0; i < 16; i++)
        snprintf(hex + 2 * i, 3, "%02x", id->bytes[i]);
    for (uint32_t i = 0; i < table->n_rows; i++)
        if (strcmp(table->cells[i * table->n_columns + 1].text, hex) == 0)
            return &table->cells[i * table->n_columns];
    return NULL;
}

static uint32_t column_of(const struct kv_table *table, const char *name)
{
    uint32_t i = 0;

    while (i < table->n_columns && strcmp(table->columns[i], name) != 0)
        i++;
    assert_true(i < table->n_columns);
    return i;
}

/* The tables of sessions say how many tokens each has on the node, with the bytes of its rows, who
 * opened it, and when; and an operator closes any of its tenant, without its token. */
static void operators_see_and_close_sessions(void **state)
{
    enum {
        N_TOKENS = 300,
        MORE = 40
    };
    const struct kv_id128 none = {.bytes = {1, 2, 3}};
    struct side side, operator, other;
    struct kv_session *session, *child;
    struct kv_ticket ticket, child_ticket;
    struct kv_op *op = NULL;
    double bytes = 0, child_bytes = 0;
    kv_status_t status;

    (void)state;
    open_side(&side);
    open_side(&operator);
    open_side_as(&other, &cluster, &(struct cluster_client){.tenant = 7});
    session = open_session(&side, &models[EVEN]);
    put(&side, session, 0, N_TOKENS, 1, KV_OK);
    child = fork_session(session, N_TOKENS - 10);
    put(&side, session, N_TOKENS, MORE, 1, KV_OK);
    kv_session_ticket(session, &ticket);
    kv_session_ticket(child, &child_ticket);
    for (uint32_t node = 0; node < shape.n_nodes; node++) {
        const struct kv_cell *row, *child_row;
        const struct kv_table *table;

        assert_int_equal(kv_table_begin(operator.client, node, "sessions", 0, &op), KV_OK);
        assert_int_equal(kv_wait(op), KV_OK);
        table = kv_op_table(op);
        row = row_of(table, &ticket.session_id);
        child_row = row_of(table, &child_ticket.session_id);
        assert_true(row != NULL && child_row != NULL);
        assert_int_equal(row[column_of(table, "tokens")].number, N_TOKENS + MORE);
        assert_int_equal(child_row[column_of(table, "tokens")].number, N_TOKENS - 10);
        bytes += row[column_of(table, "bytes")].number;
        child_bytes += child_row[column_of(table, "bytes")].number;
        assert_true(strlen(row[column_of(table, "owner")].text) > 0);
        assert_string_equal(row[column_of(table, "owner")].text,
                            child_row[column_of(table, "owner")].text);
        assert_true(row[column_of(table, "age_s")].number < 600);
        assert_true(row[column_of(table, "age_s")].number >=
                    child_row[column_of(table, "age_s")].number);
        kv_op_free(op);
    }
    assert_true(bytes >=
                (N_TOKENS + MORE) * (double)kv_schema_token_bytes(kv_session_schema(session)));
    assert_true(child_bytes > 0 && child_bytes <= bytes);

    for (uint32_t node = 0; node < shape.n_nodes; node++) {
        status = kv_close_id_begin(operator.client, node, &none, 0, &op);
        expect(op, status, KV_NOT_FOUND, "close by another id");
        status = kv_close_id_begin(other.client, node, &ticket.session_id, 0, &op);
        expect(op, status, KV_NOT_FOUND, "close by another tenant");
    }
    read_back(&side, session, 0, N_TOKENS, 1);
    for (uint32_t node = 0; node < shape.n_nodes; node++) {
        status = kv_close_id_begin(operator.client, node, &ticket.session_id, 0, &op);
        expect(op, status, KV_OK, "close by its id");
        status = kv_close_id_begin(operator.client, node, &ticket.session_id, 0, &op);
        expect(op, status, KV_NOT_FOUND, "close again");
    }
    status = kv_length_begin(session, 0, &op);
    assert_int_equal(status, KV_OK);
    assert_int_equal(kv_wait(op), KV_NOT_FOUND);
    if (strstr(kv_op_detail(op), "an operator closed it") == NULL)
        fail_msg("does not say who closed it: %s", kv_op_detail(op));
    kv_op_free(op);
    read_back(&side, child, 0, N_TOKENS - 10, 1);
    close_session(child);
    kv_session_free(session);
    close_side(&other);
    close_side(&operator);
    close_side(&side);
}

static _Atomic unsigned n_scarce, n_full;

static void count_warnings(void *arg, enum kv_log_level level, const char *line)
{
    (void)arg;
    n_scarce += level == KV_LOG_WARN && strstr(line, "memory: 90 % of ") != NULL;
    n_full += level == KV_LOG_WARN && strstr(line, "memory: 100 % of ") != NULL;
}

/* Waits until the node's control thread has looked around. */
static void wait_for_control(struct side *side)
{
    const double begin_s = cluster_number(side->client, 0, "status", "uptime_s");

    while (cluster_number(side->client, 0, "status", "uptime_s") < begin_s + 0.1)
        continue;
}

/* One warning when memory gets scarce, and one when there is none, each time that this happens. */
static void full_memory_is_told(void **state)
{
    struct kv_object_list_options all = {.prefix = "full-", .deletes = true};
    struct kv_object one = {.bytes = 1 << 20};
    struct cluster own;
    struct side side;
    struct kv_op *op;
    char name[16];

    (void)state;
    if (!is_first_shape())
        skip();
    assert_true(open_own(&own, 48 << 20, 0));
    open_side_as(&side, &own, NULL);
    one.name = name;
    one.buffer = side.out;
    kv_log_set_sink(count_warnings, NULL);
    for (unsigned time = 1; time <= 2; time++) {
        unsigned n = 0;
        kv_status_t status = KV_OK;

        while (status == KV_OK) {
            snprintf(name, sizeof(name), "full-%u", n++);
            assert_int_equal(kv_objects_begin(side.client, KV_OBJECT_PUT, &one, 1, 0, &op),
                             KV_OK);
            status = kv_finish(op);
            if (n % 4 == 0) {
                cluster_look(&own);
                wait_for_control(&side);
            }
            if (status == KV_OK && n < 33) /* four fifths of what queries leave of 48 MiB */
                assert_true(n_scarce == time - 1 && n_full == time - 1);
        }
        assert_int_equal(status, KV_NO_MEMORY);
        cluster_look(&own);
        wait_for_control(&side);
        wait_for_control(&side);
        assert_int_equal(n_scarce, time);
        assert_int_equal(n_full, time);
        assert_int_equal(kv_object_list_begin(side.client, 0, &all, 0, &op), KV_OK);
        assert_int_equal(kv_finish(op), KV_OK);
        cluster_look(&own);
        wait_for_control(&side);
    }
    kv_log_set_sink(NULL, NULL);
    close_side(&side);
    cluster_close(&own);
}

/* Lists, or deletes, the objects of all nodes whose names begin so, `limit` at a time.  Puts
 * another one behind each list.  Returns how many there are. */
static uint64_t
go_through(struct side *side, const char *prefix, uint32_t limit, bool deletes, bool puts)
{
    static uint32_t n_put;
    uint64_t n = 0;

    for (uint32_t node = 0; node < shape.n_nodes; node++) {
        struct kv_object_list_options options = {
            .prefix = prefix, .limit = limit, .deletes = deletes};
        bool is_last = false;

        while (!is_last) {
            const struct kv_object_list *list;
            struct kv_op *op;
            char name[32];
            struct kv_object one = {.name = name, .buffer = side->out, .bytes = 1};

            assert_int_equal(kv_object_list_begin(side->client, node, &options, 0, &op), KV_OK);
            if (kv_wait(op) != KV_OK)
                fail_msg("objects: %s", kv_op_detail(op));
            list = kv_op_object_list(op);
            assert_true(list->n_objects <= limit && list->n_deleted <= limit);
            for (uint32_t i = 0; i < list->n_objects; i++)
                assert_int_equal(strncmp(list->objects[i].name, prefix, strlen(prefix)), 0);
            n += deletes ? list->n_deleted : list->n_objects;
            is_last = list->is_last;
            options.from = list->next;
            kv_op_free(op);
            snprintf(name, sizeof(name), "%slater-%u", prefix, n_put++);
            if (puts)
                object(side, KV_OBJECT_PUT, &one, KV_OK);
        }
    }
    return n;
}

static void objects_are_listed(void **state)
{
    enum {
        N = 500
    };
    struct kv_object objects[N];
    char names[N][24];
    struct side side, other;
    struct kv_op *op = NULL;
    kv_status_t status;
    uint64_t n;

    (void)state;
    open_side(&side);
    for (unsigned i = 0; i < N; i++) {
        snprintf(names[i], sizeof(names[i]), "list/%u/%u", i % 2, i);
        objects[i] = (struct kv_object){.name = names[i], .buffer = side.out, .bytes = i};
    }
    status = kv_objects_begin(side.client, KV_OBJECT_PUT, objects, N, 0, &op);
    expect(op, status, KV_OK, "object_put");
    assert_int_equal(go_through(&side, "list/", 1000, false, false), N);
    assert_int_equal(go_through(&side, "list/1/", 7, false, false), N / 2);
    open_side_as(&other, &cluster, &(struct cluster_client){.tenant = 7});
    assert_int_equal(go_through(&other, "", 100, false, false), 0);
    assert_int_equal(go_through(&other, "list/", 100, true, false), 0);
    close_side(&other);
    /* With others being put meanwhile, lists and deletions come to an end. */
    n = go_through(&side, "list/0/", 3, false, true);
    assert_true(n >= N / 2);
    assert_true(go_through(&side, "list/", 3, true, true) >= N);
    (void)go_through(&side, "list/", 1000, true, false);
    assert_int_equal(go_through(&side, "list/", 1000, false, false), 0);
    for (unsigned i = 0; i < N; i += 100)
        object(&side, KV_OBJECT_EXISTS, &objects[i], KV_NOT_FOUND);
    close_side(&side);
}

/* Returns how long the object of that name will be there yet, in ms. */
static uint64_t ttl_left(struct side *side, const char *name)
{
    uint64_t left_ms = 0;
    unsigned n = 0;

    for (uint32_t node = 0; node < shape.n_nodes; node++) {
        const struct kv_object_list_options options = {.prefix = name};
        const struct kv_object_list *list;
        struct kv_op *op;

        assert_int_equal(kv_object_list_begin(side->client, node, &options, 0, &op), KV_OK);
        if (kv_wait(op) != KV_OK)
            fail_msg("objects: %s", kv_op_detail(op));
        list = kv_op_object_list(op);
        assert_true(list->is_last);
        for (uint32_t i = 0; i < list->n_objects; i++, n++)
            left_ms = list->objects[i].ttl_left_ms;
        kv_op_free(op);
    }
    assert_int_equal(n, 1);
    return left_ms;
}

/* Objects whose put says nothing of their time have the node's, others what they say, which may be
 * none; of several puts, the longest counts. */
static void objects_have_the_nodes_time(void **state)
{
    enum {
        NODES_MS = 2000 * 1000,
        MOST_MS = 2 * NODES_MS,
        LEAST_MS = NODES_MS / 2,
    };
    const struct cluster_setup setup = {
        .row = subject.row,
        .transports = subject.transports,
        .n_nodes = shape.n_nodes,
        .n_threads = shape.n_threads,
        .memory_bytes = 64 << 20,
        .object_ttl_s = NODES_MS / 1000,
    };
    struct kv_object one = {.bytes = 100};
    struct cluster own;
    struct side side;

    (void)state;
    assert_true(cluster_open(&own, &setup));
    open_side_as(&side, &own, NULL);
    one.buffer = side.out;
    one.name = "short";
    one.ttl_ms = LEAST_MS;
    object(&side, KV_OBJECT_PUT, &one, KV_OK);
    assert_in_range(ttl_left(&side, one.name), 1, LEAST_MS);
    one.ttl_ms = 0;
    object(&side, KV_OBJECT_PUT, &one, KV_OK);
    assert_in_range(ttl_left(&side, one.name), LEAST_MS + 1, NODES_MS);
    one.name = "default";
    object(&side, KV_OBJECT_PUT, &one, KV_OK);
    assert_in_range(ttl_left(&side, one.name), LEAST_MS + 1, NODES_MS);
    one.ttl_ms = LEAST_MS;
    object(&side, KV_OBJECT_PUT, &one, KV_OK);
    assert_in_range(ttl_left(&side, one.name), LEAST_MS + 1, NODES_MS);
    one.ttl_ms = MOST_MS;
    object(&side, KV_OBJECT_PUT, &one, KV_OK);
    assert_in_range(ttl_left(&side, one.name), NODES_MS + 1, MOST_MS);
    one.ttl_ms = KV_OBJECT_TTL_NONE;
    object(&side, KV_OBJECT_PUT, &one, KV_OK);
    assert_true(ttl_left(&side, one.name) == UINT64_MAX);
    one.name = "none";
    object(&side, KV_OBJECT_PUT, &one, KV_OK);
    assert_true(ttl_left(&side, one.name) == UINT64_MAX);
    one.ttl_ms = 0;
    object(&side, KV_OBJECT_PUT, &one, KV_OK);
    assert_true(ttl_left(&side, one.name) == UINT64_MAX);
    close_side(&side);
    cluster_close(&own);
}

/* ---- faults
 * ------------------------------------------------------------------------------ */

/* Messages get lost, come late and come twice: all goes well. */
static void lost_and_doubled_messages(void **state)
{
    static const struct fault_rule rules[] = {
        {FAULT_OUT, FAULT_DROP, KV_WIRE_REQUEST, 0, 1, 2},
        {FAULT_OUT, FAULT_DROP, KV_WIRE_BULK_REQUEST, 0, 0, 1},
        {FAULT_IN, FAULT_DROP, KV_WIRE_REPLY, 0, 1, 2},
        {FAULT_IN, FAULT_DROP, KV_WIRE_BULK_REPLY, 0, 0, 1},
        {FAULT_OUT, FAULT_TWICE, KV_WIRE_REQUEST, 0, 0, 0},
        {FAULT_OUT, FAULT_TWICE, KV_WIRE_BULK_REQUEST, 0, 0, 0},
        {FAULT_OUT, FAULT_GARBLE, KV_WIRE_REQUEST, 0, 0, 3},
        {FAULT_IN, FAULT_GARBLE, KV_WIRE_REPLY, 0, 0, 3},
    };
    struct kv_session *session, *child;
    struct faulty faulty;

    (void)state;
    for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
        open_faulty(&faulty, 100);
        fault_add(faulty.transport, &rules[i]);
        session = open_session(&faulty.side, &models[EVEN]);
        put(&faulty.side, session, 0, 10, 1, KV_OK);
        put(&faulty.side, session, 10, 600, 1, KV_OK);
        append(&faulty.side, session, 610, 1);
        child = fork_session(session, 300);
        truncate_session(session, 400, KV_OK);
        put(&faulty.side, session, 400, 5, 2, KV_OK);
        read_back(&faulty.side, session, 0, 400, 1);
        read_back(&faulty.side, session, 400, 5, 2);
        read_back(&faulty.side, child, 0, 300, 1);
        struct kv_object one = {.name = "faulty", .buffer = faulty.side.out, .bytes = 1500000};
        test_fill(kv_buffer_data(faulty.side.out), 1500000, 4);
        object(&faulty.side, KV_OBJECT_PUT, &one, KV_OK);
        one.buffer = faulty.side.in;
        object(&faulty.side, KV_OBJECT_GET, &one, KV_OK);
        assert_true(test_is_filled(kv_buffer_data(faulty.side.in), 1500000, 4));
        object(&faulty.side, KV_OBJECT_DELETE, &one, KV_OK);
        fault_clear(faulty.transport);
        assert_true(fault_hits(faulty.transport) > 0);
        close_session(child);
        close_session(session);
        assert_true(cluster_becomes(faulty.side.client, "status", "requests_in_flight", 0));
        close_faulty(&faulty);
    }
}

/* A cancel that gets through would end a request that a slow node has not yet begun. */
static const struct fault_rule no_cancel = {FAULT_OUT,    FAULT_DROP, KV_WIRE_REQUEST,
                                            KV_OP_CANCEL, 0,          0};

/* Waits until the other client sees that the node has done what it was first asked for, and it
 * has been asked for it again, which is held.  Where an answer to an earlier operation was so
 * late that it is the one that got lost, the operation ends instead. */
static void await_done_and_repeated(struct faulty *faulty,
                                    const struct kv_op *repeated,
                                    struct side *other,
                                    const char *name,
                                    kv_status_t wanted)
{
    kv_status_t status;

    do {
        struct kv_object one = {.name = name};
        struct kv_op *op;

        kv_client_wait(faulty->side.client, 1000);
        assert_int_equal(kv_objects_begin(other->client, KV_OBJECT_EXISTS, &one, 1, 0, &op),
                         KV_OK);
        status = kv_finish(op);
    } while (kv_op_status(repeated) == KV_IN_PROGRESS &&
             (status != wanted || fault_held(faulty->transport) == 0));
}

/* The answer to a delete is lost, so the delete is sent again, and by then another client
 * has put other bytes under the name: the delete has succeeded, and those stay. */
static void deletes_leave_later_objects_alone(void **state)
{
    static const struct fault_rule lost = {
        FAULT_IN, FAULT_DROP, KV_WIRE_REPLY, KV_OP_OBJECT_DELETE, 0, 1};
    static const struct fault_rule late = {FAULT_OUT,           FAULT_HOLD, KV_WIRE_REQUEST,
                                           KV_OP_OBJECT_DELETE, 1,          0};
    struct faulty faulty;
    struct side other;
    struct kv_op *op;

    (void)state;
    open_faulty(&faulty, 100);
    open_side(&other);
    for (unsigned is_put_again = 0; is_put_again < 2; is_put_again++) {
        struct kv_object one = {.name = "deleted", .buffer = other.out, .bytes = 1000};

        test_fill(kv_buffer_data(other.out), 2000, 8);
        object(&other, KV_OBJECT_PUT, &one, KV_OK);
        fault_clear(faulty.transport);
        fault_add(faulty.transport, &lost);
        fault_add(faulty.transport, &late);
        fault_add(faulty.transport, &no_cancel);
        assert_int_equal(
            kv_objects_begin(faulty.side.client, KV_OBJECT_DELETE, &one, 1, 0, &op), KV_OK);
        await_done_and_repeated(&faulty, op, &other, "deleted", KV_NOT_FOUND);
        struct kv_object later = {.name = "deleted", .buffer = other.out, .bytes = 2000};
        if (is_put_again)
            object(&other, KV_OBJECT_PUT, &later, KV_OK);
        fault_clear(faulty.transport);
        fault_release(faulty.transport);
        expect(op, KV_OK, KV_OK, "object_delete");
        later.buffer = other.in;
        object(&other, KV_OBJECT_GET, &later, is_put_again ? KV_OK : KV_NOT_FOUND);
        if (is_put_again)
            object(&other, KV_OBJECT_DELETE, &later, KV_OK);
    }
    close_side(&other);
    close_faulty(&faulty);
}

/* A put is sent again and has succeeded, and its object was deleted: neither the first
 * message, which comes late, nor one that is sent for want of an answer, brings it back. */
static void deleted_objects_stay_deleted(void **state)
{
    static const struct fault_rule first_late = {FAULT_OUT,        FAULT_HOLD, KV_WIRE_REQUEST,
                                                 KV_OP_OBJECT_PUT, 0,          1};
    static const struct fault_rule lost = {FAULT_IN,         FAULT_DROP, KV_WIRE_REPLY,
                                           KV_OP_OBJECT_PUT, 0,          1};
    static const struct fault_rule others_late = {FAULT_OUT,        FAULT_HOLD, KV_WIRE_REQUEST,
                                                  KV_OP_OBJECT_PUT, 1,          0};
    static const size_t sizes[] = {100, 30000, 1500000};
    struct faulty faulty;
    struct side other;
    struct kv_op *op;

    (void)state;
    open_faulty(&faulty, 100);
    open_side(&other);
    for (unsigned i = 0; i < 6; i++) {
        bool is_late = i % 2 == 0;
        struct kv_object one = {
            .name = "put", .buffer = faulty.side.out, .bytes = sizes[i / 2]};
        struct kv_object same = one;

        test_fill(kv_buffer_data(faulty.side.out), one.bytes, i);
        fault_add(faulty.transport, is_late ? &first_late : &lost);
        if (!is_late)
            fault_add(faulty.transport, &others_late);
        fault_add(faulty.transport, &no_cancel);
        assert_int_equal(kv_objects_begin(faulty.side.client, KV_OBJECT_PUT, &one, 1, 0, &op),
                         KV_OK);
        if (is_late)
            expect(op, KV_OK, KV_OK, "object_put");
        else
            await_done_and_repeated(&faulty, op, &other, "put", KV_OK);
        object(&other, KV_OBJECT_DELETE, &same, KV_OK);
        fault_clear(faulty.transport);
        fault_release(faulty.transport);
        if (!is_late)
            expect(op, KV_OK, KV_OK, "object_put");
        /* Goes the way of what was held, behind it. */
        object(&faulty.side, KV_OBJECT_EXISTS, &same, KV_NOT_FOUND);
        assert_true(cluster_becomes(other.client, "status", "requests_in_flight", 0));
        object(&other, KV_OBJECT_EXISTS, &same, KV_NOT_FOUND);
    }
    close_side(&other);
    close_faulty(&faulty);
}

static void poll_until_free(struct side *side, struct kv_buffer *buffer)
{
    uint64_t begin = kv_clock_now(&kv_clock_real);

    while (kv_buffer_busy(buffer)) {
        kv_client_wait(side->client, 5000);
        assert_true(kv_clock_now(&kv_clock_real) - begin < 60000000);
    }
}

/* Once kv_buffer_busy() has said no, the memory is the caller's: nothing lands any more. */
static void nothing_lands_late(void **state)
{
    static const struct {
        enum fault_action action;
        enum kv_wire_kind kind;
        uint32_t n_tokens;
        bool is_quarantined;
    } cases[] = {
        {FAULT_HOLD_LANDING, KV_WIRE_BULK_REPLY, 2048, true},
        {FAULT_HOLD, KV_WIRE_BULK_REPLY, 2048, false},
        {FAULT_HOLD, KV_WIRE_REPLY, 2048, false},
        {FAULT_HOLD, KV_WIRE_REPLY, 16, false},
    };
    enum {
        CANARY = 77
    };
    struct kv_session *session;
    struct faulty faulty;

    (void)state;
    open_faulty(&faulty, 100);
    struct side *side = &faulty.side;
    session = open_session(side, &models[EVEN]);
    put(side, session, 0, 2048, 1, KV_OK);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        for (unsigned cancel = 0; cancel < 2; cancel++) {
            struct kv_rows_io io = {.buffer = side->in};
            struct kv_rows box = {0, 1, 0, 1, 0, cases[i].n_tokens};
            struct kv_op *op;

            fault_add(faulty.transport, &(struct fault_rule){FAULT_IN, cases[i].action,
                                                             cases[i].kind, KV_OP_READ, 0, 0});
            assert_int_equal(kv_read_begin(session, &box, &io, 0, &op), KV_OK);
            while (fault_held(faulty.transport) == 0 && kv_op_status(op) == KV_IN_PROGRESS)
                kv_client_wait(side->client, 5000);
            poll_for(side->client, 150000);
            assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
            if (cancel)
                kv_cancel(op);
            else
                kvc_op_expire(op);
            assert_int_equal(kv_wait(op), cancel ? KV_CANCELLED : KV_DEADLINE);
            kv_op_free(op);
            assert_true(fault_held(faulty.transport) > 0);
            if (cases[i].is_quarantined) {
                poll_for(side->client, 50000);
                assert_true(kv_buffer_busy(side->in));
                assert_int_equal(kv_buffer_free(side->in), KV_BUSY);
                fault_clear(faulty.transport);
                fault_release(faulty.transport);
            }
            poll_until_free(side, side->in);
            test_fill(kv_buffer_data(side->in), BUFFER_BYTES, CANARY);
            fault_clear(faulty.transport);
            fault_release(faulty.transport);
            poll_for(side->client, 100000);
            assert_int_equal(fault_held(faulty.transport), 0);
            assert_true(test_is_filled(kv_buffer_data(side->in), BUFFER_BYTES, CANARY));
            read_box(side, session, &box, 1);
        }
    }

    /* A put's memory may be read by the transport until it has let go. */
    struct kv_rows box = {0, 1, 0, 1, 2048, 1024};
    struct kv_op *op;
    fault_add(faulty.transport, &(struct fault_rule){FAULT_OUT, FAULT_HOLD,
                                                     KV_WIRE_BULK_REQUEST, KV_OP_PUT, 0, 0});
    assert_int_equal(begin_put(side, session, &box, 0, 1, 250, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_DEADLINE);
    kv_op_free(op);
    assert_true(kv_buffer_busy(side->out));
    fault_clear(faulty.transport);
    fault_release(faulty.transport);
    poll_until_free(side, side->out);
    put_box(side, session, &box, 1, KV_OK);
    read_box(side, session, &box, 1);
    close_session(session);
    close_faulty(&faulty);
}

/* Rows that change on their way are refused where they arrive, and never served. */
static void changed_rows_are_refused(void **state)
{
    const struct {
        enum fault_action action;
        enum kv_wire_kind request, reply;
        uint32_t n_tokens;
    } cases[] = {
        {FAULT_FORGE, KV_WIRE_REQUEST, KV_WIRE_REPLY, 16}, /* rows in the body */
        {FAULT_GARBLE, subject.joins ? KV_WIRE_REQUEST : KV_WIRE_BULK_REQUEST,
         subject.joins ? KV_WIRE_REPLY : KV_WIRE_BULK_REPLY, 200},
        {FAULT_GARBLE, KV_WIRE_BULK_REQUEST, KV_WIRE_BULK_REPLY, 3000},
    };
    struct kv_session *session;
    struct faulty faulty;

    (void)state;
    open_faulty(&faulty, 15000); /* sent again, it would be right */
    struct side *side = &faulty.side;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kv_rows box = {1, 1, 2, 1, 0, cases[i].n_tokens};
        double corrupt = cluster_total(side->client, "stats", "corrupt_rows");

        session = open_session(side, &models[EVEN]);
        fault_add(faulty.transport, &(struct fault_rule){FAULT_OUT, cases[i].action,
                                                         cases[i].request, KV_OP_PUT, 0, 1});
        put_box(side, session, &box, 1, KV_CORRUPT);
        fault_clear(faulty.transport);
        assert_true(cluster_total(side->client, "stats", "corrupt_rows") > corrupt);

        /* Nothing of it is there. */
        struct kv_rows_io io = {.buffer = side->in};
        struct kv_rows last = {1, 1, 2, 1, cases[i].n_tokens - 1, 1};
        struct kv_op *op = NULL;
        kv_status_t status = kv_read_begin(session, &last, &io, 100, &op);
        assert_int_equal(status, KV_OK);
        expect_missing(op);
        put_box(side, session, &box, 1, KV_OK);
        read_box(side, session, &box, 1);

        for (unsigned fetches = 0; fetches < 2; fetches++) {
            uint32_t n_ids = cases[i].n_tokens, *ids = calloc(n_ids, sizeof(*ids));
            struct kv_fetch fetch = {1, 2, 1, &n_ids, ids, 0};

            assert_non_null(ids);
            for (uint32_t j = 0; j < n_ids; j++)
                ids[j] = n_ids - 1 - j;
            fault_add(faulty.transport,
                      &(struct fault_rule){FAULT_IN, cases[i].action, cases[i].reply,
                                           fetches ? KV_OP_FETCH : KV_OP_READ, 0, 1});
            status = fetches ? kv_fetch_begin(session, &fetch, &io, 0, &op)
                             : kv_read_begin(session, &box, &io, 0, &op);
            expect(op, status, KV_CORRUPT, "read or fetch");
            fault_clear(faulty.transport);
            status = fetches ? kv_fetch_begin(session, &fetch, &io, 0, &op)
                             : kv_read_begin(session, &box, &io, 0, &op);
            expect(op, status, KV_OK, "read or fetch");
            free(ids);
        }
        close_session(session);
    }

    static const size_t sizes[] = {1000, 40000, 1500000};
    for (size_t i = 0; i < 3; i++) {
        struct kv_object one = {.name = "changed", .buffer = side->out, .bytes = sizes[i]};
        bool in_body = sizes[i] < 32 << 10;
        bool joins = in_body || (subject.joins && sizes[i] < 60 << 10);

        test_fill(kv_buffer_data(side->out), sizes[i], i);
        fault_add(faulty.transport,
                  &(struct fault_rule){FAULT_OUT, in_body ? FAULT_FORGE : FAULT_GARBLE,
                                       joins ? KV_WIRE_REQUEST : KV_WIRE_BULK_REQUEST,
                                       KV_OP_OBJECT_PUT, 0, 1});
        object(side, KV_OBJECT_PUT, &one, KV_CORRUPT);
        fault_clear(faulty.transport);
        object(side, KV_OBJECT_EXISTS, &one, KV_NOT_FOUND);
        object(side, KV_OBJECT_PUT, &one, KV_OK);
        one.buffer = side->in;
        fault_add(faulty.transport,
                  &(struct fault_rule){FAULT_IN, in_body ? FAULT_FORGE : FAULT_GARBLE,
                                       joins ? KV_WIRE_REPLY : KV_WIRE_BULK_REPLY,
                                       KV_OP_OBJECT_GET, 0, 1});
        object(side, KV_OBJECT_GET, &one, KV_CORRUPT);
        fault_clear(faulty.transport);
        one = (struct kv_object){.name = "changed", .buffer = side->in, .bytes = sizes[i]};
        object(side, KV_OBJECT_GET, &one, KV_OK);
        assert_true(test_is_filled(kv_buffer_data(side->in), sizes[i], i));
        object(side, KV_OBJECT_DELETE, &one, KV_OK);
    }
    close_faulty(&faulty);
}

static void cancelled_operations(void **state)
{
    struct kv_session *session;
    struct kv_op *ops[100];
    struct kv_rows_io io;
    struct kv_rows box;
    struct side side;

    (void)state;
    open_side(&side);
    session = open_session(&side, &models[EVEN]);
    put(&side, session, 0, 600, 1, KV_OK);
    io = (struct kv_rows_io){.buffer = side.in};
    for (unsigned i = 0; i < 100; i++) {
        box = all_rows(session, i % 2 ? 600 : 0, i % 3 ? 10 : 300);
        /* A cancel that gets lost costs the node the request's deadline. */
        assert_int_equal(kv_read_begin(session, &box, &io, 2000, &ops[i]), KV_OK);
    }
    for (unsigned i = 0; i < 100; i++) {
        if (i % 5 == 0)
            kv_client_wait(side.client, 100);
        kv_cancel(ops[i]);
        assert_true(kv_op_status(ops[i]) == KV_CANCELLED || kv_op_status(ops[i]) == KV_OK);
        kv_op_free(ops[i]);
    }
    poll_until_free(&side, side.in);
    assert_true(cluster_becomes(side.client, "status", "requests_in_flight", 0));
    put(&side, session, 600, 300, 1, KV_OK);
    read_back(&side, session, 0, 900, 1);
    close_session(session);
    /* A client that is closed in the midst of it all. */
    session = open_session(&side, &models[EVEN]);
    box = all_rows(session, 0, 1000);
    for (unsigned i = 0; i < 4; i++)
        assert_int_equal(begin_put(&side, session, &box, 0, 1, 0, &ops[i]), KV_OK);
    close_side(&side);
    open_side(&side);
    assert_true(cluster_becomes(side.client, "status", "requests_in_flight", 0));
    close_side(&side);
}

/* ---- crowds ------------------------------------------------------------------------------ */

enum {
    N_CROWD = 30,
    CROWD_OPS = 52, /* of each: all together more than a data thread had works for */
    CROWD_TOKENS = 200,
    CROWD_IDS = 1500,    /* a body that needs a buffer of its own */
    CROWD_SILENT = 10000 /* ms after which a node that owes answers counts as dead */
};

/* One of a crowd: a client with operations that wait for rows. */
struct waiter {
    struct side side;
    struct kv_session *session;
    struct kv_op *ops[CROWD_OPS];
};

static void begin_waiting(struct waiter *waiter, const uint32_t *ids)
{
    struct kv_rows_io io = {.buffer = waiter->side.in};
    struct kv_rows box = {0, 1, 0, 1, 0, CROWD_TOKENS};

    for (unsigned i = 0; i < CROWD_OPS; i++) {
        const uint32_t n_ids = i % 8 == 1 ? CROWD_IDS : CROWD_TOKENS;
        const struct kv_fetch fetch = {0, 0, 1, &n_ids, ids, 0};
        struct kv_op **op = &waiter->ops[i];

        io.offset = (size_t)i * (BUFFER_BYTES / CROWD_OPS / 64 * 64);
        assert_int_equal(i % 2 == 0
                             ? kv_read_begin(waiter->session, &box, &io, UINT32_MAX, op)
                             : kv_fetch_begin(waiter->session, &fetch, &io, UINT32_MAX, op),
                         KV_OK);
    }
}

/* Who begins changes: of a queue that is full, the first ones take all that gets free. */
static void poll_crowd(struct waiter *crowd)
{
    static unsigned first;

    first++;
    for (unsigned i = 0; i < N_CROWD; i++)
        kv_poll(crowd[(first + i) % N_CROWD].side.client);
}

/* As expect(), and the others live on meanwhile. */
static void
expect_in_crowd(struct waiter *crowd, struct kv_op *op, kv_status_t begun, const char *what)
{
    while (begun == KV_OK && kv_op_status(op) == KV_IN_PROGRESS)
        poll_crowd(crowd);
    expect(op, begun, KV_OK, what);
}

/* Clients within their rights: each asks for rows that are not there yet, and waits.  None is
 * told that the node is dead, another one is served meanwhile, and all of them in the end. */
static void many_wait_and_others_are_served(void **state)
{
    const struct cluster_client setup = {.peer_timeout_ms = CROWD_SILENT};
    struct waiter *crowd = calloc(N_CROWD, sizeof(*crowd));
    uint32_t ids[CROWD_IDS];
    struct kv_session *session;
    struct cluster own;
    struct side side;
    uint64_t begin;

    (void)state;
    assert_non_null(crowd);
    if (shape.n_nodes > 1) { /* it takes its time */
        free(crowd);
        skip();
    }
    for (uint32_t i = 0; i < CROWD_IDS; i++)
        ids[i] = i % CROWD_TOKENS;
    assert_true(open_own(&own, 64 << 20, 0));
    open_side_as(&side, &own, &setup);
    session = open_session(&side, &models[EVEN]);
    put(&side, session, 0, 100, 1, KV_OK);
    for (unsigned i = 0; i < N_CROWD; i++) {
        open_side_as(&crowd[i].side, &own, &setup);
        crowd[i].session = open_session(&crowd[i].side, &models[EVEN]);
        begin_waiting(&crowd[i], ids);
    }
    begin = kv_clock_now(&kv_clock_real);
    do {
        poll_crowd(crowd);
        read_back(&side, session, 0, 100, 1);
    } while (kv_clock_now(&kv_clock_real) - begin < CROWD_SILENT * UINT64_C(1200));
    for (unsigned i = 0; i < N_CROWD; i++) {
        struct kv_rows box = all_rows(crowd[i].session, 0, CROWD_TOKENS);
        struct kv_op *op = NULL;
        kv_status_t status;

        for (unsigned j = 0; j < CROWD_OPS; j++)
            if (kv_op_status(crowd[i].ops[j]) != KV_IN_PROGRESS)
                fail_msg("%u, %u: %s", i, j, kv_op_detail(crowd[i].ops[j]));
        status = begin_put(&crowd[i].side, crowd[i].session, &box, 0, i, 0, &op);
        expect_in_crowd(crowd, op, status, "put");
        for (unsigned j = 0; j < CROWD_OPS; j++)
            expect_in_crowd(crowd, crowd[i].ops[j], KV_OK, "a read that waited");
    }
    for (unsigned i = 0; i < N_CROWD; i++)
        close_side(&crowd[i].side);
    read_back(&side, session, 0, 100, 1);
    close_side(&side);
    cluster_close(&own);
    free(crowd);
}

/* ---- running ----------------------------------------------------------------------------- */

static int open_cluster(void **state)
{
    (void)state;
    struct cluster_setup setup = {
        .row = subject.row,
        .transports = subject.transports,
        .n_nodes = shape.n_nodes,
        .n_threads = shape.n_threads,
        .memory_bytes = MEMORY_BYTES,
        .sessions_max = 2048,
    };

    return cluster_open(&cluster, &setup) ? 0 : -1;
}

static int close_cluster(void **state)
{
    (void)state;
    cluster_close(&cluster);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(even_model),
        cmocka_unit_test(keys_and_values_of_other_sizes),
        cmocka_unit_test(keys_only),
        cmocka_unit_test(other_heads_in_each_layer),
        cmocka_unit_test(reads_wait_for_rows),
        cmocka_unit_test(puts_are_repeated),
        cmocka_unit_test(puts_out_of_order),
        cmocka_unit_test(puts_behind_a_gap),
        cmocka_unit_test(parts_of_the_box),
        cmocka_unit_test(crcs_pass_through),
        cmocka_unit_test(rows_of_another_session_are_refused),
        cmocka_unit_test(forks_keep_the_writers_of_their_rows),
        cmocka_unit_test(forks_of_forks_are_bounded),
        cmocka_unit_test(families_keep_apart),
        cmocka_unit_test(forks_cost_bookkeeping_only),
        cmocka_unit_test(other_clients_take_up_sessions),
        cmocka_unit_test(impossible_lifecycles),
        cmocka_unit_test(closed_sessions_give_memory_back),
        cmocka_unit_test(puts_in_any_order),
        cmocka_unit_test(puts_of_other_layers_pass),
        cmocka_unit_test(puts_between_polls),
        cmocka_unit_test(full_memory),
        cmocka_unit_test(threads_share_memory),
        cmocka_unit_test(models_that_nobody_uses_make_room),
        cmocka_unit_test(models_outlive_a_restart),
        cmocka_unit_test(sizes_of_rows_do_not_run_out),
        cmocka_unit_test(leases_end),
        cmocka_unit_test(ended_sessions_are_told_of),
        cmocka_unit_test(objects_of_all_sizes),
        cmocka_unit_test(batches_of_objects),
        cmocka_unit_test(cached_objects_make_room),
        cmocka_unit_test(objects_are_listed),
        cmocka_unit_test(objects_have_the_nodes_time),
        cmocka_unit_test(operators_see_and_close_sessions),
        cmocka_unit_test(memory_is_told),
        cmocka_unit_test(full_memory_is_told),
        cmocka_unit_test(lost_and_doubled_messages),
        cmocka_unit_test(deletes_leave_later_objects_alone),
        cmocka_unit_test(deleted_objects_stay_deleted),
        cmocka_unit_test(nothing_lands_late),
        cmocka_unit_test(changed_rows_are_refused),
        cmocka_unit_test(cancelled_operations),
        cmocka_unit_test(many_wait_and_others_are_served),
    };
    int n_failed = 0;
    bool found = false;

    if (argc > 2)
        cmocka_set_test_filter(argv[2]); /* "fork_*" */
    make_models();
    for (size_t i = 0; i < sizeof(subjects) / sizeof(subjects[0]); i++) {
        if (strcmp(argc > 1 ? argv[1] : "loopback", subjects[i].name) != 0)
            continue;
        subject = subjects[i];
        found = true;
        for (uint32_t j = 0; j < 4; j++) {
            char name[64];

            shape.n_nodes = 1 + j / 2;
            shape.n_threads = 1 + j % 2;
            snprintf(name, sizeof(name), "%s, nodes %u, data threads %u", subject.name,
                     shape.n_nodes, shape.n_threads);
            n_failed += cmocka_run_group_tests_name(name, tests, open_cluster, close_cluster);
        }
    }
    if (!found) {
        printf("no row named %s in this build\n", argv[1]);
        return SKIPPED;
    }
    return n_failed == 0 ? 0 : 1;
}
