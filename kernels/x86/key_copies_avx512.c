/* Eight copies by four queries at a time.  A vector has 16 bytes each of four copies, so that
 * the lanes of a sum need to be added only within its four blocks.  VNNI multiplies codes, which
 * are unsigned, by rounded queries, which are signed, and adds four products to 32 bits.
 *
 * With products of 16 bits instead of VNNI, this would be as fast as key_copies_avx2.c, which
 * serves where VNNI is missing (Zen 4). */
#include "kernels/dispatch.h"
#include "kernels/x86/avx512.h"

/* All of this file requires VNNI as well. */
#if defined(__x86_64__) && !defined(KV_EMULATE_AVX512)
#undef AVX512
#undef INLINE
#define AVX512                                                                           \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi," \
                          "avx512vbmi2,avx512vnni")))
#define INLINE AVX512 __attribute__((always_inline)) static inline
#endif

enum {
    PART = 4,  /* rows of a vector */
    PARTS = 2, /* vectors at a time */
    ROWS = PARTS * PART,
    STEPS = 4, /* of BYTES bytes: a line */
};

#include "kernels/x86/key_copies_common.h"

#if defined(__x86_64__)

#include <float.h>

INLINE __m128i load_bytes(const void *at)
{
    return _mm_loadu_si128((const __m128i *)at);
}

/* Adds the lanes of a block of four: lane j of the block is its sum in v[j]. */
INLINE __m512i fold(const __m512i v[BLOCK])
{
    const __m512i ab =
        _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const __m512i cd =
        _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));

    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

/* Loads BYTES bytes of each of four rows, from i on. */
INLINE __m512i load_bytes_of(const struct place *of, size_t i)
{
    __m512i bytes = _mm512_castsi128_si512(load_bytes(of[0].codes + i));

    bytes = _mm512_inserti32x4(bytes, load_bytes(of[1].codes + i), 1);
    bytes = _mm512_inserti32x4(bytes, load_bytes(of[2].codes + i), 2);
    return _mm512_inserti32x4(bytes, load_bytes(of[3].codes + i), 3);
}

/* Loads STEPS times as many, by half as many shuffles. */
INLINE void load_lines(const struct place *of, size_t i, __m512i ret_bytes[STEPS])
{
    const __m512i a = _mm512_loadu_si512(of[0].codes + i);
    const __m512i b = _mm512_loadu_si512(of[1].codes + i);
    const __m512i c = _mm512_loadu_si512(of[2].codes + i);
    const __m512i d = _mm512_loadu_si512(of[3].codes + i);
    const __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), ab2 = _mm512_shuffle_i32x4(a, b, 0xee);
    const __m512i cd = _mm512_shuffle_i32x4(c, d, 0x44), cd2 = _mm512_shuffle_i32x4(c, d, 0xee);

    ret_bytes[0] = _mm512_shuffle_i32x4(ab, cd, 0x88);
    ret_bytes[1] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
    ret_bytes[2] = _mm512_shuffle_i32x4(ab2, cd2, 0x88);
    ret_bytes[3] = _mm512_shuffle_i32x4(ab2, cd2, 0xdd);
}

/* Adds the products of bytes [i, i + n_steps * BYTES) of the rows' codes.  n_steps, 1 or STEPS,
 * is a constant at the calls, and so is n_queries. */
