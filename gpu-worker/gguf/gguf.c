#include "gpu-worker/gguf/gguf.h"

#include "gpu-worker/gguf/gguf_guard.h"

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

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file is read as it lies");

enum {
    HEADER_BYTES = 24,
    VALUE_BYTES_MIN = 8 + 1 + 4 + 1, /* key, type, value */
    TENSOR_BYTES_MIN = 8 + 1 + 4 + 8 + 4 + 8,
    KEY_BYTES_MAX = 65535,      /* the format's own limit */
    TENSOR_NAME_BYTES_MAX = 64, /* likewise */
    ARRAY_DEPTH_MAX = 4,
    ALIGNMENT_DEFAULT = 32,
    ALIGNMENT_MIN = 8,
    ALIGNMENT_MAX = 1 << 20,
};

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

/* --- Types --- */

static const struct kv_tensor_layout layouts[] = {
    {KV_TENSOR_F32, "F32", 1, 4},       {KV_TENSOR_F16, "F16", 1, 2},
    {KV_TENSOR_Q4_0, "Q4_0", 32, 18},   {KV_TENSOR_Q4_1, "Q4_1", 32, 20},
    {KV_TENSOR_Q5_0, "Q5_0", 32, 22},   {KV_TENSOR_Q5_1, "Q5_1", 32, 24},
    {KV_TENSOR_Q8_0, "Q8_0", 32, 34},   {KV_TENSOR_Q4_K, "Q4_K", 256, 144},
    {KV_TENSOR_Q5_K, "Q5_K", 256, 176}, {KV_TENSOR_Q6_K, "Q6_K", 256, 210},
    {KV_TENSOR_BF16, "BF16", 1, 2},
};

const struct kv_tensor_layout *kv_tensor_layout_at(size_t index)
{
    return index < sizeof(layouts) / sizeof(*layouts) ? &layouts[index] : NULL;
}

const struct kv_tensor_layout *kv_tensor_layout(uint32_t type)
{
    for (size_t i = 0; kv_tensor_layout_at(i) != NULL; i++) {
        if ((uint32_t)layouts[i].type == type)
            return &layouts[i];
    }
    return NULL;
}

size_t kv_tensor_row_bytes(enum kv_tensor_type type, size_t n_elements)
{
    const struct kv_tensor_layout *layout = kv_tensor_layout((uint32_t)type);

    assert(layout != NULL && n_elements % layout->block_elements == 0);
    return n_elements / layout->block_elements * layout->block_bytes;
}

uint64_t kv_tensor_rows(const struct kv_tensor *tensor)
{
    return tensor->dims[1] * tensor->dims[2] * tensor->dims[3];
}

/* By number; bytes 0: of no fixed size. */
static const struct {
    const char *name;
    uint32_t bytes;
} value_types[] = {
    [KV_GGUF_U8] = {"u8", 1},         [KV_GGUF_I8] = {"i8", 1},
    [KV_GGUF_U16] = {"u16", 2},       [KV_GGUF_I16] = {"i16", 2},
    [KV_GGUF_U32] = {"u32", 4},       [KV_GGUF_I32] = {"i32", 4},
    [KV_GGUF_F32] = {"f32", 4},       [KV_GGUF_BOOL] = {"bool", 1},
    [KV_GGUF_STRING] = {"string", 0}, [KV_GGUF_ARRAY] = {"array", 0},
    [KV_GGUF_U64] = {"u64", 8},       [KV_GGUF_I64] = {"i64", 8},
    [KV_GGUF_F64] = {"f64", 8},
};

static bool is_value_type(uint32_t type)
{
    return type < sizeof(value_types) / sizeof(*value_types);
}

const char *kv_gguf_type_name(uint32_t type)
{
    return is_value_type(type) ? value_types[type].name : "unknown";
}

static bool is_integer(uint32_t type)
{
    return type <= KV_GGUF_I32 || type == KV_GGUF_U64 || type == KV_GGUF_I64;
}

bool kv_text_is(struct kv_text text, const char *string)
{
    return text.bytes == strlen(string) && memcmp(text.data, string, text.bytes) == 0;
}

