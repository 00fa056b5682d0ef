#include "kvserver/base/clock.h"

#include <time.h>

static uint64_t read_us(clockid_t id)
{
    struct timespec now;

    clock_gettime(id, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static uint64_t real_now(const struct kv_clock *clock)
{
    (void)clock;
    return read_us(CLOCK_MONOTONIC);
}

uint64_t kv_clock_unix_us(void)
{
    return read_us(CLOCK_REALTIME);
}

static uint64_t real_lasting(const struct kv_clock *clock)
{
    (void)clock;
    return kv_clock_unix_us();
}

static uint64_t virtual_now(const struct kv_clock *clock)
{
    return clock->virtual_us;
}

const struct kv_clock kv_clock_real = {
    .name = "real", .now_us = real_now, .lasting_us = real_lasting};

void kv_clock_virtual_init(struct kv_clock *clock, uint64_t start_us)
{
    *clock =
        (struct kv_clock){.name = "virtual", .now_us = virtual_now, .virtual_us = start_us};
}
