/* Sixteen elements are one vector, and the means of a group are padded to that.  Four means are
 * processed for four queries at once (inner_products_avx512.h reduces their sums), values in
 * slices of four vectors for four queries, so bytes are converted to floats once for all of
 * them. */
#include "kernels/dispatch.h"
#include "kernels/estimate.h"
#include "kernels/summary_common.h"
#include "kernels/x86/inner_products_avx512.h"

#include "kernels/x86/estimate_common.h"

#if defined(__x86_64__)

enum {
    SLICE = 4, /* vectors of a mean value at a time */
};

static_assert((int)QUERIES == (int)TILE, "sums_of() makes one vector of their sums");

INLINE __m512 load_integers(const int8_t *at)
{
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)at)));
}

INLINE __m512i load_counts(const uint16_t *at)
{
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)at));
}

/* A NaN to -inf, +inf to FLT_MAX. */
INLINE __m512 without_nan(__m512 s)
{
    return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()),
                              _mm512_cmp_ps_mask(s, s, _CMP_ORD_Q),
                              _mm512_min_ps(s, _mm512_set1_ps(__FLT_MAX__)));
}

/* Up to four queries of an input; their number is a constant at the calls. */
struct part {
    const struct kv_estimate_input *input;
    size_t first; /* query */
    struct estimate_ahead ahead;
    float variance_correction[QUERIES], shrink[QUERIES];
    float weights[QUERIES][KV_SUMMARIES_MAX];
};

static inline float variance_correction_of(float square, float scale, float variance)
{
    const float variance_correction = 0.15f * (square * (scale * scale) * variance);

    return variance_correction < 1 ? variance_correction : 1;
}

/* Stores the products with all mean keys in the place of weights.  After the last element of a
 * query, lanes add +0, which changes nothing: no lane is -0, because sums begin at +0. */
INLINE void
score(struct part *part, const struct kv_summary_shape *shape, const int8_t *keys, unsigned n)
{
    const size_t d_k = shape->d_k, stride = kv_summary_up(d_k);
    const float *queries = part->input->queries + part->first * d_k;

    for (size_t c = 0; c < kv_summary_count(shape); c += TILE, keys += TILE * stride) {
        __m512 sums[TILE][TILE];
        float all[TILE * TILE];

        for (unsigned key = 0; key < TILE; key++)
            for (unsigned query = 0; query < n; query++)
                sums[key][query] = _mm512_setzero_ps();
        for (size_t i = 0; i < d_k; i += LANES) {
            __m512 elements[TILE];

            for (unsigned key = 0; key < TILE; key++)
                elements[key] = load_integers(keys + key * stride + i);
            for (unsigned query = 0; query < n; query++) {
                const __m512 x = load_step(queries + query * d_k, i, d_k);

                for (unsigned key = 0; key < TILE; key++)
                    sums[key][query] = _mm512_fmadd_ps(x, elements[key], sums[key][query]);
            }
        }
        _mm512_storeu_ps(all, sums_of((const __m512(*)[TILE])sums, TILE, n));
        for (unsigned query = 0; query < n; query++)
            memcpy(part->weights[query] + c, all + query * TILE, TILE * sizeof(float));
        estimate_ahead_step(&part->ahead);
    }
}

/* Replaces products with weights; returns their sum. */
INLINE float weigh(const struct part *part,
                   const struct kv_summary_shape *shape,
                   const float *key_scales,
                   unsigned query,
                   float *weights,
                   float *max,
                   float *ret_shrink)
{
    const struct kv_estimate_input *input = part->input;
    const size_t n_summaries = kv_summary_count(shape), index = part->first + query;
    const uint16_t *counts = input->counts + index * input->counts_stride;
    const size_t n_scored = input->n_scored;
    const float *scores = n_scored > 0 ? input->scores + index * input->scores_stride : NULL;
    const __m512 infinite = _mm512_set1_ps(-__builtin_inff());
    const __m512 scale = _mm512_set1_ps(input->scale);
    __m512 most = _mm512_set1_ps(*max), lanes = _mm512_setzero_ps();

    for (size_t c = 0; c < n_summaries; c += LANES) {
        const __m512i n = load_counts(counts + c);
        const __m512 product =
            _mm512_mul_ps(_mm512_loadu_ps(weights + c), _mm512_loadu_ps(key_scales + c));
        __m512 s = without_nan(
            _mm512_fmadd_ps(product, scale, _mm512_set1_ps(part->variance_correction[query])));

        s = _mm512_mask_mov_ps(infinite, _mm512_test_epi32_mask(n, n), s);
        _mm512_storeu_ps(weights + c, s);
        most = _mm512_max_ps(most, s);
    }
    for (size_t row = 0; row < n_scored; row += LANES) {
        const __m512 s = without_nan(_mm512_mul_ps(load_step(scores, row, n_scored), scale));

        most =
            _mm512_max_ps(most, _mm512_mask_mov_ps(infinite, first_lanes(n_scored - row), s));
    }
    most = _mm512_set1_ps(max16(most) + 0.0f);

    for (size_t c = 0; c < n_summaries; c += LANES) {
        const __m512 n = _mm512_cvtepi32_ps(load_counts(counts + c));

        _mm512_storeu_ps(
            weights + c,
            _mm512_mul_ps(n, exp16(_mm512_sub_ps(_mm512_loadu_ps(weights + c), most))));
    }
    for (size_t row = 0; row < n_scored; row += LANES) {
        const __m512 s = without_nan(_mm512_mul_ps(load_step(scores, row, n_scored), scale));
        float exps[LANES];

        _mm512_storeu_ps(exps, exp16(_mm512_sub_ps(s, most)));
        for (size_t i = 0; i < LANES && row + i < n_scored; i++)
            weights[input->numbers[row + i]] += exps[i];
    }
    for (size_t c = 0; c < n_summaries; c += LANES)
        lanes = _mm512_add_ps(lanes, _mm512_loadu_ps(weights + c));
    *ret_shrink = _mm512_cvtss_f32(exp16(_mm512_sub_ps(_mm512_set1_ps(*max), most)));
    *max = _mm512_cvtss_f32(most);
    return sum16(lanes);
}

