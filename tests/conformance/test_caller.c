/* test_caller.c - what a caller may rely on whatever happens to a node or a connection: each
 * object of a batch has its own outcome, and what a begin was given is the caller's again.
 *
 * Two embedded nodes over the loopback and the real client library, over a transport that loses
 * messages when told to.
 */
#include "tests/support/cluster.h"
#include "tests/support/numbered_prompts.h"
#include "tests/support/rows.h"
#include "tests/support/transport_fault.h"

#include "client/deadlines.h"
#include "client/node.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/thread.h"
#include "kvserver/cluster/placement.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_NODES = 2,
    MEMORY_BYTES = 64 << 20,
    BUFFER_BYTES = 8 << 20,
    N_OBJECTS = 8,
    N_ON_FIRST = 5, /* of them on node 0 */
    OBJECT_BYTES = 100000,
    N_LAYERS = 2,
    N_HEADS = 4,
    N_TOKENS = 600,
    DIM = 64,
    N_QUERIES = 2,
    TOP_K = 40,
    READ_AT = 4 << 20, /* where rows come in */
    RETRY_MS = 50,
};

static struct cluster cluster;

/* A client whose messages may be lost. */
static struct {
    struct kv_transport *transport;
    struct kv_client *client;
    struct kv_buffer *buffer;
    uint8_t *memory;
} side;

static void open_side(void)
{
    struct cluster_client setup = {.retry_ms = RETRY_MS};

    assert_int_equal(fault_open(&kv_transport_loopback, NULL, &side.transport), KV_OK);
    setup.transport = side.transport;
    side.client = cluster_connect(&cluster, &setup);
    assert_int_equal(kv_buffer_alloc(side.client, BUFFER_BYTES, &side.buffer), KV_OK);
    side.memory = kv_buffer_data(side.buffer);
}

static void close_side(void)
{
    kv_client_close(side.client);
    side.transport->ops->close(side.transport);
}

static int open_cluster(void **state)
{
    struct cluster_setup setup = {
        .row = &kv_transport_loopback,
        .n_nodes = N_NODES,
        .n_threads = 2,
        .memory_bytes = MEMORY_BYTES,
    };

    (void)state;
    return cluster_open(&cluster, &setup) ? 0 : -1;
}

static int close_cluster(void **state)
{
    (void)state;
    cluster_close(&cluster);
    return 0;
}

static void rule(enum fault_way way, unsigned kind, unsigned op, unsigned skip, unsigned count)
{
    fault_add(side.transport, &(struct fault_rule){way, FAULT_DROP, kind, op, skip, count});
}

/* Loses the connection to a node: the next operation that needs it connects anew. */
static void lose(uint32_t node)
{
    kvc_node_fail(&side.client->nodes[node], KV_UNREACHABLE, "lost by the test");
    kv_poll(side.client);
}

/* ---- batches of objects ------------------------------------------------------------------ */

struct batch {
    char names[N_OBJECTS][24];
    struct kv_object objects[N_OBJECTS];
};

static uint32_t node_of(const char *name)
{
    struct kv_id128 hash = kv_hash128(name, strlen(name));

    return kv_placement_first(side.client->map, kv_placement_object_slot(&hash));
}

/* Objects of both nodes by turns, the last ones of node 0. */
static void make_batch(struct batch *batch)
{
    uint32_t n_of[N_NODES] = {0};
    unsigned n = 0;

    memset(batch, 0, sizeof(*batch));
    for (unsigned number = 0; n < N_OBJECTS; number++) {
        char name[24];
        uint32_t node;

        snprintf(name, sizeof(name), "object %u", number);
        node = node_of(name);
        if (n_of[node] == (node == 0 ? N_ON_FIRST : N_OBJECTS - N_ON_FIRST))
            continue;
        n_of[node]++;
        memcpy(batch->names[n], name, sizeof(name));
        batch->objects[n] = (struct kv_object){
            .name = batch->names[n],
            .buffer = side.buffer,
            .offset = (size_t)n * OBJECT_BYTES,
            .bytes = OBJECT_BYTES,
        };
        n++;
    }
}

