/* disk.h - the interface of disks, for data that is to outlast the process.
 *
 *     a thread of the node           kv_disk_queue         threads of the disk
 *     kv_disk_write(), _read(), _sync() ---------------> write, read, wait for the medium
 *     kv_disk_progress() <--- done(), in this thread --------
 *
 * A disk maps keys to values, both byte strings, in two spaces:
 *
 *   KV_DISK_RECORDS   small and few: what the node knows (`model/FINGERPRINT`).  Logged: when the
 *                     process is killed, what was done stays; when the power fails, what was done
 *                     before a sync.
 *   KV_DISK_ROWS      large and many: not logged.  Only a sync makes them stay.
 *
 * Everything is asynchronous.  A write is visible to reads that begin after it is done.  Writes of
 * one queue to one space take effect in the order in which they were started, each as a whole or not at all; a
 * crash keeps the first records of those that it may lose, and of such rows any.  When the power fails,
 * rows that no sync covers may keep their size alone.  A sync covers what was done when it was started,
 * of both spaces.  So whoever needs rows to be there when a record says
 * so waits for a sync before writing the record, and for another after it.
 *
 * Nothing has a deadline: a disk that is busy compacting makes writes and syncs wait for seconds.
 * After some errors RocksDB refuses all writes until it is opened again, and it ends the process when
 * it gets no memory.
 *
 * A disk is a table of functions:
 *
 *   memory    disk_memory.c    lost with the process
 *   rocksdb   disk_rocksdb.c   the only file that knows RocksDB; KV_WITH_ROCKSDB
 *   extents   disk_extents.c   rows in a file of its own, records and keys in another disk
 *
 * Threads: a queue belongs to one thread, which starts everything and in which callbacks run;
 * open, scan and close while no other thread uses the disk.
 * Memory: keys are copied; values are borrowed until `done`.  queue_close() waits for what is
 * under way and calls nobody.
 */
#ifndef KV_KVSERVER_DISK_DISK_H
#define KV_KVSERVER_DISK_DISK_H

#include "proto/kv_status.h"

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    KV_DISK_KEY_MAX = 128, /* bytes of a key */
    KV_DISK_VALUE_MAX = 1 << 30,
    KV_DISK_WRITES_MAX = 1024, /* keys of one write */
    KV_DISK_QUEUE_MAX = 1024,  /* what one queue has under way */
    KV_DISK_PAGE = 4096,       /* rows take whole ones, where they are in a file */
};

enum kv_disk_space {
    KV_DISK_RECORDS,
    KV_DISK_ROWS,
    KV_DISK_SPACES,
};

struct kv_clock;

/* `bytes`: of a read, the size of the value, which may be more than the room that was given: then
 * as much as fits has been read. */
typedef void (*kv_disk_done_fn)(void *arg, kv_status_t status, size_t bytes);
typedef void (*kv_disk_each_fn)(
    void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes);

/* A key and its new value: two pieces, one after the other, so that what is said of rows need not
 * be copied beside them. */
struct kv_disk_write {
    const void *key;
    const void *value; /* NULL: the key is removed, if it exists */
    const void *tail;  /* of a value; NULL: none */
    size_t key_bytes, value_bytes, tail_bytes;
};

/* Copies a value from its pieces. */
static inline void kv_disk_join(const struct kv_disk_write *write, void *ret_value)
{
    if (write->value_bytes > 0)
        memcpy(ret_value, write->value, write->value_bytes);
    if (write->tail_bytes > 0)
        memcpy((char *)ret_value + write->value_bytes, write->tail, write->tail_bytes);
}

/* What a disk holds, about; 0: not known. */
struct kv_disk_usage {
    uint64_t bytes;      /* on the medium, with what is no longer needed */
    uint64_t live_bytes; /* of these: of values that exist */
};

/* The order of keys: less than 0 if `a` is before `b`, 0 if they are the same. */
static inline int
kv_disk_key_compare(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    const int order = memcmp(a, b, a_bytes < b_bytes ? a_bytes : b_bytes);

    return order != 0 ? order : (a_bytes > b_bytes) - (a_bytes < b_bytes);
}

struct kv_disk {
    const struct kv_disk_ops *ops;
};

struct kv_disk_queue {
    struct kv_disk *disk;
};

struct kv_disk_ops {
    const char *name;
    /* `wake`, called by any thread, says that progress() has something to do; NULL: the owner
     * does not sleep.  Fails with KV_NO_MEMORY. */
    kv_status_t (*queue_open)(struct kv_disk *disk,
                              void (*wake)(void *arg),
                              void *arg,
                              struct kv_disk_queue **ret_queue);
    void (*queue_close)(struct kv_disk_queue *queue);
    kv_status_t (*write)(struct kv_disk_queue *queue,
                         enum kv_disk_space space,
                         const struct kv_disk_write *writes,
                         unsigned n,
                         kv_disk_done_fn done,
                         void *arg);
    kv_status_t (*read)(struct kv_disk_queue *queue,
                        enum kv_disk_space space,
                        const void *key,
                        size_t key_bytes,
                        void *value,
                        size_t room,
                        kv_disk_done_fn done,
                        void *arg);
    kv_status_t (*sync)(struct kv_disk_queue *queue, kv_disk_done_fn done, void *arg);
    unsigned (*progress)(struct kv_disk_queue *queue);
    kv_status_t (*scan)(struct kv_disk *disk,
                        enum kv_disk_space space,
                        const void *prefix,
                        size_t prefix_bytes,
                        kv_disk_each_fn each,
                        void *arg);
    void (*usage)(const struct kv_disk *disk, struct kv_disk_usage *ret_usage);
    void (*close)(struct kv_disk *disk);
};

