/* ops_objects.c - a tenant's objects: lists them, or deletes those whose names begin alike,
 * some at a time.
 *
 * A reply says where the next page goes on: a data thread, and after which of its objects.  One
 * thread after the other is asked, until the page is full. */
#include "kvserver/store/control/ops_private.h"
#include "kvserver/store/control/protobuf.h"
#include "kvserver/store/shard/object_page.h"

#include <stdlib.h>
#include <string.h>

static void page_done(struct kvs_control_call *call);

static void ask(struct kvs_control_call *call)
{
    kvs_control_send(
        call, call->thread,
        &(struct kvs_command){.kind = KVS_COMMAND_OBJECTS, .object_page = call->object_page},
        page_done);
}

/* Returns the objects as message fields, in one allocation that the caller frees.  NULL: out of
 * memory. */
static Kvpb__ObjectEntry **entries_message(struct kvs_object_page *page)
{
    const size_t n = page->deletes ? 0 : page->n;
    Kvpb__ObjectEntry **list = malloc((n + 1) * (sizeof(*list) + sizeof(**list)));

    if (list == NULL)
        return NULL;
    for (size_t i = 0; i < n; i++) {
        struct kvs_object_entry *entry = &page->entries[i];

        list[i] = (Kvpb__ObjectEntry *)(list + n) + i;
        kvpb__object_entry__init(list[i]);
        list[i]->name = (ProtobufCBinaryData){entry->name_bytes, (uint8_t *)entry->name};
        list[i]->bytes = entry->bytes;
        list[i]->age_ms = entry->age_us / 1000;
        list[i]->stays = entry->left_us == KVS_EXPIRY_NEVER;
        list[i]->ttl_left_ms = list[i]->stays ? 0 : entry->left_us / 1000;
        list[i]->evictable = entry->is_evictable;
        list[i]->pinned = entry->is_pinned;
        list[i]->bad_pieces = entry->n_bad;
    }
    return list;
}

static void reply_page(struct kvs_control_call *call)
{
    struct kvs_object_page *page = call->object_page;
    Kvpb__ObjectsReply reply = KVPB__OBJECTS_REPLY__INIT;
    Kvpb__ObjectsCursor next = KVPB__OBJECTS_CURSOR__INIT;
    Kvpb__Outcome outcome = kvs_pb_ok_outcome();
    Kvpb__ObjectEntry **entries = entries_message(page);

    if (entries == NULL) {
        kvs_control_refuse(call, KV_BUSY, "objects: out of memory");
        return;
    }
    reply.outcome = &outcome;
    reply.n_objects = page->deletes ? 0 : page->n;
    reply.objects = entries;
    reply.n_deleted = page->deletes ? page->n : 0;
    reply.bytes_deleted = page->bytes_deleted;
    next.thread = call->thread;
    next.after = page->after;
    next.until = page->until;
    if (page->is_last) {
        next.thread++;
        next.after = next.until = 0;
    }
    if (next.thread < call->control->n_threads)
        reply.next = &next;
    kvs_control_reply(call, &reply.base);
    free(entries);
}

static void page_done(struct kvs_control_call *call)
{
    struct kvs_object_page *page = call->object_page;

    if (page->is_late) {
        kvs_control_refuse(call, KV_BUSY, "objects: what is deleted is not erased on disk yet");
        return;
    }
    if (page->is_last && page->n < page->limit && call->thread + 1 < call->control->n_threads) {
        call->thread++;
        page->after = page->until = 0;
        page->is_begun = page->is_last = false;
        ask(call);
        return;
    }
    reply_page(call);
}

static void begin_page(struct kvs_control_call *call, const Kvpb__ObjectsRequest *request)
{
    const uint32_t limit = request->limit > 0 ? request->limit : KV_WIRE_OBJECTS_MAX;
    const Kvpb__ObjectsCursor *from = request->from;
    struct kvs_object_page *page;

    if (request->prefix.len > KV_NAME_BYTES_MAX || limit > KV_WIRE_OBJECTS_MAX ||
        (from != NULL && from->thread >= call->control->n_threads)) {
        kvs_control_refuse(call, KV_INVALID,
                           "objects: prefix of %zu bytes (limit %d), %u objects (limit %d) or "
                           "thread %u (of %u)",
                           request->prefix.len, KV_NAME_BYTES_MAX, limit, KV_WIRE_OBJECTS_MAX,
                           from != NULL ? from->thread : 0, call->control->n_threads);
        return;
    }
    page = calloc(1, sizeof(*page) + (request->deletes ? 0 : limit * sizeof(page->entries[0])));
    if (page == NULL) {
        kvs_control_refuse(call, KV_BUSY, "objects: out of memory");
        return;
    }
    page->tenant = call->tenant;
    page->prefix_bytes = (uint32_t)request->prefix.len;
    if (page->prefix_bytes > 0)
        memcpy(page->prefix, request->prefix.data, page->prefix_bytes);
    page->deletes = request->deletes;
    page->limit = limit;
    if (from != NULL) {
        call->thread = from->thread;
        page->after = from->after;
        page->until = from->until;
    }
    call->object_page = page;
    ask(call);
}

void kvs_control_objects(struct kvs_control_call *call)
{
    Kvpb__ObjectsRequest *request = kvs_call_unpack(call, &kvpb__objects_request__descriptor);

    if (request == NULL)
        return;
    begin_page(call, request);
    kvpb__objects_request__free_unpacked(request, NULL);
}
