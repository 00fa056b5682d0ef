#include "gpu-worker/base/thread_pool.h"

#include "kvserver/base/thread.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    SPINS = 3000, /* some 50 us: the gap between two jobs of a forward pass */
};

struct member {
    struct kv_crew *crew;
    struct kv_thread *thread;
    unsigned index;
};

/* `turn` packs the job's number (high half) with the parts that nobody has taken (low half), so
 * that a member who comes late from one job cannot take a part of the next without seeing it.
 */
struct kv_crew {
    unsigned n_threads;
    struct member members[KV_CREW_THREADS_MAX];

    /* Written by the owner between jobs. */
    kv_crew_fn run;
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

/* Does parts of one job until none is left. */
static void work(struct kv_crew *crew, uint32_t job, unsigned member)
{
    uint64_t turn = atomic_load_explicit(&crew->turn, memory_order_acquire);

    while ((uint32_t)(turn >> 32) == job && (uint32_t)turn > 0) {
        /* A part taken keeps the job from ending: its fields hold until n_done counts it. */
        if (!atomic_compare_exchange_weak_explicit(&crew->turn, &turn, turn - 1,
                                                   memory_order_acq_rel, memory_order_acquire))
            continue;
        crew->run(crew->arg, crew->n_parts - (uint32_t)turn, member);
        atomic_fetch_add_explicit(&crew->n_done, 1, memory_order_release);
        turn = atomic_load_explicit(&crew->turn, memory_order_acquire);
    }
}

static void member_main(void *arg)
{
    struct member *self = arg;
    struct kv_crew *crew = self->crew;
    uint32_t seen = 0;

    while (true) {
        uint32_t job = atomic_load_explicit(&crew->job, memory_order_acquire);

        for (unsigned i = 0; job == seen && i < SPINS; i++) {
            kv_relax();
            job = atomic_load_explicit(&crew->job, memory_order_acquire);
        }
        if (job == seen) {
            /* Sequentially consistent with the owner's store of `job` and load of n_asleep: one
             * of the two sees the other. */
            atomic_fetch_add(&crew->n_asleep, 1);
            futex_wait(&crew->job, seen);
            atomic_fetch_sub(&crew->n_asleep, 1);
            continue;
        }
        if (atomic_load(&crew->stopping))
            return;
        seen = job;
        work(crew, job, self->index);
    }
}

kv_status_t kv_crew_create(unsigned n_threads, struct kv_crew **ret_crew)
{
    struct kv_crew *crew;
    kv_status_t status = KV_OK;

    if (n_threads == 0 || n_threads > KV_CREW_THREADS_MAX)
        return KV_INVALID;
    crew = calloc(1, sizeof(*crew));
    if (crew == NULL)
        return KV_NO_MEMORY;
    for (crew->n_threads = 1; crew->n_threads < n_threads; crew->n_threads++) {
        struct member *member = &crew->members[crew->n_threads];

        *member = (struct member){.crew = crew, .index = crew->n_threads};
        status = kv_thread_start("kv-crew", member_main, member, &member->thread);
        if (status != KV_OK) {
            kv_crew_destroy(crew);
            return status;
        }
    }
    *ret_crew = crew;
    return KV_OK;
}

void kv_crew_destroy(struct kv_crew *crew)
{
    if (crew == NULL)
        return;
    atomic_store(&crew->stopping, 1);
    atomic_fetch_add(&crew->job, 1);
    futex_wake(&crew->job);
    for (unsigned i = 1; i < crew->n_threads; i++)
        kv_thread_join(crew->members[i].thread);
    free(crew);
}

unsigned kv_crew_threads(const struct kv_crew *crew)
{
    return crew->n_threads;
}

void kv_crew_run(struct kv_crew *crew, kv_crew_fn run, void *arg, unsigned n_parts)
{
    uint32_t job;

    if (crew->n_threads == 1 || n_parts <= 1) {
        for (unsigned part = 0; part < n_parts; part++)
            run(arg, part, 0);
        return;
    }
    crew->run = run;
    crew->arg = arg;
    crew->n_parts = n_parts;
    atomic_store_explicit(&crew->n_done, 0, memory_order_relaxed);
    job = atomic_load_explicit(&crew->job, memory_order_relaxed) + 1;
    atomic_store_explicit(&crew->turn, (uint64_t)job << 32 | n_parts, memory_order_release);
    atomic_store(&crew->job, job);
    if (atomic_load(&crew->n_asleep) > 0)
        futex_wake(&crew->job);
    work(crew, job, 0);

    unsigned spins = 0;

    while (atomic_load_explicit(&crew->n_done, memory_order_acquire) < n_parts) {
        kv_relax();
        /* Somebody with a part may wait for this very processor. */
        if (++spins % SPINS == 0)
            syscall(SYS_sched_yield);
    }
}
