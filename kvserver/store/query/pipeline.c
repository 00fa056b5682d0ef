#include "kvserver/store/query/pipeline.h"

#include "kernels/gather.h"
#include "kvserver/store/rows/verify.h"

#include <string.h>

enum {
    RERANK_ROWS = 512, /* of one slice */
    GATHER_ROWS = 512,
    AGAIN_MAX = 2, /* of a unit, with cells that change */
};

bool kv_query_has_outputs(const struct kv_wire_query *query)
{
    return query->answer == KV_ANSWER_ATTEND || query->summaries != 0;
}

bool kv_query_names_held_only(const struct kv_wire_query *query)
{
    return query->answer == KV_ANSWER_ATTEND && !(query->flags & KV_WIRE_IDS);
}

struct kv_choice kv_query_choice(const struct kv_wire_query *query, uint32_t rerank)
{
    return (struct kv_choice){.merge = (enum kv_merge)query->merge,
                              .selection = (enum kv_selection)query->selection,
                              .n_queries = query->n_queries,
                              .scale = query->scale,
                              .share = query->fraction,
                              .k = query->k,
                              .factor = rerank};
}

void kv_querier_begin(struct kv_querier *querier, const struct kvs_query_input *input)
{
    querier->input = *input;
    querier->unit = querier->n_again = 0;
    querier->n_ids = querier->n_rows = 0;
    querier->rows_bytes = 0;
    querier->n_outputs = querier->n_lses = 0;
    querier->n_attended = querier->n_rest_exact = 0;
    querier->stage = KV_QUERY_UNIT;
    querier->choice = kv_query_choice(input->query, 1);
    querier->choice.selection = KV_SELECT_TOP; /* step 1 says how many */
    querier->take = kv_query_choice(input->query, input->query->rerank);
    querier->queries = input->queries;
    querier->held = input->held;
}

/* Of the unit at work. */
static const struct kv_layer_schema *layer_of(const struct kv_querier *querier)
{
    return &querier->input.layers[querier->input.named[querier->unit].layer];
}

/* When it is known which rows are chosen. */
static enum kv_query_stage chosen_stage(const struct kv_querier *querier)
{
    return querier->input.query->answer == KV_ANSWER_ATTEND ? KV_QUERY_ATTEND : KV_QUERY_GATHER;
}

/* Step 1 took n rows: there is room for step 2. */
static void set_taken(struct kv_querier *querier, uint32_t n)
{
    querier->n_taken = querier->n_chosen = n;
    kvs_query_scratch_divide(&querier->scratch, querier->scan.n_queries, n);
}

static enum kv_query_stage first_stage(struct kv_querier *querier)
{
    const bool weights = querier->input.query->flags & KV_WIRE_WEIGHTS;
    const uint32_t n = querier->scan.n;

    if (querier->take.selection != KV_SELECT_TOP ||
        kv_choice_takes(&querier->take, querier->take.k) < n)
        return KV_QUERY_SCORE;
    /* All are taken, by all vectors. */
    const uint32_t all = UINT32_MAX >> (KV_QUERIES_MAX - querier->scan.n_queries);
    struct kv_range_walk walk = {.ranges = querier->scan.ranges};
    set_taken(querier, n);
    for (uint32_t i = 0; i < n; i++) {
        querier->scratch.taken[i] = kv_range_walk_to(&walk, i);
        querier->scratch.among[i] = all;
    }
    for (uint32_t group = 0; group < kv_choice_groups(&querier->take); group++)
        querier->k[group] = querier->take.k;
    return querier->take.k < n || weights ? KV_QUERY_RERANK : chosen_stage(querier);
}

/* The row is bad, and would have been read: there is no answer.  Returns false. */
static bool fail_bad(struct kv_querier *querier, uint32_t token)
{
    querier->bad = token;
    return false;
}

static bool stage_unit(struct kv_querier *querier)
{
    const struct kv_wire_query *query = querier->input.query;
    const struct kv_layer_schema *layer = layer_of(querier);

    querier->scan = (struct kv_scan){
        .unit = querier->input.units[querier->unit],
        .type = (enum kv_key_type)layer->dtype,
        .d = layer->d_k,
        .ranges = querier->input.ranges,
        .n_ranges = query->n_ranges,
        .n_queries = query->n_queries,
        .queries = querier->queries,
        .by_code = true,
        .by_cell = querier->n_again < AGAIN_MAX,
        .n = kv_ranges_count(querier->input.ranges, query->n_ranges),
        .room = querier->scratch.floats,
        .room_floats = KV_QUERIER_FLOATS,
        .parts = querier->scratch.parts,
        .tables = querier->scratch.tables,
    };
    kv_scan_begin(&querier->scan, querier->input.codebooks);
    querier->cursor = 0;
    querier->n_taken = querier->n_chosen = querier->n_scored = 0;
    querier->held_end = querier->held + querier->input.named[querier->unit].n_ids;
    querier->looked = NULL;
    querier->found[querier->unit] = (struct kv_wire_query_result){
        .layer = querier->input.named[querier->unit].layer,
        .kv_head = querier->input.named[querier->unit].kv_head,
        .recall = querier->scan.unit->recall,
        .committed = querier->scan.unit->committed,
    };
    querier->stage = first_stage(querier);
    return true;
}

