/* kmeans.h - k-means for product quantization: trains centroids from keys, and encodes keys by
 * their nearest centroids.
 *
 * Lloyd's steps (PQCache, section 3.2): every row goes to its nearest centroid, every centroid
 * becomes the mean of its rows, in each subspace of the shape (pq.h) separately.
 *
 *   kv_kmeans_max_norm_sq()      inner product only: over all rows, before anything else
 *   kv_kmeans_set_centroid() for every centroid, then kv_kmeans_half_sq_norms()
 *   kv_kmeans_step()         over all rows, some at a time, in order: nearest and sums at once
 *   kv_kmeans_update()       after the last row; then from the first row on again
 *   kv_kmeans_encode()       codes of rows, against centroids that stay
 *
 * Training runs until kv_kmeans_update() returns a small number, or for a fixed number of
 * iterations; that is the caller's decision, as is the choice of the first centroids.
 *
 * The caller keeps the state between calls: a codebook, which codes refer to, and sums.
 *
 *   centroids     float (m, d / m, 2^bits): one dimension of all centroids after the other, so
 *                 that a vector register holds centroids and nothing is ever summed across it
 *   half_sq_norms  float (m, 2^bits): |centroid|^2 / 2
 *   augments      float (m, 2^bits), max_norm_sq float (m): for the inner product, see below
 *   sums          float (m, 2^bits, d / m), not transposed: a row is added to one of them
 *   counts        uint32 (m, 2^bits)
 *
 * Metrics.  A codebook without augments uses squared distance, the default of PQCache's code
 * (METRIC=euc).  With augments it uses the inner product, by that code's reduction (ip2l2):
 * each subvector x gets one more element, its augment sqrt(max_norm_sq - |x|^2), where
 * max_norm_sq is the largest |x|^2 of all rows, and these longer vectors are clustered by
 * squared distance.  The augment of a query is 0, so its inner products with centroids do not
 * change.  A centroid is the mean of its rows, its augment the mean of their augments.  Without
 * augments, if the nearest centroid were that of the largest inner product, a long centroid
 * would win rows of every direction.  With them all rows have the length sqrt(max_norm_sq),
 * means lie inside that ball, and |centroid|^2 / 2, which includes the augment, penalizes
 * length: no centroid grows beyond the rows, and centroids win rows by direction only.  A row
 * longer than max_norm_sq says (it came later) has an augment of 0.
 *
 * Empty centroids.  A centroid without rows splits the largest cluster (of equals the lower
 * code; it must have two rows or more), as FAISS splits a random one: it becomes that
 * cluster's mean with its elements multiplied by 1 + 2^-8 and 1 - 2^-8 in turn, and each is
 * counted as having half of the rows.  The next step gives it the rows on its side.  Unlike in
 * FAISS, the mean itself does not move: if all rows are equal, or there are fewer distinct rows
 * than centroids, it is exact and keeps its rows, and the other centroid is empty again.  If no
 * cluster can be split, the centroid keeps its position.
 *
 * Numbers that are not finite.  A row whose least distance is not finite (NaN or infinite
 * elements, overflow) gets a code but is added to no sum, so it does not affect other rows.  A
 * centroid that is not finite wins no row; one whose sum has overflowed counts as empty.
 *
 * Numerical contract, the same in every instruction set, to the bit:
 *   distance      acc = half square; acc = fma(-x's augment, c's augment, acc) if there are
 *                 any; acc = fma(-x[i], c[i], acc), i ascending
 *   nearest       least distance, ties to the lower code; a NaN is never the least, and where
 *                 no distance is below +inf, it is code 0
 *   sums, counts  rows added one after the other, ascending
 *   half square   acc = 0; acc = fma(c[i], c[i], acc), i ascending, its augment last; acc / 2
 *   |x|^2         in 16 lanes as exact_scores.h sums; max_norm_sq is the largest finite one, 0
 *                 of nothing
 *   augment       s = max_norm_sq - |x|^2; s > 0 ? sqrt(s) : 0
 *   mean          sum / count, in fp32
 * The payload of a NaN is not specified.
 *
 * Shapes must be valid (kv_pq_shape_valid()).
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Pointers need the alignment
 * of their type only.  Inputs and outputs must not overlap.
 */
#ifndef KV_KERNELS_KMEANS_H
#define KV_KERNELS_KMEANS_H

#include "kernels/pq.h"

struct kv_kmeans_codebook {
    float *centroids, *half_sq_norms;
    float *augments, *max_norm_sq; /* NULL: squared distance */
};

/* All 0 before the first row. */
struct kv_kmeans_sums {
    float *sums;
    uint32_t *counts;
    float *augments; /* (m, 2^bits), if the codebook has augments */
};

/* For the inner product: raises max_norm_sq (m), 0 before the first row, to the largest |x|^2
 * of keys (n, d) in each subspace. */
void kv_kmeans_max_norm_sq(const struct kv_pq_shape *shape,
                           const float *keys,
                           size_t n,
                           float *max_norm_sq);

/* Copies a key (d) to be centroid number `centroid` of every subspace. */
void kv_kmeans_set_centroid(const struct kv_pq_shape *shape,
                            const struct kv_kmeans_codebook *codebook,
                            uint32_t centroid,
                            const float *key);

/* Computes half_sq_norms from the centroids and their augments. */
void kv_kmeans_half_sq_norms(const struct kv_pq_shape *shape,
                             const struct kv_kmeans_codebook *codebook);

/* Finds the nearest centroids of keys (n, d).  The code of row i in subspace j is
 * ret_codes[j * codes_stride + i]. */
void kv_kmeans_encode(const struct kv_pq_shape *shape,
                      const struct kv_kmeans_codebook *codebook,
                      const float *keys,
                      size_t n,
                      uint8_t *ret_codes,
                      size_t codes_stride);

/* As kv_kmeans_encode(), and adds the rows to the sums of their centroids. */
void kv_kmeans_step(const struct kv_pq_shape *shape,
                    const struct kv_kmeans_codebook *codebook,
                    const float *keys,
                    size_t n,
                    uint8_t *ret_codes,
                    size_t codes_stride,
                    const struct kv_kmeans_sums *sums);

/* Sets every centroid to the mean of its rows, lets empty ones split others, computes
 * half_sq_norms, and clears sums and counts.  Returns how far centroids have moved: the sum,
 * over all centroids with rows, of the squared distance from the old position to the mean. */
double kv_kmeans_update(const struct kv_pq_shape *shape,
                        const struct kv_kmeans_codebook *codebook,
                        const struct kv_kmeans_sums *sums);

/* One implementation of the family; functions as above.  The last one in the list that this CPU
 * supports is used. */
struct kv_kmeans_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    void (*max_norm_sq)(const struct kv_pq_shape *shape,
                        const float *keys,
                        size_t n,
                        float *max_norm_sq);
    void (*half_sq_norms)(const struct kv_pq_shape *shape,
                          const struct kv_kmeans_codebook *codebook);
    void (*encode)(const struct kv_pq_shape *shape,
                   const struct kv_kmeans_codebook *codebook,
                   const float *keys,
                   size_t n,
                   uint8_t *ret_codes,
                   size_t codes_stride);
    void (*step)(const struct kv_pq_shape *shape,
                 const struct kv_kmeans_codebook *codebook,
                 const float *keys,
                 size_t n,
                 uint8_t *ret_codes,
                 size_t codes_stride,
                 const struct kv_kmeans_sums *sums);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_kmeans_kernels *kv_kmeans_kernels_at(unsigned i);

#endif
