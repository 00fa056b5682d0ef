/* estimate.h - step 3 of a query: estimates what the eligible rows of a unit that were not
 * selected would have added to attention, in pieces.
 *
 * Rows whose codebooks have summaries of the requested size are estimated from these
 * (kernels/estimate.h).  The others are attended (kernels/attend.h): rows after the last
 * chapter, or in a chapter without summaries.  This is decided group by group, because
 * summaries may be made or lost between pieces; every row is counted exactly once.
 *
 * Summaries are verified before they are used (codebook.h): bad ones are lost, and their rows
 * are attended.  Attended rows are verified as well (attend.h): a bad one ends the query.
 *
 *     kvs_estimate_begin();  while (!kvs_estimate_piece(...)) other work;  kvs_estimate_end();
 *
 * Threads: the data thread.  Memory: the struct's own, a fixed size; between pieces, the unit
 * may only grow.
 */
#ifndef KV_KVSERVER_STORE_QUERY_ESTIMATE_H
#define KV_KVSERVER_STORE_QUERY_ESTIMATE_H

#include "kernels/estimate.h"
#include "kvserver/store/query/attend.h"
#include "kvserver/store/query/score.h"
#include "proto/kv_wire.h"

/* The input.  The arrays belong to the caller and are used until the end. */
struct kvs_estimate_input {
    const struct kvs_score *score; /* unit, ranges, queries */
    struct kv_attend_shape shape;  /* of the unit's rows */
    uint32_t bits;                 /* KV_SUMMARY_16, KV_SUMMARY_64 */
    uint32_t rows;                 /* of a group of summaries */
    const uint32_t *selected;      /* (n_selected) tokens, ascending */
    const uint32_t *query_mask;    /* (n_selected) bit q: query vector q selected it */
    uint32_t n_selected;
    bool each;              /* estimate for each query vector the rows that it did not select
                             * itself */
    const uint32_t *scored; /* (n_scored) tokens with scores, exact or of copies, ascending: all
                             * selected rows are among them, or n_scored is 0 */
    const float *scores;    /* (n_queries, n_scored) inner products */
    uint32_t n_scored;
};

struct kvs_estimate {
    struct kvs_estimate_input input;
    struct kv_summary_shape shape;
    uint32_t range, token;           /* the next eligible row */
    uint32_t at_selected, at_scored; /* indices of the next selected and scored rows */
    struct kvs_attention attention;  /* over rows without summaries */
    uint32_t n_pending;              /* such rows, not yet attended: they may still be moved */
    uint32_t pending[KVS_ATTENTION_ROWS], pending_query_mask[KVS_ATTENTION_ROWS];
    uint32_t n_estimated;     /* rows estimated for at least one query vector */
    uint32_t n_exact;         /* rows attended */
    uint64_t summaries_bytes; /* read */
    uint32_t bad;             /* a token whose row is bad, or away, or UINT32_MAX */
    uint32_t lost; /* first block of a chapter whose summaries were bad, or UINT32_MAX */

    /* Of the query vectors. */
    struct kv_estimate_queries queries;
    int16_t elements[KV_QUERIES_MAX * KV_SUMMARY_D_MAX];
    float steps[KV_QUERIES_MAX], squares[KV_QUERIES_MAX];

    float state[KV_QUERIES_MAX * (1 + KV_ESTIMATE_LANES + KV_SUMMARY_D_MAX)]; /* of summaries */

    /* For one group. */
    uint16_t counts[KV_QUERIES_MAX * KV_SUMMARIES_MAX];
    uint32_t own[KV_SUMMARY_ROWS_MAX]; /* `each`: what several query vectors selected */
    uint8_t numbers[KV_SUMMARY_ROWS_MAX], marks[KV_SUMMARY_ROWS_MAX];
    float
        scores[KV_QUERIES_MAX * KV_SUMMARY_ROWS_MAX]; /* `each`: without each one's own rows */

    /* From summaries, and from attended rows; merged in the end. */
    float outputs[2][KV_QUERIES_MAX * KV_SUMMARY_D_MAX], lses[2][KV_QUERIES_MAX];
};

/* Returns whether the rows of a unit's block have summaries of this size now: none of them is touched
 * then, unless these turn out to be bad. */
bool kvs_estimate_has(const struct kvs_codebooks *books,
                      const struct kvs_unit *unit,
                      uint32_t block,
                      uint32_t bits,
                      uint32_t rows);

void kvs_estimate_begin(struct kvs_estimate *estimate, const struct kvs_estimate_input *input);

/* Adds the rows of some groups.  Returns true when all eligible rows are included; never true if
 * a row is bad. */
bool kvs_estimate_piece(struct kvs_estimate *estimate, struct kvs_codebooks *books);

/* Returns the estimate.
 *   merges      ret_output and ret_lse hold attention over other rows: merged into it
 *   ret_output  (n_queries, d_v)
 *   ret_lse     (n_queries), natural logarithm; -inf: no rows */
void kvs_estimate_end(struct kvs_estimate *estimate,
                      bool merges,
                      float *ret_output,
                      float *ret_lse);

#endif
