/* sampler.h: greedy, cut by rank, cut by share, seeds. */
#include "gpu-worker/engine/sampler.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>

enum {
    N = 5,
    DRAWS = 20000,
};

static const float logits[N] = {1, 3, 3, -INFINITY, 2};

static struct kvw_sampler *make(double temperature, uint32_t top_k, double top_p, uint64_t seed)
{
    const struct kvw_sampler_options options = {temperature, top_k, top_p, seed};
    struct kvw_sampler *sampler;

    assert_int_equal(kvw_sampler_create(&options, N, &sampler), KV_OK);
    return sampler;
}

static void draw(struct kvw_sampler *sampler, unsigned counts[N])
{
    for (unsigned i = 0; i < N; i++)
        counts[i] = 0;
    for (unsigned i = 0; i < DRAWS; i++) {
        uint32_t token;

        assert_int_equal(kvw_sampler_next(sampler, logits, &token), KV_OK);
        assert_in_range(token, 0, N - 1);
        counts[token]++;
    }
    kvw_sampler_destroy(sampler);
}

static void test_greedy(void **state)
{
    unsigned counts[N];

    (void)state;
    draw(make(0, 0, 1, 1), counts);
    assert_int_equal(counts[1], DRAWS); /* the smaller of two equal ones */
}

static void test_shares(void **state)
{
    const double total = 2 * exp(3) + exp(2) + exp(1);
    unsigned counts[N];

    (void)state;
    draw(make(1, 0, 1, 1), counts);
    assert_int_equal(counts[3], 0);
    for (unsigned i = 0; i < N; i++)
        assert_true(fabs(counts[i] / (double)DRAWS - exp((double)logits[i]) / total) < 0.02);
}

static void test_cuts(void **state)
{
    unsigned counts[N];

    (void)state;
    draw(make(1, 2, 1, 1), counts);
    assert_int_equal(counts[1] + counts[2], DRAWS);
    assert_true(counts[1] > 0 && counts[2] > 0);
    draw(make(1, 1, 1, 1), counts);
    assert_int_equal(counts[1], DRAWS);
    draw(make(1, 0, 0, 1), counts); /* one token at least */
    assert_int_equal(counts[1], DRAWS);
    draw(make(1, 0, 0.9, 1), counts); /* 3, 3 and 2 reach 95 % */
    assert_int_equal(counts[0], 0);
    assert_true(counts[4] > 0);
}

static void test_seeds(void **state)
{
    struct kvw_sampler *a = make(1, 0, 1, 7), *b = make(1, 0, 1, 7), *c = make(1, 0, 1, 8);
    unsigned n_other = 0;

    (void)state;
    for (unsigned i = 0; i < 100; i++) {
        uint32_t of_a, of_b, of_c;

        assert_int_equal(kvw_sampler_next(a, logits, &of_a), KV_OK);
        assert_int_equal(kvw_sampler_next(b, logits, &of_b), KV_OK);
        assert_int_equal(kvw_sampler_next(c, logits, &of_c), KV_OK);
        assert_int_equal(of_a, of_b);
        n_other += of_a != of_c;
    }
    assert_true(n_other > 0);
    kvw_sampler_destroy(a);
    kvw_sampler_destroy(b);
    kvw_sampler_destroy(c);
}

static void test_no_number(void **state)
{
    const float broken[N] = {1, NAN, 2, 3, 4};
    struct kvw_sampler *sampler = make(0, 0, 1, 1);
    uint32_t token = 77;

    (void)state;
    assert_int_equal(kvw_sampler_next(sampler, broken, &token), KV_INVALID);
    assert_int_equal(token, 77);
    kvw_sampler_destroy(sampler);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy),    cmocka_unit_test(test_shares),
        cmocka_unit_test(test_cuts),      cmocka_unit_test(test_seeds),
        cmocka_unit_test(test_no_number),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
