#include "kvserver/data_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

struct kv_folder {
    int fd; /* of the file `lock`, which carries the lock and says who has it */
};

static kv_status_t make_folders(const char *path, char *detail, size_t detail_bytes)
{
    char part[PATH_MAX];
    size_t bytes = strlen(path);
    struct stat found;

    if (bytes == 0 || bytes >= sizeof(part)) {
        snprintf(detail, detail_bytes, "folder: not a path: %s", path);
        return KV_INVALID;
    }
    for (size_t end = 1; end <= bytes; end++) {
        if (path[end] != '/' && path[end] != 0)
            continue;
        memcpy(part, path, end);
        part[end] = 0;
        if (mkdir(part, 0700) == 0 || errno == EEXIST)
            continue;
        snprintf(detail, detail_bytes, "folder: cannot be made: %s: %s", part, strerror(errno));
        return KV_INVALID;
    }
    if (stat(path, &found) != 0 || !S_ISDIR(found.st_mode)) {
        snprintf(detail, detail_bytes, "folder: not a folder: %s", path);
        return KV_INVALID;
    }
    return KV_OK;
}

/* Reads who has the lock. */
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
        snprintf(detail, detail_bytes, "folder: cannot be locked: %s: %s", path,
                 strerror(errno));
        return KV_INVALID;
    }
    snprintf(detail, detail_bytes, "folder in use: %s: by process %ld", path, owner_of(fd));
    return KV_EXISTS;
}

kv_status_t kv_folder_open(const char *path,
                           struct kv_folder **ret_folder,
                           char *detail,
                           size_t detail_bytes)
{
    char name[PATH_MAX + 8];
    struct kv_folder *folder;
    kv_status_t status = make_folders(path, detail, detail_bytes);

    if (status != KV_OK)
        return status;
    folder = malloc(sizeof(*folder));
    if (folder == NULL) {
        snprintf(detail, detail_bytes, "folder: out of memory");
        return KV_NO_MEMORY;
    }
    snprintf(name, sizeof(name), "%s/lock", path);
    folder->fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (folder->fd < 0) {
        snprintf(detail, detail_bytes, "folder: not writable: %s: %s", path, strerror(errno));
        free(folder);
        return KV_INVALID;
    }
    if (flock(folder->fd, LOCK_EX | LOCK_NB) != 0) {
        status = lock_failed(folder->fd, path, detail, detail_bytes);
        goto err;
    }
    if (ftruncate(folder->fd, 0) != 0 || dprintf(folder->fd, "%ld\n", (long)getpid()) < 0) {
        snprintf(detail, detail_bytes, "folder: not writable: %s: %s", path, strerror(errno));
        status = KV_INVALID;
        goto err;
    }
    *ret_folder = folder;
    return KV_OK;

err:
    close(folder->fd);
    free(folder);
    return status;
}

void kv_folder_close(struct kv_folder *folder)
{
    if (folder == NULL)
        return;
    /* The file and its number stay: to remove it would race with the next process, which may
     * have opened it already.  The lock is what counts. */
    close(folder->fd);
    free(folder);
}
