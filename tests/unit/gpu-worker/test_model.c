/* model.h, forward.h, full.c: a small model made here, against plain loops in double;
 * and what a file may not say. */
#include "gpu-worker/engine/forward.h"
#include "gpu-worker/kvcache/embedded_node.h"
#include "kvserver/base/random.h"
#include "tests/support/model_maker.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LAYERS = MADE_LAYERS,
    HIDDEN = MADE_HIDDEN,
    FFN = MADE_FFN,
    D = MADE_D,
    Q_HEADS = MADE_Q_HEADS,
    KV_HEADS = MADE_KV_HEADS,
    VOCABULARY = MADE_VOCABULARY,
    TOKENS = 300, /* more than a chunk */
    DETAIL_BYTES = 512,
};

#define EPSILON MADE_EPSILON

/* ---- plain loops ---- */

static const float *values_of(const struct made_model *made, const char *format, unsigned layer)
{
    char name[64];

    snprintf(name, sizeof(name), format, layer);
    for (size_t i = 0; i < made->n_tensors; i++)
        if (strcmp(made->tensors[i].name, name) == 0)
            return made->tensors[i].values;
    fail_msg("no tensor %s", name);
    return NULL;
}

static void norm(const double *x, const float *weight, double *out)
{
    double sum = 0;

    for (unsigned i = 0; i < HIDDEN; i++)
        sum += x[i] * x[i];
    for (unsigned i = 0; i < HIDDEN; i++)
        out[i] = x[i] / sqrt(sum / HIDDEN + EPSILON) * (double)weight[i];
}

static void
times(const double *x, const float *weight, unsigned rows, unsigned columns, double *out)
{
    for (unsigned r = 0; r < rows; r++) {
        out[r] = 0;
        for (unsigned c = 0; c < columns; c++)
            out[r] += x[c] * (double)weight[r * columns + c];
    }
}

static void turn(double *head, unsigned token)
{
    for (unsigned i = 0; i < D / 2; i++) {
        const double angle = token * pow(10000, -2.0 * i / D);
        const double a = head[2 * i], b = head[2 * i + 1];

        head[2 * i] = a * cos(angle) - b * sin(angle);
        head[2 * i + 1] = a * sin(angle) + b * cos(angle);
    }
}

/* logits (TOKENS, VOCABULARY) */
static void expect(const struct made_model *made, const uint32_t *tokens, double *logits)
{
    static double keys[LAYERS][TOKENS][KV_HEADS * D], values[LAYERS][TOKENS][KV_HEADS * D];

    for (unsigned t = 0; t < TOKENS; t++) {
        double x[HIDDEN], h[HIDDEN], q[Q_HEADS * D], mixed[Q_HEADS * D], gate[FFN], up[FFN];

        for (unsigned i = 0; i < HIDDEN; i++)
            x[i] = (double)values_of(made, "token_embd.weight", 0)[tokens[t] * HIDDEN + i];
        for (unsigned l = 0; l < LAYERS; l++) {
            norm(x, values_of(made, "blk.%u.attn_norm.weight", l), h);
            times(h, values_of(made, "blk.%u.attn_q.weight", l), Q_HEADS * D, HIDDEN, q);
            times(h, values_of(made, "blk.%u.attn_k.weight", l), KV_HEADS * D, HIDDEN,
                  keys[l][t]);
            times(h, values_of(made, "blk.%u.attn_v.weight", l), KV_HEADS * D, HIDDEN,
                  values[l][t]);
            for (unsigned i = 0; i < Q_HEADS * D; i++)
                q[i] += (double)values_of(made, "blk.%u.attn_q.bias", l)[i];
            for (unsigned head = 0; head < KV_HEADS; head++)
                turn(keys[l][t] + head * D, t);
            for (unsigned head = 0; head < Q_HEADS; head++) {
                const unsigned at = head / (Q_HEADS / KV_HEADS) * D;
                double weights[TOKENS], sum = 0;

                turn(q + head * D, t);
                for (unsigned s = 0; s <= t; s++) {
                    double score = 0;

                    for (unsigned i = 0; i < D; i++)
                        score += q[head * D + i] * keys[l][s][at + i];
                    weights[s] = exp(score / sqrt(D));
                    sum += weights[s];
                }
                for (unsigned i = 0; i < D; i++) {
                    mixed[head * D + i] = 0;
                    for (unsigned s = 0; s <= t; s++)
                        mixed[head * D + i] += weights[s] / sum * values[l][s][at + i];
                }
            }
            times(mixed, values_of(made, "blk.%u.attn_output.weight", l), HIDDEN, Q_HEADS * D,
                  h);
            for (unsigned i = 0; i < HIDDEN; i++)
                x[i] += h[i];
            norm(x, values_of(made, "blk.%u.ffn_norm.weight", l), h);
            times(h, values_of(made, "blk.%u.ffn_gate.weight", l), FFN, HIDDEN, gate);
            times(h, values_of(made, "blk.%u.ffn_up.weight", l), FFN, HIDDEN, up);
            for (unsigned i = 0; i < FFN; i++)
                gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
            times(gate, values_of(made, "blk.%u.ffn_down.weight", l), HIDDEN, FFN, h);
            for (unsigned i = 0; i < HIDDEN; i++)
                x[i] += h[i];
        }
        norm(x, values_of(made, "output_norm.weight", 0), h);
        times(h, values_of(made, "token_embd.weight", 0), VOCABULARY, HIDDEN,
              logits + t * VOCABULARY);
    }
}

