#include "kvserver/store/control/control.h"

#include "proto/kvstore.pb-c.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    TICK_US = 20000,
};

/* ---- calls ------------------------------------------------------------------------------- */

static struct kv_control_call *
call_create(struct kvs_control *control, enum kv_op_id op, kv_node_reply_fn reply, void *arg)
{
    struct kv_control_call *call =
        calloc(1, sizeof(*call) + control->n_threads * sizeof(call->commands[0]));

    if (call == NULL)
        return NULL;
    call->control = control;
    call->op = op;
    call->reply = reply;
    call->arg = arg;
    call->list_next = control->calls;
    call->list_link = &control->calls;
    if (call->list_next != NULL)
        call->list_next->list_link = &call->list_next;
    control->calls = call;
    control->n_calls++;
    return call;
}

void kv_control_call_end(struct kv_control_call *call)
{
    *call->list_link = call->list_next;
    if (call->list_next != NULL)
        call->list_next->list_link = call->list_link;
    call->control->n_calls--;
    free(call->address);
    free(call->writers);
    free(call);
}

struct kv_control_call *kv_control_call_internal(struct kvs_control *control, enum kv_op_id op)
{
    return call_create(control, op, NULL, NULL);
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

static void reply_status(struct kv_control_call *call, kv_status_t status, char *detail)
{
    Kvpb__CloseReply reply = KVPB__CLOSE_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;

    outcome.status = status;
    outcome.detail = detail;
    reply.outcome = &outcome;
    kv_control_reply(call, &reply.base);
}

void kvs_call_reply_ok(struct kv_control_call *call)
{
    char nothing[] = "";

    reply_status(call, KV_OK, nothing);
}

void kv_control_refuse(struct kv_control_call *call,
                       kv_status_t status,
                       const char *format,
                       ...)
{
    char detail[512];
    va_list args;

    assert(status != KV_OK);
    va_start(args, format);
    vsnprintf(detail, sizeof(detail), format, args);
    va_end(args);
    kv_count(&call->control->stats.control_refused, 1);
    kv_count(&call->control->stats.ops[call->op].errors, 1);
    reply_status(call, status, detail);
}

bool kvs_control_request(struct kvs_control *control,
                         enum kv_op_id op,
                         uint32_t client_index,
                         const struct kv_id128 *client_token,
                         const uint8_t *request,
                         size_t request_bytes,
                         kv_node_reply_fn reply,
                         void *arg)
{
    struct kv_client_record *client = kv_client_of(control, client_index, client_token);

    assert(kvs_control_has_op(control, op));
    if (client == NULL && op != KV_OP_HELLO && op != KV_OP_GOODBYE) {
        kv_count(&control->stats.unknown_clients, 1);
        return false;
    }
    struct kv_control_call *call = call_create(control, op, reply, arg);
    if (call == NULL) {
        reply_busy(reply, arg);
        return true;
    }
    kv_count(&control->stats.control_requests, 1);
    kv_count(&control->stats.ops[op].count, 1);
    if (client != NULL) {
        client->heard_us = kv_clock_now(control->config.clock);
        call->tenant = client->tenant;
    }
    call->request = request;
    call->request_bytes = request_bytes;
    if (control->n_calls > KV_CALLS_MAX)
        kv_control_refuse(call, KV_BUSY, "more than %d control requests under way",
                          KV_CALLS_MAX);
    else if (request_bytes > KV_WIRE_CONTROL_MAX)
        kv_control_refuse(call, KV_TOO_LARGE, "%s: a request of %zu bytes, at most %d",
                          control->ops[op].name, request_bytes, KV_WIRE_CONTROL_MAX);
    else
        control->ops[op].control(call);
    return true;
}

void kv_control_ask(struct kv_control_call *call,
                    const struct kv_command *command,
                    void (*next)(struct kv_control_call *call))
{
    struct kvs_control *control = call->control;

    call->next = next;
    call->status = KV_OK;
    call->n_pending = 1; /* not zero before all are asked */
    for (uint32_t i = 0; i < control->n_threads; i++) {
        struct kv_command *copy = &call->commands[i];

        *copy = *command;
        copy->thread = i;
        copy->owner = call;
        copy->bytes = 0;
        /* The ring has room for all commands that sessions, clients and calls can have under
         * way at once. */
        bool pushed = kv_ring_push(control->data[i].commands, copy);
        assert(pushed);
        (void)pushed;
        call->n_pending++;
        control->data[i].port->row->port_wake(control->data[i].port);
    }
    if (--call->n_pending == 0)
        call->next(call);
}

static void answer(struct kvs_control *control, struct kv_command *command)
{
    struct kv_control_call *call = command->owner;

    if (command->kind == KV_COMMAND_PEER_STUCK) {
        kv_client_stuck(control, command);
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

/* ---- drain ------------------------------------------------------------------------------- */

void kvs_control_drain(struct kvs_control *control)
{
    atomic_store(&control->draining, true);
    for (uint32_t i = 0; i < control->n_threads; i++)
        atomic_store(&control->data[i].draining, true);
}

bool kvs_control_drained(struct kvs_control *control)
{
    if (!atomic_load(&control->draining) || control->n_calls > 0)
        return false;
    for (uint32_t i = 0; i < control->n_threads; i++)
        if (kv_counted(&control->data[i].stats.in_flight) > 0)
            return false;
    return true;
}

/* ---- one step ---------------------------------------------------------------------------- */

bool kvs_control_step(struct kvs_control *control)
{
    struct kv_command *command;
    uint64_t now_us = kv_clock_now(control->config.clock);

    while ((command = kv_ring_pop(control->answers)) != NULL)
        answer(control, command);
    if (control->port != NULL)
        while (kv_port_progress(control->port) > 0)
            ;
    control->config.disk->row->progress(control->config.disk);
    if (now_us >= control->tick_us) {
        control->tick_us = now_us + TICK_US;
        kv_sessions_expire(control, now_us);
        kv_clients_check(control, now_us);
    }
    return control->n_calls > 0;
}

kv_status_t kvs_control_init(struct kvs_control *control,
                             const struct kv_node_config *config,
                             const struct kv_op_row *ops,
                             struct kv_data *data)
{
    control->config = *config;
    control->ops = ops;
    control->data = data;
    control->n_threads = config->n_threads;
    snprintf(control->name, sizeof(control->name), "%s",
             config->name != NULL ? config->name : "node");
    if (config->seed != 0)
        kv_random_init(&control->random, config->seed);
    else
        kv_random_init_secure(&control->random);
    kv_random_fill(&control->random, &control->id, sizeof(control->id));
    control->started_us = kv_clock_now(config->clock);

    control->credits_sure =
        config->credits < KV_CREDITS_SURE ? config->credits : KV_CREDITS_SURE;
    control->credits_spare =
        kv_node_works_max(config) - config->clients_max * control->credits_sure;

    control->sessions = calloc(config->sessions_max, sizeof(*control->sessions));
    control->clients = calloc(config->clients_max, sizeof(*control->clients));
    control->session_of_id = kv_map_create(kv_random_next(&control->random));
    control->answers = kv_ring_create(config->n_threads * kv_node_commands_max(config));
    return control->sessions != NULL && control->clients != NULL &&
                   control->session_of_id != NULL && control->answers != NULL
               ? KV_OK
               : KV_NO_MEMORY;
}

void kv_control_fini(struct kvs_control *control)
{
    while (control->calls != NULL)
        kv_control_refuse(control->calls, KV_UNREACHABLE, "the node stops");
    if (control->clients != NULL)
        for (uint32_t i = 0; i < control->config.clients_max; i++)
            if (control->clients[i].channel != NULL)
                control->clients[i].channel->row->channel_close(control->clients[i].channel);
    control->port_closes = true;
    if (control->port != NULL)
        control->port->row->port_close(control->port);
    kv_map_destroy(control->session_of_id);
    if (control->sessions != NULL)
        for (uint32_t i = 0; i < control->config.sessions_max; i++)
            free(control->sessions[i].writers);
    free(control->sessions);
    free(control->clients);
    kv_ring_destroy(control->answers);
    for (uint32_t i = 0; i < control->n_models; i++)
        free(control->models[i]);
}
