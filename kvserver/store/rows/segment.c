/* Segments: their records, and when their memory is freed.  A segment lives while units refer
 * to it or transfers have it pinned; whichever lets go of it last frees it. */
#include "kvserver/store/rows/segment.h"

#include "kvserver/store/rows/unit.h"

#include <assert.h>

enum {
    RECORDS_BYTES = 16 << 10, /* divided at once */
    RECORDS = RECORDS_BYTES / sizeof(struct kvs_segment),
};

bool kvs_segment_store_init(struct kvs_segment_store *store, struct kvs_arena *arena)
{
    store->arena = arena;
    store->free_records = NULL;
    store->n_segments = 0;
    store->health = (struct kvs_health){0};
    store->crc_class = kvs_arena_class_rounded(arena, KV_BLOCK_TOKENS * sizeof(uint32_t));
    store->record_class = kvs_arena_class_rounded(arena, RECORDS_BYTES);
    store->release_codes = NULL;
    store->release_arg = NULL;
    return store->crc_class >= 0 && store->record_class >= 0;
}

static struct kvs_segment *record_get(struct kvs_segment_store *store)
{
    if (store->free_records == NULL) {
        /* Records are small and numerous; a page that was divided into records stays so. */
        struct kvs_segment *records = kvs_arena_alloc(store->arena, store->record_class);
        if (records == NULL)
            return NULL;
        for (size_t i = RECORDS; i-- > 0;) {
            records[i].rows = (uint8_t *)store->free_records;
            store->free_records = &records[i];
        }
    }
    struct kvs_segment *record = store->free_records;
    store->free_records = (struct kvs_segment *)(void *)record->rows;
    return record;
}

/* A free record's `rows` links the list of free ones. */
static void record_put(struct kvs_segment_store *store, struct kvs_segment *record)
{
    record->rows = (uint8_t *)store->free_records;
    store->free_records = record;
}

/* Rows from `filled` on will be overwritten, so what is known of them no longer holds.  Without
 * all its codes the segment leaves its chapter, whose cells list whole segments. */
void kvs_segment_forget_rows(struct kvs_segment_store *store,
                             struct kvs_segment *segment,
                             uint32_t filled)
{
    for (uint32_t i = 0; i < KV_BLOCK_TOKENS / 64; i++) {
        const uint32_t n = filled <= i * 64 ? 0 : filled - i * 64;
        const uint64_t kept = n >= 64 ? UINT64_MAX : ((uint64_t)1 << n) - 1;

        store->health.rows_bad -= (uint64_t)__builtin_popcountll(segment->bad[i] & ~kept);
        segment->bad[i] &= kept;
    }
    if (segment->n_checked > filled)
        segment->n_checked = (uint8_t)filled;
    if (segment->n_coded > filled) {
        segment->n_coded = (uint8_t)filled;
        segment->in_chapter = false;
    }
    if (segment->n_lost > filled) {
        segment->n_lost = (uint8_t)filled;
        segment->lost_chapter = false;
    }
}

static void segment_free(struct kvs_segment_store *store, struct kvs_segment *segment)
{
    assert(segment->refs == 0 && segment->pins == 0);
    kvs_segment_forget_rows(store, segment, 0);
    kvs_arena_free(store->arena, segment->row_class, segment->rows);
    kvs_arena_free(store->arena, store->crc_class, segment->crcs);
    if (segment->codes != NULL)
        store->release_codes(store->release_arg, segment);
    record_put(store, segment);
    store->n_segments--;
}

void kvs_segment_unref(struct kvs_segment_store *store, struct kvs_segment *segment)
{
    assert(segment->refs > 0);
    if (--segment->refs == 0 && segment->pins == 0)
        segment_free(store, segment);
}

void kvs_segment_unpin(struct kvs_segment_store *store, struct kvs_segment *segment)
{
    assert(segment->pins > 0);
    if (--segment->pins == 0 && segment->refs == 0)
        segment_free(store, segment);
}

kv_status_t kvs_segments_add(struct kvs_unit *unit,
                             struct kvs_segment_store *store,
                             uint32_t at,
                             uint32_t count)
{
    const size_t stride = kvs_arena_class_bytes(store->arena, unit->row_class);
    uint32_t n_done = 0;

    while (n_done < count) {
        /* Consecutive segments lie next to each other where the arena has room for a run, so
         * that long transfers have few pieces (kvs_unit_pieces()). */
        uint32_t run;
        uint8_t *rows =
            kvs_arena_alloc_run(store->arena, unit->row_class, count - n_done, &run);
        if (rows == NULL)
            goto err_drop;
        for (uint32_t i = 0; i < run; i++, rows += stride) {
            struct kvs_segment *segment = record_get(store);
            uint32_t *crcs = kvs_arena_alloc(store->arena, store->crc_class);

            if (segment == NULL || crcs == NULL) {
                if (segment != NULL)
                    record_put(store, segment);
                kvs_arena_free(store->arena, store->crc_class, crcs);
                for (; i < run; i++, rows += stride)
                    kvs_arena_free(store->arena, unit->row_class, rows);
                goto err_drop;
            }
            *segment = (struct kvs_segment){
                .rows = rows, .crcs = crcs, .refs = 1, .row_class = unit->row_class};
            store->n_segments++;
            unit->segments[at + n_done++] = segment;
        }
    }
    return KV_OK;

err_drop:
    while (n_done-- > 0)
        kvs_segment_unref(store, unit->segments[at + n_done]);
    return KV_NO_MEMORY;
}

/* Returns the number of rows up to and with the last bad one. */
static uint32_t last_bad(const struct kvs_segment *segment)
{
    for (uint32_t row = KV_BLOCK_TOKENS; row > 0; row--)
        if (kvs_segment_is_bad(segment, row - 1))
            return row;
    return 0;
}

void kvs_segment_check(const struct kvs_segment_store *store, const struct kvs_segment *segment)
{
    assert(segment->refs > 0 || segment->pins > 0);
    assert(segment->pins > 0 || (!segment->training && !segment->begins_job));
    assert(kvs_arena_is_in_use(store->arena, segment->row_class, segment->rows));
    assert(kvs_arena_is_in_use(store->arena, store->crc_class, segment->crcs));
    assert(segment->n_written <= KV_BLOCK_TOKENS);
    assert(segment->n_coded <= segment->n_written && segment->n_lost <= segment->n_written);
    assert(segment->n_checked <= segment->n_written);
    assert(last_bad(segment) <= segment->n_written);
    /* Codes are lost as a whole: a segment has good ones or lost ones, never both. */
    assert(segment->n_coded == 0 || segment->n_lost == 0);
    assert(segment->codes != NULL || (segment->n_coded == 0 && segment->n_lost == 0));
    assert(!segment->in_chapter || segment->n_coded == KV_BLOCK_TOKENS);
    assert(!segment->lost_chapter || segment->n_lost == KV_BLOCK_TOKENS);
}

void kvs_segment_store_check(const struct kvs_segment_store *store)
{
    uint64_t n = store->n_segments;

    for (const struct kvs_segment *record = store->free_records; record != NULL;
         record = (const struct kvs_segment *)(const void *)record->rows) {
        const uintptr_t at = (uintptr_t)record - (uintptr_t)kvs_arena_base(store->arena);

        n++;
        assert(at < kvs_arena_bytes(store->arena));
        assert(n <= kvs_arena_bytes(store->arena) / sizeof(*record)); /* no cycle */
    }
    /* Every record is in use or in the list of free ones, and they are made RECORDS at a
     * time. */
    assert(n % RECORDS == 0);
}
