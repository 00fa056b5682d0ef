#include "kvserver/store/query/pipeline.h"

#include "kernels/gather.h"
#include "kvserver/base/slice.h"
#include "kvserver/store/rows/verify.h"

#include <assert.h>
#include <string.h>

enum {
    RERANK_ROWS = 128,    /* in a piece, at most; */
    RERANK_ROWS_MIN = 16, /* these even if they are more products than */
    RERANK_PRODUCTS = 1 << 18,
    GATHER_ROWS = 512, /* in a piece, at most; one, even if it is more than */
    GATHER_BYTES = 128 << 10,
    AGAIN_MAX = 2, /* restarts of a unit whose cells change */
    /* Keys of a span stay in a core's second-level cache: 256 KiB of 128 fp16 elements.  Of 64
     * entries' 1,024 of 16,384 candidates one took 24 ns so, 30 unit by unit and 42 entry by
     * entry (2 MiB a core, AVX-512, 23 November 2026). */
    SPAN_ROWS = 1024,
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
        .candidate_selection = kvs_query_selection(input->query, input->query->rerank),
        .selection = kvs_query_selection(input->query, 1),
    };
    entry->selection.selection = KV_SELECT_TOP; /* step 1 determines how many */
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

static void begin_step_1(struct kvs_query_pipeline *pipeline, uint32_t from);

/* Returns the stage that follows when the selected rows are known. */
static enum kvs_query_stage selected_stage(const struct kvs_query_entry *entry)
{
    return entry->input.query->answer == KV_ANSWER_ATTEND ? KVS_QUERY_ATTEND : KVS_QUERY_GATHER;
}

/* Begins to select rows, or step 3, of the first entry from `from` on, or the next unit. */
static void begin_step_3(struct kvs_query_pipeline *pipeline, uint32_t from)
{
    pipeline->entry = active_from(pipeline, from);
    if (pipeline->entry == pipeline->n_entries) {
        pipeline->unit++;
        begin_step_1(pipeline, 0);
        return;
    }
    struct kvs_query_entry *entry = &pipeline->entries[pipeline->entry];
    entry->cursor = 0;
    pipeline->stage = selected_stage(entry);
    if (!entry->is_reranked)
        return;
    pipeline->stage = KVS_QUERY_SELECT;
    kvs_select_begin(pipeline->selector, &entry->selection, entry->scores, NULL, NULL,
                     kvs_selection_merges(&entry->selection) ? NULL : entry->query_mask,
                     entry->n_candidates, entry->input.query->flags & KV_WIRE_WEIGHTS,
                     pipeline->floats);
}

/* Begins step 1 of the first entry from `from` on, or the next step of all. */
static void begin_step_1(struct kvs_query_pipeline *pipeline, uint32_t from)
{
    uint32_t n_reranked = 0;

    pipeline->entry = active_from(pipeline, from);
    pipeline->stage = KVS_QUERY_UNIT;
    if (pipeline->entry < pipeline->n_entries || pipeline->n_active == 0)
        return;
    for (uint32_t i = 0; i < pipeline->n_entries; i++)
        n_reranked += pipeline->entries[i].is_active && pipeline->entries[i].is_reranked;
    if (n_reranked == 0) {
        begin_step_3(pipeline, 0);
        return;
    }
    pipeline->stage = KVS_QUERY_RERANK;
    pipeline->entry = 0;
    pipeline->span_end = n_reranked > 1 ? 0 : UINT32_MAX;
}

/* The entry is active no more. */
static void deactivate(struct kvs_query_pipeline *pipeline, struct kvs_query_entry *entry)
{
    assert(entry->is_active);
    entry->is_active = false;
    pipeline->n_active--;
}

void kvs_query_pipeline_remove(struct kvs_query_pipeline *pipeline,
                               struct kvs_query_entry *entry)
{
    const bool is_current = entry == &pipeline->entries[pipeline->entry];