static bool stage_score(struct kv_querier *querier)
{
    struct kv_scan *scan = &querier->scan;

    if (!kv_scan_slice(scan, querier->input.codebooks, querier->input.clock))
        return true;
    if (scan->bad != UINT32_MAX)
        return fail_bad(querier, scan->bad);
    kv_choose_begin(querier->chooser, &querier->take, scan->scores, scan->maxima, scan->counts,
                    NULL, scan->n_items,
                    querier->input.query->rerank == 1 &&
                        (querier->input.query->flags & KV_WIRE_WEIGHTS),
                    kvs_scan_spare(scan));
    querier->stage = KV_QUERY_TAKE;
    return true;
}

static bool stage_take(struct kv_querier *querier)
{
    if (!kv_choose_slice(querier->chooser))
        return true;
    memcpy(querier->k, querier->chooser->k, sizeof(querier->k));
    querier->choice.each = querier->k;
    kv_pick_begin(querier->picker, &querier->scan, querier->chooser, querier->scratch.taken,
                  querier->scratch.among);
    querier->stage = KV_QUERY_PICK;
    return true;
}

/* Verifies the cells that were scored. */
static void verify_cells(struct kv_querier *querier)
{
    const struct kv_scan *scan = &querier->scan;
    struct kv_codebooks *books = querier->input.codebooks;

    for (uint32_t i = 0; i < scan->n_parts; i++) {
        const uint32_t codebook = scan->parts[i].codebook;

        if (codebook == KV_SCAN_ROWS || kv_codebook_verify_cells(books, codebook))
            continue;
        /* What cannot be queued now, the scrub will find lost. */
        (void)kv_index_repair(querier->input.indexer, scan->unit,
                              kv_codebook_at(books, codebook)->block_begin);
    }
}

static bool stage_pick(struct kv_querier *querier)
{
    const bool is_last = querier->input.query->rerank == 1;

    if (!kv_pick_slice(querier->picker, querier->input.codebooks))
        return true;
    if (!kv_pick_is_whole(querier->picker) && querier->scan.by_cell) {
        /* Once more: without the bad ones, or with those that were made in their place since
         * they were scored; then without any. */
        verify_cells(querier);
        querier->n_again++;
        querier->stage = KV_QUERY_UNIT;
        return true;
    }
    set_taken(querier, querier->picker->n);
    /* Where nothing is reranked, these weights are the answer's.  They go where scores were;
     * not at once: few cells may be many rows, and the chooser's weights begin close behind. */
    if (is_last && (querier->input.query->flags & KV_WIRE_WEIGHTS)) {
        float *weights =
            (float *)(void *)querier->scratch.indices; /* step 2's, which there is not */

        kv_pick_weights(&querier->scan, querier->chooser, querier->input.codebooks,
                        querier->scratch.taken, querier->n_taken, weights);
        memcpy(querier->scratch.weights, weights, querier->n_taken * sizeof(*weights));
    }
    querier->stage = is_last ? chosen_stage(querier) : KV_QUERY_RERANK;
    return true;
}

/* For step 3: those of the n rows at the cursor, as step 2 needs its arrays up. */
static void keep_scores(struct kv_querier *querier, uint32_t n)
{
    const struct kvs_query_scratch *scratch = &querier->scratch;

    for (uint32_t q = 0; q < querier->scan.n_queries; q++) {
        const size_t at = (size_t)q * querier->n_taken + querier->cursor;

        memcpy(scratch->kept_scores + at, scratch->scores + at, n * sizeof(float));
    }
    memcpy(scratch->kept_tokens + querier->cursor, scratch->taken + querier->cursor,
           n * sizeof(uint32_t));
}

