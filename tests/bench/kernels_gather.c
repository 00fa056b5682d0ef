/* Gathering: some of a head's rows, alone and in runs, into a buffer that is cold too. */
#include "tests/bench/kernels.h"

#include "kernels/gather.h"

#include <stdlib.h>

enum {
    ROWS = 3276, /* of a turn: a tenth of 32K */
};

struct gather {
    const struct kernels *kernels;
    size_t row_bytes;
    const void **rows; /* (n), ascending within a turn */
    size_t n_turns;    /* that they are for */
};

static void gather_rows(void *arg, size_t i)
{
    const struct gather *gather = arg;
    const size_t bytes = ROWS * gather->row_bytes;
    uint8_t *to = gather->kernels->to + i % (gather->kernels->bytes / bytes) * bytes;

    kv_rows_gather(to, gather->rows + i % gather->n_turns * ROWS, ROWS, gather->row_bytes);
}

static bool measure(struct kernels *kernels, const struct kernels_shape *shape, size_t run)
{
    struct gather gather = {.kernels = kernels, .row_bytes = kernels_row_bytes(shape)};
    const double bytes = (double)(ROWS * gather.row_bytes);
    bool is_good;

    gather.rows = kernels_choose_rows(kernels, gather.row_bytes, run, ROWS, &gather.n_turns);
    if (gather.rows == NULL)
        return false;
    is_good = kernels_measure(
        kernels, &(struct kernels_case){
                     .name = run == 1 ? "kernels.gather.isolated" : "kernels.gather.runs",
                     .unit = "GB/s",
                     .amount = 1e-9 * bytes,
                     .params = {.shape = shape->name,
                                .bytes = gather.row_bytes,
                                .rows = ROWS,
                                .run = run > 1 ? (unsigned)run : 0,
                                .data = "cold"},
                     .n_needs = 3,
                     .needs = {{KERNELS_STREAM, bytes, 0, 0},
                               {KERNELS_COPY, bytes, 0, 0},
                               {run == 1 ? KERNELS_ROWS : KERNELS_READ, bytes, gather.row_bytes,
                                gather.row_bytes}},
                     .turn = gather_rows,
                     .arg = &gather,
                 });
    free(gather.rows);
    return is_good;
}

bool kernels_gather(struct bench *bench, const struct bench_load *load)
{
    struct kernels *kernels = kernels_open(bench);

    (void)load;
    if (kernels == NULL)
        return false;
    for (unsigned i = 0; i < KERNELS_N_SHAPES; i++)
        if (!measure(kernels, &kernels_shapes[i], 1) ||
            !measure(kernels, &kernels_shapes[i], 32))
            return false;
    return true;
}
