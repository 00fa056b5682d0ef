/* A vocabulary and one of two encoders, and what both share: tokens at the beginning and end of
 * a text, encoding between special tokens, and the bytes of each token. */
#include "gpu-worker/text/tokenizer.h"

#include "gpu-worker/text/tokenizer_bpe.h"
#include "gpu-worker/text/tokenizer_private.h"
#include "gpu-worker/text/tokenizer_spm.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Control tokens by name, whatever kind a file gives them: some files mark them as normal, and
 * lack the keys that say which tokens end an answer. */
static const struct {
    const char *name;
    bool is_end;
} known[] = {
    {"<|im_end|>", true},      {"<|eot_id|>", true},         {"<|eom_id|>", true},
    {"<|end_of_text|>", true}, {"<|endoftext|>", true},      {"<|end|>", true},
    {"<end_of_turn>", true},   {"<end_of_utterance>", true},
};

/* --- Creation --- */

static kv_status_t read_flag(const struct kvw_gguf *gguf,
                             const char *key,
                             const struct kvw_file_error *detail,
                             bool *flag)
{
    kv_status_t status = kvw_gguf_bool(gguf, key, flag);

    if (status == KV_INVALID)
        return kvw_file_error_set(detail, KV_INVALID, "key '%s': not a boolean", key);
    return KV_OK;
}

/* Leaves `*token` unchanged if the file does not have the key. */
static kv_status_t read_id(const struct kvw_tokenizer *tokenizer,
                           const struct kvw_gguf *gguf,
                           const char *key,
                           const struct kvw_file_error *detail,
                           int32_t *token)
{
    uint32_t id;
    kv_status_t status = kvw_gguf_u32(gguf, key, &id);

    if (status == KV_NOT_FOUND)
        return KV_OK;
    if (status != KV_OK)
        return kvw_file_error_set(detail, KV_INVALID, "key '%s': not a token id", key);
    if (id >= tokenizer->vocabulary.n_tokens)
        return kvw_file_error_set(detail, KV_INVALID,
                                  "key '%s': token id %" PRIu32 ": the vocabulary has %" PRIu32
                                  " tokens",
                                  key, id, tokenizer->vocabulary.n_tokens);
    *token = (int32_t)id;
    return KV_OK;
}

static void add_end(struct kvw_tokenizer *tokenizer, int32_t token)
{
    if (token == KVW_TOKEN_NONE || kvw_tokenizer_is_end(tokenizer, (uint32_t)token))
        return;
    assert(tokenizer->n_ends < KVW_TOKENIZER_ENDS_MAX);
    tokenizer->ends[tokenizer->n_ends++] = (uint32_t)token;
}

static kv_status_t read_ids(struct kvw_tokenizer *tokenizer,
                            const struct kvw_gguf *gguf,
                            const struct kvw_file_error *detail)
{
    const struct kvw_vocabulary *vocabulary = &tokenizer->vocabulary;
    int32_t end_of_turn = KVW_TOKEN_NONE, end_of_message = KVW_TOKEN_NONE;
    const struct {
        const char *key;
        int32_t *token;
    } ids[] = {
        {"tokenizer.ggml.bos_token_id", &tokenizer->bos},
        {"tokenizer.ggml.eos_token_id", &tokenizer->eos},
        {"tokenizer.ggml.unknown_token_id", &tokenizer->unknown},
        {"tokenizer.ggml.eot_token_id", &end_of_turn},
        {"tokenizer.ggml.eom_token_id", &end_of_message},
    };
    kv_status_t status = KV_OK;

    for (size_t i = 0; i < sizeof(ids) / sizeof(*ids) && status == KV_OK; i++)
        status = read_id(tokenizer, gguf, ids[i].key, detail, ids[i].token);
    if (status == KV_OK)
        status = read_flag(gguf, "tokenizer.ggml.add_bos_token", detail, &tokenizer->add_bos);
    if (status == KV_OK)
        status = read_flag(gguf, "tokenizer.ggml.add_eos_token", detail, &tokenizer->add_eos);
    if (status == KV_OK && tokenizer->spm != NULL)
        status =
            read_flag(gguf, "tokenizer.ggml.add_space_prefix", detail, &tokenizer->add_space);
    if (status != KV_OK)
        return status;
    add_end(tokenizer, tokenizer->eos);
    add_end(tokenizer, end_of_turn);
    add_end(tokenizer, end_of_message);
    for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
        int32_t token = kvw_vocabulary_find(vocabulary, known[i].name, strlen(known[i].name));

        if (token == KVW_TOKEN_NONE)
            continue;
        vocabulary->kinds[token] = KVW_TOKEN_CONTROL;
        if (known[i].is_end)
            add_end(tokenizer, token);
    }
    return KV_OK;
}

