#include "client/call.h"

#include "client/control.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/owner.h"
#include "client/peer.h"
#include "client/session.h"
#include "client/state.h"
#include "kvserver/base/writers.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    BACKOFF_MIN_US = 200,
    BACKOFF_MAX_US = 20000,
    TEXT_BYTES = 256,
};

/* The first fields of every reply. */
struct any_reply {
    ProtobufCMessage base;
    Kvpb__Outcome *outcome;
};

static const ProtobufCMessageDescriptor *reply_descriptor(enum kv_op_id id)
{
    switch (id) {
    case KV_OP_HELLO:
        return &kvpb__hello_reply__descriptor;
    case KV_OP_GOODBYE:
        return &kvpb__goodbye_reply__descriptor;
    case KV_OP_MODEL:
        return &kvpb__model_reply__descriptor;
    case KV_OP_OPEN:
    case KV_OP_RESUME:
    case KV_OP_FORK:
    case KV_OP_TRUNCATE:
        return &kvpb__open_reply__descriptor;
    case KV_OP_CLOSE:
        return &kvpb__close_reply__descriptor;
    case KV_OP_RENEW:
        return &kvpb__renew_reply__descriptor;
    case KV_OP_SESSION:
        return &kvpb__session_reply__descriptor;
    case KV_OP_PUBLISH:
        return &kvpb__publish_reply__descriptor;
    case KV_OP_MATCH:
        return &kvpb__match_reply__descriptor;
    case KV_OP_TABLE:
        return &kvpb__table_reply__descriptor;
    case KV_OP_PREFIX:
        return &kvpb__prefix_reply__descriptor;
    case KV_OP_VERIFY:
        return &kvpb__verify_reply__descriptor;
    case KV_OP_SAVE:
        return &kvpb__save_reply__descriptor;
    case KV_OP_OBJECTS:
        return &kvpb__objects_reply__descriptor;
    case KV_OP_DRAIN:
        return &kvpb__drain_reply__descriptor;
    default:
        return NULL;
    }
}

/* `tokens` of a node without units of the session. */
#define NO_UNITS UINT32_MAX

static bool has_units(const struct kv_session *session, const struct kvc_node *node)
{
    return kvc_row_position(&session->row, node) < session->schema.n_units;
}

/* Checks the writers of a session's rows, for struct kv_writers. */
static const char *writers_fault(const Kvpb__OpenReply *reply)
{
    uint32_t end = 0;
    uint64_t writer = 0;

    if (reply->n_writers > KV_WRITER_RUNS_MAX)
        return "n_writers";
    for (size_t i = 0; i < reply->n_writers; i++) {
        const Kvpb__WriterRun *run = reply->writers[i];

        if (run->writer == 0 || run->writer == writer || run->end <= end)
            return "writers";
        writer = run->writer;
        end = run->end;
    }
    return end != UINT32_MAX ? "writers: end" : NULL;
}

/* Checks the reply of an open, a resume or a lifecycle operation.  Returns the invalid field,
 * or NULL. */
static const char *opened_fault(const struct kvc_call *call, const Kvpb__OpenReply *reply)
{
    const struct kvc_owner *owner = call->id == KV_OP_OPEN ? call->owner : NULL;
    uint32_t lease_max = UINT32_MAX, tokens_max = KV_TOKENS_MAX;

    if (owner != NULL && owner->lease_wanted_ms > 0)
        lease_max = owner->lease_wanted_ms;
    if (owner != NULL && owner->tokens_max_wanted > 0)
        tokens_max = owner->tokens_max_wanted;
    if (reply->lease_ms == 0 || reply->lease_ms > lease_max)
        return "lease_ms";
    if (reply->tokens_max == 0 || reply->tokens_max > tokens_max)
        return "tokens_max";
    if (reply->tokens > reply->tokens_max && reply->tokens != NO_UNITS)
        return "tokens";
    for (size_t i = 0; i < reply->n_recent; i++) {
        const Kvpb__Lifecycle *entry = reply->recent[i];

        /* The last entry led to the session's generation, each other one to the next entry's.
         */
        if (entry->generation != reply->generation - (reply->n_recent - i))
            return "recent: generation";
        if (entry->tokens > reply->tokens_max)
            return "recent: tokens";
        if (entry->writer == 0)
            return "recent: writer";
    }
    if (reply->shared_tokens > reply->tokens_max)
        return "shared_tokens";
    return call->id == KV_OP_RESUME || reply->n_writers > 0 ? writers_fault(reply) : NULL;
}

