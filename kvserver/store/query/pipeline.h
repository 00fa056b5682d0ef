/* pipeline.h - one query over the units of a session, in slices:
 *
 *     kv_querier_begin();
 *     while (!kv_querier_is_done()) { kv_querier_slice(); other work }
 *
 * For each unit: score -> take -> pick -> rerank -> choose -> gather or attend -> rest.  Step 1,
 * up to pick, is left out where it takes every candidate; step 2, rerank and choose, as well
 * where every candidate is chosen and nobody asked for weights.
 *
 * A query knows no request: whoever asks gives it an input, and fetches the answer from the
 * querier's arrays.  Between slices rows may be added to units, and codes, cells and centroids
 * may go where kv_querier_is_between(); else units stay as they are.
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
    KV_QUERIER_FLOATS =
        32 << 20, /* of scores: candidates times (query vectors + 2), and more */
    KV_QUERIER_IDS = KV_WIRE_BODY_MAX / sizeof(uint32_t),
};

enum kv_query_stage {
    KV_QUERY_UNIT,   /* to the next unit */
    KV_QUERY_SCORE,  /* step 1: scores of the candidates */
    KV_QUERY_TAKE,   /* step 1: merge, choose */
    KV_QUERY_PICK,   /* step 1: the rows chosen */
    KV_QUERY_RERANK, /* step 2: exact scores */
    KV_QUERY_CHOOSE, /* step 2: merge, choose */
    KV_QUERY_GATHER, /* names, and rows */
    KV_QUERY_ATTEND, /* step 3: attention over the chosen rows; names of those held */
    KV_QUERY_REST,   /* step 3: what the other candidates would have added */
};

/* What is asked, of what, and where it goes.  All that it points to is the caller's, and sound,
 * until the query has ended. */
struct kvs_query_input {
    const struct kv_wire_query *query;  /* its numbers */
    const struct kv_wire_range *ranges; /* (query->n_ranges) of tokens that all units have */
    uint32_t n_units;
    const struct kv_wire_unit *named;        /* (n_units) */
    struct kv_unit *const *units;            /* (n_units) */
    const float *queries;                    /* of each unit (query->n_queries, d_k) */
    const struct kv_wire_cached_block *held; /* of each unit (n_ids), ascending */
    const struct kv_layer_schema *layers;    /* by number */
    uint8_t *rows;                           /* room for the rows, with KV_ANSWER_ROWS */

    struct kv_heap *heap; /* of the units */
    struct kv_codebooks *codebooks;
    struct kv_indexer *indexer;
    const struct kv_clock *clock;

    /* Is called when it is known which rows of a unit are chosen.  NULL: nobody wants to know.
     *   choice  what they were chosen by
     *   tokens  (n_tokens) ascending */
    void (*selected)(void *arg,
                     const struct kv_scan *scan,
                     const struct kv_choice *choice,
                     const uint32_t *tokens,
                     uint32_t n_tokens);
    void *arg;
};

/* What a query works with.  The sizes are those of the largest one. */
struct kvs_query_scratch {
    struct kv_scan_part *parts; /* (KV_SCAN_PARTS_MAX) */
    float *tables;              /* (KV_QUERIES_MAX, KV_SCAN_TABLE) */
    uint32_t *taken;            /* tokens that step 1 took; room for what it may */
    uint32_t *among;            /* ... and the vectors that did */
    uint32_t *indices;          /* chosen of them */

    /* (KV_QUERIER_FLOATS) Step 1 has all of it, as kv_scan.room; then it is what the arrays
     * below are in. */
    float *floats;

    /* Step 2's, of the rows that step 1 took: kvs_query_scratch_divide(). */
    float *scores;         /* (n_queries, n_taken) */
    float *weights;        /* (n_chosen) of the rows chosen; where `scores` were */
    float *selection_room; /* (KV_CHOOSE_ROOM, n_taken) */
    uint32_t *chosen_by;   /* (n_chosen) bit q: vector q chose the row */
    float *kept_scores;    /* (n_queries, n_taken) as `scores`, for step 3 */
    uint32_t *kept_tokens; /* (n_taken) what these are scores of */
};

struct kv_querier {
    struct kvs_query_input input;
    enum kv_query_stage stage;
    uint32_t unit;        /* at work */
    uint32_t n_again;     /* times that the unit was begun anew, since its cells were bad */
    uint32_t bad;         /* the token of a bad row, when a slice has failed */
    const float *queries; /* of the unit */
    const struct kv_wire_cached_block *held,
        *held_end;                             /* of the unit, from the next token on */
    const struct kv_wire_cached_block *looked; /* the last one whose fingerprint was compared */
    bool looked_same;
    struct kv_scan scan;
    struct kv_choice take, choice; /* of step 1, of step 2 */
    struct kv_chooser *chooser;    /* at work on one of them */
    struct kv_picker *picker;
    uint32_t k[KV_QUERIES_MAX]; /* rows that step 1 wants of each group */
    struct kvs_query_scratch scratch;
    uint32_t n_taken, n_chosen;
    uint32_t n_scored; /* rows that step 2 scored */
    uint32_t cursor;   /* rows done of a stage */
    struct kv_attention *attention;
    struct kv_remainder *remainder;

    /* The answer so far, of all units. */
    struct kv_wire_query_result found[KV_WIRE_UNITS_MAX];
    uint32_t *ids, *heads, *crcs; /* (KV_QUERIER_IDS) */
    float *scores;
    uint32_t n_ids, n_rows;
    size_t rows_bytes; /* in input.rows */
    /* What step 3 says: of each unit one output and log-sum-exp per vector, whatever they are
     * of; a second part of a unit's answer is merged into the first (kv_attend_merge()). */
    float *outputs, *lses;      /* (KV_QUERIER_IDS) */
    uint32_t n_outputs, n_lses; /* floats of the units that are done */
    uint32_t n_attended;        /* rows */
    uint32_t n_rest_exact;      /* rows not chosen, attended */
};

/* Says where step 2's arrays are in `floats`, one behind the other. */
void kvs_query_scratch_divide(struct kvs_query_scratch *scratch,
                              uint32_t n_queries,
                              uint32_t n_taken);

/* NULL: out of memory. */
struct kv_querier *kv_querier_create(void);
void kv_querier_destroy(struct kv_querier *querier); /* NULL is allowed */

/* Forgets the query before.  The input is copied. */
void kv_querier_begin(struct kv_querier *querier, const struct kvs_query_input *input);

/* Works for some 50 to 100 us.  False: there is no answer, as the row of token `bad` of unit
 * `unit` is known to be bad, or has turned out to be. */
bool kv_querier_slice(struct kv_querier *querier);

/* The answer is complete. */
static inline bool kv_querier_is_done(const struct kv_querier *querier)
{
    return querier->unit == querier->input.n_units;
}

/* Gives up the query, if it is not done. */
static inline void kv_querier_end(struct kv_querier *querier)
{
    querier->stage = KV_QUERY_UNIT;
}

/* No scan's parts are in use: codes, cells and centroids may be freed. */
static inline bool kv_querier_is_between(const struct kv_querier *querier)
{
    return querier->stage == KV_QUERY_UNIT;
}

/* Whether there are outputs and log-sum-exps. */
bool kv_query_has_outputs(const struct kv_wire_query *query);
/* Whether only rows are named that the asker holds. */
bool kv_query_names_held_only(const struct kv_wire_query *query);

/* What is chosen, were `rerank` times as many wanted. */
struct kv_choice kv_query_choice(const struct kv_wire_query *query, uint32_t rerank);

#endif
