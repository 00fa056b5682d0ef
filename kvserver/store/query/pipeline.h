/* pipeline.h - one query over the units of a session, in slices:
 *
 *     kvs_query_pipeline_begin();
 *     while (!kvs_query_pipeline_is_done()) { kvs_query_pipeline_slice(); other work }
 *
 * For each unit: score -> select candidates -> expand -> rerank -> select -> gather or attend ->
 * estimate.  Step 1, up to expand, is left out where it lets every row through; step 2, rerank
 * and select, as well where every candidate is selected and nobody asked for weights.
 *
 * A query knows no request: whoever asks gives it an input, and fetches the answer from its
 * arrays.  Between slices rows may be added to units, and codes, cells and centroids may go where
 * kvs_query_pipeline_is_between(); else units stay as they are.
 *
 * Threads: the data thread.  Memory: create/destroy; large parts come from the system as they
 * are used.
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
        32 << 20, /* of scores: eligible rows times (query vectors + 2), and more */
    KVS_QUERY_PIPELINE_IDS = KV_WIRE_BODY_MAX / sizeof(uint32_t),
};

enum kvs_query_stage {
    KVS_QUERY_UNIT,              /* to the next unit */
    KVS_QUERY_SCORE,             /* step 1: scores of the eligible rows */
    KVS_QUERY_SELECT_CANDIDATES, /* step 1: merge, choose */
    KVS_QUERY_EXPAND,            /* step 1: the rows chosen */
    KVS_QUERY_RERANK,            /* step 2: exact scores */
    KVS_QUERY_SELECT,            /* step 2: merge, choose */
    KVS_QUERY_GATHER,            /* names, and rows */
    KVS_QUERY_ATTEND,   /* step 3: attention over the chosen rows; names of those held */
    KVS_QUERY_ESTIMATE, /* step 3: what the other eligible rows would have added */
};

/* What is asked, of what, and where it goes.  All that it points to is the caller's, and sound,
 * until the query has ended. */
struct kvs_query_input {
    const struct kv_wire_query *query;  /* its numbers */
    const struct kv_wire_range *ranges; /* (query->n_ranges) of tokens that all units have */
    uint32_t n_units;
    const struct kv_wire_unit *named;          /* (n_units) */
    struct kvs_unit *const *units;             /* (n_units) */
    const float *queries;                      /* of each unit (query->n_queries, d_k) */
    const struct kv_wire_cached_block *cached; /* of each unit (n_ids), ascending */
    const struct kv_layer_schema *layers;      /* by number */
    uint8_t *rows;                             /* room for the rows, with KV_ANSWER_ROWS */

    struct kvs_segment_store *store; /* of the units */
    struct kvs_codebooks *codebooks;
    struct kvs_indexer *indexer;
    const struct kv_clock *clock;

    /* Is called when it is known which rows of a unit are chosen.  NULL: nobody wants to know.
     *   choice  what they were chosen by
     *   tokens  (n_tokens) ascending */
    void (*selected)(void *arg,
                     const struct kvs_score *score,
                     const struct kvs_selection *selection,
                     const uint32_t *tokens,
                     uint32_t n_tokens);
    void *arg;
};

/* What a query works with.  The sizes are those of the largest one. */
struct kvs_query_scratch {
    struct kvs_score_run *runs; /* (KVS_SCORE_RUNS_MAX) */
    float *tables;              /* (KV_QUERIES_MAX, KVS_SCORE_TABLE) */
    uint32_t *candidates;       /* tokens that step 1 took; room for what it may */
    uint32_t *query_mask;       /* ... and the vectors that did */
    uint32_t *indices;          /* chosen of them */

    /* (KVS_QUERY_PIPELINE_FLOATS) Step 1 has all of it, as kvs_score.room; then it is what the arrays
     * below are in. */
    float *floats;

    /* Step 2's, of the rows that step 1 took: kvs_query_scratch_divide(). */
    float *scores;         /* (n_queries, n_candidates) */
    float *weights;        /* (n_selected) of the rows chosen; where `scores` were */
    float *selection_room; /* (KVS_SELECT_CAPACITY, n_candidates) */
    uint32_t *selected_by; /* (n_selected) bit q: vector q chose the row */
    float *kept_scores;    /* (n_queries, n_candidates) as `scores`, for step 3 */
    uint32_t *kept_tokens; /* (n_candidates) what these are scores of */
};

