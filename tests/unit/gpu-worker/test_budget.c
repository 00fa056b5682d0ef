/* budget.h: how the rows of a step are shared out. */
#include "gpu-worker/attention/budget.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static void test_splits(void **state)
{
    static const struct {
        struct kvw_budget_options options;
        uint32_t prompt_rows, n_rows;
        uint32_t sinks, window_begin, k;
    } cases[] = {
        /* 4 + 64 of 409, and a tenth that binary cannot hold. */
        {{0.1, 0, 4, 64, false}, 2048, 4096, 4, 4032, 341},
        {{0.1, 0, 4, 64, false}, 100, 1000, 4, 936, 32},
        {{0.3, 0, 0, 1, false}, 100, 10, 0, 9, 2},
        {{1.0 / 3, 0, 0, 1, false}, 100, 3, 0, 2, 0},
        /* The smaller of the two. */
        {{0.1, 100, 4, 64, false}, 2048, 4096, 4, 4032, 100},
        {{0.1, 1000, 4, 64, false}, 2048, 4096, 4, 4032, 341},
        {{0, 100, 4, 64, false}, 2048, 4096, 4, 4032, 100},
        /* No bound, or more than there is: all of the middle. */
        {{0, 0, 4, 64, false}, 0, 200, 4, 136, 132},
        {{1, 0, 4, 64, false}, 0, 200, 4, 136, 132},
        {{0, 1000, 4, 64, false}, 0, 200, 4, 136, 132},
        /* Less than sinks and window: these stay. */
        {{0.01, 0, 4, 64, false}, 0, 1000, 4, 936, 0},
        /* Few rows: the step's own is of the window. */
        {{0.5, 0, 4, 64, false}, 0, 1, 0, 0, 0},
        {{0.5, 0, 4, 64, false}, 0, 3, 2, 2, 0},
        {{0.5, 0, 4, 64, false}, 0, 5, 4, 4, 0},
        {{0.5, 0, 4, 64, false}, 0, 68, 4, 4, 0},
        {{1, 0, 4, 64, false}, 0, 69, 4, 5, 1},
        /* PQCache's split does not grow. */
        {{0.2, 0, 32, KVW_WINDOW_HALF, false}, 1032, 1033, 32, 933, 100},
        {{0.2, 0, 32, KVW_WINDOW_HALF, false}, 1032, 3000, 32, 2900, 100},
        {{0.2, 50, 32, KVW_WINDOW_HALF, false}, 1032, 3000, 32, 2900, 50},
        {{0.2, 0, 32, KVW_WINDOW_HALF, false}, 10, 40, 32, 39, 0},
        {{0, 50, 32, KVW_WINDOW_HALF, false}, 1032, 3000, 32, 2950, 50},
        {{0, 0, 32, KVW_WINDOW_HALF, false}, 1032, 3000, 32, 2999, 0},
        /* Half of what is selected; sinks and window stay as they are. */
        {{0.1, 0, 4, 64, true}, 2048, 4096, 4, 4032, 171},
        {{0.1, 100, 4, 64, true}, 2048, 4096, 4, 4032, 50},
        {{0, 0, 4, 64, true}, 0, 200, 4, 136, 66},
        {{1, 0, 4, 64, true}, 0, 69, 4, 5, 1},
        {{0.01, 0, 4, 64, true}, 0, 1000, 4, 936, 0},
        {{0.2, 0, 32, KVW_WINDOW_HALF, true}, 1032, 3000, 32, 2900, 50},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct kvw_budget budget =
            kvw_budget_of(&cases[i].options, cases[i].prompt_rows, cases[i].n_rows);

        assert_int_equal(budget.n_rows, cases[i].n_rows);
        assert_int_equal(budget.sinks, cases[i].sinks);
        assert_int_equal(budget.window_begin, cases[i].window_begin);
        assert_int_equal(budget.k, cases[i].k);
    }
}

static void test_texts(void **state)
{
    static const char *const no_ratios[] = {"",    "x",  "-0.1",  "1.5", "1/0",
                                            "2/1", "1/", "1/10x", "nan", "1e-1 "};
    static const char *const no_windows[] = {"", "0", "-1", "halfs", "4294967295", "64k"};
    double ratio;
    uint32_t count;

    (void)state;
    assert_true(kvw_budget_parse_ratio("0.25", &ratio) && ratio == 0.25);
    assert_true(kvw_budget_parse_ratio("1/4", &ratio) && ratio == 0.25);
    assert_true(kvw_budget_parse_ratio("0", &ratio) && ratio == 0);
    assert_true(kvw_budget_parse_ratio("1", &ratio) && ratio == 1);
    for (size_t i = 0; i < sizeof(no_ratios) / sizeof(no_ratios[0]); i++)
        assert_false(kvw_budget_parse_ratio(no_ratios[i], &ratio));
    assert_true(kvw_budget_parse_window("half", &count) && count == KVW_WINDOW_HALF);
    assert_true(kvw_budget_parse_window("64", &count) && count == 64);
    for (size_t i = 0; i < sizeof(no_windows) / sizeof(no_windows[0]); i++)
        assert_false(kvw_budget_parse_window(no_windows[i], &count));
    assert_true(kvw_budget_parse_count("0", 0, &count) && count == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_splits),
        cmocka_unit_test(test_texts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
