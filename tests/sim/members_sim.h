/* members_sim.h - the simulator's row of the table of sources of maps (cluster/members.h).
 *
 * Threads: any.  Memory: as members.h says.
 */
#ifndef KV_TESTS_SIM_MEMBERS_SIM_H
#define KV_TESTS_SIM_MEMBERS_SIM_H

#include "kvserver/cluster/members.h"

/* "3 7": three members, node0 at sim:0 and so on, in an order and with weights that follow from
 * the seed 7.  All seeds that are the same modulo 16 give the same weights, and 0 of them gives
 * all the weight 1. */
extern const struct kv_members_source members_sim;

/* Returns the number in a member's address. */
unsigned members_sim_place(const char *address);

#endif
