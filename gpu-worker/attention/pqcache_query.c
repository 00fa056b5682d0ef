/* A decode step of pqcache in one layer: queries the store; meanwhile attends to sinks and window;
 * fetches rows that the reply did not contain, attends to what was selected, and merges both.  Also
 * adapts --rerank auto. */
#include "gpu-worker/attention/pqcache_private.h"

#include "gpu-worker/base/time.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum {
    QUERY_DEADLINE_MS = 10000,
    MESSAGE_BYTES = 1 << 20, /* kvclient.h: limit for the rows of one head in a reply */
};

/* How long a query waited in nodes before they worked on it: the longest of its messages. */
static uint64_t queue_us_of(const struct kvw_pqcache *pq, const struct kv_op *op)
{
    struct kv_query_result found;
    uint32_t most = 0;

    for (uint32_t head = 0; head < pq->setup.session.model->params.n_kv_heads; head++)
        if (kv_op_query_result(op, head, &found) == KV_OK && found.queue_us > most)
            most = found.queue_us;
    return most;
}

/* Waits for an operation of a layer's attention. */
static kv_status_t
wait_for(struct kvw_pqcache *pq, struct kv_op *op, enum kvw_trace_track track, uint32_t layer)
{
    static const char *const names[KVW_TRACE_TRACKS] = {
        [KVW_TRACE_QUERY] = "query", [KVW_TRACE_FETCH] = "fetch"};
    const uint64_t begin_us = kvw_now_us();
    const kv_status_t status = kv_wait(op);
    const uint64_t end_us = kvw_now_us();
    const uint64_t queue_us = track == KVW_TRACE_QUERY ? queue_us_of(pq, op) : 0;
    struct kv_op_times times;

    kv_op_get_times(op, &times);
    kvw_pqcache_count_wait(pq, layer, &times, queue_us, end_us - begin_us);
    const struct kvw_trace_arg args[] = {{"layer", layer},
                                         {"node_us", (int64_t)times.node_us},
                                         {"node_queue_us", (int64_t)queue_us}};
    kvw_trace_span(pq->setup.session.trace, track, names[track], times.begun_us, times.ended_us,
                   args, 3);
    kvw_trace_span(pq->setup.session.trace, KVW_TRACE_WAIT, names[track], begin_us, end_us,
                   args, 1);
    return kvw_session_fail(pq->base.session, status);
}

/* Fetches selected rows that the worker lacks, after a query that returned only ids. */
static kv_status_t fetch_rows(struct kvw_pqcache *pq,
                              uint32_t layer,
                              const struct kv_query_result *found,
                              uint32_t *rows_before)
{
    const uint32_t n_heads = pq->setup.session.model->params.n_kv_heads;
    const struct kv_rows_io io = {.buffer = pq->landing};
    struct kv_fetch fetch = {.layer = layer, .n_ids = pq->fetch_n, .ids = pq->fetch_ids};
    uint32_t n = 0;
    struct kv_op *op;
    kv_status_t status;

    for (uint32_t head = 0; head < n_heads; head++) {
        rows_before[head] = n;
        for (uint32_t i = 0; i < found[head].n_ids; i++)
            if (pq->cached == NULL ||
                !kvw_block_cache_has(pq->cached, layer, found[head].ids[i]))
                pq->fetch_ids[n++] = found[head].ids[i];
        pq->fetch_n[head] = n - rows_before[head];
    }
    if (n == 0)
        return KV_OK;
    status = kv_fetch_begin(kvw_session_handle(pq->base.session), &fetch, &io,
                            QUERY_DEADLINE_MS, &op);
    if (status != KV_OK)
        return kvw_session_fail(pq->base.session, status);
    status = wait_for(pq, op, KVW_TRACE_FETCH, layer);
    kv_op_free(op);
    pq->node_stats.rows_sent += n;
    pq->bytes_fetched += n * pq->row_bytes;
    return status;
}

/* Returns the option that says how many candidates step 1 takes. */
static uint32_t candidates_option(const struct kvw_pqcache *pq)
{
    return pq->options.first_cut == KV_CUT_NONE ? kvw_method_rerank(&pq->options)
                                                : pq->options.candidates;
}

/* Nodes estimate recall when they have time; with a seed, runs must be reproducible. */
static bool adapts_candidates(const struct kvw_pqcache *pq)
{
    return candidates_option(pq) == KVW_ADAPTED && pq->options.seed == 0;
}

