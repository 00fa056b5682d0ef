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

struct kvw_sampler_options {
    double temperature; /* 0: greedy */
    uint32_t top_k;     /* this many of the most likely; 0: all */
    double top_p;       /* the most likely that together reach this share; 1: all */
    uint64_t seed;
};

struct kvw_sampler;

kv_status_t kvw_sampler_create(const struct kvw_sampler_options *options,
                               uint32_t n_vocabulary,
                               struct kvw_sampler **ret_sampler);
void kvw_sampler_destroy(struct kvw_sampler *sampler); /* NULL is allowed */

/* The state of the random choices, so that another sampler with the same options makes the ones
 * that this one would have made. */
enum {
    KVW_SAMPLER_STATE_WORDS = 4,
};
void kvw_sampler_get_state(const struct kvw_sampler *sampler,
                           uint64_t ret_state[KVW_SAMPLER_STATE_WORDS]);
/* All zeros are no state, and change nothing. */
void kvw_sampler_set_state(struct kvw_sampler *sampler,
                           const uint64_t state[KVW_SAMPLER_STATE_WORDS]);

/* KV_INVALID: the logits hold a NaN, so that there is no next token. */
kv_status_t
kvw_sampler_next(struct kvw_sampler *sampler, const float *logits, uint32_t *ret_token);

#endif
