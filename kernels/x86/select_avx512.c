/* 16 scores at a time; the last ones with a mask. */
#include "kernels/dispatch.h"
#include "kernels/select.h"
#include "kernels/select_passes.h"
#include "kernels/x86/avx512.h"

#include "kernels/x86/select_common.h"

#if defined(__x86_64__)

enum {
    FEW = 4, /* vectors that are compared before one branch */
};

/* Returns which of the 16 items from i on exist and have rows. */
INLINE __mmask16 items_at(const uint32_t *counts, size_t n, size_t i)
{
    const __mmask16 there = first_lanes(n - i);

    if (counts == NULL)
        return there;
    return _mm512_mask_cmpneq_epi32_mask(there, _mm512_maskz_loadu_epi32(there, counts + i),
                                         _mm512_setzero_si512());
}

/* As in select_avx2.c: a NaN is the first operand, and MAXPS returns the second. */
AVX512 static float max_of(const float *scores, const uint32_t *counts, size_t n)
{
    const __m512 least = _mm512_set1_ps(-__builtin_inff());
    __m512 a = least, b = a, c = a, d = a;
    size_t i = 0;

    for (; counts == NULL && i + 4 * LANES <= n; i += 4 * LANES) {
        a = _mm512_max_ps(_mm512_loadu_ps(scores + i), a);
        b = _mm512_max_ps(_mm512_loadu_ps(scores + i + LANES), b);
        c = _mm512_max_ps(_mm512_loadu_ps(scores + i + 2 * LANES), c);
        d = _mm512_max_ps(_mm512_loadu_ps(scores + i + 3 * LANES), d);
    }
    for (; i < n; i += LANES)
        a = _mm512_max_ps(_mm512_mask_loadu_ps(least, items_at(counts, n, i), scores + i), a);
    return max16(_mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d))) + 0.0f;
}

/* Adds exps in units of the exp sum, times counts, to 64-bit sums of even and of odd lanes. */
INLINE void add_units(__m512 exps, const uint32_t *counts, __mmask16 lanes, __m512i sums[2])
{
    const __m512i units =
        _mm512_cvtps_epi32(_mm512_mul_ps(exps, _mm512_set1_ps((float)(1 << KV_EXP_SUM_BITS))));
    __m512i even = _mm512_maskz_mov_epi32(0x5555, units), odd = _mm512_srli_epi64(units, 32);

    if (counts != NULL) {
        const __m512i by = _mm512_maskz_loadu_epi32(lanes, counts);

        even = _mm512_mul_epu32(even, by);
        odd = _mm512_mul_epu32(odd, _mm512_srli_epi64(by, 32));
    }
    sums[0] = _mm512_add_epi64(sums[0], even);
    sums[1] = _mm512_add_epi64(sums[1], odd);
}

/* Computes the exps of FEW vectors in place and adds them to sums; if all are 0, without
 * computing any. */
INLINE void
exps_few(float *scores, const uint32_t *counts, __m512 scale, __m512 shift, __m512i sums[2])
{
    const __m512 least = _mm512_set1_ps(KV_WEIGHT_LEAST);
    __mmask16 has[FEW];
    unsigned any = 0;
    __m512 x[FEW];

    for (unsigned v = 0; v < FEW; v++) {
        x[v] = _mm512_fmadd_ps(_mm512_loadu_ps(scores + v * LANES), scale, shift);
        has[v] = _mm512_cmp_ps_mask(x[v], least, _CMP_GE_OQ);
        any |= has[v];
    }
    if (any == 0) {
        for (unsigned v = 0; v < FEW; v++)
            _mm512_storeu_ps(scores + v * LANES, _mm512_setzero_ps());
        return;
    }
    for (unsigned v = 0; v < FEW; v++) {
        x[v] = exp16_some(has[v], x[v]);
        _mm512_storeu_ps(scores + v * LANES, x[v]);
        add_units(x[v], counts != NULL ? counts + v * LANES : NULL, 0xffff, sums);
    }
}

