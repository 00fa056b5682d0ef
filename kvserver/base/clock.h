/* clock.h - clocks: real time, and virtual time that a simulation advances.
 *
 * Threads: kv_clock_now() from any thread.  Memory: the caller's.
 */
#ifndef KV_KVSERVER_BASE_CLOCK_H
#define KV_KVSERVER_BASE_CLOCK_H

#include <stddef.h>
#include <stdint.h>

struct kv_clock {
    const char *name;
    /* Returns microseconds since a fixed moment; monotonic. */
    uint64_t (*now_us)(const struct kv_clock *clock);
    /* Returns microseconds since a moment that outlasts the process; NULL: now_us() does. */
    uint64_t (*lasting_us)(const struct kv_clock *clock);
    uint64_t virtual_us; /* virtual clocks only: set by the simulation */
};

/* CLOCK_MONOTONIC. */
extern const struct kv_clock kv_clock_real;

/* Returns microseconds since 1970, for people and other programs to read: it may jump. */
uint64_t kv_clock_unix_us(void);

/* Makes a clock that shows virtual_us. */
void kv_clock_virtual_init(struct kv_clock *clock, uint64_t start_us);

static inline uint64_t kv_clock_now(const struct kv_clock *clock)
{
    return clock->now_us(clock);
}

/* The same as by kv_clock_unix_us(), on a real clock: for times that are written to a disk. */
static inline uint64_t kv_clock_lasting(const struct kv_clock *clock)
{
    return clock->lasting_us != NULL ? clock->lasting_us(clock) : clock->now_us(clock);
}

#endif
