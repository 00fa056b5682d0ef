#include "proto/kv_types.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

uint32_t kv_dtype_bytes(unsigned dtype)
{
    switch (dtype) {
    case KV_FP32:
        return 4;
    case KV_FP16:
    case KV_BF16:
        return 2;
    case KV_INT8:
        return 1;
    }
    return 0;
}

static kv_status_t
refuse(char *detail, size_t bytes, unsigned layer, const char *field, unsigned value)
{
    if (detail != NULL && bytes > 0)
        snprintf(detail, bytes, "schema: layer %u: %s: %u", layer, field, value);
    return KV_INVALID;
}

/* Whether no layer before has rows of that size. */
static bool is_first_of_size(const kv_schema_t *schema, uint32_t layer)
{
    for (uint32_t i = 0; i < layer; i++)
        if (schema->layers[i].row_bytes == schema->layers[layer].row_bytes)
            return false;
    return true;
}

kv_status_t kv_schema_finish(kv_schema_t *schema, char *detail, size_t detail_bytes)
{
    if (schema->n_layers == 0 || schema->n_layers > KV_LAYERS_MAX)
        return refuse(detail, detail_bytes, 0, "n_layers out of 1..256", schema->n_layers);

    uint32_t n_units = 0, n_sizes = 0;
    for (uint32_t i = 0; i < schema->n_layers; i++) {
        struct kv_layer_schema *layer = &schema->layers[i];
        uint32_t element = kv_dtype_bytes(layer->dtype);

        if (element == 0)
            return refuse(detail, detail_bytes, i, "unknown dtype", layer->dtype);
        if (layer->n_kv_heads == 0 || layer->n_kv_heads > KV_HEADS_MAX)
            return refuse(detail, detail_bytes, i, "n_kv_heads out of 1..256",
                          layer->n_kv_heads);
        if (layer->d_k == 0 || layer->d_k > KV_DIM_MAX)
            return refuse(detail, detail_bytes, i, "d_k out of 1..4096", layer->d_k);
        if (layer->kind == KV_LAYER_KV) {
            if (layer->d_v == 0 || layer->d_v > KV_DIM_MAX)
                return refuse(detail, detail_bytes, i, "d_v out of 1..4096", layer->d_v);
        } else if (layer->kind == KV_LAYER_KEYS) {
            if (layer->d_v != 0)
                return refuse(detail, detail_bytes, i, "keys only, yet d_v", layer->d_v);
        } else {
            return refuse(detail, detail_bytes, i, "unknown kind", layer->kind);
        }
        layer->row_bytes = ((uint32_t)layer->d_k + layer->d_v) * element;
        if (layer->row_bytes > KV_ROW_BYTES_MAX)
            return refuse(detail, detail_bytes, i, "more than 16384 bytes a row",
                          layer->row_bytes);
        n_sizes += is_first_of_size(schema, i);
        if (n_sizes > KV_ROW_SIZES_MAX)
            return refuse(detail, detail_bytes, i, "more than 16 different sizes of rows",
                          layer->row_bytes);
        layer->unit_begin = n_units;
        n_units += layer->n_kv_heads;
    }
    if (n_units > KV_UNITS_MAX)
        return refuse(detail, detail_bytes, schema->n_layers, "more than 16384 units", n_units);
    schema->n_units = n_units;
    return KV_OK;
}

kv_status_t kv_schema_uniform(kv_schema_t *ret_schema,
                              uint32_t n_layers,
                              uint32_t n_kv_heads,
                              uint32_t d_k,
                              uint32_t d_v,
                              enum kv_dtype dtype)
{
    kv_schema_t schema;

    if (n_layers > KV_LAYERS_MAX || n_kv_heads > KV_HEADS_MAX || d_k > KV_DIM_MAX ||
        d_v > KV_DIM_MAX)
        return KV_INVALID;
    memset(&schema, 0, sizeof(schema));
    schema.n_layers = n_layers;
    for (uint32_t i = 0; i < n_layers; i++)
        schema.layers[i] = (struct kv_layer_schema){
            .kind = d_v > 0 ? KV_LAYER_KV : KV_LAYER_KEYS,
            .dtype = (uint8_t)dtype,
            .n_kv_heads = (uint16_t)n_kv_heads,
            .d_k = (uint16_t)d_k,
            .d_v = (uint16_t)d_v,
        };
    kv_status_t status = kv_schema_finish(&schema, NULL, 0);
    if (status == KV_OK)
        *ret_schema = schema;
    return status;
}

uint64_t kv_schema_token_bytes(const kv_schema_t *schema)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < schema->n_layers; i++)
        bytes += (uint64_t)schema->layers[i].n_kv_heads * schema->layers[i].row_bytes;
    return bytes;
}
