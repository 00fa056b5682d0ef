/* acceptor.h - a listening port that keeps order: it takes connections up to a limit, closes
 * the ones above it at once, and goes on when the process is out of descriptors (gRPC's own
 * listener is deaf for good then).
 *
 * Threads: a thread of its own calls `take`; create/start/destroy: one thread.
 */
#ifndef KV_ACCEPTOR_H
#define KV_ACCEPTOR_H

#include "kv_status.h"

#include <stddef.h>
#include <stdint.h>

struct kv_acceptor;

/* Gives a connection: a descriptor that does not block. */
typedef void (*kv_acceptor_take_fn)(void *arg, int fd);

/* Listens on "HOST:PORT", which only this process does from then on; port 0 takes a free one.
 * KV_INVALID, KV_IO, KV_NO_MEMORY: `detail` says what was wrong. */
kv_status_t kv_acceptor_create(const char *address,
                               uint32_t connections_max,
                               struct kv_acceptor **ret_acceptor,
                               char *detail,
                               size_t detail_bytes);

/* Closes the port; nobody is given anything after this.  NULL is allowed. */
void kv_acceptor_destroy(struct kv_acceptor *acceptor);

uint16_t kv_acceptor_port(const struct kv_acceptor *acceptor);

/* Begins to take connections; those that came before are taken now. */
kv_status_t
kv_acceptor_start(struct kv_acceptor *acceptor, kv_acceptor_take_fn take, void *arg);

#endif
