#include "tests/support/strict_device.h"

#include "gpu-worker/device/cpu/cpu.h"
#include "kvserver/base/random.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    POISON = 0xa5,
    BURST = 8, /* operations that may be done at once */
};

enum kind {
    RECORD,
    WAIT,
    WRITE,
    READ,
    COPY,
    EMBED,
    RMS_NORM,
    MATMUL,
    ADD,
    SILU_GATE,
    ROPE,
    ROWS_PUT,
    ROWS_ATTEND,
    RUNS_ATTEND,
    ANSWERS_MERGE,
    ROWS_SCORE,
};

struct strict_event {
    struct kvw_event base;
    struct strict *strict;
    uint64_t n_recorded, n_happened; /* how often */
};

/* An operation with copies of all that is borrowed during its call only. */
struct op {
    struct op *next;
    enum kind kind;
    struct strict_event *event;
    uint64_t event_number; /* of its recordings: the one that is made, or waited for */

    struct kvw_device_buffer *to, *to_lse;
    const struct kvw_device_buffer *from, *from_2;
    const struct kvw_weight *weight, *bias;
    struct kvw_place to_place, from_place;
    const void *source;
    void *target;
    size_t stride;
    struct kvw_pieces pieces;
    struct kvw_rows_shape shape;
    uint32_t *numbers; /* tokens, or where runs begin */
    struct kvw_row_run *runs;
    uint32_t token_begin;
    size_t n, n_heads, d, n_rot;
    float epsilon;
    enum kv_rope_style style;
};

struct strict {
    struct kvw_device base;
    struct kvw_device *cpu;
    struct op *first[KVW_STREAMS], **end[KVW_STREAMS];
    struct kv_random dice;
    struct strict *next; /* of all that are open */
};

/* A buffer does not know its device. */
static struct strict *all;

static struct strict *strict_of(struct kvw_device *device)
{
    return (struct strict *)device;
}

/* ---- doing ------------------------------------------------------------------------------- */

static void do_op(struct strict *strict, const struct op *op)
{
    struct kvw_device *cpu = strict->cpu;
    const struct kvw_device_ops *ops = cpu->ops;

    switch (op->kind) {
    case RECORD:
        op->event->n_happened = op->event_number;
        break;
    case WAIT:
        break;
    case WRITE:
        ops->write(cpu, KVW_STREAM_COMPUTE, op->to, op->to_place, op->source, op->stride,
                   op->pieces);
        break;
    case READ:
        ops->read(cpu, KVW_STREAM_COMPUTE, op->from, op->from_place, op->target, op->stride,
                  op->pieces);
        break;
    case COPY:
        ops->copy(cpu, KVW_STREAM_COMPUTE, op->to, op->to_place, op->from, op->from_place,
                  op->pieces);
        break;
    case EMBED:
        ops->embed(cpu, op->weight, op->numbers, op->n, op->to);
        break;
    case RMS_NORM:
        ops->rms_norm(cpu, op->weight, op->epsilon, op->from, op->n, op->to);
        break;
    case MATMUL:
        ops->matmul(cpu, op->weight, op->bias, op->from, op->n, op->to);
        break;
    case ADD:
        ops->add(cpu, op->to, op->from, op->n);
        break;
    case SILU_GATE:
        ops->silu_gate(cpu, op->to, op->from, op->n);
        break;
    case ROPE:
        ops->rope(cpu, op->style, op->from, op->to, op->n, op->n_heads, op->d, op->n_rot);
        break;
    case ROWS_PUT:
        ops->rows_put(cpu, &op->shape, op->from, op->from_2, op->token_begin, (uint32_t)op->n,
                      op->to);
        break;
    case ROWS_ATTEND:
        ops->rows_attend(cpu, &op->shape, op->from, op->from_2, op->token_begin,
                         (uint32_t)op->n, op->to);
        break;
    case RUNS_ATTEND:
        ops->runs_attend(cpu, &op->shape, op->from, op->runs, op->numbers, op->to, op->to_lse);
        break;
    case ANSWERS_MERGE:
        ops->answers_merge(cpu, &op->shape, op->from, op->from_2, op->to, op->to_lse);
        break;
    case ROWS_SCORE:
        ops->rows_score(cpu, &op->shape, op->from, op->from_2, op->token_begin, (uint32_t)op->n,
                        op->to);
        break;
    }
}

