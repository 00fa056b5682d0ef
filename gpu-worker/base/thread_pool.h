/* thread_pool.h - a fixed set of threads that run one job at a time.
 *
 * A job is a function and a number of parts; each free thread, the caller included, takes the
 * next part.  A part's work must depend on its number alone, never on the thread that runs it:
 * then results do not depend on the number of threads.
 *
 * Threads: kvw_thread_pool_run() from one thread at a time, the owner.  The other threads
 * belong to the pool; they spin for some microseconds after a job, then sleep.  Memory:
 * create/destroy.
 */
#ifndef KV_GPU_WORKER_BASE_THREAD_POOL_H
#define KV_GPU_WORKER_BASE_THREAD_POOL_H

#include "proto/kv_status.h"

enum {
    KVW_THREAD_POOL_THREADS_MAX = 256,
};

struct kvw_thread_pool;

/* `n_threads` includes the caller: 1 starts no thread.  Fails with KV_NO_MEMORY or KV_IO. */
kv_status_t kvw_thread_pool_create(unsigned n_threads,
                                   struct kvw_thread_pool **ret_thread_pool);
void kvw_thread_pool_destroy(struct kvw_thread_pool *thread_pool); /* NULL is allowed */

unsigned kvw_thread_pool_threads(const struct kvw_thread_pool *thread_pool);

/* Runs one part; `member` in [0, n_threads) is the thread's index, for scratch memory. */
typedef void (*kvw_thread_pool_fn)(void *arg, unsigned part, unsigned thread_index);

/* Runs the parts 0..n_parts-1; returns when all are done. */
void kvw_thread_pool_run(struct kvw_thread_pool *thread_pool,
                         kvw_thread_pool_fn run,
                         void *arg,
                         unsigned n_parts);

#endif
