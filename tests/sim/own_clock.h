/* own_clock.h - the clock of one process: it counts from where it likes, a little too fast or
 * too slow, and may jump forward or stand still, but never goes back.
 *
 * Threads: one.  Memory: the caller's storage.
 */
#ifndef KV_TESTS_SIM_OWN_CLOCK_H
#define KV_TESTS_SIM_OWN_CLOCK_H

#include "kvserver/base/clock.h"

struct own_clock {
    struct kv_clock clock; /* for the process; first */
    const struct kv_clock *world;
    uint64_t
        since_us; /* of the world: when it showed shown_us; later than now: it stands still */
    uint64_t shown_us;
    int64_t drift; /* parts in a million, above 0: too fast */
};

void own_clock_init(struct own_clock *own,
                    const struct kv_clock *world,
                    uint64_t shown_us,
                    int64_t drift);

/* From now on it shows so much more. */
void own_clock_jump(struct own_clock *own, uint64_t by_us);

/* It stands still until the world's clock shows that. */
void own_clock_stop(struct own_clock *own, uint64_t until_us);

#endif