INLINE void add_products(size_t h,
                         const struct place *places,
                         size_t i,
                         unsigned n_steps,
                         const int8_t *q8,
                         unsigned n_queries,
                         __m512i sums[PARTS][BLOCK])
{
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i low[PARTS][STEPS], high[PARTS][STEPS];

    for (unsigned part = 0; part < PARTS; part++) {
        __m512i bytes[STEPS];

        if (n_steps == STEPS)
            load_lines(places + part * PART, i, bytes);
        else
            bytes[0] = load_bytes_of(places + part * PART, i);
        for (unsigned step = 0; step < n_steps; step++) {
            low[part][step] = _mm512_and_si512(bytes[step], mask);
            high[part][step] = _mm512_and_si512(_mm512_srli_epi16(bytes[step], 4), mask);
        }
    }
    for (unsigned step = 0; step < n_steps; step++)
        for (unsigned query = 0; query < n_queries; query++) {
            const int8_t *at = q8 + query * 2 * h + i + step * BYTES;
            const __m512i first = _mm512_broadcast_i32x4(load_bytes(at));
            const __m512i second = _mm512_broadcast_i32x4(load_bytes(at + h));

            for (unsigned part = 0; part < PARTS; part++) {
                __m512i *sum = &sums[part][query];

                *sum = _mm512_dpbusd_epi32(*sum, low[part][step], first);
                *sum = _mm512_dpbusd_epi32(*sum, high[part][step], second);
            }
        }
}

/* Makes scores of the sums of PARTS vectors. */
INLINE void store_scores(const struct place *places,
                         const struct query_block *block,
                         unsigned n_queries,
                         const __m512i sums[PARTS][BLOCK],
                         float *ret_scores,
                         size_t scores_stride)
{
    const __m512i biases = _mm512_broadcast_i32x4(load_bytes(block->biases));
    const __m512 factors =
        _mm512_castsi512_ps(_mm512_broadcast_i32x4(load_bytes(block->scales)));
    const __m512 dots = _mm512_castsi512_ps(_mm512_broadcast_i32x4(load_bytes(block->dots)));
    const __m512 of_rows = _mm512_cvtph_ps(_mm256_castsi128_si256(load_scales(places)));
    __m512 scores[PARTS];

    for (unsigned part = 0; part < PARTS; part++) {
        const __m512i rows =
            _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                             _mm512_set1_epi32((int)part * PART));
        const __m512i all = fold(sums[part]);

        scores[part] = _mm512_fmadd_ps(
            _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_add_epi32(all, all), biases)),
            _mm512_mul_ps(_mm512_permutexvar_ps(rows, of_rows), factors), dots);
    }
    /* Lane BLOCK * row + query of both parts becomes lane 8 * query + row of two. */
    for (unsigned query = 0; query < n_queries; query += 2) {
        const __m512i turn = _mm512_add_epi32(
            _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29),
            _mm512_set1_epi32((int)query));
        const __m512 both = _mm512_permutex2var_ps(scores[0], turn, scores[1]);

        _mm256_storeu_ps(ret_scores + query * scores_stride, _mm512_castps512_ps256(both));
        if (query + 1 < n_queries)
            _mm256_storeu_ps(ret_scores + (query + 1) * scores_stride,
                             _mm512_extractf32x8_ps(both, 1));
    }
}

INLINE void score_tile(size_t h,
                       const struct place *places,
                       const struct query_block *block,
                       unsigned n_queries,
                       float *ret_scores,
                       size_t scores_stride)
{
    __m512i sums[PARTS][BLOCK];
    size_t i = 0;

    for (unsigned part = 0; part < PARTS; part++)
        for (unsigned query = 0; query < BLOCK; query++)
            sums[part][query] = _mm512_setzero_si512();
    for (; i + STEPS * BYTES <= h; i += STEPS * BYTES)
        add_products(h, places, i, STEPS, block->q8, n_queries, sums);
    for (; i < h; i += BYTES)
        add_products(h, places, i, 1, block->q8, n_queries, sums);
    store_scores(places, block, n_queries, (const __m512i(*)[BLOCK])sums, ret_scores,
                 scores_stride);
}

/* Returns the differences of 16 of d elements to the mean, 0 where there are none. */
INLINE __m512 differences(const float *key, const float *mean, size_t i, size_t d)
{
    const __mmask16 some = i < d ? first_lanes(d - i) : 0;
    const __m512 y = _mm512_sub_ps(_mm512_maskz_loadu_ps(some, key + i),
                                   _mm512_maskz_loadu_ps(some, mean + i));

    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y, y, _CMP_ORD_Q), y);
}

