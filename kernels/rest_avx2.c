/* Sixteen elements are two vectors, and the means in a group end at such a border.  Four
 * queries meet a mean at a time, so that an element is made a float once for all of them. */
#include "exp_parts.h"
#include "rest.h"
#include "tiers.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#define AVX2   __attribute__((target("avx2,fma,f16c")))
#define INLINE AVX2 __attribute__((always_inline)) static inline

enum {
    LANES = 8,
    STEP = 2 * LANES,
    QUERIES = 4,
};

INLINE __m256i first_lanes(size_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n < LANES ? (int)n : LANES),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* Two vectors of the first n elements, 0 behind them. */
INLINE void load_first(const float *at, size_t n, __m256 ret_x[2])
{
    ret_x[0] = _mm256_maskload_ps(at, first_lanes(n));
    ret_x[1] = n > LANES ? _mm256_maskload_ps(at + LANES, first_lanes(n - LANES))
                         : _mm256_setzero_ps();
}

INLINE void load_step(const float *at, size_t i, size_t n, __m256 ret_x[2])
{
    if (i + STEP <= n) {
        ret_x[0] = _mm256_loadu_ps(at + i);
        ret_x[1] = _mm256_loadu_ps(at + i + LANES);
    } else {
        load_first(at + i, n - i, ret_x);
    }
}

INLINE __m256 load_integers(const int8_t *at)
{
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)at)));
}

INLINE float sum16(const __m256 lanes[2])
{
    const __m256 eight = _mm256_add_ps(lanes[0], lanes[1]);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));

    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

INLINE __m256 exp8(__m256 x)
{
    const __m256 one = _mm256_set1_ps(1), rounder = _mm256_set1_ps(EXP_ROUNDER);
    const __m256 has = _mm256_cmp_ps(x, _mm256_set1_ps(EXP_LEAST), _CMP_GE_OQ);
    const __m256 most = _mm256_min_ps(x, _mm256_set1_ps(EXP_MOST));
    const __m256 t = _mm256_fmadd_ps(most, _mm256_set1_ps(EXP_LOG2_E), rounder);
    const __m256 k = _mm256_sub_ps(t, rounder);
    const __m256i power =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(127)), 23);
    __m256 r = _mm256_fnmadd_ps(k, _mm256_set1_ps(EXP_LN2_HIGH), most);
    __m256 p = _mm256_set1_ps(1.0f / 5040);

    r = _mm256_fnmadd_ps(k, _mm256_set1_ps(EXP_LN2_LOW), r);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, one);
    p = _mm256_fmadd_ps(p, r, one);
    return _mm256_and_ps(has, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

INLINE float max8(__m256 v)
{
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));

    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

/* A NaN to -inf, +inf to FLT_MAX. */
INLINE __m256 without_nan(__m256 s)
{
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()),
                            _mm256_min_ps(s, _mm256_set1_ps(__FLT_MAX__)),
                            _mm256_cmp_ps(s, s, _CMP_ORD_Q));
}

/* ---- building ---------------------------------------------------------------------------- */

INLINE int fits(const float *x, size_t d)
{
    const __m256 most = _mm256_set1_ps(KV_REST_MOST);
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 all = _mm256_castsi256_ps(_mm256_set1_epi32(-1));

    for (size_t i = 0; i < d; i += LANES) {
        const __m256 at = i + LANES <= d ? _mm256_loadu_ps(x + i)
                                         : _mm256_maskload_ps(x + i, first_lanes(d - i));

        all = _mm256_and_ps(all, _mm256_cmp_ps(_mm256_and_ps(at, magnitude), most, _CMP_LE_OQ));
    }
    return _mm256_movemask_ps(all) == 0xff;
}

AVX2 static void prepare(float *vectors, size_t n, size_t d_k, size_t d, float factor)
{
    const __m256 by = _mm256_set1_ps(factor), nan = _mm256_set1_ps(__builtin_nanf(""));

    for (size_t row = 0; row < n; row++, vectors += d) {
        const int is_fit = fits(vectors, d);
        size_t i = is_fit ? d_k : 0;

        if (is_fit && factor == 1)
            continue;
        for (; i < d; i += LANES)
            if (i + LANES <= d) {
                const __m256 x = _mm256_loadu_ps(vectors + i);

                _mm256_storeu_ps(vectors + i, is_fit ? _mm256_mul_ps(x, by) : nan);
            } else {
                const __m256i lanes = first_lanes(d - i);
                const __m256 x = _mm256_maskload_ps(vectors + i, lanes);

                _mm256_maskstore_ps(vectors + i, lanes, is_fit ? _mm256_mul_ps(x, by) : nan);
            }
    }
}

