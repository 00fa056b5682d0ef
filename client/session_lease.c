#include "client/session_lease.h"

#include "client/call.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/node_connect.h"
#include "client/session.h"
#include "client/session_private.h"
#include "client/state.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <string.h>

enum {
    RENEW_PART = 3,  /* of the lease: leaves time for two renewals to be lost */
    AGAIN_PART = 12, /* after one that has failed */
};

static uint64_t after_part(const struct kv_session *session, unsigned part)
{
    return session->client->loop.now_us + (uint64_t)session->lease_ms * 1000 / part;
}

static void renew_at(struct kv_session *session, uint64_t at_us)
{
    kvc_due_set(&session->client->renewals, &session->renewal, at_us);
    kvc_loop_set_timer(&session->client->loop, at_us);
}

static void background_done(struct kvc_call *call,
                            kv_status_t status,
                            const ProtobufCMessage *message,
                            const char *detail)
{
    struct kv_session *session = call->session;

    (void)message;
    (void)detail;
    if (session == NULL)
        return;
    session->n_renewing--;
    /* A session that a node does not have is reported by the operations that need it. */
    if (status != KV_OK && !session->is_closed) {
        const uint64_t soon_us = after_part(session, AGAIN_PART);

        if (soon_us < session->renewal.at_us)
            renew_at(session, soon_us);
    }
}

void kvc_session_leased(struct kv_session *session)
{
    renew_at(session, after_part(session, RENEW_PART));
}

void kvc_session_unleased(struct kv_session *session)
{
    kvc_due_set(&session->client->renewals, &session->renewal, KVC_NEVER);
}

bool kvc_call_renews(const struct kvc_call *call)
{
    return call->done == background_done;
}

static void renew(struct kv_session *session)
{
    Kvpb__RenewRequest request = KVPB__RENEW_REQUEST__INIT;

    renew_at(session, after_part(session, RENEW_PART));
    if (session->n_renewing > 0)
        return;
    for (uint32_t i = 0; i < session->row.n_nodes; i++) {
        struct kvc_node *node = kvc_session_node(session, i);

        if (node->state != KVC_NODE_CONNECTED) {
            kvc_node_connect(node);
            renew_at(session, after_part(session, AGAIN_PART));
            continue;
        }
        if (session->nodes[i].incarnation != node->incarnation)
            continue;
        request.session_index = session->nodes[i].index;
        request.token = kvc_binary(&session->ticket.token);
        request.lease_ms = session->lease_ms;
        if (kvc_call_begin(node, NULL, session, KV_OP_RENEW, &request.base, background_done) ==
            KV_OK)
            session->n_renewing++;
        else
            renew_at(session, after_part(session, AGAIN_PART));
    }
}

void kvc_sessions_timers(struct kv_client *client)
{
    while (kvc_dues_first_us(&client->renewals) <= client->loop.now_us)
        renew(KVC_DUE_ENTRY(client->renewals.first, struct kv_session, renewal));
    kvc_loop_set_timer(&client->loop, kvc_dues_first_us(&client->renewals));
}

static void ignore_reply(struct kvc_call *call,
                         kv_status_t status,
                         const ProtobufCMessage *reply,
                         const char *detail)
{
    (void)call;
    (void)status;
    (void)reply;
    (void)detail;
}

void kvc_session_drop(struct kvc_node *node, uint32_t index, const struct kv_id128 *token)
{
    Kvpb__CloseRequest request = KVPB__CLOSE_REQUEST__INIT;

    request.session_index = index;
    request.token = kvc_binary(token);
    if (node->client->loop.is_closing)
        return;
    (void)kvc_call_begin(node, NULL, NULL, KV_OP_CLOSE, &request.base, ignore_reply);
}

void kvc_session_withdraw(struct kv_session *session)
{
    for (uint32_t i = 0; i < session->row.n_nodes; i++)
        if (session->nodes[i].incarnation != 0)
            kvc_session_drop(kvc_session_node(session, i), session->nodes[i].index,
                             &session->ticket.token);
    memset(session->nodes, 0, sizeof(session->nodes));
}

void kvc_session_abandon(struct kv_session *session)
{
    kvc_session_withdraw(session);
    kv_session_free(session);
}
