/* gguf_private.h - what gguf.c and gguf_parse.c share: an open file's tables, and their reader.
 *
 * gguf_parse.c fills the tables from unchecked bytes; gguf.c opens and closes the file and
 * looks values up in the tables.
 */
#ifndef KV_GPU_WORKER_GGUF_GGUF_PRIVATE_H
#define KV_GPU_WORKER_GGUF_GGUF_PRIVATE_H

#include "gpu-worker/gguf/gguf.h"

#include <assert.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are read from the mapping");

struct kvw_gguf_value {
    struct kvw_text key;
    enum kvw_gguf_type type;
    const unsigned char *at; /* the value, after its type */
    struct kvw_gguf_array
        array; /* KVW_GGUF_ARRAY: `elements` NULL if those are arrays themselves */
    uint64_t *string_offsets; /* owned; array.string_offsets points to it */
};

/* Sorted by name, to find entries and duplicates. */
struct kvw_gguf_entry {
    struct kvw_text name;
    size_t index;
};

struct kvw_gguf {
    char *path;
    const unsigned char *data;
    uint64_t bytes;
    bool mapped;

    uint32_t version;
    uint32_t alignment;
    size_t n_values;
    struct kvw_gguf_value *values;
    struct kvw_gguf_entry *values_by_name;
    size_t n_tensors;
    struct kvw_tensor *tensors;
    struct kvw_gguf_entry *tensors_by_name;
};

struct kvw_gguf_reader {
    struct kvw_gguf *gguf;
    uint64_t at; /* never beyond gguf->bytes */
    struct kvw_file_error detail;
};

struct kvw_gguf_value_type {
    const char *name;
    uint32_t bytes;
};

/* By number; bytes 0: of no fixed size. */
extern const struct kvw_gguf_value_type kvw_gguf_value_types[KVW_GGUF_F64 + 1];

static inline bool kvw_gguf_is_value_type(uint32_t type)
{
    return type < sizeof(kvw_gguf_value_types) / sizeof(*kvw_gguf_value_types);
}

/* Fills the tables of reader->gguf, whose `data` and `bytes` are set.  On failure writes
 * reader->detail, and kvw_gguf_close() frees the tables filled so far. */
kv_status_t kvw_gguf_read_all(struct kvw_gguf_reader *reader);

/* Finds a name among sorted entries; NULL: not found. */
const struct kvw_gguf_entry *
kvw_gguf_find_entry(const struct kvw_gguf_entry *entries, size_t count, const char *name);

#endif
