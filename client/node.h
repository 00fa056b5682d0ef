/* node.h - kvc_node: a node, as the client sees it.
 *
 * It has one connection at a time: a control transport and a connection per data thread.  Callbacks of
 * either only note that it is over; kvc_nodes_step() ends it, outside of them.
 *
 * Threads: the client's.  Memory: lives with the client.
 */
#ifndef KV_CLIENT_NODE_H
#define KV_CLIENT_NODE_H

#include "kvserver/net/transport.h"
#include "proto/kv_wire.h"

#include <stdbool.h>
#include <stdint.h>

struct kv_client;
struct kvc_control;
struct kvc_connection;
struct kvc_request;

enum {
    KVC_PENDING_RECEIVES_MAX =
        64, /* of a node: answers too large to come at once, on their way */
};

enum kvc_node_state {
    KVC_NODE_IDLE,
    KVC_NODE_CONNECTING, /* hello is under way */
    KVC_NODE_CONNECTED,
};

struct kvc_node {
    struct kv_client *client;
    uint32_t index;
    enum kvc_node_state state;
    enum kv_channel_mode mode, first_mode; /* now, and of each new try */
    bool may_fall_back;
    bool is_second_try; /* of the first connection */
    char *address;

    struct kvc_control *control;
    uint32_t n_calls;    /* with the control transport */
    uint64_t control_us; /* when the control transport was last looked at */
    bool has_attached;

    struct kv_id128 client_id; /* that hello says; new for every connection */

    /* From hello; valid while CONNECTED. */
    struct kvc_connection *connections;
    uint32_t n_connections;
    uint32_t client_index;
    struct kv_id128 client_token;
    uint32_t credits;
    uint32_t bulk_bytes_max;

    /* From the last hello. */
    struct kv_id128 node_id;
    uint32_t incarnation; /* raised when node_id changes: sessions of before are gone */
    bool has_connected;   /* ever */
    char name[KV_NAME_BYTES_MAX + 1];
    char transports[256];
    char transport[128];
    uint64_t memory_bytes;

    /* Something said that the connection is over; kvc_nodes_step() ends it. */
    kv_status_t failure;
    kv_status_t last_failure; /* why it is not connected; KV_OK: it is, or was not tried */
    char failure_text[256];   /* of either; "" if there is none */

    uint64_t
        unanswered_since_us; /* since when an answer is owed and nothing was heard; 0: not */
    struct kvc_request *ping;
    uint32_t n_requests;         /* not released */
    uint64_t bulk_moving;        /* bytes of bulk data handed to the transport by those */
    uint32_t n_pending_receives; /* answers on their way */
    uint64_t requests, rows_in, rows_out, reconnects;
};

/* Begins to connect, unless it has begun or is connected. */
void kvc_node_connect(struct kvc_node *node);

/* Notes that the connection is over; may be called from callbacks. */
void kvc_node_fail(struct kvc_node *node, kv_status_t status, const char *why);

/* Ends what was noted, and all that was under way with it. */
void kvc_nodes_step(struct kv_client *client);

/* Tells the node that the client leaves; nobody waits for the answer. */
void kvc_node_goodbye(struct kvc_node *node);

/* Closes control transports and channels, quietly. */
void kvc_node_close(struct kvc_node *node);

/* Whatever came from the node. */
void kvc_node_mark_alive(struct kvc_node *node);

/* Pings who is silent, gives up who was silent for too long. */
void kvc_nodes_timers(struct kv_client *client);

#endif
