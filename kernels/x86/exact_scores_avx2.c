/* Keys of whole steps of 16 elements use inner_products_avx2.h.  Later keys are prefetched line
 * by line between the products; prefetched as a whole, they would fill the core's miss queue.
 *
 * Other keys: two keys by two queries at a time, which are eight sums, and every load is used
 * for two products. */
#include "kernels/dispatch.h"
#include "kernels/exact_scores.h"
#include "kernels/x86/inner_products_avx2.h"

#include "kernels/x86/exact_scores_common.h"

#if defined(__x86_64__)

#include <stdbool.h>

enum {
    PAIR = 2,
    CHUNK = 12, /* keys scored for all queries before the next: whole tiles of 3 or 4 */
    AHEAD_LISTED = 2 * CHUNK, /* prefetched: keys of a list */
    AHEAD_ROWS = CHUNK,       /* consecutive keys, which the hardware prefetcher helps */
};

/* Loads the last n < STEP elements of a row, with 0 after them. */
INLINE void load_tail(enum kv_key_type type, const void *at, size_t n, __m256 ret_values[2])
{
    uint8_t bytes[STEP * sizeof(float)] = {0};

    memcpy(bytes, at, n * element_bytes(type));
    ret_values[0] = load8(type, bytes);
    ret_values[1] = load8(type, bytes + LANES * element_bytes(type));
}

/* The sums of two keys by two queries, each in 16 lanes. */
struct sums {
    __m256 lanes[PAIR][PAIR][2];
};

/* Returns the four sums: keys 0 and 1 with query 0, then with query 1. */
INLINE __m128 sum_all(const struct sums *sums)
{
    return sums4(half_sum(sums->lanes[0][0][0], sums->lanes[0][0][1]),
                 half_sum(sums->lanes[1][0][0], sums->lanes[1][0][1]),
                 half_sum(sums->lanes[0][1][0], sums->lanes[0][1][1]),
                 half_sum(sums->lanes[1][1][0], sums->lanes[1][1][1]));
}

/* n_keys and n_queries are 1 or 2, and constants at the calls. */
INLINE void score_pair(enum kv_key_type type,
                       const uint8_t *const *keys,
                       unsigned n_keys,
                       const float *queries,
                       unsigned n_queries,
                       size_t d,
                       float *ret_scores,
                       size_t scores_stride)
{
    struct sums sums;
    size_t i = 0;

    for (unsigned key = 0; key < PAIR; key++)
        for (unsigned query = 0; query < PAIR; query++)
            sums.lanes[key][query][0] = sums.lanes[key][query][1] = _mm256_setzero_ps();
    for (; i + STEP <= d; i += STEP)
        for (unsigned half = 0; half < 2; half++) {
            const size_t at = i + half * LANES;
            __m256 elements[PAIR];

            for (unsigned key = 0; key < n_keys; key++)
                elements[key] = load8(type, keys[key] + at * element_bytes(type));
            for (unsigned query = 0; query < n_queries; query++) {
                const __m256 x = _mm256_loadu_ps(queries + query * d + at);

                for (unsigned key = 0; key < n_keys; key++)
                    sums.lanes[key][query][half] =
                        _mm256_fmadd_ps(x, elements[key], sums.lanes[key][query][half]);
            }
        }
    if (i < d) {
        const __m256i rest = _mm256_set1_epi32((int)(d - i));
        const __m256i first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);

        for (unsigned query = 0; query < n_queries; query++) {
            __m256 x[2];

            load_tail(KV_KEY_FP32, queries + query * d + i, d - i, x);
            for (unsigned key = 0; key < n_keys; key++) {
                __m256 elements[2];

                load_tail(type, keys[key] + i * element_bytes(type), d - i, elements);
                for (unsigned half = 0; half < 2; half++) {
                    /* A lane without an element must not change: adding +0 would turn -0 into
                     * +0. */
                    const __m256i has = _mm256_cmpgt_epi32(
                        rest, _mm256_add_epi32(first, _mm256_set1_epi32((int)half * LANES)));
                    __m256 *lane = &sums.lanes[key][query][half];

                    *lane =
                        _mm256_blendv_ps(*lane, _mm256_fmadd_ps(x[half], elements[half], *lane),
                                         _mm256_castsi256_ps(has));
                }
            }
        }
    }
    if (n_keys == PAIR && n_queries == PAIR) {
        const __m128 scores = sum_all(&sums);

        _mm_storel_pi((__m64 *)(void *)ret_scores, scores);
        _mm_storeh_pi((__m64 *)(void *)(ret_scores + scores_stride), scores);
        return;
    }
    for (unsigned key = 0; key < n_keys; key++)
        for (unsigned query = 0; query < n_queries; query++)
            ret_scores[query * scores_stride + key] =
                sum16(sums.lanes[key][query][0], sums.lanes[key][query][1]);
}

