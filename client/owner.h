/* owner.h - kvc_owner: the operation (op.h) as its requests and calls see it.
 *
 * Requests and calls report their results to their owner.  They do not depend on op.h.
 *
 * Threads: the client's.  Memory: a member of the operation.
 */
#ifndef KV_CLIENT_OWNER_H
#define KV_CLIENT_OWNER_H

#include "client/list.h"
#include "proto/kv_status.h"

#include <stdint.h>

struct kv_buffer;
struct kv_wire_header;
struct kvc_owner;
struct kvc_request;
struct kvc_request_ops;

/* Functions that the owner provides.  None is NULL. */
struct kvc_owner_ops {
    /* Sets the header fields that only the owner knows, each time the request is sent. */
    void (*address)(const struct kvc_request *request, struct kv_wire_header *header);
    /* The request has failed.  Ends the request, or the owner with it. */
    void (*failed)(struct kvc_request *request, kv_status_t status, const char *detail);
    /* A request or a call has ended and been handled; it may have been the last one. */
    void (*done)(struct kvc_owner *owner);
};

struct kvc_owner {
    const struct kvc_owner_ops *ops;
    const struct kvc_request_ops *request_ops; /* request.h */
    uint64_t begin_us, deadline_us;
    uint64_t node_us;             /* how long the node had the request whose reply came last */
    uint64_t sent_us, arrived_us; /* when the last request was first sent, when the last
                                     reply arrived; 0: not yet */
    struct kv_buffer *buffer;     /* held until it ends; may be NULL */
    struct kvc_list requests;     /* not ended */
    struct kvc_list calls;        /* that report to it */
    uint32_t n_calls;             /* of those, not ended */
    /* Limits that replies are checked against; 0: none. */
    uint32_t lease_wanted_ms;
    uint32_t tokens_max_wanted;
};

#endif
