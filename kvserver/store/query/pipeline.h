/* pipeline.h - one query over the units of a session, in slices.
 *
 *     kvs_query_pipeline_begin();
 *     while (!kvs_query_pipeline_is_done()) { kvs_query_pipeline_slice(); other work }
 *
 * Each unit goes through these stages, in steps as kvclient.h defines them:
 *
 *     step 1   score -> select candidates -> expand     from eligible rows to candidates
 *     step 2   rerank -> select                         from candidates to selected rows
 *     step 3   gather or attend -> estimate             from selected rows to the result
 *
 * Step 1 of a top-k query is skipped if every eligible row would become a candidate.  Step 2 is
 * then skipped as well if every candidate would be selected and no weights are requested.  With
 * rerank 1, step 1's candidates are the selected rows.
 *
 * The pipeline knows nothing of requests: the caller passes an input and reads the result from
 * the pipeline's arrays.  Between slices, rows may be added to units; units may not change
 * otherwise.  Their index may change:
 *
 *   codes, codebooks   may be made, or found bad, at any time.  They may be freed while
 *                      kvs_query_pipeline_is_between(); and, at any time, those of a codebook
 *                      that was once found broken while it was between: no unit that began
 *                      after that uses them.
 *   cells, summaries   may be made, lost, or freed for new ones at any time: each slice looks
 *                      them up.  A unit whose cells changed begins again.
 *
 * Threads: the data thread.  Memory: create/destroy; the system provides the pages of large
 * arrays as they are used.
 */
#ifndef KV_KVSERVER_STORE_QUERY_PIPELINE_H
#define KV_KVSERVER_STORE_QUERY_PIPELINE_H

#include "kvserver/store/index/builder.h"
#include "kvserver/store/query/attend.h"
#include "kvserver/store/query/estimate.h"
#include "kvserver/store/query/expand.h"
#include "kvserver/store/query/score.h"

enum {
    KVS_QUERY_PIPELINE_FLOATS =
        32 << 20, /* for scores: kvs_query_pipeline_need() of the largest query */
    KVS_QUERY_PIPELINE_IDS = KV_WIRE_BODY_MAX / sizeof(uint32_t),
};

enum kvs_query_stage {
    KVS_QUERY_UNIT,              /* next unit */
    KVS_QUERY_SCORE,             /* step 1: score the eligible rows */
    KVS_QUERY_SELECT_CANDIDATES, /* step 1: merge and select */
    KVS_QUERY_EXPAND,            /* step 1: list the candidates */
    KVS_QUERY_RERANK,            /* step 2: exact scores */
    KVS_QUERY_SELECT,            /* step 2: merge and select */
    KVS_QUERY_GATHER,            /* step 3: ids and rows */
    KVS_QUERY_ATTEND,   /* step 3: attention over the selected rows, ids of cached ones */
    KVS_QUERY_ESTIMATE, /* step 3: estimate of the other eligible rows */
};

/* The input.  All that it points to belongs to the caller and must stay valid until the query
 * has ended. */
struct kvs_query_input {
    const struct kv_wire_query *query;  /* its parameters */
    const struct kv_wire_range *ranges; /* (query->n_ranges) tokens that all units have */
    uint32_t n_units;
    const struct kv_wire_unit *named;          /* (n_units) */
    struct kvs_unit *const *units;             /* (n_units) */
    const float *queries;                      /* per unit (query->n_queries, d_k) */
    const struct kv_wire_cached_block *cached; /* per unit (n_ids), ascending */
    const struct kv_layer_schema *layers;      /* by number */
    uint8_t *rows;                             /* where KV_ANSWER_ROWS puts rows */

    struct kvs_segment_store *store; /* of the units */
    struct kvs_codebooks *codebooks;
    struct kvs_indexer *indexer;
    const struct kv_clock *clock;

    /* Called when the selected rows of a unit are known; may be NULL.
     *   selection  how they were selected
     *   tokens     (n_tokens) ascending */
    void (*selected)(void *arg,
                     const struct kvs_score *score,
                     const struct kvs_selection *selection,
                     const uint32_t *tokens,
                     uint32_t n_tokens);
    void *arg;
};

/* A query's working memory.  The sizes are those of the largest query that the pipeline takes. */
struct kvs_query_scratch {
    struct kvs_score_run *runs; /* (KVS_SCORE_RUNS_MAX) */
    float *tables;              /* (KV_QUERIES_MAX, KVS_SCORE_TABLE) */
    uint32_t *candidates;       /* tokens of step 1's candidates */
    uint32_t *query_mask;       /* query vectors that selected each candidate */
    uint32_t *indices;          /* of the selected candidates */

    /* (n_floats) Step 1 uses all of it as kvs_score.room; after that it holds the arrays
     * below. */
    float *floats;
    size_t n_floats;

