/* pipeline.h - queries over the same units of sessions, in slices.
 *
 *     kvs_query_pipeline_begin();  kvs_query_pipeline_add() ...
 *     while (!kvs_query_pipeline_is_done()) { kvs_query_pipeline_slice(); other work }
 *
 * A query in the pipeline is an entry.  Mostly there is one.  Queries of forks of one session
 * share rows; in one pipeline they share what it costs to read these from memory: all entries
 * finish a unit before any begins the next one, and their candidates are rescored span by span,
 * so that a span's keys are read once and then come from the cache.  What an entry selects, and
 * its result, do not depend on the other entries.
 *
 * Each unit goes through these stages, in steps as kvclient.h defines them:
 *
 *     step 1   bytes, or                               from eligible rows to candidates:
 *              score -> select candidates -> expand    one entry after the other
 *     cut      cut                                     scores of copies: all entries together
 *              select cut                              from candidates to fewer
 *     step 2   rerank                                  all entries together
 *              select                                  from candidates to selected rows:
 *     step 3   gather or attend -> estimate            from selected rows to the result:
 *                                                      one entry after the other
 *
 * Step 1 of a top-k query is skipped if every eligible row would become a candidate, and the cut
 * if there is none, or it would leave all of them.  Step 2 is skipped if every candidate would be
 * selected and no weights are requested; weights of a query without a cut whose candidates are
 * the selected rows are those of step 1.
 *
 * A query touches the rows of few blocks: those with candidates, those without codes and, if it
 * asks for an estimate, those without summaries.  Where rows are away (rows/residency.h) the caller has
 * the last two in memory, and is told of the first before step 2.  An entry that lacks some does step 1
 * of its other units, so that it lacks all at once, and completes without a result.
 *
 * The pipeline knows nothing of requests: the caller passes inputs, with arrays for the results.
 * Between slices, rows may be added to units; units may not change otherwise while an entry that
 * has them is active.  Their index may change:
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
#include "kvserver/store/query/byte_scores.h"
#include "kvserver/store/query/estimate.h"
#include "kvserver/store/query/expand.h"
#include "kvserver/store/query/score.h"

enum {
    KVS_QUERY_STEP_1_FLOATS = 32 << 20,   /* that step 1 of a query may need */
    KVS_QUERY_PIPELINE_FLOATS = 50 << 20, /* kvs_query_pipeline_need() of the largest query */
    KVS_QUERY_ENTRIES_MAX = KV_WIRE_ENTRIES_MAX,
};

enum kvs_query_stage {
    KVS_QUERY_UNIT,              /* next unit */
    KVS_QUERY_BYTES,             /* step 1 of a query with a first cut */
    KVS_QUERY_SCORE,             /* step 1: score the eligible rows */
    KVS_QUERY_SELECT_CANDIDATES, /* step 1: merge and select */
    KVS_QUERY_EXPAND,            /* step 1: list the candidates */
    KVS_QUERY_CUT,               /* scores of copies, of all entries */
    KVS_QUERY_SELECT_CUT,        /* merge and select */
    KVS_QUERY_NEED,              /* says which rows are touched from here on */
    KVS_QUERY_RERANK,            /* step 2: exact scores, of all entries */
    KVS_QUERY_SELECT,            /* step 2: merge and select */
    KVS_QUERY_GATHER,            /* step 3: ids and rows */
    KVS_QUERY_ATTEND,   /* step 3: attention over the selected rows, ids of cached ones */
    KVS_QUERY_ESTIMATE, /* step 3: estimate of the other eligible rows */
    KVS_QUERY_LACKS,    /* instead of step 3 */
};

/* The input.  All that it points to belongs to the caller and must stay valid until the query
 * has ended. */
struct kvs_query_input {
    const struct kv_wire_query *query;  /* its parameters */
    const struct kv_wire_range *ranges; /* (query->n_ranges) tokens that all units have */
    uint32_t n_units;                   /* in a pipeline, all entries name the same units */
    const struct kv_wire_unit *named;   /* (n_units) */
    struct kvs_unit *(*unit_at)(void *arg, uint32_t i);
    const uint32_t *candidates; /* (n_units) instead of the query's, or of its rerank if it has
                                 * no first cut; NULL: the query's */
    uint32_t candidates_cap;    /* of each group; 0: as many as its merge allows */
    const float *queries;       /* per unit (query->n_queries, d_k) */
    const struct kv_wire_cached_block *cached; /* per unit (n_ids), ascending */
    const struct kv_layer_schema *layers;      /* by number */

