/* Any bytes as a GGUF file: opened, read to the last byte that it shows, and its tokenizer and
 * chat template used as far as they go. */
#include "gpu-worker/gguf/dequantize.h"
#include "gpu-worker/gguf/gguf.h"
#include "gpu-worker/text/chat_template.h"
#include "gpu-worker/text/tokenizer.h"
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>

/* The sums keep the reads from being left out. */
static volatile uint64_t seen;

static void read_array(const struct kvw_gguf *gguf, const char *key)
{
    struct kvw_gguf_array array;

    if (kvw_gguf_array_texts(gguf, key, &array) == KV_OK) {
        for (uint64_t i = 0; i < array.count; i++) {
            struct kvw_text text = kvw_gguf_array_text(&array, i);

            seen += text.bytes > 0 ? (unsigned char)text.data[text.bytes - 1] : 0;
        }
    }
    if (kvw_gguf_array_ints(gguf, key, &array) == KV_OK) {
        for (uint64_t i = 0; i < array.count; i++)
            seen += (uint64_t)kvw_gguf_array_int(&array, i);
    }
    if (kvw_gguf_array_floats(gguf, key, &array) == KV_OK) {
        for (uint64_t i = 0; i < array.count; i++)
            seen += kvw_gguf_array_float(&array, i) > 0;
    }
}

static void read_values(const struct kvw_gguf *gguf)
{
    for (size_t i = 0; i < kvw_gguf_n_values(gguf); i++) {
        struct kvw_text key, text;
        enum kvw_gguf_type type;
        char name[128], shown[64];
        uint32_t number;

        kvw_gguf_value_at(gguf, i, &key, &type);
        if (key.bytes >= sizeof(name))
            continue;
        for (size_t j = 0; j < key.bytes; j++)
            name[j] = key.data[j];
        name[key.bytes] = '\0';
        kvw_gguf_format(gguf, name, shown, sizeof(shown));
        if (kvw_gguf_u32(gguf, name, &number) == KV_OK)
            seen += number;
        if (kvw_gguf_text(gguf, name, &text) == KV_OK && text.bytes > 0)
            seen += (unsigned char)text.data[text.bytes - 1];
        read_array(gguf, name);
    }
}

static void read_tensors(const struct kvw_gguf *gguf)
{
    for (size_t i = 0; i < kvw_gguf_n_tensors(gguf); i++) {
        const struct kvw_tensor *tensor = kvw_gguf_tensor_at(gguf, i);
        const unsigned char *row = tensor->data;
        size_t row_bytes = kvw_tensor_row_bytes(tensor->type, tensor->dims[0]);
        float *values = malloc(tensor->dims[0] * sizeof(*values));

        FUZZ_CHECK(values != NULL);
        FUZZ_CHECK(row_bytes * kvw_tensor_rows(tensor) == tensor->bytes);
        for (uint64_t j = 0; j < kvw_tensor_rows(tensor); j++)
            kvw_dequantize_row(tensor->type, row + j * row_bytes, tensor->dims[0], values);
        seen += values[0] > 0;
        free(values);
    }
}

static void use_tokenizer(const struct kvw_gguf *gguf)
{
    static const char text[] = "the and 123 \xe3\x81\x82 <|im_end|> \xff\xc3";
    const struct kvw_chat_message message = {KVW_CHAT_USER, text, sizeof(text)};
    char detail[KVW_GGUF_DETAIL_BYTES];
    struct kvw_chat_template *chat;
    struct kvw_tokenizer *tokenizer;
    uint32_t *tokens;
    size_t count;

    if (kvw_tokenizer_create(gguf, &tokenizer, detail, sizeof(detail)) != KV_OK)
        return;
    FUZZ_CHECK(kvw_tokenizer_encode(tokenizer, text, sizeof(text), true, true, &tokens,
                                    &count) == KV_OK);
    for (size_t i = 0; i < count; i++) {
        struct kvw_text piece = kvw_tokenizer_piece(tokenizer, tokens[i], true);

        seen += piece.bytes > 0 ? (unsigned char)piece.data[piece.bytes - 1] : 0;
    }
    free(tokens);
    if (kvw_chat_template_create(gguf, tokenizer, NULL, &chat, detail, sizeof(detail)) ==
        KV_OK) {
        FUZZ_CHECK(kvw_chat_template_encode(chat, &message, 1, &tokens, &count) == KV_OK);
        free(tokens);
        kvw_chat_template_destroy(chat);
    }
    kvw_tokenizer_destroy(tokenizer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char detail[KVW_GGUF_DETAIL_BYTES];
    struct kvw_gguf *gguf;

    if (bytes == 0 ||
        kvw_gguf_open_memory(data, bytes, "fuzz", &gguf, detail, sizeof(detail)) != KV_OK)
        return 0;
    read_values(gguf);
    read_tensors(gguf);
    use_tokenizer(gguf);
    kvw_gguf_close(gguf);
    return 0;
}
