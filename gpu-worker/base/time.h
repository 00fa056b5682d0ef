/* time.h - the monotonic clock in the worker's units.
 *
 * Threads: any.
 */
#ifndef KV_GPU_WORKER_BASE_TIME_H
#define KV_GPU_WORKER_BASE_TIME_H

#include "kvserver/base/clock.h"

static inline uint64_t kvw_now_us(void)
{
    return kv_clock_now(&kv_clock_real);
}

static inline double kvw_seconds_since(uint64_t begin_us)
{
    return (double)(kvw_now_us() - begin_us) / 1e6;
}

#endif
