/* A mean is processed for four queries at once, so its bytes are converted once for all of them.
 * What is done with which lanes: estimate_common.h. */
#include "kernels/dispatch.h"
#include "kernels/estimate.h"
#include "kernels/x86/avx512.h"

#include "kernels/x86/estimate_common.h"

#if defined(__x86_64__)

enum {
    SLICE = 4, /* vectors of a mean value at a time */
};

/* 32 bytes as 16-bit integers. */
INLINE __m512i load_integers(const int8_t *at)
{
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)at));
}

/* A NaN to -inf, +inf to FLT_MAX. */
INLINE __m512 without_nan(__m512 s)
{
    return _mm512_min_ps(_mm512_max_ps(s, _mm512_set1_ps(-__builtin_inff())),
                         _mm512_set1_ps(__FLT_MAX__));
}

/* Loads the counts of 16 summaries. */
INLINE __m512i counts_of(const struct part *part, unsigned query, size_t c)
{
    const struct kv_estimate_input *input = part->input;
    const uint16_t *from = input->counts + (part->first + query) * input->counts_stride + c;

    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)from));
}

INLINE void score(struct part *part, const void *group, unsigned n)
{
    const struct kv_summary_shape *shape = part->shape;
    const struct kv_estimate_queries *queries = &part->input->queries;
    const size_t d = kv_summary_up(shape->d_k);
    const float *key_scales = kv_summary_at(group, kv_summary_at_key_scales(shape));
    const int8_t *keys = kv_summary_at(group, kv_summary_at_keys(shape));
    const int16_t *elements = queries->elements + part->first * d;
    struct kv_summary_head head;
    unsigned exceeded = 0;

    memcpy(&head, group, sizeof(head));
    for (size_t c = 0; c < kv_summary_count(shape); c += LANES) {
        __m512i sums[QUERIES];

        for (unsigned query = 0; query < n; query++)
            sums[query] = _mm512_setzero_si512();
        for (size_t i = 0; i < d; i += 2 * PAIRS_AHEAD) {
            for (size_t j = i; j < i + 2 * PAIRS_AHEAD; j += 2, keys += 2 * LANES) {
                const __m512i key = load_integers(keys);

                for (unsigned query = 0; query < n; query++)
                    sums[query] = _mm512_add_epi32(
                        sums[query], _mm512_madd_epi16(key, _mm512_set1_epi32(estimate_pair(
                                                                elements + query * d + j))));
            }
            estimate_ahead_step(&part->ahead);
        }
        for (unsigned query = 0; query < n; query++) {
            const float variance_correction =
                0.15f * (queries->squares[part->first + query] *
                         (part->input->scale * part->input->scale) * head.variance);
            const __m512 correction =
                _mm512_min_ps(_mm512_set1_ps(variance_correction), _mm512_set1_ps(1));
            const __m512i counts = counts_of(part, query, c);
            const __m512 product =
                _mm512_mul_ps(_mm512_cvtepi32_ps(sums[query]),
                              _mm512_set1_ps(queries->steps[part->first + query]));
            const __m512 s = _mm512_mask_mov_ps(
                _mm512_set1_ps(-__builtin_inff()), _mm512_test_epi32_mask(counts, counts),
                without_nan(
                    _mm512_fmadd_ps(_mm512_mul_ps(product, _mm512_loadu_ps(key_scales + c)),
                                    _mm512_set1_ps(part->input->scale), correction)));

            _mm512_storeu_ps(part->s[query] + c, s);
            exceeded |= _mm512_cmp_ps_mask(s, _mm512_set1_ps(part->maxes[query]), _CMP_GT_OQ);
        }
    }
    part->is_exceeded |= exceeded != 0;
}

INLINE void clear_places(struct part *part)
{
    for (size_t c = 0; c < kv_summary_count(part->shape); c++)
        _mm512_storeu_ps(part->places[c][0], _mm512_setzero_ps());
    _mm512_storeu_ps(part->places[KV_SUMMARY_NONE][0], _mm512_setzero_ps());
}

/* The next sixteen numbers, or those that are left, and that of none. */
INLINE const uint8_t *numbers_of(const struct part *part, size_t row, uint8_t room[LANES])
{
    const uint8_t *numbers = part->input->numbers + row;
    const size_t left = part->input->n_scored - row;

    if (left >= LANES)
        return numbers;
    memset(room, KV_SUMMARY_NONE, LANES);
    memcpy(room, numbers, left);
    return room;
}

