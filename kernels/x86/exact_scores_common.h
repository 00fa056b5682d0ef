/* exact_scores_common.h - private to kernels/: one function for each type of keys, for
 * exact_scores_avx2.c and exact_scores_avx512.c.
 *
 * Included after avx2.h or avx512.h, which define TARGET and INLINE.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_X86_EXACT_SCORES_COMMON_H
#define KV_KERNELS_X86_EXACT_SCORES_COMMON_H

#if defined(__x86_64__)

/* Prefetches into L2, which can have more misses outstanding than L1. */
INLINE void prefetch(const void *key, size_t bytes)
{
    const uintptr_t end = (uintptr_t)key + bytes;

    for (uintptr_t line = (uintptr_t)key & ~(uintptr_t)(LINE_BYTES - 1); line < end;
         line += LINE_BYTES)
        _mm_prefetch((const char *)line, _MM_HINT_T1);
}

/* Defined by each instruction set; the type is a constant at the calls. */
INLINE void load_rows(enum kv_key_type type,
                      const uint8_t *keys,
                      size_t stride,
                      size_t n,
                      size_t d,
                      float *ret_values);

INLINE void score_rows(enum kv_key_type type,
                       const uint8_t *keys,
                       size_t stride,
                       size_t n,
                       size_t d,
                       const float *queries,
                       size_t n_queries,
                       float *ret_scores,
                       size_t scores_stride);

INLINE void score_pointers(enum kv_key_type type,
                           const void *const *keys,
                           size_t n,
                           size_t d,
                           const float *queries,
                           size_t n_queries,
                           float *ret_scores,
                           size_t scores_stride);

TARGET static void load(enum kv_key_type type,
                        const void *keys,
                        size_t stride,
                        size_t n,
                        size_t d,
                        float *ret_values)
{
    switch (type) {
    case KV_KEY_FP32:
        load_rows(KV_KEY_FP32, keys, stride, n, d, ret_values);
        break;
    case KV_KEY_FP16:
        load_rows(KV_KEY_FP16, keys, stride, n, d, ret_values);
        break;
    case KV_KEY_BF16:
        load_rows(KV_KEY_BF16, keys, stride, n, d, ret_values);
        break;
    }
}

TARGET static void score(enum kv_key_type type,
                         const void *keys,
                         size_t stride,
                         size_t n,
                         size_t d,
                         const float *queries,
                         size_t n_queries,
                         float *ret_scores,
                         size_t scores_stride)
{
    switch (type) {
    case KV_KEY_FP32:
        score_rows(KV_KEY_FP32, keys, stride, n, d, queries, n_queries, ret_scores,
                   scores_stride);
        break;
    case KV_KEY_FP16:
        score_rows(KV_KEY_FP16, keys, stride, n, d, queries, n_queries, ret_scores,
                   scores_stride);
        break;
    case KV_KEY_BF16:
        score_rows(KV_KEY_BF16, keys, stride, n, d, queries, n_queries, ret_scores,
                   scores_stride);
        break;
    }
}

TARGET static void score_list(enum kv_key_type type,
                              const void *const *keys,
                              size_t n,
                              size_t d,
                              const float *queries,
                              size_t n_queries,
                              float *ret_scores,
                              size_t scores_stride)
{
    switch (type) {
    case KV_KEY_FP32:
        score_pointers(KV_KEY_FP32, keys, n, d, queries, n_queries, ret_scores, scores_stride);
        break;
    case KV_KEY_FP16:
        score_pointers(KV_KEY_FP16, keys, n, d, queries, n_queries, ret_scores, scores_stride);
        break;
    case KV_KEY_BF16:
        score_pointers(KV_KEY_BF16, keys, n, d, queries, n_queries, ret_scores, scores_stride);
        break;
    }
}

#endif

#endif
