/* The options of kvworker's commands: one table, of which each command takes its rows. */
#include "gpu-worker/commands/options_private.h"

#include "gpu-worker/base/thread_pool.h"
#include "proto/kv_types.h"

#include <assert.h>
#include <stddef.h>
#include <string.h>

#define FIELD(name) offsetof(struct kvw_options, name)

static const struct {
    unsigned commands;
    struct kv_option option;
} options[] = {
    {KVW_COMMAND_ALL,
     {.name = "model",
      .help = "the model, a GGUF file",
      .offset = FIELD(model),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_GENERATE,
     {.name = "prompt",
      .help = "the prompt",
      .offset = FIELD(prompt),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_GENERATE | KVW_COMMAND_LOGITS,
     {.name = "prompt-file",
      .help = "a file with the prompt; - is standard input",
      .offset = FIELD(prompt_file),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_GENERATE,
     {.name = "raw",
      .help = "no chat template: the prompt is the beginning of a text",
      .offset = FIELD(raw),
      .type = KV_CONFIG_FLAG}},
    {KVW_COMMAND_LOGITS,
     {.name = "out",
      .help = "the NumPy file to write, float32: a row of the vocabulary for each position",
      .offset = FIELD(out),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_LOGITS,
     {.name = "from",
      .default_text = "0",
      .help = "first position written; tokens before it pass in chunks, later ones one by one",
      .offset = FIELD(from),
      .type = KV_CONFIG_UINT,
      .max = KV_TOKENS_MAX}},
    {KVW_COMMAND_EVAL,
     {.name = "text-file",
      .help = "the text, or some, comma-separated; - is standard input",
      .offset = FIELD(text_file),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_ASK,
     {.name = "text-file",
      .help = "the text; - is standard input",
      .offset = FIELD(text_file),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_EVAL,
     {.name = "tokens",
      .default_text = "4096",
      .help = "of the text, at most; 0: all",
      .offset = FIELD(tokens),
      .type = KV_CONFIG_UINT,
      .max = KV_TOKENS_MAX}},
    {KVW_COMMAND_ASK,
     {.name = "tokens",
      .default_text = "7000",
      .help = "of the text, at most, and at most what the model's context takes; 0: all",
      .offset = FIELD(tokens),
      .type = KV_CONFIG_UINT,
      .max = KV_TOKENS_MAX}},
    {KVW_COMMAND_EVAL,
     {.name = "from",
      .default_text = "2048",
      .help = "tokens that pass by full attention; every later one is a decode step, whose "
              "guess of the next one is measured",
      .offset = FIELD(from),
      .type = KV_CONFIG_UINT,
      .max = KV_TOKENS_MAX}},
    {KVW_COMMAND_EVAL,
     {.name = "methods",
      .default_text = "full,oracle,window,random",
      .help = "attention methods, comma-separated, each NAME[:OPTION=VALUE...]; full always is "
              "one of them",
      .offset = FIELD(methods),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_ASK,
     {.name = "methods",
      .default_text = "full,pqcache",
      .help = "attention methods, comma-separated, each NAME[:OPTION=VALUE...]; full always is "
              "one of them",
      .offset = FIELD(methods),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_ASK,
     {.name = "budgets",
      .default_text = "1/10",
      .help = "what a step may attend to: a share of all rows so far, or k=ROWS besides sinks "
              "and window",
      .offset = FIELD(budgets),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_EVAL,
     {.name = "budgets",
      .default_text = "1/10",
      .help = "what a step may attend to, comma-separated: a share of all rows so far, or "
              "k=ROWS besides sinks and window",
      .offset = FIELD(budgets),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_EVAL,
     {.name = "seeds",
      .default_text = "0",
      .help = "comma-separated: a run for each, of methods that draw",
      .offset = FIELD(seeds),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_EVAL | KVW_COMMAND_ASK,
     {.name = "needles",
      .help = "a file of odd sentences, a line each, BEGINNING|COMPLETION: spread through the "
              "text, and asked for by their beginnings",
      .offset = FIELD(needles),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_EVAL,
     {.name = "needle-tokens",
      .default_text = "0",
      .help = "of the text that the sentences are put into; 0: as --tokens",
      .offset = FIELD(needle_tokens),
      .type = KV_CONFIG_UINT,
      .max = KV_TOKENS_MAX}},
    {KVW_COMMAND_EVAL,
     {.name = "needles-only",
      .help = "no perplexity",
      .offset = FIELD(needles_only),
      .type = KV_CONFIG_FLAG}},
    {KVW_COMMAND_EVAL,
     {.name = "csv",
      .help = "print lines of comma-separated values",
      .offset = FIELD(csv),
      .type = KV_CONFIG_FLAG}},
    {KVW_COMMAND_GENERATE | KVW_COMMAND_CHAT,
     {.name = "max-tokens",
      .default_text = "512",
      .help = "the longest answer",
      .offset = FIELD(max_tokens),
      .type = KV_CONFIG_UINT,
      .min = 1,
      .max = KV_TOKENS_MAX}},
    {KVW_COMMAND_ASK,
     {.name = "max-tokens",
      .default_text = "16",
      .help = "the longest answer; it ends with its first line",
      .offset = FIELD(max_tokens),
      .type = KV_CONFIG_UINT,
      .min = 1,
      .max = KV_TOKENS_MAX}},
    {KVW_COMMAND_GENERATE | KVW_COMMAND_CHAT,
     {.name = "temperature",
      .default_text = "0",
      .help = "0: always the most likely token; higher: more variety",
      .offset = FIELD(temperature),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_GENERATE | KVW_COMMAND_CHAT,
     {.name = "sample-top-k",
      .default_text = "40",
      .help = "draw from so many of the most likely tokens; 0: from all",
      .offset = FIELD(sample_top_k),
      .type = KV_CONFIG_UINT,
      .max = 1 << 24}},
    {KVW_COMMAND_GENERATE | KVW_COMMAND_CHAT,
     {.name = "sample-top-p",
      .default_text = "0.95",
      .help = "draw from the most likely tokens that together reach this share; 1: from all",
      .offset = FIELD(sample_top_p),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_RUNS | KVW_COMMAND_ASK,
     {.name = "seed",
      .default_text = "0",
      .help = "of whatever is drawn: the same seed repeats it",
      .offset = FIELD(seed),
      .type = KV_CONFIG_UINT}},
    {KVW_COMMAND_RUNS,
     {.name = "attention",
      .default_text = "full",
      .help =
          "the attention method: full: every token attends to all before it; in answers, of "
          "the rows between sinks and window, pqcache: to those that the store finds by codes; "
          "oracle: to exactly the best; window: to the last; random: to any",
      .offset = FIELD(attention),
      .type = KV_CONFIG_STRING,
      .choices = "full|pqcache|oracle|window|random"}},
    /* Where the options of attention methods stand. */
    {KVW_COMMAND_COMPUTES, {.name = NULL}},
    {KVW_COMMAND_COMPUTES,
     {.name = "trace",
      .help = "a file for chrome://tracing or ui.perfetto.dev: computation, puts, queries, "
              "fetches and clustering side by side",
      .offset = FIELD(trace),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_ALL,
     {.name = "kv-type",
      .default_text = "fp16",
      .help = "the type that keys and values are rounded to",
      .offset = FIELD(kv_type),
      .type = KV_CONFIG_STRING,
      .choices = "fp16|bf16|fp32"}},
    {KVW_COMMAND_ALL,
     {.name = "store",
      .default_text = "embedded",
      .help = "HOST:PORT of storage nodes, comma-separated, or embedded: one in this process",
      .offset = FIELD(store),
      .type = KV_CONFIG_STRING}},
    {KVW_COMMAND_ALL,
     {.name = "memory",
      .default_text = "1G",
      .help = "memory of an embedded store",
      .offset = FIELD(memory),
      .type = KV_CONFIG_SIZE,
      .min = 16 << 20}},
    {KVW_COMMAND_COMPUTES,
     {.name = "device",
      .default_text = "auto",
      .help = "what computes; auto: the best there is",
      .offset = FIELD(device),
      .type = KV_CONFIG_STRING,
      .choices = "cpu|auto"}},
    {KVW_COMMAND_COMPUTES,
     {.name = "threads",
      .default_text = "0",
      .help = "threads that compute; 0: one per core",
      .offset = FIELD(threads),
      .type = KV_CONFIG_UINT,
      .max = KVW_THREAD_POOL_THREADS_MAX}},
    {KVW_COMMAND_ALL,
     {.name = "json",
      .help = "print one JSON object (chat: one per answer; bytes and nodes since its begin; "
              "eval: one per run; ask: one per answer, then one per method)",
      .offset = FIELD(json),
      .type = KV_CONFIG_FLAG}},
    {KVW_COMMAND_ALL,
     {.name = "help",
      .help = "print this, and end",
      .offset = FIELD(help),
      .type = KV_CONFIG_FLAG}},
};

enum {
    N_OPTIONS = sizeof(options) / sizeof(options[0])
};

static_assert((int)N_OPTIONS + 2 * (int)KVW_METHOD_OPTIONS_MAX <= (int)KVW_OPTIONS_MAX,
              "a command may take every option and every alias");

/* Appends the rows of attention methods' options; returns how many they are. */
static unsigned method_rows(enum kvw_command_set command, struct kv_option *rows)
{
    const struct kvw_method_option *option;
    unsigned n_rows = 0;

    for (unsigned i = 0; (option = kvw_method_option_at(i)) != NULL; i++) {
        /* Without a help it is an option of the command itself. */
        if (option->help == NULL || (option->is_budget && !(command & KVW_COMMAND_RUNS)))
            continue;
        const struct kv_option row = {
            .name = option->name,
            .default_text = option->fallback,
            .help = option->help,
            .offset = FIELD(method) + i * sizeof(union kvw_method_value),
            .type = option->is_flag ? KV_CONFIG_FLAG : KV_CONFIG_STRING,
            .choices = option->choices,
        };

        /* The alias first: in the environment the row that comes later has precedence. */
        if (option->alias != NULL) {
            rows[n_rows] = row;
            rows[n_rows].name = option->alias;
            rows[n_rows++].help = NULL;
        }
        rows[n_rows++] = row;
    }
    return n_rows;
}

void kvw_option_rows(enum kvw_command_set command, struct kv_option rows[KVW_OPTIONS_MAX + 1])
{
    unsigned n_rows = 0;

    for (unsigned i = 0; i < N_OPTIONS; i++) {
        if (!(options[i].commands & command))
            continue;
        if (options[i].option.name == NULL)
            n_rows += method_rows(command, rows + n_rows);
        else
            rows[n_rows++] = options[i].option;
    }
    rows[n_rows] = (struct kv_option){.name = NULL};
}

/* A prompt may be longer than a string of the table: --prompt is taken out of argv before. */
bool kvw_take_prompt(struct kvw_options *to, int *argc, char **argv)
{
    int kept = 1;

    for (int i = 1; i < *argc; i++) {
        if (strncmp(argv[i], "--prompt=", strlen("--prompt=")) == 0)
            to->prompt_text = argv[i] + strlen("--prompt=");
        else if (strcmp(argv[i], "--prompt") == 0) {
            if (++i == *argc)
                return false;
            to->prompt_text = argv[i];
        } else
            argv[kept++] = argv[i];
    }
    argv[kept] = NULL;
    *argc = kept;
    return true;
}
