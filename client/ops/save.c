/* Save: every node of a session, or one, has what the session shares on disk.  A node is asked again and
 * again until it has, less and less often. */
#include "client/call.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/session.h"
#include "client/session_private.h"
#include "client/state.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>
#include <stdio.h>

enum {
    ASK_FIRST_US = 2000, /* a disk that is fast takes about as long */
    ASK_LAST_US = 50000,
};

/* What a node has said so far. */
struct asked {
    uint64_t since_us; /* 0: nothing */
    uint64_t wait_us;  /* until it is asked again */
    uint32_t wanted, saved;
};

struct save_part {
    bool is_of_id; /* of the session of that id, on one node */
    uint32_t node_index;
    struct kv_id128 session_id;
    struct asked asked[KV_ROW_NODES]; /* by position in the row; is_of_id: the first */
};
static_assert(sizeof(struct save_part) <= KVC_OP_STATE_BYTES, "an operation has room for it");

static struct save_part *save_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

static struct asked *asked_of(const struct kv_op *op, const struct kvc_node *node)
{
    struct save_part *part = save_of(op);

    return &part->asked[part->is_of_id ? 0 : kvc_row_position(&op->session->row, node)];
}

/* Returns the invalid field, or NULL. */
static const char *
reply_fault(const struct kv_op *op, const struct asked *asked, const Kvpb__SaveReply *reply)
{
    const uint32_t saved = reply->saved_tokens, shared = reply->shared_tokens;
    const uint32_t most = op->session != NULL ? op->session->tokens_max : KV_TOKENS_MAX;

    if (reply->since_us == 0 || (asked->since_us != 0 && reply->since_us != asked->since_us))
        return "since_us";
    /* Whoever asks for a session of its own asks only nodes with units. */
    if (op->session == NULL && saved == UINT32_MAX && shared == UINT32_MAX)
        return NULL;
    if (shared > most || shared % KV_BLOCK_TOKENS != 0)
        return "shared_tokens";
    return saved > shared || saved % KV_BLOCK_TOKENS != 0 ? "saved_tokens" : NULL;
}

static void ask(struct kv_op *op, struct kvc_node *node);

static void save_done(struct kvc_call *call,
                      kv_status_t status,
                      const ProtobufCMessage *message,
                      const char *detail)
{
    const Kvpb__SaveReply *reply = (const Kvpb__SaveReply *)message;
    struct kv_op *op = kvc_call_op_if_ok(call, status, detail);
    struct asked *asked;
    const char *fault;

    if (op == NULL)
        return;
    asked = asked_of(op, call->node);
    fault = reply_fault(op, asked, reply);
    if (fault != NULL) {
        kvc_op_fail(op, call->node, NULL, KV_CORRUPT, "reply: %s: does not match", fault);
        return;
    }
    /* What is shared later is not waited for; what is shared no more cannot be. */
    if (asked->since_us == 0 || reply->shared_tokens < asked->wanted)
        asked->wanted = reply->shared_tokens;
    asked->since_us = reply->since_us;
    asked->saved = reply->saved_tokens;
    if (asked->saved < asked->wanted) {
        asked->wait_us = asked->wait_us == 0 ? ASK_FIRST_US : 2 * asked->wait_us;
        if (asked->wait_us > ASK_LAST_US)
            asked->wait_us = ASK_LAST_US;
        ask(op, call->node);
    } else if (asked->saved < op->tokens) {
        op->tokens = asked->saved;
    }
}

