#include "gpu-worker/device/cpu/cpu.h"

#include "gpu-worker/gguf/dequantize.h"
#include "kvserver/base/memory.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PIECE = 4096, /* elements of a part of elementwise work */
};

/* ---- the device ---- */

static void cpu_close(struct kvw_device *device)
{
    struct kvw_cpu *cpu = kvw_cpu_of(device);

    if (cpu->thread_pool != NULL && cpu->scratch != NULL)
        kv_memory_release(cpu->scratch, (size_t)kvw_thread_pool_threads(cpu->thread_pool) *
                                            KVW_CPU_SCRATCH_BYTES);
    kvw_thread_pool_destroy(cpu->thread_pool);
    free(cpu->partials);
    free(cpu);
}

static kv_status_t cpu_open(const struct kvw_device_config *config,
                            struct kvw_device **ret_device,
                            char *detail,
                            size_t detail_bytes)
{
    struct kvw_cpu *cpu = calloc(1, sizeof(*cpu));
    kv_status_t status = KV_NO_MEMORY;

    if (cpu == NULL)
        goto err;
    cpu->base.ops = &kvw_device_cpu;
    cpu->dot = kvw_dot_table_best();
    cpu->softmax = kvw_softmax();
    status = kvw_thread_pool_create(config->n_threads, &cpu->thread_pool);
    if (status != KV_OK)
        goto err;
    cpu->scratch = kv_memory_reserve((size_t)kvw_thread_pool_threads(cpu->thread_pool) *
                                     KVW_CPU_SCRATCH_BYTES);
    if (cpu->scratch == NULL) {
        status = KV_NO_MEMORY;
        goto err;
    }
    *ret_device = &cpu->base;
    return KV_OK;

err:
    snprintf(detail, detail_bytes, "device: cpu: %u threads: %s", config->n_threads,
             kv_status_name(status));
    if (cpu != NULL)
        cpu_close(&cpu->base);
    return status;
}

static void cpu_describe(const struct kvw_device *device, char *text, size_t text_bytes)
{
    const struct kvw_cpu *cpu = (const struct kvw_cpu *)device;

    snprintf(text, text_bytes, "cpu %s, %u threads", cpu->dot->name,
             kvw_thread_pool_threads(cpu->thread_pool));
}

static kv_status_t cpu_sync(struct kvw_device *device)
{
    struct kvw_cpu *cpu = kvw_cpu_of(device);
    const kv_status_t failure = cpu->failure;

    cpu->failure = KV_OK;
    return failure;
}

/* ---- memory ---- */

static kv_status_t cpu_buffer_create(struct kvw_device *device,
                                     size_t bytes,
                                     struct kvw_device_buffer **ret_buffer)
{
    struct kvw_cpu_buffer *buffer = calloc(1, sizeof(*buffer));

    if (buffer == NULL)
        return KV_NO_MEMORY;
    buffer->base = (struct kvw_device_buffer){.ops = device->ops, .bytes = bytes};
    buffer->data = kv_memory_reserve(bytes);
    if (buffer->data == NULL) {
        free(buffer);
        return KV_NO_MEMORY;
    }
    *ret_buffer = &buffer->base;
    return KV_OK;
}

static kv_status_t cpu_buffer_wrap(struct kvw_device *device,
                                   void *memory,
                                   size_t bytes,
                                   struct kvw_device_buffer **ret_buffer)
{
    struct kvw_cpu_buffer *buffer = calloc(1, sizeof(*buffer));

    if (buffer == NULL)
        return KV_NO_MEMORY;
    buffer->base = (struct kvw_device_buffer){.ops = device->ops, .bytes = bytes};
    buffer->data = memory;
    buffer->is_wrapped = true;
    *ret_buffer = &buffer->base;
    return KV_OK;
}

static kv_status_t cpu_buffer_part(struct kvw_device *device,
                                   struct kvw_device_buffer *of,
                                   size_t offset,
                                   size_t bytes,
                                   struct kvw_device_buffer **ret_buffer)
{
    assert(bytes <= of->bytes && offset <= of->bytes - bytes);
    return cpu_buffer_wrap(device, ((struct kvw_cpu_buffer *)of)->data + offset, bytes,
                           ret_buffer);
}

