/* Objects: memory in pieces; a map by name; a list in order of age, for the scrubber and for walks;
 * a list in order of use, for eviction; and a heap of those that expire. */
#include "kvserver/store/rows/object.h"

#include "kernels/checksum.h"

#include <assert.h>
#include <string.h>

bool kvs_objects_init(struct kvs_objects *objects,
                      struct kvs_arena *arena,
                      struct kvs_health *health,
                      uint64_t secret,
                      uint64_t version)
{
    *objects = (struct kvs_objects){.arena = arena, .version = version, .health = health};
    objects->map = kv_map_create(secret);
    return objects->map != NULL;
}

void kvs_objects_fini(struct kvs_objects *objects)
{
    kv_map_destroy(objects->map);
    objects->map = NULL;
}

/* Returns the bytes of the arena's elements that it takes. */
static uint64_t memory_of(const struct kvs_objects *objects,
                          const struct kvs_stored_object *object)
{
    uint64_t bytes = kvs_arena_class_bytes(objects->arena, object->class_id);

    for (uint32_t i = 0; i < object->n_pieces; i++)
        bytes += kvs_arena_class_bytes(objects->arena, object->pieces[i].class_id);
    return bytes;
}

static void object_free(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    objects->memory -= memory_of(objects, object);
    for (uint32_t i = 0; i < object->n_pieces; i++)
        kvs_arena_free(objects->arena, object->pieces[i].class_id, object->pieces[i].bytes);
    objects->bytes -= object->bytes;
    kvs_arena_free(objects->arena, object->class_id, object);
}

struct kvs_stored_object *kvs_object_create(struct kvs_objects *objects,
                                            const struct kvs_object_facts *facts)
{
    uint32_t n_pieces = kvs_object_n_pieces(facts->bytes);
    size_t record = sizeof(struct kvs_stored_object) +
                    n_pieces * sizeof(struct kvs_object_piece) + facts->name_bytes;
    int record_class = kvs_arena_class_rounded(objects->arena, record);

    assert(facts->name_bytes <= KV_NAME_BYTES_MAX);
    if (record_class < 0)
        return NULL;
    struct kvs_stored_object *object = kvs_arena_alloc(objects->arena, record_class);
    if (object == NULL)
        return NULL;
    /* 0 means no version on the wire. */
    if (++objects->version == 0)
        objects->version = 1;
    /* The first pin is the caller's, who fills the object: until it is published,
     * kvs_object_unpin() is what frees it. */
    *object = (struct kvs_stored_object){.key = facts->key,
                                         .bytes = facts->bytes,
                                         .pins = 1,
                                         .created_us = facts->now_us,
                                         .expiry.at_us = facts->terms.expires_us,
                                         .seed = facts->seed,
                                         .tenant = facts->tenant,
                                         .is_evictable = facts->terms.is_evictable,
                                         .version = objects->version,
                                         .name_bytes = (uint8_t)facts->name_bytes,
                                         .class_id = (uint8_t)record_class};
    objects->bytes += facts->bytes;
    objects->memory += memory_of(objects, object);
    for (; object->n_pieces < n_pieces; object->n_pieces++) {
        uint32_t size = kvs_object_piece_bytes(facts->bytes, object->n_pieces);
        int class_id = kvs_arena_class_rounded(objects->arena, size);
        uint8_t *memory = class_id < 0 ? NULL : kvs_arena_alloc(objects->arena, class_id);

        if (memory == NULL) {
            object_free(objects, object);
            return NULL;
        }
        objects->memory += kvs_arena_class_bytes(objects->arena, class_id);
        object->pieces[object->n_pieces] =
            (struct kvs_object_piece){.bytes = memory,
                                      .crc = facts->crcs[object->n_pieces],
                                      .class_id = (uint8_t)class_id};
    }
    if (facts->name_bytes > 0)
        memcpy(&object->pieces[n_pieces], facts->name, facts->name_bytes);
    return object;
}

