/* select.h - from scores to the chosen: softmax, merging of query heads, exact top-k.
 *
 * Numerical contract, the same in every instruction set, to the bit:
 *   exp(x)    one polynomial in fp32 (select_parts.h says which); 0 below -87 and of a NaN,
 *             exp(88) above 88; else the relative error is at most 3e-7
 *   max       NaN counts as -inf; of nothing: -inf; a zero is +0
 *   exp sum   groups of KV_SELECT_GROUP scores from the first on: in each, element i is
 *             added to lane i % 16, i ascending, lanes beginning at 0; then
 *             lane[i] += lane[i + 8] for i < 8, and so on with 4, 2 and 1; the groups' sums
 *             are added in double, ascending
 *   select    the k largest, ties to the lower index; NaN is below -inf; -0 equals +0
 *
 * (Which NaN a NaN is, is left open.)
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Pointers need the alignment
 * of their type only.  What is read and what is written do not overlap.
 */
#ifndef KV_SELECT_H
#define KV_SELECT_H

#include <stddef.h>
#include <stdint.h>

enum {
    KV_SELECT_GROUP = 128,
};

/* The largest of scores (n), as max() above. */
float kv_scores_max(const float *scores, size_t n);

/* The sum of exp(scale * (scores[i] - max)), the argument being fma(scores[i], scale, -max *
 * scale).  A NaN, also as an argument (inf - inf), adds nothing.  `scale` is finite and
 * positive; max = -inf: 0. */
double kv_scores_exp_sum(const float *scores, size_t n, float scale, float max);

/* merged[i] += exp(fma(scores[i], scale, -lse)): the softmax weights of one query head, lse
 * being scale * max + log(exp sum).  A NaN adds 0; lse = -inf: merged is left alone. */
void kv_merge_softmax(const float *scores, size_t n, float scale, float lse, float *merged);

/* merged[i] = the larger of both; a NaN loses, and of equals (+0, -0) merged stays. */
void kv_merge_max(const float *scores, size_t n, float *merged);

enum {
    KV_SELECT_SCRATCH = 2048, /* elements */
};

/* Indices of the min(k, n) largest of scores (n), ascending: ret_indices (min(k, n)), n < 2^32.
 * Returns how many.  scratch (KV_SELECT_SCRATCH) need not be set. */
size_t
kv_select(const float *scores, size_t n, size_t k, uint32_t *ret_indices, uint32_t *scratch);

/* One implementation of the family; functions as above.  Slowest first: the last one that this
 * CPU supports is used. */
struct kv_select_kernels {
    const char *name; /* "scalar", "avx2" */
    int (*supported)(void);
    float (*max)(const float *scores, size_t n);
    double (*exp_sum)(const float *scores, size_t n, float scale, float max);
    void (*merge_softmax)(const float *scores, size_t n, float scale, float lse, float *merged);
    void (*merge_max)(const float *scores, size_t n, float *merged);
    size_t (*select)(
        const float *scores, size_t n, size_t k, uint32_t *ret_indices, uint32_t *scratch);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_select_kernels *kv_select_kernels_at(unsigned i);

#endif
