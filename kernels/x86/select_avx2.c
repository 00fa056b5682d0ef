/* Eight scores at a time.  The last scores are loaded with a mask, and the lanes after them are
 * -inf, which adds 0 to a sum of weights and is never a maximum. */
#include "kernels/dispatch.h"
#include "kernels/select.h"
#include "kernels/select_passes.h"
#include "kernels/x86/avx2.h"

#include "kernels/x86/select_common.h"

#if defined(__x86_64__)

enum {
    FEW = 4, /* vectors that are compared before one branch */
};

/* Loads the first n < LANES scores, with -inf after them. */
INLINE __m256 load_tail(const float *scores, size_t n)
{
    const __m256i lanes = first_lanes(n);

    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()),
                            _mm256_maskload_ps(scores, lanes), _mm256_castsi256_ps(lanes));
}

/* Sets the scores of items without rows to -inf. */
INLINE __m256 mask_empty(__m256 scores, const uint32_t *counts)
{
    const __m256i rows = _mm256_loadu_si256((const __m256i *)(const void *)counts);

    return _mm256_blendv_ps(
        scores, _mm256_set1_ps(-__builtin_inff()),
        _mm256_castsi256_ps(_mm256_cmpeq_epi32(rows, _mm256_setzero_si256())));
}

static_assert((int)LANES <= (int)KV_TOPK_SPARE, "write_lanes() writes all lanes");

/* MAXPS returns its second operand if either is a NaN; the maximum so far is therefore the
 * second one, and a NaN does not replace it.  Four maxima hide the latency of the
 * instruction. */
