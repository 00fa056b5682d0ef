/* ops_fork.c - the lifecycle of a session: fork and truncate, each done once. */
#include "kvserver/store/control/ops_private.h"
#include "kvserver/store/control/protobuf.h"

#include <stdlib.h>

static void lifecycle_record(struct kv_control_call *call)
{
    struct kv_session *session = call->session;

    session->generation++;
    session->busy = false;
    session->log[session->n_log++ % KV_LIFECYCLE_LOG] = call->lifecycle;
}

/* Finds the session and checks that the operation is the next one for it.  Answers by itself,
 * and returns NULL, where it is not, or was done before. */
static struct kv_session *lifecycle_begin(struct kv_control_call *call,
                                          uint32_t index,
                                          const ProtobufCBinaryData *token,
                                          const Kvpb__Lifecycle *operation)
{
    struct kvs_control *control = call->control;
    struct kv_session *session = kv_session_of(call, index, token);

    if (session == NULL)
        return NULL;
    if (operation == NULL || operation->tokens > session->tokens_max) {
        kv_control_refuse(call, KV_INVALID, "%s: tokens %u, at most %u", kvs_call_name(call),
                          operation != NULL ? operation->tokens : 0, session->tokens_max);
        return NULL;
    }
    uint32_t n_log = session->n_log < KV_LIFECYCLE_LOG ? session->n_log : KV_LIFECYCLE_LOG;
    for (uint32_t i = 0; i < n_log; i++) {
        const struct kv_lifecycle *done = &session->log[i];
        if (done->op_id != operation->op_id)
            continue;
        call->session = session;
        if (done->kind == KV_OP_FORK) {
            call->child = kv_map_get(control->session_of_id, &done->child_id);
            if (call->child == NULL) {
                kv_control_refuse(call, KV_NOT_FOUND, "fork: was done, but the child is gone");
                return NULL;
            }
        }
        kv_session_reply(call, false);
        return NULL;
    }
    if (operation->generation != session->generation) {
        kv_control_refuse(call, KV_STALE, "%s: session %u is at generation %u, not %u",
                          kvs_call_name(call), index, session->generation,
                          operation->generation);
        return NULL;
    }
    if (operation->writer == 0) {
        kv_control_refuse(call, KV_INVALID, "%s: writer 0", kvs_call_name(call));
        return NULL;
    }
    if (kv_writers_count(session->writers, operation->tokens, operation->writer) >
        KV_WRITER_RUNS_MAX) {
        kv_control_refuse(call, KV_TOO_LARGE,
                          "%s: rows of more than %d writers: too many forks of forks",
                          kvs_call_name(call), KV_WRITER_RUNS_MAX);
        return NULL;
    }
    call->session = session;
    call->lifecycle = (struct kv_lifecycle){
        .op_id = operation->op_id,
        .kind = call->op,
        .generation = operation->generation,
        .tokens = operation->tokens,
        .writer = operation->writer,
    };
    return session;
}

static void fork_advanced(struct kv_control_call *call)
{
    struct kv_session *session = call->session, *child = call->child;

    if (call->lifecycle.tokens > session->shared_tokens)
        session->shared_tokens = call->lifecycle.tokens;

    child->busy = false;
    child->renewed_us = kv_clock_now(call->control->config.clock);
    lifecycle_record(call);
    kv_count(&call->control->stats.sessions_opened, 1);
    kv_session_reply(call, false);
}

static void fork_undone(struct kv_control_call *call)
{
    const kv_status_t status = call->refusal;

    call->session->busy = false;
    kv_session_destroy(call->control, call->child);
    if (status == KV_INVALID)
        kv_control_refuse(call, status, "fork: fewer than %u tokens are committed",
                          call->lifecycle.tokens);
    else
        kv_control_refuse(call, status, "fork: %s",
                          status == KV_NO_MEMORY ? "the store's memory is full"
                                                 : kv_status_name(status));
}

static void fork_done(struct kv_control_call *call)
{
    if (call->status != KV_OK) {
        call->refusal = call->status;
        kv_session_close(call, call->child, KV_ENDED_UNSAID, fork_undone);
        return;
    }
    kv_control_ask(call,
                   &(struct kv_command){.kind = KV_COMMAND_SESSION_GENERATION,
                                        .index = call->session->index,
                                        .generation = call->session->generation + 1},
                   fork_advanced);
}

