/* inner_products_avx2.h - private to kernels/: inner products of several keys with several
 * queries at once, each in 16 lanes as exact_scores.h says.
 *
 * The lower and the upper eight of the 16 lanes are summed one after the other, so that three
 * keys by four queries, or four by three, are twelve sums, and every converted element serves
 * all of a block of queries.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_X86_INNER_PRODUCTS_AVX2_H
#define KV_KERNELS_X86_INNER_PRODUCTS_AVX2_H

#include "kernels/x86/avx2.h"
#include "kernels/x86/for_size.h"

#if defined(__x86_64__)

enum {
    BLOCK = 4, /* queries at a time, at most */
    TILE = 4,  /* keys at a time, at most */
};

/* Returns the number of keys in a tile of n_queries: at most twelve sums. */
INLINE unsigned tile_keys(unsigned n_queries)
{
    return n_queries == BLOCK ? 3 : TILE;
}

/* Computes one half of the 16 lanes of the sums of n_keys by n_queries, constants at the calls:
 * elements from `from` on, eight of every 16.  d is a multiple of STEP.  Prefetches every other
 * one of the n_keys `ahead`, unless that is NULL. */
INLINE void sum_half(enum kv_key_type type,
                     const uint8_t *const *keys,
                     unsigned n_keys,
                     const float *queries,
                     unsigned n_queries,
                     size_t d,
                     size_t from,
                     const uint8_t *const *ahead,
                     __m256 ret_sums[BLOCK][TILE])
{
    const size_t bytes = element_bytes(type);
    __m256 sums[BLOCK][TILE];

    for (unsigned query = 0; query < n_queries; query++)
        for (unsigned key = 0; key < n_keys; key++)
            sums[query][key] = _mm256_setzero_ps();
    for (size_t i = from; i < d; i += STEP) {
        /* Twelve sums leave four registers: three operands stay, and the fourth changes. */
        __m256 held[TILE];

        if (ahead != NULL && (i - from) * bytes % LINE_BYTES == 0)
            for (unsigned key = from / LANES; key < n_keys; key += 2)
                _mm_prefetch((const char *)ahead[key] + (i - from) * bytes, _MM_HINT_T1);
        if (n_queries == BLOCK) {
            for (unsigned key = 0; key < n_keys; key++)
                held[key] = load8(type, keys[key] + i * bytes);
            for (unsigned query = 0; query < n_queries; query++) {
                const __m256 x = _mm256_loadu_ps(queries + query * d + i);

                for (unsigned key = 0; key < n_keys; key++)
                    sums[query][key] = _mm256_fmadd_ps(x, held[key], sums[query][key]);
            }
        } else {
            for (unsigned query = 0; query < n_queries; query++)
                held[query] = _mm256_loadu_ps(queries + query * d + i);
            for (unsigned key = 0; key < n_keys; key++) {
                const __m256 element = load8(type, keys[key] + i * bytes);

                for (unsigned query = 0; query < n_queries; query++)
                    sums[query][key] = _mm256_fmadd_ps(held[query], element, sums[query][key]);
            }
        }
    }
    for (unsigned query = 0; query < n_queries; query++)
        for (unsigned key = 0; key < n_keys; key++)
            ret_sums[query][key] = sums[query][key];
}

/* Adds up eight lanes of four keys by two queries: [query 0's four | query 1's four]. */
INLINE __m256 sums_of_two(const __m256 *a, const __m256 *b)
{
    __m256 fours[TILE], ab, cd;

    for (unsigned key = 0; key < TILE; key++)
        fours[key] = _mm256_add_ps(_mm256_permute2f128_ps(a[key], b[key], 0x20),
                                   _mm256_permute2f128_ps(a[key], b[key], 0x31));
    ab = _mm256_add_ps(_mm256_shuffle_ps(fours[0], fours[1], 0x44),
                       _mm256_shuffle_ps(fours[0], fours[1], 0xee));
    cd = _mm256_add_ps(_mm256_shuffle_ps(fours[2], fours[3], 0x44),
                       _mm256_shuffle_ps(fours[2], fours[3], 0xee));
    return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xdd));
}

/* Stores three or four scores. */
INLINE void store_scores(__m128 scores, unsigned n, float *ret_scores)
{
    if (n == TILE) {
        _mm_storeu_ps(ret_scores, scores);
    } else {
        _mm_storel_pi((__m64 *)(void *)ret_scores, scores);
        _mm_store_ss(ret_scores + 2, _mm_movehl_ps(scores, scores));
    }
}

/* Scores a tile; n_keys, which is tile_keys() or 1, and n_queries are constants at the
 * calls. */
INLINE void score_tile(enum kv_key_type type,
                       const uint8_t *const *keys,
                       unsigned n_keys,
                       const float *queries,
                       unsigned n_queries,
                       size_t d,
                       const uint8_t *const *ahead,
                       float *ret_scores,
                       size_t scores_stride)
{
    __m256 low[BLOCK][TILE], high[BLOCK][TILE], sums[BLOCK][TILE];

    sum_half(type, keys, n_keys, queries, n_queries, d, 0, ahead, low);
    sum_half(type, keys, n_keys, queries, n_queries, d, LANES, ahead, high);
    if (n_keys == 1) {
        for (unsigned query = 0; query < n_queries; query++)
            ret_scores[query * scores_stride] = sum16(low[query][0], high[query][0]);
        return;
    }
    for (unsigned query = 0; query < n_queries; query++)
        for (unsigned key = 0; key < TILE; key++)
            sums[query][key] = key < n_keys ? _mm256_add_ps(low[query][key], high[query][key])
                                            : sums[query][n_keys - 1];
    for (unsigned query = 0; query + 2 <= n_queries; query += 2) {
        const __m256 scores = sums_of_two(sums[query], sums[query + 1]);

        store_scores(_mm256_castps256_ps128(scores), n_keys,
                     ret_scores + query * scores_stride);
        store_scores(_mm256_extractf128_ps(scores, 1), n_keys,
                     ret_scores + (query + 1) * scores_stride);
    }
    if (n_queries % 2 != 0) {
        const unsigned query = n_queries - 1;
        __m128 fours[TILE];

        for (unsigned key = 0; key < TILE; key++)
            fours[key] = _mm_add_ps(_mm256_castps256_ps128(sums[query][key]),
                                    _mm256_extractf128_ps(sums[query][key], 1));
        store_scores(sums4(fours[0], fours[1], fours[2], fours[3]), n_keys,
                     ret_scores + query * scores_stride);
    }
}

/* Returns the size of the next block, so that blocks are nearly equal: five queries are three
 * and two. */
INLINE unsigned block_of(size_t n_queries)
{
    const size_t n_blocks = (n_queries + BLOCK - 1) / BLOCK;

    return (unsigned)((n_queries + n_blocks - 1) / n_blocks);
}

#endif

#endif
