/* eval: what methods lose at a budget, over some texts.
 *
 *   perplexity   the first `from` tokens are computed with full attention, every later one as a
 *                decode step; perplexity is over the tokens that those steps predict.  Losses
 *                are relative to full attention over the same tokens
 *   needles      odd sentences in the text that the model must complete: see needle_test.h
 *   recall       as the method reports it
 *
 * Runs whose stored rows and codes are the same share the prefill: the session is truncated to
 * the first step and given the options of the next run. */
#define _GNU_SOURCE /* strchrnul */
#include "gpu-worker/base/time.h"
#include "gpu-worker/commands/needle_test.h"
#include "gpu-worker/eval/report.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    RECALL_EVERY = 16, /* tokens */
    ANSWER_TOKENS = 64,
    PROGRESS_EVERY = 16,
};

struct text {
    char path[KV_CONFIG_STRING_BYTES];
    uint32_t *tokens;
    uint32_t n_tokens;
    struct kvw_needle_test questions;
};

struct eval {
    struct kvw_context *worker;
    struct kvw_eval_plan plan;
    struct text *texts;
    size_t n_texts;
    uint32_t from;

    const struct text *text; /* the current one */
    const uint32_t *open;    /* the tokens in the worker's session; NULL: none is open */
    struct kvw_eval_result *results; /* (plan.count), for the current text */
    float *logits;
    double *full; /* (n_tokens): log likelihoods by full attention */

    struct kvw_reply reply; /* to the current question */
    struct kvw_sampler *sampler;
};

static bool has_text(const struct eval *eval)
{
    return !eval->worker->options->needles_only;
}

/* ---- sessions ---- */

/* Provides a session of the run's method that holds the first n of `tokens`: that of the
 * previous run if it can be reused, else a new one. */
static int begin_run(struct eval *eval, size_t index, const uint32_t *tokens, uint32_t n)
{
    const struct kvw_planned_run *run = &eval->plan.runs[index];
    struct kvw_context *worker = eval->worker;
    char what[KVW_EVAL_NAME_BYTES + 16];
    kv_status_t status = KV_UNSUPPORTED;
    int outcome;

    if (eval->open == tokens && worker->attention->ops == run->ops &&
        run->ops->set_options != NULL)
        status = run->ops->set_options(worker->attention, &run->options);
    eval->open = NULL;
    if (status == KV_OK) {
        status = kvw_method_truncate(worker->attention, n);
    } else if (status == KV_UNSUPPORTED) {
        outcome = kvw_open_attention(worker, run->ops, &run->options, tokens, n);
        if (outcome != KVW_DONE)
            return outcome;
        snprintf(what, sizeof(what), "%s: prompt", run->method);
        status =
            kvw_prefill(worker, what, tokens, n,
                        eval->text->n_tokens > n ? eval->text->n_tokens - n : ANSWER_TOKENS);
        if (status == KV_OK)
            status = kvw_method_flush(worker->attention);
    }
    if (status == KV_OK)
        eval->open = tokens;
    else if (!kvw_stop)
        kvw_step_error(worker, status);
    return status == KV_OK ? KVW_DONE : KVW_FAILED;
}

/* ---- perplexity ---- */

static double log_likelihood(const float *logits, uint32_t n, uint32_t token)
{
    double most = -INFINITY, sum = 0;

    for (uint32_t i = 0; i < n; i++)
        most = (double)logits[i] > most ? (double)logits[i] : most;
    for (uint32_t i = 0; i < n; i++)
        sum += exp((double)logits[i] - most);
    return (double)logits[token] - most - log(sum);
}

