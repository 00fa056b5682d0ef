/* kept.h - codes and summaries outlast the process, as what was learnt does (learnt.h): a tier
 * (rows/residency.h) keeps them with the last block that each is of, and an index job takes them instead
 * of making them.
 *
 *     codes       of a segment                     with its block
 *     summaries   a group of a chapter's rows      with the last block of the group
 *
 * Each has an identity: of codes, what the chapter has learnt; of summaries, which rows they are of and by
 * which plan they were made; and the versions of their formats.  What has another identity is not there.
 *
 * So a session that was opened after a restart has its candidates before its rows are read, or without that.
 * Lists are made of codes.
 *
 * Threads: the data thread.  Memory: the caller's.
 */
#ifndef KV_KVSERVER_STORE_INDEX_KEPT_H
#define KV_KVSERVER_STORE_INDEX_KEPT_H

#include "kvserver/store/index/codebook.h"
#include "kvserver/store/rows/residency.h"

enum {
    KVS_KEPT_BYTES_MAX = 8 << 20, /* that a data thread recalls at a time, beside --memory */
};

/* Finds the column of that kind that is to be kept with a segment, whose block has this number in its prompt.
 * Returns false if there is none.  Its bytes, which stay the store's, are not verified. */
bool kvs_kept_give(const struct kvs_codebooks *books,
                   enum kvs_column_kind kind,
                   const struct kvs_block *block,
                   uint32_t at,
                   uint32_t number,
                   struct kvs_kept_column *ret_column);

/* Whether an earlier process may have kept codes of the segment; false once they were looked for. */
bool kvs_kept_may_have(const struct kvs_codebooks *books,
                       const struct kvs_block *block,
                       uint32_t at);

/* Whether the store has a tier that keeps columns. */
bool kvs_kept_has_tier(const struct kvs_codebooks *books);

/* All columns of a chapter are made: the tier is to keep those that end with this segment.  Returns false if it
 * has enough to do now. */
bool kvs_kept_keep(const struct kvs_codebooks *books,
                   const struct kvs_block *block,
                   uint32_t at);

/* Return what is asked for: codes of a codebook that has been recalled; summaries of n_rows rows, which
 * begin with the codebook's chapter, for `plan`.
 *   blocks  (n_blocks) of the chapter, from its first on */
struct kvs_columns_asked kvs_kept_codes(const struct kvs_codebook *book,
                                        struct kvs_block *const *blocks,
                                        uint32_t n_blocks,
                                        uint32_t at);
/* The codes of the chapter's first block, which tell how many there are.  The codebook need not be recalled. */
struct kvs_columns_asked
kvs_kept_first(const struct kvs_codebook *book, struct kvs_block *const *block, uint32_t at);
struct kvs_columns_asked kvs_kept_summaries(const struct kvs_codebook *book,
                                            const struct kvs_index_plan *plan,
                                            uint32_t n_rows,
                                            struct kvs_block *const *blocks,
                                            uint32_t at);

/* Gets columns that were kept.  KV_IN_PROGRESS: the tier is looking, call it again when that has something
 * to tell.  KV_NOT_FOUND: one is missing, damaged or of another identity, they are more than
 * KVS_KEPT_BYTES_MAX, nothing has come for half a second, or there is no tier. */
kv_status_t kvs_kept_recall(const struct kvs_codebooks *books,
                            const struct kvs_columns_asked *asked);
/* Returns one of them, after KV_OK and until kvs_recall_end(). */
struct kvs_recalled kvs_kept_at(const struct kvs_codebooks *books, uint32_t i);

#endif
