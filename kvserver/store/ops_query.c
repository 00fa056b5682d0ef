/* query: which rows matter to some query vectors?
 *
 *   begin ......... checked; waits for its snapshot
 *   run, run, ..... takes a staging buffer (for rows) and the querier, then for each unit
 *                   score -> take -> pick -> rerank -> choose -> gather or attend -> rest
 *   answer ........ ids and what was asked besides; rows behind them, or by bulk
 *
 * Step 1 is left out where it takes every candidate; both are where every candidate is chosen
 * and nobody asked for weights. */
#include "gather.h"
#include "memory.h"
#include "op.h"
#include "querier.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    RERANK_ROWS = 512, /* of one slice */
    GATHER_ROWS = 512,
};

struct kv_querier *kv_querier_create(struct kv_data *data)
{
    const size_t n_taken = (size_t)KV_QUERIES_MAX * KV_CHOSEN_MAX + KV_SELECT_SPARE;
    struct kv_querier *querier = calloc(1, sizeof(*querier));

    if (querier == NULL)
        return NULL;
    querier->waiting.end = &querier->waiting.first;
    querier->recall = kv_recall_create(data);
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
    if (querier->recall == NULL || querier->chooser == NULL || querier->picker == NULL ||
        querier->parts == NULL || querier->floats == NULL || querier->taken == NULL ||
        querier->among == NULL || querier->indices == NULL || querier->tables == NULL ||
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
    kv_recall_destroy(querier->recall);
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

/* ---- the request's body ------------------------------------------------------------------ */

static const struct kv_wire_query *query_of(const struct kv_work *work)
{
    return (const struct kv_wire_query *)(const void *)work->body;
}

static const struct kv_wire_unit *units_of(const struct kv_work *work)
{
    return (const struct kv_wire_unit *)(const void *)(work->body +
                                                       sizeof(struct kv_wire_query));
}

static const struct kv_wire_range *ranges_of(const struct kv_work *work)
{
    return (const struct kv_wire_range *)(const void *)(units_of(work) + work->request.n_units);
}

static const float *queries_of(const struct kv_work *work)
{
    return (const float *)(const void *)(ranges_of(work) + query_of(work)->n_ranges);
}

static struct kv_unit *unit_at(const struct kv_work *work, uint32_t i)
{
    const struct kv_wire_unit *unit = &units_of(work)[i];

    return kv_part_unit(work->part, unit->layer, unit->kv_head);
}

static const struct kv_layer_schema *layer_at(const struct kv_work *work, uint32_t i)
{
    return &work->part->schema->layers[units_of(work)[i].layer];
}

/* Whether there are outputs and log-sum-exps. */
static bool has_outputs(const struct kv_wire_query *query)
{
    return query->answer == KV_ANSWER_ATTEND || query->rest != 0;
}

/* Whether only rows are named that the asker holds. */
static bool names_held_only(const struct kv_wire_query *query)
{
    return query->answer == KV_ANSWER_ATTEND && !(query->flags & KV_WIRE_NAMES);
}

static struct kv_choice choice_of(const struct kv_wire_query *query, uint32_t rerank)
{
    return (struct kv_choice){.merge = (enum kv_merge)query->merge,
                              .selection = (enum kv_selection)query->selection,
                              .n_queries = query->n_queries,
                              .scale = query->scale,
                              .share = query->share,
                              .k = query->k,
                              .factor = rerank};
}

/* ---- begin ------------------------------------------------------------------------------- */

/* The fixed part and the ranges.  On failure the work has failed. */
static bool check_query(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    const struct kv_wire_query *query = query_of(work);
    const size_t fixed = sizeof(*query) + request->n_units * sizeof(struct kv_wire_unit);

    if (request->n_units == 0 || request->n_units > KV_WIRE_UNITS_MAX || query->n_ranges == 0 ||
        query->n_ranges > KV_RANGES_MAX ||
        fixed + query->n_ranges * sizeof(struct kv_wire_range) > request->body_bytes) {
        kv_work_fail(work, KV_INVALID, "query: %u units and %u ranges in a body of %u bytes",
                     request->n_units, query->n_ranges, request->body_bytes);
        return false;
    }
    if (query->rest != 0 && kv_summaries_bits(query->rest) == 0) {
        kv_work_fail(work, KV_INVALID, "query: rest %u: not 0, 16 or 64", query->rest);
        return false;
    }
    const uint32_t flags =
        KV_WIRE_SCORES | (query->answer == KV_ANSWER_ATTEND ? KV_WIRE_NAMES : 0);
    if (query->answer < KV_ANSWER_IDS || query->answer > KV_ANSWER_ATTEND ||
        query->merge < KV_MERGE_SUM || query->merge > KV_MERGE_NONE ||
        (query->flags & ~flags) != 0 || query->reserved != 0) {
        kv_work_fail(work, KV_INVALID, "query: answer %u, merge %u, flags %#x: no such thing",
                     query->answer, query->merge, query->flags);
        return false;
    }
    if (query->selection > KV_SELECT_FROM ||
        (query->selection == KV_SELECT_TOP ? query->share != 0
                                           : !(query->share > 0 && query->share <= 1))) {
        kv_work_fail(work, KV_INVALID, "query: selection %u by a share of %g: no such thing",
                     query->selection, (double)query->share);
        return false;
    }
    if (query->n_queries == 0 || query->n_queries > KV_QUERIES_MAX || query->k == 0 ||
        query->k > KV_CHOSEN_MAX || query->rerank == 0 || query->rerank > KV_CHOSEN_MAX ||
        !(query->scale > 0 && query->scale < INFINITY)) {
        kv_work_fail(work, KV_INVALID,
                     "query: %u vectors, k %u, rerank %u, scale %g: out of bounds",
                     query->n_queries, query->k, query->rerank, (double)query->scale);
        return false;
    }
    const struct kv_wire_range *ranges = ranges_of(work);
    for (uint32_t i = 0; i < query->n_ranges; i++) {
        if (ranges[i].begin >= ranges[i].end || ranges[i].end > work->part->tokens_max ||
            (i > 0 && ranges[i].begin < ranges[i - 1].end)) {
            kv_work_fail(work, KV_INVALID,
                         "query: range %u: tokens %u to %u: empty, not in order, or beyond %u",
                         i, ranges[i].begin, ranges[i].end, work->part->tokens_max);
            return false;
        }
    }
    return true;
}

/* Whether attention over the layer's rows can be computed.  On failure the work has failed. */
static bool check_attention(struct kv_work *work, uint32_t i)
{
    const struct kv_wire_query *query = query_of(work);
    const struct kv_layer_schema *layer = layer_at(work, i);
    struct kv_attend_shape shape;
    const char *fault = kv_attention_shape(layer, query->n_queries, query->scale, &shape);

    if (fault != NULL)
        kv_work_fail(work, KV_UNSUPPORTED,
                     "query: layer %u: %s (type %u, keys of %u elements, values of %u, scale "
                     "%g)",
                     units_of(work)[i].layer, fault, layer->dtype, layer->d_k, layer->d_v,
                     (double)query->scale);
    return fault == NULL;
}

/* The units, what they hold, and whether the answer fits.  On failure the work has failed. */
static bool check_units(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    const struct kv_wire_query *query = query_of(work);
    const struct kv_wire_unit *units = units_of(work);
    const uint32_t n = kv_ranges_count(ranges_of(work), query->n_ranges);
    const struct kv_choice choice = choice_of(query, 1);
    const uint64_t most = kv_choice_max(&choice, n);
    const uint64_t per_id = 2 * sizeof(uint32_t) +
                            (query->flags & KV_WIRE_SCORES ? sizeof(float) : 0) +
                            (query->merge == KV_MERGE_NONE ? sizeof(uint32_t) : 0);
    uint64_t floats = 0, floats_out = 0, n_held = 0, n_names = 0, bytes = 0;
    uint32_t mark = ++work->data->marks;

    for (uint32_t i = 0; i < request->n_units; i++) {
        struct kv_unit *unit = unit_at(work, i);

        if (unit == NULL || unit->mark == mark) {
            bool known =
                units[i].layer < work->part->schema->n_layers &&
                units[i].kv_head < work->part->schema->layers[units[i].layer].n_kv_heads;
            kv_work_fail(work, known && unit == NULL ? KV_MOVED : KV_INVALID,
                         "query: layer %u head %u: %s", units[i].layer, units[i].kv_head,
                         unit != NULL ? "named twice"
                         : known      ? "not on this data thread"
                                      : "not in the schema");
            return false;
        }
        const struct kv_layer_schema *layer = layer_at(work, i);
        if (!kv_key_type_valid(layer->dtype) || layer->d_k > KV_CODEBOOK_DIM_MAX) {
            kv_work_fail(work, KV_UNSUPPORTED,
                         "query: layer %u: keys of type %u with %u elements: cannot be scored",
                         units[i].layer, layer->dtype, layer->d_k);
            return false;
        }
        if (has_outputs(query) && !check_attention(work, i))
            return false;
        unit->mark = mark;
        floats += (uint64_t)query->n_queries * layer->d_k;
        n_held += units[i].n_ids;
        const uint64_t held_most = (uint64_t)units[i].n_ids * KV_BLOCK_TOKENS;
        n_names += names_held_only(query) && held_most < most ? held_most : most;
        bytes += most * unit->row_bytes;
        if (has_outputs(query))
            floats_out += (uint64_t)query->n_queries * (layer->d_v + 1);
    }
    uint64_t expected = (uint64_t)((const uint8_t *)queries_of(work) - work->body) +
                        floats * sizeof(float) + n_held * sizeof(struct kv_wire_held);
    if (request->body_bytes != expected) {
        kv_work_fail(work, KV_INVALID, "query: a body of %u bytes, %llu expected",
                     request->body_bytes, (unsigned long long)expected);
        return false;
    }
    uint64_t body = sizeof(struct kv_wire_answer) +
                    request->n_units * sizeof(struct kv_wire_found) + n_names * per_id +
                    floats_out * sizeof(float);
    if (body > KV_WIRE_BODY_MAX ||
        (query->answer == KV_ANSWER_ROWS && bytes > KV_WIRE_BULK_MAX) ||
        (uint64_t)n * (query->n_queries + KV_SCAN_SPARE) > KV_QUERIER_FLOATS) {
        kv_work_fail(work, KV_TOO_LARGE,
                     "query: an answer of %llu bytes about rows of %llu, among %u tokens for "
                     "%u vectors: too much for one message",
                     (unsigned long long)body, (unsigned long long)bytes, n, query->n_queries);
        return false;
    }
    const struct kv_wire_held *held =
        (const struct kv_wire_held *)(const void *)(queries_of(work) + floats);
    for (uint32_t i = 0; i < request->n_units; held += units[i++].n_ids) {
        for (uint32_t j = 1; j < units[i].n_ids; j++) {
            if (held[j].block <= held[j - 1].block) {
                kv_work_fail(work, KV_INVALID,
                             "query: layer %u head %u: held blocks %u, %u: not in order",
                             units[i].layer, units[i].kv_head, held[j - 1].block,
                             held[j].block);
                return false;
            }
        }
    }
    const float *queries = queries_of(work);
    for (uint64_t i = 0; i < floats; i++) {
        if (!isfinite(queries[i])) {
            kv_work_fail(work, KV_INVALID, "query: element %llu of the vectors is no number",
                         (unsigned long long)i);
            return false;
        }
    }
    return true;
}

void kv_op_query_wake(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;

    if (kv_work_stale(work)) {
        kv_work_fail(work, KV_STALE, "query: session %u was changed meanwhile",
                     request->session_index);
        return;
    }
    for (uint32_t i = 0; i < request->n_units; i++) {
        if (unit_at(work, i)->committed < request->snapshot) {
            kv_work_wait(work);
            return;
        }
    }
    kv_work_queue(work);
}

void kv_op_query_begin(struct kv_work *work)
{
    struct kv_wire_header *request = &work->request;

    if (!check_query(work) || !check_units(work))
        return;
    uint32_t need = ranges_of(work)[query_of(work)->n_ranges - 1].end;
    if (request->snapshot > work->part->tokens_max) {
        kv_work_fail(work, KV_INVALID, "query: snapshot %u, at most %u tokens in a session",
                     request->snapshot, work->part->tokens_max);
        return;
    }
    if (request->snapshot < need)
        request->snapshot = need;
    kv_op_query_wake(work);
}

void kv_op_query_release(struct kv_work *work)
{
    struct kv_querier *querier = work->data->querier;

    if (querier->owner != work)
        return;
    /* Handed on at once: should the next one end before its turn, it comes by here, too. */
    querier->owner = querier->waiting.first;
    querier->begun = false;
    if (querier->owner != NULL)
        kv_work_queue(querier->owner);
}

/* ---- stages ------------------------------------------------------------------------------ */

/* When it is known which rows are chosen. */
static enum kv_query_stage chosen_stage(const struct kv_work *work)
{
    return query_of(work)->answer == KV_ANSWER_ATTEND ? KV_QUERY_ATTEND : KV_QUERY_GATHER;
}

static enum kv_query_stage first_stage(const struct kv_work *work, struct kv_querier *querier)
{
    const bool weights = query_of(work)->flags & KV_WIRE_SCORES;
    const uint32_t n = querier->scan.n;

    if (querier->take.selection != KV_SELECT_TOP ||
        kv_choice_takes(&querier->take, querier->take.k) < n)
        return KV_QUERY_SCORE;
    /* All are taken, by all vectors. */
    const uint32_t all = UINT32_MAX >> (KV_QUERIES_MAX - querier->scan.n_queries);
    struct kv_range_walk walk = {.ranges = querier->scan.ranges};
    querier->n_taken = n;
    for (uint32_t i = 0; i < n; i++) {
        querier->taken[i] = kv_range_walk_to(&walk, i);
        querier->among[i] = all;
    }
    for (uint32_t group = 0; group < kv_choice_groups(&querier->take); group++)
        querier->k[group] = querier->take.k;
    querier->n_chosen = n;
    return querier->take.k < n || weights ? KV_QUERY_RERANK : chosen_stage(work);
}

/* Where step 2's scores go for step 3, (n_queries, n_taken), as step 2 needs them up; behind
 * them, the tokens. */
static float *kept_scores(const struct kv_querier *querier)
{
    static_assert((uint64_t)KV_QUERIES_MAX * KV_CHOSEN_MAX *
                          (2 * KV_QUERIES_MAX + KV_CHOOSE_ROOM + 2) <=
                      KV_QUERIER_FLOATS,
                  "scores, room to choose, the chosen, scores and tokens");
    return querier->floats +
           (size_t)querier->n_taken * (querier->scan.n_queries + KV_CHOOSE_ROOM + 1);
}

static uint32_t *kept_tokens(const struct kv_querier *querier)
{
    return (uint32_t *)(void *)(kept_scores(querier) +
                                (size_t)querier->n_taken * querier->scan.n_queries);
}

static void stage_unit(struct kv_work *work, struct kv_querier *querier)
{
    const struct kv_wire_query *query = query_of(work);
    const struct kv_layer_schema *layer = layer_at(work, querier->unit);

    querier->scan = (struct kv_scan){
        .unit = unit_at(work, querier->unit),
        .type = (enum kv_key_type)layer->dtype,
        .d = layer->d_k,
        .ranges = ranges_of(work),
        .n_ranges = query->n_ranges,
        .n_queries = query->n_queries,
        .queries = querier->queries,
        .by_code = true,
        .by_cell = true,
        .n = kv_ranges_count(ranges_of(work), query->n_ranges),
        .room = querier->floats,
        .room_floats = KV_QUERIER_FLOATS,
        .parts = querier->parts,
        .tables = querier->tables,
    };
    kv_scan_begin(&querier->scan, &work->data->heap);
    querier->cursor = 0;
    querier->n_taken = querier->n_chosen = querier->n_scored = 0;
    querier->held_end = querier->held + units_of(work)[querier->unit].n_ids;
    querier->looked = NULL;
    querier->found[querier->unit] = (struct kv_wire_found){
        .layer = units_of(work)[querier->unit].layer,
        .kv_head = units_of(work)[querier->unit].kv_head,
        .recall = querier->scan.unit->recall,
        .committed = querier->scan.unit->committed,
    };
    querier->stage = first_stage(work, querier);
}

static void stage_score(struct kv_work *work, struct kv_querier *querier)
{
    struct kv_scan *scan = &querier->scan;

    if (!kv_scan_slice(scan, &work->data->heap, work->data->clock))
        return;
    kv_choose_begin(querier->chooser, &querier->take, scan->scores, scan->counts, NULL,
                    scan->n_items,
                    query_of(work)->rerank == 1 && (query_of(work)->flags & KV_WIRE_SCORES),
                    scan->scores + (size_t)scan->n_items * scan->n_queries);
    querier->stage = KV_QUERY_TAKE;
}

static void stage_take(struct kv_work *work, struct kv_querier *querier)
{
    if (!kv_choose_slice(querier->chooser))
        return;
    memcpy(querier->k, querier->chooser->k, sizeof(querier->k));
    querier->choice.each = querier->k;
    kv_pick_begin(querier->picker, &querier->scan, querier->chooser, querier->taken,
                  querier->among);
    querier->stage = KV_QUERY_PICK;
    (void)work;
}

static void stage_pick(struct kv_work *work, struct kv_querier *querier)
{
    const bool is_last = query_of(work)->rerank == 1;

    if (!kv_pick_slice(querier->picker, &work->data->heap))
        return;
    querier->n_taken = querier->n_chosen = querier->picker->n;
    /* Where nothing is reranked, these weights are the answer's.  They go where scores were;
     * not at once: few cells may be many rows, and the chooser's weights begin close behind. */
    if (is_last && (query_of(work)->flags & KV_WIRE_SCORES)) {
        float *weights = (float *)(void *)querier->indices; /* step 2's, which there is not */

        kv_pick_weights(&querier->scan, querier->chooser, &work->data->heap, querier->taken,
                        querier->n_taken, weights);
        memcpy(querier->floats, weights, querier->n_taken * sizeof(*weights));
    }
    querier->stage = is_last ? chosen_stage(work) : KV_QUERY_RERANK;
}

static void keep_scores(struct kv_querier *querier, uint32_t n)
{
    for (uint32_t q = 0; q < querier->scan.n_queries; q++) {
        const size_t at = (size_t)q * querier->n_taken + querier->cursor;

        memcpy(kept_scores(querier) + at, querier->floats + at, n * sizeof(float));
    }
    memcpy(kept_tokens(querier) + querier->cursor, querier->taken + querier->cursor,
           n * sizeof(uint32_t));
}

static void stage_rerank(struct kv_work *work, struct kv_querier *querier)
{
    const struct kv_scan *scan = &querier->scan;
    const void *keys[RERANK_ROWS];
    uint32_t n = querier->n_taken - querier->cursor;

    if (n > RERANK_ROWS)
        n = RERANK_ROWS;
    for (uint32_t i = 0; i < n; i++)
        keys[i] = kv_unit_row(scan->unit, querier->taken[querier->cursor + i]);
    kv_keys_score_list(scan->type, keys, n, scan->d, scan->queries, scan->n_queries,
                       querier->floats + querier->cursor, querier->n_taken);
    if (query_of(work)->rest != 0)
        keep_scores(querier, n);
    querier->cursor += n;
    if (querier->cursor < querier->n_taken)
        return;
    querier->found[querier->unit].n_reranked = querier->n_scored = querier->n_taken;
    kv_choose_begin(querier->chooser, &querier->choice, querier->floats, NULL,
                    kv_choice_merges(&querier->choice) ? NULL : querier->among,
                    querier->n_taken, query_of(work)->flags & KV_WIRE_SCORES,
                    querier->floats + (size_t)querier->n_taken * scan->n_queries);
    querier->stage = KV_QUERY_CHOOSE;
}

static void stage_choose(struct kv_work *work, struct kv_querier *querier)
{
    if (!kv_choose_slice(querier->chooser))
        return;
    const float *weights = querier->chooser->weights;
    uint32_t *chose = (uint32_t *)(void *)(querier->floats +
                                           (size_t)querier->n_taken *
                                               (querier->choice.n_queries + KV_CHOOSE_ROOM));

    querier->n_chosen = kv_choose_rows(querier->chooser, querier->indices, chose);
    for (uint32_t i = 0; i < querier->n_chosen; i++) {
        querier->floats[i] = weights[querier->indices[i]];
        querier->among[i] = chose[i];
        querier->taken[i] = querier->taken[querier->indices[i]];
    }
    querier->cursor = 0;
    querier->stage = chosen_stage(work);
}

/* Is the row one of a block that the asker has?  Tokens ascend from call to call. */
static bool is_held(struct kv_querier *querier,
                    const struct kv_unit *unit,
                    const struct kv_wire_held *end,
                    uint32_t token)
{
    const uint32_t block = token / KV_BLOCK_TOKENS;

    while (querier->held < end && querier->held->block < block)
        querier->held++;
    if (querier->held == end || querier->held->block != block)
        return false;
    if (querier->looked != querier->held) {
        querier->looked = querier->held;
        querier->looked_same =
            unit->committed / KV_BLOCK_TOKENS > block &&
            kv_block_instance(unit->segments[block]->crcs) == querier->held->instance;
    }
    return querier->looked_same;
}

/* What was chosen of the unit, and what that took. */
static void begin_found(struct kv_work *work, struct kv_querier *querier)
{
    struct kv_wire_found *found = &querier->found[querier->unit];

    found->n_coded = querier->scan.n_coded;
    found->n_exact = querier->scan.n_exact;
    found->n_chapters = querier->scan.n_chapters;
    found->n_chosen = querier->n_chosen;
    kv_recall_note(querier->recall, work->part, &querier->scan, &querier->choice,
                   querier->taken, querier->n_chosen);
}

/* Names the row at the cursor in the answer. */
static void name_row(struct kv_querier *querier, bool keeps)
{
    const uint32_t token = querier->taken[querier->cursor];

    querier->heads[querier->n_ids] = querier->among[querier->cursor];
    querier->scores[querier->n_ids] = querier->floats[querier->cursor];
    querier->ids[querier->n_ids++] = keeps ? token | KV_WIRE_ID_HELD : token;
    querier->found[querier->unit].n_ids++;
}

static void end_unit(struct kv_work *work, struct kv_querier *querier)
{
    const struct kv_wire_query *query = query_of(work);

    if (has_outputs(query)) {
        querier->n_outputs += query->n_queries * layer_at(work, querier->unit)->d_v;
        querier->n_lses += query->n_queries;
    }
    querier->held = querier->held_end;
    querier->queries += (size_t)query->n_queries * querier->scan.d;
    querier->unit++;
    querier->stage = KV_QUERY_UNIT;
}

/* The unit's rows are named, and sent or attended. */
static void end_chosen(struct kv_work *work, struct kv_querier *querier)
{
    const struct kv_wire_query *query = query_of(work);
    struct kv_remainder_question question = {
        .scan = &querier->scan,
        .bits = kv_summaries_bits(query->rest),
        .chosen = querier->taken,
        .among = querier->among,
        .n_chosen = querier->n_chosen,
        .each = query->merge == KV_MERGE_NONE,
        .scored = kept_tokens(querier),
        .scores = kept_scores(querier),
        .n_scored = querier->n_scored,
    };

    if (query->rest == 0) {
        end_unit(work, querier);
        return;
    }
    kv_attention_shape(layer_at(work, querier->unit), query->n_queries, query->scale,
                       &question.shape); /* which begin has checked */
    kv_remainder_begin(querier->remainder, &question);
    querier->stage = KV_QUERY_REST;
}

/* Ids of the unit's answer, then its rows. */
static void stage_gather(struct kv_work *work, struct kv_querier *querier)
{
    const struct kv_wire_query *query = query_of(work);
    const struct kv_unit *unit = querier->scan.unit;
    const void *rows[GATHER_ROWS];
    uint32_t n = 0;

    if (querier->cursor == 0)
        begin_found(work, querier);
    for (; querier->cursor < querier->n_chosen && n < GATHER_ROWS; querier->cursor++) {
        uint32_t token = querier->taken[querier->cursor];
        bool keeps = is_held(querier, unit, querier->held_end, token);

        name_row(querier, keeps);
        if (keeps || query->answer != KV_ANSWER_ROWS)
            continue;
        querier->crcs[querier->n_rows++] = *kv_unit_crc(unit, token);
        rows[n++] = kv_unit_row(unit, token);
    }
    if (n > 0)
        kv_rows_gather(work->staging + work->cursor_bytes, rows, n, unit->row_bytes);
    work->cursor_bytes += (size_t)n * unit->row_bytes;
    if (querier->cursor == querier->n_chosen)
        end_chosen(work, querier);
}

/* Attention over the chosen rows that the asker does not hold.  The others are named, so that
 * the asker can attend them. */
static void stage_attend(struct kv_work *work, struct kv_querier *querier)
{
    const struct kv_wire_query *query = query_of(work);
    const struct kv_unit *unit = querier->scan.unit;
    struct kv_attention *attention = querier->attention;
    bool is_full = false;

    if (querier->cursor == 0) {
        struct kv_attend_shape shape = {0};

        begin_found(work, querier);
        kv_attention_shape(layer_at(work, querier->unit), query->n_queries, query->scale,
                           &shape); /* which begin has checked */
        kv_attention_begin(attention, &shape, querier->queries, query->merge == KV_MERGE_NONE);
    }
    for (; querier->cursor < querier->n_chosen && !is_full; querier->cursor++) {
        uint32_t token = querier->taken[querier->cursor];
        bool keeps = is_held(querier, unit, querier->held_end, token);

        if (keeps || !names_held_only(query))
            name_row(querier, keeps);
        if (!keeps)
            is_full = kv_attention_add(attention, kv_unit_row(unit, token),
                                       querier->among[querier->cursor]);
    }
    querier->n_attended += attention->n;
    kv_attention_slice(attention);
    if (querier->cursor < querier->n_chosen)
        return;
    kv_attention_end(attention, querier->outputs + querier->n_outputs,
                     querier->lses + querier->n_lses);
    end_chosen(work, querier);
}

/* What the unit's other candidates would have added, merged with what the chosen ones are. */
static void stage_rest(struct kv_work *work, struct kv_querier *querier)
{
    float *output = querier->outputs + querier->n_outputs;
    float *lse = querier->lses + querier->n_lses;

    if (!kv_remainder_slice(querier->remainder, &work->data->heap, work->data->clock))
        return;
    kv_remainder_end(querier->remainder, query_of(work)->answer == KV_ANSWER_ATTEND, output,
                     lse);
    querier->found[querier->unit].n_rest = querier->remainder->n_rest;
    querier->n_rest_exact += querier->remainder->n_exact;
    end_unit(work, querier);
}

/* ---- the answer -------------------------------------------------------------------------- */

static uint8_t *append(uint8_t *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
    return to + bytes;
}

static void count(struct kv_work *work, const struct kv_querier *querier)
{
    struct kv_stats *stats = &work->data->stats;

    for (uint32_t i = 0; i < work->request.n_units; i++) {
        kv_count(&stats->rows_scored_by_code, querier->found[i].n_coded);
        kv_count(&stats->rows_scored_by_key, querier->found[i].n_exact);
        kv_count(&stats->rows_reranked, querier->found[i].n_reranked);
        kv_count(&stats->rows_chosen, querier->found[i].n_chosen);
        kv_count(&stats->rows_rest, querier->found[i].n_rest);
    }
    kv_count(&stats->rows_attended, querier->n_attended);
    kv_count(&stats->rows_rest_exact, querier->n_rest_exact);
    kv_count(&stats->rows_out, querier->n_rows);
    kv_count(&stats->rows_out_bytes, work->cursor_bytes);
    kv_count(&work->peer->rows_out, querier->n_rows);
}

static void answer(struct kv_work *work, struct kv_querier *querier)
{
    const struct kv_wire_query *query = query_of(work);
    const size_t ids_bytes = querier->n_ids * sizeof(uint32_t);
    const struct kv_wire_answer times = {
        .waited_us = (uint32_t)(querier->begun_us - work->begin_us),
        .worked_us = (uint32_t)(kv_clock_now(work->data->clock) - querier->begun_us),
    };
    const size_t bytes = work->cursor_bytes;
    uint32_t committed = UINT32_MAX;
    uint8_t *to = work->answer;

    to = append(to, &times, sizeof(times));
    to = append(to, querier->found, work->request.n_units * sizeof(querier->found[0]));
    to = append(to, querier->ids, ids_bytes);
    if (query->flags & KV_WIRE_SCORES)
        to = append(to, querier->scores, ids_bytes);
    if (query->merge == KV_MERGE_NONE)
        to = append(to, querier->heads, ids_bytes);
    to = append(to, querier->outputs, querier->n_outputs * sizeof(float));
    to = append(to, querier->lses, querier->n_lses * sizeof(float));
    to = append(to, querier->crcs, querier->n_rows * sizeof(uint32_t));
    for (uint32_t i = 0; i < work->request.n_units; i++)
        if (querier->found[i].committed < committed)
            committed = querier->found[i].committed;
    work->reply.layer = units_of(work)[0].layer;
    work->reply.snapshot = committed;
    work->reply.n_rows = querier->n_rows;
    count(work, querier);

    bool in_body = bytes <= KV_WIRE_INLINE_MAX / 2 &&
                   (size_t)(to - work->answer) + bytes <= KV_WIRE_BODY_MAX;
    if (in_body && bytes > 0)
        to = append(to, work->staging, bytes);
    kv_op_query_release(work);
    kv_work_answer(work, work->answer, (size_t)(to - work->answer), work->staging,
                   in_body ? 0 : bytes);
}

static bool take_querier(struct kv_work *work, struct kv_querier *querier)
{
    if (querier->owner == work && querier->begun)
        return true;
    if (querier->owner != NULL && querier->owner != work) {
        kv_work_queue_at(work, &querier->waiting);
        return false;
    }
    const struct kv_wire_query *query = query_of(work);
    querier->owner = work;
    querier->begun = true;
    querier->begun_us = kv_clock_now(work->data->clock);
    querier->unit = querier->n_ids = querier->n_rows = 0;
    querier->n_outputs = querier->n_lses = 0;
    querier->n_attended = querier->n_rest_exact = 0;
    querier->stage = KV_QUERY_UNIT;
    querier->choice = choice_of(query, 1);
    querier->choice.selection = KV_SELECT_TOP; /* step 1 says how many */
    querier->take = choice_of(query, query->rerank);
    querier->queries = queries_of(work);
    const float *held = querier->queries;
    for (uint32_t i = 0; i < work->request.n_units; i++)
        held += (size_t)query->n_queries * layer_at(work, i)->d_k;
    querier->held = (const struct kv_wire_held *)(const void *)held;
    work->cursor_bytes = 0;
    return true;
}

bool kv_op_query_run(struct kv_work *work)
{
    static void (*const stages[])(struct kv_work *, struct kv_querier *) = {
        [KV_QUERY_UNIT] = stage_unit,     [KV_QUERY_SCORE] = stage_score,
        [KV_QUERY_TAKE] = stage_take,     [KV_QUERY_PICK] = stage_pick,
        [KV_QUERY_RERANK] = stage_rerank, [KV_QUERY_CHOOSE] = stage_choose,
        [KV_QUERY_GATHER] = stage_gather, [KV_QUERY_ATTEND] = stage_attend,
        [KV_QUERY_REST] = stage_rest,
    };
    struct kv_querier *querier = work->data->querier;

    if (kv_work_stale(work)) {
        kv_work_fail(work, KV_STALE, "query: session %u was changed meanwhile",
                     work->request.session_index);
        return false;
    }
    if (query_of(work)->answer == KV_ANSWER_ROWS && work->staging == NULL &&
        !kv_work_stage(work))
        return false;
    if (work->answer == NULL && kv_work_answer_slot(work, KV_WIRE_BODY_MAX) != KV_OK) {
        kv_work_fail(work, KV_BUSY, "query: no buffer for the answer");
        return false;
    }
    if (!take_querier(work, querier))
        return false;
    stages[querier->stage](work, querier);
    if (querier->unit < work->request.n_units)
        return true;
    answer(work, querier);
    return false;
}
