/* Objects: put, get, exists and delete, of several objects in one operation.
 *
 * Each object belongs to the data thread that owns its name's slot.  A put is one message.  A
 * get requests the first piece, learns the object's size from it, and requests the other
 * pieces.  A failed object does not affect the others.
 */
#include "client/buffer.h"
#include "client/connection.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/peer.h"
#include "client/request.h"
#include "client/state.h"
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
    uint32_t slot, node;
    uint32_t name_bytes;
    const char *name;
    struct kv_buffer *buffer;
    uint8_t *base;      /* of its bytes, in the buffer */
    size_t bytes;       /* put: its size; get: capacity */
    kv_status_t status; /* its result */
    uint32_t ttl_ms;    /* put */
    bool evictable;     /* put */
    uint64_t size;      /* get: known from the first piece */
    uint32_t n_pieces;  /* get: not received yet */
    uint64_t
        version; /* get: of the first piece; delete: the one to delete, from object_exists */
};

struct objects_part {
    struct kv_object *objects; /* the caller's, for results only */
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

/* ---- requests ---------------------------------------------------------------------------- */

static struct kvc_connection *object_connection(const struct kv_op *op, size_t item)
{
    const struct object_state *state = &objects_of(op)->states[item];

    return kvc_connection_of_object(&op->client->nodes[state->node], state->slot);
}

static bool
seek(const struct kv_op *op, const struct kvc_connection *connection, uint32_t *item)
{
    for (; *item < objects_of(op)->n_objects; ++*item)
        if (object_connection(op, *item) == connection &&
            objects_of(op)->states[*item].status == KV_IN_PROGRESS)
            return true;
    return false;
}

static kv_status_t build_put(struct kvc_request *request, const struct object_state *state)
{
    bool is_inline = state->bytes <= KVC_INLINE_WANTED;
    uint32_t n_pieces = n_pieces_of(state->bytes);
    uint8_t *body;

    request->body_bytes =
        state->name_bytes + n_pieces * sizeof(uint32_t) + (is_inline ? state->bytes : 0);
    if (!kvc_request_message(request, request->body_bytes) ||
        !kvc_connection_put_begin(request->connection, &request->header.put_number))
        return KV_BUSY;
    body = request->message->body + state->name_bytes;
    for (uint32_t i = 0; i < n_pieces; i++) {
        uint32_t crc = piece_crc(state, state->bytes, (uint64_t)i * PIECE_BYTES);

        memcpy(body, &crc, sizeof(crc));
        body += sizeof(crc);
    }
    if (is_inline && state->bytes > 0)
        memcpy(body, state->base, state->bytes);
    if (!is_inline) {
        request->bulk = state->base;
        request->header.bulk_bytes = state->bytes;
    }
    request->header.object_bytes = state->bytes;
    if (request->node->version >= KV_WIRE_VERSION_PREFIXES) {
        request->header.token_begin = state->ttl_ms;
        request->header.token_count = state->evictable ? KV_WIRE_OBJECT_EVICTABLE : 0;
    }
    return KV_OK;
}

/* Returns the operation of a message.  A delete first requests the version that has the name,
 * then deletes that version: a delete by name that is resent could delete an object that was
 * put between. */
static enum kv_op_id asked(const struct kvc_subop *subop)
{
    enum kv_op_id id = subop->op->type->id;

    return id == KV_OP_OBJECT_DELETE && !subop->alone ? KV_OP_OBJECT_EXISTS : id;
}

static kv_status_t build(struct kvc_subop *subop, struct kvc_request *request)
{
    struct kv_op *op = subop->op;
    uint32_t item = subop->head;
    const struct object_state *state = &objects_of(op)->states[item];
    kv_status_t status = KV_OK;

    request->item = item;
    request->position = subop->position;
    if (op->type->id == KV_OP_OBJECT_PUT) {
        status = build_put(request, state);
    } else {
        request->body_bytes = state->name_bytes;
        if (!kvc_request_message(request, request->body_bytes))
            status = KV_BUSY;
    }
    if (status != KV_OK)
        return status;
    memcpy(request->message->body, state->name, state->name_bytes);
    request->header.op = (uint8_t)asked(subop);
    request->header.name_bytes = state->name_bytes;
    request->header.offset = subop->position;
    if (request->header.op == KV_OP_OBJECT_DELETE)
        request->header.object_version = state->version;
    else if (op->type->id == KV_OP_OBJECT_DELETE)
        request->header.token_count = KV_WIRE_OBJECT_TO_DELETE;
    if (op->type->id == KV_OP_OBJECT_PUT || op->type->id == KV_OP_OBJECT_GET) {
        request->buffer = state->buffer;
        kvc_buffer_hold(request->buffer);
    }
    /* Whether the object fits is known only after the first reply. */
    request->needs_header_first = subop->position == 0;

    if (subop->alone) {
        subop->position += PIECE_BYTES;
        subop->finished = subop->position >= state->size;
    } else {
        subop->head++;
        subop->finished = !seek(op, subop->connection, &subop->head);
    }
    return KV_OK;
}

/* ---- objects that fail ------------------------------------------------------------------- */

/* Records a failure: the operation's status is that of the first object that failed. */
static void fail_item(struct kv_op *op,
                      const struct kvc_node *node,
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
    kvc_op_record_error(op, node, status, detail);
}

/* A delete's message names object_delete, even if object_exists failed. */
static const char *own_text(const struct kv_op *op, const char *detail)
{
    static const char other[] = "object_exists: ";
    bool is_other =
        op->type->id == KV_OP_OBJECT_DELETE && strncmp(detail, other, sizeof(other) - 1) == 0;

    return is_other ? detail + sizeof(other) - 1 : detail;
}

static void failed(struct kvc_request *request, kv_status_t status, const char *detail)
{
    struct kv_op *op = kvc_request_op(request);
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &op->subops)
    {
        struct kvc_subop *subop = KVC_LIST_ENTRY(link, struct kvc_subop, of_op);

        if (subop->alone && subop->head == request->item)
            kvc_subop_free(subop);
    }
    fail_item(op, request->node, request->item, status, own_text(op, detail));
}

