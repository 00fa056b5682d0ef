/* pool.h - a fixed number of equal objects, allocated once.
 *
 * Invariants, which kv_pool_check() asserts:
 *   (1) An object is either lent or free.
 *   (2) The list of free objects names each of them once, and no other.
 *
 * Threads: one at a time.  Memory: create/destroy; kv_pool_get() lends an object until
 * kv_pool_put().
 */
#ifndef KV_KVSERVER_BASE_POOL_H
#define KV_KVSERVER_BASE_POOL_H

#include <stddef.h>
#include <stdint.h>

struct kv_pool;

/* NULL: out of memory.  Objects are zeroed here and aligned to 64 bytes. */
struct kv_pool *kv_pool_create(uint32_t n_objects, size_t object_bytes);
void kv_pool_destroy(struct kv_pool *pool);

/* NULL: all are lent.  What the object held last is still in it. */
void *kv_pool_get(struct kv_pool *pool);
void kv_pool_put(struct kv_pool *pool, void *object);

/* The i-th object, lent or not; for walks over all. */
void *kv_pool_at(struct kv_pool *pool, uint32_t index);
uint32_t kv_pool_index(const struct kv_pool *pool, const void *object);
uint32_t kv_pool_used(const struct kv_pool *pool);
uint32_t kv_pool_size(const struct kv_pool *pool);

/* Asserts the invariants, in time that grows with the pool. */
void kv_pool_check(struct kv_pool *pool);

#endif
