#include "gpu-worker/kvcache/kmeans_budget.h"

#include "gpu-worker/base/time.h"
#include "kernels/kmeans.h"

#include <math.h>
#include <stdlib.h>

enum {
    MEASURED_ROWS = 2048,
};

uint32_t kvw_kmeans_iterations(double layer_s, double base_s, double iteration_s)
{
    const double fits = floor((layer_s - base_s) / iteration_s + KVW_KMEANS_ITERATIONS_MIN);

    if (!(fits > KVW_KMEANS_ITERATIONS_MIN))
        return KVW_KMEANS_ITERATIONS_MIN;
    return fits < KVW_KMEANS_BUDGET_ITERATIONS_MAX ? (uint32_t)fits
                                                   : KVW_KMEANS_BUDGET_ITERATIONS_MAX;
}

double kvw_kmeans_row_s(uint32_t d, uint32_t m, uint32_t bits)
{
    const struct kv_pq_shape shape = {.d = d, .m = m, .bits = bits};
    float *keys = malloc((size_t)MEASURED_ROWS * d * sizeof(*keys));
    float *centroids = calloc(kv_pq_centroids_size(&shape), sizeof(*centroids));
    float *sums = calloc(kv_pq_centroids_size(&shape), sizeof(*sums));
    float *half_squares = calloc(kv_pq_table_size(&shape), sizeof(*half_squares));
    uint32_t *counts = calloc(kv_pq_table_size(&shape), sizeof(*counts));
    uint8_t *codes = malloc((size_t)MEASURED_ROWS * m);
    double row_s = 0;

    if (keys != NULL && centroids != NULL && sums != NULL && half_squares != NULL &&
        counts != NULL && codes != NULL) {
        const struct kv_kmeans_codebook book = {.centroids = centroids,
                                                .half_sq_norms = half_squares};
        const struct kv_kmeans_sums all = {.sums = sums, .counts = counts};
        uint64_t begin_us;

        for (size_t i = 0; i < (size_t)MEASURED_ROWS * d; i++)
            keys[i] = (float)(i * 2654435761u % 1024) / 512 - 1;
        for (uint32_t i = 0; i < kv_pq_n_centroids(&shape); i++)
            kv_kmeans_set_centroid(&shape, &book, i, keys + (size_t)i * d);
        kv_kmeans_half_sq_norms(&shape, &book);
        begin_us = kvw_now_us();
        kv_kmeans_step(&shape, &book, keys, MEASURED_ROWS, codes, MEASURED_ROWS, &all);
        row_s = (double)(kvw_now_us() - begin_us + 1) / 1e6 / MEASURED_ROWS;
    }
    free(keys);
    free(centroids);
    free(sums);
    free(half_squares);
    free(counts);
    free(codes);
    return row_s;
}
