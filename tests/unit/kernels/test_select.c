/* select.h: every implementation that this CPU has gives the bits of the scalar one, of random
 * lengths, places and values, also of NaN, infinities, zeros and ties.  The scalar one is
 * checked against exp() of the C library and plain sums in double, and choosing against
 * sorting. */
#include "kernels/select.h"
#include "tests/support/floats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    ROUNDS = 4000,
    HEADS_MAX = 9,
    N_MAX = 1200,
    MANY = 1 << 20,
};

static uint64_t seed;
static struct kv_random dice;
static float room[MANY + 5];

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
    for (; kv_topk_kernels_at(n) != NULL; n++)
        print_message("select: %s\n", kv_topk_kernels_at(n)->name);
    assert_true(n >= 1);
    assert_string_equal(kv_topk_kernels_at(0)->name, "scalar");
    assert_null(kv_topk_kernels_at(~0u));
}

/* Numbers of rows, many of them 0. */
static uint32_t *some_counts(size_t n, void **ret_base)
{
    uint32_t *counts = floats_exact(&dice, n * sizeof(uint32_t), sizeof(uint32_t), ret_base);

    for (size_t i = 0; i < n; i++)
        counts[i] = (uint32_t)kv_random_below(&dice, 4) * (uint32_t)kv_random_below(&dice, 3);
    return counts;
}

static void all_is_the_same(void **state)
{
    const struct kv_topk_kernels *plain = kv_topk_kernels_at(0), *kernels;

    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const enum float_kind kind = (enum float_kind)(round % FLOATS_N_KINDS);
        const size_t n = length();
        void *bases[4];
        float *scores = floats_exact(&dice, n * sizeof(float), sizeof(float), &bases[0]);
        float *a = floats_exact(&dice, n * sizeof(float), sizeof(float), &bases[1]);
        float *b = floats_exact(&dice, n * sizeof(float), sizeof(float), &bases[2]);
        uint32_t *counts = some_counts(n, &bases[3]);
        const float scale = some_scale();

        floats_fill(&dice, kind, scores, n);
        for (unsigned i = 1; (kernels = kv_topk_kernels_at(i)) != NULL; i++) {
            const float odd = floats_one(&dice, FLOATS_SPECIAL);
            const float max = plain->max(scores, NULL, n), some = plain->max(scores, counts, n);
            static struct kv_topk one, other;

            EXPECT(floats_same(kernels->max(scores, NULL, n), max));
            EXPECT(floats_same(kernels->max(scores, counts, n), some));
            memcpy(a, scores, n * sizeof(float));
            memcpy(b, scores, n * sizeof(float));
            EXPECT(plain->exps(a, counts, n, scale, some) ==
                   kernels->exps(b, counts, n, scale, some));
            EXPECT(floats_all_same(a, b, n));
            memcpy(a, scores, n * sizeof(float));
            memcpy(b, scores, n * sizeof(float));
            EXPECT(plain->exps(a, NULL, n, scale, max) ==
                   kernels->exps(b, NULL, n, scale, max));
            EXPECT(floats_all_same(a, b, n));
            /* Weights, merged into others. */
            const size_t n_heads = kv_random_below(&dice, HEADS_MAX + 1);
            void *exps_base;
            float *exps =
                floats_exact(&dice, n_heads * n * sizeof(float), sizeof(float), &exps_base);
            float *merged = malloc((n + 1) * sizeof(float)), factors[HEADS_MAX];
            assert_non_null(merged);
            for (size_t j = 0; j < n_heads * n; j++)
                exps[j] = a[j % n] * (float)(1 + j / n);
            for (size_t j = 0; j < n_heads; j++)
                factors[j] = fabsf(floats_uniform(&dice));
            for (size_t j = 0; j < n; j++)
                merged[j] = b[j] = fabsf(floats_uniform(&dice));
            plain->merge(KV_WEIGHTS_SUM, exps, n, factors, n_heads, n, merged);
            kernels->merge(KV_WEIGHTS_SUM, exps, n, factors, n_heads, n, b);
            EXPECT(floats_all_same(merged, b, n));
            for (size_t j = 0; j < n; j++)
                merged[j] = b[j] = fabsf(floats_uniform(&dice));
            plain->merge(KV_WEIGHTS_MAX, exps, n, factors, n_heads, n, merged);
            kernels->merge(KV_WEIGHTS_MAX, exps, n, factors, n_heads, n, b);
            EXPECT(floats_all_same(merged, b, n));
            free(merged);
            free(exps_base);

            /* What is between two bounds. */
            size_t n_above, n_others;
            uint32_t least = kv_score_key(odd), most = kv_score_key(some);
            const uint32_t swap = least;
            if (least > most) {
                least = most;
                most = swap;
            }
            const size_t n_between = plain->between(scores, n, least, most, a, &n_above);
            EXPECT(kernels->between(scores, n, least, most, b, &n_others) == n_between);
            EXPECT(n_above == n_others && floats_all_same(a, b, n_between));

            kv_topk_begin(&one, 1 + n / 2);
            one.pass = (uint32_t)kv_random_below(&dice, KV_TOPK_PASSES);
            one.bound = kv_score_key(n > 0 ? scores[0] : odd);
            other = one;
            plain->count(&one, scores, round % 2 == 0 ? counts : NULL, n);
            kernels->count(&other, scores, round % 2 == 0 ? counts : NULL, n);
            EXPECT(memcmp(&one, &other, sizeof(one)) == 0);
        }
        for (int i = 0; i < 4; i++)
            free(bases[i]);
    }
}

