/* A call's states: armed -> reading its message -> with the node -> ending -> free.  A
 * separate tag waits for the call's close and returns when the call has ended for any reason.
 * A slot is free again when all of its tags have returned and the node owes it no reply. */
#include "kvserver/grpc_server.h"

#include "kvserver/acceptor.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/log.h"
#include "kvserver/base/token.h"
#include "kvserver/store/node.h"
#include "proto/kv_method.h"
#include "proto/kvstore.pb-c.h"

#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <grpc/support/log.h>

#include <assert.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ARMED_MAX = 16,       /* calls that gRPC may deliver before the next step */
    EVENTS_PER_STEP = 64, /* before the node's step */
    STREAMS_MAX = 32,     /* concurrent calls per connection */
    METADATA_BYTES_MAX = 8192,
    CONNECTIONS_SPARE = 256, /* in addition to two per client */
    MEMORY_BYTES = 64 << 20, /* for gRPC's buffers; more is added per connection */
    CONNECTION_BYTES = 32 << 10,
    IDLE_MS = 60000, /* for a connection without a call */
    KEEPALIVE_MS = 10000,
    PING_INTERVAL_MIN_MS = 200, /* between two pings of a client */
    SWEEP_US = 1000000,
    GOODBYE_MS = 500,
    METHOD_BYTES = 64,
};

enum tag_kind {
    TAG_NEW,     /* a call arrived */
    TAG_MESSAGE, /* its message arrived */
    TAG_SENT,    /* its reply, or an attach's initial metadata, was sent */
    TAG_CLOSED,  /* the call has ended */
    TAG_COUNT
};

enum call_state {
    CALL_FREE,
    CALL_ARMED,
    CALL_READING,
    CALL_WITH_NODE,
    CALL_ATTACHED,
    CALL_ENDING,
};

struct tag {
    struct call *call;
    enum tag_kind kind;
};

struct call {
    struct kvs_grpc_server *server;
    struct call *next_free;
    enum call_state state;
    unsigned n_tags;   /* that gRPC has yet to return */
    bool owed;         /* the node has yet to reply */
    bool closed;       /* the call has ended on the client's side */
    bool opened;       /* start of a state that is limited to KVS_GRPC_PATIENCE_MS */
    uint64_t since_us; /* in a state that has to end within KVS_GRPC_PATIENCE_MS */

    grpc_call *grpc;
    grpc_call_details details;
    grpc_metadata_array metadata;
    grpc_byte_buffer *request, *reply;
    int cancelled;
    struct tag tags[TAG_COUNT];

    enum kv_op_id op;      /* 0: attach */
    uint32_t client_index; /* the caller, or the attached client */
    struct kv_id128 client_token;
};

struct kvs_grpc_server {
    struct kvs_node *node;
    grpc_server *server;
    grpc_completion_queue *queue;
    grpc_server_credentials *credentials;
    struct kvs_acceptor *acceptor;
    bool closing;
    bool shut_down; /* gRPC has no call or connection left */

    struct call *calls;
    uint32_t n_calls, n_armed;
    struct call *free;
    uint64_t swept_us;
    uint64_t n_lost; /* clients, when it swept */

    /* An empty batch on a call to nowhere: the only event that any thread may add to the
     * queue. */
    grpc_channel *wake_channel;
    grpc_call *wake_call;
    atomic_bool woken;
};

/* ---- calls ------------------------------------------------------------------------------- */

/* gRPC's messages are logged at debug level only: its errors are mostly the clients'. */
static void log_from_grpc(gpr_log_func_args *args)
{
    kv_log(KV_LOG_DEBUG, "grpc: %s", args->message);
}

static void start_batch(struct call *call, const grpc_op *ops, size_t n_ops, enum tag_kind kind)
{
    grpc_call_error error =
        grpc_call_start_batch(call->grpc, ops, n_ops, &call->tags[kind], NULL);

    /* Fails only if the API is misused. */
    assert(error == GRPC_CALL_OK);
    (void)error;
    call->n_tags++;
}

