/* softmax.h: every table against exact values. */
#include "gpu-worker/base/softmax.h"
#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <string.h>

static void test_softmax(void **state)
{
    enum {
        N = 1003
    };
    static float x[N], e[N];
    struct kv_random dice;

    (void)state;
    kv_random_init(&dice, 1);
    for (size_t i = 0; i < N; i++)
        x[i] = (float)((double)(kv_random_next(&dice) >> 40) / (1 << 24) * 2 - 1) *
               (float)(i % 200);
    x[5] = -INFINITY; /* a masked score */
    for (unsigned i = 0; kvw_softmax_at(i) != NULL; i++) {
        const struct kvw_softmax_ops *softmax = kvw_softmax_at(i);
        const float most = softmax->max(x, N);
        double sum = 0;
        float total;

        memcpy(e, x, sizeof(e));
        total = softmax->exp_sum(e, N, most);
        for (size_t j = 0; j < N; j++) {
            const double exact = exp((double)x[j] - (double)most);

            assert_true(x[j] <= most);
            assert_true(fabs((double)e[j] - exact) <= 3e-7 * exact + 1e-37);
            sum += exact;
        }
        assert_true(fabs((double)total - sum) <= 1e-5 * sum);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_softmax),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
