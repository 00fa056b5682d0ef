/* pqcache - a decode step attends to sinks, a window, and the rows between them that the store
 * finds by product-quantised keys (PQCache; methods.md 1A).
 *
 *   prompt   attends to everything, and needs every row here; each layer's rows go to the store
 *            while the next one computes, and when the last of a chapter have gone the store is
 *            asked to index it
 *   step     near rows are narrow; for each layer: query -> rows that the worker has not, or
 *            attention over them, and an estimate of what is not chosen -> attention over the
 *            rows that are here, in the order of their tokens -> both merged
 *
 * Rows are attended to in the order of tokens wherever they come from, so a block cache changes
 * the bytes that travel and no bit of the result.  Attention that comes from elsewhere is
 * merged in one place and order, too, whichever node it comes from. */
#include "gpu-worker/kvcache/block_cache.h"
#include "gpu-worker/kvcache/device_rows.h"
#include "gpu-worker/kvcache/index_schedule.h"
#include "kvserver/base/clock.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    QUERY_DEADLINE_MS = 10000,
    RERANK_USUAL = 4,
    RERANK_MOST = 16,
    MESSAGE_BYTES = 1 << 20, /* as kvclient.h says: rows of one head in an answer */
};

/* Between these --rerank auto keeps the recall of a layer's kv heads. */
static const float RECALL_WANTED = 0.9f, RECALL_PLENTY = 0.97f;
struct pqcache {
    struct kv_attention base;
    struct kv_attention_setup setup;
    struct kv_attention_options options;
    struct kv_device *device;
    struct kv_store_session *store;
    struct kv_near_rows *near;
    struct kv_held_blocks *held; /* NULL: no cache */
    uint32_t n_layers, d;
    size_t row_bytes;
    uint32_t *rerank; /* (n_layers) */
    struct kv_layer_index *index;

    /* A query. */
    float *q; /* (n_q_heads, d) */
    struct kv_buffer *landing;
    struct kv_device_buffer *landed; /* the same memory; both NULL: rows do not come */
    enum kv_answer answer;           /* of the one under way; IDS: rows are fetched after it */
    uint32_t *fetch_ids;             /* ids of rows that have to be fetched after it */
    uint32_t *fetch_n;               /* (n_kv_heads) */
    struct kv_row_run *runs;
    uint32_t *run_begin;          /* (n_kv_heads + 1) */
    float *outputs, *lses;        /* (n_q_heads, d), (n_q_heads): of the nodes */
    struct kv_device_buffer *lse; /* (n_q_heads): of the rows that are here */

    uint64_t rows_attended, rows_possible, bytes_fetched;
    uint64_t wait_us;
    struct kv_attention_stats told; /* what the nodes told */
};

static struct pqcache *pqcache_of(struct kv_attention *attention)
{
    return (struct pqcache *)attention;
}

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static uint64_t now_us(void)
{
    return kv_clock_now(&kv_clock_real);
}

/* ---- life -------------------------------------------------------------------------------- */

static void pqcache_destroy(struct kv_attention *attention)
{
    struct pqcache *pq = pqcache_of(attention);

    kv_layer_index_destroy(pq->index);
    free(pq->rerank);
    /* A node that still sends would take the client for lost. */
    if (pq->held != NULL && kv_store_session_detail(pq->store)[0] == '\0')
        kv_held_blocks_truncate(pq->held, 0);
    kv_held_blocks_destroy(pq->held);
    kv_near_rows_destroy(pq->near);
    kv_store_session_destroy(pq->store);
    pq->device->row->buffer_destroy(pq->landed);
    /* A buffer in quarantine is freed with its client. */
    kv_buffer_free(pq->landing);
    pq->device->row->buffer_destroy(pq->lse);
    free(pq->outputs);
    free(pq->lses);
    free(pq->q);
    free(pq->fetch_ids);
    free(pq->fetch_n);
    free(pq->runs);
    free(pq->run_begin);
    free(pq);
}

/* The store attends to chosen rows: none of them come. */
static bool is_attended_there(const struct kv_attention_options *options)
{
    return options->answer == KV_FORM_AUTO || options->answer == KV_FORM_ATTEND;
}

