/* Small tokenizers of each kind give the tokens that their rules say, worked out by hand; text
 * comes back as it went in; and a file that is wrong anywhere is refused with a line that names
 * the key. tests/worker/compare_tokens.py compares whole vocabularies with llama.cpp. */
#include "gpu-worker/text/tokenizer.h"
#include "kvserver/base/random.h"
#include "tests/support/gguf_maker.h"
#include "tests/support/tokenizer_maker.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct fixture {
    struct gguf_maker maker;
    struct kvw_gguf *gguf;
    struct kvw_tokenizer *tokenizer;
};

static kv_status_t
set_up(struct fixture *fixture, const struct small_tokenizer *small, char *detail)
{
    kv_status_t status;

    *fixture = (struct fixture){0};
    make_tokenizer(&fixture->maker, small);
    status = kvw_gguf_open_memory(fixture->maker.data, fixture->maker.bytes, "test",
                                  &fixture->gguf, detail, KVW_GGUF_DETAIL_BYTES);
    assert_int_equal(status, KV_OK);
    return kvw_tokenizer_create(fixture->gguf, &fixture->tokenizer, detail,
                                KVW_GGUF_DETAIL_BYTES);
}

static void set_up_right(struct fixture *fixture, const char *pre)
{
    const struct small_tokenizer small = {.pre = pre, .bos = SMALL_BOS};
    char detail[KVW_GGUF_DETAIL_BYTES];

    assert_int_equal(set_up(fixture, &small, detail), KV_OK);
}

static void tear_down(struct fixture *fixture)
{
    kvw_tokenizer_destroy(fixture->tokenizer);
    kvw_gguf_close(fixture->gguf);
    maker_free(&fixture->maker);
}

/* The tokens of a text as the file spells them, with a `|` before each, against `expected`. */
static void expect(const struct fixture *fixture,
                   const char *text,
                   size_t bytes,
                   bool special,
                   bool bounds,
                   const char *expected)
{
    char spelled[4096] = "";
    uint32_t *tokens;
    size_t count;

    assert_int_equal(
        kvw_tokenizer_encode(fixture->tokenizer, text, bytes, special, bounds, &tokens, &count),
        KV_OK);
    for (size_t i = 0; i < count; i++) {
        struct kvw_text token = kvw_tokenizer_text(fixture->tokenizer, tokens[i]);

        strcat(spelled, "|");
        strncat(spelled, token.data, token.bytes);
    }
    free(tokens);
    assert_string_equal(spelled, expected);
}

#define G "\xc4\xa0"     /* a space as byte-level vocabularies spell it */
#define N "\xc4\x8a"     /* a line end */
#define S "\xe2\x96\x81" /* a space as SentencePiece spells it */

static void merges_by_rank(void **state)
{
    struct fixture f;

    (void)state;
    set_up_right(&f, "gpt-2");
    expect(&f, "", 0, false, false, "");
    expect(&f, "thing", 5, false, false, "|th|ing");
    expect(&f, "in the thand", 12, false, false, "|in|" G "|the|" G "|th|and");
    expect(&f, "and and", 7, false, false, "|and|" G "and");
    expect(&f, "aaaaaaa", 7, false, false, "|aaaa|aa|a");
    expect(&f, "the's", 5, false, false, "|the|'s");
    expect(&f, "1234 5", 6, false, false, "|123|4|" G "|5");
    expect(&f, "a \n\n\n b", 7, false, false, "|a|" G "|" N N "|" N "|" G "|b");
    expect(&f, "a\0b", 3, false, false, "|a|\xc4\x80|b");
    /* e3 81 82: the first two bytes are a token. */
    expect(&f, "\xe3\x81\x82", 3, false, false, "|\xc3\xa3\xc4\xa3|\xc4\xa4");
    tear_down(&f);
}

