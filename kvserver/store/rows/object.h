/* object.h - immutable bytes under a caller's name, stored in pieces of KV_WIRE_BULK_MAX bytes.
 *
 *     kvs_object_create -> filling -> kvs_objects_publish -> in the map -> kvs_objects_remove
 *                                                                          or expired, or evicted
 *
 * After its removal an object stays in memory until no transfer has it pinned.
 *
 * With a *keeper*, a table of functions (the disk's: tier/object_tier.h), objects are saved as well.
 * One that is saved leaves memory when that is short, piece by piece: its record and its name stay.
 * A piece comes back when it is needed.
 *
 * A put says until when its object stays (kvs_object_terms.expires_us), and whether the object
 * may be evicted before that, when memory is short (is_evictable).  Several puts of the same
 * bytes share an object, which keeps to the terms of all: the latest time counts, and it is
 * evictable only if all puts said so.  When memory is short, the least recently used saved objects
 * leave it; after these, the least recently used evictable one is removed.
 *
 * Invariants, which kvs_objects_check() asserts:
 *   (1) The published objects are those in the map, each under its key, and those in the list.
 *       Every back link is the reverse of a forward link.
 *   (2) Their total size is at most `bytes`, which also counts objects that are being filled
 *       and removed ones that are still pinned.
 *   (3) The scrubber is at one of them, or past the last; so is a walk, and where one has ended.
 *   (4) `health` counts their bad pieces.
 *   (5) The record and every piece of each that is here are elements of the arena in use, and its
 *       version is not 0.  Pieces are away of saved objects only.
 *   (6) The list is in the order of their numbers, which begin above 0.
 *   (7) Those that expire are in the heap, and no others; each is in the list that it belongs to by
 *       what it is, and the pages of the node have been told of the bytes that can make room.
 *
 * Threads: the data thread that owns the object's slot.  Memory: the arena's.
 */
#ifndef KV_KVSERVER_STORE_ROWS_OBJECT_H
#define KV_KVSERVER_STORE_ROWS_OBJECT_H

#include "kvserver/base/map.h"
#include "kvserver/store/rows/arena.h"
#include "kvserver/store/rows/expiry.h"
#include "kvserver/store/rows/health.h"
#include "proto/kv_wire.h"

#include <stdbool.h>

struct kvs_object_piece {
    uint8_t *bytes; /* NULL: away */
    uint32_t crc;   /* CRC32C, seeded with kv_object_seed(name) + index of the piece */
    uint8_t class_id;
    bool is_bad;      /* its checksum is wrong: rejected until the object is put again */
    bool is_loading;  /* the keeper has been asked for it, and will answer */
    uint32_t n_sends; /* of what is lent: requests that send it */
};

enum {
    KVS_PIECE_LENT = UINT8_MAX, /* as class_id: from the heap, until it has been sent */
};

struct kvs_object_kept; /* what the keeper knows of an object */

/* How an object can make room, which is the list that it is in. */
enum kvs_object_list {
    KVS_OBJECTS_LEAVE, /* saved, with pieces here */
    KVS_OBJECTS_EVICT, /* evictable, and not saved */
    KVS_OBJECTS_AWAY,  /* evictable, saved, and without pieces here: on the disk */
    KVS_OBJECTS_LISTS,
    KVS_OBJECTS_STAY = KVS_OBJECTS_LISTS, /* in no list */
};

/* How long an object stays. */
struct kvs_object_terms {
    uint64_t expires_us; /* KVS_EXPIRY_NEVER: it does not */
    bool is_evictable;
};

struct kvs_stored_object {
    struct kv_id128 key;
    uint64_t bytes;
    uint32_t n_pieces;
    uint32_t pins;
    uint64_t version;                      /* unique among the objects of this name; never 0 */
    uint64_t number;                       /* of the published objects, in their order */
    uint64_t created_us;                   /* when it was put first */
    struct kvs_stored_object *next, *prev; /* list of published objects */
    struct kvs_stored_object *used_after, *used_before; /* its list; of published ones only */
    uint64_t spare_bytes;         /* of it that the pages of the node have been told */
    struct kvs_expiry expiry;     /* at_us: as terms; in the heap while it is published */
    struct kvs_object_kept *kept; /* the keeper's; NULL: nothing of it is saved, or will be */
    uint32_t seed;                /* kv_object_seed(name) */
    uint32_t tenant;
    uint32_t n_here;  /* pieces in memory */
    uint32_t n_lent;  /* of these: KVS_PIECE_LENT */
    uint32_t n_loads; /* pieces that are loading: each has it pinned, and uses no other piece */
    uint8_t list;     /* enum kvs_object_list */
    bool is_evictable;
    bool is_saved;
    bool is_absent;   /* none of its pieces are here */
    bool is_stuck;    /* it cannot be saved for now */
    bool is_given_up; /* the keeper has: what was written under its version is being erased */
    bool published;
    uint8_t class_id; /* of this record */
    uint8_t name_bytes;
    struct kvs_object_piece pieces[]; /* (n_pieces), and behind them the name */
};

