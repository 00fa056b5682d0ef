/* Query: checks and stores its replies.
 *
 * A reply's body is checked as a whole before any of it is stored: every field against the
 * request, and attention outputs, which have no checksum, against the bounds of what such
 * values can yield.  Rows are checked against their CRCs after they have been received.
 */
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/ops/query.h"
#include "client/ops/query_private.h"
#include "client/peer.h"
#include "client/request.h"
#include "client/session.h"
#include "client/state.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/within.h"
#include "kvserver/base/writers.h"
#include "kvserver/net/transport.h"
#include "proto/kv_wire.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A copy of one message's reply, in one allocation; ids, weights and query masks are unit by
 * unit.  It belongs to the operation, whose results point into it, until the operation ends. */
struct kvc_saved_reply {
    struct kv_wire_query_times times;
    struct kv_wire_query_reads reads;
    struct kv_wire_query_result *results; /* (n_units) */
    uint32_t *ids;                        /* (n_ids) tokens */
    uint32_t *row_index;                  /* (n_ids) counted from the unit's first; rows only */
    uint32_t *tokens;                     /* (n_rows) of the rows that were sent */
    uint32_t *crcs;                       /* (n_rows) */
    float *weights;                       /* (n_ids) if requested */
    uint32_t *query_mask;                 /* (n_ids) with KV_MERGE_NONE */
    float *outputs; /* (n_units, n_queries, d_v) where kvc_query_has_outputs() */
    float *lses;    /* (n_units, n_queries) */
};

/* An invalid field of a reply; the name is NULL if none is. */
struct fault {
    const char *field;
    double value;
};

static const struct kv_wire_unit *units_of(const struct kvc_request *request)
{
    return (const struct kv_wire_unit *)(request->message->body + sizeof(struct kv_wire_query));
}

/* Returns the place of the request's rows in the caller's buffer. */
static uint8_t *place_of(const struct kvc_request *request)
{
    const struct kvc_query_part *part = kvc_query_of(kvc_request_op(request));

    return part->base + request->position * kvc_query_head_bytes_max(part);
}

unsigned kvc_query_land(struct kvc_request *request, uint64_t bytes, struct kv_iov *ret_iov)
{
    if (bytes == 0 || bytes > request->bytes ||
        bytes % kvc_query_of(kvc_request_op(request))->row_bytes != 0)
        return 0;
    ret_iov[0] = (struct kv_iov){.base = place_of(request), .bytes = bytes};
    return 1;
}

/* Returns the most rows that summaries may stand for: those not selected, with NONE by at least
 * one vector. */
static uint32_t n_estimated_max(const struct kvc_query_part *part,
                                const struct kv_wire_query_result *result)
{
    if (part->query.summaries == 0)
        return 0;
    return part->query.merge == KV_MERGE_NONE ? part->n_candidates
                                              : part->n_candidates - result->n_selected;
}

/* How many rows the steps of a unit's query score.  Step 1 is skipped if every eligible row becomes
 * a candidate, step 2 if there is nothing left to select or to weight. */
struct work {
    uint32_t n_scored;                       /* by step 1; 0: skipped */
    uint64_t n_reranked_min, n_reranked_max; /* by their keys, in a cut or step 2 */
};

static struct work expect_work(const struct kvc_query_part *part,
                               const struct kv_wire_unit *unit,
                               const struct kv_wire_query_result *result)
{
    const struct kv_query *query = &part->query;
    const bool merges = query->merge < KV_MERGE_UNION;
    const uint64_t cap = merges ? KV_CANDIDATES_MAX : KV_SELECTED_MAX;
    const uint64_t n_groups = merges ? 1 : query->n_queries, n = part->n_candidates;
    const uint32_t candidates = kvc_query_candidates(part, unit->kv_head);
    const uint64_t wanted = (uint64_t)query->k * candidates,
                   n_group = wanted < cap ? wanted : cap;
    const uint64_t most = n_group * n_groups < n ? n_group * n_groups : n;
    const bool is_scored = query->selection != KV_SELECT_TOP || n_group < n;
    const bool is_reranked = is_scored ? candidates > 1 : query->k < n || query->want_weights;
    struct work work = {.n_scored = is_scored ? part->n_candidates : 0};

    if (query->first_cut != KV_CUT_NONE) {
        /* Candidates may have copies or not; those that the cut leaves are scored again. */
        work.n_reranked_max = 2 * most;
    } else if (is_reranked) {
        work.n_reranked_min = result->n_selected;
        work.n_reranked_max = most;
    }
    return work;
}

