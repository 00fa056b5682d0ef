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

static struct kv_id128
name_of(const struct kv_id128 parts[4], const uint32_t *tokens, size_t n_tokens)
{
    return kv_block_name(&parts[0], &parts[1], &parts[2], &parts[3], tokens, n_tokens);
}

static void block_names(void **state)
{
    struct kv_id128 parts[4] = {0}, name, other, concatenated;
    uint32_t tokens[KV_BLOCK_TOKENS] = {0};
    uint8_t text[sizeof(parts) + sizeof(tokens)];

    (void)state;
    for (uint32_t i = 0; i < KV_BLOCK_TOKENS; i++)
        tokens[i] = i * 2654435761u;
    for (size_t i = 0; i < 4; i++)
        memset(parts[i].bytes, (int)i + 1, 16);
    memcpy(text, parts, sizeof(parts));
    memcpy(text + sizeof(parts), tokens, sizeof(tokens));
    name = name_of(parts, tokens, KV_BLOCK_TOKENS);
    concatenated = kv_hash128(text, sizeof(text));
    assert_memory_equal(&name, &concatenated, 16);

    for (size_t i = 0; i < 4; i++) {
        parts[i].bytes[15] ^= 1;
        other = name_of(parts, tokens, KV_BLOCK_TOKENS);
        assert_memory_not_equal(&name, &other, 16);
        parts[i].bytes[15] ^= 1;
    }
    for (size_t i = 0; i < KV_BLOCK_TOKENS; i++) {
        tokens[i] ^= 1u << 31;
        other = name_of(parts, tokens, KV_BLOCK_TOKENS);
        assert_memory_not_equal(&name, &other, 16);
        tokens[i] ^= 1u << 31;
    }
    other = name_of(parts, tokens, KV_BLOCK_TOKENS - 1);
    assert_memory_not_equal(&name, &other, 16);
    name = name_of(parts, NULL, 0);
    concatenated = kv_hash128(text, sizeof(parts));
    assert_memory_equal(&name, &concatenated, 16);
}

/* Which keys there are, where, how many and in which order: all of it counts. */
static void extra_keys(void **state)
{
    static const struct kv_id128 none;
    const struct kv_id128 a = kv_block_extra(&none, 0, "a", 1);
    const struct kv_id128 others[] = {
        none,
        kv_block_extra(&none, 0, "b", 1),
        kv_block_extra(&none, 0, "a", 2),
        kv_block_extra(&none, 0, "", 0),
        kv_block_extra(&none, 1, "a", 1),
        kv_block_extra(&none, -128, "a", 1),
        kv_block_extra(&a, 0, "a", 1),
        kv_block_extra(&a, 0, "b", 1),
        kv_block_extra(&(struct kv_id128){{1}}, 0, "a", 1),
    };
    const struct kv_id128 b_then_a = kv_block_extra(&others[1], 0, "a", 1);

    (void)state;
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
        assert_memory_not_equal(&a, &others[i], 16);
    assert_memory_not_equal(&others[7], &b_then_a, 16);
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
        cmocka_unit_test(published_digests), cmocka_unit_test(block_names),
        cmocka_unit_test(extra_keys),        cmocka_unit_test(mix),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