enum {
    KVS_OBJECTS_MARKS = 4, /* walks that go on where they were without a search */
};

/* Where a walk has ended. */
struct kvs_objects_mark {
    struct kvs_stored_object *object; /* NULL: not in use */
    uint64_t after;
};

/* Who saves objects. */
struct kvs_object_keeper {
    /* The object has been published.  If it is to be saved, sets `kept`, and is_saved later. */
    void (*published)(void *arg, struct kvs_stored_object *object);
    /* An object with `kept` stays longer than it was to, is no longer evictable, or has taken the
     * place of another. */
    void (*renewed)(void *arg, struct kvs_stored_object *object);
    /* An object with `kept` has been removed, and may be freed after this call. */
    void (*removed)(void *arg, struct kvs_stored_object *object);
    /* The piece is needed.  Answers with kvs_object_piece_back(), later; the object stays until
     * then.  Returns false if out of memory: it does not answer. */
    bool (*load)(void *arg, struct kvs_stored_object *object, uint32_t piece);
    /* Returns what it will tell to have arrived when no object of that name that was removed can be
     * there again once the node is started again; NULL: none can. */
    const void *(*erasure)(void *arg, const struct kv_id128 *key);
    /* Removals have numbers, from 1 on.  Returns the newest; and the oldest one whose object can be
     * there again, UINT64_MAX: none. */
    uint64_t (*removals)(void *arg, uint64_t *ret_oldest);
};

struct kvs_object_use {
    struct kvs_stored_object *least, *most;
    size_t n;
};

