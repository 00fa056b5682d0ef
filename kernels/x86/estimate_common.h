/* estimate_common.h - private to kernels/: what estimate_avx2.c and estimate_avx512.c have in
 * common: the next group is asked for while this one is worked on, a few cache lines with each
 * step, so that the memory has time for them.
 *
 * Threads: pure functions.  Memory: the caller's; what is asked for is not read.
 */
#ifndef KV_KERNELS_X86_ESTIMATE_COMMON_H
#define KV_KERNELS_X86_ESTIMATE_COMMON_H

#include "kernels/estimate.h"

enum {
    REST_LINE = 64, /* bytes */
};

struct rest_ahead {
    const uint8_t *at;
    size_t n, n_each; /* lines: all that are left, of a step */
};

/* Of a question's queries from `first` on; the first ones ask for all queries. */
static inline struct rest_ahead rest_ahead_begin(const struct kv_rest_shape *shape,
                                                 const struct kv_rest_question *question,
                                                 size_t first,
                                                 size_t n_steps)
{
    struct rest_ahead ahead = {.at = question->next};

    if (first == 0 && question->next != NULL) {
        ahead.n = kv_rest_bytes(shape) / REST_LINE + 1;
        ahead.n_each = ahead.n / n_steps + 1;
    }
    return ahead;
}

__attribute__((always_inline)) static inline void rest_ahead_step(struct rest_ahead *ahead)
{
    size_t n = ahead->n < ahead->n_each ? ahead->n : ahead->n_each;

    ahead->n -= n;
    for (; n > 0; n--, ahead->at += REST_LINE)
        __builtin_prefetch(ahead->at);
}

#endif
