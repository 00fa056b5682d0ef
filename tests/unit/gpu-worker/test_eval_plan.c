/* plan.h: lists become runs. */
#include "gpu-worker/eval/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

static void test_runs(void **state)
{
    static const struct {
        const char *method, *budget;
        double ratio;
        uint32_t top_k, sinks;
        uint64_t seed;
    } wanted[] = {
        {"full", "", 1, 0, 4, 0},
        {"random:sinks=7", "1/4", 0.25, 0, 7, 3},
        {"random:sinks=7", "k=9", 0, 9, 7, 3},
        {"random:sinks=7", "1/4", 0.25, 0, 7, 5},
        {"random:sinks=7", "k=9", 0, 9, 7, 5},
        {"oracle:top-k=2:window=half", "1/4", 0.25, 2, 4, 0},
        {"oracle:top-k=2:window=half", "k=9", 0, 2, 4, 0},
    };
    struct kvw_eval_plan plan;
    char detail[256] = "";

    (void)state;
    assert_int_equal(kvw_eval_plan_make("random:sinks=7,full,oracle:top-k=2:window=half",
                                        "1/4,k=9", "3,5", &kvw_method_defaults, &plan, detail,
                                        sizeof(detail)),
                     KV_OK);
    assert_int_equal(plan.count, sizeof(wanted) / sizeof(wanted[0]));
    for (size_t i = 0; i < plan.count; i++) {
        const struct kvw_planned_run *run = &plan.runs[i];

        assert_string_equal(run->method, wanted[i].method);
        assert_string_equal(run->budget, wanted[i].budget);
        assert_memory_equal(run->ops->name, run->method, strlen(run->ops->name));
        assert_true(run->options.budget.ratio == wanted[i].ratio);
        assert_int_equal(run->options.budget.top_k, wanted[i].top_k);
        assert_int_equal(run->options.budget.sinks, wanted[i].sinks);
        assert_int_equal(run->options.budget.window, i > 4 ? KVW_WINDOW_HALF : 64);
        assert_int_equal(run->options.seed, wanted[i].seed);
    }
    kvw_eval_plan_free(&plan);
}

static void test_index_options(void **state)
{
    static const char methods[] =
        "pqcache:rerank=8:summaries=16:chapter=8:answer=attend,pqcache";
    struct kvw_eval_plan plan;
    char detail[256] = "";

    (void)state;
    assert_int_equal(kvw_eval_plan_make(methods, "1/10,1/20", "1,2,3", &kvw_method_defaults,
                                        &plan, detail, sizeof(detail)),
                     KV_OK);
    assert_int_equal(plan.count, 1 + 6 + 6);
    for (size_t i = 1; i < plan.count; i++) {
        const struct kvw_method_options *options = &plan.runs[i].options;

        assert_int_equal(options->seed, 1 + (i - 1) / 2 % 3);
        assert_true(options->budget.ratio == ((i - 1) % 2 == 0 ? 0.1 : 0.05));
        assert_int_equal(options->rerank, i <= 6 ? 8 : KVW_USUAL);
        assert_int_equal(options->index.summaries,
                         i <= 6 ? 16 : kvw_method_defaults.index.summaries);
        assert_int_equal(options->index.chapter_blocks, i <= 6 ? 8 : 128);
        assert_int_equal(options->answer, i <= 6 ? KVW_RESULT_ATTEND : KVW_RESULT_AUTO);
    }
    kvw_eval_plan_free(&plan);
}

/* What an entry says beside a preset has precedence, wherever it stands. */
static void test_presets(void **state)
{
    struct kvw_eval_plan plan;
    char detail[256] = "";

    (void)state;
    assert_int_equal(kvw_eval_plan_make("pqcache:pq-m=8:quality=best:summary-rows=3072", "k=9",
                                        "0", &kvw_method_defaults, &plan, detail,
                                        sizeof(detail)),
                     KV_OK);
    assert_int_equal(plan.count, 2);
    assert_int_equal(plan.runs[1].options.budget.top_k, 9);
    assert_int_equal(plan.runs[1].options.index.subspaces, 8);
    assert_int_equal(plan.runs[1].options.candidates, 16);
    assert_int_equal(plan.runs[1].options.index.summary_rows, 3072);
    kvw_eval_plan_free(&plan);
}

static void test_refused(void **state)
{
    static const struct {
        const char *methods, *budgets, *seeds, *expected;
    } cases[] = {
        {"", "1/10", "0", "at least one"},
        {"full", "", "0", "at least one"},
        {"full", "1/10", "", "at least one"},
        {"all", "1/10", "0", "methods: unknown: all"},
        {"random:", "2", "0", "budgets: not a share or k=rows: 2"},
        {"random", "0", "0", "budgets: not a share or k=rows: 0"},
        {"random", "k=0", "0", "budgets: not a share or k=rows: k=0"},
        {"random", "1/10", "0,x", "seeds: not a number: x"},
        {"random:sinks", "1/10", "0", "methods: expected option=value: sinks"},
        {"random:colour=red", "1/10", "0", "methods: unknown option: colour"},
        {"random:sinks=-1", "1/10", "0", "methods: sinks: not a number of rows: -1"},
        {"pqcache:summaries=32", "1/10", "0", "methods: summaries: not 0, 16 or 64: 32"},
        {"pqcache:rest=32", "1/10", "0", "methods: rest: not 0, 16 or 64: 32"},
        {"window:rerank=4", "1/10", "0",
         "methods: rerank: not used by window, only by pqcache"},
        {"full:sinks=4", "1/10", "0",
         "methods: sinks: not used by full, only by pqcache, oracle, oracle+rest, window, "
         "random, speculated"},
        {"pqcache:cache=lfu", "1/10", "0",
         "methods: cache: not used by pqcache, only by pqcache, oracle+rest with answer rows "
         "or ids"},
        {"pqcache:cache=lfu:answer=attend", "1/10", "0",
         "methods: cache: not used by pqcache, only by pqcache, oracle+rest with answer rows "
         "or ids"},
        {"pqcache:answer=rows:cache-tokens=256:cache=off", "1/10", "0",
         "methods: cache-tokens: not used by pqcache, only by pqcache, oracle+rest with answer "
         "rows or ids "
         "and cache lru or lfu"},
        {"pqcache:answer=all", "1/10", "0",
         "methods: answer: not auto, rows, ids or attend: all"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvw_eval_plan plan;
        char detail[256] = "";

        assert_int_equal(kvw_eval_plan_make(cases[i].methods, cases[i].budgets, cases[i].seeds,
                                            &kvw_method_defaults, &plan, detail,
                                            sizeof(detail)),
                         KV_INVALID);
        if (strstr(detail, cases[i].expected) == NULL)
            fail_msg("%zu: %s", i, detail);
    }
}

static void test_long(void **state)
{
    struct kvw_eval_plan plan;
    char list[KVW_EVAL_NAME_BYTES + 1], detail[256] = "";

    (void)state;
    memset(list, '1', sizeof(list) - 1);
    list[sizeof(list) - 1] = '\0';
    assert_int_equal(kvw_eval_plan_make("random", "1/10", list, &kvw_method_defaults, &plan,
                                        detail, sizeof(detail)),
                     KV_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_runs),    cmocka_unit_test(test_index_options),
        cmocka_unit_test(test_presets), cmocka_unit_test(test_refused),
        cmocka_unit_test(test_long),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