struct kvs_objects {
    struct kvs_arena *arena;
    struct kv_map *map;
    uint64_t bytes;
    uint64_t memory;                        /* bytes of the arena's elements that they take */
    uint64_t version;                       /* of the newest object */
    uint64_t number;                        /* of the object that was published last */
    struct kvs_stored_object *first, *last; /* the published objects, oldest first */
    struct kvs_stored_object *looked; /* next for the scrubber (scrub.h); NULL: past the last */
    bool looked_begun;                /* the scrubber has begun with it */
    struct kvs_object_use lists[KVS_OBJECTS_LISTS];
    uint64_t spare_bytes;                   /* of all published objects */
    uint64_t n_away;                        /* pieces that are away, of published objects */
    uint64_t n_absent;                      /* published objects that are, as a whole */
    uint32_t n_lent;                        /* pieces that are KVS_PIECE_LENT */
    const struct kvs_object_keeper *keeper; /* NULL: none is saved */
    void *keeper_arg;
    struct kvs_expiries expiries;
    struct kvs_stored_object *walk; /* the next one of a walk; NULL: none, or past the last */
    struct kvs_objects_mark marks[KVS_OBJECTS_MARKS];
    uint32_t next_mark;
    uint64_t n_expired, n_evicted, n_left; /* ever */
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
/* Sets who saves objects, before there are any. */
void kvs_objects_set_keeper(struct kvs_objects *objects,
                            const struct kvs_object_keeper *keeper,
                            void *arg);

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

/* What an object is created from. */
struct kvs_object_facts {
    struct kv_id128 key;
    uint64_t bytes;
    uint32_t seed;
    uint32_t tenant;
    const uint32_t *crcs; /* (kvs_object_n_pieces(bytes)) */
    const void *name;     /* (name_bytes) */
    uint32_t name_bytes;  /* at most KV_NAME_BYTES_MAX */
    uint64_t now_us;      /* when it was put first */
    struct kvs_object_terms terms;
    bool is_away; /* it is saved: without pieces */
};

/* Allocates an object, pinned once.  Returns NULL if the arena is full. */
struct kvs_stored_object *kvs_object_create(struct kvs_objects *objects,
                                            const struct kvs_object_facts *facts);
void kvs_object_pin(struct kvs_stored_object *object);
void kvs_object_unpin(struct kvs_objects *objects, struct kvs_stored_object *object);

/* Publishes the object under its name, which must be free.  Fails with KV_NO_MEMORY. */
kv_status_t kvs_objects_publish(struct kvs_objects *objects, struct kvs_stored_object *object);
struct kvs_stored_object *kvs_objects_find(const struct kvs_objects *objects,
                                           const struct kv_id128 *key);
/* The same, but removes an object that has expired and returns NULL for it. */
struct kvs_stored_object *
kvs_objects_find_live(struct kvs_objects *objects, const struct kv_id128 *key, uint64_t now_us);
bool kvs_objects_remove(struct kvs_objects *objects, const struct kv_id128 *key);

/* Makes the object keep to the terms of another put as well. */
void kvs_object_renew(struct kvs_objects *objects,
                      struct kvs_stored_object *object,
                      const struct kvs_object_terms *terms);
/* Makes the object the most recently used one. */
void kvs_object_touch(struct kvs_objects *objects, struct kvs_stored_object *object);

/* Removes the object that expires first, if it has expired.  Returns false if it has not. */
bool kvs_objects_expire(struct kvs_objects *objects, uint64_t now_us);
/* Makes room: the least recently used saved object that is not pinned leaves memory, or else the
 * least recently used evictable one is removed.  Returns false if there is none. */
bool kvs_objects_evict(struct kvs_objects *objects);
/* Removes the least recently used evictable object that is on the disk only.  Returns false if there
 * is none. */
bool kvs_objects_evict_away(struct kvs_objects *objects);

/* ---- pieces that are away ---- */

/* Asks for a piece.  KV_OK: it is here, or bad; KV_NOT_READY: the keeper will tell when its address has
 * arrived; KV_BUSY: out of memory. */
kv_status_t
kvs_object_need(struct kvs_objects *objects, struct kvs_stored_object *object, uint32_t piece);

/* The keeper's answer: the piece's bytes, an element of the class that is the object's from now on, or
 * of the heap (KVS_PIECE_LENT), which it is until nobody has the object pinned; NULL: they are lost,
 * and the piece is bad. */
void kvs_object_piece_back(struct kvs_objects *objects,
                           struct kvs_stored_object *object,
                           uint32_t piece,
                           uint8_t *bytes,
                           int class_id);

/* A request sends the piece, which is here, and has sent it: what was lent for that goes with the last
 * one, whatever else has the object pinned, so that those that wait for others of its pieces get
 * theirs. */
void kvs_object_piece_send(struct kvs_stored_object *object, uint32_t piece);
void kvs_object_piece_sent(struct kvs_objects *objects,
                           struct kvs_stored_object *object,
                           uint32_t piece);

/* The keeper has saved the object, or has given up: then `kept` is NULL from now on. */
void kvs_object_set_saved(struct kvs_objects *objects,
                          struct kvs_stored_object *object,
                          bool is_saved);

/* The keeper cannot save the object for now, or can again. */
void kvs_object_set_stuck(struct kvs_objects *objects,
                          struct kvs_stored_object *object,
                          bool is_stuck);

/* Returns the keeper's erasure(). */
static inline const void *kvs_objects_erasure(const struct kvs_objects *objects,
                                              const struct kv_id128 *key)
{
    return objects->keeper != NULL ? objects->keeper->erasure(objects->keeper_arg, key) : NULL;
}

/* Returns the keeper's removals(). */
static inline uint64_t kvs_objects_removals(const struct kvs_objects *objects,
                                            uint64_t *ret_oldest)
{
    *ret_oldest = UINT64_MAX;
    return objects->keeper != NULL ? objects->keeper->removals(objects->keeper_arg, ret_oldest)
                                   : 0;
}

/* Makes the hash of a name the tenant's. */
static inline void kvs_object_key_of_tenant(struct kv_id128 *key, uint32_t tenant)
{
    for (int i = 0; i < 4; i++)
        key->bytes[i] ^= (uint8_t)(tenant >> 8 * i);
}

/* Begins a walk over the published objects in the order of their numbers.  objects->walk is the
 * next object, NULL past the last; it stays valid while objects are removed, so a walk may be
 * interrupted.  Begins at or before the first object with a number above `after`, without a
 * search if one of the last walks ended there. */
void kvs_objects_walk_begin(struct kvs_objects *objects, uint64_t after);
void kvs_objects_walk_on(struct kvs_objects *objects);
/* Ends the walk, and remembers its place for one that begins after the same number. */
void kvs_objects_walk_end(struct kvs_objects *objects, uint64_t after);

/* Returns its name, which is not 0-terminated. */
static inline const char *kvs_object_name(const struct kvs_stored_object *object)
{
    return (const char *)&object->pieces[object->n_pieces];
}

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

/* Replaces an object, some pieces of which are bad or away, with one that has the same bytes.  The
 * new object gets the old one's age, stays as long as either was to, and is saved if the old one was
 * and is good.  It gets its version, so that clients see no difference, unless the old one is being
 * saved, or was and is bad, or the keeper has given it up. */
kv_status_t kvs_objects_replace(struct kvs_objects *objects, struct kvs_stored_object *object);

/* Asserts the invariants; visits all published objects. */
void kvs_objects_check(const struct kvs_objects *objects);

/* Returns true if size and CRCs equal the object's, so that the bytes are the same. */
bool kvs_object_same(const struct kvs_stored_object *object,
                     uint64_t bytes,
                     const uint32_t *crcs);

#endif
