#include "kvserver/store/query/estimate.h"

#include "kvserver/store/index/encode.h"

#include <assert.h>
#include <math.h>
#include <string.h>

static_assert((int)KV_SUMMARY_ROWS_LEAST % (int)KV_BLOCK_TOKENS == 0 &&
                  (int)KV_SUMMARY_ROWS_MAX % (int)KV_BLOCK_TOKENS == 0,
              "a group is whole blocks");
static_assert((int)KV_BLOCK_TOKENS % (int)KV_SUMMARY_SLICE == 0, "a slice is in one block");

enum {
    PIECE_VECTORS = 8, /* query vectors of some groups together, or of one */
};

void kvs_estimate_begin(struct kvs_estimate *estimate, const struct kvs_estimate_input *input)
{
    const struct kv_attend_shape *shape = &input->shape;

    assert(input->score->n_ranges > 0 && shape->n_queries <= KV_QUERIES_MAX);
    estimate->input = *input;
    estimate->shape = (struct kv_summary_shape){.type = shape->type,
                                                .d_k = shape->d_k,
                                                .d_v = shape->d_v,
                                                .bits = input->bits,
                                                .rows = input->rows};
    estimate->range = estimate->at_selected = estimate->at_scored = 0;
    estimate->token = input->score->ranges[0].begin;
    estimate->n_pending = estimate->n_estimated = estimate->n_exact = 0;
    estimate->summaries_bytes = 0;
    estimate->bad = estimate->lost = UINT32_MAX;
    kvs_attention_begin(&estimate->attention, shape, input->score->unit, input->score->queries,
                        input->each);
    kv_estimate_begin(&estimate->shape, shape->n_queries, shape->scale, input->scores,
                      input->n_scored, input->n_scored, estimate->state);
    estimate->queries =
        kv_estimate_prepare(shape->d_k, input->score->queries, shape->n_queries,
                            estimate->elements, estimate->steps, estimate->squares);
    memset(estimate->marks, 0, sizeof(estimate->marks));
}

/* Returns how many of the next tokens, which ascend, are before `end`. */
static uint32_t n_before(const uint32_t *tokens, uint32_t n, uint32_t end)
{
    uint32_t i = 0;

    while (i < n && tokens[i] < end)
        i++;
    return i;
}

