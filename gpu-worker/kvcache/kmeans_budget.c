#include "gpu-worker/kvcache/kmeans_budget.h"

#include "kernels/summary.h"

#include <math.h>

/* An AVX2 core does some 2 x 10^10; it is not idle. */
static const double ASSUMED_OPERATIONS_PER_S = 1e10;
static const double NEW_SHARE = 0.25; /* of a report in the cost */

uint32_t kvw_kmeans_iterations(double layer_s, double base_s, double iteration_s)
{
    const double fits = floor((layer_s - base_s) / iteration_s + KVW_KMEANS_ITERATIONS_MIN);

    if (!(fits > KVW_KMEANS_ITERATIONS_MIN))
        return KVW_KMEANS_ITERATIONS_MIN;
    return fits < KVW_KMEANS_BUDGET_ITERATIONS_MAX ? (uint32_t)fits
                                                   : KVW_KMEANS_BUDGET_ITERATIONS_MAX;
}

struct kvw_kmeans_cost
kvw_kmeans_cost_assumed(uint32_t d, uint32_t n_kv_heads, uint32_t bits, uint32_t summaries)
{
    const double n_centroids = (double)(UINT32_C(1) << bits);

    return (struct kvw_kmeans_cost){
        /* Summaries are k-means over key and value side by side. */
        .fixed = 1 + 2.0 * KV_SUMMARY_ITERATIONS * summaries / n_centroids,
        .row_s = n_centroids * d * n_kv_heads / ASSUMED_OPERATIONS_PER_S,
    };
}

void kvw_kmeans_cost_report(struct kvw_kmeans_cost *cost,
                            double rows,
                            double iterations,
                            double busiest_s)
{
    const double row_s = busiest_s / (rows * (iterations + cost->fixed));

    if (!(rows > 0 && iterations > 0 && busiest_s > 0))
        return;
    cost->row_s = cost->is_reported ? cost->row_s + NEW_SHARE * (row_s - cost->row_s) : row_s;
    cost->is_reported = true;
}

uint32_t kvw_kmeans_budget(const struct kvw_kmeans_cost *cost, double rows, double layer_s)
{
    const double iteration_s = rows * cost->row_s;

    return kvw_kmeans_iterations(
        layer_s, (KVW_KMEANS_ITERATIONS_MIN + cost->fixed) * iteration_s, iteration_s);
}
