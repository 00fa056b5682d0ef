/* call.c - the life of a control call: it is created, sends commands to the data threads,
 * collects what they return, and replies, which ends it.
 */
#include "kvserver/store/control/ops_private.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* The reply when there is no memory for the real one: the client is told to repeat the request.
 * What the call has already done stays done, and the repeated request reports it.  Every reply
 * has its outcome in field 1, so the smallest reply type serves for all. */
static void reply_busy(kvs_node_reply_fn reply, void *arg)
{
    Kvpb__CloseReply message = KVPB__CLOSE_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    uint8_t packed[64];

    outcome.status = KV_BUSY;
    outcome.detail = "out of memory: reply";
    message.outcome = &outcome;
    assert(kvpb__close_reply__get_packed_size(&message) <= sizeof(packed));
    reply(arg, packed, kvpb__close_reply__pack(&message, packed));
}

struct kvs_control_call *kvs_call_create(struct kvs_control *control,
                                         enum kv_op_id op,
                                         kvs_node_reply_fn reply,
                                         void *arg)
{
    /* A command is written when it is sent: clearing those of 128 threads for a call that needs
     * one would take longer than the call. */
    struct kvs_control_call *call =
        malloc(sizeof(*call) + control->n_threads * sizeof(call->commands[0]));

    if (call == NULL) {
        if (reply != NULL)
            reply_busy(reply, arg);
        return NULL;
    }
    *call = (struct kvs_control_call){.control = control, .op = op, .reply = reply, .arg = arg};
    call->list_next = control->calls;
    call->list_link = &control->calls;
    if (call->list_next != NULL)
        call->list_next->list_link = &call->list_next;
    control->calls = call;
    control->n_calls++;
    return call;
}

void kvs_control_call_end(struct kvs_control_call *call)
{
    *call->list_link = call->list_next;
    if (call->list_next != NULL)
        call->list_next->list_link = call->list_link;
    call->control->n_calls--;
    kvs_call_drop_prefixes(call);
    free(call->address);
    free(call->record);
    free(call->writers);
    free(call->layer_tokens);
    free(call->sizes);
    free(call->object_page);
    free(call);
}

struct kvs_control_call *kvs_control_call_internal(struct kvs_control *control,
                                                   enum kv_op_id op)
{
    return kvs_call_create(control, op, NULL, NULL);
}

void *kvs_call_unpack(struct kvs_control_call *call, const ProtobufCMessageDescriptor *type)
{
    ProtobufCMessage *message =
        protobuf_c_message_unpack(type, NULL, call->packed_bytes, call->packed);

    if (message == NULL)
        kvs_control_refuse(call, KV_INVALID, "%s: malformed request", kvs_call_name(call));
    return message;
}

void kvs_control_reply(struct kvs_control_call *call, const ProtobufCMessage *message)
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
        kv_histogram_add(&call->control->stats.ops[call->op].us,
                         kv_clock_now(call->control->config.clock) - call->begin_us);
    }
    kvs_control_call_end(call);
}

static void reply_status(struct kvs_control_call *call, kv_status_t status, char *detail)
{
    Kvpb__CloseReply reply = KVPB__CLOSE_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;

    outcome.status = status;
    outcome.detail = detail;
    reply.outcome = &outcome;
    kvs_control_reply(call, &reply.base);
}

void kvs_call_reply_ok(struct kvs_control_call *call)
{
    char nothing[] = "";

    reply_status(call, KV_OK, nothing);
}

void kvs_control_refuse(struct kvs_control_call *call,
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
    kvs_count(&call->control->stats.control_refused, 1);
    kvs_count(&call->control->stats.ops[call->op].errors, 1);
    kvs_count_error(&call->control->stats, status);
    reply_status(call, status, detail);
}

/* Sends the command to n data threads, from `first` on. */
static void send_commands(struct kvs_control_call *call,
                          uint32_t first,
                          uint32_t n,
                          const struct kvs_command *command,
                          void (*next)(struct kvs_control_call *call))
{
    struct kvs_control *control = call->control;

    call->next = next;
    call->status = KV_OK;
    call->n_pending = 1; /* not zero before all commands are sent */
    for (uint32_t i = 0; i < n; i++) {
        struct kvs_command *copy = &call->commands[i];
        struct kvs_shard *shard = &control->shard[(first + i) % control->n_threads];

        *copy = *command;
        copy->thread = shard->index;
        copy->owner = call;
        copy->bytes = 0;
        copy->has_units = false;
        kvs_shard_give(shard, copy);
        call->n_pending++;
    }
    if (--call->n_pending == 0)
        call->next(call);
}

void kvs_control_broadcast(struct kvs_control_call *call,
                           const struct kvs_command *command,
                           void (*next)(struct kvs_control_call *call))
{
    send_commands(call, 0, call->control->n_threads, command, next);
}

void kvs_control_broadcast_session(struct kvs_control_call *call,
                                   const struct kvs_session *session,
                                   const struct kvs_command *command,
                                   void (*next)(struct kvs_control_call *call))
{
    send_commands(call, session->first_thread, session->n_threads, command, next);
}

void kvs_control_send(struct kvs_control_call *call,
                      uint32_t thread,
                      const struct kvs_command *command,
                      void (*next)(struct kvs_control_call *call))
{
    send_commands(call, thread, 1, command, next);
}

void kvs_call_command_done(struct kvs_control_call *call, const struct kvs_command *command)
{
    if (command->status != KV_OK && call->status == KV_OK)
        call->status = command->status;
    if (command->has_units) {
        call->has_units = true;
        if (command->tokens < call->tokens)
            call->tokens = command->tokens;
    }
    call->bytes += command->bytes;
    if (--call->n_pending == 0)
        call->next(call);
}