/* Rows of each kv head that may come in a step. */
static uint32_t rows_max(const struct kv_attention_setup *setup)
{
    return is_attended_there(&setup->options) ? 0 : smaller(setup->capacity, KV_CHOSEN_MAX);
}

static kv_status_t query_memory(struct pqcache *pq)
{
    const struct kv_model_params *params = &pq->setup.model->params;
    const size_t n_rows = params->n_kv_heads * (size_t)rows_max(&pq->setup);
    const size_t output_floats = (size_t)params->n_q_heads * pq->d;
    kv_status_t status;

    pq->q = malloc(output_floats * sizeof(pq->q[0]));
    pq->outputs = malloc(output_floats * sizeof(pq->outputs[0]));
    pq->lses = malloc(params->n_q_heads * sizeof(pq->lses[0]));
    pq->fetch_ids = malloc((n_rows + 1) * sizeof(pq->fetch_ids[0]));
    pq->fetch_n = malloc(params->n_kv_heads * sizeof(pq->fetch_n[0]));
    /* Chosen ones, sinks, and a window that may begin in the middle of the ring. */
    pq->runs = malloc((n_rows + 4 * params->n_kv_heads) * sizeof(pq->runs[0]));
    pq->run_begin = malloc((params->n_kv_heads + 1) * sizeof(pq->run_begin[0]));
    if (pq->q == NULL || pq->outputs == NULL || pq->lses == NULL || pq->fetch_ids == NULL ||
        pq->fetch_n == NULL || pq->runs == NULL || pq->run_begin == NULL)
        return KV_NO_MEMORY;
    status = pq->device->row->buffer_create(pq->device, params->n_q_heads * sizeof(pq->lses[0]),
                                            &pq->lse);
    if (status != KV_OK || n_rows == 0)
        return status;
    status = kv_buffer_alloc(pq->setup.client, n_rows * pq->row_bytes, &pq->landing);
    if (status == KV_OK)
        status = pq->device->row->buffer_wrap(pq->device, kv_buffer_data(pq->landing),
                                              kv_buffer_bytes(pq->landing), &pq->landed);
    return status;
}

static kv_status_t pqcache_create(const struct kv_attention_setup *setup,
                                  struct kv_attention **ret_attention,
                                  char *detail,
                                  size_t detail_bytes)
{
    const struct kv_model_params *params = &setup->model->params;
    const struct kv_attention_options *options = &setup->options;
    struct pqcache *pq = calloc(1, sizeof(*pq));
    kv_status_t status;

    snprintf(detail, detail_bytes, "memory: %u tokens: refused", setup->capacity);
    if (pq == NULL)
        return KV_NO_MEMORY;
    pq->base.row = &kv_attention_pqcache;
    pq->setup = *setup;
    pq->options = *options;
    pq->device = setup->model->device;
    pq->n_layers = params->n_layers;
    pq->d = params->d;
    pq->row_bytes = (size_t)2 * params->d * kv_dtype_bytes(setup->dtype);
    if (params->d % options->subspaces != 0) {
        snprintf(detail, detail_bytes, "pq-m: %u subspaces do not divide keys of %u elements",
                 options->subspaces, params->d);
        pqcache_destroy(&pq->base);
        return KV_INVALID;
    }
    pq->rerank = malloc(pq->n_layers * sizeof(pq->rerank[0]));
    status = pq->rerank == NULL ? KV_NO_MEMORY : query_memory(pq);
    for (uint32_t i = 0; status == KV_OK && i < pq->n_layers; i++)
        pq->rerank[i] = options->rerank > 0 ? options->rerank : RERANK_USUAL;
    if (status == KV_OK)
        status = kv_store_session_create(setup, &pq->store, detail, detail_bytes);
    if (status == KV_OK)
        status = kv_near_rows_create(setup, pq->store, &pq->near);
    if (status == KV_OK)
        status = kv_layer_index_create(setup, pq->store, &pq->index);
    if (status == KV_OK && options->cache != KV_CACHE_OFF && !is_attended_there(options))
        status = kv_held_blocks_create(
            setup, pq->store, options->cache == KV_CACHE_LFU ? KV_BLOCKS_LFU : KV_BLOCKS_LRU,
            options->cache_tokens, &pq->held);
    if (status != KV_OK) {
        pqcache_destroy(&pq->base);
        return status;
    }
    *ret_attention = &pq->base;
    return KV_OK;
}

