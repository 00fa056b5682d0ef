/* options.h - the options of attention methods, and the table by which text sets them.
 *
 * Threads: pure functions.
 */
#ifndef KV_GPU_WORKER_ATTENTION_OPTIONS_H
#define KV_GPU_WORKER_ATTENTION_OPTIONS_H

#include "gpu-worker/attention/budget.h"
#include "gpu-worker/kvcache/index_schedule.h"
#include "proto/kv_status.h"
#include "proto/kv_types.h"

/* Which blocks of rows a worker caches, besides sinks and window. */
enum kvw_cache_policy {
    KVW_CACHE_LRU,
    KVW_CACHE_LFU,
    KVW_CACHE_OFF,
};

/* What the store returns to a query.  An attention output has the same size however many rows
 * are selected.  So with it no blocks of rows are cached: a cached block would save no traffic,
 * and fetching it would cost some. */
enum kvw_result_mode {
    KVW_RESULT_AUTO,   /* the attention output */
    KVW_RESULT_ROWS,   /* the rows, if they fit one message, else as with ids */
    KVW_RESULT_IDS,    /* token ids; a second request fetches the rows */
    KVW_RESULT_ATTEND, /* the attention output over the selected rows */
};

/* From which state of a token a layer's query is guessed. */
enum kvw_speculate {
    KVW_SPECULATE_NONE,      /* it is not */
    KVW_SPECULATE_INPUT,     /* the input of the layer before */
    KVW_SPECULATE_ATTENTION, /* the same with that layer's attention added */
};

#define KVW_ADAPTED 0u
#define KVW_USUAL   UINT32_MAX

/* The options of all methods; each method reads those that concern it. */
struct kvw_method_options {
    struct kvw_budget_options budget;
    uint64_t seed; /* of everything random */

    /* Methods with an index in the store. */
    struct kvw_index_options index;
    enum kv_first_cut first_cut;
    /* Per selected row: rows that the first cut scores, and those of them that are scored by their
     * keys.  KVW_ADAPTED: as many as the nodes' estimates of recall ask for; of `rerank`,
     * KVW_USUAL: 1 with a first cut, else 4. */
    uint32_t candidates;
    bool
        candidates_fit; /* fewer if that is more than nodes take, more if it is less than `rerank` */
    uint32_t rerank;
    enum kvw_result_mode answer;
    enum kvw_cache_policy cache;
    uint32_t cache_tokens; /* per layer */

    enum kvw_speculate speculate;
    uint32_t speculate_first; /* layer whose query is guessed */
    uint32_t recall_every;    /* measure recall once per this many tokens; 0: never */
};

/* Returns whether the nodes attend to the selected rows, so that no rows are transferred. */
static inline bool kvw_method_returns_outputs(const struct kvw_method_options *options)
{
    return options->answer == KVW_RESULT_AUTO || options->answer == KVW_RESULT_ATTEND;
}

/* Returns the rows per selected row that are scored by their keys; KVW_ADAPTED: they are adapted. */
static inline uint32_t kvw_method_rerank(const struct kvw_method_options *options)
{
    return options->rerank != KVW_USUAL        ? options->rerank
           : options->first_cut == KV_CUT_NONE ? 4
                                               : 1;
}

/* As the table of options says; seed 0, recall not measured. */
extern const struct kvw_method_options kvw_method_defaults;

enum {
    KVW_METHOD_OPTIONS_MAX = 24,
};

struct kvw_method_option {
    const char *name;     /* as a command line calls it */
    const char *alias;    /* an old name, still accepted; NULL: none */
    const char *fallback; /* the value in kvw_method_defaults, as text */
    const char *help;     /* NULL: the command has an option of this name itself */
    const char *expected; /* its valid values, for messages */
    const char *choices;  /* all values, "lru|lfu|off"; NULL: not a list */
    const char *value;    /* what help calls the value, "N|auto"; NULL: by `choices` */
    bool is_flag;         /* takes no value on a command line: `value` is "yes" */
    bool is_budget;       /* limits how many rows a step attends to */
    bool is_preset;       /* sets others, so it is set before them */
    bool needs_index;     /* used by methods with an index in the store; else by every method
                             with a budget */
    bool is_of_codes;     /* and only by those that select by codes */
    bool is_of_answer;    /* and only by those that leave attention to the store */
    bool is_of_guess;     /* and only by those that guess queries */
    /* false: these options leave it without effect.  NULL: it always has one. */
    bool (*matters)(const struct kvw_method_options *options);
    const char *condition; /* when it matters, for messages: "with answer rows or ids" */
    /* false: not a valid value */
    bool (*set)(struct kvw_method_options *options, const char *value);
};

/* Returns the option at an index; NULL after the last. */
const struct kvw_method_option *kvw_method_option_at(unsigned index);

/* Returns the option whose name or alias is `name`, or NULL. */
const struct kvw_method_option *kvw_method_option_find(const char *name);

/* Parses `value` into the option called `name`, which is its name on a command line or its
 * alias.  Fails with KV_NOT_FOUND if no option has the name or the option is a flag, and with
 * KV_INVALID if the value is not valid: *ret_expected then describes the valid ones. */
kv_status_t kvw_method_set_option(struct kvw_method_options *options,
                                  const char *name,
                                  const char *value,
                                  const char **ret_expected);

/* Returns in what options that are each valid contradict each other, as a message; NULL: in
 * nothing. */
const char *kvw_method_conflict(const struct kvw_method_options *options);

#endif
