/* sessions.c - the sessions of a node: their places, their leases, and their end. */
#include "kvserver/store/control/control.h"

#include <stdlib.h>

kv_status_t kvs_session_create(struct kvs_control *control,
                               const struct kv_id128 *id,
                               struct kvs_model *model,
                               struct kvs_session **ret_session)
{
    for (uint32_t i = 0; i < control->config.sessions_max; i++) {
        struct kvs_session *session = &control->sessions[i];

        if (session->used)
            continue;
        /* The map first: its failure leaves the place as it was. */
        if (!kv_map_set(control->session_of_id, id, session))
            return KV_NO_MEMORY;
        *session = (struct kvs_session){
            .used = true, .busy = true, .index = i, .id = *id, .model = model, .generation = 1};
        model->n_sessions++;
        control->n_sessions++;
        atomic_store(&control->n_sessions_seen, control->n_sessions);
        *ret_session = session;
        return KV_OK;
    }
    return KV_BUSY;
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
    kv_map_remove(control->session_of_id, &session->id);
    free(session->writers);
    session->writers = NULL;
    session->model->n_sessions--;
    session->model->used_us = kv_clock_now(control->config.clock);
    session->used = false;
    control->n_sessions--;
    atomic_store(&control->n_sessions_seen, control->n_sessions);
}

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
    kvs_control_broadcast(call, &command, next);
}

/* Data threads note when they last served the session, each in a place that no
 * other thread writes.  The latest counts. */
uint64_t kvs_session_used_us(const struct kvs_control *control,
                             const struct kvs_session *session)
{
    uint64_t used_us = session->renewed_us;

    for (uint32_t i = 0; i < control->n_threads; i++) {
        uint64_t here = atomic_load_explicit(
            &control->shard[i].sessions[session->index].used_us, memory_order_relaxed);
        if (here > used_us)
            used_us = here;
    }
    return used_us;
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
    for (uint32_t i = 0; i < control->config.sessions_max; i++) {
        struct kvs_session *session = &control->sessions[i];

        if (!session->used || session->busy)
            continue;
        if (kvs_session_lease_left_us(control, session, now_us) > 0)
            continue;
        /* Out of memory: the next round tries again. */
        struct kvs_control_call *call = kvs_control_call_internal(control, KV_OP_CLOSE);
        if (call == NULL)
            return;
        session->busy = true;
        call->session = session;
        kvs_count(&control->stats.sessions_expired, 1);
        kvs_session_close(call, session, KVS_ENDED_LEASE, session_expired);
    }
}
