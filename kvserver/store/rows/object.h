/* object.h - immutable bytes under a caller's name, stored in pieces of KV_WIRE_BULK_MAX bytes.
 *
 *     kvs_object_create -> filling -> kvs_objects_publish -> in the map -> kvs_objects_remove
 *
 * After its removal an object stays in memory until no transfer has it pinned.
 *
 * Invariants, which kvs_objects_check() asserts:
 *   (1) The published objects are those in the map, each under its key, and those in the list.
 *       Every back link is the reverse of a forward link.
 *   (2) Their total size is at most `bytes`, which also counts objects that are being filled
 *       and removed ones that are still pinned.
 *   (3) The scrubber is at one of them, or past the last.
 *   (4) `health` counts their bad pieces.
 *   (5) The record and every piece of each are elements of the arena in use, and its version is
 *       not 0.
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
    uint32_t crc; /* CRC32C, seeded with kv_object_seed(name) + index of the piece */
    uint8_t class_id;
    bool is_bad; /* its checksum is wrong: rejected until the object is put again */
};

struct kvs_stored_object {
    struct kv_id128 key;
    uint64_t bytes;
    uint32_t n_pieces;
    uint32_t pins;
    uint64_t version;                      /* unique among the objects of this name; never 0 */
    uint32_t seed;                         /* kv_object_seed(name) */
    struct kvs_stored_object *next, *prev; /* list of published objects */
    bool published;
    uint8_t class_id; /* of this record */
    struct kvs_object_piece pieces[];
};

struct kvs_objects {
    struct kvs_arena *arena;
    struct kv_map *map;
    uint64_t bytes;
    uint64_t version;                       /* of the newest object */
    struct kvs_stored_object *first, *last; /* the published objects, oldest first */
    struct kvs_stored_object *looked; /* next for the scrubber (scrub.h); NULL: past the last */
    bool looked_begun;                /* the scrubber has begun with it */
    struct kvs_health *health;
};

/* `version` is the first version.  It is random, so that versions of an earlier node at this
 * address do not occur again. */
bool kvs_objects_init(struct kvs_objects *objects,
                      struct kvs_arena *arena,
                      struct kvs_health *health,
                      uint64_t secret,
                      uint64_t version);
void kvs_objects_fini(struct kvs_objects *objects);

/* Returns the number of pieces of an object of that size; an empty object has one. */
static inline uint32_t kvs_object_n_pieces(uint64_t bytes)
{
    return bytes == 0 ? 1 : (uint32_t)((bytes + KV_WIRE_BULK_MAX - 1) / KV_WIRE_BULK_MAX);
}

static inline uint32_t kvs_object_piece_bytes(uint64_t bytes, uint32_t piece)
{
    uint64_t left = bytes - (uint64_t)piece * KV_WIRE_BULK_MAX;

    return left < KV_WIRE_BULK_MAX ? (uint32_t)left : KV_WIRE_BULK_MAX;
}

/* Allocates an object, pinned once.  Returns NULL if the arena is full. */
struct kvs_stored_object *kvs_object_create(struct kvs_objects *objects,
                                            const struct kv_id128 *key,
                                            uint64_t bytes,
                                            uint32_t seed,
                                            const uint32_t *crcs);
void kvs_object_pin(struct kvs_stored_object *object);
void kvs_object_unpin(struct kvs_objects *objects, struct kvs_stored_object *object);

/* Publishes the object under its name, which must be free.  Fails with KV_NO_MEMORY. */
kv_status_t kvs_objects_publish(struct kvs_objects *objects, struct kvs_stored_object *object);
struct kvs_stored_object *kvs_objects_find(const struct kvs_objects *objects,
                                           const struct kv_id128 *key);
bool kvs_objects_remove(struct kvs_objects *objects, const struct kv_id128 *key);

/* Verifies a piece, and marks it if it is bad.  Returns whether it is good. */
bool kvs_object_verify(struct kvs_objects *objects,
                       struct kvs_stored_object *object,
                       uint32_t piece);

/* Marks a piece whose checksum is wrong. */
void kvs_object_mark_bad(struct kvs_objects *objects,
                         struct kvs_stored_object *object,
                         uint32_t piece);

/* Returns the number of its bad pieces. */
uint32_t kvs_object_n_bad(const struct kvs_stored_object *object);

/* Replaces an object, some pieces of which are bad, with one that has the same bytes.  The new
 * object gets the old one's version, so clients see no difference. */
kv_status_t kvs_objects_replace(struct kvs_objects *objects, struct kvs_stored_object *object);

/* Asserts the invariants; visits all published objects. */
void kvs_objects_check(const struct kvs_objects *objects);

/* Returns true if size and CRCs equal the object's, so that the bytes are the same. */
bool kvs_object_same(const struct kvs_stored_object *object,
                     uint64_t bytes,
                     const uint32_t *crcs);

#endif
