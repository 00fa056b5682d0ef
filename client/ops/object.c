/* Objects: put, get, exists and delete of some at once.
 *
 * Each goes to the data thread that owns its name's slot.  A put is one message; a get asks for
 * the first piece, learns by it how large the object is, and asks for the others.  An object that
 * fails leaves those beside it as they are.
 */
#include "client/buffer.h"
#include "client/client.h"
#include "client/connection.h"
#include "client/include/kvclient.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/request.h"
#include "kernels/checksum.h"
#include "kvserver/base/hash.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/net/message.h"
#include "kvserver/net/transport.h"
#include "proto/kv_wire.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PIECE_BYTES = KV_WIRE_BULK_MAX
};

struct object_state {
    struct kv_id128 hash;
    uint32_t slot;
    uint32_t name_bytes;
    const char *name;
    struct kv_buffer *buffer;
    uint8_t *base;      /* of its bytes, in the buffer */
    size_t bytes;       /* put: its size; get: room for it */
    kv_status_t status; /* as the caller is told */
    uint64_t size;      /* get: known from the first piece */
    uint32_t n_pieces;  /* get: not yet there */
    uint64_t version;   /* get: of the first piece; delete: to delete, as object_exists said */
};

struct objects_part {
    struct kv_object *objects; /* the caller's, for results alone */
    uint32_t n_objects;
    uint32_t first_bad; /* the first object of those that failed */
    struct object_state *states;
};
static_assert(sizeof(struct objects_part) <= KVC_OP_STATE_BYTES,
              "an operation has room for it");

static struct objects_part *objects_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

static uint32_t n_pieces_of(uint64_t bytes)
{
    return bytes == 0 ? 1 : (uint32_t)((bytes + PIECE_BYTES - 1) / PIECE_BYTES);
}

static size_t piece_bytes(uint64_t size, uint64_t offset)
{
    return size - offset < PIECE_BYTES ? (size_t)(size - offset) : PIECE_BYTES;
}

static uint32_t piece_crc(const struct object_state *state, uint64_t size, uint64_t offset)
{
    return kv_crc32c(kv_object_seed(&state->hash) + (uint32_t)(offset / PIECE_BYTES),
                     state->base + offset, piece_bytes(size, offset));
}

static void set_status(struct kv_op *op, uint32_t item, kv_status_t status)
{
    objects_of(op)->states[item].status = objects_of(op)->objects[item].status = status;
}

/* ---- asking ------------------------------------------------------------------------------ */

static bool seek(const struct kv_op *op, const struct kv_lane *lane, uint32_t *item)
{
    for (; *item < objects_of(op)->n_objects; ++*item)
        if (kv_lane_of_object(op->client, objects_of(op)->states[*item].slot) == lane)
            return true;
    return false;
}

static kv_status_t build_put(struct kv_trip *trip, const struct object_state *state)
{
    bool is_inline = state->bytes <= KV_INLINE_WANTED;
    uint32_t n_pieces = n_pieces_of(state->bytes);
    uint8_t *body;

    trip->body_bytes =
        state->name_bytes + n_pieces * sizeof(uint32_t) + (is_inline ? state->bytes : 0);
    if (!kv_trip_envelope(trip, trip->body_bytes) ||
        !kv_lane_put_begin(trip->lane, &trip->header.put_number))
        return KV_BUSY;
    body = trip->envelope->body + state->name_bytes;
    for (uint32_t i = 0; i < n_pieces; i++) {
        uint32_t crc = piece_crc(state, state->bytes, (uint64_t)i * PIECE_BYTES);

        memcpy(body, &crc, sizeof(crc));
        body += sizeof(crc);
    }
    if (is_inline && state->bytes > 0)
        memcpy(body, state->base, state->bytes);
    if (!is_inline) {
        trip->bulk = state->base;
        trip->header.bulk_bytes = state->bytes;
    }
    trip->header.object_bytes = state->bytes;
    return KV_OK;
}

/* What a message asks: a delete first learns which version has the name, then is of that one.
 * The name alone would not do: asked again for want of an answer, it might hit what was put
 * meanwhile. */
