/* Open: creates a session on every node of its row, or on none.
 *
 * A node may know that the session's root has more rows than the client thought, and that the
 * session belongs on another one: it tells how many.  The open then begins again over there, with
 * another id and token, so that what a node still does for the first ones is another session.
 */
#include "client/ops/open.h"
#include "client/call.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/ops/copy.h"
#include "client/ops/match.h"
#include "client/roots.h"
#include "client/session.h"
#include "client/session_catchup.h"
#include "client/session_lease.h"
#include "client/session_private.h"
#include "client/state.h"
#include "kvserver/base/random.h"
#include "kvserver/base/writers.h"
#include "kvserver/cluster/placement.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    LOOK_PART = 8, /* of the time left may pass while it looks for where the prompt is stored */
};

struct open_part {
    struct kv_model_info *model;
    bool has_prompt; /* its first block has a name */
    uint64_t prompt_root;
    uint32_t branch, n_rows; /* of the prompt's root; n_rows 0: it has one row and no other */
    struct kv_id128 *names;  /* (n_names) of its blocks; owned */
    uint32_t n_names;
    uint32_t n_match; /* of them, may be attached */
    uint64_t writer;
    uint32_t most;       /* tokens that a node has attached */
    uint32_t own_branch; /* the whole prompt's; `branch` may be that of a beginning of it */
    bool has_looked;     /* for where it is stored */
    uint32_t n_places;
    struct kvc_match_place places[KVC_MATCH_PLACES]; /* (n_places) where it may be */
};
static_assert(sizeof(struct open_part) <= KVC_OP_STATE_BYTES, "an operation has room for it");

static struct open_part *open_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

static void draw_ticket(const struct kv_op *op, struct kv_ticket *ret_ticket)
{
    const struct open_part *part = open_of(op);

    kvc_ticket_draw(op->client, ret_ticket);
    if (part->has_prompt)
        ret_ticket->root = kv_placement_branch_root(part->prompt_root, part->branch,
                                                    part->n_rows > 0 ? part->n_rows : 1);
}

/* No node has replied: their limits and generations are not known. */
static void reset(struct kv_op *op)
{
    struct kv_session *session = op->result;

    session->lease_ms = UINT32_MAX;
    op->tokens = UINT32_MAX;
    open_of(op)->most = 0;
    session->tokens_max =
        op->owner.tokens_max_wanted > 0 ? op->owner.tokens_max_wanted : KV_TOKENS_MAX;
    op->phase = 0;
    memset(op->required, 0, sizeof(op->required));
    kvc_op_require_row(op, &session->row);
}

/* The root has more rows than were known.  Each time there must be more, so this ends. */
static void move(struct kv_op *op, const struct kvc_node *node, const Kvpb__OpenReply *reply)
{
    struct open_part *part = open_of(op);
    const uint32_t n_rows = reply != NULL ? reply->n_rows : 0;
    struct kv_ticket ticket;

    if (!kv_placement_is_row_count(n_rows) || n_rows <= part->n_rows) {
        kvc_op_fail(op, node, NULL, KV_CORRUPT, "moved: root %016llx: %u rows, after %u",
                    (unsigned long long)part->prompt_root, n_rows, part->n_rows);
        return;
    }
    kvc_roots_learn(&op->client->roots, part->prompt_root, n_rows, op->client->loop.now_us);
    part->n_rows = n_rows;
    part->branch = part->own_branch; /* a beginning's row may have too many sessions already */
    kvc_op_forget_calls(op);
    kvc_session_withdraw(op->result);
    draw_ticket(op, &ticket);
    kvc_session_place(op->result, &ticket);
    reset(op);
    kvc_writers_free(op->result->writers);
    if (kvc_writers_make(op->result, NULL, 0, part->writer, op->result->writers) != KV_OK) {
        kvc_op_fail(op, NULL, NULL, KV_NO_MEMORY, "out of memory");
        return;
    }
    kvc_op_restart(op);
}

/* A node that has opened the session may know of more rows for the next one.  If it says as many
 * as the client, it may have them from the client: that is no news, and does not keep the client
 * from forgetting them. */
static void learn(struct kv_op *op, const struct kvc_node *node, uint32_t n_rows)
{
    const struct open_part *part = open_of(op);

    if (part->n_rows == 0 || n_rows == 0) /* of an older version */
        return;
    if (!kv_placement_is_row_count(n_rows) || n_rows < part->n_rows)
        kvc_op_fail(op, node, NULL, KV_CORRUPT, "root %016llx: %u rows, after %u",
                    (unsigned long long)part->prompt_root, n_rows, part->n_rows);
    else if (n_rows > part->n_rows)
        kvc_roots_learn(&op->client->roots, part->prompt_root, n_rows, op->client->loop.now_us);
}

