/* copy.h - prefixes are copied from row to row, by operations as a user begins them.
 *
 *   wanted -> a session where the prefix is -> a session where it is to be
 *          -> rows are read -> and put, a few MiB at a time -> published -> over
 *
 * One prefix at a time, one operation at a time: what the user does has most of the network.  If
 * anything fails the copy is given up: the next session that misses the prefix wants it again.
 */
#ifndef KV_CLIENT_OPS_COPY_H
#define KV_CLIENT_OPS_COPY_H

#include "client/include/kvclient.h"

/* Wants a prefix copied: the row of `from_root` keeps the first n_names blocks, that of `to_root`
 * does not.  Every client that is sent there may want the same: each begins after a delay drawn by
 * lot, and copies what is not there by then. */
void kvc_copy_want(struct kv_client *client,
                   const struct kv_model_info *model,
                   uint64_t from_root,
                   uint64_t to_root,
                   const struct kv_id128 *names,
                   uint32_t n_names);

#endif
