/* disk.h - the interface of disks, for data that is to outlast the process.
 *
 * A disk maps keys to values, both byte strings.  Writes are asynchronous and may complete in
 * any order.  The node stores the models that it knows (`model/FINGERPRINT`).  The only
 * implementation is in memory (disk_memory.c): a real disk is not implemented, and data is lost
 * when a node stops.
 *
 * Threads: the control thread; callbacks run inside progress().
 * Memory: put and remove borrow key and value; in scan they are valid during the callback.
 */
#ifndef KV_KVSERVER_DISK_DISK_H
#define KV_KVSERVER_DISK_DISK_H

#include "proto/kv_status.h"

#include <stddef.h>
#include <stdint.h>

struct kv_clock;
struct kv_disk;

typedef void (*kv_disk_done_fn)(void *arg, kv_status_t status);
typedef void (*kv_disk_each_fn)(
    void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes);

struct kv_disk_ops {
    const char *name;
    /* Starts a write; calls `done` once, from a later progress().  Fails with KV_NO_MEMORY or
     * KV_IO, and does not call `done` then. */
    kv_status_t (*put)(struct kv_disk *disk,
                       const void *key,
                       size_t key_bytes,
                       const void *value,
                       size_t value_bytes,
                       kv_disk_done_fn done,
                       void *arg);
    /* Starts to remove a key, if it exists; the result is not reported.  Writes and removals of
     * one key take effect in the order in which they were started. */
    void (*remove)(struct kv_disk *disk, const void *key, size_t key_bytes);
    /* Calls `each` for every key with this prefix, in key order, before it returns. */
    kv_status_t (*scan)(struct kv_disk *disk,
                        const void *prefix,
                        size_t prefix_bytes,
                        kv_disk_each_fn each,
                        void *arg);
    unsigned (*progress)(struct kv_disk *disk); /* returns how many callbacks ran */
    void (*close)(struct kv_disk *disk);
};

struct kv_disk {
    const struct kv_disk_ops *ops;
};

/* Opens a disk in memory.  A write takes write_us by `clock`: 0 in production, more in
 * simulations.  Returns NULL if out of memory. */
struct kv_disk *kv_disk_memory_open(const struct kv_clock *clock, uint64_t write_us);

#endif
