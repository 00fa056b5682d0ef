#include "kvserver/store/control/control.h"

#include "kvserver/base/log.h"
#include "kvserver/base/token.h"
#include "kvserver/net/message.h"
#include "kvserver/store/shard/op.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum {
    TICK_US = 20000,
    CLOSE_AGAIN_US = 20000,
};

/* ---- calls ------------------------------------------------------------------------------- */

static struct kv_control_call *
call_create(struct kv_node *node, enum kv_op_id op, kv_node_reply_fn reply, void *arg)
{
    struct kv_control_call *call =
        calloc(1, sizeof(*call) + node->n_threads * sizeof(call->commands[0]));

    if (call == NULL)
        return NULL;
    call->node = node;
    call->op = op;
    call->reply = reply;
    call->arg = arg;
    call->list_next = node->calls;
    call->list_link = &node->calls;
    if (call->list_next != NULL)
        call->list_next->list_link = &call->list_next;
    node->calls = call;
    node->n_calls++;
    return call;
}

void kv_control_call_end(struct kv_control_call *call)
{
    *call->list_link = call->list_next;
    if (call->list_next != NULL)
        call->list_next->list_link = call->list_link;
    call->node->n_calls--;
    free(call->address);
    free(call->writers);
    free(call);
}

struct kv_control_call *kv_control_call_internal(struct kv_node *node, enum kv_op_id op)
{
    return call_create(node, op, NULL, NULL);
}

/* What can always be said: that there is no memory for the answer, and the client asks again.
 * What the call did stays done, and is told then.  Every reply has its outcome in field 1, so
 * the smallest stands for all. */
static void reply_busy(kv_node_reply_fn reply, void *arg)
{
    Kvpb__CloseReply message = KVPB__CLOSE_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    uint8_t packed[64];

    outcome.status = KV_BUSY;
    outcome.detail = "no memory for the answer";
    message.outcome = &outcome;
    assert(kvpb__close_reply__get_packed_size(&message) <= sizeof(packed));
    reply(arg, packed, kvpb__close_reply__pack(&message, packed));
}

void kv_control_reply(struct kv_control_call *call, const ProtobufCMessage *message)
{
    if (call->reply != NULL) {
        size_t bytes = protobuf_c_message_get_packed_size(message);
        uint8_t *packed = malloc(bytes > 0 ? bytes : 1);

        if (packed != NULL) {
            protobuf_c_message_pack(message, packed);
            call->reply(call->arg, packed, bytes);
            free(packed);
        } else {
            reply_busy(call->reply, call->arg);
        }
    }
    kv_control_call_end(call);
}

void kv_control_refuse(struct kv_control_call *call,
                       kv_status_t status,
                       const char *format,
                       ...)
{
    Kvpb__CloseReply reply = KVPB__CLOSE_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    char detail[512];
    va_list args;

    va_start(args, format);
    vsnprintf(detail, sizeof(detail), format, args);
    va_end(args);
    outcome.status = status;
    outcome.detail = detail;
    reply.outcome = &outcome;
    if (status != KV_OK) {
        kv_count(&call->node->stats.control_refused, 1);
        kv_count(&call->node->stats.ops[call->op].errors, 1);
    }
    kv_control_reply(call, &reply.base);
}

/* NULL: it is no client of this node, or not its token. */
static struct kv_client_record *
client_of(struct kv_node *node, uint32_t index, const struct kv_id128 *token)
{
    if (token == NULL || index >= node->config.clients_max)
        return NULL;
    struct kv_client_record *client = &node->clients[index];
    if (client->state != KV_CLIENT_OPEN || !kv_token_equal(&client->token, token))
        return NULL;
    return client;
}

