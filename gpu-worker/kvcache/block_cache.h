/* block_cache.h - blocks of rows that a worker keeps beside its device, by layer, so that the
 * store need not send what was chosen lately (PQCache, section 3.4).
 *
 *   step of a layer:   kvw_block_cache_list()   goes with the query
 *                      kvw_block_cache_run()    for a chosen row that was not sent
 *                      kvw_block_cache_note()   for every chosen row
 *                      kvw_block_cache_end()    what was chosen most is fetched, behind the
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

struct kvw_block_cache;

/* n_tokens of each layer, rounded down to blocks.  KV_NO_MEMORY, KV_UNSUPPORTED: the device
 * cannot read memory where rows land. */
kv_status_t kvw_block_cache_create(const struct kvw_session_setup *setup,
                                   struct kvw_session *store,
                                   enum kvw_replacement_policy policy,
                                   uint32_t n_tokens,
                                   struct kvw_block_cache **ret_held);
/* Cancels what is under way.  NULL is allowed. */
void kvw_block_cache_destroy(struct kvw_block_cache *cached);

/* What a layer holds, for kv_query: ret_n_cached (n_kv_heads) numbers, and as many blocks for
 * each head.  Lent until the next call. */
void kvw_block_cache_list(struct kvw_block_cache *cached,
                          uint32_t layer,
                          const uint32_t **ret_n_cached,
                          const struct kv_cached_block **ret_blocks);

/* Is the row's block held? */
bool kvw_block_cache_has(const struct kvw_block_cache *cached, uint32_t layer, uint32_t token);

/* A row of a block that is held. */
struct kvw_row_run kvw_block_cache_run(const struct kvw_block_cache *cached,
                                       uint32_t layer,
                                       uint32_t head,
                                       uint32_t token);

void kvw_block_cache_note(struct kvw_block_cache *cached, uint32_t layer, uint32_t token);

/* `n_rows` of the session are in the store and stay: only whole blocks of them are fetched. */
kv_status_t
kvw_block_cache_end(struct kvw_block_cache *cached, uint32_t layer, uint32_t n_rows);

/* The session has only `tokens` rows any more, or another one of as many takes its place. Waits
 * for what is under way. */
kv_status_t kvw_block_cache_truncate(struct kvw_block_cache *cached, uint32_t tokens);

uint64_t kvw_block_cache_bytes_fetched(const struct kvw_block_cache *cached);

#endif
