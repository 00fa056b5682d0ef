/* memory_watch.c - one warning in the log when memory gets scarce, and one when there is none. */
#include "kvserver/base/config.h"
#include "kvserver/base/log.h"
#include "kvserver/store/control/control.h"
#include "kvserver/store/control/metrics.h"

enum {
    SCARCE_PERCENT = 90,
    PLENTY_PERCENT = 80, /* below it, the next time is another one */
};

static uint64_t total(const struct kvs_control *control, size_t offset)
{
    return kvs_stats_total(control, offset);
}

static void warn(const struct kvs_control *control, const char *what)
{
    const uint64_t bytes[] = {
        control->pages->bytes,
        total(control, offsetof(struct kvs_stats, memory_rows)),
        total(control, offsetof(struct kvs_stats, memory_codes)) +
            total(control, offsetof(struct kvs_stats, memory_index)),
        total(control, offsetof(struct kvs_stats, objects_memory)),
        atomic_load_explicit(&control->pages->spare_bytes, memory_order_relaxed),
    };
    char text[sizeof(bytes) / sizeof(bytes[0])][16];

    for (size_t i = 0; i < sizeof(bytes) / sizeof(bytes[0]); i++)
        kv_config_format_size(bytes[i], text[i], sizeof(text[i]));
    kv_log(
        KV_LOG_WARN,
        "memory: %s of %s: rows %s, codes and index %s, objects %s; %s of these can make room",
        what, text[0], text[1], text[2], text[3], text[4]);
}

void kvs_memory_watch(struct kvs_control *control, uint64_t now_us)
{
    const struct kvs_pages *pages = control->pages;
    const uint64_t used = total(control, offsetof(struct kvs_stats, memory_used));
    const bool is_scarce = used >= pages->bytes / 100 * SCARCE_PERCENT;
    /* Pages that are lent to queries come back when they are wanted: they do not count. */
    const bool is_full =
        is_scarce && atomic_load_explicit(&pages->n_free, memory_order_relaxed) == 0;

    (void)now_us;
    if (is_full && !control->has_warned_full)
        warn(control, "100 %");
    else if (is_scarce && !control->has_warned_scarce)
        warn(control, "90 %");
    control->has_warned_full = control->has_warned_full || is_full;
    control->has_warned_scarce = control->has_warned_scarce || is_scarce;
    if (used < pages->bytes / 100 * PLENTY_PERCENT)
        control->has_warned_full = control->has_warned_scarce = false;
}
