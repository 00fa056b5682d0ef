/* test_versions.c - peers of different versions of the protocol: those that have one in common
 * work with the greatest, the others are refused, and told both ranges.
 *
 * One embedded node over the loopback and the real client library, each told how much it may
 * speak.
 */
#include "tests/support/cluster.h"
#include "tests/support/numbered_prompts.h"
#include "tests/support/rows.h"

#include "client/node.h"
#include "client/op.h"
#include "client/state.h"
#include "kvserver/base/thread.h"
#include "proto/kvstore.pb-c.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <string.h>

enum {
    MEMORY_BYTES = 32 << 20,
    N_THREADS = 2, /* each has a part of every read */
    BUFFER_BYTES = 1 << 20,
    N_HEADS = 4,
    N_TOKENS = 16,
    DIM = 64,
    READ_AT = BUFFER_BYTES / 2,
    WAIT_US = 3000, /* that a read waits at the node for its rows, at least */
};

static void put_object(struct kv_client *client, struct kv_buffer *buffer)
{
    struct kv_object object = {.name = "versions", .buffer = buffer, .bytes = BUFFER_BYTES / 2};
    struct kv_op *op;

    test_fill(kv_buffer_data(buffer), object.bytes, 1);
    assert_int_equal(kv_objects_begin(client, KV_OBJECT_PUT, &object, 1, 0, &op), KV_OK);
    test_finish(op, "put");
    object.offset = READ_AT;
    assert_int_equal(kv_objects_begin(client, KV_OBJECT_GET, &object, 1, 0, &op), KV_OK);
    test_finish(op, "get");
    assert_true(test_is_filled((uint8_t *)kv_buffer_data(buffer) + READ_AT, object.bytes, 1));
}

/* Times are not known below version 9; that an object may go is a hint. */
static void put_with_time(struct kv_client *client, struct kv_buffer *buffer, uint32_t version)
{
    struct kv_object object = {.name = "for a day",
                               .buffer = buffer,
                               .bytes = 100,
                               .ttl_ms = 24 * 3600 * 1000,
                               .evictable = true};
    struct kv_op *op;

    assert_int_equal(kv_objects_begin(client, KV_OBJECT_PUT, &object, 1, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), version >= 9 ? KV_OK : KV_UNSUPPORTED);
    assert_int_equal(object.status, version >= 9 ? KV_OK : KV_UNSUPPORTED);
    kv_op_free(op);
    assert_int_equal(
        kv_object_list_begin(client, 0, &(struct kv_object_list_options){0}, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), version >= 9 ? KV_OK : KV_UNSUPPORTED);
    if (version >= 9) {
        assert_int_equal(kv_op_object_list(op)->n_objects, 2);
        assert_string_equal(kv_op_object_list(op)->objects[1].name, object.name);
    }
    kv_op_free(op);
    assert_int_equal(kv_close_id_begin(client, 0, &(struct kv_id128){{1}}, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), version >= 9 ? KV_NOT_FOUND : KV_UNSUPPORTED);
    kv_op_free(op);
    object.ttl_ms = 0;
    assert_int_equal(kv_objects_begin(client, KV_OBJECT_PUT, &object, 1, 0, &op), KV_OK);
    test_finish(op, "put");
}

/* A read that waits at the node for rows that are put later.  Returns what its reply says that
 * the node had it. */
