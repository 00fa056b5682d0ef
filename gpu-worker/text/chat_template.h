/* chat_template.h - a conversation as the tokens that a model was trained on.
 *
 * A GGUF file carries its template as a program in Jinja.  It is not run: three families are
 * recognized by their marks, and implemented here as published.
 *
 *   chatml  <|im_start|>ROLE\nTEXT<|im_end|>\n ...              <|im_start|>assistant\n
 *   llama2  BOS [INST] <<SYS>>\nTEXT\n<</SYS>>\n\nTEXT [/INST] TEXT EOS ...
 *   llama3  BOS <|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|> ...
 *           <|start_header_id|>assistant<|end_header_id|>\n\n
 *
 * The llama families trim white space around each text, chatml does not.  If a chatml template
 * has a default system message (SmolLM2, Qwen2), it is read from the template; dates, tools and
 * the like are not supported.
 *
 * Only marks that the template writes become control tokens; a mark that a user types is text.
 *
 * Threads: pure functions; a template never changes.
 */
#ifndef KV_GPU_WORKER_TEXT_CHAT_TEMPLATE_H
#define KV_GPU_WORKER_TEXT_CHAT_TEMPLATE_H

#include "gpu-worker/text/tokenizer.h"

enum kvw_chat_family {
    KVW_CHAT_CHATML,
    KVW_CHAT_LLAMA2,
    KVW_CHAT_LLAMA3,
};

struct kvw_chat_template;

/* Recognizes the file's tokenizer.chat_template, or uses the family called `name`
 * ("chatml", "llama2", "llama3"; NULL: as in the file).  The marks must be tokens of this
 * tokenizer (llama2: it must have BOS and EOS).  The template keeps tokenizer and file.
 * KV_NOT_FOUND: the file has no template.  KV_UNSUPPORTED: it is of none of these families, or
 * the tokenizer lacks a mark.  KV_INVALID: `name` is not a family, or the key is not a text.
 * KV_NO_MEMORY.  On failure `detail` gets one line as in kvw_gguf_open(). */
kv_status_t kvw_chat_template_create(const struct kvw_gguf *gguf,
                                     const struct kvw_tokenizer *tokenizer,
                                     const char *name,
                                     struct kvw_chat_template **ret_template,
                                     char *detail,
                                     size_t detail_bytes);

/* NULL is allowed. */
void kvw_chat_template_destroy(struct kvw_chat_template *chat);

enum kvw_chat_family kvw_chat_template_family(const struct kvw_chat_template *chat);
/* "chatml" */
const char *kvw_chat_template_name(const struct kvw_chat_template *chat);

/* The system message for conversations without one; no bytes: none. */
struct kvw_text kvw_chat_template_system(const struct kvw_chat_template *chat);

enum kvw_chat_role {
    KVW_CHAT_SYSTEM,
    KVW_CHAT_USER,
    KVW_CHAT_ASSISTANT,
};

struct kvw_chat_message {
    enum kvw_chat_role role;
    const char *text;
    size_t bytes;
};

/* Encodes a conversation up to where the assistant's next answer begins.  A system message may
 * only come first, then user and assistant take turns, the user first and last; KV_INVALID
 * otherwise. Pass the whole conversation each time: its tokens begin with those of earlier
 * turns, unless the tokenizer encodes an answer differently than the model sampled it.
 * Transfers *ret_tokens (*ret_count; free with free()).  Fails with KV_TOO_LARGE or
 * KV_NO_MEMORY as kvw_tokenizer_encode_parts(). */
kv_status_t kvw_chat_template_encode(const struct kvw_chat_template *chat,
                                     const struct kvw_chat_message *messages,
                                     size_t n_messages,
                                     uint32_t **ret_tokens,
                                     size_t *ret_count);

/* The same up to the end of the last text, whose turn stays open: the next tokens continue it.
 */
kv_status_t kvw_chat_template_encode_open(const struct kvw_chat_template *chat,
                                          const struct kvw_chat_message *messages,
                                          size_t n_messages,
                                          uint32_t **ret_tokens,
                                          size_t *ret_count);

#endif
