/* clock.h - the table of clocks: real time, and a virtual time that a simulation turns.
 *
 * Threads: kv_clock_now() from any thread.  Memory: a clock is the caller's storage.
 */
#ifndef KV_KVSERVER_BASE_CLOCK_H
#define KV_KVSERVER_BASE_CLOCK_H

#include <stdint.h>

struct kv_clock {
    const char *name;
    /* Microseconds since some fixed moment; never goes back. */
    uint64_t (*now_us)(const struct kv_clock *clock);
    uint64_t virtual_us; /* the virtual row only: set by whoever drives the simulation */
};

/* CLOCK_MONOTONIC. */
extern const struct kv_clock kv_clock_real;

/* A clock that stands still until virtual_us is changed. */
void kv_clock_virtual_init(struct kv_clock *clock, uint64_t start_us);

static inline uint64_t kv_clock_now(const struct kv_clock *clock)
{
    return clock->now_us(clock);
}

#endif
