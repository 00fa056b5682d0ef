/* kv_bench: what TopKV does, against what the machine can do. */
#define _GNU_SOURCE
#include "tests/bench/bench.h"

#include "kvserver/base/config.h"

#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    EXIT_USAGE = 2,
    DETAIL_BYTES = 512,
    FAMILIES_BYTES = 1024,
};

struct settings {
    char transport[KV_CONFIG_STRING_BYTES];
    char kvserver[KV_CONFIG_STRING_BYTES];
    char mooncake[KV_CONFIG_STRING_BYTES];
    char redis[KV_CONFIG_STRING_BYTES];
    uint64_t runs;
    uint64_t data;
    bool json, smoke, quick, list, help, version;
};

#define FIELD(name) offsetof(struct settings, name)

static const struct kv_option rows[] = {
    {.name = "transport",
     .default_text = "both",
     .help = "how data travels",
     .offset = FIELD(transport),
     .type = KV_CONFIG_STRING,
     .choices = "both|tcp|shm"},
    {.name = "runs",
     .default_text = "5",
     .help = "runs whose median is reported",
     .offset = FIELD(runs),
     .type = KV_CONFIG_UINT,
     .min = 1,
     .max = BENCH_RUNS_MAX},
    {.name = "data",
     .default_text = "256M",
     .help =
         "rows that operations walk through, kernels twice as much; more than the caches hold",
     .offset = FIELD(data),
     .type = KV_CONFIG_SIZE,
     .min = 32 << 20,
     .max = 4ull << 30},
    {.name = "kvserver",
     .default_text = "",
     .help = "path of kvserver; empty: the one of the same build",
     .offset = FIELD(kvserver),
     .type = KV_CONFIG_STRING,
     .value = "FILE"},
    {.name = "mooncake",
     .default_text = "",
     .help = "Python that has Mooncake (install_mooncake.sh): objects are compared with it",
     .offset = FIELD(mooncake),
     .type = KV_CONFIG_STRING,
     .value = "FILE"},
    {.name = "redis",
     .default_text = "",
     .help = "path of redis-server: objects are compared with it",
     .offset = FIELD(redis),
     .type = KV_CONFIG_STRING,
     .value = "FILE"},
    {.name = "json",
     .help = "one JSON object per line",
     .offset = FIELD(json),
     .type = KV_CONFIG_FLAG},
    {.name = "smoke",
     .help = "one short run with little data: right or wrong only, figures mean nothing",
     .offset = FIELD(smoke),
     .type = KV_CONFIG_FLAG},
    {.name = "quick",
     .help = "scale, bookkeeping, disk: a tenth of what is held, one pass: for a first look",
     .offset = FIELD(quick),
     .type = KV_CONFIG_FLAG},
    {.name = "list",
     .help = "print the names of all loads, and end",
     .offset = FIELD(list),
     .type = KV_CONFIG_FLAG},
    {.name = "help",
     .help = "print this, and end",
     .offset = FIELD(help),
     .type = KV_CONFIG_FLAG},
    {.name = "version",
     .help = "print the version, and end",
     .offset = FIELD(version),
     .type = KV_CONFIG_FLAG},
    {.name = NULL},
};

static const struct bench_load *const groups[] = {
    bench_rpc_loads,     bench_row_loads,    bench_query_loads,   bench_object_loads,
    bench_machine_loads, bench_kernel_loads, bench_scale_loads,   bench_bookkeeping_loads,
    bench_match_loads,   bench_prefix_loads, bench_spilled_loads, bench_disk_loads,
};
enum {
    N_GROUPS = sizeof(groups) / sizeof(groups[0]),
    N_GROUPS_OF_ALL = 6, /* the others take minutes, or have no second side */
};

static void print_list(FILE *out)
{
    for (unsigned group = 0; group < N_GROUPS; group++)
        for (const struct bench_load *load = groups[group]; load->name != NULL; load++)
            fprintf(out, "%-20s %s\n", load->name, load->summary);
}

static void print_help(void)
{
    printf("Usage: kv_bench NAME... [OPTION]...\n"
           "\n"
           "Starts nodes, loads them and compares with what the same machine can do at\n"
           "best.  NAME is a load, the first word of some (put, rpc), or `all` up to the\n"
           "kernels; `kernels pq` is kernels.pq:\n"
           "\n");
    print_list(stdout);
    printf("\n");
    kv_config_help(rows, stdout);
}

/* "put" names "put" and "put.64K". */
static bool is_named(const char *wanted, const char *name)
{
    size_t bytes = strlen(wanted);

    return strcmp(wanted, "all") == 0 ||
           (strncmp(wanted, name, bytes) == 0 && (name[bytes] == '\0' || name[bytes] == '.'));
}

static bool is_wanted(char *const *names, unsigned group, const char *name)
{
    for (; *names != NULL; names++)
        if (is_named(*names, name) && (group < N_GROUPS_OF_ALL || strcmp(*names, "all") != 0))
            return true;
    return false;
}

/* The first of the names that is no load's; NULL if all are. */
static const char *unknown_name(char *const *names)
{
    for (; *names != NULL; names++) {
        bool is_known = false;

        for (unsigned group = 0; group < N_GROUPS; group++)
            for (const struct bench_load *load = groups[group]; load->name != NULL; load++)
                is_known = is_known || is_named(*names, load->name);
        if (!is_known)
            return *names;
    }
    return NULL;
}

/* "kernels pq" names kernels.pq: turns the names behind "kernels", where there are any, into
 * those of loads.  Returns the names; `room` has the texts. */