static void fork_session(struct kv_control_call *call, const Kvpb__ForkRequest *request)
{
    struct kvs_control *control = call->control;
    struct kv_session *session =
        lifecycle_begin(call, request->session_index, &request->token, request->operation);

    if (session == NULL)
        return;
    if (!kv_pb_get_id(&request->operation->child_session_id, &call->lifecycle.child_id) ||
        !kv_pb_get_id(&request->operation->child_token, &call->lifecycle.child_token) ||
        kv_map_get(control->session_of_id, &call->lifecycle.child_id) != NULL) {
        kv_control_refuse(call, KV_INVALID, "fork: the child's id or token");
        return;
    }
    if (atomic_load(&control->draining)) {
        kv_control_refuse(call, KV_DRAINING, "fork: the node is about to stop");
        return;
    }
    struct kv_session *child =
        kv_session_create(control, &call->lifecycle.child_id, session->model);
    if (child == NULL) {
        kv_control_refuse(call, KV_BUSY, "fork: %u sessions already", control->n_sessions);
        return;
    }
    child->writers =
        kv_writers_create(session->writers, call->lifecycle.tokens, call->lifecycle.writer);
    if (child->writers == NULL) {
        kv_session_destroy(control, child);
        kv_control_refuse(call, KV_NO_MEMORY, "fork: out of memory");
        return;
    }
    child->token = call->lifecycle.child_token;
    child->tenant = session->tenant;
    child->tokens_max = session->tokens_max;
    child->lease_us = kv_lease_of(control, request->lease_ms);
    child->root = session->root;
    child->epoch = session->epoch;
    child->n_nodes = session->n_nodes;
    child->node_index = session->node_index;
    session->busy = true;
    call->child = child;
    call->lifecycle.child_index = child->index;

    struct kv_command command = kv_session_command(KV_COMMAND_SESSION_FORK, child);
    command.index = session->index;
    command.child_index = child->index;
    command.tokens = call->lifecycle.tokens;
    kv_control_ask(call, &command, fork_done);
}

void kv_control_fork(struct kv_control_call *call)
{
    Kvpb__ForkRequest *request =
        kvpb__fork_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL)
        kv_control_refuse(call, KV_INVALID, "fork: not a request of this protocol");
    else
        fork_session(call, request);
    kvpb__fork_request__free_unpacked(request, NULL);
}

static void truncate_done(struct kv_control_call *call)
{
    struct kv_session *session = call->session;

    if (kv_writers_own(call->writers) != kv_writers_own(session->writers))
        session->shared_tokens = 0;
    free(session->writers);
    session->writers = call->writers;
    call->writers = NULL;
    lifecycle_record(call);
    kv_session_reply(call, false);
}

static void truncate_session(struct kv_control_call *call, struct kv_session *session)
{
    const struct kv_lifecycle *lifecycle = &call->lifecycle;

    call->writers = kv_writers_create(session->writers, lifecycle->tokens, lifecycle->writer);
    if (call->writers == NULL) {
        kv_control_refuse(call, KV_NO_MEMORY, "truncate: out of memory");
        return;
    }
    session->busy = true;
    kv_control_ask(call,
                   &(struct kv_command){.kind = KV_COMMAND_SESSION_TRUNCATE,
                                        .index = session->index,
                                        .generation = session->generation + 1,
                                        .tokens = lifecycle->tokens,
                                        .writers = call->writers},
                   truncate_done);
}

void kv_control_truncate(struct kv_control_call *call)
{
    Kvpb__TruncateRequest *request =
        kvpb__truncate_request__unpack(NULL, call->request_bytes, call->request);

    if (request == NULL) {
        kv_control_refuse(call, KV_INVALID, "truncate: not a request of this protocol");
        return;
    }
    struct kv_session *session =
        lifecycle_begin(call, request->session_index, &request->token, request->operation);
    if (session != NULL)
        truncate_session(call, session);
    kvpb__truncate_request__free_unpacked(request, NULL);
}
