#include "kvserver/data_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

struct kvs_data_dir {
    int folder;
    int fd; /* of the file `lock`, which holds the lock and its owner's process id */
};

static kv_status_t make_folders(const char *path, char *detail, size_t detail_bytes)
{
    char part[PATH_MAX];
    size_t bytes = strlen(path);
    struct stat found;

    if (bytes == 0 || bytes >= sizeof(part)) {
        snprintf(detail, detail_bytes, "data directory: not a path: %s", path);
        return KV_INVALID;
    }
    for (size_t end = 1; end <= bytes; end++) {
        if (path[end] != '/' && path[end] != 0)
            continue;
        memcpy(part, path, end);
        part[end] = 0;
        /* Only the node's user may read what it stores. */
        if (mkdir(part, 0700) == 0 || errno == EEXIST)
            continue;
        snprintf(detail, detail_bytes, "data directory: cannot create: %s: %s", part,
                 strerror(errno));
        return KV_INVALID;
    }
    if (stat(path, &found) != 0 || !S_ISDIR(found.st_mode)) {
        snprintf(detail, detail_bytes, "data directory: not a directory: %s", path);
        return KV_INVALID;
    }
    return KV_OK;
}

/* Reads the process id of the lock's owner. */
static long owner_of(int fd)
{
    char text[32];
    ssize_t bytes = pread(fd, text, sizeof(text) - 1, 0);

    if (bytes <= 0)
        return 0;
    text[bytes] = 0;
    return strtol(text, NULL, 10);
}

static kv_status_t lock_failed(int fd, const char *path, char *detail, size_t detail_bytes)
{
    if (errno != EWOULDBLOCK) {
        snprintf(detail, detail_bytes, "data directory: cannot lock: %s: %s", path,
                 strerror(errno));
        return KV_INVALID;
    }
    snprintf(detail, detail_bytes, "data directory: %s: in use by process %ld", path,
             owner_of(fd));
    return KV_EXISTS;
}

static void close_files(const struct kvs_data_dir *data_dir)
{
    if (data_dir->fd >= 0)
        close(data_dir->fd);
    if (data_dir->folder >= 0)
        close(data_dir->folder);
}

kv_status_t kvs_data_dir_open(const char *path,
                              struct kvs_data_dir **ret_data_dir,
                              char *detail,
                              size_t detail_bytes)
{
    char name[PATH_MAX + 8];
    struct kvs_data_dir *data_dir;
    kv_status_t status = make_folders(path, detail, detail_bytes);

    if (status != KV_OK)
        return status;
    data_dir = malloc(sizeof(*data_dir));
    if (data_dir == NULL) {
        snprintf(detail, detail_bytes, "out of memory: data directory");
        return KV_NO_MEMORY;
    }
    snprintf(name, sizeof(name), "%s/lock", path);
    data_dir->folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    data_dir->fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (data_dir->fd < 0 || data_dir->folder < 0) {
        snprintf(detail, detail_bytes, "data directory: not writable: %s: %s", path,
                 strerror(errno));
        status = KV_INVALID;
        goto err;
    }
    /* The system releases the lock with the process, so a node that crashed leaves none
     * behind. */
    if (flock(data_dir->fd, LOCK_EX | LOCK_NB) != 0) {
        status = lock_failed(data_dir->fd, path, detail, detail_bytes);
        goto err;
    }
    /* Only the lock's owner writes its process id: another node's must stay readable. */
    if (ftruncate(data_dir->fd, 0) != 0 || dprintf(data_dir->fd, "%ld\n", (long)getpid()) < 0) {
        snprintf(detail, detail_bytes, "data directory: not writable: %s: %s", path,
                 strerror(errno));
        status = KV_INVALID;
        goto err;
    }
    *ret_data_dir = data_dir;
    return KV_OK;

err:
    close_files(data_dir);
    free(data_dir);
    return status;
}

uint64_t kvs_data_dir_room(const struct kvs_data_dir *data_dir)
{
    struct statvfs facts;
    struct stat rows;

    if (fstatvfs(data_dir->fd, &facts) != 0)
        return 0;
    if (fstatat(data_dir->folder, "rows", &rows, 0) != 0)
        rows.st_blocks = 0;
    return (uint64_t)facts.f_bavail * facts.f_frsize + (uint64_t)rows.st_blocks * 512;
}

void kvs_data_dir_sync(const struct kvs_data_dir *data_dir)
{
    (void)fsync(data_dir->folder);
}

void kvs_data_dir_close(struct kvs_data_dir *data_dir)
{
    if (data_dir == NULL)
        return;
    /* The lock file stays: removing it would race with another process that has just opened it.
     * Only the lock on it counts. */
    close_files(data_dir);
    free(data_dir);
}
