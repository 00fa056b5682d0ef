/* baselines_private.h - what the methods with all rows in memory share: a decode step attends to
 * sinks, window, and k rows between them that `choose` names.
 *
 *   baselines.c    the baselines oracle, window and random
 *   speculated.c   the control speculated
 */
#ifndef KV_GPU_WORKER_ATTENTION_BASELINES_PRIVATE_H
#define KV_GPU_WORKER_ATTENTION_BASELINES_PRIVATE_H

#include "gpu-worker/attention/method.h"
#include "gpu-worker/base/softmax.h"
#include "gpu-worker/kvcache/full_rows.h"

struct kvw_baseline;

/* Selects the k rows of a budget for a layer's kv head: ret_ids (k), ascending. */
typedef void (*kvw_choose_fn)(struct kvw_baseline *baseline,
                              const struct kvw_budget *budget,
                              uint32_t layer,
                              uint32_t head,
                              uint32_t *ret_ids);

struct kvw_baseline {
    struct kvw_method base;
    kvw_choose_fn choose;
    bool needs_scores; /* choose() reads scores_host */
    bool is_exact;     /* choose() is what recall is measured against */
    struct kvw_method_options options;
    struct kvw_device *device;
    struct kvw_full_rows *full_rows;
    const struct kvw_softmax_ops *softmax;
    uint32_t prompt_rows; /* where the prompt ended */

    struct kvw_device_buffer *scores; /* (n_q_heads, capacity) */
    float *scores_host;               /* (n_q_heads, middle rows) of the layer's step */
    struct kvw_event *scored;         /* scores_host has them */
    float *sums;                      /* (capacity) */
    uint64_t *order;                  /* (capacity) */
    uint32_t *ids;                    /* (capacity) */
    uint32_t *exact;                  /* (capacity) */
    struct kvw_row_run *runs;
    uint32_t *run_begin; /* (n_kv_heads + 1) */

    uint64_t rows_attended, rows_possible;
    uint64_t prompt_rows_attended; /* of rows_attended: all that were possible */
    uint64_t rows_recalled, rows_to_recall;
};

/* Opens what is zeros but for what the caller has set of `choose`, needs_scores and is_exact.  It
 * can be closed whether or not that succeeds. */
kv_status_t kvw_baseline_open(struct kvw_baseline *baseline,
                              const struct kvw_method_setup *setup,
                              const struct kvw_method_ops *ops,
                              char *detail,
                              size_t detail_bytes);
void kvw_baseline_close(struct kvw_baseline *baseline);

/* Of `n` rows, the places of the k with the largest sum over a group's query heads of the softmax of
 * their scores; ties go to the lower row.
 *   scores      (group, n), of which no more is left
 *   ret_places  (k), ascending */
void kvw_baseline_choose_best(
    struct kvw_baseline *baseline, float *scores, uint32_t n, uint32_t k, uint32_t *ret_places);

/* Of a method's table. */
kv_status_t kvw_baseline_attend(struct kvw_method *attention,
                                enum kvw_phase phase,
                                uint32_t layer,
                                uint32_t token_begin,
                                uint32_t n,
                                const struct kvw_device_buffer *q,
                                const struct kvw_device_buffer *k,
                                const struct kvw_device_buffer *v,
                                struct kvw_device_buffer *out);
kv_status_t kvw_baseline_end_pass(struct kvw_method *attention,
                                  enum kvw_phase phase,
                                  uint32_t token_begin,
                                  uint32_t n);
kv_status_t kvw_baseline_rewind(struct kvw_method *attention, uint32_t tokens);
uint64_t kvw_baseline_row_bytes(const struct kvw_method *attention);
void kvw_baseline_stats(const struct kvw_method *attention, struct kvw_method_stats *stats);

#endif
