#include "gpu-worker/gguf/gguf.h"

#include "gpu-worker/gguf/gguf_guard.h"
#include "gpu-worker/gguf/gguf_private.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* --- Types --- */

const struct kvw_gguf_value_type kvw_gguf_value_types[] = {
    [KVW_GGUF_U8] = {"u8", 1},         [KVW_GGUF_I8] = {"i8", 1},
    [KVW_GGUF_U16] = {"u16", 2},       [KVW_GGUF_I16] = {"i16", 2},
    [KVW_GGUF_U32] = {"u32", 4},       [KVW_GGUF_I32] = {"i32", 4},
    [KVW_GGUF_F32] = {"f32", 4},       [KVW_GGUF_BOOL] = {"bool", 1},
    [KVW_GGUF_STRING] = {"string", 0}, [KVW_GGUF_ARRAY] = {"array", 0},
    [KVW_GGUF_U64] = {"u64", 8},       [KVW_GGUF_I64] = {"i64", 8},
    [KVW_GGUF_F64] = {"f64", 8},
};

static bool is_integer(uint32_t type)
{
    return type <= KVW_GGUF_I32 || type == KVW_GGUF_U64 || type == KVW_GGUF_I64;
}

bool kvw_text_is(struct kvw_text text, const char *string)
{
    return text.bytes == strlen(string) && memcmp(text.data, string, text.bytes) == 0;
}

uint64_t kvw_tensor_rows(const struct kvw_tensor *tensor)
{
    return tensor->dims[1] * tensor->dims[2] * tensor->dims[3];
}

/* --- Open and close --- */

static kv_status_t map_file(struct kvw_gguf_reader *reader)
{
    struct kvw_gguf *gguf = reader->gguf;
    /* Opening a pipe must not wait for a writer; pipes are rejected below. */
    int file = open(gguf->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    kv_status_t status = KV_OK;
    struct stat about;
    void *data;

    if (file < 0) {
        status = errno == ENOENT || errno == ENOTDIR ? KV_NOT_FOUND : KV_IO;
        return kvw_file_error_set(&reader->detail, status, "%s", strerror(errno));
    }
    if (fstat(file, &about) != 0) {
        status = kvw_file_error_set(&reader->detail, KV_IO, "%s", strerror(errno));
    } else if (!S_ISREG(about.st_mode)) {
        status = kvw_file_error_set(&reader->detail, KV_INVALID, "not a file");
    } else if (about.st_size == 0) {
        status =
            kvw_file_error_set(&reader->detail, KV_INVALID, "not a GGUF file: it is empty");
    } else {
        data = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_SHARED, file, 0);
        if (data == MAP_FAILED) {
            status = kvw_file_error_set(&reader->detail, KV_IO, "cannot be mapped: %s",
                                        strerror(errno));
        } else {
            gguf->data = data;
            gguf->bytes = (uint64_t)about.st_size;
            gguf->mapped = true;
            kvw_gguf_guard_add(data, gguf->bytes, gguf->path);
        }
    }
    close(file);
    return status;
}

/* Opens the file, or the bytes at `data` if that is not NULL. */
static kv_status_t open_any(const void *data,
                            size_t bytes,
                            const char *path,
                            struct kvw_gguf **ret_gguf,
                            char *detail,
                            size_t detail_bytes)
{
    struct kvw_gguf_reader reader = {.detail = {detail, detail_bytes, path}};
    kv_status_t status = KV_OK;

    reader.gguf = calloc(1, sizeof(*reader.gguf));
    if (reader.gguf == NULL || (reader.gguf->path = strdup(path)) == NULL) {
        snprintf(detail, detail_bytes, "%s: out of memory", path);
        status = KV_NO_MEMORY;
        goto failed;
    }
    if (data != NULL) {
        reader.gguf->data = data;
        reader.gguf->bytes = bytes;
    } else {
        status = map_file(&reader);
    }
    if (status == KV_OK)
        status = kvw_gguf_read_all(&reader);
    if (status != KV_OK)
        goto failed;
    *ret_gguf = reader.gguf;
    return KV_OK;
failed:
    kvw_gguf_close(reader.gguf);
    return status;
}

kv_status_t
kvw_gguf_open(const char *path, struct kvw_gguf **ret_gguf, char *detail, size_t detail_bytes)
{
    return open_any(NULL, 0, path, ret_gguf, detail, detail_bytes);
}

kv_status_t kvw_gguf_open_memory(const void *data,
                                 size_t bytes,
                                 const char *name,
                                 struct kvw_gguf **ret_gguf,
                                 char *detail,
                                 size_t detail_bytes)
{
    assert(data != NULL);
    return open_any(data, bytes, name, ret_gguf, detail, detail_bytes);
}

void kvw_gguf_close(struct kvw_gguf *gguf)
{
    if (gguf == NULL)
        return;
    for (size_t i = 0; i < gguf->n_values; i++)
        free(gguf->values[i].string_offsets);
    free(gguf->values);
    free(gguf->values_by_name);
    free(gguf->tensors);
    free(gguf->tensors_by_name);
    if (gguf->mapped) {
        kvw_gguf_guard_remove(gguf->data);
        munmap((void *)gguf->data, gguf->bytes);
    }
    free(gguf->path);
    free(gguf);
}

