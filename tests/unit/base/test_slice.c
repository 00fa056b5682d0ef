/* When a slice is over. */
#include "kvserver/base/slice.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static struct kv_clock virtual;
static uint32_t n_looks;

static uint64_t look(const struct kv_clock *clock)
{
    n_looks++;
    return clock->virtual_us;
}

static int set_up(void **state)
{
    (void)state;
    virtual = (struct kv_clock){.name = "counting", .now_us = look, .virtual_us = 1000};
    n_looks = 0;
    return 0;
}

/* At the first look after KV_SLICE_US, and the clock is read for every n-th piece only. */
static void ends_by_the_clock(void **state)
{
    struct kv_slice slice = kv_slice_begin(&virtual, 8);

    (void)state;
    for (int i = 1; i < 8; i++) {
        virtual.virtual_us += KV_SLICE_US - 1;
        assert_false(kv_slice_over(&slice));
    }
    assert_int_equal(n_looks, 1);
    assert_true(kv_slice_over(&slice));
    assert_int_equal(n_looks, 2);

    slice = kv_slice_begin(&virtual, 1);
    assert_false(kv_slice_over(&slice));
    virtual.virtual_us += KV_SLICE_US - 1;
    assert_false(kv_slice_over(&slice));
    virtual.virtual_us++;
    assert_true(kv_slice_over(&slice));
}

static void ends_by_a_clock_that_stands_still(void **state)
{
    struct kv_slice slice = kv_slice_begin(&virtual, 4);
    uint32_t n = 1;

    (void)state;
    while (!kv_slice_over(&slice))
        n++;
    assert_int_equal(n, 4 * KV_SLICE_LOOKS);

    slice = kv_slice_begin(&virtual, 1);
    for (n = 0; n < 3 * KV_SLICE_LOOKS; n++) { /* it moves now and then */
        virtual.virtual_us += n % (KV_SLICE_LOOKS - 1) == 0;
        assert_false(kv_slice_over(&slice));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(ends_by_the_clock, set_up),
        cmocka_unit_test_setup(ends_by_a_clock_that_stands_still, set_up),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
