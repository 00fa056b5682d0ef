#include "kvserver/base/progress.h"

#include "kvserver/base/thread.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>

enum {
    PAUSE_MIN_US = 100, /* between two looks for the user; doubles as long as he comes */
    PAUSE_MAX_US = 4000,
};

struct kv_progress {
    kv_progress_step_fn step;
    void *arg;
    struct kv_thread *thread;
    struct kv_lock *lock;
    struct kv_signal *signal; /* ends any sleep of the thread */

    /* With the lock. */
    unsigned depth; /* of enters, and of a step */
    bool sleeps;    /* as a step has said, and nobody has entered since */
    bool must_stop;

    /* Written with the lock. */
    _Atomic uint64_t visits; /* the user's enters and leaves: odd while he is inside */
    _Atomic uint64_t moves;  /* kv_progress_moved() */
    atomic_bool is_handed_over;
    atomic_uint n_waiting; /* users, for the lock */
};

static void take(struct kv_progress *progress)
{
    if (kv_lock_try(progress->lock))
        return;
    /* The thread releases the lock between two steps, but might have it again before this one
     * is awake. */
    atomic_fetch_add(&progress->n_waiting, 1);
    kv_lock_take(progress->lock);
    atomic_fetch_sub(&progress->n_waiting, 1);
}

void kv_progress_enter(struct kv_progress *progress)
{
    take(progress);
    if (progress->depth++ > 0)
        return;
    atomic_fetch_add(&progress->visits, 1);
    if (progress->sleeps) {
        progress->sleeps = false;
        kv_signal_raise(progress->signal);
    }
}

void kv_progress_leave(struct kv_progress *progress)
{
    assert(progress->depth > 0);
    if (--progress->depth == 0)
        atomic_fetch_add(&progress->visits, 1);
    kv_lock_release(progress->lock);
}

void kv_progress_look(struct kv_progress *progress)
{
    take(progress);
}

void kv_progress_look_away(struct kv_progress *progress)
{
    kv_lock_release(progress->lock);
}

void kv_progress_moved(struct kv_progress *progress)
{
    atomic_fetch_add(&progress->moves, 1);
}

void kv_progress_hand_over(struct kv_progress *progress)
{
    if (progress->sleeps)
        return;
    atomic_store(&progress->is_handed_over, true);
    kv_signal_raise(progress->signal);
}

/* What has raised the signal is looked at after this. */
static void
sleep_on(const struct kv_progress *progress, int fds[KV_PROGRESS_FDS + 1], uint64_t wait_us)
{
    fds[KV_PROGRESS_FDS] = kv_signal_fd(progress->signal);
    (void)kv_sleep_fds(fds, KV_PROGRESS_FDS + 1, wait_us);
    kv_signal_clear(progress->signal);
}

static void pause_for(const struct kv_progress *progress, uint64_t pause_us)
{
    int fds[KV_PROGRESS_FDS + 1] = {-1, -1};

    sleep_on(progress, fds, pause_us);
}

/* Returns when the user has not come between two looks, or only to begin things, or has handed
 * over. */
static void wait_until_alone(struct kv_progress *progress, uint64_t *seen)
{
    uint64_t pause_us = PAUSE_MIN_US, moves_before = atomic_load(&progress->moves);

    for (;;) {
        const uint64_t visits = atomic_load(&progress->visits);
        const uint64_t moves = atomic_load(&progress->moves);
        const bool is_same = visits == *seen, is_inside = visits % 2 == 1;
        const bool is_unmoved = moves == moves_before && pause_us == PAUSE_MAX_US;

        *seen = visits;
        moves_before = moves;
        if (!is_inside && atomic_exchange(&progress->is_handed_over, false))
            return;
        if ((is_same || is_unmoved) && !is_inside && atomic_load(&progress->n_waiting) == 0)
            return;
        if (is_same && is_inside && pause_us == PAUSE_MAX_US) {
            /* He waits in there, maybe for hours: his leave ends this. */
            kv_lock_take(progress->lock);
            kv_lock_release(progress->lock);
            pause_us = PAUSE_MIN_US;
        }
        pause_for(progress, pause_us);
        pause_us = 2 * pause_us < PAUSE_MAX_US ? 2 * pause_us : PAUSE_MAX_US;
    }
}

static void run(void *arg)
{
    struct kv_progress *progress = arg;
    uint64_t seen = 0;

    for (;;) {
        int fds[KV_PROGRESS_FDS + 1] = {-1, -1};
        uint64_t wait_us = 0;
        bool sleeps, must_stop;

        wait_until_alone(progress, &seen);
        kv_lock_take(progress->lock);
        must_stop = progress->must_stop;
        progress->depth++;
        sleeps = !must_stop && progress->step(progress->arg, fds, &wait_us);
        progress->depth--;
        progress->sleeps = sleeps;
        kv_lock_release(progress->lock);
        if (must_stop)
            return;
        if (sleeps)
            sleep_on(progress, fds, wait_us);
    }
}

static void destroy(struct kv_progress *progress)
{
    kv_signal_destroy(progress->signal);
    kv_lock_destroy(progress->lock);
    free(progress);
}

kv_status_t kv_progress_start(const char *name,
                              kv_progress_step_fn step,
                              void *arg,
                              struct kv_progress **ret_progress)
{
    struct kv_progress *progress = calloc(1, sizeof(*progress));
    kv_status_t status;

    if (progress == NULL)
        return KV_NO_MEMORY;
    progress->step = step;
    progress->arg = arg;
    progress->lock = kv_lock_create_nested();
    progress->signal = kv_signal_create();
    if (progress->lock == NULL || progress->signal == NULL) {
        destroy(progress);
        return KV_IO;
    }
    /* The first step may enter, by what the caller has been returned. */
    kv_lock_take(progress->lock);
    status = kv_thread_start(name, run, progress, &progress->thread);
    if (status == KV_OK)
        *ret_progress = progress;
    kv_lock_release(progress->lock);
    if (status != KV_OK)
        destroy(progress);
    return status;
}

void kv_progress_stop(struct kv_progress *progress)
{
    if (progress == NULL)
        return;
    kv_lock_take(progress->lock);
    assert(progress->depth == 0);
    progress->must_stop = true;
    atomic_store(&progress->is_handed_over, true);
    kv_lock_release(progress->lock);
    kv_signal_raise(progress->signal);
    kv_thread_join(progress->thread);
    destroy(progress);
}