/* ---- a step ------------------------------------------------------------------------------ */

/* Waits for what the store is asked in a layer's attention. */
static kv_status_t
wait_for(struct pqcache *pq, struct kv_op *op, enum kv_trace_track track, uint32_t layer)
{
    static const char *const names[KV_TRACE_TRACKS] = {
        [KV_TRACE_QUERY] = "query", [KV_TRACE_FETCH] = "fetch"};
    const struct kv_trace_arg args[] = {{"layer", layer}};
    const uint64_t begin_us = now_us();
    const kv_status_t status = kv_wait(op);
    const uint64_t end_us = now_us();
    struct kv_trip_times times;

    pq->wait_us += end_us - begin_us;
    kv_op_trip_times(op, &times);
    kv_trace_span(pq->setup.trace, track, names[track], times.begun_us, times.ended_us, args,
                  1);
    kv_trace_span(pq->setup.trace, KV_TRACE_WAIT, names[track], begin_us, end_us, args, 1);
    return kv_store_session_fail(pq->store, status);
}

/* Rows that the query named and could not send: they are more than a message takes. */
static kv_status_t fetch_rows(struct pqcache *pq,
                              uint32_t layer,
                              const struct kv_found *found,
                              uint32_t *rows_before)
{
    const uint32_t n_heads = pq->setup.model->params.n_kv_heads;
    const struct kv_rows_io io = {.buffer = pq->landing};
    struct kv_fetch fetch = {.layer = layer, .n_ids = pq->fetch_n, .ids = pq->fetch_ids};
    uint32_t n = 0;
    struct kv_op *op;
    kv_status_t status;

    for (uint32_t head = 0; head < n_heads; head++) {
        rows_before[head] = n;
        for (uint32_t i = 0; i < found[head].n_ids; i++)
            if (pq->held == NULL || !kv_held_blocks_has(pq->held, layer, found[head].ids[i]))
                pq->fetch_ids[n++] = found[head].ids[i];
        pq->fetch_n[head] = n - rows_before[head];
    }
    if (n == 0)
        return KV_OK;
    status =
        kv_fetch_begin(kv_store_session_handle(pq->store), &fetch, &io, QUERY_DEADLINE_MS, &op);
    if (status != KV_OK)
        return kv_store_session_fail(pq->store, status);
    status = wait_for(pq, op, KV_TRACE_FETCH, layer);
    kv_op_free(op);
    pq->told.rows_sent += n;
    pq->bytes_fetched += n * pq->row_bytes;
    return status;
}

/* --rerank auto: more candidates where the nodes find that codes alone miss too much. */
static void adapt_rerank(struct pqcache *pq, uint32_t layer, const struct kv_found *found)
{
    float least = 1;

    /* Estimates come when a node has time: with a seed, a run is to repeat. */
    if (pq->options.rerank > 0 || pq->options.seed > 0)
        return;
    for (uint32_t head = 0; head < pq->setup.model->params.n_kv_heads; head++)
        if (found[head].recall < least) /* not if it is not known */
            least = found[head].recall;
    if (least < RECALL_WANTED && pq->rerank[layer] < RERANK_MOST)
        pq->rerank[layer]++;
    else if (least > RECALL_PLENTY && pq->rerank[layer] > RERANK_USUAL)
        pq->rerank[layer]--;
}

/* The query vectors of a kv head. */
static uint32_t group_of(const struct pqcache *pq)
{
    const struct kv_model_params *params = &pq->setup.model->params;

    return params->n_q_heads / params->n_kv_heads;
}

static void
count_found(struct pqcache *pq, const struct kv_budget *budget, const struct kv_found *found)
{
    pq->told.rows_to_choose_from += budget->window_begin - budget->sinks;
    pq->told.rows_scored_by_code += found->n_coded;
    pq->told.rows_scored_by_key += found->n_exact;
    pq->told.rows_reranked += found->n_reranked;
    pq->told.rows_estimated += found->n_rest;
    pq->told.rows_chosen += found->n_chosen;
    pq->told.rows_sent += found->n_rows;
    pq->rows_attended += found->n_chosen;
    pq->bytes_fetched += found->n_rows * pq->row_bytes;
    if (found->outputs != NULL)
        pq->bytes_fetched += (size_t)group_of(pq) * (pq->d + 1) * sizeof(found->outputs[0]);
    if (!isnan(found->recall)) {
        pq->told.recall_sum += (double)found->recall;
        pq->told.recall_count++;
    }
}

