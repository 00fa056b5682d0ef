/* pipeline.h - what the queries of one data thread work with: one at a time has it.
 *
 * Threads: the data thread.  Memory: create/destroy; large parts come from the system as they
 * are used.
 */
#ifndef KV_KVSERVER_STORE_QUERY_PIPELINE_H
#define KV_KVSERVER_STORE_QUERY_PIPELINE_H

#include "kvserver/store/ops/recall.h"
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

struct kv_querier {
    struct kv_work *owner;        /* NULL: free */
    bool begun;                   /* what follows is the owner's */
    struct kv_work_queue waiting; /* works that want it */
    struct kv_recall *recall;

    /* The query at work. */
    enum kv_query_stage stage;
    uint32_t unit;        /* of the request */
    uint32_t n_again;     /* times that the unit was begun anew, since its cells were bad */
    uint64_t begun_us;    /* its first slice */
    const float *queries; /* of the unit */
    const struct kv_wire_held *held, *held_end; /* of the unit, from the next token on */
    const struct kv_wire_held *looked; /* the last one whose fingerprint was compared */
    bool looked_same;
    struct kv_scan scan;
    struct kv_choice take, choice; /* of step 1, of step 2 */
    struct kv_chooser *chooser;    /* at work on one of them */
    struct kv_picker *picker;
    uint32_t k[KV_QUERIES_MAX]; /* rows that step 1 wants of each group */
    struct kv_scan_part *parts; /* (KV_SCAN_PARTS_MAX) */
    float *floats;              /* (KV_QUERIER_FLOATS): scores, weights, spare */
    uint32_t *taken;            /* tokens that step 1 took; room for what it may */
    uint32_t *among;            /* ... and the vectors that did */
    uint32_t *indices;          /* chosen of them */
    uint32_t n_taken, n_chosen;
    uint32_t n_scored; /* rows that step 2 scored */
    uint32_t cursor;   /* rows done of a stage */
    float *tables;     /* (KV_QUERIES_MAX, KV_SCAN_TABLE) */
    struct kv_attention *attention;
    struct kv_remainder *remainder;

    /* The answer so far, of all units. */
    struct kv_wire_found found[KV_WIRE_UNITS_MAX];
    uint32_t *ids, *heads, *crcs; /* (KV_QUERIER_IDS) */
    float *scores;
    uint32_t n_ids, n_rows;
    /* What step 3 says: of each unit one output and log-sum-exp per vector, whatever they are
     * of; a second part of a unit's answer is merged into the first (kv_attend_merge()). */
    float *outputs, *lses;      /* (KV_QUERIER_IDS) */
    uint32_t n_outputs, n_lses; /* floats of the units that are done */
    uint32_t n_attended;        /* rows */
    uint32_t n_rest_exact;      /* rows not chosen, attended */
};

/* NULL: out of memory. */
struct kv_querier *kv_querier_create(struct kv_data *data);
void kv_querier_destroy(struct kv_querier *querier); /* NULL is allowed */

/* No scan's parts are in use: codes, cells and centroids may be freed. */
static inline bool kv_querier_is_between(const struct kv_querier *querier)
{
    return querier->owner == NULL || !querier->begun || querier->stage == KV_QUERY_UNIT;
}

/* A slice of the stage that the owner's query is at: pipeline.c.  False: the work has
 * failed. */
bool kv_querier_slice(struct kv_querier *querier, struct kv_work *work);

#endif
