/* Fork and truncate: a lifecycle operation (session_catchup.c) that every node applies.
 *
 * First, the nodes report how many tokens are committed.  Then the operation is added to the
 * session's log and sent to all nodes.  It succeeds when each has applied it.  If some node may
 * have applied it, it stays in the log, and the other nodes are sent it before they are used
 * again.
 */
#include "client/call.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/ops/length.h"
#include "client/session.h"
#include "client/session_catchup.h"
#include "client/session_lease.h"
#include "client/session_private.h"
#include "client/state.h"
#include "kvserver/base/random.h"
#include "kvserver/base/writers.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct lifecycle_part {
    struct kvc_log_entry entry;
    uint32_t least; /* tokens committed on all nodes */
    uint32_t n_acked, n_refused;
    bool is_logged;
    uint64_t owns[KV_ROW_NODES]; /* truncate: what the nodes say of the session's own writer */
    struct kv_writers *writers[KV_ROW_NODES]; /* truncate: the session's, when it is done */
};
static_assert(sizeof(struct lifecycle_part) <= KVC_OP_STATE_BYTES,
              "an operation has room for it");

static struct lifecycle_part *lifecycle_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

static uint32_t generation_after(const struct kvc_log_entry *entry)
{
    return entry->generation + !entry->keeps_generation;
}

/* The node said no, so it did nothing. */
static bool is_refusal(kv_status_t status)
{
    return status > KV_DEADLINE && status < KV_OK;
}

/* The fork has ended before this node answered: all or nothing. */
static void drop_child(const struct kvc_call *call, const Kvpb__OpenReply *reply)
{
    Kvpb__ForkRequest *request =
        kvpb__fork_request__unpack(NULL, call->packed_bytes, call->packed);
    struct kv_id128 token;

    if (request == NULL)
        return;
    memcpy(token.bytes, request->operation->child_token.data, sizeof(token.bytes));
    kvc_session_drop(call->node, reply->child_index, &token);
    kvpb__fork_request__free_unpacked(request, NULL);
}

static void stage_done(struct kvc_call *call,
                       kv_status_t status,
                       const ProtobufCMessage *message,
                       const char *detail)
{
    const Kvpb__OpenReply *reply = (const Kvpb__OpenReply *)message;
    struct kvc_node *node = call->node;
    struct kv_op *op = kvc_call_op(call);
    struct kvc_session_node *session_node;

    if (op == NULL) {
        if (status == KV_OK && call->id == KV_OP_FORK)
            drop_child(call, reply);
        return;
    }
    session_node = kvc_session_on(op->session, node);
    if (status == KV_OK && reply->generation != generation_after(&lifecycle_of(op)->entry)) {
        status = KV_STALE;
        detail = "another client has changed the session";
    }
    if (status != KV_OK) {
        lifecycle_of(op)->n_refused += is_refusal(status);
        kvc_op_record_error(op, node, status, detail);
        return;
    }
    lifecycle_of(op)->n_acked++;
    session_node->generation = reply->generation;
    lifecycle_of(op)->owns[kvc_row_position(&op->session->row, node)] = reply->own_writer;
    if (op->result != NULL) {
        *kvc_session_on(op->result, node) = (struct kvc_session_node){
            .index = reply->child_index,
            .generation = reply->child_generation,
            .incarnation = node->incarnation,
        };
        if (lifecycle_of(op)->n_acked == 1)
            op->result->generation = reply->child_generation;
        else if (op->result->generation != reply->child_generation)
            kvc_op_record_error(op, node, KV_CORRUPT,
                                "the child's generation differs between nodes");
    }
}

static struct kv_session *make_child(struct kv_op *op, kv_status_t *ret_status)
{
    struct kv_client *client = op->client;
    const struct kv_session *session = op->session;
    struct kv_session *child;
    struct kv_ticket ticket;

