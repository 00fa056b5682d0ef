/* querier.h - what the queries of one data thread work with: one at a time has it.
 *
 * Threads: the data thread.  Memory: create/destroy; large parts come from the system as they
 * are used.
 */
#ifndef KV_QUERIER_H
#define KV_QUERIER_H

#include "choose.h"
#include "recall.h"
#include "scan.h"

enum {
    KV_QUERIER_FLOATS =
        32 << 20, /* of scores: candidates times (query vectors + 2), and more */
    KV_QUERIER_IDS = KV_WIRE_BODY_MAX / sizeof(uint32_t),
};

enum kv_query_stage {
    KV_QUERY_UNIT,   /* to the next unit */
    KV_QUERY_SCORE,  /* step 1: scores of the candidates */
    KV_QUERY_TAKE,   /* step 1: merge, choose */
    KV_QUERY_RERANK, /* step 2: exact scores */
    KV_QUERY_CHOOSE, /* step 2: merge, choose */
    KV_QUERY_GATHER, /* rows */
};

struct kv_querier {
    struct kv_work *owner;        /* NULL: free */
    bool begun;                   /* what follows is the owner's */
    struct kv_work_queue waiting; /* works that want it */
    struct kv_recall *recall;

    /* The query at work. */
    enum kv_query_stage stage;
    uint32_t unit;                              /* of the request */
    uint64_t begun_us;                          /* its first slice */
    const float *queries;                       /* of the unit */
    const struct kv_wire_held *held, *held_end; /* of the unit, from the next token on */
    const struct kv_wire_held *looked;          /* the last one whose instance was compared */
    bool looked_same;
    struct kv_scan scan;
    struct kv_choice take, choice; /* of step 1, of step 2 */
    float *floats;                 /* (KV_QUERIER_FLOATS): scores, weights, spare */
    uint32_t *taken;   /* (KV_QUERIES_MAX * KV_CHOSEN_MAX) tokens that step 1 took */
    uint32_t *among;   /* ... and the vectors that did */
    uint32_t *indices; /* chosen of them */
    uint32_t n_taken, n_chosen;
    uint32_t cursor; /* rows done of a stage */
    float *tables;   /* (KV_QUERIES_MAX, KV_SCAN_TABLE) */

    /* The answer so far, of all units. */
    struct kv_wire_found found[KV_WIRE_UNITS_MAX];
    uint32_t *ids, *heads, *crcs; /* (KV_QUERIER_IDS) */
    float *scores;
    uint32_t n_ids, n_rows;
};

/* NULL: out of memory. */
struct kv_querier *kv_querier_create(struct kv_data *data);
void kv_querier_destroy(struct kv_querier *querier); /* NULL is allowed */

#endif
