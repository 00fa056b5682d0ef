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
        uint64_t soon = session->client->loop.now_us + (uint64_t)session->lease_ms * 1000 / 12;

        if (soon < session->renew_us)
            session->renew_us = soon;
        kvc_loop_set_timer(&session->client->loop, session->renew_us);
    }
}

void kvc_session_leased(struct kv_session *session)
{
    /* A third of the lease leaves time for two renewals to be lost. */
    session->renew_us = session->client->loop.now_us + (uint64_t)session->lease_ms * 1000 / 3;
    kvc_loop_set_timer(&session->client->loop, session->renew_us);
}

bool kvc_call_renews(const struct kvc_call *call)
{
    return call->done == background_done;
}

static void renew(struct kv_session *session)
{
    struct kv_client *client = session->client;
    Kvpb__RenewRequest request = KVPB__RENEW_REQUEST__INIT;
    uint64_t lease_us = (uint64_t)session->lease_ms * 1000;

    session->renew_us = client->loop.now_us + lease_us / 3;
    if (session->n_renewing > 0)
        return;
    for (uint32_t i = 0; i < session->row.n_nodes; i++) {
        struct kvc_node *node = kvc_session_node(session, i);

        if (node->state != KVC_NODE_CONNECTED) {
            kvc_node_connect(node);
            session->renew_us = client->loop.now_us + lease_us / 12;
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
            session->renew_us = client->loop.now_us + lease_us / 12;
    }
}

void kvc_sessions_timers(struct kv_client *client)
{
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &client->sessions)
    {
        struct kv_session *session = KVC_LIST_ENTRY(link, struct kv_session, of_client);

        if (session->renew_us <= client->loop.now_us)
            renew(session);
        kvc_loop_set_timer(&client->loop, session->renew_us);
    }
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