static enum kv_op_id asked(const struct kv_errand *errand)
{
    enum kv_op_id id = errand->op->kind->id;

    return id == KV_OP_OBJECT_DELETE && !errand->alone ? KV_OP_OBJECT_EXISTS : id;
}

static kv_status_t build(struct kv_errand *errand, struct kv_trip *trip)
{
    struct kv_op *op = errand->op;
    uint32_t item = errand->head;
    const struct object_state *state = &objects_of(op)->states[item];
    kv_status_t status = KV_OK;

    trip->item = item;
    trip->position = errand->position;
    if (op->kind->id == KV_OP_OBJECT_PUT) {
        status = build_put(trip, state);
    } else {
        trip->body_bytes = state->name_bytes;
        if (!kv_trip_envelope(trip, trip->body_bytes))
            status = KV_BUSY;
    }
    if (status != KV_OK)
        return status;
    memcpy(trip->envelope->body, state->name, state->name_bytes);
    trip->header.op = (uint8_t)asked(errand);
    trip->header.name_bytes = state->name_bytes;
    trip->header.offset = errand->position;
    if (trip->header.op == KV_OP_OBJECT_DELETE)
        trip->header.object_version = state->version;
    if (op->kind->id == KV_OP_OBJECT_PUT || op->kind->id == KV_OP_OBJECT_GET) {
        trip->buffer = state->buffer;
        kv_buffer_hold(trip->buffer);
    }
    /* Before the first answer nobody knows whether the object fits. */
    trip->lands_late = errand->position == 0;

    if (errand->alone) {
        errand->position += PIECE_BYTES;
        errand->finished = errand->position >= state->size;
    } else {
        errand->head++;
        errand->finished = !seek(op, errand->lane, &errand->head);
    }
    return KV_OK;
}

/* ---- objects that fail ------------------------------------------------------------------- */

/* The operation's status will be that of the caller's first object that failed. */
static void fail_item(struct kv_op *op,
                      const struct kv_remote *remote,
                      uint32_t item,
                      kv_status_t status,
                      const char *detail)
{
    struct objects_part *part = objects_of(op);

    if (part->states[item].status == KV_IN_PROGRESS)
        set_status(op, item, status);
    if (item >= part->first_bad)
        return;
    part->first_bad = item;
    op->partial = KV_OK;
    kv_op_note(op, remote, status, detail);
}

/* A delete's text is the delete's, even where it failed in finding the version. */
static const char *own_text(const struct kv_op *op, const char *detail)
{
    static const char other[] = "object_exists: ";
    bool is_other =
        op->kind->id == KV_OP_OBJECT_DELETE && strncmp(detail, other, sizeof(other) - 1) == 0;

    return is_other ? detail + sizeof(other) - 1 : detail;
}

static void failed(struct kv_trip *trip, kv_status_t status, const char *detail)
{
    struct kv_op *op = kvc_request_op(trip);
    struct kv_list *link, *follow;

    KV_LIST_EACH(link, follow, &op->errands) {
        struct kv_errand *errand = KV_LIST_ENTRY(link, struct kv_errand, of_op);

        if (errand->alone && errand->head == trip->item)
            kv_errand_free(errand);
    }
    fail_item(op, trip->remote, trip->item, status, own_text(op, detail));
}

static bool lives_on(const struct kv_op *op, uint32_t item, const struct kv_remote *remote)
{
    return op->client->placement.node_of[objects_of(op)->states[item].slot] == remote->index;
}

static void
lost(struct kv_op *op, const struct kv_remote *remote, kv_status_t status, const char *why)
{
    for (uint32_t i = 0; i < objects_of(op)->n_objects; i++)
        if (lives_on(op, i, remote) && objects_of(op)->states[i].status == KV_IN_PROGRESS)
            fail_item(op, remote, i, status, why);
}