/* ---- the worker's way ---- */

static void compute(const struct made_model *made,
                    const uint32_t *tokens,
                    enum kv_dtype dtype,
                    unsigned n_threads,
                    uint32_t piece,
                    float *logits)
{
    const struct kvw_device_config config = {.n_threads = n_threads};
    char detail[DETAIL_BYTES] = "";
    struct kvw_device *device;
    struct kvw_model *model;
    struct kvw_embedded *embedded;
    struct kv_client *client;
    struct kvw_method *attention;
    struct kvw_forward *forward;
    struct kv_node_info node;

    assert_int_equal(kvw_device_find("cpu")->open(&config, &device, detail, sizeof(detail)),
                     KV_OK);
    assert_int_equal(kvw_model_open(made->gguf, device, &model, detail, sizeof(detail)), KV_OK);
    assert_int_equal(kvw_embedded_open(64 << 20, &embedded, detail, sizeof(detail)), KV_OK);

    const struct kv_client_options options = {.nodes = kvw_embedded_address(embedded),
                                              .peer_timeout_ms = 60000};

    assert_int_equal(kv_client_open(&options, &client, detail, sizeof(detail)), KV_OK);

    const struct kvw_method_setup setup = {
        .session =
            {
                .model = model,
                .client = client,
                .dtype = dtype,
                .capacity = TOKENS,
                .chunk_tokens = KVW_FORWARD_CHUNK,
            },
    };

    assert_int_equal(kvw_method_full.create(&setup, &attention, detail, sizeof(detail)), KV_OK);
    assert_int_equal(kvw_forward_create(model, attention, &forward), KV_OK);
    for (uint32_t begin = 0, end; begin < TOKENS; begin = end) {
        end = piece == 0               ? kvw_forward_chunk_end(begin, TOKENS)
              : TOKENS - begin < piece ? TOKENS
                                       : begin + piece;
        assert_int_equal(kvw_forward_step(forward, piece == 1 ? KVW_DECODE : KVW_PREFILL,
                                          tokens + begin, begin, end - begin),
                         KV_OK);
        assert_int_equal(
            kvw_forward_logits(forward, 0, end - begin, logits + begin * VOCABULARY), KV_OK);
    }

    /* Every row is in the store. */
    assert_int_equal(kvw_method_flush(attention), KV_OK);
    kv_client_node(client, 0, &node);
    assert_int_equal(node.rows_in, (uint64_t)TOKENS * LAYERS * KV_HEADS);

    /* Forgotten tokens may come again, and others in their place. */
    assert_int_equal(kvw_method_truncate(attention, 10), KV_OK);
    assert_int_equal(kvw_forward_step(forward, KVW_PREFILL, tokens, 10, 5), KV_OK);
    assert_int_equal(kvw_forward_step(forward, KVW_PREFILL, &(uint32_t){VOCABULARY}, 15, 1),
                     KV_INVALID);
    assert_int_equal(kvw_method_flush(attention), KV_OK);

    kvw_forward_destroy(forward);
    attention->ops->destroy(attention);
    kv_client_close(client);
    kvw_embedded_close(embedded);
    kvw_model_close(model);
    device->ops->close(device);
}

