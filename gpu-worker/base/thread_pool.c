#include "gpu-worker/base/thread_pool.h"

#include "kvserver/base/thread.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    SPINS = 3000, /* about 50 us, longer than the gap between two jobs of a forward pass */
};

struct thread_index {
    struct kvw_thread_pool *thread_pool;
    struct kv_thread *thread;
    unsigned index;
};

/* `turn` packs the job's number (high half) and the number of parts not taken yet (low half)
 * into one atomic.  A thread that is still in the previous job therefore cannot take a part of
 * the next one: its compare-and-swap fails, because the job's number has changed.
 *
 * The release store of `turn` publishes run, arg and n_parts to the threads that acquire it;
 * the release additions to n_done publish the parts' results to the owner. */
struct kvw_thread_pool {
    unsigned n_threads;
    struct thread_index members[KVW_THREAD_POOL_THREADS_MAX];

    /* Written by the owner between jobs. */
    kvw_thread_pool_fn run;
    void *arg;
    unsigned n_parts;

    _Atomic uint64_t turn;
    _Atomic uint32_t job; /* the futex: the job's number */
    _Atomic uint32_t n_done;
    _Atomic uint32_t n_asleep;
    _Atomic int stopping;
};

static void futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Takes and runs parts of one job until none is left. */
static void work(struct kvw_thread_pool *thread_pool, uint32_t job, unsigned thread_index)
{
    uint64_t turn = atomic_load_explicit(&thread_pool->turn, memory_order_acquire);

    while ((uint32_t)(turn >> 32) == job && (uint32_t)turn > 0) {
        /* While this thread has a part, n_done is below n_parts and the owner does not change
         * run, arg and n_parts. */
        if (!atomic_compare_exchange_weak_explicit(&thread_pool->turn, &turn, turn - 1,
                                                   memory_order_acq_rel, memory_order_acquire))
            continue;
        thread_pool->run(thread_pool->arg, thread_pool->n_parts - (uint32_t)turn, thread_index);
        atomic_fetch_add_explicit(&thread_pool->n_done, 1, memory_order_release);
        turn = atomic_load_explicit(&thread_pool->turn, memory_order_acquire);
    }
}

static void thread_main(void *arg)
{
    struct thread_index *self = arg;
    struct kvw_thread_pool *thread_pool = self->thread_pool;
    uint32_t seen = 0;

    while (true) {
        uint32_t job = atomic_load_explicit(&thread_pool->job, memory_order_acquire);

        for (unsigned i = 0; job == seen && i < SPINS; i++) {
            kv_relax();
            job = atomic_load_explicit(&thread_pool->job, memory_order_acquire);
        }
        if (job == seen) {
            /* Both sides are sequentially consistent: this thread increments n_asleep and the
             * futex then reads `job`; the owner stores `job` and then reads n_asleep.  At least
             * one of them sees the other's store, so no wake is lost. */
            atomic_fetch_add(&thread_pool->n_asleep, 1);
            futex_wait(&thread_pool->job, seen);
            atomic_fetch_sub(&thread_pool->n_asleep, 1);
            continue;
        }
        if (atomic_load(&thread_pool->stopping))
            return;
        seen = job;
        work(thread_pool, job, self->index);
    }
}

kv_status_t kvw_thread_pool_create(unsigned n_threads, struct kvw_thread_pool **ret_thread_pool)
{
    struct kvw_thread_pool *thread_pool;
    kv_status_t status = KV_OK;

    if (n_threads == 0 || n_threads > KVW_THREAD_POOL_THREADS_MAX)
        return KV_INVALID;
    thread_pool = calloc(1, sizeof(*thread_pool));
    if (thread_pool == NULL)
        return KV_NO_MEMORY;
    for (thread_pool->n_threads = 1; thread_pool->n_threads < n_threads;
         thread_pool->n_threads++) {
        struct thread_index *thread_index = &thread_pool->members[thread_pool->n_threads];

        *thread_index =
            (struct thread_index){.thread_pool = thread_pool, .index = thread_pool->n_threads};
        status = kv_thread_start("kv-pool", thread_main, thread_index, &thread_index->thread);
        if (status != KV_OK) {
            kvw_thread_pool_destroy(thread_pool);
            return status;
        }
    }
    *ret_thread_pool = thread_pool;
    return KV_OK;
}

void kvw_thread_pool_destroy(struct kvw_thread_pool *thread_pool)
{
    if (thread_pool == NULL)
        return;
    atomic_store(&thread_pool->stopping, 1);
    atomic_fetch_add(&thread_pool->job, 1);
    futex_wake(&thread_pool->job);
    for (unsigned i = 1; i < thread_pool->n_threads; i++)
        kv_thread_join(thread_pool->members[i].thread);
    free(thread_pool);
}

unsigned kvw_thread_pool_threads(const struct kvw_thread_pool *thread_pool)
{
    return thread_pool->n_threads;
}

void kvw_thread_pool_run(struct kvw_thread_pool *thread_pool,
                         kvw_thread_pool_fn run,
                         void *arg,
                         unsigned n_parts)
{
    uint32_t job;

    if (thread_pool->n_threads == 1 || n_parts <= 1) {
        for (unsigned part = 0; part < n_parts; part++)
            run(arg, part, 0);
        return;
    }
    thread_pool->run = run;
    thread_pool->arg = arg;
    thread_pool->n_parts = n_parts;
    atomic_store_explicit(&thread_pool->n_done, 0, memory_order_relaxed);
    job = atomic_load_explicit(&thread_pool->job, memory_order_relaxed) + 1;
    atomic_store_explicit(&thread_pool->turn, (uint64_t)job << 32 | n_parts,
                          memory_order_release);
    atomic_store(&thread_pool->job, job);
    if (atomic_load(&thread_pool->n_asleep) > 0)
        futex_wake(&thread_pool->job);
    work(thread_pool, job, 0);

    unsigned spins = 0;

    while (atomic_load_explicit(&thread_pool->n_done, memory_order_acquire) < n_parts) {
        kv_relax();
        /* A thread that has a part may be waiting for this processor. */
        if (++spins % SPINS == 0)
            syscall(SYS_sched_yield);
    }
}
