/* idle.h: names, and how long one looks after what it has seen. */
#define open test_open
#include "kvserver/base/idle.c" /* it asks the system how long it has waited */
#undef open

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static uint64_t waited_us; /* for a core */
static bool is_told;       /* by the system */

/* As open(), of the file that says so. */
int test_open(const char *path, int flags, ...)
{
    char text[64];
    int ends[2];

    (void)flags;
    assert_string_equal(path, "/proc/thread-self/schedstat");
    if (!is_told)
        return -1;
    snprintf(text, sizeof(text), "123456789 %llu000 42\n", (unsigned long long)waited_us);
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(write(ends[1], text, strlen(text)), (ssize_t)strlen(text));
    close(ends[1]);
    return ends[0];
}

/* Looks n times, every 20 ms, after waits of `us` for a core.  Returns for how long it would look at
 * last. */
static uint64_t after(struct kv_idle *idle, uint64_t *now_us, int n, uint64_t us)
{
    uint64_t spin_us = 0;

    for (int i = 0; i < n; i++) {
        waited_us += us;
        spin_us = kv_idle_spin_us(idle, *now_us += 20000);
    }
    return spin_us;
}

static void names(void **state)
{
    enum kv_idle_mode mode;

    (void)state;
    assert_true(kv_idle_find(NULL, &mode) && mode == KV_IDLE_ADAPTIVE);
    assert_true(kv_idle_find("", &mode) && mode == KV_IDLE_ADAPTIVE);
    assert_true(kv_idle_find("adaptive", &mode) && mode == KV_IDLE_ADAPTIVE);
    assert_true(kv_idle_find("busy", &mode) && mode == KV_IDLE_BUSY);
    assert_true(kv_idle_find("sleep", &mode) && mode == KV_IDLE_SLEEP);
    assert_false(kv_idle_find("slee", &mode));
}

static void as_told(void **state)
{
    struct kv_idle busy = {.mode = KV_IDLE_BUSY}, sleeps = {.mode = KV_IDLE_SLEEP};

    (void)state;
    is_told = true;
    waited_us += 1000000;
    kv_idle_came(&busy, 5000);
    kv_idle_came(&sleeps, 100);
    assert_int_equal(kv_idle_spin_us(&busy, 1000000), UINT64_MAX);
    assert_int_equal(kv_idle_spin_us(&sleeps, 1000000), 0);
}

/* Where control groups grant less than a core to each who would look, nobody does. */
static void as_granted(void **state)
{
    (void)state;
    assert_int_equal(kv_idle_within(KV_IDLE_ADAPTIVE, 2, 1.9), KV_IDLE_SLEEP);
    assert_int_equal(kv_idle_within(KV_IDLE_ADAPTIVE, 2, 2), KV_IDLE_ADAPTIVE);
    assert_int_equal(kv_idle_within(KV_IDLE_ADAPTIVE, 1, 0.5), KV_IDLE_SLEEP);
    assert_int_equal(kv_idle_within(KV_IDLE_ADAPTIVE, 64, 0), KV_IDLE_ADAPTIVE);
    assert_int_equal(kv_idle_within(KV_IDLE_BUSY, 2, 0.5), KV_IDLE_BUSY);
    assert_int_equal(kv_idle_within(KV_IDLE_SLEEP, 2, 8), KV_IDLE_SLEEP);
}

/* Looks for twice as long as the mean of the last ones; the least time for what takes long. */
static void as_it_learns(void **state)
{
    struct kv_idle idle = {0};

    (void)state;
    assert_int_equal(kv_idle_spin_us(&idle, 1), KV_IDLE_LEAST_US);
    kv_idle_came(&idle, 400);
    assert_in_range(kv_idle_spin_us(&idle, 2), 2 * 400 + KV_IDLE_LEAST_US, 860);
    for (int i = 0; i < 100; i++)
        kv_idle_came(&idle, 100);
    assert_in_range(kv_idle_spin_us(&idle, 3), 2 * 100 + KV_IDLE_LEAST_US, 270);
    /* A pause is one of many; after some of them, none is expected soon. */
    kv_idle_came(&idle, 60000000);
    assert_int_equal(kv_idle_spin_us(&idle, 4), KV_IDLE_LEAST_US);
    for (int i = 0; i < 30; i++)
        kv_idle_came(&idle, 100);
    assert_true(kv_idle_spin_us(&idle, 5) > KV_IDLE_LEAST_US);
    for (int i = 0; i < 30; i++)
        kv_idle_came(&idle, 1500);
    assert_int_equal(kv_idle_spin_us(&idle, 6), KV_IDLE_LEAST_US);
}

/* Whoever waits for a core for long, and not for once, does not look. */
static void as_others_need(void **state)
{
    struct kv_idle idle = {0};
    uint64_t now_us = 1000000;

    (void)state;
    is_told = true;
    kv_idle_came(&idle, 400);
    assert_true(after(&idle, &now_us, 2, 10000) > KV_IDLE_LEAST_US); /* it may pass */
    for (int i = 0; i < 1000; i++, waited_us += 10000)
        (void)kv_idle_spin_us(&idle, now_us); /* not looked at each time */
    assert_true(kv_idle_spin_us(&idle, now_us) > KV_IDLE_LEAST_US);
    assert_int_equal(after(&idle, &now_us, 20, 10000), 0);
    assert_true(after(&idle, &now_us, 20, 0) > KV_IDLE_LEAST_US);
    /* Two of 20 ms are little, every now and then. */
    assert_true(after(&idle, &now_us, 50, 2000) > KV_IDLE_LEAST_US);
    /* Others that come and go, too: as often as not. */
    for (int i = 0; i < 50; i++) {
        (void)after(&idle, &now_us, 1, 10000);
        assert_true(after(&idle, &now_us, 2, 0) > KV_IDLE_LEAST_US);
    }
    assert_int_equal(after(&idle, &now_us, 20, 3000), 0);
    /* What cannot be read is no reason to sleep, nor what was not known before. */
    is_told = false;
    assert_true(after(&idle, &now_us, 20, 10000) > KV_IDLE_LEAST_US);
    is_told = true;
    assert_true(after(&idle, &now_us, 1, 10000) > KV_IDLE_LEAST_US);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names),          cmocka_unit_test(as_told),
        cmocka_unit_test(as_granted),     cmocka_unit_test(as_it_learns),
        cmocka_unit_test(as_others_need),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
