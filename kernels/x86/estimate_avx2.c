/* Sixteen elements are two vectors, and the means of a group are padded to that.  A mean is
 * processed for four queries at once, so its bytes are converted to floats once for all of
 * them.
 *
 * Values that exist once per query and summary are kept with the queries in the lanes, so
 * maxima and sums over summaries are vertical. */
#include "kernels/dispatch.h"
#include "kernels/estimate.h"
#include "kernels/summary_common.h"
#include "kernels/x86/avx2.h"

#include "kernels/x86/estimate_common.h"

#if defined(__x86_64__)

enum {
    BLOCK = 2 * QUERIES, /* summaries of four pairs */
    PAIRS_MAX = KV_SUMMARIES_MAX / 2,
};

INLINE __m256 load_integers(const int8_t *at)
{
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)at)));
}

/* A NaN to -inf, +inf to FLT_MAX. */
INLINE __m256 without_nan(__m256 s)
{
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()),
                            _mm256_min_ps(s, _mm256_set1_ps(__FLT_MAX__)),
                            _mm256_cmp_ps(s, s, _CMP_ORD_Q));
}

/* Up to four queries of an input; their number n is a constant at the calls.  Values per query
 * and summary are stored as four floats per summary, one for each query, so maxima and sums
 * over summaries are vertical.  A vector holds such values of two summaries, i and i + 4. */
struct part {
    const struct kv_summary_shape *shape;
    const struct kv_estimate_input *input;
    size_t first;         /* query */
    const float *queries; /* (n, up d_k), from the first on, 0 after their elements */
    struct estimate_ahead ahead;
    float shrink[QUERIES];
    float weights[KV_SUMMARIES_MAX * QUERIES]; /* (2^bits, QUERIES) */
};

/* Loads one number for each of n <= QUERIES queries. */
INLINE __m128 load_queries(const float *at, unsigned n)
{
    return n == QUERIES ? _mm_loadu_ps(at)
                        : _mm_maskload_ps(at, _mm256_castsi256_si128(first_lanes(n)));
}

INLINE void store_queries(float *at, unsigned n, __m128 x)
{
    if (n == QUERIES)
        _mm_storeu_ps(at, x);
    else
        _mm_maskstore_ps(at, _mm256_castsi256_si128(first_lanes(n)), x);
}

INLINE __m256 twice(__m128 x)
{
    return _mm256_set_m128(x, x);
}

/* Transposes eight numbers of each query to pairs: ret_pairs[i] has numbers i and i + 4. */
INLINE void to_pairs(const __m256 of[QUERIES], __m256 ret_pairs[QUERIES])
{
    const __m256 low01 = _mm256_unpacklo_ps(of[0], of[1]);
    const __m256 low23 = _mm256_unpacklo_ps(of[2], of[3]);
    const __m256 high01 = _mm256_unpackhi_ps(of[0], of[1]);
    const __m256 high23 = _mm256_unpackhi_ps(of[2], of[3]);

    ret_pairs[0] = _mm256_shuffle_ps(low01, low23, 0x44);
    ret_pairs[1] = _mm256_shuffle_ps(low01, low23, 0xee);
    ret_pairs[2] = _mm256_shuffle_ps(high01, high23, 0x44);
    ret_pairs[3] = _mm256_shuffle_ps(high01, high23, 0xee);
}

/* The 16 lanes of the sums of two summaries, for each query: the first eight, the others. */
INLINE __m256 sums_of_pair(__m256 sums[2][2][QUERIES])
{
    __m256 four[QUERIES];

    for (unsigned query = 0; query < QUERIES; query++) {
        const __m256 a = _mm256_add_ps(sums[0][0][query], sums[1][0][query]);
        const __m256 b = _mm256_add_ps(sums[0][1][query], sums[1][1][query]);

        four[query] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20),
                                    _mm256_permute2f128_ps(a, b, 0x31));
    }

    const __m256 two01 = _mm256_add_ps(_mm256_shuffle_ps(four[0], four[1], 0x44),
                                       _mm256_shuffle_ps(four[0], four[1], 0xee));
    const __m256 two23 = _mm256_add_ps(_mm256_shuffle_ps(four[2], four[3], 0x44),
                                       _mm256_shuffle_ps(four[2], four[3], 0xee));

    return _mm256_add_ps(_mm256_shuffle_ps(two01, two23, 0x88),
                         _mm256_shuffle_ps(two01, two23, 0xdd));
}