static bool can_go(const struct op *op)
{
    return op != NULL && (op->kind != WAIT || op->event->n_happened >= op->event_number);
}

/* Does the next operation of a stream.  Returns false if there is none, or it has to wait. */
static bool step(struct strict *strict, unsigned stream)
{
    struct op *op = strict->first[stream];

    if (!can_go(op))
        return false;
    strict->first[stream] = op->next;
    if (op->next == NULL)
        strict->end[stream] = &strict->first[stream];
    do_op(strict, op);
    free(op->numbers);
    free(op->runs);
    free(op);
    return true;
}

static bool step_any(struct strict *strict)
{
    const unsigned first = (unsigned)kv_random_next(&strict->dice) % KVW_STREAMS;

    for (unsigned i = 0; i < KVW_STREAMS; i++)
        if (step(strict, (first + i) % KVW_STREAMS))
            return true;
    return false;
}

/* Now and then some of what is queued is done. */
static void go_on(struct strict *strict)
{
    unsigned n = (unsigned)kv_random_next(&strict->dice) % (4 * BURST);

    while (n-- > 3 * BURST && step_any(strict))
        ;
}

static void finish(struct strict *strict)
{
    while (step_any(strict))
        ;
    for (unsigned i = 0; i < KVW_STREAMS; i++)
        if (strict->first[i] != NULL) {
            fprintf(stderr, "strict device: stream %u waits for what is not queued\n", i);
            abort();
        }
}

/* ---- queueing ---------------------------------------------------------------------------- */

static void *copy_of(const void *data, size_t bytes)
{
    void *copy = malloc(bytes > 0 ? bytes : 1);

    if (copy == NULL)
        abort();
    memcpy(copy, data, bytes);
    return copy;
}

static void queue(struct kvw_device *device, enum kvw_stream stream, const struct op *op)
{
    struct strict *strict = strict_of(device);
    struct op *queued = copy_of(op, sizeof(*op));

    queued->next = NULL;
    *strict->end[stream] = queued;
    strict->end[stream] = &queued->next;
    go_on(strict);
}

static void strict_write(struct kvw_device *device,
                         enum kvw_stream stream,
                         struct kvw_device_buffer *to,
                         struct kvw_place to_place,
                         const void *from,
                         size_t from_stride,
                         struct kvw_pieces pieces)
{
    queue(device, stream,
          &(struct op){.kind = WRITE,
                       .to = to,
                       .to_place = to_place,
                       .source = from,
                       .stride = from_stride,
                       .pieces = pieces});
}

static void strict_read(struct kvw_device *device,
                        enum kvw_stream stream,
                        const struct kvw_device_buffer *from,
                        struct kvw_place from_place,
                        void *to,
                        size_t to_stride,
                        struct kvw_pieces pieces)
{
    for (size_t i = 0; i < pieces.n; i++)
        memset((char *)to + i * to_stride, POISON, pieces.bytes);
    queue(device, stream,
          &(struct op){.kind = READ,
                       .from = from,
                       .from_place = from_place,
                       .target = to,
                       .stride = to_stride,
                       .pieces = pieces});
}

static void strict_copy(struct kvw_device *device,
                        enum kvw_stream stream,
                        struct kvw_device_buffer *to,
                        struct kvw_place to_place,
                        const struct kvw_device_buffer *from,
                        struct kvw_place from_place,
                        struct kvw_pieces pieces)
{
    queue(device, stream,
          &(struct op){.kind = COPY,
                       .to = to,
                       .to_place = to_place,
                       .from = from,
                       .from_place = from_place,
                       .pieces = pieces});
}

static void strict_embed(struct kvw_device *device,
                         const struct kvw_weight *weight,
                         const uint32_t *tokens,
                         size_t n,
                         struct kvw_device_buffer *out)
{
    queue(device, KVW_STREAM_COMPUTE,
          &(struct op){.kind = EMBED,
                       .weight = weight,
                       .numbers = copy_of(tokens, n * sizeof(tokens[0])),
                       .n = n,
                       .to = out});
}

