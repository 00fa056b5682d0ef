/* ask_report.h - what `kvworker ask` prints: each answer when it is complete, and totals for
 * each method.
 *
 * Threads: one.
 */
#ifndef KV_GPU_WORKER_COMMANDS_ASK_REPORT_H
#define KV_GPU_WORKER_COMMANDS_ASK_REPORT_H

#include "gpu-worker/commands/needle_test.h"
#include "gpu-worker/eval/plan.h"

/* The cost of one question with one method, or of all questions with one method. */
struct kvw_ask_cost {
    uint32_t questions, found;
    uint32_t generated_tokens, steps; /* each computed token is a step */
    uint32_t timed_steps;             /* between the first token and the last */
    double fork_s;                    /* time to fork, waiting included */
    double ttft_s;                    /* from the question to its first token, fork included */
    double decode_s;                  /* from the first token to the last */
    struct kvw_method_stats steps_stats; /* of the decode steps only */
    struct kvw_method_stats all_stats;   /* of question and answer */
};

/* What all lines have in common. */
struct kvw_ask_about {
    const struct kvw_context *worker;
    const struct kvw_eval_plan *plan;
    const struct kvw_needle_test *questions;
};

struct kvw_ask_sum {
    struct kvw_ask_cost cost;
    double prefill_s; /* of the common beginning, until the store has it */
    /* Codebooks trained up to the end of the first answer, and after it. */
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

/* *to += after - before, for all fields that are sums. */
void kvw_ask_stats_add(struct kvw_method_stats *to,
                       const struct kvw_method_stats *after,
                       const struct kvw_method_stats *before);

#endif
