#include "tests/sim/tier_sim.h"

#include "kvserver/store/node_private.h"
#include "kvserver/store/rows/residency.h"

#include <stdlib.h>
#include <string.h>

enum {
    LEAVE_ONE_IN = 6, /* steps, in which some blocks are to leave */
    LEAVE_MOST = 8,
    RETRY_US = 1000, /* after a failure for lack of memory */
    LOST_ONE_IN = 100,
};

/* A copy of a segment. */
struct segment {
    void *rows, *crcs, *codes;
    size_t rows_bytes, codes_bytes;
    bool is_lost;
};

/* A block that is absent. */
struct kept {
    struct kept *next;
    const struct kvs_block *block;
    struct segment *segments; /* (n) */
    uint32_t n;
    struct kvs_block *asked; /* for: the same block; NULL: nobody has */
    uint64_t due_us;
};

/* Of a data thread. */
struct shelf {
    struct tier_sim *tier;
    struct kvs_shard *shard;
    struct kept *kept;
    uint64_t now_us;
};

struct tier_sim {
    struct kv_random random;
    bool loses;
    struct tier_sim_counts counts;
    uint32_t n;
    struct shelf shelves[];
};

static bool one_in(struct tier_sim *tier, uint64_t n)
{
    return kv_random_below(&tier->random, n) == 0;
}

/* ---- what a node calls -------------------------------------------------------------------- */

static void kept_free(struct kept *kept)
{
    for (uint32_t i = 0; i < kept->n; i++) {
        free(kept->segments[i].rows);
        free(kept->segments[i].crcs);
        free(kept->segments[i].codes);
    }
    free(kept->segments);
    free(kept);
}

static bool copy(void **to, const void *from, size_t bytes)
{
    *to = malloc(bytes);
    if (*to != NULL)
        memcpy(*to, from, bytes);
    return *to != NULL;
}

static bool segment_copy(const struct shelf *shelf,
                         const struct kvs_block *block,
                         uint32_t at,
                         struct segment *to)
{
    struct kvs_segment_image image;

    if (!kvs_block_image(&shelf->shard->store, block, at, &image))
        return true;
    to->rows_bytes = image.rows_bytes;
    to->codes_bytes = image.codes_bytes;
    return copy(&to->rows, image.rows, image.rows_bytes) &&
           copy(&to->crcs, image.crcs, KV_BLOCK_TOKENS * sizeof(uint32_t)) &&
           (image.codes == NULL || copy(&to->codes, image.codes, image.codes_bytes));
}

static bool keep(void *arg, const struct kvs_block *block)
{
    struct shelf *shelf = arg;
    struct kept *kept = calloc(1, sizeof(*kept));
    bool is_good = kept != NULL;

    if (!is_good)
        return false;
    kept->segments = calloc(block->n_segments, sizeof(*kept->segments));
    kept->n = kept->segments != NULL ? block->n_segments : 0;
    is_good = kept->segments != NULL;
    for (uint32_t at = 0; at < kept->n && is_good; at++)
        is_good = segment_copy(shelf, block, at, &kept->segments[at]);
    if (!is_good) {
        kept_free(kept);
        return false;
    }
    kept->block = block;
    kept->next = shelf->kept;
    shelf->kept = kept;
    shelf->tier->counts.n_left++;
    return true;
}

static struct kept **find(struct shelf *shelf, const struct kvs_block *block)
{
    struct kept **link = &shelf->kept;

    while (*link != NULL && (*link)->block != block)
        link = &(*link)->next;
    if (*link == NULL)
        abort();
    return link;
}

/* Mostly soon; now and then later than any deadline. */
static uint64_t draw_delay(struct tier_sim *tier)
{
    const uint64_t most_us = one_in(tier, 500) ? 8000000 : one_in(tier, 20) ? 100000 : 3000;

    return kv_random_below(&tier->random, most_us);
}

static void flip(struct tier_sim *tier, void *bytes, size_t n_bytes)
{
    ((uint8_t *)bytes)[kv_random_below(&tier->random, n_bytes)] ^=
        (uint8_t)(1 << kv_random_below(&tier->random, 8));
}

/* Damages a segment, or loses it. */
static void spoil(struct tier_sim *tier, struct segment *segment)
{
    tier->counts.n_lost++;
    switch (kv_random_below(&tier->random, 5)) {
    case 0:
        flip(tier, segment->rows, segment->rows_bytes);
        break;
    case 1:
        flip(tier, segment->crcs, KV_BLOCK_TOKENS * sizeof(uint32_t));
        break;
    case 2:
        if (segment->codes != NULL)
            flip(tier, segment->codes, segment->codes_bytes);
        break;
    case 3:
        segment->rows_bytes /= 2;
        break;
    default:
        segment->is_lost = true;
    }
}

