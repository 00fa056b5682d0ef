/* A group goes through three steps: scores of all its keys, weights, and its values; in the
 * first the next group's keys are asked for, in the last its values.
 *
 * Scores: the lower and the upper eight of the 16 lanes are summed one after the other, so that
 * three rows by four queries, or four by three, are twelve sums, and every converted element
 * serves all of a block of queries.  Values: up to four vectors of elements of every row at a
 * time, so that what is added up stays in registers too.
 *
 * Isolated rows come as fast as they can be read at all, which is a third of what consecutive
 * ones do; without asking ahead 1.3 to 2.4 times slower.  Did not help (Zen 3): asking for L1
 * instead of L2 (the same here; on others slower by far); asking for whole rows in both passes
 * (runs a tenth faster, isolated rows slower); sizes of slices that leave no lone vector; keys
 * of a tail in the tile itself, whose arrays then went through memory (a sixth slower). */
#include "attend.h"
#include "parts_avx2.h"
#include "tiers.h"

#if defined(__x86_64__)

#include <float.h>
#include <stdbool.h>

enum {
    BLOCK = 4,                      /* queries at a time */
    TILE = 4,                       /* keys at a time, at most */
    SLICE = 4,                      /* vectors of a value at a time, at most */
    WIDTH = KV_ATTEND_GROUP + TILE, /* of scores: the last tile may write behind the group */
    LINE_BYTES = 64,
};

struct group {
    unsigned n;
    const uint8_t *rows[KV_ATTEND_GROUP];
    const uint8_t *ahead[KV_ATTEND_GROUP]; /* of the next group; no row there: of this one */
    float scores[KV_ATTEND_QUERIES_MAX][WIDTH]; /* then weights */
    float old[KV_ATTEND_QUERIES_MAX];           /* weight of what was there before */
};

/* Into L2: requests that wait there are more than those that can wait in L1. */
INLINE void ask_for(const uint8_t *from, size_t bytes)
{
    const char *at = (const char *)from, *end = at + bytes;

    for (; at + 4 * LINE_BYTES <= end; at += 4 * LINE_BYTES) {
        _mm_prefetch(at, _MM_HINT_T1);
        _mm_prefetch(at + LINE_BYTES, _MM_HINT_T1);
        _mm_prefetch(at + 2 * LINE_BYTES, _MM_HINT_T1);
        _mm_prefetch(at + 3 * LINE_BYTES, _MM_HINT_T1);
    }
    for (; at < end; at += LINE_BYTES)
        _mm_prefetch(at, _MM_HINT_T1);
}

/* The first n elements, 0 behind. */
INLINE __m256 load_few(enum kv_key_type type, const uint8_t *at, size_t n)
{
    uint8_t bytes[LANES * sizeof(float)] = {0};

    memcpy(bytes, at, n * element_bytes(type));
    return load8(type, bytes);
}

/* One half of the 16 lanes of the sums of n_keys and n_queries, which are constants where this
 * is called: elements from `from` on, every other eight.  d is a multiple of STEP. */
