#include "gpu-worker/text/tokenizer_spm.h"

#include "gpu-worker/text/bpe_merge.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char space_character[] = "\xe2\x96\x81"; /* U+2581 */

enum {
    SPACE_CHARACTER_BYTES = 3,
    BYTE_TOKEN_TEXT_BYTES = 6, /* <0x0A> */
};

struct kvw_spm {
    const struct kvw_vocabulary *vocabulary;
    int32_t byte_tokens[256]; /* KVW_TOKEN_NONE: to be left out */
};

int kvw_spm_byte(struct kvw_text token_text)
{
    static const char digits[] = "0123456789ABCDEF";
    const char *high, *low;

    if (token_text.bytes != BYTE_TOKEN_TEXT_BYTES || memcmp(token_text.data, "<0x", 3) != 0 ||
        token_text.data[5] != '>')
        return -1;
    high = memchr(digits, token_text.data[3], 16);
    low = memchr(digits, token_text.data[4], 16);
    return high != NULL && low != NULL ? (int)(high - digits) * 16 + (int)(low - digits) : -1;
}

size_t kvw_spm_decode(struct kvw_text token_text, char *ret_bytes)
{
    size_t written = 0;

    for (size_t i = 0; i < token_text.bytes;) {
        if (token_text.bytes - i >= SPACE_CHARACTER_BYTES &&
            memcmp(token_text.data + i, space_character, SPACE_CHARACTER_BYTES) == 0) {
            ret_bytes[written++] = ' ';
            i += SPACE_CHARACTER_BYTES;
        } else {
            ret_bytes[written++] = token_text.data[i++];
        }
    }
    return written;
}

kv_status_t kvw_spm_create(const struct kvw_vocabulary *vocabulary,
                           int32_t unknown,
                           const struct kvw_file_error *detail,
                           struct kvw_spm **ret_spm)
{
    struct kvw_spm *spm;

    for (uint32_t i = 0; i < vocabulary->n_tokens; i++) {
        if (vocabulary->kinds[i] == KVW_TOKEN_BYTE && kvw_spm_byte(vocabulary->texts[i]) < 0)
            return kvw_file_error_set(detail, KV_INVALID,
                                      "key 'tokenizer.ggml.token_type': token %" PRIu32
                                      ": '%s' is not a byte token",
                                      i, kvw_show(vocabulary->texts[i]).text);
    }
    spm = calloc(1, sizeof(*spm));
    if (spm == NULL)
        return kvw_file_error_set(detail, KV_NO_MEMORY, "out of memory: tokenizer");
    spm->vocabulary = vocabulary;
    for (unsigned byte = 0; byte < 256; byte++) {
        const char character = (char)byte;
        char token_text[BYTE_TOKEN_TEXT_BYTES + 1];
        int32_t token;

        snprintf(token_text, sizeof(token_text), "<0x%02X>", byte);
        token = kvw_vocabulary_find(vocabulary, token_text, BYTE_TOKEN_TEXT_BYTES);
        if (token == KVW_TOKEN_NONE)
            token = kvw_vocabulary_find(vocabulary, &character, 1);
        spm->byte_tokens[byte] = token != KVW_TOKEN_NONE ? token : unknown;
    }
    *ret_spm = spm;
    return KV_OK;
}

void kvw_spm_destroy(struct kvw_spm *spm)
{
    free(spm);
}

/* Returns a priority that is smaller for higher scores: the bits of a float, mapped to unsigned
 * numbers in descending order. */
static uint32_t priority_of(float score)
{
    uint32_t bits;

    score += 0.0f; /* -0 is 0 */
    memcpy(&bits, &score, sizeof(bits));
    return bits >> 31 ? bits : ~(bits | 0x80000000u);
}

static bool find_pair(const void *context,
                      const char *text,
                      const struct kvw_symbol *left,
                      const struct kvw_symbol *right,
                      int32_t *ret_token,
                      uint32_t *ret_priority)
{
    const struct kvw_vocabulary *vocabulary = context;
    int32_t token =
        kvw_vocabulary_find(vocabulary, text + left->begin, (size_t)left->bytes + right->bytes);

    if (token == KVW_TOKEN_NONE)
        return false;
    *ret_token = token;
    *ret_priority = priority_of(vocabulary->scores[token]);
    return true;
}

/* Returns the length of a character by its first byte, without checking the others.  Invalid
 * UTF-8 forms one symbol with the bytes after it, and is then emitted as byte tokens. */
static size_t character_bytes(unsigned char first)
{
    return first < 0xc0 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

static bool emit(const struct kvw_spm *spm,
                 const struct kvw_symbol *symbol,
                 const char *text,
                 struct kvw_token_list *list)
{
    if (symbol->token != KVW_TOKEN_NONE)
        return kvw_token_list_add(list, (uint32_t)symbol->token);
    for (uint32_t i = 0; i < symbol->bytes; i++) {
        int32_t token = spm->byte_tokens[(unsigned char)text[symbol->begin + i]];

        if (token != KVW_TOKEN_NONE && !kvw_token_list_add(list, (uint32_t)token))
            return false;
    }
    return true;
}

/* Copies `text` with spaces as U+2581, one more before it if `space`.  Returns the bytes
 * written, at most (bytes + 1) * SPACE_CHARACTER_BYTES. */
static size_t spell_spaces(const char *text, size_t bytes, bool space, char *ret_text)
{
    size_t written = 0;

    if (space) {
        memcpy(ret_text, space_character, SPACE_CHARACTER_BYTES);
        written = SPACE_CHARACTER_BYTES;
    }
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] == ' ') {
            memcpy(ret_text + written, space_character, SPACE_CHARACTER_BYTES);
            written += SPACE_CHARACTER_BYTES;
        } else {
            ret_text[written++] = text[i];
        }
    }
    return written;
}

kv_status_t kvw_spm_encode(const struct kvw_spm *spm,
                           const char *text,
                           size_t bytes,
                           bool space,
                           struct kvw_token_list *list)
{
    struct kvw_merger merger = {0};
    char *spelled = malloc((bytes + 1) * SPACE_CHARACTER_BYTES);
    kv_status_t status = KV_NO_MEMORY;
    size_t n_spelled;

    if (spelled == NULL)
        goto out;
    n_spelled = spell_spaces(text, bytes, space, spelled);
    for (size_t i = 0; i < n_spelled;) {
        size_t length = character_bytes((unsigned char)spelled[i]);

        if (length > n_spelled - i)
            length = n_spelled - i;
        if (!kvw_merger_add(&merger, length,
                            kvw_vocabulary_find(spm->vocabulary, spelled + i, length)))
            goto out;
        i += length;
    }
    if (!kvw_merger_run(&merger, find_pair, spm->vocabulary, spelled))
        goto out;
    for (int32_t i = n_spelled > 0 ? 0 : KVW_SYMBOL_NONE; i != KVW_SYMBOL_NONE;
         i = merger.symbols[i].next) {
        if (!emit(spm, &merger.symbols[i], spelled, list))
            goto out;
    }
    status = KV_OK;
out:
    kvw_merger_fini(&merger);
    free(spelled);
    return status;
}
