/* unit.h - a unit: the rows of one (layer, KV head), with their CRCs and the codes of their keys,
 * in segments; and the blocks of a session, which have a segment for each of its units.
 *
 *        0            committed          reserved
 *        |-- readable ----|-- being written --|          committed <= reserved
 *
 * A segment's rows are one piece of the arena.  Segments that were reserved together are often
 * adjacent, so that many are sent or received as one piece.
 *
 * Invariants:
 *   (1) Rows below `committed` never change in any segment that a unit finds or a transfer has
 *       pinned.
 *   (2) A fork shares blocks between sessions (refs), and transfers pin them; a block is freed
 *       when both counts are 0.
 *   (3) A row is written in place only if the segment is in the session's own block, no other
 *       session has that, and no transfer can still read or write the row (`n_written` is how
 *       far any writer ever got).  Otherwise the segment is copied first, into a block of the
 *       session's own over the shared one, once no rows are being received into it.
 *   (4) Codes are those of the segment's first `n_coded` rows, which are committed in some
 *       unit, by one codebook.  They belong to the segment: all units that find it have them,
 *       and they are freed with it.
 * and, which kvs_unit_check() asserts between two calls:
 *   (5) committed <= reserved, and the session has a block for each up to `reserved`, where the
 *       unit has a segment.
 *   (6) Each segment is valid (segment.h), and its rows are of the unit's class.
 *   (7) All rows below `reserved` count as written in their segments.
 *   (8) A broken unit has transfers in progress: the last of them clears it.
 *   (9) The session's blocks end where its longest unit does, and `n_top` units are as long.
 *
 * Threads: the data thread that owns the unit.  Memory: blocks belong to the segment store; the
 * array of units belongs to the shard session.
 */
#ifndef KV_KVSERVER_STORE_ROWS_UNIT_H
#define KV_KVSERVER_STORE_ROWS_UNIT_H

#include "kvserver/base/iov.h"
#include "kvserver/base/writers.h"
#include "kvserver/store/rows/residency.h"

struct kvs_unit;

/* The blocks of a session on a data thread. */
struct kvs_blocks {
    struct kvs_block **list; /* (n) */
    uint32_t n, capacity;
    struct kvs_segment_store *store;
    struct kvs_unit *units; /* (n_units), of which each block has a segment */
    uint32_t n_units;
    uint32_t n_top;      /* of them: with rows in the last block */
    uint8_t array_class; /* of `list` */
    bool is_mixed; /* they may be of several sessions, in turns: a chapter of one of these may
                          * have holes here */
};

struct kvs_unit {
    struct kvs_blocks *blocks; /* the session's */
    uint32_t at;               /* its place among the session's units here */
    uint32_t committed, reserved;
    uint32_t n_transfers; /* transfers in progress into [committed, reserved) */
    uint32_t n_coming;    /* puts in progress that will write at or across `reserved` */
    bool broken;          /* a transfer failed: none after it can be committed */
    uint8_t row_class;
    uint16_t layer, kv_head;
    uint32_t row_bytes;
    uint32_t session; /* its place on this data thread */
    uint8_t pass;     /* of the last query of it (residency.h) */
    uint64_t mark;    /* of the last request that named it: finds duplicates */
    const struct kv_writers *const *writers; /* the session's; NULL: writer 0 */

    /* Retrieval: queries since the last sample, and the fraction of exact top-k rows that
     * queries selected, as a moving average; NaN: unknown. */
    uint32_t n_queries;
    float recall;
};

/* Initializes the blocks of n_units units, none yet; the units must not move. */
void kvs_blocks_init(struct kvs_blocks *blocks,
                     struct kvs_segment_store *store,
                     struct kvs_unit *units,
                     uint32_t n_units);
/* Releases what is left after its units have been cleared, or after a fork that was given up. */
void kvs_blocks_clear(struct kvs_blocks *blocks);

/* Begins to make `child`, whose units have no rows, share the blocks of the first `tokens` rows.
 * After KV_NO_MEMORY nothing has changed. */
kv_status_t kvs_blocks_fork_begin(struct kvs_blocks *child, uint32_t tokens);
/* Shares up to `most` more of them, the blocks of `list`, all of whose units have so many rows; it
 * may be the child's own list.  Returns true after the last: the child's units have their rows. */
bool kvs_blocks_fork_on(struct kvs_block *const *list,
                        struct kvs_blocks *child,
                        uint32_t tokens,
                        uint32_t most);

/* Asserts the invariant that n_top is of; visits all units. */
void kvs_blocks_check(const struct kvs_blocks *blocks);

/* Initializes the unit at that place of the session's.  Fails with KV_TOO_LARGE if a segment of
 * such rows does not fit a page. */
kv_status_t kvs_unit_init(struct kvs_unit *unit,
                          struct kvs_blocks *blocks,
                          uint32_t at,
                          uint32_t layer,
                          uint32_t kv_head,
                          uint32_t row_bytes);
/* Releases all that the unit has.  It may be cleared again, but not used before
 * kvs_unit_init(). */
void kvs_unit_clear(struct kvs_unit *unit);

/* Makes [reserved, end) writable and raises `reserved`.  Fails with KV_NO_MEMORY, or with
 * KV_BUSY if the last segment must be copied while rows are being received into it; the unit has
 * the same rows then, though perhaps in a copy of its last segment, or without codes of all. */
kv_status_t kvs_unit_reserve(struct kvs_unit *unit, uint32_t end);

/* Releases the reservation from `begin` on. */
void kvs_unit_unreserve(struct kvs_unit *unit, uint32_t begin);