static kv_status_t run_steps(struct eval *eval, size_t index, double *ret_found)
{
    const struct kvw_planned_run *run = &eval->plan.runs[index];
    const uint32_t n_vocabulary = eval->worker->model->params.n_vocabulary;
    const uint32_t end = eval->text->n_tokens - 1; /* the last token has no successor */
    char what[2 * KVW_EVAL_NAME_BYTES + 16];

    snprintf(what, sizeof(what), "%s %s: text", run->method, run->budget);
    for (uint32_t t = eval->from; t < end; t++) {
        kv_status_t status;

        if (kvw_stop)
            return KV_CANCELLED;
        status =
            kvw_forward_step(eval->worker->forward, KVW_DECODE, eval->text->tokens + t, t, 1);
        if (status == KV_OK)
            status = kvw_forward_logits(eval->worker->forward, 0, 1, eval->logits);
        if (status != KV_OK)
            return status;
        ret_found[t] = log_likelihood(eval->logits, n_vocabulary, eval->text->tokens[t + 1]);
        if ((t - eval->from) % PROGRESS_EVERY == 0)
            kvw_progress(what, t - eval->from, end - eval->from);
    }
    return kvw_method_flush(eval->worker->attention);
}

/* Mean and standard error of the loss in log likelihood relative to full attention. */
static void
compare(const struct eval *eval, const double *found, struct kvw_eval_result *ret_result)
{
    const double n = eval->text->n_tokens - 1 - eval->from;
    double sum = 0, squares = 0, total = 0, mean, error;

    for (uint32_t t = eval->from; t < eval->text->n_tokens - 1; t++) {
        total -= found[t];
        sum += eval->full[t] - found[t];
    }
    mean = sum / n;
    for (uint32_t t = eval->from; t < eval->text->n_tokens - 1; t++)
        squares += pow(eval->full[t] - found[t] - mean, 2);
    error = n > 1 ? sqrt(squares / (n - 1) / n) : NAN;
    ret_result->perplexity = exp(total / n);
    ret_result->loss_percent = 100 * expm1(mean);
    ret_result->loss_error_percent = 100 * exp(mean) * error;
}

static double quotient(uint64_t part, uint64_t whole)
{
    return whole > 0 ? (double)part / (double)whole : NAN;
}

/* The cost of the steps, from the method's counters. */
static void take_costs(const struct kvw_method_stats *before,
                       const struct kvw_method_stats *after,
                       double n_steps,
                       struct kvw_eval_result *result)
{
#define STEPS(member) (after->member - before->member)
    const uint64_t candidates = STEPS(rows_to_choose_from);

    result->recall = quotient(STEPS(rows_recalled), STEPS(rows_to_recall));
    result->coded_share = quotient(STEPS(rows_scored_by_code),
                                   STEPS(rows_scored_by_code) + STEPS(rows_scored_by_key));
    result->exact_share =
        quotient(STEPS(rows_scored_by_key) + STEPS(rows_reranked), candidates);
    result->rows_share = quotient(STEPS(rows_attended), STEPS(rows_possible));
    result->exposed_wait_s = STEPS(exposed_wait_s);
    result->bytes_fetched = (double)STEPS(bytes_fetched);
    result->step_bytes = (double)STEPS(bytes_fetched) / n_steps;
    if (candidates > 0) { /* nodes served queries */
        result->estimated_share = quotient(STEPS(rows_estimated), STEPS(rows_possible));
        result->step_node_s = STEPS(nodes_worked_s) / n_steps;
    }
#undef STEPS
}

static int measure_text(struct eval *eval, size_t index)
{
    struct kvw_eval_result *result = &eval->results[index];
    const uint64_t begin_us = kvw_now_us();
    double *found = index == 0 ? eval->full : malloc(eval->text->n_tokens * sizeof(found[0]));
    struct kvw_method_stats before, after;
    uint64_t steps_us;
    kv_status_t status;
    int outcome;

    if (found == NULL) {
        kvw_error(eval->worker, "out of memory: likelihoods");
        return KVW_FAILED;
    }
    outcome = begin_run(eval, index, eval->text->tokens, eval->from);
    if (outcome != KVW_DONE)
        goto end;
    kvw_method_get_stats(eval->worker->attention, &before);
    steps_us = kvw_now_us();
    status = run_steps(eval, index, found);
    if (status != KV_OK) {
        if (!kvw_stop)
            kvw_step_error(eval->worker, status);
        outcome = KVW_FAILED;
        goto end;
    }
    result->step_s = kvw_seconds_since(steps_us) / (eval->text->n_tokens - 1 - eval->from);
    kvw_method_get_stats(eval->worker->attention, &after);
    compare(eval, found, result);
    take_costs(&before, &after, eval->text->n_tokens - 1 - eval->from, result);
    result->total_s += kvw_seconds_since(begin_us);

end:
    if (index != 0)
        free(found);
    return outcome;
}

