/* The client library against a node made of this file's functions, over the loopback, on a
 * virtual clock: what goes over the wire, and what happens when answers are late, lost, refused
 * or wrong. */
#include "checksum.h"
#include "client.h"
#include "kvstore.pb-c.h"
#include "message.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    N_LAYERS = 2,
    N_HEADS = 4,
    ROW_BYTES = 256,
    N_TOKENS = 8192,
    REQUESTS_MAX = 512,
    CREDITS = 8,
    ANSWER_BYTES = 2 << 20,
    RETRY_MS = 100,
    PEER_TIMEOUT_MS = 2000,
};

/* A request that the node got. */
struct seen {
    struct kv_wire_header header;
    uint8_t *body;
    struct kv_incoming *bulk; /* offered and not answered */
    bool is_done;
};

struct fake {
    struct kv_port *control, *data;
    struct kv_channel *to_client;
    struct kv_id128 id;
    struct seen seen[REQUESTS_MAX];
    unsigned n_seen;
    unsigned n_hellos, n_cancels, n_pings;
    uint64_t cancelled; /* the id that the last cancel named */
    bool is_manual;     /* requests are kept, the test answers them */
    bool is_deaf;       /* nothing is answered */
    bool is_mute;       /* lifecycle operations are carried out, and not answered */
    unsigned n_busy;    /* requests that are answered with KV_BUSY first */
    bool corrupts;      /* rows that go out have a wrong byte */
    uint32_t generation;
    uint64_t last_op_id;
    uint32_t last_kind;
    unsigned n_lifecycle;
    unsigned n_sends_done;
    kv_status_t send_status;
    uint8_t *rows;    /* (N_LAYERS, N_HEADS, N_TOKENS, ROW_BYTES) */
    uint32_t *crcs;   /* (N_LAYERS, N_HEADS, N_TOKENS) */
    uint8_t *answers; /* (CREDITS, ANSWER_BYTES) used in turn: the client takes data later */
    unsigned n_answers;
};

struct fixture {
    struct kv_clock clock;
    struct kv_transport *transport;
    struct fake node;
    struct kv_client *client;
    struct kv_session *session;
    struct kv_buffer *buffer;
    uint8_t *memory;
};

static struct fixture f;

/* ---- the node ---------------------------------------------------------------------------- */

static void send_done(void *arg, kv_status_t status)
{
    struct fake *node = arg;

    node->n_sends_done++;
    node->send_status = status;
}

static void reply_control(const struct kv_wire_header *request, const ProtobufCMessage *message)
{
    struct kv_wire_header header = {
        .kind = KV_WIRE_REPLY,
        .op = request->op,
        .request_id = request->request_id,
    };
    size_t bytes = protobuf_c_message_get_packed_size(message);
    uint8_t *packed = malloc(bytes + 1);

    assert_non_null(packed);
    protobuf_c_message_pack(message, packed);
    kv_message_seal(&header, packed, bytes);
    assert_int_equal(kv_channel_send(f.node.to_client, &header, sizeof(header), packed, bytes,
                                     send_done, &f.node),
                     KV_OK);
    free(packed);
}

static void hello(const struct kv_wire_header *request, const void *body)
{
    Kvpb__HelloRequest *asked = kvpb__hello_request__unpack(NULL, request->body_bytes, body);
    Kvpb__HelloReply reply = KVPB__HELLO_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    ProtobufCBinaryData address;
    const void *bytes;

    assert_non_null(asked);
    if (f.node.to_client != NULL)
        f.node.to_client->row->channel_close(f.node.to_client);
    assert_int_equal(f.node.control->row->connect(f.node.control, asked->address.data,
                                                  asked->address.len, KV_CHANNEL_NETWORK, NULL,
                                                  &f.node.to_client),
                     KV_OK);
    kvpb__hello_request__free_unpacked(asked, NULL);
    f.node.data->row->port_address(f.node.data, &bytes, &address.len);
    address.data = (uint8_t *)bytes;
    reply.outcome = &outcome;
    reply.version = KV_WIRE_VERSION;
    reply.client_token.data = reply.node_id.data = f.node.id.bytes;
    reply.client_token.len = reply.node_id.len = 16;
    reply.n_addresses = 1;
    reply.addresses = &address;
    reply.credits = CREDITS;
    reply.bulk_bytes_max = KV_WIRE_BULK_MAX;
    reply.lease_ms = 60000;
    reply.node = (char *)"fake";
    f.node.n_hellos++;
    reply_control(request, &reply.base);
}

