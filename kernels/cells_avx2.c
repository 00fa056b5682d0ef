/* Eight centroids of the last subspaces at a time; with fewer of them, one. */
#include "cells.h"
#include "tiers.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2,fma,f16c")))

enum {
    LANES = 8
};

AVX2 static void score(const struct kv_pq_shape *shape, const float *table, float *ret_scores)
{
    const size_t n_centroids = kv_pq_n_centroids(shape);
    size_t n = n_centroids;

    memcpy(ret_scores, table, n_centroids * sizeof(*table));
    for (size_t j = 1; j < shape->m; j++, n *= n_centroids)
        for (size_t i = n; i-- > 0;) {
            const float before = ret_scores[i];
            const float *last = table + j * n_centroids;
            float *to = ret_scores + i * n_centroids;
            size_t c = 0;

            for (; c + LANES <= n_centroids; c += LANES)
                _mm256_storeu_ps(
                    to + c, _mm256_add_ps(_mm256_set1_ps(before), _mm256_loadu_ps(last + c)));
            for (; c < n_centroids; c++)
                to[c] = before + last[c];
        }
}

const struct kv_cells_kernels kv_cells_avx2 = {
    .name = "avx2",
    .supported = tiers_has_avx2,
    .score = score,
};

#endif
