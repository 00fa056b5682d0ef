/* options_private.h - which options a command takes: for options.c, which has the table, and
 * main.c, which has the commands.
 */
#ifndef KV_GPU_WORKER_COMMANDS_OPTIONS_PRIVATE_H
#define KV_GPU_WORKER_COMMANDS_OPTIONS_PRIVATE_H

#include "gpu-worker/commands/options.h"

enum {
    KVWORKER_OPTIONS_MAX = 64, /* rows of the table */
};

enum command_set {
    INFO = 1,
    GENERATE = 2,
    CHAT = 4,
    LOGITS = 8,
    EVAL = 16,
    ASK = 32,
    RUNS = GENERATE | CHAT | LOGITS,
    COMPUTES = RUNS | EVAL | ASK,
    ALL = INFO | COMPUTES,
};

/* The rows of a command, for kv_config_*(), ended by one without a name. */
void kvworker_option_rows(enum command_set command,
                          struct kv_config_row rows[KVWORKER_OPTIONS_MAX + 1]);

/* Takes every --prompt out of argv; the last one counts.  false: it has no value. */
bool kvworker_take_prompt(struct kvworker_options *to, int *argc, char **argv);

#endif