static void lifecycle(const struct kv_wire_header *request, const void *body)
{
    Kvpb__OpenReply reply = KVPB__OPEN_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    Kvpb__ForkRequest *fork = NULL;
    Kvpb__TruncateRequest *truncate = NULL;
    const Kvpb__Lifecycle *operation;

    if (request->op == KV_OP_FORK) {
        fork = kvpb__fork_request__unpack(NULL, request->body_bytes, body);
        assert_non_null(fork);
        operation = fork->operation;
    } else {
        truncate = kvpb__truncate_request__unpack(NULL, request->body_bytes, body);
        assert_non_null(truncate);
        operation = truncate->operation;
    }
    f.node.n_lifecycle++;
    f.node.last_kind = operation->kind;
    if (operation->op_id != f.node.last_op_id && !f.node.is_deaf) {
        assert_int_equal(operation->generation, f.node.generation);
        f.node.generation++;
        f.node.last_op_id = operation->op_id;
    }
    reply.outcome = &outcome;
    reply.generation = f.node.generation;
    reply.child_index = 5;
    reply.child_generation = 1;
    if (!f.node.is_mute && !f.node.is_deaf)
        reply_control(request, &reply.base);
    kvpb__fork_request__free_unpacked(fork, NULL);
    kvpb__truncate_request__free_unpacked(truncate, NULL);
}

static void on_control(
    void *owner, const void *message, size_t message_bytes, const void *body, size_t body_bytes)
{
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    Kvpb__OpenReply opened = KVPB__OPEN_REPLY__INIT;
    Kvpb__SessionReply session = KVPB__SESSION_REPLY__INIT;
    Kvpb__CloseReply other = KVPB__CLOSE_REPLY__INIT;
    struct kv_wire_header request;
    const char *why;

    (void)owner;
    assert_int_equal(kv_message_check(message, message_bytes, body, body_bytes, &request, &why),
                     KV_OK);
    opened.outcome = session.outcome = other.outcome = &outcome;
    switch (request.op) {
    case KV_OP_HELLO:
        if (!f.node.is_deaf)
            hello(&request, body);
        break;
    case KV_OP_FORK:
    case KV_OP_TRUNCATE:
        lifecycle(&request, body);
        break;
    case KV_OP_OPEN:
        opened.session_index = 3;
        opened.generation = f.node.generation;
        opened.lease_ms = 60000;
        opened.tokens_max = N_TOKENS;
        reply_control(&request, &opened.base);
        break;
    case KV_OP_SESSION:
        session.generation = f.node.generation;
        session.tokens = N_TOKENS;
        reply_control(&request, &session.base);
        break;
    case KV_OP_GOODBYE:
        break;
    default:
        reply_control(&request, &other.base);
    }
}

static uint8_t *next_answer(void)
{
    return f.node.answers + (size_t)(f.node.n_answers++ % CREDITS) * ANSWER_BYTES;
}

static void answer(const struct kv_wire_header *request,
                   kv_status_t status,
                   const struct kv_wire_header *fields,
                   const void *body,
                   size_t body_bytes)
{
    struct kv_wire_header header = *fields;

    header.kind = KV_WIRE_REPLY;
    header.op = request->op;
    header.status = status;
    header.request_id = request->request_id;
    kv_message_seal(&header, body, body_bytes);
    kv_channel_send(f.node.to_client, &header, sizeof(header), body, body_bytes, send_done,
                    &f.node);
}

static size_t place(uint32_t layer, uint32_t head, uint32_t token)
{
    return ((size_t)layer * N_HEADS + head) * N_TOKENS + token;
}

