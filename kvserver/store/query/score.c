#include "kvserver/store/query/score.h"

#include "kernels/select.h"
#include "kvserver/store/index/encode.h"
#include "kvserver/store/index/scorer.h"
#include "kvserver/store/rows/residency.h"
#include "kvserver/store/rows/verify.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum {
    RUN_SEGMENTS = 32,       /* scored at a time, at most */
    PIECE_SCORES = 32 << 10, /* by codes: some 10 us */
    CUT_ROWS = 2048,         /* up to so many rows are counted faster than 4,096 lists are
                           * searched */
};

uint32_t kvs_ranges_count(const struct kv_wire_range *ranges, uint32_t n_ranges)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < n_ranges; i++)
        n += ranges[i].end - ranges[i].begin;
    return n;
}

/* ---- runs: the eligible rows are divided into runs that are scored alike ----------------- */

static void add_rows(struct kvs_score *score, uint32_t begin, uint32_t end)
{
    struct kvs_score_run *last = score->n_runs > 0 ? &score->runs[score->n_runs - 1] : NULL;

    if (begin == end)
        return;
    if (last == NULL || last->codebook != KVS_SCORE_ROWS || last->token_end != begin) {
        last = &score->runs[score->n_runs++];
        *last = (struct kvs_score_run){begin, begin, score->n_items, 0, KVS_SCORE_ROWS};
    }
    last->token_end = end;
    last->n_items += end - begin;
    score->n_items += end - begin;
}

/* Returns where the cells for `token` end: the end of the chapter's cells in this unit, which
 * may have only the first of the chapter's segments, but at most `most`; `token` itself if it
 * has no usable cells.  Segments after `most` are not read, and few before it. */
static uint32_t cells_end(const struct kvs_score *score,
                          const struct kvs_codebooks *books,
                          uint32_t token,
                          uint32_t most)
{
    const uint32_t at = token / KV_BLOCK_TOKENS;
    const struct kvs_codes *codes = kvs_unit_codes(score->unit, at);

    if (!codes->in_chapter)
        return token;
    const struct kvs_codebook *book = kvs_codebook_at(books, codes->codebook);
    if (book->is_broken || book->lists.bytes == NULL || book->n_cells_lost > 0)
        return token;
    const uint32_t celled_end = book->block_begin + book->n_celled / KV_BLOCK_TOKENS;
    const uint32_t most_end = kvs_blocks_for(most);

    assert(at >= book->block_begin);
    const uint32_t end = kvs_codebook_chapter_end(
        book, score->unit, at, celled_end < most_end ? celled_end : most_end);
    if (end <= at)
        return token;
    return end * KV_BLOCK_TOKENS < most ? end * KV_BLOCK_TOKENS : most;
}

static void add_range(struct kvs_score *score,
                      const struct kvs_codebooks *books,
                      const struct kv_wire_range *range,
                      uint32_t n_left)
{
    const size_t arrays = score->n_queries + KVS_SCORE_SPARE;

    for (uint32_t token = range->begin, end; token < range->end;
         n_left -= end - token, token = end) {
        const uint32_t codebook =
            kvs_unit_codes(score->unit, token / KV_BLOCK_TOKENS)->codebook;
        uint32_t n_full = 0;
        bool pays = false;

        end = score->by_code && score->by_cell ? cells_end(score, books, token, range->end)
                                               : token;
        if (end > token) {
            const struct kvs_codebook *book = kvs_codebook_at(books, codebook);

            n_full = book->scorer->n_items(book);
            const size_t n_items = (size_t)score->n_items + (n_left - (end - token)) + n_full;
            pays = end - token >= book->scorer->items_pay(&book->shape) && n_full > 0 &&
                   n_items * arrays <= score->room_floats &&
                   score->n_runs + 2 * score->n_ranges + 2 <= KVS_SCORE_RUNS_MAX;
        }
        if (pays) {
            score->runs[score->n_runs++] =
                (struct kvs_score_run){token, end, score->n_items, n_full, codebook};
            score->n_items += n_full;
            continue;
        }
        if (end == token) {
            end = (token / KV_BLOCK_TOKENS + 1) * KV_BLOCK_TOKENS;
            if (end > range->end)
                end = range->end;
        }
        add_rows(score, token, end);
    }
}

