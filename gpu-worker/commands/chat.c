/* chat: a conversation, turn by turn.
 *
 * Each turn encodes the whole conversation and continues where its tokens first differ from
 * those in the cache: mostly at the end of the last answer. */
#include "gpu-worker/commands/conversation.h"

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
    struct kvw_conversation conversation;

    char *input; /* (LINE_BYTES_MAX) */
    size_t input_bytes;
    bool is_over; /* no more input */

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
            if (chat->worker->attention != NULL)
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

/* Answers the last message.  Returns the exit status; *ret_go_on: the conversation can
 * continue. */
static int answer(struct chat *chat, bool *ret_go_on)
{
    struct kvw_conversation *conversation = &chat->conversation;
    struct kvw_context *worker = chat->worker;
    struct kvw_generate_result result;
    uint32_t *tokens = NULL;
    size_t n;
    int outcome;

    *ret_go_on = false;
    outcome = kvw_conversation_encode(conversation, &tokens, &n);
    if (outcome != KVW_DONE)
        return outcome;
    if (n > worker->capacity) {
        kvw_error(worker, "prompt: %zu tokens with the conversation so far: limit %" PRIu32, n,
                  worker->capacity);
        kvw_conversation_drop(conversation); /* a shorter one may fit */
        free(tokens);
        *ret_go_on = true;
        return KVW_DONE;
    }
    outcome = kvw_conversation_answer(conversation, tokens, n, &result);
    free(tokens);
    if (outcome != KVW_DONE)
        return outcome;
    chat->prompt_tokens += result.prompt_tokens - result.reused_tokens;
    chat->generated_tokens += result.generated_tokens;
    chat->n_turns++;
    if (kvw_stop == SIGINT)
        kvw_stop = 0; /* an interrupt ends the answer, not the conversation */
    if (result.generated_tokens == 0 && result.end == KVW_END_INTERRUPT)
        kvw_conversation_drop(conversation); /* a message without an answer is removed */
    *ret_go_on = true;
    return KVW_DONE;
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
        outcome = kvw_conversation_add(&chat->conversation, KVW_CHAT_USER, line);
        if (outcome != KVW_DONE)
            return outcome;
        outcome = answer(chat, &goes_on);
    }
    if (is_terminal)
        fputc('\n', stderr);
    if (!chat->worker->options->json)
        fprintf(stderr,
                "kvworker: %" PRIu64 " turn%s, %" PRIu64 " prompt tokens computed, %" PRIu64
                " generated; %" PRIu32 " of %" PRIu32 " tokens of context in use\n",
                chat->n_turns, chat->n_turns == 1 ? "" : "s", chat->prompt_tokens,
                chat->generated_tokens, chat->conversation.n_passed, chat->worker->capacity);
    return chat->has_failed ? KVW_FAILED : outcome;
}

int kvw_chat_run(struct kvw_context *worker)
{
    struct chat chat = {.worker = worker};
    int outcome;

    if ((outcome = kvw_open_file(worker)) != KVW_DONE ||
        (outcome = kvw_open_model(worker)) != KVW_DONE)
        return outcome;
    if ((outcome = kvw_conversation_open(&chat.conversation, worker)) != KVW_DONE ||
        (outcome = kvw_conversation_template(&chat.conversation)) != KVW_DONE ||
        (outcome = kvw_conversation_check(&chat.conversation, false)) != KVW_DONE)
        goto end;
    kvw_conversation_say(&chat.conversation);
    chat.input = malloc(LINE_BYTES_MAX);
    if (chat.input == NULL) {
        kvw_error(worker, "out of memory: input");
        outcome = KVW_FAILED;
        goto end;
    }
    outcome = converse(&chat);

end:
    free(chat.input);
    kvw_conversation_close(&chat.conversation);
    return outcome;
}
