/* pq.h - product quantization of keys: its shape, and lookup tables of queries.
 *
 * A key of d elements is divided into m subspaces of d / m elements (FAISS calls m "M" and d /
 * m "dsub").  In each, its code is the number of the nearest of 2^bits centroids (PQCache,
 * section 3.2; Jegou et al., Product Quantization for Nearest Neighbor Search, 2011).  The
 * score of a key for a query is the sum, over the subspaces, of the query's inner products with
 * those centroids: one table lookup per subspace.  kmeans.h computes centroids and codes;
 * pq_tiles.h and pq_cells.h look them up.
 *
 *   centroids     float (m, d / m, 2^bits): one dimension of all centroids after the other, so
 *                 that a vector register holds centroids and nothing is ever summed across it
 *   table         float (m, 2^bits): inner products of one query with all centroids
 *
 * Numerical contract, the same in every instruction set, to the bit:
 *   inner product       acc = 0;              acc = fma(x[i], c[i], acc),  i ascending
 *   score               table[0][code 0] + table[1][code 1] + ..., left to right
 *
 * The payload of a NaN is not specified.
 *
 * Shapes must be valid and codes below 2^bits.  The caller checks codes from a file or a peer
 * once, before they are looked up.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Pointers need the alignment
 * of their type only.  Inputs and outputs must not overlap.
 */
#ifndef KV_KERNELS_PQ_H
#define KV_KERNELS_PQ_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KV_PQ_TILE = 128, /* rows of a tile; a block has as many */
    KV_PQ_SUBSPACES_MAX = 16,
    KV_PQ_BITS_MAX = 8,
};

static_assert(KV_PQ_BITS_MAX <= 8, "a code is a byte");

struct kv_pq_shape {
    uint32_t d;    /* elements of a key, at least 1 */
    uint32_t m;    /* subspaces, 1..KV_PQ_SUBSPACES_MAX; divides d */
    uint32_t bits; /* of a code, 1..KV_PQ_BITS_MAX */
};

/* Returns whether d, m and bits are in their ranges and m divides d. */
bool kv_pq_shape_valid(const struct kv_pq_shape *shape);

static inline size_t kv_pq_n_centroids(const struct kv_pq_shape *shape)
{
    return (size_t)1 << shape->bits;
}

/* The number of elements of a table, and of half_sq_norms and counts (kmeans.h): (m,
 * 2^bits). */
static inline size_t kv_pq_table_size(const struct kv_pq_shape *shape)
{
    return shape->m << shape->bits;
}

/* The number of elements of centroids, and of sums (kmeans.h): (m, d / m, 2^bits). */
static inline size_t kv_pq_centroids_size(const struct kv_pq_shape *shape)
{
    return (size_t)shape->d << shape->bits;
}

/* Computes the tables of queries (n_queries, d) -> ret_tables (n_queries, m, 2^bits). */
void kv_pq_tables(const struct kv_pq_shape *shape,
                  const float *centroids,
                  const float *queries,
                  size_t n_queries,
                  float *ret_tables);

/* One implementation of the family; functions as above.  The last one in the list that this CPU
 * supports is used. */
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
