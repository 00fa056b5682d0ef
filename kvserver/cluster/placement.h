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
 * Sessions whose prompts begin with the same block have the same root.  If they are too many for
 * one row, their root has 2, 4, ... KV_ROOT_ROWS_MAX rows: a root for each is derived from the
 * prompt's.  The prompt's branch says which one a session has, so prompts of one branch meet
 * while there are as many rows:
 *
 *   prompt -> branch hash of the name of its block 16, 8, 4, 2 or 1: the last of these that it
 *                    has, mod KV_ROOT_ROWS_MAX
 *   prompt -> root   the first block's name, and branch mod rows
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

#include <stdbool.h>

enum {
    KV_PLACEMENT_SLOTS = 65536,
    KV_ROW_NODES = 8,
    KV_ROOT_ROWS_MAX = 64,
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

/* Returns the root of the sessions whose prompts begin with a block of that name, as long as it
 * has one row. */
uint64_t kv_placement_prompt_root(const struct kv_id128 *block_name);

/* Returns the branch, below KV_ROOT_ROWS_MAX, of a prompt with blocks of these names.
 *   block_names  (n_names), n_names > 0 */
uint32_t kv_placement_branch(const struct kv_id128 *block_names, uint32_t n_names);

/* Whether a root may have so many rows. */
static inline bool kv_placement_is_row_count(uint32_t n_rows)
{
    return n_rows > 0 && n_rows <= KV_ROOT_ROWS_MAX && (n_rows & (n_rows - 1)) == 0;
}

/* Returns the root of a branch's sessions while the prompt's root has n_rows rows.  Branch 0 has
 * the prompt's. */
uint64_t kv_placement_branch_root(uint64_t prompt_root, uint32_t branch, uint32_t n_rows);

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
/* The units of a session on one data thread: numbers first, first + step, and so on, n of them. */
struct kv_placement_units {
    uint32_t first, step, n;
};
struct kv_placement_units kv_placement_thread_units(uint64_t root,
                                                    uint32_t n_units,
                                                    uint32_t n_nodes,
                                                    uint32_t position,
                                                    uint32_t n_threads,
                                                    uint32_t thread);
/* Returns how many of its n_threads data threads each node of a row needs for the units of a
 * session, whatever its position.  They follow each other, after the last comes 0, and begin with
 * that of unit 0. */
uint32_t kv_placement_session_threads(uint32_t n_units, uint32_t n_nodes, uint32_t n_threads);
uint32_t kv_placement_object_thread(uint32_t slot, uint32_t n_threads);

/* Returns an epoch as it travels in the header of a message.  0 only for 0. */
static inline uint32_t kv_placement_epoch32(uint64_t epoch)
{
    const uint32_t folded = (uint32_t)(epoch >> 32 ^ epoch);

    return folded != 0 || epoch == 0 ? folded : 1;
}

#endif
