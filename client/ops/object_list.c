/* Lists of a node's objects, some at a time (kvstore.proto, ObjectsReply), or their end. */
#include "client/call.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/peer.h"
#include "client/state.h"
#include "proto/kv_wire.h"
#include "proto/kvstore.pb-c.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct list_part {
    uint32_t node_index;
    struct kv_object_list_options options; /* but for the prefix */
    uint32_t prefix_bytes;
    char *prefix; /* a copy */
    struct kv_object_list list;
    void *memory; /* of the list */
};
static_assert(sizeof(struct list_part) <= KVC_OP_STATE_BYTES, "an operation has room for it");

static struct list_part *list_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

/* Returns the invalid field, or NULL.  A cursor that does not go on would never end. */
static const char *list_fault(const struct list_part *part, const Kvpb__ObjectsReply *reply)
{
    const struct kv_object_cursor *from = &part->options.from;
    const uint32_t limit = part->options.limit > 0 ? part->options.limit : KV_WIRE_OBJECTS_MAX;

    if (reply->n_objects > (part->options.deletes ? 0 : limit))
        return "objects";
    for (size_t i = 0; i < reply->n_objects; i++) {
        const ProtobufCBinaryData *name = &reply->objects[i]->name;

        if (name->len > KV_NAME_BYTES_MAX || name->len < part->prefix_bytes ||
            memchr(name->data, '\0', name->len) != NULL ||
            (part->prefix_bytes > 0 &&
             memcmp(name->data, part->prefix, part->prefix_bytes) != 0))
            return "name of an object";
    }
    if (reply->next != NULL &&
        (reply->next->thread < from->thread ||
         (reply->next->thread == from->thread && reply->next->after <= from->after)))
        return "next";
    return NULL;
}

/* One block of memory: objects, names. */
static kv_status_t keep_list(struct kv_op *op, const Kvpb__ObjectsReply *reply)
{
    struct list_part *part = list_of(op);
    struct kv_object_info *objects;
    size_t bytes = 1;
    char *text;

    for (size_t i = 0; i < reply->n_objects; i++)
        bytes += reply->objects[i]->name.len + 1;
    part->memory = malloc(reply->n_objects * sizeof(*objects) + bytes);
    if (part->memory == NULL)
        return KV_NO_MEMORY;
    objects = part->memory;
    text = (char *)(objects + reply->n_objects);
    for (size_t i = 0; i < reply->n_objects; i++) {
        const Kvpb__ObjectEntry *entry = reply->objects[i];

        objects[i] = (struct kv_object_info){
            .name = text,
            .bytes = entry->bytes,
            .age_ms = entry->age_ms,
            .ttl_left_ms = entry->stays ? UINT64_MAX : entry->ttl_left_ms,
            .bad_pieces = entry->bad_pieces,
            .evictable = entry->evictable,
            .pinned = entry->pinned,
        };
        if (entry->name.len > 0)
            memcpy(text, entry->name.data, entry->name.len);
        text[entry->name.len] = '\0';
        text += entry->name.len + 1;
    }
    part->list = (struct kv_object_list){
        .n_objects = (uint32_t)reply->n_objects,
        .objects = objects,
        .n_deleted = reply->n_deleted,
        .bytes_deleted = reply->bytes_deleted,
        .is_last = reply->next == NULL,
    };
    if (reply->next != NULL)
        part->list.next = (struct kv_object_cursor){reply->next->thread, reply->next->after,
                                                    reply->next->until};
    return KV_OK;
}

static void list_done(struct kvc_call *call,
                      kv_status_t status,
                      const ProtobufCMessage *message,
                      const char *detail)
{
    const Kvpb__ObjectsReply *reply = (const Kvpb__ObjectsReply *)message;
    struct kv_op *op = kvc_call_op(call);

    if (op == NULL)
        return;
    if (status == KV_OK) {
        const char *fault = list_fault(list_of(op), reply);

        if (fault != NULL) {
            kvc_op_fail(op, call->node, NULL, KV_CORRUPT, "reply: %s: does not match", fault);
            return;
        }
        status = keep_list(op, reply);
    }
    if (status != KV_OK)
        kvc_op_fail(op, call->node, NULL, status, "%s", detail);
}

static void start_list(struct kv_op *op)
{
    const struct list_part *part = list_of(op);
    const struct kv_object_cursor *from = &part->options.from;
    struct kvc_node *node = &op->client->nodes[part->node_index];
    Kvpb__ObjectsRequest request = KVPB__OBJECTS_REQUEST__INIT;
    Kvpb__ObjectsCursor cursor = KVPB__OBJECTS_CURSOR__INIT;
    kv_status_t status;

    if (node->version < KV_WIRE_VERSION_PREFIXES) {
        kvc_op_fail(op, node, NULL, KV_UNSUPPORTED,
                    "the node's version has no lists of objects");
        return;
    }
    cursor.thread = from->thread;
    cursor.after = from->after;
    cursor.until = from->until;
    request.prefix = (ProtobufCBinaryData){part->prefix_bytes, (uint8_t *)part->prefix};
    request.from = &cursor;
    request.limit = part->options.limit;
    request.deletes = part->options.deletes;
    status = kvc_call_begin(node, &op->owner, NULL, KV_OP_OBJECTS, &request.base, list_done);
    if (status != KV_OK)
        kvc_op_fail(op, node, NULL, status, "cannot send the request");
}

static void fini_list(struct kv_op *op)
{
    free(list_of(op)->memory);
    free(list_of(op)->prefix);
    list_of(op)->memory = list_of(op)->prefix = NULL;
}

static const struct kvc_op_type list_type = {
    .name = "objects",
    .id = KV_OP_OBJECTS,
    .start = start_list,
    .fini = fini_list,
};

kv_status_t kv_object_list_begin(struct kv_client *client,
                                 uint32_t node,
                                 const struct kv_object_list_options *options,
                                 uint32_t deadline_ms,
                                 struct kv_op **ret_op)
{
    KVC_ENTER(client);
    const char *prefix = options->prefix != NULL ? options->prefix : "";
    const size_t prefix_bytes = strnlen(prefix, KV_NAME_BYTES_MAX + 1);
    kv_status_t status;
    struct kv_op *op;

    if (node >= client->n_nodes || prefix_bytes > KV_NAME_BYTES_MAX ||
        options->limit > KV_WIRE_OBJECTS_MAX)
        return kvc_set_error(&client->loop, KV_INVALID,
                             "objects: node %u, prefix of %zu bytes, limit %u", node,
                             prefix_bytes, options->limit);
    status = kvc_op_begin(client, &list_type, NULL, NULL, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    list_of(op)->node_index = node;
    list_of(op)->options = *options;
    list_of(op)->options.prefix = NULL;
    list_of(op)->prefix_bytes = (uint32_t)prefix_bytes;
    list_of(op)->prefix = strdup(prefix);
    if (list_of(op)->prefix == NULL) {
        kvc_op_discard(op);
        return kvc_set_error(&client->loop, KV_NO_MEMORY, "objects: out of memory");
    }
    kvc_op_require_node(op, node);
    return kvc_op_submit(op, ret_op);
}

const struct kv_object_list *kv_op_object_list(const struct kv_op *op)
{
    KVC_LOOK(op->client);

    return op->type == &list_type && op->status == KV_OK ? &list_of(op)->list : NULL;
}
