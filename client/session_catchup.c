/* The log of forks and truncates, and how nodes that missed one catch up.
 *
 * A lifecycle operation names the generation that it applies to and leads to the next one.  A
 * node applies only operations that name its own generation, and replies again to an operation
 * id that it has applied.  The generation of a node is therefore its position in a common log:
 *
 *   generation   4       5       6
 *                | fork  | trunc |        node A: 6
 *                +-------+-------+        node B: 5, the truncate must still be sent to it
 *
 * The handle's generation is the end of the log.  The log has every operation that a node may
 * have applied, whatever its caller was told.  A lagging node is sent the entries that it
 * missed before the session uses it.
 */
#include "client/session_catchup.h"

#include "client/call.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/session.h"
#include "client/session_private.h"
#include "client/state.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <stdio.h>
#include <string.h>

/* ---- the log ----------------------------------------------------------------------------- */

bool kvc_session_log(struct kv_session *session, const struct kvc_log_entry *entry)
{
    if (session->n_log == KVC_LOG_ENTRIES)
        return false;
    session->log[session->n_log++] = *entry;
    return true;
}

void kvc_session_trim(struct kv_session *session)
{
    uint32_t least = session->generation;
    uint32_t n_done = 0;

    for (uint32_t i = 0; i < session->row.n_nodes; i++)
        if (session->nodes[i].generation < least)
            least = session->nodes[i].generation;
    while (n_done < session->n_log && session->log[n_done].generation < least)
        n_done++;
    session->n_log -= n_done;
    memmove(session->log, session->log + n_done, session->n_log * sizeof(session->log[0]));
}

static const struct kvc_log_entry *find_entry(const struct kv_session *session,
                                              uint32_t generation)
{
    for (uint32_t i = 0; i < session->n_log; i++)
        if (session->log[i].generation == generation)
            return &session->log[i];
    return NULL;
}

kv_status_t kvc_log_entry_send(struct kv_session *session,
                               struct kvc_node *node,
                               struct kvc_owner *owner,
                               const struct kvc_log_entry *entry,
                               kvc_call_done_fn done)
{
    Kvpb__Lifecycle operation = KVPB__LIFECYCLE__INIT;
    Kvpb__ForkRequest fork = KVPB__FORK_REQUEST__INIT;
    Kvpb__TruncateRequest truncate = KVPB__TRUNCATE_REQUEST__INIT;
    bool is_fork = entry->type == KV_OP_FORK;

    operation.op_id = entry->op_id;
    operation.kind = entry->type;
    operation.generation = entry->generation;
    operation.tokens = entry->tokens;
    operation.writer = entry->writer;
    if (is_fork) {
        operation.child_session_id = kvc_binary(&entry->child_id);
        operation.child_token = kvc_binary(&entry->child_token);
    }
    if (node->version >= KV_WIRE_VERSION_PREFIXES) {
        fork.keeps_generation = entry->keeps_generation;
        truncate.fresh_writer = entry->fresh;
    }
    fork.session_index = truncate.session_index = kvc_session_on(session, node)->index;
    fork.token = truncate.token = kvc_binary(&session->ticket.token);
    fork.operation = truncate.operation = &operation;
    fork.lease_ms = session->lease_ms;
    return kvc_call_begin(node, owner, session, entry->type,
                          is_fork ? &fork.base : &truncate.base, done);
}

/* ---- catching up ------------------------------------------------------------------------- */

/* The operations that wait for the node to catch up do so in vain.  A resume that fails frees
 * the session. */
static void fail_waiting(struct kv_session *session,
                         const struct kvc_node *node,
                         kv_status_t status,
                         const char *detail)
{
    session->client->op_events->catch_up_failed(session, node, status, detail);
}

/* Asks the node for its generation. */
static kv_status_t
survey(struct kv_session *session, struct kvc_node *node, kvc_call_done_fn done)
{
    struct kvc_session_node *session_node = kvc_session_on(session, node);
    Kvpb__SessionRequest request = KVPB__SESSION_REQUEST__INIT;
    kv_status_t status;

    request.session_index = session_node->index;
    request.token = kvc_binary(&session->ticket.token);
    request.with_writer = node->version >= KV_WIRE_VERSION_PREFIXES;
    status = kvc_call_begin(node, NULL, session, KV_OP_SESSION, &request.base, done);
    session_node->is_catching_up = status == KV_OK;
    return status;
}