/* Rows of a read or fetch request: CRCs, then bytes by bulk or in the body. */
static void answer_rows(const struct seen *seen)
{
    const struct kv_wire_header *request = &seen->header;
    const struct kv_wire_unit *units = (const struct kv_wire_unit *)seen->body;
    const uint32_t *ids = (const uint32_t *)(units + request->n_units);
    struct kv_wire_header fields = {0};
    uint8_t *body = next_answer();
    uint32_t *crcs = (uint32_t *)body;
    uint8_t *rows;
    size_t crcs_bytes, bytes;

    for (uint32_t i = 0; i < request->n_units; i++)
        fields.n_rows += request->op == KV_OP_FETCH ? units[i].n_ids : request->token_count;
    crcs_bytes = fields.n_rows * sizeof(*crcs);
    bytes = (size_t)fields.n_rows * ROW_BYTES;
    rows = body + crcs_bytes;
    for (uint32_t i = 0; i < request->n_units; i++) {
        uint32_t n = request->op == KV_OP_FETCH ? units[i].n_ids : request->token_count;

        for (uint32_t j = 0; j < n; j++, rows += ROW_BYTES) {
            uint32_t token = request->op == KV_OP_FETCH ? *ids++ : request->token_begin + j;
            size_t at = place(units[i].layer, units[i].kv_head, token);

            memcpy(rows, f.node.rows + at * ROW_BYTES, ROW_BYTES);
            *crcs++ = f.node.crcs[at];
        }
    }
    rows -= bytes;
    if (f.node.corrupts)
        rows[5 * ROW_BYTES + 17] ^= 4;
    if (bytes <= KV_WIRE_INLINE_MAX / 2) {
        answer(request, KV_OK, &fields, body, crcs_bytes + bytes);
        return;
    }
    fields.bulk_bytes = bytes;
    answer(request, KV_OK, &fields, body, crcs_bytes);
    fields.kind = KV_WIRE_BULK_REPLY;
    fields.op = request->op;
    fields.request_id = request->request_id;
    kv_message_seal(&fields, NULL, 0);
    kv_channel_send(f.node.to_client, &fields, sizeof(fields), rows, bytes, send_done, &f.node);
}

/* Checks the CRCs and keeps the rows of a put. */
static void store_rows(const struct seen *seen, const uint8_t *rows)
{
    const struct kv_wire_header *request = &seen->header;
    const struct kv_wire_unit *units = (const struct kv_wire_unit *)seen->body;
    const uint32_t *crcs = (const uint32_t *)(units + request->n_units);

    for (uint32_t i = 0; i < request->n_units; i++) {
        for (uint32_t j = 0; j < request->token_count; j++, rows += ROW_BYTES, crcs++) {
            uint32_t token = request->token_begin + j;
            size_t at = place(units[i].layer, units[i].kv_head, token);

            assert_int_equal(
                *crcs, kv_row_crc(rows, ROW_BYTES, units[i].layer, units[i].kv_head, token));
            memcpy(f.node.rows + at * ROW_BYTES, rows, ROW_BYTES);
            f.node.crcs[at] = *crcs;
        }
    }
}

/* Does what a request asks, once its data is there. */
static void carry_out(struct seen *seen)
{
    const struct kv_wire_header *request = &seen->header;
    struct kv_wire_header fields = {0};

    if (seen->is_done || (request->bulk_bytes > 0 && seen->bulk == NULL))
        return;
    seen->is_done = true;
    if (f.node.n_busy > 0) {
        f.node.n_busy--;
        if (seen->bulk != NULL)
            kv_incoming_refuse(seen->bulk);
        seen->bulk = NULL;
        answer(request, KV_BUSY, &fields, "later", 5);
        return;
    }
    if (request->op == KV_OP_READ || request->op == KV_OP_FETCH) {
        answer_rows(seen);
    } else if (request->op == KV_OP_PUT || request->op == KV_OP_APPEND) {
        const uint8_t *rows = seen->body + request->n_units * sizeof(struct kv_wire_unit) +
                              (size_t)request->n_units * request->token_count * 4;

        if (seen->bulk != NULL) {
            struct kv_iov iov = {.base = next_answer(), .bytes = request->bulk_bytes};

            assert_int_equal(kv_incoming_receive(seen->bulk, &iov, 1, send_done, &f.node),
                             KV_OK);
            seen->bulk = NULL;
            rows = iov.base;
        }
        store_rows(seen, rows);
        answer(request, KV_OK, &fields, NULL, 0);
    } else {
        answer(request, KV_OK, &fields, NULL, 0);
    }
}

