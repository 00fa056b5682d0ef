/* open.h - an open that the library does for itself. */
#ifndef KV_CLIENT_OPS_OPEN_H
#define KV_CLIENT_OPS_OPEN_H

#include "client/include/kvclient.h"

/* Opens a session on the row of `root`, however many sessions that has, and attaches what is there
 * of the blocks.
 *   names  (n_names), n_names > 0 */
kv_status_t kvc_open_at_begin(struct kv_client *client,
                              const struct kv_model_info *model,
                              uint64_t root,
                              const struct kv_id128 *names,
                              uint32_t n_names,
                              struct kv_op **ret_op);

#endif
