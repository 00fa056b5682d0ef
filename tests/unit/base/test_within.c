/* Whether many numbers are within a bound: what is wrong is found wherever it stands. */
#include "kvserver/base/within.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    N_MAX = 40, /* two rounds of sixteen, and some */
};

static void one_is_above(void **state)
{
    const float most = 3.5f;
    const float wrong[] = {nextafterf(most, 4),
                           nextafterf(-most, -4),
                           FLT_MAX,
                           -FLT_MAX,
                           INFINITY,
                           -INFINITY,
                           NAN,
                           -NAN};
    const float right[] = {0, -0.0f, 1e-40f, most, -most, 1};
    float values[N_MAX] = {0};

    (void)state;
    for (size_t n = 0; n <= N_MAX; n++) {
        for (size_t i = 0; i < n; i++)
            values[i] = right[(i + n) % (sizeof(right) / sizeof(right[0]))];
        assert_true(kv_are_within(values, n, most));
        for (size_t i = 0; i < n; i++) {
            const float before = values[i];

            for (size_t j = 0; j < sizeof(wrong) / sizeof(wrong[0]); j++) {
                values[i] = wrong[j];
                assert_false(kv_are_within(values, n, most));
                assert_int_equal(kv_are_finite(values, n), isfinite(wrong[j]));
            }
            values[i] = before;
        }
    }
}

static void nothing_but_zero(void **state)
{
    const float none[] = {0, -0.0f}, least[] = {0, 1e-45f};

    (void)state;
    assert_true(kv_are_within(none, 2, 0));
    assert_false(kv_are_within(least, 2, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_is_above),
        cmocka_unit_test(nothing_but_zero),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
