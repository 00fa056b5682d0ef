/* object_tier_private.h - what object_tier.c (saving and erasing), object_load.c (pieces that come
 * back) and object_verify.c share. */
#ifndef KV_KVSERVER_STORE_TIER_OBJECT_TIER_PRIVATE_H
#define KV_KVSERVER_STORE_TIER_OBJECT_TIER_PRIVATE_H

#include "kvserver/store/tier/object_tier.h"

enum {
    KVS_OBJECTS_AT_ONCE = 256, /* that are saved, or erased, together */
    KVS_OBJECT_PIECES_AT_ONCE = KV_DISK_WRITES_MAX,
};

/* What was removed may be there again once the node is started again. */
enum kvs_returns {
    KVS_RETURNS_NEVER,
    KVS_RETURNS_LISTED,   /* until the disk says that it does not count */
    KVS_RETURNS_UNLISTED, /* likewise; there was no memory for the list */
};

/* An object of which the disk has something, or will have. */
struct kvs_object_kept {
    struct kv_id128 key;
    uint64_t version;
    uint64_t bytes;                       /* that its pieces take of the disk */
    struct kvs_stored_object *object;     /* in a batch it is pinned */
    struct kvs_object_kept *next, **link; /* list: waiting, or to be erased; NULL: in none */
    struct kvs_object_kept *same_name;    /* what else may come back under its name */
    struct kvs_object_kept *newer, **newer_link; /* of all that may come back */
    uint64_t removal;                            /* its number */
    /* What is saved of it, and when that was verified; link NULL: nothing. */
    struct kvs_object_kept *verify_next, **verify_link;
    uint64_t verified_us;
    uint64_t added_us;
    uint32_t n_pieces;
    bool is_tried;    /* it has been in a batch: the disk may have something of it */
    bool has_record;  /* it is saved: if it waits, for its terms to be written */
    bool is_in_batch; /* it is being saved */
    bool is_removed;  /* the object is not in the map any more; outside of a batch it is gone */
    bool is_spoiled;  /* it has gone bad in memory before it could be written */
    bool is_renewed;  /* its terms have changed since */
    bool has_room;    /* its bytes are counted in the room on the disk */
    uint8_t returns;  /* enum kvs_returns */
};

struct kvs_kept_list {
    struct kvs_object_kept *first, **end;
    uint64_t n, bytes;
};

/* Objects that are on their way through the steps of being saved, or erased. */
struct kvs_object_batch {
    struct kvs_object_tier *tier;
    struct kvs_object_kept *kept[KVS_OBJECTS_AT_ONCE];
    uint32_t n; /* 0: nothing is under way */
    void *records[KVS_OBJECTS_AT_ONCE];
    uint32_t n_records;
    kv_status_t status;
    void (*next)(struct kvs_object_batch *batch);
};

/* A piece that is written. */
struct kvs_piece_write {
    struct kvs_object_tier *tier;
    struct kvs_piece_write *next, **link;
    size_t bytes;
};

/* A piece that comes back.  Its object is pinned. */
struct kvs_piece_load {
    struct kvs_object_tier *tier;
    struct kvs_piece_load *next;
    struct kvs_stored_object *object;
    uint8_t *memory; /* NULL: it has not begun */
    uint64_t since_us;
    uint32_t piece;
    uint32_t n_tries;
    int class_id;
};

struct kvs_piece_check;

/* Objects that are saved, the one that was verified longest ago first. */
struct kvs_object_verify {
    struct kvs_object_kept *first, **end;
    struct kvs_object_kept *at; /* the first one, with pieces that are verified; NULL: none */
    uint64_t at_us;             /* when it was begun */
    uint32_t piece;             /* of it: the next one */
    struct kvs_piece_check *check; /* under way; NULL: none */
    uint64_t begun_us, due_us;     /* of the pass in the background; of its next piece */
    uint64_t warned_us;
};

struct kvs_object_tier {
    struct kvs_object_tier_setup setup;
    struct kvs_objects *objects;
    struct kv_disk_queue *queue; /* NULL: it has been stopped */
    struct kvs_kept_list waiting, erasures;
    struct kv_map *returns; /* by key: what has been removed and may return */
    uint64_t n_unlisted;    /* of these, those that found no memory in the map */
    struct kvs_object_kept *oldest, **newest_end; /* the same, in the order of their removal */
    uint64_t removal;                             /* of the newest */
    struct kvs_object_batch save, erase;
    uint32_t next_kept, next_piece; /* of `save`: the next piece to write */
    struct kvs_piece_write *writes; /* under way */
    uint64_t writing_bytes;
    uint64_t saving_bytes; /* of `save` */
    uint64_t giving_bytes; /* counted in room->going */
    bool is_writing;       /* `save` has pieces to write, or under way */
    bool has_failed;       /* one of these */
    bool is_full;          /* there is no room: what waits is stuck */
    bool is_failing;       /* the last batch could not be saved: the same */
    uint64_t retry_us, erase_us;
    struct kvs_piece_load *loads, **loads_end; /* that have not begun */
    uint32_t n_loading;
    uint32_t n_lent;                 /* of these: KVS_PIECE_LENT */
    struct kvs_piece_load **loading; /* under way; NULL: a free place */
    struct kvs_object_verify verify;
    struct kvs_object_tier_counts counts;
};

static inline void kvs_object_count(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n,
                          memory_order_relaxed);
}

/* ---- object_load.c ---- */

bool kvs_object_loads_open(struct kvs_object_tier *tier);
/* Frees what was under way; the queue is closed. */
void kvs_object_loads_close(struct kvs_object_tier *tier);
bool kvs_object_load(void *arg, struct kvs_stored_object *object, uint32_t piece);
bool kvs_object_loads_step(struct kvs_object_tier *tier);

/* ---- object_verify.c ---- */

/* The object is saved; `verified_us`: 0 if that was an earlier process, and else now.  It is not any
 * more: not listed is allowed. */
void kvs_object_verify_add(struct kvs_object_tier *tier,
                           struct kvs_object_kept *kept,
                           uint64_t verified_us);
void kvs_object_verify_remove(struct kvs_object_tier *tier, struct kvs_object_kept *kept);
/* Whether a piece is being written again: nothing is erased until that is over, or what is erased
 * could be there again. */
bool kvs_object_verify_is_writing(const struct kvs_object_tier *tier);
/* Frees what was under way; the queue is closed. */
void kvs_object_verify_close(struct kvs_object_tier *tier);

#endif
