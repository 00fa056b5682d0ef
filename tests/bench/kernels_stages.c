/* A layer's query as a storage node answers it, stage by stage, with the store's own code: 8 KV
 * heads of 4 query heads, d = 128, fp16.  1,024 rows of each head are attended, selected by
 * exact scores from 4 or 8 times as many candidates, and all others are estimated by their
 * summaries.
 *
 *   score       scores all eligible rows by code: all tokens except 4 sinks and the last 64
 *   candidates  merges the softmax weights of four query heads, finds the bound of the
 *               candidates
 *   expand      lists the candidates' rows
 *   rerank      scores them exactly, and keeps the scores for the estimate
 *   select      selects the best by these scores
 *   attend      computes attention over the selected rows, and verifies them
 *   estimate    estimates all other rows, by 16 summaries per 1,024 rows, or per 3,072 (`group`)
 *   sum         all of these for one head;  layer: for all heads
 *
 * Two forms: chapters of 128 blocks, scored and selected by cells, and of 8 blocks, by rows.
 *
 * Heads are queried in turn, with other vectors in each layer, so data is cold if a layer's
 * rows exceed the caches.  A key is one of some hundred centers plus noise as long as a center;
 * few centers have most of the rows.  Cells are therefore uneven: fewer than half of the 4,096
 * cells of a long chapter have rows.  Each query vector is near a center of its own.
 * Neighboring rows are independent, so selected rows are isolated as far as their number
 * allows.
 *
 * The best run of each record counts, so a sum may exceed the sum of its stages.  Not included:
 * the request's transport, ids in the result, and recall, which a node samples. */
#include "tests/bench/kernels.h"

#include "kernels/checksum.h"
#include "kvserver/base/random.h"
#include "kvserver/store/index/builder.h"
#include "kvserver/store/index/scorer.h"
#include "kvserver/store/query/estimate.h"
#include "kvserver/store/query/expand.h"
#include "kvserver/store/query/selection.h"
#include "kvserver/store/rows/verify.h"
#include "tests/support/lone_unit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEADS = 8,
    QUERIES = 4, /* query heads of each */
    D = 128,
    ROW_BYTES = 4 * D,
    TOKENS_MAX = 128 << 10,
    SINKS = 4,
    WINDOW = 64,
    K = 1024,
    RERANK_MAX = 8,
    CANDIDATES_MAX = RERANK_MAX * K,
    RERANK_ROWS = 128, /* of a piece */
    N_CENTERS = 300,
    NOISE = 1 << 16,
    LAYERS = 16, /* different questions */
    ITERATIONS = 4,
};
static_assert(CANDIDATES_MAX <= (int)KV_SELECTED_MAX, "candidates that a query may have");

static const struct kv_pq_shape codes = {D, 2, 6};
static const struct kv_attend_shape attending = {KV_KEY_FP16, D, D, QUERIES, 0.08838835f};

enum stage {
    STAGE_SCORE,
    STAGE_CANDIDATES,
    STAGE_EXPAND,
    STAGE_RERANK,
    STAGE_SELECT,
    STAGE_ATTEND,
    STAGE_ESTIMATE,
    N_STAGES,
    SUM = N_STAGES,
    LAYER,
    N_RECORDS,
};
static const char *const names[N_RECORDS] = {
    "kernels.stages.score",    "kernels.stages.candidates", "kernels.stages.expand",
    "kernels.stages.rerank",   "kernels.stages.select",     "kernels.stages.attend",
    "kernels.stages.estimate", "kernels.stages.sum",        "kernels.stages.layer",
};

/* The store of a node, and the state of its query. */
struct stages {
    struct kernels *kernels;
    struct kvs_arena *arena;
    struct kvs_segment_store heap;
    struct kvs_codebooks codebooks;
    bool has_heap;
    struct kvs_indexer *indexer;
    struct kvs_unit units[HEADS];
    unsigned n_heads; /* HEADS, but for a smoke run */
    uint32_t n_tokens;
    uint32_t summary_rows; /* of a group */
    float *centers;        /* (HEADS, N_CENTERS, D) */
    float *noise;          /* (NOISE + D) */
    float *queries;        /* (LAYERS, HEADS, QUERIES, D) */

