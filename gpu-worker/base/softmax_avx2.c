/* Eight elements at a time, with AVX2 and FMA. */
#include "gpu-worker/base/softmax.h"

#if defined(__x86_64__)

#include "gpu-worker/base/avx2.h"

KVW_AVX2 static inline float sum8(__m256 v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));

    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    s = _mm_add_ss(s, _mm_movehdup_ps(s));
    return _mm_cvtss_f32(s);
}

KVW_AVX2 static float max_of(const float *x, size_t n)
{
    float most = x[0];
    size_t i = 0;

    if (n >= 8) {
        __m256 lanes = _mm256_loadu_ps(x);
        float values[8];

        for (i = 8; i + 8 <= n; i += 8)
            lanes = _mm256_max_ps(lanes, _mm256_loadu_ps(x + i));
        _mm256_storeu_ps(values, lanes);
        for (unsigned j = 0; j < 8; j++)
            most = values[j] > most ? values[j] : most;
    }
    for (; i < n; i++)
        most = x[i] > most ? x[i] : most;
    return most;
}

/* The exp of one element by the same arithmetic: an element's bits do not depend on whether it
 * is in the last, incomplete vector. */
KVW_AVX2 static inline float exp1(float x)
{
    return _mm256_cvtss_f32(kvw_exp8(_mm256_set1_ps(x)));
}

KVW_AVX2 static float exp_sum(float *x, size_t n, float shift)
{
    const __m256 by = _mm256_set1_ps(shift);
    __m256 sums = _mm256_setzero_ps();
    size_t i = 0;
    float sum;

    for (; i + 8 <= n; i += 8) {
        const __m256 e = kvw_exp8(_mm256_sub_ps(_mm256_loadu_ps(x + i), by));

        _mm256_storeu_ps(x + i, e);
        sums = _mm256_add_ps(sums, e);
    }
    sum = sum8(sums);
    for (; i < n; i++) {
        x[i] = exp1(x[i] - shift);
        sum += x[i];
    }
    return sum;
}

static const struct kvw_softmax_ops table = {
    .name = "avx2",
    .max = max_of,
    .exp_sum = exp_sum,
};

const struct kvw_softmax_ops *kvw_softmax_avx2(void)
{
    return kvw_has_avx2() ? &table : NULL;
}

#else

const struct kvw_softmax_ops *kvw_softmax_avx2(void)
{
    return NULL;
}

#endif
