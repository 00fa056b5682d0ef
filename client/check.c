#include "client/check.h"

#include "client/buffer.h"
#include "client/call.h"
#include "client/connection.h"
#include "client/control_message.h"
#include "client/list.h"
#include "client/node.h"
#include "client/op.h"
#include "client/request.h"
#include "client/request_private.h"
#include "client/session.h"
#include "client/session_catchup.h"
#include "client/session_lease.h"
#include "client/state.h"
#include "kvserver/base/pool.h"
#include "proto/kv_priority.h"
#include "proto/kv_wire.h"

#include <assert.h>

/* The requests that are not released. */
struct live {
    uint32_t n;
    struct kvc_request *at[KVC_REQUESTS_MAX];
};

/* Returns how many links the list has besides its head. */
static uint32_t check_list(const struct kvc_list *head)
{
    const struct kvc_list *link = head;
    uint32_t n = 0;

    do {
        assert(link->next->previous == link && link->previous->next == link);
        link = link->next;
        n++;
    } while (link != head);
    return n - 1;
}

static bool has_link(const struct kvc_list *head, const struct kvc_list *wanted)
{
    for (const struct kvc_list *link = head->next; link != head; link = link->next)
        if (link == wanted)
            return true;
    return false;
}

/* ---- requests ---------------------------------------------------------------------------- */

static void find_live(const struct kv_client *client, struct live *live)
{
    live->n = 0;
    for (uint32_t i = 0; i < kv_pool_size(client->requests); i++) {
        struct kvc_request *request = kv_pool_at(client->requests, i);

        if (request->is_live)
            live->at[live->n++] = request;
    }
    assert(live->n == kv_pool_used(client->requests));
}

static bool is_with_transport(const struct kvc_message *message)
{
    for (unsigned i = 0; message != NULL && i < KVC_SENDS; i++)
        if (message->sends[i].busy)
            return true;
    return false;
}

static void check_request(const struct kv_client *client, const struct kvc_request *request)
{
    const struct kvc_node *node = request->node;
    const struct kvc_connection *connection = request->connection;

    assert(request->client == client && node >= client->nodes &&
           node < client->nodes + client->n_nodes);
    if (connection != NULL)
        assert(connection >= node->connections &&
               connection < node->connections + node->n_connections);
    if (request->id != 0) {
        assert((request->id & 0xffff) == kv_pool_index(client->requests, request));
        assert((request->id >> KVC_ID_SLOT_BITS & ((1 << KVC_ID_NODE_BITS) - 1)) ==
               node->index);
    }
    if (request->is_over) {
        assert(request->owner == NULL && request->of_owner.next == &request->of_owner);
        assert(!request->is_waiting && request->deferred == NULL && node->ping != request);
        assert(request->is_landing || is_with_transport(request->message));
    } else {
        assert(request->owner != NULL || node->ping == request);
        assert(request->message != NULL);
        assert(client->loop.next_due_us <= request->resend_us || request->owner == NULL);
    }
    if (request->is_moving)
        assert(request->header.bulk_bytes > 0);
    if (request->is_landing)
        assert(!request->has_bulk && request->deferred == NULL);
}

static bool is_of_request(const struct live *live, const struct kvc_message *message)
{
    for (uint32_t i = 0; i < live->n; i++)
        if (live->at[i]->message == message)
            return true;
    return false;
}

static void check_messages(const struct kv_client *client, const struct live *live)
{
    uint32_t n_large = 0, n_small = 0;

    for (uint32_t i = 0; i < live->n; i++)
        if (live->at[i]->message != NULL)
            n_large += live->at[i]->message->is_large;
    for (const struct kvc_message *at = client->free_large; at != NULL; at = at->next) {
        assert(!is_of_request(live, at));
        assert(at->is_large && !is_with_transport(at) && n_large < client->n_large);
        n_large++;
    }
    assert(n_large == client->n_large && n_large <= KVC_MESSAGES_LARGE_MAX);
    for (const struct kvc_message *at = client->free_small; at != NULL; at = at->next) {
        assert(!is_of_request(live, at));
        assert(!at->is_large && !is_with_transport(at));
        n_small++;
        assert(n_small <= KVC_REQUESTS_MAX);
    }
}

