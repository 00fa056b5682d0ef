/* batch.h - requests to one data thread that leave in one message.
 *
 * Requests that are built in one dispatch, are not large and need no bulk are collected by
 * connection, and then sent together, each with an id, a deadline and a reply of its own.  A
 * request that is alone is sent as a message of its own.
 *
 *   dispatch:  build -> kvc_request_collect() ... kvc_request_collect() -> kvc_batches_flush()
 *
 * The messages of collected requests are copied, so that a request may end while the transport
 * still has its batch.
 *
 * Threads: the client's.  Memory: batches are allocated on demand, at most KVC_BATCHES_MAX, and
 * reused.
 */
#ifndef KV_CLIENT_BATCH_H
#define KV_CLIENT_BATCH_H

#include "client/list.h"
#include "proto/kv_wire.h"

#include <stddef.h>
#include <stdint.h>

struct kv_client;
struct kvc_connection;
struct kvc_node;
struct kvc_request;

enum {
    KVC_BATCHES_MAX = 64, /* that the transport may have; further requests are sent alone */
    KVC_BATCH_REQUEST_MAX = 32 << 10, /* bytes; a larger one is sent alone and at once: its copy
                                       * would take longer than a message saves, and the node
                                       * can begin while the next one is built */
};

struct kvc_batch {
    struct kvc_list of_client; /* in client->batches, or in client->free_batches */
    struct kv_client *client;
    struct kvc_node *node; /* NULL: its connection is lost */
    struct kv_wire_header header;
    uint8_t body[KV_WIRE_BODY_MAX] __attribute__((aligned(16)));
};

/* Sends a built request with others of its connection, at kvc_batches_flush() or before. */
void kvc_request_collect(struct kvc_request *request);

/* Sends what has been collected, of all connections. */
void kvc_batches_flush(struct kv_client *client);

/* The node's connections are about to be closed. */
void kvc_batches_lose(struct kvc_node *node);

/* Frees all batches; the port must be closed. */
void kvc_batches_fini(struct kv_client *client);

#endif
