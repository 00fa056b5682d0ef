/* encode.h - the codes of a segment's keys, and copies of the keys in 4 bits if the codebook has
 * them: makes, verifies, loses and remakes them.
 *
 * A column of the segment stores the bytes (segment.h); its codebook gives them their meaning.
 * A segment is one of the block that has its rows, at the unit's place in it.
 *
 * Threads: the data thread.  Memory: codes belong to the segment, which then holds a reference
 * to its codebook.
 */
#ifndef KV_KVSERVER_STORE_INDEX_ENCODE_H
#define KV_KVSERVER_STORE_INDEX_ENCODE_H

#include "kvserver/store/index/codebook.h"
#include "kvserver/store/rows/unit.h"

/* Returns how many of a segment's first n_rows rows, by its codes, have some that may be used. */
static inline uint32_t kvs_segment_coded(const struct kvs_codebooks *books,
                                         const struct kvs_codes *codes,
                                         uint32_t n_rows)
{
    if (codes->column.bytes == NULL || kvs_codebook_at(books, codes->codebook)->is_broken)
        return 0;
    return codes->n_coded < n_rows ? codes->n_coded : n_rows;
}

/* Returns the bytes of a segment's codes and copies. */
uint32_t kvs_codebook_codes_bytes(const struct kvs_codebook *book);

/* Returns the copies of a segment's keys (kernels/key_copies.h), by its codes: of as many rows as
 * have these; NULL: there are none. */
const void *kvs_segment_copies(const struct kvs_codebook *book, const struct kvs_codes *codes);

/* Encodes the segment's rows [n_coded, n_rows), which are good, with the codebook.  A segment
 * that has codes keeps its codebook, which must be that one.  Keys are of `type`.  After
 * KV_NO_MEMORY nothing has changed.  Fails with KV_CORRUPT if existing codes are bad and now
 * lost, or were lost before: call kvs_segment_recode() first. */
kv_status_t kvs_segment_encode(struct kvs_codebooks *books,
                               struct kvs_block *block,
                               uint32_t at,
                               uint32_t codebook,
                               enum kv_key_type type,
                               uint32_t row_bytes,
                               uint32_t n_rows);

/* Gives a full segment without codes those that an earlier process made with the same codebook.  Its rows need
 * not be in memory.  KV_NO_MEMORY: nothing has changed.
 *   bytes  (kvs_codebook_codes_bytes()) */
kv_status_t kvs_segment_set_codes(struct kvs_codebooks *books,
                                  struct kvs_block *block,
                                  uint32_t at,
                                  uint32_t codebook,
                                  const void *bytes);

/* Returns whether the segment's codes are sound, or lost already.  Stops using them if they are
 * not; kvs_segment_recode() can make them again. */
bool kvs_segment_check_codes(struct kvs_codebooks *books, struct kvs_block *block, uint32_t at);
/* The segment's codes have not come back with its rows: they are lost, too. */
void kvs_segment_lose_codes(struct kvs_codebooks *books, struct kvs_block *block, uint32_t at);

/* Makes lost codes again from rows that are good, in the same tile. */
void kvs_segment_recode(struct kvs_codebooks *books,
                        struct kvs_block *block,
                        uint32_t at,
                        enum kv_key_type type,
                        uint32_t row_bytes);

/* As kvs_unit_chapter_end() for a segment of the codebook's chapter, but reads only the last
 * segment or a few: a unit that has a segment of a chapter has all before it. */
uint32_t kvs_codebook_chapter_end(const struct kvs_codebook *book,
                                  const struct kvs_unit *unit,
                                  uint32_t at,
                                  uint32_t end);

/* Frees the codes and drops the reference to the codebook.  The segment store calls it for
 * segments that are freed (kvs_codebooks_init()). */
void kvs_segment_drop_codes(struct kvs_codebooks *books, struct kvs_block *block, uint32_t at);

#endif
