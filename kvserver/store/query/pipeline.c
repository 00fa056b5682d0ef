#include "kvserver/store/query/pipeline.h"

#include "kernels/gather.h"
#include "kvserver/store/rows/verify.h"

#include <string.h>

enum {
    RERANK_ROWS = 512, /* per slice */
    GATHER_ROWS = 512,
    AGAIN_MAX = 2, /* restarts of a unit whose cells change */
};

bool kvs_query_has_outputs(const struct kv_wire_query *query)
{
    return query->answer == KV_ANSWER_ATTEND || query->summaries != 0;
}

bool kvs_query_names_cached_only(const struct kv_wire_query *query)
{
    return query->answer == KV_ANSWER_ATTEND && !(query->flags & KV_WIRE_IDS);
}

struct kvs_selection kvs_query_selection(const struct kv_wire_query *query, uint32_t rerank)
{
    return (struct kvs_selection){.merge = (enum kv_merge)query->merge,
                                  .selection = (enum kv_selection)query->selection,
                                  .n_queries = query->n_queries,
                                  .scale = query->scale,
                                  .share = query->fraction,
                                  .k = query->k,
                                  .factor = rerank};
}

void kvs_query_pipeline_begin(struct kvs_query_pipeline *pipeline,
                              const struct kvs_query_input *input)
{
    pipeline->input = *input;
    pipeline->unit = pipeline->n_again = 0;
    pipeline->n_ids = pipeline->n_rows = 0;
    pipeline->rows_bytes = 0;
    pipeline->n_outputs = pipeline->n_lses = 0;
    pipeline->n_attended = pipeline->n_attended_unsummarised = 0;
    pipeline->stage = KVS_QUERY_UNIT;
    pipeline->selection = kvs_query_selection(input->query, 1);
    pipeline->selection.selection = KV_SELECT_TOP; /* step 1 determines how many */
    pipeline->candidate_selection = kvs_query_selection(input->query, input->query->rerank);
    pipeline->queries = input->queries;
    pipeline->cached = input->cached;
}

/* Returns the layer of the current unit. */
static const struct kv_layer_schema *layer_of(const struct kvs_query_pipeline *pipeline)
{
    return &pipeline->input.layers[pipeline->input.named[pipeline->unit].layer];
}

/* Returns the stage that follows when the selected rows are known. */
static enum kvs_query_stage selected_stage(const struct kvs_query_pipeline *pipeline)
{
    return pipeline->input.query->answer == KV_ANSWER_ATTEND ? KVS_QUERY_ATTEND
                                                             : KVS_QUERY_GATHER;
}

/* Step 1 has n candidates: divides the scratch memory for step 2. */
static void set_candidates(struct kvs_query_pipeline *pipeline, uint32_t n)
{
    pipeline->n_candidates = pipeline->n_selected = n;
    kvs_query_scratch_divide(&pipeline->scratch, pipeline->score.n_queries, n);
}

static enum kvs_query_stage first_stage(struct kvs_query_pipeline *pipeline)
{
    const bool weights = pipeline->input.query->flags & KV_WIRE_WEIGHTS;
    const uint32_t n = pipeline->score.n;

    if (pipeline->candidate_selection.selection != KV_SELECT_TOP ||
        kvs_selection_n_candidates(&pipeline->candidate_selection,
                                   pipeline->candidate_selection.k) < n)
        return KVS_QUERY_SCORE;
    /* All rows are candidates, for all query vectors. */
    const uint32_t all = UINT32_MAX >> (KV_QUERIES_MAX - pipeline->score.n_queries);
    struct kvs_range_walk walk = {.ranges = pipeline->score.ranges};
    set_candidates(pipeline, n);
    for (uint32_t i = 0; i < n; i++) {
        pipeline->scratch.candidates[i] = kvs_range_walk_to(&walk, i);
        pipeline->scratch.query_mask[i] = all;
    }
    for (uint32_t group = 0; group < kvs_selection_groups(&pipeline->candidate_selection);
         group++)
        pipeline->k[group] = pipeline->candidate_selection.k;
    return pipeline->candidate_selection.k < n || weights ? KVS_QUERY_RERANK
                                                          : selected_stage(pipeline);
}

/* The query would have read a bad row: it fails.  Returns false. */
static bool fail_bad(struct kvs_query_pipeline *pipeline, uint32_t token)
{
    pipeline->bad = token;
    return false;
}

