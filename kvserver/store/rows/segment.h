/* segment.h - KV_BLOCK_TOKENS rows with their CRCs and the codes of their keys, and where they
 * come from.  unit.h says what holds of them.
 *
 * A segment keeps the bytes of its codes, whatever they mean: who makes them (index/encode.h)
 * is told by the segment store when they go.
 *
 * Invariants, which kvs_segment_check() asserts of a segment between two calls:
 *   (1) A unit refers to it, or somebody has it pinned; a job that gives it codes, or that begins
 *       with it, has.
 *   (2) Its rows, CRCs and codes are elements of the arena that are lent.
 *   (3) No more rows have codes, have lost them, are bad or verified than were ever written.
 *   (4) Its codes are there or lost, not some of each; without a tile it has neither.
 *   (5) In a chapter all of its rows have codes, or had when they were lost.
 * and kvs_segment_store_check() of the store:
 *   (6) The records in use and the free ones are all that pages were carved into.
 */
#ifndef KV_KVSERVER_STORE_ROWS_SEGMENT_H
#define KV_KVSERVER_STORE_ROWS_SEGMENT_H

#include "kvserver/store/rows/arena.h"
#include "kvserver/store/rows/health.h"
#include "proto/kv_status.h"
#include "proto/kv_types.h"

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

/* 64 bytes, and 8 in each unit that refers to it. */
struct kvs_segment {
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
static_assert(sizeof(struct kvs_segment) == 64, "bookkeeping of a segment");
static_assert(KV_BLOCK_TOKENS % 64 == 0, "a bit for each row");

/* Where segments come from: one per data thread. */
struct kvs_segment_store {
    struct kvs_arena *arena;
    int crc_class;
    int record_class;                 /* pages of segment records */
    struct kvs_segment *free_records; /* linked through `rows` */
    uint64_t n_segments;
    struct kvs_health health;

    /* Gives back the codes of a segment that goes.  Who makes codes sets it before the first. */
    void (*release_codes)(void *arg, struct kvs_segment *segment);
    void *release_arg;
};

/* false: the arena has no page for it. */
bool kvs_segment_store_init(struct kvs_segment_store *store, struct kvs_arena *arena);

void kvs_segment_check(const struct kvs_segment_store *store,
                       const struct kvs_segment *segment);
/* Walks the free records. */
void kvs_segment_store_check(const struct kvs_segment_store *store);

struct kvs_unit;

/* `count` segments at `at` of the unit's array, side by side where the arena can. */
kv_status_t kvs_segments_add(struct kvs_unit *unit,
                             struct kvs_segment_store *store,
                             uint32_t at,
                             uint32_t count);

/* One unit less refers to it. */
void kvs_segment_unref(struct kvs_segment_store *store, struct kvs_segment *segment);

/* One transfer less needs it. */
void kvs_segment_unpin(struct kvs_segment_store *store, struct kvs_segment *segment);

/* Nobody refers to the rows from `filled` on any more: they are not bad, not lost. */
void kvs_segment_forget_rows(struct kvs_segment_store *store,
                             struct kvs_segment *segment,
                             uint32_t filled);

static inline bool kvs_segment_is_bad(const struct kvs_segment *segment, uint32_t row)
{
    return segment->bad[row / 64] >> row % 64 & 1;
}

#endif