static uint64_t read_waits(struct kv_session *session, struct kv_buffer *buffer)
{
    const struct kv_rows rows = {.n_layers = 1, .n_tokens = N_TOKENS};
    const struct kv_rows_io out = {.buffer = buffer, .offset = READ_AT},
                            in = {.buffer = buffer};
    const kv_schema_t *schema = kv_session_schema(session);
    uint8_t *memory = kv_buffer_data(buffer);
    struct kv_op *read, *put;
    struct kv_op_times times;
    struct kv_client *client;

    test_box(memory, schema, &rows, 2);
    assert_int_equal(kv_read_begin(session, &rows, &out, 0, &read), KV_OK);
    client = read->client;
    /* A node that is slow to receive it would have it wait for less. */
    assert_true(cluster_becomes(client, "status", "requests_in_flight", N_THREADS));
    for (uint64_t end_us = kv_client_now_us(client) + 2 * WAIT_US;
         kv_client_now_us(client) < end_us;)
        kv_poll(client);
    assert_int_equal(kv_put_begin(session, &rows, &in, 0, &put), KV_OK);
    test_finish(put, "put");
    if (kv_wait(read) != KV_OK)
        fail_msg("read: %s", kv_op_detail(read));
    kv_op_get_times(read, &times);
    assert_true(times.node_us <= times.ended_us - times.begun_us);
    kv_op_free(read);
    assert_true(test_is_box(memory + READ_AT, schema, &rows, 2));
    return times.node_us;
}

