/* ops_session.c - sessions: open, resume, close, renew, and what there is of one. */
#include "kvserver/base/token.h"
#include "kvserver/store/control/ops_private.h"
#include "kvserver/store/control/protobuf.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- sessions: what all replies say ------------------------------------------------------ */

/* Who has the token of a session that has ended is told what became of it; nobody else hears
 * whether there was one. */
static void
refuse_session(struct kv_control_call *call, const ProtobufCBinaryData *token, const char *what)
{
    const struct kvs_control *control = call->control;
    const char *name = kvs_call_name(call);
    char ended[KV_ENDED_TEXT];
    struct kv_id128 given;

    if (kv_pb_get_id(token, &given) &&
        kv_ended_tell(&control->ended, &given, kv_clock_now(control->config.clock), ended))
        kv_control_refuse(call, KV_NOT_FOUND, "%s: %s: %s", name, what, ended);
    else
        kv_control_refuse(call, KV_NOT_FOUND, "%s: no %s with that token", name, what);
}

struct kv_session *
kv_session_of(struct kv_control_call *call, uint32_t index, const ProtobufCBinaryData *token)
{
    struct kvs_control *control = call->control;
    struct kv_session *session =
        index < control->config.sessions_max ? &control->sessions[index] : NULL;
    struct kv_id128 given;
    char what[32];

    if (session == NULL || !session->used || !kv_pb_get_id(token, &given) ||
        !kv_token_equal(&session->token, &given)) {
        snprintf(what, sizeof(what), "session %u", index);
        refuse_session(call, token, what);
        return NULL;
    }
    if (session->tenant != call->tenant) {
        kv_control_refuse(call, KV_DENIED, "%s: session %u is another tenant's",
                          kvs_call_name(call), index);
        return NULL;
    }
    if (session->busy) {
        kv_control_refuse(call, KV_BUSY, "%s: session %u is being changed", kvs_call_name(call),
                          index);
        return NULL;
    }
    session->renewed_us = kv_clock_now(control->config.clock);
    return session;
}

uint64_t kv_lease_of(const struct kvs_control *control, uint32_t lease_ms)
{
    if (lease_ms == 0 || lease_ms > control->config.lease_ms)
        lease_ms = control->config.lease_ms;
    return lease_ms * UINT64_C(1000);
}

/* The session's runs as a message has them; in one piece, the caller's to free.  NULL: out of
 * memory. */
static Kvpb__WriterRun **writers_message(const struct kv_writers *writers)
{
    const size_t n_runs = writers->n_runs;
    Kvpb__WriterRun **list = malloc(n_runs * (sizeof(*list) + sizeof(**list)));

    if (list == NULL)
        return NULL;
    for (size_t i = 0; i < n_runs; i++) {
        list[i] = (Kvpb__WriterRun *)(list + n_runs) + i;
        kvpb__writer_run__init(list[i]);
        list[i]->writer = writers->runs[i].writer;
        list[i]->end = writers->runs[i].end;
    }
    return list;
}

/* What a message says of a session, besides itself, to a client that takes it up. */
struct session_facts {
    struct kv_model_info info; /* copied: the message has no const */
    Kvpb__Layer layers[KV_LAYERS_MAX], *layer_list[KV_LAYERS_MAX];
    struct kv_lifecycle entries[KV_LIFECYCLE_LOG];
    Kvpb__Lifecycle log[KV_LIFECYCLE_LOG], *log_list[KV_LIFECYCLE_LOG];
};

static void add_schema(Kvpb__OpenReply *reply, struct session_facts *facts)
{
    const kv_schema_t *schema = &facts->info.schema;

    for (uint32_t i = 0; i < schema->n_layers; i++) {
        const struct kv_layer_schema *layer = &schema->layers[i];

        facts->layers[i] = (Kvpb__Layer)KVPB__LAYER__INIT;
        facts->layers[i].kind = layer->kind;
        facts->layers[i].dtype = layer->dtype;
        facts->layers[i].n_kv_heads = layer->n_kv_heads;
        facts->layers[i].d_k = layer->d_k;
        facts->layers[i].d_v = layer->d_v;
        facts->layer_list[i] = &facts->layers[i];
    }
    reply->n_layers = schema->n_layers;
    reply->layers = facts->layer_list;
}

