/* offer.h - data that a peer on the same host reads directly from the sender's memory.
 *
 * A sender whose peer trusts it offers the data where it lies, by address.  Others can make such
 * a read wait; they offer data in their memory file (memory_file.h, peer_files.h), and copy
 * there what lies elsewhere.
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
 * kv_offer_take() / kv_offer_put(); kv_offers_init() / kv_offers_fini().
 */
#ifndef KV_KVSERVER_NET_UCX_OFFER_H
#define KV_KVSERVER_NET_UCX_OFFER_H

#include "kvserver/net/transport.h"
#include "kvserver/net/ucx/memory_file.h"

#include <assert.h>
#include <stdatomic.h>

/* What the receiver needs; follows the owner's header in the message.  Its bytes are part of
 * the messages between processes. */
struct kv_offer_tail {
    uint64_t data;   /* address of the data in the sender */
    uint64_t offer;  /* address of the offer's number in the sender */
    uint64_t number; /* the number when the message was sent */
    uint32_t process;
    uint32_t file; /* the descriptor of the memory file that has both, plus one; 0: none, or a
                    * sender of version 6, which does not know of it */
};

static_assert(sizeof(struct kv_offer_tail) == 32, "the same layout in both processes");

enum {
    KV_OFFER_COPY_BYTES = 1 << 20, /* of data that is copied */
    KV_OFFER_COPIES_MAX = 64,      /* of a list of offers; allocated by need */
};

struct kv_offer {
    _Atomic uint64_t number; /* 0: ended */
    struct kv_offer *next;
    const void *data; /* what is offered: the owner's or a copy */
    void *copy;       /* KV_OFFER_COPY_BYTES; NULL: none */
    bool is_in_file;  /* the offer, and its data */
    unsigned char message[KV_TRANSPORT_HEADER_MAX + sizeof(struct kv_offer_tail)];
};

struct kv_offer_slab;
struct kv_offer_copy;

struct kv_offers {
    struct kv_memory_file *file; /* NULL: data is offered by address */
    struct kv_offer *spare;      /* in memory of this process alone */
    struct kv_offer *spare_in_file;
    struct kv_offer_slab *slabs; /* that have the offers in the file */
    struct kv_offer_copy *spare_copies;
    unsigned n_copies; /* allocated */
};

void kv_offers_init(struct kv_offers *offers, struct kv_memory_file *file);
void kv_offers_fini(struct kv_offers *offers); /* all are put */

/* Returns an offer of the data with a new number; NULL if out of memory.  With a file, the data
 * is found there, or copied to it; where that fails, it is offered by address. */
struct kv_offer *kv_offer_take(struct kv_offers *offers, const void *data, size_t bytes);
void kv_offer_put(struct kv_offers *offers, struct kv_offer *offer); /* ends it, too */

/* Ends an offer: readers that check the number after this discard what they read. */
void kv_offer_end(struct kv_offer *offer);

/* Writes header and tail to offer->message.  Returns the sum of their bytes. */
size_t kv_offer_write(const struct kv_offers *offers,
                      struct kv_offer *offer,
                      const void *header,
                      size_t header_bytes,
                      uint32_t process);

enum kv_offer_outcome {
    KV_OFFER_WHOLE,   /* all data was read while the offer was valid */
    KV_OFFER_GONE,    /* the offer or its process has ended */
    KV_OFFER_ABSENT,  /* its file was not found: never to be seen from here, or closed */
    KV_OFFER_REFUSED, /* the system forbids it, or the reader itself: to be sent otherwise */
};

/* Reads `bytes` bytes at an address of the sender into the pieces of `iov`.  Waits for as long
 * as the sender likes. */
enum kv_offer_outcome kv_offer_read(const struct kv_offer_tail *tail,
                                    size_t bytes,
                                    const struct kv_iov *iov,
                                    unsigned n_iov);

#endif
