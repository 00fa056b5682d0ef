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
    assert_int_equal(options->index.rotates, defaults->index.rotates);
    assert_int_equal(options->index.copies, defaults->index.copies);
    assert_int_equal(options->budget.selects_half, defaults->budget.selects_half);
    assert_int_equal(options->first_cut, defaults->first_cut);
    assert_int_equal(options->candidates, defaults->candidates);
    assert_int_equal(options->rerank, defaults->rerank);
    assert_int_equal(options->answer, defaults->answer);
    assert_int_equal(options->cache, defaults->cache);
    assert_int_equal(options->cache_tokens, defaults->cache_tokens);
    assert_int_equal(options->speculate, defaults->speculate);
    assert_int_equal(options->speculate_first, defaults->speculate_first);
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
    assert_int_equal(kvw_method_set_option(&options, "pq-m", "2", &expected), KV_OK);
    assert_int_equal(options.index.subspaces, 2);
    assert_int_equal(kvw_method_set_option(&options, "pq-m", "x", &expected), KV_INVALID);
    assert_string_equal(expected, "a number of subspaces from 1 to 16");
    assert_int_equal(kvw_method_set_option(&options, "summary-rows", "1024", &expected), KV_OK);
    assert_int_equal(options.index.summary_rows, 1024);
    assert_int_equal(kvw_method_set_option(&options, "summary-rows", "0", &expected),
                     KV_INVALID);
    assert_int_equal(kvw_method_set_option(&options, "summary-rows", "2048", &expected),
                     KV_INVALID);
    assert_string_equal(expected, "1024 or 3072");
    assert_int_equal(kvw_method_set_option(&options, "quality", "better", &expected),
                     KV_INVALID);
    assert_string_equal(expected, "cheap, default or best");
    assert_int_equal(kvw_method_set_option(&options, "nothing", "x", &expected), KV_NOT_FOUND);
    assert_int_equal(kvw_method_set_option(&options, "wait-index", "yes", &expected),
                     KV_NOT_FOUND);
    assert_false(options.index.wait);
}

/* A preset sets what its help text says, whatever was set before; and it is the first row, because
 * what comes later has precedence. */
static void test_presets(void **state)
{
    static const char *const spelled[] = {
        "quality",    "pq-m",   "pq-bits",   "pq-rotation",  "first-cut",
        "candidates", "rerank", "summaries", "summary-rows", "selected",
    };
    static const char *const values[][10] = {
        {"cheap", "4", "6", "on", "int4", "8", "usual", "16", "3072", "half"},
        {"default", "4", "6", "on", "int4", "8", "usual", "16", "3072", "all"},
        {"best", "4", "6", "on", "int4", "16", "usual", "16", "1024", "all"},
    };
    static const char *const others[] = {"",     "2", "8",  "off",  "none",
                                         "auto", "2", "64", "1024", "half"};
    /* Static: padding is equal, too. */
    static struct kvw_method_options preset, one_by_one;
    const char *expected;

    (void)state;
    assert_string_equal(kvw_method_option_at(0)->name, "quality");
    assert_true(kvw_method_option_at(0)->is_preset);
    for (unsigned i = 1; kvw_method_option_at(i) != NULL; i++)
        assert_false(kvw_method_option_at(i)->is_preset);
    for (size_t i = 0; i < 3; i++) {
        for (size_t j = 1; j < 10; j++)
            assert_int_equal(kvw_method_set_option(&preset, spelled[j], others[j], &expected),
                             KV_OK);
        assert_int_equal(kvw_method_set_option(&preset, spelled[0], values[i][0], &expected),
                         KV_OK);
        for (size_t j = 1; j < 10; j++)
            assert_int_equal(
                kvw_method_set_option(&one_by_one, spelled[j], values[i][j], &expected), KV_OK);
        /* But that a number that is given is taken as it is. */
        assert_true(preset.candidates_fit && !one_by_one.candidates_fit);
        one_by_one.candidates_fit = true;
        assert_memory_equal(&preset, &one_by_one, sizeof(preset));
    }
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
        cmocka_unit_test(test_presets),
        cmocka_unit_test(test_alias),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
