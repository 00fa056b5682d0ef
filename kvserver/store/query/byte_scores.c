#include "kvserver/store/query/byte_scores.h"

#include "kernels/byte_select.h"
#include "kvserver/store/index/encode.h"
#include "kvserver/store/index/scorer.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum {
    SAMPLE_EVERY = 8,
    SAMPLE_LEAST = 64, /* blocks with codes of which every 8th is enough */
    SCAN_BLOCKS = 128, /* at a time: some us, and kernels prefetch only what they are given */
    LINE_BYTES = 64,
    COUNT_ROWS = 128 << 10,
    COLLECT_ROWS = 32 << 10,
    VALUES = 256, /* of a byte */
    REACH = 8,    /* of the guess of a bound, at first */
};

/* ---- runs -------------------------------------------------------------------------------- */

/* Returns the codebook of a block's rows, KVS_SCORE_ROWS if they have none that may be used.  Rows
 * that have come behind those of an open one get their codes when they are scored: they have it.
 *   before  of the block before */
static uint32_t codebook_at(const struct kvs_score *score,
                            const struct kvs_codebooks *books,
                            uint32_t block,
                            uint32_t before)
{
    const struct kvs_codes *codes = kvs_unit_codes(score->unit, block);

    if (kvs_segment_coded(books, codes, KV_BLOCK_TOKENS) > 0)
        return codes->codebook;
    return codes->column.bytes == NULL && before != KVS_SCORE_ROWS &&
                   kvs_codebook_at(books, before)->open
               ? before
               : KVS_SCORE_ROWS;
}

static uint32_t block_end(uint32_t token, uint32_t end)
{
    const uint32_t next = (token / KV_BLOCK_TOKENS + 1) * KV_BLOCK_TOKENS;

    return next < end ? next : end;
}

/* Divides the eligible rows into runs of one codebook.  Returns the number of those that have
 * one; 0 as well if there are too many. */
static uint32_t make_runs(struct kvs_score *score, const struct kvs_codebooks *books)
{
    uint32_t n_coded = 0;

    score->n_runs = 0;
    for (uint32_t i = 0; i < score->n_ranges; i++) {
        const struct kv_wire_range *range = &score->ranges[i];
        const uint32_t first = range->begin / KV_BLOCK_TOKENS;
        uint32_t before =
            first > 0 ? codebook_at(score, books, first - 1, KVS_SCORE_ROWS) : KVS_SCORE_ROWS;

        for (uint32_t token = range->begin, end; token < range->end; token = end) {
            const uint32_t codebook =
                codebook_at(score, books, token / KV_BLOCK_TOKENS, before);
            /* A run is in one range: each has bytes of its own. */
            struct kvs_score_run *last =
                token > range->begin ? &score->runs[score->n_runs - 1] : NULL;

            before = codebook;
            end = block_end(token, range->end);
            kvs_unit_prefetch_codes(score->unit, token / KV_BLOCK_TOKENS);
            if (last != NULL && last->codebook == codebook) {
                last->token_end = end;
                continue;
            }
            if (score->n_runs == KVS_SCORE_RUNS_MAX)
                return 0;
            score->runs[score->n_runs++] =
                (struct kvs_score_run){token, end, n_coded, 0, codebook};
            n_coded += codebook != KVS_SCORE_ROWS;
        }
    }
    return n_coded;
}

/* Returns the bytes that ranges have: of each, those of its blocks. */
static size_t bytes_of(const struct kvs_score *score)
{
    size_t n = 0;

    for (uint32_t i = 0; i < score->n_ranges; i++)
        n += (size_t)(kvs_blocks_for(score->ranges[i].end) -
                      score->ranges[i].begin / KV_BLOCK_TOKENS) *
             KV_BLOCK_TOKENS;
    return n;
}

/* Returns how many blocks have codes of all of their rows, at most, and all rows eligible. */
static uint32_t whole_blocks(const struct kvs_score *score)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < score->n_runs; i++)
        if (score->runs[i].codebook != KVS_SCORE_ROWS)
            n += (score->runs[i].token_end - score->runs[i].token_begin) / KV_BLOCK_TOKENS;
    return n;
}

/* Returns the table's size, the largest of any run, in floats or rounded. */
static void table_sizes(const struct kvs_score *score,
                        const struct kvs_codebooks *books,
                        size_t *ret_floats,
                        size_t *ret_rounded)
{
    *ret_floats = *ret_rounded = 0;
    for (uint32_t i = 0; i < score->n_runs; i++) {
        if (score->runs[i].codebook == KVS_SCORE_ROWS)
            continue;
        const struct kvs_codebook *book = kvs_codebook_at(books, score->runs[i].codebook);
        const size_t floats = kv_pq_table_size(&book->shape);
        const size_t rounded = kv_pq_table_rounded_size(&book->shape);

        *ret_floats = floats > *ret_floats ? floats : *ret_floats;
        *ret_rounded = rounded > *ret_rounded ? rounded : *ret_rounded;
    }
}

