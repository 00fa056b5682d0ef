/* kmeans_budget.h - how many iterations of k-means the prompt's computation hides (PQCache,
 * section 3.3).
 *
 *   T = clamp(floor((layer_s - base_s) / iteration_s + 3), 3, 300)
 *
 * with the time in which a layer's part of the prompt is computed, the time of clustering that
 * layer's keys with 3 iterations, and the time of one more.
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

/* Times in seconds; those of clustering are positive. */
uint32_t kvw_kmeans_iterations(double layer_s, double base_s, double iteration_s);

/* Seconds that one iteration takes per row and kv head, keys of d elements, measured here on
 * one core; 0: out of memory. */
double kvw_kmeans_row_s(uint32_t d, uint32_t m, uint32_t bits);

#endif
