/* Step 3 of a query: from selected rows to the result. */
#include "kvserver/store/query/pipeline_private.h"

#include "kernels/gather.h"
#include "kvserver/store/rows/verify.h"

enum {
    GATHER_ROWS = 512, /* in a piece, at most; one, even if it is more than */
    GATHER_BYTES = 128 << 10,
};

/* Returns whether the client has cached the row's block.  Tokens ascend from call to call. */
static bool is_cached(struct kvs_query_entry *entry, uint32_t token)
{
    const struct kvs_unit *unit = entry->score.unit;
    const uint32_t block = token / KV_BLOCK_TOKENS;

    while (entry->cached < entry->cached_end && entry->cached->block < block)
        entry->cached++;
    if (entry->cached == entry->cached_end || entry->cached->block != block)
        return false;
    if (entry->looked != entry->cached) {
        entry->looked = entry->cached;
        entry->looked_same =
            unit->committed / KV_BLOCK_TOKENS > block &&
            kv_wire_block_fingerprint(kvs_unit_crc(unit, block * KV_BLOCK_TOKENS)) ==
                entry->cached->fingerprint;
    }
    return entry->looked_same;
}

/* Fills in the result for the unit, now that its rows are selected. */
static void begin_found(struct kvs_query_pipeline *pipeline, struct kvs_query_entry *entry)
{
    struct kv_wire_query_result *found = &entry->input.found[pipeline->unit];

    found->n_scored_by_code = entry->score.n_coded;
    found->n_scored_by_key = entry->score.n_exact;
    found->n_chapters = entry->score.n_chapters;
    found->n_reranked = entry->n_exact;
    found->n_selected = entry->n_selected;
    if (entry->input.selected != NULL)
        entry->input.selected(entry->input.arg, &entry->score, &entry->selection,
                              entry->candidates, entry->n_selected);
}

/* Adds the row at the cursor to the ids of the result. */
static void
name_row(struct kvs_query_pipeline *pipeline, struct kvs_query_entry *entry, bool keeps)
{
    const struct kvs_query_input *input = &entry->input;
    const uint32_t token = entry->candidates[entry->cursor];

    if (input->query_masks != NULL)
        input->query_masks[entry->n_ids] = entry->query_mask[entry->cursor];
    if (input->weights != NULL)
        input->weights[entry->n_ids] = entry->weights[entry->cursor];
    input->ids[entry->n_ids++] = keeps ? token | KV_WIRE_ID_CACHED : token;
    input->found[pipeline->unit].n_ids++;
}

/* The entry goes on with the next unit once all others are as far, or is complete. */
static void end_unit(struct kvs_query_pipeline *pipeline, struct kvs_query_entry *entry)
{
    const struct kv_wire_query *query = entry->input.query;

    if (kvs_query_has_outputs(query)) {
        entry->n_outputs += query->n_queries * kvs_query_layer(pipeline, entry)->d_v;
        entry->n_lses += query->n_queries;
    }
    entry->cached = entry->cached_end;
    entry->queries += (size_t)query->n_queries * entry->score.d;
    entry->n_again = 0;
    if (pipeline->unit + 1 == pipeline->n_units) {
        pipeline->done = entry;
        kvs_query_deactivate(pipeline, entry);
    }
    kvs_query_begin_step_3(pipeline, pipeline->entry + 1);
}

/* The unit's selected rows are done: continues with the estimate or the next unit. */
static void end_selected(struct kvs_query_pipeline *pipeline, struct kvs_query_entry *entry)
{
    const struct kv_wire_query *query = entry->input.query;
    struct kvs_estimate_input input = {
        .score = &entry->score,
        .bits = kvs_summaries_bits(query->summaries),
        .rows = kvs_summaries_rows(query->summary_blocks),
        .selected = entry->candidates,
        .query_mask = entry->query_mask,
        .n_selected = entry->n_selected,
        .each = query->merge == KV_MERGE_NONE,
        .scored = entry->kept_tokens,
        .scores = entry->kept_scores,
        .n_scored = entry->n_scored,
    };

    if (query->summaries == 0) {
        end_unit(pipeline, entry);
        return;
    }
    kvs_attention_shape(kvs_query_layer(pipeline, entry), query->n_queries, query->scale,
                        &input.shape); /* begin has checked it */
    kvs_estimate_begin(pipeline->estimate, &input);
    pipeline->stage = KVS_QUERY_ESTIMATE;
}

/* The entry lacks rows of this unit, or of one before it. */
bool kvs_query_stage_lacks(struct kvs_query_pipeline *pipeline)
{
    end_unit(pipeline, kvs_query_current(pipeline));
    return true;
}