/* Whether the node is at another generation than it was known to be. */
static bool has_moved(const struct kvc_call *call, const Kvpb__SessionReply *reply)
{
    struct kvc_session_node *session_node = kvc_session_on(call->session, call->node);
    const struct kvc_log_entry *entry = find_entry(call->session, session_node->generation);

    if (reply->generation == session_node->generation)
        return false;
    /* It has done what it was asked for, and which writer it chose did not arrive.  Out of
     * memory: it is asked for the operation again, and replies as it did. */
    if (entry != NULL && entry->type == KV_OP_TRUNCATE &&
        !kvc_session_hear_own(call->session, kvc_row_position(&call->session->row, call->node),
                              entry->tokens, reply->own_writer))
        return false;
    session_node->generation = reply->generation;
    kvc_session_trim(call->session);
    return true;
}

/* The node did not find what it was to do. */
static void surveyed_again(struct kvc_call *call,
                           kv_status_t status,
                           const ProtobufCMessage *message,
                           const char *detail)
{
    struct kv_session *session = call->session;

    if (session == NULL)
        return;
    kvc_session_on(session, call->node)->is_catching_up = false;
    if (status != KV_OK)
        fail_waiting(session, call->node, status, detail);
    else if (!has_moved(call, (const Kvpb__SessionReply *)message))
        fail_waiting(session, call->node, KV_CORRUPT,
                     "the node does not find a session that it has");
}

static void caught_up(struct kvc_call *call,
                      kv_status_t status,
                      const ProtobufCMessage *message,
                      const char *detail)
{
    const Kvpb__OpenReply *reply = (const Kvpb__OpenReply *)message;
    struct kv_session *session = call->session;
    struct kvc_session_node *session_node;

    if (session == NULL)
        return;
    session_node = kvc_session_on(session, call->node);
    session_node->is_catching_up = false;
    if (status == KV_OK && reply->generation > session_node->generation) {
        const struct kvc_log_entry *entry = find_entry(session, session_node->generation);

        session_node->generation = reply->generation;
        if (entry != NULL && entry->type == KV_OP_TRUNCATE &&
            !kvc_session_hear_own(session, kvc_row_position(&session->row, call->node),
                                  entry->tokens, reply->own_writer)) {
            fail_waiting(session, call->node, KV_NO_MEMORY, "out of memory");
            return;
        }
        kvc_session_trim(session);
        return;
    }
    /* It had forked, and the child has gone since; or the session has. */
    if (status == KV_NOT_FOUND && survey(session, call->node, surveyed_again) == KV_OK)
        return;
    fail_waiting(session, call->node, status != KV_OK ? status : KV_CORRUPT, detail);
}

/* The node may have applied an operation although its reply was lost. */
static void surveyed(struct kvc_call *call,
                     kv_status_t status,
                     const ProtobufCMessage *message,
                     const char *detail)
{
    struct kv_session *session = call->session;
    const struct kvc_log_entry *entry;
    struct kvc_session_node *session_node;

    if (session == NULL)
        return;
    session_node = kvc_session_on(session, call->node);
    session_node->is_catching_up = false;
    if (status == KV_OK && has_moved(call, (const Kvpb__SessionReply *)message))
        return;
    entry = find_entry(session, session_node->generation);
    if (status == KV_OK && entry != NULL) {
        status = kvc_log_entry_send(session, call->node, NULL, entry, caught_up);
        if (status == KV_OK) {
            session_node->is_catching_up = true;
            return;
        }
        detail = "cannot send a lifecycle operation";
    }
    if (status != KV_OK)
        fail_waiting(session, call->node, status, detail);
}

bool kvc_call_catches_up(const struct kvc_call *call)
{
    return call->done == surveyed || call->done == surveyed_again || call->done == caught_up;
}

kv_status_t kvc_session_ready(struct kv_session *session,
                              struct kvc_node *node,
                              char *detail,
                              size_t detail_bytes)
{
    struct kvc_session_node *session_node = kvc_session_on(session, node);
    kv_status_t status;

    if (session_node->incarnation != node->incarnation) {
        snprintf(detail, detail_bytes, "the node was started anew and has no such session");
        return KV_NOT_FOUND;
    }
    if (session_node->is_catching_up)
        return KV_IN_PROGRESS;
    if (session_node->generation == session->generation)
        return KV_OK;
    if (find_entry(session, session_node->generation) == NULL) {
        snprintf(detail, detail_bytes, "generation %u there, %u here", session_node->generation,
                 session->generation);
        return KV_STALE;
    }
    status = survey(session, node, surveyed);
    if (status != KV_OK) {
        snprintf(detail, detail_bytes, "it cannot be asked for its generation");
        return status;
    }
    return KV_IN_PROGRESS;
}
