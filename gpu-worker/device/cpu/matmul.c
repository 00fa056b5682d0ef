/* Products with weights.
 *
 *   one row of activations   quantized blocks are multiplied without unpacking the row
 *   more                     tiles of weight rows are unpacked, and each is used for all rows
 *
 * Both sum in the same order, so a row's result does not depend on the other rows. */
#include "gpu-worker/device/cpu/cpu.h"

#include <assert.h>

enum {
    ONE_TILE = 32, /* weight rows of a part */
    MANY_TILE = 96,
};

struct job {
    struct kvw_cpu *cpu;
    const struct kvw_cpu_weight *weight;
    const float *x;
    size_t n;
    float *out;
    size_t tile; /* weight rows of a part */
};

static size_t part_end(const struct job *job, size_t begin)
{
    const size_t n_rows = job->weight->base.n_rows;

    return n_rows - begin < job->tile ? n_rows : begin + job->tile;
}

static void one_row(void *arg, unsigned part, unsigned thread_index)
{
    const struct job *job = arg;
    const struct kvw_cpu_weight *weight = job->weight;
    const size_t begin = part * job->tile, end = part_end(job, begin);

    (void)thread_index;
    job->cpu->dot->dot[weight->base.type](weight->data + begin * weight->row_bytes,
                                          weight->row_bytes, end - begin, job->x,
                                          weight->base.n_columns, job->out + begin);
}

static void many_rows(void *arg, unsigned part, unsigned thread_index)
{
    const struct job *job = arg;
    const struct kvw_cpu_weight *weight = job->weight;
    const struct kvw_dot_table *dot = job->cpu->dot;
    const size_t begin = part * job->tile, end = part_end(job, begin);
    const size_t n_rows = weight->base.n_rows, n_columns = weight->base.n_columns;
    const char *data = weight->data + begin * weight->row_bytes;
    float *values = kvw_cpu_scratch(job->cpu, thread_index);

    for (size_t row = 0; row < end - begin; row++)
        dot->unpack[weight->base.type](data + row * weight->row_bytes, values + row * n_columns,
                                       n_columns);
    dot->products(job->x, n_columns, job->n, values, n_columns, end - begin, n_columns,
                  job->out + begin, n_rows);
}

/* Returns the rows of a part: few enough to fit into the scratch and, for small weights, to
 * give work to several threads. */
static size_t many_tile(size_t n_rows, size_t n_columns)
{
    const size_t most = KVW_CPU_SCRATCH_BYTES / sizeof(float) / n_columns;
    size_t tile = n_rows <= 4 * MANY_TILE ? MANY_TILE / 2 : MANY_TILE;

    while (tile > most && tile > 1)
        tile /= 2;
    return tile;
}

void kvw_cpu_matmul(struct kvw_device *device,
                    const struct kvw_weight *weight,
                    const struct kvw_weight *bias,
                    const struct kvw_device_buffer *x,
                    size_t n,
                    struct kvw_device_buffer *out)
{
    struct job job = {
        .cpu = kvw_cpu_of(device),
        .weight = (const struct kvw_cpu_weight *)weight,
        .x = kvw_cpu_floats(x),
        .n = n,
        .out = kvw_cpu_floats(out),
        .tile = n == 1 ? ONE_TILE : many_tile(weight->n_rows, weight->n_columns),
    };
    const unsigned n_parts = (unsigned)((weight->n_rows + job.tile - 1) / job.tile);

    assert(n * weight->n_columns * sizeof(float) <= x->bytes);
    assert(n * weight->n_rows * sizeof(float) <= out->bytes);
    assert(weight->n_columns * sizeof(float) <= KVW_CPU_SCRATCH_BYTES);
    kvw_thread_pool_run(job.cpu->thread_pool, n == 1 ? one_row : many_rows, &job, n_parts);
    if (bias != NULL) {
        const float *values = (const void *)((const struct kvw_cpu_weight *)bias)->data;

        for (size_t i = 0; i < n; i++)
            for (size_t row = 0; row < weight->n_rows; row++)
                job.out[i * weight->n_rows + row] += values[row];
    }
}