/* Lists the ids of the unit's selected rows, and gathers the rows. */
bool kvs_query_stage_gather(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = kvs_query_current(pipeline);
    const struct kvs_unit *unit = entry->score.unit;
    const void *rows[GATHER_ROWS];
    uint32_t n = 0, bytes = 0;

    if (entry->cursor == 0)
        begin_found(pipeline, entry);
    for (; entry->cursor < entry->n_selected && n < GATHER_ROWS && bytes < GATHER_BYTES;
         entry->cursor++) {
        uint32_t token = entry->candidates[entry->cursor];
        bool keeps = is_cached(entry, token);

        if (kvs_unit_is_bad(unit, token))
            return kvs_query_fail_bad(pipeline, token);
        name_row(pipeline, entry, keeps);
        if (keeps || entry->input.query->answer != KV_ANSWER_ROWS)
            continue;
        entry->input.crcs[entry->n_rows++] = *kvs_unit_crc(unit, token);
        rows[n++] = kvs_unit_row(unit, token);
        bytes += unit->row_bytes;
    }
    if (n > 0)
        kv_rows_gather(entry->input.rows + entry->rows_bytes, rows, n, unit->row_bytes);
    entry->rows_bytes += (size_t)n * unit->row_bytes;
    entry->reads.rows += (uint64_t)n * unit->row_bytes;
    if (entry->cursor == entry->n_selected)
        end_selected(pipeline, entry);
    return true;
}

/* Computes attention over the selected rows that the client has not cached, and verifies them.
 * The ids of cached rows are listed, so that the client can attend them. */
bool kvs_query_stage_attend(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = kvs_query_current(pipeline);
    const struct kv_wire_query *query = entry->input.query;
    struct kvs_attention *attention = pipeline->attention;
    bool is_full = false;

    if (entry->cursor == 0) {
        struct kv_attend_shape shape = {0};

        begin_found(pipeline, entry);
        kvs_attention_shape(kvs_query_layer(pipeline, entry), query->n_queries, query->scale,
                            &shape); /* begin has checked it */
        kvs_attention_begin(attention, &shape, entry->score.unit, entry->queries,
                            query->merge == KV_MERGE_NONE);
    }
    for (; entry->cursor < entry->n_selected && !is_full; entry->cursor++) {
        uint32_t token = entry->candidates[entry->cursor];
        bool keeps = is_cached(entry, token);

        if (keeps || !kvs_query_names_cached_only(query))
            name_row(pipeline, entry, keeps);
        if (!keeps)
            is_full = kvs_attention_add(attention, token, entry->query_mask[entry->cursor]);
    }
    entry->n_attended += attention->n;
    entry->reads.rows += (uint64_t)attention->n * entry->score.unit->row_bytes;
    const uint32_t bad = kvs_attention_piece(attention, entry->input.store);
    if (bad != UINT32_MAX)
        return kvs_query_fail_bad(pipeline, bad);
    if (entry->cursor < entry->n_selected)
        return true;
    kvs_attention_end(attention, entry->input.outputs + entry->n_outputs,
                      entry->input.lses + entry->n_lses);
    end_selected(pipeline, entry);
    return true;
}

/* Estimates what the unit's other eligible rows would have added; merges it with the attention
 * over the selected rows, if there is any. */
bool kvs_query_stage_estimate(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = kvs_query_current(pipeline);
    struct kvs_estimate *estimate = pipeline->estimate;
    float *output = entry->input.outputs + entry->n_outputs;
    float *lse = entry->input.lses + entry->n_lses;

    if (!kvs_estimate_piece(estimate, entry->input.codebooks) && estimate->bad == UINT32_MAX)
        return true;
    if (estimate->bad != UINT32_MAX)
        return kvs_query_fail_bad(pipeline, estimate->bad);
    kvs_estimate_end(estimate, entry->input.query->answer == KV_ANSWER_ATTEND, output, lse);
    entry->input.found[pipeline->unit].n_estimated = estimate->n_estimated;
    entry->n_attended_unsummarised += estimate->n_exact;
    entry->reads.rows += (uint64_t)estimate->n_exact * entry->score.unit->row_bytes;
    entry->reads.summaries += estimate->summaries_bytes;
    if (estimate->lost != UINT32_MAX)
        /* If it cannot be queued now, the scrubber will do so. */
        (void)kvs_index_repair(entry->input.indexer, entry->score.unit, estimate->lost);
    end_unit(pipeline, entry);
    return true;
}
