/* Query: checks its arguments and sends its messages.
 *
 * Each data thread is sent the kv heads that it owns, as many per message as the largest
 * possible reply can hold.  Every message has its own place in the caller's buffer, where its
 * rows are received, dense, before or after the body that lists them.  A node whose rows do not
 * match its body can therefore only damage its own reply.
 */
#include "client/ops/query.h"

#include "client/buffer.h"
#include "client/connection.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/ops/query_private.h"
#include "client/ops/summary_rows.h"
#include "client/request.h"
#include "client/session.h"
#include "client/state.h"
#include "proto/kv_wire.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The largest number in fp16. */
#define HALF_MOST 65504.0
/* How far a summary's score may exceed those of its rows, with margin: its correction is at
 * most 1 (kernels/estimate.h). */
#define VARIANCE_CORRECTION_MOST 2

/* ---- sizes ------------------------------------------------------------------------------- */

static size_t request_bytes(const struct kvc_query_part *part, size_t n_units, size_t n_cached)
{
    return sizeof(struct kv_wire_query) + n_units * sizeof(struct kv_wire_unit) +
           part->query.n_ranges * sizeof(struct kv_wire_range) +
           (part->query.candidates_each != NULL ? n_units * sizeof(uint32_t) : 0) +
           n_units * part->query.n_queries * part->d_k * sizeof(float) +
           n_cached * sizeof(struct kv_wire_cached_block);
}

/* A node reserves space for CRCs, whether or not rows are requested. */
static size_t
reply_bytes_max(const struct kvc_query_part *part, size_t n_units, size_t n_cached)
{
    size_t n_ids = n_units * part->n_ids_max;

    if (kvc_query_names_cached_only(&part->query) && n_ids > n_cached * KV_BLOCK_TOKENS)
        n_ids = n_cached * KV_BLOCK_TOKENS;
    return kvc_query_names_bytes(part, n_units, n_ids) + n_ids * sizeof(uint32_t);
}

/* Whether the request of so many units, and any reply to it, fits a message. */
static bool
fits(const struct kvc_query_part *part, size_t n_units, size_t n_cached, size_t bulk_bytes_max)
{
    return request_bytes(part, n_units, n_cached) <= KV_WIRE_BODY_MAX &&
           reply_bytes_max(part, n_units, n_cached) <= KV_WIRE_BODY_MAX &&
           n_units * kvc_query_head_bytes_max(part) <= bulk_bytes_max &&
           (!kvc_query_has_rows(&part->query) || n_units * part->n_ids_max <= KV_WIRE_ROWS_MAX);
}

/* Returns the number of cached blocks of the head; 0 if they do not affect the reply. */
static uint32_t cached_of(const struct kvc_query_part *part, uint32_t head)
{
    uint32_t rank = head - part->query.kv_head_begin;

    return part->cached_begin[rank + 1] - part->cached_begin[rank];
}

/* ---- sending ----------------------------------------------------------------------------- */

static bool
seek(const struct kv_op *op, const struct kvc_connection *connection, uint32_t *head)
{
    const struct kvc_query_part *part = kvc_query_of(op);

    for (; *head < part->query.kv_head_begin + part->n_heads; ++*head)
        if (kvc_session_connection(op->session, part->query.layer, *head) == connection)
            return true;
    return false;
}

/* Returns how much a node takes for `rerank`, which is as good as any more: so many candidates are
 * the most of a head. */
