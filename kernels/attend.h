/* attend.h - exact softmax attention of several queries over selected rows, in one pass.
 *
 * The running maximum and sum of FlashAttention (arXiv:2205.14135, section 3.1), over rows that
 * lie anywhere.  A row is a key and then its value, adjacent, both of one type.  With s, the
 * inner product of query and key by `scale`, a query's answer is
 *
 *   output[j] = sum of exp(s) * value[j] / sum of exp(s)        lse = ln(sum of exp(s))
 *
 * lse being what partial answers over disjoint rows are merged by (kv_attend_merge).  Base e.
 *
 * Numerical contract, the same in every instruction set, to the bit.  Rows are taken in groups
 * of KV_ATTEND_BATCH, counted from the first one since kv_attend_begin(); the last group may be
 * smaller.  For each group and query, maximum M, sum S and output O being 0 and M -inf at
 * first:
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
 * At the end output[j] = O[j] * (1 / S) and lse = M + ln S in double, rounded once; where no
 * row counts, which S = 0 says, output is 0 and lse -inf.  So rows whose s is NaN or -inf are
 * as if they were not there, but for their values: a weight of 0 meets every value of the call,
 * and a value that is a NaN or infinite makes its element of every query's output a NaN.
 *
 * (Which NaN a NaN is, is left open.)
 *
 * Error, with eps = 2^-24: s of d_k elements of a sum of magnitudes m is off by at most
 * (d_k / 16 + 6) eps m scale, which a weight has as relative error, with 3e-7 and eps |s| on
 * top; a sum over n rows in groups adds up to (64 + n / 64) eps, far less in fact.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept but in `state`.  Rows need no
 * alignment; the other arrays need their type's.  What is read and what is written do not
 * overlap.  The shape is valid (kv_attend_shape_valid).
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
    KV_ATTEND_QUERIES_MAX = 32, /* as many as `among` has bits */
    KV_ATTEND_PARTS_MAX = 256,  /* of one merge */
};

static_assert(KV_ATTEND_QUERIES_MAX == 32, "a bit each");
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

/* How many floats a state is: M (n_queries), S (n_queries), O (n_queries, d_v). */
static inline size_t kv_attend_floats(const struct kv_attend_shape *shape)
{
    return (size_t)shape->n_queries * (2 + (size_t)shape->d_v);
}

/* state (kv_attend_floats()): no row yet. */
void kv_attend_begin(const struct kv_attend_shape *shape, float *state);

/* Adds rows.  Every call but the last since kv_attend_begin() brings a multiple of
 * KV_ATTEND_BATCH: then the answer does not depend on how the rows are cut into calls, nor on
 * whether they come as a list or as a run.  A call asks for memory one group ahead, but not
 * beyond its own rows: some hundred rows a call hide that.
 *   queries  (n_queries, d_k)
 *   rows     (n) pointers
 *   among    (n): bit q says that the row counts for query q; NULL: all count for all */
void kv_attend_rows(const struct kv_attend_shape *shape,
                    const float *queries,
                    const void *const *rows,
                    size_t n,
                    const uint32_t *query_mask,
                    float *state);

/* As kv_attend_rows(), and makes the rows' checksums while they are in the caches:
 *   ret_crcs  (n) kv_crc32c() of row i, from seeds[i] on
 *   seeds     (n) */
void kv_attend_checked(const struct kv_attend_shape *shape,
                       const float *queries,
                       const void *const *rows,
                       size_t n,
                       const uint32_t *query_mask,
                       const uint32_t *seeds,
                       uint32_t *ret_crcs,
                       float *state);

/* As kv_attend_rows(), row i being `stride` * i bytes behind `rows`. */
void kv_attend_run(const struct kv_attend_shape *shape,
                   const float *queries,
                   const void *rows,
                   size_t stride,
                   size_t n,
                   const uint32_t *query_mask,
                   float *state);

/* What the rows since kv_attend_begin() amount to; the state stays as it is.
 *   ret_output  (n_queries, d_v)
 *   ret_lse     (n_queries), natural */
void kv_attend_end(const struct kv_attend_shape *shape,
                   const float *state,
                   float *ret_output,
                   float *ret_lse);

/* Merges answers of the same queries over disjoint sets of rows into the answer over all:
 *
 *   M = max lse_i    w_i = exp(lse_i - M)    output[j] = sum w_i * output_i[j] / sum w_i
 *   lse = M + ln(sum w_i)
 *
 * all of it in double, parts ascending, rounded once.  A part whose lse is -inf or a NaN is
 * empty: its output is not looked at.  +inf counts as FLT_MAX.  No part, or empty ones only:
 * the empty set, output 0 and lse -inf.  A merged answer may be merged again.  Against the
 * answer over all rows at once: 1e-5 relative to the largest value, while |lse| < 64.
 *
 *   n_parts     at most KV_ATTEND_PARTS_MAX
 *   outputs     (n_parts) of (n_queries, d_v)
 *   lses        (n_parts) of (n_queries)
 *   ret_output  (n_queries, d_v); may be one of the outputs
 *   ret_lse     (n_queries); may be one of the lses */
void kv_attend_merge(size_t n_queries,
                     size_t d_v,
                     size_t n_parts,
                     const float *const *outputs,
                     const float *const *lses,
                     float *ret_output,
                     float *ret_lse);

/* One implementation of the family; functions as above.  Slowest first: the last one that this
 * CPU supports is used. */
struct kv_attend_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    /* As kv_attend_checked(); seeds NULL: no checksums. */
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