    /* Step 2's arrays, for the candidates: kvs_query_scratch_divide(). */
    float *scores;         /* (n_queries, n_candidates) */
    float *weights;        /* (n_selected) of the selected rows; where `scores` were */
    float *selection_room; /* (KVS_SELECT_CAPACITY, n_candidates) */
    uint32_t *selected_by; /* (n_selected) bit q: query vector q selected the row */
    float *kept_scores;    /* (n_queries, n_candidates) copy of `scores` for step 3 */
    uint32_t *kept_tokens; /* (n_candidates) their tokens */
};

struct kvs_query_pipeline {
    struct kvs_query_input input;
    enum kvs_query_stage stage;
    uint32_t unit;        /* the current one */
    uint32_t n_again;     /* restarts of the unit because of bad cells */
    uint32_t bad;         /* token of a bad row, after a slice has failed */
    const float *queries; /* of the unit */
    const struct kv_wire_cached_block *cached,
        *cached_end;                           /* of the unit, from the next token on */
    const struct kv_wire_cached_block *looked; /* the last one whose fingerprint was compared */
    bool looked_same;
    struct kvs_score score;
    struct kvs_selection candidate_selection, selection; /* of step 1, of step 2 */
    struct kvs_selector *selector;                       /* for the current step */
    struct kvs_expander *expander;
    uint32_t k[KV_QUERIES_MAX]; /* rows that the selection wants of each group */
    struct kvs_query_scratch scratch;
    uint32_t n_candidates, n_selected;
    uint32_t n_scored; /* rows that step 2 scored */
    uint32_t cursor;   /* rows done in the current stage */
    struct kvs_attention *attention;
    struct kvs_estimate *estimate;

    /* The result so far, of all units. */
    struct kv_wire_query_result found[KV_WIRE_UNITS_MAX];
    uint32_t *ids, *query_masks, *crcs; /* (KVS_QUERY_PIPELINE_IDS) */
    float *scores;
    uint32_t n_ids, n_rows;
    size_t rows_bytes; /* in input.rows */
    /* Step 3's result: for each unit one output and one log-sum-exp per query vector.
     * Attention over the selected rows and the estimate are merged into one
     * (kv_attend_merge()). */
    float *outputs, *lses;            /* (KVS_QUERY_PIPELINE_IDS) */
    uint32_t n_outputs, n_lses;       /* floats of the units that are done */
    uint32_t n_attended;              /* rows */
    uint32_t n_attended_unsummarised; /* rows not selected, attended without summaries */
};

/* Places step 2's arrays in `floats`, one after the other. */
void kvs_query_scratch_divide(struct kvs_query_scratch *scratch,
                              uint32_t n_queries,
                              uint32_t n_candidates);

/* Returns the floats that a query needs of a pipeline.  n_eligible: rows of each unit. */
size_t kvs_query_pipeline_need(uint32_t n_eligible, uint32_t n_queries);

/* Creates a pipeline for queries that need at most n_floats, at most KVS_QUERY_PIPELINE_FLOATS.
 * What a query selects does not depend on the pipeline's size.  Returns NULL if out of
 * memory. */
struct kvs_query_pipeline *kvs_query_pipeline_create(size_t n_floats);

/* Returns the memory that such a pipeline may come to use. */
size_t kvs_query_pipeline_bytes(size_t n_floats);

/* Returns the floats of the largest pipeline that uses at most so many bytes; 0: none does. */
size_t kvs_query_pipeline_floats(size_t bytes);

void kvs_query_pipeline_destroy(struct kvs_query_pipeline *pipeline); /* NULL is allowed */

/* Starts a query; forgets the previous one.  Copies the input. */
void kvs_query_pipeline_begin(struct kvs_query_pipeline *pipeline,
                              const struct kvs_query_input *input);

/* Runs for about 50 to 100 us.  Returns false if the query fails because the row of token `bad`
 * of unit `unit` is bad. */
bool kvs_query_pipeline_slice(struct kvs_query_pipeline *pipeline);

/* Returns whether the result is complete. */
static inline bool kvs_query_pipeline_is_done(const struct kvs_query_pipeline *pipeline)
{
    return pipeline->unit == pipeline->input.n_units;
}

/* Ends the query, whether it is done or not. */
static inline void kvs_query_pipeline_end(struct kvs_query_pipeline *pipeline)
{
    pipeline->stage = KVS_QUERY_UNIT;
}

/* Returns whether no runs of a unit are in use: any codes and codebooks may then be freed. */
static inline bool kvs_query_pipeline_is_between(const struct kvs_query_pipeline *pipeline)
{
    return pipeline->stage == KVS_QUERY_UNIT;
}

/* Returns whether the result has outputs and log-sum-exps. */
bool kvs_query_has_outputs(const struct kv_wire_query *query);
/* Returns whether the result has ids only of rows that the client has cached. */
bool kvs_query_names_cached_only(const struct kv_wire_query *query);

/* Returns the query's selection, with `rerank` times as many rows. */
struct kvs_selection kvs_query_selection(const struct kv_wire_query *query, uint32_t rerank);

#endif