/* ---- step 1: from eligible rows to candidates -------------------------------------------- */

static bool stage_unit(struct kvs_query_pipeline *pipeline)
{
    const struct kv_wire_query *query = pipeline->input.query;
    const struct kv_layer_schema *layer = layer_of(pipeline);

    pipeline->score = (struct kvs_score){
        .unit = pipeline->input.units[pipeline->unit],
        .type = (enum kv_key_type)layer->dtype,
        .d = layer->d_k,
        .ranges = pipeline->input.ranges,
        .n_ranges = query->n_ranges,
        .n_queries = query->n_queries,
        .queries = pipeline->queries,
        .by_code = true,
        .by_cell = pipeline->n_again < AGAIN_MAX,
        .n = kvs_ranges_count(pipeline->input.ranges, query->n_ranges),
        .room = pipeline->scratch.floats,
        .room_floats = pipeline->scratch.n_floats,
        .runs = pipeline->scratch.runs,
        .tables = pipeline->scratch.tables,
    };
    kvs_score_begin(&pipeline->score, pipeline->input.codebooks);
    pipeline->cursor = 0;
    pipeline->n_candidates = pipeline->n_selected = pipeline->n_scored = 0;
    pipeline->cached_end = pipeline->cached + pipeline->input.named[pipeline->unit].n_ids;
    pipeline->looked = NULL;
    pipeline->found[pipeline->unit] = (struct kv_wire_query_result){
        .layer = pipeline->input.named[pipeline->unit].layer,
        .kv_head = pipeline->input.named[pipeline->unit].kv_head,
        .recall = pipeline->score.unit->recall,
        .committed = pipeline->score.unit->committed,
    };
    pipeline->stage = first_stage(pipeline);
    return true;
}

static bool stage_score(struct kvs_query_pipeline *pipeline)
{
    struct kvs_score *score = &pipeline->score;

    if (!kvs_score_slice(score, pipeline->input.codebooks, pipeline->input.clock))
        return true;
    if (score->bad != UINT32_MAX)
        return fail_bad(pipeline, score->bad);
    kvs_select_begin(pipeline->selector, &pipeline->candidate_selection, score->scores,
                     score->maxima, score->counts, NULL, score->n_items,
                     pipeline->input.query->rerank == 1 &&
                         (pipeline->input.query->flags & KV_WIRE_WEIGHTS),
                     kvs_score_spare(score));
    pipeline->stage = KVS_QUERY_SELECT_CANDIDATES;
    return true;
}

static bool stage_select_candidates(struct kvs_query_pipeline *pipeline)
{
    if (!kvs_select_slice(pipeline->selector))
        return true;
    memcpy(pipeline->k, pipeline->selector->k, sizeof(pipeline->k));
    pipeline->selection.per_query = pipeline->k;
    kvs_expand_begin(pipeline->expander, &pipeline->score, pipeline->selector,
                     pipeline->scratch.candidates, pipeline->scratch.query_mask);
    pipeline->stage = KVS_QUERY_EXPAND;
    return true;
}

/* Verifies the cells that were scored, and schedules the repair of bad ones. */
static void verify_cells(struct kvs_query_pipeline *pipeline)
{
    const struct kvs_score *score = &pipeline->score;
    struct kvs_codebooks *books = pipeline->input.codebooks;

    for (uint32_t i = 0; i < score->n_runs; i++) {
        const uint32_t codebook = score->runs[i].codebook;

        if (codebook == KVS_SCORE_ROWS || kvs_codebook_verify_cells(books, codebook))
            continue;
        /* If it cannot be queued now, the scrubber will do so. */
        (void)kvs_index_repair(pipeline->input.indexer, score->unit,
                               kvs_codebook_at(books, codebook)->block_begin);
    }
}