const char *kvw_gguf_path(const struct kvw_gguf *gguf)
{
    return gguf->path;
}

uint32_t kvw_gguf_version(const struct kvw_gguf *gguf)
{
    return gguf->version;
}

uint32_t kvw_gguf_alignment(const struct kvw_gguf *gguf)
{
    return gguf->alignment;
}

const void *kvw_gguf_data(const struct kvw_gguf *gguf)
{
    return gguf->data;
}

uint64_t kvw_gguf_bytes(const struct kvw_gguf *gguf)
{
    return gguf->bytes;
}

size_t kvw_gguf_n_tensors(const struct kvw_gguf *gguf)
{
    return gguf->n_tensors;
}

const struct kvw_tensor *kvw_gguf_tensor_at(const struct kvw_gguf *gguf, size_t index)
{
    assert(index < gguf->n_tensors);
    return &gguf->tensors[index];
}

const struct kvw_tensor *kvw_gguf_tensor(const struct kvw_gguf *gguf, const char *name)
{
    const struct kvw_gguf_entry *entry =
        kvw_gguf_find_entry(gguf->tensors_by_name, gguf->n_tensors, name);

    return entry != NULL ? &gguf->tensors[entry->index] : NULL;
}

/* --- Values --- */

static const struct kvw_gguf_value *find_value(const struct kvw_gguf *gguf, const char *key)
{
    const struct kvw_gguf_entry *entry =
        kvw_gguf_find_entry(gguf->values_by_name, gguf->n_values, key);

    return entry != NULL ? &gguf->values[entry->index] : NULL;
}

/* An integer of any type of a GGUF file: -2^63 to 2^64 - 1. */
struct integer {
    bool negative;
    uint64_t bits; /* two's complement where negative */
};

static struct integer load_integer(uint32_t type, const unsigned char *at)
{
    uint32_t bytes = kvw_gguf_value_types[type].bytes;
    bool is_signed = type == KVW_GGUF_I8 || type == KVW_GGUF_I16 || type == KVW_GGUF_I32 ||
                     type == KVW_GGUF_I64;
    struct integer integer = {false, 0};

    assert(is_integer(type));
    memcpy(&integer.bits, at, bytes);
    if (is_signed && at[bytes - 1] >> 7) {
        integer.negative = true;
        if (bytes < sizeof(integer.bits))
            integer.bits |= ~(uint64_t)0 << 8 * bytes;
    }
    return integer;
}

static float load_float(uint32_t type, const unsigned char *at)
{
    double wide;
    float narrow;

    if (type == KVW_GGUF_F64) {
        memcpy(&wide, at, sizeof(wide));
        return (float)wide;
    }
    memcpy(&narrow, at, sizeof(narrow));
    return narrow;
}

static struct kvw_text load_text(const unsigned char *at)
{
    uint64_t bytes;

    memcpy(&bytes, at, sizeof(bytes));
    return (struct kvw_text){(const char *)at + sizeof(bytes), bytes};
}

static kv_status_t
find_integer(const struct kvw_gguf *gguf, const char *key, struct integer *ret_integer)
{
    const struct kvw_gguf_value *value = find_value(gguf, key);

    if (value == NULL)
        return KV_NOT_FOUND;
    if (!is_integer(value->type))
        return KV_INVALID;
    *ret_integer = load_integer(value->type, value->at);
    return KV_OK;
}

kv_status_t kvw_gguf_u64(const struct kvw_gguf *gguf, const char *key, uint64_t *ret_value)
{
    struct integer integer;
    kv_status_t status = find_integer(gguf, key, &integer);

    if (status == KV_OK && integer.negative)
        status = KV_INVALID;
    if (status == KV_OK)
        *ret_value = integer.bits;
    return status;
}

kv_status_t kvw_gguf_u32(const struct kvw_gguf *gguf, const char *key, uint32_t *ret_value)
{
    uint64_t value;
    kv_status_t status = kvw_gguf_u64(gguf, key, &value);

    if (status == KV_OK && value > UINT32_MAX)
        status = KV_INVALID;
    if (status == KV_OK)
        *ret_value = (uint32_t)value;
    return status;
}

kv_status_t kvw_gguf_i32(const struct kvw_gguf *gguf, const char *key, int32_t *ret_value)
{
    struct integer integer;
    kv_status_t status = find_integer(gguf, key, &integer);

    if (status == KV_OK &&
        (integer.negative ? (int64_t)integer.bits < INT32_MIN : integer.bits > INT32_MAX))
        status = KV_INVALID;
    if (status == KV_OK)
        *ret_value = (int32_t)(int64_t)integer.bits;
    return status;
}

kv_status_t kvw_gguf_f32(const struct kvw_gguf *gguf, const char *key, float *ret_value)
{
    const struct kvw_gguf_value *value = find_value(gguf, key);

    if (value == NULL)
        return KV_NOT_FOUND;
    if (value->type != KVW_GGUF_F32 && value->type != KVW_GGUF_F64)
        return KV_INVALID;
    *ret_value = load_float(value->type, value->at);
    return KV_OK;
}

