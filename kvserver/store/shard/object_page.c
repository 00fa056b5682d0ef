#include "kvserver/store/shard/object_page.h"

#include "kvserver/base/slice.h"

#include <string.h>

enum {
    LOOKS_MAX = 20000, /* at objects in a page, a few ms: other commands wait for its end */
    LOOKS_SLICE = 16,  /* between two looks at the clock */
    SETTLE_US = 2000000,
};

static bool is_meant(const struct kvs_object_page *page,
                     const struct kvs_stored_object *object,
                     uint64_t now_us)
{
    return object->tenant == page->tenant && object->expiry.at_us > now_us &&
           object->name_bytes >= page->prefix_bytes &&
           memcmp(kvs_object_name(object), page->prefix, page->prefix_bytes) == 0;
}

static void
list(struct kvs_object_page *page, const struct kvs_stored_object *object, uint64_t now_us)
{
    struct kvs_object_entry *entry = &page->entries[page->n];

    memcpy(entry->name, kvs_object_name(object), object->name_bytes);
    entry->name_bytes = object->name_bytes;
    entry->is_evictable = object->is_evictable;
    entry->is_pinned = object->pins > 0;
    entry->n_bad = kvs_object_n_bad(object);
    entry->bytes = object->bytes;
    entry->age_us = now_us - object->created_us;
    entry->left_us = object->expiry.at_us == KVS_EXPIRY_NEVER ? KVS_EXPIRY_NEVER
                                                              : object->expiry.at_us - now_us;
}

/* Looks at the object at which the walk is, which goes on. */
static void look(struct kvs_object_page *page, struct kvs_objects *objects, uint64_t now_us)
{
    const struct kvs_stored_object *object = objects->walk;

    if (!is_meant(page, object, now_us)) {
        kvs_objects_walk_on(objects);
    } else if (page->deletes) {
        const struct kv_id128 key = object->key;

        page->bytes_deleted += object->bytes;
        (void)kvs_objects_remove(objects, &key);
        page->n++;
    } else {
        list(page, object, now_us);
        kvs_objects_walk_on(objects);
        page->n++;
    }
}

/* The page has been walked.  Returns whether it is done: what is deleted is not to come back. */
static bool
is_settled(struct kvs_object_page *page, const struct kvs_objects *objects, uint64_t now_us)
{
    uint64_t newest, oldest;

    if (!page->deletes)
        return true;
    /* Also of those that an earlier request has removed, whose reply was lost. */
    newest = kvs_objects_removals(objects, &oldest);
    if (page->settled_us == 0) {
        page->settled_us = now_us + SETTLE_US;
        page->removal = newest;
    }
    page->is_late = page->is_late || (oldest <= page->removal && now_us >= page->settled_us);
    if (oldest <= page->removal && !page->is_late)
        return false;
    page->settled_us = 0;
    return true;
}

bool kvs_object_page_slice(struct kvs_object_page *page,
                           struct kvs_objects *objects,
                           const struct kv_clock *clock,
                           uint64_t now_us)
{
    struct kv_slice slice = kv_slice_begin(clock, LOOKS_SLICE);

    if (page->settled_us > 0)
        return is_settled(page, objects, now_us);
    if (!page->is_begun) {
        page->is_begun = true;
        page->n_looks = 0;
        if (page->until == 0)
            page->until = objects->number;
        kvs_objects_walk_begin(objects, page->after);
    }
    do {
        const struct kvs_stored_object *object = objects->walk;

        if (object == NULL || object->number > page->until) {
            page->is_last = true;
            objects->walk = NULL;
            return is_settled(page, objects, now_us);
        }
        if (object->number <= page->after) {
            kvs_objects_walk_on(objects);
            continue;
        }
        if (page->n == page->limit || page->n_looks == LOOKS_MAX) {
            kvs_objects_walk_end(objects, page->after);
            return is_settled(page, objects, now_us);
        }
        page->n_looks++;
        page->after = object->number;
        look(page, objects, now_us);
    } while (!kv_slice_over(&slice));
    return false;
}
