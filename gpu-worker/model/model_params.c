/* Reads a model's parameters from its GGUF file, and checks them and the name, type and shape
 * of every tensor. */
#include "gpu-worker/model/model_private.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct reader {
    const struct kvw_gguf *gguf;
    struct kvw_model_params *params;
    char *detail;
    size_t detail_bytes;
};

static kv_status_t
refuse(const struct reader *reader, kv_status_t status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static kv_status_t
refuse(const struct reader *reader, kv_status_t status, const char *format, ...)
{
    va_list arguments;
    int n = snprintf(reader->detail, reader->detail_bytes,
                     "model: %s: ", kvw_gguf_path(reader->gguf));

    if (n >= 0 && (size_t)n < reader->detail_bytes) {
        va_start(arguments, format);
        vsnprintf(reader->detail + n, reader->detail_bytes - (size_t)n, format, arguments);
        va_end(arguments);
    }
    return status;
}

/* ---- values ---- */

/* Returns the full key of a parameter: "llama.block_count" for ".block_count". */
static const char *
full_key(const struct reader *reader, const char *suffix, char key[KVW_MODEL_KEY_BYTES])
{
    snprintf(key, KVW_MODEL_KEY_BYTES, "%.16s%.100s", reader->params->architecture, suffix);
    return key;
}

static kv_status_t
bad_value(const struct reader *reader, const char *key, kv_status_t status, const char *wanted)
{
    char value[96];

    if (status == KV_NOT_FOUND)
        return refuse(reader, KV_INVALID, "%s: missing: expected %s", key, wanted);
    kvw_gguf_format(reader->gguf, key, value, sizeof(value));
    return refuse(reader, KV_INVALID, "%s: %s: expected %s", key, value, wanted);
}

/* Reads a count in least..most.  If the key is missing, the count is `fallback`; 0: an
 * error. */
static kv_status_t read_count(const struct reader *reader,
                              const char *suffix,
                              uint32_t least,
                              uint32_t most,
                              uint32_t fallback,
                              uint32_t *ret_value)
{
    char key[KVW_MODEL_KEY_BYTES], wanted[64];
    uint32_t value = 0;
    kv_status_t status = kvw_gguf_u32(reader->gguf, full_key(reader, suffix, key), &value);

    if (status == KV_NOT_FOUND && fallback > 0) {
        *ret_value = fallback;
        return KV_OK;
    }
    if (status != KV_OK || value < least || value > most) {
        snprintf(wanted, sizeof(wanted), "an integer, %" PRIu32 "..%" PRIu32, least, most);
        return bad_value(reader, key, status, wanted);
    }
    *ret_value = value;
    return KV_OK;
}

static kv_status_t read_real(const struct reader *reader,
                             const char *suffix,
                             double above,
                             double most,
                             float fallback,
                             float *ret_value)
{
    char key[KVW_MODEL_KEY_BYTES], wanted[64];
    float value = 0;
    kv_status_t status = kvw_gguf_f32(reader->gguf, full_key(reader, suffix, key), &value);

    if (status == KV_NOT_FOUND && fallback > 0) {
        *ret_value = fallback;
        return KV_OK;
    }
    if (status != KV_OK || !(value > above && value <= most)) {
        snprintf(wanted, sizeof(wanted), "a float, above %g, at most %g", above, most);
        return bad_value(reader, key, status, wanted);
    }
    *ret_value = value;
    return KV_OK;
}

/* The number of KV heads may be one number or one for each layer; different numbers are not
 * supported. */
static kv_status_t read_kv_heads(const struct reader *reader)
{
    struct kvw_model_params *params = reader->params;
    struct kvw_gguf_array array;
    char key[KVW_MODEL_KEY_BYTES];
    int64_t first;

    full_key(reader, ".attention.head_count_kv", key);
    if (kvw_gguf_array_ints(reader->gguf, key, &array) != KV_OK)
        return read_count(reader, ".attention.head_count_kv", 1, params->n_q_heads,
                          params->n_q_heads, &params->n_kv_heads);
    if (array.count != params->n_layers)
        return bad_value(reader, key, KV_INVALID, "one number for each layer");
    first = kvw_gguf_array_int(&array, 0);
    for (uint64_t i = 0; i < array.count; i++)
        if (kvw_gguf_array_int(&array, i) != first)
            return refuse(reader, KV_UNSUPPORTED,
                          "%s: layers differ: expected the same number in all", key);
    if (first < 1 || first > params->n_q_heads)
        return bad_value(reader, key, KV_INVALID, "numbers from 1 to the query heads");
    params->n_kv_heads = (uint32_t)first;
    return KV_OK;
}

static kv_status_t read_rope(const struct reader *reader)
{
    struct kvw_model_params *params = reader->params;
    struct kvw_text type = {"linear", 6}; /* what a file without the key means */
    char key[KVW_MODEL_KEY_BYTES];
    kv_status_t status;
    bool is_named;

    status =
        read_count(reader, ".rope.dimension_count", 2, params->d, params->d, &params->n_rot);
    if (status != KV_OK)
        return status;
    if (params->n_rot % 2 != 0)
        return bad_value(reader, full_key(reader, ".rope.dimension_count", key), KV_INVALID,
                         "an even number");
    status = read_real(reader, ".rope.freq_base", 0, 1e12, 10000, &params->rope_base);
    if (status != KV_OK)
        return status;

    params->rope_scale = 1;
    status = kvw_gguf_text(reader->gguf, full_key(reader, ".rope.scaling.type", key), &type);
    is_named = status == KV_OK;
    if (status == KV_INVALID)
        return bad_value(reader, key, status, "a text");
    if (kvw_text_is(type, "linear")) {
        /* Old files have the second key. */
        status = read_real(reader, ".rope.scale_linear", 0, 1e6, 1, &params->rope_scale);
        if (status == KV_OK)
            status = read_real(reader, ".rope.scaling.factor", 0, 1e6,
                               is_named && params->rope_scale == 1 ? 0 : params->rope_scale,
                               &params->rope_scale);
    } else if (kvw_text_is(type, "none")) {
        status = KV_OK;
    } else if (!kvw_text_is(type, "llama3")) {
        bad_value(reader, key, KV_INVALID, "none, linear or llama3");
        status = KV_UNSUPPORTED;
    }
    if (status == KV_OK && kvw_text_is(type, "llama3") &&
        kvw_gguf_tensor(reader->gguf, "rope_freqs.weight") == NULL)
        status = refuse(reader, KV_INVALID,
                        "rope_freqs.weight: missing: expected with %s llama3", key);
    return status;
}

static kv_status_t read_architecture(const struct reader *reader)
{
    struct kvw_model_params *params = reader->params;
    struct kvw_text text = {"", 0};
    kv_status_t status = kvw_gguf_text(reader->gguf, "general.architecture", &text);

    if (status != KV_OK)
        return bad_value(reader, "general.architecture", status, "llama or qwen2");
    if (kvw_text_is(text, "llama")) {
        params->rope_style = KV_ROPE_ADJACENT;
    } else if (kvw_text_is(text, "qwen2")) {
        params->rope_style = KV_ROPE_HALVES;
    } else {
        bad_value(reader, "general.architecture", KV_INVALID, "llama or qwen2");
        return KV_UNSUPPORTED;
    }
    snprintf(params->architecture, sizeof(params->architecture), "%.*s", (int)text.bytes,
             text.data);

    text = (struct kvw_text){"", 0};
    kvw_gguf_text(reader->gguf, "general.name", &text);
    for (size_t i = 0; i < text.bytes && i + 1 < sizeof(params->name); i++)
        params->name[i] = text.data[i] >= ' ' && text.data[i] <= '~' ? text.data[i] : '?';
    return KV_OK;
}

static kv_status_t read_values(const struct reader *reader)
{
    struct kvw_model_params *params = reader->params;
    uint32_t n_experts = 0, d_v;
    kv_status_t status;
    char key[KVW_MODEL_KEY_BYTES];

    status = read_architecture(reader);
    if (status != KV_OK)
        return status;
    if (kvw_gguf_u32(reader->gguf, full_key(reader, ".expert_count", key), &n_experts) ==
            KV_OK &&
        n_experts > 0)
        return refuse(reader, KV_UNSUPPORTED, "%s: %" PRIu32 ": expected none", key, n_experts);
    if ((status = read_count(reader, ".block_count", 1, KV_LAYERS_MAX, 0, &params->n_layers)) !=
            KV_OK ||
        (status = read_count(reader, ".context_length", 1, KV_TOKENS_MAX, 0,
                             &params->context)) != KV_OK ||
        (status = read_count(reader, ".embedding_length", 1, KVW_MODEL_WIDTH_MAX, 0,
                             &params->n_hidden)) != KV_OK ||
        (status = read_count(reader, ".feed_forward_length", 1, KVW_MODEL_WIDTH_MAX, 0,
                             &params->n_ffn)) != KV_OK ||
        (status = read_count(reader, ".attention.head_count", 1, KVW_MODEL_HEADS_MAX, 0,
                             &params->n_q_heads)) != KV_OK ||
        (status = read_kv_heads(reader)) != KV_OK)
        return status;
    if (params->n_q_heads % params->n_kv_heads != 0)
        return bad_value(reader, full_key(reader, ".attention.head_count_kv", key), KV_INVALID,
                         "a divisor of the query heads");
    /* Without a length of its own, a head has its share of the state. */
    status = read_count(reader, ".attention.key_length", 64, KVW_MODEL_D_MAX,
                        params->n_hidden / params->n_q_heads, &params->d);
    if (status != KV_OK)
        return status;
    if (params->d < 64 || params->d > KVW_MODEL_D_MAX || params->d % 8 != 0)
        return refuse(reader, KV_UNSUPPORTED,
                      "head dimension: %" PRIu32 ": expected 64..256, a multiple of 8",
                      params->d);
    status = read_count(reader, ".attention.value_length", 1, KVW_MODEL_D_MAX, params->d, &d_v);
    if (status == KV_OK && d_v != params->d)
        status = bad_value(reader, full_key(reader, ".attention.value_length", key), KV_INVALID,
                           "the key's length");
    if (status == KV_OK)
        status =
            read_real(reader, ".attention.layer_norm_rms_epsilon", 0, 1, 0, &params->epsilon);
    return status == KV_OK ? read_rope(reader) : status;
}

/* ---- tensors ---- */

static uint64_t extent_of(const struct kvw_model_params *params, enum kvw_model_extent extent)
{
    switch (extent) {
    case KVW_MODEL_HIDDEN:
        return params->n_hidden;
    case KVW_MODEL_FFN:
        return params->n_ffn;
    case KVW_MODEL_Q_WIDTH:
        return (uint64_t)params->n_q_heads * params->d;
    case KVW_WIDTH:
        return (uint64_t)params->n_kv_heads * params->d;
    case KVW_MODEL_VOCABULARY:
        return params->n_vocabulary;
    case KVW_MODEL_ONE:
        break;
    }
    return 1;
}

/* Checks type and shape.  Norms and biases must be fp32, because devices read them in place. */
static kv_status_t check_tensor(const struct reader *reader,
                                const struct kvw_tensor *tensor,
                                const char *name,
                                uint64_t columns,
                                uint64_t rows,
                                bool is_vector)
{
    if (tensor->dims[0] != columns || kvw_tensor_rows(tensor) != rows ||
        (tensor->n_dims > 2 && (tensor->dims[2] != 1 || tensor->dims[3] != 1)))
        return refuse(reader, KV_INVALID,
                      "tensor %s: %" PRIu64 " x %" PRIu64 ": expected %" PRIu64 " x %" PRIu64,
                      name, tensor->dims[0], kvw_tensor_rows(tensor), columns, rows);
    if (is_vector && tensor->type != KVW_TENSOR_F32)
        return refuse(reader, KV_UNSUPPORTED, "tensor %s: %s: expected F32", name,
                      kvw_tensor_get_layout(tensor->type)->name);
    return KV_OK;
}

static kv_status_t check_row(const struct reader *reader,
                             const struct kvw_tensor *tensor,
                             const char *name,
                             const struct kvw_model_tensor_row *row,
                             size_t *n_known)
{
    const struct kvw_model_params *params = reader->params;

    if (tensor == NULL)
        return row->is_optional ? KV_OK
                                : refuse(reader, KV_INVALID, "tensor %s: missing", name);
    (*n_known)++;
    return check_tensor(reader, tensor, name, extent_of(params, row->columns),
                        extent_of(params, row->rows), row->rows == KVW_MODEL_ONE);
}

static kv_status_t check_rope_factors(const struct reader *reader, size_t *n_known)
{
    struct kvw_model_params *params = reader->params;
    const struct kvw_tensor *tensor = kvw_gguf_tensor(reader->gguf, "rope_freqs.weight");
    kv_status_t status;

    if (tensor == NULL)
        return KV_OK;
    (*n_known)++;
    status = check_tensor(reader, tensor, "rope_freqs.weight", params->n_rot / 2, 1, true);
    if (status != KV_OK)
        return status;
    params->rope_factors = tensor->data;
    for (uint32_t i = 0; i < params->n_rot / 2; i++)
        if (!(params->rope_factors[i] > 0 && params->rope_factors[i] < 1e6f))
            return refuse(reader, KV_INVALID,
                          "tensor rope_freqs.weight: %g: expected divisors of frequencies",
                          (double)params->rope_factors[i]);
    return KV_OK;
}

static bool is_known(const struct kvw_model_params *params, struct kvw_text name)
{
    char text[KVW_MODEL_KEY_BYTES], expected[KVW_MODEL_KEY_BYTES];
    unsigned layer;
    int end = 0;

    if (name.bytes >= sizeof(text) || memchr(name.data, '\0', name.bytes) != NULL)
        return false;
    memcpy(text, name.data, name.bytes);
    text[name.bytes] = '\0';
    if (strcmp(text, "rope_freqs.weight") == 0)
        return true;
    for (size_t i = 0; i < KVW_MODEL_COUNT(kvw_model_tensors); i++)
        if (strcmp(text, kvw_model_tensors[i].name) == 0)
            return true;
    if (sscanf(text, "blk.%9u.%n", &layer, &end) != 1 || end == 0 || layer >= params->n_layers)
        return false;
    snprintf(expected, sizeof(expected), "blk.%u.", layer);
    if (strncmp(text, expected, (size_t)end) != 0)
        return false;
    for (size_t i = 0; i < KVW_MODEL_COUNT(kvw_model_layer_tensors); i++)
        if (strcmp(text + end, kvw_model_layer_tensors[i].name) == 0)
            return true;
    return false;
}

static kv_status_t read_tensors(const struct reader *reader)
{
    struct kvw_model_params *params = reader->params;
    const size_t n_tensors = kvw_gguf_n_tensors(reader->gguf);
    const struct kvw_tensor *embedding = kvw_gguf_tensor(reader->gguf, "token_embd.weight");
    size_t n_known = 0;
    kv_status_t status;

    if (embedding == NULL)
        return refuse(reader, KV_INVALID, "tensor token_embd.weight: missing");
    if (kvw_tensor_rows(embedding) > 1 << 24)
        return refuse(reader, KV_INVALID,
                      "tensor token_embd.weight: %" PRIu64 " rows: expected at most 2^24",
                      kvw_tensor_rows(embedding));
    params->n_vocabulary = (uint32_t)kvw_tensor_rows(embedding);
    params->has_output = kvw_gguf_tensor(reader->gguf, "output.weight") != NULL;
    for (size_t i = 0; i < KVW_MODEL_COUNT(kvw_model_tensors); i++) {
        const struct kvw_model_tensor_row *row = &kvw_model_tensors[i];

        status = check_row(reader, kvw_gguf_tensor(reader->gguf, row->name), row->name, row,
                           &n_known);
        if (status != KV_OK)
            return status;
    }
    for (uint32_t layer = 0; layer < params->n_layers; layer++)
        for (size_t i = 0; i < KVW_MODEL_COUNT(kvw_model_layer_tensors); i++) {
            char name[KVW_MODEL_KEY_BYTES];

            snprintf(name, sizeof(name), "blk.%" PRIu32 ".%s", layer,
                     kvw_model_layer_tensors[i].name);
            status = check_row(reader, kvw_gguf_tensor(reader->gguf, name), name,
                               &kvw_model_layer_tensors[i], &n_known);
            if (status != KV_OK)
                return status;
        }
    status = check_rope_factors(reader, &n_known);
    if (status != KV_OK)
        return status;

    for (size_t i = 0; i < n_tensors; i++) {
        const struct kvw_tensor *tensor = kvw_gguf_tensor_at(reader->gguf, i);

        if (n_known < n_tensors && !is_known(params, tensor->name)) {
            char name[KVW_MODEL_KEY_BYTES] = "";

            for (size_t j = 0; j < tensor->name.bytes && j + 1 < sizeof(name); j++)
                name[j] = tensor->name.data[j] >= ' ' && tensor->name.data[j] <= '~'
                              ? tensor->name.data[j]
                              : '?';
            return refuse(reader, KV_UNSUPPORTED, "tensor %s: not supported in %s models", name,
                          params->architecture);
        }
        params->n_weights += tensor->dims[0] * kvw_tensor_rows(tensor);
        params->weight_bytes += tensor->bytes;
    }
    return KV_OK;
}

kv_status_t kvw_model_read(const struct kvw_gguf *gguf,
                           struct kvw_model_params *ret_params,
                           char *detail,
                           size_t detail_bytes)
{
    struct kvw_model_params params = {.n_layers = 0};
    const struct reader reader = {gguf, &params, detail, detail_bytes};
    kv_status_t status = read_values(&reader);

    if (status == KV_OK)
        status = read_tensors(&reader);
    if (status == KV_OK)
        *ret_params = params;
    return status;
}
