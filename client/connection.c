#include "client/connection.h"

#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/request.h"
#include "client/session.h"
#include "client/state.h"
#include "kvserver/cluster/placement.h"
#include "proto/kv_wire.h"

#include <stdlib.h>

void kvc_connection_init(struct kvc_connection *connection, struct kvc_node *node)
{
    connection->link.node = node;
    for (unsigned i = 0; i < KV_PRIORITY_COUNT; i++)
        kvc_list_init(&connection->subops[i]);
}

bool kvc_connection_put_begin(struct kvc_connection *connection, uint32_t *ret_number)
{
    if (connection->put_next - connection->put_settled >= KV_WIRE_PUTS_MAX)
        return false;
    *ret_number = connection->put_next++;
    return true;
}

static uint64_t *ended_word(struct kvc_connection *connection, uint32_t number)
{
    return &connection->puts_ended[number / 64 % (KV_WIRE_PUTS_MAX / 64)];
}

void kvc_connection_put_end(struct kvc_connection *connection, uint32_t number)
{
    *ended_word(connection, number) |= UINT64_C(1) << number % 64;
    while ((*ended_word(connection, connection->put_settled) >> connection->put_settled % 64 &
            1) != 0) {
        *ended_word(connection, connection->put_settled) &=
            ~(UINT64_C(1) << connection->put_settled % 64);
        connection->put_settled++;
    }
}

struct kvc_connection *kvc_connection_of_unit(struct kv_client *client, uint32_t slot)
{
    struct kvc_node *node = &client->nodes[client->placement.node_of[slot]];

    if (node->n_connections == 0)
        return NULL;
    return &node->connections[kv_placement_unit_thread(slot, client->n_nodes,
                                                       node->n_connections)];
}

struct kvc_connection *kvc_connection_of_object(struct kv_client *client, uint32_t slot)
{
    struct kvc_node *node = &client->nodes[client->placement.node_of[slot]];

    if (node->n_connections == 0)
        return NULL;
    return &node->connections[kv_placement_object_thread(slot, node->n_connections)];
}

struct kvc_connection *
kvc_session_connection(const struct kv_session *session, uint32_t layer, uint32_t head)
{
    return kvc_connection_of_unit(
        session->client, session->slots[kv_schema_unit(&session->schema, layer, head)]);
}

void kvc_connections_unmark(struct kv_client *client)
{
    for (uint32_t i = 0; i < client->n_nodes; i++)
        for (uint32_t thread = 0; thread < client->nodes[i].n_connections; thread++)
            client->nodes[i].connections[thread].last_op = NULL;
}

struct kvc_subop *kvc_subop_add(struct kv_op *op, struct kvc_connection *connection)
{
    struct kv_client *client = op->client;
    struct kvc_subop *subop = client->free_subops;

    if (subop != NULL) {
        client->free_subops = subop->next;
    } else {
        subop = malloc(sizeof(*subop));
        if (subop == NULL)
            return NULL;
    }
    *subop = (struct kvc_subop){.op = op, .connection = connection};
    kvc_list_append(&connection->subops[kv_op_priority(op->type->id)], &subop->of_connection);
    kvc_list_append(&op->subops, &subop->of_op);
    client->loop.must_dispatch = true;
    return subop;
}

void kvc_subop_free(struct kvc_subop *subop)
{
    struct kv_client *client = subop->op->client;

    kvc_list_remove(&subop->of_connection);
    kvc_list_remove(&subop->of_op);
    subop->next = client->free_subops;
    client->free_subops = subop;
}

/* How many of its credits a connection keeps for this priority.  Where they are too few for every
 * priority, the writes come first: other operations may wait at the node for rows, and must not
 * stop the writes that bring them. */
static uint32_t sure_of(uint32_t credits, unsigned priority)
{
    if (credits >= KV_PRIORITY_COUNT)
        return (credits + 15) / 16;
    return credits > 2 && (priority == KV_PRIORITY_APPEND || priority == KV_PRIORITY_PUT);
}

/* Whether a credit is free for this priority without using those reserved for others. */
static bool may_take(const struct kvc_connection *connection, enum kv_priority priority)
{
    const uint32_t credits = connection->link.node->credits;
    uint32_t reserved = 0;

    for (unsigned other = 0; other < KV_PRIORITY_COUNT; other++) {
        const uint32_t sure = sure_of(credits, other);

        if (other != priority && connection->in_flight[other] < sure)
            reserved += sure - connection->in_flight[other];
    }
    if (connection->in_flight[priority] < sure_of(credits, priority))
        return connection->n_in_flight < credits;
    return connection->n_in_flight + reserved < credits;
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

        if (kvc_list_empty(subops) || !may_take(connection, i))
            continue;
        subop = KVC_LIST_ENTRY(subops->next, struct kvc_subop, of_connection);
        request = kvc_op_take_request(subop->op, connection);
        if (request == NULL)
            return false;
        if (subop->op->type->build(subop, request) == KV_OK) {
            if (subop->finished)
                kvc_subop_free(subop);
            kvc_request_send(request);
            return true;
        }
        kvc_request_end(request);
        /* Releasing this request must not trigger another dispatch at once. */
        client->loop.must_dispatch = must_dispatch;
    }
    return false;
}

/* Returns the connection that may send next. */
static struct kvc_connection *take_turn(struct kv_client *client)
{
    while (client->turn_thread >= client->nodes[client->turn_node].n_connections) {
        client->turn_thread = 0;
        client->turn_node = (client->turn_node + 1) % client->n_nodes;
    }
    return &client->nodes[client->turn_node].connections[client->turn_thread++];
}

/* Sends one message of each connection in turn, so that the connections share requests and
 * large message buffers fairly.  When these run out, a later call continues after the last
 * connection that sent. */
void kvc_connections_dispatch(struct kv_client *client)
{
    uint32_t n_connections = 0, n_idle = 0;

    for (uint32_t i = 0; i < client->n_nodes; i++)
        n_connections += client->nodes[i].n_connections;
    while (n_idle < n_connections) {
        struct kvc_connection *connection = take_turn(client);
        const struct kvc_node *node = connection->link.node;
        bool may_send = node->state == KVC_NODE_CONNECTED && node->failure == KV_OK;

        n_idle = may_send && connection_send(connection) ? 0 : n_idle + 1;
    }
}
