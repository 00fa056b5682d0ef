/* What the queries of a data thread work with, made once. */
#include "kvserver/store/query/pipeline.h"

#include "kvserver/base/memory.h"

#include <stdlib.h>

static bool scratch_init(struct kvs_query_scratch *scratch)
{
    const size_t n_taken = (size_t)KV_QUERIES_MAX * KV_SELECTED_MAX + KV_SELECT_SPARE;

    scratch->parts = calloc(KV_SCAN_PARTS_MAX, sizeof(*scratch->parts));
    scratch->tables = calloc((size_t)KV_QUERIES_MAX * KV_SCAN_TABLE, sizeof(float));
    scratch->taken = calloc(n_taken, sizeof(uint32_t));
    scratch->among = calloc(n_taken, sizeof(uint32_t));
    scratch->indices = calloc(n_taken, sizeof(uint32_t));
    scratch->floats = kv_memory_reserve(KV_QUERIER_FLOATS * sizeof(float));
    return scratch->parts != NULL && scratch->tables != NULL && scratch->taken != NULL &&
           scratch->among != NULL && scratch->indices != NULL && scratch->floats != NULL;
}

static void scratch_fini(struct kvs_query_scratch *scratch)
{
    free(scratch->parts);
    free(scratch->tables);
    free(scratch->taken);
    free(scratch->among);
    free(scratch->indices);
    if (scratch->floats != NULL)
        kv_memory_release(scratch->floats, KV_QUERIER_FLOATS * sizeof(float));
}

void kvs_query_scratch_divide(struct kvs_query_scratch *scratch,
                              uint32_t n_queries,
                              uint32_t n_taken)
{
    static_assert((uint64_t)KV_QUERIES_MAX * KV_SELECTED_MAX *
                          (2 * KV_QUERIES_MAX + KV_CHOOSE_ROOM + 2) <=
                      KV_QUERIER_FLOATS,
                  "scores twice, room to choose, who chose, and tokens");
    const size_t n_scores = (size_t)n_queries * n_taken;
    float *at = scratch->floats;

    scratch->scores = scratch->weights = at;
    at += n_scores;
    scratch->selection_room = at;
    at += (size_t)KV_CHOOSE_ROOM * n_taken;
    scratch->chosen_by = (uint32_t *)(void *)at;
    at += n_taken;
    scratch->kept_scores = at;
    at += n_scores;
    scratch->kept_tokens = (uint32_t *)(void *)at;
}

struct kv_querier *kv_querier_create(void)
{
    struct kv_querier *querier = calloc(1, sizeof(*querier));

    if (querier == NULL)
        return NULL;
    const bool has_scratch = scratch_init(&querier->scratch);
    querier->chooser = calloc(1, sizeof(*querier->chooser));
    querier->picker = kv_picker_create();
    querier->ids = calloc(KV_QUERIER_IDS, sizeof(uint32_t));
    querier->heads = calloc(KV_QUERIER_IDS, sizeof(uint32_t));
    querier->crcs = calloc(KV_QUERIER_IDS, sizeof(uint32_t));
    querier->scores = calloc(KV_QUERIER_IDS, sizeof(float));
    querier->attention = calloc(1, sizeof(*querier->attention));
    querier->remainder = calloc(1, sizeof(*querier->remainder));
    querier->outputs = calloc(KV_QUERIER_IDS, sizeof(float));
    querier->lses = calloc(KV_QUERIER_IDS, sizeof(float));
    if (!has_scratch || querier->chooser == NULL || querier->picker == NULL ||
        querier->ids == NULL || querier->heads == NULL || querier->crcs == NULL ||
        querier->scores == NULL || querier->attention == NULL || querier->remainder == NULL ||
        querier->outputs == NULL || querier->lses == NULL) {
        kv_querier_destroy(querier);
        return NULL;
    }
    return querier;
}

void kv_querier_destroy(struct kv_querier *querier)
{
    if (querier == NULL)
        return;
    scratch_fini(&querier->scratch);
    kv_picker_destroy(querier->picker);
    free(querier->chooser);
    free(querier->ids);
    free(querier->heads);
    free(querier->crcs);
    free(querier->scores);
    free(querier->attention);
    free(querier->remainder);
    free(querier->outputs);
    free(querier->lses);
    free(querier);
}