    struct kvs_selection candidates, selection; /* of steps 1 and 2 */
    struct kv_wire_range range;
    struct kvs_score scan;
    struct kvs_score_run *runs;
    struct kvs_selector *selector;
    struct kvs_expander *expander;
    struct kvs_attention *attention;
    struct kvs_estimate *remainder;
    float *room, *tables;
    size_t room_floats;
    float *kept;                  /* (QUERIES, CANDIDATES_MAX) exact scores */
    uint32_t *rows, *query_masks; /* (CANDIDATES_MAX) */
    uint32_t *indices, *scored;   /* (CANDIDATES_MAX) */
    float output[QUERIES * D], lse[QUERIES];

    unsigned record;          /* that is measured */
    double seconds[N_STAGES]; /* of a layer */
    const char *fault;        /* NULL: answers were as they should be */
};

/* ---- a head's query, as ops/query.c goes through it -------------------------------------- */

static void score(struct stages *stages, struct kvs_unit *unit, const float *queries)
{
    stages->scan = (struct kvs_score){
        .unit = unit,
        .type = KV_KEY_FP16,
        .d = D,
        .ranges = &stages->range,
        .n_ranges = 1,
        .n_queries = QUERIES,
        .queries = queries,
        .by_code = true,
        .by_cell = true,
        .n = kvs_ranges_count(&stages->range, 1),
        .room = stages->room,
        .room_floats = stages->room_floats,
        .runs = stages->runs,
        .tables = stages->tables,
    };
    kvs_score_begin(&stages->scan, &stages->codebooks);
    while (!kvs_score_piece(&stages->scan, &stages->codebooks))
        ;
}

static void select_candidates(struct stages *stages)
{
    const struct kvs_score *scan = &stages->scan;

    kvs_select_begin(stages->selector, &stages->candidates, scan->scores, scan->maxima,
                     scan->counts, NULL, scan->n_items, false,
                     scan->scores + (size_t)scan->n_items * QUERIES);
    while (!kvs_select_piece(stages->selector))
        ;
}

static void expand(struct stages *stages)
{
    kvs_expand_begin(stages->expander, &stages->scan, stages->selector, stages->rows,
                     stages->query_masks);
    while (!kvs_expand_piece(stages->expander, &stages->codebooks))
        ;
}

static void rerank(struct stages *stages)
{
    const struct kvs_score *scan = &stages->scan;
    const uint32_t n_candidates = stages->expander->n;

    for (uint32_t at = 0, n; at < n_candidates; at += n) {
        const void *keys[RERANK_ROWS];

        n = n_candidates - at < RERANK_ROWS ? n_candidates - at : RERANK_ROWS;
        for (uint32_t i = 0; i < n; i++)
            keys[i] = kvs_unit_row(scan->unit, stages->rows[at + i]);
        kv_exact_scores_score_list(scan->type, keys, n, D, scan->queries, QUERIES,
                                   stages->room + at, n_candidates);
        for (uint32_t q = 0; q < QUERIES; q++)
            memcpy(stages->kept + (size_t)q * n_candidates + at,
                   stages->room + (size_t)q * n_candidates + at, n * sizeof(float));
        memcpy(stages->scored + at, stages->rows + at, n * sizeof(uint32_t));
    }
}

/* Returns the number of selected rows, which replace the candidates in `rows`. */
static uint32_t select_rows(struct stages *stages)
{
    const uint32_t n_candidates = stages->expander->n;
    uint32_t n_selected;

    kvs_select_begin(stages->selector, &stages->selection, stages->room, NULL, NULL, NULL,
                     n_candidates, false, stages->room + (size_t)n_candidates * QUERIES);
    while (!kvs_select_piece(stages->selector))
        ;
    n_selected = kvs_select_rows(stages->selector, stages->indices, stages->query_masks);
    for (uint32_t i = 0; i < n_selected; i++)
        stages->rows[i] = stages->rows[stages->indices[i]];
    return n_selected;
}

static void attend(struct stages *stages, uint32_t n_selected)
{
    uint32_t bad = UINT32_MAX;

    kvs_attention_begin(stages->attention, &attending, stages->scan.unit, stages->scan.queries,
                        false);
    for (uint32_t i = 0; i < n_selected && bad == UINT32_MAX; i++)
        if (kvs_attention_add(stages->attention, stages->rows[i], stages->query_masks[i]))
            bad = kvs_attention_piece(stages->attention, &stages->heap);
    if (bad == UINT32_MAX)
        bad = kvs_attention_piece(stages->attention, &stages->heap);
    if (bad != UINT32_MAX)
        stages->fault = "a row fails its checksum";
    kvs_attention_end(stages->attention, stages->output, stages->lse);
}

