#include "kvserver/store/ops/query_parse.h"

#include "kvserver/base/within.h"
#include "kvserver/store/ops/parse_units.h"

#include <math.h>

const struct kv_wire_query *kvs_query_of(const struct kvs_request *request)
{
    return (const struct kv_wire_query *)(const void *)request->body;
}

const struct kv_wire_range *kvs_query_ranges(const struct kvs_request *request)
{
    return kvs_behind_units(request);
}

/* Of each unit, if it has its own number of them; NULL: all have the query's. */
static const uint32_t *candidates_of(const struct kvs_request *request)
{
    const struct kv_wire_query *query = kvs_query_of(request);

    return query->flags & KV_WIRE_EACH
               ? (const uint32_t *)(const void *)(kvs_query_ranges(request) + query->n_ranges)
               : NULL;
}

/* For each unit (n_queries, d_k); the cached blocks follow the last. */
static const float *vectors_of(const struct kvs_request *request)
{
    const uint32_t *candidates = candidates_of(request);

    return candidates != NULL
               ? (const float *)(const void *)(candidates + request->header.n_units)
               : (const float *)(const void *)(kvs_query_ranges(request) +
                                               kvs_query_of(request)->n_ranges);
}

/* Returns the bytes before the vectors. */
static uint64_t head_bytes(const struct kvs_request *request)
{
    const struct kv_wire_query *query = kvs_query_of(request);

    return kvs_units_bytes(request) + query->n_ranges * sizeof(struct kv_wire_range) +
           (query->flags & KV_WIRE_EACH ? request->header.n_units * sizeof(uint32_t) : 0);
}

/* Checks how many candidates there are, of each unit.  Returns false after failing the request. */
static bool check_candidates(struct kvs_request *request)
{
    const struct kv_wire_query *query = kvs_query_of(request);
    const bool is_cut = query->first_cut == KV_CUT_INT4;
    const uint32_t *candidates = candidates_of(request);
    const uint32_t least = is_cut ? query->rerank : 1, most = kvs_query_candidates(query);

    if (query->first_cut > KV_CUT_INT4 || query->reserved != 0 ||
        (is_cut ? query->candidates < query->rerank : query->candidates != 0)) {
        kvs_request_fail(
            request, KV_INVALID,
            "query: first cut %u with %u candidates, rerank %u: value out of range",
            query->first_cut, query->candidates, query->rerank);
        return false;
    }
    for (uint32_t i = 0; candidates != NULL && i < request->header.n_units; i++) {
        if (candidates[i] >= least && candidates[i] <= most)
            continue;
        kvs_request_fail(request, KV_INVALID,
                         "query: layer %u head %u: %u candidates: must be %u to %u",
                         kvs_units(request)[i].layer, kvs_units(request)[i].kv_head,
                         candidates[i], least, most);
        return false;
    }
    return true;
}

