/* thread_pool.h: every part once, whoever does it. */
#include "gpu-worker/base/thread_pool.h"
#include "kvserver/base/thread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdatomic.h>
#include <string.h>

enum {
    PARTS_MAX = 1000,
};

struct count {
    unsigned n_members;
    _Atomic int done[PARTS_MAX];
    _Atomic int strangers;
};

static void count_part(void *arg, unsigned part, unsigned member)
{
    struct count *count = arg;

    atomic_fetch_add(&count->done[part], 1);
    if (member >= count->n_members)
        atomic_fetch_add(&count->strangers, 1);
}

static void run_jobs(unsigned n_threads, unsigned n_jobs, unsigned nap_us)
{
    static struct count count;
    struct kvw_thread_pool *crew;

    assert_int_equal(kvw_thread_pool_create(n_threads, &crew), KV_OK);
    assert_int_equal(kvw_thread_pool_threads(crew), n_threads);
    count.n_members = n_threads;
    for (unsigned job = 0; job < n_jobs; job++) {
        const unsigned n_parts = job * 37 % PARTS_MAX;

        memset((void *)count.done, 0, sizeof(count.done));
        kvw_thread_pool_run(crew, count_part, &count, n_parts);
        for (unsigned part = 0; part < PARTS_MAX; part++)
            assert_int_equal(atomic_load(&count.done[part]), part < n_parts);
        if (nap_us > 0)
            kv_sleep_fds(NULL, 0, nap_us);
    }
    assert_int_equal(atomic_load(&count.strangers), 0);
    kvw_thread_pool_destroy(crew);
}

static void test_every_part_once(void **state)
{
    (void)state;
    for (unsigned n_threads = 1; n_threads <= 5; n_threads++)
        run_jobs(n_threads, 300, 0);
}

static void test_members_that_sleep(void **state)
{
    (void)state;
    run_jobs(3, 50, 1000);
}

static void test_sizes(void **state)
{
    struct kvw_thread_pool *crew;

    (void)state;
    assert_int_equal(kvw_thread_pool_create(0, &crew), KV_INVALID);
    assert_int_equal(kvw_thread_pool_create(KVW_THREAD_POOL_THREADS_MAX + 1, &crew),
                     KV_INVALID);
    assert_int_equal(kvw_thread_pool_create(2, &crew), KV_OK);
    kvw_thread_pool_destroy(crew); /* without a job */
    kvw_thread_pool_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_part_once),
        cmocka_unit_test(test_members_that_sleep),
        cmocka_unit_test(test_sizes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
