#include "client/ops/length.h"

#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/node.h"
#include "client/op.h"
#include "client/session.h"
#include "client/session_private.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>

struct length_part {
    uint32_t layer_tokens[KV_LAYERS_MAX];
};
static_assert(sizeof(struct length_part) <= KVC_OP_STATE_BYTES, "an operation has room for it");

static struct length_part *length_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

void kvc_ask_lengths(struct kv_op *op,
                     struct kv_session *session,
                     bool with_layers,
                     kvc_call_done_fn done)
{
    Kvpb__SessionRequest request = KVPB__SESSION_REQUEST__INIT;

    request.token = kvc_binary(&session->ticket.token);
    for (uint32_t i = 0; op->stage == KVC_STAGE_RUNNING && i < session->row.n_nodes; i++) {
        struct kvc_node *node = kvc_session_node(session, i);
        kv_status_t status;

        request.session_index = session->nodes[i].index;
        request.with_layers = with_layers && node->version >= KV_WIRE_VERSION_PREFIXES;
        status = kvc_call_begin(node, &op->owner, session, KV_OP_SESSION, &request.base, done);
        if (status != KV_OK)
            kvc_op_fail(op, node, NULL, status, "cannot send the request");
    }
}

bool kvc_take_length(const struct kvc_call *call,
                     kv_status_t status,
                     const ProtobufCMessage *message,
                     const char *detail,
                     uint32_t *least)
{
    const Kvpb__SessionReply *reply = (const Kvpb__SessionReply *)message;
    struct kv_op *op = kvc_call_op_if_ok(call, status, detail);

    if (op == NULL)
        return false;
    if (reply->generation != op->session->generation) {
        kvc_op_fail(op, call->node, NULL, KV_STALE,
                    "node is at generation %u, session at %u: resume the session",
                    reply->generation, op->session->generation);
        return false;
    }
    if (reply->tokens < *least)
        *least = reply->tokens;
    return true;
}

/* ---- the operation ----------------------------------------------------------------------- */

static void length_done(struct kvc_call *call,
                        kv_status_t status,
                        const ProtobufCMessage *message,
                        const char *detail)
{
    const Kvpb__SessionReply *reply = (const Kvpb__SessionReply *)message;
    struct kv_op *op = kvc_call_op(call);

    if (op == NULL || !kvc_take_length(call, status, message, detail, &op->tokens))
        return;
    /* A node that does not tell the lengths of layers tells what all of its units have. */
    for (uint32_t i = 0; i < op->session->schema.n_layers; i++) {
        const uint32_t tokens =
            i < reply->n_layer_tokens ? reply->layer_tokens[i] : reply->tokens;

        if (tokens < length_of(op)->layer_tokens[i])
            length_of(op)->layer_tokens[i] = tokens;
    }
}

static void start_length(struct kv_op *op)
{
    for (uint32_t i = 0; i < op->session->schema.n_layers; i++)
        length_of(op)->layer_tokens[i] = op->session->tokens_max;
    kvc_ask_lengths(op, op->session, true, length_done);
}

static const struct kvc_op_type length_type = {
    .name = "length",
    .id = KV_OP_SESSION,
    .needs_current = true,
    .start = start_length,
    .describe = kvc_session_describe_op,
};

kv_status_t
kv_length_begin(struct kv_session *session, uint32_t deadline_ms, struct kv_op **ret_op)
{
    KVC_ENTER(session->client);
    struct kv_op *op;
    kv_status_t status = kvc_op_begin_on_row(session, &length_type, deadline_ms, &op);

    if (status != KV_OK)
        return status;
    op->tokens = session->tokens_max;
    return kvc_op_submit(op, ret_op);
}

uint32_t kv_op_layer_tokens(const struct kv_op *op, uint32_t layer)
{
    KVC_LOOK(op->client);

    return op->type == &length_type && op->status == KV_OK && layer < KV_LAYERS_MAX
               ? length_of(op)->layer_tokens[layer]
               : 0;
}
