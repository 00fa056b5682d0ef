#include "kvserver/store/ops/query_parse.h"

#include "kvserver/store/ops/parse_units.h"

#include <math.h>

const struct kv_wire_query *kv_query_of(const struct kv_work *work)
{
    return (const struct kv_wire_query *)(const void *)work->body;
}

const struct kv_wire_range *kv_query_ranges(const struct kv_work *work)
{
    return kvs_behind_units(work);
}

/* Of each unit (n_queries, d_k); behind all of them the blocks that the asker holds. */
static const float *vectors_of(const struct kv_work *work)
{
    return (const float *)(const void *)(kv_query_ranges(work) + kv_query_of(work)->n_ranges);
}

/* The fixed part and the ranges.  On failure the work has failed. */
static bool check_query(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    const struct kv_wire_query *query = kv_query_of(work);

    if (!kvs_units_are_there(work) || query->n_ranges == 0 || query->n_ranges > KV_RANGES_MAX ||
        kvs_units_bytes(work) + query->n_ranges * sizeof(struct kv_wire_range) >
            request->body_bytes) {
        kv_work_fail(work, KV_INVALID, "query: %u units and %u ranges in a body of %u bytes",
                     request->n_units, query->n_ranges, request->body_bytes);
        return false;
    }
    if (query->summaries != 0 && kv_summaries_bits(query->summaries) == 0) {
        kv_work_fail(work, KV_INVALID, "query: rest %u: not 0, 16 or 64", query->summaries);
        return false;
    }
    const uint32_t flags =
        KV_WIRE_WEIGHTS | (query->answer == KV_ANSWER_ATTEND ? KV_WIRE_IDS : 0);
    if (query->answer < KV_ANSWER_IDS || query->answer > KV_ANSWER_ATTEND ||
        query->merge < KV_MERGE_SUM || query->merge > KV_MERGE_NONE ||
        (query->flags & ~flags) != 0 || query->reserved != 0) {
        kv_work_fail(work, KV_INVALID, "query: answer %u, merge %u, flags %#x: no such thing",
                     query->answer, query->merge, query->flags);
        return false;
    }
    if (query->selection > KV_SELECT_THRESHOLD ||
        (query->selection == KV_SELECT_TOP ? query->fraction != 0
                                           : !(query->fraction > 0 && query->fraction <= 1))) {
        kv_work_fail(work, KV_INVALID, "query: selection %u by a share of %g: no such thing",
                     query->selection, (double)query->fraction);
        return false;
    }
    if (query->n_queries == 0 || query->n_queries > KV_QUERIES_MAX || query->k == 0 ||
        query->k > KV_SELECTED_MAX || query->rerank == 0 || query->rerank > KV_SELECTED_MAX ||
        !(query->scale > 0 && query->scale < INFINITY)) {
        kv_work_fail(work, KV_INVALID,
                     "query: %u vectors, k %u, rerank %u, scale %g: out of bounds",
                     query->n_queries, query->k, query->rerank, (double)query->scale);
        return false;
    }
    const struct kv_wire_range *ranges = kv_query_ranges(work);
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
    const struct kv_wire_query *query = kv_query_of(work);
    const struct kv_layer_schema *layer = kvs_unit_layer(work, i);
    struct kv_attend_shape shape;
    const char *fault = kv_attention_shape(layer, query->n_queries, query->scale, &shape);

    if (fault != NULL)
        kv_work_fail(work, KV_UNSUPPORTED,
                     "query: layer %u: %s (type %u, keys of %u elements, values of %u, scale "
                     "%g)",
                     kvs_units(work)[i].layer, fault, layer->dtype, layer->d_k, layer->d_v,
                     (double)query->scale);
    return fault == NULL;
}

/* What a request's units sum up to. */
struct sums {
    uint64_t floats, n_held;                 /* in the body */
    uint64_t n_names, floats_out, row_bytes; /* in the answer, at most */
};

/* Unit i.  On failure the work has failed. */
static bool check_unit(struct kv_work *work, uint32_t i, uint64_t n_chosen, struct sums *sums)
{
    const struct kv_wire_query *query = kv_query_of(work);
    const struct kv_wire_unit *named = &kvs_units(work)[i];

    if (!kvs_check_unit_is_known(work, i) || !kvs_check_unit_is_here(work, i) ||
        !kvs_check_unit_is_single(work, i))
        return false;
    const struct kv_layer_schema *layer = kvs_unit_layer(work, i);
    if (!kv_key_type_valid(layer->dtype) || layer->d_k > KV_CODEBOOK_DIM_MAX) {
        kv_work_fail(work, KV_UNSUPPORTED,
                     "query: layer %u: keys of type %u with %u elements: cannot be scored",
                     named->layer, layer->dtype, layer->d_k);
        return false;
    }
    if (kv_query_has_outputs(query) && !check_attention(work, i))
        return false;
    const uint64_t n_held = (uint64_t)named->n_ids * KV_BLOCK_TOKENS;
    sums->floats += (uint64_t)query->n_queries * layer->d_k;
    sums->n_held += named->n_ids;
    sums->n_names += kv_query_names_held_only(query) && n_held < n_chosen ? n_held : n_chosen;
    sums->row_bytes += n_chosen * kvs_unit_at(work, i)->row_bytes;
    if (kv_query_has_outputs(query))
        sums->floats_out += (uint64_t)query->n_queries * (layer->d_v + 1);
    return true;
}

