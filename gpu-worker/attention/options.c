/* The table of method options: how each is parsed, its default, and its help text. */
#include "gpu-worker/attention/options.h"

#include "proto/kv_types.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

const struct kvw_method_options kvw_method_defaults = {
    .budget = {.ratio = 0.1, .top_k = 1024, .sinks = 4, .window = 64},
    .index = {.summaries = 16,
              .summary_rows = 3072,
              .chapter_blocks = 128,
              .subspaces = 4,
              .bits = 6,
              .rotates = true,
              .copies = true},
    .first_cut = KV_CUT_INT4,
    .candidates = 8,
    .candidates_fit = true,
    .rerank = KVW_USUAL,
    .cache = KVW_CACHE_LRU,
    .cache_tokens = 4096,
    .speculate = KVW_SPECULATE_INPUT,
    .speculate_first = 1,
};

static bool set_ratio(struct kvw_method_options *options, const char *value)
{
    return kvw_budget_parse_ratio(value, &options->budget.ratio);
}

static bool set_top_k(struct kvw_method_options *options, const char *value)
{
    return kvw_budget_parse_count(value, 0, &options->budget.top_k);
}

static bool set_sinks(struct kvw_method_options *options, const char *value)
{
    return kvw_budget_parse_count(value, 0, &options->budget.sinks);
}

static bool set_window(struct kvw_method_options *options, const char *value)
{
    return kvw_budget_parse_window(value, &options->budget.window);
}

static bool set_seed(struct kvw_method_options *options, const char *value)
{
    char *end;

    if (*value < '0' || *value > '9')
        return false;
    options->seed = strtoull(value, &end, 10);
    return *end == '\0';
}

static bool parse_factor(const char *value, uint32_t *ret_factor)
{
    if (strcmp(value, "auto") == 0) {
        *ret_factor = KVW_ADAPTED;
        return true;
    }
    return kvw_budget_parse_count(value, 1, ret_factor) && *ret_factor <= KV_SELECTED_MAX;
}

static bool set_rerank(struct kvw_method_options *options, const char *value)
{
    if (strcmp(value, "usual") == 0) {
        options->rerank = KVW_USUAL;
        return true;
    }
    return parse_factor(value, &options->rerank);
}

static bool set_candidates(struct kvw_method_options *options, const char *value)
{
    options->candidates_fit = false;
    return parse_factor(value, &options->candidates);
}

static bool set_selected(struct kvw_method_options *options, const char *value)
{
    options->budget.selects_half = strcmp(value, "half") == 0;
    return options->budget.selects_half || strcmp(value, "all") == 0;
}

static bool set_first_cut(struct kvw_method_options *options, const char *value)
{
    options->first_cut = strcmp(value, "int4") == 0 ? KV_CUT_INT4 : KV_CUT_NONE;
    options->index.copies = options->first_cut == KV_CUT_INT4;
    return options->index.copies || strcmp(value, "none") == 0;
}

/* What a node reads for a query, and how well it finds the rows (README.md, "Presets"). */
static bool set_quality(struct kvw_method_options *options, const char *value)
{
    static const struct {
        const char *name;
        bool selects_half;
        uint32_t candidates, summary_rows;
    } presets[] = {
        {"cheap", true, 8, 3072},
        {"default", false, 8, 3072},
        {"best", false, 16, 1024},
    };

    for (unsigned i = 0; i < sizeof(presets) / sizeof(presets[0]); i++) {
        if (strcmp(value, presets[i].name) != 0)
            continue;
        options->budget.selects_half = presets[i].selects_half;
        options->first_cut = KV_CUT_INT4;
        options->index.copies = true;
        options->candidates = presets[i].candidates;
        options->candidates_fit = true;
        options->rerank = KVW_USUAL;
        options->index.subspaces = 4;
        options->index.bits = 6;
        options->index.rotates = true;
        options->index.summaries = 16;
        options->index.summary_rows = presets[i].summary_rows;
        return true;
    }
    return false;
}

static bool has_first_cut(const struct kvw_method_options *options)
{
    return options->first_cut != KV_CUT_NONE;
}

/* Sets *ret_index to the index of `value` in names (n). */
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

static bool set_answer(struct kvw_method_options *options, const char *value)
{
    static const char *const names[] = {
        [KVW_RESULT_AUTO] = "auto",
        [KVW_RESULT_ROWS] = "rows",
        [KVW_RESULT_IDS] = "ids",
        [KVW_RESULT_ATTEND] = "attend",
    };
    unsigned result_mode;

    if (!find_name(names, sizeof(names) / sizeof(names[0]), value, &result_mode))
        return false;
    options->answer = (enum kvw_result_mode)result_mode;
    return true;
}

