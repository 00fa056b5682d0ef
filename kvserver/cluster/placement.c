#include "kvserver/cluster/placement.h"
#include "kvserver/base/hash.h"

#include <assert.h>
#include <string.h>

void kv_placement_init(struct kv_placement *placement, uint32_t n_nodes)
{
    assert(n_nodes >= 1 && n_nodes <= KV_NODES_MAX);
    /* 0 means "no placement". */
    placement->epoch = (uint32_t)kv_mix64(n_nodes) | 1;
    placement->n_nodes = n_nodes;
    for (uint32_t slot = 0; slot < KV_PLACEMENT_SLOTS; slot++)
        placement->node_of[slot] = (uint8_t)(slot % n_nodes);
}

uint32_t kv_placement_unit_slot(uint64_t root, uint32_t unit)
{
    /* Neighbouring units take neighbouring slots, and those are dealt to the nodes in turn: the
     * heads of one layer spread evenly.  Only the root is mixed. */
    return (uint32_t)((kv_mix64(root) + unit) % KV_PLACEMENT_SLOTS);
}

uint32_t kv_placement_object_slot(const struct kv_id128 *name_hash)
{
    uint64_t half[2];

    memcpy(half, name_hash->bytes, sizeof(half));
    return (uint32_t)(kv_mix64(half[0] ^ kv_mix64(half[1])) % KV_PLACEMENT_SLOTS);
}

uint32_t kv_placement_unit_thread(uint32_t slot, uint32_t n_nodes, uint32_t n_threads)
{
    /* The node is slot % n_nodes, so what is left of the slot deals its own slots in turn. */
    return slot / n_nodes % n_threads;
}

uint32_t kv_placement_object_thread(uint32_t slot, uint32_t n_threads)
{
    /* Not the slot's low bits: those say the node, and all slots of a node may agree in them.
     */
    return (uint32_t)((kv_mix64(slot + 1) >> 32) % n_threads);
}