static void arm(struct kvs_grpc_server *server)
{
    while (!server->closing && server->n_armed < ARMED_MAX && server->free != NULL) {
        struct call *call = server->free;
        grpc_call_error error;

        server->free = call->next_free;
        call->state = CALL_ARMED;
        call->n_tags = 1;
        call->owed = call->closed = call->opened = false;
        call->request = call->reply = NULL;
        call->grpc = NULL;
        grpc_call_details_init(&call->details);
        grpc_metadata_array_init(&call->metadata);
        server->n_armed++;
        error = grpc_server_request_call(server->server, &call->grpc, &call->details,
                                         &call->metadata, server->queue, server->queue,
                                         &call->tags[TAG_NEW]);
        assert(error == GRPC_CALL_OK);
        (void)error;
    }
}

/* Frees what gRPC gave once the call has ended for gRPC, and the slot once the node is done. */
static void release(struct call *call)
{
    struct kvs_grpc_server *server = call->server;

    if (call->state == CALL_FREE || call->n_tags > 0)
        return;
    if (call->grpc != NULL)
        grpc_call_unref(call->grpc);
    if (call->request != NULL)
        grpc_byte_buffer_destroy(call->request);
    if (call->reply != NULL)
        grpc_byte_buffer_destroy(call->reply);
    grpc_call_details_destroy(&call->details);
    grpc_metadata_array_destroy(&call->metadata);
    call->grpc = NULL;
    call->request = call->reply = NULL;
    grpc_call_details_init(&call->details);
    grpc_metadata_array_init(&call->metadata);
    if (call->owed)
        return;
    call->state = CALL_FREE;
    call->next_free = server->free;
    server->free = call;
    arm(server);
}

/* Ends the call with a status, and with a message unless that is NULL. */
static void end_call(struct call *call,
                     grpc_status_code code,
                     const char *text,
                     const uint8_t *message,
                     size_t message_bytes)
{
    grpc_op ops[3] = {0};
    size_t n_ops = 0;
    grpc_slice slice, details = grpc_slice_from_copied_string(text);

    if (!call->opened)
        ops[n_ops++].op = GRPC_OP_SEND_INITIAL_METADATA;
    if (message != NULL) {
        slice = grpc_slice_from_copied_buffer((const char *)message, message_bytes);
        call->reply = grpc_raw_byte_buffer_create(&slice, 1);
        grpc_slice_unref(slice);
        ops[n_ops].op = GRPC_OP_SEND_MESSAGE;
        ops[n_ops++].data.send_message.send_message = call->reply;
    }
    ops[n_ops].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    ops[n_ops].data.send_status_from_server.status = code;
    ops[n_ops++].data.send_status_from_server.status_details = &details;
    call->state = CALL_ENDING;
    call->opened = true;
    call->since_us = kv_clock_now(&kv_clock_real);
    start_batch(call, ops, n_ops, TAG_SENT);
    grpc_slice_unref(details);
}

static void on_node_reply(void *arg, const uint8_t *reply, size_t reply_bytes)
{
    struct call *call = arg;

    /* A client that has gone needs no reply, but its slot was kept for the node's. */
    call->owed = false;
    if (call->closed)
        release(call);
    else if (reply == NULL)
        end_call(call, GRPC_STATUS_UNAVAILABLE, "node is out of memory", NULL, 0);
    else if (reply_bytes > KV_WIRE_CONTROL_MAX)
        end_call(call, GRPC_STATUS_RESOURCE_EXHAUSTED, "reply too large", NULL, 0);
    else
        end_call(call, GRPC_STATUS_OK, "", reply, reply_bytes);
}

