#include "client/dispatch.h"

#include "client/batch.h"
#include "client/connection.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/node_connect.h"
#include "client/op.h"
#include "client/request.h"
#include "client/session.h"
#include "client/session_catchup.h"
#include "client/state.h"
#include "proto/kv_priority.h"
#include "proto/kv_wire.h"

/* ---- operations start -------------------------------------------------------------------- */

void kvc_op_prepare(struct kv_op *op)
{
    struct kv_client *client = op->client;
    struct kv_session *session = op->session != NULL ? op->session : op->result;
    bool is_ready = true;
    char text[160];

    for (uint32_t i = kvc_op_next_required(op, 0); i < client->n_nodes;
         i = kvc_op_next_required(op, i + 1)) {
        struct kvc_node *node = &client->nodes[i];
        kv_status_t status = KV_OK;

        if (node->state != KVC_NODE_CONNECTED || node->failure != KV_OK) {
            kvc_node_connect(node);
            status = KV_IN_PROGRESS;
        } else if (op->type->start_node != NULL) {
            kvc_op_require_no_more(op, i);
            op->type->start_node(op, node);
        } else if (op->needs_current) {
            status = kvc_session_ready(session, node, text, sizeof(text));
        }
        if (status == KV_IN_PROGRESS) {
            is_ready = false;
        } else if (status == KV_STALE && op->type->stale != NULL) {
            op->type->stale(op);
            client->loop.must_dispatch = true;
            return;
        } else if (status != KV_OK) {
            kvc_op_fail(op, node, NULL, status, "%s", text);
            return;
        }
    }
    if (!is_ready)
        return;
    op->stage = KVC_STAGE_RUNNING;
    client->n_preparing--;
    if (op->type->start != NULL)
        op->type->start(op);
    kvc_op_check_end(op);
}

kv_status_t kvc_op_submit(struct kv_op *op, struct kv_op **ret_op)
{
    struct kv_client *client = op->client;
    struct kv_session *session = op->session;

    kvc_list_append(&client->ops, &op->of_client);
    op->stage = KVC_STAGE_PREPARING;
    if (session != NULL) {
        bool waits =
            op->type->is_exclusive ? !kvc_list_empty(&session->ops) : session->n_exclusive > 0;

        kvc_list_append(&session->ops, &op->of_session);
        if (op->type->rank != NULL)
            kvc_op_rank(op);
        session->n_exclusive += op->type->is_exclusive;
        if (waits) {
            op->stage = KVC_STAGE_QUEUED;
            session->n_queued++;
        }
    }
    kvc_loop_set_timer(&client->loop, op->owner.deadline_us);
    if (op->stage == KVC_STAGE_PREPARING) {
        client->n_preparing++;
        kvc_op_prepare(op);
    }
    *ret_op = op;
    kvc_client_dispatch(client);
    return KV_OK;
}

kv_status_t kvc_batch_begin(struct kv_client *client,
                            void *entries,
                            size_t n_entries,
                            uint32_t deadline_ms,
                            kvc_begin_entry_fn begin)
{
    kv_status_t first = KV_OK;

    client->loop.is_held = true;
    for (size_t i = 0; i < n_entries; i++) {
        kv_status_t status = begin(client, entries, i, deadline_ms);

        if (first == KV_OK)
            first = status;
    }
    client->loop.is_held = false;
    kvc_client_dispatch(client);
    return first;
}

kv_status_t kvc_batch_takes(struct kv_client *client, const struct kv_session *session)
{
    return session->client == client
               ? KV_OK
               : kvc_set_error(&client->loop, KV_INVALID, "batch: a session of another client");
}

/* ---- connections send -------------------------------------------------------------------- */

/* Whether a sub-operation of this operation, on the same connection, comes first. */
static bool follows_one_of(const struct kvc_subop *subop, const struct kv_op *op)
{
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &op->subops)
    {
        const struct kvc_subop *other = KVC_LIST_ENTRY(link, struct kvc_subop, of_op);

        op->client->n_order_looks++;
        if (other->connection == subop->connection && kvc_subop_is_before(other, subop))
            return true;
    }
    return false;
}

