/* Objects: memory in pieces; a map by name; a list in order of age, for the scrubber and for walks;
 * lists in order of use, of those that can make room; and a heap of those that expire. */
#include "kvserver/store/rows/object.h"

#include "kernels/checksum.h"

#include <assert.h>
#include <stdlib.h>
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

void kvs_objects_set_keeper(struct kvs_objects *objects,
                            const struct kvs_object_keeper *keeper,
                            void *arg)
{
    assert(objects->first == NULL);
    objects->keeper = keeper;
    objects->keeper_arg = arg;
}

/* Returns the bytes of the arena's elements that its pieces take. */
static uint64_t pieces_memory(const struct kvs_objects *objects,
                              const struct kvs_stored_object *object)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < object->n_pieces; i++)
        if (object->pieces[i].bytes != NULL && object->pieces[i].class_id != KVS_PIECE_LENT)
            bytes += kvs_arena_class_bytes(objects->arena, object->pieces[i].class_id);
    return bytes;
}

/* The same of all of it. */
static uint64_t memory_of(const struct kvs_objects *objects,
                          const struct kvs_stored_object *object)
{
    return kvs_arena_class_bytes(objects->arena, object->class_id) +
           pieces_memory(objects, object);
}

static void
piece_free(struct kvs_objects *objects, struct kvs_stored_object *object, uint32_t i)
{
    struct kvs_object_piece *piece = &object->pieces[i];

    if (piece->bytes == NULL)
        return;
    if (piece->class_id == KVS_PIECE_LENT) {
        free(piece->bytes);
        object->n_lent--;
        objects->n_lent--;
    } else {
        objects->memory -= kvs_arena_class_bytes(objects->arena, piece->class_id);
        kvs_arena_free(objects->arena, piece->class_id, piece->bytes);
    }
    piece->bytes = NULL;
    object->n_here--;
}

void kvs_objects_fini(struct kvs_objects *objects)
{
    for (struct kvs_stored_object *object = objects->first;
         object != NULL && objects->n_lent > 0; object = object->next)
        for (uint32_t i = 0; i < object->n_pieces && object->n_lent > 0; i++)
            if (object->pieces[i].bytes != NULL && object->pieces[i].class_id == KVS_PIECE_LENT)
                piece_free(objects, object, i);
    kv_map_destroy(objects->map);
    objects->map = NULL;
}

static void object_free(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    for (uint32_t i = 0; i < object->n_pieces; i++)
        piece_free(objects, object, i);
    objects->memory -= kvs_arena_class_bytes(objects->arena, object->class_id);
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
                                         .list = KVS_OBJECTS_STAY,
                                         .is_evictable = facts->terms.is_evictable,
                                         .version = objects->version,
                                         .name_bytes = (uint8_t)facts->name_bytes,
                                         .class_id = (uint8_t)record_class};
    objects->bytes += facts->bytes;
    objects->memory += memory_of(objects, object);
    for (; object->n_pieces < n_pieces; object->n_pieces++) {
        uint32_t size = kvs_object_piece_bytes(facts->bytes, object->n_pieces);
        int class_id;
        uint8_t *memory;

        object->pieces[object->n_pieces] =
            (struct kvs_object_piece){.crc = facts->crcs[object->n_pieces]};
        if (facts->is_away)
            continue;
        class_id = kvs_arena_class_rounded(objects->arena, size);
        memory = class_id < 0 ? NULL : kvs_arena_alloc(objects->arena, class_id);
        if (memory == NULL) {
            object_free(objects, object);
            return NULL;
        }
        objects->memory += kvs_arena_class_bytes(objects->arena, class_id);
        object->pieces[object->n_pieces].bytes = memory;
        object->pieces[object->n_pieces].class_id = (uint8_t)class_id;
        object->n_here++;
    }
    if (facts->name_bytes > 0)
        memcpy(&object->pieces[n_pieces], facts->name, facts->name_bytes);
    return object;
}

void kvs_object_pin(struct kvs_stored_object *object)
{
    object->pins++;
}

static void
piece_leave(struct kvs_objects *objects, struct kvs_stored_object *object, uint32_t piece);

static void
lent_leave(struct kvs_objects *objects, struct kvs_stored_object *object, uint32_t piece)
{
    if (object->published)
        piece_leave(objects, object, piece);
    else
        piece_free(objects, object, piece);
}

/* What was lent to read it leaves at once. */
static void give_back(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    for (uint32_t i = 0; i < object->n_pieces && object->n_lent > 0; i++)
        if (object->pieces[i].bytes != NULL && object->pieces[i].class_id == KVS_PIECE_LENT)
            lent_leave(objects, object, i);
}