static bool lives_on(const struct kv_op *op, uint32_t item, const struct kvc_node *node)
{
    return objects_of(op)->states[item].node == node->index;
}

static void
lost(struct kv_op *op, const struct kvc_node *node, kv_status_t status, const char *why)
{
    for (uint32_t i = 0; i < objects_of(op)->n_objects; i++)
        if (lives_on(op, i, node) && objects_of(op)->states[i].status == KV_IN_PROGRESS)
            fail_item(op, node, i, status, why);
}

static void start_node(struct kv_op *op, const struct kvc_node *node)
{
    kvc_connections_unmark(op->client);
    for (uint32_t i = 0; i < objects_of(op)->n_objects; i++) {
        struct kvc_subop *subop;
        struct kvc_connection *connection;

        if (!lives_on(op, i, node))
            continue;
        if (objects_of(op)->states[i].ttl_ms != 0 && node->version < KV_WIRE_VERSION_PREFIXES) {
            fail_item(op, node, i, KV_UNSUPPORTED, "ttl_ms: the node's version has no times");
            continue;
        }
        connection = object_connection(op, i);
        if (!kvc_connection_mark(connection))
            continue;
        subop = kvc_subop_add(op, connection);
        if (subop == NULL) {
            kvc_connection_unmark(connection);
            fail_item(op, node, i, KV_NO_MEMORY, "out of memory");
            continue;
        }
        subop->head = i;
    }
}

/* ---- replies ----------------------------------------------------------------------------- */

static unsigned land(struct kvc_request *request, uint64_t bytes, struct kv_iov *ret_iov)
{
    const struct kv_op *op = kvc_request_op(request);
    const struct object_state *state = &objects_of(op)->states[request->item];

    if (!request->has_reply && request->position == 0) {
        /* A reply shorter than a piece is the whole object. */
        if (bytes == 0 || bytes >= PIECE_BYTES || bytes > state->bytes)
            return 0;
    } else if (bytes == 0 || request->position >= state->size ||
               bytes != piece_bytes(state->size, request->position)) {
        return 0;
    }
    ret_iov[0] = (struct kv_iov){.base = state->base + request->position, .bytes = bytes};
    return 1;
}

static kv_status_t
refuse_size(const struct kv_wire_header *reply, char *detail, size_t detail_bytes)
{
    return kvc_reply_refuse(detail, detail_bytes, "object_bytes: %llu",
                            (unsigned long long)reply->object_bytes);
}

static kv_status_t
refuse_data(const struct kv_wire_header *reply, char *detail, size_t detail_bytes)
{
    return kvc_reply_refuse(detail, detail_bytes, "a body of %u bytes and bulk of %llu",
                            reply->body_bytes, (unsigned long long)reply->bulk_bytes);
}