static bool stage_expand(struct kvs_query_pipeline *pipeline)
{
    const bool is_last = pipeline->input.query->rerank == 1;

    if (!kvs_expand_slice(pipeline->expander, pipeline->input.codebooks))
        return true;
    if (!kvs_expand_is_whole(pipeline->expander) && pipeline->score.by_cell) {
        /* Try again: without the bad cells, or with cells that have been remade since the
         * scores; the last try uses no cells. */
        verify_cells(pipeline);
        pipeline->n_again++;
        pipeline->stage = KVS_QUERY_UNIT;
        return true;
    }
    set_candidates(pipeline, pipeline->expander->n);
    /* Without reranking, these weights are the result.  They go where the scores were, but by
     * way of another array: a few cells may expand to many rows, and the selector's weights
     * begin close after the scores. */
    if (is_last && (pipeline->input.query->flags & KV_WIRE_WEIGHTS)) {
        float *weights = (float *)(void *)pipeline->scratch.indices; /* step 2's, unused here */

        kvs_expand_weights(&pipeline->score, pipeline->selector, pipeline->input.codebooks,
                           pipeline->scratch.candidates, pipeline->n_candidates, weights);
        memcpy(pipeline->scratch.weights, weights, pipeline->n_candidates * sizeof(*weights));
    }
    pipeline->stage = is_last ? selected_stage(pipeline) : KVS_QUERY_RERANK;
    return true;
}

/* ---- step 2: from candidates to selected rows -------------------------------------------- */

/* Copies the scores of n rows at the cursor for step 3, because step 2 overwrites its
 * arrays. */
static void keep_scores(struct kvs_query_pipeline *pipeline, uint32_t n)
{
    const struct kvs_query_scratch *scratch = &pipeline->scratch;

    for (uint32_t q = 0; q < pipeline->score.n_queries; q++) {
        const size_t at = (size_t)q * pipeline->n_candidates + pipeline->cursor;

        memcpy(scratch->kept_scores + at, scratch->scores + at, n * sizeof(float));
    }
    memcpy(scratch->kept_tokens + pipeline->cursor, scratch->candidates + pipeline->cursor,
           n * sizeof(uint32_t));
}

static bool stage_rerank(struct kvs_query_pipeline *pipeline)
{
    const struct kvs_score *score = &pipeline->score;
    const void *keys[RERANK_ROWS];
    uint32_t n = pipeline->n_candidates - pipeline->cursor;

    if (n > RERANK_ROWS)
        n = RERANK_ROWS;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t token = pipeline->scratch.candidates[pipeline->cursor + i];

        if (kvs_unit_is_bad(score->unit, token))
            return fail_bad(pipeline, token);
        keys[i] = kvs_unit_row(score->unit, token);
    }
    kv_exact_scores_score_list(score->type, keys, n, score->d, score->queries, score->n_queries,
                               pipeline->scratch.scores + pipeline->cursor,
                               pipeline->n_candidates);
    if (pipeline->input.query->summaries != 0)
        keep_scores(pipeline, n);
    pipeline->cursor += n;
    if (pipeline->cursor < pipeline->n_candidates)
        return true;
    pipeline->found[pipeline->unit].n_reranked = pipeline->n_scored = pipeline->n_candidates;
    kvs_select_begin(
        pipeline->selector, &pipeline->selection, pipeline->scratch.scores, NULL, NULL,
        kvs_selection_merges(&pipeline->selection) ? NULL : pipeline->scratch.query_mask,
        pipeline->n_candidates, pipeline->input.query->flags & KV_WIRE_WEIGHTS,
        pipeline->scratch.selection_room);
    pipeline->stage = KVS_QUERY_SELECT;
    return true;
}

static bool stage_select(struct kvs_query_pipeline *pipeline)
{
    if (!kvs_select_slice(pipeline->selector))
        return true;
    struct kvs_query_scratch *scratch = &pipeline->scratch;

    pipeline->n_selected =
        kvs_select_rows(pipeline->selector, scratch->indices, scratch->selected_by);
    for (uint32_t i = 0; i < pipeline->n_selected; i++) {
        scratch->weights[i] = pipeline->selector->weights[scratch->indices[i]];
        scratch->query_mask[i] = scratch->selected_by[i];
        scratch->candidates[i] = scratch->candidates[scratch->indices[i]];
    }
    pipeline->cursor = 0;
    pipeline->stage = selected_stage(pipeline);
    return true;
}

/* ---- step 3: the result ------------------------------------------------------------------ */

