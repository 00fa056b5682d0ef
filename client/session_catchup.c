/* Fork, truncate, and what brings nodes up to date that missed one.
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
#include "client/client.h"

#include "proto/kvstore.pb-c.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static ProtobufCBinaryData binary(const struct kv_id128 *id)
{
    return (ProtobufCBinaryData){.data = (uint8_t *)id->bytes, .len = sizeof(id->bytes)};
}

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
                              struct kv_op *op,
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
    return kv_call_begin(remote, op, session, entry->kind,
                         is_fork ? &fork.base : &truncate.base, done);
}

/* ---- catching up ------------------------------------------------------------------------- */

/* The operations that wait for the node to catch up do so in vain. */
static void fail_waiting(struct kv_session *session,
                         const struct kv_remote *remote,
                         kv_status_t status,
                         const char *detail)
{
    struct kv_client *client = session->client;
    struct kv_list *link, *follow;

    /* One that may begin anew finds out how far the node is when it looks again. */
    client->must_pump = true;
    /* A resume that fails frees the session: it is only a name in here. */
    KV_LIST_EACH(link, follow, &client->ops) {
        struct kv_op *op = KV_LIST_ENTRY(link, struct kv_op, of_client);

        if (op->stage == KV_STAGE_PREPARING && op->needs_current &&
            (op->session == session || op->result == session) &&
            kv_op_needs(op, remote->index) &&
            (status != KV_STALE || op->kind->overtaken == NULL))
            kv_op_fail(op, remote, NULL, status, "it cannot catch up: %s", detail);
    }
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
    } else if (status == KV_NOT_FOUND) {
        /* It had forked, and the child has gone since; or the session has.  Who waits looks
         * again, and the survey says which. */
        session->client->must_pump = true;
    } else {
        fail_waiting(session, call->remote, status != KV_OK ? status : KV_CORRUPT, detail);
    }
}

/* The node may have done what it did not get to answer to. */
static void surveyed(struct kv_call *call,
                     kv_status_t status,
                     const ProtobufCMessage *message,
                     const char *detail)
{
    const Kvpb__SessionReply *reply = (const Kvpb__SessionReply *)message;
    struct kv_session *session = call->session;
    const struct kv_lifecycle *entry;
    struct kv_session_node *node;

    if (session == NULL)
        return;
    node = &session->nodes[call->remote->index];
    node->is_catching_up = false;
    if (status == KV_OK && reply->generation != node->generation) {
        node->generation = reply->generation;
        kv_session_trim(session);
        return;
    }
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
    Kvpb__SessionRequest request = KVPB__SESSION_REQUEST__INIT;
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
    request.session_index = node->index;
    request.token = binary(&session->ticket.token);
    status = kv_call_begin(remote, NULL, session, KV_OP_SESSION, &request.base, surveyed);
    if (status != KV_OK) {
        snprintf(detail, detail_bytes, "it cannot be asked for its generation");
        return status;
    }
    node->is_catching_up = true;
    return KV_IN_PROGRESS;
}

/* ---- fork and truncate ------------------------------------------------------------------- */

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
    struct kv_op *op = call->op;
    struct kv_session_node *node;

    if (op == NULL) {
        if (status == KV_OK && call->id == KV_OP_FORK)
            drop_child(call, reply);
        return;
    }
    node = &op->session->nodes[remote->index];
    if (status == KV_OK && reply->generation != op->lifecycle.entry.generation + 1) {
        status = KV_STALE;
        detail = "another client has changed the session";
    }
    if (status != KV_OK) {
        op->lifecycle.n_refused += is_refusal(status);
        kv_op_note(op, remote, status, detail);
        return;
    }
    op->lifecycle.n_acked++;
    node->generation = reply->generation;
    if (op->result != NULL) {
        op->result->nodes[remote->index] = (struct kv_session_node){
            .index = reply->child_index,
            .generation = reply->child_generation,
            .incarnation = remote->incarnation,
        };
        if (op->lifecycle.n_acked == 1)
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
    child->writers = kv_writers_create(session->writers, op->lifecycle.entry.tokens,
                                       op->lifecycle.entry.writer);
    if (child->writers == NULL) {
        kv_session_free(child);
        return NULL;
    }
    kv_random_fill(&client->random, &child->ticket.session_id, sizeof(struct kv_id128));
    kv_random_fill(&client->random, &child->ticket.token, sizeof(struct kv_id128));
    child->fingerprint = session->fingerprint;
    child->lease_ms = session->lease_ms;
    child->tokens_max = session->tokens_max;
    op->lifecycle.entry.child_id = child->ticket.session_id;
    op->lifecycle.entry.child_token = child->ticket.token;
    return child;
}

