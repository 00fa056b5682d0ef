/* request_private.h - declarations shared by request.c and request_receive.c. */
#ifndef KV_CLIENT_REQUEST_PRIVATE_H
#define KV_CLIENT_REQUEST_PRIVATE_H

#include "client/list.h"
#include "proto/kv_wire.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvc_node;
struct kvc_request;

enum {
    KVC_BACKOFF_MAX_US = 20000,
    KVC_NODE_MARGIN_MAX_US = 50000,
};

/* A large reply whose data is being received. */
struct kvc_pending_receive {
    struct kvc_list of_client;
    struct kvc_node *node;
    struct kv_wire_header header; /* as received, unchecked */
    size_t bytes;
    uint8_t data[] __attribute__((aligned(16)));
};

/* The steps of kvc_request_send().  kvc_request_prepare() gives it a new id and seals its
 * header; false: it cannot be sent now, and will be tried again.  kvc_request_hand_over() gives
 * its one message, without bulk, to the transport.  kvc_request_sent() notes what the transport
 * said. */
bool kvc_request_prepare(struct kvc_request *request);
kv_status_t kvc_request_hand_over(struct kvc_request *request);
void kvc_request_sent(struct kvc_request *request, kv_status_t status);

/* Releases a request that is over, as soon as the transport cannot access its memory. */
void kvc_request_release(struct kvc_request *request);

#endif
