/* gguf_private.h - what gguf.c and gguf_parse.c share: an open file's tables, and their reader.
 *
 * gguf_parse.c fills the tables from bytes that nobody has checked; gguf.c opens and closes the
 * file and answers from the tables.
 */
#ifndef KV_GPU_WORKER_GGUF_GGUF_PRIVATE_H
#define KV_GPU_WORKER_GGUF_GGUF_PRIVATE_H

#include "gpu-worker/gguf/gguf.h"

#include <assert.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file is read as it lies");

struct value {
    struct kv_text key;
    enum kv_gguf_type type;
    const unsigned char *at; /* the value, behind its type */
    struct kv_gguf_array
        array; /* KV_GGUF_ARRAY: `elements` NULL if those are arrays themselves */
    uint64_t *string_offsets; /* owned; what `array` lends */
};

/* Sorted by name: finds one, and tells if one is there twice. */
struct entry {
    struct kv_text name;
    size_t index;
};

struct kv_gguf {
    char *path;
    const unsigned char *data;
    uint64_t bytes;
    bool mapped;

    uint32_t version;
    uint32_t alignment;
    size_t n_values;
    struct value *values;
    struct entry *values_by_name;
    size_t n_tensors;
    struct kv_tensor *tensors;
    struct entry *tensors_by_name;
};

struct reader {
    struct kv_gguf *gguf;
    uint64_t at; /* never beyond gguf->bytes */
    struct kv_detail detail;
};

struct kv_gguf_value_type {
    const char *name;
    uint32_t bytes;
};

/* By number; bytes 0: of no fixed size. */
extern const struct kv_gguf_value_type kv_gguf_value_types[KV_GGUF_F64 + 1];

static inline bool is_value_type(uint32_t type)
{
    return type < sizeof(kv_gguf_value_types) / sizeof(*kv_gguf_value_types);
}

/* Fills the tables of reader->gguf, whose `data` and `bytes` are set.  On failure
 * reader->detail says what is wrong, and kv_gguf_close() frees what there is of the tables. */
kv_status_t kv_gguf_read_all(struct reader *reader);

/* Among entries that are sorted; NULL: none has that name. */
const struct entry *
kv_gguf_find_entry(const struct entry *entries, size_t count, const char *name);

#endif
