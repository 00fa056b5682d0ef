#include "client/op.h"

#include "client/buffer.h"
#include "client/call.h"
#include "client/connection.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/peer.h"
#include "client/request.h"
#include "client/session.h"
#include "client/state.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/pool.h"
#include "proto/kv_wire.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- ending ------------------------------------------------------------------------------ */

/* Starts operations that waited for an operation that has ended. */
static void admit(struct kv_session *session)
{
    struct kv_client *client = session->client;
    bool is_first = true;
    struct kvc_list *link, *follow;

    if (session->n_queued == 0)
        return;
    KVC_LIST_EACH(link, follow, &session->ops)
    {
        struct kv_op *op = KVC_LIST_ENTRY(link, struct kv_op, of_session);

        if (op->type->is_exclusive && !is_first)
            return;
        if (op->stage == KVC_STAGE_QUEUED) {
            op->stage = KVC_STAGE_PREPARING;
            session->n_queued--;
            client->n_preparing++;
            client->loop.must_dispatch = true;
        }
        if (op->type->is_exclusive)
            return;
        is_first = false;
    }
}

static void end_op(struct kv_op *op, kv_status_t status)
{
    struct kv_client *client = op->client;
    struct kv_session *session = op->session;
    struct kvc_list *link, *follow;

    if (op->stage == KVC_STAGE_ENDED)
        return;
    client->n_preparing -= op->stage == KVC_STAGE_PREPARING;
    if (session != NULL) {
        session->n_queued -= op->stage == KVC_STAGE_QUEUED;
        session->n_exclusive -= op->type->is_exclusive;
        kvc_list_remove(&op->of_session);
        kvc_list_remove(&op->of_ranked);
    }
    op->stage = KVC_STAGE_ENDED;
    op->status = status;
    op->end_us = kv_clock_now(client->loop.clock);
    kvc_list_remove(&op->of_client);
    KVC_LIST_EACH(link, follow, &op->subops)
    kvc_subop_free(KVC_LIST_ENTRY(link, struct kvc_subop, of_op));
    KVC_LIST_EACH(link, follow, &op->owner.requests)
    kvc_request_abandon(KVC_LIST_ENTRY(link, struct kvc_request, of_owner));
    kvc_calls_disown(&op->owner);
    if (op->type->ended != NULL)
        op->type->ended(op);
    op->session = NULL;
    kvc_buffer_release(op->owner.buffer);
    op->owner.buffer = NULL;
    if (session != NULL)
        admit(session);
    if (status != KV_OK && !op->is_own)
        memcpy(kvc_loop_detail(&client->loop), op->detail, KVC_DETAIL_BYTES);
    client->loop.n_ended += !op->is_own;
    if (op->has_user)
        kvc_list_append(&client->told, &op->of_told);
    client->loop.must_dispatch = true;
}

/* ---- messages ---------------------------------------------------------------------------- */

void kvc_op_fail(struct kv_op *op,
                 const struct kvc_node *node,
                 const struct kvc_request *request,
                 kv_status_t status,
                 const char *format,
                 ...)
{
    struct kv_client *client = op->client;
    size_t name_bytes = strlen(op->type->name);
    char text[200], about[120] = "";
    const char *why = text;
    va_list args;

    if (op->stage == KVC_STAGE_ENDED)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    /* Nodes' messages begin with the operation's name, too. */
    if (strncmp(text, op->type->name, name_bytes) == 0 &&
        strncmp(text + name_bytes, ": ", 2) == 0)
        why = text + name_bytes + 2;
    if (op->type->describe != NULL)
        op->type->describe(op, request, about, sizeof(about));
    snprintf(op->detail, sizeof(op->detail), "%s%s%s%s: %s: after %.3f s%s%s%s%s",
             node != NULL ? "node " : "", node != NULL ? node->address : "",
             node != NULL ? ": " : "", op->type->name, kv_status_name(status),
             (double)(client->loop.now_us - op->owner.begin_us) / 1e6, why[0] != 0 ? ": " : "",
             why, about[0] != 0 ? ": " : "", about);
    end_op(op, status);
}

