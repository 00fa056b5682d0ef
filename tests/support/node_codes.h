/* node_codes.h - what the codes and copies of a node's rows stand for, found by looking inside.
 *
 * Its own file: the insides of a node and of a client use the same names.
 *
 * Threads: none of the node's may run meanwhile.  Memory: the caller's.
 */
#ifndef KV_TESTS_SUPPORT_NODE_CODES_H
#define KV_TESTS_SUPPORT_NODE_CODES_H

#include "kvserver/store/node.h"
#include "tests/support/oracle.h"

/* Of the rows of a layer's kv head in a session: fills all that oracle_rows says of codes and
 * copies, by the rows' tokens.  false: the node does not have them. */
bool node_codes(struct kvs_node *node,
                const struct kv_id128 *session_token,
                uint32_t layer,
                uint32_t kv_head,
                struct oracle_rows *rows);

#endif