static void start_node(struct kv_op *op, const struct kv_remote *remote)
{
    kv_lanes_unmark(op->client);
    for (uint32_t i = 0; i < objects_of(op)->n_objects; i++) {
        struct kv_errand *errand;
        struct kv_lane *lane;

        if (!lives_on(op, i, remote))
            continue;
        lane = kv_lane_of_object(op->client, objects_of(op)->states[i].slot);
        if (lane->mark == op)
            continue;
        lane->mark = op;
        errand = kv_errand_add(op, lane);
        if (errand == NULL) {
            lane->mark = NULL;
            fail_item(op, remote, i, KV_NO_MEMORY, "out of memory");
            continue;
        }
        errand->head = i;
    }
}

/* ---- answers ----------------------------------------------------------------------------- */

static unsigned land(struct kv_trip *trip, uint64_t bytes, struct kv_iov *ret_iov)
{
    const struct kv_op *op = kvc_request_op(trip);
    const struct object_state *state = &objects_of(op)->states[trip->item];

    if (!trip->has_reply && trip->position == 0) {
        /* Less than a piece is the whole object. */
        if (bytes == 0 || bytes >= PIECE_BYTES || bytes > state->bytes)
            return 0;
    } else if (bytes == 0 || trip->position >= state->size ||
               bytes != piece_bytes(state->size, trip->position)) {
        return 0;
    }
    ret_iov[0] = (struct kv_iov){.base = state->base + trip->position, .bytes = bytes};
    return 1;
}

static kv_status_t
refuse_size(const struct kv_wire_header *reply, char *detail, size_t detail_bytes)
{
    return kv_reply_refuse(detail, detail_bytes, "object_bytes: %llu",
                           (unsigned long long)reply->object_bytes);
}

static kv_status_t
refuse_data(const struct kv_wire_header *reply, char *detail, size_t detail_bytes)
{
    return kv_reply_refuse(detail, detail_bytes, "a body of %u bytes and bulk of %llu",
                           reply->body_bytes, (unsigned long long)reply->bulk_bytes);
}

static kv_status_t
reply_get(struct kv_trip *trip, const uint8_t *body, char *detail, size_t detail_bytes)
{
    const struct kv_wire_header *reply = &trip->reply;
    struct kv_op *op = kvc_request_op(trip);
    struct object_state *state = &objects_of(op)->states[trip->item];
    size_t bytes;

    if (reply->object_bytes > KV_OBJECT_BYTES_MAX)
        return refuse_size(reply, detail, detail_bytes);
    if (reply->offset != trip->position)
        return kv_reply_refuse(detail, detail_bytes, "offset: %llu",
                               (unsigned long long)reply->offset);
    if (trip->position == 0) {
        if (reply->object_bytes > state->bytes) {
            objects_of(op)->objects[trip->item].bytes = reply->object_bytes;
            return KV_TOO_LARGE;
        }
        state->size = reply->object_bytes;
        state->n_pieces = n_pieces_of(state->size);
        state->version = reply->object_version;
    } else if (reply->object_bytes != state->size || reply->object_version != state->version) {
        return KV_CONFLICT; /* deleted and put again since the first piece */
    }
    bytes = piece_bytes(state->size, trip->position);
    if (reply->bulk_bytes != 0 ? reply->bulk_bytes != bytes || reply->body_bytes != 0
                               : reply->body_bytes != bytes)
        return refuse_data(reply, detail, detail_bytes);
    if (reply->bulk_bytes == 0 && bytes > 0)
        memcpy(state->base + trip->position, body, bytes);
    return KV_OK;
}

/* Put, exists, delete. */
static kv_status_t
reply_other(struct kv_trip *trip, const uint8_t *body, char *detail, size_t detail_bytes)
{
    const struct kv_wire_header *reply = &trip->reply;
    const struct object_state *state = &objects_of(kvc_request_op(trip))->states[trip->item];

    (void)body;
    if (reply->bulk_bytes != 0 || reply->body_bytes != 0)
        return refuse_data(reply, detail, detail_bytes);
    if (reply->object_bytes > KV_OBJECT_BYTES_MAX ||
        (trip->header.op == KV_OP_OBJECT_PUT && reply->object_bytes != state->bytes))
        return refuse_size(reply, detail, detail_bytes);
    return KV_OK;
}

