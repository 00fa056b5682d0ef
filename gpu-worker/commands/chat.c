/* chat: a conversation, turn by turn.
 *
 * Each turn encodes the whole conversation and continues where its tokens first differ from
 * those in the cache: mostly at the end of the last answer. */
#include "gpu-worker/commands/context.h"
#include "gpu-worker/text/chat_template.h"
#include "gpu-worker/text/utf8_stream.h"
#include "kvserver/base/memory.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    LINE_BYTES_MAX = 1 << 20,
    IDLE_MS = 1000,
};

struct chat {
    struct kvw_context *worker;
    bool has_failed; /* reading the input failed */
    struct kvw_chat_template *template;
    struct kvw_sampler *sampler;

    struct kvw_chat_message *messages;
    size_t n_messages, room;

    uint32_t *tokens;  /* (capacity + max_tokens): of the last turn */
    uint32_t n_passed; /* of these, in the cache */

    char *input; /* (LINE_BYTES_MAX) */
    size_t input_bytes;
    bool is_over; /* no more input */

    struct kvw_answer answer;
    uint64_t prompt_tokens, generated_tokens, n_turns;
};

/* ---- lines ---- */

/* Returns the next line without its newline.  Keeps the session alive while it waits.  false:
 * the input has ended, or a signal was received. */
static bool read_line(struct chat *chat, char **ret_line)
{
    while (!kvw_stop) {
        char *end = memchr(chat->input, '\n', chat->input_bytes);
        struct pollfd in = {.fd = STDIN_FILENO, .events = POLLIN};
        ssize_t n;

        if (end == NULL && chat->is_over && chat->input_bytes > 0)
            end = chat->input + chat->input_bytes; /* a last line without an end */
        if (end != NULL) {
            const size_t bytes = (size_t)(end - chat->input);
            const size_t used = bytes < chat->input_bytes ? bytes + 1 : bytes;

            *ret_line = malloc(bytes + 1);
            if (*ret_line == NULL) {
                kvw_error(chat->worker, "out of memory: input line");
                chat->has_failed = true;
                return false;
            }
            memcpy(*ret_line, chat->input, bytes);
            (*ret_line)[bytes] = '\0';
            memmove(chat->input, chat->input + used, chat->input_bytes - used);
            chat->input_bytes -= used;
            return true;
        }
        if (chat->is_over)
            return false;
        if (chat->input_bytes == LINE_BYTES_MAX) {
            kvw_error(chat->worker, "input: line longer than %d MiB", LINE_BYTES_MAX >> 20);
            chat->has_failed = true;
            return false;
        }
        if (poll(&in, 1, IDLE_MS) <= 0) {
            kvw_method_keepalive(chat->worker->attention);
            continue;
        }
        n = read(STDIN_FILENO, chat->input + chat->input_bytes,
                 LINE_BYTES_MAX - chat->input_bytes);
        if (n > 0)
            chat->input_bytes += (size_t)n;
        else if (n == 0 || errno != EINTR)
            chat->is_over = true;
    }
    return false;
}

/* ---- turns ---- */

static bool add_message(struct chat *chat, enum kvw_chat_role role, char *text)
{
    if (chat->n_messages == chat->room) {
        const size_t room = chat->room > 0 ? chat->room * 2 : 16;
        void *larger = realloc(chat->messages, room * sizeof(chat->messages[0]));

        if (larger == NULL)
            return false;
        chat->messages = larger;
        chat->room = room;
    }
    chat->messages[chat->n_messages++] =
        (struct kvw_chat_message){.role = role, .text = text, .bytes = strlen(text)};
    return true;
}

static void drop_message(struct chat *chat)
{
    free((char *)(uintptr_t)chat->messages[--chat->n_messages].text);
}

static void prefilled(void *arg, uint32_t done, uint32_t total)
{
    (void)arg;
    kvw_progress("prompt", done, total);
}