static void on_data(
    void *owner, const void *message, size_t message_bytes, const void *body, size_t body_bytes)
{
    struct seen *seen = &f.node.seen[f.node.n_seen];
    const char *why;

    (void)owner;
    assert_true(f.node.n_seen < REQUESTS_MAX);
    assert_int_equal(
        kv_message_check(message, message_bytes, body, body_bytes, &seen->header, &why), KV_OK);
    assert_int_equal(seen->header.kind, KV_WIRE_REQUEST);
    if (seen->header.op == KV_OP_CANCEL) {
        f.node.n_cancels++;
        f.node.cancelled = seen->header.offset;
        return;
    }
    f.node.n_pings += seen->header.op == KV_OP_PING;
    seen->body = malloc(body_bytes + 1);
    assert_non_null(seen->body);
    if (body_bytes > 0)
        memcpy(seen->body, body, body_bytes);
    seen->bulk = NULL;
    seen->is_done = false;
    f.node.n_seen++;
    if (!f.node.is_manual && !f.node.is_deaf)
        carry_out(seen);
}

static void on_bulk(void *owner,
                    const void *message,
                    size_t message_bytes,
                    size_t bytes,
                    struct kv_incoming *incoming)
{
    struct kv_wire_header header;
    const char *why;

    (void)owner;
    assert_int_equal(kv_message_check(message, message_bytes, NULL, bytes, &header, &why),
                     KV_OK);
    for (unsigned i = 0; i < f.node.n_seen; i++) {
        struct seen *seen = &f.node.seen[i];

        if (seen->header.request_id == header.request_id) {
            assert_int_equal(seen->header.bulk_bytes, bytes);
            seen->bulk = incoming;
            if (!f.node.is_manual && !f.node.is_deaf)
                carry_out(seen);
            return;
        }
    }
    fail_msg("data without its request");
}

static void on_failed(void *owner, void *channel_arg, kv_status_t status)
{
    (void)owner;
    (void)channel_arg;
    (void)status;
}

static const struct kv_port_events control_events = {
    .message = on_control,
    .failed = on_failed,
};
static const struct kv_port_events data_events = {
    .message = on_data,
    .incoming = on_bulk,
    .failed = on_failed,
};

/* ---- driving ----------------------------------------------------------------------------- */

/* Everything that can happen now happens; then time moves on. */
static void turn(uint64_t us)
{
    for (unsigned i = 0; i < 8; i++) {
        kv_poll(f.client);
        while (kv_port_progress(f.node.control) + kv_port_progress(f.node.data) > 0)
            ;
    }
    kv_poll(f.client);
    f.clock.virtual_us += us;
}

static kv_status_t run(struct kv_op *op, uint64_t most_us)
{
    uint64_t until_us = f.clock.virtual_us + most_us;

    while (kv_op_status(op) == KV_IN_PROGRESS && f.clock.virtual_us < until_us)
        turn(1000);
    return kv_op_status(op);
}

static int set_up(void **state)
{
    struct kv_transport_config config = {0};
    struct kv_client_setup setup = {0};
    struct kv_remote_setup remote = {.mode = KV_CHANNEL_NETWORK};
    struct kv_model_info model = {.name = "model"};
    char detail[256], address[256] = "loopback:";
    const void *bytes;
    size_t n_bytes;
    struct kv_op *op;

    (void)state;
    memset(&f, 0, sizeof(f));
    kv_clock_virtual_init(&f.clock, 1000000);
    assert_int_equal(kv_transport_loopback.open(&config, &f.transport, detail, sizeof(detail)),
                     KV_OK);
    assert_int_equal(
        f.transport->row->port_open(f.transport, &control_events, NULL, &f.node.control),
        KV_OK);
    assert_int_equal(f.transport->row->port_open(f.transport, &data_events, NULL, &f.node.data),
                     KV_OK);
    f.node.id.bytes[0] = 1;
    f.node.generation = 1;
    f.node.rows = calloc(N_LAYERS * N_HEADS * N_TOKENS, ROW_BYTES);
    f.node.crcs = calloc(N_LAYERS * N_HEADS * N_TOKENS, sizeof(uint32_t));
    f.node.answers = malloc((size_t)CREDITS * ANSWER_BYTES);
    assert_true(f.node.rows != NULL && f.node.crcs != NULL && f.node.answers != NULL);

    f.node.control->row->port_address(f.node.control, &bytes, &n_bytes);
    for (size_t i = 0; i < n_bytes; i++)
        snprintf(address + strlen(address), 3, "%02x", ((const uint8_t *)bytes)[i]);
    remote.address = address;
    setup.nodes = &remote;
    setup.n_nodes = 1;
    setup.transport = f.transport;
    setup.open_control = kv_control_message_open;
    setup.clock = &f.clock;
    setup.seed = 7;
    setup.ops_max = 16;
    setup.retry_ms = RETRY_MS;
    setup.peer_timeout_ms = PEER_TIMEOUT_MS;
    assert_int_equal(kv_client_create(&setup, &f.client), KV_OK);

    assert_int_equal(kv_schema_uniform(&model.schema, N_LAYERS, N_HEADS, 64, 64, KV_FP16),
                     KV_OK);
    assert_int_equal(kv_open_begin(f.client, &model, NULL, 0, &op), KV_OK);
    assert_int_equal(run(op, 1000000), KV_OK);
    f.session = kv_op_session(op);
    assert_non_null(f.session);
    kv_op_free(op);
    assert_int_equal(kv_buffer_alloc(f.client, 8 << 20, &f.buffer), KV_OK);
    f.memory = kv_buffer_data(f.buffer);
    for (size_t i = 0; i < 8 << 20; i++)
        f.memory[i] = (uint8_t)(i * 2654435761u >> 11);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kv_client_close(f.client);
    for (unsigned i = 0; i < f.node.n_seen; i++)
        free(f.node.seen[i].body);
    if (f.node.to_client != NULL)
        f.node.to_client->row->channel_close(f.node.to_client);
    f.node.data->row->port_close(f.node.data);
    f.node.control->row->port_close(f.node.control);
    f.transport->row->close(f.transport);
    free(f.node.rows);
    free(f.node.crcs);
    free(f.node.answers);
    return 0;
}