    /* Where the result goes. */
    struct kv_wire_query_result *found; /* (n_units) */
    uint32_t *ids;
    float *weights;        /* (n_ids), or NULL */
    uint32_t *query_masks; /* (n_ids), or NULL */
    uint32_t *crcs;        /* of rows, or NULL */
    uint8_t *rows;         /* where KV_ANSWER_ROWS puts rows */
    float *outputs, *lses; /* of step 3: for each unit one of each per query vector.  Attention
                            * over the selected rows and the estimate are merged into one
                            * (kv_attend_merge()). */

    struct kvs_segment_store *store; /* of the units */
    struct kvs_codebooks *codebooks;
    struct kvs_indexer *indexer;

    /* Called when the selected rows of a unit are known; may be NULL.
     *   selection  how they were selected
     *   tokens     (n_tokens) ascending */
    void (*selected)(void *arg,
                     const struct kvs_score *score,
                     const struct kvs_selection *selection,
                     const uint32_t *tokens,
                     uint32_t n_tokens);
    /* Called before these rows of a unit are touched, ascending.  Returns whether all are in memory.
     * NULL: all rows are. */
    bool (*need)(void *arg, uint32_t unit, const uint32_t *tokens, uint32_t n_tokens);
    void *arg;
};

/* One query of a pipeline. */
struct kvs_query_entry {
    struct kvs_query_input input;
    bool is_active;       /* neither complete nor removed */
    bool lacks_rows;      /* that it needs: it completes without a result */
    bool is_cut;          /* the unit's candidates are scored by their copies, */
    bool is_reranked;     /* and those that are left by their keys */
    uint32_t n_again;     /* restarts of the unit because of bad cells */
    const float *queries; /* of the unit */
    const struct kv_wire_cached_block *cached,
        *cached_end;                           /* of the unit, from the next token on */
    const struct kv_wire_cached_block *looked; /* the last one whose fingerprint was compared */
    bool looked_same;
    struct kvs_score score;
    struct kvs_selection candidate_selection, cut_selection,
        selection;              /* of step 1, of the cut, of step 2 */
    uint32_t k[KV_QUERIES_MAX]; /* rows that the selection wants of each group */
    uint32_t n_candidates, n_selected;
    uint32_t n_scored; /* rows that the cut, or step 2, scored */
    uint32_t n_exact;  /* scores by keys: a candidate without a copy may have one in each */
    uint32_t cursor;   /* rows done in the current stage */
    uint32_t kept;     /* where the next kept score may be that step 2 improves */
    struct kv_wire_query_reads reads; /* so far */

    /* The unit's candidates, in the pipeline's floats. */
    uint32_t *candidates;  /* tokens of step 1's candidates; then of the selected rows; with
                            * KV_TOPK_SPARE more */
    uint32_t *query_mask;  /* query vectors that selected each */
    float *scores;         /* (n_queries, n_candidates) exact ones */
    float *weights;        /* (n_selected) of the selected rows; where `scores` were */
    float *kept_scores;    /* (n_queries, n_candidates) copy of `scores` for step 3; NULL: no
                            * estimate */
    uint32_t *kept_tokens; /* (n_candidates) their tokens */

    /* The result so far, of all units. */
    uint32_t n_ids, n_rows;
    size_t rows_bytes;                /* in input.rows */
    uint32_t n_outputs, n_lses;       /* floats of the units that are done */
    uint32_t n_attended;              /* rows */
    uint32_t n_attended_unsummarised; /* rows not selected, attended without summaries */
};

struct kvs_query_pipeline {
    struct kvs_query_entry entries[KVS_QUERY_ENTRIES_MAX];
    uint32_t n_entries, n_active;
    enum kvs_query_stage stage;
    uint32_t unit, n_units; /* the current one, of all entries */
    uint32_t entry;         /* the current one */
    uint32_t span_end;      /* CUT, RERANK: candidates before it are scored; UINT32_MAX: all */
    uint32_t bad;           /* token of a bad row, after a slice has failed */
    struct kvs_query_entry *done; /* the entry that the last slice completed, or NULL */

    /* Spans in which entries that share the pipeline have begun to rescore rows, since it was
     * made: read once for all of them, and counted for each. */
    uint64_t spans_read, spans_wanted;

