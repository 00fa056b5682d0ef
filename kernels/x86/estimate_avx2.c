/* A mean is processed for four queries at once, so its bytes are converted once for all of them.
 * Eight lanes at a time: with sixteen, gcc 12 keeps a sum in memory.
 * What is done with which lanes: estimate_common.h. */
#include "kernels/dispatch.h"
#include "kernels/estimate.h"
#include "kernels/x86/avx2.h"

#include "kernels/x86/estimate_common.h"

#if defined(__x86_64__)

/* Sixteen bytes as 16-bit integers. */
INLINE __m256i load_integers(const int8_t *at)
{
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)at));
}

/* A NaN to -inf, +inf to FLT_MAX. */
INLINE __m256 without_nan(__m256 s)
{
    return _mm256_min_ps(_mm256_max_ps(s, _mm256_set1_ps(-__builtin_inff())),
                         _mm256_set1_ps(__FLT_MAX__));
}

/* Loads the counts of eight summaries. */
INLINE __m256 counts_of(const struct part *part, unsigned query, size_t c)
{
    const struct kv_estimate_input *input = part->input;
    const uint16_t *from = input->counts + (part->first + query) * input->counts_stride + c;

    return _mm256_cvtepi32_ps(
        _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)from)));
}

INLINE void score(struct part *part, const void *group, unsigned n)
{
    const struct kv_summary_shape *shape = part->shape;
    const struct kv_estimate_queries *queries = &part->input->queries;
    const size_t d = kv_summary_up(shape->d_k);
    const float *key_scales = kv_summary_at(group, kv_summary_at_key_scales(shape));
    const int8_t *keys = kv_summary_at(group, kv_summary_at_keys(shape));
    const int16_t *elements = queries->elements + part->first * d;
    const __m256 infinite = _mm256_set1_ps(-__builtin_inff());
    const __m256 scale = _mm256_set1_ps(part->input->scale);
    __m256 exceeded = _mm256_setzero_ps();
    struct kv_summary_head head;

    memcpy(&head, group, sizeof(head));
    for (size_t c = 0; c < kv_summary_count(shape); c += LANES) {
        const int8_t *of_half = keys + c / STEP * STEP * d + c % STEP * 2;
        __m256i sums[QUERIES];

        for (unsigned query = 0; query < n; query++)
            sums[query] = _mm256_setzero_si256();
        for (size_t i = 0; i < d; i += 2 * PAIRS_AHEAD) {
            for (size_t j = i; j < i + 2 * PAIRS_AHEAD; j += 2) {
                const __m256i key = load_integers(of_half + j * STEP);

                for (unsigned query = 0; query < n; query++)
                    sums[query] = _mm256_add_epi32(
                        sums[query], _mm256_madd_epi16(key, _mm256_set1_epi32(estimate_pair(
                                                                elements + query * d + j))));
            }
            if (c % STEP == 0)
                estimate_ahead_step(&part->ahead);
        }
        for (unsigned query = 0; query < n; query++) {
            const float variance_correction =
                0.15f * (queries->squares[part->first + query] *
                         (part->input->scale * part->input->scale) * head.variance);
            const __m256 correction =
                _mm256_min_ps(_mm256_set1_ps(variance_correction), _mm256_set1_ps(1));
            const __m256 none =
                _mm256_cmp_ps(counts_of(part, query, c), _mm256_setzero_ps(), _CMP_EQ_OQ);
            const __m256 product =
                _mm256_mul_ps(_mm256_cvtepi32_ps(sums[query]),
                              _mm256_set1_ps(queries->steps[part->first + query]));
            const __m256 scaled = _mm256_mul_ps(product, _mm256_loadu_ps(key_scales + c));
            const __m256 s = _mm256_blendv_ps(
                without_nan(_mm256_fmadd_ps(scaled, scale, correction)), infinite, none);

            _mm256_storeu_ps(part->s[query] + c, s);
            exceeded = _mm256_or_ps(
                exceeded, _mm256_cmp_ps(s, _mm256_set1_ps(part->maxes[query]), _CMP_GT_OQ));
        }
    }
    part->is_exceeded |= _mm256_movemask_ps(exceeded) != 0;
}

INLINE void clear_places(struct part *part)
{
    for (size_t c = 0; c < kv_summary_count(part->shape); c++)
        for (unsigned i = 0; i < SUMS; i += 2)
            _mm256_storeu_ps(part->places[c][i], _mm256_setzero_ps());
    for (unsigned i = 0; i < SUMS; i += 2)
        _mm256_storeu_ps(part->places[KV_SUMMARY_NONE][i], _mm256_setzero_ps());
}

