/* byte_scores.h - step 1 of a query with a first cut: candidates by one byte a row, in pieces.
 *
 *     if (kvs_byte_scores_begin())
 *         while (!kvs_byte_scores_piece(...)) other work;
 *
 * What follows scores the candidates again, so step 1 may be rough, and need compute neither an
 * fp32 score nor an exp for each row.  A row's byte is defined as follows, all of it in whole
 * numbers but for the tables:
 *
 *   tables    Each query vector's table of each codebook is rounded to bytes in steps of one
 *             length, from the least score that any of the codebooks can give that vector: so many
 *             steps are the widest range that one vector has that no sum exceeds 255
 *   sum       of a row for a vector: its bytes, or its rounded score where it has no codes
 *   offset    of a vector: its sums of every SAMPLE_EVERY-th block (of all, if there are few) say
 *             which sum the wanted share of rows has; the offset takes that to the least one of
 *             all vectors
 *   byte      the largest over the vectors of sum + offset, at least 0
 *
 * The n_wanted rows of largest byte are the candidates, ties to the lower token.  So each vector
 * ranks rows by how far they are above its own share of them; on keys of a real model that finds
 * as much as sums of softmax weights do (8 candidates a row, m = 4, b = 6: 0.915 of the exact
 * top-k, and 0.917).
 *
 * Threads: the data thread.  Memory: the caller's.  Between pieces the unit may only grow.
 */
#ifndef KV_KVSERVER_STORE_QUERY_BYTE_SCORES_H
#define KV_KVSERVER_STORE_QUERY_BYTE_SCORES_H

#include "kvserver/store/query/score.h"

enum kvs_byte_scores_step {
    KVS_BYTES_TABLES, /* of each run */
    KVS_BYTES_ROUND,  /* the same */
    KVS_BYTES_SAMPLE,
    KVS_BYTES_SCAN,
    KVS_BYTES_BOUND, /* pass after pass over the bytes */
    KVS_BYTES_COLLECT,
};

struct kvs_byte_scores {
    struct kvs_score *score; /* the caller's; its runs become those of codebooks */
    enum kvs_byte_scores_step step;
    uint32_t n_wanted; /* fewer than rows are eligible */
    uint32_t run, token;

    float bases[KV_QUERIES_MAX], tops[KV_QUERIES_MAX]; /* least and largest sums */
    float inv_step;
    uint32_t sample_every, sample_max; /* blocks: one of so many, and as many at most */
    uint32_t n_sampled;                /* rows */
    int16_t offsets[KV_QUERIES_MAX];
    uint32_t guess; /* near which the bound is */

    /* In the score's room. */
    float *tables;    /* of each run with codes (n_queries, its codebook's table) */
    uint8_t *rounded; /* the same, rounded */
    size_t table_floats, rounded_bytes; /* of the largest table */
    uint8_t *sample;                    /* (n_queries, sample_max * KV_BLOCK_TOKENS) sums */
    uint8_t *bytes;                     /* of each range's blocks, one range after the other */

    /* So many rows have at least `least` as are wanted, fewer have `most`, which is looked for
     * `reach` above the former. */
    uint32_t least, most, reach;
    uint64_t n_counted, n_above;
    uint64_t ties;    /* rows at the bound still to be taken */
    uint32_t *tokens; /* the caller's */
    uint32_t n;
};

/* Begins to choose n_wanted rows.  Returns false, whatever the room and the pieces, if the rows
 * are not enough, none has codes, or there are more than KVS_SCORE_RUNS_MAX runs: they are to be
 * scored otherwise.
 *   score   as for kvs_score_begin(); it counts what is read
 *   tokens  (n_wanted + KV_TOPK_SPARE) */
bool kvs_byte_scores_begin(struct kvs_byte_scores *scores,
                           struct kvs_score *score,
                           const struct kvs_codebooks *books,
                           uint32_t n_wanted,
                           uint32_t *tokens);

/* Does a piece of work, of some us.  Returns true when all `n` tokens are there, ascending. */
bool kvs_byte_scores_piece(struct kvs_byte_scores *scores, struct kvs_codebooks *books);

#endif