AVX2 static float max_of(const float *scores, const uint32_t *counts, size_t n)
{
    __m256 a = _mm256_set1_ps(-__builtin_inff()), b = a, c = a, d = a;

    for (; counts != NULL && n >= LANES; n -= LANES, scores += LANES, counts += LANES)
        a = _mm256_max_ps(mask_empty(_mm256_loadu_ps(scores), counts), a);
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

INLINE uint64_t sum4(__m256i numbers)
{
    uint64_t lanes[4];

    _mm256_storeu_si256((__m256i *)(void *)lanes, numbers);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

/* Adds exps in units of the exp sum to 64-bit sums of even and of odd lanes. */
INLINE void add_units(__m256 exps, __m256i sums[2])
{
    const __m256i units =
        _mm256_cvtps_epi32(_mm256_mul_ps(exps, _mm256_set1_ps((float)(1 << KV_EXP_SUM_BITS))));

    sums[0] =
        _mm256_add_epi64(sums[0], _mm256_blend_epi32(units, _mm256_setzero_si256(), 0xaa));
    sums[1] = _mm256_add_epi64(sums[1], _mm256_srli_epi64(units, 32));
}

/* The same, times counts. */
INLINE void add_units_times(__m256 exps, __m256i by, __m256i sums[2])
{
    const __m256i units =
        _mm256_cvtps_epi32(_mm256_mul_ps(exps, _mm256_set1_ps((float)(1 << KV_EXP_SUM_BITS))));

    sums[0] = _mm256_add_epi64(sums[0], _mm256_mul_epu32(units, by));
    sums[1] = _mm256_add_epi64(
        sums[1], _mm256_mul_epu32(_mm256_srli_epi64(units, 32), _mm256_srli_epi64(by, 32)));
}

/* Computes exps of EXP_VECTORS vectors in place and adds them to sums; if all are 0, without
 * computing any. */
INLINE void
exps_few(float *scores, const uint32_t *counts, __m256 scale, __m256 shift, __m256i sums[2])
{
    const __m256 least = _mm256_set1_ps(KV_WEIGHT_LEAST);
    __m256 x[EXP_VECTORS], any = _mm256_setzero_ps();

    for (unsigned v = 0; v < EXP_VECTORS; v++) {
        x[v] = _mm256_fmadd_ps(_mm256_loadu_ps(scores + v * LANES), scale, shift);
        any = _mm256_or_ps(any, _mm256_cmp_ps(x[v], least, _CMP_GE_OQ));
    }
    if (_mm256_movemask_ps(any) == 0) {
        for (unsigned v = 0; v < EXP_VECTORS; v++)
            _mm256_storeu_ps(scores + v * LANES, _mm256_setzero_ps());
        return;
    }
    exps8_from(KV_WEIGHT_LEAST, x, EXP_VECTORS);
    for (unsigned v = 0; v < EXP_VECTORS; v++) {
        _mm256_storeu_ps(scores + v * LANES, x[v]);
        if (counts != NULL)
            add_units_times(
                x[v], _mm256_loadu_si256((const __m256i *)(const void *)(counts + v * LANES)),
                sums);
        else
            add_units(x[v], sums);
    }
}

INLINE uint64_t
exps_of(float *scores, const uint32_t *counts, size_t n, __m256 scale, __m256 shift)
{
    const size_t step = EXP_VECTORS * LANES;
    __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    size_t i = 0;

    for (; i + step <= n; i += step)
        exps_few(scores + i, counts != NULL ? counts + i : NULL, scale, shift, sums);
    for (; i < n; i += LANES) {
        const __m256i lanes = first_lanes(n - i);
        __m256 x = _mm256_fmadd_ps(load_tail(scores + i, n - i), scale, shift);

        exps8_from(KV_WEIGHT_LEAST, &x, 1);
        _mm256_maskstore_ps(scores + i, lanes, x);
        if (counts != NULL)
            add_units_times(x, _mm256_maskload_epi32((const int *)(counts + i), lanes), sums);
        else
            add_units(x, sums);
    }
    return sum4(_mm256_add_epi64(sums[0], sums[1]));
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
        return exps_of(scores, counts, n, by, shift);
    return exps_of(scores, NULL, n, by, shift);
}

INLINE __m256 merge(__m256 exps, __m256 factor, __m256 merged, int is_sum)
{
    return is_sum ? _mm256_fmadd_ps(exps, factor, merged)
                  : _mm256_max_ps(_mm256_mul_ps(exps, factor), merged);
}

/* n_queries and is_sum are constants at the calls. */
INLINE void merge_some(const float *exps,
                       size_t exps_stride,
                       const float *factors,
                       unsigned n_queries,
                       size_t n,
                       float *merged,
                       int is_sum)
{
    __m256 by[MERGED];
    size_t i = 0;

    for (unsigned q = 0; q < n_queries; q++)
        by[q] = _mm256_set1_ps(factors[q]);
    for (; i + LANES <= n; i += LANES) {
        __m256 sum = _mm256_loadu_ps(merged + i);

        for (unsigned q = 0; q < n_queries; q++)
            sum = merge(_mm256_loadu_ps(exps + q * exps_stride + i), by[q], sum, is_sum);
        _mm256_storeu_ps(merged + i, sum);
    }
    if (i < n) {
        const __m256i lanes = first_lanes(n - i);
        __m256 sum = _mm256_maskload_ps(merged + i, lanes);

        for (unsigned q = 0; q < n_queries; q++)
            sum = merge(_mm256_maskload_ps(exps + q * exps_stride + i, lanes), by[q], sum,
                        is_sum);
        _mm256_maskstore_ps(merged + i, lanes, sum);
    }
}

/* Sort keys with their highest bit inverted: AVX2 compares signed numbers only. */
INLINE __m256i signed_keys(__m256 scores)
{
    const __m256 plain = _mm256_add_ps(scores, _mm256_setzero_ps()); /* -0 to +0 */
    const __m256i bits = _mm256_castps_si256(plain);
    const __m256i turned =
        _mm256_xor_si256(bits, _mm256_srli_epi32(_mm256_srai_epi32(bits, 31), 1));
    const __m256 is_nan = _mm256_cmp_ps(plain, plain, _CMP_UNORD_Q);

    return _mm256_blendv_epi8(turned, _mm256_set1_epi32(INT32_MIN),
                              _mm256_castps_si256(is_nan));
}

INLINE __m256i sort_keys(__m256 scores)
{
    return _mm256_xor_si256(signed_keys(scores), _mm256_set1_epi32(INT32_MIN));
}

INLINE unsigned lanes_that(__m256i equal)
{
    return (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(equal));
}

/* Counts the sort keys of a vector that agree with the bound.  After the first pass most
 * vectors have few of them, so they are counted one by one. */
INLINE void count_vector(uint32_t *bins,
                         __m256 scores,
                         const uint32_t *counts,
                         unsigned lanes,
                         __m256i bound,
                         uint32_t pass)
{
    const __m256i all = sort_keys(scores);
    uint32_t at[LANES];

    if (pass > 0)
        lanes &= lanes_that(
            _mm256_cmpeq_epi32(_mm256_srli_epi32(all, (int)kv_select_above(pass)), bound));
    if (lanes == 0)
        return;
    _mm256_storeu_si256((__m256i *)(void *)at,
                        _mm256_and_si256(_mm256_srli_epi32(all, (int)kv_select_shift(pass)),
                                         _mm256_set1_epi32((int)kv_select_mask(pass))));
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

INLINE void count_pass(struct kv_topk *selector,
                       const float *scores,
                       const uint32_t *counts,
                       size_t n,
                       uint32_t pass,
                       int counted)
{
    const __m256i bound =
        _mm256_set1_epi32(pass > 0 ? (int)(selector->bound >> kv_select_above(pass)) : 0);
    __m256i zeros = _mm256_setzero_si256(); /* rows of vectors that are all 0 */
    size_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        const __m256 at = _mm256_loadu_ps(scores + i);

        if (_mm256_movemask_ps(_mm256_cmp_ps(at, _mm256_setzero_ps(), _CMP_NEQ_UQ)) == 0)
            zeros = _mm256_add_epi32(
                zeros, counted ? _mm256_loadu_si256((const __m256i *)(const void *)(counts + i))
                               : _mm256_set1_epi32(1));
        else
            count_vector(selector->bins, at, counted ? counts + i : NULL, 0xff, bound, pass);
    }
    count_zeros(selector, (uint32_t)sum4(_mm256_add_epi64(zeros, _mm256_srli_epi64(zeros, 32))),
                pass);
    if (i < n)
        count_vector(selector->bins, load_tail(scores + i, n - i), counted ? counts + i : NULL,
                     (1u << (n - i)) - 1, bound, pass);
}

/* Compares up to eight items from i on with the bound: sets of lanes above it, and equal to
 * it. */
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
        signed_keys(rest >= LANES ? _mm256_loadu_ps(scores + i) : load_tail(scores + i, rest));
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

/* Returns the permutation that moves the lanes of the set to the front, in order. */
INLINE __m256i first_of(unsigned set)
{
    return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)kv_lanes_of[set]));
}

