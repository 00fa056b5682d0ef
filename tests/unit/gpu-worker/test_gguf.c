/* A GGUF file is read as it was written; and every way of breaking one that we know of ends in
 * one line that names what is wrong: cut off after every byte, every byte changed, each field
 * by hand. */
#define _GNU_SOURCE /* memmem */
#include "gpu-worker/gguf/gguf.h"
#include "kvserver/base/random.h"
#include "tests/support/gguf_maker.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static const char *const words[] = {"one", "", "three"};

/* Copied to exactly its size, so that a sanitizer sees every byte read beyond the end. */
static kv_status_t open_copy(
    const void *data, size_t bytes, struct kvw_gguf **ret_gguf, void **ret_copy, char *detail)
{
    void *exact = malloc(bytes > 0 ? bytes : 1);
    kv_status_t status;

    assert_non_null(exact);
    memcpy(exact, data, bytes);
    memset(detail, 'x', KVW_GGUF_DETAIL_BYTES);
    status =
        kvw_gguf_open_memory(exact, bytes, "test", ret_gguf, detail, KVW_GGUF_DETAIL_BYTES);
    if (status == KV_OK) {
        *ret_copy = exact;
        return status;
    }
    free(exact);
    assert_non_null(memchr(detail, '\0', KVW_GGUF_DETAIL_BYTES));
    assert_memory_equal(detail, "test: ", 6);
    return status;
}

/* Reads all that an open file shows. */
static uint64_t read_everything(const struct kvw_gguf *gguf)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < kvw_gguf_n_values(gguf); i++) {
        struct kvw_text key;
        enum kvw_gguf_type type;
        struct kvw_gguf_array array;
        struct kvw_text text;
        char name[256], shown[64];

        kvw_gguf_value_at(gguf, i, &key, &type);
        snprintf(name, sizeof(name), "%.*s", (int)(key.bytes < 255 ? key.bytes : 255),
                 key.data);
        kvw_gguf_format(gguf, name, shown, sizeof(shown));
        sum += (unsigned char)shown[0];
        if (kvw_gguf_text(gguf, name, &text) == KV_OK) {
            for (size_t j = 0; j < text.bytes; j++)
                sum += (unsigned char)text.data[j];
        }
        if (kvw_gguf_array_texts(gguf, name, &array) == KV_OK) {
            for (uint64_t j = 0; j < array.count; j++) {
                text = kvw_gguf_array_text(&array, j);
                sum += text.bytes > 0 ? (unsigned char)text.data[text.bytes - 1] : 0;
            }
        }
        if (kvw_gguf_array_ints(gguf, name, &array) == KV_OK) {
            for (uint64_t j = 0; j < array.count; j++)
                sum += (uint64_t)kvw_gguf_array_int(&array, j);
        }
        if (kvw_gguf_array_floats(gguf, name, &array) == KV_OK) {
            for (uint64_t j = 0; j < array.count; j++)
                sum += kvw_gguf_array_float(&array, j) > 0;
        }
    }
    for (size_t i = 0; i < kvw_gguf_n_tensors(gguf); i++) {
        const struct kvw_tensor *tensor = kvw_gguf_tensor_at(gguf, i);

        for (uint64_t j = 0; j < tensor->bytes; j++)
            sum += ((const unsigned char *)tensor->data)[j];
    }
    return sum;
}