static void
add_log(Kvpb__OpenReply *reply, const struct kv_session *session, struct session_facts *facts)
{
    const uint32_t n = session->n_log < KV_LIFECYCLE_LOG ? session->n_log : KV_LIFECYCLE_LOG;

    for (uint32_t i = 0; i < n; i++) {
        struct kv_lifecycle *entry = &facts->entries[i];
        Kvpb__Lifecycle *told = facts->log_list[i] = &facts->log[i];

        *entry = session->log[(session->n_log - n + i) % KV_LIFECYCLE_LOG];
        *told = (Kvpb__Lifecycle)KVPB__LIFECYCLE__INIT;
        told->op_id = entry->op_id;
        told->kind = entry->kind;
        told->generation = entry->generation;
        told->tokens = entry->tokens;
        told->child_session_id = kv_pb_put_id(&entry->child_id);
        told->child_token = kv_pb_put_id(&entry->child_token);
        told->writer = entry->writer;
    }
    reply->n_recent = n;
    reply->recent = facts->log_list;
}

void kv_session_reply(struct kv_control_call *call, bool with_schema)
{
    struct kv_session *session = call->session;
    Kvpb__OpenReply reply = KVPB__OPEN_REPLY__INIT;
    Kvpb__Outcome outcome = kv_pb_ok_outcome();
    Kvpb__Placement placement = KVPB__PLACEMENT__INIT;
    struct session_facts facts;

    facts.info = session->model->info;
    placement.epoch = session->epoch;
    placement.n_nodes = session->n_nodes;
    placement.node_index = session->node_index;
    placement.root = session->root;
    reply.outcome = &outcome;
    reply.session_index = session->index;
    reply.generation = session->generation;
    reply.tokens = call->tokens;
    reply.tokens_max = session->tokens_max;
    reply.lease_ms = (uint32_t)(session->lease_us / 1000);
    reply.placement = &placement;
    reply.fingerprint = kv_pb_put_id(&facts.info.fingerprint);
    reply.model = facts.info.name;
    if (call->child != NULL) {
        reply.child_index = call->child->index;
        reply.child_generation = call->child->generation;
    }
    if (with_schema) {
        add_schema(&reply, &facts);
        add_log(&reply, session, &facts);
        reply.shared_tokens = session->shared_tokens;
        reply.n_writers = session->writers->n_runs;
        reply.writers = writers_message(session->writers);
        if (reply.writers == NULL) {
            kv_control_refuse(call, KV_NO_MEMORY, "%s: out of memory", kvs_call_name(call));
            return;
        }
    }
    Kvpb__WriterRun **writers = reply.writers;
    kv_control_reply(call, &reply.base);
    free(writers);
}

/* ---- open, resume ------------------------------------------------------------------------ */

static void open_undone(struct kv_control_call *call)
{
    kv_session_destroy(call->control, call->session);
    kv_control_refuse(call, call->refusal, "open: %s",
                      call->refusal == KV_NO_MEMORY ? "the store's memory is full"
                                                    : kv_status_name(call->refusal));
}

static void open_done(struct kv_control_call *call)
{
    struct kv_session *session = call->session;

    if (call->status != KV_OK) {
        call->refusal = call->status;
        kv_session_close(call, session, KV_ENDED_UNSAID, open_undone);
        return;
    }
    session->busy = false;
    session->renewed_us = kv_clock_now(call->control->config.clock);
    kv_count(&call->control->stats.sessions_opened, 1);
    kv_session_reply(call, false);
}

