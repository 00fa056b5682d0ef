/* device.h - the operations of a device that computes forward passes, as a table of functions.
 *
 * Buffers are opaque memory of the device, and operations use them from their beginning.
 * Weights are tensors of a model, created once and used in every pass.  Activations are fp32.
 *
 *   weight_create()   makes a weight of a tensor: used in place, or copied to the device
 *   operations        are queued, and report no errors.  Those of a stream are done one after the
 *                     other; streams are ordered only by events
 *   event_record()    marks how far a stream is queued; another stream waits for that with
 *                     stream_wait(), the caller with event_wait()
 *   sync()            waits for all that is queued; returns the first failure since the last sync
 *
 * Everything that computes is in KVW_STREAM_COMPUTE.  What a copy reads must stay as it is until
 * the copy is done, and what it writes is not there before.  All other arguments are borrowed
 * during the call only.
 *
 * Shapes are (rows, columns), row-major and dense.  All operations are deterministic: the same
 * shapes and values give the same bits, whatever the number of threads.
 *
 * Threads: a device, its buffers and its weights are used by one thread at a time; a device may
 * run threads of its own.  Memory: open/close, create/destroy; weights and buffers are
 * destroyed before their device is closed.
 */
#ifndef KV_GPU_WORKER_DEVICE_DEVICE_H
#define KV_GPU_WORKER_DEVICE_DEVICE_H

#include "gpu-worker/gguf/tensor_type.h"
#include "kernels/rope.h"
#include "proto/kv_types.h"

#include <stdbool.h>

struct kvw_device_config {
    unsigned n_threads; /* cpu: 1..KVW_THREAD_POOL_THREADS_MAX */
};

/* The first member of every implementation's struct. */
struct kvw_device {
    const struct kvw_device_ops *ops;
};
struct kvw_device_buffer {
    const struct kvw_device_ops *ops;
    size_t bytes;
};
struct kvw_weight {
    const struct kvw_device_ops *ops;
    enum kvw_tensor_type type;
    size_t n_rows, n_columns;
};

enum kvw_stream {
    KVW_STREAM_COMPUTE,
    KVW_STREAM_TRANSFER, /* copies that go on beside the computation */
    KVW_STREAMS,
};

/* A point in a stream; the first member of every implementation's struct. */
struct kvw_event {
    const struct kvw_device_ops *ops;
};

/* What a copy copies: n pieces, 1 at least. */
struct kvw_pieces {
    size_t n, bytes;
};
/* Where the pieces are, in a buffer or in memory of the caller: the first begins at `offset`, each
 * other one `stride` bytes behind the beginning of the one before. */
struct kvw_place {
    size_t offset, stride;
};

/* The cached rows of one layer: rows (n_kv_heads, capacity, 2 d) of the element type, a key and
 * then its value in each.  Query heads are assigned evenly and in order: head i of n_q_heads
 * attends to kv head i / (n_q_heads / n_kv_heads). */
struct kvw_rows_shape {
    uint32_t n_q_heads, n_kv_heads;
    uint32_t d;          /* a multiple of 8 */
    uint32_t capacity;   /* tokens */
    enum kv_dtype dtype; /* KV_FP32, KV_FP16, KV_BF16 */
};

static inline size_t kvw_rows_shape_row_bytes(const struct kvw_rows_shape *shape)
{
    return (size_t)2 * shape->d * kv_dtype_bytes(shape->dtype);
}

/* Consecutive rows of one kv head in a buffer of the device.  Row 0 of a buffer begins at byte
 * 0, and rows have the size and format of the shape. */
struct kvw_row_run {
    const struct kvw_device_buffer *buffer;
    size_t first_row;
    uint32_t n_rows; /* 1 at least */
};

struct kvw_device_ops {
    const char *name;    /* "cpu" */
    const char *summary; /* for --help */

    kv_status_t (*open)(const struct kvw_device_config *config,
                        struct kvw_device **ret_device,
                        char *detail,
                        size_t detail_bytes);
    void (*close)(struct kvw_device *device);
    /* "cpu avx2, 8 threads" */
    void (*describe)(const struct kvw_device *device, char *text, size_t text_bytes);