void kvs_score_begin(struct kvs_score *score, const struct kvs_codebooks *books)
{
    bool has_cells = false;
    uint32_t n_left = score->n;

    score->n_runs = score->n_items = 0;
    for (uint32_t i = 0; i < score->n_ranges; i++) {
        add_range(score, books, &score->ranges[i], n_left);
        n_left -= score->ranges[i].end - score->ranges[i].begin;
    }
    for (uint32_t i = 0; i < score->n_runs; i++)
        has_cells |= score->runs[i].codebook != KVS_SCORE_ROWS;
    assert((size_t)score->n_items * (score->n_queries + KVS_SCORE_SPARE) <= score->room_floats);
    score->scores = score->room;
    score->counts = NULL;
    if (has_cells)
        score->counts =
            (uint32_t *)(void *)(score->room + (size_t)score->n_items *
                                                   (score->n_queries + KVS_SCORE_SPARE - 1));
    score->run = 0;
    score->token = score->runs[0].token_begin;
    score->n_coded = score->n_exact = score->n_chapters = 0;
    score->serial = 0;
    score->bad = UINT32_MAX;
    for (uint32_t q = 0; q < score->n_queries; q++)
        score->maxima[q] = -INFINITY;
}

/* ---- pieces ------------------------------------------------------------------------------ */

static bool is_open(const struct kvs_codebooks *books, uint32_t codebook)
{
    const struct kvs_codebook *book = kvs_codebook_at(books, codebook);

    return book->open && !book->is_broken;
}

/* Encodes some of the segment's first n_rows rows that have no codes, with the open codebook of
 * `from`, after verifying them.  Returns whether it has. */
static bool encode_some(const struct kvs_score *score,
                        struct kvs_codebooks *books,
                        uint32_t at,
                        const struct kvs_codes *from,
                        uint32_t n_rows)
{
    const struct kvs_codebook *book = kvs_codebook_at(books, from->codebook);
    const struct kvs_row_set rows = kvs_unit_rows(score->unit);
    const uint32_t n_coded = kvs_unit_codes(score->unit, at)->n_coded;
    const uint32_t most = book->scorer->rows_at_once(&book->shape);
    const uint32_t n = n_rows - n_coded < most ? n_rows - n_coded : most;

    if (kvs_verify_run(books->store, &rows, at * KV_BLOCK_TOKENS + n_coded, 1, n) < n)
        return false;
    return kvs_segment_encode(books, kvs_unit_block(score->unit, at), score->unit->at,
                              from->codebook, score->type, score->unit->row_bytes,
                              n_coded + n) == KV_OK;
}

uint32_t kvs_score_coded(const struct kvs_score *score,
                         struct kvs_codebooks *books,
                         uint32_t at,
                         uint32_t n_rows,
                         bool *ret_made)
{
    struct kvs_block *block = kvs_unit_block(score->unit, at);
    const uint32_t unit_at = score->unit->at;
    const struct kvs_codes *from = kvs_block_codes(block, unit_at);
    const uint32_t n_coded = kvs_segment_coded(books, from, n_rows);

    if (block->segments[unit_at].training || n_coded == n_rows ||
        !kvs_segment_is_here(block, unit_at))
        return n_coded;
    if (from->column.bytes == NULL && at > 0)
        from = kvs_unit_codes(score->unit, at - 1);
    /* If memory is short, the rows are scored by their keys. */
    if (from->column.bytes != NULL && is_open(books, from->codebook))
        *ret_made = encode_some(score, books, at, from, n_rows);
    return kvs_segment_coded(books, kvs_block_codes(block, unit_at), n_rows);
}

/* Returns the query vectors as the codebook takes them.  Those of one unit mostly share a
 * rotation. */
static const float *rotated(struct kvs_score *score, const struct kvs_codebook *book)
{
    if (book->rotation == NULL)
        return score->queries;
    if (score->rotated_by != book->rotation) {
        kv_rotate(book->shape.d, kvs_codebook_rotation(book), score->queries, score->n_queries,
                  score->rotated);
        score->rotated_by = book->rotation;
        score->books_bytes += book->rotation->matrix.n_bytes;
    }
    return score->rotated;
}

void kvs_score_make_tables(struct kvs_score *score,
                           const struct kvs_codebook *book,
                           float *ret_tables)
{
    book->scorer->make_tables(book, rotated(score, book), score->n_queries, ret_tables);
    score->books_bytes += book->learnt.n_bytes;
}

static void make_tables(struct kvs_score *score, const struct kvs_codebook *book)
{
    if (book->serial == score->serial)
        return;
    kvs_score_make_tables(score, book, score->tables);
    score->serial = book->serial;
    score->n_chapters++;
}

