/* main.c - kvserver: command line, signals, exit codes. */
#include "kernels/isa.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/config.h"
#include "kvserver/base/cpu_quota.h"
#include "kvserver/base/idle.h"
#include "kvserver/base/log.h"
#include "kvserver/server.h"
#include "kvserver/store/node.h"

#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    EXIT_USAGE = 2, /* wrong usage, or unusable input */
    DRAIN_US = 10000000,
    DETAIL_BYTES = 1024,
};

#define FIELD(name) offsetof(struct kvs_server_options, name)

/* The options.  Those that the server narrows to 32 bits have a maximum below 2^32. */
static const struct kv_option rows[] = {
    {.name = "listen",
     .default_text = "127.0.0.1:7400",
     .help = "HOST:PORT of the control port; port 0 picks a free port",
     .offset = FIELD(listen),
     .type = KV_CONFIG_STRING,
     .value = "HOST:PORT"},
    {.name = "metrics",
     .default_text = "127.0.0.1:7402",
     .help = "HOST:PORT of the HTTP server for /metrics, /health and /ready",
     .offset = FIELD(metrics),
     .type = KV_CONFIG_STRING,
     .value = "HOST:PORT"},
    {.name = "net-devices",
     .default_text = "",
     .help = "network devices for data, comma-separated; empty: those with the control address",
     .offset = FIELD(net_devices),
     .type = KV_CONFIG_STRING,
     .value = "NAME,..."},
    {.name = "transport",
     .default_text = "auto",
     .help = "transport for data; auto: shared memory on the same host, otherwise tcp",
     .offset = FIELD(transport),
     .type = KV_CONFIG_STRING,
     .choices = "auto|tcp|shm"},
    {.name = "memory",
     .default_text = "0",
     .help = "memory for rows, objects and the work of queries: address space at startup, and "
             "taken from the system as it is used; 0: a quarter of RAM, or of the container's "
             "limit if that is lower",
     .offset = FIELD(memory),
     .type = KV_CONFIG_SIZE},
    {.name = "scrub",
     .default_text = "64M",
     .help = "bytes of memory verified per second in the background; 0: no verification",
     .offset = FIELD(scrub),
     .type = KV_CONFIG_SIZE},
    {.name = "scrub-disk",
     .default_text = "16M",
     .help = "bytes of prefixes, and as many of objects, on disk verified per second in the "
             "background; 0: none",
     .offset = FIELD(scrub_disk),
     .type = KV_CONFIG_SIZE},
    {.name = "dir",
     .default_text = "",
     .help = "data directory; empty: $XDG_DATA_HOME/topkv or ~/.local/share/topkv",
     .offset = FIELD(dir),
     .type = KV_CONFIG_STRING,
     .value = "PATH"},
    {.name = "disk",
     .default_text = "auto",
     .help = "space in the data directory for prefixes and objects, which outlast the process; "
             "auto: "
             "half of what is free; none: nothing is saved",
     .offset = FIELD(disk),
     .type = KV_CONFIG_STRING,
     .value = "SIZE|auto|none"},
    {.name = "threads",
     .default_text = "0",
     .help = "number of data threads; 0: one per core",
     .offset = FIELD(threads),
     .type = KV_CONFIG_UINT,
     .max = KV_THREADS_MAX},
    {.name = "name",
     .default_text = "",
     .help = "name in tables and in clients' lists of nodes; empty: host name and port",
     .offset = FIELD(name),
     .type = KV_CONFIG_STRING,
     .value = "NAME"},
    {.name = "sessions",
     .default_text = "4096",
     .help = "maximum number of open sessions",
     .offset = FIELD(sessions),
     .type = KV_CONFIG_UINT,
     .min = 1,
     .max = 1 << 20},
    {.name = "root-sessions",
     .default_text = "0",
     .help =
         "sessions whose prompts begin with the same block after which later ones are spread "
         "over more nodes; 0: a sixteenth of --sessions",
     .offset = FIELD(root_sessions),
     .type = KV_CONFIG_UINT,
     .max = 1 << 20},
    {.name = "clients",
     .default_text = "1000",
     .help = "maximum number of connected clients; one over shared memory takes 0.7 MiB of it",
     .offset = FIELD(clients),
     .type = KV_CONFIG_UINT,
     .min = 1,
     .max = 1 << 16},
    {.name = "credits",
     .default_text = "64",
     .help =
         "maximum requests in flight per client and data thread; reduced, not below 8, when "
         "many clients share the node",
     .offset = FIELD(credits),
     .type = KV_CONFIG_UINT,
     .min = 1,
     .max = KV_CREDITS_MAX},
    {.name = "lease-ms",
     .default_text = "60000",
     .help = "default and maximum session lease, in milliseconds",
     .offset = FIELD(lease_ms),
     .type = KV_CONFIG_UINT,
     .min = 100,
     .max = 7 * 24 * 3600 * 1000u,
     .value = "MS"},
    {.name = "object-ttl",
     .default_text = "0",
     .help = "seconds after which objects are removed whose put names no time; 0: never",
     .offset = FIELD(object_ttl),
     .type = KV_CONFIG_UINT,
     .max = KV_OBJECT_TTL_MAX_MS / 1000,
     .value = "SECONDS"},
    {.name = "poll",
     .default_text = "adaptive",
     .help =
         "data threads without requests: busy: never sleep, and take a core each; sleep: at "
         "once, and have to be woken; adaptive: look for as long as requests usually take",
     .offset = FIELD(poll),
     .type = KV_CONFIG_STRING,
     .choices = KV_IDLE_CHOICES},
    {.name = "eviction",
     .default_text = "lru",
     .help =
         "which unused prefix is evicted first when memory is short. lru: the least "
         "recently used; gdsf: the one that is seldom used and cheap to recompute, per byte",
     .offset = FIELD(eviction),
     .type = KV_CONFIG_STRING,
     .choices = "lru|gdsf"},
    {.name = "tenant-quota",
     .default_text = "0",
     .help =
         "maximum bytes of rows kept for each tenant under the names of their blocks; 0: no "
         "limit",
     .offset = FIELD(tenant_quota),
     .type = KV_CONFIG_SIZE},
    {.name = "events",
     .default_text = "",
     .help = "ZeroMQ PUB endpoint for events about blocks, in vLLM's format; empty: none",
     .offset = FIELD(events),
     .type = KV_CONFIG_STRING,
     .value = "tcp://HOST:PORT"},
    {.name = "events-replay",
     .default_text = "",
     .help = "ZeroMQ ROUTER endpoint that replays recent events; empty: none",
     .offset = FIELD(events_replay),
     .type = KV_CONFIG_STRING,
     .value = "tcp://HOST:PORT"},
    {.name = "events-topic",
     .default_text = "kv-events",
     .help = "topic of the events",
     .offset = FIELD(events_topic),
     .type = KV_CONFIG_STRING,
     .value = "NAME"},
    {.name = "events-hashes",
     .default_text = "bytes",
     .help = "block names in events. bytes: all 16; int: the last 64 bits as a number, for "
             "readers that take only numbers",
     .offset = FIELD(events_hashes),
     .type = KV_CONFIG_STRING,
     .choices = "bytes|int"},
    {.name = "events-buffer",
     .default_text = "16M",
     .help = "memory for events that can be replayed",
     .offset = FIELD(events_buffer),
     .type = KV_CONFIG_SIZE},
    {.name = "log-level",
     .default_text = "info",
     .help = "log level",
     .offset = FIELD(log_level),
     .type = KV_CONFIG_STRING,
     .choices = "error|warn|info|debug"},
    {.name = NULL},
};

