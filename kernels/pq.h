/* pq.h - product quantization of keys: its shape, and lookup tables of queries.
 *
 * A key of d elements is cut into m subspaces of d / m; in each it is named by the nearest of
 * 2^bits centroids (PQCache, section 3.2; Jegou et al. 2011).  A query's score of a key is the
 * sum, over the subspaces, of the inner products with those centroids: a table lookup each.
 * kmeans.h makes centroids and codes, pq_tiles.h looks them up.
 *
 *   centroids     float (m, d / m, 2^bits): one dimension of all centroids after the other, so
 *                 that a vector register holds centroids and nothing is ever summed across it
 *   table         float (m, 2^bits): inner products of one query with all centroids
 *
 * Numerical contract, the same in every instruction set, to the bit:
 *   inner product       acc = 0;              acc = fma(x[i], c[i], acc),  i ascending
 *   score               table[0][code 0] + table[1][code 1] + ..., left to right
 *
 * (Which NaN a NaN is, is left open.)
 *
 * Nothing is checked: a shape is valid and codes are below 2^bits.  Codes that came from a file
 * or a peer are the caller's to check, once, before they are looked up.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Pointers need the alignment
 * of their type only.  What is read and what is written do not overlap.
 */
#ifndef KV_KERNELS_PQ_H
#define KV_KERNELS_PQ_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KV_PQ_TILE = 128, /* rows of a tile: a block's */
    KV_PQ_SUBSPACES_MAX = 16,
    KV_PQ_BITS_MAX = 8,
};

static_assert(KV_PQ_BITS_MAX <= 8, "a code is a byte");

struct kv_pq_shape {
    uint32_t d;    /* elements of a key, at least 1 */
    uint32_t m;    /* subspaces, 1..KV_PQ_SUBSPACES_MAX; divides d */
    uint32_t bits; /* of a code, 1..KV_PQ_BITS_MAX */
};

bool kv_pq_shape_valid(const struct kv_pq_shape *shape);

static inline size_t kv_pq_n_centroids(const struct kv_pq_shape *shape)
{
    return (size_t)1 << shape->bits;
}

/* Elements of a table, of half squares, of counts. */
static inline size_t kv_pq_table_size(const struct kv_pq_shape *shape)
{
    return shape->m << shape->bits;
}

/* Elements of centroids, of sums. */
static inline size_t kv_pq_centroids_size(const struct kv_pq_shape *shape)
{
    return (size_t)shape->d << shape->bits;
}

/* queries (n_queries, d) -> ret_tables (n_queries, m, 2^bits) */
void kv_pq_tables(const struct kv_pq_shape *shape,
                  const float *centroids,
                  const float *queries,
                  size_t n_queries,
                  float *ret_tables);

/* One implementation of the family; functions as above.  Slowest first: the last one that this
 * CPU supports is used. */
struct kv_pq_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    void (*tables)(const struct kv_pq_shape *shape,
                   const float *centroids,
                   const float *queries,
                   size_t n_queries,
                   float *ret_tables);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_pq_kernels *kv_pq_kernels_at(unsigned i);

#endif
