/* eval: what methods lose at a budget, over one text.
 *
 *   perplexity   the first `from` tokens pass by full attention, every later one as a decode
 *                step; the measure is over the tokens that those steps predict.  A loss is
 *                against full attention over the same tokens
 *   needles      odd sentences in the text that the model is to complete: see questions.h
 *   recall       as the method tells it
 *
 * The runs of one method share what comes before the first step: the session goes back to there
 * and takes other options. */
#include "clock.h"
#include "eval_report.h"
#include "questions.h"

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

struct eval {
    struct kvworker *worker;
    struct kv_eval_plan plan;
    struct kv_eval_result *results; /* (plan.count) */

    uint32_t *tokens; /* of the text */
    uint32_t n_tokens, from;
    float *logits;
    double *full; /* (n_tokens): log likelihoods by full attention */

    struct kvworker_questions questions;
    struct kvworker_reply reply; /* to the question under way */
    struct kv_sampler *sampler;
};

static double since(uint64_t begin_us)
{
    return (double)(kv_clock_now(&kv_clock_real) - begin_us) / 1e6;
}

static bool has_text(const struct eval *eval)
{
    return !eval->worker->options->needles_only;
}

/* ---- sessions ---- */

/* A session of the run's method in which the first n of `tokens` have passed: the one of the
 * run before, if that will do, else a new one. */
static int
begin_run(struct eval *eval, size_t index, bool is_first, const uint32_t *tokens, uint32_t n)
{
    const struct kv_eval_run *run = &eval->plan.runs[index];
    struct kvworker *worker = eval->worker;
    char what[KV_EVAL_NAME_BYTES + 16];
    kv_status_t status = KV_UNSUPPORTED;
    int outcome;

    if (!is_first && run->row->retune != NULL)
        status = run->row->retune(worker->attention, &run->options);
    if (status == KV_OK) {
        status = run->row->truncate(worker->attention, n);
    } else if (status == KV_UNSUPPORTED) {
        outcome = kvworker_open_attention(worker, run->row, &run->options);
        if (outcome != KVWORKER_DONE)
            return outcome;
        snprintf(what, sizeof(what), "%s: prompt", run->method);
        status = kvworker_prefill(worker, what, tokens, n,
                                  eval->n_tokens > n ? eval->n_tokens - n : ANSWER_TOKENS);
        if (status == KV_OK)
            status = run->row->flush(worker->attention);
    }
    if (status != KV_OK && !kvworker_stop)
        kvworker_step_error(worker, status);
    return status == KV_OK ? KVWORKER_DONE : KVWORKER_FAILED;
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
    const struct kv_eval_run *run = &eval->plan.runs[index];
    const uint32_t n_vocabulary = eval->worker->model->params.n_vocabulary;
    const uint32_t end = eval->n_tokens - 1; /* the last token's successor is not known */
    char what[2 * KV_EVAL_NAME_BYTES + 16];

    snprintf(what, sizeof(what), "%s %s: text", run->method, run->budget);
    for (uint32_t t = eval->from; t < end; t++) {
        kv_status_t status;

        if (kvworker_stop)
            return KV_CANCELLED;
        status = kv_forward_step(eval->worker->forward, KV_DECODE, eval->tokens + t, t, 1);
        if (status == KV_OK)
            status = kv_forward_logits(eval->worker->forward, 0, 1, eval->logits);
        if (status != KV_OK)
            return status;
        ret_found[t] = log_likelihood(eval->logits, n_vocabulary, eval->tokens[t + 1]);
        if ((t - eval->from) % PROGRESS_EVERY == 0)
            kvworker_progress(what, t - eval->from, end - eval->from);
    }
    return eval->worker->attention->row->flush(eval->worker->attention);
}

