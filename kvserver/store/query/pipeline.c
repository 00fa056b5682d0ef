#include "kvserver/store/query/pipeline_private.h"

#include "kvserver/base/slice.h"

#include <assert.h>

bool kvs_query_has_outputs(const struct kv_wire_query *query)
{
    return query->answer == KV_ANSWER_ATTEND || query->summaries != 0;
}

bool kvs_query_names_cached_only(const struct kv_wire_query *query)
{
    return query->answer == KV_ANSWER_ATTEND && !(query->flags & KV_WIRE_IDS);
}

struct kvs_selection kvs_query_selection(const struct kv_wire_query *query, uint32_t factor)
{
    return (struct kvs_selection){.merge = (enum kv_merge)query->merge,
                                  .selection = (enum kv_selection)query->selection,
                                  .n_queries = query->n_queries,
                                  .scale = query->scale,
                                  .share = query->fraction,
                                  .k = query->k,
                                  .factor = factor};
}

void kvs_query_pipeline_begin(struct kvs_query_pipeline *pipeline)
{
    pipeline->n_entries = pipeline->n_active = 0;
    pipeline->unit = pipeline->entry = 0;
    pipeline->done = NULL;
    pipeline->n_work = 0;
    pipeline->n_free = pipeline->n_room;
    pipeline->stage = KVS_QUERY_UNIT;
}

struct kvs_query_entry *kvs_query_pipeline_add(struct kvs_query_pipeline *pipeline,
                                               const struct kvs_query_input *input)
{
    struct kvs_query_entry *entry = &pipeline->entries[pipeline->n_entries];

    if (pipeline->n_entries == KVS_QUERY_ENTRIES_MAX)
        return NULL;
    *entry = (struct kvs_query_entry){
        .input = *input,
        .is_active = true,
        .queries = input->queries,
        .cached = input->cached,
        .candidate_selection =
            kvs_query_selection(input->query, kvs_query_candidates(input->query)),
        .cut_selection = kvs_query_selection(input->query, input->query->rerank),
        .selection = kvs_query_selection(input->query, 1),
    };
    /* Step 1 determines how many. */
    entry->cut_selection.selection = entry->selection.selection = KV_SELECT_TOP;
    entry->candidate_selection.cap = entry->cut_selection.cap = input->candidates_cap;
    if (!kvs_query_pipeline_divide(pipeline, entry))
        return NULL;
    assert(pipeline->n_entries == 0 || pipeline->n_units == input->n_units);
    pipeline->n_units = input->n_units;
    pipeline->n_entries++;
    pipeline->n_active++;
    return entry;
}

/* ---- from entry to entry, and from unit to unit ------------------------------------------ */

/* Returns the first entry from `entry` on that is active, or n_entries. */
static uint32_t active_from(const struct kvs_query_pipeline *pipeline, uint32_t entry)
{
    while (entry < pipeline->n_entries && !pipeline->entries[entry].is_active)
        entry++;
    return entry;
}

void kvs_query_begin_step_3(struct kvs_query_pipeline *pipeline, uint32_t from)
{
    pipeline->entry = active_from(pipeline, from);
    if (pipeline->entry == pipeline->n_entries) {
        pipeline->unit++;
        kvs_query_begin_step_1(pipeline, 0);
        return;
    }
    struct kvs_query_entry *entry = &pipeline->entries[pipeline->entry];
    entry->cursor = 0;
    pipeline->stage = entry->lacks_rows ? KVS_QUERY_LACKS : kvs_query_selected_stage(entry);
    if (!entry->is_reranked || entry->lacks_rows)
        return;
    pipeline->stage = KVS_QUERY_SELECT;
    kvs_select_begin(pipeline->selector, &entry->selection, entry->scores, NULL, NULL,
                     kvs_selection_merges(&entry->selection) ? NULL : entry->query_mask,
                     entry->n_candidates, kvs_query_wants_weights(entry), pipeline->floats);
}

/* Begins to score candidates of all entries, by their copies or by their keys.  Returns false if
 * there is nothing to score. */
static bool begin_spans(struct kvs_query_pipeline *pipeline, enum kvs_query_stage stage)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < pipeline->n_entries; i++)
        n += kvs_query_takes_part(&pipeline->entries[i], stage);
    if (n == 0)
        return false;
    pipeline->stage = stage;
    pipeline->entry = 0;
    pipeline->span_end = n > 1 ? 0 : UINT32_MAX;
    return true;
}

static void begin_step_2(struct kvs_query_pipeline *pipeline)
{
    if (!begin_spans(pipeline, KVS_QUERY_RERANK))
        kvs_query_begin_step_3(pipeline, 0);
}