/* What the node has attached.  Returns false if the operation has failed. */
static bool attach(struct kv_op *op, const struct kvc_node *node, const Kvpb__OpenReply *reply)
{
    struct open_part *part = open_of(op);
    struct kv_session *session = op->result;
    const uint32_t position = kvc_row_position(&session->row, node);
    const uint64_t limit = part->n_match * (uint64_t)KV_BLOCK_TOKENS;

    if (position >= session->schema.n_units) /* it has no units of the session */
        return true;
    if (part->n_match == 0 || node->version < KV_WIRE_VERSION_PREFIXES) {
        op->tokens = 0;
        return true;
    }
    if (reply->tokens < op->tokens)
        op->tokens = reply->tokens;
    if (reply->tokens > part->most)
        part->most = reply->tokens;
    if (reply->tokens == 0)
        return true;
    if (reply->tokens > limit || reply->tokens % KV_BLOCK_TOKENS != 0) {
        kvc_op_fail(op, node, NULL, KV_CORRUPT, "%u tokens matched, of %llu", reply->tokens,
                    (unsigned long long)limit);
        return false;
    }
    if (reply->n_writers == 0 || reply->writers[reply->n_writers - 1]->writer != part->writer) {
        kvc_op_fail(op, node, NULL, KV_CORRUPT, "%u tokens matched, with %zu runs of writers",
                    reply->tokens, reply->n_writers);
        return false;
    }
    if (!kvc_session_hear_writers(session, position, reply)) {
        kvc_op_fail(op, NULL, NULL, KV_NO_MEMORY, "out of memory");
        return false;
    }
    return true;
}

static void levelled(struct kvc_call *call,
                     kv_status_t status,
                     const ProtobufCMessage *message,
                     const char *detail)
{
    const Kvpb__OpenReply *reply = (const Kvpb__OpenReply *)message;
    struct kv_op *op = kvc_call_op_if_ok(call, status, detail);

    if (op == NULL)
        return;
    kvc_session_on(op->result, call->node)->generation = reply->generation;
    if (reply->generation != op->result->generation)
        kvc_op_fail(op, call->node, NULL, KV_CORRUPT, "generation %u after a truncate, not %u",
                    reply->generation, op->result->generation);
}

/* All nodes have opened the session.  If some have attached more tokens than others, all keep what
 * all have: a first truncate. */
static void level(struct kv_op *op)
{
    struct kv_session *session = op->result;
    struct kv_writers *writers[KV_ROW_NODES] = {0};
    const struct kvc_log_entry entry = {.op_id = open_of(op)->writer,
                                        .type = KV_OP_TRUNCATE,
                                        .generation = session->generation,
                                        .tokens = op->tokens,
                                        .writer = open_of(op)->writer};
    kv_status_t status;

    if (op->tokens == UINT32_MAX)
        op->tokens = 0;
    if (open_of(op)->most <= op->tokens)
        return;
    status = kvc_writers_make(session, session, op->tokens, open_of(op)->writer, writers);
    if (status != KV_OK) {
        kvc_op_fail(op, NULL, NULL, status, "out of memory");
        return;
    }
    kvc_session_take_writers(session, writers);
    for (uint32_t i = 0; i < session->row.n_nodes; i++) {
        struct kvc_node *node = kvc_session_node(session, i);

        status = kvc_log_entry_send(session, node, &op->owner, &entry, levelled);
        if (status != KV_OK) {
            kvc_op_fail(op, node, NULL, status, "cannot send truncate"); /* frees the session */
            return;
        }
    }
    session->generation++;
}

