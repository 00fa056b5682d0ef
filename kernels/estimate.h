/* estimate.h - estimates what rows that are not selected would have added to attention, from
 * their summaries (summary.h).
 *
 * For each query, a summary stands for those of its rows that are not attended to exactly.  Its
 * mean value gets the weight
 *
 *   weight = n exp(scale q.key + corr) + sum of exp(scale q.k) over the rows of the summary
 *   that
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
 *   kv_estimate_begin(), kv_estimate_squares()                for each query
 *   kv_estimate_count(), kv_estimate_add() ...                for each group
 *   kv_estimate_end() -> outputs, log-sum-exps
 *
 * Numerical contract, the same in every instruction set, to the bit ("in 16 lanes" is the sum
 * of exact_scores.h; fp32 unless said otherwise):
 *   |q|^2      in 16 lanes
 *   corr       x = 0.15 * (|q|^2 * (scale * scale) * s2); x < 1 ? x : 1
 *   score      p = q[i] * mean key[i] in 16 lanes, of the integers; s = fma(p * key scale,
 *              scale, corr), -inf where n = 0
 *   of a row   s = score * scale
 *              Of both: a NaN becomes -inf, and what is larger than FLT_MAX becomes FLT_MAX.
 *   max        M' = max(M, every s) + 0 (-0 to +0)
 *   weight     w = n * exp(s - M'), the exp of exp.h; then w += exp(s - M') for the rows,
 *              ascending; c = exp(M - M'); exp of a NaN (-inf - -inf): 0
 *   sum        S = fma(S, c, w in 16 lanes: summary i is added to lane i % 16)
 *   values     o = 0, then o = fma(w * value scale, mean value[j], o), summaries ascending;
 *              O[j] = fma(O[j], c, o)
 * At the end output[j] = O[j] * (1 / S) and lse = M + ln S in double, rounded once.  If S is 0,
 * the output is 0 and lse -inf, the result over no rows.
 *
 * Groups are not checked here: a group must have passed kv_summary_valid().
 *
 * Threads: pure functions.  Memory: the caller's; only a state changes.  A group has the
 * alignment of a float, other arrays that of their type.  Inputs and outputs must not overlap.
 */
#ifndef KV_KERNELS_ESTIMATE_H
#define KV_KERNELS_ESTIMATE_H

#include "kernels/summary.h"

#include <stddef.h>
#include <stdint.h>

/* Counts the rows that each summary of a group stands for, and finds the group's rejected
 * candidates.  Row 0 of the group is token `first`.  Only tokens [begin, end) count: the part
 * of the group that a snapshot, a prefix or a range includes.
 *   selected       tokens of the selected rows, ascending, each once
 *   scored         tokens of the rows that were scored exactly, ascending, each once.  Both
 *                  lists may have tokens outside of the group, and may share tokens.
 *   ret_counts     (2^bits) rows that count and are in neither list
 *   ret_places     (n) positions in `scored` of rows that count and are not in `selected`;
 *                  room for as many as the group has rows
 *   ret_numbers    (n) the summaries of these rows
 * Returns n. */
size_t kv_estimate_count(const struct kv_summary_shape *shape,
                         const void *group,
                         uint32_t first,
                         uint32_t begin,
                         uint32_t end,
                         const uint32_t *selected,
                         size_t n_selected,
                         const uint32_t *scored,
                         size_t n_scored,
                         uint16_t *ret_counts,
                         uint32_t *ret_places,
                         uint8_t *ret_numbers);

/* The input of an estimate from one group. */
struct kv_estimate_input {
    const float *queries; /* (n_queries, d_k) */
    const float *squares; /* (n_queries) their |q|^2: kv_estimate_squares() */
    size_t n_queries;
    float scale;            /* finite, above 0 */
    const uint16_t *counts; /* (n_queries, 2^bits), counts_stride apart: 0 if they are shared */
    size_t counts_stride;
    const uint8_t *numbers; /* (n_scored) summaries of the rejected candidates */
    const float *scores;    /* (n_queries, n_scored), scores_stride apart: their inner products,
                             * not scaled; -inf: does not count for this query */
    size_t n_scored, scores_stride;
    const void *next; /* the group of the next call, prefetched during this one; NULL: none */
};

/* Computes |q|^2 of queries (n, d_k) -> ret_squares (n), once for all groups. */
void kv_estimate_squares(size_t d_k, const float *queries, size_t n, float *ret_squares);

/* Returns the number of floats of a state: M (n_queries), S (n_queries), O (n_queries, d_v), as
 * in a state of attend.h. */
static inline size_t kv_estimate_floats(const struct kv_summary_shape *shape, size_t n_queries)
{
    return n_queries * (2 + (size_t)shape->d_v);
}

/* Initializes a state of kv_estimate_floats() floats: no rows. */
void kv_estimate_begin(const struct kv_summary_shape *shape, size_t n_queries, float *state);

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
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_estimate_kernels *kv_estimate_kernels_at(unsigned i);

#endif
