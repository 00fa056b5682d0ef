/* Choices against plain sorting. */
#include "kvserver/store/query/selection.h"

#include "tests/support/floats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    N_MAX = 700,
    ROUNDS = 3000,
};

static struct kv_random dice;
static float scores[KV_QUERIES_MAX * N_MAX], weights[KVS_SELECT_CAPACITY * 6 * N_MAX];
static struct kvs_selector chooser;
static float lost[KV_QUERIES_MAX * N_MAX];
static uint32_t among[N_MAX], indices[N_MAX + KV_TOPK_SPARE], heads[N_MAX], expected[N_MAX];

/* Is a before b?  NaN comes last, and of equals the lower index first. */
static bool is_before(const float *values, uint32_t a, uint32_t b)
{
    float x = values[a], y = values[b];

    if (isnan(x) || isnan(y))
        return isnan(x) == isnan(y) ? a < b : isnan(y);
    return x > y || (x == y && a < b);
}

/* Marks the k first of those that `may` lets. */
static void take_first(const float *values, uint32_t n, uint32_t k, unsigned q, bool all)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t n_before = 0;

        if (!all && (among[i] >> q & 1) == 0)
            continue;
        for (uint32_t j = 0; j < n; j++)
            n_before += (all || (among[j] >> q & 1)) && is_before(values, j, i);
        if (n_before < k)
            expected[i] |= 1u << q;
    }
}

static struct kvs_selection some_choice(uint32_t n)
{
    return (struct kvs_selection){
        .merge = (enum kv_merge)(KV_MERGE_SUM + kv_random_below(&dice, 4)),
        .n_queries = kv_random_below(&dice, 8) == 0 ? KV_QUERIES_MAX
                                                    : 1 + (uint32_t)kv_random_below(&dice, 4),
        .scale = 0.25f,
        .k = kv_random_below(&dice, 6) == 0 ? KV_SELECTED_MAX
                                            : 1 + (uint32_t)kv_random_below(&dice, n),
        .factor = 1,
    };
}

static void check_choice(const struct kvs_selection *choice, uint32_t n, uint32_t n_chosen)
{
    uint32_t at = 0;

    assert_in_range(n_chosen, choice->k < n ? choice->k : n, kvs_selection_max(choice, n));
    for (uint32_t i = 0; i < n; i++) {
        if (expected[i] == 0)
            continue;
        assert_true(at < n_chosen);
        assert_int_equal(indices[at], i);
        assert_int_equal(heads[at], expected[i]);
        at++;
    }
    assert_int_equal(at, n_chosen);
}

/* Each vector for itself, among all rows or among some. */
static void each(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t n = 1 + (uint32_t)kv_random_below(&dice, round % 10 == 0 ? N_MAX : 30);
        struct kvs_selection choice = some_choice(n);
        bool all = round % 3 == 0;

        choice.merge = round % 2 ? KV_MERGE_UNION : KV_MERGE_NONE;
        floats_fill(&dice, (enum float_kind)(round % FLOATS_N_KINDS), scores,
                    (size_t)n * choice.n_queries);
        memset(expected, 0, sizeof(expected));
        for (uint32_t i = 0; i < n; i++)
            among[i] = (uint32_t)kv_random_next(&dice);
        for (uint32_t q = 0; q < choice.n_queries; q++)
            take_first(scores + (size_t)q * n, n, choice.k, q, all);
        uint32_t n_chosen = kvs_select(&chooser, &choice, scores, all ? NULL : among, n,
                                       round % 5 == 0, weights, indices, heads);
        if (all)
            check_choice(&choice, n, n_chosen);
        for (uint32_t i = 0, at = 0; !all && i < n; i++) {
            bool chosen = at < n_chosen && indices[at] == i;

            assert_int_equal(chosen, expected[i] != 0);
            if (chosen)
                assert_int_equal(heads[at++], expected[i]);
        }
    }
}

