/* block_policy.h - chooses which blocks of a layer a worker caches (PQCache, section 3.4).  It
 * holds block numbers, not rows.
 *
 *   step:   kvw_block_policy_note()   for every selected row, cached or not
 *           kvw_block_policy_end()    of the blocks with the most selected rows, cached ones are
 *                                     touched and the others are wanted
 *           then, for each wanted     kvw_block_policy_admit() gives it a slot, replacing another
 *                                     kvw_block_policy_landed() when its rows have arrived
 *
 * Only complete blocks are wanted.  A block is cached from landed() until it is replaced or
 * dropped.
 *
 * Invariants, which kvw_block_policy_check() asserts:
 *   (1) A block, cached or being fetched, and its slot name each other.
 *   (2) The blocks with selected rows in this step are noted, each once, and no others.
 *   (3) A slot was touched in this step or before.
 *
 * Threads: one at a time.  Memory: create/destroy.
 */
#ifndef KV_GPU_WORKER_KVCACHE_BLOCK_POLICY_H
#define KV_GPU_WORKER_KVCACHE_BLOCK_POLICY_H

#include "proto/kv_status.h"

#include <stdbool.h>
#include <stdint.h>

enum kvw_replacement_policy {
    KVW_BLOCKS_LRU, /* evicts the block that was touched the longest ago */
    KVW_BLOCKS_LFU, /* evicts the block touched the fewest times; ties: the longest ago */
};

#define KVW_BLOCK_NO_SLOT UINT32_MAX

struct kvw_block_policy;

/* Creates a policy for blocks 0..n_blocks - 1 and n_slots slots.  A step touches or wants at
 * most k_cache blocks. */
kv_status_t kvw_block_policy_create(enum kvw_replacement_policy policy,
                                    uint32_t n_blocks,
                                    uint32_t n_slots,
                                    uint32_t k_cache,
                                    struct kvw_block_policy **ret_cache);
void kvw_block_policy_destroy(struct kvw_block_policy *cache); /* NULL is allowed */

/* Returns the block's slot; KVW_BLOCK_NO_SLOT: not cached. */
uint32_t kvw_block_policy_slot(const struct kvw_block_policy *cache, uint32_t block);

/* Counts a row of the block that was selected in this step. */
void kvw_block_policy_note(struct kvw_block_policy *cache, uint32_t block);

/* Ends the step.  Returns the number of blocks below n_complete that are wanted and neither
 * cached nor being fetched, those with the most selected rows first.
 *   ret_wanted  (k_cache) valid until the next call */
uint32_t kvw_block_policy_end(struct kvw_block_policy *cache,
                              uint32_t n_complete,
                              const uint32_t **ret_wanted);

/* Returns a slot for the block, which counts as being fetched from now on; the block that was
 * there is evicted.  KVW_BLOCK_NO_SLOT: all slots hold blocks of this step or are being
 * filled. */
uint32_t kvw_block_policy_admit(struct kvw_block_policy *cache, uint32_t block);
void kvw_block_policy_landed(struct kvw_block_policy *cache, uint32_t slot);

/* Drops all blocks from `block` on; none of them may be in a fetch. */
void kvw_block_policy_drop(struct kvw_block_policy *cache, uint32_t block);

/* Returns whether the block is being fetched into the slot. */
bool kvw_block_policy_is_coming(const struct kvw_block_policy *cache,
                                uint32_t slot,
                                uint32_t block);

/* Asserts the invariants. */
void kvw_block_policy_check(const struct kvw_block_policy *cache);

#endif
