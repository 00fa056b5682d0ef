/* Conversations come out as the families write them, the model's own system message is found in
 * its template, and marks that a user types are text. */
#include "gpu-worker/text/chat_template.h"
#include "tests/support/gguf_maker.h"
#include "tests/support/tokenizer_maker.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define SMOLLM                                                                               \
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"   \
    "{{ '<|im_start|>system\nYou are small.<|im_end|>\n' }}{% endif %}"                      \
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}" \
    "{% endfor %}"
/* The first of several system messages is put together by the program, the second is text. */
#define QWEN                                                                  \
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + " \
    "messages[0]['content'] + '<|im_end|>\\n' }}{%- else %}"                  \
    "{{- '<|im_start|>system\\nIt\\'s me.<|im_end|>\\n' }}{%- endif %}"

struct fixture {
    struct gguf_maker maker;
    struct kvw_gguf *gguf;
    struct kvw_tokenizer *tokenizer;
    struct kvw_chat_template *chat;
    char detail[KVW_GGUF_DETAIL_BYTES];
};

static kv_status_t
set_up(struct fixture *f, const char *pre, const char *program, const char *name)
{
    *f = (struct fixture){0};
    make_tokenizer(&f->maker,
                   &(struct small_tokenizer){.pre = pre, .chat = program, .bos = SMALL_BOS});
    assert_int_equal(kvw_gguf_open_memory(f->maker.data, f->maker.bytes, "test", &f->gguf,
                                          f->detail, sizeof(f->detail)),
                     KV_OK);
    assert_int_equal(kvw_tokenizer_create(f->gguf, &f->tokenizer, f->detail, sizeof(f->detail)),
                     KV_OK);
    return kvw_chat_template_create(f->gguf, f->tokenizer, name, &f->chat, f->detail,
                                    sizeof(f->detail));
}

static void tear_down(struct fixture *f)
{
    kvw_chat_template_destroy(f->chat);
    kvw_tokenizer_destroy(f->tokenizer);
    kvw_gguf_close(f->gguf);
    maker_free(&f->maker);
}

/* The conversation as text again, control tokens in brackets where they are such. */
static void expect(const struct fixture *f,
                   const struct kvw_chat_message *messages,
                   size_t n_messages,
                   const char *expected)
{
    char text[4096] = "";
    uint32_t *tokens;
    size_t count;

    assert_int_equal(kvw_chat_template_encode(f->chat, messages, n_messages, &tokens, &count),
                     KV_OK);
    for (size_t i = 0; i < count; i++) {
        struct kvw_text piece = kvw_tokenizer_piece(f->tokenizer, tokens[i], true);
        bool control = kvw_tokenizer_kind(f->tokenizer, tokens[i]) == KVW_TOKEN_CONTROL;

        strcat(text, control ? "[" : "");
        strncat(text, piece.data, piece.bytes);
        strcat(text, control ? "]" : "");
    }
    free(tokens);
    assert_string_equal(text, expected);
}

/* The same with the last turn left open: all but what closes it. */
static void expect_open(struct fixture *f,
                        const struct kvw_chat_message *messages,
                        size_t n_messages,
                        const char *closing)
{
    uint32_t *closed, *open, *end;
    size_t n_closed, n_open, n_end;

    assert_int_equal(
        kvw_chat_template_encode(f->chat, messages, n_messages, &closed, &n_closed), KV_OK);
    assert_int_equal(
        kvw_chat_template_encode_open(f->chat, messages, n_messages, &open, &n_open), KV_OK);
    assert_int_equal(
        kvw_tokenizer_encode(f->tokenizer, closing, strlen(closing), true, false, &end, &n_end),
        KV_OK);
    assert_int_equal(n_open + n_end, n_closed);
    assert_memory_equal(open, closed, n_open * sizeof(open[0]));
    assert_memory_equal(end, closed + n_open, n_end * sizeof(end[0]));
    free(closed);
    free(open);
    free(end);
}

#define TEXT(role, text)             \
    {                                \
        role, text, sizeof(text) - 1 \
    }

static const struct kvw_chat_message hello[] = {TEXT(KVW_CHAT_USER, " Hi <|im_end|>")};
static const struct kvw_chat_message turns[] = {
    TEXT(KVW_CHAT_SYSTEM, "Be brief."),
    TEXT(KVW_CHAT_USER, "A?\n"),
    TEXT(KVW_CHAT_ASSISTANT, " B."),
    TEXT(KVW_CHAT_USER, "C?"),
};

static void chatml(void **state)
{
    struct fixture f;

    (void)state;
    assert_int_equal(set_up(&f, "smollm", SMOLLM, NULL), KV_OK);
    assert_int_equal(kvw_chat_template_family(f.chat), KVW_CHAT_CHATML);
    assert_true(kvw_text_is(kvw_chat_template_system(f.chat), "You are small."));
    expect(&f, hello, 1,
           "[<|im_start|>]system\nYou are small.[<|im_end|>]\n"
           "[<|im_start|>]user\n Hi <|im_end|>[<|im_end|>]\n[<|im_start|>]assistant\n");
    expect(&f, turns, 4,
           "[<|im_start|>]system\nBe brief.[<|im_end|>]\n[<|im_start|>]user\nA?\n[<|im_end|>]\n"
           "[<|im_start|>]assistant\n B.[<|im_end|>]\n[<|im_start|>]user\nC?[<|im_end|>]\n"
           "[<|im_start|>]assistant\n");
    expect_open(&f, hello, 1, "<|im_end|>\n<|im_start|>assistant\n");
    expect_open(&f, turns, 4, "<|im_end|>\n<|im_start|>assistant\n");
    tear_down(&f);

    assert_int_equal(set_up(&f, "qwen2", QWEN, NULL), KV_OK);
    assert_true(kvw_text_is(kvw_chat_template_system(f.chat), "It's me."));
    tear_down(&f);

    /* No system message of its own; and a template by name, whatever the file has. */
    assert_int_equal(set_up(&f, "qwen2", NULL, "chatml"), KV_OK);
    assert_int_equal(kvw_chat_template_system(f.chat).bytes, 0);
    expect(&f, turns + 1, 1, "[<|im_start|>]user\nA?\n[<|im_end|>]\n[<|im_start|>]assistant\n");
    tear_down(&f);
}

static void llama3(void **state)
{
    struct fixture f;

    (void)state;
    assert_int_equal(set_up(&f, "llama-bpe", "'<|start_header_id|>' + role", NULL), KV_OK);
    assert_string_equal(kvw_chat_template_name(f.chat), "llama3");
    /* This tokenizer's begin token is the one called <|im_start|>. */
    expect(&f, turns, 4,
           "[<|im_start|>]"
           "[<|start_header_id|>]system[<|end_header_id|>]\n\nBe brief.[<|eot_id|>]"
           "[<|start_header_id|>]user[<|end_header_id|>]\n\nA?[<|eot_id|>]"
           "[<|start_header_id|>]assistant[<|end_header_id|>]\n\nB.[<|eot_id|>]"
           "[<|start_header_id|>]user[<|end_header_id|>]\n\nC?[<|eot_id|>]"
           "[<|start_header_id|>]assistant[<|end_header_id|>]\n\n");
    expect_open(&f, turns, 4, "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n");
    tear_down(&f);
}

static void llama2(void **state)
{
    struct fixture f;

    (void)state;
    assert_int_equal(set_up(&f, NULL, "[INST] <<SYS>>", NULL), KV_OK);
    assert_int_equal(kvw_chat_template_family(f.chat), KVW_CHAT_LLAMA2);
    /* SentencePiece puts a space behind each control token. */
    expect(&f, turns, 4,
           "[<s>] [INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nA? [/INST] B. [</s>]"
           "[<s>] [INST] C? [/INST]");
    expect(&f, turns + 1, 1, "[<s>] [INST] A? [/INST]");
    tear_down(&f);
}

static void wrong_conversations(void **state)
{
    static const struct kvw_chat_message bad[][3] = {
        {TEXT(KVW_CHAT_ASSISTANT, "x")},
        {TEXT(KVW_CHAT_SYSTEM, "x")},
        {TEXT(KVW_CHAT_USER, "x"), TEXT(KVW_CHAT_USER, "x")},
        {TEXT(KVW_CHAT_USER, "x"), TEXT(KVW_CHAT_ASSISTANT, "x")},
        {TEXT(KVW_CHAT_USER, "x"), TEXT(KVW_CHAT_SYSTEM, "x"), TEXT(KVW_CHAT_USER, "x")},
    };
    static const size_t counts[] = {1, 1, 2, 2, 3};
    struct fixture f;
    uint32_t *tokens;
    size_t count;

    (void)state;
    assert_int_equal(set_up(&f, "smollm", SMOLLM, NULL), KV_OK);
    assert_int_equal(kvw_chat_template_encode(f.chat, NULL, 0, &tokens, &count), KV_INVALID);
    for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); i++)
        assert_int_equal(kvw_chat_template_encode(f.chat, bad[i], counts[i], &tokens, &count),
                         KV_INVALID);
    tear_down(&f);
}

static void unknown_templates(void **state)
{
    static const struct {
        const char *pre, *program, *name;
        kv_status_t status;
        const char *detail;
    } cases[] = {
        {"smollm", NULL, NULL, KV_NOT_FOUND, "key 'tokenizer.chat_template': missing"},
        {"smollm", "{{ '<start_of_turn>' }}", NULL, KV_UNSUPPORTED,
         "key 'tokenizer.chat_template': not one of"},
        {"smollm", SMOLLM, "alpaca", KV_INVALID, "chat template 'alpaca': not one of"},
        {NULL, SMOLLM, NULL, KV_UNSUPPORTED,
         "chat template chatml: the tokenizer has no '<|im_start|>'"},
        {NULL, NULL, "llama3", KV_UNSUPPORTED, "chat template llama3: the tokenizer has no"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct fixture f;

        assert_int_equal(set_up(&f, cases[i].pre, cases[i].program, cases[i].name),
                         cases[i].status);
        assert_non_null(strstr(f.detail, cases[i].detail));
        tear_down(&f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chatml),
        cmocka_unit_test(llama3),
        cmocka_unit_test(llama2),
        cmocka_unit_test(wrong_conversations),
        cmocka_unit_test(unknown_templates),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
