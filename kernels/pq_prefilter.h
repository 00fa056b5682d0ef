/* pq_prefilter.h - the k best rows by exact score, without computing most exact scores: rounded
 * sums (pq_tiles.h) show which rows are among the k best, which are not, and which few are
 * open.
 *
 * Let T be the k-th largest sum.  At most k - 1 rows are above it, so that a row whose sum is
 * more than `margin` above T has fewer than k rows that can be better; and at least k rows are
 * at T or above, all of them better than a row whose sum is more than `margin` below.  What is
 * between is open: its exact scores decide, ties going to the lower row.
 *
 * Every instruction set gives the same rows.  Threads: pure functions.  Memory: the caller's;
 * nothing is kept.  Pointers need the alignment of their type only.  What is read and what is
 * written do not overlap.
 */
#ifndef KV_KERNELS_PQ_PREFILTER_H
#define KV_KERNELS_PQ_PREFILTER_H

#include "kernels/pq_tiles.h"

/* Rows, ascending, of n < 2^32 sums, 1 <= k <= n; returns how many are open.
 *   ret_accepted  room for k + 8 of them; *ret_n_accepted are there
 *   ret_undecided  room for n + 8 of them */
size_t kv_sieve8(const uint8_t *sums,
                 size_t n,
                 size_t k,
                 uint32_t margin,
                 uint32_t *ret_accepted,
                 size_t *ret_n_accepted,
                 uint32_t *ret_undecided);
size_t kv_sieve16(const uint16_t *sums,
                  size_t n,
                  size_t k,
                  uint32_t margin,
                  uint32_t *ret_accepted,
                  size_t *ret_n_accepted,
                  uint32_t *ret_undecided);

/* All of it for one query: the min(k, n) best of the first n rows of tiles, ascending, by the
 * scores of `table`.  Where rounding says nothing, all rows are scored exactly.
 *   scratch      kv_tiles_top_bytes(n), aligned as a float
 *   ret_rows     room for k + 8
 *   ret_n_exact  rows whose exact scores were needed; may be NULL
 * Returns how many. */
size_t kv_tiles_top_bytes(size_t n);
size_t kv_tiles_top(const struct kv_pq_shape *shape,
                    const float *table,
                    const uint8_t *const *tiles,
                    size_t n,
                    size_t k,
                    void *scratch,
                    uint32_t *ret_rows,
                    size_t *ret_n_exact);

/* One implementation of the family; functions as above.  Slowest first: the last one that this
 * CPU supports is used. */
struct kv_pq_prefilter_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    size_t (*sieve8)(const uint8_t *sums,
                     size_t n,
                     size_t k,
                     uint32_t margin,
                     uint32_t *ret_accepted,
                     size_t *ret_n_accepted,
                     uint32_t *ret_undecided);
    size_t (*sieve16)(const uint16_t *sums,
                      size_t n,
                      size_t k,
                      uint32_t margin,
                      uint32_t *ret_accepted,
                      size_t *ret_n_accepted,
                      uint32_t *ret_undecided);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_pq_prefilter_kernels *kv_pq_prefilter_kernels_at(unsigned i);

#endif
