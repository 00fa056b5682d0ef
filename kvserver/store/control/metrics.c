/* The Prometheus text of the statistics.  To add a counter, extend KVS_COUNTERS
 * (shard/stats.h); to add a gauge, extend `sums` or write_gauges() below.
 */
#include "kvserver/store/control/metrics.h"

#include <string.h>

const struct kvs_counter kvs_counters[] = {
#define COUNTER_ROW(name, help) {#name, help, offsetof(struct kvs_stats, name)},
    KVS_COUNTERS(COUNTER_ROW)
#undef COUNTER_ROW
};

const size_t kvs_n_counters = sizeof(kvs_counters) / sizeof(kvs_counters[0]);

const struct kvs_counter kvs_memory_uses[] = {
#define USE_ROW(name, help, field)                     \
    {                                                  \
#name, help, offsetof(struct kvs_stats, field) \
    }
    USE_ROW(used, "memory that data threads have, in whole pages", memory_used),
    USE_ROW(rows, "memory of rows and their CRCs", memory_rows),
    USE_ROW(codes, "memory of codes", memory_codes),
    USE_ROW(index, "memory of codebooks, cells and summaries", memory_index),
    USE_ROW(objects, "memory of objects, their names and records", objects_memory),
    USE_ROW(records, "memory of records and lists of blocks and sessions", memory_other),
    USE_ROW(unused, "room left in the pages that data threads have", memory_unused),
#undef USE_ROW
};

const size_t kvs_n_memory_uses = sizeof(kvs_memory_uses) / sizeof(kvs_memory_uses[0]);

uint64_t kvs_stats_total(const struct kvs_control *control, size_t offset)
{
    uint64_t total =
        kvs_counted((const _Atomic uint64_t *)((const char *)&control->stats + offset));

    for (uint32_t i = 0; i < control->n_threads; i++)
        total += kvs_counted(
            (const _Atomic uint64_t *)((const char *)&control->shard[i].stats + offset));
    return total;
}

uint64_t kvs_memory_free(const struct kvs_control *control)
{
    return atomic_load_explicit(&control->pages->n_free, memory_order_relaxed) *
           (uint64_t)KVS_ARENA_PAGE;
}

void kvs_op_totals(const struct kvs_control *control,
                   unsigned op,
                   uint64_t *ret_count,
                   uint64_t *ret_errors,
                   struct kv_histogram *ret_us)
{
    memset(ret_us, 0, sizeof(*ret_us));
    *ret_count = kvs_counted(&control->stats.ops[op].count);
    *ret_errors = kvs_counted(&control->stats.ops[op].errors);
    kv_histogram_merge(ret_us, &control->stats.ops[op].us);
    for (uint32_t i = 0; i < control->n_threads; i++) {
        const struct kvs_op_stats *stats = &control->shard[i].stats.ops[op];
        *ret_count += kvs_counted(&stats->count);
        *ret_errors += kvs_counted(&stats->errors);
        kv_histogram_merge(ret_us, &stats->us);
    }
}

static void metric(FILE *out, const char *name, const char *type, const char *help)
{
    fprintf(out, "# HELP topkv_%s %s\n# TYPE topkv_%s %s\n", name, help, name, type);
}

static void gauge(FILE *out, const char *name, const char *help, uint64_t value)
{
    metric(out, name, "gauge", help);
    fprintf(out, "topkv_%s %llu\n", name, (unsigned long long)value);
}

/* Prometheus expects base units: the counter NAME_us, in microseconds, becomes NAME_seconds. */
static void write_counters(const struct kvs_control *control, FILE *out)
{
    for (size_t i = 0; i < kvs_n_counters; i++) {
        const char *own = kvs_counters[i].name;
        const uint64_t value = kvs_stats_total(control, kvs_counters[i].offset);
        const size_t length = strlen(own);
        const bool is_time = length > 3 && strcmp(own + length - 3, "_us") == 0;
        char name[64];

        snprintf(name, sizeof(name), "%.*s%s_total", (int)(is_time ? length - 3 : length), own,
                 is_time ? "_seconds" : "");
        metric(out, name, "counter", kvs_counters[i].help);
        if (is_time)
            fprintf(out, "topkv_%s %.6f\n", name, (double)value / 1e6);
        else
            fprintf(out, "topkv_%s %llu\n", name, (unsigned long long)value);
    }
}

