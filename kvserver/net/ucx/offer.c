#define _GNU_SOURCE /* process_vm_readv */
#include "kvserver/net/ucx/offer.h"

#include "kvserver/base/hash.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

static _Atomic uint64_t last_number;

enum {
    SLAB_BYTES = 64 << 10
};

struct kv_offer_slab {
    struct kv_offer_slab *next;
    struct kv_offer offers[];
};

enum {
    SLAB_OFFERS = (SLAB_BYTES - sizeof(struct kv_offer_slab)) / sizeof(struct kv_offer)
};

struct kv_offer_copy {
    struct kv_offer_copy *next;
};

void kv_offers_init(struct kv_offers *offers, struct kv_memory_file *file)
{
    *offers = (struct kv_offers){.file = file};
}

static uint64_t new_number(const struct kv_offers *offers, const struct kv_offer *offer)
{
    if (offer->is_in_file)
        return kv_memory_file_number(offers->file);
    /* kv_mix64() is a bijection that maps 0 to 0, so numbers differ and none is 0. */
    return kv_mix64(atomic_fetch_add_explicit(&last_number, 1, memory_order_relaxed) + 1);
}

static bool add_slab(struct kv_offers *offers)
{
    struct kv_offer_slab *slab = kv_memory_file_alloc(offers->file, SLAB_BYTES);

    if (slab == NULL)
        return false;
    slab->next = offers->slabs;
    offers->slabs = slab;
    for (unsigned i = 0; i < SLAB_OFFERS; i++) {
        struct kv_offer *offer = &slab->offers[i];

        offer->is_in_file = true;
        offer->next = offers->spare_in_file;
        offers->spare_in_file = offer;
    }
    return true;
}

/* Copies the data to the file, if there is room. */
static void *copy(struct kv_offers *offers, const void *data, size_t bytes)
{
    struct kv_offer_copy *copy = offers->spare_copies;

    if (bytes > KV_OFFER_COPY_BYTES)
        return NULL;
    if (copy != NULL) {
        offers->spare_copies = copy->next;
    } else {
        if (offers->n_copies == KV_OFFER_COPIES_MAX)
            return NULL;
        copy = kv_memory_file_alloc(offers->file, KV_OFFER_COPY_BYTES);
        if (copy == NULL)
            return NULL;
        offers->n_copies++;
    }
    return memcpy(copy, data, bytes);
}

static void put_copy(struct kv_offers *offers, void *memory)
{
    struct kv_offer_copy *copy = memory;

    copy->next = offers->spare_copies;
    offers->spare_copies = copy;
}

/* Returns NULL if the data is to be offered by address. */
static struct kv_offer *take_in_file(struct kv_offers *offers, const void *data, size_t bytes)
{
    struct kv_offer *offer;
    void *copied = NULL;

    if (offers->file == NULL || (offers->spare_in_file == NULL && !add_slab(offers)))
        return NULL;
    if (!kv_memory_file_has(offers->file, data, bytes)) {
        copied = copy(offers, data, bytes);
        if (copied == NULL)
            return NULL;
        data = copied;
    }
    offer = offers->spare_in_file;
    offers->spare_in_file = offer->next;
    offer->data = data;
    offer->copy = copied;
    return offer;
}

static struct kv_offer *take_by_address(struct kv_offers *offers, const void *data)
{
    struct kv_offer *offer = offers->spare;

    if (offer != NULL)
        offers->spare = offer->next;
    else
        offer = malloc(sizeof(*offer));
    if (offer == NULL)
        return NULL;
    offer->data = data;
    offer->copy = NULL;
    offer->is_in_file = false;
    return offer;
}

struct kv_offer *kv_offer_take(struct kv_offers *offers, const void *data, size_t bytes)
{
    struct kv_offer *offer = take_in_file(offers, data, bytes);

    if (offer == NULL)
        offer = take_by_address(offers, data);
    if (offer != NULL)
        atomic_store_explicit(&offer->number, new_number(offers, offer), memory_order_relaxed);
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
    struct kv_offer **list = offer->is_in_file ? &offers->spare_in_file : &offers->spare;

    kv_offer_end(offer);
    if (offer->copy != NULL)
        put_copy(offers, offer->copy);
    offer->next = *list;
    *list = offer;
}

void kv_offers_fini(struct kv_offers *offers)
{
    while (offers->spare != NULL) {
        struct kv_offer *offer = offers->spare;

        offers->spare = offer->next;
        free(offer);
    }
    while (offers->spare_copies != NULL) {
        struct kv_offer_copy *copy = offers->spare_copies;

        offers->spare_copies = copy->next;
        kv_memory_file_free(offers->file, copy);
    }
    while (offers->slabs != NULL) {
        struct kv_offer_slab *slab = offers->slabs;

        offers->slabs = slab->next;
        kv_memory_file_free(offers->file, slab);
    }
    offers->spare_in_file = NULL;
    offers->n_copies = 0;
}

size_t kv_offer_write(const struct kv_offers *offers,
                      struct kv_offer *offer,
                      const void *header,
                      size_t header_bytes,
                      uint32_t process)
{
    assert(header_bytes <= KV_TRANSPORT_HEADER_MAX);
    const struct kv_offer_tail tail = {
        .data = (uintptr_t)offer->data,
        .offer = (uintptr_t)&offer->number,
        .number = atomic_load_explicit(&offer->number, memory_order_relaxed),
        .process = process,
        .file = offer->is_in_file ? (uint32_t)offers->file->fd + 1 : 0,
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
    if (tail->number == 0)
        return KV_OFFER_REFUSED;
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
