/* tier_sim.h - where a node's blocks are while they are not in memory: they leave at random, and
 * come back after some time, in any order; now and then damaged, or never.
 *
 * Its own file: the insides of a node and of a client use the same names.
 *
 * Threads: one.  Memory: the caller's; it is destroyed after the node.
 */
#ifndef KV_TESTS_SIM_TIER_SIM_H
#define KV_TESTS_SIM_TIER_SIM_H

#include "kvserver/base/random.h"
#include "kvserver/store/node.h"

struct tier_sim;

struct tier_sim_counts {
    uint64_t n_left, n_returned;
    uint64_t n_lost; /* segments that came back damaged, or not at all */
};

/* Gives the node, which has no sessions yet, a tier per data thread.  Where it loses any, one
 * segment in a hundred. */
struct tier_sim *tier_sim_create(struct kvs_node *node, uint64_t seed, bool loses);
void tier_sim_destroy(struct tier_sim *tier);

/* Some blocks of the data thread are to leave, unless `is_calm`, and some come back. */
void tier_sim_step(struct tier_sim *tier, unsigned thread, uint64_t now_us, bool is_calm);

/* Brings everything back at once, for who looks inside. */
void tier_sim_bring_back(struct tier_sim *tier);

void tier_sim_get_counts(const struct tier_sim *tier, struct tier_sim_counts *ret_counts);

#endif
