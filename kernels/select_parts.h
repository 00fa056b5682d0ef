/* select_parts.h - private to kernels/: what select.c and select_avx2.c have in common.
 *
 *   exp(x)   t = fma(x, log2(e), 1.5 * 2^23), whose low bits are k = round(x / ln 2); with
 *            k = t - 1.5 * 2^23 in fp32,
 *            r = fma(-k, EXP_LN2_LOW, fma(-k, EXP_LN2_HIGH, x)), |r| <= ln(2) / 2 and a bit;
 *            p = 1/7!, then p = fma(p, r, c) for c = 1/6! ... 1/1!, 1/0!;
 *            p * 2^k, 2^k from t's bits.  The first term left out is below 2^-27.
 *            Not x >= EXP_LEAST: 0.  x > EXP_MOST counts as EXP_MOST, which k = 127 reaches.
 *   image    a score's fp32 bits as an unsigned number in the same order, see select.h; a NaN
 * is 0 choice   the k-th largest image, found by its highest 11 bits, the next 11, the last 10:
 *            each time the images that agree so far are counted by their next bits
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_SELECT_PARTS_H
#define KV_SELECT_PARTS_H

#include <stddef.h>
#include <stdint.h>

#define EXP_LEAST    (-87.0f)
#define EXP_MOST     88.0f
#define EXP_LOG2_E   1.44269504f
#define EXP_ROUNDER  12582912.0f
#define EXP_LN2_HIGH 0.693359375f
#define EXP_LN2_LOW  (-2.12194440e-4f)

enum {
    SELECT_LANES = 16, /* of the exp sum */
    SELECT_HIGH_SHIFT = 21,
    SELECT_MIDDLE_SHIFT = 10,
    SELECT_HIGH_BINS = 2048,
    SELECT_MIDDLE_BINS = 2048,
    SELECT_LOW_BINS = 1024,
};

/* The bin that holds the *k-th largest, 1 <= *k <= the sum of counts; takes off *k what is in
 * the bins above. */
static inline uint32_t select_bin(const uint32_t *counts, uint32_t n_bins, size_t *k)
{
    uint32_t bin = n_bins - 1;

    for (; bin > 0 && counts[bin] < *k; bin--)
        *k -= counts[bin];
    return bin;
}

#endif
