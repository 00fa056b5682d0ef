/* Exact scores: of a prompt that has no codes yet, and of the candidates that codes named.
 * Keys are the first halves of their rows, as the store has them. */
#include "tests/bench/kernels.h"

#include "kernels/exact_scores.h"

#include <stdlib.h>

enum {
    BLOCK_ROWS = 128,
    CANDIDATES = 4096, /* four times 1024 */
};

struct keys {
    const struct kernels *kernels;
    const struct kernels_shape *shape;
    size_t row_bytes;
    const void **rows; /* (n_turns, CANDIDATES) */
    size_t n_turns;
    float *queries; /* (n_queries, d) */
    float *scores;  /* (n_queries, CANDIDATES) */
};

static void score_block(void *arg, size_t i)
{
    const struct keys *keys = arg;
    const size_t bytes = BLOCK_ROWS * keys->row_bytes;

    kv_exact_scores_score(KV_KEY_FP16,
                          keys->kernels->from + i % (keys->kernels->bytes / bytes) * bytes,
                          keys->row_bytes, BLOCK_ROWS, keys->shape->d, keys->queries,
                          keys->shape->n_queries, keys->scores, BLOCK_ROWS);
}

static void score_candidates(void *arg, size_t i)
{
    const struct keys *keys = arg;

    kv_exact_scores_score_list(KV_KEY_FP16, keys->rows + i % keys->n_turns * CANDIDATES,
                               CANDIDATES, keys->shape->d, keys->queries,
                               keys->shape->n_queries, keys->scores, CANDIDATES);
}

static bool measure(struct keys *keys, bool is_list)
{
    const struct kernels_shape *shape = keys->shape;
    const size_t n = is_list ? CANDIDATES : BLOCK_ROWS, key_bytes = kernels_key_bytes(shape);
    const double pairs = (double)(n * shape->n_queries);

    return kernels_measure(keys->kernels,
                           &(struct kernels_case){
                               .name = is_list ? "kernels.keys.list" : "kernels.keys.block",
                               .unit = "GB/s",
                               .amount = 1e-9 * (double)(n * key_bytes),
                               .params = {.shape = shape->name,
                                          .bytes = key_bytes,
                                          .queries = shape->n_queries,
                                          .n = (unsigned)n,
                                          .data = "cold"},
                               .n_needs = 2,
                               .needs = {{is_list ? KERNELS_ROWS : KERNELS_READ,
                                          (double)(n * key_bytes), keys->row_bytes, key_bytes},
                                         {KERNELS_FMA, pairs * 2 * shape->d, 0, 0}},
                               .turn = is_list ? score_candidates : score_block,
                               .arg = keys,
                           });
}

bool kernels_keys(struct bench *bench, const struct bench_load *load)
{
    struct kernels *kernels = kernels_open(bench);
    bool is_good = kernels != NULL;

    (void)load;
    for (unsigned i = 0; is_good && i < KERNELS_N_SHAPES; i++) {
        const struct kernels_shape *shape = &kernels_shapes[i];
        struct keys keys = {
            .kernels = kernels,
            .shape = shape,
            .row_bytes = kernels_row_bytes(shape),
            .queries = kernels_alloc(shape->n_queries * shape->d, sizeof(float)),
            .scores = kernels_alloc(shape->n_queries * CANDIDATES, sizeof(float)),
        };

        keys.rows = kernels_choose_rows(kernels, keys.row_bytes, 1, CANDIDATES, &keys.n_turns);
        is_good = keys.queries != NULL && keys.scores != NULL && keys.rows != NULL;
        if (is_good) {
            kernels_fill_normal(keys.queries, shape->n_queries * shape->d, 8);
            is_good = measure(&keys, false) && measure(&keys, true);
        }
        free(keys.rows);
        free(keys.queries);
        free(keys.scores);
    }
    return is_good;
}