static bool set_summaries(struct kvw_method_options *options, const char *value)
{
    uint32_t *summaries = &options->index.summaries;

    return kvw_budget_parse_count(value, 0, summaries) &&
           (*summaries == 0 || *summaries == 16 || *summaries == 64);
}

static bool set_summary_rows(struct kvw_method_options *options, const char *value)
{
    uint32_t *rows = &options->index.summary_rows;

    return kvw_budget_parse_count(value, 1, rows) && (*rows == 1024 || *rows == 3072);
}

static bool set_rotation(struct kvw_method_options *options, const char *value)
{
    options->index.rotates = strcmp(value, "on") == 0;
    return options->index.rotates || strcmp(value, "off") == 0;
}

static bool set_chapter(struct kvw_method_options *options, const char *value)
{
    if (strcmp(value, "prompt") == 0) {
        options->index.chapter_blocks = 0;
        return true;
    }
    return kvw_budget_parse_count(value, KV_CHAPTER_BLOCKS_MIN,
                                  &options->index.chapter_blocks) &&
           options->index.chapter_blocks <= KV_TOKENS_MAX / KV_BLOCK_TOKENS;
}

static bool set_subspaces(struct kvw_method_options *options, const char *value)
{
    return kvw_budget_parse_count(value, 1, &options->index.subspaces) &&
           options->index.subspaces <= KV_SUBSPACES_MAX;
}

static bool set_bits(struct kvw_method_options *options, const char *value)
{
    return kvw_budget_parse_count(value, 1, &options->index.bits) &&
           options->index.bits <= KV_CODE_BITS_MAX;
}

static bool set_iterations(struct kvw_method_options *options, const char *value)
{
    if (strcmp(value, "auto") == 0) {
        options->index.iterations = 0;
        return true;
    }
    return kvw_budget_parse_count(value, 1, &options->index.iterations) &&
           options->index.iterations <= KV_KMEANS_ITERATIONS_MAX;
}

static bool set_cache(struct kvw_method_options *options, const char *value)
{
    static const char *const names[] = {
        [KVW_CACHE_LRU] = "lru", [KVW_CACHE_LFU] = "lfu", [KVW_CACHE_OFF] = "off"};

    unsigned policy;

    if (!find_name(names, sizeof(names) / sizeof(names[0]), value, &policy))
        return false;
    options->cache = (enum kvw_cache_policy)policy;
    return true;
}

static bool set_cache_tokens(struct kvw_method_options *options, const char *value)
{
    return kvw_budget_parse_count(value, KV_BLOCK_TOKENS, &options->cache_tokens);
}

static bool set_speculate(struct kvw_method_options *options, const char *value)
{
    static const char *const names[] = {
        [KVW_SPECULATE_NONE] = "none",
        [KVW_SPECULATE_INPUT] = "input",
        [KVW_SPECULATE_ATTENTION] = "attention",
    };
    unsigned state;

    if (!find_name(names, sizeof(names) / sizeof(names[0]), value, &state))
        return false;
    options->speculate = (enum kvw_speculate)state;
    return true;
}

static bool set_speculate_first(struct kvw_method_options *options, const char *value)
{
    return kvw_budget_parse_count(value, 1, &options->speculate_first);
}

static bool speculates(const struct kvw_method_options *options)
{
    return options->speculate != KVW_SPECULATE_NONE;
}

static bool has_summaries(const struct kvw_method_options *options)
{
    return options->index.summaries != 0;
}

static bool cache_matters(const struct kvw_method_options *options)
{
    return !kvw_method_returns_outputs(options);
}

static bool cache_tokens_matter(const struct kvw_method_options *options)
{
    return cache_matters(options) && options->cache != KVW_CACHE_OFF;
}

static bool set_wait(struct kvw_method_options *options, const char *value)
{
    options->index.wait = strcmp(value, "yes") == 0;
    return true;
}

