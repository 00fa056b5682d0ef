/* cells.h - the rows of a chapter by cell: rows with the same codes in all subspaces have the
 * same score, so that what is scored, weighed and chosen are the cells (the inverted lists of
 * an inverted multi-index; Babenko and Lempitsky 2012).
 *
 *   offsets  uint32 (n_cells + 1): rows of cell c are rows[offsets[c]] ... rows[offsets[c+1]-1]
 *   rows     uint32 (n_rows): numbers of rows, in each cell ascending
 *   counts   uint32 (n_cells): rows of a cell that count
 *
 * A cell's number is the codes, subspace 0's in its highest bits (kv_tile_cells).  Its score is
 * that of pq.h, and select.h gives items of c rows what it gives c rows with one score: cells
 * and tiles choose the same rows.
 *
 * Lists are made from tiles in some 2 ns a row, so that they need not be kept anywhere else.
 *
 * Every instruction set gives the same bits.  Threads: pure functions.  Memory: the caller's;
 * nothing is kept.  What is read and what is written do not overlap, but where said.
 */
#ifndef KV_CELLS_H
#define KV_CELLS_H

#include "tile.h"

enum {
    KV_CELLS_BITS_MAX = 12, /* of all codes of a row */
    KV_CELLS_MAX = 1 << KV_CELLS_BITS_MAX,
};

/* Cells of the shape; 0: too many. */
static inline uint32_t kv_cells_n(const struct kv_pq_shape *shape)
{
    return shape->m * shape->bits <= KV_CELLS_BITS_MAX ? 1u << shape->m * shape->bits : 0;
}

/* From tiles to lists:
 *
 *     offsets are 0;  kv_cells_count() every tile;  kv_cells_sum();
 *     kv_cells_place() every tile, in order;  kv_cells_end();
 *
 * where a tile has n rows, the first of which is row number `row`. */
void kv_cells_count(const struct kv_pq_shape *shape,
                    const uint8_t *tile,
                    size_t n,
                    uint32_t *offsets);
void kv_cells_sum(const struct kv_pq_shape *shape, uint32_t *offsets);
void kv_cells_place(const struct kv_pq_shape *shape,
                    const uint8_t *tile,
                    size_t n,
                    uint32_t row,
                    uint32_t *offsets,
                    uint32_t *rows);
void kv_cells_end(const struct kv_pq_shape *shape, uint32_t *offsets);

/* How many rows of each cell are in [begin, end). */
void kv_cells_counts(const struct kv_pq_shape *shape,
                     const uint32_t *offsets,
                     const uint32_t *rows,
                     uint32_t begin,
                     uint32_t end,
                     uint32_t *ret_counts);

/* Scores of all cells: table (m, 2^bits) -> ret_scores (n_cells). */
void kv_cells_score(const struct kv_pq_shape *shape, const float *table, float *ret_scores);

/* Sets the bits of the cell's rows that are in [begin, end): row r is bit `first` + r.
 * Returns how many there are. */
size_t kv_cells_mark(const uint32_t *offsets,
                     const uint32_t *rows,
                     uint32_t cell,
                     uint32_t begin,
                     uint32_t end,
                     uint64_t first,
                     uint64_t *bits);

/* The numbers of the bits set in [begin, end), ascending, at most `max` of them; all bits of
 * the words that were looked at are 0 then.  begin is a multiple of 64.  Returns how many. */
size_t
kv_bits_take(uint64_t *bits, size_t begin, size_t end, size_t max, uint32_t *ret_numbers);

/* One implementation of the family; functions as above.  Slowest first: the last one that this
 * CPU supports is used. */
struct kv_cells_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    void (*score)(const struct kv_pq_shape *shape, const float *table, float *ret_scores);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_cells_kernels *kv_cells_kernels_at(unsigned i);

#endif
