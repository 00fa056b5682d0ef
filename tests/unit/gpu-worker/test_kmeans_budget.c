/* kmeans_budget.h: the bounds of iterations, and what nodes report changes them. */
#include "gpu-worker/kvcache/kmeans_budget.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>

static void iterations_fit(void **state)
{
    uint32_t before = 0;

    (void)state;
    /* 3 in the base time, and one for each further iteration's. */
    assert_int_equal(kvw_kmeans_iterations(1.0, 0.3, 0.1), 10);
    assert_int_equal(kvw_kmeans_iterations(0.3, 0.3, 0.1), 3);
    assert_int_equal(kvw_kmeans_iterations(0, 0.3, 0.1), 3);
    assert_int_equal(kvw_kmeans_iterations(1e9, 0.3, 0.1), 300);
    assert_int_equal(kvw_kmeans_iterations((double)NAN, 0.3, 0.1), 3);
    for (double layer_s = 0; layer_s < 50; layer_s += 0.01) {
        const uint32_t now = kvw_kmeans_iterations(layer_s, 0.3, 0.1);

        assert_true(now >= before && now >= 3 && now <= 300);
        before = now;
    }
    assert_int_equal(before, 300);
}

/* Without a report there is a guess: 64 elements, 3 kv heads, 64 centroids. */
static void a_guess_comes_first(void **state)
{
    const struct kvw_kmeans_cost none = kvw_kmeans_cost_assumed(64, 3, 6, 0),
                                 some = kvw_kmeans_cost_assumed(64, 3, 6, 16),
                                 many = kvw_kmeans_cost_assumed(64, 3, 6, 64);

    (void)state;
    assert_false(none.is_reported);
    assert_true(fabs(none.row_s - 64 * 64 * 3 / 1e10) < 1e-15);
    assert_true(fabs(none.fixed - 1) < 1e-12);
    assert_true(fabs(some.fixed - 2.5) < 1e-12);
    assert_true(fabs(many.fixed - 7) < 1e-12);
    /* Of the same time, summaries take their part. */
    assert_int_equal(kvw_kmeans_budget(&none, 1000, 1000 * none.row_s * 21.001), 20);
    assert_int_equal(kvw_kmeans_budget(&many, 1000, 1000 * many.row_s * 21.001), 14);
    assert_int_equal(kvw_kmeans_budget(&none, 1000, 0), 3);
    assert_int_equal(kvw_kmeans_budget(&none, 1, 1e9), 300);
}

/* The first report replaces the guess; later ones move it.  What nodes did in 4.5 s decides, not
 * what this processor does. */
static void reports_decide(void **state)
{
    struct kvw_kmeans_cost cost = kvw_kmeans_cost_assumed(64, 3, 6, 16);
    const struct kvw_kmeans_cost guess = cost;

    (void)state;
    kvw_kmeans_cost_report(&cost, 0, 10, 1);
    kvw_kmeans_cost_report(&cost, 1000, 0, 1);
    kvw_kmeans_cost_report(&cost, 1000, 10, 0);
    kvw_kmeans_cost_report(&cost, 1000, 10, -1);
    assert_memory_equal(&cost, &guess, sizeof(cost));

    /* 1,000 rows, (2 + 2.5) iterations. */
    kvw_kmeans_cost_report(&cost, 1000, 2, 4.5);
    assert_true(cost.is_reported);
    assert_true(fabs(cost.row_s - 1e-3) < 1e-12);
    assert_int_equal(kvw_kmeans_budget(&cost, 1000, 12.501), 10);
    assert_int_equal(kvw_kmeans_budget(&cost, 500, 12.501), 22);

    /* Nodes that are five times as slow for once count a quarter; if they stay so, all. */
    kvw_kmeans_cost_report(&cost, 2000, 2, 45);
    assert_true(fabs(cost.row_s - 2e-3) < 1e-12);
    for (unsigned i = 0; i < 100; i++)
        kvw_kmeans_cost_report(&cost, 2000, 2, 45);
    assert_true(fabs(cost.row_s - 5e-3) < 1e-9);
}

/* The cost of a node follows from its reports whatever the number of iterations was, and the
 * iterations chosen by it take the time that was given. */
static void the_time_is_kept(void **state)
{
    const double node_row_s = 3e-6, layer_s = 0.2, rows = 4096;
    struct kvw_kmeans_cost cost = kvw_kmeans_cost_assumed(64, 3, 6, 16);
    uint32_t iterations = kvw_kmeans_budget(&cost, rows, layer_s);

    (void)state;
    assert_true(rows * node_row_s * (iterations + cost.fixed) > 1.2 * layer_s);
    for (unsigned layer = 0; layer < 5; layer++) {
        kvw_kmeans_cost_report(&cost, rows, iterations,
                               rows * node_row_s * (iterations + cost.fixed));
        iterations = kvw_kmeans_budget(&cost, rows, layer_s);
        assert_true(rows * node_row_s * (iterations + cost.fixed) <= layer_s);
        assert_true(rows * node_row_s * (iterations + 1 + cost.fixed) > layer_s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(iterations_fit),
        cmocka_unit_test(a_guess_comes_first),
        cmocka_unit_test(reports_decide),
        cmocka_unit_test(the_time_is_kept),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