/* ---- nodes and connections --------------------------------------------------------------- */

static void check_puts(const struct kvc_connection *connection, const struct live *live)
{
    uint32_t n_under_way = 0, n_unmarked = 0;

    const uint32_t n_open = connection->put_next - connection->put_settled;

    assert(n_open <= KV_WIRE_PUTS_MAX);
    for (uint32_t i = 0; i < KV_WIRE_PUTS_MAX; i++) {
        const uint32_t number = connection->put_settled + i;
        const uint64_t word = connection->puts_ended[number / 64 % (KV_WIRE_PUTS_MAX / 64)];
        const bool has_ended = word >> number % 64 & 1;

        assert(!has_ended || (i > 0 && i < n_open));
        n_unmarked += i < n_open && !has_ended;
    }
    for (uint32_t i = 0; i < live->n; i++) {
        const struct kvc_request *request = live->at[i];

        if (request->connection != connection || request->is_over ||
            request->header.op != KV_OP_OBJECT_PUT)
            continue;
        n_under_way++;
        assert(request->header.put_number - connection->put_settled < n_open);
    }
    assert(n_under_way == n_unmarked);
}

static uint32_t check_subops(struct kv_client *client,
                             const struct kvc_connection *connection,
                             enum kv_priority priority,
                             uint32_t *n_requeued)
{
    const struct kvc_list *head = &connection->subops[priority];
    const struct kvc_subop *previous = NULL;
    const uint32_t n_subops = check_list(head);

    for (const struct kvc_list *link = head->next; link != head; link = link->next) {
        const struct kvc_subop *subop = KVC_LIST_ENTRY(link, struct kvc_subop, of_connection);

        assert(subop->connection == connection && !subop->finished);
        assert(subop->op->client == client && subop->op->stage != KVC_STAGE_ENDED);
        assert(kv_op_priority(subop->op->type->id) == priority);
        if (previous != NULL)
            assert(!kvc_subop_is_before(subop, previous));
        previous = subop;
        *n_requeued += subop->due_us > 0;
    }
    return n_subops;
}

static void check_connection(struct kv_client *client,
                             const struct kvc_node *node,
                             const struct kvc_connection *connection,
                             const struct live *live,
                             uint32_t *n_subops)
{
    uint32_t in_flight[KV_PRIORITY_COUNT] = {0};
    uint32_t n_in_flight = 0, n_pings = 0, n_here = 0, n_requeued = 0;

    assert(connection->link.node == node);
    for (uint32_t i = 0; i < live->n; i++) {
        const struct kvc_request *request = live->at[i];

        if (request->connection != connection)
            continue;
        in_flight[request->priority]++;
        n_in_flight++;
        n_pings += request->header.op == KV_OP_PING;
    }
    assert(n_in_flight == connection->n_in_flight);
    assert(n_in_flight - n_pings <= node->credits);
    for (unsigned i = 0; i < KV_PRIORITY_COUNT; i++) {
        assert(in_flight[i] == connection->in_flight[i]);
        n_here += check_subops(client, connection, i, &n_requeued);
    }
    assert(n_requeued == connection->n_requeued);
    assert((n_here > 0) == !kvc_list_empty(&connection->of_waiting));
    *n_subops += n_here;
    check_puts(connection, live);
}

static void check_node_state(const struct kvc_node *node)
{
    if (node->state == KVC_NODE_CONNECTED) {
        assert(node->control != NULL && node->n_connections > 0 && node->credits > 0);
        assert(node->has_connected && node->incarnation > 0);
        for (uint32_t i = 0; i < node->n_connections; i++)
            assert(node->connections[i].channel != NULL);
    } else {
        assert(node->ping == NULL);
    }
    if (node->state == KVC_NODE_IDLE && node->failure == KV_OK)
        assert(node->control == NULL && node->n_connections == 0 && !node->has_attached);
    assert((node->connections != NULL) == (node->n_connections > 0));
    assert(node->failure == KV_OK || node->client->n_failed > 0);
    if (node->ping != NULL)
        assert(node->ping->is_live && !node->ping->is_over && node->ping->node == node &&
               node->ping->owner == NULL);
}

