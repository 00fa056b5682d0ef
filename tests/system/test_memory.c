/* What a node takes, seen from outside: `--memory` and no more than kvserver/README.md says beside it,
 * while prompts of ten times as much are published, leave for the disk, come back and are read, and
 * every byte is compared.
 *
 *   test_system_memory KVSERVER                                       the short form
 *   test_system_memory KVSERVER --minutes N [--threads N] [--memory SIZE] [--disk SIZE] [--maps]
 *                                                                     the long one, by the minute
 */
#include "tests/system/prompts.h"
#include "tests/system/system.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_CLIENTS = 4,
    CLIENTS_MAX = 64,
    MEMORY_TIMES = 10, /* that are published */
    SAMPLE_US = 50000,
    PAGE_BYTES_MAX = 256 << 10, /* of /metrics */
    DEADLINE_MS = 60000,
    SHORT_S_MAX = 60, /* for what takes some seconds; a slow machine does less */
};

#define MIB (UINT64_C(1) << 20)

/* kvserver/README.md, "What a node takes". */
enum {
    BASE_MIB = 50,
    DISK_MIB = 64,
    THREAD_MIB = 64,
    CLIENT_KIB = 1200, /* on each data thread */
    BLOCK_BYTES = 550,
    PART_BYTES = 250, /* of a block, on each data thread that has units of it */
    UNIT_BYTES = 120,
};

struct setup {
    unsigned n_threads, n_clients;
    const char *memory, *disk;
    uint64_t memory_bytes;
};

struct watched {
    struct process_node node;
    struct setup setup;
    struct process clients[CLIENTS_MAX];
    struct prompts_counts counts; /* of all */
    uint64_t n_blocks; /* that are kept by name, in memory or on disk: the most so far */
    uint64_t start_rss, rss_max, over_max; /* over: beside --memory */
    uint64_t until_us;
};

static unsigned minutes; /* 0: the short form */
static bool tells_maps;
static struct setup long_setup = {2, N_CLIENTS, "256M", "4G", 256 * MIB};

/* A gauge or counter of /metrics without labels. */
static uint64_t metric(const struct watched *watched, const char *name)
{
    static char page[PAGE_BYTES_MAX];
    char line[80];
    const char *at;

    assert_int_equal(process_http_get(watched->node.metrics, "/metrics", page, sizeof(page)),
                     200);
    snprintf(line, sizeof(line), "\ntopkv_%s ", name);
    at = strstr(page, line);
    if (at == NULL)
        fail_msg("/metrics has no %s", name);
    return (uint64_t)strtod(at + strlen(line), NULL);
}

static bool has_disk(const struct watched *watched)
{
    return strcmp(watched->setup.disk, "none") != 0;
}

static uint64_t over_allowed(const struct watched *watched)
{
    const struct setup *setup = &watched->setup;
    const uint64_t n_parts =
        setup->n_threads < PROMPTS_UNITS ? setup->n_threads : PROMPTS_UNITS;

    return BASE_MIB * MIB + has_disk(watched) * DISK_MIB * MIB +
           setup->n_threads * (THREAD_MIB * MIB + setup->n_clients * CLIENT_KIB * MIB / 1024) +
           watched->n_blocks *
               (BLOCK_BYTES + n_parts * PART_BYTES + PROMPTS_UNITS * UNIT_BYTES);
}

static void sample(struct watched *watched)
{
    const uint64_t rss = process_rss(watched->node.process.pid);
    const uint64_t over =
        rss > watched->setup.memory_bytes ? rss - watched->setup.memory_bytes : 0;

    assert_true(rss > 0);
    if (rss > watched->rss_max)
        watched->rss_max = rss;
    if (over > watched->over_max)
        watched->over_max = over;
    if (over > PROCESS_MEMORY_FACTOR * over_allowed(watched))
        fail_msg("%u threads, --memory %s --disk %s: %llu MiB, %llu beside it; at most %llu",
                 watched->setup.n_threads, watched->setup.memory, watched->setup.disk,
                 (unsigned long long)(rss / MIB), (unsigned long long)(over / MIB),
                 (unsigned long long)(over_allowed(watched) / MIB));
}

static bool is_later(void *arg)
{
    struct watched *watched = arg;

    sample(watched);
    return process_now_us() > watched->until_us;
}