bool kvs_byte_scores_begin(struct kvs_byte_scores *scores,
                           struct kvs_score *score,
                           const struct kvs_codebooks *books,
                           uint32_t n_wanted,
                           uint32_t *tokens)
{
    const uint32_t n_coded = make_runs(score, books);
    const size_t n_bytes = bytes_of(score);
    size_t table, rounded;

    assert(n_wanted < score->n);
    if (n_coded == 0)
        return false;
    table_sizes(score, books, &table, &rounded);
    const uint32_t n_blocks = whole_blocks(score);
    const uint32_t every = n_blocks >= SAMPLE_LEAST ? SAMPLE_EVERY : 1;
    /* In each run one more may be of the sample. */
    const uint32_t sample_max = n_blocks / every + (every > 1 ? n_coded : 0);
    const size_t sample_bytes = (size_t)score->n_queries * sample_max * KV_BLOCK_TOKENS;
    const size_t n_tables = (size_t)n_coded * score->n_queries;
    const size_t n_floats =
        n_tables * table + (n_tables * rounded + sample_bytes + n_bytes) / sizeof(float) + 2;
    if (n_floats > (size_t)score->n * (score->n_queries + KVS_SCORE_SPARE))
        return false;
    assert(n_floats <= score->room_floats);
    scores->score = score;
    scores->step = KVS_BYTES_TABLES;
    scores->n_wanted = n_wanted;
    scores->run = 0;
    scores->token = score->runs[0].token_begin;
    scores->tables = score->room;
    scores->table_floats = table;
    scores->rounded_bytes = rounded;
    scores->rounded = (uint8_t *)(score->room + n_tables * table);
    scores->sample = scores->rounded + n_tables * rounded;
    scores->bytes = scores->sample + sample_bytes;
    scores->sample_every = every;
    scores->sample_max = sample_max;
    scores->n_sampled = 0;
    for (uint32_t q = 0; q < score->n_queries; q++) {
        scores->bases[q] = INFINITY;
        scores->tops[q] = -INFINITY;
    }
    scores->tokens = tokens;
    scores->n = 0;
    score->n_coded = score->n_exact = score->n_chapters = 0;
    score->serial = 0;
    score->bad = UINT32_MAX;
    return true;
}

/* ---- pieces ------------------------------------------------------------------------------ */

static const struct kvs_score_run *run_of(const struct kvs_byte_scores *scores)
{
    return &scores->score->runs[scores->run];
}

static bool has_codes(const struct kvs_score_run *run)
{
    return run->codebook != KVS_SCORE_ROWS;
}

static float *tables_of(const struct kvs_byte_scores *scores, const struct kvs_score_run *run)
{
    return scores->tables + (size_t)run->item * scores->score->n_queries * scores->table_floats;
}

static uint8_t *rounded_of(const struct kvs_byte_scores *scores,
                           const struct kvs_score_run *run)
{
    return scores->rounded +
           (size_t)run->item * scores->score->n_queries * scores->rounded_bytes;
}

/* Begins a step at the first run. */
static void begin_step(struct kvs_byte_scores *scores, enum kvs_byte_scores_step step)
{
    scores->step = step;
    scores->run = 0;
    scores->token = scores->score->runs[0].token_begin;
}

/* Goes on with the next run, or step. */
static void next_run(struct kvs_byte_scores *scores, enum kvs_byte_scores_step next)
{
    if (++scores->run < scores->score->n_runs)
        scores->token = run_of(scores)->token_begin;
    else
        begin_step(scores, next);
}

/* Makes the run's tables, and widens what sums may be. */
static void tables_piece(struct kvs_byte_scores *scores, const struct kvs_codebooks *books)
{
    struct kvs_score *score = scores->score;
    const struct kvs_score_run *run = run_of(scores);

    if (has_codes(run)) {
        const struct kvs_codebook *book = kvs_codebook_at(books, run->codebook);
        float *tables = tables_of(scores, run);

        kvs_score_make_tables(score, book, tables);
        for (uint32_t q = 0; q < score->n_queries; q++) {
            float least, most;

            book->scorer->table_range(book, tables + q * kv_pq_table_size(&book->shape), &least,
                                      &most);
            scores->bases[q] = least < scores->bases[q] ? least : scores->bases[q];
            scores->tops[q] = most > scores->tops[q] ? most : scores->tops[q];
        }
    }
    next_run(scores, KVS_BYTES_ROUND);
}

