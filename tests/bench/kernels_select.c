/* Selection: exactly k of n scores.  Scores are other ones in every turn, so that no branch is
 * learned; they come from memory, where a query's own would come from L2. */
#include "tests/bench/kernels.h"

#include "kernels/select.h"

#include <stdlib.h>

static const unsigned sizes[] = {32 << 10, 128 << 10, 1 << 20};
enum {
    N_SIZES = sizeof(sizes) / sizeof(sizes[0]),
};

struct select {
    const struct kernels *kernels;
    size_t n, k;
    uint32_t *chosen;
    float *scratch;
};

static void select_turn(void *arg, size_t i)
{
    struct select *select = arg;
    const float *all = (const float *)(const void *)select->kernels->to;
    const size_t n_heads = select->kernels->bytes / sizeof(float) / select->n;

    kv_topk_select(all + i % n_heads * select->n, select->n, select->k, select->chosen,
                   select->scratch);
}

static bool measure(struct kernels *kernels, size_t n, size_t k)
{
    struct select select = {.kernels = kernels, .n = n, .k = k};
    bool is_good;

    select.chosen = kernels_alloc(k + KV_TOPK_SPARE, sizeof(*select.chosen));
    select.scratch = kernels_alloc(n, sizeof(*select.scratch));
    if (select.chosen == NULL || select.scratch == NULL) {
        free(select.chosen);
        free(select.scratch);
        return false;
    }
    is_good = kernels_measure(
        kernels, &(struct kernels_case){
                     .name = "kernels.select.float",
                     .unit = "Gscore/s",
                     .amount = 1e-9 * (double)n,
                     .params = {.n = (unsigned)n, .k = (unsigned)k, .data = "cold"},
                     .n_needs = 1,
                     .needs = {{KERNELS_READ, (double)(n * sizeof(float)), 0, 0}},
                     .turn = select_turn,
                     .arg = &select,
                 });
    free(select.chosen);
    free(select.scratch);
    return is_good;
}

bool kernels_select(struct bench *bench, const struct bench_load *load)
{
    struct kernels *kernels = kernels_open(bench);

    (void)load;
    if (kernels == NULL)
        return false;
    kernels_fill_normal((float *)(void *)kernels->to, kernels->bytes / sizeof(float), 9);
    for (unsigned i = 0; i < N_SIZES; i++)
        if (!measure(kernels, sizes[i], sizes[i] / 10) || !measure(kernels, sizes[i], 256))
            return false;
    return true;
}
