/* ring.h - a bounded queue of pointers for many producers and one consumer.
 *
 * Each slot carries a sequence number: a producer claims a slot by advancing `tail`, writes the
 * pointer and releases the slot's number; the consumer acquires it.  No locks; a full ring
 * refuses.
 *
 * Invariants, which kv_ring_check() asserts:
 *   (1) There are two slots or more, a power of two.
 *   (2) The ring holds from none to as many pointers as it has slots.
 *   (3) The slots of the positions that were pushed and not popped say so and hold a pointer; all
 *       others are free for the next push of their position.
 *
 * Threads: push from any thread, pop from one.  Memory: create/destroy; the pointers stay the
 * callers'.
 */
#ifndef KV_KVSERVER_BASE_RING_H
#define KV_KVSERVER_BASE_RING_H

#include <stdbool.h>
#include <stdint.h>

struct kv_ring;

/* `capacity` is rounded up to a power of two.  NULL: out of memory. */
struct kv_ring *kv_ring_create(uint32_t capacity);
void kv_ring_destroy(struct kv_ring *ring);

/* false: the ring is full. */
bool kv_ring_push(struct kv_ring *ring, void *item);

/* NULL: the ring is empty. */
void *kv_ring_pop(struct kv_ring *ring);

/* True if a pop would find something.  Consumer only. */
bool kv_ring_ready(const struct kv_ring *ring);

/* Asserts the invariants.  Consumer only, while nobody pushes. */
void kv_ring_check(const struct kv_ring *ring);

#endif
