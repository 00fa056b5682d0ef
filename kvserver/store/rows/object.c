/* Objects: memory in pieces, a map by name, and a list in order of age for the scrubber. */
#include "kvserver/store/rows/object.h"

#include "kernels/checksum.h"

#include <assert.h>

bool kvs_objects_init(struct kvs_objects *objects,
                      struct kvs_arena *arena,
                      struct kvs_health *health,
                      uint64_t secret,
                      uint64_t version)
{
    objects->arena = arena;
    objects->bytes = 0;
    objects->version = version;
    objects->first = objects->last = objects->looked = NULL;
    objects->looked_begun = false;
    objects->health = health;
    objects->map = kv_map_create(secret);
    return objects->map != NULL;
}

void kvs_objects_fini(struct kvs_objects *objects)
{
    kv_map_destroy(objects->map);
    objects->map = NULL;
}

static void object_free(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    for (uint32_t i = 0; i < object->n_pieces; i++)
        kvs_arena_free(objects->arena, object->pieces[i].class_id, object->pieces[i].bytes);
    objects->bytes -= object->bytes;
    kvs_arena_free(objects->arena, object->class_id, object);
}

struct kvs_stored_object *kvs_object_create(struct kvs_objects *objects,
                                            const struct kv_id128 *key,
                                            uint64_t bytes,
                                            uint32_t seed,
                                            const uint32_t *crcs)
{
    uint32_t n_pieces = kvs_object_n_pieces(bytes);
    size_t record =
        sizeof(struct kvs_stored_object) + n_pieces * sizeof(struct kvs_object_piece);
    int record_class = kvs_arena_class_rounded(objects->arena, record);

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
    *object = (struct kvs_stored_object){.key = *key,
                                         .bytes = bytes,
                                         .pins = 1,
                                         .seed = seed,
                                         .version = objects->version,
                                         .class_id = (uint8_t)record_class};
    objects->bytes += bytes;
    for (; object->n_pieces < n_pieces; object->n_pieces++) {
        uint32_t size = kvs_object_piece_bytes(bytes, object->n_pieces);
        int class_id = kvs_arena_class_rounded(objects->arena, size);
        uint8_t *memory = class_id < 0 ? NULL : kvs_arena_alloc(objects->arena, class_id);

        if (memory == NULL) {
            object_free(objects, object);
            return NULL;
        }
        object->pieces[object->n_pieces] = (struct kvs_object_piece){
            .bytes = memory, .crc = crcs[object->n_pieces], .class_id = (uint8_t)class_id};
    }
    return object;
}

void kvs_object_pin(struct kvs_stored_object *object)
{
    object->pins++;
}

/* A published object without pins stays; a removed one is freed with its last pin. */
void kvs_object_unpin(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    assert(object->pins > 0);
    if (--object->pins == 0 && !object->published)
        object_free(objects, object);
}

kv_status_t kvs_objects_publish(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    assert(kv_map_get(objects->map, &object->key) == NULL);
    if (!kv_map_set(objects->map, &object->key, object))
        return KV_NO_MEMORY;
    object->published = true;
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
    /* The scrubber must not be left at freed memory: it continues with the next object. */
    if (objects->looked == object) {
        objects->looked = object->next;
        objects->looked_begun = false;
    }
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

    objects->health->mended[KVS_KIND_OBJECTS] += kvs_object_n_bad(old);
    /* The bytes are the same, so readers of several pieces may continue across the exchange. */
    object->version = old->version;
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

void kvs_objects_check(const struct kvs_objects *objects)
{
    const struct kvs_stored_object *prev = NULL;
    uint64_t bytes = 0, n_bad = 0;
    size_t n = 0;
    bool looked = objects->looked == NULL;

    for (const struct kvs_stored_object *object = objects->first; object != NULL;
         prev = object, object = object->next) {
        n++;
        assert(n <= kv_map_count(objects->map) && object->prev == prev);
        check_object(objects, object);
        bytes += object->bytes;
        n_bad += kvs_object_n_bad(object);
        looked = looked || objects->looked == object;
    }
    assert(objects->last == prev && n == kv_map_count(objects->map));
    assert(bytes <= objects->bytes && n_bad == objects->health->objects_bad && looked);
}
