/* Match: how much of a prompt the nodes keep.  Asks those on which sessions of the prompt would be,
 * and, where a root has several rows, those of its beginnings (kvserver/cluster/placement.h). */
#include "client/ops/match.h"
#include "client/call.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/node_connect.h"
#include "client/op.h"
#include "client/roots.h"
#include "client/session.h"
#include "client/state.h"
#include "kvserver/cluster/placement.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct match_part {
    struct kv_id128 *names; /* (n_names) */
    uint32_t n_names;
    uint32_t n_places;
    struct kvc_match_place places[KVC_MATCH_PLACES];
    struct kv_match *found; /* (n_found) */
    uint32_t n_found;
};
static_assert(sizeof(struct match_part) <= KVC_OP_STATE_BYTES, "an operation has room for it");

static struct match_part *match_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

/* ---- places ------------------------------------------------------------------------------ */

uint32_t kvc_match_places(const struct kv_client *client,
                          const struct kv_id128 *names,
                          uint32_t n_names,
                          struct kvc_match_place ret_places[KVC_MATCH_PLACES])
{
    const uint64_t prompt_root = kv_placement_prompt_root(&names[0]);
    const uint32_t n_rows =
        client->map->n_members > KV_ROW_NODES
            ? kvc_roots_look(&client->roots, prompt_root, client->loop.now_us)
            : 1;
    uint32_t n = 0;

    /* The whole prompt's first: of equals, that one is chosen. */
    for (uint32_t blocks = 1 << (KVC_MATCH_PLACES - 1); blocks > 0; blocks /= 2) {
        if (blocks > n_names)
            continue;
        const uint32_t branch = kv_placement_branch(names, blocks);
        const uint64_t root = kv_placement_branch_root(prompt_root, branch, n_rows);
        bool is_new = true;

        for (uint32_t i = 0; i < n; i++)
            is_new = is_new && ret_places[i].root != root;
        if (!is_new)
            continue;
        ret_places[n] =
            (struct kvc_match_place){.root = root, .branch = branch, .tokens = UINT32_MAX};
        memset(ret_places[n].kept, 0xff, sizeof(ret_places[n].kept));
        n++;
    }
    return n;
}

/* A node keeps so much of the prompt. */
static void
note_kept(struct kvc_match_place *place, uint32_t position, uint32_t tokens, uint32_t n_units)
{
    place->kept[position] = tokens;
    /* Of nodes that differ, the one that leaves out fewer. */
    if (n_units > place->n_units)
        place->n_units = n_units;
    place->tokens = UINT32_MAX;
    for (uint32_t i = 0; i < KV_ROW_NODES; i++)
        if ((place->n_units == 0 || i < place->n_units) && place->kept[i] < place->tokens)
            place->tokens = place->kept[i];
}

static void ask_row(struct kv_op *op,
                    struct kvc_match_place *place,
                    const struct kv_id128 *names,
                    uint32_t n_names,
                    uint64_t until_us,
                    kvc_call_done_fn done)
{
    Kvpb__MatchRequest request = KVPB__MATCH_REQUEST__INIT;
    Kvpb__Placement placement = KVPB__PLACEMENT__INIT;
    struct kv_placement_row row;

    kvc_client_row(op->client, place->root, &row);
    request.block_names.data = (uint8_t *)names;
    request.block_names.len = n_names * sizeof(names[0]);
    request.placement = &placement;
    placement.epoch = op->client->map->epoch;
    placement.root = place->root;
    placement.n_nodes = row.n_nodes;
    for (uint32_t i = 0; i < row.n_nodes; i++) {
        struct kvc_node *node = kvc_row_node(op->client, &row, i);

        placement.position = i;
        if (node->state != KVC_NODE_CONNECTED || node->version < KV_WIRE_VERSION_PREFIXES ||
            kvc_call_begin_until(node, &op->owner, NULL, KV_OP_MATCH, &request.base, until_us,
                                 done) != KV_OK)
            note_kept(place, i, 0, 0);
    }
}

void kvc_match_ask(struct kv_op *op,
                   struct kvc_match_place *places,
                   uint32_t n_places,
                   const struct kv_id128 *names,
                   uint32_t n_names,
                   uint64_t until_us,
                   kvc_call_done_fn done)
{
    for (uint32_t i = 0; i < n_places; i++)
        ask_row(op, &places[i], names, n_names, until_us, done);
}

/* Whether the reply can be about a prompt of so many blocks. */
static bool is_sound(const Kvpb__MatchReply *reply, uint32_t n_names)
{
    uint32_t end = 0;

    if (reply->tokens > n_names * (uint64_t)KV_BLOCK_TOKENS ||
        reply->tokens % KV_BLOCK_TOKENS != 0)
        return false;
    for (size_t i = 0; i < reply->n_tiers; i++) {
        if (reply->tiers[i]->end <= end || reply->tiers[i]->end > reply->tokens)
            return false;
        end = reply->tiers[i]->end;
    }
    return end == reply->tokens;
}

/* Which of the places a call asked about is in its request, and which node of the row it asked. */
static struct kvc_match_place *place_of(const struct kvc_call *call,
                                        struct kvc_match_place *places,
                                        uint32_t n_places,
                                        uint32_t *ret_position)
{
    Kvpb__MatchRequest *request =
        kvpb__match_request__unpack(NULL, call->packed_bytes, call->packed);
    struct kvc_match_place *place = NULL;

    if (request == NULL)
        return NULL;
    for (uint32_t i = 0; i < n_places; i++)
        if (places[i].root == request->placement->root)
            place = &places[i];
    *ret_position = request->placement->position;
    kvpb__match_request__free_unpacked(request, NULL);
    return place;
}

