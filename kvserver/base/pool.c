#include "kvserver/base/pool.h"

#include "kvserver/base/memory.h"

#include <assert.h>
#include <stdlib.h>

enum {
    ALIGN_BYTES = 64,
    LARGE_BYTES = 64 << 10, /* objects that profit from huge pages */
};

struct kv_pool {
    size_t stride_bytes;
    uint32_t n_objects;
    uint32_t n_free;
    uint32_t *free;     /* (n_free) indices, the last one goes next */
    bool *used;         /* (n_objects) */
    void *memory;       /* of the objects */
    size_t large_bytes; /* of memory, in huge pages; 0: it is from the heap */
    uint8_t *objects;
};

struct kv_pool *kv_pool_create(uint32_t n_objects, size_t object_bytes)
{
    struct kv_pool *pool = calloc(1, sizeof(*pool));
    size_t bytes;

    if (pool == NULL || object_bytes > SIZE_MAX - ALIGN_BYTES)
        goto err_destroy;
    /* At least one byte each, so that every object has its own address. */
    pool->stride_bytes =
        (object_bytes + (object_bytes == 0) + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
    if (__builtin_mul_overflow(pool->stride_bytes, (size_t)n_objects + 1, &bytes) ||
        __builtin_add_overflow(bytes, (size_t)ALIGN_BYTES, &bytes))
        goto err_destroy;
    pool->n_objects = n_objects;
    pool->n_free = n_objects;
    pool->free = calloc((size_t)n_objects + 1, sizeof(*pool->free));
    pool->used = calloc((size_t)n_objects + 1, sizeof(*pool->used));
    /* Pages are allocated on first access: a large pool costs only what is used.  Who reads a
     * large object from another process looks up its pages, which takes as long as to copy them
     * if they are small. */
    if (object_bytes >= LARGE_BYTES)
        pool->large_bytes = bytes;
    pool->memory = pool->large_bytes > 0 ? kv_memory_reserve(bytes) : calloc(1, bytes);
    if (pool->free == NULL || pool->used == NULL || pool->memory == NULL)
        goto err_destroy;
    pool->objects = (uint8_t *)pool->memory +
                    (ALIGN_BYTES - (uintptr_t)pool->memory % ALIGN_BYTES) % ALIGN_BYTES;
    for (uint32_t i = 0; i < n_objects; i++)
        pool->free[i] = n_objects - 1 - i;
    return pool;

err_destroy:
    kv_pool_destroy(pool);
    return NULL;
}

void kv_pool_destroy(struct kv_pool *pool)
{
    if (pool == NULL)
        return;
    if (pool->large_bytes > 0)
        kv_memory_release(pool->memory, pool->large_bytes);
    else
        free(pool->memory);
    free(pool->used);
    free(pool->free);
    free(pool);
}

void *kv_pool_get(struct kv_pool *pool)
{
    if (pool->n_free == 0)
        return NULL;

    uint32_t index = pool->free[--pool->n_free];

    pool->used[index] = true;
    return kv_pool_at(pool, index);
}

void kv_pool_put(struct kv_pool *pool, void *object)
{
    uint32_t index = kv_pool_index(pool, object);

    assert(pool->used[index]);
    pool->used[index] = false;
    pool->free[pool->n_free++] = index;
}

void *kv_pool_at(struct kv_pool *pool, uint32_t index)
{
    assert(index < pool->n_objects);
    return pool->objects + index * pool->stride_bytes;
}

uint32_t kv_pool_index(const struct kv_pool *pool, const void *object)
{
    size_t offset = (size_t)((const uint8_t *)object - pool->objects);

    assert(offset % pool->stride_bytes == 0);
    assert(offset / pool->stride_bytes < pool->n_objects);
    return (uint32_t)(offset / pool->stride_bytes);
}

bool kv_pool_is_used(const struct kv_pool *pool, uint32_t index)
{
    assert(index < pool->n_objects);
    return pool->used[index];
}

uint32_t kv_pool_used(const struct kv_pool *pool)
{
    return pool->n_objects - pool->n_free;
}

uint32_t kv_pool_size(const struct kv_pool *pool)
{
    return pool->n_objects;
}

void kv_pool_check(struct kv_pool *pool)
{
    assert(pool->n_free <= pool->n_objects);
    /* Free objects are marked as used during the check, so that one listed twice is found. */
    for (uint32_t i = 0; i < pool->n_free; i++) {
        assert(pool->free[i] < pool->n_objects && !pool->used[pool->free[i]]);
        pool->used[pool->free[i]] = true;
    }
    for (uint32_t i = 0; i < pool->n_objects; i++)
        assert(pool->used[i]);
    for (uint32_t i = 0; i < pool->n_free; i++)
        pool->used[pool->free[i]] = false;
}
