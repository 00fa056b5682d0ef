/* 16 centroids of the last subspace at a time. */
#include "cells.h"
#include "parts_avx512.h"
#include "tiers.h"

#if defined(__x86_64__)

AVX512 static void score(const struct kv_pq_shape *shape, const float *table, float *ret_scores)
{
    const size_t n_centroids = kv_pq_n_centroids(shape);
    size_t n = n_centroids;

    memcpy(ret_scores, table, n_centroids * sizeof(*table));
    for (size_t j = 1; j < shape->m; j++, n *= n_centroids)
        for (size_t i = n; i-- > 0;) {
            const __m512 before = _mm512_set1_ps(ret_scores[i]);
            const float *last = table + j * n_centroids;
            float *to = ret_scores + i * n_centroids;
            size_t c = 0;

            for (; c + LANES <= n_centroids; c += LANES)
                _mm512_storeu_ps(to + c, _mm512_add_ps(before, _mm512_loadu_ps(last + c)));
            if (c < n_centroids) {
                const __mmask16 lanes = first_lanes(n_centroids - c);

                _mm512_mask_storeu_ps(
                    to + c, lanes,
                    _mm512_add_ps(before, _mm512_maskz_loadu_ps(lanes, last + c)));
            }
        }
}

const struct kv_cells_kernels kv_cells_avx512 = {
    .name = "avx512",
    .supported = tiers_has_avx512,
    .score = score,
};

#endif
