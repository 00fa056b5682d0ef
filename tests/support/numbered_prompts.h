/* numbered_prompts.h - sessions on prompts that are known by a number: opened by the names of their blocks,
 * published, closed.  The tokens of two prompts have nothing in common.  A failure ends the test.
 *
 * Threads: the test's.  Memory: sessions are the caller's, until test_session_close().
 */
#ifndef KV_TESTS_SUPPORT_NUMBERED_PROMPTS_H
#define KV_TESTS_SUPPORT_NUMBERED_PROMPTS_H

#include "client/include/kvclient.h"

struct test_prompts {
    struct kv_client *client;
    const struct kv_model_info *model;
    uint32_t n_blocks; /* of each prompt */
};

/* Waits for the operation, which is to succeed, and frees it. */
void test_finish(struct kv_op *op, const char *what);

/* Returns the names of its blocks: valid until the next call. */
const struct kv_id128 *test_prompt_names(const struct test_prompts *prompts, uint32_t number);

/* Opens a session with the first blocks of the prompt; the store has so many tokens of them. */
struct kv_session *test_prompt_open(const struct test_prompts *prompts,
                                    uint32_t number,
                                    uint32_t n_blocks,
                                    uint32_t *ret_tokens);
void test_session_close(struct kv_session *session);

/* Publishes all blocks of the prompt, which the session has: all are then there. */
void test_prompt_publish(const struct test_prompts *prompts,
                         uint32_t number,
                         struct kv_session *session);

#endif
