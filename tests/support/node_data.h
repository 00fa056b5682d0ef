/* node_data.h - a look at a data thread of a node, for tests that are one thread with it.
 *
 * Threads: the node's own, or none.  Memory: the node's.
 */
#ifndef KV_TESTS_SUPPORT_NODE_DATA_H
#define KV_TESTS_SUPPORT_NODE_DATA_H

#include "kvserver/store/node.h"
#include "kvserver/store/shard/shard.h"

struct kvs_shard *node_data(struct kvs_node *node, uint32_t thread);

#endif