/* Decodes the pieces of normal and byte tokens; those of others are their text. */
static bool decode_pieces(struct kvw_tokenizer *tokenizer)
{
    const struct kvw_vocabulary *vocabulary = &tokenizer->vocabulary;
    size_t bytes = 1, at = 0;

    for (uint32_t i = 0; i < vocabulary->n_tokens; i++)
        bytes += vocabulary->texts[i].bytes;
    tokenizer->piece_bytes = malloc(bytes);
    tokenizer->pieces = calloc(vocabulary->n_tokens, sizeof(*tokenizer->pieces));
    if (tokenizer->piece_bytes == NULL || tokenizer->pieces == NULL)
        return false;
    for (uint32_t i = 0; i < vocabulary->n_tokens; i++) {
        char *piece = tokenizer->piece_bytes + at;
        size_t piece_bytes;

        if (vocabulary->kinds[i] == KVW_TOKEN_BYTE && tokenizer->spm != NULL) {
            piece[0] = (char)kvw_spm_byte(vocabulary->texts[i]);
            piece_bytes = 1;
        } else if (vocabulary->kinds[i] == KVW_TOKEN_UNUSED) {
            piece_bytes = 0;
        } else if (vocabulary->kinds[i] != KVW_TOKEN_NORMAL) {
            tokenizer->pieces[i] = vocabulary->texts[i];
            continue;
        } else {
            piece_bytes = tokenizer->spm != NULL ? kvw_spm_decode(vocabulary->texts[i], piece)
                                                 : kvw_bpe_decode(vocabulary->texts[i], piece);
        }
        tokenizer->pieces[i] = (struct kvw_text){piece, piece_bytes};
        at += piece_bytes;
    }
    return true;
}

static kv_status_t read_model(struct kvw_tokenizer *tokenizer,
                              const struct kvw_gguf *gguf,
                              const struct kvw_file_error *detail)
{
    static const char key[] = "tokenizer.ggml.model";
    struct kvw_text model;
    kv_status_t status = kvw_gguf_text(gguf, key, &model);

    if (status != KV_OK)
        return kvw_file_error_set(detail, KV_INVALID, "key '%s': %s", key,
                                  status == KV_NOT_FOUND ? "missing" : "not a string");
    if (kvw_text_is(model, "gpt2")) {
        status = kvw_vocabulary_init(&tokenizer->vocabulary, gguf, false, detail);
        if (status == KV_OK)
            status = kvw_bpe_create(&tokenizer->vocabulary, gguf, detail, &tokenizer->bpe);
        if (status == KV_OK)
            tokenizer->add_bos = strcmp(kvw_bpe_pre(tokenizer->bpe), "llama-bpe") == 0;
        return status;
    }
    if (!kvw_text_is(model, "llama"))
        return kvw_file_error_set(detail, KV_UNSUPPORTED,
                                  "key '%s': '%s' is not supported: expected gpt2 or llama",
                                  key, kvw_show(model).text);
    status = kvw_vocabulary_init(&tokenizer->vocabulary, gguf, true, detail);
    if (status != KV_OK)
        return status;
    /* SentencePiece's own places for these. */
    if (tokenizer->vocabulary.n_tokens > 2) {
        tokenizer->unknown = 0;
        tokenizer->bos = 1;
        tokenizer->eos = 2;
    }
    tokenizer->add_bos = true;
    tokenizer->add_space = true;
    status = read_id(tokenizer, gguf, "tokenizer.ggml.unknown_token_id", detail,
                     &tokenizer->unknown);
    if (status == KV_OK)
        status =
            kvw_spm_create(&tokenizer->vocabulary, tokenizer->unknown, detail, &tokenizer->spm);
    return status;
}

