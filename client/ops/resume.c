/* Resume: creates a session's handle from its ticket.
 *
 * Every node of its row is asked for its state of the session, and the states must agree.  The
 * node with the latest generation has the log by which lagging nodes catch up.  Then all nodes
 * are asked for their lengths again; the minimum is the session's length.
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
#include "kvserver/base/writers.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A node's state of the session. */
struct kvc_resumed {
    uint32_t index, generation, incarnation, tokens;
    uint32_t n_recent;
    struct kvc_log_entry recent[KVC_LOG_ENTRIES]; /* oldest first */
};

struct resume_part {
    struct kv_ticket ticket;
    struct kv_placement_row row;
    struct kvc_resumed *nodes; /* (row.n_nodes) by position in the row */
    bool is_stale;             /* changed by another client during the resume */
};
static_assert(sizeof(struct resume_part) <= KVC_OP_STATE_BYTES, "an operation has room for it");

static struct resume_part *resume_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

static bool read_schema(const Kvpb__OpenReply *reply, kv_schema_t *ret_schema)
{
    memset(ret_schema, 0, sizeof(*ret_schema));
    if (reply->n_layers == 0 || reply->n_layers > KV_LAYERS_MAX)
        return false;
    ret_schema->n_layers = (uint32_t)reply->n_layers;
    for (uint32_t i = 0; i < ret_schema->n_layers; i++) {
        const Kvpb__Layer *layer = reply->layers[i];

        if (layer->kind > UINT8_MAX || layer->dtype > UINT8_MAX ||
            layer->n_kv_heads > KV_HEADS_MAX || layer->d_k > KV_DIM_MAX ||
            layer->d_v > KV_DIM_MAX)
            return false;
        ret_schema->layers[i] = (struct kv_layer_schema){
            .kind = (uint8_t)layer->kind,
            .dtype = (uint8_t)layer->dtype,
            .n_kv_heads = (uint16_t)layer->n_kv_heads,
            .d_k = (uint16_t)layer->d_k,
            .d_v = (uint16_t)layer->d_v,
        };
    }
    return kv_schema_finish(ret_schema, NULL, 0) == KV_OK;
}

static bool read_recent(const struct kvc_node *node,
                        const Kvpb__OpenReply *reply,
                        struct kvc_resumed *resumed)
{
    size_t first = reply->n_recent > KVC_LOG_ENTRIES ? reply->n_recent - KVC_LOG_ENTRIES : 0;

    resumed->n_recent = 0;
    for (size_t i = first; i < reply->n_recent; i++) {
        const Kvpb__Lifecycle *operation = reply->recent[i];
        struct kvc_log_entry *entry = &resumed->recent[resumed->n_recent++];

        *entry = (struct kvc_log_entry){
            .op_id = operation->op_id,
            .type = operation->kind,
            .generation = operation->generation,
            .tokens = operation->tokens,
            .writer = operation->writer,
            .fresh = node->version >= KV_WIRE_VERSION_PREFIXES
                         ? kvc_client_draw_writer(node->client)
                         : 0,
        };
        if (entry->type == KV_OP_FORK) {
            if (operation->child_session_id.len != 16 || operation->child_token.len != 16)
                return false;
            memcpy(entry->child_id.bytes, operation->child_session_id.data, 16);
            memcpy(entry->child_token.bytes, operation->child_token.data, 16);
        } else if (entry->type != KV_OP_TRUNCATE) {
            return false;
        }
    }
    return true;
}

/* Creates the session from the first reply and adds the state of the other nodes.  *ret_fault:
 * why it failed. */
static kv_status_t merge(struct kv_op *op,
                         const struct kvc_node *node,
                         const Kvpb__OpenReply *reply,
                         const char **ret_fault)
{
    const Kvpb__Placement *placement = reply->placement;
    struct kv_client *client = op->client;
    struct kv_session *session = op->result;
    kv_schema_t schema;

    *ret_fault = NULL;
    if (placement == NULL || reply->fingerprint.len != 16 || !read_schema(reply, &schema))
        *ret_fault = "malformed reply";
    else if (placement->epoch != client->map->epoch)
        *ret_fault = "the session was opened with another list of nodes";
    else if (placement->root != resume_of(op)->ticket.root)
        *ret_fault = "the ticket's root is not the session's";
    else if (placement->n_nodes != resume_of(op)->row.n_nodes ||
             placement->position != kvc_row_position(&resume_of(op)->row, node))
        *ret_fault = "the node has another place in the session's row";
    else if (session != NULL &&
             (memcmp(session->fingerprint.bytes, reply->fingerprint.data, 16) != 0 ||
              memcmp(&session->schema, &schema, sizeof(schema)) != 0))
        *ret_fault = "the nodes disagree on the session";
    if (*ret_fault != NULL)
        return KV_INVALID;
    if (session == NULL) {
        session = op->result = kvc_session_make(client, &schema, &resume_of(op)->ticket);
        if (session == NULL) {
            *ret_fault = "out of memory";
            return KV_NO_MEMORY;
        }
        session->lease_ms = UINT32_MAX;
        memcpy(session->fingerprint.bytes, reply->fingerprint.data, 16);
    }
    if (reply->lease_ms < session->lease_ms)
        session->lease_ms = reply->lease_ms;
    if (reply->tokens_max > 0 && reply->tokens_max < session->tokens_max)
        session->tokens_max = reply->tokens_max;
    if (reply->shared_tokens > session->shared_tokens)
        session->shared_tokens = reply->shared_tokens;
    if (!kvc_session_hear_writers(session, kvc_row_position(&session->row, node), reply)) {
        *ret_fault = "out of memory";
        return KV_NO_MEMORY;
    }
    return KV_OK;
}