    kvc_ticket_draw(client, &ticket);
    ticket.root = session->ticket.root; /* its rows are where the parent's are */
    child = kvc_session_make(client, &session->schema, &ticket);
    *ret_status = KV_NO_MEMORY;
    if (child == NULL)
        return NULL;
    *ret_status = kvc_writers_make(child, session, lifecycle_of(op)->entry.tokens,
                                   lifecycle_of(op)->entry.writer, child->writers);
    if (*ret_status != KV_OK) {
        kv_session_free(child);
        return NULL;
    }
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
    struct kvc_log_entry *entry = &lifecycle_of(op)->entry;
    bool is_fork = entry->type == KV_OP_FORK;
    kv_status_t status;

    /* What a truncate takes away, a fork may have: what takes its place is another writer's. */
    entry->writer = is_fork || entry->tokens < session->shared_tokens
                        ? kvc_client_draw_writer(op->client)
                        : kvc_session_own_writer(session);
    if (is_fork)
        op->result = make_child(op, &status);
    else
        status = kvc_writers_make(session, session, entry->tokens, entry->writer,
                                  lifecycle_of(op)->writers);
    if (status == KV_TOO_LARGE) {
        kvc_op_fail(op, NULL, NULL, KV_TOO_LARGE, "too many forks of forks: limit %d writers",
                    KV_WRITER_RUNS_MAX);
        return false;
    }
    if (status != KV_OK)
        kvc_op_fail(op, NULL, NULL, status, "out of memory");
    return status == KV_OK;
}

/* Whether all nodes can share a session's rows without making its clients stale. */
static bool all_share(const struct kv_session *session)
{
    for (uint32_t i = 0; i < session->row.n_nodes; i++)
        if (kvc_session_node(session, i)->version < KV_WIRE_VERSION_PREFIXES)
            return false;
    return true;
}

/* All nodes are at the generation, and their lengths are known. */
static void apply(struct kv_op *op)
{
    struct kv_session *session = op->session;
    struct kvc_log_entry *entry = &lifecycle_of(op)->entry;

    if (entry->type == KV_OP_FORK) {
        if (entry->tokens > lifecycle_of(op)->least) {
            kvc_op_fail(op, NULL, NULL, KV_INVALID, "%u tokens, but only %u are committed",
                        entry->tokens, lifecycle_of(op)->least);
            return;
        }
    }
    entry->keeps_generation = entry->type == KV_OP_FORK && all_share(session);
    entry->fresh = entry->type == KV_OP_TRUNCATE && all_share(session)
                       ? kvc_client_draw_writer(op->client)
                       : 0;
    if (!choose_writer(op))
        return;
    do
        entry->op_id = kv_random_next(&op->client->random);
    while (entry->op_id == 0);
    entry->generation = session->generation;
    if (!entry->keeps_generation && !kvc_session_log(session, entry)) {
        kvc_op_fail(op, NULL, NULL, KV_BUSY,
                    "nodes missed too many lifecycle operations: limit %d", KVC_LOG_ENTRIES);
        return;
    }
    op->phase = 1;
    lifecycle_of(op)->is_logged = !entry->keeps_generation;
    for (uint32_t i = 0; i < session->row.n_nodes; i++) {
        struct kvc_node *node = kvc_session_node(session, i);
        kv_status_t status = kvc_log_entry_send(session, node, &op->owner, entry, stage_done);

        if (status != KV_OK) {
            lifecycle_of(op)->n_refused++;
            kvc_op_record_error(op, node, status, "cannot send the request");
        }
    }
}

static void lengths_done(struct kvc_call *call,
                         kv_status_t status,
                         const ProtobufCMessage *message,
                         const char *detail)
{
    struct kv_op *op = kvc_call_op(call);

    if (op != NULL &&
        kvc_take_length(call, status, message, detail, &lifecycle_of(op)->least) &&
        op->owner.n_calls == 0)
        apply(op);
}

static void start_change(struct kv_op *op)
{
    lifecycle_of(op)->least = UINT32_MAX;
    kvc_ask_lengths(op, op->session, false, lengths_done);
}

