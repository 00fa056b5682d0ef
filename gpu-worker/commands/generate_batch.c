/* generate --prompts: a file of prompts, answered together.
 *
 * An answer is printed when it is whole, as text under a heading, or with --json as an object a
 * line.  One that fails is told as such, and the others go on; the exit status says so. */
#include "gpu-worker/base/time.h"
#include "gpu-worker/commands/context.h"
#include "gpu-worker/commands/prompts_file.h"
#include "gpu-worker/engine/batch.h"
#include "kvserver/base/config.h"
#include "kvserver/base/json.h"

#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>

struct answers;

/* A prompt and its answer. */
struct asked {
    struct answers *answers;
    const struct kvw_prompt *prompt;
    struct kvw_sequence sequence;
    struct kvw_answer answer;
    char detail[KVW_DETAIL_BYTES]; /* why its session could not be opened */
};

struct answers {
    struct kvw_context *worker;
    const struct kvw_method_ops *ops;
    struct kvw_method_options options;
    struct kvw_prompts prompts;
    struct asked *asked; /* (prompts.n) */
    size_t n_over, n_failed;
    bool is_refused; /* as the options are, no session can be opened */
    uint64_t n_reused;
    struct kvw_waits waits;
};

/* ---- one of them -------------------------------------------------------------------------- */

static kv_status_t open_sequence(void *arg, struct kvw_method **ret_attention)
{
    struct asked *asked = arg;
    struct answers *answers = asked->answers;
    kv_status_t status = kvw_create_method(answers->worker, answers->ops, &answers->options,
                                           asked->sequence.capacity, asked->sequence.tokens,
                                           asked->sequence.n_prompt, ret_attention,
                                           asked->detail, sizeof(asked->detail));

    if (status != KV_OK)
        return status;
    status = kvw_open_sampler(answers->worker, &asked->sequence.sampler) == KVW_DONE
                 ? kvw_answer_init(&asked->answer, answers->worker)
                 : KV_NO_MEMORY;
    asked->answer.prints = false;
    return status;
}

static void close_sequence(void *arg, struct kvw_method *attention)
{
    struct asked *asked = arg;

    attention->ops->destroy(attention);
    kvw_sampler_destroy(asked->sequence.sampler);
    asked->sequence.sampler = NULL;
    kvw_answer_fini(&asked->answer);
    if (!asked->sequence.is_over)
        return; /* it is opened again */
    free(asked->sequence.tokens);
    asked->sequence.tokens = NULL;
}

static void generated(void *arg, uint32_t token)
{
    kvw_answer_token(&((struct asked *)arg)->answer, token);
}

static bool is_end(void *arg, uint32_t token)
{
    return kvw_tokenizer_is_end(((struct asked *)arg)->answers->worker->tokenizer, token);
}

/* ---- what is printed ---------------------------------------------------------------------- */

static const char *why_failed(const struct asked *asked, kv_status_t status)
{
    const char *detail = asked->sequence.attention != NULL
                             ? kvw_method_detail(asked->sequence.attention)
                             : asked->detail;

    return detail[0] != '\0' ? detail : kv_status_name(status);
}

static void print_text(const struct asked *asked,
                       kv_status_t status,
                       const struct kvw_generate_result *result)
{
    if (asked->prompt->id != NULL)
        printf("--- %s", asked->prompt->id);
    else
        printf("--- line %" PRIu32, asked->prompt->line);
    if (status != KV_OK) {
        printf(": failed: %s\n", why_failed(asked, status));
        return;
    }
    printf(": %" PRIu32 " tokens, %s\n%s\n", result->generated_tokens,
           kvw_generate_end_name(result->end), asked->answer.text);
}