static uint32_t rerank_max(const struct kvc_node *node)
{
    return node->version < KV_WIRE_VERSION_FIRST_CUT ? KV_SELECTED_MAX : KV_CANDIDATES_MAX;
}

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static void fill(const struct kvc_query_part *part,
                 const struct kvc_node *node,
                 const struct kv_wire_unit *units,
                 uint32_t n_units,
                 uint8_t *at)
{
    const struct kv_query *query = &part->query;
    const struct kv_wire_query asked = {
        .answer = (uint8_t)query->answer,
        .merge = (uint8_t)query->merge,
        .n_queries = (uint16_t)query->n_queries,
        .k = query->k,
        .rerank = smaller(query->rerank, rerank_max(node)),
        .first_cut = (uint8_t)query->first_cut,
        .candidates = (uint16_t)query->candidates,
        .scale = query->scale,
        .n_ranges = query->n_ranges,
        .flags = (query->want_weights ? KV_WIRE_WEIGHTS : 0) |
                 (query->want_ids ? KV_WIRE_IDS : 0) |
                 (query->candidates_each != NULL ? KV_WIRE_EACH : 0) |
                 (part->has_reads ? KV_WIRE_READS : 0),
        .selection = (uint32_t)query->selection,
        .fraction = query->fraction,
        .summaries = (uint16_t)query->summaries,
        .summary_blocks = kvc_summary_blocks(query->summaries, query->summary_rows),
    };
    size_t vectors_bytes = (size_t)query->n_queries * part->d_k * sizeof(float);

    memcpy(at, &asked, sizeof(asked));
    at += sizeof(asked);
    memcpy(at, units, n_units * sizeof(*units));
    at += n_units * sizeof(*units);
    for (uint32_t i = 0; i < query->n_ranges; i++, at += sizeof(struct kv_wire_range)) {
        struct kv_wire_range range = {query->ranges[i].begin, query->ranges[i].end};

        memcpy(at, &range, sizeof(range));
    }
    for (uint32_t i = 0; query->candidates_each != NULL && i < n_units; i++) {
        const uint32_t most =
            query->first_cut == KV_CUT_NONE ? rerank_max(node) : query->candidates;
        const uint32_t candidates = smaller(kvc_query_candidates(part, units[i].kv_head), most);

        memcpy(at, &candidates, sizeof(candidates));
        at += sizeof(candidates);
    }
    for (uint32_t i = 0; i < n_units; i++, at += vectors_bytes)
        memcpy(at,
               (const uint8_t *)query->queries +
                   (units[i].kv_head - query->kv_head_begin) * vectors_bytes,
               vectors_bytes);
    for (uint32_t i = 0; i < n_units; i++) {
        uint32_t first = part->cached_begin[units[i].kv_head - query->kv_head_begin];

        for (uint32_t j = first; j < first + units[i].n_ids; j++) {
            struct kv_wire_cached_block cached = {query->cached[j].block,
                                                  query->cached[j].fingerprint};

            memcpy(at, &cached, sizeof(cached));
            at += sizeof(cached);
        }
    }
}

static kv_status_t build(struct kvc_subop *subop, struct kvc_request *request)
{
    struct kv_op *op = subop->op;
    struct kvc_query_part *part = kvc_query_of(op);
    const struct kv_query *query = &part->query;
    size_t bulk_bytes_max = subop->connection->link.node->bulk_bytes_max;
    struct kv_wire_unit units[KV_HEADS_MAX];
    uint32_t head = subop->head;
    uint32_t n_units = 0, n_cached = 0;
    bool more = true;

    while (more) {
        uint32_t n = cached_of(part, head);

        if (n_units > 0 && !fits(part, n_units + 1, n_cached + n, bulk_bytes_max))
            break;
        units[n_units++] = (struct kv_wire_unit){
            .layer = (uint16_t)query->layer, .kv_head = (uint16_t)head, .n_ids = n};
        n_cached += n;
        head++;
        more = seek(op, subop->connection, &head);
    }
    request->body_bytes = request_bytes(part, n_units, n_cached);
    if (!kvc_request_message(request, request->body_bytes))
        return KV_BUSY;
    fill(part, subop->connection->link.node, units, n_units, request->message->body);
    request->position = part->n_placed;
    request->bytes = n_units * kvc_query_head_bytes_max(part);
    part->n_placed += n_units;
    request->header.op = KV_OP_QUERY;
    request->header.n_units = n_units;
    request->header.layer = query->layer;
    request->header.snapshot = query->snapshot;
    subop->head = head;
    subop->finished = !more;
    return KV_OK;
}

static void start(struct kv_op *op)
{
    const struct kvc_query_part *part = kvc_query_of(op);
    uint32_t begin = part->query.kv_head_begin;

    kvc_connections_unmark(op->client);
    for (uint32_t head = begin; head < begin + part->n_heads; head++) {
        struct kvc_connection *connection =
            kvc_session_connection(op->session, part->query.layer, head);

        if (kvc_query_head_bytes_max(part) > connection->link.node->bulk_bytes_max) {
            kvc_op_fail(op, connection->link.node, NULL, KV_TOO_LARGE,
                        "rows of one kv head may take %zu bytes, limit %u: use KV_ANSWER_IDS",
                        kvc_query_head_bytes_max(part), connection->link.node->bulk_bytes_max);
            return;
        }
        if (!kvc_op_ask_unit(op, part->query.layer, head, 0))
            return;
    }
}

/* ---- the operation ----------------------------------------------------------------------- */