/* Mean and standard error of how much worse than full attention, in log likelihood. */
static void
compare(const struct eval *eval, const double *found, struct kv_eval_result *ret_result)
{
    const double n = eval->n_tokens - 1 - eval->from;
    double sum = 0, squares = 0, total = 0, mean, error;

    for (uint32_t t = eval->from; t < eval->n_tokens - 1; t++) {
        total -= found[t];
        sum += eval->full[t] - found[t];
    }
    mean = sum / n;
    for (uint32_t t = eval->from; t < eval->n_tokens - 1; t++)
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

static int measure_text(struct eval *eval, size_t index, bool is_first)
{
    const struct kv_eval_run *run = &eval->plan.runs[index];
    struct kv_eval_result *result = &eval->results[index];
    const uint64_t begin_us = kv_clock_now(&kv_clock_real);
    double *found = index == 0 ? eval->full : malloc(eval->n_tokens * sizeof(found[0]));
    struct kv_attention_stats before, after;
    uint64_t steps_us;
    kv_status_t status;
    int outcome;

    if (found == NULL) {
        kvworker_error(eval->worker, "memory: likelihoods: refused");
        return KVWORKER_FAILED;
    }
    outcome = begin_run(eval, index, is_first, eval->tokens, eval->from);
    if (outcome != KVWORKER_DONE)
        goto end;
    run->row->stats(eval->worker->attention, &before);
    steps_us = kv_clock_now(&kv_clock_real);
    status = run_steps(eval, index, found);
    if (status != KV_OK) {
        if (!kvworker_stop)
            kvworker_step_error(eval->worker, status);
        outcome = KVWORKER_FAILED;
        goto end;
    }
    result->step_s = since(steps_us) / (eval->n_tokens - 1 - eval->from);
    run->row->stats(eval->worker->attention, &after);
    compare(eval, found, result);
    result->recall = quotient(after.rows_recalled - before.rows_recalled,
                              after.rows_to_recall - before.rows_to_recall);
    result->coded_share = quotient(after.rows_scored_by_code - before.rows_scored_by_code,
                                   after.rows_scored_by_code + after.rows_scored_by_key -
                                       before.rows_scored_by_code - before.rows_scored_by_key);
    result->rows_share = quotient(after.rows_attended - before.rows_attended,
                                  after.rows_possible - before.rows_possible);
    result->exposed_wait_s = after.exposed_wait_s - before.exposed_wait_s;
    result->bytes_fetched = (double)(after.bytes_fetched - before.bytes_fetched);
    result->total_s += since(begin_us);

end:
    if (index != 0)
        free(found);
    return outcome;
}

/* ---- needles ---- */

static int measure_needles(struct eval *eval, size_t index, bool is_first)
{
    const struct kv_eval_run *run = &eval->plan.runs[index];
    const struct kvworker_questions *questions = &eval->questions;
    struct kv_eval_result *result = &eval->results[index];
    const uint64_t begin_us = kv_clock_now(&kv_clock_real);
    char what[2 * KV_EVAL_NAME_BYTES + 16];
    kv_status_t status = KV_OK;
    const int outcome =
        begin_run(eval, index, is_first, questions->list[0].tokens, questions->n_common);

    if (outcome != KVWORKER_DONE)
        return outcome;
    snprintf(what, sizeof(what), "%s %s: needles", run->method, run->budget);
    result->needles_found = 0;
    result->needles_asked = (double)questions->needles.count;
    for (size_t i = 0; status == KV_OK && !kvworker_stop && i < questions->needles.count; i++) {
        if (i > 0)
            status = run->row->truncate(eval->worker->attention, questions->n_common);
        if (status == KV_OK)
            status = kvworker_question_ask(eval->worker, questions, i, eval->sampler,
                                           KVWORKER_UNTIL_JUDGED, &eval->reply);
        result->needles_found += eval->reply.verdict == KV_NEEDLE_FOUND;
        kvworker_progress(what, i + 1, questions->needles.count);
    }
    if (kvworker_stop)
        return KVWORKER_FAILED;
    if (status != KV_OK) {
        kvworker_step_error(eval->worker, status);
        return KVWORKER_FAILED;
    }
    result->total_s += since(begin_us);
    return KVWORKER_DONE;
}

/* ---- the text ---- */

/* The text's tokens and the needles' questions; *ret_most: tokens of the longest session. */
static int read_text(struct eval *eval, uint32_t *ret_most)
{
    const struct kvworker *worker = eval->worker;
    const struct kvworker_options *options = worker->options;
    const uint32_t context = worker->model->params.context;
    const uint64_t for_needles =
        options->needle_tokens > 0 ? options->needle_tokens : options->tokens;
    size_t bytes, n, most = 0;
    kv_status_t status;
    char *text;
    int outcome = kvworker_read_file(worker, "text", options->text_file, &text, &bytes);

    if (outcome != KVWORKER_DONE)
        return outcome;
    status =
        kv_tokenizer_encode(worker->tokenizer, text, bytes, false, true, &eval->tokens, &n);
    if (status != KV_OK) {
        kvworker_error(worker, "text: tokens: %s", kv_status_name(status));
        outcome = KVWORKER_FAILED;
        goto end;
    }
    if (options->needles[0] != '\0') {
        const size_t cut = for_needles > 0 && for_needles < n ? (size_t)for_needles : n;

        outcome = kvworker_questions_read(worker, &eval->questions);
        if (outcome == KVWORKER_DONE)
            outcome = kvworker_questions_make(
                worker, text,
                cut < n ? kvworker_bytes_of(worker, eval->tokens, cut, bytes) : bytes,
                ANSWER_TOKENS, &eval->questions);
        if (outcome != KVWORKER_DONE)
            goto end;
        most = eval->questions.most;
    }
    outcome = KVWORKER_USAGE;
    if (has_text(eval)) {
        if (options->tokens > 0 && options->tokens < n)
            n = (size_t)options->tokens;
        if (n < options->from + 2) {
            kvworker_error(worker,
                           "text: %s: %zu tokens: expected at least %" PRIu64 ", 2 more "
                           "than --from",
                           options->text_file, n, options->from + 2);
            goto end;
        }
        most = n > most ? n : most;
        eval->n_tokens = (uint32_t)(n <= context ? n : 0);
        eval->from = (uint32_t)options->from;
    }
    if (most > context) {
        kvworker_error(
            worker,
            "text: %zu tokens%s: the model's context is %" PRIu32 "; --tokens takes less of it",
            most, eval->questions.needles.count > 0 ? ", needles and answers included" : "",
            context);
        goto end;
    }
    *ret_most = (uint32_t)most;
    outcome = KVWORKER_DONE;

end:
    free(text);
    return outcome;
}

/* ---- the runs ---- */

/* All runs of one method, which are those from `begin` on, over one text or the other. */
static int measure_method(struct eval *eval,
                          size_t begin,
                          size_t end,
                          int (*measure)(struct eval *eval, size_t index, bool is_first))
{
    int outcome = KVWORKER_DONE;

    for (size_t i = begin; outcome == KVWORKER_DONE && i < end; i++)
        outcome = measure(eval, i, i == begin);
    return outcome;
}

static int measure_all(struct eval *eval)
{
    const struct kvworker *worker = eval->worker;
    const struct kvworker_options *options = worker->options;
    const enum kv_eval_format format = options->json  ? KV_EVAL_JSON
                                       : options->csv ? KV_EVAL_CSV
                                                      : KV_EVAL_TABLE;
    const struct kv_eval_plan *plan = &eval->plan;
    char device[64];
    const struct kv_eval_about about = {
        .tokens = eval->n_tokens,
        .from = eval->from,
        .kv_type = options->kv_type,
        .store = options->store,
        .device = device,
    };
    int outcome = KVWORKER_DONE;

    worker->device->row->describe(worker->device, device, sizeof(device));
    kv_eval_report_head(format);
    for (size_t begin = 0, end; outcome == KVWORKER_DONE && begin < plan->count; begin = end) {
        for (end = begin + 1; end < plan->count; end++)
            if (strcmp(plan->runs[end].method, plan->runs[begin].method) != 0)
                break;
        if (has_text(eval))
            outcome = measure_method(eval, begin, end, measure_text);
        if (outcome == KVWORKER_DONE && eval->questions.needles.count > 0)
            outcome = measure_method(eval, begin, end, measure_needles);
        kvworker_progress_end();
        for (size_t i = begin; outcome == KVWORKER_DONE && i < end; i++)
            kv_eval_report(format, &about, &plan->runs[i], &eval->results[i]);
    }
    if (outcome == KVWORKER_FAILED && kvworker_stop)
        kvworker_error(worker, "stopped");
    return outcome;
}

static int make_plan(struct eval *eval)
{
    const struct kvworker_options *options = eval->worker->options;
    char detail[KVWORKER_DETAIL_BYTES] = "";
    struct kv_attention_options base;
    kv_status_t status;
    int outcome = kvworker_attention_options(eval->worker, &base);

    if (outcome != KVWORKER_DONE)
        return outcome;
    base.recall_every = RECALL_EVERY;
    status = kv_eval_plan_make(options->methods, options->budgets, options->seeds, &base,
                               &eval->plan, detail, sizeof(detail));
    if (status != KV_OK) {
        kvworker_error(eval->worker, "option: --%s", detail);
        return status == KV_NO_MEMORY ? KVWORKER_FAILED : KVWORKER_USAGE;
    }
    return KVWORKER_DONE;
}

/* What the runs work with, for a session of `most` tokens at most. */
static int make_room(struct eval *eval, uint32_t most)
{
    const struct kv_sampler_options greedy = {.temperature = 0, .top_p = 1};
    const uint32_t n_vocabulary = eval->worker->model->params.n_vocabulary;

    eval->results = calloc(eval->plan.count, sizeof(eval->results[0]));
    eval->logits = malloc(n_vocabulary * sizeof(eval->logits[0]));
    eval->full = calloc(most, sizeof(eval->full[0]));
    if (eval->results == NULL || eval->logits == NULL || eval->full == NULL ||
        kv_sampler_create(&greedy, n_vocabulary, &eval->sampler) != KV_OK) {
        kvworker_error(eval->worker, "memory: logits: refused");
        return KVWORKER_FAILED;
    }
    for (size_t i = 0; i < eval->plan.count; i++)
        eval->results[i] = (struct kv_eval_result){
            NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, 0,
        };
    return KVWORKER_DONE;
}

int kvworker_eval_run(struct kvworker *worker)
{
    const struct kvworker_options *options = worker->options;
    struct eval *eval = calloc(1, sizeof(*eval));
    uint32_t most;
    int outcome;

    if (eval == NULL) {
        kvworker_error(worker, "memory: refused");
        return KVWORKER_FAILED;
    }
    eval->worker = worker;
    outcome = KVWORKER_USAGE;
    if (options->text_file[0] == '\0') {
        kvworker_error(worker, "option: --text-file: missing");
        goto end;
    }
    if (options->json && options->csv) {
        kvworker_error(worker, "option: --json, --csv: one of them, not both");
        goto end;
    }
    if (options->needles_only && options->needles[0] == '\0') {
        kvworker_error(worker, "option: --needles-only: without --needles");
        goto end;
    }
    if ((outcome = make_plan(eval)) != KVWORKER_DONE ||
        (outcome = kvworker_open_file(worker)) != KVWORKER_DONE ||
        (outcome = kvworker_open_model(worker)) != KVWORKER_DONE ||
        (outcome = read_text(eval, &most)) != KVWORKER_DONE ||
        (outcome = make_room(eval, most)) != KVWORKER_DONE ||
        (outcome = kvworker_open_store(worker, most)) != KVWORKER_DONE)
        goto end;
    outcome = measure_all(eval);

end:
    kvworker_questions_free(&eval->questions);
    kv_eval_plan_free(&eval->plan);
    kv_sampler_destroy(eval->sampler);
    free(eval->results);
    free(eval->tokens);
    free(eval->logits);
    free(eval->full);
    free(eval);
    return outcome;
}