/* Options that are actions.  They are not settings, so a configuration file cannot have
 * them. */
struct actions {
    bool help, version, print_config, list_ops;
    const char *config;
};

static volatile sig_atomic_t stop_signals;

static void on_stop_signal(int number)
{
    (void)number;
    stop_signals = stop_signals + 1;
}

static void catch_signals(void)
{
    struct sigaction stop = {.sa_handler = on_stop_signal, .sa_flags = SA_RESTART};
    struct sigaction ignore = {.sa_handler = SIG_IGN};

    sigaction(SIGTERM, &stop, NULL);
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGPIPE, &ignore, NULL);
}

/* Removes the actions from argv.  Returns false if --config has no argument. */
static bool take_actions(struct actions *actions, int *argc, char **argv)
{
    int kept = 1;

    memset(actions, 0, sizeof(*actions));
    for (int i = 1; i < *argc; i++) {
        const char *argument = argv[i];

        if (strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0)
            actions->help = true;
        else if (strcmp(argument, "--version") == 0)
            actions->version = true;
        else if (strcmp(argument, "--print-config") == 0)
            actions->print_config = true;
        else if (strcmp(argument, "--list-ops") == 0)
            actions->list_ops = true;
        else if (strncmp(argument, "--config=", strlen("--config=")) == 0)
            actions->config = argument + strlen("--config=");
        else if (strcmp(argument, "--config") == 0) {
            if (++i == *argc)
                return false;
            actions->config = argv[i];
        } else
            argv[kept++] = argv[i];
    }
    argv[kept] = NULL;
    *argc = kept;
    return true;
}

