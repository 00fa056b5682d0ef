/* Every object is lent once at a time, aligned, apart from the others, and comes back as it was
 * left;
 * kv_pool_check() finds what is not so. */
#include "kvserver/base/pool.c" /* its insides are broken below */
#include "kvserver/base/random.h"
#include "tests/support/dies.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void lend_all(void **state)
{
    enum {
        OBJECTS = 37,
        BYTES = 100
    };
    struct kv_pool *pool = kv_pool_create(OBJECTS, BYTES);
    uint8_t *lent[OBJECTS];
    uint8_t zeros[BYTES] = {0};

    (void)state;
    assert_non_null(pool);
    assert_int_equal(kv_pool_size(pool), OBJECTS);
    for (uint32_t i = 0; i < OBJECTS; i++) {
        lent[i] = kv_pool_get(pool);
        assert_non_null(lent[i]);
        assert_int_equal((uintptr_t)lent[i] % 64, 0);
        assert_memory_equal(lent[i], zeros, BYTES);
        memset(lent[i], (int)i + 1, BYTES);
        assert_int_equal(kv_pool_used(pool), i + 1);
        assert_ptr_equal(kv_pool_at(pool, kv_pool_index(pool, lent[i])), lent[i]);
    }
    assert_null(kv_pool_get(pool));
    for (uint32_t i = 0; i < OBJECTS; i++) {
        uint8_t filled[BYTES];

        memset(filled, (int)i + 1, BYTES);
        assert_memory_equal(lent[i], filled, BYTES);
    }
    kv_pool_put(pool, lent[5]);
    assert_int_equal(kv_pool_used(pool), OBJECTS - 1);
    assert_ptr_equal(kv_pool_get(pool), lent[5]);
    assert_int_equal(lent[5][BYTES - 1], 6);
    kv_pool_check(pool);
    kv_pool_destroy(pool);
}

static void random_order(void **state)
{
    enum {
        OBJECTS = 64
    };
    struct kv_pool *pool = kv_pool_create(OBJECTS, 8);
    void *lent[OBJECTS] = {0};
    uint32_t count = 0;
    struct kv_random random;

    (void)state;
    assert_non_null(pool);
    kv_random_init(&random, 1);
    for (int i = 0; i < 100000; i++) {
        uint32_t slot = (uint32_t)kv_random_below(&random, OBJECTS);

        if (lent[slot] == NULL) {
            lent[slot] = kv_pool_get(pool);
            assert_non_null(lent[slot]);
            *(uint32_t *)lent[slot] = slot;
            count++;
        } else {
            assert_int_equal(*(uint32_t *)lent[slot], slot);
            kv_pool_put(pool, lent[slot]);
            lent[slot] = NULL;
            count--;
        }
        assert_int_equal(kv_pool_used(pool), count);
    }
    kv_pool_check(pool);
    kv_pool_destroy(pool);
}

static void edges(void **state)
{
    struct kv_pool *pool = kv_pool_create(0, 64);

    (void)state;
    assert_non_null(pool);
    assert_null(kv_pool_get(pool));
    kv_pool_check(pool);
    kv_pool_destroy(pool);
    pool = kv_pool_create(2, 0);
    assert_non_null(pool);
    assert_ptr_not_equal(kv_pool_get(pool), kv_pool_get(pool));
    kv_pool_check(pool);
    kv_pool_destroy(pool);
    assert_null(kv_pool_create(UINT32_MAX, SIZE_MAX));
    assert_null(kv_pool_create(UINT32_MAX, SIZE_MAX / 2));
    kv_pool_destroy(NULL);
}

enum broken {
    LENT_AND_FREE,
    LISTED_TWICE,
    LISTED_BEYOND,
    NEITHER,
    MANY_FREE,
    N_BROKEN,
};

static void check_broken(void *arg)
{
    const enum broken *broken = arg;
    struct kv_pool *pool = kv_pool_create(8, 16);

    if (pool == NULL || kv_pool_get(pool) == NULL)
        return;
    if (*broken == LENT_AND_FREE)
        pool->used[pool->free[2]] = true;
    else if (*broken == LISTED_TWICE)
        pool->free[0] = pool->free[1];
    else if (*broken == LISTED_BEYOND)
        pool->free[3] = pool->n_objects;
    else if (*broken == NEITHER)
        pool->n_free--;
    else if (*broken == MANY_FREE)
        pool->n_free = pool->n_objects + 1;
    kv_pool_check(pool);
}

static void check(void **state)
{
    (void)state;
    assert_int_equal(first_not_found(check_broken, N_BROKEN), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lend_all),
        cmocka_unit_test(random_order),
        cmocka_unit_test(edges),
        cmocka_unit_test(check),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