INLINE uint64_t
exps_of(float *scores, const uint32_t *counts, size_t n, __m512 scale, __m512 shift)
{
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    size_t i = 0;

    for (; i + FEW * LANES <= n; i += FEW * LANES)
        exps_few(scores + i, counts != NULL ? counts + i : NULL, scale, shift, sums);
    for (; i < n; i += LANES) {
        const __mmask16 lanes = first_lanes(n - i);
        const __m512 x =
            _mm512_fmadd_ps(_mm512_maskz_loadu_ps(lanes, scores + i), scale, shift);
        const __m512 exps = exp16_some(
            _mm512_mask_cmp_ps_mask(lanes, x, _mm512_set1_ps(KV_WEIGHT_LEAST), _CMP_GE_OQ), x);

        _mm512_mask_storeu_ps(scores + i, lanes, exps);
        add_units(exps, counts != NULL ? counts + i : NULL, lanes, sums);
    }
    return (uint64_t)_mm512_reduce_add_epi64(_mm512_add_epi64(sums[0], sums[1]));
}

AVX512 static uint64_t
exps_in_place(float *scores, const uint32_t *counts, size_t n, float scale, float max)
{
    const __m512 by = _mm512_set1_ps(scale), shift = _mm512_set1_ps(-max * scale);

    if (max == -__builtin_inff()) {
        memset(scores, 0, n * sizeof(*scores));
        return 0;
    }
    if (counts != NULL)
        return exps_of(scores, counts, n, by, shift);
    return exps_of(scores, NULL, n, by, shift);
}

INLINE __m512 merge(__m512 exps, __m512 factor, __m512 merged, int is_sum)
{
    return is_sum ? _mm512_fmadd_ps(exps, factor, merged)
                  : _mm512_max_ps(_mm512_mul_ps(exps, factor), merged);
}

/* Merges up to MERGED heads; n_queries and is_sum are constants at the calls. */
INLINE void merge_some(const float *exps,
                       size_t exps_stride,
                       const float *factors,
                       unsigned n_queries,
                       size_t n,
                       float *merged,
                       int is_sum)
{
    __m512 by[MERGED];
    size_t i = 0;

    for (unsigned q = 0; q < n_queries; q++)
        by[q] = _mm512_set1_ps(factors[q]);
    for (; i + LANES <= n; i += LANES) {
        __m512 sum = _mm512_loadu_ps(merged + i);

        for (unsigned q = 0; q < n_queries; q++)
            sum = merge(_mm512_loadu_ps(exps + q * exps_stride + i), by[q], sum, is_sum);
        _mm512_storeu_ps(merged + i, sum);
    }
    if (i < n) {
        const __mmask16 lanes = first_lanes(n - i);
        __m512 sum = _mm512_maskz_loadu_ps(lanes, merged + i);

        for (unsigned q = 0; q < n_queries; q++)
            sum = merge(_mm512_maskz_loadu_ps(lanes, exps + q * exps_stride + i), by[q], sum,
                        is_sum);
        _mm512_mask_storeu_ps(merged + i, lanes, sum);
    }
}

INLINE __m512i sort_keys(__m512 scores)
{
    const __m512 plain = _mm512_add_ps(scores, _mm512_setzero_ps()); /* -0 to +0 */
    const __m512i bits = _mm512_castps_si512(plain);
    const __m512i turned = _mm512_xor_si512(
        bits, _mm512_or_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(INT32_MIN)));

    return _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(plain, plain, _CMP_ORD_Q), turned);
}

INLINE __m512i shifted(__m512i keys, unsigned by)
{
    return _mm512_srlv_epi32(keys, _mm512_set1_epi32((int)by));
}

/* Counts 16 items.  Places are read from memory, two at once: left to itself, the compiler takes
 * all out of the vector first, has too few registers for them, and needs three times as long. */
INLINE void count_all(uint32_t *bins, __m512i places, const uint32_t *counts)
{
    uint64_t at[LANES / 2];

    _mm512_storeu_si512(at, places);
    __asm__("" : "+m"(at));
    for (unsigned i = 0; i < LANES / 2; i++) {
        const uint64_t pair = at[i];

        bins[(uint32_t)pair] += counts != NULL ? counts[2 * i] : 1;
        bins[pair >> 32] += counts != NULL ? counts[2 * i + 1] : 1;
    }
}

