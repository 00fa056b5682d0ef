/* thread.h - threads, locks and sleeping: the only user of pthread and poll.
 *
 * Threads: each function says which may call it.  Memory: kv_thread_start() / kv_thread_join().
 */
#ifndef KV_KVSERVER_BASE_THREAD_H
#define KV_KVSERVER_BASE_THREAD_H

#include "proto/kv_status.h"

#include <stdbool.h>
#include <stdint.h>

struct kv_thread;

typedef void (*kv_thread_fn)(void *arg);

/* Starts a thread.  `name` is shown by ps, at most 15 characters.  Fails with KV_IO if the
 * system refuses another thread. */
kv_status_t
kv_thread_start(const char *name, kv_thread_fn run, void *arg, struct kv_thread **ret_thread);
void kv_thread_join(struct kv_thread *thread); /* waits, then frees; `thread` may be NULL */

/* Returns the number of processors that this process may use. */
unsigned kv_thread_cores(void);

/* A file descriptor that one side signals and the other waits on. */
struct kv_signal;
struct kv_signal *kv_signal_create(void); /* NULL: no descriptor available */
void kv_signal_destroy(struct kv_signal *signal);
void kv_signal_raise(struct kv_signal *signal); /* any thread, any number of times */
void kv_signal_clear(struct kv_signal *signal); /* before checking what was signaled */
int kv_signal_fd(const struct kv_signal *signal);

/* Sleeps until one of the descriptors is readable or timeout_us has passed.  n_fds <= 8, a
 * negative descriptor is skipped.  Returns true if one is readable. */
bool kv_sleep_fds(const int *fds, unsigned n_fds, uint64_t timeout_us);

/* A descriptor that is readable while one of some others is: for a loop that takes one. */
struct kv_watch;
struct kv_watch *kv_watch_create(void); /* NULL: no descriptor available */
void kv_watch_destroy(struct kv_watch *watch);
/* One that is there already is there once.  Returns false if the system refuses it. */
bool kv_watch_add(struct kv_watch *watch, int fd);
int kv_watch_fd(const struct kv_watch *watch);

/* Tells the processor that this is a spin loop. */
static inline void kv_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* A lock for what threads share outside the data path. */
struct kv_lock;
struct kv_lock *kv_lock_create(void); /* NULL: out of memory */
/* One that the thread that has it may take again; it then releases it as often. */
struct kv_lock *kv_lock_create_nested(void);
void kv_lock_destroy(struct kv_lock *lock);
void kv_lock_take(struct kv_lock *lock);
bool kv_lock_try(struct kv_lock *lock); /* false: another thread has it */
void kv_lock_release(struct kv_lock *lock);

#endif
