/* Four copies by four queries at a time.  A vector has 16 bytes each of two copies, so that the
 * lanes of a sum need to be added only within its two blocks.  Codes, which are unsigned, times
 * rounded queries, which are signed, are added in pairs to 16 bits, and widened after four
 * vectors. */
#include "kernels/dispatch.h"
#include "kernels/x86/avx2.h"

enum {
    PARTS = 2,  /* vectors of two rows */
    HALVES = 2, /* one after the other */
    ROWS = 2 * PARTS * HALVES,
    CHUNK_BYTES = 64, /* of a row's codes; a sum of their products fits 16 bits */
};

#include "kernels/x86/key_copies_common.h"

#if defined(__x86_64__)

#include <float.h>

INLINE __m128i load_bytes(const void *at)
{
    return _mm_loadu_si128((const __m128i *)at);
}

static_assert(CHUNK_BYTES / BYTES * 4 * 15 * 127 <= INT16_MAX, "four products in a step");

/* Adds the products of up to CHUNK_BYTES bytes of codes.  Part 0 has rows 0 and 2, part 1 has 1
 * and 3. */
INLINE void add_chunk(size_t bytes,
                      const struct place *places,
                      size_t h,
                      size_t from,
                      const int8_t *q8,
                      unsigned n_queries,
                      __m256i sums[PARTS][BLOCK])
{
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i halves[PARTS][BLOCK];

    for (unsigned part = 0; part < PARTS; part++)
        for (unsigned query = 0; query < n_queries; query++)
            halves[part][query] = _mm256_setzero_si256();
            /* Unrolled, the compiler would do all multiplications first, and spill the products. */
#pragma GCC unroll 1
    for (size_t i = from; i < from + bytes; i += BYTES) {
        __m256i low[PARTS], high[PARTS];

        for (unsigned part = 0; part < PARTS; part++) {
            const __m256i both = _mm256_inserti128_si256(
                _mm256_castsi128_si256(load_bytes(places[part].codes + i)),
                load_bytes(places[part + 2].codes + i), 1);

            low[part] = _mm256_and_si256(both, mask);
            high[part] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
        }
        for (unsigned query = 0; query < n_queries; query++) {
            const int8_t *q = q8 + query * 2 * h + i;
            const __m256i first = _mm256_broadcastsi128_si256(load_bytes(q));
            const __m256i second = _mm256_broadcastsi128_si256(load_bytes(q + h));

            for (unsigned part = 0; part < PARTS; part++) {
                __m256i *sum = &halves[part][query];

                *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(low[part], first));
                *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(high[part], second));
            }
        }
    }
    for (unsigned part = 0; part < PARTS; part++)
        for (unsigned query = 0; query < n_queries; query++)
            sums[part][query] = _mm256_add_epi32(sums[part][query],
                                                 _mm256_madd_epi16(halves[part][query], ones));
}

/* Adds the lanes of a block of four: lane j of the block is its sum in v[j]. */
INLINE __m256i fold(const __m256i v[BLOCK])
{
    const __m256i ab =
        _mm256_add_epi32(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
    const __m256i cd =
        _mm256_add_epi32(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));

    return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}

INLINE __m256 both_halves(const float *four)
{
    return _mm256_broadcast_ps((const __m128 *)(const void *)four);
}

INLINE void score_tile(size_t h,
                       const struct place *places,
                       const struct query_block *block,
                       unsigned n_queries,
                       float *ret_scores,
                       size_t scores_stride)
{
    const __m256i biases = _mm256_broadcastsi128_si256(load_bytes(block->biases));
    const __m256 of_rows = _mm256_cvtph_ps(load_scales(places));

    for (unsigned half = 0; half < HALVES; half++) {
        const struct place *some = places + half * ROWS / HALVES;
        float *to = ret_scores + half * ROWS / HALVES;
        __m256i sums[PARTS][BLOCK];
        __m256 scores[PARTS];
        size_t i = 0;

        for (unsigned part = 0; part < PARTS; part++)
            for (unsigned query = 0; query < BLOCK; query++)
                sums[part][query] = _mm256_setzero_si256();
        for (; i + CHUNK_BYTES <= h; i += CHUNK_BYTES)
            add_chunk(CHUNK_BYTES, some, h, i, block->q8, n_queries, sums);
        if (i < h)
            add_chunk(h - i, some, h, i, block->q8, n_queries, sums);
        for (unsigned part = 0; part < PARTS; part++) {
            const __m256i rows =
                _mm256_add_epi32(_mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2),
                                 _mm256_set1_epi32((int)(half * ROWS / HALVES + part)));
            const __m256i all = fold(sums[part]);

            scores[part] = _mm256_fmadd_ps(
                _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_add_epi32(all, all), biases)),
                _mm256_mul_ps(_mm256_permutevar8x32_ps(of_rows, rows),
                              both_halves(block->scales)),
                both_halves(block->dots));
        }
        /* A block of four lanes becomes a query's rows instead of a row's queries. */
        for (unsigned query = 0; query < n_queries; query += 2) {
            const __m256 two = query == 0 ? _mm256_unpacklo_ps(scores[0], scores[1])
                                          : _mm256_unpackhi_ps(scores[0], scores[1]);
            const __m128 a = _mm256_castps256_ps128(two), b = _mm256_extractf128_ps(two, 1);

            _mm_storeu_ps(to + query * scores_stride, _mm_movelh_ps(a, b));
            if (query + 1 < n_queries)
                _mm_storeu_ps(to + (query + 1) * scores_stride, _mm_movehl_ps(b, a));
        }
    }
}