/* The merged weights, and the largest of them. */
static void merged(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t n = 1 + (uint32_t)kv_random_below(&dice, round % 10 == 0 ? N_MAX : 30);
        struct kvs_selection choice = some_choice(n);
        bool sums = round % 2;

        choice.merge = sums ? KV_MERGE_SUM : KV_MERGE_MAX;
        floats_fill(&dice, round % 3 ? FLOATS_UNIFORM : FLOATS_INTEGERS, scores,
                    (size_t)n * choice.n_queries);
        double totals[KV_QUERIES_MAX] = {0};
        for (uint32_t q = 0; q < choice.n_queries; q++)
            for (uint32_t i = 0; i < n; i++)
                totals[q] += exp((double)choice.scale * (double)scores[(size_t)q * n + i]);
        memcpy(lost, scores, (size_t)n * choice.n_queries * sizeof(float));
        uint32_t n_chosen =
            kvs_select(&chooser, &choice, lost, NULL, n, true, weights, indices, heads);
        for (uint32_t i = 0; i < n; i++) {
            double wanted = 0;

            for (uint32_t q = 0; q < choice.n_queries; q++) {
                double own =
                    exp((double)choice.scale * (double)scores[(size_t)q * n + i]) / totals[q];
                wanted = sums ? wanted + own : fmax(wanted, own);
            }
            assert_true(fabs((double)weights[i] - wanted) <= 1e-5 * wanted);
        }
        memset(expected, 0, sizeof(expected));
        take_first(weights, n, choice.k, 0, true);
        for (uint32_t i = 0; i < n; i++)
            expected[i] = expected[i] != 0 ? UINT32_MAX : 0;
        check_choice(&choice, n, n_chosen);
    }
}

/* Scores that are no numbers weigh nothing, and are chosen last. */
static void no_numbers(void **state)
{
    const struct kvs_selection choice = {
        .merge = KV_MERGE_SUM, .n_queries = 2, .scale = 1, .k = 3, .factor = 1};
    static const float odd[] = {NAN, 1, INFINITY, 0, -INFINITY, 5, NAN, 0.5f};

    (void)state;
    for (int merge = KV_MERGE_SUM; merge <= KV_MERGE_NONE; merge++) {
        struct kvs_selection other = choice;

        other.merge = (enum kv_merge)merge;
        memcpy(scores, odd, sizeof(odd));
        uint32_t n_chosen =
            kvs_select(&chooser, &other, scores, NULL, 4, true, weights, indices, heads);
        assert_in_range(n_chosen, 3, 4);
        for (uint32_t i = 0; i < 4; i++)
            assert_true(isfinite(weights[i]) && weights[i] >= 0);
    }
    /* Where rows are left to a vector, it takes no others, not even for want of numbers. */
    for (uint32_t i = 0; i < 6; i++) {
        scores[i] = NAN;
        among[i] = i >= 2;
    }
    struct kvs_selection one = {
        .merge = KV_MERGE_NONE, .n_queries = 1, .scale = 1, .k = 3, .factor = 1};
    assert_int_equal(
        kvs_select(&chooser, &one, scores, among, 6, false, weights, indices, heads), 3);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(indices[i], 2 + i);
}

/* As few of the heaviest rows as weigh enough, or those that weigh enough each; and of these,
 * `factor` times as many are taken. */
static void how_many(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t n = 1 + (uint32_t)kv_random_below(&dice, 60);
        struct kvs_selection choice = some_choice(n);
        double worst = 0;

        choice.n_queries = 1 + (uint32_t)kv_random_below(&dice, 3);
        choice.selection = round % 2 ? KV_SELECT_MASS : KV_SELECT_THRESHOLD;
        choice.share = (float)(1 + kv_random_below(&dice, 100)) / 100;
        choice.factor = 1 + (uint32_t)kv_random_below(&dice, 3);
        choice.scale = 3;
        floats_fill(&dice, FLOATS_UNIFORM, scores, (size_t)n * choice.n_queries);
        memcpy(lost, scores, (size_t)n * choice.n_queries * sizeof(float));
        uint32_t n_chosen = kvs_select(&chooser, &choice, lost, NULL, n, round % 3 == 0,
                                       weights, indices, heads);

        for (uint32_t group = 0; group < kvs_selection_groups(&choice); group++) {
            double own[60], total = 0, most = 0, sum = 0;
            uint32_t wanted = 0, taken = 0;

            memset(own, 0, sizeof(own));
            for (uint32_t q = 0; q < choice.n_queries; q++) {
                double of_vector = 0;

                if (!kvs_selection_merges(&choice) && q != group)
                    continue;
                for (uint32_t i = 0; i < n; i++)
                    of_vector += exp(3 * (double)scores[(size_t)q * n + i]);
                for (uint32_t i = 0; i < n; i++) {
                    double weight = exp(3 * (double)scores[(size_t)q * n + i]) / of_vector;

                    own[i] =
                        choice.merge == KV_MERGE_SUM ? own[i] + weight : fmax(own[i], weight);
                }
            }
            for (uint32_t i = 0; i < n; i++) {
                total += own[i];
                most = fmax(most, own[i]);
            }
            while (wanted < n) { /* the next heaviest */
                uint32_t at = 0;

                for (uint32_t i = 1; i < n; i++)
                    at = own[i] > own[at] ? i : at;
                const double left = choice.selection == KV_SELECT_MASS
                                        ? (double)choice.share * total - sum
                                        : own[at] - (double)choice.share * most;
                worst = fabs(left) < 1e-4 * total ? 1 : worst; /* too near to tell */
                if (choice.selection == KV_SELECT_MASS ? left <= 0 : left < 0)
                    break;
                sum += own[at];
                own[at] = -1;
                wanted++;
            }
            wanted = wanted < choice.k ? wanted : choice.k;
            for (uint32_t i = 0; i < n_chosen; i++)
                taken += heads[i] >> group & 1;
            const uint32_t takes = kvs_selection_n_candidates(&choice, wanted);
            if (worst == 0) {
                assert_int_equal(chooser.k[group], wanted);
                assert_int_equal(taken, takes < n ? takes : n);
            }
            worst = 0;
        }
    }
}