/* Counts the sort keys of a vector that agree with the bound.  After the first pass most
 * vectors have few of them, so they are counted one by one. */
INLINE void count_vector(uint32_t *bins,
                         __m512 scores,
                         const uint32_t *counts,
                         __mmask16 lanes,
                         __m512i bound,
                         uint32_t pass)
{
    const __m512i all = sort_keys(scores);
    const __m512i places = _mm512_and_si512(shifted(all, kv_select_shift(pass)),
                                            _mm512_set1_epi32((int)kv_select_mask(pass)));
    uint32_t at[LANES];

    if (pass > 0)
        lanes = _mm512_mask_cmpeq_epi32_mask(lanes, shifted(all, kv_select_above(pass)), bound);
    if (lanes == 0)
        return;
    if (lanes == 0xffff) {
        count_all(bins, places, counts);
        return;
    }
    _mm512_storeu_si512(at, places);
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(rest);

        bins[at[lane]] += counts != NULL ? counts[lane] : 1;
    }
}

/* `pass`, and whether there are counts, are constants at the calls. */
INLINE void count_pass(struct kv_topk *selector,
                       const float *scores,
                       const uint32_t *counts,
                       size_t n,
                       uint32_t pass,
                       int counted)
{
    const __m512i bound =
        _mm512_set1_epi32(pass > 0 ? (int)(selector->bound >> kv_select_above(pass)) : 0);
    __m512i zeros = _mm512_setzero_si512(); /* rows of vectors that are all 0 */
    size_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        const __m512 at = _mm512_loadu_ps(scores + i);

        if (_mm512_cmp_ps_mask(at, _mm512_setzero_ps(), _CMP_NEQ_UQ) == 0)
            zeros = _mm512_add_epi32(zeros, counted ? _mm512_loadu_si512(counts + i)
                                                    : _mm512_set1_epi32(1));
        else
            count_vector(selector->bins, at, counted ? counts + i : NULL, 0xffff, bound, pass);
    }
    zeros = _mm512_add_epi64(zeros, _mm512_srli_epi64(zeros, 32));
    count_zeros(selector, (uint32_t)_mm512_reduce_add_epi64(zeros), pass);
    if (i < n) {
        const __mmask16 lanes = first_lanes(n - i);

        count_vector(selector->bins, _mm512_maskz_loadu_ps(lanes, scores + i),
                     counted ? counts + i : NULL, lanes, bound, pass);
    }
}

/* Stores the lanes of the set and whatever after them, 16 floats; returns the new n.  A masked
 * store, or compression to memory, would write less, and takes many times as long. */
INLINE size_t append(float *to, size_t n, __m512 scores, __mmask16 set)
{
    _mm512_storeu_ps(to + n, _mm512_maskz_compress_ps(set, scores));
    return n + (size_t)__builtin_popcount(set);
}

/* The same for base + lane, ascending. */
INLINE size_t write_lanes(uint32_t *to, size_t n, __mmask16 set, uint32_t base)
{
    const __m512i lanes =
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);

    _mm512_storeu_si512(to + n, _mm512_add_epi32(_mm512_maskz_compress_epi32(set, lanes),
                                                 _mm512_set1_epi32((int)base)));
    return n + (size_t)__builtin_popcount(set);
}

static_assert((int)LANES <= (int)KV_TOPK_SPARE, "write_lanes() writes all lanes");

INLINE __mmask16 set_of(uint64_t sets, unsigned vector)
{
    return (__mmask16)(sets >> vector * LANES);
}

/* As between(), for bounds that are numbers, and as in select_avx2.c: one branch for FEW
 * vectors. */
INLINE size_t between_numbers(const float *scores,
                              size_t n,
                              __m512 least,
                              __m512 most,
                              float *ret_scores,
                              size_t *ret_n_above)
{
    size_t n_between = 0, n_above = 0;

    for (size_t i = 0; i + FEW * LANES <= n; i += FEW * LANES) {
        uint64_t above = 0, reach = 0;
        __m512 at[FEW];

        for (unsigned v = 0; v < FEW; v++) {
            at[v] = _mm512_loadu_ps(scores + i + v * LANES);
            above |= (uint64_t)_mm512_cmp_ps_mask(at[v], most, _CMP_GT_OQ) << v * LANES;
            reach |= (uint64_t)_mm512_cmp_ps_mask(at[v], least, _CMP_GE_OQ) << v * LANES;
        }
        n_above += (size_t)__builtin_popcountll(above);
        if (reach != above)
            for (unsigned v = 0; v < FEW; v++)
                n_between = append(ret_scores, n_between, at[v], set_of(reach ^ above, v));
    }
    *ret_n_above = n_above;
    return n_between;
}

