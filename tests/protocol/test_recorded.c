/* test_recorded.c - what a peer of the least version of the protocol said over the wire, and
 * what it answered, beside this build: it must still work with such a peer.
 *
 *   recorded/messages.txt  every message of one conversation, byte by byte
 *   recorded/answers.txt   what the callers of the client library got in it
 *
 * The conversation (talk()) has every operation of both planes: two clients and one node of one
 * data thread, driven step by step, over the loopback (support/transport_tap.h).  The clock is
 * virtual and stands still while anybody works, so that times measured are 0; tokens, ids and
 * versions come from seeded generators; ports are called by number.  Three checks: clients and
 * node of this build that speak no more than the least version have the same conversation;
 * this build's node, asked by the recorded requests alone, gives the recorded replies; and
 * this build's clients, but for their hello, ask a node of the least version the same.
 *
 * Not compared: texts of failures (support/recorded_messages.h).  Not asked for: the tables
 * status, ops, stats and scrub, whose rows are the build's version, operations, and metrics with
 * their texts; and operations that the least version does not have.
 *
 * A change that is meant to change answers, or that raises KV_WIRE_VERSION_LEAST, records anew,
 * in the repository:
 *
 *     build/tests/protocol/test_protocol_recorded tests/protocol/recorded --record
 *
 * The kernels give the same bits whatever the instruction set, and so does this: CMakeLists.txt
 * has it run for each.
 */
#define _GNU_SOURCE /* open_memstream */
#include "client/client.h"
#include "client/control_message.h"
#include "kvserver/base/clock.h"
#include "kvserver/disk/disk.h"
#include "kvserver/net/message.h"
#include "kvserver/store/node.h"
#include "proto/kvstore.pb-c.h"
#include "tests/support/recorded.h"
#include "tests/support/recorded_messages.h"
#include "tests/support/transport_tap.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

enum {
    FIRST_NEW_OP = KV_OP_PUBLISH, /* later than the least version, with all that follow */
    N_CLIENTS = 2,
    STEP_US = 200,
    OP_US = 100000, /* from the begin of one operation to that of the next */
    ROUNDS_MAX = 20000,
    ROUNDS_LAST = 20, /* after the last message */
    BUFFER_BYTES = 1 << 20,
    MEMORY_BYTES = 32 << 20,
    CODED = 1024,  /* a chapter, and a group of rows with summaries */
    TOKENS = 1130, /* some rows behind it */
    LAST = 1160,
    WIDE_TOKENS = 24,
    QUERIES = 2,
    D = 8, /* of the narrow model's keys and values */
    OBJECT_BYTES = 70000,
};

/* Two models: NARROW has rows enough for codes, WIDE has layers of all kinds, and rows that do
 * not travel in the body. */
enum {
    NARROW,
    WIDE,
};

static const struct recorded_box boxes[] = {
    {NARROW, 0, 0, LAST, 4 * D},
    {NARROW, 0, 1, LAST, 4 * D},
    {WIDE, 0, 0, WIDE_TOKENS, 4096},
    {WIDE, 1, 0, WIDE_TOKENS, 48},
    {WIDE, 1, 1, WIDE_TOKENS, 48},
    {WIDE, 2, 0, WIDE_TOKENS, 40},
    {0},
};

static const char *folder;

/* The greatest version of the protocol that each side speaks. */
static struct {
    uint32_t node, clients;
} speaks = {KV_WIRE_VERSION_LEAST, KV_WIRE_VERSION_LEAST};

/* The node, and what has been said. */
static struct {
    struct kv_clock clock;
    struct kv_transport *transport;
    struct kv_disk *disk;
    struct kvs_node *node;
    uint64_t round;
    struct recorded_messages said;
} world;

static struct side {
    struct kv_client *client;
    struct kv_buffer *buffer;
} sides[N_CLIENTS];

static FILE *answers;
static unsigned n_ops;

/* ---- the node ---------------------------------------------------------------------------- */

static void on_sent(void *arg,
                    unsigned from,
                    unsigned to,
                    const void *header,
                    size_t header_bytes,
                    const struct kv_iov data[2])
{
    struct recorded_message *message =
        recorded_add(&world.said, header_bytes + data[0].bytes + data[1].bytes);
    uint8_t *at = message->data;

    (void)arg;
    message->round = world.round;
    message->at_us = world.clock.virtual_us;
    message->from = from;
    message->to = to;
    message->header_bytes = header_bytes;
    memcpy(at, header, header_bytes);
    at += header_bytes;
    for (unsigned i = 0; i < 2; i++) {
        if (data[i].bytes > 0)
            memcpy(at, data[i].base, data[i].bytes);
        at += data[i].bytes;
    }
}

