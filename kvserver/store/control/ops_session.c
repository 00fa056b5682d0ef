/* ops_session.c - sessions: open, resume, close, renew, and information about one. */
#include "kvserver/base/token.h"
#include "kvserver/store/control/ops_private.h"
#include "kvserver/store/control/protobuf.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- sessions: common parts of replies --------------------------------------------------- */

/* A client that has the token of an ended session is told how it ended.  Others cannot find out
 * whether it existed. */
static void refuse_session(struct kvs_control_call *call,
                           const ProtobufCBinaryData *token,
                           const char *what)
{
    const struct kvs_control *control = call->control;
    const char *name = kvs_call_name(call);
    char ended[KVS_ENDED_TEXT];
    struct kv_id128 given;

    if (kvs_pb_get_id(token, &given) &&
        kvs_ended_tell(&control->ended, &given, kv_clock_now(control->config.clock), ended))
        kvs_control_refuse(call, KV_NOT_FOUND, "%s: %s: %s", name, what, ended);
    else
        kvs_control_refuse(call, KV_NOT_FOUND, "%s: no %s with that token", name, what);
}

struct kvs_session *
kvs_session_of(struct kvs_control_call *call, uint32_t index, const ProtobufCBinaryData *token)
{
    struct kvs_control *control = call->control;
    struct kvs_session *session =
        index < control->config.sessions_max ? &control->sessions[index] : NULL;
    struct kv_id128 given;
    char what[32];

    if (session == NULL || !session->used || !kvs_pb_get_id(token, &given) ||
        !kv_token_equal(&session->token, &given)) {
        snprintf(what, sizeof(what), "session %u", index);
        refuse_session(call, token, what);
        return NULL;
    }
    /* Only now: without the token a client learns nothing of the session, not even its
     * tenant. */
    if (session->tenant != call->tenant) {
        kvs_control_refuse(call, KV_DENIED, "%s: session %u belongs to another tenant",
                           kvs_call_name(call), index);
        return NULL;
    }
    if (session->busy) {
        kvs_control_refuse(call, KV_BUSY, "%s: another operation on session %u is in progress",
                           kvs_call_name(call), index);
        return NULL;
    }
    session->renewed_us = kv_clock_now(control->config.clock);
    return session;
}

uint64_t kvs_lease_of(const struct kvs_control *control, uint32_t lease_ms)
{
    if (lease_ms == 0 || lease_ms > control->config.lease_ms)
        lease_ms = control->config.lease_ms;
    return lease_ms * UINT64_C(1000);
}

/* Returns the session's writers as message fields, in one allocation that the caller frees.
 * NULL: out of memory. */
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

