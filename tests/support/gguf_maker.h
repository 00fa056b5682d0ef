/* gguf_maker.h - writes GGUF files in memory, right ones and, byte by byte, wrong ones. */
#ifndef KV_TESTS_SUPPORT_GGUF_MAKER_H
#define KV_TESTS_SUPPORT_GGUF_MAKER_H

#include "gpu-worker/gguf/gguf.h"

/* All zeros is an empty file.  Appends; out of memory ends the process. */
struct gguf_maker {
    unsigned char *data;
    size_t bytes, capacity;
    uint64_t n_values, n_tensors;
};

void maker_bytes(struct gguf_maker *maker, const void *data, size_t bytes);
void maker_u32(struct gguf_maker *maker, uint32_t value);
void maker_u64(struct gguf_maker *maker, uint64_t value);
void maker_string(struct gguf_maker *maker, const char *text);

/* Magic, version and counts; the counts are filled in by maker_finish(). */
void maker_begin(struct gguf_maker *maker, uint32_t version);
/* Key and type; the value is appended by the caller. */
void maker_key(struct gguf_maker *maker, const char *key, uint32_t type);
void maker_key_u32(struct gguf_maker *maker, const char *key, uint32_t value);
void maker_key_bool(struct gguf_maker *maker, const char *key, bool value);
void maker_key_f32(struct gguf_maker *maker, const char *key, float value);
void maker_key_string(struct gguf_maker *maker, const char *key, const char *value);
void maker_key_strings(struct gguf_maker *maker,
                       const char *key,
                       const char *const *values,
                       size_t count);
void maker_key_u32s(struct gguf_maker *maker,
                    const char *key,
                    const uint32_t *values,
                    size_t count);
void maker_key_f32s(struct gguf_maker *maker,
                    const char *key,
                    const float *values,
                    size_t count);
void maker_tensor(struct gguf_maker *maker,
                  const char *name,
                  uint32_t n_dims,
                  const uint64_t *dims,
                  uint32_t type,
                  uint64_t offset);
/* Pads with zeros to a multiple of `alignment`, and sets the counts. */
void maker_finish(struct gguf_maker *maker, size_t alignment);
void maker_free(struct gguf_maker *maker);

#endif
