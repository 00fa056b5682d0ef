/* placement.h - maps units and objects to nodes, and to the data threads of a node.
 *
 *   unit   -> slot   hash of (session's root, unit number), mod KV_PLACEMENT_SLOTS
 *   slot   -> node   a table with an epoch: slots are distributed evenly over the list of nodes
 *   slot   -> thread units: the slots of a node are assigned to its threads in turn;
 *                    objects: by hash
 *
 * A layer's query is therefore spread evenly over the nodes, and no session creates a hot spot
 * on one node.
 *
 * Threads: pure functions over the caller's table.
 */
#ifndef KV_KVSERVER_CLUSTER_PLACEMENT_H
#define KV_KVSERVER_CLUSTER_PLACEMENT_H

#include "proto/kv_types.h"

enum {
    KV_PLACEMENT_SLOTS = 4096,
    KV_NODES_MAX = 256,
};

struct kv_placement {
    uint32_t epoch; /* hash of the node count: differs for lists of different length */
    uint32_t n_nodes;
    uint8_t node_of[KV_PLACEMENT_SLOTS];
};

/* Distributes the slots over n_nodes, 1..KV_NODES_MAX. */
void kv_placement_init(struct kv_placement *placement, uint32_t n_nodes);

/* Return the slot of a session's unit, and of an object by its name's hash. */
uint32_t kv_placement_unit_slot(uint64_t root, uint32_t unit);
uint32_t kv_placement_object_slot(const struct kv_id128 *name_hash);

/* Return the data thread that owns a unit's slot, or an object's, on a node with n_threads.
 * For objects, the node need not know the number of nodes. */
uint32_t kv_placement_unit_thread(uint32_t slot, uint32_t n_nodes, uint32_t n_threads);
uint32_t kv_placement_object_thread(uint32_t slot, uint32_t n_threads);

#endif
