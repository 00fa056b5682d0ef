/* What a client says of prefixes that nodes keep: pin, unpin, evict, hint. */
#include "client/call.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/session_private.h"
#include "client/state.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>

struct prefix_part {
    enum kv_prefix_verb verb;
    uint32_t for_ms;
    bool has_name, has_session;
    struct kv_id128 name, session_id;
    uint64_t n_blocks; /* the most that a node has found */
};
static_assert(sizeof(struct prefix_part) <= KVC_OP_STATE_BYTES, "an operation has room for it");

static struct prefix_part *prefix_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

static void prefix_done(struct kvc_call *call,
                        kv_status_t status,
                        const ProtobufCMessage *message,
                        const char *detail)
{
    const Kvpb__PrefixReply *reply = (const Kvpb__PrefixReply *)message;
    struct kv_op *op = kvc_call_op_if_ok(call, status, detail);

    if (op != NULL && reply->blocks > prefix_of(op)->n_blocks)
        prefix_of(op)->n_blocks = reply->blocks;
}

static void start_prefix(struct kv_op *op)
{
    const struct prefix_part *part = prefix_of(op);
    Kvpb__PrefixRequest request = KVPB__PREFIX_REQUEST__INIT;

    request.verb = part->verb;
    request.for_ms = part->for_ms;
    if (part->has_name)
        request.name = kvc_binary(&part->name);
    if (part->has_session)
        request.session_id = kvc_binary(&part->session_id);
    for (uint32_t i = kvc_op_next_required(op, 0);
         i < op->client->n_nodes && op->stage == KVC_STAGE_RUNNING;
         i = kvc_op_next_required(op, i + 1)) {
        struct kvc_node *node = &op->client->nodes[i];
        kv_status_t status = KV_UNSUPPORTED;

        if (node->version >= KV_WIRE_VERSION_PREFIXES)
            status = kvc_call_begin(node, &op->owner, NULL, KV_OP_PREFIX, &request.base,
                                    prefix_done);
        if (status != KV_OK)
            kvc_op_fail(op, node, NULL, status,
                        status == KV_UNSUPPORTED ? "the node's version keeps no prefixes"
                                                 : "cannot send the request");
    }
}

static const struct kvc_op_type prefix_type = {
    .name = "prefix",
    .id = KV_OP_PREFIX,
    .start = start_prefix,
};

kv_status_t kv_prefix_begin(struct kv_client *client,
                            uint32_t node,
                            const struct kv_prefix *prefix,
                            uint32_t deadline_ms,
                            struct kv_op **ret_op)
{
    KVC_ENTER(client);
    kv_status_t status;
    struct kv_op *op;

    if ((node >= client->n_nodes && node != KV_NODES_ALL) || prefix->verb < KV_PREFIX_PIN ||
        prefix->verb > KV_PREFIX_HINT || (prefix->name == NULL && prefix->session_id == NULL) ||
        (prefix->verb == KV_PREFIX_HINT && prefix->for_ms > KV_PREFIX_HINT_MAX_MS))
        return kvc_set_error(&client->loop, KV_INVALID,
                             "prefix: verb %u, node %u, %u ms; a name or a session is needed",
                             (unsigned)prefix->verb, node, prefix->for_ms);
    status = kvc_op_begin(client, &prefix_type, NULL, NULL, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    *prefix_of(op) = (struct prefix_part){
        .verb = prefix->verb,
        .for_ms = prefix->for_ms,
        .has_name = prefix->name != NULL,
        .has_session = prefix->session_id != NULL,
    };
    if (prefix->name != NULL)
        prefix_of(op)->name = *prefix->name;
    if (prefix->session_id != NULL)
        prefix_of(op)->session_id = *prefix->session_id;
    for (uint32_t i = 0; i < client->n_nodes; i++)
        if (node == KV_NODES_ALL || node == i)
            kvc_op_require_node(op, i);
    return kvc_op_submit(op, ret_op);
}

uint64_t kv_op_blocks(const struct kv_op *op)
{
    KVC_LOOK(op->client);

    return op->type == &prefix_type && op->status == KV_OK ? prefix_of(op)->n_blocks : 0;
}