static void ask(struct kv_op *op, struct kvc_node *node)
{
    struct kv_session *session = op->session;
    const struct asked *asked = asked_of(op, node);
    Kvpb__SaveRequest request = KVPB__SAVE_REQUEST__INIT;
    kv_status_t status;

    if (session != NULL) {
        request.session_index = kvc_session_on(session, node)->index;
        request.token = kvc_binary(&session->ticket.token);
        request.generation = session->generation;
    } else {
        request.session_id = kvc_binary(&save_of(op)->session_id);
    }
    request.since_us = asked->since_us;
    request.tokens = asked->wanted;
    if (node->version < KV_WIRE_VERSION_SAVE)
        status = KV_UNSUPPORTED;
    else if (asked->wait_us == 0)
        status =
            kvc_call_begin(node, &op->owner, session, KV_OP_SAVE, &request.base, save_done);
    else
        status = kvc_call_begin_later(node, &op->owner, session, KV_OP_SAVE, &request.base,
                                      op->client->loop.now_us + asked->wait_us, save_done);
    if (status != KV_OK)
        kvc_op_fail(op, node, NULL, status,
                    status == KV_UNSUPPORTED ? "the node's version does not save on request"
                                             : "cannot send the request");
}

/* How many nodes are asked, of one session's, or one. */
static uint32_t n_asked(const struct kv_session *session)
{
    if (session == NULL)
        return 1;
    return session->row.n_nodes < session->schema.n_units ? session->row.n_nodes
                                                          : session->schema.n_units;
}

static void start_save(struct kv_op *op)
{
    const struct kv_session *session = op->session;

    if (session == NULL) {
        ask(op, &op->client->nodes[save_of(op)->node_index]);
        return;
    }
    /* The others of the row have no units. */
    for (uint32_t i = 0; i < n_asked(session) && op->stage == KVC_STAGE_RUNNING; i++)
        ask(op, kvc_session_node(session, i));
}

/* Says how far it is, since a deadline says nothing of that. */
static void describe_save(const struct kv_op *op,
                          const struct kvc_request *request,
                          char *text,
                          size_t text_bytes)
{
    const struct save_part *part = save_of(op);
    const struct kv_session *session = op->session;
    char id[KVC_SESSION_TEXT];
    uint32_t least = UINT32_MAX, n_said = 0;

    (void)request;
    for (uint32_t i = 0; i < KV_ROW_NODES; i++) {
        n_said += part->asked[i].since_us != 0;
        if (part->asked[i].since_us != 0 && part->asked[i].saved < least)
            least = part->asked[i].saved;
    }
    if (n_said < n_asked(session))
        least = UINT32_MAX; /* what the others have is not known */
    kvc_session_text(session != NULL ? &session->ticket.session_id : &part->session_id, id);
    if (least == UINT32_MAX)
        snprintf(text, text_bytes, "session %s", id);
    else
        snprintf(text, text_bytes, "session %s, %u tokens saved", id, least);
}

static void ended_save(struct kv_op *op)
{
    if (op->status != KV_OK)
        op->tokens = 0;
}

static const struct kvc_op_type save_type = {
    .name = "save",
    .id = KV_OP_SAVE,
    .needs_current = true,
    .start = start_save,
    .ended = ended_save,
    .describe = describe_save,
};

/* An operator's has no session. */
static const struct kvc_op_type save_id_type = {
    .name = "save",
    .id = KV_OP_SAVE,
    .start = start_save,
    .ended = ended_save,
    .describe = describe_save,
};

kv_status_t
kv_save_begin(struct kv_session *session, uint32_t deadline_ms, struct kv_op **ret_op)
{
    KVC_ENTER(session->client);
    struct kv_op *op;
    kv_status_t status = kvc_op_begin_on_row(session, &save_type, deadline_ms, &op);

    if (status != KV_OK)
        return status;
    op->tokens = session->tokens_max / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
    return kvc_op_submit(op, ret_op);
}

kv_status_t kv_save_id_begin(struct kv_client *client,
                             uint32_t node,
                             const struct kv_id128 *session_id,
                             uint32_t deadline_ms,
                             struct kv_op **ret_op)
{
    KVC_ENTER(client);
    kv_status_t status;
    struct kv_op *op;

    if (node >= client->n_nodes)
        return kvc_set_error(&client->loop, KV_INVALID, "save: node %u", node);
    status = kvc_op_begin(client, &save_id_type, NULL, NULL, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    *save_of(op) =
        (struct save_part){.is_of_id = true, .node_index = node, .session_id = *session_id};
    op->tokens = UINT32_MAX;
    kvc_op_require_node(op, node);
    return kvc_op_submit(op, ret_op);
}
