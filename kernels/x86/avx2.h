/* avx2.h - private to kernels/: vector functions that the AVX2 files share.
 *
 * The AVX2 and AVX-512 files of a family divide a call into pieces in the same way and compute
 * a piece each with its own vectors.  The division is in a header that declares the functions
 * for pieces, which both files include and define:
 *
 *   family        shared                                  different, besides the vector width
 *   attend        attend_common.h: groups of rows, the    registers: 12 sums and 16; order of
 *                 next one prefetched                     prefetches; ends by masks
 *   byte_select   -                                       counters of bytes, not of bits
 *   estimate      estimate_common.h: blocks of queries,   registers; ends by masks
 *                 the order of the steps
 *   exact_scores  exact_scores_common.h: types of keys    registers; prefetches; ends by masks
 *   gather        -                                       there is no AVX-512 file
 *   key_copies    key_copies_common.h: tiles of rows,     products of 16 bits here, VNNI there
 *                 the next ones prefetched
 *   kmeans        kmeans_common.h: subspaces, blocks of   the nearest lane; ends by masks
 *                 rows, sums of a step
 *   pq            -                                       registers; the rest is ten lines
 *   pq_cells      pq_cells_common.h: blocks of queries    permutes by table instead of compress
 *   pq_tiles      pq_tiles_common.h: widths of codes      lookups of 16 entries, not 64 or 128
 *   rope          -                                       there is no AVX-512 file
 *   select        select_common.h: blocks of heads,       sums of exps; permutes by table
 *                 passes
 *   summary       -                                       short loops, whose ends are by masks
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_X86_AVX2_H
#define KV_KERNELS_X86_AVX2_H

#if defined(__x86_64__)

#include "kernels/exact_scores.h"
#include "kernels/exp.h"
#include "kernels/lanes.h"

#include <assert.h>
#include <immintrin.h>
#include <string.h>

#define AVX2   __attribute__((target("avx2,fma,f16c")))
#define TARGET AVX2 /* for the headers shared with AVX-512 */
#define INLINE AVX2 __attribute__((always_inline)) static inline

enum {
    LANES = 8,
    STEP = 2 * LANES, /* elements of one step of a sum in 16 lanes */
    EXP_VECTORS = 4,  /* vectors of one exps8(), at most */
    LINE_BYTES = 64,
};

static_assert((int)STEP == (int)KV_SUM_LANES, "two vectors are the lanes of a sum");

INLINE size_t element_bytes(enum kv_key_type type)
{
    return type == KV_KEY_FP32 ? 4 : 2;
}

/* For each set of eight lanes the numbers of its lanes, ascending, a byte each (avx2.c). */
extern uint64_t kv_lanes_of[256];

/* Appends base + lane for each lane of the set to `to`, ascending, overwriting eight numbers.
 * Returns the new n. */
INLINE size_t write_lanes(uint32_t *to, size_t n, unsigned set, uint32_t base)
{
    const __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)kv_lanes_of[set]));

    _mm256_storeu_si256((__m256i *)(void *)(to + n),
                        _mm256_add_epi32(lanes, _mm256_set1_epi32((int)base)));
    return n + (size_t)__builtin_popcount(set);
}

/* Loads eight stored elements. */
INLINE __m256 load8(enum kv_key_type type, const uint8_t *at)
{
    if (type == KV_KEY_FP32)
        return _mm256_loadu_ps((const float *)(const void *)at);

    const __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)at);

    if (type == KV_KEY_FP16)
        return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* Returns a mask whose first n lanes are all ones. */
INLINE __m256i first_lanes(size_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* The first two steps of the sum of 16 lanes (exact_scores.h): lane[i] + lane[i + 8], then
 * + lane[i + 4]. */
INLINE __m128 half_sum(__m256 low, __m256 high)
{
    const __m256 eight = _mm256_add_ps(low, high);

    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

/* The whole sum of 16 lanes. */
INLINE float sum16(__m256 low, __m256 high)
{
    __m128 four = half_sum(low, high);

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
INLINE float max8(__m256 v)
{
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));

    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

/* The exp of exp.h for n vectors in place, n a constant; 0 for arguments below `least`, which is
 * KV_EXP_LEAST or more.  Each step runs for all vectors before
 * the next step, because the latency chain of one vector is longer than the core's reorder
 * window covers.  127, the bias of the exponent, is added to the rounder, which saves an
 * addition; the bits are the same, because t is never halfway between two numbers. */
INLINE void exps8_from(float least, __m256 *x, unsigned n)
{
    static const float factors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
    const __m256 rounder = _mm256_set1_ps(KV_EXP_ROUNDER + 127);
    __m256 has[EXP_VECTORS], p[EXP_VECTORS], power[EXP_VECTORS];

    for (unsigned i = 0; i < n; i++) {
        has[i] = _mm256_cmp_ps(x[i], _mm256_set1_ps(least), _CMP_GE_OQ);
        x[i] = _mm256_min_ps(x[i], _mm256_set1_ps(KV_EXP_MOST));
        power[i] = _mm256_fmadd_ps(x[i], _mm256_set1_ps(KV_EXP_LOG2_E), rounder);
    }
    for (unsigned i = 0; i < n; i++) {
        const __m256 k = _mm256_sub_ps(power[i], rounder);

        x[i] = _mm256_fnmadd_ps(k, _mm256_set1_ps(KV_EXP_LN2_HIGH), x[i]);
        x[i] = _mm256_fnmadd_ps(k, _mm256_set1_ps(KV_EXP_LN2_LOW), x[i]);
        p[i] = _mm256_set1_ps(1.0f / 5040);
    }
    for (unsigned step = 0; step < sizeof(factors) / sizeof(factors[0]); step++)
        for (unsigned i = 0; i < n; i++)
            p[i] = _mm256_fmadd_ps(p[i], x[i], _mm256_set1_ps(factors[step]));
    for (unsigned i = 0; i < n; i++) {
        const __m256i to = _mm256_slli_epi32(_mm256_castps_si256(power[i]), 23);

        x[i] = _mm256_and_ps(has[i], _mm256_mul_ps(p[i], _mm256_castsi256_ps(to)));
    }
}

INLINE void exps8(__m256 *x, unsigned n)
{
    exps8_from(KV_EXP_LEAST, x, n);
}

INLINE __m256 exp8(__m256 x)
{
    exps8(&x, 1);
    return x;
}

#endif

#endif
