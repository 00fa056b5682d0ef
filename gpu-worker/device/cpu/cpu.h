/* cpu.h - the inside of the processor's row of device.h.
 *
 *   cpu.c          memory, weights, everything elementwise
 *   matmul.c       products with weights: quantised blocks for one row, unpacked tiles for more
 *   attend.c       attention over cached rows
 *
 * What is cut into parts is cut by shape alone, never by the number of threads; and each
 * token's results have the same bits however many pass with it (dot.h).
 *
 * Threads: parts run on the crew's threads, each with its own scratch.
 */
#ifndef KV_GPU_WORKER_DEVICE_CPU_CPU_H
#define KV_GPU_WORKER_DEVICE_CPU_CPU_H

#include "gpu-worker/base/softmax.h"
#include "gpu-worker/base/thread_pool.h"
#include "gpu-worker/device/cpu/dot.h"
#include "gpu-worker/device/device.h"

#include <stdbool.h>

extern const struct kv_device_row kv_device_cpu;

enum {
    KV_CPU_MANY = 16, /* rows from which on work is worth waking the other threads */
    KV_CPU_SCRATCH_BYTES = 2 << 20, /* of each thread */
};

struct kv_cpu {
    struct kv_device base;
    struct kv_crew *crew;
    const struct kv_dot_table *dot;
    const struct kvw_softmax_ops *softmax;
    float *scratch;  /* (threads, KV_CPU_SCRATCH_BYTES) */
    float *partials; /* of attention; grows with the context */
    size_t partials_bytes;
    kv_status_t failure; /* what sync() tells */
};

struct kv_cpu_buffer {
    struct kv_device_buffer base;
    char *data;
    bool is_wrapped; /* the memory is the caller's */
};

struct kv_cpu_weight {
    struct kv_weight base;
    const char *data;
    size_t row_bytes;
};

static inline struct kv_cpu *kv_cpu_of(struct kv_device *device)
{
    return (struct kv_cpu *)device;
}

static inline float *kv_cpu_floats(const struct kv_device_buffer *buffer)
{
    return (float *)(void *)((const struct kv_cpu_buffer *)buffer)->data;
}

static inline float *kv_cpu_scratch(const struct kv_cpu *cpu, unsigned member)
{
    return cpu->scratch + (size_t)member * (KV_CPU_SCRATCH_BYTES / sizeof(float));
}

/* Operations of device.h. */
void kv_cpu_matmul(struct kv_device *device,
                   const struct kv_weight *weight,
                   const struct kv_weight *bias,
                   const struct kv_device_buffer *x,
                   size_t n,
                   struct kv_device_buffer *out);
void kv_cpu_rows_put(struct kv_device *device,
                     const struct kv_rows_shape *shape,
                     const struct kv_device_buffer *k,
                     const struct kv_device_buffer *v,
                     uint32_t token_begin,
                     uint32_t n,
                     struct kv_device_buffer *rows);
void kv_cpu_rows_attend(struct kv_device *device,
                        const struct kv_rows_shape *shape,
                        const struct kv_device_buffer *q,
                        const struct kv_device_buffer *rows,
                        uint32_t token_begin,
                        uint32_t n,
                        struct kv_device_buffer *out);
void kv_cpu_runs_attend(struct kv_device *device,
                        const struct kv_rows_shape *shape,
                        const struct kv_device_buffer *q,
                        const struct kv_row_run *runs,
                        const uint32_t *run_begin,
                        struct kv_device_buffer *out,
                        struct kv_device_buffer *lse);
void kv_cpu_answers_merge(struct kv_device *device,
                          const struct kv_rows_shape *shape,
                          const float *outputs,
                          const float *lses,
                          struct kv_device_buffer *out,
                          struct kv_device_buffer *lse);
void kv_cpu_rows_score(struct kv_device *device,
                       const struct kv_rows_shape *shape,
                       const struct kv_device_buffer *q,
                       const struct kv_device_buffer *rows,
                       uint32_t row_begin,
                       uint32_t n,
                       struct kv_device_buffer *out);

#endif
