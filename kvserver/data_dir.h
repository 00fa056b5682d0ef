/* data_dir.h - the node's folder: made where it is missing, and locked for one process.
 *
 * Threads: start-up and end.  Memory: open/close.
 */
#ifndef KV_KVSERVER_DATA_DIR_H
#define KV_KVSERVER_DATA_DIR_H

#include "proto/kv_status.h"

#include <stddef.h>

struct kv_folder;

/* Makes the folder and those above it (mode 0700) and takes its lock, which ends with the
 * process however it ends.  KV_INVALID: cannot be made, or not writable; KV_EXISTS: another
 * process has it, `detail` says which. */
kv_status_t kv_folder_open(const char *path,
                           struct kv_folder **ret_folder,
                           char *detail,
                           size_t detail_bytes);

/* Gives the lock back.  NULL is allowed. */
void kv_folder_close(struct kv_folder *folder);

#endif
