/* rerank.h: what becomes of the factor, by scripts of estimates. */
#include "gpu-worker/attention/rerank.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>

/* n queries whose replies have the estimate. */
static void note(struct kvw_rerank *rerank, unsigned n, double recall)
{
    for (unsigned i = 0; i < n; i++)
        kvw_rerank_note(rerank, (float)recall, KVW_RERANK_MAX);
}

/* One estimate, as nodes send it: with every query until the next one. */
static void estimate(struct kvw_rerank *rerank, double recall)
{
    note(rerank, KVW_RERANK_EVERY, recall);
}

/* Recall falls, rises by more candidates, and falls no more: the script of a text that changes. */
static void it_follows_recall(void **state)
{
    static const struct {
        double recall;
        uint32_t factor; /* after it */
    } script[] = {
        {0.95, 4},  {0.92, 4},  {0.88, 6},   {0.85, 9},  {0.86, 10}, {0.89, 11}, {0.91, 11},
        {0.95, 11}, {0.96, 11}, {0.971, 10}, {0.975, 9}, {0.98, 8},  {0.96, 8},  {0.99, 7},
        {0.985, 6}, {0.99, 5},  {0.991, 4},  {0.992, 4}, {0.7, 6},
    };
    struct kvw_rerank rerank;

    (void)state;
    kvw_rerank_begin(&rerank, KVW_RERANK_USUAL);
    note(&rerank, 1000, (double)NAN);
    assert_int_equal(rerank.factor, KVW_RERANK_USUAL);
    for (unsigned i = 0; i < sizeof(script) / sizeof(script[0]); i++) {
        estimate(&rerank, script[i].recall);
        assert_int_equal(rerank.factor, script[i].factor);
    }
}

/* An estimate that is repeated says nothing new: 60 queries are not 60 samples. */
static void an_estimate_counts_once(void **state)
{
    struct kvw_rerank rerank;

    (void)state;
    kvw_rerank_begin(&rerank, KVW_RERANK_USUAL);
    note(&rerank, 1, 0.5);
    assert_int_equal(rerank.factor, 6);
    note(&rerank, KVW_RERANK_STALE - 1, 0.5);
    assert_int_equal(rerank.factor, 6);
    note(&rerank, 1, 0.5);
    assert_int_equal(rerank.factor, 9);

    /* Of several kv heads, one after the other. */
    kvw_rerank_begin(&rerank, KVW_RERANK_USUAL);
    note(&rerank, 1, 0.5);
    for (unsigned i = 1; i < KVW_RERANK_EVERY; i++)
        note(&rerank, 1, 0.5 - i / 1000.0);
    assert_int_equal(rerank.factor, 6);
    note(&rerank, 1, 0.4);
    assert_int_equal(rerank.factor, 9);
}

/* It has bounds: those of a query, and where it began. */
static void it_has_bounds(void **state)
{
    struct kvw_rerank rerank;

    (void)state;
    kvw_rerank_begin(&rerank, KVW_RERANK_USUAL);
    for (unsigned i = 0; i < 20; i++)
        estimate(&rerank, 0.8 - i / 100.0);
    assert_int_equal(rerank.factor, KVW_RERANK_MAX);
    for (unsigned i = 0; i < 40; i++)
        estimate(&rerank, 0.98 + i / 10000.0);
    assert_int_equal(rerank.factor, KVW_RERANK_USUAL);

    for (unsigned i = 0; i < 20 * KVW_RERANK_EVERY; i++)
        kvw_rerank_note(&rerank, 0.8f - (float)i / 10000, 8);
    assert_int_equal(rerank.factor, 8);
    /* Fewer than there are already: queries of more rows. */
    for (unsigned i = 0; i < 20 * KVW_RERANK_EVERY; i++)
        kvw_rerank_note(&rerank, 0.6f - (float)i / 10000, 5);
    assert_int_equal(rerank.factor, 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_follows_recall),
        cmocka_unit_test(an_estimate_counts_once),
        cmocka_unit_test(it_has_bounds),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