static void open_done(struct kvc_call *call,
                      kv_status_t status,
                      const ProtobufCMessage *message,
                      const char *detail)
{
    const Kvpb__OpenReply *reply = (const Kvpb__OpenReply *)message;
    struct kvc_node *node = call->node;
    struct kv_op *op = kvc_call_op(call);

    if (op == NULL) {
        /* The open has failed: close what this node opened. */
        Kvpb__OpenRequest *request =
            status == KV_OK ? kvpb__open_request__unpack(NULL, call->packed_bytes, call->packed)
                            : NULL;

        if (request != NULL) {
            struct kv_id128 token;

            memcpy(token.bytes, request->token.data, sizeof(token.bytes));
            kvc_session_drop(node, reply->session_index, &token);
            kvpb__open_request__free_unpacked(request, NULL);
        }
        return;
    }
    if (status == KV_MOVED && open_of(op)->n_rows > 0) {
        move(op, node, reply);
        return;
    }
    if (status != KV_OK) {
        kvc_op_fail(op, node, NULL, status, "%s", detail);
        return;
    }
    struct kv_session *session = op->result;

    *kvc_session_on(session, node) = (struct kvc_session_node){
        .index = reply->session_index,
        .generation = reply->generation,
        .incarnation = node->incarnation,
    };
    /* The first node to reply sets the generation that all others must have. */
    if (op->phase == 0)
        session->generation = reply->generation;
    op->phase = 1;
    /* The session's limits are those of the strictest node. */
    if (reply->lease_ms < session->lease_ms)
        session->lease_ms = reply->lease_ms;
    if (reply->tokens_max > 0 && reply->tokens_max < session->tokens_max)
        session->tokens_max = reply->tokens_max;
    if (reply->generation != session->generation)
        kvc_op_fail(op, node, NULL, KV_CORRUPT, "the nodes start at different generations");
    else if (attach(op, node, reply)) {
        learn(op, node, reply->n_rows);
        if (op->stage == KVC_STAGE_RUNNING && op->owner.n_calls == 0)
            level(op);
    }
}

/* The node knows the model, which it may have known before: the session can be opened there.
 * The nodes do not wait for each other. */
static void model_done(struct kvc_call *call,
                       kv_status_t status,
                       const ProtobufCMessage *message,
                       const char *detail)
{
    Kvpb__OpenRequest request = KVPB__OPEN_REQUEST__INIT;
    Kvpb__Placement placement = KVPB__PLACEMENT__INIT;
    struct kvc_node *node = call->node;
    struct kv_op *op = kvc_call_op_if_ok(call, status, detail);
    const struct kv_session *session;
    const struct open_part *part;

    (void)message;
    if (op == NULL)
        return;
    session = op->result;
    part = open_of(op);
    request.session_id = kvc_binary(&session->ticket.session_id);
    request.token = kvc_binary(&session->ticket.token);
    request.fingerprint = kvc_binary(&session->fingerprint);
    request.lease_ms = op->owner.lease_wanted_ms;
    request.tokens_max = op->owner.tokens_max_wanted;
    request.writer = part->writer;
    placement.epoch = node->client->map->epoch;
    placement.n_nodes = session->row.n_nodes;
    placement.position = kvc_row_position(&session->row, node);
    placement.root = session->ticket.root;
    request.placement = &placement;
    request.block_names.data = (uint8_t *)part->names;
    request.block_names.len = part->n_names * sizeof(part->names[0]);
    request.match_blocks = part->n_match;
    if (part->n_rows > 0) {
        request.prompt_root = part->prompt_root;
        request.branch = part->branch;
        request.n_rows = part->n_rows;
    }
    status = kvc_call_begin(node, &op->owner, NULL, KV_OP_OPEN, &request.base, open_done);
    if (status != KV_OK)
        kvc_op_fail(op, node, NULL, status, "cannot send open");
}

static void open_models(struct kv_op *op)
{
    const struct kv_model_info *model = open_of(op)->model;
    Kvpb__ModelRequest request = KVPB__MODEL_REQUEST__INIT;
    Kvpb__Layer layers[KV_LAYERS_MAX];
    Kvpb__Layer *pointers[KV_LAYERS_MAX];

    for (uint32_t i = 0; i < model->schema.n_layers; i++) {
        const struct kv_layer_schema *layer = &model->schema.layers[i];

        kvpb__layer__init(&layers[i]);
        layers[i].kind = layer->kind;
        layers[i].dtype = layer->dtype;
        layers[i].n_kv_heads = layer->n_kv_heads;
        layers[i].d_k = layer->d_k;
        layers[i].d_v = layer->d_v;
        pointers[i] = &layers[i];
    }
    request.name = (char *)model->name;
    request.fingerprint = kvc_binary(&model->fingerprint);
    request.n_layers = model->schema.n_layers;
    request.layers = pointers;
    for (uint32_t i = 0; op->stage == KVC_STAGE_RUNNING && i < op->result->row.n_nodes; i++) {
        struct kvc_node *node = kvc_session_node(op->result, i);
        kv_status_t status =
            kvc_call_begin(node, &op->owner, NULL, KV_OP_MODEL, &request.base, model_done);

        if (status != KV_OK)
            kvc_op_fail(op, node, NULL, status, "cannot send model");
    }
}

/* ---- where the prompt is stored ---------------------------------------------------------- */

/* Returns where most of the prompt is: of equals, the whole prompt's own. */
static const struct kvc_match_place *best_place(const struct open_part *part)
{
    const struct kvc_match_place *best = &part->places[0];

    for (uint32_t i = 1; i < part->n_places; i++)
        if (part->places[i].tokens > best->tokens)
            best = &part->places[i];
    return best;
}

