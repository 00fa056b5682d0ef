#include "gpu-worker/model/model.h"

#include "gpu-worker/model/model_private.h"
#include "kvserver/base/memory.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

/* ---- tensors ---- */

#define OF_LAYER(name) offsetof(struct kvw_model_layer, name)
#define OF_MODEL(name) offsetof(struct kvw_model, name)

const struct kvw_model_tensor_row kvw_model_layer_tensors[] = {
    {"attn_norm.weight", OF_LAYER(attn_norm), KVW_MODEL_HIDDEN, KVW_MODEL_ONE, false},
    {"attn_q.weight", OF_LAYER(q), KVW_MODEL_HIDDEN, KVW_MODEL_Q_WIDTH, false},
    {"attn_k.weight", OF_LAYER(k), KVW_MODEL_HIDDEN, KVW_WIDTH, false},
    {"attn_v.weight", OF_LAYER(v), KVW_MODEL_HIDDEN, KVW_WIDTH, false},
    {"attn_output.weight", OF_LAYER(attn_output), KVW_MODEL_Q_WIDTH, KVW_MODEL_HIDDEN, false},
    {"ffn_norm.weight", OF_LAYER(ffn_norm), KVW_MODEL_HIDDEN, KVW_MODEL_ONE, false},
    {"ffn_gate.weight", OF_LAYER(gate), KVW_MODEL_HIDDEN, KVW_MODEL_FFN, false},
    {"ffn_up.weight", OF_LAYER(up), KVW_MODEL_HIDDEN, KVW_MODEL_FFN, false},
    {"ffn_down.weight", OF_LAYER(down), KVW_MODEL_FFN, KVW_MODEL_HIDDEN, false},
    {"attn_q.bias", OF_LAYER(q_bias), KVW_MODEL_Q_WIDTH, KVW_MODEL_ONE, true},
    {"attn_k.bias", OF_LAYER(k_bias), KVW_WIDTH, KVW_MODEL_ONE, true},
    {"attn_v.bias", OF_LAYER(v_bias), KVW_WIDTH, KVW_MODEL_ONE, true},
    {"attn_output.bias", OF_LAYER(attn_output_bias), KVW_MODEL_HIDDEN, KVW_MODEL_ONE, true},
    {"ffn_gate.bias", OF_LAYER(gate_bias), KVW_MODEL_FFN, KVW_MODEL_ONE, true},
    {"ffn_up.bias", OF_LAYER(up_bias), KVW_MODEL_FFN, KVW_MODEL_ONE, true},
    {"ffn_down.bias", OF_LAYER(down_bias), KVW_MODEL_HIDDEN, KVW_MODEL_ONE, true},
};

const struct kvw_model_tensor_row kvw_model_tensors[] = {
    {"token_embd.weight", OF_MODEL(embedding), KVW_MODEL_HIDDEN, KVW_MODEL_VOCABULARY, false},
    {"output_norm.weight", OF_MODEL(output_norm), KVW_MODEL_HIDDEN, KVW_MODEL_ONE, false},
    {"output.weight", OF_MODEL(output), KVW_MODEL_HIDDEN, KVW_MODEL_VOCABULARY, true},
};

static const struct kvw_tensor *layer_tensor(const struct kvw_gguf *gguf,
                                             uint32_t layer,
                                             const struct kvw_model_tensor_row *row)
{
    char name[KVW_MODEL_KEY_BYTES];

    snprintf(name, sizeof(name), "blk.%" PRIu32 ".%s", layer, row->name);
    return kvw_gguf_tensor(gguf, name);
}

/* ---- weights ---- */

static kv_status_t make_weight(struct kvw_model *model,
                               const struct kvw_tensor *tensor,
                               void *owner,
                               const struct kvw_model_tensor_row *row)
{
    struct kvw_weight **to = (struct kvw_weight **)(void *)((char *)owner + row->offset);

    if (tensor == NULL)
        return KV_OK;
    return model->device->ops->weight_create(model->device, tensor->type,
                                             kvw_tensor_rows(tensor), tensor->dims[0],
                                             tensor->data, to);
}

static void
free_weight(const struct kvw_model *model, void *owner, const struct kvw_model_tensor_row *row)
{
    model->device->ops->weight_destroy(
        *(struct kvw_weight **)(void *)((char *)owner + row->offset));
}

