/* client.h - the client: the objects of libkvclient, and what keeps them together.
 *
 *   kv_client       one per thread: a port, the nodes, outstanding operations
 *   kvc_node        a node as the client sees it: its control transport, and a connection to
 *                   each of its data threads (node.h)
 *   kvc_connection  the way to one data thread: a channel, credits, queues of sub-operations
 *                   (connection.h)
 *   kv_op           an operation that the caller began (op.h)
 *   kvc_subop       the part of an operation that one connection serves: a cursor over rows or
 *                   objects (connection.h)
 *   kvc_request     one message to a data thread and its reply; uses one credit (request.h)
 *   kvc_message     a message's memory, until the transport has released it (request.h)
 *   kvc_call        one control operation on one node (call.h)
 *   kv_session      a session's handle (session.h)
 *   kv_buffer       registered memory of the caller (buffer.h)
 *
 * Invariants:
 *   (1) A request that is not released holds its buffer; so does an operation that has not
 *       ended.
 *   (2) Only the latest id of a request is valid: a reply with another id is dropped, and its
 *       data is refused.  A request is not resent while its data is being received.
 *   (3) Nothing blocks: everything that takes time is a state that kv_poll() advances.  Only
 *       kv_wait(), kv_finish(), kv_client_wait() and kv_client_open() sleep.
 *   (4) Callbacks of the transport and of control transports only change states.  Channels and
 *       control transports are closed outside of them, by kvc_nodes_step().
 *
 * Threads: a client and all its objects belong to one thread.  Memory: kvc_client_create() /
 * kv_client_close().
 */
#ifndef KV_CLIENT_CLIENT_H
#define KV_CLIENT_CLIENT_H

#include "client/control.h"
#include "client/include/kvclient.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/op.h"
#include "client/request.h"
#include "kvserver/base/random.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/net/transport.h"

struct kv_clock;
struct kv_pool;

/* Opens the control transport to a node's control thread without connecting. */
typedef kv_status_t (*kvc_control_open_fn)(struct kv_client *client,
                                           uint32_t node_index,
                                           const char *address,
                                           struct kvc_control **ret_control);

struct kvc_node_setup {
    const char *address;       /* copied */
    enum kv_channel_mode mode; /* of the data channels */
    bool may_fall_back;        /* use the network if shared memory does not work */
};

/* Everything that a client depends on.  Zeros select the defaults of kvclient.h. */
struct kvc_client_setup {
    const struct kvc_node_setup *nodes;
    uint32_t n_nodes;
    struct kv_transport *transport; /* borrowed for the client's life */
    kvc_control_open_fn open_control;
    const struct kv_clock *clock; /* borrowed for the client's life */
    uint64_t seed;                /* of ids, tokens and placement roots; 0: from the system */
    const char *name;             /* copied */
    uint32_t tenant;
    uint32_t ops_max;
    uint32_t credits;         /* use at most this many of those granted; 0: all */
    uint32_t deadline_ms;     /* of operations begun with deadline 0; 0: 5000 */
    uint32_t peer_timeout_ms; /* 0: 2000 */
    uint32_t retry_ms;        /* a request without a reply is resent after this time; 0: 1000 */
};

/* Creates a client without connecting: operations connect to the nodes that they need.  Never
 * blocks.  Fails with KV_INVALID, KV_NO_MEMORY or the transport's error. */
kv_status_t kvc_client_create(const struct kvc_client_setup *setup,
                              struct kv_client **ret_client);

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
    struct kv_random random;
    char name[KV_NAME_BYTES_MAX + 1];
    uint32_t tenant;
    uint32_t credits;
    uint64_t deadline_us, peer_timeout_us, retry_us;

    struct kv_placement placement;
    struct kvc_node *nodes;
    uint32_t n_nodes;
    uint32_t n_failed; /* nodes with a recorded failure */

    struct kv_pool *op_pool;
    struct kvc_list ops; /* not ended */
    const struct kvc_op_events *op_events;
    uint32_t n_preparing;
    struct kvc_list sessions;
    struct kvc_list buffers;
    struct kvc_list calls;

    struct kv_pool *requests;
    uint64_t attempts; /* counter for request ids; its random start makes them unpredictable */
    struct kvc_message *free_small, *free_large;
    uint32_t n_large;
    struct kvc_subop *free_subops;
    uint32_t turn_node, turn_thread; /* the connection that may send next */
    struct kvc_list pending_receives;
    struct kvc_list control_messages; /* that the transport has, or that wait */
    struct kvc_cancel_message cancel_messages[KVC_CANCEL_MESSAGES];

    uint64_t moved_us; /* when the port last made progress */
    uint64_t polled_us;

    uint64_t n_dropped; /* messages that failed their checks or matched no request */
    uint64_t n_corrupt; /* replies that failed their checks */
};

/* Advances every operation that can be advanced; called after something was begun. */
void kvc_client_dispatch(struct kv_client *client);

/* Runs one step of the event loop: messages, control transports, timers.  Does not end lost
 * connections (kvc_nodes_step()). */
void kvc_client_step(struct kv_client *client);

/* Sleeps until an event may have arrived, at most until the clock shows until_us. */
void kvc_client_wait_for_event(struct kv_client *client, uint64_t until_us);

/* Steps and sleeps until the operation has ended (NULL: any) or the clock shows until_us. */
void kvc_client_sleep(struct kv_client *client, const struct kv_op *op, uint64_t until_us);

#endif
