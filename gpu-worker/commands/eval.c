/* eval: what methods lose at a budget, over some texts.
 *
 *   perplexity   the first `from` tokens are computed with full attention, every later one as a
 *                decode step; perplexity is over the tokens that those steps predict.  Losses
 *                and KL are relative to full attention over the same tokens (eval/fidelity.h),
 *                differences to the method of --against
 *   needles      odd sentences in the text that the model must complete: see needle_test.h
 *   recall       as the method reports it
 *
 * Runs whose stored rows and codes are the same share the prefill: the session is truncated to
 * the first step and given the options of the next run. */
#define _GNU_SOURCE /* strchrnul */
#include "gpu-worker/base/time.h"
#include "gpu-worker/commands/needle_test.h"
#include "gpu-worker/eval/fidelity.h"
#include "gpu-worker/eval/report.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    RECALL_EVERY = 16, /* tokens */
    ANSWER_TOKENS = 64,
    PROGRESS_EVERY = 16,
    LONG_CONTEXT_FROM = 6500, /* --long-context */
    LONG_CONTEXT_TOKENS = 6884,
};

/* The rows of k = 51 are the share of 6,500 that k = 1,024 is of 128K. */
static const char long_context_budgets[] = "k=51";

struct text {
    char path[KV_CONFIG_STRING_BYTES];
    uint32_t *tokens;
    uint32_t n_tokens;
    struct kvw_needle_test questions;
};

/* Of a run, by token from `from` on. */
struct series {
    double *loss, *kl; /* NULL: none yet */
};

struct eval {
    struct kvw_context *worker;
    struct kvw_eval_plan plan;
    struct text *texts;
    size_t n_texts;
    uint32_t from;
    uint64_t tokens; /* of a text at most; 0: all */
    const char *budgets;
    size_t n_against; /* runs of --against, which come after full attention's */
    FILE *per_token;  /* NULL: not wanted */

    const struct text *text; /* the current one */
    const uint32_t *open;    /* the tokens in the worker's session; NULL: none is open */
    struct kvw_eval_result *results; /* (plan.count), for the current text */
    double *guess_cosines;           /* (plan.count, n_layers), of methods that guess queries */
    struct series *series;           /* (plan.count), of those that others are compared with */
    struct kvw_fidelity *fidelity;
    float *logits;

    struct kvw_reply reply; /* to the current question */
    struct kvw_sampler *sampler;
};

