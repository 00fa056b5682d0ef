/* The memory of a query pipeline, allocated once. */
#include "kvserver/store/query/pipeline.h"

#include "kvserver/base/memory.h"

#include <stdlib.h>

enum {
    ARRAYS_PER_ROW = 1 + KVS_SCORE_SPARE, /* of floats, at least: one query vector */
};

static size_t lower(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Returns the most rows of a unit that a query with so many floats can have. */
static size_t rows_max(size_t n_floats)
{
    return n_floats / ARRAYS_PER_ROW;
}

static size_t candidates_max(size_t n_floats)
{
    return lower((size_t)KV_QUERIES_MAX * KV_SELECTED_MAX, rows_max(n_floats));
}

size_t kvs_query_pipeline_need(uint32_t n_eligible, uint32_t n_queries)
{
    const size_t n_candidates = lower((size_t)n_queries * KV_SELECTED_MAX, n_eligible);
    const size_t step_1 = (size_t)n_eligible * (n_queries + KVS_SCORE_SPARE);
    /* Scores twice, room to select, selected_by, and tokens. */
    const size_t step_2 = n_candidates * (2 * (size_t)n_queries + KVS_SELECT_CAPACITY + 2);

    return (step_1 > step_2 ? step_1 : step_2) + KV_TOPK_SPARE;
}

static bool scratch_init(struct kvs_query_scratch *scratch, size_t n_floats)
{
    const size_t n_candidates = candidates_max(n_floats) + KV_TOPK_SPARE;

    scratch->n_floats = n_floats;
    scratch->runs = calloc(KVS_SCORE_RUNS_MAX, sizeof(*scratch->runs));
    scratch->tables = calloc((size_t)KV_QUERIES_MAX * KVS_SCORE_TABLE, sizeof(float));
    scratch->candidates = calloc(n_candidates, sizeof(uint32_t));
    scratch->query_mask = calloc(n_candidates, sizeof(uint32_t));
    scratch->indices = calloc(n_candidates, sizeof(uint32_t));
    scratch->floats = kv_memory_reserve(n_floats * sizeof(float));
    return scratch->runs != NULL && scratch->tables != NULL && scratch->candidates != NULL &&
           scratch->query_mask != NULL && scratch->indices != NULL && scratch->floats != NULL;
}

static void scratch_fini(struct kvs_query_scratch *scratch)
{
    free(scratch->runs);
    free(scratch->tables);
    free(scratch->candidates);
    free(scratch->query_mask);
    free(scratch->indices);
    if (scratch->floats != NULL)
        kv_memory_release(scratch->floats, scratch->n_floats * sizeof(float));
}

void kvs_query_scratch_divide(struct kvs_query_scratch *scratch,
                              uint32_t n_queries,
                              uint32_t n_candidates)
{
    static_assert((uint64_t)KV_QUERIES_MAX * KV_SELECTED_MAX *
                          (2 * KV_QUERIES_MAX + KVS_SELECT_CAPACITY + 2) <=
                      KVS_QUERY_PIPELINE_FLOATS,
                  "scores twice, room to select, selected_by, and tokens");
    /* Sizes are known only now, and the static_assert is for the largest: floats that one query
     * does not need for scores serve as room for its candidates. */
    const size_t n_scores = (size_t)n_queries * n_candidates;
    float *at = scratch->floats;

    scratch->scores = scratch->weights = at;
    at += n_scores;
    scratch->selection_room = at;
    at += (size_t)KVS_SELECT_CAPACITY * n_candidates;
    scratch->selected_by = (uint32_t *)(void *)at;
    at += n_candidates;
    scratch->kept_scores = at;
    at += n_scores;
    scratch->kept_tokens = (uint32_t *)(void *)at;
}

/* Returns what a pipeline uses whatever its floats. */
static size_t fixed_bytes(void)
{
    const size_t runs = KVS_SCORE_RUNS_MAX * sizeof(struct kvs_score_run);
    const size_t tables = (size_t)KV_QUERIES_MAX * KVS_SCORE_TABLE * sizeof(float);
    const size_t results = 6 * (size_t)KVS_QUERY_PIPELINE_IDS * sizeof(uint32_t);
    const size_t expander = sizeof(struct kvs_expander) + 2 * (size_t)KVS_EXPAND_ROWS_MAX / 8;
    const size_t spares = 4 * (size_t)KV_TOPK_SPARE * sizeof(uint32_t);

    return sizeof(struct kvs_query_pipeline) + sizeof(struct kvs_selector) +
           sizeof(struct kvs_attention) + sizeof(struct kvs_estimate) + runs + tables +
           results + expander + spares;
}

size_t kvs_query_pipeline_bytes(size_t n_floats)
{
    return fixed_bytes() + n_floats * sizeof(float) +
           3 * candidates_max(n_floats) * sizeof(uint32_t) +
           2 * lower(KVS_EXPAND_ROWS_MAX, rows_max(n_floats)) * sizeof(uint32_t);
}

size_t kvs_query_pipeline_floats(size_t bytes)
{
    const size_t per_float = 2 * sizeof(float); /* 5 arrays of a fifth each, and itself */

    static_assert(ARRAYS_PER_ROW == 5, "per_float");
    if (bytes >= kvs_query_pipeline_bytes(KVS_QUERY_PIPELINE_FLOATS))
        return KVS_QUERY_PIPELINE_FLOATS;
    return bytes > fixed_bytes() + per_float
               ? lower((bytes - fixed_bytes()) / per_float, KVS_QUERY_PIPELINE_FLOATS)
               : 0;
}

struct kvs_query_pipeline *kvs_query_pipeline_create(size_t n_floats)
{
    struct kvs_query_pipeline *pipeline = calloc(1, sizeof(*pipeline));

    if (pipeline == NULL)
        return NULL;
    const bool has_scratch = scratch_init(&pipeline->scratch, n_floats);
    pipeline->selector = calloc(1, sizeof(*pipeline->selector));
    pipeline->expander = kvs_expander_create((uint32_t)rows_max(n_floats));
    pipeline->ids = calloc(KVS_QUERY_PIPELINE_IDS, sizeof(uint32_t));
    pipeline->query_masks = calloc(KVS_QUERY_PIPELINE_IDS, sizeof(uint32_t));
    pipeline->crcs = calloc(KVS_QUERY_PIPELINE_IDS, sizeof(uint32_t));
    pipeline->scores = calloc(KVS_QUERY_PIPELINE_IDS, sizeof(float));
    pipeline->attention = calloc(1, sizeof(*pipeline->attention));
    pipeline->estimate = calloc(1, sizeof(*pipeline->estimate));
    pipeline->outputs = calloc(KVS_QUERY_PIPELINE_IDS, sizeof(float));
    pipeline->lses = calloc(KVS_QUERY_PIPELINE_IDS, sizeof(float));
    if (!has_scratch || pipeline->selector == NULL || pipeline->expander == NULL ||
        pipeline->ids == NULL || pipeline->query_masks == NULL || pipeline->crcs == NULL ||
        pipeline->scores == NULL || pipeline->attention == NULL || pipeline->estimate == NULL ||
        pipeline->outputs == NULL || pipeline->lses == NULL) {
        kvs_query_pipeline_destroy(pipeline);
        return NULL;
    }
    return pipeline;
}

void kvs_query_pipeline_destroy(struct kvs_query_pipeline *pipeline)
{
    if (pipeline == NULL)
        return;
    scratch_fini(&pipeline->scratch);
    kvs_expander_destroy(pipeline->expander);
    free(pipeline->selector);
    free(pipeline->ids);
    free(pipeline->query_masks);
    free(pipeline->crcs);
    free(pipeline->scores);
    free(pipeline->attention);
    free(pipeline->estimate);
    free(pipeline->outputs);
    free(pipeline->lses);
    free(pipeline);
}