/* ---- needles ---- */

static int measure_needles(struct eval *eval, size_t index)
{
    const struct kvw_planned_run *run = &eval->plan.runs[index];
    const struct kvw_needle_test *questions = &eval->text->questions;
    struct kvw_eval_result *result = &eval->results[index];
    const uint64_t begin_us = kvw_now_us();
    char what[2 * KVW_EVAL_NAME_BYTES + 16];
    kv_status_t status = KV_OK;
    const int outcome = begin_run(eval, index, questions->list[0].tokens, questions->n_common);

    if (outcome != KVW_DONE)
        return outcome;
    snprintf(what, sizeof(what), "%s %s: needles", run->method, run->budget);
    result->needles_found = 0;
    result->needles_asked = (double)questions->needles.count;
    for (size_t i = 0; status == KV_OK && !kvw_stop && i < questions->needles.count; i++) {
        if (i > 0)
            status = kvw_method_truncate(eval->worker->attention, questions->n_common);
        if (status == KV_OK)
            status = kvw_needle_question_ask(eval->worker, questions, i, eval->sampler,
                                             KVW_UNTIL_JUDGED, &eval->reply);
        result->needles_found += eval->reply.verdict == KVW_NEEDLE_FOUND;
        kvw_progress(what, i + 1, questions->needles.count);
    }
    if (kvw_stop)
        return KVW_FAILED;
    if (status != KV_OK) {
        kvw_step_error(eval->worker, status);
        return KVW_FAILED;
    }
    result->total_s += kvw_seconds_since(begin_us);
    return KVW_DONE;
}

/* ---- texts ---- */

/* Reads a text's tokens and the questions of its needles.  *most grows to the tokens of the
 * longest session. */
static int read_text(const struct eval *eval, struct text *text, uint32_t *most)
{
    const struct kvw_context *worker = eval->worker;
    const struct kvw_options *options = worker->options;
    const uint32_t context = worker->model->params.context;
    const uint64_t for_needles =
        options->needle_tokens > 0 ? options->needle_tokens : options->tokens;
    size_t bytes, n, longest = 0;
    kv_status_t status;
    char *read;
    int outcome = kvw_read_file(worker, "text", text->path, &read, &bytes);

    if (outcome != KVW_DONE)
        return outcome;
    status =
        kvw_tokenizer_encode(worker->tokenizer, read, bytes, false, true, &text->tokens, &n);
    if (status != KV_OK) {
        kvw_error(worker, "text: tokens: %s", kv_status_name(status));
        outcome = KVW_FAILED;
        goto end;
    }
    if (options->needles[0] != '\0') {
        const size_t cut = for_needles > 0 && for_needles < n ? (size_t)for_needles : n;

        outcome = kvw_needle_test_read(worker, &text->questions);
        if (outcome == KVW_DONE)
            outcome = kvw_needle_test_make(
                worker, read, cut < n ? kvw_bytes_of(worker, text->tokens, cut, bytes) : bytes,
                ANSWER_TOKENS, &text->questions);
        if (outcome != KVW_DONE)
            goto end;
        longest = text->questions.most;
    }
    outcome = KVW_USAGE;
    if (has_text(eval)) {
        if (options->tokens > 0 && options->tokens < n)
            n = (size_t)options->tokens;
        if (n < options->from + 2) {
            kvw_error(worker,
                      "text: %s: %zu tokens: expected at least %" PRIu64
                      ", which is --from plus 2",
                      text->path, n, options->from + 2);
            goto end;
        }
        longest = n > longest ? n : longest;
        text->n_tokens = (uint32_t)(n <= context ? n : 0);
    }
    if (longest > context) {
        kvw_error(worker,
                  "text: %s: %zu tokens%s: the model's context is %" PRIu32
                  ": use a smaller --tokens",
                  text->path, longest,
                  text->questions.needles.count > 0 ? ", needles and answers included" : "",
                  context);
        goto end;
    }
    *most = longest > *most ? (uint32_t)longest : *most;
    outcome = KVW_DONE;

end:
    free(read);
    return outcome;
}

