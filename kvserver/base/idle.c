#include "kvserver/base/idle.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    GAP_MAX_US = 1000,     /* longer ones are not worth looking for */
    WAITED_MAX_US = 10000, /* longer ones say nothing more */
    WEIGHT = 8,            /* of what was, against what has come */
    LOOK_EVERY_US = 10000,
    WAIT_SHARE = 8, /* of the time: who waits longer for a core shares it with somebody */
};

bool kv_idle_find(const char *name, enum kv_idle_mode *ret_mode)
{
    static const char *const names[] = {
        [KV_IDLE_ADAPTIVE] = "adaptive", [KV_IDLE_BUSY] = "busy", [KV_IDLE_SLEEP] = "sleep"};

    *ret_mode = KV_IDLE_ADAPTIVE;
    if (name == NULL || name[0] == '\0')
        return true;
    for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (strcmp(names[i], name) == 0) {
            *ret_mode = (enum kv_idle_mode)i;
            return true;
        }
    return false;
}

enum kv_idle_mode kv_idle_within(enum kv_idle_mode mode, unsigned n_threads, double cores)
{
    return mode == KV_IDLE_ADAPTIVE && cores > 0 && cores < n_threads ? KV_IDLE_SLEEP : mode;
}

void kv_idle_came(struct kv_idle *idle, uint64_t waited_us)
{
    const uint64_t capped_us = waited_us < WAITED_MAX_US ? waited_us : WAITED_MAX_US;

    idle->gap_us = idle->gap_us == 0 ? capped_us + 1
                                     : (idle->gap_us * (WEIGHT - 1) + capped_us) / WEIGHT + 1;
}

/* Returns how long this thread has waited for a core so far, in ns; 0: not known. */
static uint64_t core_wait_ns(void)
{
    const int fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    unsigned long long ns = 0;
    char text[128];
    ssize_t bytes;

    if (fd < 0)
        return 0;
    bytes = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (bytes <= 0)
        return 0;
    text[bytes] = '\0';
    return sscanf(text, "%*u %llu", &ns) == 1 ? ns : 0; /* ran, waited, slices */
}

static bool is_crowded(struct kv_idle *idle, uint64_t now_us)
{
    if (now_us >= idle->looked_us + LOOK_EVERY_US) {
        const uint64_t wait_ns = core_wait_ns();
        const uint64_t waited_us = (wait_ns - idle->core_wait_ns) / 1000;
        const bool had_to = idle->core_wait_ns > 0 && wait_ns > idle->core_wait_ns &&
                            waited_us > (now_us - idle->looked_us) / WAIT_SHARE;

        idle->looked_us = now_us;
        idle->core_wait_ns = wait_ns;
        if (had_to)
            idle->crowd = idle->crowd + 2 < KV_IDLE_CROWD ? idle->crowd + 2 : KV_IDLE_CROWD;
        else
            idle->crowd -= idle->crowd > 0;
    }
    return idle->crowd > KV_IDLE_CROWD / 2;
}

uint64_t kv_idle_spin_us(struct kv_idle *idle, uint64_t now_us)
{
    if (idle->mode != KV_IDLE_ADAPTIVE)
        return idle->mode == KV_IDLE_BUSY ? UINT64_MAX : 0;
    if (is_crowded(idle, now_us))
        return 0;
    if (idle->gap_us == 0 || idle->gap_us > GAP_MAX_US)
        return KV_IDLE_LEAST_US;
    return 2 * idle->gap_us + KV_IDLE_LEAST_US;
}