/* Sums over the data threads; the control thread's values are 0. */
static const struct {
    const char *name, *help;
    size_t offset;
} sums[] = {
    {"segments", "segments of sessions", offsetof(struct kvs_stats, segments)},
    {"absent_blocks", "blocks of sessions that are not in memory, or not with all their rows",
     offsetof(struct kvs_stats, absent_blocks)},
    {"codebooks", "codebooks in memory", offsetof(struct kvs_stats, codebooks)},
    {"summarised_rows", "rows that have summaries in memory",
     offsetof(struct kvs_stats, summarised)},
    {"summaries_bytes", "bytes of summaries in memory",
     offsetof(struct kvs_stats, summaries_bytes)},
    {"index_jobs", "index jobs queued or running", offsetof(struct kvs_stats, index_jobs)},
    {"objects", "objects in memory", offsetof(struct kvs_stats, objects)},
    {"object_bytes", "bytes of objects in memory", offsetof(struct kvs_stats, object_bytes)},
    {"evictable_bytes", "memory that objects give when it is short",
     offsetof(struct kvs_stats, objects_evictable)},
    {"sessions_resting",
     "open sessions, not used for 0.1 s, whose saved blocks may leave memory",
     offsetof(struct kvs_stats, sessions_resting)},
    {"prefixes", "blocks that are kept under their names",
     offsetof(struct kvs_stats, prefixes)},
    {"prefix_bytes", "bytes of rows in them", offsetof(struct kvs_stats, prefix_bytes)},
    {"prefixes_pinned", "those that a client has pinned",
     offsetof(struct kvs_stats, prefixes_pinned)},
    {"prefix_tokens_bytes", "bytes of tokens that they have for readers of events",
     offsetof(struct kvs_stats, prefix_tokens_bytes)},
    {"prefixes_away", "those of them that are on disk, not in memory",
     offsetof(struct kvs_stats, prefixes_away)},
    {"saved_blocks", "blocks on disk", offsetof(struct kvs_stats, saved_blocks)},
    {"saved_bytes", "bytes of rows on disk", offsetof(struct kvs_stats, saved_bytes)},
    {"unsaved_blocks", "blocks that wait to be saved",
     offsetof(struct kvs_stats, unsaved_blocks)},
    {"unsaved_bytes", "bytes of rows in them", offsetof(struct kvs_stats, unsaved_bytes)},
    {"saved_objects", "objects on disk", offsetof(struct kvs_stats, saved_objects)},
    {"saved_object_bytes", "bytes that they take there, in whole pages",
     offsetof(struct kvs_stats, saved_object_bytes)},
    {"unsaved_objects", "objects that wait to be saved",
     offsetof(struct kvs_stats, unsaved_objects)},
    {"unsaved_object_bytes", "bytes of these",
     offsetof(struct kvs_stats, unsaved_object_bytes)},
    {"objects_away", "objects that are on disk, and not in memory",
     offsetof(struct kvs_stats, objects_away)},
    {"object_pieces_away", "pieces of objects that are on disk, not in memory",
     offsetof(struct kvs_stats, object_pieces_away)},
    {"refused_rows", "bad rows in memory, not served until put again",
     offsetof(struct kvs_stats, rows_bad)},
    {"refused_objects", "bad object pieces in memory, not served until put again",
     offsetof(struct kvs_stats, objects_bad)},
    {"scrub_pass_bytes", "bytes verified so far in the current pass",
     offsetof(struct kvs_stats, scrub_pass_bytes)},
    {"disk_scrub_pass_bytes", "bytes on disk verified so far in the current pass, or the last",
     offsetof(struct kvs_stats, disk_scrub_pass_bytes)},
    {"clients", "connected clients", offsetof(struct kvs_stats, clients)},
    {"requests_in_flight", "data requests in flight", offsetof(struct kvs_stats, in_flight)},
};

void kvs_load_times(const struct kvs_control *control, struct kv_histogram *ret_us)
{
    memset(ret_us, 0, sizeof(*ret_us));
    for (uint32_t i = 0; i < control->n_threads; i++)
        if (control->shard[i].tier != NULL)
            kv_histogram_merge(ret_us, &kvs_disk_tier_counts(control->shard[i].tier)->load_us);
}

