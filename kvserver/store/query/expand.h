/* expand.h - from selected items (rows or cells) to rows: tokens, ascending, in pieces.
 *
 *     kvs_expand_begin();  while (!kvs_expand_piece(...)) other work;
 *
 * A selected cell gives all its rows; of the cells at the bound, the lowest rows are selected.
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
    uint32_t *tokens, *query_masks; /* the caller's */
    uint32_t n;                     /* tokens so far */
    uint32_t n_max;                 /* room for tokens: bad lists of cells may have more */
    uint32_t n_of[KV_QUERIES_MAX];  /* rows that each group has selected so far */
    uint32_t run, done;             /* the current run, and rows done of it */
    uint32_t group;                 /* the next one for the rows that follow these */

    /* For some rows of a run. */
    uint32_t rows_max;
    uint32_t *rows, *marks;     /* (rows_max) */
    uint64_t *above, *at_bound; /* bits (KVS_EXPAND_ROWS_MAX) */
};

enum {
    KVS_EXPAND_ROWS_MAX = KVS_ARENA_PAGE / 4, /* more than the cells of a codebook have */
};

/* For units with at most rows_max eligible rows, if that is below KVS_EXPAND_ROWS_MAX.  Returns
 * NULL if out of memory. */
struct kvs_expander *kvs_expander_create(uint32_t rows_max);
void kvs_expander_destroy(struct kvs_expander *expander); /* NULL is allowed */

/* Begins to write the rows that the selector, which is done, selected among the items.
 *   tokens       (kvs_selection_max())
 *   query_masks  (kvs_selection_max()) bit q: query vector q selected the row; SUM and MAX:
 *   all */
void kvs_expand_begin(struct kvs_expander *expander,
                      const struct kvs_score *score,
                      struct kvs_selector *selector,
                      uint32_t *tokens,
                      uint32_t *query_masks);

/* Expands what one group selected of some rows, or of the cells of one chapter.  Returns true
 * when all expander->n tokens are written. */
bool kvs_expand_piece(struct kvs_expander *expander, const struct kvs_codebooks *books);

/* Returns whether each group selected exactly as many rows as it should.  With bad lists of
 * cells it may be more or fewer. */
bool kvs_expand_is_whole(const struct kvs_expander *expander);

/* Writes the merged weights, which the selector has computed, of n selected tokens,
 * ascending. */
void kvs_expand_weights(const struct kvs_score *score,
                        const struct kvs_selector *selector,
                        const struct kvs_codebooks *books,
                        const uint32_t *tokens,
                        uint32_t n,
                        float *ret_weights);

#endif
