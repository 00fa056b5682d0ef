/* Units: reservations, commits, forks, and access to rows across segments.
 *
 *     0 ------------ committed ------------ reserved
 *        can be read              being received
 *
 * A fork shares all segments, the partial last one too; the first of the two units that writes
 * to it makes a copy. */
#include "kvserver/store/rows/unit.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum {
    ARRAY_BYTES_MIN = 512,
    NO_CLASS = UINT8_MAX, /* the unit was cleared */
};

static kv_status_t
array_grow(struct kvs_unit *unit, struct kvs_segment_store *store, uint32_t n_segments)
{
    if (n_segments <= unit->capacity)
        return KV_OK;
    /* Doubling keeps the number of copies logarithmic, and the array in an arena class. */
    size_t bytes = ARRAY_BYTES_MIN;
    while (bytes < n_segments * sizeof(*unit->segments))
        bytes *= 2;
    int class_id = kvs_arena_class_rounded(store->arena, bytes);
    if (class_id < 0)
        return KV_NO_MEMORY;
    struct kvs_segment **segments = kvs_arena_alloc(store->arena, class_id);
    if (segments == NULL)
        return KV_NO_MEMORY;
    if (unit->segments != NULL) {
        memcpy(segments, unit->segments, unit->n_segments * sizeof(*segments));
        kvs_arena_free(store->arena, unit->array_class, unit->segments);
    }
    unit->segments = segments;
    unit->capacity = (uint32_t)(bytes / sizeof(*segments));
    unit->array_class = (uint8_t)class_id;
    return KV_OK;
}

kv_status_t kvs_unit_init(struct kvs_unit *unit,
                          struct kvs_segment_store *store,
                          uint32_t layer,
                          uint32_t kv_head,
                          uint32_t row_bytes)
{
    int row_class = kvs_arena_class_hold(store->arena, (size_t)row_bytes * KV_BLOCK_TOKENS);

    if (row_class < 0)
        return KV_TOO_LARGE;
    *unit = (struct kvs_unit){
        .layer = (uint16_t)layer,
        .kv_head = (uint16_t)kv_head,
        .row_bytes = row_bytes,
        .row_class = (uint8_t)row_class,
        .recall = NAN, /* not measured yet */
    };
    return KV_OK;
}

