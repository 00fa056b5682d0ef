/* codebook.h - the codebooks of one data thread: centroids that stand for the keys of some
 * consecutive segments of a unit (a chapter).
 *
 * A codebook is made by an index job (index.h), never changes afterwards, and lives as long as
 * a segment has its codes: it is inherited with the segments, and goes with the last of them.
 *
 * Threads: the data thread.  Memory: records from the system as they are used, centroids from
 * the arena.
 */
#ifndef KV_CODEBOOK_H
#define KV_CODEBOOK_H

#include "arena.h"
#include "keys.h"
#include "kv_status.h"
#include "pool.h"
#include "pq.h"

enum {
    KV_CODEBOOKS_MAX = 64 << 10, /* of one data thread */
    KV_CODEBOOK_DIM_MAX = 1024,
    KV_CODEBOOK_KEYS = 16 << 10, /* elements of keys that are converted at once */
};

struct kv_codebook {
    uint64_t serial; /* counts up with every codebook of the thread */
    uint32_t refs;   /* segments that have its codes, and the job that makes it */
    bool open;       /* rows behind its segments get its codes when a query first meets them */
    struct kv_pq_shape shape;
    float *centroids, *half_squares; /* see pq.h */
    int class_id, tile_class;
    uint32_t iterations; /* of k-means that made it */
    uint64_t train_us;   /* of the thread's time */
};

struct kv_codebooks {
    struct kv_arena *arena;
    struct kv_pool *pool;
    uint64_t serial; /* of the last one made */
};

bool kv_codebooks_init(struct kv_codebooks *books, struct kv_arena *arena);
void kv_codebooks_fini(struct kv_codebooks *books);

/* One with a ref of the caller's; centroids are whatever they are.  KV_NO_MEMORY: no page, or
 * KV_CODEBOOKS_MAX of them; KV_TOO_LARGE: its centroids do not fit a page. */
kv_status_t kv_codebook_create(struct kv_codebooks *books,
                               const struct kv_pq_shape *shape,
                               uint32_t *ret_codebook);
void kv_codebook_ref(struct kv_codebooks *books, uint32_t codebook);
void kv_codebook_unref(struct kv_codebooks *books, uint32_t codebook);

static inline struct kv_codebook *kv_codebook_at(const struct kv_codebooks *books,
                                                 uint32_t codebook)
{
    return kv_pool_at(books->pool, codebook);
}

#endif
