/* oracle.h - what a query must answer, found again: plain loops in double precision, slow and
 * obviously right.  It calls nothing of what it judges.
 *
 *   step 1  candidates are scored by what their codes stand for, by their keys where they have
 *           no codes; weighed; the best k * factor of each group are taken.  If that is all of
 *           them, there is no step 1.
 *   cut     (with a first cut) step 1 takes k * candidates instead; these are scored by their
 *           copies, by their keys where they have none, and the best k * factor of each group are
 *           left, of what the group itself has taken.  Step 1 of the best k of merged groups then
 *           goes by bytes, if that pays (oracle_bytes.h)
 *   step 2  (not with factor 1) what was taken is scored by its keys and weighed; the best k of
 *           each group are chosen, of what the group itself has taken
 *
 *   weight  softmax of scale * score over all candidates, or all that were taken, for each
 *           vector
 *   group   all vectors with SUM and MAX, whose weights are merged; else each vector by itself
 *   ties    to the lower token
 *
 * A store computes in fp32: what it has for a number lies in a range around the exact one,
 * whose width follows from how it is computed (kernels/exact_scores.h, pq.h, select.h,
 * attend.h), the roundings of a sum of t terms being taken as independent (oracle.c).  Where
 * ranges overlap at the end of what is taken or chosen, either row may be in; nowhere else.
 * Rows that are scored by the very same numbers have the same score, so that ties are no matter
 * of rounding.
 *
 * Threads: one.  Memory: make/free.
 */
#ifndef KV_TESTS_SUPPORT_ORACLE_H
#define KV_TESTS_SUPPORT_ORACLE_H

#include "proto/kv_types.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A codebook, in the axes of keys. */
struct oracle_book {
    uint32_t m, n_centroids;
    double *parts; /* (m, n_centroids, d_k) what each adds to a key */
    double *mean;  /* (d_k) of the keys, which copies are less; NULL: there are no copies */
};

/* One kv head's candidates; tokens ascend. */
struct oracle_rows {
    uint32_t n, d_k, d_v;
    uint32_t *tokens;   /* (n) */
    uint32_t *ranges;   /* (n) which of the query's ranges the row is in */
    double *keys;       /* (n, d_k) */
    double *values;     /* (n, d_v) */
    bool *coded;        /* (n) step 1 goes by stands_for; NULL: no row has codes */
    double *stands_for; /* (n, d_k) the centroids of the row's codes, side by side */

    struct oracle_book *books; /* (n_books) */
    uint32_t n_books;
    uint32_t *books_of; /* (n) which one the row's block has codes of, from 1; 0: none */
    uint8_t *codes;     /* (n, KV_SUBSPACES_MAX) */
    bool *copied;       /* (n) the cut goes by `copies` */
    double *copies;     /* (n, d_k) what the row's copy stands for, less the book's mean */
};

/* Room for n rows, all of it zeros, none coded. */
void oracle_rows_make(struct oracle_rows *rows, uint32_t n, uint32_t d_k, uint32_t d_v);
void oracle_rows_free(struct oracle_rows *rows);

/* `n` elements of a row. */
void oracle_load(enum kv_dtype type, const void *bytes, size_t n, double *ret_values);

struct oracle_question {
    const float *queries; /* (n_queries, d_k) */
    uint32_t n_queries;
    float scale;
    enum kv_merge merge;
    enum kv_selection selection;
    float share;
    uint32_t k, factor;
    enum kv_first_cut first_cut;
    uint32_t candidates; /* with a first cut */
};

struct oracle_range {
    double low, high;
};

struct oracle {
    struct oracle_question question;
    const struct oracle_rows *rows; /* lent */
    bool skips;                     /* there is no step 1: all are taken */
    uint32_t *must, *may;         /* (n) bit g: group g certainly, or possibly, chose the row */
    struct oracle_range *weights; /* (n) that an answer names */
    uint32_t taken_least, taken_most, chosen_least, chosen_most;
};

void oracle_make(struct oracle *oracle,
                 const struct oracle_question *question,
                 const struct oracle_rows *rows);
void oracle_free(struct oracle *oracle);

/* An answer. */
struct oracle_answer {
    uint32_t n_chosen, n_ids;
    const uint32_t *ids;
    const uint32_t *heads; /* (n_ids) bit q: vector q chose it; NULL: not said */
    const float *scores;   /* (n_ids) weights; NULL: not said */
    const bool *held;      /* (n candidates) not sent and not attended; NULL: none */
    bool names_held_only;
};

/* NULL, or what is wrong with the choice; the text is the oracle's until it is called again. */
const char *oracle_choice_fault(const struct oracle *oracle,
                                const struct oracle_answer *answer);

/* The same of attention over what was chosen and is not held.  Where the answer does not name
 * the rows, any choice will do that the oracle allows, if there are few; *ret_undecided (may be
 * NULL) says that there are many, and nothing was checked.
 *   outputs  (n_queries, d_v)
 *   lses     (n_queries) */
const char *oracle_attention_fault(const struct oracle *oracle,
                                   const struct oracle_answer *answer,
                                   const float *outputs,
                                   const float *lses,
                                   bool *ret_undecided);

/* Attention of one vector over the rows that are `in` (n): log-sum-exp, -INFINITY of no row.
 *   ret_output  (d_v) */
double oracle_attend(const struct oracle_rows *rows,
                     const float *query,
                     float scale,
                     const bool *in,
                     double *ret_output);

#endif
