/* select_passes.h - private to kernels/: how select.c and the x86 files find the sort key of
 * the k-th largest score.
 *
 * A radix select over the 32 bits of a sort key (kv_score_key()), highest bits first: 11 bits,
 * 11 bits, 10 bits.  Each pass counts, in one bin per value of its bits, the sort keys whose
 * higher bits equal those found so far (the bound).  The bin that holds the k-th largest gives
 * the bound its next bits.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_SELECT_PASSES_H
#define KV_KERNELS_SELECT_PASSES_H

#include "kernels/select.h"

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

/* 1.5 * 2^(52 - KV_EXP_SUM_BITS).  A double from this to 4/3 of it has a last bit worth
 * 2^-KV_EXP_SUM_BITS, so adding a weight to it rounds the weight to whole units, and the low
 * bits of the sum are that integer.  The factor 1.5 keeps the exponent the same for either
 * sign. */
#define KV_EXP_SUM_ROUNDER (1.5 * ((uint64_t)1 << (52 - KV_EXP_SUM_BITS)))

enum {
    KV_SELECT_HIGH_BITS = 11, /* of a sort key: those of the first pass, and of the second */
    KV_SELECT_LOW_BITS = 10,  /* those of the last pass */
};

static_assert(KV_TOPK_BINS == 1 << KV_SELECT_HIGH_BITS, "a bin for each value of a pass");
static_assert(KV_SELECT_LOW_BITS <= KV_SELECT_HIGH_BITS, "the last pass fits the bins");
static_assert(KV_EXP_SUM_BITS < 52, "a unit is a bit of a double's fraction");
static_assert(KV_TOPK_PASSES == 3 && 2 * KV_SELECT_HIGH_BITS + KV_SELECT_LOW_BITS == 32,
              "the passes are all bits");

/* The position of the lowest bit that a pass counts by. */
static inline unsigned kv_select_shift(uint32_t pass)
{
    return pass == 0 ? 32 - KV_SELECT_HIGH_BITS : pass == 1 ? KV_SELECT_LOW_BITS : 0;
}

/* The position of the lowest bit that earlier passes have found: a pass counts sort keys that
 * equal the bound from there up.  32 in the first pass, which counts all. */
static inline unsigned kv_select_above(uint32_t pass)
{
    return pass == 0 ? 32 : kv_select_shift(pass - 1);
}

static inline uint32_t kv_select_mask(uint32_t pass)
{
    return pass == 2 ? (1u << KV_SELECT_LOW_BITS) - 1 : (1u << KV_SELECT_HIGH_BITS) - 1;
}

#endif
