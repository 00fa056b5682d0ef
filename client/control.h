/* control.h - the table of control transports for control operations: how the client library reaches a
 * node's control thread.
 *
 *   grpc     control_grpc.c: over a network; the only file of the client that includes grpc.h
 *   message  control_message.c: as data messages over the client's own port, for the loopback
 *            (embedded nodes) and the simulator
 *
 * A request and its reply are protobuf messages of kvstore.proto, packed.
 *
 * Threads: the client's thread; callbacks run inside progress().
 */
#ifndef KV_CLIENT_CONTROL_H
#define KV_CLIENT_CONTROL_H

#include "proto/kv_wire.h"

#include <stddef.h>
#include <stdint.h>

struct kvc_control; /* a connection to one node's control thread; begins with its row */

/* KV_OK: `reply` holds the packed reply, lent for the call.  KV_DEADLINE, KV_UNREACHABLE,
 * KV_CORRUPT: there is none, and `detail` says why. */
typedef void (*kvc_control_done_fn)(void *arg,
                                    kv_status_t status,
                                    const uint8_t *reply,
                                    size_t reply_bytes,
                                    const char *detail);

/* The node's process or the connection to it has ended. */
typedef void (*kvc_control_lost_fn)(void *arg);

struct kvc_control_transport {
    const char *name;
    /* Borrows the packed request; deadline_us counts from now.  `done` is called once, later,
     * never inside call(); also on close(), with KV_UNREACHABLE where no answer has come. */
    kv_status_t (*call)(struct kvc_control *control,
                        enum kv_op_id op,
                        const uint8_t *request,
                        size_t request_bytes,
                        uint64_t deadline_us,
                        kvc_control_done_fn done,
                        void *arg);
    /* Hello has succeeded: later calls are this client's.  Ties its life to the node's: lets
     * the node know when this process ends, and calls `lost` once when the node does.  May be
     * NULL in the row: nothing tells. */
    kv_status_t (*attach)(struct kvc_control *control,
                          uint32_t client_index,
                          const struct kv_id128 *client_token,
                          kvc_control_lost_fn lost,
                          void *arg);
    unsigned (*progress)(struct kvc_control *control); /* returns how many callbacks ran */
    void (*close)(struct kvc_control *control);
};

struct kvc_control {
    const struct kvc_control_transport *transport;
};

#ifdef KV_WITH_GRPC
/* Connects lazily to "HOST:PORT".  KV_INVALID: not an address. */
kv_status_t kvc_control_grpc_open(const char *address, struct kvc_control **ret_control);
#endif

#endif
