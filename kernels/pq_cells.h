/* pq_cells.h - the rows of a chapter by cell: rows with the same codes in all subspaces have
 * the same score, so cells are scored, weighted and selected instead of rows (the inverted
 * lists of an inverted multi-index; Babenko and Lempitsky 2012).
 *
 * With few rows, or clustered rows, most cells are empty.  Cells that are not are called full;
 * only these are kept, scored and counted.  They are numbered from 0 in the order of their cell
 * numbers; such a number is an item of select.h.
 *
 * A cell's number is its codes, with subspace 0's in the highest bits (kv_tile_cells()).  Its
 * score is that of pq.h, and select.h treats an item of c rows as c rows with one score, so
 * cells and tiles select the same rows.
 *
 * Lists stay in memory for a long time, and a bit of them may flip.  Functions that read lists
 * then count or mark wrong rows, but they access nothing outside of the arrays, and row numbers
 * stay below n_rows.
 *
 * Lists are built from tiles in about 2 ns a row, so they need not be stored elsewhere.
 *
 * Every instruction set gives the same bits.  Threads: pure functions.  Memory: the caller's;
 * nothing is kept.  Inputs and outputs must not overlap.
 */
#ifndef KV_KERNELS_PQ_CELLS_H
#define KV_KERNELS_PQ_CELLS_H

#include "kernels/pq_tiles.h"

#include <assert.h>

enum {
    KV_CELLS_BITS_MAX = 12, /* of all codes of a row */
    KV_CELLS_MAX = 1 << KV_CELLS_BITS_MAX,
};

static_assert(KV_CELLS_BITS_MAX <= 16, "a cell's number is 16 bits");

/* Returns the number of cells, 2^(m * bits); 0 if that is more than KV_CELLS_MAX. */
static inline uint32_t kv_cells_n(const struct kv_pq_shape *shape)
{
    return shape->m * shape->bits <= KV_CELLS_BITS_MAX ? 1u << shape->m * shape->bits : 0;
}

/* Returns the number of 64-bit words of the bit set `full`. */
static inline uint32_t kv_cells_n_words(const struct kv_pq_shape *shape)
{
    return (kv_cells_n(shape) + 63) / 64;
}

/* The inverted lists of a chapter: views of one piece of memory, which the caller owns. */
struct kv_cells {
    uint64_t *full;    /* (n_words) bit c: cell c has rows */
    uint32_t *before;  /* (n_words + 1) number of full cells before each word; last: of all */
    uint32_t *offsets; /* (n_cells + 1) rows of full cell i are offsets[i] ... offsets[i+1]-1 */
    uint32_t *rows;    /* (n_rows) row numbers, ascending in each cell */
    uint32_t n_rows, n_cells;
};

/* Returns the number of uint32 in the memory of kv_cells_at() that come before `rows`. */
static inline size_t kv_cells_head(const struct kv_pq_shape *shape)
{
    return 3 * (size_t)kv_cells_n_words(shape) + kv_cells_n(shape) + 2;
}

/* Returns the views of `memory` (kv_cells_head() + n_rows), which has the alignment of a uint64
 * and must stay as long as they are used. */
static inline struct kv_cells
kv_cells_at(const struct kv_pq_shape *shape, uint32_t *memory, uint32_t n_rows)
{
    uint32_t *before = memory + 2 * (size_t)kv_cells_n_words(shape);
    uint32_t *offsets = before + kv_cells_n_words(shape) + 1;

    return (struct kv_cells){(uint64_t *)(void *)memory,      before, offsets,
                             offsets + kv_cells_n(shape) + 1, n_rows, kv_cells_n(shape)};
}

/* Returns the number of full cells. */
static inline uint32_t kv_cells_n_full(const struct kv_pq_shape *shape,
                                       const struct kv_cells *cells)
{
    const uint32_t n = cells->before[kv_cells_n_words(shape)];

    return n < cells->n_cells ? n : cells->n_cells;
}

/* Returns the item of a full cell: its position among the full cells. */
static inline uint32_t kv_cells_item(const struct kv_cells *cells, uint32_t cell)
{
    const uint64_t below = ((uint64_t)1 << cell % 64) - 1;
    const uint32_t word = cell % cells->n_cells / 64;
    const uint32_t item =
        cells->before[word] + (uint32_t)__builtin_popcountll(cells->full[word] & below);

    return item < cells->n_cells ? item : 0;
}

/* Build lists from tiles by a counting sort.  Set the head (kv_cells_head()) to 0, call
 * kv_cells_count() for every tile, kv_cells_sum() once, kv_cells_place() for every tile in
 * order, and kv_cells_end() once.  A tile has n rows, and `row` is the number of its first one.
 * Until kv_cells_end(), `offsets` is indexed by cell number, not by item. */
void kv_cells_count(const struct kv_pq_shape *shape,
                    const uint8_t *tile,
                    size_t n,
                    const struct kv_cells *cells);
void kv_cells_sum(const struct kv_pq_shape *shape, const struct kv_cells *cells);
void kv_cells_place(const struct kv_pq_shape *shape,
                    const uint8_t *tile,
                    size_t n,
                    uint32_t row,
                    const struct kv_cells *cells);
void kv_cells_end(const struct kv_pq_shape *shape, const struct kv_cells *cells);

/* Counts the rows of each full cell that are in [begin, end) -> ret_counts (n_full). */
void kv_cells_counts(const struct kv_pq_shape *shape,
                     const struct kv_cells *cells,
                     uint32_t begin,
                     uint32_t end,
                     uint32_t *ret_counts);

/* Scores all full cells: tables (n_queries, m, 2^bits) -> ret_scores (n_queries, n_full),
 * scores_stride apart. */
void kv_cells_score(const struct kv_pq_shape *shape,
                    const float *tables,
                    size_t n_queries,
                    const struct kv_cells *cells,
                    float *ret_scores,
                    size_t scores_stride);

/* Sets the bits of the rows of one item that are in [begin, end): row r is bit `first` + r.
 * Returns the number of these rows. */
size_t kv_cells_mark(const struct kv_cells *cells,
                     uint32_t item,
                     uint32_t begin,
                     uint32_t end,
                     uint64_t first,
                     uint64_t *bits);

/* Returns the numbers of the bits that are set in [begin, end), ascending, at most `max` of
 * them, in ret_numbers; the return value is their count.  Clears all words of [begin, end),
 * including bits after `end` in the last word.  `begin` is a multiple of 64. */
size_t
kv_bits_take(uint64_t *bits, size_t begin, size_t end, size_t max, uint32_t *ret_numbers);

/* One implementation of the family; functions as above.  The last one in the list that this CPU
 * supports is used. */
struct kv_cells_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    void (*score)(const struct kv_pq_shape *shape,
                  const float *tables,
                  size_t n_queries,
                  const struct kv_cells *cells,
                  float *ret_scores,
                  size_t scores_stride);
    /* ret_lengths[i] = offsets[i + 1] - offsets[i], i < n */
    void (*lengths)(const uint32_t *offsets, size_t n, uint32_t *ret_lengths);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_cells_kernels *kv_cells_kernels_at(unsigned i);

#endif
