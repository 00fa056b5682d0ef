/* key_copies_common.h - private to kernels/: where the parts of rounded queries and of a copy
 * are, the same for every implementation of key_copies.h.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_KEY_COPIES_COMMON_H
#define KV_KERNELS_KEY_COPIES_COMMON_H

#include "kernels/key_copies.h"

/* Memory of rounded queries: these arrays, one after the other. */
struct kv_rounded_queries {
    int8_t *q8;      /* (n_queries, 2 h), with 0 after the last element */
    float *dots;     /* (n_queries) */
    float *scales;   /* (n_queries) */
    int32_t *biases; /* (n_queries): -15 * the sum of q8 */
};

static inline struct kv_rounded_queries
kv_rounded_queries_at(size_t d, const void *rounded, size_t n_queries)
{
    int8_t *const q8 = (int8_t *)(uintptr_t)rounded;
    float *const dots = (float *)(void *)(q8 + n_queries * 2 * kv_key_copy_bytes(d));

    return (struct kv_rounded_queries){
        .q8 = q8,
        .dots = dots,
        .scales = dots + n_queries,
        .biases = (int32_t *)(void *)(dots + 2 * n_queries),
    };
}

/* Where in a block's copies the codes of a row are, and its scale, for which uint16_t may not
 * be aligned; h is kv_key_copy_bytes(d). */
static inline size_t kv_key_copy_codes_at(size_t h, size_t row)
{
    return row * h + row / KV_KEY_COPIES_GROUP * (KV_KEY_COPIES_GROUP * sizeof(uint16_t));
}
static inline size_t kv_key_copy_scale_at(size_t h, size_t row)
{
    return (row / KV_KEY_COPIES_GROUP + 1) * KV_KEY_COPIES_GROUP * h + row * sizeof(uint16_t);
}

#endif
