/* acceptor.h - the control port: accepts connections, checks them, and forwards them to gRPC.
 *
 *   client <--- outer ---> acceptor <--- inner, a pair of sockets ---> gRPC
 *
 * gRPC limits neither how many calls a client may start and reset per second nor how long a
 * connection may be silent.  Its own listener stops accepting for good once the process runs
 * out of descriptors.  So all bytes pass through the acceptor, which counts the client's HTTP/2
 * frames:
 *
 *   - A connection is passed to gRPC once its HTTP/2 preface has arrived.
 *   - A connection on which gRPC has answered no call is closed after ten seconds, or earlier,
 *     oldest first, if a new connection needs its place.  One address gets at most half of
 *     the places.
 *   - Frames above a rate per connection, and calls above a rate for all connections, wait in
 *     their sockets.
 *   - A connection that resets calls faster than any real client is closed.
 *
 * Threads: a thread of its own, which calls `take`; create/start/stop/destroy: one thread.
 */
#ifndef KV_KVSERVER_ACCEPTOR_H
#define KV_KVSERVER_ACCEPTOR_H

#include "proto/kv_status.h"

#include <stddef.h>
#include <stdint.h>

struct kvs_acceptor;

/* Passes gRPC's end of a connection: a non-blocking descriptor, which the callee owns. */
typedef void (*kvs_acceptor_take_fn)(void *arg, int fd);

/* Binds "HOST:PORT", which no other process can bind from then on; port 0 picks a free port.
 * Fails with KV_INVALID, KV_IO or KV_NO_MEMORY; `detail` has the reason. */
kv_status_t kvs_acceptor_create(const char *address,
                                uint32_t connections_max,
                                struct kvs_acceptor **ret_acceptor,
                                char *detail,
                                size_t detail_bytes);

/* Starts accepting connections, including those that are already waiting. */
kv_status_t
kvs_acceptor_start(struct kvs_acceptor *acceptor, kvs_acceptor_take_fn take, void *arg);

/* Stops calling `take`; open connections continue. */
void kvs_acceptor_stop(struct kvs_acceptor *acceptor);

/* Forwards what gRPC has already sent, then closes everything.  NULL is allowed. */
void kvs_acceptor_destroy(struct kvs_acceptor *acceptor);

uint16_t kvs_acceptor_port(const struct kvs_acceptor *acceptor);

#endif
