/* Threads run and are joined, locks keep a plain counter right, signals wake a sleeper and are
 * not lost, sleeps end in time. */
#include "kvserver/base/clock.h"
#include "kvserver/base/thread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include <cmocka.h>

struct shared {
    struct kv_lock *lock;
    struct kv_signal *signal;
    unsigned counter;
};

static void count(void *arg)
{
    struct shared *shared = arg;

    for (int i = 0; i < 20000; i++) {
        kv_lock_take(shared->lock);
        shared->counter++;
        kv_lock_release(shared->lock);
    }
}

static void locks(void **state)
{
    enum {
        THREADS = 4
    };
    struct shared shared = {.lock = kv_lock_create()};
    struct kv_thread *threads[THREADS];

    (void)state;
    assert_non_null(shared.lock);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(
            kv_thread_start("a name longer than fifteen", count, &shared, &threads[i]), KV_OK);
    for (int i = 0; i < THREADS; i++)
        kv_thread_join(threads[i]);
    assert_int_equal(shared.counter, THREADS * 20000);
    kv_lock_destroy(shared.lock);
    kv_thread_join(NULL);
    kv_lock_destroy(NULL);
    kv_signal_destroy(NULL);
    assert_true(kv_thread_cores() >= 1);
}

static void raise_later(void *arg)
{
    struct shared *shared = arg;

    kv_sleep_fds(NULL, 0, 20 * 1000);
    kv_lock_take(shared->lock);
    shared->counter = 1;
    kv_lock_release(shared->lock);
    kv_signal_raise(shared->signal);
}

static void signals(void **state)
{
    struct shared shared = {.lock = kv_lock_create(), .signal = kv_signal_create()};
    struct kv_thread *thread;
    int fds[8] = {-1, -1, -1, -1, -1, -1, -1, -1};

    (void)state;
    assert_non_null(shared.lock);
    assert_non_null(shared.signal);
    fds[5] = kv_signal_fd(shared.signal);
    assert_false(kv_sleep_fds(fds, 8, 0));
    for (int i = 0; i < 1000; i++)
        kv_signal_raise(shared.signal);
    assert_true(kv_sleep_fds(fds, 8, 60 * 1000 * 1000));
    assert_true(kv_sleep_fds(fds, 8, 0)); /* until it is cleared */
    kv_signal_clear(shared.signal);
    assert_false(kv_sleep_fds(fds, 8, 0));
    kv_signal_clear(shared.signal); /* does not wait */

    assert_int_equal(kv_thread_start("raise", raise_later, &shared, &thread), KV_OK);
    assert_true(kv_sleep_fds(fds, 8, UINT64_MAX));
    kv_lock_take(shared.lock);
    assert_int_equal(shared.counter, 1);
    kv_lock_release(shared.lock);
    kv_thread_join(thread);
    kv_signal_destroy(shared.signal);
    kv_lock_destroy(shared.lock);
}

static void sleeps_end(void **state)
{
    uint64_t begin = kv_clock_now(&kv_clock_real);

    (void)state;
    assert_false(kv_sleep_fds(NULL, 0, 3000));
    assert_true(kv_clock_now(&kv_clock_real) - begin >= 3000);
}

static void closed_peer_is_readable(void **state)
{
    int fds[2];

    (void)state;
    assert_int_equal(pipe(fds), 0);
    assert_false(kv_sleep_fds(fds, 1, 0));
    close(fds[1]);
    assert_true(kv_sleep_fds(fds, 1, 60 * 1000 * 1000));
    close(fds[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(locks),
        cmocka_unit_test(signals),
        cmocka_unit_test(sleeps_end),
        cmocka_unit_test(closed_peer_is_readable),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
