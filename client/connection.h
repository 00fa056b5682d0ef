/* connection.h - the connections to a node's data threads.
 *
 * A connection is the way to one data thread: a channel, credits, and queues of sub-operations
 * (op.h), which become requests while it has credits (dispatch.h).
 *
 * Threads: the client's.  Memory: valid while the node is connected.
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
    struct kvc_list of_waiting; /* in client->waiting, if it has any */
    uint32_t in_flight[KV_PRIORITY_COUNT];
    uint32_t n_in_flight;
    uint32_t n_requeued;           /* sub-operations that wait for rows without a credit */
    struct kvc_list collected;     /* requests to be sent together: batch.h */
    struct kvc_list of_collecting; /* in client->collecting, if it has any */
    uint32_t n_collected;
    size_t collected_bytes;                     /* of their messages in a batch */
    uint64_t mark;                              /* kvc_connection_mark() */
    uint32_t put_next;                          /* the number of the next object_put */
    uint32_t put_settled;                       /* all puts below it have ended */
    uint64_t puts_ended[KV_WIRE_PUTS_MAX / 64]; /* of the puts between, a bit each */
};

/* Return the connection to the data thread of the node that owns an object's slot, or a unit of
 * a session.  NULL: its node is not connected; an operation that does not need the node may
 * continue. */
struct kvc_connection *kvc_connection_of_object(struct kvc_node *node, uint32_t slot);
struct kvc_connection *
kvc_session_connection(const struct kv_session *session, uint32_t layer, uint32_t head);

/* An operation that makes its sub-operations marks the connections that have one.  Removes the
 * marks of the operation before, which takes no look at any connection. */
void kvc_connections_unmark(struct kv_client *client);
/* Marks the connection.  Returns false if it was marked. */
bool kvc_connection_mark(struct kvc_connection *connection);
void kvc_connection_unmark(struct kvc_connection *connection);

/* Prepares a connection of the node, without a channel. */
void kvc_connection_init(struct kvc_connection *connection, struct kvc_node *node);

/* Whether a credit is free for this priority without using those reserved for others. */
bool kvc_connection_may_take(const struct kvc_connection *connection,
                             enum kv_priority priority);

/* Assigns the number by which a node recognizes an object_put that is resent (kv_wire.h).
 * Returns false if KV_WIRE_PUTS_MAX numbers are in use from the oldest outstanding put on. */
bool kvc_connection_put_begin(struct kvc_connection *connection, uint32_t *ret_number);
void kvc_connection_put_end(struct kvc_connection *connection, uint32_t number);

#endif