static int compare_texts(struct kv_text a, struct kv_text b)
{
    size_t bytes = a.bytes < b.bytes ? a.bytes : b.bytes;
    int order = bytes > 0 ? memcmp(a.data, b.data, bytes) : 0;

    return order != 0 ? order : (a.bytes > b.bytes) - (a.bytes < b.bytes);
}

static int compare_entries(const void *a, const void *b)
{
    return compare_texts(((const struct entry *)a)->name, ((const struct entry *)b)->name);
}

/* --- Reading --- */

struct reader {
    struct kv_gguf *gguf;
    uint64_t at; /* never beyond gguf->bytes */
    struct kv_detail detail;
};

static uint64_t left(const struct reader *reader)
{
    return reader->gguf->bytes - reader->at;
}

static bool take_u32(struct reader *reader, uint32_t *ret_value)
{
    if (left(reader) < sizeof(*ret_value))
        return false;
    memcpy(ret_value, reader->gguf->data + reader->at, sizeof(*ret_value));
    reader->at += sizeof(*ret_value);
    return true;
}

static bool take_u64(struct reader *reader, uint64_t *ret_value)
{
    if (left(reader) < sizeof(*ret_value))
        return false;
    memcpy(ret_value, reader->gguf->data + reader->at, sizeof(*ret_value));
    reader->at += sizeof(*ret_value);
    return true;
}

static bool take_text(struct reader *reader, struct kv_text *ret_text)
{
    uint64_t bytes;

    if (!take_u64(reader, &bytes) || bytes > left(reader))
        return false;
    *ret_text = (struct kv_text){(const char *)reader->gguf->data + reader->at, bytes};
    reader->at += bytes;
    return true;
}

/* NULL on success, else what is wrong. */
static const char *take_numbers(struct reader *reader, uint32_t type, uint64_t count)
{
    uint32_t bytes = value_types[type].bytes;
    const unsigned char *at = reader->gguf->data + reader->at;

    if (count > left(reader) / bytes)
        return "ends outside of the file";
    if (type == KV_GGUF_BOOL) {
        for (uint64_t i = 0; i < count; i++) {
            if (at[i] > 1)
                return "a boolean is neither 0 nor 1";
        }
    }
    reader->at += count * bytes;
    return NULL;
}

/* The elements of an array.  `string_offsets` (count) is NULL where nobody asks for them. */
static const char *take_elements(
    struct reader *reader, uint32_t type, uint64_t count, uint64_t *string_offsets, int depth)
{
    uint64_t begin = reader->at;

    if (type != KV_GGUF_STRING && type != KV_GGUF_ARRAY)
        return take_numbers(reader, type, count);
    for (uint64_t i = 0; i < count; i++) {
        struct kv_text text;
        uint32_t inner_type;
        uint64_t inner_count;
        const char *wrong;

        if (string_offsets != NULL)
            string_offsets[i] = reader->at - begin;
        if (type == KV_GGUF_STRING) {
            if (!take_text(reader, &text))
                return "a string ends outside of the file";
            continue;
        }
        if (!take_u32(reader, &inner_type) || !take_u64(reader, &inner_count))
            return "ends outside of the file";
        if (!is_value_type(inner_type))
            return "an array of an unknown type";
        if (depth == ARRAY_DEPTH_MAX)
            return "arrays nested too deeply";
        wrong = take_elements(reader, inner_type, inner_count, NULL, depth + 1);
        if (wrong != NULL)
            return wrong;
    }
    return NULL;
}

