/* tokenizer_spm.h - SentencePiece BPE by scores, with byte tokens for text that has no token:
 * the `llama` half of tokenizer.h.
 *
 * A vocabulary of this kind writes a space as U+2581, and byte tokens as `<0x00>` to `<0xFF>`.
 *
 * Threads: never changes.  Memory: create/destroy; it borrows the vocabulary, which has scores.
 */
#ifndef KV_GPU_WORKER_TEXT_TOKENIZER_SPM_H
#define KV_GPU_WORKER_TEXT_TOKENIZER_SPM_H

#include "gpu-worker/text/vocabulary.h"

struct kvw_spm;

/* Creates an encoder.  `unknown` is the token for bytes that have none; KVW_TOKEN_NONE: they
 * are dropped.  Fails as kvw_tokenizer_create() does, with KV_INVALID if a byte token has
 * another form. */
kv_status_t kvw_spm_create(const struct kvw_vocabulary *vocabulary,
                           int32_t unknown,
                           const struct kvw_file_error *detail,
                           struct kvw_spm **ret_spm);
/* NULL is allowed. */
void kvw_spm_destroy(struct kvw_spm *spm);

/* Appends the tokens of a text without control tokens; `space`: as if a space stood before it.
 * KV_NO_MEMORY: some may have been added. */
kv_status_t kvw_spm_encode(const struct kvw_spm *spm,
                           const char *text,
                           size_t bytes,
                           bool space,
                           struct kvw_token_list *list);

/* Returns the byte of a byte token's text, or -1. */
int kvw_spm_byte(struct kvw_text token_text);

/* As kvw_bpe_decode(): spaces for U+2581. */
size_t kvw_spm_decode(struct kvw_text token_text, char *ret_bytes);

#endif