/* A file with every type of value, and three tensors. */
static void make(struct gguf_maker *maker, uint32_t version)
{
    static const unsigned char scalars[8] = {0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    const uint64_t matrix[] = {256, 3}, vector[] = {5}, cube[] = {32, 2, 2, 1};
    const uint32_t numbers[] = {7, 0, 4000000000u};
    const float floats[] = {0.5f, -2.0f};
    const double wide = 0.25;

    maker_begin(maker, version);
    maker_key_string(maker, "general.architecture", "llama");
    maker_key_u32(maker, "general.alignment", 64);
    maker_key(maker, "a.u8", KVW_GGUF_U8);
    maker_bytes(maker, scalars, 1);
    maker_key(maker, "a.i8", KVW_GGUF_I8);
    maker_bytes(maker, scalars, 1);
    maker_key(maker, "a.u16", KVW_GGUF_U16);
    maker_bytes(maker, scalars, 2);
    maker_key(maker, "a.i16", KVW_GGUF_I16);
    maker_bytes(maker, scalars, 2);
    maker_key(maker, "a.i32", KVW_GGUF_I32);
    maker_bytes(maker, scalars, 4);
    maker_key(maker, "a.u64", KVW_GGUF_U64);
    maker_bytes(maker, scalars, 8);
    maker_key(maker, "a.i64", KVW_GGUF_I64);
    maker_bytes(maker, scalars, 8);
    maker_key(maker, "a.f64", KVW_GGUF_F64);
    maker_bytes(maker, &wide, 8);
    maker_key_f32(maker, "a.f32", 1.5f);
    maker_key_bool(maker, "a.bool", true);
    maker_key_strings(maker, "a.words", words, 3);
    maker_key_u32s(maker, "a.numbers", numbers, 3);
    maker_key_f32s(maker, "a.floats", floats, 2);
    maker_key_strings(maker, "a.nothing", NULL, 0);
    /* [[u32 1], [string "x"], []] */
    maker_key(maker, "a.nested", KVW_GGUF_ARRAY);
    maker_u32(maker, KVW_GGUF_ARRAY);
    maker_u64(maker, 3);
    maker_u32(maker, KVW_GGUF_U32);
    maker_u64(maker, 1);
    maker_u32(maker, 1);
    maker_u32(maker, KVW_GGUF_STRING);
    maker_u64(maker, 1);
    maker_string(maker, "x");
    maker_u32(maker, KVW_GGUF_ARRAY);
    maker_u64(maker, 0);
    maker_tensor(maker, "blk.0.attn_q.weight", 2, matrix, KVW_TENSOR_Q4_K, 0); /* 432 bytes */
    maker_tensor(maker, "norm", 1, vector, KVW_TENSOR_F32, 640);               /* 20 */
    maker_tensor(maker, "cube", 4, cube, KVW_TENSOR_Q8_0, 448);                /* 4 x 34 */
    maker_finish(maker, 64);
    for (int i = 0; i < 640; i++)
        maker_bytes(maker, &(unsigned char){(unsigned char)i}, 1);
    maker_bytes(maker, "0123456789abcdef0123", 20);
}

static void reads_what_was_written(void **state)
{
    for (uint32_t version = 2; version <= 3; version++) {
        struct gguf_maker maker = {0};
        struct kvw_gguf *gguf;
        struct kvw_gguf_array array;
        const struct kvw_tensor *tensor;
        char detail[KVW_GGUF_DETAIL_BYTES], shown[64];
        void *copy;
        uint32_t u32 = 0;
        int32_t i32 = 0;
        uint64_t u64 = 0;
        float f32 = 0;
        bool flag = false;
        struct kvw_text text;

        (void)state;
        make(&maker, version);
        assert_int_equal(open_copy(maker.data, maker.bytes, &gguf, &copy, detail), KV_OK);
        assert_int_equal(kvw_gguf_version(gguf), version);
        assert_int_equal(kvw_gguf_alignment(gguf), 64);
        assert_string_equal(kvw_gguf_path(gguf), "test");

        assert_int_equal(kvw_gguf_u32(gguf, "a.u8", &u32), KV_OK);
        assert_int_equal(u32, 0xfe);
        assert_int_equal(kvw_gguf_u32(gguf, "a.i8", &u32), KV_INVALID);
        assert_int_equal(kvw_gguf_i32(gguf, "a.i8", &i32), KV_OK);
        assert_int_equal(i32, -2);
        assert_int_equal(kvw_gguf_u32(gguf, "a.u16", &u32), KV_OK);
        assert_int_equal(u32, 0xfffe);
        assert_int_equal(kvw_gguf_i32(gguf, "a.i16", &i32), KV_OK);
        assert_int_equal(i32, -2);
        assert_int_equal(kvw_gguf_i32(gguf, "a.i64", &i32), KV_OK);
        assert_int_equal(i32, -2);
        assert_int_equal(kvw_gguf_u32(gguf, "a.u64", &u32), KV_INVALID);
        assert_int_equal(kvw_gguf_i32(gguf, "a.u64", &i32), KV_INVALID);
        assert_int_equal(kvw_gguf_u64(gguf, "a.u64", &u64), KV_OK);
        assert_true(u64 == UINT64_MAX - 1);
        assert_int_equal(kvw_gguf_u64(gguf, "a.i64", &u64), KV_INVALID);
        assert_int_equal(kvw_gguf_u64(gguf, "a.f32", &u64), KV_INVALID);
        assert_int_equal(kvw_gguf_f32(gguf, "a.f32", &f32), KV_OK);
        assert_true(f32 == 1.5f);
        assert_int_equal(kvw_gguf_f32(gguf, "a.f64", &f32), KV_OK);
        assert_true(f32 == 0.25f);
        assert_int_equal(kvw_gguf_f32(gguf, "a.u8", &f32), KV_INVALID);
        assert_int_equal(kvw_gguf_f32(gguf, "a.u9", &f32), KV_NOT_FOUND);
        assert_int_equal(kvw_gguf_bool(gguf, "a.bool", &flag), KV_OK);
        assert_true(flag);
        assert_int_equal(kvw_gguf_bool(gguf, "a.u8", &flag), KV_INVALID);
        assert_int_equal(kvw_gguf_text(gguf, "general.architecture", &text), KV_OK);
        assert_true(kvw_text_is(text, "llama"));
        assert_int_equal(kvw_gguf_text(gguf, "general.architectur", &text), KV_NOT_FOUND);
        assert_int_equal(kvw_gguf_text(gguf, "a.words", &text), KV_INVALID);

        assert_int_equal(kvw_gguf_array_texts(gguf, "a.words", &array), KV_OK);
        assert_int_equal(array.count, 3);
        for (int i = 0; i < 3; i++)
            assert_true(kvw_text_is(kvw_gguf_array_text(&array, (uint64_t)i), words[i]));
        assert_int_equal(kvw_gguf_array_ints(gguf, "a.words", &array), KV_INVALID);
        assert_int_equal(kvw_gguf_array_ints(gguf, "a.numbers", &array), KV_OK);
        assert_true(kvw_gguf_array_int(&array, 2) == 4000000000);
        assert_int_equal(kvw_gguf_array_floats(gguf, "a.floats", &array), KV_OK);
        assert_true(kvw_gguf_array_float(&array, 1) == -2.0f);
        assert_int_equal(kvw_gguf_array_texts(gguf, "a.nothing", &array), KV_OK);
        assert_int_equal(array.count, 0);
        assert_int_equal(kvw_gguf_array_texts(gguf, "a.nested", &array), KV_INVALID);
        assert_int_equal(kvw_gguf_array_ints(gguf, "a.u8", &array), KV_INVALID);

        assert_int_equal(kvw_gguf_format(gguf, "a.i64", shown, sizeof(shown)), KV_OK);
        assert_string_equal(shown, "-2");
        assert_int_equal(kvw_gguf_format(gguf, "a.words", shown, sizeof(shown)), KV_OK);
        assert_string_equal(shown, "[string x 3]");
        assert_int_equal(kvw_gguf_format(gguf, "b", shown, sizeof(shown)), KV_NOT_FOUND);

        assert_int_equal(kvw_gguf_n_tensors(gguf), 3);
        assert_null(kvw_gguf_tensor(gguf, "nor"));
        tensor = kvw_gguf_tensor(gguf, "blk.0.attn_q.weight");
        assert_non_null(tensor);
        assert_int_equal(tensor->type, KVW_TENSOR_Q4_K);
        assert_int_equal(tensor->n_dims, 2);
        assert_int_equal(tensor->dims[0], 256);
        assert_int_equal(tensor->dims[1], 3);
        assert_int_equal(tensor->dims[2], 1);
        assert_int_equal(tensor->bytes, 3 * 144);
        assert_int_equal(kvw_tensor_rows(tensor), 3);
        assert_int_equal(((const unsigned char *)tensor->data)[1], 1);
        tensor = kvw_gguf_tensor(gguf, "norm");
        assert_memory_equal(tensor->data, "0123456789abcdef0123", 20);
        assert_int_equal(tensor->offset % 64, 0);
        assert_int_not_equal(read_everything(gguf), 0);
        kvw_gguf_close(gguf);
        free(copy);
        maker_free(&maker);
    }
}

/* A small right file: what the tests below break. */
static void make_small(struct gguf_maker *maker)
{
    const uint64_t dims[] = {8, 2};

    maker_begin(maker, 3);
    maker_key_u32(maker, "n", 5);
    maker_key_strings(maker, "words", words, 3);
    maker_tensor(maker, "a", 2, dims, KVW_TENSOR_F16, 0);
    maker_tensor(maker, "b", 2, dims, KVW_TENSOR_F16, 32);
    maker_finish(maker, 32);
    for (int i = 0; i < 64; i++)
        maker_bytes(maker, "d", 1);
}

static void cut_off_anywhere(void **state)
{
    struct gguf_maker maker = {0};

    (void)state;
    make_small(&maker);
    for (size_t bytes = 0; bytes <= maker.bytes; bytes++) {
        char detail[KVW_GGUF_DETAIL_BYTES];
        struct kvw_gguf *gguf;
        void *copy;
        kv_status_t status = open_copy(maker.data, bytes, &gguf, &copy, detail);

        assert_int_equal(status, bytes < maker.bytes ? KV_INVALID : KV_OK);
        if (status == KV_OK) {
            kvw_gguf_close(gguf);
            free(copy);
        }
    }
    maker_free(&maker);
}

static void every_byte_changed(void **state)
{
    struct gguf_maker maker = {0};
    struct kv_random random;
    uint64_t sum = 0;

    (void)state;
    kv_random_init(&random, 1);
    make_small(&maker);
    for (size_t at = 0; at < maker.bytes; at++) {
        unsigned char right = maker.data[at];

        for (int i = 0; i < 40; i++) {
            char detail[KVW_GGUF_DETAIL_BYTES];
            struct kvw_gguf *gguf;
            void *copy;

            maker.data[at] = i < 8 ? right ^ (unsigned char)(1 << i)
                                   : (unsigned char)kv_random_below(&random, 256);
            if (open_copy(maker.data, maker.bytes, &gguf, &copy, detail) == KV_OK) {
                sum += read_everything(gguf);
                kvw_gguf_close(gguf);
                free(copy);
            }
        }
        maker.data[at] = right;
    }
    assert_int_not_equal(sum, 0);
    maker_free(&maker);
}

/* One field after the other is wrong; the line says which. */
static void wrong_fields_are_named(void **state)
{
    const uint64_t dims[] = {8, 2}, odd[] = {33, 2}, none[] = {8, 0};
    const uint64_t huge[] = {UINT64_MAX / 2, 4},
                   huger[] = {1ull << 32, 1ull << 32, 1ull << 32, 1};
    static const struct {
        const char *what; /* to break */
        kv_status_t status;
        const char *detail; /* part of the line */
    } cases[] = {
        {"magic", KV_INVALID, "not a GGUF file"},
        {"version", KV_UNSUPPORTED, "GGUF version 4"},
        {"version 1", KV_UNSUPPORTED, "GGUF version 1"},
        {"endian", KV_UNSUPPORTED, "big-endian"},
        {"many keys", KV_INVALID, "keys in a file"},
        {"many tensors", KV_INVALID, "tensors in a file"},
        {"key type", KV_INVALID, "key 'k': unknown type 13"},
        {"key twice", KV_INVALID, "key 'k': duplicate"},
        {"key empty", KV_INVALID, "key 0: a name of 0 bytes"},
        {"bool", KV_INVALID, "key 'k': a boolean"},
        {"string", KV_INVALID, "key 'k': a string extends beyond"},
        {"array type", KV_INVALID, "key 'k': array of unknown type 99"},
        {"array count", KV_INVALID, "key 'k': 18446744073709551615 elements"},
        {"array strings", KV_INVALID, "key 'k': a string extends beyond"},
        {"array deep", KV_INVALID, "key 'k': arrays nested too deeply"},
        {"alignment", KV_INVALID, "key 'general.alignment': 48"},
        {"alignment 0", KV_INVALID, "key 'general.alignment': 0"},
        {"alignment type", KV_INVALID, "key 'general.alignment': not"},
        {"tensor name", KV_INVALID, "tensor 0: a name of 65 bytes"},
        {"tensor empty", KV_INVALID, "tensor 0: a name of 0 bytes"},
        {"tensor twice", KV_INVALID, "tensor 't': duplicate"},
        {"tensor dims 0", KV_INVALID, "tensor 't': 0 dimensions"},
        {"tensor dims 5", KV_INVALID, "tensor 't': 5 dimensions"},
        {"tensor dim 0", KV_INVALID, "tensor 't': dimension 1: 0"},
        {"tensor type", KV_UNSUPPORTED, "tensor 't': type 20"},
        {"tensor block", KV_INVALID, "tensor 't': impossible shape for Q4_0: 33 2"},
        {"tensor huge", KV_INVALID, "tensor 't': impossible shape for F16"},
        {"tensor huger", KV_INVALID, "tensor 't': impossible shape for F16"},
        {"tensor askew", KV_INVALID, "tensor 't': offset 8 is not a multiple of 32"},
        {"tensor outside", KV_INVALID, "tensor 't': 32 bytes at offset 64 extend beyond"},
        {"tensor far", KV_INVALID,
         "tensor 't': 32 bytes at offset 18446744073709551584 extend"},
        {"tensor overlap", KV_INVALID, "overlaps tensor"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        const char *what = cases[i].what;
        struct gguf_maker maker = {0};
        char detail[KVW_GGUF_DETAIL_BYTES];
        struct kvw_gguf *gguf;
        void *copy;
        kv_status_t status;
#define IS(name) (strcmp(what, name) == 0)
        maker_begin(&maker, IS("version")     ? 4
                            : IS("version 1") ? 1
                            : IS("endian")    ? 3u << 24
                                              : 3);
        if (IS("key type"))
            maker_key(&maker, "k", 13);
        else if (IS("key empty"))
            maker_key_u32(&maker, "", 1);
        else if (IS("bool")) {
            maker_key(&maker, "k", KVW_GGUF_BOOL);
            maker_bytes(&maker, "\2", 1);
        } else if (IS("string")) {
            maker_key(&maker, "k", KVW_GGUF_STRING);
            maker_u64(&maker, UINT64_MAX);
        } else if (strncmp(what, "array", 5) == 0) {
            maker_key(&maker, "k", KVW_GGUF_ARRAY);
            maker_u32(&maker, IS("array type") ? 99 : IS("array deep") ? 9 : 8);
            maker_u64(&maker, IS("array count") ? UINT64_MAX : 1);
            for (int depth = 0; IS("array deep") && depth < 20; depth++) {
                maker_u32(&maker, KVW_GGUF_ARRAY);
                maker_u64(&maker, 1);
            }
            maker_u64(&maker, 1000000);
        } else if (IS("alignment type"))
            maker_key_string(&maker, "general.alignment", "64");
        else if (strncmp(what, "alignment", 9) == 0)
            maker_key_u32(&maker, "general.alignment", IS("alignment") ? 48 : 0);
        else
            maker_key_u32(&maker, "k", 1);
        if (IS("key twice"))
            maker_key_bool(&maker, "k", true);
        maker_tensor(&maker,
                     IS("tensor name")
                         ? "12345678901234567890123456789012345678901234567890123456789012345"
                     : IS("tensor empty") ? ""
                                          : "t",
                     IS("tensor dims 0")   ? 0
                     : IS("tensor huger")  ? 4
                     : IS("tensor dims 5") ? 1
                                           : 2,
                     IS("tensor dim 0")   ? none
                     : IS("tensor block") ? odd
                     : IS("tensor huge")  ? huge
                     : IS("tensor huger") ? huger
                                          : dims,
                     IS("tensor type")    ? 20
                     : IS("tensor block") ? KVW_TENSOR_Q4_0
                                          : KVW_TENSOR_F16,
                     IS("tensor askew")     ? 8
                     : IS("tensor outside") ? 64
                     : IS("tensor far")     ? UINT64_MAX - 31
                                            : 0);
        maker_tensor(&maker, IS("tensor twice") ? "t" : "u", 2, dims, KVW_TENSOR_F16,
                     IS("tensor overlap") ? 0 : 32);
        maker_finish(&maker, 32);
        for (int j = 0; j < 64; j++)
            maker_bytes(&maker, "d", 1);
        if (IS("magic"))
            maker.data[3] = 'G';
        if (IS("many keys"))
            memset(maker.data + 16, 0xff, 8);
        if (IS("many tensors"))
            memset(maker.data + 8, 0xff, 8);
        if (IS("tensor dims 5")) {
            unsigned char *at = memmem(maker.data, maker.bytes, "t\1\0\0", 4);

            at[1] = 5;
        }
#undef IS
        status = open_copy(maker.data, maker.bytes, &gguf, &copy, detail);
        if (status != cases[i].status || strstr(detail, cases[i].detail) == NULL)
            print_error("%s: status %d: %s\n", what, (int)status, detail);
        assert_int_equal(status, cases[i].status);
        assert_non_null(strstr(detail, cases[i].detail));
        maker_free(&maker);
    }
}

static void foreign_files(void **state)
{
    char detail[KVW_GGUF_DETAIL_BYTES], fifo[64];
    struct kvw_gguf *gguf;

    (void)state;
    snprintf(fifo, sizeof(fifo), "/tmp/kv-gguf-%d.fifo", (int)getpid());
    assert_int_equal(kvw_gguf_open("/nowhere/x", &gguf, detail, sizeof(detail)), KV_NOT_FOUND);
    assert_string_equal(detail, "/nowhere/x: No such file or directory");
    assert_int_equal(kvw_gguf_open("/", &gguf, detail, sizeof(detail)), KV_INVALID);
    assert_string_equal(detail, "/: not a file");
    assert_int_equal(kvw_gguf_open("/dev/null", &gguf, detail, sizeof(detail)), KV_INVALID);
    assert_int_equal(kvw_gguf_open("/proc/self/exe", &gguf, detail, sizeof(detail)),
                     KV_INVALID);
    assert_string_equal(detail, "/proc/self/exe: not a GGUF file");
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_int_equal(kvw_gguf_open(fifo, &gguf, detail, sizeof(detail)), KV_INVALID);
    unlink(fifo);
    /* A line that does not fit is cut. */
    assert_int_equal(kvw_gguf_open("/nowhere/x", &gguf, detail, 5), KV_NOT_FOUND);
    assert_string_equal(detail, "/now");
}

/* The program ends with a line, not with a signal. */
static void file_cut_while_mapped(void **state)
{
    char path[] = "/tmp/kv-gguf-XXXXXX";
    char expected[256], line[256] = "";
    struct gguf_maker maker = {0};
    int file = mkstemp(path), ends[2], status;
    pid_t child;

    (void)state;
    assert_true(file >= 0);
    make_small(&maker);
    assert_int_equal(write(file, maker.data, maker.bytes), maker.bytes);
    maker_free(&maker);
    assert_int_equal(pipe(ends), 0);
    child = fork();
    if (child == 0) {
        char detail[KVW_GGUF_DETAIL_BYTES];
        struct kvw_gguf *gguf;

        dup2(ends[1], STDERR_FILENO);
        kvw_gguf_guard("test");
        if (kvw_gguf_open(path, &gguf, detail, sizeof(detail)) != KV_OK ||
            ftruncate(file, 0) != 0)
            _exit(3);
        _exit(read_everything(gguf) == 0 ? 4 : 5);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    unlink(path);
    close(file);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 1);
    assert_true(read(ends[0], line, sizeof(line) - 1) > 0);
    snprintf(expected, sizeof(expected),
             "test: model file changed or unreadable while in use: %s\n", path);
    assert_string_equal(line, expected);
    close(ends[0]);
    close(ends[1]);
}

/* SIGBUS that is not about such a file does what it always did. */
static void other_bus_errors(void **state)
{
    int status;
    pid_t child = fork();

    (void)state;
    if (child == 0) {
        signal(SIGBUS, SIG_DFL);
        kvw_gguf_guard("test");
        raise(SIGBUS);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGBUS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_what_was_written), cmocka_unit_test(cut_off_anywhere),
        cmocka_unit_test(every_byte_changed),     cmocka_unit_test(wrong_fields_are_named),
        cmocka_unit_test(foreign_files),          cmocka_unit_test(file_cut_while_mapped),
        cmocka_unit_test(other_bus_errors),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
