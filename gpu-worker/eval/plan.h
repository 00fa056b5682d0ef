/* plan.h - what `kvworker eval` runs: methods x budgets x seeds.
 *
 *   methods   name[:option=value...],...   full,pqcache:rerank=4:chapter=prompt
 *   budgets   share or k=rows,...          1/10,0.05,k=64
 *   seeds     number,...                   0,1,2
 *
 * A method without a budget or a seed runs once for all of them.  Options that a method's entry
 * sets are stronger than the lists.
 *
 * Threads: pure functions.  Memory: make/free.
 */
#ifndef KV_GPU_WORKER_EVAL_PLAN_H
#define KV_GPU_WORKER_EVAL_PLAN_H

#include "gpu-worker/attention/method.h"

enum {
    KV_EVAL_NAME_BYTES = 128,
    KV_EVAL_RUNS_MAX = 4096,
};

struct kv_eval_run {
    const struct kv_attention_row *row;
    char method[KV_EVAL_NAME_BYTES]; /* as the entry has it, options too */
    char budget[KV_EVAL_NAME_BYTES]; /* as the list has it; "" where it does not matter */
    struct kv_attention_options options;
};

/* Runs of one method's entry come one behind the other, seed after seed: budgets of one seed
 * can share a session.  Full attention is always the first. */
struct kv_eval_plan {
    struct kv_eval_run *runs;
    size_t count;
};

/* `base` has what no list sets.  KV_INVALID: `detail` is `what: where: value`.  KV_NO_MEMORY.
 */
kv_status_t kv_eval_plan_make(const char *methods,
                              const char *budgets,
                              const char *seeds,
                              const struct kv_attention_options *base,
                              struct kv_eval_plan *ret_plan,
                              char *detail,
                              size_t detail_bytes);
/* All zeros is allowed. */
void kv_eval_plan_free(struct kv_eval_plan *plan);

#endif
