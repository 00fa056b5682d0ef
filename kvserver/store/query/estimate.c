#include "kvserver/store/query/estimate.h"

#include <assert.h>
#include <math.h>

static_assert((int)KV_REST_ROWS % (int)KV_BLOCK_TOKENS == 0, "a group is whole blocks");
static_assert((int)KV_BLOCK_TOKENS % (int)KV_REST_SLICE == 0, "a slice is in one block");

enum {
    SLICE_US = 50,
    SLICE_STEPS = 32, /* where the clock stands still */
    CLOCK_STEPS = 8,  /* of some us each, with FEW_QUERIES at most: one look at it for all */
    FEW_QUERIES = 4,
};

void kv_remainder_begin(struct kv_remainder *remainder,
                        const struct kv_remainder_question *question)
{
    const struct kv_attend_shape *shape = &question->shape;

    assert(question->scan->n_ranges > 0 && shape->n_queries <= KV_QUERIES_MAX);
    remainder->question = *question;
    remainder->shape = (struct kv_rest_shape){
        .type = shape->type, .d_k = shape->d_k, .d_v = shape->d_v, .bits = question->bits};
    remainder->range = remainder->at_chosen = remainder->at_scored = 0;
    remainder->token = question->scan->ranges[0].begin;
    remainder->n_pending = remainder->n_rest = remainder->n_exact = 0;
    remainder->bad = remainder->lost = UINT32_MAX;
    kv_attention_begin(&remainder->attention, shape, question->scan->unit,
                       question->scan->queries, question->each);
    kv_rest_begin(&remainder->shape, shape->n_queries, remainder->state);
    kv_rest_squares(shape->d_k, question->scan->queries, shape->n_queries, remainder->squares);
}

/* How many of the next tokens, which ascend, are before `end`. */
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

/* The summaries of the group that a block of the unit is in, and which blocks that has; NULL:
 * there are none of that size. */
static const uint8_t *group_of(const struct kv_remainder *remainder,
                               const struct kv_codebooks *books,
                               uint32_t block,
                               uint32_t *ret_begin,
                               uint32_t *ret_end)
{
    const struct kv_segment *segment = remainder->question.scan->unit->segments[block];

    if (!segment->in_chapter)
        return NULL;
    const struct kv_codebook *book = kv_codebook_at(books, segment->codebook);
    const struct kv_summaries *summaries = &book->summaries;
    const uint32_t blocks = KV_REST_ROWS / KV_BLOCK_TOKENS;
    const uint32_t group = (block - book->block_begin) / blocks;
    const uint32_t begin = book->block_begin + group * blocks;
    const uint32_t end =
        lower(begin + blocks, book->block_begin + summaries->n_rows / KV_BLOCK_TOKENS);

    if (book->is_broken || block >= end || summaries->shape.bits != remainder->shape.bits)
        return NULL;
    *ret_begin = begin;
    *ret_end = end;
    return summaries->groups[group].bytes;
}

/* Whether the summaries of the next candidate's group are good: if not, the chapter has none
 * any more. */
static bool check_group(struct kv_remainder *remainder, struct kv_codebooks *books)
{
    const uint32_t block = remainder->token / KV_BLOCK_TOKENS;
    const uint32_t codebook = remainder->question.scan->unit->segments[block]->codebook;
    const struct kv_codebook *book = kv_codebook_at(books, codebook);

    if (kv_codebook_verify_summaries(
            books, codebook, (block - book->block_begin) / (KV_REST_ROWS / KV_BLOCK_TOKENS)))
        return true;
    remainder->lost = book->block_begin;
    return false;
}

/* The summaries of the group that the next candidate is in, its first token, and where
 * candidates of it end; NULL: there are none of that size. */
static const uint8_t *group_at(struct kv_remainder *remainder,
                               struct kv_codebooks *books,
                               uint32_t *ret_first,
                               uint32_t *ret_end)
{
    const struct kv_scan *scan = remainder->question.scan;
    const uint32_t block = remainder->token / KV_BLOCK_TOKENS;
    uint32_t begin, end;
    const uint8_t *group = group_of(remainder, books, block, &begin, &end);

    if (group == NULL || !check_group(remainder, books))
        return NULL;
    *ret_first = begin * KV_BLOCK_TOKENS;
    *ret_end = lower(kv_unit_chapter_end(scan->unit, block, end) * KV_BLOCK_TOKENS,
                     scan->ranges[remainder->range].end);
    return group;
}

