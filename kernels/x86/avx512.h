/* avx512.h - private to kernels/: vector functions that the AVX-512 files share; the
 * counterpart of avx2.h, which says how the two divide the work.
 *
 * With KV_EMULATE_AVX512 the same functions are built from AVX2 and plain C, for tests on
 * machines without AVX-512; tests/support/avx512_plain.h then defines the intrinsics.  Use
 * intrinsics only, not operators on vectors, which the emulation lacks, and pass constant
 * expressions as immediates, which the real build requires.
 *
 * gcc contracts sums and differences of products to fma in some places despite
 * -ffp-contract=off.  Where both roundings matter, check the generated code.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_X86_AVX512_H
#define KV_KERNELS_X86_AVX512_H

#if defined(__x86_64__)

#include "kernels/exact_scores.h"
#include "kernels/exp.h"
#include "kernels/lanes.h"

#include <assert.h>

#if defined(KV_EMULATE_AVX512)
#include "tests/support/avx512_plain.h"
#define AVX512 __attribute__((target("avx2,fma,f16c")))
#else
#include <immintrin.h>
#define AVX512                                                                           \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi," \
                          "avx512vbmi2")))
#endif
#include <string.h>

#define TARGET AVX512 /* for the headers shared with AVX2 */

/* In the emulation no argument needs to be a constant, and one function for all sizes saves
 * minutes of compile time. */
#if defined(KV_EMULATE_AVX512)
#define INLINE AVX512 static inline
#else
#define INLINE AVX512 __attribute__((always_inline)) static inline
#endif

enum {
    LANES = 16,
    LINE_BYTES = 64,
};

static_assert((int)LANES == (int)KV_SUM_LANES, "a vector is the lanes of a sum");

/* Returns a mask of the first n lanes; all 16 if n is larger. */
INLINE __mmask16 first_lanes(size_t n)
{
    return n >= LANES ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1);
}

INLINE size_t element_bytes(enum kv_key_type type)
{
    return type == KV_KEY_FP32 ? 4 : 2;
}

/* Loads 16 stored elements. */
INLINE __m512 load16(enum kv_key_type type, const uint8_t *at)
{
    if (type == KV_KEY_FP32)
        return _mm512_loadu_ps(at);

    const __m256i halves = _mm256_loadu_si256((const __m256i *)(const void *)at);

    if (type == KV_KEY_FP16)
        return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* Loads the elements of some lanes; the others are 0, and their memory is not read. */
INLINE __m512 load_some(enum kv_key_type type, __mmask16 lanes, const uint8_t *at)
{
    if (type == KV_KEY_FP32)
        return _mm512_maskz_loadu_ps(lanes, at);

    const __m256i halves = _mm256_maskz_loadu_epi16(lanes, at);

    if (type == KV_KEY_FP16)
        return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* Loads 16 of n elements, from i on, with 0 after the last. */
INLINE __m512 load_step(const float *at, size_t i, size_t n)
{
    return i + LANES <= n ? _mm512_loadu_ps(at + i)
                          : _mm512_maskz_loadu_ps(first_lanes(n - i), at + i);
}

/* The first two steps of the sum of 16 lanes (exact_scores.h): lane[i] + lane[i + 8], then
 * + lane[i + 4]. */
INLINE __m128 half_sum(__m512 v)
{
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));

    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

/* The whole sum of 16 lanes. */
INLINE float sum16(__m512 v)
{
    __m128 four = half_sum(v);

    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

/* The last two steps for four sums at once: lane i is the sum of argument i. */
INLINE __m128 sums4(__m128 a, __m128 b, __m128 c, __m128 d)
{
    const __m128 ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
    const __m128 cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));

    return _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd));
}

/* The largest lane; no lane is a NaN. */
INLINE float max16(__m512 v)
{
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));

    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

/* The exp of exp.h in the lanes of `has`, whose arguments must be KV_EXP_LEAST or more; 0 in the
 * others. */
INLINE __m512 exp16_some(__mmask16 has, __m512 x)
{
    const __m512 one = _mm512_set1_ps(1), rounder = _mm512_set1_ps(KV_EXP_ROUNDER);
    const __m512 most = _mm512_min_ps(x, _mm512_set1_ps(KV_EXP_MOST));
    const __m512 t = _mm512_fmadd_ps(most, _mm512_set1_ps(KV_EXP_LOG2_E), rounder);
    const __m512 k = _mm512_sub_ps(t, rounder);
    const __m512i power =
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(t), _mm512_set1_epi32(127)), 23);
    __m512 r = _mm512_fnmadd_ps(k, _mm512_set1_ps(KV_EXP_LN2_HIGH), most);
    __m512 p = _mm512_set1_ps(1.0f / 5040);

    r = _mm512_fnmadd_ps(k, _mm512_set1_ps(KV_EXP_LN2_LOW), r);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, one);
    p = _mm512_fmadd_ps(p, r, one);
    return _mm512_maskz_mul_ps(has, p, _mm512_castsi512_ps(power));
}

/* The exp of exp.h. */
INLINE __m512 exp16(__m512 x)
{
    return exp16_some(_mm512_cmp_ps_mask(x, _mm512_set1_ps(KV_EXP_LEAST), _CMP_GE_OQ), x);
}

#endif

#endif
