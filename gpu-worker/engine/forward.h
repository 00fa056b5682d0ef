/* forward.h - tokens through the model's layers.
 *
 * Prefill goes in chunks that begin at multiples of KV_FORWARD_CHUNK, counted from token 0, so
 * that the same tokens always meet the same shapes of matrices, and give the same bits.
 *
 *     while (begin < end) {
 *         n = kv_forward_chunk_end(begin, end) - begin;
 *         kv_forward_step(forward, KV_PREFILL, tokens + begin, begin, n);
 *         begin += n;
 *     }
 *     kv_forward_logits(forward, n - 1, 1, logits);
 *
 * Threads: one at a time.  Memory: create/destroy; keeps model and attention.
 */
#ifndef KV_GPU_WORKER_ENGINE_FORWARD_H
#define KV_GPU_WORKER_ENGINE_FORWARD_H

#include "gpu-worker/attention/method.h"

enum {
    KV_FORWARD_CHUNK = 256,
};

struct kv_forward;

kv_status_t kv_forward_create(const struct kv_model *model,
                              struct kv_attention *attention,
                              struct kv_forward **ret_forward);
void kv_forward_destroy(struct kv_forward *forward); /* NULL is allowed */

/* Writes what is computed to the trace from now on, by layer; kept, NULL: none. */
void kv_forward_trace(struct kv_forward *forward, struct kv_trace *trace);

/* Where the chunk that `begin` is in ends, `end` at most. */
static inline uint32_t kv_forward_chunk_end(uint32_t begin, uint32_t end)
{
    const uint32_t chunk_end = begin / KV_FORWARD_CHUNK * KV_FORWARD_CHUNK + KV_FORWARD_CHUNK;

    return chunk_end < end ? chunk_end : end;
}

/* The tokens at the positions token_begin..token_begin + n - 1, n in 1..KV_FORWARD_CHUNK, one
 * if it is a decode step; those before have passed.  KV_INVALID: a token that is not in the
 * vocabulary; else what the attention or the device failed with. */
kv_status_t kv_forward_step(struct kv_forward *forward,
                            enum kv_phase phase,
                            const uint32_t *tokens,
                            uint32_t token_begin,
                            uint32_t n);

/* Logits after the tokens first..first + n - 1 of the last step:
 *   ret_logits  (n, n_vocabulary) */
kv_status_t
kv_forward_logits(struct kv_forward *forward, uint32_t first, uint32_t n, float *ret_logits);

#endif