static void describe(const struct kv_op *op,
                     const struct kvc_request *request,
                     char *text,
                     size_t text_bytes)
{
    (void)request;
    kvc_session_describe(op->session, kvc_query_of(op)->query.layer, text, text_bytes);
}

static void fini(struct kv_op *op)
{
    for (uint32_t i = 0; i < kvc_query_of(op)->n_heads; i++)
        free(kvc_query_of(op)->saved[i]);
}

static const struct kvc_op_type query_type = {
    .name = "query",
    .id = KV_OP_QUERY,
    .needs_current = true,
    .start = start,
    .build = build,
    .requests.land = kvc_query_land,
    .requests.reply = kvc_query_reply,
    .requests.finish = kvc_query_finish,
    .fini = fini,
    .describe = describe,
};

static const char *ranges_fault(const struct kv_query *query)
{
    uint32_t end = 0;

    if (query->n_ranges == 0 || query->n_ranges > KV_RANGES_MAX)
        return "n_ranges: must be 1 to 256";
    for (uint32_t i = 0; i < query->n_ranges; i++) {
        if (query->ranges[i].begin < end || query->ranges[i].begin >= query->ranges[i].end)
            return "ranges: empty, overlapping or not ascending";
        end = query->ranges[i].end;
    }
    return end > KV_TOKENS_MAX ? "ranges: beyond the largest session" : NULL;
}

/* Checks the fields that sizes depend on, and computes the sizes in `part`.  Returns NULL if
 * the query fits the schema. */
static const char *shape_fault(const kv_schema_t *schema,
                               const struct kv_query *query,
                               struct kvc_query_part *part)
{
    const char *fault = ranges_fault(query);
    const struct kv_layer_schema *layer;
    uint32_t n_vectors;
    uint64_t most;

    if (fault != NULL)
        return fault;
    if (query->layer >= schema->n_layers)
        return "layer: out of bounds";
    layer = &schema->layers[query->layer];
    part->query = *query;
    part->n_heads = query->n_kv_heads;
    if (query->n_kv_heads == 0 && query->kv_head_begin == 0)
        part->n_heads = layer->n_kv_heads;
    if (part->n_heads == 0 || query->kv_head_begin >= layer->n_kv_heads ||
        part->n_heads > layer->n_kv_heads - query->kv_head_begin)
        return "kv heads: out of bounds";
    if (query->n_queries == 0 || query->n_queries > KV_QUERIES_MAX)
        return "n_queries: must be 1 to 32";
    if (query->k == 0 || query->k > KV_SELECTED_MAX)
        return "k: must be 1 to 8192";
    if (query->merge < KV_MERGE_SUM || query->merge > KV_MERGE_NONE)
        return "unknown merge";
    if (query->answer < KV_ANSWER_IDS || query->answer > KV_ANSWER_ATTEND)
        return "unknown answer";
    if (query->want_ids && !kvc_query_attends(query))
        return "want_ids: only with KV_ANSWER_ATTEND";
    if (query->summaries != 0 && query->summaries != 16 && query->summaries != 64)
        return "summaries: must be 0, 16 or 64";
    if (!kvc_summary_rows_valid(query->summary_rows))
        return "summary_rows: must be 0, 1024 or 3072";
    for (uint32_t i = 0; i < query->n_ranges; i++) {
        const struct kv_range *range = &query->ranges[i];

        part->n_candidates += range->end - range->begin;
        part->n_blocks +=
            (range->end - 1) / KV_BLOCK_TOKENS - range->begin / KV_BLOCK_TOKENS + 1;
    }
    n_vectors = query->merge >= KV_MERGE_UNION ? query->n_queries : 1;
    most = (uint64_t)query->k * n_vectors;
    part->n_ids_min = query->selection != KV_SELECT_TOP ? 1
                      : query->k < part->n_candidates   ? query->k
                                                        : part->n_candidates;
    part->n_ids_max = most < part->n_candidates ? (uint32_t)most : part->n_candidates;
    part->row_bytes = layer->row_bytes;
    part->d_k = layer->d_k;
    part->d_v = layer->d_v;
    return NULL;
}

/* Computes bounds of outputs and of log-sum-exps: the latter as if every eligible row had the
 * largest possible score.
 *   sum  size_of() the largest vector */