static struct kv_op *begin_put(const struct kv_rows *rows, size_t offset)
{
    struct kv_rows_io io = {.buffer = f.buffer, .offset = offset};
    struct kv_op *op;

    assert_int_equal(kv_put_begin(f.session, rows, &io, 0, &op), KV_OK);
    return op;
}

static struct kv_op *begin_read(const struct kv_rows *rows, size_t offset)
{
    struct kv_rows_io io = {.buffer = f.buffer, .offset = offset};
    struct kv_op *op;

    assert_int_equal(kv_read_begin(f.session, rows, &io, 0, &op), KV_OK);
    return op;
}

static void put(const struct kv_rows *rows)
{
    struct kv_op *op = begin_put(rows, 0);

    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_free(op);
}

/* ---- tests ------------------------------------------------------------------------------- */

static void test_hello(void **state)
{
    struct kv_node_info info;

    (void)state;
    kv_client_node(f.client, 0, &info);
    assert_string_equal(info.name, "fake");
    assert_int_equal(info.state, KV_NODE_CONNECTED);
    assert_int_equal(info.n_threads, 1);
    assert_int_equal(f.node.n_hellos, 1);
    assert_int_equal(kv_session_generation(f.session), 1);
}

/* A unit's large share goes by bulk, cut where blocks begin, and comes back the same. */
static void test_large(void **state)
{
    struct kv_rows rows = {
        .layer_begin = 1, .n_layers = 1, .head_begin = 2, .n_heads = 1, .token_begin = 100};
    size_t bytes;
    struct kv_op *op;
    uint32_t token = 100;

    (void)state;
    rows.n_tokens = 6000;
    bytes = kv_rows_bytes(kv_session_schema(f.session), &rows);
    assert_int_equal(bytes, 6000 * ROW_BYTES);
    put(&rows);
    for (unsigned i = 0; i < f.node.n_seen; i++) {
        const struct kv_wire_header *header = &f.node.seen[i].header;

        assert_int_equal(header->op, KV_OP_PUT);
        assert_int_equal(header->n_units, 1);
        assert_int_equal(header->token_begin, token);
        assert_int_equal(header->bulk_bytes, header->token_count * ROW_BYTES);
        assert_true(header->bulk_bytes <= KV_WIRE_BULK_MAX);
        token += header->token_count;
        assert_true(token == 6100 || token % KV_BLOCK_TOKENS == 0);
    }
    assert_int_equal(token, 6100);
    assert_int_equal(f.node.n_seen, 2);

    op = begin_read(&rows, 4 << 20);
    assert_true(kv_buffer_busy(f.buffer));
    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_free(op);
    assert_memory_equal(f.memory, f.memory + (4 << 20), bytes);
    assert_false(kv_buffer_busy(f.buffer));
}