/* What a reply says of the session to a client that resumes it. */
struct session_facts {
    struct kv_model_info info; /* copied: the message has no const */
    Kvpb__Layer layers[KV_LAYERS_MAX], *layer_list[KV_LAYERS_MAX];
    struct kvs_log_entry entries[KVS_LOG_ENTRIES];
    Kvpb__Lifecycle log[KVS_LOG_ENTRIES], *log_list[KVS_LOG_ENTRIES];
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
add_log(Kvpb__OpenReply *reply, const struct kvs_session *session, struct session_facts *facts)
{
    /* Oldest first: a client that resumes repeats them in this order. */
    const uint32_t n = session->n_log < KVS_LOG_ENTRIES ? session->n_log : KVS_LOG_ENTRIES;

    for (uint32_t i = 0; i < n; i++) {
        struct kvs_log_entry *entry = &facts->entries[i];
        Kvpb__Lifecycle *told = facts->log_list[i] = &facts->log[i];

        *entry = session->log[(session->n_log - n + i) % KVS_LOG_ENTRIES];
        *told = (Kvpb__Lifecycle)KVPB__LIFECYCLE__INIT;
        told->op_id = entry->op_id;
        told->kind = entry->kind;
        told->generation = entry->generation;
        told->tokens = entry->tokens;
        told->child_session_id = kvs_pb_put_id(&entry->child_id);
        told->child_token = kvs_pb_put_id(&entry->child_token);
        told->writer = entry->writer;
    }
    reply->n_recent = n;
    reply->recent = facts->log_list;
}

void kvs_session_reply(struct kvs_control_call *call, bool with_schema)
{
    struct kvs_session *session = call->session;
    Kvpb__OpenReply reply = KVPB__OPEN_REPLY__INIT;
    Kvpb__Outcome outcome = kvs_pb_ok_outcome();
    Kvpb__Placement placement = KVPB__PLACEMENT__INIT;
    struct session_facts facts;

    facts.info = session->model->info;
    placement.epoch = session->epoch;
    placement.n_nodes = session->n_nodes;
    placement.position = session->position;
    placement.root = session->root;
    reply.outcome = &outcome;
    reply.session_index = session->index;
    reply.generation = session->generation;
    reply.tokens = call->op == KV_OP_OPEN ? session->matched : call->tokens;
    reply.tokens_max = session->tokens_max;
    reply.lease_ms = (uint32_t)(session->lease_us / 1000);
    reply.placement = &placement;
    if (call->tells_writer)
        reply.own_writer = kv_writers_own(session->writers);
    if (call->op == KV_OP_OPEN && session->shared_root != NULL)
        reply.n_rows = session->shared_root->n_rows;
    reply.fingerprint = kvs_pb_put_id(&facts.info.fingerprint);
    reply.model = facts.info.name;
    if (call->child != NULL) {
        reply.child_index = call->child->index;
        reply.child_generation = call->child->generation;
    }
    if (with_schema) {
        add_schema(&reply, &facts);
        add_log(&reply, session, &facts);
        reply.shared_tokens = session->shared_tokens;
    }
    if (with_schema || reply.tokens > 0) {
        reply.n_writers = session->writers->n_runs;
        reply.writers = writers_message(session->writers);
        if (reply.writers == NULL) {
            kvs_control_refuse(call, KV_NO_MEMORY, "%s: out of memory", kvs_call_name(call));
            return;
        }
    }
    /* The call, with all that it has, ends with the reply; the list is this function's. */
    Kvpb__WriterRun **writers = reply.writers;
    kvs_control_reply(call, &reply.base);
    free(writers);
}

/* ---- open, resume ------------------------------------------------------------------------ */

/* The data threads that had opened the session have closed it again. */
static void open_undone(struct kvs_control_call *call)
{
    kvs_session_destroy(call->control, call->session);
    kvs_control_refuse(call, call->refusal, "open: %s",
                       call->refusal == KV_NO_MEMORY ? "store full"
                                                     : kv_status_name(call->refusal));
}

static void open_done(struct kvs_control_call *call)
{
    struct kvs_session *session = call->session;

    if (call->status != KV_OK) {
        /* Some data threads have the session, others do not.  The status is kept, because the
         * next broadcast has its own. */
        call->refusal =
            call->status == KV_NO_MEMORY ? kvs_control_full(call->control) : call->status;
        kvs_session_close(call, session, KVS_ENDED_UNSAID, open_undone);
        return;
    }
    /* What matched was found to have bad rows: it is gone when the open is repeated. */
    if (call->has_units && call->tokens < session->matched) {
        kvs_session_found_bad(call->control, session, call->tokens);
        call->refusal = KV_BUSY;
        kvs_session_close(call, session, KVS_ENDED_UNSAID, open_undone);
        return;
    }
    session->busy = false;
    session->renewed_us = kv_clock_now(call->control->config.clock);
    kvs_count(&call->control->stats.sessions_opened, 1);
    if (call->has_units)
        kvs_session_count_match(call->control, session);
    kvs_session_reply(call, false);
}

/* Returns a command with what a data thread needs to create its shard session. */
struct kvs_command kvs_session_command(enum kvs_command_kind kind,
                                       const struct kvs_session *session)
{
    return (struct kvs_command){
        .kind = kind,
        .index = session->index,
        .token = session->token,
        .tenant = session->tenant,
        .generation = session->generation,
        .root = session->root,
        .epoch = session->epoch,
        .n_nodes = session->n_nodes,
        .position = session->position,
        .tokens_max = session->tokens_max,
        .schema = &session->model->info.schema,
        .writers = session->writers,
    };
}

bool kvs_is_placement(const Kvpb__Placement *placement)
{
    return placement != NULL && placement->epoch != 0 && placement->n_nodes > 0 &&
           placement->n_nodes <= KV_ROW_NODES && placement->position < placement->n_nodes;
}

/* Whether the session is placed by the rows that the request says the root has. */
static bool is_branch(const Kvpb__OpenRequest *request)
{
    return kv_placement_is_row_count(request->n_rows) && request->branch < KV_ROOT_ROWS_MAX &&
           request->placement->root ==
               kv_placement_branch_root(request->prompt_root, request->branch, request->n_rows);
}

/* Refuses an open that belongs on another row of its root.  Returns false if it does not. */
static bool send_elsewhere(struct kvs_control_call *call, const Kvpb__OpenRequest *request)
{
    Kvpb__OpenReply reply = KVPB__OPEN_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    uint32_t n_rows;
    char detail[80];

    if (request->n_rows == 0)
        return false;
    n_rows = kvs_root_update_rows(call->control, call->tenant, request->prompt_root,
                                  request->branch, request->n_rows);
    if (kv_placement_branch_root(request->prompt_root, request->branch, n_rows) ==
        request->placement->root)
        return false;
    snprintf(detail, sizeof(detail), "open: root %016llx has %u rows, not %u",
             (unsigned long long)request->prompt_root, n_rows, request->n_rows);
    outcome.status = KV_MOVED;
    outcome.detail = detail;
    reply.outcome = &outcome;
    reply.n_rows = n_rows;
    kvs_count(&call->control->stats.sessions_moved, 1);
    kvs_match_elsewhere(call->control, call->tenant, &request->block_names,
                        request->match_blocks);
    kvs_control_reply(call, &reply.base);
    return true;
}

/* The session is here already: the request is repeated, since its reply was lost, or the id is
 * another client's. */
static void open_again(struct kvs_control_call *call,
                       struct kvs_session *session,
                       const struct kv_id128 *token)
{
    if (!kv_token_equal(&session->token, token))
        kvs_control_refuse(call, KV_EXISTS, "open: the id belongs to another session");
    else if (session->tenant != call->tenant)
        kvs_control_refuse(call, KV_DENIED, "open: the session belongs to another tenant");
    else if (session->busy)
        kvs_control_refuse(call, KV_BUSY,
                           "open: another operation on the session is in progress");
    else {
        call->session = session;
        kvs_session_reply(call, false);
    }
}

/* Creates the session with what is here of its prompt.  Returns NULL after refusing the call. */
static struct kvs_session *create_session(struct kvs_control_call *call,
                                          const Kvpb__OpenRequest *request,
                                          const struct kv_id128 *id,
                                          const struct kv_id128 *token,
                                          struct kvs_model *model)
{
    struct kvs_control *control = call->control;
    const Kvpb__Placement *placement = request->placement;
    struct kvs_session *session;
    kv_status_t status = kvs_session_create(control, id, model, &session);

