/* state.h - struct kv_client: what the files of the client share.
 *
 * It has data and pointers only.  Whoever needs a part of the client includes this, and not
 * client.h, whose functions drive all the parts.
 *
 * Threads: the client's.  Memory: kvc_client_create() / kv_client_close().
 */
#ifndef KV_CLIENT_STATE_H
#define KV_CLIENT_STATE_H

#include "client/copies.h"
#include "client/due.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/roots.h"
#include "kvserver/base/idle.h"
#include "kvserver/base/random.h"
#include "kvserver/cluster/members.h"
#include "proto/kv_types.h"

#include <stdbool.h>
#include <stdint.h>

struct kv_client;
struct kv_pool;
struct kv_port;
struct kv_progress;
struct kv_session;
struct kv_transport;
struct kvc_cancel_message;
struct kvc_control;
struct kvc_message;
struct kvc_node;
struct kvc_shown;
struct kvc_subop;

/* Opens the control transport to a node's control thread without connecting. */
typedef kv_status_t (*kvc_control_open_fn)(struct kv_client *client,
                                           uint32_t node_index,
                                           const char *address,
                                           struct kvc_control **ret_control);

/* Events that nodes and sessions report to operations. */
struct kvc_op_events {
    /* The connection has ended; node->failure says why.  `was_connecting`: it was not
     * established before. */
    void (*node_lost)(struct kvc_node *node, bool was_connecting);
    /* The node cannot be brought to the session's generation.  May free the session. */
    void (*catch_up_failed)(struct kv_session *session,
                            const struct kvc_node *node,
                            kv_status_t status,
                            const char *detail);
};

struct kv_client {
    struct kvc_loop loop;
    struct kv_transport *transport;
    bool owns_transport;
    struct kv_port *port;
    kvc_control_open_fn open_control;
    struct kv_signal *woken;      /* by controls that have threads; NULL: there are none */
    struct kv_progress *progress; /* the library's own thread; NULL: none */
    struct kvc_shown *shown;      /* with it */
    struct kv_random random;
    char name[KV_NAME_BYTES_MAX + 1];
    uint32_t tenant;
    struct kv_id128 salt; /* of names; zeros: none */
    uint32_t version_max; /* greatest version of the protocol that it speaks */
    uint32_t credits;
    uint64_t deadline_us, peer_timeout_us, retry_us;

    struct kv_members *map;
    struct kvc_roots roots;
    struct kvc_copies copies;
    struct kvc_node *nodes; /* (n_nodes) as the map's members */
    uint32_t n_nodes;
    uint32_t n_failed;       /* nodes with a recorded failure */
    struct kvc_list told;    /* operations with a user that have ended, in that order */
    struct kv_watch *watch;  /* kv_client_fd(); NULL: nobody has asked */
    struct kvc_list calling; /* nodes with calls that their control transports have */
    uint32_t n_attached;     /* nodes whose control transports watch the client */
    uint64_t attached_us;    /* when those last made progress */
    uint32_t n_partings;     /* nodes that have yet to answer a goodbye */

    struct kv_pool *op_pool;
    struct kvc_list ops; /* not ended */
    const struct kvc_op_events *op_events;
    uint32_t n_preparing;
    struct kvc_list sessions;
    struct kvc_list buffers;
    struct kvc_list calls;
    struct kvc_dues resends;  /* calls that wait to be sent again */
    struct kvc_dues renewals; /* sessions whose leases are to be renewed */

    struct kv_pool *requests;
    uint64_t attempts; /* counter for request ids; its random start makes them unpredictable */
    struct kvc_message *free_small, *free_large;
    uint32_t n_large;
    struct kvc_list batches, free_batches; /* with the transport; for reuse */
    uint32_t n_batches;                    /* of both */
    struct kvc_list collecting;            /* connections with requests to be sent together */
    struct kvc_subop *free_subops;
    struct kvc_list waiting; /* connections with sub-operations; the first may send next */
    uint32_t n_waiting;
    uint64_t n_order_looks; /* at operations and sub-operations, for the order of others */
    uint64_t mark; /* of the connections for which the last operation made sub-operations */
    struct kvc_list pending_receives;
    struct kvc_list control_messages;           /* that the transport has, or that wait */
    struct kvc_cancel_message *cancel_messages; /* (KVC_CANCEL_MESSAGES) */

    struct kv_idle idle; /* of those who wait for operations */
    uint64_t moved_us;   /* when the port last made progress */
    uint64_t polled_us;

    uint64_t n_dropped; /* messages that failed their checks or matched no request */
    uint64_t n_corrupt; /* replies that failed their checks */
};

#endif
