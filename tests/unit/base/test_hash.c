/* SHA-256 against published digests; a block's name depends on every part of it; the mix is the
 * published finaliser and loses nothing. */
#include "kvserver/base/hash.h"
#include "kvserver/base/thread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void published_digests(void **state)
{
    /* FIPS 180-2: "", "abc", cut to 128 bits */
    static const uint8_t empty[16] = {0xe3, 0xb0, 0xc4, 0x42, 0x98, 0xfc, 0x1c, 0x14,
                                      0x9a, 0xfb, 0xf4, 0xc8, 0x99, 0x6f, 0xb9, 0x24};
    static const uint8_t abc[16] = {0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea,
                                    0x41, 0x41, 0x40, 0xde, 0x5d, 0xae, 0x22, 0x23};
    struct kv_id128 id;

    (void)state;
    id = kv_hash128("", 0);
    assert_memory_equal(id.bytes, empty, 16);
    id = kv_hash128("abc", 3);
    assert_memory_equal(id.bytes, abc, 16);
}

static void block_names(void **state)
{
    struct kv_id128 parts[3] = {0}, name, other, concatenated;
    uint32_t tokens[KV_BLOCK_TOKENS] = {0};
    uint8_t text[3 * 16 + sizeof(tokens)];

    (void)state;
    for (uint32_t i = 0; i < KV_BLOCK_TOKENS; i++)
        tokens[i] = i * 2654435761u;
    for (size_t i = 0; i < 3; i++)
        memset(parts[i].bytes, (int)i + 1, 16);
    memcpy(text, parts, 48);
    memcpy(text + 48, tokens, sizeof(tokens));
    name = kv_block_name(&parts[0], &parts[1], &parts[2], tokens, KV_BLOCK_TOKENS);
    concatenated = kv_hash128(text, sizeof(text));
    assert_memory_equal(&name, &concatenated, 16);

    for (size_t i = 0; i < 3; i++) {
        parts[i].bytes[15] ^= 1;
        other = kv_block_name(&parts[0], &parts[1], &parts[2], tokens, KV_BLOCK_TOKENS);
        assert_memory_not_equal(&name, &other, 16);
        parts[i].bytes[15] ^= 1;
    }
    for (size_t i = 0; i < KV_BLOCK_TOKENS; i++) {
        tokens[i] ^= 1u << 31;
        other = kv_block_name(&parts[0], &parts[1], &parts[2], tokens, KV_BLOCK_TOKENS);
        assert_memory_not_equal(&name, &other, 16);
        tokens[i] ^= 1u << 31;
    }
    other = kv_block_name(&parts[0], &parts[1], &parts[2], tokens, KV_BLOCK_TOKENS - 1);
    assert_memory_not_equal(&name, &other, 16);
    name = kv_block_name(&parts[0], &parts[1], &parts[2], NULL, 0);
    concatenated = kv_hash128(text, 48);
    assert_memory_equal(&name, &concatenated, 16);
}

static void mix(void **state)
{
    (void)state;
    /* The first two numbers of splitmix64 seeded with 0. */
    assert_true(kv_mix64(0x9e3779b97f4a7c15u) == 0xe220a8397b1dcdafu);
    assert_true(kv_mix64(2 * 0x9e3779b97f4a7c15u) == 0x6e789e6aa1b965f4u);
    assert_true(kv_mix64(0) == 0);
}

static void hash_many(void *arg)
{
    struct kv_id128 *id = arg;

    for (int i = 0; i < 1000; i++)
        *id = kv_hash128("abc", 3);
}

static void from_many_threads(void **state)
{
    enum {
        THREADS = 4
    };
    struct kv_thread *threads[THREADS];
    struct kv_id128 ids[THREADS], want;

    (void)state;
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(kv_thread_start("hash", hash_many, &ids[i], &threads[i]), KV_OK);
    for (int i = 0; i < THREADS; i++)
        kv_thread_join(threads[i]);
    want = kv_hash128("abc", 3);
    for (int i = 0; i < THREADS; i++)
        assert_memory_equal(&ids[i], &want, 16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(from_many_threads), /* first: they race for the first use */
        cmocka_unit_test(published_digests),
        cmocka_unit_test(block_names),
        cmocka_unit_test(mix),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
