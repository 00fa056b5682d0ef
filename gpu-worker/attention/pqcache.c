/* The method pqcache: a decode step attends to sinks, a window, and the rows between them that
 * the store finds by product-quantized keys (PQCache).
 *
 *   prompt   attends to all earlier rows, so all rows are on the device.  Each layer's rows are
 *            sent to the store while the next layer computes; after the last rows of a chapter
 *            are sent, its index is requested.
 *   step     the device holds sinks and window.  For each layer: as soon as the query vector is
 *            there, a query asks for selected rows that the worker lacks, or for the attention
 *            output over the selected rows with an estimate of the others.  While it is out, the
 *            token's key and value are computed and sent, and sinks and window are attended to.
 *            Then selected rows, in token order; both are merged.
 *
 * Selected rows are attended to in token order wherever they come from, so a block cache changes
 * the traffic and no bit of the result.  Attention outputs of nodes are merged at a fixed point and
 * in a fixed order, whichever node they come from. */
#include "gpu-worker/attention/pqcache_private.h"

#include <stdio.h>
#include <stdlib.h>

static struct kvw_pqcache *pqcache_of(struct kvw_method *attention)
{
    return (struct kvw_pqcache *)attention;
}

/* ---- creation ---------------------------------------------------------------------------- */

static void pqcache_destroy(struct kvw_method *attention)
{
    struct kvw_pqcache *pq = pqcache_of(attention);

    if (pq->cached != NULL)
        kvw_block_cache_check(pq->cached);
    kvw_pqcache_forget_question(pq);
    kvw_index_schedule_destroy(pq->index);
    free(pq->rerank);
    free(pq->layer_wait_s);
    /* Otherwise a node that is still sending would consider the client lost. */
    if (pq->cached != NULL && kvw_session_detail(pq->base.session)[0] == '\0')
        kvw_block_cache_truncate(pq->cached, 0);
    kvw_block_cache_destroy(pq->cached);
    kvw_device_rows_destroy(pq->device_rows);
    kvw_session_destroy(pq->base.session);
    pq->device->ops->buffer_destroy(pq->landed);
    /* A buffer in quarantine is freed with its client. */
    kv_buffer_free(pq->landing);
    pq->device->ops->event_destroy(pq->computed);
    pq->device->ops->event_destroy(pq->here);
    pq->device->ops->event_destroy(pq->attended);
    pq->device->ops->buffer_destroy(pq->lse);
    pq->device->ops->buffer_destroy(pq->found_lse);
    pq->device->ops->buffer_destroy(pq->found_out);
    free(pq->outputs);
    free(pq->lses);
    free(pq->q);
    free(pq->fetch_ids);
    free(pq->fetch_n);
    free(pq->runs);
    free(pq->run_begin);
    free(pq);
}

/* The most rows of each kv head that a step may fetch. */
static uint32_t rows_max(const struct kvw_method_setup *setup)
{
    return kvw_method_returns_outputs(&setup->options)
               ? 0
               : kvw_pqcache_smaller(setup->session.capacity, KV_SELECTED_MAX);
}

