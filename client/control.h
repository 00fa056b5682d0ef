/* control.h - control transports: how the client sends control operations to a node.
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

struct kv_signal;
struct kvc_control; /* a connection to one node's control thread; begins with its transport */

/* Reports the result of a call.  On KV_OK, `reply` is the packed reply, valid during the
 * callback.  On KV_DEADLINE, KV_UNREACHABLE or KV_CORRUPT, no reply exists and `detail` says
 * why. */
typedef void (*kvc_control_done_fn)(void *arg,
                                    kv_status_t status,
                                    const uint8_t *reply,
                                    size_t reply_bytes,
                                    const char *detail);

/* Reports that the node's process, or the connection to it, has ended. */
typedef void (*kvc_control_lost_fn)(void *arg);

struct kvc_control_transport {
    const char *name;
    /* Begins a call.  Borrows the packed request; deadline_us counts from now.  Calls `done`
     * once, from progress() or from close() (with KV_UNREACHABLE), never from call(). */
    kv_status_t (*call)(struct kvc_control *control,
                        enum kv_op_id op,
                        const uint8_t *packed,
                        size_t packed_bytes,
                        uint64_t deadline_us,
                        kvc_control_done_fn done,
                        void *arg);
    /* Identifies later calls as this client's, after hello.  Lets the node detect the end of
     * this process, and calls `lost` once when the node's process ends.  May be NULL: neither
     * is detected. */
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
/* Connects lazily to "HOST:PORT".  A node that is silent for `silence_ms`, at least two seconds,
 * is lost.  `wake` is raised when progress() has something to do; it outlives the control, and may
 * be NULL.  KV_INVALID: not an address. */
kv_status_t kvc_control_grpc_open(const char *address,
                                  uint64_t silence_ms,
                                  struct kv_signal *wake,
                                  struct kvc_control **ret_control);
#endif

#endif