    if (status != KV_OK) {
        kvs_session_refuse(call, "open", status);
        return NULL;
    }
    session->tenant = call->tenant;
    snprintf(session->owner, sizeof(session->owner), "%s", call->caller->name);
    session->token = *token;
    session->tokens_max = request->tokens_max > 0 ? request->tokens_max : KV_TOKENS_MAX;
    kvs_session_place(control, session, placement->root, placement->epoch, placement->n_nodes,
                      placement->position);
    status = kvs_session_match(control, session, &request->block_names, request->match_blocks,
                               request->writer);
    if (status == KV_OK && request->n_rows != 0 &&
        !kvs_root_enter(control, session, request->prompt_root, request->branch,
                        request->n_rows))
        status = KV_NO_MEMORY;
    if (status == KV_OK)
        return session;
    kvs_session_destroy(control, session);
    kvs_control_refuse(call, status,
                       status == KV_NO_MEMORY ? "open: out of memory"
                                              : "open: block_names: %zu bytes",
                       request->block_names.len);
    return NULL;
}

static void open_session(struct kvs_control_call *call, const Kvpb__OpenRequest *request)
{
    struct kvs_control *control = call->control;
    struct kv_id128 id, token, fingerprint;
    struct kvs_session *session;
    struct kvs_command command;
    struct kvs_model *model;

    if (!kvs_pb_get_id(&request->session_id, &id) || !kvs_pb_get_id(&request->token, &token) ||
        !kvs_pb_get_id(&request->fingerprint, &fingerprint) ||
        !kvs_is_placement(request->placement) || request->tokens_max > KV_TOKENS_MAX ||
        request->writer == 0) {
        kvs_control_refuse(call, KV_INVALID,
                           "open: invalid id, placement, tokens_max (%u) or writer (%llx)",
                           request->tokens_max, (unsigned long long)request->writer);
        return;
    }
    if (request->n_rows != 0 && !is_branch(request)) {
        kvs_control_refuse(
            call, KV_INVALID, "open: %u rows, branch %u: not where root %016llx is placed",
            request->n_rows, request->branch, (unsigned long long)request->prompt_root);
        return;
    }
    session = kv_map_get(control->session_of_id, &id);
    if (session != NULL) {
        open_again(call, session, &token);
        return;
    }
    if (atomic_load(&control->draining)) {
        kvs_control_refuse(call, KV_DRAINING, "open: node is draining");
        return;
    }
    model = kvs_model_find(control, &fingerprint);
    if (model == NULL || model->saving) {
        kvs_control_refuse(call, KV_NOT_FOUND, "open: no model with that fingerprint");
        return;
    }
    if (send_elsewhere(call, request))
        return;
    session = create_session(call, request, &id, &token, model);
    if (session == NULL)
        return;
    kvs_session_set_lease(control, session, kvs_lease_of(control, request->lease_ms));
    call->session = session;
    call->tokens = UINT32_MAX;
    command = kvs_session_command(KVS_COMMAND_SESSION_OPEN, session);
    command.prefix = session->prefix;
    command.tokens = session->matched;
    kvs_control_broadcast_session(call, session, &command, open_done);
}

void kvs_control_open(struct kvs_control_call *call)
{
    Kvpb__OpenRequest *request = kvs_call_unpack(call, &kvpb__open_request__descriptor);

    if (request == NULL)
        return;
    open_session(call, request);
    kvpb__open_request__free_unpacked(request, NULL);
}

/* Asks the data threads how many tokens the session has; until `done` it is busy. */
static void ask_length(struct kvs_control_call *call,
                       struct kvs_session *session,
                       void (*done)(struct kvs_control_call *call))
{
    session->busy = true;
    call->session = session;
    call->tokens = UINT32_MAX;
    kvs_control_broadcast_session(call, session,
                                  &(struct kvs_command){.kind = KVS_COMMAND_SESSION_LENGTH,
                                                        .index = session->index,
                                                        .layer_tokens = call->layer_tokens},
                                  done);
}

static void resume_done(struct kvs_control_call *call)
{
    call->session->busy = false;
    kvs_session_reply(call, true);
}

static void resume(struct kvs_control_call *call, const Kvpb__ResumeRequest *request)
{
    struct kvs_control *control = call->control;
    struct kv_id128 id;
    struct kvs_session *session = kvs_pb_get_id(&request->session_id, &id)
                                      ? kv_map_get(control->session_of_id, &id)
                                      : NULL;

    if (session == NULL) {
        refuse_session(call, &request->token, "session");
        return;
    }
    session = kvs_session_of(call, session->index, &request->token);
    if (session == NULL)
        return;
    if (request->lease_ms != 0)
        kvs_session_set_lease(control, session, kvs_lease_of(control, request->lease_ms));
    ask_length(call, session, resume_done);
}

void kvs_control_resume(struct kvs_control_call *call)
{
    Kvpb__ResumeRequest *request = kvs_call_unpack(call, &kvpb__resume_request__descriptor);

    if (request == NULL)
        return;
    resume(call, request);
    kvpb__resume_request__free_unpacked(request, NULL);
}

/* ---- close, renew, session --------------------------------------------------------------- */

static void close_done(struct kvs_control_call *call)
{
    kvs_count(&call->control->stats.sessions_closed, 1);
    kvs_session_destroy(call->control, call->session);
    kvs_call_reply_ok(call);
}

struct kvs_session *kvs_session_of_id(struct kvs_control_call *call,
                                      const ProtobufCBinaryData *bytes)
{
    struct kvs_session *session = NULL;
    struct kv_id128 id;

    if (!kvs_pb_get_id(bytes, &id)) {
        kvs_control_refuse(call, KV_INVALID, "%s: session_id: %zu bytes, not 16",
                           kvs_call_name(call), bytes->len);
        return NULL;
    }
    session = kv_map_get(call->control->session_of_id, &id);
    if (session == NULL || session->tenant != call->tenant) {
        kvs_control_refuse(call, KV_NOT_FOUND, "%s: no such session", kvs_call_name(call));
        return NULL;
    }
    if (session->busy) {
        kvs_control_refuse(call, KV_BUSY, "%s: another operation on session %u is in progress",
                           kvs_call_name(call), session->index);
        return NULL;
    }
    return session;
}

void kvs_control_close(struct kvs_control_call *call)
{
    Kvpb__CloseRequest *request = kvs_call_unpack(call, &kvpb__close_request__descriptor);

    if (request == NULL)
        return;
    const bool is_operator = request->session_id.len > 0;
    struct kvs_session *session =
        is_operator ? kvs_session_of_id(call, &request->session_id)
                    : kvs_session_of(call, request->session_index, &request->token);
    if (session != NULL) {
        session->busy = true;
        call->session = session;
        kvs_session_close(call, session, is_operator ? KVS_ENDED_OPERATOR : KVS_ENDED_CLOSED,
                          close_done);
    }
    kvpb__close_request__free_unpacked(request, NULL);
}

void kvs_control_renew(struct kvs_control_call *call)
{
    Kvpb__RenewRequest *request = kvs_call_unpack(call, &kvpb__renew_request__descriptor);

    if (request == NULL)
        return;
    struct kvs_session *session = kvs_session_of(call, request->session_index, &request->token);
    if (session != NULL) {
        Kvpb__RenewReply reply = KVPB__RENEW_REPLY__INIT;
        Kvpb__Outcome outcome = kvs_pb_ok_outcome();

        if (request->lease_ms != 0)
            kvs_session_set_lease(call->control, session,
                                  kvs_lease_of(call->control, request->lease_ms));
        reply.outcome = &outcome;
        reply.lease_ms = (uint32_t)(session->lease_us / 1000);
        kvs_control_reply(call, &reply.base);
    }
    kvpb__renew_request__free_unpacked(request, NULL);
}

static void session_length_done(struct kvs_control_call *call)
{
    struct kvs_session *session = call->session;
    Kvpb__SessionReply reply = KVPB__SESSION_REPLY__INIT;
    Kvpb__Outcome outcome = kvs_pb_ok_outcome();
    uint32_t layer_tokens[KV_LAYERS_MAX];

    session->busy = false;
    reply.outcome = &outcome;
    reply.generation = session->generation;
    reply.tokens = call->tokens;
    reply.bytes = call->bytes;
    uint64_t now_us = kv_clock_now(call->control->config.clock);
    reply.lease_left_ms =
        (uint32_t)(kvs_session_lease_left_us(call->control, session, now_us) / 1000);
    for (uint32_t i = 0; call->layer_tokens != NULL && i < session->model->info.schema.n_layers;
         i++)
        layer_tokens[reply.n_layer_tokens++] =
            atomic_load_explicit(&call->layer_tokens[i], memory_order_relaxed);
    reply.layer_tokens = layer_tokens;
    if (call->tells_writer)
        reply.own_writer = kv_writers_own(session->writers);
    kvs_control_reply(call, &reply.base);
}

/* Makes room for the lengths of the layers.  Returns false if out of memory. */
static bool want_layers(struct kvs_control_call *call, const struct kvs_session *session)
{
    const uint32_t n_layers = session->model->info.schema.n_layers;

    call->layer_tokens = malloc(n_layers * sizeof(call->layer_tokens[0]));
    for (uint32_t i = 0; call->layer_tokens != NULL && i < n_layers; i++)
        atomic_init(&call->layer_tokens[i], UINT32_MAX);
    return call->layer_tokens != NULL;
}

void kvs_control_session(struct kvs_control_call *call)
{
    Kvpb__SessionRequest *request = kvs_call_unpack(call, &kvpb__session_request__descriptor);

    if (request == NULL)
        return;
    struct kvs_session *session = kvs_session_of(call, request->session_index, &request->token);
    if (session != NULL && request->with_layers && !want_layers(call, session))
        kvs_control_refuse(call, KV_NO_MEMORY, "%s: out of memory", kvs_call_name(call));
    else if (session != NULL) {
        call->tells_writer = request->with_writer;
        ask_length(call, session, session_length_done);
    }
    kvpb__session_request__free_unpacked(request, NULL);
}
