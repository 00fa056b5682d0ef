/* attend.h - exact softmax attention of several queries over selected rows, in one pass.
 *
 * Keeps a running maximum and sum as FlashAttention does (arXiv:2205.14135, section 3.1), over
 * rows at any addresses.  A row is a key followed by its value, both of one element type.  With
 * s = scale * (query . key), the result of a query is
 *
 *   output[j] = sum of exp(s) * value[j] / sum of exp(s)        lse = ln(sum of exp(s))
 *
 * kv_attend_merge() merges results over disjoint rows by their lse, which is to base e
 * (FlashInfer's is to base 2).
 *
 * Numerical contract, the same bits in every instruction set.  Rows are processed in groups of
 * KV_ATTEND_BATCH, counted from the first row since kv_attend_begin(); the last group may be
 * smaller.  The state of a query is a maximum M, at first -inf, a sum S and an output O, at
 * first 0.  For each group and query:
 *
 *   score    p = the inner product as in exact_scores.h (16 lanes and their tree); s = p *
 *            scale, and s of a row that does not count for the query is -inf.  A NaN becomes
 *            -inf, and what is larger than FLT_MAX becomes FLT_MAX: rows of +inf share the
 *            answer.
 *   max      M' = max(M, every s) + 0 (-0 to +0)
 *   weight   w = exp(s - M'), the exp of exp.h; c = exp(M - M'); NaN (-inf - -inf): 0
 *   sum      S = fma(S, c, group's sum), that of w in 16 lanes, row i of the group in lane
 *            i % 16, i ascending, and then the tree of exact_scores.h
 *   values   o = 0, then o = fma(w, value[j], o), rows ascending; O[j] = fma(O[j], c, o)
 *   then M = M'
 *
 * At the end output[j] = O[j] * (1 / S) and lse = M + ln S in double, rounded once.  If no row
 * counts, S is 0, the output 0 and lse -inf.  A row whose s is NaN or -inf has the weight 0,
 * but its value is still multiplied by 0 and added: a value that is NaN or infinite makes its
 * element of every query's output a NaN.
 *
 * The payload of a NaN is not specified.
 *
 * Error, with eps = 2^-24.  If the magnitudes of the d_k products of a score add up to m, s is
 * off by at most (d_k / 16 + 6) eps m scale.  A weight has this as its relative error, plus
 * 3e-7 for exp and eps |s| for the subtraction.  A sum over n rows adds at most (64 + n / 64)
 * eps.
 *
 * Threads: pure functions.  Memory: the caller's; only `state` changes.  Rows need no
 * alignment; the other arrays need that of their type.  Inputs and outputs must not overlap.
 * The shape must be valid (kv_attend_shape_valid()).
 */
#ifndef KV_KERNELS_ATTEND_H
#define KV_KERNELS_ATTEND_H

#include "kernels/exact_scores.h"

#include <assert.h>
#include <float.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KV_ATTEND_BATCH = 64,       /* rows */
    KV_ATTEND_D_MAX = 1024,     /* elements of a key, and of a value */
    KV_ATTEND_QUERIES_MAX = 32, /* the bits of a query mask */
    KV_ATTEND_PARTS_MAX = 256,  /* partial results of one merge */
};

static_assert(KV_ATTEND_QUERIES_MAX == 8 * sizeof(uint32_t), "a bit of a query mask each");
static_assert(KV_ATTEND_BATCH % 16 == 0, "a group is whole vectors");

struct kv_attend_shape {
    enum kv_key_type type;
    uint32_t d_k, d_v;
    uint32_t n_queries;
    float scale; /* finite, above 0; often 1 / sqrt(d_k) */
};

static inline int kv_attend_shape_valid(const struct kv_attend_shape *shape)
{
    return kv_key_type_valid(shape->type) && shape->d_k >= 1 && shape->d_v >= 1 &&
           shape->d_k <= KV_ATTEND_D_MAX && shape->d_v <= KV_ATTEND_D_MAX &&
           shape->n_queries >= 1 && shape->n_queries <= KV_ATTEND_QUERIES_MAX &&
           shape->scale > 0 && shape->scale <= FLT_MAX;
}

static inline size_t kv_attend_row_bytes(const struct kv_attend_shape *shape)
{
    return ((size_t)shape->d_k + shape->d_v) * (shape->type == KV_KEY_FP32 ? 4 : 2);
}

