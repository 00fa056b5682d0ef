/* Units: reservations, commits, forks, and access to rows across segments.
 *
 *     0 ------------ committed ------------ reserved
 *        can be read              being received
 *
 * A fork shares all blocks, the partial last one too; whoever writes to it first gets a block of
 * its own over it, with a copy of the rows of the unit it writes. */
#include "kvserver/store/rows/unit.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum {
    ARRAY_BYTES_MIN = 512,
    NO_CLASS = UINT8_MAX, /* the unit was cleared */
};

/* ---- the blocks of a session -------------------------------------------------------------- */

void kvs_blocks_init(struct kvs_blocks *blocks,
                     struct kvs_segment_store *store,
                     struct kvs_unit *units,
                     uint32_t n_units)
{
    *blocks = (struct kvs_blocks){.store = store, .units = units, .n_units = n_units};
}

static void blocks_cut(struct kvs_blocks *blocks, uint32_t n)
{
    while (blocks->n > n)
        kvs_block_unref(blocks->store, blocks->list[--blocks->n]);
}

void kvs_blocks_clear(struct kvs_blocks *blocks)
{
    blocks_cut(blocks, 0);
    if (blocks->list != NULL)
        kvs_arena_free(blocks->store->arena, blocks->array_class, blocks->list);
    blocks->list = NULL;
    blocks->capacity = blocks->n_top = 0;
}

static kv_status_t array_grow(struct kvs_blocks *blocks, uint32_t n)
{
    struct kvs_arena *arena = blocks->store->arena;

    if (n <= blocks->capacity)
        return KV_OK;
    /* Doubling keeps the number of copies logarithmic, and the array in an arena class. */
    size_t bytes = ARRAY_BYTES_MIN;
    while (bytes < n * sizeof(struct kvs_block *))
        bytes *= 2;
    const int class_id = kvs_arena_class_rounded(arena, bytes);
    if (class_id < 0)
        return KV_NO_MEMORY;
    struct kvs_block **list = kvs_arena_alloc(arena, class_id);
    if (list == NULL)
        return KV_NO_MEMORY;
    if (blocks->list != NULL) {
        memcpy(list, blocks->list, blocks->n * sizeof(struct kvs_block *));
        kvs_arena_free(arena, blocks->array_class, blocks->list);
    }
    blocks->list = list;
    blocks->capacity = (uint32_t)(bytes / sizeof(struct kvs_block *));
    blocks->array_class = (uint8_t)class_id;
    return KV_OK;
}

/* No unit has rows in the last block any more: releases those that none has rows in, and counts
 * the units in the last one that is left. */
static void blocks_settle(struct kvs_blocks *blocks)
{
    uint32_t most = 0, n_top = 0;

    for (uint32_t i = 0; i < blocks->n_units; i++) {
        const uint32_t n = kvs_unit_n_segments(&blocks->units[i]);

        if (n > most) {
            most = n;
            n_top = 0;
        }
        n_top += n == most && n > 0;
    }
    blocks_cut(blocks, most);
    blocks->n_top = n_top;
}

/* Changes `reserved`; the session has the blocks up to it. */
static void unit_reach(struct kvs_unit *unit, uint32_t reserved)
{
    struct kvs_blocks *blocks = unit->blocks;
    const uint32_t before = kvs_unit_n_segments(unit), n = kvs_blocks_for(reserved);

    unit->reserved = reserved;
    if (before == n || blocks->n == 0)
        return;
    if (before == blocks->n)
        blocks->n_top--;
    if (n == blocks->n)
        blocks->n_top++;
    if (blocks->n_top == 0)
        blocks_settle(blocks);
}

kv_status_t kvs_blocks_fork_begin(struct kvs_blocks *child, uint32_t tokens)
{
    assert(child->n == 0);
    return array_grow(child, kvs_blocks_for(tokens));
}

bool kvs_blocks_fork_on(struct kvs_block *const *list,
                        struct kvs_blocks *child,
                        uint32_t tokens,
                        uint32_t most)
{
    const uint32_t n = kvs_blocks_for(tokens);

    /* No row is copied.  The last block may have rows after `tokens`, which are the parent's;
     * the child copies it when it first writes (tail_own()). */
    for (; most > 0 && child->n < n; most--, child->n++) {
        child->list[child->n] = list[child->n];
        child->list[child->n]->refs++;
    }
    if (child->n < n)
        return false;
    for (uint32_t i = 0; i < child->n_units; i++)
        child->units[i].committed = child->units[i].reserved = tokens;
    child->n_top = tokens > 0 ? child->n_units : 0;
    return true;
}

