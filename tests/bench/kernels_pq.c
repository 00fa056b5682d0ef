/* Product quantisation, m = 2 and b = 6: tables of queries. */
#include "tests/bench/kernels.h"

#include "kernels/pq.h"

#include <stdlib.h>

enum {
    SUBSPACES = 2,
    BITS = 6,
};

struct pq {
    const struct kernels *kernels;
    const struct kernels_shape *model;
    struct kv_pq_shape shape;
    size_t n_codebook, n_table; /* elements */
    float *queries, *tables;
};

static float *floats_of(const struct pq *pq)
{
    return (float *)(void *)pq->kernels->to;
}

/* The i-th part of `to`, each of so many numbers. */
static const float *part_at(const struct pq *pq, size_t i, size_t numbers)
{
    return floats_of(pq) + i % (pq->kernels->bytes / sizeof(float) / numbers) * numbers;
}

static void make_tables(void *arg, size_t i)
{
    const struct pq *pq = arg;
    const float *centroids = part_at(pq, i, pq->n_codebook);

    kv_pq_tables(&pq->shape, centroids, pq->queries, pq->model->n_queries, pq->tables);
}

static bool measure(struct pq *pq)
{
    const struct kernels *kernels = pq->kernels;
    const unsigned n_queries = pq->model->n_queries;
    const double operations = 2.0 * (double)pq->n_codebook * n_queries;
    const struct kernels_case tables = {
        .name = "kernels.pq.table",
        .unit = "GFLOP/s",
        .amount = 1e-9 * operations,
        .params = {.shape = pq->model->name, .queries = n_queries, .data = "cold"},
        .n_needs = 2,
        .needs = {{KERNELS_READ, (double)(pq->n_codebook * sizeof(float)), 0, 0},
                  {KERNELS_FMA, operations, 0, 0}},
        .turn = make_tables,
        .arg = pq,
    };
    kernels_fill_normal(floats_of(pq), pq->kernels->bytes / sizeof(float), 10);
    return kernels_measure(kernels, &tables);
}

bool kernels_pq(struct bench *bench, const struct bench_load *load)
{
    struct kernels *kernels = kernels_open(bench);
    bool is_good = kernels != NULL;

    (void)load;
    for (unsigned i = 0; is_good && i < KERNELS_N_SHAPES; i++) {
        const struct kernels_shape *model = &kernels_shapes[i];
        struct pq pq = {
            .kernels = kernels, .model = model, .shape = {model->d, SUBSPACES, BITS}};

        pq.n_codebook = kv_pq_centroids_size(&pq.shape);
        pq.n_table = kv_pq_table_size(&pq.shape);
        pq.queries = kernels_alloc(model->n_queries * model->d, sizeof(float));
        pq.tables = kernels_alloc(model->n_queries * pq.n_table, sizeof(float));
        is_good = pq.queries != NULL && pq.tables != NULL;
        if (is_good) {
            kernels_fill_normal(pq.queries, model->n_queries * model->d, 12);
            is_good = measure(&pq);
        }
        free(pq.queries);
        free(pq.tables);
    }
    return is_good;
}
