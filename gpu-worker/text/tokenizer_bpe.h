/* tokenizer_bpe.h - byte-level byte-pair encoding: the `gpt2` half of tokenizer.h.
 *
 * A vocabulary of this kind writes every byte as one character (as GPT-2's encoder):
 * printable bytes of Latin-1 as themselves, the 68 others as U+0100 and following, in order.
 * This form never leaves this file: texts are bytes, and so are decoded pieces.
 *
 * Threads: never changes.  Memory: create/destroy; it borrows the vocabulary.
 */
#ifndef KV_GPU_WORKER_TEXT_TOKENIZER_BPE_H
#define KV_GPU_WORKER_TEXT_TOKENIZER_BPE_H

#include "gpu-worker/text/vocabulary.h"

struct kvw_bpe;

/* Reads tokenizer.ggml.pre and tokenizer.ggml.merges; statuses as kvw_tokenizer_create(). */
kv_status_t kvw_bpe_create(const struct kvw_vocabulary *vocabulary,
                           const struct kvw_gguf *gguf,
                           const struct kvw_file_error *detail,
                           struct kvw_bpe **ret_bpe);
/* NULL is allowed. */
void kvw_bpe_destroy(struct kvw_bpe *bpe);

/* Canonical name of the pre-tokenizer. */
const char *kvw_bpe_pre(const struct kvw_bpe *bpe);

/* Appends the tokens of a text without control tokens.  KV_NO_MEMORY: some may have been added.
 */
kv_status_t kvw_bpe_encode(const struct kvw_bpe *bpe,
                           const char *text,
                           size_t bytes,
                           struct kvw_token_list *list);

/* Decodes the text of a normal token into the bytes that it stands for, and returns their
 * number, at most token_text.bytes.  ret_bytes may be token_text.data.  Characters that stand
 * for no byte are copied. */
size_t kvw_bpe_decode(struct kvw_text token_text, char *ret_bytes);

#endif
