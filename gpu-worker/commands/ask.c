/* ask: questions about one long text, by several methods side by side.
 *
 * Each method has a session in which the tokens that all questions begin with are computed
 * once.  Every question continues in a fork of that session, which shares its rows and their
 * codebooks.  The fork is closed after the answer. */
#include "gpu-worker/base/time.h"
#include "gpu-worker/commands/ask_report.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* An open method.  The worker has its attention and forward pass while it is in use. */
struct asked {
    struct kvw_method *attention;
    struct kvw_forward *forward;
    struct kvw_method_stats stats; /* at the end of the previous question */
};

struct ask {
    struct kvw_context *worker;
    struct kvw_eval_plan plan;
    struct asked *methods;    /* (plan.count) */
    struct kvw_ask_sum *sums; /* (plan.count) */
    struct kvw_needle_test questions;
    struct kvw_reply reply;
    struct kvw_sampler *sampler;
};

/* Reports progress on stderr. */
static void say(const struct ask *ask, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void say(const struct ask *ask, const char *format, ...)
{
    va_list arguments;

    if (ask->worker->options->json && !isatty(STDERR_FILENO))
        return;
    kvw_progress_end();
    fflush(stdout);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
}

static void take_turn(struct ask *ask, size_t method)
{
    ask->worker->attention = ask->methods[method].attention;
    ask->worker->forward = ask->methods[method].forward;
}

static void end_turn(struct ask *ask)
{
    ask->worker->attention = NULL;
    ask->worker->forward = NULL;
}

static int failed(const struct ask *ask, kv_status_t status)
{
    if (kvw_stop)
        kvw_error(ask->worker, "stopped");
    else
        kvw_step_error(ask->worker, status);
    return KVW_FAILED;
}

/* ---- the text ---- */

/* Reads the first n tokens of the text, inserts the sentences, and prepares the questions.
 * Takes fewer tokens if the context has no room for more. */
static int make_questions(struct ask *ask,
                          const char *text,
                          size_t bytes,
                          const uint32_t *tokens,
                          size_t n_tokens,
                          size_t n)
{
    const struct kvw_context *worker = ask->worker;
    const uint32_t context = worker->model->params.context;

    /* Tokenized again, the shortened text may have a few tokens more than were counted. */
    for (bool is_first = true;; is_first = false) {
        const size_t cut = n < n_tokens ? kvw_bytes_of(worker, tokens, n, bytes) : bytes;
        const int outcome = kvw_needle_test_make(
            worker, text, cut, (uint32_t)worker->options->max_tokens, &ask->questions);

        if (outcome != KVW_DONE)
            return outcome;
        if (ask->questions.most <= context)
            break;
        if (ask->questions.most - context >= n) {
            kvw_error(worker,
                      "text: needle sentences, a question and an answer of %" PRIu64
                      " tokens exceed the model's context of %" PRIu32 " tokens",
                      worker->options->max_tokens, context);
            return KVW_USAGE;
        }
        n -= ask->questions.most - context + !is_first;
    }
    say(ask, "%s: %zu of %zu tokens, with %zu needle sentences: questions of %zu tokens",
        worker->options->text_file, n, n_tokens, ask->questions.needles.count,
        ask->questions.most - ask->questions.n_answer);
    return KVW_DONE;
}

static int read_text(struct ask *ask)
{
    const struct kvw_context *worker = ask->worker;
    const uint64_t wanted = worker->options->tokens;
    uint32_t *tokens = NULL;
    char *text;
    size_t bytes, n;
    kv_status_t status;
    int outcome = kvw_read_file(worker, "text", worker->options->text_file, &text, &bytes);

    if (outcome != KVW_DONE)
        return outcome;
    status = kvw_tokenizer_encode(worker->tokenizer, text, bytes, false, true, &tokens, &n);
    if (status != KV_OK) {
        kvw_error(worker, "text: tokens: %s", kv_status_name(status));
        outcome = KVW_FAILED;
    } else {
        outcome = kvw_needle_test_read(worker, &ask->questions);
    }
    if (outcome == KVW_DONE)
        outcome = make_questions(ask, text, bytes, tokens, n,
                                 wanted > 0 && wanted < n ? (size_t)wanted : n);
    free(tokens);
    free(text);
    return outcome;
}

/* ---- questions ---- */

/* Opens a method's session and computes the tokens that all questions begin with. */
static int begin_method(struct ask *ask, size_t i)
{
    const struct kvw_planned_run *run = &ask->plan.runs[i];
    struct kvw_context *worker = ask->worker;
    const uint32_t n = ask->questions.n_common;
    uint64_t begin_us;
    kv_status_t status;
    int outcome =
        kvw_open_attention(worker, run->ops, &run->options, ask->questions.list[0].tokens, n);

    ask->methods[i].attention = worker->attention;
    ask->methods[i].forward = worker->forward;
    if (outcome != KVW_DONE)
        return outcome;
    say(ask, "%s: reading %" PRIu32 " tokens into the store", run->method, n);
    begin_us = kvw_now_us();
    status = kvw_prefill(worker, run->method, ask->questions.list[0].tokens, n,
                         ask->questions.n_answer);
    kvw_progress_end();
    if (status == KV_OK)
        status = kvw_method_flush(worker->attention);
    if (status != KV_OK)
        return failed(ask, status);
    ask->sums[i].prefill_s = kvw_seconds_since(begin_us);
    kvw_method_get_stats(worker->attention, &ask->methods[i].stats);
    say(ask, "%s: read in %.1f s", run->method, ask->sums[i].prefill_s);
    return KVW_DONE;
}

static void add(struct kvw_ask_cost *to, const struct kvw_ask_cost *cost)
{
    static const struct kvw_method_stats zero;

    to->questions += cost->questions;
    to->found += cost->found;
    to->generated_tokens += cost->generated_tokens;
    to->steps += cost->steps;
    to->timed_steps += cost->timed_steps;
    to->fork_s += cost->fork_s;
    to->ttft_s += cost->ttft_s;
    to->decode_s += cost->decode_s;
    kvw_ask_stats_add(&to->steps_stats, &cost->steps_stats, &zero);
    kvw_ask_stats_add(&to->all_stats, &cost->all_stats, &zero);
}

/* Computes an answer's cost, after its fork has been closed. */
static void take_cost(struct ask *ask, size_t method, double fork_s, struct kvw_ask_cost *cost)
{
    const struct kvw_method *attention = ask->worker->attention;
    const struct kvw_generate_result *result = &ask->reply.result;
    struct asked *asked = &ask->methods[method];
    struct kvw_method_stats now;

    *cost = (struct kvw_ask_cost){
        .questions = 1,
        .found = ask->reply.verdict == KVW_NEEDLE_FOUND,
        .generated_tokens = result->generated_tokens,
        .steps = result->passed_tokens - result->prompt_tokens,
        .timed_steps = result->generated_tokens > 1 ? result->generated_tokens - 1 : 0,
        .fork_s = fork_s,
        .ttft_s = fork_s + (result->generated_tokens > 0 ? result->ttft_s : result->prefill_s),
        .decode_s = result->generated_tokens > 1 ? result->last_s - result->ttft_s : 0,
    };
    kvw_method_get_stats(attention, &now);
    kvw_ask_stats_add(&cost->steps_stats, &now, &ask->reply.at_first);
    kvw_ask_stats_add(&cost->all_stats, &now, &asked->stats);
    asked->stats = now;
}

static int answer(struct ask *ask, const struct kvw_ask_about *about, size_t method, size_t i)
{
    const uint32_t n = ask->questions.n_common;
    const uint64_t begin_us = kvw_now_us();
    struct kvw_method *attention = ask->worker->attention;
    struct kvw_ask_cost cost;
    double fork_s;
    kv_status_t status;

    kvw_progress(ask->plan.runs[method].method, i + 1, ask->questions.needles.count);
    status = kvw_method_enter_fork(attention, n);
    fork_s = kvw_seconds_since(begin_us);
    if (status == KV_OK)
        status = kvw_needle_question_ask(ask->worker, &ask->questions, i, ask->sampler,
                                         KVW_UNTIL_LINE_END, &ask->reply);
    if (status == KV_OK)
        status = kvw_method_leave_fork(attention, n);
    kvw_progress_end();
    if (status != KV_OK || kvw_stop)
        return failed(ask, status);
    take_cost(ask, method, fork_s, &cost);
    add(&ask->sums[method].cost, &cost);
    if (i == 0)
        ask->sums[method].codebooks_first = ask->methods[method].stats.codebooks_trained;
    else
        ask->sums[method].codebooks_later += cost.all_stats.codebooks_trained;
    kvw_ask_report_answer(about, method, i, &ask->reply, &cost);
    return KVW_DONE;
}

static int ask_all(struct ask *ask)
{
    const struct kvw_ask_about about = {
        .worker = ask->worker,
        .plan = &ask->plan,
        .questions = &ask->questions,
    };
    int outcome = KVW_DONE;

    for (size_t i = 0; outcome == KVW_DONE && i < ask->plan.count; i++) {
        outcome = begin_method(ask, i);
        end_turn(ask);
    }
    for (size_t i = 0; outcome == KVW_DONE && i < ask->questions.needles.count; i++) {
        kvw_ask_report_question(&about, i);
        for (size_t j = 0; outcome == KVW_DONE && j < ask->plan.count; j++) {
            take_turn(ask, j);
            outcome = answer(ask, &about, j, i);
            end_turn(ask);
        }
    }
    if (outcome == KVW_DONE)
        kvw_ask_report_sums(&about, ask->sums);
    return outcome;
}

/* ---- the command ---- */

static int make_plan(struct ask *ask)
{
    const struct kvw_options *options = ask->worker->options;
    char seed[32], detail[KVW_DETAIL_BYTES] = "";
    struct kvw_method_options base;
    kv_status_t status;
    int outcome = kvw_attention_options(ask->worker, &base);

    if (outcome != KVW_DONE)
        return outcome;
    if (strchr(options->budgets, ',') != NULL) {
        kvw_error(ask->worker, "option: --budgets: expected exactly one: %s", options->budgets);
        return KVW_USAGE;
    }
    snprintf(seed, sizeof(seed), "%" PRIu64, options->seed);
    status = kvw_eval_plan_make(options->methods, options->budgets, seed, &base, &ask->plan,
                                detail, sizeof(detail));
    if (status != KV_OK) {
        kvw_error(ask->worker, "option: --%s", detail);
        return status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
    }
    return kvw_options_are_used(ask->worker, ask->plan.runs, ask->plan.count) ? KVW_DONE
                                                                              : KVW_USAGE;
}

static int make_room(struct ask *ask)
{
    const struct kvw_sampler_options greedy = {.temperature = 0, .top_p = 1};

    ask->methods = calloc(ask->plan.count, sizeof(ask->methods[0]));
    ask->sums = calloc(ask->plan.count, sizeof(ask->sums[0]));
    if (ask->methods == NULL || ask->sums == NULL ||
        kvw_sampler_create(&greedy, ask->worker->model->params.n_vocabulary, &ask->sampler) !=
            KV_OK) {
        kvw_error(ask->worker, "out of memory: methods");
        return KVW_FAILED;
    }
    return KVW_DONE;
}

static int open_store(struct ask *ask)
{
    ask->worker->sessions = (uint32_t)ask->plan.count;
    return kvw_open_store(ask->worker, (uint32_t)ask->questions.most);
}

int kvw_ask_run(struct kvw_context *worker)
{
    const struct kvw_options *options = worker->options;
    struct ask *ask = calloc(1, sizeof(*ask));
    int outcome = KVW_USAGE;

    if (ask == NULL) {
        kvw_error(worker, "out of memory");
        return KVW_FAILED;
    }
    ask->worker = worker;
    if (options->text_file[0] == '\0' || options->needles[0] == '\0') {
        kvw_error(worker, "option: --%s: missing",
                  options->text_file[0] == '\0' ? "text-file" : "needles");
        goto end;
    }
    if ((outcome = make_plan(ask)) != KVW_DONE ||
        (outcome = kvw_open_file(worker)) != KVW_DONE ||
        (outcome = kvw_open_model(worker)) != KVW_DONE ||
        (outcome = read_text(ask)) != KVW_DONE || (outcome = make_room(ask)) != KVW_DONE ||
        (outcome = open_store(ask)) != KVW_DONE)
        goto end;
    outcome = ask_all(ask);

end:
    for (size_t i = 0; ask->methods != NULL && i < ask->plan.count; i++) {
        take_turn(ask, i);
        kvw_close_attention(worker);
    }
    kvw_needle_test_free(&ask->questions);
    kvw_eval_plan_free(&ask->plan);
    kvw_sampler_destroy(ask->sampler);
    free(ask->methods);
    free(ask->sums);
    free(ask);
    return outcome;
}