/* Checks the fixed part and the ranges.  Returns false after failing the request. */
static bool check_query(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;
    const struct kv_wire_query *query = kvs_query_of(request);

    if (!kvs_units_are_there(request) || query->n_ranges == 0 ||
        query->n_ranges > KV_RANGES_MAX || head_bytes(request) > header->body_bytes) {
        kvs_request_fail(request, KV_INVALID,
                         "query: %u units and %u ranges in a body of %u bytes", header->n_units,
                         query->n_ranges, header->body_bytes);
        return false;
    }
    if (query->summaries != 0 && kvs_summaries_bits(query->summaries) == 0) {
        kvs_request_fail(request, KV_INVALID, "query: summaries %u: must be 0, 16 or 64",
                         query->summaries);
        return false;
    }
    if (kvs_summaries_rows(query->summary_blocks) == 0) {
        kvs_request_fail(request, KV_INVALID,
                         "query: summaries per %u blocks: must be 0, 8 or 24",
                         query->summary_blocks);
        return false;
    }
    const uint32_t flags = KV_WIRE_WEIGHTS | KV_WIRE_EACH | KV_WIRE_READS |
                           (query->answer == KV_ANSWER_ATTEND ? KV_WIRE_IDS : 0);
    if (query->answer < KV_ANSWER_IDS || query->answer > KV_ANSWER_ATTEND ||
        query->merge < KV_MERGE_SUM || query->merge > KV_MERGE_NONE ||
        (query->flags & ~flags) != 0) {
        kvs_request_fail(request, KV_INVALID, "query: unknown answer %u, merge %u or flags %#x",
                         query->answer, query->merge, query->flags);
        return false;
    }
    if (query->selection > KV_SELECT_THRESHOLD ||
        (query->selection == KV_SELECT_TOP ? query->fraction != 0
                                           : !(query->fraction > 0 && query->fraction <= 1))) {
        kvs_request_fail(request, KV_INVALID, "query: invalid selection %u or fraction %g",
                         query->selection, (double)query->fraction);
        return false;
    }
    if (query->n_queries == 0 || query->n_queries > KV_QUERIES_MAX || query->k == 0 ||
        query->k > KV_SELECTED_MAX || query->rerank == 0 || query->rerank > KV_CANDIDATES_MAX ||
        !(query->scale > 0 && query->scale < INFINITY)) {
        kvs_request_fail(request, KV_INVALID,
                         "query: %u vectors, k %u, rerank %u, scale %g: value out of range",
                         query->n_queries, query->k, query->rerank, (double)query->scale);
        return false;
    }
    if (!check_candidates(request))
        return false;
    const struct kv_wire_range *ranges = kvs_query_ranges(request);
    for (uint32_t i = 0; i < query->n_ranges; i++) {
        if (ranges[i].begin >= ranges[i].end || ranges[i].end > request->session->tokens_max ||
            (i > 0 && ranges[i].begin < ranges[i - 1].end)) {
            kvs_request_fail(
                request, KV_INVALID,
                "query: range %u: tokens %u to %u: empty, not in order, or beyond %u", i,
                ranges[i].begin, ranges[i].end, request->session->tokens_max);
            return false;
        }
    }
    return true;
}

/* Checks that attention over the layer's rows is supported.  Returns false after failing the
 * request. */
static bool check_attention(struct kvs_request *request, uint32_t i)
{
    const struct kv_wire_query *query = kvs_query_of(request);
    const struct kv_layer_schema *layer = kvs_unit_layer(request, i);
    struct kv_attend_shape shape;
    const char *fault = kvs_attention_shape(layer, query->n_queries, query->scale, &shape);

    if (fault != NULL)
        kvs_request_fail(
            request, KV_UNSUPPORTED,
            "query: layer %u: %s (type %u, keys of %u elements, values of %u, scale "
            "%g)",
            kvs_units(request)[i].layer, fault, layer->dtype, layer->d_k, layer->d_v,
            (double)query->scale);
    return fault == NULL;
}

/* Returns the most ids that unit i adds to the reply: attention without ids returns ids of cached
 * rows only, at most all rows of the blocks that the request names. */
static uint64_t ids_max(const struct kvs_request *request, uint32_t i, uint64_t n_selected)
{
    const uint64_t n_cached = (uint64_t)kvs_units(request)[i].n_ids * KV_BLOCK_TOKENS;

    return kvs_query_names_cached_only(kvs_query_of(request)) && n_cached < n_selected
               ? n_cached
               : n_selected;
}

/* Sums over a request's units. */
struct sums {
    uint64_t floats, n_cached;               /* in the body */
    uint64_t n_names, floats_out, row_bytes; /* in the reply, at most */
};