static void attach(struct call *call, const uint8_t *message, size_t message_bytes)
{
    struct kvs_grpc_server *server = call->server;
    Kvpb__AttachRequest *request = kvpb__attach_request__unpack(NULL, message_bytes, message);
    grpc_op open = {.op = GRPC_OP_SEND_INITIAL_METADATA};

    if (request == NULL || request->client_token.len != sizeof(call->client_token.bytes)) {
        end_call(call, GRPC_STATUS_INVALID_ARGUMENT, "malformed attach request", NULL, 0);
        goto out;
    }
    call->client_index = request->client_index;
    memcpy(call->client_token.bytes, request->client_token.data, request->client_token.len);
    if (!kvs_node_attach_client(server->node, call->client_index, &call->client_token)) {
        end_call(call, GRPC_STATUS_NOT_FOUND, "no such client", NULL, 0);
        goto out;
    }
    for (uint32_t i = 0; i < server->n_calls; i++) {
        const struct call *other = &server->calls[i];

        if (other->state == CALL_ATTACHED && !other->closed &&
            other->client_index == call->client_index &&
            kv_token_equal(&other->client_token, &call->client_token)) {
            end_call(call, GRPC_STATUS_ALREADY_EXISTS, "client is already attached", NULL, 0);
            goto out;
        }
    }
    call->state = CALL_ATTACHED;
    call->opened = true;
    start_batch(call, &open, 1, TAG_SENT);

out:
    if (request != NULL)
        kvpb__attach_request__free_unpacked(request, NULL);
}

/* Reads the client's index and token from the call's metadata.  Returns false if they are
 * missing. */
static bool read_client(struct call *call)
{
    for (size_t i = 0; i < call->metadata.count; i++) {
        const grpc_metadata *pair = &call->metadata.metadata[i];
        const uint8_t *value = GRPC_SLICE_START_PTR(pair->value);

        if (grpc_slice_str_cmp(pair->key, KV_METHOD_CLIENT) != 0 ||
            GRPC_SLICE_LENGTH(pair->value) != KV_METHOD_CLIENT_BYTES)
            continue;
        memcpy(&call->client_index, value, sizeof(call->client_index));
        memcpy(&call->client_token, value + sizeof(call->client_index),
               sizeof(call->client_token));
        return true;
    }
    return false;
}

/* A call arrived: looks up its method and starts reading its message. */
static void on_new(struct call *call, bool success)
{
    struct kvs_grpc_server *server = call->server;
    char method[METHOD_BYTES];
    size_t path_bytes, prefix_bytes = strlen(KV_METHOD_PREFIX);
    const char *path;
    grpc_op receive = {.op = GRPC_OP_RECV_MESSAGE};
    grpc_op close = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};

    server->n_armed--;
    if (!success) {
        release(call);
        return;
    }
    /* Another slot takes this one's place, so that gRPC always has one to put a call in. */
    arm(server);
    call->state = CALL_READING;
    call->since_us = kv_clock_now(&kv_clock_real);
    close.data.recv_close_on_server.cancelled = &call->cancelled;
    start_batch(call, &close, 1, TAG_CLOSED);

    path = (const char *)GRPC_SLICE_START_PTR(call->details.method);
    path_bytes = GRPC_SLICE_LENGTH(call->details.method);
    method[0] = 0;
    if (path_bytes > prefix_bytes && path_bytes - prefix_bytes < sizeof(method) &&
        memcmp(path, KV_METHOD_PREFIX, prefix_bytes) == 0) {
        memcpy(method, path + prefix_bytes, path_bytes - prefix_bytes);
        method[path_bytes - prefix_bytes] = 0;
    }
    call->op = kv_method_op(method);
    if (call->op == 0 && strcmp(method, KV_METHOD_ATTACH) != 0) {
        end_call(call, GRPC_STATUS_UNIMPLEMENTED, "no such method", NULL, 0);
        return;
    }
    receive.data.recv_message.recv_message = &call->request;
    start_batch(call, &receive, 1, TAG_MESSAGE);
}