struct kvs_query_pipeline {
    struct kvs_query_input input;
    enum kvs_query_stage stage;
    uint32_t unit;        /* at work */
    uint32_t n_again;     /* times that the unit was begun anew, since its cells were bad */
    uint32_t bad;         /* the token of a bad row, when a slice has failed */
    const float *queries; /* of the unit */
    const struct kv_wire_cached_block *cached,
        *cached_end;                           /* of the unit, from the next token on */
    const struct kv_wire_cached_block *looked; /* the last one whose fingerprint was compared */
    bool looked_same;
    struct kvs_score score;
    struct kvs_selection candidate_selection, selection; /* of step 1, of step 2 */
    struct kvs_selector *selector;                       /* at work on one of them */
    struct kvs_expander *expander;
    uint32_t k[KV_QUERIES_MAX]; /* rows that step 1 wants of each group */
    struct kvs_query_scratch scratch;
    uint32_t n_candidates, n_selected;
    uint32_t n_scored; /* rows that step 2 scored */
    uint32_t cursor;   /* rows done of a stage */
    struct kvs_attention *attention;
    struct kvs_estimate *estimate;

    /* The answer so far, of all units. */
    struct kv_wire_query_result found[KV_WIRE_UNITS_MAX];
    uint32_t *ids, *query_masks, *crcs; /* (KVS_QUERY_PIPELINE_IDS) */
    float *scores;
    uint32_t n_ids, n_rows;
    size_t rows_bytes; /* in input.rows */
    /* What step 3 says: of each unit one output and log-sum-exp per vector, whatever they are
     * of; a second part of a unit's answer is merged into the first (kv_attend_merge()). */
    float *outputs, *lses;            /* (KVS_QUERY_PIPELINE_IDS) */
    uint32_t n_outputs, n_lses;       /* floats of the units that are done */
    uint32_t n_attended;              /* rows */
    uint32_t n_attended_unsummarised; /* rows not chosen, attended */
};

/* Says where step 2's arrays are in `floats`, one behind the other. */
void kvs_query_scratch_divide(struct kvs_query_scratch *scratch,
                              uint32_t n_queries,
                              uint32_t n_candidates);

/* NULL: out of memory. */
struct kvs_query_pipeline *kvs_query_pipeline_create(void);
void kvs_query_pipeline_destroy(struct kvs_query_pipeline *pipeline); /* NULL is allowed */

/* Forgets the query before.  The input is copied. */
void kvs_query_pipeline_begin(struct kvs_query_pipeline *pipeline,
                              const struct kvs_query_input *input);

/* Works for some 50 to 100 us.  False: there is no answer, as the row of token `bad` of unit
 * `unit` is known to be bad, or has turned out to be. */
bool kvs_query_pipeline_slice(struct kvs_query_pipeline *pipeline);

/* The answer is complete. */
static inline bool kvs_query_pipeline_is_done(const struct kvs_query_pipeline *pipeline)
{
    return pipeline->unit == pipeline->input.n_units;
}

/* Gives up the query, if it is not done. */
static inline void kvs_query_pipeline_end(struct kvs_query_pipeline *pipeline)
{
    pipeline->stage = KVS_QUERY_UNIT;
}

/* No scores are being made: codes, cells and centroids may be freed. */
static inline bool kvs_query_pipeline_is_between(const struct kvs_query_pipeline *pipeline)
{
    return pipeline->stage == KVS_QUERY_UNIT;
}

/* Whether there are outputs and log-sum-exps. */
bool kvs_query_has_outputs(const struct kv_wire_query *query);
/* Whether only rows are named that the asker holds. */
bool kvs_query_names_cached_only(const struct kv_wire_query *query);

/* What is chosen, were `rerank` times as many wanted. */
struct kvs_selection kvs_query_selection(const struct kv_wire_query *query, uint32_t rerank);

#endif