/* Adds products with two mean keys: in each step, of the eight elements from `at` on. */
INLINE void multiply(const struct part *part,
                     const int8_t *const keys[2],
                     size_t at,
                     unsigned n,
                     __m256 sums[2][QUERIES])
{
    const size_t d = kv_summary_up(part->shape->d_k);

    for (size_t i = at; i < d; i += STEP) {
        const __m256 a = load_integers(keys[0] + i), b = load_integers(keys[1] + i);

        for (unsigned query = 0; query < n; query++) {
            const __m256 x = _mm256_loadu_ps(part->queries + query * d + i);

            sums[0][query] = _mm256_fmadd_ps(x, a, sums[0][query]);
            sums[1][query] = _mm256_fmadd_ps(x, b, sums[1][query]);
        }
    }
}

/* Computes products with the mean keys of a pair, one half of the lanes after the other.  The
 * loop must not be unrolled: both halves are 16 sums, more than there are registers. */
INLINE __m256 products(const struct part *part, const int8_t *const keys[2], unsigned n)
{
    __m256 sums[2][2][QUERIES];

#pragma GCC unroll 1
    for (unsigned half = 0; half < 2; half++) {
        __m256 own[2][QUERIES];

        for (unsigned query = 0; query < QUERIES; query++)
            own[0][query] = own[1][query] = _mm256_setzero_ps();
        multiply(part, keys, half * LANES, n, own);
        memcpy(sums[half], own, sizeof(own));
    }
    return sums_of_pair(sums);
}

/* Loads the counts of eight summaries, from c on, as pairs. */
INLINE void counts_of(const struct part *part, size_t c, unsigned n, __m256 ret_counts[QUERIES])
{
    const struct kv_estimate_input *input = part->input;
    __m256 counts[QUERIES];

    for (unsigned query = 0; query < QUERIES; query++) {
        const size_t index = part->first + (query < n ? query : 0);
        const uint16_t *from = input->counts + index * input->counts_stride + c;

        counts[query] = _mm256_cvtepi32_ps(
            _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)from)));
    }
    to_pairs(counts, ret_counts);
}

/* Loads the scores of eight rows, from `row` on, as pairs; -inf after the last one. */
INLINE void scores_of(const struct part *part, size_t row, unsigned n, __m256 ret_s[QUERIES])
{
    const struct kv_estimate_input *input = part->input;
    const __m256 scale = _mm256_set1_ps(input->scale);
    const size_t left = input->n_scored - row;
    __m256 scores[QUERIES];

    for (unsigned query = 0; query < QUERIES; query++) {
        const size_t index = part->first + (query < n ? query : 0);
        const float *from = input->scores + index * input->scores_stride + row;

        if (left >= LANES) {
            scores[query] = _mm256_loadu_ps(from);
        } else {
            const __m256i has = first_lanes(left);

            scores[query] =
                _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()),
                                 _mm256_maskload_ps(from, has), _mm256_castsi256_ps(has));
        }
    }
    to_pairs(scores, ret_s);
    for (unsigned i = 0; i < QUERIES; i++)
        ret_s[i] = without_nan(_mm256_mul_ps(ret_s[i], scale));
}

/* Computes the scores of all summaries, in pairs, and the maximum of these and of the rows'
 * scores. */
INLINE __m128 score(struct part *part,
                    const void *group,
                    __m256 variance_correction,
                    unsigned n,
                    __m256 ret_s[PAIRS_MAX])
{
    const struct kv_summary_shape *shape = part->shape;
    const float *key_scales = kv_summary_at(group, kv_summary_at_key_scales(shape));
    const int8_t *keys = kv_summary_at(group, kv_summary_at_keys(shape));
    const size_t stride = kv_summary_up(shape->d_k);
    const __m256 infinite = _mm256_set1_ps(-__builtin_inff());
    const __m256 scale = _mm256_set1_ps(part->input->scale);
    __m256 most = infinite, s[QUERIES];

    for (size_t c = 0; c < kv_summary_count(shape); c += BLOCK) {
        const __m256 by = _mm256_loadu_ps(key_scales + c);
        __m256 counts[QUERIES];

        counts_of(part, c, n, counts);
        for (unsigned i = 0; i < QUERIES; i++) {
            const int8_t *const of_pair[] = {keys + (c + i) * stride,
                                             keys + (c + i + QUERIES) * stride};
            const __m256 product =
                _mm256_mul_ps(products(part, of_pair, n),
                              _mm256_permutevar_ps(by, _mm256_set1_epi32((int)i)));
            const __m256 none = _mm256_cmp_ps(counts[i], _mm256_setzero_ps(), _CMP_EQ_OQ);
            const __m256 score =
                without_nan(_mm256_fmadd_ps(product, scale, variance_correction));

            ret_s[c / 2 + i] = _mm256_blendv_ps(score, infinite, none);
            most = _mm256_max_ps(most, ret_s[c / 2 + i]);
            estimate_ahead_step(&part->ahead);
        }
    }
    for (size_t row = 0; row < part->input->n_scored; row += LANES) {
        scores_of(part, row, n, s);
        most = _mm256_max_ps(
            most, _mm256_max_ps(_mm256_max_ps(s[0], s[1]), _mm256_max_ps(s[2], s[3])));
    }
    return _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
}