static void pre_tokenizers(void **state)
{
    struct fixture f;

    (void)state;
    set_up_right(&f, "smollm");
    expect(&f, "123  4", 6, false, false, "|1|2|3|" G G "|4");
    tear_down(&f);
    set_up_right(&f, "llama-bpe");
    expect(&f, "1234", 4, false, false, "|123|4");
    expect(&f, "!the", 4, false, false, "|!|the");
    expect(&f, "\n\n  x", 5, false, false, "|" N N "|" G "|" G "|x");
    assert_true(kvw_tokenizer_adds_bos(f.tokenizer));
    expect(&f, "a", 1, false, true, "|<|im_start|>|a");
    tear_down(&f);
    set_up_right(&f, "qwen2");
    expect(&f, "123", 3, false, false, "|1|2|3");
    assert_false(kvw_tokenizer_adds_bos(f.tokenizer));
    expect(&f, "a", 1, false, true, "|a");
    assert_string_equal(kvw_tokenizer_pre(f.tokenizer), "qwen2");
    tear_down(&f);
}

static void sentence_piece(void **state)
{
    struct fixture f;

    (void)state;
    set_up_right(&f, NULL);
    assert_string_equal(kvw_tokenizer_model(f.tokenizer), "llama");
    assert_true(kvw_tokenizer_adds_space(f.tokenizer));
    expect(&f, "", 0, false, true, "|<s>");
    expect(&f, "the", 3, false, false, "|" S "|the");
    /* "nd" (-6) and "an" (-5): the better pair first. */
    expect(&f, "and", 3, false, true, "|<s>|" S "and");
    expect(&f, "x\n", 2, false, false, "|" S "|<0x78>|<0x0A>");
    expect(&f, "\xc3\xa9\xff", 3, false, false, "|" S "|\xc3\xa9|<0xFF>");
    expect(&f, "a<s>a", 5, true, false, "|" S "|a|<s>|" S "|a");
    expect(&f, "<s>", 3, false, false, "|" S "|<0x3C>|<0x73>|<0x3E>");
    tear_down(&f);
}

static void special_tokens(void **state)
{
    struct fixture f;
    const struct kvw_text_part parts[] = {{"<|im_start|>th", 14, true},
                                          {"e<|im_end|>", 11, false},
                                          {"<|im_", 5, true},
                                          {"end|>", 5, true}};
    uint32_t *tokens;
    size_t count;

    (void)state;
    set_up_right(&f, "gpt-2");
    expect(&f, "a<|im_end|>a", 12, true, false, "|a|<|im_end|>|a");
    expect(&f, "a<|im_end|>", 11, false, false, "|a|<|||i|m|_|e|n|d|||>");
    /* User-defined ones are read always. */
    expect(&f, "a<tool>", 7, false, false, "|a|<tool>");
    /* Text goes on over the borders of parts, and marks do not. */
    assert_int_equal(kvw_tokenizer_encode_parts(f.tokenizer, parts, 4, false, &tokens, &count),
                     KV_OK);
    assert_int_equal(count, 2 + 10 + 10);
    assert_true(kvw_text_is(kvw_tokenizer_text(f.tokenizer, tokens[0]), "<|im_start|>"));
    assert_true(kvw_text_is(kvw_tokenizer_text(f.tokenizer, tokens[1]), "the"));
    free(tokens);

    assert_int_equal(kvw_tokenizer_bos(f.tokenizer), SMALL_BOS);
    assert_int_equal(kvw_tokenizer_eos(f.tokenizer), SMALL_EOS);
    assert_true(kvw_tokenizer_is_end(f.tokenizer, SMALL_EOS));
    assert_true(kvw_tokenizer_is_end(
        f.tokenizer, (uint32_t)kvw_tokenizer_find(f.tokenizer, "<|eot_id|>", 10)));
    assert_false(kvw_tokenizer_is_end(f.tokenizer, SMALL_BOS));
    assert_false(kvw_tokenizer_is_end(f.tokenizer, UINT32_MAX));
    assert_int_equal(kvw_tokenizer_kind(f.tokenizer, 0), KVW_TOKEN_CONTROL);
    assert_int_equal(kvw_tokenizer_piece(f.tokenizer, 0, false).bytes, 0);
    assert_true(kvw_text_is(kvw_tokenizer_piece(f.tokenizer, 0, true), "<|endoftext|>"));
    assert_int_equal(kvw_tokenizer_find(f.tokenizer, "nowhere", 7), KVW_TOKEN_NONE);
    tear_down(&f);
}

