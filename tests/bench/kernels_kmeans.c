/* K-means, m = 2 and b = 6: codes of keys, and whole steps over a sample.  Keys are fp32, as
 * they are after kv_exact_scores_load().  Of operations only those of the inner products
 * count. */
#include "tests/bench/kernels.h"

#include "kernels/kmeans.h"

#include <stdlib.h>

enum {
    SUBSPACES = 2,
    BITS = 6,
    AT_ONCE = 1024,
    SAMPLE_ROWS = 8192,
};

struct kmeans {
    const struct kernels *kernels;
    const struct kernels_shape *model;
    struct kv_pq_shape shape;
    struct kv_kmeans_codebook book;
    struct kv_kmeans_sums sums;
    uint8_t *codes;
};

/* The i-th part of `to`, of so many keys. */
static const float *keys_at(const struct kmeans *kmeans, size_t i, size_t rows)
{
    const size_t bytes = rows * kmeans->shape.d * sizeof(float);

    return (const float *)(const void *)(kmeans->kernels->to +
                                         i % (kmeans->kernels->bytes / bytes) * bytes);
}

static void encode(void *arg, size_t i)
{
    const struct kmeans *kmeans = arg;

    kv_kmeans_encode(&kmeans->shape, &kmeans->book, keys_at(kmeans, i, AT_ONCE), AT_ONCE,
                     kmeans->codes, AT_ONCE);
}

/* Centroids move as they do in training, and stay where the next head finds them. */
static void step(void *arg, size_t i)
{
    const struct kmeans *kmeans = arg;
    const struct kv_pq_shape *shape = &kmeans->shape;
    const float *keys = keys_at(kmeans, i, SAMPLE_ROWS);

    for (size_t row = 0; row < SAMPLE_ROWS; row += AT_ONCE)
        kv_kmeans_step(shape, &kmeans->book, keys + row * shape->d, AT_ONCE, kmeans->codes,
                       AT_ONCE, &kmeans->sums);
    kv_kmeans_update(shape, &kmeans->book, &kmeans->sums);
}

static bool
measure(struct kmeans *kmeans, const char *name, size_t n, void (*turn)(void *arg, size_t i))
{
    const double operations = 2.0 * (double)(n * kv_pq_centroids_size(&kmeans->shape));
    const double bytes = (double)(n * kmeans->shape.d * sizeof(float));

    return kernels_measure(
        kmeans->kernels,
        &(struct kernels_case){
            .name = name,
            .unit = "GFLOP/s",
            .amount = 1e-9 * operations,
            .params = {.shape = kmeans->model->name, .n = (unsigned)n, .data = "cold"},
            .n_needs = 2,
            .needs = {{KERNELS_FMA, operations, 0, 0}, {KERNELS_READ, bytes, 0, 0}},
            .turn = turn,
            .arg = kmeans,
        });
}

bool kernels_kmeans(struct bench *bench, const struct bench_load *load)
{
    struct kernels *kernels = kernels_open(bench);
    bool is_good = kernels != NULL;

    (void)load;
    if (is_good)
        kernels_fill_normal((float *)(void *)kernels->to, kernels->bytes / sizeof(float), 10);
    for (unsigned i = 0; is_good && i < KERNELS_N_SHAPES; i++) {
        const struct kernels_shape *model = &kernels_shapes[i];
        struct kmeans kmeans = {
            .kernels = kernels, .model = model, .shape = {model->d, SUBSPACES, BITS}};
        const size_t size = kv_pq_centroids_size(&kmeans.shape);
        const size_t n_table = kv_pq_table_size(&kmeans.shape);

        kmeans.book.centroids = kernels_alloc(size, sizeof(float));
        kmeans.book.half_sq_norms = kernels_alloc(n_table, sizeof(float));
        kmeans.sums.sums = kernels_alloc(size, sizeof(float));
        kmeans.sums.counts = kernels_alloc(n_table, sizeof(uint32_t));
        kmeans.codes = kernels_alloc(SUBSPACES * AT_ONCE, 1);
        is_good = kmeans.book.centroids != NULL && kmeans.book.half_sq_norms != NULL &&
                  kmeans.sums.sums != NULL && kmeans.sums.counts != NULL &&
                  kmeans.codes != NULL;
        if (is_good) {
            kernels_fill_normal(kmeans.book.centroids, size, 11);
            kv_kmeans_half_sq_norms(&kmeans.shape, &kmeans.book);
            is_good = measure(&kmeans, "kernels.kmeans.encode", AT_ONCE, encode) &&
                      measure(&kmeans, "kernels.kmeans.step", SAMPLE_ROWS, step);
        }
        free(kmeans.book.centroids);
        free(kmeans.book.half_sq_norms);
        free(kmeans.sums.sums);
        free(kmeans.sums.counts);
        free(kmeans.codes);
    }
    return is_good;
}