void kvs_object_piece_send(struct kvs_stored_object *object, uint32_t piece)
{
    object->pieces[piece].n_sends++;
}

void kvs_object_piece_sent(struct kvs_objects *objects,
                           struct kvs_stored_object *object,
                           uint32_t piece)
{
    struct kvs_object_piece *one = &object->pieces[piece];

    assert(one->n_sends > 0 && one->class_id == KVS_PIECE_LENT);
    if (--one->n_sends == 0)
        lent_leave(objects, object, piece);
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
    else if (object->pins == object->n_loads && object->n_lent > 0)
        give_back(objects, object); /* nobody is left who waits for it, or sends it */
}

/* ---- how long they stay ------------------------------------------------------------------ */

/* Returns the list that it belongs to. */
static enum kvs_object_list list_of(const struct kvs_stored_object *object)
{
    if (object->is_saved && object->n_here > 0)
        return KVS_OBJECTS_LEAVE;
    if (!object->is_evictable)
        return KVS_OBJECTS_STAY;
    return object->is_saved ? KVS_OBJECTS_AWAY : KVS_OBJECTS_EVICT;
}

/* Returns the bytes of memory that it can give. */
static uint64_t spare_of(const struct kvs_objects *objects,
                         const struct kvs_stored_object *object)
{
    /* What is about to be saved can leave soon: who finds no memory is to try again. */
    if (object->is_saved ||
        (object->kept != NULL && !object->is_stuck && !object->is_evictable))
        return pieces_memory(objects, object);
    return object->is_evictable ? memory_of(objects, object) : 0;
}

/* Takes a published object out of its list, before what it is changes. */
static void leave_list(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    objects->n_absent -= object->is_absent;
    object->is_absent = false;
    objects->spare_bytes -= object->spare_bytes;
    kvs_pages_sub_spare(kvs_arena_pages(objects->arena), object->spare_bytes);
    object->spare_bytes = 0;
    if (object->list == KVS_OBJECTS_STAY)
        return;
    struct kvs_object_use *list = &objects->lists[object->list];
    if (object->used_before != NULL)
        object->used_before->used_after = object->used_after;
    else
        list->least = object->used_after;
    if (object->used_after != NULL)
        object->used_after->used_before = object->used_before;
    else
        list->most = object->used_before;
    list->n--;
    object->list = KVS_OBJECTS_STAY;
}

/* Puts it at the end of the list that it belongs to. */
static void enter_list(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    object->is_absent = object->n_here == 0;
    objects->n_absent += object->is_absent;
    object->spare_bytes = spare_of(objects, object);
    objects->spare_bytes += object->spare_bytes;
    kvs_pages_add_spare(kvs_arena_pages(objects->arena), object->spare_bytes);
    object->list = (uint8_t)list_of(object);
    if (object->list == KVS_OBJECTS_STAY)
        return;
    struct kvs_object_use *list = &objects->lists[object->list];
    object->used_after = NULL;
    object->used_before = list->most;
    if (list->most != NULL)
        list->most->used_after = object;
    else
        list->least = object;
    list->most = object;
    list->n++;
}

static void tell_keeper(struct kvs_objects *objects, struct kvs_stored_object *object);

void kvs_object_renew(struct kvs_objects *objects,
                      struct kvs_stored_object *object,
                      const struct kvs_object_terms *terms)
{
    const bool stays_longer = terms->expires_us > object->expiry.at_us;
    const bool is_to_stay = object->is_evictable && !terms->is_evictable;

    if (stays_longer) {
        if (object->published) {
            kvs_expiry_remove(&objects->expiries, &object->expiry);
            if (terms->expires_us != KVS_EXPIRY_NEVER)
                kvs_expiry_add(&objects->expiries, &object->expiry, terms->expires_us);
        }
        object->expiry.at_us = terms->expires_us;
    }
    if (is_to_stay) {
        if (object->published)
            leave_list(objects, object);
        object->is_evictable = false;
        if (object->published)
            enter_list(objects, object);
    }
    if (!(stays_longer || is_to_stay) || !object->published || objects->keeper == NULL)
        return;
    if (object->kept != NULL)
        objects->keeper->renewed(objects->keeper_arg, object);
    else if (!object->is_given_up)
        tell_keeper(objects, object); /* its life was too short to be saved */
}

void kvs_object_touch(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    if (object->list == KVS_OBJECTS_STAY || objects->lists[object->list].most == object)
        return;
    leave_list(objects, object);
    enter_list(objects, object);
}

bool kvs_objects_expire(struct kvs_objects *objects, uint64_t now_us)
{
    struct kvs_expiry *first = objects->expiries.first;

    if (first == NULL || first->at_us > now_us)
        return false;
    objects->n_expired++;
    return kvs_objects_remove(objects, &object_of(first)->key);
}