/* Whether the answer, and the way to it, have room.  On failure the work has failed. */
static bool check_room(struct kv_work *work, uint32_t n_candidates, const struct sums *sums)
{
    const struct kv_wire_query *query = kv_query_of(work);
    const uint64_t per_name = 2 * sizeof(uint32_t) +
                              (query->flags & KV_WIRE_WEIGHTS ? sizeof(float) : 0) +
                              (query->merge == KV_MERGE_NONE ? sizeof(uint32_t) : 0);
    const uint64_t body = sizeof(struct kv_wire_query_times) +
                          work->request.n_units * sizeof(struct kv_wire_query_result) +
                          sums->n_names * per_name + sums->floats_out * sizeof(float);

    if (body <= KV_WIRE_BODY_MAX &&
        (query->answer != KV_ANSWER_ROWS || sums->row_bytes <= KV_WIRE_BULK_MAX) &&
        (uint64_t)n_candidates * (query->n_queries + KV_SCAN_SPARE) <= KV_QUERIER_FLOATS)
        return true;
    kv_work_fail(work, KV_TOO_LARGE,
                 "query: an answer of %llu bytes about rows of %llu, among %u tokens for %u "
                 "vectors: too much for one message",
                 (unsigned long long)body, (unsigned long long)sums->row_bytes, n_candidates,
                 query->n_queries);
    return false;
}

/* Blocks that the asker holds, and the vectors.  On failure the work has failed. */
static bool check_contents(struct kv_work *work, uint64_t n_floats)
{
    const struct kv_wire_unit *units = kvs_units(work);
    const float *vectors = vectors_of(work);
    const struct kv_wire_cached_block *held =
        (const struct kv_wire_cached_block *)(const void *)(vectors + n_floats);

    for (uint32_t i = 0; i < work->request.n_units; held += units[i++].n_ids) {
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
    for (uint64_t i = 0; i < n_floats; i++) {
        if (!isfinite(vectors[i])) {
            kv_work_fail(work, KV_INVALID, "query: element %llu of the vectors is no number",
                         (unsigned long long)i);
            return false;
        }
    }
    return true;
}

static bool check_units(struct kv_work *work)
{
    const struct kv_wire_query *query = kv_query_of(work);
    const uint32_t n = kv_ranges_count(kv_query_ranges(work), query->n_ranges);
    const struct kv_choice choice = kv_query_choice(query, 1);
    const uint64_t n_chosen = kv_choice_max(&choice, n);
    struct sums sums = {0};

    kvs_begin_units(work);
    for (uint32_t i = 0; i < work->request.n_units; i++)
        if (!check_unit(work, i, n_chosen, &sums))
            return false;
    const uint64_t expected = (uint64_t)((const uint8_t *)vectors_of(work) - work->body) +
                              sums.floats * sizeof(float) +
                              sums.n_held * sizeof(struct kv_wire_cached_block);
    if (work->request.body_bytes != expected) {
        kv_work_fail(work, KV_INVALID, "query: a body of %u bytes, %llu expected",
                     work->request.body_bytes, (unsigned long long)expected);
        return false;
    }
    return check_room(work, n, &sums) && check_contents(work, sums.floats);
}

bool kv_query_check(struct kv_work *work)
{
    return check_query(work) && check_units(work);
}

void kvs_query_parse(const struct kv_work *work,
                     struct kv_unit **units,
                     struct kvs_query_input *ret_input)
{
    const struct kv_wire_query *query = kv_query_of(work);
    const float *held = vectors_of(work);

    for (uint32_t i = 0; i < work->request.n_units; i++) {
        units[i] = kvs_unit_at(work, i);
        held += (size_t)query->n_queries * kvs_unit_layer(work, i)->d_k;
    }
    *ret_input = (struct kvs_query_input){
        .query = query,
        .ranges = kv_query_ranges(work),
        .n_units = work->request.n_units,
        .named = kvs_units(work),
        .units = units,
        .queries = vectors_of(work),
        .held = (const struct kv_wire_cached_block *)(const void *)held,
        .layers = work->part->schema->layers,
        .rows = work->staging,
        .heap = &work->data->heap,
        .codebooks = &work->data->codebooks,
        .indexer = work->data->indexer,
        .clock = work->data->clock,
    };
}