static void load(void *arg, struct kvs_block *block)
{
    struct shelf *shelf = arg;
    struct kept *kept = *find(shelf, block);

    if (kept->asked != NULL)
        abort();
    kept->asked = block;
    kept->due_us = shelf->now_us + draw_delay(shelf->tier);
    for (uint32_t at = 0; shelf->tier->loses && at < kept->n; at++)
        if (kept->segments[at].rows != NULL && one_in(shelf->tier, LOST_ONE_IN))
            spoil(shelf->tier, &kept->segments[at]);
}

static void forget(void *arg, const struct kvs_block *block)
{
    struct kept **link = find(arg, block), *kept = *link;

    *link = kept->next;
    kept_free(kept);
}

static const struct kvs_tier tier_ops = {.keep = keep, .load = load, .forget = forget};

/* ---- coming back -------------------------------------------------------------------------- */

/* Returns false if there is no memory for all: the others are tried again. */
static bool bring_back(struct shelf *shelf, struct kept **link)
{
    struct kvs_segment_store *store = &shelf->shard->store;
    struct kept *kept = *link;

    for (uint32_t at = 0; at < kept->n; at++) {
        const struct segment *segment = &kept->segments[at];

        if (!kvs_segment_is_away(&kept->asked->segments[at]))
            continue;
        const struct kvs_segment_image image = {.rows = segment->rows,
                                                .rows_bytes = segment->rows_bytes,
                                                .crcs = segment->crcs,
                                                .codes = segment->codes,
                                                .codes_bytes = segment->codes_bytes};
        if (!kvs_block_restore(store, kept->asked, at, segment->is_lost ? NULL : &image))
            return false;
    }
    *link = kept->next;
    kvs_block_restored(store, kept->asked);
    shelf->tier->counts.n_returned++;
    kept_free(kept);
    return true;
}

void tier_sim_bring_back(struct tier_sim *tier)
{
    for (uint32_t i = 0; i < tier->n; i++) {
        struct shelf *shelf = &tier->shelves[i];

        for (struct kept **link = &shelf->kept; *link != NULL;) {
            if ((*link)->asked == NULL)
                (void)kvs_block_need(&shelf->shard->store, (struct kvs_block *)(*link)->block);
            if (!bring_back(shelf, link))
                link = &(*link)->next;
        }
    }
}

/* ---- steps -------------------------------------------------------------------------------- */

/* Some blocks of any session, or of those under them. */
static void let_leave(struct shelf *shelf)
{
    struct kv_random *random = &shelf->tier->random;
    struct kvs_shard *shard = shelf->shard;
    const uint32_t first = (uint32_t)kv_random_below(random, shard->n_sessions);

    for (uint32_t i = 0; i < shard->n_sessions; i++) {
        const struct kvs_shard_session *session =
            &shard->sessions[(first + i) % shard->n_sessions];

        if (session->blocks.n == 0)
            continue;
        for (uint64_t n = 1 + kv_random_below(random, LEAVE_MOST); n > 0; n--) {
            struct kvs_block *block =
                session->blocks.list[kv_random_below(random, session->blocks.n)];

            while (block->under != NULL && kv_random_below(random, 2) == 0)
                block = block->under;
            if (block->residency == KVS_IN_MEMORY) /* or it is on its way back */
                (void)kvs_block_leave(&shard->store, block);
        }
        return;
    }
}

void tier_sim_step(struct tier_sim *tier, unsigned thread, uint64_t now_us, bool is_calm)
{
    struct shelf *shelf = &tier->shelves[thread];

    shelf->now_us = now_us;
    if (!is_calm && one_in(tier, LEAVE_ONE_IN))
        let_leave(shelf);
    for (struct kept **link = &shelf->kept; *link != NULL;) {
        if ((*link)->asked != NULL && (*link)->due_us <= now_us) {
            if (bring_back(shelf, link))
                continue;
            (*link)->due_us = now_us + RETRY_US;
        }
        link = &(*link)->next;
    }
}

struct tier_sim *tier_sim_create(struct kvs_node *node, uint64_t seed, bool loses)
{
    struct tier_sim *tier =
        calloc(1, sizeof(*tier) + node->n_threads * sizeof(tier->shelves[0]));

    if (tier == NULL)
        abort();
    kv_random_init(&tier->random, seed);
    tier->loses = loses;
    tier->n = node->n_threads;
    for (uint32_t i = 0; i < tier->n; i++) {
        tier->shelves[i] = (struct shelf){.tier = tier, .shard = &node->shard[i]};
        kvs_residency_set_tier(&node->shard[i].store, &tier_ops, &tier->shelves[i]);
    }
    return tier;
}

void tier_sim_destroy(struct tier_sim *tier)
{
    for (uint32_t i = 0; tier != NULL && i < tier->n; i++)
        for (struct kept *kept = tier->shelves[i].kept, *next; kept != NULL; kept = next) {
            next = kept->next;
            kept_free(kept);
        }
    free(tier);
}

void tier_sim_get_counts(const struct tier_sim *tier, struct tier_sim_counts *ret_counts)
{
    *ret_counts = tier->counts;
}
