/* kvctl: its options, the table of commands, exit codes. */
#include "client/kvctl/kvctl.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define FIELD(name) offsetof(struct kvctl_options, name)

static const struct kv_option rows[] = {
    {.name = "server",
     .default_text = "127.0.0.1:7400",
     .help = "HOST:PORT of a node's control port, or several, comma-separated; objects are "
             "spread over the list in its order",
     .offset = FIELD(server),
     .type = KV_CONFIG_STRING},
    {.name = "transport",
     .default_text = "auto",
     .help = "how data travels; auto: shared memory on the same host, else tcp",
     .offset = FIELD(transport),
     .type = KV_CONFIG_STRING,
     .choices = "auto|tcp|shm"},
    {.name = "deadline-ms",
     .default_text = "5000",
     .help = "how long one operation may take",
     .offset = FIELD(deadline_ms),
     .type = KV_CONFIG_UINT,
     .min = 1,
     .max = 10 * 60 * 1000}, /* as long as the library lets an operation wait */
    {.name = "json",
     .help = "print JSON, one object per line",
     .offset = FIELD(json),
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

static const struct command {
    const char *name, *operands, *summary;
    int n_least, n_most;
    int (*run)(const struct kvctl *ctl);
} commands[] = {
    {"status", "", "what each node is and how full", 0, 0, kvctl_tables_run},
    {"sessions", "", "the sessions that each node keeps", 0, 0, kvctl_tables_run},
    {"clients", "", "who is connected", 0, 0, kvctl_tables_run},
    {"models", "", "the models that each node knows", 0, 0, kvctl_tables_run},
    {"ops", "", "operations: how many, how fast", 0, 0, kvctl_tables_run},
    {"stats", "", "all counters", 0, 0, kvctl_tables_run},
    {"scrub", "", "the background check of memory, and what it found", 0, 0, kvctl_tables_run},
    {"ping", "", "round trips and rates to each node, and over what", 0, 0, kvctl_ping_run},
    {"put", "NAME [FILE|-]", "store an object; - or nothing: standard input", 1, 2,
     kvctl_put_run},
    {"get", "NAME [FILE|-]", "fetch an object; - or nothing: standard output", 1, 2,
     kvctl_get_run},
    {"exists", "NAME", "tell whether there is such an object", 1, 1, kvctl_exists_run},
    {"delete", "NAME", "delete an object", 1, 1, kvctl_delete_run},
    {"drain", "", "let the nodes finish what they have, and stop", 0, 0, kvctl_drain_run},
    {"doctor", "", "check this machine and the nodes", 0, 0, kvctl_doctor_run},
};

enum {
    N_COMMANDS = sizeof(commands) / sizeof(commands[0])
};

static void print_help(void)
{
    printf("Usage: kvctl [OPTION]... COMMAND [OPERAND]...\n"
           "\n"
           "Shows and tends the storage nodes of TopKV.\n"
           "\n");
    for (unsigned i = 0; i < N_COMMANDS; i++) {
        char words[64];

        snprintf(words, sizeof(words), "%s %s", commands[i].name, commands[i].operands);
        printf("  %-22s %s\n", words, commands[i].summary);
    }
    printf("\n");
    kv_config_help(rows, stdout);
    printf("\n"
           "The environment may set options too: KVCTL_SERVER, KVCTL_JSON=yes, ...\n"
           "Exit status: 0 done, 1 failed, on one of several nodes too, 2 wrong usage or\n"
           "unusable input.  exists: 0 it does, 1 it does not, 3 unknown: its node did not\n"
           "answer.\n");
}

/* Cuts options.server into nodes; the pieces live in `copy`. */
static bool split_nodes(struct kvctl *ctl, char *copy)
{
    strcpy(copy, ctl->options.server);
    for (char *at = copy;;) {
        size_t bytes = strcspn(at, ",");
        bool is_last = at[bytes] == '\0';

        at[bytes] = '\0';
        if (bytes == 0 || strrchr(at, ':') == NULL) {
            kvctl_error(ctl, "option: --server: not HOST:PORT,...: %s", ctl->options.server);
            return false;
        }
        if (ctl->n_nodes == KVCTL_NODES_MAX) {
            kvctl_error(ctl, "option: --server: more than %d nodes", KVCTL_NODES_MAX);
            return false;
        }
        ctl->nodes[ctl->n_nodes++] = at;
        if (is_last)
            return true;
        at += bytes + 1;
    }
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
    char servers[KV_CONFIG_STRING_BYTES];
    const struct command *command;

    if (argc < 2) {
        kvctl_error(ctl, "command: missing: kvctl --help lists them");
        return KVCTL_USAGE;
    }
    command = find_command(argv[1]);
    if (command == NULL) {
        kvctl_error(ctl, "command: unknown: %s: kvctl --help lists them", argv[1]);
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
    if (!split_nodes(ctl, servers))
        return KVCTL_USAGE;
    return command->run(ctl);
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
        kvctl_error(&ctl, "standard output: cannot be written");
        result = KVCTL_FAILED;
    }
    return result;
}