static kv_status_t take_array(struct reader *reader, struct value *value)
{
    struct kv_shown key = kv_show(value->key);
    uint32_t type;
    uint64_t count, begin, bytes_min;
    const char *wrong;

    if (!take_u32(reader, &type) || !take_u64(reader, &count))
        return kv_detail(&reader->detail, KV_INVALID, "key '%s': ends outside of the file",
                         key.text);
    if (!is_value_type(type))
        return kv_detail(&reader->detail, KV_INVALID,
                         "key '%s': array of unknown type %" PRIu32, key.text, type);
    bytes_min = type == KV_GGUF_STRING  ? 8
                : type == KV_GGUF_ARRAY ? 12
                                        : value_types[type].bytes;
    if (count > left(reader) / bytes_min)
        return kv_detail(&reader->detail, KV_INVALID,
                         "key '%s': %" PRIu64 " elements in a file of %" PRIu64 " bytes",
                         key.text, count, reader->gguf->bytes);
    if (type == KV_GGUF_STRING && count > 0) {
        value->string_offsets = malloc(count * sizeof(*value->string_offsets));
        if (value->string_offsets == NULL)
            return kv_detail(&reader->detail, KV_NO_MEMORY, "key '%s': no memory", key.text);
    }
    begin = reader->at;
    wrong = take_elements(reader, type, count, value->string_offsets, 1);
    if (wrong != NULL)
        return kv_detail(&reader->detail, KV_INVALID, "key '%s': %s", key.text, wrong);
    value->array = (struct kv_gguf_array){
        .type = type,
        .count = count,
        .elements = type == KV_GGUF_ARRAY ? NULL : reader->gguf->data + begin,
        .string_offsets = value->string_offsets,
    };
    return KV_OK;
}

static kv_status_t take_value(struct reader *reader, struct value *value, uint64_t index)
{
    struct kv_shown key;
    struct kv_text text;
    uint32_t type;
    const char *wrong;

    if (!take_text(reader, &value->key))
        return kv_detail(&reader->detail, KV_INVALID,
                         "key %" PRIu64 " ends outside of the file of %" PRIu64 " bytes", index,
                         reader->gguf->bytes);
    key = kv_show(value->key);
    if (value->key.bytes == 0 || value->key.bytes > KEY_BYTES_MAX)
        return kv_detail(&reader->detail, KV_INVALID, "key %" PRIu64 ": a name of %zu bytes",
                         index, value->key.bytes);
    if (!take_u32(reader, &type))
        return kv_detail(&reader->detail, KV_INVALID, "key '%s': ends outside of the file",
                         key.text);
    if (!is_value_type(type))
        return kv_detail(&reader->detail, KV_INVALID, "key '%s': unknown type %" PRIu32,
                         key.text, type);
    value->type = type;
    value->at = reader->gguf->data + reader->at;
    if (type == KV_GGUF_ARRAY)
        return take_array(reader, value);
    if (type == KV_GGUF_STRING)
        wrong = take_text(reader, &text) ? NULL : "a string ends outside of the file";
    else
        wrong = take_numbers(reader, type, 1);
    if (wrong != NULL)
        return kv_detail(&reader->detail, KV_INVALID, "key '%s': %s", key.text, wrong);
    return KV_OK;
}

/* Sorts `entries` and finds a name that is there twice. */
static const struct entry *sort_entries(struct entry *entries, size_t count)
{
    if (count > 0)
        qsort(entries, count, sizeof(*entries), compare_entries);
    for (size_t i = 1; i < count; i++) {
        if (compare_entries(&entries[i - 1], &entries[i]) == 0)
            return &entries[i];
    }
    return NULL;
}

static const struct entry *
find_entry(const struct entry *entries, size_t count, const char *name)
{
    struct entry wanted = {.name = {name, strlen(name)}};

    return count > 0 ? bsearch(&wanted, entries, count, sizeof(*entries), compare_entries)
                     : NULL;
}

static kv_status_t take_values(struct reader *reader, uint64_t count)
{
    struct kv_gguf *gguf = reader->gguf;
    const struct entry *twice;
    kv_status_t status;

    if (count > left(reader) / VALUE_BYTES_MIN)
        return kv_detail(&reader->detail, KV_INVALID,
                         "%" PRIu64 " keys in a file of %" PRIu64 " bytes", count, gguf->bytes);
    gguf->values = calloc(count + 1, sizeof(*gguf->values));
    gguf->values_by_name = calloc(count + 1, sizeof(*gguf->values_by_name));
    if (gguf->values == NULL || gguf->values_by_name == NULL)
        return kv_detail(&reader->detail, KV_NO_MEMORY, "no memory for %" PRIu64 " keys",
                         count);
    for (size_t i = 0; i < count; i++) {
        /* Counted first: what a value that fails has allocated is freed with the others. */
        gguf->n_values = i + 1;
        status = take_value(reader, &gguf->values[i], i);
        if (status != KV_OK)
            return status;
        gguf->values_by_name[i] = (struct entry){gguf->values[i].key, i};
    }
    twice = sort_entries(gguf->values_by_name, gguf->n_values);
    if (twice != NULL)
        return kv_detail(&reader->detail, KV_INVALID, "key '%s': given twice",
                         kv_show(twice->name).text);
    return KV_OK;
}

