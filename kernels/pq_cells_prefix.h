/* pq_cells_prefix.h - private to kernels/: what pq_cells.c, pq_cells_avx2.c and
 * pq_cells_avx512.c have in common.  A cell's score is that of its codes but the last one, plus
 * the last one's.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_PQ_CELLS_PREFIX_H
#define KV_KERNELS_PQ_CELLS_PREFIX_H

#include "kernels/pq_cells.h"

#include <string.h>

enum {
    KV_CELLS_PREFIXES_MAX = KV_CELLS_MAX / 2, /* a code has a bit at least */
};

/* Scores of all codes but the last one, with any number of them; of none: -0, to which what is
 * added stays what it is.  Returns where they are: in the table or in `room`. */
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
    /* One subspace more at a time, from the end: what is read is not yet written. */
    for (size_t j = 1; j + 1 < shape->m; j++, n *= n_centroids)
        for (size_t i = n; i-- > 0;) {
            const float before = room[i];

            for (size_t c = 0; c < n_centroids; c++)
                room[i * n_centroids + c] = before + table[j * n_centroids + c];
        }
    return room;
}

/* n <= 32 cells from `cell` on, a multiple of n, which is a power of two: bit i, cell + i is
 * full. */
static inline unsigned kv_cells_full(const struct kv_cells *cells, size_t cell, size_t n)
{
    return (unsigned)(cells->full[cell / 64] >> cell % 64) & (0xffffffffu >> (32 - n));
}

#endif