static bool stage_rerank(struct kv_querier *querier)
{
    const struct kv_scan *scan = &querier->scan;
    const void *keys[RERANK_ROWS];
    uint32_t n = querier->n_taken - querier->cursor;

    if (n > RERANK_ROWS)
        n = RERANK_ROWS;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t token = querier->scratch.taken[querier->cursor + i];

        if (kv_unit_is_bad(scan->unit, token))
            return fail_bad(querier, token);
        keys[i] = kv_unit_row(scan->unit, token);
    }
    kv_keys_score_list(scan->type, keys, n, scan->d, scan->queries, scan->n_queries,
                       querier->scratch.scores + querier->cursor, querier->n_taken);
    if (querier->input.query->summaries != 0)
        keep_scores(querier, n);
    querier->cursor += n;
    if (querier->cursor < querier->n_taken)
        return true;
    querier->found[querier->unit].n_reranked = querier->n_scored = querier->n_taken;
    kv_choose_begin(querier->chooser, &querier->choice, querier->scratch.scores, NULL, NULL,
                    kv_choice_merges(&querier->choice) ? NULL : querier->scratch.among,
                    querier->n_taken, querier->input.query->flags & KV_WIRE_WEIGHTS,
                    querier->scratch.selection_room);
    querier->stage = KV_QUERY_CHOOSE;
    return true;
}

static bool stage_choose(struct kv_querier *querier)
{
    if (!kv_choose_slice(querier->chooser))
        return true;
    struct kvs_query_scratch *scratch = &querier->scratch;

    querier->n_chosen = kv_choose_rows(querier->chooser, scratch->indices, scratch->chosen_by);
    for (uint32_t i = 0; i < querier->n_chosen; i++) {
        scratch->weights[i] = querier->chooser->weights[scratch->indices[i]];
        scratch->among[i] = scratch->chosen_by[i];
        scratch->taken[i] = scratch->taken[scratch->indices[i]];
    }
    querier->cursor = 0;
    querier->stage = chosen_stage(querier);
    return true;
}

/* Is the row one of a block that the asker has?  Tokens ascend from call to call. */
static bool is_held(struct kv_querier *querier,
                    const struct kv_unit *unit,
                    const struct kv_wire_cached_block *end,
                    uint32_t token)
{
    const uint32_t block = token / KV_BLOCK_TOKENS;

    while (querier->held < end && querier->held->block < block)
        querier->held++;
    if (querier->held == end || querier->held->block != block)
        return false;
    if (querier->looked != querier->held) {
        querier->looked = querier->held;
        querier->looked_same = unit->committed / KV_BLOCK_TOKENS > block &&
                               kv_wire_block_fingerprint(unit->segments[block]->crcs) ==
                                   querier->held->fingerprint;
    }
    return querier->looked_same;
}

/* What was chosen of the unit, and what that took. */
static void begin_found(struct kv_querier *querier)
{
    struct kv_wire_query_result *found = &querier->found[querier->unit];

    found->n_scored_by_code = querier->scan.n_coded;
    found->n_scored_by_key = querier->scan.n_exact;
    found->n_chapters = querier->scan.n_chapters;
    found->n_selected = querier->n_chosen;
    if (querier->input.selected != NULL)
        querier->input.selected(querier->input.arg, &querier->scan, &querier->choice,
                                querier->scratch.taken, querier->n_chosen);
}

/* Names the row at the cursor in the answer. */
static void name_row(struct kv_querier *querier, bool keeps)
{
    const uint32_t token = querier->scratch.taken[querier->cursor];

    querier->heads[querier->n_ids] = querier->scratch.among[querier->cursor];
    querier->scores[querier->n_ids] = querier->scratch.weights[querier->cursor];
    querier->ids[querier->n_ids++] = keeps ? token | KV_WIRE_ID_CACHED : token;
    querier->found[querier->unit].n_ids++;
}

static void end_unit(struct kv_querier *querier)
{
    const struct kv_wire_query *query = querier->input.query;

    if (kv_query_has_outputs(query)) {
        querier->n_outputs += query->n_queries * layer_of(querier)->d_v;
        querier->n_lses += query->n_queries;
    }
    querier->held = querier->held_end;
    querier->queries += (size_t)query->n_queries * querier->scan.d;
    querier->unit++;
    querier->n_again = 0;
    querier->stage = KV_QUERY_UNIT;
}

/* The unit's rows are named, and sent or attended. */
static void end_chosen(struct kv_querier *querier)
{
    const struct kv_wire_query *query = querier->input.query;
    struct kv_remainder_question question = {
        .scan = &querier->scan,
        .bits = kv_summaries_bits(query->summaries),
        .chosen = querier->scratch.taken,
        .among = querier->scratch.among,
        .n_chosen = querier->n_chosen,
        .each = query->merge == KV_MERGE_NONE,
        .scored = querier->scratch.kept_tokens,
        .scores = querier->scratch.kept_scores,
        .n_scored = querier->n_scored,
    };

    if (query->summaries == 0) {
        end_unit(querier);
        return;
    }
    kv_attention_shape(layer_of(querier), query->n_queries, query->scale,
                       &question.shape); /* which begin has checked */
    kv_remainder_begin(querier->remainder, &question);
    querier->stage = KV_QUERY_REST;
}

