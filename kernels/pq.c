#include "pq.h"
#include "tiers.h"

#include <math.h>

static const struct kv_pq_kernels *best;

bool kv_pq_shape_valid(const struct kv_pq_shape *shape)
{
    return shape->m >= 1 && shape->m <= KV_PQ_SUBSPACES_MAX && shape->bits >= 1 &&
           shape->bits <= KV_PQ_BITS_MAX && shape->d >= 1 && shape->d % shape->m == 0;
}

void kv_pq_set_centroid(const struct kv_pq_shape *shape,
                        float *centroids,
                        uint32_t centroid,
                        const float *key)
{
    for (size_t i = 0; i < shape->d; i++)
        centroids[(i << shape->bits) + centroid] = key[i];
}

void kv_pq_half_squares(const struct kv_pq_shape *shape,
                        const float *centroids,
                        float *ret_half_squares)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;

    for (size_t j = 0; j < shape->m; j++)
        for (size_t c = 0; c < n_centroids; c++) {
            const float *at = centroids + j * width * n_centroids + c;
            float sum = 0;

            for (size_t i = 0; i < width; i++)
                sum = fmaf(at[i * n_centroids], at[i * n_centroids], sum);
            ret_half_squares[j * n_centroids + c] = sum / 2;
        }
}

double kv_pq_update(const struct kv_pq_shape *shape,
                    const float *sums,
                    const uint32_t *counts,
                    float *centroids)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;
    double moved = 0;

    for (size_t j = 0; j < shape->m; j++)
        for (size_t c = 0; c < n_centroids; c++) {
            const size_t row = j * n_centroids + c;
            float *at = centroids + j * width * n_centroids + c;

            if (counts[row] == 0)
                continue;
            for (size_t i = 0; i < width; i++) {
                const float mean = sums[row * width + i] / (float)counts[row];
                const double by = (double)mean - at[i * n_centroids];

                moved += by * by;
                at[i * n_centroids] = mean;
            }
        }
    return moved;
}

static int always(void)
{
    return 1;
}

static unsigned scalar_nearest(const float *centroids,
                               const float *half_squares,
                               size_t n_centroids,
                               const float *x,
                               size_t width)
{
    float least = INFINITY;
    unsigned nearest = 0;

    for (unsigned c = 0; c < n_centroids; c++) {
        float distance = half_squares[c];

        for (size_t i = 0; i < width; i++)
            distance = fmaf(-x[i], centroids[i * n_centroids + c], distance);
        if (distance < least) {
            least = distance;
            nearest = c;
        }
    }
    return nearest;
}

static void scalar_encode(const struct kv_pq_shape *shape,
                          const float *centroids,
                          const float *half_squares,
                          const float *keys,
                          size_t n,
                          uint8_t *ret_codes,
                          size_t codes_stride)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;

    for (size_t row = 0; row < n; row++)
        for (size_t j = 0; j < shape->m; j++)
            ret_codes[j * codes_stride + row] = (uint8_t)scalar_nearest(
                centroids + j * width * n_centroids, half_squares + j * n_centroids,
                n_centroids, keys + row * shape->d + j * width, width);
}

static void scalar_accumulate(const struct kv_pq_shape *shape,
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

            for (size_t i = 0; i < width; i++)
                sums[centroid * width + i] += key[i];
            counts[centroid]++;
        }
}

static void scalar_table(const struct kv_pq_shape *shape,
                         const float *centroids,
                         const float *query,
                         float *ret_table)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;

    for (size_t j = 0; j < shape->m; j++)
        for (size_t c = 0; c < n_centroids; c++) {
            const float *at = centroids + j * width * n_centroids + c;
            float product = 0;

            for (size_t i = 0; i < width; i++)
                product = fmaf(query[j * width + i], at[i * n_centroids], product);
            ret_table[j * n_centroids + c] = product;
        }
}

static void scalar_score(const struct kv_pq_shape *shape,
                         const float *tables,
                         size_t n_queries,
                         const uint8_t *tile,
                         size_t n,
                         float *ret_scores,
                         size_t scores_stride)
{
    const size_t n_centroids = kv_pq_n_centroids(shape);

    for (size_t query = 0; query < n_queries; query++) {
        const float *table = tables + query * kv_pq_table_size(shape);

        for (size_t row = 0; row < n; row++) {
            float score = table[tile[row]];

            for (size_t j = 1; j < shape->m; j++)
                score += table[j * n_centroids + tile[j * KV_PQ_TILE + row]];
            ret_scores[query * scores_stride + row] = score;
        }
    }
}

static const struct kv_pq_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .encode = scalar_encode,
    .accumulate = scalar_accumulate,
    .table = scalar_table,
    .score = scalar_score,
};

/* Slowest first. */
static const struct kv_pq_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_pq_avx2,
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

void kv_pq_encode(const struct kv_pq_shape *shape,
                  const float *centroids,
                  const float *half_squares,
                  const float *keys,
                  size_t n,
                  uint8_t *ret_codes,
                  size_t codes_stride)
{
    best->encode(shape, centroids, half_squares, keys, n, ret_codes, codes_stride);
}

void kv_pq_accumulate(const struct kv_pq_shape *shape,
                      const float *keys,
                      size_t n,
                      const uint8_t *codes,
                      size_t codes_stride,
                      float *sums,
                      uint32_t *counts)
{
    best->accumulate(shape, keys, n, codes, codes_stride, sums, counts);
}

void kv_pq_table(const struct kv_pq_shape *shape,
                 const float *centroids,
                 const float *query,
                 float *ret_table)
{
    best->table(shape, centroids, query, ret_table);
}

void kv_pq_score(const struct kv_pq_shape *shape,
                 const float *tables,
                 size_t n_queries,
                 const uint8_t *tile,
                 size_t n,
                 float *ret_scores,
                 size_t scores_stride)
{
    best->score(shape, tables, n_queries, tile, n, ret_scores, scores_stride);
}