/* Checks the counts of a unit's result, and that it is the requested unit. */
static struct fault result_fault(const struct kvc_request *request,
                                 const struct kv_wire_unit *unit,
                                 const struct kv_wire_query_result *result)
{
    const struct kvc_query_part *part = kvc_query_of(kvc_request_op(request));
    const bool is_part = kvc_query_names_cached_only(&part->query);
    const uint64_t n_scored = (uint64_t)result->n_scored_by_code + result->n_scored_by_key;
    const struct work work = expect_work(part, unit, result);
    const uint64_t n_ids_max =
        is_part ? (uint64_t)unit->n_ids * KV_BLOCK_TOKENS : result->n_selected;
    const struct {
        struct fault fault;
        bool is_right;
    } fields[] = {
        {{"layer", result->layer}, result->layer == unit->layer},
        {{"kv head", result->kv_head}, result->kv_head == unit->kv_head},
        {{"n_selected", result->n_selected},
         result->n_selected >= part->n_ids_min && result->n_selected <= part->n_ids_max},
        {{"n_ids", result->n_ids},
         result->n_ids <= result->n_selected && result->n_ids <= n_ids_max &&
             (is_part || result->n_ids == result->n_selected)},
        {{"n_estimated", result->n_estimated},
         result->n_estimated <= n_estimated_max(part, result)},
        {{"n_scored_by_code + n_scored_by_key", (double)n_scored}, n_scored == work.n_scored},
        {{"n_reranked", result->n_reranked},
         result->n_reranked >= work.n_reranked_min &&
             result->n_reranked <= work.n_reranked_max},
        {{"n_chapters", result->n_chapters},
         result->n_chapters <= part->n_blocks &&
             result->n_chapters <= result->n_scored_by_code &&
             (result->n_chapters > 0) == (result->n_scored_by_code > 0)},
        {{"recall", (double)result->recall},
         isnan(result->recall) || (result->recall >= 0 && result->recall <= 1)},
        {{"committed", result->committed},
         result->committed >= request->header.snapshot &&
             result->committed <= kvc_request_op(request)->session->tokens_max},
    };

    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        if (!fields[i].is_right)
            return fields[i].fault;
    return (struct fault){0};
}

/* Searches for a block among the cached ones, from *at on: both ascend. */
static bool
is_cached(const struct kv_cached_block *cached, uint32_t n_cached, uint32_t block, uint32_t *at)
{
    while (*at < n_cached && cached[*at].block < block)
        ++*at;
    return *at < n_cached && cached[*at].block == block;
}

/* One unit of a reply; each pointer is to the unit's first element. */
struct unit_reply {
    const struct kv_wire_query_result *result;
    uint32_t *ids, *row_index;
    const float *weights;
    const uint32_t *query_mask;
    const float *outputs, *lses;
    uint32_t *tokens; /* of the rows that were sent */
};

/* Clears the flags of a unit's ids and finds the rows that were sent: *n_rows, at most
 * n_rows_max.  Returns a fault if an id is not eligible, or if more rows were sent than
 * announced. */
static struct fault read_ids(const struct kvc_query_part *part,
                             const struct unit_reply *unit,
                             uint32_t n_rows_max,
                             uint32_t *n_rows)
{
    const struct kv_query *query = &part->query;
    const uint32_t rank = unit->result->kv_head - query->kv_head_begin;
    const struct kv_cached_block *cached = query->cached + part->cached_begin[rank];
    const uint32_t n_cached = part->cached_begin[rank + 1] - part->cached_begin[rank];
    uint32_t range = 0, at = 0, *ids = unit->ids;

    *n_rows = 0;
    for (uint32_t i = 0; i < unit->result->n_ids; i++) {
        const uint32_t token = ids[i] & ~KV_WIRE_ID_CACHED;
        const bool keeps = ids[i] & KV_WIRE_ID_CACHED;

        if (i > 0 && token <= ids[i - 1])
            return (struct fault){"ids: not ascending", token};
        while (range < query->n_ranges && token >= query->ranges[range].end)
            range++;
        if (range == query->n_ranges || token < query->ranges[range].begin)
            return (struct fault){"ids: not eligible", token};
        if (keeps ? unit->row_index == NULL ||
                        !is_cached(cached, n_cached, token / KV_BLOCK_TOKENS, &at)
                  : kvc_query_names_cached_only(query))
            return (struct fault){keeps ? "ids: not cached" : "ids: not requested", token};
        ids[i] = token;
        if (keeps) {
            unit->row_index[i] = KV_ROW_CACHED;
        } else if (kvc_query_attends(query)) {
            unit->row_index[i] = 0;
        } else if (unit->row_index != NULL) {
            if (*n_rows == n_rows_max)
                return (struct fault){"n_rows: fewer than ids", token};
            unit->row_index[i] = *n_rows;
            unit->tokens[(*n_rows)++] = token;
        }
    }
    return (struct fault){0};
}

