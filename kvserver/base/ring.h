/* ring.h - a bounded queue of pointers for many producers and one consumer.
 *
 * Each slot carries a sequence number: a producer claims a slot by advancing `tail`, writes the
 * pointer and releases the slot's number; the consumer acquires it.  It takes no locks.  A
 * push to a full ring fails.
 *
 * Invariants, which kv_ring_check() asserts:
 *   (1) The number of slots is a power of two, at least 2.
 *   (2) The ring has at most as many pointers as slots.
 *   (3) The slots of the positions that were pushed and not popped say so and hold a pointer;
 *       all others are free for the next push of their position.
 *
 * Threads: push from any thread, pop from one.  Memory: kv_ring_create() / kv_ring_destroy();
 * the ring does not own what the pointers refer to.
 */
#ifndef KV_KVSERVER_BASE_RING_H
#define KV_KVSERVER_BASE_RING_H

#include <stdbool.h>
#include <stdint.h>

struct kv_ring;

/* Creates a ring; `capacity` is rounded up to a power of two.  Returns NULL if out of memory.
 */
struct kv_ring *kv_ring_create(uint32_t capacity);
void kv_ring_destroy(struct kv_ring *ring);

/* Returns false if the ring is full. */
bool kv_ring_push(struct kv_ring *ring, void *item);

/* Returns NULL if the ring is empty. */
void *kv_ring_pop(struct kv_ring *ring);

/* Returns whether a pop would return a pointer.  Consumer only. */
bool kv_ring_ready(const struct kv_ring *ring);

/* Asserts the invariants.  Consumer only, while no thread pushes. */
void kv_ring_check(const struct kv_ring *ring);

#endif