void kvs_blocks_check(const struct kvs_blocks *blocks)
{
    uint32_t most = 0, n_top = 0;

    for (uint32_t i = 0; i < blocks->n_units; i++)
        if (kvs_unit_n_segments(&blocks->units[i]) > most)
            most = kvs_unit_n_segments(&blocks->units[i]);
    for (uint32_t i = 0; i < blocks->n_units; i++)
        n_top += most > 0 && kvs_unit_n_segments(&blocks->units[i]) == most;
    assert(blocks->n == most && blocks->n_top == n_top && blocks->n <= blocks->capacity);
    assert(blocks->capacity == 0
               ? blocks->list == NULL
               : kvs_arena_is_in_use(blocks->store->arena, blocks->array_class, blocks->list));
    for (uint32_t i = 0; i < blocks->n; i++)
        assert(blocks->list[i]->n_segments == blocks->n_units);
}

/* ---- reservations ------------------------------------------------------------------------- */

kv_status_t kvs_unit_init(struct kvs_unit *unit,
                          struct kvs_blocks *blocks,
                          uint32_t at,
                          uint32_t layer,
                          uint32_t kv_head,
                          uint32_t row_bytes)
{
    const int row_class =
        kvs_arena_class_hold(blocks->store->arena, (size_t)row_bytes * KV_BLOCK_TOKENS);

    if (row_class < 0)
        return KV_TOO_LARGE;
    *unit = (struct kvs_unit){
        .blocks = blocks,
        .at = at,
        .layer = (uint16_t)layer,
        .kv_head = (uint16_t)kv_head,
        .row_bytes = row_bytes,
        .row_class = (uint8_t)row_class,
        .recall = NAN, /* not measured yet */
    };
    return KV_OK;
}

void kvs_unit_clear(struct kvs_unit *unit)
{
    kvs_unit_truncate(unit, 0);
    if (unit->row_class != NO_CLASS)
        kvs_arena_class_release(unit->blocks->store->arena, unit->row_class);
    unit->row_class = NO_CLASS;
}

/* Returns whether the unit's rows in a block may be overwritten from `filled` on: no other
 * session sees them, and of a block that is pinned, only rows that were never written: a transfer
 * out of it may still read those that were. */
static bool is_own(const struct kvs_unit *unit, uint32_t i, uint32_t filled)
{
    const struct kvs_block *block = unit->blocks->list[i];

    return block->refs == 1 && block->segments[unit->at].rows != 0 &&
           (block->pins == 0 || filled >= block->segments[unit->at].n_written);
}

/* Gives the unit a segment of its own in block i, which may be the one after the session's last.
 * The block owns the rows then, or nothing has changed. */
static bool segment_place(struct kvs_unit *unit, uint32_t i, uint8_t *rows)
{
    struct kvs_blocks *blocks = unit->blocks;
    struct kvs_block *before = i < blocks->n ? blocks->list[i] : NULL, *block = before;

    /* What others see, or a transfer, stays as it is: a block over it. */
    if (block == NULL || block->refs > 1 || block->segments[unit->at].rows != 0) {
        block = kvs_block_create(blocks->store, blocks->n_units, before);
        if (block == NULL)
            return false;
    }
    if (!kvs_segment_add(blocks->store, block, unit->at, rows)) {
        if (block != before) {
            block->under = NULL; /* the session has it still */
            kvs_block_unref(blocks->store, block);
        }
        return false;
    }
    blocks->list[i] = block;
    if (before == NULL)
        blocks->n = i + 1;
    if (block != before)
        kvs_block_settle(blocks->store, block);
    return true;
}

/* Gives the segments of blocks [begin, end) back that only this unit has; the others are freed
 * with their blocks. */
static void segments_release(struct kvs_unit *unit, uint32_t begin, uint32_t end)
{
    for (uint32_t i = begin; i < end; i++) {
        struct kvs_block *block = unit->blocks->list[i];

        if (block->refs == 1 && block->pins == 0 && block->segments[unit->at].rows != 0)
            kvs_segment_free(unit->blocks->store, block, unit->at);
    }
}

/* Gives the unit a segment of its own in each of blocks [begin, end).  Consecutive ones lie next
 * to each other where the arena has room for a run, so that long transfers have few pieces
 * (kvs_unit_pieces()). */