/* Returns how many steps make one unit of a score.  A sum may be above the widest range by half a
 * step for each subspace, and for the base. */
static float inv_step_of(const struct kvs_byte_scores *scores,
                         const struct kvs_codebooks *books)
{
    const struct kvs_score *score = scores->score;
    uint32_t m = 0;
    float widest = 0;

    for (uint32_t i = 0; i < score->n_runs; i++) {
        const struct kvs_score_run *run = &score->runs[i];

        if (has_codes(run) && kvs_codebook_at(books, run->codebook)->shape.m > m)
            m = kvs_codebook_at(books, run->codebook)->shape.m;
    }
    for (uint32_t q = 0; q < score->n_queries; q++) {
        const float width = scores->tops[q] - scores->bases[q];

        widest = width > widest ? width : widest;
    }
    const float steps = (float)(VALUES - 1 - (int)m);

    /* Of tables that are all alike every row has the same byte; of those that are not finite,
     * which a codebook of sound keys has none of, too. */
    return widest > 0 && steps / widest < INFINITY ? steps / widest : 0;
}

static void round_piece(struct kvs_byte_scores *scores, const struct kvs_codebooks *books)
{
    const struct kvs_score *score = scores->score;
    const struct kvs_score_run *run = run_of(scores);

    if (scores->run == 0)
        scores->inv_step = inv_step_of(scores, books);
    if (has_codes(run)) {
        const struct kvs_codebook *book = kvs_codebook_at(books, run->codebook);
        const float *tables = tables_of(scores, run);
        uint8_t *rounded = rounded_of(scores, run);

        for (uint32_t q = 0; q < score->n_queries; q++)
            book->scorer->round_table(book, tables + q * kv_pq_table_size(&book->shape),
                                      scores->bases[q], scores->inv_step,
                                      rounded + q * kv_pq_table_rounded_size(&book->shape));
    }
    next_run(scores, KVS_BYTES_SAMPLE);
}

/* Returns the least sum of the wanted share of the sample's rows, for one vector. */
static int bound_of(const struct kvs_byte_scores *scores, uint32_t q)
{
    const uint64_t n = scores->score->n;
    const uint64_t wanted = ((uint64_t)scores->n_wanted * scores->n_sampled + n - 1) / n;
    const uint8_t *sums = scores->sample + (size_t)q * scores->sample_max * KV_BLOCK_TOKENS;
    int bound = 0;

    for (int bit = VALUES / 2; bit > 0; bit /= 2)
        if (kv_bytes_count_from(sums, scores->n_sampled, (uint8_t)(bound | bit)) >= wanted)
            bound |= bit;
    return bound;
}

static void end_sample(struct kvs_byte_scores *scores)
{
    const uint32_t n_queries = scores->score->n_queries;
    int bounds[KV_QUERIES_MAX], least = VALUES - 1;

    for (uint32_t q = 0; q < n_queries; q++) {
        bounds[q] = scores->n_sampled > 0 ? bound_of(scores, q) : 0;
        least = bounds[q] < least ? bounds[q] : least;
    }
    for (uint32_t q = 0; q < n_queries; q++)
        scores->offsets[q] = (int16_t)(least - bounds[q]);
    scores->guess = (uint32_t)least;
}

/* Tiles of a sample are alone, and too few for a kernel to look ahead. */
static void prefetch(const uint8_t *tile, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += LINE_BYTES)
        __builtin_prefetch(tile + i, 0, 2);
}