static bool has_text(const struct eval *eval)
{
    const struct kvw_options *options = eval->worker->options;

    return !options->needles_only || options->needles[0] == '\0';
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

static void series_free(struct series *series)
{
    free(series->loss);
    free(series->kl);
    *series = (struct series){0};
}

static uint32_t n_scored(const struct eval *eval)
{
    return eval->text->n_tokens - 1 - eval->from; /* the last token has no successor */
}

static kv_status_t run_steps(struct eval *eval, size_t index, struct series *series)
{
    const struct kvw_planned_run *run = &eval->plan.runs[index];
    const uint32_t *tokens = eval->text->tokens + eval->from;
    char what[2 * KVW_EVAL_NAME_BYTES + 16];

    snprintf(what, sizeof(what), "%s %s: text", run->method, run->budget);
    for (uint32_t i = 0; i < n_scored(eval); i++) {
        kv_status_t status;

        if (kvw_stop)
            return KV_CANCELLED;
        status =
            kvw_forward_step(eval->worker->forward, KVW_DECODE, tokens + i, eval->from + i, 1);
        if (status == KV_OK)
            status = kvw_forward_logits(eval->worker->forward, 0, 1, eval->logits);
        if (status != KV_OK)
            return status;
        if (index == 0)
            series->loss[i] =
                kvw_fidelity_full(eval->fidelity, i, eval->logits, tokens[i + 1], &status);
        else
            series->loss[i] = kvw_fidelity_method(eval->fidelity, i, eval->logits,
                                                  tokens[i + 1], &series->kl[i], &status);
        if (status != KV_OK) {
            kvw_error(eval->worker, "predictions: temporary file: %s", strerror(errno));
            return KV_CANCELLED;
        }
        if (i % PROGRESS_EVERY == 0)
            kvw_progress(what, i, n_scored(eval));
    }
    return kvw_method_flush(eval->worker->attention);
}

/* Returns the run of --against that this one is compared with: of its budget and seed, if there is
 * one; 0: none. */
static size_t run_against(const struct eval *eval, size_t index)
{
    const struct kvw_planned_run *run = &eval->plan.runs[index];
    size_t best = 0;
    int best_match = -1;

    for (size_t i = 1; i <= eval->n_against && index > eval->n_against; i++) {
        const struct kvw_planned_run *other = &eval->plan.runs[i];
        const int match = 2 * (strcmp(other->budget, run->budget) == 0) +
                          (other->options.seed == run->options.seed);

        if (match > best_match) {
            best_match = match;
            best = i;
        }
    }
    return best;
}

/* What the series say, relative to full attention and to the method of --against. */
static void compare(const struct eval *eval, size_t index, const struct series *series)
{
    const size_t n = n_scored(eval), against = run_against(eval, index);
    struct kvw_eval_result *result = &eval->results[index];
    const struct kvw_mean loss = kvw_mean_difference(series->loss, eval->series[0].loss, n);
    struct kvw_mean mean;

    result->perplexity = exp(kvw_mean_of(series->loss, n).mean);
    result->loss_percent = 100 * expm1(loss.mean);
    result->loss_error_percent = 100 * exp(loss.mean) * loss.error;
    mean = kvw_mean_of(series->kl, n);
    result->kl = mean.mean;
    result->kl_error = mean.error;
    if (against == 0)
        return;
    mean = kvw_mean_difference(series->loss, eval->series[against].loss, n);
    result->loss_difference = mean.mean;
    result->loss_difference_error = mean.error;
    mean = kvw_mean_difference(series->kl, eval->series[against].kl, n);
    result->kl_difference = mean.mean;
    result->kl_difference_error = mean.error;
}

static int write_tokens(const struct eval *eval, size_t index, const struct series *series)
{
    const struct kvw_planned_run *run = &eval->plan.runs[index];

    if (eval->per_token == NULL)
        return KVW_DONE;
    for (uint32_t i = 0; i < n_scored(eval); i++) {
        kvw_eval_print_field(eval->per_token, eval->text->path);
        fputc(',', eval->per_token);
        kvw_eval_print_field(eval->per_token, run->method);
        fprintf(eval->per_token, ",%s,", run->budget);
        if (run->ops->has_seed)
            fprintf(eval->per_token, "%" PRIu64, run->options.seed);
        fprintf(eval->per_token, ",%" PRIu32 ",%.9g,%.9g\n", eval->from + i + 1,
                series->loss[i], series->kl[i]);
    }
    if (fflush(eval->per_token) == 0)
        return KVW_DONE;
    kvw_error(eval->worker, "option: --per-token: %s: %s", eval->worker->options->per_token,
              strerror(errno));
    return KVW_FAILED;
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
        result->step_books = (double)STEPS(nodes_read.books) / n_steps;
        result->step_codes = (double)STEPS(nodes_read.codes) / n_steps;
        result->step_copies = (double)STEPS(nodes_read.copies) / n_steps;
        result->step_keys = (double)STEPS(nodes_read.keys) / n_steps;
        result->step_rows = (double)STEPS(nodes_read.rows) / n_steps;
        result->step_summaries = (double)STEPS(nodes_read.summaries) / n_steps;
        result->step_read = result->step_books + result->step_codes + result->step_copies +
                            result->step_keys + result->step_rows + result->step_summaries;
    }
#undef STEPS
}

static double *cosines_of(const struct eval *eval, size_t index)
{
    return eval->guess_cosines + index * eval->worker->model->params.n_layers;
}

/* Layer 0's query is not a guess. */
static void take_cosines(struct eval *eval, size_t index, const struct kvw_method_stats *stats)
{
    const uint32_t n_layers = eval->worker->model->params.n_layers;
    double sum = 0;

    if (stats->guess_cosines == NULL)
        return;
    for (uint32_t i = 0; i < n_layers; i++) {
        cosines_of(eval, index)[i] = stats->guess_cosines[i] / (double)stats->n_guess_cosines;
        sum += i > 0 ? cosines_of(eval, index)[i] : 0;
    }
    eval->results[index].guess_cosine = n_layers > 1 ? sum / (n_layers - 1) : NAN;
}