static kv_status_t segments_add(struct kvs_unit *unit, uint32_t begin, uint32_t end)
{
    struct kvs_blocks *blocks = unit->blocks;
    struct kvs_arena *arena = blocks->store->arena;
    const size_t stride = kvs_arena_class_bytes(arena, unit->row_class);
    const uint32_t n_before = blocks->n;
    uint32_t at = begin;

    while (at < end) {
        if (at < blocks->n && is_own(unit, at, 0)) { /* it was reserved once before */
            kvs_segment_forget_rows(blocks->store, blocks->list[at], unit->at, 0);
            at++;
            continue;
        }
        uint32_t run;
        uint8_t *rows = kvs_arena_alloc_run(arena, unit->row_class, end - at, &run);

        if (rows == NULL)
            goto err_release;
        for (uint32_t i = 0; i < run; i++, at++, rows += stride) {
            if (segment_place(unit, at, rows))
                continue;
            for (; i < run; i++, rows += stride)
                kvs_arena_free(arena, unit->row_class, rows);
            goto err_release;
        }
    }
    /* Where there are more blocks than before, this unit alone has rows in the last. */
    if (blocks->n > n_before)
        blocks->n_top = 0;
    return KV_OK;

err_release:
    segments_release(unit, begin, at);
    blocks_cut(blocks, n_before);
    return KV_NO_MEMORY;
}

/* Makes sure that the unit may write to its partial last segment: copies a segment that is
 * shared or still visible to a transfer.  Fails with KV_BUSY while rows are being received into
 * it, because they would arrive in the old one. */
static kv_status_t tail_own(struct kvs_unit *unit)
{
    struct kvs_segment_store *store = unit->blocks->store;
    const uint32_t filled = unit->reserved % KV_BLOCK_TOKENS; /* rows that stay */
    const uint32_t i = unit->reserved / KV_BLOCK_TOKENS;

    if (filled == 0)
        return KV_OK;
    if (is_own(unit, i, filled)) { /* rows after these will be overwritten */
        if (!kvs_segment_list_bad(store, unit->blocks->list[i], unit->at))
            return KV_NO_MEMORY;
        kvs_segment_forget_rows(store, unit->blocks->list[i], unit->at, filled);
        return KV_OK;
    }
    if (unit->committed < unit->reserved)
        return KV_BUSY;
    struct kvs_block *old = kvs_unit_block(unit, i);
    struct kvs_bad_rows *bad;
    if (!kvs_bad_rows_copy(store, old, unit->at, filled, &bad))
        return KV_NO_MEMORY;
    uint8_t *rows = kvs_arena_alloc(store->arena, unit->row_class);
    old->pins++; /* it may be freed once nothing of it is visible through the copy */
    if (rows == NULL || !segment_place(unit, i, rows)) {
        kvs_arena_free(store->arena, unit->row_class, rows);
        kvs_bad_rows_free(store, bad);
        kvs_block_unpin(store, old);
        return KV_NO_MEMORY;
    }
    struct kvs_block *copy = unit->blocks->list[i];
    memcpy(rows, kvs_block_rows(old, unit->at), (size_t)filled * unit->row_bytes);
    memcpy(kvs_block_crcs(copy, unit->at), kvs_block_crcs(old, unit->at),
           filled * sizeof(uint32_t));
    /* Codes are not copied: they are made again from the keys when a query needs them.  Marks
     * of bad rows are, because the copy has the same damage. */
    copy->segments[unit->at].n_written = filled;
    kvs_segment_give_bad(store, copy, unit->at, bad);
    kvs_block_unpin(store, old);
    return KV_OK;
}

kv_status_t kvs_unit_reserve(struct kvs_unit *unit, uint32_t end)
{
    const uint32_t n = kvs_blocks_for(end), n_before = kvs_unit_n_segments(unit);
    kv_status_t status = array_grow(unit->blocks, n);

    assert(end > unit->reserved);
    if (status == KV_OK)
        status = tail_own(unit);
    if (status == KV_OK)
        status = segments_add(unit, n_before, n);
    if (status != KV_OK)
        return status;
    /* n_written only rises: rows that were written and then given up may still be read by a
     * transfer (is_own()). */
    for (uint32_t i = unit->reserved / KV_BLOCK_TOKENS; i < n; i++) {
        struct kvs_segment *segment = &unit->blocks->list[i]->segments[unit->at];
        uint32_t filled = end - i * KV_BLOCK_TOKENS;

        if (filled > KV_BLOCK_TOKENS)
            filled = KV_BLOCK_TOKENS;
        if (segment->n_written < filled)
            segment->n_written = filled;
    }
    unit_reach(unit, end);
    return KV_OK;
}

void kvs_unit_unreserve(struct kvs_unit *unit, uint32_t begin)
{
    assert(begin >= unit->committed);
    if (begin >= unit->reserved)
        return;
    segments_release(unit, kvs_blocks_for(begin), kvs_unit_n_segments(unit));
    unit_reach(unit, begin);
}

void kvs_unit_truncate(struct kvs_unit *unit, uint32_t tokens)
{
    if (tokens < unit->committed)
        unit->committed = tokens;
    kvs_unit_unreserve(unit, unit->committed);
    unit->n_transfers = unit->n_coming = 0;
    unit->broken = false;
}

/* ---- access to rows ---------------------------------------------------------------------- */