INLINE void sum_half(enum kv_key_type type,
                     const uint8_t *const *keys,
                     unsigned n_keys,
                     const float *queries,
                     unsigned n_queries,
                     size_t d,
                     size_t from,
                     __m256 ret_sums[BLOCK][TILE])
{
    const size_t bytes = element_bytes(type);
    __m256 sums[BLOCK][TILE];

    for (unsigned query = 0; query < n_queries; query++)
        for (unsigned key = 0; key < n_keys; key++)
            sums[query][key] = _mm256_setzero_ps();
    for (size_t i = from; i < d; i += STEP) {
        /* Twelve sums leave four registers: three operands stay, the fourth changes. */
        __m256 held[TILE];

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

/* Sums of eight lanes of four keys by two queries: [query 0's four | query 1's four]. */
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

/* n_keys and n_queries are constants where this is called.  Of fewer keys than TILE, but not of
 * one, as many scores as of TILE are written. */
INLINE void score_tile(enum kv_key_type type,
                       const uint8_t *const *keys,
                       unsigned n_keys,
                       const float *queries,
                       unsigned n_queries,
                       size_t d,
                       float (*ret_scores)[WIDTH])
{
    __m256 low[BLOCK][TILE], high[BLOCK][TILE], sums[BLOCK][TILE];

    sum_half(type, keys, n_keys, queries, n_queries, d, 0, low);
    sum_half(type, keys, n_keys, queries, n_queries, d, LANES, high);
    if (n_keys == 1) {
        for (unsigned query = 0; query < n_queries; query++)
            ret_scores[query][0] = sum16(low[query][0], high[query][0]);
        return;
    }
    for (unsigned query = 0; query < n_queries; query++)
        for (unsigned key = 0; key < TILE; key++)
            sums[query][key] = key < n_keys ? _mm256_add_ps(low[query][key], high[query][key])
                                            : sums[query][n_keys - 1];
    for (unsigned query = 0; query + 2 <= n_queries; query += 2) {
        const __m256 scores = sums_of_two(sums[query], sums[query + 1]);

        _mm_storeu_ps(ret_scores[query], _mm256_castps256_ps128(scores));
        _mm_storeu_ps(ret_scores[query + 1], _mm256_extractf128_ps(scores, 1));
    }
    if (n_queries % 2 != 0) {
        const unsigned query = n_queries - 1;
        __m128 fours[TILE];

        for (unsigned key = 0; key < TILE; key++)
            fours[key] = _mm_add_ps(_mm256_castps256_ps128(sums[query][key]),
                                    _mm256_extractf128_ps(sums[query][key], 1));
        _mm_storeu_ps(ret_scores[query], sums4(fours[0], fours[1], fours[2], fours[3]));
    }
}

/* All keys of a group with a block of queries. */
INLINE void score_block(enum kv_key_type type,
                        const struct group *group,
                        const float *queries,
                        unsigned n_queries,
                        size_t d,
                        bool ask,
                        float (*ret_scores)[WIDTH])
{
    const unsigned n_keys = n_queries == BLOCK ? 3 : TILE;
    const size_t bytes = d * element_bytes(type);
    unsigned row = 0;

    for (; row + n_keys <= group->n; row += n_keys) {
        if (ask)
            for (unsigned i = 0; i < n_keys; i++)
                ask_for(group->ahead[row + i], bytes);
        score_tile(type, group->rows + row, n_keys, queries, n_queries, d,
                   (float(*)[WIDTH])(void *)&ret_scores[0][row]);
    }
    for (; row < group->n; row++) {
        if (ask)
            ask_for(group->ahead[row], bytes);
        score_tile(type, group->rows + row, 1, queries, n_queries, d,
                   (float(*)[WIDTH])(void *)&ret_scores[0][row]);
    }
}

/* attend.h's weights of one query. */
INLINE void weigh(const struct group *group,
                  float scale,
                  const uint32_t *among,
                  unsigned query,
                  float *scores,
                  float *max,
                  float *sum,
                  float *ret_old)
{
    const __m256 none = _mm256_set1_ps(-__builtin_inff()), by = _mm256_set1_ps(scale);
    const __m256 limit = _mm256_set1_ps(FLT_MAX);
    __m256 most = none, sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}, shift;
    float larger;

    for (unsigned i = group->n; i < KV_ATTEND_GROUP; i++)
        scores[i] = -__builtin_inff();
    for (unsigned i = 0; i < KV_ATTEND_GROUP; i += LANES) {
        /* The instructions answer their second operand if one is a NaN. */
        __m256 s = _mm256_mul_ps(_mm256_loadu_ps(scores + i), by);

        s = _mm256_min_ps(_mm256_max_ps(s, none), limit);
        if (among != NULL && i < group->n) {
            const __m256i has =
                i + LANES <= group->n
                    ? _mm256_loadu_si256((const __m256i *)(const void *)(among + i))
                    : _mm256_maskload_epi32((const int *)(const void *)(among + i),
                                            first_lanes(group->n - i));

            s = _mm256_blendv_ps(
                none, s,
                _mm256_castsi256_ps(_mm256_sll_epi32(
                    has, _mm_cvtsi32_si128((int)(KV_ATTEND_QUERIES_MAX - 1 - query)))));
        }
        most = _mm256_max_ps(s, most);
        _mm256_storeu_ps(scores + i, s);
    }
    larger = max8(most);
    larger = (larger > *max ? larger : *max) + 0.0f;
    shift = _mm256_set1_ps(larger);
    for (unsigned i = 0; i < KV_ATTEND_GROUP; i += STEP)
        for (unsigned half = 0; half < 2; half++) {
            float *at = scores + i + half * LANES;
            const __m256 weights = exp8(_mm256_sub_ps(_mm256_loadu_ps(at), shift));

            sums[half] = _mm256_add_ps(sums[half], weights);
            _mm256_storeu_ps(at, weights);
        }
    *ret_old = _mm256_cvtss_f32(exp8(_mm256_set1_ps(*max - larger)));
    *sum = _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(*sum), _mm_set_ss(*ret_old),
                                      _mm_set_ss(sum16(sums[0], sums[1]))));
    *max = larger;
}

/* Elements of the values that begin `at` bytes behind a row's begin, for a block of queries.
 * `few` of them, less than a vector, or 0: n_vectors whole ones.  All but `at` and `few` are
 * constants where this is called. */