static void watch(struct watched *watched, uint64_t for_us)
{
    watched->until_us = process_now_us() + for_us;
    process_until(is_later, watched, PROCESS_PATIENCE_MS);
}

static void count(struct watched *watched)
{
    struct prompts_counts sum = {0}, one;

    for (unsigned i = 0; i < watched->setup.n_clients; i++) {
        assert_true(prompts_ask(&watched->clients[i], &one));
        sum.turns += one.turns;
        sum.put_bytes += one.put_bytes;
        sum.read_bytes += one.read_bytes;
        sum.attached_bytes += one.attached_bytes;
        sum.objects += one.objects;
        if (one.away_ms > sum.away_ms)
            sum.away_ms = one.away_ms;
    }
    watched->counts = sum;
    const uint64_t n_blocks = metric(watched, "prefixes");
    if (n_blocks > watched->n_blocks)
        watched->n_blocks = n_blocks;
}

static void start(struct watched *watched, const struct setup *setup)
{
    char threads[16];
    const char *const options[] = {"--threads", threads,     "--memory", setup->memory,
                                   "--disk",    setup->disk, NULL};
    struct prompts_options load = {
        .nodes = watched->node.control, .has_objects = true, .deadline_ms = DEADLINE_MS};

    watched->setup = *setup;
    snprintf(threads, sizeof(threads), "%u", setup->n_threads);
    system_node_start(&watched->node, options);
    sample(watched);
    watched->start_rss = process_rss(watched->node.process.pid);
    load.n_prompts =
        (uint32_t)(2 * MEMORY_TIMES * setup->memory_bytes /
                   ((uint64_t)setup->n_clients * PROMPTS_BLOCKS * 3 / 4 * PROMPTS_BLOCK_BYTES));
    for (unsigned i = 0; i < watched->setup.n_clients; i++) {
        load.transport = i % 2 == 0 ? "tcp" : "shm";
        load.seed = i + 1;
        assert_true(prompts_start(&watched->clients[i], &load));
    }
}

static void tell(const struct watched *watched, const char *when)
{
    print_message(
        "%u threads, --memory %s --disk %s: %s: %llu MiB at start, at most %llu, %llu "
        "beside --memory, %llu allowed; %llu turns, %llu MiB put, %llu attached, %llu "
        "read back, %llu objects; %llu blocks kept\n",
        watched->setup.n_threads, watched->setup.memory, watched->setup.disk, when,
        (unsigned long long)(watched->start_rss / MIB),
        (unsigned long long)(watched->rss_max / MIB),
        (unsigned long long)(watched->over_max / MIB),
        (unsigned long long)(over_allowed(watched) / MIB),
        (unsigned long long)watched->counts.turns,
        (unsigned long long)(watched->counts.put_bytes / MIB),
        (unsigned long long)(watched->counts.attached_bytes / MIB),
        (unsigned long long)(watched->counts.read_bytes / MIB),
        (unsigned long long)watched->counts.objects, (unsigned long long)watched->n_blocks);
    fflush(stdout);
}

static void show_maps(const struct watched *watched)
{
    char path[64], line[300];
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/smaps", (int)watched->node.process.pid);
    file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file) != NULL)
        fputs(line, stderr);
    fclose(file);
}

static void stop(struct watched *watched)
{
    if (tells_maps)
        show_maps(watched);
    for (unsigned i = 0; i < watched->setup.n_clients; i++)
        assert_true(prompts_stop(&watched->clients[i]));
    sample(watched);
    system_node_stop(&watched->node);
}

/* Until ten times the memory has been published, and more than the memory came back. */
static void run_short(const struct setup *setup)
{
    struct watched watched = {0};
    const uint64_t until_us = process_now_us() + SHORT_S_MAX * UINT64_C(1000000);
    bool is_done;

    start(&watched, setup);
    do {
        watch(&watched, 10 * SAMPLE_US);
        count(&watched);
        is_done = metric(&watched, "prefixes_published_total") * PROMPTS_BLOCK_BYTES >=
                      MEMORY_TIMES * setup->memory_bytes &&
                  (!has_disk(&watched) || watched.counts.attached_bytes >= setup->memory_bytes);
    } while (!is_done && process_now_us() < until_us);
    tell(&watched, is_done ? "short" : "slow");
    if (is_done) {
        assert_true(watched.rss_max > setup->memory_bytes / 10 * 9);
        assert_true(metric(&watched, has_disk(&watched) ? "blocks_loaded_total"
                                                        : "prefixes_evicted_total") > 0);
        assert_true(metric(&watched, "objects_evicted_total") > 0);
    }
    stop(&watched);
}