static kv_status_t
reply_get(struct kvc_request *request, const uint8_t *body, char *detail, size_t detail_bytes)
{
    const struct kv_wire_header *reply = &request->reply;
    struct kv_op *op = kvc_request_op(request);
    struct object_state *state = &objects_of(op)->states[request->item];
    size_t bytes;

    if (reply->object_bytes > KV_OBJECT_BYTES_MAX)
        return refuse_size(reply, detail, detail_bytes);
    if (reply->offset != request->position)
        return kvc_reply_refuse(detail, detail_bytes, "offset: %llu",
                                (unsigned long long)reply->offset);
    if (request->position == 0) {
        if (reply->object_bytes > state->bytes) {
            objects_of(op)->objects[request->item].bytes = reply->object_bytes;
            return KV_TOO_LARGE;
        }
        state->size = reply->object_bytes;
        state->n_pieces = n_pieces_of(state->size);
        state->version = reply->object_version;
    } else if (reply->object_bytes != state->size || reply->object_version != state->version) {
        return KV_CONFLICT; /* deleted and put again since the first piece */
    }
    bytes = piece_bytes(state->size, request->position);
    if (reply->bulk_bytes != 0 ? reply->bulk_bytes != bytes || reply->body_bytes != 0
                               : reply->body_bytes != bytes)
        return refuse_data(reply, detail, detail_bytes);
    if (reply->bulk_bytes == 0 && bytes > 0)
        memcpy(state->base + request->position, body, bytes);
    return KV_OK;
}

/* Put, exists, delete. */
static kv_status_t
reply_other(struct kvc_request *request, const uint8_t *body, char *detail, size_t detail_bytes)
{
    const struct kv_wire_header *reply = &request->reply;
    const struct object_state *state =
        &objects_of(kvc_request_op(request))->states[request->item];

    (void)body;
    if (reply->bulk_bytes != 0 || reply->body_bytes != 0)
        return refuse_data(reply, detail, detail_bytes);
    if (reply->object_bytes > KV_OBJECT_BYTES_MAX ||
        (request->header.op == KV_OP_OBJECT_PUT && reply->object_bytes != state->bytes))
        return refuse_size(reply, detail, detail_bytes);
    return KV_OK;
}

static kv_status_t finish_get(struct kvc_request *request, char *detail, size_t detail_bytes)
{
    struct kv_op *op = kvc_request_op(request);
    struct object_state *state = &objects_of(op)->states[request->item];

    if (piece_crc(state, state->size, request->position) != request->reply.object_crc) {
        snprintf(detail, detail_bytes, "object %s: the piece at %llu fails its checksum",
                 state->name, (unsigned long long)request->position);
        return KV_CORRUPT;
    }
    if (request->position == 0 && state->n_pieces > 1) {
        struct kvc_subop *subop = kvc_subop_add(op, request->connection);

        if (subop == NULL)
            return KV_NO_MEMORY;
        subop->head = request->item;
        subop->position = PIECE_BYTES;
        subop->alone = true;
    }
    if (--state->n_pieces == 0 && state->status == KV_IN_PROGRESS) {
        objects_of(op)->objects[request->item].bytes = state->size;
        set_status(op, request->item, KV_OK);
    }
    return KV_OK;
}

static kv_status_t finish_other(struct kvc_request *request, char *detail, size_t detail_bytes)
{
    (void)detail;
    (void)detail_bytes;
    set_status(kvc_request_op(request), request->item, KV_OK);
    if (kvc_request_op(request)->type->id == KV_OP_OBJECT_EXISTS)
        objects_of(kvc_request_op(request))->objects[request->item].bytes =
            request->reply.object_bytes;
    return KV_OK;
}

static kv_status_t finish_delete(struct kvc_request *request, char *detail, size_t detail_bytes)
{
    struct object_state *state = &objects_of(kvc_request_op(request))->states[request->item];
    struct kvc_subop *subop;

    if (request->header.op == KV_OP_OBJECT_DELETE)
        return finish_other(request, detail, detail_bytes);
    state->version = request->reply.object_version;
    if (state->version == 0) {
        snprintf(detail, detail_bytes, "an object without a version");
        return KV_CORRUPT;
    }
    subop = kvc_subop_add(kvc_request_op(request), request->connection);
    if (subop == NULL)
        return KV_NO_MEMORY;
    subop->head = request->item;
    subop->alone = true;
    return KV_OK;
}

/* ---- the operation ----------------------------------------------------------------------- */

static bool uses_buffers(const struct kvc_op_type *type)
{
    return type->id == KV_OP_OBJECT_PUT || type->id == KV_OP_OBJECT_GET;
}

static void ended(struct kv_op *op)
{
    for (uint32_t i = 0; i < objects_of(op)->n_objects; i++) {
        if (objects_of(op)->states[i].status == KV_IN_PROGRESS)
            set_status(op, i, op->status);
        kvc_buffer_release(objects_of(op)->states[i].buffer);
    }
}

static void describe(const struct kv_op *op,
                     const struct kvc_request *request,
                     char *text,
                     size_t text_bytes)
{
    uint32_t item = request != NULL ? request->item : objects_of(op)->first_bad;

    if (item < objects_of(op)->n_objects)
        snprintf(text, text_bytes, "object %.64s", objects_of(op)->states[item].name);
}

