/* encode.h - codes of a segment's keys: made, compared with their checksum, lost and made again.
 *
 * The segment keeps the bytes (segment.h); what they mean, its codebook says.
 *
 * Threads: the data thread.  Memory: codes are the segment's, a share of its codebook with them.
 */
#ifndef KV_KVSERVER_STORE_INDEX_ENCODE_H
#define KV_KVSERVER_STORE_INDEX_ENCODE_H

#include "kvserver/store/index/codebook.h"
#include "kvserver/store/rows/segment.h"

/* Rows of the segment, of the first n_rows, that have codes which may be used. */
static inline uint32_t kvs_segment_coded(const struct kvs_codebooks *books,
                                         const struct kvs_segment *segment,
                                         uint32_t n_rows)
{
    if (segment->codes == NULL || kvs_codebook_at(books, segment->codebook)->is_broken)
        return 0;
    return segment->n_coded < n_rows ? segment->n_coded : n_rows;
}

/* Makes codes of the segment's rows [n_coded, n_rows), which are good, by the codebook; one
 * that has codes keeps its codebook, which must be that one.  Keys are of `type`.
 * KV_NO_MEMORY: nothing changed.  KV_CORRUPT: codes that it had are bad, and lost now, or were
 * before: kvs_segment_recode() has to come first. */
kv_status_t kvs_segment_encode(struct kvs_codebooks *books,
                               struct kvs_segment *segment,
                               uint32_t codebook,
                               enum kv_key_type type,
                               uint32_t row_bytes,
                               uint32_t n_rows);

/* Compares the codes with the checksum that was made of them. */
bool kvs_segment_codes_are_good(const struct kvs_codebooks *books,
                                const struct kvs_segment *segment);

/* Counts codes that are bad; they are not used any more, and kvs_segment_recode() can make them
 * again. */
void kvs_segment_lose_codes(struct kvs_codebooks *books, struct kvs_segment *segment);

/* Makes lost codes again, of rows that are good, in the tile that they had. */
void kvs_segment_recode(struct kvs_codebooks *books,
                        struct kvs_segment *segment,
                        enum kv_key_type type,
                        uint32_t row_bytes);

/* Gives the codes back, and the segment's share of the codebook; kvs_codebooks_init() has the
 * segment store do so for segments that go. */
void kvs_segment_drop_codes(struct kvs_codebooks *books, struct kvs_segment *segment);

#endif