INLINE void add_weight(float *weights, const uint8_t *number, __m128 weight)
{
    float *to = weights + (size_t)*number * QUERIES;

    _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), weight));
}

/* Replaces scores with weights; returns their sums. */
INLINE __m128 weigh(struct part *part, const __m256 *s, __m256 most, unsigned n)
{
    const struct kv_estimate_input *input = part->input;
    const size_t n_summaries = kv_summary_count(part->shape);
    float *weights = part->weights;
    __m256 pairs[QUERIES], lanes[STEP / 2];

    for (size_t c = 0; c < n_summaries; c += BLOCK) {
        counts_of(part, c, n, pairs);
        for (unsigned i = 0; i < QUERIES; i++) {
            const __m256 weight =
                _mm256_mul_ps(pairs[i], exp8(_mm256_sub_ps(s[c / 2 + i], most)));

            _mm_storeu_ps(weights + (c + i) * QUERIES, _mm256_castps256_ps128(weight));
            _mm_storeu_ps(weights + (c + i + QUERIES) * QUERIES,
                          _mm256_extractf128_ps(weight, 1));
        }
    }
    for (size_t row = 0; row < input->n_scored; row += LANES) {
        const size_t left = input->n_scored - row;

        scores_of(part, row, n, pairs);
        for (unsigned i = 0; i < QUERIES; i++)
            pairs[i] = exp8(_mm256_sub_ps(pairs[i], most));
        for (unsigned i = 0; i < QUERIES && i < left; i++)
            add_weight(weights, input->numbers + row + i, _mm256_castps256_ps128(pairs[i]));
        for (unsigned i = 0; i < QUERIES && i + QUERIES < left; i++)
            add_weight(weights, input->numbers + row + i + QUERIES,
                       _mm256_extractf128_ps(pairs[i], 1));
    }
    /* A vector holds the weights of two adjacent summaries here. */
    for (unsigned i = 0; i < STEP / 2; i++)
        lanes[i] = _mm256_loadu_ps(weights + i * LANES);
    for (size_t c = STEP; c < n_summaries; c += STEP)
        for (unsigned i = 0; i < STEP / 2; i++)
            lanes[i] =
                _mm256_add_ps(lanes[i], _mm256_loadu_ps(weights + c * QUERIES + i * LANES));
    for (unsigned apart = STEP / 4; apart > 0; apart /= 2)
        for (unsigned i = 0; i < apart; i++)
            lanes[i] = _mm256_add_ps(lanes[i], lanes[i + apart]);
    return _mm_add_ps(_mm256_castps256_ps128(lanes[0]), _mm256_extractf128_ps(lanes[0], 1));
}

/* Adds weighted mean values to the outputs (n, d_v): n_vectors vectors of elements, from i on.
 * n_vectors is even, and a constant at the calls. */
INLINE void add_slice(const struct part *part,
                      const int8_t *values,
                      size_t i,
                      unsigned n_vectors,
                      unsigned n,
                      float *outputs)
{
    const size_t n_summaries = kv_summary_count(part->shape);
    const size_t d_v = part->shape->d_v, stride = kv_summary_up(d_v);
    const float *weights = part->weights;
    __m256 sums[QUERIES][LANES];

    for (unsigned query = 0; query < n; query++)
        for (unsigned v = 0; v < n_vectors; v++)
            sums[query][v] = _mm256_setzero_ps();
    values += i;
    for (size_t c = 0; c < n_summaries; c++, values += stride, weights += QUERIES) {
        __m256 elements[LANES];

        for (unsigned v = 0; v < n_vectors; v++)
            elements[v] = load_integers(values + v * LANES);
        for (unsigned query = 0; query < n; query++) {
            const __m256 weight = _mm256_broadcast_ss(weights + query);

            for (unsigned v = 0; v < n_vectors; v++)
                sums[query][v] = _mm256_fmadd_ps(weight, elements[v], sums[query][v]);
        }
    }
    for (unsigned query = 0; query < n; query++)
        for (unsigned v = 0; v < n_vectors; v++) {
            const size_t from = i + v * LANES;
            const __m256 shrink = _mm256_set1_ps(part->shrink[query]);
            float *output = outputs + query * d_v + from;

            if (from + LANES <= d_v) {
                _mm256_storeu_ps(
                    output, _mm256_fmadd_ps(_mm256_loadu_ps(output), shrink, sums[query][v]));
            } else if (from < d_v) {
                const __m256i has = first_lanes(d_v - from);

                _mm256_maskstore_ps(
                    output, has,
                    _mm256_fmadd_ps(_mm256_maskload_ps(output, has), shrink, sums[query][v]));
            }
        }
}