/* The session has rows in its first layer alone. */
static void layers_are_told(struct kv_session *session, uint32_t version)
{
    struct kv_op *op;

    assert_int_equal(kv_length_begin(session, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("length: %s", kv_op_detail(op));
    assert_int_equal(kv_op_tokens(op), 0);
    assert_int_equal(kv_op_layer_tokens(op, 0),
                     version >= KV_WIRE_VERSION_PREFIXES ? N_TOKENS : 0);
    assert_int_equal(kv_op_layer_tokens(op, 1), 0);
    kv_op_free(op);
}

/* A node that has no rotation would take codes for others than they are. */
static void
codes_are_rotated(struct kv_client *client, struct kv_session *session, uint32_t version)
{
    const struct kv_index_options index = {.n_layers = 1,
                                           .tokens = N_TOKENS,
                                           .m = 2,
                                           .bits = 2,
                                           .rotates = true,
                                           .iterations = 2,
                                           .wait = true};
    struct kv_op *op;

    if (version >= KV_WIRE_VERSION_FIRST_CUT) {
        assert_int_equal(kv_index_begin(session, &index, 0, &op), KV_OK);
        test_finish(op, "index");
        return;
    }
    assert_int_equal(kv_index_begin(session, &index, 0, &op), KV_UNSUPPORTED);
    assert_non_null(strstr(kv_client_detail(client), "rotates"));
}

/* A node that has summaries per 1,024 rows alone is not asked for others, and makes those. */
static void
summaries_are_made(struct kv_client *client, struct kv_session *session, uint32_t version)
{
    static const uint32_t sizes[] = {0, 1024, 3072};

    for (unsigned i = 0; i < 2 * sizeof(sizes) / sizeof(sizes[0]); i++) {
        const bool is_known = sizes[i / 2] < 3072 || version >= KV_WIRE_VERSION_FIRST_CUT;
        const float vectors[N_HEADS * DIM] = {1};
        const struct kv_range range = {0, N_TOKENS};
        const struct kv_index_options index = {.n_layers = 1,
                                               .tokens = N_TOKENS,
                                               .m = 2,
                                               .bits = 2,
                                               .iterations = 2,
                                               .summaries = 16,
                                               .summary_rows = sizes[i / 2],
                                               .wait = true};
        const struct kv_query query = {.n_queries = 1,
                                       .queries = vectors,
                                       .scale = 1,
                                       .merge = KV_MERGE_SUM,
                                       .answer = KV_ANSWER_IDS,
                                       .k =
                                           N_TOKENS, /* no row is left over: they may be NaNs */
                                       .rerank = 1,
                                       .summaries = 16,
                                       .summary_rows = sizes[i / 2],
                                       .n_ranges = 1,
                                       .ranges = &range};
        struct kv_op *op;
        const kv_status_t status = i % 2 == 0 ? kv_index_begin(session, &index, 0, &op)
                                              : kv_query_begin(session, &query, NULL, 0, &op);

        assert_int_equal(status, is_known ? KV_OK : KV_UNSUPPORTED);
        if (is_known)
            test_finish(op, i % 2 == 0 ? "index" : "query");
        else
            assert_non_null(strstr(kv_client_detail(client), "summary_rows"));
    }
}

/* A node that knows neither copies nor a first cut is asked for none, nor for candidates of each
 * head, nor for more candidates than it takes; and it does not count what it reads. */
static void
queries_are_cut(struct kv_client *client, struct kv_session *session, uint32_t version)
{
    static const uint32_t each[N_HEADS] = {[0 ... N_HEADS - 1] = 1};
    const bool is_known = version >= KV_WIRE_VERSION_FIRST_CUT;
    const float vectors[N_HEADS * DIM] = {1};
    const struct kv_range range = {0, N_TOKENS};
    const struct kv_index_options index = {.n_layers = 1,
                                           .tokens = N_TOKENS,
                                           .m = 2,
                                           .bits = 2,
                                           .copies = true,
                                           .iterations = 2,
                                           .wait = true};
    struct kv_op *op;

    assert_int_equal(kv_index_begin(session, &index, 0, &op),
                     is_known ? KV_OK : KV_UNSUPPORTED);
    if (is_known)
        test_finish(op, "index");
    else
        assert_non_null(strstr(kv_client_detail(client), "copies"));
    for (unsigned i = 0; i < 4; i++) {
        struct kv_query query = {.n_queries = 1,
                                 .queries = vectors,
                                 .scale = 1,
                                 .merge = KV_MERGE_SUM,
                                 .answer = KV_ANSWER_ROWS,
                                 .k = 1,
                                 .rerank = 1,
                                 .want_reads = true,
                                 .n_ranges = 1,
                                 .ranges = &range};
        struct kv_query_reads reads;
        kv_status_t wanted = KV_OK;

        if (i % 2 != 0) {
            query.first_cut = KV_CUT_INT4;
            query.candidates = 2;
        }
        if (i / 2 != 0)
            query.candidates_each = each;
        if (i != 0 && !is_known)
            wanted = KV_UNSUPPORTED;
        struct kv_buffer *buffer;
        assert_int_equal(kv_buffer_alloc(client, 1 << 16, &buffer), KV_OK);
        const struct kv_rows_io io = {.buffer = buffer};
        assert_int_equal(kv_query_begin(session, &query, &io, 0, &op), wanted);
        if (wanted != KV_OK) {
            assert_non_null(strstr(kv_client_detail(client), "first cut"));
            kv_buffer_free(buffer);
            continue;
        }
        if (kv_wait(op) != KV_OK)
            fail_msg("query: %s", kv_op_detail(op));
        kv_op_query_reads(op, &reads);
        assert_int_equal(reads.rows > 0, is_known);
        assert_int_equal(reads.books + reads.codes + reads.copies + reads.keys > 0, is_known);
        kv_op_free(op);
        kv_buffer_free(buffer);
    }
}

static void work(struct kv_client *client, uint32_t version)
{
    const uint16_t heads[] = {N_HEADS, N_HEADS};
    struct kv_session *session;
    struct kv_model_info model;
    struct kv_buffer *buffer;
    struct kv_op *op;
    uint64_t node_us;

    assert_int_equal(kv_buffer_alloc(client, BUFFER_BYTES, &buffer), KV_OK);
    put_object(client, buffer);
    put_with_time(client, buffer, version);
    test_model(&model, "versions", 2, heads, DIM, DIM);
    assert_int_equal(kv_open_begin(client, &model, NULL, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("open: %s", kv_op_detail(op));
    session = kv_op_session(op);
    kv_op_free(op);
    node_us = read_waits(session, buffer);
    if (version >= KV_WIRE_VERSION_NODE_TIME)
        assert_true(node_us >= WAIT_US);
    else
        assert_int_equal(node_us, 0);
    assert_int_equal(client->nodes[0].version, version);
    layers_are_told(session, version);
    codes_are_rotated(client, session, version);
    summaries_are_made(client, session, version);
    queries_are_cut(client, session, version);
    assert_int_equal(kv_close_begin(session, 0, &op), KV_OK);
    test_finish(op, "close");
    kv_session_free(session);
    kv_client_close(client);
}

static void every_pair(void **state)
{
    (void)state;
    for (uint32_t node = KV_WIRE_VERSION_LEAST; node <= KV_WIRE_VERSION; node++) {
        const struct cluster_setup setup = {
            .row = &kv_transport_loopback,
            .n_nodes = 1,
            .n_threads = N_THREADS,
            .memory_bytes = MEMORY_BYTES,
            .wire_version_max = node,
        };
        struct cluster cluster;

        assert_true(cluster_open(&cluster, &setup));
        for (uint32_t client = KV_WIRE_VERSION_LEAST; client <= KV_WIRE_VERSION; client++)
            work(
                cluster_connect(&cluster, &(struct cluster_client){.wire_version_max = client}),
                client < node ? client : node);
        cluster_close(&cluster);
    }
}

/* ---- strangers --------------------------------------------------------------------------- */

struct answer {
    _Atomic bool has_come;
    Kvpb__HelloReply *hello;
};

static void on_reply(void *arg, const uint8_t *reply, size_t reply_bytes)
{
    struct answer *answer = arg;

    answer->hello = kvpb__hello_reply__unpack(NULL, reply_bytes, reply);
    answer->has_come = true;
}

/* Says hello as a client that speaks least to greatest; a least of 0 is one from before there
 * were two numbers.  A node without threads answers at once what it refuses. */
static void refused(struct kvs_node *node, uint32_t least, uint32_t greatest, const char *text)
{
    Kvpb__HelloRequest request = KVPB__HELLO_REQUEST__INIT;
    uint8_t id[16] = {1}, address[8] = {2}, packed[256];
    struct answer answer = {0};
    size_t bytes;

    request.version = greatest;
    request.version_least = least;
    request.name = (char *)"a stranger";
    request.client_id = (ProtobufCBinaryData){sizeof(id), id};
    request.address = (ProtobufCBinaryData){sizeof(address), address};
    bytes = kvpb__hello_request__pack(&request, packed);
    assert_true(kvs_node_control(node, KV_OP_HELLO, 0, NULL, packed, bytes, on_reply, &answer));
    assert_true(answer.has_come);
    assert_non_null(answer.hello);
    assert_int_equal(answer.hello->outcome->status, KV_VERSION);
    if (strstr(answer.hello->outcome->detail, text) == NULL)
        fail_msg("%s: does not say %s", answer.hello->outcome->detail, text);
    kvpb__hello_reply__free_unpacked(answer.hello, NULL);
}

static void none_in_common(void **state)
{
    struct kv_transport *transport;
    char detail[256], text[64];
    struct kv_disk *disk = kv_disk_memory_open(&kv_clock_real, 0);
    struct kvs_node *node;
    struct kvs_node_config config = {
        .name = "versions",
        .memory_bytes = MEMORY_BYTES,
        .n_threads = 1,
        .clock = &kv_clock_real,
        .disk = disk,
    };

    (void)state;
    assert_int_equal(kv_transport_loopback.open(&(struct kv_transport_config){0}, &transport,
                                                detail, sizeof(detail)),
                     KV_OK);
    config.transport = transport;
    if (kvs_node_create(&config, &node, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    snprintf(text, sizeof(text), "the node %u to %u", KV_WIRE_VERSION_LEAST, KV_WIRE_VERSION);
    refused(node, 0, KV_WIRE_VERSION_LEAST - 1, "the client speaks protocol versions 5 to 5");
    refused(node, 0, KV_WIRE_VERSION_LEAST - 1, text);
    refused(node, 1, KV_WIRE_VERSION_LEAST - 1, text);
    refused(node, KV_WIRE_VERSION + 1, KV_WIRE_VERSION + 3, text);
    refused(node, 0, 0, text);
    refused(node, UINT32_MAX, UINT32_MAX, text);
    kvs_node_destroy(node);
    kv_disk_close(disk);
    transport->ops->close(transport);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_pair),
        cmocka_unit_test(none_in_common),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