/* A lagging node will have the writers that what it missed leads to.  Returns false if out of
 * memory. */
static bool advance_writers(struct kv_session *session, uint32_t position, uint32_t generation)
{
    for (uint32_t i = 0; i < session->n_log; i++) {
        const struct kvc_log_entry *entry = &session->log[i];
        struct kv_writers *before = session->writers[position];

        if (entry->generation < generation || entry->type != KV_OP_TRUNCATE)
            continue;
        session->writers[position] = kv_writers_create(before, entry->tokens, entry->writer);
        if (session->writers[position] == NULL) {
            session->writers[position] = before;
            return false;
        }
        free(before);
    }
    return true;
}

/* Returns the id of the operation that led to the node's generation; 0: there was none. */
static uint64_t last_op(const struct kvc_resumed *node)
{
    return node->n_recent > 0 ? node->recent[node->n_recent - 1].op_id : 0;
}

/* Nodes of one generation have come to it in one way, and writers are those that it leads to.
 * Returns false if the operation has failed. */
static bool settle(struct kv_op *op, const struct kvc_resumed *latest)
{
    struct kv_session *session = op->result;
    const struct kvc_resumed *nodes = resume_of(op)->nodes;

    for (uint32_t i = 0; i < session->row.n_nodes; i++) {
        if (!advance_writers(session, i, nodes[i].generation)) {
            kvc_op_fail(op, NULL, NULL, KV_NO_MEMORY, "out of memory");
            return false;
        }
        if (nodes[i].generation != latest->generation || last_op(&nodes[i]) == last_op(latest))
            continue;
        kvc_op_fail(op, kvc_session_node(session, i), NULL, KV_CONFLICT,
                    "the nodes disagree on how the session came to generation %u: two clients "
                    "truncated it at once, and each reached a part of the nodes; close it",
                    latest->generation);
        return false;
    }
    return true;
}

/* All nodes have replied: lagging ones catch up with the latest generation. */
static void reconcile(struct kv_op *op)
{
    struct kv_session *session = op->result;
    struct kvc_resumed *nodes = resume_of(op)->nodes;
    uint32_t latest_node = 0, lagging_node = 0;

    for (uint32_t i = 0; i < session->row.n_nodes; i++) {
        session->nodes[i] = (struct kvc_session_node){
            .index = nodes[i].index,
            .generation = nodes[i].generation,
            .incarnation = nodes[i].incarnation,
        };
        if (nodes[i].tokens < op->tokens)
            op->tokens = nodes[i].tokens;
        if (nodes[i].generation > nodes[latest_node].generation)
            latest_node = i;
        if (nodes[i].generation < nodes[lagging_node].generation)
            lagging_node = i;
    }
    if (session->tokens_max < op->tokens)
        op->tokens = session->tokens_max;
    session->generation = nodes[latest_node].generation;
    for (uint32_t i = 0; i < nodes[latest_node].n_recent; i++)
        if (nodes[latest_node].recent[i].generation >= nodes[lagging_node].generation &&
            nodes[latest_node].recent[i].generation < session->generation)
            kvc_session_log(session, &nodes[latest_node].recent[i]);
    if (session->n_log != session->generation - nodes[lagging_node].generation) {
        kvc_op_fail(
            op, NULL, NULL, KV_STALE,
            "node %s is at generation %u, node %s at %u, and the log does not reach back",
            kvc_session_node(session, lagging_node)->address, nodes[lagging_node].generation,
            kvc_session_node(session, latest_node)->address, nodes[latest_node].generation);
        return;
    }
    if (!settle(op, &nodes[latest_node]) || session->n_log == 0)
        return;
    op->phase = 1;
    op->needs_current = true;
    kvc_op_restart(op);
}

/* While a node caught up, another client advanced it beyond the latest generation. */
static void stale_resume(struct kv_op *op)
{
    kv_session_free(op->result);
    op->result = NULL;
    op->needs_current = false;
    op->phase = 0;
    resume_of(op)->is_stale = false;
    op->tokens = UINT32_MAX;
    memset(resume_of(op)->nodes, 0, resume_of(op)->row.n_nodes * sizeof(*resume_of(op)->nodes));
}

