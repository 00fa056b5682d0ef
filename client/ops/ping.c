/* Ping: one message to a data thread and back, with as many bytes as are asked for. */
#include "client/client.h"
#include "client/connection.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/request.h"
#include "proto/kv_wire.h"

#include <assert.h>
#include <string.h>

enum {
    PING_BYTES_MAX = 128 << 10
};

struct ping_part {
    uint32_t node, thread, bytes_out, bytes_back;
};
static_assert(sizeof(struct ping_part) <= KVC_OP_STATE_BYTES, "an operation has room for it");

static struct ping_part *ping_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

static void start_ping(struct kv_op *op)
{
    struct kv_remote *remote = &op->client->remotes[ping_of(op)->node];

    if (ping_of(op)->thread >= remote->n_lanes)
        kv_op_fail(op, remote, NULL, KV_INVALID, "data thread %u of %u", ping_of(op)->thread,
                   remote->n_lanes);
    else if (kv_errand_add(op, &remote->lanes[ping_of(op)->thread]) == NULL)
        kv_op_fail(op, remote, NULL, KV_NO_MEMORY, "out of memory");
}

static kv_status_t build_ping(struct kv_errand *errand, struct kv_trip *trip)
{
    const struct kv_op *op = errand->op;

    trip->body_bytes = ping_of(op)->bytes_out;
    if (!kv_trip_envelope(trip, trip->body_bytes))
        return KV_BUSY;
    memset(trip->envelope->body, 0, trip->body_bytes);
    trip->header.op = KV_OP_PING;
    trip->header.token_count = ping_of(op)->bytes_back;
    errand->finished = true;
    return KV_OK;
}

static kv_status_t
reply_ping(struct kv_trip *trip, const uint8_t *body, char *detail, size_t detail_bytes)
{
    const struct kv_wire_header *reply = &trip->reply;

    (void)body;
    if (reply->bulk_bytes == 0 &&
        reply->body_bytes == ping_of(kvc_request_op(trip))->bytes_back)
        return KV_OK;
    return kv_reply_refuse(detail, detail_bytes, "a body of %u bytes and bulk of %llu",
                           reply->body_bytes, (unsigned long long)reply->bulk_bytes);
}

static const struct kv_op_kind ping_kind = {
    .name = "ping",
    .id = KV_OP_PING,
    .start = start_ping,
    .build = build_ping,
    .reply = reply_ping,
};

kv_status_t kv_ping_begin(struct kv_client *client,
                          uint32_t node,
                          uint32_t thread,
                          uint32_t bytes_out,
                          uint32_t bytes_back,
                          uint32_t deadline_ms,
                          struct kv_op **ret_op)
{
    kv_status_t status;
    struct kv_op *op;

    if (node >= client->n_remotes || bytes_out > PING_BYTES_MAX || bytes_back > PING_BYTES_MAX)
        return kvc_set_error(&client->loop, KV_INVALID, "ping: node %u, %u bytes out, %u back",
                             node, bytes_out, bytes_back);
    status = kv_op_begin(client, &ping_kind, NULL, NULL, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    ping_of(op)->node = node;
    ping_of(op)->thread = thread;
    ping_of(op)->bytes_out = bytes_out;
    ping_of(op)->bytes_back = bytes_back;
    kv_op_need(op, node);
    return kv_op_go(op, ret_op);
}
