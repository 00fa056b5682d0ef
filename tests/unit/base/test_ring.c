/* One thread: order, full and empty over many rounds.  Many producers: everything arrives once,
 * in each producer's order, and what was written before a push is seen after the pop (the
 * thread sanitizer checks that too).  kv_ring_check() finds what is broken. */
#include "kvserver/base/ring.c" /* its insides are broken below */
#include "kvserver/base/thread.h"
#include "tests/support/dies.h"

#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

static void order(void **state)
{
    static const uint32_t capacities[] = {0, 1, 2, 3, 4, 5, 8, 100, 1024};

    (void)state;
    for (size_t i = 0; i < sizeof(capacities) / sizeof(capacities[0]); i++) {
        struct kv_ring *ring = kv_ring_create(capacities[i]);
        uintptr_t pushed = 0, popped = 0, n_slots = 0;

        assert_non_null(ring);
        assert_false(kv_ring_ready(ring));
        assert_null(kv_ring_pop(ring));
        while (kv_ring_push(ring, (void *)++pushed))
            n_slots++;
        pushed--;
        assert_true(n_slots >= capacities[i] && n_slots >= 2);
        assert_int_equal(n_slots & (n_slots - 1), 0);
        for (int round = 0; round < 5000; round++) {
            assert_false(kv_ring_push(ring, (void *)1));
            if (round % 100 == 0)
                kv_ring_check(ring);
            for (uintptr_t j = 0; j <= (uintptr_t)round % n_slots; j++) {
                assert_true(kv_ring_ready(ring));
                assert_int_equal((uintptr_t)kv_ring_pop(ring), ++popped);
            }
            while (pushed - popped < n_slots)
                assert_true(kv_ring_push(ring, (void *)++pushed));
        }
        while (popped < pushed)
            assert_int_equal((uintptr_t)kv_ring_pop(ring), ++popped);
        assert_null(kv_ring_pop(ring));
        kv_ring_check(ring);
        kv_ring_destroy(ring);
    }
    kv_ring_destroy(NULL);
}

enum {
    PRODUCERS = 3,
    ITEMS = 30000
};

struct item {
    unsigned producer;
    unsigned number; /* plain memory: handed over by the ring alone */
};

struct producer {
    struct kv_ring *ring;
    struct item *items;
    unsigned index;
};

static void produce(void *arg)
{
    struct producer *producer = arg;

    for (unsigned i = 0; i < ITEMS; i++) {
        producer->items[i].producer = producer->index;
        producer->items[i].number = i;
        while (!kv_ring_push(producer->ring, &producer->items[i]))
            sched_yield();
    }
}

static void many_producers(void **state)
{
    static const uint32_t capacities[] = {2, 64, 4096};

    (void)state;
    for (size_t i = 0; i < sizeof(capacities) / sizeof(capacities[0]); i++) {
        struct kv_ring *ring = kv_ring_create(capacities[i]);
        struct producer producers[PRODUCERS];
        struct kv_thread *threads[PRODUCERS];
        unsigned next[PRODUCERS] = {0}, left = PRODUCERS * ITEMS;

        assert_non_null(ring);
        for (unsigned j = 0; j < PRODUCERS; j++) {
            producers[j] = (struct producer){ring, calloc(ITEMS, sizeof(struct item)), j};
            assert_non_null(producers[j].items);
            assert_int_equal(kv_thread_start("produce", produce, &producers[j], &threads[j]),
                             KV_OK);
        }
        while (left > 0) {
            bool ready = kv_ring_ready(ring);
            struct item *item = kv_ring_pop(ring);

            if (item == NULL) {
                assert_false(ready);
                sched_yield();
                continue;
            }
            assert_true(item->producer < PRODUCERS);
            assert_int_equal(item->number, next[item->producer]++);
            item->number = ~0u; /* it is the consumer's now */
            left--;
        }
        assert_null(kv_ring_pop(ring));
        for (unsigned j = 0; j < PRODUCERS; j++) {
            kv_thread_join(threads[j]);
            free(producers[j].items);
        }
        kv_ring_check(ring);
        kv_ring_destroy(ring);
    }
}

enum broken {
    TAIL_BACK,
    TAIL_FAR,
    HELD_NOTHING,
    PUSHED_UNSAID,
    FREE_UNSAID,
    ODD_SLOTS,
    N_BROKEN,
};

static void check_broken(void *arg)
{
    const enum broken *broken = arg;
    struct kv_ring *ring = kv_ring_create(8);
    int item;

    if (ring == NULL)
        return;
    for (unsigned i = 0; i < 13; i++)
        if (!kv_ring_push(ring, &item) || (i < 10 && kv_ring_pop(ring) == NULL))
            return;
    if (*broken == TAIL_BACK)
        ring->tail = ring->head - 1;
    else if (*broken == TAIL_FAR)
        ring->tail = ring->head + ring->mask + 2;
    else if (*broken == HELD_NOTHING)
        ring->slots[(ring->head + 1) & ring->mask].item = NULL;
    else if (*broken == PUSHED_UNSAID)
        ring->slots[ring->head & ring->mask].sequence--;
    else if (*broken == FREE_UNSAID)
        ring->slots[ring->tail & ring->mask].sequence++;
    else if (*broken == ODD_SLOTS)
        ring->mask = 6;
    kv_ring_check(ring);
}

static void check(void **state)
{
    (void)state;
    assert_int_equal(first_not_found(check_broken, N_BROKEN), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(order),
        cmocka_unit_test(check), /* before there are threads */
        cmocka_unit_test(many_producers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
