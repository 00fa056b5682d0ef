/* segment.h - segments: KV_BLOCK_TOKENS rows with their CRCs and the codes of their keys, and
 * the store that allocates them.  unit.h says how units use them.
 *
 * A segment holds the bytes of its codes without knowing what they mean: the module that makes
 * codes (index/encode.h) is told by the segment store when they are freed.
 *
 * Invariants, which kvs_segment_check() asserts of a segment between two calls:
 *   (1) A unit refers to it, or it is pinned.  It is pinned if a job gives it codes or begins
 *       with it.
 *   (2) Its rows, CRCs and codes are elements of the arena in use.
 *   (3) No more rows have codes, have lost them, are bad or verified than were ever written.
 *   (4) It has codes, or has lost them, but not both; without a tile it has neither.
 *   (5) In a chapter all of its rows have codes, or had when they were lost.
 * and kvs_segment_store_check() of the store:
 *   (6) The records in use and the free ones are all records that pages were divided into.
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

/* 64 bytes, and 8 more in each unit that refers to it. */
struct kvs_segment {
    uint8_t *rows;                      /* (KV_BLOCK_TOKENS, row_bytes) */
    uint32_t *crcs;                     /* (KV_BLOCK_TOKENS) */
    uint8_t *codes;                     /* a tile, see kernels/pq_tiles.h; NULL: none */
    uint64_t bad[KV_BLOCK_TOKENS / 64]; /* a bit per row: its CRC was wrong (verify.h) */
    uint32_t refs;
    uint32_t codebook;  /* of `codes` */
    uint32_t codes_crc; /* of the whole tile */
    uint16_t pins;
    uint16_t pass;         /* the scrubber's last pass here (scrub.h) */
    uint8_t n_checked;     /* rows that this pass verified */
    uint8_t n_written;     /* 0..KV_BLOCK_TOKENS */
    uint8_t n_coded;       /* 0..n_written */
    uint8_t n_lost;        /* rows whose codes were bad and have not been made again */
    uint8_t row_class;     /* of `rows` */
    bool training : 1;     /* an index job will give it codes */
    bool begins_job : 1;   /* the first segment of an index job */
    bool in_chapter : 1;   /* all its codes are from the job that made the codebook: cells and
                            * summaries of the codebook refer to it */
    bool lost_chapter : 1; /* it was in_chapter when its codes were lost */
};
static_assert(sizeof(struct kvs_segment) == 64, "bookkeeping of a segment");
static_assert(KV_BLOCK_TOKENS % 64 == 0, "a bit for each row");

/* The allocator of segments: one per data thread. */
struct kvs_segment_store {
    struct kvs_arena *arena;
    int crc_class;
    int record_class;                 /* for pages of segment records */
    struct kvs_segment *free_records; /* linked through `rows` */
    uint64_t n_segments;
    struct kvs_health health;

    /* Frees the codes of a segment that is freed.  The owner of codes sets it before making
     * any. */
    void (*release_codes)(void *arg, struct kvs_segment *segment);
    void *release_arg;
};

/* Returns false if the arena has no free page. */
bool kvs_segment_store_init(struct kvs_segment_store *store, struct kvs_arena *arena);

void kvs_segment_check(const struct kvs_segment_store *store,
                       const struct kvs_segment *segment);
/* Visits the free records. */
void kvs_segment_store_check(const struct kvs_segment_store *store);

struct kvs_unit;

/* Adds `count` segments at index `at` of the unit's array, adjacent where the arena can. */
kv_status_t kvs_segments_add(struct kvs_unit *unit,
                             struct kvs_segment_store *store,
                             uint32_t at,
                             uint32_t count);

/* Drops one unit's reference. */
void kvs_segment_unref(struct kvs_segment_store *store, struct kvs_segment *segment);

/* Drops one transfer's pin. */
void kvs_segment_unpin(struct kvs_segment_store *store, struct kvs_segment *segment);

/* No unit has the rows from `filled` on any more: they no longer count as bad or lost. */
void kvs_segment_forget_rows(struct kvs_segment_store *store,
                             struct kvs_segment *segment,
                             uint32_t filled);

static inline bool kvs_segment_is_bad(const struct kvs_segment *segment, uint32_t row)
{
    return segment->bad[row / 64] >> row % 64 & 1;
}

#endif
