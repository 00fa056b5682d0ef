/* The first cut and step 2 of a query: from candidates to selected rows. */
#include "kvserver/store/query/pipeline_private.h"

#include "kernels/key_copies.h"
#include "kvserver/store/index/encode.h"
#include "kvserver/store/rows/verify.h"

#include <string.h>

enum {
    RERANK_ROWS = 128,    /* in a piece, at most; */
    RERANK_ROWS_MIN = 16, /* these even if they are more products than */
    RERANK_PRODUCTS = 1 << 18,
    CUT_ROWS = 512, /* in a piece, at most; */
    CUT_PRODUCTS = 1 << 19,
    /* Keys of a span stay in a core's second-level cache: 256 KiB of 128 fp16 elements.  Of 64
     * entries' 1,024 of 16,384 candidates one took 24 ns so, 30 unit by unit and 42 entry by
     * entry (2 MiB a core, AVX-512, 23 November 2026). */
    SPAN_ROWS = 1024,
};

/* Returns the entry's first candidate that is to be scored in this stage, or UINT32_MAX. */
static uint32_t next_candidate(const struct kvs_query_pipeline *pipeline,
                               const struct kvs_query_entry *entry)
{
    return kvs_query_takes_part(entry, pipeline->stage) && entry->cursor < entry->n_candidates
               ? entry->candidates[entry->cursor]
               : UINT32_MAX;
}

/* The same of all entries. */
static uint32_t first_candidate(const struct kvs_query_pipeline *pipeline)
{
    uint32_t first = UINT32_MAX;

    for (uint32_t i = 0; i < pipeline->n_entries; i++) {
        const uint32_t next = next_candidate(pipeline, &pipeline->entries[i]);

        first = next < first ? next : first;
    }
    return first;
}

/* Copies the scores of n candidates at the cursor for step 3, because selecting overwrites its
 * arrays. */
static void keep_scores(struct kvs_query_entry *entry, uint32_t n)
{
    for (uint32_t q = 0; q < entry->score.n_queries; q++) {
        const size_t at = (size_t)q * entry->n_candidates + entry->cursor;

        memcpy(entry->kept_scores + at, entry->scores + at, n * sizeof(float));
    }
    memcpy(entry->kept_tokens + entry->cursor, entry->candidates + entry->cursor,
           n * sizeof(uint32_t));
}

/* The same of candidates that a cut has left: exact scores take the place of the copies'. */
static void improve_scores(struct kvs_query_entry *entry, uint32_t n)
{
    for (uint32_t i = entry->cursor; i < entry->cursor + n; i++) {
        while (entry->kept_tokens[entry->kept] < entry->candidates[i])
            entry->kept++;
        for (uint32_t q = 0; q < entry->score.n_queries; q++)
            entry->kept_scores[(size_t)q * entry->n_scored + entry->kept] =
                entry->scores[(size_t)q * entry->n_candidates + i];
    }
}

/* Scores n candidates at `from` by their keys.  Returns false if one is bad. */
static bool score_keys(struct kvs_query_pipeline *pipeline,
                       struct kvs_query_entry *entry,
                       uint32_t from,
                       uint32_t n)
{
    const struct kvs_score *score = &entry->score;
    const void *keys[CUT_ROWS];

    for (uint32_t i = 0; i < n; i++) {
        const uint32_t token = entry->candidates[from + i];

        if (!kvs_unit_is_readable(score->unit, token))
            return kvs_query_fail_bad(pipeline, token);
        keys[i] = kvs_unit_row(score->unit, token);
    }
    kv_exact_scores_score_list(score->type, keys, n, score->d, score->queries, score->n_queries,
                               entry->scores + from, entry->n_candidates);
    entry->n_exact += n;
    entry->reads.keys += (uint64_t)n * kv_dtype_bytes(score->type) * score->d;
    return true;
}

/* Returns how many of the entry's candidates from the cursor on are in the span, at most n_max. */
static uint32_t n_in_span(const struct kvs_query_pipeline *pipeline,
                          const struct kvs_query_entry *entry,
                          uint32_t n_max)
{
    const uint32_t n_left = entry->n_candidates - entry->cursor;
    uint32_t n = n_left < n_max ? n_left : n_max;

    while (n > 0 && entry->candidates[entry->cursor + n - 1] >= pipeline->span_end)
        n--;
    return n;
}

/* Rescores at most n_max of the entry's candidates in the span.  Returns their number; 0: one
 * is bad. */
static uint32_t
rescore(struct kvs_query_pipeline *pipeline, struct kvs_query_entry *entry, uint32_t n_max)
{
    const uint32_t n = n_in_span(pipeline, entry, n_max);

    if (!score_keys(pipeline, entry, entry->cursor, n))
        return 0;
    if (entry->kept_scores != NULL && entry->is_cut)
        improve_scores(entry, n);
    else if (entry->kept_scores != NULL)
        keep_scores(entry, n);
    entry->cursor += n;
    return n;
}

