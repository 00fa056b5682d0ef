/* thread_pool.h - a fixed set of threads that run one job at a time.
 *
 * A job is a function and a number of parts; each free thread, the caller included, takes the
 * next part.  The result of a part must depend on its number only, never on the thread that
 * runs it.  Then the results of a job do not depend on the number of threads.
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

/* Creates a pool of n_threads threads, 1..KVW_THREAD_POOL_THREADS_MAX, the caller included: 1
 * starts no thread.  Fails with KV_INVALID, KV_NO_MEMORY or KV_IO. */
kv_status_t kvw_thread_pool_create(unsigned n_threads,
                                   struct kvw_thread_pool **ret_thread_pool);
void kvw_thread_pool_destroy(struct kvw_thread_pool *thread_pool); /* NULL is allowed */

unsigned kvw_thread_pool_threads(const struct kvw_thread_pool *thread_pool);

/* Runs one part.  thread_index, in [0, n_threads), selects the thread's scratch memory. */
typedef void (*kvw_thread_pool_fn)(void *arg, unsigned part, unsigned thread_index);

/* Runs parts 0..n_parts - 1, and returns when all are done. */
void kvw_thread_pool_run(struct kvw_thread_pool *thread_pool,
                         kvw_thread_pool_fn run,
                         void *arg,
                         unsigned n_parts);

#endif
