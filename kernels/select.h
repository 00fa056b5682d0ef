/* select.h - from scores to selected rows: softmax, merging of query heads, exact top-k.
 *
 * An item has one score.  It is a row, or several rows that share the score (a cell, see
 * pq_cells.h).  `counts` (n) has the number of rows of each item; NULL means one row each.  An
 * item of no rows is ignored, whatever its score.
 *
 * Softmax weights are kept as exp(scale * (score - max)), not divided by their sum, because one
 * factor per query head (kv_softmax_factor()) is applied when heads are merged.
 *
 * Numerical contract, the same bits in every instruction set, and the same for c rows with one
 * score as for one item of c rows:
 *   exp(x)    the polynomial of exp.h in fp32: 0 below KV_WEIGHT_LEAST and of a NaN, 1 above 0
 *             (which only rounding reaches); else the relative error is at most 3e-7
 *   max       NaN counts as -inf; of nothing: -inf; a zero is +0
 *   exp sum   exp() in units of 2^-KV_EXP_SUM_BITS, rounded to the nearest, ties to even,
 *             added as whole numbers: the order does not matter
 *   select    the k largest, ties to the lower index; NaN is below -inf; -0 equals +0
 *
 * The payload of a NaN is not specified.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Pointers need the alignment
 * of their type only.  Inputs and outputs must not overlap.
 */
#ifndef KV_KERNELS_SELECT_H
#define KV_KERNELS_SELECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A weight is 0 by definition if it is below 2^-24 of its head's largest: -24 ln 2.  Such rows
 * add nothing that fp32 keeps.  They tie, and of those the lowest are selected if others do not
 * fill k; which rows that would have been in the order of their scores makes no difference: on
 * keys of SmolLM2 (6,144 and 8,192 rows, chapters of several lengths, 1 to 16 candidates a
 * selected row) recall is the same as with a bound of -87, or 1e-5 lower where candidates are
 * 80 % of the rows.  A tenth to a quarter of the rows is that light there. */
#define KV_WEIGHT_LEAST (-16.635532f)

enum {
    /* A unit of the exp sum is a 64th of the least weight, and the largest weight fits 31 bits;
     * the sum of n rows is off by n 2^-31 at most, and that of 2^24 rows of weight 1 fits 54
     * bits. */
    KV_EXP_SUM_BITS = 30,
};

/* Returns the largest of scores (n), as "max" above. */
float kv_scores_max(const float *scores, const uint32_t *counts, size_t n);

/* Replaces scores (n) with the numerators of their softmax, exp(scale * (score - max)), whose
 * argument is fma(score, scale, -max * scale).  A NaN score, or a NaN argument (inf - inf),
 * gives 0; if max is -inf, all are 0.  `scale` is finite and positive.  Returns the exp sum,
 * each numerator times its count. */
uint64_t
kv_softmax_exps(float *scores, const uint32_t *counts, size_t n, float scale, float max);

/* Returns the factor that turns numerators into weights: 1 / sum, 0 for an exp sum of 0. */
static inline float kv_softmax_factor(uint64_t sum)
{
    return sum > 0 ? (float)((double)((uint64_t)1 << KV_EXP_SUM_BITS) / (double)sum) : 0.0f;
}

/* How the weights of several query heads become one. */
enum kv_weights_merge {
    KV_WEIGHTS_SUM, /* merged[i] = fma(exps[i], factor, merged[i]) */
    KV_WEIGHTS_MAX, /* merged[i] = the larger of exps[i] * factor and merged[i]; none is a NaN */
};

/* Merges the weights of n_queries more query heads into `merged`, one head after the other.
 *   exps     (n_queries, n), exps_stride apart
 *   factors  (n_queries)
 *   merged   (n) */
void kv_weights_merge(enum kv_weights_merge by,
                      const float *exps,
                      size_t exps_stride,
                      const float *factors,
                      size_t n_queries,
                      size_t n,
                      float *merged);

enum {
    KV_TOPK_BINS = 2048,
    KV_TOPK_PASSES = 3,
};

/* Finds the k largest by a radix select in three passes over the scores, each of which may be
 * divided into calls:
 *
 *     kv_topk_begin(&selector, k);
 *     for (pass = 0; pass < KV_TOPK_PASSES; pass++) {
 *         kv_topk_count(&selector, scores, counts, n);       once or more
 *         kv_topk_next(&selector);
 *     }
 *     kv_topk_collect(...);                                  once or more, in order
 *
 * Selected are the items above the bound, and `ties` rows of the items at the bound. */
struct kv_topk {
    uint64_t ties;  /* rows still to be found; after the last pass those at the bound */
    uint32_t pass;  /* 0..KV_TOPK_PASSES */
    uint32_t bound; /* a sort key (kv_score_key()), complete after the last pass */
    uint32_t bins[KV_TOPK_BINS];
};

/* Returns a score's sort key: unsigned numbers in the order of "select" above.  Positive floats
 * are in the order of their bits; the highest bit is set to put them above the negative ones,
 * whose bits are inverted.  A NaN is 0, below all others. */
static inline uint32_t kv_score_key(float score)
{
    union {
        float value;
        uint32_t bits;
    } plain = {.value = score + 0.0f}; /* -0 to +0 */

    if (score != score)
        return 0;
    return plain.bits & 0x80000000 ? ~plain.bits : plain.bits | 0x80000000;
}