static void check_node(struct kv_client *client,
                       const struct kvc_node *node,
                       const struct live *live,
                       uint32_t *n_subops)
{
    uint32_t n_requests = 0, n_calls = 0, n_receives = 0;
    uint64_t bulk_moving = 0;
    struct kvc_list *link, *follow;

    assert(node->client == client && node == &client->nodes[node->index]);
    check_node_state(node);
    for (uint32_t i = 0; i < live->n; i++) {
        if (live->at[i]->node != node)
            continue;
        n_requests++;
        bulk_moving += live->at[i]->is_moving ? live->at[i]->header.bulk_bytes : 0;
    }
    assert(n_requests == node->n_requests && bulk_moving == node->bulk_moving);
    KVC_LIST_EACH(link, follow, &client->calls)
    {
        const struct kvc_call *call = KVC_LIST_ENTRY(link, struct kvc_call, of_client);

        n_calls += call->node == node && call->is_out;
    }
    assert(n_calls == node->n_calls);
    assert((n_calls > 0) == !kvc_list_empty(&node->of_calling));
    KVC_LIST_EACH(link, follow, &client->pending_receives)
    n_receives += KVC_LIST_ENTRY(link, struct kvc_pending_receive, of_client)->node == node;
    assert(n_receives == node->n_pending_receives && n_receives <= KVC_PENDING_RECEIVES_MAX);
    for (uint32_t i = 0; i < node->n_connections; i++)
        check_connection(client, node, &node->connections[i], live, n_subops);
}

static void check_nodes(struct kv_client *client, const struct live *live)
{
    uint32_t n_subops = 0, n_of_ops = 0, n_waiting = 0, n_calling = 0, n_attached = 0;
    struct kvc_list *link, *follow;

    assert(client->n_waiting == check_list(&client->waiting));
    for (uint32_t i = 0; i < client->n_nodes; i++)
        check_node(client, &client->nodes[i], live, &n_subops);
    for (uint32_t i = 0; i < client->n_nodes; i++) {
        const struct kvc_node *node = &client->nodes[i];

        for (uint32_t j = 0; j < node->n_connections; j++)
            n_waiting += !kvc_list_empty(&node->connections[j].of_waiting);
        n_calling += node->n_calls > 0;
        n_attached += node->has_attached;
    }
    assert(n_waiting == client->n_waiting && n_calling == check_list(&client->calling));
    assert(n_attached == client->n_attached);
    KVC_LIST_EACH(link, follow, &client->ops)
    n_of_ops += check_list(&KVC_LIST_ENTRY(link, struct kv_op, of_client)->subops);
    assert(n_subops == n_of_ops);
}

/* ---- operations -------------------------------------------------------------------------- */

static void check_ended(const struct kv_op *op)
{
    assert(op->of_client.next == &op->of_client && op->of_session.next == &op->of_session);
    assert(op->status != KV_IN_PROGRESS && op->session == NULL && op->owner.buffer == NULL);
    assert(check_list(&op->owner.requests) == 0 && check_list(&op->subops) == 0);
}

