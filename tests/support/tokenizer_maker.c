#include "tests/support/tokenizer_maker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TOKENS_MAX = 512,
    SPELLING_BYTES = 40,
};

struct list {
    char texts[TOKENS_MAX][SPELLING_BYTES];
    const char *pointers[TOKENS_MAX];
    uint32_t kinds[TOKENS_MAX];
    float scores[TOKENS_MAX];
    size_t count;
};

static void add(struct list *list, const char *text, uint32_t kind, float score)
{
    if (list->count == TOKENS_MAX || strlen(text) >= SPELLING_BYTES)
        abort();
    strcpy(list->texts[list->count], text);
    list->pointers[list->count] = list->texts[list->count];
    list->kinds[list->count] = kind;
    list->scores[list->count++] = score;
}

/* Left and right of each merge, spelled in letters; U+0120 is a space. */
static const char *const merges[][2] = {
    {"t", "h"},
    {"th", "e"},
    {"i", "n"},
    {"in", "g"},
    {"a", "n"},
    {"an", "d"},
    {"\xc4\xa0", "t"},
    {"\xc4\xa0t", "he"},
    {"h", "e"},
    {"\xc4\xa0", "and"},
    {"1", "2"},
    {"12", "3"},
    {"a", "a"},
    {"aa", "aa"},
    {"\xc4\x8a", "\xc4\x8a"},
    {"\xc4\xa0", "\xc4\xa0"},
    {"'", "s"},
    {"\xc3\xa3", "\xc4\xa3"}, /* e3 81: the begin of a kana */
};
static const char *const pieces[] = {"\xe2\x96\x81",
                                     "a",
                                     "b",
                                     "n",
                                     "d",
                                     "an",
                                     "nd",
                                     "and",
                                     "\xe2\x96\x81"
                                     "and",
                                     "ba",
                                     "ban",
                                     "t",
                                     "h",
                                     "e",
                                     "th",
                                     "he",
                                     "the",
                                     "\xc3\xa9",
                                     "\xe2\x96\x81\xe2\x96\x81"};

static void spell_byte(unsigned byte, char *ret_text)
{
    unsigned extra = 0x100, letter = byte;

    for (unsigned b = 0; b <= byte; b++) {
        if ((b >= '!' && b <= '~') || (b >= 0xa1 && b != 0xad))
            letter = b;
        else
            letter = extra++;
    }
    if (letter < 0x80)
        snprintf(ret_text, 3, "%c", (char)letter);
    else
        snprintf(ret_text, 3, "%c%c", (char)(0xc0 | letter >> 6),
                 (char)(0x80 | (letter & 0x3f)));
}

static void add_bpe(struct list *tokens, struct list *lines)
{
    static const char *const controls[] = {"<|endoftext|>",     "<|im_start|>",
                                           "<|im_end|>",        "<|start_header_id|>",
                                           "<|end_header_id|>", "<|eot_id|>"};

    for (size_t i = 0; i < sizeof(controls) / sizeof(*controls); i++)
        add(tokens, controls[i], 3, 0);
    for (unsigned byte = 0; byte < 256; byte++) {
        char text[3];

        spell_byte(byte, text);
        add(tokens, text, 1, 0);
    }
    for (size_t i = 0; i < sizeof(merges) / sizeof(*merges); i++) {
        char text[SPELLING_BYTES];
        bool there = false;

        snprintf(text, sizeof(text), "%s%s", merges[i][0], merges[i][1]);
        for (size_t j = 0; j < tokens->count; j++)
            there |= strcmp(tokens->texts[j], text) == 0;
        if (!there)
            add(tokens, text, 1, 0);
        snprintf(text, sizeof(text), "%s %s", merges[i][0], merges[i][1]);
        add(lines, text, 0, 0);
    }
}

static void add_spm(struct list *tokens)
{
    add(tokens, "<unk>", 2, 0);
    add(tokens, "<s>", 3, 0);
    add(tokens, "</s>", 3, 0);
    for (unsigned byte = 0; byte < 256; byte++) {
        char text[8];

        snprintf(text, sizeof(text), "<0x%02X>", byte);
        add(tokens, text, 6, 0);
    }
    for (size_t i = 0; i < sizeof(pieces) / sizeof(*pieces); i++)
        add(tokens, pieces[i], 1, -(float)(i % 7));
}

static bool wanted(const struct small_tokenizer *small, const char *key)
{
    return small->lacking == NULL || strcmp(small->lacking, key) != 0;
}

size_t add_tokenizer(struct gguf_maker *maker, const struct small_tokenizer *small)
{
    size_t count;
    struct list *tokens = calloc(1, sizeof(*tokens)), *lines = calloc(1, sizeof(*lines));

    if (tokens == NULL || lines == NULL)
        abort();
    if (small->pre != NULL)
        add_bpe(tokens, lines);
    else
        add_spm(tokens);
    add(tokens, "<tool>", 4, 0);
    if (small->extra != NULL)
        add(tokens, small->extra, small->extra_kind, small->score);
    if (small->merge != NULL)
        add(lines, small->merge, 0, 0);
    if (wanted(small, "tokenizer.ggml.model"))
        maker_key_string(maker, "tokenizer.ggml.model", small->pre != NULL ? "gpt2" : "llama");
    if (small->pre != NULL && wanted(small, "tokenizer.ggml.pre"))
        maker_key_string(maker, "tokenizer.ggml.pre", small->pre);
    if (wanted(small, "tokenizer.ggml.tokens"))
        maker_key_strings(maker, "tokenizer.ggml.tokens", tokens->pointers, tokens->count);
    if (wanted(small, "tokenizer.ggml.token_type"))
        maker_key_u32s(maker, "tokenizer.ggml.token_type", tokens->kinds,
                       tokens->count - small->kinds_cut);
    if (small->pre == NULL && wanted(small, "tokenizer.ggml.scores"))
        maker_key_f32s(maker, "tokenizer.ggml.scores", tokens->scores,
                       tokens->count - small->scores_cut);
    if (small->pre != NULL && wanted(small, "tokenizer.ggml.merges"))
        maker_key_strings(maker, "tokenizer.ggml.merges", lines->pointers, lines->count);
    maker_key_u32(maker, "tokenizer.ggml.bos_token_id", small->bos);
    maker_key_u32(maker, "tokenizer.ggml.eos_token_id", SMALL_EOS);
    if (small->chat != NULL)
        maker_key_string(maker, "tokenizer.chat_template", small->chat);
    count = tokens->count;
    free(tokens);
    free(lines);
    return count;
}

void make_tokenizer(struct gguf_maker *maker, const struct small_tokenizer *small)
{
    maker_begin(maker, 3);
    add_tokenizer(maker, small);
    maker_finish(maker, 32);
}
