/* Sequences repeat and are the published ones; numbers below a bound are even; secure bytes do
 * not repeat. */
#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void published_sequence(void **state)
{
    /* xoshiro256** from the state 1, 2, 3, 4: worked out by hand. */
    struct kv_random random = {.state = {1, 2, 3, 4}};

    (void)state;
    assert_true(kv_random_next(&random) == 11520);
    assert_true(kv_random_next(&random) == 0);
    assert_true(kv_random_next(&random) == 1509978240);
    assert_true(kv_random_next(&random) == 1215971899390074240);
}

static void seeds(void **state)
{
    struct kv_random a, b, c;

    (void)state;
    kv_random_init(&a, 5);
    kv_random_init(&b, 5);
    kv_random_init(&c, 6);
    /* The state is splitmix64's sequence from the seed. */
    for (int i = 0; i < 100; i++) {
        uint64_t x = kv_random_next(&a);

        assert_true(x == kv_random_next(&b));
        assert_true(x != kv_random_next(&c));
    }
    kv_random_init(&a, 0);
    assert_true(a.state[0] == 0xe220a8397b1dcdafu && a.state[1] == 0x6e789e6aa1b965f4u);
}

static void below(void **state)
{
    static const uint64_t bounds[] = {1, 2, 3, 10, 1000, (1ull << 63) + 1, UINT64_MAX};
    uint32_t counts[10] = {0};
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 1);
    for (size_t i = 0; i < sizeof(bounds) / sizeof(bounds[0]); i++)
        for (int j = 0; j < 1000; j++)
            assert_true(kv_random_below(&random, bounds[i]) < bounds[i]);
    for (int i = 0; i < 100000; i++)
        counts[kv_random_below(&random, 10)]++;
    for (int i = 0; i < 10; i++)
        assert_in_range(counts[i], 9500, 10500);
}

static void fill(void **state)
{
    struct kv_random random;
    uint8_t a[64], b[64], zeros[64] = {0};

    (void)state;
    for (size_t bytes = 0; bytes <= 32; bytes++) {
        memset(a, 0, sizeof(a));
        memset(b, 0, sizeof(b));
        kv_random_init(&random, 9);
        kv_random_fill(&random, a, bytes);
        kv_random_init(&random, 9);
        kv_random_fill(&random, b, bytes);
        assert_memory_equal(a, b, sizeof(a));
        assert_memory_equal(a + bytes, zeros, sizeof(a) - bytes);
    }
    kv_random_init_secure(&random);
    kv_random_fill(&random, a, sizeof(a));
    kv_random_fill(&random, b, sizeof(b));
    assert_memory_not_equal(a, b, sizeof(a));
    assert_memory_not_equal(a, zeros, sizeof(a));
    kv_random_fill(&random, a, 0);
    kv_random_init_secure(&random);
    assert_true(kv_random_below(&random, 7) < 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_sequence),
        cmocka_unit_test(seeds),
        cmocka_unit_test(below),
        cmocka_unit_test(fill),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
