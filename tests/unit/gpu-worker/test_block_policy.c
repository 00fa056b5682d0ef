/* block_policy.h: what is wanted, what goes, and that a block is held only once it has landed.
 */
#include "gpu-worker/kvcache/block_policy.c" /* its insides are broken below */
#include "kvserver/base/clock.h"
#include "kvserver/base/random.h"
#include "tests/support/dies.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdlib.h>

enum {
    BLOCKS = 40,
    SLOTS = 4,
    K_CACHE = 3,
};

static void note(struct kvw_block_policy *cache, uint32_t block, unsigned rows)
{
    for (unsigned i = 0; i < rows; i++)
        kvw_block_policy_note(cache, block);
}

static void hold(struct kvw_block_policy *cache, uint32_t block)
{
    const uint32_t slot = kvw_block_policy_admit(cache, block);

    assert_int_not_equal(slot, KVW_BLOCK_NO_SLOT);
    assert_int_equal(kvw_block_policy_slot(cache, block), KVW_BLOCK_NO_SLOT);
    kvw_block_policy_landed(cache, slot);
    assert_int_equal(kvw_block_policy_slot(cache, block), slot);
}

static void most_chosen_are_wanted(void **state)
{
    struct kvw_block_policy *cache;
    const uint32_t *wanted;

    (void)state;
    assert_int_equal(kvw_block_policy_create(KVW_BLOCKS_LRU, BLOCKS, SLOTS, K_CACHE, &cache),
                     KV_OK);
    assert_int_equal(kvw_block_policy_end(cache, BLOCKS, &wanted), 0);
    note(cache, 7, 2);
    note(cache, 3, 9);
    note(cache, 5, 2);
    note(cache, 9, 1);
    note(cache, 30, 50); /* not complete */
    assert_int_equal(kvw_block_policy_end(cache, 30, &wanted), 3);
    assert_int_equal(wanted[0], 3);
    assert_int_equal(wanted[1], 5); /* of equals, the first */
    assert_int_equal(wanted[2], 7);
    hold(cache, 3);

    /* What is held or under way is not wanted again; counts begin anew. */
    assert_int_not_equal(kvw_block_policy_admit(cache, 5), KVW_BLOCK_NO_SLOT);
    note(cache, 3, 1);
    note(cache, 5, 1);
    note(cache, 9, 1);
    assert_int_equal(kvw_block_policy_end(cache, BLOCKS, &wanted), 1);
    assert_int_equal(wanted[0], 9);
    kvw_block_policy_check(cache);
    kvw_block_policy_destroy(cache);
}

/* Four slots; blocks 0..3 are held, 0 was chosen in three steps, the others in one each. */
static void fill(enum kvw_replacement_policy policy, struct kvw_block_policy **ret_cache)
{
    const uint32_t *wanted;

    assert_int_equal(kvw_block_policy_create(policy, BLOCKS, SLOTS, K_CACHE, ret_cache), KV_OK);
    for (uint32_t block = 0; block < SLOTS; block++) {
        note(*ret_cache, block, 1);
        assert_int_equal(kvw_block_policy_end(*ret_cache, BLOCKS, &wanted), 1);
        hold(*ret_cache, block);
        if (block < 2) {
            note(*ret_cache, 0, 1);
            assert_int_equal(kvw_block_policy_end(*ret_cache, BLOCKS, &wanted), 0);
        }
    }
    note(*ret_cache, 10, 1);
    assert_int_equal(kvw_block_policy_end(*ret_cache, BLOCKS, &wanted), 1);
    hold(*ret_cache, 10);
}

static void the_right_one_goes(void **state)
{
    struct kvw_block_policy *cache;

    (void)state;
    /* Longest ago: 0 was touched behind 1's only time. */
    fill(KVW_BLOCKS_LRU, &cache);
    assert_int_equal(kvw_block_policy_slot(cache, 1), KVW_BLOCK_NO_SLOT);
    for (uint32_t block = 0; block < SLOTS; block++)
        assert_true(block == 1 || kvw_block_policy_slot(cache, block) != KVW_BLOCK_NO_SLOT);
    kvw_block_policy_check(cache);
    kvw_block_policy_destroy(cache);

    fill(KVW_BLOCKS_LFU, &cache);
    assert_int_not_equal(kvw_block_policy_slot(cache, 0), KVW_BLOCK_NO_SLOT);
    assert_int_equal(kvw_block_policy_slot(cache, 1), KVW_BLOCK_NO_SLOT);
    kvw_block_policy_check(cache);
    kvw_block_policy_destroy(cache);
}

