/* grpc_server.h - serves control operations over gRPC.
 *
 *     create ---> port bound, no call is answered yet
 *     start  ---> calls are served by step()
 *     destroy     closes the port, then ends open calls
 *
 * Every method of kv_method.h is handled the same way: one message in, kvs_node_control(), one
 * message out.  Attach stays open; when it ends, the node is told that the client is gone.
 *
 * What a client can cost is limited: the number of connections (a few more than clients, half
 * of them for one address), of calls at once (KVS_GRPC_CALLS_MAX, plus one Attach per client)
 * and per second, the size of a message (KV_WIRE_CONTROL_MAX), the time that a call may take to
 * send its message or to receive its reply (KVS_GRPC_PATIENCE_MS), and gRPC's own memory.
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

/* Binds "HOST:PORT", which no other process can bind from then on; port 0 picks a free port.
 * Fails with KV_INVALID or KV_IO if the address cannot be used; `detail` has the reason. */
kv_status_t kvs_grpc_server_create(const char *address,
                                   uint32_t clients_max,
                                   struct kvs_grpc_server **ret_server,
                                   char *detail,
                                   size_t detail_bytes);

/* Waits at most half a second for replies that are being sent.  Does not call the node, which
 * may already be destroyed.  NULL is allowed. */
void kvs_grpc_server_destroy(struct kvs_grpc_server *server);

/* Returns the bound port. */
uint16_t kvs_grpc_server_port(const struct kvs_grpc_server *server);

/* Starts accepting connections.  Borrows the node until destroy.  Fails with KV_IO if no thread
 * can be started. */
kv_status_t kvs_grpc_server_start(struct kvs_grpc_server *server, struct kvs_node *node);

/* Waits for calls for at most timeout_us, and serves those that have arrived. */
void kvs_grpc_server_step(struct kvs_grpc_server *server, uint64_t timeout_us);

/* Makes a waiting kvs_grpc_server_step() return.  Any thread, until destroy; for
 * kvs_node_set_control_waker(). */
void kvs_grpc_server_wake(void *server);

#endif
