/* acceptor.h - the control port: accepts connections and stands between them and gRPC.
 *
 *   client <--- outer ---> acceptor <--- inner, a pair of sockets ---> gRPC
 *
 * gRPC bounds neither how many calls a client begins and resets in a second nor how long a
 * connection may be silent, and its own listener stops accepting for good once the process has
 * run out of descriptors.  So bytes pass through here, and the HTTP/2 frames that the client
 * sends are counted:
 *
 *   - A connection is given to gRPC when its preface (HTTP/2) has arrived.
 *   - A connection on which gRPC has answered no call is closed after ten seconds, or before,
 *     the oldest first, when a new one needs its place.  One address has at most half of the
 *     places.
 *   - Frames beyond a rate, of a connection, and calls beyond a rate, of all, wait in their
 *     sockets.
 *   - A connection that resets calls faster than any client does is closed.
 *
 * Threads: a thread of its own, which calls `take`; create/start/stop/destroy: one thread.
 */
#ifndef KV_KVSERVER_ACCEPTOR_H
#define KV_KVSERVER_ACCEPTOR_H

#include "proto/kv_status.h"

#include <stddef.h>
#include <stdint.h>

struct kvs_acceptor;

/* Gives gRPC's end of a connection: a descriptor that does not block. */
typedef void (*kvs_acceptor_take_fn)(void *arg, int fd);

/* Listens on "HOST:PORT", which only this process does from then on; port 0 takes a free one.
 * KV_INVALID, KV_IO, KV_NO_MEMORY: `detail` says what was wrong. */
kv_status_t kvs_acceptor_create(const char *address,
                                uint32_t connections_max,
                                struct kvs_acceptor **ret_acceptor,
                                char *detail,
                                size_t detail_bytes);

/* Begins to take connections; those that came before are taken now. */
kv_status_t
kvs_acceptor_start(struct kvs_acceptor *acceptor, kvs_acceptor_take_fn take, void *arg);

/* Nobody is given anything after this; what is open goes on. */
void kvs_acceptor_stop(struct kvs_acceptor *acceptor);

/* Passes on what gRPC has sent, and closes everything.  NULL is allowed. */
void kvs_acceptor_destroy(struct kvs_acceptor *acceptor);

uint16_t kvs_acceptor_port(const struct kvs_acceptor *acceptor);

#endif
