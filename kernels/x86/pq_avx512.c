/* Lanes are centroids; the 64 centroids of six bits are four vectors.  Four queries by four
 * vectors at a time are 16 sums, which fit the registers together with the vectors and an
 * element.  If there are fewer centroids than lanes, the last lanes are masked out of loads and
 * stores. */
#include "kernels/dispatch.h"
#include "kernels/pq.h"
#include "kernels/x86/avx512.h"

#if defined(__x86_64__)

enum {
    VECTORS = 4,
    QUERIES = 4,
};

/* Computes products of n_queries queries, `stride` apart, with n_vectors vectors of centroids
 * in one subspace; both numbers are constants at the calls. */
INLINE void part(const float *centroids,
                 size_t n_centroids,
                 __mmask16 lanes,
                 const float *x,
                 size_t stride,
                 unsigned n_queries,
                 size_t width,
                 unsigned n_vectors,
                 float *ret_products,
                 size_t products_stride)
{
    __m512 products[QUERIES][VECTORS];

    for (unsigned q = 0; q < n_queries; q++)
        for (unsigned v = 0; v < n_vectors; v++)
            products[q][v] = _mm512_setzero_ps();
    for (size_t i = 0; i < width; i++, centroids += n_centroids) {
        __m512 at[VECTORS];

        for (unsigned v = 0; v < n_vectors; v++)
            at[v] = _mm512_maskz_loadu_ps(lanes, centroids + v * LANES);
        for (unsigned q = 0; q < n_queries; q++) {
            const __m512 element = _mm512_set1_ps(x[q * stride + i]);

            for (unsigned v = 0; v < n_vectors; v++)
                products[q][v] = _mm512_fmadd_ps(element, at[v], products[q][v]);
        }
    }
    for (unsigned q = 0; q < n_queries; q++)
        for (unsigned v = 0; v < n_vectors; v++)
            _mm512_mask_storeu_ps(ret_products + q * products_stride + v * LANES, lanes,
                                  products[q][v]);
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

        for (; c + VECTORS * LANES <= n_centroids; c += VECTORS * LANES)
            part(centroids + c, n_centroids, 0xffff, queries, shape->d, n_queries, width,
                 VECTORS, ret_tables + c, n_table);
        for (; c < n_centroids; c += LANES)
            part(centroids + c, n_centroids, first_lanes(n_centroids - c), queries, shape->d,
                 n_queries, width, 1, ret_tables + c, n_table);
        centroids += width * n_centroids;
        queries += width;
        ret_tables += n_centroids;
    }
}

AVX512 static void tables(const struct kv_pq_shape *shape,
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

const struct kv_pq_kernels kv_pq_avx512 = {
    .name = "avx512",
    .supported = kv_has_avx512,
    .tables = tables,
};

#endif
