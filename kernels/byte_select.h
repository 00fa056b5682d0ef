/* byte_select.h - the k largest of many bytes: rounded scores of rows (pq_tiles.h).
 *
 * A byte has eight bits, so eight counts find the k-th largest of any number of them:
 *
 *     for (bit = 128; bit > 0; bit /= 2)
 *         if (kv_bytes_count_from(values, n, bound | bit) >= k)     of all pieces, added
 *             bound |= bit;
 *     ties = k - (bound < 255 ? kv_bytes_count_from(values, n, bound + 1) : 0);
 *     kv_bytes_collect(values, n, bound, &ties, base, ...);         piece by piece, in order
 *
 * A count reads from L2 about as fast as that delivers, so this beats a histogram, whose
 * counters take a byte at a time.
 *
 * Every instruction set gives the same results.  n < 2^32.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Pointers need the alignment
 * of their type only.  Inputs and outputs must not overlap.
 */
#ifndef KV_KERNELS_BYTE_SELECT_H
#define KV_KERNELS_BYTE_SELECT_H

#include "kernels/select.h"

/* Returns how many of values (n) are at least `least`. */
size_t kv_bytes_count_from(const uint8_t *values, size_t n, uint8_t least);

/* Adds to bins (256) how often each value occurs among values (n). */
void kv_bytes_histogram(const uint8_t *values, size_t n, uint32_t bins[256]);

/* Collects base + i for each of values (n) above the bound, and for the first *ties of those
 * equal to it, ascending; subtracts from *ties those it collected.  ret_indices has room for
 * KV_TOPK_SPARE more than are collected.  Returns their number. */
size_t kv_bytes_collect(const uint8_t *values,
                        size_t n,
                        uint8_t bound,
                        uint64_t *ties,
                        uint32_t base,
                        uint32_t *ret_indices);

/* One implementation of the family; functions as above.  The last one in the list that this CPU
 * supports is used. */
struct kv_bytes_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    size_t (*count_from)(const uint8_t *values, size_t n, uint8_t least);
    size_t (*collect)(const uint8_t *values,
                      size_t n,
                      uint8_t bound,
                      uint64_t *ties,
                      uint32_t base,
                      uint32_t *ret_indices);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_bytes_kernels *kv_bytes_kernels_at(unsigned i);

#endif
