#define _GNU_SOURCE /* memfd_create, statx */
#include "kvserver/net/ucx/peer_files.h"

#include "kvserver/base/hash.h"
#include "kvserver/base/thread.h"
#include "kvserver/net/ucx/memory_file.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    GROUPS = 64, /* a process has its files in one of them */
    GROUP_FILES = 64,
    CLOSES_MAX = GROUPS * GROUP_FILES,
};

/* Closes what is no longer needed.  Who closes the last descriptor of a file frees its pages,
 * which takes long where a process with much memory was killed: a thread of its own. */
struct closer {
    struct kv_lock *lock;
    struct kv_signal *signal;
    struct kv_thread *thread; /* NULL: not started */
    bool must_stop;
    unsigned n;
    int fds[CLOSES_MAX];
};

struct peer_file {
    int fd;
    uint64_t base; /* kv_memory_file_head.base */
    uint64_t used; /* group->clock when it was last taken */
    unsigned n_readers;
};

struct group {
    struct kv_lock *lock;
    uint64_t clock;
    uint64_t keys[GROUP_FILES]; /* process and descriptor; 0: not to be found */
    struct peer_file files[GROUP_FILES];
};

struct kv_peer_files {
    struct statx own; /* of a memfd of this process: all are on its device */
    int fd_max;       /* a file has no higher one: the rest is for connections */
    struct closer closer;
    struct group groups[GROUPS];
};

/* A file that was found or opened, held until put_file(). */
struct held {
    struct group *group;
    unsigned index;
    bool is_fresh; /* opened just now */
};