/* Small shares of many units travel in one message. */
static void test_small(void **state)
{
    struct kv_rows rows = {.n_layers = N_LAYERS, .n_tokens = 20};
    uint32_t n_ids[N_HEADS] = {3, 0, 2, 1};
    uint32_t ids[] = {19, 0, 7, 4, 4, 18};
    struct kv_fetch fetch = {.layer = 1, .n_ids = n_ids, .ids = ids};
    uint32_t crcs[6];
    struct kv_rows_io io = {.buffer = f.buffer, .offset = 4 << 20, .crcs = crcs};
    size_t bytes = kv_rows_bytes(kv_session_schema(f.session), &rows);
    uint32_t head = 0, left = n_ids[0];
    struct kv_op *op;

    (void)state;
    put(&rows);
    assert_int_equal(f.node.n_seen, 1);
    assert_int_equal(f.node.seen[0].header.n_units, N_LAYERS * N_HEADS);
    assert_int_equal(f.node.seen[0].header.bulk_bytes, 0);
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_free(op);
    assert_int_equal(f.node.n_seen, 2);
    assert_memory_equal(f.memory, f.memory + (4 << 20), bytes);

    assert_int_equal(kv_fetch_begin(f.session, &fetch, &io, 0, &op), KV_OK);
    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_free(op);
    assert_int_equal(f.node.n_seen, 3);
    assert_int_equal(f.node.seen[2].header.n_units, 3);
    assert_int_equal(f.node.seen[2].header.snapshot, 20);
    for (unsigned i = 0; i < 6; i++) {
        const uint8_t *row;

        while (left == 0)
            left = n_ids[++head];
        left--;
        row = f.memory + ((N_HEADS + head) * 20 + ids[i]) * ROW_BYTES;
        assert_memory_equal(f.memory + (4 << 20) + i * ROW_BYTES, row, ROW_BYTES);
        assert_int_equal(crcs[i], kv_row_crc(row, ROW_BYTES, 1, head, ids[i]));
    }
}

static void test_arguments(void **state)
{
    struct kv_rows rows = {.n_layers = N_LAYERS, .n_tokens = 1};
    struct kv_rows_io io = {.buffer = f.buffer, .offset = (8 << 20) - 1};
    struct kv_op *op, *many[16];

    (void)state;
    assert_int_equal(kv_put_begin(f.session, &rows, &io, 0, &op), KV_INVALID);
    rows.token_begin = N_TOKENS;
    io.offset = 0;
    assert_int_equal(kv_put_begin(f.session, &rows, &io, 0, &op), KV_TOO_LARGE);
    rows.token_begin = 0;
    rows.head_begin = 1;
    assert_int_equal(kv_put_begin(f.session, &rows, &io, 0, &op), KV_INVALID);
    rows.head_begin = 0;
    rows.n_layers = N_LAYERS + 1;
    assert_int_equal(kv_rows_bytes(kv_session_schema(f.session), &rows), 0);
    f.node.is_manual = true;
    rows.n_layers = 1;
    for (unsigned i = 0; i < 16; i++)
        assert_int_equal(kv_put_begin(f.session, &rows, &io, 0, &many[i]), KV_OK);
    assert_int_equal(kv_put_begin(f.session, &rows, &io, 0, &op), KV_BUSY);
    turn(0);
    assert_true(f.node.n_seen <= CREDITS);
    for (unsigned i = 0; i < 16; i++)
        kv_op_free(many[i]);
}

/* What comes after the deadline lands nowhere, and is not taken for something else. */
static void test_late_answer(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_heads = 1, .n_tokens = 1000};
    struct kv_op *op;
    unsigned n_sends;

    (void)state;
    put(&rows);
    f.node.is_manual = true;
    memset(f.memory + (4 << 20), 0xee, 1000 * ROW_BYTES);
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 50000), KV_IN_PROGRESS);
    f.clock.virtual_us += 6000000;
    turn(0);
    assert_int_equal(kv_op_status(op), KV_DEADLINE);
    assert_non_null(strstr(kv_op_detail(op), ": read: deadline: after "));
    assert_non_null(strstr(kv_client_detail(f.client), "layer 0"));
    assert_false(kv_buffer_busy(f.buffer));
    assert_true(f.node.n_cancels > 0);
    n_sends = f.node.n_sends_done;
    carry_out(&f.node.seen[f.node.n_seen - 1]);
    turn(0);
    turn(0);
    assert_int_equal(f.node.n_sends_done, n_sends + 1); /* refused */
    for (size_t i = 0; i < 1000 * ROW_BYTES; i++)
        assert_int_equal(f.memory[(4 << 20) + i], 0xee);
    assert_int_equal(kv_op_status(op), KV_DEADLINE);
    kv_op_free(op);
}

