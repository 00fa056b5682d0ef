/* Questions for the rows of a layer that matter.
 *
 * The kv heads go to the data threads that own them, as many of one thread in a message as its
 * worst answer has room for.  Every message has a place of its own in the caller's buffer: its
 * rows land there, dense, before or after the body that says which they are, so that a node
 * which says one thing and sends another does harm to nobody but its own answer.
 *
 * What a body says is checked as a whole before any of it is kept: every field against what was
 * asked, and outputs of attention, which have no checksum, against what such values can make.
 * Rows are checked against their CRCs when they have landed.
 */
#include "client/client.h"

#include "kernels/checksum.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of sums in single precision. */
#define ROUNDING 1e-3f
/* The largest number in 16 bits. */
#define HALF_MOST 65504.0
/* No summary's score is so far above those of its rows: its correction is at most 1
 * (kernels/summary.h). */
#define REST_CORRECTION 2

/* One message's answer, in one piece of memory.  Ids, and what goes with them, of one unit
 * after the other. */
struct kv_query_answer {
    struct kv_wire_answer times;
    struct kv_wire_found *found; /* (n_units) */
    uint32_t *ids;               /* (n_ids) tokens */
    uint32_t *row_of;            /* (n_ids) counted from the unit's first; rows only */
    uint32_t *tokens;            /* (n_rows) of the rows that came */
    uint32_t *crcs;              /* (n_rows) */
    float *scores;               /* (n_ids) if asked for */
    uint32_t *heads;             /* (n_ids) with KV_MERGE_NONE */
    float *outputs;              /* (n_units, n_queries, d_v) where has_outputs() */
    float *lses;                 /* (n_units, n_queries) */
};

static bool has_rows(const struct kv_query *query)
{
    return query->answer == KV_ANSWER_ROWS;
}

static bool attends(const struct kv_query *query)
{
    return query->answer == KV_ANSWER_ATTEND;
}

/* Whether there are outputs and log-sum-exps. */
static bool has_outputs(const struct kv_query *query)
{
    return attends(query) || query->rest != 0;
}

/* Whether only chosen rows that the caller holds are named. */
static bool names_held_only(const struct kv_query *query)
{
    return attends(query) && !query->names;
}

/* Whether blocks that the caller holds make a difference. */
static bool heeds_held(const struct kv_query *query)
{
    return has_rows(query) || attends(query);
}

/* ---- sizes ------------------------------------------------------------------------------- */

/* Bytes of one head's rows in the caller's buffer. */
static size_t head_room(const struct kv_query_part *part)
{
    return has_rows(&part->query) ? part->n_ids_max * part->row_bytes : 0;
}

static size_t request_bytes(const struct kv_query_part *part, size_t n_units, size_t n_held)
{
    return sizeof(struct kv_wire_query) + n_units * sizeof(struct kv_wire_unit) +
           part->query.n_ranges * sizeof(struct kv_wire_range) +
           n_units * part->query.n_queries * part->d_k * sizeof(float) +
           n_held * sizeof(struct kv_wire_held);
}

/* One head's outputs and log-sum-exps. */
static size_t outputs_bytes(const struct kv_query_part *part)
{
    return has_outputs(&part->query)
               ? part->query.n_queries * ((size_t)part->d_v + 1) * sizeof(float)
               : 0;
}

/* What an answer's body holds before the CRCs. */
static size_t names_bytes(const struct kv_query_part *part, size_t n_units, size_t n_ids)
{
    const struct kv_query *query = &part->query;
    size_t id_bytes = sizeof(uint32_t) + (query->scores ? sizeof(float) : 0) +
                      (query->merge == KV_MERGE_NONE ? sizeof(uint32_t) : 0);

    return sizeof(struct kv_wire_answer) +
           n_units * (sizeof(struct kv_wire_found) + outputs_bytes(part)) + n_ids * id_bytes;
}

/* A node keeps room for CRCs, whether rows are asked for or not. */
static size_t answer_bytes_max(const struct kv_query_part *part, size_t n_units, size_t n_held)
{
    size_t n_ids = n_units * part->n_ids_max;

    if (names_held_only(&part->query) && n_ids > n_held * KV_BLOCK_TOKENS)
        n_ids = n_held * KV_BLOCK_TOKENS;
    return names_bytes(part, n_units, n_ids) + n_ids * sizeof(uint32_t);
}

/* Whether a message of so many units can be asked, and answered whatever the choice is. */
static bool
fits(const struct kv_query_part *part, size_t n_units, size_t n_held, size_t bulk_bytes_max)
{
    return request_bytes(part, n_units, n_held) <= KV_WIRE_BODY_MAX &&
           answer_bytes_max(part, n_units, n_held) <= KV_WIRE_BODY_MAX &&
           n_units * head_room(part) <= bulk_bytes_max &&
           (!has_rows(&part->query) || n_units * part->n_ids_max <= KV_WIRE_ROWS_MAX);
}

/* Blocks that the caller holds of the head; where it makes no difference, none. */
static uint32_t held_of(const struct kv_query_part *part, uint32_t head)
{
    uint32_t rank = head - part->query.head_begin;

    return part->held_begin[rank + 1] - part->held_begin[rank];
}