static void on_message(struct call *call, bool success)
{
    struct kvs_grpc_server *server = call->server;
    grpc_byte_buffer_reader reader;
    grpc_slice message;

    if (call->closed || call->state != CALL_READING) {
        release(call);
        return;
    }
    if (!success || call->request == NULL) {
        end_call(call, GRPC_STATUS_INVALID_ARGUMENT, "message missing", NULL, 0);
        return;
    }
    if (call->request->data.raw.compression != GRPC_COMPRESS_NONE ||
        !grpc_byte_buffer_reader_init(&reader, call->request)) {
        end_call(call, GRPC_STATUS_UNIMPLEMENTED, "compressed messages are not supported", NULL,
                 0);
        return;
    }
    message = grpc_byte_buffer_reader_readall(&reader);
    grpc_byte_buffer_reader_destroy(&reader);
    grpc_byte_buffer_destroy(call->request);
    call->request = NULL;
    if (server->closing) {
        end_call(call, GRPC_STATUS_UNAVAILABLE, "node is stopping", NULL, 0);
    } else if (call->op == 0) {
        attach(call, GRPC_SLICE_START_PTR(message), GRPC_SLICE_LENGTH(message));
    } else {
        const struct kv_id128 *token = read_client(call) ? &call->client_token : NULL;

        call->state = CALL_WITH_NODE;
        call->owed = true;
        if (!kvs_node_control(server->node, call->op, call->client_index, token,
                              GRPC_SLICE_START_PTR(message), GRPC_SLICE_LENGTH(message),
                              on_node_reply, call)) {
            call->owed = false;
            end_call(call, GRPC_STATUS_UNAUTHENTICATED, "unknown client", NULL, 0);
        }
    }
    grpc_slice_unref(message);
}

static void on_closed(struct call *call)
{
    struct kvs_grpc_server *server = call->server;

    call->closed = true;
    if (call->state == CALL_ATTACHED && !server->closing)
        kvs_node_client_gone(server->node, call->client_index, &call->client_token);
    release(call);
}

static void handle(struct kvs_grpc_server *server, const grpc_event *event)
{
    struct tag *tag = event->tag;

    /* Two events have a tag that is no call's: a wake, and the end of the shutdown. */
    if (event->tag == &server->woken) {
        atomic_store(&server->woken, false);
        return;
    }
    if (event->tag == server) {
        server->shut_down = true;
        return;
    }
    assert(tag->call->n_tags > 0);
    tag->call->n_tags--;
    switch (tag->kind) {
    case TAG_NEW:
        on_new(tag->call, event->success);
        break;
    case TAG_MESSAGE:
        on_message(tag->call, event->success);
        break;
    case TAG_CLOSED:
        on_closed(tag->call);
        break;
    default:
        release(tag->call);
    }
}

/* ---- one step ---------------------------------------------------------------------------- */

/* Cancels calls that have waited for a client for too long, and ends the attach calls of
 * clients that have left. */
static void sweep(struct kvs_grpc_server *server, uint64_t now_us)
{
    for (uint32_t i = 0; i < server->n_calls; i++) {
        struct call *call = &server->calls[i];

        if ((call->state == CALL_READING || call->state == CALL_ENDING) && !call->closed &&
            now_us - call->since_us > KVS_GRPC_PATIENCE_MS * 1000ull)
            grpc_call_cancel(call->grpc, NULL);
        if (call->state == CALL_ATTACHED && !call->closed &&
            !kvs_node_has_client(server->node, call->client_index, &call->client_token))
            end_call(call, GRPC_STATUS_NOT_FOUND, "client has left", NULL, 0);
    }
}

/* At once if a client was lost: it connects again when its attach call has ended. */
static void sweep_if_due(struct kvs_grpc_server *server)
{
    const uint64_t now_us = kv_clock_now(&kv_clock_real);
    const uint64_t n_lost = kvs_node_clients_lost(server->node);

    if (now_us - server->swept_us < SWEEP_US && n_lost == server->n_lost)
        return;
    server->swept_us = now_us;
    server->n_lost = n_lost;
    sweep(server, now_us);
}