/* Checks unit i and adds it to the sums.  Returns false after failing the request. */
static bool
check_unit(struct kvs_request *request, uint32_t i, uint64_t n_selected, struct sums *sums)
{
    const struct kv_wire_query *query = kvs_query_of(request);
    const struct kv_wire_unit *named = &kvs_units(request)[i];

    if (!kvs_check_unit_is_known(request, i) || !kvs_check_unit_is_here(request, i) ||
        !kvs_check_unit_is_single(request, i))
        return false;
    const struct kv_layer_schema *layer = kvs_unit_layer(request, i);
    if (!kv_key_type_valid(layer->dtype) || layer->d_k > KVS_CODEBOOK_DIM_MAX) {
        kvs_request_fail(request, KV_UNSUPPORTED,
                         "query: layer %u: keys of type %u with %u elements: cannot be scored",
                         named->layer, layer->dtype, layer->d_k);
        return false;
    }
    if (kvs_query_has_outputs(query) && !check_attention(request, i))
        return false;
    sums->floats += (uint64_t)query->n_queries * layer->d_k;
    sums->n_cached += named->n_ids;
    sums->n_names += ids_max(request, i, n_selected);
    sums->row_bytes += n_selected * kvs_unit_at(request, i)->row_bytes;
    if (kvs_query_has_outputs(query))
        sums->floats_out += (uint64_t)query->n_queries * (layer->d_v + 1);
    return true;
}

/* Returns where the results begin in the reply's body. */
static size_t results_at(const struct kvs_request *request)
{
    return sizeof(struct kv_wire_query_times) + (kvs_query_of(request)->flags & KV_WIRE_READS
                                                     ? sizeof(struct kv_wire_query_reads)
                                                     : 0);
}

/* Checks that the reply fits a message and the scores fit the pipeline.  Returns false after
 * failing the request. */
static bool
check_room(struct kvs_request *request, uint32_t n_eligible, const struct sums *sums)
{
    const struct kv_wire_query *query = kvs_query_of(request);
    /* A name is an id and, if rows are sent, the row's CRC; weights and masks only on
     * request. */
    const uint64_t per_name = 2 * sizeof(uint32_t) +
                              (query->flags & KV_WIRE_WEIGHTS ? sizeof(float) : 0) +
                              (query->merge == KV_MERGE_NONE ? sizeof(uint32_t) : 0);
    const uint64_t body = results_at(request) +
                          request->header.n_units * sizeof(struct kv_wire_query_result) +
                          sums->n_names * per_name + sums->floats_out * sizeof(float);

    if (body <= KV_WIRE_BODY_MAX &&
        (query->answer != KV_ANSWER_ROWS || sums->row_bytes <= KV_WIRE_BULK_MAX) &&
        (uint64_t)n_eligible * (query->n_queries + KVS_SCORE_SPARE) <= KVS_QUERY_STEP_1_FLOATS)
        return true;
    kvs_request_fail(request, KV_TOO_LARGE,
                     "query: reply of %llu bytes and rows of %llu bytes, from %u tokens for %u "
                     "vectors: too large for one message",
                     (unsigned long long)body, (unsigned long long)sums->row_bytes, n_eligible,
                     query->n_queries);
    return false;
}

/* Checks the cached blocks and the query vectors.  Returns false after failing the request. */
static bool check_contents(struct kvs_request *request, uint64_t n_floats)
{
    const struct kv_wire_unit *units = kvs_units(request);
    const float *vectors = vectors_of(request);
    const struct kv_wire_cached_block *cached =
        (const struct kv_wire_cached_block *)(const void *)(vectors + n_floats);

    for (uint32_t i = 0; i < request->header.n_units; cached += units[i++].n_ids) {
        for (uint32_t j = 1; j < units[i].n_ids; j++) {
            if (cached[j].block <= cached[j - 1].block) {
                kvs_request_fail(request, KV_INVALID,
                                 "query: layer %u head %u: cached blocks %u, %u: not in order",
                                 units[i].layer, units[i].kv_head, cached[j - 1].block,
                                 cached[j].block);
                return false;
            }
        }
    }
    /* A score that is not a number would have no place in the order of results. */
    if (kv_are_finite(vectors, n_floats))
        return true;
    for (uint64_t i = 0; i < n_floats; i++) {
        if (!isfinite(vectors[i])) {
            kvs_request_fail(request, KV_INVALID,
                             "query: element %llu of the vectors is not finite",
                             (unsigned long long)i);
            return false;
        }
    }
    return true;
}

