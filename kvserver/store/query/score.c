#include "kvserver/store/query/score.h"

#include "kernels/select.h"
#include "kvserver/store/index/encode.h"
#include "kvserver/store/rows/verify.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum {
    SLICE_US = 50,
    SLICE_SEGMENTS = 512, /* where the clock stands still */
    RUN_SEGMENTS = 32,    /* scored at once: 128K scores of 32 vectors are some 50 us */
    CUT_ROWS = 2048,      /* fewer are counted faster than 4,096 lists are searched */
};

uint32_t kv_ranges_count(const struct kv_wire_range *ranges, uint32_t n_ranges)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < n_ranges; i++)
        n += ranges[i].end - ranges[i].begin;
    return n;
}

/* ---- parts ------------------------------------------------------------------------------- */

static void add_rows(struct kv_scan *scan, uint32_t begin, uint32_t end)
{
    struct kv_scan_part *last = scan->n_parts > 0 ? &scan->parts[scan->n_parts - 1] : NULL;

    if (begin == end)
        return;
    if (last == NULL || last->codebook != KV_SCAN_ROWS || last->token_end != begin) {
        last = &scan->parts[scan->n_parts++];
        *last = (struct kv_scan_part){begin, begin, scan->n_items, 0, KV_SCAN_ROWS};
    }
    last->token_end = end;
    last->n_items += end - begin;
    scan->n_items += end - begin;
}

/* Where the cells of the codebook that the segment belongs to end in this unit, which may have
 * only the first of the chapter's segments, or in `most`, whichever is first; `token` itself:
 * there are no cells.  Segments behind `most` are not looked at: that would be a chapter's
 * length for each range in it. */
