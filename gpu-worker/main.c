/* main.c - kvworker: the table of commands, signals, exit codes. */
#include "gpu-worker/commands/context.h"
#include "gpu-worker/commands/options_private.h"
#include "kernels/isa.h"
#include "kvserver/base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct command {
    const char *name;
    enum kvw_command_set bit;
    const char *summary, *more;
    int (*run)(struct kvw_context *worker);
} commands[] = {
    {"info", KVW_COMMAND_INFO, "show what a model file contains and how many tokens fit",
     "Shows what the file contains, the bytes of KV cache per token, and how many\n"
     "tokens fit into memory and store.",
     kvw_info_run},
    {"generate", KVW_COMMAND_GENERATE, "answer one prompt",
     "Streams the answer to stdout, then prints timing and traffic to stderr.\n"
     "Ctrl-C ends the answer cleanly.",
     kvw_generate_run},
    {"chat", KVW_COMMAND_CHAT, "hold a conversation, one line at a time",
     "Reads lines from standard input and answers them.  Ctrl-C ends the current\n"
     "answer; between answers it ends the conversation, as Ctrl-D does.  With\n"
     "--session, a later chat of that name goes on with it.",
     kvw_chat_run},
    {"prefill", KVW_COMMAND_PREFILL, "store the rows of a prompt, for kvworker decode",
     "Computes the prompt and stores its rows in a session.  kvworker decode with the\n"
     "same --session answers it, and may start at once.  After that the session lasts\n"
     "for one lease.",
     kvw_prefill_run},
    {"decode", KVW_COMMAND_DECODE, "answer the prompt of a kvworker prefill",
     "Reads the session's rows layer by layer, while others may still come, and\n"
     "answers.  What does not come is computed here.",
     kvw_decode_run},
    {"ask", KVW_COMMAND_ASK, "compare attention methods by questions about one long text",
     "Puts needle sentences into the text and asks the model to complete each of\n"
     "them.  Each method reads the text once; every question runs in a fork of that\n"
     "session.",
     kvw_ask_run},
    {"eval", KVW_COMMAND_EVAL, "measure the quality of attention methods on texts",
     "Measures perplexity and recall over the text, without a chat template, and\n"
     "needle sentences found, for each method, budget and seed.  Losses are relative\n"
     "to full attention.",
     kvw_eval_run},
    {"bench", KVW_COMMAND_BENCH, "time attention methods against context and batch",
     "Fills sessions with rows of the text, repeated as often as it takes and rotated\n"
     "to their positions, and times decode steps of each method, context and batch.\n"
     "Every figure is the median of --steps passes.",
     kvw_bench_run},
    {"logits", KVW_COMMAND_LOGITS, "write the logits of all tokens at every position of a text",
     "Processes the prompt without a chat template.", kvw_logits_run},
};

enum {
    N_COMMANDS = sizeof(commands) / sizeof(commands[0])
};

/* The first signal stops the command in order, the second exits at once. */
static void on_signal(int number)
{
    if (kvw_stop)
        _exit(128 + number);
    kvw_stop = number;
}

static void catch_signals(void)
{
    /* No SA_RESTART: a signal must end the wait for a line of chat. */
    const struct sigaction stop = {.sa_handler = on_signal};
    const struct sigaction ignore = {.sa_handler = SIG_IGN};

    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    sigaction(SIGPIPE, &ignore, NULL);
}

static void print_help(void)
{
    printf("Usage: kvworker COMMAND --model FILE [OPTION]...\n"
           "\n"
           "Runs language models with their KV cache in TopKV.\n"
           "\n");
    for (unsigned i = 0; i < N_COMMANDS; i++)
        printf("  %-10s %s\n", commands[i].name, commands[i].summary);
    printf("\n"
           "kvworker COMMAND --help lists the options of a command.  Options can also be\n"
           "set in the environment: KVWORKER_MODEL, KVWORKER_THREADS, ...\n"
           "kvworker --version prints the version.\n"
           "Exit status: 0 success, 1 failure, 2 wrong usage or unusable input.\n");
}

static void print_command_help(const struct command *command, const struct kv_option *rows)
{
    printf("Usage: kvworker %s --model FILE [OPTION]...\n\n%s\n\n", command->name,
           command->more);
    kv_config_help(rows, stdout);
}

static const struct command *find_command(const char *name)
{
    for (unsigned i = 0; i < N_COMMANDS; i++)
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    return NULL;
}

/* argv begins with the command.  Returns the exit status. */
static int run(struct kvw_context *worker, const struct command *command, int argc, char **argv)
{
    static struct kvw_options values;
    struct kv_option rows[KVW_OPTIONS_MAX + 1];
    char detail[KVW_DETAIL_BYTES] = "";

    kvw_option_rows(command->bit, rows);
    worker->command = command->name;
    worker->options = &values;
    kv_config_defaults(rows, &values);
    if (kvw_read_options(rows, &values, &argc, argv, detail, sizeof(detail)) != KV_OK) {
        kvw_error(worker, "%s", detail);
        return KVW_USAGE;
    }
    if (argc > 1) {
        kvw_error(worker, "option: unexpected: %s", argv[1]);
        return KVW_USAGE;
    }
    if (values.help) {
        print_command_help(command, rows);
        return KVW_DONE;
    }
    if (command->bit & KVW_COMMAND_RUNS) {
        struct kvw_planned_run only = {.ops = kvw_method_find(values.attention)};

        if (kvw_attention_options(worker, &only.options) != KVW_DONE ||
            !kvw_options_are_used(worker, &only, 1))
            return KVW_USAGE;
    }
    return command->run(worker);
}

int main(int argc, char **argv)
{
    struct kvw_context worker = {.gguf = NULL};
    const struct command *command;
    int outcome = KVW_USAGE;

    kv_log_set_program("kvworker");
    kv_log_set_level(KV_LOG_WARN);
    kvw_gguf_guard("kvworker");
    catch_signals();
    /* Only in these places: a later -h may be the value of an option. */
    for (int i = 1; i < argc && i < 3; i++)
        if (strcmp(argv[i], "-h") == 0)
            argv[i] = "--help";
    if (!kv_isa_named()) {
        kvw_error(&worker, "KV_ISA: not one of scalar, avx2, avx512: %s", getenv("KV_ISA"));
    } else if (argc < 2) {
        kvw_error(&worker, "command: missing: kvworker --help lists them");
    } else if (strcmp(argv[1], "--help") == 0) {
        print_help();
        outcome = KVW_DONE;
    } else if (strcmp(argv[1], "--version") == 0) {
        printf("kvworker %s\n", TOPKV_VERSION);
        outcome = KVW_DONE;
    } else {
        command = find_command(argv[1]);
        if (command == NULL)
            kvw_error(&worker, "command: unknown: %s: kvworker --help lists them", argv[1]);
        else
            outcome = run(&worker, command, argc - 1, argv + 1);
    }
    kvw_close(&worker);

    if (fflush(stdout) != 0 || ferror(stdout)) {
        kvw_error(&worker, "standard output: write failed");
        outcome = KVW_FAILED;
    }
    return outcome;
}
