/* layer_reader.h - reads the rows that a session had when it was opened, layer by layer, while
 * the first pass computes.
 *
 * Pieces of a layer are requested in the order in which the pass needs them, some ahead of it,
 * and given to the caller as they arrive.  If another worker is still bringing the rows, a read
 * waits at the nodes until they are committed; from time to time the reader then asks how far
 * they are, and gives up once nothing has come for a while.
 *
 * Invariants, which kvw_layer_reader_check() asserts:
 *   (1) Operations are in the slots of the pieces that were requested and not taken, and in no
 *       others.
 *   (2) No more pieces were requested than there are, nor more than there are slots for.
 *
 * Threads: the client's.  Memory: kvw_layer_reader_pass() of the first layer / of the last,
 * or kvw_layer_reader_destroy(); keeps client, store and `arg`.
 */
#ifndef KV_GPU_WORKER_KVCACHE_LAYER_READER_H
#define KV_GPU_WORKER_KVCACHE_LAYER_READER_H

#include "gpu-worker/kvcache/session.h"

struct kvw_layer_reader;

struct kvw_layer_reader_setup {
    struct kv_client *client;
    struct kvw_session *store;
    uint32_t n_layers, n_kv_heads;
    size_t row_bytes;
    uint32_t n_tokens; /* rows [0, n_tokens) of every layer; not 0 */
    void *arg;
    /* Gets the rows of a piece, (n_kv_heads, rows->n_tokens, row_bytes) of one layer. */
    void (*take)(void *arg, const struct kv_rows *rows, const uint8_t *landed);
};

/* Waits until the caller has the rows of one layer, which follow those of the layer before: the
 * first layer begins to read, into *reader, the last one ends it.  Adds the time that it waited to
 * *ret_wait_us.  `setup` is the same for all layers, and *reader NULL before the first.
 *
 * Fails as the store does (kvw_session_fail()), with KV_NOT_READY if another worker's rows stopped
 * coming, with KV_CANCELLED if the session's user no longer waits for them, and with
 * KV_NO_MEMORY; then destroy the reader. */
kv_status_t kvw_layer_reader_pass(struct kvw_layer_reader **reader,
                                  const struct kvw_layer_reader_setup *setup,
                                  uint32_t layer,
                                  uint64_t *ret_wait_us);
/* Cancels what is outstanding.  NULL is allowed. */
void kvw_layer_reader_destroy(struct kvw_layer_reader *reader);

/* Asserts the invariants. */
void kvw_layer_reader_check(const struct kvw_layer_reader *reader);

#endif
