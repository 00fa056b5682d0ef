/* offer.h - data that a peer on the same host reads directly from the sender's memory.
 *
 *   sender                                  receiver
 *   takes an offer with a new number
 *   sends header + tail  ---------------->  reads the data, then the offer's number
 *   ends the offer, reuses the memory       same number as in the tail: the data was complete
 *
 * If the number differs, the offer has ended and the data that was read is invalid: this is a
 * sequence lock whose writer ends instead of counting.  Numbers are never reused in a process.
 * They are 64-bit hashes and not small integers, because the memory of an ended offer may be
 * reused for other data, which a late reader must not mistake for its number.
 *
 * Threads: a list of offers belongs to one thread; peers read from other processes.  Memory:
 * kv_offer_take() / kv_offer_put().
 */
#ifndef KV_KVSERVER_NET_UCX_OFFER_H
#define KV_KVSERVER_NET_UCX_OFFER_H

#include "kvserver/net/transport.h"

#include <assert.h>
#include <stdatomic.h>

/* What the receiver needs; follows the owner's header in the message.  Its bytes are part of
 * the messages between processes. */
struct kv_offer_tail {
    uint64_t data;   /* address of the data in the sender */
    uint64_t offer;  /* address of the offer's number in the sender */
    uint64_t number; /* the number when the message was sent */
    uint32_t process;
    uint32_t reserved;
};

static_assert(sizeof(struct kv_offer_tail) == 32, "the same layout in both processes");

struct kv_offer {
    _Atomic uint64_t number; /* 0: ended */
    struct kv_offer *next;
    unsigned char message[KV_TRANSPORT_HEADER_MAX + sizeof(struct kv_offer_tail)];
};

struct kv_offers {
    struct kv_offer *spare; /* begins as NULL */
};

/* Returns an offer with a new number; NULL if out of memory. */
struct kv_offer *kv_offer_take(struct kv_offers *offers);
void kv_offer_put(struct kv_offers *offers, struct kv_offer *offer); /* ends it, too */
void kv_offers_free(struct kv_offers *offers);                       /* all are put */

/* Ends an offer: readers that check the number after this discard what they read. */
void kv_offer_end(struct kv_offer *offer);

/* Writes header and tail to offer->message.  Returns the sum of their bytes. */
size_t kv_offer_write(struct kv_offer *offer,
                      const void *header,
                      size_t header_bytes,
                      const void *data,
                      uint32_t process);

enum kv_offer_outcome {
    KV_OFFER_WHOLE,   /* all data was read while the offer was valid */
    KV_OFFER_GONE,    /* the offer or its process has ended */
    KV_OFFER_REFUSED, /* the system forbids reading another process */
};

/* Reads `bytes` bytes from the sender's memory into the pieces of `iov`. */
enum kv_offer_outcome kv_offer_read(const struct kv_offer_tail *tail,
                                    size_t bytes,
                                    const struct kv_iov *iov,
                                    unsigned n_iov);

#endif