bool kv_node_control(struct kv_node *node,
                     enum kv_op_id op,
                     uint32_t client_index,
                     const struct kv_id128 *client_token,
                     const uint8_t *request,
                     size_t request_bytes,
                     kv_node_reply_fn reply,
                     void *arg)
{
    struct kv_client_record *client = client_of(node, client_index, client_token);

    assert(kv_op_is_control(op));
    if (client == NULL && op != KV_OP_HELLO && op != KV_OP_GOODBYE) {
        kv_count(&node->stats.unknown_clients, 1);
        return false;
    }
    struct kv_control_call *call = call_create(node, op, reply, arg);
    if (call == NULL) {
        reply_busy(reply, arg);
        return true;
    }
    kv_count(&node->stats.control_requests, 1);
    kv_count(&node->stats.ops[op].count, 1);
    if (client != NULL) {
        client->heard_us = kv_clock_now(node->config.clock);
        call->tenant = client->tenant;
    }
    call->request = request;
    call->request_bytes = request_bytes;
    if (node->n_calls > KV_CALLS_MAX)
        kv_control_refuse(call, KV_BUSY, "more than %d control requests under way",
                          KV_CALLS_MAX);
    else if (request_bytes > KV_WIRE_CONTROL_MAX)
        kv_control_refuse(call, KV_TOO_LARGE, "%s: a request of %zu bytes, at most %d",
                          kv_ops[op].name, request_bytes, KV_WIRE_CONTROL_MAX);
    else
        kv_ops[op].control(call);
    return true;
}

void kv_control_ask(struct kv_control_call *call,
                    const struct kv_command *command,
                    void (*next)(struct kv_control_call *call))
{
    struct kv_node *node = call->node;

    call->next = next;
    call->status = KV_OK;
    call->n_pending = 1; /* not zero before all are asked */
    for (uint32_t i = 0; i < node->n_threads; i++) {
        struct kv_command *copy = &call->commands[i];

        *copy = *command;
        copy->thread = i;
        copy->owner = call;
        copy->bytes = 0;
        /* The ring has room for all commands that sessions, clients and calls can have under
         * way at once. */
        bool pushed = kv_ring_push(node->data[i].commands, copy);
        assert(pushed);
        (void)pushed;
        call->n_pending++;
        node->data[i].port->row->port_wake(node->data[i].port);
    }
    if (--call->n_pending == 0)
        call->next(call);
}

static void peer_stuck(struct kv_node *node, const struct kv_command *notice)
{
    struct kv_client_record *client = &node->clients[notice->index];

    if (client->state == KV_CLIENT_OPEN && kv_token_equal(&client->token, &notice->token)) {
        kv_count(&node->stats.clients_gone, 1);
        kv_log(KV_LOG_INFO, "client lost: %s: its channel failed or it took no replies",
               client->name);
        kv_client_remove(node, client);
    }
}

static void answer(struct kv_node *node, struct kv_command *command)
{
    struct kv_control_call *call = command->owner;

    if (command->kind == KV_COMMAND_PEER_STUCK) {
        peer_stuck(node, command);
        return;
    }
    if (command->status != KV_OK && call->status == KV_OK)
        call->status = command->status;
    if (command->kind == KV_COMMAND_SESSION_LENGTH) {
        if (command->has_units && command->tokens < call->tokens)
            call->tokens = command->tokens;
        call->bytes += command->bytes;
    }
    if (--call->n_pending == 0)
        call->next(call);
}

/* ---- sessions ---------------------------------------------------------------------------- */

struct kv_session *
kv_session_create(struct kv_node *node, const struct kv_id128 *id, struct kv_model *model)
{
    for (uint32_t i = 0; i < node->config.sessions_max; i++) {
        struct kv_session *session = &node->sessions[i];

        if (session->used)
            continue;
        if (!kv_map_set(node->session_of_id, id, session))
            return NULL;
        *session = (struct kv_session){
            .used = true, .busy = true, .index = i, .id = *id, .model = model, .generation = 1};
        model->n_sessions++;
        node->n_sessions++;
        atomic_store(&node->n_sessions_seen, node->n_sessions);
        return session;
    }
    return NULL;
}

void kv_session_destroy(struct kv_node *node, struct kv_session *session)
{
    kv_map_remove(node->session_of_id, &session->id);
    free(session->writers);
    session->writers = NULL;
    session->model->n_sessions--;
    session->model->used_us = kv_clock_now(node->config.clock);
    session->used = false;
    node->n_sessions--;
    atomic_store(&node->n_sessions_seen, node->n_sessions);
}

