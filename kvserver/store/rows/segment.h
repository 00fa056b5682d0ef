/* segment.h - blocks and their segments, and the store that allocates them.
 *
 * A segment is KV_BLOCK_TOKENS rows of one unit.  The segments of a block, one of each unit of a
 * session on this data thread, share a record: whoever refers to a block refers to all of them.
 *
 *     struct kvs_block    refs, pins, under
 *       segments[n]       8 bytes each: where the rows are, how many were written
 *       groups[n / 256]   CRCs of the rows, and codes, once there are any
 *
 * A block is in memory with all its segments and what was made of them, or absent as a whole, when
 * its record is left, and that of its codes; or rows of some of its units are away (residency.h).  A
 * segment whose rows are away has a word in place of their address, which is not 0: it is this
 * block's all the same.
 *
 * So a node's bookkeeping is at most 64 bytes a block and 8 a segment, and 16 for every further
 * 256 segments, beside the CRCs, 4 bytes a row, and what pages of the arena lose at their ends.
 * What a few segments have (marks of bad rows) lies in a table on the side, and what is made of
 * rows in columns (column.h): 32 bytes a segment once one has codes.
 *
 * A block may lie over another one (`under`): it has its own rows of some units, and those of the
 * others are found under it.  A session that writes to a block that a fork shares gets such a
 * block, and copies only the rows of the units it writes (unit.h).  When the fork has gone, the
 * rows under it that are hidden go, and the block gets the others (kvs_block_settle()): when the
 * scrub comes by, or somebody writes to it.
 *
 * A block has the codes without knowing what they mean: the module that makes them
 * (index/encode.h) is told by the segment store when they are freed.
 *
 * Invariants, which kvs_block_check() asserts of a block between two calls:
 *   (1) A session or a block over it refers to it, or it is pinned.  It is pinned if a job gives
 *       one of its segments codes or begins with it.
 *   (2) Its rows, CRCs and codes are elements of the arena in use, or away; as many segments have
 *       rows as it counts, and if all have, nothing is under it.
 *   (3) No more rows have codes, have lost them or are bad than were ever written, in a segment.
 *   (4) A segment has codes, or has lost them, but not both; without a tile it has neither.
 *   (5) In a chapter all of its rows have codes, or had when they were lost.
 *   (6) If it is in memory, nothing of it is away; if it is absent, everything is.  Rows that are
 *       there have their CRCs and codes with them.
 * and kvs_segment_store_check() of the store:
 *   (7) The records in use and the free ones are all that memory was divided into.  Those in use
 *       are of blocks, and of marks, one of each segment that has some.
 *   (8) The blocks that leave are listed once, and the absent ones are counted.
 */
#ifndef KV_KVSERVER_STORE_ROWS_SEGMENT_H
#define KV_KVSERVER_STORE_ROWS_SEGMENT_H

#include "kvserver/store/rows/column.h"
#include "proto/kv_status.h"
#include "proto/kv_types.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KVS_GROUP_SEGMENTS = 256, /* whose CRCs are one piece of memory, 128 KiB at most */
    KVS_RECORD_STEP = 16,     /* sizes of records are multiples of it */
    KVS_RECORD_MAX = 4096,    /* larger ones are elements of the arena themselves */
    KVS_BAD_LISTS = 256,
    KVS_LEAVING_MAX = 64, /* blocks at once */
    KVS_WORK_UNITS =
        256, /* units of a block, counted modulo that, at which somebody is at work */
};

/* Where a block is (residency.h). */
enum kvs_residency {
    KVS_IN_MEMORY,
    KVS_LEAVING, /* in memory, until nobody can be using it any more */
    KVS_ABSENT,
    KVS_PARTLY, /* rows of some units are away, or of all; those that somebody needs come back */
};

/* The rows of one unit in a block. */
struct kvs_segment {
    uint64_t rows : 48;      /* address of (KV_BLOCK_TOKENS, row_bytes); 0: none here; from
                              * KVS_ROWS_AWAY on: they are away */
    uint64_t n_written : 8;  /* 0..KV_BLOCK_TOKENS; only rises while there are rows */
    uint64_t training : 1;   /* an index job will give it codes */
    uint64_t begins_job : 1; /* the first segment of an index job */
    uint64_t has_bad : 1;    /* the table of bad rows has an entry for it */
    uint64_t is_all_bad : 1; /* one of its rows is bad: which one is not known, or there was no
                              * memory to say it */
    uint64_t is_wanted : 1;  /* it is away, and somebody has asked for it */
    uint64_t pass : 2;       /* in which its rows were used last, modulo 4 (residency.h) */
};
static_assert(sizeof(struct kvs_segment) == 8, "bookkeeping of a segment");

