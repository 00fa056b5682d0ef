/* Builds the summaries of one group of rows, and estimates, from the summaries of 32K rows,
 * what the nine tenths of the rows that are not attended would have added. */
#include "tests/bench/kernels.h"

#include "kernels/estimate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    GROUPS = 32, /* of a head */
    TAKEN_MAX = KV_SUMMARY_ROWS_MAX / 10,
    MADE = 64, /* different groups */
};

struct summary_load {
    const struct kernels *kernels;
    const struct kernels_shape *model;
    struct kv_summary_shape shape;
    size_t row_bytes, group_bytes;
    void *scratch;
    uint8_t *group;
    uint32_t taken[TAKEN_MAX];
    float *queries, *squares, *steps, *state, *output, *lse;
    int16_t *elements;
    uint8_t *marks;
};

static void build(const struct summary_load *load, const uint8_t *rows, void *ret_group)
{
    struct kv_summary_build making;
    uint32_t first, n;

    kv_summary_build_begin(&making, &load->shape, load->shape.rows, 1, load->scratch);
    while (kv_summary_build_next(&making, &first, &n))
        kv_summary_build_slice(&making, rows + first * load->row_bytes, load->row_bytes);
    kv_summary_build_end(&making, ret_group);
}

static void build_turn(void *arg, size_t i)
{
    const struct summary_load *load = arg;
    const size_t bytes = load->shape.rows * load->row_bytes;

    build(load, load->kernels->from + i % (load->kernels->bytes / bytes) * bytes, load->group);
}

static void estimate_turn(void *arg, size_t i)
{
    const struct summary_load *load = arg;
    const size_t n_turns = load->kernels->bytes / load->group_bytes / GROUPS;
    const uint8_t *groups = load->kernels->to + i % n_turns * GROUPS * load->group_bytes;
    const size_t n_queries = load->model->n_queries;
    uint16_t counts[KV_SUMMARIES_MAX];
    uint8_t numbers[1];
    struct kv_estimate_input question = {
        .queries = kv_estimate_prepare(load->shape.d_k, load->queries, n_queries,
                                       load->elements, load->steps, load->squares),
        .scale = 1 / sqrtf((float)load->model->d),
        .counts = counts,
    };

    kv_estimate_begin(&load->shape, n_queries, question.scale, NULL, 0, 0, load->state);
    for (size_t j = 0; j < GROUPS; j++) {
        const uint8_t *group = groups + j * load->group_bytes;

        /* The lists of all groups are the same ones. */
        kv_estimate_count(&load->shape, group, 0, 0, load->shape.rows, load->taken,
                          load->shape.rows / 10, NULL, 0, load->marks, counts, numbers);
        question.next = j + 1 < GROUPS ? group + load->group_bytes : NULL;
        kv_estimate_add(&load->shape, group, &question, load->state);
    }
    kv_estimate_end(&load->shape, n_queries, load->state, load->output, load->lse);
}

/* `to` becomes groups, side by side. */
static void fill_groups(struct summary_load *load)
{
    uint8_t *to = load->kernels->to;
    const size_t n = load->kernels->bytes / load->group_bytes;

    for (size_t i = 0; i < n; i++)
        if (i < MADE) {
            build_turn(load, i);
            memcpy(to + i * load->group_bytes, load->group, kv_summary_bytes(&load->shape));
        } else {
            memcpy(to + i * load->group_bytes, to + i % MADE * load->group_bytes,
                   load->group_bytes);
        }
}

