/* select.h: every implementation that this CPU has gives the bits of the scalar one, of random
 * lengths, places and values, also of NaN, infinities, zeros and ties.  The scalar one is
 * checked against exp() of the C library and plain sums in double, and choosing against
 * sorting. */
#include "floats.h"
#include "select.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    ROUNDS = 4000,
    N_MAX = 1200,
    MANY = 1 << 20,
};

static uint64_t seed;
static struct kv_random dice;
static uint32_t scratch[KV_SELECT_SCRATCH];

#define EXPECT(condition)                                                             \
    do {                                                                              \
        if (!(condition)) {                                                           \
            print_error("KV_TEST_SEED=%llu round %d %s n %zu kind %d: %s\n",          \
                        (unsigned long long)seed, round, kernels->name, n, (int)kind, \
                        #condition);                                                  \
            fail();                                                                   \
        }                                                                             \
    } while (0)

static size_t length(void)
{
    const size_t limit = kv_random_below(&dice, 3) == 0 ? N_MAX : 40;

    return kv_random_below(&dice, limit + 1);
}

static float some_scale(void)
{
    return 0.01f + (float)kv_random_below(&dice, 1000) / 100;
}

static void tiers(void **state)
{
    unsigned n = 0;

    (void)state;
    for (; kv_select_kernels_at(n) != NULL; n++)
        print_message("select: %s\n", kv_select_kernels_at(n)->name);
    assert_true(n >= 1);
    assert_string_equal(kv_select_kernels_at(0)->name, "scalar");
    assert_null(kv_select_kernels_at(~0u));
}

static void sums_are_the_same(void **state)
{
    const struct kv_select_kernels *plain = kv_select_kernels_at(0), *kernels;

    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const enum float_kind kind = (enum float_kind)(round % FLOATS_N_KINDS);
        const size_t n = length();
        void *bases[3];
        float *scores = floats_exact(&dice, n * sizeof(float), sizeof(float), &bases[0]);
        float *merged = floats_exact(&dice, n * sizeof(float), sizeof(float), &bases[1]);
        float *others = floats_exact(&dice, n * sizeof(float), sizeof(float), &bases[2]);
        float *before = malloc((n + 1) * sizeof(float));
        const float scale = some_scale();

        assert_non_null(before);
        floats_fill(&dice, kind, scores, n);
        floats_fill(&dice, (enum float_kind)kv_random_below(&dice, FLOATS_N_KINDS), before, n);
        for (unsigned i = 1; (kernels = kv_select_kernels_at(i)) != NULL; i++) {
            const float max = plain->max(scores, n);
            const float odd = floats_one(&dice, FLOATS_SPECIAL);
            double a, b;

            EXPECT(floats_same(kernels->max(scores, n), max));
            a = plain->exp_sum(scores, n, scale, max);
            b = kernels->exp_sum(scores, n, scale, max);
            EXPECT(memcmp(&a, &b, sizeof(a)) == 0);
            a = plain->exp_sum(scores, n, scale, odd);
            b = kernels->exp_sum(scores, n, scale, odd);
            EXPECT(memcmp(&a, &b, sizeof(a)) == 0);

            memcpy(merged, before, n * sizeof(float));
            memcpy(others, before, n * sizeof(float));
            plain->merge_max(scores, n, merged);
            kernels->merge_max(scores, n, others);
            EXPECT(floats_all_same(merged, others, n));

            memcpy(merged, before, n * sizeof(float));
            memcpy(others, before, n * sizeof(float));
            plain->merge_softmax(scores, n, scale, odd, merged);
            kernels->merge_softmax(scores, n, scale, odd, others);
            EXPECT(floats_all_same(merged, others, n));
        }
        for (int i = 0; i < 3; i++)
            free(bases[i]);
        free(before);
    }
}

/* exp() of one number, by merging it into 0. */
static float exp_of(const struct kv_select_kernels *kernels, float x)
{
    float merged = 0;

    kernels->merge_softmax(&x, 1, 1, 0, &merged);
    return merged;
}

