/* test_messages.c - a node and whoever speaks to it.
 *
 * A bare port, no client library: messages right in form with every field at its bounds, wrong
 * in form, data without a request, requests without their data, all of them doubled.  The node
 * runs in this thread, step by step.  After each batch its memory and its pools are back where
 * they were, and a good request is answered.
 */
#define _GNU_SOURCE /* memmem */
#include "kernels/checksum.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/slice.h"
#include "kvserver/net/message.h"
#include "kvserver/store/index/builder.h"
#include "kvserver/store/node.h"
#include "kvserver/store/node_private.h"
#include "kvserver/store/ops/ops.h"
#include "kvserver/store/ops/query.h"
#include "kvserver/store/shard/shard.h"
#include "proto/kvstore.pb-c.h"
#include "tests/support/transport_fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    N_THREADS = 2,
    ROOT = 99, /* of the session, and the epoch by which it is placed */
    EPOCH = 5,
    CREDITS = 16,
    CLIENTS_MAX = 16,
    MESSAGES = 200000,
    BATCH = 64,
    MEMORY_BYTES = 64 << 20,
    STEP_US = 200,
    SETTLE_US = 3000000, /* of virtual time: longer than any deadline here, and the stash */
    TOKENS_MAX = 4096,
    N_LAYERS = 2,
    N_HEADS = 4,
    ROW_BYTES = 128,
    FILLED_TOKENS = 1600, /* half of them a chapter that is worth a codebook */
    WRITER = 0x5eed,
};

/* What a node knows a client by. */
struct identity {
    struct kv_id128 client_id, token;
    uint32_t index, tenant;
    uint32_t n_puts[N_THREADS]; /* object_puts numbered so far */
};

static struct {
    struct kv_clock clock;
    struct kv_transport *transport, *faulty; /* the stranger's; the node's */
    struct kv_disk *disk;
    struct kvs_node *node;
    struct kv_random random;

    struct kv_port *port;
    struct kv_channel *control, *data[N_THREADS];
    struct identity me;
    uint32_t session_index;
    struct kv_id128 session_id, session_token;
    struct kv_id128 fingerprint;
    struct kv_id128 other_model; /* that may have been made */

    /* The last answer. */
    struct kv_wire_header reply;
    uint8_t body[KV_WIRE_CONTROL_MAX];
    const char *detail; /* of a control operation */
    uint64_t n_replies, n_statuses[64];
    uint64_t n_reply_batches;
    uint64_t next_id;
    uint64_t n_sent;
    uint32_t stopped; /* 1 + the data thread that stands still; 0: none */
} world;

/* ---- the port ---------------------------------------------------------------------------- */

static void take_reply(const struct kv_wire_header *header, const void *body, size_t body_bytes)
{
    world.n_replies++;
    assert_in_range(-header->status, 0, 63);
    world.n_statuses[-header->status]++;
    world.reply = *header;
    memcpy(world.body, body, body_bytes < sizeof(world.body) ? body_bytes : sizeof(world.body));
}

static void take_replies(const struct kv_wire_header *batch, const uint8_t *replies)
{
    struct kv_wire_header header;
    const uint8_t *body;
    uint32_t n = 0;
    const char *why;

    for (size_t at = 0; at < batch->body_bytes; n++) {
        assert_int_equal(kv_message_entry(KV_WIRE_REPLY, replies, batch->body_bytes, &at,
                                          &header, &body, &why),
                         KV_OK);
        take_reply(&header, body, header.body_bytes);
    }
    assert_true(n > 1); /* one that is alone is no batch */
    assert_int_equal(n, batch->n_units);
    world.n_reply_batches++;
}

static void on_message(
    void *owner, const void *message, size_t message_bytes, const void *body, size_t body_bytes)
{
    struct kv_wire_header header;
    const char *why;

    (void)owner;
    /* Whatever comes from a node is in order. */
    assert_int_equal(kv_message_check(message, message_bytes, body, body_bytes, &header, &why),
                     KV_OK);
    if (header.kind == KV_WIRE_BATCH)
        take_replies(&header, body);
    else if (header.kind == KV_WIRE_REPLY)
        take_reply(&header, body, body_bytes);
}

static void on_incoming(void *owner,
                        const void *header,
                        size_t header_bytes,
                        size_t data_bytes,
                        struct kv_incoming *incoming)
{
    (void)owner;
    (void)data_bytes;
    assert_int_equal(header_bytes, sizeof(struct kv_wire_header));
    struct kv_wire_header copy;
    memcpy(&copy, header, sizeof(copy));
    if (copy.kind == KV_WIRE_REPLY) {
        world.n_replies++;
        world.reply = copy;
    }
    kv_incoming_refuse(incoming);
}

static void on_failed(void *owner, void *channel_arg, kv_status_t status)
{
    (void)owner;
    (void)channel_arg;
    (void)status;
}

static void step(void)
{
    kvs_node_control_step(world.node);
    for (uint32_t i = 0; i < N_THREADS; i++)
        if (world.stopped != i + 1)
            kvs_node_data_step(world.node, i);
    kv_port_progress(world.port);
    world.clock.virtual_us += STEP_US;
}

static void on_sent(void *arg, kv_status_t status)
{
    (void)status;
    free(arg);
}

/* Sends a copy: what the transport keeps must outlive the caller's. */
static void send_raw(struct kv_channel *channel,
                     const void *header,
                     size_t header_bytes,
                     const void *data,
                     size_t bytes)
{
    uint8_t *copy = malloc(header_bytes + bytes + 1);

    assert_non_null(copy);
    memcpy(copy, header, header_bytes);
    if (bytes > 0)
        memcpy(copy + header_bytes, data, bytes);
    world.n_sent++;
    if (kv_channel_send(channel, copy, header_bytes, copy + header_bytes, bytes, on_sent,
                        copy) != KV_IN_PROGRESS)
        free(copy);
}

static void send_message(struct kv_channel *channel,
                         struct kv_wire_header *header,
                         const void *body,
                         size_t bytes)
{
    kv_message_seal(header, body, bytes);
    send_raw(channel, header, sizeof(*header), body, bytes);
}

static void send_bulk(struct kv_channel *channel,
                      const struct kv_wire_header *request,
                      const void *data,
                      size_t bytes)
{
    struct kv_wire_header header = *request;

    header.kind = KV_WIRE_BULK_REQUEST;
    header.bulk_bytes = bytes;
    kv_message_seal(&header, NULL, 0);
    send_raw(channel, &header, sizeof(header), data, bytes);
}

static struct kv_wire_header request_of(unsigned op)
{
    return (struct kv_wire_header){
        .kind = KV_WIRE_REQUEST,
        .op = (uint8_t)op,
        .request_id = ++world.next_id,
        .client_index = world.me.index,
        .client_token = world.me.token,
        .tenant = world.me.tenant,
        .epoch = EPOCH,
        .deadline_us = 1000000,
    };
}

/* Sends and waits for the answer; returns its status. */
static kv_status_t
ask(struct kv_channel *channel, struct kv_wire_header *header, const void *body, size_t bytes)
{
    uint64_t id = header->request_id;

    send_message(channel, header, body, bytes);
    for (unsigned i = 0; i < 100000; i++) {
        step();
        /* A spoiled message may have had the same id. */
        if (world.n_replies > 0 && world.reply.request_id == id && world.reply.op == header->op)
            return (kv_status_t)world.reply.status;
    }
    fail_msg("%s: no answer", kvs_op_name(header->op));
    return KV_DEADLINE;
}

/* The outcome of a control request; the rest of its answer is in world.body. */
static kv_status_t try_control(unsigned op, const ProtobufCMessage *message)
{
    static char detail[512];
    uint8_t packed[65536];
    struct kv_wire_header header = request_of(op);
    size_t bytes = protobuf_c_message_get_packed_size(message);
    Kvpb__CloseReply *outcome;
    kv_status_t status;

    assert_in_range(bytes, 0, sizeof(packed));
    protobuf_c_message_pack(message, packed);
    assert_int_equal(ask(world.control, &header, packed, bytes), KV_OK);
    outcome = kvpb__close_reply__unpack(NULL, world.reply.body_bytes, world.body);
    assert_non_null(outcome);
    assert_non_null(outcome->outcome);
    status = (kv_status_t)outcome->outcome->status;
    snprintf(detail, sizeof(detail), "%s", outcome->outcome->detail);
    world.detail = detail;
    kvpb__close_reply__free_unpacked(outcome, NULL);
    return status;
}

/* The same, of one that must succeed. */
static void ask_control(unsigned op, const ProtobufCMessage *message)
{
    if (try_control(op, message) != KV_OK)
        fail_msg("%s: %s", kvs_op_name(op), world.detail);
}

static ProtobufCBinaryData binary(const struct kv_id128 *id)
{
    return (ProtobufCBinaryData){sizeof(id->bytes), (uint8_t *)id->bytes};
}

static void connect_to(const void *address, size_t bytes, struct kv_channel **ret_channel)
{
    assert_int_equal(world.port->ops->connect(world.port, address, bytes, KV_CHANNEL_NETWORK,
                                              NULL, ret_channel),
                     KV_OK);
}

static void say_hello(void)
{
    Kvpb__HelloRequest request = KVPB__HELLO_REQUEST__INIT;
    Kvpb__HelloReply *reply;
    const void *address;

    memset(world.me.n_puts, 0, sizeof(world.me.n_puts));
    kv_random_fill(&world.random, &world.me.client_id, sizeof(world.me.client_id));
    request.version = KV_WIRE_VERSION;
    request.name = "stranger";
    request.tenant = world.me.tenant;
    world.port->ops->port_address(world.port, &address, &request.address.len);
    request.address.data = (uint8_t *)address;
    request.client_id = binary(&world.me.client_id);
    ask_control(KV_OP_HELLO, &request.base);
    reply = kvpb__hello_reply__unpack(NULL, world.reply.body_bytes, world.body);
    assert_non_null(reply);
    assert_int_equal(reply->n_addresses, N_THREADS);
    assert_int_equal(reply->credits, CREDITS);
    world.me.index = reply->client_index;
    memcpy(&world.me.token, reply->client_token.data, sizeof(world.me.token));
    for (uint32_t i = 0; i < N_THREADS; i++) {
        if (world.data[i] != NULL)
            world.data[i]->ops->channel_close(world.data[i]);
        connect_to(reply->addresses[i].data, reply->addresses[i].len, &world.data[i]);
    }
    kvpb__hello_reply__free_unpacked(reply, NULL);
}

/* Says hello as one more client; what it was before is the caller's to come back to. */
static struct identity another(uint32_t tenant)
{
    const struct identity before = world.me;

    world.me.tenant = tenant;
    say_hello();
    return before;
}

static void leave(const struct identity *before)
{
    Kvpb__GoodbyeRequest request = KVPB__GOODBYE_REQUEST__INIT;

    request.client_index = world.me.index;
    request.client_token = binary(&world.me.token);
    ask_control(KV_OP_GOODBYE, &request.base);
    world.me = *before;
}

/* A model with that many layers and heads; at most N_LAYERS layers. */
static void
make_model_with(const struct kv_id128 *fingerprint, uint32_t n_layers, uint32_t n_heads)
{
    Kvpb__ModelRequest request = KVPB__MODEL_REQUEST__INIT;
    Kvpb__Layer layer = KVPB__LAYER__INIT;
    Kvpb__Layer *layers[N_LAYERS] = {&layer, &layer};

    layer.kind = KV_LAYER_KV;
    layer.dtype = KV_FP16;
    layer.n_kv_heads = n_heads;
    layer.d_k = layer.d_v = ROW_BYTES / 4;
    request.name = "model";
    request.fingerprint = binary(fingerprint);
    request.n_layers = n_layers;
    request.layers = layers;
    ask_control(KV_OP_MODEL, &request.base);
}

static void make_model_of(const struct kv_id128 *fingerprint)
{
    make_model_with(fingerprint, N_LAYERS, N_HEADS);
}

static void make_model(void)
{
    make_model_of(&world.fingerprint);
}

/* Opens a session of the model and takes note of it. */
static kv_status_t
try_open_in_row(const struct kv_id128 *fingerprint, uint64_t root, uint32_t n_nodes)
{
    Kvpb__OpenRequest request = KVPB__OPEN_REQUEST__INIT;
    Kvpb__Placement placement = KVPB__PLACEMENT__INIT;
    Kvpb__OpenReply *reply;

    kv_random_fill(&world.random, &world.session_id, sizeof(world.session_id));
    request.session_id = binary(&world.session_id);
    request.token = binary(&world.session_token);
    request.fingerprint = binary(fingerprint);
    request.tokens_max = TOKENS_MAX;
    request.writer = WRITER;
    placement.epoch = EPOCH;
    placement.n_nodes = n_nodes;
    placement.root = root;
    request.placement = &placement;
    const kv_status_t status = try_control(KV_OP_OPEN, &request.base);
    reply = kvpb__open_reply__unpack(NULL, world.reply.body_bytes, world.body);
    assert_non_null(reply);
    world.session_index = reply->session_index;
    kvpb__open_reply__free_unpacked(reply, NULL);
    return status;
}

static kv_status_t try_open(const struct kv_id128 *fingerprint)
{
    return try_open_in_row(fingerprint, ROOT, 1);
}

static void open_session_of(const struct kv_id128 *fingerprint)
{
    if (try_open(fingerprint) != KV_OK)
        fail_msg("%s", world.detail);
}

static void open_session(void)
{
    open_session_of(&world.fingerprint);
}

static void close_session(void)
{
    Kvpb__CloseRequest request = KVPB__CLOSE_REQUEST__INIT;

    request.session_index = world.session_index;
    request.token = binary(&world.session_token);
    ask_control(KV_OP_CLOSE, &request.base);
}

/* The data thread that has a unit, and one unit that each has. */
static uint32_t thread_of_unit(uint32_t layer, uint32_t head)
{
    return kv_placement_unit_thread(ROOT, layer * N_HEADS + head, 1, N_THREADS);
}

static uint32_t thread_of_name(const char *name, size_t bytes)
{
    struct kv_id128 hash = kv_hash128(name, bytes);

    return kv_placement_object_thread(kv_placement_object_slot(&hash), N_THREADS);
}

/* As a client does that waits for one put at a time.  What a spoiled message has settled stays
 * so. */
static void number_put(struct kv_wire_header *header, uint32_t thread)
{
    uint32_t settled = world.node->shard[thread].clients[world.me.index].puts_settled;
    uint32_t *next = &world.me.n_puts[thread];

    if (settled - *next < INT32_MAX)
        *next = settled;
    header->put_settled = *next;
    if (header->op == KV_OP_OBJECT_PUT)
        header->put_number = (*next)++;
}

/* The version that the node has under a name of tenant 0; 1 if it has none. */
static uint64_t version_of(const char *name, size_t bytes)
{
    const struct kv_id128 key = kv_hash128(name, bytes);
    const struct kvs_stored_object *object =
        kvs_objects_find(&world.node->shard[thread_of_name(name, bytes)].objects, &key);

    return object != NULL ? object->version : 1;
}

/* ---- what must hold after whatever was sent ---------------------------------------------- */

/* Lets all deadlines pass, then looks at what the node has lent. */
static void settle(void)
{
    uint64_t end_us = world.clock.virtual_us + SETTLE_US;

    while (world.clock.virtual_us < end_us) {
        step();
        world.clock.virtual_us += 500;
    }
    for (uint32_t i = 0; i < N_THREADS; i++) {
        const struct kvs_shard *data = &world.node->shard[i];

        assert_int_equal(kv_pool_used(data->requests), 0);
        assert_int_equal(kv_pool_used(data->bodies), 0);
        assert_int_equal(kv_pool_used(data->stagings), 0);
        assert_int_equal(kv_pool_used(data->pending_receives), 0);
        for (unsigned j = 0; j < KV_PRIORITY_COUNT; j++)
            assert_null(data->classes[j].first);
        assert_null(data->staging_waiters.first);
        assert_null(data->looking.first);
        assert_null(data->woken);
        assert_true(kvs_query_queue_is_idle(kvs_query_queue_of(data)));
        struct kvs_indexer_stats index;
        kvs_indexer_get_stats(data->indexer, &index);
        assert_int_equal(index.n_jobs, 0);
        for (uint32_t j = 0; j < data->n_sessions; j++)
            assert_null(data->sessions[j].waiters);
        for (uint32_t j = 0; j < data->n_sessions; j++) {
            const struct kvs_shard_session *part = &data->sessions[j];

            for (uint32_t k = 0; k < part->n_units; k++) {
                assert_int_equal(part->units[k].committed, part->units[k].reserved);
                assert_int_equal(part->units[k].n_transfers, 0);
            }
        }
    }
    assert_int_equal(world.node->control.n_calls, 0);
}

/* A good put, read and object round trip in a session of its own. */
static void good_requests_work(void)
{
    uint32_t layer = (uint32_t)kv_random_below(&world.random, N_LAYERS);
    uint32_t head = (uint32_t)kv_random_below(&world.random, N_HEADS);
    struct kv_channel *channel = world.data[thread_of_unit(layer, head)];
    struct kv_wire_unit unit = {(uint16_t)layer, (uint16_t)head, 0};
    struct kv_wire_header header;
    uint8_t body[sizeof(unit) + 4 + ROW_BYTES];
    uint8_t row[ROW_BYTES];
    uint32_t crc;

    open_session();
    kv_random_fill(&world.random, row, sizeof(row));
    crc = kv_crc32c(kv_row_seed(WRITER, layer, head, 0), row, sizeof(row));
    memcpy(body, &unit, sizeof(unit));
    memcpy(body + sizeof(unit), &crc, 4);
    memcpy(body + sizeof(unit) + 4, row, sizeof(row));
    header = request_of(KV_OP_PUT);
    header.session_index = world.session_index;
    header.token = world.session_token;
    header.generation = 1;
    header.n_units = header.token_count = 1;
    assert_int_equal(ask(channel, &header, body, sizeof(body)), KV_OK);
    header.op = KV_OP_READ;
    header.request_id = ++world.next_id;
    assert_int_equal(ask(channel, &header, body, sizeof(unit)), KV_OK);
    assert_int_equal(world.reply.body_bytes, 4 + sizeof(row));
    assert_memory_equal(world.body + 4, row, sizeof(row));
    close_session();
}

static uint64_t memory_lent(void)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < N_THREADS; i++)
        bytes += kvs_arena_bytes_used(world.node->shard[i].arena);
    return bytes;
}

/* Takes away what strangers have stored. */
static void clear_objects(void)
{
    for (uint32_t i = 0; i < N_THREADS; i++) {
        struct kvs_objects *objects = &world.node->shard[i].objects;
        struct kvs_stored_object *object;
        size_t cursor = 0;

        while ((object = kv_map_next(objects->map, &cursor)) != NULL) {
            struct kv_id128 key = object->key;

            assert_true(kvs_objects_remove(objects, &key));
            cursor = 0;
        }
        assert_int_equal(objects->bytes, 0);
    }
}

static uint64_t counted(size_t offset)
{
    uint64_t n = kvs_counted(
        (const _Atomic uint64_t *)(const void *)((const char *)&world.node->control.stats +
                                                 offset));

    for (uint32_t i = 0; i < N_THREADS; i++)
        n += kvs_counted(
            (const _Atomic uint64_t *)(const void *)((const char *)&world.node->shard[i].stats +
                                                     offset));
    return n;
}
#define COUNTED(name) counted(offsetof(struct kvs_stats, name))

/* ---- messages ---------------------------------------------------------------------------- */

/* What a number may be spoiled to: bounds of counts and of sizes, and floats where a scale, a
 * share or a key is wanted. */
static const uint64_t boundaries[] = {
    0,
    1,
    2,
    7,
    8,
    16,
    64,
    127,
    128,
    129,
    UINT8_MAX,
    N_HEADS,
    KV_RANGES_MAX,
    KV_RANGES_MAX + 1,
    KV_KMEANS_ITERATIONS_MAX,
    KV_KMEANS_ITERATIONS_MAX + 1,
    TOKENS_MAX - 1,
    TOKENS_MAX,
    TOKENS_MAX + 1,
    KV_SELECTED_MAX,
    KV_SELECTED_MAX + 1,
    KV_WIRE_ROWS_MAX,
    KV_WIRE_ROWS_MAX + 1,
    UINT16_MAX,
    KV_TOKENS_MAX / KV_BLOCK_TOKENS,
    KV_TOKENS_MAX / KV_BLOCK_TOKENS + 1,
    KV_WIRE_BODY_MAX,
    KV_WIRE_BODY_MAX + 1,
    KV_WIRE_BULK_MAX - 1,
    KV_WIRE_BULK_MAX,
    KV_WIRE_BULK_MAX + 1,
    KV_TOKENS_MAX,
    KV_TOKENS_MAX + 1,
    KV_OBJECT_BYTES_MAX,
    KV_OBJECT_BYTES_MAX + 1,
    0x3f800000, /* 1 */
    0x3f800001,
    0x7f7fffff, /* the largest */
    0x7f800000, /* infinity */
    0x7fc00000, /* not a number */
    INT32_MAX,
    UINT64_C(1) << 31, /* -0 */
    0xbf800000,        /* -1 */
    0xff800000,
    UINT32_MAX - 1,
    UINT32_MAX,
    UINT64_C(1) << 32,
    INT64_MAX,
    UINT64_C(1) << 63,
    UINT64_MAX - 1,
    UINT64_MAX,
};
enum {
    N_FIXED = sizeof(boundaries) / sizeof(boundaries[0]),
    N_BOUNDARIES = N_FIXED + 6, /* beside what is usual, twice each, and at random */
};

static uint64_t boundary_at(uint64_t usual, unsigned which)
{
    if (which < N_FIXED)
        return boundaries[which];
    if (which < N_FIXED + 2)
        return usual + 1;
    if (which < N_FIXED + 4)
        return usual - 1;
    return kv_random_next(&world.random) >> kv_random_below(&world.random, 64);
}

static unsigned any_boundary(void)
{
    return (unsigned)kv_random_below(&world.random, N_BOUNDARIES);
}

static uint64_t boundary(uint64_t usual)
{
    return boundary_at(usual, any_boundary());
}

/* A number of `bytes` bytes becomes the boundary's, as much of that as fits. */
static void spoil_number(void *at, size_t bytes, unsigned which)
{
    uint64_t value = 0;

    memcpy(&value, at, bytes);
    value = boundary_at(value, which);
    memcpy(at, &value, bytes);
}

/* Where a field may be spoiled: every one of the header but those that seal it. */
static const struct {
    const char *name;
    size_t offset, bytes;
} fields[] = {
#define FIELD(name)                                    \
    {                                                  \
#name, offsetof(struct kv_wire_header, name),  \
            sizeof(((struct kv_wire_header *)0)->name) \
    }
    FIELD(kind),           FIELD(op),
    FIELD(status),         FIELD(request_id),
    FIELD(client_index),   FIELD(session_index),
    FIELD(generation),     FIELD(tenant),
    FIELD(epoch),          FIELD(deadline_us),
    FIELD(flags),          FIELD(bulk_bytes),
    FIELD(n_units),        FIELD(token_begin),
    FIELD(token_count),    FIELD(snapshot),
    FIELD(layer),          FIELD(offset),
    FIELD(object_bytes),   FIELD(object_crc),
    FIELD(n_rows),         FIELD(name_bytes),
    FIELD(object_version), FIELD(put_number),
    FIELD(put_settled),
#undef FIELD
};
enum {
    N_FIELDS = sizeof(fields) / sizeof(fields[0])
};

static void spoil(struct kv_wire_header *header, size_t field, unsigned which)
{
    spoil_number((uint8_t *)header + fields[field].offset, fields[field].bytes, which);
    /* Longer ones would only keep this client's own credits busy for longer than the test. */
    if (header->deadline_us > SETTLE_US / 2)
        header->deadline_us = SETTLE_US / 2;
}

/* A number of a body. */
struct number {
    const char *name;
    size_t offset, bytes;
};

enum {
    NUMBERS_MAX = 64
};

#define NUMBER(type, name)                                     \
    {                                                          \
#name, offsetof(type, name), sizeof(((type *)0)->name) \
    }