static kv_status_t query_memory(struct kvw_pqcache *pq)
{
    const struct kvw_model_params *params = &pq->setup.session.model->params;
    const size_t n_rows = params->n_kv_heads * (size_t)rows_max(&pq->setup);
    const size_t output_floats = (size_t)params->n_q_heads * pq->d;
    kv_status_t status;

    pq->q = malloc(output_floats * sizeof(pq->q[0]));
    pq->outputs = malloc(output_floats * sizeof(pq->outputs[0]));
    pq->lses = malloc(params->n_q_heads * sizeof(pq->lses[0]));
    pq->fetch_ids = malloc((n_rows + 1) * sizeof(pq->fetch_ids[0]));
    pq->fetch_n = malloc(params->n_kv_heads * sizeof(pq->fetch_n[0]));
    /* Selected rows, sinks, and a window that may begin in the middle of the ring. */
    pq->runs = malloc((n_rows + 4 * params->n_kv_heads) * sizeof(pq->runs[0]));
    pq->run_begin = malloc((params->n_kv_heads + 1) * sizeof(pq->run_begin[0]));
    if (pq->q == NULL || pq->outputs == NULL || pq->lses == NULL || pq->fetch_ids == NULL ||
        pq->fetch_n == NULL || pq->runs == NULL || pq->run_begin == NULL)
        return KV_NO_MEMORY;
    status = pq->device->ops->event_create(pq->device, &pq->computed);
    if (status == KV_OK)
        status = pq->device->ops->event_create(pq->device, &pq->here);
    if (status == KV_OK)
        status = pq->device->ops->event_create(pq->device, &pq->attended);
    if (status == KV_OK)
        status = pq->device->ops->buffer_create(
            pq->device, params->n_q_heads * sizeof(pq->lses[0]), &pq->lse);
    if (status == KV_OK)
        status = pq->device->ops->buffer_create(
            pq->device, params->n_q_heads * sizeof(pq->lses[0]), &pq->found_lse);
    if (status == KV_OK)
        status = pq->device->ops->buffer_create(
            pq->device, output_floats * sizeof(pq->outputs[0]), &pq->found_out);
    if (status != KV_OK || n_rows == 0)
        return status;
    status = kv_buffer_alloc(pq->setup.session.client, n_rows * pq->row_bytes, &pq->landing);
    if (status == KV_OK)
        status = pq->device->ops->buffer_wrap(pq->device, kv_buffer_data(pq->landing),
                                              kv_buffer_bytes(pq->landing), &pq->landed);
    return status;
}

static kv_status_t pqcache_create(const struct kvw_method_setup *setup,
                                  struct kvw_method **ret_attention,
                                  char *detail,
                                  size_t detail_bytes)
{
    const struct kvw_model_params *params = &setup->session.model->params;
    const struct kvw_method_options *options = &setup->options;
    struct kvw_pqcache *pq = calloc(1, sizeof(*pq));
    kv_status_t status;

    snprintf(detail, detail_bytes, "out of memory: %u tokens", setup->session.capacity);
    if (pq == NULL)
        return KV_NO_MEMORY;
    pq->base.ops = &kvw_method_pqcache;
    pq->setup = *setup;
    pq->setup.session.share = NULL; /* the caller's, who may free it now */
    pq->options = *options;
    pq->device = setup->session.model->device;
    pq->n_layers = params->n_layers;
    pq->d = params->d;
    pq->row_bytes = (size_t)2 * params->d * kv_dtype_bytes(setup->session.dtype);
    if (params->d % options->index.subspaces != 0) {
        snprintf(detail, detail_bytes, "pq-m: %u: must divide the head dimension, %u",
                 options->index.subspaces, params->d);
        pqcache_destroy(&pq->base);
        return KV_INVALID;
    }
    if (kvw_method_conflict(options) != NULL) {
        snprintf(detail, detail_bytes, "%s", kvw_method_conflict(options));
        pqcache_destroy(&pq->base);
        return KV_INVALID;
    }
    pq->rerank = malloc(pq->n_layers * sizeof(pq->rerank[0]));
    pq->layer_wait_s = calloc(pq->n_layers, sizeof(pq->layer_wait_s[0]));
    status = pq->rerank == NULL || pq->layer_wait_s == NULL ? KV_NO_MEMORY : query_memory(pq);
    for (uint32_t i = 0; status == KV_OK && i < pq->n_layers; i++)
        kvw_rerank_begin(&pq->rerank[i], kvw_pqcache_usual(pq));
    if (status == KV_OK)
        status = kvw_session_create(&setup->session, &pq->base.session, detail, detail_bytes);
    if (status == KV_OK)
        status = kvw_device_rows_create(&setup->session, pq->base.session, &pq->device_rows);
    if (status == KV_OK)
        status = kvw_index_schedule_create(&setup->session, pq->base.session, &options->index,
                                           options->seed, &pq->index);
    if (status == KV_OK && options->cache != KVW_CACHE_OFF &&
        !kvw_method_returns_outputs(options))
        status = kvw_block_cache_create(&setup->session, pq->base.session,
                                        options->cache == KVW_CACHE_LFU ? KVW_BLOCKS_LFU
                                                                        : KVW_BLOCKS_LRU,
                                        options->cache_tokens, &pq->cached);
    if (status != KV_OK) {
        pqcache_destroy(&pq->base);
        return status;
    }
    *ret_attention = &pq->base;
    return KV_OK;
}

