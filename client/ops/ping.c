/* Ping: one message to a data thread and back, with as many bytes as requested. */
#include "client/connection.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/peer.h"
#include "client/request.h"
#include "client/state.h"
#include "proto/kv_wire.h"

#include <assert.h>
#include <string.h>

enum {
    PING_BYTES_MAX = 128 << 10
};

struct ping_part {
    uint32_t node_index, thread, bytes_out, bytes_back;
};
static_assert(sizeof(struct ping_part) <= KVC_OP_STATE_BYTES, "an operation has room for it");

static struct ping_part *ping_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

static void start_ping(struct kv_op *op)
{
    struct kvc_node *node = &op->client->nodes[ping_of(op)->node_index];

    if (ping_of(op)->thread >= node->n_connections)
        kvc_op_fail(op, node, NULL, KV_INVALID, "data thread %u: the node has %u",
                    ping_of(op)->thread, node->n_connections);
    else if (kvc_subop_add(op, &node->connections[ping_of(op)->thread]) == NULL)
        kvc_op_fail(op, node, NULL, KV_NO_MEMORY, "out of memory");
}

static kv_status_t build_ping(struct kvc_subop *subop, struct kvc_request *request)
{
    const struct kv_op *op = subop->op;

    request->body_bytes = ping_of(op)->bytes_out;
    if (!kvc_request_message(request, request->body_bytes))
        return KV_BUSY;
    memset(request->message->body, 0, request->body_bytes);
    request->header.op = KV_OP_PING;
    request->header.token_count = ping_of(op)->bytes_back;
    subop->finished = true;
    return KV_OK;
}

static kv_status_t
reply_ping(struct kvc_request *request, const uint8_t *body, char *detail, size_t detail_bytes)
{
    const struct kv_wire_header *reply = &request->reply;

    (void)body;
    if (reply->bulk_bytes == 0 &&
        reply->body_bytes == ping_of(kvc_request_op(request))->bytes_back)
        return KV_OK;
    return kvc_reply_refuse(detail, detail_bytes, "a body of %u bytes and bulk of %llu",
                            reply->body_bytes, (unsigned long long)reply->bulk_bytes);
}

static const struct kvc_op_type ping_type = {
    .name = "ping",
    .id = KV_OP_PING,
    .start = start_ping,
    .build = build_ping,
    .requests.reply = reply_ping,
};

kv_status_t kv_ping_begin(struct kv_client *client,
                          uint32_t node_index,
                          uint32_t thread,
                          uint32_t bytes_out,
                          uint32_t bytes_back,
                          uint32_t deadline_ms,
                          struct kv_op **ret_op)
{
    KVC_ENTER(client);
    kv_status_t status;
    struct kv_op *op;

    if (node_index >= client->n_nodes || bytes_out > PING_BYTES_MAX ||
        bytes_back > PING_BYTES_MAX)
        return kvc_set_error(&client->loop, KV_INVALID,
                             "ping: node %u, %u bytes out, %u back: out of bounds", node_index,
                             bytes_out, bytes_back);
    status = kvc_op_begin(client, &ping_type, NULL, NULL, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    ping_of(op)->node_index = node_index;
    ping_of(op)->thread = thread;
    ping_of(op)->bytes_out = bytes_out;
    ping_of(op)->bytes_back = bytes_back;
    kvc_op_require_node(op, node_index);
    return kvc_op_submit(op, ret_op);
}
