#include "gpu-worker/text/vocabulary.h"

#include "kvserver/base/hash.h"
#include "kvserver/base/random.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char tokens_key[] = "tokenizer.ggml.tokens";
static const char kinds_key[] = "tokenizer.ggml.token_type";
static const char scores_key[] = "tokenizer.ggml.scores";

enum {
    TOKENS_MAX = 1 << 24, /* more than any vocabulary has; ids fit everywhere */
};

static kv_status_t no_array(const struct kvw_file_error *detail,
                            kv_status_t status,
                            const char *key,
                            const char *wanted)
{
    if (status == KV_NOT_FOUND)
        return kvw_file_error_set(detail, KV_INVALID, "key '%s': missing", key);
    return kvw_file_error_set(detail, KV_INVALID, "key '%s': not an array of %s", key, wanted);
}

static kv_status_t check_count(const struct kvw_file_error *detail,
                               const struct kvw_vocabulary *vocabulary,
                               const char *key,
                               uint64_t count)
{
    if (count == vocabulary->n_tokens)
        return KV_OK;
    return kvw_file_error_set(detail, KV_INVALID,
                              "key '%s': %" PRIu64 " elements for %" PRIu32 " tokens", key,
                              count, vocabulary->n_tokens);
}

/* --- Ids by text --- */

static uint64_t hash_of(const struct kvw_vocabulary *vocabulary, const char *text, size_t bytes)
{
    uint64_t hash = vocabulary->secret ^ bytes;

    for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
        uint64_t word = 0;

        memcpy(&word, text + i, bytes - i < sizeof(word) ? bytes - i : sizeof(word));
        hash = kv_mix64(hash ^ word) + vocabulary->secret;
    }
    return kv_mix64(hash);
}

/* Returns the slot of the token with this text, or the empty slot for it: open addressing with
 * linear probing. */
static uint32_t *
find_slot(const struct kvw_vocabulary *vocabulary, const char *text, size_t bytes)
{
    uint64_t at = hash_of(vocabulary, text, bytes) & vocabulary->slot_mask;

    for (;; at = (at + 1) & vocabulary->slot_mask) {
        uint32_t *slot = &vocabulary->slots[at];
        const struct kvw_text *found = *slot != 0 ? &vocabulary->texts[*slot - 1] : NULL;

        if (found == NULL || (found->bytes == bytes && memcmp(found->data, text, bytes) == 0))
            return slot;
    }
}

int32_t
kvw_vocabulary_find(const struct kvw_vocabulary *vocabulary, const char *text, size_t bytes)
{
    if (bytes == 0 || bytes > vocabulary->longest)
        return KVW_TOKEN_NONE;
    return (int32_t)*find_slot(vocabulary, text, bytes) - 1;
}

/* --- Creation --- */

static kv_status_t read_texts(struct kvw_vocabulary *vocabulary,
                              const struct kvw_gguf_array *texts,
                              const struct kvw_file_error *detail)
{
    uint64_t n_slots = 16;

    while (n_slots < texts->count * 2)
        n_slots *= 2;
    vocabulary->slot_mask = n_slots - 1;
    vocabulary->texts = calloc(texts->count, sizeof(*vocabulary->texts));
    vocabulary->slots = calloc(n_slots, sizeof(*vocabulary->slots));
    if (vocabulary->texts == NULL || vocabulary->slots == NULL)
        return kvw_file_error_set(detail, KV_NO_MEMORY, "out of memory: %" PRIu64 " tokens",
                                  texts->count);
    for (uint32_t i = 0; i < texts->count; i++) {
        struct kvw_text text = kvw_gguf_array_text(texts, i);
        uint32_t *slot;

        vocabulary->texts[i] = text;
        if (text.bytes == 0)
            continue;
        slot = find_slot(vocabulary, text.data, text.bytes);
        if (*slot != 0)
            return kvw_file_error_set(detail, KV_INVALID,
                                      "key '%s': tokens %" PRIu32 " and %" PRIu32
                                      " are both '%s'",
                                      tokens_key, *slot - 1, i, kvw_show(text).text);
        *slot = i + 1;
        if (text.bytes > vocabulary->longest)
            vocabulary->longest = text.bytes;
    }
    return KV_OK;
}