/* exp() of one number at most 0, or of one whose largest is 0. */
static float exp_of(const struct kv_topk_kernels *kernels, float x)
{
    kernels->exps(&x, NULL, 1, 1, 0);
    return x;
}

static void exp_is_exp(void **state)
{
    const struct kv_topk_kernels *kernels;

    (void)state;
    for (unsigned i = 0; (kernels = kv_topk_kernels_at(i)) != NULL; i++) {
        double worst = 0;

        for (float x = KV_WEIGHT_LEAST; x <= 0; x += 0.00011f) {
            const double exact = exp((double)x),
                         error = fabs(exp_of(kernels, x) - exact) / exact;

            worst = error > worst ? error : worst;
        }
        print_message("exp: %s: relative error %.2g\n", kernels->name, worst);
        assert_true(worst <= 3e-7);
        assert_true(exp_of(kernels, 0) == 1);
        assert_true(fabs((double)exp_of(kernels, KV_WEIGHT_LEAST) * 0x1p24 - 1) <= 1e-6);
        assert_true(exp_of(kernels, nextafterf(KV_WEIGHT_LEAST, -INFINITY)) == 0);
        assert_true(exp_of(kernels, -INFINITY) == 0);
        assert_true(exp_of(kernels, NAN) == 0);
        assert_true(exp_of(kernels, INFINITY) == 1);
        assert_true(exp_of(kernels, 1e-30f) == 1 && exp_of(kernels, 88) == 1);
    }
}

static void sums_are_right(void **state)
{
    const struct kv_topk_kernels *kernels;

    (void)state;
    for (int round = 0; round < 500; round++)
        for (unsigned i = 0; (kernels = kv_topk_kernels_at(i)) != NULL; i++) {
            const enum float_kind kind = FLOATS_UNIFORM;
            const size_t n = 1 + length();
            const float scale = some_scale();
            float *scores = malloc(n * sizeof(float)), *merged = calloc(n, sizeof(float));
            float max = -INFINITY;
            double sum = 0, of_merged = 0, bound;
            uint64_t units;

            assert_true(scores != NULL && merged != NULL);
            floats_fill(&dice, kind, scores, n);
            for (size_t j = 0; j < n; j++)
                max = fmaxf(max, scores[j]);
            EXPECT(kernels->max(scores, NULL, n) == max);
            for (size_t j = 0; j < n; j++) {
                const double x = (double)scale * ((double)scores[j] - (double)max);

                sum += x < (double)KV_WEIGHT_LEAST ? 0 : exp(x);
            }
            /* exp()'s own error, the argument's two roundings, half a unit for each, and one that
             * is about the least weight. */
            bound = 3e-7 + 4 * (double)scale * 0x1p-24 + (double)n * 0x1p-31 + 0x1p-24;
            units = kernels->exps(scores, NULL, n, scale, max);
            EXPECT(fabs((double)units * 0x1p-30 - sum) <= bound * sum);
            EXPECT(kv_weights_sum(scores, NULL, n) == units);

            const float factor = kv_softmax_factor(units);
            kernels->merge(KV_WEIGHTS_SUM, scores, n, &factor, 1, n, merged);
            for (size_t j = 0; j < n; j++)
                of_merged += (double)merged[j];
            EXPECT(fabs(of_merged - 1) <= bound + 4 * 0x1p-24);
            free(scores);
            free(merged);
        }
}