/* Returns whether the client has cached the row's block.  Tokens ascend from call to call. */
static bool is_cached(struct kvs_query_pipeline *pipeline,
                      const struct kvs_unit *unit,
                      const struct kv_wire_cached_block *end,
                      uint32_t token)
{
    const uint32_t block = token / KV_BLOCK_TOKENS;

    while (pipeline->cached < end && pipeline->cached->block < block)
        pipeline->cached++;
    if (pipeline->cached == end || pipeline->cached->block != block)
        return false;
    if (pipeline->looked != pipeline->cached) {
        pipeline->looked = pipeline->cached;
        pipeline->looked_same =
            unit->committed / KV_BLOCK_TOKENS > block &&
            kv_wire_block_fingerprint(kvs_unit_crc(unit, block * KV_BLOCK_TOKENS)) ==
                pipeline->cached->fingerprint;
    }
    return pipeline->looked_same;
}

/* Fills in the result for the unit, now that its rows are selected. */
static void begin_found(struct kvs_query_pipeline *pipeline)
{
    struct kv_wire_query_result *found = &pipeline->found[pipeline->unit];

    found->n_scored_by_code = pipeline->score.n_coded;
    found->n_scored_by_key = pipeline->score.n_exact;
    found->n_chapters = pipeline->score.n_chapters;
    found->n_selected = pipeline->n_selected;
    if (pipeline->input.selected != NULL)
        pipeline->input.selected(pipeline->input.arg, &pipeline->score, &pipeline->selection,
                                 pipeline->scratch.candidates, pipeline->n_selected);
}

/* Adds the row at the cursor to the ids of the result. */
static void name_row(struct kvs_query_pipeline *pipeline, bool keeps)
{
    const uint32_t token = pipeline->scratch.candidates[pipeline->cursor];

    pipeline->query_masks[pipeline->n_ids] = pipeline->scratch.query_mask[pipeline->cursor];
    pipeline->scores[pipeline->n_ids] = pipeline->scratch.weights[pipeline->cursor];
    pipeline->ids[pipeline->n_ids++] = keeps ? token | KV_WIRE_ID_CACHED : token;
    pipeline->found[pipeline->unit].n_ids++;
}

static void end_unit(struct kvs_query_pipeline *pipeline)
{
    const struct kv_wire_query *query = pipeline->input.query;

    if (kvs_query_has_outputs(query)) {
        pipeline->n_outputs += query->n_queries * layer_of(pipeline)->d_v;
        pipeline->n_lses += query->n_queries;
    }
    pipeline->cached = pipeline->cached_end;
    pipeline->queries += (size_t)query->n_queries * pipeline->score.d;
    pipeline->unit++;
    pipeline->n_again = 0;
    pipeline->stage = KVS_QUERY_UNIT;
}

/* The unit's selected rows are done: continues with the estimate or the next unit. */
static void end_selected(struct kvs_query_pipeline *pipeline)
{
    const struct kv_wire_query *query = pipeline->input.query;
    struct kvs_estimate_input input = {
        .score = &pipeline->score,
        .bits = kvs_summaries_bits(query->summaries),
        .selected = pipeline->scratch.candidates,
        .query_mask = pipeline->scratch.query_mask,
        .n_selected = pipeline->n_selected,
        .each = query->merge == KV_MERGE_NONE,
        .scored = pipeline->scratch.kept_tokens,
        .scores = pipeline->scratch.kept_scores,
        .n_scored = pipeline->n_scored,
    };

    if (query->summaries == 0) {
        end_unit(pipeline);
        return;
    }
    kvs_attention_shape(layer_of(pipeline), query->n_queries, query->scale,
                        &input.shape); /* begin has checked it */
    kvs_estimate_begin(pipeline->estimate, &input);
    pipeline->stage = KVS_QUERY_ESTIMATE;
}

/* Lists the ids of the unit's selected rows, and gathers the rows. */
static bool stage_gather(struct kvs_query_pipeline *pipeline)
{
    const struct kv_wire_query *query = pipeline->input.query;
    const struct kvs_unit *unit = pipeline->score.unit;
    const void *rows[GATHER_ROWS];
    uint32_t n = 0;

    if (pipeline->cursor == 0)
        begin_found(pipeline);
    for (; pipeline->cursor < pipeline->n_selected && n < GATHER_ROWS; pipeline->cursor++) {
        uint32_t token = pipeline->scratch.candidates[pipeline->cursor];
        bool keeps = is_cached(pipeline, unit, pipeline->cached_end, token);

        if (kvs_unit_is_bad(unit, token))
            return fail_bad(pipeline, token);
        name_row(pipeline, keeps);
        if (keeps || query->answer != KV_ANSWER_ROWS)
            continue;
        pipeline->crcs[pipeline->n_rows++] = *kvs_unit_crc(unit, token);
        rows[n++] = kvs_unit_row(unit, token);
    }
    if (n > 0)
        kv_rows_gather(pipeline->input.rows + pipeline->rows_bytes, rows, n, unit->row_bytes);
    pipeline->rows_bytes += (size_t)n * unit->row_bytes;
    if (pipeline->cursor == pipeline->n_selected)
        end_selected(pipeline);
    return true;
}

