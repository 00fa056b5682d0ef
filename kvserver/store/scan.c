#include "scan.h"

#include <assert.h>

enum {
    SLICE_US = 50,
    SLICE_SEGMENTS = 512, /* where the clock stands still */
};

uint32_t kv_ranges_count(const struct kv_wire_range *ranges, uint32_t n_ranges)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < n_ranges; i++)
        n += ranges[i].end - ranges[i].begin;
    return n;
}

void kv_scan_begin(struct kv_scan *scan)
{
    scan->range = scan->done = 0;
    scan->token = scan->ranges[0].begin;
    scan->n_coded = scan->n_exact = scan->n_chapters = 0;
    scan->serial = 0;
}

/* Rows of the segment, of the first n_rows, that have codes; makes them where an open codebook
 * says so. */
static uint32_t
coded_rows(const struct kv_scan *scan, struct kv_heap *heap, uint32_t at, uint32_t n_rows)
{
    struct kv_segment *segment = scan->unit->segments[at];
    const struct kv_segment *from = segment;

    if (segment->codes != NULL && segment->n_coded >= n_rows)
        return n_rows;
    if (segment->training)
        return segment->codes != NULL ? segment->n_coded : 0;
    if (segment->codes == NULL && at > 0)
        from = scan->unit->segments[at - 1];
    if (from->codes != NULL && kv_codebook_at(&heap->codebooks, from->codebook)->open)
        /* Where memory is short, the rows are scored by their keys. */
        (void)kv_segment_encode(heap, segment, from->codebook, scan->type,
                                scan->unit->row_bytes, n_rows);
    return segment->codes == NULL ? 0 : segment->n_coded < n_rows ? segment->n_coded : n_rows;
}

static void score_coded(struct kv_scan *scan,
                        struct kv_heap *heap,
                        struct kv_segment *segment,
                        uint32_t begin,
                        uint32_t n)
{
    const struct kv_codebook *book = kv_codebook_at(&heap->codebooks, segment->codebook);
    const size_t table_size = kv_pq_table_size(&book->shape);

    if (book->serial != scan->serial) {
        for (uint32_t q = 0; q < scan->n_queries; q++)
            kv_pq_table(&book->shape, book->centroids, scan->queries + (size_t)q * scan->d,
                        scan->tables + q * table_size);
        scan->serial = book->serial;
        scan->n_chapters++;
    }
    kv_pq_score(&book->shape, scan->tables, scan->n_queries, segment->codes + begin, n,
                scan->scores + scan->done, scan->n);
    scan->n_coded += n;
    scan->done += n;
}

static void
score_exact(struct kv_scan *scan, struct kv_segment *segment, uint32_t begin, uint32_t n)
{
    const uint32_t row_bytes = scan->unit->row_bytes;

    kv_keys_score(scan->type, segment->rows + (size_t)begin * row_bytes, row_bytes, n, scan->d,
                  scan->queries, scan->n_queries, scan->scores + scan->done, scan->n);
    scan->n_exact += n;
    scan->done += n;
}

bool kv_scan_slice(struct kv_scan *scan, struct kv_heap *heap, const struct kv_clock *clock)
{
    const uint64_t end_us = kv_clock_now(clock) + SLICE_US;

    for (uint32_t i = 0; scan->done < scan->n; i++) {
        const struct kv_wire_range *range = &scan->ranges[scan->range];
        const uint32_t at = scan->token / KV_BLOCK_TOKENS;
        struct kv_segment *segment = scan->unit->segments[at];
        uint32_t begin = scan->token % KV_BLOCK_TOKENS;
        uint32_t end = range->end - at * KV_BLOCK_TOKENS;

        if (i == SLICE_SEGMENTS || (i > 0 && kv_clock_now(clock) >= end_us))
            return false;
        if (end > KV_BLOCK_TOKENS)
            end = KV_BLOCK_TOKENS;
        uint32_t n_coded = scan->by_code ? coded_rows(scan, heap, at, end) : 0;
        if (begin < n_coded) {
            score_coded(scan, heap, segment, begin, n_coded - begin);
            begin = n_coded;
        }
        if (begin < end)
            score_exact(scan, segment, begin, end - begin);
        scan->token = at * KV_BLOCK_TOKENS + end;
        if (scan->token == range->end && scan->range + 1 < scan->n_ranges)
            scan->token = scan->ranges[++scan->range].begin;
    }
    return true;
}