/* The four operations differ only in what they make of a reply. */
#define OBJECT_TYPE(NAME, ID, LAND, REPLY, FINISH)                                      \
    {                                                                                   \
        .name = NAME, .id = ID, .start_node = start_node, .lost = lost, .build = build, \
        .requests = {.land = LAND, .reply = REPLY, .finish = FINISH}, .failed = failed, \
        .ended = ended, .describe = describe,                                           \
    }

static const struct kvc_op_type types[] = {
    [KV_OBJECT_PUT] =
        OBJECT_TYPE("object_put", KV_OP_OBJECT_PUT, NULL, reply_other, finish_other),
    [KV_OBJECT_GET] = OBJECT_TYPE("object_get", KV_OP_OBJECT_GET, land, reply_get, finish_get),
    [KV_OBJECT_EXISTS] =
        OBJECT_TYPE("object_exists", KV_OP_OBJECT_EXISTS, NULL, reply_other, finish_other),
    [KV_OBJECT_DELETE] =
        OBJECT_TYPE("object_delete", KV_OP_OBJECT_DELETE, NULL, reply_other, finish_delete),
};

#undef OBJECT_TYPE

/* Returns the invalid argument, or NULL. */
static const char *object_fault(const struct kv_client *client,
                                const struct kvc_op_type *type,
                                const struct kv_object *object)
{
    size_t name_bytes = object->name != NULL ? strnlen(object->name, KV_NAME_BYTES_MAX + 1) : 0;

    if (name_bytes == 0 || name_bytes > KV_NAME_BYTES_MAX)
        return "name: must be 1 to 255 bytes";
    if (uses_buffers(type) &&
        !kvc_buffer_holds(client, object->buffer, object->offset, object->bytes))
        return "bytes do not fit the buffer";
    if (type->id == KV_OP_OBJECT_PUT && object->ttl_ms > KV_OBJECT_TTL_MAX_MS &&
        object->ttl_ms != KV_OBJECT_TTL_NONE)
        return "ttl_ms: must be at most 2592000000, or KV_OBJECT_TTL_NONE";
    return NULL;
}

/* Copies the arguments, including names.  Returns false if out of memory. */
static bool keep(struct kv_op *op, struct kv_object *objects, uint32_t n_objects)
{
    struct object_state *states;
    size_t bytes = n_objects * sizeof(*states);
    uint8_t *names;

    for (uint32_t i = 0; i < n_objects; i++)
        bytes += strlen(objects[i].name) + 1;
    states = kvc_op_capacity(op, bytes);
    if (states == NULL)
        return false;
    names = (uint8_t *)(states + n_objects);
    for (uint32_t i = 0; i < n_objects; i++) {
        const struct kv_object *object = &objects[i];
        struct object_state *state = &states[i];

        *state = (struct object_state){.name_bytes = (uint32_t)strlen(object->name)};
        state->name = kvc_op_keep(&names, object->name, state->name_bytes + 1);
        state->hash = kv_hash128(state->name, state->name_bytes);
        state->slot = kv_placement_object_slot(&state->hash);
        state->node = kv_placement_first(op->client->map, state->slot);
        if (uses_buffers(op->type)) {
            state->buffer = object->buffer;
            state->base = object->buffer->base + object->offset;
            state->bytes = object->bytes;
            state->ttl_ms = op->type->id == KV_OP_OBJECT_PUT ? object->ttl_ms : 0;
            state->evictable = object->evictable;
            kvc_buffer_hold(state->buffer);
        }
        kvc_op_require_node(op, state->node);
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
    KVC_ENTER(client);
    const struct kvc_op_type *type;
    kv_status_t status;
    struct kv_op *op;

    if ((unsigned)verb > KV_OBJECT_DELETE || n_objects >= UINT32_MAX)
        return kvc_set_error(&client->loop, KV_INVALID, "objects: verb %d, %zu objects",
                             (int)verb, n_objects);
    type = &types[verb];
    for (size_t i = 0; i < n_objects; i++) {
        const char *fault = object_fault(client, type, &objects[i]);

        if (fault != NULL)
            return kvc_set_error(&client->loop, KV_INVALID, "%s: object %zu: %s", type->name, i,
                                 fault);
        if (verb == KV_OBJECT_PUT && objects[i].bytes > KV_OBJECT_BYTES_MAX)
            return kvc_set_error(&client->loop, KV_TOO_LARGE,
                                 "%s: object %.64s: %zu bytes: limit %d", type->name,
                                 objects[i].name, objects[i].bytes, KV_OBJECT_BYTES_MAX);
    }
    status = kvc_op_begin(client, type, NULL, NULL, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    if (!keep(op, objects, (uint32_t)n_objects)) {
        kvc_op_discard(op);
        return kvc_set_error(&client->loop, KV_NO_MEMORY, "%s: out of memory", type->name);
    }
    return kvc_op_submit(op, ret_op);
}
