#include "kvserver/store/query/pipeline.h"

#include "kvserver/base/memory.h"

#include <stdlib.h>

struct kv_querier *kv_querier_create(void)
{
    const size_t n_taken = (size_t)KV_QUERIES_MAX * KV_CHOSEN_MAX + KV_SELECT_SPARE;
    struct kv_querier *querier = calloc(1, sizeof(*querier));

    if (querier == NULL)
        return NULL;
    querier->chooser = calloc(1, sizeof(*querier->chooser));
    querier->picker = kv_picker_create();
    querier->parts = calloc(KV_SCAN_PARTS_MAX, sizeof(*querier->parts));
    querier->floats = kv_memory_reserve(KV_QUERIER_FLOATS * sizeof(float));
    querier->taken = calloc(n_taken, sizeof(uint32_t));
    querier->among = calloc(n_taken, sizeof(uint32_t));
    querier->indices = calloc(n_taken, sizeof(uint32_t));
    querier->tables = calloc((size_t)KV_QUERIES_MAX * KV_SCAN_TABLE, sizeof(float));
    querier->ids = calloc(KV_QUERIER_IDS, sizeof(uint32_t));
    querier->heads = calloc(KV_QUERIER_IDS, sizeof(uint32_t));
    querier->crcs = calloc(KV_QUERIER_IDS, sizeof(uint32_t));
    querier->scores = calloc(KV_QUERIER_IDS, sizeof(float));
    querier->attention = calloc(1, sizeof(*querier->attention));
    querier->remainder = calloc(1, sizeof(*querier->remainder));
    querier->outputs = calloc(KV_QUERIER_IDS, sizeof(float));
    querier->lses = calloc(KV_QUERIER_IDS, sizeof(float));
    if (querier->chooser == NULL || querier->picker == NULL || querier->parts == NULL ||
        querier->floats == NULL || querier->taken == NULL || querier->among == NULL ||
        querier->indices == NULL || querier->tables == NULL || querier->ids == NULL ||
        querier->heads == NULL || querier->crcs == NULL || querier->scores == NULL ||
        querier->attention == NULL || querier->remainder == NULL || querier->outputs == NULL ||
        querier->lses == NULL) {
        kv_querier_destroy(querier);
        return NULL;
    }
    return querier;
}

void kv_querier_destroy(struct kv_querier *querier)
{
    if (querier == NULL)
        return;
    kv_picker_destroy(querier->picker);
    free(querier->chooser);
    free(querier->parts);
    if (querier->floats != NULL)
        kv_memory_release(querier->floats, KV_QUERIER_FLOATS * sizeof(float));
    free(querier->taken);
    free(querier->among);
    free(querier->indices);
    free(querier->tables);
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