void kv_session_close(struct kv_control_call *call,
                      const struct kv_session *session,
                      enum kv_ended_why why,
                      void (*next)(struct kv_control_call *call))
{
    struct kv_node *node = call->node;
    const struct kv_command command = {.kind = KV_COMMAND_SESSION_CLOSE,
                                       .index = session->index,
                                       .ended = {.token = session->token,
                                                 .at_us = kv_clock_now(node->config.clock),
                                                 .lease_us = session->lease_us,
                                                 .why = why}};

    kv_ended_add(&node->ended, &command.ended);
    kv_control_ask(call, &command, next);
}

uint64_t kv_session_used_us(const struct kv_node *node, const struct kv_session *session)
{
    uint64_t used_us = session->renewed_us;

    for (uint32_t i = 0; i < node->n_threads; i++) {
        uint64_t here = atomic_load_explicit(&node->data[i].parts[session->index].used_us,
                                             memory_order_relaxed);
        if (here > used_us)
            used_us = here;
    }
    return used_us;
}

uint64_t kv_session_lease_left_us(const struct kv_node *node,
                                  const struct kv_session *session,
                                  uint64_t now_us)
{
    uint64_t used_us = kv_session_used_us(node, session);
    /* A data thread may have looked at the clock after the caller did. */
    uint64_t idle_us = now_us > used_us ? now_us - used_us : 0;

    return idle_us < session->lease_us ? session->lease_us - idle_us : 0;
}

static void session_expired(struct kv_control_call *call)
{
    kv_session_destroy(call->node, call->session);
    kv_control_call_end(call);
}

static void expire_sessions(struct kv_node *node, uint64_t now_us)
{
    for (uint32_t i = 0; i < node->config.sessions_max; i++) {
        struct kv_session *session = &node->sessions[i];

        if (!session->used || session->busy)
            continue;
        if (kv_session_lease_left_us(node, session, now_us) > 0)
            continue;
        struct kv_control_call *call = kv_control_call_internal(node, KV_OP_CLOSE);
        if (call == NULL)
            return;
        session->busy = true;
        call->session = session;
        kv_count(&node->stats.sessions_expired, 1);
        kv_session_close(call, session, KV_ENDED_LEASE, session_expired);
    }
}

/* ---- clients ----------------------------------------------------------------------------- */

uint32_t kv_client_grant(struct kv_node *node)
{
    uint32_t more = node->config.credits - node->credits_sure;

    if (more > node->credits_spare)
        more = node->credits_spare;
    node->credits_spare -= more;
    return node->credits_sure + more;
}

static void client_closed(struct kv_control_call *call)
{
    struct kv_client_record *client = call->client;

    client->n_asked = 0;
    if (call->status == KV_OK) {
        client->state = KV_CLIENT_FREE;
        call->node->credits_spare += client->credits - call->node->credits_sure;
    }
    kv_control_call_end(call);
}

static void client_close(struct kv_node *node, struct kv_client_record *client)
{
    struct kv_control_call *call = kv_control_call_internal(node, KV_OP_GOODBYE);

    client->closing_us = kv_clock_now(node->config.clock);
    if (call == NULL)
        return;
    call->client = client;
    client->n_asked = node->n_threads;
    kv_control_ask(call,
                   &(struct kv_command){.kind = KV_COMMAND_PEER_CLOSE, .index = client->index},
                   client_closed);
}

void kv_client_remove(struct kv_node *node, struct kv_client_record *client)
{
    if (client->state != KV_CLIENT_OPEN && client->state != KV_CLIENT_OPENING)
        return;
    client->state = KV_CLIENT_CLOSING;
    client->n_asked = 0;
    if (client->channel != NULL) {
        client->channel->row->channel_close(client->channel);
        client->channel = NULL;
    }
    client_close(node, client);
}

void kv_node_client_gone(struct kv_node *node,
                         uint32_t client_index,
                         const struct kv_id128 *client_token)
{
    struct kv_client_record *client = client_of(node, client_index, client_token);

    if (client == NULL)
        return;
    kv_count(&node->stats.clients_gone, 1);
    kv_log(KV_LOG_DEBUG, "client gone: %s", client->name);
    kv_client_remove(node, client);
}