static const struct number index_numbers[] = {
    NUMBER(struct kv_wire_index, chapter_blocks), NUMBER(struct kv_wire_index, m),
    NUMBER(struct kv_wire_index, bits),           NUMBER(struct kv_wire_index, iterations),
    NUMBER(struct kv_wire_index, budget_us),      NUMBER(struct kv_wire_index, seed),
    NUMBER(struct kv_wire_index, flags),          NUMBER(struct kv_wire_index, summaries),
    NUMBER(struct kv_wire_index, summary_blocks),
};
static const struct number query_numbers[] = {
    NUMBER(struct kv_wire_query, answer),     NUMBER(struct kv_wire_query, merge),
    NUMBER(struct kv_wire_query, n_queries),  NUMBER(struct kv_wire_query, k),
    NUMBER(struct kv_wire_query, rerank),     NUMBER(struct kv_wire_query, scale),
    NUMBER(struct kv_wire_query, n_ranges),   NUMBER(struct kv_wire_query, flags),
    NUMBER(struct kv_wire_query, summaries),  NUMBER(struct kv_wire_query, summary_blocks),
    NUMBER(struct kv_wire_query, selection),  NUMBER(struct kv_wire_query, fraction),
    NUMBER(struct kv_wire_query, reserved),   NUMBER(struct kv_wire_query, first_cut),
    NUMBER(struct kv_wire_query, candidates),
};
static const struct number unit_numbers[] = {
    NUMBER(struct kv_wire_unit, layer),
    NUMBER(struct kv_wire_unit, kv_head),
    NUMBER(struct kv_wire_unit, n_ids),
};
#undef NUMBER

/* Appends `n` numbers of a struct that lies at `at`; returns how many there are then. */
static unsigned list_numbers(
    struct number *list, unsigned n_there, const struct number *numbers, size_t n, size_t at)
{
    for (size_t i = 0; i < n && n_there < NUMBERS_MAX; i++) {
        list[n_there] = numbers[i];
        list[n_there++].offset += at;
    }
    return n_there;
}
#define LIST_NUMBERS(list, n_there, numbers, at) \
    list_numbers(list, n_there, numbers, sizeof(numbers) / sizeof((numbers)[0]), at)

/* The numbers of a body in order: of its fixed part, of its units, and the first of what
 * follows (ids, CRCs, ranges, vectors, an object's name), then the last ones. */
static unsigned
numbers_of(const struct kv_wire_header *header, size_t bytes, struct number ret_list[])
{
    const unsigned flags = header->op < KV_OP_COUNT ? kvs_ops[header->op].flags : 0;
    unsigned n = 0;
    size_t at = 0;

    if (header->op == KV_OP_INDEX) {
        n = LIST_NUMBERS(ret_list, n, index_numbers, at);
        at = sizeof(struct kv_wire_index);
    } else if (header->op == KV_OP_QUERY) {
        n = LIST_NUMBERS(ret_list, n, query_numbers, at);
        at = sizeof(struct kv_wire_query);
    }
    if (flags & KVS_OP_NEEDS_SESSION)
        for (uint32_t i = 0; i < header->n_units; i++, at += sizeof(struct kv_wire_unit))
            n = LIST_NUMBERS(ret_list, n, unit_numbers, at);
    for (unsigned i = 0; i < 16 && n < NUMBERS_MAX && at + 4 <= bytes; i++, at += 4)
        ret_list[n++] = (struct number){"first", at, 4};
    for (size_t end = bytes; n < NUMBERS_MAX && end >= at + 4 && end + 16 > bytes; end -= 4)
        ret_list[n++] = (struct number){"last", end - 4, 4};
    return n;
}

/* One number of a body's fixed part, sometimes. */
static void spoil_body(uint8_t *body, const struct number *numbers, size_t n)
{
    const struct number *number = &numbers[kv_random_below(&world.random, n)];

    if (kv_random_below(&world.random, 3) == 0)
        spoil_number(body + number->offset, number->bytes, any_boundary());
}

/* Units of that thread, at most `most`. */
static uint32_t
some_units(uint32_t thread, uint32_t most, uint32_t n_ids, struct kv_wire_unit *ret_units)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < N_LAYERS * N_HEADS && n < most; i++)
        if (thread_of_unit(i / N_HEADS, i % N_HEADS) == thread)
            ret_units[n++] =
                (struct kv_wire_unit){(uint16_t)(i / N_HEADS), (uint16_t)(i % N_HEADS), n_ids};
    return n;
}

static size_t put_bytes(uint8_t *body, size_t at, const void *data, size_t bytes)
{
    memcpy(body + at, data, bytes);
    return at + bytes;
}

static const uint16_t rests[] = {0, 16, 64}, groups[] = {0, 8, 24};

static size_t make_index(uint32_t thread, struct kv_wire_header *header, uint8_t *body)
{
    struct kv_random *random = &world.random;
    struct kv_wire_unit units[N_LAYERS * N_HEADS];
    const struct kv_wire_index index = {
        .chapter_blocks = (uint32_t)kv_random_below(random, 3) * 8,
        .m = (uint16_t)(1 << kv_random_below(random, 3)),
        .bits = (uint16_t)(4 + kv_random_below(random, 3)),
        .iterations = 1 + (uint32_t)kv_random_below(random, 3),
        .seed = kv_random_next(random),
        .flags = (uint32_t)kv_random_below(random, KV_WIRE_INDEX_FLAGS + 1),
        .summaries = rests[kv_random_below(random, 3)],
        .summary_blocks = groups[kv_random_below(random, 3)],
    };
    size_t bytes = put_bytes(body, 0, &index, sizeof(index));

    header->n_units = some_units(thread, 3, 0, units);
    header->token_count = (uint32_t)kv_random_below(random, 700);
    spoil_body(body, index_numbers, sizeof(index_numbers) / sizeof(index_numbers[0]));
    return put_bytes(body, bytes, units, header->n_units * sizeof(units[0]));
}

static size_t make_query(uint32_t thread, struct kv_wire_header *header, uint8_t *body)
{
    struct kv_random *random = &world.random;
    struct kv_wire_unit units[N_LAYERS * N_HEADS];
    struct kv_wire_query query = {
        .answer = (uint8_t)(KV_ANSWER_IDS + kv_random_below(random, 3)),
        .merge = (uint8_t)(1 + kv_random_below(random, 4)),
        .n_queries = (uint16_t)(1 + kv_random_below(random, 4)),
        .k = 1 + (uint32_t)kv_random_below(random, 200),
        .rerank = 1 + (uint32_t)kv_random_below(random, 4),
        .scale = 0.2f,
        .n_ranges = 1 + (uint32_t)kv_random_below(random, 3),
        .flags = (kv_random_below(random, 2) ? KV_WIRE_WEIGHTS : 0) |
                 (kv_random_below(random, 3) ? 0 : KV_WIRE_EACH) |
                 (kv_random_below(random, 2) ? KV_WIRE_READS : 0),
        .summaries = rests[kv_random_below(random, 3)],
        .summary_blocks = groups[kv_random_below(random, 3)],
        .selection = (uint32_t)kv_random_below(random, 3),
    };
    if (query.selection != KV_SELECT_TOP)
        query.fraction = 0.01f * (float)(1 + kv_random_below(random, 100));
    if (kv_random_below(random, 2)) {
        query.first_cut = KV_CUT_INT4;
        query.candidates = (uint16_t)(query.rerank + kv_random_below(random, 13));
    }
    if (query.answer == KV_ANSWER_ATTEND && kv_random_below(random, 2) == 0)
        query.flags |= KV_WIRE_IDS;
    uint32_t n_held = (uint32_t)kv_random_below(random, 3), token = 0;
    size_t bytes = put_bytes(body, 0, &query, sizeof(query));

    header->n_units =
        some_units(thread, 1 + (uint32_t)kv_random_below(random, 3), n_held, units);
    bytes = put_bytes(body, bytes, units, header->n_units * sizeof(units[0]));
    for (uint32_t i = 0; i < query.n_ranges; i++) {
        struct kv_wire_range range = {token + (uint32_t)kv_random_below(random, 9), 0};

        token = range.end = range.begin + 1 + (uint32_t)kv_random_below(random, 200);
        bytes = put_bytes(body, bytes, &range, sizeof(range));
    }
    for (uint32_t i = 0; (query.flags & KV_WIRE_EACH) && i < header->n_units; i++) {
        const uint32_t least = query.first_cut == KV_CUT_NONE ? 1 : query.rerank;
        const uint32_t most = query.first_cut == KV_CUT_NONE ? query.rerank : query.candidates;
        uint32_t each = least + (uint32_t)kv_random_below(random, most - least + 1);

        if (kv_random_below(random, 50) == 0)
            each = (uint32_t)boundary(each);
        bytes = put_bytes(body, bytes, &each, sizeof(each));
    }
    for (uint32_t i = 0; i < header->n_units * query.n_queries * ROW_BYTES / 4; i++) {
        float element = (float)kv_random_below(random, 1000) / 500 - 1;

        bytes = put_bytes(body, bytes, &element, sizeof(element));
    }
    for (uint32_t i = 0; i < header->n_units * n_held; i++) {
        struct kv_wire_cached_block held = {i % n_held, (uint32_t)kv_random_next(random)};

        bytes = put_bytes(body, bytes, &held, sizeof(held));
    }
    spoil_body(body, query_numbers, sizeof(query_numbers) / sizeof(query_numbers[0]));
    return bytes;
}

/* A request that is nearly right; its thread.  Its body is written to `body`. */
static uint32_t make_request(unsigned op,
                             struct kv_wire_header *ret_header,
                             uint8_t *body,
                             size_t *ret_bytes,
                             size_t *ret_bulk)
{
    static const uint32_t counts[] = {1, 1, 2, 5, 40, 128, 129, 700};
    struct kv_random *random = &world.random;
    struct kv_wire_header header = request_of(op);
    uint32_t thread = (uint32_t)kv_random_below(random, N_THREADS);
    uint32_t count = counts[kv_random_below(random, 8)];
    size_t bytes = 0, bulk = 0;

    header.deadline_us = 1 + (uint32_t)kv_random_below(random, 20000);
    if (op < KV_OP_COUNT && (kvs_ops[op].flags & KVS_OP_NEEDS_SESSION)) {
        header.session_index = world.session_index;
        header.token = world.session_token;
        header.generation = 1;
    }
    if (op == KV_OP_INDEX) {
        bytes = make_index(thread, &header, body);
    } else if (op == KV_OP_QUERY) {
        bytes = make_query(thread, &header, body);
    } else if (op == KV_OP_PUT || op == KV_OP_APPEND || op == KV_OP_READ || op == KV_OP_FETCH) {
        bool is_put = op == KV_OP_PUT || op == KV_OP_APPEND;
        struct kv_wire_unit units[N_LAYERS * N_HEADS];
        uint32_t n_units = some_units(thread, 1 + (uint32_t)kv_random_below(random, 3),
                                      op == KV_OP_FETCH ? count : 0, units);
        uint32_t n_rows;

        header.n_units = n_units;
        header.token_count = op == KV_OP_FETCH ? 0 : count;
        header.token_begin = op == KV_OP_FETCH ? 0 : (uint32_t)kv_random_below(random, 300);
        if (kv_random_below(random, 2) == 0)
            header.token_begin = 0;
        n_rows = n_units * count;
        memcpy(body, units, n_units * sizeof(units[0]));
        bytes = n_units * sizeof(units[0]);
        if (op == KV_OP_FETCH) {
            for (uint32_t i = 0; i < n_rows; i++, bytes += 4) {
                uint32_t id = (uint32_t)kv_random_below(random, 200);

                if (kv_random_below(random, 2000) == 0)
                    id = (uint32_t)boundary(id);
                memcpy(body + bytes, &id, 4);
            }
        } else if (is_put) {
            uint8_t row[ROW_BYTES];

            for (uint32_t i = 0; i < n_units; i++) {
                for (uint32_t j = 0; j < count; j++, bytes += 4) {
                    uint32_t token = header.token_begin + j, crc;

                    memset(row, (int)(units[i].kv_head + token), sizeof(row));
                    crc =
                        kv_crc32c(kv_row_seed(WRITER, units[i].layer, units[i].kv_head, token),
                                  row, sizeof(row));
                    memcpy(body + bytes, &crc, 4);
                }
            }
            size_t rows_bytes = (size_t)n_rows * ROW_BYTES;
            uint8_t *rows = body + bytes;
            for (uint32_t i = 0; i < n_units; i++)
                for (uint32_t j = 0; j < count; j++, rows += ROW_BYTES)
                    memset(rows, (int)(units[i].kv_head + header.token_begin + j), ROW_BYTES);
            if (rows_bytes > KV_WIRE_INLINE_MAX || kv_random_below(random, 2) == 0)
                bulk = rows_bytes;
            else
                bytes += rows_bytes;
        }
    } else if (op >= KV_OP_OBJECT_PUT && op <= KV_OP_OBJECT_DELETE) {
        static const uint32_t sizes[] = {0, 1, 100, 5000, 40000, 70000, 1 << 20, 1500000};
        char name[16];
        uint32_t size = sizes[kv_random_below(random, 8)];
        size_t name_bytes = (size_t)snprintf(name, sizeof(name), "name-%u",
                                             (unsigned)kv_random_below(random, 8));

        thread = thread_of_name(name, name_bytes);
        header.name_bytes = (uint32_t)name_bytes;
        memcpy(body, name, name_bytes);
        bytes = name_bytes;
        header.object_version = version_of(name, name_bytes);
        number_put(&header, thread);
        if (op == KV_OP_OBJECT_PUT) {
            struct kv_id128 hash = kv_hash128(name, name_bytes);
            uint8_t *data = body + KV_WIRE_BODY_MAX;

            memset(data, (int)size, size);
            for (uint32_t i = 0; i < kvs_object_n_pieces(size); i++, bytes += 4) {
                uint32_t crc =
                    kv_crc32c(kv_object_seed(&hash) + i, data + (size_t)i * KV_WIRE_BULK_MAX,
                              kvs_object_piece_bytes(size, i));
                memcpy(body + bytes, &crc, 4);
            }
            header.object_bytes = size;
            if (size > 40000 || (size > 0 && kv_random_below(random, 2) == 0)) {
                bulk = size;
            } else {
                memcpy(body + bytes, data, size);
                bytes += size;
            }
            memmove(body + bytes, data, bulk);
        }
    } else if (op == KV_OP_PING) {
        header.token_count = count;
        bytes = count;
        memset(body, 0, bytes);
    } else if (op == KV_OP_CANCEL) {
        header.offset = world.next_id - kv_random_below(random, BATCH);
    } else {
        bytes = kv_random_below(random, 200);
        kv_random_fill(random, body, bytes);
    }
    header.bulk_bytes = bulk;
    *ret_header = header;
    *ret_bytes = bytes;
    *ret_bulk = bulk;
    return thread;
}

static uint8_t scratch[KV_WIRE_BODY_MAX + (4 << 20)];

static struct kv_wire_header session_request(unsigned op, uint32_t generation)
{
    struct kv_wire_header header = request_of(op);

    header.session_index = world.session_index;
    header.token = world.session_token;
    header.generation = generation;
    return header;
}

/* A unit and the CRCs of its rows [begin, begin + count), then the rows, each of which is its
 * token over and over.  Returns the bytes before the rows. */
static size_t put_body(const struct kv_wire_unit *unit,
                       size_t row_bytes,
                       uint32_t begin,
                       uint32_t count,
                       uint8_t *body)
{
    size_t at = put_bytes(body, 0, unit, sizeof(*unit));
    uint8_t *rows = body + at + count * sizeof(uint32_t);

    for (uint32_t i = 0; i < count; i++, rows += row_bytes) {
        uint32_t crc;

        memset(rows, (int)(begin + i), row_bytes);
        crc = kv_crc32c(kv_row_seed(WRITER, unit->layer, unit->kv_head, begin + i), rows,
                        row_bytes);
        at = put_bytes(body, at, &crc, sizeof(crc));
    }
    return at;
}

static void
fill_unit(const struct kv_wire_unit *unit, size_t row_bytes, uint32_t begin, uint32_t n_tokens)
{
    struct kv_wire_header header = session_request(KV_OP_PUT, 1);
    size_t head = put_body(unit, row_bytes, begin, n_tokens, scratch);

    header.n_units = 1;
    header.token_begin = begin;
    header.token_count = n_tokens;
    assert_int_equal(ask(world.data[thread_of_unit(unit->layer, unit->kv_head)], &header,
                         scratch, head + n_tokens * row_bytes),
                     KV_OK);
}

/* One message, or a few that belong together, spoiled in some way. */
static void send_something(void)
{
    struct kv_random *random = &world.random;
    unsigned op = 1 + (unsigned)kv_random_below(random, KV_OP_QUERY);
    struct kv_wire_header header;
    size_t bytes, bulk;
    uint32_t thread;
    struct kv_channel *channel;

    if (kv_random_below(random, 40) == 0)
        op = 1 + (unsigned)kv_random_below(random, KV_OP_COUNT);
    thread = make_request(op, &header, scratch, &bytes, &bulk);
    channel = world.data[thread];
    uint8_t *bulk_data = scratch + bytes;

    switch (kv_random_below(random, 16)) {
    case 0: /* as it should be */
    case 1:
        send_message(channel, &header, scratch, bytes);
        if (bulk > 0)
            send_bulk(channel, &header, bulk_data, bulk);
        break;
    case 2: /* the data first */
        if (bulk > 0)
            send_bulk(channel, &header, bulk_data, bulk);
        send_message(channel, &header, scratch, bytes);
        break;
    case 3: /* without the other half */
        if (bulk > 0 && kv_random_below(random, 2) == 0)
            send_bulk(channel, &header, bulk_data, bulk);
        else
            send_message(channel, &header, scratch, bytes);
        break;
    case 4: /* data of another size */
        send_message(channel, &header, scratch, bytes);
        bulk = (size_t)kv_random_below(random, 200000);
        send_bulk(channel, &header, bulk_data, bulk);
        break;
    case 5: /* doubled */
        for (unsigned i = 0; i < 2; i++) {
            send_message(channel, &header, scratch, bytes);
            if (bulk > 0) {
                send_bulk(channel, &header, bulk_data, bulk);
                send_bulk(channel, &header, bulk_data, bulk);
            }
        }
        break;
    case 6: /* another data thread's */
        send_message(world.data[(thread + 1) % N_THREADS], &header, scratch, bytes);
        break;
    case 7: { /* another body */
        size_t other = kv_random_below(random, 3) == 0
                           ? kv_random_below(random, KV_WIRE_BODY_MAX)
                           : kv_random_below(random, 2 * bytes + 2);
        if (other > bytes)
            kv_random_fill(random, scratch + bytes, other - bytes);
        if (bytes > 0 && kv_random_below(random, 2) == 0)
            kv_random_fill(random, scratch, bytes < 64 ? bytes : 64);
        send_message(channel, &header, scratch, other);
        break;
    }
    case 8: /* a byte of the body */
        if (bytes > 0)
            scratch[kv_random_below(random, bytes)] ^= 1 << kv_random_below(random, 8);
        send_message(channel, &header, scratch, bytes);
        if (bulk > 0)
            send_bulk(channel, &header, bulk_data, bulk);
        break;
    case 9: { /* not sealed: version, checksums, cut short */
        uint8_t raw[sizeof(header) + 8];

        kv_message_seal(&header, scratch, bytes);
        memcpy(raw, &header, sizeof(header));
        size_t size = sizeof(header);
        if (kv_random_below(random, 4) == 0)
            size = kv_random_below(random, sizeof(raw) + 1);
        else
            raw[kv_random_below(random, sizeof(header))] ^= 1 << kv_random_below(random, 8);
        memset(raw + sizeof(header), 0, 8);
        send_raw(channel, raw, size, scratch, bytes);
        break;
    }
    case 10: { /* anything at all */
        uint8_t raw[KV_TRANSPORT_HEADER_MAX];

        kv_random_fill(random, raw, sizeof(raw));
        kv_random_fill(random, scratch, 300);
        if (kv_random_below(random, 2) == 0) {
            raw[0] = KV_WIRE_VERSION;
            raw[1] = 0;
        }
        send_raw(channel, raw, kv_random_below(random, sizeof(raw) + 1), scratch,
                 kv_random_below(random, 10) == 0 ? 100000 : kv_random_below(random, 300));
        break;
    }
    default: /* one or two fields, all else in order */
        for (uint64_t n = 1 + kv_random_below(random, 2); n > 0; n--)
            spoil(&header, kv_random_below(random, N_FIELDS), any_boundary());
        send_message(channel, &header, scratch, bytes);
        if (bulk > 0 && kv_random_below(random, 2) == 0)
            send_bulk(channel, &header, bulk_data, bulk);
        break;
    }
}

static void data_threads_take_anything(void **state)
{
    uint64_t lent, n_batches = 0, begin = kv_clock_now(&kv_clock_real);

    (void)state;
    good_requests_work();
    settle();
    lent = memory_lent();
    world.n_sent = 0;
    while (world.n_sent < MESSAGES) {
        bool settles = n_batches++ % 50 == 49;

        if (n_batches % 50 == 1)
            open_session();
        for (unsigned i = 0; i < BATCH; i++) {
            send_something();
            if (kv_random_below(&world.random, 2) == 0)
                step();
        }
        for (unsigned i = 0; i < 20; i++)
            step();
        for (uint32_t i = 0; i < N_THREADS; i++)
            assert_in_range(kv_pool_used(world.node->shard[i].requests), 0, 2 * CREDITS);
        if (settles) {
            settle();
            close_session();
            clear_objects();
            good_requests_work();
            settle();
            assert_true(memory_lent() <= lent + (N_THREADS * 2 * KVS_ARENA_PAGE));
        }
    }
    settle();
    print_message("%llu messages, %llu answers, %llu ok, %llu bad, %llu refused, %llu dropped, "
                  "%.1f s\n",
                  (unsigned long long)world.n_sent, (unsigned long long)world.n_replies,
                  (unsigned long long)world.n_statuses[0],
                  (unsigned long long)COUNTED(bad_messages),
                  (unsigned long long)COUNTED(rejected), (unsigned long long)COUNTED(dropped),
                  (double)(kv_clock_now(&kv_clock_real) - begin) / 1e6);
    assert_true(COUNTED(bad_messages) > 0 && COUNTED(rejected) > 0 && COUNTED(replies) > 0);
}

/* A request and its data; to the control thread, too, if it is one of its. */
static void send_all(
    uint32_t thread, struct kv_wire_header *header, uint8_t *body, size_t bytes, size_t bulk)
{
    send_message(world.data[thread], header, body, bytes);
    if (bulk > 0)
        send_bulk(world.data[thread], header, body + bytes, bulk);
    step();
    if (header->op != KV_OP_DRAIN && kvs_op_is_control(header->op)) {
        send_message(world.control, header, body, bytes);
        step();
    }
}

/* A session whose units have rows, the first ones with codes and summaries: what is let in by
 * mistake finds something to work on. */
static void open_filled_session(void)
{
    const struct kv_wire_index index = {.chapter_blocks = 8,
                                        .m = 2,
                                        .bits = 4,
                                        .iterations = 2,
                                        .flags = KV_WIRE_INDEX_WAIT,
                                        .summaries = 16};

    open_session();
    for (uint16_t i = 0; i < N_LAYERS * N_HEADS; i++) {
        const struct kv_wire_unit unit = {i / N_HEADS, i % N_HEADS, 0};

        for (uint32_t token = 0; token < FILLED_TOKENS; token += FILLED_TOKENS / 4)
            fill_unit(&unit, ROW_BYTES, token, FILLED_TOKENS / 4);
    }
    for (uint32_t thread = 0; thread < N_THREADS; thread++) {
        struct kv_wire_header header = session_request(KV_OP_INDEX, 1);
        struct kv_wire_unit units[N_LAYERS * N_HEADS];
        size_t bytes = put_bytes(scratch, 0, &index, sizeof(index));

        header.n_units = some_units(thread, N_LAYERS * N_HEADS, 0, units);
        header.token_count = FILLED_TOKENS / 2;
        bytes = put_bytes(scratch, bytes, units, header.n_units * sizeof(units[0]));
        assert_int_equal(ask(world.data[thread], &header, scratch, bytes), KV_OK);
    }
}

