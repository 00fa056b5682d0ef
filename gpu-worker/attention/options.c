/* The options of attention methods: their defaults, and a row for each that reads its value
 * from a text. */
#include "gpu-worker/attention/options.h"

#include "proto/kv_types.h"

#include <stdlib.h>
#include <string.h>

const struct kv_attention_options kv_attention_defaults = {
    .budget = {.ratio = 0.1, .top_k = 1024, .sinks = 4, .window = 64},
    .index = {.summaries = 16, .chapter_blocks = 128, .subspaces = 2, .bits = 6},
    .rerank = 4,
    .cache = KV_CACHE_LRU,
    .cache_tokens = 4096,
};

static bool set_ratio(struct kv_attention_options *options, const char *value)
{
    return kv_budget_parse_ratio(value, &options->budget.ratio);
}

static bool set_top_k(struct kv_attention_options *options, const char *value)
{
    return kv_budget_parse_count(value, 0, &options->budget.top_k);
}

static bool set_sinks(struct kv_attention_options *options, const char *value)
{
    return kv_budget_parse_count(value, 0, &options->budget.sinks);
}

static bool set_window(struct kv_attention_options *options, const char *value)
{
    return kv_budget_parse_window(value, &options->budget.window);
}

static bool set_seed(struct kv_attention_options *options, const char *value)
{
    char *end;

    if (*value < '0' || *value > '9')
        return false;
    options->seed = strtoull(value, &end, 10);
    return *end == '\0';
}

static bool set_rerank(struct kv_attention_options *options, const char *value)
{
    if (strcmp(value, "auto") == 0) {
        options->rerank = 0;
        return true;
    }
    return kv_budget_parse_count(value, 1, &options->rerank) &&
           options->rerank <= KV_CHOSEN_MAX;
}

/* Sets *ret_index to the place of a value among names (n). */
static bool
find_name(const char *const *names, unsigned n, const char *value, unsigned *ret_index)
{
    for (unsigned i = 0; i < n; i++) {
        if (strcmp(names[i], value) == 0) {
            *ret_index = i;
            return true;
        }
    }
    return false;
}

static bool set_answer(struct kv_attention_options *options, const char *value)
{
    static const char *const names[] = {
        [KV_FORM_AUTO] = "auto",
        [KV_FORM_ROWS] = "rows",
        [KV_FORM_IDS] = "ids",
        [KV_FORM_ATTEND] = "attend",
    };
    unsigned form;

    if (!find_name(names, sizeof(names) / sizeof(names[0]), value, &form))
        return false;
    options->answer = (enum kv_answer_form)form;
    return true;
}

static bool set_rest(struct kv_attention_options *options, const char *value)
{
    uint32_t *summaries = &options->index.summaries;

    return kv_budget_parse_count(value, 0, summaries) &&
           (*summaries == 0 || *summaries == 16 || *summaries == 64);
}

static bool set_chapter(struct kv_attention_options *options, const char *value)
{
    if (strcmp(value, "prompt") == 0) {
        options->index.chapter_blocks = 0;
        return true;
    }
    return kv_budget_parse_count(value, KV_CHAPTER_BLOCKS_MIN,
                                 &options->index.chapter_blocks) &&
           options->index.chapter_blocks <= KV_TOKENS_MAX / KV_BLOCK_TOKENS;
}

static bool set_subspaces(struct kv_attention_options *options, const char *value)
{
    return kv_budget_parse_count(value, 1, &options->index.subspaces) &&
           options->index.subspaces <= KV_SUBSPACES_MAX;
}

static bool set_bits(struct kv_attention_options *options, const char *value)
{
    return kv_budget_parse_count(value, 1, &options->index.bits) &&
           options->index.bits <= KV_CODE_BITS_MAX;
}

static bool set_iterations(struct kv_attention_options *options, const char *value)
{
    if (strcmp(value, "auto") == 0) {
        options->index.iterations = 0;
        return true;
    }
    return kv_budget_parse_count(value, 1, &options->index.iterations) &&
           options->index.iterations <= KV_ITERATIONS_MAX;
}

static bool set_cache(struct kv_attention_options *options, const char *value)
{
    static const char *const names[] = {
        [KV_CACHE_LRU] = "lru", [KV_CACHE_LFU] = "lfu", [KV_CACHE_OFF] = "off"};

    unsigned policy;

    if (!find_name(names, sizeof(names) / sizeof(names[0]), value, &policy))
        return false;
    options->cache = (enum kv_cache_policy)policy;
    return true;
}

static bool set_cache_tokens(struct kv_attention_options *options, const char *value)
{
    return kv_budget_parse_count(value, KV_BLOCK_TOKENS, &options->cache_tokens);
}

static const struct {
    const char *name, *expected;
    bool (*set)(struct kv_attention_options *options, const char *value);
} settings[] = {
    {"ratio", "a share such as 0.1 or 1/10", set_ratio},
    {"top-k", "a number of rows", set_top_k},
    {"sinks", "a number of rows", set_sinks},
    {"window", "a number of rows, 1 at least, or half", set_window},
    {"seed", "a number", set_seed},
    {"rerank", "a number of 1 to 8192, or auto", set_rerank},
    {"answer", "auto, rows, ids or attend", set_answer},
    {"rest", "0, 16 or 64", set_rest},
    {"chapter", "a number of blocks, 8 at least, or prompt", set_chapter},
    {"pq-m", "a number of subspaces, 1 to 16", set_subspaces},
    {"pq-bits", "a number of bits, 1 to 8", set_bits},
    {"kmeans-iters", "a number of 1 to 1000, or auto", set_iterations},
    {"cache", "lru, lfu or off", set_cache},
    {"cache-tokens", "a number of tokens, 128 at least", set_cache_tokens},
};

kv_status_t kv_attention_option(struct kv_attention_options *options,
                                const char *name,
                                const char *value,
                                const char **ret_expected)
{
    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
        if (strcmp(settings[i].name, name) != 0)
            continue;
        if (settings[i].set(options, value))
            return KV_OK;
        *ret_expected = settings[i].expected;
        return KV_INVALID;
    }
    return KV_NOT_FOUND;
}