void kvc_session_describe_op(const struct kv_op *op,
                             const struct kvc_request *request,
                             char *text,
                             size_t text_bytes)
{
    const struct kv_session *session = op->session != NULL ? op->session : op->result;
    char id[KVC_SESSION_TEXT];

    (void)request;
    if (session != NULL)
        snprintf(text, text_bytes, "session %s",
                 kvc_session_text(&session->ticket.session_id, id));
}

void kvc_op_record_error(struct kv_op *op,
                         const struct kvc_node *node,
                         kv_status_t status,
                         const char *text)
{
    if (op->partial != KV_OK)
        return;
    op->partial = status;
    op->partial_node = node;
    snprintf(op->partial_text, sizeof(op->partial_text), "%.*s",
             (int)sizeof(op->partial_text) - 1, text);
}

/* ---- requests and calls ------------------------------------------------------------------ */

struct kv_op *kvc_request_op(const struct kvc_request *request)
{
    return request->owner != NULL ? KVC_LIST_ENTRY(request->owner, struct kv_op, owner) : NULL;
}

struct kv_op *kvc_call_op(const struct kvc_call *call)
{
    return call->owner != NULL ? KVC_LIST_ENTRY(call->owner, struct kv_op, owner) : NULL;
}

struct kv_op *
kvc_call_op_if_ok(const struct kvc_call *call, kv_status_t status, const char *detail)
{
    struct kv_op *op = kvc_call_op(call);

    if (op == NULL || status == KV_OK)
        return op;
    kvc_op_fail(op, call->node, NULL, status, "%s", detail);
    return NULL;
}

struct kvc_request *kvc_op_take_request(struct kv_op *op, struct kvc_connection *connection)
{
    return kvc_request_take(connection, kv_op_priority(op->type->id), &op->owner);
}

static void address(const struct kvc_request *request, struct kv_wire_header *header)
{
    const struct kv_op *op = kvc_request_op(request);
    const struct kv_session *session = op->session;

    if (session != NULL) {
        header->session_index = kvc_session_on(op->session, request->node)->index;
        header->generation = session->generation;
        header->token = session->ticket.token;
    }
    if (op->type->requests.awaits != NULL)
        header->snapshot = op->type->requests.follows_sent(request) ? header->token_begin : 0;
}

static void failed(struct kvc_request *request, kv_status_t status, const char *detail)
{
    struct kv_op *op = kvc_request_op(request);

    if (op->type->failed == NULL) {
        kvc_op_fail(op, request->node, request, status, "%s", detail);
        return;
    }
    op->type->failed(request, status, detail);
    kvc_request_end(request);
    kvc_op_check_end(op);
}

static void done(struct kvc_owner *owner)
{
    kvc_op_check_end(KVC_LIST_ENTRY(owner, struct kv_op, owner));
}

static const struct kvc_owner_ops owner_ops = {
    .address = address,
    .failed = failed,
    .done = done,
};

kv_status_t kvc_reply_check_units(const struct kvc_request *request,
                                  uint32_t layer,
                                  uint32_t tokens,
                                  char *detail,
                                  size_t detail_bytes)
{
    const struct kv_wire_header *reply = &request->reply;

    if (reply->layer != layer)
        return kvc_reply_refuse(detail, detail_bytes, "layer: %u", reply->layer);
    if (reply->snapshot < tokens ||
        reply->snapshot > kvc_request_op(request)->session->tokens_max)
        return kvc_reply_refuse(detail, detail_bytes, "snapshot: %u: must be %u to %u",
                                reply->snapshot, tokens,
                                kvc_request_op(request)->session->tokens_max);
    return KV_OK;
}

/* ---- life -------------------------------------------------------------------------------- */

kv_status_t kvc_op_begin(struct kv_client *client,
                         const struct kvc_op_type *type,
                         struct kv_session *session,
                         struct kv_buffer *buffer,
                         uint32_t deadline_ms,
                         struct kv_op **ret_op)
{
    uint64_t within_us = deadline_ms > 0 ? (uint64_t)deadline_ms * 1000 : client->deadline_us;
    const uint32_t ops_max = kv_pool_size(client->op_pool) - 1;
    struct kv_op *op;
    size_t capacity_bytes;
    void *capacity;

