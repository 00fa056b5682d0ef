/* free_space.h - what a file system has left, so that it is never filled to the last byte.
 *
 * RocksDB cannot go on after it has failed to write a log, and needs room to be opened: what it writes
 * is little, and always has room for it kept, from rows most of all.  Others may take that.
 *
 * Threads: any.
 */
#ifndef KV_KVSERVER_DISK_FREE_SPACE_H
#define KV_KVSERVER_DISK_FREE_SPACE_H

#include <stdint.h>
#include <sys/statvfs.h>

enum {
    KV_FREE_FOR_KEYS = 32 << 20, /* a log of RocksDB's, and what it is flushed to */
    KV_FREE_FOR_ROWS = 64 << 20, /* where less is free no rows are written */
};

/* A file system without a size, as some in memory, has no blocks at all. */
static inline uint64_t kv_free_of(const struct statvfs *facts)
{
    return facts->f_blocks > 0 ? (uint64_t)facts->f_bavail * facts->f_frsize : UINT64_MAX;
}

/* Return the bytes that are free where the path, or the file, is; UINT64_MAX: that cannot be told. */
static inline uint64_t kv_free_space(const char *path)
{
    struct statvfs facts;

    return statvfs(path, &facts) == 0 ? kv_free_of(&facts) : UINT64_MAX;
}

static inline uint64_t kv_free_space_of(int fd)
{
    struct statvfs facts;

    return fstatvfs(fd, &facts) == 0 ? kv_free_of(&facts) : UINT64_MAX;
}

#endif
