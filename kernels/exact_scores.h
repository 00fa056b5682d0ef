/* exact_scores.h - exact scores of keys as they are stored, and their conversion to fp32.
 *
 * Numerical contract, the same in every instruction set, to the bit: an element is converted
 * exactly (a signalling NaN of fp16 becomes quiet); an inner product of d elements is summed in
 * 16 lanes, element i in lane i % 16 with lane = fma(query[i], key[i], lane), i ascending,
 * lanes beginning at 0; then lane[i] += lane[i + 8] for i < 8, lane[i] += lane[i + 4] for i <
 * 4, and so on with 2 and 1.  (Which NaN a NaN is, is left open.)
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Keys need no alignment, and
 * any stride; queries and results need their type's.  What is read and what is written do not
 * overlap.  The type is valid.
 */
#ifndef KV_KERNELS_EXACT_SCORES_H
#define KV_KERNELS_EXACT_SCORES_H

#include <stddef.h>
#include <stdint.h>

/* How an element is stored; the numbers are those of enum kv_dtype (proto/kv_types.h). */
enum kv_key_type {
    KV_KEY_FP32 = 1,
    KV_KEY_FP16 = 2,
    KV_KEY_BF16 = 3,
};

/* True for a number of enum kv_key_type. */
static inline int kv_key_type_valid(unsigned type)
{
    return type >= KV_KEY_FP32 && type <= KV_KEY_BF16;
}

/* keys (n, d), `stride` bytes apart -> ret_values (n, d), dense */
void kv_exact_scores_load(enum kv_key_type type,
                          const void *keys,
                          size_t stride,
                          size_t n,
                          size_t d,
                          float *ret_values);

/* queries (n_queries, d), dense, against keys (n, d), `stride` bytes apart:
 *   ret_scores (n_queries, n), scores_stride elements apart */
void kv_exact_scores_score(enum kv_key_type type,
                           const void *keys,
                           size_t stride,
                           size_t n,
                           size_t d,
                           const float *queries,
                           size_t n_queries,
                           float *ret_scores,
                           size_t scores_stride);

/* As kv_exact_scores_score(), of keys that lie anywhere: keys (n) of pointers, prefetched ahead
 * of their use. */
void kv_exact_scores_score_list(enum kv_key_type type,
                                const void *const *keys,
                                size_t n,
                                size_t d,
                                const float *queries,
                                size_t n_queries,
                                float *ret_scores,
                                size_t scores_stride);

/* One implementation of the family; functions as above.  Slowest first: the last one that this
 * CPU supports is used. */
struct kv_exact_scores_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    void (*load)(enum kv_key_type type,
                 const void *keys,
                 size_t stride,
                 size_t n,
                 size_t d,
                 float *ret_values);
    void (*score)(enum kv_key_type type,
                  const void *keys,
                  size_t stride,
                  size_t n,
                  size_t d,
                  const float *queries,
                  size_t n_queries,
                  float *ret_scores,
                  size_t scores_stride);
    void (*score_list)(enum kv_key_type type,
                       const void *const *keys,
                       size_t n,
                       size_t d,
                       const float *queries,
                       size_t n_queries,
                       float *ret_scores,
                       size_t scores_stride);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_exact_scores_kernels *kv_exact_scores_kernels_at(unsigned i);

#endif