static int measure_text(struct eval *eval, size_t index)
{
    struct kvw_eval_result *result = &eval->results[index];
    const uint64_t begin_us = kvw_now_us();
    struct series series = {calloc(n_scored(eval), sizeof(double)),
                            calloc(n_scored(eval), sizeof(double))};
    struct kvw_method_stats before, after;
    uint64_t steps_us;
    kv_status_t status;
    int outcome = KVW_FAILED;

    if (series.loss == NULL || series.kl == NULL) {
        kvw_error(eval->worker, "out of memory: losses");
        goto end;
    }
    outcome = begin_run(eval, index, eval->text->tokens, eval->from);
    if (outcome != KVW_DONE)
        goto end;
    kvw_method_get_stats(eval->worker->attention, &before);
    steps_us = kvw_now_us();
    status = run_steps(eval, index, &series);
    if (status != KV_OK) {
        if (!kvw_stop && status != KV_CANCELLED)
            kvw_step_error(eval->worker, status);
        outcome = KVW_FAILED;
        goto end;
    }
    result->step_s = kvw_seconds_since(steps_us) / n_scored(eval);
    kvw_method_get_stats(eval->worker->attention, &after);
    if (index <= eval->n_against) {
        series_free(&eval->series[index]);
        eval->series[index] = series;
    }
    compare(eval, index, &series);
    take_costs(&before, &after, n_scored(eval), result);
    take_cosines(eval, index, &after);
    result->total_s += kvw_seconds_since(begin_us);
    outcome = write_tokens(eval, index, &series);
    if (index <= eval->n_against)
        return outcome;

end:
    series_free(&series);
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
        options->needle_tokens > 0 ? options->needle_tokens : eval->tokens;
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
        if (eval->tokens > 0 && eval->tokens < n)
            n = (size_t)eval->tokens;
        if (n < (size_t)eval->from + 2) {
            kvw_error(worker,
                      "text: %s: %zu tokens: expected at least %" PRIu32
                      ", which is --from plus 2",
                      text->path, n, eval->from + 2);
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

static bool has_guesses(const struct kvw_eval_plan *plan)
{
    for (size_t i = 0; i < plan->count; i++)
        if (plan->runs[i].ops->guess != NULL)
            return true;
    return false;
}

static size_t longest_method(const struct kvw_eval_plan *plan)
{
    size_t longest = 0;

    for (size_t i = 0; i < plan->count; i++)
        if (strlen(plan->runs[i].method) > longest)
            longest = strlen(plan->runs[i].method);
    return longest;
}

/* Nothing is measured yet. */
static void forget(struct kvw_eval_result *result)
{
    double *values = (double *)result;

    for (size_t i = 0; i < sizeof(*result) / sizeof(double); i++)
        values[i] = NAN;
    result->total_s = 0;
}

/* Runs the plan over the current text. */
static int
measure_plan(struct eval *eval, enum kvw_eval_format format, const struct kvw_eval_about *about)
{
    const struct kvw_eval_plan *plan = &eval->plan;
    int outcome = KVW_DONE;

    for (size_t i = 0; i < plan->count; i++)
        forget(&eval->results[i]);
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
            kvw_eval_report(format, about, &plan->runs[i], &eval->results[i],
                            plan->runs[i].ops->guess != NULL && has_text(eval)
                                ? cosines_of(eval, i)
                                : NULL);
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
        .has_differences = eval->n_against > 0,
        .has_guesses = has_guesses(&eval->plan),
        .n_layers = worker->model->params.n_layers,
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

/* Puts the runs of --against after full attention's, so that all others can be compared. */
static int order_plan(struct eval *eval)
{
    const char *against = eval->worker->options->against;
    struct kvw_planned_run *runs = eval->plan.runs;

    if (against[0] == '\0')
        return KVW_DONE;
    for (size_t i = 1; i < eval->plan.count; i++) {
        const struct kvw_planned_run run = runs[i];

        if (strcmp(run.method, against) != 0)
            continue;
        memmove(runs + eval->n_against + 2, runs + eval->n_against + 1,
                (i - eval->n_against - 1) * sizeof(runs[0]));
        runs[++eval->n_against] = run;
    }
    if (eval->n_against > 0)
        return KVW_DONE;
    kvw_error(eval->worker, "option: --against: not one of --methods besides full: %s",
              against);
    return KVW_USAGE;
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
    status = kvw_eval_plan_make(options->methods, eval->budgets, options->seeds, &base,
                                &eval->plan, detail, sizeof(detail));
    if (status != KV_OK) {
        kvw_error(eval->worker, "option: --%s", detail);
        return status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
    }
    if (!kvw_options_are_used(eval->worker, eval->plan.runs, eval->plan.count))
        return KVW_USAGE;
    return order_plan(eval);
}

/* Opens the file of --per-token, which must not be there. */
static int open_per_token(struct eval *eval)
{
    const char *path = eval->worker->options->per_token;

    if (path[0] == '\0')
        return KVW_DONE;
    eval->per_token = fopen(path, "wx");
    if (eval->per_token == NULL) {
        kvw_error(eval->worker, "option: --per-token: %s: %s", path, strerror(errno));
        return KVW_USAGE;
    }
    fputs("text,method,budget,seed,token,loss,kl\n", eval->per_token);
    return KVW_DONE;
}

/* Allocates what the runs need. */
static int make_room(struct eval *eval)
{
    const struct kvw_sampler_options greedy = {.temperature = 0, .top_p = 1};
    const uint32_t n_vocabulary = eval->worker->model->params.n_vocabulary;
    kv_status_t status;

    eval->results = calloc(eval->plan.count, sizeof(eval->results[0]));
    eval->series = calloc(eval->plan.count, sizeof(eval->series[0]));
    eval->guess_cosines = calloc(eval->plan.count * eval->worker->model->params.n_layers,
                                 sizeof(eval->guess_cosines[0]));
    eval->logits = malloc(n_vocabulary * sizeof(eval->logits[0]));
    if (eval->results == NULL || eval->series == NULL || eval->guess_cosines == NULL ||
        eval->logits == NULL ||
        kvw_sampler_create(&greedy, n_vocabulary, &eval->sampler) != KV_OK) {
        kvw_error(eval->worker, "out of memory: logits");
        return KVW_FAILED;
    }
    status = kvw_fidelity_create(n_vocabulary, &eval->fidelity);
    if (status != KV_OK)
        kvw_error(eval->worker, "predictions: temporary file: %s",
                  status == KV_IO ? strerror(errno) : "out of memory");
    return status == KV_OK ? KVW_DONE : KVW_FAILED;
}

/* --long-context stands for three options. */
static bool take_preset(struct eval *eval)
{
    const struct kvw_options *options = eval->worker->options;

    eval->from = (uint32_t)options->from;
    eval->tokens = options->tokens;
    eval->budgets = options->budgets;
    if (!options->long_context)
        return true;
    if (options->from != KVW_EVAL_FROM || options->tokens != KVW_EVAL_TOKENS ||
        strcmp(options->budgets, KVW_EVAL_BUDGETS) != 0) {
        kvw_error(eval->worker,
                  "option: --long-context: sets --from, --tokens and --budgets itself");
        return false;
    }
    eval->from = LONG_CONTEXT_FROM;
    eval->tokens = LONG_CONTEXT_TOKENS;
    eval->budgets = long_context_budgets;
    return true;
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
    outcome = KVW_USAGE;
    if (!take_preset(eval))
        goto end;
    if (options->text_file[0] == '\0') {
        kvw_error(worker, "option: --text-file: missing");
        goto end;
    }
    if (options->json && options->csv) {
        kvw_error(worker, "option: --json, --csv: only one is allowed");
        goto end;
    }
    if ((outcome = make_plan(eval)) != KVW_DONE ||
        (outcome = kvw_open_file(worker)) != KVW_DONE ||
        (outcome = kvw_open_model(worker)) != KVW_DONE ||
        (outcome = read_texts(eval, &most)) != KVW_DONE ||
        (outcome = make_room(eval)) != KVW_DONE ||
        (outcome = open_per_token(eval)) != KVW_DONE ||
        (outcome = kvw_open_store(worker, most)) != KVW_DONE)
        goto end;
    outcome = measure_all(eval);

end:
    for (size_t i = 0; i < eval->n_texts; i++) {
        kvw_needle_test_free(&eval->texts[i].questions);
        free(eval->texts[i].tokens);
    }
    free(eval->texts);
    for (size_t i = 0; eval->series != NULL && i <= eval->n_against; i++)
        series_free(&eval->series[i]);
    free(eval->series);
    kvw_eval_plan_free(&eval->plan);
    kvw_sampler_destroy(eval->sampler);
    kvw_fidelity_destroy(eval->fidelity);
    if (eval->per_token != NULL)
        fclose(eval->per_token);
    free(eval->results);
    free(eval->guess_cosines);
    free(eval->logits);
    free(eval);
    return outcome;
}
