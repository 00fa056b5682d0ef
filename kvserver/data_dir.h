/* data_dir.h - the node's data directory: created if missing, and locked by one process.
 *
 * Threads: startup and shutdown.  Memory: open/close.
 */
#ifndef KV_KVSERVER_DATA_DIR_H
#define KV_KVSERVER_DATA_DIR_H

#include "proto/kv_status.h"

#include <stddef.h>
#include <stdint.h>

struct kvs_data_dir;

/* Creates the directory and its parents (mode 0700) and locks it.  The lock ends with the
 * process, even after a crash.  Fails with KV_INVALID if the directory cannot be created or
 * written, and with KV_EXISTS if another process holds the lock; `detail` names it. */
kv_status_t kvs_data_dir_open(const char *path,
                              struct kvs_data_dir **ret_data_dir,
                              char *detail,
                              size_t detail_bytes);

/* Returns how many bytes are free in its file system for what is saved, with what the file `rows` in
 * it has already; 0: not known. */
uint64_t kvs_data_dir_room(const struct kvs_data_dir *data_dir);

/* Files that were made in it are there after a power cut, too. */
void kvs_data_dir_sync(const struct kvs_data_dir *data_dir);

/* Releases the lock.  NULL is allowed. */
void kvs_data_dir_close(struct kvs_data_dir *data_dir);

#endif
