/* block_cache.h: what its check finds. */
#include "gpu-worker/kvcache/block_cache.c" /* its insides are broken below */
#include "tests/support/dies.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    BLOCKS = 20,
    SLOTS = 4,
    HELD = 3,
    COMING = 9,
};

enum broken {
    ANOTHER_BLOCK_IN_THE_SLOT,
    FETCH_NOT_COUNTED,
    FETCH_OF_NO_LAYER,
    FETCH_INTO_NO_SLOT,
    FETCH_OF_WHAT_IS_HELD,
    FETCH_OF_ANOTHER_BLOCK,
    N_BROKEN,
};

/* One block is held, one is under way. */
static void check_broken(void *arg)
{
    const enum broken *broken = arg;
    uint32_t block_of[SLOTS] = {0};
    struct layer layer = {.block_of = block_of};
    struct kvw_block_cache cached = {
        .n_layers = 1,
        .n_slots = SLOTS,
        .n_blocks = BLOCKS,
        .layers = &layer,
        .n_coming = 1,
    };

    if (kvw_block_policy_create(KVW_BLOCKS_LRU, BLOCKS, SLOTS, K_CACHE, &layer.cache) != KV_OK)
        return;
    const uint32_t held = kvw_block_policy_admit(layer.cache, HELD);
    kvw_block_policy_landed(layer.cache, held);
    const uint32_t coming = kvw_block_policy_admit(layer.cache, COMING);
    block_of[held] = HELD;
    block_of[coming] = COMING;
    cached.coming[5].op = (struct kv_op *)&cached; /* any but NULL */
    cached.coming[5].slot = coming;
    if (*broken == ANOTHER_BLOCK_IN_THE_SLOT)
        block_of[held] = HELD + 1;
    else if (*broken == FETCH_NOT_COUNTED)
        cached.n_coming = 0;
    else if (*broken == FETCH_OF_NO_LAYER)
        cached.coming[5].layer = 1;
    else if (*broken == FETCH_INTO_NO_SLOT)
        cached.coming[5].slot = SLOTS;
    else if (*broken == FETCH_OF_WHAT_IS_HELD)
        cached.coming[5].slot = held;
    else if (*broken == FETCH_OF_ANOTHER_BLOCK)
        block_of[coming] = COMING + 1;
    kvw_block_cache_check(&cached);
    kvw_block_policy_destroy(layer.cache);
}

static void check_finds(void **state)
{
    (void)state;
    assert_int_equal(first_not_found(check_broken, N_BROKEN), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_finds),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
