/* expand.h - which rows a choice among a scan's items is: tokens, ascending, in slices.
 *
 *     kv_pick_begin();  while (!kv_pick_slice(...)) other work;
 *
 * A chosen cell is all its rows; of the cells at the bound, the lowest rows are taken.
 *
 * Threads: the data thread.  Memory: create/destroy.
 */
#ifndef KV_KVSERVER_STORE_QUERY_EXPAND_H
#define KV_KVSERVER_STORE_QUERY_EXPAND_H

#include "kvserver/store/query/score.h"
#include "kvserver/store/query/selection.h"

struct kv_picker {
    const struct kv_scan *scan;
    struct kv_chooser *chooser;
    uint32_t *tokens, *heads;      /* of the caller */
    uint32_t n;                    /* tokens so far; in the end, all */
    uint32_t n_max;                /* room for them: cells whose lists are bad may claim more */
    uint32_t n_of[KV_QUERIES_MAX]; /* rows that each group has chosen so far */
    uint32_t part, done;           /* rows of it */

    /* Of some rows of a part. */
    uint32_t *rows, *marks;     /* (KV_PICK_ROWS_MAX) */
    uint64_t *above, *at_bound; /* bits (KV_PICK_ROWS_MAX) */
};

enum {
    KV_PICK_ROWS_MAX = KV_ARENA_PAGE / 4, /* more than a codebook's cells have */
};

struct kv_picker *kv_picker_create(void);         /* NULL: out of memory */
void kv_picker_destroy(struct kv_picker *picker); /* NULL is allowed */

/* Begins to write the rows that the chooser, which is done, chose among the items of the scan.
 *   tokens  (kv_choice_max())
 *   heads   (kv_choice_max()) bit q: vector q chose the row; SUM and MAX: all */
void kv_pick_begin(struct kv_picker *picker,
                   const struct kv_scan *scan,
                   struct kv_chooser *chooser,
                   uint32_t *tokens,
                   uint32_t *heads);

/* Some rows, or one chapter's cells; true when picker->n tokens are there. */
bool kv_pick_slice(struct kv_picker *picker, const struct kv_codebooks *books);

/* Whether each group chose as many rows as it was to: lists of cells that have gone bad may
 * make it more or fewer. */
bool kv_pick_is_whole(const struct kv_picker *picker);

/* The merged weights, which the chooser has made, of n tokens that it chose, ascending. */
void kv_pick_weights(const struct kv_scan *scan,
                     const struct kv_chooser *chooser,
                     const struct kv_codebooks *books,
                     const uint32_t *tokens,
                     uint32_t n,
                     float *ret_weights);

#endif
