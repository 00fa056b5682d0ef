/* vocabulary.h - the tokens of a GGUF file: text, kind and score by id, and ids by text.
 *
 * Checked at creation: arrays of equal lengths, known kinds, scores that are not NaN, no text
 * twice.  Tokens with an empty text are allowed; no lookup finds them.
 *
 * Threads: never changes.  Memory: create/destroy; texts are borrowed from the GGUF file.
 */
#ifndef KV_GPU_WORKER_TEXT_VOCABULARY_H
#define KV_GPU_WORKER_TEXT_VOCABULARY_H

#include "gpu-worker/gguf/gguf.h"

enum {
    KVW_TOKEN_NONE = -1, /* where a model has no such token */
};

/* The numbers are the file's (tokenizer.ggml.token_type). */
enum kvw_token_kind {
    KVW_TOKEN_NORMAL = 1,
    KVW_TOKEN_UNKNOWN = 2,
    KVW_TOKEN_CONTROL = 3,
    KVW_TOKEN_USER_DEFINED = 4,
    KVW_TOKEN_UNUSED = 5,
    KVW_TOKEN_BYTE = 6,
};

struct kvw_vocabulary {
    uint32_t n_tokens;
    struct kvw_text *texts; /* (n_tokens) */
    uint8_t *kinds;         /* (n_tokens) enum kvw_token_kind */
    float *scores;          /* (n_tokens), or NULL if they were not asked for */
    size_t longest;         /* bytes of the longest text */

    uint64_t secret; /* random key of the hash: a file cannot choose texts that collide */
    uint32_t *slots; /* (slot_mask + 1) id + 1, or 0 */
    uint64_t slot_mask;
};

/* KV_INVALID: a key is missing or wrong.  KV_NO_MEMORY.  On failure the vocabulary is empty and
 * needs no fini. */
kv_status_t kvw_vocabulary_init(struct kvw_vocabulary *vocabulary,
                                const struct kvw_gguf *gguf,
                                bool with_scores,
                                const struct kvw_file_error *detail);
void kvw_vocabulary_fini(struct kvw_vocabulary *vocabulary);

/* Returns the id of the token with this text; KVW_TOKEN_NONE: no such token. */
int32_t
kvw_vocabulary_find(const struct kvw_vocabulary *vocabulary, const char *text, size_t bytes);

/* A growing list of token ids.  All zeros is an empty list; its owner frees `tokens`. */
struct kvw_token_list {
    uint32_t *tokens;
    size_t count;
    size_t capacity;
};

/* Appends a token.  Returns false if out of memory; the list is then unchanged. */
bool kvw_token_list_add(struct kvw_token_list *list, uint32_t token);

#endif
