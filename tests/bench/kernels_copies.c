/* 4-bit copies of keys: made of a block's keys, and scored for candidates that stand alone, one
 * row in sixteen, as the first cut of a query has them. */
#include "tests/bench/kernels.h"

#include "kernels/key_copies.h"
#include "kvserver/base/random.h"

#include <stdlib.h>

enum {
    CANDIDATES = 8192, /* of 131,072 rows */
    GAP = 16,
    PASSES = 4, /* through memory, other candidates each time */
    LINE_BYTES = 64,
};

struct copies {
    const struct kernels *kernels;
    const struct kernels_shape *shape;
    const void **blocks; /* (n_turns, CANDIDATES) */
    uint8_t *rows;
    size_t n_turns;
    double n_lines; /* of a turn, on average, with those of scales */
    float *mean, *queries, *scores;
    void *rounded, *block;
};

static void score_candidates(void *arg, size_t i)
{
    const struct copies *copies = arg;
    const size_t at = i % copies->n_turns * CANDIDATES;

    kv_key_copies_score_list(copies->shape->d, copies->blocks + at, copies->rows + at,
                             CANDIDATES, copies->rounded, copies->shape->n_queries,
                             copies->scores, CANDIDATES);
}

/* `from` as numbers of fp32, which are below 2 as well. */
static void put_block(void *arg, size_t i)
{
    const struct copies *copies = arg;
    const size_t bytes = KV_PQ_TILE * copies->shape->d * sizeof(float);
    const uint8_t *keys = copies->kernels->from + i % (copies->kernels->bytes / bytes) * bytes;

    kv_key_copies_put(copies->shape->d, copies->mean, (const float *)(const void *)keys, 0,
                      KV_PQ_TILE, copies->block);
}

/* `from` as blocks of copies; any bytes are some. */
static bool choose(struct copies *copies)
{
    const size_t bytes = kv_key_copies_bytes(copies->shape->d);
    const size_t n_groups = copies->kernels->bytes / bytes * KV_PQ_TILE / GAP;
    const size_t lines = (kv_key_copy_bytes(copies->shape->d) + LINE_BYTES - 1) / LINE_BYTES;
    size_t n, n_lines = 0, last = SIZE_MAX;
    struct kv_random random;

    copies->n_turns = n_groups * PASSES / CANDIDATES + 1;
    n = copies->n_turns * CANDIDATES;
    copies->blocks = kernels_alloc(n, sizeof(*copies->blocks));
    copies->rows = kernels_alloc(n, sizeof(*copies->rows));
    if (copies->blocks == NULL || copies->rows == NULL)
        return false;
    kv_random_init(&random, 11);
    for (size_t i = 0; i < n; i++) {
        const size_t row = i % n_groups * GAP + kv_random_below(&random, GAP);

        copies->blocks[i] = copies->kernels->from + row / KV_PQ_TILE * bytes;
        copies->rows[i] = (uint8_t)(row % KV_PQ_TILE);
        n_lines += lines + (row / KV_KEY_COPIES_GROUP != last);
        last = row / KV_KEY_COPIES_GROUP;
    }
    copies->n_lines = (double)n_lines / (double)copies->n_turns;
    return true;
}

static bool measure(struct copies *copies)
{
    const struct kernels_shape *shape = copies->shape;
    const size_t h = kv_key_copy_bytes(shape->d);
    const size_t key_bytes = shape->d * sizeof(float);

    /* The limit reads one line in eight, any of them; candidates of 128 elements with their
     * scales take one in eleven.  (One in sixteen, even ones only, would take three times as
     * long.) */
    return kernels_measure(copies->kernels,
                           &(struct kernels_case){
                               .name = "kernels.copies.list",
                               .unit = "us",
                               .params = {.shape = shape->name,
                                          .bytes = h + sizeof(uint16_t),
                                          .queries = shape->n_queries,
                                          .n = CANDIDATES,
                                          .data = "cold"},
                               .n_needs = 1,
                               .needs = {{KERNELS_ROWS, copies->n_lines * LINE_BYTES,
                                          LINE_BYTES, LINE_BYTES}},
                               .turn = score_candidates,
                               .arg = copies,
                           }) &&
           kernels_measure(
               copies->kernels,
               &(struct kernels_case){
                   .name = "kernels.copies.put",
                   .unit = "GB/s",
                   .amount = 1e-9 * (double)(KV_PQ_TILE * key_bytes),
                   .params = {.shape = shape->name,
                              .bytes = key_bytes,
                              .n = KV_PQ_TILE,
                              .data = "cold"},
                   .n_needs = 1,
                   .needs = {{KERNELS_READ, (double)(KV_PQ_TILE * key_bytes), 0, 0}},
                   .turn = put_block,
                   .arg = copies,
               });
}

bool kernels_copies(struct bench *bench, const struct bench_load *load)
{
    struct kernels *kernels = kernels_open(bench);
    bool is_good = kernels != NULL;

    (void)load;
    for (unsigned i = 0; is_good && i < KERNELS_N_SHAPES; i++) {
        const struct kernels_shape *shape = &kernels_shapes[i];
        const size_t n_queries = shape->n_queries;
        struct copies copies = {
            .kernels = kernels,
            .shape = shape,
            .mean = kernels_alloc(shape->d, sizeof(float)),
            .queries = kernels_alloc(n_queries * shape->d, sizeof(float)),
            .scores = kernels_alloc(n_queries * CANDIDATES, sizeof(float)),
            .rounded = kernels_alloc(1, kv_key_copies_query_bytes(shape->d, n_queries)),
            .block = kernels_alloc(1, kv_key_copies_bytes(shape->d)),
        };

        is_good = copies.mean != NULL && copies.queries != NULL && copies.scores != NULL &&
                  copies.rounded != NULL && copies.block != NULL && choose(&copies);
        if (is_good) {
            kernels_fill_normal(copies.mean, shape->d, 9);
            kernels_fill_normal(copies.queries, n_queries * shape->d, 10);
            kv_key_copies_round(shape->d, copies.mean, copies.queries, n_queries,
                                copies.rounded);
            is_good = measure(&copies);
        }
        free(copies.blocks);
        free(copies.rows);
        free(copies.mean);
        free(copies.queries);
        free(copies.scores);
        free(copies.rounded);
        free(copies.block);
    }
    return is_good;
}