void kvs_object_pin(struct kvs_stored_object *object)
{
    object->pins++;
}

static struct kvs_stored_object *object_of(struct kvs_expiry *expiry)
{
    return (struct kvs_stored_object *)((char *)expiry -
                                        offsetof(struct kvs_stored_object, expiry));
}

/* A published object without pins stays; a removed one is freed with its last pin. */
void kvs_object_unpin(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    assert(object->pins > 0);
    if (--object->pins == 0 && !object->published)
        object_free(objects, object);
}

/* ---- how long they stay ------------------------------------------------------------------ */

static void enter_used(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    object->used_after = NULL;
    object->used_before = objects->most_used;
    if (objects->most_used != NULL)
        objects->most_used->used_after = object;
    else
        objects->least_used = object;
    objects->most_used = object;
}

static void leave_used(struct kvs_objects *objects, const struct kvs_stored_object *object)
{
    if (object->used_before != NULL)
        object->used_before->used_after = object->used_after;
    else
        objects->least_used = object->used_after;
    if (object->used_after != NULL)
        object->used_after->used_before = object->used_before;
    else
        objects->most_used = object->used_before;
}

/* An object is, or is no longer, something that can make room for others. */
static void
set_evictable(struct kvs_objects *objects, struct kvs_stored_object *object, bool is_evictable)
{
    const uint64_t bytes = memory_of(objects, object);

    if (is_evictable) {
        enter_used(objects, object);
        objects->n_evictable++;
        objects->evictable_memory += bytes;
        kvs_pages_add_spare(kvs_arena_pages(objects->arena), bytes);
    } else {
        leave_used(objects, object);
        objects->n_evictable--;
        objects->evictable_memory -= bytes;
        kvs_pages_sub_spare(kvs_arena_pages(objects->arena), bytes);
    }
}

void kvs_object_renew(struct kvs_objects *objects,
                      struct kvs_stored_object *object,
                      const struct kvs_object_terms *terms)
{
    if (terms->expires_us > object->expiry.at_us) {
        if (object->published) {
            kvs_expiry_remove(&objects->expiries, &object->expiry);
            if (terms->expires_us != KVS_EXPIRY_NEVER)
                kvs_expiry_add(&objects->expiries, &object->expiry, terms->expires_us);
        }
        object->expiry.at_us = terms->expires_us;
    }
    if (object->is_evictable && !terms->is_evictable) {
        object->is_evictable = false;
        if (object->published)
            set_evictable(objects, object, false);
    }
}

void kvs_object_touch(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    if (!object->is_evictable || !object->published || objects->most_used == object)
        return;
    leave_used(objects, object);
    enter_used(objects, object);
}

bool kvs_objects_expire(struct kvs_objects *objects, uint64_t now_us)
{
    struct kvs_expiry *first = objects->expiries.first;

    if (first == NULL || first->at_us > now_us)
        return false;
    objects->n_expired++;
    return kvs_objects_remove(objects, &object_of(first)->key);
}

bool kvs_objects_evict(struct kvs_objects *objects)
{
    for (size_t n = objects->n_evictable; n > 0; n--) {
        struct kvs_stored_object *object = objects->least_used;

        if (object->pins == 0) {
            objects->n_evicted++;
            return kvs_objects_remove(objects, &object->key);
        }
        /* Somebody uses it. */
        kvs_object_touch(objects, object);
    }
    return false;
}

/* ---- walks ------------------------------------------------------------------------------- */

void kvs_objects_walk_begin(struct kvs_objects *objects, uint64_t after)
{
    const struct kvs_objects_mark *best = NULL;

    for (unsigned i = 0; i < KVS_OBJECTS_MARKS; i++) {
        const struct kvs_objects_mark *mark = &objects->marks[i];

        if (mark->object != NULL && mark->after <= after &&
            (best == NULL || mark->after > best->after))
            best = mark;
    }
    objects->walk = best != NULL ? best->object : objects->first;
}