/* Rounds the entry's query vectors for copies of the codebook, unless they are. */
static void round_queries(struct kvs_query_pipeline *pipeline,
                          const struct kvs_query_entry *entry,
                          const struct kvs_codebook *book)
{
    const struct kvs_score *score = &entry->score;

    if (pipeline->rounded_of != entry)
        kv_key_copies_round(score->d, kvs_codebook_mean(book), score->queries, score->n_queries,
                            pipeline->rounded);
    else if (pipeline->rounded_serial != book->serial)
        kv_key_copies_dots(score->d, kvs_codebook_mean(book), score->queries, score->n_queries,
                           pipeline->rounded);
    pipeline->rounded_of = entry;
    pipeline->rounded_serial = book->serial;
}

/* The copies of a block's first rows. */
struct copies {
    const struct kvs_codebook *book; /* NULL: there are none */
    const void *block;
    uint32_t n_rows;
};

static struct copies copies_of(const struct kvs_query_entry *entry, uint32_t block)
{
    const struct kvs_codebooks *books = entry->input.codebooks;
    const struct kvs_codes *codes = kvs_unit_codes(entry->score.unit, block);
    const uint32_t n_coded = kvs_segment_coded(books, codes, KV_BLOCK_TOKENS);
    const struct kvs_codebook *book =
        n_coded > 0 ? kvs_codebook_at(books, codes->codebook) : NULL;

    return book != NULL && book->plan.copies
               ? (struct copies){book, kvs_segment_copies(book, codes), n_coded}
               : (struct copies){0};
}

/* Scores n candidates at `from`, whose copies the blocks are, of one codebook. */
static void score_copies(struct kvs_query_pipeline *pipeline,
                         struct kvs_query_entry *entry,
                         const struct kvs_codebook *book,
                         const void *const *blocks,
                         uint32_t from,
                         uint32_t n)
{
    uint8_t rows[CUT_ROWS];

    for (uint32_t i = 0; i < n; i++)
        rows[i] = (uint8_t)(entry->candidates[from + i] % KV_BLOCK_TOKENS);
    round_queries(pipeline, entry, book);
    kv_key_copies_score_list(entry->score.d, blocks, rows, n, pipeline->rounded,
                             entry->score.n_queries, entry->scores + from, entry->n_candidates);
    entry->reads.copies += (uint64_t)n * (kv_key_copies_bytes(entry->score.d) / KV_PQ_TILE);
}

/* Of n candidates at `from`, finds the copies of the first ones: they are all of one codebook, or
 * all have none.  Returns their number.
 *   ret_blocks  (n) */
static uint32_t find_copies(const struct kvs_query_entry *entry,
                            uint32_t from,
                            uint32_t n,
                            const void **ret_blocks,
                            const struct kvs_codebook **ret_book)
{
    const uint32_t *tokens = entry->candidates + from;
    struct copies copies = {0};
    uint32_t block = UINT32_MAX;

    *ret_book = NULL;
    for (uint32_t i = 0; i < n; i++) {
        if (tokens[i] / KV_BLOCK_TOKENS != block) {
            block = tokens[i] / KV_BLOCK_TOKENS;
            copies = copies_of(entry, block);
        }
        const struct kvs_codebook *book =
            tokens[i] % KV_BLOCK_TOKENS < copies.n_rows ? copies.book : NULL;

        if (i == 0)
            *ret_book = book;
        else if (book != *ret_book)
            return i;
        ret_blocks[i] = copies.block;
    }
    return n;
}

/* Scores at most n_max of the entry's candidates in the span by their copies, those that have none
 * by their keys.  Returns their number; 0: one is bad. */
static uint32_t
cut(struct kvs_query_pipeline *pipeline, struct kvs_query_entry *entry, uint32_t n_max)
{
    const uint32_t n = n_in_span(pipeline, entry, n_max);
    const struct kvs_codebook *book;
    const void *blocks[CUT_ROWS];

    for (uint32_t i = 0, n_alike; i < n; i += n_alike) {
        n_alike = find_copies(entry, entry->cursor + i, n - i, blocks, &book);
        if (book != NULL)
            score_copies(pipeline, entry, book, blocks, entry->cursor + i, n_alike);
        else if (!score_keys(pipeline, entry, entry->cursor + i, n_alike))
            return 0;
    }
    if (entry->kept_scores != NULL)
        keep_scores(entry, n);
    entry->cursor += n;
    return n;
}

/* Moves on to the next entry that has candidates in the span, or to the next span.  Returns
 * false if all are scored. */
static bool next_in_span(struct kvs_query_pipeline *pipeline)
{
    while (pipeline->entry < pipeline->n_entries &&
           next_candidate(pipeline, kvs_query_current(pipeline)) >= pipeline->span_end)
        pipeline->entry++;
    if (pipeline->entry < pipeline->n_entries)
        return true;
    const uint32_t first = first_candidate(pipeline);
    if (first == UINT32_MAX)
        return false;
    pipeline->span_end = (first / SPAN_ROWS + 1) * SPAN_ROWS;
    pipeline->spans_read++;
    pipeline->entry = 0;
    return next_in_span(pipeline);
}

