/* estimate.h - step 3 of a query: what the eligible rows of a unit that were not chosen would
 * have added to attention, a slice at a time.
 *
 * Summaries are verified before they are used (codebook.h): those that have gone bad are lost,
 * and their rows attended.  Rows are verified when they are attended (attend.h): one that is
 * bad ends it.
 *
 * Those of which the unit's codebooks have summaries of the size asked for are estimated by
 * them (kernels/estimate.h), the others are attended (kernels/attend.h): rows behind the last
 * chapter, or a chapter whose summaries found no memory.  Which rows are which is found out
 * group by group, as summaries may come and go meanwhile; each row is one or the other.
 *
 *     kvs_estimate_begin();  while (!kvs_estimate_slice(...)) other work;  kvs_estimate_end();
 *
 * Threads: the data thread.  Memory: the struct's own, a fixed size; the unit must not change
 * between slices but grow.
 */
#ifndef KV_KVSERVER_STORE_QUERY_ESTIMATE_H
#define KV_KVSERVER_STORE_QUERY_ESTIMATE_H

#include "kernels/estimate.h"
#include "kvserver/store/query/attend.h"
#include "kvserver/store/query/score.h"
#include "proto/kv_wire.h"

/* What is asked.  The arrays are the caller's, until the end. */
struct kvs_estimate_input {
    const struct kvs_score *score; /* unit, ranges, queries */
    struct kv_attend_shape shape;  /* of the unit's rows */
    uint32_t bits;                 /* KV_SUMMARY_16, KV_SUMMARY_64 */
    const uint32_t *selected;      /* (n_selected) tokens, ascending */
    const uint32_t *query_mask;    /* (n_selected) bit q: vector q chose it */
    uint32_t n_selected;
    bool each;              /* a vector's are the rows that it did not choose itself */
    const uint32_t *scored; /* (n_scored) tokens of exact scores, ascending: all that were
                             * chosen, or none */
    const float *scores;    /* (n_queries, n_scored) inner products */
    uint32_t n_scored;
};

struct kvs_estimate {
    struct kvs_estimate_input input;
    struct kv_summary_shape shape;
    uint32_t range, token;           /* the next candidate */
    uint32_t at_selected, at_scored; /* the next of them */
    struct kvs_attention attention;  /* over rows without summaries */
    uint32_t n_pending;              /* such rows, not attended yet: they may still be moved */
    uint32_t pending[KVS_ATTENTION_ROWS], pending_query_mask[KVS_ATTENTION_ROWS];
    uint32_t n_estimated; /* rows that summaries stand for, for some vector */
    uint32_t n_exact;     /* rows attended */
    uint32_t bad;         /* a token whose row is bad; UINT32_MAX: none */
    uint32_t lost; /* the first block of a chapter whose summaries were bad; UINT32_MAX: none */

    float state[KV_QUERIES_MAX * (2 + KV_SUMMARY_D_MAX)]; /* of the summaries */
    float squares[KV_QUERIES_MAX];                        /* of the queries */

    /* Of one group. */
    uint16_t counts[KV_QUERIES_MAX * KV_SUMMARIES_MAX];
    uint32_t places[KV_SUMMARY_ROWS], own[KV_SUMMARY_ROWS];
    uint8_t numbers[KV_SUMMARY_ROWS];
    float scores[KV_QUERIES_MAX * KV_SUMMARY_ROWS];

    /* By the summaries, and of the rows; to be merged. */
    float outputs[2][KV_QUERIES_MAX * KV_SUMMARY_D_MAX], lses[2][KV_QUERIES_MAX];
};

void kvs_estimate_begin(struct kvs_estimate *estimate, const struct kvs_estimate_input *input);

/* Works for some 50 us; true when all eligible rows are in it, which a bad row prevents. */
bool kvs_estimate_slice(struct kvs_estimate *estimate,
                        struct kvs_codebooks *books,
                        const struct kv_clock *clock);

/* What they amount to.
 *   merges      the answer over other rows is in ret_output and ret_lse: over both, then
 *   ret_output  (n_queries, d_v)
 *   ret_lse     (n_queries), natural; -inf: of no row */
void kvs_estimate_end(struct kvs_estimate *estimate,
                      bool merges,
                      float *ret_output,
                      float *ret_lse);

#endif
