/* Exact attention over chosen rows, alone, in runs, and over all of them; and over a few that
 * stay in L2, where only the arithmetic counts. */
#include "tests/bench/kernels.h"

#include "kernels/attend.h"

#include <math.h>
#include <stdlib.h>

enum {
    ROWS = 3264, /* of a turn: about a tenth of 32K, whole groups */
    HOT_ROWS = 1024,
};

struct attend {
    const struct kernels *kernels;
    struct kv_attend_shape shape;
    size_t row_bytes;
    const void **rows; /* (n_turns, ROWS) */
    size_t n_turns;
    float *queries, *state, *output, *lse;
};

static void attend_list(void *arg, size_t i)
{
    const struct attend *attend = arg;

    kv_attend_begin(&attend->shape, attend->state);
    kv_attend_rows(&attend->shape, attend->queries, attend->rows + i % attend->n_turns * ROWS,
                   ROWS, NULL, attend->state);
    kv_attend_end(&attend->shape, attend->state, attend->output, attend->lse);
}

static void attend_run(const struct attend *attend, size_t at, size_t n)
{
    kv_attend_begin(&attend->shape, attend->state);
    kv_attend_run(&attend->shape, attend->queries,
                  attend->kernels->from + at * attend->row_bytes, attend->row_bytes, n, NULL,
                  attend->state);
    kv_attend_end(&attend->shape, attend->state, attend->output, attend->lse);
}

static void attend_all(void *arg, size_t i)
{
    const struct attend *attend = arg;
    const size_t n_turns = attend->kernels->bytes / attend->row_bytes / ROWS;

    attend_run(attend, i % n_turns * ROWS, ROWS);
}

static void attend_hot(void *arg, size_t i)
{
    (void)i;
    attend_run(arg, 0, HOT_ROWS);
}

/* run: of a list's rows; 0: all rows, one after the other. */
static bool measure(struct attend *attend, const char *model, size_t run, bool is_hot)
{
    const size_t n = is_hot ? HOT_ROWS : ROWS;
    const double operations =
        2.0 * (attend->shape.d_k + attend->shape.d_v) * attend->shape.n_queries * (double)n;
    bool is_good;

    if (run > 0) {
        attend->rows = kernels_choose_rows(attend->kernels, attend->row_bytes, run, ROWS,
                                           &attend->n_turns);
        if (attend->rows == NULL)
            return false;
    }
    is_good = kernels_measure(
        attend->kernels, &(struct kernels_case){
                             .name = is_hot     ? "kernels.attend.hot"
                                     : run == 0 ? "kernels.attend.all"
                                     : run == 1 ? "kernels.attend.isolated"
                                                : "kernels.attend.runs",
                             .unit = "Mrow/s",
                             .amount = 1e-6 * (double)n,
                             .params = {.shape = model,
                                        .bytes = attend->row_bytes,
                                        .queries = attend->shape.n_queries,
                                        .rows = (unsigned)n,
                                        .run = run > 1 ? (unsigned)run : 0,
                                        .data = is_hot ? "hot" : "cold"},
                             .n_needs = is_hot     ? 1
                                        : run == 1 ? 3
                                                   : 2,
                             .needs = {{KERNELS_FMA, operations, 0, 0},
                                       {KERNELS_READ, (double)(n * attend->row_bytes), 0, 0},
                                       {KERNELS_ROWS, (double)(n * attend->row_bytes),
                                        attend->row_bytes, attend->row_bytes}},
                             .turn = is_hot     ? attend_hot
                                     : run == 0 ? attend_all
                                                : attend_list,
                             .arg = attend,
                         });
    free(attend->rows);
    attend->rows = NULL;
    return is_good;
}

bool kernels_attend(struct bench *bench, const struct bench_load *load)
{
    struct kernels *kernels = kernels_open(bench);
    bool is_good = kernels != NULL;

    (void)load;
    for (unsigned i = 0; is_good && i < KERNELS_N_SHAPES; i++) {
        const struct kernels_shape *model = &kernels_shapes[i];
        const size_t n = (size_t)model->n_queries * model->d;
        struct attend attend = {
            .kernels = kernels,
            .shape = {KV_KEY_FP16, model->d, model->d, model->n_queries,
                      1 / sqrtf((float)model->d)},
            .row_bytes = kernels_row_bytes(model),
        };

        attend.queries = kernels_alloc(n, sizeof(float));
        attend.output = kernels_alloc(n, sizeof(float));
        attend.lse = kernels_alloc(model->n_queries, sizeof(float));
        attend.state = kernels_alloc(kv_attend_floats(&attend.shape), sizeof(float));
        is_good = attend.queries != NULL && attend.output != NULL && attend.lse != NULL &&
                  attend.state != NULL;
        if (is_good) {
            kernels_fill_normal(attend.queries, n, 15);
            is_good = measure(&attend, model->name, 1, false) &&
                      measure(&attend, model->name, 32, false) &&
                      measure(&attend, model->name, 0, false) &&
                      measure(&attend, model->name, 0, true);
        }
        free(attend.queries);
        free(attend.output);
        free(attend.lse);
        free(attend.state);
    }
    return is_good;
}
