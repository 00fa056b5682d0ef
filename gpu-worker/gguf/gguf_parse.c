/* Reads a GGUF file's header, values and list of tensors into the tables of struct kvw_gguf.
 *
 * The file is untrusted.  Every count is compared with the bytes that are left before memory is
 * allocated for it, using the least bytes that an element can have, so a small file cannot
 * cause a large allocation.  Offsets and products are checked for overflow, names for
 * duplicates, and tensors for overlaps. */
#include "gpu-worker/gguf/gguf_private.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEADER_BYTES = 24,
    VALUE_BYTES_MIN = 8 + 1 + 4 + 1, /* key, type, value */
    TENSOR_BYTES_MIN = 8 + 1 + 4 + 8 + 4 + 8,
    KEY_BYTES_MAX = 65535,      /* the format's own limit */
    TENSOR_NAME_BYTES_MAX = 64, /* the format's own limit */
    ARRAY_DEPTH_MAX = 4,        /* bounds the recursion; files have at most one level */
    ALIGNMENT_DEFAULT = 32,
    ALIGNMENT_MIN = 8,
    ALIGNMENT_MAX = 1 << 20,
};

static int compare_texts(struct kvw_text a, struct kvw_text b)
{
    size_t bytes = a.bytes < b.bytes ? a.bytes : b.bytes;
    int order = bytes > 0 ? memcmp(a.data, b.data, bytes) : 0;

    return order != 0 ? order : (a.bytes > b.bytes) - (a.bytes < b.bytes);
}

static int compare_entries(const void *a, const void *b)
{
    return compare_texts(((const struct kvw_gguf_entry *)a)->name,
                         ((const struct kvw_gguf_entry *)b)->name);
}

static uint64_t left(const struct kvw_gguf_reader *reader)
{
    return reader->gguf->bytes - reader->at;
}

static bool take_u32(struct kvw_gguf_reader *reader, uint32_t *ret_value)
{
    if (left(reader) < sizeof(*ret_value))
        return false;
    memcpy(ret_value, reader->gguf->data + reader->at, sizeof(*ret_value));
    reader->at += sizeof(*ret_value);
    return true;
}

static bool take_u64(struct kvw_gguf_reader *reader, uint64_t *ret_value)
{
    if (left(reader) < sizeof(*ret_value))
        return false;
    memcpy(ret_value, reader->gguf->data + reader->at, sizeof(*ret_value));
    reader->at += sizeof(*ret_value);
    return true;
}

static bool take_text(struct kvw_gguf_reader *reader, struct kvw_text *ret_text)
{
    uint64_t bytes;

    if (!take_u64(reader, &bytes) || bytes > left(reader))
        return false;
    *ret_text = (struct kvw_text){(const char *)reader->gguf->data + reader->at, bytes};
    reader->at += bytes;
    return true;
}

/* Skips and checks `count` numbers.  Returns NULL, or what is wrong with them. */
static const char *take_numbers(struct kvw_gguf_reader *reader, uint32_t type, uint64_t count)
{
    uint32_t bytes = kvw_gguf_value_types[type].bytes;
    const unsigned char *at = reader->gguf->data + reader->at;

    if (count > left(reader) / bytes)
        return "extends beyond the file";
    if (type == KVW_GGUF_BOOL) {
        for (uint64_t i = 0; i < count; i++) {
            if (at[i] > 1)
                return "a boolean is neither 0 nor 1";
        }
    }
    reader->at += count * bytes;
    return NULL;
}

/* Skips and checks the elements of an array.  Fills string_offsets (count) unless it is NULL.
 * Returns NULL, or what is wrong with them. */