/* The rows of a step that count: all ones; and their numbers, of which eight bytes may be read. */
INLINE __m256 rows_that_count(const uint8_t *numbers)
{
    const __m256i all =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)numbers));

    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(KV_SUMMARY_NONE), all));
}

/* Scores of eight rows, of which `left` are there. */
INLINE __m256
scores_of(const struct part *part, unsigned query, size_t row, size_t left, __m256 counting)
{
    const struct kv_estimate_input *input = part->input;
    const float *from = input->scores + (part->first + query) * input->scores_stride + row;
    const __m256 scores =
        left >= LANES ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, first_lanes(left));

    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()),
                            without_nan(_mm256_mul_ps(scores, _mm256_set1_ps(input->scale))),
                            counting);
}

/* The next eight numbers, or those that are left, and that of none. */
INLINE const uint8_t *
numbers_of(const struct part *part, size_t row, size_t left, uint8_t *room)
{
    const uint8_t *numbers = part->input->numbers + row;

    if (left >= LANES)
        return numbers;
    memset(room, KV_SUMMARY_NONE, LANES);
    memcpy(room, numbers, left);
    return room;
}

INLINE void add_rows(struct part *part, unsigned n)
{
    const size_t n_scored = part->input->n_scored;
    __m256 exceeded = _mm256_setzero_ps();

    for (size_t row = 0; row < n_scored; row += LANES) {
        const size_t left = n_scored - row;
        uint8_t room[LANES];
        const uint8_t *numbers = numbers_of(part, row, left, room);
        const __m256 counting = rows_that_count(numbers);
        __m256 e[QUERIES], pairs[QUERIES];

        for (unsigned query = 0; query < QUERIES; query++)
            e[query] = _mm256_setzero_ps();
        for (unsigned query = 0; query < n; query++) {
            const __m256 s = scores_of(part, query, row, left, counting);
            const __m256 max = _mm256_set1_ps(part->maxes[query]);

            exceeded = _mm256_or_ps(exceeded, _mm256_cmp_ps(s, max, _CMP_GT_OQ));
            e[query] = _mm256_sub_ps(s, max);
        }
        exps8(e, n < 2 ? n : 2);
        exps8(e + 2, n < 2 ? 0 : n - 2);

        /* Rows i and i + 4, of all queries. */
        const __m256 low01 = _mm256_unpacklo_ps(e[0], e[1]);
        const __m256 low23 = _mm256_unpacklo_ps(e[2], e[3]);
        const __m256 high01 = _mm256_unpackhi_ps(e[0], e[1]);
        const __m256 high23 = _mm256_unpackhi_ps(e[2], e[3]);

        pairs[0] = _mm256_shuffle_ps(low01, low23, 0x44);
        pairs[1] = _mm256_shuffle_ps(low01, low23, 0xee);
        pairs[2] = _mm256_shuffle_ps(high01, high23, 0x44);
        pairs[3] = _mm256_shuffle_ps(high01, high23, 0xee);
        if (row % ROWS_AHEAD == 0)
            estimate_ahead_step(&part->ahead);
        /* Rows behind the last are of the number of none. */
        for (unsigned i = 0; i < QUERIES; i++) {
            float *place = part->places[numbers[i]][i];

            _mm_storeu_ps(place,
                          _mm_add_ps(_mm_loadu_ps(place), _mm256_castps256_ps128(pairs[i])));
        }
        for (unsigned i = 0; i < QUERIES; i++) {
            float *place = part->places[numbers[QUERIES + i]][i];

            _mm_storeu_ps(place,
                          _mm_add_ps(_mm_loadu_ps(place), _mm256_extractf128_ps(pairs[i], 1)));
        }
    }
    part->is_exceeded |= _mm256_movemask_ps(exceeded) != 0;
}

INLINE float largest(const struct part *part, unsigned query, float max)
{
    const size_t n_scored = part->input->n_scored;
    __m256 most = _mm256_set1_ps(max);

    for (size_t c = 0; c < kv_summary_count(part->shape); c += LANES)
        most = _mm256_max_ps(most, _mm256_loadu_ps(part->s[query] + c));
    for (size_t row = 0; row < n_scored; row += LANES) {
        uint8_t room[LANES];
        const __m256 counting = rows_that_count(numbers_of(part, row, n_scored - row, room));

        most = _mm256_max_ps(most, scores_of(part, query, row, n_scored - row, counting));
    }
    return max8(most);
}

