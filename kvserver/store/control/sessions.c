/* sessions.c - the sessions of a node: their places, their leases, and their end. */
#include "kvserver/store/control/control.h"

#include <stdlib.h>

struct kv_session *
kv_session_create(struct kv_node *node, const struct kv_id128 *id, struct kv_model *model)
{
    for (uint32_t i = 0; i < node->config.sessions_max; i++) {
        struct kv_session *session = &node->sessions[i];

        if (session->used)
            continue;
        if (!kv_map_set(node->session_of_id, id, session))
            return NULL;
        *session = (struct kv_session){
            .used = true, .busy = true, .index = i, .id = *id, .model = model, .generation = 1};
        model->n_sessions++;
        node->n_sessions++;
        atomic_store(&node->n_sessions_seen, node->n_sessions);
        return session;
    }
    return NULL;
}

void kv_session_destroy(struct kv_node *node, struct kv_session *session)
{
    kv_map_remove(node->session_of_id, &session->id);
    free(session->writers);
    session->writers = NULL;
    session->model->n_sessions--;
    session->model->used_us = kv_clock_now(node->config.clock);
    session->used = false;
    node->n_sessions--;
    atomic_store(&node->n_sessions_seen, node->n_sessions);
}

void kv_session_close(struct kv_control_call *call,
                      const struct kv_session *session,
                      enum kv_ended_why why,
                      void (*next)(struct kv_control_call *call))
{
    struct kv_node *node = call->node;
    const struct kv_command command = {.kind = KV_COMMAND_SESSION_CLOSE,
                                       .index = session->index,
                                       .ended = {.token = session->token,
                                                 .at_us = kv_clock_now(node->config.clock),
                                                 .lease_us = session->lease_us,
                                                 .why = why}};

    kv_ended_add(&node->ended, &command.ended);
    kv_control_ask(call, &command, next);
}

uint64_t kv_session_used_us(const struct kv_node *node, const struct kv_session *session)
{
    uint64_t used_us = session->renewed_us;

    for (uint32_t i = 0; i < node->n_threads; i++) {
        uint64_t here = atomic_load_explicit(&node->data[i].parts[session->index].used_us,
                                             memory_order_relaxed);
        if (here > used_us)
            used_us = here;
    }
    return used_us;
}

uint64_t kv_session_lease_left_us(const struct kv_node *node,
                                  const struct kv_session *session,
                                  uint64_t now_us)
{
    uint64_t used_us = kv_session_used_us(node, session);
    /* A data thread may have looked at the clock after the caller did. */
    uint64_t idle_us = now_us > used_us ? now_us - used_us : 0;

    return idle_us < session->lease_us ? session->lease_us - idle_us : 0;
}

static void session_expired(struct kv_control_call *call)
{
    kv_session_destroy(call->node, call->session);
    kv_control_call_end(call);
}

void kv_sessions_expire(struct kv_node *node, uint64_t now_us)
{
    for (uint32_t i = 0; i < node->config.sessions_max; i++) {
        struct kv_session *session = &node->sessions[i];

        if (!session->used || session->busy)
            continue;
        if (kv_session_lease_left_us(node, session, now_us) > 0)
            continue;
        struct kv_control_call *call = kv_control_call_internal(node, KV_OP_CLOSE);
        if (call == NULL)
            return;
        session->busy = true;
        call->session = session;
        kv_count(&node->stats.sessions_expired, 1);
        kv_session_close(call, session, KV_ENDED_LEASE, session_expired);
    }
}