    if (session != NULL && session->is_closed)
        return kvc_set_error(&client->loop, KV_NOT_FOUND, "%s: the session is closed",
                             type->name);
    /* The last place is the library's. */
    if (!client->copies.is_beginning &&
        kv_pool_used(client->op_pool) - kvc_copies_ops(&client->copies) == ops_max)
        return kvc_set_error(&client->loop, KV_BUSY, "%s: too many operations: limit %u",
                             type->name, ops_max);
    op = kv_pool_get(client->op_pool);
    kvc_loop_update_time(&client->loop);
    capacity = op->capacity;
    capacity_bytes = op->capacity_bytes;
    memset(op, 0, sizeof(*op));
    op->capacity = capacity;
    op->capacity_bytes = capacity_bytes;
    kvc_list_init(&op->of_client);
    kvc_list_init(&op->of_told);
    kvc_list_init(&op->of_session);
    kvc_list_init(&op->of_ranked);
    kvc_list_init(&op->owner.requests);
    kvc_list_init(&op->owner.calls);
    op->owner.ops = &owner_ops;
    op->owner.request_ops = &type->requests;
    kvc_list_init(&op->subops);
    op->is_in_use = true;
    op->is_own = client->copies.is_beginning;
    op->client = client;
    op->type = type;
    op->status = KV_IN_PROGRESS;
    op->owner.begin_us = client->loop.now_us;
    op->owner.deadline_us =
        client->loop.now_us +
        (within_us < KV_WIRE_DEADLINE_MAX_US ? within_us : KV_WIRE_DEADLINE_MAX_US);
    op->session = session;
    op->needs_current = type->needs_current;
    op->owner.buffer = buffer;
    kvc_buffer_hold(buffer);
    *ret_op = op;
    return KV_OK;
}

void *kvc_op_capacity(struct kv_op *op, size_t bytes)
{
    bytes += bytes == 0;
    if (bytes > op->capacity_bytes) {
        free(op->capacity);
        op->capacity = malloc(bytes);
        op->capacity_bytes = op->capacity != NULL ? bytes : 0;
    }
    return op->capacity;
}

void *kvc_op_keep(uint8_t **at, const void *from, size_t bytes)
{
    void *copy = *at;

    if (bytes > 0)
        memcpy(copy, from, bytes);
    *at += bytes;
    return copy;
}

static void give_back(struct kv_op *op)
{
    if (op->capacity_bytes > KVC_OP_CAPACITY_KEPT) {
        free(op->capacity);
        op->capacity = NULL;
        op->capacity_bytes = 0;
    }
    op->is_in_use = false;
    kv_pool_put(op->client->op_pool, op);
}

void kvc_op_discard(struct kv_op *op)
{
    kvc_buffer_release(op->owner.buffer);
    give_back(op);
}

void kvc_op_require_node(struct kv_op *op, uint32_t node_index)
{
    op->required[node_index / 64] |= UINT64_C(1) << node_index % 64;
}

void kvc_op_require_units(struct kv_op *op,
                          uint32_t layer_begin,
                          uint32_t layer_end,
                          uint32_t kv_head_begin,
                          uint32_t n_heads)
{
    const struct kv_session *session = op->session;
    const kv_schema_t *schema = &session->schema;

    for (uint32_t layer = layer_begin; layer < layer_end; layer++) {
        uint32_t end = n_heads > 0 ? kv_head_begin + n_heads : schema->layers[layer].n_kv_heads;

        for (uint32_t head = kv_head_begin; head < end; head++) {
            const uint32_t unit = kv_schema_unit(schema, layer, head);

            kvc_op_require_node(
                op, session->row.nodes[kv_placement_unit_position(unit, session->row.n_nodes)]);
        }
    }
}

void kvc_op_require_row(struct kv_op *op, const struct kv_placement_row *row)
{
    for (uint32_t i = 0; i < row->n_nodes; i++)
        kvc_op_require_node(op, row->nodes[i]);
}

kv_status_t kvc_op_begin_on_row(struct kv_session *session,
                                const struct kvc_op_type *type,
                                uint32_t deadline_ms,
                                struct kv_op **ret_op)
{
    kv_status_t status =
        kvc_op_begin(session->client, type, session, NULL, deadline_ms, ret_op);

    if (status == KV_OK)
        kvc_op_require_row(*ret_op, &session->row);
    return status;
}

bool kvc_op_requires(const struct kv_op *op, uint32_t node_index)
{
    return op->required[node_index / 64] >> node_index % 64 & 1;
}