static void expect_outputs(struct kvc_query_part *part, enum kv_dtype dtype, double sum)
{
    const double value_most = dtype == KV_FP16 ? HALF_MOST : (double)FLT_MAX;
    const double most =
        (double)part->query.scale * sum * value_most * (1 + (double)KVC_QUERY_ROUNDING) +
        log(part->n_candidates) + VARIANCE_CORRECTION_MOST;

    part->output_most =
        dtype == KV_FP16 ? (float)HALF_MOST * (1 + KVC_QUERY_ROUNDING) : FLT_MAX;
    part->lse_most = most < (double)FLT_MAX ? (float)most : FLT_MAX;
}

/* Returns the sum of absolute values; NaN or infinite if an element is. */
static double size_of(const float *vector, uint32_t d)
{
    double sums[4] = {0}; /* an addition takes longer than the next one needs to begin */
    uint32_t i = 0;

    for (; i + 4 <= d; i += 4)
        for (uint32_t j = 0; j < 4; j++)
            sums[j] += fabs((double)vector[i + j]);
    for (; i < d; i++)
        sums[0] += fabs((double)vector[i]);
    return sums[0] + sums[1] + sums[2] + sums[3];
}

/* Checks how many candidates each step takes: a node would take fewer than were asked for. */
static const char *candidates_fault(const struct kvc_query_part *part)
{
    const struct kv_query *query = &part->query;
    const bool is_cut = query->first_cut != KV_CUT_NONE;
    const uint32_t most = query->merge >= KV_MERGE_UNION ? KV_SELECTED_MAX : KV_CANDIDATES_MAX;

    if (query->rerank == 0)
        return "rerank: must be 1 or more";
    if (query->first_cut != KV_CUT_NONE && query->first_cut != KV_CUT_INT4)
        return "unknown first_cut";
    if (is_cut ? query->candidates < query->rerank || query->candidates > UINT16_MAX
               : query->candidates != 0)
        return "candidates: must be at least rerank and at most 65535, and 0 without a first "
               "cut";
    for (uint32_t i = 0; query->candidates_each != NULL && i < part->n_heads; i++)
        if (query->candidates_each[i] < (is_cut ? query->rerank : 1) ||
            query->candidates_each[i] > (is_cut ? query->candidates : query->rerank))
            return "candidates_each: more than candidates, or fewer than rerank";
    if (query->selection != KV_SELECT_TOP || part->n_candidates <= most)
        return NULL;
    if ((uint64_t)query->k * query->rerank > most)
        return "rerank: rerank * k must be at most 16384 (UNION and NONE: 8192), where that "
               "many "
               "rows are eligible";
    if ((uint64_t)query->k * query->candidates > most)
        return "candidates: candidates * k must be at most 16384 (UNION and NONE: 8192), where "
               "that many rows are eligible";
    return NULL;
}

/* Checks that all nodes know what the query asks for; what they read is counted where they can. */
static kv_status_t check_versions(struct kv_session *session, struct kvc_query_part *part)
{
    const struct kv_query *query = &part->query;
    const struct kvc_node *old = kvc_session_node_below(session, KV_WIRE_VERSION_FIRST_CUT);
    const bool is_many = query->selection == KV_SELECT_TOP &&
                         part->n_candidates > KV_SELECTED_MAX &&
                         (uint64_t)query->k * query->rerank > KV_SELECTED_MAX;

    /* One that is not connected may be older when it is. */
    part->has_reads = query->want_reads && old == NULL && kvc_session_is_connected(session);
    if (old != NULL && kvc_summary_blocks(query->summaries, query->summary_rows) != 0)
        return kvc_set_error(&session->client->loop, KV_UNSUPPORTED,
                             "query: layer %u: summary_rows: node %s speaks version %u, which "
                             "has summaries per 1024 rows only; %d has them per %u",
                             query->layer, old->name, old->version, KV_WIRE_VERSION_FIRST_CUT,
                             query->summary_rows);
    if (old == NULL ||
        (query->first_cut == KV_CUT_NONE && query->candidates_each == NULL && !is_many))
        return KV_OK;
    return kvc_set_error(
        &session->client->loop, KV_UNSUPPORTED,
        "query: layer %u: node %s speaks version %u, which has no first cut, no "
        "candidates of each head, and at most %d candidates; %d does",
        query->layer, old->name, old->version, KV_SELECTED_MAX, KV_WIRE_VERSION_FIRST_CUT);
}