static void check_under_way(const struct kv_client *client, const struct kv_op *op)
{
    const uint32_t n_requests = check_list(&op->owner.requests);
    const uint32_t n_subops = check_list(&op->subops);
    const uint32_t n_calls = check_list(&op->owner.calls);
    struct kvc_list *link, *follow;

    assert(op->is_in_use && op->client == client && op->status == KV_IN_PROGRESS);
    assert(client->loop.next_due_us <= op->owner.deadline_us);
    KVC_LIST_EACH(link, follow, &op->owner.calls)
    assert(KVC_LIST_ENTRY(link, struct kvc_call, of_owner)->owner == &op->owner);
    assert(n_calls == op->owner.n_calls);
    KVC_LIST_EACH(link, follow, &op->owner.requests)
    assert(KVC_LIST_ENTRY(link, struct kvc_request, of_owner)->owner == &op->owner);
    KVC_LIST_EACH(link, follow, &op->subops)
    assert(KVC_LIST_ENTRY(link, struct kvc_subop, of_op)->op == op);
    if (op->stage == KVC_STAGE_QUEUED)
        assert(op->session != NULL && n_requests + n_subops + n_calls == 0);
    if (op->stage == KVC_STAGE_RUNNING)
        assert(n_requests + n_subops + n_calls > 0);
    for (uint32_t i = client->n_nodes; i < KV_NODES_MAX; i++)
        assert(!kvc_op_requires(op, i));
    if (op->session != NULL)
        assert(has_link(&client->sessions, &op->session->of_client) &&
               has_link(&op->session->ops, &op->of_session));
}

static void check_ops(struct kv_client *client)
{
    uint32_t n_ops = 0, n_in_use = 0, n_preparing = 0;

    kv_pool_check(client->op_pool);
    for (uint32_t i = 0; i < kv_pool_size(client->op_pool); i++) {
        const struct kv_op *op = kv_pool_at(client->op_pool, i);

        if (!op->is_in_use)
            continue;
        n_in_use++;
        if (op->stage == KVC_STAGE_ENDED) {
            check_ended(op);
            continue;
        }
        n_ops++;
        n_preparing += op->stage == KVC_STAGE_PREPARING;
        check_under_way(client, op);
    }
    assert(n_in_use == kv_pool_used(client->op_pool));
    assert(n_ops == check_list(&client->ops) && n_preparing == client->n_preparing);
}

/* ---- sessions, calls and buffers --------------------------------------------------------- */

/* The operations that have a rank, the lowest first. */
static void check_ranked(const struct kv_session *session)
{
    uint32_t n_ranked = 0, last = 0;
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &session->ops)
    n_ranked += KVC_LIST_ENTRY(link, struct kv_op, of_session)->type->rank != NULL;
    assert(check_list(&session->ranked) == n_ranked);
    KVC_LIST_EACH(link, follow, &session->ranked)
    {
        const struct kv_op *op = KVC_LIST_ENTRY(link, struct kv_op, of_ranked);
        const uint32_t rank = op->type->rank(op);

        assert(op->session == session && rank >= last);
        last = rank;
    }
}

static void check_session_ops(const struct kv_session *session)
{
    uint32_t n_queued = 0, n_exclusive = 0;
    struct kvc_list *link, *follow;

    check_list(&session->ops);
    KVC_LIST_EACH(link, follow, &session->ops)
    {
        const struct kv_op *op = KVC_LIST_ENTRY(link, struct kv_op, of_session);
        const bool must_wait =
            n_exclusive > 0 || (op->type->is_exclusive && link != session->ops.next);

        assert(op->session == session);
        assert((op->stage == KVC_STAGE_QUEUED) == must_wait);
        n_queued += op->stage == KVC_STAGE_QUEUED;
        n_exclusive += op->type->is_exclusive;
    }
    assert(n_queued == session->n_queued && n_exclusive == session->n_exclusive);
    check_ranked(session);
}

/* Returns how many calls have the session. */
static uint32_t check_session(const struct kv_client *client, const struct kv_session *session)
{
    const uint32_t n_calls = check_list(&session->calls);
    uint32_t n_renewing = 0, n_catch_ups = 0, n_catching_up = 0;
    struct kvc_list *link, *follow;

    assert(session->client == client);
    check_session_ops(session);
    assert(session->n_log <= KVC_LOG_ENTRIES);
    for (uint32_t i = 1; i < session->n_log; i++)
        assert(session->log[i].generation == session->log[0].generation + i);
    if (session->n_log > 0)
        assert(session->log[session->n_log - 1].generation + 1 - session->generation <= 1);
    KVC_LIST_EACH(link, follow, &session->calls)
    {
        const struct kvc_call *call = KVC_LIST_ENTRY(link, struct kvc_call, of_session);

        assert(call->session == session);
        n_renewing += kvc_call_renews(call);
        if (kvc_call_catches_up(call)) {
            n_catch_ups++;
            assert(kvc_session_on(call->session, call->node)->is_catching_up);
        }
    }
    for (uint32_t i = 0; i < session->row.n_nodes; i++)
        n_catching_up += session->nodes[i].is_catching_up;
    assert(n_renewing == session->n_renewing && n_catch_ups == n_catching_up);
    return n_calls;
}