INLINE void add_slice(enum kv_key_type type,
                      const struct group *group,
                      size_t at,
                      unsigned n_vectors,
                      size_t few,
                      unsigned n_queries,
                      bool ask,
                      const float (*weights)[WIDTH],
                      const float *old,
                      float *output,
                      size_t d_v)
{
    const size_t bytes = LANES * element_bytes(type);
    const __m256i has = first_lanes(few);
    __m256 sums[BLOCK][SLICE];

    for (unsigned query = 0; query < n_queries; query++)
        for (unsigned i = 0; i < n_vectors; i++)
            sums[query][i] = _mm256_setzero_ps();
    for (unsigned row = 0; row < group->n; row++) {
        const uint8_t *value = group->rows[row] + at;
        __m256 held[SLICE];

        if (ask)
            ask_for(group->ahead[row] + at, n_vectors * bytes);
        if (n_queries == BLOCK) {
            for (unsigned i = 0; i < n_vectors; i++)
                held[i] = few > 0 ? load_few(type, value, few) : load8(type, value + i * bytes);
            for (unsigned query = 0; query < n_queries; query++) {
                const __m256 weight = _mm256_broadcast_ss(&weights[query][row]);

                for (unsigned i = 0; i < n_vectors; i++)
                    sums[query][i] = _mm256_fmadd_ps(weight, held[i], sums[query][i]);
            }
        } else {
            for (unsigned query = 0; query < n_queries; query++)
                held[query] = _mm256_broadcast_ss(&weights[query][row]);
            for (unsigned i = 0; i < n_vectors; i++) {
                const __m256 element =
                    few > 0 ? load_few(type, value, few) : load8(type, value + i * bytes);

                for (unsigned query = 0; query < n_queries; query++)
                    sums[query][i] = _mm256_fmadd_ps(held[query], element, sums[query][i]);
            }
        }
    }
    for (unsigned query = 0; query < n_queries; query++)
        for (unsigned i = 0; i < n_vectors; i++) {
            float *to = output + query * d_v + i * LANES;
            const __m256 by = _mm256_broadcast_ss(&old[query]);

            if (few > 0)
                _mm256_maskstore_ps(
                    to, has, _mm256_fmadd_ps(_mm256_maskload_ps(to, has), by, sums[query][i]));
            else
                _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_loadu_ps(to), by, sums[query][i]));
        }
}

/* The values of a group with the weights of a block of queries. */
INLINE void add_block(enum kv_key_type type,
                      const struct group *group,
                      size_t key_bytes,
                      unsigned n_queries,
                      bool ask,
                      const float (*weights)[WIDTH],
                      const float *old,
                      float *output,
                      size_t d_v)
{
    const unsigned most = n_queries == BLOCK ? 3 : SLICE;
    size_t j = 0;

    while (j + LANES <= d_v) {
        const size_t left = (d_v - j) / LANES, at = key_bytes + j * element_bytes(type);
        const size_t n = left < most ? left : most;

        if (n == 4)
            add_slice(type, group, at, 4, 0, n_queries, ask, weights, old, output + j, d_v);
        else if (n == 3)
            add_slice(type, group, at, 3, 0, n_queries, ask, weights, old, output + j, d_v);
        else if (n == 2)
            add_slice(type, group, at, 2, 0, n_queries, ask, weights, old, output + j, d_v);
        else
            add_slice(type, group, at, 1, 0, n_queries, ask, weights, old, output + j, d_v);
        j += n * LANES;
    }
    if (j < d_v)
        add_slice(type, group, key_bytes + j * element_bytes(type), 1, d_v - j, n_queries, ask,
                  weights, old, output + j, d_v);
}

/* The one place where a block's size becomes a constant. */
#define FOR_SIZE(n, CALL) \
    do {                  \
        switch (n) {      \
        case 4:           \
            CALL(4);      \
            break;        \
        case 3:           \
            CALL(3);      \
            break;        \
        case 2:           \
            CALL(2);      \
            break;        \
        default:          \
            CALL(1);      \
        }                 \
    } while (0)

