/* Step 1 of a query: from eligible rows to candidates. */
#include "kvserver/store/query/pipeline_private.h"

#include <string.h>

enum {
    AGAIN_MAX = 2, /* restarts of a unit whose cells change */
};

/* The entry's candidates, or all that are selected, are known: the next entry. */
static void end_step_1(struct kvs_query_pipeline *pipeline,
                       struct kvs_query_entry *entry,
                       uint32_t n_candidates,
                       bool is_cut,
                       bool is_reranked)
{
    entry->n_candidates = entry->n_selected = n_candidates;
    entry->is_cut = is_cut;
    entry->is_reranked = is_reranked;
    entry->cursor = 0;
    entry->reads.books += entry->score.books_bytes;
    entry->reads.codes += entry->score.codes_bytes;
    entry->reads.keys += entry->score.keys_bytes;
    kvs_query_begin_step_1(pipeline, pipeline->entry + 1);
}

/* All vectors have chosen the candidates together. */
static void mask_all(struct kvs_query_entry *entry, uint32_t n, uint32_t mask)
{
    for (uint32_t i = 0; i < n; i++)
        entry->query_mask[i] = mask;
}

/* Returns whether a cut leaves fewer rows of some group than step 1, which has n rows. */
static bool cuts(const struct kvs_query_entry *entry, uint32_t n)
{
    const struct kvs_selection *from = &entry->candidate_selection;

    if (entry->input.query->first_cut == KV_CUT_NONE)
        return false;
    for (uint32_t group = 0; group < kvs_selection_groups(from); group++) {
        const uint32_t k = entry->k[group], n_from = kvs_selection_n_candidates(from, k);

        if (kvs_selection_n_candidates(&entry->cut_selection, k) < (n_from < n ? n_from : n))
            return true;
    }
    return false;
}

/* Returns whether what a cut leaves is scored by its keys. */
static bool is_reranked_after_cut(const struct kvs_query_entry *entry)
{
    return entry->input.query->rerank > 1 || kvs_query_wants_weights(entry);
}

static void set_k(struct kvs_query_entry *entry, const uint32_t *k)
{
    for (uint32_t group = 0; group < kvs_selection_groups(&entry->candidate_selection); group++)
        entry->k[group] = k != NULL ? k[group] : entry->candidate_selection.k;
    entry->cut_selection.per_query = entry->selection.per_query = entry->k;
}

/* All rows are candidates, for all query vectors. */
static void take_all(struct kvs_query_pipeline *pipeline, struct kvs_query_entry *entry)
{
    const uint32_t n = entry->score.n, k = entry->candidate_selection.k;
    bool is_cut;
    struct kvs_range_walk walk = {.ranges = entry->score.ranges};

    for (uint32_t i = 0; i < n; i++)
        entry->candidates[i] = kvs_range_walk_to(&walk, i);
    mask_all(entry, n, UINT32_MAX >> (KV_QUERIES_MAX - entry->score.n_queries));
    set_k(entry, NULL);
    is_cut = cuts(entry, n);
    end_step_1(pipeline, entry, n, is_cut,
               is_cut ? is_reranked_after_cut(entry) : k < n || kvs_query_wants_weights(entry));
}

/* Begins to choose candidates by bytes, if the query and the unit are for that. */
static bool begin_bytes(struct kvs_query_pipeline *pipeline, struct kvs_query_entry *entry)
{
    const struct kvs_selection *selection = &entry->candidate_selection;

    return entry->input.query->first_cut != KV_CUT_NONE &&
           selection->selection == KV_SELECT_TOP && kvs_selection_merges(selection) &&
           kvs_byte_scores_begin(pipeline->byte_scores, &entry->score, entry->input.codebooks,
                                 kvs_selection_n_candidates(selection, selection->k),
                                 entry->candidates);
}