INLINE __m512 absolute(__m512 x)
{
    return _mm512_and_ps(x, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff)));
}

INLINE __m512i codes_of(__m512 y, __m512 factor)
{
    const __m512 code = _mm512_fmadd_ps(y, factor, _mm512_set1_ps(7.5f));

    return _mm512_cvtps_epi32(
        _mm512_min_ps(_mm512_max_ps(code, _mm512_setzero_ps()), _mm512_set1_ps(15)));
}

AVX512 static void
put(size_t d, const float *mean, const float *keys, size_t begin, size_t n, void *copies)
{
    const size_t h = kv_key_copy_bytes(d);

    for (size_t row = 0; row < n; row++) {
        const float *key = keys + row * d;
        uint8_t *codes = (uint8_t *)copies + kv_key_copy_codes_at(h, begin + row);
        uint8_t *to_scale = (uint8_t *)copies + kv_key_copy_scale_at(h, begin + row);
        __m512 most = _mm512_setzero_ps(), factor;
        float scale;

        for (size_t i = 0; i < d; i += LANES)
            most = _mm512_max_ps(most, absolute(differences(key, mean, i, d)));
        scale = max16(most) / 15;
        scale = round_scale(scale, to_scale);
        factor = _mm512_set1_ps(scale > 0 ? 0.5f / scale : 0);
        for (size_t i = 0; i < h; i += LANES) {
            const __m512i low = codes_of(differences(key, mean, i, d), factor);
            const __m512i high = codes_of(differences(key, mean, h + i, d), factor);

            _mm_storeu_si128(
                (__m128i *)(void *)(codes + i),
                _mm512_cvtepi32_epi8(_mm512_or_si512(low, _mm512_slli_epi32(high, 4))));
        }
    }
}

INLINE __m512 bounded(__m512 x)
{
    const __mmask16 numbers = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);

    return _mm512_min_ps(
        _mm512_max_ps(_mm512_maskz_mov_ps(numbers, x), _mm512_set1_ps(-FLT_MAX)),
        _mm512_set1_ps(FLT_MAX));
}

AVX512 static void
round_queries(size_t d, const float *queries, size_t n_queries, void *ret_rounded)
{
    const struct kv_rounded_queries to = kv_rounded_queries_at(d, ret_rounded, n_queries);
    const size_t padded = 2 * kv_key_copy_bytes(d);

    for (size_t query = 0; query < n_queries; query++) {
        const float *q = queries + query * d;
        int8_t *q8 = to.q8 + query * padded;
        __m512 most = _mm512_setzero_ps();
        __m512i sum = _mm512_setzero_si512();
        float scale;

        for (size_t i = 0; i < d; i += LANES)
            most = _mm512_max_ps(most, absolute(bounded(load_step(q, i, d))));
        scale = max16(most) / 127;
        memset(q8, 0, padded);
        for (size_t i = 0; i < d && scale > 0; i += LANES) {
            const __m512 x = _mm512_div_ps(bounded(load_step(q, i, d)), _mm512_set1_ps(scale));
            const __m512i rounded = _mm512_cvtps_epi32(
                _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-127)), _mm512_set1_ps(127)));

            _mm_storeu_si128((__m128i *)(void *)(q8 + i), _mm512_cvtepi32_epi8(rounded));
            sum = _mm512_add_epi32(sum, rounded);
        }
        to.scales[query] = scale;
        to.biases[query] = -15 * _mm512_reduce_add_epi32(sum);
    }
}

const struct kv_key_copies_kernels kv_key_copies_avx512 = {
    .name = "avx512",
    .supported = kv_has_avx512vnni,
    .put = put,
    .round = round_queries,
    .score_list = score_list,
};

#endif
