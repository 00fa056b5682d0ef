#include "kvserver/cluster/placement.h"

#include <assert.h>
#include <string.h>

enum {
    LOG_BITS = 56,      /* of the fraction of a logarithm */
    BRANCH_BLOCKS = 16, /* a prompt's branch depends on so many of its blocks at most */
};

/* Returns -log2(hash / 2^64), rounded, with LOG_BITS bits behind the point: from 0 to 64. */
static uint64_t minus_log2(uint64_t hash)
{
    const unsigned zeros = (unsigned)__builtin_clzll(hash | 1);
    uint64_t x = (hash | 1) << zeros; /* from 1 to 2, with 63 bits behind the point */
    uint64_t fraction = 0;

    /* Squaring doubles the logarithm: one bit at a time moves in front of the point. */
    for (unsigned i = 0; i < LOG_BITS; i++) {
        const unsigned __int128 square = (unsigned __int128)x * x;
        const bool is_two = square >> 127 != 0;

        x = (uint64_t)(square >> (is_two ? 64 : 63));
        fraction = fraction << 1 | is_two;
    }
    return ((uint64_t)(zeros + 1) << LOG_BITS) - fraction;
}

/* A member's claim to a position. */
struct claim {
    const struct kv_member *member;
    uint64_t hash;
};

/* Whether a claim is better: -log2(hash) / weight is smaller.  Equal weights need no logarithm,
 * and most others neither. */
static bool is_better(const struct claim *claim, const struct claim *best)
{
    const uint64_t weight = claim->member->weight, best_weight = best->member->weight;
    unsigned __int128 left, right;

    if (weight <= best_weight && claim->hash <= best->hash)
        return false;
    if (weight >= best_weight && claim->hash >= best->hash)
        return true;
    left = (unsigned __int128)minus_log2(claim->hash) * best_weight;
    right = (unsigned __int128)minus_log2(best->hash) * weight;
    return left != right ? left < right : claim->member->id < best->member->id;
}

static bool has_node(const struct kv_placement_row *row, uint32_t node)
{
    for (uint32_t i = 0; i < row->n_nodes; i++)
        if (row->nodes[i] == node)
            return true;
    return false;
}

/* Returns the member for the position after those that the row has. */
static uint32_t
choose(const struct kv_members *map, uint32_t slot, const struct kv_placement_row *row)
{
    const uint64_t key = kv_mix64((uint64_t)slot * KV_ROW_NODES + row->n_nodes + 1);
    struct claim best = {0};

    for (uint32_t i = 0; i < map->n_members; i++) {
        const struct claim claim = {&map->members[i], kv_mix64(key ^ map->members[i].id)};

        if ((best.member == NULL || is_better(&claim, &best)) && !has_node(row, i))
            best = claim;
    }
    return (uint32_t)(best.member - map->members);
}

void kv_placement_row(const struct kv_members *map,
                      uint32_t slot,
                      struct kv_placement_row *ret_row)
{
    const uint32_t n = map->n_members < KV_ROW_NODES ? map->n_members : KV_ROW_NODES;

    assert(slot < KV_PLACEMENT_SLOTS);
    ret_row->n_nodes = 0;
    while (ret_row->n_nodes < n) {
        const uint32_t node = choose(map, slot, ret_row);

        ret_row->nodes[ret_row->n_nodes++] = (uint16_t)node;
    }
}

uint32_t kv_placement_first(const struct kv_members *map, uint32_t slot)
{
    const struct kv_placement_row none = {0};

    assert(slot < KV_PLACEMENT_SLOTS);
    return choose(map, slot, &none);
}

/* ---- roots ------------------------------------------------------------------------------- */

uint64_t kv_placement_prompt_root(const struct kv_id128 *block_name)
{
    uint64_t root;

    memcpy(&root, block_name->bytes, sizeof(root));
    return root;
}

uint32_t kv_placement_branch(const struct kv_id128 *block_names, uint32_t n_names)
{
    uint32_t n_blocks = BRANCH_BLOCKS;
    uint64_t half[2];

    assert(n_names > 0);
    while (n_blocks > n_names)
        n_blocks /= 2;
    memcpy(half, block_names[n_blocks - 1].bytes, sizeof(half));
    return (uint32_t)(kv_mix64(half[0] ^ kv_mix64(half[1])) % KV_ROOT_ROWS_MAX);
}

uint64_t kv_placement_branch_root(uint64_t prompt_root, uint32_t branch, uint32_t n_rows)
{
    assert(kv_placement_is_row_count(n_rows) && branch < KV_ROOT_ROWS_MAX);
    /* The steps of splitmix64: kv_mix64() of the sums is a sequence of random numbers. */
    return prompt_root + branch % n_rows * UINT64_C(0x9e3779b97f4a7c15);
}

/* ---- slots and threads ------------------------------------------------------------------- */

uint32_t kv_placement_root_slot(uint64_t root)
{
    return (uint32_t)(kv_mix64(root) % KV_PLACEMENT_SLOTS);
}

uint32_t kv_placement_object_slot(const struct kv_id128 *name_hash)
{
    uint64_t half[2];

    memcpy(half, name_hash->bytes, sizeof(half));
    return (uint32_t)(kv_mix64(half[0] ^ kv_mix64(half[1])) % KV_PLACEMENT_SLOTS);
}

uint32_t
kv_placement_unit_thread(uint64_t root, uint32_t unit, uint32_t n_nodes, uint32_t n_threads)
{
    return (uint32_t)((kv_mix64(root) + unit / n_nodes) % n_threads);
}

struct kv_placement_units kv_placement_thread_units(uint64_t root,
                                                    uint32_t n_units,
                                                    uint32_t n_nodes,
                                                    uint32_t position,
                                                    uint32_t n_threads,
                                                    uint32_t thread)
{
    /* Units of this position are on threads in turn, from that of the first one on. */
    const uint32_t turn =
        (thread + n_threads - kv_placement_unit_thread(root, position, n_nodes, n_threads)) %
        n_threads;
    const uint64_t first = (uint64_t)turn * n_nodes + position;
    const uint64_t step = (uint64_t)n_threads * n_nodes;

    return (struct kv_placement_units){
        .first = (uint32_t)first,
        .step = (uint32_t)step,
        .n = first < n_units ? (uint32_t)((n_units - first + step - 1) / step) : 0};
}

uint32_t kv_placement_session_threads(uint32_t n_units, uint32_t n_nodes, uint32_t n_threads)
{
    const uint32_t n_most = (n_units + n_nodes - 1) / n_nodes; /* units of position 0 */

    return n_most < n_threads ? n_most : n_threads;
}

uint32_t kv_placement_object_thread(uint32_t slot, uint32_t n_threads)
{
    /* Not the slot's low bits: those say the node, and all slots of a node may agree in them.
     */
    return (uint32_t)((kv_mix64(slot + 1) >> 32) % n_threads);
}
