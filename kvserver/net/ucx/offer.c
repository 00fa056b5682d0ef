#define _GNU_SOURCE /* process_vm_readv */
#include "kvserver/net/ucx/offer.h"

#include "kvserver/base/hash.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

static _Atomic uint64_t last_number;

struct kv_offer *kv_offer_take(struct kv_offers *offers)
{
    struct kv_offer *offer = offers->spare;
    uint64_t number;

    if (offer != NULL)
        offers->spare = offer->next;
    else
        offer = malloc(sizeof(*offer));
    if (offer == NULL)
        return NULL;
    /* kv_mix64() is a bijection that maps 0 to 0, so numbers differ and none is 0. */
    number = kv_mix64(atomic_fetch_add_explicit(&last_number, 1, memory_order_relaxed) + 1);
    atomic_store_explicit(&offer->number, number, memory_order_relaxed);
    return offer;
}

void kv_offer_end(struct kv_offer *offer)
{
    atomic_store_explicit(&offer->number, 0, memory_order_relaxed);
    /* Pairs with the fence of kv_offer_read(): a reader that sees the owner's next write to the
     * data also sees the 0. */
    atomic_thread_fence(memory_order_seq_cst);
}

void kv_offer_put(struct kv_offers *offers, struct kv_offer *offer)
{
    kv_offer_end(offer);
    offer->next = offers->spare;
    offers->spare = offer;
}

void kv_offers_free(struct kv_offers *offers)
{
    while (offers->spare != NULL) {
        struct kv_offer *offer = offers->spare;

        offers->spare = offer->next;
        free(offer);
    }
}

size_t kv_offer_write(struct kv_offer *offer,
                      const void *header,
                      size_t header_bytes,
                      const void *data,
                      uint32_t process)
{
    assert(header_bytes <= KV_TRANSPORT_HEADER_MAX);
    const struct kv_offer_tail tail = {
        .data = (uintptr_t)data,
        .offer = (uintptr_t)&offer->number,
        .number = atomic_load_explicit(&offer->number, memory_order_relaxed),
        .process = process,
    };

    memcpy(offer->message, header, header_bytes);
    memcpy(offer->message + header_bytes, &tail, sizeof(tail));
    return header_bytes + sizeof(tail);
}

enum kv_offer_outcome kv_offer_read(const struct kv_offer_tail *tail,
                                    size_t bytes,
                                    const struct kv_iov *iov,
                                    unsigned n_iov)
{
    struct iovec pieces[KV_IOV_MAX];
    struct iovec remote = {(void *)(uintptr_t)tail->data, bytes};
    struct iovec remote_number = {(void *)(uintptr_t)tail->offer, sizeof(uint64_t)};
    uint64_t number = 0;
    struct iovec here = {&number, sizeof(number)};
    pid_t process = (pid_t)tail->process;
    ssize_t n;

    assert(n_iov <= KV_IOV_MAX);
    for (unsigned i = 0; i < n_iov; i++)
        pieces[i] = (struct iovec){iov[i].base, iov[i].bytes};
    n = process_vm_readv(process, pieces, n_iov, &remote, 1, 0);
    /* The number is read after the data.  If it is unchanged, the offer had not ended when the
     * data was read. */
    atomic_thread_fence(memory_order_seq_cst);
    if (process_vm_readv(process, &here, 1, &remote_number, 1, 0) != (ssize_t)sizeof(number))
        return errno == EPERM || errno == ENOSYS ? KV_OFFER_REFUSED : KV_OFFER_GONE;
    if (number != tail->number)
        return KV_OFFER_GONE;
    return n == (ssize_t)bytes ? KV_OFFER_WHOLE : KV_OFFER_REFUSED;
}