    /* Creates a buffer of zeros; its memory may be committed on first use.  Fails with
     * KV_NO_MEMORY. */
    kv_status_t (*buffer_create)(struct kvw_device *device,
                                 size_t bytes,
                                 struct kvw_device_buffer **ret_buffer);
    /* Wraps memory of the caller, which must outlive the buffer.  Fails with KV_UNSUPPORTED if
     * the device cannot access it. */
    kv_status_t (*buffer_wrap)(struct kvw_device *device,
                               void *memory,
                               size_t bytes,
                               struct kvw_device_buffer **ret_buffer);
    /* Makes a buffer of a part of another, which outlives it; `offset` is a multiple of 16. */
    kv_status_t (*buffer_part)(struct kvw_device *device,
                               struct kvw_device_buffer *of,
                               size_t offset,
                               size_t bytes,
                               struct kvw_device_buffer **ret_buffer);
    /* Waits for what is queued of it.  NULL is allowed. */
    void (*buffer_destroy)(struct kvw_device_buffer *buffer);
    /* To the device, from it, and on it; kvw_device_write() and kvw_device_read() are for a single
     * piece. */
    void (*write)(struct kvw_device *device,
                  enum kvw_stream stream,
                  struct kvw_device_buffer *to,
                  struct kvw_place to_place,
                  const void *from,
                  size_t from_stride,
                  struct kvw_pieces pieces);
    void (*read)(struct kvw_device *device,
                 enum kvw_stream stream,
                 const struct kvw_device_buffer *from,
                 struct kvw_place from_place,
                 void *to,
                 size_t to_stride,
                 struct kvw_pieces pieces);
    void (*copy)(struct kvw_device *device,
                 enum kvw_stream stream,
                 struct kvw_device_buffer *to,
                 struct kvw_place to_place,
                 const struct kvw_device_buffer *from,
                 struct kvw_place from_place,
                 struct kvw_pieces pieces);

    /* Creates an event that has happened.  Fails with KV_NO_MEMORY. */
    kv_status_t (*event_create)(struct kvw_device *device, struct kvw_event **ret_event);
    void (*event_destroy)(struct kvw_event *event); /* NULL is allowed */
    /* The event happens, again, when all is done that is queued in the stream now. */
    void (*event_record)(struct kvw_device *device,
                         enum kvw_stream stream,
                         struct kvw_event *event);
    /* What is queued in the stream from now on begins when the event, as it was recorded last, has
     * happened. */
    void (*stream_wait)(struct kvw_device *device,
                        enum kvw_stream stream,
                        const struct kvw_event *event);
    bool (*event_has_happened)(const struct kvw_event *event);
    void (*event_wait)(const struct kvw_event *event);

    /* `data` (n_rows, n_columns) remains the caller's and must outlive the weight.  Fails with
     * KV_NO_MEMORY. */
    kv_status_t (*weight_create)(struct kvw_device *device,
                                 enum kvw_tensor_type type,
                                 size_t n_rows,
                                 size_t n_columns,
                                 const void *data,
                                 struct kvw_weight **ret_weight);
    /* Makes a weight of n_rows rows of another one, which outlives it.  Fails with KV_NO_MEMORY. */
    kv_status_t (*weight_part)(struct kvw_device *device,
                               const struct kvw_weight *of,
                               size_t first_row,
                               size_t n_rows,
                               struct kvw_weight **ret_weight);
    void (*weight_destroy)(struct kvw_weight *weight); /* NULL is allowed */

    kv_status_t (*sync)(struct kvw_device *device);

    /* out (n, n_columns) = the rows of `weight` with the numbers `tokens` (n). */
    void (*embed)(struct kvw_device *device,
                  const struct kvw_weight *weight,
                  const uint32_t *tokens,
                  size_t n,
                  struct kvw_device_buffer *out);
    /* out (n, n_columns) = x / sqrt(mean(x^2) + epsilon) * weight, a weight of one row */
    void (*rms_norm)(struct kvw_device *device,
                     const struct kvw_weight *weight,
                     float epsilon,
                     const struct kvw_device_buffer *x,
                     size_t n,
                     struct kvw_device_buffer *out);
    /* out (n, n_rows) = x (n, n_columns) times weight (n_rows, n_columns) transposed, plus bias
     * (a weight of one row of n_rows) unless that is NULL */
    void (*matmul)(struct kvw_device *device,
                   const struct kvw_weight *weight,
                   const struct kvw_weight *bias,
                   const struct kvw_device_buffer *x,
                   size_t n,
                   struct kvw_device_buffer *out);
    /* x += y */
    void (*add)(struct kvw_device *device,
                struct kvw_device_buffer *x,
                const struct kvw_device_buffer *y,
                size_t n_elements);
    /* gate = gate / (1 + exp(-gate)) * up */
    void (*silu_gate)(struct kvw_device *device,
                      struct kvw_device_buffer *gate,
                      const struct kvw_device_buffer *up,
                      size_t n_elements);
    /* Rotates the first n_rot elements of each head of x (n, n_heads, d) by
     * rotations (n, n_rot / 2, 2): cosine, sine. */
    void (*rope)(struct kvw_device *device,
                 enum kv_rope_style style,
                 const struct kvw_device_buffer *rotations,
                 struct kvw_device_buffer *x,
                 size_t n,
                 size_t n_heads,
                 size_t d,
                 size_t n_rot);

