/* Close and renew: operations that send the same request to all nodes of a session. */
#include "client/call.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/list.h"
#include "client/node.h"
#include "client/op.h"
#include "client/session.h"
#include "client/session_lease.h"
#include "client/session_private.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

/* ---- close ------------------------------------------------------------------------------- */

static void close_done(struct kvc_call *call,
                       kv_status_t status,
                       const ProtobufCMessage *message,
                       const char *detail)
{
    const struct kvc_node *node = call->node;

    (void)message;
    if (kvc_call_op(call) == NULL || status == KV_OK)
        return;
    /* A session that does not exist is closed; its index may belong to another one. */
    if (status == KV_NOT_FOUND ||
        kvc_session_on(kvc_call_op(call)->session, node)->incarnation != node->incarnation)
        return;
    kvc_op_record_error(kvc_call_op(call), node, status, detail);
}

/* Sends the same request to every required node: close or renew. */
static void ask_all(struct kv_op *op, kvc_call_done_fn done)
{
    struct kv_session *session = op->session;
    Kvpb__CloseRequest close_request = KVPB__CLOSE_REQUEST__INIT;
    Kvpb__RenewRequest renew_request = KVPB__RENEW_REQUEST__INIT;

    for (uint32_t i = 0; i < session->row.n_nodes && op->stage == KVC_STAGE_RUNNING; i++) {
        struct kvc_node *node = kvc_session_node(session, i);
        uint32_t index = session->nodes[i].index;
        kv_status_t status;

        if (!kvc_op_requires(op, node->index))
            continue;
        close_request.session_index = renew_request.session_index = index;
        close_request.token = renew_request.token = kvc_binary(&session->ticket.token);
        renew_request.lease_ms = op->owner.lease_wanted_ms;
        status = kvc_call_begin(
            node, &op->owner, session, op->type->id,
            op->type->id == KV_OP_CLOSE ? &close_request.base : &renew_request.base, done);
        if (status != KV_OK)
            kvc_op_record_error(op, node, status, "cannot send the request");
    }
}

static void start_close(struct kv_op *op)
{
    ask_all(op, close_done);
}

static void ended_close(struct kv_op *op)
{
    if (op->status == KV_OK) {
        op->session->is_closed = true;
        kvc_session_unleased(op->session);
        /* What was begun behind it has nothing to work on. */
        while (!kvc_list_empty(&op->session->ops)) {
            struct kv_op *late =
                KVC_LIST_ENTRY(op->session->ops.next, struct kv_op, of_session);

            kvc_op_fail(late, NULL, NULL, KV_NOT_FOUND, "the session is closed");
        }
    }
}

static const struct kvc_op_type close_type = {
    .name = "close",
    .id = KV_OP_CLOSE,
    .is_exclusive = true,
    .is_best_effort = true,
    .start = start_close,
    .ended = ended_close,
    .describe = kvc_session_describe_op,
};

kv_status_t
kv_close_begin(struct kv_session *session, uint32_t deadline_ms, struct kv_op **ret_op)
{
    KVC_ENTER(session->client);
    struct kv_op *op;
    kv_status_t status = kvc_op_begin_on_row(session, &close_type, deadline_ms, &op);

    if (status != KV_OK)
        return status;
    return kvc_op_submit(op, ret_op);
}

/* ---- renew ------------------------------------------------------------------------------- */

static void renew_done(struct kvc_call *call,
                       kv_status_t status,
                       const ProtobufCMessage *message,
                       const char *detail)
{
    const Kvpb__RenewReply *reply = (const Kvpb__RenewReply *)message;
    struct kv_session *session = call->session;

    if (kvc_call_op(call) == NULL || session == NULL)
        return;
    if (status != KV_OK)
        kvc_op_record_error(kvc_call_op(call), call->node, status, detail);
    else if (reply->lease_ms > 0 && (kvc_call_op(call)->lease_ms == 0 ||
                                     reply->lease_ms < kvc_call_op(call)->lease_ms))
        kvc_call_op(call)->lease_ms = reply->lease_ms;
}

static void start_renew(struct kv_op *op)
{
    ask_all(op, renew_done);
}

static void ended_renew(struct kv_op *op)
{
    struct kv_session *session = op->session;

    if (op->status == KV_OK && op->lease_ms > 0) {
        session->lease_ms = op->lease_ms;
        kvc_session_leased(session);
    }
}

static const struct kvc_op_type renew_type = {
    .name = "renew",
    .id = KV_OP_RENEW,
    .start = start_renew,
    .ended = ended_renew,
    .describe = kvc_session_describe_op,
};

kv_status_t kv_renew_begin(struct kv_session *session,
                           uint32_t lease_ms,
                           uint32_t deadline_ms,
                           struct kv_op **ret_op)
{
    KVC_ENTER(session->client);
    struct kv_op *op;
    kv_status_t status = kvc_op_begin_on_row(session, &renew_type, deadline_ms, &op);

    if (status != KV_OK)
        return status;
    op->owner.lease_wanted_ms = lease_ms;
    return kvc_op_submit(op, ret_op);
}
