/* node.h - kvc_node: a node as the client sees it.
 *
 * A connected node has a control transport, and a connection to each of its data threads.
 * Callbacks, which may be anywhere, only record here that they have failed;
 * kvc_nodes_step() (node_connect.h) closes them later, outside of callbacks.
 *
 * Threads: the client's.  Memory: valid until the client is closed.
 */
#ifndef KV_CLIENT_NODE_H
#define KV_CLIENT_NODE_H

#include "client/list.h"
#include "kvserver/net/transport.h"
#include "proto/kv_wire.h"

#include <stdbool.h>
#include <stdint.h>

struct kv_client;
struct kvc_control;
struct kvc_connection;
struct kvc_request;

enum {
    KVC_PENDING_RECEIVES_MAX = 64, /* large replies of one node that are being received */
};

enum kvc_node_state {
    KVC_NODE_IDLE,
    KVC_NODE_CONNECTING, /* hello has been sent */
    KVC_NODE_CONNECTED,
};

struct kvc_node {
    struct kv_client *client;
    uint32_t index;
    enum kvc_node_state state;
    enum kv_channel_mode mode, first_mode; /* now, and at each new attempt */
    bool may_fall_back;
    bool is_second_try;      /* of the first connection */
    const char *address;     /* as in the list */
    const char *listed_name; /* as in the list; "": it may call itself anything */

    struct kvc_control *control;
    uint32_t n_calls;           /* with the control transport */
    struct kvc_list of_calling; /* in client->calling, if it has any */
    bool has_attached;

    struct kv_id128 client_id; /* in hello; new for every connection */

    /* From hello; valid while CONNECTED. */
    uint32_t version; /* of the protocol: the greatest that both speak */
    struct kvc_connection *connections;
    uint32_t n_connections;
    uint32_t client_index;
    struct kv_id128 client_token;
    uint32_t credits;
    uint32_t bulk_bytes_max;

    /* From the last hello. */
    struct kv_id128 node_id;
    uint32_t incarnation; /* incremented when node_id changes: earlier sessions are lost */
    bool has_connected;   /* ever */
    char name[KV_NAME_BYTES_MAX + 1];
    char transports[256];
    char transport[128];
    uint64_t memory_bytes;

    /* Recorded by kvc_node_fail() until kvc_nodes_step() closes the connections. */
    kv_status_t failure;
    kv_status_t last_failure; /* why it is not connected; KV_OK: it is, or was never tried */
    char failure_text[256];   /* of either; "" if there is none */

    uint64_t
        unanswered_since_us; /* since when a reply is due and nothing has arrived; 0: not due */
    struct kvc_request *ping;
    uint32_t n_requests;         /* not released */
    uint64_t bulk_moving;        /* bytes of their bulk data that the transport has */
    uint32_t n_pending_receives; /* large replies that are being received */
    uint64_t requests, rows_in, rows_out, reconnects;
};

/* The argument of a channel's events: the first member of what has the channel. */
struct kvc_link {
    struct kvc_node *node;
};

/* Records that the connection has failed.  May be called from callbacks. */
void kvc_node_fail(struct kvc_node *node, kv_status_t status, const char *why);

/* Called when anything has arrived from the node.  That its transport has taken a message says nothing: the
 * node may be gone, or no longer know the client. */
void kvc_node_mark_alive(struct kvc_node *node);

#endif
