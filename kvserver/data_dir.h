/* data_dir.h - the node's folder: made where it is missing, and locked for one process.
 *
 * Threads: start-up and end.  Memory: open/close.
 */
#ifndef KV_KVSERVER_DATA_DIR_H
#define KV_KVSERVER_DATA_DIR_H

#include "proto/kv_status.h"

#include <stddef.h>

struct kvs_data_dir;

/* Makes the folder and those above it (mode 0700) and takes its lock, which ends with the
 * process however it ends.  KV_INVALID: cannot be made, or not writable; KV_EXISTS: another
 * process has it, `detail` says which. */
kv_status_t kvs_data_dir_open(const char *path,
                              struct kvs_data_dir **ret_data_dir,
                              char *detail,
                              size_t detail_bytes);

/* Gives the lock back.  NULL is allowed. */
void kvs_data_dir_close(struct kvs_data_dir *data_dir);

#endif