bool kvs_query_stage_unit(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = kvs_query_current(pipeline);
    const struct kv_wire_query *query = entry->input.query;
    const struct kv_layer_schema *layer = kvs_query_layer(pipeline, entry);
    struct kvs_selection *selection = &entry->candidate_selection;
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
        .rotated = pipeline->rotated,
    };
    pipeline->rounded_of = NULL; /* the unit has other vectors */
    if (entry->input.candidates != NULL)
        selection->factor = entry->input.candidates[pipeline->unit];
    entry->n_scored = entry->n_exact = entry->kept = 0;
    entry->cached_end = entry->cached + named->n_ids;
    entry->looked = NULL;
    entry->input.found[pipeline->unit] = (struct kv_wire_query_result){
        .layer = named->layer,
        .kv_head = named->kv_head,
        .recall = entry->score.unit->recall,
        .committed = entry->score.unit->committed,
    };
    if (selection->selection == KV_SELECT_TOP &&
        kvs_selection_n_candidates(selection, selection->k) >= entry->score.n) {
        take_all(pipeline, entry);
    } else if (begin_bytes(pipeline, entry)) {
        pipeline->stage = KVS_QUERY_BYTES;
    } else {
        kvs_score_begin(&entry->score, entry->input.codebooks);
        pipeline->stage = KVS_QUERY_SCORE;
    }
    return true;
}

bool kvs_query_stage_bytes(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = kvs_query_current(pipeline);

    if (!kvs_byte_scores_piece(pipeline->byte_scores, entry->input.codebooks))
        return true;
    if (entry->score.bad != UINT32_MAX)
        return kvs_query_fail_bad(pipeline, entry->score.bad);
    mask_all(entry, pipeline->byte_scores->n, UINT32_MAX);
    set_k(entry, NULL);
    end_step_1(pipeline, entry, pipeline->byte_scores->n, cuts(entry, pipeline->byte_scores->n),
               is_reranked_after_cut(entry));
    return true;
}

/* Returns whether step 1's candidates are the selected rows: there is neither a cut nor a step 2. */
static bool is_last(const struct kvs_query_entry *entry)
{
    return entry->input.query->first_cut == KV_CUT_NONE &&
           entry->candidate_selection.factor == 1;
}

bool kvs_query_stage_score(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = kvs_query_current(pipeline);
    struct kvs_score *score = &entry->score;

    if (!kvs_score_piece(score, entry->input.codebooks))
        return true;
    if (score->bad != UINT32_MAX)
        return kvs_query_fail_bad(pipeline, score->bad);
    kvs_select_begin(pipeline->selector, &entry->candidate_selection, score->scores,
                     score->maxima, score->counts, NULL, score->n_items,
                     is_last(entry) && kvs_query_wants_weights(entry), kvs_score_spare(score));
    pipeline->stage = KVS_QUERY_SELECT_CANDIDATES;
    return true;
}

bool kvs_query_stage_select_candidates(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = kvs_query_current(pipeline);

    if (!kvs_select_piece(pipeline->selector))
        return true;
    set_k(entry, pipeline->selector->k);
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

bool kvs_query_stage_expand(struct kvs_query_pipeline *pipeline)
{
    struct kvs_query_entry *entry = kvs_query_current(pipeline);

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
    if (entry->score.counts != NULL)
        entry->reads.codes += pipeline->expander->n * sizeof(uint32_t); /* in lists */
    /* These weights are the result. */
    if (is_last(entry) && kvs_query_wants_weights(entry))
        kvs_expand_weights(&entry->score, pipeline->selector, entry->input.codebooks,
                           entry->candidates, pipeline->expander->n, entry->weights);
    if (entry->input.query->first_cut == KV_CUT_NONE)
        end_step_1(pipeline, entry, pipeline->expander->n, false, !is_last(entry));
    else
        end_step_1(pipeline, entry, pipeline->expander->n, cuts(entry, entry->score.n),
                   is_reranked_after_cut(entry));
    return true;
}
