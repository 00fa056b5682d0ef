/* layer_reader.c, and sessions that go on with what others stored: on a made model with a store
 * inside of the process, the logits are those of one worker that does it all, bit for bit. */
#include "gpu-worker/kvcache/layer_reader.c" /* its insides are broken below */
#include "tests/support/dies.h"
#include "tests/support/model_session.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <string.h>

enum {
    PROMPT = 2500, /* more pieces of a layer than one, and the last one is short */
    STEPS = 12,
    TOKENS = PROMPT + STEPS,
};

static struct model_session s;
static float whole[STEPS + 1][MADE_VOCABULARY], resumed[STEPS + 1][MADE_VOCABULARY];
static _Atomic int stop;
static uint32_t arrived_layer, arrived_tokens;

static void arrived(void *arg, uint32_t layer, uint32_t tokens, uint32_t needed)
{
    assert_int_equal(needed, 600);
    arrived_layer = layer;
    arrived_tokens = tokens;
    stop = *(const int *)arg;
}

/* Closes the attention, and opens one for a session that exists, or is kept, or both. */
static void reopen(const struct kvw_method_ops *row,
                   const struct kvw_method_options *options,
                   const struct kvw_session_share *share,
                   uint32_t kv_head_begin,
                   uint32_t n_kv_heads)
{
    const struct kvw_method_setup setup = {
        .session =
            {
                .model = s.model,
                .client = s.client,
                .dtype = KV_FP16,
                .capacity = TOKENS,
                .chunk_tokens = KVW_FORWARD_CHUNK,
                .share = share,
                .is_kept = true,
                .kv_head_begin = kv_head_begin,
                .n_kv_heads = n_kv_heads,
            },
        .options = *options,
    };
    char detail[256] = "";

    kvw_forward_destroy(s.forward);
    s.attention->ops->destroy(s.attention);
    if (row->create(&setup, &s.attention, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    assert_int_equal(kvw_forward_create(s.model, s.attention, &s.forward), KV_OK);
}

static void go_on_with(const struct kvw_method_ops *row, uint32_t n_stored)
{
    struct kvw_method_options options = kvw_method_defaults;
    struct kvw_session_share share = {.is_arriving = false};

    options.index.iterations = 4;
    options.index.wait = true;
    options.index.chapter_blocks = 8;
    options.seed = 3;
    reopen(row, &options, NULL, 0, 0);
    model_session_pass(&s, 0, PROMPT, TOKENS, whole);

    reopen(row, &options, NULL, 0, 0);
    kv_session_ticket(kvw_session_handle(s.attention->session), &share.ticket);
    kvw_method_prompt_hint(s.attention, n_stored, STEPS);
    model_session_pass(&s, 0, n_stored, n_stored, resumed);
    memset(resumed, 0, sizeof(resumed));
    reopen(row, &options, &share, 0, 0);
    kvw_method_prompt_hint(s.attention, PROMPT, STEPS);
    model_session_pass(&s, n_stored, PROMPT, TOKENS, resumed);
    assert_memory_equal(whole, resumed, sizeof(whole));
    struct kvw_method_stats stats;
    kvw_method_get_stats(s.attention, &stats);
    assert_true(stats.exposed_wait_s > 0);
    assert_int_equal(stats.bytes_read, (uint64_t)n_stored * MADE_LAYERS * MADE_KV_HEADS * 2 *
                                           MADE_D * sizeof(uint16_t));
}

static void full_goes_on(void **state)
{
    (void)state;
    go_on_with(&kvw_method_full, PROMPT - 1);
    go_on_with(&kvw_method_full, 300);
}

static void others_go_on(void **state)
{
    (void)state;
    go_on_with(&kvw_method_oracle, PROMPT - 1);
    go_on_with(&kvw_method_pqcache, PROMPT - 1);
}

/* Two workers that each bring half of the heads make one session. */
static void halves_make_a_whole(void **state)
{
    struct kvw_session_share share = {.is_arriving = false};
    const uint32_t n_stored = PROMPT - 1;

    (void)state;
    reopen(&kvw_method_full, &kvw_method_defaults, NULL, 0, 0);
    model_session_pass(&s, 0, PROMPT, TOKENS, whole);

    reopen(&kvw_method_full, &kvw_method_defaults, NULL, 0, 1);
    kv_session_ticket(kvw_session_handle(s.attention->session), &share.ticket);
    model_session_pass(&s, 0, n_stored, n_stored, resumed);
    reopen(&kvw_method_full, &kvw_method_defaults, &share, 1, MADE_KV_HEADS - 1);
    model_session_pass(&s, 0, n_stored, n_stored, resumed);

    memset(resumed, 0, sizeof(resumed));
    reopen(&kvw_method_full, &kvw_method_defaults, &share, 0, 0);
    model_session_pass(&s, n_stored, PROMPT, TOKENS, resumed);
    assert_memory_equal(whole, resumed, sizeof(whole));
}

/* Half of the heads never come: whoever waits is told how far they are, and may give up. */
static void a_half_is_waited_for(void **state)
{
    static const int one = 1;
    struct kvw_session_share share = {
        .is_arriving = true,
        .stop = &stop,
        .arg = (void *)&one,
        .arrived = arrived,
    };

    (void)state;
    reopen(&kvw_method_full, &kvw_method_defaults, NULL, 0, 0);
    kv_session_ticket(kvw_session_handle(s.attention->session), &share.ticket);
    model_session_pass(&s, 0, 256, 256, whole);
    reopen(&kvw_method_full, &kvw_method_defaults, &share, 1, 1);
    s.n_tokens = 600;
    stop = 0;
    arrived_tokens = 0;
    assert_int_equal(kvw_forward_step(s.forward, KVW_PREFILL, s.tokens + 600, 600, 1),
                     KV_CANCELLED);
    assert_int_equal(arrived_layer, 0);
    assert_int_equal(arrived_tokens, 256);

    /* Nobody gives up, but nothing comes. */
    share.stop = NULL;
    reopen(&kvw_method_full, &kvw_method_defaults, &share, 0, 0);
    assert_int_equal(kvw_forward_step(s.forward, KVW_PREFILL, s.tokens + 600, 600, 1),
                     KV_NOT_READY);
    assert_non_null(strstr(kvw_method_detail(s.attention), "rows of layer 0: none has come"));
    s.n_tokens = TOKENS;
}

enum broken {
    NO_OPERATION,
    ONE_TOO_MANY,
    MORE_THAN_SLOTS,
    MORE_THAN_PIECES,
    N_BROKEN,
};

static void check_broken(void *arg)
{
    const enum broken *broken = arg;
    struct kvw_layer_reader reader = {
        .setup = {.n_layers = 2},
        .n_slots = 2,
        .layer_pieces = 2,
        .n_begun = 2,
        .n_taken = 1,
        .ops = {NULL, (struct kv_op *)arg},
    };

    if (*broken == NO_OPERATION)
        reader.ops[1] = NULL;
    else if (*broken == ONE_TOO_MANY)
        reader.ops[0] = (struct kv_op *)arg;
    else if (*broken == MORE_THAN_SLOTS)
        reader.n_begun = 4;
    else if (*broken == MORE_THAN_PIECES)
        reader.n_taken = 4, reader.n_begun = 5;
    kvw_layer_reader_check(&reader);
}

static void check_finds(void **state)
{
    (void)state;
    assert_int_equal(first_not_found(check_broken, N_BROKEN), -1);
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
        cmocka_unit_test(full_goes_on),        cmocka_unit_test(others_go_on),
        cmocka_unit_test(halves_make_a_whole), cmocka_unit_test(a_half_is_waited_for),
        cmocka_unit_test(check_finds),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
