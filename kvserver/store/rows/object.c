#include "kvserver/store/rows/object.h"

#include "kernels/checksum.h"

#include <assert.h>

bool kv_objects_init(struct kv_objects *objects,
                     struct kv_arena *arena,
                     struct kv_health *health,
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

void kv_objects_fini(struct kv_objects *objects)
{
    kv_map_destroy(objects->map);
    objects->map = NULL;
}

static void object_free(struct kv_objects *objects, struct kv_stored_object *object)
{
    for (uint32_t i = 0; i < object->n_pieces; i++)
        kv_arena_free(objects->arena, object->pieces[i].class_id, object->pieces[i].bytes);
    objects->bytes -= object->bytes;
    kv_arena_free(objects->arena, object->class_id, object);
}

struct kv_stored_object *kv_object_create(struct kv_objects *objects,
                                          const struct kv_id128 *key,
                                          uint64_t bytes,
                                          uint32_t seed,
                                          const uint32_t *crcs)
{
    uint32_t n_pieces = kv_object_n_pieces(bytes);
    size_t record = sizeof(struct kv_stored_object) + n_pieces * sizeof(struct kv_object_piece);
    int record_class = kv_arena_class_rounded(objects->arena, record);

    if (record_class < 0)
        return NULL;
    struct kv_stored_object *object = kv_arena_alloc(objects->arena, record_class);
    if (object == NULL)
        return NULL;
    if (++objects->version == 0)
        objects->version = 1;
    *object = (struct kv_stored_object){.key = *key,
                                        .bytes = bytes,
                                        .pins = 1,
                                        .seed = seed,
                                        .version = objects->version,
                                        .class_id = (uint8_t)record_class};
    objects->bytes += bytes;
    for (; object->n_pieces < n_pieces; object->n_pieces++) {
        uint32_t size = kv_object_piece_bytes(bytes, object->n_pieces);
        int class_id = kv_arena_class_rounded(objects->arena, size);
        uint8_t *memory = class_id < 0 ? NULL : kv_arena_alloc(objects->arena, class_id);

        if (memory == NULL) {
            object_free(objects, object);
            return NULL;
        }
        object->pieces[object->n_pieces] = (struct kv_object_piece){
            .bytes = memory, .crc = crcs[object->n_pieces], .class_id = (uint8_t)class_id};
    }
    return object;
}

void kv_object_pin(struct kv_stored_object *object)
{
    object->pins++;
}

void kv_object_unpin(struct kv_objects *objects, struct kv_stored_object *object)
{
    assert(object->pins > 0);
    if (--object->pins == 0 && !object->published)
        object_free(objects, object);
}

kv_status_t kv_objects_publish(struct kv_objects *objects, struct kv_stored_object *object)
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

struct kv_stored_object *kv_objects_find(const struct kv_objects *objects,
                                         const struct kv_id128 *key)
{
    return kv_map_get(objects->map, key);
}

bool kv_objects_remove(struct kv_objects *objects, const struct kv_id128 *key)
{
    struct kv_stored_object *object = kv_map_remove(objects->map, key);

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
    if (objects->looked == object) {
        objects->looked = object->next;
        objects->looked_begun = false;
    }
    objects->health->objects_bad -= kv_object_n_bad(object);
    if (object->pins == 0)
        object_free(objects, object);
    return true;
}

void kv_object_mark_bad(struct kv_objects *objects,
                        struct kv_stored_object *object,
                        uint32_t piece)
{
    if (object->pieces[piece].is_bad || !object->published)
        return;
    object->pieces[piece].is_bad = true;
    objects->health->found[KV_KIND_OBJECTS]++;
    objects->health->objects_bad++;
}

bool kv_object_verify(struct kv_objects *objects,
                      struct kv_stored_object *object,
                      uint32_t piece)
{
    const struct kv_object_piece *one = &object->pieces[piece];

    if (kv_crc32c(object->seed + piece, one->bytes,
                  kv_object_piece_bytes(object->bytes, piece)) != one->crc)
        kv_object_mark_bad(objects, object, piece);
    return !one->is_bad;
}

uint32_t kv_object_n_bad(const struct kv_stored_object *object)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < object->n_pieces; i++)
        n += object->pieces[i].is_bad;
    return n;
}

kv_status_t kv_objects_replace(struct kv_objects *objects, struct kv_stored_object *object)
{
    const struct kv_stored_object *old = kv_objects_find(objects, &object->key);

    objects->health->mended[KV_KIND_OBJECTS] += kv_object_n_bad(old);
    object->version = old->version;
    (void)kv_objects_remove(objects, &object->key);
    return kv_objects_publish(objects, object);
}

bool kv_object_same(const struct kv_stored_object *object, uint64_t bytes, const uint32_t *crcs)
{
    if (object->bytes != bytes)
        return false;
    for (uint32_t i = 0; i < object->n_pieces; i++)
        if (object->pieces[i].crc != crcs[i])
            return false;
    return true;
}
