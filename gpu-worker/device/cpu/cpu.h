/* cpu.h - internals of the device "cpu" of device.h.
 *
 *   cpu.c          memory, weights, everything elementwise
 *   matmul.c       products with weights: quantized blocks for one row, unpacked tiles for more
 *   attend.c       attention over cached rows
 *
 * Work is divided into parts by shape alone, never by the number of threads, and a token's
 * results have the same bits however many tokens are computed with it (dot.h).
 *
 * Threads: parts run on the thread pool's threads, each with its own scratch.
 */
#ifndef KV_GPU_WORKER_DEVICE_CPU_CPU_H
#define KV_GPU_WORKER_DEVICE_CPU_CPU_H

#include "gpu-worker/base/softmax.h"
#include "gpu-worker/base/thread_pool.h"
#include "gpu-worker/device/cpu/dot.h"
#include "gpu-worker/device/device.h"

#include <stdbool.h>

extern const struct kvw_device_ops kvw_device_cpu;

enum {
    KVW_CPU_MANY = 16,               /* with fewer rows or parts, other threads are not woken */
    KVW_CPU_SCRATCH_BYTES = 2 << 20, /* of each thread */
};

struct kvw_cpu {
    struct kvw_device base;
    struct kvw_thread_pool *thread_pool;
    const struct kvw_dot_table *dot;
    const struct kvw_softmax_ops *softmax;
    float *scratch;  /* (threads, KVW_CPU_SCRATCH_BYTES) */
    float *partials; /* of attention; grows with the context */
    size_t partials_bytes;
    kv_status_t failure; /* returned by sync() */
};

struct kvw_cpu_buffer {
    struct kvw_device_buffer base;
    char *data;
    bool is_wrapped; /* the memory is the caller's */
};

struct kvw_cpu_weight {
    struct kvw_weight base;
    const char *data;
    size_t row_bytes;
};

static inline struct kvw_cpu *kvw_cpu_of(struct kvw_device *device)
{
    return (struct kvw_cpu *)device;
}

static inline float *kvw_cpu_floats(const struct kvw_device_buffer *buffer)
{
    return (float *)(void *)((const struct kvw_cpu_buffer *)buffer)->data;
}

static inline float *kvw_cpu_scratch(const struct kvw_cpu *cpu, unsigned thread_index)
{
    return cpu->scratch + (size_t)thread_index * (KVW_CPU_SCRATCH_BYTES / sizeof(float));
}

/* Operations of device.h. */
void kvw_cpu_matmul(struct kvw_device *device,
                    const struct kvw_weight *weight,
                    const struct kvw_weight *bias,
                    const struct kvw_device_buffer *x,
                    size_t n,
                    struct kvw_device_buffer *out);
void kvw_cpu_rows_put(struct kvw_device *device,
                      const struct kvw_rows_shape *shape,
                      const struct kvw_device_buffer *k,
                      const struct kvw_device_buffer *v,
                      uint32_t token_begin,
                      uint32_t n,
                      struct kvw_device_buffer *rows);
void kvw_cpu_rows_attend(struct kvw_device *device,
                         const struct kvw_rows_shape *shape,
                         const struct kvw_device_buffer *q,
                         const struct kvw_device_buffer *rows,
                         uint32_t token_begin,
                         uint32_t n,
                         struct kvw_device_buffer *out);
void kvw_cpu_runs_attend(struct kvw_device *device,
                         const struct kvw_rows_shape *shape,
                         const struct kvw_device_buffer *q,
                         const struct kvw_row_run *runs,
                         const uint32_t *run_begin,
                         struct kvw_device_buffer *out,
                         struct kvw_device_buffer *lse);
void kvw_cpu_answers_merge(struct kvw_device *device,
                           const struct kvw_rows_shape *shape,
                           const struct kvw_device_buffer *other_out,
                           const struct kvw_device_buffer *other_lse,
                           struct kvw_device_buffer *out,
                           struct kvw_device_buffer *lse);
void kvw_cpu_rows_score(struct kvw_device *device,
                        const struct kvw_rows_shape *shape,
                        const struct kvw_device_buffer *q,
                        const struct kvw_device_buffer *rows,
                        uint32_t row_begin,
                        uint32_t n,
                        struct kvw_device_buffer *out);

#endif