static void print_help(void)
{
    printf("Usage: kvserver [OPTION]...\n"
           "\n"
           "A TopKV storage node.  Stores the KV caches of language models in memory and\n"
           "serves attention queries over them.  Without options it listens on localhost\n"
           "only.\n"
           "\n");
    kv_config_help(rows, stdout);
    printf("\n"
           "  --config FILE    read options from FILE, in lines `name = value`; environment\n"
           "                   variables (KVSERVER_THREADS, ...) take precedence over it,\n"
           "                   and the command line over both\n"
           "  --print-config   print the options in effect in that format and exit\n"
           "  --list-ops       print the operations that the node supports and exit\n"
           "  --help           print this help and exit\n"
           "  --version        print the version and exit\n"
           "\n"
           "Once it serves, it prints one line:\n"
           "  ready control=HOST:PORT metrics=HOST:PORT ...\n"
           "SIGTERM or SIGINT drains the node and exits; a second signal exits\n"
           "immediately.  Prefixes and objects are saved in the data directory about a\n"
           "second after they were published or put, and are there again when the node is\n"
           "started next; sessions end.\n");
}

static bool load_options(const struct actions *actions,
                         struct kvs_server_options *options,
                         int argc,
                         char **argv,
                         char *detail,
                         size_t detail_bytes)
{
    kv_config_defaults(rows, options);
    if (actions->config != NULL &&
        kv_config_file(rows, options, actions->config, detail, detail_bytes) != KV_OK)
        return false;
    if (kv_config_environment(rows, options, "KVSERVER", detail, detail_bytes) != KV_OK ||
        kv_config_arguments(rows, options, &argc, argv, detail, detail_bytes) != KV_OK)
        return false;
    if (argc > 1) {
        snprintf(detail, detail_bytes, "option: unexpected: %s", argv[1]);
        return false;
    }
    return true;
}

static enum kv_log_level log_level_of(const char *name)
{
    static const char *const names[] = {
        [KV_LOG_ERROR] = "error",
        [KV_LOG_WARN] = "warn",
        [KV_LOG_INFO] = "info",
        [KV_LOG_DEBUG] = "debug",
    };
    unsigned level = KV_LOG_DEBUG;

    while (level > 0 && strcmp(names[level], name) != 0)
        level--;
    return (enum kv_log_level)level;
}

static void announce_idle(const char *poll, uint32_t n_threads)
{
    const double cores = kv_cpu_quota();
    enum kv_idle_mode mode;

    if (kv_idle_find(poll, &mode) && kv_idle_within(mode, n_threads, cores) != mode)
        kv_log(KV_LOG_INFO,
               "poll: %s: sleep: control groups grant %.2f cores for %u data threads", poll,
               cores, n_threads);
}

