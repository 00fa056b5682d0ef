/* scorer.h - the table of scorers: ways to score rows by short codes, without reading their
 * keys.
 *
 *   codebook   what a scorer has learnt of a chapter's keys (codebook.h keeps it)
 *   codes      what it keeps of each row, in one piece of memory for a block's rows (segment.h)
 *   items      rows with equal codes, which share a score and are scored once; optional
 *
 * A new one is a file scorer_NAME.c with such a table, a line in scorers.c, and its number in
 * enum kvs_scorer.  What is around it knows none of them: when rows are trained and coded, in
 * pieces (builder.c, encode.c), which rows of a unit have codes (query/score.c), what a choice
 * among items means in rows (query/expand.c), checksums of codebooks, codes and items.
 *
 * Two things are product quantization's still, and wait for a second scorer: the type of the
 * plan's `shape`, of which others read only d, and the type of a codebook's memory (codebook.h),
 * which are centroids and kernels/pq_cells.h.
 *
 * Functions are called for a block's rows, a run of them or a piece of work, never for one row
 * of many.  They are pure but for what they write to, and give the same bits on every CPU.
 *
 * Threads: any.  Memory: the caller's; nothing is kept.
 */
#ifndef KV_KVSERVER_STORE_INDEX_SCORER_H
#define KV_KVSERVER_STORE_INDEX_SCORER_H

#include "kvserver/store/index/codebook.h"

/* The keys of a chapter, for training. */
struct kvs_chapter_keys {
    uint32_t n_rows;
    uint64_t seed; /* of random choices */
    /* Converts keys of n rows, every stride-th from row `first` on.  Fails with KV_CORRUPT if
     * one is bad.
     *   ret_keys  (n, d), at most KVS_CODEBOOK_KEYS floats */
    kv_status_t (*load)(
        void *arg, uint32_t first, uint32_t stride, uint32_t n, float *ret_keys);
    void *arg;
};

/* Lists of a chapter's first rows by item, while they are made. */
struct kvs_item_lists {
    const struct kv_pq_shape *shape;
    uint32_t *memory; /* lists_bytes() */
    uint32_t n_rows;  /* whole blocks */
    uint32_t pass;    /* over the blocks, from 0 on */
};

struct kvs_scorer_ops {
    const char *name;

    /* ---- sizes ---------------------------------------------------------------------------- */

    /* Bytes of a codebook, of a block's codes, and of what training keeps between pieces. */
    size_t (*codebook_bytes)(const struct kv_pq_shape *shape);
    size_t (*codes_bytes)(const struct kv_pq_shape *shape);
    size_t (*training_bytes)(const struct kv_pq_shape *shape);
    /* Rows that a codebook needs if it is not of a chapter. */
    uint32_t (*n_rows_least)(const struct kv_pq_shape *shape);
    /* Rows that are coded, or trained with, in a piece of work of some 10 us; their keys are at
     * most KVS_CODEBOOK_KEYS floats. */
    uint32_t (*rows_at_once)(const struct kv_pq_shape *shape);

    /* ---- training, in pieces (builder.c) --------------------------------------------------- */

    /* Begins a codebook; it could be used as it is. */
    kv_status_t (*train_begin)(const struct kvs_codebook *book,
                               const struct kvs_chapter_keys *keys);
    /* Learns from some keys, from *cursor on: 0 is the begin of a pass over them, and the end
     * of one.  Fails if the keys do.
     *   training   training_bytes(); 0 at first
     *   ret_pays   set after a pass; false: another one would change nothing */
    kv_status_t (*train_piece)(const struct kvs_codebook *book,
                               const struct kvs_chapter_keys *keys,
                               void *training,
                               uint32_t *cursor,
                               bool *ret_pays);

    /* ---- codes (encode.c) ------------------------------------------------------------------ */

    /* Codes of n keys (n, d), which are rows [begin, begin + n) of the block. */
    void (*encode)(const struct kvs_codebook *book,
                   const float *keys,
                   uint32_t begin,
                   uint32_t n,
                   uint8_t *codes);

    /* ---- scores (query/score.c) ------------------------------------------------------------ */

