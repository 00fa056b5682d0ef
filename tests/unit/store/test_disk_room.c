/* test_disk_room.c - what prefixes and objects may take of the disk. */
#include "kvserver/store/tier/disk_room.h"

#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    ROUNDS = 100000,
    BYTES_MAX = 1000,
};

static void set(struct kvs_disk_room *room, uint64_t prefixes, uint64_t objects)
{
    atomic_store(&room->taken[KVS_DISK_PREFIXES], prefixes);
    atomic_store(&room->taken[KVS_DISK_OBJECTS], objects);
}

static void either_takes_what_the_other_leaves(void **state)
{
    struct kvs_disk_room room = {.bytes = 100};

    (void)state;
    set(&room, 0, 0);
    assert_int_equal(kvs_disk_left(&room, KVS_DISK_PREFIXES), 100);
    set(&room, 10, 30);
    assert_int_equal(kvs_disk_left(&room, KVS_DISK_PREFIXES), 70);
    assert_int_equal(kvs_disk_left(&room, KVS_DISK_OBJECTS), 90);
    set(&room, 0, 100);
    assert_int_equal(kvs_disk_left(&room, KVS_DISK_PREFIXES), 0);
    set(&room, 20, 80);
    assert_int_equal(kvs_disk_left(&room, KVS_DISK_PREFIXES), 20);
}

/* Both have more than there is: they shrink until it is enough, in any order, and nobody who has less than
 * half loses any. */
static void both_shrink(void **state)
{
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 1);
    for (int round = 0; round < ROUNDS; round++) {
        struct kvs_disk_room room = {.bytes = kv_random_below(&random, BYTES_MAX)};
        const uint64_t first[] = {kv_random_below(&random, BYTES_MAX),
                                  kv_random_below(&random, BYTES_MAX)};
        bool has_shrunk[KVS_DISK_SHARES] = {true, true};

        set(&room, first[0], first[1]);
        while (has_shrunk[0] || has_shrunk[1]) {
            const enum kvs_disk_share share = (enum kvs_disk_share)kv_random_below(&random, 2);

            has_shrunk[share] = kvs_disk_taken(&room, share) > kvs_disk_left(&room, share);
            if (has_shrunk[share])
                atomic_fetch_sub(&room.taken[share], 1);
        }
        assert_true(atomic_load(&room.taken[0]) + atomic_load(&room.taken[1]) <= room.bytes ||
                    first[0] + first[1] <= room.bytes);
        for (unsigned share = 0; share < KVS_DISK_SHARES; share++)
            assert_true(atomic_load(&room.taken[share]) >=
                        (first[share] < room.bytes / 2 ? first[share] : room.bytes / 2));
    }
}

/* One of them can give up no more: when it has not got less for a while, the other does. */
static void who_can_shrinks(void **state)
{
    struct kvs_disk_room room = {.bytes = 100};

    (void)state;
    set(&room, 50, 80);
    assert_true(kvs_disk_has_too_much(&room));
    assert_int_equal(kvs_disk_left(&room, KVS_DISK_PREFIXES), 50);
    kvs_disk_note_stuck(&room, 1, false);
    set(&room, 50, 79);
    kvs_disk_note_stuck(&room, KVS_DISK_STUCK_US, false);
    set(&room, 50, 80);
    kvs_disk_note_stuck(&room, 2 * KVS_DISK_STUCK_US - 1, false);
    assert_int_equal(kvs_disk_left(&room, KVS_DISK_PREFIXES), 50);
    /* What is erased slowly will have gone. */
    kvs_disk_note_stuck(&room, 2 * KVS_DISK_STUCK_US, true);
    assert_int_equal(kvs_disk_left(&room, KVS_DISK_PREFIXES), 50);
    atomic_store(&room.going, 1);
    kvs_disk_note_stuck(&room, 3 * KVS_DISK_STUCK_US, false);
    assert_int_equal(kvs_disk_left(&room, KVS_DISK_PREFIXES), 50);
    atomic_store(&room.going, 0);
    kvs_disk_note_stuck(&room, 4 * KVS_DISK_STUCK_US, false);
    assert_int_equal(kvs_disk_left(&room, KVS_DISK_PREFIXES), 20);
    assert_int_equal(kvs_disk_left(&room, KVS_DISK_OBJECTS), 50);
    set(&room, 20, 80);
    kvs_disk_note_stuck(&room, 4 * KVS_DISK_STUCK_US + 1, false);
    assert_false(atomic_load(&room.is_stuck));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(either_takes_what_the_other_leaves),
        cmocka_unit_test(both_shrink),
        cmocka_unit_test(who_can_shrinks),
    };

    return cmocka_run_group_tests_name("disk_room", tests, NULL, NULL);
}
