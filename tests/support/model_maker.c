#include "tests/support/model_maker.h"

#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void add_tensor(struct made_model *made,
                       struct kv_random *dice,
                       const char *name,
                       uint64_t columns,
                       uint64_t rows)
{
    struct made_tensor *tensor = &made->tensors[made->n_tensors++];
    const bool is_norm = strstr(name, "norm") != NULL;

    snprintf(tensor->name, sizeof(tensor->name), "%s", name);
    tensor->columns = columns;
    tensor->rows = rows;
    tensor->values = malloc(columns * rows * sizeof(float));
    assert_non_null(tensor->values);
    for (uint64_t i = 0; i < columns * rows; i++) {
        const double unit = (double)(kv_random_next(dice) >> 11) * 0x1p-53 * 2 - 1;

        tensor->values[i] =
            (float)(is_norm ? 1 + unit / 4
                            : unit * (rows > 1 ? 2 / sqrt((double)columns) : 0.3));
    }
}

void make_model(struct made_model *made,
                const struct made_flaw *flaw,
                const struct small_tokenizer *tokenizer)
{
    const char *architecture = flaw->architecture != NULL ? flaw->architecture : "llama";
    const struct {
        const char *key;
        uint32_t value;
    } counts[] = {
        {"block_count", MADE_LAYERS},
        {"context_length", 4096},
        {"embedding_length", MADE_HIDDEN},
        {"feed_forward_length", MADE_FFN},
        {"attention.head_count", MADE_Q_HEADS},
        {"attention.head_count_kv", flaw->kv_heads > 0 ? flaw->kv_heads : MADE_KV_HEADS},
        {"attention.key_length", MADE_D},
        {"expert_count", flaw->experts},
    };
    struct kv_random dice;
    uint64_t offset = 0;
    size_t n_tokens = MADE_VOCABULARY;
    char text[96];

    memset(made, 0, sizeof(*made));
    kv_random_init(&dice, 1);
    maker_begin(&made->maker, 3);
    maker_key_string(&made->maker, "general.architecture", architecture);
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
        if (flaw->lacking_key == NULL || strcmp(flaw->lacking_key, counts[i].key) != 0) {
            snprintf(text, sizeof(text), "%s.%s", architecture, counts[i].key);
            maker_key_u32(&made->maker, text, counts[i].value);
        }
    snprintf(text, sizeof(text), "%s.attention.layer_norm_rms_epsilon", architecture);
    maker_key_f32(&made->maker, text, (float)MADE_EPSILON);
    if (flaw->scaling != NULL) {
        snprintf(text, sizeof(text), "%s.rope.scaling.type", architecture);
        maker_key_string(&made->maker, text, flaw->scaling);
    }
    if (flaw->factor > 0) {
        snprintf(text, sizeof(text), "%s.rope.scaling.factor", architecture);
        maker_key_f32(&made->maker, text, flaw->factor);
    }
    if (flaw->old_factor > 0) {
        snprintf(text, sizeof(text), "%s.rope.scale_linear", architecture);
        maker_key_f32(&made->maker, text, flaw->old_factor);
    }

    if (tokenizer != NULL)
        n_tokens = add_tokenizer(&made->maker, tokenizer);
    add_tensor(made, &dice, "token_embd.weight", MADE_HIDDEN, n_tokens);
    add_tensor(made, &dice, "output_norm.weight", MADE_HIDDEN, 1);
    for (unsigned layer = 0; layer < MADE_LAYERS; layer++) {
        const struct {
            const char *name;
            uint64_t columns, rows;
        } parts[] = {
            {"attn_norm.weight", MADE_HIDDEN, 1},
            {"attn_q.weight", MADE_HIDDEN, MADE_Q_HEADS * MADE_D},
            {"attn_k.weight", MADE_HIDDEN, MADE_KV_HEADS * MADE_D},
            {"attn_v.weight", MADE_HIDDEN, MADE_KV_HEADS * MADE_D},
            {"attn_output.weight", MADE_Q_HEADS * MADE_D, MADE_HIDDEN},
            {"ffn_norm.weight", MADE_HIDDEN, 1},
            {"ffn_gate.weight", MADE_HIDDEN, MADE_FFN},
            {"ffn_up.weight", MADE_HIDDEN, MADE_FFN},
            {"ffn_down.weight", MADE_FFN + flaw->extra_columns, MADE_HIDDEN},
            {"attn_q.bias", MADE_Q_HEADS * MADE_D, 1},
        };

        for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
            snprintf(text, sizeof(text), "blk.%u.%s", layer, parts[i].name);
            if (flaw->lacking_tensor == NULL || strcmp(flaw->lacking_tensor, text) != 0)
                add_tensor(made, &dice, text, parts[i].columns, parts[i].rows);
        }
    }
    if (flaw->extra_tensor != NULL)
        add_tensor(made, &dice, flaw->extra_tensor, 32, 1);

    for (size_t i = 0; i < made->n_tensors; i++) {
        const struct made_tensor *tensor = &made->tensors[i];
        const uint64_t dims[2] = {tensor->columns, tensor->rows};

        maker_tensor(&made->maker, tensor->name, tensor->rows > 1 ? 2 : 1, dims, KVW_TENSOR_F32,
                     offset);
        offset += (tensor->columns * tensor->rows * sizeof(float) + 31) / 32 * 32;
    }
    maker_finish(&made->maker, 32);
    for (size_t i = 0; i < made->n_tensors; i++) {
        static const char zeros[32];
        const struct made_tensor *tensor = &made->tensors[i];
        const size_t bytes = tensor->columns * tensor->rows * sizeof(float);

        maker_bytes(&made->maker, tensor->values, bytes);
        maker_bytes(&made->maker, zeros, (32 - bytes % 32) % 32);
    }
    made->aligned = aligned_alloc(64, (made->maker.bytes + 63) / 64 * 64);
    assert_non_null(made->aligned);
    memcpy(made->aligned, made->maker.data, made->maker.bytes);

    char detail[512] = "";

    if (kvw_gguf_open_memory(made->aligned, made->maker.bytes, "made", &made->gguf, detail,
                             sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
}

void unmake_model(struct made_model *made)
{
    kvw_gguf_close(made->gguf);
    for (size_t i = 0; i < made->n_tensors; i++)
        free(made->tensors[i].values);
    maker_free(&made->maker);
    free(made->aligned);
}
