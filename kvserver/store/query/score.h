/* score.h - scores of a unit's eligible rows, in slices: by their codes where they have some, by
 * their keys where not.
 *
 *     kvs_score_begin();  while (!kvs_score_slice(...)) other work;
 *
 * What is scored are items: eligible rows, or all full cells (kernels/pq_cells.h) of a chapter
 * that is long enough for that to be faster.  A run is eligible rows side by side whose items are
 * one or the other; runs ascend.  Item i's score for query vector q is scores[q * n_items + i].
 * Rows that follow an open codebook (codebook.h) and have no codes yet get them here.
 *
 * Threads: the data thread.  Memory: the caller's; the unit must not change between slices but
 * grow, or kvs_score_begin() starts anew.
 */
#ifndef KV_KVSERVER_STORE_QUERY_SCORE_H
#define KV_KVSERVER_STORE_QUERY_SCORE_H

#include "kvserver/base/clock.h"
#include "kvserver/store/index/codebook.h"
#include "kvserver/store/rows/unit.h"
#include "proto/kv_wire.h"

enum {
    KVS_SCORE_TABLE = KV_PQ_SUBSPACES_MAX << KV_PQ_BITS_MAX,
    KVS_SCORE_RUNS_MAX = 4096,
};

#define KVS_SCORE_ROWS UINT32_MAX

/* Eligible rows of which each is an item, or those of one codebook's cells. */
struct kvs_score_run {
    uint32_t token_begin, token_end;
    uint32_t item; /* the first */
    uint32_t n_items;
    uint32_t codebook; /* whose cells they are; KVS_SCORE_ROWS: each is an item */
};

/* One unit and what is asked of it. */
struct kvs_score {
    struct kvs_unit *unit;
    enum kv_key_type type;
    uint32_t d;
    const struct kv_wire_range *ranges; /* below unit->committed */
    uint32_t n_ranges;
    uint32_t n_queries;
    const float *queries; /* (n_queries, d) */
    bool by_code;         /* false: all by their keys */
    bool by_cell;         /* cells are allowed */
    uint32_t n;           /* eligible rows */
    float *room;          /* of the caller, for scores, counts, and whatever comes after */
    size_t room_floats;   /* at least n * (n_queries + KVS_SCORE_SPARE) */
    struct kvs_score_run *runs; /* (KVS_SCORE_RUNS_MAX) of the caller */
    float *tables;              /* (n_queries, KVS_SCORE_TABLE) of the caller */

    /* Known when it has begun. */
    uint32_t n_runs, n_items;
    float *scores;    /* (n_queries, n_items), in `room` */
    uint32_t *counts; /* (n_items), in `room` behind KVS_SCORE_SPARE - 1 arrays; NULL: all 1 */

    /* A row known to be bad (verify.h), whose key would have decided; UINT32_MAX: none. */
    uint32_t bad;

    /* Known when it has ended: the largest of each vector's scores, as kv_scores_max() has
     * them. */
    float maxima[KV_QUERIES_MAX];

    uint32_t run, token; /* where the next slice begins */
    uint32_t n_coded, n_exact, n_chapters;
    uint64_t serial; /* of the codebook that `tables` is for; 0: none */
};

enum {
    KVS_SCORE_SPARE = 4, /* arrays of n_items floats behind the scores: 3 are the caller's */
};

/* The caller's arrays behind the scores, (KVS_SCORE_SPARE - 1, n_items). */
static inline float *kvs_score_spare(const struct kvs_score *score)
{
    return score->scores + (size_t)score->n_items * score->n_queries;
}

/* Tokens in the ranges. */
uint32_t kvs_ranges_count(const struct kv_wire_range *ranges, uint32_t n_ranges);

/* Cuts the eligible rows into runs, sets the cursor and the counts to the begin. */
void kvs_score_begin(struct kvs_score *score, const struct kvs_codebooks *books);

/* Works for some 50 us; true when all items are scored. */
bool kvs_score_slice(struct kvs_score *score,
                     struct kvs_codebooks *books,
                     const struct kv_clock *clock);

/* Goes through tokens of the ranges by their numbers, which ascend from call to call. */
struct kvs_range_walk {
    const struct kv_wire_range *ranges;
    uint32_t before; /* eligible rows before the range that it is in */
};
static inline uint32_t kvs_range_walk_to(struct kvs_range_walk *walk, uint32_t index)
{
    while (index - walk->before >= walk->ranges->end - walk->ranges->begin) {
        walk->before += walk->ranges->end - walk->ranges->begin;
        walk->ranges++;
    }
    return walk->ranges->begin + (index - walk->before);
}

#endif