static uint32_t cells_end(const struct kv_scan *scan,
                          const struct kv_codebooks *books,
                          uint32_t token,
                          uint32_t most)
{
    struct kv_segment *const *segments = scan->unit->segments;
    const uint32_t at = token / KV_BLOCK_TOKENS;

    if (!segments[at]->in_chapter)
        return token;
    const struct kv_codebook *book = kv_codebook_at(books, segments[at]->codebook);
    if (book->is_broken || book->cells == NULL || book->n_cells_lost > 0)
        return token;
    const uint32_t celled_end = book->block_begin + book->n_celled / KV_BLOCK_TOKENS;
    const uint32_t most_end = (most + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;

    assert(at >= book->block_begin);
    const uint32_t end =
        kv_unit_chapter_end(scan->unit, at, celled_end < most_end ? celled_end : most_end);
    if (end <= at)
        return token;
    return end * KV_BLOCK_TOKENS < most ? end * KV_BLOCK_TOKENS : most;
}

static void add_range(struct kv_scan *scan,
                      const struct kv_codebooks *books,
                      const struct kv_wire_range *range,
                      uint32_t n_left)
{
    const size_t arrays = scan->n_queries + KV_SCAN_SPARE;

    for (uint32_t token = range->begin, end; token < range->end;
         n_left -= end - token, token = end) {
        const uint32_t codebook = scan->unit->segments[token / KV_BLOCK_TOKENS]->codebook;
        uint32_t n_full = 0;
        bool pays = false;

        end =
            scan->by_code && scan->by_cell ? cells_end(scan, books, token, range->end) : token;
        if (end > token) {
            const struct kv_codebook *book = kv_codebook_at(books, codebook);
            const struct kv_cells cells = kv_codebook_cells(book);

            n_full = kv_cells_n_full(&book->shape, &cells);
            const size_t n_items = (size_t)scan->n_items + (n_left - (end - token)) + n_full;
            pays = end - token >= kv_codebook_cells_pay(&book->shape) && n_full > 0 &&
                   n_items * arrays <= scan->room_floats &&
                   scan->n_parts + 2 * scan->n_ranges + 2 <= KV_SCAN_PARTS_MAX;
        }
        if (pays) {
            scan->parts[scan->n_parts++] =
                (struct kv_scan_part){token, end, scan->n_items, n_full, codebook};
            scan->n_items += n_full;
            continue;
        }
        if (end == token) {
            end = (token / KV_BLOCK_TOKENS + 1) * KV_BLOCK_TOKENS;
            if (end > range->end)
                end = range->end;
        }
        add_rows(scan, token, end);
    }
}

void kv_scan_begin(struct kv_scan *scan, const struct kv_codebooks *books)
{
    bool has_cells = false;
    uint32_t n_left = scan->n;

    scan->n_parts = scan->n_items = 0;
    for (uint32_t i = 0; i < scan->n_ranges; i++) {
        add_range(scan, books, &scan->ranges[i], n_left);
        n_left -= scan->ranges[i].end - scan->ranges[i].begin;
    }
    for (uint32_t i = 0; i < scan->n_parts; i++)
        has_cells |= scan->parts[i].codebook != KV_SCAN_ROWS;
    assert((size_t)scan->n_items * (scan->n_queries + KV_SCAN_SPARE) <= scan->room_floats);
    scan->scores = scan->room;
    scan->counts = NULL;
    if (has_cells)
        scan->counts =
            (uint32_t *)(void *)(scan->room +
                                 (size_t)scan->n_items * (scan->n_queries + KV_SCAN_SPARE - 1));
    scan->part = 0;
    scan->token = scan->parts[0].token_begin;
    scan->n_coded = scan->n_exact = scan->n_chapters = 0;
    scan->serial = 0;
    scan->bad = UINT32_MAX;
    for (uint32_t q = 0; q < scan->n_queries; q++)
        scan->maxima[q] = -INFINITY;
}

/* ---- slices ------------------------------------------------------------------------------ */

static bool is_open(const struct kv_codebooks *books, uint32_t codebook)
{
    const struct kv_codebook *book = kv_codebook_at(books, codebook);

    return book->open && !book->is_broken;
}

/* Those of the segment, of the first n_rows, that have no codes: what is made of them stays. */
static bool rows_are_good(const struct kv_scan *scan,
                          struct kv_codebooks *books,
                          uint32_t at,
                          uint32_t n_rows)
{
    const uint32_t n_coded = scan->unit->segments[at]->n_coded, n = n_rows - n_coded;
    const struct kv_row_set rows = kv_unit_rows(scan->unit);

    return kv_verify_run(books->heap, &rows, at * KV_BLOCK_TOKENS + n_coded, 1, n) == n;
}

/* Rows of the segment, of the first n_rows, that have codes; makes them where an open codebook
 * says so, and then says that it did. */
static uint32_t coded_rows(const struct kv_scan *scan,
                           struct kv_codebooks *books,
                           uint32_t at,
                           uint32_t n_rows,
                           bool *ret_made)
{
    struct kv_segment *segment = scan->unit->segments[at];
    const struct kv_segment *from = segment;

    if (segment->training || kv_segment_coded(books, segment, n_rows) == n_rows)
        return kv_segment_coded(books, segment, n_rows);
    if (segment->codes == NULL && at > 0)
        from = scan->unit->segments[at - 1];
    if (from->codes != NULL && is_open(books, from->codebook) &&
        rows_are_good(scan, books, at, n_rows))
        /* Where memory is short, the rows are scored by their keys. */
        *ret_made = kv_segment_encode(books, segment, from->codebook, scan->type,
                                      scan->unit->row_bytes, n_rows) == KV_OK;
    return kv_segment_coded(books, segment, n_rows);
}

static void make_tables(struct kv_scan *scan, const struct kv_codebook *book)
{
    if (book->serial == scan->serial)
        return;
    kv_pq_tables(&book->shape, book->centroids, scan->queries, scan->n_queries, scan->tables);
    scan->serial = book->serial;
    scan->n_chapters++;
}

/* Items [item, item + n) have their scores: while they are in the cache. */
static void find_maxima(struct kv_scan *scan, uint32_t item, uint32_t n)
{
    const uint32_t *counts = scan->counts != NULL ? scan->counts + item : NULL;

    for (uint32_t q = 0; q < scan->n_queries; q++) {
        const float most =
            kv_scores_max(scan->scores + (size_t)q * scan->n_items + item, counts, n);

        scan->maxima[q] = most > scan->maxima[q] ? most : scan->maxima[q];
    }
}

/* Takes rows [begin, end) of the chapter, all of them in this unit, off the counts. */
static void leave_out(const struct kv_scan *scan,
                      const struct kv_codebook *book,
                      uint32_t begin,
                      uint32_t end,
                      uint32_t *counts)
{
    const struct kv_cells cells = kv_codebook_cells(book);
    uint16_t numbers[KV_PQ_TILE];

    for (uint32_t row = begin, n; row < end; row += n) {
        const struct kv_segment *segment =
            scan->unit->segments[book->block_begin + row / KV_BLOCK_TOKENS];
        const uint32_t left = KV_BLOCK_TOKENS - row % KV_BLOCK_TOKENS;

        n = end - row < left ? end - row : left;
        kv_tile_cells(&book->shape, segment->codes, row % KV_BLOCK_TOKENS, n, numbers);
        for (uint32_t i = 0; i < n; i++)
            counts[kv_cells_item(&cells, numbers[i])]--;
    }
}

/* Rows of each full cell in [begin, end) of the chapter.  Where little of it is cut off, sinks
 * in front and a window behind, that is counted; else every list is searched. */
static void count_cells(const struct kv_scan *scan,
                        const struct kv_codebooks *books,
                        const struct kv_codebook *book,
                        uint32_t begin,
                        uint32_t end,
                        uint32_t *ret_counts)
{
    const struct kv_cells cells = kv_codebook_cells(book);
    const uint32_t first = book->block_begin * KV_BLOCK_TOKENS;
    const uint32_t all_end = first + book->n_celled;
    const bool is_little = begin + book->n_celled - end <= CUT_ROWS;

    if (is_little && cells_end(scan, books, first, all_end) == all_end) {
        kv_cells_counts(&book->shape, &cells, 0, book->n_celled, ret_counts);
        leave_out(scan, book, 0, begin, ret_counts);
        leave_out(scan, book, end, book->n_celled, ret_counts);
    } else {
        kv_cells_counts(&book->shape, &cells, begin, end, ret_counts);
    }
}

static void
score_cells(struct kv_scan *scan, struct kv_codebooks *books, const struct kv_scan_part *part)
{
    const struct kv_codebook *book = kv_codebook_at(books, part->codebook);
    const struct kv_cells cells = kv_codebook_cells(book);
    const uint32_t first = book->block_begin * KV_BLOCK_TOKENS;

    make_tables(scan, book);
    if (kv_cells_n_full(&book->shape, &cells) == part->n_items) {
        kv_cells_score(&book->shape, scan->tables, scan->n_queries, &cells,
                       scan->scores + part->item, scan->n_items);
        count_cells(scan, books, book, part->token_begin - first, part->token_end - first,
                    scan->counts + part->item);
    } else { /* they went bad since the scan began: there is room for as many as there were */
        memset(scan->counts + part->item, 0, part->n_items * sizeof(*scan->counts));
    }
    find_maxima(scan, part->item, part->n_items);
    scan->n_coded += part->token_end - part->token_begin;
}

/* Of the part's rows those that are in the segment end here. */
static uint32_t rows_end(const struct kv_scan_part *part, uint32_t at)
{
    const uint32_t end = part->token_end - at * KV_BLOCK_TOKENS;

    return end < KV_BLOCK_TOKENS ? end : KV_BLOCK_TOKENS;
}

/* Rows from scan->token on that have codes of one codebook, in one segment or some: their
 * scores.  Returns how many.  Codes are made for one segment at most, which takes longer than
 * scoring all of a run. */
static uint32_t
score_coded(struct kv_scan *scan, struct kv_codebooks *books, const struct kv_scan_part *part)
{
    struct kv_segment *const *segments = scan->unit->segments;
    uint32_t at = scan->token / KV_BLOCK_TOKENS, n_tiles = 0, n = 0;
    const uint32_t begin = scan->token % KV_BLOCK_TOKENS;
    const uint8_t *tiles[RUN_SEGMENTS];
    const struct kv_codebook *book;
    uint32_t codebook = 0;
    bool has_made = false;

    for (uint32_t end = KV_BLOCK_TOKENS; end == KV_BLOCK_TOKENS && n_tiles < RUN_SEGMENTS &&
                                         !has_made && at * KV_BLOCK_TOKENS < part->token_end;
         at++) {
        end = coded_rows(scan, books, at, rows_end(part, at), &has_made);
        if (end <= (n_tiles == 0 ? begin : 0) ||
            (n_tiles > 0 && segments[at]->codebook != codebook))
            break;
        codebook = segments[at]->codebook;
        tiles[n_tiles++] = segments[at]->codes;
        n += end;
    }
    if (n_tiles == 0)
        return 0;
    n -= begin;
    book = kv_codebook_at(books, codebook);
    make_tables(scan, book);
    kv_tiles_score(&book->shape, scan->tables, scan->n_queries, tiles, begin, n,
                   scan->scores + (part->item + scan->token - part->token_begin),
                   scan->n_items);
    scan->n_coded += n;
    return n;
}

/* Rows from scan->token on that have none, in one segment. */
static uint32_t score_exactly(struct kv_scan *scan, const struct kv_scan_part *part)
{
    const uint32_t at = scan->token / KV_BLOCK_TOKENS, begin = scan->token % KV_BLOCK_TOKENS;
    const uint32_t n = rows_end(part, at) - begin, row_bytes = scan->unit->row_bytes;

    const uint32_t bad = kv_unit_known_bad(scan->unit, scan->token, n);
    if (bad < scan->token + n && scan->bad == UINT32_MAX)
        scan->bad = bad;
    kv_keys_score(scan->type, scan->unit->segments[at]->rows + (size_t)begin * row_bytes,
                  row_bytes, n, scan->d, scan->queries, scan->n_queries,
                  scan->scores + (part->item + scan->token - part->token_begin), scan->n_items);
    scan->n_exact += n;
    return n;
}

/* Some of the part's rows, from scan->token on.  Returns how many. */
static uint32_t
score_rows(struct kv_scan *scan, struct kv_codebooks *books, const struct kv_scan_part *part)
{
    const uint32_t item = part->item + scan->token - part->token_begin;
    uint32_t n = scan->by_code ? score_coded(scan, books, part) : 0;

    if (n == 0)
        n = score_exactly(scan, part);
    for (uint32_t i = 0; scan->counts != NULL && i < n; i++)
        scan->counts[item + i] = 1;
    find_maxima(scan, item, n);
    scan->token += n;
    return n;
}

bool kv_scan_slice(struct kv_scan *scan,
                   struct kv_codebooks *books,
                   const struct kv_clock *clock)
{
    const uint64_t end_us = kv_clock_now(clock) + SLICE_US;

    for (uint32_t n_segments = 0; scan->part < scan->n_parts; n_segments++) {
        const struct kv_scan_part *part = &scan->parts[scan->part];

        if (n_segments >= SLICE_SEGMENTS || (n_segments > 0 && kv_clock_now(clock) >= end_us))
            return false;
        if (part->codebook != KV_SCAN_ROWS)
            score_cells(scan, books, part);
        else
            n_segments += score_rows(scan, books, part) / KV_BLOCK_TOKENS;
        if (part->codebook != KV_SCAN_ROWS || scan->token == part->token_end)
            if (++scan->part < scan->n_parts)
                scan->token = scan->parts[scan->part].token_begin;
    }
    return true;
}