/* Of what a first cut leaves. */
static uint32_t rerank_of(const struct kvw_pqcache *pq)
{
    return pq->options.first_cut == KV_CUT_NONE ? 1 : kvw_method_rerank(&pq->options);
}

/* Whether nobody asked for just so many candidates: then there may be fewer, or more. */
static bool candidates_fit(const struct kvw_pqcache *pq)
{
    return candidates_option(pq) == KVW_ADAPTED ||
           (pq->options.first_cut == KV_CUT_NONE ? pq->options.rerank == KVW_USUAL
                                                 : pq->options.candidates_fit);
}

static uint32_t candidates_of(const struct kvw_pqcache *pq, uint32_t layer, uint32_t k)
{
    uint32_t n = adapts_candidates(pq) ? pq->rerank[layer].factor : candidates_option(pq);

    if (!candidates_fit(pq))
        return n; /* the store says so if these are too many, or fewer than are reranked */
    n = kvw_pqcache_smaller(n == KVW_ADAPTED ? kvw_pqcache_usual(pq) : n,
                            KV_CANDIDATES_MAX / k);
    return n > rerank_of(pq) ? n : rerank_of(pq); /* a cut leaves no more than there are */
}

/* More candidates where nodes measure that codes miss too much. */
static void adapt_candidates(struct kvw_pqcache *pq,
                             uint32_t layer,
                             const struct kvw_budget *budget,
                             const struct kv_query_result *found)
{
    float least = NAN;

    if (!adapts_candidates(pq))
        return;
    for (uint32_t head = 0; head < pq->setup.session.model->params.n_kv_heads; head++)
        least = fminf(least, found[head].recall); /* NaN: not known */
    /* More than KV_CANDIDATES_MAX are not taken. */
    kvw_rerank_note(&pq->rerank[layer], least,
                    kvw_pqcache_smaller(KVW_RERANK_MAX, KV_CANDIDATES_MAX / budget->k));
}

/* Appends the runs of a head's selected rows after n_runs others; returns the new number of
 * runs.  Rows that were sent are consecutive from `first` on. */
static uint32_t selected_runs(struct kvw_pqcache *pq,
                              uint32_t layer,
                              uint32_t head,
                              const struct kv_query_result *found,
                              size_t first,
                              uint32_t n_runs)
{
    bool goes_on = false;

    for (uint32_t i = 0; i < found->n_ids; i++) {
        const uint32_t token = found->ids[i];
        const bool is_cached =
            pq->answer == KV_ANSWER_IDS
                ? pq->cached != NULL && kvw_block_cache_has(pq->cached, layer, token)
                : found->row_index[i] == KV_ROW_CACHED;

        if (is_cached) {
            pq->runs[n_runs++] = kvw_block_cache_run(pq->cached, layer, head, token);
            pq->node_stats.rows_cached++;
        } else if (goes_on) {
            pq->runs[n_runs - 1].n_rows++;
            first++;
        } else {
            pq->runs[n_runs++] = (struct kvw_row_run){pq->landed, first++, 1};
        }
        goes_on = !is_cached;
        if (pq->cached != NULL)
            kvw_block_cache_note(pq->cached, layer, token);
    }
    return n_runs;
}

/* Returns the index of a head's first received row in the landing buffer. */
static size_t first_row(const struct kvw_pqcache *pq,
                        const struct kv_query_result *found,
                        uint32_t rows_before)
{
    if (pq->answer == KV_ANSWER_IDS)
        return rows_before;
    return (size_t)((const char *)found->rows - (const char *)kv_buffer_data(pq->landing)) /
           pq->row_bytes;
}

/* Brings the nodes' attention outputs to the device. */
static void take_outputs(struct kvw_pqcache *pq, const struct kv_query_result *found)
{
    const uint32_t n_heads = pq->setup.session.model->params.n_kv_heads,
                   group = kvw_pqcache_group_of(pq);
    const size_t n_q_heads = (size_t)n_heads * group;

    for (uint32_t head = 0; head < n_heads; head++) {
        memcpy(pq->outputs + (size_t)head * group * pq->d, found[head].outputs,
               (size_t)group * pq->d * sizeof(pq->outputs[0]));
        memcpy(pq->lses + head * group, found[head].lses, group * sizeof(pq->lses[0]));
    }
    kvw_device_write(pq->device, KVW_STREAM_COMPUTE, pq->found_out, 0, pq->outputs,
                     n_q_heads * pq->d * sizeof(pq->outputs[0]));
    kvw_device_write(pq->device, KVW_STREAM_COMPUTE, pq->found_lse, 0, pq->lses,
                     n_q_heads * sizeof(pq->lses[0]));
}