kv_status_t kvw_tokenizer_create(const struct kvw_gguf *gguf,
                                 struct kvw_tokenizer **ret_tokenizer,
                                 char *detail,
                                 size_t detail_bytes)
{
    const struct kvw_file_error where = {detail, detail_bytes, kvw_gguf_path(gguf)};
    struct kvw_tokenizer *tokenizer = calloc(1, sizeof(*tokenizer));
    kv_status_t status;

    if (tokenizer == NULL)
        return kvw_file_error_set(&where, KV_NO_MEMORY, "out of memory: tokenizer");
    tokenizer->bos = tokenizer->eos = tokenizer->unknown = KVW_TOKEN_NONE;
    status = read_model(tokenizer, gguf, &where);
    if (status == KV_OK)
        status = read_ids(tokenizer, gguf, &where);
    if (status == KV_OK &&
        !(kvw_tokenizer_list_specials(tokenizer) && decode_pieces(tokenizer)))
        status = kvw_file_error_set(&where, KV_NO_MEMORY, "out of memory: tokenizer");
    if (status != KV_OK) {
        kvw_tokenizer_destroy(tokenizer);
        return status;
    }
    *ret_tokenizer = tokenizer;
    return KV_OK;
}

void kvw_tokenizer_destroy(struct kvw_tokenizer *tokenizer)
{
    if (tokenizer == NULL)
        return;
    kvw_bpe_destroy(tokenizer->bpe);
    kvw_spm_destroy(tokenizer->spm);
    free(tokenizer->specials);
    free(tokenizer->piece_bytes);
    free(tokenizer->pieces);
    kvw_vocabulary_fini(&tokenizer->vocabulary);
    free(tokenizer);
}

/* --- Properties of tokens --- */

const char *kvw_tokenizer_model(const struct kvw_tokenizer *tokenizer)
{
    return tokenizer->bpe != NULL ? "gpt2" : "llama";
}

const char *kvw_tokenizer_pre(const struct kvw_tokenizer *tokenizer)
{
    return tokenizer->bpe != NULL ? kvw_bpe_pre(tokenizer->bpe) : "";
}

uint32_t kvw_tokenizer_n_tokens(const struct kvw_tokenizer *tokenizer)
{
    return tokenizer->vocabulary.n_tokens;
}

int32_t kvw_tokenizer_bos(const struct kvw_tokenizer *tokenizer)
{
    return tokenizer->bos;
}

int32_t kvw_tokenizer_eos(const struct kvw_tokenizer *tokenizer)
{
    return tokenizer->eos;
}

bool kvw_tokenizer_adds_bos(const struct kvw_tokenizer *tokenizer)
{
    return tokenizer->add_bos && tokenizer->bos != KVW_TOKEN_NONE;
}

bool kvw_tokenizer_adds_space(const struct kvw_tokenizer *tokenizer)
{
    return tokenizer->add_space;
}

bool kvw_tokenizer_is_end(const struct kvw_tokenizer *tokenizer, uint32_t token)
{
    for (size_t i = 0; i < tokenizer->n_ends; i++) {
        if (tokenizer->ends[i] == token)
            return true;
    }
    return false;
}

enum kvw_token_kind kvw_tokenizer_kind(const struct kvw_tokenizer *tokenizer, uint32_t token)
{
    assert(token < tokenizer->vocabulary.n_tokens);
    return tokenizer->vocabulary.kinds[token];
}

struct kvw_text kvw_tokenizer_text(const struct kvw_tokenizer *tokenizer, uint32_t token)
{
    assert(token < tokenizer->vocabulary.n_tokens);
    return tokenizer->vocabulary.texts[token];
}

