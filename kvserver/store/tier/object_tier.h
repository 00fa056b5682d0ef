/* object_tier.h - the objects of a data thread on the disk: they are saved, leave memory, come back
 * when they are read, and are there again when the node is started again.
 *
 *   published -> waiting -> saving: records, pieces, records -> saved
 *   memory is short -> kvs_objects_evict() -> its pieces are away -> a get needs one -> it is read
 *   removed, expired, evicted -> erasing: records, pieces, records -> gone
 *
 * As for prefixes (control/saver.h), a record says that pieces may be there before any is written,
 * that they count when all are, and that they do not before any is erased; each step begins when the
 * one before it is on the disk for sure.
 *
 * What was removed could be there again after a crash, until its record says that it does not count.
 * So a delete is answered after that, and a put under the same name is refused until then
 * (kvs_objects_erasure()): the bytes that a client reads are those that it put last, or none.
 *
 * What is saved is verified, piece by piece (object_verify.c).
 *
 * Objects whose time ends within two seconds are not saved.  When there is no room on the disk, those
 * that are evictable and away go, the least recently used first; the others wait in memory.
 *
 * Threads: the data thread.  Memory: a record of some 120 bytes for each object, from the heap.
 */
#ifndef KV_KVSERVER_STORE_TIER_OBJECT_TIER_H
#define KV_KVSERVER_STORE_TIER_OBJECT_TIER_H

#include "kvserver/base/histogram.h"
#include "kvserver/disk/disk.h"
#include "kvserver/store/rows/object.h"
#include "kvserver/store/tier/disk_room.h"
#include "kvserver/store/tier/object_record.h"

struct kv_clock;
struct kvs_object_tier;

struct kvs_object_tier_setup {
    struct kv_disk *disk;
    struct kvs_disk_room *room;
    struct kvs_objects *objects;
    const struct kv_clock *clock;
    const _Atomic bool *draining; /* it does not wait for more to save */
    /* Somebody waits for all to be verified since then; 0: nobody. */
    const _Atomic uint64_t *verify_wanted_us;
    uint64_t verify_bytes;   /* a second, verified in the background; 0: none */
    void (*wake)(void *arg); /* any thread: kvs_object_tier_step() has something to do */
    /* A piece is back (its address), or what was removed cannot come back (what
     * kvs_objects_erasure() has returned). */
    void (*arrived)(void *arg, const void *what);
    void *arg;
};

/* Counted by the data thread, read by any. */
struct kvs_object_tier_counts {
    _Atomic uint64_t saved_objects, saved_bytes;     /* bytes: of the disk, in whole pages */
    _Atomic uint64_t waiting_objects, waiting_bytes; /* to be saved, likewise */
    _Atomic uint64_t written_bytes, loaded_bytes;
    _Atomic bool is_busy;         /* something waits to be saved or erased that can be now */
    _Atomic uint64_t lost_pieces; /* on the way back: missing, or with a wrong checksum */
    _Atomic uint64_t verified_pieces, verified_bytes;
    _Atomic uint64_t bad_pieces;     /* of these: missing, or with a wrong checksum; of which */
    _Atomic uint64_t mended_pieces;  /* are written again, and */
    _Atomic uint64_t dropped_pieces; /* cannot be read any more */
    _Atomic uint64_t unread_pieces;  /* could not be read, or not be mended */
    _Atomic uint64_t failed;         /* writes and reads that the disk has refused */
    struct kv_histogram load_us;     /* from the first need of a piece until it is back */
};

/* Becomes the keeper of objects.  Fails with KV_NO_MEMORY, or what the disk fails with. */
kv_status_t kvs_object_tier_open(const struct kvs_object_tier_setup *setup,
                                 struct kvs_object_tier **ret_tier);
/* Waits for what is under way, of which nobody hears any more; nothing is begun after it.  NULL is
 * allowed. */
void kvs_object_tier_stop(struct kvs_object_tier *tier);
/* The objects will not be used any more, and it has been stopped.  NULL is allowed. */
void kvs_object_tier_close(struct kvs_object_tier *tier);

/* Goes on with all that is under way, for a slice.  Returns false if there was nothing to do. */
bool kvs_object_tier_step(struct kvs_object_tier *tier);

/* Goes on with verifying what is saved, a piece at a time, in idle times.  Returns false if there was
 * nothing to do. */
bool kvs_object_tier_verify(struct kvs_object_tier *tier);
/* Returns since when all that is saved has been verified. */
uint64_t kvs_object_tier_verified_since(const struct kvs_object_tier *tier);

/* An earlier process wrote this record: its object is there again, away; or what is left of it will
 * be erased, if it does not count or its time is over.  Returns false if there is no memory. */
bool kvs_object_tier_found(struct kvs_object_tier *tier,
                           const struct kvs_object_record *record);

/* Whether nothing waits to be saved or erased that could be now.  Any thread. */
bool kvs_object_tier_is_idle(const struct kvs_object_tier *tier);

const struct kvs_object_tier_counts *kvs_object_tier_counts(const struct kvs_object_tier *tier);

#endif
