/* kmeans_budget.h - how many k-means iterations fit into the prompt's computation (PQCache,
 * section 3.3).
 *
 *   T = clamp(floor((layer_s - base_s) / iteration_s + 3), 3, 300)
 *
 * layer_s is the time to compute one layer of the prompt, base_s the time to cluster that
 * layer's keys with 3 iterations, and iteration_s the time of one more iteration.
 *
 * Threads: pure functions; kvw_kmeans_row_s() takes a few milliseconds.
 */
#ifndef KV_GPU_WORKER_KVCACHE_KMEANS_BUDGET_H
#define KV_GPU_WORKER_KVCACHE_KMEANS_BUDGET_H

#include <stdint.h>

enum {
    KVW_KMEANS_ITERATIONS_MIN = 3,
    KVW_KMEANS_BUDGET_ITERATIONS_MAX = 300,
};

/* Returns T.  Times are in seconds; those of clustering are positive. */
uint32_t kvw_kmeans_iterations(double layer_s, double base_s, double iteration_s);

/* Measures an iteration on one core: returns seconds per row and kv head, for keys of d
 * elements; 0: out of memory. */
double kvw_kmeans_row_s(uint32_t d, uint32_t m, uint32_t bits);

#endif