static uint32_t lower(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* ---- rows that have summaries ------------------------------------------------------------ */

static uint32_t blocks_of(const struct kvs_estimate *estimate)
{
    return estimate->shape.rows / KV_BLOCK_TOKENS;
}

/* Returns the codebook of a block that has summaries of this size; NULL: it has none. */
static const struct kvs_codebook *summarised_by(const struct kvs_codebooks *books,
                                                const struct kvs_unit *unit,
                                                uint32_t block,
                                                uint32_t bits,
                                                uint32_t rows)
{
    const struct kvs_codes *codes = kvs_unit_codes(unit, block);

    if (!codes->in_chapter)
        return NULL;
    const struct kvs_codebook *book = kvs_codebook_at(books, codes->codebook);
    const struct kvs_summaries *summaries = &book->summaries;

    return !book->is_broken &&
                   block - book->block_begin < summaries->n_rows / KV_BLOCK_TOKENS &&
                   kvs_summaries_are(summaries, bits, rows)
               ? book
               : NULL;
}

bool kvs_estimate_has(const struct kvs_codebooks *books,
                      const struct kvs_unit *unit,
                      uint32_t block,
                      uint32_t bits,
                      uint32_t rows)
{
    return summarised_by(books, unit, block, bits, rows) != NULL;
}

/* Returns the summaries of the group of a block, and the group's blocks; NULL: it has no
 * summaries of this size. */
static const uint8_t *group_of(const struct kvs_estimate *estimate,
                               const struct kvs_codebooks *books,
                               uint32_t block,
                               uint32_t *ret_begin,
                               uint32_t *ret_end)
{
    const struct kvs_codebook *book = summarised_by(books, estimate->input.score->unit, block,
                                                    estimate->shape.bits, estimate->shape.rows);

    if (book == NULL)
        return NULL;
    const uint32_t blocks = blocks_of(estimate);
    const uint32_t group = (block - book->block_begin) / blocks;

    *ret_begin = book->block_begin + group * blocks;
    *ret_end = lower(*ret_begin + blocks,
                     book->block_begin + book->summaries.n_rows / KV_BLOCK_TOKENS);
    return book->summaries.groups[group].bytes;
}

/* Verifies the summaries of the next eligible row's group.  If they are bad, the chapter has
 * lost all its summaries. */
static bool check_group(struct kvs_estimate *estimate, struct kvs_codebooks *books)
{
    const uint32_t block = estimate->token / KV_BLOCK_TOKENS;
    const uint32_t codebook = kvs_unit_codes(estimate->input.score->unit, block)->codebook;
    const struct kvs_codebook *book = kvs_codebook_at(books, codebook);

    if (kvs_codebook_verify_summaries(books, codebook,
                                      (block - book->block_begin) / blocks_of(estimate)))
        return true;
    estimate->lost = book->block_begin;
    return false;
}

/* Returns the summaries of the next eligible row's group, the group's first token, and the end
 * of its eligible rows; NULL: it has no summaries of this size. */
static const uint8_t *group_at(struct kvs_estimate *estimate,
                               struct kvs_codebooks *books,
                               uint32_t *ret_first,
                               uint32_t *ret_end)
{
    const struct kvs_score *score = estimate->input.score;
    const uint32_t block = estimate->token / KV_BLOCK_TOKENS;
    uint32_t begin, end;
    const uint8_t *group = group_of(estimate, books, block, &begin, &end);

    if (group == NULL || !check_group(estimate, books))
        return NULL;
    const struct kvs_codebook *book =
        kvs_codebook_at(books, kvs_unit_codes(score->unit, block)->codebook);
    *ret_first = begin * KV_BLOCK_TOKENS;
    *ret_end = lower(kvs_codebook_chapter_end(book, score->unit, block, end) * KV_BLOCK_TOKENS,
                     score->ranges[estimate->range].end);
    return group;
}

/* Returns the group after one whose eligible rows end at `end`, for prefetching, or NULL. */
static const uint8_t *group_behind(const struct kvs_estimate *estimate,
                                   const struct kvs_codebooks *books,
                                   uint32_t end)
{
    uint32_t next_begin, next_end;

    if (end == estimate->input.score->ranges[estimate->range].end)
        return NULL;
    return group_of(estimate, books, end / KV_BLOCK_TOKENS, &next_begin, &next_end);
}

/* Copies the scores of the group's rows that were scored, but for each query vector those of the
 * rows that it selected itself. */
static void copy_scores(struct kvs_estimate *estimate, uint32_t n, uint32_t n_selected)
{
    const struct kvs_estimate_input *input = &estimate->input;
    const uint32_t *scored = input->scored + estimate->at_scored;
    const uint32_t *selected = input->selected + estimate->at_selected;
    const uint32_t *query_mask = input->query_mask + estimate->at_selected;

    for (uint32_t q = 0; q < input->shape.n_queries; q++)
        memcpy(estimate->scores + (size_t)q * n,
               input->scores + (size_t)q * input->n_scored + estimate->at_scored,
               n * sizeof(float));
    for (uint32_t i = 0, at = 0; at < n_selected && i < n; i++) {
        if (selected[at] != scored[i])
            continue;
        for (uint32_t q = 0; q < input->shape.n_queries; q++)
            if (query_mask[at] >> q & 1)
                estimate->scores[(size_t)q * n + i] = -INFINITY;
        at++;
    }
}

/* Lists the group's rows that all query vectors of `mask` selected. */
static uint32_t selected_by(struct kvs_estimate *estimate, uint32_t n_selected, uint32_t mask)
{
    const struct kvs_estimate_input *input = &estimate->input;
    uint32_t n = 0;

    for (uint32_t i = estimate->at_selected; i < estimate->at_selected + n_selected; i++)
        if ((input->query_mask[i] & mask) == mask)
            estimate->own[n++] = input->selected[i];
    return n;
}

/* Counts rows for each query vector by itself: what it has not selected counts for it. */
static void count_each(struct kvs_estimate *estimate,
                       const uint8_t *group,
                       uint32_t first,
                       uint32_t end,
                       uint32_t n_selected)
{
    const struct kvs_estimate_input *input = &estimate->input;
    const size_t n_summaries = kv_summary_count(&estimate->shape);

    for (uint32_t q = 0; q < input->shape.n_queries; q++) {
        const uint32_t n_own = selected_by(estimate, n_selected, 1u << q);

        kv_estimate_count(&estimate->shape, group, first, estimate->token, end, estimate->own,
                          n_own, NULL, 0, estimate->marks, estimate->counts + q * n_summaries,
                          estimate->numbers);
    }
}

/* Adds the eligible rows of a group, up to `end`, by its summaries. */
static void add_group(struct kvs_estimate *estimate,
                      const uint8_t *group,
                      uint32_t first,
                      uint32_t end,
                      const uint8_t *next)
{
    const struct kvs_estimate_input *input = &estimate->input;
    const struct kv_summary_shape *shape = &estimate->shape;
    const uint32_t *selected = input->selected + estimate->at_selected;
    uint32_t n_selected = input->n_selected - estimate->at_selected, n_taken = n_selected;
    struct kv_estimate_input asked = {
        .queries = estimate->queries,
        .scale = input->shape.scale,
        .counts = estimate->counts,
        .numbers = estimate->numbers,
        .scores = input->scores + estimate->at_scored,
        .scores_stride = input->n_scored,
        .next = next,
    };

    if (input->each) { /* rows that a query vector has not selected count for it */
        n_selected = n_before(selected, n_selected, end);
        n_taken = selected_by(estimate, n_selected, UINT32_MAX >> (32 - asked.queries.n));
        selected = estimate->own;
    }
    const struct kv_estimate_counted counted = kv_estimate_count(
        shape, group, first, estimate->token, end, selected, n_taken,
        input->scored + estimate->at_scored, input->n_scored - estimate->at_scored,
        estimate->marks, estimate->counts, estimate->numbers);
    asked.n_scored = counted.n_scored;
    if (input->each && counted.n_scored > 0) {
        copy_scores(estimate, (uint32_t)counted.n_scored, n_selected);
        asked.scores = estimate->scores;
        asked.scores_stride = counted.n_scored;
    } else if (input->each && n_selected > 0) {
        count_each(estimate, group, first, end, n_selected);
        asked.counts_stride = kv_summary_count(shape);
    }
    kv_estimate_add(shape, group, &asked, estimate->state);
    estimate->summaries_bytes += kv_summary_bytes(shape);
    estimate->n_estimated += (uint32_t)counted.n_rows;
    estimate->at_selected += input->each ? n_selected : (uint32_t)counted.n_selected;
    estimate->at_scored += (uint32_t)counted.n_scored;
    estimate->token = end;
}

/* ---- rows that have none ----------------------------------------------------------------- */

/* Attends the pending rows. */
static void attend_pending(struct kvs_estimate *estimate, struct kvs_codebooks *books)
{
    for (uint32_t i = 0; i < estimate->n_pending; i++)
        kvs_attention_add(&estimate->attention, estimate->pending[i],
                          estimate->pending_query_mask[i]);
    estimate->n_exact += estimate->n_pending;
    estimate->n_pending = 0;
    estimate->bad = kvs_attention_piece(&estimate->attention, books->store);
}

/* Adds the next block's eligible rows, which have no summaries.  Returns true after attending a
 * full piece of them. */
static bool add_rows(struct kvs_estimate *estimate, struct kvs_codebooks *books)
{
    const struct kvs_estimate_input *input = &estimate->input;
    const uint32_t all = UINT32_MAX >> (32 - input->shape.n_queries);
    const uint32_t end = lower((estimate->token / KV_BLOCK_TOKENS + 1) * KV_BLOCK_TOKENS,
                               input->score->ranges[estimate->range].end);

    if (!kvs_unit_is_here(input->score->unit, estimate->token / KV_BLOCK_TOKENS)) {
        estimate->bad = estimate->token;
        return true;
    }
    while (estimate->token < end) {
        const uint32_t token = estimate->token++;
        uint32_t query_mask = all;

        if (estimate->at_selected < input->n_selected &&
            input->selected[estimate->at_selected] == token)
            query_mask = input->each ? all & ~input->query_mask[estimate->at_selected++]
                                     : (estimate->at_selected++, 0);
        if (estimate->at_scored < input->n_scored &&
            input->scored[estimate->at_scored] == token)
            estimate->at_scored++;
        if (query_mask == 0)
            continue;
        estimate->pending[estimate->n_pending] = token;
        estimate->pending_query_mask[estimate->n_pending++] = query_mask;
        if (estimate->n_pending == estimate->attention.piece_rows) {
            attend_pending(estimate, books);
            return true;
        }
    }
    return false;
}

bool kvs_estimate_piece(struct kvs_estimate *estimate, struct kvs_codebooks *books)
{
    const struct kvs_score *score = estimate->input.score;
    const uint32_t n_queries = estimate->input.shape.n_queries;
    uint32_t first, end, n_vectors = 0;

    while (estimate->range < score->n_ranges) {
        const uint8_t *group = group_at(estimate, books, &first, &end);
        bool is_full = false;

        if (group != NULL)
            add_group(estimate, group, first, end, group_behind(estimate, books, end));
        else
            is_full = add_rows(estimate, books);
        if (estimate->token == score->ranges[estimate->range].end &&
            ++estimate->range < score->n_ranges)
            estimate->token = score->ranges[estimate->range].begin;
        n_vectors += n_queries;
        if (is_full ||
            (n_vectors + n_queries > PIECE_VECTORS && estimate->range < score->n_ranges))
            return false;
    }
    attend_pending(estimate, books);
    return estimate->bad == UINT32_MAX;
}

void kvs_estimate_end(struct kvs_estimate *estimate,
                      bool merges,
                      float *ret_output,
                      float *ret_lse)
{
    const struct kv_attend_shape *shape = &estimate->input.shape;
    const float *const outputs[] = {estimate->outputs[0], estimate->outputs[1], ret_output};
    const float *const lses[] = {estimate->lses[0], estimate->lses[1], ret_lse};

    kv_estimate_end(&estimate->shape, shape->n_queries, estimate->state, estimate->outputs[0],
                    estimate->lses[0]);
    kvs_attention_end(&estimate->attention, estimate->outputs[1], estimate->lses[1]);
    kv_attend_merge(shape->n_queries, shape->d_v, merges ? 3 : 2, outputs, lses, ret_output,
                    ret_lse);
}