AVX2 static size_t spread(
    const float *vectors, size_t n, size_t d, const float *origin, float *sums, float *squares)
{
    size_t n_added = 0;

    for (size_t row = 0; row < n; row++, vectors += d) {
        size_t i = 0;

        if (vectors[0] != vectors[0])
            continue;
        for (; i + LANES <= d; i += LANES) {
            const __m256 x =
                _mm256_sub_ps(_mm256_loadu_ps(vectors + i), _mm256_loadu_ps(origin + i));

            _mm256_storeu_ps(sums + i, _mm256_add_ps(_mm256_loadu_ps(sums + i), x));
            _mm256_storeu_ps(squares + i, _mm256_fmadd_ps(x, x, _mm256_loadu_ps(squares + i)));
        }
        if (i < d) {
            const __m256i lanes = first_lanes(d - i);
            const __m256 x = _mm256_sub_ps(_mm256_maskload_ps(vectors + i, lanes),
                                           _mm256_maskload_ps(origin + i, lanes));

            _mm256_maskstore_ps(sums + i, lanes,
                                _mm256_add_ps(_mm256_maskload_ps(sums + i, lanes), x));
            _mm256_maskstore_ps(squares + i, lanes,
                                _mm256_fmadd_ps(x, x, _mm256_maskload_ps(squares + i, lanes)));
        }
        n_added++;
    }
    return n_added;
}

AVX2 static double distance(const float *keys,
                            size_t n,
                            size_t d_k,
                            const float *means,
                            size_t stride,
                            const uint8_t *numbers)
{
    double sum = 0;

    for (size_t row = 0; row < n; row++, keys += d_k) {
        __m256 lanes[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};

        if (numbers[row] == KV_REST_NONE)
            continue;
        for (size_t i = 0; i < d_k; i += STEP) {
            __m256 key[2], mean[2];

            load_step(keys, i, d_k, key);
            load_step(means + numbers[row] * stride, i, d_k, mean);
            for (unsigned half = 0; half < 2; half++) {
                const __m256 x = _mm256_sub_ps(key[half], mean[half]);

                lanes[half] = _mm256_fmadd_ps(x, x, lanes[half]);
            }
        }
        sum += (double)sum16(lanes);
    }
    return sum;
}

/* ---- answering --------------------------------------------------------------------------- */

/* Up to four queries of a question: their number is a constant where this is used. */
struct part {
    const struct kv_rest_question *question;
    size_t first; /* query */
    float corr[QUERIES], shrink[QUERIES];
    float weights[QUERIES][KV_REST_SUMMARIES_MAX];
};

INLINE const uint8_t *at(const void *group, size_t offset)
{
    return (const uint8_t *)group + offset;
}