/* ---- a pass ------------------------------------------------------------------------------ */

/* Before the first layer of a pass: puts the rows that it needs on the device. */
static kv_status_t
begin_pass(struct kvw_pqcache *pq, enum kvw_phase phase, uint32_t token_begin)
{
    const struct kvw_budget_options *options = &pq->options.budget;
    kv_status_t status = KV_OK;

    if (phase == KVW_PREFILL)
        return kvw_device_rows_full(pq->device_rows, token_begin, &pq->rows_wait_us);
    if (kvw_index_schedule_prompt_rows(pq->index) == 0)
        status = kvw_index_schedule_end_prompt(pq->index);
    if (status != KV_OK)
        return status;
    const struct kvw_budget budget =
        kvw_budget_of(options, kvw_index_schedule_prompt_rows(pq->index), token_begin + 1);
    const uint32_t window = options->window == KVW_WINDOW_HALF
                                ? budget.n_rows - budget.window_begin
                                : options->window;
    return kvw_device_rows_windowed(
        pq->device_rows, kvw_pqcache_smaller(options->sinks, pq->setup.session.capacity),
        kvw_pqcache_smaller(window, pq->setup.session.capacity), token_begin,
        &pq->rows_wait_us);
}

static kv_status_t pqcache_ask(struct kvw_method *attention,
                               uint32_t layer,
                               uint32_t token,
                               const struct kvw_device_buffer *q)
{
    struct kvw_pqcache *pq = pqcache_of(attention);
    const kv_status_t status = layer == 0 ? begin_pass(pq, KVW_DECODE, token) : KV_OK;

    return status == KV_OK ? kvw_pqcache_ask(pq, layer, token, q) : status;
}

static kv_status_t pqcache_attend(struct kvw_method *attention,
                                  enum kvw_phase phase,
                                  uint32_t layer,
                                  uint32_t token_begin,
                                  uint32_t n,
                                  const struct kvw_device_buffer *q,
                                  const struct kvw_device_buffer *k,
                                  const struct kvw_device_buffer *v,
                                  struct kvw_device_buffer *out)
{
    struct kvw_pqcache *pq = pqcache_of(attention);
    const struct kvw_rows_shape *shape = kvw_device_rows_shape(pq->device_rows);
    const uint64_t possible = kvw_method_rows_possible(shape, token_begin, n);
    kv_status_t status =
        layer == 0 && phase == KVW_PREFILL ? begin_pass(pq, KVW_PREFILL, token_begin) : KV_OK;

    if (status == KV_OK && phase == KVW_DECODE)
        status = kvw_pqcache_send(pq, layer, true);
    if (status == KV_OK)
        status = kvw_device_rows_put(pq->device_rows, phase, layer, token_begin, n, k, v,
                                     &pq->rows_wait_us);
    if (status != KV_OK) {
        kvw_pqcache_forget_question(pq);
        return status;
    }
    pq->rows_possible += possible;
    if (phase == KVW_DECODE)
        return kvw_pqcache_answer(pq, layer, q, out);

    status = kvw_index_schedule_rows(pq->index, layer, token_begin + n);
    if (status != KV_OK)
        return status;
    pq->device->ops->rows_attend(
        pq->device, shape, q, kvw_device_rows_all(pq->device_rows, layer), token_begin, n, out);
    pq->rows_attended += possible;
    pq->prompt_rows_attended += possible;
    return kvw_session_poll(pq->base.session);
}

