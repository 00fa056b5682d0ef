/* Fork and truncate: one lifecycle operation (session_catchup.c), done by every node.
 *
 * Nodes are asked first how many tokens they have committed.  Then the operation is put into the
 * session's log and sent to all.  It succeeds when each has done it; what some node may have done
 * stays in the log, and the others are sent it before they are used again.
 */
#include "client/call.h"
#include "client/client.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/session.h"
#include "client/session_private.h"
#include "kvserver/base/random.h"
#include "kvserver/base/writers.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct lifecycle_part {
    struct kv_lifecycle entry;
    uint32_t least; /* tokens committed on all nodes */
    uint32_t n_acked, n_refused;
    bool is_logged;
    struct kv_writers *writers; /* truncate: the session's, when it is done */
};
static_assert(sizeof(struct lifecycle_part) <= KVC_OP_STATE_BYTES,
              "an operation has room for it");

static struct lifecycle_part *lifecycle_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

/* The node said no, so it did nothing. */
static bool is_refusal(kv_status_t status)
{
    return status > KV_DEADLINE && status < KV_OK;
}

/* The fork has ended before this node answered: all or nothing. */
static void drop_child(const struct kv_call *call, const Kvpb__OpenReply *reply)
{
    Kvpb__ForkRequest *request =
        kvpb__fork_request__unpack(NULL, call->request_bytes, call->request);
    struct kv_id128 token;

    if (request == NULL)
        return;
    memcpy(token.bytes, request->operation->child_token.data, sizeof(token.bytes));
    kv_session_drop(call->remote, reply->child_index, &token);
    kvpb__fork_request__free_unpacked(request, NULL);
}

static void stage_done(struct kv_call *call,
                       kv_status_t status,
                       const ProtobufCMessage *message,
                       const char *detail)
{
    const Kvpb__OpenReply *reply = (const Kvpb__OpenReply *)message;
    struct kv_remote *remote = call->remote;
    struct kv_op *op = kvc_call_op(call);
    struct kv_session_node *node;

    if (op == NULL) {
        if (status == KV_OK && call->id == KV_OP_FORK)
            drop_child(call, reply);
        return;
    }
    node = &op->session->nodes[remote->index];
    if (status == KV_OK && reply->generation != lifecycle_of(op)->entry.generation + 1) {
        status = KV_STALE;
        detail = "another client has changed the session";
    }
    if (status != KV_OK) {
        lifecycle_of(op)->n_refused += is_refusal(status);
        kv_op_note(op, remote, status, detail);
        return;
    }
    lifecycle_of(op)->n_acked++;
    node->generation = reply->generation;
    if (op->result != NULL) {
        op->result->nodes[remote->index] = (struct kv_session_node){
            .index = reply->child_index,
            .generation = reply->child_generation,
            .incarnation = remote->incarnation,
        };
        if (lifecycle_of(op)->n_acked == 1)
            op->result->generation = reply->child_generation;
        else if (op->result->generation != reply->child_generation)
            kv_op_note(op, remote, KV_CORRUPT, "the child's generation differs between nodes");
    }
}

static struct kv_session *make_child(struct kv_op *op)
{
    struct kv_client *client = op->client;
    const struct kv_session *session = op->session;
    struct kv_session *child = kv_session_make(client, &session->schema, session->root);

    if (child == NULL)
        return NULL;
    child->writers = kv_writers_create(session->writers, lifecycle_of(op)->entry.tokens,
                                       lifecycle_of(op)->entry.writer);
    if (child->writers == NULL) {
        kv_session_free(child);
        return NULL;
    }
    kv_random_fill(&client->random, &child->ticket.session_id, sizeof(struct kv_id128));
    kv_random_fill(&client->random, &child->ticket.token, sizeof(struct kv_id128));
    child->fingerprint = session->fingerprint;
    child->lease_ms = session->lease_ms;
    child->tokens_max = session->tokens_max;
    lifecycle_of(op)->entry.child_id = child->ticket.session_id;
    lifecycle_of(op)->entry.child_token = child->ticket.token;
    return child;
}

/* Whose rows the child's are, or those that will follow in the session.  false: the operation
 * has failed. */
