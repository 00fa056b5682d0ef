/* block_policy.h - which blocks of a layer a worker keeps beside its device (PQCache,
 * section 3.4): which to hold, not the rows.
 *
 *   step:   kvw_block_policy_note()   for every chosen row, of a cached block or not
 *           kvw_block_policy_end()    the blocks with the most chosen rows are touched, or wanted
 *           then, for each wanted   kvw_block_policy_admit() gives it a slot, in place of another
 *                                   kvw_block_policy_landed() when its rows are there
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

enum kvw_replacement_policy {
    KVW_BLOCKS_LRU, /* the block that was among the most chosen the longest ago goes */
    KVW_BLOCKS_LFU, /* the one that was the fewest times, of equals the older */
};

#define KVW_BLOCK_NO_SLOT UINT32_MAX

struct kvw_block_policy;

/* For blocks 0..n_blocks - 1, n_slots of them at once; k_cache blocks are looked at per step.
 */
kv_status_t kvw_block_policy_create(enum kvw_replacement_policy policy,
                                    uint32_t n_blocks,
                                    uint32_t n_slots,
                                    uint32_t k_cache,
                                    struct kvw_block_policy **ret_cache);
void kvw_block_policy_destroy(struct kvw_block_policy *cache); /* NULL is allowed */

/* Where the block is held; KVW_BLOCK_NO_SLOT: it is not. */
uint32_t kvw_block_policy_slot(const struct kvw_block_policy *cache, uint32_t block);

/* A row of the block was chosen in this step. */
void kvw_block_policy_note(struct kvw_block_policy *cache, uint32_t block);

/* Ends the step.  Returns how many blocks, of those below n_complete, are wanted and neither
 * held nor under way: the most chosen first.
 *   ret_wanted  (k_cache) lent until the next call */
uint32_t kvw_block_policy_end(struct kvw_block_policy *cache,
                              uint32_t n_complete,
                              const uint32_t **ret_wanted);

/* A slot for the block, which is under way from now on; what was held there is not any more.
 * KVW_BLOCK_NO_SLOT: all slots are held by blocks of this step, or under way. */
uint32_t kvw_block_policy_admit(struct kvw_block_policy *cache, uint32_t block);
void kvw_block_policy_landed(struct kvw_block_policy *cache, uint32_t slot);

/* Drops all blocks from `block` on, none of which is under way. */
void kvw_block_policy_drop(struct kvw_block_policy *cache, uint32_t block);

#endif