/* Returns the rows that are selected of each unit at most. */
static uint32_t selected_max(const struct kvs_request *request)
{
    const struct kv_wire_query *query = kvs_query_of(request);
    const struct kvs_selection selection = kvs_query_selection(query, 1);

    return kvs_selection_max(&selection,
                             kvs_ranges_count(kvs_query_ranges(request), query->n_ranges));
}

static bool check_units(struct kvs_request *request)
{
    const struct kv_wire_query *query = kvs_query_of(request);
    const uint32_t n = kvs_ranges_count(kvs_query_ranges(request), query->n_ranges);
    const uint64_t n_selected = selected_max(request);
    struct sums sums = {0};

    kvs_begin_units(request);
    for (uint32_t i = 0; i < request->header.n_units; i++)
        if (!check_unit(request, i, n_selected, &sums))
            return false;
    const uint64_t expected = (uint64_t)((const uint8_t *)vectors_of(request) - request->body) +
                              sums.floats * sizeof(float) +
                              sums.n_cached * sizeof(struct kv_wire_cached_block);
    /* Before check_contents(), which walks as many elements as the counts say. */
    if (request->header.body_bytes != expected) {
        kvs_request_fail(request, KV_INVALID, "query: body of %u bytes, expected %llu",
                         request->header.body_bytes, (unsigned long long)expected);
        return false;
    }
    return check_room(request, n, &sums) && check_contents(request, sums.floats);
}

bool kvs_query_check(struct kvs_request *request)
{
    return check_query(request) && check_units(request);
}

static struct kvs_unit *unit_at(void *request, uint32_t i)
{
    return kvs_unit_at(request, i);
}

/* Places the result's arrays in the body of the reply, at their largest. */
static void place_result(const struct kvs_request *request, struct kvs_query_input *input)
{
    const struct kv_wire_query *query = input->query;
    const uint64_t n_selected = selected_max(request);
    uint64_t n_ids = 0, n_outputs = 0, n_lses = 0;
    uint32_t *at;

    for (uint32_t i = 0; i < input->n_units; i++) {
        n_ids += ids_max(request, i, n_selected);
        if (!kvs_query_has_outputs(query))
            continue;
        n_outputs += (uint64_t)query->n_queries * kvs_unit_layer(request, i)->d_v;
        n_lses += query->n_queries;
    }
    input->found =
        (struct kv_wire_query_result *)(void *)(request->reply_body + results_at(request));
    at = (uint32_t *)(void *)(input->found + input->n_units);
    input->ids = at;
    at += n_ids;
    if (query->flags & KV_WIRE_WEIGHTS) {
        input->weights = (float *)(void *)at;
        at += n_ids;
    }
    if (query->merge == KV_MERGE_NONE) {
        input->query_masks = at;
        at += n_ids;
    }
    input->outputs = (float *)(void *)at;
    at += n_outputs;
    input->lses = (float *)(void *)at;
    at += n_lses;
    if (query->answer == KV_ANSWER_ROWS)
        input->crcs = at;
}

void kvs_query_parse(const struct kvs_request *request, struct kvs_query_input *ret_input)
{
    const struct kv_wire_query *query = kvs_query_of(request);
    const float *cached = vectors_of(request);

    for (uint32_t i = 0; i < request->header.n_units; i++)
        cached += (size_t)query->n_queries * kvs_unit_layer(request, i)->d_k;
    *ret_input = (struct kvs_query_input){
        .query = query,
        .ranges = kvs_query_ranges(request),
        .n_units = request->header.n_units,
        .named = kvs_units(request),
        .unit_at = unit_at,
        .candidates = candidates_of(request),
        .candidates_cap =
            request->header.version < KV_WIRE_VERSION_FIRST_CUT ? KV_SELECTED_MAX : 0,
        .queries = vectors_of(request),
        .cached = (const struct kv_wire_cached_block *)(const void *)cached,
        .layers = request->session->schema->layers,
        .rows = request->staging,
        .store = &request->shard->store,
        .codebooks = &request->shard->codebooks,
        .indexer = request->shard->indexer,
        .arg = (void *)request,
    };
    place_result(request, ret_input);
}