static void cpu_buffer_destroy(struct kvw_device_buffer *base)
{
    struct kvw_cpu_buffer *buffer = (struct kvw_cpu_buffer *)base;

    if (buffer == NULL)
        return;
    if (!buffer->is_wrapped)
        kv_memory_release(buffer->data, buffer->base.bytes);
    free(buffer);
}

/* Returns the first of the pieces, which are in the buffer. */
static char *pieces_at(const struct kvw_device_buffer *buffer,
                       struct kvw_place place,
                       struct kvw_pieces pieces)
{
    assert(pieces.n > 0);
    assert(place.offset + (pieces.n - 1) * place.stride + pieces.bytes <= buffer->bytes);
    return ((const struct kvw_cpu_buffer *)buffer)->data + place.offset;
}

static void copy_pieces(
    char *to, size_t to_stride, const char *from, size_t from_stride, struct kvw_pieces pieces)
{
    if (to_stride == pieces.bytes && from_stride == pieces.bytes) {
        memcpy(to, from, pieces.n * pieces.bytes);
        return;
    }
    for (size_t i = 0; i < pieces.n; i++)
        memcpy(to + i * to_stride, from + i * from_stride, pieces.bytes);
}

static void cpu_write(struct kvw_device *device,
                      enum kvw_stream stream,
                      struct kvw_device_buffer *to,
                      struct kvw_place to_place,
                      const void *from,
                      size_t from_stride,
                      struct kvw_pieces pieces)
{
    (void)device;
    (void)stream;
    copy_pieces(pieces_at(to, to_place, pieces), to_place.stride, from, from_stride, pieces);
}

static void cpu_read(struct kvw_device *device,
                     enum kvw_stream stream,
                     const struct kvw_device_buffer *from,
                     struct kvw_place from_place,
                     void *to,
                     size_t to_stride,
                     struct kvw_pieces pieces)
{
    (void)device;
    (void)stream;
    copy_pieces(to, to_stride, pieces_at(from, from_place, pieces), from_place.stride, pieces);
}

static void cpu_copy(struct kvw_device *device,
                     enum kvw_stream stream,
                     struct kvw_device_buffer *to,
                     struct kvw_place to_place,
                     const struct kvw_device_buffer *from,
                     struct kvw_place from_place,
                     struct kvw_pieces pieces)
{
    (void)device;
    (void)stream;
    copy_pieces(pieces_at(to, to_place, pieces), to_place.stride,
                pieces_at(from, from_place, pieces), from_place.stride, pieces);
}

/* ---- events: whatever was queued is done ---- */

static kv_status_t cpu_event_create(struct kvw_device *device, struct kvw_event **ret_event)
{
    struct kvw_event *event = malloc(sizeof(*event));

    if (event == NULL)
        return KV_NO_MEMORY;
    event->ops = device->ops;
    *ret_event = event;
    return KV_OK;
}

static void cpu_event_destroy(struct kvw_event *event)
{
    free(event);
}

static void
cpu_event_record(struct kvw_device *device, enum kvw_stream stream, struct kvw_event *event)
{
    (void)device;
    (void)stream;
    (void)event;
}

static void cpu_stream_wait(struct kvw_device *device,
                            enum kvw_stream stream,
                            const struct kvw_event *event)
{
    (void)device;
    (void)stream;
    (void)event;
}

static bool cpu_event_has_happened(const struct kvw_event *event)
{
    (void)event;
    return true;
}

static void cpu_event_wait(const struct kvw_event *event)
{
    (void)event;
}

static kv_status_t cpu_weight_create(struct kvw_device *device,
                                     enum kvw_tensor_type type,
                                     size_t n_rows,
                                     size_t n_columns,
                                     const void *data,
                                     struct kvw_weight **ret_weight)
{
    struct kvw_cpu_weight *weight = calloc(1, sizeof(*weight));

    if (weight == NULL)
        return KV_NO_MEMORY;
    *weight = (struct kvw_cpu_weight){
        .base = {.ops = device->ops, .type = type, .n_rows = n_rows, .n_columns = n_columns},
        .data = data,
        .row_bytes = kvw_tensor_row_bytes(type, n_columns),
    };
    *ret_weight = &weight->base;
    return KV_OK;
}

