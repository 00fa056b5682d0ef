/* The control speculated: what pqcache would lose if a node scored a guess of a layer's query, made
 * before the query is there, so that only reranking and attention were left for the true one
 * (InfiniGen, arXiv:2406.19707, section 4.3).
 *
 *   guess     the layer's query as it would be if an earlier state of the token were already the
 *             layer's input (enum kvw_speculate): its norm, its projection, its rotation.  A query
 *             with it asks the nodes for candidates by their codes, as many as pqcache would take.
 *             Layer 0 has no earlier state, and the first layers change much (--speculate-first):
 *             these ask with their own query
 *   answer    the true query scores these candidates exactly, and attends to the best k
 *
 * All rows are in memory: that is where candidates are scored, so nothing of it is on the wire, and
 * recall is counted for each step that the baselines count.  Reranking is by keys also where a node
 * would use copies of 4 bits. */
#include "gpu-worker/attention/baselines_private.h"

#include "gpu-worker/attention/rerank.h"
#include "gpu-worker/base/time.h"
#include "gpu-worker/kvcache/index_schedule.h"
#include "gpu-worker/kvcache/session.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    QUERY_DEADLINE_MS = 10000,
    IN_FLIGHT = 2, /* a layer's question may be out when the next one's is asked */
};

/* What is asked for a layer, before or when its query is there. */
struct question {
    struct kv_op *op; /* NULL: none is out */
    float *q;         /* (n_q_heads, d): the guess, or the query if there is none */
};

struct speculated {
    struct kvw_baseline rows; /* the first member, as of all methods */
    struct kvw_index_schedule *index;
    uint32_t n_layers, n_q_heads, n_kv_heads, d;
    struct question questions[IN_FLIGHT]; /* by layer */
    float *q;                             /* (n_q_heads, d): the query */
    struct kvw_event *here;               /* a query is in memory */
    float *scores;                        /* (group, candidates) of a head */

    double *cosines; /* (n_layers) sums since the options were set */
    uint64_t n_cosines;
    double waited_s, index_waited_s;
    struct kvw_method_stats counted; /* of what nodes report */
};

static struct speculated *speculated_of(struct kvw_method *attention)
{
    return (struct speculated *)attention;
}

static struct question *question_of(struct speculated *spec, uint32_t layer)
{
    return &spec->questions[layer % IN_FLIGHT];
}

static void forget_questions(struct speculated *spec)
{
    for (unsigned i = 0; i < IN_FLIGHT; i++) {
        kv_op_free(spec->questions[i].op);
        spec->questions[i].op = NULL;
    }
}

/* ---- questions ---- */

/* As pqcache's of the same options. */
static uint32_t candidates_of(const struct speculated *spec, const struct kvw_budget *budget)
{
    const struct kvw_method_options *options = &spec->rows.options;
    const bool has_cut = options->first_cut != KV_CUT_NONE;
    const uint32_t middle = budget->window_begin - budget->sinks;
    uint64_t factor = has_cut ? options->candidates : kvw_method_rerank(options);

    if (factor == KVW_ADAPTED) /* there are no estimates to adapt to */
        factor = has_cut ? KVW_CANDIDATES_USUAL : KVW_RERANK_USUAL;
    return factor * budget->k < middle ? (uint32_t)factor * budget->k : middle;
}

/* Asks for the candidates of question->q. */
static kv_status_t begin_question(struct speculated *spec,
                                  struct question *question,
                                  uint32_t layer,
                                  const struct kvw_budget *budget)
{
    const struct kv_range middle = {budget->sinks, budget->window_begin};
    const struct kv_query query = {
        .layer = layer,
        .n_queries = spec->n_q_heads / spec->n_kv_heads,
        .queries = question->q,
        .scale = 1 / sqrtf((float)spec->d),
        .merge = KV_MERGE_SUM,
        .answer = KV_ANSWER_IDS,
        .k = candidates_of(spec, budget),
        .rerank = 1,
        .n_ranges = 1,
        .ranges = &middle,
    };
    kv_status_t status;

    if (budget->k == 0 || middle.begin == middle.end)
        return KV_OK;
    if (query.k > KV_SELECTED_MAX)
        return kvw_session_refuse(spec->rows.base.session, KV_TOO_LARGE,
                                  "speculated: candidates: %u: at most %u", query.k,
                                  KV_SELECTED_MAX);
    status = kvw_index_schedule_await(spec->index, layer, &spec->index_waited_s);
    if (status == KV_OK)
        status = kv_query_begin(kvw_session_handle(spec->rows.base.session), &query, NULL,
                                QUERY_DEADLINE_MS, &question->op);
    return kvw_session_fail(spec->rows.base.session, status);
}

