/* exp.h - private to kernels/: the exp of every family that has one.
 *
 *   exp(x)   t = fma(x, log2(e), 1.5 * 2^23), whose low bits are k = round(x / ln 2); with
 *            k = t - 1.5 * 2^23 in fp32,
 *            r = fma(-k, KV_EXP_LN2_LOW, fma(-k, KV_EXP_LN2_HIGH, x)), |r| <= ln(2) / 2 and a
 *            bit; p = 1/7!, then p = fma(p, r, c) for c = 1/6! ... 1/1!, 1/0!; p * 2^k, 2^k
 *            from t's bits.  The first term left out is below 2^-27. Not x >= KV_EXP_LEAST: 0.
 *            Relative error at most 3e-7; exp(0) = 1. x > 0 counts as 0.  The argument is
 *            always how far something lies below the largest of its kind; where it comes out
 *            above, the numbers were so large that rounding did it, and without a bound a sum
 *            of weights would not fit its integer.
 *
 * Threads: pure functions.  Memory: none.
 */
#ifndef KV_KERNELS_EXP_H
#define KV_KERNELS_EXP_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define KV_EXP_LEAST    (-87.0f)
#define KV_EXP_MOST     0.0f
#define KV_EXP_LOG2_E   1.44269504f
#define KV_EXP_ROUNDER  12582912.0f
#define KV_EXP_LN2_HIGH 0.693359375f
#define KV_EXP_LN2_LOW  (-2.12194440e-4f)

static inline float kv_exp(float x)
{
    static const float factors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
    float t, k, r, p = 1.0f / 5040, power;
    uint32_t bits;

    if (!(x >= KV_EXP_LEAST))
        return 0;
    x = x < KV_EXP_MOST ? x : KV_EXP_MOST;
    t = fmaf(x, KV_EXP_LOG2_E, KV_EXP_ROUNDER);
    k = t - KV_EXP_ROUNDER;
    r = fmaf(-k, KV_EXP_LN2_LOW, fmaf(-k, KV_EXP_LN2_HIGH, x));
    for (unsigned i = 0; i < sizeof(factors) / sizeof(factors[0]); i++)
        p = fmaf(p, r, factors[i]);
    memcpy(&bits, &t, sizeof(bits));
    bits = (bits + 127) << 23;
    memcpy(&power, &bits, sizeof(power));
    return p * power;
}

#endif