static kv_status_t finish_get(struct kv_trip *trip, char *detail, size_t detail_bytes)
{
    struct kv_op *op = kvc_request_op(trip);
    struct object_state *state = &objects_of(op)->states[trip->item];

    if (piece_crc(state, state->size, trip->position) != trip->reply.object_crc) {
        snprintf(detail, detail_bytes, "object %s: the piece at %llu fails its checksum",
                 state->name, (unsigned long long)trip->position);
        return KV_CORRUPT;
    }
    if (trip->position == 0 && state->n_pieces > 1) {
        struct kv_errand *errand = kv_errand_add(op, trip->lane);

        if (errand == NULL)
            return KV_NO_MEMORY;
        errand->head = trip->item;
        errand->position = PIECE_BYTES;
        errand->alone = true;
    }
    if (--state->n_pieces == 0 && state->status == KV_IN_PROGRESS) {
        objects_of(op)->objects[trip->item].bytes = state->size;
        set_status(op, trip->item, KV_OK);
    }
    return KV_OK;
}

static kv_status_t finish_other(struct kv_trip *trip, char *detail, size_t detail_bytes)
{
    (void)detail;
    (void)detail_bytes;
    set_status(kvc_request_op(trip), trip->item, KV_OK);
    if (kvc_request_op(trip)->kind->id == KV_OP_OBJECT_EXISTS)
        objects_of(kvc_request_op(trip))->objects[trip->item].bytes = trip->reply.object_bytes;
    return KV_OK;
}

static kv_status_t finish_delete(struct kv_trip *trip, char *detail, size_t detail_bytes)
{
    struct object_state *state = &objects_of(kvc_request_op(trip))->states[trip->item];
    struct kv_errand *errand;

    if (trip->header.op == KV_OP_OBJECT_DELETE)
        return finish_other(trip, detail, detail_bytes);
    state->version = trip->reply.object_version;
    if (state->version == 0) {
        snprintf(detail, detail_bytes, "an object without a version");
        return KV_CORRUPT;
    }
    errand = kv_errand_add(kvc_request_op(trip), trip->lane);
    if (errand == NULL)
        return KV_NO_MEMORY;
    errand->head = trip->item;
    errand->alone = true;
    return KV_OK;
}

/* ---- the operation ----------------------------------------------------------------------- */

static bool uses_buffers(const struct kv_op_kind *kind)
{
    return kind->id == KV_OP_OBJECT_PUT || kind->id == KV_OP_OBJECT_GET;
}

static void ended(struct kv_op *op)
{
    for (uint32_t i = 0; i < objects_of(op)->n_objects; i++) {
        if (objects_of(op)->states[i].status == KV_IN_PROGRESS)
            set_status(op, i, op->status);
        kv_buffer_release(objects_of(op)->states[i].buffer);
    }
}

static void
describe(const struct kv_op *op, const struct kv_trip *trip, char *text, size_t text_bytes)
{
    uint32_t item = trip != NULL ? trip->item : objects_of(op)->first_bad;

    if (item < objects_of(op)->n_objects)
        snprintf(text, text_bytes, "object %.64s", objects_of(op)->states[item].name);
}

static const struct kv_op_kind kinds[] = {
    [KV_OBJECT_PUT] =
        {
            .name = "object_put",
            .id = KV_OP_OBJECT_PUT,
            .start_node = start_node,
            .lost = lost,
            .build = build,
            .reply = reply_other,
            .finish = finish_other,
            .failed = failed,
            .ended = ended,
            .describe = describe,
        },
    [KV_OBJECT_GET] =
        {
            .name = "object_get",
            .id = KV_OP_OBJECT_GET,
            .start_node = start_node,
            .lost = lost,
            .build = build,
            .land = land,
            .reply = reply_get,
            .finish = finish_get,
            .failed = failed,
            .ended = ended,
            .describe = describe,
        },
    [KV_OBJECT_EXISTS] =
        {
            .name = "object_exists",
            .id = KV_OP_OBJECT_EXISTS,
            .start_node = start_node,
            .lost = lost,
            .build = build,
            .reply = reply_other,
            .finish = finish_other,
            .failed = failed,
            .ended = ended,
            .describe = describe,
        },
    [KV_OBJECT_DELETE] =
        {
            .name = "object_delete",
            .id = KV_OP_OBJECT_DELETE,
            .start_node = start_node,
            .lost = lost,
            .build = build,
            .reply = reply_other,
            .finish = finish_delete,
            .failed = failed,
            .ended = ended,
            .describe = describe,
        },
};

