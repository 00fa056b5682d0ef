#include "kvserver/base/ring.h"

#include <assert.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

enum {
    LINE_BYTES = 64
};

/* At position p (p counts pushes, its slot is p modulo capacity) `sequence` is
 *
 *      p              free for the push of position p
 *      p + 1          holds the item of position p
 *      p + capacity   popped: free for the push of the next round
 */
struct slot {
    _Atomic uint64_t sequence;
    void *item;
};

struct kv_ring {
    uint64_t mask;
    struct slot *slots;
    alignas(LINE_BYTES) _Atomic uint64_t tail; /* producers */
    alignas(LINE_BYTES) uint64_t head;         /* the consumer only */
};

struct kv_ring *kv_ring_create(uint32_t capacity)
{
    uint64_t n_slots =
        2; /* with one slot "holds p" and "free for p + 1" were the same number */
    struct kv_ring *ring = aligned_alloc(LINE_BYTES, sizeof(*ring));

    if (ring == NULL)
        return NULL;
    while (n_slots < capacity)
        n_slots *= 2;
    ring->mask = n_slots - 1;
    ring->head = 0;
    atomic_init(&ring->tail, 0);
    ring->slots = calloc(n_slots, sizeof(*ring->slots));
    if (ring->slots == NULL) {
        kv_ring_destroy(ring);
        return NULL;
    }
    for (uint64_t i = 0; i < n_slots; i++)
        atomic_init(&ring->slots[i].sequence, i);
    return ring;
}

void kv_ring_destroy(struct kv_ring *ring)
{
    if (ring == NULL)
        return;
    free(ring->slots);
    free(ring);
}

bool kv_ring_push(struct kv_ring *ring, void *item)
{
    /* Relaxed: only a first guess; the slot's sequence says whether it is right. */
    uint64_t position = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    struct slot *slot;

    assert(item != NULL);
    for (;;) {
        slot = &ring->slots[position & ring->mask];
        /* Acquire: pairs with the release in pop, so that the consumer has read the old item
         * before this thread writes the new one. */
        uint64_t sequence = atomic_load_explicit(&slot->sequence, memory_order_acquire);
        int64_t distance = (int64_t)(sequence - position);

        if (distance < 0)
            return false; /* still holds the item of the round before */
        if (distance > 0) {
            /* Another producer took this position; relaxed as above. */
            position = atomic_load_explicit(&ring->tail, memory_order_relaxed);
            continue;
        }
        /* Relaxed: claims a number, hands over no data; that goes through the sequence.  A
         * failure loads the new tail. */
        if (atomic_compare_exchange_weak_explicit(&ring->tail, &position, position + 1,
                                                  memory_order_relaxed, memory_order_relaxed))
            break;
    }
    slot->item = item;
    /* Release: the item, and all that it points to, before the number that shows it. */
    atomic_store_explicit(&slot->sequence, position + 1, memory_order_release);
    return true;
}

void *kv_ring_pop(struct kv_ring *ring)
{
    struct slot *slot = &ring->slots[ring->head & ring->mask];
    void *item;

    /* Acquire: pairs with the release in push: the item is there when its number is. */
    if (atomic_load_explicit(&slot->sequence, memory_order_acquire) != ring->head + 1)
        return NULL;
    item = slot->item;
    /* Release: the item is read before a producer may write over it. */
    atomic_store_explicit(&slot->sequence, ring->head + ring->mask + 1, memory_order_release);
    ring->head++;
    return item;
}

bool kv_ring_ready(const struct kv_ring *ring)
{
    const struct slot *slot = &ring->slots[ring->head & ring->mask];

    /* Acquire: what the producer did before its push is seen by who acts on the answer. */
    return atomic_load_explicit(&slot->sequence, memory_order_acquire) == ring->head + 1;
}

void kv_ring_check(const struct kv_ring *ring)
{
    const uint64_t n_slots = ring->mask + 1;
    const uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);

    assert(n_slots >= 2 && (n_slots & ring->mask) == 0);
    assert(tail - ring->head <= n_slots);
    for (uint64_t position = ring->head; position < ring->head + n_slots; position++) {
        const struct slot *slot = &ring->slots[position & ring->mask];
        const uint64_t sequence = atomic_load_explicit(&slot->sequence, memory_order_acquire);

        if (position < tail)
            assert(sequence == position + 1 && slot->item != NULL);
        else
            assert(sequence == position);
    }
}