bool kv_node_client_known(struct kv_node *node,
                          uint32_t client_index,
                          const struct kv_id128 *client_token)
{
    struct kv_client_record *client = client_of(node, client_index, client_token);

    if (client != NULL)
        client->attached = true;
    return client != NULL;
}

static uint64_t client_requests(const struct kv_node *node, uint32_t index)
{
    uint64_t requests = 0;

    for (uint32_t i = 0; i < node->n_threads; i++)
        requests += kv_counted(&node->data[i].peers[index].requests);
    return requests;
}

static void check_clients(struct kv_node *node, uint64_t now_us)
{
    for (uint32_t i = 0; i < node->config.clients_max; i++) {
        struct kv_client_record *client = &node->clients[i];

        if (client->state == KV_CLIENT_CLOSING && client->n_asked == 0 &&
            now_us - client->closing_us > CLOSE_AGAIN_US) {
            client_close(node, client); /* what it had under way may have ended by now */
        } else if (client->state == KV_CLIENT_OPEN && !client->attached) {
            uint64_t requests = client_requests(node, i);
            if (requests != client->requests_seen)
                client->heard_us = now_us;
            client->requests_seen = requests;
            /* A hello answered in this very step is younger than the step. */
            if (now_us > client->heard_us &&
                now_us - client->heard_us > node->config.client_lease_ms * UINT64_C(1000)) {
                kv_count(&node->stats.clients_gone, 1);
                kv_client_remove(node, client);
            }
        }
    }
}

/* ---- the message carrier ----------------------------------------------------------------- */

struct message_reply {
    struct kv_node *node;
    struct kv_wire_header request, header;
    struct kv_channel *channel; /* made for the answer to a hello; closed with this struct */
    uint8_t *body;
};

static void message_sent(void *arg, kv_status_t status)
{
    struct message_reply *reply = arg;

    (void)status;
    if (reply->channel != NULL && !reply->node->port_closes)
        reply->channel->row->channel_close(reply->channel);
    free(reply->body);
    free(reply);
}

/* A hello that succeeds leaves its channel with the client's record. */
static struct kv_channel *
hello_channel(struct message_reply *reply, const uint8_t *bytes, size_t n_bytes)
{
    Kvpb__HelloReply *hello = kvpb__hello_reply__unpack(NULL, n_bytes, bytes);
    struct kv_channel *channel = reply->channel;

    if (hello != NULL && hello->outcome != NULL && hello->outcome->status == KV_OK) {
        struct kv_client_record *client = &reply->node->clients[hello->client_index];
        if (client->channel == NULL) {
            client->channel = channel;
            reply->channel = NULL;
        }
        channel = client->channel;
    }
    kvpb__hello_reply__free_unpacked(hello, NULL);
    return channel;
}

static void message_reply(void *arg, const uint8_t *bytes, size_t n_bytes)
{
    struct message_reply *reply = arg;
    struct kv_channel *channel = NULL;

    if (reply->channel != NULL) {
        channel = hello_channel(reply, bytes, n_bytes);
    } else {
        const struct kv_client_record *client =
            client_of(reply->node, reply->request.client_index, &reply->request.client_token);
        if (client != NULL)
            channel = client->channel;
    }
    if (channel == NULL) {
        message_sent(reply, KV_OK);
        return;
    }
    reply->body = malloc(n_bytes > 0 ? n_bytes : 1);
    if (reply->body != NULL)
        memcpy(reply->body, bytes, n_bytes);
    else
        n_bytes = 0;
    reply->header = (struct kv_wire_header){
        .kind = KV_WIRE_REPLY,
        .op = reply->request.op,
        .status = reply->body != NULL ? KV_OK : KV_BUSY, /* the client asks again */
        .request_id = reply->request.request_id,
        .client_index = reply->request.client_index,
        .client_token = reply->request.client_token,
    };
    kv_message_seal(&reply->header, reply->body, n_bytes);
    if (kv_channel_send(channel, &reply->header, sizeof(reply->header), reply->body, n_bytes,
                        message_sent, reply) != KV_IN_PROGRESS)
        message_sent(reply, KV_OK);
}

