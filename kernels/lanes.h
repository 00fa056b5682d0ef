/* lanes.h - private to kernels/: the end of the sum in 16 lanes (exact_scores.h), for the
 * scalar reference of every family that sums so.  Element i was added to lane i % 16; the lanes
 * are then added as a tree, halves onto halves, which is what vector registers do best.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_LANES_H
#define KV_KERNELS_LANES_H

#include <stddef.h>

enum {
    KV_SUM_LANES = 16,
};

/* Returns the sum of the lanes, and overwrites them. */
static inline float kv_sum_lanes(float lanes[KV_SUM_LANES])
{
    for (size_t half = KV_SUM_LANES / 2; half > 0; half /= 2)
        for (size_t i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
}

#endif
