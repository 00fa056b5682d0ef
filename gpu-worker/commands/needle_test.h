/* needle_test.h - the sentences of --needles as questions about one text.
 *
 * All of them lie in the text; a question is the text with one's beginning behind it, as a
 * user's turn that is left open, or as it is where the model was never taught turns.  So all
 * questions begin with the same tokens, which pass once; an answer is judged as it comes.
 *
 * Threads: one.  Memory: read/free.
 */
#ifndef KV_GPU_WORKER_COMMANDS_NEEDLE_TEST_H
#define KV_GPU_WORKER_COMMANDS_NEEDLE_TEST_H

#include "gpu-worker/commands/context.h"
#include "gpu-worker/eval/needles.h"

struct kvworker_question {
    uint32_t *tokens; /* (count, and room for an answer) */
    size_t count;
};

/* All zeros: none yet. */
struct kvworker_questions {
    struct kv_needles needles;
    struct kvworker_question *list; /* (needles.count) */
    uint32_t n_answer;              /* tokens of an answer at most */
    uint32_t n_common;              /* tokens that all questions begin with, and go on after */
    size_t most;                    /* tokens of the longest with its answer */
};

/* Reads the sentences of --needles.  Returns the exit status, and tells what is wrong. */
int kvworker_questions_read(const struct kvworker *worker,
                            struct kvworker_questions *ret_questions);
/* Makes the questions about a text, in place of those made before. */
int kvworker_questions_make(const struct kvworker *worker,
                            const char *text,
                            size_t bytes,
                            uint32_t n_answer,
                            struct kvworker_questions *questions);
void kvworker_questions_free(struct kvworker_questions *questions);

/* The bytes of a text of `bytes` that its first n tokens are. */
size_t kvworker_bytes_of(const struct kvworker *worker,
                         const uint32_t *tokens,
                         size_t n,
                         size_t bytes);

enum kvworker_reply_end {
    KVWORKER_UNTIL_JUDGED, /* right or wrong is certain */
    KVWORKER_UNTIL_LINE_END,
};

struct kvworker_reply {
    char text[KV_NEEDLE_BYTES_MAX]; /* as it came, blanks before it left out */
    size_t bytes;
    enum kv_needle_verdict verdict; /* KV_NEEDLE_OPEN: it was cut off while right */
    struct kv_generate_result result;
    struct kv_attention_stats at_first; /* when its first token was there, before any step */
};

/* Puts question i to the worker's session, in which n_common tokens have passed. */
kv_status_t kvworker_question_ask(const struct kvworker *worker,
                                  const struct kvworker_questions *questions,
                                  size_t i,
                                  struct kv_sampler *sampler,
                                  enum kvworker_reply_end end,
                                  struct kvworker_reply *ret_reply);

#endif
