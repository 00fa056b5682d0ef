/* select.h - from scores to selected rows: softmax, merging of query heads, exact top-k.
 *
 * What is scored is an item: a row, or some rows that share a score (a cell, see pq_cells.h).
 * `counts` says how many rows each item is, NULL that each is one; an item of no rows is as if
 * it were not there, whatever its score.
 *
 * Numerical contract, the same in every instruction set, to the bit, and the same for c rows
 * with one score as for one item of c rows:
 *   exp(x)    one polynomial in fp32 (exp.h says which); 0 below -87 and of a NaN, 1
 *             above 0, where only rounding gets; else the relative error is at most 3e-7
 *   max       NaN counts as -inf; of nothing: -inf; a zero is +0
 *   exp sum   exp() in units of 2^-KV_EXP_SUM_BITS, rounded to the nearest, ties to even,
 *             added as whole numbers: the order does not matter
 *   select    the k largest, ties to the lower index; NaN is below -inf; -0 equals +0
 *
 * (Which NaN a NaN is, is left open.)
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Pointers need the alignment
 * of their type only.  What is read and what is written do not overlap.
 */
#ifndef KV_KERNELS_SELECT_H
#define KV_KERNELS_SELECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KV_EXP_SUM_BITS = 38, /* the sum of 2^24 rows fits 62 bits */
};

/* The largest of scores (n), as max() above. */
float kv_scores_max(const float *scores, const uint32_t *counts, size_t n);

/* Softmax, numerators: scores (n) become exp(scale * (score - max)), the argument being
 * fma(score, scale, -max * scale).  A NaN, also as an argument (inf - inf), becomes 0; so does
 * everything where max = -inf.  `scale` is finite and positive.  Returns their exp sum, each
 * times its count. */
uint64_t
kv_softmax_exps(float *scores, const uint32_t *counts, size_t n, float scale, float max);

/* 1 / sum of an exp sum, 0 for 0: what makes exp() a weight. */
static inline float kv_softmax_factor(uint64_t sum)
{
    return sum > 0 ? (float)((double)((uint64_t)1 << KV_EXP_SUM_BITS) / (double)sum) : 0.0f;
}

/* The weights of n_queries query heads more, one after the other:
 *   sum   merged[i] = fma(exps[i], factor, merged[i])
 *   max   merged[i] = the larger of exps[i] * factor and merged[i], which are no NaN
 *
 *   exps     (n_queries, n), exps_stride apart
 *   factors  (n_queries)
 *   merged   (n) */
void kv_weights_merge_sum(const float *exps,
                          size_t exps_stride,
                          const float *factors,
                          size_t n_queries,
                          size_t n,
                          float *merged);
void kv_weights_merge_max(const float *exps,
                          size_t exps_stride,
                          const float *factors,
                          size_t n_queries,
                          size_t n,
                          float *merged);

enum {
    KV_TOPK_BINS = 2048,
    KV_TOPK_PASSES = 3,
};

/* Finds the k largest in three passes over the scores, each of which may be done in parts:
 *
 *     kv_topk_begin(&selector, k);
 *     for (pass = 0; pass < KV_TOPK_PASSES; pass++) {
 *         kv_topk_count(&selector, scores, counts, n);       as often as there are parts
 *         kv_topk_next(&selector);
 *     }
 *     kv_topk_collect(...);                                  likewise, in order
 *
 * Chosen are the items above the bound and `ties` rows of those at the bound. */
struct kv_topk {
    uint64_t ties;
    uint32_t pass;
    uint32_t bound; /* a score's sort key: kv_score_key() */
    uint32_t bins[KV_TOPK_BINS];
};

/* A score as an unsigned number in the order of select. */
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
    KV_TOPK_SPARE = 8, /* places after the last index that may be overwritten */
};

void kv_topk_begin(struct kv_topk *selector, uint64_t k);
void kv_topk_count(struct kv_topk *selector,
                   const float *scores,
                   const uint32_t *counts,
                   size_t n);
void kv_topk_next(struct kv_topk *selector);

/* Of many rows few need to be looked at more than once: a sample says about where the bound is.
 *
 *     if (kv_scores_guess(...))
 *         kv_scores_between(...);                                as often as there are parts
 *
 * and where n_above < k <= n_above + n_between, the k-th largest of all is the (k - n_above)-th
 * largest of those between. */

/* Sort keys that the k-th largest of scores (n) is likely to be between, or at; false: they are
 * too few, or k is too near n, for a sample to say that. */
bool kv_scores_guess(
    const float *scores, size_t n, uint64_t k, uint32_t *ret_least, uint32_t *ret_most);

/* Scores (n) whose sort keys are in [least, most], in any order, and how many are above.
 * Returns how many there are.
 *   ret_scores  all (n) may be written */
size_t kv_scores_between(const float *scores,
                         size_t n,
                         uint32_t least,
                         uint32_t most,
                         float *ret_scores,
                         size_t *ret_n_above);

/* The selected of some rows (counts of 0 and 1 only), from index `base` on, ascending; takes
 * off `ties` what it took of them.  ret_indices has room for KV_TOPK_SPARE more than are
 * selected. Returns how many. */
size_t kv_topk_collect(struct kv_topk *selector,
                       const float *scores,
                       const uint32_t *counts,
                       size_t n,
                       uint32_t base,
                       uint32_t *ret_indices);

/* Items of any counts: those above the bound and those at it, ascending, ties not looked at.
 * Room for KV_TOPK_SPARE more than there can be. */
void kv_topk_items(const struct kv_topk *selector,
                   const float *scores,
                   const uint32_t *counts,
                   size_t n,
                   uint32_t *ret_above,
                   size_t *ret_n_above,
                   uint32_t *ret_equal,
                   size_t *ret_n_equal);

/* All of that at once: indices of the min(k, n) largest of scores (n), ascending, n < 2^32;
 * room for KV_TOPK_SPARE more.
 *   scratch  (n) floats */
size_t
kv_topk_select(const float *scores, size_t n, size_t k, uint32_t *ret_indices, float *scratch);

/* How many of the largest weights (n), none negative, have together at least `share` of
 * `total`, their exp sum (kv_weights_sum); of equal ones as many as it takes.  Three passes, in
 * parts like those above. */
struct kv_mass {
    uint64_t n_rows; /* the answer, when all passes are done */
    uint64_t wanted; /* still, in units of the exp sum */
    uint32_t pass, bound;
    uint64_t masses[KV_TOPK_BINS];
    uint64_t rows[KV_TOPK_BINS];
};

/* The weights' sum, as exp sums are. */
uint64_t kv_weights_sum(const float *weights, const uint32_t *counts, size_t n);
void kv_mass_begin(struct kv_mass *mass, uint64_t total, double share);
void kv_mass_count(struct kv_mass *mass,
                   const float *weights,
                   const uint32_t *counts,
                   size_t n);
void kv_mass_next(struct kv_mass *mass);

/* Rows of items with at least this score. */
uint64_t kv_count_from(const float *scores, const uint32_t *counts, size_t n, float least);

/* One implementation of the family; functions as above.  Slowest first: the last one that this
 * CPU supports is used. */
struct kv_topk_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    float (*max)(const float *scores, const uint32_t *counts, size_t n);
    uint64_t (*exps)(float *scores, const uint32_t *counts, size_t n, float scale, float max);
    void (*merge_sum)(const float *exps,
                      size_t exps_stride,
                      const float *factors,
                      size_t n_queries,
                      size_t n,
                      float *merged);
    void (*merge_max)(const float *exps,
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
