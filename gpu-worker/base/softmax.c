/* One element at a time, and which table is used. */
#include "gpu-worker/base/softmax.h"

#include <math.h>

static float max_of(const float *x, size_t n)
{
    float most = x[0];

    for (size_t i = 1; i < n; i++)
        most = x[i] > most ? x[i] : most;
    return most;
}

/* Sums in eight accumulators in turn, as a vector of eight lanes does, so that long arrays lose
 * fewer digits. */
static float exp_sum(float *x, size_t n, float shift)
{
    float sums[8] = {0};

    for (size_t i = 0; i < n; i++) {
        x[i] = x[i] - shift < -87.0f ? 0 : expf(x[i] - shift);
        sums[i % 8] += x[i];
    }
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) +
           ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

static const struct kvw_softmax_ops scalar = {
    .name = "scalar",
    .max = max_of,
    .exp_sum = exp_sum,
};

const struct kvw_softmax_ops *kvw_softmax(void)
{
    const struct kvw_softmax_ops *avx2 = kvw_softmax_avx2();

    return avx2 != NULL ? avx2 : &scalar;
}

const struct kvw_softmax_ops *kvw_softmax_at(unsigned index)
{
    return index == 0 ? &scalar : index == 1 ? kvw_softmax_avx2() : NULL;
}