/* What nodes worked on a query: heads that one message answered tell the same of all of it. */
static uint64_t worked_us(const struct kv_found *found, uint32_t n_heads)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < n_heads; i++) {
        bool is_told = false;

        for (uint32_t j = 0; j < i; j++)
            is_told = is_told || (found[j].node == found[i].node &&
                                  found[j].worked_us == found[i].worked_us &&
                                  found[j].waited_us == found[i].waited_us);
        sum += is_told ? 0 : found[i].worked_us;
    }
    return sum;
}

/* Runs of a head's chosen rows that are here, behind n_runs others; returns how many there are
 * then.  Rows that were sent lie one after the other from `first` on. */
static uint32_t chosen_runs(struct pqcache *pq,
                            uint32_t layer,
                            uint32_t head,
                            const struct kv_found *found,
                            size_t first,
                            uint32_t n_runs)
{
    bool goes_on = false;

    for (uint32_t i = 0; i < found->n_ids; i++) {
        const uint32_t token = found->ids[i];
        const bool is_held =
            pq->answer == KV_ANSWER_IDS
                ? pq->held != NULL && kv_held_blocks_has(pq->held, layer, token)
                : found->row_of[i] == KV_ROW_HELD;

        if (is_held) {
            pq->runs[n_runs++] = kv_held_blocks_run(pq->held, layer, head, token);
            pq->told.rows_cached++;
        } else if (goes_on) {
            pq->runs[n_runs - 1].n_rows++;
            first++;
        } else {
            pq->runs[n_runs++] = (struct kv_row_run){pq->landed, first++, 1};
        }
        goes_on = !is_held;
        if (pq->held != NULL)
            kv_held_blocks_note(pq->held, layer, token);
    }
    return n_runs;
}

/* Where the first of a head's rows that came is, in rows of the landing memory. */
static size_t
first_row(const struct pqcache *pq, const struct kv_found *found, uint32_t rows_before)
{
    if (pq->answer == KV_ANSWER_IDS)
        return rows_before;
    return (size_t)((const char *)found->rows - (const char *)kv_buffer_data(pq->landing)) /
           pq->row_bytes;
}

/* What came of rows that are not here joins what came of those that are. */
static void
merge_found(struct pqcache *pq, const struct kv_found *found, struct kv_device_buffer *out)
{
    const uint32_t n_heads = pq->setup.model->params.n_kv_heads, group = group_of(pq);

    for (uint32_t head = 0; head < n_heads; head++) {
        memcpy(pq->outputs + (size_t)head * group * pq->d, found[head].outputs,
               (size_t)group * pq->d * sizeof(pq->outputs[0]));
        memcpy(pq->lses + head * group, found[head].lses, group * sizeof(pq->lses[0]));
    }
    pq->device->row->answers_merge(pq->device, kv_near_rows_shape(pq->near), pq->outputs,
                                   pq->lses, out, pq->lse);
}

/* Attention over sinks, what was found, and the window.  `op` NULL: nothing was asked. */
static kv_status_t attend_found(struct pqcache *pq,
                                uint32_t layer,
                                const struct kv_budget *budget,
                                const struct kv_op *op,
                                const struct kv_device_buffer *q,
                                struct kv_device_buffer *out)
{
    const uint32_t n_heads = pq->setup.model->params.n_kv_heads;
    struct kv_found found[KV_HEADS_MAX];
    uint32_t rows_before[KV_HEADS_MAX] = {0};
    uint32_t n_runs = 0;
    bool is_merged;
    kv_status_t status = KV_OK;

