/* grpc_server.h - carries control operations to the node over gRPC.
 *
 *     create ---> listens, nobody is answered yet
 *     start  ---> calls come in during step()
 *     destroy     closes the port, then says goodbye to open calls
 *
 * Every method of kv_method.h is handled alike: one message in, kvs_node_control(), one message
 * out.  Attach stays open; when it ends, the node hears that the client is gone.
 *
 * What a client can cost is bounded: connections (some more than clients, half of them for one
 * address), calls at once (KVS_GRPC_CALLS_MAX besides one Attach per client) and in a second,
 * the size of a message (KV_WIRE_CONTROL_MAX), the time a call may take to send its message or
 * to take its answer (KVS_GRPC_PATIENCE_MS), and gRPC's own memory.
 *
 * Threads: one thread, the control thread, calls everything but kvs_grpc_server_wake().  The
 * port has a thread of its own (acceptor.h).
 */
#ifndef KV_KVSERVER_GRPC_SERVER_H
#define KV_KVSERVER_GRPC_SERVER_H

#include "proto/kv_status.h"

#include <stddef.h>
#include <stdint.h>

struct kvs_grpc_server;
struct kvs_node;

enum {
    KVS_GRPC_CALLS_MAX = 1024,
    KVS_GRPC_PATIENCE_MS = 10000,
};

/* Listens on "HOST:PORT", which only this process does from then on; port 0 takes a free one.
 * KV_INVALID, KV_IO: `detail` says what was wrong with the address. */
kv_status_t kvs_grpc_server_create(const char *address,
                                   uint32_t clients_max,
                                   struct kvs_grpc_server **ret_server,
                                   char *detail,
                                   size_t detail_bytes);

/* The node may be destroyed already: it is not called any more.  Answers under way are waited
 * for, half a second at most.  NULL is allowed. */
void kvs_grpc_server_destroy(struct kvs_grpc_server *server);

/* The port that is listened on. */
uint16_t kvs_grpc_server_port(const struct kvs_grpc_server *server);

/* Lets connections in.  Borrows the node until destroy.  KV_IO: no thread. */
kv_status_t kvs_grpc_server_start(struct kvs_grpc_server *server, struct kvs_node *node);

/* Waits for calls at most timeout_us, serves those that are there. */
void kvs_grpc_server_step(struct kvs_grpc_server *server, uint64_t timeout_us);

/* Ends a step() that waits.  Any thread, until destroy; for kvs_node_set_control_waker(). */
void kvs_grpc_server_wake(void *server);

#endif
