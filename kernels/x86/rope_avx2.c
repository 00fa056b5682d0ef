/* Adjacent pairs are rotated in one register: a vector is combined with itself, its pairs
 * swapped.  For halves, cosines and sines are separated into two vectors, once for all heads.
 * The sign of the sines gives the direction.  The last pairs are loaded with masks and rotated
 * as vectors too, because gcc 12 contracts the scalar expressions to fma despite
 * -ffp-contract=off, which would change the bits.
 *
 * There is no AVX-512 file: a rotation is bound by memory, and vectors of 16 floats were not
 * ahead, whether x was in the cache (Zen 4: 0.95 to 1.07 of this file's rate) or in memory
 * (0.72 to 1.06; on a Zen 5 0.32 to 1). */
#include "kernels/dispatch.h"
#include "kernels/rope.h"
#include "kernels/x86/avx2.h"

#if defined(__x86_64__)

INLINE __m256 turned(__m256 pairs, __m256 rotate, __m256 way)
{
    const __m256 sines = _mm256_mul_ps(_mm256_movehdup_ps(rotate), way);

    return _mm256_addsub_ps(_mm256_mul_ps(pairs, _mm256_moveldup_ps(rotate)),
                            _mm256_mul_ps(_mm256_permute_ps(pairs, 0xb1), sines));
}

AVX2 static void rotate_adjacent(
    const float *rotations, float sign, size_t n_rot, float *x, size_t n_heads, size_t d)
{
    const __m256 way = _mm256_set1_ps(sign);

    for (size_t head = 0; head < n_heads; head++, x += d) {
        size_t i = 0;

        for (; i + LANES <= n_rot; i += LANES)
            _mm256_storeu_ps(
                x + i, turned(_mm256_loadu_ps(x + i), _mm256_loadu_ps(rotations + i), way));
        if (i < n_rot) {
            const __m256i has = first_lanes(n_rot - i);

            _mm256_maskstore_ps(x + i, has,
                                turned(_mm256_maskload_ps(x + i, has),
                                       _mm256_maskload_ps(rotations + i, has), way));
        }
    }
}

/* Rotates eight pairs of every head, or the first n of them; n is LANES, a constant, for whole
 * vectors. */
INLINE void rotate_eight(const float *rotations,
                         __m256 way,
                         size_t n,
                         float *x,
                         size_t half,
                         size_t n_heads,
                         size_t d)
{
    const __m256i has = first_lanes(n);
    const __m256 low = _mm256_maskload_ps(rotations, first_lanes(2 * n));
    const __m256 high =
        _mm256_maskload_ps(rotations + LANES, first_lanes(2 * n > LANES ? 2 * n - LANES : 0));
    const __m256 a = _mm256_permute2f128_ps(low, high, 0x20);
    const __m256 b = _mm256_permute2f128_ps(low, high, 0x31);
    const __m256 c = _mm256_shuffle_ps(a, b, 0x88);
    const __m256 s = _mm256_mul_ps(_mm256_shuffle_ps(a, b, 0xdd), way);

    for (size_t head = 0; head < n_heads; head++, x += d) {
        const __m256 first = n == LANES ? _mm256_loadu_ps(x) : _mm256_maskload_ps(x, has);
        const __m256 second =
            n == LANES ? _mm256_loadu_ps(x + half) : _mm256_maskload_ps(x + half, has);
        const __m256 to = _mm256_sub_ps(_mm256_mul_ps(first, c), _mm256_mul_ps(second, s));
        const __m256 other = _mm256_add_ps(_mm256_mul_ps(first, s), _mm256_mul_ps(second, c));

        if (n == LANES) {
            _mm256_storeu_ps(x, to);
            _mm256_storeu_ps(x + half, other);
        } else {
            _mm256_maskstore_ps(x, has, to);
            _mm256_maskstore_ps(x + half, has, other);
        }
    }
}

AVX2 static void rotate_halves(
    const float *rotations, float sign, size_t n_rot, float *x, size_t n_heads, size_t d)
{
    const __m256 way = _mm256_set1_ps(sign);
    const size_t half = n_rot / 2;
    size_t i = 0;

    for (; i + LANES <= half; i += LANES)
        rotate_eight(rotations + 2 * i, way, LANES, x + i, half, n_heads, d);
    if (i < half)
        rotate_eight(rotations + 2 * i, way, half - i, x + i, half, n_heads, d);
}

AVX2 static void rotate(enum kv_rope_style style,
                        enum kv_rope_direction direction,
                        const float *rotations,
                        size_t rotations_stride,
                        size_t n_rot,
                        float *x,
                        size_t n,
                        size_t n_heads,
                        size_t d)
{
    const float sign = direction == KV_ROPE_INVERSE ? -1 : 1;

    for (size_t row = 0; row < n; row++, rotations += rotations_stride, x += n_heads * d)
        if (style == KV_ROPE_ADJACENT)
            rotate_adjacent(rotations, sign, n_rot, x, n_heads, d);
        else
            rotate_halves(rotations, sign, n_rot, x, n_heads, d);
}

const struct kv_rope_kernels kv_rope_avx2 = {
    .name = "avx2",
    .supported = kv_has_avx2,
    .rotate = rotate,
};

#endif
