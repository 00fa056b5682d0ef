/* Whose job is next, and who is told when one has ended. */
#include "kvserver/store/index/job_queue.c" /* its insides are broken below */
#include "tests/support/dies.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    N_SESSIONS = 4,
    N_JOBS = 6,
};

static struct {
    struct kvs_job_queue *queue;
    struct kvs_queued_job jobs[N_JOBS];
} it;

static int set_up(void **state)
{
    (void)state;
    it.queue = kvs_job_queue_create(N_SESSIONS);
    return it.queue == NULL ? -1 : 0;
}

static int tear_down(void **state)
{
    (void)state;
    while (kvs_job_queue_first(it.queue) != NULL)
        kvs_job_queue_remove(it.queue, kvs_job_queue_first(it.queue));
    kvs_job_queue_destroy(it.queue);
    return 0;
}

/* Appends job i for the session that the list says. */
static void append(const uint32_t *sessions, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        kvs_job_queue_append(it.queue, &it.jobs[i], sessions[i]);
        kvs_job_queue_check(it.queue);
    }
}

static void finish(uint32_t job)
{
    kvs_job_queue_remove(it.queue, &it.jobs[job]);
    kvs_job_queue_check(it.queue);
}

static void assert_told(uint32_t session)
{
    uint32_t told = UINT32_MAX;

    assert_true(kvs_job_queue_take_told(it.queue, &told));
    assert_int_equal(told, session);
    kvs_job_queue_check(it.queue);
}

static void assert_none_told(void)
{
    uint32_t told;

    assert_false(kvs_job_queue_take_told(it.queue, &told));
}

/* A session with one job does not wait for all of one with three. */
static void sessions_take_turns(void **state)
{
    static const uint32_t sessions[] = {1, 1, 1, 3, 0, 0};
    static const uint32_t order[] = {0, 3, 4, 1, 5, 2};

    (void)state;
    append(sessions, N_JOBS);
    assert_int_equal(kvs_job_queue_n_of(it.queue, 1), 3);
    for (uint32_t i = 0; i < N_JOBS; i++) {
        assert_int_equal(kvs_job_queue_n_all(it.queue), N_JOBS - i);
        assert_ptr_equal(kvs_job_queue_at_work(it.queue), &it.jobs[order[i]]);
        finish(order[i]);
    }
    assert_null(kvs_job_queue_at_work(it.queue));
    assert_int_equal(kvs_job_queue_n_of(it.queue, 1), 0);
}

/* A job that is dropped before its turn takes nobody's turn. */
static void dropped_jobs_keep_turns(void **state)
{
    static const uint32_t sessions[] = {2, 2, 1, 1};

    (void)state;
    append(sessions, 4);
    finish(1); /* of the session at work, but not its first */
    assert_ptr_equal(kvs_job_queue_at_work(it.queue), &it.jobs[0]);
    finish(2); /* the first of the session that is next */
    assert_ptr_equal(kvs_job_queue_at_work(it.queue), &it.jobs[0]);
    finish(0);
    assert_ptr_equal(kvs_job_queue_at_work(it.queue), &it.jobs[3]);
}

static void look_goes_round(void **state)
{
    static const uint32_t sessions[] = {2, 1, 2};

    (void)state;
    assert_null(kvs_job_queue_look(it.queue));
    append(sessions, 3);
    for (uint32_t i = 0; i < 4; i++)
        assert_ptr_equal(kvs_job_queue_look(it.queue), &it.jobs[i % 3]);
    finish(1); /* the next one */
    assert_ptr_equal(kvs_job_queue_look(it.queue), &it.jobs[2]);
    finish(2);
    assert_ptr_equal(kvs_job_queue_look(it.queue), &it.jobs[0]);
    assert_ptr_equal(kvs_job_queue_look(it.queue), &it.jobs[0]);
}

static void sessions_are_told_once(void **state)
{
    static const uint32_t sessions[] = {1, 1, 2};

    (void)state;
    append(sessions, 3);
    assert_none_told();
    finish(0);
    finish(1);
    assert_told(1);
    assert_none_told();
}

/* Whose job it is does not matter to a session that watches; it watches for one job. */
static void watchers_are_told_of_any(void **state)
{
    static const uint32_t sessions[] = {1, 1};

    (void)state;
    append(sessions, 2);
    kvs_job_queue_watch(it.queue, 3);
    kvs_job_queue_watch(it.queue, 3);
    kvs_job_queue_check(it.queue);
    assert_none_told();
    finish(0);
    assert_told(3);
    assert_told(1);
    finish(1);
    assert_told(1);
    assert_none_told();
}

/* ---- the check --------------------------------------------------------------------------- */

static void check(void)
{
    kvs_job_queue_check(it.queue);
}

static struct session_jobs *session(uint32_t number)
{
    return &it.queue->sessions[number];
}

static void job_not_counted(void)
{
    it.queue->n_all--;
}

static void job_in_a_ring(void)
{
    it.jobs[2].all_next = &it.jobs[0];
}

static void job_linked_back_wrongly(void)
{
    it.jobs[1].all_link = &it.jobs[2].all_next;
}

static void job_looked_at_is_gone(void)
{
    it.queue->looked = &it.jobs[N_JOBS - 1];
}

static void job_of_another_session(void)
{
    it.jobs[0].session = 2;
}

static void job_not_counted_by_its_session(void)
{
    session(1)->n--;
}

static void session_without_its_turn(void)
{
    turn_remove(it.queue, session(3));
}

static void turn_without_jobs(void)
{
    turn_append(it.queue, session(2));
}

static void session_told_in_no_list(void)
{
    session(2)->is_told = true;
}

static void session_watches_in_no_list(void)
{
    session(2)->watches = true;
}

static void watcher_does_not_watch(void)
{
    session(0)->watches = false;
}

static void check_finds(void **state)
{
    static const uint32_t sessions[] = {1, 1, 3};

    (void)state;
    append(sessions, 3);
    kvs_job_queue_watch(it.queue, 0);
    check();
    expect_found(job_not_counted, check);
    expect_found(job_in_a_ring, check);
    expect_found(job_linked_back_wrongly, check);
    expect_found(job_looked_at_is_gone, check);
    expect_found(job_of_another_session, check);
    expect_found(job_not_counted_by_its_session, check);
    expect_found(session_without_its_turn, check);
    expect_found(turn_without_jobs, check);
    expect_found(session_told_in_no_list, check);
    expect_found(session_watches_in_no_list, check);
    expect_found(watcher_does_not_watch, check);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(sessions_take_turns, set_up, tear_down),
        cmocka_unit_test_setup_teardown(dropped_jobs_keep_turns, set_up, tear_down),
        cmocka_unit_test_setup_teardown(look_goes_round, set_up, tear_down),
        cmocka_unit_test_setup_teardown(sessions_are_told_once, set_up, tear_down),
        cmocka_unit_test_setup_teardown(watchers_are_told_of_any, set_up, tear_down),
        cmocka_unit_test_setup_teardown(check_finds, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
