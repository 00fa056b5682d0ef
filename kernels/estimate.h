/* estimate.h - estimates what rows that are not selected would have added to attention, from
 * their summaries (summary.h).
 *
 * For each query, a summary stands for those of its rows that are not attended to exactly.  Its
 * mean value gets the weight
 *
 *   weight = n exp(scale q.key + corr) + sum of exp(scale q.k) over the rows of the summary that
 *            were scored exactly but not selected (rejected candidates); n counts the others
 *   corr   = min(1, 0.15 |scale q|^2 s2), where s2 is the mean of (k[i] - key[i])^2 over rows k
 *            and elements i of the group
 *
 * corr is the variance correction.  exp of a mean is less than the mean of exp: for keys that
 * are normally distributed about their mean with variance s2, the exact correction is
 * 0.5 |scale q|^2 s2.  Real keys are not, and 0.5 without a bound overshoots.
 *
 * The result is an output and its lse (base e) for each query, to be merged with the result
 * over the selected rows by kv_attend_merge().
 *
 *   kv_estimate_prepare(), kv_estimate_begin()               for each query
 *   kv_estimate_count(), kv_estimate_add() ...               for each group
 *   kv_estimate_end() -> outputs, log-sum-exps
 *
 * Products are sums of integers, which are exact in any order: queries are rounded to 15 bits,
 * the weights of a group to 15 bits of its largest one; mean keys and mean values have 8.
 *
 * Numerical contract, the same in every instruction set, to the bit ("in 16 lanes" is the sum
 * of exact_scores.h; fp32 unless said otherwise; `nearest` rounds to the nearest integer, ties
 * to even):
 *   query      |q|^2 in 16 lanes; step = (max |q[i]|) / 16383, and r[i] = nearest(q[i] / step),
 *              -16383..16383, or 0 where the step is 0; of an infinity or a NaN the step is a NaN
 *              and r is 0
 *   corr       x = 0.15 * (|q|^2 * (scale * scale) * s2); x < 1 ? x : 1
 *   score      p = sum of r[i] * integer of mean key[i], exact, then converted;
 *              s = fma((p * step) * key scale, scale, corr), -inf where n = 0
 *   of a row   s = score * scale, -inf where it does not count
 *              Of both: a NaN becomes -inf, and what is larger than FLT_MAX becomes FLT_MAX.
 *   max        M' = max(M, every s) + 0 (-0 to +0); c = exp(M - M'); at first M is the largest
 *              s of the rows that kv_estimate_begin() is told of
 *   of rows    a[i % 4] += exp(s - M') for each row i of `numbers`, ascending;
 *              t = (a[0] + a[2]) + (a[1] + a[3])
 *   weight     w = fma(n, exp(s - M'), t), the exp of exp.h: of a NaN (-inf - -inf): 0
 *   sum        S[i % 16] = S[i % 16] * c + w of summary i, where summaries 16 apart are added
 *              first, ascending
 *   values     x = w * value scale; top = max(x); u = nearest(x * (32767 / top)), f = top / 32767,
 *              or u = 0 and f = 0 unless top is above 2^-110;
 *              o = sum of u * integer of mean value[j], exact, then converted;
 *              O[j] = fma(f, o, O[j] * c)
 * At the end output[j] = O[j] * (1 / S) and lse = M + ln S in double, rounded once, S in 16
 * lanes.  If S is 0, the output is 0 and lse -inf, the result over no rows.
 *
 * Groups are not checked here: a group must have passed kv_summary_valid().
 *
 * Threads: pure functions.  Memory: the caller's; only a state changes.  A group has the
 * alignment of a float, other arrays that of their type.  Inputs and outputs must not overlap.
 */
#ifndef KV_KERNELS_ESTIMATE_H
#define KV_KERNELS_ESTIMATE_H

#include "kernels/summary.h"

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KV_ESTIMATE_LANES = 16,          /* of a state's sum */
    KV_ESTIMATE_QUERY_MOST = 16383,  /* a rounded element of a query */
    KV_ESTIMATE_WEIGHT_MOST = 32767, /* a rounded weight */
};

/* Weighted scales below it are nothing: their weights are some e^-70 of the largest. */
#define KV_ESTIMATE_LEAST 0x1p-110f

static_assert(INT32_MAX / KV_ESTIMATE_QUERY_MOST / 127 >= KV_SUMMARY_D_MAX,
              "a sum over elements fits");
static_assert(INT32_MAX / KV_ESTIMATE_WEIGHT_MOST / 127 >= KV_SUMMARIES_MAX,
              "a sum over summaries fits");

