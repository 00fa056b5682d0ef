/* block_cache.h - blocks of rows that a worker keeps beside its device, by layer, so that the
 * store need not send what was chosen lately (PQCache, section 3.4).
 *
 *   step of a layer:   kv_held_blocks_list()   goes with the query
 *                      kv_held_blocks_run()    for a chosen row that was not sent
 *                      kv_held_blocks_note()   for every chosen row
 *                      kv_held_blocks_end()    what was chosen most is fetched, behind the
 *                                              computation: whole blocks, all kv heads
 *
 * That is for answers by rows.  Attention that a node computes travels as one output per query
 * head, whatever is chosen: then nothing is kept.
 *
 * A block is told from another under the same number by its fingerprint (kvclient.h): the store
 * sends the rows of a block that the worker holds under another one.
 *
 * Threads: one at a time.  Memory: create/destroy; keeps what the setup names and the store.
 */
#ifndef KV_GPU_WORKER_KVCACHE_BLOCK_CACHE_H
#define KV_GPU_WORKER_KVCACHE_BLOCK_CACHE_H

#include "gpu-worker/kvcache/block_policy.h"
#include "gpu-worker/kvcache/session.h"

struct kv_held_blocks;

/* n_tokens of each layer, rounded down to blocks.  KV_NO_MEMORY, KV_UNSUPPORTED: the device
 * cannot read memory where rows land. */
kv_status_t kv_held_blocks_create(const struct kvw_session_setup *setup,
                                  struct kv_store_session *store,
                                  enum kv_block_policy policy,
                                  uint32_t n_tokens,
                                  struct kv_held_blocks **ret_held);
/* Cancels what is under way.  NULL is allowed. */
void kv_held_blocks_destroy(struct kv_held_blocks *held);

/* What a layer holds, for kv_query: ret_n_held (n_kv_heads) numbers, and as many blocks for
 * each head.  Lent until the next call. */
void kv_held_blocks_list(struct kv_held_blocks *held,
                         uint32_t layer,
                         const uint32_t **ret_n_held,
                         const struct kv_cached_block **ret_blocks);

/* Is the row's block held? */
bool kv_held_blocks_has(const struct kv_held_blocks *held, uint32_t layer, uint32_t token);

/* A row of a block that is held. */
struct kv_row_run kv_held_blocks_run(const struct kv_held_blocks *held,
                                     uint32_t layer,
                                     uint32_t head,
                                     uint32_t token);

void kv_held_blocks_note(struct kv_held_blocks *held, uint32_t layer, uint32_t token);

/* `n_rows` of the session are in the store and stay: only whole blocks of them are fetched. */
kv_status_t kv_held_blocks_end(struct kv_held_blocks *held, uint32_t layer, uint32_t n_rows);

/* The session has only `tokens` rows any more, or another one of as many takes its place. Waits
 * for what is under way. */
kv_status_t kv_held_blocks_truncate(struct kv_held_blocks *held, uint32_t tokens);

uint64_t kv_held_blocks_bytes_fetched(const struct kv_held_blocks *held);

#endif
