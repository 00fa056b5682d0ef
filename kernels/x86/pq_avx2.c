/* Lanes are centroids.  Two queries by four vectors of centroids at a time are eight sums,
 * enough to hide the latency of fma, and centroids are loaded once for both queries.  A single
 * query uses eight vectors.
 *
 * Codes of one or two bits have fewer centroids than lanes: the last lanes are then masked out
 * of loads and stores. */
#include "kernels/dispatch.h"
#include "kernels/pq.h"
#include "kernels/x86/avx2.h"

#if defined(__x86_64__)

enum {
    VECTORS = 4, /* of centroids, for QUERIES */
    QUERIES = 2,
    VECTORS_MAX = 8, /* for one query */
};

INLINE __m256 load(const float *at, int full, __m256i lanes)
{
    return full ? _mm256_loadu_ps(at) : _mm256_maskload_ps(at, lanes);
}

/* Computes products of n_queries queries, `stride` apart, with n_vectors vectors of centroids
 * in one subspace; both numbers are constants at the calls. */
INLINE void part(const float *centroids,
                 size_t n_centroids,
                 const float *x,
                 size_t stride,
                 unsigned n_queries,
                 size_t width,
                 unsigned n_vectors,
                 int full,
                 float *ret_products,
                 size_t products_stride)
{
    const __m256i lanes = first_lanes(n_centroids < LANES ? n_centroids : LANES);
    __m256 products[QUERIES][VECTORS_MAX];

    for (unsigned q = 0; q < n_queries; q++)
        for (unsigned v = 0; v < n_vectors; v++)
            products[q][v] = _mm256_setzero_ps();
    for (size_t i = 0; i < width; i++, centroids += n_centroids) {
        __m256 at[VECTORS_MAX];

        for (unsigned v = 0; v < n_vectors; v++)
            at[v] = load(centroids + v * LANES, full, lanes);
        for (unsigned q = 0; q < n_queries; q++) {
            const __m256 element = _mm256_broadcast_ss(x + q * stride + i);

            for (unsigned v = 0; v < n_vectors; v++)
                products[q][v] = _mm256_fmadd_ps(element, at[v], products[q][v]);
        }
    }
    for (unsigned q = 0; q < n_queries; q++)
        for (unsigned v = 0; v < n_vectors; v++) {
            float *to = ret_products + q * products_stride + v * LANES;

            if (full)
                _mm256_storeu_ps(to, products[q][v]);
            else
                _mm256_maskstore_ps(to, lanes, products[q][v]);
        }
}

INLINE void some_tables(const struct kv_pq_shape *shape,
                        const float *centroids,
                        const float *queries,
                        unsigned n_queries,
                        float *ret_tables)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;
    const size_t n_table = kv_pq_table_size(shape);

    for (size_t j = 0; j < shape->m; j++) {
        size_t c = 0;

        for (; n_queries == 1 && c + VECTORS_MAX * LANES <= n_centroids;
             c += VECTORS_MAX * LANES)
            part(centroids + c, n_centroids, queries, shape->d, 1, width, VECTORS_MAX, 1,
                 ret_tables + c, n_table);
        for (; c + VECTORS * LANES <= n_centroids; c += VECTORS * LANES)
            part(centroids + c, n_centroids, queries, shape->d, n_queries, width, VECTORS, 1,
                 ret_tables + c, n_table);
        for (; c < n_centroids; c += LANES)
            part(centroids + c, n_centroids, queries, shape->d, n_queries, width, 1, 0,
                 ret_tables + c, n_table);
        centroids += width * n_centroids;
        queries += width;
        ret_tables += n_centroids;
    }
}

AVX2 static void tables(const struct kv_pq_shape *shape,
                        const float *centroids,
                        const float *queries,
                        size_t n_queries,
                        float *ret_tables)
{
    const size_t n_table = kv_pq_table_size(shape);

    for (; n_queries >= QUERIES; n_queries -= QUERIES) {
        some_tables(shape, centroids, queries, QUERIES, ret_tables);
        queries += QUERIES * shape->d;
        ret_tables += QUERIES * n_table;
    }
    for (; n_queries > 0; n_queries--) {
        some_tables(shape, centroids, queries, 1, ret_tables);
        queries += shape->d;
        ret_tables += n_table;
    }
}

const struct kv_pq_kernels kv_pq_avx2 = {
    .name = "avx2",
    .supported = kv_has_avx2,
    .tables = tables,
};

#endif