    /* Working memory of the current entry. */
    struct kvs_selector *selector;
    struct kvs_expander *expander;
    struct kvs_attention *attention;
    struct kvs_estimate *estimate;
    struct kvs_score_run *runs; /* (KVS_SCORE_RUNS_MAX) */
    float *tables;              /* (KV_QUERIES_MAX, KVS_SCORE_TABLE) */
    float *rotated;             /* (KV_QUERIES_MAX, KV_ROTATION_DIM_MAX) */
    struct kvs_byte_scores *byte_scores;
    void *rounded;                            /* queries for copies, of rounded_of's unit */
    const struct kvs_query_entry *rounded_of; /* NULL: of none */
    uint64_t rounded_serial;                  /* of the codebook whose mean they are for */

    /* What the current entry uses, n_work at most: in step 1 as kvs_score.room, in step 2 to
     * select.  From `n_free` on, what the entries keep from one step to the next. */
    float *floats;
    size_t n_floats, n_work, n_free;
    size_t n_own, n_room; /* floats that may always be used, and now: pages are lent for more */
    size_t n_touched; /* that have been used, at least n_own: pages are lent for these, too */
    struct kvs_lent_pages lent;
};

/* Returns the floats that a query needs of a pipeline.  n_eligible: rows of each unit. */
size_t kvs_query_pipeline_need(const struct kv_wire_query *query, uint32_t n_eligible);

/* Creates a pipeline for queries that need at most n_floats, at most KVS_QUERY_PIPELINE_FLOATS.
 * One that needs more than n_own has to get room first.  What a query selects does not depend on
 * the pipeline's size.  Returns NULL if out of memory. */
struct kvs_query_pipeline *kvs_query_pipeline_create(size_t n_own, size_t n_floats);

/* Returns the memory that such a pipeline may come to use, with n_floats of its own. */
size_t kvs_query_pipeline_bytes(size_t n_floats);

/* Gets room for queries that need n_floats: pages of the node, which stay empty meanwhile.
 * Returns KV_IN_PROGRESS after a part of it, for some us: call again; KV_NO_MEMORY if there are
 * not enough pages. */
kv_status_t kvs_query_pipeline_get_room(struct kvs_query_pipeline *pipeline,
                                        struct kvs_pages *pages,
                                        size_t n_floats);

/* Queries that follow have no more room than its own, until one gets more.  No query may be at
 * work. */
void kvs_query_pipeline_end_room(struct kvs_query_pipeline *pipeline);

/* Gives back a piece of the room that has ended, of some us.  Returns false if there is none, or
 * all is given back. */
bool kvs_query_pipeline_drop_room(struct kvs_query_pipeline *pipeline, struct kvs_pages *pages);

/* Returns the floats of the largest pipeline that uses at most so many bytes; 0: none does. */
size_t kvs_query_pipeline_floats(size_t bytes);

void kvs_query_pipeline_destroy(struct kvs_query_pipeline *pipeline); /* NULL is allowed */

/* Places an entry's arrays in the pipeline's floats.  Returns false if they do not fit. */
bool kvs_query_pipeline_divide(struct kvs_query_pipeline *pipeline,
                               struct kvs_query_entry *entry);

/* Forgets the previous queries. */
void kvs_query_pipeline_begin(struct kvs_query_pipeline *pipeline);

/* Adds an entry before the first slice.  Copies the input.  Returns NULL if the pipeline has no
 * room for it; it has for the first one that does not need more than its floats. */
struct kvs_query_entry *kvs_query_pipeline_add(struct kvs_query_pipeline *pipeline,
                                               const struct kvs_query_input *input);

/* Runs one slice (base/slice.h), of any number of stages.  May complete an entry, `done`.  Returns
 * false if the row of token `bad` of unit `unit` is bad, or away, for which entries[entry] fails: the
 * caller removes it. */
bool kvs_query_pipeline_slice(struct kvs_query_pipeline *pipeline,
                              const struct kv_clock *clock);

/* Removes an entry that is active.  The others are not affected. */
void kvs_query_pipeline_remove(struct kvs_query_pipeline *pipeline,
                               struct kvs_query_entry *entry);

/* Returns whether no entry is active. */
static inline bool kvs_query_pipeline_is_done(const struct kvs_query_pipeline *pipeline)
{
    return pipeline->n_active == 0;
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

/* Returns the query's selection, with `factor` times as many rows. */
struct kvs_selection kvs_query_selection(const struct kv_wire_query *query, uint32_t factor);

/* Returns how many candidates step 1 takes for each selected row, of any unit at most. */
static inline uint32_t kvs_query_candidates(const struct kv_wire_query *query)
{
    return query->first_cut == KV_CUT_NONE ? query->rerank : query->candidates;
}

#endif