static kv_status_t read_alignment(struct reader *reader)
{
    struct kv_gguf *gguf = reader->gguf;
    uint32_t alignment = ALIGNMENT_DEFAULT;
    kv_status_t status = kv_gguf_u32(gguf, "general.alignment", &alignment);

    if (status == KV_INVALID)
        return kv_detail(&reader->detail, KV_INVALID,
                         "key 'general.alignment': not a 32-bit number");
    if (alignment < ALIGNMENT_MIN || alignment > ALIGNMENT_MAX ||
        (alignment & (alignment - 1)) != 0)
        return kv_detail(&reader->detail, KV_INVALID, "key 'general.alignment': %" PRIu32,
                         alignment);
    gguf->alignment = alignment;
    return KV_OK;
}

/* `bytes` and `n_dims` from what the file says; false: the product overflows or a row is no
 * whole number of blocks. */
static bool measure(struct kv_tensor *tensor, const struct kv_tensor_layout *layout)
{
    uint64_t bytes;

    if (tensor->dims[0] % layout->block_elements != 0 ||
        __builtin_mul_overflow(tensor->dims[0] / layout->block_elements,
                               (uint64_t)layout->block_bytes, &bytes))
        return false;
    for (uint32_t i = 1; i < KV_GGUF_DIMS_MAX; i++) {
        if (__builtin_mul_overflow(bytes, tensor->dims[i], &bytes))
            return false;
    }
    tensor->bytes = bytes;
    return bytes <= INT64_MAX;
}

static kv_status_t take_tensor(struct reader *reader, struct kv_tensor *tensor, uint64_t index)
{
    const struct kv_tensor_layout *layout;
    struct kv_shown name;
    uint32_t type;

    if (!take_text(reader, &tensor->name))
        return kv_detail(&reader->detail, KV_INVALID,
                         "tensor %" PRIu64 ": its name ends outside of the file of %" PRIu64
                         " bytes",
                         index, reader->gguf->bytes);
    name = kv_show(tensor->name);
    if (tensor->name.bytes == 0 || tensor->name.bytes > TENSOR_NAME_BYTES_MAX)
        return kv_detail(&reader->detail, KV_INVALID, "tensor %" PRIu64 ": a name of %zu bytes",
                         index, tensor->name.bytes);
    if (!take_u32(reader, &tensor->n_dims))
        return kv_detail(&reader->detail, KV_INVALID, "tensor '%s': ends outside of the file",
                         name.text);
    if (tensor->n_dims == 0 || tensor->n_dims > KV_GGUF_DIMS_MAX)
        return kv_detail(&reader->detail, KV_INVALID, "tensor '%s': %" PRIu32 " dimensions",
                         name.text, tensor->n_dims);
    for (uint32_t i = 0; i < KV_GGUF_DIMS_MAX; i++) {
        tensor->dims[i] = 1;
        if (i < tensor->n_dims && !take_u64(reader, &tensor->dims[i]))
            return kv_detail(&reader->detail, KV_INVALID,
                             "tensor '%s': ends outside of the file", name.text);
        if (tensor->dims[i] == 0)
            return kv_detail(&reader->detail, KV_INVALID,
                             "tensor '%s': dimension %" PRIu32 ": 0", name.text, i);
    }
    if (!take_u32(reader, &type) || !take_u64(reader, &tensor->offset))
        return kv_detail(&reader->detail, KV_INVALID, "tensor '%s': ends outside of the file",
                         name.text);
    layout = kv_tensor_layout(type);
    if (layout == NULL)
        return kv_detail(&reader->detail, KV_UNSUPPORTED,
                         "tensor '%s': type %" PRIu32 " is not supported", name.text, type);
    tensor->type = layout->type;
    if (!measure(tensor, layout))
        return kv_detail(&reader->detail, KV_INVALID,
                         "tensor '%s': impossible shape for %s: %" PRIu64 " %" PRIu64
                         " %" PRIu64 " %" PRIu64,
                         name.text, layout->name, tensor->dims[0], tensor->dims[1],
                         tensor->dims[2], tensor->dims[3]);
    return KV_OK;
}

