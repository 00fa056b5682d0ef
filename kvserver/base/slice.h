/* slice.h - a slice of work: how long a thread that others wait for goes on with one thing.
 *
 *     struct kv_slice slice = kv_slice_begin(clock, every);
 *     do { one unit of work } while (there is more && !kv_slice_over(&slice));
 *
 * A slice is over at the first look at the clock after KV_SLICE_US, so it lasts as long as the
 * work between two looks longer: it is for the caller to choose units of some microseconds at
 * most, or to look only after `every` units of less.  If the clock stands still, as a
 * simulation's does, it is over after KV_SLICE_LOOKS.
 *
 * Threads: the caller's.  Memory: the caller's.
 */
#ifndef KV_KVSERVER_BASE_SLICE_H
#define KV_KVSERVER_BASE_SLICE_H

#include "kvserver/base/clock.h"

#include <stdbool.h>

enum {
    KV_SLICE_US = 50,
    KV_SLICE_LOOKS = 256,
};

struct kv_slice {
    const struct kv_clock *clock;
    uint64_t end_us;
    uint32_t every, n_units, n_looks;
};

static inline struct kv_slice kv_slice_begin(const struct kv_clock *clock, uint32_t every)
{
    return (struct kv_slice){
        .clock = clock, .end_us = kv_clock_now(clock) + KV_SLICE_US, .every = every};
}

/* Call after each unit of work. */
static inline bool kv_slice_over(struct kv_slice *slice)
{
    if (++slice->n_units < slice->every)
        return false;
    slice->n_units = 0;
    return ++slice->n_looks >= KV_SLICE_LOOKS || kv_clock_now(slice->clock) >= slice->end_us;
}

#endif
