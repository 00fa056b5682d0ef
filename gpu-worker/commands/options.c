/* The options of kvworker's commands: one table; each command takes some of its rows. */
#include "gpu-worker/commands/options_private.h"

#include "gpu-worker/base/thread_pool.h"
#include "gpu-worker/engine/batch.h"
#include "kvserver/base/idle.h"
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
      .help = "model, a GGUF file",
      .offset = FIELD(model),
      .type = KV_CONFIG_STRING,
      .value = "FILE"}},
    {KVW_COMMAND_SESSIONS,
     {.name = "session",
      .default_text = "",
      .help =
          "name of a session in the store, which another kvworker can continue or has begun; "
          "empty: none",
      .offset = FIELD(session),
      .type = KV_CONFIG_STRING,
      .value = "NAME"}},
    {KVW_COMMAND_PREFILL,
     {.name = "kv-heads",
      .default_text = "",
      .help = "store only the rows of KV heads A to B - 1; another kvworker prefill stores the "
              "others; empty: all",
      .offset = FIELD(kv_heads),
      .type = KV_CONFIG_STRING,
      .value = "A-B"}},
    {KVW_COMMAND_GENERATE | KVW_COMMAND_PREFILL,
     {.name = "prompt",
      .help = "prompt text",
      .offset = FIELD(prompt),
      .type = KV_CONFIG_TEXT}},
    {KVW_COMMAND_GENERATE | KVW_COMMAND_LOGITS | KVW_COMMAND_PREFILL,
     {.name = "prompt-file",
      .help = "file with the prompt; -: standard input",
      .offset = FIELD(prompt_file),
      .type = KV_CONFIG_STRING,
      .value = "FILE"}},
    {KVW_COMMAND_GENERATE,
     {.name = "prompts",
      .help = "file with many prompts, answered together: a JSON object a line, {\"prompt\": "
              "TEXT}, "
              "and \"id\" and \"max_tokens\" if wanted; -: standard input",
      .offset = FIELD(prompts),
      .type = KV_CONFIG_STRING,
      .value = "FILE"}},
    {KVW_COMMAND_GENERATE,
     {.name = "batch",
      .default_text = "8",
      .help = "--prompts: how many are answered at the same time; the others wait",
      .offset = FIELD(batch),
      .type = KV_CONFIG_UINT,
      .min = 1,
      .max = KVW_BATCH_SEQUENCES_MAX,
      .needs = "prompts"}},
    {KVW_COMMAND_GENERATE,
     {.name = "batch-tokens",
      .default_text = "512",
      .help = "--prompts: tokens that passes under way compute at most; what answers leave of "
              "it is for prompts, in chunks",
      .offset = FIELD(batch_tokens),
      .type = KV_CONFIG_UINT,
      .min = KVW_FORWARD_CHUNK + 1,
      .max = 1 << 20,
      .needs = "prompts"}},
    {KVW_COMMAND_BENCH,
     {.name = "contexts",
      .default_text = "2K,8K,32K",
      .help = "tokens that each sequence has, comma-separated; K and M: 1,024 and 1,048,576",
      .offset = FIELD(contexts),
      .type = KV_CONFIG_STRING,
      .value = "TOKENS,..."}},
    {KVW_COMMAND_BENCH,
     {.name = "batches",
      .default_text = "1",
      .help = "sequences that compute together, comma-separated",
      .offset = FIELD(batches),
      .type = KV_CONFIG_STRING,
      .value = "N,..."}},
    {KVW_COMMAND_BENCH,
     {.name = "steps",
      .default_text = "24",
      .help = "tokens of each sequence that are timed",
      .offset = FIELD(steps),
      .type = KV_CONFIG_UINT,
      .min = 1,
      .max = 4096}},
    {KVW_COMMAND_BENCH,
     {.name = "recorded",
      .default_text = "2048",
      .help = "tokens of the text that the model computes, in whole chunks of 256; longer "
              "contexts repeat their rows",
      .offset = FIELD(recorded),
      .type = KV_CONFIG_UINT,
      .min = KVW_FORWARD_CHUNK,
      .max = KV_TOKENS_MAX}},
    {KVW_COMMAND_BENCH,
     {.name = "svg",
      .help = "picture to write: time per token, and tokens per second, against the context",
      .offset = FIELD(svg),
      .type = KV_CONFIG_STRING,
      .value = "FILE"}},
    {KVW_COMMAND_BENCH,
     {.name = "kv-memory",
      .default_text = "0",
      .help = "memory for device rows: no more sequences compute together than have room; 0: "
              "no limit",
      .offset = FIELD(kv_memory),
      .type = KV_CONFIG_SIZE}},
    {KVW_COMMAND_BENCH,
     {.name = "groups",
      .default_text = "2",
      .help = "2: half of the sequences compute while the others ask the store; 1: all at once",
      .offset = FIELD(groups),
      .type = KV_CONFIG_UINT,
      .min = 1,
      .max = KVW_BATCH_GROUPS_MAX}},
    {KVW_COMMAND_BENCH,
     {.name = "methods",
      .default_text = "full,pqcache",
      .help = "attention methods, comma-separated, each NAME[:OPTION=VALUE...]; full is always "
              "included",
      .offset = FIELD(methods),
      .type = KV_CONFIG_STRING,
      .value = "METHOD,..."}},
    {KVW_COMMAND_BENCH,
     {.name = "budgets",
      .default_text = "k=1024",
      .help = "rows that a step attends to, comma-separated: a share of all rows so far, or "
              "k=ROWS besides sinks and window",
      .offset = FIELD(budgets),
      .type = KV_CONFIG_STRING,
      .value = "BUDGET,..."}},
    {KVW_COMMAND_GENERATE,
     {.name = "kv-memory",
      .default_text = "0",
      .help = "--prompts: memory for device rows; prompts that would exceed it wait. A "
              "prompt needs all its rows, an answer what its method keeps; 0: no limit",
      .offset = FIELD(kv_memory),
      .type = KV_CONFIG_SIZE,
      .needs = "prompts"}},
    {KVW_COMMAND_GENERATE,
     {.name = "groups",
      .default_text = "2",
      .help =
          "--prompts: 2: half of the answers compute while the others ask the store; 1: all at "
          "once",
      .offset = FIELD(groups),
      .type = KV_CONFIG_UINT,
      .min = 1,
      .max = KVW_BATCH_GROUPS_MAX,
      .needs = "prompts"}},
    {KVW_COMMAND_GENERATE | KVW_COMMAND_PREFILL,
     {.name = "raw",
      .help = "use no chat template: the model continues the prompt",
      .offset = FIELD(raw),
      .type = KV_CONFIG_FLAG}},
    {KVW_COMMAND_LOGITS,
     {.name = "out",
      .help = "NumPy file to write, float32: for each position, the logits of all tokens",
      .offset = FIELD(out),
      .type = KV_CONFIG_STRING,
      .value = "FILE"}},
    {KVW_COMMAND_LOGITS,
     {.name = "from",
      .default_text = "0",
      .help = "first position written; earlier tokens are processed in chunks, later ones one "
              "by one",
      .offset = FIELD(from),
      .type = KV_CONFIG_UINT,
      .max = KV_TOKENS_MAX}},
    {KVW_COMMAND_EVAL,
     {.name = "text-file",
      .help = "text files, comma-separated; -: standard input",
      .offset = FIELD(text_file),
      .type = KV_CONFIG_STRING,
      .value = "FILE,..."}},
    {KVW_COMMAND_ASK | KVW_COMMAND_BENCH,
     {.name = "text-file",
      .help = "text file; -: standard input",
      .offset = FIELD(text_file),
      .type = KV_CONFIG_STRING,
      .value = "FILE"}},
    {KVW_COMMAND_EVAL,
     {.name = "tokens",
      .default_text = "4096",
      .help = "maximum number of tokens of the text; 0: all",
      .offset = FIELD(tokens),
      .type = KV_CONFIG_UINT,
      .max = KV_TOKENS_MAX}},
    {KVW_COMMAND_ASK,
     {.name = "tokens",
      .default_text = "7000",
      .help =
          "maximum number of tokens of the text; fewer if the model's context is full; 0: all",
      .offset = FIELD(tokens),
      .type = KV_CONFIG_UINT,
      .max = KV_TOKENS_MAX}},
    {KVW_COMMAND_EVAL,
     {.name = "from",
      .default_text = "2048",
      .help = "tokens processed with full attention; each later token is a decode step whose "
              "prediction is scored",
      .offset = FIELD(from),
      .type = KV_CONFIG_UINT,
      .max = KV_TOKENS_MAX}},
    {KVW_COMMAND_EVAL,
     {.name = "methods",
      .default_text = "full,oracle,window,random",
      .help = "attention methods, comma-separated, each NAME[:OPTION=VALUE...]; full is always "
              "included",
      .offset = FIELD(methods),
      .type = KV_CONFIG_STRING,
      .value = "METHOD,..."}},
    {KVW_COMMAND_ASK,
     {.name = "methods",
      .default_text = "full,pqcache",
      .help = "attention methods, comma-separated, each NAME[:OPTION=VALUE...]; full is always "
              "included",
      .offset = FIELD(methods),
      .type = KV_CONFIG_STRING,
      .value = "METHOD,..."}},
    {KVW_COMMAND_ASK,
     {.name = "budgets",
      .default_text = "1/10",
      .help =
          "rows that a step attends to: a share of all rows so far, or k=ROWS besides sinks "
          "and window",
      .offset = FIELD(budgets),
      .type = KV_CONFIG_STRING,
      .value = "BUDGET"}},
    {KVW_COMMAND_EVAL,
     {.name = "budgets",
      .default_text = "1/10",
      .help = "rows that a step attends to, comma-separated: a share of all rows so far, or "
              "k=ROWS besides sinks and window",
      .offset = FIELD(budgets),
      .type = KV_CONFIG_STRING,
      .value = "BUDGET,..."}},
    {KVW_COMMAND_EVAL,
     {.name = "seeds",
      .default_text = "0",
      .help = "seeds, comma-separated: a method that uses a seed runs once with each",
      .offset = FIELD(seeds),
      .type = KV_CONFIG_STRING,
      .value = "N,..."}},
    {KVW_COMMAND_EVAL | KVW_COMMAND_ASK,
     {.name = "needles",
      .help = "file of needle sentences, one per line, BEGINNING|COMPLETION: they are spread "
              "through the text, and the model must complete each beginning",
      .offset = FIELD(needles),
      .type = KV_CONFIG_STRING,
      .value = "FILE"}},
    {KVW_COMMAND_EVAL,
     {.name = "needle-tokens",
      .default_text = "0",
      .help = "maximum number of tokens of the text in the needle test; 0: as --tokens",
      .offset = FIELD(needle_tokens),
      .type = KV_CONFIG_UINT,
      .max = KV_TOKENS_MAX,
      .needs = "needles"}},
    {KVW_COMMAND_EVAL,
     {.name = "long-context",
      .help = "measure at the share of rows that k = 1024 is of 128K tokens: --from 6500 "
              "--tokens 6884 --budgets k=51",
      .offset = FIELD(long_context),
      .type = KV_CONFIG_FLAG}},
    {KVW_COMMAND_EVAL,
     {.name = "against",
      .help =
          "an entry of --methods: also print how much more the others lose, token by token, "
          "at the same budget and seed",
      .offset = FIELD(against),
      .type = KV_CONFIG_STRING,
      .value = "METHOD"}},
    {KVW_COMMAND_EVAL,
     {.name = "per-token",
      .help = "write loss and KL of every token to a new file, as comma-separated values",
      .offset = FIELD(per_token),
      .type = KV_CONFIG_STRING,
      .value = "FILE"}},
    {KVW_COMMAND_EVAL,
     {.name = "needles-only",
      .help = "run only the needle test, without perplexity",
      .offset = FIELD(needles_only),
      .type = KV_CONFIG_FLAG,
      .needs = "needles"}},
    {KVW_COMMAND_EVAL,
     {.name = "csv",
      .help = "print comma-separated values",
      .offset = FIELD(csv),
      .type = KV_CONFIG_FLAG}},
    {KVW_COMMAND_SESSIONS,
     {.name = "fresh",
      .help = "compute the whole prompt, even if the store has rows of it",
      .offset = FIELD(fresh),
      .type = KV_CONFIG_FLAG}},
    {KVW_COMMAND_SESSIONS,
     {.name = "publish-tokens",
      .help = "also send the tokens of stored blocks, for readers of the nodes' events "
              "(kvserver --events)",
      .offset = FIELD(publish_tokens),
      .type = KV_CONFIG_FLAG,
      .needs = "store"}},
    {KVW_COMMAND_ANSWERS,
     {.name = "max-tokens",
      .default_text = "512",
      .help = "maximum number of tokens in an answer",
      .offset = FIELD(max_tokens),
      .type = KV_CONFIG_UINT,
      .min = 1,
      .max = KV_TOKENS_MAX}},
    {KVW_COMMAND_ASK,
     {.name = "max-tokens",
      .default_text = "16",
      .help = "maximum number of tokens in an answer, which also ends with its first line",
      .offset = FIELD(max_tokens),
      .type = KV_CONFIG_UINT,
      .min = 1,
      .max = KV_TOKENS_MAX}},
    {KVW_COMMAND_ANSWERS,
     {.name = "temperature",
      .default_text = "0",
      .help = "sampling temperature, 0 to 100; 0: always the most likely token",
      .offset = FIELD(temperature),
      .type = KV_CONFIG_STRING,
      .value = "T"}},
    {KVW_COMMAND_ANSWERS,
     {.name = "sample-top-k",
      .default_text = "40",
      .help = "sample from this many of the most likely tokens; 0: from all",
      .offset = FIELD(sample_top_k),
      .type = KV_CONFIG_UINT,
      .max = 1 << 24,
      .needs = "temperature"}},
    {KVW_COMMAND_ANSWERS,
     {.name = "sample-top-p",
      .default_text = "0.95",
      .help = "sample from the most likely tokens that together reach this probability; 1: "
              "from all",
      .offset = FIELD(sample_top_p),
      .type = KV_CONFIG_STRING,
      .value = "P",
      .needs = "temperature"}},
    {KVW_COMMAND_RUNS | KVW_COMMAND_ASK | KVW_COMMAND_BENCH,
     {.name = "seed",
      .default_text = "0",
      .help = "seed of all random choices",
      .offset = FIELD(seed),
      .type = KV_CONFIG_UINT}},
    {KVW_COMMAND_RUNS,
     {.name = "attention",
      .default_text = "full",
      .help =
          "attention method. full: all earlier tokens. The others attend, in decode steps, to "
          "sinks, window and selected rows between them: pqcache: rows the store finds by "
          "code; "
          "oracle: exact top-k; oracle+rest: pqcache, but exact top-k; window: the most "
          "recent; random: a random sample; speculated: pqcache, but a guess of the query "
          "picks "
          "the candidates",
      .offset = FIELD(attention),
      .type = KV_CONFIG_STRING,
      .choices = "full|pqcache|oracle|oracle+rest|window|random|speculated"}},
    /* The options of attention methods are inserted here. */
    {KVW_COMMAND_METHODS, {.name = NULL}},
    {KVW_COMMAND_COMPUTES,
     {.name = "trace",
      .help =
          "trace file to write, for chrome://tracing or ui.perfetto.dev: computation, puts, "
          "queries, fetches and clustering side by side",
      .offset = FIELD(trace),
      .type = KV_CONFIG_STRING,
      .value = "FILE"}},
    {KVW_COMMAND_ALL,
     {.name = "kv-type",
      .default_text = "fp16",
      .help = "data type of keys and values in the cache",
      .offset = FIELD(kv_type),
      .type = KV_CONFIG_STRING,
      .choices = "fp16|bf16|fp32"}},
    {KVW_COMMAND_ALL,
     {.name = "store",
      .default_text = "embedded",
      .help = "storage nodes, HOST:PORT or NAME=HOST:PORT, comma-separated; embedded: one node "
              "in this process",
      .offset = FIELD(store),
      .type = KV_CONFIG_TEXT,
      .value = "embedded|HOST:PORT,..."}},
    {KVW_COMMAND_COMPUTES,
     {.name = "poll",
      .default_text = "adaptive",
      .help =
          "while it waits for nodes: busy: never sleep; sleep: at once, and have to be woken; "
          "adaptive: look for as long as answers usually take",
      .offset = FIELD(poll),
      .type = KV_CONFIG_STRING,
      .choices = KV_IDLE_CHOICES}},
    {KVW_COMMAND_COMPUTES,
     {.name = "progress",
      .default_text = "caller",
      .help =
          "who moves rows to and from nodes: caller: the thread that computes, between layers; "
          "thread: one beside it, too, for which it needs a core",
      .offset = FIELD(progress),
      .type = KV_CONFIG_STRING,
      .choices = "caller|thread"}},
    /* Sessions of bench have no names. */
    {KVW_COMMAND_COMPUTES & ~(unsigned)KVW_COMMAND_BENCH,
     {.name = "salt-file",
      .default_text = "",
      .help =
          "file with the tenant's secret, on which the names of prompts depend; empty: none",
      .offset = FIELD(salt_file),
      .type = KV_CONFIG_STRING,
      .value = "FILE"}},
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
      .help = "device that computes; auto: the best available",
      .offset = FIELD(device),
      .type = KV_CONFIG_STRING,
      .choices = "cpu|auto"}},
    {KVW_COMMAND_COMPUTES,
     {.name = "threads",
      .default_text = "0",
      .help = "number of compute threads; 0: one per core",
      .offset = FIELD(threads),
      .type = KV_CONFIG_UINT,
      .max = KVW_THREAD_POOL_THREADS_MAX}},
    {KVW_COMMAND_ALL,
     {.name = "json",
      .help =
          "print one JSON object (chat: one per answer, with bytes and node counters since the "
          "conversation began; eval, bench: one per run; ask: one per answer, then one per "
          "method)",
      .offset = FIELD(json),
      .type = KV_CONFIG_FLAG}},
    {KVW_COMMAND_ALL,
     {.name = "help",
      .help = "print this help and exit",
      .offset = FIELD(help),
      .type = KV_CONFIG_FLAG}},
};