void kvs_object_load_times(const struct kvs_control *control, struct kv_histogram *ret_us)
{
    memset(ret_us, 0, sizeof(*ret_us));
    for (uint32_t i = 0; i < control->n_threads; i++)
        if (control->shard[i].object_tier != NULL)
            kv_histogram_merge(ret_us,
                               &kvs_object_tier_counts(control->shard[i].object_tier)->load_us);
}

static uint64_t slowest_pass_us(const struct kvs_control *control)
{
    uint64_t slowest_us = 0;

    for (uint32_t i = 0; i < control->n_threads; i++) {
        const uint64_t us = kvs_counted(&control->shard[i].stats.scrub_last_us);

        slowest_us = us > slowest_us ? us : slowest_us;
    }
    return slowest_us;
}

static void write_gauges(struct kvs_control *control, FILE *out)
{
    const uint64_t up_us = kv_clock_now(control->config.clock) - control->started_us;

    gauge(out, "memory_bytes", "memory for rows, objects and the work of queries",
          control->config.memory_bytes);
    gauge(out, "memory_used_bytes", "memory in use for rows and objects, in whole pages",
          kvs_stats_total(control, offsetof(struct kvs_stats, memory_used)));
    gauge(out, "memory_free_bytes", "memory that no data thread and no query has",
          kvs_memory_free(control));
    gauge(out, "disk_bytes", "room on disk for prefixes and objects; 0: nothing is saved",
          control->config.disk_bytes);
    for (size_t i = 0; i < sizeof(sums) / sizeof(sums[0]); i++)
        gauge(out, sums[i].name, sums[i].help, kvs_stats_total(control, sums[i].offset));
    gauge(out, "scrub_pass_seconds",
          "duration of the last verification pass on the slowest thread",
          slowest_pass_us(control) / 1000000);
    gauge(out, "disk_scrub_pass_seconds", "duration of the last verification pass of the disk",
          kvs_counted(&control->stats.disk_scrub_pass_us) / 1000000);
    gauge(out, "sessions", "open sessions", atomic_load(&control->n_sessions_seen));
    gauge(out, "data_threads", "data threads", control->n_threads);
    gauge(out, "draining", "1 while the node is draining", atomic_load(&control->draining));
    gauge(out, "uptime_seconds", "time since the node started", up_us / 1000000);
}

/* What each data thread holds: the parts, of which "used" is the sum. */
static void write_memory(const struct kvs_control *control, FILE *out)
{
    metric(out, "thread_memory_bytes", "gauge", "memory of each data thread, by use");
    for (uint32_t thread = 0; thread < control->n_threads; thread++)
        for (size_t i = 1; i < kvs_n_memory_uses; i++)
            fprintf(out, "topkv_thread_memory_bytes{thread=\"%u\",use=\"%s\"} %llu\n", thread,
                    kvs_memory_uses[i].name,
                    (unsigned long long)kvs_counted(
                        (const _Atomic uint64_t *)((const char *)&control->shard[thread].stats +
                                                   kvs_memory_uses[i].offset)));
}

/* A tenant beyond those that are counted by themselves is one of "others". */
static void write_reuse(const struct kvs_control *control, FILE *out)
{
    const uint32_t n = atomic_load_explicit(&control->reuse.n_tenants, memory_order_acquire);

    metric(out, "reuse_tokens_total", "counter",
           "tokens of prompts that sessions were opened with, by what became of them");
    for (uint32_t i = 0; i < n; i++) {
        const struct kvs_reuse_tenant *tenant = &control->reuse.tenants[i];
        char name[16] = "others";

        if (i < KVS_REUSE_TENANTS - 1)
            snprintf(name, sizeof(name), "%u", tenant->tenant);
        for (int kind = 0; kind < KVS_REUSE_KINDS; kind++)
            fprintf(out, "topkv_reuse_tokens_total{tenant=\"%s\",what=\"%s\"} %llu\n", name,
                    kvs_reuse_name(kind),
                    (unsigned long long)kvs_counted(&tenant->tokens[kind]));
    }
}