/* NULL: it can be asked for. */
static const char *object_fault(const struct kv_client *client,
                                const struct kv_op_kind *kind,
                                const struct kv_object *object)
{
    size_t name_bytes = object->name != NULL ? strnlen(object->name, KV_NAME_BYTES_MAX + 1) : 0;

    if (name_bytes == 0 || name_bytes > KV_NAME_BYTES_MAX)
        return "a name of 1 to 255 bytes is needed";
    if (uses_buffers(kind) &&
        !kv_buffer_holds(client, object->buffer, object->offset, object->bytes))
        return "its bytes do not lie in the buffer";
    return NULL;
}

/* Copies what is asked, names included.  false: out of memory. */
static bool keep(struct kv_op *op, struct kv_object *objects, uint32_t n_objects)
{
    struct object_state *states;
    size_t bytes = n_objects * sizeof(*states);
    uint8_t *names;

    for (uint32_t i = 0; i < n_objects; i++)
        bytes += strlen(objects[i].name) + 1;
    states = kv_op_room(op, bytes);
    if (states == NULL)
        return false;
    names = (uint8_t *)(states + n_objects);
    for (uint32_t i = 0; i < n_objects; i++) {
        const struct kv_object *object = &objects[i];
        struct object_state *state = &states[i];

        *state = (struct object_state){.name_bytes = (uint32_t)strlen(object->name)};
        state->name = kv_op_keep(&names, object->name, state->name_bytes + 1);
        state->hash = kv_hash128(state->name, state->name_bytes);
        state->slot = kv_placement_object_slot(&state->hash);
        if (uses_buffers(op->kind)) {
            state->buffer = object->buffer;
            state->base = object->buffer->base + object->offset;
            state->bytes = object->bytes;
            kv_buffer_hold(state->buffer);
        }
        kv_op_need(op, op->client->placement.node_of[state->slot]);
    }
    *objects_of(op) = (struct objects_part){
        .objects = objects,
        .n_objects = n_objects,
        .first_bad = UINT32_MAX,
        .states = states,
    };
    for (uint32_t i = 0; i < n_objects; i++)
        set_status(op, i, KV_IN_PROGRESS);
    return true;
}

kv_status_t kv_objects_begin(struct kv_client *client,
                             enum kv_object_verb verb,
                             struct kv_object *objects,
                             size_t n_objects,
                             uint32_t deadline_ms,
                             struct kv_op **ret_op)
{
    const struct kv_op_kind *kind;
    kv_status_t status;
    struct kv_op *op;

    if ((unsigned)verb > KV_OBJECT_DELETE || n_objects >= UINT32_MAX)
        return kvc_set_error(&client->loop, KV_INVALID, "objects: verb %d, %zu objects",
                             (int)verb, n_objects);
    kind = &kinds[verb];
    for (size_t i = 0; i < n_objects; i++) {
        const char *fault = object_fault(client, kind, &objects[i]);

        if (fault != NULL)
            return kvc_set_error(&client->loop, KV_INVALID, "%s: object %zu: %s", kind->name, i,
                                 fault);
        if (verb == KV_OBJECT_PUT && objects[i].bytes > KV_OBJECT_BYTES_MAX)
            return kvc_set_error(&client->loop, KV_TOO_LARGE, "%s: object %.64s: %zu bytes",
                                 kind->name, objects[i].name, objects[i].bytes);
    }
    status = kv_op_begin(client, kind, NULL, NULL, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    if (!keep(op, objects, (uint32_t)n_objects)) {
        kv_op_discard(op);
        return kvc_set_error(&client->loop, KV_NO_MEMORY, "%s: out of memory", kind->name);
    }
    return kv_op_go(op, ret_op);
}