/* ---- out --------------------------------------------------------------------------------- */

static bool seek(const struct kv_op *op, const struct kv_lane *lane, uint32_t *head)
{
    const struct kv_query_part *part = &op->query;

    for (; *head < part->query.head_begin + part->n_heads; ++*head)
        if (kv_session_lane(op->session, part->query.layer, *head) == lane)
            return true;
    return false;
}

static const struct kv_wire_unit *units_of(const struct kv_trip *trip)
{
    return (const struct kv_wire_unit *)(trip->envelope->body + sizeof(struct kv_wire_query));
}

static void fill(const struct kv_query_part *part,
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
        .rerank = query->rerank < KV_CHOSEN_MAX ? query->rerank : KV_CHOSEN_MAX,
        .scale = query->scale,
        .n_ranges = query->n_ranges,
        .flags = (query->scores ? KV_WIRE_SCORES : 0) | (query->names ? KV_WIRE_NAMES : 0),
        .selection = (uint32_t)query->selection,
        .share = query->share,
        .rest = query->rest,
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
    for (uint32_t i = 0; i < n_units; i++, at += vectors_bytes)
        memcpy(at,
               (const uint8_t *)query->queries +
                   (units[i].kv_head - query->head_begin) * vectors_bytes,
               vectors_bytes);
    for (uint32_t i = 0; i < n_units; i++) {
        uint32_t first = part->held_begin[units[i].kv_head - query->head_begin];

        for (uint32_t j = first; j < first + units[i].n_ids; j++) {
            struct kv_wire_held held = {query->held[j].block, query->held[j].fingerprint};

            memcpy(at, &held, sizeof(held));
            at += sizeof(held);
        }
    }
}

static kv_status_t build(struct kv_errand *errand, struct kv_trip *trip)
{
    struct kv_op *op = errand->op;
    struct kv_query_part *part = &op->query;
    const struct kv_query *query = &part->query;
    size_t bulk_bytes_max = errand->lane->link.remote->bulk_bytes_max;
    struct kv_wire_unit units[KV_HEADS_MAX];
    uint32_t head = errand->head;
    uint32_t n_units = 0, n_held = 0;
    bool more = true;

    while (more) {
        uint32_t n = held_of(part, head);

        if (n_units > 0 && !fits(part, n_units + 1, n_held + n, bulk_bytes_max))
            break;
        units[n_units++] = (struct kv_wire_unit){
            .layer = (uint16_t)query->layer, .kv_head = (uint16_t)head, .n_ids = n};
        n_held += n;
        head++;
        more = seek(op, errand->lane, &head);
    }
    trip->body_bytes = request_bytes(part, n_units, n_held);
    if (!kv_trip_envelope(trip, trip->body_bytes))
        return KV_BUSY;
    fill(part, units, n_units, trip->envelope->body);
    trip->position = part->n_placed;
    trip->bytes = n_units * head_room(part);
    part->n_placed += n_units;
    trip->header.op = KV_OP_QUERY;
    trip->header.n_units = n_units;
    trip->header.layer = query->layer;
    trip->header.snapshot = query->snapshot;
    errand->head = head;
    errand->finished = !more;
    return KV_OK;
}

static void start(struct kv_op *op)
{
    const struct kv_query_part *part = &op->query;
    uint32_t begin = part->query.head_begin;

    kv_lanes_unmark(op->client);
    for (uint32_t head = begin; head < begin + part->n_heads; head++) {
        struct kv_lane *lane = kv_session_lane(op->session, part->query.layer, head);
        struct kv_errand *errand;

        if (head_room(part) > lane->link.remote->bulk_bytes_max) {
            kv_op_fail(op, lane->link.remote, NULL, KV_TOO_LARGE,
                       "the rows of a kv head may take %zu bytes", head_room(part));
            return;
        }
        if (lane->mark == op)
            continue;
        lane->mark = op;
        errand = kv_errand_add(op, lane);
        if (errand == NULL) {
            kv_op_fail(op, NULL, NULL, KV_NO_MEMORY, "%s", "out of memory");
            return;
        }
        errand->head = head;
    }
}

/* ---- in ---------------------------------------------------------------------------------- */

/* Where the trip's rows are in the caller's buffer. */
static uint8_t *place_of(const struct kv_trip *trip)
{
    const struct kv_query_part *part = &trip->op->query;

    return part->base + trip->position * head_room(part);
}

static unsigned land(struct kv_trip *trip, uint64_t bytes, struct kv_iov *ret_iov)
{
    if (bytes == 0 || bytes > trip->bytes || bytes % trip->op->query.row_bytes != 0)
        return 0;
    ret_iov[0] = (struct kv_iov){.base = place_of(trip), .bytes = bytes};
    return 1;
}

/* Rows that summaries may stand for: those not chosen, with NONE by one vector at least. */
static uint32_t n_rest_max(const struct kv_query_part *part, const struct kv_wire_found *found)
{
    if (part->query.rest == 0)
        return 0;
    return part->query.merge == KV_MERGE_NONE ? part->n_candidates
                                              : part->n_candidates - found->n_chosen;
}

/* A field of an answer that cannot be what it says.  No name: there is none. */
struct fault {
    const char *field;
    double value;
};