/* Returns the number of rows of [begin, end) in the segment of `begin`. */
static uint32_t in_segment(uint32_t begin, uint32_t end)
{
    uint32_t left = KV_BLOCK_TOKENS - begin % KV_BLOCK_TOKENS;

    return end - begin < left ? end - begin : left;
}

unsigned kvs_unit_pieces(const struct kvs_unit *unit,
                         uint32_t begin,
                         uint32_t count,
                         struct kv_iov *iov,
                         unsigned n_iov,
                         unsigned max)
{
    uint32_t end = begin + count, step;

    for (; begin < end; begin += step) {
        step = in_segment(begin, end);
        uint8_t *rows = kvs_unit_row(unit, begin);
        size_t bytes = (size_t)step * unit->row_bytes;

        /* Segments of one run of the arena are neighbors: one piece serves them. */
        if (n_iov > 0 && (uint8_t *)iov[n_iov - 1].base + iov[n_iov - 1].bytes == rows) {
            iov[n_iov - 1].bytes += bytes;
        } else {
            if (n_iov == max)
                return max + 1;
            iov[n_iov++] = (struct kv_iov){rows, bytes};
        }
    }
    return n_iov;
}

void kvs_unit_write(struct kvs_unit *unit, uint32_t begin, uint32_t count, const void *rows)
{
    const uint8_t *from = rows;
    uint32_t end = begin + count, step;

    for (; begin < end; begin += step) {
        step = in_segment(begin, end);
        memcpy(kvs_unit_row(unit, begin), from, (size_t)step * unit->row_bytes);
        from += (size_t)step * unit->row_bytes;
    }
}

void kvs_unit_write_crcs(struct kvs_unit *unit,
                         uint32_t begin,
                         uint32_t count,
                         const uint32_t *crcs)
{
    uint32_t end = begin + count, step;

    for (; begin < end; begin += step, crcs += step) {
        step = in_segment(begin, end);
        memcpy(kvs_unit_crc(unit, begin), crcs, step * sizeof(*crcs));
    }
}

void kvs_unit_read_crcs(const struct kvs_unit *unit,
                        uint32_t begin,
                        uint32_t count,
                        uint32_t *ret_crcs)
{
    uint32_t end = begin + count, step;

    for (; begin < end; begin += step, ret_crcs += step) {
        step = in_segment(begin, end);
        memcpy(ret_crcs, kvs_unit_crc(unit, begin), step * sizeof(*ret_crcs));
    }
}

unsigned kvs_unit_pin(const struct kvs_unit *unit,
                      uint32_t begin,
                      uint32_t count,
                      struct kvs_block **pins)
{
    unsigned n_pins = 0;

    for (uint32_t i = begin / KV_BLOCK_TOKENS; i <= (begin + count - 1) / KV_BLOCK_TOKENS;
         i++) {
        struct kvs_block *block = kvs_unit_block(unit, i);

        assert(block->pins < UINT32_MAX);
        block->pins++;
        pins[n_pins++] = block;
    }
    return n_pins;
}

void kvs_unit_mend(struct kvs_unit *unit, uint32_t token, const void *row, uint32_t crc)
{
    struct kvs_segment_store *store = unit->blocks->store;

    kvs_unit_write(unit, token, 1, row);
    kvs_unit_write_crcs(unit, token, 1, &crc);
    kvs_segment_unmark_bad(store, kvs_unit_block(unit, token / KV_BLOCK_TOKENS), unit->at,
                           token % KV_BLOCK_TOKENS);
    store->health.mended[KVS_KIND_ROWS] += !kvs_unit_is_bad(unit, token);
}

void kvs_unit_check_from(const struct kvs_unit *unit, uint32_t token)
{
    const struct kvs_segment_store *store = unit->blocks->store;

    assert(unit->committed <= unit->reserved);
    assert(kvs_unit_n_segments(unit) <= unit->blocks->n);
    assert(&unit->blocks->units[unit->at] == unit);
    assert(!unit->broken || unit->n_transfers > 0);
    for (uint32_t i = token / KV_BLOCK_TOKENS; i < kvs_unit_n_segments(unit); i++) {
        const struct kvs_block *block = kvs_unit_block(unit, i);
        const uint32_t left = unit->reserved - i * KV_BLOCK_TOKENS;

        assert(unit->blocks->list[i]->refs > 0 && block->segments[unit->at].rows != 0);
        assert(kvs_segment_is_away(&block->segments[unit->at]) ||
               kvs_arena_class_of(store->arena, kvs_block_rows(block, unit->at)) ==
                   unit->row_class);
        assert(block->segments[unit->at].n_written >=
               (left < KV_BLOCK_TOKENS ? left : KV_BLOCK_TOKENS));
    }
}

void kvs_unit_check(const struct kvs_unit *unit)
{
    kvs_unit_check_from(unit, 0);
}
