/* session.c on a made model with a store inside of the process: a session is placed by the first
 * block of its prompt, and finds what answers have left under their names. */
#include "gpu-worker/engine/generate.h"
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

/* ---- what answers leave ------------------------------------------------------------------ */

enum {
    ASKED = 200,    /* tokens of the first prompt */
    ANSWERED = 300, /* of its answer */
    MORE = 20,      /* of the next prompt, behind these */
};

static bool never_ends(void *arg, uint32_t token)
{
    (void)arg;
    (void)token;
    return false;
}

/* Answers a prompt with n_new tokens, which are written behind it, in a session and by a client of
 * its own.  Returns how many of the prompt's tokens were there. */
static uint32_t answer(const struct kvw_method_ops *row,
                       bool reuses,
                       uint32_t *tokens,
                       uint32_t n_tokens,
                       uint32_t n_new)
{
    const struct kv_client_options client_options = {.nodes = kvw_embedded_address(s.embedded),
                                                     .peer_timeout_ms = 60000};
    const struct kvw_sampler_options greedy = {.top_p = 1};
    struct kvw_method_setup method = {
        .session = {.model = s.model,
                    .dtype = KV_FP16,
                    .capacity = TOKENS,
                    .chunk_tokens = KVW_FORWARD_CHUNK,
                    .prompt = tokens,
                    .n_prompt = n_tokens,
                    .reuses = reuses,
                    .publishes = true},
        .options = kvw_method_defaults,
    };
    static _Atomic int stop;
    struct kvw_generate_setup setup = {.n_vocabulary = MADE_VOCABULARY,
                                       .capacity = TOKENS,
                                       .max_tokens = n_new,
                                       .stop = &stop,
                                       .is_end = never_ends};
    struct kvw_generate_result result;
    struct kv_client *client;
    char detail[256] = "";
    uint32_t n_reused;

    if (kv_client_open(&client_options, &client, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    method.session.client = client;
    if (row->create(&method, &setup.attention, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    assert_int_equal(kvw_forward_create(s.model, setup.attention, &setup.forward), KV_OK);
    assert_int_equal(kvw_sampler_create(&greedy, MADE_VOCABULARY, &setup.sampler), KV_OK);
    n_reused = kvw_session_reused(setup.attention->session);
    if (kvw_generate(&setup, tokens, n_tokens, n_reused, &result) != KV_OK)
        fail_msg("%s", kvw_method_detail(setup.attention));
    assert_int_equal(result.generated_tokens, n_new);
    kvw_sampler_destroy(setup.sampler);
    kvw_forward_destroy(setup.forward);
    setup.attention->ops->destroy(setup.attention);
    kv_client_close(client);
    return n_reused;
}

/* The next prompt of a conversation, which has an answer's tokens in it, is there up to the
 * answer's last full block if full attention has made it.  Rows of steps that attended to some
 * rows are not published: they have another's names. */
static void answers_are_found(void **state)
{
    static const struct {
        const struct kvw_method_ops *row;
        uint32_t n_found;
    } cases[] = {
        {&kvw_method_full, (ASKED + ANSWERED - 1) / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS},
        {&kvw_method_window, ASKED / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS},
        {&kvw_method_pqcache, ASKED / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS},
    };
    static uint32_t tokens[ASKED + ANSWERED + 2 * MORE], again[ASKED + ANSWERED + 2 * MORE];
    const uint32_t n_prompt = ASKED + ANSWERED + MORE;

    (void)state;
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        memcpy(tokens, s.tokens + i * ASKED, ASKED * sizeof(tokens[0]));
        assert_int_equal(answer(cases[i].row, true, tokens, ASKED, ANSWERED), 0);
        memcpy(tokens + ASKED + ANSWERED, s.tokens, MORE * sizeof(tokens[0]));
        memcpy(again, tokens, n_prompt * sizeof(tokens[0]));
        assert_int_equal(answer(&kvw_method_full, true, tokens, n_prompt, MORE),
                         cases[i].n_found);
        /* As if nothing had been there. */
        assert_int_equal(answer(&kvw_method_full, false, again, n_prompt, MORE), 0);
        assert_memory_equal(tokens, again, sizeof(tokens));
    }
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
        cmocka_unit_test(answers_are_found),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