/* All nodes have said what they have: the open begins on the row that has most. */
static void choose_row(struct kv_op *op)
{
    struct open_part *part = open_of(op);
    struct kv_ticket ticket;

    part->has_looked = true;
    part->branch = best_place(part)->branch;
    draw_ticket(op, &ticket);
    kvc_session_place(op->result, &ticket);
    reset(op);
    kvc_op_restart(op);
}

static void looked(struct kvc_call *call,
                   kv_status_t status,
                   const ProtobufCMessage *message,
                   const char *detail)
{
    struct kv_op *op = kvc_call_op(call);
    struct open_part *part;

    (void)detail;
    if (op == NULL)
        return;
    part = open_of(op);
    (void)kvc_match_hear(call, status, (const Kvpb__MatchReply *)message, part->n_match,
                         part->places, part->n_places);
    if (op->owner.n_calls > 0)
        return;
    for (uint32_t i = 0; i < part->n_places; i++)
        if (part->places[i].tokens == UINT32_MAX)
            part->places[i].tokens = 0; /* out of memory for what was said of it */
    choose_row(op);
}

/* Asks the rows of all beginnings of the prompt.  Returns false if there is nobody to ask.  Most of
 * these nodes are not the session's: one that does not answer must not keep it from being opened. */
static bool look(struct kv_op *op)
{
    const struct kv_client *client = op->client;
    const uint64_t until_us =
        client->loop.now_us +
        kvc_loop_left_us(&client->loop, op->owner.deadline_us) / LOOK_PART;
    struct open_part *part = open_of(op);

    part->n_places = kvc_match_places(client, part->names, part->n_names, part->places);
    kvc_match_ask(op, part->places, part->n_places, part->names, part->n_match, until_us,
                  looked);
    return op->owner.n_calls > 0;
}

/* ---- the operation ----------------------------------------------------------------------- */

static void start_open(struct kv_op *op)
{
    if (open_of(op)->n_rows > 1 && open_of(op)->n_match > 0 && !open_of(op)->has_looked &&
        look(op))
        return;
    open_models(op);
}

/* A session that is not where its prompt is stored leaves the next ones to find it here, too. */
static void want_copy(const struct kv_op *op)
{
    const struct open_part *part = open_of(op);
    const uint64_t root = ((const struct kv_session *)op->result)->ticket.root;
    const struct kvc_match_place *best = best_place(part);

    if (part->has_looked && best->root != root && best->tokens > op->tokens)
        kvc_copy_want(op->client, part->model, best->root, root, part->names,
                      best->tokens / KV_BLOCK_TOKENS);
}

static void ended_open(struct kv_op *op)
{
    struct kv_session *session = op->result;

    if (op->status == KV_OK) {
        kvc_session_leased(session);
        want_copy(op);
    } else if (session != NULL) {
        op->result = NULL;
        kvc_session_abandon(session);
    }
    free(open_of(op)->model);
    free(open_of(op)->names);
}

static const struct kvc_op_type open_type = {
    .name = "open",
    .id = KV_OP_OPEN,
    .start = start_open,
    .ended = ended_open,
    .describe = kvc_session_describe_op,
};

/* Keeps a copy of the blocks' names, of which the first n_match may be attached. */
static kv_status_t
keep_names(struct kv_op *op, const struct kv_id128 *names, uint32_t n_names, uint32_t n_match)
{
    struct open_part *part = open_of(op);

    part->n_names = n_names;
    part->n_match = n_match;
    part->names = malloc(n_names * sizeof(names[0]));
    if (part->names == NULL)
        return kvc_set_error(&op->client->loop, KV_NO_MEMORY, "open: out of memory");
    memcpy(part->names, names, n_names * sizeof(names[0]));
    return KV_OK;
}

/* Reads where the prompt's blocks place the session, and what is to be attached.  Where all
 * nodes are in a row, other rows are no relief. */
static kv_status_t read_prompt(struct kv_op *op, const struct kv_session_options *options)
{
    const struct kv_client *client = op->client;
    struct open_part *part = open_of(op);
    uint32_t n_names, n_match;
    kv_status_t status;

    if (options->block_names == NULL || options->n_block_names == 0)
        return KV_OK;
    n_names =
        options->n_block_names < KV_WIRE_NAMES_MAX ? options->n_block_names : KV_WIRE_NAMES_MAX;
    n_match = options->is_fresh ? 0 : n_names;
    if (options->match_blocks_max > 0 && options->match_blocks_max < n_match)
        n_match = options->match_blocks_max;
    status = keep_names(op, options->block_names, n_names, n_match);
    if (status != KV_OK)
        return status;
    part->has_prompt = true;
    part->prompt_root = kv_placement_prompt_root(&options->block_names[0]);
    if (client->map->n_members <= KV_ROW_NODES)
        return KV_OK;
    part->branch = kv_placement_branch(options->block_names, options->n_block_names);
    part->own_branch = part->branch;
    part->n_rows = kvc_roots_look(&client->roots, part->prompt_root, client->loop.now_us);
    return KV_OK;
}

