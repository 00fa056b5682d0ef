#include "node_data.h"

#include "../../kvserver/store/control.h"

struct kv_data *node_data(struct kv_node *node, uint32_t thread)
{
    return &node->data[thread];
}
