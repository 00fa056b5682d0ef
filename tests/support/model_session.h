/* model_session.h - a made model, a store inside of the process, and one attention method.
 *
 * Threads: the caller's.  Memory: open/close.
 */
#ifndef KV_TESTS_SUPPORT_MODEL_SESSION_H
#define KV_TESTS_SUPPORT_MODEL_SESSION_H

#include "gpu-worker/engine/forward.h"
#include "gpu-worker/kvcache/embedded_node.h"
#include "tests/support/model_maker.h"

enum {
    MODEL_SESSION_TOKENS_MAX = 4096,
};

struct model_session {
    struct made_model made;
    struct kvw_device *device;
    struct kvw_model *model;
    struct kvw_embedded *embedded;
    struct kv_client *client;
    struct kvw_method *attention;
    struct kvw_forward *forward;
    uint32_t n_tokens;
    uint32_t tokens[MODEL_SESSION_TOKENS_MAX]; /* drawn; the same ones every time */
};

/* All must go well, or the test fails. */
void model_session_open(struct model_session *session,
                        const struct kvw_method_ops *row,
                        const struct kvw_method_options *options,
                        enum kv_dtype dtype,
                        uint32_t n_tokens);
void model_session_close(struct model_session *session);

/* Passes the tokens [begin, end): those before `prompt` as a prompt, the others as steps.  The
 * logits after the prompt's last token, then after each step:
 *   ret_logits  (end - prompt + 1, MADE_VOCABULARY), from the first that passes on */
void model_session_pass(struct model_session *session,
                        uint32_t begin,
                        uint32_t prompt,
                        uint32_t end,
                        float (*ret_logits)[MADE_VOCABULARY]);

#endif
