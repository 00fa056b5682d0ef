/* ops_fork.c - fork and truncate: the operations that raise a session's generation.  Each is
 * done once, however often its request is repeated: a log of the last ones answers repeats. */
#include "kvserver/base/token.h"
#include "kvserver/store/control/ops_private.h"
#include "kvserver/store/control/protobuf.h"

#include <stdio.h>
#include <stdlib.h>

/* Returns whether the session's rows before `tokens`, with `writer` for those after them, have no
 * more writers than there may be; otherwise refuses the call. */
static bool check_writers(struct kvs_control_call *call,
                          const struct kvs_session *session,
                          uint32_t tokens,
                          uint64_t writer)
{
    if (kv_writers_count(session->writers, tokens, writer) <= KV_WRITER_RUNS_MAX)
        return true;
    kvs_control_refuse(call, KV_TOO_LARGE,
                       "%s: rows of more than %d writers: too many forks of forks",
                       kvs_call_name(call), KV_WRITER_RUNS_MAX);
    return false;
}

/* The operation is done on the session's data threads: from here on a repeat of its request finds
 * it in the log, and other clients of the session are stale. */
static void log_entry_record(struct kvs_control_call *call)
{
    struct kvs_session *session = call->session;

    session->generation++;
    session->busy = false;
    session->log[session->n_log++ % KVS_LOG_ENTRIES] = call->log_entry;
}

/* Finds the session and checks that the operation is the next one for it.  Otherwise, or if it
 * was done before, replies and returns NULL. */
static struct kvs_session *log_entry_begin(struct kvs_control_call *call,
                                           uint32_t index,
                                           const ProtobufCBinaryData *token,
                                           const Kvpb__Lifecycle *operation)
{
    struct kvs_control *control = call->control;
    struct kvs_session *session = kvs_session_of(call, index, token);

    if (session == NULL)
        return NULL;
    if (operation == NULL || operation->tokens > session->tokens_max) {
        kvs_control_refuse(call, KV_INVALID, "%s: tokens: %u, limit %u", kvs_call_name(call),
                           operation != NULL ? operation->tokens : 0, session->tokens_max);
        return NULL;
    }
    uint32_t n_log = session->n_log < KVS_LOG_ENTRIES ? session->n_log : KVS_LOG_ENTRIES;
    /* Before the generation is compared: an operation that was done has raised it, so that its
     * repeat would otherwise be stale. */
    for (uint32_t i = 0; i < n_log; i++) {
        const struct kvs_log_entry *done = &session->log[i];
        if (done->op_id != operation->op_id)
            continue;
        call->session = session;
        if (done->kind == KV_OP_FORK) {
            call->child = kv_map_get(control->session_of_id, &done->child_id);
            if (call->child == NULL) {
                kvs_control_refuse(call, KV_NOT_FOUND,
                                   "fork: already done, but the child is gone");
                return NULL;
            }
        }
        kvs_session_reply(call, false);
        return NULL;
    }
    if (operation->generation != session->generation) {
        kvs_control_refuse(call, KV_STALE, "%s: session %u is at generation %u, not %u",
                           kvs_call_name(call), index, session->generation,
                           operation->generation);
        return NULL;
    }
    if (operation->writer == 0) {
        kvs_control_refuse(call, KV_INVALID, "%s: writer must not be 0", kvs_call_name(call));
        return NULL;
    }
    if (!check_writers(call, session, operation->tokens, operation->writer))
        return NULL;
    call->session = session;
    call->log_entry = (struct kvs_log_entry){
        .op_id = operation->op_id,
        .kind = call->op,
        .generation = operation->generation,
        .tokens = operation->tokens,
        .writer = operation->writer,
    };
    return session;
}

/* The child is there. */
static void fork_end(struct kvs_control_call *call)
{
    struct kvs_session *session = call->session, *child = call->child;

    if (call->log_entry.tokens > session->shared_tokens)
        session->shared_tokens = call->log_entry.tokens;
    session->busy = child->busy = false;
    child->renewed_us = kv_clock_now(call->control->config.clock);
    kvs_count(&call->control->stats.sessions_opened, 1);
    kvs_session_reply(call, false);
}

static void fork_advanced(struct kvs_control_call *call)
{
    log_entry_record(call);
    fork_end(call);
}

/* The child is gone again: the fork has failed without a trace. */
static void fork_undone(struct kvs_control_call *call)
{
    const kv_status_t status = call->refusal;

    call->session->busy = false;
    kvs_session_destroy(call->control, call->child);
    if (status == KV_INVALID)
        kvs_control_refuse(call, status, "fork: fewer than %u tokens are committed",
                           call->log_entry.tokens);
    else
        kvs_control_refuse(call, status, "fork: %s",
                           status == KV_NO_MEMORY ? "store full" : kv_status_name(status));
}

/* The data threads have made the child, or it is undone.  Only then is the parent's generation
 * raised: that cannot be undone. */
static void fork_done(struct kvs_control_call *call)
{
    if (call->status != KV_OK) {
        call->refusal =
            call->status == KV_NO_MEMORY ? kvs_control_full(call->control) : call->status;
        kvs_session_close(call, call->child, KVS_ENDED_UNSAID, fork_undone);
        return;
    }
    if (call->keeps_generation) {
        fork_end(call);
        return;
    }
    kvs_control_broadcast_session(
        call, call->session,
        &(struct kvs_command){.kind = KVS_COMMAND_SESSION_GENERATION,
                              .index = call->session->index,
                              .generation = call->session->generation + 1},
        fork_advanced);
}

