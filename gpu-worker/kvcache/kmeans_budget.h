/* kmeans_budget.h - how many k-means iterations a layer's keys get (PQCache, section 3.3).
 *
 *   T = clamp(floor((layer_s - base_s) / iteration_s + 3), 3, 300)
 *
 * layer_s is the time that clustering a layer's rows may take, base_s the time to cluster and
 * encode them with 3 iterations, and iteration_s the time of one more iteration.  The nodes
 * cluster, so base_s and iteration_s follow from the time that they report with each index.
 * Before the first report, a node is assumed to compute 10^10 multiply-adds per second for one
 * worker.
 *
 * A row here is one token's keys in all kv heads of a layer.  Besides its iterations, clustering
 * costs encoding, which is as much as an iteration, and summaries: `fixed` iterations in all.
 *
 * Threads: pure functions.
 */
#ifndef KV_GPU_WORKER_KVCACHE_KMEANS_BUDGET_H
#define KV_GPU_WORKER_KVCACHE_KMEANS_BUDGET_H

#include <stdbool.h>
#include <stdint.h>

enum {
    KVW_KMEANS_ITERATIONS_MIN = 3,
    KVW_KMEANS_BUDGET_ITERATIONS_MAX = 300,
};

/* Returns T.  Times are in seconds; those of clustering are positive. */
uint32_t kvw_kmeans_iterations(double layer_s, double base_s, double iteration_s);

/* What clustering costs. */
struct kvw_kmeans_cost {
    double fixed;     /* iterations that encoding and summaries cost */
    double row_s;     /* seconds of a row's iteration */
    bool is_reported; /* row_s follows from a report */
};

/* The cost before the first report: keys and values of d elements, codes of `bits` in each
 * subspace, `summaries` for each group of rows (1,024 or 3,072). */
struct kvw_kmeans_cost
kvw_kmeans_cost_assumed(uint32_t d, uint32_t n_kv_heads, uint32_t bits, uint32_t summaries);

/* Takes a report: clustering `rows` rows in `iterations` iterations took `busiest_s` on the
 * slowest data thread that took part.  Later reports count a quarter, so that one interrupted
 * thread does not decide.  Ignored unless all are positive. */
void kvw_kmeans_cost_report(struct kvw_kmeans_cost *cost,
                            double rows,
                            double iterations,
                            double busiest_s);

/* Returns T for `rows` rows. */
uint32_t kvw_kmeans_budget(const struct kvw_kmeans_cost *cost, double rows, double layer_s);

#endif