/* Checks the other fields, and computes the bounds in `part` that depend on them. */
static const char *values_fault(const struct kv_session *session, struct kvc_query_part *part)
{
    const struct kv_query *query = &part->query;
    const size_t n_vectors = (size_t)part->n_heads * query->n_queries;
    const float *element = query->queries;
    const char *fault;
    double most = 0;

    if (query->ranges[query->n_ranges - 1].end > session->tokens_max)
        return "ranges: beyond the session's tokens_max";
    if (query->snapshot > session->tokens_max)
        return "snapshot is beyond the session's tokens_max";
    fault = candidates_fault(part);
    if (fault != NULL)
        return fault;
    if (!isfinite(query->scale) || query->scale <= 0)
        return "scale: must be above 0";
    if (query->selection == KV_SELECT_TOP ? query->fraction != 0
                                          : !(query->fraction > 0 && query->fraction <= 1))
        return "fraction: must be 0 with KV_SELECT_TOP, else above 0 and at most 1";
    for (size_t i = 0; i < n_vectors; i++) {
        const double sum = size_of(element, part->d_k);

        if (!isfinite(sum))
            return "queries: a vector is not finite";
        most = sum > most ? sum : most;
        element += part->d_k;
    }
    expect_outputs(part, session->schema.layers[query->layer].dtype, most);
    return NULL;
}

/* Checks and counts the cached blocks; *ret_most: the most of one head.  Returns NULL if all
 * are valid. */
static const char *
cached_fault(const struct kvc_query_part *part, size_t *ret_n, uint32_t *ret_most)
{
    const struct kv_query *query = &part->query;
    uint64_t n_cached = 0;

    *ret_most = 0;
    *ret_n = 0;
    if (query->n_cached == NULL || !kvc_query_uses_cached_blocks(query))
        return NULL;
    for (uint32_t i = 0; i < part->n_heads; i++) {
        uint64_t end = n_cached + query->n_cached[i];

        if (end > UINT32_MAX)
            return "n_cached: too many blocks";
        for (uint64_t j = n_cached; j < end; j++)
            if (query->cached[j].block >= KV_TOKENS_MAX / KV_BLOCK_TOKENS ||
                (j > n_cached && query->cached[j].block <= query->cached[j - 1].block))
                return "cached: blocks not ascending or beyond the largest session";
        if (query->n_cached[i] > *ret_most)
            *ret_most = query->n_cached[i];
        n_cached = end;
    }
    *ret_n = n_cached;
    return NULL;
}

/* Allocates the results and copies the caller's arrays.  Returns false if out of memory. */
static bool keep(struct kv_op *op, size_t n_cached)
{
    struct kvc_query_part *part = kvc_query_of(op);
    struct kv_query *query = &part->query;
    const size_t n = part->n_heads;
    const size_t results_bytes = n * (sizeof(*part->results) + sizeof(*part->saved)) +
                                 (n + 1) * sizeof(*part->cached_begin);
    const size_t ranges_bytes = query->n_ranges * sizeof(*query->ranges);
    const size_t queries_bytes = n * query->n_queries * part->d_k * sizeof(*query->queries);
    const size_t cached_bytes = n_cached * sizeof(*query->cached);
    const size_t each_bytes =
        query->candidates_each != NULL ? n * sizeof(*query->candidates_each) : 0;
    uint8_t *at = kvc_op_capacity(op, results_bytes + ranges_bytes + queries_bytes +
                                          cached_bytes + each_bytes);

    if (at == NULL)
        return false;
    memset(at, 0, results_bytes);
    part->results = kvc_query_carve(&at, n, sizeof(*part->results));
    part->saved = kvc_query_carve(&at, n, sizeof(*part->saved));
    part->cached_begin = kvc_query_carve(&at, n + 1, sizeof(*part->cached_begin));
    for (size_t i = 0; i < n && n_cached > 0; i++)
        part->cached_begin[i + 1] = part->cached_begin[i] + query->n_cached[i];
    query->ranges = kvc_op_keep(&at, query->ranges, ranges_bytes);
    query->queries = kvc_op_keep(&at, query->queries, queries_bytes);
    query->cached = kvc_op_keep(&at, query->cached, cached_bytes);
    if (each_bytes > 0)
        query->candidates_each = kvc_op_keep(&at, query->candidates_each, each_bytes);
    query->n_cached = NULL;
    return true;
}

size_t kv_query_rows_bytes_max(const kv_schema_t *schema, const struct kv_query *query)
{
    struct kvc_query_part part = {0};

    return shape_fault(schema, query, &part) == NULL
               ? part.n_heads * kvc_query_head_bytes_max(&part)
               : 0;
}