/* Loads 8 of n numbers, from i on, with 0 after the last. */
INLINE __m256 load_step(const float *at, size_t i, size_t n)
{
    if (i + LANES <= n)
        return _mm256_loadu_ps(at + i);
    return i < n ? _mm256_maskload_ps(at + i, first_lanes(n - i)) : _mm256_setzero_ps();
}

INLINE __m256 without_nan(__m256 x)
{
    return _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q));
}

INLINE __m256 absolute(__m256 x)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}

INLINE __m256 differences(const float *key, const float *mean, size_t i, size_t d)
{
    return without_nan(_mm256_sub_ps(load_step(key, i, d), load_step(mean, i, d)));
}

INLINE __m256i codes_of(__m256 y, __m256 factor)
{
    const __m256 code = _mm256_fmadd_ps(y, factor, _mm256_set1_ps(7.5f));

    return _mm256_cvtps_epi32(
        _mm256_min_ps(_mm256_max_ps(code, _mm256_setzero_ps()), _mm256_set1_ps(15)));
}

/* The lowest bytes of 16 numbers, which are all there is of them but the sign. */
INLINE __m128i bytes_of(__m256i a, __m256i b)
{
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);

    return _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

AVX2 static void
put(size_t d, const float *mean, const float *keys, size_t begin, size_t n, void *copies)
{
    const size_t h = kv_key_copy_bytes(d);

    for (size_t row = 0; row < n; row++) {
        const float *key = keys + row * d;
        uint8_t *codes = (uint8_t *)copies + kv_key_copy_codes_at(h, begin + row);
        uint8_t *to_scale = (uint8_t *)copies + kv_key_copy_scale_at(h, begin + row);
        __m256 most = _mm256_setzero_ps(), factor;
        float scale;

        for (size_t i = 0; i < d; i += LANES)
            most = _mm256_max_ps(most, absolute(differences(key, mean, i, d)));
        scale = max8(most) / 15;
        scale = round_scale(scale, to_scale);
        factor = _mm256_set1_ps(scale > 0 ? 0.5f / scale : 0);
        for (size_t i = 0; i < h; i += STEP) {
            __m128i of[2];

            for (unsigned part = 0; part < 2; part++) {
                const size_t at = part * h + i;

                of[part] = bytes_of(codes_of(differences(key, mean, at, d), factor),
                                    codes_of(differences(key, mean, at + LANES, d), factor));
            }
            _mm_storeu_si128((__m128i *)(void *)(codes + i),
                             _mm_or_si128(of[0], _mm_slli_epi16(of[1], 4)));
        }
    }
}

INLINE __m256 bounded(__m256 x)
{
    return _mm256_min_ps(_mm256_max_ps(without_nan(x), _mm256_set1_ps(-FLT_MAX)),
                         _mm256_set1_ps(FLT_MAX));
}

INLINE __m256i round8(const float *query, size_t i, size_t d, float scale)
{
    const __m256 x = _mm256_div_ps(bounded(load_step(query, i, d)), _mm256_set1_ps(scale));

    return _mm256_cvtps_epi32(
        _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-127)), _mm256_set1_ps(127)));
}

AVX2 static void
round_queries(size_t d, const float *queries, size_t n_queries, void *ret_rounded)
{
    const struct kv_rounded_queries to = kv_rounded_queries_at(d, ret_rounded, n_queries);
    const size_t padded = 2 * kv_key_copy_bytes(d);

    for (size_t query = 0; query < n_queries; query++) {
        const float *q = queries + query * d;
        int8_t *q8 = to.q8 + query * padded;
        __m256 most = _mm256_setzero_ps();
        __m256i sums = _mm256_setzero_si256();
        int32_t lanes[LANES], sum = 0;
        float scale;

        for (size_t i = 0; i < d; i += LANES)
            most = _mm256_max_ps(most, absolute(bounded(load_step(q, i, d))));
        scale = max8(most) / 127;
        memset(q8, 0, padded);
        for (size_t i = 0; i < d && scale > 0; i += STEP) {
            const __m256i low = round8(q, i, d, scale), high = round8(q, i + LANES, d, scale);

            _mm_storeu_si128((__m128i *)(void *)(q8 + i), bytes_of(low, high));
            sums = _mm256_add_epi32(sums, _mm256_add_epi32(low, high));
        }
        _mm256_storeu_si256((__m256i *)(void *)lanes, sums);
        for (unsigned i = 0; i < LANES; i++)
            sum += lanes[i];
        to.scales[query] = scale;
        to.biases[query] = -15 * sum;
    }
}

const struct kv_key_copies_kernels kv_key_copies_avx2 = {
    .name = "avx2",
    .supported = kv_has_avx2,
    .put = put,
    .round = round_queries,
    .score_list = score_list,
};

#endif
