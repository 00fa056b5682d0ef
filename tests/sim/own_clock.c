#include "tests/sim/own_clock.h"

static uint64_t own_now(const struct kv_clock *clock)
{
    const struct own_clock *own = (const struct own_clock *)(const void *)clock;
    uint64_t world_us = kv_clock_now(own->world);
    int64_t passed_us;

    if (world_us <= own->since_us)
        return own->shown_us;
    passed_us = (int64_t)(world_us - own->since_us);
    return own->shown_us + (uint64_t)(passed_us + passed_us * own->drift / 1000000);
}

static uint64_t own_lasting(const struct kv_clock *clock)
{
    const struct own_clock *own = (const struct own_clock *)(const void *)clock;

    return kv_clock_now(own->world);
}

void own_clock_init(struct own_clock *own,
                    const struct kv_clock *world,
                    uint64_t shown_us,
                    int64_t drift)
{
    *own = (struct own_clock){
        .clock = {.name = "own", .now_us = own_now, .lasting_us = own_lasting},
        .world = world,
        .since_us = kv_clock_now(world),
        .shown_us = shown_us,
        .drift = drift,
    };
}

void own_clock_jump(struct own_clock *own, uint64_t by_us)
{
    own->shown_us += by_us;
}

void own_clock_stop(struct own_clock *own, uint64_t until_us)
{
    own->shown_us = kv_clock_now(&own->clock);
    own->since_us = until_us;
}
