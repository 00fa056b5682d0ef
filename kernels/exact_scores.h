/* exact_scores.h - exact scores of keys as they are stored, and their conversion to fp32.
 *
 * Numerical contract, the same bits in every instruction set.  An element is converted exactly
 * (a signaling NaN of fp16 becomes quiet).  An inner product of d elements is summed in 16
 * lanes: lanes start at 0; lane i % 16 = fma(query[i], key[i], lane i % 16), i ascending; then
 * lane[i] += lane[i + 8] for i < 8, lane[i] += lane[i + 4] for i < 4, and so on with 2 and 1.
 * Sixteen is the width of an AVX-512 register, and two of AVX2's.  Other headers refer to this
 * as the sum in 16 lanes.  The payload of a NaN is not specified.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Keys may have any alignment
 * and stride; queries and results need the alignment of their type.  Inputs and outputs must
 * not overlap.  The type must be valid.
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

/* Converts keys (n, d), `stride` bytes apart, to ret_values (n, d), dense. */
void kv_exact_scores_load(enum kv_key_type type,
                          const void *keys,
                          size_t stride,
                          size_t n,
                          size_t d,
                          float *ret_values);

/* Computes the inner products of queries (n_queries, d), dense, with keys (n, d), `stride`
 * bytes apart.
 *   ret_scores  (n_queries, n), scores_stride elements apart */
void kv_exact_scores_score(enum kv_key_type type,
                           const void *keys,
                           size_t stride,
                           size_t n,
                           size_t d,
                           const float *queries,
                           size_t n_queries,
                           float *ret_scores,
                           size_t scores_stride);

/* As kv_exact_scores_score(), for keys (n) given by pointers; they are prefetched. */
void kv_exact_scores_score_list(enum kv_key_type type,
                                const void *const *keys,
                                size_t n,
                                size_t d,
                                const float *queries,
                                size_t n_queries,
                                float *ret_scores,
                                size_t scores_stride);

/* One implementation of the family; functions as above.  The last one in the list that this CPU
 * supports is used. */
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