/* What a data thread needs to know of a session to make its part of it. */
struct kv_command kv_session_command(enum kv_command_kind kind,
                                     const struct kv_session *session)
{
    return (struct kv_command){
        .kind = kind,
        .index = session->index,
        .token = session->token,
        .tenant = session->tenant,
        .generation = session->generation,
        .root = session->root,
        .epoch = session->epoch,
        .n_nodes = session->n_nodes,
        .node_index = session->node_index,
        .tokens_max = session->tokens_max,
        .schema = &session->model->info.schema,
        .writers = session->writers,
    };
}

static void open_session(struct kv_control_call *call, const Kvpb__OpenRequest *request)
{
    struct kvs_control *control = call->control;
    const Kvpb__Placement *placement = request->placement;
    struct kv_id128 id, token, fingerprint;

    if (!kv_pb_get_id(&request->session_id, &id) || !kv_pb_get_id(&request->token, &token) ||
        !kv_pb_get_id(&request->fingerprint, &fingerprint) || placement == NULL ||
        placement->n_nodes == 0 || placement->n_nodes > KV_NODES_MAX ||
        placement->node_index >= placement->n_nodes || request->tokens_max > KV_TOKENS_MAX ||
        request->writer == 0) {
        kv_control_refuse(call, KV_INVALID,
                          "open: an id, the placement, tokens_max %u or writer %llx",
                          request->tokens_max, (unsigned long long)request->writer);
        return;
    }
    struct kv_session *session = kv_map_get(control->session_of_id, &id);
    if (session != NULL) { /* asked again, its answer got lost; or somebody else's id */
        if (!kv_token_equal(&session->token, &token))
            kv_control_refuse(call, KV_EXISTS, "open: the id is another session's");
        else if (session->tenant != call->tenant)
            kv_control_refuse(call, KV_DENIED, "open: the session is another tenant's");
        else if (session->busy)
            kv_control_refuse(call, KV_BUSY, "open: the session is being opened");
        else {
            call->session = session;
            kv_session_reply(call, false);
        }
        return;
    }
    if (atomic_load(&control->draining)) {
        kv_control_refuse(call, KV_DRAINING, "open: the node is about to stop");
        return;
    }
    struct kv_model *known = kv_model_find(control, &fingerprint);
    if (known == NULL || known->saving) {
        kv_control_refuse(call, KV_NOT_FOUND, "open: no model with that fingerprint");
        return;
    }
    session = kv_session_create(control, &id, known);
    if (session == NULL) {
        kv_control_refuse(call, KV_BUSY, "open: %u sessions already", control->n_sessions);
        return;
    }
    session->writers = kv_writers_create(NULL, 0, request->writer);
    if (session->writers == NULL) {
        kv_session_destroy(control, session);
        kv_control_refuse(call, KV_NO_MEMORY, "open: out of memory");
        return;
    }
    session->token = token;
    session->tenant = call->tenant;
    session->tokens_max = request->tokens_max > 0 ? request->tokens_max : KV_TOKENS_MAX;
    session->lease_us = kv_lease_of(control, request->lease_ms);
    session->root = placement->root;
    session->epoch = placement->epoch;
    session->n_nodes = placement->n_nodes;
    session->node_index = placement->node_index;
    call->session = session;
    struct kv_command command = kv_session_command(KV_COMMAND_SESSION_OPEN, session);
    kv_control_ask(call, &command, open_done);
}

void kv_control_open(struct kv_control_call *call)
{
    Kvpb__OpenRequest *request =
        kvpb__open_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL)
        kv_control_refuse(call, KV_INVALID, "open: not a request of this protocol");
    else
        open_session(call, request);
    kvpb__open_request__free_unpacked(request, NULL);
}

static void resume_done(struct kv_control_call *call)
{
    call->session->busy = false;
    kv_session_reply(call, true);
}

