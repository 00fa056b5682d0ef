/* Lanes are centroids where keys or queries meet them.
 *
 * Of one or two bits there are fewer centroids than lanes: the last lanes are then masked out
 * of loads and stores, and their distances are infinite. */
#include "pq.h"
#include "tiers.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2   __attribute__((target("avx2,fma,f16c")))
#define INLINE AVX2 __attribute__((always_inline)) static inline

enum {
    LANES = 8,
    ROWS = 4,    /* rows and ... */
    VECTORS = 2, /* ... vectors of centroids at once: eight sums, as many as are in flight */
    TABLE_VECTORS = 4,
    QUERIES = 4,
};

/* A mask of the first n lanes. */
INLINE __m256i first_lanes(size_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n < LANES ? (int)n : LANES),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE __m256 load(const float *at, int full, __m256i lanes)
{
    return full ? _mm256_loadu_ps(at) : _mm256_maskload_ps(at, lanes);
}

/* The lane with the least distance, the lower code of equals. */
INLINE uint8_t nearest_lane(__m256 distances, __m256i codes)
{
    __m256 least = _mm256_min_ps(distances, _mm256_permute2f128_ps(distances, distances, 1));
    __m256i others;
    __m128i packed;

    least = _mm256_min_ps(least, _mm256_permute_ps(least, 0x4e));
    least = _mm256_min_ps(least, _mm256_permute_ps(least, 0xb1));
    /* 0xffff where it is not the least */
    others = _mm256_castps_si256(_mm256_cmp_ps(distances, least, _CMP_NEQ_UQ));
    codes = _mm256_or_si256(codes, others);
    packed = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
    return (uint8_t)_mm_cvtsi128_si32(_mm_minpos_epu16(packed));
}

/* Codes of n_rows rows, `stride` floats apart, in one subspace; n_rows and n_vectors are
 * constants where this is called. */
INLINE void encode_rows(const float *centroids,
                        const float *half_squares,
                        size_t n_centroids,
                        const float *x,
                        size_t stride,
                        size_t width,
                        unsigned n_rows,
                        unsigned n_vectors,
                        int full,
                        uint8_t *ret_codes)
{
    const __m256 infinite = _mm256_set1_ps(__builtin_inff());
    const __m256i lanes = first_lanes(n_centroids);
    __m256 least[ROWS];
    __m256i nearest[ROWS];
    __m256i codes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);

    for (unsigned row = 0; row < n_rows; row++) {
        least[row] = infinite;
        nearest[row] = _mm256_setzero_si256();
    }
    for (size_t c = 0; c < n_centroids; c += n_vectors * LANES) {
        const float *at = centroids + c;
        __m256 distances[ROWS][VECTORS];

        for (unsigned v = 0; v < n_vectors; v++) {
            __m256 half = load(half_squares + c + v * LANES, full, lanes);

            if (!full)
                half = _mm256_blendv_ps(infinite, half, _mm256_castsi256_ps(lanes));
            for (unsigned row = 0; row < n_rows; row++)
                distances[row][v] = half;
        }
        for (size_t i = 0; i < width; i++, at += n_centroids) {
            __m256 centroid[VECTORS];

            for (unsigned v = 0; v < n_vectors; v++)
                centroid[v] = load(at + v * LANES, full, lanes);
            for (unsigned row = 0; row < n_rows; row++) {
                const __m256 element = _mm256_broadcast_ss(x + row * stride + i);

                for (unsigned v = 0; v < n_vectors; v++)
                    distances[row][v] =
                        _mm256_fnmadd_ps(element, centroid[v], distances[row][v]);
            }
        }
        for (unsigned v = 0; v < n_vectors; v++) {
            for (unsigned row = 0; row < n_rows; row++) {
                const __m256 less = _mm256_cmp_ps(distances[row][v], least[row], _CMP_LT_OQ);

                least[row] = _mm256_blendv_ps(least[row], distances[row][v], less);
                nearest[row] =
                    _mm256_blendv_epi8(nearest[row], codes, _mm256_castps_si256(less));
            }
            codes = _mm256_add_epi32(codes, _mm256_set1_epi32(LANES));
        }
    }
    for (unsigned row = 0; row < n_rows; row++)
        ret_codes[row] = nearest_lane(least[row], nearest[row]);
}

INLINE void encode_subspace(const float *centroids,
                            const float *half_squares,
                            size_t n_centroids,
                            const float *x,
                            size_t stride,
                            size_t width,
                            size_t n,
                            unsigned n_vectors,
                            int full,
                            uint8_t *ret_codes)
{
    size_t row = 0;

    for (; row + ROWS <= n; row += ROWS)
        encode_rows(centroids, half_squares, n_centroids, x + row * stride, stride, width, ROWS,
                    n_vectors, full, ret_codes + row);
    for (; row < n; row++)
        encode_rows(centroids, half_squares, n_centroids, x + row * stride, stride, width, 1,
                    n_vectors, full, ret_codes + row);
}

/* A tile's rows stay in the first cache while the subspaces pass by. */
AVX2 static void encode(const struct kv_pq_shape *shape,
                        const float *centroids,
                        const float *half_squares,
                        const float *keys,
                        size_t n,
                        uint8_t *ret_codes,
                        size_t codes_stride)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;

    for (size_t row = 0; row < n; row += KV_PQ_TILE)
        for (size_t j = 0; j < shape->m; j++) {
            const size_t n_rows = n - row < KV_PQ_TILE ? n - row : KV_PQ_TILE;
            const float *x = keys + row * shape->d + j * width;
            const float *c = centroids + j * width * n_centroids;
            const float *half = half_squares + j * n_centroids;
            uint8_t *codes = ret_codes + j * codes_stride + row;

            if (n_centroids >= VECTORS * LANES)
                encode_subspace(c, half, n_centroids, x, shape->d, width, n_rows, VECTORS, 1,
                                codes);
            else
                encode_subspace(c, half, n_centroids, x, shape->d, width, n_rows, 1, 0, codes);
        }
}