static void test_numbers(void **state)
{
    const struct made_flaw none = {.status = KV_OK};
    static float first[TOKENS * VOCABULARY], again[TOKENS * VOCABULARY];
    static double exact[TOKENS * VOCABULARY];
    uint32_t tokens[TOKENS];
    struct kv_random dice;
    struct made_model made;

    (void)state;
    make_model(&made, &none, NULL);
    kv_random_init(&dice, 2);
    for (unsigned i = 0; i < TOKENS; i++)
        tokens[i] = (uint32_t)kv_random_below(&dice, VOCABULARY);
    expect(&made, tokens, exact);

    for (unsigned type = KV_FP32; type <= KV_BF16; type++) {
        const double allowed = type == KV_FP32 ? 1e-4 : type == KV_FP16 ? 1e-2 : 5e-2;

        compute(&made, tokens, type, 1, 0, first);
        for (unsigned i = 0; i < TOKENS * VOCABULARY; i++)
            assert_true(fabs((double)first[i] - exact[i]) <= allowed);
        /* However it is cut, and whoever does it. */
        compute(&made, tokens, type, 3, 0, again);
        assert_memory_equal(first, again, sizeof(first));
        compute(&made, tokens, type, 2, 29, again);
        assert_memory_equal(first, again, sizeof(first));
        compute(&made, tokens, type, 2, 1, again);
        assert_memory_equal(first, again, sizeof(first));
    }
    unmake_model(&made);
}

static void test_refused(void **state)
{
    static const struct made_flaw flaws[] = {
        {.architecture = "mamba",
         .expected = "general.architecture: ",
         .status = KV_UNSUPPORTED},
        {.lacking_key = "block_count",
         .expected = "llama.block_count: missing",
         .status = KV_INVALID},
        {.kv_heads = 3, .expected = "llama.attention.head_count_kv: 3", .status = KV_INVALID},
        {.kv_heads = 5, .expected = "llama.attention.head_count_kv: 5", .status = KV_INVALID},
        {.experts = 8, .expected = "llama.expert_count: 8", .status = KV_UNSUPPORTED},
        {.scaling = "yarn", .expected = "llama.rope.scaling.type: ", .status = KV_UNSUPPORTED},
        {.scaling = "linear",
         .expected = "llama.rope.scaling.factor: missing",
         .status = KV_INVALID},
        {.scaling = "llama3", .expected = "rope_freqs.weight: missing", .status = KV_INVALID},
        {.lacking_tensor = "blk.1.ffn_up.weight",
         .expected = "tensor blk.1.ffn_up.weight: missing",
         .status = KV_INVALID},
        {.extra_columns = 8,
         .expected = "tensor blk.0.ffn_down.weight: 80 x 128: expected 72 x 128",
         .status = KV_INVALID},
        {.extra_tensor = "blk.0.attn_q_norm.weight",
         .expected = "tensor blk.0.attn_q_norm.weight: ",
         .status = KV_UNSUPPORTED},
        {.extra_tensor = "blk.2.attn_q.bias",
         .expected = "tensor blk.2.attn_q.bias: ",
         .status = KV_UNSUPPORTED},
        {.extra_tensor = "rope_freqs.weight", .status = KV_OK},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(flaws) / sizeof(flaws[0]); i++) {
        struct kvw_model_params params = {.n_layers = 77};
        char detail[DETAIL_BYTES] = "";
        struct made_model made;
        kv_status_t status;

        make_model(&made, &flaws[i], NULL);
        if (flaws[i].extra_tensor != NULL && flaws[i].status == KV_OK)
            /* Random factors are mostly no divisors: any clear answer will do. */
            assert_true(kvw_model_read(made.gguf, &params, detail, sizeof(detail)) == KV_OK ||
                        strstr(detail, "rope_freqs.weight") != NULL);
        else {
            status = kvw_model_read(made.gguf, &params, detail, sizeof(detail));
            if (status != flaws[i].status || strstr(detail, flaws[i].expected) == NULL)
                fail_msg("%zu: %s: %s", i, kv_status_name(status), detail);
            assert_int_equal(params.n_layers, 77); /* untouched */
        }
        unmake_model(&made);
    }
}

/* A factor counts without a type, too, unless the type says none. */
static void test_scaling(void **state)
{
    static const struct {
        struct made_flaw made;
        float scale;
    } cases[] = {
        {{.scaling = NULL}, 1},
        {{.factor = 4}, 4},
        {{.old_factor = 2}, 2},
        {{.factor = 4, .old_factor = 2}, 4},
        {{.scaling = "linear", .factor = 8}, 8},
        {{.scaling = "linear", .old_factor = 2}, 2},
        {{.scaling = "none", .factor = 4, .old_factor = 2}, 1},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvw_model_params params;
        char detail[DETAIL_BYTES] = "";
        struct made_model made;

        make_model(&made, &cases[i].made, NULL);
        if (kvw_model_read(made.gguf, &params, detail, sizeof(detail)) != KV_OK)
            fail_msg("%zu: %s", i, detail);
        assert_true(params.rope_scale == cases[i].scale);
        unmake_model(&made);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_scaling),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