/* Returns the number of floats of a state: M (n_queries), S (n_queries), O (n_queries, d_v). */
static inline size_t kv_attend_floats(const struct kv_attend_shape *shape)
{
    return (size_t)shape->n_queries * (2 + (size_t)shape->d_v);
}

/* Initializes a state of kv_attend_floats() floats: no rows. */
void kv_attend_begin(const struct kv_attend_shape *shape, float *state);

/* Adds rows.  Every call since kv_attend_begin() except the last must add a multiple of
 * KV_ATTEND_BATCH rows.  The result then depends neither on how rows are divided into calls nor
 * on whether they are given as a list or as a run.  A call prefetches one group ahead, within
 * its own rows; calls of some hundred rows hide the latency of their first group.
 *   queries     (n_queries, d_k)
 *   rows        (n) pointers
 *   query_mask  (n): bit q says that the row counts for query q; NULL: all rows count for
 *               all */
void kv_attend_rows(const struct kv_attend_shape *shape,
                    const float *queries,
                    const void *const *rows,
                    size_t n,
                    const uint32_t *query_mask,
                    float *state);

/* As kv_attend_rows(), and computes the rows' checksums while they are in the cache.
 *   seeds     (n)
 *   ret_crcs  (n): kv_crc32c() of row i, continued from seeds[i] */
void kv_attend_checked(const struct kv_attend_shape *shape,
                       const float *queries,
                       const void *const *rows,
                       size_t n,
                       const uint32_t *query_mask,
                       const uint32_t *seeds,
                       uint32_t *ret_crcs,
                       float *state);

/* As kv_attend_rows(), for a run of rows: row i is at `rows` + i * `stride` bytes. */
void kv_attend_run(const struct kv_attend_shape *shape,
                   const float *queries,
                   const void *rows,
                   size_t stride,
                   size_t n,
                   const uint32_t *query_mask,
                   float *state);

/* Computes the result over the rows added since kv_attend_begin().  The state does not change,
 * so more rows may follow if the rows so far are a multiple of KV_ATTEND_BATCH.
 *   ret_output  (n_queries, d_v)
 *   ret_lse     (n_queries), to base e */
void kv_attend_end(const struct kv_attend_shape *shape,
                   const float *state,
                   float *ret_output,
                   float *ret_lse);

/* Merges results of the same queries over disjoint sets of rows into the result over all rows
 * (FlashDecoding's reduction):
 *
 *   M = max lse_i    w_i = exp(lse_i - M)    output[j] = sum w_i * output_i[j] / sum w_i
 *   lse = M + ln(sum w_i)
 *
 * computed in double, partial results in order, rounded once.  A partial result whose lse is
 * -inf or NaN is empty, and its output is not read.  An lse of +inf counts as FLT_MAX.  If all
 * are empty, or n_parts is 0, the output is 0 and the lse -inf.  A merged result may be merged
 * again.  It differs from the result over all rows at once by at most 1e-5 of the largest
 * value, as long as |lse| < 64.
 *
 *   n_parts     at most KV_ATTEND_PARTS_MAX
 *   outputs     (n_parts) of (n_queries, d_v)
 *   lses        (n_parts) of (n_queries)
 *   ret_output  (n_queries, d_v); may be one of `outputs`
 *   ret_lse     (n_queries); may be one of `lses` */
void kv_attend_merge(size_t n_queries,
                     size_t d_v,
                     size_t n_parts,
                     const float *const *outputs,
                     const float *const *lses,
                     float *ret_output,
                     float *ret_lse);

/* One implementation of the family.  The last one in the list that this CPU supports is
 * used. */
struct kv_attend_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    /* kv_attend_rows() if `seeds` is NULL, else kv_attend_checked(). */
    void (*rows)(const struct kv_attend_shape *shape,
                 const float *queries,
                 const void *const *rows,
                 size_t n,
                 const uint32_t *query_mask,
                 const uint32_t *seeds,
                 uint32_t *ret_crcs,
                 float *state);
    void (*run)(const struct kv_attend_shape *shape,
                const float *queries,
                const void *rows,
                size_t stride,
                size_t n,
                const uint32_t *query_mask,
                float *state);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_attend_kernels *kv_attend_kernels_at(unsigned i);

#endif