/* The group behind one whose candidates end at `end`, to be fetched ahead; NULL: none. */
static const uint8_t *group_behind(const struct kv_remainder *remainder,
                                   const struct kv_codebooks *books,
                                   uint32_t end)
{
    uint32_t next_begin, next_end;

    if (end == remainder->question.scan->ranges[remainder->range].end)
        return NULL;
    return group_of(remainder, books, end / KV_BLOCK_TOKENS, &next_begin, &next_end);
}

/* The scores of rows scored and not taken, from their places. */
static void gather_scores(struct kv_remainder *remainder, uint32_t first_scored, uint32_t n)
{
    const struct kv_remainder_question *question = &remainder->question;
    const uint32_t *places = remainder->places;

    for (uint32_t q = 0; q < question->shape.n_queries; q++) {
        const float *from = question->scores + (size_t)q * question->n_scored + first_scored;
        float *to = remainder->scores + (size_t)q * n;

        for (uint32_t i = 0; i < n; i++)
            to[i] = from[places[i]];
    }
}

/* What a vector chose itself is not left over for it; a place is a row that not all chose. */
static void leave_out_own(struct kv_remainder *remainder,
                          uint32_t first_scored,
                          uint32_t n,
                          const uint32_t *chosen,
                          const uint32_t *among,
                          uint32_t n_chosen)
{
    const struct kv_remainder_question *question = &remainder->question;

    for (uint32_t i = 0, at = 0; i < n; i++) {
        const uint32_t token = question->scored[first_scored + remainder->places[i]];

        while (at < n_chosen && chosen[at] < token)
            at++;
        for (uint32_t q = 0; at < n_chosen && q < question->shape.n_queries; q++)
            if (chosen[at] == token && among[at] >> q & 1)
                remainder->scores[(size_t)q * n + i] = -INFINITY;
    }
}

/* Rows of the group that the vectors in `mask` chose, all of them. */
static uint32_t chosen_by(struct kv_remainder *remainder,
                          const uint32_t *chosen,
                          const uint32_t *among,
                          uint32_t n_chosen,
                          uint32_t mask)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < n_chosen; i++)
        if ((among[i] & mask) == mask)
            remainder->own[n++] = chosen[i];
    return n;
}

static uint32_t sum_of(const uint16_t *counts, size_t n)
{
    uint32_t sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += counts[i];
    return sum;
}

/* The candidates of a group, to `end`, by its summaries. */
static void add_group(struct kv_remainder *remainder,
                      const uint8_t *group,
                      uint32_t first,
                      uint32_t end,
                      const uint8_t *next)
{
    const struct kv_remainder_question *question = &remainder->question;
    const struct kv_rest_shape *shape = &remainder->shape;
    const uint32_t n_queries = question->shape.n_queries;
    const uint32_t *chosen = question->chosen + remainder->at_chosen;
    const uint32_t *among = question->among + remainder->at_chosen;
    const uint32_t *scored = question->scored + remainder->at_scored;
    const uint32_t n_chosen = n_before(chosen, question->n_chosen - remainder->at_chosen, end);
    const uint32_t n_scored = n_before(scored, question->n_scored - remainder->at_scored, end);
    const size_t n_summaries = kv_rest_n_summaries(shape);
    const uint32_t all = UINT32_MAX >> (32 - n_queries);
    const uint32_t *taken = chosen;
    uint32_t n_taken = n_chosen;
    const bool counts_differ = question->each && n_scored == 0 && n_chosen > 0;
    struct kv_rest_question asked = {
        .queries = question->scan->queries,
        .squares = remainder->squares,
        .n_queries = n_queries,
        .scale = question->shape.scale,
        .counts = remainder->counts,
        .numbers = remainder->numbers,
        .scores = remainder->scores,
        .next = next,
    };

    if (question->each) { /* what one vector has not chosen is left over */
        taken = remainder->own;
        n_taken = chosen_by(remainder, chosen, among, n_chosen, all);
    }
    asked.n_scored = asked.scores_stride =
        kv_rest_count(shape, group, first, remainder->token, end, taken, n_taken, scored,
                      n_scored, remainder->counts, remainder->places, remainder->numbers);
    remainder->n_rest += sum_of(remainder->counts, n_summaries) + (uint32_t)asked.n_scored;
    gather_scores(remainder, remainder->at_scored, (uint32_t)asked.n_scored);
    if (question->each)
        leave_out_own(remainder, remainder->at_scored, (uint32_t)asked.n_scored, chosen, among,
                      n_chosen);
    for (uint32_t q = 0; counts_differ && q < n_queries; q++) {
        n_taken = chosen_by(remainder, chosen, among, n_chosen, 1u << q);
        kv_rest_count(shape, group, first, remainder->token, end, remainder->own, n_taken, NULL,
                      0, remainder->counts + q * n_summaries, remainder->places,
                      remainder->numbers);
    }
    asked.counts_stride = counts_differ ? n_summaries : 0;
    kv_rest_add(shape, group, &asked, remainder->state);
    remainder->at_chosen += n_chosen;
    remainder->at_scored += n_scored;
    remainder->token = end;
}

