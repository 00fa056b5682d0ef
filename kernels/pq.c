#include "kernels/pq.h"
#include "kernels/dispatch.h"

#include <assert.h>
#include <math.h>

static const struct kv_pq_kernels *best;

bool kv_pq_shape_valid(const struct kv_pq_shape *shape)
{
    return shape->m >= 1 && shape->m <= KV_PQ_SUBSPACES_MAX && shape->bits >= 1 &&
           shape->bits <= KV_PQ_BITS_MAX && shape->d >= 1 && shape->d % shape->m == 0;
}

static int always(void)
{
    return 1;
}

static void scalar_tables(const struct kv_pq_shape *shape,
                          const float *centroids,
                          const float *queries,
                          size_t n_queries,
                          float *ret_tables)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;

    for (size_t query = 0; query < n_queries; query++)
        for (size_t j = 0; j < shape->m; j++)
            for (size_t c = 0; c < n_centroids; c++) {
                const float *at = centroids + j * width * n_centroids + c;
                float product = 0;

                for (size_t i = 0; i < width; i++)
                    product = fmaf(queries[query * shape->d + j * width + i],
                                   at[i * n_centroids], product);
                ret_tables[(query * shape->m + j) * n_centroids + c] = product;
            }
}

static const struct kv_pq_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .tables = scalar_tables,
};

/* Slowest first; the last one that this CPU supports is used. */
static const struct kv_pq_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_pq_avx2,
    &kv_pq_avx512,
#endif
};

__attribute__((constructor)) static void choose(void)
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_pq_kernels *kv_pq_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}

void kv_pq_tables(const struct kv_pq_shape *shape,
                  const float *centroids,
                  const float *queries,
                  size_t n_queries,
                  float *ret_tables)
{
    assert(kv_pq_shape_valid(shape));
    best->tables(shape, centroids, queries, n_queries, ret_tables);
}
