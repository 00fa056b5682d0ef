/* forward.h - computes tokens through the model's layers, of one sequence or of several together.
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
 * A pass computes tokens of several sequences, each at its own positions, with its own method: the
 * weights are read once for all.  What a sequence gets does not depend on the others, to the bit,
 * where a device computes a row alone as it does among others (device/cpu/matmul.c).
 *
 *     kvw_forward_begin(forward, items, n_items);
 *     do                                            a layer; its questions are out in between
 *         kvw_forward_advance(forward, &is_over);
 *     while (!is_over);
 *     kvw_forward_logits_begin(forward, rows, n, logits);
 *     do                                            a stripe of the vocabulary
 *         kvw_forward_advance(forward, &is_over);
 *     while (!is_over);
 *
 * Several of them advance one after the other, each in a pass of its own: while one computes, what the
 * others have asked the store is on its way.
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

/* For steps of one sequence. */
kv_status_t kvw_forward_create(const struct kvw_model *model,
                               struct kvw_method *attention,
                               struct kvw_forward **ret_forward);
/* For passes of at most n_tokens tokens of n_items sequences.  Fails with KV_NO_MEMORY. */
kv_status_t kvw_forward_create_many(const struct kvw_model *model,
                                    uint32_t n_tokens,
                                    uint32_t n_items,
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

/* The tokens of a sequence in a pass. */
struct kvw_forward_item {
    struct kvw_method *attention;
    enum kvw_phase phase;
    const uint32_t *tokens; /* (n); n is 1 in a decode step, else 1..KVW_FORWARD_CHUNK */
    uint32_t token_begin, n;
    kv_status_t status; /* returned: of this sequence's attention; the others go on */
};

/* Begins a pass, and asks what the first layer asks of the store.  Keeps `items` until the pass is
 * over.  Fails with KV_INVALID if a token is not in the vocabulary, or with KV_NO_MEMORY: there is
 * then no pass. */
kv_status_t kvw_forward_begin(struct kvw_forward *forward,
                              struct kvw_forward_item *items,
                              uint32_t n_items);

/* Of a pass: waits for what the store answers to a layer, computes the rest of that layer, and asks for
 * the next one; *ret_is_over: it was the last one, or no item can go on.  Of logits: computes a stripe
 * of them; *ret_is_over: it was the last one.  Fails with the error of the device: then it is over, and
 * nothing of it counts. */
kv_status_t kvw_forward_advance(struct kvw_forward *forward, bool *ret_is_over);

/* Ends a pass that is not over; nothing of it counts.  Nothing happens if there is none. */
void kvw_forward_abandon(struct kvw_forward *forward);

/* Begins to compute logits after rows of the last pass, counted through its items, n at least 1;
 * kvw_forward_advance() goes on with them.  Keeps `rows` and `ret_logits` until they are over; no pass may
 * begin before.
 *   rows        (n)
 *   ret_logits  (n, n_vocabulary) */
void kvw_forward_logits_begin(struct kvw_forward *forward,
                              const uint32_t *rows,
                              uint32_t n,
                              float *ret_logits);

#endif
