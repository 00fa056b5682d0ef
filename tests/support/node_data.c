#include "tests/support/node_data.h"

#include "kvserver/store/node_private.h"

struct kvs_shard *node_data(struct kvs_node *node, uint32_t thread)
{
    return &node->shard[thread];
}