static void strict_rms_norm(struct kvw_device *device,
                            const struct kvw_weight *weight,
                            float epsilon,
                            const struct kvw_device_buffer *x,
                            size_t n,
                            struct kvw_device_buffer *out)
{
    queue(device, KVW_STREAM_COMPUTE,
          &(struct op){.kind = RMS_NORM,
                       .weight = weight,
                       .epsilon = epsilon,
                       .from = x,
                       .n = n,
                       .to = out});
}

static void strict_matmul(struct kvw_device *device,
                          const struct kvw_weight *weight,
                          const struct kvw_weight *bias,
                          const struct kvw_device_buffer *x,
                          size_t n,
                          struct kvw_device_buffer *out)
{
    queue(device, KVW_STREAM_COMPUTE,
          &(struct op){
              .kind = MATMUL, .weight = weight, .bias = bias, .from = x, .n = n, .to = out});
}

static void strict_add(struct kvw_device *device,
                       struct kvw_device_buffer *x,
                       const struct kvw_device_buffer *y,
                       size_t n_elements)
{
    queue(device, KVW_STREAM_COMPUTE,
          &(struct op){.kind = ADD, .to = x, .from = y, .n = n_elements});
}

static void strict_silu_gate(struct kvw_device *device,
                             struct kvw_device_buffer *gate,
                             const struct kvw_device_buffer *up,
                             size_t n_elements)
{
    queue(device, KVW_STREAM_COMPUTE,
          &(struct op){.kind = SILU_GATE, .to = gate, .from = up, .n = n_elements});
}

static void strict_rope(struct kvw_device *device,
                        enum kv_rope_style style,
                        const struct kvw_device_buffer *rotations,
                        struct kvw_device_buffer *x,
                        size_t n,
                        size_t n_heads,
                        size_t d,
                        size_t n_rot)
{
    queue(device, KVW_STREAM_COMPUTE,
          &(struct op){.kind = ROPE,
                       .style = style,
                       .from = rotations,
                       .to = x,
                       .n = n,
                       .n_heads = n_heads,
                       .d = d,
                       .n_rot = n_rot});
}

static void strict_rows_put(struct kvw_device *device,
                            const struct kvw_rows_shape *shape,
                            const struct kvw_device_buffer *k,
                            const struct kvw_device_buffer *v,
                            uint32_t token_begin,
                            uint32_t n,
                            struct kvw_device_buffer *rows)
{
    queue(device, KVW_STREAM_COMPUTE,
          &(struct op){.kind = ROWS_PUT,
                       .shape = *shape,
                       .from = k,
                       .from_2 = v,
                       .token_begin = token_begin,
                       .n = n,
                       .to = rows});
}

static void strict_rows_attend(struct kvw_device *device,
                               const struct kvw_rows_shape *shape,
                               const struct kvw_device_buffer *q,
                               const struct kvw_device_buffer *rows,
                               uint32_t token_begin,
                               uint32_t n,
                               struct kvw_device_buffer *out)
{
    queue(device, KVW_STREAM_COMPUTE,
          &(struct op){.kind = ROWS_ATTEND,
                       .shape = *shape,
                       .from = q,
                       .from_2 = rows,
                       .token_begin = token_begin,
                       .n = n,
                       .to = out});
}

static void strict_runs_attend(struct kvw_device *device,
                               const struct kvw_rows_shape *shape,
                               const struct kvw_device_buffer *q,
                               const struct kvw_row_run *runs,
                               const uint32_t *run_begin,
                               struct kvw_device_buffer *out,
                               struct kvw_device_buffer *lse)
{
    const size_t n_begins = shape->n_kv_heads + 1;

    queue(device, KVW_STREAM_COMPUTE,
          &(struct op){.kind = RUNS_ATTEND,
                       .shape = *shape,
                       .from = q,
                       .runs = copy_of(runs, run_begin[n_begins - 1] * sizeof(runs[0])),
                       .numbers = copy_of(run_begin, n_begins * sizeof(run_begin[0])),
                       .to = out,
                       .to_lse = lse});
}

