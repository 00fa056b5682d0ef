/* thread_pool.h - a few threads that do one job at a time together.
 *
 * A job is a function and a number of parts; who is free takes the next part, the caller too.
 * What a part is must follow from its number alone, never from who does it: then results do not
 * depend on how many threads there are.
 *
 * Threads: kvw_thread_pool_run() from one thread at a time, the thread pool's owner; the thread pool's other threads
 * are its own.  They spin for some microseconds after a job, then sleep.  Memory:
 * create/destroy.
 */
#ifndef KV_GPU_WORKER_BASE_THREAD_POOL_H
#define KV_GPU_WORKER_BASE_THREAD_POOL_H

#include "proto/kv_status.h"

enum {
    KVW_THREAD_POOL_THREADS_MAX = 256,
};

struct kvw_thread_pool;

/* `n_threads` counts the caller: 1 makes no thread.  KV_NO_MEMORY, KV_IO. */
kv_status_t kvw_thread_pool_create(unsigned n_threads,
                                   struct kvw_thread_pool **ret_thread_pool);
void kvw_thread_pool_destroy(struct kvw_thread_pool *thread_pool); /* NULL is allowed */

unsigned kvw_thread_pool_threads(const struct kvw_thread_pool *thread_pool);

/* One part; `member` in [0, n_threads) is who does it, for scratch memory. */
typedef void (*kvw_thread_pool_fn)(void *arg, unsigned part, unsigned thread_index);

/* Does the parts 0..n_parts-1, returns when all are done. */
void kvw_thread_pool_run(struct kvw_thread_pool *thread_pool,
                         kvw_thread_pool_fn run,
                         void *arg,
                         unsigned n_parts);

#endif
