/* pq_prefilter.h - selects the k best rows by exact score from codes, computing few exact
 * scores: rounded sums (pq_tiles.h) show which rows are among the k best (accepted), which are
 * not, and which few are undecided.
 *
 * Let T be the k-th largest rounded sum.  At most k - 1 rows have a sum above T, so a row whose
 * sum is more than `margin` above T has fewer than k rows that can be better: it is accepted.
 * At least k rows have a sum of T or more, and all of these are better than a row whose sum is
 * more than `margin` below T: it is dropped.  The rows between are undecided; exact scores
 * decide, and ties go to the lower row.
 *
 * Every instruction set gives the same rows.  Threads: pure functions.  Memory: the caller's;
 * nothing is kept.  Pointers need the alignment of their type only.  Inputs and outputs must
 * not overlap.
 */
#ifndef KV_KERNELS_PQ_PREFILTER_H
#define KV_KERNELS_PQ_PREFILTER_H

#include "kernels/pq_tiles.h"

/* Selects the min(k, n) best of the first n rows of tiles for one query, ascending.  If
 * rounding cannot separate the rows, all are scored exactly.  Returns the number of rows
 * selected.
 *   table        (m, 2^bits)
 *   scratch      kv_tiles_top_bytes(n) bytes, with the alignment of a float
 *   ret_rows     (k + KV_TOPK_SPARE), of select.h
 *   ret_n_exact  the number of rows scored exactly; may be NULL */
size_t kv_tiles_top_bytes(size_t n);
size_t kv_tiles_top(const struct kv_pq_shape *shape,
                    const float *table,
                    const uint8_t *const *tiles,
                    size_t n,
                    size_t k,
                    void *scratch,
                    uint32_t *ret_rows,
                    size_t *ret_n_exact);

/* One implementation of the family.  The last one in the list that this CPU supports is used.
 *
 * Its functions divide rows 0 ... n - 1 by their rounded sums (n), n < 2^32, for the best k,
 * 1 <= k <= n.  They return rows in ascending order, and the number of undecided rows.
 *   margin         of the table's rounding (struct kv_pq_table_rounding)
 *   ret_accepted   (k + 8), of which *ret_n_accepted are set; vectors may overwrite the others
 *   ret_undecided  (n + 8) */
struct kv_pq_prefilter_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    size_t (*prefilter8)(const uint8_t *sums,
                         size_t n,
                         size_t k,
                         uint32_t margin,
                         uint32_t *ret_accepted,
                         size_t *ret_n_accepted,
                         uint32_t *ret_undecided);
    size_t (*prefilter16)(const uint16_t *sums,
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