/* Numbers of a group's rows, and where they end in the caller's lists. */
struct kv_estimate_counted {
    size_t n_selected, n_scored; /* tokens of these lists that are in the group's part */
    size_t n_rows;               /* of that part that are in a summary, and not selected */
};

/* Counts the rows that each summary of a group stands for, and finds the summaries of the rows
 * that were scored exactly.  Row 0 of the group is token `first`.  Only tokens [begin, end)
 * count: the part of the group that a snapshot, a prefix or a range includes.
 *   selected       tokens of the selected rows, ascending, each once
 *   scored         tokens of the rows that were scored exactly, ascending, each once.  Both
 *                  lists begin in that part or after it, may go on after it, and may share
 *                  tokens.
 *   marks          (KV_SUMMARY_ROWS_MAX) zeros, and zeros again afterwards
 *   ret_counts     (2^bits) rows that count and are in neither list
 *   ret_numbers    (n_scored of the result) the summaries of the first scored rows, or
 *                  KV_SUMMARY_NONE for those that are selected or in none; room for as many as
 *                  the group has rows */
struct kv_estimate_counted kv_estimate_count(const struct kv_summary_shape *shape,
                                             const void *group,
                                             uint32_t first,
                                             uint32_t begin,
                                             uint32_t end,
                                             const uint32_t *selected,
                                             size_t n_selected,
                                             const uint32_t *scored,
                                             size_t n_scored,
                                             uint8_t *marks,
                                             uint16_t *ret_counts,
                                             uint8_t *ret_numbers);

/* Queries as an estimate uses them. */
struct kv_estimate_queries {
    size_t n;
    const int16_t *elements; /* (n, up d_k) rounded, and 0 after d_k */
    const float *steps;      /* (n) */
    const float *squares;    /* (n) their |q|^2 */
};

/* Prepares queries (n, d_k), once for all groups.
 *   ret_elements (n, up d_k), ret_steps (n), ret_squares (n) */
struct kv_estimate_queries kv_estimate_prepare(size_t d_k,
                                               const float *queries,
                                               size_t n,
                                               int16_t *ret_elements,
                                               float *ret_steps,
                                               float *ret_squares);

/* The input of an estimate from one group. */
struct kv_estimate_input {
    struct kv_estimate_queries queries;
    float scale;            /* finite, above 0 */
    const uint16_t *counts; /* (n, 2^bits), counts_stride apart: 0 if they are shared */
    size_t counts_stride;
    const uint8_t *numbers; /* (n_scored) summaries of rows; KV_SUMMARY_NONE: does not count */
    const float *scores;    /* (n, n_scored), scores_stride apart: their inner products, not
                             * scaled; -inf: does not count for this query */
    size_t n_scored, scores_stride;
    const void *next; /* the group of the next call, prefetched during this one; NULL: none */
};

/* Returns the number of floats of a state: M (n), S (n, 16), O (n, d_v). */
static inline size_t kv_estimate_floats(const struct kv_summary_shape *shape, size_t n_queries)
{
    return n_queries * (1 + KV_ESTIMATE_LANES + (size_t)shape->d_v);
}

/* Initializes a state of kv_estimate_floats() floats: no rows.  M begins with the largest of the
 * scores (n, n_scored), scores_stride apart and not scaled, of all rows that were scored: those
 * that are selected are among them, and what is left of the others rarely exceeds it, so that
 * no sum needs to shrink. */
void kv_estimate_begin(const struct kv_summary_shape *shape,
                       size_t n_queries,
                       float scale,
                       const float *scores,
                       size_t n_scored,
                       size_t scores_stride,
                       float *state);

/* Adds the rows of one group that the input counts. */
void kv_estimate_add(const struct kv_summary_shape *shape,
                     const void *group,
                     const struct kv_estimate_input *input,
                     float *state);

/* Computes the result over all groups added; the state does not change.
 *   ret_output  (n_queries, d_v)
 *   ret_lse     (n_queries), to base e */
void kv_estimate_end(const struct kv_summary_shape *shape,
                     size_t n_queries,
                     const float *state,
                     float *ret_output,
                     float *ret_lse);

/* One implementation of the family.  The last one in the list that this CPU supports is
 * used. */
struct kv_estimate_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    /* kv_estimate_add() */
    void (*add)(const struct kv_summary_shape *shape,
                const void *group,
                const struct kv_estimate_input *input,
                float *state);
    /* Returns the largest score that is not a NaN; -inf: there is none. */
    float (*largest)(const float *scores, size_t n);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_estimate_kernels *kv_estimate_kernels_at(unsigned i);

#endif