/* Every field of every operation's header, alone, at every one of the values. */
static void every_field_of_every_operation(void **state)
{
    (void)state;
    for (unsigned op = 0; op < KV_OP_COUNT; op++) {
        open_filled_session();
        for (size_t field = 0; field < N_FIELDS; field++) {
            for (unsigned which = 0; which < N_BOUNDARIES; which++) {
                struct kv_wire_header header;
                size_t bytes, bulk;
                uint32_t thread = make_request(op, &header, scratch, &bytes, &bulk);

                spoil(&header, field, which);
                send_all(thread, &header, scratch, bytes, bulk);
            }
        }
        settle();
        close_session();
        clear_objects();
        good_requests_work();
    }
}

/* A request with at least `most` + 1 numbers in its body; its thread.  Returns how many. */
static unsigned make_numbered(unsigned op,
                              unsigned most,
                              struct kv_wire_header *ret_header,
                              size_t *ret_bytes,
                              size_t *ret_bulk,
                              uint32_t *ret_thread,
                              struct number ret_numbers[])
{
    unsigned n;

    do {
        *ret_thread = make_request(op, ret_header, scratch, ret_bytes, ret_bulk);
        n = numbers_of(ret_header, *ret_bytes, ret_numbers);
    } while (n <= most);
    return n;
}

/* Every number of every operation's body, alone, at every one of the values. */
static void every_number_of_every_body(void **state)
{
    (void)state;
    for (unsigned op = KV_OP_PUT; op <= KV_OP_QUERY; op++) {
        unsigned n_numbers = 1;

        if (op == KV_OP_CANCEL) /* has no body */
            continue;
        open_filled_session();
        for (unsigned which = 0; which < N_BOUNDARIES; which++) {
            for (unsigned i = 0; i < n_numbers; i++) {
                struct number numbers[NUMBERS_MAX];
                struct kv_wire_header header;
                size_t bytes, bulk;
                uint32_t thread;
                const unsigned n =
                    make_numbered(op, i, &header, &bytes, &bulk, &thread, numbers);

                n_numbers = n > n_numbers ? n : n_numbers;
                spoil_number(scratch + numbers[i].offset, numbers[i].bytes, which);
                send_all(thread, &header, scratch, bytes, bulk);
            }
        }
        print_message("%s: %u numbers at %u values\n", kvs_op_name(op), n_numbers,
                      (unsigned)N_BOUNDARIES);
        settle();
        close_session();
        clear_objects();
        good_requests_work();
    }
}

/* ---- control ----------------------------------------------------------------------------- */

enum {
    MANY_LAYERS = 1000,
    LONG_BYTES = 60000,
    CONTROL_BYTES = 70000,
    LEASE_US = 70000000, /* longer than any lease that the node grants */
};

/* Where one number of a message is spoiled, the others are as usual. */
static uint64_t usual_or_boundary(unsigned number, uint64_t usual)
{
    return number == UINT_MAX ? boundary(usual) : usual;
}

/* Number `*left` of a message and of what it holds (a count, a length, a value, or whether
 * there is a message at all) becomes the boundary's; each number on the way counts *left down.
 * false: there are not so many. */
static bool spoil_packed(ProtobufCMessage *message, unsigned *left, unsigned which)
{
    static uint8_t bytes[LONG_BYTES];
    static char text[LONG_BYTES + 1];

    for (unsigned i = 0; i < message->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &message->descriptor->fields[i];
        const bool is_list = field->label == PROTOBUF_C_LABEL_REPEATED;
        void *member = (char *)message + field->offset;
        size_t *count = (size_t *)(void *)((char *)message + field->quantifier_offset);
        const uint64_t value = boundary_at(16, which);
        const size_t length = value < LONG_BYTES ? value : LONG_BYTES;
        const bool is_it = (*left)-- == 0;

        switch (field->type) {
        case PROTOBUF_C_TYPE_MESSAGE:
            if (is_it && is_list)
                *count = value < MANY_LAYERS ? value : MANY_LAYERS;
            else if (is_it)
                *(void **)member = NULL;
            else if (is_list ? *count > 0 &&
                                   spoil_packed(**(ProtobufCMessage ***)member, left, which)
                             : spoil_packed(*(ProtobufCMessage **)member, left, which))
                return true;
            break;
        case PROTOBUF_C_TYPE_BYTES:
            if (is_it)
                *(ProtobufCBinaryData *)member = (ProtobufCBinaryData){length, bytes};
            break;
        case PROTOBUF_C_TYPE_STRING:
            memset(text, '%', length);
            text[length] = '\0';
            if (is_it)
                *(char **)member = text;
            break;
        case PROTOBUF_C_TYPE_FIXED64:
        case PROTOBUF_C_TYPE_UINT64:
            if (is_it)
                spoil_number(member, sizeof(uint64_t), which);
            break;
        default:
            if (is_it)
                spoil_number(member, sizeof(uint32_t), which);
            break;
        }
        if (is_it)
            return true;
    }
    return false;
}

/* Names of the few blocks that anybody speaks of. */
enum {
    N_NAMES = 3,
};

static struct kv_id128 block_names[N_NAMES] = {
    {{1, [15] = 10}}, {{2, [15] = 20}}, {{3, [15] = 30}}};

static ProtobufCBinaryData some_names(unsigned number)
{
    const uint64_t first = number == UINT_MAX ? kv_random_below(&world.random, 2) : 0;

    return (ProtobufCBinaryData){(N_NAMES - first) * sizeof(block_names[0]),
                                 (uint8_t *)&block_names[first]};
}

/* What was published goes; spoiled names, too. */
static void forget_names(void)
{
    const struct kvs_prefixes *prefixes = world.node->control.prefixes;
    Kvpb__PrefixRequest request = KVPB__PREFIX_REQUEST__INIT;
    const struct kvs_prefix *prefix;
    struct kv_id128 name;
    size_t cursor;

    request.verb = KV_PREFIX_EVICT;
    request.name = binary(&name);
    for (cursor = 0; (prefix = kvs_prefixes_next(prefixes, &cursor)) != NULL; cursor = 0) {
        name = prefix->name;
        ask_control(KV_OP_PREFIX, &request.base);
    }
    settle();
}

/* A control request that is nearly right.
 *   number  of the message, that becomes the boundary's; UINT_MAX: none
 * Returns its bytes; SIZE_MAX: it has no such number. */
static size_t make_control(unsigned op, unsigned number, unsigned which, uint8_t *packed)
{
    Kvpb__HelloRequest hello = KVPB__HELLO_REQUEST__INIT;
    Kvpb__GoodbyeRequest goodbye = KVPB__GOODBYE_REQUEST__INIT;
    Kvpb__ModelRequest model = KVPB__MODEL_REQUEST__INIT;
    Kvpb__ObjectsRequest objects = KVPB__OBJECTS_REQUEST__INIT;
    Kvpb__ObjectsCursor cursor = KVPB__OBJECTS_CURSOR__INIT;
    Kvpb__PublishRequest publish = KVPB__PUBLISH_REQUEST__INIT;
    Kvpb__MatchRequest match = KVPB__MATCH_REQUEST__INIT;
    Kvpb__PrefixRequest prefix = KVPB__PREFIX_REQUEST__INIT;
    Kvpb__OpenRequest open = KVPB__OPEN_REQUEST__INIT;
    Kvpb__ResumeRequest resume = KVPB__RESUME_REQUEST__INIT;
    Kvpb__ForkRequest fork = KVPB__FORK_REQUEST__INIT;
    Kvpb__TruncateRequest truncate = KVPB__TRUNCATE_REQUEST__INIT;
    Kvpb__CloseRequest close = KVPB__CLOSE_REQUEST__INIT;
    Kvpb__RenewRequest renew = KVPB__RENEW_REQUEST__INIT;
    Kvpb__SessionRequest session = KVPB__SESSION_REQUEST__INIT;
    Kvpb__TableRequest table = KVPB__TABLE_REQUEST__INIT;
    Kvpb__VerifyRequest verify = KVPB__VERIFY_REQUEST__INIT;
    Kvpb__SaveRequest save = KVPB__SAVE_REQUEST__INIT;
    Kvpb__Placement placement = KVPB__PLACEMENT__INIT;
    Kvpb__Lifecycle lifecycle = KVPB__LIFECYCLE__INIT;
    Kvpb__Layer layer = KVPB__LAYER__INIT;
    Kvpb__Layer *layers[MANY_LAYERS];
    static char *const tables[] = {"status", "sessions", "clients", "ops",      "stats",
                                   "models", "scrub",    "threads", "prefixes", "tenants"};
    struct kv_random *random = &world.random;
    struct kv_id128 id, other;
    const void *address;
    ProtobufCMessage *message;

    kv_random_fill(random, &id, sizeof(id));
    kv_random_fill(random, &other, sizeof(other));
    for (unsigned i = 0; i < MANY_LAYERS; i++)
        layers[i] = &layer;
    placement.n_nodes = (uint32_t)usual_or_boundary(number, 1);
    placement.position = (uint32_t)usual_or_boundary(number, 0);
    placement.epoch = usual_or_boundary(number, EPOCH);
    placement.root = ROOT;
    lifecycle.op_id = kv_random_next(random);
    lifecycle.kind = op;
    lifecycle.generation = world.node->control.sessions[world.session_index].generation;
    lifecycle.tokens = kv_random_below(random, 4) == 0 ? (uint32_t)boundary(0) : 0;
    lifecycle.child_session_id = binary(&other);
    lifecycle.child_token = binary(&other);
    lifecycle.writer = usual_or_boundary(number, 1);
    layer.kind = number == UINT_MAX ? (uint32_t)kv_random_below(random, 4) : KV_LAYER_KV;
    layer.dtype = number == UINT_MAX ? (uint32_t)kv_random_below(random, 6) : KV_FP16;
    layer.n_kv_heads = (uint32_t)usual_or_boundary(number, 4);
    layer.d_k = (uint32_t)usual_or_boundary(number, 64);
    layer.d_v = (uint32_t)usual_or_boundary(number, 64);
    switch (op) {
    case KV_OP_HELLO:
        hello.version = KV_WIRE_VERSION;
        hello.name = "other\n\"stranger\"";
        world.port->ops->port_address(world.port, &address, &hello.address.len);
        hello.address.data = (uint8_t *)address;
        hello.client_id = binary(&id);
        message = &hello.base;
        break;
    case KV_OP_GOODBYE:
        goodbye.client_index = world.me.index + 1;
        goodbye.client_token = binary(&id);
        message = &goodbye.base;
        break;
    case KV_OP_MODEL:
        model.name = "another";
        world.other_model = id;
        model.fingerprint =
            kv_random_below(random, 2) == 0 ? binary(&world.fingerprint) : binary(&id);
        model.n_layers = number == UINT_MAX ? kv_random_below(random, 5) : 2;
        model.layers = layers;
        message = &model.base;
        break;
    case KV_OP_OPEN:
        open.session_id = binary(&id);
        open.token = binary(&other);
        open.fingerprint = binary(&world.fingerprint);
        open.lease_ms = 1 + (uint32_t)kv_random_below(random, 1000);
        open.tokens_max = (uint32_t)usual_or_boundary(number, 100);
        open.writer = usual_or_boundary(number, 1);
        open.placement = &placement;
        open.branch = 6;
        open.n_rows = 4;
        open.block_names = some_names(number);
        open.match_blocks = (uint32_t)usual_or_boundary(number, N_NAMES);
        open.prompt_root = ROOT - kv_placement_branch_root(0, open.branch, open.n_rows);
        message = &open.base;
        break;
    case KV_OP_RESUME:
        resume.session_id = binary(&world.session_id);
        resume.token = binary(&world.session_token);
        message = &resume.base;
        break;
    case KV_OP_FORK:
        fork.session_index = world.session_index;
        fork.token = binary(&world.session_token);
        fork.operation = &lifecycle;
        fork.lease_ms = 1 + (uint32_t)kv_random_below(random, 1000);
        message = &fork.base;
        break;
    case KV_OP_TRUNCATE:
        truncate.session_index = world.session_index;
        truncate.token = binary(&world.session_token);
        truncate.operation = &lifecycle;
        message = &truncate.base;
        break;
    case KV_OP_CLOSE:
        close.session_index = world.session_index + 1;
        close.token = binary(&id);
        message = &close.base;
        break;
    case KV_OP_RENEW:
        renew.session_index = world.session_index;
        renew.token = binary(&world.session_token);
        renew.lease_ms = (uint32_t)usual_or_boundary(number, 1000);
        message = &renew.base;
        break;
    case KV_OP_OBJECTS:
        objects.prefix = (ProtobufCBinaryData){5, (uint8_t *)"name-"};
        objects.from = &cursor;
        cursor.thread = (uint32_t)usual_or_boundary(number, N_THREADS - 1);
        objects.limit = (uint32_t)usual_or_boundary(number, 3);
        objects.deletes = kv_random_below(random, 2) == 0;
        message = &objects.base;
        break;
    case KV_OP_SESSION:
        session.session_index = world.session_index;
        session.token = binary(&world.session_token);
        message = &session.base;
        break;
    case KV_OP_PUBLISH:
        publish.session_index = world.session_index;
        publish.token = binary(&world.session_token);
        publish.generation = lifecycle.generation;
        publish.first_block = number == UINT_MAX ? (uint32_t)kv_random_below(random, 3) : 0;
        publish.block_names = some_names(number);
        message = &publish.base;
        break;
    case KV_OP_MATCH:
        match.block_names = some_names(number);
        match.placement = &placement;
        message = &match.base;
        break;
    case KV_OP_PREFIX:
        prefix.verb = (uint32_t)usual_or_boundary(number, 1 + kv_random_below(random, 4));
        prefix.name = binary(&block_names[kv_random_below(random, N_NAMES)]);
        if (kv_random_below(random, 2) == 0)
            prefix.session_id = binary(&world.session_id);
        prefix.for_ms = (uint32_t)usual_or_boundary(number, 100);
        message = &prefix.base;
        break;
    case KV_OP_VERIFY:
        verify.since_us = usual_or_boundary(number, world.clock.virtual_us);
        message = &verify.base;
        break;
    case KV_OP_SAVE:
        save.session_index = world.session_index;
        save.token = binary(&world.session_token);
        save.generation = lifecycle.generation;
        if (kv_random_below(random, 2) == 0)
            save.session_id = binary(&world.session_id);
        save.since_us = usual_or_boundary(number, world.clock.virtual_us);
        save.tokens = (uint32_t)usual_or_boundary(number, KV_BLOCK_TOKENS);
        message = &save.base;
        break;
    default:
        table.name = tables[kv_random_below(random, sizeof(tables) / sizeof(tables[0]))];
        message = &table.base;
        break;
    }
    if (number != UINT_MAX && !spoil_packed(message, &number, which))
        return SIZE_MAX;
    assert_in_range(protobuf_c_message_get_packed_size(message), 0, CONTROL_BYTES);
    return protobuf_c_message_pack(message, packed);
}

/* A client that was let in leaves, so that there is room for the next. */
static void leave_again(void)
{
    Kvpb__GoodbyeRequest request = KVPB__GOODBYE_REQUEST__INIT;
    Kvpb__HelloReply *reply =
        kvpb__hello_reply__unpack(NULL, world.reply.body_bytes, world.body);

    assert_non_null(reply);
    if (reply->outcome->status == KV_OK) {
        request.client_index = reply->client_index;
        request.client_token = reply->client_token;
        ask_control(KV_OP_GOODBYE, &request.base);
    }
    kvpb__hello_reply__free_unpacked(reply, NULL);
}

/* Sends a control message whose number `number` is the boundary's.  false: it has none. */
static bool send_spoiled_control(unsigned op, unsigned number, unsigned which)
{
    static uint8_t packed[CONTROL_BYTES];
    struct kv_wire_header header = request_of(op);
    size_t bytes = make_control(op, number, which, packed);

    if (bytes == SIZE_MAX)
        return false;
    send_message(world.control, &header, packed, bytes);
    for (unsigned i = 0; i < 10; i++)
        step();
    if (world.reply.request_id != header.request_id)
        assert_int_equal(op, KV_OP_HELLO); /* which says where its answer goes */
    else if (op == KV_OP_HELLO)
        leave_again();
    else if (op == KV_OP_MODEL && try_open(&world.other_model) == KV_OK)
        close_session();
    return true;
}

/* A session whose units all have the rows of the blocks that have names. */
static void open_session_with_blocks(void)
{
    open_session();
    for (uint16_t i = 0; i < N_LAYERS * N_HEADS; i++) {
        const struct kv_wire_unit unit = {i / N_HEADS, i % N_HEADS, 0};

        fill_unit(&unit, ROW_BYTES, 0, N_NAMES * KV_BLOCK_TOKENS);
    }
}

/* Opens a session with the names of all blocks.  *ret_tokens is how many matched. */
static kv_status_t try_open_named(const struct kv_id128 *fingerprint, uint32_t *ret_tokens)
{
    Kvpb__OpenRequest request = KVPB__OPEN_REQUEST__INIT;
    Kvpb__Placement placement = KVPB__PLACEMENT__INIT;
    Kvpb__OpenReply *reply;
    kv_status_t status;

    kv_random_fill(&world.random, &world.session_id, sizeof(world.session_id));
    request.session_id = binary(&world.session_id);
    request.token = binary(&world.session_token);
    request.fingerprint = binary(fingerprint);
    request.tokens_max = TOKENS_MAX;
    request.writer = WRITER;
    placement.epoch = EPOCH;
    placement.n_nodes = 1;
    placement.root = ROOT;
    request.placement = &placement;
    request.block_names = some_names(0);
    request.match_blocks = N_NAMES;
    status = try_control(KV_OP_OPEN, &request.base);
    reply = kvpb__open_reply__unpack(NULL, world.reply.body_bytes, world.body);
    assert_non_null(reply);
    world.session_index = reply->session_index;
    *ret_tokens = reply->tokens;
    kvpb__open_reply__free_unpacked(reply, NULL);
    return status;
}

static uint32_t open_named(const struct kv_id128 *fingerprint)
{
    uint32_t tokens;

    if (try_open_named(fingerprint, &tokens) != KV_OK)
        fail_msg("%s", world.detail);
    return tokens;
}

/* Publishes the session's blocks.  Returns how many of its tokens are kept. */
static uint32_t publish_names(void)
{
    Kvpb__PublishRequest request = KVPB__PUBLISH_REQUEST__INIT;
    Kvpb__PublishReply *reply;
    uint32_t tokens;

    request.session_index = world.session_index;
    request.token = binary(&world.session_token);
    request.generation = 1;
    request.block_names = some_names(0);
    ask_control(KV_OP_PUBLISH, &request.base);
    reply = kvpb__publish_reply__unpack(NULL, world.reply.body_bytes, world.body);
    assert_non_null(reply);
    tokens = reply->tokens;
    kvpb__publish_reply__free_unpacked(reply, NULL);
    return tokens;
}

/* A client may name its blocks as it likes: a session of one model never gets rows of another,
 * which have other sizes and are elsewhere, nor does it publish behind them; nor of a model that
 * was forgotten and came back with another shape. */
static void names_are_of_a_model(void **state)
{
    const uint32_t all = N_NAMES * KV_BLOCK_TOKENS;
    const struct kv_wire_unit first = {0, 0, 0};
    struct kv_id128 slim, others[KVS_MODELS_MAX];

    (void)state;
    kv_random_fill(&world.random, &slim, sizeof(slim));
    kv_random_fill(&world.random, others, sizeof(others));
    make_model_with(&slim, 1, 1);
    assert_int_equal(open_named(&slim), 0);
    fill_unit(&first, ROW_BYTES, 0, all);
    assert_int_equal(publish_names(), all);
    close_session();
    assert_int_equal(open_named(&slim), all);
    close_session();

    assert_int_equal(open_named(&world.fingerprint), 0);
    assert_int_equal(publish_names(), 0);
    close_session();
    open_session_with_blocks();
    assert_int_equal(publish_names(), 0);
    close_session();

    for (unsigned i = 0; i < KVS_MODELS_MAX; i++)
        make_model_of(&others[i]);
    assert_int_equal(try_open(&slim), KV_NOT_FOUND);
    make_model_with(&slim, N_LAYERS, N_HEADS);
    assert_int_equal(open_named(&slim), 0);
    close_session();
    make_model();
    forget_names();
    good_requests_work();
}

/* Gives a prefix so many writers. */
static void make_mixed(struct kvs_prefix *prefix, uint32_t n_writers)
{
    free(prefix->mixed);
    prefix->mixed = malloc(sizeof(*prefix->mixed) + n_writers * sizeof(prefix->mixed->runs[0]));
    assert_non_null(prefix->mixed);
    prefix->mixed->n_runs = n_writers;
    for (uint32_t i = 0; i < n_writers; i++)
        prefix->mixed->runs[i] = (struct kv_writer_run){i + 1, UINT32_MAX};
}

/* A conversation that goes on in a session of its own each time has one more writer each time.
 * When they are as many as a session may have, it begins with what has fewer: it does not fail
 * for as long as its prefix is kept. */
static void prefixes_of_many_writers(void **state)
{
    const struct kvs_prefix_place place = {.root = ROOT, .n_nodes = 1};
    struct kvs_prefix *prefixes[N_NAMES];

    (void)state;
    open_session_with_blocks();
    assert_int_equal(publish_names(), N_NAMES * KV_BLOCK_TOKENS);
    close_session();
    for (unsigned i = 0; i < N_NAMES; i++)
        prefixes[i] = kvs_prefixes_get(world.node->control.prefixes, &place, &block_names[i]);
    make_mixed(prefixes[1], KV_WRITER_RUNS_MAX - 1); /* with those of the blocks beside it */
    assert_int_equal(open_named(&world.fingerprint), KV_BLOCK_TOKENS);
    assert_int_equal(world.node->control.sessions[world.session_index].writers->n_runs, 1);
    close_session();
    make_mixed(prefixes[0], KV_WRITER_RUNS_MAX);
    assert_int_equal(open_named(&world.fingerprint), 0);
    close_session();
    forget_names();
    good_requests_work();
}

/* A truncate of rows that others share gives the session a fresh writer: not if it has as many as
 * it may. */
static void a_fresh_writer_needs_a_run(void **state)
{
    const uint32_t tokens = KV_WRITER_RUNS_MAX + 10;
    Kvpb__TruncateRequest request = KVPB__TRUNCATE_REQUEST__INIT;
    Kvpb__Lifecycle operation = KVPB__LIFECYCLE__INIT;
    struct kvs_session *session;
    struct kv_writers *before, *most;

    (void)state;
    open_session();
    session = &world.node->control.sessions[world.session_index];
    before = session->writers;
    most = malloc(sizeof(*most) + KV_WRITER_RUNS_MAX * sizeof(most->runs[0]));
    assert_non_null(most);
    most->n_runs = KV_WRITER_RUNS_MAX;
    for (uint32_t i = 0; i < KV_WRITER_RUNS_MAX; i++)
        most->runs[i] = (struct kv_writer_run){i + 1, i + 1};
    most->runs[KV_WRITER_RUNS_MAX - 1] = (struct kv_writer_run){WRITER, UINT32_MAX};
    session->writers = most;
    session->tokens_max = session->shared_tokens = tokens + 1;

    operation.op_id = kv_random_next(&world.random);
    operation.generation = 1;
    operation.tokens = tokens;
    operation.writer = WRITER;
    request.session_index = world.session_index;
    request.token = binary(&world.session_token);
    request.operation = &operation;
    request.fresh_writer = WRITER + 1;
    assert_int_equal(try_control(KV_OP_TRUNCATE, &request.base), KV_TOO_LARGE);
    assert_ptr_equal(session->writers, most);
    assert_int_equal(session->generation, 1);
    session->shared_tokens = tokens;
    ask_control(KV_OP_TRUNCATE, &request.base);
    assert_int_equal(session->writers->n_runs, KV_WRITER_RUNS_MAX);
    free(before); /* until now data threads had it */
    close_session();
}

/* Puts prefixes without blocks behind the one that has the last name. */
static void add_behind(uint32_t n)
{
    struct kvs_prefixes *prefixes = world.node->control.prefixes;
    const struct kvs_prefix_place place = {.root = ROOT, .n_nodes = 1};
    struct kvs_prefix *parent = kvs_prefixes_get(prefixes, &place, &block_names[N_NAMES - 1]);
    struct kvs_prefix *prefix;
    struct kv_id128 name;

    assert_non_null(parent);
    for (uint32_t i = 0; i < n; i++, parent = prefix) {
        kv_random_fill(&world.random, &name, sizeof(name));
        prefix = kvs_prefix_create(&name, parent->depth + 1, parent->first_thread,
                                   parent->n_threads);
        assert_non_null(prefix);
        assert_true(kvs_prefixes_add(prefixes, parent, parent->home, prefix, 0));
        kvs_prefix_release(prefixes, prefix);
    }
}

