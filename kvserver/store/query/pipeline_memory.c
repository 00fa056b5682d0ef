/* The memory of a query pipeline: allocated once, but for what large queries need. */
#include "kvserver/store/query/pipeline.h"

#include "kernels/key_copies.h"
#include "kvserver/base/memory.h"

#include <stdlib.h>

enum {
    ARRAYS_PER_ROW = 1 + KVS_SCORE_SPARE, /* of floats, at least: one query vector */
    DROP_FLOATS = 1 << 20,                /* given back at a time: two huge pages */
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

/* Returns the candidates that each unit has at most. */
static size_t candidates_max(const struct kv_wire_query *query, uint32_t n_eligible)
{
    const struct kvs_selection selection =
        kvs_query_selection(query, kvs_query_candidates(query));

    return kvs_selection_max(&selection, n_eligible);
}

/* Returns what the query needs while it is the current one. */
static size_t need_to_work(const struct kv_wire_query *query, uint32_t n_eligible)
{
    const size_t step_1 = (size_t)n_eligible * (query->n_queries + KVS_SCORE_SPARE);
    /* Room to select, and two arrays of kvs_select_rows(). */
    const size_t step_2 = candidates_max(query, n_eligible) * (KVS_SELECT_CAPACITY + 2);

    return (step_1 > step_2 ? step_1 : step_2) + KV_TOPK_SPARE;
}

/* Returns what it keeps from one step to the next: tokens, with room for vector stores, masks and
 * scores, and copies of tokens and scores if others are estimated. */
static size_t need_to_keep(const struct kv_wire_query *query, uint32_t n_eligible)
{
    const size_t arrays =
        query->n_queries + 2 + (query->summaries != 0 ? query->n_queries + 1 : 0);

    return candidates_max(query, n_eligible) * arrays + KV_TOPK_SPARE;
}

size_t kvs_query_pipeline_need(const struct kv_wire_query *query, uint32_t n_eligible)
{
    static_assert((uint64_t)KV_QUERIES_MAX * KV_SELECTED_MAX * (2 * KV_QUERIES_MAX + 3) +
                          KVS_QUERY_STEP_1_FLOATS + 2 * KV_TOPK_SPARE <=
                      KVS_QUERY_PIPELINE_FLOATS,
                  "the largest query keeps scores twice, tokens twice, and masks");
    static_assert((int)KV_CANDIDATES_MAX <= (int)KV_QUERIES_MAX * KV_SELECTED_MAX,
                  "vectors that select together have no more candidates than others");
    static_assert((uint64_t)KV_QUERIES_MAX * KV_SELECTED_MAX * (KVS_SELECT_CAPACITY + 2) <=
                      KVS_QUERY_STEP_1_FLOATS,
                  "step 2 needs less than step 1 may");
    return need_to_work(query, n_eligible) + need_to_keep(query, n_eligible);
}

bool kvs_query_pipeline_divide(struct kvs_query_pipeline *pipeline,
                               struct kvs_query_entry *entry)
{
    const struct kv_wire_query *query = entry->input.query;
    const uint32_t n_eligible = kvs_ranges_count(entry->input.ranges, query->n_ranges);
    const size_t n = candidates_max(query, n_eligible), n_scores = n * query->n_queries;
    const size_t kept = need_to_keep(query, n_eligible);
    size_t work = need_to_work(query, n_eligible);