static kv_status_t pqcache_end_pass(struct kvw_method *attention,
                                    enum kvw_phase phase,
                                    uint32_t token_begin,
                                    uint32_t n)
{
    struct kvw_pqcache *pq = pqcache_of(attention);
    const kv_status_t status = kvw_index_schedule_end_pass(pq->index, phase, token_begin + n);

    /* The cost of these is negligible against a step. */
    kvw_device_rows_check(pq->device_rows);
    kvw_index_schedule_check(pq->index);
    return status;
}

/* ---- the method's table ------------------------------------------------------------------ */

static void
pqcache_prompt_hint(struct kvw_method *attention, uint32_t prompt_end, uint32_t n_steps)
{
    kvw_index_schedule_prompt_hint(pqcache_of(attention)->index, prompt_end, n_steps);
}

static bool
pqcache_is_ready(struct kvw_method *attention, enum kvw_phase phase, uint32_t tokens)
{
    return kvw_index_schedule_is_ready(pqcache_of(attention)->index, phase, tokens);
}

static void pqcache_quit(struct kvw_method *attention)
{
    kvw_pqcache_forget_question(pqcache_of(attention));
    kvw_index_schedule_give_up(pqcache_of(attention)->index);
}

static kv_status_t pqcache_rewind(struct kvw_method *attention, uint32_t tokens)
{
    struct kvw_pqcache *pq = pqcache_of(attention);
    kv_status_t status;

    kvw_pqcache_forget_question(pq);
    status = kvw_session_flush(attention->session);
    if (status == KV_OK)
        status = kvw_index_schedule_settle(pq->index);
    if (status != KV_OK)
        return status;
    kvw_device_rows_truncate(pq->device_rows, tokens);
    kvw_index_schedule_truncate(pq->index, tokens);
    return pq->cached != NULL ? kvw_block_cache_truncate(pq->cached, tokens) : KV_OK;
}

/* The parameters of codes and summaries cannot change, because rows that have them keep them; a
 * query may do without summaries.  Buffers were allocated for one form of result and one cache,
 * so these cannot change either. */
static kv_status_t pqcache_set_options(struct kvw_method *attention,
                                       const struct kvw_method_options *options)
{
    struct kvw_pqcache *pq = pqcache_of(attention);
    const struct kvw_method_options *now = &pq->options;
    const struct kvw_index_options *index = &options->index;

    if (kvw_method_conflict(options) != NULL || options->seed != now->seed ||
        index->chapter_blocks != now->index.chapter_blocks ||
        index->subspaces != now->index.subspaces || index->bits != now->index.bits ||
        index->rotates != now->index.rotates || index->copies != now->index.copies ||
        index->iterations != now->index.iterations ||
        (index->summaries != 0 && index->summaries != pq->setup.options.index.summaries) ||
        index->summary_rows != now->index.summary_rows || options->answer != now->answer ||
        options->cache != now->cache || options->cache_tokens != now->cache_tokens)
        return KV_UNSUPPORTED;
    pq->options = *options;
    kvw_index_schedule_wait(pq->index, index->wait);
    for (uint32_t i = 0; i < pq->n_layers; i++)
        kvw_rerank_begin(&pq->rerank[i], kvw_pqcache_usual(pq));
    return KV_OK;
}

static uint64_t pqcache_buffer_bytes(const struct kvw_method_options *options,
                                     const struct kvw_model_params *params,
                                     enum kv_dtype dtype,
                                     uint32_t capacity)
{
    const uint64_t row_bytes = (uint64_t)2 * params->d * kv_dtype_bytes(dtype);
    const uint32_t cached = options->cache != KVW_CACHE_OFF ? options->cache_tokens : 0;

    if (kvw_method_returns_outputs(options))
        return 0;
    return params->n_kv_heads * row_bytes * kvw_pqcache_smaller(capacity, KV_SELECTED_MAX) +
           kvw_method_full_row_bytes(params, dtype,
                                     kvw_pqcache_smaller(cached, capacity + KV_BLOCK_TOKENS));
}