/* Checks merged weights: each vector's weights sum to 1, except for rounding. */
static struct fault
weights_fault(const struct kvc_query_part *part, const float *weights, uint32_t n)
{
    const float most = (float)part->query.n_queries * (1 + KVC_QUERY_ROUNDING);

    for (uint32_t i = 0; i < n; i++)
        if (!(weights[i] >= 0 && weights[i] <= most))
            return (struct fault){"weights", (double)weights[i]};
    return (struct fault){0};
}

/* Checks query masks: each row was selected by some vector, and no vector selected more than k.
 */
static struct fault
query_mask_fault(const struct kvc_query_part *part, const uint32_t *query_mask, uint32_t n)
{
    const struct kv_query *query = &part->query;
    const uint32_t all = UINT32_MAX >> (KV_QUERIES_MAX - query->n_queries);

    for (uint32_t i = 0; i < n; i++)
        if (query_mask[i] == 0 || (query_mask[i] & ~all) != 0)
            return (struct fault){"query_mask", query_mask[i]};
    for (uint32_t q = 0; q < query->n_queries; q++) {
        uint32_t n_selected = 0;

        for (uint32_t i = 0; i < n; i++)
            n_selected += query_mask[i] >> q & 1;
        if (n_selected > query->k)
            return (struct fault){"query_mask: rows of one vector", n_selected};
    }
    return (struct fault){0};
}

/* Checks a unit's outputs and log-sum-exps.  Over no row they are 0 and -inf.  Otherwise, an
 * output is within the range of values, and a log-sum-exp within the bound that the largest
 * possible score gives; a key with an infinite element makes it FLT_MAX (kernels/attend.h). */
static struct fault outputs_fault(const struct kvc_query_part *part,
                                  const struct unit_reply *unit)
{
    const float *output = unit->outputs;
    uint32_t n_cached = 0;

    for (uint32_t i = 0; unit->row_index != NULL && i < unit->result->n_ids; i++)
        n_cached += unit->row_index[i] == KV_ROW_CACHED;
    /* Cached rows are left out of the outputs: the caller attends to them itself. */
    const bool is_empty =
        n_estimated_max(part, unit->result) == 0 &&
        (!kvc_query_attends(&part->query) || n_cached == unit->result->n_selected);
    for (uint32_t q = 0; q < part->query.n_queries; q++, output += part->d_v) {
        const float lse = unit->lses[q];
        const bool has_none = lse == -INFINITY;
        const float most = has_none ? 0 : part->output_most;

        if (!has_none && (is_empty || !(fabsf(lse) <= part->lse_most || lse == FLT_MAX)))
            return (struct fault){"log-sum-exp", (double)lse};
        if (kv_are_within(output, part->d_v, most))
            continue;
        for (uint32_t i = 0; i < part->d_v; i++)
            if (!(fabsf(output[i]) <= most))
                return (struct fault){"output", (double)output[i]};
    }
    return (struct fault){0};
}