static void strict_answers_merge(struct kvw_device *device,
                                 const struct kvw_rows_shape *shape,
                                 const struct kvw_device_buffer *other_out,
                                 const struct kvw_device_buffer *other_lse,
                                 struct kvw_device_buffer *out,
                                 struct kvw_device_buffer *lse)
{
    queue(device, KVW_STREAM_COMPUTE,
          &(struct op){.kind = ANSWERS_MERGE,
                       .shape = *shape,
                       .from = other_out,
                       .from_2 = other_lse,
                       .to = out,
                       .to_lse = lse});
}

static void strict_rows_score(struct kvw_device *device,
                              const struct kvw_rows_shape *shape,
                              const struct kvw_device_buffer *q,
                              const struct kvw_device_buffer *rows,
                              uint32_t row_begin,
                              uint32_t n,
                              struct kvw_device_buffer *out)
{
    queue(device, KVW_STREAM_COMPUTE,
          &(struct op){.kind = ROWS_SCORE,
                       .shape = *shape,
                       .from = q,
                       .from_2 = rows,
                       .token_begin = row_begin,
                       .n = n,
                       .to = out});
}

/* ---- events ------------------------------------------------------------------------------ */

static struct strict_event *event_of(const struct kvw_event *event)
{
    return (struct strict_event *)(uintptr_t)event;
}

static kv_status_t strict_event_create(struct kvw_device *device, struct kvw_event **ret_event)
{
    struct strict_event *event = calloc(1, sizeof(*event));

    if (event == NULL)
        return KV_NO_MEMORY;
    event->base.ops = &strict_device;
    event->strict = strict_of(device);
    *ret_event = &event->base;
    return KV_OK;
}

static void strict_event_destroy(struct kvw_event *event)
{
    if (event != NULL)
        finish(event_of(event)->strict); /* what is queued may refer to it */
    free(event);
}

static void
strict_event_record(struct kvw_device *device, enum kvw_stream stream, struct kvw_event *event)
{
    struct strict_event *recorded = event_of(event);

    recorded->n_recorded++;
    queue(
        device, stream,
        &(struct op){.kind = RECORD, .event = recorded, .event_number = recorded->n_recorded});
}

static void strict_stream_wait(struct kvw_device *device,
                               enum kvw_stream stream,
                               const struct kvw_event *event)
{
    queue(device, stream,
          &(struct op){.kind = WAIT,
                       .event = event_of(event),
                       .event_number = event_of(event)->n_recorded});
}

static bool strict_event_has_happened(const struct kvw_event *event)
{
    const struct strict_event *asked = event_of(event);

    go_on(asked->strict);
    return asked->n_happened == asked->n_recorded;
}

static void strict_event_wait(const struct kvw_event *event)
{
    const struct strict_event *awaited = event_of(event);

    while (awaited->n_happened < awaited->n_recorded)
        if (!step_any(awaited->strict)) {
            fprintf(stderr, "strict device: an event waits for what is not queued\n");
            abort();
        }
}

/* ---- the device -------------------------------------------------------------------------- */

static kv_status_t strict_sync(struct kvw_device *device)
{
    finish(strict_of(device));
    return strict_of(device)->cpu->ops->sync(strict_of(device)->cpu);
}

static void strict_close(struct kvw_device *device)
{
    struct strict *strict = strict_of(device), **link = &all;

    finish(strict);
    while (*link != strict)
        link = &(*link)->next;
    *link = strict->next;
    strict->cpu->ops->close(strict->cpu);
    free(strict);
}

static kv_status_t strict_open(const struct kvw_device_config *config,
                               struct kvw_device **ret_device,
                               char *detail,
                               size_t detail_bytes)
{
    const char *seed = getenv("KV_STRICT_SEED");
    struct strict *strict = calloc(1, sizeof(*strict));
    kv_status_t status;

    if (strict == NULL)
        return KV_NO_MEMORY;
    status = kvw_device_cpu.open(config, &strict->cpu, detail, detail_bytes);
    if (status != KV_OK) {
        free(strict);
        return status;
    }
    strict->base.ops = &strict_device;
    for (unsigned i = 0; i < KVW_STREAMS; i++)
        strict->end[i] = &strict->first[i];
    kv_random_init(&strict->dice, seed != NULL ? strtoull(seed, NULL, 10) : 1);
    strict->next = all;
    all = strict;
    *ret_device = &strict->base;
    return KV_OK;
}

