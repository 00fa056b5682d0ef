/* session.c on a made model with a store inside of the process: a session is placed by the first
 * block of its prompt. */
#include "gpu-worker/kvcache/session.h"
#include "kvserver/cluster/placement.h"
#include "tests/support/model_session.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

enum {
    TOKENS = 3000,
};

static struct model_session s;

/* Opens a session of a prompt and returns its ticket. */
static struct kv_ticket ticket_of(const uint32_t *prompt, uint32_t n_prompt)
{
    const struct kvw_session_setup setup = {
        .model = s.model,
        .client = s.client,
        .dtype = KV_FP16,
        .capacity = TOKENS,
        .chunk_tokens = KVW_FORWARD_CHUNK,
        .prompt = prompt,
        .n_prompt = n_prompt,
    };
    struct kvw_session *session;
    struct kv_ticket ticket;
    char detail[256];

    if (kvw_session_create(&setup, &session, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    kv_session_ticket(kvw_session_handle(session), &ticket);
    kvw_session_destroy(session);
    return ticket;
}

static bool is_own_root(const struct kv_ticket *ticket)
{
    return memcmp(&ticket->root, &ticket->session_id, sizeof(ticket->root)) == 0;
}

static void the_first_block_places(void **state)
{
    struct kv_model_info *info = calloc(1, sizeof(*info));
    struct kv_ticket ticket;
    struct kv_id128 name;

    (void)state;
    assert_non_null(info);
    assert_int_equal(kvw_model_info(s.model, KV_FP16, info), KV_OK);
    kv_prompt_names(s.client, info, s.tokens, KV_BLOCK_TOKENS, NULL, 0, &name);
    for (uint32_t n = KV_BLOCK_TOKENS; n <= TOKENS; n += 359) {
        ticket = ticket_of(s.tokens, n);
        assert_true(ticket.root == kv_placement_prompt_root(&name));
    }
    ticket = ticket_of(s.tokens + 1, KV_BLOCK_TOKENS);
    assert_true(ticket.root != kv_placement_prompt_root(&name) && !is_own_root(&ticket));
    ticket = ticket_of(s.tokens, KV_BLOCK_TOKENS - 1);
    assert_true(is_own_root(&ticket));
    ticket = ticket_of(NULL, 0);
    assert_true(is_own_root(&ticket));
    free(info);
}

/* A record may name any session of the tenant: one of another model is not gone on with. */
static void another_models_session(void **state)
{
    struct kv_model_info *other = calloc(1, sizeof(*other));
    struct kvw_session_share share = {.is_arriving = false};
    const struct kvw_session_setup setup = {
        .model = s.model,
        .client = s.client,
        .dtype = KV_FP16,
        .capacity = TOKENS,
        .chunk_tokens = KVW_FORWARD_CHUNK,
        .share = &share,
        .is_kept = true,
    };
    struct kvw_session *session;
    struct kv_session *opened;
    struct kv_op *op;
    char detail[256] = "";

    (void)state;
    assert_non_null(other);
    assert_int_equal(kvw_model_info(s.model, KV_FP16, other), KV_OK);
    other->fingerprint.bytes[3] ^= 1;
    assert_int_equal(kv_open_begin(s.client, other, NULL, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    opened = kv_op_session(op);
    kv_op_free(op);
    kv_session_ticket(opened, &share.ticket);
    assert_int_equal(kvw_session_create(&setup, &session, detail, sizeof(detail)), KV_CONFLICT);
    assert_string_equal(detail, "store: the session is of another model");
    kv_session_free(opened);
    free(other);
}

static int set_up(void **state)
{
    (void)state;
    model_session_open(&s, &kvw_method_full, &kvw_method_defaults, KV_FP16, TOKENS);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    model_session_close(&s);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_block_places),
        cmocka_unit_test(another_models_session),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
