/* Special tokens, which stand for themselves: which they are, and splitting a text at them
 * before it is encoded.  Longer tokens are searched first, over the whole part, so that they
 * win over shorter ones that overlap them. */
#define _GNU_SOURCE /* memmem, memrchr */
#include "gpu-worker/text/tokenizer_private.h"

#include <stdlib.h>
#include <string.h>

enum {
    TEXT_BYTES_MAX = 1 << 28,
};

struct special {
    size_t bytes;
    uint32_t token;
};

static int compare_specials(const void *a, const void *b)
{
    const struct special *left = a, *right = b;

    if (left->bytes != right->bytes)
        return left->bytes > right->bytes ? -1 : 1;
    return (left->token > right->token) - (left->token < right->token);
}

static bool is_special(const struct kvw_vocabulary *vocabulary, uint32_t token)
{
    uint8_t kind = vocabulary->kinds[token];

    return vocabulary->texts[token].bytes > 0 &&
           (kind == KVW_TOKEN_CONTROL || kind == KVW_TOKEN_USER_DEFINED ||
            kind == KVW_TOKEN_UNKNOWN);
}

bool kvw_tokenizer_list_specials(struct kvw_tokenizer *tokenizer)
{
    const struct kvw_vocabulary *vocabulary = &tokenizer->vocabulary;
    struct special *specials;
    size_t count = 0;

    for (uint32_t i = 0; i < vocabulary->n_tokens; i++)
        count += is_special(vocabulary, i);
    specials = calloc(count + 1, sizeof(*specials));
    tokenizer->specials = calloc(count + 1, sizeof(*tokenizer->specials));
    if (specials == NULL || tokenizer->specials == NULL) {
        free(specials);
        return false;
    }
    count = 0;
    for (uint32_t i = 0; i < vocabulary->n_tokens; i++) {
        if (is_special(vocabulary, i))
            specials[count++] = (struct special){vocabulary->texts[i].bytes, i};
    }
    qsort(specials, count, sizeof(*specials), compare_specials);
    for (size_t i = 0; i < count; i++)
        tokenizer->specials[i] = specials[i].token;
    tokenizer->n_specials = count;
    free(specials);
    return true;
}

static bool add_hit(struct kvw_tokenizer_cut *cut, size_t begin, uint32_t token)
{
    if (cut->n_hits == cut->capacity) {
        size_t capacity = cut->capacity > 0 ? cut->capacity * 2 : 16;
        struct kvw_tokenizer_hit *hits = realloc(cut->hits, capacity * sizeof(*hits));

        if (hits == NULL)
            return false;
        cut->hits = hits;
        cut->capacity = capacity;
    }
    cut->hits[cut->n_hits++] = (struct kvw_tokenizer_hit){begin, token};
    return true;
}

/* Returns the position after the last taken byte of [begin, end), or `begin` if none is
 * taken. */
static size_t last_taken(const struct kvw_tokenizer_cut *cut, size_t begin, size_t end)
{
    const unsigned char *last = memrchr(cut->taken + begin, 1, end - begin);

    return last != NULL ? (size_t)(last - cut->taken) + 1 : begin;
}

/* Marks every occurrence of one token in [begin, end) that overlaps no taken byte.  Returns
 * false if out of memory. */
static bool cut_token(struct kvw_tokenizer_cut *cut,
                      struct kvw_text token_text,
                      uint32_t token,
                      size_t begin,
                      size_t end)
{
    while (end - begin >= token_text.bytes) {
        const char *found =
            memmem(cut->text + begin, end - begin, token_text.data, token_text.bytes);
        size_t at, free_from;

        if (found == NULL)
            return true;
        at = (size_t)(found - cut->text);
        free_from = last_taken(cut, at, at + token_text.bytes);
        if (free_from > at) {
            begin = free_from;
            continue;
        }
        if (!add_hit(cut, at, token))
            return false;
        begin = at + token_text.bytes;
        memset(cut->taken + at, 1, token_text.bytes);
    }
    return true;
}

static bool cut_part(const struct kvw_tokenizer *tokenizer,
                     struct kvw_tokenizer_cut *cut,
                     size_t begin,
                     size_t end,
                     bool special)
{
    const struct kvw_vocabulary *vocabulary = &tokenizer->vocabulary;

    for (size_t i = 0; i < tokenizer->n_specials; i++) {
        uint32_t token = tokenizer->specials[i];

        if (!special && vocabulary->kinds[token] != KVW_TOKEN_USER_DEFINED)
            continue;
        if (!cut_token(cut, vocabulary->texts[token], token, begin, end))
            return false;
    }
    return true;
}

static int compare_hits(const void *a, const void *b)
{
    const struct kvw_tokenizer_hit *left = a, *right = b;

    return (left->begin > right->begin) - (left->begin < right->begin);
}

kv_status_t kvw_tokenizer_split_special_parts(const struct kvw_tokenizer *tokenizer,
                                              const struct kvw_text_part *parts,
                                              size_t n_parts,
                                              struct kvw_tokenizer_cut *cut)
{
    size_t bytes = 0;

    for (size_t i = 0; i < n_parts; i++) {
        if (parts[i].bytes > TEXT_BYTES_MAX - bytes)
            return KV_TOO_LARGE;
        bytes += parts[i].bytes;
    }
    cut->text = malloc(bytes + 1);
    cut->taken = calloc(1, bytes + 1);
    if (cut->text == NULL || cut->taken == NULL)
        return KV_NO_MEMORY;
    for (size_t i = 0; i < n_parts; i++) {
        if (parts[i].bytes == 0)
            continue;
        memcpy(cut->text + cut->bytes, parts[i].text, parts[i].bytes);
        cut->bytes += parts[i].bytes;
        if (!cut_part(tokenizer, cut, cut->bytes - parts[i].bytes, cut->bytes,
                      parts[i].special))
            return KV_NO_MEMORY;
    }
    if (cut->n_hits > 0)
        qsort(cut->hits, cut->n_hits, sizeof(*cut->hits), compare_hits);
    return KV_OK;
}
