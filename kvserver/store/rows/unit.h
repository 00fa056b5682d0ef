/* unit.h - a unit: the rows of one (layer, KV head), in segments of KV_BLOCK_TOKENS rows, with
 * their CRCs and the codes of their keys.
 *
 *        0            committed          reserved
 *        |-- readable ----|-- being written --|          committed <= reserved
 *
 * A segment's rows are one piece of the arena, its CRCs another.  Segments that were reserved
 * together are often adjacent, so that many are sent or received as one piece.
 *
 * Invariants:
 *   (1) Rows below `committed` never change in any segment that a unit refers to or a transfer
 *       has pinned.
 *   (2) A fork shares segments between units (refs), and transfers pin them; a segment is freed
 *       when both counts are 0.
 *   (3) A row is written in place only if one unit refers to its segment and no transfer can
 *       still read or write the row (`n_written` is how far any writer ever got).  Otherwise
 *       the segment is copied first, once no rows are being received into it.
 *   (4) Codes are those of the segment's first `n_coded` rows, which are committed in some
 *       unit, by one codebook.  They belong to the segment: all units that refer to it have
 *       them, and they are freed with it.
 * and, which kvs_unit_check() asserts between two calls:
 *   (5) committed <= reserved, and there is one segment for each block up to `reserved`, and
 *       none after.
 *   (6) Each segment is valid (segment.h), the unit refers to it, and its rows are of the
 *       unit's class.
 *   (7) All rows below `reserved` count as written in their segments.
 *   (8) A broken unit has transfers in progress: the last of them clears it.
 *
 * Threads: the data thread that owns the unit.  Memory: segments belong to the segment store;
 * the array of units belongs to the shard session.
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
    uint32_t n_transfers; /* transfers in progress into [committed, reserved) */
    uint32_t n_coming;    /* puts in progress that will write at or across `reserved` */
    bool broken;          /* a transfer failed: none after it can be committed */
    uint8_t array_class;  /* of `segments` */
    uint8_t row_class;
    uint16_t layer, kv_head;
    uint32_t row_bytes;
    uint32_t session; /* its place on this data thread */
    uint64_t mark;    /* of the last request that named it: finds duplicates */
    const struct kv_writers *const *writers; /* the session's; NULL: writer 0 */

    /* Retrieval: queries since the last sample, and the fraction of exact top-k rows that
     * queries selected, as a moving average; NaN: unknown. */
    uint32_t n_queries;
    float recall;
};

/* Initializes a unit.  Fails with KV_TOO_LARGE if a segment of such rows does not fit a
 * page. */
kv_status_t kvs_unit_init(struct kvs_unit *unit,
                          struct kvs_segment_store *store,
                          uint32_t layer,
                          uint32_t kv_head,
                          uint32_t row_bytes);
/* Releases all that the unit has.  It may be cleared again, but not used before
 * kvs_unit_init(). */
void kvs_unit_clear(struct kvs_unit *unit, struct kvs_segment_store *store);

/* Makes [reserved, end) writable and raises `reserved`.  Fails with KV_NO_MEMORY, or with
 * KV_BUSY if the last segment must be copied while rows are being received into it; nothing has
 * changed then. */
kv_status_t
kvs_unit_reserve(struct kvs_unit *unit, struct kvs_segment_store *store, uint32_t end);

/* Releases the reservation from `begin` on. */
void kvs_unit_unreserve(struct kvs_unit *unit, struct kvs_segment_store *store, uint32_t begin);

/* Removes all rows from `tokens` on, and every reservation. */
void kvs_unit_truncate(struct kvs_unit *unit, struct kvs_segment_store *store, uint32_t tokens);

/* Makes `child`, a new unit of the same shape, refer to the segments of the first `tokens`
 * rows.  After KV_NO_MEMORY the child is empty. */
kv_status_t kvs_unit_fork(const struct kvs_unit *unit,
                          struct kvs_unit *child,
                          struct kvs_segment_store *store,
                          uint32_t tokens);

/* Asserts the invariants; visits all segments. */
void kvs_unit_check(const struct kvs_unit *unit, const struct kvs_segment_store *store);

/* Return a reserved row, and its CRC. */
static inline uint8_t *kvs_unit_row(const struct kvs_unit *unit, uint32_t token)
{
    return unit->segments[token / KV_BLOCK_TOKENS]->rows +
           (size_t)(token % KV_BLOCK_TOKENS) * unit->row_bytes;
}

static inline uint32_t *kvs_unit_crc(const struct kvs_unit *unit, uint32_t token)
{
    return &unit->segments[token / KV_BLOCK_TOKENS]->crcs[token % KV_BLOCK_TOKENS];
}

/* Returns whether the row is known to be bad.  Reads only its segment's record. */
static inline bool kvs_unit_is_bad(const struct kvs_unit *unit, uint32_t token)
{
    return kvs_segment_is_bad(unit->segments[token / KV_BLOCK_TOKENS], token % KV_BLOCK_TOKENS);
}

/* Writes a bad row and its CRC again; it is then good in every unit that has it. */
void kvs_unit_mend(struct kvs_unit *unit,
                   struct kvs_segment_store *store,
                   uint32_t token,
                   const void *row,
                   uint32_t crc);

/* Appends the memory of rows [begin, begin + count) to iov, which has n_iov pieces, and joins
 * neighbors.  Returns the new number of pieces, or `max` + 1 if they do not fit. */
unsigned kvs_unit_pieces(const struct kvs_unit *unit,
                         uint32_t begin,
                         uint32_t count,
                         struct kv_iov *iov,
                         unsigned n_iov,
                         unsigned max);

/* Copy rows or CRCs in and out; [begin, begin + count) is reserved. */
void kvs_unit_write(struct kvs_unit *unit, uint32_t begin, uint32_t count, const void *rows);
void kvs_unit_write_crcs(struct kvs_unit *unit,
                         uint32_t begin,
                         uint32_t count,
                         const uint32_t *crcs);
void kvs_unit_read_crcs(const struct kvs_unit *unit,
                        uint32_t begin,
                        uint32_t count,
                        uint32_t *ret_crcs);

/* Returns whether every segment of [begin, begin + count) can take one more pin. */
bool kvs_unit_can_pin(const struct kvs_unit *unit, uint32_t begin, uint32_t count);

/* Pins the segments of [begin, begin + count) and writes them to `pins`; kvs_unit_can_pin()
 * must hold.  Returns their number, at most count / KV_BLOCK_TOKENS + 2. */
unsigned kvs_unit_pin(const struct kvs_unit *unit,
                      uint32_t begin,
                      uint32_t count,
                      struct kvs_segment **pins);

/* Returns the segment after the last of the chapter that begins at segment `at`, among the
 * unit's first `end` segments; `at` itself if that is not `in_chapter`.  A unit may have only
 * the first segments of a chapter. */
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
