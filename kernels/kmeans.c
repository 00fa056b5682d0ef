#include "kernels/kmeans.h"
#include "kernels/dispatch.h"
#include "kernels/lanes.h"

#include <assert.h>
#include <math.h>
#include <string.h>

static const float SPLIT = 1.0f / 256; /* of an empty centroid from the one it splits */

static const struct kv_kmeans_kernels *best;

static int always(void)
{
    return 1;
}

static float square_of(const float *x, size_t width)
{
    float lanes[KV_SUM_LANES] = {0};

    for (size_t i = 0; i < width; i++)
        lanes[i % KV_SUM_LANES] = fmaf(x[i], x[i], lanes[i % KV_SUM_LANES]);
    return kv_sum_lanes(lanes);
}

static float augment_of(const float *x, size_t width, float max_norm_sq)
{
    const float left = max_norm_sq - square_of(x, width);

    return left > 0 ? sqrtf(left) : 0;
}

static void scalar_max_norm_sq(const struct kv_pq_shape *shape,
                               const float *keys,
                               size_t n,
                               float *max_norm_sq)
{
    const size_t width = shape->d / shape->m;

    for (size_t row = 0; row < n; row++)
        for (size_t j = 0; j < shape->m; j++) {
            const float square = square_of(keys + row * shape->d + j * width, width);

            if (square > max_norm_sq[j] && square < INFINITY)
                max_norm_sq[j] = square;
        }
}

void kv_kmeans_set_centroid(const struct kv_pq_shape *shape,
                            const struct kv_kmeans_codebook *codebook,
                            uint32_t centroid,
                            const float *key)
{
    const size_t width = shape->d / shape->m;

    assert(kv_pq_shape_valid(shape) && centroid < kv_pq_n_centroids(shape));
    for (size_t i = 0; i < shape->d; i++)
        codebook->centroids[(i << shape->bits) + centroid] = key[i];
    for (size_t j = 0; j < shape->m && codebook->augments != NULL; j++)
        codebook->augments[(j << shape->bits) + centroid] =
            augment_of(key + j * width, width, codebook->max_norm_sq[j]);
}

/* The distance of kmeans.h is half of the squared one without |x|^2, which is the same for all
 * centroids: |c|^2 / 2 - x . c.  Half of the squared norms is computed once, here. */
static void scalar_half_sq_norms(const struct kv_pq_shape *shape,
                                 const struct kv_kmeans_codebook *codebook)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;

    for (size_t j = 0; j < shape->m; j++)
        for (size_t c = 0; c < n_centroids; c++) {
            const float *at = codebook->centroids + j * width * n_centroids + c;
            const size_t row = j * n_centroids + c;
            float sum = 0;

            for (size_t i = 0; i < width; i++)
                sum = fmaf(at[i * n_centroids], at[i * n_centroids], sum);
            if (codebook->augments != NULL)
                sum = fmaf(codebook->augments[row], codebook->augments[row], sum);
            codebook->half_sq_norms[row] = sum / 2;
        }
}

static bool all_finite(const float *values, size_t n)
{
    bool finite = true;

    for (size_t i = 0; i < n; i++)
        finite &= isfinite(values[i]);
    return finite;
}

/* Sets the centroids of one subspace to the means of their rows, and the count of a centroid
 * whose sum is not finite to 0.  Returns the sum of squared movements. */
static double set_means(
    float *centroids, size_t n_centroids, size_t width, const float *sums, uint32_t *counts)
{
    double moved = 0;

    for (size_t c = 0; c < n_centroids; c++, sums += width) {
        float *at = centroids + c;

        if (counts[c] > 0 && !all_finite(sums, width))
            counts[c] = 0;
        if (counts[c] == 0)
            continue;
        for (size_t i = 0; i < width; i++, at += n_centroids) {
            const float mean = sums[i] / (float)counts[c];
            const double by = (double)mean - *at;

            moved += by * by;
            *at = mean;
        }
    }
    return moved;
}

/* Splits the largest clusters of one subspace for centroids without rows.  Counts are halved so
 * that the next empty centroid finds the next largest cluster. */
static void fill_empty(
    float *centroids, float *augments, size_t n_centroids, size_t width, uint32_t *counts)
{
    for (size_t c = 0; c < n_centroids; c++) {
        size_t largest = 0;

        if (counts[c] > 0)
            continue;
        for (size_t other = 1; other < n_centroids; other++)
            if (counts[other] > counts[largest])
                largest = other;
        if (counts[largest] < 2)
            return;
        /* Opposite signs in turn, so that the split is a change of direction, not of length. */
        for (size_t i = 0; i < width; i++) {
            float *at = centroids + i * n_centroids;

            at[c] = at[largest] * (i % 2 == 0 ? 1 + SPLIT : 1 - SPLIT);
        }
        if (augments != NULL)
            augments[c] = augments[largest];
        counts[c] = counts[largest] / 2;
        counts[largest] -= counts[c];
    }
}

