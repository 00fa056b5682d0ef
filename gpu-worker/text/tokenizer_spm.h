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

struct kvw_spm;

/* `unknown`: the token for bytes that have none, or KVW_TOKEN_NONE to leave them out.  Statuses
 * as kvw_tokenizer_create(): KV_INVALID if a token of bytes is spelled in another way. */
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

/* The byte that a token of bytes spells, or -1. */
int kvw_spm_byte(struct kvw_text token_text);

/* As kvw_bpe_decode(): spaces for U+2581. */
size_t kvw_spm_decode(struct kvw_text token_text, char *ret_bytes);

#endif