/* Scores of the sixteen rows of these numbers; -inf of those that do not count. */
INLINE __m512 scores_of(const struct part *part,
                        unsigned query,
                        size_t row,
                        const uint8_t *numbers)
{
    const struct kv_estimate_input *input = part->input;
    const float *from = input->scores + (part->first + query) * input->scores_stride;
    const __m512i all =
        _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)numbers));
    const __m512 s = without_nan(
        _mm512_mul_ps(load_step(from, row, input->n_scored), _mm512_set1_ps(input->scale)));

    return _mm512_mask_mov_ps(s,
                              _mm512_cmpeq_epi32_mask(all, _mm512_set1_epi32(KV_SUMMARY_NONE)),
                              _mm512_set1_ps(-__builtin_inff()));
}

INLINE void add_rows(struct part *part, unsigned n)
{
    unsigned exceeded = 0;

    for (size_t row = 0; row < part->input->n_scored; row += LANES) {
        uint8_t room[LANES];
        const uint8_t *numbers = numbers_of(part, row, room);
        float of_rows[SUMS][LANES]; /* [row % 4] of rows row % 4, 4 + row % 4, ... */
        __m512 e[QUERIES];

        for (unsigned query = 0; query < QUERIES; query++)
            e[query] = _mm512_setzero_ps();
        for (unsigned query = 0; query < n; query++) {
            const __m512 s = scores_of(part, query, row, numbers);
            const __m512 max = _mm512_set1_ps(part->maxes[query]);

            exceeded |= _mm512_cmp_ps_mask(s, max, _CMP_GT_OQ);
            e[query] = exp16(_mm512_sub_ps(s, max));
        }

        const __m512 low01 = _mm512_unpacklo_ps(e[0], e[1]);
        const __m512 low23 = _mm512_unpacklo_ps(e[2], e[3]);
        const __m512 high01 = _mm512_unpackhi_ps(e[0], e[1]);
        const __m512 high23 = _mm512_unpackhi_ps(e[2], e[3]);

        _mm512_storeu_ps(of_rows[0], _mm512_shuffle_ps(low01, low23, 0x44));
        _mm512_storeu_ps(of_rows[1], _mm512_shuffle_ps(low01, low23, 0xee));
        _mm512_storeu_ps(of_rows[2], _mm512_shuffle_ps(high01, high23, 0x44));
        _mm512_storeu_ps(of_rows[3], _mm512_shuffle_ps(high01, high23, 0xee));
        estimate_ahead_step(&part->ahead);
        /* Rows behind the last are of the number of none. */
        for (unsigned i = 0; i < LANES; i++) {
            float *place = part->places[numbers[i]][i % SUMS];

            _mm_storeu_ps(place,
                          _mm_add_ps(_mm_loadu_ps(place),
                                     _mm_loadu_ps(of_rows[i % SUMS] + i / SUMS * QUERIES)));
        }
    }
    part->is_exceeded |= exceeded != 0;
}

INLINE float largest(const struct part *part, unsigned query, float max)
{
    __m512 most = _mm512_set1_ps(max);

    for (size_t c = 0; c < kv_summary_count(part->shape); c += LANES)
        most = _mm512_max_ps(most, _mm512_loadu_ps(part->s[query] + c));
    for (size_t row = 0; row < part->input->n_scored; row += LANES) {
        uint8_t room[LANES];

        most = _mm512_max_ps(most, scores_of(part, query, row, numbers_of(part, row, room)));
    }
    return max16(most);
}