    /* Stores keys and values (n, n_kv_heads, d) of the tokens from token_begin on in `rows`,
     * rounded to nearest even; values beyond fp16's range become its largest number. */
    void (*rows_put)(struct kvw_device *device,
                     const struct kvw_rows_shape *shape,
                     const struct kvw_device_buffer *k,
                     const struct kvw_device_buffer *v,
                     uint32_t token_begin,
                     uint32_t n,
                     struct kvw_device_buffer *rows);
    /* Causal attention: the query of token t, of q (n, n_q_heads, d), attends to the rows 0..t;
     * out (n, n_q_heads, d) = softmax(q k / sqrt(d)) v. */
    void (*rows_attend)(struct kvw_device *device,
                        const struct kvw_rows_shape *shape,
                        const struct kvw_device_buffer *q,
                        const struct kvw_device_buffer *rows,
                        uint32_t token_begin,
                        uint32_t n,
                        struct kvw_device_buffer *out);
    /* One token's query q (n_q_heads, d) over selected rows: kv head h attends to those of
     * runs[run_begin[h]] .. runs[run_begin[h + 1] - 1], in that order; run_begin
     * (n_kv_heads + 1).  A head without runs gets zeros, and an lse of -inf.  The result's bits
     * depend on the sequence of rows alone, not on its division into runs or on the buffers:
     * with all rows 0..t they are those of rows_attend().  shape->capacity is not used.
     * lse (n_q_heads): the natural logarithm of sum exp(q k / sqrt(d)); NULL: not wanted. */
    void (*runs_attend)(struct kvw_device *device,
                        const struct kvw_rows_shape *shape,
                        const struct kvw_device_buffer *q,
                        const struct kvw_row_run *runs,
                        const uint32_t *run_begin,
                        struct kvw_device_buffer *out,
                        struct kvw_device_buffer *lse);
    /* Merges attention over two disjoint sets of rows: out (n_q_heads, d) and lse (n_q_heads)
     * with others of the same shapes, each from runs_attend() or from a node.  As
     * kv_attend_merge() of kernels/attend.h, within its error bound. */
    void (*answers_merge)(struct kvw_device *device,
                          const struct kvw_rows_shape *shape,
                          const struct kvw_device_buffer *other_out,
                          const struct kvw_device_buffer *other_lse,
                          struct kvw_device_buffer *out,
                          struct kvw_device_buffer *lse);
    /* out (n_q_heads, n) = q k / sqrt(d) for one token's query q (n_q_heads, d) and the keys of
     * the rows row_begin .. row_begin + n - 1 of each head's kv head. */
    void (*rows_score)(struct kvw_device *device,
                       const struct kvw_rows_shape *shape,
                       const struct kvw_device_buffer *q,
                       const struct kvw_device_buffer *rows,
                       uint32_t row_begin,
                       uint32_t n,
                       struct kvw_device_buffer *out);
};

static inline void kvw_device_write(struct kvw_device *device,
                                    enum kvw_stream stream,
                                    struct kvw_device_buffer *to,
                                    size_t offset,
                                    const void *from,
                                    size_t bytes)
{
    device->ops->write(device, stream, to, (struct kvw_place){offset, bytes}, from, bytes,
                       (struct kvw_pieces){1, bytes});
}

static inline void kvw_device_read(struct kvw_device *device,
                                   enum kvw_stream stream,
                                   const struct kvw_device_buffer *from,
                                   size_t offset,
                                   void *to,
                                   size_t bytes)
{
    device->ops->read(device, stream, from, (struct kvw_place){offset, bytes}, to, bytes,
                      (struct kvw_pieces){1, bytes});
}

/* What is queued in `later` from now on follows all that is queued in `earlier`; `event` is the
 * caller's, for this alone. */
static inline void kvw_device_follow(struct kvw_device *device,
                                     enum kvw_stream later,
                                     enum kvw_stream earlier,
                                     struct kvw_event *event)
{
    device->ops->event_record(device, earlier, event);
    device->ops->stream_wait(device, later, event);
}

/* Finds a device by name; "auto": the best available.  NULL: no such device.  The list is in
 * devices.c. */
const struct kvw_device_ops *kvw_device_find(const char *name);

#endif
