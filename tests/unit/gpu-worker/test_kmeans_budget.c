/* kmeans_budget.h: the bounds of iterations, and a measure that is one. */
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

static void a_measure_is_positive(void **state)
{
    (void)state;
    assert_true(kvw_kmeans_row_s(64, 2, 2) > 0);
    assert_true(kvw_kmeans_row_s(128, 16, 8) > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(iterations_fit),
        cmocka_unit_test(a_measure_is_positive),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