INLINE void weigh(struct part *part, const void *group, unsigned n)
{
    const float *value_scales = kv_summary_at(group, kv_summary_at_value_scales(part->shape));
    const size_t n_summaries = kv_summary_count(part->shape);

    for (unsigned query = 0; query < n; query++) {
        float *weights = part->weights[query], *sums = part->sums + query * KV_ESTIMATE_LANES;
        const __m512 max = _mm512_set1_ps(part->maxes[query]);
        __m512 lanes = _mm512_setzero_ps(), top = _mm512_setzero_ps();

        for (size_t c = 0; c < n_summaries; c += LANES) {
            const __m512 e = exp16(_mm512_sub_ps(_mm512_loadu_ps(part->s[query] + c), max));
            const __m512 w = _mm512_fmadd_ps(_mm512_cvtepi32_ps(counts_of(part, query, c)), e,
                                             _mm512_loadu_ps(weights + c));
            const __m512 x = _mm512_mul_ps(w, _mm512_loadu_ps(value_scales + c));

            lanes = c == 0 ? w : _mm512_add_ps(lanes, w);
            top = _mm512_max_ps(top, x);
            _mm512_storeu_ps(weights + c, x);
        }
        _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_loadu_ps(sums), lanes));

        const float most = max16(top);
        const bool is_some = most > KV_ESTIMATE_LEAST;
        const __m512 by = _mm512_set1_ps(is_some ? KV_ESTIMATE_WEIGHT_MOST / most : 0);

        estimate_ahead_step(&part->ahead);
        part->steps[query] = is_some ? most / KV_ESTIMATE_WEIGHT_MOST : 0;
        for (size_t c = 0; c < n_summaries; c += LANES)
            _mm256_storeu_si256((__m256i *)(void *)(part->rounded[query] + c),
                                _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(
                                    _mm512_mul_ps(_mm512_loadu_ps(weights + c), by))));
    }
}

/* Adds weighted mean values: n_vectors vectors of elements, from i on.  n and n_vectors are
 * constants at the calls. */
INLINE void
add_slice(struct part *part, const int8_t *values, size_t i, unsigned n_vectors, unsigned n)
{
    const size_t d_v = part->shape->d_v, stride = 2 * kv_summary_up(d_v);
    __m512i sums[QUERIES][SLICE];

    for (unsigned query = 0; query < n; query++)
        for (unsigned v = 0; v < n_vectors; v++)
            sums[query][v] = _mm512_setzero_si512();
    values += 2 * i;
    for (size_t c = 0; c < kv_summary_count(part->shape); c += 2, values += stride) {
        __m512i elements[SLICE];

        for (unsigned v = 0; v < n_vectors; v++)
            elements[v] = load_integers(values + v * 2 * LANES);
        for (unsigned query = 0; query < n; query++) {
            const __m512i x = _mm512_set1_epi32(estimate_pair(part->rounded[query] + c));

            for (unsigned v = 0; v < n_vectors; v++)
                sums[query][v] =
                    _mm512_add_epi32(sums[query][v], _mm512_madd_epi16(elements[v], x));
        }
    }
    for (unsigned v = 0; v < n_vectors; v++)
        estimate_ahead_step(&part->ahead);
    for (unsigned query = 0; query < n; query++)
        for (unsigned v = 0; v < n_vectors; v++) {
            const size_t from = i + v * LANES;
            float *output = part->outputs + query * d_v;

            _mm512_mask_storeu_ps(output + from, first_lanes(d_v - from),
                                  _mm512_fmadd_ps(_mm512_set1_ps(part->steps[query]),
                                                  _mm512_cvtepi32_ps(sums[query][v]),
                                                  load_step(output, from, d_v)));
        }
}

INLINE void add_values(struct part *part, const int8_t *values, unsigned n)
{
    const size_t end = kv_summary_up(part->shape->d_v);
    size_t i = 0;

    for (; i + SLICE * LANES <= end; i += SLICE * LANES)
        add_slice(part, values, i, SLICE, n);
    for (; i < end; i += LANES)
        add_slice(part, values, i, 1, n);
}

static AVX512 float largest_of(const float *scores, size_t n)
{
    __m512 most = _mm512_set1_ps(-__builtin_inff());

    /* The second operand is the result where the first is a NaN. */
    for (; n >= LANES; n -= LANES, scores += LANES)
        most = _mm512_max_ps(_mm512_loadu_ps(scores), most);
    if (n > 0)
        most = _mm512_max_ps(_mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()),
                                                first_lanes(n), load_step(scores, 0, n)),
                             most);
    return max16(most);
}

const struct kv_estimate_kernels kv_estimate_avx512 = {
    .name = "avx512",
    .supported = kv_has_avx512,
    .add = add,
    .largest = largest_of,
};

#endif