static void generated(void *arg, uint32_t token)
{
    kvw_answer_token(&((struct chat *)arg)->answer, token);
}

static bool is_end(void *arg, uint32_t token)
{
    return kvw_tokenizer_is_end(((const struct chat *)arg)->worker->tokenizer, token);
}

/* Encodes the conversation to `tokens`, and truncates the cache to what both have in common. */
static kv_status_t go_back(struct chat *chat, const uint32_t *tokens, size_t n)
{
    struct kvw_method *attention = chat->worker->attention;
    uint32_t same = 0;
    kv_status_t status = KV_OK;

    while (same < chat->n_passed && same + 1 < n && chat->tokens[same] == tokens[same])
        same++;
    if (same < chat->n_passed)
        status = kvw_method_truncate(attention, same);
    if (status == KV_OK) {
        chat->n_passed = same;
        memcpy(chat->tokens, tokens, n * sizeof(tokens[0]));
    }
    return status;
}

/* Answers the last message.  Returns the exit status; *ret_go_on: the conversation can
 * continue. */
static int answer(struct chat *chat, bool *ret_go_on)
{
    struct kvw_context *worker = chat->worker;
    const struct kvw_generate_setup setup = {
        .forward = worker->forward,
        .attention = worker->attention,
        .sampler = chat->sampler,
        .n_vocabulary = worker->model->params.n_vocabulary,
        .capacity = worker->capacity,
        .max_tokens = (uint32_t)worker->options->max_tokens,
        .stop = &kvw_stop,
        .arg = chat,
        .prefilled = prefilled,
        .generated = generated,
        .is_end = is_end,
    };
    struct kvw_generate_result result;
    uint32_t *tokens = NULL;
    size_t n;
    kv_status_t status;

    *ret_go_on = true;
    status =
        kvw_chat_template_encode(chat->template, chat->messages, chat->n_messages, &tokens, &n);
    if (status != KV_OK) {
        kvw_error(worker, "prompt: tokens: %s", kv_status_name(status));
        *ret_go_on = false;
        return KVW_FAILED;
    }
    if (n > worker->capacity) {
        kvw_error(worker, "prompt: %zu tokens with the conversation so far: limit %" PRIu32, n,
                  worker->capacity);
        drop_message(chat); /* a shorter one may fit */
        free(tokens);
        return KVW_DONE;
    }
    status = go_back(chat, tokens, n);
    free(tokens);
    if (status == KV_OK)
        status = kvw_answer_init(&chat->answer, worker);
    if (status == KV_OK)
        status = kvw_generate(&setup, chat->tokens, (uint32_t)n, chat->n_passed, &result);
    kvw_progress_end();
    if (status != KV_OK) {
        kvw_step_error(worker, status);
        kvw_answer_fini(&chat->answer);
        *ret_go_on = false;
        return KVW_FAILED;
    }
    kvw_answer_end(&chat->answer);
    if (worker->options->json)
        kvw_report_json(worker, &result, chat->answer.text, chat->tokens + n);
    chat->n_passed = result.passed_tokens;
    chat->prompt_tokens += result.prompt_tokens - result.reused_tokens;
    chat->generated_tokens += result.generated_tokens;
    chat->n_turns++;
    if (kvw_stop == SIGINT)
        kvw_stop = 0; /* an interrupt ends the answer, not the conversation */
    if (result.generated_tokens == 0 && result.end == KVW_END_INTERRUPT) {
        drop_message(chat); /* a message without an answer is removed from the conversation */
        kvw_answer_fini(&chat->answer);
        return KVW_DONE;
    }
    *ret_go_on = add_message(chat, KVW_CHAT_ASSISTANT, chat->answer.text);
    if (*ret_go_on)
        chat->answer.text = NULL;
    kvw_answer_fini(&chat->answer);
    return *ret_go_on ? KVW_DONE : KVW_FAILED;
}

