#include "client/client.h"

#include "proto/kvstore.pb-c.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the handle -------------------------------------------------------------------------- */

const char *kv_session_text(const struct kv_id128 *id, char text[KV_SESSION_TEXT])
{
    for (unsigned i = 0; i < 8; i++)
        snprintf(text + 2 * i, 3, "%02x", id->bytes[i]);
    return text;
}

void kv_session_describe(const struct kv_session *session,
                         uint32_t layer,
                         char *text,
                         size_t text_bytes)
{
    char id[KV_SESSION_TEXT];

    snprintf(text, text_bytes, "session %s, layer %u",
             kv_session_text(&session->ticket.session_id, id), layer);
}

struct kv_session *
kv_session_make(struct kv_client *client, const kv_schema_t *schema, uint64_t root)
{
    struct kv_session *session =
        calloc(1, sizeof(*session) + client->n_remotes * sizeof(session->nodes[0]));

    if (session == NULL)
        return NULL;
    kv_list_init(&session->of_client);
    kv_list_init(&session->ops);
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
    kv_list_append(&client->sessions, &session->of_client);
    return session;
}

void kv_session_free(struct kv_session *session)
{
    struct kv_list *link, *follow;

    if (session == NULL)
        return;
    session->client->now_us = kv_clock_now(session->client->clock);
    while (!kv_list_empty(&session->ops))
        kv_cancel(KV_LIST_ENTRY(session->ops.previous, struct kv_op, of_session));
    KV_LIST_EACH(link, follow, &session->client->calls) {
        struct kv_call *call = KV_LIST_ENTRY(link, struct kv_call, of_client);

        if (call->session == session)
            call->session = NULL;
    }
    kv_list_remove(&session->of_client);
    free(session->writers);
    free(session->slots);
    free(session);
}

uint64_t kv_client_draw_writer(struct kv_client *client)
{
    uint64_t writer;

    do
        writer = kv_random_next(&client->random);
    while (writer == 0);
    return writer;
}

