/* connection.h - the lanes to a node's data threads.
 *
 *   kv_lane     a data thread of a node: a channel, credits, queues of errands
 *   kv_errand   what an operation still has to ask of one lane: a cursor over rows or objects
 *
 * An errand becomes trips (request.h) while its lane has credits.
 *
 * Threads: the client's.  Memory: lanes live with their connection, errands with their operation.
 */
#ifndef KV_CLIENT_CONNECTION_H
#define KV_CLIENT_CONNECTION_H

#include "client/list.h"
#include "proto/kv_priority.h"
#include "proto/kv_wire.h"

#include <stdbool.h>
#include <stdint.h>

struct kv_remote;
struct kv_channel;
struct kv_op;
struct kv_client;
struct kv_session;

/* What a channel's events name: the first member of what the channel is for. */
struct kv_link {
    struct kv_remote *remote;
};

struct kv_lane {
    struct kv_link link;
    struct kv_channel *channel;
    /* By priority.  Each is sure of some of the credits: operations that wait in the node for
     * another one's rows cannot keep these from coming. */
    struct kv_list errands[KV_PRIORITY_COUNT];
    uint32_t in_flight[KV_PRIORITY_COUNT];
    uint32_t n_in_flight;
    const struct kv_op *mark; /* the operation that made an errand for this lane last */
    uint32_t put_next;        /* the number of the next object_put */
    uint32_t put_settled;     /* all below it have ended */
    uint64_t puts_ended[KV_WIRE_PUTS_MAX / 64]; /* of those between */
};

/* The lane that owns a unit's slot, or an object's.  NULL: its node is not connected; an
 * operation that has nothing to do there any more may go on all the same. */
struct kv_lane *kv_lane_of_unit(struct kv_client *client, uint32_t slot);
struct kv_lane *kv_lane_of_object(struct kv_client *client, uint32_t slot);

/* The same for a unit of a session. */
struct kv_lane *
kv_session_lane(const struct kv_session *session, uint32_t layer, uint32_t head);

/* Forgets every lane's mark: an operation begins to look for its lanes. */
void kv_lanes_unmark(struct kv_client *client);

/* Turns errands into trips while there are credits. */
void kv_lanes_pump(struct kv_client *client);
void kv_lane_init(struct kv_lane *lane, struct kv_remote *remote);

/* Numbers an object_put, by which the node knows it when it is sent again (kv_wire.h).  false:
 * too many are under way behind one that has not ended. */
bool kv_lane_put_begin(struct kv_lane *lane, uint32_t *ret_number);
void kv_lane_put_end(struct kv_lane *lane, uint32_t number);

struct kv_errand {
    struct kv_errand *next; /* free */
    struct kv_list of_lane;
    struct kv_list of_op;
    struct kv_op *op;
    struct kv_lane *lane;
    /* Where it is; what the fields mean is its operation's. */
    uint32_t layer;
    uint32_t head;
    uint64_t position;
    bool alone;    /* object: only the rest of what the object at `head` needs */
    bool finished; /* nothing left to ask */
};

/* NULL: out of memory. */
struct kv_errand *kv_errand_add(struct kv_op *op, struct kv_lane *lane);
void kv_errand_free(struct kv_errand *errand);

#endif
