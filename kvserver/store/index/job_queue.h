/* job_queue.h - jobs of sessions, which take turns, a job each, so that a session with a few jobs
 * does not wait for all of one that has thousands.
 *
 *   turn --> session --> session --> ...   those with jobs; the first job of the first is at work
 *              |           |
 *             jobs        jobs             in order of arrival
 *
 * Who waits for jobs of a session asks which sessions have lost one (`told`), for any reason.  A
 * session that watches is told once when any job ends.
 *
 * Invariants, which kvs_job_queue_check() asserts:
 *   (1) Each job is in the list of its session and in the list of all, once, and is counted in
 *       both.
 *   (2) A session has a turn while it has jobs, and only then.
 *   (3) The job that is looked at next is in the list of all; NULL: the first.
 *   (4) A session is in the list of those that are told, or that watch, if it says so, and only
 *       then.
 *
 * Threads: the data thread.  Memory: jobs are the caller's, which keeps them where they are until
 * they are removed; sessions from kvs_job_queue_create().
 */
#ifndef KV_KVSERVER_STORE_INDEX_JOB_QUEUE_H
#define KV_KVSERVER_STORE_INDEX_JOB_QUEUE_H

#include <stdbool.h>
#include <stdint.h>

struct kvs_job_queue;

/* The beginning of a job. */
struct kvs_queued_job {
    struct kvs_queued_job *next, **link;         /* of its session */
    struct kvs_queued_job *all_next, **all_link; /* of all sessions */
    uint32_t session;
};

/* For sessions [0, n_sessions).  Returns NULL if out of memory. */
struct kvs_job_queue *kvs_job_queue_create(uint32_t n_sessions);
void kvs_job_queue_destroy(struct kvs_job_queue *queue); /* has no jobs; NULL is allowed */

void kvs_job_queue_append(struct kvs_job_queue *queue,
                          struct kvs_queued_job *job,
                          uint32_t session);

/* Its session is told, as are those that watch.  If the job was at work, the next session has
 * its turn. */
void kvs_job_queue_remove(struct kvs_job_queue *queue, struct kvs_queued_job *job);

/* Return the job at work, and the first of all; NULL: there are none. */
struct kvs_queued_job *kvs_job_queue_at_work(const struct kvs_job_queue *queue);
struct kvs_queued_job *kvs_job_queue_first(const struct kvs_job_queue *queue);

/* Returns one job after the other, and after the last the first again; NULL: there are none. */
struct kvs_queued_job *kvs_job_queue_look(struct kvs_job_queue *queue);

/* Return the number of jobs, of all sessions and of one. */
uint32_t kvs_job_queue_n_all(const struct kvs_job_queue *queue);
uint32_t kvs_job_queue_n_of(const struct kvs_job_queue *queue, uint32_t session);

void kvs_job_queue_watch(struct kvs_job_queue *queue, uint32_t session);

/* Returns true once for each session that has been told. */
bool kvs_job_queue_take_told(struct kvs_job_queue *queue, uint32_t *ret_session);

/* Looks at each job and each session. */
void kvs_job_queue_check(const struct kvs_job_queue *queue);

#endif
