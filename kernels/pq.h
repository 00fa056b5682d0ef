/* pq.h - product quantisation of keys: centroids, codes, and scores from codes.
 *
 * A key of d elements is cut into m subspaces of d / m; in each it is named by the nearest of
 * 2^bits centroids (PQCache, section 3.2; Jegou et al. 2011).  A query's score of a key is the
 * sum, over the subspaces, of the inner products with those centroids: a table look-up each.
 *
 *   centroids     float (m, d / m, 2^bits): one dimension of all centroids after the other, so
 *                 that a vector register holds centroids and nothing is ever summed across it
 *   half squares  float (m, 2^bits): |centroid|^2 / 2
 *   tile          uint8 (m, KV_PQ_TILE): the codes of KV_PQ_TILE rows, subspace after subspace
 *   table         float (m, 2^bits): inner products of one query with all centroids
 *
 * Numerical contract, the same in every instruction set, to the bit:
 *   inner product       acc = 0;              acc = fma(x[i], c[i], acc),  i ascending
 *   distance            acc = half_square;    acc = fma(-x[i], c[i], acc), i ascending
 *   nearest             least distance, ties to the lower code; a NaN is never the least, and
 *                       where no distance is below +inf, it is code 0
 *   score               table[0][code 0] + table[1][code 1] + ..., left to right
 *   sums, counts        rows added one after the other, ascending
 *   half square         acc = 0; acc = fma(c[i], c[i], acc), i ascending; acc / 2
 *   mean                sum / count, in fp32
 * (Which NaN a NaN is, is left open.)
 *
 * Nothing is checked: a shape is valid and codes are below 2^bits.  Codes that came from a file
 * or a peer are the caller's to check, once, before they are looked up.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Pointers need the alignment
 * of their type only.  What is read and what is written do not overlap.
 */
#ifndef KV_PQ_H
#define KV_PQ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KV_PQ_TILE = 128, /* rows of a tile: a block's */
    KV_PQ_SUBSPACES_MAX = 16,
    KV_PQ_BITS_MAX = 8,
};

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

/* Copies a key (d) to be centroid number `centroid` of every subspace. */
void kv_pq_set_centroid(const struct kv_pq_shape *shape,
                        float *centroids,
                        uint32_t centroid,
                        const float *key);

void kv_pq_half_squares(const struct kv_pq_shape *shape,
                        const float *centroids,
                        float *ret_half_squares);

/* The nearest centroids of rows: keys (n, d) -> codes of row i in subspace j at
 * ret_codes[j * codes_stride + i]. */
void kv_pq_encode(const struct kv_pq_shape *shape,
                  const float *centroids,
                  const float *half_squares,
                  const float *keys,
                  size_t n,
                  uint8_t *ret_codes,
                  size_t codes_stride);

/* One part of Lloyd's step: adds keys (n, d) to the sums of the centroids that their codes
 * name.
 *   sums    float (m, 2^bits, d / m), not transposed: a row is added to one of them
 *   counts  uint32 (m, 2^bits) */
void kv_pq_accumulate(const struct kv_pq_shape *shape,
                      const float *keys,
                      size_t n,
                      const uint8_t *codes,
                      size_t codes_stride,
                      float *sums,
                      uint32_t *counts);

/* The other part: every centroid becomes the mean of its rows; one without rows stays.  Returns
 * the sum over all centroids of the squared distance that they moved, in double. */
double kv_pq_update(const struct kv_pq_shape *shape,
                    const float *sums,
                    const uint32_t *counts,
                    float *centroids);

/* query (d) -> table */
void kv_pq_table(const struct kv_pq_shape *shape,
                 const float *centroids,
                 const float *query,
                 float *ret_table);

/* Scores of the first n <= KV_PQ_TILE rows of a tile, for n_queries queries at once:
 *   tables      (n_queries, m, 2^bits)
 *   ret_scores  (n_queries, n), scores_stride apart */
void kv_pq_score(const struct kv_pq_shape *shape,
                 const float *tables,
                 size_t n_queries,
                 const uint8_t *tile,
                 size_t n,
                 float *ret_scores,
                 size_t scores_stride);

/* One implementation of the family; functions as above.  Slowest first: the last one that this
 * CPU supports is used. */
struct kv_pq_kernels {
    const char *name; /* "scalar", "avx2" */
    int (*supported)(void);
    void (*encode)(const struct kv_pq_shape *shape,
                   const float *centroids,
                   const float *half_squares,
                   const float *keys,
                   size_t n,
                   uint8_t *ret_codes,
                   size_t codes_stride);
    void (*accumulate)(const struct kv_pq_shape *shape,
                       const float *keys,
                       size_t n,
                       const uint8_t *codes,
                       size_t codes_stride,
                       float *sums,
                       uint32_t *counts);
    void (*table)(const struct kv_pq_shape *shape,
                  const float *centroids,
                  const float *query,
                  float *ret_table);
    void (*score)(const struct kv_pq_shape *shape,
                  const float *tables,
                  size_t n_queries,
                  const uint8_t *tile,
                  size_t n,
                  float *ret_scores,
                  size_t scores_stride);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_pq_kernels *kv_pq_kernels_at(unsigned i);

#endif