/* A bad row takes all with it that is behind it.  The control thread, which has the leases, does
 * not walk along a long prompt for each of its blocks; nor does a data thread give back the refs
 * of all of them in one go, or find in one go that it has none. */
static void what_is_behind_a_bad_row_goes(void **state)
{
    enum {
        N_BEHIND = 100000
    };
    const struct kvs_control *control = &world.node->control;
    const uint32_t thread = thread_of_unit(0, 0);
    struct kvs_shard *shard = &world.node->shard[thread];
    uint64_t steps_us;
    uint32_t tokens;

    (void)state;
    open_session_with_blocks();
    assert_int_equal(publish_names(), N_NAMES * KV_BLOCK_TOKENS);
    add_behind(N_BEHIND);
    assert_int_equal(kvs_prefixes_count(control->prefixes), N_NAMES + N_BEHIND);
    kvs_segment_mark_bad(&shard->store, shard->sessions[world.session_index].blocks.list[0], 0,
                         3);
    close_session();

    steps_us = world.clock.virtual_us;
    const clock_t begin = clock(); /* what it takes, however much else the machine does */
    assert_int_equal(try_open_named(&world.fingerprint, &tokens), KV_BUSY);
    assert_true(clock() - begin < 2 * CLOCKS_PER_SEC);
    assert_int_equal(kvs_prefixes_count(control->prefixes), 0);
    /* The answer comes when what was opened is closed again, which is told after the refs. */
    steps_us = world.clock.virtual_us - steps_us;
    assert_false(control->is_releasing);
    assert_true(steps_us / STEP_US > N_BEHIND / KV_SLICE_LOOKS / 2);
    settle();
    good_requests_work();
}

/* What makes room is chosen among all tenants, and that takes the longer the more there are: the
 * control thread looks at its clock in between, and goes on in the next step. */
static void room_is_made_in_slices(void **state)
{
    enum {
        N_TENANTS = 2000
    };
    struct kvs_prefixes *prefixes = world.node->control.prefixes;
    uint64_t n = N_TENANTS, n_most = 0;

    (void)state;
    open_session_with_blocks(); /* some pages are not free */
    for (uint32_t i = 0; i < N_TENANTS; i++) {
        const struct kvs_prefix_home home = {.place = {.tenant = i, .root = ROOT, .n_nodes = 1},
                                             .block_bytes = 1000};
        struct kvs_prefix *prefix = kvs_prefix_create(&block_names[0], 0, 0, 1);

        assert_non_null(prefix);
        assert_true(kvs_prefixes_add(prefixes, NULL, &home, prefix, i));
        kvs_prefix_release(prefixes, prefix);
    }
    assert_true(kvs_pages_want(world.node->pages, MEMORY_BYTES));
    while (n > 0) {
        step();
        if (n - kvs_prefixes_count(prefixes) > n_most)
            n_most = n - kvs_prefixes_count(prefixes);
        n = kvs_prefixes_count(prefixes);
    }
    assert_in_range(n_most, 1, 4 * KV_SLICE_LOOKS);
    close_session();
    settle();
    good_requests_work();
}

/* A name without a session is looked for among all prefixes, by one call after the other.  Those
 * that wait for their turn do not take the places of all control requests. */
static void names_are_looked_for_by_few(void **state)
{
    Kvpb__PrefixRequest request = KVPB__PREFIX_REQUEST__INIT;
    Kvpb__TableRequest table = KVPB__TABLE_REQUEST__INIT;
    const struct kvs_control_call *first;
    struct kv_id128 unknown;
    uint8_t packed[100];
    size_t bytes;

    (void)state;
    open_session_with_blocks();
    assert_int_equal(publish_names(), N_NAMES * KV_BLOCK_TOKENS);
    close_session();
    add_behind(50000);
    kv_random_fill(&world.random, &unknown, sizeof(unknown));
    request.verb = KV_PREFIX_PIN;
    request.name = binary(&unknown);
    bytes = kvpb__prefix_request__pack(&request, packed);
    for (unsigned i = 0; i < KVS_CALLS_MAX + 10; i++) {
        struct kv_wire_header header = request_of(KV_OP_PREFIX);

        send_message(world.control, &header, packed, bytes);
    }
    step();
    first = world.node->control.keeping;
    assert_non_null(first);
    while (world.node->control.keeping == first)
        step(); /* the next answer of these is far */
    table.name = "status";
    ask_control(KV_OP_TABLE, &table.base);
    assert_in_range(world.node->control.n_calls, 1, KVS_CALLS_MAX / 2);
    while (world.node->control.keeping != NULL)
        step();
    assert_int_equal(try_control(KV_OP_PREFIX, &request.base), KV_OK);
    request.verb = KV_PREFIX_EVICT;
    request.name = binary(&block_names[0]);
    ask_control(KV_OP_PREFIX, &request.base);
    settle();
    assert_int_equal(kvs_prefixes_count(world.node->control.prefixes), 0);
    good_requests_work();
}

/* Every number of every control message, alone, at every one of the values: counts of layers
 * and heads, sizes of rows, lengths of names and ids. */
static void every_number_of_every_control_message(void **state)
{
    (void)state;
    for (unsigned op = KV_OP_HELLO; op < KV_OP_COUNT; op++) {
        unsigned number = 0;

        if (op == KV_OP_DRAIN)
            continue;
        for (bool is_there = true; is_there; number += is_there) {
            open_session_with_blocks();
            for (unsigned which = 0; which < N_BOUNDARIES && is_there; which++)
                is_there = send_spoiled_control(op, number, which);
            world.clock.virtual_us += LEASE_US;
            settle();
            assert_int_equal(world.node->control.n_sessions, 0);
        }
        forget_names();
        print_message("%s: %u numbers\n", kvs_op_name(op), number);
        assert_true(number > 0);
        good_requests_work();
    }
}

static void control_thread_takes_anything(void **state)
{
    struct kv_random *random = &world.random;
    uint8_t packed[CONTROL_BYTES];
    uint64_t lent;

    (void)state;
    settle();
    lent = memory_lent();
    for (unsigned round = 0; round < 100; round++) {
        open_session_with_blocks();
        for (unsigned i = 0; i < 200; i++) {
            unsigned op =
                KV_OP_HELLO + (unsigned)kv_random_below(random, KV_OP_COUNT - KV_OP_HELLO);
            struct kv_wire_header header = request_of(op);
            size_t bytes = make_control(op, UINT_MAX, 0, packed);

            switch (kv_random_below(random, 6)) {
            case 0:
                bytes = kv_random_below(random, 300);
                kv_random_fill(random, packed, bytes);
                break;
            case 1:
                bytes = kv_random_below(random, bytes + 1);
                break;
            case 2:
            case 3:
                for (uint64_t n = 1 + kv_random_below(random, 4); n > 0 && bytes > 0; n--)
                    packed[kv_random_below(random, bytes)] = (uint8_t)kv_random_next(random);
                break;
            case 4:
                kv_random_fill(random, packed + bytes, 40);
                bytes += 40;
                break;
            default:
                break;
            }
            if (kv_random_below(random, 10) == 0)
                spoil(&header, kv_random_below(random, N_FIELDS), any_boundary());
            /* A spoiled number must not end the test's own client, or the node. */
            if (header.op == KV_OP_DRAIN)
                continue;
            send_message(world.control, &header, packed, bytes);
            if (i % 4 == 0)
                step();
        }
        world.clock.virtual_us += 2000000; /* leases of a second */
        settle();
        /* The session may have been forked or truncated on; a new one must work. */
        good_requests_work();
    }
    for (unsigned i = 0; i < 100; i++) {
        world.clock.virtual_us += 1000000;
        settle();
    }
    assert_true(kvs_counted(&world.node->control.stats.prefixes_published) > 0);
    forget_names();
    assert_int_equal(world.node->control.n_sessions, 0);
    assert_true(memory_lent() <= lent + (N_THREADS * 2 * KVS_ARENA_PAGE));
}

/* The name's version is deleted once; again, or with another object there, it is gone already.
 */
static void deletes_are_of_a_version(void **state)
{
    static const char name[] = "versioned";
    const size_t name_bytes = sizeof(name) - 1;
    const struct kv_id128 hash = kv_hash128(name, name_bytes);
    struct kv_channel *channel = world.data[thread_of_name(name, name_bytes)];
    uint8_t body[sizeof(name) + sizeof(uint32_t) + 1];
    uint64_t versions[3];
    struct kv_wire_header header;

    (void)state;
    memcpy(body, name, name_bytes);
    for (unsigned i = 0; i < 3; i++) {
        uint32_t crc = kv_crc32c(kv_object_seed(&hash), "abc" + i, 1);

        memcpy(body + name_bytes, &crc, sizeof(crc));
        body[name_bytes + sizeof(crc)] = (uint8_t) "abc"[i];
        header = request_of(KV_OP_OBJECT_PUT);
        number_put(&header, thread_of_name(name, name_bytes));
        header.name_bytes = name_bytes;
        header.object_bytes = 1;
        assert_int_equal(ask(channel, &header, body, name_bytes + sizeof(crc) + 1), KV_OK);
        header = request_of(KV_OP_OBJECT_EXISTS);
        header.name_bytes = name_bytes;
        assert_int_equal(ask(channel, &header, body, name_bytes), KV_OK);
        versions[i] = world.reply.object_version;
        for (unsigned j = 0; j < i; j++)
            assert_true(versions[i] != versions[j]);
        /* What is named may be gone for long: all is well, and this object stays. */
        for (unsigned j = 0; j <= i; j++) {
            header = request_of(KV_OP_OBJECT_DELETE);
            header.name_bytes = name_bytes;
            header.object_version = j < i ? versions[j] : 0;
            assert_int_equal(ask(channel, &header, body, name_bytes),
                             j < i ? KV_OK : KV_INVALID);
            assert_int_equal(version_of(name, name_bytes), versions[i]);
        }
        for (unsigned j = 0; j < 2; j++) {
            header = request_of(KV_OP_OBJECT_DELETE);
            header.name_bytes = name_bytes;
            header.object_version = versions[i];
            assert_int_equal(ask(channel, &header, body, name_bytes), KV_OK);
            assert_int_equal(version_of(name, name_bytes), 1);
        }
    }
}

static uint32_t session_tokens(void)
{
    Kvpb__SessionRequest request = KVPB__SESSION_REQUEST__INIT;
    Kvpb__SessionReply *reply;
    uint32_t tokens;

    request.session_index = world.session_index;
    request.token = binary(&world.session_token);
    ask_control(KV_OP_SESSION, &request.base);
    reply = kvpb__session_reply__unpack(NULL, world.reply.body_bytes, world.body);
    assert_non_null(reply);
    tokens = reply->tokens;
    kvpb__session_reply__free_unpacked(reply, NULL);
    return tokens;
}

static void fork_and_close_child(void)
{
    Kvpb__ForkRequest request = KVPB__FORK_REQUEST__INIT;
    Kvpb__CloseRequest close = KVPB__CLOSE_REQUEST__INIT;
    Kvpb__Lifecycle operation = KVPB__LIFECYCLE__INIT;
    Kvpb__OpenReply *reply;
    struct kv_id128 id, token;

    kv_random_fill(&world.random, &id, sizeof(id));
    kv_random_fill(&world.random, &token, sizeof(token));
    request.session_index = world.session_index;
    request.token = binary(&world.session_token);
    operation.op_id = 1;
    operation.generation = 1;
    operation.writer = WRITER;
    operation.child_session_id = binary(&id);
    operation.child_token = binary(&token);
    request.operation = &operation;
    ask_control(KV_OP_FORK, &request.base);
    reply = kvpb__open_reply__unpack(NULL, world.reply.body_bytes, world.body);
    assert_non_null(reply);
    close.session_index = reply->child_index;
    close.token = binary(&token);
    kvpb__open_reply__free_unpacked(reply, NULL);
    ask_control(KV_OP_CLOSE, &close.base);
}

/* A session of one unit on this node: the data thread of that unit alone hears of it, whatever
 * is done to the session.  A thread that stands still holds up only what it has part in. */
static void a_session_is_where_its_units_are(void **state)
{
    (void)state;
    settle();
    for (uint64_t root = 0; root < 8; root++) {
        const uint32_t here = kv_placement_unit_thread(root, 0, KV_ROW_NODES, N_THREADS);

        assert_int_equal(try_open_in_row(&world.fingerprint, root, KV_ROW_NODES), KV_OK);
        for (uint32_t thread = 0; thread < N_THREADS; thread++)
            assert_int_equal(world.node->shard[thread].sessions[world.session_index].used,
                             thread == here);
        world.stopped = 1 + (here + 1) % N_THREADS;
        assert_int_equal(session_tokens(), 0);
        fork_and_close_child();
        close_session();
        world.stopped = 0;
        assert_false(world.node->shard[here].sessions[world.session_index].used);
    }
    settle();
    kvs_node_check(world.node);
}

/* One thread that stands still is noticed, whatever the others do. */
static void a_thread_stands_still(void **state)
{
    uint64_t begin_us;

    (void)state;
    settle();
    begin_us = kvs_node_last_step_us(world.node);
    for (unsigned i = 0; i < 10; i++) {
        world.clock.virtual_us += 1000000;
        kvs_node_control_step(world.node);
        for (uint32_t thread = 1; thread < N_THREADS; thread++)
            kvs_node_data_step(world.node, thread);
    }
    assert_int_equal(kvs_node_last_step_us(world.node), begin_us);
    step();
    assert_true(kvs_node_last_step_us(world.node) >= begin_us + 10000000);
}

/* ---- rows of any bits -------------------------------------------------------------------- */

/* A put of rows [begin, begin + count) that have their checksums, and elements of which some
 * are no numbers, or too large, or too small. */
static void put_any_bits(const struct kv_wire_unit *unit, uint32_t begin, uint32_t count)
{
    static const uint16_t odd[] = {0x7c00, 0xfc00, 0x7e00, 0xffff, 0x7bff,
                                   0xfbff, 0x0001, 0x8001, 0x8000};
    struct kv_wire_header header = session_request(KV_OP_PUT, 1);
    uint8_t *rows = scratch + sizeof(*unit) + count * sizeof(uint32_t);
    size_t at = put_bytes(scratch, 0, unit, sizeof(*unit));

    for (uint32_t i = 0; i < count; i++, rows += ROW_BYTES) {
        const uint64_t rarity = kv_random_below(&world.random, 3);
        uint16_t row[ROW_BYTES / 2];
        uint32_t crc;

        for (uint32_t j = 0; j < ROW_BYTES / 2; j++)
            row[j] = kv_random_below(&world.random, 1 + rarity * 100) == 0
                         ? odd[kv_random_below(&world.random, sizeof(odd) / sizeof(odd[0]))]
                         : (uint16_t)(0x3000 + kv_random_below(&world.random, 0x0c00));
        memcpy(rows, row, sizeof(row));
        crc = kv_crc32c(kv_row_seed(WRITER, unit->layer, unit->kv_head, begin + i), row,
                        sizeof(row));
        at = put_bytes(scratch, at, &crc, sizeof(crc));
    }
    header.n_units = 1;
    header.token_begin = begin;
    header.token_count = count;
    assert_int_equal(ask(world.data[thread_of_unit(unit->layer, unit->kv_head)], &header,
                         scratch, at + count * ROW_BYTES),
                     KV_OK);
}

/* Rows are what their writer says that they are: no bits of theirs, nor of a query's, end the
 * node, whatever is made of them. */
static void rows_of_any_bits(void **state)
{
    const uint32_t thread = thread_of_unit(0, 0);

    (void)state;
    for (unsigned round = 0; round < 6; round++) {
        const struct kv_wire_index index = {.chapter_blocks = round % 3 == 2 ? 0 : 8,
                                            .m = round < 3 ? 2 : 4,
                                            .bits = round < 3 ? 6 : 8,
                                            .iterations = 3,
                                            .flags = KV_WIRE_INDEX_WAIT,
                                            .summaries = rests[round % 3],
                                            .summary_blocks = groups[round / 2]};
        struct kv_wire_header header;
        struct kv_wire_unit units[N_LAYERS * N_HEADS];
        size_t bytes;

        open_session();
        header = session_request(KV_OP_INDEX, 1);
        bytes = put_bytes(scratch, 0, &index, sizeof(index));
        header.n_units = some_units(thread, N_LAYERS * N_HEADS, 0, units);
        for (uint32_t i = 0; i < header.n_units; i++)
            for (uint32_t token = 0; token < FILLED_TOKENS; token += FILLED_TOKENS / 4)
                put_any_bits(&units[i], token, FILLED_TOKENS / 4);
        bytes = put_bytes(scratch, 0, &index, sizeof(index));
        bytes = put_bytes(scratch, bytes, units, header.n_units * sizeof(units[0]));
        header.token_count = FILLED_TOKENS;
        assert_int_equal(ask(world.data[thread], &header, scratch, bytes), KV_OK);
        for (unsigned i = 0; i < 1000; i++) {
            do {
            } while (make_request(KV_OP_QUERY, &header, scratch, &bytes, &(size_t){0}) !=
                     thread);
            send_message(world.data[thread], &header, scratch, bytes);
            for (unsigned j = 0; j < 4; j++)
                step();
        }
        settle();
        close_session();
    }
}

/* Summaries are of 8 or 24 blocks, and 8 is what a client says that says nothing: with any
 * other number, an index and a query are refused, whether they want summaries or not. */
static void groups_of_summaries_are_of_two_sizes(void **state)
{
    const struct kv_wire_unit unit = {0, 0, 0};
    const uint32_t thread = thread_of_unit(0, 0);
    const struct kv_wire_range range = {0, FILLED_TOKENS};
    const float vector[ROW_BYTES / 4] = {1};

    (void)state;
    open_filled_session();
    for (unsigned round = 0; round < 3 * 260; round++) {
        const unsigned blocks = round / 3 < 258 ? round / 3 : round / 3 == 258 ? 65535 : 6144;
        const uint16_t summaries = rests[round % 3];
        const bool is_good = blocks == 0 || blocks == 8 || blocks == 24;
        const struct kv_wire_index index = {.chapter_blocks = 8,
                                            .m = 2,
                                            .bits = 4,
                                            .iterations = 2,
                                            .flags = KV_WIRE_INDEX_WAIT,
                                            .summaries = summaries,
                                            .summary_blocks = (uint16_t)blocks};
        const struct kv_wire_query query = {
            .answer = KV_ANSWER_IDS,
            .merge = KV_MERGE_SUM,
            .n_queries = 1,
            .k = FILLED_TOKENS, /* leaves no rows: some are NaN */
            .rerank = 1,
            .scale = 1,
            .n_ranges = 1,
            .summaries = summaries,
            .summary_blocks = (uint16_t)blocks};
        struct kv_wire_header header = session_request(KV_OP_INDEX, 1);
        size_t bytes = put_bytes(scratch, 0, &index, sizeof(index));

        header.n_units = 1;
        header.token_count = FILLED_TOKENS / 2;
        bytes = put_bytes(scratch, bytes, &unit, sizeof(unit));
        assert_int_equal(ask(world.data[thread], &header, scratch, bytes),
                         is_good ? KV_OK : KV_INVALID);
        header = session_request(KV_OP_QUERY, 1);
        header.n_units = 1;
        bytes = put_bytes(scratch, 0, &query, sizeof(query));
        bytes = put_bytes(scratch, bytes, &unit, sizeof(unit));
        bytes = put_bytes(scratch, bytes, &range, sizeof(range));
        bytes = put_bytes(scratch, bytes, vector, sizeof(vector));
        assert_int_equal(ask(world.data[thread], &header, scratch, bytes),
                         is_good ? KV_OK : KV_INVALID);
    }
    close_session();
}

/* A query's body for two units of a thread.  Returns its bytes.
 *   each     of the units, with KV_WIRE_EACH
 *   ret_end  where these end */
static size_t make_cut(const struct kv_wire_query *query,
                       uint32_t thread,
                       const uint32_t *each,
                       uint8_t *body,
                       size_t *ret_end)
{
    const struct kv_wire_range range = {0, FILLED_TOKENS};
    const float vectors[2 * ROW_BYTES / 4] = {1};
    struct kv_wire_unit units[N_LAYERS * N_HEADS];
    size_t bytes = put_bytes(body, 0, query, sizeof(*query));

    assert_int_equal(some_units(thread, 2, 0, units), 2);
    bytes = put_bytes(body, bytes, units, 2 * sizeof(units[0]));
    bytes = put_bytes(body, bytes, &range, sizeof(range));
    if (query->flags & KV_WIRE_EACH)
        bytes = put_bytes(body, bytes, each, 2 * sizeof(*each));
    *ret_end = bytes;
    return put_bytes(body, bytes, vectors, sizeof(vectors));
}

static kv_status_t ask_cut(uint32_t thread, size_t bytes)
{
    struct kv_wire_header header = session_request(KV_OP_QUERY, 1);

    header.n_units = 2;
    return ask(world.data[thread], &header, scratch, bytes);
}

/* What a first cut and candidates of each head may say, at their bounds; and bodies that end
 * before they do. */
static void first_cuts_are_bounded(void **state)
{
    enum {
        INT4 = KV_CUT_INT4,
        EACH = KV_WIRE_EACH,
        READS = KV_WIRE_READS
    };
    static const struct {
        uint8_t first_cut, reserved;
        uint32_t rerank;
        uint16_t candidates;
        uint32_t flags, each[2];
        kv_status_t wanted;
    } cases[] = {
        {0, 0, 1, 0, 0, {0}, KV_OK},
        {0, 0, 1, 0, READS, {0}, KV_OK},
        {0, 0, 1, 1, 0, {0}, KV_INVALID}, /* candidates without a first cut */
        {0, 1, 1, 0, 0, {0}, KV_INVALID},
        {0, 0, KV_CANDIDATES_MAX, 0, 0, {0}, KV_OK},
        {0, 0, KV_CANDIDATES_MAX + 1, 0, 0, {0}, KV_INVALID},
        {0, 0, 4, 0, EACH, {1, 4}, KV_OK},
        {0, 0, 4, 0, EACH, {4, 0}, KV_INVALID},
        {0, 0, 4, 0, EACH, {4, 5}, KV_INVALID},
        {0, 0, 4, 0, EACH, {UINT32_MAX, 4}, KV_INVALID},
        {INT4, 0, 1, 1, 0, {0}, KV_OK},
        {INT4, 0, 1, 0, 0, {0}, KV_INVALID},
        {INT4, 0, 4, 4, READS, {0}, KV_OK},
        {INT4, 0, 4, 3, 0, {0}, KV_INVALID}, /* fewer than go on */
        {INT4, 0, 4, UINT16_MAX, 0, {0}, KV_OK},
        {INT4, 0, KV_CANDIDATES_MAX, KV_CANDIDATES_MAX - 1, 0, {0}, KV_INVALID},
        {INT4, 255, 4, 8, 0, {0}, KV_INVALID},
        {INT4, 0, 4, 8, EACH, {4, 8}, KV_OK},
        {INT4, 0, 4, 8, EACH | READS, {8, 4}, KV_OK},
        {INT4, 0, 4, 8, EACH, {3, 8}, KV_INVALID},
        {INT4, 0, 4, 8, EACH, {8, 9}, KV_INVALID},
        {INT4, 0, 4, 8, EACH, {8, UINT32_MAX}, KV_INVALID},
        {INT4 + 1, 0, 4, 8, 0, {0}, KV_INVALID},
        {UINT8_MAX, 0, 4, 8, 0, {0}, KV_INVALID},
        {INT4, 0, 4, 8, KV_WIRE_IDS, {0}, KV_INVALID}, /* rows that are named anyway */
        {INT4, 0, 4, 8, 1u << 31, {0}, KV_INVALID},
    };
    const uint32_t thread = thread_of_unit(0, 0);
    size_t bytes, end;

    (void)state;
    open_filled_session();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct kv_wire_query query = {.answer = KV_ANSWER_IDS,
                                            .merge = KV_MERGE_SUM,
                                            .n_queries = 1,
                                            .k = 3,
                                            .rerank = cases[i].rerank,
                                            .scale = 1,
                                            .n_ranges = 1,
                                            .flags = cases[i].flags,
                                            .first_cut = cases[i].first_cut,
                                            .reserved = cases[i].reserved,
                                            .candidates = cases[i].candidates};

        bytes = make_cut(&query, thread, cases[i].each, scratch, &end);
        const kv_status_t status = ask_cut(thread, bytes);
        if (status != cases[i].wanted)
            fail_msg("case %zu: %s", i, kv_status_name(status));
        if (!(query.flags & KV_WIRE_EACH) || status != KV_OK)
            continue;
        /* What follows is taken for the next vector's if they are not there: too few bytes. */
        for (size_t cut = end - 2 * sizeof(uint32_t); cut < bytes; cut++)
            assert_int_equal(ask_cut(thread, cut), KV_INVALID);
        assert_int_equal(ask_cut(thread, bytes + 4), KV_INVALID);
    }
    close_session();
}