uint32_t kvc_op_next_required(const struct kv_op *op, uint32_t node_index)
{
    const uint32_t n_nodes = op->client->n_nodes;

    while (node_index < n_nodes) {
        const uint64_t rest = op->required[node_index / 64] >> node_index % 64;

        if (rest != 0)
            return node_index + (uint32_t)__builtin_ctzll(rest);
        node_index += 64 - node_index % 64;
    }
    return n_nodes;
}

void kvc_op_require_no_more(struct kv_op *op, uint32_t node_index)
{
    op->required[node_index / 64] &= ~(UINT64_C(1) << node_index % 64);
}

/* ---- sub-operations ----------------------------------------------------------------------- */

void kvc_op_rank(struct kv_op *op)
{
    struct kvc_list *head = &op->session->ranked, *last = head->previous;
    const uint32_t rank = op->type->rank(op);

    while (last != head) {
        const struct kv_op *other = KVC_LIST_ENTRY(last, struct kv_op, of_ranked);

        if (other->type->rank(other) <= rank)
            break;
        last = last->previous;
    }
    kvc_list_append(last->next, &op->of_ranked);
}

bool kvc_subop_is_before(const struct kvc_subop *subop, const struct kvc_subop *other)
{
    const struct kv_op *op = subop->op;

    if (op->type->rank == NULL || other->op->type->rank == NULL ||
        op->session != other->op->session)
        return false;
    if (op == other->op)
        return subop->alone && (!other->alone || subop->position < other->position);
    return op->type->rank(op) < other->op->type->rank(other->op);
}

/* Returns before which link of its queue the sub-operation comes: none in a queue must be sent
 * before one ahead of it.  Looks for that link from both ends, since it is near one of them:
 * where puts are begun in order, in reverse, or are sent again. */
static struct kvc_list *place_of(const struct kvc_subop *subop)
{
    const struct kv_op *op = subop->op;
    struct kvc_list *queue = &subop->connection->subops[kv_op_priority(op->type->id)];
    struct kvc_list *front = queue->next, *back = queue->previous, *place = queue;

    if (op->type->rank == NULL ||
        (op->session->ranked.previous == &op->of_ranked && !subop->alone))
        return queue;
    for (; front != queue; front = front->next, back = back->previous) {
        const struct kvc_subop *last = KVC_LIST_ENTRY(back, struct kvc_subop, of_connection);

        op->client->n_order_looks++;
        if (kvc_subop_is_before(subop, KVC_LIST_ENTRY(front, struct kvc_subop, of_connection)))
            return front;
        if (kvc_subop_is_before(last, subop))
            return place;
        if (kvc_subop_is_before(subop, last))
            place = back;
    }
    return queue;
}

/* Adds a sub-operation like this one.  Returns NULL if out of memory. */
static struct kvc_subop *add(const struct kvc_subop *from)
{
    struct kvc_connection *connection = from->connection;
    struct kv_op *op = from->op;
    struct kv_client *client = op->client;
    struct kvc_subop *subop = client->free_subops;

    if (subop != NULL) {
        client->free_subops = subop->next;
    } else {
        subop = malloc(sizeof(*subop));
        if (subop == NULL)
            return NULL;
    }
    *subop = *from;
    kvc_list_append(place_of(subop), &subop->of_connection);
    kvc_list_append(&op->subops, &subop->of_op);
    if (kvc_list_empty(&connection->of_waiting)) {
        kvc_list_append(&client->waiting, &connection->of_waiting);
        client->n_waiting++;
    }
    client->loop.must_dispatch = true;
    return subop;
}

struct kvc_subop *kvc_subop_add(struct kv_op *op, struct kvc_connection *connection)
{
    return add(&(struct kvc_subop){.op = op, .connection = connection});
}

bool kvc_subop_requeue(struct kvc_request *request,
                       uint32_t layer,
                       uint32_t head,
                       uint64_t position,
                       uint64_t due_us)
{
    const struct kvc_subop again = {
        .op = kvc_request_op(request),
        .connection = request->connection,
        .layer = layer,
        .head = head,
        .position = position,
        .alone = true,
        .due_us = due_us,
        .backoff_us = request->backoff_us,
    };

    if (add(&again) == NULL)
        return false;
    again.connection->n_requeued++;
    kvc_loop_set_timer(&request->client->loop, due_us);
    kvc_request_end(request);
    return true;
}

