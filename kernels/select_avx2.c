/* Eight scores at a time.  The last ones are loaded with a mask, and what is behind them is
 * -inf: it adds 0 to a sum of weights and is never the larger one. */
#include "parts_avx2.h"
#include "select.h"
#include "select_parts.h"
#include "tiers.h"

#if defined(__x86_64__)

/* The first n < LANES of scores, -inf behind them. */
INLINE __m256 load_rest(const float *scores, size_t n)
{
    const __m256i lanes = first_lanes(n);

    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()),
                            _mm256_maskload_ps(scores, lanes), _mm256_castsi256_ps(lanes));
}

/* Scores of items of no rows are -inf. */
INLINE __m256 among(__m256 scores, const uint32_t *counts)
{
    const __m256i rows = _mm256_loadu_si256((const __m256i *)(const void *)counts);

    return _mm256_blendv_ps(
        scores, _mm256_set1_ps(-__builtin_inff()),
        _mm256_castsi256_ps(_mm256_cmpeq_epi32(rows, _mm256_setzero_si256())));
}

/* The instruction answers its second operand if one is a NaN. */
AVX2 static float max_of(const float *scores, const uint32_t *counts, size_t n)
{
    __m256 a = _mm256_set1_ps(-__builtin_inff()), b = a, c = a, d = a;

    for (; counts != NULL && n >= LANES; n -= LANES, scores += LANES, counts += LANES)
        a = _mm256_max_ps(among(_mm256_loadu_ps(scores), counts), a);
    for (; n >= 4 * LANES; n -= 4 * LANES, scores += 4 * LANES) {
        a = _mm256_max_ps(_mm256_loadu_ps(scores), a);
        b = _mm256_max_ps(_mm256_loadu_ps(scores + LANES), b);
        c = _mm256_max_ps(_mm256_loadu_ps(scores + 2 * LANES), c);
        d = _mm256_max_ps(_mm256_loadu_ps(scores + 3 * LANES), d);
    }
    for (; n >= LANES; n -= LANES, scores += LANES)
        a = _mm256_max_ps(_mm256_loadu_ps(scores), a);
    for (size_t i = 0; i < n; i++)
        if (counts == NULL || counts[i] > 0)
            b = _mm256_max_ps(_mm256_set1_ps(scores[i]), b);
    return max8(_mm256_max_ps(_mm256_max_ps(a, b), _mm256_max_ps(c, d))) + 0.0f;
}

/* Four numbers in units of the exp sum, but for the units of the rounder. */
INLINE __m256i with_rounder(__m128 exps)
{
    return _mm256_castpd_si256(
        _mm256_add_pd(_mm256_cvtps_pd(exps), _mm256_set1_pd(EXP_SUM_ROUNDER)));
}

/* Four such numbers, the rounder's units taken off, times counts of less than 2^32: numbers
 * are below 2^40, so that two products of 32 bits do. */
INLINE __m256i times(__m256i numbers, __m128i counts)
{
    const __m256i zero = _mm256_castpd_si256(_mm256_set1_pd(EXP_SUM_ROUNDER));
    const __m256i units = _mm256_sub_epi64(numbers, zero), by = _mm256_cvtepu32_epi64(counts);

    return _mm256_add_epi64(
        _mm256_mul_epu32(units, by),
        _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(units, 32), by), 32));
}

INLINE uint64_t sum4(__m256i numbers)
{
    uint64_t lanes[4];

    _mm256_storeu_si256((__m256i *)(void *)lanes, numbers);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

INLINE uint64_t exps_of(
    float *scores, const uint32_t *counts, size_t n, __m256 scale, __m256 shift, int counted)
{
    const __m256i zero = _mm256_castpd_si256(_mm256_set1_pd(EXP_SUM_ROUNDER));
    __m256i low = _mm256_setzero_si256(), high = low;
    size_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        const __m256 exps = exp8(_mm256_fmadd_ps(_mm256_loadu_ps(scores + i), scale, shift));
        const __m256i a = with_rounder(_mm256_castps256_ps128(exps));
        const __m256i b = with_rounder(_mm256_extractf128_ps(exps, 1));

        _mm256_storeu_ps(scores + i, exps);
        if (counted) {
            const __m256i by = _mm256_loadu_si256((const __m256i *)(const void *)(counts + i));

            low = _mm256_add_epi64(low, times(a, _mm256_castsi256_si128(by)));
            high = _mm256_add_epi64(high, times(b, _mm256_extracti128_si256(by, 1)));
        } else {
            low = _mm256_add_epi64(low, _mm256_sub_epi64(a, zero));
            high = _mm256_add_epi64(high, _mm256_sub_epi64(b, zero));
        }
    }
    if (i < n) {
        const __m256i lanes = first_lanes(n - i);
        const __m256 exps = exp8(_mm256_fmadd_ps(load_rest(scores + i, n - i), scale, shift));
        const __m256i by = counted ? _mm256_maskload_epi32((const int *)(counts + i), lanes)
                                   : _mm256_srli_epi32(lanes, 31);

        _mm256_maskstore_ps(scores + i, lanes, exps);
        low = _mm256_add_epi64(
            low, times(with_rounder(_mm256_castps256_ps128(exps)), _mm256_castsi256_si128(by)));
        high = _mm256_add_epi64(high, times(with_rounder(_mm256_extractf128_ps(exps, 1)),
                                            _mm256_extracti128_si256(by, 1)));
    }
    return sum4(_mm256_add_epi64(low, high));
}