void kv_session_admit(struct kv_session *session)
{
    struct kv_client *client = session->client;
    bool is_first = true;
    struct kv_list *link, *follow;

    if (session->n_queued == 0)
        return;
    KV_LIST_EACH(link, follow, &session->ops) {
        struct kv_op *op = KV_LIST_ENTRY(link, struct kv_op, of_session);

        if (op->kind->is_exclusive && !is_first)
            return;
        if (op->stage == KV_STAGE_QUEUED) {
            op->stage = KV_STAGE_PREPARING;
            session->n_queued--;
            client->n_preparing++;
            client->must_pump = true;
        }
        if (op->kind->is_exclusive)
            return;
        is_first = false;
    }
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

static void
describe(const struct kv_op *op, const struct kv_trip *trip, char *text, size_t text_bytes)
{
    const struct kv_session *session = op->session != NULL ? op->session : op->result;
    char id[KV_SESSION_TEXT];

    (void)trip;
    if (session != NULL)
        snprintf(text, text_bytes, "session %s",
                 kv_session_text(&session->ticket.session_id, id));
}

static ProtobufCBinaryData binary(const struct kv_id128 *id)
{
    return (ProtobufCBinaryData){.data = (uint8_t *)id->bytes, .len = sizeof(id->bytes)};
}

/* ---- open -------------------------------------------------------------------------------- */

static void nobody_waits(struct kv_call *call,
                         kv_status_t status,
                         const ProtobufCMessage *reply,
                         const char *detail)
{
    (void)call;
    (void)status;
    (void)reply;
    (void)detail;
}

void kv_session_drop(struct kv_remote *remote, uint32_t index, const struct kv_id128 *token)
{
    Kvpb__CloseRequest request = KVPB__CLOSE_REQUEST__INIT;

    request.session_index = index;
    request.token = binary(token);
    if (remote->client->is_closing)
        return;
    (void)kv_call_begin(remote, NULL, NULL, KV_OP_CLOSE, &request.base, nobody_waits);
}

static void open_done(struct kv_call *call,
                      kv_status_t status,
                      const ProtobufCMessage *message,
                      const char *detail)
{
    const Kvpb__OpenReply *reply = (const Kvpb__OpenReply *)message;
    struct kv_remote *remote = call->remote;
    struct kv_op *op = call->op;

    if (op == NULL) {
        /* The open has failed meanwhile: all or nothing. */
        Kvpb__OpenRequest *request =
            status == KV_OK
                ? kvpb__open_request__unpack(NULL, call->request_bytes, call->request)
                : NULL;

        if (request != NULL) {
            struct kv_id128 token;

            memcpy(token.bytes, request->token.data, sizeof(token.bytes));
            kv_session_drop(remote, reply->session_index, &token);
            kvpb__open_request__free_unpacked(request, NULL);
        }
        return;
    }
    if (status != KV_OK) {
        kv_op_fail(op, remote, NULL, status, "%s", detail);
        return;
    }
    struct kv_session *session = op->result;

    session->nodes[remote->index] = (struct kv_session_node){
        .index = reply->session_index,
        .generation = reply->generation,
        .incarnation = remote->incarnation,
    };
    if (op->phase == 0)
        session->generation = reply->generation;
    op->phase = 1;
    op->open.opened[remote->index] = true;
    if (reply->lease_ms < session->lease_ms)
        session->lease_ms = reply->lease_ms;
    if (reply->tokens_max > 0 && reply->tokens_max < session->tokens_max)
        session->tokens_max = reply->tokens_max;
    if (reply->generation != session->generation)
        kv_op_fail(op, remote, NULL, KV_CORRUPT, "the nodes begin with different generations");
}

static void model_done(struct kv_call *call,
                       kv_status_t status,
                       const ProtobufCMessage *message,
                       const char *detail)
{
    Kvpb__OpenRequest request = KVPB__OPEN_REQUEST__INIT;
    Kvpb__Placement placement = KVPB__PLACEMENT__INIT;
    struct kv_remote *remote = call->remote;
    struct kv_client *client = remote->client;
    struct kv_op *op = call->op;
    const struct kv_session *session;

    (void)message;
    if (op == NULL)
        return;
    if (status != KV_OK) {
        kv_op_fail(op, remote, NULL, status, "%s", detail);
        return;
    }
    session = op->result;
    request.session_id = binary(&session->ticket.session_id);
    request.token = binary(&session->ticket.token);
    request.fingerprint = binary(&session->fingerprint);
    request.lease_ms = op->lease_wanted_ms;
    request.tokens_max = op->tokens_max_wanted;
    request.writer = kv_writers_own(session->writers);
    placement.epoch = client->placement.epoch;
    placement.n_nodes = client->n_remotes;
    placement.node_index = remote->index;
    placement.root = session->root;
    request.placement = &placement;
    status = kv_call_begin(remote, op, NULL, KV_OP_OPEN, &request.base, open_done);
    if (status != KV_OK)
        kv_op_fail(op, remote, NULL, status, "open cannot be sent");
}

static void start_open(struct kv_op *op)
{
    const struct kv_model_info *model = op->open.model;
    Kvpb__ModelRequest request = KVPB__MODEL_REQUEST__INIT;
    Kvpb__Layer layers[KV_LAYERS_MAX];
    Kvpb__Layer *pointers[KV_LAYERS_MAX];

    for (uint32_t i = 0; i < model->schema.n_layers; i++) {
        const struct kv_layer_schema *layer = &model->schema.layers[i];

        kvpb__layer__init(&layers[i]);
        layers[i].kind = layer->kind;
        layers[i].dtype = layer->dtype;
        layers[i].n_kv_heads = layer->n_kv_heads;
        layers[i].d_k = layer->d_k;
        layers[i].d_v = layer->d_v;
        pointers[i] = &layers[i];
    }
    request.name = (char *)model->name;
    request.fingerprint = binary(&model->fingerprint);
    request.n_layers = model->schema.n_layers;
    request.layers = pointers;
    for (uint32_t i = 0; i < op->client->n_remotes && op->stage == KV_STAGE_RUNNING; i++) {
        struct kv_remote *remote = &op->client->remotes[i];
        kv_status_t status =
            kv_call_begin(remote, op, NULL, KV_OP_MODEL, &request.base, model_done);

        if (status != KV_OK)
            kv_op_fail(op, remote, NULL, status, "model cannot be sent");
    }
}

static void ended_open(struct kv_op *op)
{
    struct kv_session *session = op->result;

    if (op->status == KV_OK) {
        session->renew_us = op->client->now_us + (uint64_t)session->lease_ms * 1000 / 3;
        kv_client_timer(op->client, session->renew_us);
    } else if (session != NULL) {
        for (uint32_t i = 0; i < op->client->n_remotes; i++)
            if (op->open.opened[i])
                kv_session_drop(&op->client->remotes[i], session->nodes[i].index,
                                &session->ticket.token);
        op->result = NULL;
        kv_session_free(session);
    }
    free(op->open.model);
    free(op->open.opened);
}

static const struct kv_op_kind open_kind = {
    .name = "open",
    .id = KV_OP_OPEN,
    .start = start_open,
    .ended = ended_open,
    .describe = describe,
};

kv_status_t kv_open_begin(struct kv_client *client,
                          const struct kv_model_info *model,
                          const struct kv_session_options *options,
                          uint32_t deadline_ms,
                          struct kv_op **ret_op)
{
    struct kv_model_info *copy;
    struct kv_session *session;
    char text[120] = "";
    kv_status_t status;
    struct kv_op *op;

    if (memchr(model->name, 0, sizeof(model->name)) == NULL || model->name[0] == 0)
        return kv_client_refuse(client, KV_INVALID, "open: the model's name");
    if (options != NULL && options->tokens_max > KV_TOKENS_MAX)
        return kv_client_refuse(client, KV_INVALID, "open: tokens_max: %u",
                                options->tokens_max);
    status = kv_op_begin(client, &open_kind, NULL, NULL, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    copy = malloc(sizeof(*copy));
    op->open.model = copy;
    op->open.opened = calloc(client->n_remotes, sizeof(bool));
    if (copy == NULL || op->open.opened == NULL) {
        status = kv_client_refuse(client, KV_NO_MEMORY, "open: out of memory");
        goto err;
    }
    *copy = *model;
    status = kv_schema_finish(&copy->schema, text, sizeof(text));
    if (status != KV_OK) {
        kv_client_refuse(client, status, "open: %s", text);
        goto err;
    }
    session = kv_session_make(client, &copy->schema, kv_random_next(&client->random));
    if (session == NULL) {
        status = kv_client_refuse(client, KV_NO_MEMORY, "open: out of memory");
        goto err;
    }
    session->writers = kv_writers_create(NULL, 0, kv_client_draw_writer(client));
    if (session->writers == NULL) {
        kv_session_free(session);
        status = kv_client_refuse(client, KV_NO_MEMORY, "open: out of memory");
        goto err;
    }
    kv_random_fill(&client->random, &session->ticket.session_id, sizeof(struct kv_id128));
    kv_random_fill(&client->random, &session->ticket.token, sizeof(struct kv_id128));
    session->fingerprint = model->fingerprint;
    session->lease_ms = UINT32_MAX;
    if (options != NULL) {
        op->lease_wanted_ms = options->lease_ms;
        op->tokens_max_wanted = options->tokens_max;
        if (options->tokens_max > 0)
            session->tokens_max = options->tokens_max;
    }
    op->result = session;
    kv_op_need_all(op);
    return kv_op_go(op, ret_op);

err:
    free(op->open.model);
    free(op->open.opened);
    kv_op_discard(op);
    return status;
}

/* ---- close ------------------------------------------------------------------------------- */

static void close_done(struct kv_call *call,
                       kv_status_t status,
                       const ProtobufCMessage *message,
                       const char *detail)
{
    const struct kv_remote *remote = call->remote;

    (void)message;
    if (call->op == NULL || status == KV_OK)
        return;
    /* A session that is gone is closed; its place may be another one's by now. */
    if (status == KV_NOT_FOUND ||
        call->op->session->nodes[remote->index].incarnation != remote->incarnation)
        return;
    kv_op_note(call->op, remote, status, detail);
}

/* Asks every node that the operation needs the same: close, renew, session. */
static void ask_all(struct kv_op *op, kv_call_done_fn done)
{
    struct kv_session *session = op->session;
    Kvpb__CloseRequest close_request = KVPB__CLOSE_REQUEST__INIT;
    Kvpb__RenewRequest renew_request = KVPB__RENEW_REQUEST__INIT;
    Kvpb__SessionRequest session_request = KVPB__SESSION_REQUEST__INIT;

    for (uint32_t i = 0; i < op->client->n_remotes && op->stage == KV_STAGE_RUNNING; i++) {
        struct kv_remote *remote = &op->client->remotes[i];
        uint32_t index = session->nodes[i].index;
        const ProtobufCMessage *request = &session_request.base;
        kv_status_t status;

        if (!kv_op_needs(op, i))
            continue;
        session_request.session_index = close_request.session_index =
            renew_request.session_index = index;
        session_request.token = close_request.token = renew_request.token =
            binary(&session->ticket.token);
        renew_request.lease_ms = op->lease_wanted_ms;
        if (op->kind->id == KV_OP_CLOSE)
            request = &close_request.base;
        else if (op->kind->id == KV_OP_RENEW)
            request = &renew_request.base;
        status = kv_call_begin(remote, op, session, op->kind->id, request, done);
        if (status != KV_OK)
            kv_op_note(op, remote, status, "it cannot be sent");
    }
}

static void start_close(struct kv_op *op)
{
    ask_all(op, close_done);
}

static void ended_close(struct kv_op *op)
{
    if (op->status == KV_OK) {
        op->session->is_closed = true;
        op->session->renew_us = UINT64_MAX;
        /* What was begun behind it has nothing to work on. */
        while (!kv_list_empty(&op->session->ops)) {
            struct kv_op *late = KV_LIST_ENTRY(op->session->ops.next, struct kv_op, of_session);

            kv_op_fail(late, NULL, NULL, KV_NOT_FOUND, "the session was closed");
        }
    }
}

static const struct kv_op_kind close_kind = {
    .name = "close",
    .id = KV_OP_CLOSE,
    .is_exclusive = true,
    .is_tolerant = true,
    .start = start_close,
    .ended = ended_close,
    .describe = describe,
};

kv_status_t
kv_close_begin(struct kv_session *session, uint32_t deadline_ms, struct kv_op **ret_op)
{
    struct kv_op *op;
    kv_status_t status =
        kv_op_begin(session->client, &close_kind, session, NULL, deadline_ms, &op);

    if (status != KV_OK)
        return status;
    kv_op_need_all(op);
    return kv_op_go(op, ret_op);
}

/* ---- renew ------------------------------------------------------------------------------- */

static void renew_done(struct kv_call *call,
                       kv_status_t status,
                       const ProtobufCMessage *message,
                       const char *detail)
{
    const Kvpb__RenewReply *reply = (const Kvpb__RenewReply *)message;
    struct kv_session *session = call->session;

    if (call->op == NULL || session == NULL)
        return;
    if (status != KV_OK)
        kv_op_note(call->op, call->remote, status, detail);
    else if (reply->lease_ms > 0 &&
             (call->op->tokens == 0 || reply->lease_ms < call->op->tokens))
        call->op->tokens = reply->lease_ms;
}

static void start_renew(struct kv_op *op)
{
    ask_all(op, renew_done);
}

static void ended_renew(struct kv_op *op)
{
    struct kv_session *session = op->session;

    /* `tokens` held the least lease granted. */
    if (op->status == KV_OK && op->tokens > 0) {
        session->lease_ms = op->tokens;
        session->renew_us = op->client->now_us + (uint64_t)session->lease_ms * 1000 / 3;
        kv_client_timer(op->client, session->renew_us);
    }
    op->tokens = 0;
}

static const struct kv_op_kind renew_kind = {
    .name = "renew",
    .id = KV_OP_RENEW,
    .start = start_renew,
    .ended = ended_renew,
    .describe = describe,
};

kv_status_t kv_renew_begin(struct kv_session *session,
                           uint32_t lease_ms,
                           uint32_t deadline_ms,
                           struct kv_op **ret_op)
{
    struct kv_op *op;
    kv_status_t status =
        kv_op_begin(session->client, &renew_kind, session, NULL, deadline_ms, &op);

    if (status != KV_OK)
        return status;
    op->lease_wanted_ms = lease_ms;
    kv_op_need_all(op);
    return kv_op_go(op, ret_op);
}

static void background_done(struct kv_call *call,
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
        uint64_t soon = session->client->now_us + (uint64_t)session->lease_ms * 1000 / 12;

        if (soon < session->renew_us)
            session->renew_us = soon;
        kv_client_timer(session->client, session->renew_us);
    }
}

static void renew(struct kv_session *session)
{
    struct kv_client *client = session->client;
    Kvpb__RenewRequest request = KVPB__RENEW_REQUEST__INIT;
    uint64_t lease_us = (uint64_t)session->lease_ms * 1000;

    session->renew_us = client->now_us + lease_us / 3;
    if (session->n_renewing > 0)
        return;
    for (uint32_t i = 0; i < client->n_remotes; i++) {
        struct kv_remote *remote = &client->remotes[i];

        if (remote->state != KV_REMOTE_CONNECTED) {
            kv_remote_connect(remote);
            session->renew_us = client->now_us + lease_us / 12;
            continue;
        }
        if (session->nodes[i].incarnation != remote->incarnation)
            continue;
        request.session_index = session->nodes[i].index;
        request.token = binary(&session->ticket.token);
        request.lease_ms = session->lease_ms;
        if (kv_call_begin(remote, NULL, session, KV_OP_RENEW, &request.base, background_done) ==
            KV_OK)
            session->n_renewing++;
        else
            session->renew_us = client->now_us + lease_us / 12;
    }
}

void kv_sessions_timers(struct kv_client *client, uint64_t *next_us)
{
    struct kv_list *link, *follow;

    KV_LIST_EACH(link, follow, &client->sessions) {
        struct kv_session *session = KV_LIST_ENTRY(link, struct kv_session, of_client);

        if (session->renew_us <= client->now_us)
            renew(session);
        if (session->renew_us < *next_us)
            *next_us = session->renew_us;
    }
}

/* ---- length ------------------------------------------------------------------------------ */

static void length_done(struct kv_call *call,
                        kv_status_t status,
                        const ProtobufCMessage *message,
                        const char *detail)
{
    const Kvpb__SessionReply *reply = (const Kvpb__SessionReply *)message;
    struct kv_op *op = call->op;

    if (op == NULL)
        return;
    if (status != KV_OK)
        kv_op_fail(op, call->remote, NULL, status, "%s", detail);
    else if (reply->generation != op->session->generation)
        kv_op_fail(op, call->remote, NULL, KV_STALE, "generation %u there, %u here",
                   reply->generation, op->session->generation);
    else if (reply->tokens < op->tokens)
        op->tokens = reply->tokens;
}

static void start_length(struct kv_op *op)
{
    ask_all(op, length_done);
}

static const struct kv_op_kind length_kind = {
    .name = "length",
    .id = KV_OP_SESSION,
    .needs_current = true,
    .start = start_length,
    .describe = describe,
};

kv_status_t
kv_length_begin(struct kv_session *session, uint32_t deadline_ms, struct kv_op **ret_op)
{
    struct kv_op *op;
    kv_status_t status =
        kv_op_begin(session->client, &length_kind, session, NULL, deadline_ms, &op);

    if (status != KV_OK)
        return status;
    op->tokens = session->tokens_max;
    kv_op_need_all(op);
    return kv_op_go(op, ret_op);
}