static void estimate(struct stages *stages, uint32_t n_selected)
{
    const struct kvs_estimate_input question = {
        .score = &stages->scan,
        .shape = attending,
        .bits = KV_SUMMARY_16,
        .rows = stages->summary_rows,
        .selected = stages->rows,
        .query_mask = stages->query_masks,
        .n_selected = n_selected,
        .scored = stages->scored,
        .scores = stages->kept,
        .n_scored = stages->expander->n,
    };

    kvs_estimate_begin(stages->remainder, &question);
    while (!kvs_estimate_piece(stages->remainder, &stages->codebooks))
        ;
    kvs_estimate_end(stages->remainder, true, stages->output, stages->lse);
}

/* The stage's time ends, the next one's begins. */
static void lap(struct stages *stages, enum stage stage, double *at)
{
    const double now = kernels_now();

    stages->seconds[stage] += now - *at;
    *at = now;
}

static void answer(struct stages *stages, struct kvs_unit *unit, const float *queries)
{
    double at = kernels_now();
    uint32_t n_selected;

    score(stages, unit, queries);
    lap(stages, STAGE_SCORE, &at);
    select_candidates(stages);
    lap(stages, STAGE_CANDIDATES, &at);
    expand(stages);
    lap(stages, STAGE_EXPAND, &at);
    rerank(stages);
    lap(stages, STAGE_RERANK, &at);
    n_selected = select_rows(stages);
    lap(stages, STAGE_SELECT, &at);
    attend(stages, n_selected);
    lap(stages, STAGE_ATTEND, &at);
    estimate(stages, n_selected);
    lap(stages, STAGE_ESTIMATE, &at);

    if (stages->expander->n != stages->candidates.factor * K || n_selected != K)
        stages->fault = "candidates or selected rows: not as many as requested";
    else if (stages->remainder->n_estimated != stages->scan.n - K ||
             stages->remainder->n_exact != 0)
        stages->fault = "rows estimated: not all that were not selected";
    else if (stages->scan.n_coded != stages->scan.n)
        stages->fault = "rows without codes";
    for (uint32_t q = 0; q < QUERIES; q++)
        if (!isfinite(stages->lse[q]))
            stages->fault = "a log-sum-exp that is not finite";
}

static double layer(void *arg, size_t i)
{
    struct stages *stages = arg;
    const float *queries = stages->queries + i % LAYERS * (HEADS * QUERIES * D);
    double sum = 0;

    memset(stages->seconds, 0, sizeof(stages->seconds));
    for (unsigned head = 0; head < stages->n_heads; head++)
        answer(stages, &stages->units[head], queries + (size_t)head * QUERIES * D);
    for (unsigned stage = 0; stage < N_STAGES; stage++)
        sum += stages->seconds[stage];
    return stages->record == LAYER ? sum
           : stages->record == SUM ? sum / stages->n_heads
                                   : stages->seconds[stages->record] / stages->n_heads;
}

/* ---- data -------------------------------------------------------------------------------- */

/* Of a number that is neither too large for fp16 nor no number; the nearest, halves away from
 * zero; tiny ones are 0. */
static uint16_t half_of(float value)
{
    const uint32_t bias = 112u << 23; /* between the exponents' */
    uint32_t bits, magnitude;

    memcpy(&bits, &value, sizeof(bits));
    magnitude = (bits & 0x7fffffff) + 0x1000;
    return (uint16_t)((bits >> 16 & 0x8000) |
                      (magnitude < bias + (1u << 23) ? 0 : (magnitude - bias) >> 13));
}

static const float *centre_at(const struct stages *stages, unsigned head, uint32_t center)
{
    return stages->centers + ((size_t)head * N_CENTERS + center) * D;
}

static void fill_rows(const struct stages *stages, unsigned head)
{
    const struct kernels *kernels = stages->kernels;
    struct kv_random random;

    kv_random_init(&random, head + 1);
    for (uint32_t token = 0; token < stages->n_tokens; token++) {
        uint8_t *row = kvs_unit_row(&stages->units[head], token);
        const double place = (double)kv_random_below(&random, NOISE) / NOISE;
        const float *center = centre_at(stages, head, (uint32_t)(place * place * N_CENTERS));
        const float *noise = stages->noise + kv_random_below(&random, NOISE);
        const size_t at = ((size_t)head * stages->n_tokens + token) * (ROW_BYTES / 2);
        uint16_t key[D];

        for (uint32_t i = 0; i < D; i++)
            key[i] = half_of(center[i] + noise[i]);
        memcpy(row, key, sizeof(key));
        memcpy(row + sizeof(key), kernels->from + at % kernels->bytes, ROW_BYTES / 2);
    }
}

