/* pretokenizer.h - splits a text into words, which byte-level BPE encodes one by one.  The
 * patterns are those that tokenizer.ggml.pre of a GGUF file names:
 *
 *   gpt-2      contractions ('s 't 're 've 'm 'll 'd); runs of letters, of numbers or of other
 *              characters, each with the space before it; white space, whose last character
 *              belongs to the word after it
 *   smollm     as gpt-2, and each digit is a word
 *   llama-bpe  as Llama 3: contractions in any case; letters with one other character before
 *              them; up to three digits; other characters with the line ends after them; white
 *              space up to its last line end
 *   qwen2      as llama-bpe, and each digit is a word
 *
 * Letters and numbers are Unicode's classes L and N, as PCRE2 knows them; white space is the 25
 * characters that Unicode calls so.  This is the only file that includes PCRE2.
 *
 * Threads: a pre-tokenizer never changes and may be used by any thread; a walk by one at a
 * time.  Memory: create/destroy; a walk keeps its pre-tokenizer.
 */
#ifndef KV_GPU_WORKER_TEXT_PRETOKENIZER_H
#define KV_GPU_WORKER_TEXT_PRETOKENIZER_H

#include "proto/kv_status.h"

#include <stddef.h>

struct kvw_pretokenizer;
struct kvw_pretokenizer_walk;

/* Fails with KV_UNSUPPORTED if there is no pre-tokenizer of this name, or with KV_NO_MEMORY. */
kv_status_t kvw_pretokenizer_create(const char *name,
                                    size_t name_bytes,
                                    struct kvw_pretokenizer **ret_split);
/* NULL is allowed. */
void kvw_pretokenizer_destroy(struct kvw_pretokenizer *split);

/* Returns the name in the list above, for example "smollm"; files have other names for some. */
const char *kvw_pretokenizer_name(const struct kvw_pretokenizer *split);

/* The names above, separated by commas, for messages. */
const char *kvw_pretokenizer_names(void);

/* Creates the state of a walk over texts.  NULL: out of memory. */
struct kvw_pretokenizer_walk *
kvw_pretokenizer_walk_create(const struct kvw_pretokenizer *split);
void kvw_pretokenizer_walk_destroy(struct kvw_pretokenizer_walk *walk);

/* Returns in *ret_end the end of the word that begins at `begin` < `bytes`; words are not
 * empty.  `text` must be valid UTF-8 (not checked), and `begin` 0 or the end of the previous
 * word.  Fails with KV_NO_MEMORY. */
kv_status_t kvw_pretokenizer_next(struct kvw_pretokenizer_walk *walk,
                                  const char *text,
                                  size_t bytes,
                                  size_t begin,
                                  size_t *ret_end);

#endif
