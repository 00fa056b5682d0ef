/* object_page.h - some of a tenant's objects at a time, to list or to delete them.
 *
 * A data thread's objects have numbers in the order in which they were published; a page goes
 * on after a number, and its reply says after which one the next page does.  Objects that are
 * published after the first page have numbers above `until` and belong to none, so pages come
 * to an end whatever clients put meanwhile.
 *
 * Threads: the control thread fills in what is asked and gives the page to the data thread,
 * which gives it back with the answer.  Memory: the control thread's.
 */
#ifndef KV_KVSERVER_STORE_SHARD_OBJECT_PAGE_H
#define KV_KVSERVER_STORE_SHARD_OBJECT_PAGE_H

#include "kvserver/base/clock.h"
#include "kvserver/store/rows/object.h"

struct kvs_object_entry {
    char name[KV_NAME_BYTES_MAX]; /* (name_bytes) */
    uint8_t name_bytes;
    bool is_evictable, is_pinned;
    uint32_t n_bad; /* pieces */
    uint64_t bytes;
    uint64_t age_us, left_us; /* left: KVS_EXPIRY_NEVER: it stays */
};

struct kvs_object_page {
    uint32_t tenant;
    uint32_t prefix_bytes;
    char prefix[KV_NAME_BYTES_MAX]; /* (prefix_bytes) of the names */
    bool deletes;                   /* the objects are removed and counted, not listed */
    uint32_t limit;                 /* objects in the page */

    uint64_t after; /* out: number of the last object that was looked at */
    uint64_t until; /* 0: the first page; it sets it */
    bool is_begun;
    uint32_t n_looks;
    uint64_t settled_us; /* when it is late, if the disk has not said so; 0: it still looks */
    uint64_t removal;    /* the newest when it had looked: the disk is to have all up to it */
    bool is_late;        /* out: the disk has not; who asks again waits again */

    bool is_last; /* out: there are no more on this thread */
    uint32_t n;   /* out: objects listed, or deleted */
    uint64_t bytes_deleted;
    struct kvs_object_entry entries[]; /* (limit); none if it deletes */
};

/* Goes on with the page for a slice.  Returns true when it is done: it is full, or has looked at
 * many objects, or at all.  One page at a time. */
bool kvs_object_page_slice(struct kvs_object_page *page,
                           struct kvs_objects *objects,
                           const struct kv_clock *clock,
                           uint64_t now_us);

#endif
