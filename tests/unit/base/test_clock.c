/* The real clock goes on and never back; a virtual one stands until it is turned. */
#include "kvserver/base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static void real_goes_on(void **state)
{
    uint64_t begin = kv_clock_now(&kv_clock_real), last = begin;

    (void)state;
    assert_string_equal(kv_clock_real.name, "real");
    while (last < begin + 2000) {
        uint64_t now = kv_clock_now(&kv_clock_real);

        assert_true(now >= last);
        last = now;
    }
}

static void virtual_stands(void **state)
{
    struct kv_clock clock;

    (void)state;
    kv_clock_virtual_init(&clock, 123);
    assert_int_equal(kv_clock_now(&clock), 123);
    assert_int_equal(kv_clock_now(&clock), 123);
    clock.virtual_us += 1000;
    assert_int_equal(kv_clock_now(&clock), 1123);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(real_goes_on),
        cmocka_unit_test(virtual_stands),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
