/* dot.h - arithmetic of the device "cpu": weights in the format of their GGUF file, activations
 * in fp32.
 *
 * A table of functions per instruction set, the best of which is chosen at run time.  All
 * compute in fp32 with the weight's exact value; tables differ in the order of their sums, so
 * they agree to a few ulps of the sum of magnitudes, not to the bit.
 *
 * Within one table every product of two rows is summed in one order, whichever function
 * computes it and however many rows are computed together.  So a token has the same bits
 * whether it is computed alone or in a chunk, and its rows are rounded to the same fp16
 * numbers.
 *
 * Shapes: `n` is a row's elements, a whole number of the type's blocks (dequantize.h).  Rows
 * need no alignment.  Shapes are not checked here: model.c has checked them.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_GPU_WORKER_DEVICE_CPU_DOT_H
#define KV_GPU_WORKER_DEVICE_CPU_DOT_H

#include "gpu-worker/gguf/tensor_type.h"

enum {
    KVW_DOT_TYPES = 31, /* one more than the largest enum kvw_tensor_type */
};

struct kvw_dot_table {
    const char *name; /* "scalar", "avx2" */

    /* Products of rows, `stride` bytes apart, with x (n): ret_products (n_rows). */
    void (*dot[KVW_DOT_TYPES])(const void *rows,
                               size_t stride,
                               size_t n_rows,
                               const float *x,
                               size_t n,
                               float *ret_products);
    /* The row's values, ret_values (n). */
    void (*unpack[KVW_DOT_TYPES])(const void *row, float *ret_values, size_t n);

    /* Products of all rows of a (n_a, k) with all of b (n_b, k), `lda` and `ldb` floats apart:
     * ret_products (n_a, n_b), ldc apart. */
    void (*products)(const float *a,
                     size_t lda,
                     size_t n_a,
                     const float *b,
                     size_t ldb,
                     size_t n_b,
                     size_t k,
                     float *ret_products,
                     size_t ldc);

    /* Keys of cached tokens, `stride` bytes apart, against queries:
     *   queries (n_queries, d), ret_scores (n_queries, scores_stride) of which n_rows are set.
     * By enum kv_dtype: fp32, fp16, bf16.  d is a multiple of 8. */
    void (*score[4])(const void *rows,
                     size_t stride,
                     size_t n_rows,
                     const float *queries,
                     size_t n_queries,
                     size_t d,
                     float *ret_scores,
                     size_t scores_stride);
    /* Values of cached tokens, added up with weights, row after row: out (n_queries, d) +=
     * weights (n_queries, n_rows) x rows. */
    void (*gather[4])(const void *rows,
                      size_t stride,
                      size_t n_rows,
                      const float *weights,
                      size_t weights_stride,
                      size_t n_queries,
                      size_t d,
                      float *out);
    /* One row of a cache to fp32, and back with rounding to nearest even. */
    void (*load[4])(const void *row, float *ret_values, size_t n);
    void (*store[4])(const float *values, void *ret_row, size_t n);

    float (*sum_of_squares)(const float *x, size_t n);
    /* gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i] */
    void (*silu_gate)(float *gate, const float *up, size_t n);
};

/* Returns the best table that this processor supports. */
const struct kvw_dot_table *kvw_dot_table_best(void);

/* Returns the i-th table that this processor supports, slowest first; NULL after the last. */
const struct kvw_dot_table *kvw_dot_table_at(unsigned index);

/* The table of dot_avx2.c; NULL on other processors. */
const struct kvw_dot_table *kvw_dot_avx2(void);

#endif
