/* model_private.h - the tensors that a model has, where each one's weight goes and what its
 * sizes are: for model.c, which makes weights, and model_params.c, which checks the tensors.
 */
#ifndef KV_GPU_WORKER_MODEL_MODEL_PRIVATE_H
#define KV_GPU_WORKER_MODEL_MODEL_PRIVATE_H

#include "gpu-worker/model/model.h"

enum {
    KEY_BYTES = 256, /* of a key or a tensor's name */
};

/* Where a size of a tensor comes from. */
enum extent {
    ONE,
    HIDDEN,
    FFN,
    Q_WIDTH,
    KV_WIDTH,
    VOCABULARY,
};

struct tensor_row {
    const char *name; /* of a layer: what follows "blk.N." */
    size_t offset;    /* of the weight in its struct */
    enum extent columns, rows;
    bool is_optional;
};

extern const struct tensor_row kv_model_layer_tensors[16];
extern const struct tensor_row kv_model_tensors[3];

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

#endif
