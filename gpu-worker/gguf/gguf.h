/* gguf.h - reads a GGUF file: named values about the model, and named tensors.
 *
 * GGUF versions 2 and 3, little endian.  The file is mapped read-only, and everything in
 * it is checked before use: counts against the bytes present, lengths, types, nesting, products
 * that overflow, duplicate names, tensors that overlap, are misaligned or end outside of the
 * file.  After a successful open, every pointer that these functions return is valid, and the
 * tables take memory in proportion to the file's size.
 *
 *   "GGUF" | version u32 | n_tensors u64 | n_values u64
 *   n_values x  { key: string, type: u32, value }
 *   n_tensors x { name: string, n_dims: u32, dims: u64 each, type: u32, offset: u64 }
 *   zeros up to a multiple of the alignment (general.alignment, or 32)
 *   the tensors' data; offsets count from here
 *
 *   string = length u64, bytes (no zero at the end); array = type u32, count u64, elements
 *
 * The format is documented in the ggml project, docs/gguf.md.
 *
 * Threads: a file that is open never changes: read it from any number of threads.
 * Memory: everything returned is valid until kvw_gguf_close().
 */
#ifndef KV_GPU_WORKER_GGUF_GGUF_H
#define KV_GPU_WORKER_GGUF_GGUF_H

#include "gpu-worker/base/file_error.h"
#include "gpu-worker/gguf/tensor_type.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KVW_GGUF_DIMS_MAX = 4,
    KVW_GGUF_DETAIL_BYTES = 512, /* enough for any line of detail */
};

/* A tensor of the file; its pointers are valid until kvw_gguf_close(). */
struct kvw_tensor {
    struct kvw_text name;
    enum kvw_tensor_type type;
    uint32_t n_dims; /* 1 to 4 */
    uint64_t
        dims[KVW_GGUF_DIMS_MAX]; /* dims[0] is the row's length; unused ones are 1; none is 0 */
    const void *data;            /* in the mapping, at a multiple of the file's alignment */
    uint64_t bytes;
    uint64_t offset; /* of `data` in the file */
};

/* Returns the rows of a tensor: the product of its dimensions except the first. */
uint64_t kvw_tensor_rows(const struct kvw_tensor *tensor);

struct kvw_gguf;

/* Maps and checks the file.  Fails with KV_NOT_FOUND if it does not exist, with KV_IO if it
 * cannot be read, with KV_INVALID if it is damaged or not a GGUF file, with KV_UNSUPPORTED if
 * its version, byte order or a tensor type is not supported, or with KV_NO_MEMORY.  On failure
 * `detail` is one line that names the file, and the key or tensor with the invalid value;
 * without a newline, 0-terminated, truncated to `detail_bytes` (not 0).  Bytes of the file that
 * are not printable ASCII appear as `?`. */
kv_status_t
kvw_gguf_open(const char *path, struct kvw_gguf **ret_gguf, char *detail, size_t detail_bytes);

/* As kvw_gguf_open(), for `bytes` bytes of memory, aligned to 8 bytes, which must stay until
 * kvw_gguf_close(); `detail` calls it `name`. */
kv_status_t kvw_gguf_open_memory(const void *data,
                                 size_t bytes,
                                 const char *name,
                                 struct kvw_gguf **ret_gguf,
                                 char *detail,
                                 size_t detail_bytes);

/* NULL is allowed. */
void kvw_gguf_close(struct kvw_gguf *gguf);

const char *kvw_gguf_path(const struct kvw_gguf *gguf);
uint32_t kvw_gguf_version(const struct kvw_gguf *gguf);
/* Every tensor's data lies at a multiple of this: a power of two from 8 to 2^20. */
uint32_t kvw_gguf_alignment(const struct kvw_gguf *gguf);
/* The whole file as mapped, for madvise() and statistics. */
const void *kvw_gguf_data(const struct kvw_gguf *gguf);
uint64_t kvw_gguf_bytes(const struct kvw_gguf *gguf);

/* --- Tensors --- */

size_t kvw_gguf_n_tensors(const struct kvw_gguf *gguf);
/* In the file's order; index < kvw_gguf_n_tensors(). */
const struct kvw_tensor *kvw_gguf_tensor_at(const struct kvw_gguf *gguf, size_t index);
/* By name; NULL: not found. */
const struct kvw_tensor *kvw_gguf_tensor(const struct kvw_gguf *gguf, const char *name);

/* --- Values --- */

