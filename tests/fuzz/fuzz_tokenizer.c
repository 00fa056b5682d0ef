/* Any bytes as text, through a small tokenizer of each kind: the first byte chooses the
 * tokenizer, where the text is parted, and whether control tokens are read. What is UTF-8 comes
 * back as it went in, and what comes out of the stream of characters is UTF-8. */
#include "gpu-worker/text/tokenizer.h"
#include "gpu-worker/text/utf8_stream.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/tokenizer_maker.h"

#include <string.h>

static const char *const pres[] = {"gpt-2", "smollm", "llama-bpe", "qwen2", NULL};

enum {
    N_TOKENIZERS = sizeof(pres) / sizeof(*pres),
};

static struct kvw_tokenizer *tokenizers[N_TOKENIZERS];

/* They live as long as the process. */
static void make_all(void)
{
    for (size_t i = 0; i < N_TOKENIZERS; i++) {
        static struct gguf_maker makers[N_TOKENIZERS];
        static struct kvw_gguf *files[N_TOKENIZERS];
        char detail[KVW_GGUF_DETAIL_BYTES];

        make_tokenizer(&makers[i], &(struct small_tokenizer){.pre = pres[i], .bos = SMALL_BOS});
        FUZZ_CHECK(kvw_gguf_open_memory(makers[i].data, makers[i].bytes, "fuzz", &files[i],
                                        detail, sizeof(detail)) == KV_OK);
        FUZZ_CHECK(kvw_tokenizer_create(files[i], &tokenizers[i], detail, sizeof(detail)) ==
                   KV_OK);
    }
}

/* The text through a stream in one piece; equal to the text if that is UTF-8. */
static bool is_utf8(const char *text, size_t bytes)
{
    struct kvw_utf8_stream stream = {{0}, 0};
    char *whole = malloc(kvw_utf8_stream_bytes(bytes) + kvw_utf8_stream_bytes(0));
    size_t written;
    bool same;

    FUZZ_CHECK(whole != NULL);
    written = kvw_utf8_stream_push(&stream, text, bytes, whole);
    FUZZ_CHECK(written <= kvw_utf8_stream_bytes(bytes));
    written += kvw_utf8_stream_end(&stream, whole + written);
    same = written == bytes && (bytes == 0 || memcmp(whole, text, bytes) == 0);
    free(whole);
    return same;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const char *text = (const char *)data + 1;
    const struct kvw_tokenizer *tokenizer;
    struct kvw_utf8_stream stream = {{0}, 0};
    struct kvw_text_part parts[2];
    uint32_t *tokens;
    size_t count, at = 0, cut;
    bool special, same;

    if (tokenizers[0] == NULL)
        make_all();
    if (bytes == 0)
        return 0;
    bytes--;
    tokenizer = tokenizers[data[0] % N_TOKENIZERS];
    special = data[0] & 0x80;
    cut = bytes * (data[0] & 7) / 7;
    parts[0] = (struct kvw_text_part){text, cut, special};
    parts[1] = (struct kvw_text_part){text + cut, bytes - cut, false};
    FUZZ_CHECK(kvw_tokenizer_encode_parts(tokenizer, parts, 2, false, &tokens, &count) ==
               KV_OK);
    FUZZ_CHECK(count <= bytes * 3 + 1);
    /* A byte-level tokenizer that knows all bytes loses nothing. */
    same = kvw_tokenizer_pre(tokenizer)[0] != '\0' && is_utf8(text, bytes);
    for (size_t i = 0; i < count; i++) {
        struct kvw_text piece;
        char out[256];
        size_t written;

        FUZZ_CHECK(tokens[i] < kvw_tokenizer_n_tokens(tokenizer));
        piece = kvw_tokenizer_piece(tokenizer, tokens[i], true);
        FUZZ_CHECK(kvw_utf8_stream_bytes(piece.bytes) <= sizeof(out));
        written = kvw_utf8_stream_push(&stream, piece.data, piece.bytes, out);
        FUZZ_CHECK(is_utf8(out, written));
        if (same) {
            FUZZ_CHECK(piece.bytes <= bytes - at &&
                       memcmp(text + at, piece.data, piece.bytes) == 0);
            at += piece.bytes;
        }
    }
    FUZZ_CHECK(!same || at == bytes);
    free(tokens);
    return 0;
}