/* A preset is the first row: options that are set later have precedence. */
static const struct kvw_method_option method_options[] = {
    {.name = "quality",
     .fallback = "default",
     .help =
         "how much nodes read to find the rows. default: --pq-m 4 --pq-bits 6 --pq-rotation "
         "on --first-cut int4 --candidates 8 --rerank usual --summaries 16 --summary-rows "
         "3072; cheap: with --selected half; best: with --candidates 16 --summary-rows 1024. "
         "Options given beside it have precedence",
     .expected = "cheap, default or best",
     .choices = "cheap|default|best",
     .is_preset = true,
     .needs_index = true,
     .is_of_codes = true,
     .set = set_quality},
    {.name = "ratio",
     .fallback = "0.1",
     .help =
         "share of all rows so far that a step attends to, sinks and window included: 0.1 or "
         "1/10; 0: no limit",
     .expected = "a share such as 0.1 or 1/10",
     .is_budget = true,
     .value = "R",
     .set = set_ratio},
    {.name = "top-k",
     .fallback = "1024",
     .help =
         "maximum number of rows selected besides sinks and window; 0: no limit. With --ratio, "
         "the smaller counts",
     .expected = "a number of rows",
     .is_budget = true,
     .value = "K",
     .set = set_top_k},
    {.name = "sinks",
     .fallback = "4",
     .help = "number of initial tokens that every step attends to",
     .expected = "a number of rows",
     .value = "N",
     .set = set_sinks},
    {.name = "window",
     .fallback = "64",
     .help = "number of most recent tokens that every step attends to; half: as many as are "
             "selected, both fixed by --ratio when the prompt ends",
     .expected = "a number of rows, at least 1, or half",
     .value = "N|half",
     .set = set_window},
    {.name = "selected",
     .fallback = "all",
     .help = "rows that are selected of those that the budget allows besides sinks and window",
     .expected = "all or half",
     .choices = "all|half",
     .needs_index = true,
     .is_of_codes = true,
     .set = set_selected},
    {.name = "first-cut",
     .fallback = "int4",
     .help =
         "int4: nodes keep copies of keys in 4 bits, and score the candidates by these first; "
         "none: by their keys",
     .expected = "none or int4",
     .choices = "none|int4",
     .needs_index = true,
     .is_of_codes = true,
     .set = set_first_cut},
    {.name = "candidates",
     .fallback = "8",
     .help = "rows that the first cut scores per selected row, unless a number is given at "
             "most 16384 in all; auto: 8, raised in layers with low estimated recall (fixed at "
             "8 with --seed)",
     .expected = "a number from 1 to 8192, or auto",
     .value = "N|auto",
     .needs_index = true,
     .is_of_codes = true,
     .matters = has_first_cut,
     .condition = "with first-cut int4",
     .set = set_candidates},
    {.name = "rerank",
     .fallback = "usual",
     .help =
         "rows rescored exactly per selected row; 1: no reranking; usual: 4, and 1 with a "
         "first cut; auto, only with --first-cut none: 4, raised in layers with low estimated "
         "recall (fixed at 4 with --seed)",
     .expected = "a number from 1 to 8192, usual, or auto",
     .value = "N|usual|auto",
     .needs_index = true,
     .is_of_codes = true,
     .set = set_rerank},
    {.name = "answer",
     .fallback = "auto",
     .help =
         "what the store returns. attend: attention output over the selected rows; rows: the "
         "rows, if they fit one message; ids: token ids, rows are fetched separately; auto: "
         "attend",
     .expected = "auto, rows, ids or attend",
     .choices = "rows|attend|ids|auto",
     .needs_index = true,
     .is_of_answer = true,
     .set = set_answer},
    {.name = "summaries",
     .alias = "rest",
     .fallback = "16",
     .help =
         "cluster summaries per --summary-rows (16 or 64) used to estimate the contribution "
         "of rows not selected; 0: no estimate",
     .expected = "0, 16 or 64",
     .choices = "0|16|64",
     .needs_index = true,
     .is_of_answer = true,
     .set = set_summaries},
    {.name = "summary-rows",
     .fallback = "3072",
     .help = "rows that share the summaries of --summaries: with 1024, nodes read and keep "
             "more, and estimate more finely",
     .expected = "1024 or 3072",
     .choices = "1024|3072",
     .needs_index = true,
     .is_of_answer = true,
     .matters = has_summaries,
     .condition = "with summaries 16 or 64",
     .set = set_summary_rows},
    {.name = "chapter",
     .fallback = "128",
     .help = "blocks of 128 tokens that share a codebook; prompt: one codebook for everything",
     .expected = "a number of blocks, at least 8, or prompt",
     .value = "BLOCKS|prompt",
     .needs_index = true,
     .set = set_chapter},
    {.name = "pq-m",
     .fallback = "4",
     .help = "subspaces of a key, 1 to 16",
     .expected = "a number of subspaces from 1 to 16",
     .value = "N",
     .needs_index = true,
     .is_of_codes = true,
     .set = set_subspaces},
    {.name = "pq-bits",
     .fallback = "6",
     .help = "bits of a code in each subspace, 1 to 8",
     .expected = "a number of bits from 1 to 8",
     .value = "N",
     .needs_index = true,
     .is_of_codes = true,
     .set = set_bits},
    {.name = "pq-rotation",
     .fallback = "on",
     .help = "rotate keys before they are coded, so that subspaces have even variances: fewer "
             "rows are missed, for a matrix per layer and kv head",
     .expected = "on or off",
     .choices = "on|off",
     .needs_index = true,
     .is_of_codes = true,
     .set = set_rotation},
    {.name = "kmeans-iters",
     .fallback = "auto",
     .help =
         "maximum k-means iterations, 1 to 1000; auto: as many as fit into the prompt's time, "
         "3 to 300",
     .expected = "a number from 1 to 1000, or auto",
     .value = "N|auto",
     .needs_index = true,
     .is_of_codes = true,
     .set = set_iterations},
    {.name = "wait-index",
     .help = "wait for codebooks before each step; with --kmeans-iters and --seed, runs are "
             "reproducible",
     .is_flag = true,
     .needs_index = true,
     .set = set_wait},
    {.name = "cache",
     .fallback = "lru",
     .help =
         "which blocks of rows the worker caches with --answer rows or ids: the most recently "
         "used, the most frequently used, or none",
     .expected = "lru, lfu or off",
     .choices = "lru|lfu|off",
     .needs_index = true,
     .is_of_answer = true,
     .matters = cache_matters,
     .condition = "with answer rows or ids",
     .set = set_cache},
    {.name = "cache-tokens",
     .fallback = "4096",
     .help = "size of that cache in tokens per layer",
     .expected = "a number of tokens, at least 128",
     .value = "N",
     .needs_index = true,
     .is_of_answer = true,
     .matters = cache_tokens_matter,
     .condition = "with answer rows or ids and cache lru or lfu",
     .set = set_cache_tokens},
    {.name = "speculate",
     .fallback = "input",
     .help =
         "what a layer's query is guessed from, to pick candidates before it is there: the "
         "input of the layer before, or that with its attention added; none: from nothing, the "
         "query itself picks",
     .expected = "input, attention or none",
     .choices = "input|attention|none",
     .needs_index = true,
     .is_of_guess = true,
     .set = set_speculate},
    {.name = "speculate-first",
     .fallback = "1",
     .help = "the first layer, from 1, whose query is guessed; those before it have their own",
     .expected = "a layer, at least 1",
     .value = "LAYER",
     .needs_index = true,
     .is_of_guess = true,
     .matters = speculates,
     .condition = "with speculate input or attention",
     .set = set_speculate_first},
    {.name = "seed", .expected = "a number", .set = set_seed},
};

