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
    int32_t token; /* KV_TOKEN_NONE: an empty slot */
};

struct kv_bpe {
    const struct kv_vocabulary *vocabulary;
    struct kv_split *split;
    bool whole_words;         /* a word that is a token is not merged (Llama 3) */
    int32_t byte_tokens[256]; /* KV_TOKEN_NONE: this vocabulary cannot spell the byte */
    struct merge *merges;     /* (merge_mask + 1) by hash */
    uint64_t merge_mask;
};

/* --- Letters --- */

enum {
    LETTERS_BEGIN = 0x100, /* of the bytes that are not printable */
    LETTERS_END = LETTERS_BEGIN + 68,
};

static bool is_plain(unsigned byte)
{
    return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte != 0xad);
}

/* The letter of a byte in UTF-8; returns its length, 1 or 2. */
static size_t spell(unsigned char byte, char *ret_letter)
{
    unsigned letter = byte;

    if (!is_plain(byte)) {
        /* 0 to 0x20, then 0x7f to 0xa0, then 0xad */
        letter = byte <= 0x20   ? LETTERS_BEGIN + byte
                 : byte == 0xad ? LETTERS_END - 1
                                : LETTERS_BEGIN + 0x21 + byte - 0x7f;
    }
    if (letter < 0x80) {
        ret_letter[0] = (char)letter;
        return 1;
    }
    ret_letter[0] = (char)(0xc0 | letter >> 6);
    ret_letter[1] = (char)(0x80 | (letter & 0x3f));
    return 2;
}

/* The byte of a letter, or -1. */
static int unspell(unsigned letter)
{
    if (letter >= LETTERS_BEGIN && letter < LETTERS_END) {
        unsigned index = letter - LETTERS_BEGIN;

        return (int)(index <= 0x20               ? index
                     : letter == LETTERS_END - 1 ? 0xad
                                                 : index - 0x21 + 0x7f);
    }
    return letter < 0x100 && is_plain(letter) ? (int)letter : -1;
}