static int compare_offsets(const void *a, const void *b)
{
    uint64_t left_offset = (*(const struct kv_tensor *const *)a)->offset;
    uint64_t right_offset = (*(const struct kv_tensor *const *)b)->offset;

    return (left_offset > right_offset) - (left_offset < right_offset);
}

static kv_status_t check_overlaps(struct reader *reader)
{
    struct kv_gguf *gguf = reader->gguf;
    const struct kv_tensor **order =
        calloc(gguf->n_tensors + 1, sizeof(const struct kv_tensor *));
    kv_status_t status = KV_OK;

    if (order == NULL)
        return kv_detail(&reader->detail, KV_NO_MEMORY, "no memory for %zu tensors",
                         gguf->n_tensors);
    for (size_t i = 0; i < gguf->n_tensors; i++)
        order[i] = &gguf->tensors[i];
    qsort(order, gguf->n_tensors, sizeof(const struct kv_tensor *), compare_offsets);
    for (size_t i = 1; i < gguf->n_tensors && status == KV_OK; i++) {
        if (order[i]->offset < order[i - 1]->offset + order[i - 1]->bytes)
            status = kv_detail(&reader->detail, KV_INVALID,
                               "tensor '%s': overlaps tensor '%s' at byte %" PRIu64,
                               kv_show(order[i]->name).text, kv_show(order[i - 1]->name).text,
                               order[i]->offset);
    }
    free(order);
    return status;
}

/* From offsets as the file has them to places in the file. */
static kv_status_t place_tensors(struct reader *reader)
{
    struct kv_gguf *gguf = reader->gguf;
    /* `at` is at most the file's size, far from overflowing. */
    uint64_t begin = (reader->at + gguf->alignment - 1) & ~(uint64_t)(gguf->alignment - 1);

    for (size_t i = 0; i < gguf->n_tensors; i++) {
        struct kv_tensor *tensor = &gguf->tensors[i];

        if (tensor->offset % gguf->alignment != 0)
            return kv_detail(&reader->detail, KV_INVALID,
                             "tensor '%s': offset %" PRIu64 " is no multiple of %" PRIu32,
                             kv_show(tensor->name).text, tensor->offset, gguf->alignment);
        if (begin > gguf->bytes || tensor->offset > gguf->bytes - begin ||
            tensor->bytes > gguf->bytes - begin - tensor->offset)
            return kv_detail(&reader->detail, KV_INVALID,
                             "tensor '%s': %" PRIu64 " bytes at offset %" PRIu64
                             " end outside of the file of %" PRIu64 " bytes",
                             kv_show(tensor->name).text, tensor->bytes, tensor->offset,
                             gguf->bytes);
        tensor->offset += begin;
        tensor->data = gguf->data + tensor->offset;
    }
    return check_overlaps(reader);
}

static kv_status_t take_tensors(struct reader *reader, uint64_t count)
{
    struct kv_gguf *gguf = reader->gguf;
    const struct entry *twice;
    kv_status_t status;

    gguf->tensors = calloc(count + 1, sizeof(*gguf->tensors));
    gguf->tensors_by_name = calloc(count + 1, sizeof(*gguf->tensors_by_name));
    if (gguf->tensors == NULL || gguf->tensors_by_name == NULL)
        return kv_detail(&reader->detail, KV_NO_MEMORY, "no memory for %" PRIu64 " tensors",
                         count);
    for (size_t i = 0; i < count; i++) {
        status = take_tensor(reader, &gguf->tensors[i], i);
        if (status != KV_OK)
            return status;
        gguf->tensors_by_name[i] = (struct entry){gguf->tensors[i].name, i};
    }
    gguf->n_tensors = count;
    twice = sort_entries(gguf->tensors_by_name, gguf->n_tensors);
    if (twice != NULL)
        return kv_detail(&reader->detail, KV_INVALID, "tensor '%s': given twice",
                         kv_show(twice->name).text);
    return place_tensors(reader);
}

