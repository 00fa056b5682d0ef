/* pq_cells_prefix.h - private to kernels/: scores of cells from scores of their prefixes, for
 * pq_cells.c, pq_cells_avx2.c and pq_cells_avx512.c.
 *
 * A prefix is all codes of a cell except the last one.  The cells of one prefix have
 * consecutive numbers, so that a cell's score is its prefix's score, summed once, plus one
 * table entry.  This keeps the order of sums of pq.h.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_PQ_CELLS_PREFIX_H
#define KV_KERNELS_PQ_CELLS_PREFIX_H

#include "kernels/pq_cells.h"

#include <string.h>

enum {
    KV_CELLS_PREFIXES_MAX = KV_CELLS_MAX / 2, /* the last code has at least one bit */
};

/* Returns the scores of all prefixes, in the order of their numbers: a pointer into the table
 * where there are two subspaces, else `room`.  With one subspace the only prefix is empty and
 * its score is -0, because -0 + x is x for every x, also for x = -0. */
static inline const float *kv_cells_prefix_scores(const struct kv_pq_shape *shape,
                                                  const float *table,
                                                  float room[KV_CELLS_PREFIXES_MAX])
{
    const size_t n_centroids = kv_pq_n_centroids(shape);
    size_t n = n_centroids;

    if (shape->m == 1)
        room[0] = -0.0f;
    if (shape->m == 2)
        return table;
    if (shape->m > 2)
        memcpy(room, table, n_centroids * sizeof(*table));
    /* Adds one subspace at a time.  From the last prefix down, because each is replaced by
     * n_centroids longer ones, which lie at or after its own place. */
    for (size_t j = 1; j + 1 < shape->m; j++, n *= n_centroids)
        for (size_t i = n; i-- > 0;) {
            const float before = room[i];

            for (size_t c = 0; c < n_centroids; c++)
                room[i * n_centroids + c] = before + table[j * n_centroids + c];
        }
    return room;
}

/* A mask of the n cells from `cell` on: bit i says that cell + i is full.  n is a power of two,
 * at most 32, and divides `cell`, so the cells are in one word. */
static inline unsigned kv_cells_full(const struct kv_cells *cells, size_t cell, size_t n)
{
    return (unsigned)(cells->full[cell / 64] >> cell % 64) & (0xffffffffu >> (32 - n));
}

#endif
