/* context.h - the state that kvworker's commands share, and functions to open it.
 *
 *   main.c           the table of commands, signals, exit codes
 *   options.c        the table of options
 *   context.c        opens file, device, model, tokenizer, store, attention; progress; messages
 *   report.c         what a run cost, as text and as JSON
 *   info.c           info
 *   generate.c       generate
 *   generate_batch.c generate --prompts, of a file that prompts_file.c reads
 *   chat.c           chat
 *   prefill.c        prefill
 *   decode.c         decode
 *   conversation.c   sessions that other processes go on with
 *   logits.c         logits
 *   eval.c           eval
 *   ask.c            ask
 *   bench.c          bench, of sessions that bench_rows.c makes
 *   needle_test.c    questions of eval and ask
 *
 * Threads: one.  Memory: a command opens what it needs and closes it.
 */
#ifndef KV_GPU_WORKER_COMMANDS_CONTEXT_H
#define KV_GPU_WORKER_COMMANDS_CONTEXT_H

#include "gpu-worker/commands/options.h"
#include "gpu-worker/engine/generate.h"
#include "gpu-worker/eval/plan.h"
#include "gpu-worker/kvcache/embedded_node.h"
#include "gpu-worker/text/tokenizer.h"

enum {
    KVW_DONE = 0,
    KVW_FAILED = 1,
    KVW_USAGE = 2, /* wrong usage, or input that cannot be used */

    KVW_DETAIL_BYTES = 1024,
    KVW_PROMPT_BYTES_MAX = 16 << 20,
};

struct kvw_context {
    const struct kvw_options *options;
    const char *command;

    struct kvw_gguf *gguf;
    struct kvw_device *device;
    struct kvw_model *model;
    struct kvw_tokenizer *tokenizer;
    struct kvw_embedded *embedded;
    struct kv_client *client;
    struct kvw_method *attention;
    struct kvw_forward *forward;
    struct kvw_trace *trace; /* NULL: none requested */
    enum kv_dtype dtype;
    uint32_t capacity;       /* tokens of the session */
    uint32_t sessions;       /* open at the same time; 0: one */
    uint64_t session_tokens; /* of all of them together; 0: `capacity` each */
    const struct kvw_session_share
        *share; /* of the next session that is opened; NULL: a new one */
    bool is_kept, reuses, publishes, opens_later; /* as in struct kvw_session_setup */
    uint32_t kv_head_begin, n_kv_heads;
    char *salt; /* (salt_bytes) of --salt-file; NULL: none */
    size_t salt_bytes;
};

/* The signal received, SIGINT or SIGTERM; code that has handled a SIGINT clears it. */
extern _Atomic int kvw_stop;

