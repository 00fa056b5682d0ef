/* A thread that moves something on while its user is elsewhere, and only then: whoever is
 * inside is alone, who leaves is soon replaced, who comes back is not kept waiting, and who
 * stays away does not cost anything. */
#include "kvserver/base/clock.h"
#include "kvserver/base/progress.h"
#include "kvserver/base/thread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    SOON_US = 10 * 1000 * 1000, /* on a slow machine, under a sanitizer */
    STAY_US = 30 * 1000,
    WAIT_MAX_US = 60 * 1000 * 1000,
    VISITS = 2000,
    GAP_US = 50, /* between them */
    STEPS = 100, /* one in 10 ms or so: far more than the times when the user has no core */
};

struct thing {
    struct kv_progress *progress;
    uint64_t n_steps;        /* with the lock */
    uint64_t n_works;        /* that the user has brought, and a step has not done */
    unsigned n_busy;         /* steps that say that there is more */
    bool enters;             /* a step does */
    bool is_inside;          /* the user */
    _Atomic uint64_t n_seen; /* steps, for who has no lock */
};

static bool step(void *arg, int *ret_fds, uint64_t *ret_wait_us)
{
    struct thing *thing = arg;

    assert_false(thing->is_inside);
    assert_int_equal(ret_fds[0], -1);
    if (thing->enters) {
        kv_progress_enter(thing->progress);
        kv_progress_look(thing->progress);
        kv_progress_look_away(thing->progress);
        kv_progress_leave(thing->progress);
    }
    thing->n_steps++;
    thing->n_works = 0;
    atomic_fetch_add(&thing->n_seen, 1);
    *ret_wait_us = WAIT_MAX_US;
    if (thing->n_busy == 0)
        return true;
    thing->n_busy--;
    return false;
}

static void start(struct thing *thing)
{
    *thing = (struct thing){.enters = true};
    assert_int_equal(kv_progress_start("progress", step, thing, &thing->progress), KV_OK);
}

static void enter(struct thing *thing)
{
    kv_progress_enter(thing->progress);
    assert_false(thing->is_inside);
    thing->is_inside = true;
}

static void leave(struct thing *thing)
{
    thing->is_inside = false;
    kv_progress_leave(thing->progress);
}

/* Looks until a step has done all works; fails if none does. */
static void wait_for_step(struct thing *thing)
{
    const uint64_t until_us = kv_clock_now(&kv_clock_real) + SOON_US;

    for (bool is_done = false; !is_done;) {
        kv_progress_look(thing->progress);
        is_done = thing->n_works == 0;
        kv_progress_look_away(thing->progress);
        if (!is_done && kv_clock_now(&kv_clock_real) > until_us)
            fail_msg("no step has come");
        kv_sleep_fds(NULL, 0, 100);
    }
}

/* Work is done without the user; a look, even one after the other, keeps nobody from it. */
static void takes_over(void **state)
{
    struct thing thing;

    (void)state;
    start(&thing);
    for (unsigned i = 0; i < 20; i++) {
        enter(&thing);
        thing.n_works++;
        thing.n_busy = i % 3;
        leave(&thing);
        wait_for_step(&thing);
    }
    enter(&thing);
    thing.n_works++;
    leave(&thing);
    for (bool is_done = false; !is_done;) {
        kv_progress_look(thing.progress);
        is_done = thing.n_works == 0;
        kv_progress_look_away(thing.progress);
    }
    kv_progress_stop(thing.progress);
}

/* Whoever is inside is alone, however long, and the thread takes over when he has left. */
static void waits_outside(void **state)
{
    struct thing thing;

    (void)state;
    start(&thing);
    for (unsigned i = 0; i < 10; i++) {
        uint64_t n_steps;

        enter(&thing);
        n_steps = thing.n_steps;
        thing.n_works++;
        kv_sleep_fds(NULL, 0, STAY_US);
        assert_int_equal(thing.n_steps, n_steps);
        leave(&thing);
        wait_for_step(&thing);
    }
    kv_progress_stop(thing.progress);
}