static const char *renewed_fault(const struct kvc_call *call, const Kvpb__RenewReply *reply)
{
    uint32_t wanted_ms = call->owner != NULL ? call->owner->lease_wanted_ms : 0;
    uint32_t most_ms = wanted_ms > 0 ? wanted_ms : UINT32_MAX;

    return reply->lease_ms == 0 || reply->lease_ms > most_ms ? "lease_ms" : NULL;
}

/* Checks the lengths of the layers: none, or one each, of which the least is the session's. */
static bool are_layer_tokens(const struct kv_session *session, const Kvpb__SessionReply *reply)
{
    uint32_t least = NO_UNITS;

    if (reply->n_layer_tokens == 0)
        return true;
    for (size_t i = 0; i < reply->n_layer_tokens; i++) {
        const uint32_t tokens = reply->layer_tokens[i];

        if (tokens > session->tokens_max && tokens != NO_UNITS)
            return false;
        least = tokens < least ? tokens : least;
    }
    return reply->n_layer_tokens == session->schema.n_layers && least == reply->tokens;
}

/* A node's generation never decreases. */
static const char *looked_fault(const struct kvc_call *call, const Kvpb__SessionReply *reply)
{
    const struct kv_session *session = call->session;

    if (session == NULL)
        return NULL;
    if (reply->tokens > session->tokens_max &&
        (reply->tokens != NO_UNITS || has_units(session, call->node)))
        return "tokens";
    if (!are_layer_tokens(session, reply))
        return "layer_tokens";
    return reply->generation < kvc_session_on(call->session, call->node)->generation
               ? "generation"
               : NULL;
}

static const char *table_fault(const Kvpb__TableReply *reply)
{
    for (size_t i = 0; i < reply->n_rows; i++) {
        const Kvpb__Row *row = reply->rows[i];

        if (row->n_cells != reply->n_columns)
            return "columns of a row";
        for (size_t j = 0; j < row->n_cells; j++)
            if (row->cells[j]->value_case == KVPB__CELL__VALUE_NUMBER &&
                !isfinite(row->cells[j]->number))
                return "a number of a row";
    }
    return NULL;
}

/* Returns the invalid field of a reply, or NULL.  Hello's fields are checked in node.c. */
static const char *reply_fault(const struct kvc_call *call, const ProtobufCMessage *reply)
{
    switch (call->id) {
    case KV_OP_OPEN:
    case KV_OP_RESUME:
    case KV_OP_FORK:
    case KV_OP_TRUNCATE:
        return opened_fault(call, (const Kvpb__OpenReply *)reply);
    case KV_OP_RENEW:
        return renewed_fault(call, (const Kvpb__RenewReply *)reply);
    case KV_OP_SESSION:
        return looked_fault(call, (const Kvpb__SessionReply *)reply);
    case KV_OP_TABLE:
        return table_fault((const Kvpb__TableReply *)reply);
    default:
        return NULL;
    }
}

static void drop(struct kvc_call *call)
{
    kvc_due_set(&call->client->resends, &call->resend, KVC_NEVER);
    kvc_list_remove(&call->of_client);
    kvc_list_remove(&call->of_owner);
    kvc_list_remove(&call->of_session);
    free(call);
}

