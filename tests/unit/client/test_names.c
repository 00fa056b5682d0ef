/* A prompt's names depend on its tokens, the model, the salt, and the extra keys of each block's
 * tokens, and on nothing else. */
#include "client/client.h"
#include "client/include/kvclient.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/hash.h"
#include "kvserver/net/transport.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    BLOCKS = 4,
    TOKENS = BLOCKS * KV_BLOCK_TOKENS,
};

static struct kv_transport *transport;
static struct kv_model_info *model;
static uint32_t tokens[TOKENS];

static struct kv_client *open_client(const void *salt, size_t salt_bytes)
{
    static const struct kvc_node_setup node = {.address = "loopback:00"};
    const struct kvc_client_setup setup = {
        .nodes = &node,
        .n_nodes = 1,
        .transport = transport,
        .clock = &kv_clock_real,
        .salt = salt,
        .salt_bytes = salt_bytes,
    };
    struct kv_client *client;

    assert_int_equal(kvc_client_create(&setup, &client), KV_OK);
    return client;
}

/* Returns how many names of the two prompts are the same, from the first on; none is the same
 * after one that differs. */
static uint32_t n_same(const struct kv_id128 *a, const struct kv_id128 *b)
{
    uint32_t n = 0;

    while (n < BLOCKS && memcmp(&a[n], &b[n], sizeof(a[n])) == 0)
        n++;
    for (uint32_t i = n; i < BLOCKS; i++)
        assert_memory_not_equal(&a[i], &b[i], sizeof(a[i]));
    return n;
}

static void a_chain_of_blocks(void **state)
{
    struct kv_client *client = open_client(NULL, 0);
    struct kv_id128 names[BLOCKS], again[BLOCKS], parent = {{0}};
    static const struct kv_id128 none;

    (void)state;
    kv_prompt_names(client, model, tokens, TOKENS, NULL, 0, names);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        parent = kv_block_name(&parent, &model->fingerprint, &none, &none,
                               tokens + i * KV_BLOCK_TOKENS, KV_BLOCK_TOKENS);
        assert_memory_equal(&parent, &names[i], sizeof(parent));
    }
    /* A block that is not full has no name. */
    memset(again, 0xee, sizeof(again));
    kv_prompt_names(client, model, tokens, TOKENS - 1, NULL, 0, again);
    assert_int_equal(n_same(names, again), BLOCKS - 1);
    memcpy(names, again, sizeof(names));
    kv_prompt_names(client, model, tokens, KV_BLOCK_TOKENS - 1, NULL, 0, again);
    assert_memory_equal(names, again, sizeof(names));
    kv_client_close(client);
}

static void salts_part(void **state)
{
    static const struct {
        const char *salt;
        size_t bytes;
    } salts[] = {
        {NULL, 0},
        {"a", 1},
        {"b", 1},
        {"a\0", 2},
        /* Longer than a pointer, and the same in its first bytes. */
        {"a salt of one tenant", 20},
        {"a salt of two tenants", 21},
        {"a salt of two tenants", 20},
        {"a salt o", 8},
    };
    enum {
        N = sizeof(salts) / sizeof(salts[0])
    };
    struct kv_id128 names[N][BLOCKS], again[BLOCKS];

    (void)state;
    for (unsigned i = 0; i < N; i++) {
        struct kv_client *client = open_client(salts[i].salt, salts[i].bytes);

        kv_prompt_names(client, model, tokens, TOKENS, NULL, 0, names[i]);
        for (unsigned j = 0; j < i; j++)
            assert_int_equal(n_same(names[i], names[j]), 0);
        kv_client_close(client);
        client = open_client(salts[i].salt, salts[i].bytes);
        kv_prompt_names(client, model, tokens, TOKENS, NULL, 0, again);
        assert_int_equal(n_same(names[i], again), BLOCKS);
        kv_client_close(client);
    }
}

static void keys_count_from_their_first_token(void **state)
{
    static const struct {
        struct kv_extra_key key;
        uint32_t n_same; /* with names of no key */
    } cases[] = {
        {{0, UINT32_MAX, "adapter", 7}, 0},
        {{KV_BLOCK_TOKENS, 1, "image", 5}, 1},
        {{KV_BLOCK_TOKENS - 1, 1, "image", 5}, 0},
        {{KV_BLOCK_TOKENS - 1, 2, "twice", 5}, 0},
        {{2 * KV_BLOCK_TOKENS + 5, 10, "image", 5}, 2},
        {{2 * KV_BLOCK_TOKENS + 6, 10, "image", 5}, 2},
        {{2 * KV_BLOCK_TOKENS + 6, 10, "other", 5}, 2},
        {{TOKENS, 10, "image", 5}, BLOCKS},
        {{UINT32_MAX, UINT32_MAX, "image", 5}, BLOCKS},
        {{0, 0, "image", 5}, BLOCKS},
    };
    enum {
        N = sizeof(cases) / sizeof(cases[0])
    };
    struct kv_client *client = open_client("salt", 4);
    struct kv_id128 plain[BLOCKS], names[N][BLOCKS];

    (void)state;
    kv_prompt_names(client, model, tokens, TOKENS, NULL, 0, plain);
    for (unsigned i = 0; i < N; i++) {
        kv_prompt_names(client, model, tokens, TOKENS, &cases[i].key, 1, names[i]);
        assert_int_equal(n_same(plain, names[i]), cases[i].n_same);
        for (unsigned j = 0; j < i; j++)
            assert_int_equal(n_same(names[i], names[j]), cases[i].n_same < cases[j].n_same
                                                             ? cases[i].n_same
                                                             : cases[j].n_same);
    }
    kv_client_close(client);
}

static int set_up(void **state)
{
    const struct kv_transport_config config = {0};
    char detail[128];

    (void)state;
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = i * 2654435761u;
    model = calloc(1, sizeof(*model));
    if (model == NULL)
        return -1;
    memset(model->fingerprint.bytes, 7, sizeof(model->fingerprint.bytes));
    return kv_transport_loopback.open(&config, &transport, detail, sizeof(detail)) == KV_OK
               ? 0
               : -1;
}

static int tear_down(void **state)
{
    (void)state;
    transport->ops->close(transport);
    free(model);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_chain_of_blocks),
        cmocka_unit_test(salts_part),
        cmocka_unit_test(keys_count_from_their_first_token),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
