/* Adjacent pairs are rotated in one register: a vector is combined with itself, its pairs
 * swapped; the sines of their first elements have the opposite sign.  For halves, cosines and
 * sines are separated into two vectors, once for all heads.  The sign of the sines gives the
 * direction.  The last pairs are loaded with masks and rotated as vectors too, because the
 * compiler may contract scalar expressions to fma. */
#include "kernels/dispatch.h"
#include "kernels/rope.h"
#include "kernels/x86/avx512.h"

#include "kernels/x86/rope_common.h"

#if defined(__x86_64__)

INLINE __m512 turned(__m512 pairs, __m512 rotate, __m512 way)
{
    const __m512 cosines = _mm512_shuffle_ps(rotate, rotate, 0xa0);
    const __m512 sines = _mm512_mul_ps(_mm512_shuffle_ps(rotate, rotate, 0xf5), way);

    return _mm512_add_ps(_mm512_mul_ps(pairs, cosines),
                         _mm512_mul_ps(_mm512_shuffle_ps(pairs, pairs, 0xb1), sines));
}

AVX512 static void rotate_adjacent(
    const float *rotations, float sign, size_t n_rot, float *x, size_t n_heads, size_t d)
{
    const __m512 way = _mm512_mask_mov_ps(_mm512_set1_ps(sign), 0x5555, _mm512_set1_ps(-sign));

    for (size_t head = 0; head < n_heads; head++, x += d) {
        size_t i = 0;

        for (; i + LANES <= n_rot; i += LANES)
            _mm512_storeu_ps(
                x + i, turned(_mm512_loadu_ps(x + i), _mm512_loadu_ps(rotations + i), way));
        if (i < n_rot) {
            const __mmask16 has = first_lanes(n_rot - i);

            _mm512_mask_storeu_ps(x + i, has,
                                  turned(_mm512_maskz_loadu_ps(has, x + i),
                                         _mm512_maskz_loadu_ps(has, rotations + i), way));
        }
    }
}

/* Rotates the first n of sixteen pairs of every head. */
INLINE void rotate_sixteen(const float *rotations,
                           __m512 way,
                           size_t n,
                           float *x,
                           size_t half,
                           size_t n_heads,
                           size_t d)
{
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd =
        _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const __mmask16 has = first_lanes(n);
    const __m512 low = _mm512_maskz_loadu_ps(first_lanes(2 * n), rotations);
    const __m512 high =
        2 * n > LANES ? _mm512_maskz_loadu_ps(first_lanes(2 * n - LANES), rotations + LANES)
                      : _mm512_setzero_ps();
    const __m512 c = _mm512_permutex2var_ps(low, even, high);
    const __m512 s = _mm512_mul_ps(_mm512_permutex2var_ps(low, odd, high), way);

    for (size_t head = 0; head < n_heads; head++, x += d) {
        const __m512 first = _mm512_maskz_loadu_ps(has, x);
        const __m512 second = _mm512_maskz_loadu_ps(has, x + half);

        _mm512_mask_storeu_ps(x, has,
                              _mm512_sub_ps(_mm512_mul_ps(first, c), _mm512_mul_ps(second, s)));
        _mm512_mask_storeu_ps(x + half, has,
                              _mm512_add_ps(_mm512_mul_ps(first, s), _mm512_mul_ps(second, c)));
    }
}

AVX512 static void rotate_halves(
    const float *rotations, float sign, size_t n_rot, float *x, size_t n_heads, size_t d)
{
    const __m512 way = _mm512_set1_ps(sign);
    const size_t half = n_rot / 2;

    for (size_t i = 0; i < half; i += LANES)
        rotate_sixteen(rotations + 2 * i, way, half - i < LANES ? half - i : LANES, x + i, half,
                       n_heads, d);
}

const struct kv_rope_kernels kv_rope_avx512 = {
    .name = "avx512",
    .supported = kv_has_avx512,
    .rotate = rotate,
};

#endif