/* Returns the least recently used object of a list that nobody uses, or NULL. */
static struct kvs_stored_object *least_used(struct kvs_objects *objects,
                                            enum kvs_object_list list)
{
    for (size_t n = objects->lists[list].n; n > 0; n--) {
        struct kvs_stored_object *object = objects->lists[list].least;

        if (object->pins == 0)
            return object;
        kvs_object_touch(objects, object);
    }
    return NULL;
}

/* What has gone bad in memory is good on the disk. */
static void
piece_leave(struct kvs_objects *objects, struct kvs_stored_object *object, uint32_t piece)
{
    leave_list(objects, object);
    objects->health->objects_bad -= object->pieces[piece].is_bad;
    object->pieces[piece].is_bad = false;
    piece_free(objects, object, piece);
    objects->n_away++;
    enter_list(objects, object);
}

static void leave_memory(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    for (uint32_t i = 0; i < object->n_pieces; i++)
        if (object->pieces[i].bytes != NULL)
            piece_leave(objects, object, i);
    objects->n_left++;
}

bool kvs_objects_evict(struct kvs_objects *objects)
{
    struct kvs_stored_object *object = least_used(objects, KVS_OBJECTS_LEAVE);

    if (object != NULL) {
        leave_memory(objects, object);
        return true;
    }
    object = least_used(objects, KVS_OBJECTS_EVICT);
    if (object == NULL)
        return false;
    objects->n_evicted++;
    return kvs_objects_remove(objects, &object->key);
}

bool kvs_objects_evict_away(struct kvs_objects *objects)
{
    const struct kvs_stored_object *object = least_used(objects, KVS_OBJECTS_AWAY);

    if (object == NULL)
        return false;
    objects->n_evicted++;
    return kvs_objects_remove(objects, &object->key);
}

/* ---- pieces that are away ---------------------------------------------------------------- */

kv_status_t
kvs_object_need(struct kvs_objects *objects, struct kvs_stored_object *object, uint32_t piece)
{
    struct kvs_object_piece *one = &object->pieces[piece];

    if (one->is_bad && one->bytes != NULL && object->is_saved && object->pins == 0) {
        /* It has gone bad in memory: the disk has a good one. */
        objects->health->mended[KVS_KIND_OBJECTS]++;
        piece_leave(objects, object, piece);
    }
    if (one->bytes != NULL || one->is_bad)
        return KV_OK;
    if (!one->is_loading) {
        if (!objects->keeper->load(objects->keeper_arg, object, piece))
            return KV_BUSY;
        one->is_loading = true;
        object->n_loads++;
    }
    return KV_NOT_READY;
}

void kvs_object_piece_back(struct kvs_objects *objects,
                           struct kvs_stored_object *object,
                           uint32_t piece,
                           uint8_t *bytes,
                           int class_id)
{
    struct kvs_object_piece *one = &object->pieces[piece];

    assert(one->is_loading && one->bytes == NULL);
    one->is_loading = false;
    object->n_loads--;
    if (bytes == NULL) {
        kvs_object_mark_bad(objects, object, piece);
        one->is_bad = true;
        return;
    }
    if (object->published)
        leave_list(objects, object);
    one->bytes = bytes;
    one->class_id = (uint8_t)class_id;
    object->n_here++;
    if (class_id == KVS_PIECE_LENT) {
        object->n_lent++;
        objects->n_lent++;
    } else {
        objects->memory += kvs_arena_class_bytes(objects->arena, class_id);
    }
    if (object->published) {
        objects->n_away--;
        enter_list(objects, object);
    }
}

void kvs_object_set_stuck(struct kvs_objects *objects,
                          struct kvs_stored_object *object,
                          bool is_stuck)
{
    leave_list(objects, object);
    object->is_stuck = is_stuck;
    enter_list(objects, object);
}