kv_status_t kvw_gguf_bool(const struct kvw_gguf *gguf, const char *key, bool *ret_value)
{
    const struct kvw_gguf_value *value = find_value(gguf, key);

    if (value == NULL)
        return KV_NOT_FOUND;
    if (value->type != KVW_GGUF_BOOL)
        return KV_INVALID;
    *ret_value = *value->at != 0;
    return KV_OK;
}

kv_status_t
kvw_gguf_text(const struct kvw_gguf *gguf, const char *key, struct kvw_text *ret_value)
{
    const struct kvw_gguf_value *value = find_value(gguf, key);

    if (value == NULL)
        return KV_NOT_FOUND;
    if (value->type != KVW_GGUF_STRING)
        return KV_INVALID;
    *ret_value = load_text(value->at);
    return KV_OK;
}

static kv_status_t find_array(const struct kvw_gguf *gguf,
                              const char *key,
                              bool (*fits)(uint32_t type),
                              struct kvw_gguf_array *ret_array)
{
    const struct kvw_gguf_value *value = find_value(gguf, key);

    if (value == NULL)
        return KV_NOT_FOUND;
    if (value->type != KVW_GGUF_ARRAY || !fits(value->array.type))
        return KV_INVALID;
    *ret_array = value->array;
    return KV_OK;
}

static bool is_float(uint32_t type)
{
    return type == KVW_GGUF_F32 || type == KVW_GGUF_F64;
}

static bool is_string(uint32_t type)
{
    return type == KVW_GGUF_STRING;
}

kv_status_t kvw_gguf_array_ints(const struct kvw_gguf *gguf,
                                const char *key,
                                struct kvw_gguf_array *ret_array)
{
    return find_array(gguf, key, is_integer, ret_array);
}

kv_status_t kvw_gguf_array_floats(const struct kvw_gguf *gguf,
                                  const char *key,
                                  struct kvw_gguf_array *ret_array)
{
    return find_array(gguf, key, is_float, ret_array);
}

kv_status_t kvw_gguf_array_texts(const struct kvw_gguf *gguf,
                                 const char *key,
                                 struct kvw_gguf_array *ret_array)
{
    return find_array(gguf, key, is_string, ret_array);
}

static const unsigned char *element_at(const struct kvw_gguf_array *array, uint64_t index)
{
    assert(index < array->count);
    return (const unsigned char *)array->elements +
           index * kvw_gguf_value_types[array->type].bytes;
}

int64_t kvw_gguf_array_int(const struct kvw_gguf_array *array, uint64_t index)
{
    struct integer integer = load_integer(array->type, element_at(array, index));

    return !integer.negative && integer.bits > INT64_MAX ? INT64_MAX : (int64_t)integer.bits;
}

float kvw_gguf_array_float(const struct kvw_gguf_array *array, uint64_t index)
{
    assert(is_float(array->type));
    return load_float(array->type, element_at(array, index));
}

struct kvw_text kvw_gguf_array_text(const struct kvw_gguf_array *array, uint64_t index)
{
    assert(array->type == KVW_GGUF_STRING && index < array->count);
    return load_text((const unsigned char *)array->elements + array->string_offsets[index]);
}

size_t kvw_gguf_n_values(const struct kvw_gguf *gguf)
{
    return gguf->n_values;
}

void kvw_gguf_value_at(const struct kvw_gguf *gguf,
                       size_t index,
                       struct kvw_text *ret_key,
                       enum kvw_gguf_type *ret_type)
{
    assert(index < gguf->n_values);
    *ret_key = gguf->values[index].key;
    *ret_type = gguf->values[index].type;
}

kv_status_t
kvw_gguf_format(const struct kvw_gguf *gguf, const char *key, char *text, size_t text_bytes)
{
    const struct kvw_gguf_value *value = find_value(gguf, key);
    struct integer integer;

    text[0] = '\0';
    if (value == NULL)
        return KV_NOT_FOUND;
    switch (value->type) {
    case KVW_GGUF_STRING:
        snprintf(text, text_bytes, "'%s'", kvw_show(load_text(value->at)).text);
        break;
    case KVW_GGUF_ARRAY:
        snprintf(text, text_bytes, "[%s x %" PRIu64 "]",
                 kvw_gguf_value_types[value->array.type].name, value->array.count);
        break;
    case KVW_GGUF_BOOL:
        snprintf(text, text_bytes, "%s", *value->at != 0 ? "true" : "false");
        break;
    case KVW_GGUF_F32:
    case KVW_GGUF_F64:
        snprintf(text, text_bytes, "%g", (double)load_float(value->type, value->at));
        break;
    default:
        integer = load_integer(value->type, value->at);
        if (integer.negative)
            snprintf(text, text_bytes, "%" PRId64, (int64_t)integer.bits);
        else
            snprintf(text, text_bytes, "%" PRIu64, integer.bits);
        break;
    }
    return KV_OK;
}