/* The nodes have caught up: a truncate may have made the session shorter. */
static void relength_done(struct kvc_call *call,
                          kv_status_t status,
                          const ProtobufCMessage *message,
                          const char *detail)
{
    const Kvpb__SessionReply *reply = (const Kvpb__SessionReply *)message;
    struct kv_op *op = kvc_call_op_if_ok(call, status, detail);

    if (op == NULL)
        return;
    if (reply->generation != op->result->generation)
        resume_of(op)->is_stale = true;
    else if (reply->tokens < op->tokens)
        op->tokens = reply->tokens;
    if (op->owner.n_calls == 0 && resume_of(op)->is_stale) {
        stale_resume(op);
        kvc_op_restart(op);
    }
}

static void resume_done(struct kvc_call *call,
                        kv_status_t status,
                        const ProtobufCMessage *message,
                        const char *detail)
{
    const Kvpb__OpenReply *reply = (const Kvpb__OpenReply *)message;
    struct kvc_node *node = call->node;
    struct kv_op *op = kvc_call_op_if_ok(call, status, detail);
    const char *fault;

    if (op == NULL)
        return;
    struct kvc_resumed *resumed =
        &resume_of(op)->nodes[kvc_row_position(&resume_of(op)->row, node)];

    status = merge(op, node, reply, &fault);
    if (status == KV_OK && !read_recent(node, reply, resumed)) {
        status = KV_INVALID;
        fault = "invalid log of lifecycle operations";
    }
    if (status != KV_OK) {
        kvc_op_fail(op, node, NULL, status, "%s", fault);
        return;
    }
    resumed->index = reply->session_index;
    resumed->generation = reply->generation;
    resumed->incarnation = node->incarnation;
    resumed->tokens = reply->tokens;
    if (op->owner.n_calls == 0)
        reconcile(op);
}

static void start_resume(struct kv_op *op)
{
    Kvpb__ResumeRequest request = KVPB__RESUME_REQUEST__INIT;

    if (op->phase == 1) {
        kvc_ask_lengths(op, op->result, false, relength_done);
        return;
    }
    request.session_id = kvc_binary(&resume_of(op)->ticket.session_id);
    request.token = kvc_binary(&resume_of(op)->ticket.token);
    for (uint32_t i = 0; i < resume_of(op)->row.n_nodes && op->stage == KVC_STAGE_RUNNING;
         i++) {
        struct kvc_node *node = kvc_row_node(op->client, &resume_of(op)->row, i);
        kv_status_t status =
            kvc_call_begin(node, &op->owner, NULL, KV_OP_RESUME, &request.base, resume_done);

        if (status != KV_OK)
            kvc_op_fail(op, node, NULL, status, "cannot send resume");
    }
}

static void ended_resume(struct kv_op *op)
{
    struct kv_session *session = op->result;

    if (op->status == KV_OK) {
        kvc_session_leased(session);
    } else {
        op->result = NULL;
        kv_session_free(session);
    }
    free(resume_of(op)->nodes);
    resume_of(op)->nodes = NULL;
}

/* The operation has no session before the first reply. */
static void describe_resume(const struct kv_op *op,
                            const struct kvc_request *request,
                            char *text,
                            size_t text_bytes)
{
    char id[KVC_SESSION_TEXT];

    (void)request;
    snprintf(text, text_bytes, "session %s",
             kvc_session_text(&resume_of(op)->ticket.session_id, id));
}

static const struct kvc_op_type resume_type = {
    .name = "resume",
    .id = KV_OP_RESUME,
    .start = start_resume,
    .stale = stale_resume,
    .ended = ended_resume,
    .describe = describe_resume,
};

kv_status_t kv_resume_begin(struct kv_client *client,
                            const struct kv_ticket *ticket,
                            uint32_t deadline_ms,
                            struct kv_op **ret_op)
{
    KVC_ENTER(client);
    struct kv_placement_row *row;
    struct kv_op *op;
    kv_status_t status = kvc_op_begin(client, &resume_type, NULL, NULL, deadline_ms, &op);

    if (status != KV_OK)
        return status;
    op->tokens = UINT32_MAX;
    row = &resume_of(op)->row;
    kvc_client_row(client, ticket->root, row);
    resume_of(op)->ticket = *ticket;
    resume_of(op)->nodes = calloc(row->n_nodes, sizeof(*resume_of(op)->nodes));
    if (resume_of(op)->nodes == NULL) {
        kvc_op_discard(op);
        return kvc_set_error(&client->loop, KV_NO_MEMORY, "resume: out of memory");
    }
    kvc_op_require_row(op, row);
    return kvc_op_submit(op, ret_op);
}
