/* tokenizer_private.h - the inside of a tokenizer, and the functions of special_tokens.c.
 */
#ifndef KV_GPU_WORKER_TEXT_TOKENIZER_PRIVATE_H
#define KV_GPU_WORKER_TEXT_TOKENIZER_PRIVATE_H

#include "gpu-worker/text/tokenizer.h"

enum {
    KVW_TOKENIZER_ENDS_MAX = 32,
};

struct kvw_tokenizer {
    struct kvw_vocabulary vocabulary;
    struct kvw_bpe *bpe; /* one of the two */
    struct kvw_spm *spm;

    int32_t bos, eos, unknown;
    bool add_bos, add_eos, add_space;
    uint32_t ends[KVW_TOKENIZER_ENDS_MAX];
    size_t n_ends;

    uint32_t *specials; /* tokens at which a text is split, the longest first */
    size_t n_specials;
    char *piece_bytes;       /* memory of the pieces that differ from their token's text */
    struct kvw_text *pieces; /* (n_tokens) */
};

/* A token found in the text. */
struct kvw_tokenizer_hit {
    size_t begin;
    uint32_t token;
};

/* All parts as one text, and the special tokens found in it. */
struct kvw_tokenizer_cut {
    char *text;
    size_t bytes;
    unsigned char *taken; /* (bytes) 1: part of a token in `hits` */
    struct kvw_tokenizer_hit *hits;
    size_t n_hits, capacity;
};

/* Fills `specials` and `n_specials` from the vocabulary.  Returns false if out of memory. */
bool kvw_tokenizer_list_specials(struct kvw_tokenizer *tokenizer);

/* Joins the parts and finds the special tokens in them.  `cut` must be all zeros; the caller
 * frees `text`, `taken` and `hits`, also after a failure.  Fails with KV_TOO_LARGE or
 * KV_NO_MEMORY. */
kv_status_t kvw_tokenizer_split_special_parts(const struct kvw_tokenizer *tokenizer,
                                              const struct kvw_text_part *parts,
                                              size_t n_parts,
                                              struct kvw_tokenizer_cut *cut);

#endif
