#include "tests/support/model_session.h"

#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <string.h>

void model_session_open(struct model_session *session,
                        const struct kvw_method_ops *row,
                        const struct kvw_method_options *options,
                        enum kv_dtype dtype,
                        uint32_t n_tokens)
{
    const struct kvw_device_config config = {.n_threads = 2};
    const struct made_flaw none = {.status = KV_OK};
    struct kv_random dice;
    char detail[256] = "";

    assert_true(n_tokens <= MODEL_SESSION_TOKENS_MAX);
    memset(session, 0, sizeof(*session));
    session->n_tokens = n_tokens;
    make_model(&session->made, &none, NULL);
    kv_random_init(&dice, 2);
    for (uint32_t i = 0; i < n_tokens; i++)
        session->tokens[i] = (uint32_t)kv_random_below(&dice, MADE_VOCABULARY);
    assert_int_equal(
        kvw_device_find("cpu")->open(&config, &session->device, detail, sizeof(detail)), KV_OK);
    assert_int_equal(kvw_model_open(session->made.gguf, session->device, &session->model,
                                    detail, sizeof(detail)),
                     KV_OK);
    assert_int_equal(kvw_embedded_open(64 << 20, &session->embedded, detail, sizeof(detail)),
                     KV_OK);

    const struct kv_client_options client_options = {
        .nodes = kvw_embedded_address(session->embedded), .peer_timeout_ms = 60000};

    assert_int_equal(kv_client_open(&client_options, &session->client, detail, sizeof(detail)),
                     KV_OK);

    const struct kvw_method_setup setup = {
        .session =
            {
                .model = session->model,
                .client = session->client,
                .dtype = dtype,
                .capacity = n_tokens,
                .chunk_tokens = KVW_FORWARD_CHUNK,
            },
        .options = *options,
    };

    if (row->create(&setup, &session->attention, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    assert_int_equal(kvw_forward_create(session->model, session->attention, &session->forward),
                     KV_OK);
}

void model_session_close(struct model_session *session)
{
    kvw_forward_destroy(session->forward);
    session->attention->ops->destroy(session->attention);
    kv_client_close(session->client);
    kvw_embedded_close(session->embedded);
    kvw_model_close(session->model);
    session->device->ops->close(session->device);
    unmake_model(&session->made);
}

void model_session_pass(struct model_session *session,
                        uint32_t begin,
                        uint32_t prompt,
                        uint32_t end,
                        float (*ret_logits)[MADE_VOCABULARY])
{
    for (uint32_t next; begin < end; begin = next) {
        const enum kvw_phase phase = begin < prompt ? KVW_PREFILL : KVW_DECODE;
        kv_status_t status;

        next = begin < prompt ? kvw_forward_chunk_end(begin, prompt) : begin + 1;
        status = kvw_forward_step(session->forward, phase, session->tokens + begin, begin,
                                  next - begin);
        if (status != KV_OK)
            fail_msg("token %u: %s", begin, kvw_method_detail(session->attention));
        if (next >= prompt)
            assert_int_equal(kvw_forward_logits(session->forward, next - 1 - begin, 1,
                                                ret_logits[next - prompt]),
                             KV_OK);
    }
    assert_int_equal(kvw_method_flush(session->attention), KV_OK);
}
