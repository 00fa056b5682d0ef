/* node_codes.h - what the codes of a node's rows stand for, found by looking inside.
 *
 * Its own file: the insides of a node and of a client use the same names.
 *
 * Threads: none of the node's may run meanwhile.  Memory: the caller's.
 */
#ifndef KV_TESTS_SUPPORT_NODE_CODES_H
#define KV_TESTS_SUPPORT_NODE_CODES_H

#include "kvserver/store/node.h"

/* Of the session's first n_tokens rows of a layer's kv head; false: the node does not have
 * them.
 *   ret_keys   (n_tokens, d_k) the centroids of a row's codes, side by side; zeros without
 *   ret_coded  (n_tokens) the row has codes */
bool node_codes(struct kvs_node *node,
                const struct kv_id128 *session_token,
                uint32_t layer,
                uint32_t kv_head,
                uint32_t n_tokens,
                double *ret_keys,
                bool *ret_coded);

#endif