static void strict_describe(const struct kvw_device *device, char *text, size_t text_bytes)
{
    const struct kvw_device *cpu = ((const struct strict *)device)->cpu;

    cpu->ops->describe(cpu, text, text_bytes);
}

static kv_status_t strict_buffer_create(struct kvw_device *device,
                                        size_t bytes,
                                        struct kvw_device_buffer **ret_buffer)
{
    return kvw_device_cpu.buffer_create(strict_of(device)->cpu, bytes, ret_buffer);
}

static kv_status_t strict_buffer_wrap(struct kvw_device *device,
                                      void *memory,
                                      size_t bytes,
                                      struct kvw_device_buffer **ret_buffer)
{
    return kvw_device_cpu.buffer_wrap(strict_of(device)->cpu, memory, bytes, ret_buffer);
}

static kv_status_t strict_buffer_part(struct kvw_device *device,
                                      struct kvw_device_buffer *of,
                                      size_t offset,
                                      size_t bytes,
                                      struct kvw_device_buffer **ret_buffer)
{
    return kvw_device_cpu.buffer_part(strict_of(device)->cpu, of, offset, bytes, ret_buffer);
}

static void strict_buffer_destroy(struct kvw_device_buffer *buffer)
{
    for (struct strict *strict = all; buffer != NULL && strict != NULL; strict = strict->next)
        finish(strict);
    kvw_device_cpu.buffer_destroy(buffer);
}

static kv_status_t strict_weight_create(struct kvw_device *device,
                                        enum kvw_tensor_type type,
                                        size_t n_rows,
                                        size_t n_columns,
                                        const void *data,
                                        struct kvw_weight **ret_weight)
{
    return kvw_device_cpu.weight_create(strict_of(device)->cpu, type, n_rows, n_columns, data,
                                        ret_weight);
}

static kv_status_t strict_weight_part(struct kvw_device *device,
                                      const struct kvw_weight *of,
                                      size_t first_row,
                                      size_t n_rows,
                                      struct kvw_weight **ret_weight)
{
    return kvw_device_cpu.weight_part(strict_of(device)->cpu, of, first_row, n_rows,
                                      ret_weight);
}

static void strict_weight_destroy(struct kvw_weight *weight)
{
    kvw_device_cpu.weight_destroy(weight);
}

const struct kvw_device_ops strict_device = {
    .name = "cpu",
    .summary = "this machine's processors, as late as may be",
    .open = strict_open,
    .close = strict_close,
    .describe = strict_describe,
    .buffer_create = strict_buffer_create,
    .buffer_wrap = strict_buffer_wrap,
    .buffer_part = strict_buffer_part,
    .buffer_destroy = strict_buffer_destroy,
    .write = strict_write,
    .read = strict_read,
    .copy = strict_copy,
    .event_create = strict_event_create,
    .event_destroy = strict_event_destroy,
    .event_record = strict_event_record,
    .stream_wait = strict_stream_wait,
    .event_has_happened = strict_event_has_happened,
    .event_wait = strict_event_wait,
    .weight_create = strict_weight_create,
    .weight_part = strict_weight_part,
    .weight_destroy = strict_weight_destroy,
    .sync = strict_sync,
    .embed = strict_embed,
    .rms_norm = strict_rms_norm,
    .matmul = strict_matmul,
    .add = strict_add,
    .silu_gate = strict_silu_gate,
    .rope = strict_rope,
    .rows_put = strict_rows_put,
    .rows_attend = strict_rows_attend,
    .runs_attend = strict_runs_attend,
    .answers_merge = strict_answers_merge,
    .rows_score = strict_rows_score,
};

const struct kvw_device_ops *kvw_device_find(const char *name)
{
    return strcmp(name, "auto") == 0 || strcmp(name, "cpu") == 0 ? &strict_device : NULL;
}
