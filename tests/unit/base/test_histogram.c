/* Every value falls into a step whose upper bound is not below it and at most 1/16 above;
 * quantiles agree with a sorted list within that error, and counts below a power of two are exact. */
#include "kvserver/base/histogram.h"
#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void one_value(void **state)
{
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 1);
    for (int i = 0; i < 20000; i++) {
        uint64_t value = i < 5000 ? (uint64_t)i : kv_random_next(&random) >> (22 + i % 42);
        struct kv_histogram histogram = {0};
        uint64_t bound;

        kv_histogram_add(&histogram, value);
        bound = kv_histogram_quantile(&histogram, 0.5);
        assert_true(bound >= value);
        assert_true(bound - value <= value / 16);
        assert_true(histogram.count == 1 && histogram.sum == value);
    }
}

static void bounds(void **state)
{
    struct kv_histogram histogram = {0};
    uint64_t last;

    (void)state;
    assert_int_equal(kv_histogram_quantile(&histogram, 0.5), 0);
    kv_histogram_add(&histogram, UINT64_MAX);
    last = kv_histogram_quantile(&histogram, 1);
    assert_true(last == ((uint64_t)1 << 43) - 1);
    kv_histogram_add(&histogram, 0);
    assert_int_equal(kv_histogram_quantile(&histogram, -1), 0);
    assert_int_equal(kv_histogram_quantile(&histogram, 0), 0);
    assert_int_equal(kv_histogram_quantile(&histogram, 0.5), 0);
    assert_true(kv_histogram_quantile(&histogram, 0.51) == last);
    assert_true(kv_histogram_quantile(&histogram, 2) == last);
}

static void below(void **state)
{
    struct kv_histogram histogram = {0};
    struct kv_random random;

    (void)state;
    for (unsigned i = 0; i <= 64; i++)
        assert_int_equal(kv_histogram_below(&histogram, i), 0);
    for (unsigned i = 0; i < 40; i++) { /* the last below and the first not below 2^i */
        kv_histogram_add(&histogram, ((uint64_t)1 << i) - 1);
        kv_histogram_add(&histogram, (uint64_t)1 << i);
    }
    assert_int_equal(kv_histogram_below(&histogram, 0), 1); /* 0; 1 is there twice */
    for (unsigned i = 1; i < 40; i++)
        assert_int_equal(kv_histogram_below(&histogram, i), 2 * i + 1);
    kv_histogram_add(&histogram, UINT64_MAX);
    assert_int_equal(kv_histogram_below(&histogram, 64), 81);

    kv_random_init(&random, 3);
    for (int i = 0; i < 1000; i++) {
        const uint64_t value = kv_random_next(&random) >> (22 + i % 42);
        struct kv_histogram one = {0};

        kv_histogram_add(&one, value);
        for (unsigned power = 0; power < 43; power++)
            assert_int_equal(kv_histogram_below(&one, power), value < (uint64_t)1 << power);
    }
}

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static void quantiles(void **state)
{
    enum {
        VALUES = 10000
    };
    static uint64_t values[VALUES];
    struct kv_histogram halves[2] = {0}, both = {0};
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 2);
    for (int i = 0; i < VALUES; i++) {
        values[i] = kv_random_below(&random, (uint64_t)1 << (4 + i % 30));
        kv_histogram_add(&halves[i % 2], values[i]);
    }
    kv_histogram_merge(&both, &halves[0]);
    kv_histogram_merge(&both, &halves[1]);
    assert_int_equal(both.count, VALUES);
    assert_int_equal(both.sum, halves[0].sum + halves[1].sum);
    qsort(values, VALUES, sizeof(values[0]), compare);
    for (int percent = 1; percent <= 100; percent++) {
        uint64_t exact = values[VALUES / 100 * percent - 1];
        uint64_t bound = kv_histogram_quantile(&both, percent / 100.0);

        /* The share is not exact in binary: the next rank may be taken. */
        if (percent < 100)
            assert_true(bound <= values[VALUES / 100 * percent] * 17 / 16);
        assert_true(bound >= exact);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_value),
        cmocka_unit_test(bounds),
        cmocka_unit_test(below),
        cmocka_unit_test(quantiles),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