/* No address of memory has this bit. */
#define KVS_ROWS_AWAY (UINT64_C(1) << 47)

/* The codes of a segment's keys. */
struct kvs_codes {
    struct kvs_column column; /* a tile, see kernels/pq_tiles.h */
    uint32_t codebook;
    uint8_t n_coded;   /* 0..n_written */
    uint8_t n_lost;    /* rows whose codes were bad and have not been made again */
    bool in_chapter;   /* all its codes are from the job that made the codebook: cells and
                        * summaries of the codebook refer to it */
    bool lost_chapter; /* it was in_chapter when its codes were lost */
};
static_assert(sizeof(struct kvs_codes) <= 32, "bookkeeping of codes");

/* Of KVS_GROUP_SEGMENTS segments, or those that the block has: NULL until one has rows, or
 * codes. */
struct kvs_segment_group {
    uint32_t *crcs;          /* (segments, KV_BLOCK_TOKENS) */
    struct kvs_codes *codes; /* (segments) */
};

struct kvs_block {
    uint32_t refs;           /* sessions, and blocks over it */
    uint32_t pins;           /* transfers, and jobs */
    struct kvs_block *under; /* has the rows that are not here; NULL: none */
    uint16_t n_segments;     /* in `segments` */
    uint16_t n_own;          /* of these: with rows */
    uint16_t pass;           /* the scrubber's last pass here (scrub.h) */
    uint8_t n_checked;       /* rows of each segment that this pass verified */
    uint8_t residency;       /* enum kvs_residency */
    struct kvs_segment segments[];
};
/* With what its size is rounded up by, and a session's pointer to it. */
static_assert(sizeof(struct kvs_block) + sizeof(struct kvs_segment_group) + KVS_RECORD_STEP +
                      sizeof(struct kvs_block *) <=
                  64,
              "bookkeeping of a block");
static_assert(KV_UNITS_MAX <= UINT16_MAX, "units are counted in a block");

/* The bad rows of a segment: a bit for each whose CRC was wrong (verify.h). */
struct kvs_bad_rows {
    struct kvs_bad_rows *next;
    const struct kvs_block *block;
    uint32_t at;
    uint64_t rows[KV_BLOCK_TOKENS / 64];
};
static_assert(KV_BLOCK_TOKENS % 64 == 0, "a bit for each row");

struct kvs_record; /* a free one */
struct kvs_tier;

/* A column that a tier keeps for the next process. */
struct kvs_kept_column {
    const struct kvs_column *column; /* the segment's, or its chapter's */
    uint32_t
        identity; /* of what gives its bytes their meaning (index/kept.h); 0: of use to this process only */
    uint32_t block_begin, n_blocks; /* of its chapter */
};

/* A block that leaves, and in which turn it was marked (residency.h). */
struct kvs_leaving {
    struct kvs_block *block;
    uint64_t turn;
};

/* The allocator of blocks and segments: one per data thread. */
struct kvs_segment_store {
    struct kvs_arena *arena;
    int chunk_class; /* what records are divided from */
    struct kvs_record *free_records[KVS_RECORD_MAX / KVS_RECORD_STEP + 1]; /* by size */
    uint64_t records_bytes;                                                /* divided */
    uint64_t records_used;                                                 /* bytes in use */
    uint64_t n_blocks, n_segments;
    struct kvs_bad_rows *bad[KVS_BAD_LISTS];
    struct kvs_health health;