static void deliver(struct kvc_call *call,
                    kv_status_t status,
                    const ProtobufCMessage *reply,
                    const char *detail)
{
    if (call->owner != NULL) {
        call->owner->n_calls--;
        call->owner->arrived_us = call->client->loop.now_us;
    }
    /* The call is still in the list, so ending the operation or the session clears its
     * pointers. */
    call->done(call, status, reply, detail != NULL ? detail : "");
    if (call->owner != NULL)
        call->owner->ops->done(call->owner);
    drop(call);
}

static void carried(void *arg,
                    kv_status_t status,
                    const uint8_t *packed,
                    size_t packed_bytes,
                    const char *detail)
{
    struct kvc_call *call = arg;
    struct kv_client *client = call->client;
    ProtobufCMessage *reply = NULL;
    char text[TEXT_BYTES];

    call->is_out = false;
    if (--call->node->n_calls == 0)
        kvc_list_remove(&call->node->of_calling);
    client->loop.must_dispatch = true;
    if (client->loop.is_closing) {
        drop(call);
        return;
    }
    if (status == KV_OK) {
        const Kvpb__Outcome *outcome = NULL;

        reply =
            protobuf_c_message_unpack(reply_descriptor(call->id), NULL, packed_bytes, packed);
        if (reply != NULL)
            outcome = ((const struct any_reply *)reply)->outcome;
        status = outcome != NULL ? (kv_status_t)outcome->status : KV_CORRUPT;
        detail = outcome != NULL ? outcome->detail : "malformed reply";
    }
    if (status != KV_OK)
        status = kvc_peer_status(status);
    kvc_peer_text(text, sizeof(text), detail != NULL ? detail : "",
                  detail != NULL ? strlen(detail) : 0);
    if (status == KV_OK) {
        const char *fault = reply_fault(call, reply);

        if (fault != NULL)
            status =
                kvc_reply_refuse(text, sizeof(text), "%s: does not match the request", fault);
    }
    if (status == KV_BUSY && client->loop.now_us + call->retry_after_us < call->deadline_us) {
        const uint64_t at_us = client->loop.now_us + call->retry_after_us;

        kvc_due_set(&client->resends, &call->resend, at_us);
        call->retry_after_us *= 2;
        if (call->retry_after_us > BACKOFF_MAX_US)
            call->retry_after_us = BACKOFF_MAX_US;
        kvc_loop_set_timer(&client->loop, at_us);
    } else {
        deliver(call, status, reply, text);
    }
    if (reply != NULL)
        protobuf_c_message_free_unpacked(reply, NULL);
}

static kv_status_t send(struct kvc_call *call)
{
    struct kv_client *client = call->client;
    struct kvc_control *control = call->node->control;
    uint64_t left = kvc_loop_left_us(&client->loop, call->deadline_us);
    kv_status_t status;

    if (control == NULL)
        return KV_UNREACHABLE;
    status = control->transport->call(control, call->id, call->packed, call->packed_bytes, left,
                                      carried, call);
    if (status < KV_OK)
        return status;
    call->is_out = true;
    if (call->node->n_calls++ == 0)
        kvc_list_append(&client->calling, &call->node->of_calling);
    if (call->owner != NULL && !call->has_left)
        call->owner->sent_us = client->loop.now_us;
    call->has_left = true;
    return KV_OK;
}

/* Makes a call that is in no list.  Fails with KV_TOO_LARGE and KV_NO_MEMORY. */
static kv_status_t make(struct kvc_node *node,
                        struct kvc_owner *owner,
                        struct kv_session *session,
                        enum kv_op_id id,
                        const struct ProtobufCMessage *request,
                        uint64_t deadline_us,
                        kvc_call_done_fn done,
                        struct kvc_call **ret_call)
{
    struct kv_client *client = node->client;
    size_t bytes = protobuf_c_message_get_packed_size(request);
    struct kvc_call *call;

