/* owner.h - kvc_owner: the operation (op.h) as its requests and calls see it.
 *
 * Requests and calls report their results to their owner.  They do not depend on op.h.
 *
 * Threads: the client's.  Memory: a member of the operation.
 */
#ifndef KV_CLIENT_OWNER_H
#define KV_CLIENT_OWNER_H

#include "client/list.h"

#include <stdint.h>

struct kv_buffer;
struct kvc_owner;
struct kvc_request_ops;

struct kvc_owner {
    const struct kvc_request_ops *request_ops; /* request.h */
    /* A request or a call has ended and been handled; it may have been the last one. */
    void (*done)(struct kvc_owner *owner);
    uint64_t begin_us, deadline_us;
    uint64_t sent_us, arrived_us; /* when the last request was first sent, when the last
                                     reply arrived; 0: not yet */
    struct kv_buffer *buffer;     /* held until it ends; may be NULL */
    struct kvc_list requests;     /* not ended */
    uint32_t n_calls;             /* not ended */
    /* Limits that replies are checked against; 0: none. */
    uint32_t lease_wanted_ms;
    uint32_t tokens_max_wanted;
};

#endif
