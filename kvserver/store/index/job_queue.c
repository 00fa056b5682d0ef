#include "kvserver/store/index/job_queue.h"

#include <assert.h>
#include <stdlib.h>

struct session_jobs {
    struct kvs_queued_job *first, **end;
    uint32_t n;
    struct session_jobs *next, **link; /* sessions that have jobs */
    bool is_told;                      /* in the list of sessions of which a job has ended */
    bool watches;                      /* in the list of those that are told of any job */
    struct session_jobs *told_next, *watch_next;
};

struct kvs_job_queue {
    struct session_jobs *turn, **turn_end; /* whose first job is at work; then who is next */
    struct session_jobs *told, *watching;
    struct kvs_queued_job *all, **all_end;
    struct kvs_queued_job *looked;
    uint32_t n_all;
    uint32_t n_sessions;
    struct session_jobs sessions[]; /* (n_sessions) by number */
};

struct kvs_job_queue *kvs_job_queue_create(uint32_t n_sessions)
{
    struct kvs_job_queue *queue =
        calloc(1, sizeof(*queue) + n_sessions * sizeof(queue->sessions[0]));

    if (queue == NULL)
        return NULL;
    queue->turn_end = &queue->turn;
    queue->all_end = &queue->all;
    queue->n_sessions = n_sessions;
    for (uint32_t i = 0; i < n_sessions; i++)
        queue->sessions[i].end = &queue->sessions[i].first;
    return queue;
}

void kvs_job_queue_destroy(struct kvs_job_queue *queue)
{
    assert(queue == NULL || queue->n_all == 0);
    free(queue);
}

/* ---- turns ------------------------------------------------------------------------------- */

static void turn_append(struct kvs_job_queue *queue, struct session_jobs *session)
{
    session->next = NULL;
    session->link = queue->turn_end;
    *queue->turn_end = session;
    queue->turn_end = &session->next;
}

static void turn_remove(struct kvs_job_queue *queue, struct session_jobs *session)
{
    *session->link = session->next;
    if (session->next != NULL)
        session->next->link = session->link;
    else
        queue->turn_end = session->link;
}

/* ---- who is told ------------------------------------------------------------------------- */

static void tell(struct kvs_job_queue *queue, struct session_jobs *session)
{
    if (session->is_told)
        return;
    session->is_told = true;
    session->told_next = queue->told;
    queue->told = session;
}

void kvs_job_queue_watch(struct kvs_job_queue *queue, uint32_t session)
{
    struct session_jobs *watcher = &queue->sessions[session];

    if (watcher->watches)
        return;
    watcher->watches = true;
    watcher->watch_next = queue->watching;
    queue->watching = watcher;
}

bool kvs_job_queue_take_told(struct kvs_job_queue *queue, uint32_t *ret_session)
{
    struct session_jobs *session = queue->told;

    if (session == NULL)
        return false;
    queue->told = session->told_next;
    session->is_told = false;
    *ret_session = (uint32_t)(session - queue->sessions);
    return true;
}

/* ---- jobs -------------------------------------------------------------------------------- */

void kvs_job_queue_append(struct kvs_job_queue *queue,
                          struct kvs_queued_job *job,
                          uint32_t session)
{
    struct session_jobs *of = &queue->sessions[session];

    assert(session < queue->n_sessions);
    job->session = session;
    job->next = job->all_next = NULL;
    job->link = of->end;
    *of->end = job;
    of->end = &job->next;
    if (of->n++ == 0)
        turn_append(queue, of);
    job->all_link = queue->all_end;
    *queue->all_end = job;
    queue->all_end = &job->all_next;
    queue->n_all++;
}