/* Reads all files of --text-file. */
static int read_texts(struct eval *eval, uint32_t *ret_most)
{
    const char *at = eval->worker->options->text_file;
    size_t n_max = 1;
    int outcome = KVW_DONE;

    for (const char *comma = at; (comma = strchr(comma, ',')) != NULL; comma++)
        n_max++;
    eval->texts = calloc(n_max, sizeof(eval->texts[0]));
    if (eval->texts == NULL) {
        kvw_error(eval->worker, "out of memory: texts");
        return KVW_FAILED;
    }
    *ret_most = 0;
    for (const char *end; outcome == KVW_DONE && *at != '\0'; at = end + (*end == ',')) {
        struct text *text = &eval->texts[eval->n_texts++];

        end = strchrnul(at, ',');
        snprintf(text->path, sizeof(text->path), "%.*s", (int)(end - at), at);
        outcome = read_text(eval, text, ret_most);
    }
    return outcome;
}

/* ---- the runs ---- */

/* Measures the runs [begin, end), which are of one method. */
static int measure_method(struct eval *eval,
                          size_t begin,
                          size_t end,
                          int (*measure)(struct eval *eval, size_t index))
{
    int outcome = KVW_DONE;

    for (size_t i = begin; outcome == KVW_DONE && i < end; i++)
        outcome = measure(eval, i);
    return outcome;
}

static size_t longest_method(const struct kvw_eval_plan *plan)
{
    size_t longest = 0;

    for (size_t i = 0; i < plan->count; i++)
        if (strlen(plan->runs[i].method) > longest)
            longest = strlen(plan->runs[i].method);
    return longest;
}

/* Runs the plan over the current text. */
static int
measure_plan(struct eval *eval, enum kvw_eval_format format, const struct kvw_eval_about *about)
{
    const struct kvw_eval_plan *plan = &eval->plan;
    int outcome = KVW_DONE;

    for (size_t i = 0; i < plan->count; i++)
        eval->results[i] = (struct kvw_eval_result){
            NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, 0,
        };
    for (size_t begin = 0, end; outcome == KVW_DONE && begin < plan->count; begin = end) {
        for (end = begin + 1; end < plan->count; end++)
            if (strcmp(plan->runs[end].method, plan->runs[begin].method) != 0)
                break;
        if (has_text(eval))
            outcome = measure_method(eval, begin, end, measure_text);
        if (outcome == KVW_DONE && eval->text->questions.needles.count > 0)
            outcome = measure_method(eval, begin, end, measure_needles);
        kvw_progress_end();
        for (size_t i = begin; outcome == KVW_DONE && i < end; i++)
            kvw_eval_report(format, about, &plan->runs[i], &eval->results[i]);
    }
    return outcome;
}

static int measure_all(struct eval *eval)
{
    const struct kvw_context *worker = eval->worker;
    const struct kvw_options *options = worker->options;
    const enum kvw_eval_format format = options->json  ? KVW_EVAL_JSON
                                        : options->csv ? KVW_EVAL_CSV
                                                       : KVW_EVAL_TABLE;
    char device[64];
    struct kvw_eval_about about = {
        .from = eval->from,
        .kv_type = options->kv_type,
        .store = options->store,
        .device = device,
        .method_width = (int)longest_method(&eval->plan),
        .has_many_texts = eval->n_texts > 1,
    };
    int outcome = KVW_DONE;

    worker->device->ops->describe(worker->device, device, sizeof(device));
    for (size_t i = 0; outcome == KVW_DONE && i < eval->n_texts; i++) {
        eval->text = &eval->texts[i];
        about.text = eval->text->path;
        about.tokens = eval->text->n_tokens;
        if (i == 0 || format == KVW_EVAL_TABLE)
            kvw_eval_report_head(format, &about);
        outcome = measure_plan(eval, format, &about);
    }
    if (outcome == KVW_FAILED && kvw_stop)
        kvw_error(worker, "stopped");
    return outcome;
}

