#include "client.h"

#include "checksum.h"
#include "hash.h"
#include "message.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PIECE_BYTES = KV_WIRE_BULK_MAX
};

struct kv_object_state {
    struct kv_id128 hash;
    uint32_t slot;
    uint32_t name_bytes;
    uint64_t size;     /* get: known from the first piece */
    uint32_t n_pieces; /* get: not yet there */
    uint64_t version;  /* get: of the first piece; delete: to delete, as object_exists said */
};

static uint32_t n_pieces_of(uint64_t bytes)
{
    return bytes == 0 ? 1 : (uint32_t)((bytes + PIECE_BYTES - 1) / PIECE_BYTES);
}

static size_t piece_bytes(uint64_t size, uint64_t offset)
{
    return size - offset < PIECE_BYTES ? (size_t)(size - offset) : PIECE_BYTES;
}

static uint32_t piece_crc(const struct kv_object_state *state,
                          const uint8_t *base,
                          uint64_t size,
                          uint64_t offset)
{
    return kv_crc32c(kv_object_seed(&state->hash) + (uint32_t)(offset / PIECE_BYTES),
                     base + offset, piece_bytes(size, offset));
}

static uint8_t *base_of(const struct kv_object *object)
{
    return object->buffer->base + object->offset;
}

/* ---- asking ------------------------------------------------------------------------------ */

static bool seek(const struct kv_op *op, const struct kv_lane *lane, uint32_t *item)
{
    for (; *item < op->objects.n_objects; ++*item)
        if (kv_lane_of_object(op->client, op->objects.states[*item].slot) == lane)
            return true;
    return false;
}

