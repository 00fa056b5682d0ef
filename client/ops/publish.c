/* Publish: every node of a session keeps its part of the session's blocks under their names. */
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
#include <stdlib.h>
#include <string.h>

enum {
    WITH_TOKENS_MAX =
        1024, /* blocks of a publish that has their tokens: a control message's limit */
};

struct publish_part {
    uint32_t first_block, n_names;
    struct kv_id128 *names; /* (n_names) */
    uint32_t *tokens;       /* (n_names, KV_BLOCK_TOKENS), or NULL */
    void *memory;           /* of both */
};
static_assert(sizeof(struct publish_part) <= KVC_OP_STATE_BYTES,
              "an operation has room for it");

static struct publish_part *publish_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

/* The token behind the last block that has a name here. */
static uint64_t end_of(const struct publish_part *part)
{
    return (part->first_block + part->n_names) * (uint64_t)KV_BLOCK_TOKENS;
}

static void publish_done(struct kvc_call *call,
                         kv_status_t status,
                         const ProtobufCMessage *message,
                         const char *detail)
{
    const Kvpb__PublishReply *reply = (const Kvpb__PublishReply *)message;
    struct kv_op *op = kvc_call_op_if_ok(call, status, detail);

    if (op == NULL)
        return;
    if (kvc_row_position(&op->session->row, call->node) >= op->session->schema.n_units)
        return; /* it has no units of the session */
    if (reply->tokens > end_of(publish_of(op)) || reply->tokens % KV_BLOCK_TOKENS != 0)
        kvc_op_fail(op, call->node, NULL, KV_CORRUPT, "%u tokens published", reply->tokens);
    else if (reply->tokens < op->tokens)
        op->tokens = reply->tokens;
}

static void start_publish(struct kv_op *op)
{
    struct kv_session *session = op->session;
    const struct publish_part *part = publish_of(op);
    Kvpb__PublishRequest request = KVPB__PUBLISH_REQUEST__INIT;

    request.token = kvc_binary(&session->ticket.token);
    request.generation = session->generation;
    request.first_block = part->first_block;
    request.block_names.data = (uint8_t *)part->names;
    request.block_names.len = part->n_names * sizeof(part->names[0]);
    if (part->tokens != NULL) {
        request.tokens.data = (uint8_t *)part->tokens;
        request.tokens.len = (size_t)part->n_names * KV_BLOCK_TOKENS * sizeof(part->tokens[0]);
    }
    for (uint32_t i = 0; i < session->row.n_nodes && op->stage == KVC_STAGE_RUNNING; i++) {
        struct kvc_node *node = kvc_session_node(session, i);
        kv_status_t status;

        /* It keeps nothing by name. */
        if (node->version < KV_WIRE_VERSION_PREFIXES) {
            op->tokens = 0;
            continue;
        }
        request.session_index = session->nodes[i].index;
        status = kvc_call_begin(node, &op->owner, session, KV_OP_PUBLISH, &request.base,
                                publish_done);
        if (status != KV_OK)
            kvc_op_fail(op, node, NULL, status, "cannot send publish");
    }
}

static void ended_publish(struct kv_op *op)
{
    /* Others may have these rows from now on, also if it is not known: what a truncate puts in
     * their place is another writer's. */
    struct publish_part *part = publish_of(op);
    const uint32_t end = (uint32_t)end_of(part);

    if (op->session->shared_tokens < end)
        op->session->shared_tokens =
            end < op->session->tokens_max ? end : op->session->tokens_max;
    free(part->memory);
    part->memory = NULL;
}

static const struct kvc_op_type publish_type = {
    .name = "publish",
    .id = KV_OP_PUBLISH,
    .needs_current = true,
    .start = start_publish,
    .ended = ended_publish,
    .describe = kvc_session_describe_op,
};

/* Keeps a copy of the names and tokens.  Returns false if out of memory. */
static bool keep(struct publish_part *part, const struct kv_publish *publish)
{
    const size_t names_bytes = publish->n_names * sizeof(publish->names[0]);
    const size_t tokens_bytes =
        publish->tokens != NULL
            ? (size_t)publish->n_names * KV_BLOCK_TOKENS * sizeof(publish->tokens[0])
            : 0;

    part->first_block = publish->first_block;
    part->n_names = publish->n_names;
    part->memory = malloc(names_bytes + tokens_bytes);
    if (part->memory == NULL)
        return false;
    part->names = part->memory;
    memcpy(part->names, publish->names, names_bytes);
    if (publish->tokens != NULL) {
        part->tokens = (uint32_t *)(part->names + publish->n_names);
        memcpy(part->tokens, publish->tokens, tokens_bytes);
    }
    return true;
}

/* Whether sessions whose prompts begin with that block are looked for where this one is. */
static bool is_placed_by(const struct kv_session *session, const struct kv_id128 *name)
{
    const uint64_t prompt_root = kv_placement_prompt_root(name);

    for (uint32_t row = 0; row < KV_ROOT_ROWS_MAX; row++)
        if (kv_placement_branch_root(prompt_root, row, KV_ROOT_ROWS_MAX) ==
            session->ticket.root)
            return true;
    return false;
}

kv_status_t kv_publish_begin(struct kv_session *session,
                             const struct kv_publish *publish,
                             uint32_t deadline_ms,
                             struct kv_op **ret_op)
{
    KVC_ENTER(session->client);
    const uint32_t blocks_max = session->tokens_max / KV_BLOCK_TOKENS;
    const uint32_t most = publish->tokens != NULL ? WITH_TOKENS_MAX : KV_WIRE_NAMES_MAX;
    struct kvc_loop *loop = &session->client->loop;
    struct kv_op *op;
    kv_status_t status;

    if (publish->n_names == 0 || publish->n_names > most || publish->first_block > blocks_max ||
        publish->n_names > blocks_max - publish->first_block)
        return kvc_set_error(loop, KV_INVALID,
                             "publish: blocks: %u from %u on: at most %u at once, %u in all",
                             publish->n_names, publish->first_block, most, blocks_max);
    if (publish->first_block == 0 && !is_placed_by(session, &publish->names[0]))
        return kvc_set_error(loop, KV_UNSUPPORTED,
                             "publish: the session was opened without its first block's name");
    status = kvc_op_begin_on_row(session, &publish_type, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    op->tokens = session->tokens_max / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
    if (!keep(publish_of(op), publish)) {
        kvc_op_discard(op);
        return kvc_set_error(loop, KV_NO_MEMORY, "publish: out of memory");
    }
    return kvc_op_submit(op, ret_op);
}