static kv_status_t read_all(struct reader *reader)
{
    struct kv_gguf *gguf = reader->gguf;
    uint64_t n_tensors, n_values;
    kv_status_t status;

    if (gguf->bytes < HEADER_BYTES || memcmp(gguf->data, "GGUF", 4) != 0)
        return kv_detail(&reader->detail, KV_INVALID, "not a GGUF file");
    reader->at = 4;
    take_u32(reader, &gguf->version);
    take_u64(reader, &n_tensors);
    take_u64(reader, &n_values);
    if (gguf->version == __builtin_bswap32(2) || gguf->version == __builtin_bswap32(3))
        return kv_detail(&reader->detail, KV_UNSUPPORTED, "a big-endian GGUF file");
    if (gguf->version != 2 && gguf->version != 3)
        return kv_detail(&reader->detail, KV_UNSUPPORTED,
                         "GGUF version %" PRIu32 ": only 2 and 3 are read", gguf->version);
    if (n_tensors > left(reader) / TENSOR_BYTES_MIN)
        return kv_detail(&reader->detail, KV_INVALID,
                         "%" PRIu64 " tensors in a file of %" PRIu64 " bytes", n_tensors,
                         gguf->bytes);
    status = take_values(reader, n_values);
    if (status == KV_OK)
        status = read_alignment(reader);
    if (status == KV_OK)
        status = take_tensors(reader, n_tensors);
    return status;
}

/* --- Open and close --- */

static kv_status_t map_file(struct reader *reader)
{
    struct kv_gguf *gguf = reader->gguf;
    /* A pipe must not make it wait for a writer: it is refused below. */
    int file = open(gguf->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    kv_status_t status = KV_OK;
    struct stat about;
    void *data;

    if (file < 0) {
        status = errno == ENOENT || errno == ENOTDIR ? KV_NOT_FOUND : KV_IO;
        return kv_detail(&reader->detail, status, "%s", strerror(errno));
    }
    if (fstat(file, &about) != 0) {
        status = kv_detail(&reader->detail, KV_IO, "%s", strerror(errno));
    } else if (!S_ISREG(about.st_mode)) {
        status = kv_detail(&reader->detail, KV_INVALID, "not a file");
    } else if (about.st_size == 0) {
        status = kv_detail(&reader->detail, KV_INVALID, "not a GGUF file: it is empty");
    } else {
        data = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_SHARED, file, 0);
        if (data == MAP_FAILED) {
            status = kv_detail(&reader->detail, KV_IO, "cannot be mapped: %s", strerror(errno));
        } else {
            gguf->data = data;
            gguf->bytes = (uint64_t)about.st_size;
            gguf->mapped = true;
            kv_gguf_guard_add(data, gguf->bytes, gguf->path);
        }
    }
    close(file);
    return status;
}

/* `data` NULL: from the file. */
static kv_status_t open_any(const void *data,
                            size_t bytes,
                            const char *path,
                            struct kv_gguf **ret_gguf,
                            char *detail,
                            size_t detail_bytes)
{
    struct reader reader = {.detail = {detail, detail_bytes, path}};
    kv_status_t status = KV_OK;

    reader.gguf = calloc(1, sizeof(*reader.gguf));
    if (reader.gguf == NULL || (reader.gguf->path = strdup(path)) == NULL) {
        snprintf(detail, detail_bytes, "%s: no memory", path);
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
        status = read_all(&reader);
    if (status != KV_OK)
        goto failed;
    *ret_gguf = reader.gguf;
    return KV_OK;
failed:
    kv_gguf_close(reader.gguf);
    return status;
}

kv_status_t
kv_gguf_open(const char *path, struct kv_gguf **ret_gguf, char *detail, size_t detail_bytes)
{
    return open_any(NULL, 0, path, ret_gguf, detail, detail_bytes);
}

kv_status_t kv_gguf_open_memory(const void *data,
                                size_t bytes,
                                const char *name,
                                struct kv_gguf **ret_gguf,
                                char *detail,
                                size_t detail_bytes)
{
    assert(data != NULL);
    return open_any(data, bytes, name, ret_gguf, detail, detail_bytes);
}

void kv_gguf_close(struct kv_gguf *gguf)
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
        kv_gguf_guard_remove(gguf->data);
        munmap((void *)gguf->data, gguf->bytes);
    }
    free(gguf->path);
    free(gguf);
}