INLINE float corr_of(const float *query, size_t d_k, float scale, float variance)
{
    __m256 lanes[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    float corr;

    for (size_t i = 0; i < d_k; i += STEP) {
        __m256 x[2];

        load_step(query, i, d_k, x);
        for (unsigned half = 0; half < 2; half++)
            lanes[half] = _mm256_fmadd_ps(x[half], x[half], lanes[half]);
    }
    corr = 0.15f * (sum16(lanes) * (scale * scale) * variance);
    return corr < 1 ? corr : 1;
}

/* Products with all mean keys, as weights. */
INLINE void
score(struct part *part, const struct kv_rest_shape *shape, const int8_t *keys, unsigned n)
{
    const size_t d_k = shape->d_k;
    const float *queries = part->question->queries + part->first * d_k;

    for (size_t c = 0; c < kv_rest_n_summaries(shape); c++, keys += kv_rest_up(d_k)) {
        __m256 sums[QUERIES][2];

        for (unsigned query = 0; query < n; query++)
            sums[query][0] = sums[query][1] = _mm256_setzero_ps();
        for (size_t i = 0; i < d_k; i += STEP) {
            const __m256 low = load_integers(keys + i), high = load_integers(keys + i + LANES);

            for (unsigned query = 0; query < n; query++) {
                __m256 x[2];

                load_step(queries + query * d_k, i, d_k, x);
                sums[query][0] = _mm256_fmadd_ps(x[0], low, sums[query][0]);
                sums[query][1] = _mm256_fmadd_ps(x[1], high, sums[query][1]);
            }
        }
        for (unsigned query = 0; query < n; query++)
            part->weights[query][c] = sum16(sums[query]);
    }
}

/* Products become weights; returns their sum. */
INLINE float weigh(const struct part *part,
                   const struct kv_rest_shape *shape,
                   const float *key_scales,
                   unsigned query,
                   float *weights,
                   float *max,
                   float *ret_shrink)
{
    const struct kv_rest_question *question = part->question;
    const size_t n_summaries = kv_rest_n_summaries(shape), index = part->first + query;
    const uint16_t *counts = question->counts + index * question->counts_stride;
    const size_t n_scored = question->n_scored;
    const float *scores =
        n_scored > 0 ? question->scores + index * question->scores_stride : NULL;
    const __m256 infinite = _mm256_set1_ps(-__builtin_inff());
    const __m256 scale = _mm256_set1_ps(question->scale);
    __m256 most = _mm256_set1_ps(*max), lanes[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};

    for (size_t c = 0; c < n_summaries; c += LANES) {
        const __m256i n =
            _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(counts + c)));
        const __m256 none = _mm256_castsi256_ps(_mm256_cmpeq_epi32(n, _mm256_setzero_si256()));
        const __m256 product =
            _mm256_mul_ps(_mm256_loadu_ps(weights + c), _mm256_loadu_ps(key_scales + c));
        const __m256 s =
            without_nan(_mm256_fmadd_ps(product, scale, _mm256_set1_ps(part->corr[query])));

        _mm256_storeu_ps(weights + c, _mm256_blendv_ps(s, infinite, none));
        most = _mm256_max_ps(most, _mm256_blendv_ps(s, infinite, none));
    }
    for (size_t row = 0; row < n_scored; row += LANES) {
        const __m256i has = first_lanes(n_scored - row);
        const __m256 s =
            without_nan(_mm256_mul_ps(_mm256_maskload_ps(scores + row, has), scale));

        most = _mm256_max_ps(most, _mm256_blendv_ps(infinite, s, _mm256_castsi256_ps(has)));
    }
    most = _mm256_set1_ps(max8(most) + 0.0f);

    for (size_t c = 0; c < n_summaries; c += LANES) {
        const __m256 n = _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(
            _mm_loadu_si128((const __m128i *)(const void *)(counts + c))));

        _mm256_storeu_ps(
            weights + c,
            _mm256_mul_ps(n, exp8(_mm256_sub_ps(_mm256_loadu_ps(weights + c), most))));
    }
    for (size_t row = 0; row < n_scored; row += LANES) {
        const __m256i has = first_lanes(n_scored - row);
        const __m256 s =
            without_nan(_mm256_mul_ps(_mm256_maskload_ps(scores + row, has), scale));
        float exps[LANES];

        _mm256_storeu_ps(exps, exp8(_mm256_sub_ps(s, most)));
        for (size_t i = 0; i < LANES && row + i < n_scored; i++)
            weights[question->numbers[row + i]] += exps[i];
    }
    for (size_t c = 0; c < n_summaries; c += STEP)
        for (unsigned half = 0; half < 2; half++)
            lanes[half] =
                _mm256_add_ps(lanes[half], _mm256_loadu_ps(weights + c + half * LANES));
    *ret_shrink = _mm256_cvtss_f32(exp8(_mm256_sub_ps(_mm256_set1_ps(*max), most)));
    *max = _mm256_cvtss_f32(most);
    return sum16(lanes);
}