/* Adds the sums of some blocks of the run to the sample. */
static void sample_piece(struct kvs_byte_scores *scores, struct kvs_codebooks *books)
{
    struct kvs_score *score = scores->score;
    const struct kvs_score_run *run = run_of(scores);
    const struct kvs_codebook *book =
        has_codes(run) ? kvs_codebook_at(books, run->codebook) : NULL;
    const bool is_open = book != NULL && book->open;
    const uint32_t begin_whole = kvs_blocks_for(run->token_begin),
                   end_whole = run->token_end / KV_BLOCK_TOKENS;
    const uint32_t end = is_open ? kvs_blocks_for(run->token_end) : end_whole;
    const uint8_t *tiles[SCAN_BLOCKS];
    uint32_t n = 0,
             at = is_open ? scores->token / KV_BLOCK_TOKENS : kvs_blocks_for(scores->token);
    bool has_made = false;

    /* Behind an open codebook's blocks each gets its codes after the one before it: all are made
     * here.  So what is found does not depend on whether a query has been there before. */
    for (; book != NULL && at < end && n < SCAN_BLOCKS && !has_made; at++) {
        const bool is_sampled =
            at >= begin_whole && at < end_whole && at % scores->sample_every == 0;
        const uint32_t n_rows =
            block_end(at * KV_BLOCK_TOKENS, run->token_end) - at * KV_BLOCK_TOKENS;

        if (!is_sampled && !is_open)
            continue;
        const uint32_t n_coded = kvs_score_coded(score, books, at, n_rows, &has_made);
        const struct kvs_codes *codes = kvs_unit_codes(score->unit, at);

        if (n_coded < n_rows && has_made)
            break;
        if (is_sampled && n_coded == KV_BLOCK_TOKENS && codes->codebook == run->codebook) {
            tiles[n] = codes->column.bytes;
            prefetch(tiles[n++], book->scorer->codes_bytes(&book->shape));
        }
    }
    for (uint32_t q = 0; q < score->n_queries && n > 0; q++)
        book->scorer->sum_rows(
            book, rounded_of(scores, run) + q * kv_pq_table_rounded_size(&book->shape), tiles,
            n,
            scores->sample + scores->n_sampled +
                (size_t)q * scores->sample_max * KV_BLOCK_TOKENS);
    scores->n_sampled += n * KV_BLOCK_TOKENS;
    assert(scores->n_sampled <= scores->sample_max * KV_BLOCK_TOKENS);
    if (n > 0)
        score->codes_bytes += n * book->scorer->codes_bytes(&book->shape);
    scores->token = at * KV_BLOCK_TOKENS;
    if (book == NULL || at >= end)
        next_run(scores, KVS_BYTES_SCAN);
    if (scores->step == KVS_BYTES_SCAN)
        end_sample(scores);
}