AVX2 static uint64_t
exps_in_place(float *scores, const uint32_t *counts, size_t n, float scale, float max)
{
    const __m256 by = _mm256_set1_ps(scale), shift = _mm256_set1_ps(-max * scale);

    if (max == -__builtin_inff()) {
        memset(scores, 0, n * sizeof(*scores));
        return 0;
    }
    if (counts != NULL)
        return exps_of(scores, counts, n, by, shift, 1);
    return exps_of(scores, NULL, n, by, shift, 0);
}

AVX2 static void merge_sum(const float *exps, size_t n, float factor, float *merged)
{
    const __m256 by = _mm256_set1_ps(factor);
    size_t i = 0;

    for (; i + LANES <= n; i += LANES)
        _mm256_storeu_ps(merged + i, _mm256_fmadd_ps(_mm256_loadu_ps(exps + i), by,
                                                     _mm256_loadu_ps(merged + i)));
    for (; i < n; i++)
        merged[i] = __builtin_fmaf(exps[i], factor, merged[i]);
}

AVX2 static void merge_max(const float *exps, size_t n, float factor, float *merged)
{
    const __m256 by = _mm256_set1_ps(factor);
    size_t i = 0;

    for (; i + LANES <= n; i += LANES)
        _mm256_storeu_ps(merged + i, _mm256_max_ps(_mm256_mul_ps(_mm256_loadu_ps(exps + i), by),
                                                   _mm256_loadu_ps(merged + i)));
    for (; i < n; i++) {
        const float weight = exps[i] * factor;

        merged[i] = weight > merged[i] ? weight : merged[i];
    }
}

/* Images with their highest bit turned, so that they compare as signed numbers. */
INLINE __m256i images(__m256 scores)
{
    const __m256 plain = _mm256_add_ps(scores, _mm256_setzero_ps()); /* -0 to +0 */
    const __m256i bits = _mm256_castps_si256(plain);
    const __m256i turned =
        _mm256_xor_si256(bits, _mm256_srli_epi32(_mm256_srai_epi32(bits, 31), 1));
    const __m256 is_nan = _mm256_cmp_ps(plain, plain, _CMP_UNORD_Q);

    return _mm256_blendv_epi8(turned, _mm256_set1_epi32(INT32_MIN),
                              _mm256_castps_si256(is_nan));
}

INLINE __m256i plain_images(__m256 scores)
{
    return _mm256_xor_si256(images(scores), _mm256_set1_epi32(INT32_MIN));
}

INLINE unsigned lanes_that(__m256i equal)
{
    return (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(equal));
}

/* The images of a vector that agree with the bound: after the first pass they are few in most
 * vectors. */
INLINE void count_vector(uint32_t *bins,
                         __m256 scores,
                         const uint32_t *counts,
                         unsigned lanes,
                         __m256i bound,
                         uint32_t pass)
{
    const __m256i all = plain_images(scores);
    uint32_t at[LANES];

    if (pass > 0)
        lanes &= lanes_that(
            _mm256_cmpeq_epi32(_mm256_srli_epi32(all, (int)select_above(pass)), bound));
    if (lanes == 0)
        return;
    _mm256_storeu_si256((__m256i *)(void *)at,
                        _mm256_and_si256(_mm256_srli_epi32(all, (int)select_shift(pass)),
                                         _mm256_set1_epi32((int)select_mask(pass))));
    if (lanes == 0xff) {
        for (unsigned lane = 0; lane < LANES; lane++)
            bins[at[lane]] += counts != NULL ? counts[lane] : 1;
        return;
    }
    for (; lanes != 0; lanes &= lanes - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(lanes);

        bins[at[lane]] += counts != NULL ? counts[lane] : 1;
    }
}

INLINE void count_pass(struct kv_selector *selector,
                       const float *scores,
                       const uint32_t *counts,
                       size_t n,
                       uint32_t pass,
                       int counted)
{
    const __m256i bound =
        _mm256_set1_epi32(pass > 0 ? (int)(selector->bound >> select_above(pass)) : 0);
    size_t i = 0;

    for (; i + LANES <= n; i += LANES)
        count_vector(selector->bins, _mm256_loadu_ps(scores + i), counted ? counts + i : NULL,
                     0xff, bound, pass);
    if (i < n)
        count_vector(selector->bins, load_rest(scores + i, n - i), counted ? counts + i : NULL,
                     (1u << (n - i)) - 1, bound, pass);
}