/* Replies if a fork that keeps the generation was done before: its child is here. */
static bool fork_is_repeat(struct kvs_control_call *call, const Kvpb__ForkRequest *request)
{
    struct kv_id128 id, token;

    if (!request->keeps_generation || request->operation == NULL ||
        !kvs_pb_get_id(&request->operation->child_session_id, &id) ||
        !kvs_pb_get_id(&request->operation->child_token, &token))
        return false;
    struct kvs_session *child = kv_map_get(call->control->session_of_id, &id);
    if (child == NULL || !kv_token_equal(&child->token, &token))
        return false;
    struct kvs_session *session = kvs_session_of(call, request->session_index, &request->token);
    if (session == NULL)
        return true;
    if (child->tenant != call->tenant) {
        kvs_control_refuse(call, KV_DENIED, "fork: the child belongs to another tenant");
        return true;
    }
    if (child->busy) {
        kvs_control_refuse(call, KV_BUSY, "fork: the child is being changed");
        return true;
    }
    call->session = session;
    call->child = child;
    kvs_session_reply(call, false);
    return true;
}

static void fork_session(struct kvs_control_call *call, const Kvpb__ForkRequest *request)
{
    struct kvs_control *control = call->control;

    if (fork_is_repeat(call, request))
        return;
    struct kvs_session *session =
        log_entry_begin(call, request->session_index, &request->token, request->operation);

    if (session == NULL)
        return;
    call->keeps_generation = request->keeps_generation;
    if (!kvs_pb_get_id(&request->operation->child_session_id, &call->log_entry.child_id) ||
        !kvs_pb_get_id(&request->operation->child_token, &call->log_entry.child_token) ||
        kv_map_get(control->session_of_id, &call->log_entry.child_id) != NULL) {
        kvs_control_refuse(call, KV_INVALID, "fork: invalid id or token of the child");
        return;
    }
    if (atomic_load(&control->draining)) {
        kvs_control_refuse(call, KV_DRAINING, "fork: node is draining");
        return;
    }
    struct kvs_session *child;
    kv_status_t status =
        kvs_session_create(control, &call->log_entry.child_id, session->model, &child);
    if (status != KV_OK) {
        kvs_session_refuse(call, "fork", status);
        return;
    }
    child->writers =
        kv_writers_create(session->writers, call->log_entry.tokens, call->log_entry.writer);
    if (child->writers == NULL) {
        kvs_session_destroy(control, child);
        kvs_control_refuse(call, KV_NO_MEMORY, "fork: out of memory");
        return;
    }
    child->token = call->log_entry.child_token;
    child->tenant = session->tenant;
    snprintf(child->owner, sizeof(child->owner), "%s", call->caller->name);
    child->tokens_max = session->tokens_max;
    kvs_session_place(control, child, session->root, session->epoch, session->n_nodes,
                      session->position);
    if (kvs_session_share_names(control, session, child, call->log_entry.tokens) != KV_OK) {
        kvs_session_destroy(control, child);
        kvs_control_refuse(call, KV_NO_MEMORY, "fork: out of memory");
        return;
    }
    kvs_session_set_lease(control, child, kvs_lease_of(control, request->lease_ms));
    kvs_root_follow(child, session);
    session->busy = true;
    call->child = child;
    call->log_entry.child_index = child->index;

    struct kvs_command command = kvs_session_command(KVS_COMMAND_SESSION_FORK, child);
    command.index = session->index;
    command.child_index = child->index;
    command.tokens = call->log_entry.tokens;
    kvs_control_broadcast_session(call, session, &command, fork_done);
}

void kvs_control_fork(struct kvs_control_call *call)
{
    Kvpb__ForkRequest *request = kvs_call_unpack(call, &kvpb__fork_request__descriptor);

    if (request == NULL)
        return;
    fork_session(call, request);
    kvpb__fork_request__free_unpacked(request, NULL);
}

static void truncate_done(struct kvs_control_call *call)
{
    struct kvs_session *session = call->session;

    if (kv_writers_own(call->writers) != kv_writers_own(session->writers))
        session->shared_tokens = 0;
    free(session->writers);
    session->writers = call->writers;
    call->writers = NULL;
    kvs_session_cut_names(call->control, session, call->log_entry.tokens);
    log_entry_record(call);
    kvs_session_reply(call, false);
}

static void truncate_session(struct kvs_control_call *call, struct kvs_session *session)
{
    const struct kvs_log_entry *log_entry = &call->log_entry;

    /* Again: it may be a fresh one. */
    if (!check_writers(call, session, log_entry->tokens, log_entry->writer))
        return;
    call->writers = kv_writers_create(session->writers, log_entry->tokens, log_entry->writer);
    if (call->writers == NULL) {
        kvs_control_refuse(call, KV_NO_MEMORY, "truncate: out of memory");
        return;
    }
    session->busy = true;
    kvs_control_broadcast_session(call, session,
                                  &(struct kvs_command){.kind = KVS_COMMAND_SESSION_TRUNCATE,
                                                        .index = session->index,
                                                        .generation = session->generation + 1,
                                                        .tokens = log_entry->tokens,
                                                        .writers = call->writers},
                                  truncate_done);
}

void kvs_control_truncate(struct kvs_control_call *call)
{
    Kvpb__TruncateRequest *request = kvs_call_unpack(call, &kvpb__truncate_request__descriptor);

    if (request == NULL)
        return;
    call->tells_writer = request->fresh_writer != 0;
    struct kvs_session *session =
        log_entry_begin(call, request->session_index, &request->token, request->operation);
    if (session != NULL) {
        /* Who shares what, the client need not know. */
        if (request->fresh_writer != 0 && call->log_entry.tokens < session->shared_tokens)
            call->log_entry.writer = request->fresh_writer;
        truncate_session(call, session);
    }
    kvpb__truncate_request__free_unpacked(request, NULL);
}