static void put_batch(struct batch *batch)
{
    struct kv_op *op;

    for (unsigned i = 0; i < N_OBJECTS; i++)
        test_fill(side.memory + (size_t)i * OBJECT_BYTES, OBJECT_BYTES, i);
    assert_int_equal(
        kv_objects_begin(side.client, KV_OBJECT_PUT, batch->objects, N_OBJECTS, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("%s", kv_op_detail(op));
    kv_op_free(op);
    memset(side.memory, 0, N_OBJECTS * OBJECT_BYTES);
}

static struct kv_op *begin_get(struct batch *batch, uint32_t deadline_ms)
{
    struct kv_op *op;

    assert_int_equal(kv_objects_begin(side.client, KV_OBJECT_GET, batch->objects, N_OBJECTS,
                                      deadline_ms, &op),
                     KV_OK);
    return op;
}

/* Node 0's objects have come, node 1's have all ended with the status. */
static void check_batch(struct kv_op *op, const struct batch *batch, kv_status_t wanted)
{
    if (kv_wait(op) != wanted)
        fail_msg("%s: %s", kv_status_name(kv_op_status(op)), kv_op_detail(op));
    assert_non_null(strstr(kv_op_detail(op), side.client->nodes[1].address));
    assert_non_null(strstr(kv_op_detail(op), ": object object "));
    kv_op_free(op);
    for (unsigned i = 0; i < N_OBJECTS; i++) {
        bool is_there = node_of(batch->names[i]) == 0;

        if (batch->objects[i].status != (is_there ? KV_OK : wanted))
            fail_msg("%s: %s", batch->names[i], kv_status_name(batch->objects[i].status));
        if (is_there)
            assert_true(
                test_is_filled(side.memory + (size_t)i * OBJECT_BYTES, OBJECT_BYTES, i));
    }
}

/* A node that is gone when the batch begins: its connection ends at once. */
static void a_node_is_gone(void **state)
{
    struct batch batch;

    (void)state;
    open_side();
    make_batch(&batch);
    put_batch(&batch);
    for (unsigned known = 0; known < 2; known++) {
        if (known == 0)
            cluster_end(&cluster, 1);
        check_batch(begin_get(&batch, 0), &batch, KV_UNREACHABLE);
        memset(side.memory, 0, N_OBJECTS * OBJECT_BYTES);
    }
    close_side();
}

/* A node that was connected and says nothing any more: given up while others go on. */
static void a_node_falls_silent(void **state)
{
    struct batch batch;
    struct kv_op *op;

    (void)state;
    open_side();
    make_batch(&batch);
    put_batch(&batch);
    rule(FAULT_OUT, KV_WIRE_REQUEST, KV_OP_OBJECT_GET, 0, 0);
    op = begin_get(&batch, 0);
    kv_poll(side.client);
    assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
    lose(1);
    fault_clear(side.transport); /* node 0 is asked again */
    check_batch(op, &batch, KV_UNREACHABLE);
    close_side();
}

/* A node that does not answer hello: only its objects wait, to the deadline. */
static void a_node_does_not_connect(void **state)
{
    struct batch batch;
    struct kv_op *op;

    (void)state;
    open_side();
    make_batch(&batch);
    put_batch(&batch);
    lose(1);
    rule(FAULT_OUT, KV_WIRE_REQUEST, KV_OP_HELLO, 0, 0);
    op = begin_get(&batch, 60000);
    for (unsigned i = 0; i < N_OBJECTS; i++)
        while (node_of(batch.names[i]) == 0 && batch.objects[i].status == KV_IN_PROGRESS &&
               kv_op_status(op) == KV_IN_PROGRESS)
            kv_client_wait(side.client, 1000);
    for (unsigned i = 0; i < N_OBJECTS; i++)
        assert_int_equal(batch.objects[i].status,
                         node_of(batch.names[i]) == 0 ? KV_OK : KV_IN_PROGRESS);
    kvc_op_expire(op); /* a minute later */
    check_batch(op, &batch, KV_DEADLINE);
    close_side();
}

/* A node that comes back while the batch waits for it answers for its objects. */
static void a_node_comes_back(void **state)
{
    struct batch batch;
    struct kv_op *op;

    (void)state;
    open_side();
    make_batch(&batch);
    put_batch(&batch);
    lose(1);
    rule(FAULT_OUT, KV_WIRE_REQUEST, KV_OP_HELLO, 0, 1);
    op = begin_get(&batch, 0);
    if (kv_wait(op) != KV_OK)
        fail_msg("%s", kv_op_detail(op));
    kv_op_free(op);
    for (unsigned i = 0; i < N_OBJECTS; i++) {
        assert_int_equal(batch.objects[i].status, KV_OK);
        assert_true(test_is_filled(side.memory + (size_t)i * OBJECT_BYTES, OBJECT_BYTES, i));
    }
    close_side();
}

/* A node that announces as many large answers as a client takes, and stops there: another one's
 * still come. */
static void a_node_hangs_amid_answers(void **state)
{
    struct kv_op *ops[KVC_PENDING_RECEIVES_MAX], *op;

    (void)state;
    open_side();
    fault_add(side.transport, &(struct fault_rule){FAULT_IN, FAULT_HOLD_LANDING, KV_WIRE_REPLY,
                                                   KV_OP_PING, 0, 0});
    for (unsigned i = 0; i < KVC_PENDING_RECEIVES_MAX; i++)
        assert_int_equal(kv_ping_begin(side.client, 1, i % 2, 0, OBJECT_BYTES, 0, &ops[i]),
                         KV_OK);
    while (fault_held(side.transport) < KVC_PENDING_RECEIVES_MAX)
        kv_client_wait(side.client, 1000);
    fault_clear(side.transport);
    assert_int_equal(kv_ping_begin(side.client, 0, 0, 0, OBJECT_BYTES, 0, &op), KV_OK);
    test_finish(op, "ping");
    fault_release(side.transport);
    for (unsigned i = 0; i < KVC_PENDING_RECEIVES_MAX; i++)
        test_finish(ops[i], "ping");
    close_side();
}

/* ---- what begin was given ---------------------------------------------------------------- */

/* Whatever pointers and numbers were there are garbage now. */
#define POISON(what) memset(&(what), 0xa5, sizeof(what))

/* What keeps an operation from being sent once and for all by begin. */
enum trouble {
    NO_TROUBLE,
    NOT_CONNECTED, /* it is built when the connections are there again */
    ANSWERS_LOST,  /* it is sent again */
    N_TROUBLES,
};

static void prepare(enum trouble trouble)
{
    fault_clear(side.transport);
    for (uint32_t i = 0; i < N_NODES && trouble == NOT_CONNECTED; i++)
        lose(i);
    if (trouble == ANSWERS_LOST)
        rule(FAULT_IN, KV_WIRE_REPLY, 0, 0, N_NODES);
}

/* Halves of 1/8 to 1/4 and either sign: numbers, all of them. */
static void fill_rows(void)
{
    uint16_t *halves = (uint16_t *)(void *)side.memory;

    for (size_t i = 0; i < READ_AT / sizeof(*halves); i++) {
        uint64_t bits = kv_mix64(i + 1);

        halves[i] = (uint16_t)((bits & 0x8000) | 0x3000 | (bits >> 16 & 0x3ff));
    }
}

static struct kv_session *open_poisoned(enum trouble trouble)
{
    const uint16_t heads[N_LAYERS] = {N_HEADS, N_HEADS};
    struct kv_session_options options = {.tokens_max = 4096};
    struct kv_session *session;
    struct kv_model_info model;
    struct kv_op *op;

    test_model(&model, "caller", N_LAYERS, heads, DIM, DIM);
    prepare(trouble);
    assert_int_equal(kv_open_begin(side.client, &model, &options, 0, &op), KV_OK);
    POISON(model);
    POISON(options);
    if (kv_wait(op) != KV_OK)
        fail_msg("open: %s", kv_op_detail(op));
    session = kv_op_session(op);
    kv_op_free(op);
    assert_int_equal(kv_session_schema(session)->layers[1].d_v, DIM);
    return session;
}

/* The row of the box that fill_rows() made for all tokens but the last, or for the last. */
static const uint8_t *row_at(uint32_t layer, uint32_t head, uint32_t token)
{
    const size_t row_bytes = 2 * DIM * 2;
    const uint32_t n_put = N_TOKENS - 1;
    size_t unit = (size_t)layer * N_HEADS + head;

    if (token == n_put)
        return side.memory + ((size_t)N_LAYERS * N_HEADS * n_put + unit) * row_bytes;
    return side.memory + (unit * n_put + token) * row_bytes;
}

static void write_rows(struct kv_session *session, bool appends, enum trouble trouble)
{
    const uint32_t begin = appends ? N_TOKENS - 1 : 0, end = appends ? N_TOKENS : N_TOKENS - 1;
    struct kv_rows rows = {.n_layers = N_LAYERS, .token_begin = begin, .n_tokens = end - begin};
    static uint32_t crcs[N_LAYERS * N_HEADS * N_TOKENS];
    struct kv_rows_io io = {
        .buffer = side.buffer,
        .offset = (size_t)(row_at(0, 0, begin) - side.memory),
        .crcs = crcs,
    };
    uint32_t *crc = crcs;
    struct kv_op *op;

    for (uint32_t layer = 0; layer < N_LAYERS; layer++)
        for (uint32_t head = 0; head < N_HEADS; head++)
            for (uint32_t token = begin; token < end; token++)
                *crc++ = kv_row_crc(session, row_at(layer, head, token), 4 * DIM, layer, head,
                                    token);
    prepare(trouble);
    assert_int_equal((appends ? kv_append_begin : kv_put_begin)(session, &rows, &io, 0, &op),
                     KV_OK);
    POISON(rows);
    POISON(io);
    POISON(crcs);
    test_finish(op, appends ? "append" : "put");
}

static void read_rows(struct kv_session *session, enum trouble trouble)
{
    static uint32_t crcs[N_LAYERS * N_HEADS * N_TOKENS];
    struct kv_rows rows = {.n_layers = N_LAYERS, .n_tokens = N_TOKENS};
    struct kv_rows_io io = {.buffer = side.buffer, .offset = READ_AT, .crcs = crcs};
    const uint8_t *row = side.memory + READ_AT;
    const uint32_t *crc = crcs;
    struct kv_op *op;

    memset(side.memory + READ_AT, 0, BUFFER_BYTES - READ_AT);
    prepare(trouble);
    assert_int_equal(kv_read_begin(session, &rows, &io, 0, &op), KV_OK);
    POISON(rows);
    POISON(io);
    test_finish(op, "read");
    for (uint32_t layer = 0; layer < N_LAYERS; layer++)
        for (uint32_t head = 0; head < N_HEADS; head++)
            for (uint32_t token = 0; token < N_TOKENS; token++, row += 4 * DIM, crc++) {
                assert_memory_equal(row, row_at(layer, head, token), 4 * DIM);
                assert_int_equal(*crc, kv_row_crc(session, row, 4 * DIM, layer, head, token));
            }
}

static void fetch_rows(struct kv_session *session, enum trouble trouble)
{
    uint32_t n_ids[N_HEADS] = {3, 0, 1, 2}, ids[] = {7, 599, 0, 100, 128, 127};
    const uint32_t heads[] = {0, 0, 0, 2, 3, 3}, tokens[] = {7, 599, 0, 100, 128, 127};
    struct kv_fetch fetch = {.layer = 1, .n_ids = n_ids, .ids = ids};
    uint32_t crcs[6];
    struct kv_rows_io io = {.buffer = side.buffer, .offset = READ_AT, .crcs = crcs};
    const uint8_t *row = side.memory + READ_AT;
    struct kv_op *op;

    memset(side.memory + READ_AT, 0, 6 * 4 * DIM);
    prepare(trouble);
    assert_int_equal(kv_fetch_begin(session, &fetch, &io, 0, &op), KV_OK);
    POISON(fetch);
    POISON(n_ids);
    POISON(ids);
    POISON(io);
    test_finish(op, "fetch");
    for (unsigned i = 0; i < 6; i++, row += 4 * DIM) {
        assert_memory_equal(row, row_at(1, heads[i], tokens[i]), 4 * DIM);
        assert_int_equal(crcs[i], kv_row_crc(session, row, 4 * DIM, 1, heads[i], tokens[i]));
    }
}

static void index_rows(struct kv_session *session, enum trouble trouble)
{
    struct kv_index_options index = {
        .tokens = N_TOKENS, .m = 2, .bits = 6, .iterations = 3, .seed = 1, .wait = true};
    struct kv_index_result indexed;
    struct kv_op *op;

    prepare(trouble);
    assert_int_equal(kv_index_begin(session, &index, 0, &op), KV_OK);
    POISON(index);
    if (kv_wait(op) != KV_OK)
        fail_msg("index: %s", kv_op_detail(op));
    kv_op_index_result(op, &indexed);
    assert_int_equal(indexed.rows, N_LAYERS * N_HEADS * N_TOKENS);
    kv_op_free(op);
}

/* A query of one layer with all that it may point at; overwritten after begin. */
static struct kv_op *
ask(struct kv_session *session, enum kv_answer answer, size_t at, enum trouble trouble)
{
    struct kv_range ranges[2] = {{4, 300}, {310, N_TOKENS}};
    float queries[N_HEADS * N_QUERIES * DIM];
    uint32_t n_held[N_HEADS] = {1, 0, 2, 1}, crcs[KV_BLOCK_TOKENS];
    struct kv_cached_block held[4] = {{1, 0}, {0, 0}, {1, 0}, {2, 0}};
    const uint32_t heads[4] = {0, 2, 2, 3};
    struct kv_query query = {
        .layer = 1,
        .n_queries = N_QUERIES,
        .queries = queries,
        .scale = 0.125f,
        .merge = KV_MERGE_SUM,
        .answer = answer,
        .k = TOP_K,
        .rerank = 2,
        .want_weights = true,
        .want_ids = answer == KV_ANSWER_ATTEND,
        .n_ranges = 2,
        .ranges = ranges,
        .n_cached = n_held,
        .cached = held,
    };
    struct kv_rows_io io = {.buffer = side.buffer, .offset = at};
    struct kv_op *op;

    for (unsigned i = 0; i < 4; i++) {
        for (uint32_t j = 0; j < KV_BLOCK_TOKENS; j++) {
            uint32_t token = held[i].block * KV_BLOCK_TOKENS + j;

            crcs[j] =
                kv_row_crc(session, row_at(1, heads[i], token), 4 * DIM, 1, heads[i], token);
        }
        held[i].fingerprint = kv_block_fingerprint(crcs);
    }
    for (unsigned i = 0; i < sizeof(queries) / sizeof(queries[0]); i++)
        queries[i] = (float)(kv_mix64(i + 77) % 2001) / 1000 - 1;
    prepare(trouble);
    if (kv_query_begin(session, &query, answer == KV_ANSWER_ROWS ? &io : NULL, 0, &op) != KV_OK)
        fail_msg("query: %s", kv_client_detail(side.client));
    POISON(ranges);
    POISON(queries);
    POISON(n_held);
    POISON(held);
    POISON(query);
    POISON(io);
    if (kv_wait(op) != KV_OK)
        fail_msg("query: %s", kv_op_detail(op));
    return op;
}

static void compare(const void *one, const void *other, size_t bytes)
{
    assert_int_equal(one == NULL, other == NULL);
    if (one != NULL)
        assert_memory_equal(one, other, bytes);
}

/* The same answer as from a begin whose message went out at once. */
static void query_rows(struct kv_session *session, enum kv_answer answer, enum trouble trouble)
{
    const size_t room = (size_t)N_HEADS * TOP_K * 4 * DIM;
    struct kv_op *plain = ask(session, answer, READ_AT, NO_TROUBLE);
    struct kv_op *op = ask(session, answer, READ_AT + room, trouble);

    for (uint32_t head = 0; head < N_HEADS; head++) {
        struct kv_query_result wanted, found;
        bool has_held = false;

        assert_int_equal(kv_op_query_result(plain, head, &wanted), KV_OK);
        assert_int_equal(kv_op_query_result(op, head, &found), KV_OK);
        assert_int_equal(wanted.n_ids, TOP_K);
        assert_int_equal(found.n_ids, wanted.n_ids);
        assert_int_equal(found.n_rows, wanted.n_rows);
        compare(found.ids, wanted.ids, TOP_K * sizeof(uint32_t));
        compare(found.row_index, wanted.row_index, TOP_K * sizeof(uint32_t));
        compare(found.weights, wanted.weights, TOP_K * sizeof(float));
        compare(found.rows, wanted.rows, wanted.n_rows * 4 * DIM);
        compare(found.outputs, wanted.outputs, N_QUERIES * DIM * sizeof(float));
        compare(found.lses, wanted.lses, N_QUERIES * sizeof(float));
        for (uint32_t i = 0; i < TOP_K && found.row_index != NULL; i++)
            has_held |= found.row_index[i] == KV_ROW_CACHED;
        assert_int_equal(has_held, answer != KV_ANSWER_IDS && head != 1);
    }
    kv_op_free(op);
    kv_op_free(plain);
}

/* Operations on the session as a whole; the session is closed by them. */
static void live_and_end(struct kv_session *session, enum trouble trouble)
{
    struct kv_session *child, *other;
    struct kv_ticket ticket;
    struct kv_op *op;

    prepare(trouble);
    assert_int_equal(kv_renew_begin(session, 50000, 0, &op), KV_OK);
    test_finish(op, "renew");
    prepare(trouble);
    assert_int_equal(kv_fork_begin(session, 500, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("fork: %s", kv_op_detail(op));
    child = kv_op_session(op);
    kv_op_free(op);
    prepare(trouble);
    assert_int_equal(kv_truncate_begin(child, 450, 0, &op), KV_OK);
    test_finish(op, "truncate");
    kv_session_ticket(child, &ticket);
    prepare(trouble);
    assert_int_equal(kv_resume_begin(side.client, &ticket, 0, &op), KV_OK);
    POISON(ticket);
    if (kv_wait(op) != KV_OK)
        fail_msg("resume: %s", kv_op_detail(op));
    assert_int_equal(kv_op_tokens(op), 450);
    other = kv_op_session(op);
    kv_op_free(op);
    prepare(trouble);
    assert_int_equal(kv_length_begin(other, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("length: %s", kv_op_detail(op));
    assert_int_equal(kv_op_tokens(op), 450);
    kv_op_free(op);
    kv_session_free(other);
    prepare(trouble);
    assert_int_equal(kv_close_begin(child, 0, &op), KV_OK);
    test_finish(op, "close");
    kv_session_free(child);
    prepare(NO_TROUBLE);
    assert_int_equal(kv_close_begin(session, 0, &op), KV_OK);
    test_finish(op, "close");
    kv_session_free(session);
}

static void batch_poisoned(enum kv_object_verb verb, enum trouble trouble)
{
    struct batch batch;
    struct kv_op *op;

    make_batch(&batch);
    for (unsigned i = 0; i < N_OBJECTS; i++) {
        if (verb == KV_OBJECT_PUT)
            test_fill(side.memory + (size_t)i * OBJECT_BYTES, OBJECT_BYTES, i);
        if (verb == KV_OBJECT_GET)
            memset(side.memory + (size_t)i * OBJECT_BYTES, 0, OBJECT_BYTES);
    }
    prepare(trouble);
    assert_int_equal(kv_objects_begin(side.client, verb, batch.objects, N_OBJECTS, 0, &op),
                     KV_OK);
    POISON(batch);
    test_finish(op, "objects");
    for (unsigned i = 0; i < N_OBJECTS; i++) {
        assert_int_equal(batch.objects[i].status, KV_OK);
        if (verb == KV_OBJECT_GET || verb == KV_OBJECT_EXISTS)
            assert_int_equal(batch.objects[i].bytes, OBJECT_BYTES);
        if (verb == KV_OBJECT_GET)
            assert_true(
                test_is_filled(side.memory + (size_t)i * OBJECT_BYTES, OBJECT_BYTES, i));
    }
}

static void look_at_node(enum trouble trouble)
{
    char name[] = "status";
    struct kv_op *op;

    prepare(trouble);
    assert_int_equal(kv_table_begin(side.client, 1, name, 0, &op), KV_OK);
    POISON(name);
    if (kv_wait(op) != KV_OK)
        fail_msg("table: %s", kv_op_detail(op));
    assert_true(kv_op_table(op)->n_rows > 0);
    kv_op_free(op);
    prepare(trouble);
    assert_int_equal(kv_ping_begin(side.client, 1, 1, 100, 200, 0, &op), KV_OK);
    test_finish(op, "ping");
}

/* Every operation, its arguments and all that they point at overwritten as soon as begin has
 * returned. */
static void arguments_are_the_callers_again(void **state)
{
    (void)state;
    open_side();
    for (enum trouble trouble = NO_TROUBLE; trouble < N_TROUBLES; trouble++) {
        struct kv_session *session = open_poisoned(trouble);

        fill_rows();
        write_rows(session, false, trouble);
        write_rows(session, true, trouble);
        read_rows(session, trouble);
        fetch_rows(session, trouble);
        index_rows(session, trouble);
        for (enum kv_answer answer = KV_ANSWER_IDS; answer <= KV_ANSWER_ATTEND; answer++)
            query_rows(session, answer, trouble);
        live_and_end(session, trouble);
        for (enum kv_object_verb verb = KV_OBJECT_PUT; verb <= KV_OBJECT_DELETE; verb++)
            batch_poisoned(verb, trouble);
        look_at_node(trouble);
    }
    close_side();
}

/* The nodes have the session, all of them; it is closed. */
static void expect_there(struct kv_session *session)
{
    struct kv_op *op;

    assert_int_equal(kv_length_begin(session, 0, &op), KV_OK);
    test_finish(op, "length");
    assert_int_equal(kv_close_begin(session, 0, &op), KV_OK);
    test_finish(op, "close");
    kv_session_free(session);
}

/* A fork that is cancelled when the nodes have done it: nobody has the child, and no node keeps
 * it until its lease ends. */
static void a_fork_is_cancelled(void **state)
{
    struct kv_session *session;
    struct kv_op *op;

    (void)state;
    open_side();
    session = open_poisoned(NO_TROUBLE);
    fault_add(side.transport,
              &(struct fault_rule){FAULT_IN, FAULT_HOLD, KV_WIRE_REPLY, KV_OP_FORK, 0, 0});
    assert_int_equal(kv_fork_begin(session, 0, 0, &op), KV_OK);
    while (fault_held(side.transport) < N_NODES && kv_op_status(op) == KV_IN_PROGRESS)
        kv_client_wait(side.client, 1000);
    kv_cancel(op);
    assert_int_equal(kv_op_status(op), KV_CANCELLED);
    kv_op_free(op);
    fault_clear(side.transport);
    fault_release(side.transport);
    assert_true(cluster_becomes(side.client, "status", "sessions", N_NODES));

    expect_there(session);
    close_side();
}

/* An address that leads to another node of the list for a while: it is refused, and the node
 * that was there before is itself when it is there again, with its sessions. */
static void an_address_leads_astray(void **state)
{
    struct kv_session *session;
    const char *address;
    struct kv_op *op;

    (void)state;
    open_side();
    session = open_poisoned(NO_TROUBLE);
    address = side.client->nodes[0].address;
    side.client->nodes[0].address = side.client->nodes[1].address;
    lose(0);
    assert_int_equal(kv_ping_begin(side.client, 0, 0, 0, 0, 0, &op), KV_OK);
    kv_wait(op);
    side.client->nodes[0].address = address;
    assert_int_equal(kv_op_status(op), KV_INVALID);
    assert_non_null(strstr(kv_op_detail(op), "twice in the list"));
    kv_op_free(op);

    expect_there(session);
    close_side();
}

/* The list has names: who calls itself otherwise is refused, and both names are told. */
static void a_node_has_another_name(void **state)
{
    struct kv_op *op;

    (void)state;
    open_side();
    side.client->nodes[0].listed_name = "node-0";
    side.client->nodes[1].listed_name = "other";
    assert_int_equal(kv_ping_begin(side.client, 0, 0, 0, 0, 0, &op), KV_OK);
    test_finish(op, "ping");
    lose(1);
    assert_int_equal(kv_ping_begin(side.client, 1, 0, 0, 0, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_INVALID);
    assert_non_null(
        strstr(kv_op_detail(op), "the list calls it other, it calls itself node-1"));
    kv_op_free(op);
    close_side();
}

/* A client is made of options that are overwritten before it is used. */
static void options_are_the_callers_again(void **state)
{
    char nodes[KV_WIRE_ADDRESS_MAX], transport[] = "auto", name[] = "poisoned", detail[256];
    struct kv_client_options options = {.nodes = nodes, .transport = transport, .name = name};
    struct kv_client *client;
    struct kv_op *op;

    (void)state;
    snprintf(nodes, sizeof(nodes), "%s,%s", kvs_node_address(cluster.nodes[0]),
             kvs_node_address(cluster.nodes[1]));
    if (kv_client_open(&options, &client, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    POISON(nodes);
    POISON(transport);
    POISON(name);
    POISON(options);
    for (uint32_t i = 0; i < N_NODES; i++) {
        kvc_node_fail(&client->nodes[i], KV_UNREACHABLE, "lost by the test");
        kv_poll(client);
        assert_int_equal(kv_table_begin(client, i, "clients", 0, &op), KV_OK);
        test_finish(op, "table");
    }
    kv_client_close(client);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_node_falls_silent),
        cmocka_unit_test(a_node_does_not_connect),
        cmocka_unit_test(a_node_comes_back),
        cmocka_unit_test(a_node_hangs_amid_answers),
        cmocka_unit_test(an_address_leads_astray),
        cmocka_unit_test(a_fork_is_cancelled),
        cmocka_unit_test(arguments_are_the_callers_again),
        cmocka_unit_test(a_node_has_another_name),
        cmocka_unit_test(options_are_the_callers_again),
        /* Last: the node stays gone. */
        cmocka_unit_test(a_node_is_gone),
    };

    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, open_cluster, close_cluster);
}