kv_status_t kvw_model_open(const struct kvw_gguf *gguf,
                           struct kvw_device *device,
                           struct kvw_model **ret_model,
                           char *detail,
                           size_t detail_bytes)
{
    struct kvw_model *model = calloc(1, sizeof(*model));
    kv_status_t status = KV_NO_MEMORY;

    if (model == NULL) {
        snprintf(detail, detail_bytes, "model: %s: out of memory", kvw_gguf_path(gguf));
        return KV_NO_MEMORY;
    }
    model->gguf = gguf;
    model->device = device;
    status = kvw_model_read(gguf, &model->params, detail, detail_bytes);
    if (status != KV_OK)
        goto err;
    if (model->params.weight_bytes > kv_memory_total()) {
        snprintf(detail, detail_bytes,
                 "model: %s: %" PRIu64 " MiB of weights: the machine or container has %" PRIu64
                 " MiB",
                 kvw_gguf_path(gguf), model->params.weight_bytes >> 20,
                 kv_memory_total() >> 20);
        status = KV_TOO_LARGE;
        goto err;
    }

    status = KV_NO_MEMORY;
    snprintf(detail, detail_bytes, "model: %s: out of memory", kvw_gguf_path(gguf));
    model->layers = calloc(model->params.n_layers, sizeof(*model->layers));
    if (model->layers == NULL)
        goto err;
    for (size_t i = 0; i < KVW_MODEL_COUNT(kvw_model_tensors); i++) {
        status = make_weight(model, kvw_gguf_tensor(gguf, kvw_model_tensors[i].name), model,
                             &kvw_model_tensors[i]);
        if (status != KV_OK)
            goto err;
    }
    for (uint32_t layer = 0; layer < model->params.n_layers; layer++)
        for (size_t i = 0; i < KVW_MODEL_COUNT(kvw_model_layer_tensors); i++) {
            status = make_weight(model, layer_tensor(gguf, layer, &kvw_model_layer_tensors[i]),
                                 &model->layers[layer], &kvw_model_layer_tensors[i]);
            if (status != KV_OK)
                goto err;
        }
    if (!model->params.has_output)
        model->output = model->embedding;
    detail[0] = '\0';
    *ret_model = model;
    return KV_OK;

err:
    kvw_model_close(model);
    return status;
}

void kvw_model_close(struct kvw_model *model)
{
    if (model == NULL)
        return;
    if (model->output == model->embedding)
        model->output = NULL;
    for (size_t i = 0; i < KVW_MODEL_COUNT(kvw_model_tensors); i++)
        free_weight(model, model, &kvw_model_tensors[i]);
    for (uint32_t layer = 0; model->layers != NULL && layer < model->params.n_layers; layer++)
        for (size_t i = 0; i < KVW_MODEL_COUNT(kvw_model_layer_tensors); i++)
            free_weight(model, &model->layers[layer], &kvw_model_layer_tensors[i]);
    free(model->layers);
    free(model);
}

void kvw_model_warm(const struct kvw_model *model,
                    bool (*progress)(void *arg, uint64_t done, uint64_t total),
                    void *arg)
{
    enum {
        PAGE = 4096,
        STEP = 16 << 20,
    };
    const volatile unsigned char *data = kvw_gguf_data(model->gguf);
    const uint64_t bytes = kvw_gguf_bytes(model->gguf);

    madvise((void *)(uintptr_t)data, bytes, MADV_WILLNEED);
    for (uint64_t at = 0; at < bytes; at += PAGE) {
        (void)data[at];
        if (at % STEP == 0 && progress != NULL && !progress(arg, at, bytes))
            return;
    }
    if (progress != NULL)
        progress(arg, bytes, bytes);
}

void kvw_model_rotations(const struct kvw_model_params *params,
                         uint32_t token_begin,
                         uint32_t n,
                         float *ret_rotations)
{
    const struct kv_rope_scaling scaling = {
        .linear = params->rope_scale,
        .factors = params->rope_factors,
    };
    double frequencies[KVW_MODEL_D_MAX / 2];

    assert(params->n_rot <= KVW_MODEL_D_MAX);
    kv_rope_frequencies((double)params->rope_base, params->n_rot, &scaling, frequencies);
    kv_rope_rotations(frequencies, params->n_rot, token_begin, n, ret_rotations);
}
