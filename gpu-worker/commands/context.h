/* context.h - the inside of kvworker: all that a command works with.
 *
 *   main.c           the table of commands, signals, exit codes
 *   options.c        the table of options
 *   context.c        opens file, device, model, tokenizer, store, attention; progress; messages
 *   report.c         what a run cost, as text and as JSON
 *   info.c           info
 *   generate.c       generate
 *   chat.c           chat
 *   logits.c         logits
 *   eval.c           eval
 *   ask.c            ask
 *   needle_test.c    what eval and ask ask
 *
 * Threads: one.  Memory: a command opens what it needs and closes it.
 */
#ifndef KV_GPU_WORKER_COMMANDS_CONTEXT_H
#define KV_GPU_WORKER_COMMANDS_CONTEXT_H

#include "gpu-worker/commands/options.h"
#include "gpu-worker/engine/generate.h"
#include "gpu-worker/kvcache/embedded_node.h"
#include "gpu-worker/text/tokenizer.h"

enum {
    KVWORKER_DONE = 0,
    KVWORKER_FAILED = 1,
    KVWORKER_USAGE = 2, /* wrong usage, or input that cannot be used */

    KVWORKER_DETAIL_BYTES = 1024,
    KVWORKER_PROMPT_BYTES_MAX = 16 << 20,
};

struct kvworker {
    const struct kvworker_options *options;
    const char *command;

    struct kv_gguf *gguf;
    struct kv_device *device;
    struct kv_model *model;
    struct kv_tokenizer *tokenizer;
    struct kv_embedded *embedded;
    struct kv_client *client;
    struct kv_attention *attention;
    struct kv_forward *forward;
    struct kv_trace *trace; /* NULL: none was asked for */
    enum kv_dtype dtype;
    uint32_t capacity; /* tokens of the session */
    uint32_t sessions; /* of so many at once; 0: one */
};

/* The signal that came, SIGINT or SIGTERM; who has dealt with a SIGINT clears it. */
extern _Atomic int kvworker_stop;

/* Prints "kvworker: COMMAND: ..." to stderr. */
void kvworker_error(const struct kvworker *worker, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The steps of opening, in this order; each returns the exit status and tells what is wrong.
 *   file       the GGUF file
 *   model      device, model, tokenizer
 *   session    store, attention, forward pass, for `capacity` tokens at most */
int kvworker_open_file(struct kvworker *worker);
int kvworker_open_model(struct kvworker *worker);
int kvworker_open_session(struct kvworker *worker, uint32_t capacity);
/* The first part of a session: the store, for `capacity` tokens in each session; and the
 * second, which takes the place of one that was opened before. */
int kvworker_open_store(struct kvworker *worker, uint32_t capacity);
int kvworker_open_attention(struct kvworker *worker,
                            const struct kv_attention_row *row,
                            const struct kv_attention_options *options);
/* Attention and forward pass alone, if there are any. */
void kvworker_close_attention(struct kvworker *worker);
void kvworker_close(struct kvworker *worker);

/* "what: where: value" of a failed step of attention or forward pass. */
void kvworker_step_error(const struct kvworker *worker, kv_status_t status);

/* A line on a terminal that the next one overwrites; nothing if stderr is none. */
void kvworker_progress(const char *what, uint64_t done, uint64_t total);
void kvworker_progress_end(void);

/* The first n tokens of a session that has none; some n_steps will follow.  KV_CANCELLED: a
 * signal came. */
kv_status_t kvworker_prefill(const struct kvworker *worker,
                             const char *what,
                             const uint32_t *tokens,
                             uint32_t n,
                             uint32_t n_steps);

/* A whole file, "-" is standard input; `what` is for messages.  Free the text with free(). */
int kvworker_read_file(const struct kvworker *worker,
                       const char *what,
                       const char *path,
                       char **ret_text,
                       size_t *ret_bytes);

/* The prompt of --prompt or --prompt-file; free it with free(). */
int kvworker_read_prompt(const struct kvworker *worker, char **ret_text, size_t *ret_bytes);

/* What the options say about the method. */
int kvworker_attention_options(const struct kvworker *worker,
                               struct kv_attention_options *ret_options);

/* The sampler that the options describe. */
int kvworker_open_sampler(const struct kvworker *worker, struct kv_sampler **ret_sampler);

/* Tokens that a store of so much memory holds: in whole blocks, with their checksums, and an
 * eighth for what else the store needs. */
uint64_t kvworker_store_tokens(const kv_schema_t *schema, uint64_t memory);

enum kv_dtype kvworker_dtype(const struct kvworker_options *options);

/* report.c: after a run.  `text` is ended by a zero. */
void kvworker_report_text(const struct kvworker *worker,
                          const struct kv_generate_result *result);
void kvworker_report_json(const struct kvworker *worker,
                          const struct kv_generate_result *result,
                          const char *text,
                          const uint32_t *ids);

/* An answer as it comes: to stdout at once, or kept for --json. */
struct kvworker_answer {
    const struct kvworker *worker;
    bool is_first; /* of a text that the tokenizer began with a space */
    char *text;    /* kept; ended by a zero */
    size_t bytes, room;
    struct kv_utf8_stream *stream;
};
kv_status_t kvworker_answer_init(struct kvworker_answer *answer, const struct kvworker *worker);
void kvworker_answer_token(struct kvworker_answer *answer, uint32_t token);
void kvworker_answer_end(struct kvworker_answer *answer);
void kvworker_answer_fini(struct kvworker_answer *answer);

/* The commands; each returns the exit status. */
int kvworker_info_run(struct kvworker *worker);
int kvworker_generate_run(struct kvworker *worker);
int kvworker_chat_run(struct kvworker *worker);
int kvworker_logits_run(struct kvworker *worker);
int kvworker_eval_run(struct kvworker *worker);
int kvworker_ask_run(struct kvworker *worker);

#endif
