/* pq_tiles_common.h - private to kernels/: scans by the width of a tile, for
 * pq_tiles_avx2.c and pq_tiles_avx512.c.
 *
 * Included after avx2.h or avx512.h, which define TARGET and INLINE.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_X86_PQ_TILES_COMMON_H
#define KV_KERNELS_X86_PQ_TILES_COMMON_H

#if defined(__x86_64__)

/* Defined by each instruction set; `width` is a constant at the calls, and so is m, if it is
 * the usual one. */
INLINE void scan8_width(const struct kv_pq_shape *shape,
                        uint32_t m,
                        uint32_t width,
                        const uint8_t *tables,
                        size_t n_queries,
                        const uint8_t *const *tiles,
                        size_t n_tiles,
                        uint8_t *ret_sums,
                        size_t sums_stride);

INLINE void scan16_width(const struct kv_pq_shape *shape,
                         uint32_t m,
                         uint32_t width,
                         const uint16_t *tables,
                         size_t n_queries,
                         const uint8_t *const *tiles,
                         size_t n_tiles,
                         uint16_t *ret_sums,
                         size_t sums_stride);

INLINE void prefetch(const uint8_t *tile, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 64)
        _mm_prefetch((const char *)tile + i, _MM_HINT_T1);
}

TARGET static void scan8(const struct kv_pq_shape *shape,
                         const uint8_t *tables,
                         size_t n_queries,
                         const uint8_t *const *tiles,
                         size_t n_tiles,
                         uint8_t *ret_sums,
                         size_t sums_stride)
{
    const uint32_t width = kv_tile_width(shape);

    if (width == 6 && shape->m == 2)
        scan8_width(shape, 2, 6, tables, n_queries, tiles, n_tiles, ret_sums, sums_stride);
    else if (width == 6)
        scan8_width(shape, shape->m, 6, tables, n_queries, tiles, n_tiles, ret_sums,
                    sums_stride);
    else if (width == 4)
        scan8_width(shape, shape->m, 4, tables, n_queries, tiles, n_tiles, ret_sums,
                    sums_stride);
    else
        scan8_width(shape, shape->m, 8, tables, n_queries, tiles, n_tiles, ret_sums,
                    sums_stride);
}

TARGET static void scan16(const struct kv_pq_shape *shape,
                          const uint16_t *tables,
                          size_t n_queries,
                          const uint8_t *const *tiles,
                          size_t n_tiles,
                          uint16_t *ret_sums,
                          size_t sums_stride)
{
    const uint32_t width = kv_tile_width(shape);

    if (width == 6 && shape->m == 2)
        scan16_width(shape, 2, 6, tables, n_queries, tiles, n_tiles, ret_sums, sums_stride);
    else if (width == 6)
        scan16_width(shape, shape->m, 6, tables, n_queries, tiles, n_tiles, ret_sums,
                     sums_stride);
    else if (width == 4)
        scan16_width(shape, shape->m, 4, tables, n_queries, tiles, n_tiles, ret_sums,
                     sums_stride);
    else
        scan16_width(shape, shape->m, 8, tables, n_queries, tiles, n_tiles, ret_sums,
                     sums_stride);
}

#endif

#endif
