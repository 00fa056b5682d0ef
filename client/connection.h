/* connection.h - the connections to a node's data threads.
 *
 *   kvc_connection  the way to one data thread: a channel, credits, queues of sub-operations
 *   kvc_subop       the part of an operation that one connection serves: a cursor over rows or
 *                   objects
 *
 * A connection turns its sub-operations into requests (request.h) while it has credits.
 *
 * Threads: the client's.  Memory: connections are valid while their node is connected,
 * sub-operations until their operation ends.
 */
#ifndef KV_CLIENT_CONNECTION_H
#define KV_CLIENT_CONNECTION_H

#include "client/list.h"
#include "client/node.h"
#include "proto/kv_priority.h"
#include "proto/kv_wire.h"

#include <stdbool.h>
#include <stdint.h>

struct kv_channel;
struct kv_op;
struct kv_client;
struct kv_session;

struct kvc_connection {
    struct kvc_link link;
    struct kv_channel *channel;
    /* By priority.  Each priority has some credits of its own, so that operations that wait in
     * the node for rows cannot block the puts that bring these rows. */
    struct kvc_list subops[KV_PRIORITY_COUNT];
    uint32_t in_flight[KV_PRIORITY_COUNT];
    uint32_t n_in_flight;
    const struct kv_op *last_op; /* that last made a sub-operation for this connection */
    uint32_t put_next;           /* the number of the next object_put */
    uint32_t put_settled;        /* all puts below it have ended */
    uint64_t puts_ended[KV_WIRE_PUTS_MAX / 64]; /* of the puts between, a bit each */
};

/* Return the connection to the data thread that owns a unit's slot, or an object's.  NULL: its
 * node is not connected; an operation that does not need the node may continue. */
struct kvc_connection *kvc_connection_of_unit(struct kv_client *client, uint32_t slot);
struct kvc_connection *kvc_connection_of_object(struct kv_client *client, uint32_t slot);

/* As kvc_connection_of_unit(), for a unit of a session. */
struct kvc_connection *
kvc_session_connection(const struct kv_session *session, uint32_t layer, uint32_t head);

/* Clears last_op of every connection, before an operation makes its sub-operations. */
void kvc_connections_unmark(struct kv_client *client);

/* Turns sub-operations into requests while there are credits. */
void kvc_connections_dispatch(struct kv_client *client);
void kvc_connection_init(struct kvc_connection *connection, struct kvc_node *node);

/* Assigns the number by which a node recognizes an object_put that is resent (kv_wire.h).
 * Returns false if KV_WIRE_PUTS_MAX numbers are in use from the oldest outstanding put on. */
bool kvc_connection_put_begin(struct kvc_connection *connection, uint32_t *ret_number);
void kvc_connection_put_end(struct kvc_connection *connection, uint32_t number);

struct kvc_subop {
    struct kvc_subop *next; /* free */
    struct kvc_list of_connection;
    struct kvc_list of_op;
    struct kv_op *op;
    struct kvc_connection *connection;
    /* The cursor.  Its operation type defines what the fields mean. */
    uint32_t layer;
    uint32_t head;
    uint64_t position;
    bool alone;    /* object: only the remaining requests of the object at `head` */
    bool finished; /* everything has been requested */
};

/* Returns NULL if out of memory. */
struct kvc_subop *kvc_subop_add(struct kv_op *op, struct kvc_connection *connection);
void kvc_subop_free(struct kvc_subop *subop);

#endif