/* The number in a unit's answer that is impossible, or of another unit than was asked for. */
static struct fault found_fault(const struct kv_trip *trip,
                                const struct kv_wire_unit *unit,
                                const struct kv_wire_found *found)
{
    const struct kv_query_part *part = &trip->op->query;
    const bool is_part = names_held_only(&part->query);
    const uint64_t n_scored = (uint64_t)found->n_coded + found->n_exact;
    const uint64_t n_ids_max =
        is_part ? (uint64_t)unit->n_ids * KV_BLOCK_TOKENS : found->n_chosen;
    const struct {
        struct fault fault;
        bool is_right;
    } fields[] = {
        {{"layer", found->layer}, found->layer == unit->layer},
        {{"kv head", found->kv_head}, found->kv_head == unit->kv_head},
        {{"n_chosen", found->n_chosen},
         found->n_chosen >= part->n_ids_min && found->n_chosen <= part->n_ids_max},
        {{"n_ids", found->n_ids},
         found->n_ids <= found->n_chosen && found->n_ids <= n_ids_max &&
             (is_part || found->n_ids == found->n_chosen)},
        {{"n_rest", found->n_rest}, found->n_rest <= n_rest_max(part, found)},
        {{"n_coded + n_exact", (double)n_scored}, n_scored == part->n_scored},
        {{"n_reranked", found->n_reranked},
         part->n_reranked_max == 0 ? found->n_reranked == 0
                                   : found->n_reranked >= found->n_chosen &&
                                         found->n_reranked <= part->n_reranked_max},
        {{"n_chapters", found->n_chapters},
         found->n_chapters <= part->n_blocks && found->n_chapters <= found->n_coded &&
             (found->n_chapters > 0) == (found->n_coded > 0)},
        {{"recall", (double)found->recall},
         isnan(found->recall) || (found->recall >= 0 && found->recall <= 1)},
        {{"committed", found->committed},
         found->committed >= trip->header.snapshot &&
             found->committed <= trip->op->session->tokens_max},
    };

    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        if (!fields[i].is_right)
            return fields[i].fault;
    return (struct fault){0};
}

/* Looks for a block among those held, from *at on: both ascend. */
static bool is_held(const struct kv_held *held, uint32_t n_held, uint32_t block, uint32_t *at)
{
    while (*at < n_held && held[*at].block < block)
        ++*at;
    return *at < n_held && held[*at].block == block;
}

/* One unit of an answer, the pointers being to its first of each. */
struct unit_answer {
    const struct kv_wire_found *found;
    uint32_t *ids, *row_of;
    const float *scores;
    const uint32_t *heads;
    const float *outputs, *lses;
    uint32_t *tokens; /* of the rows that came */
};

/* Takes the flags off a unit's ids and tells the rows apart that were sent, *n_rows of them, at
 * most n_rows_max.  The fault: no choice among the candidates, or more rows than were
 * announced.
 */
static struct fault take_ids(const struct kv_query_part *part,
                             const struct unit_answer *unit,
                             uint32_t n_rows_max,
                             uint32_t *n_rows)
{
    const struct kv_query *query = &part->query;
    const uint32_t rank = unit->found->kv_head - query->head_begin;
    const struct kv_held *held = query->held + part->held_begin[rank];
    const uint32_t n_held = part->held_begin[rank + 1] - part->held_begin[rank];
    uint32_t range = 0, at = 0, *ids = unit->ids;

    *n_rows = 0;
    for (uint32_t i = 0; i < unit->found->n_ids; i++) {
        const uint32_t token = ids[i] & ~KV_WIRE_ID_HELD;
        const bool keeps = ids[i] & KV_WIRE_ID_HELD;

        if (i > 0 && token <= ids[i - 1])
            return (struct fault){"ids: not ascending", token};
        while (range < query->n_ranges && token >= query->ranges[range].end)
            range++;
        if (range == query->n_ranges || token < query->ranges[range].begin)
            return (struct fault){"ids: no candidate", token};
        if (keeps ? unit->row_of == NULL || !is_held(held, n_held, token / KV_BLOCK_TOKENS, &at)
                  : names_held_only(query))
            return (struct fault){keeps ? "ids: not held" : "ids: not asked for", token};
        ids[i] = token;
        if (keeps) {
            unit->row_of[i] = KV_ROW_HELD;
        } else if (attends(query)) {
            unit->row_of[i] = 0;
        } else if (unit->row_of != NULL) {
            if (*n_rows == n_rows_max)
                return (struct fault){"n_rows: fewer than ids", token};
            unit->row_of[i] = *n_rows;
            unit->tokens[(*n_rows)++] = token;
        }
    }
    return (struct fault){0};
}

/* Merged weights: each vector's sum up to 1, but for rounding. */
static struct fault
scores_fault(const struct kv_query_part *part, const float *scores, uint32_t n)
{
    const float most = (float)part->query.n_queries * (1 + ROUNDING);

    for (uint32_t i = 0; i < n; i++)
        if (!(scores[i] >= 0 && scores[i] <= most))
            return (struct fault){"scores", (double)scores[i]};
    return (struct fault){0};
}

