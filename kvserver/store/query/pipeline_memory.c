/* The memory of a data thread's queries, allocated once. */
#include "kvserver/store/query/pipeline.h"

#include "kvserver/base/memory.h"

#include <stdlib.h>

static bool scratch_init(struct kvs_query_scratch *scratch)
{
    const size_t n_candidates = (size_t)KV_QUERIES_MAX * KV_SELECTED_MAX + KV_TOPK_SPARE;

    scratch->runs = calloc(KVS_SCORE_RUNS_MAX, sizeof(*scratch->runs));
    scratch->tables = calloc((size_t)KV_QUERIES_MAX * KVS_SCORE_TABLE, sizeof(float));
    scratch->candidates = calloc(n_candidates, sizeof(uint32_t));
    scratch->query_mask = calloc(n_candidates, sizeof(uint32_t));
    scratch->indices = calloc(n_candidates, sizeof(uint32_t));
    scratch->floats = kv_memory_reserve(KVS_QUERY_PIPELINE_FLOATS * sizeof(float));
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
        kv_memory_release(scratch->floats, KVS_QUERY_PIPELINE_FLOATS * sizeof(float));
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

struct kvs_query_pipeline *kvs_query_pipeline_create(void)
{
    struct kvs_query_pipeline *pipeline = calloc(1, sizeof(*pipeline));

    if (pipeline == NULL)
        return NULL;
    const bool has_scratch = scratch_init(&pipeline->scratch);
    pipeline->selector = calloc(1, sizeof(*pipeline->selector));
    pipeline->expander = kvs_expander_create();
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