/* A put that was given up holds its buffer while the node may still take the data. */
static void test_quarantine(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_heads = 1, .n_tokens = 1000};
    struct kv_op *op;

    (void)state;
    f.node.is_manual = true;
    op = begin_put(&rows, 0);
    assert_int_equal(run(op, 5000), KV_IN_PROGRESS);
    assert_int_equal(f.node.n_seen, 1);
    assert_non_null(f.node.seen[0].bulk);
    kv_cancel(op);
    assert_int_equal(kv_op_status(op), KV_CANCELLED);
    kv_op_free(op);
    turn(0);
    assert_int_equal(f.node.n_cancels, 1);
    assert_int_equal(f.node.cancelled, f.node.seen[0].header.request_id);
    assert_true(kv_buffer_busy(f.buffer));
    assert_int_equal(kv_buffer_free(f.buffer), KV_BUSY);
    kv_incoming_refuse(f.node.seen[0].bulk);
    f.node.seen[0].bulk = NULL;
    turn(0);
    assert_false(kv_buffer_busy(f.buffer));
    assert_int_equal(kv_buffer_free(f.buffer), KV_OK);
}

static void test_busy(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_heads = 1, .n_tokens = 1000};
    struct kv_op *op;

    (void)state;
    f.node.n_busy = 3;
    op = begin_put(&rows, 0);
    assert_int_equal(run(op, 1000000), KV_OK);
    assert_int_equal(f.node.n_seen, 4);
    assert_true(kv_op_elapsed_us(op) >= 1400); /* 200 + 400 + 800 */
    kv_op_free(op);
    f.node.n_busy = UINT32_MAX;
    op = begin_read(&rows, 0);
    assert_int_equal(run(op, 10000000), KV_DEADLINE);
    kv_op_free(op);
}

/* What is asked again has a new id; an answer to the old one is not taken. */
static void test_resend(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_heads = 1, .n_tokens = 10};
    struct kv_op *op;

    (void)state;
    put(&rows);
    f.node.is_manual = true;
    op = begin_read(&rows, 4 << 20);
    turn((RETRY_MS + 1) * 1000);
    turn(0);
    assert_int_equal(f.node.n_seen, 3);
    assert_int_equal(f.node.cancelled, f.node.seen[1].header.request_id);
    assert_true(f.node.seen[1].header.request_id != f.node.seen[2].header.request_id);
    carry_out(&f.node.seen[1]);
    turn(0);
    assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
    carry_out(&f.node.seen[2]);
    turn(0);
    assert_int_equal(kv_op_status(op), KV_OK);
    carry_out(&f.node.seen[2]);
    turn(0);
    kv_op_free(op);
    assert_memory_equal(f.memory, f.memory + (4 << 20), 10 * ROW_BYTES);
}

static void test_corrupt(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .head_begin = 3, .n_heads = 1, .n_tokens = 1000};
    struct kv_op *op;

    (void)state;
    put(&rows);
    f.node.corrupts = true;
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 1000000), KV_CORRUPT);
    assert_non_null(strstr(kv_op_detail(op), "layer 0, kv head 3, token 5"));
    kv_op_free(op);
    rows.n_tokens = 10;
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 1000000), KV_CORRUPT);
    kv_op_free(op);
    assert_int_equal(f.client->n_corrupt, 2);
    assert_false(kv_buffer_busy(f.buffer));
}

/* A node that says nothing is asked, then given up; the next operation connects anew. */
static void test_silence(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_heads = 1, .n_tokens = 10};
    struct kv_node_info info;
    struct kv_op *op;
    uint64_t begin_us = f.clock.virtual_us;

    (void)state;
    put(&rows);
    f.node.is_deaf = true;
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 10000000), KV_UNREACHABLE);
    assert_true(f.clock.virtual_us - begin_us < 2 * PEER_TIMEOUT_MS * 1000);
    assert_non_null(strstr(kv_op_detail(op), "silent"));
    assert_true(f.node.n_pings > 0);
    kv_op_free(op);
    kv_client_node(f.client, 0, &info);
    assert_int_equal(info.state, KV_NODE_LOST);

    f.node.is_deaf = false;
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_free(op);
    assert_int_equal(f.node.n_hellos, 2);
    kv_client_node(f.client, 0, &info);
    assert_int_equal(info.reconnects, 1);

    /* Another node in its place has no such session. */
    f.node.is_deaf = true;
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 10000000), KV_UNREACHABLE);
    kv_op_free(op);
    f.node.is_deaf = false;
    f.node.id.bytes[1]++;
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 1000000), KV_NOT_FOUND);
    kv_op_free(op);
}