/* Whose rows the child's are, or those that will follow in the session.  false: the operation
 * has failed. */
static bool choose_writer(struct kv_op *op)
{
    const struct kv_session *session = op->session;
    struct kv_lifecycle *entry = &op->lifecycle.entry;
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
        op->lifecycle.writers =
            kv_writers_create(session->writers, entry->tokens, entry->writer);
        is_made = op->lifecycle.writers != NULL;
    }
    if (!is_made)
        kv_op_fail(op, NULL, NULL, KV_NO_MEMORY, "out of memory");
    return is_made;
}

/* All nodes are at the generation, and their lengths are known. */
static void carry_out(struct kv_op *op)
{
    struct kv_session *session = op->session;
    struct kv_lifecycle *entry = &op->lifecycle.entry;

    if (entry->kind == KV_OP_FORK) {
        if (entry->tokens > op->lifecycle.least) {
            kv_op_fail(op, NULL, NULL, KV_INVALID, "%u tokens, %u are committed", entry->tokens,
                       op->lifecycle.least);
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
    op->lifecycle.is_logged = true;
    for (uint32_t i = 0; i < op->client->n_remotes; i++) {
        struct kv_remote *remote = &op->client->remotes[i];
        kv_status_t status = kv_lifecycle_send(session, remote, op, entry, stage_done);

        if (status != KV_OK) {
            op->lifecycle.n_refused++;
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
    struct kv_op *op = call->op;

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
    if (reply->tokens < op->lifecycle.least)
        op->lifecycle.least = reply->tokens;
    if (op->n_calls == 0)
        carry_out(op);
}

static void start_lifecycle(struct kv_op *op)
{
    struct kv_session *session = op->session;
    Kvpb__SessionRequest request = KVPB__SESSION_REQUEST__INIT;

    op->lifecycle.least = UINT32_MAX;
    for (uint32_t i = 0; i < op->client->n_remotes && op->stage == KV_STAGE_RUNNING; i++) {
        struct kv_remote *remote = &op->client->remotes[i];
        kv_status_t status;

        request.session_index = session->nodes[i].index;
        request.token = binary(&session->ticket.token);
        status = kv_call_begin(remote, op, session, KV_OP_SESSION, &request.base, lengths_done);
        if (status != KV_OK)
            kv_op_fail(op, remote, NULL, status, "it cannot be sent");
    }
}

/* The operation was done, or may have been on some node. */
static void advance_writers(struct kv_op *op)
{
    struct kv_session *session = op->session;
    const struct kv_lifecycle *entry = &op->lifecycle.entry;

    if (entry->kind == KV_OP_FORK) {
        if (entry->tokens > session->shared_tokens)
            session->shared_tokens = entry->tokens;
        return;
    }
    if (entry->writer != kv_writers_own(session->writers))
        session->shared_tokens = 0;
    free(session->writers);
    session->writers = op->lifecycle.writers;
    op->lifecycle.writers = NULL;
}

static void ended_lifecycle(struct kv_op *op)
{
    struct kv_session *session = op->session;
    struct kv_session *child = op->result;
    bool is_done = op->status == KV_OK;

    if (op->lifecycle.is_logged) {
        struct kv_lifecycle *entry = &session->log[session->n_log - 1];

        if (!is_done && op->lifecycle.n_refused == op->client->n_remotes) {
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
    free(op->lifecycle.writers);
    op->lifecycle.writers = NULL;
    if (is_done) {
        op->tokens = op->lifecycle.entry.tokens;
        if (child != NULL) {
            child->renew_us = op->client->now_us + (uint64_t)child->lease_ms * 1000 / 3;
            kv_client_timer(op->client, child->renew_us);
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

static void
describe(const struct kv_op *op, const struct kv_trip *trip, char *text, size_t text_bytes)
{
    const struct kv_id128 *id =
        op->session != NULL ? &op->session->ticket.session_id : &op->resume.ticket.session_id;
    char session[KV_SESSION_TEXT];

    (void)trip;
    snprintf(text, text_bytes, "session %s", kv_session_text(id, session));
}

static const struct kv_op_kind fork_kind = {
    .name = "fork",
    .id = KV_OP_FORK,
    .is_exclusive = true,
    .needs_current = true,
    .start = start_lifecycle,
    .ended = ended_lifecycle,
    .describe = describe,
};

static const struct kv_op_kind truncate_kind = {
    .name = "truncate",
    .id = KV_OP_TRUNCATE,
    .is_exclusive = true,
    .needs_current = true,
    .start = start_lifecycle,
    .ended = ended_lifecycle,
    .describe = describe,
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
        return kv_client_refuse(session->client, KV_INVALID,
                                "%s: token %u is beyond the "
                                "session's %u",
                                kind->name, tokens, session->tokens_max);
    status = kv_op_begin(session->client, kind, session, NULL, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    op->lifecycle.entry.kind = kind->id;
    op->lifecycle.entry.tokens = tokens;
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

/* ---- resume ------------------------------------------------------------------------------ */

/* What a node knows of a session that is resumed. */
struct kv_resumed {
    uint32_t index, generation, incarnation, tokens;
    uint32_t n_recent;
    struct kv_lifecycle recent[KV_LIFECYCLE_LOG]; /* oldest first */
};

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

static bool read_recent(const Kvpb__OpenReply *reply, struct kv_resumed *resumed)
{
    size_t first = reply->n_recent > KV_LIFECYCLE_LOG ? reply->n_recent - KV_LIFECYCLE_LOG : 0;

    resumed->n_recent = 0;
    for (size_t i = first; i < reply->n_recent; i++) {
        const Kvpb__Lifecycle *operation = reply->recent[i];
        struct kv_lifecycle *entry = &resumed->recent[resumed->n_recent++];

        *entry = (struct kv_lifecycle){
            .op_id = operation->op_id,
            .kind = operation->kind,
            .generation = operation->generation,
            .tokens = operation->tokens,
            .writer = operation->writer,
        };
        if (entry->kind == KV_OP_FORK) {
            if (operation->child_session_id.len != 16 || operation->child_token.len != 16)
                return false;
            memcpy(entry->child_id.bytes, operation->child_session_id.data, 16);
            memcpy(entry->child_token.bytes, operation->child_token.data, 16);
        } else if (entry->kind != KV_OP_TRUNCATE) {
            return false;
        }
    }
    return true;
}

/* Takes whose rows the session has from the node with the latest generation; all that have that
 * must say the same.  *ret_fault: why it cannot. */
static kv_status_t
merge_writers(struct kv_session *session, const Kvpb__OpenReply *reply, const char **ret_fault)
{
    const size_t n_runs = reply->n_writers;
    struct kv_writers *told;

    if (session->writers != NULL && reply->generation < session->generation)
        return KV_OK;
    told = malloc(sizeof(*told) + n_runs * sizeof(told->runs[0]));
    if (told == NULL) {
        *ret_fault = "out of memory";
        return KV_NO_MEMORY;
    }
    told->n_runs = (uint32_t)n_runs;
    for (size_t i = 0; i < n_runs; i++)
        told->runs[i] = (struct kv_writer_run){.writer = reply->writers[i]->writer,
                                               .end = reply->writers[i]->end};
    if (session->writers != NULL && reply->generation == session->generation &&
        !kv_writers_same(told, session->writers)) {
        free(told);
        *ret_fault = "the nodes tell different stories of the session's writers";
        return KV_INVALID;
    }
    free(session->writers);
    session->writers = told;
    session->generation = reply->generation;
    return KV_OK;
}

/* Makes the session of the first reply, and takes from the others what they add.  *ret_fault:
 * why not. */
static kv_status_t merge(struct kv_op *op,
                         const struct kv_remote *remote,
                         const Kvpb__OpenReply *reply,
                         const char **ret_fault)
{
    const Kvpb__Placement *placement = reply->placement;
    struct kv_client *client = op->client;
    struct kv_session *session = op->result;
    kv_schema_t schema;

    *ret_fault = NULL;
    if (placement == NULL || reply->fingerprint.len != 16 || !read_schema(reply, &schema))
        *ret_fault = "an answer that does not describe a session";
    else if (placement->n_nodes != client->n_remotes ||
             placement->epoch != client->placement.epoch)
        *ret_fault = "the session was opened with another number of nodes";
    else if (placement->node_index != remote->index)
        *ret_fault = "the session was opened with the nodes in another order";
    else if (session != NULL &&
             (session->root != placement->root ||
              memcmp(session->fingerprint.bytes, reply->fingerprint.data, 16) != 0 ||
              memcmp(&session->schema, &schema, sizeof(schema)) != 0))
        *ret_fault = "the nodes tell different stories of the session";
    if (*ret_fault != NULL)
        return KV_INVALID;
    if (session == NULL) {
        session = op->result = kv_session_make(client, &schema, placement->root);
        if (session == NULL) {
            *ret_fault = "out of memory";
            return KV_NO_MEMORY;
        }
        session->ticket = op->resume.ticket;
        session->lease_ms = UINT32_MAX;
        memcpy(session->fingerprint.bytes, reply->fingerprint.data, 16);
    }
    if (reply->lease_ms < session->lease_ms)
        session->lease_ms = reply->lease_ms;
    if (reply->tokens_max > 0 && reply->tokens_max < session->tokens_max)
        session->tokens_max = reply->tokens_max;
    if (reply->shared_tokens > session->shared_tokens)
        session->shared_tokens = reply->shared_tokens;
    return merge_writers(session, reply, ret_fault);
}

/* All nodes have answered: those that lag are brought to the generation of the others. */
static void settle(struct kv_op *op)
{
    struct kv_session *session = op->result;
    struct kv_resumed *nodes = op->resume.nodes;
    uint32_t leader = 0, laggard = 0;

    for (uint32_t i = 0; i < op->client->n_remotes; i++) {
        session->nodes[i] = (struct kv_session_node){
            .index = nodes[i].index,
            .generation = nodes[i].generation,
            .incarnation = nodes[i].incarnation,
        };
        if (nodes[i].tokens < op->tokens)
            op->tokens = nodes[i].tokens;
        if (nodes[i].generation > nodes[leader].generation)
            leader = i;
        if (nodes[i].generation < nodes[laggard].generation)
            laggard = i;
    }
    if (session->tokens_max < op->tokens)
        op->tokens = session->tokens_max;
    session->generation = nodes[leader].generation;
    for (uint32_t i = 0; i < nodes[leader].n_recent; i++)
        if (nodes[leader].recent[i].generation >= nodes[laggard].generation &&
            nodes[leader].recent[i].generation < session->generation)
            kv_session_log(session, &nodes[leader].recent[i]);
    if (session->n_log != session->generation - nodes[laggard].generation) {
        kv_op_fail(op, NULL, NULL, KV_STALE,
                   "node %s is at generation %u, node %s at %u, and no log says how to go on",
                   op->client->remotes[laggard].address, nodes[laggard].generation,
                   op->client->remotes[leader].address, nodes[leader].generation);
        return;
    }
    if (session->n_log == 0)
        return;
    op->phase = 1;
    op->needs_current = true;
    kv_op_again(op);
}

/* While a node was to catch up, another client took it beyond what the others had told. */
static void overtaken_resume(struct kv_op *op)
{
    kv_session_free(op->result);
    op->result = NULL;
    op->needs_current = false;
    op->phase = 0;
    op->resume.is_overtaken = false;
    op->tokens = UINT32_MAX;
    memset(op->resume.nodes, 0, op->client->n_remotes * sizeof(*op->resume.nodes));
}

/* The nodes have caught up: a truncate may have made the session shorter. */
static void relength_done(struct kv_call *call,
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
    else if (reply->generation != op->result->generation)
        op->resume.is_overtaken = true;
    else if (reply->tokens < op->tokens)
        op->tokens = reply->tokens;
    if (status == KV_OK && op->n_calls == 0 && op->resume.is_overtaken) {
        overtaken_resume(op);
        kv_op_again(op);
    }
}

static void ask_lengths(struct kv_op *op)
{
    Kvpb__SessionRequest request = KVPB__SESSION_REQUEST__INIT;
    const struct kv_session *session = op->result;

    request.token = binary(&session->ticket.token);
    for (uint32_t i = 0; i < op->client->n_remotes && op->stage == KV_STAGE_RUNNING; i++) {
        kv_status_t status;

        request.session_index = session->nodes[i].index;
        status = kv_call_begin(&op->client->remotes[i], op, NULL, KV_OP_SESSION, &request.base,
                               relength_done);
        if (status != KV_OK)
            kv_op_fail(op, &op->client->remotes[i], NULL, status, "it cannot be sent");
    }
}

static void resume_done(struct kv_call *call,
                        kv_status_t status,
                        const ProtobufCMessage *message,
                        const char *detail)
{
    const Kvpb__OpenReply *reply = (const Kvpb__OpenReply *)message;
    struct kv_remote *remote = call->remote;
    struct kv_op *op = call->op;
    const char *fault;

    if (op == NULL)
        return;
    if (status != KV_OK) {
        kv_op_fail(op, remote, NULL, status, "%s", detail);
        return;
    }
    struct kv_resumed *resumed = &op->resume.nodes[remote->index];

    status = merge(op, remote, reply, &fault);
    if (status == KV_OK && !read_recent(reply, resumed)) {
        status = KV_INVALID;
        fault = "a log of operations that are none";
    }
    if (status != KV_OK) {
        kv_op_fail(op, remote, NULL, status, "%s", fault);
        return;
    }
    resumed->index = reply->session_index;
    resumed->generation = reply->generation;
    resumed->incarnation = remote->incarnation;
    resumed->tokens = reply->tokens;
    if (op->n_calls == 0)
        settle(op);
}

static void start_resume(struct kv_op *op)
{
    Kvpb__ResumeRequest request = KVPB__RESUME_REQUEST__INIT;
    struct kv_client *client = op->client;

    if (op->phase == 1) {
        ask_lengths(op);
        return;
    }
    request.session_id = binary(&op->resume.ticket.session_id);
    request.token = binary(&op->resume.ticket.token);
    for (uint32_t i = 0; i < client->n_remotes && op->stage == KV_STAGE_RUNNING; i++) {
        kv_status_t status = kv_call_begin(&client->remotes[i], op, NULL, KV_OP_RESUME,
                                           &request.base, resume_done);

        if (status != KV_OK)
            kv_op_fail(op, &client->remotes[i], NULL, status, "resume cannot be sent");
    }
}

static void ended_resume(struct kv_op *op)
{
    struct kv_session *session = op->result;

    if (op->status == KV_OK) {
        session->renew_us = op->client->now_us + (uint64_t)session->lease_ms * 1000 / 3;
        kv_client_timer(op->client, session->renew_us);
    } else {
        op->result = NULL;
        kv_session_free(session);
    }
    free(op->resume.nodes);
    op->resume.nodes = NULL;
}

static const struct kv_op_kind resume_kind = {
    .name = "resume",
    .id = KV_OP_RESUME,
    .start = start_resume,
    .overtaken = overtaken_resume,
    .ended = ended_resume,
    .describe = describe,
};

kv_status_t kv_resume_begin(struct kv_client *client,
                            const struct kv_ticket *ticket,
                            uint32_t deadline_ms,
                            struct kv_op **ret_op)
{
    struct kv_op *op;
    kv_status_t status = kv_op_begin(client, &resume_kind, NULL, NULL, deadline_ms, &op);

    if (status != KV_OK)
        return status;
    op->tokens = UINT32_MAX;
    op->resume.ticket = *ticket;
    op->resume.nodes = calloc(client->n_remotes, sizeof(*op->resume.nodes));
    if (op->resume.nodes == NULL) {
        kv_op_discard(op);
        return kv_client_refuse(client, KV_NO_MEMORY, "resume: out of memory");
    }
    kv_op_need_all(op);
    return kv_op_go(op, ret_op);
}
