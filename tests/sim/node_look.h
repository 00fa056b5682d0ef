/* node_look.h - what a node holds, counted by looking inside.
 *
 * Its own file: the insides of a node and of a client use the same names.
 */
#ifndef NODE_LOOK_H
#define NODE_LOOK_H

#include "node.h"

struct node_look {
    uint64_t sessions, clients, calls; /* of the control thread */
    uint64_t works, bodies, stagings;  /* of all data threads, lent */
    uint64_t segments, objects, object_bytes;
    uint64_t bytes_strayed;             /* lent by the arenas, and not to what may stay */
    uint64_t codebooks, jobs, queriers; /* lent, queued, owned */
    uint64_t corrupt_rows, bad_messages;
};

void node_look(struct kv_node *node, struct node_look *ret_look);

/* All codes of all units against their keys: NULL, or what is wrong. */
const char *node_codes_fault(struct kv_node *node);

#endif
