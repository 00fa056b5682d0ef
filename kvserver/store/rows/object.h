/* object.h - immutable bytes under a caller's name, kept in pieces of KV_WIRE_BULK_MAX bytes.
 *
 *     kvs_object_create -> FILLING -> kvs_objects_publish -> in the map -> kvs_objects_remove
 *
 * An object outlives its removal while transfers have it pinned.
 *
 * Invariants, which kvs_objects_check() asserts:
 *   (1) The published objects are those in the map, each under its key, and those in the list,
 *       every link back of which is the reverse of a link forward.
 *   (2) Their bytes are not more than `bytes`, which counts those being filled and those that
 *       only transfers have as well.
 *   (3) The scrub is at one of them, or behind the last.
 *   (4) Their bad pieces are those that `health` counts.
 *   (5) Each has its record and every piece lent from the arena, and a version that is not
 *       0.
 *
 * Threads: the data thread that owns the object's slot.  Memory: the arena's.
 */
#ifndef KV_KVSERVER_STORE_ROWS_OBJECT_H
#define KV_KVSERVER_STORE_ROWS_OBJECT_H

#include "kvserver/base/map.h"
#include "kvserver/store/rows/arena.h"
#include "kvserver/store/rows/health.h"
#include "proto/kv_wire.h"

#include <stdbool.h>

struct kvs_object_piece {
    uint8_t *bytes;
    uint32_t crc; /* CRC32C, seeded by kv_object_seed(name) + index of the piece */
    uint8_t class_id;
    bool is_bad; /* it failed its checksum: refused until the object is put again */
};

struct kvs_stored_object {
    struct kv_id128 key;
    uint64_t bytes;
    uint32_t n_pieces;
    uint32_t pins;
    uint64_t version; /* no other object of the name ever has it; never 0 */
    uint32_t seed;    /* kv_object_seed(name) */
    struct kvs_stored_object *next, *prev; /* of the published ones */
    bool published;
    uint8_t class_id; /* of this record */
    struct kvs_object_piece pieces[];
};

struct kvs_objects {
    struct kvs_arena *arena;
    struct kv_map *map;
    uint64_t bytes;
    uint64_t version;                       /* of the newest object */
    struct kvs_stored_object *first, *last; /* the published ones, as they came */
    struct kvs_stored_object *looked; /* the scrub is at it (scrub.h), NULL: behind the last */
    bool looked_begun;                /* ... and has seen some of it */
    struct kvs_health *health;
};

/* `version` is where versions begin: random, so that those of a node that ran before under this
 * address do not come again. */
bool kvs_objects_init(struct kvs_objects *objects,
                      struct kvs_arena *arena,
                      struct kvs_health *health,
                      uint64_t secret,
                      uint64_t version);
void kvs_objects_fini(struct kvs_objects *objects);

/* Pieces of an object of that size; one for an empty object. */
static inline uint32_t kvs_object_n_pieces(uint64_t bytes)
{
    return bytes == 0 ? 1 : (uint32_t)((bytes + KV_WIRE_BULK_MAX - 1) / KV_WIRE_BULK_MAX);
}

static inline uint32_t kvs_object_piece_bytes(uint64_t bytes, uint32_t piece)
{
    uint64_t left = bytes - (uint64_t)piece * KV_WIRE_BULK_MAX;

    return left < KV_WIRE_BULK_MAX ? (uint32_t)left : KV_WIRE_BULK_MAX;
}

/* Memory for an object, pinned once.  NULL: the arena is full. */
struct kvs_stored_object *kvs_object_create(struct kvs_objects *objects,
                                            const struct kv_id128 *key,
                                            uint64_t bytes,
                                            uint32_t seed,
                                            const uint32_t *crcs);
void kvs_object_pin(struct kvs_stored_object *object);
void kvs_object_unpin(struct kvs_objects *objects, struct kvs_stored_object *object);

/* Makes it findable.  KV_NO_MEMORY.  The name must be free. */
kv_status_t kvs_objects_publish(struct kvs_objects *objects, struct kvs_stored_object *object);
struct kvs_stored_object *kvs_objects_find(const struct kvs_objects *objects,
                                           const struct kv_id128 *key);
bool kvs_objects_remove(struct kvs_objects *objects, const struct kv_id128 *key);

/* Verifies a piece, and marks it if it is bad. */
bool kvs_object_verify(struct kvs_objects *objects,
                       struct kvs_stored_object *object,
                       uint32_t piece);

/* One that fails its checksum. */
void kvs_object_mark_bad(struct kvs_objects *objects,
                         struct kvs_stored_object *object,
                         uint32_t piece);

/* How many of its pieces are bad. */
uint32_t kvs_object_n_bad(const struct kvs_stored_object *object);

/* Puts an object in the place of one of the same bytes, some of which have gone bad: it is that
 * one to everybody, version and all. */
kv_status_t kvs_objects_replace(struct kvs_objects *objects, struct kvs_stored_object *object);

/* Walks all that are published. */
void kvs_objects_check(const struct kvs_objects *objects);

/* True if size and CRCs are the object's: the same bytes. */
bool kvs_object_same(const struct kvs_stored_object *object,
                     uint64_t bytes,
                     const uint32_t *crcs);

#endif