/* Rows enough for a sample and some slices, and scores that a sample says nothing about: the
 * same rows as all at once. */
static void many(void **state)
{
    enum {
        MANY = 200000
    };
    static float of[2 * MANY], left[2 * MANY], room[KVS_SELECT_CAPACITY * MANY];
    static uint32_t chosen[MANY + KV_TOPK_SPARE], by[MANY];
    static uint32_t wanted[2][MANY + KV_TOPK_SPARE];

    (void)state;
    for (int round = 0; round < 60; round++) {
        const uint32_t n = 1 + (uint32_t)kv_random_below(&dice, MANY);
        const struct kvs_selection choice = {
            .merge = KV_MERGE_NONE,
            .n_queries = 2,
            .scale = 1,
            .k = 1 + (uint32_t)kv_random_below(&dice, round % 4 ? 500 : KV_SELECTED_MAX),
            .factor = 1};
        const uint32_t n_wanted = choice.k < n ? choice.k : n;
        uint32_t at[2] = {0};

        floats_fill(&dice, (enum float_kind)(round % FLOATS_N_KINDS), of, 2 * (size_t)n);
        for (uint32_t i = 0; round % 5 == 0 && n >= MANY / 8 && i < n; i++) {
            const uint32_t each = n / 1024, draw = i / each;

            if (i % each == draw * 5 % each)
                of[i] -= 1e6f;
        }
        memcpy(left, of, 2 * (size_t)n * sizeof(float));
        for (uint32_t q = 0; q < 2; q++)
            assert_int_equal(kv_topk_select(of + (size_t)q * n, n, choice.k, wanted[q], room),
                             n_wanted);
        const uint32_t n_chosen =
            kvs_select(&chooser, &choice, left, NULL, n, round % 2, room, chosen, by);
        for (uint32_t i = 0; i < n_chosen; i++)
            for (uint32_t q = 0; q < 2; q++)
                if (by[i] >> q & 1) {
                    assert_true(at[q] < n_wanted);
                    assert_int_equal(chosen[i], wanted[q][at[q]++]);
                }
        assert_int_equal(at[0], n_wanted);
        assert_int_equal(at[1], n_wanted);
    }
}

/* No slice looks at all of many rows, not even for the largest weight. */
static void slices_are_short(void **state)
{
    enum {
        MANY = 1 << 20,
        SHARE = 64 << 10, /* of a slice */
        STEPS = 5 /* of all rows: exp, merge, the largest, those from there on, the kept */
    };
    static float of[MANY], room[KVS_SELECT_CAPACITY * MANY];
    const float most = 1;
    const struct kvs_selection choice = {.merge = KV_MERGE_SUM,
                                         .selection = KV_SELECT_THRESHOLD,
                                         .n_queries = 1,
                                         .scale = 1,
                                         .share = 0.9f,
                                         .k = 8,
                                         .factor = 1};
    uint32_t n_slices = 1;

    (void)state;
    for (uint32_t i = 0; i < MANY; i++)
        of[i] = (float)(i % 1000) / 999;
    kvs_select_begin(&chooser, &choice, of, &most, NULL, NULL, MANY, false, room);
    while (!kvs_select_piece(&chooser))
        n_slices++;
    assert_true(n_slices >= STEPS * (MANY / SHARE));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each),       cmocka_unit_test(merged),
        cmocka_unit_test(no_numbers), cmocka_unit_test(how_many),
        cmocka_unit_test(many),       cmocka_unit_test(slices_are_short),
    };
    uint64_t seed = floats_seed();

    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