/* Adds mean values, as many vectors at a time as there are registers for sums. */
INLINE void add_values(struct part *part, const int8_t *values, unsigned n, float *outputs)
{
    const unsigned n_vectors = n > 2 ? 2 : LANES / n;
    const size_t end = kv_summary_up(part->shape->d_v);
    size_t i = 0;

    for (; i + n_vectors * LANES <= end; i += n_vectors * LANES) {
        add_slice(part, values, i, n_vectors, n, outputs);
        estimate_ahead_step(&part->ahead);
    }
    for (; i < end; i += STEP)
        add_slice(part, values, i, 2, n, outputs);
}

/* Returns the queries padded with 0 to whole steps, in a copy if d_k needs it. */
INLINE const float *
whole_steps(const struct part *part, unsigned n, float padded[QUERIES * KV_SUMMARY_D_MAX])
{
    const size_t d_k = part->shape->d_k, d = kv_summary_up(d_k);
    const float *queries = part->input->queries + part->first * d_k;

    if (d == d_k)
        return queries;
    for (unsigned query = 0; query < n; query++) {
        memcpy(padded + query * d, queries + query * d_k, d_k * sizeof(*padded));
        memset(padded + query * d + d_k, 0, (d - d_k) * sizeof(*padded));
    }
    return padded;
}

INLINE void add_part(const struct kv_summary_shape *shape,
                     const void *group,
                     const struct kv_estimate_input *input,
                     size_t first,
                     unsigned n,
                     float *state)
{
    const float *value_scales = kv_summary_at(group, kv_summary_at_value_scales(shape));
    const int8_t *values = kv_summary_at(group, kv_summary_at_values(shape));
    const size_t n_summaries = kv_summary_count(shape);
    float *maxes = state + first, *sums = maxes + input->n_queries;
    float *outputs = state + 2 * input->n_queries + first * shape->d_v;
    float padded[QUERIES * KV_SUMMARY_D_MAX];
    const __m128 max = load_queries(maxes, n);
    __m256 s[PAIRS_MAX];
    __m128 variance_correction, most, sum, shrink;
    struct kv_summary_head head;
    struct part part;

    part.shape = shape;
    part.input = input;
    part.first = first;
    part.queries = whole_steps(&part, n, padded);
    part.ahead = estimate_ahead_begin(shape, input, first,
                                      n_summaries / 2 + shape->d_v / (QUERIES * LANES));
    memcpy(&head, group, sizeof(head));
    variance_correction = _mm_mul_ps(load_queries(input->squares + first, n),
                                     _mm_set1_ps(input->scale * input->scale));
    variance_correction = _mm_mul_ps(
        _mm_set1_ps(0.15f), _mm_mul_ps(variance_correction, _mm_set1_ps(head.variance)));
    variance_correction = _mm_min_ps(variance_correction, _mm_set1_ps(1));

    most = _mm_max_ps(max, score(&part, group, twice(variance_correction), n, s));
    most = _mm_add_ps(most, _mm_setzero_ps());
    sum = weigh(&part, s, twice(most), n);
    shrink = _mm256_castps256_ps128(exp8(_mm256_castps128_ps256(_mm_sub_ps(max, most))));
    store_queries(sums, n, _mm_fmadd_ps(load_queries(sums, n), shrink, sum));
    store_queries(maxes, n, most);
    _mm_storeu_ps(part.shrink, shrink);
    for (size_t c = 0; c < n_summaries; c++) {
        float *weight = part.weights + c * QUERIES;

        _mm_storeu_ps(weight,
                      _mm_mul_ps(_mm_loadu_ps(weight), _mm_broadcast_ss(value_scales + c)));
    }
    add_values(&part, values, n, outputs);
}

const struct kv_estimate_kernels kv_estimate_avx2 = {
    .name = "avx2",
    .supported = kv_has_avx2,
    .add = add,
};

#endif