static bool has_subops(const struct kvc_connection *connection)
{
    for (unsigned i = 0; i < KV_PRIORITY_COUNT; i++)
        if (!kvc_list_empty(&connection->subops[i]))
            return true;
    return false;
}

void kvc_subop_free(struct kvc_subop *subop)
{
    struct kvc_connection *connection = subop->connection;
    struct kv_client *client = subop->op->client;

    connection->n_requeued -= subop->due_us > 0;
    kvc_list_remove(&subop->of_connection);
    kvc_list_remove(&subop->of_op);
    if (!has_subops(connection)) {
        kvc_list_remove(&connection->of_waiting);
        client->n_waiting--;
    }
    subop->next = client->free_subops;
    client->free_subops = subop;
}

bool kvc_op_uses(const struct kv_op *op, const struct kvc_node *node)
{
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &op->owner.requests)
    {
        if (KVC_LIST_ENTRY(link, struct kvc_request, of_owner)->node == node)
            return true;
    }
    KVC_LIST_EACH(link, follow, &op->subops)
    {
        if (KVC_LIST_ENTRY(link, struct kvc_subop, of_op)->connection->link.node == node)
            return true;
    }
    return false;
}

void kvc_op_lose(struct kv_op *op, struct kvc_node *node, kv_status_t status, const char *why)
{
    struct kvc_list *link, *follow;

    kvc_op_require_no_more(op, node->index);
    KVC_LIST_EACH(link, follow, &op->owner.requests)
    {
        struct kvc_request *request = KVC_LIST_ENTRY(link, struct kvc_request, of_owner);

        if (request->node == node)
            kvc_request_abandon(request);
    }
    KVC_LIST_EACH(link, follow, &op->subops)
    {
        struct kvc_subop *subop = KVC_LIST_ENTRY(link, struct kvc_subop, of_op);

        if (subop->connection->link.node == node)
            kvc_subop_free(subop);
    }
    op->type->lost(op, node, status, why);
    op->client->loop.must_dispatch = true; /* it may have been the last node */
    kvc_op_check_end(op);
}

bool kvc_op_ask_unit(struct kv_op *op, uint32_t layer, uint32_t head, uint64_t position)
{
    struct kvc_connection *connection = kvc_session_connection(op->session, layer, head);
    struct kvc_subop *subop;

    if (!kvc_connection_mark(connection))
        return true;
    subop = kvc_subop_add(op, connection);
    if (subop == NULL) {
        kvc_op_fail(op, NULL, NULL, KV_NO_MEMORY, "out of memory");
        return false;
    }
    subop->layer = layer;
    subop->head = head;
    subop->position = position;
    return true;
}

void kvc_op_forget_calls(struct kv_op *op)
{
    kvc_calls_disown(&op->owner);
    op->owner.n_calls = 0;
}

void kvc_op_restart(struct kv_op *op)
{
    op->stage = KVC_STAGE_PREPARING;
    op->client->n_preparing++;
    op->client->loop.must_dispatch = true;
}

void kvc_op_check_end(struct kv_op *op)
{
    if (op->stage != KVC_STAGE_RUNNING || op->owner.n_calls > 0 ||
        !kvc_list_empty(&op->owner.requests) || !kvc_list_empty(&op->subops))
        return;
    if (op->partial != KV_OK)
        kvc_op_fail(op, op->partial_node, NULL, op->partial, "%s", op->partial_text);
    else
        end_op(op, KV_OK);
}

/* ---- events of nodes and sessions -------------------------------------------------------- */

static void node_lost(struct kvc_node *node, bool was_connecting)
{
    struct kv_client *client = node->client;
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &client->ops)
    {
        struct kv_op *op = KVC_LIST_ENTRY(link, struct kv_op, of_client);
        bool waited = was_connecting && op->stage == KVC_STAGE_PREPARING &&
                      kvc_op_requires(op, node->index);

        if (waited && op->type->is_best_effort) {
            kvc_op_record_error(op, node, node->failure, node->failure_text);
            kvc_op_require_no_more(op, node->index);
            client->loop.must_dispatch = true;
        } else if (!waited && !kvc_op_uses(op, node)) {
            continue;
        } else if (op->type->lost != NULL) {
            kvc_op_lose(op, node, node->failure, node->failure_text);
        } else {
            kvc_op_fail(op, node, NULL, node->failure, "%s", node->failure_text);
        }
    }
}

