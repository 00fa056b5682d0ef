/* attention/options.h: the table says what the defaults are. */
#include "gpu-worker/attention/options.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static void assert_defaults(const struct kvw_method_options *options)
{
    const struct kvw_method_options *defaults = &kvw_method_defaults;

    assert_true(options->budget.ratio == defaults->budget.ratio);
    assert_int_equal(options->budget.top_k, defaults->budget.top_k);
    assert_int_equal(options->budget.sinks, defaults->budget.sinks);
    assert_int_equal(options->budget.window, defaults->budget.window);
    assert_int_equal(options->index.summaries, defaults->index.summaries);
    assert_int_equal(options->index.summary_rows, defaults->index.summary_rows);
    assert_int_equal(options->index.chapter_blocks, defaults->index.chapter_blocks);
    assert_int_equal(options->index.subspaces, defaults->index.subspaces);
    assert_int_equal(options->index.bits, defaults->index.bits);
    assert_int_equal(options->index.iterations, defaults->index.iterations);
    assert_int_equal(options->rerank, defaults->rerank);
    assert_int_equal(options->answer, defaults->answer);
    assert_int_equal(options->cache, defaults->cache);
    assert_int_equal(options->cache_tokens, defaults->cache_tokens);
}

static void test_fallbacks(void **state)
{
    const struct kvw_method_option *option;

    (void)state;
    for (unsigned i = 0; (option = kvw_method_option_at(i)) != NULL; i++) {
        struct kvw_method_options options = kvw_method_defaults;

        if (option->fallback != NULL)
            assert_true(option->set(&options, option->fallback));
        assert_defaults(&options);
    }
}

static void test_by_name(void **state)
{
    struct kvw_method_options options = kvw_method_defaults;
    const char *expected = "";

    (void)state;
    assert_int_equal(kvw_method_set_option(&options, "pq-m", "4", &expected), KV_OK);
    assert_int_equal(options.index.subspaces, 4);
    assert_int_equal(kvw_method_set_option(&options, "pq-m", "x", &expected), KV_INVALID);
    assert_string_equal(expected, "a number of subspaces from 1 to 16");
    assert_int_equal(kvw_method_set_option(&options, "summary-rows", "3072", &expected), KV_OK);
    assert_int_equal(options.index.summary_rows, 3072);
    assert_int_equal(kvw_method_set_option(&options, "summary-rows", "0", &expected),
                     KV_INVALID);
    assert_int_equal(kvw_method_set_option(&options, "summary-rows", "2048", &expected),
                     KV_INVALID);
    assert_string_equal(expected, "1024 or 3072");
    assert_int_equal(kvw_method_set_option(&options, "nothing", "x", &expected), KV_NOT_FOUND);
    assert_int_equal(kvw_method_set_option(&options, "wait-index", "yes", &expected),
                     KV_NOT_FOUND);
    assert_false(options.index.wait);
}

/* The old name of an option sets the same field to the same value. */
static void test_alias(void **state)
{
    static struct kvw_method_options options, other; /* static: padding is equal, too */
    const char *expected = "", *other_expected = "";

    (void)state;
    assert_int_equal(kvw_method_set_option(&options, "summaries", "64", &expected), KV_OK);
    assert_int_equal(options.index.summaries, 64);
    assert_int_equal(kvw_method_set_option(&other, "rest", "64", &other_expected), KV_OK);
    assert_memory_equal(&options, &other, sizeof(options));
    assert_int_equal(kvw_method_set_option(&options, "summaries", "8", &expected), KV_INVALID);
    assert_int_equal(kvw_method_set_option(&other, "rest", "8", &other_expected), KV_INVALID);
    assert_string_equal(expected, other_expected);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fallbacks),
        cmocka_unit_test(test_by_name),
        cmocka_unit_test(test_alias),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
