/* match.h - the roots at which prefixes of a prompt may be kept. */
#ifndef KV_CLIENT_OPS_MATCH_H
#define KV_CLIENT_OPS_MATCH_H

#include "proto/kv_types.h"

struct kv_client;

enum {
    KVC_MATCH_PLACES = 5, /* of blocks 16, 8, 4, 2 and 1 (kvserver/cluster/placement.h) */
};

/* Returns how many roots there are, and the branch of each: the whole prompt's, then those of its
 * beginnings, without repeats.
 *   names  (n_names), n_names > 0 */
uint32_t kvc_match_roots(const struct kv_client *client,
                         const struct kv_id128 *names,
                         uint32_t n_names,
                         uint64_t ret_roots[KVC_MATCH_PLACES],
                         uint32_t ret_branches[KVC_MATCH_PLACES]);

#endif