/* Removes all rows from `tokens` on, and every reservation. */
void kvs_unit_truncate(struct kvs_unit *unit, uint32_t tokens);

/* Asserts the invariants; visits all segments. */
void kvs_unit_check(const struct kvs_unit *unit);
/* The same, but visits only those with rows from `token` on. */
void kvs_unit_check_from(const struct kvs_unit *unit, uint32_t token);

static inline uint32_t kvs_blocks_for(uint32_t tokens)
{
    return (tokens + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
}

/* Returns the number of segments in which the unit has rows, or room for them. */
static inline uint32_t kvs_unit_n_segments(const struct kvs_unit *unit)
{
    return kvs_blocks_for(unit->reserved);
}

/* Returns the block that has the unit's rows of a block. */
static inline struct kvs_block *kvs_unit_block(const struct kvs_unit *unit, uint32_t block)
{
    return kvs_block_owner(unit->blocks->list[block], unit->at);
}

/* Returns whether the unit's rows of a block, their CRCs and codes are in memory. */
static inline bool kvs_unit_is_here(const struct kvs_unit *unit, uint32_t block)
{
    return kvs_segment_is_here(kvs_unit_block(unit, block), unit->at);
}

static inline const struct kvs_segment *kvs_unit_segment(const struct kvs_unit *unit,
                                                         uint32_t block)
{
    return &kvs_unit_block(unit, block)->segments[unit->at];
}

static inline const struct kvs_codes *kvs_unit_codes(const struct kvs_unit *unit,
                                                     uint32_t block)
{
    return kvs_block_codes(kvs_unit_block(unit, block), unit->at);
}

enum {
    KVS_UNIT_AHEAD = 8, /* blocks */
};

/* Prefetches what leads to the codes of blocks that follow this one: first the block itself, then
 * its codes.  Whoever goes from block to block waits for memory twice in each otherwise. */
static inline void kvs_unit_prefetch_codes(const struct kvs_unit *unit, uint32_t block)
{
    const uint32_t n = kvs_unit_n_segments(unit);

    if (block + 2 * KVS_UNIT_AHEAD < n) {
        const struct kvs_block *later = unit->blocks->list[block + 2 * KVS_UNIT_AHEAD];

        __builtin_prefetch(&later->segments[unit->at], 0, 2);
        __builtin_prefetch(kvs_block_group(later, unit->at), 0, 2);
    }
    if (block + KVS_UNIT_AHEAD < n)
        __builtin_prefetch(kvs_unit_codes(unit, block + KVS_UNIT_AHEAD), 0, 2);
}

/* Return a reserved row, and its CRC. */
static inline uint8_t *kvs_unit_row(const struct kvs_unit *unit, uint32_t token)
{
    return kvs_block_rows(kvs_unit_block(unit, token / KV_BLOCK_TOKENS), unit->at) +
           (size_t)(token % KV_BLOCK_TOKENS) * unit->row_bytes;
}

static inline uint32_t *kvs_unit_crc(const struct kvs_unit *unit, uint32_t token)
{
    return &kvs_block_crcs(kvs_unit_block(unit, token / KV_BLOCK_TOKENS),
                           unit->at)[token % KV_BLOCK_TOKENS];
}

/* Returns whether the row is known to be bad.  Reads only its segment's record. */
static inline bool kvs_unit_is_bad(const struct kvs_unit *unit, uint32_t token)
{
    const struct kvs_block *block = kvs_unit_block(unit, token / KV_BLOCK_TOKENS);

    return kvs_segment_has_bad(block, unit->at) &&
           kvs_segment_is_bad(unit->blocks->store, block, unit->at, token % KV_BLOCK_TOKENS);
}

/* Returns whether the row is in memory and not known to be bad. */
static inline bool kvs_unit_is_readable(const struct kvs_unit *unit, uint32_t token)
{
    return kvs_unit_is_here(unit, token / KV_BLOCK_TOKENS) && !kvs_unit_is_bad(unit, token);
}

/* Returns whether the unit's rows of a block have codes, in memory. */
static inline bool kvs_unit_has_codes(const struct kvs_unit *unit, uint32_t block)
{
    const struct kvs_column *column = &kvs_unit_codes(unit, block)->column;

    return column->bytes != NULL && !kvs_column_is_away(column);
}

/* Writes a bad row and its CRC again; it is then good in every unit that has it, or bad as before
 * if its segment counts as bad as a whole and there is no memory to say otherwise. */
void kvs_unit_mend(struct kvs_unit *unit, uint32_t token, const void *row, uint32_t crc);

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

/* Pins the blocks that have the rows [begin, begin + count) and writes them to `pins`.  Returns
 * their number, at most count / KV_BLOCK_TOKENS + 2. */
unsigned kvs_unit_pin(const struct kvs_unit *unit,
                      uint32_t begin,
                      uint32_t count,
                      struct kvs_block **pins);

/* Returns the block after the last of the chapter that begins at block `at`, among the
 * unit's first `end` segments; `at` itself if that is not `in_chapter`.  A unit may have only
 * the first segments of a chapter. */
static inline uint32_t
kvs_unit_chapter_end(const struct kvs_unit *unit, uint32_t at, uint32_t end)
{
    const uint32_t codebook = kvs_unit_codes(unit, at)->codebook;

    if (end > kvs_unit_n_segments(unit))
        end = kvs_unit_n_segments(unit);
    for (; at < end; at++) {
        const struct kvs_codes *codes = kvs_unit_codes(unit, at);

        if (!codes->in_chapter || codes->codebook != codebook)
            break;
    }
    return at;
}

#endif
