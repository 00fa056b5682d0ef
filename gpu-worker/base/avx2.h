/* avx2.h - the CPU test, attributes and exp that the worker's AVX2 files share.
 *
 * Threads: pure functions.  Memory: none.
 */
#ifndef KV_GPU_WORKER_BASE_AVX2_H
#define KV_GPU_WORKER_BASE_AVX2_H

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdbool.h>

#define KVW_AVX2        __attribute__((target("avx2,fma,f16c")))
#define KVW_AVX2_INLINE KVW_AVX2 __attribute__((always_inline)) static inline

static inline bool kvw_has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

/* exp(x) for x <= 88; 0 below -87.  x = k ln 2 + r; the result is 2^k times the Taylor
 * polynomial of degree 6 in r, whose error is below 2^-24 for |r| <= ln(2) / 2.
 *
 * Differs from kernels/exp.h, which has no arguments above 0 and one more term.  silu needs
 * positive arguments, and the recorded logits depend on these bits. */
KVW_AVX2_INLINE __m256 kvw_exp8(__m256 x)
{
    const __m256 least = _mm256_set1_ps(-87.0f);
    const __m256 is_tiny = _mm256_cmp_ps(x, least, _CMP_LT_OQ);
    const __m256 k = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(k, _mm256_set1_ps(0.693359375f), x);
    __m256 p = _mm256_set1_ps(1.0f / 720);

    r = _mm256_fnmadd_ps(k, _mm256_set1_ps(-2.12194440e-4f), r);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));

    const __m256i power =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(k), _mm256_set1_epi32(127)), 23);

    return _mm256_andnot_ps(is_tiny, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

#endif

#endif