static const char *take_elements(struct kvw_gguf_reader *reader,
                                 uint32_t type,
                                 uint64_t count,
                                 uint64_t *string_offsets,
                                 int depth)
{
    uint64_t begin = reader->at;

    if (type != KVW_GGUF_STRING && type != KVW_GGUF_ARRAY)
        return take_numbers(reader, type, count);
    for (uint64_t i = 0; i < count; i++) {
        struct kvw_text text;
        uint32_t inner_type;
        uint64_t inner_count;
        const char *wrong;

        if (string_offsets != NULL)
            string_offsets[i] = reader->at - begin;
        if (type == KVW_GGUF_STRING) {
            if (!take_text(reader, &text))
                return "a string extends beyond the file";
            continue;
        }
        if (!take_u32(reader, &inner_type) || !take_u64(reader, &inner_count))
            return "extends beyond the file";
        if (!kvw_gguf_is_value_type(inner_type))
            return "an array of an unknown type";
        if (depth == ARRAY_DEPTH_MAX)
            return "arrays nested too deeply";
        wrong = take_elements(reader, inner_type, inner_count, NULL, depth + 1);
        if (wrong != NULL)
            return wrong;
    }
    return NULL;
}

static kv_status_t take_array(struct kvw_gguf_reader *reader, struct kvw_gguf_value *value)
{
    struct kvw_shown key = kvw_show(value->key);
    uint32_t type;
    uint64_t count, begin, bytes_min;
    const char *wrong;

    if (!take_u32(reader, &type) || !take_u64(reader, &count))
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "key '%s': extends beyond the file", key.text);
    if (!kvw_gguf_is_value_type(type))
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "key '%s': array of unknown type %" PRIu32, key.text, type);
    bytes_min = type == KVW_GGUF_STRING  ? 8
                : type == KVW_GGUF_ARRAY ? 12
                                         : kvw_gguf_value_types[type].bytes;
    if (count > left(reader) / bytes_min)
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "key '%s': %" PRIu64 " elements in a file of %" PRIu64
                                  " bytes",
                                  key.text, count, reader->gguf->bytes);
    if (type == KVW_GGUF_STRING && count > 0) {
        value->string_offsets = malloc(count * sizeof(*value->string_offsets));
        if (value->string_offsets == NULL)
            return kvw_file_error_set(&reader->detail, KV_NO_MEMORY, "key '%s': out of memory",
                                      key.text);
    }
    begin = reader->at;
    wrong = take_elements(reader, type, count, value->string_offsets, 1);
    if (wrong != NULL)
        return kvw_file_error_set(&reader->detail, KV_INVALID, "key '%s': %s", key.text, wrong);
    value->array = (struct kvw_gguf_array){
        .type = type,
        .count = count,
        .elements = type == KVW_GGUF_ARRAY ? NULL : reader->gguf->data + begin,
        .string_offsets = value->string_offsets,
    };
    return KV_OK;
}

static kv_status_t
take_value(struct kvw_gguf_reader *reader, struct kvw_gguf_value *value, uint64_t index)
{
    struct kvw_shown key;
    struct kvw_text text;
    uint32_t type;
    const char *wrong;

    if (!take_text(reader, &value->key))
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "key %" PRIu64 " extends beyond the file of %" PRIu64
                                  " bytes",
                                  index, reader->gguf->bytes);
    key = kvw_show(value->key);
    if (value->key.bytes == 0 || value->key.bytes > KEY_BYTES_MAX)
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "key %" PRIu64 ": a name of %zu bytes", index,
                                  value->key.bytes);
    if (!take_u32(reader, &type))
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "key '%s': extends beyond the file", key.text);
    if (!kvw_gguf_is_value_type(type))
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "key '%s': unknown type %" PRIu32, key.text, type);
    value->type = type;
    value->at = reader->gguf->data + reader->at;
    if (type == KVW_GGUF_ARRAY)
        return take_array(reader, value);
    if (type == KVW_GGUF_STRING)
        wrong = take_text(reader, &text) ? NULL : "a string extends beyond the file";
    else
        wrong = take_numbers(reader, type, 1);
    if (wrong != NULL)
        return kvw_file_error_set(&reader->detail, KV_INVALID, "key '%s': %s", key.text, wrong);
    return KV_OK;
}