static char **with_families(char **names, char *room, size_t room_bytes)
{
    const struct bench_load *load;

    if (strcmp(names[0], "kernels") != 0 || names[1] == NULL)
        return names;
    for (char **name = ++names; *name != NULL; name++) {
        int bytes = snprintf(room, room_bytes, "kernels.%s", *name);

        if (bytes < 0 || (size_t)bytes >= room_bytes)
            break;
        for (load = bench_kernel_loads; load->name != NULL; load++)
            if (is_named(room, load->name))
                break;
        if (load->name == NULL)
            continue; /* another load's, or nobody's */
        *name = room;
        room += bytes + 1;
        room_bytes -= (size_t)bytes + 1;
    }
    return names;
}

static int run_all(struct bench *bench, void *arg)
{
    char *const *names = arg;

    bench_pin(bench->client_cpu);
    for (unsigned group = 0; group < N_GROUPS; group++) {
        for (const struct bench_load *load = groups[group]; load->name != NULL; load++) {
            if (is_wanted(names, group, load->name) && !load->run(bench, load)) {
                bench_complain("%s: failed", load->name);
                bench_kernels_close(bench);
                return EXIT_FAILURE;
            }
        }
    }
    bench_kernels_close(bench);
    bench_finish(bench);
    return EXIT_SUCCESS;
}

/* The first two processors that this process may use. */
static void choose_cpus(struct bench *bench)
{
    int found[2] = {-1, -1};
    unsigned n = 0;
    cpu_set_t set;

    if (sched_getaffinity(0, sizeof(set), &set) == 0)
        for (int cpu = 0; cpu < CPU_SETSIZE && n < 2; cpu++)
            if (CPU_ISSET(cpu, &set))
                found[n++] = cpu;
    bench->server_cpu = n == 2 ? found[0] : -1;
    bench->client_cpu = n == 2 ? found[1] : -1;
}

/* The folder of this program. */
static bool own_folder(char *folder, size_t folder_bytes)
{
    ssize_t bytes = readlink("/proc/self/exe", folder, folder_bytes - 1);
    char *slash;

    if (bytes <= 0)
        return false;
    folder[bytes] = '\0';
    slash = strrchr(folder, '/');
    if (slash == NULL)
        return false;
    *slash = '\0';
    return true;
}

/* What bench_wire_open(), bench_socket_open(), query.busy, query.spill and query.worst start. */
static int run_peer(int argc, char **argv)
{
    if (argc == 6 && strcmp(argv[2], "messages") == 0)
        return bench_wire_peer(argv[3], strtoull(argv[4], NULL, 10), atoi(argv[5]));
    if (argc == 6 && strcmp(argv[2], "socket") == 0)
        return bench_socket_peer(strtoull(argv[4], NULL, 10), atoi(argv[5]));
    if (argc == 5 && strcmp(argv[2], "prefill") == 0)
        return bench_prefill_peer(argv[3], argv[4], false);
    if (argc == 5 && strcmp(argv[2], "spill") == 0)
        return bench_prefill_peer(argv[3], argv[4], true);
    if (argc == 5 && strcmp(argv[2], "worst") == 0)
        return bench_worst_peer(argv[3], argv[4]);
    return EXIT_USAGE;
}

int main(int argc, char **argv)
{
    struct settings settings;
    struct bench bench = {0};
    char folder[PATH_MAX], kvserver[PATH_MAX + 32], detail[DETAIL_BYTES];
    char families[FAMILIES_BYTES], **names;
    const char *unknown;

    if (argc > 1 && strcmp(argv[1], "--peer") == 0)
        return run_peer(argc, argv);
    memset(&settings, 0, sizeof(settings));
    kv_config_defaults(rows, &settings);
    if (kv_config_arguments(rows, &settings, &argc, argv, detail, sizeof(detail)) != KV_OK) {
        bench_complain("%s", detail);
        return EXIT_USAGE;
    }
    if (settings.help) {
        print_help();
        return EXIT_SUCCESS;
    }
    if (settings.version) {
        printf("kv_bench %s\n", kv_client_version());
        return EXIT_SUCCESS;
    }
    if (settings.list) {
        print_list(stdout);
        return EXIT_SUCCESS;
    }
    if (argc < 2) {
        bench_complain("a name is missing; --list has them");
        return EXIT_USAGE;
    }
    names = with_families(argv + 1, families, sizeof(families));
    unknown = unknown_name(names);
    if (unknown != NULL) {
        bench_complain("name: not one: %s", unknown);
        return EXIT_USAGE;
    }
    if (!own_folder(folder, sizeof(folder))) {
        bench_complain("/proc/self/exe: cannot be read");
        return EXIT_FAILURE;
    }

    snprintf(kvserver, sizeof(kvserver), "%s/../../kvserver/kvserver", folder);
    bench.kvserver = settings.kvserver[0] != '\0' ? settings.kvserver : kvserver;
    bench.tools = folder;
    bench.transport = strcmp(settings.transport, "both") != 0 ? settings.transport : NULL;
    bench.mooncake = settings.mooncake[0] != '\0' ? settings.mooncake : NULL;
    bench.redis = settings.redis[0] != '\0' ? settings.redis : NULL;
    bench.runs = settings.smoke ? 1 : (unsigned)settings.runs;
    bench.data_bytes = settings.smoke ? 32 << 20 : settings.data / (1 << 20) * (1 << 20);
    bench.json = settings.json;
    bench.smoke = settings.smoke;
    bench.quick = settings.quick;
    choose_cpus(&bench);
    if (access(bench.kvserver, X_OK) != 0) {
        bench_complain("--kvserver: not a program: %s", bench.kvserver);
        return EXIT_USAGE;
    }
    return bench_supervise(&bench, run_all, names);
}