void kvs_grpc_server_step(struct kvs_grpc_server *server, uint64_t timeout_us)
{
    gpr_timespec deadline = gpr_time_add(
        gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_micros((int64_t)timeout_us, GPR_TIMESPAN));

    sweep_if_due(server);
    for (unsigned i = 0; i < EVENTS_PER_STEP; i++) {
        grpc_event event = grpc_completion_queue_next(server->queue, deadline, NULL);

        if (event.type != GRPC_OP_COMPLETE)
            break;
        handle(server, &event);
        /* Only the first event is waited for. */
        deadline = gpr_inf_past(GPR_CLOCK_MONOTONIC);
    }
}

/* One batch at a time: `woken` is cleared when its event is handled. */
void kvs_grpc_server_wake(void *arg)
{
    struct kvs_grpc_server *server = arg;

    if (!atomic_exchange(&server->woken, true))
        grpc_call_start_batch(server->wake_call, NULL, 0, &server->woken, NULL);
}

/* ---- life -------------------------------------------------------------------------------- */

static grpc_server *server_open(uint32_t connections_max)
{
    struct {
        const char *name;
        int value;
    } numbers[] = {
        {GRPC_ARG_MAX_CONCURRENT_STREAMS, STREAMS_MAX},
        {GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, KV_WIRE_CONTROL_MAX},
        {GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, KV_WIRE_CONTROL_MAX},
        {GRPC_ARG_MAX_METADATA_SIZE, METADATA_BYTES_MAX},
        /* Compressed messages are rejected, so a decompression bomb has no effect. */
        {GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0},
        {GRPC_ARG_HTTP2_BDP_PROBE, 0},
        {GRPC_ARG_MAX_CONNECTION_IDLE_MS, IDLE_MS},
        {GRPC_ARG_KEEPALIVE_TIME_MS, KEEPALIVE_MS},
        {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, KEEPALIVE_MS},
        {GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1},
        {GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0},
        {GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, PING_INTERVAL_MIN_MS},
    };
    enum {
        N_NUMBERS = sizeof(numbers) / sizeof(numbers[0])
    };
    grpc_arg arg[N_NUMBERS + 1];
    grpc_channel_args args = {.num_args = N_NUMBERS + 1, .args = arg};
    grpc_resource_quota *quota = grpc_resource_quota_create("kvserver");
    grpc_server *server;

    for (unsigned i = 0; i < N_NUMBERS; i++) {
        arg[i].type = GRPC_ARG_INTEGER;
        arg[i].key = (char *)numbers[i].name;
        arg[i].value.integer = numbers[i].value;
    }
    grpc_resource_quota_resize(quota,
                               MEMORY_BYTES + (size_t)connections_max * CONNECTION_BYTES);
    arg[N_NUMBERS].type = GRPC_ARG_POINTER;
    arg[N_NUMBERS].key = (char *)GRPC_ARG_RESOURCE_QUOTA;
    arg[N_NUMBERS].value.pointer.p = quota;
    arg[N_NUMBERS].value.pointer.vtable = grpc_resource_quota_arg_vtable();
    server = grpc_server_create(&args, NULL);
    grpc_resource_quota_unref(quota);
    return server;
}