/* Scores of which most are too light for a weight, in runs that are longer than a step of any
 * implementation: exactly those weigh nothing, a NaN too, and chosen are rows of weight, then
 * the lowest others. */
static void light_rows_weigh_nothing(void **state)
{
    const enum float_kind kind = FLOATS_UNIFORM;
    const struct kv_topk_kernels *plain = kv_topk_kernels_at(0), *kernels;

    (void)state;
    for (int round = 0; round < ROUNDS / 8; round++) {
        const size_t n = 1 + length();
        void *bases[3];
        float *scores = floats_exact(&dice, n * sizeof(float), sizeof(float), &bases[0]);
        float *weights = floats_exact(&dice, n * sizeof(float), sizeof(float), &bases[1]);
        uint32_t *counts = some_counts(n, &bases[2]);
        size_t n_heavy = 0;

        for (size_t i = 0, run; i < n; i += run) {
            const bool is_light = kv_random_below(&dice, 4) > 0;

            run = 1 + kv_random_below(&dice, is_light ? 300 : 20);
            run = run < n - i ? run : n - i;
            for (size_t j = i; j < i + run; j++)
                scores[j] = is_light
                                ? nextafterf(KV_WEIGHT_LEAST, -INFINITY) - (float)(j % 3) * 40
                                : KV_WEIGHT_LEAST + 16 * fabsf(floats_uniform(&dice));
            if (kv_random_below(&dice, 8) == 0)
                scores[i] = NAN;
        }
        for (size_t i = 0; i < n; i++)
            n_heavy += scores[i] >= KV_WEIGHT_LEAST;
        memcpy(weights, scores, n * sizeof(float));
        const uint64_t sum = plain->exps(weights, NULL, n, 1, 0);
        memcpy(weights, scores, n * sizeof(float));
        const uint64_t rows = plain->exps(weights, counts, n, 1, 0);
        const size_t k = kv_random_below(&dice, n + 1);

        for (unsigned i = 0; (kernels = kv_topk_kernels_at(i)) != NULL; i++) {
            static struct kv_topk one, other;
            uint32_t *chosen = malloc((n + KV_TOPK_SPARE) * sizeof(uint32_t));
            size_t n_chosen, n_light = k > n_heavy ? k - n_heavy : 0;

            assert_non_null(chosen);
            memcpy(weights, scores, n * sizeof(float));
            EXPECT(kernels->exps(weights, NULL, n, 1, 0) == sum);
            memcpy(weights, scores, n * sizeof(float));
            EXPECT(kernels->exps(weights, counts, n, 1, 0) == rows);
            for (size_t j = 0; j < n; j++)
                EXPECT((weights[j] > 0) == (scores[j] >= KV_WEIGHT_LEAST));

            kv_topk_begin(&one, k);
            other = one;
            for (int pass = 0; k > 0 && pass < KV_TOPK_PASSES; pass++) {
                const uint32_t *by = round % 2 == 0 ? counts : NULL;

                plain->count(&other, weights, by, n);
                kernels->count(&one, weights, by, n);
                EXPECT(memcmp(&one, &other, sizeof(one)) == 0);
                kv_topk_next(&one);
                kv_topk_next(&other);
            }
            if (k > 0 && round % 2 != 0 && n_light > 0) {
                n_chosen = kernels->collect(&one, weights, NULL, n, 0, chosen);
                EXPECT(n_chosen == k);
                for (size_t j = 0, at = 0; j < n; j++) {
                    const bool is_in = weights[j] > 0 || n_light > 0;

                    n_light -= is_in && !(weights[j] > 0);
                    EXPECT(!is_in || chosen[at] == j);
                    at += is_in;
                }
            }
            free(chosen);
        }
        for (int i = 0; i < 3; i++)
            free(bases[i]);
    }
}