/* ---- sessions that change ---------------------------------------------------------------- */

enum {
    WIDE_LAYERS = 48, /* of N_HEADS each: cut in more than one slice on every data thread */
    WIDE_D = 16,      /* fp16 keys alone */
    WIDE_ROW = 2 * WIDE_D,
    WIDE_TOKENS = 300,
    CUT_TOKENS = 100,
};

static struct kv_id128 make_wide_model(void)
{
    Kvpb__ModelRequest request = KVPB__MODEL_REQUEST__INIT;
    Kvpb__Layer layer = KVPB__LAYER__INIT;
    Kvpb__Layer *layers[WIDE_LAYERS];
    struct kv_id128 fingerprint;

    kv_random_fill(&world.random, &fingerprint, sizeof(fingerprint));
    layer.kind = KV_LAYER_KEYS;
    layer.dtype = KV_FP16;
    layer.n_kv_heads = N_HEADS;
    layer.d_k = WIDE_D;
    for (uint32_t i = 0; i < WIDE_LAYERS; i++)
        layers[i] = &layer;
    request.name = "wide";
    request.fingerprint = binary(&fingerprint);
    request.n_layers = WIDE_LAYERS;
    request.layers = layers;
    ask_control(KV_OP_MODEL, &request.base);
    return fingerprint;
}

static void send_control(unsigned op, const ProtobufCMessage *message)
{
    uint8_t packed[1024];
    struct kv_wire_header header = request_of(op);

    assert_in_range(protobuf_c_message_get_packed_size(message), 0, sizeof(packed));
    send_message(world.control, &header, packed, protobuf_c_message_pack(message, packed));
}

static void send_truncate(uint32_t tokens)
{
    Kvpb__TruncateRequest request = KVPB__TRUNCATE_REQUEST__INIT;
    Kvpb__Lifecycle lifecycle = KVPB__LIFECYCLE__INIT;

    lifecycle.op_id = kv_random_next(&world.random);
    lifecycle.kind = KV_OP_TRUNCATE;
    lifecycle.generation = 1;
    lifecycle.tokens = tokens;
    lifecycle.writer = WRITER;
    request.session_index = world.session_index;
    request.token = binary(&world.session_token);
    request.operation = &lifecycle;
    send_control(KV_OP_TRUNCATE, &request.base);
}

static void send_fork(uint32_t tokens)
{
    Kvpb__ForkRequest request = KVPB__FORK_REQUEST__INIT;
    Kvpb__Lifecycle lifecycle = KVPB__LIFECYCLE__INIT;
    struct kv_id128 child;

    kv_random_fill(&world.random, &child, sizeof(child));
    lifecycle.op_id = kv_random_next(&world.random);
    lifecycle.kind = KV_OP_FORK;
    lifecycle.generation = 1;
    lifecycle.tokens = tokens;
    lifecycle.child_session_id = binary(&child);
    lifecycle.child_token = binary(&child);
    lifecycle.writer = WRITER + 1;
    request.session_index = world.session_index;
    request.token = binary(&world.session_token);
    request.operation = &lifecycle;
    request.lease_ms = 1000; /* the child is gone after settle() */
    send_control(KV_OP_FORK, &request.base);
}

/* A request of `op` for the unit's first `n_tokens` rows (put, append: the next one's), in
 * order but for what the session is. */
static void send_about(unsigned op,
                       uint32_t generation,
                       const struct kv_wire_unit *about,
                       uint32_t n_tokens)
{
    struct kv_wire_header header = session_request(op, generation);
    struct kv_wire_unit unit = *about;
    size_t bytes = 0;

    header.n_units = 1;
    header.token_count = n_tokens;
    if (op == KV_OP_PUT || op == KV_OP_APPEND) {
        header.token_begin = n_tokens;
        header.token_count = 1;
        bytes = put_body(&unit, WIDE_ROW, n_tokens, 1, scratch) + WIDE_ROW;
    } else if (op == KV_OP_FETCH) {
        const uint32_t id = n_tokens - 1;

        header.token_count = 0;
        unit.n_ids = 1;
        bytes = put_bytes(scratch, 0, &unit, sizeof(unit));
        bytes = put_bytes(scratch, bytes, &id, sizeof(id));
    } else if (op == KV_OP_INDEX) {
        const struct kv_wire_index index = {.m = 2, .bits = 4, .iterations = 1};

        bytes = put_bytes(scratch, 0, &index, sizeof(index));
        bytes = put_bytes(scratch, bytes, &unit, sizeof(unit));
    } else if (op == KV_OP_QUERY) {
        const struct kv_wire_query query = {.answer = KV_ANSWER_IDS,
                                            .merge = KV_MERGE_SUM,
                                            .n_queries = 1,
                                            .k = 4,
                                            .rerank = 1,
                                            .scale = 1,
                                            .n_ranges = 1};
        const struct kv_wire_range range = {0, n_tokens};
        const float vector[WIDE_D] = {1};

        bytes = put_bytes(scratch, 0, &query, sizeof(query));
        bytes = put_bytes(scratch, bytes, &unit, sizeof(unit));
        bytes = put_bytes(scratch, bytes, &range, sizeof(range));
        bytes = put_bytes(scratch, bytes, vector, sizeof(vector));
    } else {
        bytes = put_bytes(scratch, 0, &unit, sizeof(unit));
    }
    send_message(world.data[thread_of_unit(unit.layer, unit.kv_head)], &header, scratch, bytes);
}

static void expect_reply(kv_status_t status, const char *what)
{
    kv_port_progress(world.port);
    if (world.reply.request_id != world.next_id || world.reply.status != status)
        fail_msg("%s: %s of request %llu, not %s of %llu", what,
                 kv_status_name((kv_status_t)world.reply.status),
                 (unsigned long long)world.reply.request_id, kv_status_name(status),
                 (unsigned long long)world.next_id);
}

/* A clock that goes on when somebody looks at it, so that slices end by time. */
static uint64_t look(const struct kv_clock *clock)
{
    (void)clock;
    return world.clock.virtual_us += 10;
}

/* A session is cut some units at a time: a request between two slices that names the generation
 * to come would meet units that still are of the one before. */
static void nobody_uses_a_session_that_is_cut(void **state)
{
    const struct kv_clock still = world.clock;
    static const unsigned ops[] = {KV_OP_PUT,   KV_OP_APPEND, KV_OP_READ,
                                   KV_OP_FETCH, KV_OP_INDEX,  KV_OP_QUERY};
    const struct kv_id128 wide = make_wide_model();
    struct kvs_shard *data = &world.node->shard[0];

    (void)state;
    world.clock.now_us = look;
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
        struct kv_wire_unit last = {0};
        unsigned n_between = 0;

        open_session_of(&wide);
        for (uint32_t j = 0; j < WIDE_LAYERS * N_HEADS; j++) {
            if (thread_of_unit(j / N_HEADS, j % N_HEADS) != 0)
                continue;
            last = (struct kv_wire_unit){(uint16_t)(j / N_HEADS), (uint16_t)(j % N_HEADS), 0};
            fill_unit(&last, WIDE_ROW, 0, WIDE_TOKENS);
        }
        send_truncate(CUT_TOKENS);
        kvs_node_control_step(world.node);
        kvs_node_data_step(world.node, 0);
        for (; data->command != NULL; n_between++) {
            send_about(ops[i], 2, &last, WIDE_TOKENS);
            kvs_node_data_step(world.node, 0);
            expect_reply(KV_BUSY, "the generation to come");
        }
        assert_true(n_between >= 2);
        send_about(ops[i], 1, &last, CUT_TOKENS);
        kvs_node_data_step(world.node, 0);
        expect_reply(KV_STALE, "the generation before");
        for (unsigned j = 0; j < 10; j++)
            step();
        send_about(ops[i], 2, &last, CUT_TOKENS);
        for (unsigned j = 0; j < 10; j++)
            step();
        expect_reply(KV_OK, "the generation there is");
        close_session();
        settle();
    }
    world.clock.now_us = still.now_us;
}

/* Rows land in a segment that a fork has come to share meanwhile; those behind them wait for
 * them instead of taking it away. */
static void rows_land_while_the_session_forks(void **state)
{
    const struct kv_wire_unit unit = {0, 0, 0};
    const uint32_t thread = thread_of_unit(0, 0);
    struct kv_channel *channel = world.data[thread];
    struct kv_wire_header headers[2];
    uint8_t bodies[2][2048];
    size_t heads[2];

    (void)state;
    open_session();
    for (uint16_t i = 0; i < N_LAYERS * N_HEADS; i++)
        fill_unit(&(struct kv_wire_unit){i / N_HEADS, i % N_HEADS, 0}, ROW_BYTES, 0, 100);
    for (uint32_t i = 0; i < 2; i++) {
        headers[i] = session_request(KV_OP_PUT, 1);
        headers[i].n_units = 1;
        headers[i].token_begin = 100 + i * 10;
        headers[i].token_count = 10;
        headers[i].bulk_bytes = 10 * ROW_BYTES;
        heads[i] = put_body(&unit, ROW_BYTES, 100 + i * 10, 10, bodies[i]);
    }
    send_message(channel, &headers[0], bodies[0], heads[0]);
    kvs_node_data_step(world.node, thread);
    send_fork(100);
    kvs_node_control_step(world.node);
    kvs_node_data_step(world.node, thread);
    /* The child is there; the parent is still of its generation until the control thread has
     * heard that. */
    send_message(channel, &headers[1], bodies[1], heads[1]);
    kvs_node_data_step(world.node, thread);
    for (uint32_t i = 0; i < 2; i++) {
        send_bulk(channel, &headers[i], bodies[i] + heads[i], 10 * ROW_BYTES);
        kvs_node_data_step(world.node, thread);
        kv_port_progress(world.port);
        assert_int_equal(world.reply.request_id, headers[i].request_id);
        if (world.reply.status != KV_OK)
            fail_msg("%.*s", (int)world.reply.body_bytes, (char *)world.body);
    }
    for (unsigned i = 0; i < 10; i++)
        step();
    assert_int_equal(world.node->control.n_sessions, 2);
    settle();
    assert_int_equal(world.node->control.n_sessions, 1);
    assert_int_equal(world.node->control.sessions[world.session_index].generation, 2);
    close_session();
}

/* ---- identity ---------------------------------------------------------------------------- */

/* All that the node has counted or keeps for a client. */
static uint64_t kept_for(uint32_t index)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < N_THREADS; i++) {
        const struct kvs_shard *data = &world.node->shard[i];
        const struct kvs_shard_client *peer = &data->clients[index];

        sum += kvs_counted(&peer->n_received) + kvs_counted(&peer->busy) +
               kvs_counted(&peer->dropped) + kvs_counted(&peer->rows_in) +
               kvs_counted(&peer->rows_out) + peer->n_requests;
        for (unsigned j = 0; j < sizeof(peer->early_bulk) / sizeof(peer->early_bulk[0]); j++)
            sum += peer->early_bulk[j].incoming != NULL;
        sum += kv_pool_used(data->requests) + kv_pool_used(data->bodies) +
               kv_pool_used(data->pending_receives);
    }
    return sum;
}

/* The token of a client that is not that client. */
static struct kv_id128
wrong_token(unsigned how, const struct identity *victim, const struct identity *other)
{
    struct kv_id128 token = victim->token;
    uint64_t bit = kv_random_below(&world.random, 128);

    switch (how) {
    case 0:
        return other->token;
    case 1:
        return (struct kv_id128){0};
    case 2:
        kv_random_fill(&world.random, &token, sizeof(token));
        return token;
    case 3:
        return world.session_token;
    default:
        token.bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        return token;
    }
}

/* A client's index without its token: nothing is answered, counted or kept for that client, and
 * nothing of it is cancelled. */
static void an_index_needs_its_token(void **state)
{
    struct kv_wire_header header, waiting;
    struct kv_wire_unit unit;
    struct identity victim, other;
    struct kv_channel *channel;
    uint64_t kept, n_unknown;
    size_t bytes, bulk;

    (void)state;
    settle();
    open_session();
    victim = another(0);
    other = world.me;
    world.me = victim;
    assert_int_equal(some_units(0, 1, 0, &unit), 1);
    waiting = request_of(KV_OP_READ);
    waiting.session_index = world.session_index;
    waiting.token = world.session_token;
    waiting.generation = waiting.n_units = waiting.token_count = 1;
    send_message(world.data[0], &waiting, &unit, sizeof(unit));
    step();
    assert_int_equal(world.node->shard[0].clients[victim.index].n_requests, 1);

    kept = kept_for(victim.index);
    n_unknown = COUNTED(unknown_clients);
    world.n_replies = 0;
    for (unsigned i = 0; i < 1000; i++) {
        uint32_t thread = make_request(1 + i % KV_OP_QUERY, &header, scratch, &bytes, &bulk);

        channel = world.data[thread];
        if (header.op == KV_OP_PING && i % 2 == 0) /* too large to come at once */
            bytes = header.token_count = 150000;
        if (header.op == KV_OP_CANCEL)
            header.offset = waiting.request_id;
        header.client_token = wrong_token(i % 5, &victim, &other);
        if (bulk > 0 && i % 2 == 0)
            send_bulk(channel, &header, scratch + bytes, bulk);
        send_message(channel, &header, scratch, bytes);
        if (bulk > 0 && i % 2 == 1)
            send_bulk(channel, &header, scratch + bytes, bulk);
        step();
        assert_int_equal(kept_for(victim.index), kept);
    }
    assert_int_equal(world.n_replies, 0);
    assert_true(COUNTED(unknown_clients) >= n_unknown + 1000);

    /* Nor does another client's own cancel reach it; its own does. */
    header = request_of(KV_OP_CANCEL);
    header.offset = waiting.request_id;
    header.client_index = other.index;
    header.client_token = other.token;
    send_message(world.data[0], &header, NULL, 0);
    step();
    assert_int_equal(world.node->shard[0].clients[victim.index].n_requests, 1);
    header = request_of(KV_OP_CANCEL);
    header.offset = waiting.request_id;
    send_message(world.data[0], &header, NULL, 0);
    step();
    assert_int_equal(world.node->shard[0].clients[victim.index].n_requests, 0);
    world.me = other;
    leave(&victim);
    close_session();
    good_requests_work();
}

/* A request that is too large to come at once takes no buffer before its client is known: with
 * none left a client's own is answered KV_BUSY, and a stranger's not at all. */
static void strangers_take_no_buffers(void **state)
{
    struct kvs_shard *data = &world.node->shard[0];
    void *receipts[KVS_PENDING_RECEIVES];
    uint64_t n_busy;

    (void)state;
    settle();
    for (unsigned i = 0; i < KVS_PENDING_RECEIVES; i++)
        assert_non_null(receipts[i] = kv_pool_get(data->pending_receives));
    for (unsigned i = 0; i < 6; i++) {
        struct kv_wire_header header = request_of(KV_OP_PING);

        header.token_count = 150000;
        memset(scratch, 0, header.token_count);
        if (i < 5)
            header.client_token = wrong_token(i, &world.me, &(struct identity){0});
        n_busy = COUNTED(busy);
        send_message(world.data[0], &header, scratch, header.token_count);
        for (unsigned j = 0; j < 10; j++)
            step();
        assert_int_equal(COUNTED(busy), n_busy + (i == 5));
    }
    for (unsigned i = 0; i < KVS_PENDING_RECEIVES; i++)
        kv_pool_put(data->pending_receives, receipts[i]);
    good_requests_work();
}

/* Every control operation but hello needs a client and its token. */
static void control_needs_a_client(void **state)
{
    struct identity me = world.me;
    uint8_t packed[70000];
    uint64_t n_unknown;
    uint32_t n_sessions;

    (void)state;
    open_session();
    n_sessions = world.node->control.n_sessions;
    n_unknown = COUNTED(unknown_clients);
    world.n_replies = 0;
    for (unsigned i = 0; i < 200; i++) {
        unsigned op = KV_OP_GOODBYE + i % (KV_OP_DRAIN - KV_OP_GOODBYE + 1);
        struct kv_wire_header header = request_of(op);
        size_t bytes = make_control(op, UINT_MAX, 0, packed);

        header.client_token = wrong_token(i % 5, &me, &me);
        if (i % 5 == 0)
            header.client_index += 1 + i % 3;
        send_message(world.control, &header, packed, bytes);
        step();
    }
    for (unsigned i = 0; i < 100; i++)
        step();
    assert_int_equal(world.n_replies, 0);
    assert_true(COUNTED(unknown_clients) > n_unknown);
    assert_int_equal(world.node->control.n_sessions, n_sessions);
    assert_false(kvs_node_drain_requested(world.node));
    assert_int_equal(world.node->control.clients[me.index].state, KVS_CLIENT_OPEN);
    close_session();
}

/* The text of a failure that was answered in a data message. */
static bool says(const char *what)
{
    char text[KVS_SMALL_BYTES + 1] = "";

    memcpy(text, world.body,
           world.reply.body_bytes < KVS_SMALL_BYTES ? world.reply.body_bytes : KVS_SMALL_BYTES);
    return strstr(text, what) != NULL;
}

static kv_status_t ask_object(unsigned op, const char *name, uint32_t tenant)
{
    struct kv_wire_header header = request_of(op);
    uint8_t body[64];
    size_t bytes = strlen(name);

    memcpy(body, name, bytes);
    header.tenant = tenant;
    header.name_bytes = (uint32_t)bytes;
    header.object_version = 1;
    number_put(&header, thread_of_name(name, bytes));
    if (op == KV_OP_OBJECT_PUT) {
        const struct kv_id128 hash = kv_hash128(name, bytes);
        uint32_t crc = kv_crc32c(kv_object_seed(&hash), "x", 1);

        header.object_bytes = 1;
        bytes = put_bytes(body, bytes, &crc, sizeof(crc));
        bytes = put_bytes(body, bytes, "x", 1);
    }
    return ask(world.data[thread_of_name(name, strlen(name))], &header, body, bytes);
}

/* Objects are the tenant's that the client said at hello, whatever a message says. */
static void objects_are_their_tenants(void **state)
{
    const char *name = "of tenant 3";
    struct identity before;

    (void)state;
    before = another(3);
    assert_int_equal(ask_object(KV_OP_OBJECT_PUT, name, 3), KV_OK);
    assert_int_equal(ask_object(KV_OP_OBJECT_GET, name, 3), KV_OK);
    leave(&before);
    before = another(4);
    for (unsigned op = KV_OP_OBJECT_PUT; op <= KV_OP_OBJECT_DELETE; op++) {
        assert_int_equal(ask_object(op, name, 3), KV_DENIED);
        assert_true(says("tenant 3, but the client belongs to tenant 4"));
        assert_int_equal(ask_object(op, name, 0), KV_DENIED);
    }
    assert_int_equal(ask_object(KV_OP_OBJECT_GET, name, 4), KV_NOT_FOUND);
    leave(&before);
    before = another(3);
    assert_int_equal(ask_object(KV_OP_OBJECT_GET, name, 3), KV_OK);
    leave(&before);
    clear_objects();
}

/* A put of one byte with a time. */
static kv_status_t put_with_terms(const char *name, uint32_t ttl_ms, uint32_t flags)
{
    const size_t name_bytes = strlen(name);
    const struct kv_id128 hash = kv_hash128(name, name_bytes);
    struct kv_wire_header header = request_of(KV_OP_OBJECT_PUT);
    uint32_t crc = kv_crc32c(kv_object_seed(&hash), "x", 1);
    uint8_t body[64];
    size_t bytes = put_bytes(body, 0, name, name_bytes);

    header.name_bytes = (uint32_t)name_bytes;
    header.object_bytes = 1;
    header.token_begin = ttl_ms;
    header.token_count = flags;
    number_put(&header, thread_of_name(name, name_bytes));
    bytes = put_bytes(body, bytes, &crc, sizeof(crc));
    bytes = put_bytes(body, bytes, "x", 1);
    return ask(world.data[thread_of_name(name, name_bytes)], &header, body, bytes);
}

static uint64_t n_objects(void)
{
    uint64_t n = 0;

    for (unsigned i = 0; i < N_THREADS; i++)
        n += kv_map_count(world.node->shard[i].objects.map);
    return n;
}

static bool has_object(const char *name)
{
    const kv_status_t status = ask_object(KV_OP_OBJECT_EXISTS, name, 0);

    assert_true(status == KV_OK || status == KV_NOT_FOUND);
    return status == KV_OK;
}

/* An object is there until its time is over, and at no moment after it; its memory is freed
 * although nobody asks for it.  A put of the same bytes gives it more time, never less. */
static void objects_have_times(void **state)
{
    char name[16];

    (void)state;
    settle();
    assert_int_equal(put_with_terms("t", KV_OBJECT_TTL_MAX_MS + 1, 0), KV_INVALID);
    assert_true(says("ttl of 2592000001 ms: limit 2592000000"));
    assert_int_equal(put_with_terms("t", KV_OBJECT_TTL_NONE - 1, 0), KV_INVALID);
    assert_int_equal(put_with_terms("t", 0, 2), KV_INVALID);
    assert_true(says("evictable: 2: must be 0 or 1"));
    assert_int_equal(put_with_terms("t", 0, UINT32_MAX), KV_INVALID);
    assert_int_equal(n_objects(), 0);

    assert_int_equal(put_with_terms("t", 1000, 0), KV_OK);
    assert_int_equal(put_with_terms("longest", KV_OBJECT_TTL_MAX_MS, 1), KV_OK);
    assert_int_equal(put_with_terms("none", KV_OBJECT_TTL_NONE, 0), KV_OK);
    world.clock.virtual_us += 800000;
    assert_true(has_object("t"));
    assert_int_equal(put_with_terms("t", 1000, 0), KV_OK);
    assert_int_equal(put_with_terms("t", 1, 0), KV_OK); /* takes nothing back */
    world.clock.virtual_us += 800000;
    assert_true(has_object("t"));
    assert_int_equal(ask_object(KV_OP_OBJECT_GET, "t", 0), KV_OK);
    world.clock.virtual_us += 300000;
    assert_int_equal(ask_object(KV_OP_OBJECT_GET, "t", 0), KV_NOT_FOUND);
    assert_false(has_object("t"));
    assert_true(has_object("longest") && has_object("none"));
    /* The name is free: these are other bytes, and nobody deleted it. */
    assert_int_equal(put_with_terms("t", 1000, 0), KV_OK);

    for (unsigned i = 0; i < 200; i++) {
        snprintf(name, sizeof(name), "soon %u", i);
        assert_int_equal(put_with_terms(name, 500 + i, i % 2), KV_OK);
    }
    assert_int_equal(n_objects(), 203);
    world.clock.virtual_us += 2000000;
    settle();
    assert_int_equal(n_objects(), 2);
    assert_true(COUNTED(objects_expired) >= 202);
    assert_int_equal(COUNTED(objects_evicted), 0);
    clear_objects();
}

/* Asks for a page.  Returns the reply, which the caller frees. */
static Kvpb__ObjectsReply *
ask_objects(const char *prefix, const Kvpb__ObjectsCursor *from, uint32_t limit, bool deletes)
{
    Kvpb__ObjectsRequest request = KVPB__OBJECTS_REQUEST__INIT;
    Kvpb__ObjectsReply *reply;

    request.prefix = (ProtobufCBinaryData){strlen(prefix), (uint8_t *)prefix};
    request.from = (Kvpb__ObjectsCursor *)from;
    request.limit = limit;
    request.deletes = deletes;
    ask_control(KV_OP_OBJECTS, &request.base);
    reply = kvpb__objects_reply__unpack(NULL, world.reply.body_bytes, world.body);
    assert_non_null(reply);
    return reply;
}