const char *kv_gguf_path(const struct kv_gguf *gguf)
{
    return gguf->path;
}

uint32_t kv_gguf_version(const struct kv_gguf *gguf)
{
    return gguf->version;
}

uint32_t kv_gguf_alignment(const struct kv_gguf *gguf)
{
    return gguf->alignment;
}

const void *kv_gguf_data(const struct kv_gguf *gguf)
{
    return gguf->data;
}

uint64_t kv_gguf_bytes(const struct kv_gguf *gguf)
{
    return gguf->bytes;
}

size_t kv_gguf_n_tensors(const struct kv_gguf *gguf)
{
    return gguf->n_tensors;
}

const struct kv_tensor *kv_gguf_tensor_at(const struct kv_gguf *gguf, size_t index)
{
    assert(index < gguf->n_tensors);
    return &gguf->tensors[index];
}

const struct kv_tensor *kv_gguf_tensor(const struct kv_gguf *gguf, const char *name)
{
    const struct entry *entry = find_entry(gguf->tensors_by_name, gguf->n_tensors, name);

    return entry != NULL ? &gguf->tensors[entry->index] : NULL;
}

/* --- Values --- */

static const struct value *find_value(const struct kv_gguf *gguf, const char *key)
{
    const struct entry *entry = find_entry(gguf->values_by_name, gguf->n_values, key);

    return entry != NULL ? &gguf->values[entry->index] : NULL;
}

/* An integer of any width: -2^63 to 2^64 - 1. */
struct integer {
    bool negative;
    uint64_t bits; /* two's complement where negative */
};

static struct integer load_integer(uint32_t type, const unsigned char *at)
{
    uint32_t bytes = value_types[type].bytes;
    bool is_signed =
        type == KV_GGUF_I8 || type == KV_GGUF_I16 || type == KV_GGUF_I32 || type == KV_GGUF_I64;
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

    if (type == KV_GGUF_F64) {
        memcpy(&wide, at, sizeof(wide));
        return (float)wide;
    }
    memcpy(&narrow, at, sizeof(narrow));
    return narrow;
}

static struct kv_text load_text(const unsigned char *at)
{
    uint64_t bytes;

    memcpy(&bytes, at, sizeof(bytes));
    return (struct kv_text){(const char *)at + sizeof(bytes), bytes};
}

static kv_status_t
find_integer(const struct kv_gguf *gguf, const char *key, struct integer *ret_integer)
{
    const struct value *value = find_value(gguf, key);

    if (value == NULL)
        return KV_NOT_FOUND;
    if (!is_integer(value->type))
        return KV_INVALID;
    *ret_integer = load_integer(value->type, value->at);
    return KV_OK;
}

kv_status_t kv_gguf_u64(const struct kv_gguf *gguf, const char *key, uint64_t *ret_value)
{
    struct integer integer;
    kv_status_t status = find_integer(gguf, key, &integer);

    if (status == KV_OK && integer.negative)
        status = KV_INVALID;
    if (status == KV_OK)
        *ret_value = integer.bits;
    return status;
}

kv_status_t kv_gguf_u32(const struct kv_gguf *gguf, const char *key, uint32_t *ret_value)
{
    uint64_t value;
    kv_status_t status = kv_gguf_u64(gguf, key, &value);

    if (status == KV_OK && value > UINT32_MAX)
        status = KV_INVALID;
    if (status == KV_OK)
        *ret_value = (uint32_t)value;
    return status;
}

kv_status_t kv_gguf_i32(const struct kv_gguf *gguf, const char *key, int32_t *ret_value)
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

kv_status_t kv_gguf_f32(const struct kv_gguf *gguf, const char *key, float *ret_value)
{
    const struct value *value = find_value(gguf, key);

    if (value == NULL)
        return KV_NOT_FOUND;
    if (value->type != KV_GGUF_F32 && value->type != KV_GGUF_F64)
        return KV_INVALID;
    *ret_value = load_float(value->type, value->at);
    return KV_OK;
}