/* Weighted means are added to the outputs (n, d_v). */
INLINE void add_values(const struct part *part,
                       const struct kv_rest_shape *shape,
                       const int8_t *values,
                       unsigned n,
                       float *outputs)
{
    const size_t n_summaries = kv_rest_n_summaries(shape), d_v = shape->d_v;
    const size_t stride = kv_rest_up(d_v);

    for (size_t i = 0; i < d_v; i += STEP) {
        const __m256i has[2] = {first_lanes(d_v - i),
                                first_lanes(d_v - i > LANES ? d_v - i - LANES : 0)};
        __m256 sums[QUERIES][2];

        for (unsigned query = 0; query < n; query++)
            sums[query][0] = sums[query][1] = _mm256_setzero_ps();
        for (size_t c = 0; c < n_summaries; c++) {
            const __m256 low = load_integers(values + c * stride + i);
            const __m256 high = load_integers(values + c * stride + i + LANES);

            for (unsigned query = 0; query < n; query++) {
                const __m256 weight = _mm256_broadcast_ss(&part->weights[query][c]);

                sums[query][0] = _mm256_fmadd_ps(weight, low, sums[query][0]);
                sums[query][1] = _mm256_fmadd_ps(weight, high, sums[query][1]);
            }
        }
        for (unsigned query = 0; query < n; query++)
            for (unsigned half = 0; half < 2; half++) {
                float *output = outputs + query * d_v + i + half * LANES;
                const __m256 shrink = _mm256_set1_ps(part->shrink[query]);

                if (i + STEP <= d_v)
                    _mm256_storeu_ps(output, _mm256_fmadd_ps(_mm256_loadu_ps(output), shrink,
                                                             sums[query][half]));
                else if (half * LANES < d_v - i)
                    _mm256_maskstore_ps(output, has[half],
                                        _mm256_fmadd_ps(_mm256_maskload_ps(output, has[half]),
                                                        shrink, sums[query][half]));
            }
    }
}

INLINE void add_part(const struct kv_rest_shape *shape,
                     const void *group,
                     const struct kv_rest_question *question,
                     size_t first,
                     unsigned n,
                     float *state)
{
    const float *key_scales = (const void *)at(group, kv_rest_at_key_scales(shape));
    const float *value_scales = (const void *)at(group, kv_rest_at_value_scales(shape));
    float *maxes = state + first, *sums = maxes + question->n_queries;
    float *outputs = state + 2 * question->n_queries + first * shape->d_v;
    struct kv_rest_head head;
    struct part part;

    part.question = question;
    part.first = first;
    memcpy(&head, group, sizeof(head));
    for (unsigned query = 0; query < n; query++)
        part.corr[query] = corr_of(question->queries + (first + query) * shape->d_k, shape->d_k,
                                   question->scale, head.variance);
    score(&part, shape, (const void *)at(group, kv_rest_at_keys(shape)), n);
    for (unsigned query = 0; query < n; query++) {
        float *weights = part.weights[query];
        const float sum =
            weigh(&part, shape, key_scales, query, weights, maxes + query, &part.shrink[query]);

        sums[query] = _mm_cvtss_f32(_mm_fmadd_ss(
            _mm_set_ss(sums[query]), _mm_set_ss(part.shrink[query]), _mm_set_ss(sum)));
        for (size_t c = 0; c < kv_rest_n_summaries(shape); c += LANES)
            _mm256_storeu_ps(weights + c, _mm256_mul_ps(_mm256_loadu_ps(weights + c),
                                                        _mm256_loadu_ps(value_scales + c)));
    }
    add_values(&part, shape, (const void *)at(group, kv_rest_at_values(shape)), n, outputs);
}

AVX2 static void add(const struct kv_rest_shape *shape,
                     const void *group,
                     const struct kv_rest_question *question,
                     float *state)
{
    size_t query = 0;

    for (; query + QUERIES <= question->n_queries; query += QUERIES)
        add_part(shape, group, question, query, QUERIES, state);
    switch (question->n_queries - query) {
    case 3:
        add_part(shape, group, question, query, 3, state);
        break;
    case 2:
        add_part(shape, group, question, query, 2, state);
        break;
    case 1:
        add_part(shape, group, question, query, 1, state);
        break;
    default:
        break;
    }
}

const struct kv_rest_kernels kv_rest_avx2 = {
    .name = "avx2",
    .supported = tiers_has_avx2,
    .prepare = prepare,
    .spread = spread,
    .distance = distance,
    .add = add,
};

#endif
