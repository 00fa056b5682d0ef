/* placement.h - maps units and objects to nodes, and to the data threads of a node.
 *
 *   root   -> slot   hash of the session's root, mod KV_PLACEMENT_SLOTS
 *   slot   -> row    up to KV_ROW_NODES members of the map (members.h): at each position the
 *                    one with the largest weighted hash of (slot, position, id) that is not in
 *                    the row yet (weighted rendezvous hashing: Schindelhauer and Schomaker,
 *                    SPAA 2005; Thaler and Ravishankar, IEEE/ACM ToN 1998)
 *   unit   -> node   the row's position unit mod its length
 *   unit   -> thread (hash of the root + unit / length) mod threads
 *   object -> node   the first of the row of the slot of its name's hash
 *   object -> thread by hash
 *
 * A session lives on the nodes of its row and on no other.  The heads of a layer are dealt to
 * them in turn, and so are a node's units to its threads.  When a member leaves the map, little
 * more changes than the positions that it had.
 *
 * A node needs no map: a client that opens a session tells it how long the row is, and which
 * position is the node's own.
 *
 * Threads: pure functions.
 */
#ifndef KV_KVSERVER_CLUSTER_PLACEMENT_H
#define KV_KVSERVER_CLUSTER_PLACEMENT_H

#include "kvserver/base/hash.h"
#include "kvserver/cluster/members.h"
#include "proto/kv_types.h"

enum {
    KV_PLACEMENT_SLOTS = 65536,
    KV_ROW_NODES = 8,
};

/* The nodes of a slot: indexes of members. */
struct kv_placement_row {
    uint32_t n_nodes; /* min(members of the map, KV_ROW_NODES) */
    uint16_t nodes[KV_ROW_NODES];
};

/* Computes the row of a slot, or only its first node.  Equal on every machine: there is no
 * floating point. */
void kv_placement_row(const struct kv_members *map,
                      uint32_t slot,
                      struct kv_placement_row *ret_row);
uint32_t kv_placement_first(const struct kv_members *map, uint32_t slot);

/* Return the slot of a session by its root, and of an object by its name's hash. */
uint32_t kv_placement_root_slot(uint64_t root);
uint32_t kv_placement_object_slot(const struct kv_id128 *name_hash);

/* Returns the position of a unit in a row of n_nodes. */
static inline uint32_t kv_placement_unit_position(uint32_t unit, uint32_t n_nodes)
{
    return unit % n_nodes;
}

/* Return the data thread that owns a unit, or an object's slot, on a node with n_threads. */
uint32_t
kv_placement_unit_thread(uint64_t root, uint32_t unit, uint32_t n_nodes, uint32_t n_threads);
uint32_t kv_placement_object_thread(uint32_t slot, uint32_t n_threads);

/* Returns an epoch as it travels in the header of a message.  0 only for 0. */
static inline uint32_t kv_placement_epoch32(uint64_t epoch)
{
    const uint32_t folded = (uint32_t)(epoch >> 32 ^ epoch);

    return folded != 0 || epoch == 0 ? folded : 1;
}

#endif
