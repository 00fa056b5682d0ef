/* let_go.c - rows of sessions that are used leave memory, for those that are needed now.
 *
 * A session whose rows are more than memory is used a layer at a time, in turn, over and over.  Of what
 * is in memory the layer that was used last is needed last, so that one is let go of first, and then the
 * one before it: a cache that lets go of what was used longest ago would have nothing that is needed.
 *
 *     layers   0 1 2 3 4 5 6 7 8 9        last_at is of 6:  5 is let go of, then 4, ... then 7
 *              - - * * * * ^ - - -
 *
 * Only what is on disk goes, and only when the control thread says so: it has nothing that nobody uses,
 * no prefix without a session, and none of a session that rests (control/rest.c). */
#include "kvserver/store/tier/disk_tier_private.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/slice.h"
#include "kvserver/store/rows/arena.h"
#include "kvserver/store/rows/residency.h"

#include <string.h>

enum {
    AGAIN_US = 1000, /* after there was nothing to let go of */
    STUCK_US = 1000000,
    LOOKS = 8, /* between two looks at the clock: each may be a segment's CRC */
};

/* ---- what is preferred -------------------------------------------------------------------- */

static void begin_again(struct kvs_disk_tier *tier)
{
    tier->back = 0;
    tier->to_let_go = NULL;
    tier->has_let_go = tier->is_in_use = tier->is_preferred = false;
    tier->looked_us = 0;
}

void kvs_tier_prefer_none(void *arg)
{
    struct kvs_disk_tier *tier = arg;

    tier->preference++;
    memset(tier->preferred_at, 0, sizeof(tier->preferred_at));
    tier->preferred_bytes = 0;
    tier->lacks_us = 0;
    tier->is_empty = false;
    begin_again(tier);
}

bool kvs_is_preferred(const struct kvs_disk_tier *tier,
                      const struct kvs_saved *saved,
                      uint32_t at)
{
    return saved->preferred == tier->preference && (tier->preferred_at[at / 64] >> at % 64 & 1);
}

void kvs_tier_prefer(void *arg, struct kvs_block *block, uint32_t at)
{
    struct kvs_disk_tier *tier = arg;
    struct kvs_saved *saved = kvs_saved_any(tier, block);
    const struct kvs_segment *segment = &block->segments[at];

    if (kvs_segment_is_away(segment))
        tier->preferred_bytes += kvs_segment_away_bytes(tier->store, segment);
    else if (segment->rows != 0)
        tier->preferred_bytes += kvs_arena_class_bytes(
            tier->store->arena,
            kvs_arena_class_of(tier->store->arena, kvs_block_rows(block, at)));
    if (saved == NULL)
        return; /* it is in memory, and stays there */
    saved->preferred = tier->preference;
    tier->preferred_at[at / 64] |= UINT64_C(1) << at % 64;
    tier->last_at = at;
}

/* ---- what can be let go of ---------------------------------------------------------------- */

static void set_gives(struct kvs_disk_tier *tier, bool gives)
{
    struct kvs_pages *pages = kvs_arena_pages(tier->store->arena);

    if (gives && !tier->gives)
        atomic_fetch_add_explicit(&pages->n_givers, 1, memory_order_relaxed);
    else if (!gives && tier->gives)
        atomic_fetch_sub_explicit(&pages->n_givers, 1, memory_order_relaxed);
    tier->gives = gives;
}

void kvs_saved_is_here(struct kvs_disk_tier *tier, struct kvs_saved *saved)
{
    set_gives(tier, true);
    if (saved->block->n_segments > tier->n_segments_max)
        tier->n_segments_max = saved->block->n_segments;
    if (saved->link_here != NULL)
        return;
    saved->next_here = tier->here;
    saved->link_here = &tier->here;
    if (saved->next_here != NULL)
        saved->next_here->link_here = &saved->next_here;
    tier->here = saved;
}

