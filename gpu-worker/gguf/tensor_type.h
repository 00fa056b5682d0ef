/* tensor_type.h - the element types of a GGUF file's tensors, and how each lays out a row.
 *
 * Threads: pure functions.
 */
#ifndef KV_GPU_WORKER_GGUF_TENSOR_TYPE_H
#define KV_GPU_WORKER_GGUF_TENSOR_TYPE_H

#include <stddef.h>
#include <stdint.h>

/* The numbers are the file's. */
enum kvw_tensor_type {
    KVW_TENSOR_F32 = 0,
    KVW_TENSOR_F16 = 1,
    KVW_TENSOR_Q4_0 = 2,
    KVW_TENSOR_Q4_1 = 3,
    KVW_TENSOR_Q5_0 = 6,
    KVW_TENSOR_Q5_1 = 7,
    KVW_TENSOR_Q8_0 = 8,
    KVW_TENSOR_Q4_K = 12,
    KVW_TENSOR_Q5_K = 13,
    KVW_TENSOR_Q6_K = 14,
    KVW_TENSOR_BF16 = 30,
};

/* How a type lays out the elements of a row: in blocks of a fixed number of elements and bytes.
 * A row is a whole number of blocks. */
struct kvw_tensor_layout {
    enum kvw_tensor_type type;
    const char *name; /* "Q4_K" */
    uint32_t block_elements;
    uint32_t block_bytes;
};

/* Returns the layout of a type, which may be any number; NULL: not supported. */
const struct kvw_tensor_layout *kvw_tensor_get_layout(uint32_t type);

/* All types, in the order of their numbers, from index 0; NULL after the last. */
const struct kvw_tensor_layout *kvw_tensor_layout_at(size_t index);

/* Returns the bytes of a row of n_elements, which must be a whole number of blocks. */
size_t kvw_tensor_row_bytes(enum kvw_tensor_type type, size_t n_elements);

#endif