    if (bytes > KV_WIRE_CONTROL_MAX)
        return KV_TOO_LARGE;
    call = calloc(1, sizeof(*call) + bytes);
    if (call == NULL)
        return KV_NO_MEMORY;
    call->client = client;
    call->node = node;
    call->owner = owner;
    call->session = session;
    call->done = done;
    call->id = id;
    kvc_list_init(&call->of_owner);
    kvc_list_init(&call->of_session);
    kvc_due_init(&call->resend);
    call->deadline_us = deadline_us;
    call->retry_after_us = BACKOFF_MIN_US;
    call->packed_bytes = protobuf_c_message_pack(request, call->packed);
    *ret_call = call;
    return KV_OK;
}

static void enlist(struct kvc_call *call)
{
    kvc_list_append(&call->client->calls, &call->of_client);
    if (call->owner != NULL) {
        kvc_list_append(&call->owner->calls, &call->of_owner);
        call->owner->n_calls++;
    }
    if (call->session != NULL)
        kvc_list_append(&call->session->calls, &call->of_session);
}

kv_status_t kvc_call_begin_until(struct kvc_node *node,
                                 struct kvc_owner *owner,
                                 struct kv_session *session,
                                 enum kv_op_id id,
                                 const struct ProtobufCMessage *request,
                                 uint64_t deadline_us,
                                 kvc_call_done_fn done)
{
    struct kvc_call *call;
    kv_status_t status = make(node, owner, session, id, request, deadline_us, done, &call);

    if (status != KV_OK)
        return status;
    status = send(call);
    if (status != KV_OK) {
        free(call);
        return status;
    }
    enlist(call);
    return KV_OK;
}

kv_status_t kvc_call_begin_later(struct kvc_node *node,
                                 struct kvc_owner *owner,
                                 struct kv_session *session,
                                 enum kv_op_id id,
                                 const struct ProtobufCMessage *request,
                                 uint64_t at_us,
                                 kvc_call_done_fn done)
{
    struct kv_client *client = node->client;
    struct kvc_call *call;
    kv_status_t status;

    if (node->control == NULL)
        return KV_UNREACHABLE;
    status = make(node, owner, session, id, request, owner->deadline_us, done, &call);
    if (status != KV_OK)
        return status;
    enlist(call);
    kvc_due_set(&client->resends, &call->resend, at_us);
    kvc_loop_set_timer(&client->loop, at_us);
    return KV_OK;
}

kv_status_t kvc_call_begin(struct kvc_node *node,
                           struct kvc_owner *owner,
                           struct kv_session *session,
                           enum kv_op_id id,
                           const struct ProtobufCMessage *request,
                           kvc_call_done_fn done)
{
    const struct kv_client *client = node->client;

    return kvc_call_begin_until(
        node, owner, session, id, request,
        owner != NULL ? owner->deadline_us : client->loop.now_us + client->deadline_us, done);
}

void kvc_calls_timers(struct kv_client *client)
{
    while (kvc_dues_first_us(&client->resends) <= client->loop.now_us) {
        struct kvc_call *call = KVC_DUE_ENTRY(client->resends.first, struct kvc_call, resend);

        kvc_due_set(&client->resends, &call->resend, KVC_NEVER);
        kv_status_t status = send(call);
        if (status != KV_OK)
            deliver(call, status, NULL, "cannot be resent");
    }
    kvc_loop_set_timer(&client->loop, kvc_dues_first_us(&client->resends));
}

void kvc_calls_lose(struct kvc_node *node)
{
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &node->client->calls)
    {
        struct kvc_call *call = KVC_LIST_ENTRY(link, struct kvc_call, of_client);

        if (call->node == node && !call->is_out)
            deliver(call, KV_UNREACHABLE, NULL, "connection lost");
    }
}

void kvc_calls_disown(struct kvc_owner *owner)
{
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &owner->calls)
    {
        KVC_LIST_ENTRY(link, struct kvc_call, of_owner)->owner = NULL;
        kvc_list_remove(link);
    }
}

void kvc_calls_forget_session(struct kv_session *session)
{
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &session->calls)
    {
        KVC_LIST_ENTRY(link, struct kvc_call, of_session)->session = NULL;
        kvc_list_remove(link);
    }
}
