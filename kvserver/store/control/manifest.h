/* manifest.h - the records on disk that say which saved blocks count (proto/manifest.proto).
 *
 *   format                               the version of all this
 *   prefix/HOME, block's number, name    a SavedPrefix: parents before their children
 *   object/KEY, version                  a SavedObject: tier/object_record.h
 *
 * A prefix's record is written before its rows, and says that they do not count; then again, and
 * says that they do.  Before they are erased it says that they do not; it is removed after them.
 * Each step begins when the one before it is on the disk for sure.  So whatever becomes of the node,
 * rows are found by whoever erases them, and none counts that is not there.
 *
 * Threads: the control thread.  Memory: the caller's.
 */
#ifndef KV_KVSERVER_STORE_CONTROL_MANIFEST_H
#define KV_KVSERVER_STORE_CONTROL_MANIFEST_H

#include "kvserver/disk/disk.h"
#include "kvserver/store/tier/disk_tier.h"

enum {
    KVS_DISK_FORMAT = 1
};

struct kvs_control;

/* Returns the name of a home on disk, which follows from all that it is. */
struct kv_id128 kvs_manifest_home_id(const struct kvs_prefix_place *place,
                                     const struct kv_id128 *rows_id);

/* Returns how to write a prefix's record; `memory` is the caller's to free when it is written.
 * Returns false if out of memory.
 *   prefix  whose writers and parent it says; NULL: it does not count */
bool kvs_manifest_prefix(const struct kvs_tier_item *item,
                         const struct kvs_prefix *prefix,
                         struct kv_disk_write *ret_write,
                         void **ret_memory);
/* The same of its removal. */
bool kvs_manifest_removal(const struct kvs_tier_item *item,
                          struct kv_disk_write *ret_write,
                          void **ret_memory);

/* What is read of a prefix's record. */
struct kvs_manifest_entry {
    struct kvs_tier_item item; /* without a prefix */
    bool counts;
    struct kv_id128 parent;     /* of all but the first block of a prompt */
    struct kv_writers *writers; /* of the block; NULL if it does not count */
};

/* Reads the format's record, or writes it if there is none.  Fails with KV_UNSUPPORTED if the disk was
 * written by a newer version, KV_IO or KV_NO_MEMORY; `detail` has the reason. */
kv_status_t kvs_manifest_open(struct kv_disk *disk, char *detail, size_t detail_bytes);

/* Calls `each` for all prefixes' records in order; the entry is valid during the call, but for
 * `writers`, which is the callee's.  Fails with KV_IO or KV_NO_MEMORY; `detail` has the reason.  Records
 * that are not valid are counted in *n_bad, and skipped. */
kv_status_t kvs_manifest_read(struct kv_disk *disk,
                              void (*each)(void *arg, struct kvs_manifest_entry *entry),
                              void *arg,
                              uint64_t *n_bad,
                              char *detail,
                              size_t detail_bytes);

#endif
