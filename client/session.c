#include "client/session.h"

#include "client/include/kvclient.h"
#include "client/list.h"
#include "client/state.h"
#include "kvserver/base/random.h"
#include "kvserver/cluster/placement.h"

#include <stdio.h>
#include <stdlib.h>

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
