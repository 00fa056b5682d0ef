/* tokenizer.h - text to tokens and back, with the tokenizer of a GGUF file.
 *
 * Two kinds (tokenizer.ggml.model), which give the ids that llama.cpp gives for the same file:
 *   gpt2   byte-level BPE: text is split by the pattern that tokenizer.ggml.pre names
 *          (pretokenizer.h), then pairs of tokens are merged in the order of
 *          tokenizer.ggml.merges
 *   llama  SentencePiece: pairs of characters are merged in the order of
 *          tokenizer.ggml.scores, and text without a token becomes byte tokens
 *
 * Before that, the text is split at special tokens: at user-defined ones always, at control
 * tokens (`<|im_end|>`) only where the caller allows them.  Of two that overlap the longer one
 * wins, and then the one with the smaller id.
 *
 * Text is bytes with a length; it may contain zeros and need not be UTF-8.  BPE replaces a byte
 * that is not part of a character by U+FFFD (overlong forms are decoded to their character);
 * SentencePiece encodes such bytes as byte tokens.  Bytes without a token are dropped, or
 * become the unknown token if SentencePiece has one.
 *
 * Threads: a tokenizer never changes: use it from any number of threads.
 * Memory: create/destroy; it borrows texts from the GGUF file, which must stay open.
 */
#ifndef KV_GPU_WORKER_TEXT_TOKENIZER_H
#define KV_GPU_WORKER_TEXT_TOKENIZER_H

#include "gpu-worker/text/vocabulary.h"

struct kvw_tokenizer;

/* Creates the file's tokenizer, and checks everything that it reads.  Fails with KV_UNSUPPORTED
 * if the model or pre-tokenizer is not supported, with KV_INVALID if a key is missing or wrong,
 * or with KV_NO_MEMORY.  On failure `detail` is one line as from kvw_gguf_open(). */
kv_status_t kvw_tokenizer_create(const struct kvw_gguf *gguf,
                                 struct kvw_tokenizer **ret_tokenizer,
                                 char *detail,
                                 size_t detail_bytes);

/* NULL is allowed. */
void kvw_tokenizer_destroy(struct kvw_tokenizer *tokenizer);

/* "gpt2" or "llama"; "smollm" (the empty string for llama). */
const char *kvw_tokenizer_model(const struct kvw_tokenizer *tokenizer);
const char *kvw_tokenizer_pre(const struct kvw_tokenizer *tokenizer);

/* Tokens are 0 to this - 1. */
uint32_t kvw_tokenizer_n_tokens(const struct kvw_tokenizer *tokenizer);

/* KVW_TOKEN_NONE: the file has none. */
int32_t kvw_tokenizer_bos(const struct kvw_tokenizer *tokenizer);
int32_t kvw_tokenizer_eos(const struct kvw_tokenizer *tokenizer);

/* True for tokens that end an answer: the file's end of text, turn or message (keys
 * tokenizer.ggml.eos_token_id, eot_token_id, eom_token_id), and those known by their names,
 * such as `<|im_end|>`.  `token` may be any number. */
bool kvw_tokenizer_is_end(const struct kvw_tokenizer *tokenizer, uint32_t token);

/* token < kvw_tokenizer_n_tokens() */
enum kvw_token_kind kvw_tokenizer_kind(const struct kvw_tokenizer *tokenizer, uint32_t token);

/* Returns the token's text as in the file, for lists and messages. */
struct kvw_text kvw_tokenizer_text(const struct kvw_tokenizer *tokenizer, uint32_t token);

/* Returns the token with exactly this text, or KVW_TOKEN_NONE. */
int32_t
kvw_tokenizer_find(const struct kvw_tokenizer *tokenizer, const char *text, size_t bytes);

/* Returns the bytes that the token stands for.  They may begin or end inside of a character
 * (see utf8_stream.h).  Control and unknown tokens have no bytes, or their own text if
 * `special` is set.  SentencePiece adds a space before a text: if kvw_tokenizer_adds_space(), a
 * caller that prints a text from its first token on drops that space. */
struct kvw_text
kvw_tokenizer_piece(const struct kvw_tokenizer *tokenizer, uint32_t token, bool special);
bool kvw_tokenizer_adds_space(const struct kvw_tokenizer *tokenizer);

/* A part of a text.  `special`: control tokens in it are recognized.  False for text that a
 * user typed, so that it cannot end a turn. */
struct kvw_text_part {
    const char *text;
    size_t bytes;
    bool special;
};

/* Encodes consecutive parts as one text; tokens other than control tokens may span two parts.
 * `bounds`: with the tokens that the file requires at the beginning and end of a text
 * (add_bos_token, add_eos_token).  Transfers *ret_tokens (*ret_count; free with free()), which
 * is never NULL.  Takes O(n log n) time for any text of n bytes.  KV_TOO_LARGE:
 * more than 2^28 bytes.  KV_NO_MEMORY. */
kv_status_t kvw_tokenizer_encode_parts(const struct kvw_tokenizer *tokenizer,
                                       const struct kvw_text_part *parts,
                                       size_t n_parts,
                                       bool bounds,
                                       uint32_t **ret_tokens,
                                       size_t *ret_count);

/* The same for one part. */
kv_status_t kvw_tokenizer_encode(const struct kvw_tokenizer *tokenizer,
                                 const char *text,
                                 size_t bytes,
                                 bool special,
                                 bool bounds,
                                 uint32_t **ret_tokens,
                                 size_t *ret_count);

/* Whether encoding with `bounds` puts the begin token first. */
bool kvw_tokenizer_adds_bos(const struct kvw_tokenizer *tokenizer);

#endif