/* A node that answers pings is slow, not dead. */
static void test_slow(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_heads = 1, .n_tokens = 10};
    struct kv_op *op;
    unsigned n_done = 0;

    (void)state;
    put(&rows);
    f.node.is_manual = true;
    op = begin_read(&rows, 4 << 20);
    for (unsigned i = 0; i < 4000; i++) {
        turn(1000);
        for (; n_done < f.node.n_seen; n_done++)
            if (f.node.seen[n_done].header.op == KV_OP_PING)
                carry_out(&f.node.seen[n_done]);
    }
    assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
    assert_true(f.node.n_pings > 0);
    f.node.is_manual = false;
    assert_int_equal(run(op, 2000000), KV_OK);
    kv_op_free(op);
}

/* A lifecycle operation whose answer is lost is completed before the session is used again. */
static void test_catch_up(void **state)
{
    struct kv_rows rows = {.n_layers = 1, .n_heads = 1, .n_tokens = 10};
    struct kv_op *op, *behind;
    uint64_t op_id;

    (void)state;
    put(&rows);
    f.node.is_deaf = true; /* the operation does not get there */
    assert_int_equal(kv_fork_begin(f.session, 5, 1000, &op), KV_OK);
    behind = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 3000000), KV_DEADLINE);
    assert_null(kv_op_session(op));
    kv_op_free(op);
    assert_int_equal(kv_session_generation(f.session), 2);
    assert_int_equal(f.node.generation, 1);
    f.node.is_deaf = false;
    assert_int_equal(run(behind, 1000000), KV_OK);
    kv_op_free(behind);
    assert_int_equal(f.node.generation, 2);
    assert_int_equal(f.node.last_kind, KV_OP_TRUNCATE); /* nobody gets the child */
    assert_int_equal(f.node.seen[f.node.n_seen - 1].header.generation, 2);

    f.node.is_mute = true; /* it gets there, the answer does not come */
    assert_int_equal(kv_truncate_begin(f.session, 5, 1000, &op), KV_OK);
    assert_int_equal(run(op, 3000000), KV_DEADLINE);
    kv_op_free(op);
    assert_int_equal(f.node.generation, 3);
    op_id = f.node.last_op_id;
    f.node.is_mute = false;
    op = begin_read(&rows, 4 << 20);
    assert_int_equal(run(op, 1000000), KV_OK);
    kv_op_free(op);
    assert_int_equal(f.node.generation, 3);
    assert_true(f.node.last_op_id == op_id);

    assert_int_equal(kv_fork_begin(f.session, 5, 0, &op), KV_OK);
    assert_int_equal(run(op, 1000000), KV_OK);
    struct kv_session *child = kv_op_session(op);

    assert_non_null(child);
    assert_null(kv_op_session(op));
    kv_op_free(op);
    assert_int_equal(kv_session_generation(f.session), 4);
    assert_int_equal(kv_session_generation(child), 1);
    kv_session_free(child);
}

/* Closing a client in the middle of everything leaves nothing behind (the sanitizers look). */
static void test_close_amid(void **state)
{
    struct kv_rows rows = {.n_layers = N_LAYERS, .n_tokens = 1000};
    struct kv_op *op;

    (void)state;
    f.node.is_manual = true;
    begin_put(&rows, 0);
    begin_read(&rows, 4 << 20);
    assert_int_equal(kv_truncate_begin(f.session, 5, 1000, &op), KV_OK);
    turn(1000);
    assert_true(f.node.n_seen > 1);
    for (unsigned i = 0; i < f.node.n_seen; i++)
        if (f.node.seen[i].header.op == KV_OP_READ)
            carry_out(&f.node.seen[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_hello, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_large, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_small, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_arguments, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_late_answer, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_quarantine, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_busy, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_resend, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_corrupt, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_silence, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_slow, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_catch_up, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_close_amid, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
