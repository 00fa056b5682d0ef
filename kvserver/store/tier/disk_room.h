/* disk_room.h - the room that a node may take on its disk, which prefixes and objects share.
 *
 * Either may take what the other does not.  When it is full, each gives up some of its own that may
 * go; who finds none asks the other, which gives up some if it has more than half.
 *
 * Threads: any.
 */
#ifndef KV_KVSERVER_STORE_TIER_DISK_ROOM_H
#define KV_KVSERVER_STORE_TIER_DISK_ROOM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    KVS_DISK_STUCK_US =
        10 * 1000 * 1000, /* without getting less: somebody can shrink no more */
};

enum kvs_disk_share {
    KVS_DISK_PREFIXES, /* of the control thread */
    KVS_DISK_OBJECTS,  /* of all data threads */
    KVS_DISK_SHARES,
};

struct kvs_disk_room {
    uint64_t bytes; /* set once */
    _Atomic uint64_t taken[KVS_DISK_SHARES];
    _Atomic uint64_t going; /* of the objects': what goes because there is too much */
    _Atomic bool lacks[KVS_DISK_SHARES]; /* it has asked the other */
    /* There is more than there may be, of which one share can give up no more.  The control thread finds
     * that out: since stuck_us there are no less than stuck_bytes; 0: there is enough room. */
    _Atomic bool is_stuck;
    uint64_t stuck_us, stuck_bytes;
};

static inline uint64_t kvs_disk_taken(const struct kvs_disk_room *room,
                                      enum kvs_disk_share share)
{
    return atomic_load_explicit((_Atomic uint64_t *)&room->taken[share], memory_order_relaxed);
}

static inline uint64_t kvs_disk_all(const struct kvs_disk_room *room)
{
    return kvs_disk_taken(room, KVS_DISK_PREFIXES) + kvs_disk_taken(room, KVS_DISK_OBJECTS);
}

/* Returns whether there is more than there may be, as after a start with less: then nobody takes more, and
 * nobody makes room for more. */
static inline bool kvs_disk_has_too_much(const struct kvs_disk_room *room)
{
    return kvs_disk_all(room) > room->bytes;
}

/* Returns what the other share leaves.  Where there is too much, a share keeps what it has, up to half, as
 * long as the other may shrink to what is left. */
static inline uint64_t kvs_disk_left(const struct kvs_disk_room *room,
                                     enum kvs_disk_share share)
{
    const uint64_t other = kvs_disk_taken(room, 1 - share);
    const uint64_t mine = kvs_disk_taken(room, share);
    const uint64_t left = other < room->bytes ? room->bytes - other : 0;
    const uint64_t kept = mine < room->bytes / 2 ? mine : room->bytes / 2;

    if (left > kept ||
        atomic_load_explicit((_Atomic bool *)&room->is_stuck, memory_order_relaxed))
        return left;
    return kept;
}

/* The control thread, now and then.
 *   is_going  what is not saved any more is still being erased */
static inline void
kvs_disk_note_stuck(struct kvs_disk_room *room, uint64_t now_us, bool is_going)
{
    const uint64_t bytes = kvs_disk_all(room);

    if (bytes <= room->bytes) {
        room->stuck_us = 0;
        atomic_store_explicit(&room->is_stuck, false, memory_order_relaxed);
        return;
    }
    if (room->stuck_us == 0 || bytes < room->stuck_bytes || is_going ||
        atomic_load_explicit(&room->going, memory_order_relaxed) > 0) {
        room->stuck_us = now_us;
        room->stuck_bytes = bytes;
    }
    if (now_us - room->stuck_us >= KVS_DISK_STUCK_US)
        atomic_store_explicit(&room->is_stuck, true, memory_order_relaxed);
}

/* Says whether the share lacks room. */
static inline void
kvs_disk_lack(struct kvs_disk_room *room, enum kvs_disk_share share, bool lacks)
{
    if (atomic_load_explicit(&room->lacks[share], memory_order_relaxed) != lacks)
        atomic_store_explicit(&room->lacks[share], lacks, memory_order_relaxed);
}

/* Returns whether the share is to give some of its room to the other. */
static inline bool kvs_disk_gives(const struct kvs_disk_room *room, enum kvs_disk_share share)
{
    return atomic_load_explicit((_Atomic bool *)&room->lacks[1 - share],
                                memory_order_relaxed) &&
           kvs_disk_taken(room, share) > room->bytes / 2;
}

#endif
