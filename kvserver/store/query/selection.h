/* selection.h - from the scores of items to the selected items: weights, merging, how many,
 * which.
 *
 *   item     a row, or rows that share a score (a cell); `counts` has their number
 *   weight   softmax over all rows of scale * score, for each query vector
 *   merge    SUM: the largest sums of weights;  MAX: the largest maxima of weights;
 *            UNION, NONE: the largest scores of each query vector, together
 *   group    query vectors that select together: all with SUM and MAX, otherwise each by itself
 *   how many TOP: k;  MASS: the fewest heaviest rows that have `share` of the group's weight;
 *            THRESHOLD: rows with at least `share` of the largest weight;  never more than k
 *
 * Ties go to the lower row.  kernels/select.h defines the arithmetic: the result depends
 * neither on how rows form items nor on how the work is divided into pieces.
 *
 *     kvs_select_begin();  while (!kvs_select_piece(...)) other work;  kvs_select_rows();
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
    float share; /* MASS, THRESHOLD */
    uint32_t k;
    const uint32_t
        *per_query;  /* (kvs_selection_groups()) k of each group, at most k; NULL: k */
    uint32_t factor; /* so many times as many rows are selected, at most kvs_selection_cap():
                      * candidates in step 1 */
    uint32_t cap;    /* rows that a group selects at most; 0: as many as `merge` allows */
};

/* The state of a selection among some items. */
struct kvs_selector {
    struct kvs_selection selection;
    float *scores;                       /* (n_queries, n) */
    const uint32_t *counts, *query_mask; /* (n); see kvs_select_begin() */
    uint32_t n;
    bool wants_weights;
    float *weights, *spare; /* (n) */
    uint32_t
        *own; /* (n) counts of one group if query_mask is given, otherwise scores that may be
                    * its bound */
    uint32_t least, most, n_between; /* bounds, and scores in `own`; 0: all */
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

/* Returns how many rows a group selects at most. */
static inline uint32_t kvs_selection_cap(const struct kvs_selection *selection)
{
    if (selection->cap != 0)
        return selection->cap;
    return kvs_selection_merges(selection) ? KV_CANDIDATES_MAX : KV_SELECTED_MAX;
}

/* Returns how many rows each group selects if the selection wants k. */
static inline uint32_t kvs_selection_n_candidates(const struct kvs_selection *selection,
                                                  uint32_t k)
{
    const uint64_t wanted = (uint64_t)k * selection->factor;
    const uint32_t cap = kvs_selection_cap(selection);

    return wanted < cap ? (uint32_t)wanted : cap;
}

/* Returns how many of n rows are selected at most. */
uint32_t kvs_selection_max(const struct kvs_selection *selection, uint32_t n);

enum {
    KVS_SELECT_CAPACITY = 3, /* arrays of n floats */
};

/* Begins a selection among n items.
 *   scores      (n_queries, n); SUM and MAX overwrite them
 *   maxima      (n_queries) each query vector's largest score, as kv_scores_max() computes it;
 *               NULL: they are computed
 *   counts      (n); NULL: all are 1
 *   query_mask  (n) bit g: group g may select the row; NULL: all may.  UNION and NONE only,
 *               without counts
 *   weights     whether the merged weights are needed; SUM and MAX compute them anyway
 *   room        (KVS_SELECT_CAPACITY, n); its first n floats are the weights in the end */
void kvs_select_begin(struct kvs_selector *selector,
                      const struct kvs_selection *selection,
                      float *scores,
                      const float *maxima,
                      const uint32_t *counts,
                      const uint32_t *query_mask,
                      uint32_t n,
                      bool weights,
                      float *room);

/* Does a piece of the work, of some us.  Returns true when the selection is determined: groups[g]
 * has the bound. */
bool kvs_select_piece(struct kvs_selector *selector);

/* Returns the scores, or merged weights, that group g selects by. */
static inline const float *kvs_selector_scores(const struct kvs_selector *selector,
                                               uint32_t group)
{
    return kvs_selection_merges(&selector->selection)
               ? selector->weights
               : selector->scores + (size_t)group * selector->n;
}

/* Lists the selected rows, if all items are rows.  Returns their number, at most
 * kvs_selection_max().
 *   ret_indices  ascending; room for KV_TOPK_SPARE more
 *   ret_query_masks    bit q: query vector q selected it; SUM and MAX: all; may be NULL */
uint32_t kvs_select_rows(struct kvs_selector *selector,
                         uint32_t *ret_indices,
                         uint32_t *ret_query_masks);

/* Selects all at once; all items are rows. */
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
    while (!kvs_select_piece(selector))
        ;
    return kvs_select_rows(selector, ret_indices, ret_query_masks);
}

#endif
