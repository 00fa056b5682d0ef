#include "gpu-worker/text/tokenizer_bpe.h"

#include "gpu-worker/text/bpe_merge.h"
#include "gpu-worker/text/pretokenizer.h"
#include "kvserver/base/hash.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char pre_key[] = "tokenizer.ggml.pre";
static const char merges_key[] = "tokenizer.ggml.merges";

struct merge {
    uint64_t pair; /* left token, right token */
    uint32_t rank;
    int32_t token; /* KVW_TOKEN_NONE: an empty slot */
};

struct kvw_bpe {
    const struct kvw_vocabulary *vocabulary;
    struct kvw_pretokenizer *split;
    bool whole_words;         /* a word that is a token is not merged (Llama 3) */
    int32_t byte_tokens[256]; /* KVW_TOKEN_NONE: this vocabulary cannot spell the byte */
    struct merge *merges;     /* (merge_mask + 1) by hash */
    uint64_t merge_mask;
};

/* --- Characters that stand for bytes --- */

enum {
    LETTERS_BEGIN = 0x100, /* of the bytes that are not printable */
    LETTERS_END = LETTERS_BEGIN + 68,
};

static bool is_plain(unsigned byte)
{
    return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte != 0xad);
}

/* Writes the character of a byte in UTF-8; returns its length, 1 or 2. */
static size_t spell(unsigned char byte, char *ret_letter)
{
    unsigned character = byte;

    if (!is_plain(byte)) {
        /* 0 to 0x20, then 0x7f to 0xa0, then 0xad */
        character = byte <= 0x20   ? LETTERS_BEGIN + byte
                    : byte == 0xad ? LETTERS_END - 1
                                   : LETTERS_BEGIN + 0x21 + byte - 0x7f;
    }
    if (character < 0x80) {
        ret_letter[0] = (char)character;
        return 1;
    }
    ret_letter[0] = (char)(0xc0 | character >> 6);
    ret_letter[1] = (char)(0x80 | (character & 0x3f));
    return 2;
}

/* Returns the byte of a character, or -1. */
static int unspell(unsigned character)
{
    if (character >= LETTERS_BEGIN && character < LETTERS_END) {
        unsigned index = character - LETTERS_BEGIN;

        return (int)(index <= 0x20                  ? index
                     : character == LETTERS_END - 1 ? 0xad
                                                    : index - 0x21 + 0x7f);
    }
    return character < 0x100 && is_plain(character) ? (int)character : -1;
}

size_t kvw_bpe_decode(struct kvw_text token_text, char *ret_bytes)
{
    const unsigned char *at = (const unsigned char *)token_text.data;
    size_t written = 0;

    for (size_t i = 0; i < token_text.bytes;) {
        bool two =
            (at[i] & 0xe0) == 0xc0 && i + 1 < token_text.bytes && (at[i + 1] & 0xc0) == 0x80;
        int byte = two            ? unspell((at[i] & 0x1fu) << 6 | (at[i + 1] & 0x3fu))
                   : at[i] < 0x80 ? unspell(at[i])
                                  : -1;

        if (byte >= 0) {
            ret_bytes[written++] = (char)byte;
            i += two ? 2 : 1;
        } else {
            ret_bytes[written++] = (char)at[i++];
        }
    }
    return written;
}

/* --- Merges --- */

/* Returns the slot of a pair, or the empty slot for it: open addressing with linear probing.
 * The hash is keyed with a random number, so that a file cannot choose merges that collide. */
static struct merge *find_merge(const struct kvw_bpe *bpe, uint64_t pair)
{
    uint64_t at = kv_mix64(pair ^ bpe->vocabulary->secret) & bpe->merge_mask;

    while (bpe->merges[at].token != KVW_TOKEN_NONE && bpe->merges[at].pair != pair)
        at = (at + 1) & bpe->merge_mask;
    return &bpe->merges[at];
}

