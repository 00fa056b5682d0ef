/* forward.h - tokens through the model's layers.
 *
 * Prefill goes in chunks that begin at multiples of KVW_FORWARD_CHUNK, counted from token 0, so
 * that the same tokens always meet the same shapes of matrices, and give the same bits.
 *
 *     while (begin < end) {
 *         n = kvw_forward_chunk_end(begin, end) - begin;
 *         kvw_forward_step(forward, KVW_PREFILL, tokens + begin, begin, n);
 *         begin += n;
 *     }
 *     kvw_forward_logits(forward, n - 1, 1, logits);
 *
 * Threads: one at a time.  Memory: create/destroy; keeps model and attention.
 */
#ifndef KV_GPU_WORKER_ENGINE_FORWARD_H
#define KV_GPU_WORKER_ENGINE_FORWARD_H

#include "gpu-worker/attention/method.h"

enum {
    KVW_FORWARD_CHUNK = 256,
};

struct kvw_forward;

kv_status_t kvw_forward_create(const struct kvw_model *model,
                               struct kvw_method *attention,
                               struct kvw_forward **ret_forward);
void kvw_forward_destroy(struct kvw_forward *forward); /* NULL is allowed */

/* Writes what is computed to the trace from now on, by layer; kept, NULL: none. */
void kvw_forward_trace(struct kvw_forward *forward, struct kvw_trace *trace);

/* Where the chunk that `begin` is in ends, `end` at most. */
static inline uint32_t kvw_forward_chunk_end(uint32_t begin, uint32_t end)
{
    const uint32_t chunk_end =
        begin / KVW_FORWARD_CHUNK * KVW_FORWARD_CHUNK + KVW_FORWARD_CHUNK;

    return chunk_end < end ? chunk_end : end;
}

/* The tokens at the positions token_begin..token_begin + n - 1, n in 1..KVW_FORWARD_CHUNK, one
 * if it is a decode step; those before have passed.  KV_INVALID: a token that is not in the
 * vocabulary; else what the attention or the device failed with. */
kv_status_t kvw_forward_step(struct kvw_forward *forward,
                             enum kvw_phase phase,
                             const uint32_t *tokens,
                             uint32_t token_begin,
                             uint32_t n);

/* Logits after the tokens first..first + n - 1 of the last step:
 *   ret_logits  (n, n_vocabulary) */
kv_status_t
kvw_forward_logits(struct kvw_forward *forward, uint32_t first, uint32_t n, float *ret_logits);

#endif
