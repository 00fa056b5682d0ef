/* options_private.h - which options a command takes: for options.c, which has the table, and
 * main.c, which has the commands.
 */
#ifndef KV_GPU_WORKER_COMMANDS_OPTIONS_PRIVATE_H
#define KV_GPU_WORKER_COMMANDS_OPTIONS_PRIVATE_H

#include "gpu-worker/commands/options.h"

enum {
    KVW_OPTIONS_MAX = 112, /* of one command */
};

enum kvw_command_set {
    KVW_COMMAND_INFO = 1,
    KVW_COMMAND_GENERATE = 2,
    KVW_COMMAND_CHAT = 4,
    KVW_COMMAND_LOGITS = 8,
    KVW_COMMAND_EVAL = 16,
    KVW_COMMAND_ASK = 32,
    KVW_COMMAND_PREFILL = 64,
    KVW_COMMAND_DECODE = 128,
    KVW_COMMAND_BENCH = 256,
    KVW_COMMAND_ANSWERS = KVW_COMMAND_GENERATE | KVW_COMMAND_CHAT | KVW_COMMAND_DECODE,
    KVW_COMMAND_SESSIONS = KVW_COMMAND_ANSWERS | KVW_COMMAND_PREFILL,
    KVW_COMMAND_RUNS = KVW_COMMAND_ANSWERS | KVW_COMMAND_LOGITS,
    KVW_COMMAND_PLANS = KVW_COMMAND_EVAL | KVW_COMMAND_ASK | KVW_COMMAND_BENCH,
    KVW_COMMAND_METHODS = KVW_COMMAND_RUNS | KVW_COMMAND_PLANS,
    KVW_COMMAND_COMPUTES = KVW_COMMAND_METHODS | KVW_COMMAND_PREFILL,
    KVW_COMMAND_ALL = KVW_COMMAND_INFO | KVW_COMMAND_COMPUTES,
};

/* The rows of a command, for kv_config_*(), ended by one without a name. */
void kvw_option_rows(enum kvw_command_set command, struct kv_option rows[KVW_OPTIONS_MAX + 1]);

/* Reads the environment, then the command line, as kv_config_arguments() does.  A prompt from
 * the environment is ignored if there is a prompt file. */
kv_status_t kvw_read_options(const struct kv_option *rows,
                             struct kvw_options *to,
                             int *argc,
                             char **argv,
                             char *detail,
                             size_t detail_bytes);

#endif