static uint64_t pair_of(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

/* Reads one line of merges: two tokens separated by a space, whose concatenation is also a
 * token.  Returns false if it is not.
 *   joined  (vocabulary->longest), scratch */
static bool read_merge(struct kvw_bpe *bpe, struct kvw_text text, uint32_t rank, char *joined)
{
    const struct kvw_vocabulary *vocabulary = bpe->vocabulary;
    /* A space stands for no byte, but a token may be a space: the separator is not the first
     * byte. */
    const char *space = text.bytes > 1 ? memchr(text.data + 1, ' ', text.bytes - 1) : NULL;
    size_t left_bytes, right_bytes;
    int32_t left, right, token;
    struct merge *merge;

    if (space == NULL || text.bytes - 1 > vocabulary->longest)
        return false;
    left_bytes = (size_t)(space - text.data);
    right_bytes = text.bytes - left_bytes - 1;
    left = kvw_vocabulary_find(vocabulary, text.data, left_bytes);
    right = kvw_vocabulary_find(vocabulary, space + 1, right_bytes);
    memcpy(joined, text.data, left_bytes);
    memcpy(joined + left_bytes, space + 1, right_bytes);
    token = kvw_vocabulary_find(vocabulary, joined, text.bytes - 1);
    if (left == KVW_TOKEN_NONE || right == KVW_TOKEN_NONE || token == KVW_TOKEN_NONE)
        return false;
    merge = find_merge(bpe, pair_of(left, right));
    if (merge->token == KVW_TOKEN_NONE)
        *merge = (struct merge){pair_of(left, right), rank, token};
    return true;
}

static kv_status_t read_merges(struct kvw_bpe *bpe,
                               const struct kvw_gguf *gguf,
                               const struct kvw_file_error *detail)
{
    struct kvw_gguf_array lines;
    uint64_t n_slots = 16;
    char *joined;
    kv_status_t status = kvw_gguf_array_texts(gguf, merges_key, &lines);

    if (status != KV_OK)
        return kvw_file_error_set(detail, KV_INVALID, "key '%s': %s", merges_key,
                                  status == KV_NOT_FOUND ? "missing"
                                                         : "not an array of strings");
    if (lines.count > UINT32_MAX)
        return kvw_file_error_set(detail, KV_INVALID, "key '%s': %" PRIu64 " merges",
                                  merges_key, lines.count);
    while (n_slots < lines.count * 2)
        n_slots *= 2;
    bpe->merge_mask = n_slots - 1;
    bpe->merges = malloc(n_slots * sizeof(*bpe->merges));
    joined = malloc(bpe->vocabulary->longest + 1);
    if (bpe->merges == NULL || joined == NULL) {
        free(joined);
        return kvw_file_error_set(detail, KV_NO_MEMORY, "out of memory: %" PRIu64 " merges",
                                  lines.count);
    }
    for (uint64_t i = 0; i < n_slots; i++)
        bpe->merges[i].token = KVW_TOKEN_NONE;
    for (uint64_t i = 0; i < lines.count && status == KV_OK; i++) {
        struct kvw_text text = kvw_gguf_array_text(&lines, i);

        if (!read_merge(bpe, text, (uint32_t)i, joined))
            status = kvw_file_error_set(detail, KV_INVALID,
                                        "key '%s': merge %" PRIu64
                                        ": '%s' does not join two tokens into a third",
                                        merges_key, i, kvw_show(text).text);
    }
    free(joined);
    return status;
}

static kv_status_t
read_pre(struct kvw_bpe *bpe, const struct kvw_gguf *gguf, const struct kvw_file_error *detail)
{
    struct kvw_text name;
    kv_status_t status = kvw_gguf_text(gguf, pre_key, &name);

    if (status != KV_OK)
        return kvw_file_error_set(detail, KV_INVALID, "key '%s': %s", pre_key,
                                  status == KV_NOT_FOUND ? "missing" : "not a string");
    status = kvw_pretokenizer_create(name.data, name.bytes, &bpe->split);
    if (status == KV_UNSUPPORTED)
        return kvw_file_error_set(detail, status,
                                  "key '%s': '%s' is not supported; these are: %s", pre_key,
                                  kvw_show(name).text, kvw_pretokenizer_names());
    if (status != KV_OK)
        return kvw_file_error_set(detail, status, "key '%s': out of memory", pre_key);
    bpe->whole_words = strcmp(kvw_pretokenizer_name(bpe->split), "llama-bpe") == 0;
    return KV_OK;
}

kv_status_t kvw_bpe_create(const struct kvw_vocabulary *vocabulary,
                           const struct kvw_gguf *gguf,
                           const struct kvw_file_error *detail,
                           struct kvw_bpe **ret_bpe)
{
    struct kvw_bpe *bpe = calloc(1, sizeof(*bpe));
    kv_status_t status;

    if (bpe == NULL)
        return kvw_file_error_set(detail, KV_NO_MEMORY, "out of memory: tokenizer");
    bpe->vocabulary = vocabulary;
    for (unsigned byte = 0; byte < 256; byte++) {
        char character[2];
        size_t bytes = spell((unsigned char)byte, character);

        bpe->byte_tokens[byte] = kvw_vocabulary_find(vocabulary, character, bytes);
    }
    status = read_pre(bpe, gguf, detail);
    if (status == KV_OK)
        status = read_merges(bpe, gguf, detail);
    if (status != KV_OK) {
        kvw_bpe_destroy(bpe);
        return status;
    }
    *ret_bpe = bpe;
    return KV_OK;
}

void kvw_bpe_destroy(struct kvw_bpe *bpe)
{
    if (bpe == NULL)
        return;
    kvw_pretokenizer_destroy(bpe->split);
    free(bpe->merges);
    free(bpe);
}

const char *kvw_bpe_pre(const struct kvw_bpe *bpe)
{
    return kvw_pretokenizer_name(bpe->split);
}

/* --- Encoding --- */

/* A text as valid UTF-8: every character in its shortest form, other bytes as U+FFFD. */
struct normal {
    char *text;
    char *shape; /* the same with surrogates replaced, which PCRE2 does not accept; patterns are
                    matched on it.  Both have the same length. */
    size_t bytes;
};

/* Decodes the character at `at`, where `left` bytes follow.  Returns its length; 0 if the bytes
 * are not a character.  Overlong forms and surrogates are accepted, as llama.cpp does. */
static size_t take_character(const unsigned char *at, size_t left, uint32_t *ret_character)
{
    static const unsigned char first_bits[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
    size_t length = at[0] < 0x80   ? 1
                    : at[0] < 0xc0 ? 0
                    : at[0] < 0xe0 ? 2
                    : at[0] < 0xf0 ? 3
                                   : 4;
    uint32_t character;

    if (length == 0 || at[0] >= 0xf8 || length > left)
        return 0;
    character = at[0] & first_bits[length];
    for (size_t i = 1; i < length; i++) {
        if ((at[i] & 0xc0) != 0x80)
            return 0;
        character = character << 6 | (at[i] & 0x3f);
    }
    if (character > 0x10ffff)
        return 0;
    *ret_character = character;
    return length;
}

static size_t put_character(uint32_t character, char *to)
{
    if (character < 0x80) {
        to[0] = (char)character;
        return 1;
    }
    if (character < 0x800) {
        to[0] = (char)(0xc0 | character >> 6);
        to[1] = (char)(0x80 | (character & 0x3f));
        return 2;
    }
    if (character < 0x10000) {
        to[0] = (char)(0xe0 | character >> 12);
        to[1] = (char)(0x80 | (character >> 6 & 0x3f));
        to[2] = (char)(0x80 | (character & 0x3f));
        return 3;
    }
    to[0] = (char)(0xf0 | character >> 18);
    to[1] = (char)(0x80 | (character >> 12 & 0x3f));
    to[2] = (char)(0x80 | (character >> 6 & 0x3f));
    to[3] = (char)(0x80 | (character & 0x3f));
    return 4;
}

static bool normalise(const char *text, size_t bytes, struct normal *ret_normal)
{
    const uint32_t no_character = 0xfffd,
                   stand_in =
                       0xe000; /* private use: neither letter nor number, as a surrogate */
    struct normal normal = {.text = malloc(bytes * 3 + 1), .shape = malloc(bytes * 3 + 1)};

    if (normal.text == NULL || normal.shape == NULL) {
        free(normal.text);
        free(normal.shape);
        return false;
    }
    for (size_t i = 0; i < bytes;) {
        uint32_t character;
        size_t length = take_character((const unsigned char *)text + i, bytes - i, &character);

        if (length == 0) {
            character = no_character;
            length = 1;
        }
        i += length;
        put_character(character >= 0xd800 && character < 0xe000 ? stand_in : character,
                      normal.shape + normal.bytes);
        normal.bytes += put_character(character, normal.text + normal.bytes);
    }
    *ret_normal = normal;
    return true;
}

static bool find_pair(const void *context,
                      const char *text,
                      const struct kvw_symbol *left,
                      const struct kvw_symbol *right,
                      int32_t *ret_token,
                      uint32_t *ret_priority)
{
    const struct merge *merge;

    (void)text;
    if (left->token == KVW_TOKEN_NONE || right->token == KVW_TOKEN_NONE)
        return false;
    merge = find_merge(context, pair_of(left->token, right->token));
    if (merge->token == KVW_TOKEN_NONE)
        return false;
    *ret_token = merge->token;
    *ret_priority = merge->rank;
    return true;
}

/* Returns the token that is the whole word, or KVW_TOKEN_NONE.  The longest such words, runs of
 * spaces, have about 130 bytes; longer ones are merged instead. */
static int32_t find_word(const struct kvw_bpe *bpe, const char *word, size_t bytes)
{
    char token_text[512];
    size_t spelled = 0;

    if (bytes > sizeof(token_text) / 2 || bytes > bpe->vocabulary->longest)
        return KVW_TOKEN_NONE;
    for (size_t i = 0; i < bytes; i++)
        spelled += spell((unsigned char)word[i], token_text + spelled);
    return kvw_vocabulary_find(bpe->vocabulary, token_text, spelled);
}

static bool encode_word(const struct kvw_bpe *bpe,
                        struct kvw_merger *merger,
                        const char *word,
                        size_t bytes,
                        struct kvw_token_list *list)
{
    int32_t token = bpe->whole_words ? find_word(bpe, word, bytes) : KVW_TOKEN_NONE;

    if (token != KVW_TOKEN_NONE)
        return kvw_token_list_add(list, (uint32_t)token);
    kvw_merger_clear(merger);
    for (size_t i = 0; i < bytes; i++) {
        if (!kvw_merger_add(merger, 1, bpe->byte_tokens[(unsigned char)word[i]]))
            return false;
    }
    if (!kvw_merger_run(merger, find_pair, bpe, word))
        return false;
    for (int32_t i = 0; i != KVW_SYMBOL_NONE; i = merger->symbols[i].next) {
        if (merger->symbols[i].token != KVW_TOKEN_NONE &&
            !kvw_token_list_add(list, (uint32_t)merger->symbols[i].token))
            return false;
    }
    return true;
}

kv_status_t kvw_bpe_encode(const struct kvw_bpe *bpe,
                           const char *text,
                           size_t bytes,
                           struct kvw_token_list *list)
{
    struct kvw_pretokenizer_walk *walk = kvw_pretokenizer_walk_create(bpe->split);
    struct kvw_merger merger = {0};
    struct normal normal = {0};
    kv_status_t status = KV_NO_MEMORY;
    size_t begin = 0;

    if (walk == NULL || !normalise(text, bytes, &normal))
        goto out;
    while (begin < normal.bytes) {
        size_t end;

        status = kvw_pretokenizer_next(walk, normal.shape, normal.bytes, begin, &end);
        if (status != KV_OK)
            goto out;
        assert(end > begin && end <= normal.bytes);
        if (!encode_word(bpe, &merger, normal.text + begin, end - begin, list)) {
            status = KV_NO_MEMORY;
            goto out;
        }
        begin = end;
    }
    status = KV_OK;
out:
    free(normal.text);
    free(normal.shape);
    kvw_merger_fini(&merger);
    kvw_pretokenizer_walk_destroy(walk);
    return status;
}