kv_status_t kv_query_begin(struct kv_session *session,
                           const struct kv_query *query,
                           const struct kv_rows_io *io,
                           uint32_t deadline_ms,
                           struct kv_op **ret_op)
{
    KVC_ENTER(session->client);
    struct kv_client *client = session->client;
    struct kv_buffer *buffer = kvc_query_has_rows(query) && io != NULL ? io->buffer : NULL;
    struct kvc_query_part part = {0};
    const char *fault = shape_fault(&session->schema, query, &part);
    uint32_t end, max_cached;
    size_t n_cached;
    kv_status_t status;
    struct kv_op *op;

    if (fault == NULL)
        fault = values_fault(session, &part);
    if (fault != NULL)
        return kvc_set_error(&client->loop, KV_INVALID, "query: layer %u: %s", query->layer,
                             fault);
    status = check_versions(session, &part);
    if (status != KV_OK)
        return status;
    if (kvc_query_has_rows(query) &&
        (io == NULL || !kvc_buffer_holds(client, io->buffer, io->offset,
                                         part.n_heads * kvc_query_head_bytes_max(&part))))
        return kvc_set_error(&client->loop, KV_INVALID,
                             "query: %zu bytes do not fit the buffer",
                             part.n_heads * kvc_query_head_bytes_max(&part));
    fault = cached_fault(&part, &n_cached, &max_cached);
    if (fault != NULL)
        return kvc_set_error(&client->loop, KV_INVALID, "query: layer %u: %s", query->layer,
                             fault);
    if (!fits(&part, 1, max_cached, KV_WIRE_BULK_MAX))
        return kvc_set_error(
            &client->loop, KV_TOO_LARGE,
            "query: layer %u: too large: one kv head may take %zu bytes of request, %zu of "
            "reply and %zu of rows",
            query->layer, request_bytes(&part, 1, max_cached),
            reply_bytes_max(&part, 1, max_cached), kvc_query_head_bytes_max(&part));
    status = kvc_op_begin(client, &query_type, session, buffer, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    end = query->ranges[query->n_ranges - 1].end;
    if (part.query.snapshot < end)
        part.query.snapshot = end;
    if (buffer != NULL)
        part.base = buffer->base + io->offset;
    *kvc_query_of(op) = part;
    if (!keep(op, n_cached)) {
        kvc_op_discard(op);
        return kvc_set_error(&client->loop, KV_NO_MEMORY, "query: out of memory");
    }
    kvc_op_require_units(op, query->layer, query->layer + 1, query->kv_head_begin,
                         part.n_heads);
    return kvc_op_submit(op, ret_op);
}

static kv_status_t
begin_query_entry(struct kv_client *client, void *entries, size_t i, uint32_t deadline_ms)
{
    struct kv_query_entry *entry = (struct kv_query_entry *)entries + i;

    entry->op = NULL;
    entry->status = kvc_batch_takes(client, entry->session);
    if (entry->status == KV_OK)
        entry->status =
            kv_query_begin(entry->session, entry->query, entry->io, deadline_ms, &entry->op);
    return entry->status;
}

kv_status_t
kv_query_begin_batch(struct kv_query_entry *entries, size_t n_entries, uint32_t deadline_ms)
{
    if (n_entries == 0)
        return KV_OK;
    KVC_ENTER(entries[0].session->client);

    return kvc_batch_begin(entries[0].session->client, entries, n_entries, deadline_ms,
                           begin_query_entry);
}

kv_status_t
kv_op_query_result(const struct kv_op *op, uint32_t head, struct kv_query_result *ret_result)
{
    KVC_LOOK(op->client);

    if (op->type != &query_type || op->status != KV_OK || head >= kvc_query_of(op)->n_heads)
        return KV_INVALID;
    *ret_result = kvc_query_of(op)->results[head];
    return KV_OK;
}

uint32_t kv_block_fingerprint(const uint32_t *crcs)
{
    return kv_wire_block_fingerprint(crcs);
}

void kv_op_query_reads(const struct kv_op *op, struct kv_query_reads *ret_reads)
{
    KVC_LOOK(op->client);

    *ret_reads = (struct kv_query_reads){0};
    if (op->type != &query_type || op->status != KV_OK)
        return;
    const struct kv_wire_query_reads *reads = &kvc_query_of(op)->reads;

    *ret_reads = (struct kv_query_reads){.books = reads->books,
                                         .codes = reads->codes,
                                         .copies = reads->copies,
                                         .keys = reads->keys,
                                         .rows = reads->rows,
                                         .summaries = reads->summaries};
}