/* Updates the maxima with the scores of items [item, item + n), while these are in the
 * cache. */
static void find_maxima(struct kvs_score *score, uint32_t item, uint32_t n)
{
    const uint32_t *counts = score->counts != NULL ? score->counts + item : NULL;

    for (uint32_t q = 0; q < score->n_queries; q++) {
        const float most =
            kv_scores_max(score->scores + (size_t)q * score->n_items + item, counts, n);

        score->maxima[q] = most > score->maxima[q] ? most : score->maxima[q];
    }
}

/* Subtracts rows [begin, end) of the chapter, all of which this unit has, from the counts. */
static void subtract_counts(const struct kvs_score *score,
                            const struct kvs_codebook *book,
                            uint32_t begin,
                            uint32_t end,
                            uint32_t *counts)
{
    for (uint32_t row = begin, n; row < end; row += n) {
        const struct kvs_codes *codes =
            kvs_unit_codes(score->unit, book->block_begin + row / KV_BLOCK_TOKENS);
        const uint32_t left = KV_BLOCK_TOKENS - row % KV_BLOCK_TOKENS;

        n = end - row < left ? end - row : left;
        book->scorer->subtract_counts(book, codes->column.bytes, row % KV_BLOCK_TOKENS, n,
                                      counts);
    }
}

/* Returns whether rows [begin, end) of the chapter have codes in memory.  Nobody has asked for rows that
 * are not eligible. */
static bool are_here(const struct kvs_score *score,
                     const struct kvs_codebooks *books,
                     const struct kvs_codebook *book,
                     uint32_t begin,
                     uint32_t end)
{
    if (books->store->n_away == 0)
        return true;
    for (uint32_t row = begin; row < end; row = (row / KV_BLOCK_TOKENS + 1) * KV_BLOCK_TOKENS)
        if (!kvs_unit_has_codes(score->unit, book->block_begin + row / KV_BLOCK_TOKENS))
            return false;
    return true;
}

/* Counts the rows of each full cell in [begin, end) of the chapter.  If only few rows are
 * excluded (sinks before, a window after), these are subtracted; otherwise every list is
 * searched, with the same result. */
static void count_cells(const struct kvs_score *score,
                        const struct kvs_codebooks *books,
                        const struct kvs_codebook *book,
                        uint32_t begin,
                        uint32_t end,
                        uint32_t *ret_counts)
{
    const uint32_t first = book->block_begin * KV_BLOCK_TOKENS;
    const uint32_t all_end = first + book->n_celled;
    const bool is_little = begin + book->n_celled - end <= CUT_ROWS;

    if (is_little && cells_end(score, books, first, all_end) == all_end &&
        are_here(score, books, book, 0, begin) &&
        are_here(score, books, book, end, book->n_celled)) {
        book->scorer->count_items(book, 0, book->n_celled, ret_counts);
        subtract_counts(score, book, 0, begin, ret_counts);
        subtract_counts(score, book, end, book->n_celled, ret_counts);
    } else {
        book->scorer->count_items(book, begin, end, ret_counts);
    }
}

static void score_cells(struct kvs_score *score,
                        struct kvs_codebooks *books,
                        const struct kvs_score_run *run)
{
    const struct kvs_codebook *book = kvs_codebook_at(books, run->codebook);
    const uint32_t first = book->block_begin * KV_BLOCK_TOKENS;

    make_tables(score, book);
    if (book->scorer->n_items(book) == run->n_items) {
        book->scorer->score_items(book, score->tables, score->n_queries,
                                  score->scores + run->item, score->n_items);
        score->codes_bytes += book->scorer->lists_bytes(&book->shape, 0);
        count_cells(score, books, book, run->token_begin - first, run->token_end - first,
                    score->counts + run->item);
    } else { /* the cells went bad since the query began: every item counts 0 rows */
        memset(score->counts + run->item, 0, run->n_items * sizeof(*score->counts));
    }
    find_maxima(score, run->item, run->n_items);
    score->n_coded += run->token_end - run->token_begin;
}

/* Returns where the run's rows in the segment end. */
static uint32_t rows_end(const struct kvs_score_run *run, uint32_t at)
{
    const uint32_t end = run->token_end - at * KV_BLOCK_TOKENS;

    return end < KV_BLOCK_TOKENS ? end : KV_BLOCK_TOKENS;
}

static uint32_t segments_at_once(const struct kvs_score *score)
{
    const uint32_t n = PIECE_SCORES / (score->n_queries * KV_BLOCK_TOKENS);

    return n < RUN_SEGMENTS ? n : RUN_SEGMENTS;
}

