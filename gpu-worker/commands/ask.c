/* ask: questions about one long text, by several methods side by side.
 *
 * Each method has a session in which what all questions begin with passes once.  A question
 * goes on in a fork of it, which shares the stored rows and what the store has learned about
 * them; when it is answered the fork is closed. */
#include "gpu-worker/base/time.h"
#include "gpu-worker/commands/ask_report.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A method at work: what takes its turn as the worker's own. */
struct asked {
    struct kv_attention *attention;
    struct kv_forward *forward;
    struct kv_attention_stats stats; /* when the question before had been answered */
};

struct ask {
    struct kvworker *worker;
    struct kv_eval_plan plan;
    struct asked *methods;   /* (plan.count) */
    struct kv_ask_sum *sums; /* (plan.count) */
    struct kvworker_questions questions;
    struct kvworker_reply reply;
    struct kv_sampler *sampler;
};

/* What is being done, for who looks on. */
static void say(const struct ask *ask, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void say(const struct ask *ask, const char *format, ...)
{
    va_list arguments;

    if (ask->worker->options->json && !isatty(STDERR_FILENO))
        return;
    kvworker_progress_end();
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
    if (kvworker_stop)
        kvworker_error(ask->worker, "stopped");
    else
        kvworker_step_error(ask->worker, status);
    return KVWORKER_FAILED;
}

/* ---- the text ---- */

/* The first n tokens of the text, with the sentences in it, and the questions: fewer where the
 * context takes no more. */
static int make_questions(struct ask *ask,
                          const char *text,
                          size_t bytes,
                          const uint32_t *tokens,
                          size_t n_tokens,
                          size_t n)
{
    const struct kvworker *worker = ask->worker;
    const uint32_t context = worker->model->params.context;

    /* Cut anew, a text may have a few tokens more than were counted off. */
    for (bool is_first = true;; is_first = false) {
        const size_t cut = n < n_tokens ? kvworker_bytes_of(worker, tokens, n, bytes) : bytes;
        const int outcome = kvworker_questions_make(
            worker, text, cut, (uint32_t)worker->options->max_tokens, &ask->questions);

        if (outcome != KVWORKER_DONE)
            return outcome;
        if (ask->questions.most <= context)
            break;
        if (ask->questions.most - context >= n) {
            kvworker_error(worker,
                           "text: the sentences, a question and %" PRIu64
                           " tokens of an answer alone exceed the model's context, %" PRIu32,
                           worker->options->max_tokens, context);
            return KVWORKER_USAGE;
        }
        n -= ask->questions.most - context + !is_first;
    }
    say(ask, "%s: %zu of %zu tokens, %zu sentences put into them: questions of %zu tokens",
        worker->options->text_file, n, n_tokens, ask->questions.needles.count,
        ask->questions.most - ask->questions.n_answer);
    return KVWORKER_DONE;
}

static int read_text(struct ask *ask)
{
    const struct kvworker *worker = ask->worker;
    const uint64_t wanted = worker->options->tokens;
    uint32_t *tokens = NULL;
    char *text;
    size_t bytes, n;
    kv_status_t status;
    int outcome = kvworker_read_file(worker, "text", worker->options->text_file, &text, &bytes);

    if (outcome != KVWORKER_DONE)
        return outcome;
    status = kv_tokenizer_encode(worker->tokenizer, text, bytes, false, true, &tokens, &n);
    if (status != KV_OK) {
        kvworker_error(worker, "text: tokens: %s", kv_status_name(status));
        outcome = KVWORKER_FAILED;
    } else {
        outcome = kvworker_questions_read(worker, &ask->questions);
    }
    if (outcome == KVWORKER_DONE)
        outcome = make_questions(ask, text, bytes, tokens, n,
                                 wanted > 0 && wanted < n ? (size_t)wanted : n);
    free(tokens);
    free(text);
    return outcome;
}

/* ---- questions ---- */

/* A method's session, in which what all questions begin with has passed. */
static int begin_method(struct ask *ask, size_t i)
{
    const struct kv_eval_run *run = &ask->plan.runs[i];
    struct kvworker *worker = ask->worker;
    const uint32_t n = ask->questions.n_common;
    uint64_t begin_us;
    kv_status_t status;
    int outcome = kvworker_open_attention(worker, run->row, &run->options);

    ask->methods[i].attention = worker->attention;
    ask->methods[i].forward = worker->forward;
    if (outcome != KVWORKER_DONE)
        return outcome;
    say(ask, "%s: reading %" PRIu32 " tokens into the store", run->method, n);
    begin_us = kvw_now_us();
    status = kvworker_prefill(worker, run->method, ask->questions.list[0].tokens, n,
                              ask->questions.n_answer);
    kvworker_progress_end();
    if (status == KV_OK)
        status = kvw_attention_flush(worker->attention);
    if (status != KV_OK)
        return failed(ask, status);
    ask->sums[i].prefill_s = kvw_seconds_since(begin_us);
    kvw_attention_stats(worker->attention, &ask->methods[i].stats);
    say(ask, "%s: read in %.1f s", run->method, ask->sums[i].prefill_s);
    return KVWORKER_DONE;
}

static void add(struct kv_ask_cost *to, const struct kv_ask_cost *cost)
{
    static const struct kv_attention_stats zero;

    to->questions += cost->questions;
    to->found += cost->found;
    to->generated_tokens += cost->generated_tokens;
    to->steps += cost->steps;
    to->timed_steps += cost->timed_steps;
    to->fork_s += cost->fork_s;
    to->ttft_s += cost->ttft_s;
    to->decode_s += cost->decode_s;
    kv_ask_stats_add(&to->steps_stats, &cost->steps_stats, &zero);
    kv_ask_stats_add(&to->all_stats, &cost->all_stats, &zero);
}

/* What the reply cost, its fork closed. */
static void take_cost(struct ask *ask, size_t method, double fork_s, struct kv_ask_cost *cost)
{
    const struct kv_attention *attention = ask->worker->attention;
    const struct kv_generate_result *result = &ask->reply.result;
    struct asked *asked = &ask->methods[method];
    struct kv_attention_stats now;

    *cost = (struct kv_ask_cost){
        .questions = 1,
        .found = ask->reply.verdict == KV_NEEDLE_FOUND,
        .generated_tokens = result->generated_tokens,
        .steps = result->passed_tokens - result->prompt_tokens,
        .timed_steps = result->generated_tokens > 1 ? result->generated_tokens - 1 : 0,
        .fork_s = fork_s,
        .ttft_s = fork_s + (result->generated_tokens > 0 ? result->ttft_s : result->prefill_s),
        .decode_s = result->generated_tokens > 1 ? result->last_s - result->ttft_s : 0,
    };
    kvw_attention_stats(attention, &now);
    kv_ask_stats_add(&cost->steps_stats, &now, &ask->reply.at_first);
    kv_ask_stats_add(&cost->all_stats, &now, &asked->stats);
    asked->stats = now;
}

static int answer(struct ask *ask, const struct kv_ask_about *about, size_t method, size_t i)
{
    const uint32_t n = ask->questions.n_common;
    const uint64_t begin_us = kvw_now_us();
    struct kv_attention *attention = ask->worker->attention;
    struct kv_ask_cost cost;
    double fork_s;
    kv_status_t status;

    kvworker_progress(ask->plan.runs[method].method, i + 1, ask->questions.needles.count);
    status = kvw_attention_branch(attention, n);
    fork_s = kvw_seconds_since(begin_us);
    if (status == KV_OK)
        status = kvworker_question_ask(ask->worker, &ask->questions, i, ask->sampler,
                                       KVWORKER_UNTIL_LINE_END, &ask->reply);
    if (status == KV_OK)
        status = kvw_attention_unbranch(attention, n);
    kvworker_progress_end();
    if (status != KV_OK || kvworker_stop)
        return failed(ask, status);
    take_cost(ask, method, fork_s, &cost);
    add(&ask->sums[method].cost, &cost);
    if (i == 0)
        ask->sums[method].codebooks_first = ask->methods[method].stats.codebooks_trained;
    else
        ask->sums[method].codebooks_later += cost.all_stats.codebooks_trained;
    kv_ask_report_answer(about, method, i, &ask->reply, &cost);
    return KVWORKER_DONE;
}

static int ask_all(struct ask *ask)
{
    const struct kv_ask_about about = {
        .worker = ask->worker,
        .plan = &ask->plan,
        .questions = &ask->questions,
    };
    int outcome = KVWORKER_DONE;

    for (size_t i = 0; outcome == KVWORKER_DONE && i < ask->plan.count; i++) {
        outcome = begin_method(ask, i);
        end_turn(ask);
    }
    for (size_t i = 0; outcome == KVWORKER_DONE && i < ask->questions.needles.count; i++) {
        kv_ask_report_question(&about, i);
        for (size_t j = 0; outcome == KVWORKER_DONE && j < ask->plan.count; j++) {
            take_turn(ask, j);
            outcome = answer(ask, &about, j, i);
            end_turn(ask);
        }
    }
    if (outcome == KVWORKER_DONE)
        kv_ask_report_sums(&about, ask->sums);
    return outcome;
}

/* ---- the command ---- */

static int make_plan(struct ask *ask)
{
    const struct kvworker_options *options = ask->worker->options;
    char seed[32], detail[KVWORKER_DETAIL_BYTES] = "";
    struct kv_attention_options base;
    kv_status_t status;
    int outcome = kvworker_attention_options(ask->worker, &base);

    if (outcome != KVWORKER_DONE)
        return outcome;
    if (strchr(options->budgets, ',') != NULL) {
        kvworker_error(ask->worker, "option: --budgets: one is expected: %s", options->budgets);
        return KVWORKER_USAGE;
    }
    snprintf(seed, sizeof(seed), "%" PRIu64, options->seed);
    status = kv_eval_plan_make(options->methods, options->budgets, seed, &base, &ask->plan,
                               detail, sizeof(detail));
    if (status != KV_OK) {
        kvworker_error(ask->worker, "option: --%s", detail);
        return status == KV_NO_MEMORY ? KVWORKER_FAILED : KVWORKER_USAGE;
    }
    return KVWORKER_DONE;
}

static int make_room(struct ask *ask)
{
    const struct kv_sampler_options greedy = {.temperature = 0, .top_p = 1};

    ask->methods = calloc(ask->plan.count, sizeof(ask->methods[0]));
    ask->sums = calloc(ask->plan.count, sizeof(ask->sums[0]));
    if (ask->methods == NULL || ask->sums == NULL ||
        kv_sampler_create(&greedy, ask->worker->model->params.n_vocabulary, &ask->sampler) !=
            KV_OK) {
        kvworker_error(ask->worker, "memory: methods: refused");
        return KVWORKER_FAILED;
    }
    return KVWORKER_DONE;
}

static int open_store(struct ask *ask)
{
    ask->worker->sessions = (uint32_t)ask->plan.count;
    return kvworker_open_store(ask->worker, (uint32_t)ask->questions.most);
}

int kvworker_ask_run(struct kvworker *worker)
{
    const struct kvworker_options *options = worker->options;
    struct ask *ask = calloc(1, sizeof(*ask));
    int outcome = KVWORKER_USAGE;

    if (ask == NULL) {
        kvworker_error(worker, "memory: refused");
        return KVWORKER_FAILED;
    }
    ask->worker = worker;
    if (options->text_file[0] == '\0' || options->needles[0] == '\0') {
        kvworker_error(worker, "option: --%s: missing",
                       options->text_file[0] == '\0' ? "text-file" : "needles");
        goto end;
    }
    if ((outcome = make_plan(ask)) != KVWORKER_DONE ||
        (outcome = kvworker_open_file(worker)) != KVWORKER_DONE ||
        (outcome = kvworker_open_model(worker)) != KVWORKER_DONE ||
        (outcome = read_text(ask)) != KVWORKER_DONE ||
        (outcome = make_room(ask)) != KVWORKER_DONE ||
        (outcome = open_store(ask)) != KVWORKER_DONE)
        goto end;
    outcome = ask_all(ask);

end:
    for (size_t i = 0; ask->methods != NULL && i < ask->plan.count; i++) {
        take_turn(ask, i);
        kvworker_close_attention(worker);
    }
    kvworker_questions_free(&ask->questions);
    kv_eval_plan_free(&ask->plan);
    kv_sampler_destroy(ask->sampler);
    free(ask->methods);
    free(ask->sums);
    free(ask);
    return outcome;
}