static uint32_t segments_for(uint32_t tokens)
{
    return (tokens + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
}

static void
segments_cut(struct kvs_unit *unit, struct kvs_segment_store *store, uint32_t n_segments)
{
    while (unit->n_segments > n_segments)
        kvs_segment_unref(store, unit->segments[--unit->n_segments]);
}

void kvs_unit_clear(struct kvs_unit *unit, struct kvs_segment_store *store)
{
    segments_cut(unit, store, 0);
    kvs_arena_free(store->arena, unit->array_class, unit->segments);
    unit->segments = NULL;
    unit->capacity = unit->committed = unit->reserved = 0;
    unit->n_transfers = unit->n_coming = 0;
    unit->broken = false;
    if (unit->row_class != NO_CLASS)
        kvs_arena_class_release(store->arena, unit->row_class);
    unit->row_class = NO_CLASS;
}

/* ---- reservations, forks ----------------------------------------------------------------- */

/* Makes sure that the unit may write to its partial last segment: copies a segment that is
 * shared or still visible to a transfer.  Fails with KV_BUSY while rows are being received into
 * it, because they would arrive in the old one. */
static kv_status_t tail_own(struct kvs_unit *unit, struct kvs_segment_store *store)
{
    /* `filled` rows stay.  A pinned segment may be written after them only if no row there was
     * ever written: a transfer out of it may still read those that were. */
    uint32_t filled = unit->reserved % KV_BLOCK_TOKENS;

    if (filled == 0)
        return KV_OK;
    uint32_t at = unit->reserved / KV_BLOCK_TOKENS;
    struct kvs_segment *old = unit->segments[at];
    if (old->refs == 1 && (old->pins == 0 || filled >= old->n_written)) {
        kvs_segment_forget_rows(store, old, filled); /* rows after these will be overwritten */
        return KV_OK;
    }
    if (unit->committed < unit->reserved)
        return KV_BUSY;
    kv_status_t status = kvs_segments_add(unit, store, at, 1);
    if (status != KV_OK) {
        unit->segments[at] = old;
        return status;
    }
    struct kvs_segment *copy = unit->segments[at];
    memcpy(copy->rows, old->rows, (size_t)filled * unit->row_bytes);
    memcpy(copy->crcs, old->crcs, filled * sizeof(*copy->crcs));
    /* Codes are not copied: they are made again from the keys when a query needs them.  Marks
     * of bad rows are, because the copy has the same damage. */
    copy->n_written = (uint8_t)filled;
    for (uint32_t row = 0; row < filled; row++)
        if (kvs_segment_is_bad(old, row)) {
            copy->bad[row / 64] |= (uint64_t)1 << row % 64;
            store->health.rows_bad++;
        }
    kvs_segment_unref(store, old);
    return KV_OK;
}

kv_status_t
kvs_unit_reserve(struct kvs_unit *unit, struct kvs_segment_store *store, uint32_t end)
{
    uint32_t n_segments = segments_for(end);
    kv_status_t status = array_grow(unit, store, n_segments);

    assert(end > unit->reserved);
    if (status == KV_OK)
        status = tail_own(unit, store);
    if (status == KV_OK && n_segments > unit->n_segments)
        status = kvs_segments_add(unit, store, unit->n_segments, n_segments - unit->n_segments);
    if (status != KV_OK)
        return status;
    /* n_written only rises: rows that were written and then given up may still be read by a
     * transfer (tail_own()). */
    unit->n_segments = n_segments;
    for (uint32_t i = unit->reserved / KV_BLOCK_TOKENS; i < n_segments; i++) {
        uint32_t filled = end - i * KV_BLOCK_TOKENS;
        if (filled > KV_BLOCK_TOKENS)
            filled = KV_BLOCK_TOKENS;
        if (unit->segments[i]->n_written < filled)
            unit->segments[i]->n_written = (uint8_t)filled;
    }
    unit->reserved = end;
    return KV_OK;
}

void kvs_unit_unreserve(struct kvs_unit *unit, struct kvs_segment_store *store, uint32_t begin)
{
    assert(begin >= unit->committed);
    if (begin < unit->reserved) {
        unit->reserved = begin;
        segments_cut(unit, store, segments_for(begin));
    }
}

void kvs_unit_truncate(struct kvs_unit *unit, struct kvs_segment_store *store, uint32_t tokens)
{
    if (tokens < unit->committed)
        unit->committed = tokens;
    kvs_unit_unreserve(unit, store, unit->committed);
    unit->n_transfers = unit->n_coming = 0;
    unit->broken = false;
}

kv_status_t kvs_unit_fork(const struct kvs_unit *unit,
                          struct kvs_unit *child,
                          struct kvs_segment_store *store,
                          uint32_t tokens)
{
    uint32_t n_segments = segments_for(tokens);
    kv_status_t status = array_grow(child, store, n_segments);

    assert(tokens <= unit->committed && child->n_segments == 0);
    if (status != KV_OK)
        return status;
    /* No row is copied.  The last segment may have rows after `tokens`, which are the parent's;
     * the child copies it when it first writes (tail_own()). */
    for (uint32_t i = 0; i < n_segments; i++) {
        child->segments[i] = unit->segments[i];
        child->segments[i]->refs++;
    }
    child->n_segments = n_segments;
    child->committed = child->reserved = tokens;
    return KV_OK;
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

bool kvs_unit_can_pin(const struct kvs_unit *unit, uint32_t begin, uint32_t count)
{
    for (uint32_t i = begin / KV_BLOCK_TOKENS; i <= (begin + count - 1) / KV_BLOCK_TOKENS; i++)
        if (unit->segments[i]->pins == UINT16_MAX)
            return false;
    return true;
}

unsigned kvs_unit_pin(const struct kvs_unit *unit,
                      uint32_t begin,
                      uint32_t count,
                      struct kvs_segment **pins)
{
    unsigned n_pins = 0;

    for (uint32_t i = begin / KV_BLOCK_TOKENS; i <= (begin + count - 1) / KV_BLOCK_TOKENS;
         i++) {
        assert(unit->segments[i]->pins < UINT16_MAX);
        unit->segments[i]->pins++;
        pins[n_pins++] = unit->segments[i];
    }
    return n_pins;
}

void kvs_unit_mend(struct kvs_unit *unit,
                   struct kvs_segment_store *store,
                   uint32_t token,
                   const void *row,
                   uint32_t crc)
{
    struct kvs_segment *segment = unit->segments[token / KV_BLOCK_TOKENS];
    const uint32_t at = token % KV_BLOCK_TOKENS;

    assert(kvs_segment_is_bad(segment, at));
    kvs_unit_write(unit, token, 1, row);
    kvs_unit_write_crcs(unit, token, 1, &crc);
    segment->bad[at / 64] &= ~((uint64_t)1 << at % 64);
    store->health.rows_bad--;
    store->health.mended[KVS_KIND_ROWS]++;
}

void kvs_unit_check(const struct kvs_unit *unit, const struct kvs_segment_store *store)
{
    assert(unit->committed <= unit->reserved);
    assert(unit->n_segments == segments_for(unit->reserved));
    assert(unit->n_segments <= unit->capacity);
    assert(unit->capacity == 0
               ? unit->segments == NULL
               : kvs_arena_is_in_use(store->arena, unit->array_class, unit->segments));
    assert(!unit->broken || unit->n_transfers > 0);
    for (uint32_t i = 0; i < unit->n_segments; i++) {
        const struct kvs_segment *segment = unit->segments[i];
        const uint32_t left = unit->reserved - i * KV_BLOCK_TOKENS;

        kvs_segment_check(store, segment);
        assert(segment->refs > 0 && segment->row_class == unit->row_class);
        assert(segment->n_written >= (left < KV_BLOCK_TOKENS ? left : KV_BLOCK_TOKENS));
    }
}