/* As whoever wrote them would have. */
static void seal_rows(struct kvs_unit *unit, uint32_t n_tokens)
{
    const struct kvs_row_set rows = kvs_unit_rows(unit);

    for (uint32_t token = 0; token < n_tokens; token++) {
        uint32_t seed;

        kvs_verify_seeds(&rows, &token, 1, &seed);
        *kvs_unit_crc(unit, token) = kv_crc32c(seed, kvs_unit_row(unit, token), ROW_BYTES);
    }
}

static void fill_queries(const struct stages *stages)
{
    struct kv_random random;

    kv_random_init(&random, 23);
    for (size_t i = 0; i < (size_t)LAYERS * HEADS * QUERIES; i++) {
        const unsigned head = i / QUERIES % HEADS;
        const float *center =
            centre_at(stages, head, (uint32_t)kv_random_below(&random, N_CENTERS));
        const float *noise = stages->noise + kv_random_below(&random, NOISE);

        for (uint32_t j = 0; j < D; j++)
            stages->queries[i * D + j] = 0.5f * center[j] + 0.5f * noise[j];
    }
}

static void close_units(struct stages *stages)
{
    if (stages->has_heap) {
        for (unsigned head = 0; head < stages->n_heads; head++)
            if (stages->units[head].row_bytes > 0)
                lone_unit_clear(&stages->units[head]);
        kvs_indexer_destroy(stages->indexer);
        kvs_codebooks_fini(&stages->codebooks);
    }
    if (stages->arena != NULL)
        kvs_arena_destroy(stages->arena);
    memset(stages->units, 0, sizeof(stages->units));
    stages->arena = NULL;
    stages->indexer = NULL;
    stages->has_heap = false;
}

/* One thread's units, indexed.  false: no memory, said; close_units() all the same. */
static bool open_units(struct stages *stages, uint32_t chapter_blocks)
{
    const uint64_t rows_bytes = (uint64_t)stages->n_tokens * ROW_BYTES * stages->n_heads;
    const struct kvs_index_plan plan = {
        .chapter_blocks = chapter_blocks,
        .shape = codes,
        .type = KV_KEY_FP16,
        .d_v = D,
        .summaries_bits = KV_SUMMARY_16,
        .summaries_rows = stages->summary_rows,
        .iterations = ITERATIONS,
        .seed = 1,
    };
    bool is_good;

    stages->arena = kvs_arena_create(2 * rows_bytes + (64 << 20));
    stages->has_heap = stages->arena != NULL &&
                       kvs_segment_store_init(&stages->heap, stages->arena) &&
                       kvs_codebooks_init(&stages->codebooks, &stages->heap);
    if (stages->has_heap)
        stages->indexer = kvs_indexer_create(&stages->codebooks, &kv_clock_real, 1);
    is_good = stages->indexer != NULL;
    for (unsigned head = 0; is_good && head < stages->n_heads; head++) {
        struct kvs_unit *unit = &stages->units[head];

        is_good = lone_unit_init(unit, &stages->heap, 0, head, ROW_BYTES) == KV_OK &&
                  kvs_unit_reserve(unit, stages->n_tokens) == KV_OK;
        if (!is_good)
            break;
        fill_rows(stages, head);
        seal_rows(unit, stages->n_tokens);
        unit->committed = stages->n_tokens;
        is_good = kvs_index_schedule(stages->indexer, unit, unit->committed, &plan) == KV_OK;
        while (kvs_indexer_step(stages->indexer))
            ;
    }
    if (!is_good)
        bench_complain("units: %u tokens of %u heads: refused", stages->n_tokens,
                       stages->n_heads);
    return is_good;
}

/* ---- records ----------------------------------------------------------------------------- */

/* Full cells of a chapter, on average; 0: it has none. */
static double full_cells(const struct stages *stages, uint32_t chapter)
{
    double sum = 0, n = 0;

    for (unsigned head = 0; head < stages->n_heads; head++)
        for (uint32_t token = 0; token < stages->n_tokens; token += chapter, n++) {
            const struct kvs_codes *of =
                kvs_unit_codes(&stages->units[head], token / KV_BLOCK_TOKENS);
            const struct kvs_codebook *book = kvs_codebook_at(&stages->codebooks, of->codebook);
            const struct kv_cells cells = kvs_codebook_cells(book);

            sum += kvs_codebook_lists(book) != NULL ? kv_cells_n_full(&codes, &cells) : 0;
        }
    return sum / n;
}