void kvs_objects_walk_on(struct kvs_objects *objects)
{
    objects->walk = objects->walk->next;
}

void kvs_objects_walk_end(struct kvs_objects *objects, uint64_t after)
{
    objects->marks[objects->next_mark++ % KVS_OBJECTS_MARKS] =
        (struct kvs_objects_mark){.object = objects->walk, .after = after};
    objects->walk = NULL;
}

/* Nobody must be left at freed memory: they go on with the next object. */
static void pass_by(struct kvs_objects *objects, const struct kvs_stored_object *object)
{
    if (objects->looked == object) {
        objects->looked = object->next;
        objects->looked_begun = false;
    }
    if (objects->walk == object)
        objects->walk = object->next;
    for (unsigned i = 0; i < KVS_OBJECTS_MARKS; i++)
        if (objects->marks[i].object == object)
            objects->marks[i].object = object->next;
}

/* ---- what is published ------------------------------------------------------------------- */

kv_status_t kvs_objects_publish(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    assert(kv_map_get(objects->map, &object->key) == NULL);
    if (!kv_map_set(objects->map, &object->key, object))
        return KV_NO_MEMORY;
    object->published = true;
    object->number = ++objects->number;
    if (object->expiry.at_us != KVS_EXPIRY_NEVER)
        kvs_expiry_add(&objects->expiries, &object->expiry, object->expiry.at_us);
    if (object->is_evictable)
        set_evictable(objects, object, true);
    object->next = NULL;
    object->prev = objects->last;
    if (objects->last != NULL)
        objects->last->next = object;
    else
        objects->first = object;
    objects->last = object;
    return KV_OK;
}

struct kvs_stored_object *kvs_objects_find(const struct kvs_objects *objects,
                                           const struct kv_id128 *key)
{
    return kv_map_get(objects->map, key);
}

struct kvs_stored_object *
kvs_objects_find_live(struct kvs_objects *objects, const struct kv_id128 *key, uint64_t now_us)
{
    struct kvs_stored_object *object = kvs_objects_find(objects, key);

    if (object == NULL || object->expiry.at_us > now_us)
        return object;
    objects->n_expired++;
    (void)kvs_objects_remove(objects, key);
    return NULL;
}

bool kvs_objects_remove(struct kvs_objects *objects, const struct kv_id128 *key)
{
    struct kvs_stored_object *object = kv_map_remove(objects->map, key);

    if (object == NULL)
        return false;
    object->published = false;
    if (object->prev != NULL)
        object->prev->next = object->next;
    else
        objects->first = object->next;
    if (object->next != NULL)
        object->next->prev = object->prev;
    else
        objects->last = object->prev;
    if (object->expiry.at_us != KVS_EXPIRY_NEVER)
        kvs_expiry_remove(&objects->expiries, &object->expiry);
    if (object->is_evictable)
        set_evictable(objects, object, false);
    pass_by(objects, object);
    objects->health->objects_bad -= kvs_object_n_bad(object);
    if (object->pins == 0)
        object_free(objects, object);
    return true;
}

void kvs_object_mark_bad(struct kvs_objects *objects,
                         struct kvs_stored_object *object,
                         uint32_t piece)
{
    if (object->pieces[piece].is_bad || !object->published)
        return;
    object->pieces[piece].is_bad = true;
    objects->health->found[KVS_KIND_OBJECTS]++;
    objects->health->objects_bad++;
}

bool kvs_object_verify(struct kvs_objects *objects,
                       struct kvs_stored_object *object,
                       uint32_t piece)
{
    const struct kvs_object_piece *one = &object->pieces[piece];

    if (kv_crc32c(object->seed + piece, one->bytes,
                  kvs_object_piece_bytes(object->bytes, piece)) != one->crc)
        kvs_object_mark_bad(objects, object, piece);
    return !one->is_bad;
}

uint32_t kvs_object_n_bad(const struct kvs_stored_object *object)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < object->n_pieces; i++)
        n += object->pieces[i].is_bad;
    return n;
}

