/* disk.h - the table of disks: where the node keeps what must outlast memory.
 *
 * Keys and values, both bytes; writes are asynchronous and complete in the order that the disk
 * likes.  Today the node keeps the models that it knows there (`model/FINGERPRINT`).
 *
 * Threads: the control thread; callbacks run inside progress().
 * Memory: put borrows key and value; get gives the value for the call.
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
    /* Starts a write; `done` is called once, in a later progress().  KV_NO_MEMORY, KV_IO. */
    kv_status_t (*put)(struct kv_disk *disk,
                       const void *key,
                       size_t key_bytes,
                       const void *value,
                       size_t value_bytes,
                       kv_disk_done_fn done,
                       void *arg);
    /* Starts to remove a key, if it is there; nobody is told how that ends.  Writes and
     * removals of one key take effect in the order in which they were started. */
    void (*remove)(struct kv_disk *disk, const void *key, size_t key_bytes);
    /* Calls `each` for every key that begins with `prefix`, in key order, before it returns. */
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

/* Keeps everything in memory; a write takes write_us by `clock` (0 in production: what ends
 * with the process needs no time; a simulation makes its disks slow).  NULL: out of memory. */
struct kv_disk *kv_disk_memory_open(const struct kv_clock *clock, uint64_t write_us);

#endif