INLINE void weigh(struct part *part, const void *group, unsigned n)
{
    const float *value_scales = kv_summary_at(group, kv_summary_at_value_scales(part->shape));
    const size_t n_summaries = kv_summary_count(part->shape);

    for (unsigned query = 0; query < n; query++) {
        float *weights = part->weights[query], *sums = part->sums + query * KV_ESTIMATE_LANES;
        const __m256 max = _mm256_set1_ps(part->maxes[query]);
        __m256 lanes[2], top = _mm256_setzero_ps();

        for (size_t c = 0; c < n_summaries; c += STEP) {
            __m256 e[2];

            for (unsigned half = 0; half < 2; half++)
                e[half] =
                    _mm256_sub_ps(_mm256_loadu_ps(part->s[query] + c + half * LANES), max);
            exps8(e, 2);
            for (unsigned half = 0; half < 2; half++) {
                const size_t at = c + half * LANES;
                const __m256 w = _mm256_fmadd_ps(counts_of(part, query, at), e[half],
                                                 _mm256_loadu_ps(weights + at));
                const __m256 x = _mm256_mul_ps(w, _mm256_loadu_ps(value_scales + at));

                lanes[half] = c == 0 ? w : _mm256_add_ps(lanes[half], w);
                top = _mm256_max_ps(top, x);
                _mm256_storeu_ps(weights + at, x);
            }
        }
        for (unsigned half = 0; half < 2; half++)
            _mm256_storeu_ps(sums + half * LANES,
                             _mm256_add_ps(_mm256_loadu_ps(sums + half * LANES), lanes[half]));

        const float most = max8(top);
        const bool is_some = most > KV_ESTIMATE_LEAST;
        const __m256 by = _mm256_set1_ps(is_some ? KV_ESTIMATE_WEIGHT_MOST / most : 0);

        estimate_ahead_step(&part->ahead);
        part->steps[query] = is_some ? most / KV_ESTIMATE_WEIGHT_MOST : 0;
        for (size_t c = 0; c < n_summaries; c += STEP) {
            const __m256i low =
                _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(weights + c), by));
            const __m256i high =
                _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(weights + c + LANES), by));

            _mm256_storeu_si256((__m256i *)(void *)(part->rounded[query] + c),
                                _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
        }
    }
}

/* Adds weighted mean values, eight elements from i on. */
INLINE void add_slice(struct part *part, const int8_t *values, size_t i, unsigned n)
{
    const size_t d_v = part->shape->d_v, stride = 2 * kv_summary_up(d_v);
    __m256i sums[QUERIES];

    for (unsigned query = 0; query < n; query++)
        sums[query] = _mm256_setzero_si256();
    values += 2 * i;
    for (size_t c = 0; c < kv_summary_count(part->shape); c += 2, values += stride) {
        const __m256i elements = load_integers(values);

        for (unsigned query = 0; query < n; query++)
            sums[query] = _mm256_add_epi32(
                sums[query],
                _mm256_madd_epi16(elements,
                                  _mm256_set1_epi32(estimate_pair(part->rounded[query] + c))));
    }
    for (unsigned query = 0; query < n; query++) {
        const __m256 step = _mm256_set1_ps(part->steps[query]);
        const __m256 sum = _mm256_cvtepi32_ps(sums[query]);
        float *output = part->outputs + query * d_v + i;

        if (i + LANES <= d_v) {
            _mm256_storeu_ps(output, _mm256_fmadd_ps(step, sum, _mm256_loadu_ps(output)));
        } else {
            const __m256i has = first_lanes(d_v - i);

            _mm256_maskstore_ps(output, has,
                                _mm256_fmadd_ps(step, sum, _mm256_maskload_ps(output, has)));
        }
    }
}

INLINE void add_values(struct part *part, const int8_t *values, unsigned n)
{
    for (size_t i = 0; i < part->shape->d_v; i += LANES) {
        add_slice(part, values, i, n);
        if (i % ELEMENTS_AHEAD == 0)
            estimate_ahead_step(&part->ahead);
    }
}

static AVX2 float largest_of(const float *scores, size_t n)
{
    __m256 most[2];

    most[0] = most[1] = _mm256_set1_ps(-__builtin_inff());
    /* The second operand is the result where the first is a NaN. */
    for (; n >= STEP; n -= STEP, scores += STEP)
        for (unsigned half = 0; half < 2; half++)
            most[half] = _mm256_max_ps(_mm256_loadu_ps(scores + half * LANES), most[half]);
    for (; n > 0; n -= n < LANES ? n : LANES, scores += LANES) {
        const __m256i has = first_lanes(n);
        const __m256 some =
            _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), _mm256_maskload_ps(scores, has),
                             _mm256_castsi256_ps(has));

        most[0] = _mm256_max_ps(some, most[0]);
    }
    return max8(_mm256_max_ps(most[0], most[1]));
}

const struct kv_estimate_kernels kv_estimate_avx2 = {
    .name = "avx2",
    .supported = kv_has_avx2,
    .add = add,
    .largest = largest_of,
};

#endif