static kv_status_t cpu_weight_part(struct kvw_device *device,
                                   const struct kvw_weight *of,
                                   size_t first_row,
                                   size_t n_rows,
                                   struct kvw_weight **ret_weight)
{
    const struct kvw_cpu_weight *whole = (const struct kvw_cpu_weight *)of;

    assert(n_rows > 0 && n_rows <= of->n_rows && first_row <= of->n_rows - n_rows);
    return cpu_weight_create(device, of->type, n_rows, of->n_columns,
                             (const char *)whole->data + first_row * whole->row_bytes,
                             ret_weight);
}

static void cpu_weight_destroy(struct kvw_weight *weight)
{
    free(weight);
}

/* ---- elementwise ---- */

struct job;

/* Changes n elements of `to` by those of `from`. */
typedef void (*piece_fn)(const struct job *job, float *to, const float *from, size_t n);

struct job {
    struct kvw_cpu *cpu;
    const struct kvw_cpu_weight *weight;
    const uint32_t *tokens;
    float *to;
    const float *from;
    size_t n; /* elements, or rows */
    size_t n_heads, d, n_rot;
    float epsilon;
    enum kv_rope_style style;
    piece_fn piece;
};

/* Few rows are not worth waking the other threads for. */
static void run_rows(struct job *job, kvw_thread_pool_fn run)
{
    if (job->n < KVW_CPU_MANY)
        for (unsigned i = 0; i < job->n; i++)
            run(job, i, 0);
    else
        kvw_thread_pool_run(job->cpu->thread_pool, run, job, (unsigned)job->n);
}

static void run_piece(void *arg, unsigned part, unsigned thread_index)
{
    const struct job *job = arg;
    const size_t begin = (size_t)part * PIECE;

    (void)thread_index;
    job->piece(job, job->to + begin, job->from + begin,
               job->n - begin < PIECE ? job->n - begin : PIECE);
}

static void run_pieces(struct kvw_device *device,
                       struct kvw_device_buffer *to,
                       const struct kvw_device_buffer *from,
                       size_t n_elements,
                       piece_fn piece)
{
    struct job job = {
        .cpu = kvw_cpu_of(device),
        .to = kvw_cpu_floats(to),
        .from = kvw_cpu_floats(from),
        .n = n_elements,
        .piece = piece,
    };
    const unsigned n_parts = (unsigned)((n_elements + PIECE - 1) / PIECE);

    if (n_parts < KVW_CPU_MANY)
        for (unsigned i = 0; i < n_parts; i++)
            run_piece(&job, i, 0);
    else
        kvw_thread_pool_run(job.cpu->thread_pool, run_piece, &job, n_parts);
}

static void embed_row(void *arg, unsigned part, unsigned thread_index)
{
    const struct job *job = arg;
    const struct kvw_cpu_weight *weight = job->weight;

    (void)thread_index;
    job->cpu->dot->unpack[weight->base.type](
        weight->data + job->tokens[part] * weight->row_bytes,
        job->to + part * weight->base.n_columns, weight->base.n_columns);
}

static void cpu_embed(struct kvw_device *device,
                      const struct kvw_weight *weight,
                      const uint32_t *tokens,
                      size_t n,
                      struct kvw_device_buffer *out)
{
    struct job job = {
        .cpu = kvw_cpu_of(device),
        .weight = (const struct kvw_cpu_weight *)weight,
        .tokens = tokens,
        .to = kvw_cpu_floats(out),
        .n = n,
    };

    assert(n * weight->n_columns * sizeof(float) <= out->bytes);
    run_rows(&job, embed_row);
}

static void norm_row(void *arg, unsigned part, unsigned thread_index)
{
    const struct job *job = arg;
    const size_t n = job->weight->base.n_columns;
    const float *x = job->from + part * n;
    const float *weight = (const void *)job->weight->data;
    float *to = job->to + part * n;
    const float mean = job->cpu->dot->sum_of_squares(x, n) / (float)n;
    const float scale = 1 / sqrtf(mean + job->epsilon);

    (void)thread_index;
    for (size_t i = 0; i < n; i++)
        to[i] = x[i] * scale * weight[i];
}