void kvs_job_queue_remove(struct kvs_job_queue *queue, struct kvs_queued_job *job)
{
    struct session_jobs *session = &queue->sessions[job->session];
    const bool was_first = session->first == job;

    *job->link = job->next;
    if (job->next != NULL)
        job->next->link = job->link;
    else
        session->end = job->link;
    *job->all_link = job->all_next;
    if (job->all_next != NULL)
        job->all_next->all_link = job->all_link;
    else
        queue->all_end = job->all_link;
    if (queue->looked == job)
        queue->looked = job->all_next;
    if (--session->n == 0) {
        turn_remove(queue, session);
    } else if (was_first && queue->turn == session) {
        turn_remove(queue, session);
        turn_append(queue, session);
    }
    tell(queue, session);
    for (; queue->watching != NULL; queue->watching = queue->watching->watch_next) {
        queue->watching->watches = false;
        tell(queue, queue->watching);
    }
    queue->n_all--;
}

struct kvs_queued_job *kvs_job_queue_at_work(const struct kvs_job_queue *queue)
{
    return queue->turn != NULL ? queue->turn->first : NULL;
}

struct kvs_queued_job *kvs_job_queue_first(const struct kvs_job_queue *queue)
{
    return queue->all;
}

struct kvs_queued_job *kvs_job_queue_look(struct kvs_job_queue *queue)
{
    struct kvs_queued_job *job = queue->looked != NULL ? queue->looked : queue->all;

    if (job != NULL)
        queue->looked = job->all_next;
    return job;
}

uint32_t kvs_job_queue_n_all(const struct kvs_job_queue *queue)
{
    return queue->n_all;
}

uint32_t kvs_job_queue_n_of(const struct kvs_job_queue *queue, uint32_t session)
{
    assert(session < queue->n_sessions);
    return queue->sessions[session].n;
}

/* ---- check ------------------------------------------------------------------------------- */

static void check_all(const struct kvs_job_queue *queue)
{
    struct kvs_queued_job *const *link = &queue->all;
    bool is_there = queue->looked == NULL;
    uint32_t n = 0;

    for (; *link != NULL; link = &(*link)->all_next) {
        assert((*link)->all_link == link);
        is_there = is_there || queue->looked == *link;
        n++;
        assert(n <= queue->n_all); /* no ring */
    }
    assert(queue->all_end == link && n == queue->n_all && is_there);
}

/* Returns how many jobs the session has. */
static uint32_t check_jobs_of(const struct kvs_job_queue *queue,
                              const struct session_jobs *session)
{
    struct kvs_queued_job *const *link = &session->first;
    uint32_t n = 0;

    for (; *link != NULL; link = &(*link)->next) {
        assert((*link)->link == link);
        assert(&queue->sessions[(*link)->session] == session);
        n++;
        assert(n <= session->n); /* no ring */
    }
    assert(session->end == link && n == session->n);
    return n;
}

static void check_turns(const struct kvs_job_queue *queue)
{
    struct session_jobs *const *link = &queue->turn;
    uint32_t n_jobs = 0;

    for (; *link != NULL; link = &(*link)->next) {
        assert((*link)->link == link && (*link)->n > 0);
        n_jobs += check_jobs_of(queue, *link);
        assert(n_jobs <= queue->n_all); /* no ring */
    }
    assert(queue->turn_end == link && n_jobs == queue->n_all);
}

static void check_told(const struct kvs_job_queue *queue)
{
    uint32_t n_told = 0, n_watching = 0;

    for (uint32_t i = 0; i < queue->n_sessions; i++) {
        n_told += queue->sessions[i].is_told;
        n_watching += queue->sessions[i].watches;
    }
    for (const struct session_jobs *at = queue->told; at != NULL; at = at->told_next) {
        assert(at->is_told && n_told > 0);
        n_told--;
    }
    for (const struct session_jobs *at = queue->watching; at != NULL; at = at->watch_next) {
        assert(at->watches && n_watching > 0);
        n_watching--;
    }
    assert(n_told == 0 && n_watching == 0);
}

void kvs_job_queue_check(const struct kvs_job_queue *queue)
{
    check_all(queue);
    check_turns(queue);
    check_told(queue);
}
