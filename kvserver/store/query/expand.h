/* expand.h - which rows a choice among scored items is: tokens, ascending, in slices.
 *
 *     kvs_expand_begin();  while (!kvs_expand_slice(...)) other work;
 *
 * A chosen cell is all its rows; of the cells at the bound, the lowest rows are taken.
 *
 * Threads: the data thread.  Memory: create/destroy.
 */
#ifndef KV_KVSERVER_STORE_QUERY_EXPAND_H
#define KV_KVSERVER_STORE_QUERY_EXPAND_H

#include "kvserver/store/query/score.h"
#include "kvserver/store/query/selection.h"

struct kvs_expander {
    const struct kvs_score *score;
    struct kvs_selector *selector;
    uint32_t *tokens, *query_masks; /* of the caller */
    uint32_t n;                     /* tokens so far; in the end, all */
    uint32_t n_max;                /* room for them: cells whose lists are bad may claim more */
    uint32_t n_of[KV_QUERIES_MAX]; /* rows that each group has chosen so far */
    uint32_t run, done;            /* the run it is at, and rows of it that are done */

    /* Of some rows of a run. */
    uint32_t *rows, *marks;     /* (KVS_EXPAND_ROWS_MAX) */
    uint64_t *above, *at_bound; /* bits (KVS_EXPAND_ROWS_MAX) */
};

enum {
    KVS_EXPAND_ROWS_MAX = KVS_ARENA_PAGE / 4, /* more than a codebook's cells have */
};

struct kvs_expander *kvs_expander_create(void);           /* NULL: out of memory */
void kvs_expander_destroy(struct kvs_expander *expander); /* NULL is allowed */

/* Begins to write the rows that the selector, which is done, chose among the scored items.
 *   tokens  (kvs_selection_max())
 *   query_masks  (kvs_selection_max()) bit q: vector q chose the row; SUM and MAX: all */
void kvs_expand_begin(struct kvs_expander *expander,
                      const struct kvs_score *score,
                      struct kvs_selector *selector,
                      uint32_t *tokens,
                      uint32_t *query_masks);

/* Some rows, or one chapter's cells; true when expander->n tokens are there. */
bool kvs_expand_slice(struct kvs_expander *expander, const struct kvs_codebooks *books);

/* Whether each group chose as many rows as it was to: lists of cells that have gone bad may
 * make it more or fewer. */
bool kvs_expand_is_whole(const struct kvs_expander *expander);

/* The merged weights, which the selector has made, of n tokens that it chose, ascending. */
void kvs_expand_weights(const struct kvs_score *score,
                        const struct kvs_selector *selector,
                        const struct kvs_codebooks *books,
                        const uint32_t *tokens,
                        uint32_t n,
                        float *ret_weights);

#endif