/* Which vectors chose each row: some did, and none chose more than k. */
static struct fault
heads_fault(const struct kv_query_part *part, const uint32_t *heads, uint32_t n)
{
    const struct kv_query *query = &part->query;
    const uint32_t all = UINT32_MAX >> (KV_QUERIES_MAX - query->n_queries);

    for (uint32_t i = 0; i < n; i++)
        if (heads[i] == 0 || (heads[i] & ~all) != 0)
            return (struct fault){"heads", heads[i]};
    for (uint32_t q = 0; q < query->n_queries; q++) {
        uint32_t n_chosen = 0;

        for (uint32_t i = 0; i < n; i++)
            n_chosen += heads[i] >> q & 1;
        if (n_chosen > query->k)
            return (struct fault){"heads: rows of one vector", n_chosen};
    }
    return (struct fault){0};
}

/* A unit's outputs and log-sum-exps.  Over no row they are 0 and -inf.  Else an output lies
 * between values, and a log-sum-exp is no larger than the largest product of such numbers can
 * make it.  A key with an infinite element makes it FLT_MAX (kernels/attend.h). */
static struct fault outputs_fault(const struct kv_query_part *part,
                                  const struct unit_answer *unit)
{
    const float *output = unit->outputs;
    uint32_t n_held = 0;

    for (uint32_t i = 0; unit->row_of != NULL && i < unit->found->n_ids; i++)
        n_held += unit->row_of[i] == KV_ROW_HELD;
    const bool is_empty = n_rest_max(part, unit->found) == 0 &&
                          (!attends(&part->query) || n_held == unit->found->n_chosen);
    for (uint32_t q = 0; q < part->query.n_queries; q++, output += part->d_v) {
        const float lse = unit->lses[q];
        const bool has_none = lse == -INFINITY;
        const float most = has_none ? 0 : part->output_most;

        if (!has_none && (is_empty || !(fabsf(lse) <= part->lse_most || lse == FLT_MAX)))
            return (struct fault){"log-sum-exp", (double)lse};
        for (uint32_t i = 0; i < part->d_v; i++)
            if (!(fabsf(output[i]) <= most))
                return (struct fault){"output", (double)output[i]};
    }
    return (struct fault){0};
}

static void *carve(uint8_t **at, size_t n, size_t bytes)
{
    void *piece = *at;

    *at += n * bytes;
    return piece;
}

/* NULL: out of memory. */
static struct kv_query_answer *
make_answer(const struct kv_query_part *part, uint32_t n_units, uint32_t n_ids, uint32_t n_rows)
{
    const struct kv_query *query = &part->query;
    struct kv_query_answer *answer = malloc(
        sizeof(*answer) + n_units * (sizeof(struct kv_wire_found) + outputs_bytes(part)) +
        (size_t)n_ids * (3 * sizeof(uint32_t) + sizeof(float)) +
        (size_t)n_rows * 2 * sizeof(uint32_t));
    uint8_t *at = (uint8_t *)(answer + 1);

    if (answer == NULL)
        return NULL;
    *answer = (struct kv_query_answer){0};
    answer->found = carve(&at, n_units, sizeof(struct kv_wire_found));
    answer->ids = carve(&at, n_ids, sizeof(uint32_t));
    if (heeds_held(query))
        answer->row_of = carve(&at, n_ids, sizeof(uint32_t));
    if (has_rows(query)) {
        answer->tokens = carve(&at, n_rows, sizeof(uint32_t));
        answer->crcs = carve(&at, n_rows, sizeof(uint32_t));
    }
    if (query->scores)
        answer->scores = carve(&at, n_ids, sizeof(float));
    if (query->merge == KV_MERGE_NONE)
        answer->heads = carve(&at, n_ids, sizeof(uint32_t));
    if (has_outputs(query)) {
        answer->outputs =
            carve(&at, (size_t)n_units * query->n_queries * part->d_v, sizeof(float));
        answer->lses = carve(&at, (size_t)n_units * query->n_queries, sizeof(float));
    }
    return answer;
}

static const uint8_t *take(void *to, const uint8_t *from, size_t bytes)
{
    if (to == NULL || bytes == 0)
        return from;
    memcpy(to, from, bytes);
    return from + bytes;
}

/* Copies what comes before the rows; its size is right. */
static void take_body(struct kv_query_answer *answer,
                      const struct kv_query_part *part,
                      uint32_t n_units,
                      uint32_t n_ids,
                      uint32_t n_rows,
                      const uint8_t *body)
{
    const size_t n_lses = (size_t)n_units * part->query.n_queries;

    body = take(&answer->times, body, sizeof(answer->times));
    body = take(answer->found, body, n_units * sizeof(*answer->found));
    body = take(answer->ids, body, n_ids * sizeof(*answer->ids));
    body = take(answer->scores, body, n_ids * sizeof(*answer->scores));
    body = take(answer->heads, body, n_ids * sizeof(*answer->heads));
    body = take(answer->outputs, body, n_lses * part->d_v * sizeof(*answer->outputs));
    body = take(answer->lses, body, n_lses * sizeof(*answer->lses));
    take(answer->crcs, body, n_rows * sizeof(*answer->crcs));
}