enum {
    N_OPTIONS = sizeof(method_options) / sizeof(method_options[0])
};

static_assert((int)N_OPTIONS <= (int)KVW_METHOD_OPTIONS_MAX, "every option has a slot");

const struct kvw_method_option *kvw_method_option_at(unsigned index)
{
    return index < N_OPTIONS ? &method_options[index] : NULL;
}

static bool is_called(const struct kvw_method_option *option, const char *name)
{
    return strcmp(option->name, name) == 0 ||
           (option->alias != NULL && strcmp(option->alias, name) == 0);
}

const struct kvw_method_option *kvw_method_option_find(const char *name)
{
    for (unsigned i = 0; i < N_OPTIONS; i++)
        if (is_called(&method_options[i], name))
            return &method_options[i];
    return NULL;
}

kv_status_t kvw_method_set_option(struct kvw_method_options *options,
                                  const char *name,
                                  const char *value,
                                  const char **ret_expected)
{
    const struct kvw_method_option *option = kvw_method_option_find(name);

    if (option == NULL || option->is_flag)
        return KV_NOT_FOUND;
    if (option->set(options, value))
        return KV_OK;
    *ret_expected = option->expected;
    return KV_INVALID;
}

const char *kvw_method_conflict(const struct kvw_method_options *options)
{
    /* With a first cut it is the candidates that are adapted. */
    return options->first_cut != KV_CUT_NONE && options->rerank == KVW_ADAPTED
               ? "rerank: auto: only with first-cut none; with int4: candidates auto"
               : NULL;
}
