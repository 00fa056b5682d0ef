/* forward.h - computes tokens through the model's layers.
 *
 * Prefill goes in chunks that begin at multiples of KVW_FORWARD_CHUNK, counted from token 0, so
 * that the same tokens are always computed in matrices of the same shapes, with the same bits.
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

/* Writes each layer's computation to the trace from now on.  Keeps `trace`; NULL: none. */
void kvw_forward_trace(struct kvw_forward *forward, struct kvw_trace *trace);

/* Returns the end of the chunk that contains `begin`, at most `end`. */
static inline uint32_t kvw_forward_chunk_end(uint32_t begin, uint32_t end)
{
    const uint32_t chunk_end =
        begin / KVW_FORWARD_CHUNK * KVW_FORWARD_CHUNK + KVW_FORWARD_CHUNK;

    return chunk_end < end ? chunk_end : end;
}

/* Computes the tokens at positions token_begin..token_begin + n - 1; n is 1 in a decode step,
 * else 1..KVW_FORWARD_CHUNK.  All earlier tokens must have been computed.  Fails with
 * KV_INVALID if a token is not in the vocabulary, or with the error of attention or device. */
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