/* What is behind a unit's counts, which are right.  *n_rows: of it. */
static struct fault unit_fault(const struct kv_query_part *part,
                               const struct unit_answer *unit,
                               uint32_t n_rows_max,
                               uint32_t *n_rows)
{
    const uint32_t n_ids = unit->found->n_ids;
    struct fault fault = take_ids(part, unit, n_rows_max, n_rows);

    if (fault.field == NULL && unit->scores != NULL)
        fault = scores_fault(part, unit->scores, n_ids);
    if (fault.field == NULL && unit->heads != NULL)
        fault = heads_fault(part, unit->heads, n_ids);
    if (fault.field == NULL && unit->lses != NULL)
        fault = outputs_fault(part, unit);
    return fault;
}

static kv_status_t refuse_unit(const struct kv_wire_unit *unit,
                               struct fault fault,
                               char *detail,
                               size_t detail_bytes)
{
    return kv_reply_refuse(detail, detail_bytes, "layer %u head %u: %s: %.10g", unit->layer,
                           unit->kv_head, fault.field, fault.value);
}

/* Checks what was taken of the body, unit by unit. */
static kv_status_t check_answer(const struct kv_trip *trip,
                                const struct kv_query_answer *answer,
                                uint32_t n_rows,
                                char *detail,
                                size_t detail_bytes)
{
    const struct kv_query_part *part = &trip->op->query;
    uint32_t first = 0, row = 0;

    for (uint32_t i = 0; i < trip->header.n_units; i++) {
        const size_t n_before = (size_t)i * part->query.n_queries;
        struct unit_answer unit = {.found = &answer->found[i], .ids = answer->ids + first};
        struct fault fault;
        uint32_t n;

        if (answer->row_of != NULL)
            unit.row_of = answer->row_of + first;
        if (answer->scores != NULL)
            unit.scores = answer->scores + first;
        if (answer->heads != NULL)
            unit.heads = answer->heads + first;
        if (answer->lses != NULL) {
            unit.outputs = answer->outputs + n_before * part->d_v;
            unit.lses = answer->lses + n_before;
        }
        if (answer->tokens != NULL)
            unit.tokens = answer->tokens + row;
        fault = unit_fault(part, &unit, n_rows - row, &n);
        if (fault.field != NULL)
            return refuse_unit(&units_of(trip)[i], fault, detail, detail_bytes);
        first += unit.found->n_ids;
        row += n;
    }
    if (row != n_rows)
        return kv_reply_refuse(detail, detail_bytes, "n_rows: %u, of %u ids", n_rows, row);
    return KV_OK;
}

/* Whether a node may have had the operation for so long.  Its clock is another one: what it
 * measures is near what passes here, and that is more than the operation was given where this
 * process stood still, too. */
static bool can_have_passed(const struct kv_op *op, uint64_t us)
{
    return us <= 2 * (op->deadline_us - op->begin_us) ||
           us <= 2 * (kv_clock_now(op->client->clock) - op->begin_us);
}

/* The body's counts, and with them its size.  *ret_n_ids: of all units. */
static kv_status_t check_counts(const struct kv_trip *trip,
                                const uint8_t *body,
                                uint32_t *ret_n_ids,
                                char *detail,
                                size_t detail_bytes)
{
    const struct kv_wire_header *header = &trip->reply;
    const struct kv_query_part *part = &trip->op->query;
    uint32_t n_units = trip->header.n_units, n_ids = 0;
    size_t rows_bytes = header->n_rows * part->row_bytes, bytes;
    struct kv_wire_answer times;

    if (header->body_bytes < names_bytes(part, n_units, 0))
        return kv_reply_refuse(detail, detail_bytes, "a body of %u bytes", header->body_bytes);
    memcpy(&times, body, sizeof(times));
    if (!can_have_passed(trip->op, (uint64_t)times.waited_us + times.worked_us))
        return kv_reply_refuse(detail, detail_bytes, "waited_us + worked_us: %llu",
                               (unsigned long long)times.waited_us + times.worked_us);
    for (uint32_t i = 0; i < n_units; i++) {
        struct kv_wire_found found;
        struct fault fault;

        memcpy(&found, body + sizeof(times) + i * sizeof(found), sizeof(found));
        fault = found_fault(trip, &units_of(trip)[i], &found);
        if (fault.field != NULL)
            return refuse_unit(&units_of(trip)[i], fault, detail, detail_bytes);
        n_ids += found.n_ids; /* each at most n_ids_max, and these fit one body */
    }
    if (header->n_rows > (has_rows(&part->query) ? n_ids : 0))
        return kv_reply_refuse(detail, detail_bytes, "n_rows: %u, of %u ids", header->n_rows,
                               n_ids);
    bytes = names_bytes(part, n_units, n_ids) + header->n_rows * sizeof(uint32_t);
    if (header->bulk_bytes != 0
            ? header->bulk_bytes != rows_bytes || header->body_bytes != bytes
            : header->body_bytes != bytes + rows_bytes)
        return kv_reply_refuse(
            detail, detail_bytes, "a body of %u bytes and bulk of %llu: %u ids, %u rows",
            header->body_bytes, (unsigned long long)header->bulk_bytes, n_ids, header->n_rows);
    *ret_n_ids = n_ids;
    return KV_OK;
}