/* Returns whether there was one to be closed. */
static bool close_one(struct closer *closer)
{
    int fd = -1;

    kv_lock_take(closer->lock);
    if (closer->n > 0)
        fd = closer->fds[--closer->n];
    kv_lock_release(closer->lock);
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

static void closer_main(void *arg)
{
    struct closer *closer = arg;
    const int fd = kv_signal_fd(closer->signal);
    bool must_stop = false;

    while (!must_stop) {
        kv_sleep_fds(&fd, 1, UINT32_MAX);
        kv_signal_clear(closer->signal);
        kv_lock_take(closer->lock);
        must_stop = closer->must_stop;
        kv_lock_release(closer->lock);
        while (close_one(closer))
            ;
    }
}

static void close_later(struct closer *closer, int fd)
{
    bool is_taken = false;

    kv_lock_take(closer->lock);
    if (closer->thread == NULL &&
        kv_thread_start("kv-close", closer_main, closer, &closer->thread) != KV_OK)
        closer->thread = NULL;
    if (closer->thread != NULL && closer->n < CLOSES_MAX) {
        closer->fds[closer->n++] = fd;
        is_taken = true;
    }
    kv_lock_release(closer->lock);
    if (is_taken)
        kv_signal_raise(closer->signal);
    else
        close(fd);
}

static void closer_fini(struct closer *closer)
{
    if (closer->thread != NULL) {
        kv_lock_take(closer->lock);
        closer->must_stop = true;
        kv_lock_release(closer->lock);
        kv_signal_raise(closer->signal);
        kv_thread_join(closer->thread);
    }
    if (closer->signal != NULL)
        kv_signal_destroy(closer->signal);
    if (closer->lock != NULL)
        kv_lock_destroy(closer->lock);
}

static uint64_t key_of(uint32_t process, uint32_t file)
{
    return (uint64_t)process << 32 | file;
}

static struct group *group_of(struct kv_peer_files *files, uint32_t process)
{
    return &files->groups[kv_mix64(process) % GROUPS];
}

static enum kv_offer_outcome outcome_of(int error)
{
    return error == ENOENT || error == ESRCH ? KV_OFFER_ABSENT : KV_OFFER_REFUSED;
}

/* Opens the file for reading if it is a memfd. */
static enum kv_offer_outcome
open_memfd(const struct kv_peer_files *files, uint32_t process, uint32_t file, int *ret_fd)
{
    char path[64];
    struct statx facts;
    int place, fd = -1;

    snprintf(path, sizeof(path), "/proc/%u/fd/%u", process, file - 1);
    /* O_PATH asks nothing of the file itself, and neither does a status that need not be new. */
    place = open(path, O_PATH | O_CLOEXEC);
    if (place < 0)
        return outcome_of(errno);
    if (statx(place, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_INO, &facts) == 0 &&
        facts.stx_dev_major == files->own.stx_dev_major &&
        facts.stx_dev_minor == files->own.stx_dev_minor) {
        snprintf(path, sizeof(path), "/proc/self/fd/%d", place);
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    }
    close(place);
    *ret_fd = fd;
    return fd >= 0 ? KV_OFFER_WHOLE : KV_OFFER_REFUSED;
}

static enum kv_offer_outcome open_file(const struct kv_peer_files *files,
                                       uint32_t process,
                                       uint32_t file,
                                       int *ret_fd,
                                       uint64_t *ret_base)
{
    struct kv_memory_file_head head;
    enum kv_offer_outcome outcome = open_memfd(files, process, file, ret_fd);

    if (outcome != KV_OFFER_WHOLE)
        return outcome;
    if (*ret_fd <= files->fd_max &&
        pread(*ret_fd, &head, sizeof(head), 0) == (ssize_t)sizeof(head) &&
        head.magic == KV_MEMORY_FILE_MAGIC) {
        *ret_base = head.base;
        return KV_OFFER_WHOLE;
    }
    close(*ret_fd);
    return KV_OFFER_REFUSED;
}

/* The group is locked. */
static void close_file(struct kv_peer_files *files, struct group *group, unsigned i)
{
    group->keys[i] = 0;
    if (group->files[i].n_readers > 0)
        return; /* the last one closes it */
    close_later(&files->closer, group->files[i].fd);
    group->files[i].fd = -1;
}

/* Returns a place for a new file, GROUP_FILES if all are being read.  The group is locked. */
static unsigned find_place(struct kv_peer_files *files, struct group *group)
{
    unsigned place = GROUP_FILES;

    for (unsigned i = 0; i < GROUP_FILES; i++) {
        const struct peer_file *file = &group->files[i];

        if (file->fd < 0)
            return i;
        if (file->n_readers == 0 &&
            (place == GROUP_FILES || file->used < group->files[place].used))
            place = i;
    }
    if (place < GROUP_FILES)
        close_file(files, group, place);
    return place;
}

/* The group is locked. */
static enum kv_offer_outcome
add_file(struct kv_peer_files *files, struct group *group, uint64_t key, unsigned *ret_index)
{
    const unsigned i = find_place(files, group);
    struct peer_file *file = &group->files[i];
    enum kv_offer_outcome outcome;
    int fd;

    if (i == GROUP_FILES)
        return KV_OFFER_REFUSED;
    outcome = open_file(files, (uint32_t)(key >> 32), (uint32_t)key, &fd, &file->base);
    if (outcome != KV_OFFER_WHOLE)
        return outcome;
    file->fd = fd;
    group->keys[i] = key;
    *ret_index = i;
    return KV_OFFER_WHOLE;
}

static unsigned find_file(const struct group *group, uint64_t key)
{
    unsigned i = 0;

    while (i < GROUP_FILES && group->keys[i] != key)
        i++;
    return i;
}

static enum kv_offer_outcome
hold_file(struct kv_peer_files *files, uint32_t process, uint32_t number, struct held *ret_held)
{
    struct group *group = group_of(files, process);
    const uint64_t key = key_of(process, number);
    enum kv_offer_outcome outcome = KV_OFFER_WHOLE;

    kv_lock_take(group->lock);
    *ret_held = (struct held){.group = group, .index = find_file(group, key)};
    if (ret_held->index == GROUP_FILES) {
        ret_held->is_fresh = true;
        outcome = add_file(files, group, key, &ret_held->index);
    }
    if (outcome == KV_OFFER_WHOLE) {
        group->files[ret_held->index].n_readers++;
        group->files[ret_held->index].used = ++group->clock;
    }
    kv_lock_release(group->lock);
    return outcome;
}

/* `is_stale`: nobody is to find it again. */
static void put_file(struct kv_peer_files *files, const struct held *held, bool is_stale)
{
    struct group *group = held->group;
    struct peer_file *file = &group->files[held->index];

    kv_lock_take(group->lock);
    file->n_readers--;
    if (is_stale)
        group->keys[held->index] = 0;
    if (group->keys[held->index] == 0 && file->n_readers == 0)
        close_file(files, group, held->index);
    kv_lock_release(group->lock);
}

/* Reads bytes at an address of the file's process.  What is not in the pieces is not read: the
 * head is the same in every file, and would pass for a number that its owner chose. */
static bool read_at(const struct peer_file *file,
                    uint64_t address,
                    const struct iovec *pieces,
                    unsigned n_pieces,
                    size_t bytes)
{
    const uint64_t from = address - file->base;

    return address >= file->base && from >= KV_MEMORY_FILE_PIECES && from <= INT64_MAX &&
           preadv(file->fd, pieces, (int)n_pieces, (off_t)from) == (ssize_t)bytes;
}

static enum kv_offer_outcome read_file(const struct peer_file *file,
                                       const struct kv_offer_tail *tail,
                                       size_t bytes,
                                       const struct kv_iov *iov,
                                       unsigned n_iov)
{
    struct iovec pieces[KV_IOV_MAX];
    uint64_t number = 0;
    const struct iovec here = {&number, sizeof(number)};
    bool is_whole;

    assert(n_iov <= KV_IOV_MAX);
    for (unsigned i = 0; i < n_iov; i++)
        pieces[i] = (struct iovec){iov[i].base, iov[i].bytes};
    is_whole = read_at(file, tail->data, pieces, n_iov, bytes);
    /* The number is read after the data, as in kv_offer_read(). */
    atomic_thread_fence(memory_order_seq_cst);
    if (!read_at(file, tail->offer, &here, 1, sizeof(number)))
        return KV_OFFER_REFUSED;
    if (number != tail->number)
        return KV_OFFER_GONE;
    return is_whole ? KV_OFFER_WHOLE : KV_OFFER_REFUSED;
}

enum kv_offer_outcome kv_peer_files_read(struct kv_peer_files *files,
                                         const struct kv_offer_tail *tail,
                                         size_t bytes,
                                         const struct kv_iov *iov,
                                         unsigned n_iov)
{
    if (tail->number == 0)
        return KV_OFFER_REFUSED; /* offers that ended have it, and so have holes */
    /* One that is gone in a file opened earlier may be there in the file that has its place. */
    for (;;) {
        enum kv_offer_outcome outcome;
        struct held held;

        outcome = hold_file(files, tail->process, tail->file, &held);
        if (outcome != KV_OFFER_WHOLE)
            return outcome;
        outcome = read_file(&held.group->files[held.index], tail, bytes, iov, n_iov);
        put_file(files, &held, outcome != KV_OFFER_WHOLE);
        if (outcome == KV_OFFER_WHOLE || held.is_fresh)
            return outcome;
    }
}

void kv_peer_files_forget(struct kv_peer_files *files, uint32_t process)
{
    struct group *group = group_of(files, process);

    kv_lock_take(group->lock);
    for (unsigned i = 0; i < GROUP_FILES; i++)
        if (group->keys[i] >> 32 == process && group->keys[i] != 0)
            close_file(files, group, i);
    kv_lock_release(group->lock);
}

unsigned kv_peer_files_open(struct kv_peer_files *files)
{
    unsigned n = 0;

    for (unsigned g = 0; g < GROUPS; g++) {
        struct group *group = &files->groups[g];

        kv_lock_take(group->lock);
        for (unsigned i = 0; i < GROUP_FILES; i++)
            n += group->files[i].fd >= 0;
        kv_lock_release(group->lock);
    }
    return n;
}

/* Three quarters of what the process may have.  The system gives the lowest that is free. */
static int highest_fd(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > INT_MAX)
        return INT_MAX;
    return (int)(limit.rlim_cur - limit.rlim_cur / 4);
}

