/* pool.h - a fixed number of objects of one size, allocated once.
 *
 * Invariants, which kv_pool_check() asserts:
 *   (1) An object is either in use or free.
 *   (2) The free list has each free object once, and no other.
 *
 * Threads: one at a time.  Memory: kv_pool_create() / kv_pool_destroy(); an object is the
 * caller's from kv_pool_get() to kv_pool_put().
 */
#ifndef KV_KVSERVER_BASE_POOL_H
#define KV_KVSERVER_BASE_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kv_pool;

/* Creates a pool of zeroed objects, aligned to 64 bytes.  Returns NULL if out of memory. */
struct kv_pool *kv_pool_create(uint32_t n_objects, size_t object_bytes);
void kv_pool_destroy(struct kv_pool *pool);

/* Returns an object, with its last content; NULL if all are in use. */
void *kv_pool_get(struct kv_pool *pool);
void kv_pool_put(struct kv_pool *pool, void *object);

/* Returns the object of that index, in use or not. */
void *kv_pool_at(struct kv_pool *pool, uint32_t index);
uint32_t kv_pool_index(const struct kv_pool *pool, const void *object);
bool kv_pool_is_used(const struct kv_pool *pool, uint32_t index);
uint32_t kv_pool_used(const struct kv_pool *pool);
uint32_t kv_pool_size(const struct kv_pool *pool);

/* Asserts the invariants, in time linear in the pool's size. */
void kv_pool_check(struct kv_pool *pool);

#endif
