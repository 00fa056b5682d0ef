/* tokenizer_maker.h - GGUF files with nothing in them but a small tokenizer. */
#ifndef KV_TESTS_SUPPORT_TOKENIZER_MAKER_H
#define KV_TESTS_SUPPORT_TOKENIZER_MAKER_H

#include "tests/support/gguf_maker.h"

/* A vocabulary of control tokens, all bytes, and a few merges or pieces. */
struct small_tokenizer {
    const char *pre;     /* as tokenizer.ggml.pre; NULL: SentencePiece */
    const char *chat;    /* tokenizer.chat_template; NULL: none */
    const char *lacking; /* a key that is left out; NULL: none */
    const char *extra;   /* one more token; NULL: none */
    const char *merge;   /* one more line of merges; NULL: none */
    uint32_t extra_kind; /* of all kinds that enum kvw_token_kind has, or another number */
    uint32_t bos;        /* as the key says */
    size_t scores_cut;   /* so many scores are missing */
    size_t kinds_cut;    /* so many kinds are missing */
    float score;         /* of `extra` */
};

enum {
    SMALL_BOS = 1,
    SMALL_EOS = 2,
};

/* Appends the keys; returns the number of tokens. */
size_t add_tokenizer(struct gguf_maker *maker, const struct small_tokenizer *small);
/* Appends the whole file. */
void make_tokenizer(struct gguf_maker *maker, const struct small_tokenizer *small);

#endif
