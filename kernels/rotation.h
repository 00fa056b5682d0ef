/* rotation.h - a rotation of keys before product quantization (pq.h).
 *
 * Keys of a transformer have most of their variance in a few directions.  Subspaces of the keys as
 * they are get uneven shares of it, and elements of one subspace vary together.  A rotation of
 * keys and queries changes no inner product: this one takes the principal components of the keys
 * and deals them to the subspaces in rounds, forwards and backwards, so that all subspaces
 * have about the same variance (eigenvalue allocation, in rounds: Ge et al., Optimized Product
 * Quantization, 2013, section 4).
 *
 *   matrix   float (d, width): element [i][r] is element i of the r-th new axis; the form of one
 *            subspace's centroids in pq.h, so that kv_pq_tables() rotates
 *   work     sums over keys, then the covariance that becomes diagonal; kv_rotation_work_bytes()
 *
 * The axes are found by cyclic Jacobi rotations in double precision (Golub and Van Loan, Matrix
 * Computations, 8.5).  They are orthogonal after any number of these, so it does not matter to
 * the inner products that it ends after few.  Additions, products, quotients and square roots
 * alone are used, in one order: the bits are the same everywhere.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.
 */
#ifndef KV_KERNELS_ROTATION_H
#define KV_KERNELS_ROTATION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KV_ROTATION_DIM_MAX = 256,
};

/* Elements of the matrix, whose rows are d elements rounded up to a power of two, at least 2. */
size_t kv_rotation_size(uint32_t d);
size_t kv_rotation_work_bytes(uint32_t d);

/* Adds keys (n, d) to the sums.  `work` begins as zeros, aligned for doubles. */
void kv_rotation_add(uint32_t d, void *work, const float *keys, size_t n);

/* After all keys: rotates the axes in up to `most` planes, toward a diagonal covariance.  Returns
 * whether they are final. */
bool kv_rotation_diagonalize(uint32_t d, void *work, uint32_t most);

/* Deals the axes to m subspaces; m divides d.  If keys were not finite, these are the axes that
 * keys have. */
void kv_rotation_deal(uint32_t d, uint32_t m, const void *work, float *ret_matrix);

/* Rotates vectors (n, d). */
void kv_rotate(uint32_t d, const float *matrix, const float *vectors, size_t n, float *ret);

#endif
