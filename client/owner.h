/* owner.h - kvc_owner: whom a request or a call is for, as these know it.
 *
 * An operation is one (op.h).  Requests and calls tell it what became of them; what else it is,
 * and what it does about it, is not theirs to know.
 *
 * Threads: the client's.  Memory: a part of what it stands for.
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
    /* A request or a call of it has ended and is dealt with: it may have been the last. */
    void (*done)(struct kvc_owner *owner);
    uint64_t begin_us, deadline_us;
    uint64_t sent_us, arrived_us; /* its last request, when that was sent first, its last
                                     answer; 0: none yet */
    struct kv_buffer *buffer;     /* held until it ends; may be NULL */
    struct kvc_list requests;     /* not ended */
    uint32_t n_calls;             /* not ended */
    /* What it asks for, which answers must keep to; 0: nothing. */
    uint32_t lease_wanted_ms;
    uint32_t tokens_max_wanted;
};

#endif