/* What a byte-level tokenizer takes broken UTF-8 for. */
static void broken_text(void **state)
{
    static const struct {
        const char *text;
        const char *back;
    } cases[] = {
        {"a\xff"
         "b",
         "a\xef\xbf\xbd"
         "b"},
        {"\xc3", "\xef\xbf\xbd"},
        {"\xe3\x81", "\xef\xbf\xbd\xef\xbf\xbd"},
        {"\xc1\xa1", "a"},                /* a too long form */
        {"\xed\xa0\x80", "\xed\xa0\x80"}, /* a surrogate */
        {"\xf4\x90\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
    };
    static const char *const pres[] = {"gpt-2", "smollm", "llama-bpe", "qwen2"};

    (void)state;
    for (size_t p = 0; p < 4; p++) {
        struct fixture f;

        set_up_right(&f, pres[p]);
        for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
            char back[64];
            size_t at = 0, count;
            uint32_t *tokens;

            assert_int_equal(kvw_tokenizer_encode(f.tokenizer, cases[i].text,
                                                  strlen(cases[i].text), false, false, &tokens,
                                                  &count),
                             KV_OK);
            for (size_t j = 0; j < count; j++) {
                struct kvw_text piece = kvw_tokenizer_piece(f.tokenizer, tokens[j], false);

                memcpy(back + at, piece.data, piece.bytes);
                at += piece.bytes;
            }
            free(tokens);
            assert_int_equal(at, strlen(cases[i].back));
            assert_memory_equal(back, cases[i].back, at);
        }
        tear_down(&f);
    }
}

/* Long runs of one thing, which would take minutes if anything were quadratic. */
static void long_texts(void **state)
{
    static const char *const units[] = {
        "a", " ", "\n", "1", "th", "<|im_end|>", "\xff", "\xe3\x81\x82", "'s", "<tool>", "<"};
    enum {
        BYTES = 1 << 18
    };
    static const char *const pres[] = {"gpt-2", "smollm", "llama-bpe", "qwen2", NULL};
    char *text = malloc(BYTES + 16);

    (void)state;
    assert_non_null(text);
    for (size_t p = 0; p < sizeof(pres) / sizeof(*pres); p++) {
        struct fixture f;

        set_up_right(&f, pres[p]);
        for (size_t u = 0; u < sizeof(units) / sizeof(*units); u++) {
            size_t bytes = 0, count;
            uint32_t *tokens;

            while (bytes < BYTES) {
                memcpy(text + bytes, units[u], strlen(units[u]));
                bytes += strlen(units[u]);
            }
            assert_int_equal(
                kvw_tokenizer_encode(f.tokenizer, text, bytes, true, false, &tokens, &count),
                KV_OK);
            assert_true(count > BYTES / 32);
            free(tokens);
        }
        tear_down(&f);
    }
    free(text);
}

