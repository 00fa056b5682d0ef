#include "gpu-worker/commands/needle_test.h"

#include "gpu-worker/text/chat_template.h"

#include <stdlib.h>
#include <string.h>

/* ---- the questions ---- */

static void free_list(struct kvw_needle_test *questions)
{
    for (size_t i = 0; questions->list != NULL && i < questions->needles.count; i++)
        free(questions->list[i].tokens);
    free(questions->list);
    questions->list = NULL;
}

void kvw_needle_test_free(struct kvw_needle_test *questions)
{
    free_list(questions);
    kvw_needles_free(&questions->needles);
}

int kvw_needle_test_read(const struct kvw_context *worker,
                         struct kvw_needle_test *ret_questions)
{
    const char *path = worker->options->needles;
    struct kvw_needle_test questions = {.list = NULL};
    char *list;
    size_t bytes, line = 0;
    kv_status_t status;
    int outcome = kvw_read_file(worker, "needles", path, &list, &bytes);

    if (outcome != KVW_DONE)
        return outcome;
    status = kvw_needles_read(list, bytes, &questions.needles, &line);
    free(list);
    if (status != KV_OK) {
        kvw_error(worker, "needles: %s:%zu: %s", path, line,
                  status == KV_INVALID     ? "expected beginning|completion"
                  : status == KV_NOT_FOUND ? "no needles in the file"
                                           : kv_status_name(status));
        return status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
    }
    *ret_questions = questions;
    return KVW_DONE;
}

size_t
kvw_bytes_of(const struct kvw_context *worker, const uint32_t *tokens, size_t n, size_t bytes)
{
    size_t sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += kvw_tokenizer_piece(worker->tokenizer, tokens[i], false).bytes;
    if (kvw_tokenizer_adds_space(worker->tokenizer) && sum > 0)
        sum--;
    return sum < bytes ? sum : bytes;
}

static kv_status_t encode(const struct kvw_context *worker,
                          const struct kvw_chat_template *chat,
                          const char *text,
                          size_t bytes,
                          uint32_t n_answer,
                          struct kvw_needle_question *question)
{
    const struct kvw_chat_message message = {
        .role = KVW_CHAT_USER, .text = text, .bytes = bytes};
    uint32_t *larger;
    kv_status_t status =
        chat != NULL ? kvw_chat_template_encode_open(chat, &message, 1, &question->tokens,
                                                     &question->count)
                     : kvw_tokenizer_encode(worker->tokenizer, text, bytes, false, true,
                                            &question->tokens, &question->count);

    if (status != KV_OK)
        return status;
    larger = realloc(question->tokens, (question->count + n_answer) * sizeof(larger[0]));
    if (larger == NULL)
        return KV_NO_MEMORY;
    question->tokens = larger;
    return KV_OK;
}

static uint32_t common_tokens(const struct kvw_needle_test *questions)
{
    const struct kvw_needle_question *first = &questions->list[0];
    size_t common = first->count - 1; /* the last token's logits are needed */

    for (size_t i = 1; i < questions->needles.count; i++) {
        const struct kvw_needle_question *other = &questions->list[i];
        size_t same = 0;

        while (same < common && same + 1 < other->count &&
               first->tokens[same] == other->tokens[same])
            same++;
        common = same;
    }
    return (uint32_t)common;
}

static kv_status_t make_list(const struct kvw_context *worker,
                             const struct kvw_chat_template *chat,
                             const char *text,
                             size_t bytes,
                             struct kvw_needle_test *questions)
{
    const struct kvw_needles *needles = &questions->needles;
    char *placed = NULL, *asked;
    size_t placed_bytes, asked_bytes;
    kv_status_t status;

    questions->list = calloc(needles->count, sizeof(questions->list[0]));
    if (questions->list == NULL)
        return KV_NO_MEMORY;
    questions->most = 0;
    status = kvw_needles_place(needles, text, bytes, &placed, &placed_bytes);
    for (size_t i = 0; status == KV_OK && i < needles->count; i++) {
        struct kvw_needle_question *question = &questions->list[i];

        status = kvw_needle_ask(&needles->list[i], placed, placed_bytes, &asked, &asked_bytes);
        if (status != KV_OK)
            break;
        status = encode(worker, chat, asked, asked_bytes, questions->n_answer, question);
        free(asked);
        if (status == KV_OK && question->count + questions->n_answer > questions->most)
            questions->most = question->count + questions->n_answer;
    }
    free(placed);
    if (status == KV_OK)
        questions->n_common = common_tokens(questions);
    return status;
}