/* Rows that wait to be attended. */
static void attend_pending(struct kv_remainder *remainder, struct kv_codebooks *books)
{
    for (uint32_t i = 0; i < remainder->n_pending; i++)
        kv_attention_add(&remainder->attention, remainder->pending[i],
                         remainder->pending_among[i]);
    remainder->n_exact += remainder->n_pending;
    remainder->n_pending = 0;
    remainder->bad = kv_attention_slice(&remainder->attention, books->heap);
}

/* Candidates of the next block that have no summaries; true: a slice of them has been
 * attended. */
static bool add_rows(struct kv_remainder *remainder, struct kv_codebooks *books)
{
    const struct kv_remainder_question *question = &remainder->question;
    const uint32_t all = UINT32_MAX >> (32 - question->shape.n_queries);
    const uint32_t end = lower((remainder->token / KV_BLOCK_TOKENS + 1) * KV_BLOCK_TOKENS,
                               question->scan->ranges[remainder->range].end);

    while (remainder->token < end) {
        const uint32_t token = remainder->token++;
        uint32_t among = all;

        if (remainder->at_chosen < question->n_chosen &&
            question->chosen[remainder->at_chosen] == token)
            among = question->each ? all & ~question->among[remainder->at_chosen++]
                                   : (remainder->at_chosen++, 0);
        if (remainder->at_scored < question->n_scored &&
            question->scored[remainder->at_scored] == token)
            remainder->at_scored++;
        if (among == 0)
            continue;
        remainder->pending[remainder->n_pending] = token;
        remainder->pending_among[remainder->n_pending++] = among;
        if (remainder->n_pending == remainder->attention.slice_rows) {
            attend_pending(remainder, books);
            return true;
        }
    }
    return false;
}

bool kv_remainder_slice(struct kv_remainder *remainder,
                        struct kv_codebooks *books,
                        const struct kv_clock *clock)
{
    const struct kv_scan *scan = remainder->question.scan;
    const uint32_t n_queries = remainder->question.shape.n_queries;
    const uint32_t clock_steps = n_queries <= FEW_QUERIES ? CLOCK_STEPS : 1;
    const uint64_t end_us = kv_clock_now(clock) + SLICE_US;
    uint32_t first, end;

    for (uint32_t step = 0; remainder->range < scan->n_ranges; step++) {
        if (step == SLICE_STEPS ||
            (step > 0 && step % clock_steps == 0 && kv_clock_now(clock) >= end_us))
            return false;
        const uint8_t *group = group_at(remainder, books, &first, &end);
        bool is_full = false;

        if (group != NULL)
            add_group(remainder, group, first, end, group_behind(remainder, books, end));
        else
            is_full = add_rows(remainder, books);
        if (remainder->token == scan->ranges[remainder->range].end &&
            ++remainder->range < scan->n_ranges)
            remainder->token = scan->ranges[remainder->range].begin;
        if (is_full)
            return false;
    }
    attend_pending(remainder, books);
    return remainder->bad == UINT32_MAX;
}

void kv_remainder_end(struct kv_remainder *remainder,
                      bool merges,
                      float *ret_output,
                      float *ret_lse)
{
    const struct kv_attend_shape *shape = &remainder->question.shape;
    const float *const outputs[] = {remainder->outputs[0], remainder->outputs[1], ret_output};
    const float *const lses[] = {remainder->lses[0], remainder->lses[1], ret_lse};

    kv_rest_end(&remainder->shape, shape->n_queries, remainder->state, remainder->outputs[0],
                remainder->lses[0]);
    kv_attention_end(&remainder->attention, remainder->outputs[1], remainder->lses[1]);
    kv_attend_merge(shape->n_queries, shape->d_v, merges ? 3 : 2, outputs, lses, ret_output,
                    ret_lse);
}