/* The numbers are the file's. */
enum kvw_gguf_type {
    KVW_GGUF_U8 = 0,
    KVW_GGUF_I8 = 1,
    KVW_GGUF_U16 = 2,
    KVW_GGUF_I16 = 3,
    KVW_GGUF_U32 = 4,
    KVW_GGUF_I32 = 5,
    KVW_GGUF_F32 = 6,
    KVW_GGUF_BOOL = 7,
    KVW_GGUF_STRING = 8,
    KVW_GGUF_ARRAY = 9,
    KVW_GGUF_U64 = 10,
    KVW_GGUF_I64 = 11,
    KVW_GGUF_F64 = 12,
};

/* All lookups by key return:
 *   KV_OK         found, and the value fits the requested type and range
 *   KV_NOT_FOUND  no such key; callers mostly use a default
 *   KV_INVALID    found, but of another type or out of range
 * Out-parameters are untouched unless KV_OK.  Integers may be stored in any integer type, if
 * the value fits.  kvw_gguf_f32() takes a float or a double, never an integer.
 */
kv_status_t kvw_gguf_u32(const struct kvw_gguf *gguf, const char *key, uint32_t *ret_value);
kv_status_t kvw_gguf_i32(const struct kvw_gguf *gguf, const char *key, int32_t *ret_value);
kv_status_t kvw_gguf_u64(const struct kvw_gguf *gguf, const char *key, uint64_t *ret_value);
kv_status_t kvw_gguf_f32(const struct kvw_gguf *gguf, const char *key, float *ret_value);
kv_status_t kvw_gguf_bool(const struct kvw_gguf *gguf, const char *key, bool *ret_value);
kv_status_t
kvw_gguf_text(const struct kvw_gguf *gguf, const char *key, struct kvw_text *ret_value);

/* An array whose elements are not arrays (arrays of arrays are checked, but not readable). */
struct kvw_gguf_array {
    enum kvw_gguf_type type; /* of the elements */
    uint64_t count;
    const void *elements; /* packed as in the file, at any address: use the functions below */
    const uint64_t
        *string_offsets; /* of each string's length field from `elements`; else NULL */
};

/* Look up an array of integers of any width, of floats (32 or 64 bits), or of texts.  An array
 * of booleans is none of these. */
kv_status_t kvw_gguf_array_ints(const struct kvw_gguf *gguf,
                                const char *key,
                                struct kvw_gguf_array *ret_array);
kv_status_t kvw_gguf_array_floats(const struct kvw_gguf *gguf,
                                  const char *key,
                                  struct kvw_gguf_array *ret_array);
kv_status_t kvw_gguf_array_texts(const struct kvw_gguf *gguf,
                                 const char *key,
                                 struct kvw_gguf_array *ret_array);

/* Return an element of such an array; index < count.  A u64 above INT64_MAX reads as
 * INT64_MAX. */
int64_t kvw_gguf_array_int(const struct kvw_gguf_array *array, uint64_t index);
float kvw_gguf_array_float(const struct kvw_gguf_array *array, uint64_t index);
struct kvw_text kvw_gguf_array_text(const struct kvw_gguf_array *array, uint64_t index);

/* All values in the file's order, for messages and lists; index < kvw_gguf_n_values(). */
size_t kvw_gguf_n_values(const struct kvw_gguf *gguf);
void kvw_gguf_value_at(const struct kvw_gguf *gguf,
                       size_t index,
                       struct kvw_text *ret_key,
                       enum kvw_gguf_type *ret_type);

/* Formats one value for display into `text`, truncated to `text_bytes` (not 0) and
 * 0-terminated: numbers, quoted texts, arrays as `[i32 x 49152]`; unprintable bytes
 * as `?`. KV_NOT_FOUND: no such key, and `text` is empty. */
kv_status_t
kvw_gguf_format(const struct kvw_gguf *gguf, const char *key, char *text, size_t text_bytes);

/* Returns whether the text equals the 0-terminated `string`. */
bool kvw_text_is(struct kvw_text text, const char *string);

/* --- A file that changes while it is mapped --- */

/* Pages of a mapped file that was truncated, or whose disk failed, raise SIGBUS.  This installs
 * a handler for the program: a fault inside of a file opened by kvw_gguf_open() prints one line
 * to standard error, `PROGRAM: model file changed or unreadable while in use: PATH`, and ends
 * the process with status 1; any other fault is handled as before.  The handler knows at most
 * KVW_GGUF_GUARDED_MAX open files.  Keeps `program`. */
enum {
    KVW_GGUF_GUARDED_MAX = 8
};
void kvw_gguf_guard(const char *program);

#endif