INLINE unsigned lanes_of(__m256 mask)
{
    return (unsigned)_mm256_movemask_ps(mask);
}

/* Appends the lanes of the set to `to`, overwriting eight floats; returns the new n. */
INLINE size_t append(float *to, size_t n, __m256 scores, unsigned set)
{
    _mm256_storeu_ps(to + n, _mm256_permutevar8x32_ps(scores, first_of(set)));
    return n + (size_t)__builtin_popcount(set);
}

/* As between(), for bounds that are numbers.  Whether one vector has a lane in the band is
 * unpredictable, whether four have one much less so; all four are then appended, or none. */
INLINE size_t between_numbers(const float *scores,
                              size_t n,
                              __m256 least,
                              __m256 most,
                              float *ret_scores,
                              size_t *ret_n_above)
{
    size_t n_between = 0, n_above = 0;

    for (size_t i = 0; i + FEW * LANES <= n; i += FEW * LANES) {
        __m256 at[FEW];
        unsigned sets[FEW], any = 0;

        for (unsigned v = 0; v < FEW; v++) {
            at[v] = _mm256_loadu_ps(scores + i + v * LANES);
            const unsigned above = lanes_of(_mm256_cmp_ps(at[v], most, _CMP_GT_OQ));

            sets[v] = lanes_of(_mm256_cmp_ps(at[v], least, _CMP_GE_OQ)) ^ above;
            n_above += (size_t)__builtin_popcount(above);
            any |= sets[v];
        }
        if (any != 0)
            for (unsigned v = 0; v < FEW; v++)
                n_between = append(ret_scores, n_between, at[v], sets[v]);
    }
    *ret_n_above = n_above;
    return n_between;
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
    const uint32_t limit = most == UINT32_MAX ? 0xff800000 : most; /* +inf, the largest one */
    size_t n_between = 0, n_above = 0, i = 0;

    /* A vector store at n_between never passes the n floats of ret_scores: as many scores have
     * been read as could have been written, and the store has a vector's width. */
    if (is_number(least) && is_number(limit)) {
        n_between = between_numbers(scores, n, _mm256_set1_ps(number_of(least)),
                                    _mm256_set1_ps(number_of(limit)), ret_scores, &n_above);
        i = n - n % (FEW * LANES);
    }
    for (; i + LANES <= n; i += LANES) {
        const __m256 at = _mm256_loadu_ps(scores + i);
        const __m256i turned = signed_keys(at);
        const unsigned above = lanes_that(_mm256_cmpgt_epi32(turned, to));
        const unsigned in = (lanes_that(_mm256_cmpgt_epi32(from, turned)) | above) ^ 0xff;

        n_above += (size_t)__builtin_popcount(above);
        n_between = append(ret_scores, n_between, at, in);
    }
    for (; i < n; i++) {
        const uint32_t sort_key = kv_score_key(scores[i]);

        n_above += sort_key > most;
        if (sort_key >= least && sort_key <= most)
            ret_scores[n_between++] = scores[i];
    }
    *ret_n_above = n_above;
    return n_between;
}

