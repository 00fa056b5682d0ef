/* Some rows of a run, group by group, so that tokens ascend.  One group's rows are written at
 * once; those of several groups are marked first, a bit for each group, and then written in
 * order. */
#include "kvserver/store/query/expand.h"

#include "kvserver/store/index/scorer.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    PIECE_ROWS = 32 << 10,
};

struct kvs_expander *kvs_expander_create(uint32_t rows_max)
{
    struct kvs_expander *expander = calloc(1, sizeof(*expander));

    if (expander == NULL)
        return NULL;
    expander->rows_max = rows_max < KVS_EXPAND_ROWS_MAX ? rows_max : KVS_EXPAND_ROWS_MAX;
    expander->rows =
        calloc((size_t)expander->rows_max + KV_TOPK_SPARE, sizeof(*expander->rows));
    expander->marks = calloc(expander->rows_max, sizeof(*expander->marks));
    expander->above = calloc(KVS_EXPAND_ROWS_MAX / 64, sizeof(*expander->above));
    expander->at_bound = calloc(KVS_EXPAND_ROWS_MAX / 64, sizeof(*expander->at_bound));
    if (expander->rows == NULL || expander->marks == NULL || expander->above == NULL ||
        expander->at_bound == NULL) {
        kvs_expander_destroy(expander);
        return NULL;
    }
    return expander;
}

void kvs_expander_destroy(struct kvs_expander *expander)
{
    if (expander == NULL)
        return;
    free(expander->rows);
    free(expander->marks);
    free(expander->above);
    free(expander->at_bound);
    free(expander);
}

void kvs_expand_begin(struct kvs_expander *expander,
                      const struct kvs_score *score,
                      struct kvs_selector *selector,
                      uint32_t *tokens,
                      uint32_t *query_masks)
{
    expander->score = score;
    expander->selector = selector;
    expander->tokens = tokens;
    expander->query_masks = query_masks;
    expander->n = expander->run = expander->done = expander->group = 0;
    memset(expander->n_of, 0, sizeof(expander->n_of));
    expander->n_max = kvs_selection_max(&selector->selection, score->n);
}

/* Lists the rows of the group's selected cells, relative to the run's first row. */
static size_t expand_cells(struct kvs_expander *expander,
                           const struct kvs_codebooks *books,
                           const struct kvs_score_run *run,
                           uint32_t group)
{
    const struct kvs_codebook *book = kvs_codebook_at(books, run->codebook);
    const uint32_t first = book->block_begin * KV_BLOCK_TOKENS;
    const uint32_t begin = run->token_begin - first, end = run->token_end - first;
    const uint32_t *counts = expander->score->counts + run->item;
    const float *scores = kvs_selector_scores(expander->selector, group) + run->item;
    struct kv_topk *topk = &expander->selector->groups[group];
    const uint32_t n_cells = run->n_items;
    uint32_t above[KV_CELLS_MAX + KV_TOPK_SPARE], equal[KV_CELLS_MAX + KV_TOPK_SPARE];
    size_t n_above, n_equal;

    /* Cells above the bound give all their rows.  Those at the bound share what is left of k:
     * the lowest rows first, whatever their cells, as if rows had been scored one by one. */
    kv_topk_items(topk, scores, counts, n_cells, above, &n_above, equal, &n_equal);
    book->scorer->mark_items(book, above, n_above, begin, end, expander->above);
    if (topk->ties > 0 && n_equal > 0) {
        book->scorer->mark_items(book, equal, n_equal, begin, end, expander->at_bound);
        const size_t n_ties =
            kv_bits_take(expander->at_bound, begin / 64 * 64, end, topk->ties, expander->rows);

        topk->ties -= n_ties;
        for (size_t i = 0; i < n_ties; i++)
            expander->above[expander->rows[i] / 64] |= (uint64_t)1 << expander->rows[i] % 64;
    }
    /* Taking bits clears them, which leaves the arrays empty for the next group. */
    const size_t n =
        kv_bits_take(expander->above, begin / 64 * 64, end, expander->rows_max, expander->rows);
    for (size_t i = 0; i < n; i++)
        expander->rows[i] -= begin;
    return n;
}

/* Adds the n rows, listed from `begin` on, that the only group has selected. */
static void add_selected(struct kvs_expander *expander, uint32_t begin, size_t n)
{
    const bool merges = kvs_selection_merges(&expander->selector->selection);

    for (size_t i = 0; i < n && expander->n < expander->n_max; i++) {
        expander->query_masks[expander->n] = merges ? UINT32_MAX : 1;
        expander->tokens[expander->n++] = begin + expander->rows[i];
    }
}

/* Adds the rows from `begin` on that any group has selected. */
static void add_marked(struct kvs_expander *expander, uint32_t begin, uint32_t n_rows)
{
    for (uint32_t i = 0; i < n_rows; i++) {
        if (expander->marks[i] == 0 || expander->n == expander->n_max)
            continue;
        expander->query_masks[expander->n] = expander->marks[i];
        expander->tokens[expander->n++] = begin + i;
    }
}

