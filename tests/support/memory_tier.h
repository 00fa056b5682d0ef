/* memory_tier.h - a tier that keeps copies of blocks until a test brings them back.
 *
 * Threads: one.  Memory: copies are freed when their blocks are back, or freed.
 */
#ifndef KV_TESTS_SUPPORT_MEMORY_TIER_H
#define KV_TESTS_SUPPORT_MEMORY_TIER_H

#include "kvserver/store/rows/residency.h"

#include <stdlib.h>
#include <string.h>

/* A segment of a block that is absent. */
struct memory_kept {
    struct memory_kept *next;
    struct kvs_block *block;
    uint32_t at;
    struct kvs_segment_image image; /* its pointers are copies */
};

struct memory_tier {
    struct kvs_segment_store *store;
    struct memory_kept *kept;
    uint32_t n_asked; /* loads, so far */
    bool is_full;     /* keeps nothing */
};

static inline void *memory_tier_copy(const void *from, size_t bytes)
{
    void *to = from != NULL ? malloc(bytes) : NULL;

    if (to != NULL)
        memcpy(to, from, bytes);
    return to;
}

static inline bool memory_tier_keep(void *arg, const struct kvs_block *block)
{
    struct memory_tier *tier = arg;
    struct kvs_segment_image image;

    if (tier->is_full)
        return false;
    for (uint32_t at = 0; at < block->n_segments; at++) {
        if (!kvs_block_image(tier->store, block, at, &image))
            continue;
        struct memory_kept *kept = malloc(sizeof(*kept));
        if (kept == NULL)
            abort();
        image.rows = memory_tier_copy(image.rows, image.rows_bytes);
        image.crcs = memory_tier_copy(image.crcs, KV_BLOCK_TOKENS * sizeof(uint32_t));
        image.codes = memory_tier_copy(image.codes, image.codes_bytes);
        *kept = (struct memory_kept){tier->kept, (struct kvs_block *)block, at, image};
        tier->kept = kept;
    }
    return true;
}

static inline void memory_tier_load(void *arg, struct kvs_block *block)
{
    struct memory_tier *tier = arg;

    (void)block;
    tier->n_asked++;
}

static inline void memory_tier_forget(void *arg, const struct kvs_block *block)
{
    struct memory_tier *tier = arg;

    for (struct memory_kept **link = &tier->kept, *kept; (kept = *link) != NULL;) {
        if (kept->block != block) {
            link = &kept->next;
            continue;
        }
        *link = kept->next;
        free((void *)kept->image.rows);
        free((void *)kept->image.crcs);
        free((void *)kept->image.codes);
        free(kept);
    }
}

static inline void memory_tier_init(struct memory_tier *tier, struct kvs_segment_store *store)
{
    static const struct kvs_tier ops = {
        .keep = memory_tier_keep, .load = memory_tier_load, .forget = memory_tier_forget};

    *tier = (struct memory_tier){.store = store};
    kvs_residency_set_tier(store, &ops, tier);
}

/* Returns what it has of a segment, or NULL. */
static inline struct kvs_segment_image *
memory_tier_find(struct memory_tier *tier, const struct kvs_block *block, uint32_t at)
{
    for (struct memory_kept *kept = tier->kept; kept != NULL; kept = kept->next)
        if (kept->block == block && kept->at == at)
            return &kept->image;
    return NULL;
}

/* Brings a block back that was asked for, without what is kept no longer.  Returns false if there
 * is no memory. */
static inline bool memory_tier_bring_back(struct memory_tier *tier, struct kvs_block *block)
{
    for (uint32_t at = 0; at < block->n_segments; at++)
        if (kvs_segment_is_away(&block->segments[at]) &&
            !kvs_block_restore(tier->store, block, at, memory_tier_find(tier, block, at)))
            return false;
    memory_tier_forget(tier, block);
    kvs_block_restored(tier->store, block);
    return true;
}

/* Brings all back that was asked for. */
static inline void memory_tier_bring_back_all(struct memory_tier *tier)
{
    for (struct memory_kept *kept = tier->kept; kept != NULL;) {
        struct kvs_block *block = kept->block;

        kept = kept->next;
        if (block->residency != KVS_PARTLY)
            continue;
        if (!memory_tier_bring_back(tier, block))
            abort();
        kept = tier->kept;
    }
}

#endif
