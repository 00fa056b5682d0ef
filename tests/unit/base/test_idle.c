/* idle.h: names, and how long one looks after what it has seen. */
#define open      test_open
#define getrusage test_getrusage
#include "kvserver/base/idle.c" /* it opens /proc/loadavg, and asks for its own switches */
#undef open
#undef getrusage

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static const char *loads; /* what the file has; NULL: there is none */

/* As open(), of a file with these bytes. */
int test_open(const char *path, int flags, ...)
{
    int ends[2];

    (void)flags;
    assert_string_equal(path, "/proc/loadavg");
    if (loads == NULL)
        return -1;
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(write(ends[1], loads, strlen(loads)), (ssize_t)strlen(loads));
    close(ends[1]);
    return ends[0];
}

static long n_switches; /* that it has had to bear */

int test_getrusage(__rusage_who_t who, struct rusage *usage)
{
    assert_int_equal(who, RUSAGE_THREAD);
    usage->ru_nivcsw = n_switches;
    return 0;
}

static const char *const crowded = "9.00 8.00 7.00 9999/10000 12345\n";
static const char *const calm = "0.00 0.00 0.00 1/10000 12345\n";

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
    loads = crowded;
    kv_idle_came(&busy, 5000);
    kv_idle_came(&sleeps, 100);
    assert_int_equal(kv_idle_spin_us(&busy, 1000000), UINT64_MAX);
    assert_int_equal(kv_idle_spin_us(&sleeps, 1000000), 0);
}

/* Looks for twice as long as the mean of the last ones; the least time for what takes long. */
static void as_it_learns(void **state)
{
    struct kv_idle idle = {0};

    (void)state;
    loads = calm;
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

/* Where more want to run than there are cores, for some time, nobody looks. */
static void as_others_need(void **state)
{
    struct kv_idle idle = {0};
    uint64_t now_us = 1000000;

    (void)state;
    loads = crowded;
    kv_idle_came(&idle, 400);
    assert_true(kv_idle_spin_us(&idle, now_us) > KV_IDLE_LEAST_US); /* it may pass */
    for (int i = 0; i < 1000; i++)
        (void)kv_idle_spin_us(&idle, now_us); /* not looked at each time */
    assert_true(kv_idle_spin_us(&idle, now_us) > KV_IDLE_LEAST_US);
    for (int i = 0; i < 20; i++)
        (void)kv_idle_spin_us(&idle, now_us += 20000);
    assert_int_equal(kv_idle_spin_us(&idle, now_us), 0);
    loads = calm;
    for (int i = 0; i < 20; i++)
        (void)kv_idle_spin_us(&idle, now_us += 20000);
    assert_true(kv_idle_spin_us(&idle, now_us) > KV_IDLE_LEAST_US);
    /* What cannot be read is no reason to sleep. */
    loads = NULL;
    for (int i = 0; i < 20; i++)
        (void)kv_idle_spin_us(&idle, now_us += 20000);
    assert_true(kv_idle_spin_us(&idle, now_us) > KV_IDLE_LEAST_US);
    /* Whoever has to give way does, whatever the machine says. */
    for (int i = 0; i < 20; i++, n_switches++)
        (void)kv_idle_spin_us(&idle, now_us += 20000);
    assert_int_equal(kv_idle_spin_us(&idle, now_us), 0);
    for (int i = 0; i < 20; i++)
        (void)kv_idle_spin_us(&idle, now_us += 20000);
    assert_true(kv_idle_spin_us(&idle, now_us) > KV_IDLE_LEAST_US);
    loads = "nonsense";
    for (int i = 0; i < 20; i++)
        (void)kv_idle_spin_us(&idle, now_us += 20000);
    assert_true(kv_idle_spin_us(&idle, now_us) > KV_IDLE_LEAST_US);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names),
        cmocka_unit_test(as_told),
        cmocka_unit_test(as_it_learns),
        cmocka_unit_test(as_others_need),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
