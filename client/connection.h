/* connection.h - the connections to a node's data threads.
 *
 *   kvc_connection     a data thread of a node: a channel, credits, queues of sub-operations
 *   kvc_subop   what an operation still has to ask of one connection: a cursor over rows or objects
 *
 * A sub-operation becomes requests (request.h) while its connection has credits.
 *
 * Threads: the client's.  Memory: connections live with their connection, sub-operations with their operation.
 */
#ifndef KV_CLIENT_CONNECTION_H
#define KV_CLIENT_CONNECTION_H

#include "client/list.h"
#include "proto/kv_priority.h"
#include "proto/kv_wire.h"

#include <stdbool.h>
#include <stdint.h>

struct kvc_node;
struct kv_channel;
struct kv_op;
struct kv_client;
struct kv_session;

/* What a channel's events name: the first member of what the channel is for. */
struct kvc_link {
    struct kvc_node *node;
};

struct kvc_connection {
    struct kvc_link link;
    struct kv_channel *channel;
    /* By priority.  Each is sure of some of the credits: operations that wait in the node for
     * another one's rows cannot keep these from coming. */
    struct kvc_list subops[KV_PRIORITY_COUNT];
    uint32_t in_flight[KV_PRIORITY_COUNT];
    uint32_t n_in_flight;
    const struct kv_op
        *last_op;         /* the operation that made a sub-operation for this connection last */
    uint32_t put_next;    /* the number of the next object_put */
    uint32_t put_settled; /* all below it have ended */
    uint64_t puts_ended[KV_WIRE_PUTS_MAX / 64]; /* of those between */
};

/* The connection that owns a unit's slot, or an object's.  NULL: its node is not connected; an
 * operation that has nothing to do there any more may go on all the same. */
struct kvc_connection *kvc_connection_of_unit(struct kv_client *client, uint32_t slot);
struct kvc_connection *kvc_connection_of_object(struct kv_client *client, uint32_t slot);

/* The same for a unit of a session. */
struct kvc_connection *
kvc_session_connection(const struct kv_session *session, uint32_t layer, uint32_t head);

/* Forgets every connection's mark: an operation begins to look for its connections. */
void kvc_connections_unmark(struct kv_client *client);

/* Turns sub-operations into requests while there are credits. */
void kvc_connections_dispatch(struct kv_client *client);
void kvc_connection_init(struct kvc_connection *connection, struct kvc_node *node);

/* Numbers an object_put, by which the node knows it when it is sent again (kv_wire.h).  false:
 * too many are under way behind one that has not ended. */
bool kvc_connection_put_begin(struct kvc_connection *connection, uint32_t *ret_number);
void kvc_connection_put_end(struct kvc_connection *connection, uint32_t number);

struct kvc_subop {
    struct kvc_subop *next; /* free */
    struct kvc_list of_connection;
    struct kvc_list of_op;
    struct kv_op *op;
    struct kvc_connection *connection;
    /* Where it is; what the fields mean is its operation's. */
    uint32_t layer;
    uint32_t head;
    uint64_t position;
    bool alone;    /* object: only the rest of what the object at `head` needs */
    bool finished; /* nothing left to ask */
};

/* NULL: out of memory. */
struct kvc_subop *kvc_subop_add(struct kv_op *op, struct kvc_connection *connection);
void kvc_subop_free(struct kvc_subop *subop);

#endif