/* Groups of summaries of so many rows. */
static uint32_t n_groups_of(const struct stages *stages, uint32_t n_rows)
{
    return (n_rows + stages->summary_rows - 1) / stages->summary_rows;
}

/* Fills the limits of a record; returns their number.  Selection works on data in the cache and
 * has none. */
static unsigned needs_of(const struct stages *stages,
                         uint32_t chapter,
                         bool is_cells,
                         struct kernels_need *ret_needs)
{
    const struct kv_summary_shape summaries = {KV_KEY_FP16, D, D, KV_SUMMARY_16,
                                               stages->summary_rows};
    const double n_candidates = stages->candidates.factor * K, pair = 2.0 * QUERIES;
    const double n_chapters = ((stages->n_tokens + chapter - 1) / chapter);
    const double n_groups = stages->n_tokens / chapter * n_groups_of(stages, chapter) +
                            n_groups_of(stages, stages->n_tokens % chapter);
    const double of_chapter =
        (double)(kv_pq_centroids_size(&codes) * sizeof(float)) +
        (is_cells ? full_cells(stages, chapter) * sizeof(uint32_t)
                  : (double)(chapter / KV_PQ_TILE * kv_tile_bytes(&codes)));

    switch (stages->record) {
    case STAGE_SCORE:
        ret_needs[0] = (struct kernels_need){KERNELS_READ, n_chapters * of_chapter, 0, 0};
        ret_needs[1] = (struct kernels_need){
            KERNELS_FMA, n_chapters * pair * (double)kv_pq_centroids_size(&codes), 0, 0};
        return 2;
    case STAGE_RERANK:
        ret_needs[0] = (struct kernels_need){KERNELS_ROWS, n_candidates * (ROW_BYTES / 2),
                                             ROW_BYTES, ROW_BYTES / 2};
        ret_needs[1] = (struct kernels_need){KERNELS_FMA, n_candidates * pair * D, 0, 0};
        return 2;
    case STAGE_ATTEND:
        ret_needs[0] =
            (struct kernels_need){KERNELS_ROWS, (double)K * ROW_BYTES, ROW_BYTES, ROW_BYTES};
        ret_needs[1] = (struct kernels_need){KERNELS_FMA, K * pair * 2 * D, 0, 0};
        return 2;
    case STAGE_ESTIMATE:
        ret_needs[0] = (struct kernels_need){
            KERNELS_READ, n_groups * (double)kv_summary_bytes(&summaries), 0, 0};
        ret_needs[1] = (struct kernels_need){
            KERNELS_FMA, n_groups * (double)kv_summary_count(&summaries) * pair * 2 * D, 0, 0};
        return 2;
    default:
        return 0;
    }
}

static bool measure(struct stages *stages, uint32_t factor, uint32_t chapter_blocks)
{
    const uint32_t chapter = chapter_blocks * KV_BLOCK_TOKENS;
    const bool is_cells = chapter >= kvs_scorer_pq.items_pay(&codes);
    bool is_good = true;

    stages->selection = (struct kvs_selection){.merge = KV_MERGE_SUM,
                                               .n_queries = QUERIES,
                                               .scale = attending.scale,
                                               .k = K,
                                               .factor = 1};
    stages->candidates = stages->selection;
    stages->candidates.factor = factor;
    for (unsigned record = 0; is_good && record < N_RECORDS; record++) {
        struct kernels_case one = {
            .name = names[record],
            .unit = "us",
            .params = {.shape = "8b",
                       .rows = factor * K,
                       .data = "cold",
                       .queries = QUERIES,
                       .n = stages->n_tokens,
                       .k = K,
                       .form = is_cells ? "cells" : "tiles",
                       .chapter = chapter,
                       .group = stages->summary_rows == KV_SUMMARY_ROWS_LEAST
                                    ? 0
                                    : stages->summary_rows},
            .part = layer,
            .arg = stages,
        };

        stages->record = record;
        one.n_needs = needs_of(stages, chapter, is_cells, one.needs);
        is_good = kernels_measure(stages->kernels, &one);
        if (is_good && stages->fault != NULL) {
            bench_complain("%s: %s", names[record], stages->fault);
            is_good = false;
        }
    }
    return is_good;
}