static void resume(struct kv_control_call *call, const Kvpb__ResumeRequest *request)
{
    struct kvs_control *control = call->control;
    struct kv_id128 id;
    struct kv_session *session = kv_pb_get_id(&request->session_id, &id)
                                     ? kv_map_get(control->session_of_id, &id)
                                     : NULL;

    if (session == NULL) {
        refuse_session(call, &request->token, "session");
        return;
    }
    session = kv_session_of(call, session->index, &request->token);
    if (session == NULL)
        return;
    if (request->lease_ms != 0)
        session->lease_us = kv_lease_of(control, request->lease_ms);
    session->busy = true;
    call->session = session;
    call->tokens = UINT32_MAX;
    kv_control_ask(
        call, &(struct kv_command){.kind = KV_COMMAND_SESSION_LENGTH, .index = session->index},
        resume_done);
}

void kv_control_resume(struct kv_control_call *call)
{
    Kvpb__ResumeRequest *request =
        kvpb__resume_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL)
        kv_control_refuse(call, KV_INVALID, "resume: not a request of this protocol");
    else
        resume(call, request);
    kvpb__resume_request__free_unpacked(request, NULL);
}

/* ---- close, renew, session --------------------------------------------------------------- */

static void close_done(struct kv_control_call *call)
{
    kv_count(&call->control->stats.sessions_closed, 1);
    kv_session_destroy(call->control, call->session);
    kvs_call_reply_ok(call);
}

void kv_control_close(struct kv_control_call *call)
{
    Kvpb__CloseRequest *request =
        kvpb__close_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL) {
        kv_control_refuse(call, KV_INVALID, "close: not a request of this protocol");
        return;
    }
    struct kv_session *session = kv_session_of(call, request->session_index, &request->token);
    if (session != NULL) {
        session->busy = true;
        call->session = session;
        kv_session_close(call, session, KV_ENDED_CLOSED, close_done);
    }
    kvpb__close_request__free_unpacked(request, NULL);
}

void kv_control_renew(struct kv_control_call *call)
{
    Kvpb__RenewRequest *request =
        kvpb__renew_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL) {
        kv_control_refuse(call, KV_INVALID, "renew: not a request of this protocol");
        return;
    }
    struct kv_session *session = kv_session_of(call, request->session_index, &request->token);
    if (session != NULL) {
        Kvpb__RenewReply reply = KVPB__RENEW_REPLY__INIT;
        Kvpb__Outcome outcome = kv_pb_ok_outcome();

        if (request->lease_ms != 0)
            session->lease_us = kv_lease_of(call->control, request->lease_ms);
        reply.outcome = &outcome;
        reply.lease_ms = (uint32_t)(session->lease_us / 1000);
        kv_control_reply(call, &reply.base);
    }
    kvpb__renew_request__free_unpacked(request, NULL);
}

static void session_told(struct kv_control_call *call)
{
    struct kv_session *session = call->session;
    Kvpb__SessionReply reply = KVPB__SESSION_REPLY__INIT;
    Kvpb__Outcome outcome = kv_pb_ok_outcome();

    session->busy = false;
    reply.outcome = &outcome;
    reply.generation = session->generation;
    reply.tokens = call->tokens;
    reply.bytes = call->bytes;
    uint64_t now_us = kv_clock_now(call->control->config.clock);
    reply.lease_left_ms =
        (uint32_t)(kv_session_lease_left_us(call->control, session, now_us) / 1000);
    kv_control_reply(call, &reply.base);
}

void kv_control_session(struct kv_control_call *call)
{
    Kvpb__SessionRequest *request =
        kvpb__session_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL) {
        kv_control_refuse(call, KV_INVALID, "session: not a request of this protocol");
        return;
    }
    struct kv_session *session = kv_session_of(call, request->session_index, &request->token);
    if (session != NULL) {
        session->busy = true;
        call->session = session;
        call->tokens = UINT32_MAX;
        kv_control_ask(
            call,
            &(struct kv_command){.kind = KV_COMMAND_SESSION_LENGTH, .index = session->index},
            session_told);
    }
    kvpb__session_request__free_unpacked(request, NULL);
}