static kv_status_t build_put(struct kv_trip *trip,
                             const struct kv_object *object,
                             const struct kv_object_state *state)
{
    bool is_inline = object->bytes <= KV_INLINE_WANTED;
    uint32_t n_pieces = n_pieces_of(object->bytes);
    uint8_t *body;

    trip->body_bytes =
        state->name_bytes + n_pieces * sizeof(uint32_t) + (is_inline ? object->bytes : 0);
    if (!kv_trip_envelope(trip, trip->body_bytes))
        return KV_BUSY;
    body = trip->envelope->body + state->name_bytes;
    for (uint32_t i = 0; i < n_pieces; i++) {
        uint32_t crc =
            piece_crc(state, base_of(object), object->bytes, (uint64_t)i * PIECE_BYTES);

        memcpy(body, &crc, sizeof(crc));
        body += sizeof(crc);
    }
    if (is_inline && object->bytes > 0)
        memcpy(body, base_of(object), object->bytes);
    if (!is_inline) {
        trip->bulk = base_of(object);
        trip->header.bulk_bytes = object->bytes;
    }
    trip->header.object_bytes = object->bytes;
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
    struct kv_object *object = &op->objects.objects[item];
    struct kv_object_state *state = &op->objects.states[item];
    kv_status_t status = KV_OK;

    trip->item = item;
    trip->position = errand->position;
    if (op->kind->id == KV_OP_OBJECT_PUT) {
        status = build_put(trip, object, state);
    } else {
        trip->body_bytes = state->name_bytes;
        if (!kv_trip_envelope(trip, trip->body_bytes))
            status = KV_BUSY;
    }
    if (status != KV_OK)
        return status;
    memcpy(trip->envelope->body, object->name, state->name_bytes);
    trip->header.op = (uint8_t)asked(errand);
    trip->header.name_bytes = state->name_bytes;
    trip->header.offset = errand->position;
    if (trip->header.op == KV_OP_OBJECT_DELETE)
        trip->header.object_version = state->version;
    if (op->kind->id == KV_OP_OBJECT_PUT || op->kind->id == KV_OP_OBJECT_GET) {
        trip->buffer = object->buffer;
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
    struct kv_objects_part *part = &op->objects;

    if (part->objects[item].status == KV_IN_PROGRESS)
        part->objects[item].status = status;
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
    struct kv_op *op = trip->op;
    struct kv_list *link, *follow;

    KV_LIST_EACH(link, follow, &op->errands)
    {
        struct kv_errand *errand = KV_LIST_ENTRY(link, struct kv_errand, of_op);

        if (errand->alone && errand->head == trip->item)
            kv_errand_free(errand);
    }
    fail_item(op, trip->remote, trip->item, status, own_text(op, detail));
}

static bool lives_on(const struct kv_op *op, uint32_t item, const struct kv_remote *remote)
{
    return op->client->placement.node_of[op->objects.states[item].slot] == remote->index;
}

static void
lost(struct kv_op *op, const struct kv_remote *remote, kv_status_t status, const char *why)
{
    for (uint32_t i = 0; i < op->objects.n_objects; i++)
        if (lives_on(op, i, remote) && op->objects.objects[i].status == KV_IN_PROGRESS)
            fail_item(op, remote, i, status, why);
}

static void start_node(struct kv_op *op, const struct kv_remote *remote)
{
    kv_lanes_unmark(op->client);
    for (uint32_t i = 0; i < op->objects.n_objects; i++) {
        struct kv_errand *errand;
        struct kv_lane *lane;

        if (!lives_on(op, i, remote))
            continue;
        lane = kv_lane_of_object(op->client, op->objects.states[i].slot);
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
    const struct kv_op *op = trip->op;
    const struct kv_object_state *state = &op->objects.states[trip->item];

    if (!trip->has_reply && trip->position == 0) {
        /* Less than a piece is the whole object. */
        if (bytes == 0 || bytes >= PIECE_BYTES || bytes > op->objects.objects[trip->item].bytes)
            return 0;
    } else if (bytes == 0 || trip->position >= state->size ||
               bytes != piece_bytes(state->size, trip->position)) {
        return 0;
    }
    ret_iov[0] = (struct kv_iov){
        .base = base_of(&op->objects.objects[trip->item]) + trip->position, .bytes = bytes};
    return 1;
}

static kv_status_t reply_get(struct kv_trip *trip, const uint8_t *body)
{
    const struct kv_wire_header *reply = &trip->reply;
    struct kv_op *op = trip->op;
    struct kv_object *object = &op->objects.objects[trip->item];
    struct kv_object_state *state = &op->objects.states[trip->item];
    size_t bytes;

    if (reply->object_bytes > KV_OBJECT_BYTES_MAX || reply->offset != trip->position)
        return KV_CORRUPT;
    if (trip->position == 0) {
        if (reply->object_bytes > object->bytes) {
            object->bytes = reply->object_bytes;
            return KV_TOO_LARGE;
        }
        state->size = reply->object_bytes;
        state->n_pieces = n_pieces_of(state->size);
        state->version = reply->object_version;
    } else if (reply->object_bytes != state->size || reply->object_version != state->version) {
        return KV_CONFLICT; /* deleted and put again since the first piece */
    }
    bytes = piece_bytes(state->size, trip->position);
    if (reply->bulk_bytes != 0)
        return reply->bulk_bytes == bytes && reply->body_bytes == 0 ? KV_OK : KV_CORRUPT;
    if (reply->body_bytes != bytes)
        return KV_CORRUPT;
    if (bytes > 0)
        memcpy(base_of(object) + trip->position, body, bytes);
    return KV_OK;
}

static kv_status_t reply_other(struct kv_trip *trip, const uint8_t *body)
{
    (void)body;
    return trip->reply.bulk_bytes == 0 ? KV_OK : KV_CORRUPT;
}

static kv_status_t finish_get(struct kv_trip *trip, char *detail, size_t detail_bytes)
{
    struct kv_op *op = trip->op;
    struct kv_object *object = &op->objects.objects[trip->item];
    struct kv_object_state *state = &op->objects.states[trip->item];

    if (piece_crc(state, base_of(object), state->size, trip->position) !=
        trip->reply.object_crc) {
        snprintf(detail, detail_bytes, "object %s: the piece at %llu fails its checksum",
                 object->name, (unsigned long long)trip->position);
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
    if (--state->n_pieces == 0 && object->status == KV_IN_PROGRESS) {
        object->bytes = state->size;
        object->status = KV_OK;
    }
    return KV_OK;
}

static kv_status_t finish_other(struct kv_trip *trip, char *detail, size_t detail_bytes)
{
    struct kv_object *object = &trip->op->objects.objects[trip->item];

    (void)detail;
    (void)detail_bytes;
    object->status = KV_OK;
    if (trip->op->kind->id == KV_OP_OBJECT_EXISTS)
        object->bytes = trip->reply.object_bytes;
    return KV_OK;
}

static kv_status_t finish_delete(struct kv_trip *trip, char *detail, size_t detail_bytes)
{
    struct kv_object_state *state = &trip->op->objects.states[trip->item];
    struct kv_errand *errand;

    if (trip->header.op == KV_OP_OBJECT_DELETE)
        return finish_other(trip, detail, detail_bytes);
    state->version = trip->reply.object_version;
    if (state->version == 0) {
        snprintf(detail, detail_bytes, "an object without a version");
        return KV_CORRUPT;
    }
    errand = kv_errand_add(trip->op, trip->lane);
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
    for (uint32_t i = 0; i < op->objects.n_objects; i++) {
        struct kv_object *object = &op->objects.objects[i];

        if (object->status == KV_IN_PROGRESS)
            object->status = op->status;
        if (uses_buffers(op->kind))
            kv_buffer_release(object->buffer);
    }
    free(op->objects.states);
    op->objects.states = NULL;
}

static void
describe(const struct kv_op *op, const struct kv_trip *trip, char *text, size_t text_bytes)
{
    uint32_t item = trip != NULL ? trip->item : op->objects.first_bad;

    if (item < op->objects.n_objects)
        snprintf(text, text_bytes, "object %.64s", op->objects.objects[item].name);
}

static const struct kv_op_kind kinds[] = {
    [KV_OBJECT_PUT] =
        {
            .name = "object_put",
            .id = KV_OP_OBJECT_PUT,
            .class = KV_LANE_PUT,
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
            .class = KV_LANE_READ,
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
            .class = KV_LANE_FETCH,
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
            .class = KV_LANE_FETCH,
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

kv_status_t kv_objects_begin(struct kv_client *client,
                             enum kv_object_verb verb,
                             struct kv_object *objects,
                             size_t n_objects,
                             uint32_t deadline_ms,
                             struct kv_op **ret_op)
{
    const struct kv_op_kind *kind;
    struct kv_object_state *states;
    kv_status_t status;
    struct kv_op *op;

    if ((unsigned)verb > KV_OBJECT_DELETE || n_objects >= UINT32_MAX)
        return kv_client_refuse(client, KV_INVALID, "objects: verb %d, %zu objects", (int)verb,
                                n_objects);
    kind = &kinds[verb];
    for (size_t i = 0; i < n_objects; i++) {
        const char *fault = object_fault(client, kind, &objects[i]);

        if (fault != NULL)
            return kv_client_refuse(client, KV_INVALID, "%s: object %zu: %s", kind->name, i,
                                    fault);
        if (verb == KV_OBJECT_PUT && objects[i].bytes > KV_OBJECT_BYTES_MAX)
            return kv_client_refuse(client, KV_TOO_LARGE, "%s: object %.64s: %zu bytes",
                                    kind->name, objects[i].name, objects[i].bytes);
    }
    states = calloc(n_objects > 0 ? n_objects : 1, sizeof(*states));
    if (states == NULL)
        return kv_client_refuse(client, KV_NO_MEMORY, "%s: out of memory", kind->name);
    status = kv_op_begin(client, kind, NULL, NULL, deadline_ms, &op);
    if (status != KV_OK) {
        free(states);
        return status;
    }
    op->objects.objects = objects;
    op->objects.n_objects = (uint32_t)n_objects;
    op->objects.first_bad = UINT32_MAX;
    op->objects.states = states;
    for (size_t i = 0; i < n_objects; i++) {
        states[i].name_bytes = (uint32_t)strlen(objects[i].name);
        states[i].hash = kv_hash128(objects[i].name, states[i].name_bytes);
        states[i].slot = kv_placement_object_slot(&states[i].hash);
        objects[i].status = KV_IN_PROGRESS;
        if (uses_buffers(kind))
            kv_buffer_hold(objects[i].buffer);
        kv_op_need(op, client->placement.node_of[states[i].slot]);
    }
    return kv_op_go(op, ret_op);
}
