/* tokenizer_spm.h - SentencePiece by scores, with bytes for what is no token: the `llama` half
 * of tokenizer.h.
 *
 * A vocabulary of this kind spells a space as U+2581, and bytes as `<0x00>` to `<0xFF>`.
 *
 * Threads: never changes.  Memory: create/destroy; it borrows the vocabulary, which has scores.
 */
#ifndef KV_GPU_WORKER_TEXT_TOKENIZER_SPM_H
#define KV_GPU_WORKER_TEXT_TOKENIZER_SPM_H

#include "gpu-worker/text/vocabulary.h"

struct kv_spm;

/* `unknown`: the token for bytes that have none, or KV_TOKEN_NONE to leave them out.  Statuses
 * as kv_tokenizer_create(): KV_INVALID if a token of bytes is spelled in another way. */
kv_status_t kv_spm_create(const struct kv_vocabulary *vocabulary,
                          int32_t unknown,
                          const struct kv_detail *detail,
                          struct kv_spm **ret_spm);
/* NULL is allowed. */
void kv_spm_destroy(struct kv_spm *spm);

/* Appends the tokens of a text without control tokens; `space`: as if a space stood before it.
 * KV_NO_MEMORY: some may have been added. */
kv_status_t kv_spm_encode(const struct kv_spm *spm,
                          const char *text,
                          size_t bytes,
                          bool space,
                          struct kv_token_list *list);

/* The byte that a token of bytes spells, or -1. */
int kv_spm_byte(struct kv_text spelling);

/* As kv_bpe_decode(): spaces for U+2581. */
size_t kv_spm_decode(struct kv_text spelling, char *ret_bytes);

#endif
