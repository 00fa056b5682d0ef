/* node_look.h - what a node holds, counted by looking inside.
 *
 * Its own file: the insides of a node and of a client use the same names.
 */
#ifndef KV_TESTS_SIM_NODE_LOOK_H
#define KV_TESTS_SIM_NODE_LOOK_H

#include "kvserver/base/random.h"
#include "kvserver/store/node.h"

struct node_look {
    uint64_t sessions, clients, calls; /* of the control thread */
    uint64_t works, bodies, stagings;  /* of all data threads, lent */
    uint64_t segments, objects, object_bytes;
    uint64_t bytes_strayed;             /* lent by the arenas, and not to what may stay */
    uint64_t codebooks, jobs, queriers; /* lent, queued, owned */
    uint64_t corrupt_rows, bad_messages;
    uint64_t prefixes;
};

void node_look(struct kvs_node *node, struct node_look *ret_look);

/* A block of a unit that two sessions have. */
struct node_place {
    uint32_t sessions[2]; /* their session_index on the node */
    uint32_t layer, head, block;
};

/* Exchanges the two sessions' segments there.  false: nothing happened, a session has none, or
 * both have the same. */
bool node_swap(struct kvs_node *node, const struct node_place *place);

/* Damages a segment in memory of a block that the node keeps by name: a bit flips in a row or in a
 * checksum, or another segment's rows come in its place, with their checksums or without.  Returns
 * false if nothing happened: the node keeps nothing in memory. */
bool node_damage(struct kvs_node *node, struct kv_random *random);

/* What a node has saved of what it keeps by name. */
struct node_saved;
/* Returns the list of it, to be freed with free(); NULL: nothing is saved. */
struct node_saved *node_list_saved(const struct kvs_node *node, uint64_t *ret_n);
/* Whether the node, or the one in its place, has all of it: NULL, or what is wrong. */
const char *
node_saved_fault(const struct kvs_node *node, const struct node_saved *saved, uint64_t n);

/* Has all blocks of sessions come back from disk.  Returns false if some are not there yet. */
bool node_bring_back(struct kvs_node *node);
/* Returns how many of the first n blocks of these names the node has saved, whosever they are. */
uint32_t
node_count_saved(const struct kvs_node *node, const struct kv_id128 *names, uint32_t n);

/* Has a data thread let saved rows go, as if others lacked memory for as many bytes.  Returns how many
 * bytes they had. */
uint64_t node_let_go(struct kvs_node *node, uint32_t thread, size_t bytes);
/* Whether all blocks of the session of that token are in memory. */
bool node_has_all(const struct kvs_node *node, const struct kv_id128 *token);
/* How many have come back. */
uint64_t node_n_loaded(const struct kvs_node *node);

/* Which committed rows of the block, in sessions[which], fail the check that the node makes of
 * rows.  Returns how many rows there are; 0: there is no such block. */
uint32_t node_verify(struct kvs_node *node,
                     const struct node_place *place,
                     unsigned which,
                     bool ret_is_bad[KV_BLOCK_TOKENS]);

/* All codes of all units against their keys: NULL, or what is wrong. */
const char *node_codes_fault(struct kvs_node *node);

#endif
