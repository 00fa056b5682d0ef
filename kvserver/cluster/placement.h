/* placement.h - which node, and which of its data threads, owns a unit or an object.
 *
 *   unit   -> slot   hash of (session's root, unit number), mod KV_PLACEMENT_SLOTS
 *   slot   -> node   a table with an epoch: slots dealt evenly to the nodes of the list
 *   slot   -> thread units: the slots of a node are dealt to its threads in turn;
 *                    objects: by hash
 *
 * So one layer's query fans out over nodes evenly, and one session never heats one node.
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
    uint32_t epoch; /* hash of the node count: two lists of different length never agree */
    uint32_t n_nodes;
    uint8_t node_of[KV_PLACEMENT_SLOTS];
};

/* Deals the slots to n_nodes, 1..KV_NODES_MAX. */
void kv_placement_init(struct kv_placement *placement, uint32_t n_nodes);

/* The slot of a session's unit, and of an object by its name's hash. */
uint32_t kv_placement_unit_slot(uint64_t root, uint32_t unit);
uint32_t kv_placement_object_slot(const struct kv_id128 *name_hash);

/* The data thread, of a node with n_threads, that owns a unit's slot or an object's.  A node
 * need not know how many others there are to find an object. */
uint32_t kv_placement_unit_thread(uint32_t slot, uint32_t n_nodes, uint32_t n_threads);
uint32_t kv_placement_object_thread(uint32_t slot, uint32_t n_threads);

#endif