/* Collects from FEW vectors of rows, from i on; the bound is a number. */
INLINE size_t collect_few(const float *scores,
                          size_t i,
                          __m256 bound,
                          uint64_t *ties,
                          uint32_t base,
                          uint32_t *ret_indices,
                          size_t n_selected)
{
    unsigned sets[FEW], any = 0, any_equal = 0;

    for (unsigned v = 0; v < FEW; v++) {
        const __m256 at = _mm256_loadu_ps(scores + i + v * LANES);

        sets[v] = lanes_of(_mm256_cmp_ps(at, bound, _CMP_GE_OQ));
        any |= sets[v];
        any_equal |= lanes_of(_mm256_cmp_ps(at, bound, _CMP_EQ_OQ));
    }
    if (any == 0)
        return n_selected;
    for (unsigned v = 0; any_equal != 0 && v < FEW; v++) {
        unsigned equal =
            lanes_of(_mm256_cmp_ps(_mm256_loadu_ps(scores + i + v * LANES), bound, _CMP_EQ_OQ));

        for (; equal != 0 && *ties > 0; equal &= equal - 1)
            --*ties;
        sets[v] ^= equal; /* no more ties are selected */
    }
    for (unsigned v = 0; v < FEW; v++)
        n_selected =
            write_lanes(ret_indices, n_selected, sets[v], base + (uint32_t)(i + v * LANES));
    return n_selected;
}

AVX2 static size_t collect(struct kv_topk *selector,
                           const float *scores,
                           const uint32_t *counts,
                           size_t n,
                           uint32_t base,
                           uint32_t *ret_indices)
{
    const __m256i bound = _mm256_set1_epi32((int)(selector->bound ^ 0x80000000));
    uint64_t ties = selector->ties;
    size_t n_selected = 0, i = 0;

    if (counts == NULL && is_number(selector->bound)) {
        const __m256 number = _mm256_set1_ps(number_of(selector->bound));

        for (; i + FEW * LANES <= n; i += FEW * LANES)
            n_selected = collect_few(scores, i, number, &ties, base, ret_indices, n_selected);
    }
    for (; i < n; i += LANES) {
        unsigned selected, equal;

        compare(scores, counts, n, i, bound, &selected, &equal);
        for (; equal != 0 && ties > 0; equal &= equal - 1, ties--)
            selected |= equal & -equal;
        n_selected = write_lanes(ret_indices, n_selected, selected, base + (uint32_t)i);
    }
    selector->ties = ties;
    return n_selected;
}

AVX2 static void items(const struct kv_topk *selector,
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

const struct kv_topk_kernels kv_topk_avx2 = {
    .name = "avx2",
    .supported = kv_has_avx2,
    .max = max_of,
    .exps = exps_in_place,
    .merge = merge_all,
    .count = count,
    .between = between,
    .collect = collect,
    .items = items,
};

#endif
