#include "client/connection.h"

#include "client/list.h"
#include "client/session.h"
#include "client/state.h"
#include "kvserver/cluster/placement.h"
#include "proto/kv_wire.h"

void kvc_connection_init(struct kvc_connection *connection, struct kvc_node *node)
{
    connection->link.node = node;
    for (unsigned i = 0; i < KV_PRIORITY_COUNT; i++)
        kvc_list_init(&connection->subops[i]);
    kvc_list_init(&connection->collected);
    kvc_list_init(&connection->of_collecting);
    kvc_list_init(&connection->of_waiting);
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

struct kvc_connection *kvc_connection_of_object(struct kvc_node *node, uint32_t slot)
{
    if (node->n_connections == 0)
        return NULL;
    return &node->connections[kv_placement_object_thread(slot, node->n_connections)];
}

struct kvc_connection *
kvc_session_connection(const struct kv_session *session, uint32_t layer, uint32_t head)
{
    const uint32_t n_nodes = session->row.n_nodes;
    const uint32_t unit = kv_schema_unit(&session->schema, layer, head);
    struct kvc_node *node =
        kvc_session_node(session, kv_placement_unit_position(unit, n_nodes));

    if (node->n_connections == 0)
        return NULL;
    return &node->connections[kv_placement_unit_thread(session->ticket.root, unit, n_nodes,
                                                       node->n_connections)];
}

void kvc_connections_unmark(struct kv_client *client)
{
    client->mark++;
}

bool kvc_connection_mark(struct kvc_connection *connection)
{
    const uint64_t mark = connection->link.node->client->mark;

    if (connection->mark == mark)
        return false;
    connection->mark = mark;
    return true;
}

void kvc_connection_unmark(struct kvc_connection *connection)
{
    connection->mark = 0; /* that of no operation */
}

/* ---- credits ----------------------------------------------------------------------------- */

/* How many of its credits a connection keeps for this priority.  Where they are too few for every
 * priority, the writes come first: other operations may wait at the node for rows, and must not
 * stop the writes that bring them. */
static uint32_t sure_of(uint32_t credits, unsigned priority)
{
    if (credits >= KV_PRIORITY_COUNT)
        return (credits + 15) / 16;
    return credits > 2 && (priority == KV_PRIORITY_APPEND || priority == KV_PRIORITY_PUT);
}

static bool is_write(enum kv_priority priority)
{
    return priority == KV_PRIORITY_APPEND || priority == KV_PRIORITY_PUT;
}

bool kvc_connection_may_take(const struct kvc_connection *connection, enum kv_priority priority)
{
    const uint32_t credits = connection->link.node->credits;
    uint32_t reserved = 0, for_writes = 0;

    for (unsigned other = 0; other < KV_PRIORITY_COUNT; other++) {
        const uint32_t sure = sure_of(credits, other);

        if (other == priority || connection->in_flight[other] >= sure)
            continue;
        *(is_write(other) ? &for_writes : &reserved) += sure - connection->in_flight[other];
    }
    /* Puts and appends may wait for each other, and others for both. */
    if (connection->n_requeued > 0 && is_write(priority))
        for_writes = 0;
    else if (connection->n_requeued > 0 && for_writes == 0)
        for_writes = 1;
    if (connection->in_flight[priority] < sure_of(credits, priority))
        return connection->n_in_flight < credits;
    return connection->n_in_flight + reserved + for_writes < credits;
}
