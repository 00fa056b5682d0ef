#include "tests/support/node_data.h"

#include "kvserver/store/node_private.h"

struct kv_data *node_data(struct kv_node *node, uint32_t thread)
{
    return &node->data[thread];
}