/* Goes through all pages.  Returns how many objects they have, or have deleted; those that it lists
 * are named PREFIX and a number, each once. */
static uint32_t count_objects(const char *prefix, uint32_t limit, bool deletes)
{
    Kvpb__ObjectsReply *reply = ask_objects(prefix, NULL, limit, deletes);
    bool is_seen[1000] = {false};
    uint32_t n = 0;

    for (;;) {
        Kvpb__ObjectsReply *next;

        assert_true(reply->n_objects <= limit && reply->n_deleted <= limit);
        for (size_t i = 0; i < reply->n_objects; i++) {
            const ProtobufCBinaryData *name = &reply->objects[i]->name;
            char text[64];
            unsigned number;

            assert_in_range(name->len, strlen(prefix), sizeof(text) - 1);
            assert_memory_equal(name->data, prefix, strlen(prefix));
            snprintf(text, sizeof(text), "%.*s", (int)name->len, (const char *)name->data);
            number = (unsigned)atoi(text + strcspn(text, "0123456789"));
            assert_true(number < 1000 && !is_seen[number]);
            is_seen[number] = true;
        }
        n += (uint32_t)(reply->n_objects + reply->n_deleted);
        if (reply->next == NULL)
            break;
        next = ask_objects(prefix, reply->next, limit, deletes);
        kvpb__objects_reply__free_unpacked(reply, NULL);
        reply = next;
    }
    kvpb__objects_reply__free_unpacked(reply, NULL);
    return n;
}

/* Pages of any size have each object of the tenant whose name begins so, once, with what it is; and
 * no other tenant's. */
static void objects_are_listed_and_deleted(void **state)
{
    static const uint32_t limits[] = {1, 2, 7, 100, KV_WIRE_OBJECTS_MAX};
    char name[300];
    struct identity before;
    Kvpb__ObjectsReply *reply;

    (void)state;
    settle();
    for (unsigned i = 0; i < 150; i++) {
        snprintf(name, sizeof(name), "%s/%u", i % 3 == 0 ? "other" : "mine", i);
        assert_int_equal(put_with_terms(name, i % 2 == 0 ? 0 : 100000, i % 5 == 0), KV_OK);
    }
    before = another(5);
    assert_int_equal(put_with_terms("mine/999", 0, 0), KV_OK);
    assert_int_equal(count_objects("", 10, false), 1);
    assert_int_equal(count_objects("mine/9", 10, false), 1);
    leave(&before);
    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        assert_int_equal(count_objects("", limits[i], false), 150);
        assert_int_equal(count_objects("mine/", limits[i], false), 100);
        assert_int_equal(count_objects("other/", limits[i], false), 50);
        assert_int_equal(count_objects("mine/999", limits[i], false), 0);
        assert_int_equal(count_objects("mine/1499", limits[i], false), 0);
    }

    world.clock.virtual_us += 1500000;
    reply = ask_objects("mine/145", NULL, 0, false);
    assert_int_equal(reply->n_objects, 1);
    assert_null(reply->next);
    assert_int_equal(reply->objects[0]->bytes, 1);
    assert_in_range(reply->objects[0]->age_ms, 1500, 60000);
    assert_false(reply->objects[0]->stays);
    assert_in_range(reply->objects[0]->ttl_left_ms + reply->objects[0]->age_ms, 99999, 100000);
    assert_true(reply->objects[0]->evictable);
    assert_false(reply->objects[0]->pinned);
    kvpb__objects_reply__free_unpacked(reply, NULL);

    /* What is over is neither listed nor counted. */
    assert_int_equal(put_with_terms("mine/500", 1000, 0), KV_OK);
    assert_int_equal(count_objects("mine/5", 100, false), 9);
    world.clock.virtual_us += 1000000;
    assert_int_equal(count_objects("mine/5", 100, false), 8);

    assert_int_equal(count_objects("mine/", 7, true), 100);
    assert_int_equal(count_objects("mine/", 7, true), 0);
    assert_int_equal(count_objects("", 100, false), 50);
    assert_false(has_object("mine/1"));
    assert_true(has_object("other/3"));
    before = another(5);
    assert_int_equal(count_objects("", 10, false), 1);
    leave(&before);
    clear_objects();

    /* Out of bounds. */
    memset(name, 'x', sizeof(name));
    for (unsigned i = 0; i < 4; i++) {
        Kvpb__ObjectsRequest request = KVPB__OBJECTS_REQUEST__INIT;
        Kvpb__ObjectsCursor cursor = KVPB__OBJECTS_CURSOR__INIT;

        request.prefix = (ProtobufCBinaryData){i == 1 ? 256 : 255, (uint8_t *)name};
        request.limit = i == 2 ? KV_WIRE_OBJECTS_MAX + 1 : KV_WIRE_OBJECTS_MAX;
        cursor.thread = i == 3 ? N_THREADS : N_THREADS - 1;
        request.from = &cursor;
        assert_int_equal(try_control(KV_OP_OBJECTS, &request.base),
                         i == 0 ? KV_OK : KV_INVALID);
    }
}

/* A put of one name, in numbers that the test chooses; its bytes come by bulk. */
static struct kv_wire_header
numbered_put(uint32_t number, uint32_t settled, uint8_t *body, size_t *ret_bytes)
{
    static const char name[] = "numbered";
    const struct kv_id128 hash = kv_hash128(name, sizeof(name) - 1);
    struct kv_wire_header header = request_of(KV_OP_OBJECT_PUT);
    uint32_t crc = kv_crc32c(kv_object_seed(&hash), "x", 1);

    header.put_number = number;
    header.put_settled = settled;
    header.name_bytes = sizeof(name) - 1;
    header.object_bytes = header.bulk_bytes = 1;
    *ret_bytes = put_bytes(body, 0, name, sizeof(name) - 1);
    *ret_bytes = put_bytes(body, *ret_bytes, &crc, sizeof(crc));
    return header;
}

static kv_status_t put_numbered(uint32_t number, uint32_t settled)
{
    uint8_t body[64];
    size_t bytes;
    struct kv_wire_header header = numbered_put(number, settled, body, &bytes);
    struct kv_channel *channel = world.data[thread_of_name("numbered", 8)];

    send_message(channel, &header, body, bytes);
    send_bulk(channel, &header, "x", 1);
    for (unsigned i = 0; i < 10; i++)
        step();
    assert_int_equal(world.reply.request_id, header.request_id);
    return (kv_status_t)world.reply.status;
}

/* Whether the object is there; it is taken away. */
static bool was_stored(void)
{
    const struct kv_id128 key = kv_hash128("numbered", 8);

    return kvs_objects_remove(&world.node->shard[thread_of_name("numbered", 8)].objects, &key);
}

/* A put stores once, however often it is sent, and not at all once its client waits for it no
 * more: what was deleted meanwhile does not come back. */
static void puts_store_once(void **state)
{
    struct identity before = another(0);
    struct kv_channel *channel = world.data[thread_of_name("numbered", 8)];
    struct kv_wire_header headers[2];
    uint8_t body[64];
    uint32_t number = 0;
    kv_status_t late;
    size_t bytes;

    (void)state;
    clear_objects();
    for (unsigned i = 0; i < 3; i++) {
        assert_int_equal(put_numbered(5, 5), KV_OK);
        assert_true(was_stored() == (i == 0));
    }
    assert_int_equal(put_numbered(4, 5), KV_CANCELLED);
    assert_int_equal(put_numbered(6, 4), KV_OK); /* comes late: 5 stays settled */
    assert_true(was_stored());
    assert_int_equal(put_numbered(4, 4), KV_CANCELLED);
    assert_int_equal(put_numbered(5 + KV_WIRE_PUTS_MAX, 5), KV_INVALID);
    assert_false(was_stored());
    assert_int_equal(put_numbered(4 + KV_WIRE_PUTS_MAX, 5), KV_OK);
    assert_true(was_stored());
    assert_int_equal(put_numbered(6 + KV_WIRE_PUTS_MAX, 7), KV_OK);
    assert_true(was_stored());
    assert_int_equal(put_numbered(4 + KV_WIRE_PUTS_MAX, 7), KV_OK);
    assert_false(was_stored());

    /* The data of the first attempt comes after the second one has stored, or was given up. */
    for (unsigned i = 0; i < 2; i++) {
        number = 2000 + i;
        headers[0] = numbered_put(number, number, body, &bytes);
        send_message(channel, &headers[0], body, bytes);
        step();
        if (i == 0)
            assert_int_equal(put_numbered(number, number), KV_OK);
        else
            assert_int_equal(put_numbered(number + 1, number + 1), KV_OK);
        assert_true(was_stored());
        send_bulk(channel, &headers[0], "x", 1);
        for (unsigned j = 0; j < 10; j++)
            step();
        assert_int_equal(world.reply.request_id, headers[0].request_id);
        assert_int_equal(world.reply.status, i == 0 ? KV_OK : KV_CANCELLED);
        assert_false(was_stored());
    }

    /* The same of data that is not taken, since the object is there: a number that has ended
     * says nothing of the one that goes round to its place. */
    number = 3000;
    assert_int_equal(put_numbered(number, number), KV_OK);
    headers[0] = numbered_put(number + 1, number + 1, body, &bytes);
    send_message(channel, &headers[0], body, bytes);
    step();
    assert_int_equal(put_numbered(number + 2, number + 2), KV_OK);
    send_bulk(channel, &headers[0], "x", 1);
    for (unsigned j = 0; j < 10; j++)
        step();
    assert_int_equal(world.reply.request_id, headers[0].request_id);
    late = (kv_status_t)world.reply.status;
    assert_true(was_stored());
    assert_int_equal(put_numbered(number + 1 + KV_WIRE_PUTS_MAX, number + 2), KV_OK);
    assert_true(was_stored());
    assert_int_equal(late, KV_CANCELLED);

    /* Numbers go around. */
    for (number = 0x7ffffff0; number != 0xfffffff0; number += 0x40000000)
        assert_int_equal(put_numbered(number, number), KV_OK);
    for (number = 0xfffffff0; number != 16; number++) {
        clear_objects();
        assert_int_equal(put_numbered(number, number), KV_OK);
        assert_true(was_stored());
        assert_int_equal(put_numbered(number, number), KV_OK);
        assert_false(was_stored());
        assert_int_equal(put_numbered(number - 1, number), KV_CANCELLED);
    }
    leave(&before);
    settle();
}

/* What the six control operations on a session say to whoever asks with its ticket. */
static void all_say(kv_status_t status)
{
    static const unsigned ops[] = {KV_OP_RESUME, KV_OP_FORK,    KV_OP_TRUNCATE,
                                   KV_OP_RENEW,  KV_OP_SESSION, KV_OP_CLOSE};
    const struct kv_id128 child = {{1, 2, 3}};
    Kvpb__Lifecycle lifecycle = KVPB__LIFECYCLE__INIT;
    Kvpb__ResumeRequest resume = KVPB__RESUME_REQUEST__INIT;
    Kvpb__ForkRequest fork = KVPB__FORK_REQUEST__INIT;
    Kvpb__TruncateRequest truncate = KVPB__TRUNCATE_REQUEST__INIT;
    Kvpb__CloseRequest close = KVPB__CLOSE_REQUEST__INIT;
    Kvpb__RenewRequest renew = KVPB__RENEW_REQUEST__INIT;
    Kvpb__SessionRequest session = KVPB__SESSION_REQUEST__INIT;
    const ProtobufCMessage *requests[] = {&resume.base, &fork.base,    &truncate.base,
                                          &renew.base,  &session.base, &close.base};

    lifecycle.op_id = kv_random_next(&world.random);
    lifecycle.generation = 1;
    lifecycle.child_session_id = lifecycle.child_token = binary(&child);
    lifecycle.writer = WRITER + 1;
    resume.session_id = binary(&world.session_id);
    fork.operation = truncate.operation = &lifecycle;
    fork.session_index = truncate.session_index = close.session_index = renew.session_index =
        session.session_index = world.session_index;
    resume.token = fork.token = truncate.token = close.token = renew.token = session.token =
        binary(&world.session_token);
    for (unsigned i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
        lifecycle.op_id++;
        lifecycle.kind = ops[i];
        if (try_control(ops[i], requests[i]) != status)
            fail_msg("%s: %s", kvs_op_name(ops[i]), world.detail);
        if (ops[i] == KV_OP_FORK)
            lifecycle.generation += status == KV_OK;
    }
}

/* A ticket is good for clients of the session's tenant alone. */
static void sessions_are_their_tenants(void **state)
{
    struct identity before, owner;
    struct kv_wire_header header;
    size_t bytes, bulk;

    (void)state;
    before = another(3);
    owner = world.me;
    open_session();
    world.me = before;
    (void)another(4);
    all_say(KV_DENIED);
    for (unsigned op = 1; op <= KV_OP_QUERY; op++) {
        if ((kvs_ops[op].flags & KVS_OP_NEEDS_SESSION) == 0)
            continue;
        do {
            uint32_t thread = make_request(op, &header, scratch, &bytes, &bulk);

            if (bulk == 0)
                assert_int_equal(ask(world.data[thread], &header, scratch, bytes), KV_DENIED);
        } while (bulk > 0);
        assert_true(says("another tenant"));
    }
    leave(&before);
    world.me = owner;
    all_say(KV_OK);
    leave(&before);
    settle();
}

/* Opens a session of a root, as a client that knows of n_rows does.  Returns the status;
 * *ret_rows: what the node tells. */
static kv_status_t
try_root(uint64_t prompt_root, uint32_t branch, uint32_t n_rows, uint32_t *ret_rows)
{
    Kvpb__OpenRequest request = KVPB__OPEN_REQUEST__INIT;
    Kvpb__Placement placement = KVPB__PLACEMENT__INIT;
    Kvpb__OpenReply *reply;

    kv_random_fill(&world.random, &world.session_id, sizeof(world.session_id));
    request.session_id = binary(&world.session_id);
    request.token = binary(&world.session_token);
    request.fingerprint = binary(&world.fingerprint);
    request.writer = WRITER;
    request.prompt_root = prompt_root;
    request.branch = branch;
    request.n_rows = n_rows;
    placement.epoch = EPOCH;
    placement.n_nodes = 1;
    placement.root =
        n_rows > 0 ? kv_placement_branch_root(prompt_root, branch, n_rows) : prompt_root;
    request.placement = &placement;
    const kv_status_t status = try_control(KV_OP_OPEN, &request.base);
    reply = kvpb__open_reply__unpack(NULL, world.reply.body_bytes, world.body);
    assert_non_null(reply);
    world.session_index = reply->session_index;
    *ret_rows = reply->n_rows;
    kvpb__open_reply__free_unpacked(reply, NULL);
    kvs_node_check(world.node);
    return status;
}

/* The same, of one that must succeed.  Returns what the node tells. */
static uint32_t open_root(uint64_t prompt_root, uint32_t branch, uint32_t n_rows)
{
    uint32_t n_told;

    if (try_root(prompt_root, branch, n_rows, &n_told) != KV_OK)
        fail_msg("%s", world.detail);
    return n_told;
}

/* All leases end, and with them the roots. */
static void outlast_leases(void)
{
    world.clock.virtual_us += LEASE_US;
    settle();
    kvs_node_check(world.node);
    assert_int_equal(kv_map_count(world.node->control.roots), 0);
}

/* With as many sessions of a root as the configuration says, it gets twice as many rows: who
 * comes for another one is told so, once, and nobody who does not know of rows. */
static void roots_get_rows(void **state)
{
    const uint32_t most = world.node->control.config.root_sessions;
    const uint64_t moved = counted(offsetof(struct kvs_stats, sessions_moved));
    uint32_t n_rows, n_told;

    (void)state;
    assert_int_equal(most, world.node->control.config.sessions_max / 16);
    for (uint32_t i = 0; i < most; i++)
        assert_int_equal(open_root(7, i, 1), 1);
    /* A branch of another row goes there; one of this row stays, and its client learns. */
    assert_int_equal(try_root(7, 5, 1, &n_told), KV_MOVED);
    assert_int_equal(n_told, 2);
    assert_string_equal(world.detail, "open: root 0000000000000007 has 2 rows, not 1");
    assert_int_equal(open_root(7, 6, 1), 2);
    /* Without rows, nothing is told, counted or refused. */
    for (uint32_t i = 0; i < 2 * most; i++)
        assert_int_equal(open_root(7, 0, 0), 0);
    /* As many again, and there are more; what other nodes have told is as good. */
    for (uint32_t i = 1; i < most; i++)
        assert_int_equal(open_root(7, 2 * i, 2), 2);
    assert_int_equal(try_root(7, 2, 2, &n_told), KV_MOVED);
    assert_int_equal(n_told, 4);
    assert_int_equal(open_root(7, 32, 32), 32);
    assert_int_equal(try_root(7, 4, 2, &n_told), KV_MOVED);
    assert_int_equal(n_told, 32);
    assert_int_equal(counted(offsetof(struct kvs_stats, sessions_moved)), moved + 3);
    /* What is on other rows is another row's load. */
    for (uint32_t i = 0; i < 2 * most; i++)
        assert_int_equal(open_root(9, i, 2), 2);
    /* Another root, another tenant: neither knows. */
    assert_int_equal(open_root(8, 1, 1), 1);
    const struct identity before = another(5);
    assert_int_equal(open_root(7, 1, 1), 1);
    close_session();
    leave(&before);
    outlast_leases();

    /* Nobody is there: nothing is known.  There are never more rows than a root may have. */
    assert_int_equal(open_root(7, 1, 1), 1);
    n_rows = KV_ROOT_ROWS_MAX;
    for (uint32_t i = 0; i < 3 * most; i++)
        assert_int_equal(open_root(7, 1, n_rows), n_rows);
    outlast_leases();
}

/* Forks are on their parent's row, and count there. */
static void forks_count_for_their_root(void **state)
{
    const uint32_t most = world.node->control.config.root_sessions;
    uint32_t n_told;

    (void)state;
    for (uint32_t i = 1; i < most; i++)
        assert_int_equal(open_root(7, 0, 1), 1);
    send_fork(0);
    for (unsigned i = 0; i < 100; i++)
        step();
    kvs_node_check(world.node);
    assert_int_equal(try_root(7, 1, 1, &n_told), KV_MOVED);
    assert_int_equal(n_told, 2);
    outlast_leases();
}

static void refused_root(uint64_t root, uint32_t branch, uint32_t n_rows, uint64_t placed)
{
    Kvpb__OpenRequest request = KVPB__OPEN_REQUEST__INIT;
    Kvpb__Placement placement = KVPB__PLACEMENT__INIT;
    char text[120];

    request.session_id = binary(&world.fingerprint);
    request.token = binary(&world.session_token);
    request.fingerprint = binary(&world.fingerprint);
    request.writer = WRITER;
    request.prompt_root = root;
    request.branch = branch;
    request.n_rows = n_rows;
    placement.epoch = EPOCH;
    placement.n_nodes = 1;
    placement.root = placed;
    request.placement = &placement;
    assert_int_equal(try_control(KV_OP_OPEN, &request.base), KV_INVALID);
    snprintf(text, sizeof(text), "open: %u rows, branch %u: not where root %016llx is placed",
             n_rows, branch, (unsigned long long)root);
    assert_string_equal(world.detail, text);
}

static void wrong_rows_are_refused(void **state)
{
    (void)state;
    refused_root(7, 0, 3, 7);
    refused_root(7, 0, 128, 7);
    refused_root(7, 0, UINT32_MAX, 7);
    refused_root(7, 0, 1u << 31, 7);
    refused_root(7, 64, 1, 7);
    refused_root(7, UINT32_MAX, 64, 7);
    refused_root(7, 1, 1, 8);
    refused_root(7, 1, 2, 7);
    refused_root(7, 0, 2, kv_placement_branch_root(7, 1, 2));
    assert_int_equal(kv_map_count(world.node->control.roots), 0);
}

/* A hello that is asked again is answered with the client's token: not to another tenant. */
static void hello_again_is_the_same_client(void **state)
{
    struct identity before = another(3), me = world.me;
    Kvpb__HelloRequest request = KVPB__HELLO_REQUEST__INIT;
    const void *address;

    (void)state;
    request.version = KV_WIRE_VERSION;
    request.name = "again";
    world.port->ops->port_address(world.port, &address, &request.address.len);
    request.address.data = (uint8_t *)address;
    request.client_id = binary(&me.client_id);
    request.tenant = 4;
    assert_int_equal(try_control(KV_OP_HELLO, &request.base), KV_DENIED);
    request.tenant = 3;
    assert_int_equal(try_control(KV_OP_HELLO, &request.base), KV_OK);
    Kvpb__HelloReply *reply =
        kvpb__hello_reply__unpack(NULL, world.reply.body_bytes, world.body);
    assert_non_null(reply);
    assert_int_equal(reply->client_index, me.index);
    assert_memory_equal(reply->client_token.data, &me.token, sizeof(me.token));
    kvpb__hello_reply__free_unpacked(reply, NULL);
    leave(&before);
}

/* Whether the last answer's body has the secret in it, as bytes or in hexadecimal digits. */
static bool tells(const struct kv_id128 *secret)
{
    char hex[2 * sizeof(secret->bytes) + 1];

    for (size_t i = 0; i < sizeof(secret->bytes); i++)
        snprintf(hex + 2 * i, 3, "%02x", secret->bytes[i]);
    return memmem(world.body, world.reply.body_bytes, secret->bytes, sizeof(secret->bytes)) !=
               NULL ||
           memmem(world.body, world.reply.body_bytes, hex, sizeof(hex) - 1) != NULL;
}

/* A name is what opens the block's rows: whoever was not told it, must not read it in a table.
 * What the table says is enough to name the block in what clients say of it. */
static void tables_tell_no_secrets(void **state)
{
    static char *const names[] = {"status", "sessions", "clients", "models",  "ops",
                                  "stats",  "scrub",    "threads", "prefixes"};
    struct kv_id128 told = block_names[0];
    Kvpb__PrefixRequest prefix = KVPB__PREFIX_REQUEST__INIT;
    bool tells_session = false, tells_told = false;

    (void)state;
    open_session_with_blocks();
    assert_int_equal(publish_names(), N_NAMES * KV_BLOCK_TOKENS);
    memset(told.bytes + 8, 0, 8);
    for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        Kvpb__TableRequest request = KVPB__TABLE_REQUEST__INIT;

        request.name = names[i];
        ask_control(KV_OP_TABLE, &request.base);
        assert_false(tells(&world.me.token));
        assert_false(tells(&world.me.client_id));
        assert_false(tells(&world.session_token));
        for (unsigned block = 0; block < N_NAMES; block++)
            assert_false(tells(&block_names[block]));
        tells_told = tells_told || tells(&told);
        tells_session = tells_session || tells(&world.session_id); /* it would be found */
    }
    assert_true(tells_session && tells_told);
    close_session();
    prefix.verb = KV_PREFIX_EVICT;
    prefix.name = binary(&told);
    ask_control(KV_OP_PREFIX, &prefix.base);
    settle();
    assert_int_equal(kvs_prefixes_count(world.node->control.prefixes), 0);
}

/* ---- verification ------------------------------------------------------------------------ */

static Kvpb__VerifyReply *ask_verify(uint64_t since_us)
{
    Kvpb__VerifyRequest request = KVPB__VERIFY_REQUEST__INIT;
    Kvpb__VerifyReply *reply;

    request.since_us = since_us;
    ask_control(KV_OP_VERIFY, &request.base);
    reply = kvpb__verify_reply__unpack(NULL, world.reply.body_bytes, world.body);
    assert_non_null(reply);
    return reply;
}