static void print_json(const struct asked *asked,
                       kv_status_t status,
                       const struct kvw_generate_result *result)
{
    struct kv_json json;

    kv_json_begin(&json, stdout);
    kv_json_number(&json, "line", asked->prompt->line);
    if (asked->prompt->id != NULL)
        kv_json_text(&json, "id", asked->prompt->id);
    kv_json_number(&json, "prompt_tokens", result->prompt_tokens);
    if (status != KV_OK) {
        kv_json_text(&json, "error", why_failed(asked, status));
        kv_json_end(&json);
        return;
    }
    kv_json_text(&json, "text", asked->answer.text);
    kv_json_list(&json, "token_ids");
    for (uint32_t i = 0; i < result->generated_tokens; i++)
        kv_json_item_number(&json, asked->sequence.tokens[result->prompt_tokens + i]);
    kv_json_list_end(&json);
    kv_json_text(&json, "end", kvw_generate_end_name(result->end));
    kv_json_number(&json, "reused_tokens", result->reused_tokens);
    kv_json_number(&json, "generated_tokens", result->generated_tokens);
    kv_json_number(&json, "prefill_s", result->prefill_s);
    kv_json_number(&json, "ttft_s", result->ttft_s);
    kv_json_number(&json, "tpot_s", result->tpot_s);
    kv_json_number(&json, "total_s", result->total_s);
    kv_json_end(&json);
}

static void over(void *arg, kv_status_t status, const struct kvw_generate_result *result)
{
    struct asked *asked = arg;
    struct answers *answers = asked->answers;
    struct kvw_method_stats stats;

    if (status == KV_CORRUPT && asked->sequence.attention != NULL &&
        kvw_session_disown(asked->sequence.attention->session, asked->sequence.tokens))
        kvw_error(answers->worker,
                  "prompts: line %" PRIu32 ": rows that nodes kept are corrupt: they drop them",
                  asked->prompt->line);
    if (!asked->sequence.is_open && (status == KV_INVALID || status == KV_UNSUPPORTED)) {
        kvw_error(answers->worker, "%s", why_failed(asked, status));
        answers->is_refused = true;
    }
    if (asked->sequence.attention != NULL) {
        kvw_method_get_stats(asked->sequence.attention, &stats);
        answers->waits.node_s += stats.waits.node_s;
        answers->waits.queue_s += stats.waits.queue_s;
        answers->waits.wire_s += stats.waits.wire_s;
        answers->waits.index_s += stats.waits.index_s;
        answers->waits.rows_s += stats.waits.rows_s;
    }
    answers->n_reused += result->reused_tokens;
    answers->n_failed += status != KV_OK;
    answers->n_over++;
    if (answers->is_refused || (kvw_stop && status == KV_CANCELLED))
        return;
    kvw_progress_end();
    if (status == KV_OK)
        kvw_answer_end(&asked->answer);
    if (answers->worker->options->json)
        print_json(asked, status, result);
    else
        print_text(asked, status, result);
    if (fflush(stdout) != 0)
        kvw_stop = SIGTERM; /* stdout is closed */
}

static void report(const struct answers *answers, const struct kvw_batch *batch, double seconds)
{
    const struct kvw_waits *waits = &answers->waits;
    struct kvw_batch_stats stats;
    char rows[16];

    kvw_batch_get_stats(batch, &stats);
    fprintf(stderr,
            "kvworker: %zu prompt%s, %" PRIu64 " at a time: %" PRIu64
            " tokens of prompts computed, %" PRIu64 " reused; %" PRIu64
            " of answers; at most %" PRIu32 " begun, with %s of rows; %.2f s, %.1f tokens of "
            "answers/s; waited %.3f s (nodes' work %.3f, "
            "queues %.3f, wire and wake-ups %.3f, index %.3f, rows %.3f), idle %.3f\n",
            answers->n_over, answers->n_over == 1 ? "" : "s", answers->worker->options->batch,
            stats.prompt_tokens, answers->n_reused, stats.answer_tokens, stats.sequences_most,
            kv_config_format_size(stats.row_bytes_most, rows, sizeof(rows)), seconds,
            seconds > 0 ? (double)stats.answer_tokens / seconds : 0,
            waits->node_s + waits->queue_s + waits->wire_s + waits->index_s + waits->rows_s,
            waits->node_s, waits->queue_s, waits->wire_s, waits->index_s, waits->rows_s,
            stats.idle_s);
}

/* ---- all of them -------------------------------------------------------------------------- */

