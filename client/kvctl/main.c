/* The main program of kvctl: options, the table of commands, exit codes. */
#include "client/kvctl/kvctl.h"

#include "kvserver/cluster/members.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIELD(name) offsetof(struct kvctl_options, name)

static const struct kv_option rows[] = {
    {.name = "server",
     .default_text = "127.0.0.1:7400",
     .help =
         "control ports of the nodes, HOST:PORT or NAME=HOST:PORT; which node has an object "
         "follows from the list, so always give all nodes, written the same, in any order",
     .offset = FIELD(server),
     .type = KV_CONFIG_TEXT,
     .value = "HOST:PORT,..."},
    {.name = "transport",
     .default_text = "auto",
     .help = "transport for data; auto: shared memory on the same host, else tcp",
     .offset = FIELD(transport),
     .type = KV_CONFIG_STRING,
     .choices = "auto|tcp|shm"},
    {.name = "deadline-ms",
     .default_text = "5000",
     .help = "time limit of one operation, in milliseconds",
     .offset = FIELD(deadline_ms),
     .type = KV_CONFIG_UINT,
     .min = 1,
     .max = 10 * 60 * 1000,
     .value = "MS"}, /* the library's limit */
    {.name = "prefix",
     .help = "objects, delete: only objects whose names begin with START",
     .offset = FIELD(prefix),
     .type = KV_CONFIG_TEXT,
     .value = "START"},
    {.name = "limit",
     .default_text = "0",
     .help = "maximum number of objects to list, or of prefixes on each node; 0: all (of "
             "prefixes: 1,000)",
     .offset = FIELD(limit),
     .type = KV_CONFIG_UINT},
    {.name = "yes",
     .help = "delete --prefix: delete the objects instead of only counting them",
     .offset = FIELD(yes),
     .type = KV_CONFIG_FLAG},
    {.name = "ttl",
     .default_text = "0",
     .help = "put: seconds after which the object is removed; 0: the node's default",
     .offset = FIELD(ttl),
     .type = KV_CONFIG_UINT,
     .max = KV_OBJECT_TTL_MAX_MS / 1000,
     .value = "SECONDS"},
    {.name = "evictable",
     .help = "put: the node may remove the object when memory is short",
     .offset = FIELD(evictable),
     .type = KV_CONFIG_FLAG},
    {.name = "for-ms",
     .default_text = "0",
     .help = "pin: duration in milliseconds, 0: until unpinned; hint: milliseconds until use",
     .offset = FIELD(for_ms),
     .type = KV_CONFIG_UINT,
     .max = UINT32_MAX,
     .value = "MS"},
    {.name = "session",
     .help = "pin, unpin, evict, hint: NAME is a session's id and stands for its prefix",
     .offset = FIELD(session),
     .type = KV_CONFIG_FLAG},
    {.name = "tenant",
     .default_text = "0",
     .help = "tenant whose objects, prefixes and sessions are meant",
     .offset = FIELD(tenant),
     .type = KV_CONFIG_UINT,
     .max = UINT32_MAX},
    {.name = "json",
     .help = "print JSON, one object per line",
     .offset = FIELD(json),
     .type = KV_CONFIG_FLAG},
    {.name = "help",
     .help = "print this help and exit",
     .offset = FIELD(help),
     .type = KV_CONFIG_FLAG},
    {.name = "version",
     .help = "print the version and exit",
     .offset = FIELD(version),
     .type = KV_CONFIG_FLAG},
    {.name = NULL},
};

static const struct command {
    const char *name, *operands, *summary;
    int n_least, n_most;
    int (*run)(const struct kvctl *ctl);
} commands[] = {
    {"status", "", "state and memory use of each node", 0, 0, kvctl_tables_run},
    {"sessions", "", "sessions on each node", 0, 0, kvctl_tables_run},
    {"clients", "", "connected clients", 0, 0, kvctl_tables_run},
    {"models", "", "models registered on each node", 0, 0, kvctl_tables_run},
    {"ops", "", "operation counts and latencies", 0, 0, kvctl_tables_run},
    {"stats", "", "all counters; times such as index_us in microseconds", 0, 0,
     kvctl_tables_run},
    {"scrub", "", "background check of memory: progress and findings", 0, 0, kvctl_tables_run},
    {"scrub-disk", "", "background check of the disk: progress and findings", 0, 0,
     kvctl_tables_run},
    {"verify", "", "check sessions and objects in memory, and the disk", 0, 0,
     kvctl_verify_run},
    {"threads", "", "what each data thread holds in memory", 0, 0, kvctl_tables_run},
    {"ping", "", "latency and throughput to each node, and its transport", 0, 0,
     kvctl_ping_run},
    {"put", "NAME [FILE|-]", "store an object; no FILE or -: standard input", 1, 2,
     kvctl_put_run},
    {"get", "NAME [FILE|-]", "fetch an object; no FILE or -: standard output", 1, 2,
     kvctl_get_run},
    {"exists", "NAME", "check whether an object exists", 1, 1, kvctl_exists_run},
    {"delete", "NAME | --prefix START", "delete an object, or all that begin with START", 0, 1,
     kvctl_delete_run},
    {"objects", "", "objects on each node", 0, 0, kvctl_objects_run},
    {"close", "SESSION-ID", "close a session, even if it is in use", 1, 1, kvctl_close_run},
    {"save", "SESSION-ID", "save on disk what a session shares, and wait for it", 1, 1,
     kvctl_save_run},
    {"prefixes", "", "blocks that each node keeps by name, at most 1,000", 0, 0,
     kvctl_tables_run},
    {"tiers", "", "what each node has in memory and on disk", 0, 0, kvctl_tables_run},
    {"tenants", "", "what each node keeps for each tenant", 0, 0, kvctl_tables_run},
    {"reuse", "", "prompt tokens that were reused, and why others were not", 0, 0,
     kvctl_tables_run},
    {"pin", "NAME", "keep a prefix even if memory is short", 1, 1, kvctl_prefix_run},
    {"unpin", "NAME", "remove the pin of a prefix", 1, 1, kvctl_prefix_run},
    {"evict", "NAME", "drop a prefix and all that continue it", 1, 1, kvctl_prefix_run},
    {"hint", "NAME", "announce that a prefix will be used soon", 1, 1, kvctl_prefix_run},
    {"drain", "", "finish requests, save what waits for it, stop the nodes", 0, 0,
     kvctl_drain_run},
    {"doctor", "", "check this machine and the nodes", 0, 0, kvctl_doctor_run},
};