/* Allocates it with an array for each that the reply has.  Returns NULL if out of memory. */
static struct kvc_saved_reply *create_saved(const struct kvc_query_part *part,
                                            uint32_t n_units,
                                            uint32_t n_ids,
                                            uint32_t n_rows)
{
    const struct kv_query *query = &part->query;
    struct kvc_saved_reply *saved =
        malloc(sizeof(*saved) +
               n_units * (sizeof(struct kv_wire_query_result) + kvc_query_outputs_bytes(part)) +
               (size_t)n_ids * (3 * sizeof(uint32_t) + sizeof(float)) +
               (size_t)n_rows * 2 * sizeof(uint32_t));
    uint8_t *at = (uint8_t *)(saved + 1);

    if (saved == NULL)
        return NULL;
    *saved = (struct kvc_saved_reply){0};
    saved->results = kvc_query_carve(&at, n_units, sizeof(struct kv_wire_query_result));
    saved->ids = kvc_query_carve(&at, n_ids, sizeof(uint32_t));
    if (kvc_query_uses_cached_blocks(query))
        saved->row_index = kvc_query_carve(&at, n_ids, sizeof(uint32_t));
    if (kvc_query_has_rows(query)) {
        saved->tokens = kvc_query_carve(&at, n_rows, sizeof(uint32_t));
        saved->crcs = kvc_query_carve(&at, n_rows, sizeof(uint32_t));
    }
    if (query->want_weights)
        saved->weights = kvc_query_carve(&at, n_ids, sizeof(float));
    if (query->merge == KV_MERGE_NONE)
        saved->query_mask = kvc_query_carve(&at, n_ids, sizeof(uint32_t));
    if (kvc_query_has_outputs(query)) {
        saved->outputs =
            kvc_query_carve(&at, (size_t)n_units * query->n_queries * part->d_v, sizeof(float));
        saved->lses = kvc_query_carve(&at, (size_t)n_units * query->n_queries, sizeof(float));
    }
    return saved;
}

/* Copies an array unless the reply has none of its kind, and returns what follows it. */
static const uint8_t *copy_next(void *to, const uint8_t *from, size_t bytes)
{
    if (to == NULL || bytes == 0)
        return from;
    memcpy(to, from, bytes);
    return from + bytes;
}

/* Copies the body up to the rows; its size has been checked. */
static void copy_body(struct kvc_saved_reply *saved,
                      const struct kvc_query_part *part,
                      uint32_t n_units,
                      uint32_t n_ids,
                      uint32_t n_rows,
                      const uint8_t *body)
{
    const size_t n_lses = (size_t)n_units * part->query.n_queries;

    body = copy_next(&saved->times, body, sizeof(saved->times));
    body = copy_next(&saved->reads, body, part->has_reads ? sizeof(saved->reads) : 0);
    body = copy_next(saved->results, body, n_units * sizeof(*saved->results));
    body = copy_next(saved->ids, body, n_ids * sizeof(*saved->ids));
    body = copy_next(saved->weights, body, n_ids * sizeof(*saved->weights));
    body = copy_next(saved->query_mask, body, n_ids * sizeof(*saved->query_mask));
    body = copy_next(saved->outputs, body, n_lses * part->d_v * sizeof(*saved->outputs));
    body = copy_next(saved->lses, body, n_lses * sizeof(*saved->lses));
    copy_next(saved->crcs, body, n_rows * sizeof(*saved->crcs));
}

/* Checks what follows a unit's counts, which have been checked.  *n_rows: the unit's rows. */
static struct fault unit_fault(const struct kvc_query_part *part,
                               const struct unit_reply *unit,
                               uint32_t n_rows_max,
                               uint32_t *n_rows)
{
    const uint32_t n_ids = unit->result->n_ids;
    struct fault fault = read_ids(part, unit, n_rows_max, n_rows);

    if (fault.field == NULL && unit->weights != NULL)
        fault = weights_fault(part, unit->weights, n_ids);
    if (fault.field == NULL && unit->query_mask != NULL)
        fault = query_mask_fault(part, unit->query_mask, n_ids);
    if (fault.field == NULL && unit->lses != NULL)
        fault = outputs_fault(part, unit);
    return fault;
}

static kv_status_t refuse_unit(const struct kv_wire_unit *unit,
                               struct fault fault,
                               char *detail,
                               size_t detail_bytes)
{
    return kvc_reply_refuse(detail, detail_bytes, "layer %u head %u: %s: %.10g", unit->layer,
                            unit->kv_head, fault.field, fault.value);
}