/* Prints "kvworker: COMMAND: ..." to stderr. */
void kvw_error(const struct kvw_context *worker, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Open the parts, in this order.  Return the exit status after printing what is wrong.
 *   file       the GGUF file
 *   model      device, model, tokenizer
 *   session    store, attention, forward pass, for `capacity` tokens at most, of which the
 *              first (n_prompt) are known; n_prompt 0: none is */
int kvw_open_file(struct kvw_context *worker);
int kvw_open_model(struct kvw_context *worker);
int kvw_open_session(struct kvw_context *worker,
                     uint32_t capacity,
                     const uint32_t *prompt,
                     uint32_t n_prompt);
/* Open a session in two parts: first the store, for `capacity` tokens in each session, then the
 * attention, which replaces one that was opened before. */
int kvw_open_store(struct kvw_context *worker, uint32_t capacity);
int kvw_open_attention(struct kvw_context *worker,
                       const struct kvw_method_ops *ops,
                       const struct kvw_method_options *options,
                       const uint32_t *prompt,
                       uint32_t n_prompt);
/* The same, without a message. */
kv_status_t kvw_try_attention(struct kvw_context *worker,
                              const struct kvw_method_ops *ops,
                              const struct kvw_method_options *options,
                              const uint32_t *prompt,
                              uint32_t n_prompt,
                              char *detail,
                              size_t detail_bytes);
/* Creates a method with a session of `capacity` tokens, beside worker->attention: the caller's. */
kv_status_t kvw_create_method(const struct kvw_context *worker,
                              const struct kvw_method_ops *ops,
                              const struct kvw_method_options *options,
                              uint32_t capacity,
                              const uint32_t *prompt,
                              uint32_t n_prompt,
                              struct kvw_method **ret_attention,
                              char *detail,
                              size_t detail_bytes);
/* Closes attention and client, and connects to those nodes of the store that are up.  Sessions and
 * objects of the nodes that are down are then elsewhere. */
kv_status_t kvw_reconnect(struct kvw_context *worker, char *detail, size_t detail_bytes);
/* Closes attention and forward pass, if they are open. */
void kvw_close_attention(struct kvw_context *worker);
void kvw_close(struct kvw_context *worker);

/* Returns what messages about the store advise after a failure; "": nothing. */
const char *kvw_next_step(kv_status_t status);
/* "what: where: value" of a failed step of attention or forward pass. */
void kvw_step_error(const struct kvw_context *worker, kv_status_t status);

/* After a step has failed: if rows that the session began with are corrupt, the nodes are to drop
 * what they keep of the prompt; says so if they do. */
void kvw_drop_corrupt(const struct kvw_context *worker,
                      kv_status_t status,
                      const uint32_t *prompt);

/* Shows progress in one line on stderr, which the next call overwrites; does nothing if stderr
 * is not a terminal. */
void kvw_progress(const char *what, uint64_t done, uint64_t total);
void kvw_progress_end(void);

/* Computes the first n tokens of an empty session; about n_steps decode steps will follow.
 * KV_CANCELLED: a signal was received. */
kv_status_t kvw_prefill(const struct kvw_context *worker,
                        const char *what,
                        const uint32_t *tokens,
                        uint32_t n,
                        uint32_t n_steps);

/* Reads a whole file; "-": standard input.  `what` is for messages.  Free the text with
 * free(). */
int kvw_read_file(const struct kvw_context *worker,
                  const char *what,
                  const char *path,
                  char **ret_text,
                  size_t *ret_bytes);

/* Reads the prompt of --prompt or --prompt-file, 0-terminated; free it with free(). */
int kvw_read_prompt(const struct kvw_context *worker, char **ret_text, size_t *ret_bytes);

/* Encodes a prompt as it is (--raw), or as a user's turn of a conversation.  Free *ret_tokens with
 * free(). */
int kvw_encode_prompt(const struct kvw_context *worker,
                      const char *text,
                      size_t bytes,
                      uint32_t **ret_tokens,
                      size_t *ret_count);

/* Fills the method's options from the command's. */
int kvw_attention_options(const struct kvw_context *worker,
                          struct kvw_method_options *ret_options);

/* Returns false after a message if an option was given on the command line that has no effect
 * on any of `runs` (n), or if options of one contradict each other. */
bool kvw_options_are_used(const struct kvw_context *worker,
                          const struct kvw_planned_run *runs,
                          size_t n);

/* Creates the sampler that the options describe. */
int kvw_open_sampler(const struct kvw_context *worker, struct kvw_sampler **ret_sampler);

/* Returns how many tokens a store of `memory` bytes holds: in whole blocks, with checksums,
 * codes, and copies of keys in 4 bits, and with an eighth for everything else. */
uint64_t kvw_store_tokens(const kv_schema_t *schema, uint64_t memory);

enum kv_dtype kvw_dtype(const struct kvw_options *options);

/* report.c: prints the result of a run.  `text` is 0-terminated. */
void kvw_report_text(const struct kvw_context *worker,
                     const struct kvw_generate_result *result);
void kvw_report_json(const struct kvw_context *worker,
                     const struct kvw_generate_result *result,
                     const char *text,
                     const uint32_t *ids);

/* An answer as it is generated: kept, and printed at once unless --json is given, or `prints` is set
 * otherwise after kvw_answer_init(). */
struct kvw_answer {
    const struct kvw_context *worker;
    bool prints;
    bool is_first;  /* of a text that the tokenizer began with a space */
    bool has_begun; /* a token has come, with or without text of its own */
    char *text;     /* kept; 0-terminated */
    size_t bytes, room;
    struct kvw_utf8_stream *stream;
};
kv_status_t kvw_answer_init(struct kvw_answer *answer, const struct kvw_context *worker);
void kvw_answer_token(struct kvw_answer *answer, uint32_t token);
void kvw_answer_end(struct kvw_answer *answer);
/* Ends the line of one that breaks off, so that what is said about it has its own. */
void kvw_answer_break_off(struct kvw_answer *answer);
void kvw_answer_fini(struct kvw_answer *answer);

/* The commands; each returns the exit status. */
int kvw_info_run(struct kvw_context *worker);
int kvw_generate_run(struct kvw_context *worker);
int kvw_generate_batch(struct kvw_context *worker); /* of --prompts */
int kvw_bench_run(struct kvw_context *worker);
int kvw_chat_run(struct kvw_context *worker);
int kvw_prefill_run(struct kvw_context *worker);
int kvw_decode_run(struct kvw_context *worker);
int kvw_logits_run(struct kvw_context *worker);
int kvw_eval_run(struct kvw_context *worker);
int kvw_ask_run(struct kvw_context *worker);

#endif
