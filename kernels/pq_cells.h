/* pq_cells.h - the rows of a chapter by cell: rows with the same codes in all subspaces have
 * the same score, so cells are scored, weighted and selected instead of rows (the inverted
 * lists of an inverted multi-index; Babenko and Lempitsky 2012).
 *
 * With few rows, or clustered rows, most cells are empty.  Only the others are kept, scored and
 * counted, as full cells, numbered from 0 in their order.
 *
 * A cell's number is the codes, subspace 0's in its highest bits (kv_tile_cells).  Its score is
 * that of pq.h, and select.h gives items of c rows what it gives c rows with one score: cells
 * and tiles select the same rows.
 *
 * Lists lie in memory for long, and a bit of them may flip.  Then other rows are counted, or
 * marked, than those of the cell; but nothing is read or written outside of the arrays, and row
 * numbers stay below n_rows.
 *
 * Lists are made from tiles in some 2 ns a row, so that they need not be kept anywhere else.
 *
 * Every instruction set gives the same bits.  Threads: pure functions.  Memory: the caller's;
 * nothing is kept.  What is read and what is written do not overlap, but where said.
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

/* Cells of the shape; 0: too many. */
static inline uint32_t kv_cells_n(const struct kv_pq_shape *shape)
{
    return shape->m * shape->bits <= KV_CELLS_BITS_MAX ? 1u << shape->m * shape->bits : 0;
}

/* Words of 64 cells. */
static inline uint32_t kv_cells_n_words(const struct kv_pq_shape *shape)
{
    return (kv_cells_n(shape) + 63) / 64;
}

/* The lists of a chapter, in one piece of memory. */
struct kv_cells {
    uint64_t *full;    /* (n_words) bit c: cell c has rows */
    uint32_t *before;  /* (n_words + 1) full cells before each word's; the last: all of them */
    uint32_t *offsets; /* (n_cells + 1) rows of full cell i are offsets[i] ... offsets[i+1]-1 */
    uint32_t *rows;    /* (n_rows) numbers of rows, in each cell ascending */
    uint32_t n_rows, n_cells;
};

/* What kv_cells_at() is about without its rows, in uint32. */
static inline size_t kv_cells_head(const struct kv_pq_shape *shape)
{
    return 3 * (size_t)kv_cells_n_words(shape) + kv_cells_n(shape) + 2;
}

/* The memory (kv_cells_head() + n_rows), as aligned as a uint64, as lists. */
static inline struct kv_cells
kv_cells_at(const struct kv_pq_shape *shape, uint32_t *memory, uint32_t n_rows)
{
    uint32_t *before = memory + 2 * (size_t)kv_cells_n_words(shape);
    uint32_t *offsets = before + kv_cells_n_words(shape) + 1;

    return (struct kv_cells){(uint64_t *)(void *)memory,      before, offsets,
                             offsets + kv_cells_n(shape) + 1, n_rows, kv_cells_n(shape)};
}

/* Full cells. */
static inline uint32_t kv_cells_n_full(const struct kv_pq_shape *shape,
                                       const struct kv_cells *cells)
{
    const uint32_t n = cells->before[kv_cells_n_words(shape)];

    return n < cells->n_cells ? n : cells->n_cells;
}

/* The number of a cell, which is full, among these. */
static inline uint32_t kv_cells_item(const struct kv_cells *cells, uint32_t cell)
{
    const uint64_t below = ((uint64_t)1 << cell % 64) - 1;
    const uint32_t word = cell % cells->n_cells / 64;
    const uint32_t item =
        cells->before[word] + (uint32_t)__builtin_popcountll(cells->full[word] & below);

    return item < cells->n_cells ? item : 0;
}

/* From tiles to lists:
 *
 *     the head is 0;  kv_cells_count() every tile;  kv_cells_sum();
 *     kv_cells_place() every tile, in order;  kv_cells_end();
 *
 * where a tile has n rows, the first of which is row number `row`.  Until the end offsets are
 * those of all cells. */
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

/* How many rows of each full cell are in [begin, end). */
void kv_cells_counts(const struct kv_pq_shape *shape,
                     const struct kv_cells *cells,
                     uint32_t begin,
                     uint32_t end,
                     uint32_t *ret_counts);

/* Scores of all full cells: tables (n_queries, m, 2^bits) -> ret_scores (n_queries, n_full),
 * scores_stride apart. */
void kv_cells_score(const struct kv_pq_shape *shape,
                    const float *tables,
                    size_t n_queries,
                    const struct kv_cells *cells,
                    float *ret_scores,
                    size_t scores_stride);

/* Sets the bits of the full cell's rows that are in [begin, end): row r is bit `first` + r.
 * Returns how many there are. */
size_t kv_cells_mark(const struct kv_cells *cells,
                     uint32_t item,
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
    void (*score)(const struct kv_pq_shape *shape,
                  const float *tables,
                  size_t n_queries,
                  const struct kv_cells *cells,
                  float *ret_scores,
                  size_t scores_stride);
    /* Lengths of n lists. */
    void (*lengths)(const uint32_t *offsets, size_t n, uint32_t *ret_lengths);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_cells_kernels *kv_cells_kernels_at(unsigned i);

#endif