static void a_thread_without_a_disk(void **state)
{
    (void)state;
    run_short(&(struct setup){1, N_CLIENTS, "48M", "none", 48 * MIB});
}

static void two_threads_with_a_disk(void **state)
{
    (void)state;
    run_short(&(struct setup){2, N_CLIENTS, "96M", "4G", 96 * MIB});
}

/* By the minute: what a node takes and does. */
static void for_minutes(void **state)
{
    struct watched watched = {0};
    uint64_t first = 0, least = UINT64_MAX;

    (void)state;
    start(&watched, &long_setup);
    for (unsigned minute = 0; minute < minutes; minute++) {
        const struct prompts_counts before = watched.counts;
        const uint64_t minute_us = process_now_us() + UINT64_C(60000000);

        while (process_now_us() < minute_us)
            watch(&watched, minute_us - process_now_us() < 1000000
                                ? minute_us - process_now_us()
                                : 1000000);
        count(&watched);
        const uint64_t moved = (watched.counts.put_bytes - before.put_bytes +
                                watched.counts.read_bytes - before.read_bytes) /
                               MIB;
        print_message(
            "minute %u: %llu turns, %llu MiB put, %llu read, longest without an answer "
            "%llu ms\n",
            minute + 1, (unsigned long long)(watched.counts.turns - before.turns),
            (unsigned long long)((watched.counts.put_bytes - before.put_bytes) / MIB),
            (unsigned long long)((watched.counts.read_bytes - before.read_bytes) / MIB),
            (unsigned long long)watched.counts.away_ms);
        tell(&watched, "so far");
        if (minute < 3 && moved > first)
            first = moved;
        if (moved < least)
            least = moved;
    }
    print_message("slowest minute: %llu MiB, %llu %% of the best of the first three\n",
                  (unsigned long long)least, (unsigned long long)(least * 100 / (first + 1)));
    stop(&watched);
}

static bool read_size(const char *text, uint64_t *ret_bytes)
{
    char *end;

    *ret_bytes = strtoull(text, &end, 10) * MIB;
    if (*end == 'G')
        *ret_bytes *= 1024;
    return *ret_bytes > 0 && (*end == 'M' || *end == 'G') && end[1] == 0;
}

static bool read_arguments(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";

        if (strcmp(argv[i], "--maps") == 0) {
            tells_maps = true;
            continue;
        }
        if (strcmp(argv[i], "--minutes") == 0)
            minutes = (unsigned)strtoul(value, NULL, 10);
        else if (strcmp(argv[i], "--threads") == 0)
            long_setup.n_threads = (unsigned)strtoul(value, NULL, 10);
        else if (strcmp(argv[i], "--clients") == 0 && strtoul(value, NULL, 10) <= CLIENTS_MAX)
            long_setup.n_clients = (unsigned)strtoul(value, NULL, 10);
        else if (strcmp(argv[i], "--disk") == 0)
            long_setup.disk = value;
        else if (strcmp(argv[i], "--memory") == 0 && read_size(value, &long_setup.memory_bytes))
            long_setup.memory = value;
        else
            return false;
        i++;
    }
    return true;
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest short_tests[] = {
        cmocka_unit_test(a_thread_without_a_disk),
        cmocka_unit_test(two_threads_with_a_disk),
    };
    const struct CMUnitTest long_tests[] = {cmocka_unit_test(for_minutes)};

    if (!read_arguments(argc, argv)) {
        process_complain("usage: test_system_memory KVSERVER [--minutes N] [--threads N] "
                         "[--clients N] [--memory SIZE] [--disk SIZE|none] [--maps]");
        return 2;
    }
    return minutes > 0 ? cmocka_run_group_tests_name("system.memory", long_tests, NULL, NULL)
                       : cmocka_run_group_tests_name("system.memory", short_tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return system_main(argc, argv, work, prompts_child);
}
