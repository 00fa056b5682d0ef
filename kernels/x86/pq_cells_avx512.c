/* 16 cells at a time, which differ in their last code only.  The cells that have rows are moved
 * together, by one permutation for four queries. */
#include "kernels/dispatch.h"
#include "kernels/pq_cells.h"
#include "kernels/pq_cells_prefix.h"
#include "kernels/x86/avx512.h"

#include "kernels/x86/pq_cells_common.h"

#if defined(__x86_64__)

/* Computes the scores for n queries, a constant at the calls. */
INLINE void score_some(const struct kv_pq_shape *shape,
                       const float *tables,
                       const struct kv_cells *cells,
                       float *ret_scores,
                       size_t stride,
                       unsigned n)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), n_cells = kv_cells_n(shape);
    const size_t step = n_centroids < LANES ? n_centroids : LANES;
    const __mmask16 lanes = first_lanes(step);
    float room[QUERIES][KV_CELLS_PREFIXES_MAX];
    const float *prefixes[QUERIES], *last[QUERIES];
    size_t done = 0;

    for (unsigned query = 0; query < n; query++) {
        const float *table = tables + query * kv_pq_table_size(shape);

        prefixes[query] = kv_cells_prefix_scores(shape, table, room[query]);
        last[query] = table + (shape->m - 1) * n_centroids;
    }
    for (size_t i = 0; i < n_cells / n_centroids; i++)
        for (size_t c = 0; c < n_centroids; c += step) {
            const unsigned full = kv_cells_full(cells, i * n_centroids + c, step);
            const size_t n_more = (size_t)__builtin_popcount(full);

            for (unsigned query = 0; query < n; query++) {
                const __m512 scores =
                    _mm512_add_ps(_mm512_set1_ps(prefixes[query][i]),
                                  _mm512_maskz_loadu_ps(lanes, last[query] + c));

                _mm512_mask_storeu_ps(ret_scores + query * stride + done, first_lanes(n_more),
                                      _mm512_maskz_compress_ps((__mmask16)full, scores));
            }
            done += n_more;
        }
}

AVX512 static void lengths(const uint32_t *offsets, size_t n, uint32_t *ret_lengths)
{
    for (size_t i = 0; i < n; i += LANES) {
        const __mmask16 lanes = first_lanes(n - i);

        _mm512_mask_storeu_epi32(
            ret_lengths + i, lanes,
            _mm512_sub_epi32(_mm512_maskz_loadu_epi32(lanes, offsets + i + 1),
                             _mm512_maskz_loadu_epi32(lanes, offsets + i)));
    }
}

const struct kv_cells_kernels kv_cells_avx512 = {
    .name = "avx512",
    .supported = kv_has_avx512,
    .score = score,
    .lengths = lengths,
};

#endif