static void exp_is_exp(void **state)
{
    const struct kv_select_kernels *kernels;

    (void)state;
    for (unsigned i = 0; (kernels = kv_select_kernels_at(i)) != NULL; i++) {
        double worst = 0;

        for (float x = -87; x <= 88; x += 0.00073f) {
            const double exact = exp((double)x),
                         error = fabs(exp_of(kernels, x) - exact) / exact;

            worst = error > worst ? error : worst;
        }
        print_message("exp: %s: relative error %.2g\n", kernels->name, worst);
        assert_true(worst <= 3e-7);
        assert_true(exp_of(kernels, 0) == 1);
        assert_true(exp_of(kernels, -87.001f) == 0);
        assert_true(exp_of(kernels, -INFINITY) == 0);
        assert_true(exp_of(kernels, NAN) == 0);
        assert_true(exp_of(kernels, INFINITY) == exp_of(kernels, 88));
        assert_true(exp_of(kernels, 88) < INFINITY);
    }
}

static void sums_are_right(void **state)
{
    const struct kv_select_kernels *kernels;

    (void)state;
    for (int round = 0; round < 500; round++)
        for (unsigned i = 0; (kernels = kv_select_kernels_at(i)) != NULL; i++) {
            const enum float_kind kind = FLOATS_UNIFORM;
            const size_t n = 1 + length();
            const float scale = some_scale();
            float *scores = malloc(n * sizeof(float)), *merged = calloc(n, sizeof(float));
            float max = -INFINITY, lse;
            double sum = 0, of_merged = 0, bound;

            assert_true(scores != NULL && merged != NULL);
            floats_fill(&dice, kind, scores, n);
            for (size_t j = 0; j < n; j++)
                max = fmaxf(max, scores[j]);
            EXPECT(kernels->max(scores, n) == max);
            for (size_t j = 0; j < n; j++)
                sum += exp((double)scale * ((double)scores[j] - (double)max));
            /* exp()'s own error, eight additions and four more, the argument's two roundings;
             * what lies below -87 is nothing against the largest, which is 1. */
            bound = 3e-7 + (12 + 4 * (double)scale) * 0x1p-24;
            EXPECT(fabs(kernels->exp_sum(scores, n, scale, max) - sum) <= bound * sum);

            lse = (float)((double)scale * (double)max + log(sum));
            kernels->merge_softmax(scores, n, scale, lse, merged);
            for (size_t j = 0; j < n; j++)
                of_merged += (double)merged[j];
            EXPECT(fabs(of_merged - 1) <= bound + 2 * (fabs((double)lse) + 1) * 0x1p-24);

            for (size_t j = 0; j < n; j++)
                merged[j] = -scores[j];
            kernels->merge_max(scores, n, merged);
            for (size_t j = 0; j < n; j++)
                EXPECT(merged[j] == fabsf(scores[j]));
            free(scores);
            free(merged);
        }
}

static void nothing_and_nan(void **state)
{
    static const float nans[3] = {NAN, NAN, NAN}, mixed[3] = {NAN, -2, NAN};
    static const float low[3] = {-INFINITY, -INFINITY, NAN}, zeros[2] = {-0.0f, -0.0f};
    const struct kv_select_kernels *kernels;

    (void)state;
    for (unsigned i = 0; (kernels = kv_select_kernels_at(i)) != NULL; i++) {
        float merged[3] = {NAN, 1, NAN};

        assert_true(kernels->max(NULL, 0) == -INFINITY);
        assert_true(kernels->max(nans, 3) == -INFINITY);
        assert_true(kernels->max(mixed, 3) == -2);
        assert_true(floats_same(kernels->max(zeros, 2), 0));
        assert_true(kernels->exp_sum(NULL, 0, 1, 0) == 0);
        assert_true(kernels->exp_sum(nans, 3, 1, -INFINITY) == 0);
        assert_true(kernels->exp_sum(low, 3, 1, -INFINITY) == 0);
        assert_true(kernels->exp_sum(low, 3, 1, 5) == 0);
        assert_true(kernels->exp_sum(mixed, 3, 3, -2) == 1);
        kernels->merge_softmax(mixed, 3, 1, -INFINITY, merged);
        assert_true(isnan(merged[0]) && merged[1] == 1 && isnan(merged[2]));
        kernels->merge_max(mixed, 3, merged);
        assert_true(isnan(merged[0]) && merged[1] == 1 && isnan(merged[2]));
        kernels->merge_max(zeros, 2, merged);
        assert_true(floats_same(merged[0], -0.0f) && merged[1] == 1);
        kernels->merge_softmax(NULL, 0, 1, 0, NULL);
        kernels->merge_max(NULL, 0, NULL);
        assert_int_equal(kernels->select(NULL, 0, 0, NULL, scratch), 0);
        assert_int_equal(kernels->select(NULL, 0, 7, NULL, scratch), 0);
    }
}