/* Whether another sub-operation on the connection comes first.  Those of lower rank are few
 * where puts are begun and sent in their order, however many there are. */
static bool follows_queued(const struct kvc_subop *subop)
{
    const struct kv_op *op = subop->op;
    struct kvc_list *link, *follow;

    if (op->type->rank == NULL)
        return false;
    KVC_LIST_EACH(link, follow, &op->session->ranked)
    {
        const struct kv_op *other = KVC_LIST_ENTRY(link, struct kv_op, of_ranked);

        if (other->type->rank(other) >= op->type->rank(op))
            break;
        op->client->n_order_looks++;
        if (follows_one_of(subop, other))
            return true;
    }
    return subop->connection->n_requeued > 0 && follows_one_of(subop, op);
}

/* Returns the first sub-operation of a queue that can be sent, or NULL. */
static struct kvc_subop *first_ready(struct kv_client *client, struct kvc_list *subops)
{
    const struct kvc_subop *held = NULL;
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, subops)
    {
        struct kvc_subop *subop = KVC_LIST_ENTRY(link, struct kvc_subop, of_connection);

        if (held != NULL && kvc_subop_is_before(held, subop))
            continue;
        if (subop->due_us <= client->loop.now_us && !follows_queued(subop))
            return subop;
        held = subop;
    }
    return NULL;
}

/* Sends one message: the most urgent one that can be sent.  A sub-operation without a free
 * request or message buffer stays at the head of its queue, so its priority is served in order.
 * Returns false if nothing was sent. */
static bool connection_send(struct kvc_connection *connection)
{
    struct kv_client *client = connection->link.node->client;
    const bool must_dispatch = client->loop.must_dispatch;

    for (unsigned i = 0; i < KV_PRIORITY_COUNT; i++) {
        struct kvc_list *subops = &connection->subops[i];
        struct kvc_subop *subop;
        struct kvc_request *request;

        if (kvc_list_empty(subops) || !kvc_connection_may_take(connection, i))
            continue;
        subop = first_ready(client, subops);
        if (subop == NULL)
            continue;
        request = kvc_op_take_request(subop->op, connection);
        if (request == NULL)
            return false;
        request->backoff_us = subop->backoff_us;
        if (subop->op->type->build(subop, request) == KV_OK) {
            if (subop->finished)
                kvc_subop_free(subop);
            kvc_request_collect(request);
            return true;
        }
        kvc_request_end(request);
        /* Releasing this request must not trigger another dispatch at once. */
        client->loop.must_dispatch = must_dispatch;
    }
    return false;
}

/* Sends one message of each connection that has something to send in turn, so that these share
 * requests and large message buffers fairly.  When these run out, a later call continues after
 * the last connection that sent. */
static void dispatch_connections(struct kv_client *client)
{
    uint32_t n_idle = 0;

    while (n_idle < client->n_waiting) {
        struct kvc_connection *connection =
            KVC_LIST_ENTRY(client->waiting.next, struct kvc_connection, of_waiting);
        const struct kvc_node *node = connection->link.node;
        bool may_send = node->state == KVC_NODE_CONNECTED && node->failure == KV_OK;

        kvc_list_remove(&connection->of_waiting);
        kvc_list_append(&client->waiting, &connection->of_waiting);
        n_idle = may_send && connection_send(connection) ? 0 : n_idle + 1;
    }
    kvc_batches_flush(client);
}

void kvc_client_dispatch(struct kv_client *client)
{
    while (client->loop.must_dispatch && !client->loop.is_held) {
        struct kvc_list *link, *follow;

        client->loop.must_dispatch = false;
        if (client->n_preparing > 0) {
            KVC_LIST_EACH(link, follow, &client->ops)
            {
                struct kv_op *op = KVC_LIST_ENTRY(link, struct kv_op, of_client);

                if (op->stage == KVC_STAGE_PREPARING)
                    kvc_op_prepare(op);
            }
        }
        dispatch_connections(client);
    }
}