/* The operation was done, or may have been on some node. */
static void advance_writers(struct kv_op *op)
{
    struct kv_session *session = op->session;
    const struct kvc_log_entry *entry = &lifecycle_of(op)->entry;

    if (entry->type == KV_OP_FORK) {
        if (entry->tokens > session->shared_tokens)
            session->shared_tokens = entry->tokens;
        return;
    }
    if (entry->writer != kvc_session_own_writer(session))
        session->shared_tokens = 0;
    kvc_session_take_writers(session, lifecycle_of(op)->writers);
    for (uint32_t i = 0; i < session->row.n_nodes; i++)
        if (!kvc_session_hear_own(session, i, entry->tokens, lifecycle_of(op)->owns[i]))
            kvc_op_record_error(op, NULL, KV_NO_MEMORY, "out of memory");
}

static void change_ended(struct kv_op *op)
{
    struct kv_session *session = op->session;
    struct kv_session *child = op->result;
    bool is_done = op->status == KV_OK;

    if (lifecycle_of(op)->is_logged) {
        struct kvc_log_entry *entry = &session->log[session->n_log - 1];

        if (!is_done && lifecycle_of(op)->n_refused == session->row.n_nodes) {
            session->n_log--;
        } else {
            session->generation = entry->generation + 1;
            advance_writers(op);
            if (!is_done && entry->type == KV_OP_FORK) {
                /* The caller does not get the child, so nodes that missed the fork need not
                 * create it, but only advance to the next generation. */
                entry->type = KV_OP_TRUNCATE;
                entry->tokens = session->tokens_max;
                entry->writer = kvc_session_own_writer(session);
            }
        }
        kvc_session_trim(session);
    } else if (lifecycle_of(op)->entry.keeps_generation &&
               lifecycle_of(op)->entry.tokens > session->shared_tokens) {
        session->shared_tokens = lifecycle_of(op)->entry.tokens;
    }
    kvc_writers_free(lifecycle_of(op)->writers);
    if (is_done) {
        op->tokens = lifecycle_of(op)->entry.tokens;
        if (child != NULL)
            kvc_session_leased(child);
    } else if (child != NULL) {
        op->result = NULL;
        kvc_session_abandon(child);
    }
}

static const struct kvc_op_type fork_type = {
    .name = "fork",
    .id = KV_OP_FORK,
    .is_exclusive = true,
    .needs_current = true,
    .start = start_change,
    .ended = change_ended,
    .describe = kvc_session_describe_op,
};

static const struct kvc_op_type truncate_type = {
    .name = "truncate",
    .id = KV_OP_TRUNCATE,
    .is_exclusive = true,
    .needs_current = true,
    .start = start_change,
    .ended = change_ended,
    .describe = kvc_session_describe_op,
};

static kv_status_t begin_change(const struct kvc_op_type *type,
                                struct kv_session *session,
                                uint32_t tokens,
                                uint32_t deadline_ms,
                                struct kv_op **ret_op)
{
    kv_status_t status;
    struct kv_op *op;

    if (tokens > session->tokens_max)
        return kvc_set_error(&session->client->loop, KV_INVALID,
                             "%s: token %u: session limit %u", type->name, tokens,
                             session->tokens_max);
    status = kvc_op_begin_on_row(session, type, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    lifecycle_of(op)->entry.type = type->id;
    lifecycle_of(op)->entry.tokens = tokens;
    return kvc_op_submit(op, ret_op);
}

kv_status_t kv_fork_begin(struct kv_session *session,
                          uint32_t tokens,
                          uint32_t deadline_ms,
                          struct kv_op **ret_op)
{
    KVC_ENTER(session->client);

    return begin_change(&fork_type, session, tokens, deadline_ms, ret_op);
}

kv_status_t kv_truncate_begin(struct kv_session *session,
                              uint32_t tokens,
                              uint32_t deadline_ms,
                              struct kv_op **ret_op)
{
    KVC_ENTER(session->client);

    return begin_change(&truncate_type, session, tokens, deadline_ms, ret_op);
}
