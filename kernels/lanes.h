/* lanes.h - private to kernels/: the sum in 16 lanes of exact_scores.h, of every family that
 * has one: element i was added to lane i % 16, and the lanes are added as a tree.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_LANES_H
#define KV_KERNELS_LANES_H

#include <stddef.h>

enum {
    KV_SUM_LANES = 16,
};

/* Overwrites the lanes. */
static inline float kv_sum_lanes(float lanes[KV_SUM_LANES])
{
    for (size_t half = KV_SUM_LANES / 2; half > 0; half /= 2)
        for (size_t i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
}

#endif
