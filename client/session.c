#include "client/session.h"

#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/list.h"
#include "client/node.h"
#include "client/state.h"
#include "kvserver/base/random.h"
#include "kvserver/base/writers.h"
#include "kvserver/cluster/placement.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

/* ---- where it is ------------------------------------------------------------------------- */

void kvc_client_row(const struct kv_client *client,
                    uint64_t root,
                    struct kv_placement_row *ret_row)
{
    kv_placement_row(client->map, kv_placement_root_slot(root), ret_row);
}

struct kvc_node *kvc_row_node(const struct kv_client *client,
                              const struct kv_placement_row *row,
                              uint32_t position)
{
    assert(position < row->n_nodes);
    return &client->nodes[row->nodes[position]];
}

struct kvc_node *kvc_session_node(const struct kv_session *session, uint32_t position)
{
    return kvc_row_node(session->client, &session->row, position);
}

const struct kvc_node *kvc_session_node_below(const struct kv_session *session,
                                              uint32_t version)
{
    for (uint32_t i = 0; i < session->row.n_nodes; i++) {
        const struct kvc_node *node = kvc_session_node(session, i);

        if (node->state == KVC_NODE_CONNECTED && node->version < version)
            return node;
    }
    return NULL;
}

bool kvc_session_is_connected(const struct kv_session *session)
{
    for (uint32_t i = 0; i < session->row.n_nodes; i++)
        if (kvc_session_node(session, i)->state != KVC_NODE_CONNECTED)
            return false;
    return true;
}

uint32_t kvc_row_position(const struct kv_placement_row *row, const struct kvc_node *node)
{
    for (uint32_t i = 0; i < row->n_nodes; i++)
        if (row->nodes[i] == node->index)
            return i;
    return KV_ROW_NODES;
}

struct kvc_session_node *kvc_session_on(struct kv_session *session, const struct kvc_node *node)
{
    const uint32_t position = kvc_row_position(&session->row, node);

    assert(position < KV_ROW_NODES);
    return &session->nodes[position];
}

/* ---- the handle -------------------------------------------------------------------------- */

void kvc_ticket_draw(struct kv_client *client, struct kv_ticket *ret_ticket)
{
    kv_random_fill(&client->random, &ret_ticket->session_id, sizeof(ret_ticket->session_id));
    kv_random_fill(&client->random, &ret_ticket->token, sizeof(ret_ticket->token));
    memcpy(&ret_ticket->root, &ret_ticket->session_id, sizeof(ret_ticket->root));
}

void kvc_session_place(struct kv_session *session, const struct kv_ticket *ticket)
{
    session->ticket = *ticket;
    kvc_client_row(session->client, ticket->root, &session->row);
}

struct kv_session *kvc_session_make(struct kv_client *client,
                                    const kv_schema_t *schema,
                                    const struct kv_ticket *ticket)
{
    struct kv_session *session = calloc(1, sizeof(*session));

    if (session == NULL)
        return NULL;
    kvc_list_init(&session->of_client);
    kvc_list_init(&session->ops);
    kvc_list_init(&session->ranked);
    kvc_list_init(&session->calls);
    session->client = client;
    session->schema = *schema;
    kvc_session_place(session, ticket);
    session->tokens_max = KV_TOKENS_MAX;
    kvc_due_init(&session->renewal);
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
    kvc_due_set(&session->client->renewals, &session->renewal, KVC_NEVER);
    kvc_list_remove(&session->of_client);
    kvc_writers_free(session->writers);
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

/* ---- writers ----------------------------------------------------------------------------- */

const struct kv_writers *kvc_session_writers(const struct kv_session *session,
                                             const struct kvc_node *node)
{
    return session->writers[kvc_row_position(&session->row, node)];
}

uint64_t kvc_session_own_writer(const struct kv_session *session)
{
    return kv_writers_own(session->writers[0]);
}

kv_status_t kvc_writers_make(const struct kv_session *session,
                             const struct kv_session *from,
                             uint32_t tokens,
                             uint64_t writer,
                             struct kv_writers *ret_writers[KV_ROW_NODES])
{
    for (uint32_t i = 0; i < session->row.n_nodes; i++)
        if (from != NULL &&
            kv_writers_count(from->writers[i], tokens, writer) > KV_WRITER_RUNS_MAX)
            return KV_TOO_LARGE;
    for (uint32_t i = 0; i < session->row.n_nodes; i++) {
        ret_writers[i] =
            kv_writers_create(from != NULL ? from->writers[i] : NULL, tokens, writer);
        if (ret_writers[i] == NULL) {
            kvc_writers_free(ret_writers);
            return KV_NO_MEMORY;
        }
    }
    return KV_OK;
}

void kvc_writers_free(struct kv_writers *writers[KV_ROW_NODES])
{
    for (uint32_t i = 0; i < KV_ROW_NODES; i++) {
        free(writers[i]);
        writers[i] = NULL;
    }
}

void kvc_session_take_writers(struct kv_session *session,
                              struct kv_writers *writers[KV_ROW_NODES])
{
    kvc_writers_free(session->writers);
    memcpy(session->writers, writers, sizeof(session->writers));
    memset(writers, 0, sizeof(session->writers));
}

bool kvc_session_hear_own(struct kv_session *session,
                          uint32_t position,
                          uint32_t tokens,
                          uint64_t writer)
{
    struct kv_writers *before = session->writers[position];

    /* 0: a node of an older version, which does what it is told. */
    if (writer == 0 || kv_writers_own(before) == writer)
        return true;
    session->writers[position] = kv_writers_create(before, tokens, writer);
    if (session->writers[position] == NULL) {
        session->writers[position] = before;
        return false;
    }
    free(before);
    return true;
}

bool kvc_session_hear_writers(struct kv_session *session,
                              uint32_t position,
                              const Kvpb__OpenReply *reply)
{
    const size_t n_runs = reply->n_writers;
    struct kv_writers *told = malloc(sizeof(*told) + n_runs * sizeof(told->runs[0]));

    if (told == NULL)
        return false;
    told->n_runs = (uint32_t)n_runs;
    for (size_t i = 0; i < n_runs; i++)
        told->runs[i] = (struct kv_writer_run){.writer = reply->writers[i]->writer,
                                               .end = reply->writers[i]->end};
    free(session->writers[position]);
    session->writers[position] = told;
    return true;
}

void kv_session_ticket(const struct kv_session *session, struct kv_ticket *ret_ticket)
{
    KVC_LOOK(session->client);

    *ret_ticket = session->ticket;
}

const kv_schema_t *kv_session_schema(const struct kv_session *session)
{
    KVC_LOOK(session->client);

    return &session->schema;
}

uint32_t kv_session_generation(const struct kv_session *session)
{
    KVC_LOOK(session->client);

    return session->generation;
}

void kv_session_fingerprint(const struct kv_session *session, struct kv_id128 *ret_fingerprint)
{
    KVC_LOOK(session->client);

    *ret_fingerprint = session->fingerprint;
}

uint32_t kv_session_lease_ms(const struct kv_session *session)
{
    KVC_LOOK(session->client);

    return session->lease_ms;
}