    deactivate(pipeline, entry);
    if (pipeline->n_active == 0)
        pipeline->stage = KVS_QUERY_UNIT;
    else if (!is_current || pipeline->stage == KVS_QUERY_RERANK)
        return;
    else if (pipeline->stage < KVS_QUERY_RERANK)
        begin_step_1(pipeline, pipeline->entry + 1);
    else
        begin_step_3(pipeline, pipeline->entry + 1);
}

/* Returns the layer of the current unit. */
static const struct kv_layer_schema *layer_of(const struct kvs_query_pipeline *pipeline,
                                              const struct kvs_query_entry *entry)
{
    return &entry->input.layers[entry->input.named[pipeline->unit].layer];
}

static struct kvs_query_entry *current(struct kvs_query_pipeline *pipeline)
{
    return &pipeline->entries[pipeline->entry];
}

/* The query would have read a bad row: it fails.  Returns false. */
static bool fail_bad(struct kvs_query_pipeline *pipeline, uint32_t token)
{
    pipeline->bad = token;
    return false;
}

/* ---- step 1: from eligible rows to candidates -------------------------------------------- */

/* The entry's candidates, or all that are selected, are known: the next entry. */
static void end_step_1(struct kvs_query_pipeline *pipeline,
                       struct kvs_query_entry *entry,
                       uint32_t n_candidates,
                       bool is_reranked)
{
    entry->n_candidates = entry->n_selected = n_candidates;
    entry->is_reranked = is_reranked;
    entry->cursor = 0;
    begin_step_1(pipeline, pipeline->entry + 1);
}

/* All rows are candidates, for all query vectors. */
static void take_all(struct kvs_query_pipeline *pipeline, struct kvs_query_entry *entry)
{
    const uint32_t n = entry->score.n, k = entry->candidate_selection.k;
    const uint32_t all = UINT32_MAX >> (KV_QUERIES_MAX - entry->score.n_queries);
    struct kvs_range_walk walk = {.ranges = entry->score.ranges};

    for (uint32_t i = 0; i < n; i++) {
        entry->candidates[i] = kvs_range_walk_to(&walk, i);
        entry->query_mask[i] = all;
    }
    for (uint32_t group = 0; group < kvs_selection_groups(&entry->candidate_selection); group++)
        entry->k[group] = k;
    end_step_1(pipeline, entry, n, k < n || (entry->input.query->flags & KV_WIRE_WEIGHTS));
}

static bool stage_unit(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = current(pipeline);
    const struct kv_wire_query *query = entry->input.query;
    const struct kv_layer_schema *layer = layer_of(pipeline, entry);
    const struct kvs_selection *selection = &entry->candidate_selection;
    const struct kv_wire_unit *named = &entry->input.named[pipeline->unit];

    entry->score = (struct kvs_score){
        .unit = entry->input.unit_at(entry->input.arg, pipeline->unit),
        .type = (enum kv_key_type)layer->dtype,
        .d = layer->d_k,
        .ranges = entry->input.ranges,
        .n_ranges = query->n_ranges,
        .n_queries = query->n_queries,
        .queries = entry->queries,
        .by_code = true,
        .by_cell = entry->n_again < AGAIN_MAX,
        .n = kvs_ranges_count(entry->input.ranges, query->n_ranges),
        .room = pipeline->floats,
        .room_floats = pipeline->n_free,
        .runs = pipeline->runs,
        .tables = pipeline->tables,
    };
    kvs_score_begin(&entry->score, entry->input.codebooks);
    entry->n_scored = 0;
    entry->cached_end = entry->cached + named->n_ids;
    entry->looked = NULL;
    entry->input.found[pipeline->unit] = (struct kv_wire_query_result){
        .layer = named->layer,
        .kv_head = named->kv_head,
        .recall = entry->score.unit->recall,
        .committed = entry->score.unit->committed,
    };
    if (selection->selection != KV_SELECT_TOP ||
        kvs_selection_n_candidates(selection, selection->k) < entry->score.n)
        pipeline->stage = KVS_QUERY_SCORE;
    else
        take_all(pipeline, entry);
    return true;
}