AVX2 static void accumulate(const struct kv_pq_shape *shape,
                            const float *keys,
                            size_t n,
                            const uint8_t *codes,
                            size_t codes_stride,
                            float *sums,
                            uint32_t *counts)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;

    for (size_t row = 0; row < n; row++)
        for (size_t j = 0; j < shape->m; j++) {
            const size_t centroid = j * n_centroids + codes[j * codes_stride + row];
            const float *key = keys + row * shape->d + j * width;
            float *sum = sums + centroid * width;
            size_t i = 0;

            for (; i + LANES <= width; i += LANES)
                _mm256_storeu_ps(
                    sum + i, _mm256_add_ps(_mm256_loadu_ps(sum + i), _mm256_loadu_ps(key + i)));
            for (; i < width; i++)
                sum[i] += key[i];
            counts[centroid]++;
        }
}

/* Products with n_vectors of centroids in one subspace. */
INLINE void table_part(const float *centroids,
                       size_t n_centroids,
                       const float *x,
                       size_t width,
                       unsigned n_vectors,
                       int full,
                       float *ret_products)
{
    const __m256i lanes = first_lanes(n_centroids);
    __m256 products[TABLE_VECTORS];

    for (unsigned v = 0; v < n_vectors; v++)
        products[v] = _mm256_setzero_ps();
    for (size_t i = 0; i < width; i++, centroids += n_centroids)
        for (unsigned v = 0; v < n_vectors; v++)
            products[v] =
                _mm256_fmadd_ps(_mm256_broadcast_ss(x + i),
                                load(centroids + v * LANES, full, lanes), products[v]);
    for (unsigned v = 0; v < n_vectors; v++)
        if (full)
            _mm256_storeu_ps(ret_products + v * LANES, products[v]);
        else
            _mm256_maskstore_ps(ret_products, lanes, products[v]);
}

AVX2 static void table(const struct kv_pq_shape *shape,
                       const float *centroids,
                       const float *query,
                       float *ret_table)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;

    for (size_t j = 0; j < shape->m; j++) {
        size_t c = 0;

        for (; c + TABLE_VECTORS * LANES <= n_centroids; c += TABLE_VECTORS * LANES)
            table_part(centroids + c, n_centroids, query, width, TABLE_VECTORS, 1,
                       ret_table + c);
        for (; c < n_centroids; c += LANES)
            table_part(centroids + c, n_centroids, query, width, 1, 0, ret_table + c);
        centroids += width * n_centroids;
        query += width;
        ret_table += n_centroids;
    }
}

/* Look-ups are loads, one per row, subspace and query: the gathers of AVX2 take over twice as
 * long (1.2 ns against 0.5 for two subspaces, Zen 3).  A row's code is fetched once for all
 * queries; n_queries is a constant where this is called, and so is m where it is 2. */
INLINE void score_rows(const float *tables,
                       size_t n_centroids,
                       size_t m,
                       unsigned n_queries,
                       const uint8_t *tile,
                       size_t n,
                       float *ret_scores,
                       size_t scores_stride)
{
    const size_t size = m * n_centroids;

    for (size_t row = 0; row < n; row++) {
        const float *at = tables + tile[row];
        float sums[QUERIES];

        for (unsigned query = 0; query < n_queries; query++)
            sums[query] = at[query * size];
        for (size_t j = 1; j < m; j++) {
            at = tables + j * n_centroids + tile[j * KV_PQ_TILE + row];
            for (unsigned query = 0; query < n_queries; query++)
                sums[query] += at[query * size];
        }
        for (unsigned query = 0; query < n_queries; query++)
            ret_scores[query * scores_stride + row] = sums[query];
    }
}

INLINE void score_queries(const struct kv_pq_shape *shape,
                          const float *tables,
                          unsigned n_queries,
                          const uint8_t *tile,
                          size_t n,
                          float *ret_scores,
                          size_t scores_stride)
{
    const size_t n_centroids = kv_pq_n_centroids(shape);

    if (shape->m == 2)
        score_rows(tables, n_centroids, 2, n_queries, tile, n, ret_scores, scores_stride);
    else
        score_rows(tables, n_centroids, shape->m, n_queries, tile, n, ret_scores,
                   scores_stride);
}

AVX2 static void score(const struct kv_pq_shape *shape,
                       const float *tables,
                       size_t n_queries,
                       const uint8_t *tile,
                       size_t n,
                       float *ret_scores,
                       size_t scores_stride)
{
    for (; n_queries >= QUERIES; n_queries -= QUERIES) {
        score_queries(shape, tables, QUERIES, tile, n, ret_scores, scores_stride);
        tables += QUERIES * kv_pq_table_size(shape);
        ret_scores += QUERIES * scores_stride;
    }
    if (n_queries >= 2) {
        score_queries(shape, tables, 2, tile, n, ret_scores, scores_stride);
        tables += 2 * kv_pq_table_size(shape);
        ret_scores += 2 * scores_stride;
        n_queries -= 2;
    }
    if (n_queries > 0)
        score_queries(shape, tables, 1, tile, n, ret_scores, scores_stride);
}

const struct kv_pq_kernels kv_pq_avx2 = {
    .name = "avx2",
    .supported = tiers_has_avx2,
    .encode = encode,
    .accumulate = accumulate,
    .table = table,
    .score = score,
};

#endif
