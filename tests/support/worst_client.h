/* worst_client.h - a client that does what a client may do, as badly as it can.
 *
 *   rows     its credits are full of puts of a quarter of a megabyte and more, begun from the
 *            last to the first, so that the node must keep the later ones until the first comes
 *   index    then codes of all its rows, of the most expensive kind, and all of it again
 *   objects  two of 64 MiB at any time
 *
 * What fails is begun again: a client at its worst does not mind.
 *
 * Threads: one.  Memory: worst_client_open() / worst_client_close().
 */
#ifndef KV_TESTS_SUPPORT_WORST_CLIENT_H
#define KV_TESTS_SUPPORT_WORST_CLIENT_H

#include "client/include/kvclient.h"

#include <stdbool.h>

enum {
    WORST_CLIENT_BYTES = 64 << 20, /* of the memory that it sends */
};

struct worst_client;

/* Borrows the client and its buffer.  NULL: out of memory. */
struct worst_client *worst_client_open(struct kv_client *client, struct kv_buffer *buffer);

/* Begins what is next; does not drive the client. */
void worst_client_step(struct worst_client *worst);

/* Whether it has done something of all kinds by now. */
bool worst_client_is_at_work(const struct worst_client *worst);

/* Cancels everything, and removes what the node has of it, which must answer meanwhile. */
void worst_client_leave(struct worst_client *worst);

/* Cancels everything. */
void worst_client_close(struct worst_client *worst);

#endif