static kv_status_t
reply(struct kv_trip *trip, const uint8_t *body, char *detail, size_t detail_bytes)
{
    const struct kv_wire_header *header = &trip->reply;
    const struct kv_query_part *part = &trip->op->query;
    uint32_t n_units = trip->header.n_units, n_rows = header->n_rows, n_ids;
    size_t rows_bytes = n_rows * part->row_bytes;
    struct kv_query_answer *answer;
    kv_status_t status = kv_reply_check_units(trip, units_of(trip)[0].layer,
                                              trip->header.snapshot, detail, detail_bytes);

    if (status == KV_OK)
        status = check_counts(trip, body, &n_ids, detail, detail_bytes);
    if (status != KV_OK)
        return status;
    answer = make_answer(part, n_units, n_ids, n_rows);
    if (answer == NULL)
        return KV_NO_MEMORY;
    take_body(answer, part, n_units, n_ids, n_rows, body);
    status = check_answer(trip, answer, n_rows, detail, detail_bytes);
    if (status != KV_OK) {
        free(answer);
        return status;
    }
    free(part->answers[trip->position]); /* of an attempt whose rows did not come */
    part->answers[trip->position] = answer;
    if (header->bulk_bytes == 0 && rows_bytes > 0)
        memcpy(place_of(trip), body + header->body_bytes - rows_bytes, rows_bytes);
    return KV_OK;
}

/* Verifies the rows of the message and hands out its units. */
static kv_status_t finish(struct kv_trip *trip, char *detail, size_t detail_bytes)
{
    const struct kv_query_part *part = &trip->op->query;
    const struct kv_wire_unit *units = units_of(trip);
    const struct kv_query_answer *answer = part->answers[trip->position];
    const uint8_t *rows = has_rows(&part->query) ? place_of(trip) : NULL;
    uint32_t first = 0, first_row = 0;

    for (uint32_t i = 0; i < trip->header.n_units; i++) {
        const struct kv_wire_found *wire = &answer->found[i];
        struct kv_found found = {
            .n_ids = wire->n_ids,
            .ids = answer->ids + first,
            .scores = answer->scores != NULL ? answer->scores + first : NULL,
            .heads = answer->heads != NULL ? answer->heads + first : NULL,
            .n_chosen = wire->n_chosen,
            .n_rest = wire->n_rest,
            .n_coded = wire->n_coded,
            .n_exact = wire->n_exact,
            .n_reranked = wire->n_reranked,
            .n_chapters = wire->n_chapters,
            .recall = wire->recall,
            .node = trip->remote->index,
            .waited_us = answer->times.waited_us,
            .worked_us = answer->times.worked_us,
        };

        if (answer->row_of != NULL)
            found.row_of = answer->row_of + first;
        if (answer->lses != NULL) {
            const size_t n_before = (size_t)i * part->query.n_queries;

            found.outputs = answer->outputs + n_before * part->d_v;
            found.lses = answer->lses + n_before;
        }
        if (rows != NULL) {
            size_t bad;

            for (uint32_t j = 0; j < found.n_ids; j++)
                found.n_rows += found.row_of[j] != KV_ROW_HELD;
            found.rows = rows;
            found.crcs = answer->crcs + first_row;
            bad = kv_writers_verify(trip->op->session->writers, units[i].layer,
                                    units[i].kv_head, rows, found.n_rows, part->row_bytes, 0,
                                    answer->tokens + first_row, found.crcs);
            if (bad < found.n_rows) {
                snprintf(detail, detail_bytes,
                         "the row of layer %u, kv head %u, token %u fails its checksum",
                         units[i].layer, units[i].kv_head, answer->tokens[first_row + bad]);
                return KV_CORRUPT;
            }
            rows += found.n_rows * part->row_bytes;
            first_row += found.n_rows;
        }
        part->found[units[i].kv_head - part->query.head_begin] = found;
        first += found.n_ids;
    }
    trip->remote->rows_out += first_row;
    return KV_OK;
}

static void
describe(const struct kv_op *op, const struct kv_trip *trip, char *text, size_t text_bytes)
{
    (void)trip;
    kv_session_describe(op->session, op->query.query.layer, text, text_bytes);
}

static void fini(struct kv_op *op)
{
    for (uint32_t i = 0; i < op->query.n_heads; i++)
        free(op->query.answers[i]);
}

static const struct kv_op_kind query_kind = {
    .name = "query",
    .id = KV_OP_QUERY,
    .class = KV_LANE_FETCH,
    .needs_current = true,
    .start = start,
    .build = build,
    .land = land,
    .reply = reply,
    .finish = finish,
    .fini = fini,
    .describe = describe,
};

/* ---- the operation ----------------------------------------------------------------------- */

static const char *ranges_fault(const struct kv_query *query)
{
    uint32_t end = 0;

    if (query->n_ranges == 0 || query->n_ranges > KV_RANGES_MAX)
        return "1 to 256 ranges are needed";
    for (uint32_t i = 0; i < query->n_ranges; i++) {
        if (query->ranges[i].begin < end || query->ranges[i].begin >= query->ranges[i].end)
            return "ranges are not ascending, overlap, or are empty";
        end = query->ranges[i].end;
    }
    return end > KV_TOKENS_MAX ? "a range beyond the largest session" : NULL;
}