/* Checks the copied body, unit by unit. */
static kv_status_t check_saved(const struct kvc_request *request,
                               const struct kvc_saved_reply *saved,
                               uint32_t n_rows,
                               char *detail,
                               size_t detail_bytes)
{
    const struct kvc_query_part *part = kvc_query_of(kvc_request_op(request));
    uint32_t first = 0, row = 0;

    for (uint32_t i = 0; i < request->header.n_units; i++) {
        const size_t n_lses_before = (size_t)i * part->query.n_queries;
        struct unit_reply unit = {.result = &saved->results[i], .ids = saved->ids + first};
        struct fault fault;
        uint32_t n;

        if (saved->row_index != NULL)
            unit.row_index = saved->row_index + first;
        if (saved->weights != NULL)
            unit.weights = saved->weights + first;
        if (saved->query_mask != NULL)
            unit.query_mask = saved->query_mask + first;
        if (saved->lses != NULL) {
            unit.outputs = saved->outputs + n_lses_before * part->d_v;
            unit.lses = saved->lses + n_lses_before;
        }
        if (saved->tokens != NULL)
            unit.tokens = saved->tokens + row;
        fault = unit_fault(part, &unit, n_rows - row, &n);
        if (fault.field != NULL)
            return refuse_unit(&units_of(request)[i], fault, detail, detail_bytes);
        first += unit.result->n_ids;
        row += n;
    }
    if (row != n_rows)
        return kvc_reply_refuse(detail, detail_bytes, "n_rows: %u, of %u ids", n_rows, row);
    return KV_OK;
}

/* Whether the node can have worked for so long.  Its clock differs a little from this one; and
 * the time that has passed here may exceed the deadline, if this process was suspended. */
static bool can_have_passed(const struct kv_op *op, uint64_t us)
{
    return us <= 2 * (op->owner.deadline_us - op->owner.begin_us) ||
           us <= 2 * (kv_clock_now(op->client->loop.clock) - op->owner.begin_us);
}

/* Checks the body's counts and, with them, its size.  *ret_n_ids: of all units. */
static kv_status_t check_counts(const struct kvc_request *request,
                                const uint8_t *body,
                                uint32_t *ret_n_ids,
                                char *detail,
                                size_t detail_bytes)
{
    const struct kv_wire_header *header = &request->reply;
    const struct kvc_query_part *part = kvc_query_of(kvc_request_op(request));
    uint32_t n_units = request->header.n_units, n_ids = 0;
    size_t rows_bytes = header->n_rows * part->row_bytes, bytes;
    struct kv_wire_query_times times;

    if (header->body_bytes < kvc_query_names_bytes(part, n_units, 0))
        return kvc_reply_refuse(detail, detail_bytes, "a body of %u bytes", header->body_bytes);
    memcpy(&times, body, sizeof(times));
    if (!can_have_passed(kvc_request_op(request), (uint64_t)times.queue_us + times.service_us))
        return kvc_reply_refuse(detail, detail_bytes, "queue_us + service_us: %llu",
                                (unsigned long long)times.queue_us + times.service_us);
    /* Copied, because the body may lie at any address. */
    for (uint32_t i = 0; i < n_units; i++) {
        struct kv_wire_query_result result;
        struct fault fault;

        memcpy(&result, body + kvc_query_results_at(part) + i * sizeof(result), sizeof(result));
        fault = result_fault(request, &units_of(request)[i], &result);
        if (fault.field != NULL)
            return refuse_unit(&units_of(request)[i], fault, detail, detail_bytes);
        n_ids += result.n_ids; /* each at most n_ids_max, and these fit one body */
    }
    if (header->n_rows > (kvc_query_has_rows(&part->query) ? n_ids : 0))
        return kvc_reply_refuse(detail, detail_bytes, "n_rows: %u, of %u ids", header->n_rows,
                                n_ids);
    bytes = kvc_query_names_bytes(part, n_units, n_ids) + header->n_rows * sizeof(uint32_t);
    if (header->bulk_bytes != 0
            ? header->bulk_bytes != rows_bytes || header->body_bytes != bytes
            : header->body_bytes != bytes + rows_bytes)
        return kvc_reply_refuse(
            detail, detail_bytes, "a body of %u bytes and bulk of %llu: %u ids, %u rows",
            header->body_bytes, (unsigned long long)header->bulk_bytes, n_ids, header->n_rows);
    *ret_n_ids = n_ids;
    return KV_OK;
}