static bool stage_score(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = current(pipeline);
    struct kvs_score *score = &entry->score;

    if (!kvs_score_piece(score, entry->input.codebooks))
        return true;
    if (score->bad != UINT32_MAX)
        return fail_bad(pipeline, score->bad);
    kvs_select_begin(pipeline->selector, &entry->candidate_selection, score->scores,
                     score->maxima, score->counts, NULL, score->n_items,
                     entry->input.query->rerank == 1 &&
                         (entry->input.query->flags & KV_WIRE_WEIGHTS),
                     kvs_score_spare(score));
    pipeline->stage = KVS_QUERY_SELECT_CANDIDATES;
    return true;
}

static bool stage_select_candidates(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = current(pipeline);

    if (!kvs_select_piece(pipeline->selector))
        return true;
    memcpy(entry->k, pipeline->selector->k, sizeof(entry->k));
    entry->selection.per_query = entry->k;
    kvs_expand_begin(pipeline->expander, &entry->score, pipeline->selector, entry->candidates,
                     entry->query_mask);
    pipeline->stage = KVS_QUERY_EXPAND;
    return true;
}

/* Verifies the cells that were scored, and schedules the repair of bad ones. */
static void verify_cells(const struct kvs_query_entry *entry)
{
    const struct kvs_score *score = &entry->score;
    struct kvs_codebooks *books = entry->input.codebooks;

    for (uint32_t i = 0; i < score->n_runs; i++) {
        const uint32_t codebook = score->runs[i].codebook;

        if (codebook == KVS_SCORE_ROWS || kvs_codebook_verify_cells(books, codebook))
            continue;
        /* If it cannot be queued now, the scrubber will do so. */
        (void)kvs_index_repair(entry->input.indexer, score->unit,
                               kvs_codebook_at(books, codebook)->block_begin);
    }
}

static bool stage_expand(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = current(pipeline);
    const struct kv_wire_query *query = entry->input.query;
    const bool is_last = query->rerank == 1;

    if (!kvs_expand_piece(pipeline->expander, entry->input.codebooks))
        return true;
    if (!kvs_expand_is_whole(pipeline->expander) && entry->score.by_cell) {
        /* Try again: without the bad cells, or with cells that have been remade since the
         * scores; the last try uses no cells. */
        verify_cells(entry);
        entry->n_again++;
        pipeline->stage = KVS_QUERY_UNIT;
        return true;
    }
    /* Without reranking, these weights are the result. */
    if (is_last && (query->flags & KV_WIRE_WEIGHTS))
        kvs_expand_weights(&entry->score, pipeline->selector, entry->input.codebooks,
                           entry->candidates, pipeline->expander->n, entry->weights);
    end_step_1(pipeline, entry, pipeline->expander->n, !is_last);
    return true;
}

/* ---- step 2: from candidates to selected rows -------------------------------------------- */

/* Returns the entry's first candidate that is to be rescored, or UINT32_MAX. */
static uint32_t next_candidate(const struct kvs_query_entry *entry)
{
    return entry->is_active && entry->is_reranked && entry->cursor < entry->n_candidates
               ? entry->candidates[entry->cursor]
               : UINT32_MAX;
}

/* The same of all entries. */
static uint32_t first_candidate(const struct kvs_query_pipeline *pipeline)
{
    uint32_t first = UINT32_MAX;

    for (uint32_t i = 0; i < pipeline->n_entries; i++) {
        const uint32_t next = next_candidate(&pipeline->entries[i]);

        first = next < first ? next : first;
    }
    return first;
}

/* Copies the scores of n rows at the cursor for step 3, because step 2 overwrites its
 * arrays. */
static void keep_scores(struct kvs_query_entry *entry, uint32_t n)
{
    for (uint32_t q = 0; q < entry->score.n_queries; q++) {
        const size_t at = (size_t)q * entry->n_candidates + entry->cursor;

        memcpy(entry->kept_scores + at, entry->scores + at, n * sizeof(float));
    }
    memcpy(entry->kept_tokens + entry->cursor, entry->candidates + entry->cursor,
           n * sizeof(uint32_t));
}

