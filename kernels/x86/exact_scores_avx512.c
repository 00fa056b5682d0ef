/* Four keys by four queries at a time (inner_products_avx512.h); the elements after the last
 * sixteen are loaded with masks. */
#include "kernels/dispatch.h"
#include "kernels/exact_scores.h"
#include "kernels/x86/inner_products_avx512.h"

#include "kernels/x86/exact_scores_common.h"

#if defined(__x86_64__)

enum {
    AHEAD_BYTES = 4096, /* prefetched: of keys in a list, as many rows at most */
    AHEAD_ROWS_MAX = 32,
    AHEAD_ROWS = 16, /* consecutive keys: beside values, the hardware prefetcher loses them */
};

INLINE void score_rows(enum kv_key_type type,
                       const uint8_t *keys,
                       size_t stride,
                       size_t n,
                       size_t d,
                       const float *queries,
                       size_t n_queries,
                       float *ret_scores,
                       size_t scores_stride)
{
    const size_t bytes = d * element_bytes(type);

    for (; n >= TILE; n -= TILE, keys += TILE * stride, ret_scores += TILE) {
        if (n >= AHEAD_ROWS + TILE)
            for (unsigned i = 0; i < TILE; i++)
                prefetch(keys + (AHEAD_ROWS + i) * stride, bytes);
        score_keys(type,
                   (const uint8_t *const[TILE]){keys, keys + stride, keys + 2 * stride,
                                                keys + 3 * stride},
                   TILE, queries, n_queries, d, ret_scores, scores_stride);
    }
    for (; n > 0; n--, keys += stride, ret_scores++)
        score_keys(type, &keys, 1, queries, n_queries, d, ret_scores, scores_stride);
}

INLINE void score_pointers(enum kv_key_type type,
                           const void *const *keys,
                           size_t n,
                           size_t d,
                           const float *queries,
                           size_t n_queries,
                           float *ret_scores,
                           size_t scores_stride)
{
    const size_t bytes = d * element_bytes(type);
    size_t ahead = bytes > 0 ? AHEAD_BYTES / bytes : 0, row = 0;

    ahead = ahead < TILE ? TILE : ahead > AHEAD_ROWS_MAX ? AHEAD_ROWS_MAX : ahead;
    for (size_t i = 0; i < ahead && i < n; i++)
        prefetch(keys[i], bytes);
    for (; row + TILE <= n; row += TILE) {
        for (size_t i = row + ahead; i < row + ahead + TILE && i < n; i++)
            prefetch(keys[i], bytes);
        score_keys(type,
                   (const uint8_t *const[TILE]){keys[row], keys[row + 1], keys[row + 2],
                                                keys[row + 3]},
                   TILE, queries, n_queries, d, ret_scores + row, scores_stride);
    }
    for (; row < n; row++)
        score_keys(type, (const uint8_t *const[1]){keys[row]}, 1, queries, n_queries, d,
                   ret_scores + row, scores_stride);
}

INLINE void load_rows(enum kv_key_type type,
                      const uint8_t *keys,
                      size_t stride,
                      size_t n,
                      size_t d,
                      float *ret_values)
{
    for (size_t row = 0; row < n; row++, keys += stride, ret_values += d) {
        size_t i = 0;

        for (; i + LANES <= d; i += LANES)
            _mm512_storeu_ps(ret_values + i, load16(type, keys + i * element_bytes(type)));
        if (i < d) {
            const __mmask16 rest = first_lanes(d - i);

            _mm512_mask_storeu_ps(ret_values + i, rest,
                                  load_some(type, rest, keys + i * element_bytes(type)));
        }
    }
}

const struct kv_exact_scores_kernels kv_exact_scores_avx512 = {
    .name = "avx512",
    .supported = kv_has_avx512,
    .load = load,
    .score = score,
    .score_list = score_list,
};

#endif
