/* A node verifies what it has: one step of that, and what it says. */
#include "client/call.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/state.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>

struct verify_part {
    uint32_t node_index;
    uint64_t since_us;
    struct kv_verification verification;
};
static_assert(sizeof(struct verify_part) <= KVC_OP_STATE_BYTES, "an operation has room for it");

static struct verify_part *verify_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

static struct kv_verify_counts counts_of(const Kvpb__VerifyCounts *counts)
{
    return (struct kv_verify_counts){
        .blocks = counts->blocks,
        .bytes = counts->bytes,
        .bad = counts->bad,
        .mended = counts->mended,
        .lost = counts->lost,
        .unread = counts->unread,
        .refused = counts->refused,
        .all_bytes = counts->all_bytes,
    };
}

static void verify_done(struct kvc_call *call,
                        kv_status_t status,
                        const ProtobufCMessage *message,
                        const char *detail)
{
    const Kvpb__VerifyReply *reply = (const Kvpb__VerifyReply *)message;
    struct kv_op *op = kvc_call_op_if_ok(call, status, detail);

    if (op == NULL)
        return;
    if (reply->memory == NULL || reply->disk == NULL || reply->since_us == 0 ||
        (verify_of(op)->since_us != 0 && reply->since_us != verify_of(op)->since_us)) {
        kvc_op_fail(op, call->node, NULL, KV_CORRUPT,
                    "reply: since_us or counts: does not match");
        return;
    }
    verify_of(op)->verification = (struct kv_verification){
        .since_us = reply->since_us,
        .is_done = reply->is_done,
        .memory = counts_of(reply->memory),
        .disk = counts_of(reply->disk),
    };
}

static void start_verify(struct kv_op *op)
{
    struct kvc_node *node = &op->client->nodes[verify_of(op)->node_index];
    Kvpb__VerifyRequest request = KVPB__VERIFY_REQUEST__INIT;
    kv_status_t status = KV_UNSUPPORTED;

    request.since_us = verify_of(op)->since_us;
    if (node->version >= KV_WIRE_VERSION_VERIFY)
        status =
            kvc_call_begin(node, &op->owner, NULL, KV_OP_VERIFY, &request.base, verify_done);
    if (status != KV_OK)
        kvc_op_fail(op, node, NULL, status,
                    status == KV_UNSUPPORTED ? "the node's version does not verify on demand"
                                             : "cannot send the request");
}

static const struct kvc_op_type verify_type = {
    .name = "verify",
    .id = KV_OP_VERIFY,
    .start = start_verify,
};

kv_status_t kv_verify_begin(struct kv_client *client,
                            uint32_t node,
                            uint64_t since_us,
                            uint32_t deadline_ms,
                            struct kv_op **ret_op)
{
    KVC_ENTER(client);
    kv_status_t status;
    struct kv_op *op;

    if (node >= client->n_nodes)
        return kvc_set_error(&client->loop, KV_INVALID, "verify: node %u", node);
    status = kvc_op_begin(client, &verify_type, NULL, NULL, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    *verify_of(op) = (struct verify_part){.node_index = node, .since_us = since_us};
    kvc_op_require_node(op, node);
    return kvc_op_submit(op, ret_op);
}

const struct kv_verification *kv_op_verification(const struct kv_op *op)
{
    KVC_LOOK(op->client);

    return op->type == &verify_type && op->status == KV_OK ? &verify_of(op)->verification
                                                           : NULL;
}