AVX512 static size_t between(const float *scores,
                             size_t n,
                             uint32_t least,
                             uint32_t most,
                             float *ret_scores,
                             size_t *ret_n_above)
{
    const __m512i from = _mm512_set1_epi32((int)least), to = _mm512_set1_epi32((int)most);
    const uint32_t limit = most == UINT32_MAX ? 0xff800000 : most; /* +inf, the largest one */
    size_t n_between = 0, n_above = 0, i = 0;

    /* No store passes the n floats of ret_scores: as many scores have been read as could have
     * been written, and the store has a vector's width; the last one has a mask. */
    if (is_number(least) && is_number(limit)) {
        n_between = between_numbers(scores, n, _mm512_set1_ps(number_of(least)),
                                    _mm512_set1_ps(number_of(limit)), ret_scores, &n_above);
        i = n - n % (FEW * LANES);
    }
    for (; i < n; i += LANES) {
        const __mmask16 there = first_lanes(n - i);
        const __m512 at = _mm512_maskz_loadu_ps(there, scores + i);
        const __m512i sort_key = sort_keys(at);
        const __mmask16 reach = _mm512_mask_cmpge_epu32_mask(there, sort_key, from);
        const __mmask16 in = _mm512_mask_cmple_epu32_mask(reach, sort_key, to);

        n_above +=
            (size_t)__builtin_popcount(_mm512_mask_cmpgt_epu32_mask(there, sort_key, to));
        if (in == 0)
            continue;
        if (i + LANES <= n) {
            n_between = append(ret_scores, n_between, at, in);
        } else {
            const size_t n_in = (size_t)__builtin_popcount(in);

            _mm512_mask_storeu_ps(ret_scores + n_between, first_lanes(n_in),
                                  _mm512_maskz_compress_ps(in, at));
            n_between += n_in;
        }
    }
    *ret_n_above = n_above;
    return n_between;
}

/* Compares up to 16 items from i on with the bound: sets of lanes above it, and equal to it. */
INLINE void compare(const float *scores,
                    const uint32_t *counts,
                    size_t n,
                    size_t i,
                    __m512i bound,
                    __mmask16 *ret_above,
                    __mmask16 *ret_equal)
{
    const __mmask16 there = items_at(counts, n, i);
    const __m512i sort_key = sort_keys(_mm512_maskz_loadu_ps(there, scores + i));

    *ret_above = _mm512_mask_cmpgt_epu32_mask(there, sort_key, bound);
    *ret_equal = _mm512_mask_cmpeq_epi32_mask(there, sort_key, bound);
}

/* Removes from the set `selected` the ties in `equal` that are not needed any more. */
INLINE uint64_t without_excess(uint64_t selected, uint64_t equal, uint64_t *ties)
{
    for (; equal != 0 && *ties > 0; equal &= equal - 1)
        --*ties;
    return selected ^ equal;
}

/* Collects from FEW vectors of rows, from i on; the bound is a number. */
INLINE size_t collect_few(const float *scores,
                          size_t i,
                          __m512 bound,
                          uint64_t *ties,
                          uint32_t base,
                          uint32_t *ret_indices,
                          size_t n_selected)
{
    uint64_t sets = 0, above = 0;

    for (unsigned v = 0; v < FEW; v++) {
        const __m512 at = _mm512_loadu_ps(scores + i + v * LANES);

        sets |= (uint64_t)_mm512_cmp_ps_mask(at, bound, _CMP_GE_OQ) << v * LANES;
        above |= (uint64_t)_mm512_cmp_ps_mask(at, bound, _CMP_GT_OQ) << v * LANES;
    }
    if (sets == 0)
        return n_selected;
    if (sets != above)
        sets = without_excess(sets, sets ^ above, ties);
    for (unsigned v = 0; v < FEW; v++)
        n_selected = write_lanes(ret_indices, n_selected, set_of(sets, v),
                                 base + (uint32_t)(i + v * LANES));
    return n_selected;
}

