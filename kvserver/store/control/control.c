#include "kvserver/store/control/control.h"

#include "kvserver/store/shard/op.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>
#include <stdarg.h>
#include <stdlib.h>

enum {
    TICK_US = 20000,
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

bool kv_node_control(struct kv_node *node,
                     enum kv_op_id op,
                     uint32_t client_index,
                     const struct kv_id128 *client_token,
                     const uint8_t *request,
                     size_t request_bytes,
                     kv_node_reply_fn reply,
                     void *arg)
{
    struct kv_client_record *client = kv_client_of(node, client_index, client_token);

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

static void answer(struct kv_node *node, struct kv_command *command)
{
    struct kv_control_call *call = command->owner;

    if (command->kind == KV_COMMAND_PEER_STUCK) {
        kv_client_stuck(node, command);
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
        kv_sessions_expire(node, now_us);
        kv_clients_check(node, now_us);
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
