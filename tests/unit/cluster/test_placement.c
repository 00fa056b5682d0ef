/* Slots are dealt evenly, lists of different length never agree, and the units of a session
 * spread over nodes and over the threads of each node. */
#include "kvserver/base/random.h"
#include "kvserver/cluster/placement.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static struct kv_placement placement;

static void slots(void **state)
{
    uint32_t epochs[KV_NODES_MAX + 1];

    (void)state;
    for (uint32_t n = 1; n <= KV_NODES_MAX; n++) {
        uint32_t counts[KV_NODES_MAX] = {0};

        kv_placement_init(&placement, n);
        assert_int_equal(placement.n_nodes, n);
        assert_int_not_equal(placement.epoch, 0);
        epochs[n] = placement.epoch;
        for (uint32_t i = 1; i < n; i++)
            assert_int_not_equal(epochs[i], epochs[n]);
        for (uint32_t slot = 0; slot < KV_PLACEMENT_SLOTS; slot++) {
            assert_true(placement.node_of[slot] < n);
            counts[placement.node_of[slot]]++;
        }
        for (uint32_t i = 0; i < n; i++)
            assert_in_range(counts[i], KV_PLACEMENT_SLOTS / n,
                            (KV_PLACEMENT_SLOTS + n - 1) / n);
    }
}

/* With 256 units a share of 32 is 5 off on average: more than twice as much must not happen,
 * less than half may, rarely. */
static void units(void **state)
{
    enum {
        NODES = 2,
        THREADS_MAX = 4,
        UNITS = 256,
        ROOTS = 2000
    };
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 1);
    kv_placement_init(&placement, NODES);
    for (uint32_t n_threads = 2; n_threads <= THREADS_MAX; n_threads++) {
        uint32_t even = UNITS / (NODES * n_threads);
        uint32_t totals[NODES][THREADS_MAX] = {{0}};

        for (uint32_t i = 0; i < ROOTS; i++) {
            /* Roots in a row are as good as random ones. */
            uint64_t root = i % 2 == 0 ? i : kv_random_next(&random);
            uint32_t counts[NODES][THREADS_MAX] = {{0}};

            for (uint32_t unit = 0; unit < UNITS; unit++) {
                uint32_t slot = kv_placement_unit_slot(root, unit);
                uint32_t thread;

                assert_true(slot < KV_PLACEMENT_SLOTS);
                thread = kv_placement_unit_thread(slot, NODES, n_threads);
                assert_true(thread < n_threads);
                counts[placement.node_of[slot]][thread]++;
            }
            for (uint32_t node = 0; node < NODES; node++)
                for (uint32_t thread = 0; thread < n_threads; thread++) {
                    /* Dealt in turn: no share is off by more than a turn or two. */
                    assert_in_range(counts[node][thread], even - 2, even + 2);
                    totals[node][thread] += counts[node][thread];
                }
        }
        for (uint32_t node = 0; node < NODES; node++)
            for (uint32_t thread = 0; thread < n_threads; thread++)
                assert_in_range(totals[node][thread], (uint64_t)ROOTS * even * 9 / 10,
                                (uint64_t)ROOTS * even * 11 / 10);
    }
}

static void objects(void **state)
{
    enum {
        OBJECTS = 64 * KV_PLACEMENT_SLOTS
    };
    static uint32_t counts[KV_PLACEMENT_SLOTS];
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 2);
    for (uint32_t i = 0; i < OBJECTS; i++) {
        struct kv_id128 name;
        uint32_t slot;

        kv_random_fill(&random, &name, sizeof(name));
        slot = kv_placement_object_slot(&name);
        assert_true(slot < KV_PLACEMENT_SLOTS);
        assert_int_equal(slot, kv_placement_object_slot(&name));
        counts[slot]++;
    }
    for (uint32_t slot = 0; slot < KV_PLACEMENT_SLOTS; slot++)
        assert_in_range(counts[slot], 16, 160);
}

/* The numbers are part of the contract between client and node: they must not drift. */
static void numbers_stay(void **state)
{
    struct kv_id128 name = {{1, 2, 3}};

    (void)state;
    assert_int_equal(kv_placement_unit_slot(1, 0), 1509);
    assert_int_equal(kv_placement_unit_slot(12345, 678), 4087);
    assert_int_equal(kv_placement_object_slot(&name), 497);
    assert_int_equal(kv_placement_unit_thread(1001, 2, 4), 0);
    assert_int_equal(kv_placement_object_thread(1000, 4), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots),
        cmocka_unit_test(units),
        cmocka_unit_test(objects),
        cmocka_unit_test(numbers_stay),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
