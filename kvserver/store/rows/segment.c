#include "kvserver/store/rows/segment.h"

#include "kvserver/store/rows/unit.h"

#include <assert.h>

bool kv_heap_init(struct kv_heap *heap, struct kv_arena *arena)
{
    heap->arena = arena;
    heap->free_records = NULL;
    heap->n_segments = 0;
    heap->health = (struct kv_health){0};
    heap->crc_class = kv_arena_class_rounded(arena, KV_BLOCK_TOKENS * sizeof(uint32_t));
    heap->record_class = kv_arena_class_rounded(arena, 16 << 10);
    heap->release_codes = NULL;
    heap->release_arg = NULL;
    return heap->crc_class >= 0 && heap->record_class >= 0;
}

static struct kv_segment *record_get(struct kv_heap *heap)
{
    if (heap->free_records == NULL) {
        /* Records are small and many; what was carved for them once stays theirs. */
        struct kv_segment *records = kv_arena_alloc(heap->arena, heap->record_class);
        if (records == NULL)
            return NULL;
        for (size_t i = (16 << 10) / sizeof(*records); i-- > 0;) {
            records[i].rows = (uint8_t *)heap->free_records;
            heap->free_records = &records[i];
        }
    }
    struct kv_segment *record = heap->free_records;
    heap->free_records = (struct kv_segment *)(void *)record->rows;
    return record;
}

static void record_put(struct kv_heap *heap, struct kv_segment *record)
{
    record->rows = (uint8_t *)heap->free_records;
    heap->free_records = record;
}

void kv_segment_forget_rows(struct kv_heap *heap, struct kv_segment *segment, uint32_t filled)
{
    for (uint32_t i = 0; i < KV_BLOCK_TOKENS / 64; i++) {
        const uint32_t n = filled <= i * 64 ? 0 : filled - i * 64;
        const uint64_t kept = n >= 64 ? UINT64_MAX : ((uint64_t)1 << n) - 1;

        heap->health.rows_bad -= (uint64_t)__builtin_popcountll(segment->bad[i] & ~kept);
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

static void segment_free(struct kv_heap *heap, struct kv_segment *segment)
{
    assert(segment->refs == 0 && segment->pins == 0);
    kv_segment_forget_rows(heap, segment, 0);
    kv_arena_free(heap->arena, segment->row_class, segment->rows);
    kv_arena_free(heap->arena, heap->crc_class, segment->crcs);
    if (segment->codes != NULL)
        heap->release_codes(heap->release_arg, segment);
    record_put(heap, segment);
    heap->n_segments--;
}

void kv_segment_unref(struct kv_heap *heap, struct kv_segment *segment)
{
    assert(segment->refs > 0);
    if (--segment->refs == 0 && segment->pins == 0)
        segment_free(heap, segment);
}

void kv_segment_unpin(struct kv_heap *heap, struct kv_segment *segment)
{
    assert(segment->pins > 0);
    if (--segment->pins == 0 && segment->refs == 0)
        segment_free(heap, segment);
}

kv_status_t
kv_segments_add(struct kv_unit *unit, struct kv_heap *heap, uint32_t at, uint32_t count)
{
    const size_t stride = kv_arena_class_bytes(heap->arena, unit->row_class);
    uint32_t n_done = 0;

    while (n_done < count) {
        uint32_t run;
        uint8_t *rows = kv_arena_alloc_run(heap->arena, unit->row_class, count - n_done, &run);
        if (rows == NULL)
            goto err_drop;
        for (uint32_t i = 0; i < run; i++, rows += stride) {
            struct kv_segment *segment = record_get(heap);
            uint32_t *crcs = kv_arena_alloc(heap->arena, heap->crc_class);

            if (segment == NULL || crcs == NULL) {
                if (segment != NULL)
                    record_put(heap, segment);
                kv_arena_free(heap->arena, heap->crc_class, crcs);
                for (; i < run; i++, rows += stride)
                    kv_arena_free(heap->arena, unit->row_class, rows);
                goto err_drop;
            }
            *segment = (struct kv_segment){
                .rows = rows, .crcs = crcs, .refs = 1, .row_class = unit->row_class};
            heap->n_segments++;
            unit->segments[at + n_done++] = segment;
        }
    }
    return KV_OK;

err_drop:
    while (n_done-- > 0)
        kv_segment_unref(heap, unit->segments[at + n_done]);
    return KV_NO_MEMORY;
}