/* Rescores at most n_max of the entry's candidates in the span.  Returns their number; 0: one
 * is bad. */
static uint32_t
rescore(struct kvs_query_pipeline *pipeline, struct kvs_query_entry *entry, uint32_t n_max)
{
    const struct kvs_score *score = &entry->score;
    const uint32_t *candidates = entry->candidates + entry->cursor;
    const uint32_t n_left = entry->n_candidates - entry->cursor;
    const void *keys[RERANK_ROWS];
    uint32_t n = 0;

    for (; n < n_left && n < n_max && candidates[n] < pipeline->span_end; n++) {
        if (kvs_unit_is_bad(score->unit, candidates[n])) {
            fail_bad(pipeline, candidates[n]);
            return 0;
        }
        keys[n] = kvs_unit_row(score->unit, candidates[n]);
    }
    kv_exact_scores_score_list(score->type, keys, n, score->d, score->queries, score->n_queries,
                               entry->scores + entry->cursor, entry->n_candidates);
    if (entry->kept_scores != NULL)
        keep_scores(entry, n);
    entry->cursor += n;
    return n;
}

/* Moves on to the next entry that has candidates in the span, or to the next span.  Returns
 * false if all are rescored. */
static bool next_in_span(struct kvs_query_pipeline *pipeline)
{
    while (pipeline->entry < pipeline->n_entries &&
           next_candidate(current(pipeline)) >= pipeline->span_end)
        pipeline->entry++;
    if (pipeline->entry < pipeline->n_entries)
        return true;
    const uint32_t first = first_candidate(pipeline);
    if (first == UINT32_MAX)
        return false;
    pipeline->span_end = (first / SPAN_ROWS + 1) * SPAN_ROWS;
    pipeline->spans_read++;
    pipeline->entry = 0;
    return next_in_span(pipeline);
}

static uint32_t rerank_rows(const struct kvs_score *score)
{
    const uint32_t n = RERANK_PRODUCTS / (score->n_queries * score->d);

    return n < RERANK_ROWS_MIN ? RERANK_ROWS_MIN : n < RERANK_ROWS ? n : RERANK_ROWS;
}

/* All entries' candidates, span by span; in each span one entry after the other. */
static bool stage_rerank(struct kvs_query_pipeline *pipeline)
{
    uint32_t n_left = UINT32_MAX;

    while (next_in_span(pipeline)) {
        struct kvs_query_entry *entry = current(pipeline);

        if (n_left == 0)
            return true;
        if (n_left == UINT32_MAX)
            n_left = rerank_rows(&entry->score);
        const uint32_t n = rescore(pipeline, entry, n_left);
        if (n == 0)
            return false;
        n_left -= n;
        pipeline->spans_wanted +=
            pipeline->span_end != UINT32_MAX && next_candidate(entry) >= pipeline->span_end;
    }
    for (uint32_t i = 0; i < pipeline->n_entries; i++) {
        struct kvs_query_entry *entry = &pipeline->entries[i];

        if (entry->is_active && entry->is_reranked)
            entry->input.found[pipeline->unit].n_reranked = entry->n_scored =
                entry->n_candidates;
    }
    begin_step_3(pipeline, 0);
    return true;
}

static bool stage_select(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = current(pipeline);
    /* Behind the selector's room. */
    const size_t n = entry->n_candidates;
    uint32_t *selected_by = (uint32_t *)(void *)(pipeline->floats + KVS_SELECT_CAPACITY * n);
    uint32_t *indices = selected_by + n;

    if (!kvs_select_piece(pipeline->selector))
        return true;
    entry->n_selected = kvs_select_rows(pipeline->selector, indices, selected_by);
    for (uint32_t i = 0; i < entry->n_selected; i++) {
        entry->weights[i] = pipeline->selector->weights[indices[i]];
        entry->query_mask[i] = selected_by[i];
        entry->candidates[i] = entry->candidates[indices[i]];
    }
    entry->cursor = 0;
    pipeline->stage = selected_stage(entry);
    return true;
}

