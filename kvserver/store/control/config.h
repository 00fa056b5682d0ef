/* config.h - what a node is told at start, and how it answers control requests: of its interface
 * (node.h), what the control thread needs as well.
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

struct kvs_node_config {
    const char *name;         /* how the node calls itself; copied */
    uint64_t memory_bytes;    /* for rows and objects of all threads, reserved at start */
    uint32_t n_threads;       /* data threads, 1..KV_THREADS_MAX */
    uint32_t sessions_max;    /* 0: 4096 */
    uint32_t clients_max;     /* 0: 256 */
    uint32_t credits;         /* requests in flight per client and data thread, at most
                                 KV_CREDITS_MAX; hello grants fewer, not below 8, where many
                                 clients share a node; 0: 64 */
    uint32_t lease_ms;        /* default and longest; 0: 60000 */
    uint32_t client_lease_ms; /* silence after which a client is forgotten that nothing reports
                                 dead (message carrier); 0: 30000 */
    uint32_t stuck_send_ms;   /* a client that neither takes a reply nor sends the data that it
                                 announced for so long loses its channel; 0: 10000 */
    uint64_t scrub_bytes;     /* of memory checked in the background, a second; 0: none */
    uint64_t seed;            /* of tokens and ids; 0: from the system */
    const struct kv_clock *clock;
    struct kv_transport *transport; /* borrowed for the node's life */
    bool message_control;           /* open a control port on the transport as well */
    struct kv_disk *disk;           /* borrowed for the node's life */
};

/* `reply` is packed and lent for the call. */
typedef void (*kvs_node_reply_fn)(void *arg, const uint8_t *reply, size_t reply_bytes);

#endif
