/* generate: one prompt, one answer. */
#include "gpu-worker/commands/context.h"
#include "gpu-worker/text/chat_template.h"
#include "gpu-worker/text/utf8_stream.h"

#include <inttypes.h>
#include <stdlib.h>

static void prefilled(void *arg, uint32_t done, uint32_t total)
{
    (void)arg;
    kvworker_progress("prompt", done, total);
}

static void generated(void *arg, uint32_t token)
{
    kvworker_answer_token(arg, token);
}

static bool is_end(void *arg, uint32_t token)
{
    const struct kvworker_answer *answer = arg;

    return kv_tokenizer_is_end(answer->worker->tokenizer, token);
}

/* The prompt as it is, or as a user's turn of a conversation. */
static int encode(const struct kvworker *worker,
                  const char *text,
                  size_t bytes,
                  uint32_t **ret_tokens,
                  size_t *ret_count)
{
    const struct kv_chat_message message = {.role = KV_CHAT_USER, .text = text, .bytes = bytes};
    char detail[KVWORKER_DETAIL_BYTES] = "";
    struct kv_chat_template *chat;
    kv_status_t status;

    if (worker->options->raw) {
        status = kv_tokenizer_encode(worker->tokenizer, text, bytes, false, true, ret_tokens,
                                     ret_count);
    } else {
        status = kv_chat_template_create(worker->gguf, worker->tokenizer, NULL, &chat, detail,
                                         sizeof(detail));
        if (status != KV_OK) {
            kvworker_error(worker, "%s%s", detail,
                           status == KV_NOT_FOUND ? ": --raw takes the prompt as it is" : "");
            return status == KV_NO_MEMORY ? KVWORKER_FAILED : KVWORKER_USAGE;
        }
        status = kv_chat_template_encode(chat, &message, 1, ret_tokens, ret_count);
        kv_chat_template_destroy(chat);
    }
    if (status != KV_OK) {
        kvworker_error(worker, "prompt: tokens: %s", kv_status_name(status));
        return status == KV_NO_MEMORY ? KVWORKER_FAILED : KVWORKER_USAGE;
    }
    return KVWORKER_DONE;
}

/* Prompt and answer, as far as the model was made for. */
static int capacity_of(const struct kvworker *worker, size_t n_tokens, uint32_t *ret_capacity)
{
    const uint32_t context = worker->model->params.context;
    const uint64_t wanted = (uint64_t)n_tokens + worker->options->max_tokens;

    if (n_tokens == 0) {
        kvworker_error(worker, "prompt: empty: expected at least one token");
        return KVWORKER_USAGE;
    }
    if (n_tokens > context) {
        kvworker_error(worker, "prompt: %zu tokens: the model's context is %" PRIu32, n_tokens,
                       context);
        return KVWORKER_USAGE;
    }
    *ret_capacity = wanted < context ? (uint32_t)wanted : context;
    return KVWORKER_DONE;
}

int kvworker_generate_run(struct kvworker *worker)
{
    struct kvworker_answer answer = {.text = NULL};
    struct kv_sampler *sampler = NULL;
    struct kv_generate_result result;
    uint32_t *tokens = NULL, *larger, capacity;
    char *text = NULL;
    size_t bytes, n_tokens;
    kv_status_t status;
    int outcome;

    if ((outcome = kvworker_read_prompt(worker, &text, &bytes)) != KVWORKER_DONE)
        return outcome;
    if (bytes == 0) {
        kvworker_error(worker, "prompt: empty: expected a text");
        outcome = KVWORKER_USAGE;
        goto end;
    }
    if ((outcome = kvworker_open_file(worker)) != KVWORKER_DONE ||
        (outcome = kvworker_open_model(worker)) != KVWORKER_DONE ||
        (outcome = kvworker_open_sampler(worker, &sampler)) != KVWORKER_DONE ||
        (outcome = encode(worker, text, bytes, &tokens, &n_tokens)) != KVWORKER_DONE ||
        (outcome = capacity_of(worker, n_tokens, &capacity)) != KVWORKER_DONE ||
        (outcome = kvworker_open_session(worker, capacity)) != KVWORKER_DONE)
        goto end;

    outcome = KVWORKER_FAILED;
    larger = realloc(tokens, (n_tokens + worker->options->max_tokens) * sizeof(tokens[0]));
    if (larger == NULL || kvworker_answer_init(&answer, worker) != KV_OK) {
        tokens = larger != NULL ? larger : tokens;
        kvworker_error(worker, "memory: tokens: refused");
        goto end;
    }
    tokens = larger;

    const struct kv_generate_setup setup = {
        .forward = worker->forward,
        .attention = worker->attention,
        .sampler = sampler,
        .n_vocabulary = worker->model->params.n_vocabulary,
        .capacity = capacity,
        .max_tokens = (uint32_t)worker->options->max_tokens,
        .stop = &kvworker_stop,
        .arg = &answer,
        .prefilled = prefilled,
        .generated = generated,
        .is_end = is_end,
    };

    status = kv_generate(&setup, tokens, (uint32_t)n_tokens, 0, &result);
    kvworker_progress_end();
    if (status != KV_OK) {
        kvworker_step_error(worker, status);
        goto end;
    }
    kvworker_answer_end(&answer);
    if (worker->options->json)
        kvworker_report_json(worker, &result, answer.text, tokens + n_tokens);
    else
        kvworker_report_text(worker, &result);
    outcome = KVWORKER_DONE;

end:
    kvworker_answer_fini(&answer);
    kv_sampler_destroy(sampler);
    free(tokens);
    free(text);
    return outcome;
}