    for (uint32_t head = 0; op != NULL && head < n_heads; head++) {
        kv_op_found(op, head, &found[head]);
        count_found(pq, budget, &found[head]);
    }
    if (op != NULL) {
        pq->told.nodes_worked_s += (double)worked_us(found, n_heads) / 1e6;
        adapt_rerank(pq, layer, found);
    }
    if (op != NULL && pq->answer == KV_ANSWER_IDS)
        status = fetch_rows(pq, layer, found, rows_before);
    for (uint32_t head = 0; status == KV_OK && head < n_heads; head++) {
        pq->run_begin[head] = n_runs;
        n_runs = kv_near_rows_runs(pq->near, layer, head, 0, budget->sinks, pq->runs, n_runs);
        if (op != NULL && pq->answer != KV_ANSWER_ATTEND)
            n_runs = chosen_runs(pq, layer, head, &found[head],
                                 first_row(pq, &found[head], rows_before[head]), n_runs);
        n_runs = kv_near_rows_runs(pq->near, layer, head, budget->window_begin, budget->n_rows,
                                   pq->runs, n_runs);
        pq->rows_attended += budget->sinks + budget->n_rows - budget->window_begin;
    }
    if (status != KV_OK)
        return status;
    pq->run_begin[n_heads] = n_runs;
    is_merged = op != NULL && found[0].outputs != NULL;
    pq->device->row->runs_attend(pq->device, kv_near_rows_shape(pq->near), q, pq->runs,
                                 pq->run_begin, out, is_merged ? pq->lse : NULL);
    if (is_merged)
        merge_found(pq, found, out);
    /* The answer's memory is used again at once. */
    return pq->device->row->sync(pq->device);
}

/* How the store is to answer a query for k rows: more than a message takes are fetched by their
 * ids. */
static enum kv_answer answer_for(const struct pqcache *pq, uint32_t k)
{
    if (is_attended_there(&pq->options))
        return KV_ANSWER_ATTEND;
    return pq->options.answer == KV_FORM_IDS || k * pq->row_bytes > MESSAGE_BYTES
               ? KV_ANSWER_IDS
               : KV_ANSWER_ROWS;
}

static kv_status_t begin_query(struct pqcache *pq,
                               uint32_t layer,
                               const struct kv_budget *budget,
                               const struct kv_device_buffer *q,
                               struct kv_op **ret_op)
{
    const struct kv_model_params *params = &pq->setup.model->params;
    const struct kv_range middle = {budget->sinks, budget->window_begin};
    const struct kv_rows_io io = {.buffer = pq->landing};
    struct kv_query query = {
        .layer = layer,
        .n_queries = group_of(pq),
        .queries = pq->q,
        .scale = 1 / sqrtf((float)pq->d),
        .merge = KV_MERGE_SUM,
        .k = smaller(budget->k, KV_CHOSEN_MAX),
        .rerank = pq->rerank[layer],
        .rest = pq->options.rest,
        .n_ranges = 1,
        .ranges = &middle,
    };
    kv_status_t status;

    query.answer = pq->answer = answer_for(pq, query.k);
    pq->device->row->read(q, 0, pq->q, (size_t)params->n_q_heads * pq->d * sizeof(pq->q[0]));
    if (pq->answer == KV_ANSWER_ROWS && pq->held != NULL)
        kv_held_blocks_list(pq->held, layer, &query.n_held, &query.held);
    status =
        kv_query_begin(kv_store_session_handle(pq->store), &query,
                       pq->answer == KV_ANSWER_ROWS ? &io : NULL, QUERY_DEADLINE_MS, ret_op);
    return kv_store_session_fail(pq->store, status);
}

static kv_status_t step_layer(struct pqcache *pq,
                              uint32_t layer,
                              uint32_t token,
                              const struct kv_device_buffer *q,
                              struct kv_device_buffer *out)
{
    const struct kv_budget budget =
        kv_budget_of(&pq->options.budget, kv_layer_index_prompt_rows(pq->index), token + 1);
    struct kv_op *op = NULL;
    kv_status_t status;