/* Sorts `entries` by name; returns an entry whose name another one has, NULL if none. */
static const struct kvw_gguf_entry *sort_entries(struct kvw_gguf_entry *entries, size_t count)
{
    if (count > 0)
        qsort(entries, count, sizeof(*entries), compare_entries);
    for (size_t i = 1; i < count; i++) {
        if (compare_entries(&entries[i - 1], &entries[i]) == 0)
            return &entries[i];
    }
    return NULL;
}

const struct kvw_gguf_entry *
kvw_gguf_find_entry(const struct kvw_gguf_entry *entries, size_t count, const char *name)
{
    struct kvw_gguf_entry wanted = {.name = {name, strlen(name)}};

    return count > 0 ? bsearch(&wanted, entries, count, sizeof(*entries), compare_entries)
                     : NULL;
}

static kv_status_t take_values(struct kvw_gguf_reader *reader, uint64_t count)
{
    struct kvw_gguf *gguf = reader->gguf;
    const struct kvw_gguf_entry *twice;
    kv_status_t status;

    if (count > left(reader) / VALUE_BYTES_MIN)
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "%" PRIu64 " keys in a file of %" PRIu64 " bytes", count,
                                  gguf->bytes);
    gguf->values = calloc(count + 1, sizeof(*gguf->values));
    gguf->values_by_name = calloc(count + 1, sizeof(*gguf->values_by_name));
    if (gguf->values == NULL || gguf->values_by_name == NULL)
        return kvw_file_error_set(&reader->detail, KV_NO_MEMORY,
                                  "out of memory: %" PRIu64 " keys", count);
    for (size_t i = 0; i < count; i++) {
        /* Counted first: what a value that fails has allocated is freed with the others. */
        gguf->n_values = i + 1;
        status = take_value(reader, &gguf->values[i], i);
        if (status != KV_OK)
            return status;
        gguf->values_by_name[i] = (struct kvw_gguf_entry){gguf->values[i].key, i};
    }
    twice = sort_entries(gguf->values_by_name, gguf->n_values);
    if (twice != NULL)
        return kvw_file_error_set(&reader->detail, KV_INVALID, "key '%s': duplicate",
                                  kvw_show(twice->name).text);
    return KV_OK;
}

static kv_status_t read_alignment(struct kvw_gguf_reader *reader)
{
    struct kvw_gguf *gguf = reader->gguf;
    uint32_t alignment = ALIGNMENT_DEFAULT;
    kv_status_t status = kvw_gguf_u32(gguf, "general.alignment", &alignment);

    if (status == KV_INVALID)
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "key 'general.alignment': not a 32-bit number");
    if (alignment < ALIGNMENT_MIN || alignment > ALIGNMENT_MAX ||
        (alignment & (alignment - 1)) != 0)
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "key 'general.alignment': %" PRIu32, alignment);
    gguf->alignment = alignment;
    return KV_OK;
}

/* Computes `bytes` and `n_dims` from the dimensions.  Returns false if the product overflows,
 * or a row is not a whole number of blocks. */
static bool measure(struct kvw_tensor *tensor, const struct kvw_tensor_layout *layout)
{
    uint64_t bytes;

    if (tensor->dims[0] % layout->block_elements != 0 ||
        __builtin_mul_overflow(tensor->dims[0] / layout->block_elements,
                               (uint64_t)layout->block_bytes, &bytes))
        return false;
    for (uint32_t i = 1; i < KVW_GGUF_DIMS_MAX; i++) {
        if (__builtin_mul_overflow(bytes, tensor->dims[i], &bytes))
            return false;
    }
    tensor->bytes = bytes;
    return bytes <= INT64_MAX;
}