/* A request is answered at once, whatever there is to do; the node does it as long as it is asked. */
static void verify_goes_on_while_it_is_asked(void **state)
{
    Kvpb__VerifyRequest request = KVPB__VERIFY_REQUEST__INIT;
    struct kvs_shard *shard = &world.node->shard[0];
    const uint64_t begun_us = world.clock.virtual_us;
    Kvpb__VerifyReply *reply = ask_verify(0);

    (void)state;
    assert_int_equal(reply->since_us, begun_us);
    assert_false(reply->is_done);
    for (unsigned i = 0; !reply->is_done; i++) {
        assert_in_range(i, 0, 10000);
        world.clock.virtual_us += 1000;
        step();
        kvpb__verify_reply__free_unpacked(reply, NULL);
        reply = ask_verify(begun_us);
        assert_int_equal(reply->since_us, begun_us);
    }
    assert_int_equal(reply->disk->blocks, 0); /* nothing is saved here */
    kvpb__verify_reply__free_unpacked(reply, NULL);

    assert_true(shard->scrub_wanted_us >= begun_us);
    world.clock.virtual_us += KVS_VERIFY_ASKED_US + 20001;
    step();
    assert_int_equal(shard->scrub_wanted_us, 0);
    request.since_us = world.clock.virtual_us + 1000000;
    assert_int_equal(try_control(KV_OP_VERIFY, &request.base), KV_INVALID);
    good_requests_work();
}

/* ---- saving ------------------------------------------------------------------------------ */

static void
save_is_refused(const Kvpb__SaveRequest *request, kv_status_t status, const char *words)
{
    assert_int_equal(try_control(KV_OP_SAVE, &request->base), status);
    if (strstr(world.detail, words) == NULL)
        fail_msg("not '%s': %s", words, world.detail);
}

/* Whoever names no session of its own, or a time that is still to come, learns nothing; a node without
 * a disk says so. */
static void save_needs_a_session_and_a_disk(void **state)
{
    Kvpb__SaveRequest request = KVPB__SAVE_REQUEST__INIT;
    struct kv_id128 other;
    struct identity before;

    (void)state;
    kv_random_fill(&world.random, &other, sizeof(other));
    open_session_with_blocks();
    save_is_refused(&request, KV_NOT_FOUND, "save: no session 0 with that token");
    request.session_index = world.session_index;
    request.token = binary(&other);
    save_is_refused(&request, KV_NOT_FOUND, "with that token");
    request.token = binary(&world.session_token);
    save_is_refused(&request, KV_STALE, "is at generation 1, not 0");
    request.generation = 1;
    save_is_refused(&request, KV_UNSUPPORTED, "save: the node has no disk (--disk)");
    request.since_us = world.clock.virtual_us + 1000000;
    save_is_refused(&request, KV_INVALID, "still to come");
    before = another(7);
    request.since_us = 0;
    save_is_refused(&request, KV_DENIED, "belongs to another tenant");
    request.session_id = binary(&world.session_id);
    save_is_refused(&request, KV_NOT_FOUND, "save: no such session");
    leave(&before);
    save_is_refused(&request, KV_UNSUPPORTED, "has no disk");
    request.session_id.len--;
    save_is_refused(&request, KV_INVALID, "save: session_id: 15 bytes, not 16");
    close_session();
    good_requests_work();
}

/* ---- counters at their ends -------------------------------------------------------------- */

/* The request that is number 2^32 and names units that none has named before. */
static void requests_are_counted_on(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < N_THREADS; i++)
        world.node->shard[i].marks = UINT32_MAX;
    good_requests_work();
}

/* ---- gaps -------------------------------------------------------------------------------- */

/* A put into unit (0, 0) that is under way, for the sake of its answer. */
struct put {
    struct kv_wire_header header;
    uint8_t body[8192];
    size_t head; /* bytes before the rows */
};

enum {
    GAP_DEADLINE_US = 1000000,
};

/* Sends a put of rows [begin, begin + count), by bulk without its bulk if that is to follow. */
static void
send_put(struct put *put, uint32_t begin, uint32_t count, uint32_t snapshot, bool by_bulk)
{
    const struct kv_wire_unit unit = {0, 0, 0};
    const uint32_t thread = thread_of_unit(0, 0);
    const size_t bytes = (size_t)count * ROW_BYTES;

    put->header = session_request(KV_OP_PUT, 1);
    put->header.n_units = 1;
    put->header.token_begin = begin;
    put->header.token_count = count;
    put->header.snapshot = snapshot;
    put->header.deadline_us = GAP_DEADLINE_US;
    put->header.bulk_bytes = by_bulk ? bytes : 0;
    put->head = put_body(&unit, ROW_BYTES, begin, count, put->body);
    send_message(world.data[thread], &put->header, put->body,
                 put->head + (by_bulk ? 0 : bytes));
    for (unsigned i = 0; i < 4; i++)
        step();
}

static void send_rows(struct put *put)
{
    send_bulk(world.data[thread_of_unit(0, 0)], &put->header, put->body + put->head,
              put->header.bulk_bytes);
    for (unsigned i = 0; i < 8; i++)
        step();
}

static void expect_gap(const struct put *put, const char *what)
{
    static const char words[] = "put: layer 0 head 0: begins at token";

    assert_int_equal(world.reply.request_id, put->header.request_id);
    assert_int_equal(world.reply.status, KV_NOT_READY);
    if (world.reply.body_bytes < sizeof(words) ||
        memcmp(world.body, words, sizeof(words) - 1) != 0)
        fail_msg("%s: %.*s", what, (int)world.reply.body_bytes, (char *)world.body);
}

static uint32_t committed(void)
{
    const struct kvs_shard_session *part =
        &world.node->shard[thread_of_unit(0, 0)].sessions[world.session_index];

    return kvs_shard_session_unit(part, 0, 0)->committed;
}

/* A put whose rows begin beyond those that are there waits for what is under way, and for
 * nothing else. */
static void puts_wait_for_what_is_under_way(void **state)
{
    static struct put first, second, third;
    uint64_t n_replies;

    (void)state;
    open_session();
    /* Nothing is, by body and by bulk. */
    send_put(&second, 10, 10, 0, false);
    expect_gap(&second, "nothing is under way");
    send_put(&second, 10, 10, 0, true);
    send_rows(&second);
    expect_gap(&second, "nothing is under way");
    send_put(&second, 10, 10, 9, false);
    assert_int_equal(world.reply.status, KV_INVALID); /* neither 0 nor where it begins */

    /* Rows that land lead up to the second, and not to the third. */
    send_put(&first, 0, 10, 0, true);
    send_put(&second, 10, 10, 0, true);
    send_put(&third, 25, 5, 0, false);
    expect_gap(&third, "rows land before the gap");
    send_rows(&second);
    send_rows(&first);
    assert_int_equal(committed(), 20);

    /* The client says that it has sent what leads up to it. */
    n_replies = world.n_replies;
    send_put(&second, 25, 5, 25, false);
    assert_int_equal(world.n_replies, n_replies);
    send_put(&first, 20, 5, 0, false);
    assert_int_equal(world.n_replies, n_replies + 2);
    assert_int_equal(committed(), 30);

    /* One is on its way into a buffer, over rows that are there and on. */
    for (unsigned fails = 0; fails < 2; fails++) {
        const uint32_t there = committed();

        n_replies = world.n_replies;
        send_put(&first, there - 5, 10, 0, true);
        send_put(&second, there + 5, 5, 0, false);
        send_put(&third, there + 15, 5, 0, false);
        assert_int_equal(world.n_replies, n_replies);
        if (fails)
            first.body[first.head + 9 * ROW_BYTES] ^= 1;
        send_rows(&first);
        /* The third one was let in for the first one's sake, which does not reach it. */
        assert_int_equal(world.n_replies, n_replies + 3);
        assert_int_equal(committed(), fails ? there : there + 10);
    }
    settle();
    close_session();
}

/* Puts that came in an order of which each leads to the next, by every other way through those
 * that wait, do not all land in one step; nor do all that wait look again for each of them. */
static void chains_of_puts_take_turns(void **state)
{
    enum {
        N_PUTS = 200,
        MOST_AT_ONCE = 16
    };
    const uint32_t thread = thread_of_unit(0, 0);
    struct kvs_shard_client *peer = &world.node->shard[thread].clients[world.me.index];
    uint32_t there = 0, n_steps = 0;
    static struct put put;
    uint64_t n_replies;

    (void)state;
    open_session();
    n_replies = world.n_replies;
    peer->credits = N_PUTS;
    for (uint32_t token = 2; token < N_PUTS; token += 2)
        send_put(&put, token, 1, token, false);
    for (uint32_t token = N_PUTS - 1; token < N_PUTS; token -= 2)
        send_put(&put, token, 1, token, false);
    assert_int_equal(world.n_replies, n_replies);
    assert_int_equal(peer->n_requests, N_PUTS - 1);

    put.header = session_request(KV_OP_PUT, 1);
    put.header.n_units = 1;
    put.header.token_count = 1;
    put.head = put_body(&(struct kv_wire_unit){0, 0, 0}, ROW_BYTES, 0, 1, put.body);
    send_message(world.data[thread], &put.header, put.body, put.head + ROW_BYTES);
    for (; there < N_PUTS && n_steps < 10000; n_steps++) {
        step();
        if (committed() - there > MOST_AT_ONCE)
            fail_msg("%u puts landed in one step", committed() - there);
        there = committed();
    }
    /* Were all of them looked at for each, so few steps would not do. */
    assert_true(n_steps <= N_PUTS + 2);
    settle();
    assert_int_equal(world.n_replies, n_replies + N_PUTS);
    peer->credits = CREDITS;
    close_session();
}

/* Where rows of many sessions come in one step, what waits for them takes no more steps than if
 * all were of one session. */
static void sessions_do_not_queue_for_a_look(void **state)
{
    enum {
        N_SESSIONS = 32,
        MOST_STEPS = 8
    };
    const uint32_t thread = thread_of_unit(0, 0);
    const struct kv_wire_unit unit = {0, 0, 0};
    struct kvs_shard_client *peer = &world.node->shard[thread].clients[world.me.index];
    uint32_t sessions[N_SESSIONS], n_steps = 0;
    struct kv_wire_header header;
    static struct put put;
    uint64_t n_replies;

    (void)state;
    peer->credits = 2 * N_SESSIONS;
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        open_session();
        sessions[i] = world.session_index;
    }
    n_replies = world.n_replies;
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        world.session_index = sessions[i];
        header = session_request(KV_OP_READ, 1);
        header.n_units = 1;
        header.token_count = 1;
        send_message(world.data[thread], &header, &unit, sizeof(unit));
    }
    for (unsigned i = 0; i < 4; i++)
        step();
    assert_int_equal(peer->n_requests, N_SESSIONS);

    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        world.session_index = sessions[i];
        header = session_request(KV_OP_PUT, 1);
        header.n_units = 1;
        header.token_count = 1;
        put.head = put_body(&unit, ROW_BYTES, 0, 1, put.body);
        send_message(world.data[thread], &header, put.body, put.head + ROW_BYTES);
    }
    while (world.n_replies < n_replies + 2 * N_SESSIONS && n_steps < MOST_STEPS) {
        step();
        n_steps++;
    }
    assert_int_equal(world.n_replies, n_replies + 2 * N_SESSIONS);
    settle();
    peer->credits = CREDITS;
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        world.session_index = sessions[i];
        close_session();
    }
}

/* ---- leases ------------------------------------------------------------------------------ */

/* Sessions of which every other one is used.  Each is looked at about once per lease, not in
 * each of the control thread's rounds, and the unused ones end, and no other. */
static void leases_are_looked_at_when_due(void **state)
{
    enum {
        N_SESSIONS = 40,
        LEASE_MS = 400,
        ROUND_US = 50000,
        N_ROUNDS = 32, /* four leases */
    };
    const struct kvs_control *control = &world.node->control;
    const uint64_t n_expired = kvs_counted(&control->stats.sessions_expired);
    const uint64_t n_looks = control->n_lease_looks;
    const struct kv_wire_unit unit = {0, 0, 0};
    uint32_t sessions[N_SESSIONS];

    (void)state;
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        Kvpb__RenewRequest renew = KVPB__RENEW_REQUEST__INIT;

        open_session();
        sessions[i] = world.session_index;
        renew.session_index = world.session_index;
        renew.token = binary(&world.session_token);
        renew.lease_ms = LEASE_MS;
        ask_control(KV_OP_RENEW, &renew.base);
    }
    assert_int_equal(control->n_sessions, N_SESSIONS);
    for (uint32_t i = 0; i < N_ROUNDS; i++) {
        for (uint32_t j = 0; j < N_SESSIONS; j += 2) {
            struct kv_wire_header header;

            world.session_index = sessions[j];
            header = session_request(KV_OP_READ, 1);
            header.n_units = 1;
            header.token_count = 1;
            header.deadline_us = 1;
            (void)ask(world.data[thread_of_unit(0, 0)], &header, &unit, sizeof(unit));
        }
        for (uint64_t end_us = world.clock.virtual_us + ROUND_US;
             world.clock.virtual_us < end_us;)
            step();
    }
    assert_int_equal(kvs_counted(&control->stats.sessions_expired) - n_expired, N_SESSIONS / 2);
    assert_int_equal(control->n_sessions, N_SESSIONS / 2);
    assert_in_range(control->n_lease_looks - n_looks, N_SESSIONS, 8 * N_SESSIONS);
    for (uint32_t j = 0; j < N_SESSIONS; j += 2) {
        world.session_index = sessions[j];
        close_session();
    }
}

/* A data thread looks at no client that has nothing to check, and at one with a steady load not
 * for each of its requests; a late request ends all the same. */
static void clients_are_looked_at_when_due(void **state)
{
    enum {
        DEADLINE_US = 50000,
        N_ROUNDS = 200,
        ROUND_US = 1000,
    };
    const struct kvs_shard *shard = &world.node->shard[0];
    struct kv_wire_header header;
    uint64_t n_looks;

    (void)state;
    settle();
    n_looks = shard->n_client_looks;
    for (unsigned i = 0; i < N_ROUNDS; i++) {
        header = request_of(KV_OP_PING);
        header.deadline_us = DEADLINE_US;
        assert_int_equal(ask(world.data[0], &header, NULL, 0), KV_OK);
        world.clock.virtual_us += ROUND_US;
    }
    assert_in_range(shard->n_client_looks - n_looks, 1, 2 * N_ROUNDS * ROUND_US / DEADLINE_US);
    world.clock.virtual_us += DEADLINE_US;
    step();
    n_looks = shard->n_client_looks;
    for (unsigned i = 0; i < N_ROUNDS; i++) {
        step();
        world.clock.virtual_us += ROUND_US;
    }
    assert_int_equal(shard->n_client_looks, n_looks);

    open_session();
    header = session_request(KV_OP_READ, 1);
    const struct kv_wire_unit unit = {0, 0, 0};
    header.n_units = 1;
    header.token_count = 1;
    header.deadline_us = DEADLINE_US;
    assert_int_equal(ask(world.data[thread_of_unit(0, 0)], &header, &unit, sizeof(unit)),
                     KV_NOT_READY);
    close_session();
}

/* ---- floods ------------------------------------------------------------------------------ */

/* More requests than the credits: bounded, and the list of clients says who it is. */
static void floods_are_bounded(void **state)
{
    struct kvs_shard_client *peer;
    uint64_t n_most = 0;

    (void)state;
    open_session();
    peer = &world.node->shard[0].clients[world.me.index];
    for (unsigned i = 0; i < 3000; i++) {
        struct kv_wire_header header;
        size_t bytes, bulk;

        do {
            if (make_request(KV_OP_READ, &header, scratch, &bytes, &bulk) != 0)
                continue;
        } while (thread_of_unit(((struct kv_wire_unit *)(void *)scratch)->layer,
                                ((struct kv_wire_unit *)(void *)scratch)->kv_head) != 0);
        header.deadline_us = 100000;
        header.token_begin = 1000; /* never there: it waits */
        send_message(world.data[0], &header, scratch, bytes);
        if (i % 100 == 0)
            kvs_node_data_step(world.node, 0);
        if (kv_pool_used(world.node->shard[0].requests) > n_most)
            n_most = kv_pool_used(world.node->shard[0].requests);
    }
    for (unsigned i = 0; i < 100; i++)
        step();
    assert_in_range(n_most, 1, CREDITS);
    assert_true(kvs_counted(&peer->busy) + kvs_counted(&peer->dropped) > 2000);

    Kvpb__TableRequest request = KVPB__TABLE_REQUEST__INIT;
    request.name = "clients";
    ask_control(KV_OP_TABLE, &request.base);
    Kvpb__TableReply *table =
        kvpb__table_reply__unpack(NULL, world.reply.body_bytes, world.body);
    assert_non_null(table);
    double named = 0;
    for (size_t row = 0; row < table->n_rows; row++)
        for (size_t column = 0; column < table->n_columns; column++)
            if (table->rows[row]->cells[0]->number == world.me.index &&
                (strcmp(table->columns[column], "busy") == 0 ||
                 strcmp(table->columns[column], "dropped") == 0))
                named += table->rows[row]->cells[column]->number;
    assert_true(named > 2000);
    kvpb__table_reply__free_unpacked(table, NULL);
    settle();
    close_session();
    good_requests_work();
}

/* ---- what waits, and what hangs ---------------------------------------------------------- */

enum {
    HANGING_ROWS = 2000, /* more than travel with their request */
    FIRST_ROWS = 100,    /* before them: a segment is half full */
};

static struct kv_wire_header rows_request(unsigned op, uint32_t begin, uint32_t count)
{
    struct kv_wire_header header = session_request(op, 1);

    header.n_units = 1;
    header.token_begin = begin;
    header.token_count = count;
    return header;
}

/* Rows of unit 0 of layer 0: the body without them, and they themselves. */
static size_t
make_rows(uint32_t begin, uint32_t count, unsigned salt, uint8_t *body, uint8_t *rows)
{
    const struct kv_wire_unit unit = {0, 0, 0};
    size_t bytes = put_bytes(body, 0, &unit, sizeof(unit));

    for (uint32_t i = 0; i < count; i++) {
        uint8_t *row = rows + (size_t)i * ROW_BYTES;

        memset(row, (int)(salt * 31 + begin + i), ROW_BYTES);
        uint32_t crc = kv_crc32c(kv_row_seed(WRITER, 0, 0, begin + i), row, ROW_BYTES);
        bytes = put_bytes(body, bytes, &crc, sizeof(crc));
    }
    return bytes;
}

/* Begins a put by bulk; returns its request id. */
static uint64_t begin_put_after(
    uint32_t snapshot, uint32_t begin, uint32_t count, unsigned salt, uint32_t deadline_us)
{
    uint8_t *rows = scratch + KV_WIRE_BODY_MAX;
    size_t bytes = make_rows(begin, count, salt, scratch, rows);
    struct kv_channel *channel = world.data[thread_of_unit(0, 0)];
    struct kv_wire_header header = rows_request(KV_OP_PUT, begin, count);

    header.deadline_us = deadline_us;
    header.snapshot = snapshot;
    header.bulk_bytes = (uint64_t)count * ROW_BYTES;
    send_message(channel, &header, scratch, bytes);
    send_bulk(channel, &header, rows, header.bulk_bytes);
    return header.request_id;
}

static uint64_t begin_put(uint32_t begin, uint32_t count, unsigned salt, uint32_t deadline_us)
{
    return begin_put_after(0, begin, count, salt, deadline_us);
}

static void put_rows(uint32_t begin, uint32_t count, unsigned salt)
{
    uint8_t *rows = scratch + KV_WIRE_BODY_MAX;
    size_t bytes = make_rows(begin, count, salt, scratch, rows);
    struct kv_wire_header header = rows_request(KV_OP_PUT, begin, count);

    memcpy(scratch + bytes, rows, (size_t)count * ROW_BYTES);
    bytes += (size_t)count * ROW_BYTES;
    assert_int_equal(ask(world.data[thread_of_unit(0, 0)], &header, scratch, bytes), KV_OK);
}

static void rows_are(uint32_t begin, uint32_t count, unsigned salt)
{
    const struct kv_wire_unit unit = {0, 0, 0};
    uint8_t row[ROW_BYTES];

    for (uint32_t at = begin; at < begin + count; at += FIRST_ROWS) {
        struct kv_wire_header header = rows_request(KV_OP_READ, at, FIRST_ROWS);

        assert_int_equal(ask(world.data[thread_of_unit(0, 0)], &header, &unit, sizeof(unit)),
                         KV_OK);
        for (uint32_t i = 0; i < FIRST_ROWS; i++) {
            memset(row, (int)(salt * 31 + at + i), ROW_BYTES);
            assert_memory_equal(world.body + FIRST_ROWS * sizeof(uint32_t) + i * ROW_BYTES, row,
                                ROW_BYTES);
        }
    }
}

/* Steps until the request is answered; -1: it is not, within that time. */
static kv_status_t answer_within(uint64_t id, uint64_t us)
{
    uint64_t end_us = world.clock.virtual_us + us;

    while (world.clock.virtual_us < end_us) {
        step();
        if (world.n_replies > 0 && world.reply.request_id == id)
            return (kv_status_t)world.reply.status;
    }
    return KV_IN_PROGRESS;
}

/* Reads of rows that are not there yet take all credits, no more is refused in silence, and a
 * ping passes. */
static void beyond_the_credits(void **state)
{
    const struct kv_wire_unit unit = {0, 0, 0};
    struct kv_channel *channel = world.data[thread_of_unit(0, 0)];
    struct kv_wire_header header;

    (void)state;
    open_session();
    for (unsigned i = 0; i < CREDITS; i++) {
        header = rows_request(KV_OP_READ, 10, 1);
        send_message(channel, &header, &unit, sizeof(unit));
    }
    for (unsigned i = 0; i < 3 * CREDITS; i++) {
        header = rows_request(KV_OP_READ, 10, 1);
        assert_int_equal(ask(channel, &header, &unit, sizeof(unit)), KV_BUSY);
        header = request_of(KV_OP_PING);
        assert_int_equal(ask(channel, &header, NULL, 0), KV_OK);
        header = request_of(KV_OP_PING);
        header.token_count = 100;
        assert_int_equal(ask(channel, &header, NULL, 0), KV_BUSY);
    }
    settle();
    close_session();
    good_requests_work();
}

/* ---- batches ----------------------------------------------------------------------------- */

enum {
    BATCH_PINGS = 3,
    BATCH_ROUNDS = 3000,
};

/* Puts a request into a batch at `at` of scratch; returns where the next goes. */
static size_t
put_entry(size_t at, struct kv_wire_header *header, const void *body, size_t bytes)
{
    kv_message_seal(header, body, bytes);
    memset(scratch + at, 0, kv_wire_entry_bytes(bytes));
    memcpy(scratch + at, header, sizeof(*header));
    if (bytes > 0)
        memcpy(scratch + at + sizeof(*header), body, bytes);
    return at + kv_wire_entry_bytes(bytes);
}

/* Pings with bodies of several sizes. */
static size_t put_pings(void)
{
    static const uint8_t bodies[BATCH_PINGS] = {1};
    size_t at = 0;

    for (uint32_t i = 0; i < BATCH_PINGS; i++) {
        struct kv_wire_header ping = request_of(KV_OP_PING);

        ping.token_count = 10 * (i + 1);
        at = put_entry(at, &ping, bodies, i);
    }
    return at;
}

/* Sends what scratch has; returns how many replies came. */
static uint64_t send_batch(uint32_t n_entries, size_t bytes)
{
    struct kv_wire_header batch = request_of(KV_OP_PING);
    const uint64_t n_before = world.n_replies;

    batch.kind = KV_WIRE_BATCH;
    batch.n_units = n_entries;
    send_message(world.data[0], &batch, scratch, bytes);
    for (unsigned i = 0; i < 10; i++)
        step();
    return world.n_replies - n_before;
}

