/* sampler.h - from logits to the next token.
 *
 *   temperature 0    the largest logit, the smaller token of two equal ones
 *   otherwise        top-k, then softmax at the temperature, then top-p, then a draw
 *
 * Equal seeds and equal logits give equal tokens on every machine that rounds the logits alike.
 *
 * Threads: one at a time.  Memory: create/destroy.
 */
#ifndef KV_GPU_WORKER_ENGINE_SAMPLER_H
#define KV_GPU_WORKER_ENGINE_SAMPLER_H

#include "proto/kv_status.h"

#include <stdint.h>

struct kv_sampler_options {
    double temperature; /* 0: greedy */
    uint32_t top_k;     /* the most likely so many; 0: all */
    double top_p;       /* the most likely that together reach this share; 1: all */
    uint64_t seed;
};

struct kv_sampler;

kv_status_t kv_sampler_create(const struct kv_sampler_options *options,
                              uint32_t n_vocabulary,
                              struct kv_sampler **ret_sampler);
void kv_sampler_destroy(struct kv_sampler *sampler); /* NULL is allowed */

/* KV_INVALID: the logits hold a NaN, so that there is no next token. */
kv_status_t
kv_sampler_next(struct kv_sampler *sampler, const float *logits, uint32_t *ret_token);

#endif
