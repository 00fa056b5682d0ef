/* inner_products_avx512.h - private to kernels/: inner products of several keys with several
 * queries at once, each in 16 lanes as exact_scores.h says.
 *
 * Sixteen sums are in flight at most, and a converted element serves four products.  Sixteen
 * sums of 16 lanes become one vector by 15 additions, each of which takes the tree's next step
 * of two vectors at once.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_X86_INNER_PRODUCTS_AVX512_H
#define KV_KERNELS_X86_INNER_PRODUCTS_AVX512_H

#if defined(__x86_64__)

#include "kernels/x86/avx512.h"

enum {
    TILE = 4, /* keys or queries at a time, at most */
};

/* Reduces four vectors of 16 lanes to blocks of four lanes, before the last two steps of the
 * tree. */
INLINE __m512 fold_blocks(__m512 a, __m512 b, __m512 c, __m512 d)
{
    const __m512 ab =
        _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 cd =
        _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));

    return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88),
                         _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

/* The last two steps: lane j of a block is the sum of the block in a, b, c or d. */
INLINE __m512 fold_lanes(__m512 a, __m512 b, __m512 c, __m512 d)
{
    const __m512 ab =
        _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    const __m512 cd =
        _mm512_add_ps(_mm512_shuffle_ps(c, d, 0x44), _mm512_shuffle_ps(c, d, 0xee));

    return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd));
}

/* Lane 4 j + i is the sum of the 16 lanes of v[i][j].  n_rows and n_columns are constants at
 * the calls; the other lanes repeat one of these sums. */
INLINE __m512 sums_of(const __m512 v[TILE][TILE], unsigned n_rows, unsigned n_columns)
{
    const __m512i turn =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512 columns[TILE];

    for (unsigned j = 0; j < n_columns; j++)
        columns[j] = fold_blocks(v[0][j], v[1 % n_rows][j], v[2 % n_rows][j], v[3 % n_rows][j]);
    return _mm512_permutexvar_ps(turn,
                                 fold_lanes(columns[0], columns[1 % n_columns],
                                            columns[2 % n_columns], columns[3 % n_columns]));
}

/* n_keys and n_queries, 1..TILE, are constants at the calls.
 *   ret_scores  (n_queries, n_keys), scores_stride apart */
INLINE void score_tile(enum kv_key_type type,
                       const uint8_t *const *keys,
                       unsigned n_keys,
                       const float *queries,
                       unsigned n_queries,
                       size_t d,
                       float *ret_scores,
                       size_t scores_stride)
{
    const size_t bytes = element_bytes(type);
    __m512 sums[TILE][TILE];
    size_t i = 0;

    for (unsigned key = 0; key < n_keys; key++)
        for (unsigned query = 0; query < n_queries; query++)
            sums[key][query] = _mm512_setzero_ps();
    for (; i + LANES <= d; i += LANES) {
        __m512 elements[TILE];

        for (unsigned key = 0; key < n_keys; key++)
            elements[key] = load16(type, keys[key] + i * bytes);
        for (unsigned query = 0; query < n_queries; query++) {
            const __m512 x = _mm512_loadu_ps(queries + query * d + i);

            for (unsigned key = 0; key < n_keys; key++)
                sums[key][query] = _mm512_fmadd_ps(x, elements[key], sums[key][query]);
        }
    }
    if (i < d) {
        const __mmask16 rest = first_lanes(d - i);
        __m512 elements[TILE];

        for (unsigned key = 0; key < n_keys; key++)
            elements[key] = load_some(type, rest, keys[key] + i * bytes);
        for (unsigned query = 0; query < n_queries; query++) {
            const __m512 x = _mm512_maskz_loadu_ps(rest, queries + query * d + i);

            /* A lane without an element must not change: adding +0 would turn -0 into +0. */
            for (unsigned key = 0; key < n_keys; key++)
                sums[key][query] =
                    _mm512_mask_mov_ps(sums[key][query], rest,
                                       _mm512_fmadd_ps(x, elements[key], sums[key][query]));
        }
    }
    if (n_keys == 1 && n_queries == 1) {
        *ret_scores = sum16(sums[0][0]);
    } else {
        const __m512 scores = sums_of((const __m512(*)[TILE])sums, n_keys, n_queries);
        float all[TILE * TILE];

        _mm512_storeu_ps(all, scores);
        for (unsigned query = 0; query < n_queries; query++)
            memcpy(ret_scores + query * scores_stride, all + query * TILE,
                   n_keys * sizeof(float));
    }
}

/* Scores up to TILE keys for all queries. */
INLINE void score_keys(enum kv_key_type type,
                       const uint8_t *const *keys,
                       unsigned n_keys,
                       const float *queries,
                       size_t n_queries,
                       size_t d,
                       float *ret_scores,
                       size_t scores_stride)
{
    size_t query = 0;

    for (; query + TILE <= n_queries; query += TILE)
        score_tile(type, keys, n_keys, queries + query * d, TILE, d,
                   ret_scores + query * scores_stride, scores_stride);
    queries += query * d;
    ret_scores += query * scores_stride;
    switch (n_queries - query) {
    case 3:
        score_tile(type, keys, n_keys, queries, 3, d, ret_scores, scores_stride);
        break;
    case 2:
        score_tile(type, keys, n_keys, queries, 2, d, ret_scores, scores_stride);
        break;
    case 1:
        score_tile(type, keys, n_keys, queries, 1, d, ret_scores, scores_stride);
        break;
    default:
        break;
    }
}

#endif

#endif
