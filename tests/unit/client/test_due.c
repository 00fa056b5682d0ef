/* Whatever is set, moved and taken out, the first one is the earliest, and the rest is not looked
 * at. */
#include "client/due.h"
#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

enum {
    N = 10000,
    N_FEW = 40,
    N_STEPS = 20000,
    N_DEEP = 1000000,
};

struct thing {
    int number;
    struct kvc_due due;
};

static struct thing things[N];
static struct kvc_due deep[N_DEEP];

static uint64_t earliest(unsigned n)
{
    uint64_t first_us = KVC_NEVER;

    for (unsigned i = 0; i < n; i++)
        if (things[i].due.at_us < first_us)
            first_us = things[i].due.at_us;
    return first_us;
}

static void the_earliest_is_first(void **state)
{
    struct kvc_dues dues = {0};
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 4711);
    for (unsigned i = 0; i < N_FEW; i++)
        kvc_due_init(&things[i].due);
    assert_true(kvc_dues_first_us(&dues) == KVC_NEVER);
    for (unsigned i = 0; i < N_STEPS; i++) {
        struct kvc_due *due = &things[kv_random_below(&random, N_FEW)].due;
        const bool goes = kv_random_below(&random, 3) == 0;
        const uint64_t at_us = goes ? KVC_NEVER : kv_random_below(&random, 100);
        size_t n = 0;

        kvc_due_set(&dues, due, at_us);
        assert_true(due->at_us == at_us);
        for (unsigned j = 0; j < N_FEW; j++)
            n += things[j].due.at_us != KVC_NEVER;
        assert_int_equal(kvc_dues_check(&dues), n);
        assert_true(kvc_dues_first_us(&dues) == earliest(N_FEW));
        if (dues.first != NULL)
            assert_in_range(KVC_DUE_ENTRY(dues.first, struct thing, due) - things, 0,
                            N_FEW - 1);
    }
}

/* Each of N is due once in each round, and is then set to the next one. */
static void only_what_is_due_costs(void **state)
{
    enum {
        ROUNDS = 5,
        LOG = 14, /* of N, to base 2 */
    };
    struct kvc_dues dues = {0};
    struct kv_random random;
    uint64_t n_due = 0;

    (void)state;
    kv_random_init(&random, 4712);
    for (unsigned i = 0; i < N; i++) {
        kvc_due_init(&things[i].due);
        kvc_due_set(&dues, &things[i].due, kv_random_below(&random, N));
    }
    dues.n_looks = 0;
    for (uint64_t now_us = 0; now_us < (uint64_t)ROUNDS * N; now_us++)
        while (kvc_dues_first_us(&dues) <= now_us) {
            kvc_due_set(&dues, dues.first, dues.first->at_us + N);
            n_due++;
        }
    assert_int_equal(n_due, (uint64_t)ROUNDS * N);
    assert_int_equal(kvc_dues_check(&dues), N);
    print_message("%.1f looks at others for each that was due\n",
                  (double)dues.n_looks / (double)n_due);
    assert_true(dues.n_looks < 2 * LOG * n_due);

    dues.n_looks = 0;
    for (unsigned i = 0; i < N_STEPS; i++)
        assert_true(kvc_dues_first_us(&dues) >= (uint64_t)ROUNDS * N);
    assert_int_equal(dues.n_looks, 0);
}

/* Each is due before those that were set earlier, so it becomes the parent of the last. */
static void a_deep_heap_is_checked(void **state)
{
    struct kvc_dues dues = {0};

    (void)state;
    for (unsigned i = 0; i < N_DEEP; i++) {
        kvc_due_init(&deep[i]);
        kvc_due_set(&dues, &deep[i], N_DEEP - i);
    }
    assert_int_equal(kvc_dues_check(&dues), N_DEEP);
    while (dues.first != NULL)
        kvc_due_set(&dues, dues.first, KVC_NEVER);
    assert_int_equal(kvc_dues_check(&dues), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_earliest_is_first),
        cmocka_unit_test(only_what_is_due_costs),
        cmocka_unit_test(a_deep_heap_is_checked),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