/* Adds weighted mean values to the outputs (n, d_v): n_vectors vectors of elements, from i on.
 * n and n_vectors are constants at the calls. */
INLINE void add_slice(const struct part *part,
                      const struct kv_summary_shape *shape,
                      const int8_t *values,
                      size_t i,
                      unsigned n_vectors,
                      unsigned n,
                      float *outputs)
{
    const size_t d_v = shape->d_v, stride = kv_summary_up(d_v);
    __m512 sums[QUERIES][SLICE];

    for (unsigned query = 0; query < n; query++)
        for (unsigned v = 0; v < n_vectors; v++)
            sums[query][v] = _mm512_setzero_ps();
    values += i;
    for (size_t c = 0; c < kv_summary_count(shape); c++, values += stride) {
        __m512 elements[SLICE];

        for (unsigned v = 0; v < n_vectors; v++)
            elements[v] = load_integers(values + v * LANES);
        for (unsigned query = 0; query < n; query++) {
            const __m512 weight = _mm512_set1_ps(part->weights[query][c]);

            for (unsigned v = 0; v < n_vectors; v++)
                sums[query][v] = _mm512_fmadd_ps(weight, elements[v], sums[query][v]);
        }
    }
    for (unsigned query = 0; query < n; query++)
        for (unsigned v = 0; v < n_vectors; v++) {
            float *output = outputs + query * d_v;
            const size_t from = i + v * LANES;
            const __m512 shrink = _mm512_set1_ps(part->shrink[query]);

            _mm512_mask_storeu_ps(
                output + from, first_lanes(d_v - from),
                _mm512_fmadd_ps(load_step(output, from, d_v), shrink, sums[query][v]));
        }
}

INLINE void add_values(struct part *part,
                       const struct kv_summary_shape *shape,
                       const int8_t *values,
                       unsigned n,
                       float *outputs)
{
    const size_t end = kv_summary_up(shape->d_v);
    size_t i = 0;

    for (; i + SLICE * LANES <= end; i += SLICE * LANES) {
        add_slice(part, shape, values, i, SLICE, n, outputs);
        estimate_ahead_step(&part->ahead);
    }
    for (; i < end; i += LANES)
        add_slice(part, shape, values, i, 1, n, outputs);
}

INLINE void add_part(const struct kv_summary_shape *shape,
                     const void *group,
                     const struct kv_estimate_input *input,
                     size_t first,
                     unsigned n,
                     float *state)
{
    const float *key_scales = kv_summary_at(group, kv_summary_at_key_scales(shape));
    const float *value_scales = kv_summary_at(group, kv_summary_at_value_scales(shape));
    float *maxes = state + first, *sums = maxes + input->n_queries;
    float *outputs = state + 2 * input->n_queries + first * shape->d_v;
    struct kv_summary_head head;
    struct part part;

    part.input = input;
    part.first = first;
    part.ahead = estimate_ahead_begin(
        shape, input, first, kv_summary_count(shape) / TILE + shape->d_v / (SLICE * LANES));
    memcpy(&head, group, sizeof(head));
    for (unsigned query = 0; query < n; query++)
        part.variance_correction[query] =
            variance_correction_of(input->squares[first + query], input->scale, head.variance);
    score(&part, shape, kv_summary_at(group, kv_summary_at_keys(shape)), n);
    for (unsigned query = 0; query < n; query++) {
        float *weights = part.weights[query];
        const float sum =
            weigh(&part, shape, key_scales, query, weights, maxes + query, &part.shrink[query]);

        sums[query] = _mm_cvtss_f32(_mm_fmadd_ss(
            _mm_set_ss(sums[query]), _mm_set_ss(part.shrink[query]), _mm_set_ss(sum)));
        for (size_t c = 0; c < kv_summary_count(shape); c += LANES)
            _mm512_storeu_ps(weights + c, _mm512_mul_ps(_mm512_loadu_ps(weights + c),
                                                        _mm512_loadu_ps(value_scales + c)));
    }
    add_values(&part, shape, kv_summary_at(group, kv_summary_at_values(shape)), n, outputs);
}

const struct kv_estimate_kernels kv_estimate_avx512 = {
    .name = "avx512",
    .supported = kv_has_avx512,
    .add = add,
};

#endif