    if (budget.k == 0 || budget.window_begin == budget.sinks)
        return attend_found(pq, layer, &budget, NULL, q, out);
    status = kv_layer_index_await(pq->index, layer);
    if (status == KV_OK)
        status = begin_query(pq, layer, &budget, q, &op);
    if (status != KV_OK)
        return status;
    status = wait_for(pq, op, KV_TRACE_QUERY, layer);
    if (status == KV_OK)
        status = attend_found(pq, layer, &budget, op, q, out);
    kv_op_free(op);
    if (status == KV_OK && pq->held != NULL)
        status = kv_held_blocks_end(pq->held, layer, budget.window_begin);
    return status;
}

/* Before the first layer of a pass: the rows that it needs, where it needs them. */
static kv_status_t begin_pass(struct pqcache *pq, enum kv_phase phase, uint32_t token_begin)
{
    const struct kv_budget_options *options = &pq->options.budget;
    kv_status_t status = KV_OK;

    if (phase == KV_PREFILL)
        return kv_near_rows_whole(pq->near, token_begin, &pq->wait_us);
    if (kv_layer_index_prompt_rows(pq->index) == 0)
        status = kv_layer_index_end_prompt(pq->index);
    if (status != KV_OK)
        return status;
    const struct kv_budget budget =
        kv_budget_of(options, kv_layer_index_prompt_rows(pq->index), token_begin + 1);
    const uint32_t window = options->window == KV_WINDOW_HALF
                                ? budget.n_rows - budget.window_begin
                                : options->window;
    return kv_near_rows_narrow(pq->near, smaller(options->sinks, pq->setup.capacity),
                               smaller(window, pq->setup.capacity), token_begin, &pq->wait_us);
}

static kv_status_t pqcache_attend(struct kv_attention *attention,
                                  enum kv_phase phase,
                                  uint32_t layer,
                                  uint32_t token_begin,
                                  uint32_t n,
                                  const struct kv_device_buffer *q,
                                  const struct kv_device_buffer *k,
                                  const struct kv_device_buffer *v,
                                  struct kv_device_buffer *out)
{
    struct pqcache *pq = pqcache_of(attention);
    const struct kv_rows_shape *shape = kv_near_rows_shape(pq->near);
    const uint64_t possible = kv_attention_rows_possible(shape, token_begin, n);
    kv_status_t status = layer == 0 ? begin_pass(pq, phase, token_begin) : KV_OK;

    if (status == KV_OK)
        status = kv_near_rows_put(pq->near, phase, layer, token_begin, n, k, v);
    if (status != KV_OK)
        return status;
    pq->rows_possible += possible;
    if (phase == KV_DECODE)
        return step_layer(pq, layer, token_begin, q, out);

    status = kv_layer_index_rows(pq->index, layer, token_begin + n);
    if (status != KV_OK)
        return status;
    pq->device->row->rows_attend(pq->device, shape, q, kv_near_rows_all(pq->near, layer),
                                 token_begin, n, out);
    pq->rows_attended += possible;
    return kv_store_session_poll(pq->store);
}

static kv_status_t pqcache_passed(struct kv_attention *attention,
                                  enum kv_phase phase,
                                  uint32_t token_begin,
                                  uint32_t n)
{
    struct pqcache *pq = pqcache_of(attention);
    kv_status_t status = kv_store_session_passed(pq->store, phase, token_begin);

    if (status == KV_OK)
        status = kv_layer_index_passed(pq->index, phase, token_begin + n);
    return status;
}

/* ---- the method's table ------------------------------------------------------------------ */

static void
pqcache_expect(struct kv_attention *attention, uint32_t prompt_end, uint32_t n_steps)
{
    kv_layer_index_expect(pqcache_of(attention)->index, prompt_end, n_steps);
}

/* Everything that was begun for rows that go away. */
static kv_status_t settle(struct pqcache *pq)
{
    const kv_status_t status = kv_store_session_flush(pq->store);

    return status == KV_OK ? kv_layer_index_settle(pq->index) : status;
}

/* The session has only so many rows any more, or another one of as many takes its place. */
static kv_status_t go_back(struct pqcache *pq, uint32_t tokens)
{
    kv_near_rows_truncate(pq->near, tokens);
    kv_layer_index_truncate(pq->index, tokens);
    return pq->held != NULL ? kv_held_blocks_truncate(pq->held, tokens) : KV_OK;
}