static void open_world(void)
{
    char detail[256] = "";

    memset(&world, 0, sizeof(world));
    kv_clock_virtual_init(&world.clock, OP_US);
    assert_int_equal(tap_open(on_sent, NULL, &world.transport), KV_OK);
    world.disk = kv_disk_memory_open(&world.clock, 0);
    assert_non_null(world.disk);
    const struct kvs_node_config config = {
        .name = "recorded",
        .memory_bytes = MEMORY_BYTES,
        .n_threads = 1,
        .sessions_max = 16,
        .clients_max = 8,
        .credits = 16,
        .seed = 7,
        .wire_version_max = speaks.node,
        .clock = &world.clock,
        .transport = world.transport,
        .message_control = true,
        .disk = world.disk,
    };

    if (kvs_node_create(&config, &world.node, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
}

static void close_world(void)
{
    kvs_node_check_memory(world.node);
    kvs_node_destroy(world.node);
    kv_disk_close(world.disk);
    world.transport->ops->close(world.transport);
    recorded_free(&world.said);
}

static void step_node(void)
{
    world.clock.virtual_us += STEP_US;
    kvs_node_control_step(world.node);
    kvs_node_data_step(world.node, 0);
    world.round++;
}

/* ---- the clients ------------------------------------------------------------------------- */

static void step(void)
{
    step_node();
    for (unsigned i = 0; i < N_CLIENTS; i++)
        if (sides[i].client != NULL)
            kv_poll(sides[i].client);
}

static void open_side(unsigned i)
{
    const char *address = strchr(kvs_node_address(world.node), ':');
    char remote_address[2 * KV_WIRE_ADDRESS_MAX + 32];
    const struct kvc_node_setup remote = {.address = remote_address,
                                          .mode = KV_CHANNEL_NETWORK};
    const struct kvc_client_setup setup = {
        .nodes = &remote,
        .n_nodes = 1,
        .transport = world.transport,
        .open_control = kvc_control_message_open,
        .clock = &world.clock,
        .seed = 100 + i,
        .name = i == 0 ? "first" : "second",
        .tenant = 5,
        .wire_version_max = speaks.clients,
    };

    assert_non_null(address);
    snprintf(remote_address, sizeof(remote_address), "loopback%s", address);
    assert_int_equal(kvc_client_create(&setup, &sides[i].client), KV_OK);
    assert_int_equal(kv_buffer_alloc(sides[i].client, BUFFER_BYTES, &sides[i].buffer), KV_OK);
    memset(kv_buffer_data(sides[i].buffer), 0, BUFFER_BYTES);
}

/* Each operation has its own time, however many rounds those before it took. */
static void next_op(const char *name)
{
    const uint64_t begin_us = ++n_ops * (uint64_t)OP_US + OP_US;

    if (world.clock.virtual_us > begin_us)
        fail_msg("%s: the operation before it took too long", name);
    world.clock.virtual_us = begin_us;
    fprintf(answers, "%s:", name);
}

/* Takes steps until it has ended, and notes how. */
static kv_status_t wait_for(kv_status_t begun, struct kv_op *op)
{
    assert_int_equal(begun, KV_OK);
    for (unsigned i = 0; kv_op_status(op) == KV_IN_PROGRESS; i++) {
        if (i == ROUNDS_MAX)
            fail_msg("an operation does not end");
        step();
    }
    fprintf(answers, " %s", kv_status_name(kv_op_status(op)));
    return kv_op_status(op);
}

static void end_op(struct kv_op *op)
{
    kv_op_free(op);
    fprintf(answers, "\n");
}

/* One that answers no more than how it ended. */
static void finish(kv_status_t begun, struct kv_op *op)
{
    wait_for(begun, op);
    end_op(op);
}

static struct kv_session *finish_session(kv_status_t begun, struct kv_op *op)
{
    struct kv_session *session;

    if (wait_for(begun, op) != KV_OK)
        fail_msg("%s", kv_op_detail(op));
    session = kv_op_session(op);
    assert_non_null(session);
    fprintf(answers, " generation %u lease_ms %u tokens %u", kv_session_generation(session),
            kv_session_lease_ms(session), kv_op_tokens(op));
    end_op(op);
    return session;
}

/* ---- models and rows --------------------------------------------------------------------- */

static void make_model(struct kv_model_info *ret_model, unsigned model)
{
    static const struct kv_layer_schema narrow[] = {
        {KV_LAYER_KV, KV_FP16, 2, D, D, 0, 0},
    };
    static const struct kv_layer_schema wide[] = {
        {KV_LAYER_KV, KV_FP16, 1, 1024, 1024, 0, 0},
        {KV_LAYER_KEYS, KV_BF16, 2, 24, 0, 0, 0},
        {KV_LAYER_KV, KV_FP32, 1, 6, 4, 0, 0},
    };
    const struct kv_layer_schema *layers = model == NARROW ? narrow : wide;
    char detail[128];

    memset(ret_model, 0, sizeof(*ret_model));
    snprintf(ret_model->name, sizeof(ret_model->name), "%s",
             model == NARROW ? "narrow" : "wide");
    memset(&ret_model->fingerprint, 0xa0 + (int)model, sizeof(ret_model->fingerprint));
    ret_model->schema.n_layers = model == NARROW ? 1 : 3;
    for (uint32_t i = 0; i < ret_model->schema.n_layers; i++)
        ret_model->schema.layers[i] = layers[i];
    if (kv_schema_finish(&ret_model->schema, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
}

/* The box's rows into the side's buffer. */
static void fill(const struct side *side, unsigned model, const struct kv_rows *box)
{
    struct kv_model_info info;
    uint8_t *to = kv_buffer_data(side->buffer);

    make_model(&info, model);
    for (uint32_t layer = box->layer_begin; layer < box->layer_begin + box->n_layers; layer++) {
        const struct kv_layer_schema *schema = &info.schema.layers[layer];

        for (uint32_t head = 0; head < schema->n_kv_heads; head++)
            for (uint32_t i = 0; i < box->n_tokens; i++, to += schema->row_bytes)
                recorded_row(to, schema->row_bytes, model, layer, head, box->token_begin + i);
    }
}

static void put(const char *name,
                const struct side *side,
                struct kv_session *session,
                unsigned model,
                const struct kv_rows *box)
{
    const struct kv_rows_io io = {.buffer = side->buffer};
    struct kv_op *op = NULL;
    kv_status_t status;

    next_op(name);
    fill(side, model, box);
    status = box->n_tokens > 4 ? kv_put_begin(session, box, &io, 0, &op)
                               : kv_append_begin(session, box, &io, 0, &op);
    finish(status, op);
}

static void read_box(const char *name,
                     const struct side *side,
                     struct kv_session *session,
                     struct kv_rows box)
{
    uint32_t crcs[256] = {0};
    const struct kv_rows_io io = {.buffer = side->buffer, .crcs = crcs};
    const size_t bytes = kv_rows_bytes(kv_session_schema(session), &box);
    struct kv_op *op = NULL;
    kv_status_t status;

    next_op(name);
    memset(kv_buffer_data(side->buffer), 0, bytes);
    status = kv_read_begin(session, &box, &io, 0, &op);
    wait_for(status, op);
    fprintf(answers, " rows %016llx crcs %016llx",
            (unsigned long long)recorded_hash(kv_buffer_data(side->buffer), bytes),
            (unsigned long long)recorded_hash(crcs, sizeof(crcs)));
    end_op(op);
}

static void fetch_rows(const char *name, const struct side *side, struct kv_session *session)
{
    static const uint32_t n_ids[] = {3, 2}, ids[] = {1, 700, 1129, 0, 1024};
    const struct kv_fetch fetch = {.n_ids = n_ids, .ids = ids};
    uint32_t crcs[5] = {0};
    const struct kv_rows_io io = {.buffer = side->buffer, .crcs = crcs};
    struct kv_op *op = NULL;
    kv_status_t status;

    next_op(name);
    memset(kv_buffer_data(side->buffer), 0, sizeof(crcs) / sizeof(crcs[0]) * 4 * D);
    status = kv_fetch_begin(session, &fetch, &io, 0, &op);
    wait_for(status, op);
    fprintf(answers, " rows %016llx crcs",
            (unsigned long long)recorded_hash(kv_buffer_data(side->buffer),
                                              sizeof(crcs) / sizeof(crcs[0]) * 4 * D));
    for (unsigned i = 0; i < sizeof(crcs) / sizeof(crcs[0]); i++)
        fprintf(answers, " %08x", crcs[i]);
    end_op(op);
}

/* ---- retrieval --------------------------------------------------------------------------- */

static void make_index(const char *name, struct kv_session *session)
{
    const struct kv_index_options index = {
        .tokens = TOKENS,
        .chapter_blocks = CODED / KV_BLOCK_TOKENS,
        .m = 2,
        .bits = 4,
        .iterations = 5,
        .seed = 3,
        .summaries = 16,
        .wait = true,
    };
    struct kv_index_result indexed;
    struct kv_op *op = NULL;
    kv_status_t status;

    next_op(name);
    status = kv_index_begin(session, &index, 0, &op);
    if (wait_for(status, op) != KV_OK)
        fail_msg("%s", kv_op_detail(op));
    kv_op_index_result(op, &indexed);
    fprintf(answers, " rows %llu coded %llu found %u trained %u pending %u iterations %u",
            (unsigned long long)indexed.rows, (unsigned long long)indexed.rows_coded,
            indexed.n_found, indexed.n_trained, indexed.n_pending, indexed.iterations);
    end_op(op);
}

static void tell_numbers(const char *name, const uint32_t *values, uint32_t n)
{
    if (values == NULL)
        return;
    fprintf(answers, " %s", name);
    for (uint32_t i = 0; i < n; i++)
        if (values[i] == KV_ROW_CACHED)
            fprintf(answers, " held");
        else
            fprintf(answers, " %u", values[i]);
}

static void tell_floats(const char *name, const float *values, uint32_t n)
{
    if (values == NULL)
        return;
    fprintf(answers, " %s", name);
    recorded_print_floats(answers, values, n);
}

static void tell_found(const struct kv_query *query, const struct kv_op *op, uint32_t head)
{
    struct kv_query_result found;

    assert_int_equal(kv_op_query_result(op, head, &found), KV_OK);
    fprintf(answers, "\n  head %u: chosen %u rest %u coded %u exact %u reranked %u chapters %u",
            query->kv_head_begin + head, found.n_selected, found.n_estimated,
            found.n_scored_by_code, found.n_scored_by_key, found.n_reranked, found.n_chapters);
    tell_numbers("ids", found.ids, found.n_ids);
    tell_numbers("row_of", found.row_index, found.n_ids);
    tell_numbers("heads", found.query_mask, found.n_ids);
    tell_floats("scores", found.weights, found.n_ids);
    if (found.n_rows > 0)
        fprintf(answers, " rows %016llx crcs %016llx",
                (unsigned long long)recorded_hash(found.rows, (size_t)found.n_rows * 4 * D),
                (unsigned long long)recorded_hash(found.crcs,
                                                  found.n_rows * sizeof(found.crcs[0])));
    tell_floats("outputs", found.outputs, query->n_queries * D);
    tell_floats("lses", found.lses, query->n_queries);
}

/* What a query leaves open: one range of all rows, vectors that follow from `seed`. */
static void ask(const char *name,
                const struct side *side,
                struct kv_session *session,
                unsigned seed,
                struct kv_query query)
{
    static const struct kv_range all = {0, TOKENS};
    const struct kv_rows_io io = {.buffer = side->buffer};
    const uint32_t n_heads = query.n_kv_heads > 0 ? query.n_kv_heads : 2;
    float vectors[2 * QUERIES * D];
    struct kv_op *op = NULL;
    kv_status_t status;

    next_op(name);
    for (unsigned i = 0; i < sizeof(vectors) / sizeof(vectors[0]); i++)
        vectors[i] = (float)((int)((i * 37 + seed * 101 + i * i * 5) % 129) - 64) / 32;
    query.n_queries = QUERIES;
    query.queries = vectors;
    query.scale = 0.5f;
    if (query.ranges == NULL) {
        query.ranges = &all;
        query.n_ranges = 1;
    }
    status =
        kv_query_begin(session, &query, query.answer == KV_ANSWER_ROWS ? &io : NULL, 0, &op);
    if (wait_for(status, op) != KV_OK)
        fail_msg("%s: %s", name, kv_op_detail(op));
    for (uint32_t i = 0; i < n_heads; i++)
        tell_found(&query, op, i);
    end_op(op);
}

/* Blocks that the caller says it holds: block 2 of each head as it is, block 5 of the first as
 * it is not. */
struct holdings {
    uint32_t n[2];
    struct kv_cached_block held[3];
};

static void hold(const struct kv_session *session, struct holdings *ret_holdings)
{
    uint32_t crcs[KV_BLOCK_TOKENS];
    uint8_t row[4 * D];

    for (uint32_t head = 0; head < 2; head++) {
        for (uint32_t i = 0; i < KV_BLOCK_TOKENS; i++) {
            const uint32_t token = 2 * KV_BLOCK_TOKENS + i;

            recorded_row(row, sizeof(row), NARROW, 0, head, token);
            crcs[i] = kv_row_crc(session, row, sizeof(row), 0, head, token);
        }
        ret_holdings->held[2 * head] = (struct kv_cached_block){2, kv_block_fingerprint(crcs)};
    }
    ret_holdings->held[1] = (struct kv_cached_block){5, 12345};
    ret_holdings->n[0] = 2;
    ret_holdings->n[1] = 1;
}

static void ask_all(const struct side *side, struct kv_session *session)
{
    static const struct kv_range ranges[] = {{4, 300}, {512, 513}, {900, TOKENS}};
    struct holdings holdings;
    const struct kv_query some[] = {
        {.merge = KV_MERGE_SUM,
         .answer = KV_ANSWER_IDS,
         .k = 9,
         .rerank = 1,
         .want_weights = true},
        {.merge = KV_MERGE_MAX,
         .answer = KV_ANSWER_IDS,
         .k = 7,
         .rerank = 4,
         .want_weights = true},
        {.merge = KV_MERGE_UNION, .answer = KV_ANSWER_IDS, .k = 5, .rerank = 2},
        {.merge = KV_MERGE_NONE,
         .answer = KV_ANSWER_IDS,
         .k = 5,
         .rerank = 2,
         .want_weights = true},
        {.merge = KV_MERGE_SUM,
         .answer = KV_ANSWER_IDS,
         .k = 2000,
         .rerank = 4,
         .selection = KV_SELECT_MASS,
         .fraction = 0.01f},
        {.merge = KV_MERGE_MAX,
         .answer = KV_ANSWER_IDS,
         .k = 64,
         .rerank = 2,
         .selection = KV_SELECT_THRESHOLD,
         .fraction = 0.6f,
         .want_weights = true},
        {.merge = KV_MERGE_SUM, .answer = KV_ANSWER_ROWS, .k = 6, .rerank = 3},
        {.merge = KV_MERGE_NONE,
         .answer = KV_ANSWER_ROWS,
         .k = 4,
         .rerank = 2,
         .summaries = 16},
        {.merge = KV_MERGE_SUM, .answer = KV_ANSWER_ATTEND, .k = 40, .rerank = 2},
        {.merge = KV_MERGE_NONE,
         .answer = KV_ANSWER_ATTEND,
         .k = 40,
         .rerank = 2,
         .summaries = 16},
        {.merge = KV_MERGE_SUM,
         .answer = KV_ANSWER_ATTEND,
         .k = 8,
         .rerank = 2,
         .summaries = 16,
         .want_ids = true,
         .want_weights = true},
        {.merge = KV_MERGE_SUM,
         .answer = KV_ANSWER_IDS,
         .k = 5,
         .rerank = 2,
         .ranges = ranges,
         .n_ranges = 3,
         .kv_head_begin = 1,
         .n_kv_heads = 1,
         .snapshot = TOKENS},
    };
    char name[32];

    for (unsigned i = 0; i < sizeof(some) / sizeof(some[0]); i++) {
        snprintf(name, sizeof(name), "query %u", i);
        ask(name, side, session, i, some[i]);
    }
    hold(session, &holdings);
    for (unsigned i = 0; i < 2; i++) {
        const struct kv_query held = {
            .merge = KV_MERGE_SUM,
            .answer = i == 0 ? KV_ANSWER_ROWS : KV_ANSWER_ATTEND,
            .k = 24,
            .rerank = 2,
            .n_cached = holdings.n,
            .cached = holdings.held,
        };

        snprintf(name, sizeof(name), "query held %u", i);
        ask(name, side, session, 20, held);
    }
}

/* ---- the conversation -------------------------------------------------------------------- */

static struct kv_session *
open_session(const char *name, const struct side *side, unsigned model)
{
    const struct kv_session_options options = {.lease_ms = 40000, .tokens_max = 2048};
    struct kv_model_info info;
    struct kv_op *op = NULL;
    kv_status_t status;

    next_op(name);
    make_model(&info, model);
    status = kv_open_begin(side->client, &info, &options, 0, &op);
    return finish_session(status, op);
}

/* A read of rows that nobody puts, taken back. */
static void cancel_read(const struct side *side, struct kv_session *session)
{
    const struct kv_rows box = {.n_layers = 1, .token_begin = LAST, .n_tokens = 2};
    const struct kv_rows_io io = {.buffer = side->buffer};
    struct kv_op *op = NULL;

    next_op("cancel");
    assert_int_equal(kv_read_begin(session, &box, &io, 0, &op), KV_OK);
    for (unsigned i = 0; i < 5; i++)
        step();
    kv_cancel(op);
    for (unsigned i = 0; i < 5; i++)
        step();
    finish(KV_OK, op);
}

/* The same place, another row. */
static void conflict(const struct side *side, struct kv_session *session)
{
    const struct kv_rows box = {.n_layers = 1, .token_begin = 3, .n_tokens = 1};
    const struct kv_rows_io io = {.buffer = side->buffer};
    struct kv_op *op = NULL;
    kv_status_t status;

    next_op("append conflict");
    fill(side, NARROW, &box);
    ((uint8_t *)kv_buffer_data(side->buffer))[1] ^= 1;
    status = kv_append_begin(session, &box, &io, 0, &op);
    finish(status, op);
}

static void objects(const char *name, const struct side *side, enum kv_object_verb verb)
{
    const bool puts = verb == KV_OBJECT_PUT;
    struct kv_object objects[] = {
        {.name = "small", .buffer = side->buffer, .offset = 0, .bytes = puts ? 100 : 4096},
        {.name = "a large one", .buffer = side->buffer, .offset = 4096, .bytes = OBJECT_BYTES},
        {.name = "none", .buffer = side->buffer, .offset = 80 << 10, .bytes = 64},
    };
    const size_t n = puts ? 2 : 3;
    uint8_t *data = kv_buffer_data(side->buffer);
    struct kv_op *op = NULL;
    kv_status_t status;

    next_op(name);
    memset(data, 0, 80 << 10);
    for (unsigned i = 0; puts && i < 100; i++)
        data[i] = (uint8_t)(i * 7);
    if (puts)
        memset(data + 4096, 0x5a, OBJECT_BYTES);
    status = kv_objects_begin(side->client, verb, objects, n, 0, &op);
    wait_for(status, op);
    for (size_t i = 0; i < n; i++)
        fprintf(answers, " %s %zu", kv_status_name(objects[i].status), objects[i].bytes);
    fprintf(answers, " bytes %016llx", (unsigned long long)recorded_hash(data, 80 << 10));
    end_op(op);
}

static void all_objects(const struct side *side)
{
    objects("object_put", side, KV_OBJECT_PUT);
    objects("object_put again", side, KV_OBJECT_PUT);
    objects("object_exists", side, KV_OBJECT_EXISTS);
    objects("object_get", side, KV_OBJECT_GET);
    objects("object_delete", side, KV_OBJECT_DELETE);
    objects("object_get after it", side, KV_OBJECT_GET);
}

static void ping(const struct side *side)
{
    struct kv_op *op = NULL;
    kv_status_t status;

    next_op("ping");
    status = kv_ping_begin(side->client, 0, 0, 24, 40, 0, &op);
    finish(status, op);
}

static void tables(const struct side *side)
{
    static const char *const names[] = {"models", "sessions", "clients"};

    for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        struct kv_op *op = NULL;
        kv_status_t status;
        char name[32];

        snprintf(name, sizeof(name), "table %s", names[i]);
        next_op(name);
        status = kv_table_begin(side->client, 0, names[i], 0, &op);
        if (wait_for(status, op) == KV_OK)
            fprintf(answers, " rows %u columns %u", kv_op_table(op)->n_rows,
                    kv_op_table(op)->n_columns);
        end_op(op);
    }
}

static void length(const char *name, struct kv_session *session)
{
    struct kv_op *op = NULL;
    kv_status_t status;

    next_op(name);
    status = kv_length_begin(session, 0, &op);
    wait_for(status, op);
    fprintf(answers, " tokens %u layers", kv_op_tokens(op));
    for (uint32_t i = 0; i < kv_session_schema(session)->n_layers; i++)
        fprintf(answers, " %u", kv_op_layer_tokens(op, i));
    end_op(op);
}

static void renew(struct kv_session *session)
{
    struct kv_op *op = NULL;
    kv_status_t status;

    next_op("renew");
    status = kv_renew_begin(session, 30000, 0, &op);
    finish(status, op);
}

static void close_session(const char *name, struct kv_session *session)
{
    struct kv_op *op = NULL;
    kv_status_t status;

    next_op(name);
    status = kv_close_begin(session, 0, &op);
    finish(status, op);
    kv_session_free(session);
}

/* Put, index, ask; a fork goes its own way. */
static struct kv_session *talk_narrow(const struct side *side, struct kv_session *session)
{
    struct kv_session *fork;
    struct kv_op *op = NULL;
    kv_status_t status;

    put("put", side, session, NARROW, &(struct kv_rows){.n_layers = 1, .n_tokens = TOKENS - 2});
    put("append", side, session, NARROW,
        &(struct kv_rows){.n_layers = 1, .token_begin = TOKENS - 2, .n_tokens = 2});
    conflict(side, session);
    length("session", session);
    renew(session);
    read_box("read", side, session,
             (struct kv_rows){.n_layers = 1, .token_begin = 1000, .n_tokens = 40});
    fetch_rows("fetch", side, session);
    cancel_read(side, session);
    ask("query without codes", side, session, 9,
        (struct kv_query){.merge = KV_MERGE_SUM, .answer = KV_ANSWER_IDS, .k = 9, .rerank = 1});
    make_index("index", session);
    make_index("index again", session);
    ask_all(side, session);

    next_op("fork");
    status = kv_fork_begin(session, 1100, 0, &op);
    fork = finish_session(status, op);
    next_op("truncate");
    status = kv_truncate_begin(fork, 1090, 0, &op);
    finish(status, op);
    put("append to the fork", side, fork, NARROW,
        &(struct kv_rows){.n_layers = 1, .token_begin = 1090, .n_tokens = 1});
    ask("query the fork", side, fork, 3,
        (struct kv_query){.merge = KV_MERGE_SUM,
                          .answer = KV_ANSWER_ATTEND,
                          .k = 16,
                          .rerank = 2,
                          .summaries = 16,
                          .n_ranges = 1,
                          .ranges = (const struct kv_range[]){{2, 1091}}});
    return fork;
}

static void talk_wide(const struct side *side)
{
    struct kv_session *session = open_session("open wide", side, WIDE);
    const struct kv_rows all = {.n_layers = 3, .n_tokens = WIDE_TOKENS};

    put("put wide", side, session, WIDE, &all);
    read_box("read wide", side, session, all);
    read_box(
        "read one of them", side, session,
        (struct kv_rows){.layer_begin = 2, .n_layers = 1, .token_begin = 5, .n_tokens = 3});
    close_session("close wide", session);
}

/* The second client goes on with the fork. */
static void talk_second(const struct side *side, const struct kv_ticket *ticket)
{
    struct kv_session *session;
    struct kv_op *op = NULL;
    kv_status_t status;

    next_op("resume");
    status = kv_resume_begin(side->client, ticket, 0, &op);
    session = finish_session(status, op);
    length("session of the second", session);
    read_box("read by the second", side, session,
             (struct kv_rows){.n_layers = 1, .token_begin = 1088, .n_tokens = 3});
    close_session("close the fork", session);
}

static void talk(void)
{
    struct side *first = &sides[0], *second = &sides[1];
    struct kv_session *session, *fork;
    struct kv_ticket ticket;
    struct kv_op *op = NULL;
    kv_status_t status;

    n_ops = 0;
    open_side(0);
    open_side(1);
    ping(first);
    session = open_session("open", first, NARROW);
    fork = talk_narrow(first, session);
    kv_session_ticket(fork, &ticket);
    kv_session_free(fork);
    talk_wide(first);
    all_objects(first);
    talk_second(second, &ticket);
    tables(first);
    close_session("close", session);
    next_op("drain");
    status = kv_drain_begin(second->client, 0, 0, &op);
    finish(status, op);
    for (unsigned i = 0; i < N_CLIENTS; i++) {
        kv_client_close(sides[i].client); /* goodbye */
        sides[i] = (struct side){0};
        for (unsigned j = 0; j < ROUNDS_LAST; j++)
            step();
    }
}

/* The conversation of this build; the caller frees the text of answers. */
static char *have_it(void)
{
    char *text = NULL;
    size_t bytes = 0;

    open_world();
    answers = open_memstream(&text, &bytes);
    assert_non_null(answers);
    talk();
    assert_int_equal(fclose(answers), 0);
    return text;
}

/* ---- the recorded requests alone --------------------------------------------------------- */

/* Ports that only send what was recorded, where the clients' were. */
static struct {
    struct kv_port *ports[TAP_PORTS_MAX];
    struct kv_channel *channels[TAP_PORTS_MAX][TAP_PORTS_MAX];
    unsigned first; /* the node's come before it */
} strangers;

static void ignore_message(
    void *owner, const void *header, size_t header_bytes, const void *data, size_t data_bytes)
{
    (void)owner;
    (void)header;
    (void)header_bytes;
    (void)data;
    (void)data_bytes;
}

static void refuse_incoming(void *owner,
                            const void *header,
                            size_t header_bytes,
                            size_t data_bytes,
                            struct kv_incoming *incoming)
{
    (void)owner;
    (void)header;
    (void)header_bytes;
    (void)data_bytes;
    kv_incoming_refuse(incoming);
}

static void ignore_failure(void *owner, void *channel_arg, kv_status_t status)
{
    (void)owner;
    (void)channel_arg;
    (void)status;
}

static void ignore_sent(void *arg, kv_status_t status)
{
    (void)arg;
    (void)status;
}

static void open_strangers(void)
{
    static const struct kv_port_events events = {ignore_message, refuse_incoming,
                                                 ignore_failure};

    memset(&strangers, 0, sizeof(strangers));
    for (unsigned i = 0; i < N_CLIENTS; i++) {
        char wanted[TAP_ADDRESS_BYTES];
        struct kv_port *port;
        const void *address;
        size_t bytes;

        assert_int_equal(world.transport->ops->port_open(world.transport, &events, NULL, &port),
                         KV_OK);
        port->ops->port_address(port, &address, &bytes);
        for (unsigned number = 0; number < TAP_PORTS_MAX; number++) {
            tap_address(number, wanted);
            if (memcmp(address, wanted, bytes) != 0)
                continue;
            strangers.ports[number] = port;
            if (i == 0)
                strangers.first = number;
        }
    }
}

static void close_stranger(unsigned number)
{
    if (strangers.ports[number] != NULL)
        strangers.ports[number]->ops->port_close(strangers.ports[number]);
    strangers.ports[number] = NULL;
}

static void step_strangers(void)
{
    step_node();
    for (unsigned i = 0; i < TAP_PORTS_MAX; i++)
        if (strangers.ports[i] != NULL)
            kv_port_progress(strangers.ports[i]);
}

static void send_recorded(const struct recorded_message *message)
{
    struct kv_port *port = strangers.ports[message->from % TAP_PORTS_MAX];
    struct kv_channel **channel =
        &strangers.channels[message->from % TAP_PORTS_MAX][message->to % TAP_PORTS_MAX];
    struct kv_wire_header header;
    char address[TAP_ADDRESS_BYTES];

    assert_non_null(port);
    assert_int_equal(message->header_bytes, sizeof(header));
    memcpy(&header, message->data, sizeof(header));
    if (*channel == NULL) {
        tap_address(message->to, address);
        assert_int_equal(port->ops->connect(port, address, sizeof(address), KV_CHANNEL_NETWORK,
                                            NULL, channel),
                         KV_OK);
    }
    assert_in_range(kv_channel_send(*channel, message->data, message->header_bytes,
                                    message->data + message->header_bytes,
                                    message->bytes - message->header_bytes, ignore_sent, NULL),
                    KV_OK, KV_IN_PROGRESS);
    /* A client does not wait for what is said to its goodbye. */
    if (header.op == KV_OP_GOODBYE)
        close_stranger(message->from);
}

static void send_all(const struct recorded_messages *recorded)
{
    for (size_t i = 0; i < recorded->n; i++) {
        const struct recorded_message *message = &recorded->messages[i];

        while (world.round < message->round)
            step_strangers();
        if (message->from < strangers.first)
            continue;
        if (message->at_us > world.clock.virtual_us)
            world.clock.virtual_us = message->at_us;
        send_recorded(message);
    }
    for (unsigned i = 0; i < ROUNDS_LAST; i++)
        step_strangers();
}

/* ---- the tests --------------------------------------------------------------------------- */

static const char *path_of(const char *name)
{
    static char paths[2][4096];
    static unsigned last;

    last ^= 1;
    snprintf(paths[last], sizeof(paths[last]), "%s/%s", folder, name);
    return paths[last];
}

static void load(struct recorded_messages *ret_recorded)
{
    if (!recorded_load(path_of("messages.txt"), boxes, ret_recorded))
        fail_msg("no recorded messages");
}

/* Today's clients ask what they asked, byte by byte, and make of the answers what they made. */
static void the_same_conversation(void **state)
{
    struct recorded_messages recorded;
    char *text;

    (void)state;
    speaks.node = speaks.clients = KV_WIRE_VERSION_LEAST;
    text = have_it();
    load(&recorded);
    const bool said = recorded_messages_same(&recorded, &world.said);
    const bool answered = recorded_same(path_of("answers.txt"), text);

    assert_true(said && answered);
    free(text);
    recorded_free(&recorded);
    close_world();
}

static bool is_hello(const struct recorded_message *message)
{
    struct kv_wire_header header;

    memcpy(&header, message->data, sizeof(header));
    return header.op == KV_OP_HELLO && header.kind == KV_WIRE_REQUEST;
}

/* The hello of now says that it speaks more; in all else it is the recorded one. */
static void check_hello(const struct recorded_message *recorded, struct recorded_message *now)
{
    Kvpb__HelloRequest *then, *hello;

    assert_true(is_hello(now));
    then = kvpb__hello_request__unpack(NULL, recorded->bytes - recorded->header_bytes,
                                       recorded->data + recorded->header_bytes);
    hello = kvpb__hello_request__unpack(NULL, now->bytes - now->header_bytes,
                                        now->data + now->header_bytes);
    assert_non_null(then);
    assert_non_null(hello);
    assert_int_equal(hello->version, KV_WIRE_VERSION);
    assert_int_equal(then->version, KV_WIRE_VERSION_LEAST);
    assert_int_equal(hello->version_least, then->version_least);
    assert_int_equal(now->bytes, recorded->bytes);
    memcpy(now->data, recorded->data, now->bytes);
    kvpb__hello_request__free_unpacked(then, NULL);
    kvpb__hello_request__free_unpacked(hello, NULL);
}

/* Today's clients ask a node of then: after hello nothing that it would not understand. */
static void the_same_requests(void **state)
{
    struct recorded_messages recorded;
    unsigned n_hellos = 0;
    char *text;

    (void)state;
    speaks.node = KV_WIRE_VERSION_LEAST;
    speaks.clients = KV_WIRE_VERSION;
    text = have_it();
    load(&recorded);
    for (size_t i = 0; i < recorded.n && i < world.said.n; i++) {
        if (!is_hello(&recorded.messages[i]))
            continue;
        check_hello(&recorded.messages[i], &world.said.messages[i]);
        n_hellos++;
    }
    assert_int_equal(n_hellos, N_CLIENTS);
    const bool said = recorded_messages_same(&recorded, &world.said);
    const bool answered = recorded_same(path_of("answers.txt"), text);

    assert_true(said && answered);
    free(text);
    recorded_free(&recorded);
    close_world();
}

/* Today's node answers a client of then. */
static void the_same_replies(void **state)
{
    struct recorded_messages recorded;

    (void)state;
    speaks.node = KV_WIRE_VERSION;
    load(&recorded);
    open_world();
    open_strangers();
    send_all(&recorded);
    assert_true(recorded_messages_same(&recorded, &world.said));
    for (unsigned i = 0; i < TAP_PORTS_MAX; i++)
        close_stranger(i);
    close_world();
    recorded_free(&recorded);
}

/* Sets the ops of a batch's requests in is_asked (KV_OP_COUNT). */
static void note_entries(const struct recorded_message *message, size_t bytes, bool *is_asked)
{
    struct kv_wire_header header;
    const uint8_t *body;
    const char *why = "";

    for (size_t at = 0; at < bytes; is_asked[header.op] = true)
        if (kv_message_entry(KV_WIRE_REQUEST, message->data + message->header_bytes, bytes, &at,
                             &header, &body, &why) != KV_OK)
            fail_msg("%s", why);
}

/* No operation is left out. */
static void every_operation(void **state)
{
    struct recorded_messages recorded;
    bool is_asked[KV_OP_COUNT] = {false}, is_answered[KV_OP_COUNT] = {false};
    bool has_kind[KV_WIRE_BATCH + 1] = {false};

    (void)state;
    load(&recorded);
    for (size_t i = 0; i < recorded.n; i++) {
        struct kv_wire_header header;

        memcpy(&header, recorded.messages[i].data, sizeof(header));
        assert_true(header.op < KV_OP_COUNT && header.kind <= KV_WIRE_BATCH);
        has_kind[header.kind] = true;
        if (header.kind == KV_WIRE_REQUEST)
            is_asked[header.op] = true;
        if (header.kind == KV_WIRE_REPLY)
            is_answered[header.op] = true;
        if (header.kind == KV_WIRE_BATCH)
            note_entries(&recorded.messages[i], header.body_bytes, is_asked);
    }
    for (unsigned op = 0; op < KV_OP_COUNT; op++) {
        const char *name = kvs_op_name((enum kv_op_id)op);

        if (name == NULL || op >= FIRST_NEW_OP)
            continue;
        if (!is_asked[op])
            fail_msg("%s: never asked", name);
        /* These two have no reply, or nobody who takes it. */
        if (!is_answered[op] && op != KV_OP_CANCEL && op != KV_OP_GOODBYE)
            fail_msg("%s: never answered", name);
    }
    for (unsigned kind = KV_WIRE_REQUEST; kind <= KV_WIRE_BATCH; kind++)
        if (!has_kind[kind])
            fail_msg("no message of kind %u", kind);
    recorded_free(&recorded);
}

static void record(void **state)
{
    static const char messages_head[] =
        "Every message of the conversation of tests/protocol/test_recorded.c, which says how "
        "to\n"
        "record it anew; the form is that of tests/support/recorded_messages.h.\n";
    static const char answers_head[] =
        "What the clients got in the conversation of tests/protocol/test_recorded.c, which "
        "says\n"
        "how to record it anew.  Scores, outputs and log-sum-exps are bits of fp32.\n";
    char *text = have_it();

    (void)state;
    assert_true(recorded_save(path_of("messages.txt"), messages_head, &world.said, boxes));
    assert_true(recorded_write(path_of("answers.txt"), answers_head, text));
    free(text);
    close_world();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation),
        cmocka_unit_test(the_same_requests),
        cmocka_unit_test(the_same_replies),
        cmocka_unit_test(the_same_conversation),
    };
    const struct CMUnitTest records[] = {cmocka_unit_test(record)};

    if (argc < 2 || argc > 3 || (argc == 3 && strcmp(argv[2], "--record") != 0)) {
        fprintf(stderr, "usage: test_protocol_recorded FOLDER [--record]\n");
        return 2;
    }
    folder = argv[1];
    return argc == 3 ? cmocka_run_group_tests(records, NULL, NULL)
                     : cmocka_run_group_tests(tests, NULL, NULL);
}