/* Scores rows from score->token on that have codes of one codebook, in one or more segments.
 * Returns their number.  Encodes at most as many rows as in a piece of an index job, which takes
 * longer than scoring a whole batch of segments. */
static uint32_t score_coded(struct kvs_score *score,
                            struct kvs_codebooks *books,
                            const struct kvs_score_run *run)
{
    uint32_t at = score->token / KV_BLOCK_TOKENS, n_tiles = 0, n = 0;
    const uint32_t begin = score->token % KV_BLOCK_TOKENS;
    const uint32_t most = segments_at_once(score);
    const uint8_t *tiles[RUN_SEGMENTS];
    const struct kvs_codebook *book;
    uint32_t codebook = 0;
    bool has_made = false;

    for (uint32_t end = KV_BLOCK_TOKENS; end == KV_BLOCK_TOKENS && n_tiles < most &&
                                         !has_made && at * KV_BLOCK_TOKENS < run->token_end;
         at++) {
        end = kvs_score_coded(score, books, at, rows_end(run, at), &has_made);
        const struct kvs_codes *codes = kvs_unit_codes(score->unit, at);
        if (end <= (n_tiles == 0 ? begin : 0) || (n_tiles > 0 && codes->codebook != codebook))
            break;
        codebook = codes->codebook;
        tiles[n_tiles++] = codes->column.bytes;
        n += end;
    }
    if (n_tiles == 0)
        return 0;
    n -= begin;
    book = kvs_codebook_at(books, codebook);
    make_tables(score, book);
    book->scorer->score_rows(book, score->tables, score->n_queries, tiles, begin, n,
                             score->scores + (run->item + score->token - run->token_begin),
                             score->n_items);
    score->n_coded += n;
    score->codes_bytes += n_tiles * book->scorer->codes_bytes(&book->shape);
    return n;
}

void kvs_score_keys(
    struct kvs_score *score, uint32_t token, uint32_t n, float *ret_scores, size_t stride)
{
    const uint32_t row_bytes = score->unit->row_bytes;
    const bool is_here = kvs_unit_is_here(score->unit, token / KV_BLOCK_TOKENS);
    const uint32_t bad = is_here ? kvs_unit_known_bad(score->unit, token, n) : token;

    if (bad < token + n && score->bad == UINT32_MAX)
        score->bad = bad;
    if (!is_here) {
        for (uint32_t q = 0; q < score->n_queries; q++)
            memset(ret_scores + q * stride, 0, n * sizeof(*ret_scores));
        return;
    }
    kv_exact_scores_score(score->type, kvs_unit_row(score->unit, token), row_bytes, n, score->d,
                          score->queries, score->n_queries, ret_scores, stride);
    score->n_exact += n;
    score->keys_bytes += (uint64_t)n * kv_dtype_bytes(score->type) * score->d;
}

/* Scores the rows from score->token on by their keys, in one segment.  Returns their number. */
static uint32_t score_exactly(struct kvs_score *score, const struct kvs_score_run *run)
{
    const uint32_t n =
        rows_end(run, score->token / KV_BLOCK_TOKENS) - score->token % KV_BLOCK_TOKENS;

    kvs_score_keys(score, score->token, n,
                   score->scores + (run->item + score->token - run->token_begin),
                   score->n_items);
    return n;
}

/* Scores some of the run's rows, from score->token on. */
static void score_rows(struct kvs_score *score,
                       struct kvs_codebooks *books,
                       const struct kvs_score_run *run)
{
    const uint32_t item = run->item + score->token - run->token_begin;
    uint32_t n = score->by_code ? score_coded(score, books, run) : 0;

    if (n == 0)
        n = score_exactly(score, run);
    for (uint32_t i = 0; score->counts != NULL && i < n; i++)
        score->counts[item + i] = 1;
    find_maxima(score, item, n);
    score->token += n;
}

bool kvs_score_piece(struct kvs_score *score, struct kvs_codebooks *books)
{
    if (score->run == score->n_runs)
        return true;
    const struct kvs_score_run *run = &score->runs[score->run];

    if (run->codebook != KVS_SCORE_ROWS)
        score_cells(score, books, run);
    else
        score_rows(score, books, run);
    if (run->codebook != KVS_SCORE_ROWS || score->token == run->token_end)
        if (++score->run < score->n_runs)
            score->token = score->runs[score->run].token_begin;
    return score->run == score->n_runs;
}
