/* request_private.h - what request.c and request_receive.c share. */
#ifndef KV_CLIENT_REQUEST_PRIVATE_H
#define KV_CLIENT_REQUEST_PRIVATE_H

#include "client/list.h"
#include "proto/kv_wire.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kv_remote;
struct kv_trip;

/* A request id: the attempt's number, the node's, the trip's slot in its pool. */
enum {
    ID_SLOT_BITS = 16,
    ID_REMOTE_BITS = 8,
    BACKOFF_MAX_US = 20000,
    NODE_MARGIN_MAX_US = 50000,
};

/* An answer that is too large to come with its header, on its way. */
struct receipt {
    struct kv_list of_client;
    struct kv_remote *remote;
    struct kv_wire_header header; /* as it came, unchecked */
    size_t bytes;
    uint8_t data[] __attribute__((aligned(16)));
};

/* Releases a trip that is over, once nothing can touch memory for it. */
void kv_trip_release(struct kv_trip *trip);

#endif