enum {
    N_COMMANDS = sizeof(commands) / sizeof(commands[0])
};

static void print_help(void)
{
    printf("Usage: kvctl [OPTION]... COMMAND [OPERAND]...\n"
           "\n"
           "Inspects and manages TopKV storage nodes.\n"
           "\n");
    for (unsigned i = 0; i < N_COMMANDS; i++) {
        char words[64];

        snprintf(words, sizeof(words), "%s %s", commands[i].name, commands[i].operands);
        printf("  %-22s %s\n", words, commands[i].summary);
    }
    printf("\n");
    kv_config_help(rows, stdout);
    printf("\n"
           "drain: the node saves what waits for that, and stops.  Sessions that have rows\n"
           "on it end, open ones included; without a disk (--disk none) all is lost.\n"
           "\n"
           "verify: repairs what is damaged on disk if it is in memory, and drops it if not.\n"
           "It may be interrupted at any time.  It fails if data was lost, or is refused.\n"
           "\n"
           "save: only blocks that are kept by name are saved, not the rows behind the last\n"
           "one.  Nodes save them anyway, about a second after they were published.\n"
           "\n"
           "Environment variables set options, too: KVCTL_SERVER, KVCTL_JSON=yes, ...\n"
           "Exit status: 0 success; 1 failure, on any of the nodes; 2 wrong usage or invalid\n"
           "input.  exists: 0 the object exists; 1 it does not; 3 unknown, because its node\n"
           "did not respond.\n");
}

static const struct command *find_command(const char *name)
{
    for (unsigned i = 0; i < N_COMMANDS; i++)
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    return NULL;
}

static int run(struct kvctl *ctl, int argc, char **argv)
{
    char detail[KVCTL_DETAIL_BYTES];
    const struct command *command;
    struct kv_members *map = NULL;
    int result;

    if (argc < 2) {
        kvctl_error(ctl, "command: missing: see kvctl --help");
        return KVCTL_USAGE;
    }
    command = find_command(argv[1]);
    if (command == NULL) {
        kvctl_error(ctl, "command: unknown: %s: see kvctl --help", argv[1]);
        return KVCTL_USAGE;
    }
    ctl->command = command->name;
    ctl->operands = (const char *const *)argv + 2;
    ctl->n_operands = argc - 2;
    if (ctl->n_operands < command->n_least || ctl->n_operands > command->n_most) {
        kvctl_error(ctl, "operands: %s: usage: kvctl %s%s%s",
                    ctl->n_operands < command->n_least ? "too few" : "too many", command->name,
                    command->operands[0] != '\0' ? " " : "", command->operands);
        return KVCTL_USAGE;
    }
    if (kv_members_static.get("option: --server", ctl->options.server, &map, detail,
                              sizeof(detail)) != KV_OK) {
        kvctl_error(ctl, "%s", detail);
        return KVCTL_USAGE;
    }
    ctl->map = map;
    ctl->n_nodes = map->n_members;
    for (uint32_t i = 0; i < ctl->n_nodes; i++)
        ctl->nodes[i] = map->members[i].address;
    result = command->run(ctl);
    free(map);
    return result;
}

int main(int argc, char **argv)
{
    struct kvctl ctl = {0};
    char detail[KVCTL_DETAIL_BYTES] = "";
    int result = KVCTL_DONE;

    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], "-h") == 0)
            argv[i] = "--help";
    kv_config_defaults(rows, &ctl.options);
    if (kv_config_environment(rows, &ctl.options, "KVCTL", detail, sizeof(detail)) != KV_OK ||
        kv_config_arguments(rows, &ctl.options, &argc, argv, detail, sizeof(detail)) != KV_OK) {
        kvctl_error(&ctl, "%s", detail);
        return KVCTL_USAGE;
    }
    if (ctl.options.help)
        print_help();
    else if (ctl.options.version)
        printf("kvctl %s\n", kv_client_version());
    else
        result = run(&ctl, argc, argv);

    if (fflush(stdout) != 0 || ferror(stdout)) {
        kvctl_error(&ctl, "standard output: cannot write");
        result = KVCTL_FAILED;
    }
    return result;
}
