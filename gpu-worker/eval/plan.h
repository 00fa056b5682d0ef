/* plan.h - what `kvworker eval` runs: methods x budgets x seeds.
 *
 *   methods   name[:option=value...],...   full,pqcache:rerank=4:chapter=prompt
 *   budgets   share or k=rows,...          1/10,0.05,k=64
 *   seeds     number,...                   0,1,2
 *
 * A method without a budget or a seed runs once for all of them.  Options that a method's entry
 * sets take precedence over the lists.
 *
 * Threads: pure functions.  Memory: make/free.
 */
#ifndef KV_GPU_WORKER_EVAL_PLAN_H
#define KV_GPU_WORKER_EVAL_PLAN_H

#include "gpu-worker/attention/method.h"

enum {
    KVW_EVAL_NAME_BYTES = 128,
    KVW_EVAL_RUNS_MAX = 4096,
};

struct kvw_planned_run {
    const struct kvw_method_ops *ops;
    char method[KVW_EVAL_NAME_BYTES]; /* the entry of the list, with its options */
    char budget[KVW_EVAL_NAME_BYTES]; /* the item of the list; "" if the method has none */
    struct kvw_method_options options;
};

/* Runs of one method's entry are consecutive, seed by seed, so that the budgets of one seed can
 * share a session.  Full attention is always first. */
struct kvw_eval_plan {
    struct kvw_planned_run *runs;
    size_t count;
};

/* Makes the plan; `base` has the options that no list sets.  Fails with KV_INVALID, with
 * `what: where: value` in `detail`, or with KV_NO_MEMORY. */
kv_status_t kvw_eval_plan_make(const char *methods,
                               const char *budgets,
                               const char *seeds,
                               const struct kvw_method_options *base,
                               struct kvw_eval_plan *ret_plan,
                               char *detail,
                               size_t detail_bytes);
/* A plan of zeros is allowed. */
void kvw_eval_plan_free(struct kvw_eval_plan *plan);

#endif
