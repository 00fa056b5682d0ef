/* exp.h - private to kernels/: the exp that all families share.
 *
 * Range reduction x = k ln 2 + r by Cody and Waite, then a Taylor polynomial of degree 7 in r.
 * ln 2 is split in two: KV_EXP_LN2_HIGH has 9 significant bits, so k * KV_EXP_LN2_HIGH is
 * exact.
 *
 *   exp(x)   t = fma(x, log2(e), 1.5 * 2^23), whose low bits are k = round(x / ln 2); with
 *            k = t - 1.5 * 2^23 in fp32,
 *            r = fma(-k, KV_EXP_LN2_LOW, fma(-k, KV_EXP_LN2_HIGH, x)), |r| <= ln(2) / 2 and a
 *            bit; p = 1/7!, then p = fma(p, r, c) for c = 1/6! ... 1/1!, 1/0!; p * 2^k, 2^k
 *            from t's bits.  The first term left out is below 2^-27.
 *
 * exp(0) is 1, and the relative error at most 3e-7.  Below KV_EXP_LEAST, and of a NaN, the
 * result is 0: p * 2^k would leave the normal numbers.  x > 0 counts as 0.  The argument is
 * always a score minus the largest score, so only rounding of very large scores makes it
 * positive; without the bound a sum of weights would overflow its integer (KV_EXP_SUM_BITS).
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
#define KV_EXP_ROUNDER  12582912.0f /* 1.5 * 2^23: adding it rounds to a whole number */
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
    /* 2^k: the low bits of t are k, and the shift drops the rounder's own. */
    memcpy(&bits, &t, sizeof(bits));
    bits = (bits + 127) << 23;
    memcpy(&power, &bits, sizeof(power));
    return p * power;
}

#endif
