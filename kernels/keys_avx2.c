/* Sixteen elements of a key are two vectors.  Two keys meet two queries at a time: eight sums,
 * as many as are in flight, and every load serves two products. */
#include "keys.h"
#include "parts_avx2.h"
#include "tiers.h"

#if defined(__x86_64__)

enum {
    PAIR = 2,
    LINE_BYTES = 64,
    AHEAD_BYTES = 4096, /* of keys in a list */
    AHEAD_ROWS_MAX = 16,
};

/* Elements at the end of a row, n < STEP of them, 0 behind. */
INLINE void load_rest(enum kv_key_type type, const void *at, size_t n, __m256 ret_values[2])
{
    uint8_t bytes[STEP * sizeof(float)] = {0};

    memcpy(bytes, at, n * element_bytes(type));
    ret_values[0] = load8(type, bytes);
    ret_values[1] = load8(type, bytes + LANES * element_bytes(type));
}

/* Sums of two keys and two queries, each in 16 lanes. */
struct sums {
    __m256 lanes[PAIR][PAIR][2];
};

/* The sums of all four: key 0 and 1 with query 0, key 0 and 1 with query 1. */
INLINE __m128 sum_all(const struct sums *sums)
{
    return sums4(half_sum(sums->lanes[0][0][0], sums->lanes[0][0][1]),
                 half_sum(sums->lanes[1][0][0], sums->lanes[1][0][1]),
                 half_sum(sums->lanes[0][1][0], sums->lanes[0][1][1]),
                 half_sum(sums->lanes[1][1][0], sums->lanes[1][1][1]));
}

/* n_keys and n_queries are 1 or 2, and constants where this is called. */
INLINE void score_tile(enum kv_key_type type,
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

            load_rest(KV_KEY_FP32, queries + query * d + i, d - i, x);
            for (unsigned key = 0; key < n_keys; key++) {
                __m256 elements[2];

                load_rest(type, keys[key] + i * element_bytes(type), d - i, elements);
                for (unsigned half = 0; half < 2; half++) {
                    /* A lane without an element stays: + 0 would change -0. */
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

/* One or two keys with all queries. */
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

    for (; query + PAIR <= n_queries; query += PAIR)
        score_tile(type, keys, n_keys, queries + query * d, PAIR, d,
                   ret_scores + query * scores_stride, scores_stride);
    if (query < n_queries)
        score_tile(type, keys, n_keys, queries + query * d, 1, d,
                   ret_scores + query * scores_stride, scores_stride);
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
    size_t row = 0;

    for (; row + PAIR <= n; row += PAIR, keys += PAIR * stride)
        score_keys(type, (const uint8_t *const[PAIR]){keys, keys + stride}, PAIR, queries,
                   n_queries, d, ret_scores + row, scores_stride);
    if (row < n)
        score_keys(type, &keys, 1, queries, n_queries, d, ret_scores + row, scores_stride);
}

INLINE void ask_for(const void *key, size_t bytes)
{
    const uintptr_t end = (uintptr_t)key + bytes;

    for (uintptr_t line = (uintptr_t)key & ~(uintptr_t)(LINE_BYTES - 1); line < end;
         line += LINE_BYTES)
        _mm_prefetch((const char *)line, _MM_HINT_T0);
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

    ahead = ahead < PAIR ? PAIR : ahead > AHEAD_ROWS_MAX ? AHEAD_ROWS_MAX : ahead;
    for (size_t i = 0; i < ahead && i < n; i++)
        ask_for(keys[i], bytes);
    for (; row + PAIR <= n; row += PAIR) {
        for (size_t i = row + ahead; i < row + ahead + PAIR && i < n; i++)
            ask_for(keys[i], bytes);
        score_keys(type, (const uint8_t *const[PAIR]){keys[row], keys[row + 1]}, PAIR, queries,
                   n_queries, d, ret_scores + row, scores_stride);
    }
    if (row < n)
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
            _mm256_storeu_ps(ret_values + i, load8(type, keys + i * element_bytes(type)));
        if (i < d) {
            __m256 rest[2];

            load_rest(type, keys + i * element_bytes(type), d - i, rest);
            memcpy(ret_values + i, &rest[0], (d - i) * sizeof(float));
        }
    }
}

AVX2 static void load(enum kv_key_type type,
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

AVX2 static void score(enum kv_key_type type,
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

AVX2 static void score_list(enum kv_key_type type,
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

const struct kv_keys_kernels kv_keys_avx2 = {
    .name = "avx2",
    .supported = tiers_has_avx2,
    .load = load,
    .score = score,
    .score_list = score_list,
};

#endif