static void what_is_in_use_stays(void **state)
{
    struct kvw_block_policy *cache;
    const uint32_t *wanted;
    uint32_t slots[SLOTS];

    (void)state;
    assert_int_equal(kvw_block_policy_create(KVW_BLOCKS_LRU, BLOCKS, SLOTS, SLOTS, &cache),
                     KV_OK);
    for (uint32_t block = 0; block < SLOTS; block++)
        note(cache, block, 1);
    assert_int_equal(kvw_block_policy_end(cache, BLOCKS, &wanted), SLOTS);
    for (uint32_t block = 0; block < SLOTS; block++)
        slots[block] = kvw_block_policy_admit(cache, block);
    /* All under way. */
    assert_int_equal(kvw_block_policy_admit(cache, 20), KVW_BLOCK_NO_SLOT);
    for (uint32_t block = 0; block < SLOTS; block++)
        kvw_block_policy_landed(cache, slots[block]);
    /* All of this step. */
    assert_int_equal(kvw_block_policy_admit(cache, 20), KVW_BLOCK_NO_SLOT);
    note(cache, 0, 1);
    assert_int_equal(kvw_block_policy_end(cache, BLOCKS, &wanted), 0);
    hold(cache, 20);
    assert_int_not_equal(kvw_block_policy_slot(cache, 0), KVW_BLOCK_NO_SLOT);

    kvw_block_policy_drop(cache, 2);
    assert_int_equal(kvw_block_policy_slot(cache, 20), KVW_BLOCK_NO_SLOT);
    assert_int_equal(kvw_block_policy_slot(cache, 2), KVW_BLOCK_NO_SLOT);
    assert_int_equal(kvw_block_policy_slot(cache, 3), KVW_BLOCK_NO_SLOT);
    assert_int_not_equal(kvw_block_policy_slot(cache, 0), KVW_BLOCK_NO_SLOT);
    kvw_block_policy_check(cache);
    kvw_block_policy_destroy(cache);
}

/* Whatever happens, a slot is one block's, and as many are held as landed. */
static void random_steps(void **state)
{
    const uint64_t seed = getenv("KV_TEST_SEED") != NULL
                              ? strtoull(getenv("KV_TEST_SEED"), NULL, 10)
                              : kv_clock_now(&kv_clock_real);
    struct kv_random dice;

    (void)state;
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    for (unsigned policy = KVW_BLOCKS_LRU; policy <= KVW_BLOCKS_LFU; policy++) {
        uint32_t coming[SLOTS], n_coming = 0;
        struct kvw_block_policy *cache;

        assert_int_equal(kvw_block_policy_create((enum kvw_replacement_policy)policy, BLOCKS,
                                                 SLOTS, K_CACHE, &cache),
                         KV_OK);
        for (unsigned step = 0; step < 20000; step++) {
            const uint32_t n_complete = 1 + (uint32_t)kv_random_below(&dice, BLOCKS);
            const uint32_t *wanted;
            uint32_t n_wanted, owner[SLOTS];

            for (unsigned i = 0; i < 12; i++)
                note(cache, (uint32_t)kv_random_below(&dice, BLOCKS), 1 + i % 3);
            n_wanted = kvw_block_policy_end(cache, n_complete, &wanted);
            assert_true(n_wanted <= K_CACHE);
            for (uint32_t i = 0; i < n_wanted; i++) {
                uint32_t slot;

                assert_true(wanted[i] < n_complete);
                slot = kvw_block_policy_admit(cache, wanted[i]);
                if (slot != KVW_BLOCK_NO_SLOT)
                    coming[n_coming++] = slot;
            }
            while (n_coming > 0 && kv_random_below(&dice, 3) > 0)
                kvw_block_policy_landed(cache, coming[--n_coming]);
            for (unsigned i = 0; i < SLOTS; i++)
                owner[i] = UINT32_MAX;
            for (uint32_t block = 0; block < BLOCKS; block++) {
                const uint32_t slot = kvw_block_policy_slot(cache, block);

                if (slot == KVW_BLOCK_NO_SLOT)
                    continue;
                assert_true(slot < SLOTS && owner[slot] == UINT32_MAX);
                owner[slot] = block;
            }
            kvw_block_policy_check(cache);
            if (n_coming == 0 && kv_random_below(&dice, 50) == 0)
                kvw_block_policy_drop(cache, (uint32_t)kv_random_below(&dice, BLOCKS));
        }
        kvw_block_policy_check(cache);
        kvw_block_policy_destroy(cache);
    }
}

enum broken {
    OTHER_SLOT,
    BLOCK_BEYOND,
    SLOT_FORGOTTEN,
    NOTED_TWICE,
    NOT_NOTED,
    TOUCHED_LATER,
    N_BROKEN,
};

static void check_broken(void *arg)
{
    const enum broken *broken = arg;
    struct kvw_block_policy *cache;

    if (kvw_block_policy_create(KVW_BLOCKS_LRU, BLOCKS, SLOTS, K_CACHE, &cache) != KV_OK)
        return;
    hold(cache, 3);
    hold(cache, 9);
    note(cache, 4, 2);
    note(cache, 7, 1);
    if (*broken == OTHER_SLOT)
        cache->slot_of[3] = cache->slot_of[9];
    else if (*broken == BLOCK_BEYOND)
        cache->slots[0].block = BLOCKS;
    else if (*broken == SLOT_FORGOTTEN)
        cache->slots[0].state = SLOT_FREE;
    else if (*broken == NOTED_TWICE)
        cache->n_noted++;
    else if (*broken == NOT_NOTED)
        cache->n_selected[7] = 0;
    else if (*broken == TOUCHED_LATER)
        cache->slots[1].touched = cache->step + 1;
    kvw_block_policy_check(cache);
}

static void check_finds(void **state)
{
    (void)state;
    assert_int_equal(first_not_found(check_broken, N_BROKEN), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(most_chosen_are_wanted),
        cmocka_unit_test(the_right_one_goes),
        cmocka_unit_test(what_is_in_use_stays),
        cmocka_unit_test(random_steps),
        cmocka_unit_test(check_finds),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