kv_status_t kvc_query_reply(struct kvc_request *request,
                            const uint8_t *body,
                            char *detail,
                            size_t detail_bytes)
{
    const struct kv_wire_header *header = &request->reply;
    const struct kvc_query_part *part = kvc_query_of(kvc_request_op(request));
    uint32_t n_units = request->header.n_units, n_rows = header->n_rows, n_ids = 0;
    size_t rows_bytes = n_rows * part->row_bytes;
    struct kvc_saved_reply *saved;
    kv_status_t status = kvc_reply_check_units(request, units_of(request)[0].layer,
                                               request->header.snapshot, detail, detail_bytes);

    if (status == KV_OK)
        status = check_counts(request, body, &n_ids, detail, detail_bytes);
    if (status != KV_OK)
        return status;
    saved = create_saved(part, n_units, n_ids, n_rows);
    if (saved == NULL)
        return KV_NO_MEMORY;
    copy_body(saved, part, n_units, n_ids, n_rows, body);
    status = check_saved(request, saved, n_rows, detail, detail_bytes);
    if (status != KV_OK) {
        free(saved);
        return status;
    }
    free(part->saved[request->position]); /* of an attempt whose rows did not arrive */
    part->saved[request->position] = saved;
    if (header->bulk_bytes == 0 && rows_bytes > 0)
        memcpy(place_of(request), body + header->body_bytes - rows_bytes, rows_bytes);
    return KV_OK;
}

kv_status_t kvc_query_finish(struct kvc_request *request, char *detail, size_t detail_bytes)
{
    struct kvc_query_part *part = kvc_query_of(kvc_request_op(request));
    const struct kv_wire_unit *units = units_of(request);
    const struct kvc_saved_reply *saved = part->saved[request->position];
    const uint8_t *rows = kvc_query_has_rows(&part->query) ? place_of(request) : NULL;
    uint32_t first = 0, first_row = 0;

    for (uint32_t i = 0; i < request->header.n_units; i++) {
        const struct kv_wire_query_result *wire = &saved->results[i];
        struct kv_query_result result = {
            .n_ids = wire->n_ids,
            .ids = saved->ids + first,
            .weights = saved->weights != NULL ? saved->weights + first : NULL,
            .query_mask = saved->query_mask != NULL ? saved->query_mask + first : NULL,
            .n_selected = wire->n_selected,
            .n_estimated = wire->n_estimated,
            .n_scored_by_code = wire->n_scored_by_code,
            .n_scored_by_key = wire->n_scored_by_key,
            .n_reranked = wire->n_reranked,
            .n_chapters = wire->n_chapters,
            .recall = wire->recall,
            .node = request->node->index,
            .queue_us = saved->times.queue_us,
            .service_us = saved->times.service_us,
        };

        if (saved->row_index != NULL)
            result.row_index = saved->row_index + first;
        if (saved->lses != NULL) {
            const size_t n_lses_before = (size_t)i * part->query.n_queries;

            result.outputs = saved->outputs + n_lses_before * part->d_v;
            result.lses = saved->lses + n_lses_before;
        }
        /* Rows were received where the caller wants them; a bad one fails the operation. */
        if (rows != NULL) {
            size_t bad;

            for (uint32_t j = 0; j < result.n_ids; j++)
                result.n_rows += result.row_index[j] != KV_ROW_CACHED;
            result.rows = rows;
            result.crcs = saved->crcs + first_row;
            bad = kv_writers_verify(
                kvc_session_writers(kvc_request_op(request)->session, request->node),
                units[i].layer, units[i].kv_head, rows, result.n_rows, part->row_bytes, 0,
                saved->tokens + first_row, result.crcs);
            if (bad < result.n_rows) {
                snprintf(detail, detail_bytes,
                         "checksum mismatch: layer %u, kv head %u, token %u", units[i].layer,
                         units[i].kv_head, saved->tokens[first_row + bad]);
                return KV_CORRUPT;
            }
            rows += result.n_rows * part->row_bytes;
            first_row += result.n_rows;
        }
        part->results[units[i].kv_head - part->query.kv_head_begin] = result;
        first += result.n_ids;
    }
    request->node->rows_out += first_row;
    part->reads.books += saved->reads.books;
    part->reads.codes += saved->reads.codes;
    part->reads.copies += saved->reads.copies;
    part->reads.keys += saved->reads.keys;
    part->reads.rows += saved->reads.rows;
    part->reads.summaries += saved->reads.summaries;
    return KV_OK;
}