enum {
    N_OPTIONS = sizeof(options) / sizeof(options[0])
};

static_assert((int)N_OPTIONS + 2 * (int)KVW_METHOD_OPTIONS_MAX <= (int)KVW_OPTIONS_MAX,
              "a command may have every option and every alias");

/* Appends the rows of attention methods' options; returns their number. */
static unsigned method_rows(enum kvw_command_set command, struct kv_option *rows)
{
    const struct kvw_method_option *option;
    unsigned n_rows = 0;

    for (unsigned i = 0; (option = kvw_method_option_at(i)) != NULL; i++) {
        /* An option without help text is in the table above. */
        if (option->help == NULL || (option->is_budget && !(command & KVW_COMMAND_RUNS)))
            continue;
        const struct kv_option row = {
            .name = option->name,
            .default_text = option->fallback,
            .help = option->help,
            .offset = FIELD(method) + i * sizeof(union kvw_method_value),
            .type = option->is_flag ? KV_CONFIG_FLAG : KV_CONFIG_STRING,
            .choices = option->choices,
            .value = option->value,
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

kv_status_t kvw_read_options(const struct kv_option *rows,
                             struct kvw_options *to,
                             int *argc,
                             char **argv,
                             char *detail,
                             size_t detail_bytes)
{
    enum {
        NOT_GIVEN = 2 /* the first byte of no string, and no bool */
    };
    union kvw_method_value before[KVW_METHOD_OPTIONS_MAX];
    const char *prompt;
    kv_status_t status;

    /* Defaults of these are kvw_method_defaults: as texts they would replace what a preset sets. */
    memset(to->method, 0, sizeof(to->method));
    status = kv_config_environment(rows, to, "KVWORKER", detail, detail_bytes);
    if (status != KV_OK)
        return status;
    prompt = to->prompt;
    to->prompt = NULL;
    memcpy(before, to->method, sizeof(before));
    for (unsigned i = 0; i < KVW_METHOD_OPTIONS_MAX; i++)
        to->method[i].text[0] = NOT_GIVEN;
    status = kv_config_arguments(rows, to, argc, argv, detail, detail_bytes);
    for (unsigned i = 0; i < KVW_METHOD_OPTIONS_MAX; i++) {
        to->is_given[i] = to->method[i].text[0] != NOT_GIVEN;
        if (!to->is_given[i])
            to->method[i] = before[i];
    }
    /* A prompt file has precedence over a prompt from the environment. */
    if (to->prompt == NULL && to->prompt_file[0] == '\0' && prompt != NULL && prompt[0] != '\0')
        to->prompt = prompt;
    return status;
}