/* What each step will look at: step 1 is left out where it would take every candidate, step 2
 * where nothing is to be chosen or weighed any more. */
static void expect_work(struct kv_query_part *part, uint32_t n_groups)
{
    const struct kv_query *query = &part->query;
    const uint64_t wanted = (uint64_t)query->k * query->rerank;
    const uint64_t taken = wanted < KV_CHOSEN_MAX ? wanted : KV_CHOSEN_MAX;
    const bool is_scored = query->selection != KV_SELECT_TOP || taken < part->n_candidates;
    const bool is_reranked =
        is_scored ? query->rerank > 1 : query->k < part->n_candidates || query->scores;
    const uint64_t most = taken * n_groups;

    part->n_scored = is_scored ? part->n_candidates : 0;
    part->n_reranked_max = !is_reranked                ? 0
                           : most < part->n_candidates ? (uint32_t)most
                                                       : part->n_candidates;
}

/* Checks what the sizes depend on, and fills those of `ret_part`.  NULL: all fits the schema.
 */
static const char *
shape_fault(const kv_schema_t *schema, const struct kv_query *query, struct kv_query_part *part)
{
    const char *fault = ranges_fault(query);
    const struct kv_layer_schema *layer;
    uint32_t n_vectors;
    uint64_t most;

    if (fault != NULL)
        return fault;
    if (query->layer >= schema->n_layers)
        return "no such layer";
    layer = &schema->layers[query->layer];
    part->query = *query;
    part->n_heads = query->n_heads;
    if (query->n_heads == 0 && query->head_begin == 0)
        part->n_heads = layer->n_kv_heads;
    if (part->n_heads == 0 || query->head_begin >= layer->n_kv_heads ||
        part->n_heads > layer->n_kv_heads - query->head_begin)
        return "no such kv heads";
    if (query->n_queries == 0 || query->n_queries > KV_QUERIES_MAX)
        return "1 to 32 query vectors are needed";
    if (query->k == 0 || query->k > KV_CHOSEN_MAX)
        return "k is 1 to 8192";
    if (query->merge < KV_MERGE_SUM || query->merge > KV_MERGE_NONE)
        return "no such merge";
    if (query->answer < KV_ANSWER_IDS || query->answer > KV_ANSWER_ATTEND)
        return "no such answer";
    if (query->names && !attends(query))
        return "only attention leaves names out";
    if (query->rest != 0 && query->rest != 16 && query->rest != 64)
        return "rest is 0, or 16 or 64 summaries";
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
    expect_work(part, n_vectors);
    part->row_bytes = layer->row_bytes;
    part->d_k = layer->d_k;
    part->d_v = layer->d_v;
    return NULL;
}

/* Bounds of outputs, and of log-sum-exps: of the largest score, of any row, as often as there
 * are candidates.
 *   sum  size_of() the largest vector */
static void expect_outputs(struct kv_query_part *part, enum kv_dtype dtype, double sum)
{
    const double value_most = dtype == KV_FP16 ? HALF_MOST : (double)FLT_MAX;
    const double most = (double)part->query.scale * sum * value_most * (1 + (double)ROUNDING) +
                        log(part->n_candidates) + REST_CORRECTION;

    part->output_most = dtype == KV_FP16 ? (float)HALF_MOST * (1 + ROUNDING) : FLT_MAX;
    part->lse_most = most < (double)FLT_MAX ? (float)most : FLT_MAX;
}

/* Sum of the elements without their signs; NaN or infinite where one is. */
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

/* Checks what sizes do not depend on, and fills the bounds of `part` that hang on it. */
static const char *values_fault(const struct kv_session *session, struct kv_query_part *part)
{
    const struct kv_query *query = &part->query;
    const size_t n_vectors = (size_t)part->n_heads * query->n_queries;
    const float *element = query->queries;
    double most = 0;

    if (query->ranges[query->n_ranges - 1].end > session->tokens_max)
        return "a range beyond the session's tokens_max";
    if (query->snapshot > session->tokens_max)
        return "a snapshot beyond the session's tokens_max";
    if (query->rerank == 0)
        return "rerank is 1 or more";
    if (!isfinite(query->scale) || query->scale <= 0)
        return "scale is not above 0";
    if (query->selection == KV_SELECT_TOP ? query->share != 0
                                          : !(query->share > 0 && query->share <= 1))
        return "share is 0 for the k largest, else above 0 and at most 1";
    for (size_t i = 0; i < n_vectors; i++) {
        const double sum = size_of(element, part->d_k);

        if (!isfinite(sum))
            return "a query vector is not finite";
        most = sum > most ? sum : most;
        element += part->d_k;
    }
    expect_outputs(part, session->schema.layers[query->layer].dtype, most);
    return NULL;
}

