/* generate: one prompt, one answer. */
#include "gpu-worker/commands/context.h"
#include "gpu-worker/text/chat_template.h"
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

/* Encodes the prompt as it is, or as a user's turn of a conversation. */
static int encode(const struct kvw_context *worker,
                  const char *text,
                  size_t bytes,
                  uint32_t **ret_tokens,
                  size_t *ret_count)
{
    const struct kvw_chat_message message = {
        .role = KVW_CHAT_USER, .text = text, .bytes = bytes};
    char detail[KVW_DETAIL_BYTES] = "";
    struct kvw_chat_template *chat;
    kv_status_t status;

    if (worker->options->raw) {
        status = kvw_tokenizer_encode(worker->tokenizer, text, bytes, false, true, ret_tokens,
                                      ret_count);
    } else {
        status = kvw_chat_template_create(worker->gguf, worker->tokenizer, NULL, &chat, detail,
                                          sizeof(detail));
        if (status != KV_OK) {
            kvw_error(worker, "%s%s", detail,
                      status == KV_NOT_FOUND ? ": use --raw to run without a chat template"
                                             : "");
            return status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
        }
        status = kvw_chat_template_encode(chat, &message, 1, ret_tokens, ret_count);
        kvw_chat_template_destroy(chat);
    }
    if (status != KV_OK) {
        kvw_error(worker, "prompt: tokens: %s", kv_status_name(status));
        return status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
    }
    return KVW_DONE;
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

    if ((outcome = kvw_read_prompt(worker, &text, &bytes)) != KVW_DONE)
        return outcome;
    if (bytes == 0) {
        kvw_error(worker, "prompt: empty: expected text");
        outcome = KVW_USAGE;
        goto end;
    }
    worker->reuses = !worker->options->fresh;
    if ((outcome = kvw_open_file(worker)) != KVW_DONE ||
        (outcome = kvw_open_model(worker)) != KVW_DONE ||
        (outcome = kvw_open_sampler(worker, &sampler)) != KVW_DONE ||
        (outcome = encode(worker, text, bytes, &tokens, &n_tokens)) != KVW_DONE ||
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

    const struct kvw_generate_setup setup = {
        .forward = worker->forward,
        .attention = worker->attention,
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

    status = kvw_generate(&setup, tokens, (uint32_t)n_tokens,
                          kvw_session_reused(worker->attention->session), &result);
    kvw_progress_end();
    if (status != KV_OK) {
        kvw_step_error(worker, status);
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