/* A score is never above the largest but by rounding, which huge ones and those that no row has
 * make large: a weight is at most 1 all the same, so that a sum of them fits its integer. */
static void weights_are_at_most_one(void **state)
{
    const struct kv_topk_kernels *kernels;
    const float huge[2] = {0x1.234568p+100f, 0x1.234566p+100f};

    (void)state;
    for (int round = 0; round < ROUNDS; round++)
        for (unsigned i = 0; (kernels = kv_topk_kernels_at(i)) != NULL; i++) {
            const enum float_kind kind = (enum float_kind)(round % FLOATS_N_KINDS);
            const size_t n = 1 + length();
            const float scale = some_scale();
            void *bases[2];
            float *scores = floats_exact(&dice, n * sizeof(float), sizeof(float), &bases[0]);
            uint32_t *counts = some_counts(n, &bases[1]);
            uint64_t n_rows = 0;

            floats_fill(&dice, kind, scores, n);
            for (size_t j = 0; j < n; j++) {
                n_rows += counts[j];
                if (round % 3 == 0)
                    scores[j] = huge[j % 2];
            }
            const float max = kernels->max(scores, counts, n);
            EXPECT(kernels->exps(scores, counts, n, scale, max) <= n_rows << KV_EXP_SUM_BITS);
            for (size_t j = 0; j < n; j++)
                EXPECT(scores[j] >= 0 && scores[j] <= 1);
            free(bases[0]);
            free(bases[1]);
        }
}

