/* The rest: summaries of a group of rows, and what those of 32K rows add to an answer of which
 * a tenth of the rows is attended. */
#include "tests/bench/kernels.h"

#include "kernels/estimate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    GROUPS = 32, /* of a head */
    TAKEN = KV_SUMMARY_ROWS / 10,
    MADE = 64, /* different groups */
};

struct rest {
    const struct kernels *kernels;
    const struct kernels_shape *model;
    struct kv_summary_shape shape;
    size_t row_bytes, group_bytes;
    void *scratch;
    uint8_t *group;
    uint32_t taken[TAKEN];
    float *queries, *squares, *state, *output, *lse;
};

static void build(const struct rest *rest, const uint8_t *rows, void *ret_group)
{
    struct kv_summary_build making;
    uint32_t first, n;

    kv_summary_build_begin(&making, &rest->shape, KV_SUMMARY_ROWS, 1, rest->scratch);
    while (kv_summary_build_next(&making, &first, &n))
        kv_summary_build_slice(&making, rows + first * rest->row_bytes, rest->row_bytes);
    kv_summary_build_end(&making, ret_group);
}

static void build_turn(void *arg, size_t i)
{
    const struct rest *rest = arg;
    const size_t bytes = KV_SUMMARY_ROWS * rest->row_bytes;

    build(rest, rest->kernels->from + i % (rest->kernels->bytes / bytes) * bytes, rest->group);
}

static void answer_turn(void *arg, size_t i)
{
    const struct rest *rest = arg;
    const size_t n_turns = rest->kernels->bytes / rest->group_bytes / GROUPS;
    const uint8_t *groups = rest->kernels->to + i % n_turns * GROUPS * rest->group_bytes;
    const size_t n_queries = rest->model->n_queries;
    uint16_t counts[KV_SUMMARIES_MAX];
    uint32_t places[1];
    uint8_t numbers[1];
    struct kv_estimate_question question = {
        .queries = rest->queries,
        .squares = rest->squares,
        .n_queries = n_queries,
        .scale = 1 / sqrtf((float)rest->model->d),
        .counts = counts,
    };

    kv_estimate_begin(&rest->shape, n_queries, rest->state);
    kv_estimate_squares(rest->shape.d_k, rest->queries, n_queries, rest->squares);
    for (size_t j = 0; j < GROUPS; j++) {
        const uint8_t *group = groups + j * rest->group_bytes;

        /* The lists of all groups are the same ones. */
        kv_estimate_count(&rest->shape, group, 0, 0, KV_SUMMARY_ROWS, rest->taken, TAKEN, NULL,
                          0, counts, places, numbers);
        question.next = j + 1 < GROUPS ? group + rest->group_bytes : NULL;
        kv_estimate_add(&rest->shape, group, &question, rest->state);
    }
    kv_estimate_end(&rest->shape, n_queries, rest->state, rest->output, rest->lse);
}

/* `to` becomes groups, side by side. */
static void fill_groups(struct rest *rest)
{
    uint8_t *to = rest->kernels->to;
    const size_t n = rest->kernels->bytes / rest->group_bytes;

    for (size_t i = 0; i < n; i++)
        if (i < MADE) {
            build_turn(rest, i);
            memcpy(to + i * rest->group_bytes, rest->group, kv_summary_bytes(&rest->shape));
        } else {
            memcpy(to + i * rest->group_bytes, to + i % MADE * rest->group_bytes,
                   rest->group_bytes);
        }
}

static bool measure(struct rest *rest)
{
    const double summaries = (double)kv_summary_count(&rest->shape);
    const double of_summary = 2.0 * summaries * (rest->shape.d_k + rest->shape.d_v);
    const double rows = KV_SUMMARY_ROWS;
    const bool is_16 = rest->shape.bits == KV_SUMMARY_16;
    const struct kernels_case building = {
        .name = is_16 ? "kernels.rest.build16" : "kernels.rest.build64",
        .unit = "Mrow/s",
        .amount = 1e-6 * rows,
        .params = {.shape = rest->model->name, .n = KV_SUMMARY_ROWS, .data = "cold"},
        .n_needs = 2,
        .needs = {{KERNELS_FMA, KV_SUMMARY_ITERATIONS * of_summary * rows, 0, 0},
                  {KERNELS_READ, rows * (double)rest->row_bytes, 0, 0}},
        .turn = build_turn,
        .arg = rest,
    };
    const struct kernels_case answering = {
        .name = is_16 ? "kernels.rest.answer16" : "kernels.rest.answer64",
        .unit = "us",
        .params = {.shape = rest->model->name,
                   .queries = rest->model->n_queries,
                   .n = GROUPS * KV_SUMMARY_ROWS,
                   .data = "cold"},
        .n_needs = 2,
        .needs = {{KERNELS_FMA, GROUPS * of_summary * rest->model->n_queries, 0, 0},
                  {KERNELS_READ, (double)(GROUPS * kv_summary_bytes(&rest->shape)), 0, 0}},
        .turn = answer_turn,
        .arg = rest,
    };

    fill_groups(rest);
    return kernels_measure(rest->kernels, &building) &&
           kernels_measure(rest->kernels, &answering);
}

static bool
measure_shape(struct kernels *kernels, const struct kernels_shape *model, uint32_t bits)
{
    struct rest rest = {
        .kernels = kernels,
        .model = model,
        .shape = {KV_KEY_FP16, model->d, model->d, bits},
        .row_bytes = kernels_row_bytes(model),
    };
    const size_t n = (size_t)model->n_queries * model->d;
    bool is_good;

    rest.group_bytes = (kv_summary_bytes(&rest.shape) + 63) / 64 * 64;
    rest.scratch = kernels_alloc(kv_summary_scratch_bytes(&rest.shape), 1);
    rest.group = kernels_alloc(rest.group_bytes, 1);
    rest.queries = kernels_alloc(n, sizeof(float));
    rest.squares = kernels_alloc(model->n_queries, sizeof(float));
    rest.output = kernels_alloc(n, sizeof(float));
    rest.lse = kernels_alloc(model->n_queries, sizeof(float));
    rest.state =
        kernels_alloc(kv_estimate_floats(&rest.shape, model->n_queries), sizeof(float));
    for (uint32_t i = 0; i < TAKEN; i++)
        rest.taken[i] = i * 10;
    is_good = rest.scratch != NULL && rest.group != NULL && rest.queries != NULL &&
              rest.squares != NULL && rest.output != NULL && rest.lse != NULL &&
              rest.state != NULL;
    if (is_good) {
        kernels_fill_normal(rest.queries, n, 17);
        is_good = measure(&rest);
    }
    free(rest.scratch);
    free(rest.group);
    free(rest.queries);
    free(rest.squares);
    free(rest.output);
    free(rest.lse);
    free(rest.state);
    return is_good;
}

bool kernels_rest(struct bench *bench, const struct bench_load *load)
{
    struct kernels *kernels = kernels_open(bench);

    (void)load;
    if (kernels == NULL)
        return false;
    for (unsigned i = 0; i < KERNELS_N_SHAPES; i++)
        if (!measure_shape(kernels, &kernels_shapes[i], KV_SUMMARY_16) ||
            !measure_shape(kernels, &kernels_shapes[i], KV_SUMMARY_64))
            return false;
    return true;
}
