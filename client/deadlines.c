#include "client/deadlines.h"

#include "client/call.h"
#include "client/connection.h"
#include "client/dispatch.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/node_connect.h"
#include "client/op.h"
#include "client/request.h"
#include "client/session.h"
#include "client/session_lease.h"
#include "client/state.h"

/* Fails the shares of all nodes that are not complete. */
static void expire_shares(struct kv_op *op)
{
    struct kv_client *client = op->client;

    for (uint32_t i = 0; i < client->n_nodes; i++) {
        struct kvc_node *node = &client->nodes[i];

        if (kvc_op_requires(op, i))
            kvc_op_lose(op, node, KV_DEADLINE, "connecting");
        else if (kvc_op_uses(op, node))
            kvc_op_lose(op, node, KV_DEADLINE, "");
    }
    if (op->stage == KVC_STAGE_PREPARING)
        kvc_op_prepare(op);
}

void kvc_op_expire(struct kv_op *op)
{
    struct kv_client *client = op->client;
    const struct kvc_node *node = NULL;
    const struct kvc_request *request = NULL;
    const char *why = "";

    if (op->type->lost != NULL) {
        expire_shares(op);
        return;
    }
    if (op->stage == KVC_STAGE_QUEUED) {
        why = "waiting for another operation of the session";
    } else if (op->stage == KVC_STAGE_PREPARING) {
        for (uint32_t i = kvc_op_next_required(op, 0); i < client->n_nodes && node == NULL;
             i = kvc_op_next_required(op, i + 1))
            if (client->nodes[i].state != KVC_NODE_CONNECTED)
                node = &client->nodes[i];
        why = node != NULL ? "connecting" : "waiting for a node to catch up";
    } else if (!kvc_list_empty(&op->owner.requests)) {
        request = KVC_LIST_ENTRY(op->owner.requests.next, struct kvc_request, of_owner);
        node = request->node;
    } else if (!kvc_list_empty(&op->subops)) {
        const struct kvc_subop *subop =
            KVC_LIST_ENTRY(op->subops.next, struct kvc_subop, of_op);

        node = subop->connection->link.node;
        why = subop->due_us > 0 ? "waiting for rows before its own" : "waiting for credits";
    } else if (!kvc_list_empty(&op->owner.calls)) {
        node = KVC_LIST_ENTRY(op->owner.calls.next, struct kvc_call, of_owner)->node;
    }
    kvc_op_fail(op, node, request, KV_DEADLINE, "%s", why);
}

static void subops_timers(struct kv_client *client, const struct kv_op *op)
{
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &op->subops)
    {
        const struct kvc_subop *subop = KVC_LIST_ENTRY(link, struct kvc_subop, of_op);

        if (subop->due_us > client->loop.now_us)
            kvc_loop_set_timer(&client->loop, subop->due_us);
        else
            client->loop.must_dispatch = true;
    }
}

void kvc_client_timers(struct kv_client *client)
{
    struct kvc_list *link, *follow;

    client->loop.next_due_us = UINT64_MAX;
    KVC_LIST_EACH(link, follow, &client->ops)
    {
        struct kv_op *op = KVC_LIST_ENTRY(link, struct kv_op, of_client);

        if (op->owner.deadline_us <= client->loop.now_us)
            kvc_op_expire(op);
        else
            kvc_loop_set_timer(&client->loop, op->owner.deadline_us);
    }
    KVC_LIST_EACH(link, follow, &client->ops)
    {
        kvc_requests_timers(client, &KVC_LIST_ENTRY(link, struct kv_op, of_client)->owner);
        subops_timers(client, KVC_LIST_ENTRY(link, struct kv_op, of_client));
    }
    kvc_calls_timers(client);
    kvc_sessions_timers(client);
    kvc_nodes_timers(client);
    for (uint32_t i = 0; i < client->n_nodes; i++)
        if (client->nodes[i].unanswered_since_us != 0)
            kvc_loop_set_timer(&client->loop,
                               client->loop.now_us + client->peer_timeout_us / 8);
}

/* Returns from_us + us, at most now_us: the wait may have begun within the gap. */
static uint64_t later(uint64_t from_us, uint64_t us, uint64_t now_us)
{
    return us < now_us - from_us ? from_us + us : now_us;
}

void kvc_client_forgive(struct kv_client *client)
{
    uint64_t gap_us = client->loop.now_us - client->polled_us;
    uint64_t most_us = client->peer_timeout_us / 8;

    client->polled_us = client->loop.now_us;
    if (gap_us <= most_us)
        return;
    for (uint32_t i = 0; i < client->n_nodes; i++)
        if (client->nodes[i].unanswered_since_us != 0)
            client->nodes[i].unanswered_since_us = later(client->nodes[i].unanswered_since_us,
                                                         gap_us - most_us, client->loop.now_us);
}
