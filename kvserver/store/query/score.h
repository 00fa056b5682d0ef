/* score.h - step 1 of a query: scores of a unit's eligible rows, in pieces, by code if a row
 * has one and by key otherwise.
 *
 *     kvs_score_begin();  while (!kvs_score_piece(...)) other work;
 *
 * Scores are of items: eligible rows, or all non-empty cells (kernels/pq_cells.h) of a chapter
 * that is long enough for cells to be faster.  Item i's score for query vector q is in
 * scores[q * n_items + i].  A run is a range of eligible rows whose items are all rows or all
 * cells; runs ascend.  Rows that follow an open codebook (codebook.h) and have no codes yet are
 * encoded here.
 *
 * Threads: the data thread.  Memory: the caller's.  Between pieces the unit may only grow;
 * after any other change call kvs_score_begin() again.
 */
#ifndef KV_KVSERVER_STORE_QUERY_SCORE_H
#define KV_KVSERVER_STORE_QUERY_SCORE_H

#include "kvserver/store/index/codebook.h"
#include "kvserver/store/rows/unit.h"
#include "proto/kv_wire.h"

enum {
    KVS_SCORE_TABLE = KV_PQ_SUBSPACES_MAX << KV_PQ_BITS_MAX,
    KVS_SCORE_RUNS_MAX = 4096,
};

#define KVS_SCORE_ROWS UINT32_MAX

/* Eligible rows that are items themselves, or those in one codebook's cells. */
struct kvs_score_run {
    uint32_t token_begin, token_end;
    uint32_t item; /* the first */
    uint32_t n_items;
    uint32_t codebook; /* whose cells are the items; KVS_SCORE_ROWS: the rows are */
};

/* One unit, and the query for it. */
struct kvs_score {
    struct kvs_unit *unit;
    enum kv_key_type type;
    uint32_t d;
    const struct kv_wire_range *ranges; /* below unit->committed */
    uint32_t n_ranges;
    uint32_t n_queries;
    const float *queries;       /* (n_queries, d) */
    bool by_code;               /* false: all by their keys */
    bool by_cell;               /* cells may be used */
    uint32_t n;                 /* eligible rows */
    float *room;                /* the caller's, for scores, counts, and the caller's arrays */
    size_t room_floats;         /* at least n * (n_queries + KVS_SCORE_SPARE) */
    struct kvs_score_run *runs; /* (KVS_SCORE_RUNS_MAX) the caller's */
    float *tables;              /* (n_queries, KVS_SCORE_TABLE) the caller's */
    float *rotated;             /* (n_queries, d) the caller's: rotated queries */

    /* Set by kvs_score_begin(). */
    uint32_t n_runs, n_items;
    float *scores;    /* (n_queries, n_items), in `room` */
    uint32_t *counts; /* (n_items), in `room`, the last of the KVS_SCORE_SPARE arrays; NULL: all
                       * 1 */

    /* A row known to be bad (verify.h), or away, that would have been scored by its key;
     * UINT32_MAX: none. */
    uint32_t bad;

    /* Complete after the last piece: each query vector's largest score, as kv_scores_max()
     * computes it. */
    float maxima[KV_QUERIES_MAX];

    uint32_t run, token; /* where the next piece begins */
    uint32_t n_coded, n_exact, n_chapters;
    uint64_t serial;                       /* of the codebook that `tables` are for; 0: none */
    const struct kvs_rotation *rotated_by; /* by which `rotated` was made; NULL: not yet */

    /* Bytes that were read: centroids and rotations, codes or lists, keys. */
    uint64_t books_bytes, codes_bytes, keys_bytes;
};

enum {
    KVS_SCORE_SPARE = 4, /* arrays of n_items floats after the scores; 3 are the caller's */
};

/* Returns the caller's arrays, (KVS_SCORE_SPARE - 1, n_items), which follow the scores. */
static inline float *kvs_score_spare(const struct kvs_score *score)
{
    return score->scores + (size_t)score->n_items * score->n_queries;
}

/* Returns the number of tokens in the ranges. */
uint32_t kvs_ranges_count(const struct kv_wire_range *ranges, uint32_t n_ranges);

/* Divides the eligible rows into runs, and resets the cursor and the counters. */
void kvs_score_begin(struct kvs_score *score, const struct kvs_codebooks *books);

/* Scores some segments, or the items of one chapter.  Returns true when all items are scored. */
bool kvs_score_piece(struct kvs_score *score, struct kvs_codebooks *books);

/* ---- for other ways to score them (byte_scores.h) ---- */

/* Makes the codebook's tables of the query vectors (n_queries, table). */
void kvs_score_make_tables(struct kvs_score *score,
                           const struct kvs_codebook *book,
                           float *ret_tables);

/* Returns how many of the first n_rows rows of the unit's block have codes.  Encodes some that
 * follow an open codebook, and sets *ret_made then. */
uint32_t kvs_score_coded(const struct kvs_score *score,
                         struct kvs_codebooks *books,
                         uint32_t at,
                         uint32_t n_rows,
                         bool *ret_made);

/* Scores n rows of one block by their keys -> ret_scores (n_queries, n), stride apart; sets `bad` if
 * one is, or they are away. */
void kvs_score_keys(
    struct kvs_score *score, uint32_t token, uint32_t n, float *ret_scores, size_t stride);

/* Maps indices of eligible rows, which ascend from call to call, to tokens of the ranges. */
struct kvs_range_walk {
    const struct kv_wire_range *ranges;
    uint32_t before; /* eligible rows before the current range */
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