/* Attention over sinks and window. */
static void attend_near(struct kvw_pqcache *pq,
                        uint32_t layer,
                        const struct kvw_device_buffer *q,
                        struct kvw_device_buffer *out)
{
    const uint32_t n_heads = pq->setup.session.model->params.n_kv_heads;
    const struct kvw_budget *budget = &pq->asked.budget;
    uint32_t n_runs = 0;

    for (uint32_t head = 0; head < n_heads; head++) {
        pq->run_begin[head] = n_runs;
        n_runs = kvw_device_rows_runs(pq->device_rows, layer, head, 0, budget->sinks, pq->runs,
                                      n_runs);
        n_runs = kvw_device_rows_runs(pq->device_rows, layer, head, budget->window_begin,
                                      budget->n_rows, pq->runs, n_runs);
        pq->rows_attended += budget->sinks + budget->n_rows - budget->window_begin;
    }
    pq->run_begin[n_heads] = n_runs;
    pq->device->ops->runs_attend(pq->device, kvw_device_rows_shape(pq->device_rows), q,
                                 pq->runs, pq->run_begin, out, pq->lse);
}

/* Attention over selected rows, whose ids or bytes the query has returned. */
static kv_status_t attend_selected(struct kvw_pqcache *pq,
                                   uint32_t layer,
                                   const struct kv_query_result *found,
                                   const struct kvw_device_buffer *q)
{
    const uint32_t n_heads = pq->setup.session.model->params.n_kv_heads;
    uint32_t rows_before[KV_HEADS_MAX] = {0};
    uint32_t n_runs = 0;
    kv_status_t status = KV_OK;

    if (pq->answer == KV_ANSWER_IDS)
        status = fetch_rows(pq, layer, found, rows_before);
    if (status != KV_OK)
        return status;
    for (uint32_t head = 0; head < n_heads; head++) {
        pq->run_begin[head] = n_runs;
        n_runs = selected_runs(pq, layer, head, &found[head],
                               first_row(pq, &found[head], rows_before[head]), n_runs);
    }
    pq->run_begin[n_heads] = n_runs;
    pq->device->ops->runs_attend(pq->device, kvw_device_rows_shape(pq->device_rows), q,
                                 pq->runs, pq->run_begin, pq->found_out, pq->found_lse);
    return KV_OK;
}

/* Merges what was found into attention over other rows. */
static void merge_into(struct kvw_pqcache *pq, struct kvw_device_buffer *out)
{
    pq->device->ops->answers_merge(pq->device, kvw_device_rows_shape(pq->device_rows),
                                   pq->found_out, pq->found_lse, out, pq->lse);
}

/* Merges the answer to the query, rows or outputs or both, into attention over sinks and window. */
static kv_status_t merge_found(struct kvw_pqcache *pq,
                               uint32_t layer,
                               const struct kv_op *op,
                               const struct kvw_device_buffer *q,
                               struct kvw_device_buffer *out)
{
    const uint32_t n_heads = pq->setup.session.model->params.n_kv_heads;
    const struct kvw_budget *budget = &pq->asked.budget;
    struct kv_query_result found[KV_HEADS_MAX];
    kv_status_t status = KV_OK;

    for (uint32_t head = 0; head < n_heads; head++) {
        kv_op_query_result(op, head, &found[head]);
        kvw_pqcache_count_found(pq, budget, &found[head]);
    }
    kvw_pqcache_count_reads(pq, op);
    pq->node_stats.nodes_worked_s += (double)kvw_pqcache_worked_us(found, n_heads) / 1e6;
    adapt_candidates(pq, layer, budget, found);
    if (pq->answer != KV_ANSWER_ATTEND) {
        status = attend_selected(pq, layer, found, q);
        if (status != KV_OK)
            return status;
        merge_into(pq, out);
    }
    if (found[0].outputs != NULL) {
        take_outputs(pq, found);
        merge_into(pq, out);
    }
    pq->device->ops->event_record(pq->device, KVW_STREAM_COMPUTE, pq->attended);
    return KV_OK;
}

/* Chooses what a query for k rows returns: rows that exceed one message are fetched by id. */
static enum kv_answer answer_for(const struct kvw_pqcache *pq, uint32_t k)
{
    if (kvw_method_returns_outputs(&pq->options))
        return KV_ANSWER_ATTEND;
    return pq->options.answer == KVW_RESULT_IDS || k * pq->row_bytes > MESSAGE_BYTES
               ? KV_ANSWER_IDS
               : KV_ANSWER_ROWS;
}