    /* What the codebook makes of query vectors (n_queries, d), rotated if it is of rotated keys,
     * once for all of its rows; of each KVS_SCORE_TABLE floats at most (query/score.h). */
    void (*make_tables)(const struct kvs_codebook *book,
                        const float *queries,
                        uint32_t n_queries,
                        float *ret_tables);
    /* Scores of n rows from row `begin` of the first block on, numbered through the blocks'
     * codes.
     *   ret_scores  (n_queries, n), scores_stride apart */
    void (*score_rows)(const struct kvs_codebook *book,
                       const float *tables,
                       uint32_t n_queries,
                       const uint8_t *const *codes,
                       uint32_t begin,
                       uint32_t n,
                       float *ret_scores,
                       size_t scores_stride);

    /* ---- scores of a byte (query/byte_scores.h) --------------------------------------------- */

    /* The least and the largest score that a query's table gives. */
    void (*table_range)(const struct kvs_codebook *book,
                        const float *table,
                        float *ret_least,
                        float *ret_most);
    /* Rounds the table to bytes: a row's sum is about (score - base) * inv_step. */
    void (*round_table)(const struct kvs_codebook *book,
                        const float *table,
                        float base,
                        float inv_step,
                        uint8_t *ret_rounded);
    /* Sums of all rows of n blocks for one query -> ret_sums (n, KV_BLOCK_TOKENS). */
    void (*sum_rows)(const struct kvs_codebook *book,
                     const uint8_t *rounded,
                     const uint8_t *const *codes,
                     uint32_t n,
                     uint8_t *ret_sums);
    /* The same, with each query's offset added: the largest over n_queries queries. */
    void (*most_rows)(const struct kvs_codebook *book,
                      const uint8_t *rounded,
                      const int16_t *offsets,
                      uint32_t n_queries,
                      const uint8_t *const *codes,
                      uint32_t n,
                      uint8_t *ret_most);

    /* ---- items ----------------------------------------------------------------------------- */

    /* Lists of a chapter's rows by item: book->lists, of the first book->n_celled rows.  The
     * lists may have been damaged: then they are of other rows, but of rows below n_celled. */

    /* Rows from which on items are scored faster than rows; 0: codes of this shape have
     * none. */
    uint32_t (*items_pay)(const struct kv_pq_shape *shape);
    /* Bytes of lists of n rows; each row takes a uint32. */
    size_t (*lists_bytes)(const struct kv_pq_shape *shape, uint32_t n_rows);
    /* Adds the rows of a block to lists that begin as lists_bytes(shape, 0) zeros: its codes,
     * and its first row's number in the chapter.  Every pass takes all blocks, in order. */
    void (*lists_add)(const struct kvs_item_lists *lists, const uint8_t *codes, uint32_t row);
    /* Ends a pass.  Returns false if it was the last: the lists are complete. */
    bool (*lists_pass_end)(struct kvs_item_lists *lists);
    /* Items that have rows. */
    uint32_t (*n_items)(const struct kvs_codebook *book);
    /* Scores of all items; as score_rows(). */
    void (*score_items)(const struct kvs_codebook *book,
                        const float *tables,
                        uint32_t n_queries,
                        float *ret_scores,
                        size_t scores_stride);
    /* Rows of each item among rows [begin, end) of the chapter. */
    void (*count_items)(const struct kvs_codebook *book,
                        uint32_t begin,
                        uint32_t end,
                        uint32_t *ret_counts);
    /* Takes rows [begin, begin + n) of a block off the counts. */
    void (*subtract_counts)(const struct kvs_codebook *book,
                            const uint8_t *codes,
                            uint32_t begin,
                            uint32_t n,
                            uint32_t *counts);
    /* Sets bit r for each row r of [begin, end) that is one of the n items. */
    void (*mark_items)(const struct kvs_codebook *book,
                       const uint32_t *items,
                       size_t n,
                       uint32_t begin,
                       uint32_t end,
                       uint64_t *bits);
    /* Items of n rows of one block: of tokens[i] % KV_BLOCK_TOKENS, by their codes. */
    void (*row_items)(const struct kvs_codebook *book,
                      const uint8_t *codes,
                      const uint32_t *tokens,
                      uint32_t n,
                      uint32_t *ret_items);
    /* The item of a row whose codes are not at hand any more. */
    uint32_t (*key_item)(const struct kvs_codebook *book, const float *key);
};

/* scorers.c */
const struct kvs_scorer_ops *kvs_scorer_at(enum kvs_scorer scorer);

/* scorer_pq.c */
extern const struct kvs_scorer_ops kvs_scorer_pq;

#endif
