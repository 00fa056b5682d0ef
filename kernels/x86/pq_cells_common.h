/* pq_cells_common.h - private to kernels/: blocks of queries, for pq_cells_avx2.c and
 * pq_cells_avx512.c.
 *
 * Included after avx2.h or avx512.h, which define TARGET and INLINE.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_X86_PQ_CELLS_COMMON_H
#define KV_KERNELS_X86_PQ_CELLS_COMMON_H

#if defined(__x86_64__)

enum {
    QUERIES = 4, /* at once */
};

/* Defined by each instruction set: computes the scores for n queries, a constant at the
 * calls. */
INLINE void score_some(const struct kv_pq_shape *shape,
                       const float *tables,
                       const struct kv_cells *cells,
                       float *ret_scores,
                       size_t stride,
                       unsigned n);

TARGET static void score(const struct kv_pq_shape *shape,
                         const float *tables,
                         size_t n_queries,
                         const struct kv_cells *cells,
                         float *ret_scores,
                         size_t scores_stride)
{
    const size_t table_size = kv_pq_table_size(shape);
    size_t query = 0;

    for (; query + QUERIES <= n_queries; query += QUERIES)
        score_some(shape, tables + query * table_size, cells,
                   ret_scores + query * scores_stride, scores_stride, QUERIES);
    for (; query < n_queries; query++)
        score_some(shape, tables + query * table_size, cells,
                   ret_scores + query * scores_stride, scores_stride, 1);
}

#endif

#endif