/* Fails the operations that wait for the node to catch up. */
static void catch_up_failed(struct kv_session *session,
                            const struct kvc_node *node,
                            kv_status_t status,
                            const char *detail)
{
    struct kv_client *client = session->client;
    struct kvc_list *link, *follow;

    /* An operation that can restart checks the node's generation again. */
    client->loop.must_dispatch = true;
    /* A failing resume frees the session, so here the pointer is only compared. */
    KVC_LIST_EACH(link, follow, &client->ops)
    {
        struct kv_op *op = KVC_LIST_ENTRY(link, struct kv_op, of_client);

        if (op->stage == KVC_STAGE_PREPARING && op->needs_current &&
            (op->session == session || op->result == session) &&
            kvc_op_requires(op, node->index) && (status != KV_STALE || op->type->stale == NULL))
            kvc_op_fail(op, node, NULL, status, "the node cannot catch up: %s", detail);
    }
}

const struct kvc_op_events kvc_op_events = {
    .node_lost = node_lost,
    .catch_up_failed = catch_up_failed,
};

/* ---- the public functions ---------------------------------------------------------------- */

kv_status_t kv_op_status(const struct kv_op *op)
{
    KVC_LOOK(op->client);

    return op->status;
}

void kv_cancel(struct kv_op *op)
{
    KVC_LOOK(op->client);

    if (op->stage == KVC_STAGE_ENDED)
        return;
    KVC_ENTER(op->client);
    kvc_loop_update_time(&op->client->loop);
    kvc_op_fail(op, NULL, NULL, KV_CANCELLED, "%s", "");
}

void kv_session_free(struct kv_session *session)
{
    if (session == NULL)
        return;
    KVC_ENTER(session->client);

    kvc_loop_update_time(&session->client->loop);
    while (!kvc_list_empty(&session->ops))
        kv_cancel(KVC_LIST_ENTRY(session->ops.previous, struct kv_op, of_session));
    kvc_calls_forget_session(session);
    kvc_session_destroy(session);
}

void kv_op_free(struct kv_op *op)
{
    if (op == NULL)
        return;
    KVC_LOOK(op->client);

    kv_cancel(op);
    kvc_list_remove(&op->of_told);
    if (op->type->fini != NULL)
        op->type->fini(op);
    if (op->result != NULL)
        kv_session_free(op->result);
    op->result = NULL;
    give_back(op);
}

void kv_op_set_user(struct kv_op *op, void *user)
{
    KVC_LOOK(op->client);

    op->user = user;
    if (!op->has_user && op->stage == KVC_STAGE_ENDED)
        kvc_list_append(&op->client->told, &op->of_told);
    op->has_user = true;
}

void *kv_op_user(const struct kv_op *op)
{
    KVC_LOOK(op->client);

    return op->user;
}

const char *kv_op_detail(const struct kv_op *op)
{
    KVC_LOOK(op->client);

    return op->stage == KVC_STAGE_ENDED ? op->detail : "";
}

uint64_t kv_op_elapsed_us(const struct kv_op *op)
{
    KVC_LOOK(op->client);

    return op->stage == KVC_STAGE_ENDED ? op->end_us - op->owner.begin_us : 0;
}

void kv_op_get_times(const struct kv_op *op, struct kv_op_times *ret_times)
{
    KVC_LOOK(op->client);

    *ret_times = (struct kv_op_times){
        .begun_us = op->owner.begin_us,
        .sent_us = op->owner.sent_us,
        .arrived_us = op->owner.arrived_us,
        .node_us = op->owner.node_us,
        .ended_us = op->end_us,
    };
}

struct kv_session *kv_op_session(struct kv_op *op)
{
    KVC_LOOK(op->client);
    struct kv_session *session = op->status == KV_OK ? op->result : NULL;

    if (session != NULL)
        op->result = NULL;
    return session;
}

uint32_t kv_op_tokens(const struct kv_op *op)
{
    KVC_LOOK(op->client);

    return op->tokens;
}
