/* ask_report.h - what `kvworker ask` prints: each answer as it comes, and a sum for each
 * method.
 *
 * Threads: one.
 */
#ifndef KV_GPU_WORKER_COMMANDS_ASK_REPORT_H
#define KV_GPU_WORKER_COMMANDS_ASK_REPORT_H

#include "gpu-worker/commands/needle_test.h"
#include "gpu-worker/eval/plan.h"

/* One question by one method, or the sum of all by one. */
struct kv_ask_cost {
    uint32_t questions, found;
    uint32_t generated_tokens, steps; /* a token that was passed is a step */
    uint32_t timed_steps;             /* between the first token and the last */
    double fork_s;                    /* the fork, and what it had to wait for */
    double ttft_s;                    /* from the question to its first token, fork included */
    double decode_s;                  /* from the first token to the last */
    struct kv_attention_stats steps_stats; /* of the steps alone */
    struct kv_attention_stats all_stats;   /* of question and answer */
};

/* What does not change between the lines. */
struct kv_ask_about {
    const struct kvworker *worker;
    const struct kv_eval_plan *plan;
    const struct kvworker_questions *questions;
};

struct kv_ask_sum {
    struct kv_ask_cost cost;
    double prefill_s; /* of what all questions begin with, flushed */
    /* Trained until the first answer's end, and by the questions after it. */
    uint32_t codebooks_first, codebooks_later;
};

void kv_ask_report_question(const struct kv_ask_about *about, size_t i);
void kv_ask_report_answer(const struct kv_ask_about *about,
                          size_t method,
                          size_t question,
                          const struct kvworker_reply *reply,
                          const struct kv_ask_cost *cost);
/* sums (plan->count) */
void kv_ask_report_sums(const struct kv_ask_about *about, const struct kv_ask_sum *sums);

/* *to += after - before, of what adds up. */
void kv_ask_stats_add(struct kv_attention_stats *to,
                      const struct kv_attention_stats *after,
                      const struct kv_attention_stats *before);

#endif
