/* However a text is cut into pieces, the same comes out: whole characters, each as soon as it
 * is whole, and U+FFFD for what is none. */
#include "gpu-worker/text/utf8_stream.h"
#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define FFFD "\xef\xbf\xbd"

/* The whole text in one push, with the end. */
static size_t at_once(const char *text, size_t bytes, char *ret_text)
{
    struct kvw_utf8_stream stream = {{0}, 0};
    size_t written = kvw_utf8_stream_push(&stream, text, bytes, ret_text);

    assert_true(written <= kvw_utf8_stream_bytes(bytes));
    return written + kvw_utf8_stream_end(&stream, ret_text + written);
}

static void known_texts(void **state)
{
    static const char *const cases[][2] = {
        {"", ""},
        {"plain", "plain"},
        {"\xc3\xa9\xe3\x81\x82\xf0\x9f\x99\x82", "\xc3\xa9\xe3\x81\x82\xf0\x9f\x99\x82"},
        {"\xf4\x8f\xbf\xbf", "\xf4\x8f\xbf\xbf"},
        {"\x80", FFFD},
        {"a\xff"
         "b",
         "a" FFFD "b"},
        /* The Unicode standard's own examples, 3.9 tables 3-8 to 3-11. */
        {"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82"
         "A",
         FFFD FFFD FFFD FFFD FFFD FFFD FFFD FFFD "A"},
        {"\xed\xa0\x80\xed\xbf\xbf\xed\xaf"
         "A",
         FFFD FFFD FFFD FFFD FFFD FFFD FFFD FFFD "A"},
        {"\xf4\x91\x92\x93\xff"
         "A\x80\xbf"
         "B",
         FFFD FFFD FFFD FFFD FFFD "A" FFFD FFFD "B"},
        {"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf"
         "A",
         FFFD FFFD FFFD FFFD "A"},
        {"\xe3\x81", FFFD},
        {"\xe3\x81\xc3\xa9", FFFD "\xc3\xa9"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        char out[256];
        size_t written = at_once(cases[i][0], strlen(cases[i][0]), out);

        assert_int_equal(written, strlen(cases[i][1]));
        assert_memory_equal(out, cases[i][1], written);
    }
}

static void any_cut_gives_the_same(void **state)
{
    enum {
        BYTES = 60
    };
    static const char *const pieces[] = {"a",    "\xc3\xa9", "\xe3\x81\x82", "\xf0\x9f\x99\x82",
                                         "\xe3", "\x81",     "\xf0\x9f",     "\xff",
                                         ""};
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 7);
    for (int round = 0; round < 20000; round++) {
        char text[BYTES + 8], whole[4 * BYTES + 64], parts[4 * BYTES + 64];
        struct kvw_utf8_stream stream = {{0}, 0};
        size_t bytes = 0, at = 0, written = 0, n_whole;

        while (bytes < BYTES && kv_random_below(&random, 30) != 0) {
            const char *piece =
                pieces[kv_random_below(&random, sizeof(pieces) / sizeof(*pieces))];

            memcpy(text + bytes, piece, strlen(piece));
            bytes += strlen(piece);
        }
        n_whole = at_once(text, bytes, whole);
        while (at < bytes) {
            size_t step = kv_random_below(&random, bytes - at + 1);

            written += kvw_utf8_stream_push(&stream, text + at, step, parts + written);
            at += step;
            /* What is out already is a begin of the whole. */
            assert_true(written <= n_whole);
            assert_memory_equal(parts, whole, written);
            assert_true(stream.n_pending < 4);
        }
        written += kvw_utf8_stream_end(&stream, parts + written);
        assert_int_equal(written, n_whole);
        assert_memory_equal(parts, whole, written);
    }
}

static void characters_come_when_whole(void **state)
{
    static const char text[] = "\xf0\x9f\x99\x82";
    struct kvw_utf8_stream stream = {{0}, 0};
    char out[16];

    (void)state;
    for (int i = 0; i < 3; i++)
        assert_int_equal(kvw_utf8_stream_push(&stream, text + i, 1, out), 0);
    assert_int_equal(kvw_utf8_stream_push(&stream, text + 3, 1, out), 4);
    assert_memory_equal(out, text, 4);
    assert_int_equal(kvw_utf8_stream_end(&stream, out), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_texts),
        cmocka_unit_test(any_cut_gives_the_same),
        cmocka_unit_test(characters_come_when_whole),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
