/* A session's handle, its properties, and the renewal of its lease. */
#include "client/session.h"

#include "client/call.h"
#include "client/include/kvclient.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/node_connect.h"
#include "client/session_private.h"
#include "client/state.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/random.h"
#include "kvserver/cluster/placement.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- the handle -------------------------------------------------------------------------- */

const char *kvc_session_text(const struct kv_id128 *id, char text[KVC_SESSION_TEXT])
{
    for (unsigned i = 0; i < 8; i++)
        snprintf(text + 2 * i, 3, "%02x", id->bytes[i]);
    return text;
}

void kvc_session_describe(const struct kv_session *session,
                          uint32_t layer,
                          char *text,
                          size_t text_bytes)
{
    char id[KVC_SESSION_TEXT];

    snprintf(text, text_bytes, "session %s, layer %u",
             kvc_session_text(&session->ticket.session_id, id), layer);
}

struct kv_session *
kvc_session_make(struct kv_client *client, const kv_schema_t *schema, uint64_t root)
{
    struct kv_session *session =
        calloc(1, sizeof(*session) + client->n_nodes * sizeof(session->nodes[0]));

    if (session == NULL)
        return NULL;
    kvc_list_init(&session->of_client);
    kvc_list_init(&session->ops);
    session->client = client;
    session->schema = *schema;
    session->root = root;
    session->tokens_max = KV_TOKENS_MAX;
    session->renew_us = UINT64_MAX;
    session->slots = malloc(schema->n_units * sizeof(session->slots[0]));
    if (session->slots == NULL) {
        free(session);
        return NULL;
    }
    for (uint32_t unit = 0; unit < schema->n_units; unit++)
        session->slots[unit] = (uint16_t)kv_placement_unit_slot(root, unit);
    for (uint32_t i = 0; i < schema->n_layers; i++) {
        const struct kv_layer_schema *layer = &schema->layers[i];

        session->bytes_before[i + 1] =
            session->bytes_before[i] + (uint64_t)layer->n_kv_heads * layer->row_bytes;
        session->row_bytes_before[i + 1] = session->row_bytes_before[i] + layer->row_bytes;
    }
    kvc_list_append(&client->sessions, &session->of_client);
    return session;
}

void kvc_session_destroy(struct kv_session *session)
{
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &session->client->calls)
    {
        struct kvc_call *call = KVC_LIST_ENTRY(link, struct kvc_call, of_client);

        if (call->session == session)
            call->session = NULL;
    }
    kvc_list_remove(&session->of_client);
    free(session->writers);
    free(session->slots);
    free(session);
}

uint64_t kvc_client_draw_writer(struct kv_client *client)
{
    uint64_t writer;

    do
        writer = kv_random_next(&client->random);
    while (writer == 0);
    return writer;
}

void kv_session_ticket(const struct kv_session *session, struct kv_ticket *ret_ticket)
{
    *ret_ticket = session->ticket;
}

const kv_schema_t *kv_session_schema(const struct kv_session *session)
{
    return &session->schema;
}

uint32_t kv_session_generation(const struct kv_session *session)
{
    return session->generation;
}

uint32_t kv_session_lease_ms(const struct kv_session *session)
{
    return session->lease_ms;
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

/* ---- renew ------------------------------------------------------------------------------- */

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
    for (uint32_t i = 0; i < client->n_nodes; i++) {
        struct kvc_node *node = &client->nodes[i];

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
