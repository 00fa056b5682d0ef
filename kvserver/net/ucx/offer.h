/* offer.h - data that a peer on the same host reads straight from the sender's memory.
 *
 *   sender                                  receiver
 *   takes an offer: a fresh number
 *   sends header + tail  ---------------->  reads the data, then the offer's number
 *   ends the offer, uses the memory again   the tail's number still there: the data was whole
 *
 * An offer that holds another number is over, and what was read is not to be trusted.  Numbers
 * are never used twice in a process and say nothing by accident: the memory of an offer may
 * have become anything when a late reader looks.
 *
 * Threads: a list of offers belongs to one; peers read from other processes.  Memory: take/put.
 */
#ifndef KV_KVSERVER_NET_UCX_OFFER_H
#define KV_KVSERVER_NET_UCX_OFFER_H

#include "kvserver/net/transport.h"

#include <stdatomic.h>

/* What the receiver needs, behind the owner's header in the message. */
struct kv_offer_tail {
    uint64_t data;
    uint64_t offer;
    uint64_t number;
    uint32_t process;
    uint32_t reserved;
};

struct kv_offer {
    _Atomic uint64_t number; /* 0: over */
    struct kv_offer *next;
    unsigned char message[KV_TRANSPORT_HEADER_MAX + sizeof(struct kv_offer_tail)];
};

struct kv_offers {
    struct kv_offer *spare; /* begins as NULL */
};

/* NULL: out of memory. */
struct kv_offer *kv_offer_take(struct kv_offers *offers);
void kv_offer_put(struct kv_offers *offers, struct kv_offer *offer); /* ends it, too */
void kv_offers_free(struct kv_offers *offers);                       /* all are put */

/* From now on no reader takes what it read for the data. */
void kv_offer_end(struct kv_offer *offer);

/* Writes header and tail to offer->message; returns their bytes together. */
size_t kv_offer_write(struct kv_offer *offer,
                      const void *header,
                      size_t header_bytes,
                      const void *data,
                      uint32_t process);

enum kv_offer_outcome {
    KV_OFFER_WHOLE,
    KV_OFFER_GONE,    /* it is over, or its process is */
    KV_OFFER_REFUSED, /* the system does not let us read another process */
};

/* Reads the data into the pieces of `iov`, `bytes` together, from the sender's memory. */
enum kv_offer_outcome kv_offer_read(const struct kv_offer_tail *tail,
                                    size_t bytes,
                                    const struct kv_iov *iov,
                                    unsigned n_iov);

#endif