static void cpu_rms_norm(struct kvw_device *device,
                         const struct kvw_weight *weight,
                         float epsilon,
                         const struct kvw_device_buffer *x,
                         size_t n,
                         struct kvw_device_buffer *out)
{
    struct job job = {
        .cpu = kvw_cpu_of(device),
        .weight = (const struct kvw_cpu_weight *)weight,
        .from = kvw_cpu_floats(x),
        .to = kvw_cpu_floats(out),
        .n = n,
        .epsilon = epsilon,
    };

    assert(n * weight->n_columns * sizeof(float) <= out->bytes);
    run_rows(&job, norm_row);
}

static void add(const struct job *job, float *to, const float *from, size_t n)
{
    (void)job;
    for (size_t i = 0; i < n; i++)
        to[i] += from[i];
}

static void cpu_add(struct kvw_device *device,
                    struct kvw_device_buffer *x,
                    const struct kvw_device_buffer *y,
                    size_t n_elements)
{
    run_pieces(device, x, y, n_elements, add);
}

static void silu_gate(const struct job *job, float *gate, const float *up, size_t n)
{
    job->cpu->dot->silu_gate(gate, up, n);
}

static void cpu_silu_gate(struct kvw_device *device,
                          struct kvw_device_buffer *gate,
                          const struct kvw_device_buffer *up,
                          size_t n_elements)
{
    run_pieces(device, gate, up, n_elements, silu_gate);
}

static void rope_row(void *arg, unsigned part, unsigned thread_index)
{
    const struct job *job = arg;

    (void)thread_index;
    kv_rope_rotate(job->style, KV_ROPE_FORWARD, job->from + part * job->n_rot, 0, job->n_rot,
                   job->to + part * job->n_heads * job->d, 1, job->n_heads, job->d);
}

static void cpu_rope(struct kvw_device *device,
                     enum kv_rope_style style,
                     const struct kvw_device_buffer *rotations,
                     struct kvw_device_buffer *x,
                     size_t n,
                     size_t n_heads,
                     size_t d,
                     size_t n_rot)
{
    struct job job = {
        .cpu = kvw_cpu_of(device),
        .to = kvw_cpu_floats(x),
        .from = kvw_cpu_floats(rotations),
        .n = n,
        .n_heads = n_heads,
        .d = d,
        .n_rot = n_rot,
        .style = style,
    };

    assert(n * n_rot * sizeof(float) <= rotations->bytes);
    assert(n * n_heads * d * sizeof(float) <= x->bytes);
    run_rows(&job, rope_row);
}

const struct kvw_device_ops kvw_device_cpu = {
    .name = "cpu",
    .summary = "this machine's processors",
    .open = cpu_open,
    .close = cpu_close,
    .describe = cpu_describe,
    .buffer_create = cpu_buffer_create,
    .buffer_wrap = cpu_buffer_wrap,
    .buffer_part = cpu_buffer_part,
    .buffer_destroy = cpu_buffer_destroy,
    .write = cpu_write,
    .read = cpu_read,
    .copy = cpu_copy,
    .event_create = cpu_event_create,
    .event_destroy = cpu_event_destroy,
    .event_record = cpu_event_record,
    .stream_wait = cpu_stream_wait,
    .event_has_happened = cpu_event_has_happened,
    .event_wait = cpu_event_wait,
    .weight_create = cpu_weight_create,
    .weight_part = cpu_weight_part,
    .weight_destroy = cpu_weight_destroy,
    .sync = cpu_sync,
    .embed = cpu_embed,
    .rms_norm = cpu_rms_norm,
    .matmul = kvw_cpu_matmul,
    .add = cpu_add,
    .silu_gate = cpu_silu_gate,
    .rope = cpu_rope,
    .rows_put = kvw_cpu_rows_put,
    .rows_attend = kvw_cpu_rows_attend,
    .runs_attend = kvw_cpu_runs_attend,
    .answers_merge = kvw_cpu_answers_merge,
    .rows_score = kvw_cpu_rows_score,
};