/* Whether this process can open a memfd of its own, and on which device all of them are. */
static bool try_own(struct kv_peer_files *files)
{
    const int own = memfd_create("topkv-try", MFD_CLOEXEC);
    int fd;
    bool is_good;

    if (own < 0)
        return false;
    is_good = statx(own, "", AT_EMPTY_PATH, STATX_INO, &files->own) == 0;
    if (is_good) {
        is_good =
            open_memfd(files, (uint32_t)getpid(), (uint32_t)own + 1, &fd) == KV_OFFER_WHOLE;
        if (is_good)
            close(fd);
    }
    close(own);
    return is_good;
}

/* Returns false if out of memory or descriptors; kv_peer_files_free() frees what there is. */
static bool init(struct kv_peer_files *files)
{
    bool is_good = true;

    for (unsigned g = 0; g < GROUPS; g++) {
        struct group *group = &files->groups[g];

        group->lock = kv_lock_create();
        is_good &= group->lock != NULL;
        for (unsigned i = 0; i < GROUP_FILES; i++)
            group->files[i].fd = -1;
    }
    files->fd_max = highest_fd();
    files->closer.lock = kv_lock_create();
    files->closer.signal = kv_signal_create();
    return is_good && files->closer.lock != NULL && files->closer.signal != NULL;
}

struct kv_peer_files *kv_peer_files_create(void)
{
    struct kv_peer_files *files = calloc(1, sizeof(*files));

    if (files == NULL)
        return NULL;
    if (!init(files) || !try_own(files)) {
        kv_peer_files_free(files);
        return NULL;
    }
    return files;
}

void kv_peer_files_free(struct kv_peer_files *files)
{
    if (files == NULL)
        return;
    for (unsigned g = 0; g < GROUPS; g++) {
        struct group *group = &files->groups[g];

        for (unsigned i = 0; i < GROUP_FILES; i++)
            if (group->files[i].fd >= 0)
                close(group->files[i].fd);
        if (group->lock != NULL)
            kv_lock_destroy(group->lock);
    }
    closer_fini(&files->closer);
    free(files);
}
