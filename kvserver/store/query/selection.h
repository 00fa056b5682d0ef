/* selection.h - from the scores of some items to the chosen rows: weights, merge, how many,
 * which.
 *
 *   item     a row, or some rows that share a score (a cell); `counts` says how many
 *   weight   softmax over all rows of scale * score, for each query vector
 *   merge    SUM: the largest sums of weights;  MAX: the largest of the largest weights;
 *            UNION, NONE: the largest scores of each vector, together
 *   group    what is chosen for together: all vectors with SUM and MAX, else each by itself
 *   how many TOP: k;  MASS: as few of the heaviest as have `share` of the group's weight;
 *            FROM: those with at least `share` of the largest weight;  never more than k
 *
 * Ties go to the lower row.  See kernels/select.h for the arithmetic: it does not matter how
 * rows are made items, nor how the work is cut into slices.
 *
 *     kvs_select_begin();  while (!kvs_select_slice(...)) other work;  kvs_select_rows();
 *
 * Threads: pure functions of the selector.  Memory: the caller's.
 */
#ifndef KV_KVSERVER_STORE_QUERY_SELECTION_H
#define KV_KVSERVER_STORE_QUERY_SELECTION_H

#include "kernels/select.h"
#include "proto/kv_types.h"

#include <stdbool.h>

struct kvs_selection {
    enum kv_merge merge;
    enum kv_selection selection;
    uint32_t n_queries;
    float scale;
    float share; /* MASS, FROM */
    uint32_t k;
    const uint32_t
        *per_query;  /* (kvs_selection_groups()) k of each group, at most k; NULL: k */
    uint32_t factor; /* so many times as many rows are taken, at most KV_SELECTED_MAX */
};

/* How a choice among some items goes on. */
struct kvs_selector {
    struct kvs_selection selection;
    float *scores;                       /* (n_queries, n) */
    const uint32_t *counts, *query_mask; /* (n); see kvs_select_begin() */
    uint32_t n;
    bool wants_weights;
    float *weights, *spare; /* (n) */
    uint32_t *own; /* (n) counts of one group, with `query_mask`, or scores of its bound */
    uint32_t least, most, n_between; /* of those; 0: it is looked for among all */
    uint64_t n_above;

    uint32_t step, query, cursor, pass;
    bool knows_maxima;
    float max, maxima[KV_QUERIES_MAX],
        factors[KV_QUERIES_MAX]; /* of a query vector's weights */
    uint64_t sum;
    struct kv_mass mass;

    uint32_t k[KV_QUERIES_MAX]; /* rows of each group that the selection wants */
    struct kv_topk groups[KV_QUERIES_MAX];
};

static inline bool kvs_selection_merges(const struct kvs_selection *selection)
{
    return selection->merge == KV_MERGE_SUM || selection->merge == KV_MERGE_MAX;
}

static inline uint32_t kvs_selection_groups(const struct kvs_selection *selection)
{
    return kvs_selection_merges(selection) ? 1 : selection->n_queries;
}

/* Rows that each group takes where the selection wants k of it. */
static inline uint32_t kvs_selection_n_candidates(const struct kvs_selection *selection,
                                                  uint32_t k)
{
    const uint64_t takes = (uint64_t)k * selection->factor;

    return takes < KV_SELECTED_MAX ? (uint32_t)takes : KV_SELECTED_MAX;
}

/* Rows that a choice among n may take. */
uint32_t kvs_selection_max(const struct kvs_selection *selection, uint32_t n);

enum {
    KVS_SELECT_CAPACITY = 3, /* arrays of n floats */
};

/* Begins a choice among n items.
 *   scores  (n_queries, n), whose values are lost with SUM and MAX
 *   maxima  (n_queries) the largest of each vector's, as kv_scores_max() has them; NULL: they
 *           are looked for
 *   counts  (n), NULL: all are 1
 *   among   (n) bit g: group g may choose the row; NULL: all may.  UNION and NONE only, without
 *           counts
 *   weights the merged weights are wanted; SUM and MAX make them anyway
 *   room    (KVS_SELECT_CAPACITY, n), also for the weights: its first n when all is done */
void kvs_select_begin(struct kvs_selector *selector,
                      const struct kvs_selection *selection,
                      float *scores,
                      const float *maxima,
                      const uint32_t *counts,
                      const uint32_t *query_mask,
                      uint32_t n,
                      bool weights,
                      float *room);

/* Works for some 50 us; true when it is clear what is chosen: groups[g] has the bound. */
bool kvs_select_slice(struct kvs_selector *selector);

/* The scores that group g chooses by. */
static inline const float *kvs_selector_scores(const struct kvs_selector *selector,
                                               uint32_t group)
{
    return kvs_selection_merges(&selector->selection)
               ? selector->weights
               : selector->scores + (size_t)group * selector->n;
}

/* Where all items are rows: the chosen ones.  Returns how many, at most kvs_selection_max().
 *   ret_indices  ascending; room for KV_TOPK_SPARE more
 *   ret_query_masks  bit q: vector q chose it; SUM and MAX: all; may be NULL */
uint32_t kvs_select_rows(struct kvs_selector *selector,
                         uint32_t *ret_indices,
                         uint32_t *ret_query_masks);

/* All at once, of rows. */
static inline uint32_t kvs_select(struct kvs_selector *selector,
                                  const struct kvs_selection *selection,
                                  float *scores,
                                  const uint32_t *query_mask,
                                  uint32_t n,
                                  bool weights,
                                  float *room,
                                  uint32_t *ret_indices,
                                  uint32_t *ret_query_masks)
{
    kvs_select_begin(selector, selection, scores, NULL, NULL, query_mask, n, weights, room);
    while (!kvs_select_slice(selector))
        ;
    return kvs_select_rows(selector, ret_indices, ret_query_masks);
}

#endif