/* Ids of the unit's answer, then its rows. */
static bool stage_gather(struct kv_querier *querier)
{
    const struct kv_wire_query *query = querier->input.query;
    const struct kv_unit *unit = querier->scan.unit;
    const void *rows[GATHER_ROWS];
    uint32_t n = 0;

    if (querier->cursor == 0)
        begin_found(querier);
    for (; querier->cursor < querier->n_chosen && n < GATHER_ROWS; querier->cursor++) {
        uint32_t token = querier->scratch.taken[querier->cursor];
        bool keeps = is_held(querier, unit, querier->held_end, token);

        if (kv_unit_is_bad(unit, token))
            return fail_bad(querier, token);
        name_row(querier, keeps);
        if (keeps || query->answer != KV_ANSWER_ROWS)
            continue;
        querier->crcs[querier->n_rows++] = *kv_unit_crc(unit, token);
        rows[n++] = kv_unit_row(unit, token);
    }
    if (n > 0)
        kv_rows_gather(querier->input.rows + querier->rows_bytes, rows, n, unit->row_bytes);
    querier->rows_bytes += (size_t)n * unit->row_bytes;
    if (querier->cursor == querier->n_chosen)
        end_chosen(querier);
    return true;
}

/* Attention over the chosen rows that the asker does not hold, which are verified on the way.
 * The others are named, so that the asker can attend them. */
static bool stage_attend(struct kv_querier *querier)
{
    const struct kv_wire_query *query = querier->input.query;
    const struct kv_unit *unit = querier->scan.unit;
    struct kv_attention *attention = querier->attention;
    bool is_full = false;

    if (querier->cursor == 0) {
        struct kv_attend_shape shape = {0};

        begin_found(querier);
        kv_attention_shape(layer_of(querier), query->n_queries, query->scale,
                           &shape); /* which begin has checked */
        kv_attention_begin(attention, &shape, unit, querier->queries,
                           query->merge == KV_MERGE_NONE);
    }
    for (; querier->cursor < querier->n_chosen && !is_full; querier->cursor++) {
        uint32_t token = querier->scratch.taken[querier->cursor];
        bool keeps = is_held(querier, unit, querier->held_end, token);

        if (keeps || !kv_query_names_held_only(query))
            name_row(querier, keeps);
        if (!keeps)
            is_full =
                kv_attention_add(attention, token, querier->scratch.among[querier->cursor]);
    }
    querier->n_attended += attention->n;
    const uint32_t bad = kv_attention_slice(attention, querier->input.heap);
    if (bad != UINT32_MAX)
        return fail_bad(querier, bad);
    if (querier->cursor < querier->n_chosen)
        return true;
    kv_attention_end(attention, querier->outputs + querier->n_outputs,
                     querier->lses + querier->n_lses);
    end_chosen(querier);
    return true;
}

/* What the unit's other candidates would have added, merged with what the chosen ones are. */
static bool stage_rest(struct kv_querier *querier)
{
    float *output = querier->outputs + querier->n_outputs;
    float *lse = querier->lses + querier->n_lses;

    if (!kv_remainder_slice(querier->remainder, querier->input.codebooks,
                            querier->input.clock) &&
        querier->remainder->bad == UINT32_MAX)
        return true;
    if (querier->remainder->bad != UINT32_MAX)
        return fail_bad(querier, querier->remainder->bad);
    kv_remainder_end(querier->remainder, querier->input.query->answer == KV_ANSWER_ATTEND,
                     output, lse);
    querier->found[querier->unit].n_estimated = querier->remainder->n_rest;
    querier->n_rest_exact += querier->remainder->n_exact;
    if (querier->remainder->lost != UINT32_MAX)
        /* What cannot be queued now, the scrub will find lost. */
        (void)kv_index_repair(querier->input.indexer, querier->scan.unit,
                              querier->remainder->lost);
    end_unit(querier);
    return true;
}

bool kv_querier_slice(struct kv_querier *querier)
{
    static bool (*const stages[])(struct kv_querier *) = {
        [KV_QUERY_UNIT] = stage_unit,     [KV_QUERY_SCORE] = stage_score,
        [KV_QUERY_TAKE] = stage_take,     [KV_QUERY_PICK] = stage_pick,
        [KV_QUERY_RERANK] = stage_rerank, [KV_QUERY_CHOOSE] = stage_choose,
        [KV_QUERY_GATHER] = stage_gather, [KV_QUERY_ATTEND] = stage_attend,
        [KV_QUERY_REST] = stage_rest,
    };

    return stages[querier->stage](querier);
}