static bool choose_writer(struct kv_op *op)
{
    const struct kv_session *session = op->session;
    struct kv_lifecycle *entry = &lifecycle_of(op)->entry;
    bool is_fork = entry->kind == KV_OP_FORK, is_made;

    /* What a truncate takes away, a fork may have: what takes its place is another writer's. */
    entry->writer = is_fork || entry->tokens < session->shared_tokens
                        ? kv_client_draw_writer(op->client)
                        : kv_writers_own(session->writers);
    if (kv_writers_count(session->writers, entry->tokens, entry->writer) > KV_WRITER_RUNS_MAX) {
        kv_op_fail(op, NULL, NULL, KV_TOO_LARGE,
                   "rows of more than %d writers: too many forks of forks", KV_WRITER_RUNS_MAX);
        return false;
    }
    if (is_fork) {
        op->result = make_child(op);
        is_made = op->result != NULL;
    } else {
        lifecycle_of(op)->writers =
            kv_writers_create(session->writers, entry->tokens, entry->writer);
        is_made = lifecycle_of(op)->writers != NULL;
    }
    if (!is_made)
        kv_op_fail(op, NULL, NULL, KV_NO_MEMORY, "out of memory");
    return is_made;
}

/* All nodes are at the generation, and their lengths are known. */
static void carry_out(struct kv_op *op)
{
    struct kv_session *session = op->session;
    struct kv_lifecycle *entry = &lifecycle_of(op)->entry;

    if (entry->kind == KV_OP_FORK) {
        if (entry->tokens > lifecycle_of(op)->least) {
            kv_op_fail(op, NULL, NULL, KV_INVALID, "%u tokens, %u are committed", entry->tokens,
                       lifecycle_of(op)->least);
            return;
        }
    }
    if (!choose_writer(op))
        return;
    do
        entry->op_id = kv_random_next(&op->client->random);
    while (entry->op_id == 0);
    entry->generation = session->generation;
    if (!kv_session_log(session, entry)) {
        kv_op_fail(op, NULL, NULL, KV_BUSY, "too many lifecycle operations that nodes missed");
        return;
    }
    op->phase = 1;
    lifecycle_of(op)->is_logged = true;
    for (uint32_t i = 0; i < op->client->n_remotes; i++) {
        struct kv_remote *remote = &op->client->remotes[i];
        kv_status_t status = kv_lifecycle_send(session, remote, &op->owner, entry, stage_done);

        if (status != KV_OK) {
            lifecycle_of(op)->n_refused++;
            kv_op_note(op, remote, status, "it cannot be sent");
        }
    }
}

static void lengths_done(struct kv_call *call,
                         kv_status_t status,
                         const ProtobufCMessage *message,
                         const char *detail)
{
    const Kvpb__SessionReply *reply = (const Kvpb__SessionReply *)message;
    struct kv_op *op = kvc_call_op(call);

    if (op == NULL)
        return;
    if (status != KV_OK) {
        kv_op_fail(op, call->remote, NULL, status, "%s", detail);
        return;
    }
    if (reply->generation != op->session->generation) {
        kv_op_fail(op, call->remote, NULL, KV_STALE, "generation %u there, %u here",
                   reply->generation, op->session->generation);
        return;
    }
    if (reply->tokens < lifecycle_of(op)->least)
        lifecycle_of(op)->least = reply->tokens;
    if (op->owner.n_calls == 0)
        carry_out(op);
}

static void start_lifecycle(struct kv_op *op)
{
    struct kv_session *session = op->session;
    Kvpb__SessionRequest request = KVPB__SESSION_REQUEST__INIT;

    lifecycle_of(op)->least = UINT32_MAX;
    for (uint32_t i = 0; i < op->client->n_remotes && op->stage == KV_STAGE_RUNNING; i++) {
        struct kv_remote *remote = &op->client->remotes[i];
        kv_status_t status;

        request.session_index = session->nodes[i].index;
        request.token = binary(&session->ticket.token);
        status = kv_call_begin(remote, &op->owner, session, KV_OP_SESSION, &request.base,
                               lengths_done);
        if (status != KV_OK)
            kv_op_fail(op, remote, NULL, status, "it cannot be sent");
    }
}