void kvs_saved_is_away(struct kvs_disk_tier *tier, struct kvs_saved *saved)
{
    if (saved->link_here == NULL)
        return;
    if (tier->to_let_go == saved)
        tier->to_let_go = saved->next_here;
    *saved->link_here = saved->next_here;
    if (saved->next_here != NULL)
        saved->next_here->link_here = saved->link_here;
    saved->link_here = NULL;
    if (tier->here == NULL)
        set_gives(tier, false);
}

/* Lets the rows of one place of a block go.  Returns how many bytes; 0: none. */
static size_t let_one_go(struct kvs_disk_tier *tier, struct kvs_saved *saved)
{
    const uint32_t n = saved->block->n_segments;
    const uint32_t at = (tier->last_at + n - tier->back % n) % n;
    size_t bytes;

    /* What the index has given up may be written to again. */
    if (tier->back >= n || saved->is_doomed || !kvs_segment_is_here(saved->block, at))
        return 0;
    if (kvs_is_preferred(tier, saved, at)) {
        tier->is_preferred = true;
        return 0;
    }
    bytes = kvs_segment_let_go(tier->store, saved->block, at);
    if (bytes == 0 &&
        (saved->block->pins > 0 || tier->store->n_at_unit[at % KVS_WORK_UNITS] > 0))
        tier->is_in_use = true;
    kvs_tier_count(&tier->counts.let_go_bytes, bytes);
    return bytes;
}

/* All places were looked at.  Returns whether there was anything. */
static bool end_round(struct kvs_disk_tier *tier)
{
    const bool has_let_go = tier->has_let_go, is_in_use = tier->is_in_use;
    const bool is_preferred = tier->is_preferred;

    begin_again(tier);
    tier->is_empty = !has_let_go && !is_in_use;
    if (!has_let_go) {
        tier->looked_us = kv_clock_now(tier->clock);
        set_gives(tier, is_in_use || is_preferred);
    }
    return has_let_go;
}

static size_t let_some_go(struct kvs_disk_tier *tier, size_t bytes)
{
    struct kv_slice slice = kv_slice_begin(tier->clock, LOOKS);
    size_t n = 0;

    if (tier->here == NULL ||
        (tier->looked_us != 0 && kv_clock_now(tier->clock) < tier->looked_us + AGAIN_US))
        return 0;
    while (n < bytes && tier->here != NULL && !kv_slice_over(&slice)) {
        struct kvs_saved *saved = tier->to_let_go != NULL ? tier->to_let_go : tier->here;
        const size_t one = let_one_go(tier, saved);

        n += one;
        tier->has_let_go = tier->has_let_go || one > 0;
        tier->to_let_go = saved->next_here;
        if (tier->to_let_go == NULL && ++tier->back >= tier->n_segments_max && !end_round(tier))
            break;
    }
    return n;
}

size_t kvs_let_go(struct kvs_disk_tier *tier, size_t bytes)
{
    const struct kvs_pages *pages = kvs_arena_pages(tier->store->arena);

    return atomic_load_explicit(&pages->is_giving, memory_order_relaxed)
               ? let_some_go(tier, bytes)
               : 0;
}

bool kvs_disk_tier_is_stuck(const struct kvs_disk_tier *tier, uint64_t *ret_need)
{
    const struct kvs_pages *pages = kvs_arena_pages(tier->store->arena);

    *ret_need = tier->preferred_bytes;
    /* preferred_bytes are an upper bound: a request may name a segment twice. */
    return tier->lacks_us != 0 && tier->is_empty &&
           kv_clock_now(tier->clock) >= tier->lacks_us + STUCK_US &&
           atomic_load_explicit(&pages->spare_bytes, memory_order_relaxed) == 0 &&
           !atomic_load_explicit(&pages->spare_soon, memory_order_relaxed);
}

bool kvs_let_go_step(struct kvs_disk_tier *tier)
{
    struct kvs_pages *pages = kvs_arena_pages(tier->store->arena);

    return tier->gives && kvs_pages_are_wanted(pages) && kvs_let_go(tier, KVS_ARENA_PAGE) > 0;
}