static struct kvw_budget budget_of(const struct speculated *spec, uint32_t token)
{
    return kvw_budget_of(&spec->rows.options.budget, spec->rows.prompt_rows, token + 1);
}

/* Brings a query to memory. */
static void take_query(struct speculated *spec, const struct kvw_device_buffer *q, float *ret_q)
{
    struct kvw_device *device = spec->rows.device;

    kvw_device_read(device, KVW_STREAM_COMPUTE, q, 0, ret_q,
                    (size_t)spec->n_q_heads * spec->d * sizeof(float));
    device->ops->event_record(device, KVW_STREAM_COMPUTE, spec->here);
    device->ops->event_wait(spec->here);
}

static bool is_guessed(const struct speculated *spec, uint32_t layer)
{
    return spec->rows.options.speculate != KVW_SPECULATE_NONE &&
           layer >= spec->rows.options.speculate_first;
}

static kv_status_t speculated_guess(struct kvw_method *attention,
                                    uint32_t layer,
                                    uint32_t token,
                                    const struct kvw_device_buffer *q)
{
    struct speculated *spec = speculated_of(attention);
    struct question *question = question_of(spec, layer);
    const struct kvw_budget budget = budget_of(spec, token);

    if (!is_guessed(spec, layer))
        return KV_OK;
    take_query(spec, q, question->q);
    return begin_question(spec, question, layer, &budget);
}

