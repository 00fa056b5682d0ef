/* client.h - the client: the objects of libkvclient, and what keeps them together.
 *
 *   kv_client       one per thread: a port, the nodes, outstanding operations (state.h)
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
 * Threads: a client and all its objects belong to one thread at a time; with a thread of the
 * library's own, to that as well, under a lock which all public functions take (enter.h).
 * Memory: kvc_client_create() / kv_client_close().
 */
#ifndef KV_CLIENT_CLIENT_H
#define KV_CLIENT_CLIENT_H

#include "client/include/kvclient.h"
#include "client/state.h"
#include "kvserver/net/transport.h"

#include <stdbool.h>
#include <stdint.h>

struct kv_clock;

struct kvc_node_setup {
    const char *address;       /* copied */
    const char *name;          /* copied; NULL: it may call itself anything */
    uint32_t weight;           /* in the map of nodes; 0: 1 */
    enum kv_channel_mode mode; /* of the data channels */
    bool may_fall_back;        /* use the network if shared memory does not work */
};

/* Everything that a client depends on.  Zeros select the defaults of kvclient.h. */
struct kvc_client_setup {
    const struct kvc_node_setup *nodes; /* in any order; no two are the same */
    uint32_t n_nodes;
    struct kv_transport *transport; /* borrowed for the client's life */
    kvc_control_open_fn open_control;
    const struct kv_clock *clock; /* borrowed for the client's life */
    uint64_t seed;                /* of ids and tokens; 0: from the system */
    const char *name;             /* copied */
    uint32_t tenant;
    const void *salt; /* (salt_bytes) as in kv_client_options */
    size_t salt_bytes;
    uint32_t wire_version_max; /* greatest version of the protocol that it speaks, at least
                                * KV_WIRE_VERSION_LEAST; 0: KV_WIRE_VERSION */
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

/* Runs one step of the event loop: messages, control transports, timers.  Does not end lost
 * connections (kvc_nodes_step()). */
void kvc_client_step(struct kv_client *client);

/* Sleeps until an event may have arrived, at most until the clock shows until_us. */
void kvc_client_wait_for_event(struct kv_client *client, uint64_t until_us);

/* Starts the library's own thread (kv_client_options.progress_thread), for a client on the
 * real clock: one on another is moved on by who moves its clock, and gets KV_UNSUPPORTED.
 * Fails with KV_NO_MEMORY and KV_IO, too. */
kv_status_t
kvc_client_start_thread(struct kv_client *client, char *detail, size_t detail_bytes);

#endif
