/* slice.h - a slice of work: how long a thread that others wait for goes on with one thing.
 *
 *     struct kv_slice slice = kv_slice_begin(clock, every);
 *     do { one piece of work } while (there is more && !kv_slice_over(&slice));
 *
 * A slice is over at the first look at the clock after KV_SLICE_US, so it lasts as long as the
 * work between two looks longer: it is for the caller to choose pieces of some microseconds, 20
 * at most, or to look only after `every` pieces of less.  How work is divided into pieces never
 * depends on time, so that results do not depend on where a slice ends.
 *
 * If the clock stands still, as a simulation's does, a slice is over after KV_SLICE_LOOKS: few,
 * so that a simulation gets between the slices of one request.
 *
 * Threads: the caller's.  Memory: the caller's.
 */
#ifndef KV_KVSERVER_BASE_SLICE_H
#define KV_KVSERVER_BASE_SLICE_H

#include "kvserver/base/clock.h"

#include <stdbool.h>

enum {
    KV_SLICE_US = 50,
    KV_SLICE_LOOKS = 16, /* at a clock that stands still */
};

struct kv_slice {
    const struct kv_clock *clock;
    uint64_t end_us, seen_us;
    uint32_t every, n_pieces;
    uint32_t n_looks; /* since the clock has moved */
};

/* Begins a slice at a time that the caller has just read. */
static inline struct kv_slice
kv_slice_begin_at(const struct kv_clock *clock, uint64_t now_us, uint32_t every)
{
    return (struct kv_slice){
        .clock = clock, .end_us = now_us + KV_SLICE_US, .seen_us = now_us, .every = every};
}

static inline struct kv_slice kv_slice_begin(const struct kv_clock *clock, uint32_t every)
{
    return kv_slice_begin_at(clock, kv_clock_now(clock), every);
}

/* Call after each piece of work. */
static inline bool kv_slice_over(struct kv_slice *slice)
{
    if (++slice->n_pieces < slice->every)
        return false;
    slice->n_pieces = 0;
    const uint64_t now_us = kv_clock_now(slice->clock);
    if (now_us == slice->seen_us)
        return ++slice->n_looks >= KV_SLICE_LOOKS;
    slice->seen_us = now_us;
    slice->n_looks = 0;
    return now_us >= slice->end_us;
}

#endif
