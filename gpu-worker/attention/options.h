/* options.h - what can be chosen about an attention method, and how a text sets it.
 *
 * Threads: pure functions.
 */
#ifndef KV_GPU_WORKER_ATTENTION_OPTIONS_H
#define KV_GPU_WORKER_ATTENTION_OPTIONS_H

#include "gpu-worker/attention/budget.h"
#include "gpu-worker/kvcache/index_schedule.h"
#include "proto/kv_status.h"

/* Which blocks a worker keeps, beside sinks and window. */
enum kvw_cache_policy {
    KVW_CACHE_LRU,
    KVW_CACHE_LFU,
    KVW_CACHE_OFF,
};

/* How the store answers what it is asked.  By attention, what travels is the same however many
 * rows are chosen, so no blocks of rows are kept: to hold one saves nothing, and to fetch it
 * costs what was saved. */
enum kvw_result_mode {
    KVW_RESULT_AUTO,   /* by attention */
    KVW_RESULT_ROWS,   /* rows with the answer, where they fit a message, else as by ids */
    KVW_RESULT_IDS,    /* by a second question: what is chosen, then the rows */
    KVW_RESULT_ATTEND, /* attention over the chosen rows, to be merged with that over near ones */
};

/* What can be chosen about a method; each takes what concerns it. */
struct kvw_method_options {
    struct kvw_budget_options budget;
    uint64_t seed; /* of whatever is drawn */

    /* Of an index in the store. */
    struct kvw_index_options index;
    uint32_t rerank; /* candidates taken by code for each row chosen by key; 0: as many
                        as the nodes' estimates of recall ask for */
    enum kvw_result_mode answer;
    enum kvw_cache_policy cache;
    uint32_t cache_tokens; /* kept per layer */

    uint32_t recall_every; /* recall is measured at every so manieth token; 0: never */
};

/* ratio 0.1, top-k 1024, 4 sinks, a window of 64; rerank 4, a rest of 16, chapters of 128
 * blocks, 2 subspaces of 6 bits, a cache of 4096 tokens; seed 0, recall not measured */
extern const struct kvw_method_options kvw_method_defaults;

enum {
    KVW_METHOD_OPTIONS_MAX = 16,
};

struct kvw_method_option {
    const char *name;     /* as a command line calls it */
    const char *alias;    /* an old name, still accepted; NULL: none */
    const char *fallback; /* what kvw_method_defaults has, as a text */
    const char *help;     /* NULL: commands have an option of this name for more than methods */
    const char *expected; /* what its values are */
    const char *choices;  /* all of them, "lru|lfu|off"; NULL: they are no list */
    bool is_flag;         /* given or not: `value` is "yes" */
    bool is_budget;       /* says how many rows a step attends to */
    /* false: not a value of it */
    bool (*set)(struct kvw_method_options *options, const char *value);
};

/* All there are; NULL behind the last. */
const struct kvw_method_option *kvw_method_option_at(unsigned index);

/* Parses `value` into the option called `name`, which is its name on a command line or its
 * alias.  Fails with KV_NOT_FOUND if no option has the name or the option is a flag, and with
 * KV_INVALID if the value is not valid: *ret_expected then describes the valid ones. */
kv_status_t kvw_method_option(struct kvw_method_options *options,
                              const char *name,
                              const char *value,
                              const char **ret_expected);

#endif
