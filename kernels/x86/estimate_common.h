/* estimate_common.h - private to kernels/: blocks of queries, in estimate_avx2.c and
 * estimate_avx512.c.  The next group is prefetched while this one is computed, a few cache
 * lines with each step, so as not to fill the core's miss queue.
 *
 * Included after avx2.h or avx512.h, which define TARGET and INLINE.
 *
 * Threads: pure functions.  Memory: the caller's; what is prefetched is not read.
 */
#ifndef KV_KERNELS_X86_ESTIMATE_COMMON_H
#define KV_KERNELS_X86_ESTIMATE_COMMON_H

#include "kernels/estimate.h"

#if defined(__x86_64__)

enum {
    QUERIES = 4, /* at once */
};

struct estimate_ahead {
    const uint8_t *at;
    size_t n, n_each; /* cache lines left; cache lines of a step */
};

/* Returns the cursor for the queries from `first` on: the first block prefetches all of the
 * next group, later blocks nothing. */
static inline struct estimate_ahead estimate_ahead_begin(const struct kv_summary_shape *shape,
                                                         const struct kv_estimate_input *input,
                                                         size_t first,
                                                         size_t n_steps)
{
    struct estimate_ahead ahead = {.at = input->next};

    if (first == 0 && input->next != NULL) {
        ahead.n = kv_summary_bytes(shape) / LINE_BYTES + 1;
        ahead.n_each = ahead.n / n_steps + 1;
    }
    return ahead;
}

__attribute__((always_inline)) static inline void
estimate_ahead_step(struct estimate_ahead *ahead)
{
    size_t n = ahead->n < ahead->n_each ? ahead->n : ahead->n_each;

    ahead->n -= n;
    for (; n > 0; n--, ahead->at += LINE_BYTES)
        __builtin_prefetch(ahead->at);
}

/* Defined by each instruction set: adds a group for n <= QUERIES queries, from `first` on; n is
 * a constant at the calls. */
INLINE void add_part(const struct kv_summary_shape *shape,
                     const void *group,
                     const struct kv_estimate_input *input,
                     size_t first,
                     unsigned n,
                     float *state);

TARGET static void add(const struct kv_summary_shape *shape,
                       const void *group,
                       const struct kv_estimate_input *input,
                       float *state)
{
    size_t query = 0;

    for (; query + QUERIES <= input->n_queries; query += QUERIES)
        add_part(shape, group, input, query, QUERIES, state);
    switch (input->n_queries - query) {
    case 3:
        add_part(shape, group, input, query, 3, state);
        break;
    case 2:
        add_part(shape, group, input, query, 2, state);
        break;
    case 1:
        add_part(shape, group, input, query, 1, state);
        break;
    default:
        break;
    }
}

#endif

#endif
