/* options.h - the options of a kvworker command, from command line and environment.
 *
 * Strings are stored as given; the code that uses one validates it.  Pointers point to the
 * arguments or the environment.
 */
#ifndef KV_GPU_WORKER_COMMANDS_OPTIONS_H
#define KV_GPU_WORKER_COMMANDS_OPTIONS_H

#include "gpu-worker/attention/options.h"
#include "kvserver/base/config.h"

#include <stdbool.h>
#include <stdint.h>

/* Of the option of an attention method that has the same index in kvw_method_option_at(). */
union kvw_method_value {
    char text[KV_CONFIG_STRING_BYTES]; /* "": not given */
    bool is_set;                       /* a flag's */
};

/* Defaults that --long-context replaces. */
#define KVW_EVAL_BUDGETS "1/10"
enum {
    KVW_EVAL_FROM = 2048,
    KVW_EVAL_TOKENS = 4096,
};

struct kvw_options {
    char model[KV_CONFIG_STRING_BYTES];
    const char *store;
    char poll[KV_CONFIG_STRING_BYTES];
    char progress[KV_CONFIG_STRING_BYTES];
    char salt_file[KV_CONFIG_STRING_BYTES];
    char prompts[KV_CONFIG_STRING_BYTES];
    uint64_t batch, batch_tokens, groups, kv_memory;
    char attention[KV_CONFIG_STRING_BYTES];
    union kvw_method_value method[KVW_METHOD_OPTIONS_MAX];
    bool is_given[KVW_METHOD_OPTIONS_MAX]; /* `method` is from the command line */
    char trace[KV_CONFIG_STRING_BYTES];
    char kv_type[KV_CONFIG_STRING_BYTES];
    char device[KV_CONFIG_STRING_BYTES];
    uint64_t threads; /* 0 is replaced by the number of processors */
    uint64_t memory;  /* of an embedded store */
    bool json;

    char session[KV_CONFIG_STRING_BYTES];
    char kv_heads[KV_CONFIG_STRING_BYTES];
    const char *prompt; /* NULL: not given */
    char prompt_file[KV_CONFIG_STRING_BYTES];
    bool raw;
    bool fresh, publish_tokens;
    uint64_t max_tokens;
    char temperature[KV_CONFIG_STRING_BYTES];
    uint64_t sample_top_k;
    char sample_top_p[KV_CONFIG_STRING_BYTES];
    uint64_t seed;

    char out[KV_CONFIG_STRING_BYTES];
    uint64_t from;

    char text_file[KV_CONFIG_STRING_BYTES];
    uint64_t tokens; /* 0: all of the text */
    char methods[KV_CONFIG_STRING_BYTES];
    char budgets[KV_CONFIG_STRING_BYTES];
    char seeds[KV_CONFIG_STRING_BYTES];
    char needles[KV_CONFIG_STRING_BYTES];
    uint64_t needle_tokens; /* 0: as `tokens` */
    bool needles_only;
    bool long_context;
    char against[KV_CONFIG_STRING_BYTES];
    char per_token[KV_CONFIG_STRING_BYTES];
    bool csv;

    char contexts[KV_CONFIG_STRING_BYTES];
    char batches[KV_CONFIG_STRING_BYTES];
    uint64_t steps, recorded;
    char svg[KV_CONFIG_STRING_BYTES];

    bool help;
};

#endif