/* ---- step 3: the result ------------------------------------------------------------------ */

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
        entry->n_outputs += query->n_queries * layer_of(pipeline, entry)->d_v;
        entry->n_lses += query->n_queries;
    }
    entry->cached = entry->cached_end;
    entry->queries += (size_t)query->n_queries * entry->score.d;
    entry->n_again = 0;
    if (pipeline->unit + 1 == pipeline->n_units) {
        pipeline->done = entry;
        deactivate(pipeline, entry);
    }
    begin_step_3(pipeline, pipeline->entry + 1);
}

/* The unit's selected rows are done: continues with the estimate or the next unit. */
static void end_selected(struct kvs_query_pipeline *pipeline, struct kvs_query_entry *entry)
{
    const struct kv_wire_query *query = entry->input.query;
    struct kvs_estimate_input input = {
        .score = &entry->score,
        .bits = kvs_summaries_bits(query->summaries),
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
    kvs_attention_shape(layer_of(pipeline, entry), query->n_queries, query->scale,
                        &input.shape); /* begin has checked it */
    kvs_estimate_begin(pipeline->estimate, &input);
    pipeline->stage = KVS_QUERY_ESTIMATE;
}

/* Lists the ids of the unit's selected rows, and gathers the rows. */
static bool stage_gather(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = current(pipeline);
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
            return fail_bad(pipeline, token);
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
    if (entry->cursor == entry->n_selected)
        end_selected(pipeline, entry);
    return true;
}

/* Computes attention over the selected rows that the client has not cached, and verifies them.
 * The ids of cached rows are listed, so that the client can attend them. */
static bool stage_attend(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = current(pipeline);
    const struct kv_wire_query *query = entry->input.query;
    struct kvs_attention *attention = pipeline->attention;
    bool is_full = false;

    if (entry->cursor == 0) {
        struct kv_attend_shape shape = {0};

        begin_found(pipeline, entry);
        kvs_attention_shape(layer_of(pipeline, entry), query->n_queries, query->scale,
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
    const uint32_t bad = kvs_attention_piece(attention, entry->input.store);
    if (bad != UINT32_MAX)
        return fail_bad(pipeline, bad);
    if (entry->cursor < entry->n_selected)
        return true;
    kvs_attention_end(attention, entry->input.outputs + entry->n_outputs,
                      entry->input.lses + entry->n_lses);
    end_selected(pipeline, entry);
    return true;
}

/* Estimates what the unit's other eligible rows would have added; merges it with the attention
 * over the selected rows, if there is any. */
static bool stage_estimate(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = current(pipeline);
    struct kvs_estimate *estimate = pipeline->estimate;
    float *output = entry->input.outputs + entry->n_outputs;
    float *lse = entry->input.lses + entry->n_lses;

    if (!kvs_estimate_piece(estimate, entry->input.codebooks) && estimate->bad == UINT32_MAX)
        return true;
    if (estimate->bad != UINT32_MAX)
        return fail_bad(pipeline, estimate->bad);
    kvs_estimate_end(estimate, entry->input.query->answer == KV_ANSWER_ATTEND, output, lse);
    entry->input.found[pipeline->unit].n_estimated = estimate->n_estimated;
    entry->n_attended_unsummarised += estimate->n_exact;
    if (estimate->lost != UINT32_MAX)
        /* If it cannot be queued now, the scrubber will do so. */
        (void)kvs_index_repair(entry->input.indexer, entry->score.unit, estimate->lost);
    end_unit(pipeline, entry);
    return true;
}

bool kvs_query_pipeline_slice(struct kvs_query_pipeline *pipeline, const struct kv_clock *clock)
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

    struct kv_slice slice = kv_slice_begin(clock, 1);

    pipeline->done = NULL;
    do
        if (!stages[pipeline->stage](pipeline))
            return false;
    while (pipeline->done == NULL && !kv_slice_over(&slice));
    return true;
}
