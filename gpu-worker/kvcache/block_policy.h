/* block_policy.h - which blocks of a layer a worker keeps beside its device (PQCache,
 * section 3.4): which to hold, not the rows.
 *
 *   step:   kv_block_cache_note()   for every chosen row, of a held block or not
 *           kv_block_cache_end()    the blocks with the most chosen rows are touched, or wanted
 *           then, for each wanted   kv_block_cache_admit() gives it a slot, in place of another
 *                                   kv_block_cache_landed() when its rows are there
 *
 * Only complete blocks are wanted.  A block is held from landed() until it is replaced or
 * dropped.
 *
 * Threads: one at a time.  Memory: create/destroy.
 */
#ifndef KV_GPU_WORKER_KVCACHE_BLOCK_POLICY_H
#define KV_GPU_WORKER_KVCACHE_BLOCK_POLICY_H

#include "proto/kv_status.h"

#include <stdbool.h>
#include <stdint.h>

enum kv_block_policy {
    KV_BLOCKS_LRU, /* the block that was among the most chosen the longest ago goes */
    KV_BLOCKS_LFU, /* the one that was the fewest times, of equals the older */
};

#define KV_BLOCK_NO_SLOT UINT32_MAX

struct kv_block_cache;

/* For blocks 0..n_blocks - 1, n_slots of them at once; k_cache blocks are looked at per step.
 */
kv_status_t kv_block_cache_create(enum kv_block_policy policy,
                                  uint32_t n_blocks,
                                  uint32_t n_slots,
                                  uint32_t k_cache,
                                  struct kv_block_cache **ret_cache);
void kv_block_cache_destroy(struct kv_block_cache *cache); /* NULL is allowed */

/* Where the block is held; KV_BLOCK_NO_SLOT: it is not. */
uint32_t kv_block_cache_slot(const struct kv_block_cache *cache, uint32_t block);

/* A row of the block was chosen in this step. */
void kv_block_cache_note(struct kv_block_cache *cache, uint32_t block);

/* Ends the step.  Returns how many blocks, of those below n_complete, are wanted and neither
 * held nor under way: the most chosen first.
 *   ret_wanted  (k_cache) lent until the next call */
uint32_t kv_block_cache_end(struct kv_block_cache *cache,
                            uint32_t n_complete,
                            const uint32_t **ret_wanted);

/* A slot for the block, which is under way from now on; what was held there is not any more.
 * KV_BLOCK_NO_SLOT: all slots are held by blocks of this step, or under way. */
uint32_t kv_block_cache_admit(struct kv_block_cache *cache, uint32_t block);
void kv_block_cache_landed(struct kv_block_cache *cache, uint32_t slot);

/* Drops all blocks from `block` on, none of which is under way. */
void kv_block_cache_drop(struct kv_block_cache *cache, uint32_t block);

#endif