static kv_status_t
take_tensor(struct kvw_gguf_reader *reader, struct kvw_tensor *tensor, uint64_t index)
{
    const struct kvw_tensor_layout *layout;
    struct kvw_shown name;
    uint32_t type;

    if (!take_text(reader, &tensor->name))
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "tensor %" PRIu64
                                  ": its name extends beyond the file of %" PRIu64 " bytes",
                                  index, reader->gguf->bytes);
    name = kvw_show(tensor->name);
    if (tensor->name.bytes == 0 || tensor->name.bytes > TENSOR_NAME_BYTES_MAX)
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "tensor %" PRIu64 ": a name of %zu bytes", index,
                                  tensor->name.bytes);
    if (!take_u32(reader, &tensor->n_dims))
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "tensor '%s': extends beyond the file", name.text);
    if (tensor->n_dims == 0 || tensor->n_dims > KVW_GGUF_DIMS_MAX)
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "tensor '%s': %" PRIu32 " dimensions", name.text,
                                  tensor->n_dims);
    for (uint32_t i = 0; i < KVW_GGUF_DIMS_MAX; i++) {
        tensor->dims[i] = 1;
        if (i < tensor->n_dims && !take_u64(reader, &tensor->dims[i]))
            return kvw_file_error_set(&reader->detail, KV_INVALID,
                                      "tensor '%s': extends beyond the file", name.text);
        if (tensor->dims[i] == 0)
            return kvw_file_error_set(&reader->detail, KV_INVALID,
                                      "tensor '%s': dimension %" PRIu32 ": 0", name.text, i);
    }
    if (!take_u32(reader, &type) || !take_u64(reader, &tensor->offset))
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "tensor '%s': extends beyond the file", name.text);
    layout = kvw_tensor_get_layout(type);
    if (layout == NULL)
        return kvw_file_error_set(&reader->detail, KV_UNSUPPORTED,
                                  "tensor '%s': type %" PRIu32 " is not supported", name.text,
                                  type);
    tensor->type = layout->type;
    if (!measure(tensor, layout))
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "tensor '%s': impossible shape for %s: %" PRIu64 " %" PRIu64
                                  " %" PRIu64 " %" PRIu64,
                                  name.text, layout->name, tensor->dims[0], tensor->dims[1],
                                  tensor->dims[2], tensor->dims[3]);
    return KV_OK;
}

static int compare_offsets(const void *a, const void *b)
{
    uint64_t left_offset = (*(const struct kvw_tensor *const *)a)->offset;
    uint64_t right_offset = (*(const struct kvw_tensor *const *)b)->offset;

    return (left_offset > right_offset) - (left_offset < right_offset);
}

static kv_status_t check_overlaps(struct kvw_gguf_reader *reader)
{
    struct kvw_gguf *gguf = reader->gguf;
    const struct kvw_tensor **order =
        calloc(gguf->n_tensors + 1, sizeof(const struct kvw_tensor *));
    kv_status_t status = KV_OK;

    if (order == NULL)
        return kvw_file_error_set(&reader->detail, KV_NO_MEMORY, "out of memory: %zu tensors",
                                  gguf->n_tensors);
    for (size_t i = 0; i < gguf->n_tensors; i++)
        order[i] = &gguf->tensors[i];
    qsort(order, gguf->n_tensors, sizeof(const struct kvw_tensor *), compare_offsets);
    for (size_t i = 1; i < gguf->n_tensors && status == KV_OK; i++) {
        if (order[i]->offset < order[i - 1]->offset + order[i - 1]->bytes)
            status = kvw_file_error_set(&reader->detail, KV_INVALID,
                                        "tensor '%s': overlaps tensor '%s' at byte %" PRIu64,
                                        kvw_show(order[i]->name).text,
                                        kvw_show(order[i - 1]->name).text, order[i]->offset);
    }
    free(order);
    return status;
}

