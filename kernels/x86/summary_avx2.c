/* Sixteen elements are two vectors. */
#include "kernels/dispatch.h"
#include "kernels/summary.h"
#include "kernels/x86/avx2.h"

#if defined(__x86_64__)

/* Loads the first n elements to two vectors, with 0 after them. */
INLINE void load_first(const float *at, size_t n, __m256 ret_x[2])
{
    ret_x[0] = _mm256_maskload_ps(at, first_lanes(n));
    ret_x[1] = n > LANES ? _mm256_maskload_ps(at + LANES, first_lanes(n - LANES))
                         : _mm256_setzero_ps();
}

INLINE void load_step(const float *at, size_t i, size_t n, __m256 ret_x[2])
{
    if (i + STEP <= n) {
        ret_x[0] = _mm256_loadu_ps(at + i);
        ret_x[1] = _mm256_loadu_ps(at + i + LANES);
    } else {
        load_first(at + i, n - i, ret_x);
    }
}

INLINE int fits(const float *x, size_t d)
{
    const __m256 most = _mm256_set1_ps(KV_SUMMARY_MOST);
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 all = _mm256_castsi256_ps(_mm256_set1_epi32(-1));

    for (size_t i = 0; i < d; i += LANES) {
        const __m256 at = i + LANES <= d ? _mm256_loadu_ps(x + i)
                                         : _mm256_maskload_ps(x + i, first_lanes(d - i));

        all = _mm256_and_ps(all, _mm256_cmp_ps(_mm256_and_ps(at, magnitude), most, _CMP_LE_OQ));
    }
    return _mm256_movemask_ps(all) == 0xff;
}

AVX2 static void prepare(float *vectors, size_t n, size_t d_k, size_t d, float factor)
{
    const __m256 by = _mm256_set1_ps(factor), nan = _mm256_set1_ps(__builtin_nanf(""));

    for (size_t row = 0; row < n; row++, vectors += d) {
        const int is_fit = fits(vectors, d);
        size_t i = is_fit ? d_k : 0;

        if (is_fit && factor == 1)
            continue;
        for (; i < d; i += LANES)
            if (i + LANES <= d) {
                const __m256 x = _mm256_loadu_ps(vectors + i);

                _mm256_storeu_ps(vectors + i, is_fit ? _mm256_mul_ps(x, by) : nan);
            } else {
                const __m256i lanes = first_lanes(d - i);
                const __m256 x = _mm256_maskload_ps(vectors + i, lanes);

                _mm256_maskstore_ps(vectors + i, lanes, is_fit ? _mm256_mul_ps(x, by) : nan);
            }
    }
}

AVX2 static size_t spread(
    const float *vectors, size_t n, size_t d, const float *origin, float *sums, float *squares)
{
    size_t n_added = 0;

    for (size_t row = 0; row < n; row++, vectors += d) {
        size_t i = 0;

        if (vectors[0] != vectors[0])
            continue;
        for (; i + LANES <= d; i += LANES) {
            const __m256 x =
                _mm256_sub_ps(_mm256_loadu_ps(vectors + i), _mm256_loadu_ps(origin + i));

            _mm256_storeu_ps(sums + i, _mm256_add_ps(_mm256_loadu_ps(sums + i), x));
            _mm256_storeu_ps(squares + i, _mm256_fmadd_ps(x, x, _mm256_loadu_ps(squares + i)));
        }
        if (i < d) {
            const __m256i lanes = first_lanes(d - i);
            const __m256 x = _mm256_sub_ps(_mm256_maskload_ps(vectors + i, lanes),
                                           _mm256_maskload_ps(origin + i, lanes));

            _mm256_maskstore_ps(sums + i, lanes,
                                _mm256_add_ps(_mm256_maskload_ps(sums + i, lanes), x));
            _mm256_maskstore_ps(squares + i, lanes,
                                _mm256_fmadd_ps(x, x, _mm256_maskload_ps(squares + i, lanes)));
        }
        n_added++;
    }
    return n_added;
}

AVX2 static double distance(const float *keys,
                            size_t n,
                            size_t d_k,
                            const float *means,
                            size_t stride,
                            const uint8_t *numbers)
{
    double sum = 0;

    for (size_t row = 0; row < n; row++, keys += d_k) {
        __m256 lanes[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};

        if (numbers[row] == KV_SUMMARY_NONE)
            continue;
        for (size_t i = 0; i < d_k; i += STEP) {
            __m256 key[2], mean[2];

            load_step(keys, i, d_k, key);
            load_step(means + numbers[row] * stride, i, d_k, mean);
            for (unsigned half = 0; half < 2; half++) {
                const __m256 x = _mm256_sub_ps(key[half], mean[half]);

                lanes[half] = _mm256_fmadd_ps(x, x, lanes[half]);
            }
        }
        sum += (double)sum16(lanes[0], lanes[1]);
    }
    return sum;
}

const struct kv_summary_kernels kv_summary_avx2 = {
    .name = "avx2",
    .supported = kv_has_avx2,
    .prepare = prepare,
    .spread = spread,
    .distance = distance,
};

#endif