static kv_status_t read_kinds(struct kvw_vocabulary *vocabulary,
                              const struct kvw_gguf *gguf,
                              const struct kvw_file_error *detail)
{
    struct kvw_gguf_array kinds;
    kv_status_t status = kvw_gguf_array_ints(gguf, kinds_key, &kinds);

    vocabulary->kinds = malloc(vocabulary->n_tokens);
    if (vocabulary->kinds == NULL)
        return kvw_file_error_set(detail, KV_NO_MEMORY, "out of memory: %" PRIu32 " tokens",
                                  vocabulary->n_tokens);
    memset(vocabulary->kinds, KVW_TOKEN_NORMAL, vocabulary->n_tokens);
    if (status == KV_NOT_FOUND)
        return KV_OK;
    if (status != KV_OK)
        return no_array(detail, status, kinds_key, "integers");
    status = check_count(detail, vocabulary, kinds_key, kinds.count);
    if (status != KV_OK)
        return status;
    for (uint32_t i = 0; i < vocabulary->n_tokens; i++) {
        int64_t kind = kvw_gguf_array_int(&kinds, i);

        if (kind < KVW_TOKEN_NORMAL || kind > KVW_TOKEN_BYTE)
            return kvw_file_error_set(detail, KV_INVALID,
                                      "key '%s': token %" PRIu32 ": %" PRId64, kinds_key, i,
                                      kind);
        vocabulary->kinds[i] = (uint8_t)kind;
    }
    return KV_OK;
}

static kv_status_t read_scores(struct kvw_vocabulary *vocabulary,
                               const struct kvw_gguf *gguf,
                               const struct kvw_file_error *detail)
{
    struct kvw_gguf_array scores;
    kv_status_t status = kvw_gguf_array_floats(gguf, scores_key, &scores);

    if (status != KV_OK)
        return no_array(detail, status, scores_key, "floats");
    status = check_count(detail, vocabulary, scores_key, scores.count);
    if (status != KV_OK)
        return status;
    vocabulary->scores = calloc(vocabulary->n_tokens, sizeof(*vocabulary->scores));
    if (vocabulary->scores == NULL)
        return kvw_file_error_set(detail, KV_NO_MEMORY, "out of memory: %" PRIu32 " tokens",
                                  vocabulary->n_tokens);
    for (uint32_t i = 0; i < vocabulary->n_tokens; i++) {
        vocabulary->scores[i] = kvw_gguf_array_float(&scores, i);
        if (isnan(vocabulary->scores[i]))
            return kvw_file_error_set(detail, KV_INVALID, "key '%s': token %" PRIu32 ": nan",
                                      scores_key, i);
    }
    return KV_OK;
}

kv_status_t kvw_vocabulary_init(struct kvw_vocabulary *vocabulary,
                                const struct kvw_gguf *gguf,
                                bool with_scores,
                                const struct kvw_file_error *detail)
{
    struct kv_random random;
    struct kvw_gguf_array texts;
    kv_status_t status = kvw_gguf_array_texts(gguf, tokens_key, &texts);

    *vocabulary = (struct kvw_vocabulary){0};
    if (status != KV_OK)
        return no_array(detail, status, tokens_key, "strings");
    if (texts.count == 0 || texts.count > TOKENS_MAX)
        return kvw_file_error_set(detail, KV_INVALID, "key '%s': %" PRIu64 " tokens",
                                  tokens_key, texts.count);
    vocabulary->n_tokens = (uint32_t)texts.count;
    kv_random_init_secure(&random);
    vocabulary->secret = kv_random_next(&random);
    status = read_texts(vocabulary, &texts, detail);
    if (status == KV_OK)
        status = read_kinds(vocabulary, gguf, detail);
    if (status == KV_OK && with_scores)
        status = read_scores(vocabulary, gguf, detail);
    if (status != KV_OK)
        kvw_vocabulary_fini(vocabulary);
    return status;
}

void kvw_vocabulary_fini(struct kvw_vocabulary *vocabulary)
{
    free(vocabulary->texts);
    free(vocabulary->kinds);
    free(vocabulary->scores);
    free(vocabulary->slots);
    *vocabulary = (struct kvw_vocabulary){0};
}

bool kvw_token_list_add(struct kvw_token_list *list, uint32_t token)
{
    if (list->count == list->capacity) {
        size_t capacity = list->capacity > 0 ? list->capacity * 2 : 64;
        uint32_t *tokens = realloc(list->tokens, capacity * sizeof(*tokens));

        if (tokens == NULL)
            return false;
        list->tokens = tokens;
        list->capacity = capacity;
    }
    list->tokens[list->count++] = token;
    return true;
}
