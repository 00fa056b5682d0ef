/* The log of forks and truncates, and what brings nodes up to date that missed one.
 *
 * Every lifecycle operation names the generation that it finds and leaves the next one; a node
 * does only what names its own generation, and answers again to an operation id that it has
 * done. So the generations of a session's nodes are a place in one common log:
 *
 *   generation   4       5       6
 *                | fork  | trunc |        node A: 6
 *                +-------+-------+        node B: 5, truncate is still to be sent to it
 *
 * The handle's generation is the log's end.  An operation that some node may have done is in
 * the log, whatever its caller was told; a node that lags is sent the rest before it is used.
 */
#include "client/call.h"
#include "client/client.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/session.h"
#include "client/session_private.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <stdio.h>
#include <string.h>

/* ---- the log ----------------------------------------------------------------------------- */

bool kv_session_log(struct kv_session *session, const struct kv_lifecycle *entry)
{
    if (session->n_log == KV_LIFECYCLE_LOG)
        return false;
    session->log[session->n_log++] = *entry;
    return true;
}

void kv_session_trim(struct kv_session *session)
{
    uint32_t least = session->generation;
    uint32_t n_done = 0;

    for (uint32_t i = 0; i < session->client->n_remotes; i++)
        if (session->nodes[i].generation < least)
            least = session->nodes[i].generation;
    while (n_done < session->n_log && session->log[n_done].generation < least)
        n_done++;
    session->n_log -= n_done;
    memmove(session->log, session->log + n_done, session->n_log * sizeof(session->log[0]));
}

static const struct kv_lifecycle *find_entry(const struct kv_session *session,
                                             uint32_t generation)
{
    for (uint32_t i = 0; i < session->n_log; i++)
        if (session->log[i].generation == generation)
            return &session->log[i];
    return NULL;
}

kv_status_t kv_lifecycle_send(struct kv_session *session,
                              struct kv_remote *remote,
                              struct kvc_owner *owner,
                              const struct kv_lifecycle *entry,
                              kv_call_done_fn done)
{
    Kvpb__Lifecycle operation = KVPB__LIFECYCLE__INIT;
    Kvpb__ForkRequest fork = KVPB__FORK_REQUEST__INIT;
    Kvpb__TruncateRequest truncate = KVPB__TRUNCATE_REQUEST__INIT;
    bool is_fork = entry->kind == KV_OP_FORK;

    operation.op_id = entry->op_id;
    operation.kind = entry->kind;
    operation.generation = entry->generation;
    operation.tokens = entry->tokens;
    operation.writer = entry->writer;
    if (is_fork) {
        operation.child_session_id = binary(&entry->child_id);
        operation.child_token = binary(&entry->child_token);
    }
    fork.session_index = truncate.session_index = session->nodes[remote->index].index;
    fork.token = truncate.token = binary(&session->ticket.token);
    fork.operation = truncate.operation = &operation;
    fork.lease_ms = session->lease_ms;
    return kv_call_begin(remote, owner, session, entry->kind,
                         is_fork ? &fork.base : &truncate.base, done);
}

/* ---- catching up ------------------------------------------------------------------------- */

/* The operations that wait for the node to catch up do so in vain.  A resume that fails frees the
 * session. */
static void fail_waiting(struct kv_session *session,
                         const struct kv_remote *remote,
                         kv_status_t status,
                         const char *detail)
{
    session->client->op_events->catch_up_failed(session, remote, status, detail);
}

/* Asks the node for its generation. */
static kv_status_t
survey(struct kv_session *session, struct kv_remote *remote, kv_call_done_fn done)
{
    struct kv_session_node *node = &session->nodes[remote->index];
    Kvpb__SessionRequest request = KVPB__SESSION_REQUEST__INIT;
    kv_status_t status;

    request.session_index = node->index;
    request.token = binary(&session->ticket.token);
    status = kv_call_begin(remote, NULL, session, KV_OP_SESSION, &request.base, done);
    node->is_catching_up = status == KV_OK;
    return status;
}

/* Whether the node is at another generation than it was known to be. */
static bool has_moved(const struct kv_call *call, const Kvpb__SessionReply *reply)
{
    struct kv_session_node *node = &call->session->nodes[call->remote->index];

    if (reply->generation == node->generation)
        return false;
    node->generation = reply->generation;
    kv_session_trim(call->session);
    return true;
}

/* The node did not find what it was to do. */
static void surveyed_again(struct kv_call *call,
                           kv_status_t status,
                           const ProtobufCMessage *message,
                           const char *detail)
{
    struct kv_session *session = call->session;

    if (session == NULL)
        return;
    session->nodes[call->remote->index].is_catching_up = false;
    if (status != KV_OK)
        fail_waiting(session, call->remote, status, detail);
    else if (!has_moved(call, (const Kvpb__SessionReply *)message))
        fail_waiting(session, call->remote, KV_CORRUPT,
                     "a session that is there was not found");
}

static void caught_up(struct kv_call *call,
                      kv_status_t status,
                      const ProtobufCMessage *message,
                      const char *detail)
{
    const Kvpb__OpenReply *reply = (const Kvpb__OpenReply *)message;
    struct kv_session *session = call->session;
    struct kv_session_node *node;

    if (session == NULL)
        return;
    node = &session->nodes[call->remote->index];
    node->is_catching_up = false;
    if (status == KV_OK && reply->generation > node->generation) {
        node->generation = reply->generation;
        kv_session_trim(session);
        return;
    }
    /* It had forked, and the child has gone since; or the session has. */
    if (status == KV_NOT_FOUND && survey(session, call->remote, surveyed_again) == KV_OK)
        return;
    fail_waiting(session, call->remote, status != KV_OK ? status : KV_CORRUPT, detail);
}

/* The node may have done what it did not get to answer to. */
static void surveyed(struct kv_call *call,
                     kv_status_t status,
                     const ProtobufCMessage *message,
                     const char *detail)
{
    struct kv_session *session = call->session;
    const struct kv_lifecycle *entry;
    struct kv_session_node *node;

    if (session == NULL)
        return;
    node = &session->nodes[call->remote->index];
    node->is_catching_up = false;
    if (status == KV_OK && has_moved(call, (const Kvpb__SessionReply *)message))
        return;
    entry = find_entry(session, node->generation);
    if (status == KV_OK && entry != NULL) {
        status = kv_lifecycle_send(session, call->remote, NULL, entry, caught_up);
        if (status == KV_OK) {
            node->is_catching_up = true;
            return;
        }
        detail = "a lifecycle operation cannot be sent";
    }
    if (status != KV_OK)
        fail_waiting(session, call->remote, status, detail);
}

kv_status_t kv_session_ready(struct kv_session *session,
                             struct kv_remote *remote,
                             char *detail,
                             size_t detail_bytes)
{
    struct kv_session_node *node = &session->nodes[remote->index];
    kv_status_t status;

    if (node->incarnation != remote->incarnation) {
        snprintf(detail, detail_bytes, "the node was started anew and has no such session");
        return KV_NOT_FOUND;
    }
    if (node->is_catching_up)
        return KV_IN_PROGRESS;
    if (node->generation == session->generation)
        return KV_OK;
    if (find_entry(session, node->generation) == NULL) {
        snprintf(detail, detail_bytes, "generation %u there, %u here", node->generation,
                 session->generation);
        return KV_STALE;
    }
    status = survey(session, remote, surveyed);
    if (status != KV_OK) {
        snprintf(detail, detail_bytes, "it cannot be asked for its generation");
        return status;
    }
    return KV_IN_PROGRESS;
}