static void nothing_and_nan(void **state)
{
    static const float nans[3] = {NAN, NAN, NAN}, mixed[3] = {NAN, -2, NAN};
    static const float zeros[2] = {-0.0f, -0.0f}, one = 1;
    static const uint32_t none[3] = {0, 0, 0}, first[3] = {1, 0, 0};
    static struct kv_topk selector;
    const struct kv_topk_kernels *kernels;

    (void)state;
    for (unsigned i = 0; (kernels = kv_topk_kernels_at(i)) != NULL; i++) {
        float low[3] = {-INFINITY, -INFINITY, NAN}, high[3] = {INFINITY, 7, NAN};
        float values[3] = {NAN, -2, NAN};

        assert_true(kernels->max(NULL, NULL, 0) == -INFINITY);
        assert_true(kernels->max(nans, NULL, 3) == -INFINITY);
        assert_true(kernels->max(mixed, NULL, 3) == -2);
        assert_true(kernels->max(mixed, none, 3) == -INFINITY);
        assert_true(kernels->max(mixed, first, 3) == -INFINITY);
        assert_true(floats_same(kernels->max(zeros, NULL, 2), 0));
        assert_true(kernels->exps(NULL, NULL, 0, 1, 0) == 0);
        assert_true(kernels->exps(values, NULL, 3, 3, -2) == 1ull << KV_EXP_SUM_BITS);
        assert_true(values[0] == 0 && values[1] == 1 && values[2] == 0);
        assert_true(kernels->exps(low, NULL, 3, 1, -INFINITY) == 0 && low[0] == 0);
        assert_true(kernels->exps(high, NULL, 3, 1, INFINITY) == 0 && high[0] == 0);
        kernels->merge(KV_WEIGHTS_SUM, NULL, 0, &one, 1, 0, NULL);
        kernels->merge(KV_WEIGHTS_MAX, NULL, 0, &one, 1, 0, NULL);
        kernels->merge(KV_WEIGHTS_SUM, NULL, 0, NULL, 0, 0, NULL);
        kernels->merge(KV_WEIGHTS_MAX, NULL, 0, NULL, 0, 0, NULL);
        kv_topk_begin(&selector, 7);
        kernels->count(&selector, NULL, NULL, 0);
        assert_int_equal(kernels->collect(&selector, NULL, NULL, 0, 0, NULL), 0);
    }
    assert_int_equal(kv_topk_select(NULL, 0, 0, NULL, NULL), 0);
    assert_int_equal(kv_topk_select(NULL, 0, 7, NULL, NULL), 0);
    assert_true(kv_softmax_factor(0) == 0);
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

/* The k largest with the functions of one table, the scores in some parts. */
static size_t choose(const struct kv_topk_kernels *kernels,
                     const float *scores,
                     size_t n,
                     size_t k,
                     uint32_t *ret)
{
    static struct kv_topk selector;
    size_t n_chosen = 0;

    kv_topk_begin(&selector, k);
    for (unsigned pass = 0; pass < KV_TOPK_PASSES; pass++) {
        for (size_t i = 0, part; i < n && k > 0; i += part) {
            part = 1 + kv_random_below(&dice, n - i);
            kernels->count(&selector, scores + i, NULL, part);
        }
        kv_topk_next(&selector);
    }
    for (size_t i = 0, part; i < n; i += part) {
        part = 1 + kv_random_below(&dice, n - i);
        n_chosen +=
            kernels->collect(&selector, scores + i, NULL, part, (uint32_t)i, ret + n_chosen);
    }
    return n_chosen;
}

static void
check_choice(int round, enum float_kind kind, const float *scores, size_t n, size_t k)
{
    const size_t n_chosen = k < n ? k : n;
    uint32_t *expected = malloc((n + 1) * sizeof(uint32_t));
    const struct kv_topk_kernels *kernels;

    assert_non_null(expected);
    for (size_t i = 0; i < n; i++)
        expected[i] = (uint32_t)i;
    sorted_scores = scores;
    qsort(expected, n, sizeof(uint32_t), before);
    qsort(expected, n_chosen, sizeof(uint32_t), ascending);
    for (unsigned i = 0; (kernels = kv_topk_kernels_at(i)) != NULL; i++) {
        void *base;
        uint32_t *chosen =
            floats_exact(&dice, (n_chosen + KV_TOPK_SPARE) * sizeof(uint32_t), 4, &base);

        EXPECT(choose(kernels, scores, n, k, chosen) == n_chosen);
        EXPECT(memcmp(chosen, expected, n_chosen * sizeof(uint32_t)) == 0);
        EXPECT(kv_topk_select(scores, n, k, chosen, room) == n_chosen);
        EXPECT(memcmp(chosen, expected, n_chosen * sizeof(uint32_t)) == 0);
        free(base);
    }
    free(expected);
}

/* An item of c rows is as c rows with its score: the same sums, the same bound, as many ties,
 * as many rows by mass and by a least weight. */
static void items_are_rows(void **state)
{
    const struct kv_topk_kernels *kernels;

    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const enum float_kind kind = (enum float_kind)(round % FLOATS_N_KINDS);
        const size_t n = length();
        void *bases[2];
        float *scores = floats_exact(&dice, n * sizeof(float), sizeof(float), &bases[0]);
        uint32_t *counts = some_counts(n, &bases[1]);
        float *rows = malloc((6 * n + 1) * sizeof(float)),
              *exps = malloc((n + 1) * sizeof(float));
        const float scale = some_scale();
        const double share = (double)kv_random_below(&dice, 101) / 100;
        size_t n_rows = 0;

        assert_true(rows != NULL && exps != NULL);
        floats_fill(&dice, kind, scores, n);
        for (size_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < counts[i]; j++)
                rows[n_rows++] = scores[i];
        const size_t k = kv_random_below(&dice, n_rows + 2);
        for (unsigned i = 0; (kernels = kv_topk_kernels_at(i)) != NULL; i++) {
            static struct kv_topk of_items, of_rows;

            kv_topk_begin(&of_items, k);
            kv_topk_begin(&of_rows, k);
            for (unsigned pass = 0; pass < KV_TOPK_PASSES; pass++) {
                if (k > 0) {
                    kernels->count(&of_items, scores, counts, n);
                    kernels->count(&of_rows, rows, NULL, n_rows);
                }
                kv_topk_next(&of_items);
                kv_topk_next(&of_rows);
            }
            EXPECT(memcmp(&of_items, &of_rows, sizeof(of_rows)) == 0);

            /* Items above the bound and at it: so many rows are taken. */
            uint32_t *above = malloc((n + KV_TOPK_SPARE) * sizeof(uint32_t));
            uint32_t *equal = malloc((n + KV_TOPK_SPARE) * sizeof(uint32_t));
            size_t n_above, n_equal, n_taken = 0, at_above = 0, at_equal = 0;
            assert_true(above != NULL && equal != NULL);
            kernels->items(&of_items, scores, counts, n, above, &n_above, equal, &n_equal);
            for (uint32_t item = 0; item < n; item++) {
                const uint32_t image = kv_score_key(scores[item]);
                const bool is_above = at_above < n_above && above[at_above] == item;
                const bool is_equal = at_equal < n_equal && equal[at_equal] == item;

                EXPECT(is_above == (counts[item] > 0 && image > of_items.bound));
                EXPECT(is_equal == (counts[item] > 0 && image == of_items.bound));
                at_above += is_above;
                at_equal += is_equal;
                n_taken += is_above ? counts[item] : 0;
            }
            EXPECT(at_above == n_above && at_equal == n_equal);
            EXPECT(k > n_rows || n_taken + of_items.ties == k);
            free(above);
            free(equal);
        }
        kernels = kv_topk_kernels_at(0);
        const float max = kv_scores_max(scores, counts, n);
        EXPECT(floats_same(kv_scores_max(rows, NULL, n_rows), max));
        memcpy(exps, scores, n * sizeof(float));
        const uint64_t total = kv_softmax_exps(exps, counts, n, scale, max);
        EXPECT(kv_softmax_exps(rows, NULL, n_rows, scale, max) == total);
        EXPECT(kv_weights_sum(exps, counts, n) == total);

        static struct kv_mass of_items, of_rows;
        kv_mass_begin(&of_items, total, share);
        kv_mass_begin(&of_rows, total, share);
        const uint64_t wanted = of_rows.wanted;
        for (unsigned pass = 0; pass < KV_TOPK_PASSES; pass++) {
            kv_mass_count(&of_items, exps, counts, n);
            kv_mass_count(&of_rows, rows, NULL, n_rows);
            kv_mass_next(&of_items);
            kv_mass_next(&of_rows);
        }
        EXPECT(of_items.n_rows == of_rows.n_rows);
        /* So many weigh enough, one less would not. */
        uint32_t *chosen = malloc((n_rows + KV_TOPK_SPARE) * sizeof(uint32_t));
        assert_non_null(chosen);
        for (unsigned less = 0; less < 2 && of_rows.n_rows >= less; less++) {
            uint64_t mass = 0;
            const size_t n_chosen =
                kv_topk_select(rows, n_rows, of_rows.n_rows - less, chosen, room);
            for (size_t i = 0; i < n_chosen; i++)
                mass += kv_weights_sum(rows + chosen[i], NULL, 1);
            EXPECT(less == 0 ? mass >= wanted : mass < wanted);
        }
        free(chosen);
        const float least = n > 0 ? exps[kv_random_below(&dice, n)] : 0;
        EXPECT(kv_count_from(exps, counts, n, least) ==
               kv_count_from(rows, NULL, n_rows, least));
        for (int i = 0; i < 2; i++)
            free(bases[i]);
        free(rows);
        free(exps);
    }
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
        for (size_t n = 8000; n <= MANY + 5; n = n < MANY ? n * 11 : n + MANY) {
            const size_t some = n < MANY + 5 ? n : MANY + 5;

            check_choice(round, (enum float_kind)round, scores, some, some / 50);
            check_choice(round, (enum float_kind)round, scores, some, 1 + some / 2);
            check_choice(round, (enum float_kind)round, scores, some, 3);
        }
    }
    free(scores);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiers),
        cmocka_unit_test(all_is_the_same),
        cmocka_unit_test(exp_is_exp),
        cmocka_unit_test(sums_are_right),
        cmocka_unit_test(light_rows_weigh_nothing),
        cmocka_unit_test(weights_are_at_most_one),
        cmocka_unit_test(nothing_and_nan),
        cmocka_unit_test(choosing_is_sorting),
        cmocka_unit_test(choosing_of_many),
        cmocka_unit_test(items_are_rows),
    };

    seed = floats_seed();
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
