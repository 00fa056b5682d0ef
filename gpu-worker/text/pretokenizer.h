/* pretokenizer.h - the pre-tokenizers: where byte-level BPE cuts a text into words, which it
 * then encodes one by one.
 *
 *   gpt-2      contractions ('s 't 're 've 'm 'll 'd); letters, numbers or other marks, each
 *              with the space before; white space, whose last one goes with the word behind
 *   smollm     the same, and each digit a word of its own
 *   llama-bpe  as Llama 3: contractions in any case, letters with any mark before, up to three
 *              digits, marks with the line ends behind, white space up to its last line end
 *   qwen2      the same, with digits one by one
 *
 * Letters and numbers are Unicode's classes L and N, as PCRE2 knows them; white space is the 25
 * characters that Unicode calls so.  This is the only file that includes PCRE2.
 *
 * Threads: a splitter never changes: any number of them.  A walk belongs to one.
 */
#ifndef KV_GPU_WORKER_TEXT_PRETOKENIZER_H
#define KV_GPU_WORKER_TEXT_PRETOKENIZER_H

#include "proto/kv_status.h"

#include <stddef.h>

struct kvw_pretokenizer;
struct kvw_pretokenizer_walk;

/* KV_UNSUPPORTED: no such pre-tokenizer.  KV_NO_MEMORY. */
kv_status_t kvw_pretokenizer_create(const char *name,
                                    size_t name_bytes,
                                    struct kvw_pretokenizer **ret_split);
/* NULL is allowed. */
void kvw_pretokenizer_destroy(struct kvw_pretokenizer *split);

/* "smollm"; the one of several names for the same that is in the list above. */
const char *kvw_pretokenizer_name(const struct kvw_pretokenizer *split);

/* The names above, separated by commas, for messages. */
const char *kvw_pretokenizer_names(void);

/* What walking over texts takes.  NULL: out of memory. */
struct kvw_pretokenizer_walk *
kvw_pretokenizer_walk_create(const struct kvw_pretokenizer *split);
void kvw_pretokenizer_walk_destroy(struct kvw_pretokenizer_walk *walk);

/* Where the word ends that begins at `begin` < `bytes`; more than `begin`.  `text` is valid
 * UTF-8 (which is not checked), and `begin` the end of the word before or 0.  KV_NO_MEMORY. */
kv_status_t kvw_pretokenizer_next(struct kvw_pretokenizer_walk *walk,
                                  const char *text,
                                  size_t bytes,
                                  size_t begin,
                                  size_t *ret_end);

#endif