bool kvc_match_hear(const struct kvc_call *call,
                    kv_status_t status,
                    const Kvpb__MatchReply *reply,
                    uint32_t n_names,
                    struct kvc_match_place *places,
                    uint32_t n_places)
{
    uint32_t position;
    struct kvc_match_place *place = place_of(call, places, n_places, &position);

    if (place == NULL)
        return false;
    if (status != KV_OK || !is_sound(reply, n_names)) {
        note_kept(place, position, 0, 0);
        return false;
    }
    note_kept(place, position, reply->tokens, reply->n_units);
    return true;
}

/* ---- the operation ----------------------------------------------------------------------- */

static void note(struct kv_op *op, uint32_t node, const Kvpb__MatchReply *reply)
{
    struct match_part *part = match_of(op);
    struct kv_match *match = &part->found[part->n_found++];

    *match = (struct kv_match){.node = node, .tokens = reply->tokens};
    for (size_t i = 0; i < reply->n_tiers; i++) {
        if (strcmp(reply->tiers[i]->medium, "CPU") != 0)
            break;
        match->tokens_in_memory = reply->tiers[i]->end;
    }
}

static void match_done(struct kvc_call *call,
                       kv_status_t status,
                       const ProtobufCMessage *message,
                       const char *detail)
{
    const Kvpb__MatchReply *reply = (const Kvpb__MatchReply *)message;
    struct kv_op *op = kvc_call_op(call);
    struct match_part *part;

    (void)detail; /* a node that cannot be asked keeps nothing: that is no failure */
    if (op == NULL)
        return;
    part = match_of(op);
    if (status == KV_OK && !is_sound(reply, part->n_names))
        kvc_op_fail(op, call->node, NULL, KV_CORRUPT,
                    "%u tokens matched, in %zu tiers, of %u blocks", reply->tokens,
                    reply->n_tiers, part->n_names);
    else if (kvc_match_hear(call, status, reply, part->n_names, part->places, part->n_places))
        note(op, call->node->index, reply);
}

/* Connects the nodes of a row that are not, for the next match. */
static void connect_row(struct kv_client *client, uint64_t root)
{
    struct kv_placement_row row;

    kvc_client_row(client, root, &row);
    for (uint32_t i = 0; i < row.n_nodes; i++) {
        struct kvc_node *node = kvc_row_node(client, &row, i);

        if (node->state != KVC_NODE_CONNECTED)
            kvc_node_connect(node);
    }
}

static void start_match(struct kv_op *op)
{
    struct match_part *part = match_of(op);

    for (uint32_t i = 0; i < part->n_places; i++)
        connect_row(op->client, part->places[i].root);
    kvc_match_ask(op, part->places, part->n_places, part->names, part->n_names,
                  op->owner.deadline_us, match_done);
}

static int compare(const void *a, const void *b)
{
    const struct kv_match *one = a, *other = b;

    if (one->tokens != other->tokens)
        return one->tokens > other->tokens ? -1 : 1;
    return one->node < other->node ? -1 : one->node > other->node;
}

static void ended_match(struct kv_op *op)
{
    struct match_part *part = match_of(op);

    free(part->names);
    part->names = NULL;
    if (op->status != KV_OK)
        return;
    qsort(part->found, part->n_found, sizeof(part->found[0]), compare);
    for (uint32_t i = 0; i < part->n_places; i++)
        if (part->places[i].tokens != UINT32_MAX && part->places[i].tokens > op->tokens)
            op->tokens = part->places[i].tokens;
}

static void fini_match(struct kv_op *op)
{
    free(match_of(op)->found);
    match_of(op)->found = NULL;
}

static const struct kvc_op_type match_type = {
    .name = "match",
    .id = KV_OP_MATCH,
    .start = start_match,
    .ended = ended_match,
    .fini = fini_match,
};

kv_status_t kv_match_begin(struct kv_client *client,
                           const struct kv_id128 *names,
                           uint32_t n_names,
                           uint32_t deadline_ms,
                           struct kv_op **ret_op)
{
    KVC_ENTER(client);
    struct match_part *part;
    struct kv_op *op;
    kv_status_t status;

    if (n_names == 0 || n_names > KV_WIRE_NAMES_MAX)
        return kvc_set_error(&client->loop, KV_INVALID, "match: n_names: %u: 1 to %d", n_names,
                             KV_WIRE_NAMES_MAX);
    status = kvc_op_begin(client, &match_type, NULL, NULL, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    part = match_of(op);
    part->n_places = kvc_match_places(client, names, n_names, part->places);
    part->n_names = n_names;
    part->names = malloc(n_names * sizeof(names[0]));
    part->found = calloc(part->n_places * KV_ROW_NODES, sizeof(part->found[0]));
    if (part->names == NULL || part->found == NULL) {
        free(part->names);
        free(part->found);
        kvc_op_discard(op);
        return kvc_set_error(&client->loop, KV_NO_MEMORY, "match: out of memory");
    }
    memcpy(part->names, names, n_names * sizeof(names[0]));
    return kvc_op_submit(op, ret_op);
}

const struct kv_match *kv_op_matches(const struct kv_op *op, uint32_t *ret_n)
{
    KVC_LOOK(op->client);

    *ret_n = 0;
    if (op->type != &match_type || op->status != KV_OK)
        return NULL;
    *ret_n = match_of(op)->n_found;
    return match_of(op)->found;
}