/* Adds up the blocks that the caller holds; *ret_most: of one head.  NULL: they are blocks. */
static const char *
held_fault(const struct kv_query_part *part, size_t *ret_n, uint32_t *ret_most)
{
    const struct kv_query *query = &part->query;
    uint64_t n_held = 0;

    *ret_most = 0;
    *ret_n = 0;
    if (query->n_held == NULL || !heeds_held(query))
        return NULL;
    for (uint32_t i = 0; i < part->n_heads; i++) {
        uint64_t end = n_held + query->n_held[i];

        if (end > UINT32_MAX)
            return "too many blocks are held";
        for (uint64_t j = n_held; j < end; j++)
            if (query->held[j].block >= KV_TOKENS_MAX / KV_BLOCK_TOKENS ||
                (j > n_held && query->held[j].block <= query->held[j - 1].block))
                return "held blocks do not ascend, or lie beyond the largest session";
        if (query->n_held[i] > *ret_most)
            *ret_most = query->n_held[i];
        n_held = end;
    }
    *ret_n = n_held;
    return NULL;
}

/* Makes room for the results, for n_heads, and copies the caller's arrays.  false: out of
 * memory. */
static bool keep(struct kv_op *op, size_t n_held)
{
    struct kv_query_part *part = &op->query;
    struct kv_query *query = &part->query;
    const size_t n = part->n_heads;
    const size_t results_bytes = n * (sizeof(*part->found) + sizeof(*part->answers)) +
                                 (n + 1) * sizeof(*part->held_begin);
    const size_t ranges_bytes = query->n_ranges * sizeof(*query->ranges);
    const size_t queries_bytes = n * query->n_queries * part->d_k * sizeof(*query->queries);
    const size_t held_bytes = n_held * sizeof(*query->held);
    uint8_t *at = kv_op_room(op, results_bytes + ranges_bytes + queries_bytes + held_bytes);

    if (at == NULL)
        return false;
    memset(at, 0, results_bytes);
    part->found = carve(&at, n, sizeof(*part->found));
    part->answers = carve(&at, n, sizeof(*part->answers));
    part->held_begin = carve(&at, n + 1, sizeof(*part->held_begin));
    for (size_t i = 0; i < n && n_held > 0; i++)
        part->held_begin[i + 1] = part->held_begin[i] + query->n_held[i];
    query->ranges = kv_op_keep(&at, query->ranges, ranges_bytes);
    query->queries = kv_op_keep(&at, query->queries, queries_bytes);
    query->held = kv_op_keep(&at, query->held, held_bytes);
    query->n_held = NULL;
    return true;
}

size_t kv_query_room(const kv_schema_t *schema, const struct kv_query *query)
{
    struct kv_query_part part = {0};

    return shape_fault(schema, query, &part) == NULL ? part.n_heads * head_room(&part) : 0;
}

kv_status_t kv_query_begin(struct kv_session *session,
                           const struct kv_query *query,
                           const struct kv_rows_io *io,
                           uint32_t deadline_ms,
                           struct kv_op **ret_op)
{
    struct kv_client *client = session->client;
    struct kv_buffer *buffer = has_rows(query) && io != NULL ? io->buffer : NULL;
    struct kv_query_part part = {0};
    const char *fault = shape_fault(&session->schema, query, &part);
    uint32_t end, most_held;
    size_t n_held;
    kv_status_t status;
    struct kv_op *op;

    if (fault == NULL)
        fault = values_fault(session, &part);
    if (fault != NULL)
        return kv_client_refuse(client, KV_INVALID, "query: layer %u: %s", query->layer, fault);
    if (has_rows(query) && (io == NULL || !kv_buffer_holds(client, io->buffer, io->offset,
                                                           part.n_heads * head_room(&part))))
        return kv_client_refuse(client, KV_INVALID, "query: %zu bytes do not lie in the buffer",
                                part.n_heads * head_room(&part));
    fault = held_fault(&part, &n_held, &most_held);
    if (fault != NULL)
        return kv_client_refuse(client, KV_INVALID, "query: layer %u: %s", query->layer, fault);
    if (!fits(&part, 1, most_held, KV_WIRE_BULK_MAX))
        return kv_client_refuse(
            client, KV_TOO_LARGE,
            "query: layer %u: one kv head may ask %zu bytes and get %zu and %zu of rows",
            query->layer, request_bytes(&part, 1, most_held),
            answer_bytes_max(&part, 1, most_held), head_room(&part));
    status = kv_op_begin(client, &query_kind, session, buffer, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    end = query->ranges[query->n_ranges - 1].end;
    if (part.query.snapshot < end)
        part.query.snapshot = end;
    if (buffer != NULL)
        part.base = buffer->base + io->offset;
    op->query = part;
    if (!keep(op, n_held)) {
        kv_op_discard(op);
        return kv_client_refuse(client, KV_NO_MEMORY, "query: out of memory");
    }
    kv_op_need_units(op, query->layer, query->layer + 1, query->head_begin, part.n_heads);
    return kv_op_go(op, ret_op);
}

kv_status_t kv_op_found(const struct kv_op *op, uint32_t head, struct kv_found *ret_found)
{
    if (op->kind != &query_kind || op->status != KV_OK || head >= op->query.n_heads)
        return KV_INVALID;
    *ret_found = op->query.found[head];
    return KV_OK;
}

uint32_t kv_held_fingerprint(const uint32_t *crcs)
{
    return kv_block_fingerprint(crcs);
}
