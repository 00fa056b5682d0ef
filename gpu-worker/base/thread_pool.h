/* thread_pool.h - a few threads that do one job at a time together.
 *
 * A job is a function and a number of parts; who is free takes the next part, the caller too.
 * What a part is must follow from its number alone, never from who does it: then results do not
 * depend on how many threads there are.
 *
 * Threads: kv_crew_run() from one thread at a time, the crew's owner; the crew's other threads
 * are its own.  They spin for some microseconds after a job, then sleep.  Memory:
 * create/destroy.
 */
#ifndef KV_GPU_WORKER_BASE_THREAD_POOL_H
#define KV_GPU_WORKER_BASE_THREAD_POOL_H

#include "proto/kv_status.h"

enum {
    KV_CREW_THREADS_MAX = 256,
};

struct kv_crew;

/* `n_threads` counts the caller: 1 makes no thread.  KV_NO_MEMORY, KV_IO. */
kv_status_t kv_crew_create(unsigned n_threads, struct kv_crew **ret_crew);
void kv_crew_destroy(struct kv_crew *crew); /* NULL is allowed */

unsigned kv_crew_threads(const struct kv_crew *crew);

/* One part; `member` in [0, n_threads) is who does it, for scratch memory. */
typedef void (*kv_crew_fn)(void *arg, unsigned part, unsigned member);

/* Does the parts 0..n_parts-1, returns when all are done. */
void kv_crew_run(struct kv_crew *crew, kv_crew_fn run, void *arg, unsigned n_parts);

#endif
