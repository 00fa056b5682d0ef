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
struct kvw_ask_cost {
    uint32_t questions, found;
    uint32_t generated_tokens, steps; /* a token that was passed is a step */
    uint32_t timed_steps;             /* between the first token and the last */
    double fork_s;                    /* the fork, and what it had to wait for */
    double ttft_s;                    /* from the question to its first token, fork included */
    double decode_s;                  /* from the first token to the last */
    struct kvw_method_stats steps_stats; /* of the steps alone */
    struct kvw_method_stats all_stats;   /* of question and answer */
};

/* What does not change between the lines. */
struct kvw_ask_about {
    const struct kvw_context *worker;
    const struct kvw_eval_plan *plan;
    const struct kvw_needle_test *questions;
};

struct kvw_ask_sum {
    struct kvw_ask_cost cost;
    double prefill_s; /* of what all questions begin with, flushed */
    /* Trained until the first answer's end, and by the questions after it. */
    uint32_t codebooks_first, codebooks_later;
};

void kvw_ask_report_question(const struct kvw_ask_about *about, size_t i);
void kvw_ask_report_answer(const struct kvw_ask_about *about,
                           size_t method,
                           size_t question,
                           const struct kvw_reply *reply,
                           const struct kvw_ask_cost *cost);
/* sums (plan->count) */
void kvw_ask_report_sums(const struct kvw_ask_about *about, const struct kvw_ask_sum *sums);

/* *to += after - before, of what adds up. */
void kvw_ask_stats_add(struct kvw_method_stats *to,
                       const struct kvw_method_stats *after,
                       const struct kvw_method_stats *before);

#endif