size_t kv_bpe_decode(struct kv_text spelling, char *ret_bytes)
{
    const unsigned char *at = (const unsigned char *)spelling.data;
    size_t written = 0;

    for (size_t i = 0; i < spelling.bytes;) {
        bool two =
            (at[i] & 0xe0) == 0xc0 && i + 1 < spelling.bytes && (at[i + 1] & 0xc0) == 0x80;
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

/* The slot of a pair, or the empty one where it would go. */
static struct merge *find_merge(const struct kv_bpe *bpe, uint64_t pair)
{
    uint64_t at = kv_mix64(pair ^ bpe->vocabulary->secret) & bpe->merge_mask;

    while (bpe->merges[at].token != KV_TOKEN_NONE && bpe->merges[at].pair != pair)
        at = (at + 1) & bpe->merge_mask;
    return &bpe->merges[at];
}

static uint64_t pair_of(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

/* One line of merges: two tokens with a space between, which together are a token as well.
 *   joined  (vocabulary->longest) */
static bool read_merge(struct kv_bpe *bpe, struct kv_text text, uint32_t rank, char *joined)
{
    const struct kv_vocabulary *vocabulary = bpe->vocabulary;
    /* A space is no letter, but a token may be one: it is not looked for in the first place. */
    const char *space = text.bytes > 1 ? memchr(text.data + 1, ' ', text.bytes - 1) : NULL;
    size_t left_bytes, right_bytes;
    int32_t left, right, token;
    struct merge *merge;

    if (space == NULL || text.bytes - 1 > vocabulary->longest)
        return false;
    left_bytes = (size_t)(space - text.data);
    right_bytes = text.bytes - left_bytes - 1;
    left = kv_vocabulary_find(vocabulary, text.data, left_bytes);
    right = kv_vocabulary_find(vocabulary, space + 1, right_bytes);
    memcpy(joined, text.data, left_bytes);
    memcpy(joined + left_bytes, space + 1, right_bytes);
    token = kv_vocabulary_find(vocabulary, joined, text.bytes - 1);
    if (left == KV_TOKEN_NONE || right == KV_TOKEN_NONE || token == KV_TOKEN_NONE)
        return false;
    merge = find_merge(bpe, pair_of(left, right));
    if (merge->token == KV_TOKEN_NONE)
        *merge = (struct merge){pair_of(left, right), rank, token};
    return true;
}

static kv_status_t
read_merges(struct kv_bpe *bpe, const struct kv_gguf *gguf, const struct kv_detail *detail)
{
    struct kv_gguf_array lines;
    uint64_t n_slots = 16;
    char *joined;
    kv_status_t status = kv_gguf_array_texts(gguf, merges_key, &lines);

    if (status != KV_OK)
        return kv_detail(detail, KV_INVALID, "key '%s': %s", merges_key,
                         status == KV_NOT_FOUND ? "missing" : "not an array of strings");
    if (lines.count > UINT32_MAX)
        return kv_detail(detail, KV_INVALID, "key '%s': %" PRIu64 " merges", merges_key,
                         lines.count);
    while (n_slots < lines.count * 2)
        n_slots *= 2;
    bpe->merge_mask = n_slots - 1;
    bpe->merges = malloc(n_slots * sizeof(*bpe->merges));
    joined = malloc(bpe->vocabulary->longest + 1);
    if (bpe->merges == NULL || joined == NULL) {
        free(joined);
        return kv_detail(detail, KV_NO_MEMORY, "no memory for %" PRIu64 " merges", lines.count);
    }
    for (uint64_t i = 0; i < n_slots; i++)
        bpe->merges[i].token = KV_TOKEN_NONE;
    for (uint64_t i = 0; i < lines.count && status == KV_OK; i++) {
        struct kv_text text = kv_gguf_array_text(&lines, i);

        if (!read_merge(bpe, text, (uint32_t)i, joined))
            status = kv_detail(detail, KV_INVALID,
                               "key '%s': merge %" PRIu64 ": '%s' does not make a token of two",
                               merges_key, i, kv_show(text).text);
    }
    free(joined);
    return status;
}

static kv_status_t
read_pre(struct kv_bpe *bpe, const struct kv_gguf *gguf, const struct kv_detail *detail)
{
    struct kv_text name;
    kv_status_t status = kv_gguf_text(gguf, pre_key, &name);

    if (status != KV_OK)
        return kv_detail(detail, KV_INVALID, "key '%s': %s", pre_key,
                         status == KV_NOT_FOUND ? "missing" : "not a string");
    status = kv_split_create(name.data, name.bytes, &bpe->split);
    if (status == KV_UNSUPPORTED)
        return kv_detail(detail, status, "key '%s': '%s' is not supported; these are: %s",
                         pre_key, kv_show(name).text, kv_split_names());
    if (status != KV_OK)
        return kv_detail(detail, status, "key '%s': no memory", pre_key);
    bpe->whole_words = strcmp(kv_split_name(bpe->split), "llama-bpe") == 0;
    return KV_OK;
}

kv_status_t kv_bpe_create(const struct kv_vocabulary *vocabulary,
                          const struct kv_gguf *gguf,
                          const struct kv_detail *detail,
                          struct kv_bpe **ret_bpe)
{
    struct kv_bpe *bpe = calloc(1, sizeof(*bpe));
    kv_status_t status;

    if (bpe == NULL)
        return kv_detail(detail, KV_NO_MEMORY, "no memory for the tokenizer");
    bpe->vocabulary = vocabulary;
    for (unsigned byte = 0; byte < 256; byte++) {
        char letter[2];
        size_t bytes = spell((unsigned char)byte, letter);

        bpe->byte_tokens[byte] = kv_vocabulary_find(vocabulary, letter, bytes);
    }
    status = read_pre(bpe, gguf, detail);
    if (status == KV_OK)
        status = read_merges(bpe, gguf, detail);
    if (status != KV_OK) {
        kv_bpe_destroy(bpe);
        return status;
    }
    *ret_bpe = bpe;
    return KV_OK;
}

void kv_bpe_destroy(struct kv_bpe *bpe)
{
    if (bpe == NULL)
        return;
    kv_split_destroy(bpe->split);
    free(bpe->merges);
    free(bpe);
}

const char *kv_bpe_pre(const struct kv_bpe *bpe)
{
    return kv_split_name(bpe->split);
}

/* --- Encoding --- */

/* A text made whole: every character in its shortest UTF-8 form, other bytes as U+FFFD. */
struct normal {
    char *text;
    char *shape; /* the same but for surrogates, which are no UTF-8: what the patterns are run
                    on */
    size_t bytes;
};

/* The character at `at`, of `left` bytes, and its length; 0: the first byte begins none.
 * Lengths and bits are checked, too long forms and surrogates are not. */
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
                   stand_in = 0xe000; /* of private use: a mark, like a surrogate */
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
                      const struct kv_symbol *left,
                      const struct kv_symbol *right,
                      int32_t *ret_token,
                      uint32_t *ret_priority)
{
    const struct merge *merge;

    (void)text;
    if (left->token == KV_TOKEN_NONE || right->token == KV_TOKEN_NONE)
        return false;
    merge = find_merge(context, pair_of(left->token, right->token));
    if (merge->token == KV_TOKEN_NONE)
        return false;
    *ret_token = merge->token;
    *ret_priority = merge->rank;
    return true;
}

/* The token that a whole word is, if it is one.  The longest words that are tokens, runs of
 * spaces, have about 130 bytes; what would not fit here is merged. */
static int32_t find_word(const struct kv_bpe *bpe, const char *word, size_t bytes)
{
    char spelling[512];
    size_t spelled = 0;

    if (bytes > sizeof(spelling) / 2 || bytes > bpe->vocabulary->longest)
        return KV_TOKEN_NONE;
    for (size_t i = 0; i < bytes; i++)
        spelled += spell((unsigned char)word[i], spelling + spelled);
    return kv_vocabulary_find(bpe->vocabulary, spelling, spelled);
}

static bool encode_word(const struct kv_bpe *bpe,
                        struct kv_merger *merger,
                        const char *word,
                        size_t bytes,
                        struct kv_token_list *list)
{
    int32_t token = bpe->whole_words ? find_word(bpe, word, bytes) : KV_TOKEN_NONE;

    if (token != KV_TOKEN_NONE)
        return kv_token_list_add(list, (uint32_t)token);
    kv_merger_clear(merger);
    for (size_t i = 0; i < bytes; i++) {
        if (!kv_merger_add(merger, 1, bpe->byte_tokens[(unsigned char)word[i]]))
            return false;
    }
    if (!kv_merger_run(merger, find_pair, bpe, word))
        return false;
    for (int32_t i = 0; i != KV_SYMBOL_NONE; i = merger->symbols[i].next) {
        if (merger->symbols[i].token != KV_TOKEN_NONE &&
            !kv_token_list_add(list, (uint32_t)merger->symbols[i].token))
            return false;
    }
    return true;
}

kv_status_t kv_bpe_encode(const struct kv_bpe *bpe,
                          const char *text,
                          size_t bytes,
                          struct kv_token_list *list)
{
    struct kv_split_walk *walk = kv_split_walk_create(bpe->split);
    struct kv_merger merger = {0};
    struct normal normal = {0};
    kv_status_t status = KV_NO_MEMORY;
    size_t begin = 0;

    if (walk == NULL || !normalise(text, bytes, &normal))
        goto out;
    while (begin < normal.bytes) {
        size_t end;

        status = kv_split_next(walk, normal.shape, normal.bytes, begin, &end);
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
    kv_merger_fini(&merger);
    kv_split_walk_destroy(walk);
    return status;
}