INLINE void add_group(enum kv_key_type type,
                      const struct kv_attend_shape *shape,
                      const float *queries,
                      struct group *group,
                      const uint32_t *among,
                      float *state)
{
    const unsigned n_queries = shape->n_queries, n_blocks = (n_queries + BLOCK - 1) / BLOCK;
    const size_t d_k = shape->d_k, d_v = shape->d_v, key_bytes = d_k * element_bytes(type);
    float *output = state + 2 * (size_t)n_queries;

    if (d_k % STEP != 0)
        kv_keys_avx2.score_list(type, (const void *const *)group->rows, group->n, d_k, queries,
                                n_queries, group->scores[0], WIDTH);
    /* Blocks as even as can be: 5 queries are 3 and 2. */
    for (unsigned block = 0, from = 0, n; d_k % STEP == 0 && block < n_blocks;
         block++, from += n) {
        n = (n_queries - from + n_blocks - block - 1) / (n_blocks - block);
#define SCORE(N) \
    score_block(type, group, queries + from * d_k, N, d_k, block == 0, group->scores + from)
        FOR_SIZE(n, SCORE);
#undef SCORE
    }
    for (unsigned query = 0; query < n_queries; query++)
        weigh(group, shape->scale, among, query, group->scores[query], &state[query],
              &state[n_queries + query], &group->old[query]);
    for (unsigned block = 0, from = 0, n; block < n_blocks; block++, from += n) {
        n = (n_queries - from + n_blocks - block - 1) / (n_blocks - block);
#define ADD(N)                                                                \
    add_block(type, group, key_bytes, N, block == 0,                          \
              (const float(*)[WIDTH])group->scores + from, group->old + from, \
              output + from * d_v, d_v)
        FOR_SIZE(n, ADD);
#undef ADD
    }
}

AVX2 __attribute__((noinline)) static void add_fp32(const struct kv_attend_shape *shape,
                                                    const float *queries,
                                                    struct group *group,
                                                    const uint32_t *among,
                                                    float *state)
{
    add_group(KV_KEY_FP32, shape, queries, group, among, state);
}

AVX2 __attribute__((noinline)) static void add_fp16(const struct kv_attend_shape *shape,
                                                    const float *queries,
                                                    struct group *group,
                                                    const uint32_t *among,
                                                    float *state)
{
    add_group(KV_KEY_FP16, shape, queries, group, among, state);
}

AVX2 __attribute__((noinline)) static void add_bf16(const struct kv_attend_shape *shape,
                                                    const float *queries,
                                                    struct group *group,
                                                    const uint32_t *among,
                                                    float *state)
{
    add_group(KV_KEY_BF16, shape, queries, group, among, state);
}

/* Rows from `from` on, of a list or, where there is none, of a run; returns how many. */
INLINE unsigned find_rows(const void *const *list,
                          const uint8_t *run,
                          size_t stride,
                          size_t from,
                          size_t n,
                          const uint8_t **ret_rows)
{
    const unsigned count = n - from < KV_ATTEND_GROUP ? (unsigned)(n - from) : KV_ATTEND_GROUP;

    for (unsigned i = 0; i < count; i++)
        ret_rows[i] = list != NULL ? list[from + i] : run + (from + i) * stride;
    return count;
}

AVX2 static void attend(const struct kv_attend_shape *shape,
                        const float *queries,
                        const void *const *list,
                        const uint8_t *run,
                        size_t stride,
                        size_t n,
                        const uint32_t *among,
                        float *state)
{
    const size_t row_bytes = kv_attend_row_bytes(shape);
    struct group group;
    unsigned n_ahead;

    if (n == 0)
        return;
    n_ahead = find_rows(list, run, stride, 0, n, group.ahead);
    for (unsigned i = 0; i < n_ahead; i++)
        ask_for(group.ahead[i], row_bytes);
    for (size_t from = 0; from < n; from += group.n) {
        group.n = n_ahead;
        memcpy(group.rows, group.ahead, group.n * sizeof(group.rows[0]));
        n_ahead = find_rows(list, run, stride, from + group.n, n, group.ahead);
        if (shape->type == KV_KEY_FP32)
            add_fp32(shape, queries, &group, among != NULL ? among + from : NULL, state);
        else if (shape->type == KV_KEY_FP16)
            add_fp16(shape, queries, &group, among != NULL ? among + from : NULL, state);
        else
            add_bf16(shape, queries, &group, among != NULL ? among + from : NULL, state);
    }
}

AVX2 static void attend_rows(const struct kv_attend_shape *shape,
                             const float *queries,
                             const void *const *rows,
                             size_t n,
                             const uint32_t *among,
                             float *state)
{
    attend(shape, queries, rows, NULL, 0, n, among, state);
}

AVX2 static void attend_run(const struct kv_attend_shape *shape,
                            const float *queries,
                            const void *rows,
                            size_t stride,
                            size_t n,
                            const uint32_t *among,
                            float *state)
{
    attend(shape, queries, NULL, rows, stride, n, among, state);
}

const struct kv_attend_kernels kv_attend_avx2 = {
    .name = "avx2",
    .supported = tiers_has_avx2,
    .rows = attend_rows,
    .run = attend_run,
};

#endif
