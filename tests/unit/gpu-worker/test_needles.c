/* needles.h: sentences in a file, in a text, in an answer. */
#include "gpu-worker/eval/needles.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

static void test_file(void **state)
{
    static const char good[] = "# some\n\n  The cat is called | Mo \r\nA dog|Bo|Lo";
    static const struct {
        const char *text;
        kv_status_t status;
        size_t line;
    } bad[] = {
        {"", KV_NOT_FOUND, 0},
        {"# none\n\n", KV_NOT_FOUND, 2},
        {"a|b\nno mark\nc|d\n", KV_INVALID, 2},
        {"a| \n", KV_INVALID, 1},
        {"a|b\n\n|b\n", KV_INVALID, 3},
    };
    struct kvw_needles needles;
    char *text;
    size_t line;

    (void)state;
    assert_int_equal(kvw_needles_read(good, strlen(good), &needles, &line), KV_OK);
    assert_int_equal(needles.count, 2);
    assert_string_equal(needles.list[0].beginning, "The cat is called");
    assert_string_equal(needles.list[0].completion, "Mo");
    assert_string_equal(needles.list[1].beginning, "A dog");
    assert_string_equal(needles.list[1].completion, "Bo|Lo");
    kvw_needles_free(&needles);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        line = 99;
        assert_int_equal(kvw_needles_read(bad[i].text, strlen(bad[i].text), &needles, &line),
                         bad[i].status);
        assert_int_equal(line, bad[i].line);
    }
    assert_int_equal(kvw_needles_read("a|b\0c", 5, &needles, &line), KV_INVALID);

    text = malloc(KVW_NEEDLE_BYTES_MAX + 1);
    assert_non_null(text);
    memset(text, 'a', KVW_NEEDLE_BYTES_MAX + 1);
    text[1] = '|';
    assert_int_equal(kvw_needles_read(text, KVW_NEEDLE_BYTES_MAX + 1, &needles, &line),
                     KV_TOO_LARGE);
    assert_int_equal(kvw_needles_read(text, KVW_NEEDLE_BYTES_MAX, &needles, &line), KV_OK);
    kvw_needles_free(&needles);
    free(text);
}

static void
check_placed(const struct kvw_needles *needles, const char *text, const char *wanted)
{
    char *placed;
    size_t bytes;

    assert_int_equal(kvw_needles_place(needles, text, strlen(text), &placed, &bytes), KV_OK);
    assert_string_equal(placed, wanted);
    assert_int_equal(bytes, strlen(wanted));
    free(placed);
}

static void test_text(void **state)
{
    static const char list[] = "A|b\nC|d";
    struct kvw_needles needles;
    size_t line, bytes;
    char *text;

    (void)state;
    assert_int_equal(kvw_needles_read(list, strlen(list), &needles, &line), KV_OK);
    /* At a paragraph's end, at a line's, at a word's, anywhere. */
    check_placed(&needles, "1\n\n2\n\n3\n\n4\n\n5", "1\n\n2\n\nA b.\n\n3\n\n4\n\nC d.\n\n5");
    check_placed(&needles, "11111111\n22222222", "11111111\nA b.\n\n222\n\nC d.\n\n22222");
    check_placed(&needles, "one two three four", "one two \n\nA b.\n\nthree \n\nC d.\n\nfour");
    check_placed(&needles, "\xc3\xa9\xc3\xa9", "\xc3\xa9\n\nA b.\n\n\xc3\xa9\n\nC d.\n\n");
    check_placed(&needles, "", "A b.\n\nC d.\n\n");

    assert_int_equal(kvw_needle_ask(&needles.list[1], "text. \n", 7, &text, &bytes), KV_OK);
    assert_string_equal(text, "text.\n\nC");
    assert_int_equal(bytes, 8);
    free(text);
    kvw_needles_free(&needles);
}

static void test_answer(void **state)
{
    struct kvw_needle needle = {(char[]){"x"}, (char[]){"seven men"}};

    (void)state;
    assert_int_equal(kvw_needle_judge(&needle, "", 0), KVW_NEEDLE_OPEN);
    assert_int_equal(kvw_needle_judge(&needle, " \n", 2), KVW_NEEDLE_OPEN);
    assert_int_equal(kvw_needle_judge(&needle, " seven m", 8), KVW_NEEDLE_OPEN);
    assert_int_equal(kvw_needle_judge(&needle, " seven men", 10), KVW_NEEDLE_FOUND);
    assert_int_equal(kvw_needle_judge(&needle, "seven men and", 13), KVW_NEEDLE_FOUND);
    assert_int_equal(kvw_needle_judge(&needle, " seven w", 8), KVW_NEEDLE_MISSED);
    assert_int_equal(kvw_needle_judge(&needle, "Seven", 5), KVW_NEEDLE_MISSED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_file),
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_answer),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
