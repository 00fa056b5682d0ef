/* choose.h - from the scores of some rows to the chosen ones: weights, merge, top-k.
 *
 *   weight   softmax over the rows of scale * score, for each query vector
 *   merge    SUM: the k largest sums of weights;  MAX: the k largest of the largest weights;
 *            UNION, NONE: the k largest scores of each vector, together
 *
 * Ties go to the lower index.  See kernels/select.h for the order of every sum.
 *
 * Threads: pure function.  Memory: the caller's.
 */
#ifndef KV_CHOOSE_H
#define KV_CHOOSE_H

#include "kv_types.h"

#include <stdbool.h>

struct kv_choice {
    enum kv_merge merge;
    uint32_t n_queries;
    float scale;
    uint32_t k;
};

/* Rows that a choice among n may take. */
uint32_t kv_choice_max(const struct kv_choice *choice, uint32_t n);

/* Chooses among n rows; returns how many, at most kv_choice_max().
 *   scores       (n_queries, n)
 *   among        (n) bit q: vector q may choose the row; NULL: all may choose all.  UNION and
 *                NONE only
 *   weights      the merged weights are wanted; SUM and MAX make them anyway
 *   ret_indices  (kv_choice_max()) ascending
 *   ret_heads    (kv_choice_max()) bit q: vector q chose it; SUM and MAX: all; may be NULL
 *   ret_weights  (n) merged weights: sums for SUM, else the largest
 *   spare        (n) */
uint32_t kv_choose(const struct kv_choice *choice,
                   const float *scores,
                   const uint32_t *among,
                   uint32_t n,
                   bool weights,
                   uint32_t *ret_indices,
                   uint32_t *ret_heads,
                   float *ret_weights,
                   float *spare);

#endif