/* Scores keys of any d. */
INLINE void score_pairs(enum kv_key_type type,
                        const uint8_t *const *keys,
                        size_t n,
                        const float *queries,
                        size_t n_queries,
                        size_t d,
                        float *ret_scores,
                        size_t scores_stride)
{
    for (size_t query = 0; query < n_queries; query += PAIR)
        for (size_t row = 0; row < n; row += PAIR) {
            float *scores = ret_scores + query * scores_stride + row;
            const float *x = queries + query * d;

            if (row + 1 == n && query + 1 == n_queries)
                score_pair(type, keys + row, 1, x, 1, d, scores, scores_stride);
            else if (row + 1 == n)
                score_pair(type, keys + row, 1, x, PAIR, d, scores, scores_stride);
            else if (query + 1 == n_queries)
                score_pair(type, keys + row, PAIR, x, 1, d, scores, scores_stride);
            else
                score_pair(type, keys + row, PAIR, x, PAIR, d, scores, scores_stride);
        }
}

/* n_queries is a constant at the calls. */
INLINE void score_block(enum kv_key_type type,
                        const uint8_t *const *keys,
                        size_t n,
                        const uint8_t *const *ahead,
                        const float *queries,
                        unsigned n_queries,
                        size_t d,
                        float *ret_scores,
                        size_t scores_stride)
{
    const unsigned n_keys = tile_keys(n_queries);
    size_t row = 0;

    for (; row + n_keys <= n; row += n_keys)
        score_tile(type, keys + row, n_keys, queries, n_queries, d,
                   ahead != NULL ? ahead + row : NULL, ret_scores + row, scores_stride);
    for (; row < n; row++)
        score_tile(type, keys + row, 1, queries, n_queries, d, NULL, ret_scores + row,
                   scores_stride);
}

/* Scores up to CHUNK keys for all queries, and prefetches the CHUNK keys `ahead` unless that is
 * NULL. */
INLINE void score_chunk(enum kv_key_type type,
                        const uint8_t *const *keys,
                        size_t n,
                        const uint8_t *const *ahead,
                        const float *queries,
                        size_t n_queries,
                        size_t d,
                        float *ret_scores,
                        size_t scores_stride)
{
    if (d % STEP != 0) {
        for (size_t i = 0; ahead != NULL && i < CHUNK; i++)
            prefetch(ahead[i], d * element_bytes(type));
        score_pairs(type, keys, n, queries, n_queries, d, ret_scores, scores_stride);
        return;
    }
    for (size_t from = 0, count; from < n_queries; from += count) {
        count = block_of(n_queries - from);
#define SCORE(N)                                                                   \
    score_block(type, keys, n, from == 0 ? ahead : NULL, queries + from * d, N, d, \
                ret_scores + from * scores_stride, scores_stride)
        FOR_SIZE(count, SCORE);
#undef SCORE
    }
}

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
    for (size_t row = 0; row < n; row += CHUNK) {
        const size_t count = n - row < CHUNK ? n - row : CHUNK;
        const uint8_t *list[CHUNK], *ahead[CHUNK];

        for (size_t i = 0; i < CHUNK; i++) {
            list[i] = keys + (i < count ? row + i : row) * stride;
            ahead[i] = keys + (row + AHEAD_ROWS + i < n ? row + AHEAD_ROWS + i : row) * stride;
        }
        score_chunk(type, list, count, ahead, queries, n_queries, d, ret_scores + row,
                    scores_stride);
    }
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
    const uint8_t *const *list = (const uint8_t *const *)keys;
    const size_t bytes = d * element_bytes(type);

    for (size_t i = 0; i < AHEAD_LISTED && i < n; i++)
        prefetch(list[i], bytes);
    for (size_t row = 0; row < n; row += CHUNK) {
        const size_t count = n - row < CHUNK ? n - row : CHUNK, next = row + AHEAD_LISTED;
        const bool is_whole = next + CHUNK <= n;

        for (size_t i = next; !is_whole && i < n; i++)
            prefetch(list[i], bytes);
        score_chunk(type, list + row, count, is_whole ? list + next : NULL, queries, n_queries,
                    d, ret_scores + row, scores_stride);
    }
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
            _mm256_storeu_ps(ret_values + i, load8(type, keys + i * element_bytes(type)));
        if (i < d) {
            __m256 rest[2];

            load_tail(type, keys + i * element_bytes(type), d - i, rest);
            memcpy(ret_values + i, &rest[0], (d - i) * sizeof(float));
        }
    }
}

const struct kv_exact_scores_kernels kv_exact_scores_avx2 = {
    .name = "avx2",
    .supported = kv_has_avx2,
    .load = load,
    .score = score,
    .score_list = score_list,
};

#endif