void kvs_query_begin_need(struct kvs_query_pipeline *pipeline, uint32_t from)
{
    pipeline->entry = active_from(pipeline, from);
    while (pipeline->entry < pipeline->n_entries &&
           kvs_query_current(pipeline)->input.need == NULL)
        pipeline->entry = active_from(pipeline, pipeline->entry + 1);
    if (pipeline->entry < pipeline->n_entries)
        pipeline->stage = KVS_QUERY_NEED;
    else
        begin_step_2(pipeline);
}

void kvs_query_begin_select_cut(struct kvs_query_pipeline *pipeline, uint32_t from)
{
    while (from < pipeline->n_entries &&
           !kvs_query_takes_part(&pipeline->entries[from], KVS_QUERY_CUT))
        from++;
    if (from == pipeline->n_entries) {
        kvs_query_begin_need(pipeline, 0);
        return;
    }
    struct kvs_query_entry *entry = &pipeline->entries[from];

    pipeline->entry = from;
    pipeline->stage = KVS_QUERY_SELECT_CUT;
    kvs_select_begin(pipeline->selector, &entry->cut_selection, entry->scores, NULL, NULL,
                     kvs_selection_merges(&entry->selection) ? NULL : entry->query_mask,
                     entry->n_candidates, false, pipeline->floats);
}

void kvs_query_begin_step_1(struct kvs_query_pipeline *pipeline, uint32_t from)
{
    pipeline->entry = active_from(pipeline, from);
    pipeline->stage = KVS_QUERY_UNIT;
    if (pipeline->entry < pipeline->n_entries || pipeline->n_active == 0)
        return;
    if (!begin_spans(pipeline, KVS_QUERY_CUT))
        kvs_query_begin_need(pipeline, 0);
}

void kvs_query_deactivate(struct kvs_query_pipeline *pipeline, struct kvs_query_entry *entry)
{
    assert(entry->is_active);
    entry->is_active = false;
    pipeline->n_active--;
}

void kvs_query_pipeline_remove(struct kvs_query_pipeline *pipeline,
                               struct kvs_query_entry *entry)
{
    const bool is_current = entry == &pipeline->entries[pipeline->entry];

    kvs_query_deactivate(pipeline, entry);
    if (pipeline->n_active == 0)
        pipeline->stage = KVS_QUERY_UNIT;
    else if (!is_current || pipeline->stage == KVS_QUERY_CUT ||
             pipeline->stage == KVS_QUERY_RERANK)
        return;
    else if (pipeline->stage < KVS_QUERY_CUT)
        kvs_query_begin_step_1(pipeline, pipeline->entry + 1);
    else if (pipeline->stage == KVS_QUERY_SELECT_CUT)
        kvs_query_begin_select_cut(pipeline, pipeline->entry + 1);
    else if (pipeline->stage == KVS_QUERY_NEED)
        kvs_query_begin_need(pipeline, pipeline->entry + 1);
    else
        kvs_query_begin_step_3(pipeline, pipeline->entry + 1);
}

bool kvs_query_pipeline_slice(struct kvs_query_pipeline *pipeline, const struct kv_clock *clock)
{
    static bool (*const stages[])(struct kvs_query_pipeline *) = {
        [KVS_QUERY_UNIT] = kvs_query_stage_unit,
        [KVS_QUERY_BYTES] = kvs_query_stage_bytes,
        [KVS_QUERY_SCORE] = kvs_query_stage_score,
        [KVS_QUERY_SELECT_CANDIDATES] = kvs_query_stage_select_candidates,
        [KVS_QUERY_EXPAND] = kvs_query_stage_expand,
        [KVS_QUERY_CUT] = kvs_query_stage_cut,
        [KVS_QUERY_SELECT_CUT] = kvs_query_stage_select_cut,
        [KVS_QUERY_NEED] = kvs_query_stage_need,
        [KVS_QUERY_RERANK] = kvs_query_stage_rerank,
        [KVS_QUERY_SELECT] = kvs_query_stage_select,
        [KVS_QUERY_GATHER] = kvs_query_stage_gather,
        [KVS_QUERY_ATTEND] = kvs_query_stage_attend,
        [KVS_QUERY_ESTIMATE] = kvs_query_stage_estimate,
        [KVS_QUERY_LACKS] = kvs_query_stage_lacks,
    };

    struct kv_slice slice = kv_slice_begin(clock, 1);

    pipeline->done = NULL;
    do
        if (!stages[pipeline->stage](pipeline))
            return false;
    while (pipeline->done == NULL && !kv_slice_over(&slice));
    return true;
}
