/* sessions.c - the sessions of a node: their places, their leases, and their end. */
#include "kvserver/store/control/control.h"

#include <stdlib.h>

enum {
    BUSY_AGAIN_US = 20000, /* a session that a call is changing is looked at again after this */
};

/* ---- leases ------------------------------------------------------------------------------ */

/* The use of a session is known to its data threads.  To ask them about every session would
 * cost threads times sessions, so sessions are kept in a heap, by the time at which the lease
 * would end without further use.  Only then a session is looked at, and put where its latest
 * use says. */

static void place(struct kvs_control *control, uint32_t at, struct kvs_session *session)
{
    control->due[at] = session;
    session->due_at = at;
}

/* Moves the session to its place, up or down from the one that it has. */
static void sift(struct kvs_control *control, struct kvs_session *session)
{
    uint32_t at = session->due_at, child;

    for (; at > 0 && control->due[(at - 1) / 2]->due_us > session->due_us; at = (at - 1) / 2)
        place(control, at, control->due[(at - 1) / 2]);
    for (; (child = 2 * at + 1) < control->n_sessions; at = child) {
        if (child + 1 < control->n_sessions &&
            control->due[child + 1]->due_us < control->due[child]->due_us)
            child++;
        if (control->due[child]->due_us >= session->due_us)
            break;
        place(control, at, control->due[child]);
    }
    place(control, at, session);
}

static void set_due(struct kvs_control *control, struct kvs_session *session, uint64_t due_us)
{
    session->due_us = due_us;
    sift(control, session);
}

void kvs_session_set_lease(struct kvs_control *control,
                           struct kvs_session *session,
                           uint64_t lease_us)
{
    const uint64_t now_us = kv_clock_now(control->config.clock);

    session->lease_us = lease_us;
    set_due(control, session, now_us + kvs_session_lease_left_us(control, session, now_us));
}

/* ---- places ------------------------------------------------------------------------------ */

bool kvs_sessions_init(struct kvs_control *control, uint64_t secret)
{
    const uint32_t n = control->config.sessions_max;

    control->sessions = calloc(n, sizeof(*control->sessions));
    control->due = calloc(n, sizeof(*control->due));
    control->session_of_id = kv_map_create(secret);
    control->roots = kv_map_create(kv_mix64(secret));
    if (control->sessions == NULL || control->due == NULL || control->session_of_id == NULL ||
        control->roots == NULL)
        return false;
    for (uint32_t i = n; i-- > 0;) {
        control->sessions[i].index = i;
        control->sessions[i].next_free = control->free_session;
        control->free_session = &control->sessions[i];
    }
    return true;
}

kv_status_t kvs_session_create(struct kvs_control *control,
                               const struct kv_id128 *id,
                               struct kvs_model *model,
                               struct kvs_session **ret_session)
{
    struct kvs_session *session = control->free_session;

    if (session == NULL)
        return KV_BUSY;
    /* The map first: its failure leaves the place as it was. */
    if (!kv_map_set(control->session_of_id, id, session))
        return KV_NO_MEMORY;
    control->free_session = session->next_free;
    *session = (struct kvs_session){.used = true,
                                    .busy = true,
                                    .index = session->index,
                                    .id = *id,
                                    .model = model,
                                    .generation = 1,
                                    .opened_us = kv_clock_now(control->config.clock),
                                    .due_at = control->n_sessions};
    model->n_sessions++;
    control->n_sessions++;
    set_due(control, session, kv_clock_now(control->config.clock));
    atomic_store(&control->n_sessions_seen, control->n_sessions);
    *ret_session = session;
    return KV_OK;
}

void kvs_session_place(struct kvs_control *control,
                       struct kvs_session *session,
                       uint64_t root,
                       uint64_t epoch,
                       uint32_t n_nodes,
                       uint32_t position)
{
    session->root = root;
    session->epoch = epoch;
    session->n_nodes = n_nodes;
    session->position = position;
    session->first_thread = kv_placement_unit_thread(root, 0, n_nodes, control->n_threads);
    session->n_threads = kv_placement_session_threads(session->model->info.schema.n_units,
                                                      n_nodes, control->n_threads);
}