static void check_call(const struct kv_client *client, const struct kvc_call *call)
{
    assert(call->client == client && call->node == &client->nodes[call->node->index]);
    if (call->owner != NULL)
        assert(kvc_call_op(call)->is_in_use && kvc_call_op(call)->stage != KVC_STAGE_ENDED);
    assert((call->owner != NULL) == !kvc_list_empty(&call->of_owner));
    assert((call->session != NULL) == !kvc_list_empty(&call->of_session));
    assert(call->is_out == (call->resend.at_us == KVC_NEVER));
    if (!call->is_out)
        assert(call->node->control != NULL);
}

static void
check_buffer(struct kv_client *client, const struct kv_buffer *buffer, const struct live *live)
{
    uint32_t n_holds = 0;
    struct kvc_list *link, *follow;

    assert(buffer->client == client);
    for (uint32_t i = 0; i < live->n; i++)
        n_holds += live->at[i]->buffer == buffer;
    KVC_LIST_EACH(link, follow, &client->ops)
    n_holds += KVC_LIST_ENTRY(link, struct kv_op, of_client)->owner.buffer == buffer;
    /* Operations on objects hold one for each, which only they know of. */
    assert(kvc_list_empty(&client->ops) ? buffer->n_holds == n_holds
                                        : buffer->n_holds >= n_holds);
}

static void check_dues(const struct kv_client *client)
{
    size_t n_waiting = 0, n_leased = 0;
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &client->calls)
    n_waiting += !KVC_LIST_ENTRY(link, struct kvc_call, of_client)->is_out;
    KVC_LIST_EACH(link, follow, &client->sessions)
    n_leased += KVC_LIST_ENTRY(link, struct kv_session, of_client)->renewal.at_us != KVC_NEVER;
    assert(kvc_dues_check(&client->resends) == n_waiting);
    assert(kvc_dues_check(&client->renewals) == n_leased);
    assert(client->loop.next_due_us <= kvc_dues_first_us(&client->resends));
    assert(client->loop.next_due_us <= kvc_dues_first_us(&client->renewals));
}

void kvc_client_check(struct kv_client *client)
{
    struct kvc_list *link, *follow;
    struct live live;
    uint32_t n_of_sessions = 0; /* calls that have one */

    check_list(&client->sessions);
    check_list(&client->buffers);
    check_list(&client->calls);
    check_list(&client->pending_receives);
    check_list(&client->control_messages);
    check_list(&client->ops);
    kv_pool_check(client->requests);
    find_live(client, &live);
    for (uint32_t i = 0; i < live.n; i++)
        check_request(client, live.at[i]);
    check_messages(client, &live);
    check_ops(client);
    check_nodes(client, &live);
    check_dues(client);
    KVC_LIST_EACH(link, follow, &client->calls)
    {
        check_call(client, KVC_LIST_ENTRY(link, struct kvc_call, of_client));
        n_of_sessions += KVC_LIST_ENTRY(link, struct kvc_call, of_client)->session != NULL;
    }
    KVC_LIST_EACH(link, follow, &client->sessions)
    n_of_sessions -= check_session(client, KVC_LIST_ENTRY(link, struct kv_session, of_client));
    assert(n_of_sessions == 0);
    KVC_LIST_EACH(link, follow, &client->buffers)
    check_buffer(client, KVC_LIST_ENTRY(link, struct kv_buffer, of_client), &live);
}