int kvw_needle_test_make(const struct kvw_context *worker,
                         const char *text,
                         size_t bytes,
                         uint32_t n_answer,
                         struct kvw_needle_test *questions)
{
    char detail[KVW_DETAIL_BYTES] = "";
    struct kvw_chat_template *chat = NULL;
    kv_status_t status;

    free_list(questions);
    questions->n_answer = n_answer;
    /* A model without a chat template continues the plain text. */
    status = kvw_chat_template_create(worker->gguf, worker->tokenizer, NULL, &chat, detail,
                                      sizeof(detail));
    if (status != KV_OK && status != KV_NOT_FOUND) {
        kvw_error(worker, "%s", detail);
        return status == KV_NO_MEMORY ? KVW_FAILED : KVW_USAGE;
    }
    status = make_list(worker, chat, text, bytes, questions);
    kvw_chat_template_destroy(chat);
    if (status != KV_OK) {
        kvw_error(worker, "needles: tokens: %s", kv_status_name(status));
        return KVW_FAILED;
    }
    return KVW_DONE;
}

/* ---- an answer ---- */

struct asking {
    const struct kvw_context *worker;
    const struct kvw_needle *needle;
    enum kvw_reply_end end;
    _Atomic int is_over;
    struct kvw_reply *reply;
};

static void generated(void *arg, uint32_t token)
{
    struct asking *asking = arg;
    struct kvw_reply *reply = asking->reply;
    struct kvw_text piece = kvw_tokenizer_piece(asking->worker->tokenizer, token, false);

    if (reply->result.generated_tokens++ == 0)
        kvw_method_get_stats(asking->worker->attention, &reply->at_first);
    while (reply->bytes == 0 && piece.bytes > 0 && strchr(" \t\r\n", piece.data[0]) != NULL) {
        piece.data++;
        piece.bytes--;
    }
    if (piece.bytes > sizeof(reply->text) - reply->bytes) {
        asking->is_over = 1;
        return;
    }
    memcpy(reply->text + reply->bytes, piece.data, piece.bytes);
    reply->bytes += piece.bytes;
    reply->verdict = kvw_needle_judge(asking->needle, reply->text, reply->bytes);
    asking->is_over = kvw_stop || (asking->end == KVW_UNTIL_JUDGED
                                       ? reply->verdict != KVW_NEEDLE_OPEN
                                       : memchr(reply->text, '\n', reply->bytes) != NULL);
}

static void prefilled(void *arg, uint32_t done, uint32_t total)
{
    struct asking *asking = arg;

    (void)done;
    (void)total;
    asking->is_over = kvw_stop != 0;
}

static bool is_end(void *arg, uint32_t token)
{
    const struct kvw_tokenizer *tokenizer = ((const struct asking *)arg)->worker->tokenizer;

    return token >= kvw_tokenizer_n_tokens(tokenizer) || kvw_tokenizer_is_end(tokenizer, token);
}

kv_status_t kvw_needle_question_ask(const struct kvw_context *worker,
                                    const struct kvw_needle_test *questions,
                                    size_t i,
                                    struct kvw_sampler *sampler,
                                    enum kvw_reply_end end,
                                    struct kvw_reply *ret_reply)
{
    const struct kvw_needle_question *question = &questions->list[i];
    struct asking asking = {
        .worker = worker,
        .needle = &questions->needles.list[i],
        .end = end,
        .reply = ret_reply,
    };
    const struct kvw_generate_setup setup = {
        .forward = worker->forward,
        .attention = worker->attention,
        .sampler = sampler,
        .n_vocabulary = worker->model->params.n_vocabulary,
        .capacity = worker->capacity,
        .max_tokens = questions->n_answer,
        .stop = &asking.is_over,
        .arg = &asking,
        .prefilled = prefilled,
        .generated = generated,
        .is_end = is_end,
    };
    kv_status_t status;

    *ret_reply = (struct kvw_reply){.verdict = KVW_NEEDLE_OPEN};
    status = kvw_generate(&setup, question->tokens, (uint32_t)question->count,
                          questions->n_common, &ret_reply->result);
    if (status == KV_OK && ret_reply->result.generated_tokens == 0)
        kvw_method_get_stats(worker->attention, &ret_reply->at_first);
    return status;
}
