/* query: which rows matter to some query vectors?
 *
 *   begin ......... checked; waits for its snapshot
 *   run, run, ..... takes a staging buffer (for rows) and the querier, then slices (pipeline.h)
 *   answer ........ ids and what was asked besides; rows behind them, or by bulk */
#include "kvserver/store/ops/query.h"

#include "kvserver/store/ops/ops.h"
#include "kvserver/store/ops/parse_units.h"
#include "kvserver/store/ops/query_parse.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void *kvs_op_query_open(struct kv_data *data)
{
    struct kvs_query_queue *queue = calloc(1, sizeof(*queue));

    if (queue == NULL)
        return NULL;
    queue->waiting.end = &queue->waiting.first;
    queue->querier = kv_querier_create();
    queue->recall = kv_recall_create(data);
    if (queue->querier == NULL || queue->recall == NULL) {
        kvs_op_query_close(queue);
        return NULL;
    }
    return queue;
}

void kvs_op_query_close(void *state)
{
    struct kvs_query_queue *queue = state;

    kv_recall_destroy(queue->recall);
    kv_querier_destroy(queue->querier);
    free(queue);
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
        if (kvs_unit_at(work, i)->committed < request->snapshot) {
            kv_work_wait(work, request->snapshot);
            return;
        }
    }
    kv_work_queue(work);
}

void kv_op_query_begin(struct kv_work *work)
{
    struct kv_wire_header *request = &work->request;

    if (!kv_query_check(work))
        return;
    uint32_t need = kv_query_ranges(work)[kv_query_of(work)->n_ranges - 1].end;
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
    struct kvs_query_queue *queue = kvs_query_queue_of(work->data);

    if (queue->owner != work)
        return;
    kv_querier_end(queue->querier);
    /* Handed on at once: should the next one end before its turn, it comes by here, too. */
    queue->owner = queue->waiting.first;
    queue->begun = false;
    if (queue->owner != NULL)
        kv_work_queue(queue->owner);
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
        kv_count(&stats->rows_scored_by_code, querier->found[i].n_scored_by_code);
        kv_count(&stats->rows_scored_by_key, querier->found[i].n_scored_by_key);
        kv_count(&stats->rows_reranked, querier->found[i].n_reranked);
        kv_count(&stats->rows_selected, querier->found[i].n_selected);
        kv_count(&stats->rows_estimated, querier->found[i].n_estimated);
    }
    kv_count(&stats->rows_attended, querier->n_attended);
    kv_count(&stats->rows_attended_unsummarised, querier->n_rest_exact);
    kv_count(&stats->rows_out, querier->n_rows);
    kv_count(&stats->rows_out_bytes, querier->rows_bytes);
    kv_count(&work->peer->rows_out, querier->n_rows);
}

/* Whether every output is a number: one row with a value that is none spoils a whole element,
 * and the asker could not tell that from a node that answers nonsense.  On failure the work has
 * failed. */
static bool check_outputs(struct kv_work *work, const struct kv_querier *querier)
{
    const float *output = querier->outputs;

    if (!kv_query_has_outputs(kv_query_of(work)))
        return true;
    for (uint32_t unit = 0; unit < work->request.n_units; unit++) {
        const float *end =
            output + (size_t)kv_query_of(work)->n_queries * kvs_unit_layer(work, unit)->d_v;

        for (; output < end; output++) {
            if (isfinite(*output))
                continue;
            kv_work_fail(work, KV_INVALID,
                         "query: layer %u head %u: the output is no number: a row attended "
                         "holds a NaN, an infinity, or values too large to add",
                         kvs_units(work)[unit].layer, kvs_units(work)[unit].kv_head);
            return false;
        }
    }
    return true;
}

static void answer(struct kv_work *work, struct kv_querier *querier)
{
    const struct kv_wire_query *query = kv_query_of(work);
    const uint64_t begun_us = kvs_query_queue_of(work->data)->begun_us;
    const size_t ids_bytes = querier->n_ids * sizeof(uint32_t);
    const struct kv_wire_query_times times = {
        .queue_us = (uint32_t)(begun_us - work->begin_us),
        .service_us = (uint32_t)(kv_clock_now(work->data->clock) - begun_us),
    };
    const size_t bytes = querier->rows_bytes;
    uint32_t committed = UINT32_MAX;
    uint8_t *to = work->answer;

    to = append(to, &times, sizeof(times));
    to = append(to, querier->found, work->request.n_units * sizeof(querier->found[0]));
    to = append(to, querier->ids, ids_bytes);
    if (query->flags & KV_WIRE_WEIGHTS)
        to = append(to, querier->scores, ids_bytes);
    if (query->merge == KV_MERGE_NONE)
        to = append(to, querier->heads, ids_bytes);
    to = append(to, querier->outputs, querier->n_outputs * sizeof(float));
    to = append(to, querier->lses, querier->n_lses * sizeof(float));
    to = append(to, querier->crcs, querier->n_rows * sizeof(uint32_t));
    for (uint32_t i = 0; i < work->request.n_units; i++)
        if (querier->found[i].committed < committed)
            committed = querier->found[i].committed;
    work->reply.layer = kvs_units(work)[0].layer;
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

/* ---- its turn ---------------------------------------------------------------------------- */

static void note_selected(void *arg,
                          const struct kv_scan *scan,
                          const struct kv_choice *choice,
                          const uint32_t *tokens,
                          uint32_t n_tokens)
{
    struct kv_work *work = arg;

    kv_recall_note(kvs_query_queue_of(work->data)->recall, work->part, scan, choice, tokens,
                   n_tokens);
}

/* False: it is another work's, and this one is in its queue. */
static bool take_querier(struct kv_work *work)
{
    struct kvs_query_queue *queue = kvs_query_queue_of(work->data);
    struct kvs_query_input input;

    if (queue->owner == work && queue->begun)
        return true;
    if (queue->owner != NULL && queue->owner != work) {
        kv_work_queue_at(work, &queue->waiting);
        return false;
    }
    queue->owner = work;
    queue->begun = true;
    queue->begun_us = kv_clock_now(work->data->clock);
    kvs_query_parse(work, queue->units, &input);
    input.selected = note_selected;
    input.arg = work;
    kv_querier_begin(queue->querier, &input);
    return true;
}

static void fail_bad(struct kv_work *work, const struct kv_querier *querier)
{
    const struct kv_wire_unit *unit = &kvs_units(work)[querier->unit];

    kv_work_fail(
        work, KV_CORRUPT,
        "query: layer %u head %u token %u: the row has gone bad in memory: put it again",
        unit->layer, unit->kv_head, querier->bad);
}

bool kv_op_query_run(struct kv_work *work)
{
    struct kv_querier *querier = kvs_query_queue_of(work->data)->querier;

    if (kv_work_stale(work)) {
        kv_work_fail(work, KV_STALE, "query: session %u was changed meanwhile",
                     work->request.session_index);
        return false;
    }
    if (kv_query_of(work)->answer == KV_ANSWER_ROWS && work->staging == NULL &&
        !kv_work_stage(work))
        return false;
    if (work->answer == NULL && kv_work_answer_slot(work, KV_WIRE_BODY_MAX) != KV_OK) {
        kv_work_fail(work, KV_BUSY, "query: no buffer for the answer");
        return false;
    }
    if (!take_querier(work))
        return false;
    if (!kv_querier_slice(querier)) {
        fail_bad(work, querier);
        return false;
    }
    if (!kv_querier_is_done(querier))
        return true;
    if (check_outputs(work, querier))
        answer(work, querier);
    return false;
}