static kv_status_t pqcache_truncate(struct kv_attention *attention, uint32_t tokens)
{
    struct pqcache *pq = pqcache_of(attention);
    kv_status_t status = settle(pq);

    if (status == KV_OK)
        status = go_back(pq, tokens);
    if (status == KV_OK)
        status = kv_store_session_truncate(pq->store, tokens);
    return status;
}

static kv_status_t pqcache_branch(struct kv_attention *attention, uint32_t tokens)
{
    struct pqcache *pq = pqcache_of(attention);
    kv_status_t status = settle(pq);

    if (status == KV_OK)
        status = go_back(pq, tokens);
    if (status == KV_OK)
        status = kv_store_session_branch(pq->store, tokens);
    return status;
}

static kv_status_t pqcache_unbranch(struct kv_attention *attention, uint32_t tokens)
{
    struct pqcache *pq = pqcache_of(attention);
    kv_status_t status = settle(pq);

    if (status == KV_OK)
        status = go_back(pq, tokens);
    if (status == KV_OK)
        status = kv_store_session_unbranch(pq->store);
    return status;
}

/* What the codes and summaries are made with cannot be changed: rows that have them keep them;
 * a step may ask for no summaries.  What memory there is for follows from the answer's form. */
static kv_status_t pqcache_retune(struct kv_attention *attention,
                                  const struct kv_attention_options *options)
{
    struct pqcache *pq = pqcache_of(attention);
    const struct kv_attention_options *now = &pq->options;

    if (options->seed != now->seed || options->chapter_blocks != now->chapter_blocks ||
        options->subspaces != now->subspaces || options->bits != now->bits ||
        options->iterations != now->iterations ||
        (options->rest != 0 && options->rest != pq->setup.options.rest) ||
        options->answer != now->answer || options->cache != now->cache ||
        options->cache_tokens != now->cache_tokens)
        return KV_UNSUPPORTED;
    pq->options = *options;
    kv_layer_index_wait(pq->index, options->wait_index);
    for (uint32_t i = 0; i < pq->n_layers; i++)
        pq->rerank[i] = options->rerank > 0 ? options->rerank : RERANK_USUAL;
    return KV_OK;
}

static kv_status_t pqcache_flush(struct kv_attention *attention)
{
    return kv_store_session_flush(pqcache_of(attention)->store);
}

static void pqcache_idle(struct kv_attention *attention)
{
    kv_store_session_poll(pqcache_of(attention)->store);
}

static const char *pqcache_detail(const struct kv_attention *attention)
{
    return kv_store_session_detail(((const struct pqcache *)attention)->store);
}

static void pqcache_stats(const struct kv_attention *attention,
                          struct kv_attention_stats *ret_stats)
{
    const struct pqcache *pq = (const struct pqcache *)attention;

    *ret_stats = pq->told;
    ret_stats->bytes_put = kv_store_session_bytes_put(pq->store);
    ret_stats->bytes_fetched = pq->bytes_fetched;
    if (pq->held != NULL)
        ret_stats->bytes_fetched += kv_held_blocks_bytes_fetched(pq->held);
    ret_stats->rows_attended = pq->rows_attended;
    ret_stats->rows_possible = pq->rows_possible;
    ret_stats->rows_recalled = (uint64_t)(pq->told.recall_sum * 1000);
    ret_stats->rows_to_recall = pq->told.recall_count * 1000;
    kv_layer_index_stats(pq->index, ret_stats);
    ret_stats->exposed_wait_s = (double)pq->wait_us / 1e6 + ret_stats->index_wait_s +
                                kv_store_session_wait_s(pq->store);
}

const struct kv_attention_row kv_attention_pqcache = {
    .name = "pqcache",
    .summary = "a step attends to sinks, window and the k rows that the store finds",
    .has_budget = true,
    .has_seed = true,
    .has_index = true,
    .create = pqcache_create,
    .destroy = pqcache_destroy,
    .attend = pqcache_attend,
    .passed = pqcache_passed,
    .expect = pqcache_expect,
    .retune = pqcache_retune,
    .branch = pqcache_branch,
    .unbranch = pqcache_unbranch,
    .truncate = pqcache_truncate,
    .flush = pqcache_flush,
    .idle = pqcache_idle,
    .detail = pqcache_detail,
    .stats = pqcache_stats,
};