/* Returns where the bytes of a token's block begin. */
static uint8_t *bytes_at(const struct kvs_byte_scores *scores, uint32_t token)
{
    const struct kv_wire_range *range = scores->score->ranges;
    uint8_t *at = scores->bytes;

    for (; token >= range->end; range++)
        at += (size_t)(kvs_blocks_for(range->end) - range->begin / KV_BLOCK_TOKENS) *
              KV_BLOCK_TOKENS;
    return at +
           (size_t)(token / KV_BLOCK_TOKENS - range->begin / KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS;
}

/* Rounds a score as the tables are. */
static int rounded_score(const struct kvs_byte_scores *scores, uint32_t q, float score)
{
    const float steps = (score - scores->bases[q]) * scores->inv_step;

    return steps >= VALUES - 1 ? VALUES - 1 : steps > 0 ? (int)(steps + 0.5f) : 0;
}

/* Scores rows of the block by their keys, which have no codes. */
static void scan_keys(struct kvs_byte_scores *scores, uint32_t token, uint32_t n)
{
    struct kvs_score *score = scores->score;
    float exact[KV_QUERIES_MAX * KV_BLOCK_TOKENS];
    uint8_t *bytes = bytes_at(scores, token) + token % KV_BLOCK_TOKENS;

    kvs_score_keys(score, token, n, exact, n);
    for (uint32_t i = 0; i < n; i++) {
        int most = 0;

        for (uint32_t q = 0; q < score->n_queries; q++) {
            const int byte = rounded_score(scores, q, exact[q * n + i]) + scores->offsets[q];

            most = byte > most ? byte : most;
        }
        bytes[i] = (uint8_t)(most < VALUES ? most : VALUES - 1);
    }
}

/* Scores some blocks of the run whose eligible rows all have its codes, from scores->token on.
 * Returns false if the first one's have not; *ret_made: the next call may find more of them. */
static bool scan_codes(struct kvs_byte_scores *scores,
                       struct kvs_codebooks *books,
                       const struct kvs_score_run *run,
                       bool *ret_made)
{
    struct kvs_score *score = scores->score;
    const struct kvs_codebook *book = kvs_codebook_at(books, run->codebook);
    const uint8_t *tiles[SCAN_BLOCKS];
    uint32_t n = 0, token = scores->token;

    while (token < run->token_end && n < SCAN_BLOCKS && !*ret_made) {
        const uint32_t at = token / KV_BLOCK_TOKENS, end = block_end(token, run->token_end);
        const uint32_t n_rows = end - at * KV_BLOCK_TOKENS;
        const uint32_t n_coded = kvs_score_coded(score, books, at, n_rows, ret_made);
        const struct kvs_codes *codes = kvs_unit_codes(score->unit, at);

        if (n_coded < n_rows || codes->codebook != run->codebook)
            break;
        tiles[n++] = codes->column.bytes;
        token = end;
    }
    if (n == 0)
        return false;
    book->scorer->most_rows(book, rounded_of(scores, run), scores->offsets, score->n_queries,
                            tiles, n, bytes_at(scores, scores->token));
    score->n_chapters += score->serial != book->serial;
    score->serial = book->serial;
    score->n_coded += token - scores->token;
    score->codes_bytes += n * book->scorer->codes_bytes(&book->shape);
    scores->token = token;
    return true;
}

/* Scores some of the run's rows: blocks by their codes, or one by its keys, also if only some of
 * its rows have none. */
static void scan_piece(struct kvs_byte_scores *scores, struct kvs_codebooks *books)
{
    const struct kvs_score_run *run = run_of(scores);
    bool has_made = false;

    if ((!has_codes(run) || !scan_codes(scores, books, run, &has_made)) && !has_made) {
        const uint32_t end = block_end(scores->token, run->token_end);

        scan_keys(scores, scores->token, end - scores->token);
        scores->token = end;
    }
    if (scores->token < run->token_end)
        return;
    next_run(scores, KVS_BYTES_BOUND);
    if (scores->step == KVS_BYTES_BOUND) {
        scores->least = 0;
        scores->most = VALUES;
        scores->reach = REACH;
        scores->n_counted = scores->n_above = 0;
    }
}

/* Returns the value whose rows are counted next: around the guess at first, then in the middle. */
static uint32_t next_value(const struct kvs_byte_scores *scores)
{
    if (scores->least == 0 && scores->most == VALUES && scores->guess > 0)
        return scores->guess;
    if (scores->most == VALUES && scores->least + scores->reach < VALUES)
        return scores->least + scores->reach;
    return (scores->least + scores->most) / 2;
}

/* Counts the rows of a piece that have at least a value.  After the last one that is the bound's new
 * limit; after the last pass, the bound is known. */
static void bound_piece(struct kvs_byte_scores *scores)
{
    const struct kvs_score_run *run = run_of(scores);
    const uint32_t value = next_value(scores);
    const uint32_t n = run->token_end - scores->token < COUNT_ROWS
                           ? run->token_end - scores->token
                           : COUNT_ROWS;

    scores->n_counted += kv_bytes_count_from(
        bytes_at(scores, scores->token) + scores->token % KV_BLOCK_TOKENS, n, (uint8_t)value);
    scores->token += n;
    if (scores->token < run->token_end)
        return;
    next_run(scores, KVS_BYTES_COLLECT);
    if (scores->step == KVS_BYTES_BOUND)
        return;
    if (scores->n_counted >= scores->n_wanted) {
        scores->reach *= scores->least > 0 ? 2 : 1;
        scores->least = value;
    } else {
        scores->most = value;
        scores->n_above = scores->n_counted;
    }
    scores->n_counted = 0;
    if (scores->most - scores->least > 1)
        begin_step(scores, KVS_BYTES_BOUND);
    else
        scores->ties = scores->n_wanted - scores->n_above;
}

/* Returns true after the last piece. */
static bool collect_piece(struct kvs_byte_scores *scores)
{
    const struct kvs_score_run *run = run_of(scores);
    const uint32_t n = run->token_end - scores->token < COLLECT_ROWS
                           ? run->token_end - scores->token
                           : COLLECT_ROWS;

    scores->n += (uint32_t)kv_bytes_collect(
        bytes_at(scores, scores->token) + scores->token % KV_BLOCK_TOKENS, n,
        (uint8_t)scores->least, &scores->ties, scores->token, scores->tokens + scores->n);
    scores->token += n;
    if (scores->token < run->token_end)
        return false;
    if (++scores->run < scores->score->n_runs) {
        scores->token = run_of(scores)->token_begin;
        return false;
    }
    assert(scores->n == scores->n_wanted);
    return true;
}

bool kvs_byte_scores_piece(struct kvs_byte_scores *scores, struct kvs_codebooks *books)
{
    switch (scores->step) {
    case KVS_BYTES_TABLES:
        tables_piece(scores, books);
        break;
    case KVS_BYTES_ROUND:
        round_piece(scores, books);
        break;
    case KVS_BYTES_SAMPLE:
        sample_piece(scores, books);
        break;
    case KVS_BYTES_SCAN:
        scan_piece(scores, books);
        break;
    case KVS_BYTES_BOUND:
        bound_piece(scores);
        break;
    case KVS_BYTES_COLLECT:
        return collect_piece(scores);
    }
    return false;
}
