#include "tests/support/gguf_maker.h"

#include <stdlib.h>
#include <string.h>

enum {
    N_TENSORS_AT = 8,
    N_VALUES_AT = 16,
};

void maker_bytes(struct gguf_maker *maker, const void *data, size_t bytes)
{
    while (maker->capacity - maker->bytes < bytes) {
        maker->capacity = maker->capacity > 0 ? maker->capacity * 2 : 1024;
        maker->data = realloc(maker->data, maker->capacity);
        if (maker->data == NULL)
            abort();
    }
    if (bytes > 0)
        memcpy(maker->data + maker->bytes, data, bytes);
    maker->bytes += bytes;
}

void maker_u32(struct gguf_maker *maker, uint32_t value)
{
    maker_bytes(maker, &value, sizeof(value));
}

void maker_u64(struct gguf_maker *maker, uint64_t value)
{
    maker_bytes(maker, &value, sizeof(value));
}

void maker_string(struct gguf_maker *maker, const char *text)
{
    maker_u64(maker, strlen(text));
    maker_bytes(maker, text, strlen(text));
}

void maker_begin(struct gguf_maker *maker, uint32_t version)
{
    maker_bytes(maker, "GGUF", 4);
    maker_u32(maker, version);
    maker_u64(maker, 0);
    maker_u64(maker, 0);
}

void maker_key(struct gguf_maker *maker, const char *key, uint32_t type)
{
    maker_string(maker, key);
    maker_u32(maker, type);
    maker->n_values++;
}

void maker_key_u32(struct gguf_maker *maker, const char *key, uint32_t value)
{
    maker_key(maker, key, KVW_GGUF_U32);
    maker_u32(maker, value);
}

void maker_key_bool(struct gguf_maker *maker, const char *key, bool value)
{
    maker_key(maker, key, KVW_GGUF_BOOL);
    maker_bytes(maker, value ? "\1" : "\0", 1);
}

void maker_key_f32(struct gguf_maker *maker, const char *key, float value)
{
    maker_key(maker, key, KVW_GGUF_F32);
    maker_bytes(maker, &value, sizeof(value));
}

void maker_key_string(struct gguf_maker *maker, const char *key, const char *value)
{
    maker_key(maker, key, KVW_GGUF_STRING);
    maker_string(maker, value);
}

static void
maker_key_array(struct gguf_maker *maker, const char *key, uint32_t type, size_t count)
{
    maker_key(maker, key, KVW_GGUF_ARRAY);
    maker_u32(maker, type);
    maker_u64(maker, count);
}

void maker_key_strings(struct gguf_maker *maker,
                       const char *key,
                       const char *const *values,
                       size_t count)
{
    maker_key_array(maker, key, KVW_GGUF_STRING, count);
    for (size_t i = 0; i < count; i++)
        maker_string(maker, values[i]);
}

void maker_key_u32s(struct gguf_maker *maker,
                    const char *key,
                    const uint32_t *values,
                    size_t count)
{
    maker_key_array(maker, key, KVW_GGUF_U32, count);
    maker_bytes(maker, values, count * sizeof(*values));
}

void maker_key_f32s(struct gguf_maker *maker,
                    const char *key,
                    const float *values,
                    size_t count)
{
    maker_key_array(maker, key, KVW_GGUF_F32, count);
    maker_bytes(maker, values, count * sizeof(*values));
}

void maker_tensor(struct gguf_maker *maker,
                  const char *name,
                  uint32_t n_dims,
                  const uint64_t *dims,
                  uint32_t type,
                  uint64_t offset)
{
    maker_string(maker, name);
    maker_u32(maker, n_dims);
    maker_bytes(maker, dims, n_dims * sizeof(*dims));
    maker_u32(maker, type);
    maker_u64(maker, offset);
    maker->n_tensors++;
}

void maker_finish(struct gguf_maker *maker, size_t alignment)
{
    while (maker->bytes % alignment != 0)
        maker_bytes(maker, "", 1);
    memcpy(maker->data + N_TENSORS_AT, &maker->n_tensors, sizeof(maker->n_tensors));
    memcpy(maker->data + N_VALUES_AT, &maker->n_values, sizeof(maker->n_values));
}

void maker_free(struct gguf_maker *maker)
{
    free(maker->data);
    *maker = (struct gguf_maker){0};
}
