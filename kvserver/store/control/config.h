/* config.h - a node's configuration, and the type of its replies to control requests: the part
 * of its interface (node.h) that the control thread needs as well.
 */
#ifndef KV_KVSERVER_STORE_CONTROL_CONFIG_H
#define KV_KVSERVER_STORE_CONTROL_CONFIG_H

#include "kvserver/base/clock.h"
#include "kvserver/net/transport.h"
#include "proto/kv_wire.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kv_disk;
struct kvs_event_sink;

struct kvs_node_config {
    const char *name;       /* shown in tables; copied */
    uint64_t memory_bytes;  /* for rows, objects and the work of queries, of all threads:
                             * address space at startup */
    uint32_t n_threads;     /* data threads, 1..KV_THREADS_MAX */
    uint32_t sessions_max;  /* 0: 4096 */
    uint32_t root_sessions; /* sessions here on one row of a root (placement.h) after which the
                                * root has twice as many rows; 0: a sixteenth of sessions_max */
    uint32_t clients_max;   /* 0: 1000 */
    uint32_t credits;       /* maximum requests in flight per client and data thread, at most
                               * KV_CREDITS_MAX; hello grants fewer, not below 8, when many
                               * clients share the node; 0: 64 */
    uint32_t lease_ms;      /* default and maximum session lease; 0: 60000 */
    uint32_t client_lease_ms;  /* silence after which a client is removed, if no control
                               * transport watches its process; 0: 30000 */
    uint32_t stuck_send_ms;    /* a client that for this long neither receives a reply nor sends
                               * announced data is disconnected; 0: 10000 */
    uint32_t object_ttl_s;     /* after which an object is removed whose put says none, in
                                * seconds; 0: it stays */
    const char *eviction;      /* what goes first when memory is short: a name in
                                * prefix/eviction.h; NULL: the first */
    uint64_t tenant_quota;     /* bytes that are kept for each tenant in prefixes; 0: any */
    uint64_t scrub_bytes;      /* of memory verified per second in the background; 0: none */
    uint64_t scrub_disk_bytes; /* the same of what is on disk */
    uint64_t seed;             /* for tokens and ids; 0: from the system */
    uint32_t wire_version_max; /* greatest version of the protocol that it speaks, at least
                                * KV_WIRE_VERSION_LEAST; 0: KV_WIRE_VERSION */
    const char *poll;          /* how long idle data threads look before they sleep: a name in
                                * base/idle.h; NULL: adaptive */
    const struct kv_clock *clock;
    struct kv_transport *transport;      /* borrowed for the node's life */
    bool message_control;                /* open a control port on the transport as well */
    struct kv_disk *disk;                /* borrowed for the node's life */
    uint64_t disk_bytes;                 /* room there for rows of prefixes; 0: none is saved */
    const struct kvs_event_sink *events; /* NULL: none; borrowed for the node's life */
};

/* `reply` is a packed message, valid during the call. */
typedef void (*kvs_node_reply_fn)(void *arg, const uint8_t *reply, size_t reply_bytes);

#endif