AVX512 static size_t collect(struct kv_topk *selector,
                             const float *scores,
                             const uint32_t *counts,
                             size_t n,
                             uint32_t base,
                             uint32_t *ret_indices)
{
    const __m512i bound = _mm512_set1_epi32((int)selector->bound);
    uint64_t ties = selector->ties;
    size_t n_selected = 0, i = 0;

    if (counts == NULL && is_number(selector->bound)) {
        const __m512 number = _mm512_set1_ps(number_of(selector->bound));

        for (; i + FEW * LANES <= n; i += FEW * LANES)
            n_selected = collect_few(scores, i, number, &ties, base, ret_indices, n_selected);
    }
    for (; i < n; i += LANES) {
        __mmask16 above, equal;
        uint64_t set;

        compare(scores, counts, n, i, bound, &above, &equal);
        set = without_excess((uint64_t)(above | equal), equal, &ties);
        if (set != 0)
            n_selected =
                write_lanes(ret_indices, n_selected, (__mmask16)set, base + (uint32_t)i);
    }
    selector->ties = ties;
    return n_selected;
}

/* As items(), for FEW vectors of items, from i on; the bound is a number. */
INLINE void items_few(const float *scores,
                      const uint32_t *counts,
                      size_t i,
                      __m512 bound,
                      uint32_t *ret_above,
                      size_t *n_above,
                      uint32_t *ret_equal,
                      size_t *n_equal)
{
    uint64_t sets = 0, above = 0;

    for (unsigned v = 0; v < FEW; v++) {
        const size_t from = i + v * LANES;
        const __mmask16 there = items_at(counts, from + LANES, from);
        const __m512 at = _mm512_loadu_ps(scores + from);

        sets |= (uint64_t)_mm512_mask_cmp_ps_mask(there, at, bound, _CMP_GE_OQ) << v * LANES;
        above |= (uint64_t)_mm512_mask_cmp_ps_mask(there, at, bound, _CMP_GT_OQ) << v * LANES;
    }
    for (unsigned v = 0; above != 0 && v < FEW; v++)
        *n_above =
            write_lanes(ret_above, *n_above, set_of(above, v), (uint32_t)(i + v * LANES));
    for (unsigned v = 0; sets != above && v < FEW; v++)
        *n_equal = write_lanes(ret_equal, *n_equal, set_of(sets ^ above, v),
                               (uint32_t)(i + v * LANES));
}

AVX512 static void items(const struct kv_topk *selector,
                         const float *scores,
                         const uint32_t *counts,
                         size_t n,
                         uint32_t *ret_above,
                         size_t *ret_n_above,
                         uint32_t *ret_equal,
                         size_t *ret_n_equal)
{
    const __m512i bound = _mm512_set1_epi32((int)selector->bound);
    size_t n_above = 0, n_equal = 0, i = 0;

    if (is_number(selector->bound)) {
        const __m512 number = _mm512_set1_ps(number_of(selector->bound));

        for (; i + FEW * LANES <= n; i += FEW * LANES)
            items_few(scores, counts, i, number, ret_above, &n_above, ret_equal, &n_equal);
    }
    for (; i < n; i += LANES) {
        __mmask16 above, equal;

        compare(scores, counts, n, i, bound, &above, &equal);
        if (above != 0)
            n_above = write_lanes(ret_above, n_above, above, (uint32_t)i);
        if (equal != 0)
            n_equal = write_lanes(ret_equal, n_equal, equal, (uint32_t)i);
    }
    *ret_n_above = n_above;
    *ret_n_equal = n_equal;
}

const struct kv_topk_kernels kv_topk_avx512 = {
    .name = "avx512",
    .supported = kv_has_avx512,
    .max = max_of,
    .exps = exps_in_place,
    .merge = merge_all,
    .count = count,
    .between = between,
    .collect = collect,
    .items = items,
};

#endif