static const float *sorted_scores;

/* The larger first, NaN last, the lower index first of equals. */
static int before(const void *first, const void *second)
{
    const uint32_t a = *(const uint32_t *)first, b = *(const uint32_t *)second;
    const float x = sorted_scores[a], y = sorted_scores[b];

    if (isnan(x) != isnan(y))
        return isnan(x) ? 1 : -1;
    if (x > y || x < y)
        return x > y ? -1 : 1;
    return a < b ? -1 : 1;
}

static int ascending(const void *first, const void *second)
{
    const uint32_t a = *(const uint32_t *)first, b = *(const uint32_t *)second;

    return a < b ? -1 : a > b;
}

static void
check_choice(int round, enum float_kind kind, const float *scores, size_t n, size_t k)
{
    const size_t n_chosen = k < n ? k : n;
    uint32_t *expected = malloc((n + 1) * sizeof(uint32_t));
    const struct kv_select_kernels *kernels;

    assert_non_null(expected);
    for (size_t i = 0; i < n; i++)
        expected[i] = (uint32_t)i;
    sorted_scores = scores;
    qsort(expected, n, sizeof(uint32_t), before);
    qsort(expected, n_chosen, sizeof(uint32_t), ascending);
    for (unsigned i = 0; (kernels = kv_select_kernels_at(i)) != NULL; i++) {
        void *base;
        uint32_t *chosen = floats_exact(&dice, n_chosen * sizeof(uint32_t), 4, &base);

        kv_random_fill(&dice, scratch, sizeof(scratch));
        EXPECT(kernels->select(scores, n, k, chosen, scratch) == n_chosen);
        EXPECT(memcmp(chosen, expected, n_chosen * sizeof(uint32_t)) == 0);
        free(base);
    }
    free(expected);
}

static void choosing_is_sorting(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const enum float_kind kind = (enum float_kind)(round % FLOATS_N_KINDS);
        const size_t n = length();
        void *base;
        float *scores = floats_exact(&dice, n * sizeof(float), sizeof(float), &base);

        floats_fill(&dice, kind, scores, n);
        check_choice(round, kind, scores, n, kv_random_below(&dice, n + 1));
        check_choice(round, kind, scores, n, n > 0 ? n - 1 : 0);
        check_choice(round, kind, scores, n, kv_random_below(&dice, 2) == 0 ? 1 : 0);
        check_choice(round, kind, scores, n, n + kv_random_below(&dice, 3));
        free(base);
    }
}

static void choosing_of_many(void **state)
{
    float *scores = malloc((MANY + 5) * sizeof(float));

    (void)state;
    assert_non_null(scores);
    for (int round = 0; round < FLOATS_N_KINDS; round++) {
        floats_fill(&dice, (enum float_kind)round, scores, MANY + 5);
        check_choice(round, (enum float_kind)round, scores, MANY + 5, MANY / 50);
    }
    free(scores);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiers),
        cmocka_unit_test(sums_are_the_same),
        cmocka_unit_test(exp_is_exp),
        cmocka_unit_test(sums_are_right),
        cmocka_unit_test(nothing_and_nan),
        cmocka_unit_test(choosing_is_sorting),
        cmocka_unit_test(choosing_of_many),
    };

    seed = floats_seed();
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
