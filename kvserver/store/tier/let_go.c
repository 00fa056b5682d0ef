/* let_go.c - rows of sessions that are used leave memory, for those that are needed now.
 *
 * A query needs the rows of few blocks, and the next one of the same unit nearly the same.  So rows that
 * are idle (rows/residency.h) go first, wherever they are.  If what is left fits, little comes and goes.
 *
 * If it does not, a session is used a layer at a time, in turn, over and over.  Of what is in memory the
 * layer that was used last is needed last, so that one is let go of first, and then the one before it: a
 * cache that lets go of what was used longest ago would have nothing that is needed.
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
    LOOKS = 8,            /* between two looks at the clock: each may be a segment's CRC */
    MOVE_LOOKS = 2,       /* the same, of rows that move */
    MOVE_AGAIN_US = 5000, /* after somebody used some in each page */
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
    if (tier->idle == saved)
        tier->idle = saved->next_here;
    *saved->link_here = saved->next_here;
    if (saved->next_here != NULL)
        saved->next_here->link_here = saved->link_here;
    saved->link_here = NULL;
    if (tier->here == NULL)
        set_gives(tier, false);
}

/* Lets the rows of one place of a block go.  Returns how many bytes; 0: none. */
static size_t let_one_go(struct kvs_disk_tier *tier, struct kvs_saved *saved, uint32_t at)
{
    size_t bytes;

    /* It may stay after all. */
    if (saved->block->residency == KVS_LEAVING)
        tier->is_in_use = true;
    /* What the index has given up may be written to again. */
    if (saved->is_doomed || !kvs_segment_is_here(saved->block, at))
        return 0;
    if (kvs_is_preferred(tier, saved, at)) {
        tier->is_preferred = true;
        return 0;
    }
    const uint8_t *rows = kvs_block_rows(saved->block, at);
    const int class_id = rows != NULL ? kvs_arena_class_of(tier->store->arena, rows) : -1;

    bytes = kvs_segment_let_go(tier->store, saved->block, at);
    if (bytes > 0)
        tier->page_class = class_id;
    if (bytes == 0 &&
        (saved->block->pins > 0 || tier->store->n_at_unit[at % KVS_WORK_UNITS] > 0))
        tier->is_in_use = true;
    kvs_tier_count(&tier->counts.let_go_bytes, bytes);
    return bytes;
}

/* Lets idle rows go, on from where it was.  If all places were looked at and none had any, they are
 * looked at again when half of them are in another pass. */
static size_t let_idle_go(struct kvs_disk_tier *tier, size_t bytes, struct kv_slice *slice)
{
    const struct kvs_segment_store *store = tier->store;
    size_t n = 0;

    if (tier->n_idle_places >= tier->n_segments_max) {
        if (store->n_passes < tier->idle_passes + tier->n_segments_max / 2 + 1)
            return 0;
        tier->n_idle_places = 0;
    }
    while (n < bytes && tier->here != NULL && tier->n_idle_places < tier->n_segments_max &&
           !kv_slice_over(slice)) {
        struct kvs_saved *saved = tier->idle != NULL ? tier->idle : tier->here;
        const uint32_t at = tier->idle_at;

        if (at < saved->block->n_segments && kvs_segment_is_idle(store, saved->block, at)) {
            const size_t one = let_one_go(tier, saved, at);

            n += one;
            if (one > 0)
                tier->n_idle_places = 0;
        }
        tier->idle = saved->next_here;
        if (tier->idle == NULL) {
            tier->idle_at = (at + 1) % tier->n_segments_max;
            tier->n_idle_places++;
        }
    }
    tier->idle_passes = store->n_passes;
    return n;
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
        /* What was let go of before may be made whole pages after the pause. */
        set_gives(tier, is_in_use || is_preferred || tier->moved_us != 0);
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
    n = let_idle_go(tier, bytes, &slice);
    while (n < bytes && tier->here != NULL && !kv_slice_over(&slice)) {
        struct kvs_saved *saved = tier->to_let_go != NULL ? tier->to_let_go : tier->here;
        const uint32_t n_places = saved->block->n_segments;
        const uint32_t at = (tier->last_at + n_places - tier->back % n_places) % n_places;
        const size_t one = tier->back < n_places ? let_one_go(tier, saved, at) : 0;

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

bool kvs_lets_go(const struct kvs_disk_tier *tier)
{
    const struct kvs_pages *pages = kvs_arena_pages(tier->store->arena);

    return tier->gives && tier->looked_us == 0 &&
           atomic_load_explicit(&pages->is_giving, memory_order_relaxed);
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

bool kvs_condense(struct kvs_disk_tier *tier)
{
    struct kvs_arena *arena = tier->store->arena;
    struct kv_slice slice = kv_slice_begin(tier->clock, MOVE_LOOKS);
    void *owner, *rows;

    if (tier->page_class < 0 ||
        (tier->moved_us != 0 && kv_clock_now(tier->clock) < tier->moved_us + MOVE_AGAIN_US))
        return false;
    tier->moved_us = 0;
    if (tier->page == KVS_PAGE_NONE) {
        tier->page = tier->n_skipped <= KVS_ARENA_SKIPPED_MAX
                         ? kvs_arena_sparsest(arena, tier->page_class, tier->n_skipped)
                         : KVS_PAGE_NONE;
        tier->move_at = 0;
    }
    if (tier->page == KVS_PAGE_NONE) {
        tier->moved_us = tier->n_skipped > 0 ? kv_clock_now(tier->clock) : 0;
        tier->n_skipped = 0;
        return false;
    }
    while ((rows = kvs_arena_next_owned(arena, tier->page, &tier->move_at, &owner)) != NULL &&
           kvs_block_move_rows(tier->store, owner, rows, tier->page)) {
        kvs_tier_count(&tier->counts.moved_bytes,
                       kvs_arena_class_bytes(arena, tier->page_class));
        if (kv_slice_over(&slice))
            return true;
    }
    /* It is free now, or there is something in it that does not move: then there are so many fewer pages
     * to look at before a pause.  Two such pages would exchange their rows for ever, and no row would be
     * let go of meanwhile. */
    if (kvs_arena_has_page(arena, tier->page))
        tier->n_skipped++;
    tier->page = KVS_PAGE_NONE;
    return true;
}

bool kvs_let_go_step(struct kvs_disk_tier *tier)
{
    struct kvs_pages *pages = kvs_arena_pages(tier->store->arena);

    if (!tier->gives || !kvs_pages_are_wanted(pages)) {
        tier->page = KVS_PAGE_NONE;
        return false;
    }
    return kvs_condense(tier) || kvs_let_go(tier, KVS_ARENA_PAGE) > 0;
}
