/* swaps.h - segments that got into another session's place: every row of them must be found.
 *
 *     token  0            150          200              300
 *     parent |-- a ------- |-- d ----------------------- |    truncated at 150 and written anew
 *     fork   |-- a --------------------- |-- c --------- |    of the parent, before that
 *     other  |-- b ------------------------------------- |
 *
 * Two of the three exchange the segments of a block, as a mixed-up pointer would.  What they
 * have in common (a) is right in both; anything else must fail the node's own check, and no
 * client may get it.
 *
 * Threads: one.  Memory: the caller's; its sessions are closed at the end.
 */
#ifndef KV_TESTS_SIM_SWAPS_H
#define KV_TESTS_SIM_SWAPS_H

#include "client/include/kvclient.h"
#include "kvserver/base/random.h"
#include "kvserver/store/node.h"

enum {
    SWAPS_CONTENTS = 4
};

struct swaps {
    struct kv_client *client;
    const struct kv_model_info *model;
    struct kvs_node **nodes; /* (n_nodes) in the client's order */
    unsigned n_nodes;
    struct kv_random *random;
    void (*turn)(void *world); /* moves everybody on */
    void *world;
    uint32_t content; /* the first of SWAPS_CONTENTS numbers that are nobody's: see truth.h */

    /* What was done. */
    uint64_t n_begun;         /* operations of the client */
    uint64_t n_swaps, n_rows; /* segments in wrong places; rows of them that were found */
};

/* NULL, or what is wrong.  Nothing is done if the sessions cannot be made. */
const char *swaps_fault(struct swaps *swaps);

#endif