static void wrong_files_are_named(void **state)
{
    static const struct {
        struct small_tokenizer small;
        kv_status_t status;
        const char *detail;
    } cases[] = {
        {{.pre = "falcon"},
         KV_UNSUPPORTED,
         "key 'tokenizer.ggml.pre': 'falcon' is not supported"},
        {{.pre = "gpt-2", .lacking = "tokenizer.ggml.pre"},
         KV_INVALID,
         "key 'tokenizer.ggml.pre': missing"},
        {{.pre = "gpt-2", .lacking = "tokenizer.ggml.model"},
         KV_INVALID,
         "key 'tokenizer.ggml.model': missing"},
        {{.pre = "gpt-2", .lacking = "tokenizer.ggml.tokens"},
         KV_INVALID,
         "key 'tokenizer.ggml.tokens': missing"},
        {{.pre = "gpt-2", .lacking = "tokenizer.ggml.merges"},
         KV_INVALID,
         "key 'tokenizer.ggml.merges': missing"},
        {{.lacking = "tokenizer.ggml.scores"},
         KV_INVALID,
         "key 'tokenizer.ggml.scores': missing"},
        {{.scores_cut = 1},
         KV_INVALID,
         "key 'tokenizer.ggml.scores': 278 elements for 279 tokens"},
        {{.pre = "gpt-2", .kinds_cut = 2},
         KV_INVALID,
         "key 'tokenizer.ggml.token_type': 279 elements for 281"},
        {{.extra = "new", .extra_kind = 1, .score = NAN},
         KV_INVALID,
         "key 'tokenizer.ggml.scores': token 279: nan"},
        {{.pre = "gpt-2", .extra = "new", .extra_kind = 7},
         KV_INVALID,
         "key 'tokenizer.ggml.token_type': token 281: 7"},
        {{.pre = "gpt-2", .extra = "new", .extra_kind = 0},
         KV_INVALID,
         "key 'tokenizer.ggml.token_type': token 281: 0"},
        {{.pre = "gpt-2", .extra = "the", .extra_kind = 1}, KV_INVALID, "are both 'the'"},
        {{.extra = "<0xaa>", .extra_kind = 6},
         KV_INVALID,
         "token 279: '<0xaa>' is not a byte token"},
        {{.pre = "gpt-2", .merge = "th x"},
         KV_INVALID,
         "merge 18: 'th x' does not join two tokens"},
        {{.pre = "gpt-2", .merge = "the"}, KV_INVALID, "merge 18: 'the'"},
        {{.pre = "gpt-2", .merge = "the "}, KV_INVALID, "merge 18: 'the '"},
        {{.pre = "gpt-2", .merge = " "}, KV_INVALID, "merge 18: ' '"},
        {{.pre = "gpt-2", .merge = "thethethethethethe the"}, KV_INVALID, "merge 18: 'thethe"},
        {{.pre = "gpt-2", .bos = 281},
         KV_INVALID,
         "key 'tokenizer.ggml.bos_token_id': token id 281: the vocabulary has 281"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        char detail[KVW_GGUF_DETAIL_BYTES] = "";
        struct fixture f;
        kv_status_t status = set_up(&f, &cases[i].small, detail);

        if (status != cases[i].status || strstr(detail, cases[i].detail) == NULL)
            print_error("case %zu: status %d: %s\n", i, (int)status, detail);
        assert_int_equal(status, cases[i].status);
        assert_non_null(strstr(detail, cases[i].detail));
        tear_down(&f);
    }
}

/* A file damaged anywhere is refused or gives tokens that exist. */
static void every_byte_changed(void **state)
{
    static const char text[] = "the and\xff <|im_end|>123";
    static const char *const pres[] = {"llama-bpe", NULL};

    (void)state;
    for (size_t p = 0; p < 2; p++) {
        struct gguf_maker maker = {0};

        make_tokenizer(&maker, &(struct small_tokenizer){.pre = pres[p], .bos = SMALL_BOS});
        for (size_t at = 0; at < maker.bytes; at++) {
            for (int bit = (int)at % 4; bit < 8; bit += 4) {
                struct fixture f = {.maker = maker};
                char detail[KVW_GGUF_DETAIL_BYTES];
                uint32_t *tokens;
                size_t count;

                maker.data[at] ^= (unsigned char)(1 << bit);
                if (kvw_gguf_open_memory(maker.data, maker.bytes, "test", &f.gguf, detail,
                                         sizeof(detail)) == KV_OK &&
                    kvw_tokenizer_create(f.gguf, &f.tokenizer, detail, sizeof(detail)) ==
                        KV_OK) {
                    assert_int_equal(kvw_tokenizer_encode(f.tokenizer, text, sizeof(text), true,
                                                          true, &tokens, &count),
                                     KV_OK);
                    for (size_t i = 0; i < count; i++)
                        assert_true(tokens[i] < kvw_tokenizer_n_tokens(f.tokenizer));
                    free(tokens);
                }
                kvw_tokenizer_destroy(f.tokenizer);
                kvw_gguf_close(f.gguf);
                maker.data[at] ^= (unsigned char)(1 << bit);
            }
        }
        maker_free(&maker);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merges_by_rank),        cmocka_unit_test(pre_tokenizers),
        cmocka_unit_test(sentence_piece),        cmocka_unit_test(special_tokens),
        cmocka_unit_test(broken_text),           cmocka_unit_test(long_texts),
        cmocka_unit_test(wrong_files_are_named), cmocka_unit_test(every_byte_changed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