/* Begins the operation, with its own copy of the model: requests are built after the user's call
 * has returned, and kv_schema_finish() fills in what the caller need not. */
static kv_status_t begin(struct kv_client *client,
                         const struct kv_model_info *model,
                         uint32_t deadline_ms,
                         struct kv_op **ret_op)
{
    char text[120] = "";
    kv_status_t status;
    struct kv_op *op;

    if (memchr(model->name, 0, sizeof(model->name)) == NULL || model->name[0] == 0)
        return kvc_set_error(&client->loop, KV_INVALID,
                             "open: model: name: empty or not 0-terminated");
    status = kvc_op_begin(client, &open_type, NULL, NULL, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    open_of(op)->model = malloc(sizeof(*model));
    if (open_of(op)->model == NULL) {
        kvc_op_discard(op);
        return kvc_set_error(&client->loop, KV_NO_MEMORY, "open: out of memory");
    }
    *open_of(op)->model = *model;
    status = kv_schema_finish(&open_of(op)->model->schema, text, sizeof(text));
    if (status != KV_OK) {
        free(open_of(op)->model);
        kvc_op_discard(op);
        return kvc_set_error(&client->loop, status, "open: %s", text);
    }
    *ret_op = op;
    return KV_OK;
}

static void discard(struct kv_op *op)
{
    free(open_of(op)->model);
    free(open_of(op)->names);
    kvc_op_discard(op);
}

/* The session that is to be opened is made, and asked for. */
static kv_status_t
submit(struct kv_op *op, const struct kv_ticket *ticket, struct kv_op **ret_op)
{
    struct kv_client *client = op->client;
    const struct kv_model_info *model = open_of(op)->model;
    struct kv_session *session = kvc_session_make(client, &model->schema, ticket);
    kv_status_t status;

    if (session == NULL) {
        discard(op);
        return kvc_set_error(&client->loop, KV_NO_MEMORY, "open: out of memory");
    }
    open_of(op)->writer = kvc_client_draw_writer(client);
    status = kvc_writers_make(session, NULL, 0, open_of(op)->writer, session->writers);
    if (status != KV_OK) {
        kv_session_free(session);
        discard(op);
        return kvc_set_error(&client->loop, status, "open: out of memory");
    }
    session->fingerprint = model->fingerprint;
    op->result = session;
    reset(op);
    return kvc_op_submit(op, ret_op);
}

kv_status_t kv_open_begin(struct kv_client *client,
                          const struct kv_model_info *model,
                          const struct kv_session_options *options,
                          uint32_t deadline_ms,
                          struct kv_op **ret_op)
{
    KVC_ENTER(client);
    struct kv_ticket ticket;
    kv_status_t status;
    struct kv_op *op = NULL;

    if (options != NULL && options->tokens_max > KV_TOKENS_MAX)
        return kvc_set_error(&client->loop, KV_INVALID, "open: tokens_max: %u: limit %u",
                             options->tokens_max, (unsigned)KV_TOKENS_MAX);
    status = begin(client, model, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    if (options != NULL) {
        op->owner.lease_wanted_ms = options->lease_ms;
        op->owner.tokens_max_wanted = options->tokens_max;
        status = read_prompt(op, options);
        if (status != KV_OK) {
            discard(op);
            return status;
        }
    }
    draw_ticket(op, &ticket);
    return submit(op, &ticket, ret_op);
}

kv_status_t kvc_open_at_begin(struct kv_client *client,
                              const struct kv_model_info *model,
                              uint64_t root,
                              const struct kv_id128 *names,
                              uint32_t n_names,
                              struct kv_op **ret_op)
{
    struct kv_ticket ticket;
    kv_status_t status;
    struct kv_op *op = NULL;

    status = begin(client, model, 0, &op);
    if (status != KV_OK)
        return status;
    status = keep_names(op, names, n_names, n_names);
    if (status != KV_OK) {
        discard(op);
        return status;
    }
    kvc_ticket_draw(client, &ticket);
    ticket.root = root;
    return submit(op, &ticket, ret_op);
}