/* The operation was done, or may have been on some node. */
static void advance_writers(struct kv_op *op)
{
    struct kv_session *session = op->session;
    const struct kv_lifecycle *entry = &lifecycle_of(op)->entry;

    if (entry->kind == KV_OP_FORK) {
        if (entry->tokens > session->shared_tokens)
            session->shared_tokens = entry->tokens;
        return;
    }
    if (entry->writer != kv_writers_own(session->writers))
        session->shared_tokens = 0;
    free(session->writers);
    session->writers = lifecycle_of(op)->writers;
    lifecycle_of(op)->writers = NULL;
}

static void ended_lifecycle(struct kv_op *op)
{
    struct kv_session *session = op->session;
    struct kv_session *child = op->result;
    bool is_done = op->status == KV_OK;

    if (lifecycle_of(op)->is_logged) {
        struct kv_lifecycle *entry = &session->log[session->n_log - 1];

        if (!is_done && lifecycle_of(op)->n_refused == op->client->n_remotes) {
            session->n_log--;
        } else {
            session->generation = entry->generation + 1;
            advance_writers(op);
            if (!is_done && entry->kind == KV_OP_FORK) {
                /* Nobody gets the child: nodes that missed it need not make it, only go on to
                 * the next generation. */
                entry->kind = KV_OP_TRUNCATE;
                entry->tokens = session->tokens_max;
                entry->writer = kv_writers_own(session->writers);
            }
        }
        kv_session_trim(session);
    }
    free(lifecycle_of(op)->writers);
    lifecycle_of(op)->writers = NULL;
    if (is_done) {
        op->tokens = lifecycle_of(op)->entry.tokens;
        if (child != NULL) {
            child->renew_us = op->client->loop.now_us + (uint64_t)child->lease_ms * 1000 / 3;
            kvc_loop_set_timer(&op->client->loop, child->renew_us);
        }
    } else if (child != NULL) {
        for (uint32_t i = 0; i < op->client->n_remotes; i++)
            if (child->nodes[i].incarnation != 0)
                kv_session_drop(&op->client->remotes[i], child->nodes[i].index,
                                &child->ticket.token);
        op->result = NULL;
        kv_session_free(child);
    }
}

static const struct kv_op_kind fork_kind = {
    .name = "fork",
    .id = KV_OP_FORK,
    .is_exclusive = true,
    .needs_current = true,
    .start = start_lifecycle,
    .ended = ended_lifecycle,
    .describe = kv_session_describe_op,
};

static const struct kv_op_kind truncate_kind = {
    .name = "truncate",
    .id = KV_OP_TRUNCATE,
    .is_exclusive = true,
    .needs_current = true,
    .start = start_lifecycle,
    .ended = ended_lifecycle,
    .describe = kv_session_describe_op,
};

static kv_status_t begin_lifecycle(const struct kv_op_kind *kind,
                                   struct kv_session *session,
                                   uint32_t tokens,
                                   uint32_t deadline_ms,
                                   struct kv_op **ret_op)
{
    kv_status_t status;
    struct kv_op *op;

    if (tokens > session->tokens_max)
        return kvc_set_error(&session->client->loop, KV_INVALID,
                             "%s: token %u is beyond the "
                             "session's %u",
                             kind->name, tokens, session->tokens_max);
    status = kv_op_begin(session->client, kind, session, NULL, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    lifecycle_of(op)->entry.kind = kind->id;
    lifecycle_of(op)->entry.tokens = tokens;
    kv_op_need_all(op);
    return kv_op_go(op, ret_op);
}

kv_status_t kv_fork_begin(struct kv_session *session,
                          uint32_t tokens,
                          uint32_t deadline_ms,
                          struct kv_op **ret_op)
{
    return begin_lifecycle(&fork_kind, session, tokens, deadline_ms, ret_op);
}

kv_status_t kv_truncate_begin(struct kv_session *session,
                              uint32_t tokens,
                              uint32_t deadline_ms,
                              struct kv_op **ret_op)
{
    return begin_lifecycle(&truncate_kind, session, tokens, deadline_ms, ret_op);
}
