/* tokenizer_private.h - the inside of a tokenizer, and what special_tokens.c does for
 * tokenizer.c.
 */
#ifndef KV_GPU_WORKER_TEXT_TOKENIZER_PRIVATE_H
#define KV_GPU_WORKER_TEXT_TOKENIZER_PRIVATE_H

#include "gpu-worker/text/tokenizer.h"

enum {
    ENDS_MAX = 32,
};

struct kv_tokenizer {
    struct kv_vocabulary vocabulary;
    struct kv_bpe *bpe; /* one of the two */
    struct kv_spm *spm;

    int32_t bos, eos, unknown;
    bool add_bos, add_eos, add_space;
    uint32_t ends[ENDS_MAX];
    size_t n_ends;

    uint32_t *specials; /* tokens that are cut out, the longest spelling first */
    size_t n_specials;
    char *piece_bytes;      /* the pieces that are not their spelling */
    struct kv_text *pieces; /* (n_tokens) */
};

/* A token found in the text. */
struct hit {
    size_t begin;
    uint32_t token;
};

/* All parts as one text, and the tokens cut out of it. */
struct cut {
    char *text;
    size_t bytes;
    unsigned char *taken; /* (bytes) 1: belongs to a token that was cut out */
    struct hit *hits;
    size_t n_hits, capacity;
};

/* Fills `specials` and `n_specials` from the vocabulary.  false: out of memory. */
bool kv_tokenizer_list_specials(struct kv_tokenizer *tokenizer);

/* Joins the parts and cuts tokens out of them.  `cut` begins as zeros; the caller frees `text`,
 * `taken` and `hits`, after a failure too.  KV_TOO_LARGE, KV_NO_MEMORY. */
kv_status_t kv_tokenizer_cut_parts(const struct kv_tokenizer *tokenizer,
                                   const struct kv_text_part *parts,
                                   size_t n_parts,
                                   struct cut *cut);

#endif