/* Computes attention over the selected rows that the client has not cached, and verifies them.
 * The ids of cached rows are listed, so that the client can attend them. */
static bool stage_attend(struct kvs_query_pipeline *pipeline)
{
    const struct kv_wire_query *query = pipeline->input.query;
    const struct kvs_unit *unit = pipeline->score.unit;
    struct kvs_attention *attention = pipeline->attention;
    bool is_full = false;

    if (pipeline->cursor == 0) {
        struct kv_attend_shape shape = {0};

        begin_found(pipeline);
        kvs_attention_shape(layer_of(pipeline), query->n_queries, query->scale,
                            &shape); /* begin has checked it */
        kvs_attention_begin(attention, &shape, unit, pipeline->queries,
                            query->merge == KV_MERGE_NONE);
    }
    for (; pipeline->cursor < pipeline->n_selected && !is_full; pipeline->cursor++) {
        uint32_t token = pipeline->scratch.candidates[pipeline->cursor];
        bool keeps = is_cached(pipeline, unit, pipeline->cached_end, token);

        if (keeps || !kvs_query_names_cached_only(query))
            name_row(pipeline, keeps);
        if (!keeps)
            is_full = kvs_attention_add(attention, token,
                                        pipeline->scratch.query_mask[pipeline->cursor]);
    }
    pipeline->n_attended += attention->n;
    const uint32_t bad = kvs_attention_slice(attention, pipeline->input.store);
    if (bad != UINT32_MAX)
        return fail_bad(pipeline, bad);
    if (pipeline->cursor < pipeline->n_selected)
        return true;
    kvs_attention_end(attention, pipeline->outputs + pipeline->n_outputs,
                      pipeline->lses + pipeline->n_lses);
    end_selected(pipeline);
    return true;
}

/* Estimates what the unit's other eligible rows would have added; merges it with the attention
 * over the selected rows, if there is any. */
static bool stage_estimate(struct kvs_query_pipeline *pipeline)
{
    float *output = pipeline->outputs + pipeline->n_outputs;
    float *lse = pipeline->lses + pipeline->n_lses;

    if (!kvs_estimate_slice(pipeline->estimate, pipeline->input.codebooks,
                            pipeline->input.clock) &&
        pipeline->estimate->bad == UINT32_MAX)
        return true;
    if (pipeline->estimate->bad != UINT32_MAX)
        return fail_bad(pipeline, pipeline->estimate->bad);
    kvs_estimate_end(pipeline->estimate, pipeline->input.query->answer == KV_ANSWER_ATTEND,
                     output, lse);
    pipeline->found[pipeline->unit].n_estimated = pipeline->estimate->n_estimated;
    pipeline->n_attended_unsummarised += pipeline->estimate->n_exact;
    if (pipeline->estimate->lost != UINT32_MAX)
        /* If it cannot be queued now, the scrubber will do so. */
        (void)kvs_index_repair(pipeline->input.indexer, pipeline->score.unit,
                               pipeline->estimate->lost);
    end_unit(pipeline);
    return true;
}

bool kvs_query_pipeline_slice(struct kvs_query_pipeline *pipeline)
{
    static bool (*const stages[])(struct kvs_query_pipeline *) = {
        [KVS_QUERY_UNIT] = stage_unit,
        [KVS_QUERY_SCORE] = stage_score,
        [KVS_QUERY_SELECT_CANDIDATES] = stage_select_candidates,
        [KVS_QUERY_EXPAND] = stage_expand,
        [KVS_QUERY_RERANK] = stage_rerank,
        [KVS_QUERY_SELECT] = stage_select,
        [KVS_QUERY_GATHER] = stage_gather,
        [KVS_QUERY_ATTEND] = stage_attend,
        [KVS_QUERY_ESTIMATE] = stage_estimate,
    };

    return stages[pipeline->stage](pipeline);
}