    /* Blocks that are not in memory, or leave it: 0 for nearly every store (residency.h). */
    uint64_t n_away;
    struct kvs_leaving leaving[KVS_LEAVING_MAX];
    uint32_t n_leaving;
    uint64_t turn;                      /* of those at work */
    uint64_t n_at_work[2];              /* who began in an even turn, in an odd one */
    uint32_t n_at_unit[KVS_WORK_UNITS]; /* the same, by units */
    uint8_t passes[KVS_WORK_UNITS];     /* modulo 256: of units, modulo KVS_WORK_UNITS */
    uint64_t n_passes;                  /* of all units */
    const struct kvs_tier *tier;
    void *tier_arg;
    /* A segment that was wanted is in memory, or has gone.  Whoever waits for some sets it. */
    void (*arrived)(void *arg, const struct kvs_segment *segment);
    void *arrived_arg;

    /* Frees the codes of a segment that is freed; verifies those that are back in memory, or, where
     * they have not come, loses them.  The owner of codes sets them before making any. */
    void (*release_codes)(void *arg, struct kvs_block *block, uint32_t at);
    void (*check_codes)(void *arg, struct kvs_block *block, uint32_t at, bool have_come);
    /* Finds the column of that kind that ends with the segment, and that a tier is to keep (index/kept.h).
     * Returns false if there is none.
     *   number  of the block in its prompt */
    bool (*kept)(void *arg,
                 enum kvs_column_kind kind,
                 const struct kvs_block *block,
                 uint32_t at,
                 uint32_t number,
                 struct kvs_kept_column *ret_column);
    /* What was learnt of the rows of a segment and those before it (index/learnt.h). */
    size_t (*learnt)(void *arg,
                     const struct kvs_block *block,
                     uint32_t at,
                     uint32_t number,
                     void *ret_bytes);
    void *release_arg;
};

/* Returns false if the arena has no free page. */
bool kvs_segment_store_init(struct kvs_segment_store *store, struct kvs_arena *arena);

void kvs_block_check(const struct kvs_segment_store *store, const struct kvs_block *block);
/* Visits the free records. */
void kvs_segment_store_check(const struct kvs_segment_store *store);

/* Of whoever visits all blocks: asserts that the records in use are theirs, of so many bytes
 * together (kvs_block_record_bytes()), and those of the marks of segments that have any. */
void kvs_segment_store_check_used(const struct kvs_segment_store *store,
                                  uint64_t of_blocks,
                                  uint64_t n_marked);
uint64_t kvs_block_record_bytes(const struct kvs_block *block);

/* Returns memory of free records, for whoever counts the arena's. */
void kvs_segment_store_visit_free(const struct kvs_segment_store *store,
                                  void (*visit)(void *arg, const void *record),
                                  void *arg);

/* ---- blocks ------------------------------------------------------------------------------- */

/* Returns a block of n segments without rows, with a ref of the caller's, over `under`, whose
 * ref becomes its own; NULL: no memory, and nothing has changed. */
struct kvs_block *
kvs_block_create(struct kvs_segment_store *store, uint32_t n_segments, struct kvs_block *under);

/* Drops one ref. */
void kvs_block_unref(struct kvs_segment_store *store, struct kvs_block *block);

/* Drops one transfer's pin. */
void kvs_block_unpin(struct kvs_segment_store *store, struct kvs_block *block);

/* Where the block under it, or one further down, has nobody else any more, the block over that
 * gets its rows, but for those that it hides: these are freed.  Looks at some blocks, from this
 * one on down. */
void kvs_block_settle(struct kvs_segment_store *store, struct kvs_block *block);

/* Makes room for the CRCs of a segment's rows.  Returns false if there is no memory. */
bool kvs_block_crcs_make(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at);
/* Frees the CRCs of all segments of a segment's group. */
void kvs_group_crcs_free(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at);
/* Frees those of all groups. */
void kvs_block_crcs_free(struct kvs_segment_store *store, struct kvs_block *block);

/* Returns the block, of it and those under it, that has the segment's rows; the lowest one if
 * none has. */
static inline struct kvs_block *kvs_block_owner(struct kvs_block *block, uint32_t at)
{
    while (block->segments[at].rows == 0 && block->under != NULL)
        block = block->under;
    return block;
}

/* ---- segments of the block that has their rows -------------------------------------------- */

static inline bool kvs_segment_is_away(const struct kvs_segment *segment)
{
    return segment->rows >= KVS_ROWS_AWAY;
}

/* The rows must be in memory. */
static inline uint8_t *kvs_block_rows(const struct kvs_block *block, uint32_t at)
{
    return (uint8_t *)(uintptr_t)block->segments[at].rows;
}