/* Returns how many rows are scored in a piece. */
static uint32_t piece_rows(const struct kvs_score *score, enum kvs_query_stage stage)
{
    const uint32_t products = stage == KVS_QUERY_CUT ? CUT_PRODUCTS : RERANK_PRODUCTS;
    const uint32_t most = stage == KVS_QUERY_CUT ? CUT_ROWS : RERANK_ROWS;
    const uint32_t n = products / (score->n_queries * score->d);

    return n < RERANK_ROWS_MIN ? RERANK_ROWS_MIN : n < most ? n : most;
}

/* Scores some candidates: those of all entries, span by span, in each span one entry after the
 * other.  Returns false if one is bad; *ret_done is true after the last. */
static bool spans_piece(struct kvs_query_pipeline *pipeline, bool *ret_done)
{
    uint32_t n_left = UINT32_MAX;

    *ret_done = false;
    while (next_in_span(pipeline)) {
        struct kvs_query_entry *entry = kvs_query_current(pipeline);

        if (n_left == 0)
            return true;
        if (n_left == UINT32_MAX)
            n_left = piece_rows(&entry->score, pipeline->stage);
        const uint32_t n = pipeline->stage == KVS_QUERY_CUT ? cut(pipeline, entry, n_left)
                                                            : rescore(pipeline, entry, n_left);
        if (n == 0)
            return false;
        n_left -= n;
        pipeline->spans_wanted += pipeline->span_end != UINT32_MAX &&
                                  next_candidate(pipeline, entry) >= pipeline->span_end;
    }
    *ret_done = true;
    return true;
}

bool kvs_query_stage_cut(struct kvs_query_pipeline *pipeline)
{
    bool done;

    if (!spans_piece(pipeline, &done))
        return false;
    if (!done)
        return true;
    for (uint32_t i = 0; i < pipeline->n_entries; i++)
        if (kvs_query_takes_part(&pipeline->entries[i], KVS_QUERY_CUT))
            pipeline->entries[i].n_scored = pipeline->entries[i].n_candidates;
    kvs_query_begin_select_cut(pipeline, 0);
    return true;
}

/* Reduces the candidates to those that were selected among them.  Returns their number. */
static uint32_t
keep_selected(struct kvs_query_pipeline *pipeline, struct kvs_query_entry *entry, bool weighs)
{
    /* Behind the selector's room. */
    const size_t n = entry->n_candidates;
    uint32_t *selected_by = (uint32_t *)(void *)(pipeline->floats + KVS_SELECT_CAPACITY * n);
    uint32_t *indices = selected_by + n;
    const uint32_t n_selected = kvs_select_rows(pipeline->selector, indices, selected_by);

    for (uint32_t i = 0; i < n_selected; i++) {
        if (weighs)
            entry->weights[i] = pipeline->selector->weights[indices[i]];
        entry->query_mask[i] = selected_by[i];
        entry->candidates[i] = entry->candidates[indices[i]];
    }
    entry->cursor = 0;
    return n_selected;
}

bool kvs_query_stage_select_cut(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = kvs_query_current(pipeline);

    if (!kvs_select_piece(pipeline->selector))
        return true;
    entry->n_candidates = entry->n_selected = keep_selected(pipeline, entry, false);
    kvs_query_begin_select_cut(pipeline, pipeline->entry + 1);
    return true;
}

/* Returns whether step 2 or 3 touches candidates. */
static bool touches_rows(const struct kvs_query_pipeline *pipeline,
                         const struct kvs_query_entry *entry)
{
    return entry->is_reranked || entry->input.query->answer != KV_ANSWER_IDS ||
           entry->input.named[pipeline->unit].n_ids > 0;
}

bool kvs_query_stage_need(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = kvs_query_current(pipeline);
    const struct kvs_query_input *input = &entry->input;

    if (touches_rows(pipeline, entry) &&
        !input->need(input->arg, pipeline->unit, entry->candidates, entry->n_candidates))
        entry->lacks_rows = true;
    kvs_query_begin_need(pipeline, pipeline->entry + 1);
    return true;
}

bool kvs_query_stage_rerank(struct kvs_query_pipeline *pipeline)
{
    bool done;

    if (!spans_piece(pipeline, &done))
        return false;
    if (!done)
        return true;
    for (uint32_t i = 0; i < pipeline->n_entries; i++) {
        struct kvs_query_entry *entry = &pipeline->entries[i];

        if (kvs_query_takes_part(entry, KVS_QUERY_RERANK) && !entry->is_cut)
            entry->n_scored = entry->n_candidates;
    }
    kvs_query_begin_step_3(pipeline, 0);
    return true;
}

bool kvs_query_stage_select(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = kvs_query_current(pipeline);

    if (!kvs_select_piece(pipeline->selector))
        return true;
    entry->n_selected = keep_selected(pipeline, entry, true);
    pipeline->stage = kvs_query_selected_stage(entry);
    return true;
}
