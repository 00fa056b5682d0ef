/* Eight scores at a time.  The last ones are loaded with a mask, and what is behind them is
 * -inf: it adds 0 to a sum of weights and is never the larger one. */
#include "select.h"
#include "select_parts.h"
#include "tiers.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#define AVX2   __attribute__((target("avx2,fma,f16c")))
#define INLINE AVX2 __attribute__((always_inline)) static inline

enum {
    LANES = 8
};

INLINE __m256i first_lanes(size_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* The first n < LANES of scores, -inf behind them. */
INLINE __m256 load_rest(const float *scores, size_t n)
{
    const __m256i lanes = first_lanes(n);

    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()),
                            _mm256_maskload_ps(scores, lanes), _mm256_castsi256_ps(lanes));
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

/* The instruction answers its second operand if one is a NaN. */
AVX2 static float max_of(const float *scores, size_t n)
{
    __m256 a = _mm256_set1_ps(-__builtin_inff()), b = a, c = a, d = a;

    for (; n >= 4 * LANES; n -= 4 * LANES, scores += 4 * LANES) {
        a = _mm256_max_ps(_mm256_loadu_ps(scores), a);
        b = _mm256_max_ps(_mm256_loadu_ps(scores + LANES), b);
        c = _mm256_max_ps(_mm256_loadu_ps(scores + 2 * LANES), c);
        d = _mm256_max_ps(_mm256_loadu_ps(scores + 3 * LANES), d);
    }
    for (; n >= LANES; n -= LANES, scores += LANES)
        a = _mm256_max_ps(_mm256_loadu_ps(scores), a);
    b = _mm256_max_ps(load_rest(scores, n), b);
    return max8(_mm256_max_ps(_mm256_max_ps(a, b), _mm256_max_ps(c, d))) + 0.0f;
}

INLINE float sum16(__m256 low, __m256 high)
{
    const __m256 eight = _mm256_add_ps(low, high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));

    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

/* One group, or the last part of one. */
INLINE float exp_sum_group(const float *scores, size_t n, __m256 scale, __m256 shift)
{
    __m256 low = _mm256_setzero_ps(), high = low;

    for (; n >= SELECT_LANES; n -= SELECT_LANES, scores += SELECT_LANES) {
        low = _mm256_add_ps(low, exp8(_mm256_fmadd_ps(_mm256_loadu_ps(scores), scale, shift)));
        high = _mm256_add_ps(
            high, exp8(_mm256_fmadd_ps(_mm256_loadu_ps(scores + LANES), scale, shift)));
    }
    if (n >= LANES) {
        low = _mm256_add_ps(low, exp8(_mm256_fmadd_ps(_mm256_loadu_ps(scores), scale, shift)));
        n -= LANES;
        if (n > 0)
            high = _mm256_add_ps(
                high, exp8(_mm256_fmadd_ps(load_rest(scores + LANES, n), scale, shift)));
    } else if (n > 0) {
        low = _mm256_add_ps(low, exp8(_mm256_fmadd_ps(load_rest(scores, n), scale, shift)));
    }
    return sum16(low, high);
}

AVX2 static double exp_sum(const float *scores, size_t n, float scale, float max)
{
    const __m256 by = _mm256_set1_ps(scale), shift = _mm256_set1_ps(-max * scale);
    double sum = 0;

    if (max == -__builtin_inff())
        return 0;
    for (; n >= KV_SELECT_GROUP; n -= KV_SELECT_GROUP, scores += KV_SELECT_GROUP)
        sum += exp_sum_group(scores, KV_SELECT_GROUP, by, shift);
    if (n > 0)
        sum += exp_sum_group(scores, n, by, shift);
    return sum;
}

AVX2 static void
merge_softmax(const float *scores, size_t n, float scale, float lse, float *merged)
{
    const __m256 by = _mm256_set1_ps(scale), shift = _mm256_set1_ps(-lse);

    if (lse == -__builtin_inff())
        return;
    for (; n >= LANES; n -= LANES, scores += LANES, merged += LANES) {
        const __m256 weights = exp8(_mm256_fmadd_ps(_mm256_loadu_ps(scores), by, shift));

        _mm256_storeu_ps(merged, _mm256_add_ps(_mm256_loadu_ps(merged), weights));
    }
    if (n > 0) {
        const __m256i lanes = first_lanes(n);
        const __m256 weights = exp8(_mm256_fmadd_ps(load_rest(scores, n), by, shift));

        _mm256_maskstore_ps(merged, lanes,
                            _mm256_add_ps(_mm256_maskload_ps(merged, lanes), weights));
    }
}

/* The instruction answers merged if one is a NaN. */
INLINE __m256 larger(__m256 scores, __m256 merged)
{
    const __m256 is_nan = _mm256_cmp_ps(merged, merged, _CMP_UNORD_Q);

    return _mm256_blendv_ps(_mm256_max_ps(scores, merged), scores, is_nan);
}

