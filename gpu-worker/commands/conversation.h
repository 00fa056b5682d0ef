/* conversation.h - a conversation: its messages and tokens, the session with their rows, and the
 * record by which another process goes on with it.
 *
 * The text is what counts: whenever the rows are lost, because the session's lease has ended or a
 * node died, the tokens are computed again in a new session, on the nodes that are up, and a line
 * on stderr says so.
 *
 * Used by chat, decode, and generate with --session.
 *
 * Threads: one.  Memory: kvw_conversation_open() / kvw_conversation_close(), also after a failure.
 */
#ifndef KV_GPU_WORKER_COMMANDS_CONVERSATION_H
#define KV_GPU_WORKER_COMMANDS_CONVERSATION_H

#include "gpu-worker/commands/context.h"
#include "gpu-worker/kvcache/session_record.h"
#include "gpu-worker/text/chat_template.h"

struct kvw_conversation {
    struct kvw_context *worker;
    const char *name; /* of the session; NULL: it has none, and no record */
    struct kvw_chat_template *template;
    struct kvw_sampler *sampler;
    struct kvw_method_options method;

    struct kvw_record record; /* messages and tokens, and what was last saved */
    size_t messages_room;
    bool is_new;          /* there was no record */
    uint32_t n_passed;    /* of the tokens, in the cache */
    uint32_t n_generated; /* of the tokens, the end: of the answer that is being generated */

    /* The session of the record, or the one that was lost last. */
    struct kvw_session_share share;
    bool has_share;                /* it may still be there */
    bool is_resumed;               /* rows after n_passed are to be discarded first */
    uint32_t n_nodes;              /* in the store's list, as it was when it was opened */
    char detail[KVW_DETAIL_BYTES]; /* of the last failure */
    char lost[KVW_DETAIL_BYTES]; /* of the one by which the rows were lost; "": they are not */
    bool is_waiting;             /* for a node, and it was said */

    struct kvw_answer answer;
};

/* Opens the store, and loads the record of --session if there is one.  File and model are open.
 * Return the exit status after printing what is wrong. */
int kvw_conversation_open(struct kvw_conversation *conversation, struct kvw_context *worker);
/* Says on stderr what a session goes on with, or that it begins; not with --json. */
void kvw_conversation_say(const struct kvw_conversation *conversation);
void kvw_conversation_close(struct kvw_conversation *conversation);

/* Adds a message; transfers `text`, which is 0-terminated. */
int kvw_conversation_add(struct kvw_conversation *conversation,
                         enum kvw_chat_role role,
                         char *text);
/* Whether a prompt can be a message: it has no zero bytes. */
bool kvw_conversation_takes(const struct kvw_context *worker, const char *text, size_t bytes);
/* Removes the last message. */
void kvw_conversation_drop(struct kvw_conversation *conversation);

/* Recognizes the model's chat template, for kvw_conversation_encode(). */
int kvw_conversation_template(struct kvw_conversation *conversation);
/* Encodes the messages as what the next answer follows.  Free *ret_tokens with free(). */
int kvw_conversation_encode(struct kvw_conversation *conversation,
                            uint32_t **ret_tokens,
                            size_t *ret_count);

/* Encodes the tokens so far and more text, without a chat template. */
int kvw_conversation_append(struct kvw_conversation *conversation,
                            const char *text,
                            size_t bytes,
                            uint32_t **ret_tokens,
                            size_t *ret_count);

/* Checks that a conversation that goes on has an answer at its end, or that it is none, but a
 * text without a chat template. */
int kvw_conversation_check(const struct kvw_conversation *conversation, bool is_raw);
/* Checks that n tokens fit, and makes no more room than they and an answer need. */
int kvw_conversation_fit(struct kvw_conversation *conversation, size_t n_tokens);

/* Generates an answer to the tokens, which it prints, reports and adds as a message, and saves the
 * record.  An interrupt ends the answer; if there is none of it yet, nothing is added and
 * *ret_result says so. */
int kvw_conversation_answer(struct kvw_conversation *conversation,
                            const uint32_t *tokens,
                            size_t n_tokens,
                            struct kvw_generate_result *ret_result);

/* Loads the record of a session, and checks that it is of this model.  *ret_is_new: there is
 * none. */
int kvw_conversation_load(struct kvw_context *worker,
                          const char *name,
                          struct kvw_record *ret_record,
                          bool *ret_is_new);
/* Checks --session; returns its value, NULL: not given.  *ret_outcome: the exit status. */
const char *kvw_session_name(const struct kvw_context *worker, int *ret_outcome);
/* The fingerprint of the model with the type of its rows. */
kv_status_t kvw_context_fingerprint(const struct kvw_context *worker,
                                    struct kv_id128 *ret_fingerprint);

#endif