kv_status_t kvs_objects_replace(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    const struct kvs_stored_object *old = kvs_objects_find(objects, &object->key);
    const struct kvs_object_terms terms = {old->expiry.at_us, old->is_evictable};

    objects->health->mended[KVS_KIND_OBJECTS] += kvs_object_n_bad(old);
    /* The bytes are the same, so readers of several pieces may continue across the exchange. */
    object->version = old->version;
    object->created_us = old->created_us;
    kvs_object_renew(objects, object, &terms);
    (void)kvs_objects_remove(objects, &object->key);
    return kvs_objects_publish(objects, object);
}

bool kvs_object_same(const struct kvs_stored_object *object,
                     uint64_t bytes,
                     const uint32_t *crcs)
{
    if (object->bytes != bytes)
        return false;
    /* CRCs stand for the bytes: an object's are as good as its pieces, and need no reading. */
    for (uint32_t i = 0; i < object->n_pieces; i++)
        if (object->pieces[i].crc != crcs[i])
            return false;
    return true;
}

static void check_object(const struct kvs_objects *objects,
                         const struct kvs_stored_object *object)
{
    assert(object->published && kv_map_get(objects->map, &object->key) == object);
    assert(kvs_arena_is_in_use(objects->arena, object->class_id, object));
    assert(object->n_pieces == kvs_object_n_pieces(object->bytes));
    assert(object->version != 0);
    for (uint32_t i = 0; i < object->n_pieces; i++)
        assert(kvs_arena_is_in_use(objects->arena, object->pieces[i].class_id,
                                   object->pieces[i].bytes));
}

static void check_used(const struct kvs_objects *objects, size_t n_evictable)
{
    const struct kvs_stored_object *before = NULL;
    size_t n = 0;

    for (const struct kvs_stored_object *object = objects->least_used; object != NULL;
         before = object, object = object->used_after) {
        n++;
        assert(n <= n_evictable && object->used_before == before);
        assert(object->is_evictable && object->published);
    }
    assert(objects->most_used == before && n == n_evictable && n == objects->n_evictable);
}

void kvs_objects_check(const struct kvs_objects *objects)
{
    const struct kvs_stored_object *prev = NULL;
    uint64_t bytes = 0, memory = 0, evictable = 0, n_bad = 0;
    size_t n = 0, n_evictable = 0, n_expiries = 0;
    bool looked = objects->looked == NULL, walked = objects->walk == NULL;
    unsigned n_marks = 0;

    for (const struct kvs_stored_object *object = objects->first; object != NULL;
         prev = object, object = object->next) {
        n++;
        assert(n <= kv_map_count(objects->map) && object->prev == prev);
        assert(object->number > (prev != NULL ? prev->number : 0));
        check_object(objects, object);
        bytes += object->bytes;
        memory += memory_of(objects, object);
        n_bad += kvs_object_n_bad(object);
        n_evictable += object->is_evictable;
        evictable += object->is_evictable ? memory_of(objects, object) : 0;
        n_expiries += object->expiry.at_us != KVS_EXPIRY_NEVER;
        looked = looked || objects->looked == object;
        walked = walked || objects->walk == object;
        for (unsigned i = 0; i < KVS_OBJECTS_MARKS; i++)
            n_marks += objects->marks[i].object == object;
    }
    for (unsigned i = 0; i < KVS_OBJECTS_MARKS; i++)
        n_marks += objects->marks[i].object == NULL;
    assert(objects->last == prev && n == kv_map_count(objects->map));
    assert(bytes <= objects->bytes && memory <= objects->memory);
    assert(n_bad == objects->health->objects_bad);
    assert(looked && walked && n_marks == KVS_OBJECTS_MARKS);
    check_used(objects, n_evictable);
    assert(evictable == objects->evictable_memory);
    assert(n_expiries == objects->expiries.n);
    kvs_expiries_check(&objects->expiries);
}