int32_t
kvw_tokenizer_find(const struct kvw_tokenizer *tokenizer, const char *text, size_t bytes)
{
    return kvw_vocabulary_find(&tokenizer->vocabulary, text, bytes);
}

struct kvw_text
kvw_tokenizer_piece(const struct kvw_tokenizer *tokenizer, uint32_t token, bool special)
{
    uint8_t kind;

    assert(token < tokenizer->vocabulary.n_tokens);
    kind = tokenizer->vocabulary.kinds[token];
    if (!special && (kind == KVW_TOKEN_CONTROL || kind == KVW_TOKEN_UNKNOWN))
        return (struct kvw_text){"", 0};
    return tokenizer->pieces[token];
}

/* --- Encoding --- */

/* Encodes the text between two special tokens.  SentencePiece puts a space before each. */
static kv_status_t encode_text(const struct kvw_tokenizer *tokenizer,
                               const struct kvw_tokenizer_cut *cut,
                               size_t begin,
                               size_t end,
                               struct kvw_token_list *list)
{
    if (begin == end)
        return KV_OK;
    if (tokenizer->bpe != NULL)
        return kvw_bpe_encode(tokenizer->bpe, cut->text + begin, end - begin, list);
    return kvw_spm_encode(tokenizer->spm, cut->text + begin, end - begin, tokenizer->add_space,
                          list);
}

static kv_status_t encode_cut(const struct kvw_tokenizer *tokenizer,
                              const struct kvw_tokenizer_cut *cut,
                              struct kvw_token_list *list)
{
    size_t begin = 0;

    for (size_t i = 0; i < cut->n_hits; i++) {
        const struct kvw_tokenizer_hit *hit = &cut->hits[i];
        kv_status_t status = encode_text(tokenizer, cut, begin, hit->begin, list);

        if (status != KV_OK)
            return status;
        if (!kvw_token_list_add(list, hit->token))
            return KV_NO_MEMORY;
        begin = hit->begin + tokenizer->vocabulary.texts[hit->token].bytes;
    }
    return encode_text(tokenizer, cut, begin, cut->bytes, list);
}

kv_status_t kvw_tokenizer_encode_parts(const struct kvw_tokenizer *tokenizer,
                                       const struct kvw_text_part *parts,
                                       size_t n_parts,
                                       bool bounds,
                                       uint32_t **ret_tokens,
                                       size_t *ret_count)
{
    struct kvw_token_list list = {0};
    struct kvw_tokenizer_cut cut = {0};
    kv_status_t status = kvw_tokenizer_split_special_parts(tokenizer, parts, n_parts, &cut);

    if (status == KV_OK && bounds && kvw_tokenizer_adds_bos(tokenizer) &&
        !kvw_token_list_add(&list, (uint32_t)tokenizer->bos))
        status = KV_NO_MEMORY;
    if (status == KV_OK)
        status = encode_cut(tokenizer, &cut, &list);
    if (status == KV_OK && bounds && tokenizer->add_eos && tokenizer->eos != KVW_TOKEN_NONE &&
        !kvw_token_list_add(&list, (uint32_t)tokenizer->eos))
        status = KV_NO_MEMORY;
    if (status == KV_OK && list.tokens == NULL) {
        list.tokens = malloc(sizeof(*list.tokens));
        if (list.tokens == NULL)
            status = KV_NO_MEMORY;
    }
    free(cut.text);
    free(cut.taken);
    free(cut.hits);
    if (status != KV_OK) {
        free(list.tokens);
        return status;
    }
    *ret_tokens = list.tokens;
    *ret_count = list.count;
    return KV_OK;
}

kv_status_t kvw_tokenizer_encode(const struct kvw_tokenizer *tokenizer,
                                 const char *text,
                                 size_t bytes,
                                 bool special,
                                 bool bounds,
                                 uint32_t **ret_tokens,
                                 size_t *ret_count)
{
    const struct kvw_text_part part = {text, bytes, special};

    return kvw_tokenizer_encode_parts(tokenizer, &part, 1, bounds, ret_tokens, ret_count);
}
