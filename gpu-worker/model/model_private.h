/* model_private.h - the tensors that a model has, where each one's weight goes and what its
 * sizes are: for model.c, which makes weights, and model_params.c, which checks the tensors.
 */
#ifndef KV_GPU_WORKER_MODEL_MODEL_PRIVATE_H
#define KV_GPU_WORKER_MODEL_MODEL_PRIVATE_H

#include "gpu-worker/model/model.h"

enum {
    KVW_MODEL_KEY_BYTES = 256, /* of a key or a tensor's name */
};

/* Where a size of a tensor comes from. */
enum kvw_model_extent {
    KVW_MODEL_ONE,
    KVW_MODEL_HIDDEN,
    KVW_MODEL_FFN,
    KVW_MODEL_Q_WIDTH,
    KVW_WIDTH,
    KVW_MODEL_VOCABULARY,
};

/* A tensor that the architectures have: its name, its sizes and where its weight goes. */
struct kvw_model_tensor_row {
    const char *name; /* of a layer: what follows "blk.N." */
    size_t offset;    /* of the weight in its struct */
    enum kvw_model_extent columns, rows;
    bool is_optional;
};

extern const struct kvw_model_tensor_row kvw_model_layer_tensors[16];
extern const struct kvw_model_tensor_row kvw_model_tensors[3];

#define KVW_MODEL_COUNT(array) (sizeof(array) / sizeof((array)[0]))

#endif
