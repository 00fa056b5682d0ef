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

enum kvs_disk_share {
    KVS_DISK_PREFIXES, /* of the control thread */
    KVS_DISK_OBJECTS,  /* of all data threads */
    KVS_DISK_SHARES,
};

struct kvs_disk_room {
    uint64_t bytes; /* set once */
    _Atomic uint64_t taken[KVS_DISK_SHARES];
    _Atomic bool lacks[KVS_DISK_SHARES]; /* it has asked the other */
};

static inline uint64_t kvs_disk_taken(const struct kvs_disk_room *room,
                                      enum kvs_disk_share share)
{
    return atomic_load_explicit((_Atomic uint64_t *)&room->taken[share], memory_order_relaxed);
}

/* Returns what the other share leaves. */
static inline uint64_t kvs_disk_left(const struct kvs_disk_room *room,
                                     enum kvs_disk_share share)
{
    const uint64_t other = kvs_disk_taken(room, 1 - share);

    return other < room->bytes ? room->bytes - other : 0;
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