kv_status_t kvs_grpc_server_create(const char *address,
                                   uint32_t clients_max,
                                   struct kvs_grpc_server **ret_server,
                                   char *detail,
                                   size_t detail_bytes)
{
    uint32_t connections_max = 2 * clients_max + CONNECTIONS_SPARE;
    struct kvs_acceptor *acceptor;
    struct kvs_grpc_server *server;
    kv_status_t status;

    status = kvs_acceptor_create(address, connections_max, &acceptor, detail, detail_bytes);
    if (status != KV_OK)
        return status;
    server = calloc(1, sizeof(*server));
    if (server == NULL)
        goto err_memory;
    server->acceptor = acceptor;
    server->n_calls = KVS_GRPC_CALLS_MAX + clients_max;
    server->calls = calloc(server->n_calls, sizeof(*server->calls));
    if (server->calls == NULL)
        goto err_memory;
    for (uint32_t i = server->n_calls; i-- > 0;) {
        struct call *call = &server->calls[i];

        call->server = server;
        for (unsigned kind = 0; kind < TAG_COUNT; kind++)
            call->tags[kind] = (struct tag){call, (enum tag_kind)kind};
        call->next_free = server->free;
        server->free = call;
    }

    gpr_set_log_function(log_from_grpc);
    grpc_init();
    server->queue = grpc_completion_queue_create_for_next(NULL);
    server->wake_channel =
        grpc_lame_client_channel_create("wake", GRPC_STATUS_UNAVAILABLE, "only for waking");
    server->wake_call = grpc_channel_create_call(server->wake_channel, NULL, 0, server->queue,
                                                 grpc_slice_from_static_string("/wake"), NULL,
                                                 gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    server->credentials = grpc_insecure_server_credentials_create();
    server->server = server_open(connections_max);
    grpc_server_register_completion_queue(server->server, server->queue, NULL);
    *ret_server = server;
    return KV_OK;

err_memory:
    snprintf(detail, detail_bytes, "out of memory: listen: %s", address);
    kvs_acceptor_destroy(acceptor);
    free(server);
    return KV_NO_MEMORY;
}

uint16_t kvs_grpc_server_port(const struct kvs_grpc_server *server)
{
    return kvs_acceptor_port(server->acceptor);
}

/* A connection was accepted.  Called by the acceptor's thread. */
static void take_connection(void *arg, int fd)
{
    struct kvs_grpc_server *server = arg;

    grpc_server_add_channel_from_fd(server->server, fd, server->credentials);
}

kv_status_t kvs_grpc_server_start(struct kvs_grpc_server *server, struct kvs_node *node)
{
    server->node = node;
    server->swept_us = kv_clock_now(&kv_clock_real);
    grpc_server_start(server->server);
    arm(server);
    return kvs_acceptor_start(server->acceptor, take_connection, server);
}

/* Handles events until gRPC has nothing left or the deadline has passed. */
static void drain(struct kvs_grpc_server *server, gpr_timespec deadline)
{
    while (!server->shut_down) {
        grpc_event event = grpc_completion_queue_next(server->queue, deadline, NULL);

        if (event.type != GRPC_OP_COMPLETE)
            return;
        handle(server, &event);
    }
}

void kvs_grpc_server_destroy(struct kvs_grpc_server *server)
{
    grpc_event event;

    if (server == NULL)
        return;
    kvs_acceptor_stop(server->acceptor);
    server->closing = true;
    for (uint32_t i = 0; i < server->n_calls; i++) {
        struct call *call = &server->calls[i];

        if ((call->state == CALL_ATTACHED || call->state == CALL_WITH_NODE) && !call->closed)
            end_call(call, GRPC_STATUS_UNAVAILABLE, "node is stopping", NULL, 0);
        call->owed = false; /* the node is destroyed */
    }
    grpc_server_shutdown_and_notify(server->server, server->queue, server);
    drain(server, gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                               gpr_time_from_millis(GOODBYE_MS, GPR_TIMESPAN)));
    grpc_server_cancel_all_calls(server->server);
    drain(server, gpr_inf_future(GPR_CLOCK_MONOTONIC));
    grpc_server_destroy(server->server);
    kvs_acceptor_destroy(server->acceptor); /* after gRPC: forwards its last bytes */
    grpc_server_credentials_release(server->credentials);
    grpc_call_unref(server->wake_call);
    grpc_channel_destroy(server->wake_channel);

    grpc_completion_queue_shutdown(server->queue);
    do {
        event = grpc_completion_queue_next(server->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC),
                                           NULL);
        if (event.type == GRPC_OP_COMPLETE)
            handle(server, &event);
    } while (event.type != GRPC_QUEUE_SHUTDOWN);
    grpc_completion_queue_destroy(server->queue);
    grpc_shutdown();
    free(server->calls);
    free(server);
}
