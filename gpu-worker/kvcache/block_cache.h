/* block_cache.h - the worker's cache of blocks of rows, by layer: the store does not send
 * selected rows that are cached (PQCache, section 3.4).
 *
 *   step of a layer:   kvw_block_cache_list()   goes with the query
 *                      kvw_block_cache_run()    for a selected row that was not sent
 *                      kvw_block_cache_note()   for every selected row
 *                      kvw_block_cache_end()    starts fetching the blocks with the most selected
 *                                               rows, while the computation goes on: whole
 *                                               blocks, all kv heads
 *
 * The cache is used when queries return rows or ids.  An attention output has one size whatever
 * is selected, so with it nothing is cached.
 *
 * A fingerprint (kvclient.h) tells a block from another one with the same number: the store
 * sends the rows of a block that the worker caches under another fingerprint.
 *
 * Invariants, which kvw_block_cache_check() asserts:
 *   (1) Those of each layer's block_policy.h.
 *   (2) The block that the list for the store names in a slot is the policy's.
 *   (3) Every outstanding fetch is of a block that the policy waits for; they are counted.
 *
 * Threads: one at a time.  Memory: create/destroy; keeps what the setup names and the store.
 */
#ifndef KV_GPU_WORKER_KVCACHE_BLOCK_CACHE_H
#define KV_GPU_WORKER_KVCACHE_BLOCK_CACHE_H

#include "gpu-worker/kvcache/block_policy.h"
#include "gpu-worker/kvcache/session.h"

struct kvw_block_cache;

/* Creates a cache for n_tokens of each layer, rounded down to blocks.  Fails with KV_NO_MEMORY,
 * or with KV_UNSUPPORTED if the device cannot read the memory that receives rows. */
kv_status_t kvw_block_cache_create(const struct kvw_session_setup *setup,
                                   struct kvw_session *store,
                                   enum kvw_replacement_policy policy,
                                   uint32_t n_tokens,
                                   struct kvw_block_cache **ret_cached);
/* Cancels outstanding fetches.  NULL is allowed. */
void kvw_block_cache_destroy(struct kvw_block_cache *cached);

/* Lists a layer's cached blocks for kv_query: ret_n_cached (n_kv_heads) counts, and that many
 * blocks for each head.  Valid until the next call. */
void kvw_block_cache_list(struct kvw_block_cache *cached,
                          uint32_t layer,
                          const uint32_t **ret_n_cached,
                          const struct kv_cached_block **ret_blocks);

/* Returns whether the row's block is cached. */
bool kvw_block_cache_has(const struct kvw_block_cache *cached, uint32_t layer, uint32_t token);

/* Returns the place of a row whose block is cached. */
struct kvw_row_run kvw_block_cache_run(const struct kvw_block_cache *cached,
                                       uint32_t layer,
                                       uint32_t head,
                                       uint32_t token);

/* Counts a selected row for the choice of blocks to cache. */
void kvw_block_cache_note(struct kvw_block_cache *cached, uint32_t layer, uint32_t token);

/* Ends a step of a layer and starts fetches.  `n_rows` rows are in the store for good: only
 * whole blocks of them are fetched. */
kv_status_t
kvw_block_cache_end(struct kvw_block_cache *cached, uint32_t layer, uint32_t n_rows);

/* Drops the rows from `tokens` on, because the session was truncated to them, or replaced by
 * another one of that length.  Waits for outstanding fetches. */
kv_status_t kvw_block_cache_truncate(struct kvw_block_cache *cached, uint32_t tokens);

/* Returns the bytes of the rows that it has room for. */
uint64_t kvw_block_cache_bytes(const struct kvw_block_cache *cached);
uint64_t kvw_block_cache_bytes_fetched(const struct kvw_block_cache *cached);

/* Asserts the invariants. */
void kvw_block_cache_check(const struct kvw_block_cache *cached);

#endif
