/* estimate.h - estimates what rows that are not selected would have added to attention, from
 * their summaries (summary.h).
 *
 * For a query, a summary stands for those of its rows that are not attended to exactly:
 *
 *   weight = n exp(scale q.key + corr) + sum of exp(scale q.k) over the rows that were scored
 *            exactly all the same and then not selected; n counts the other rows
 *   corr   = min(1, 0.15 |scale q|^2 s2), s2 being the mean of (k[i] - key[i])^2 over rows and
 *            elements of the group.  Were the rows normal about their mean key, it would be
 *            0.5 without a bound; that overshoots where they are not.
 *
 * and its mean value is what has this weight.  The answer is, per query, an output and its
 * natural log-sum-exp, to be merged with that of the rows that are attended.
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
 * At the end output[j] = O[j] * (1 / S) and lse = M + ln S in double, rounded once; output is 0
 * and lse -inf where S = 0: of the empty set.
 *
 * Nothing is checked: a group is one that kv_summary_valid() said yes to.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept but in a state.  A group has
 * the alignment of a float, other arrays that of their type.  What is read and what is written
 * do not overlap.
 */
#ifndef KV_KERNELS_ESTIMATE_H
#define KV_KERNELS_ESTIMATE_H

#include "kernels/summary.h"

#include <stddef.h>
#include <stdint.h>

/* How many rows of a group are left to its summaries, and which rows were scored in vain.  Row
 * 0 of the group is token `first`; what counts are tokens [begin, end): what a snapshot, a
 * prefix or a range leaves of it.
 *   selected, scored  tokens, ascending, each once; others besides those of the group are
 *                     passed over; a token may be in both
 *   ret_counts     (2^bits) rows that count and are in neither
 *   ret_places     (n) places in `scored` of rows that count and are not in `selected`; room for
 *                  as many as the group has rows
 *   ret_numbers    (n) their summaries
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

/* What is asked of one group. */
struct kv_estimate_question {
    const float *queries; /* (n_queries, d_k) */
    const float *squares; /* (n_queries) their |q|^2: kv_estimate_squares() */
    size_t n_queries;
    float scale;            /* finite, above 0 */
    const uint16_t *counts; /* (n_queries, 2^bits), counts_stride apart: 0 if they are shared */
    size_t counts_stride;
    const uint8_t *numbers; /* (n_scored) summaries of rows scored and not selected */
    const float *scores;    /* (n_queries, n_scored), scores_stride apart: inner products, not
                             * scaled; -inf: not left over for this query */
    size_t n_scored, scores_stride;
    const void *next; /* the group that will be asked next, which is fetched meanwhile, and not
                       * read; NULL: not known */
};

/* |q|^2 of queries (n, d_k), once for all groups. */
void kv_estimate_squares(size_t d_k, const float *queries, size_t n, float *ret_squares);

/* How many floats a state is: M (n_queries), S (n_queries), O (n_queries, d_v), as in a state
 * of attend.h. */
static inline size_t kv_estimate_floats(const struct kv_summary_shape *shape, size_t n_queries)
{
    return n_queries * (2 + (size_t)shape->d_v);
}

/* state (kv_estimate_floats()): nothing yet. */
void kv_estimate_begin(const struct kv_summary_shape *shape, size_t n_queries, float *state);

/* Adds what is left of a group. */
void kv_estimate_add(const struct kv_summary_shape *shape,
                     const void *group,
                     const struct kv_estimate_question *question,
                     float *state);

/* ret_output (n_queries, d_v), ret_lse (n_queries); the state stays as it is. */
void kv_estimate_end(const struct kv_summary_shape *shape,
                     size_t n_queries,
                     const float *state,
                     float *ret_output,
                     float *ret_lse);

/* One implementation of the family.  Slowest first: the last one that this CPU supports is
 * used. */
struct kv_estimate_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    /* As kv_estimate_add(). */
    void (*add)(const struct kv_summary_shape *shape,
                const void *group,
                const struct kv_estimate_question *question,
                float *state);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_estimate_kernels *kv_estimate_kernels_at(unsigned i);

#endif