double kv_kmeans_update(const struct kv_pq_shape *shape,
                        const struct kv_kmeans_codebook *codebook,
                        const struct kv_kmeans_sums *sums)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;
    double moved = 0;

    for (size_t j = 0; j < shape->m; j++) {
        float *centroids = codebook->centroids + j * width * n_centroids;
        float *augments =
            codebook->augments == NULL ? NULL : codebook->augments + j * n_centroids;
        uint32_t *counts = sums->counts + j * n_centroids;

        moved += set_means(centroids, n_centroids, width, sums->sums + j * width * n_centroids,
                           counts);
        for (size_t c = 0; c < n_centroids && augments != NULL; c++)
            if (counts[c] > 0)
                augments[c] = sums->augments[j * n_centroids + c] / (float)counts[c];
        fill_empty(centroids, augments, n_centroids, width, counts);
    }
    best->half_sq_norms(shape, codebook);
    memset(sums->sums, 0, kv_pq_centroids_size(shape) * sizeof(float));
    memset(sums->counts, 0, kv_pq_table_size(shape) * sizeof(uint32_t));
    if (codebook->augments != NULL)
        memset(sums->augments, 0, kv_pq_table_size(shape) * sizeof(float));
    return moved;
}

/* The nearest centroid of one subvector, and the subvector's augment. */
struct nearest {
    unsigned code;
    float distance, augment;
};

static struct nearest scalar_nearest(const struct kv_pq_shape *shape,
                                     const struct kv_kmeans_codebook *codebook,
                                     size_t j,
                                     const float *x)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;
    const float *centroids = codebook->centroids + j * width * n_centroids;
    const size_t row = j * n_centroids;
    struct nearest nearest = {.distance = INFINITY};

    if (codebook->augments != NULL)
        nearest.augment = augment_of(x, width, codebook->max_norm_sq[j]);
    for (unsigned c = 0; c < n_centroids; c++) {
        float distance = codebook->half_sq_norms[row + c];

        if (codebook->augments != NULL)
            distance = fmaf(-nearest.augment, codebook->augments[row + c], distance);
        for (size_t i = 0; i < width; i++)
            distance = fmaf(-x[i], centroids[i * n_centroids + c], distance);
        if (distance < nearest.distance) {
            nearest.distance = distance;
            nearest.code = c;
        }
    }
    return nearest;
}

static void scalar_encode(const struct kv_pq_shape *shape,
                          const struct kv_kmeans_codebook *codebook,
                          const float *keys,
                          size_t n,
                          uint8_t *ret_codes,
                          size_t codes_stride)
{
    const size_t width = shape->d / shape->m;

    for (size_t row = 0; row < n; row++)
        for (size_t j = 0; j < shape->m; j++)
            ret_codes[j * codes_stride + row] =
                (uint8_t)scalar_nearest(shape, codebook, j, keys + row * shape->d + j * width)
                    .code;
}

static void scalar_step(const struct kv_pq_shape *shape,
                        const struct kv_kmeans_codebook *codebook,
                        const float *keys,
                        size_t n,
                        uint8_t *ret_codes,
                        size_t codes_stride,
                        const struct kv_kmeans_sums *sums)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;

    for (size_t row = 0; row < n; row++)
        for (size_t j = 0; j < shape->m; j++) {
            const float *x = keys + row * shape->d + j * width;
            const struct nearest nearest = scalar_nearest(shape, codebook, j, x);
            const size_t centroid = j * n_centroids + nearest.code;

            ret_codes[j * codes_stride + row] = (uint8_t)nearest.code;
            if (!isfinite(nearest.distance))
                continue;
            for (size_t i = 0; i < width; i++)
                sums->sums[centroid * width + i] += x[i];
            sums->counts[centroid]++;
            if (codebook->augments != NULL)
                sums->augments[centroid] += nearest.augment;
        }
}

static const struct kv_kmeans_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .max_norm_sq = scalar_max_norm_sq,
    .half_sq_norms = scalar_half_sq_norms,
    .encode = scalar_encode,
    .step = scalar_step,
};

/* Slowest first; the last one that this CPU supports is used. */
static const struct kv_kmeans_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_kmeans_avx2,
    &kv_kmeans_avx512,
#endif
};

__attribute__((constructor)) static void choose(void)
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_kmeans_kernels *kv_kmeans_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}

void kv_kmeans_max_norm_sq(const struct kv_pq_shape *shape,
                           const float *keys,
                           size_t n,
                           float *max_norm_sq)
{
    best->max_norm_sq(shape, keys, n, max_norm_sq);
}

void kv_kmeans_half_sq_norms(const struct kv_pq_shape *shape,
                             const struct kv_kmeans_codebook *codebook)
{
    best->half_sq_norms(shape, codebook);
}

void kv_kmeans_encode(const struct kv_pq_shape *shape,
                      const struct kv_kmeans_codebook *codebook,
                      const float *keys,
                      size_t n,
                      uint8_t *ret_codes,
                      size_t codes_stride)
{
    best->encode(shape, codebook, keys, n, ret_codes, codes_stride);
}

void kv_kmeans_step(const struct kv_pq_shape *shape,
                    const struct kv_kmeans_codebook *codebook,
                    const float *keys,
                    size_t n,
                    uint8_t *ret_codes,
                    size_t codes_stride,
                    const struct kv_kmeans_sums *sums)
{
    best->step(shape, codebook, keys, n, ret_codes, codes_stride, sums);
}