static bool measure_all(struct stages *stages)
{
    static const struct {
        uint32_t chapter_blocks, summary_rows;
    } forms[] = {
        {128, KV_SUMMARY_ROWS_LEAST}, {128, KV_SUMMARY_ROWS_MAX}, {8, KV_SUMMARY_ROWS_LEAST}};
    bool is_good = true;

    kernels_fill_normal(stages->centers, HEADS * N_CENTERS * D, 21);
    kernels_fill_normal(stages->noise, NOISE + D, 22);
    fill_queries(stages);
    for (unsigned i = 0; is_good && i < sizeof(forms) / sizeof(forms[0]); i++) {
        stages->summary_rows = forms[i].summary_rows;
        is_good = open_units(stages, forms[i].chapter_blocks);
        for (uint32_t factor = 4; is_good && factor <= RERANK_MAX; factor *= 2)
            is_good = measure(stages, factor, forms[i].chapter_blocks);
        close_units(stages);
    }
    return is_good;
}

bool kernels_stages(struct bench *bench, const struct bench_load *load)
{
    struct kernels *kernels = kernels_open(bench);
    struct stages *stages;
    size_t n_tokens;
    bool is_good = false;

    (void)load;
    if (kernels == NULL)
        return false;
    stages = kernels_alloc(1, sizeof(*stages));
    if (stages == NULL)
        return false;
    /* As many tokens as the requested memory holds, and at least enough to select from. */
    n_tokens = kernels->bytes / (HEADS * ROW_BYTES);
    n_tokens = n_tokens < 2 * CANDIDATES_MAX ? 2 * CANDIDATES_MAX : n_tokens;
    n_tokens = n_tokens > TOKENS_MAX ? TOKENS_MAX
                                     : n_tokens / KV_SUMMARY_ROWS_LEAST * KV_SUMMARY_ROWS_LEAST;
    stages->kernels = kernels;
    stages->n_heads = bench->smoke ? 2 : HEADS;
    stages->n_tokens = (uint32_t)n_tokens;
    stages->range = (struct kv_wire_range){SINKS, stages->n_tokens - WINDOW};
    stages->room_floats = n_tokens * (QUERIES + KVS_SCORE_SPARE);
    stages->centers = kernels_alloc(HEADS * N_CENTERS * D, sizeof(float));
    stages->noise = kernels_alloc(NOISE + D, sizeof(float));
    stages->queries = kernels_alloc(LAYERS * HEADS * QUERIES * D, sizeof(float));
    stages->runs = kernels_alloc(KVS_SCORE_RUNS_MAX, sizeof(*stages->runs));
    stages->selector = kernels_alloc(1, sizeof(*stages->selector));
    stages->expander = kvs_expander_create(KVS_EXPAND_ROWS_MAX);
    stages->attention = kernels_alloc(1, sizeof(*stages->attention));
    stages->remainder = kernels_alloc(1, sizeof(*stages->remainder));
    stages->room = kernels_alloc(stages->room_floats, sizeof(float));
    stages->tables = kernels_alloc((size_t)QUERIES * KVS_SCORE_TABLE, sizeof(float));
    stages->kept = kernels_alloc(QUERIES * CANDIDATES_MAX, sizeof(float));
    stages->rows = kernels_alloc(CANDIDATES_MAX + KV_TOPK_SPARE, sizeof(uint32_t));
    stages->query_masks = kernels_alloc(CANDIDATES_MAX + KV_TOPK_SPARE, sizeof(uint32_t));
    stages->indices = kernels_alloc(CANDIDATES_MAX + KV_TOPK_SPARE, sizeof(uint32_t));
    stages->scored = kernels_alloc(CANDIDATES_MAX, sizeof(uint32_t));
    if (stages->centers != NULL && stages->noise != NULL && stages->queries != NULL &&
        stages->runs != NULL && stages->selector != NULL && stages->expander != NULL &&
        stages->attention != NULL && stages->remainder != NULL && stages->room != NULL &&
        stages->tables != NULL && stages->kept != NULL && stages->rows != NULL &&
        stages->query_masks != NULL && stages->indices != NULL && stages->scored != NULL)
        is_good = measure_all(stages);
    kvs_expander_destroy(stages->expander);
    free(stages->centers);
    free(stages->noise);
    free(stages->queries);
    free(stages->runs);
    free(stages->selector);
    free(stages->attention);
    free(stages->remainder);
    free(stages->room);
    free(stages->tables);
    free(stages->kept);
    free(stages->rows);
    free(stages->query_masks);
    free(stages->indices);
    free(stages->scored);
    free(stages);
    return is_good;
}
