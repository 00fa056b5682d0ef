/* disk_rocksdb_none.c - what a build without RocksDB has in its place. */
#include "kvserver/disk/disk.h"

#include <stdio.h>

const struct kv_disk_layout *kv_disk_rocksdb_layout(unsigned number)
{
    (void)number;
    return NULL;
}

kv_status_t kv_disk_rocksdb_open(const struct kv_disk_rocksdb_options *options,
                                 struct kv_disk **ret_disk,
                                 char *detail,
                                 size_t detail_bytes)
{
    (void)ret_disk;
    snprintf(detail, detail_bytes, "disk: %s: this build is without RocksDB", options->folder);
    return KV_UNSUPPORTED;
}