static void batches(void **state)
{
    const size_t all = put_pings(), first = kv_wire_entry_bytes(0);
    struct kv_wire_header wrong;
    uint64_t n_bad;

    (void)state;
    settle();
    world.n_reply_batches = 0;
    assert_int_equal(send_batch(BATCH_PINGS, all), BATCH_PINGS);
    assert_int_equal(world.reply.status, KV_OK);
    assert_int_equal(world.n_reply_batches, 1); /* replies that are made together leave so */
    n_bad = COUNTED(bad_messages);

    /* Other numbers of requests than its header says. */
    put_pings();
    assert_int_equal(send_batch(BATCH_PINGS - 1, all), BATCH_PINGS - 1);
    put_pings();
    assert_int_equal(send_batch(BATCH_PINGS + 1, all), BATCH_PINGS);
    put_pings();
    assert_int_equal(send_batch(0, all), 0);
    assert_int_equal(send_batch(KV_WIRE_ENTRIES_MAX + 1, all), 0);
    assert_int_equal(send_batch(1, 0), 0);
    assert_int_equal(COUNTED(bad_messages), n_bad + 5);

    /* Cut short anywhere: those before the cut are carried out. */
    for (size_t bytes = 1; bytes < all; bytes++) {
        put_pings();
        assert_in_range(send_batch(BATCH_PINGS, bytes), bytes >= first, BATCH_PINGS - 1);
    }
    /* The second is none that may be in a batch; the first is carried out. */
    for (unsigned i = 0; i < 5; i++) {
        put_pings();
        wrong = request_of(KV_OP_PING);
        if (i == 0)
            wrong.kind = KV_WIRE_BATCH, wrong.n_units = 1;
        else if (i == 1)
            wrong.kind = KV_WIRE_BULK_REQUEST;
        else if (i == 2)
            wrong.bulk_bytes = 64;
        else if (i == 3)
            wrong.client_token.bytes[3] ^= 1;
        else
            wrong.client_index = 1000;
        put_entry(first, &wrong, NULL, 0);
        assert_int_equal(send_batch(BATCH_PINGS, all), 1);
    }
    settle();
    good_requests_work();
}

/* Any bytes in the place of requests, and requests with a byte changed. */
static void batches_of_anything(void **state)
{
    struct kv_random *random = &world.random;

    (void)state;
    for (unsigned i = 0; i < BATCH_ROUNDS; i++) {
        size_t all = put_pings();

        if (kv_random_below(random, 4) == 0) {
            all = kv_random_below(random, 2000);
            kv_random_fill(random, scratch, all);
        } else {
            scratch[kv_random_below(random, all)] ^=
                (uint8_t)(1u << kv_random_below(random, 8));
        }
        assert_in_range(send_batch(BATCH_PINGS, all), 0, BATCH_PINGS);
    }
    settle();
    good_requests_work();
}

/* However many clients come, each of their credits has a work, none has too few, and the first
 * has as many as it may. */
static void check_credits(uint32_t clients_max, uint32_t credits_max)
{
    const struct kvs_node_config config = {
        .name = "crowded",
        .memory_bytes = MEMORY_BYTES,
        .n_threads = 1,
        .clients_max = clients_max,
        .credits = credits_max,
        .clock = &world.clock,
        .transport = world.transport,
        .disk = world.disk,
    };
    uint32_t sum = 0;
    struct kvs_node *node;
    char detail[256];

    if (kvs_node_create(&config, &node, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    const uint32_t spare = node->control.credits_spare;
    for (uint32_t i = 0; i < clients_max; i++) {
        const uint32_t credits = kvs_client_grant(&node->control);

        assert_in_range(credits, i == 0 ? credits_max : KVS_CREDITS_SURE, credits_max);
        sum += credits;
    }
    assert_int_equal(sum, kv_pool_size(node->shard[0].requests));
    assert_in_range(sum, 0, clients_max * KVS_CREDITS_SURE + KVS_REQUESTS_SPARE);
    node->control.credits_spare = spare; /* no client has them */
    kvs_node_destroy(node);
}

static void credits_are_as_many_as_works(void **state)
{
    (void)state;
    check_credits(4, KV_CREDITS_MAX);
    check_credits(64, KV_CREDITS_MAX);
    check_credits(1000, 64);
    check_credits(1000, KVS_CREDITS_SURE);
}

/* What a client was granted is another's when it has gone. */
static void credits_come_back(void **state)
{
    (void)state;
    for (unsigned i = 0; i < 2 * CLIENTS_MAX; i++) {
        const struct identity before = another(0); /* which is granted as many as any */

        leave(&before);
        settle();
    }
    good_requests_work();
}

static void deadlines_have_a_most(void **state)
{
    const struct kv_wire_unit unit = {0, 0, 0};
    uint32_t thread = thread_of_unit(0, 0);
    const struct kvs_shard_client *peer = &world.node->shard[thread].clients[world.me.index];
    struct kv_wire_header header;

    (void)state;
    open_session();
    header = rows_request(KV_OP_READ, 10, 1);
    header.deadline_us = UINT32_MAX;
    send_message(world.data[thread], &header, &unit, sizeof(unit));
    step();
    assert_int_equal(peer->n_requests, 1);
    assert_in_range(peer->requests->deadline_us - world.clock.virtual_us,
                    KV_WIRE_DEADLINE_MAX_US - 10 * STEP_US, KV_WIRE_DEADLINE_MAX_US);
    header.op = KV_OP_CANCEL;
    header.offset = header.request_id;
    header.deadline_us = 1;
    send_message(world.data[thread], &header, NULL, 0);
    step();
    assert_int_equal(peer->n_requests, 0);
    close_session();
    good_requests_work();
}

/* A put whose data is announced and does not come gives up its place at its deadline.  Should
 * the data come after all, it does not touch what others have put there. */
static void a_transfer_that_hangs(void **state)
{
    uint64_t id;

    (void)state;
    open_session();
    put_rows(0, FIRST_ROWS, 1);
    fault_add(world.faulty, &(struct fault_rule){FAULT_IN, FAULT_HOLD_LANDING,
                                                 KV_WIRE_BULK_REQUEST, KV_OP_PUT, 0, 1});
    id = begin_put(FIRST_ROWS, HANGING_ROWS, 2, 1000000);
    assert_int_equal(answer_within(id, 3000000), KV_DEADLINE);
    assert_int_equal(fault_held(world.faulty), 1);

    put_rows(FIRST_ROWS, 200, 3);
    id = begin_put(FIRST_ROWS + 200, HANGING_ROWS - 200, 3, 1000000);
    assert_int_equal(answer_within(id, 3000000), KV_OK);
    rows_are(FIRST_ROWS, HANGING_ROWS, 3);
    fault_release(world.faulty);
    for (unsigned i = 0; i < 10; i++)
        step();
    assert_int_equal(fault_held(world.faulty), 0);
    rows_are(0, FIRST_ROWS, 1);
    rows_are(FIRST_ROWS, HANGING_ROWS, 3);
    fault_clear(world.faulty);
    settle();
    close_session();
    good_requests_work();
}

/* One that is silent in the middle of a transfer loses its channel, and its place with it, long
 * before a late deadline. */
static void a_client_that_hangs(void **state)
{
    uint64_t n_stuck = COUNTED(stalled_clients), id;
    uint32_t index = world.me.index;
    struct kvs_shard *data = &world.node->shard[thread_of_unit(0, 0)];

    (void)state;
    open_session();
    put_rows(0, FIRST_ROWS, 1);
    fault_add(world.faulty, &(struct fault_rule){FAULT_IN, FAULT_HOLD_LANDING,
                                                 KV_WIRE_BULK_REQUEST, KV_OP_PUT, 0, 1});
    id = begin_put(FIRST_ROWS, HANGING_ROWS, 2, UINT32_MAX);
    assert_int_equal(answer_within(id, 11000000), KV_IN_PROGRESS);
    assert_int_equal(COUNTED(stalled_clients), n_stuck + 1);
    assert_int_equal(data->clients[index].state, KVS_SHARD_CLIENT_CLOSING);

    say_hello();
    assert_int_not_equal(world.me.index, index); /* its place is not free yet */
    id = begin_put(FIRST_ROWS, HANGING_ROWS, 3, 1000000);
    assert_int_equal(answer_within(id, 3000000), KV_OK);
    fault_release(world.faulty);
    settle();
    rows_are(FIRST_ROWS, HANGING_ROWS, 3);
    assert_int_equal(data->clients[index].state, KVS_SHARD_CLIENT_FREE);
    fault_clear(world.faulty);
    close_session();
    good_requests_work();
}

/* Requests whose bodies are announced and do not come: so many of a client, then KV_BUSY. */
static void requests_that_hang(void **state)
{
    uint64_t n_stuck = COUNTED(stalled_clients);
    uint32_t index = world.me.index;

    (void)state;
    fault_add(world.faulty, &(struct fault_rule){FAULT_IN, FAULT_HOLD_LANDING, KV_WIRE_REQUEST,
                                                 KV_OP_PING, 0, 0});
    memset(scratch, 0, KV_WIRE_BODY_MAX);
    for (unsigned i = 0; i < KVS_PENDING_RECEIVES_CLIENT; i++) {
        struct kv_wire_header header = request_of(KV_OP_PING);

        send_message(world.data[0], &header, scratch, KV_WIRE_BODY_MAX);
        step();
    }
    for (unsigned i = 0; i < 3; i++) {
        struct kv_wire_header header = request_of(KV_OP_PING);

        assert_int_equal(ask(world.data[0], &header, scratch, KV_WIRE_BODY_MAX), KV_BUSY);
    }
    assert_int_equal(answer_within(0, 11000000), KV_IN_PROGRESS);
    assert_int_equal(COUNTED(stalled_clients), n_stuck + 1);
    assert_int_equal(world.node->shard[0].clients[index].state, KVS_SHARD_CLIENT_CLOSING);
    fault_release(world.faulty);
    settle();
    assert_int_equal(world.node->shard[0].clients[index].state, KVS_SHARD_CLIENT_FREE);
    fault_clear(world.faulty);
    say_hello();
    good_requests_work();
}

/* One that cancels over and over what hangs is silent in the middle of a transfer all the same.
 */
static void cancels_put_nothing_off(void **state)
{
    uint64_t n_stuck = COUNTED(stalled_clients), id;
    uint32_t index = world.me.index;

    (void)state;
    open_session();
    put_rows(0, FIRST_ROWS, 1);
    fault_add(world.faulty, &(struct fault_rule){FAULT_IN, FAULT_HOLD_LANDING,
                                                 KV_WIRE_BULK_REQUEST, KV_OP_PUT, 0, 1});
    id = begin_put(FIRST_ROWS, HANGING_ROWS, 2, UINT32_MAX);
    for (unsigned i = 0; i < 15; i++) {
        struct kv_wire_header header = request_of(KV_OP_CANCEL);

        header.offset = id;
        send_message(world.data[thread_of_unit(0, 0)], &header, NULL, 0);
        assert_int_equal(answer_within(id, 1000000), KV_IN_PROGRESS);
    }
    assert_int_equal(COUNTED(stalled_clients), n_stuck + 1);
    say_hello();
    fault_release(world.faulty);
    fault_clear(world.faulty);
    settle();
    assert_int_equal(world.node->shard[thread_of_unit(0, 0)].clients[index].state,
                     KVS_SHARD_CLIENT_FREE);
    close_session();
    good_requests_work();
}

/* A client that takes none of its answers, or sends none of its data, holds some of the buffers
 * for them: others have theirs. */
static void buffers_are_shared_out(void **state)
{
    enum {
        N_ROWS = 300
    }; /* of two units: more than goes with an answer */
    const uint32_t thread = thread_of_unit(0, 0);
    struct kvs_shard *data = &world.node->shard[thread];
    struct kv_wire_unit units[2];
    struct kv_wire_header header;
    static struct put put;
    struct identity before;

    (void)state;
    open_session();
    assert_int_equal(some_units(thread, 2, 0, units), 2);
    for (unsigned i = 0; i < 2; i++)
        fill_unit(&units[i], ROW_BYTES, 0, N_ROWS);
    before = another(0);
    struct kvs_shard_client *const peer = &data->clients[world.me.index];
    peer->credits = KVS_STAGINGS + 8;

    fault_add(world.faulty, &(struct fault_rule){FAULT_OUT, FAULT_HOLD, KV_WIRE_BULK_REPLY,
                                                 KV_OP_READ, 0, 0});
    for (unsigned i = 0; i < KVS_STAGINGS + 8; i++) {
        header = rows_request(KV_OP_READ, 0, N_ROWS);
        header.n_units = 2;
        send_message(world.data[thread], &header, units, sizeof(units));
    }
    for (unsigned i = 0; i < 200; i++)
        step();
    fault_clear(world.faulty);
    header = rows_request(KV_OP_READ, 0, N_ROWS);
    header.client_index = before.index;
    header.client_token = before.token;
    header.n_units = 2;
    send_message(world.data[thread], &header, units, sizeof(units));
    assert_int_equal(answer_within(header.request_id, 500000), KV_OK);
    assert_int_equal(fault_held(world.faulty), KVS_STAGINGS_CLIENT);
    assert_int_equal(data->clients[world.me.index].n_requests, KVS_STAGINGS + 8);
    fault_release(world.faulty);
    for (unsigned i = 0; i < 1000; i++)
        step();
    assert_int_equal(data->clients[world.me.index].n_requests, 0);
    assert_int_equal(kv_pool_used(data->stagings), 0);

    /* Over rows that are there, and on. */
    for (unsigned i = 0; i < KVS_STAGINGS; i++)
        send_put(&put, N_ROWS - 5, 10, 0, true);
    assert_int_equal(kv_pool_used(data->stagings), KVS_STAGINGS_CLIENT - KVS_STAGINGS_KEPT / 2);
    /* Its own answers have some, too. */
    header = rows_request(KV_OP_READ, 0, N_ROWS);
    header.n_units = 2;
    send_message(world.data[thread], &header, units, sizeof(units));
    assert_int_equal(answer_within(header.request_id, 500000), KV_OK);
    world.me = before;
    send_put(&put, N_ROWS - 5, 10, 0, true);
    send_rows(&put);
    assert_int_equal(world.reply.request_id, put.header.request_id);
    assert_int_equal(world.reply.status, KV_OK);
    settle();
    close_session();
    peer->credits = CREDITS;
    good_requests_work();
}

/* Two clients fill their credits with puts beyond rows that are missing.  These have no staging
 * buffer while they wait, so another client's put over committed rows is received at once.  All
 * are answered when the missing rows come. */
static void puts_that_wait_hold_no_buffer(void **state)
{
    enum {
        N_OFFERED = 1100, /* rows that a transport leaves at the sender */
        N_EAGER = 60,     /* rows that it brings along */
        MISSING = 50,
        BEGIN = FIRST_ROWS + MISSING,
    };
    const uint32_t thread = thread_of_unit(0, 0);
    const struct kvs_shard *data = &world.node->shard[thread];
    struct identity before;
    uint64_t n_ok, id;

    (void)state;
    open_session();
    put_rows(0, FIRST_ROWS, 1);
    before = world.me;
    for (unsigned i = 0; i < 2; i++) {
        (void)another(0);
        for (unsigned j = 0; j < CREDITS; j++)
            begin_put_after(BEGIN, BEGIN, j % 2 == 0 ? N_OFFERED : N_EAGER, 1, 2000000);
        for (unsigned j = 0; j < 2 * CREDITS; j++)
            step();
        assert_int_equal(data->clients[world.me.index].n_requests, CREDITS);
    }
    assert_int_equal(kv_pool_used(data->stagings), 0);

    world.me = before;
    id = begin_put(FIRST_ROWS - 5, 10, 1, 1000000);
    assert_int_equal(answer_within(id, 20 * STEP_US), KV_OK);
    n_ok = world.n_statuses[KV_OK];
    (void)begin_put(FIRST_ROWS + 5, MISSING - 5, 1, 1000000);
    for (unsigned i = 0; i < 200; i++)
        step();
    assert_int_equal(world.n_statuses[KV_OK], n_ok + 1 + 2 * CREDITS);
    rows_are(0, (BEGIN + N_OFFERED) / FIRST_ROWS * FIRST_ROWS, 1);

    /* Data that is left at the sender is refused at the deadline, and when the client goes. */
    id = begin_put_after(2 * N_OFFERED, 2 * N_OFFERED, N_OFFERED, 1, 100000);
    assert_int_equal(answer_within(id, 200000), KV_NOT_READY);
    before = another(0);
    (void)begin_put_after(2 * N_OFFERED, 2 * N_OFFERED, N_OFFERED, 1, 100000);
    step();
    leave(&before);
    settle();
    close_session();
    good_requests_work();
}

/* ---- running ----------------------------------------------------------------------------- */

static int open_world(void **state)
{
    static const struct kv_port_events events = {on_message, on_incoming, on_failed};
    struct kv_transport_config transport = {0};
    char detail[256];
    uint64_t seed = kv_clock_now(&kv_clock_real);

    (void)state;
    if (getenv("KV_TEST_SEED") != NULL)
        seed = strtoull(getenv("KV_TEST_SEED"), NULL, 10);
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    memset(&world, 0, sizeof(world));
    kv_random_init(&world.random, seed);
    kv_random_fill(&world.random, &world.fingerprint, sizeof(world.fingerprint));
    kv_random_fill(&world.random, &world.session_token, sizeof(world.session_token));
    kv_clock_virtual_init(&world.clock, 1000000);
    assert_int_equal(
        kv_transport_loopback.open(&transport, &world.transport, detail, sizeof(detail)),
        KV_OK);
    assert_int_equal(fault_open(&kv_transport_loopback, NULL, &world.faulty), KV_OK);
    world.disk = kv_disk_memory_open(&world.clock, 0);
    assert_non_null(world.disk);
    struct kvs_node_config config = {
        .name = "node",
        .memory_bytes = MEMORY_BYTES,
        .n_threads = N_THREADS,
        .sessions_max = 64,
        .clients_max = CLIENTS_MAX,
        .credits = CREDITS,
        .client_lease_ms = 1000000000,
        .seed = seed | 1,
        .clock = &world.clock,
        .transport = world.faulty,
        .message_control = true,
        .disk = world.disk,
    };
    assert_int_equal(kvs_node_create(&config, &world.node, detail, sizeof(detail)), KV_OK);
    assert_int_equal(
        kv_transport_loopback.port_open(world.transport, &events, &world, &world.port), KV_OK);

    const void *address;
    size_t bytes;
    world.node->control.port->ops->port_address(world.node->control.port, &address, &bytes);
    connect_to(address, bytes, &world.control);
    say_hello();
    make_model();
    return 0;
}

static int close_world(void **state)
{
    (void)state;
    world.port->ops->port_close(world.port);
    kvs_node_check_memory(world.node);
    kvs_node_destroy(world.node);
    kv_disk_close(world.disk);
    world.transport->ops->close(world.transport);
    world.faulty->ops->close(world.faulty);
    return 0;
}

/* Each size of rows takes a class of a data thread's memory: a model may have some, and rows
 * that fit a piece of it. */
static void sizes_of_rows_are_bounded(void **state)
{
    enum {
        N_SIZES = KV_ROW_SIZES_MAX + 1
    };
    Kvpb__ModelRequest request = KVPB__MODEL_REQUEST__INIT;
    Kvpb__Layer layers[N_SIZES], *list[N_SIZES];
    struct kv_id128 fingerprint;

    (void)state;
    kv_random_fill(&world.random, &fingerprint, sizeof(fingerprint));
    for (uint32_t i = 0; i < N_SIZES; i++) {
        layers[i] = (Kvpb__Layer)KVPB__LAYER__INIT;
        layers[i].kind = KV_LAYER_KV;
        layers[i].dtype = KV_FP16;
        layers[i].n_kv_heads = 1;
        layers[i].d_k = 64;
        layers[i].d_v = 64 + i;
        list[i] = &layers[i];
    }
    request.name = "sizes";
    request.fingerprint = binary(&fingerprint);
    request.layers = list;
    request.n_layers = N_SIZES;
    assert_int_equal(try_control(KV_OP_MODEL, &request.base), KV_INVALID);
    assert_non_null(strstr(world.detail, "layer 16: more than 16 different sizes of rows"));
    layers[N_SIZES - 1].d_v = 64;
    layers[3].dtype = KV_FP32;
    layers[3].d_k = KV_DIM_MAX;
    layers[3].d_v = 1;
    assert_int_equal(try_control(KV_OP_MODEL, &request.base), KV_INVALID);
    assert_non_null(strstr(world.detail, "layer 3: more than 16384 bytes a row: 16388"));
    layers[3].d_k--;
    assert_int_equal(try_control(KV_OP_MODEL, &request.base), KV_OK);
}

/* Of the models that no session uses, the one that was used longest ago makes room. */
static void models_used_lately_stay(void **state)
{
    struct kv_id128 models[KVS_MODELS_MAX + 1];
    unsigned n = KVS_MODELS_MAX;

    (void)state;
    kv_random_fill(&world.random, models, sizeof(models));
    for (unsigned i = 0; i < world.node->control.n_models; i++)
        n -= world.node->control.models[i]->n_sessions > 0;
    assert_in_range(n, 4, KVS_MODELS_MAX);
    for (unsigned i = 0; i < n; i++)
        make_model_of(&models[i]);
    make_model_of(&models[0]); /* once more */
    open_session_of(&models[1]);
    close_session();
    make_model_of(&models[n]);
    assert_int_equal(try_open(&models[2]), KV_NOT_FOUND);
    for (unsigned i = 0; i <= n; i++) {
        if (i == 2)
            continue;
        open_session_of(&models[i]);
        close_session();
    }
    make_model();
    good_requests_work();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(deletes_are_of_a_version),
        cmocka_unit_test(puts_store_once),
        cmocka_unit_test(an_index_needs_its_token),
        cmocka_unit_test(strangers_take_no_buffers),
        cmocka_unit_test(control_needs_a_client),
        cmocka_unit_test(objects_are_their_tenants),
        cmocka_unit_test(objects_have_times),
        cmocka_unit_test(objects_are_listed_and_deleted),
        cmocka_unit_test(sessions_are_their_tenants),
        cmocka_unit_test(roots_get_rows),
        cmocka_unit_test(forks_count_for_their_root),
        cmocka_unit_test(wrong_rows_are_refused),
        cmocka_unit_test(sizes_of_rows_are_bounded),
        cmocka_unit_test(models_used_lately_stay),
        cmocka_unit_test(names_are_of_a_model),
        cmocka_unit_test(prefixes_of_many_writers),
        cmocka_unit_test(a_fresh_writer_needs_a_run),
        cmocka_unit_test(what_is_behind_a_bad_row_goes),
        cmocka_unit_test(names_are_looked_for_by_few),
        cmocka_unit_test(room_is_made_in_slices),
        cmocka_unit_test(hello_again_is_the_same_client),
        cmocka_unit_test(tables_tell_no_secrets),
        cmocka_unit_test(save_needs_a_session_and_a_disk),
        cmocka_unit_test(every_field_of_every_operation),
        cmocka_unit_test(every_number_of_every_body),
        cmocka_unit_test(every_number_of_every_control_message),
        cmocka_unit_test(data_threads_take_anything),
        cmocka_unit_test(control_thread_takes_anything),
        cmocka_unit_test(a_session_is_where_its_units_are),
        cmocka_unit_test(a_thread_stands_still),
        cmocka_unit_test(rows_of_any_bits),
        cmocka_unit_test(groups_of_summaries_are_of_two_sizes),
        cmocka_unit_test(first_cuts_are_bounded),
        cmocka_unit_test(nobody_uses_a_session_that_is_cut),
        cmocka_unit_test(rows_land_while_the_session_forks),
        cmocka_unit_test(verify_goes_on_while_it_is_asked),
        cmocka_unit_test(requests_are_counted_on),
        cmocka_unit_test(puts_wait_for_what_is_under_way),
        cmocka_unit_test(chains_of_puts_take_turns),
        cmocka_unit_test(sessions_do_not_queue_for_a_look),
        cmocka_unit_test(leases_are_looked_at_when_due),
        cmocka_unit_test(clients_are_looked_at_when_due),
        cmocka_unit_test(floods_are_bounded),
    };
    /* In a node of their own, whose places no stranger has taken. */
    const struct CMUnitTest waiting[] = {
        cmocka_unit_test(batches),
        cmocka_unit_test(batches_of_anything),
        cmocka_unit_test(beyond_the_credits),
        cmocka_unit_test(deadlines_have_a_most),
        cmocka_unit_test(a_transfer_that_hangs),
        cmocka_unit_test(a_client_that_hangs),
        cmocka_unit_test(requests_that_hang),
        cmocka_unit_test(cancels_put_nothing_off),
        cmocka_unit_test(buffers_are_shared_out),
        cmocka_unit_test(puts_that_wait_hold_no_buffer),
        cmocka_unit_test(credits_are_as_many_as_works),
        cmocka_unit_test(credits_come_back),
    };

    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    int n_failed = cmocka_run_group_tests_name("messages", tests, open_world, close_world) +
                   cmocka_run_group_tests_name("waiting", waiting, open_world, close_world);
    return n_failed == 0 ? 0 : 1;
}
