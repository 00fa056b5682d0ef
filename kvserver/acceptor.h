/* acceptor.h - the control port: takes connections and stands between them and gRPC.
 *
 *   peer <--- outer ---> acceptor <--- inner, a pair of sockets ---> gRPC
 *
 * gRPC itself neither bounds how many calls a peer begins and resets in a second, nor how long
 * a connection may say nothing, and its own listener is deaf for good once descriptors have run
 * out.  So bytes pass through here, and the frames of HTTP/2 that the peer sends are counted:
 *
 *   - gRPC hears of a connection when its greeting is there (the preface of HTTP/2);
 *   - what gRPC has never answered a call of ends after some seconds, and, the oldest first,
 *     when a new one needs its place: all places, or those of one address, are taken;
 *   - calls begun beyond a rate, of a connection and of all, wait in their sockets;
 *   - a connection that resets more calls than a client ever would is closed.
 *
 * Threads: a thread of its own, which calls `take`; create/start/stop/destroy: one thread.
 */
#ifndef KV_ACCEPTOR_H
#define KV_ACCEPTOR_H

#include "kv_status.h"

#include <stddef.h>
#include <stdint.h>

struct kv_acceptor;

/* Gives gRPC's end of a connection: a descriptor that does not block. */
typedef void (*kv_acceptor_take_fn)(void *arg, int fd);

/* Listens on "HOST:PORT", which only this process does from then on; port 0 takes a free one.
 * KV_INVALID, KV_IO, KV_NO_MEMORY: `detail` says what was wrong. */
kv_status_t kv_acceptor_create(const char *address,
                               uint32_t connections_max,
                               struct kv_acceptor **ret_acceptor,
                               char *detail,
                               size_t detail_bytes);

/* Begins to take connections; those that came before are taken now. */
kv_status_t
kv_acceptor_start(struct kv_acceptor *acceptor, kv_acceptor_take_fn take, void *arg);

/* Nobody is given anything after this; what is open goes on. */
void kv_acceptor_stop(struct kv_acceptor *acceptor);

/* Passes on what gRPC has sent, and closes everything.  NULL is allowed. */
void kv_acceptor_destroy(struct kv_acceptor *acceptor);

uint16_t kv_acceptor_port(const struct kv_acceptor *acceptor);

#endif