    if (work < pipeline->n_work)
        work = pipeline->n_work;
    if (work + kept > pipeline->n_free)
        return false;
    pipeline->n_work = work;
    pipeline->n_free -= kept;
    float *at = pipeline->floats + pipeline->n_free;
    entry->scores = entry->weights = at;
    at += n_scores;
    entry->candidates = (uint32_t *)(void *)at;
    at += n + KV_TOPK_SPARE;
    entry->query_mask = (uint32_t *)(void *)at;
    at += n;
    entry->kept_scores = query->summaries != 0 ? at : NULL;
    entry->kept_tokens = query->summaries != 0 ? (uint32_t *)(void *)(at + n_scores) : NULL;
    return true;
}

/* Returns what a pipeline uses whatever its floats. */
static size_t fixed_bytes(void)
{
    const size_t runs = KVS_SCORE_RUNS_MAX * sizeof(struct kvs_score_run);
    const size_t tables = (size_t)KV_QUERIES_MAX * KVS_SCORE_TABLE * sizeof(float);
    const size_t expander = sizeof(struct kvs_expander) + 2 * (size_t)KVS_EXPAND_ROWS_MAX / 8;
    const size_t rotated = (size_t)KV_QUERIES_MAX * KV_ROTATION_DIM_MAX * sizeof(float);
    const size_t rounded = kv_key_copies_query_bytes(KVS_CODEBOOK_DIM_MAX, KV_QUERIES_MAX);
    const size_t spare = (size_t)KV_TOPK_SPARE * sizeof(uint32_t);

    return sizeof(struct kvs_query_pipeline) + sizeof(struct kvs_selector) +
           sizeof(struct kvs_attention) + sizeof(struct kvs_estimate) +
           sizeof(struct kvs_byte_scores) + runs + tables + rotated + rounded + expander +
           spare;
}

size_t kvs_query_pipeline_bytes(size_t n_floats)
{
    return fixed_bytes() + n_floats * sizeof(float) +
           2 * lower(KVS_EXPAND_ROWS_MAX, rows_max(n_floats)) * sizeof(uint32_t);
}

size_t kvs_query_pipeline_floats(size_t bytes)
{
    static_assert(ARRAYS_PER_ROW == 5, "2 arrays of a fifth each, and the floats: 7 fifths");
    if (bytes >= kvs_query_pipeline_bytes(KVS_QUERY_PIPELINE_FLOATS))
        return KVS_QUERY_PIPELINE_FLOATS;
    return bytes > fixed_bytes() ? (bytes - fixed_bytes()) / sizeof(float) / 7 * 5 : 0;
}

/* Returns the pages to be lent for so many floats. */
static uint32_t pages_for(const struct kvs_query_pipeline *pipeline, size_t n_floats)
{
    const size_t bytes =
        kvs_query_pipeline_bytes(n_floats) - kvs_query_pipeline_bytes(pipeline->n_own);

    return (uint32_t)((bytes + KVS_ARENA_PAGE - 1) / KVS_ARENA_PAGE);
}

kv_status_t kvs_query_pipeline_get_room(struct kvs_query_pipeline *pipeline,
                                        struct kvs_pages *pages,
                                        size_t n_floats)
{
    const size_t wanted = lower(n_floats, pipeline->n_floats);

    if (wanted <= pipeline->n_room)
        return KV_OK;
    const uint32_t n_pages = pages_for(pipeline, wanted);
    if (!kvs_pages_lend(pages, &pipeline->lent, n_pages * (uint64_t)KVS_ARENA_PAGE)) {
        kvs_query_pipeline_end_room(pipeline);
        kvs_pages_take_back(pages, &pipeline->lent, pages_for(pipeline, pipeline->n_touched));
        return KV_NO_MEMORY;
    }
    if (pipeline->lent.n < n_pages)
        return KV_IN_PROGRESS;
    pipeline->n_room = wanted;
    if (pipeline->n_touched < wanted)
        pipeline->n_touched = wanted;
    return KV_OK;
}

void kvs_query_pipeline_end_room(struct kvs_query_pipeline *pipeline)
{
    pipeline->n_room = pipeline->n_own;
}

static void drop_from(void *array, size_t n_own, size_t n_all, size_t bytes_each)
{
    if (n_own < n_all)
        kv_memory_drop((char *)array + n_own * bytes_each, (n_all - n_own) * bytes_each);
}

bool kvs_query_pipeline_drop_room(struct kvs_query_pipeline *pipeline, struct kvs_pages *pages)
{
    const struct kvs_expander *expander = pipeline->expander;
    const size_t n_rows = lower(KVS_EXPAND_ROWS_MAX, rows_max(pipeline->n_own));

    if (pipeline->lent.n == 0 || pipeline->n_room > pipeline->n_own)
        return false;
    if (pipeline->n_touched > pipeline->n_own) {
        /* From the end, in whole huge pages. */
        const size_t n_before = (pipeline->n_touched - 1) / DROP_FLOATS * DROP_FLOATS;
        const size_t n_left = n_before > pipeline->n_own ? n_before : pipeline->n_own;

        drop_from(pipeline->floats, n_left, pipeline->n_touched, sizeof(float));
        pipeline->n_touched = n_left;
    }
    if (pipeline->n_touched == pipeline->n_own) {
        drop_from(expander->rows, n_rows, expander->rows_max, sizeof(uint32_t));
        drop_from(expander->marks, n_rows, expander->rows_max, sizeof(uint32_t));
    }
    kvs_pages_take_back(pages, &pipeline->lent, pages_for(pipeline, pipeline->n_touched));
    return true;
}

struct kvs_query_pipeline *kvs_query_pipeline_create(size_t n_own, size_t n_floats)
{
    struct kvs_query_pipeline *pipeline = calloc(1, sizeof(*pipeline));

    if (pipeline == NULL)
        return NULL;
    pipeline->n_floats = n_floats;
    pipeline->n_own = pipeline->n_room = pipeline->n_touched = n_own;
    pipeline->lent.first = KVS_PAGE_NONE;
    pipeline->floats = kv_memory_reserve(n_floats * sizeof(float));
    pipeline->runs = calloc(KVS_SCORE_RUNS_MAX, sizeof(*pipeline->runs));
    pipeline->tables = calloc((size_t)KV_QUERIES_MAX * KVS_SCORE_TABLE, sizeof(float));
    pipeline->rotated = calloc((size_t)KV_QUERIES_MAX * KV_ROTATION_DIM_MAX, sizeof(float));
    pipeline->rounded =
        calloc(1, kv_key_copies_query_bytes(KVS_CODEBOOK_DIM_MAX, KV_QUERIES_MAX));
    pipeline->byte_scores = calloc(1, sizeof(*pipeline->byte_scores));
    pipeline->selector = calloc(1, sizeof(*pipeline->selector));
    pipeline->expander = kvs_expander_create((uint32_t)rows_max(n_floats));
    pipeline->attention = calloc(1, sizeof(*pipeline->attention));
    pipeline->estimate = calloc(1, sizeof(*pipeline->estimate));
    if (pipeline->floats == NULL || pipeline->runs == NULL || pipeline->tables == NULL ||
        pipeline->rotated == NULL || pipeline->rounded == NULL ||
        pipeline->byte_scores == NULL || pipeline->selector == NULL ||
        pipeline->expander == NULL || pipeline->attention == NULL ||
        pipeline->estimate == NULL) {
        kvs_query_pipeline_destroy(pipeline);
        return NULL;
    }
    return pipeline;
}

void kvs_query_pipeline_destroy(struct kvs_query_pipeline *pipeline)
{
    if (pipeline == NULL)
        return;
    if (pipeline->floats != NULL)
        kv_memory_release(pipeline->floats, pipeline->n_floats * sizeof(float));
    kvs_expander_destroy(pipeline->expander);
    free(pipeline->runs);
    free(pipeline->tables);
    free(pipeline->rotated);
    free(pipeline->rounded);
    free(pipeline->byte_scores);
    free(pipeline->selector);
    free(pipeline->attention);
    free(pipeline->estimate);
    free(pipeline);
}