static int converse(struct chat *chat)
{
    const bool is_terminal = isatty(STDIN_FILENO) && isatty(STDERR_FILENO);
    int outcome = KVW_DONE;
    bool goes_on = true;
    char *line;

    while (goes_on) {
        if (is_terminal)
            fputs("> ", stderr);
        if (!read_line(chat, &line))
            break;
        if (line[strspn(line, " \t\r")] == '\0') {
            free(line);
            continue;
        }
        if (!add_message(chat, KVW_CHAT_USER, line)) {
            free(line);
            kvw_error(chat->worker, "out of memory: messages");
            return KVW_FAILED;
        }
        outcome = answer(chat, &goes_on);
    }
    if (is_terminal)
        fputc('\n', stderr);
    if (!chat->worker->options->json)
        fprintf(stderr,
                "kvworker: %" PRIu64 " turns, %" PRIu64 " prompt tokens computed, %" PRIu64
                " generated; %" PRIu32 " of %" PRIu32 " tokens of context in use\n",
                chat->n_turns, chat->prompt_tokens, chat->generated_tokens, chat->n_passed,
                chat->worker->capacity);
    return chat->has_failed ? KVW_FAILED : outcome;
}

/* Returns how many tokens fit: the model's context, or fewer if the embedded store or three
 * quarters of the memory that the weights leave hold fewer. */
static uint32_t capacity_of(const struct kvw_context *worker)
{
    const struct kvw_model_params *params = &worker->model->params;
    const bool is_embedded = strcmp(worker->options->store, "embedded") == 0;
    const uint64_t total = kv_memory_total();
    uint64_t fit = params->context, bytes;
    kv_schema_t *schema = malloc(sizeof(*schema));

    if (schema != NULL &&
        kvw_model_schema(params, kvw_dtype(worker->options), schema) == KV_OK) {
        bytes = kv_schema_token_bytes(schema) * (is_embedded ? 2 : 1);
        if (params->weight_bytes < total &&
            (total - params->weight_bytes) / 4 * 3 / bytes < fit)
            fit = (total - params->weight_bytes) / 4 * 3 / bytes;
        if (is_embedded && kvw_store_tokens(schema, worker->options->memory) < fit)
            fit = kvw_store_tokens(schema, worker->options->memory);
    }
    free(schema);
    return fit > 0 ? (uint32_t)fit : 1;
}

int kvw_chat_run(struct kvw_context *worker)
{
    struct chat chat = {.worker = worker};
    char detail[KVW_DETAIL_BYTES] = "";
    kv_status_t status;
    int outcome;

    if ((outcome = kvw_open_file(worker)) != KVW_DONE ||
        (outcome = kvw_open_model(worker)) != KVW_DONE ||
        (outcome = kvw_open_sampler(worker, &chat.sampler)) != KVW_DONE)
        goto end;
    status = kvw_chat_template_create(worker->gguf, worker->tokenizer, NULL, &chat.template,
                                      detail, sizeof(detail));
    if (status != KV_OK) {
        kvw_error(worker, "%s", detail);
        outcome = status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
        goto end;
    }
    outcome = kvw_open_session(worker, capacity_of(worker), NULL, 0);
    if (outcome != KVW_DONE)
        goto end;
    chat.input = malloc(LINE_BYTES_MAX);
    chat.tokens =
        calloc(worker->capacity + worker->options->max_tokens, sizeof(chat.tokens[0]));
    if (chat.input == NULL || chat.tokens == NULL) {
        kvw_error(worker, "out of memory: tokens");
        outcome = KVW_FAILED;
        goto end;
    }
    outcome = converse(&chat);

end:
    while (chat.n_messages > 0)
        drop_message(&chat);
    free(chat.messages);
    free(chat.tokens);
    free(chat.input);
    kvw_sampler_destroy(chat.sampler);
    kvw_chat_template_destroy(chat.template);
    return outcome;
}
