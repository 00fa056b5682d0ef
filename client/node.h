/* node.h - kv_remote: a node, as the client sees it.
 *
 * It has one connection at a time: a control carrier and a lane per data thread.  Callbacks of
 * either only note that it is over; kv_remotes_step() ends it, outside of them.
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
struct kv_control;
struct kv_lane;
struct kv_trip;

enum {
    KV_RECEIPTS_MAX = 64, /* of a node: answers too large to come at once, on their way */
};

enum kv_remote_state {
    KV_REMOTE_IDLE,
    KV_REMOTE_CONNECTING, /* hello is under way */
    KV_REMOTE_CONNECTED,
};

struct kv_remote {
    struct kv_client *client;
    uint32_t index;
    enum kv_remote_state state;
    enum kv_channel_mode mode, first_mode; /* now, and of each new try */
    bool may_fall_back;
    bool is_second_try; /* of the first connection */
    char *address;

    struct kv_control *control;
    uint32_t n_calls;    /* with the carrier */
    uint64_t control_us; /* when the carrier was last looked at */
    bool has_attached;

    struct kv_id128 client_id; /* that hello says; new for every connection */

    /* From hello; valid while CONNECTED. */
    struct kv_lane *lanes;
    uint32_t n_lanes;
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

    /* Something said that the connection is over; kv_remotes_step() ends it. */
    kv_status_t failure;
    kv_status_t last_failure; /* why it is not connected; KV_OK: it is, or was not tried */
    char failure_text[256];   /* of either; "" if there is none */

    uint64_t owed_us; /* since when an answer is owed and nothing was heard; 0: not */
    struct kv_trip *ping;
    uint32_t n_trips;     /* not released */
    uint64_t bulk_moving; /* bytes of bulk data handed to the transport by those */
    uint32_t n_receipts;  /* answers on their way */
    uint64_t requests, rows_in, rows_out, reconnects;
};

/* Begins to connect, unless it has begun or is connected. */
void kv_remote_connect(struct kv_remote *remote);

/* Notes that the connection is over; may be called from callbacks. */
void kv_remote_fail(struct kv_remote *remote, kv_status_t status, const char *why);

/* Ends what was noted, and all that was under way with it. */
void kv_remotes_step(struct kv_client *client);

/* Tells the node that the client leaves; nobody waits for the answer. */
void kv_remote_goodbye(struct kv_remote *remote);

/* Closes carriers and channels, quietly. */
void kv_remote_close(struct kv_remote *remote);

/* Whatever came from the node. */
void kv_remote_heard(struct kv_remote *remote);

/* Pings who is silent, gives up who was silent for too long. */
void kv_remotes_timers(struct kv_client *client);

#endif