bool kvs_session_is_on(const struct kvs_control *control,
                       const struct kvs_session *session,
                       uint32_t thread)
{
    return (thread + control->n_threads - session->first_thread) % control->n_threads <
           session->n_threads;
}

void kvs_session_refuse(struct kvs_control_call *call, const char *what, kv_status_t status)
{
    if (status == KV_BUSY)
        kvs_control_refuse(call, status, "%s: too many sessions: %u are open", what,
                           call->control->n_sessions);
    else
        kvs_control_refuse(call, status, "%s: out of memory", what);
}

void kvs_session_destroy(struct kvs_control *control, struct kvs_session *session)
{
    struct kvs_session *last = control->due[control->n_sessions - 1];

    kv_map_remove(control->session_of_id, &session->id);
    kvs_root_leave(control, session);
    kvs_session_leave_prefix(control, session);
    free(session->writers);
    session->writers = NULL;
    session->model->n_sessions--;
    session->model->used_us = kv_clock_now(control->config.clock);
    session->used = false;
    session->next_free = control->free_session;
    control->free_session = session;
    control->n_sessions--;
    if (last != session) {
        last->due_at = session->due_at;
        sift(control, last);
    }
    atomic_store(&control->n_sessions_seen, control->n_sessions);
}

/* ---- use and end ------------------------------------------------------------------------- */

void kvs_session_close(struct kvs_control_call *call,
                       const struct kvs_session *session,
                       enum kvs_ended_why why,
                       void (*next)(struct kvs_control_call *call))
{
    struct kvs_control *control = call->control;
    const struct kvs_command command = {.kind = KVS_COMMAND_SESSION_CLOSE,
                                        .index = session->index,
                                        .ended = {.token = session->token,
                                                  .at_us = kv_clock_now(control->config.clock),
                                                  .lease_us = session->lease_us,
                                                  .why = why}};

    kvs_ended_add(&control->ended, &command.ended);
    kvs_control_broadcast_session(call, session, &command, next);
}

/* Data threads note when they last served the session, in places that no other thread writes. */
uint64_t kvs_session_needed_us(const struct kvs_control *control,
                               const struct kvs_session *session)
{
    uint64_t used_us = 0;

    for (uint32_t i = 0; i < session->n_threads; i++) {
        const uint32_t thread = (session->first_thread + i) % control->n_threads;
        uint64_t here = atomic_load_explicit(
            &control->shard[thread].sessions[session->index].used_us, memory_order_relaxed);
        if (here > used_us)
            used_us = here;
    }
    return used_us;
}

uint64_t kvs_session_used_us(const struct kvs_control *control,
                             const struct kvs_session *session)
{
    const uint64_t needed_us = kvs_session_needed_us(control, session);

    return needed_us > session->renewed_us ? needed_us : session->renewed_us;
}

uint64_t kvs_session_lease_left_us(const struct kvs_control *control,
                                   const struct kvs_session *session,
                                   uint64_t now_us)
{
    uint64_t used_us = kvs_session_used_us(control, session);
    /* A data thread may have read the clock later than the caller. */
    uint64_t idle_us = now_us > used_us ? now_us - used_us : 0;

    return idle_us < session->lease_us ? session->lease_us - idle_us : 0;
}

static void session_expired(struct kvs_control_call *call)
{
    kvs_session_destroy(call->control, call->session);
    kvs_control_call_end(call);
}

void kvs_sessions_expire(struct kvs_control *control, uint64_t now_us)
{
    while (control->n_sessions > 0 && control->due[0]->due_us <= now_us) {
        struct kvs_session *session = control->due[0];

        if (session->busy) {
            set_due(control, session, now_us + BUSY_AGAIN_US);
            continue;
        }
        const uint64_t left_us = kvs_session_lease_left_us(control, session, now_us);
        control->n_lease_looks++;
        if (left_us > 0) {
            set_due(control, session, now_us + left_us);
            continue;
        }
        struct kvs_control_call *call = kvs_control_call_internal(control, KV_OP_CLOSE);
        if (call == NULL)
            return;
        session->busy = true;
        call->session = session;
        kvs_count(&control->stats.sessions_expired, 1);
        kvs_session_close(call, session, KVS_ENDED_LEASE, session_expired);
    }
}
