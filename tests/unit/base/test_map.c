/* The map agrees with a plain array of keys over random operations; it grows to millions; keys
 * that share their home slots are found after any of them is removed.  kv_map_check() finds
 * what is broken. */
#include "kvserver/base/hash.h"
#include "kvserver/base/map.c" /* its insides are broken below */
#include "kvserver/base/random.h"
#include "tests/support/dies.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

static struct kv_id128 key_of(uint64_t number)
{
    struct kv_id128 key = {{0}};

    memcpy(key.bytes + (number & 8), &number, sizeof(number));
    return key;
}

static void random_operations(void **state)
{
    enum {
        KEYS = 300,
        OPERATIONS = 200000
    };
    uint64_t seed = (uint64_t)time(NULL);
    void *model[KEYS] = {0};
    size_t count = 0;
    struct kv_random random;
    struct kv_map *map;

    (void)state;
    print_message("map: seed %llu\n", (unsigned long long)seed);
    kv_random_init(&random, seed);
    map = kv_map_create(kv_random_next(&random));
    assert_non_null(map);
    for (int i = 0; i < OPERATIONS; i++) {
        size_t k = kv_random_below(&random, KEYS);
        struct kv_id128 key = key_of(k);
        /* Long runs of one kind fill and empty the map. */
        bool filling = i / 5000 % 2 == 0;

        switch (kv_random_below(&random, 4)) {
        case 0:
            assert_ptr_equal(kv_map_get(map, &key), model[k]);
            break;
        case 1:
        case 2:
            if (filling) {
                count += model[k] == NULL;
                model[k] = (char *)model + 1 + kv_random_below(&random, 1000);
                assert_true(kv_map_set(map, &key, model[k]));
                break;
            }
            /* fall through */
        default:
            assert_ptr_equal(kv_map_remove(map, &key), model[k]);
            count -= model[k] != NULL;
            model[k] = NULL;
        }
        assert_int_equal(kv_map_count(map), count);
        if (i % 1000 == 0) {
            size_t cursor = 0, walked = 0;

            kv_map_check(map);
            while (kv_map_next(map, &cursor) != NULL)
                walked++;
            assert_int_equal(walked, count);
            assert_null(kv_map_next(map, &cursor));
            for (k = 0; k < KEYS; k++) {
                key = key_of(k);
                assert_ptr_equal(kv_map_get(map, &key), model[k]);
            }
        }
    }
    kv_map_check(map);
    kv_map_destroy(map);
}

static void millions(void **state)
{
    enum {
        KEYS = 2000000
    };
    struct kv_map *map = kv_map_create(42);
    char base;

    (void)state;
    assert_non_null(map);
    for (uint64_t i = 0; i < KEYS; i++) {
        struct kv_id128 key = key_of(i);

        assert_true(kv_map_set(map, &key, (void *)((uintptr_t)&base + i)));
    }
    assert_int_equal(kv_map_count(map), KEYS);
    for (uint64_t i = 0; i < KEYS; i += 2) {
        struct kv_id128 key = key_of(i);

        assert_true(kv_map_remove(map, &key) == (void *)((uintptr_t)&base + i));
    }
    for (uint64_t i = 0; i < KEYS; i++) {
        struct kv_id128 key = key_of(i);
        void *want = i % 2 == 0 ? NULL : (void *)((uintptr_t)&base + i);

        assert_true(kv_map_get(map, &key) == want);
    }
    assert_int_equal(kv_map_count(map), KEYS / 2);
    kv_map_check(map);
    kv_map_destroy(map);
}

static void nothing(void **state)
{
    struct kv_id128 key = {{0}};
    struct kv_map *map = kv_map_create(0);
    size_t cursor = 0;

    (void)state;
    kv_map_destroy(NULL);
    assert_non_null(map);
    assert_null(kv_map_get(map, &key));
    assert_null(kv_map_remove(map, &key));
    assert_null(kv_map_next(map, &cursor));
    kv_map_check(map);
    kv_map_destroy(map);
}

enum broken {
    COUNT,
    TWICE,
    CUT_OFF,
    TOO_FULL,
    ODD_SLOTS,
    N_BROKEN,
};

static void check_broken(void *arg)
{
    const enum broken *broken = arg;
    struct kv_map *map = kv_map_create(7);
    struct kv_id128 key;
    size_t home;

    if (map == NULL)
        return;
    for (uint64_t i = 0; i < 5; i++) {
        key = key_of(i);
        if (!kv_map_set(map, &key, map))
            return;
    }
    home = find(map, &key);
    if (*broken == COUNT) {
        map->count++;
    } else if (*broken == TWICE) {
        while (map->slots[home].value != NULL)
            home = (home + 1) & map->mask;
        map->slots[home] = (struct slot){key, map};
        map->count++;
    } else if (*broken == CUT_OFF) {
        size_t away = (home_of(map, &key) + map->mask / 2) & map->mask;

        map->slots[home].value = NULL;
        while (map->slots[away].value != NULL)
            away = (away + 1) & map->mask;
        map->slots[away] = (struct slot){key, map};
    } else if (*broken == TOO_FULL) {
        for (uint64_t i = 5; i < 13; i++) {
            struct kv_id128 other = key_of(i);

            map->slots[find(map, &other)] = (struct slot){other, map};
            map->count++;
        }
    } else if (*broken == ODD_SLOTS) {
        map->mask = SLOTS_MIN;
    }
    kv_map_check(map);
}

static void check(void **state)
{
    (void)state;
    assert_int_equal(first_not_found(check_broken, N_BROKEN), -1);
}

/* What is there all the while is returned, though others come and go: also those behind the
 * cursor, whose removal moves entries past it. */
static void a_watched_iteration_leaves_nothing_out(void **state)
{
    enum {
        KEYS = 200,
        ROUNDS = 300
    };
    static char values[KEYS];
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 5);
    for (int round = 0; round < ROUNDS; round++) {
        struct kv_map *map = kv_map_create(kv_random_next(&random));
        bool stays[KEYS], seen[KEYS] = {false};
        size_t cursor = 0;
        char *value;

        assert_non_null(map);
        for (size_t k = 0; k < KEYS; k++) {
            const struct kv_id128 key = key_of(k);

            stays[k] = kv_random_below(&random, 2) == 0;
            assert_true(kv_map_set(map, &key, &values[k]));
        }
        kv_map_watch(map, &cursor);
        while ((value = kv_map_next(map, &cursor)) != NULL) {
            const size_t other = kv_random_below(&random, KEYS);
            const struct kv_id128 key = key_of(other), new = key_of(1000 + other);

            seen[value - values] = true;
            if (!stays[other])
                kv_map_remove(map, &key);
            else if (round % 10 == 0 && kv_map_count(map) < 2 * (size_t)KEYS)
                assert_true(kv_map_set(map, &new, &values[other]));
        }
        kv_map_watch(map, NULL);
        for (size_t k = 0; k < KEYS; k++)
            assert_true(seen[k] || !stays[k]);
        kv_map_destroy(map);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_operations),
        cmocka_unit_test(a_watched_iteration_leaves_nothing_out),
        cmocka_unit_test(millions),
        cmocka_unit_test(nothing),
        cmocka_unit_test(check),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