static int make_plan(struct eval *eval)
{
    const struct kvw_options *options = eval->worker->options;
    char detail[KVW_DETAIL_BYTES] = "";
    struct kvw_method_options base;
    kv_status_t status;
    int outcome = kvw_attention_options(eval->worker, &base);

    if (outcome != KVW_DONE)
        return outcome;
    base.recall_every = RECALL_EVERY;
    status = kvw_eval_plan_make(options->methods, options->budgets, options->seeds, &base,
                                &eval->plan, detail, sizeof(detail));
    if (status != KV_OK) {
        kvw_error(eval->worker, "option: --%s", detail);
        return status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
    }
    return kvw_options_are_used(eval->worker, eval->plan.runs, eval->plan.count) ? KVW_DONE
                                                                                 : KVW_USAGE;
}

/* Allocates what the runs need, for sessions of at most `most` tokens. */
static int make_room(struct eval *eval, uint32_t most)
{
    const struct kvw_sampler_options greedy = {.temperature = 0, .top_p = 1};
    const uint32_t n_vocabulary = eval->worker->model->params.n_vocabulary;

    eval->results = calloc(eval->plan.count, sizeof(eval->results[0]));
    eval->logits = malloc(n_vocabulary * sizeof(eval->logits[0]));
    eval->full = calloc(most, sizeof(eval->full[0]));
    if (eval->results == NULL || eval->logits == NULL || eval->full == NULL ||
        kvw_sampler_create(&greedy, n_vocabulary, &eval->sampler) != KV_OK) {
        kvw_error(eval->worker, "out of memory: logits");
        return KVW_FAILED;
    }
    return KVW_DONE;
}

int kvw_eval_run(struct kvw_context *worker)
{
    const struct kvw_options *options = worker->options;
    struct eval *eval = calloc(1, sizeof(*eval));
    uint32_t most;
    int outcome;

    if (eval == NULL) {
        kvw_error(worker, "out of memory");
        return KVW_FAILED;
    }
    eval->worker = worker;
    eval->from = (uint32_t)options->from;
    outcome = KVW_USAGE;
    if (options->text_file[0] == '\0') {
        kvw_error(worker, "option: --text-file: missing");
        goto end;
    }
    if (options->json && options->csv) {
        kvw_error(worker, "option: --json, --csv: only one is allowed");
        goto end;
    }
    if (options->needles_only && options->needles[0] == '\0') {
        kvw_error(worker, "option: --needles-only: requires --needles");
        goto end;
    }
    if ((outcome = make_plan(eval)) != KVW_DONE ||
        (outcome = kvw_open_file(worker)) != KVW_DONE ||
        (outcome = kvw_open_model(worker)) != KVW_DONE ||
        (outcome = read_texts(eval, &most)) != KVW_DONE ||
        (outcome = make_room(eval, most)) != KVW_DONE ||
        (outcome = kvw_open_store(worker, most)) != KVW_DONE)
        goto end;
    outcome = measure_all(eval);

end:
    for (size_t i = 0; i < eval->n_texts; i++) {
        kvw_needle_test_free(&eval->texts[i].questions);
        free(eval->texts[i].tokens);
    }
    free(eval->texts);
    kvw_eval_plan_free(&eval->plan);
    kvw_sampler_destroy(eval->sampler);
    free(eval->results);
    free(eval->logits);
    free(eval->full);
    free(eval);
    return outcome;
}
