/* select_passes.h - private to kernels/: what select.c and select_avx2.c have in common.
 *
 *   choice   the sort key of the k-th largest score, found by its highest 11 bits, the next 11,
 *            the last 10: each time the sort keys that agree so far are counted by their next
 *            bits
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_SELECT_PASSES_H
#define KV_KERNELS_SELECT_PASSES_H

#include "kernels/select.h"

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

/* 1.5 * 2^(52 - KV_EXP_SUM_BITS): a double between this and a third more has units of
 * 2^-KV_EXP_SUM_BITS in its last bit. */
#define KV_EXP_SUM_ROUNDER (1.5 * ((uint64_t)1 << (52 - KV_EXP_SUM_BITS)))

enum {
    KV_SELECT_HIGH_BITS = 11, /* of a sort key, the first pass's */
    KV_SELECT_LOW_BITS = 10,
};

static_assert(KV_TOPK_BINS == 1 << KV_SELECT_HIGH_BITS, "a bin for each value of a pass");
static_assert(KV_TOPK_PASSES == 3 && 2 * KV_SELECT_HIGH_BITS + KV_SELECT_LOW_BITS == 32,
              "the passes are all bits");

/* The bits of a sort key that a pass counts by. */
static inline unsigned kv_select_shift(uint32_t pass)
{
    return pass == 0 ? 32 - KV_SELECT_HIGH_BITS : pass == 1 ? KV_SELECT_LOW_BITS : 0;
}

/* Bits above those, which agree with the bound; 32 in the first pass. */
static inline unsigned kv_select_above(uint32_t pass)
{
    return pass == 0 ? 32 : kv_select_shift(pass - 1);
}

static inline uint32_t kv_select_mask(uint32_t pass)
{
    return pass == 2 ? (1u << KV_SELECT_LOW_BITS) - 1 : (1u << KV_SELECT_HIGH_BITS) - 1;
}

#endif
