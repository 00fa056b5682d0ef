/* The table of tensor types: how each lays out the elements of a row. */
#include "gpu-worker/gguf/tensor_type.h"

#include <assert.h>

static const struct kvw_tensor_layout layouts[] = {
    {KVW_TENSOR_F32, "F32", 1, 4},       {KVW_TENSOR_F16, "F16", 1, 2},
    {KVW_TENSOR_Q4_0, "Q4_0", 32, 18},   {KVW_TENSOR_Q4_1, "Q4_1", 32, 20},
    {KVW_TENSOR_Q5_0, "Q5_0", 32, 22},   {KVW_TENSOR_Q5_1, "Q5_1", 32, 24},
    {KVW_TENSOR_Q8_0, "Q8_0", 32, 34},   {KVW_TENSOR_Q4_K, "Q4_K", 256, 144},
    {KVW_TENSOR_Q5_K, "Q5_K", 256, 176}, {KVW_TENSOR_Q6_K, "Q6_K", 256, 210},
    {KVW_TENSOR_BF16, "BF16", 1, 2},
};

const struct kvw_tensor_layout *kvw_tensor_layout_at(size_t index)
{
    return index < sizeof(layouts) / sizeof(*layouts) ? &layouts[index] : NULL;
}

const struct kvw_tensor_layout *kvw_tensor_get_layout(uint32_t type)
{
    for (size_t i = 0; kvw_tensor_layout_at(i) != NULL; i++) {
        if ((uint32_t)layouts[i].type == type)
            return &layouts[i];
    }
    return NULL;
}

size_t kvw_tensor_row_bytes(enum kvw_tensor_type type, size_t n_elements)
{
    const struct kvw_tensor_layout *layout = kvw_tensor_get_layout((uint32_t)type);

    assert(layout != NULL && n_elements % layout->block_elements == 0);
    return n_elements / layout->block_elements * layout->block_bytes;
}
