/* What identifies a model in a store: its name, the shape of its rows, and a fingerprint of its
 * file. */
#include "gpu-worker/model/model.h"

#include "kvserver/base/hash.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    SAMPLE_BYTES = 4096, /* a page: hashing whole tensors would read the whole file */
    SAMPLES = 3,         /* of each tensor: beginning, middle, end */
};

kv_status_t kvw_model_schema(const struct kvw_model_params *params,
                             enum kv_dtype dtype,
                             kv_schema_t *ret_schema)
{
    return kv_schema_uniform(ret_schema, params->n_layers, params->n_kv_heads, params->d,
                             params->d, dtype);
}

kv_status_t kvw_model_info(const struct kvw_model *model,
                           enum kv_dtype dtype,
                           struct kv_model_info *ret_info)
{
    const struct kvw_gguf *gguf = model->gguf;
    const struct kvw_model_params *params = &model->params;
    const size_t n_tensors = kvw_gguf_n_tensors(gguf);
    const char *file = kvw_gguf_data(gguf);
    uint64_t values_bytes = kvw_gguf_bytes(gguf);
    struct kv_id128 *names;
    const uint64_t type = dtype;
    size_t n = 0;
    kv_status_t status;

    /* Hashes of the bytes before the first tensor's data (values and list of tensors), of the
     * element type, and of the samples; the fingerprint is a hash of these. */
    names = calloc(2 + n_tensors * SAMPLES, sizeof(*names));
    if (names == NULL)
        return KV_NO_MEMORY;
    status = kvw_model_schema(params, dtype, &ret_info->schema);
    if (status != KV_OK)
        goto end;
    snprintf(ret_info->name, sizeof(ret_info->name), "%s",
             params->name[0] != '\0' ? params->name : params->architecture);
    for (size_t i = 0; i < n_tensors; i++) {
        const uint64_t offset = kvw_gguf_tensor_at(gguf, i)->offset;

        values_bytes = offset < values_bytes ? offset : values_bytes;
    }
    names[n++] = kv_hash128(file, values_bytes);
    names[n++] = kv_hash128(&type, sizeof(type));
    for (size_t i = 0; i < n_tensors; i++) {
        const struct kvw_tensor *tensor = kvw_gguf_tensor_at(gguf, i);
        const uint64_t bytes = tensor->bytes < SAMPLE_BYTES ? tensor->bytes : SAMPLE_BYTES;

        for (unsigned j = 0; j < SAMPLES; j++)
            names[n++] = kv_hash128((const char *)tensor->data +
                                        (tensor->bytes - bytes) / (SAMPLES - 1) * j,
                                    bytes);
    }
    ret_info->fingerprint = kv_hash128(names, n * sizeof(*names));

end:
    free(names);
    return status;
}