bool kvs_expand_piece(struct kvs_expander *expander, const struct kvs_codebooks *books)
{
    const struct kvs_score_run *run = &expander->score->runs[expander->run];
    const bool is_cells = run->codebook != KVS_SCORE_ROWS;
    const uint32_t n_groups = kvs_selection_groups(&expander->selector->selection);
    const uint32_t begin = run->token_begin + expander->done, group = expander->group;
    uint32_t n_rows = run->token_end - begin;

    /* A chapter's cells are not divided: their rows are not in order. */
    if (!is_cells && n_rows > PIECE_ROWS)
        n_rows = PIECE_ROWS;
    assert(n_rows <= expander->rows_max);
    if (n_groups > 1 && group == 0)
        memset(expander->marks, 0, n_rows * sizeof(*expander->marks));
    const size_t n = is_cells ? expand_cells(expander, books, run, group)
                              : kv_topk_collect(&expander->selector->groups[group],
                                                kvs_selector_scores(expander->selector, group) +
                                                    run->item + expander->done,
                                                NULL, n_rows, 0, expander->rows);

    expander->n_of[group] += (uint32_t)n;
    for (size_t i = 0; n_groups > 1 && i < n; i++)
        expander->marks[expander->rows[i]] |= 1u << group;
    if (++expander->group < n_groups)
        return false;
    expander->group = 0;
    if (n_groups > 1)
        add_marked(expander, begin, n_rows);
    else
        add_selected(expander, begin, n);
    expander->done += n_rows;
    if (run->token_begin + expander->done == run->token_end) {
        expander->run++;
        expander->done = 0;
    }
    return expander->run == expander->score->n_runs;
}

bool kvs_expand_is_whole(const struct kvs_expander *expander)
{
    const struct kvs_selector *selector = expander->selector;

    for (uint32_t group = 0; group < kvs_selection_groups(&selector->selection); group++) {
        const uint32_t n_candidates =
            kvs_selection_n_candidates(&selector->selection, selector->k[group]);

        if (expander->n_of[group] !=
            (n_candidates < expander->score->n ? n_candidates : expander->score->n))
            return false;
    }
    return true;
}

/* Items of n tokens of one segment in such a run.  While the query waited, the unit may have
 * got a copy of its last segment to write behind what that was filled to, and the copy has no
 * codes, or other ones: what those of the key would be is found out again. */
static void items_of(const struct kvs_score *score,
                     const struct kvs_codebooks *books,
                     const struct kvs_score_run *run,
                     const uint32_t *tokens,
                     uint32_t n,
                     uint32_t *ret_items)
{
    const struct kvs_codebook *book = kvs_codebook_at(books, run->codebook);
    const struct kvs_codes *codes = kvs_unit_codes(score->unit, tokens[0] / KV_BLOCK_TOKENS);
    float key[KVS_CODEBOOK_DIM_MAX];
    uint32_t n_coded = 0;

    while (codes->column.bytes != NULL && codes->codebook == run->codebook && n_coded < n &&
           tokens[n_coded] % KV_BLOCK_TOKENS < codes->n_coded)
        n_coded++;
    if (n_coded > 0)
        book->scorer->row_items(book, codes->column.bytes, tokens, n_coded, ret_items);
    assert(n_coded == n || kvs_unit_is_here(score->unit, tokens[0] / KV_BLOCK_TOKENS));
    for (uint32_t i = n_coded; i < n; i++) {
        kv_exact_scores_load(score->type, kvs_unit_row(score->unit, tokens[i]),
                             score->unit->row_bytes, 1, book->shape.d, key);
        ret_items[i] = book->scorer->key_item(book, key);
    }
}

/* Of ascending tokens, from the first one on, those of its segment that are before `end`. */
static uint32_t n_of_segment(const uint32_t *tokens, uint32_t n, uint32_t end)
{
    const uint32_t segment_end = (tokens[0] / KV_BLOCK_TOKENS + 1) * KV_BLOCK_TOKENS;
    uint32_t n_in = 1;

    while (n_in < n && tokens[n_in] < segment_end && tokens[n_in] < end)
        n_in++;
    return n_in;
}

void kvs_expand_weights(const struct kvs_score *score,
                        const struct kvs_selector *selector,
                        const struct kvs_codebooks *books,
                        const uint32_t *tokens,
                        uint32_t n,
                        float *ret_weights)
{
    const struct kvs_score_run *run = score->runs;

    for (uint32_t i = 0, n_in; i < n; i += n_in) {
        uint32_t items[KV_BLOCK_TOKENS];

        while (tokens[i] >= run->token_end)
            run++;
        n_in = n_of_segment(tokens + i, n - i, run->token_end);
        if (run->codebook != KVS_SCORE_ROWS)
            items_of(score, books, run, tokens + i, n_in, items);
        for (uint32_t j = 0; j < n_in; j++)
            ret_weights[i + j] =
                selector->weights[run->item + (run->codebook != KVS_SCORE_ROWS
                                                   ? items[j]
                                                   : tokens[i + j] - run->token_begin)];
    }
}