enum {
    KV_TOPK_SPARE = 16, /* places after the last index that vector stores may overwrite */
};

void kv_topk_begin(struct kv_topk *selector, uint64_t k);
void kv_topk_count(struct kv_topk *selector,
                   const float *scores,
                   const uint32_t *counts,
                   size_t n);
void kv_topk_next(struct kv_topk *selector);

/* A shortcut for many rows: a sample estimates a band of sort keys that holds the bound, one
 * pass extracts the scores in the band, and the three passes above run over these only.
 *
 *     if (kv_scores_guess(...))
 *         kv_scores_between(...);                                once or more
 *
 * If n_above < k <= n_above + n_between, the k-th largest score is the (k - n_above)-th largest
 * of those in the band; else the band missed it, and all scores must be counted. */

/* Estimates the band [*ret_least, *ret_most] of sort keys that holds the k-th largest of scores
 * (n).  Returns false if there are too few scores, or k is too near n, for a sample. */
bool kv_scores_guess(
    const float *scores, size_t n, uint64_t k, uint32_t *ret_least, uint32_t *ret_most);

/* Extracts the scores (n) whose sort keys are in [least, most], in any order, and counts those
 * above.  Returns the number of those in the band.
 *   ret_scores  (n), all of which may be overwritten */
size_t kv_scores_between(const float *scores,
                         size_t n,
                         uint32_t least,
                         uint32_t most,
                         float *ret_scores,
                         size_t *ret_n_above);

/* Collects the selected items among scores (n), whose counts must be 0 or 1, ascending; the
 * first item has index `base`.  Subtracts from `ties` the rows it selected at the bound.
 * ret_indices has room for KV_TOPK_SPARE more than are selected.  Returns their number. */
size_t kv_topk_collect(struct kv_topk *selector,
                       const float *scores,
                       const uint32_t *counts,
                       size_t n,
                       uint32_t base,
                       uint32_t *ret_indices);

/* Collects items of any counts: all that are above the bound, and all that are at it,
 * ascending.  The caller divides `ties` among the latter.  Both arrays have room for
 * KV_TOPK_SPARE more. */
void kv_topk_items(const struct kv_topk *selector,
                   const float *scores,
                   const uint32_t *counts,
                   size_t n,
                   uint32_t *ret_above,
                   size_t *ret_n_above,
                   uint32_t *ret_equal,
                   size_t *ret_n_equal);

/* Selects the min(k, n) largest of scores (n), n < 2^32, in one call.  Returns their number,
 * and their indices in ascending order.
 *   ret_indices  (min(k, n) + KV_TOPK_SPARE)
 *   scratch      (n) */
size_t
kv_topk_select(const float *scores, size_t n, size_t k, uint32_t *ret_indices, float *scratch);

/* Selection by attention mass (top-p): finds how many of the largest weights together reach at
 * least `share` of `total`, their exp sum (kv_weights_sum()).  Of equal weights as many count
 * as are needed.  Weights are not negative.  Three passes, divided into calls like those of
 * struct kv_topk; each bin also sums its weights. */
struct kv_mass {
    uint64_t n_rows; /* the result, after the last pass */
    uint64_t wanted; /* mass still to be reached, in units of the exp sum */
    uint32_t pass, bound;
    uint64_t masses[KV_TOPK_BINS];
    uint64_t rows[KV_TOPK_BINS];
};

/* Returns the exp sum of weights, each times its count. */
uint64_t kv_weights_sum(const float *weights, const uint32_t *counts, size_t n);
void kv_mass_begin(struct kv_mass *mass, uint64_t total, double share);
void kv_mass_count(struct kv_mass *mass,
                   const float *weights,
                   const uint32_t *counts,
                   size_t n);
void kv_mass_next(struct kv_mass *mass);

/* Returns the number of rows of items whose score is at least `least`. */
uint64_t kv_count_from(const float *scores, const uint32_t *counts, size_t n, float least);

/* One implementation of the family; functions as above.  The last one in the list that this CPU
 * supports is used. */
struct kv_topk_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    float (*max)(const float *scores, const uint32_t *counts, size_t n);
    uint64_t (*exps)(float *scores, const uint32_t *counts, size_t n, float scale, float max);
    void (*merge)(enum kv_weights_merge by,
                  const float *exps,
                  size_t exps_stride,
                  const float *factors,
                  size_t n_queries,
                  size_t n,
                  float *merged);
    void (*count)(struct kv_topk *selector,
                  const float *scores,
                  const uint32_t *counts,
                  size_t n);
    size_t (*between)(const float *scores,
                      size_t n,
                      uint32_t least,
                      uint32_t most,
                      float *ret_scores,
                      size_t *ret_n_above);
    size_t (*collect)(struct kv_topk *selector,
                      const float *scores,
                      const uint32_t *counts,
                      size_t n,
                      uint32_t base,
                      uint32_t *ret_indices);
    void (*items)(const struct kv_topk *selector,
                  const float *scores,
                  const uint32_t *counts,
                  size_t n,
                  uint32_t *ret_above,
                  size_t *ret_n_above,
                  uint32_t *ret_equal,
                  size_t *ret_n_equal);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_topk_kernels *kv_topk_kernels_at(unsigned i);

#endif
