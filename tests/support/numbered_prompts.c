#include "tests/support/numbered_prompts.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    BLOCKS_MAX = 64,
};

void test_finish(struct kv_op *op, const char *what)
{
    if (kv_wait(op) != KV_OK)
        fail_msg("%s: %s", what, kv_op_detail(op));
    kv_op_free(op);
}

const struct kv_id128 *test_prompt_names(const struct test_prompts *prompts, uint32_t number)
{
    static struct kv_id128 names[BLOCKS_MAX];
    static uint32_t tokens[BLOCKS_MAX * KV_BLOCK_TOKENS];
    const uint32_t n = prompts->n_blocks * KV_BLOCK_TOKENS;

    assert_true(prompts->n_blocks <= BLOCKS_MAX);
    for (uint32_t at = 0; at < n; at++)
        tokens[at] = at + number * n;
    kv_prompt_names(prompts->client, prompts->model, tokens, n, NULL, 0, names);
    return names;
}

struct kv_session *test_prompt_open(const struct test_prompts *prompts,
                                    uint32_t number,
                                    uint32_t n_blocks,
                                    uint32_t *ret_tokens)
{
    const struct kv_session_options options = {
        .block_names = test_prompt_names(prompts, number), .n_block_names = n_blocks};
    struct kv_session *session;
    struct kv_op *op;

    assert_int_equal(kv_open_begin(prompts->client, prompts->model, &options, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("open: %s", kv_op_detail(op));
    *ret_tokens = kv_op_tokens(op);
    session = kv_op_session(op);
    kv_op_free(op);
    return session;
}

void test_session_close(struct kv_session *session)
{
    struct kv_op *op;

    assert_int_equal(kv_close_begin(session, 0, &op), KV_OK);
    test_finish(op, "close");
    kv_session_free(session);
}

void test_prompt_publish(const struct test_prompts *prompts,
                         uint32_t number,
                         struct kv_session *session)
{
    const struct kv_publish blocks = {.n_names = prompts->n_blocks,
                                      .names = test_prompt_names(prompts, number)};
    struct kv_op *op;

    assert_int_equal(kv_publish_begin(session, &blocks, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("publish: %s", kv_op_detail(op));
    assert_int_equal(kv_op_tokens(op), prompts->n_blocks * KV_BLOCK_TOKENS);
    kv_op_free(op);
}
