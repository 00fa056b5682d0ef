/* Sixteen elements are one vector. */
#include "kernels/dispatch.h"
#include "kernels/summary.h"
#include "kernels/x86/avx512.h"

#if defined(__x86_64__)

INLINE bool fits(const float *x, size_t d)
{
    const __m512 most = _mm512_set1_ps(KV_SUMMARY_MOST);
    const __m512 magnitude = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff));
    unsigned all = first_lanes(LANES);

    for (size_t i = 0; i < d; i += LANES)
        all &=
            _mm512_cmp_ps_mask(_mm512_and_ps(load_step(x, i, d), magnitude), most, _CMP_LE_OQ);
    return all == first_lanes(LANES);
}

AVX512 static void prepare(float *vectors, size_t n, size_t d_k, size_t d, float factor)
{
    const __m512 by = _mm512_set1_ps(factor), nan = _mm512_set1_ps(__builtin_nanf(""));

    for (size_t row = 0; row < n; row++, vectors += d) {
        const bool is_fit = fits(vectors, d);

        if (is_fit && factor == 1)
            continue;
        for (size_t i = is_fit ? d_k : 0; i < d; i += LANES) {
            const __m512 x = is_fit ? _mm512_mul_ps(load_step(vectors, i, d), by) : nan;

            _mm512_mask_storeu_ps(vectors + i, first_lanes(d - i), x);
        }
    }
}

AVX512 static size_t spread(
    const float *vectors, size_t n, size_t d, const float *origin, float *sums, float *squares)
{
    size_t n_added = 0;

    for (size_t row = 0; row < n; row++, vectors += d) {
        if (vectors[0] != vectors[0])
            continue;
        for (size_t i = 0; i < d; i += LANES) {
            const __mmask16 lanes = first_lanes(d - i);
            const __m512 x = _mm512_sub_ps(load_step(vectors, i, d), load_step(origin, i, d));

            _mm512_mask_storeu_ps(sums + i, lanes, _mm512_add_ps(load_step(sums, i, d), x));
            _mm512_mask_storeu_ps(squares + i, lanes,
                                  _mm512_fmadd_ps(x, x, load_step(squares, i, d)));
        }
        n_added++;
    }
    return n_added;
}

AVX512 static double distance(const float *keys,
                              size_t n,
                              size_t d_k,
                              const float *means,
                              size_t stride,
                              const uint8_t *numbers)
{
    double sum = 0;

    for (size_t row = 0; row < n; row++, keys += d_k) {
        __m512 lanes = _mm512_setzero_ps();

        if (numbers[row] == KV_SUMMARY_NONE)
            continue;
        for (size_t i = 0; i < d_k; i += LANES) {
            const __m512 x = _mm512_sub_ps(load_step(keys, i, d_k),
                                           load_step(means + numbers[row] * stride, i, d_k));

            lanes = _mm512_fmadd_ps(x, x, lanes);
        }
        sum += (double)sum16(lanes);
    }
    return sum;
}

const struct kv_summary_kernels kv_summary_avx512 = {
    .name = "avx512",
    .supported = kv_has_avx512,
    .prepare = prepare,
    .spread = spread,
    .distance = distance,
};

#endif
