/* softmax.h - the softmax of an array in the host's memory, in two passes.
 *
 *     shift = max(x);  sum = exp_sum(x, shift);  x[i] / sum
 *
 * A table of functions per instruction set, the best of which is chosen at run time.  They
 * differ in the order of their sums and in the last bits of exp.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_GPU_WORKER_BASE_SOFTMAX_H
#define KV_GPU_WORKER_BASE_SOFTMAX_H

#include <stddef.h>

struct kvw_softmax_ops {
    const char *name;                       /* "scalar", "avx2" */
    float (*max)(const float *x, size_t n); /* n > 0 */
    /* x[i] = exp(x[i] - shift); returns their sum.  Below -87 the result is 0. */
    float (*exp_sum)(float *x, size_t n, float shift);
};

/* The best table for this processor. */
const struct kvw_softmax_ops *kvw_softmax(void);

/* The tables that this processor can run, scalar first; NULL after the last. */
const struct kvw_softmax_ops *kvw_softmax_at(unsigned index);

/* softmax_avx2.c; NULL on other processors. */
const struct kvw_softmax_ops *kvw_softmax_avx2(void);

#endif