/* Start something; `done` is called once, from a later kv_disk_progress(): with KV_IO if the system
 * has refused it, of a write and a sync with KV_NO_MEMORY if the disk is full, of a read with
 * KV_NOT_FOUND.  They fail with KV_BUSY if as much as may be is under way, or KV_NO_MEMORY, and do
 * not call `done` then.
 *   writes  (n) of different keys, 1..KV_DISK_WRITES_MAX
 *   done    NULL: nobody needs to know */
static inline kv_status_t kv_disk_write(struct kv_disk_queue *queue,
                                        enum kv_disk_space space,
                                        const struct kv_disk_write *writes,
                                        unsigned n,
                                        kv_disk_done_fn done,
                                        void *arg)
{
    assert(n > 0 && n <= KV_DISK_WRITES_MAX);
    for (unsigned i = 0; i < n; i++)
        assert(writes[i].key_bytes <= KV_DISK_KEY_MAX &&
               writes[i].value_bytes + writes[i].tail_bytes <= KV_DISK_VALUE_MAX);
    return queue->disk->ops->write(queue, space, writes, n, done, arg);
}

static inline kv_status_t kv_disk_read(struct kv_disk_queue *queue,
                                       enum kv_disk_space space,
                                       const void *key,
                                       size_t key_bytes,
                                       void *value,
                                       size_t room,
                                       kv_disk_done_fn done,
                                       void *arg)
{
    assert(key_bytes <= KV_DISK_KEY_MAX);
    return queue->disk->ops->read(queue, space, key, key_bytes, value, room, done, arg);
}

static inline kv_status_t
kv_disk_sync(struct kv_disk_queue *queue, kv_disk_done_fn done, void *arg)
{
    return queue->disk->ops->sync(queue, done, arg);
}

/* Calls back what is done.  Returns how much that was. */
static inline unsigned kv_disk_progress(struct kv_disk_queue *queue)
{
    return queue->disk->ops->progress(queue);
}

/* Calls `each` for every key with this prefix, in key order, before it returns.  Fails with KV_IO
 * where it cannot go on. */
static inline kv_status_t kv_disk_scan(struct kv_disk *disk,
                                       enum kv_disk_space space,
                                       const void *prefix,
                                       size_t prefix_bytes,
                                       kv_disk_each_fn each,
                                       void *arg)
{
    return disk->ops->scan(disk, space, prefix, prefix_bytes, each, arg);
}

/* Any thread. */
static inline void kv_disk_get_usage(const struct kv_disk *disk,
                                     struct kv_disk_usage *ret_usage)
{
    disk->ops->usage(disk, ret_usage);
}

/* All its queues have been closed.  NULL is allowed. */
static inline void kv_disk_close(struct kv_disk *disk)
{
    if (disk != NULL)
        disk->ops->close(disk);
}

/* ---- memory ------------------------------------------------------------------------------- */

/* Opens a disk in memory.  Everything takes write_us by
 * `clock`: 0 in production, more in simulations.  Returns NULL if out of memory. */
struct kv_disk *kv_disk_memory_open(const struct kv_clock *clock, uint64_t write_us);

/* ---- RocksDB ------------------------------------------------------------------------------ */

/* The layout for rows of some bytes each: the disk beside kv_disk_extents_open()'s file. */
#define KV_DISK_LAYOUT_KEYS "keys"

/* How RocksDB keeps rows. */
struct kv_disk_layout {
    const char *name;
    const char *summary;
};

/* Returns the layouts from number 0 on, then NULL. */
const struct kv_disk_layout *kv_disk_rocksdb_layout(unsigned number);

struct kv_disk_rocksdb_options {
    const char *folder; /* made if missing; its parent exists */
    const char *layout; /* a name; NULL: the first */
    uint64_t bytes_max; /* where the layout drops the oldest rows by itself; 0: none */
};

/* Opens or makes the database.  Fails with KV_IO or KV_NO_MEMORY, KV_INVALID for an unknown layout,
 * and KV_UNSUPPORTED without KV_WITH_ROCKSDB; `detail` has the reason. */
kv_status_t kv_disk_rocksdb_open(const struct kv_disk_rocksdb_options *options,
                                 struct kv_disk **ret_disk,
                                 char *detail,
                                 size_t detail_bytes);

/* ---- extents ------------------------------------------------------------------------------ */

/* Opens or makes a disk whose rows are in the file at `path`, and all else in `keys`, which is its
 * own from then on, also if this fails.  A row has at most 8 MiB (KV_TOO_LARGE); of each the process
 * keeps some 60 bytes in memory.  Fails with KV_IO or KV_NO_MEMORY; `detail` has the reason. */
kv_status_t kv_disk_extents_open(const char *path,
                                 struct kv_disk *keys,
                                 struct kv_disk **ret_disk,
                                 char *detail,
                                 size_t detail_bytes);

#endif
