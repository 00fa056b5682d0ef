/* Rotary embedding: the keys of a piece of prefill, each by its position, and keys moved by so
 * many positions.  In place, so that every byte is read and written. */
#include "tests/bench/kernels.h"

#include "kernels/rope.h"

#include <stdlib.h>

enum {
    TOKENS = 256,
};

struct rope {
    const struct kernels *kernels;
    size_t d, n_heads;
    enum kv_rope_style style;
    size_t stride; /* of turns */
    float *turns;
};

static void turn(void *arg, size_t i)
{
    const struct rope *rope = arg;
    const size_t bytes = TOKENS * rope->n_heads * rope->d * sizeof(float);
    uint8_t *at = rope->kernels->to + i % (rope->kernels->bytes / bytes) * bytes;

    kv_rope_rotate(rope->style, KV_ROPE_FORWARD, rope->turns, rope->stride, rope->d,
                   (float *)(void *)at, TOKENS, rope->n_heads, rope->d);
}

static bool measure(struct rope *rope, const char *name, const char *model)
{
    const double bytes = (double)(TOKENS * rope->n_heads * rope->d * sizeof(float));

    return kernels_measure(rope->kernels,
                           &(struct kernels_case){
                               .name = name,
                               .unit = "GB/s",
                               .amount = 1e-9 * bytes,
                               .params = {.shape = model, .n = TOKENS, .data = "cold"},
                               .n_needs = 1,
                               .needs = {{KERNELS_UPDATE, bytes, 0, 0}},
                               .turn = turn,
                               .arg = rope,
                           });
}

bool kernels_rope(struct bench *bench, const struct bench_load *load)
{
    struct kernels *kernels = kernels_open(bench);
    bool is_good = kernels != NULL;

    (void)load;
    if (is_good)
        kernels_fill_normal((float *)(void *)kernels->to, kernels->bytes / sizeof(float), 16);
    for (unsigned i = 0; is_good && i < KERNELS_N_SHAPES; i++) {
        const struct kernels_shape *model = &kernels_shapes[i];
        struct rope rope = {.kernels = kernels, .d = model->d, .n_heads = 3};
        double *frequencies = kernels_alloc(model->d / 2, sizeof(double));

        rope.turns = kernels_alloc((size_t)TOKENS * model->d, sizeof(float));
        is_good = frequencies != NULL && rope.turns != NULL;
        if (is_good) {
            kv_rope_frequencies(10000, model->d, NULL, frequencies);
            kv_rope_rotations(frequencies, model->d, 1000, TOKENS, rope.turns);
            rope.stride = model->d;
            rope.style = KV_ROPE_ADJACENT;
            is_good = measure(&rope, "kernels.rope.adjacent", model->name);
            rope.style = KV_ROPE_HALVES;
            is_good = is_good && measure(&rope, "kernels.rope.halves", model->name);
            rope.stride = 0;
            is_good = is_good && measure(&rope, "kernels.rope.shift", model->name);
        }
        free(frequencies);
        free(rope.turns);
    }
    return is_good;
}