kv_status_t kv_gguf_bool(const struct kv_gguf *gguf, const char *key, bool *ret_value)
{
    const struct value *value = find_value(gguf, key);

    if (value == NULL)
        return KV_NOT_FOUND;
    if (value->type != KV_GGUF_BOOL)
        return KV_INVALID;
    *ret_value = *value->at != 0;
    return KV_OK;
}

kv_status_t kv_gguf_text(const struct kv_gguf *gguf, const char *key, struct kv_text *ret_value)
{
    const struct value *value = find_value(gguf, key);

    if (value == NULL)
        return KV_NOT_FOUND;
    if (value->type != KV_GGUF_STRING)
        return KV_INVALID;
    *ret_value = load_text(value->at);
    return KV_OK;
}

static kv_status_t find_array(const struct kv_gguf *gguf,
                              const char *key,
                              bool (*fits)(uint32_t type),
                              struct kv_gguf_array *ret_array)
{
    const struct value *value = find_value(gguf, key);

    if (value == NULL)
        return KV_NOT_FOUND;
    if (value->type != KV_GGUF_ARRAY || !fits(value->array.type))
        return KV_INVALID;
    *ret_array = value->array;
    return KV_OK;
}

static bool is_float(uint32_t type)
{
    return type == KV_GGUF_F32 || type == KV_GGUF_F64;
}

static bool is_string(uint32_t type)
{
    return type == KV_GGUF_STRING;
}

kv_status_t
kv_gguf_array_ints(const struct kv_gguf *gguf, const char *key, struct kv_gguf_array *ret_array)
{
    return find_array(gguf, key, is_integer, ret_array);
}

kv_status_t kv_gguf_array_floats(const struct kv_gguf *gguf,
                                 const char *key,
                                 struct kv_gguf_array *ret_array)
{
    return find_array(gguf, key, is_float, ret_array);
}

kv_status_t kv_gguf_array_texts(const struct kv_gguf *gguf,
                                const char *key,
                                struct kv_gguf_array *ret_array)
{
    return find_array(gguf, key, is_string, ret_array);
}

static const unsigned char *element_at(const struct kv_gguf_array *array, uint64_t index)
{
    assert(index < array->count);
    return (const unsigned char *)array->elements + index * value_types[array->type].bytes;
}

int64_t kv_gguf_array_int(const struct kv_gguf_array *array, uint64_t index)
{
    struct integer integer = load_integer(array->type, element_at(array, index));

    return !integer.negative && integer.bits > INT64_MAX ? INT64_MAX : (int64_t)integer.bits;
}

float kv_gguf_array_float(const struct kv_gguf_array *array, uint64_t index)
{
    assert(is_float(array->type));
    return load_float(array->type, element_at(array, index));
}

struct kv_text kv_gguf_array_text(const struct kv_gguf_array *array, uint64_t index)
{
    assert(array->type == KV_GGUF_STRING && index < array->count);
    return load_text((const unsigned char *)array->elements + array->string_offsets[index]);
}

size_t kv_gguf_n_values(const struct kv_gguf *gguf)
{
    return gguf->n_values;
}

void kv_gguf_value_at(const struct kv_gguf *gguf,
                      size_t index,
                      struct kv_text *ret_key,
                      enum kv_gguf_type *ret_type)
{
    assert(index < gguf->n_values);
    *ret_key = gguf->values[index].key;
    *ret_type = gguf->values[index].type;
}

kv_status_t
kv_gguf_format(const struct kv_gguf *gguf, const char *key, char *text, size_t text_bytes)
{
    const struct value *value = find_value(gguf, key);
    struct integer integer;

    text[0] = '\0';
    if (value == NULL)
        return KV_NOT_FOUND;
    switch (value->type) {
    case KV_GGUF_STRING:
        snprintf(text, text_bytes, "'%s'", kv_show(load_text(value->at)).text);
        break;
    case KV_GGUF_ARRAY:
        snprintf(text, text_bytes, "[%s x %" PRIu64 "]", value_types[value->array.type].name,
                 value->array.count);
        break;
    case KV_GGUF_BOOL:
        snprintf(text, text_bytes, "%s", *value->at != 0 ? "true" : "false");
        break;
    case KV_GGUF_F32:
    case KV_GGUF_F64:
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