static inline struct kvs_segment_group *kvs_block_group(const struct kvs_block *block,
                                                        uint32_t at)
{
    return (struct kvs_segment_group *)(void *)(block->segments + block->n_segments) +
           at / KVS_GROUP_SEGMENTS;
}

/* Returns the CRCs of a segment that has rows. */
static inline uint32_t *kvs_block_crcs(const struct kvs_block *block, uint32_t at)
{
    return kvs_block_group(block, at)->crcs +
           (size_t)(at % KVS_GROUP_SEGMENTS) * KV_BLOCK_TOKENS;
}

extern const struct kvs_codes kvs_no_codes;

/* Returns the segment's codes; those of no rows if it has none. */
static inline const struct kvs_codes *kvs_block_codes(const struct kvs_block *block,
                                                      uint32_t at)
{
    const struct kvs_segment_group *group = kvs_block_group(block, at);

    return group->codes != NULL ? &group->codes[at % KVS_GROUP_SEGMENTS] : &kvs_no_codes;
}

/* The same to write to; NULL: there was none, and no memory for it. */
struct kvs_codes *
kvs_block_codes_make(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at);

/* Gives a segment without rows these, an element of the arena that the block then owns.  Returns
 * false if there is no memory for its CRCs; nothing has changed then. */
bool kvs_segment_add(struct kvs_segment_store *store,
                     struct kvs_block *block,
                     uint32_t at,
                     uint8_t *rows);

/* Frees the rows of a segment and what was made of them. */
void kvs_segment_free(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at);

/* Nobody has the rows from `filled` on any more: they no longer count as bad or lost. */
void kvs_segment_forget_rows(struct kvs_segment_store *store,
                             struct kvs_block *block,
                             uint32_t at,
                             uint32_t filled);

/* ---- bad rows ----------------------------------------------------------------------------- */

/* Marks a row, which is then rejected until it is written again.  Does nothing if it is
 * marked. */
void kvs_segment_mark_bad(struct kvs_segment_store *store,
                          struct kvs_block *block,
                          uint32_t at,
                          uint32_t row);

/* Marks all rows: which ones are bad is not known. */
void kvs_segment_mark_all_bad(struct kvs_segment_store *store,
                              struct kvs_block *block,
                              uint32_t at);

/* Makes the marks of the first rows of a segment, `filled` of them, for a copy of these; NULL: none
 * is bad.  Returns false if there is no memory. */
bool kvs_bad_rows_copy(struct kvs_segment_store *store,
                       const struct kvs_block *from,
                       uint32_t at,
                       uint32_t filled,
                       struct kvs_bad_rows **ret_bad);
/* Gives the copy, which has no marks yet, these; or frees them.  NULL is allowed. */
void kvs_segment_give_bad(struct kvs_segment_store *store,
                          struct kvs_block *block,
                          uint32_t at,
                          struct kvs_bad_rows *bad);
void kvs_bad_rows_free(struct kvs_segment_store *store, struct kvs_bad_rows *bad);

/* Marks the rows that were written of a segment that counts as bad as a whole: those that are
 * written next are good.  Does nothing if it does not count so.  Returns false if there is no
 * memory. */
bool kvs_segment_list_bad(struct kvs_segment_store *store,
                          struct kvs_block *block,
                          uint32_t at);

/* Takes the mark of a row away that has been written again. */
void kvs_segment_unmark_bad(struct kvs_segment_store *store,
                            struct kvs_block *block,
                            uint32_t at,
                            uint32_t row);

/* Returns whether any row of the segment is known to be bad. */
static inline bool kvs_segment_has_bad(const struct kvs_block *block, uint32_t at)
{
    return block->segments[at].has_bad || block->segments[at].is_all_bad;
}

/* Returns whether the row is known to be bad. */
bool kvs_segment_is_bad(const struct kvs_segment_store *store,
                        const struct kvs_block *block,
                        uint32_t at,
                        uint32_t row);

/* Returns the number of rows of the segment that count as bad. */
uint32_t kvs_segment_count_bad(const struct kvs_segment_store *store,
                               const struct kvs_block *block,
                               uint32_t at);

#endif
