#include "gpu-worker/kvcache/block_policy.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum slot_state {
    SLOT_FREE,
    SLOT_COMING,
    SLOT_HELD,
};

struct slot {
    enum slot_state state;
    uint32_t block;
    uint64_t touched; /* the last step in which it was among the most selected */
    uint32_t n_touched;
};

struct kvw_block_policy {
    enum kvw_replacement_policy policy;
    uint32_t n_blocks, n_slots, k_cache;
    uint64_t step;
    struct slot *slots;   /* (n_slots) */
    uint32_t *slot_of;    /* (n_blocks) */
    uint32_t *n_selected; /* (n_blocks) in this step */
    uint32_t *noted;      /* (n_blocks) blocks with selected rows in this step */
    uint32_t n_noted;
    uint32_t *wanted; /* (k_cache) */
};

kv_status_t kvw_block_policy_create(enum kvw_replacement_policy policy,
                                    uint32_t n_blocks,
                                    uint32_t n_slots,
                                    uint32_t k_cache,
                                    struct kvw_block_policy **ret_cache)
{
    struct kvw_block_policy *cache = calloc(1, sizeof(*cache));

    if (cache == NULL)
        return KV_NO_MEMORY;
    cache->policy = policy;
    cache->n_blocks = n_blocks;
    cache->n_slots = n_slots;
    cache->k_cache = k_cache;
    cache->step = 1;
    cache->slots = calloc(n_slots + 1, sizeof(cache->slots[0]));
    cache->slot_of = malloc((n_blocks + 1) * sizeof(cache->slot_of[0]));
    cache->n_selected = calloc(n_blocks + 1, sizeof(cache->n_selected[0]));
    cache->noted = calloc(n_blocks + 1, sizeof(cache->noted[0]));
    cache->wanted = calloc(k_cache + 1, sizeof(cache->wanted[0]));
    if (cache->slots == NULL || cache->slot_of == NULL || cache->n_selected == NULL ||
        cache->noted == NULL || cache->wanted == NULL) {
        kvw_block_policy_destroy(cache);
        return KV_NO_MEMORY;
    }
    memset(cache->slot_of, 0xff, (n_blocks + 1) * sizeof(cache->slot_of[0]));
    *ret_cache = cache;
    return KV_OK;
}

void kvw_block_policy_destroy(struct kvw_block_policy *cache)
{
    if (cache == NULL)
        return;
    free(cache->slots);
    free(cache->slot_of);
    free(cache->n_selected);
    free(cache->noted);
    free(cache->wanted);
    free(cache);
}

uint32_t kvw_block_policy_slot(const struct kvw_block_policy *cache, uint32_t block)
{
    const uint32_t slot = cache->slot_of[block];

    return slot != KVW_BLOCK_NO_SLOT && cache->slots[slot].state == SLOT_HELD
               ? slot
               : KVW_BLOCK_NO_SLOT;
}

void kvw_block_policy_note(struct kvw_block_policy *cache, uint32_t block)
{
    assert(block < cache->n_blocks);
    if (cache->n_selected[block]++ == 0)
        cache->noted[cache->n_noted++] = block;
}

/* Orders noted blocks: does one come before the other? */
static bool comes_before(const struct kvw_block_policy *cache, uint32_t a, uint32_t b)
{
    return cache->n_selected[a] != cache->n_selected[b]
               ? cache->n_selected[a] > cache->n_selected[b]
               : a < b;
}

