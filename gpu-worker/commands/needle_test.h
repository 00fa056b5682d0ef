/* needle_test.h - the needle test: the sentences of --needles as questions about one text.
 *
 * The text contains all sentences.  A question is the text followed by the beginning of one
 * sentence, as a user's turn that is left open, or as plain text for a model without a chat
 * template.  So all questions begin with the same tokens, which are computed once.  An answer
 * is judged while it is generated.
 *
 * Threads: one.  Memory: read/free.
 */
#ifndef KV_GPU_WORKER_COMMANDS_NEEDLE_TEST_H
#define KV_GPU_WORKER_COMMANDS_NEEDLE_TEST_H

#include "gpu-worker/commands/context.h"
#include "gpu-worker/eval/needles.h"

struct kvw_needle_question {
    uint32_t *tokens; /* (count, and room for an answer) */
    size_t count;
};

/* A struct of zeros has no questions. */
struct kvw_needle_test {
    struct kvw_needles needles;
    struct kvw_needle_question *list; /* (needles.count) */
    uint32_t n_answer;                /* maximum tokens of an answer */
    uint32_t n_common;                /* tokens that all questions begin with */
    size_t most;                      /* tokens of the longest question with its answer */
};

/* Reads the sentences of --needles.  Returns the exit status after printing what is wrong. */
int kvw_needle_test_read(const struct kvw_context *worker,
                         struct kvw_needle_test *ret_questions);
/* Makes the questions about a text, in place of those made before. */
int kvw_needle_test_make(const struct kvw_context *worker,
                         const char *text,
                         size_t bytes,
                         uint32_t n_answer,
                         struct kvw_needle_test *questions);
void kvw_needle_test_free(struct kvw_needle_test *questions);

/* Returns the bytes of a text that its first n tokens stand for. */
size_t
kvw_bytes_of(const struct kvw_context *worker, const uint32_t *tokens, size_t n, size_t bytes);

enum kvw_reply_end {
    KVW_UNTIL_JUDGED, /* right or wrong is certain */
    KVW_UNTIL_LINE_END,
};

struct kvw_reply {
    char text[KVW_NEEDLE_BYTES_MAX]; /* as generated, without blanks before it */
    size_t bytes;
    enum kvw_needle_verdict verdict; /* KVW_NEEDLE_OPEN: right, but incomplete */
    struct kvw_generate_result result;
    struct kvw_method_stats at_first; /* after its first token, before any decode step */
};

/* Asks question i in the worker's session, which has its first n_common tokens. */
kv_status_t kvw_needle_question_ask(const struct kvw_context *worker,
                                    const struct kvw_needle_test *questions,
                                    size_t i,
                                    struct kvw_sampler *sampler,
                                    enum kvw_reply_end end,
                                    struct kvw_reply *ret_reply);

#endif