AVX2 static void merge_max(const float *scores, size_t n, float *merged)
{
    for (; n >= LANES; n -= LANES, scores += LANES, merged += LANES)
        _mm256_storeu_ps(merged, larger(_mm256_loadu_ps(scores), _mm256_loadu_ps(merged)));
    if (n > 0) {
        const __m256i lanes = first_lanes(n);

        _mm256_maskstore_ps(merged, lanes,
                            larger(load_rest(scores, n), _mm256_maskload_ps(merged, lanes)));
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

/* All images by their highest bits. */
INLINE void count_all(const float *scores, size_t n, uint32_t *ret_counts)
{
    uint32_t bins[LANES];
    size_t i = 0;

    memset(ret_counts, 0, SELECT_HIGH_BINS * sizeof(*ret_counts));
    for (; i + LANES <= n; i += LANES) {
        const __m256i high =
            _mm256_srli_epi32(plain_images(_mm256_loadu_ps(scores + i)), SELECT_HIGH_SHIFT);

        _mm256_storeu_si256((__m256i *)bins, high);
        for (unsigned lane = 0; lane < LANES; lane++)
            ret_counts[bins[lane]]++;
    }
    if (i < n) {
        const __m256i high =
            _mm256_srli_epi32(plain_images(load_rest(scores + i, n - i)), SELECT_HIGH_SHIFT);

        _mm256_storeu_si256((__m256i *)bins, high);
        for (unsigned lane = 0; lane < n - i; lane++)
            ret_counts[bins[lane]]++;
    }
}

INLINE unsigned lanes_that(__m256i equal)
{
    return (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(equal));
}

/* The images of a vector that agree with the prefix: they are few in most vectors. */
INLINE void count_vector(__m256 scores,
                         unsigned among,
                         __m256i prefix,
                         int from,
                         int shift,
                         uint32_t n_bins,
                         uint32_t *counts)
{
    const __m256i all = plain_images(scores);
    unsigned agree =
        lanes_that(_mm256_cmpeq_epi32(_mm256_srli_epi32(all, from), prefix)) & among;
    uint32_t bins[LANES];

    if (agree == 0)
        return;
    _mm256_storeu_si256((__m256i *)bins, _mm256_and_si256(_mm256_srli_epi32(all, shift),
                                                          _mm256_set1_epi32((int)n_bins - 1)));
    for (; agree != 0; agree &= agree - 1)
        counts[bins[__builtin_ctz(agree)]]++;
}

INLINE void count_agreeing(const float *scores,
                           size_t n,
                           uint32_t prefix,
                           int from,
                           int shift,
                           uint32_t n_bins,
                           uint32_t *ret_counts)
{
    const __m256i same = _mm256_set1_epi32((int)prefix);
    size_t i = 0;

    memset(ret_counts, 0, n_bins * sizeof(*ret_counts));
    for (; i + LANES <= n; i += LANES)
        count_vector(_mm256_loadu_ps(scores + i), 0xff, same, from, shift, n_bins, ret_counts);
    if (i < n)
        count_vector(load_rest(scores + i, n - i), (1u << (n - i)) - 1, same, from, shift,
                     n_bins, ret_counts);
}

/* Indices of the images above `least` and, as long as `ties` lasts, of those equal to it: as
 * many as there is room for. */
INLINE size_t collect(const float *scores,
                      size_t n,
                      uint32_t least,
                      size_t ties,
                      size_t room,
                      uint32_t *ret_indices)
{
    const __m256i bound = _mm256_set1_epi32((int)(least ^ 0x80000000));
    size_t n_chosen = 0;

    for (size_t i = 0; i < n && n_chosen < room; i += LANES) {
        const __m256i turned =
            images(n - i >= LANES ? _mm256_loadu_ps(scores + i) : load_rest(scores + i, n - i));
        const unsigned among = n - i >= LANES ? 0xff : (1u << (n - i)) - 1;
        unsigned chosen = lanes_that(_mm256_cmpgt_epi32(turned, bound)) & among;
        unsigned equal = lanes_that(_mm256_cmpeq_epi32(turned, bound)) & among;

        for (; equal != 0 && ties > 0; equal &= equal - 1, ties--)
            chosen |= equal & -equal;
        for (; chosen != 0; chosen &= chosen - 1)
            ret_indices[n_chosen++] = (uint32_t)i + (uint32_t)__builtin_ctz(chosen);
    }
    return n_chosen;
}

AVX2 static size_t select_largest(
    const float *scores, size_t n, size_t k, uint32_t *ret_indices, uint32_t *scratch)
{
    size_t ties = k;
    uint32_t least;

    if (k >= n) {
        for (size_t i = 0; i < n; i++)
            ret_indices[i] = (uint32_t)i;
        return n;
    }
    if (k == 0)
        return 0;
    count_all(scores, n, scratch);
    least = select_bin(scratch, SELECT_HIGH_BINS, &ties);
    count_agreeing(scores, n, least, SELECT_HIGH_SHIFT, SELECT_MIDDLE_SHIFT, SELECT_MIDDLE_BINS,
                   scratch);
    least = least * SELECT_MIDDLE_BINS + select_bin(scratch, SELECT_MIDDLE_BINS, &ties);
    count_agreeing(scores, n, least, SELECT_MIDDLE_SHIFT, 0, SELECT_LOW_BINS, scratch);
    least = least * SELECT_LOW_BINS + select_bin(scratch, SELECT_LOW_BINS, &ties);
    return collect(scores, n, least, ties, k, ret_indices);
}

const struct kv_select_kernels kv_select_avx2 = {
    .name = "avx2",
    .supported = tiers_has_avx2,
    .max = max_of,
    .exp_sum = exp_sum,
    .merge_softmax = merge_softmax,
    .merge_max = merge_max,
    .select = select_largest,
};

#endif