enum {
    BUCKET_FIRST = 4, /* a power of two of microseconds: 16 us */
    BUCKET_LAST = 24, /* 16.8 s */
    BUCKET_ALL = 64,
};

/* The series of one histogram.  `label` is empty, or one label with its value and a comma.  Times
 * are whole microseconds, rounded down: those below a power of two are those at most that long.
 * The writers may be active: the count is that of the buckets as they are read here. */
static void
write_histogram(FILE *out, const char *name, const char *label, const struct kv_histogram *us)
{
    const unsigned long long all = kv_histogram_below(us, BUCKET_ALL);
    const int label_bytes = label[0] == '\0' ? 0 : (int)strlen(label) - 1;

    for (unsigned power = BUCKET_FIRST; power <= BUCKET_LAST; power++)
        fprintf(out, "topkv_%s_bucket{%sle=\"%.6f\"} %llu\n", name, label,
                (double)(UINT64_C(1) << power) / 1e6,
                (unsigned long long)kv_histogram_below(us, power));
    fprintf(out, "topkv_%s_bucket{%sle=\"+Inf\"} %llu\n", name, label, all);
    if (label_bytes > 0) {
        fprintf(out, "topkv_%s_sum{%.*s} %.6f\n", name, label_bytes, label,
                (double)kvs_counted(&us->sum) / 1e6);
        fprintf(out, "topkv_%s_count{%.*s} %llu\n", name, label_bytes, label, all);
    } else {
        fprintf(out, "topkv_%s_sum %.6f\n", name, (double)kvs_counted(&us->sum) / 1e6);
        fprintf(out, "topkv_%s_count %llu\n", name, all);
    }
}

static void write_tiers(const struct kvs_control *control, FILE *out)
{
    struct kv_histogram us;

    kvs_load_times(control, &us);
    metric(out, "block_load_seconds", "histogram",
           "time from the first need of a block on disk until it is in memory");
    write_histogram(out, "block_load_seconds", "", &us);
    kvs_object_load_times(control, &us);
    metric(out, "piece_load_seconds", "histogram",
           "time from the first need of an object's piece on disk until it is in memory");
    write_histogram(out, "piece_load_seconds", "", &us);
    metric(out, "unsaved_seconds", "gauge",
           "how long the first block in the queue has waited to be saved");
    fprintf(out, "topkv_unsaved_seconds %.3f\n",
            (double)kvs_counted(&control->stats.unsaved_us) / 1e6);
}

static void write_ops(const struct kvs_control *control, FILE *out)
{
    struct kv_histogram us;
    uint64_t count, errors;
    char label[64];

    metric(out, "op_errors_total", "counter", "requests that failed, by operation");
    for (unsigned op = 0; op < KV_OP_COUNT; op++) {
        if (control->ops[op].name == NULL)
            continue;
        kvs_op_totals(control, op, &count, &errors, &us);
        fprintf(out, "topkv_op_errors_total{op=\"%s\"} %llu\n", control->ops[op].name,
                (unsigned long long)errors);
    }
    metric(out, "errors_total", "counter", "requests that failed, by status");
    for (int i = 1; i < KVS_STATUSES; i++) {
        const char *name = kv_status_name((kv_status_t)-i);

        if (strcmp(name, "unknown") != 0) /* the numbers have gaps */
            fprintf(out, "topkv_errors_total{status=\"%s\"} %llu\n", name,
                    (unsigned long long)kvs_stats_total(
                        control, offsetof(struct kvs_stats, errors) +
                                     (size_t)i * sizeof(control->stats.errors[0])));
    }
    metric(out, "op_seconds", "histogram",
           "time from a request's arrival to its reply, by operation");
    for (unsigned op = 0; op < KV_OP_COUNT; op++) {
        if (control->ops[op].name == NULL)
            continue;
        kvs_op_totals(control, op, &count, &errors, &us);
        snprintf(label, sizeof(label), "op=\"%s\",", control->ops[op].name);
        write_histogram(out, "op_seconds", label, &us);
    }
}

void kvs_control_metrics(struct kvs_control *control, FILE *out)
{
    write_counters(control, out);
    write_gauges(control, out);
    write_memory(control, out);
    write_reuse(control, out);
    write_tiers(control, out);
    write_ops(control, out);
}