/* Enters nest, and the outermost leave is what counts. */
static void nests(void **state)
{
    struct thing thing;

    (void)state;
    start(&thing);
    enter(&thing);
    thing.n_works++;
    kv_progress_enter(thing.progress);
    kv_progress_look(thing.progress);
    kv_progress_look_away(thing.progress);
    kv_progress_leave(thing.progress);
    kv_sleep_fds(NULL, 0, STAY_US);
    assert_int_equal(thing.n_works, 1);
    leave(&thing);
    wait_for_step(&thing);
    kv_progress_stop(thing.progress);
}

/* A user who comes and goes, and moves things on himself, is left alone: far fewer steps than
 * visits.  Nothing is lost. */
static void steps_back(void **state)
{
    struct thing thing;
    uint64_t n_before;

    (void)state;
    start(&thing);
    wait_for_step(&thing);
    n_before = atomic_load(&thing.n_seen);
    for (unsigned i = 0; i < VISITS; i++) {
        const uint64_t next_us = kv_clock_now(&kv_clock_real) + GAP_US;

        enter(&thing);
        thing.n_works++;
        kv_progress_moved(thing.progress);
        leave(&thing);
        while (kv_clock_now(&kv_clock_real) < next_us)
            kv_relax();
    }
    assert_true(atomic_load(&thing.n_seen) - n_before < VISITS / 4);
    wait_for_step(&thing);
    kv_progress_stop(thing.progress);
}

/* One who only begins things never stays away for long, and yet they are done. */
static void moves_for_who_only_begins(void **state)
{
    struct thing thing;
    const uint64_t until_us = kv_clock_now(&kv_clock_real) + SOON_US;

    (void)state;
    start(&thing);
    wait_for_step(&thing);
    for (uint64_t n_wanted = atomic_load(&thing.n_seen) + STEPS;
         atomic_load(&thing.n_seen) < n_wanted;) {
        const uint64_t next_us = kv_clock_now(&kv_clock_real) + GAP_US;

        enter(&thing);
        thing.n_works++;
        leave(&thing);
        while (kv_clock_now(&kv_clock_real) < next_us)
            kv_relax();
        if (kv_clock_now(&kv_clock_real) > until_us)
            fail_msg("no step has come");
    }
    kv_progress_stop(thing.progress);
}

/* Steps that always have more to do leave the user his turn. */
static void lets_in(void **state)
{
    struct thing thing;

    (void)state;
    start(&thing);
    for (unsigned i = 0; i < 50; i++) {
        enter(&thing);
        thing.n_busy = UINT32_MAX;
        leave(&thing);
        kv_sleep_fds(NULL, 0, 1000);
    }
    kv_progress_stop(thing.progress);
}

/* Nothing to do, no user: the thread sleeps.  And ends at once when told. */
static void sleeps(void **state)
{
    struct thing thing;
    uint64_t n_before, begun_us;

    (void)state;
    start(&thing);
    enter(&thing);
    thing.n_works++;
    leave(&thing);
    wait_for_step(&thing);
    kv_sleep_fds(NULL, 0, STAY_US);
    n_before = atomic_load(&thing.n_seen);
    begun_us = kv_clock_now(&kv_clock_real);
    kv_sleep_fds(NULL, 0, 10 * STAY_US);
    assert_true(atomic_load(&thing.n_seen) - n_before <=
                1 + (kv_clock_now(&kv_clock_real) - begun_us) / WAIT_MAX_US);
    begun_us = kv_clock_now(&kv_clock_real);
    kv_progress_stop(thing.progress);
    assert_true(kv_clock_now(&kv_clock_real) - begun_us < WAIT_MAX_US / 2);
}

/* A hand-over counts at once, and only once. */
static void hands_over(void **state)
{
    struct thing thing;

    (void)state;
    start(&thing);
    for (unsigned i = 0; i < 1000; i++) {
        enter(&thing);
        thing.n_works++;
        leave(&thing);
        kv_progress_look(thing.progress);
        kv_progress_hand_over(thing.progress);
        kv_progress_look_away(thing.progress);
        if (i % 10 == 0)
            wait_for_step(&thing);
    }
    kv_progress_stop(thing.progress);
    kv_progress_stop(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takes_over),
        cmocka_unit_test(waits_outside),
        cmocka_unit_test(nests),
        cmocka_unit_test(steps_back),
        cmocka_unit_test(moves_for_who_only_begins),
        cmocka_unit_test(lets_in),
        cmocka_unit_test(sleeps),
        cmocka_unit_test(hands_over),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