/* Encodes a prompt, with room for its answer behind it. */
static int encode(struct answers *answers, size_t i)
{
    struct kvw_context *worker = answers->worker;
    const uint32_t context = worker->model->params.context;
    const struct kvw_prompt *prompt = &answers->prompts.prompts[i];
    struct asked *asked = &answers->asked[i];
    const uint32_t max_tokens =
        prompt->max_tokens > 0 ? prompt->max_tokens : (uint32_t)worker->options->max_tokens;
    uint32_t *tokens = NULL, *larger;
    size_t n = 0;
    const int outcome = kvw_encode_prompt(worker, prompt->text, prompt->bytes, &tokens, &n);

    if (outcome != KVW_DONE)
        return outcome;
    if (n == 0 || n > context) {
        kvw_error(worker,
                  "prompts: line %" PRIu32 ": %zu tokens: must be 1 to %" PRIu32
                  ", the model's context",
                  prompt->line, n, context);
        free(tokens);
        return KVW_USAGE;
    }
    const uint32_t capacity = n + max_tokens < context ? (uint32_t)n + max_tokens : context;
    const enum kv_dtype dtype = kvw_dtype(worker->options);
    const struct kvw_model_params *params = &worker->model->params;
    const uint64_t row_bytes =
        kvw_method_full_row_bytes(params, dtype, capacity) +
        (answers->ops->buffer_bytes != NULL
             ? answers->ops->buffer_bytes(&answers->options, params, dtype, capacity)
             : 0);
    if (worker->options->kv_memory > 0 && row_bytes > worker->options->kv_memory) {
        kvw_error(worker,
                  "prompts: line %" PRIu32 ": %" PRIu32 " tokens of prompt and answer: %" PRIu64
                  " MiB of rows, more than --kv-memory, %" PRIu64 " MiB",
                  prompt->line, capacity, row_bytes >> 20, worker->options->kv_memory >> 20);
        free(tokens);
        return KVW_USAGE;
    }
    larger = realloc(tokens, ((size_t)capacity + 1) * sizeof(tokens[0]));
    if (larger == NULL) {
        kvw_error(worker, "out of memory: prompts");
        free(tokens);
        return KVW_FAILED;
    }
    asked->answers = answers;
    asked->prompt = prompt;
    asked->sequence = (struct kvw_sequence){
        .tokens = larger,
        .n_prompt = (uint32_t)n,
        .max_tokens = max_tokens,
        .capacity = capacity,
        .row_bytes = row_bytes,
        .arg = asked,
        .open = open_sequence,
        .close = close_sequence,
        .generated = generated,
        .is_end = is_end,
        .over = over,
    };
    return KVW_DONE;
}

static int larger_first(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return x < y ? 1 : x > y ? -1 : 0;
}

/* How many tokens the sessions may have that are open at the same time: those of the largest. */
static bool sum_tokens(struct answers *answers)
{
    const size_t n = answers->prompts.n;
    uint32_t *capacities = calloc(n, sizeof(capacities[0]));

    if (capacities == NULL) {
        kvw_error(answers->worker, "out of memory: prompts");
        return false;
    }
    for (size_t i = 0; i < n; i++)
        capacities[i] = answers->asked[i].sequence.capacity;
    qsort(capacities, n, sizeof(capacities[0]), larger_first);
    for (size_t i = 0; i < answers->worker->sessions; i++)
        answers->worker->session_tokens += capacities[i];
    free(capacities);
    return true;
}

static int encode_all(struct answers *answers, uint32_t *ret_capacity)
{
    *ret_capacity = 0;
    answers->asked = calloc(answers->prompts.n, sizeof(answers->asked[0]));
    if (answers->asked == NULL) {
        kvw_error(answers->worker, "out of memory: prompts");
        return KVW_FAILED;
    }
    for (size_t i = 0; i < answers->prompts.n; i++) {
        const int outcome = kvw_stop ? KVW_FAILED : encode(answers, i);

        if (outcome != KVW_DONE)
            return outcome;
        if (answers->asked[i].sequence.capacity > *ret_capacity)
            *ret_capacity = answers->asked[i].sequence.capacity;
    }
    return sum_tokens(answers) ? KVW_DONE : KVW_FAILED;
}

/* What every answer needs: its method, its options, and a sampler as they say. */
static int check_options(struct answers *answers)
{
    struct kvw_sampler *sampler = NULL;
    int outcome = kvw_attention_options(answers->worker, &answers->options);

    answers->ops = kvw_method_find(answers->worker->options->attention);
    if (outcome == KVW_DONE)
        outcome = kvw_open_sampler(answers->worker, &sampler);
    kvw_sampler_destroy(sampler);
    return outcome;
}

