/* Eight cells at a time, which differ in their last code only.  The cells that have rows are
 * moved together, by one permutation for four queries. */
#include "kernels/dispatch.h"
#include "kernels/pq_cells.h"
#include "kernels/pq_cells_prefix.h"
#include "kernels/x86/avx2.h"

#include "kernels/x86/pq_cells_common.h"

#if defined(__x86_64__)

/* Computes the scores for n queries, a constant at the calls.  Writes eight floats where there
 * is room; the next store overwrites those in excess. */
INLINE void score_some(const struct kv_pq_shape *shape,
                       const float *tables,
                       const struct kv_cells *cells,
                       float *ret_scores,
                       size_t stride,
                       unsigned n)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), n_cells = kv_cells_n(shape);
    const size_t step = n_centroids < LANES ? n_centroids : LANES;
    const size_t n_full = kv_cells_n_full(shape, cells);
    float room[QUERIES][KV_CELLS_PREFIXES_MAX], few[QUERIES][LANES] = {{0}};
    const float *prefixes[QUERIES], *last[QUERIES];
    size_t done = 0;

    for (unsigned query = 0; query < n; query++) {
        const float *table = tables + query * kv_pq_table_size(shape);

        prefixes[query] = kv_cells_prefix_scores(shape, table, room[query]);
        last[query] = table + (shape->m - 1) * n_centroids;
        if (step < LANES) {
            memcpy(few[query], last[query], step * sizeof(float));
            last[query] = few[query];
        }
    }
    for (size_t cell = 0; cell < n_cells; cell += step) {
        const size_t i = cell >> shape->bits, c = cell & (n_centroids - 1);
        const unsigned full = kv_cells_full(cells, cell, step);
        const size_t n_more = (size_t)__builtin_popcount(full);
        const __m256i order =
            _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)kv_lanes_of[full]));
        float *to = ret_scores + done;
        __m256 scores[QUERIES];

        for (unsigned query = 0; query < n; query++)
            scores[query] =
                _mm256_permutevar8x32_ps(_mm256_add_ps(_mm256_broadcast_ss(prefixes[query] + i),
                                                       _mm256_loadu_ps(last[query] + c)),
                                         order);
        if (done + LANES <= n_full)
            for (unsigned query = 0; query < n; query++)
                _mm256_storeu_ps(to + query * stride, scores[query]);
        else
            for (unsigned query = 0; query < n; query++)
                _mm256_maskstore_ps(to + query * stride, first_lanes(n_more), scores[query]);
        done += n_more;
    }
}

AVX2 static void lengths(const uint32_t *offsets, size_t n, uint32_t *ret_lengths)
{
    size_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        const __m256i from = _mm256_loadu_si256((const __m256i *)(const void *)(offsets + i));
        const __m256i to = _mm256_loadu_si256((const __m256i *)(const void *)(offsets + i + 1));

        _mm256_storeu_si256((__m256i *)(void *)(ret_lengths + i), _mm256_sub_epi32(to, from));
    }
    for (; i < n; i++)
        ret_lengths[i] = offsets[i + 1] - offsets[i];
}

const struct kv_cells_kernels kv_cells_avx2 = {
    .name = "avx2",
    .supported = kv_has_avx2,
    .score = score,
    .lengths = lengths,
};

#endif