/* Converts the file's offsets, which count from the tensors' data, to positions in the file. */
static kv_status_t place_tensors(struct kvw_gguf_reader *reader)
{
    struct kvw_gguf *gguf = reader->gguf;
    /* `at` is at most the file's size, far from overflowing. */
    uint64_t begin = (reader->at + gguf->alignment - 1) & ~(uint64_t)(gguf->alignment - 1);

    for (size_t i = 0; i < gguf->n_tensors; i++) {
        struct kvw_tensor *tensor = &gguf->tensors[i];

        if (tensor->offset % gguf->alignment != 0)
            return kvw_file_error_set(
                &reader->detail, KV_INVALID,
                "tensor '%s': offset %" PRIu64 " is not a multiple of %" PRIu32,
                kvw_show(tensor->name).text, tensor->offset, gguf->alignment);
        if (begin > gguf->bytes || tensor->offset > gguf->bytes - begin ||
            tensor->bytes > gguf->bytes - begin - tensor->offset)
            return kvw_file_error_set(&reader->detail, KV_INVALID,
                                      "tensor '%s': %" PRIu64 " bytes at offset %" PRIu64
                                      " extend beyond the file of %" PRIu64 " bytes",
                                      kvw_show(tensor->name).text, tensor->bytes,
                                      tensor->offset, gguf->bytes);
        tensor->offset += begin;
        tensor->data = gguf->data + tensor->offset;
    }
    return check_overlaps(reader);
}

static kv_status_t take_tensors(struct kvw_gguf_reader *reader, uint64_t count)
{
    struct kvw_gguf *gguf = reader->gguf;
    const struct kvw_gguf_entry *twice;
    kv_status_t status;

    gguf->tensors = calloc(count + 1, sizeof(*gguf->tensors));
    gguf->tensors_by_name = calloc(count + 1, sizeof(*gguf->tensors_by_name));
    if (gguf->tensors == NULL || gguf->tensors_by_name == NULL)
        return kvw_file_error_set(&reader->detail, KV_NO_MEMORY,
                                  "out of memory: %" PRIu64 " tensors", count);
    for (size_t i = 0; i < count; i++) {
        status = take_tensor(reader, &gguf->tensors[i], i);
        if (status != KV_OK)
            return status;
        gguf->tensors_by_name[i] = (struct kvw_gguf_entry){gguf->tensors[i].name, i};
    }
    gguf->n_tensors = count;
    twice = sort_entries(gguf->tensors_by_name, gguf->n_tensors);
    if (twice != NULL)
        return kvw_file_error_set(&reader->detail, KV_INVALID, "tensor '%s': duplicate",
                                  kvw_show(twice->name).text);
    return place_tensors(reader);
}

kv_status_t kvw_gguf_read_all(struct kvw_gguf_reader *reader)
{
    struct kvw_gguf *gguf = reader->gguf;
    uint64_t n_tensors = 0, n_values = 0;
    kv_status_t status;

    if (gguf->bytes < HEADER_BYTES || memcmp(gguf->data, "GGUF", 4) != 0)
        return kvw_file_error_set(&reader->detail, KV_INVALID, "not a GGUF file");
    reader->at = 4;
    take_u32(reader, &gguf->version);
    take_u64(reader, &n_tensors);
    take_u64(reader, &n_values);
    if (gguf->version == __builtin_bswap32(2) || gguf->version == __builtin_bswap32(3))
        return kvw_file_error_set(&reader->detail, KV_UNSUPPORTED, "a big-endian GGUF file");
    if (gguf->version != 2 && gguf->version != 3)
        return kvw_file_error_set(&reader->detail, KV_UNSUPPORTED,
                                  "GGUF version %" PRIu32 ": only 2 and 3 are supported",
                                  gguf->version);
    if (n_tensors > left(reader) / TENSOR_BYTES_MIN)
        return kvw_file_error_set(&reader->detail, KV_INVALID,
                                  "%" PRIu64 " tensors in a file of %" PRIu64 " bytes",
                                  n_tensors, gguf->bytes);
    status = take_values(reader, n_values);
    if (status == KV_OK)
        status = read_alignment(reader);
    if (status == KV_OK)
        status = take_tensors(reader, n_tensors);
    return status;
}