static int run(struct answers *answers)
{
    struct kvw_context *worker = answers->worker;
    const struct kvw_batch_setup setup = {
        .model = worker->model,
        .sequences = (uint32_t)worker->options->batch,
        .tokens = (uint32_t)worker->options->batch_tokens,
        .groups = (uint32_t)worker->options->groups,
        .row_bytes = worker->options->kv_memory,
        .trace = worker->trace,
    };
    const uint64_t begin_us = kvw_now_us();
    struct kvw_batch *batch;
    uint32_t n_left = 1;
    kv_status_t status = kvw_batch_create(&setup, &batch);

    if (status != KV_OK) {
        kvw_error(worker, "out of memory: passes of %" PRIu32 " tokens", setup.tokens);
        return KVW_FAILED;
    }
    for (size_t i = 0; i < answers->prompts.n; i++)
        kvw_batch_add(batch, &answers->asked[i].sequence);
    while (status == KV_OK && n_left > 0 && !kvw_stop && !answers->is_refused) {
        status = kvw_batch_step(batch, &n_left);
        kvw_progress("answers", answers->n_over, answers->prompts.n);
    }
    kvw_progress_end();
    if (status != KV_OK)
        kvw_error(worker, "pass: %s", kv_status_name(status));
    if (status == KV_OK && n_left == 0 && !answers->is_refused)
        report(answers, batch, kvw_seconds_since(begin_us));
    kvw_batch_destroy(batch);
    if (answers->is_refused)
        return KVW_USAGE;
    return status == KV_OK && answers->n_failed == 0 ? KVW_DONE : KVW_FAILED;
}

static int read_prompts(struct answers *answers)
{
    struct kvw_context *worker = answers->worker;
    const struct kvw_options *options = worker->options;
    char detail[KVW_DETAIL_BYTES] = "";
    char *text;
    size_t bytes;
    kv_status_t status;
    int outcome;

    if (options->prompt != NULL || options->prompt_file[0] != '\0' ||
        options->session[0] != '\0') {
        kvw_error(worker, "option: --prompts: not together with --prompt, --prompt-file or "
                          "--session");
        return KVW_USAGE;
    }
    if (options->batch_tokens < options->batch + KVW_FORWARD_CHUNK) {
        kvw_error(worker,
                  "option: --batch-tokens: %" PRIu64 ": must be %" PRIu64
                  " at least, for --batch %" PRIu64 " and a chunk of a prompt",
                  options->batch_tokens, options->batch + KVW_FORWARD_CHUNK, options->batch);
        return KVW_USAGE;
    }
    outcome = kvw_read_file(worker, "prompts", options->prompts, &text, &bytes);
    if (outcome != KVW_DONE)
        return outcome;
    status =
        kvw_prompts_read(text, bytes, KV_TOKENS_MAX, &answers->prompts, detail, sizeof(detail));
    free(text);
    if (status == KV_OK)
        return KVW_DONE;
    kvw_error(worker, "prompts: %s: %s", options->prompts, detail);
    return status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
}

int kvw_generate_batch(struct kvw_context *worker)
{
    struct answers answers = {.worker = worker};
    uint32_t capacity;
    int outcome;

    worker->reuses = !worker->options->fresh;
    worker->publishes = true;
    worker->opens_later = true;
    if ((outcome = read_prompts(&answers)) != KVW_DONE)
        return outcome;
    worker->sessions =
        (uint32_t)(worker->options->batch < answers.prompts.n ? worker->options->batch
                                                              : answers.prompts.n);
    if ((outcome = kvw_open_file(worker)) == KVW_DONE &&
        (outcome = kvw_open_model(worker)) == KVW_DONE &&
        (outcome = check_options(&answers)) == KVW_DONE &&
        (outcome = encode_all(&answers, &capacity)) == KVW_DONE &&
        (outcome = kvw_open_store(worker, capacity)) == KVW_DONE)
        outcome = run(&answers);
    for (size_t i = 0; answers.asked != NULL && i < answers.prompts.n; i++)
        free(answers.asked[i].sequence.tokens);
    free(answers.asked);
    kvw_prompts_free(&answers.prompts);
    return outcome;
}
