#include "tests/support/rows.h"

#include "kvserver/base/hash.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

void test_model(struct kv_model_info *ret_model,
                const char *name,
                uint32_t n_layers,
                const uint16_t *heads,
                uint32_t d_k,
                uint32_t d_v)
{
    char detail[128];

    memset(ret_model, 0, sizeof(*ret_model));
    snprintf(ret_model->name, sizeof(ret_model->name), "%s", name);
    ret_model->fingerprint = kv_hash128(name, strlen(name));
    ret_model->schema.n_layers = n_layers;
    for (uint32_t i = 0; i < n_layers; i++)
        ret_model->schema.layers[i] = (struct kv_layer_schema){
            .kind = d_v > 0 ? KV_LAYER_KV : KV_LAYER_KEYS,
            .dtype = KV_FP16,
            .n_kv_heads = heads[i],
            .d_k = (uint16_t)d_k,
            .d_v = (uint16_t)d_v,
        };
    if (kv_schema_finish(&ret_model->schema, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
}

void test_fill(void *data, size_t bytes, uint64_t seed)
{
    unsigned char *to = data;

    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = kv_mix64(seed + i);

        memcpy(to + i, &word, bytes - i < 8 ? bytes - i : 8);
    }
}

bool test_is_filled(const void *data, size_t bytes, uint64_t seed)
{
    const unsigned char *from = data;

    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = kv_mix64(seed + i);

        if (memcmp(from + i, &word, bytes - i < 8 ? bytes - i : 8) != 0)
            return false;
    }
    return true;
}

static uint64_t seed_of(uint64_t salt, uint32_t layer, uint32_t head, uint32_t token)
{
    return kv_mix64(kv_mix64(salt) ^ (uint64_t)layer << 48 ^ (uint64_t)head << 32 ^ token);
}

void test_row(
    void *row, size_t bytes, uint64_t salt, uint32_t layer, uint32_t head, uint32_t token)
{
    test_fill(row, bytes, seed_of(salt, layer, head, token));
}

bool test_is_row(
    const void *row, size_t bytes, uint64_t salt, uint32_t layer, uint32_t head, uint32_t token)
{
    return test_is_filled(row, bytes, seed_of(salt, layer, head, token));
}

/* Calls `row` for each row of the box in order, until it returns false. */
static bool walk(const kv_schema_t *schema,
                 const struct kv_rows *box,
                 uint64_t salt,
                 uint8_t *base,
                 bool (*row)(uint8_t *at,
                             size_t bytes,
                             uint64_t salt,
                             uint32_t layer,
                             uint32_t head,
                             uint32_t token))
{
    for (uint32_t layer = box->layer_begin; layer < box->layer_begin + box->n_layers; layer++) {
        size_t bytes = schema->layers[layer].row_bytes;
        uint32_t end = box->n_kv_heads > 0 ? box->kv_head_begin + box->n_kv_heads
                                           : schema->layers[layer].n_kv_heads;

        for (uint32_t head = box->kv_head_begin; head < end; head++)
            for (uint32_t i = 0; i < box->n_tokens; i++, base += bytes)
                if (!row(base, bytes, salt, layer, head, box->token_begin + i))
                    return false;
    }
    return true;
}

static bool
make(uint8_t *at, size_t bytes, uint64_t salt, uint32_t layer, uint32_t head, uint32_t token)
{
    test_row(at, bytes, salt, layer, head, token);
    return true;
}

static bool
check(uint8_t *at, size_t bytes, uint64_t salt, uint32_t layer, uint32_t head, uint32_t token)
{
    if (test_is_row(at, bytes, salt, layer, head, token))
        return true;
    print_error("wrong row: layer %u head %u token %u\n", layer, head, token);
    return false;
}

void test_box(void *base, const kv_schema_t *schema, const struct kv_rows *box, uint64_t salt)
{
    walk(schema, box, salt, base, make);
}

bool test_is_box(const void *base,
                 const kv_schema_t *schema,
                 const struct kv_rows *box,
                 uint64_t salt)
{
    return walk(schema, box, salt, (uint8_t *)base, check);
}