AVX2 static void
count(struct kv_selector *selector, const float *scores, const uint32_t *counts, size_t n)
{
    const int counted = counts != NULL;

    switch (selector->pass) {
    case 0:
        if (counted)
            count_pass(selector, scores, counts, n, 0, 1);
        else
            count_pass(selector, scores, counts, n, 0, 0);
        break;
    case 1:
        count_pass(selector, scores, counts, n, 1, counted);
        break;
    default:
        count_pass(selector, scores, counts, n, 2, counted);
    }
}

/* Which of up to eight items from i on are there, above the bound, at it. */
INLINE void compare(const float *scores,
                    const uint32_t *counts,
                    size_t n,
                    size_t i,
                    __m256i bound,
                    unsigned *ret_above,
                    unsigned *ret_equal)
{
    const size_t rest = n - i;
    const __m256i turned =
        images(rest >= LANES ? _mm256_loadu_ps(scores + i) : load_rest(scores + i, rest));
    unsigned there = rest >= LANES ? 0xff : (1u << rest) - 1;

    if (counts != NULL && rest >= LANES) {
        there = lanes_that(_mm256_cmpeq_epi32(
                    _mm256_loadu_si256((const __m256i *)(const void *)(counts + i)),
                    _mm256_setzero_si256())) ^
                0xff;
    } else if (counts != NULL) {
        for (unsigned lane = 0; lane < rest; lane++)
            if (counts[i + lane] == 0)
                there &= ~(1u << lane);
    }
    *ret_above = lanes_that(_mm256_cmpgt_epi32(turned, bound)) & there;
    *ret_equal = lanes_that(_mm256_cmpeq_epi32(turned, bound)) & there;
}

/* Numbers of the lanes of a set first, as indices of a permutation. */
INLINE __m256i first_of(unsigned set)
{
    return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)kv_lanes_of[set]));
}

AVX2 static size_t between(const float *scores,
                           size_t n,
                           uint32_t least,
                           uint32_t most,
                           float *ret_scores,
                           size_t *ret_n_above)
{
    const __m256i from = _mm256_set1_epi32((int)(least ^ 0x80000000));
    const __m256i to = _mm256_set1_epi32((int)(most ^ 0x80000000));
    size_t n_between = 0, n_above = 0, i = 0;

    /* What is written is never ahead of what has been read, in as many floats. */
    for (; i + LANES <= n; i += LANES) {
        const __m256 at = _mm256_loadu_ps(scores + i);
        const __m256i turned = images(at);
        const unsigned above = lanes_that(_mm256_cmpgt_epi32(turned, to));
        const unsigned in = (lanes_that(_mm256_cmpgt_epi32(from, turned)) | above) ^ 0xff;

        n_above += (size_t)__builtin_popcount(above);
        if (in == 0)
            continue;
        _mm256_storeu_ps(ret_scores + n_between, _mm256_permutevar8x32_ps(at, first_of(in)));
        n_between += (size_t)__builtin_popcount(in);
    }
    for (; i < n; i++) {
        const uint32_t image = kv_score_image(scores[i]);

        n_above += image > most;
        if (image >= least && image <= most)
            ret_scores[n_between++] = scores[i];
    }
    *ret_n_above = n_above;
    return n_between;
}

AVX2 static size_t collect(struct kv_selector *selector,
                           const float *scores,
                           const uint32_t *counts,
                           size_t n,
                           uint32_t base,
                           uint32_t *ret_indices)
{
    const __m256i bound = _mm256_set1_epi32((int)(selector->bound ^ 0x80000000));
    uint64_t ties = selector->ties;
    size_t n_chosen = 0;

    for (size_t i = 0; i < n; i += LANES) {
        unsigned chosen, equal;

        compare(scores, counts, n, i, bound, &chosen, &equal);
        for (; equal != 0 && ties > 0; equal &= equal - 1, ties--)
            chosen |= equal & -equal;
        if (chosen != 0)
            n_chosen = write_lanes(ret_indices, n_chosen, chosen, base + (uint32_t)i);
    }
    selector->ties = ties;
    return n_chosen;
}

AVX2 static void items(const struct kv_selector *selector,
                       const float *scores,
                       const uint32_t *counts,
                       size_t n,
                       uint32_t *ret_above,
                       size_t *ret_n_above,
                       uint32_t *ret_equal,
                       size_t *ret_n_equal)
{
    const __m256i bound = _mm256_set1_epi32((int)(selector->bound ^ 0x80000000));
    size_t n_above = 0, n_equal = 0;

    for (size_t i = 0; i < n; i += LANES) {
        unsigned above, equal;

        compare(scores, counts, n, i, bound, &above, &equal);
        if (above != 0)
            n_above = write_lanes(ret_above, n_above, above, (uint32_t)i);
        if (equal != 0)
            n_equal = write_lanes(ret_equal, n_equal, equal, (uint32_t)i);
    }
    *ret_n_above = n_above;
    *ret_n_equal = n_equal;
}

const struct kv_select_kernels kv_select_avx2 = {
    .name = "avx2",
    .supported = tiers_has_avx2,
    .max = max_of,
    .exps = exps_in_place,
    .merge_sum = merge_sum,
    .merge_max = merge_max,
    .count = count,
    .between = between,
    .collect = collect,
    .items = items,
};

#endif
