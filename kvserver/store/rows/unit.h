/* unit.h - the rows of one (layer, kv head): segments of KV_BLOCK_TOKENS rows, their CRCs, and
 * codes of their keys.
 *
 *        0            committed          reserved
 *        |-- readable ----|-- being written --|          committed <= reserved
 *
 * A segment's rows lie in one piece of the arena, its CRCs in another; segments that were
 * reserved together often lie side by side, so that many are sent or received as one piece.
 *
 * Invariants:
 *   (1) Rows below `committed` never change, in no segment that anybody refers to or has
 *       pinned.
 *   (2) A segment is shared by units (refs) after a fork, and pinned by transfers under way;
 *       its memory goes back when both are 0.
 *   (3) A row is written in place only if one unit refers to its segment and no transfer can
 *       still see or fill it (`n_written` is how far any writer ever got); else the segment is
 *       copied first, which waits for rows that are landing in it: they know no other place.
 *   (4) Codes are those of the segment's first `n_coded` rows, which are committed in some
 *       unit, by one codebook.  They are the segment's: whoever refers to it has them, and they
 *       go with it.
 * and, which kvs_unit_check() asserts between two calls:
 *   (5) committed <= reserved, and there is a segment for each block up to `reserved`, none
 *       behind.
 *   (6) Each is sound (segment.h), has the unit's reference, and rows of the unit's class.
 *   (7) All rows below `reserved` count as written in their segments.
 *   (8) A unit that is broken has transfers under way: the last of them mends it.
 *
 * Threads: the data thread that owns the unit.  Memory: segments are the segment store's; a unit is its
 * part's storage.
 */
#ifndef KV_KVSERVER_STORE_ROWS_UNIT_H
#define KV_KVSERVER_STORE_ROWS_UNIT_H

#include "kvserver/base/iov.h"
#include "kvserver/base/writers.h"
#include "kvserver/store/rows/segment.h"

struct kvs_unit {
    struct kvs_segment **segments;
    uint32_t n_segments, capacity;
    uint32_t committed, reserved;
    uint32_t n_transfers; /* transfers under way into [committed, reserved) */
    uint32_t n_coming;    /* puts under way that will write from `reserved` on, or across it */
    bool broken;          /* one of them failed: none after it can be committed */
    uint8_t array_class;  /* of `segments` */
    uint8_t row_class;
    uint16_t layer, kv_head;
    uint32_t row_bytes;
    uint64_t mark; /* of the last request that named it: finds doubles */
    const struct kv_writers *const *writers; /* where its session's are; NULL: writer 0 */

    /* Retrieval: queries answered, and how many of the rows that exact top-k takes they found,
     * a moving average; NaN: not known. */
    uint32_t n_queries;
    float recall;
};

/* KV_TOO_LARGE: a segment of such rows does not fit a page. */
kv_status_t kvs_unit_init(struct kvs_unit *unit,
                          struct kvs_segment_store *store,
                          uint32_t layer,
                          uint32_t kv_head,
                          uint32_t row_bytes);
/* Gives back all that it has; it may be cleared again, and not used before kvs_unit_init(). */
void kvs_unit_clear(struct kvs_unit *unit, struct kvs_segment_store *store);

/* Makes [reserved, end) writable and raises `reserved`.  KV_NO_MEMORY: nothing changed;
 * KV_BUSY: nor did it, for the last segment has to be copied and rows are landing in it. */
kv_status_t
kvs_unit_reserve(struct kvs_unit *unit, struct kvs_segment_store *store, uint32_t end);

/* Gives up what is reserved from `begin` on. */
void kvs_unit_unreserve(struct kvs_unit *unit, struct kvs_segment_store *store, uint32_t begin);

/* Forgets all rows from `tokens` on, and every reservation. */
void kvs_unit_truncate(struct kvs_unit *unit, struct kvs_segment_store *store, uint32_t tokens);

/* `child` is a fresh unit of the same shape; it refers to the segments of the first `tokens`
 * rows. KV_NO_MEMORY: the child is empty. */
kv_status_t kvs_unit_fork(const struct kvs_unit *unit,
                          struct kvs_unit *child,
                          struct kvs_segment_store *store,
                          uint32_t tokens);

/* Looks at each of its segments. */
void kvs_unit_check(const struct kvs_unit *unit, const struct kvs_segment_store *store);

/* A row that is reserved; its CRC. */
static inline uint8_t *kvs_unit_row(const struct kvs_unit *unit, uint32_t token)
{
    return unit->segments[token / KV_BLOCK_TOKENS]->rows +
           (size_t)(token % KV_BLOCK_TOKENS) * unit->row_bytes;
}

static inline uint32_t *kvs_unit_crc(const struct kvs_unit *unit, uint32_t token)
{
    return &unit->segments[token / KV_BLOCK_TOKENS]->crcs[token % KV_BLOCK_TOKENS];
}

/* Whether the row is known to be bad; its segment's record is all that is read. */
static inline bool kvs_unit_is_bad(const struct kvs_unit *unit, uint32_t token)
{
    return kvs_segment_is_bad(unit->segments[token / KV_BLOCK_TOKENS], token % KV_BLOCK_TOKENS);
}

/* Writes a bad row again, and its CRC: it is good then, in every unit that has it. */
void kvs_unit_mend(struct kvs_unit *unit,
                   struct kvs_segment_store *store,
                   uint32_t token,
                   const void *row,
                   uint32_t crc);

/* Appends the pieces of memory of rows [begin, begin + count) to iov, joining neighbours; n_iov
 * pieces are there already.  Returns how many there are then; `max` + 1: they do not fit. */
unsigned kvs_unit_pieces(const struct kvs_unit *unit,
                         uint32_t begin,
                         uint32_t count,
                         struct kv_iov *iov,
                         unsigned n_iov,
                         unsigned max);

/* Copies rows or CRCs in and out; [begin, begin + count) is reserved. */
void kvs_unit_write(struct kvs_unit *unit, uint32_t begin, uint32_t count, const void *rows);
void kvs_unit_write_crcs(struct kvs_unit *unit,
                         uint32_t begin,
                         uint32_t count,
                         const uint32_t *crcs);
void kvs_unit_read_crcs(const struct kvs_unit *unit,
                        uint32_t begin,
                        uint32_t count,
                        uint32_t *ret_crcs);

/* Whether none of the segments of [begin, begin + count) has as many pins as it can count. */
bool kvs_unit_can_pin(const struct kvs_unit *unit, uint32_t begin, uint32_t count);

/* Pins the segments of [begin, begin + count), which can be, and writes them to `pins`; returns
 * how many, at most count / KV_BLOCK_TOKENS + 2. */
unsigned kvs_unit_pin(const struct kvs_unit *unit,
                      uint32_t begin,
                      uint32_t count,
                      struct kvs_segment **pins);

/* Where the chapter of segment `at`, which is `in_chapter`, ends among the unit's first
 * `end` segments: the unit may have only the first of the chapter's.  `end` or less: `at`. */
static inline uint32_t
kvs_unit_chapter_end(const struct kvs_unit *unit, uint32_t at, uint32_t end)
{
    const uint32_t codebook = unit->segments[at]->codebook;

    if (end > unit->n_segments)
        end = unit->n_segments;
    while (at < end && unit->segments[at]->in_chapter &&
           unit->segments[at]->codebook == codebook)
        at++;
    return at;
}

#endif
