/* generate: one prompt, one answer. */
#include "gpu-worker/commands/conversation.h"
#include "gpu-worker/text/utf8_stream.h"

#include <inttypes.h>
#include <stdlib.h>

static void prefilled(void *arg, uint32_t done, uint32_t total)
{
    (void)arg;
    kvw_progress("prompt", done, total);
}

static void generated(void *arg, uint32_t token)
{
    kvw_answer_token(arg, token);
}

static bool is_end(void *arg, uint32_t token)
{
    const struct kvw_answer *answer = arg;

    return kvw_tokenizer_is_end(answer->worker->tokenizer, token);
}

/* Tokens of prompt and answer, at most the model's context. */
static int
capacity_of(const struct kvw_context *worker, size_t n_tokens, uint32_t *ret_capacity)
{
    const uint32_t context = worker->model->params.context;
    const uint64_t wanted = (uint64_t)n_tokens + worker->options->max_tokens;

    if (n_tokens == 0) {
        kvw_error(worker, "prompt: empty: expected at least one token");
        return KVW_USAGE;
    }
    if (n_tokens > context) {
        kvw_error(worker, "prompt: %zu tokens: the model's context is %" PRIu32, n_tokens,
                  context);
        return KVW_USAGE;
    }
    *ret_capacity = wanted < context ? (uint32_t)wanted : context;
    return KVW_DONE;
}

/* One more turn of a session's conversation, or, with --raw, more of its text. */
static int go_on(struct kvw_context *worker, char *text, size_t bytes)
{
    struct kvw_conversation conversation;
    struct kvw_generate_result result;
    uint32_t *tokens = NULL;
    size_t n = 0;
    int outcome;

    if ((outcome = kvw_open_file(worker)) != KVW_DONE ||
        (outcome = kvw_open_model(worker)) != KVW_DONE) {
        free(text);
        return outcome;
    }
    outcome = kvw_conversation_open(&conversation, worker);
    if (outcome == KVW_DONE)
        outcome = kvw_conversation_check(&conversation, worker->options->raw);
    if (outcome == KVW_DONE && worker->options->raw) {
        outcome = kvw_conversation_append(&conversation, text, bytes, &tokens, &n);
    } else if (outcome == KVW_DONE) {
        outcome = kvw_conversation_takes(worker, text, bytes)
                      ? kvw_conversation_template(&conversation)
                      : KVW_USAGE;
        if (outcome == KVW_DONE) {
            outcome = kvw_conversation_add(&conversation, KVW_CHAT_USER, text);
            text = NULL;
        }
        if (outcome == KVW_DONE)
            outcome = kvw_conversation_encode(&conversation, &tokens, &n);
    }
    if (outcome == KVW_DONE)
        outcome = kvw_conversation_fit(&conversation, n);
    if (outcome == KVW_DONE)
        kvw_conversation_say(&conversation);
    if (outcome == KVW_DONE)
        outcome = kvw_conversation_answer(&conversation, tokens, n, &result);
    if (outcome == KVW_DONE && !worker->options->json)
        kvw_report_text(worker, &result);
    free(tokens);
    free(text);
    kvw_conversation_close(&conversation);
    return outcome;
}

/* After a failure: gives the worker another session, which computes all of the prompt, if rows that the
 * nodes kept of it were corrupt and no token has come yet.  Otherwise returns false. */
static bool begin_anew(struct kvw_context *worker,
                       kv_status_t status,
                       const struct kvw_answer *answer,
                       const uint32_t *tokens,
                       size_t n_tokens)
{
    struct kvw_session *session = worker->attention->session;
    struct kvw_method_options options;

    if (status != KV_CORRUPT || answer->has_begun || !kvw_session_disown(session, tokens))
        return false;
    kvw_error(worker, "%s; the prompt is computed anew", kvw_method_detail(worker->attention));
    kvw_close_attention(worker);
    return kvw_attention_options(worker, &options) == KVW_DONE &&
           kvw_open_attention(worker, kvw_method_find(worker->options->attention), &options,
                              tokens, (uint32_t)n_tokens) == KVW_DONE;
}

static kv_status_t generate(const struct kvw_context *worker,
                            struct kvw_generate_setup *setup,
                            uint32_t *tokens,
                            size_t n_tokens,
                            struct kvw_generate_result *ret_result)
{
    kv_status_t status;

    setup->forward = worker->forward;
    setup->attention = worker->attention;
    status = kvw_generate(setup, tokens, (uint32_t)n_tokens,
                          kvw_session_reused(worker->attention->session), ret_result);
    kvw_progress_end();
    return status;
}

int kvw_generate_run(struct kvw_context *worker)
{
    struct kvw_answer answer = {.text = NULL};
    struct kvw_sampler *sampler = NULL;
    struct kvw_generate_result result;
    uint32_t *tokens = NULL, *larger, capacity;
    char *text = NULL;
    size_t bytes, n_tokens;
    kv_status_t status;
    int outcome;

    if (worker->options->prompts[0] != '\0')
        return kvw_generate_batch(worker);
    if ((outcome = kvw_read_prompt(worker, &text, &bytes)) != KVW_DONE)
        return outcome;
    if (bytes == 0) {
        kvw_error(worker, "prompt: empty: expected text");
        outcome = KVW_USAGE;
        goto end;
    }
    worker->reuses = !worker->options->fresh;
    worker->publishes = true;
    if (worker->options->session[0] != '\0')
        return go_on(worker, text, bytes);
    if ((outcome = kvw_open_file(worker)) != KVW_DONE ||
        (outcome = kvw_open_model(worker)) != KVW_DONE ||
        (outcome = kvw_open_sampler(worker, &sampler)) != KVW_DONE ||
        (outcome = kvw_encode_prompt(worker, text, bytes, &tokens, &n_tokens)) != KVW_DONE ||
        (outcome = capacity_of(worker, n_tokens, &capacity)) != KVW_DONE ||
        (outcome = kvw_open_session(worker, capacity, tokens, (uint32_t)n_tokens)) != KVW_DONE)
        goto end;

    outcome = KVW_FAILED;
    larger = realloc(tokens, (n_tokens + worker->options->max_tokens) * sizeof(tokens[0]));
    if (larger == NULL || kvw_answer_init(&answer, worker) != KV_OK) {
        tokens = larger != NULL ? larger : tokens;
        kvw_error(worker, "out of memory: tokens");
        goto end;
    }
    tokens = larger;

    struct kvw_generate_setup setup = {
        .sampler = sampler,
        .n_vocabulary = worker->model->params.n_vocabulary,
        .capacity = capacity,
        .max_tokens = (uint32_t)worker->options->max_tokens,
        .stop = &kvw_stop,
        .arg = &answer,
        .prefilled = prefilled,
        .generated = generated,
        .is_end = is_end,
    };

    status = generate(worker, &setup, tokens, n_tokens, &result);
    if (status != KV_OK && begin_anew(worker, status, &answer, tokens, n_tokens))
        status = generate(worker, &setup, tokens, n_tokens, &result);
    if (status != KV_OK) {
        kvw_answer_break_off(&answer);
        if (worker->attention != NULL) {
            kvw_step_error(worker, status);
            kvw_drop_corrupt(worker, status, tokens);
        }
        goto end;
    }
    kvw_answer_end(&answer);
    if (worker->options->json)
        kvw_report_json(worker, &result, answer.text, tokens + n_tokens);
    else
        kvw_report_text(worker, &result);
    outcome = KVW_DONE;

end:
    kvw_answer_fini(&answer);
    kvw_sampler_destroy(sampler);
    free(tokens);
    free(text);
    return outcome;
}