uint32_t kvw_block_policy_end(struct kvw_block_policy *cache,
                              uint32_t n_complete,
                              const uint32_t **ret_wanted)
{
    uint32_t n_top = 0, n_wanted = 0;

    /* The blocks with the most selected rows, in order; few, so they are inserted one by
     * one. */
    for (uint32_t i = 0; i < cache->n_noted; i++) {
        const uint32_t block = cache->noted[i];
        uint32_t at = n_top;

        if (block >= n_complete)
            continue;
        while (at > 0 && comes_before(cache, block, cache->wanted[at - 1]))
            at--;
        if (at == cache->k_cache)
            continue;
        if (n_top < cache->k_cache)
            n_top++;
        memmove(&cache->wanted[at + 1], &cache->wanted[at],
                (n_top - at - 1) * sizeof(cache->wanted[0]));
        cache->wanted[at] = block;
    }
    for (uint32_t i = 0; i < cache->n_noted; i++)
        cache->n_selected[cache->noted[i]] = 0;
    cache->n_noted = 0;
    cache->step++;
    for (uint32_t i = 0; i < n_top; i++) {
        const uint32_t slot = cache->slot_of[cache->wanted[i]];

        if (slot == KVW_BLOCK_NO_SLOT) {
            cache->wanted[n_wanted++] = cache->wanted[i];
        } else {
            cache->slots[slot].touched = cache->step;
            cache->slots[slot].n_touched++;
        }
    }
    *ret_wanted = cache->wanted;
    return n_wanted;
}

/* Is a evicted before b? */
static bool
goes_before(const struct kvw_block_policy *cache, const struct slot *a, const struct slot *b)
{
    if (cache->policy == KVW_BLOCKS_LFU && a->n_touched != b->n_touched)
        return a->n_touched < b->n_touched;
    return a->touched < b->touched;
}

uint32_t kvw_block_policy_admit(struct kvw_block_policy *cache, uint32_t block)
{
    struct slot *best = NULL;

    assert(cache->slot_of[block] == KVW_BLOCK_NO_SLOT);
    for (uint32_t i = 0; i < cache->n_slots; i++) {
        struct slot *slot = &cache->slots[i];

        if (slot->state == SLOT_FREE) {
            best = slot;
            break;
        }
        if (slot->state == SLOT_HELD && slot->touched != cache->step &&
            (best == NULL || goes_before(cache, slot, best)))
            best = slot;
    }
    if (best == NULL)
        return KVW_BLOCK_NO_SLOT;
    if (best->state == SLOT_HELD)
        cache->slot_of[best->block] = KVW_BLOCK_NO_SLOT;
    *best = (struct slot){
        .state = SLOT_COMING, .block = block, .touched = cache->step, .n_touched = 1};
    cache->slot_of[block] = (uint32_t)(best - cache->slots);
    return cache->slot_of[block];
}

void kvw_block_policy_landed(struct kvw_block_policy *cache, uint32_t slot)
{
    assert(cache->slots[slot].state == SLOT_COMING);
    cache->slots[slot].state = SLOT_HELD;
}

void kvw_block_policy_drop(struct kvw_block_policy *cache, uint32_t block)
{
    for (uint32_t i = 0; i < cache->n_slots; i++) {
        struct slot *slot = &cache->slots[i];

        if (slot->state == SLOT_FREE || slot->block < block)
            continue;
        assert(slot->state == SLOT_HELD);
        slot->state = SLOT_FREE;
        cache->slot_of[slot->block] = KVW_BLOCK_NO_SLOT;
    }
}

bool kvw_block_policy_is_coming(const struct kvw_block_policy *cache,
                                uint32_t slot,
                                uint32_t block)
{
    return cache->slots[slot].state == SLOT_COMING && cache->slots[slot].block == block;
}

void kvw_block_policy_check(const struct kvw_block_policy *cache)
{
    uint32_t n_used = 0, n_selected = 0;

    for (uint32_t i = 0; i < cache->n_slots; i++) {
        const struct slot *slot = &cache->slots[i];

        assert(slot->touched <= cache->step);
        if (slot->state == SLOT_FREE)
            continue;
        n_used++;
        assert(slot->block < cache->n_blocks && cache->slot_of[slot->block] == i);
    }
    for (uint32_t block = 0; block < cache->n_blocks; block++) {
        n_used -= cache->slot_of[block] != KVW_BLOCK_NO_SLOT;
        n_selected += cache->n_selected[block] > 0;
    }
    assert(n_used == 0);
    assert(n_selected == cache->n_noted);
    for (uint32_t i = 0; i < cache->n_noted; i++)
        assert(cache->noted[i] < cache->n_blocks && cache->n_selected[cache->noted[i]] > 0);
}
