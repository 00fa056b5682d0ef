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

enum {
    QUERIES = 8, /* whose offsets are vectors at once */
};

/* Defined by each instruction set; `width`, `is_most` and `saturates` are constants at the
 * calls, and so is m for the usual shapes.
 *
 * Without is_most: the sums of each query -> ret_sums (n_queries, rows), sums_stride apart.
 * With it, of up to QUERIES queries: the largest of their sums, offsets added, and of what is
 * in ret_sums (rows) unless is_first.  Without `saturates` no sum can be above 255: saturating
 * additions are slower on some processors (Zen 4: half the rate, and in the shuffles' units). */
INLINE void scan8_width(const struct kv_pq_shape *shape,
                        uint32_t m,
                        uint32_t width,
                        int is_most,
                        int saturates,
                        int is_first,
                        const uint8_t *tables,
                        const int16_t *offsets,
                        size_t n_queries,
                        const uint8_t *const *tiles,
                        size_t n_tiles,
                        uint8_t *ret_sums,
                        size_t sums_stride);

/* The least and the largest of n values; a NaN is neither. */
INLINE void range_of(const float *values, size_t n, float *ret_least, float *ret_most);

/* Rounds 16 of n values, from i on, to bytes; after the last value there are zeros. */
INLINE __m128i
round16_to(const float *values, size_t i, size_t n, float least, float shift, float inv_step);

INLINE void prefetch(const uint8_t *tile, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 64)
        _mm_prefetch((const char *)tile + i, _MM_HINT_T1);
}

/* Returns the largest sum that a row can have by any of the tables. */
INLINE unsigned
largest_sum(const struct kv_pq_shape *shape, const uint8_t *tables, size_t n_queries)
{
    const size_t size = (size_t)1 << kv_tile_width(shape);
    unsigned largest = 0;

    for (size_t query = 0; query < n_queries; query++) {
        unsigned sum = 0;

        for (size_t j = 0; j < shape->m; j++, tables += size) {
            __m128i most = _mm_loadu_si128((const __m128i *)(const void *)tables);

            for (size_t i = 16; i < size; i += 16)
                most = _mm_max_epu8(
                    most, _mm_loadu_si128((const __m128i *)(const void *)(tables + i)));
            /* There is an instruction for the least of eight words. */
            most = _mm_xor_si128(most, _mm_set1_epi8(-1));
            most = _mm_minpos_epu16(_mm_min_epu8(most, _mm_srli_epi16(most, 8)));
            sum += UINT8_MAX - ((unsigned)_mm_cvtsi128_si32(most) & UINT8_MAX);
        }
        largest = sum > largest ? sum : largest;
    }
    return largest;
}

INLINE void scan8_queries(const struct kv_pq_shape *shape,
                          int is_most,
                          int is_first,
                          const uint8_t *tables,
                          const int16_t *offsets,
                          size_t n_queries,
                          const uint8_t *const *tiles,
                          size_t n_tiles,
                          uint8_t *ret_sums,
                          size_t sums_stride)
{
    const uint32_t width = kv_tile_width(shape);

#define SCAN8(m, width, saturates)                                                         \
    scan8_width(shape, m, width, is_most, saturates, is_first, tables, offsets, n_queries, \
                tiles, n_tiles, ret_sums, sums_stride)
    if (largest_sum(shape, tables, n_queries) > UINT8_MAX) {
        if (width == 6)
            SCAN8(shape->m, 6, 1);
        else if (width == 4)
            SCAN8(shape->m, 4, 1);
        else
            SCAN8(shape->m, 8, 1);
    } else if (width == 6 && shape->m == 2) {
        SCAN8(2, 6, 0);
    } else if (width == 6 && shape->m == 4) {
        SCAN8(4, 6, 0);
    } else if (width == 6) {
        SCAN8(shape->m, 6, 0);
    } else if (width == 4 && shape->m == 8) {
        SCAN8(8, 4, 0);
    } else if (width == 4) {
        SCAN8(shape->m, 4, 0);
    } else {
        SCAN8(shape->m, 8, 0);
    }
#undef SCAN8
}

TARGET static void scan8(const struct kv_pq_shape *shape,
                         const uint8_t *tables,
                         size_t n_queries,
                         const uint8_t *const *tiles,
                         size_t n_tiles,
                         uint8_t *ret_sums,
                         size_t sums_stride)
{
    scan8_queries(shape, 0, 0, tables, NULL, n_queries, tiles, n_tiles, ret_sums, sums_stride);
}

TARGET static void scan8_max(const struct kv_pq_shape *shape,
                             const uint8_t *tables,
                             const int16_t *offsets,
                             size_t n_queries,
                             const uint8_t *const *tiles,
                             size_t n_tiles,
                             uint8_t *ret_most)
{
    for (size_t query = 0; query < n_queries; query += QUERIES)
        scan8_queries(shape, 1, query == 0, tables + query * kv_pq_table_rounded_size(shape),
                      offsets + query,
                      n_queries - query < QUERIES ? n_queries - query : QUERIES, tiles, n_tiles,
                      ret_most, 0);
}

TARGET static void
range(const struct kv_pq_shape *shape, const float *table, float *ret_least, float *ret_most)
{
    const size_t n_centroids = kv_pq_n_centroids(shape);

    *ret_least = *ret_most = 0;
    for (size_t j = 0; j < shape->m; j++) {
        float least, most;

        range_of(table + j * n_centroids, n_centroids, &least, &most);
        *ret_least += least;
        *ret_most += most;
    }
}

TARGET static void round8_to(const struct kv_pq_shape *shape,
                             const float *table,
                             float base,
                             float inv_step,
                             uint8_t *ret_rounded)
{
    const size_t n_centroids = kv_pq_n_centroids(shape),
                 size = (size_t)1 << kv_tile_width(shape);
    float least[KV_PQ_SUBSPACES_MAX], most, sum = 0;

    for (size_t j = 0; j < shape->m; j++) {
        range_of(table + j * n_centroids, n_centroids, &least[j], &most);
        sum += least[j];
    }
    for (size_t j = 0; j < shape->m; j++)
        for (size_t i = 0; i < size; i += 16)
            _mm_storeu_si128((__m128i *)(void *)(ret_rounded + j * size + i),
                             round16_to(table + j * n_centroids, i, n_centroids, least[j],
                                        j == 0 ? sum - base : 0, inv_step));
}

#endif

#endif