static uint64_t pqcache_row_bytes(const struct kvw_method *attention)
{
    const struct kvw_pqcache *pq = (const struct kvw_pqcache *)attention;

    return kvw_device_rows_bytes(pq->device_rows) +
           (pq->landing != NULL ? kv_buffer_bytes(pq->landing) : 0) +
           (pq->cached != NULL ? kvw_block_cache_bytes(pq->cached) : 0);
}

static void take_all(struct kvw_pqcache *pq)
{
    pq->options.budget.selects_half = false;
    pq->options.first_cut = KV_CUT_NONE;
    pq->options.rerank = KV_CANDIDATES_MAX;
}

/* A control: what is lost by the selection alone, were the codes perfect.  Nodes score all rows by
 * their keys, because all of them are candidates. */
static kv_status_t oracle_rest_create(const struct kvw_method_setup *setup,
                                      struct kvw_method **ret_attention,
                                      char *detail,
                                      size_t detail_bytes)
{
    struct kvw_method_setup of_keys = *setup;
    struct kvw_method *attention;
    kv_status_t status;

    of_keys.options.index.copies = false; /* no query reads them */
    if (setup->session.capacity > KV_CANDIDATES_MAX) {
        snprintf(detail, detail_bytes, "oracle+rest: %u tokens: at most %d",
                 setup->session.capacity, KV_CANDIDATES_MAX);
        return KV_INVALID;
    }
    status = pqcache_create(&of_keys, &attention, detail, detail_bytes);
    if (status != KV_OK)
        return status;
    attention->ops = &kvw_method_oracle_rest;
    take_all(pqcache_of(attention));
    *ret_attention = attention;
    return KV_OK;
}

static kv_status_t oracle_rest_set_options(struct kvw_method *attention,
                                           const struct kvw_method_options *options)
{
    struct kvw_method_options of_keys = *options;
    kv_status_t status;

    of_keys.index.copies = false;
    status = pqcache_set_options(attention, &of_keys);
    take_all(pqcache_of(attention));
    return status;
}

const struct kvw_method_ops kvw_method_oracle_rest = {
    .name = "oracle+rest",
    .summary = "as pqcache, but the k rows are found by exact scores of all keys: a control",
    .has_budget = true,
    .has_seed = true,
    .has_index = true,
    .is_exact = true,
    .create = oracle_rest_create,
    .destroy = pqcache_destroy,
    .ask = pqcache_ask,
    .attend = pqcache_attend,
    .end_pass = pqcache_end_pass,
    .prompt_hint = pqcache_prompt_hint,
    .set_options = oracle_rest_set_options,
    .is_ready = pqcache_is_ready,
    .quit = pqcache_quit,
    .rewind = pqcache_rewind,
    .buffer_bytes = pqcache_buffer_bytes,
    .row_bytes = pqcache_row_bytes,
    .stats = kvw_pqcache_stats,
};

const struct kvw_method_ops kvw_method_pqcache = {
    .name = "pqcache",
    .summary =
        "a step attends to sinks, window and the k rows between them that the store finds",
    .has_budget = true,
    .has_seed = true,
    .has_index = true,
    .create = pqcache_create,
    .destroy = pqcache_destroy,
    .ask = pqcache_ask,
    .attend = pqcache_attend,
    .end_pass = pqcache_end_pass,
    .prompt_hint = pqcache_prompt_hint,
    .set_options = pqcache_set_options,
    .is_ready = pqcache_is_ready,
    .quit = pqcache_quit,
    .rewind = pqcache_rewind,
    .buffer_bytes = pqcache_buffer_bytes,
    .row_bytes = pqcache_row_bytes,
    .stats = kvw_pqcache_stats,
};