static kv_status_t connect_hello(struct kv_node *node,
                                 const void *body,
                                 size_t body_bytes,
                                 struct kv_channel **ret_channel)
{
    Kvpb__HelloRequest *hello = kvpb__hello_request__unpack(NULL, body_bytes, body);
    kv_status_t status = KV_INVALID;

    if (hello != NULL && hello->address.len <= KV_WIRE_ADDRESS_MAX)
        status = node->port->row->connect(node->port, hello->address.data, hello->address.len,
                                          KV_CHANNEL_SHARED, NULL, ret_channel);
    kvpb__hello_request__free_unpacked(hello, NULL);
    return status;
}

static void on_message(
    void *owner, const void *message, size_t message_bytes, const void *body, size_t body_bytes)
{
    struct kv_node *node = owner;
    struct kv_wire_header header;
    const char *why = "not a control request";

    if (kv_message_check(message, message_bytes, body, body_bytes, &header, &why) != KV_OK ||
        header.kind != KV_WIRE_REQUEST || !kv_op_is_control(header.op)) {
        kv_count(&node->stats.bad_messages, 1);
        KV_LOG_EVERY(KV_LOG_WARN, "message dropped: control port: %s", why);
        return;
    }
    /* Control requests have no bulk data: nothing behind the body is checked. */
    body_bytes = header.body_bytes;
    struct message_reply *reply = calloc(1, sizeof(*reply));
    if (reply == NULL)
        return;
    reply->node = node;
    reply->request = header;
    if (header.op == KV_OP_HELLO &&
        connect_hello(node, body, body_bytes, &reply->channel) != KV_OK) {
        kv_count(&node->stats.bad_messages, 1);
        free(reply);
        return;
    }
    if (!kv_node_control(node, header.op, header.client_index, &header.client_token, body,
                         body_bytes, message_reply, reply))
        free(reply);
}

static void on_incoming(void *owner,
                        const void *message,
                        size_t message_bytes,
                        size_t bytes,
                        struct kv_incoming *incoming)
{
    /* Control messages are small; what is not is nobody's. */
    struct kv_node *node = owner;

    (void)message;
    (void)message_bytes;
    (void)bytes;
    kv_count(&node->stats.bad_messages, 1);
    kv_incoming_refuse(incoming);
}

static void on_failed(void *owner, void *channel_arg, kv_status_t status)
{
    (void)owner;
    (void)channel_arg;
    (void)status;
}

static const struct kv_port_events events = {on_message, on_incoming, on_failed};

kv_status_t kv_control_port_open(struct kv_node *node)
{
    struct kv_transport *transport = node->config.transport;

    return transport->row->port_open(transport, &events, node, &node->port);
}

/* ---- one step ---------------------------------------------------------------------------- */

bool kv_node_control_step(struct kv_node *node)
{
    struct kv_command *command;
    uint64_t now_us = kv_clock_now(node->config.clock);

    while ((command = kv_ring_pop(node->answers)) != NULL)
        answer(node, command);
    if (node->port != NULL)
        while (kv_port_progress(node->port) > 0)
            ;
    node->config.disk->row->progress(node->config.disk);
    if (now_us >= node->tick_us) {
        node->tick_us = now_us + TICK_US;
        expire_sessions(node, now_us);
        check_clients(node, now_us);
    }
    return node->n_calls > 0;
}

void kv_control_fini(struct kv_node *node)
{
    while (node->calls != NULL)
        kv_control_refuse(node->calls, KV_UNREACHABLE, "the node stops");
    if (node->clients != NULL)
        for (uint32_t i = 0; i < node->config.clients_max; i++)
            if (node->clients[i].channel != NULL)
                node->clients[i].channel->row->channel_close(node->clients[i].channel);
    node->port_closes = true;
    if (node->port != NULL)
        node->port->row->port_close(node->port);
    kv_map_destroy(node->session_of_id);
    if (node->sessions != NULL)
        for (uint32_t i = 0; i < node->config.sessions_max; i++)
            free(node->sessions[i].writers);
    free(node->sessions);
    free(node->clients);
    for (uint32_t i = 0; i < node->n_models; i++)
        free(node->models[i]);
}
