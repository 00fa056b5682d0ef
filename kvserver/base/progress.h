/* progress.h - a thread that moves something on while its user is elsewhere.
 *
 *   user                                     thread
 *   kv_progress_enter()                      looks now and then whether the user still comes
 *     uses it, waits in it: moves it on
 *   kv_progress_leave()
 *   computes                                 has not seen the user for a while:
 *                                              step(), then sleeps on what step() names
 *   kv_progress_enter() --- wakes it --->    looks now and then ...
 *
 * There is one lock.  The user has it for as long as he is inside, also while he waits there:
 * who waits moves it on himself, so a wait never costs a handover between threads.  As long
 * as the user comes and goes, the thread neither runs steps nor sleeps on descriptors;
 * otherwise every answer would wake it beside the user.  It takes over 0.1 ms after one
 * visit, and 8 ms at most after many: about as long after the last one as they have gone on.
 * If the user comes and goes without doing what a step does, the thread does that in between.
 *
 * Enters nest.  Step may enter, too.
 *
 * Threads: one user at a time, whichever thread that is; all but kv_progress_stop() also from
 * inside step().  Memory: kv_progress_start() / kv_progress_stop().
 */
#ifndef KV_KVSERVER_BASE_PROGRESS_H
#define KV_KVSERVER_BASE_PROGRESS_H

#include "proto/kv_status.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    KV_PROGRESS_FDS = 2, /* that a step can name */
};

struct kv_progress;

/* Does what there is to do, with the lock, and returns false if there may be more.  True: the
 * thread may sleep, for *ret_wait_us at most, until one of ret_fds is readable (-1: none) or
 * the user enters.
 *   ret_fds  (KV_PROGRESS_FDS) */
typedef bool (*kv_progress_step_fn)(void *arg, int *ret_fds, uint64_t *ret_wait_us);

/* Starts the thread; `name` is shown by ps.  Fails with KV_NO_MEMORY, and with KV_IO if the
 * system has no more threads or descriptors. */
kv_status_t kv_progress_start(const char *name,
                              kv_progress_step_fn step,
                              void *arg,
                              struct kv_progress **ret_progress);
/* Waits for a step that runs.  The user is not inside.  `progress` may be NULL. */
void kv_progress_stop(struct kv_progress *progress);

/* Takes the lock, to do something by which the next step may have more to do. */
void kv_progress_enter(struct kv_progress *progress);
void kv_progress_leave(struct kv_progress *progress);

/* Takes the lock, to do nothing of that kind: the thread does not notice. */
void kv_progress_look(struct kv_progress *progress);
void kv_progress_look_away(struct kv_progress *progress);

/* The user has done what a step does.  One who comes again and again without it, only to begin
 * things, finds that steps do it, every 10 ms or so.  With the lock. */
void kv_progress_moved(struct kv_progress *progress);

/* The user will not come again before he is told: the thread takes over at once.  With the
 * lock. */
void kv_progress_hand_over(struct kv_progress *progress);

#endif