static void announce(const struct kvs_server_info *info)
{
    char memory[16], disk[16] = "none";

    kv_config_format_size(info->memory, memory, sizeof(memory));
    if (info->disk > 0)
        kv_config_format_size(info->disk, disk, sizeof(disk));
    kv_log(KV_LOG_INFO, "topkv %s: node %s", TOPKV_VERSION, info->name);
    kv_log(KV_LOG_INFO, "control: %s; metrics: http://%s/metrics", info->control,
           info->metrics);
    kv_log(KV_LOG_INFO, "data: %s on %s", info->transports, info->devices);
    kv_log(KV_LOG_INFO, "memory: %s; threads: %u; disk: %s; data directory: %s", memory,
           info->n_threads, disk, info->dir);
    if (info->exposed)
        kv_log(KV_LOG_WARN, "listen: %s: TLS is not implemented: use trusted networks only",
               info->control);
    if (info->events[0] != 0)
        kv_log(KV_LOG_INFO, "events: %s; replay: %s", info->events,
               info->events_replay[0] != 0 ? info->events_replay : "none");
    if (info->events_exposed)
        kv_log(KV_LOG_WARN, "events: %s: no access control: use trusted networks only",
               info->events);
    printf("ready control=%s metrics=%s transport=%s threads=%u memory=%s dir=%s",
           info->control, info->metrics, info->transports, info->n_threads, memory, info->dir);
    if (info->events[0] != 0)
        printf(" events=%s", info->events);
    if (info->events_replay[0] != 0)
        printf(" events-replay=%s", info->events_replay);
    printf("\n");
    fflush(stdout);
}

/* Serves until a signal or a client's drain request, then drains. */
static void serve(struct kvs_server *server)
{
    uint64_t drain_until_us;

    while (stop_signals == 0 && !kvs_server_drain_requested(server))
        kvs_server_step(server);

    kv_log(KV_LOG_INFO, "draining: %s",
           stop_signals > 0 ? "signal received" : "requested by a client");
    kvs_server_drain(server);
    drain_until_us = kv_clock_now(&kv_clock_real) + DRAIN_US;
    while (!kvs_server_drained(server) && stop_signals < 2) {
        if (kv_clock_now(&kv_clock_real) > drain_until_us) {
            kv_log(KV_LOG_WARN, "drain: not finished after 10 s, stopping");
            break;
        }
        kvs_server_step(server);
    }
}

int main(int argc, char **argv)
{
    struct kvs_server_options options = {0};
    struct kvs_server *server;
    struct actions actions;
    char detail[DETAIL_BYTES] = "";
    kv_status_t status;

    kv_log_set_program("kvserver");
    catch_signals();
    if (!kv_isa_named()) {
        kv_log(KV_LOG_ERROR, "KV_ISA: not one of scalar|avx2|avx512: %s", getenv("KV_ISA"));
        return EXIT_USAGE;
    }
    if (!take_actions(&actions, &argc, argv)) {
        kv_log(KV_LOG_ERROR, "option: --config: needs a file");
        return EXIT_USAGE;
    }
    if (actions.help) {
        print_help();
        return EXIT_SUCCESS;
    }
    if (actions.version) {
        printf("kvserver %s\n", TOPKV_VERSION);
        return EXIT_SUCCESS;
    }
    if (actions.list_ops) {
        kvs_node_list_ops(stdout);
        return EXIT_SUCCESS;
    }
    if (!load_options(&actions, &options, argc, argv, detail, sizeof(detail))) {
        kv_log(KV_LOG_ERROR, "%s", detail);
        return EXIT_USAGE;
    }
    if (actions.print_config) {
        kv_config_print(rows, &options, stdout);
        return EXIT_SUCCESS;
    }

    kv_log_set_level(log_level_of(options.log_level));
    status = kvs_server_create(&options, &server, detail, sizeof(detail));
    if (status != KV_OK) {
        kv_log(KV_LOG_ERROR, "%s", detail);
        return status == KV_INVALID || status == KV_UNSUPPORTED ? EXIT_USAGE : EXIT_FAILURE;
    }
    announce(kvs_server_get_info(server));
    announce_idle(options.poll, kvs_server_get_info(server)->n_threads);
    serve(server);
    kvs_server_destroy(server);
    kv_log(KV_LOG_INFO, "stopped");
    return EXIT_SUCCESS;
}
