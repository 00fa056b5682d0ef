/* segment.h - KV_BLOCK_TOKENS rows with their CRCs and the codes of their keys, and where they
 * come from.  unit.h says what holds of them.
 *
 * rows/segment.c has their life, index/encode.c their codes.
 */
#ifndef KV_KVSERVER_STORE_ROWS_SEGMENT_H
#define KV_KVSERVER_STORE_ROWS_SEGMENT_H

#include "kvserver/store/index/codebook.h"
#include "kvserver/store/rows/arena.h"
#include "kvserver/store/rows/health.h"
#include "proto/kv_types.h"

#include <assert.h>
#include <stdbool.h>

/* 64 bytes, and 8 in each unit that refers to it. */
struct kv_segment {
    uint8_t *rows;                      /* (KV_BLOCK_TOKENS, row_bytes) */
    uint32_t *crcs;                     /* (KV_BLOCK_TOKENS) */
    uint8_t *codes;                     /* a tile, see kernels/pq_tiles.h; NULL: none */
    uint64_t bad[KV_BLOCK_TOKENS / 64]; /* bit: the row failed its CRC (verify.h) */
    uint32_t refs;
    uint32_t codebook;  /* of `codes` */
    uint32_t codes_crc; /* of the whole tile */
    uint16_t pins;
    uint16_t pass;         /* of the scrub that last came by (scrub.h) */
    uint8_t n_checked;     /* rows that it verified then */
    uint8_t n_written;     /* 0..KV_BLOCK_TOKENS */
    uint8_t n_coded;       /* 0..n_written */
    uint8_t n_lost;        /* rows whose codes were bad, and cannot be made again yet */
    uint8_t row_class;     /* of `rows` */
    bool training : 1;     /* an index job will give it codes */
    bool begins_job : 1;   /* a job's rows begin here: that one's, or one's for summaries */
    bool in_chapter : 1;   /* its codes are all the codebook's own job's: it is the only segment
                            * that the codebook's cells and summaries have in this place */
    bool lost_chapter : 1; /* it was in_chapter when its codes were lost */
};
static_assert(sizeof(struct kv_segment) == 64, "bookkeeping of a segment");
static_assert(KV_BLOCK_TOKENS % 64 == 0, "a bit for each row");

/* Where segments come from: one per data thread. */
struct kv_heap {
    struct kv_arena *arena;
    int crc_class;
    int record_class;                /* pages of segment records */
    struct kv_segment *free_records; /* linked through `rows` */
    uint64_t n_segments;
    struct kv_codebooks codebooks;
    struct kv_health health;
};

/* false: the arena has no page for it. */
bool kv_heap_init(struct kv_heap *heap, struct kv_arena *arena);
void kv_heap_fini(struct kv_heap *heap);

struct kv_unit;

/* `count` segments at `at` of the unit's array, side by side where the arena can. */
kv_status_t
kv_segments_add(struct kv_unit *unit, struct kv_heap *heap, uint32_t at, uint32_t count);

/* One unit less refers to it. */
void kv_segment_unref(struct kv_heap *heap, struct kv_segment *segment);

/* One transfer less needs it. */
void kv_segment_unpin(struct kv_heap *heap, struct kv_segment *segment);

/* Nobody refers to the rows from `filled` on any more: they are not bad, not lost. */
void kv_segment_forget_rows(struct kv_heap *heap, struct kv_segment *segment, uint32_t filled);

static inline bool kv_segment_is_bad(const struct kv_segment *segment, uint32_t row)
{
    return segment->bad[row / 64] >> row % 64 & 1;
}

/* Rows of the segment, of the first n_rows, that have codes which may be used. */
static inline uint32_t
kv_segment_coded(const struct kv_heap *heap, const struct kv_segment *segment, uint32_t n_rows)
{
    if (segment->codes == NULL ||
        kv_codebook_at(&heap->codebooks, segment->codebook)->is_broken)
        return 0;
    return segment->n_coded < n_rows ? segment->n_coded : n_rows;
}

/* Makes codes of the segment's rows [n_coded, n_rows), which are good, by the codebook; one
 * that has codes keeps its codebook, which must be that one.  Keys are of `type`.
 * KV_NO_MEMORY: nothing changed.  KV_CORRUPT: codes that it had are bad, and lost now, or were
 * before: kv_segment_recode() has to come first. */
kv_status_t kv_segment_encode(struct kv_heap *heap,
                              struct kv_segment *segment,
                              uint32_t codebook,
                              enum kv_key_type type,
                              uint32_t row_bytes,
                              uint32_t n_rows);

/* Compares the codes with the checksum that was made of them. */
bool kv_segment_codes_are_good(const struct kv_heap *heap, const struct kv_segment *segment);

/* Counts codes that are bad; they are not used any more, and kv_segment_recode() can make them
 * again. */
void kv_segment_lose_codes(struct kv_heap *heap, struct kv_segment *segment);

/* Makes lost codes again, of rows that are good, in the tile that they had. */
void kv_segment_recode(struct kv_heap *heap,
                       struct kv_segment *segment,
                       enum kv_key_type type,
                       uint32_t row_bytes);

/* Gives the codes back, and the segment's share of the codebook. */
void kv_segment_drop_codes(struct kv_heap *heap, struct kv_segment *segment);

#endif