static double inner_product(const float *a, const float *b, uint32_t d)
{
    double sum = 0;

    for (uint32_t i = 0; i < d; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

/* How far the guess points where the query does. */
static void count_cosines(struct speculated *spec, uint32_t layer, const float *guess)
{
    for (uint32_t head = 0; head < spec->n_q_heads; head++) {
        const float *a = guess + (size_t)head * spec->d, *b = spec->q + (size_t)head * spec->d;
        const double lengths =
            sqrt(inner_product(a, a, spec->d) * inner_product(b, b, spec->d));

        spec->cosines[layer] += lengths > 0 ? inner_product(a, b, spec->d) / lengths : 0;
    }
    spec->n_cosines += layer == 0 ? spec->n_q_heads : 0;
}

static kv_status_t speculated_ask(struct kvw_method *attention,
                                  uint32_t layer,
                                  uint32_t token,
                                  const struct kvw_device_buffer *q)
{
    struct speculated *spec = speculated_of(attention);
    struct question *question = question_of(spec, layer);
    const struct kvw_budget budget = budget_of(spec, token);
    kv_status_t status = KV_OK;

    if (layer == 0 && kvw_index_schedule_prompt_rows(spec->index) == 0)
        status = kvw_index_schedule_end_prompt(spec->index);
    take_query(spec, q, spec->q);
    if (status == KV_OK && !is_guessed(spec, layer)) {
        memcpy(question->q, spec->q, (size_t)spec->n_q_heads * spec->d * sizeof(float));
        status = begin_question(spec, question, layer, &budget);
    }
    count_cosines(spec, layer, question->q);
    return status;
}

/* ---- answers ---- */

static kv_status_t await_answer(struct speculated *spec, struct kv_op *op)
{
    const uint64_t begin_us = kvw_now_us();
    const kv_status_t status = kv_wait(op);
    struct kv_query_result found;

    spec->waited_s += kvw_seconds_since(begin_us);
    for (uint32_t head = 0; head < spec->n_kv_heads; head++) {
        if (kv_op_query_result(op, head, &found) != KV_OK)
            break;
        spec->counted.rows_scored_by_code += found.n_scored_by_code;
        spec->counted.rows_scored_by_key += found.n_scored_by_key;
        spec->counted.rows_reranked += found.n_ids;
    }
    return kvw_session_fail(spec->rows.base.session, status);
}

/* The best of the candidates by their exact scores, which are gathered: others need these, too. */
static void choose_of_candidates(struct kvw_baseline *baseline,
                                 const struct kvw_budget *budget,
                                 uint32_t layer,
                                 uint32_t head,
                                 uint32_t *ret_ids)
{
    struct speculated *spec = (struct speculated *)baseline;
    const uint32_t group = spec->n_q_heads / spec->n_kv_heads;
    const uint32_t n = budget->window_begin - budget->sinks;
    struct kv_query_result found;

    if (budget->k == 0)
        return;
    kv_op_query_result(question_of(spec, layer)->op, head, &found);
    spec->counted.rows_to_choose_from += n;
    for (uint32_t g = 0; g < group; g++) {
        const float *of_head = baseline->scores_host + (size_t)(head * group + g) * n;

        for (uint32_t i = 0; i < found.n_ids; i++)
            spec->scores[(size_t)g * found.n_ids + i] = of_head[found.ids[i] - budget->sinks];
    }
    kvw_baseline_choose_best(baseline, spec->scores, found.n_ids, budget->k, ret_ids);
    for (uint32_t i = 0; i < budget->k; i++)
        ret_ids[i] = found.ids[ret_ids[i]];
}

static kv_status_t speculated_attend(struct kvw_method *attention,
                                     enum kvw_phase phase,
                                     uint32_t layer,
                                     uint32_t token_begin,
                                     uint32_t n,
                                     const struct kvw_device_buffer *q,
                                     const struct kvw_device_buffer *k,
                                     const struct kvw_device_buffer *v,
                                     struct kvw_device_buffer *out)
{
    struct speculated *spec = speculated_of(attention);
    struct question *question = question_of(spec, layer);
    kv_status_t status = KV_OK;

    if (question->op != NULL)
        status = await_answer(spec, question->op);
    if (status == KV_OK)
        status = kvw_baseline_attend(attention, phase, layer, token_begin, n, q, k, v, out);
    if (status == KV_OK && phase == KVW_PREFILL)
        status = kvw_index_schedule_rows(spec->index, layer, token_begin + n);
    if (status != KV_OK) {
        forget_questions(spec);
        return status;
    }
    kv_op_free(question->op);
    question->op = NULL;
    return KV_OK;
}

/* ---- the method's table ---- */

static void speculated_destroy(struct kvw_method *attention)
{
    struct speculated *spec = speculated_of(attention);

    forget_questions(spec);
    kvw_index_schedule_destroy(spec->index);
    spec->rows.device->ops->event_destroy(spec->here);
    for (unsigned i = 0; i < IN_FLIGHT; i++)
        free(spec->questions[i].q);
    free(spec->q);
    free(spec->scores);
    free(spec->cosines);
    kvw_baseline_close(&spec->rows);
    free(spec);
}

/* The nodes keep codes and nothing else: reranking is done here. */
static void use_options(struct speculated *spec, const struct kvw_method_options *options)
{
    spec->rows.options = *options;
    spec->rows.options.index.copies = false;
    spec->rows.options.index.summaries = 0;
    spec->rows.base.speculate = options->speculate;
    memset(spec->cosines, 0, spec->n_layers * sizeof(spec->cosines[0]));
    spec->n_cosines = 0;
}

static kv_status_t speculated_create(const struct kvw_method_setup *setup,
                                     struct kvw_method **ret_attention,
                                     char *detail,
                                     size_t detail_bytes)
{
    const struct kvw_model_params *params = &setup->session.model->params;
    const size_t q_floats = (size_t)params->n_q_heads * params->d;
    struct speculated *spec = calloc(1, sizeof(*spec));
    kv_status_t status;

    if (spec == NULL) {
        snprintf(detail, detail_bytes, "out of memory: method");
        return KV_NO_MEMORY;
    }
    spec->n_layers = params->n_layers;
    spec->n_q_heads = params->n_q_heads;
    spec->n_kv_heads = params->n_kv_heads;
    spec->d = params->d;
    spec->rows.choose = choose_of_candidates;
    spec->rows.needs_scores = true;
    status =
        kvw_baseline_open(&spec->rows, setup, &kvw_method_speculated, detail, detail_bytes);
    if (status == KV_OK) {
        snprintf(detail, detail_bytes, "out of memory: candidates");
        spec->q = malloc(q_floats * sizeof(spec->q[0]));
        spec->scores = malloc((size_t)params->n_q_heads / params->n_kv_heads * KV_SELECTED_MAX *
                              sizeof(spec->scores[0]));
        spec->cosines = malloc(spec->n_layers * sizeof(spec->cosines[0]));
        for (unsigned i = 0; i < IN_FLIGHT; i++)
            spec->questions[i].q = malloc(q_floats * sizeof(float));
        status = spec->q != NULL && spec->scores != NULL && spec->cosines != NULL &&
                         spec->questions[0].q != NULL && spec->questions[1].q != NULL
                     ? spec->rows.device->ops->event_create(spec->rows.device, &spec->here)
                     : KV_NO_MEMORY;
    }
    if (status == KV_OK) {
        use_options(spec, &setup->options);
        status = kvw_index_schedule_create(&setup->session, spec->rows.base.session,
                                           &spec->rows.options.index, setup->options.seed,
                                           &spec->index);
    }
    if (status != KV_OK) {
        speculated_destroy(&spec->rows.base);
        return status;
    }
    *ret_attention = &spec->rows.base;
    return KV_OK;
}

static kv_status_t speculated_end_pass(struct kvw_method *attention,
                                       enum kvw_phase phase,
                                       uint32_t token_begin,
                                       uint32_t n)
{
    const kv_status_t status = kvw_baseline_end_pass(attention, phase, token_begin, n);

    if (status != KV_OK)
        return status;
    return kvw_index_schedule_end_pass(speculated_of(attention)->index, phase, token_begin + n);
}

static void
speculated_prompt_hint(struct kvw_method *attention, uint32_t prompt_end, uint32_t n_steps)
{
    kvw_index_schedule_prompt_hint(speculated_of(attention)->index, prompt_end, n_steps);
}

static kv_status_t speculated_rewind(struct kvw_method *attention, uint32_t tokens)
{
    struct speculated *spec = speculated_of(attention);
    kv_status_t status = kvw_session_flush(attention->session);

    forget_questions(spec);
    if (status == KV_OK)
        status = kvw_index_schedule_settle(spec->index);
    if (status != KV_OK)
        return status;
    kvw_index_schedule_truncate(spec->index, tokens);
    return kvw_baseline_rewind(attention, tokens);
}

/* Rows that have codes keep them. */
static kv_status_t speculated_set_options(struct kvw_method *attention,
                                          const struct kvw_method_options *options)
{
    struct speculated *spec = speculated_of(attention);
    const struct kvw_method_options *now = &spec->rows.options;
    const struct kvw_index_options *index = &options->index;

    if (options->seed != now->seed || index->chapter_blocks != now->index.chapter_blocks ||
        index->subspaces != now->index.subspaces || index->bits != now->index.bits ||
        index->rotates != now->index.rotates || index->iterations != now->index.iterations)
        return KV_UNSUPPORTED;
    use_options(spec, options);
    kvw_index_schedule_wait(spec->index, index->wait);
    return KV_OK;
}

static void speculated_stats(const struct kvw_method *attention, struct kvw_method_stats *stats)
{
    const struct speculated *spec = (const struct speculated *)attention;
    struct kvw_index_stats index;

    kvw_baseline_stats(attention, stats);
    kvw_index_schedule_stats(spec->index, &index);
    stats->codebooks_trained = index.codebooks_trained;
    stats->codebooks_found = index.codebooks_found;
    stats->index_wait_s = index.wait_s;
    stats->waits.index_s = index.wait_s;
    stats->waits.node_s = spec->waited_s;
    stats->rows_to_choose_from = spec->counted.rows_to_choose_from;
    stats->rows_scored_by_code = spec->counted.rows_scored_by_code;
    stats->rows_scored_by_key = spec->counted.rows_scored_by_key;
    stats->rows_reranked = spec->counted.rows_reranked;
    stats->guess_cosines = spec->cosines;
    stats->n_guess_cosines = spec->n_cosines;
}

static bool
speculated_is_ready(struct kvw_method *attention, enum kvw_phase phase, uint32_t tokens)
{
    return kvw_index_schedule_is_ready(speculated_of(attention)->index, phase, tokens);
}

static void speculated_quit(struct kvw_method *attention)
{
    forget_questions(speculated_of(attention));
    kvw_index_schedule_give_up(speculated_of(attention)->index);
}

const struct kvw_method_ops kvw_method_speculated = {
    .name = "speculated",
    .summary = "as pqcache without summaries, but its candidates are those of a guess of the "
               "query: a control",
    .has_budget = true,
    .has_seed = true,
    .has_index = true,
    .has_rows = true,
    .create = speculated_create,
    .destroy = speculated_destroy,
    .guess = speculated_guess,
    .ask = speculated_ask,
    .attend = speculated_attend,
    .end_pass = speculated_end_pass,
    .prompt_hint = speculated_prompt_hint,
    .is_ready = speculated_is_ready,
    .quit = speculated_quit,
    .set_options = speculated_set_options,
    .rewind = speculated_rewind,
    .row_bytes = kvw_baseline_row_bytes,
    .stats = speculated_stats,
};