void kvs_object_set_saved(struct kvs_objects *objects,
                          struct kvs_stored_object *object,
                          bool is_saved)
{
    assert(object->published && !object->is_saved);
    leave_list(objects, object);
    object->is_saved = is_saved;
    if (!is_saved) {
        object->kept = NULL;
        object->is_given_up = true;
    }
    enter_list(objects, object);
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

/* It can make room in another way, once it is to be saved. */
static void tell_keeper(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    leave_list(objects, object);
    objects->keeper->published(objects->keeper_arg, object);
    enter_list(objects, object);
}

kv_status_t kvs_objects_publish(struct kvs_objects *objects, struct kvs_stored_object *object)
{
    assert(kv_map_get(objects->map, &object->key) == NULL);
    if (!kv_map_set(objects->map, &object->key, object))
        return KV_NO_MEMORY;
    object->published = true;
    object->number = ++objects->number;
    if (object->expiry.at_us != KVS_EXPIRY_NEVER)
        kvs_expiry_add(&objects->expiries, &object->expiry, object->expiry.at_us);
    objects->n_away += object->n_pieces - object->n_here;
    enter_list(objects, object);
    object->next = NULL;
    object->prev = objects->last;
    if (objects->last != NULL)
        objects->last->next = object;
    else
        objects->first = object;
    objects->last = object;
    if (objects->keeper != NULL && object->kept == NULL)
        tell_keeper(objects, object);
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
    leave_list(objects, object);
    objects->n_away -= object->n_pieces - object->n_here;
    pass_by(objects, object);
    objects->health->objects_bad -= kvs_object_n_bad(object);
    if (object->kept != NULL)
        objects->keeper->removed(objects->keeper_arg, object);
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

    if (one->bytes != NULL &&
        kv_crc32c(object->seed + piece, one->bytes,
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
    struct kvs_stored_object *old = kvs_objects_find(objects, &object->key);
    const struct kvs_object_terms terms = {old->expiry.at_us, old->is_evictable};
    const uint32_t n_bad = kvs_object_n_bad(old);
    kv_status_t status;

    objects->health->mended[KVS_KIND_OBJECTS] += n_bad;
    object->created_us = old->created_us;
    kvs_object_renew(objects, object, &terms);
    /* The bytes are the same, so readers of several pieces may continue across the exchange.  But
     * what was written under the old version has to be erased, where it may be bad. */
    if ((old->kept == NULL && !old->is_given_up) || (old->is_saved && n_bad == 0)) {
        object->version = old->version;
        object->kept = old->kept;
        object->is_stuck = old->is_stuck;
        object->is_saved = old->is_saved;
        old->kept = NULL;
    }
    (void)kvs_objects_remove(objects, &object->key);
    status = kvs_objects_publish(objects, object);
    if (object->kept != NULL && status == KV_OK)
        objects->keeper->renewed(objects->keeper_arg, object);
    else if (object->kept != NULL)
        objects->keeper->removed(objects->keeper_arg, object);
    return status;
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
    uint32_t n_here = 0;

    assert(object->published && kv_map_get(objects->map, &object->key) == object);
    assert(kvs_arena_is_in_use(objects->arena, object->class_id, object));
    assert(object->n_pieces == kvs_object_n_pieces(object->bytes));
    assert(object->version != 0);
    assert(!object->is_saved || object->kept != NULL);
    assert(object->list == list_of(object) && object->spare_bytes == spare_of(objects, object));
    for (uint32_t i = 0; i < object->n_pieces; i++) {
        const struct kvs_object_piece *piece = &object->pieces[i];

        n_here += piece->bytes != NULL;
        assert(piece->bytes != NULL
                   ? !piece->is_loading &&
                         (piece->class_id == KVS_PIECE_LENT ||
                          kvs_arena_is_in_use(objects->arena, piece->class_id, piece->bytes))
                   : object->is_saved);
    }
    assert(n_here == object->n_here);
}

static void
check_list(const struct kvs_objects *objects, enum kvs_object_list list, size_t n_max)
{
    const struct kvs_object_use *use = &objects->lists[list];
    const struct kvs_stored_object *before = NULL;
    size_t n = 0;

    for (const struct kvs_stored_object *object = use->least; object != NULL;
         before = object, object = object->used_after) {
        n++;
        assert(n <= n_max && object->used_before == before);
        assert(object->list == list && object->published);
    }
    assert(use->most == before && n == n_max && n == use->n);
}

void kvs_objects_check(const struct kvs_objects *objects)
{
    const struct kvs_stored_object *prev = NULL;
    uint64_t bytes = 0, memory = 0, spare = 0, n_bad = 0, n_away = 0, n_absent = 0;
    size_t n = 0, n_expiries = 0, n_listed[KVS_OBJECTS_LISTS + 1] = {0};
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
        n_away += object->n_pieces - object->n_here;
        n_absent += object->is_absent;
        assert(object->is_absent == (object->n_here == 0));
        spare += object->spare_bytes;
        n_listed[object->list]++;
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
    assert(n_bad == objects->health->objects_bad && n_away == objects->n_away &&
           n_absent == objects->n_absent);
    assert(looked && walked && n_marks == KVS_OBJECTS_MARKS);
    for (unsigned i = 0; i < KVS_OBJECTS_LISTS; i++)
        check_list(objects, i, n_listed[i]);
    assert(spare == objects->spare_bytes);
    assert(n_expiries == objects->expiries.n);
    kvs_expiries_check(&objects->expiries);
}