static kv_status_t begin_query(struct kvw_pqcache *pq,
                               uint32_t layer,
                               const struct kvw_budget *budget,
                               struct kv_op **ret_op)
{
    const struct kv_range middle = {budget->sinks, budget->window_begin};
    const struct kv_rows_io io = {.buffer = pq->landing};
    struct kv_query query = {
        .layer = layer,
        .n_queries = kvw_pqcache_group_of(pq),
        .queries = pq->q,
        .scale = 1 / sqrtf((float)pq->d),
        .merge = KV_MERGE_SUM,
        .k = kvw_pqcache_smaller(budget->k, KV_SELECTED_MAX),
        .first_cut = pq->options.first_cut,
        .want_reads = true,
        .summaries = pq->options.index.summaries,
        .summary_rows = pq->options.index.summary_rows,
        .n_ranges = 1,
        .ranges = &middle,
    };
    kv_status_t status;

    if (query.first_cut == KV_CUT_NONE) {
        query.rerank = candidates_of(pq, layer, query.k);
    } else {
        query.rerank = rerank_of(pq);
        query.candidates = candidates_of(pq, layer, query.k);
    }
    query.answer = pq->answer = answer_for(pq, query.k);
    if (pq->answer == KV_ANSWER_ROWS && pq->cached != NULL)
        kvw_block_cache_list(pq->cached, layer, &query.n_cached, &query.cached);
    status =
        kv_query_begin(kvw_session_handle(pq->base.session), &query,
                       pq->answer == KV_ANSWER_ROWS ? &io : NULL, QUERY_DEADLINE_MS, ret_op);
    return kvw_session_fail(pq->base.session, status);
}

void kvw_pqcache_forget_question(struct kvw_pqcache *pq)
{
    kv_op_free(pq->asked.op);
    pq->asked.op = NULL;
    pq->asked.is_due = false;
}

kv_status_t kvw_pqcache_ask(struct kvw_pqcache *pq,
                            uint32_t layer,
                            uint32_t token,
                            const struct kvw_device_buffer *q)
{
    struct kvw_budget *budget = &pq->asked.budget;

    assert(pq->asked.op == NULL);
    *budget = kvw_budget_of(&pq->options.budget, kvw_index_schedule_prompt_rows(pq->index),
                            token + 1);
    assert(budget->window_begin <= token); /* what is asked does not depend on its row */
    if (budget->k == 0 || budget->window_begin == budget->sinks)
        return KV_OK;
    kvw_device_follow(pq->device, KVW_STREAM_TRANSFER, KVW_STREAM_COMPUTE, pq->computed);
    kvw_device_read(pq->device, KVW_STREAM_TRANSFER, q, 0, pq->q,
                    (size_t)pq->setup.session.model->params.n_q_heads * pq->d *
                        sizeof(pq->q[0]));
    pq->device->ops->event_record(pq->device, KVW_STREAM_TRANSFER, pq->here);
    pq->asked.is_due = true;
    return kvw_pqcache_send(pq, layer, false);
}

kv_status_t kvw_pqcache_send(struct kvw_pqcache *pq, uint32_t layer, bool waits)
{
    kv_status_t status;

    if (!pq->asked.is_due || (!waits && !pq->device->ops->event_has_happened(pq->here)))
        return KV_OK;
    pq->asked.is_due = false;
    status = kvw_index_schedule_await(pq->index, layer, &pq->layer_wait_s[layer]);
    pq->device->ops->event_wait(pq->here);
    /* The memory of the last answer is used again: its rows have been attended to, as q follows from
     * that. */
    return status == KV_OK ? begin_query(pq, layer, &pq->asked.budget, &pq->asked.op) : status;
}

kv_status_t kvw_pqcache_answer(struct kvw_pqcache *pq,
                               uint32_t layer,
                               const struct kvw_device_buffer *q,
                               struct kvw_device_buffer *out)
{
    struct kv_op *op = pq->asked.op;
    kv_status_t status;

    attend_near(pq, layer, q, out);
    if (op == NULL)
        return KV_OK;
    status = wait_for(pq, op, KVW_TRACE_QUERY, layer);
    if (status == KV_OK)
        status = merge_found(pq, layer, op, q, out);
    kvw_pqcache_forget_question(pq);
    if (status == KV_OK && pq->cached != NULL) {
        /* Rows come where others were. */
        pq->device->ops->event_wait(pq->attended);
        status = kvw_block_cache_end(pq->cached, layer, pq->asked.budget.window_begin);
    }
    return status;
}