static bool measure(struct summary_load *load)
{
    const double summaries = (double)kv_summary_count(&load->shape);
    const double of_summary = 2.0 * summaries * (load->shape.d_k + load->shape.d_v);
    const double rows = load->shape.rows;
    const bool is_16 = load->shape.bits == KV_SUMMARY_16;
    const struct kernels_case building = {
        .name = is_16 ? "kernels.summary.build16" : "kernels.summary.build64",
        .unit = "Mrow/s",
        .amount = 1e-6 * rows,
        .params = {.shape = load->model->name, .n = load->shape.rows, .data = "cold"},
        .n_needs = 2,
        .needs = {{KERNELS_FMA, KV_SUMMARY_ITERATIONS * of_summary * rows, 0, 0},
                  {KERNELS_READ, rows * (double)load->row_bytes, 0, 0}},
        .turn = build_turn,
        .arg = load,
    };
    const struct kernels_case estimating = {
        .name = is_16 ? "kernels.summary.estimate16" : "kernels.summary.estimate64",
        .unit = "us",
        .params = {.shape = load->model->name,
                   .queries = load->model->n_queries,
                   .n = GROUPS * load->shape.rows,
                   .data = "cold"},
        .n_needs = 2,
        .needs = {{KERNELS_FMA, GROUPS * of_summary * load->model->n_queries, 0, 0},
                  {KERNELS_READ, (double)(GROUPS * kv_summary_bytes(&load->shape)), 0, 0}},
        .turn = estimate_turn,
        .arg = load,
    };

    fill_groups(load);
    return kernels_measure(load->kernels, &building) &&
           kernels_measure(load->kernels, &estimating);
}

static bool measure_shape(struct kernels *kernels,
                          const struct kernels_shape *model,
                          uint32_t bits,
                          uint32_t rows)
{
    struct summary_load load = {
        .kernels = kernels,
        .model = model,
        .shape = {KV_KEY_FP16, model->d, model->d, bits, rows},
        .row_bytes = kernels_row_bytes(model),
    };
    const size_t n = (size_t)model->n_queries * model->d;
    bool is_good;

    load.group_bytes = (kv_summary_bytes(&load.shape) + 63) / 64 * 64;
    load.scratch = kernels_alloc(kv_summary_scratch_bytes(&load.shape), 1);
    load.group = kernels_alloc(load.group_bytes, 1);
    load.queries = kernels_alloc(n, sizeof(float));
    load.squares = kernels_alloc(model->n_queries, sizeof(float));
    load.steps = kernels_alloc(model->n_queries, sizeof(float));
    load.elements =
        kernels_alloc(model->n_queries * kv_summary_up(model->d), sizeof(*load.elements));
    load.marks = kernels_alloc(KV_SUMMARY_ROWS_MAX, 1);
    load.output = kernels_alloc(n, sizeof(float));
    load.lse = kernels_alloc(model->n_queries, sizeof(float));
    load.state =
        kernels_alloc(kv_estimate_floats(&load.shape, model->n_queries), sizeof(float));
    for (uint32_t i = 0; i < rows / 10; i++)
        load.taken[i] = i * 10;
    is_good = load.scratch != NULL && load.group != NULL && load.queries != NULL &&
              load.squares != NULL && load.steps != NULL && load.elements != NULL &&
              load.marks != NULL && load.output != NULL && load.lse != NULL &&
              load.state != NULL;
    if (is_good) {
        kernels_fill_normal(load.queries, n, 17);
        is_good = measure(&load);
    }
    free(load.scratch);
    free(load.group);
    free(load.queries);
    free(load.squares);
    free(load.steps);
    free(load.elements);
    free(load.marks);
    free(load.output);
    free(load.lse);
    free(load.state);
    return is_good;
}

bool kernels_summary(struct bench *bench, const struct bench_load *unused)
{
    struct kernels *kernels = kernels_open(bench);

    (void)unused;
    if (kernels == NULL)
        return false;
    for (unsigned i = 0; i < KERNELS_N_SHAPES; i++)
        for (uint32_t bits = KV_SUMMARY_16; bits <= KV_SUMMARY_64;
             bits += KV_SUMMARY_64 - KV_SUMMARY_16)
            for (uint32_t rows = KV_SUMMARY_ROWS_LEAST; rows <= KV_SUMMARY_ROWS_MAX;
                 rows += KV_SUMMARY_ROWS_MAX - KV_SUMMARY_ROWS_LEAST)
                if (!measure_shape(kernels, &kernels_shapes[i], bits, rows))
                    return false;
    return true;
}
