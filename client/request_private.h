/* request_private.h - what request.c and request_receive.c share. */
#ifndef KV_CLIENT_REQUEST_PRIVATE_H
#define KV_CLIENT_REQUEST_PRIVATE_H

#include "client/list.h"
#include "proto/kv_wire.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvc_node;
struct kvc_request;

/* A request id: the attempt's number, the node's, the request's slot in its pool. */
enum {
    KVC_ID_SLOT_BITS = 16,
    KVC_ID_NODE_BITS = 8,
    KVC_BACKOFF_MAX_US = 20000,
    KVC_NODE_MARGIN_MAX_US = 50000,
};

/* An answer that is too large to come with its header, on its way. */
struct kvc_pending_receive {
    struct kvc_list of_client;
    struct kvc_node *node;
    struct kv_wire_header header; /* as it came, unchecked */
    size_t bytes;
    uint8_t data[] __attribute__((aligned(16)));
};

/* Releases a request that is over, once nothing can touch memory for it. */
void kvc_request_release(struct kvc_request *request);

#endif
