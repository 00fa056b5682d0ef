/* disk_extents.c - a disk whose rows lie in one large file, in places that are used again; records,
 * and where which row is, are another disk's.
 *
 *     file      extents of 8 MiB, each divided into places of one size, whole pages of 4 KiB
 *     keys      a row's key -> its page and its bytes: in the space of rows of the other disk
 *
 *     queue -- ring --> the writer     gives places, joins neighbors, writes
 *                       the syncer     waits for the file, then the other disk is synced
 *                       the readers    a part of the file each, neighbors at once
 *           <- ring --  what is done; then the queue's own thread writes the keys
 *
 * A database that compacts writes every row four times, and stops meanwhile (tests/bench, kv_bench
 * disk).  Rows are of few sizes, are written together and go together, so places do what the arena
 * does in memory (store/rows/arena.h): nothing is ever moved.
 *
 * A row's key is written after the row: whatever becomes of the process, a key leads to what was
 * written.  A place whose key is gone, or leads elsewhere, is used again only after a sync that
 * covers that: otherwise the old key could come back, and lead to another row.
 *
 * The file bypasses the system's cache where it can: whoever reads rows keeps them. */
#define _GNU_SOURCE
#include "kvserver/disk/disk.h"
#include "kvserver/disk/free_space.h"
#include "kvserver/disk/places.h"

#include "kvserver/base/hash.h"
#include "kvserver/base/log.h"
#include "kvserver/base/map.h"
#include "kvserver/base/ring.h"
#include "kvserver/base/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    PAGE = KV_PLACE_PAGE,
    EXTENT_BYTES = KV_PLACE_BYTES_MAX,
    READERS = 8,
    WRITER = READERS,
    SYNCER,
    WORKERS,
    RING_TASKS = 8 * KV_DISK_QUEUE_MAX,
    READ_SPAN = 256, /* pages of the file whose reads one reader does */
    READ_TASKS = 64, /* joined at most */
    SLEEP_US = 1000000,
    CLOSE_US = 1000,
};
static_assert((int)KV_PLACE_PAGE == (int)KV_DISK_PAGE,
              "who counts the room counts these pages");

static_assert(sizeof(struct kv_place) == sizeof(uint64_t) && sizeof(void *) == 8,
              "a map has places for its values");

struct extents_disk;

struct extents_queue {
    struct kv_disk_queue base;
    struct kv_disk_queue *keys; /* of the other disk */
    struct kv_ring *ended;
    struct task *held, **held_end; /* whose keys could not be given to the other disk yet */
    unsigned n_under_way;
    bool is_closing; /* nobody is called any more */
    _Atomic unsigned n_ending;
    void (*wake)(void *arg);
    void *wake_arg;
};

enum task_kind {
    TASK_WRITE,
    TASK_READ,
    TASK_SYNC,
    TASK_PUNCH,  /* of a sync: what is freed is gone from the file */
    TASK_OTHERS, /* done by the other disk alone */
};

struct task {
    struct task *next;
    struct extents_queue *queue;
    enum task_kind kind;
    kv_disk_done_fn done;
    void *arg;
    kv_status_t status;
    size_t bytes; /* of a value that was read */
    void *value;
    size_t room;
    struct kv_place place;      /* read */
    struct kv_place_list freed; /* sync: to be used again after it */
    struct kv_place *places;    /* write: (n) of the values */
    unsigned n;
    struct kv_disk_write writes[]; /* (n), then places and keys */
};

struct worker {
    struct extents_disk *disk;
    struct kv_ring *tasks;
    struct kv_signal *signal;
    struct kv_thread *thread;
    uint8_t *buffer;   /* EXTENT_BYTES, aligned */
    struct task *next; /* a reader's: popped, and not behind what it was reading */
};

struct extents_disk {
    struct kv_disk base;
    struct kv_disk *keys;
    int fd;
    struct worker workers[WORKERS];
    _Atomic bool stopping;
    _Atomic bool are_keys_lost; /* the other disk has failed: no place is given any more */

    struct kv_lock *lock; /* of all that follows */
    struct kv_map *map;   /* struct kv_place by the hash of a key */
    struct kv_places *places;
    struct kv_place_list freed; /* since the last sync began */
    uint64_t live_bytes;
};

/* ---- keys --------------------------------------------------------------------------------- */

static struct kv_place place_of(void *value)
{
    struct kv_place place;

    memcpy(&place, &value, sizeof(place));
    return place;
}

static void *value_of(struct kv_place place)
{
    void *value;

    memcpy(&value, &place, sizeof(value));
    return value;
}

/* The key leads there from now on; nowhere: it is gone.  Without memory the place that it led to
 * before is not used again until the disk is opened next. */
static bool
set_place(struct extents_disk *disk, const void *key, size_t key_bytes, struct kv_place place)
{
    const struct kv_id128 hash = kv_hash128(key, key_bytes);
    void *old = kv_map_get(disk->map, &hash);

    if (place.page != 0 && !kv_map_set(disk->map, &hash, value_of(place)))
        return false;
    if (place.page == 0)
        (void)kv_map_remove(disk->map, &hash);
    disk->live_bytes += place.bytes;
    if (old != NULL) {
        disk->live_bytes -= place_of(old).bytes;
        (void)kv_place_list_add(&disk->freed, place_of(old));
    }
    return true;
}

/* ---- workers ------------------------------------------------------------------------------ */

static kv_status_t system_status(const char *what)
{
    const int error = errno;

    KV_LOG_EVERY(KV_LOG_ERROR, "disk: rows: %s: %s", what, strerror(error));
    return error == ENOSPC || error == EDQUOT || error == EFBIG ? KV_NO_MEMORY : KV_IO;
}

static void end(struct task *task, kv_status_t status)
{
    struct extents_queue *queue = task->queue;

    task->status = status;
    atomic_fetch_add(&queue->n_ending, 1);
    /* As many fit as may be under way. */
    (void)kv_ring_push(queue->ended, task);
    if (queue->wake != NULL)
        queue->wake(queue->wake_arg);
    atomic_fetch_sub(&queue->n_ending, 1);
}

static kv_status_t
write_pages(struct extents_disk *disk, const uint8_t *bytes, size_t n_bytes, uint32_t page)
{
    off_t at = (off_t)(page - 1) * PAGE;

    while (n_bytes > 0) {
        const ssize_t n = pwrite(disk->fd, bytes, n_bytes, at);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return system_status("write");
        bytes += n;
        at += n;
        n_bytes -= (size_t)n;
    }
    return KV_OK;
}

/* Gives all values of a task places.  Returns false, and gives none, if there are not enough. */
static bool take_places(struct extents_disk *disk, struct task *task)
{
    unsigned i = 0;
    bool is_good = true;

    kv_lock_take(disk->lock);
    for (; i < task->n && is_good; i++) {
        const struct kv_disk_write *write = &task->writes[i];

        task->places[i] = (struct kv_place){0};
        if (write->value != NULL)
            is_good =
                kv_place_take(disk->places, (uint32_t)(write->value_bytes + write->tail_bytes),
                              &task->places[i]);
    }
    for (; !is_good && i-- > 0;)
        if (task->places[i].page != 0)
            kv_place_free(disk->places, task->places[i]);
    kv_lock_release(disk->lock);
    return is_good;
}

static void give_places_back(struct extents_disk *disk, struct task *task)
{
    kv_lock_take(disk->lock);
    for (unsigned i = 0; i < task->n; i++)
        if (task->places[i].page != 0)
            kv_place_free(disk->places, task->places[i]);
    kv_lock_release(disk->lock);
}

/* Writes the values of a task, neighbors at once. */
static kv_status_t
write_values(struct extents_disk *disk, struct worker *worker, const struct task *task)
{
    kv_status_t status = KV_OK;
    uint32_t page = 0; /* of what the buffer has */
    size_t n_bytes = 0;

    for (unsigned i = 0; i < task->n && status == KV_OK; i++) {
        const struct kv_disk_write *write = &task->writes[i];
        const size_t bytes = write->value_bytes + write->tail_bytes;
        const size_t whole = (size_t)kv_place_pages((uint32_t)bytes) * PAGE;

        if (write->value == NULL)
            continue;
        if (n_bytes > 0 &&
            (task->places[i].page != page + n_bytes / PAGE || n_bytes + whole > EXTENT_BYTES)) {
            status = write_pages(disk, worker->buffer, n_bytes, page);
            n_bytes = 0;
        }
        if (n_bytes == 0)
            page = task->places[i].page;
        kv_disk_join(write, worker->buffer + n_bytes);
        memset(worker->buffer + n_bytes + bytes, 0, whole - bytes);
        n_bytes += whole;
    }
    return status == KV_OK && n_bytes > 0 ? write_pages(disk, worker->buffer, n_bytes, page)
                                          : status;
}

/* Whether the values of a task leave the file system room for keys. */
static bool has_room(const struct extents_disk *disk, const struct task *task)
{
    uint64_t bytes = 0, free_bytes;

    for (unsigned i = 0; i < task->n; i++)
        if (task->writes[i].value != NULL)
            bytes += task->writes[i].value_bytes + task->writes[i].tail_bytes;
    free_bytes = bytes > 0 ? kv_free_space_of(disk->fd) : UINT64_MAX;
    if (free_bytes >= KV_FREE_FOR_ROWS + bytes)
        return true;
    KV_LOG_EVERY(KV_LOG_ERROR,
                 "disk: rows: the file system is full: %llu MiB are free, of which %d are kept",
                 (unsigned long long)(free_bytes >> 20), KV_FREE_FOR_ROWS >> 20);
    return false;
}

static void run_write(struct extents_disk *disk, struct worker *worker, struct task *task)
{
    kv_status_t status;

    if (atomic_load(&disk->are_keys_lost)) {
        end(task, KV_IO);
        return;
    }
    if (!has_room(disk, task) || !take_places(disk, task)) {
        end(task, KV_NO_MEMORY);
        return;
    }
    status = write_values(disk, worker, task);
    if (status != KV_OK)
        give_places_back(disk, task);
    end(task, status);
}

/* Reads what begins at a page into a buffer, which is aligned and has room for whole pages. */
static kv_status_t
read_pages(struct extents_disk *disk, uint8_t *buffer, uint32_t page, size_t n_bytes)
{
    size_t n_read = 0;

    while (n_read < n_bytes) {
        const ssize_t n =
            pread(disk->fd, buffer + n_read, (n_bytes - n_read + PAGE - 1) / PAGE * PAGE,
                  (off_t)(page - 1) * PAGE + (off_t)n_read);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return system_status("read");
        if (n == 0) {
            kv_log(KV_LOG_ERROR, "disk: rows: read: the file ends before page %u", page);
            return KV_IO;
        }
        n_read += (size_t)n;
    }
    return KV_OK;
}

static size_t wanted_of(const struct task *task)
{
    return task->place.bytes < task->room ? task->place.bytes : task->room;
}

/* The worker's buffer has the value there. */
static void end_read(struct task *task, const uint8_t *bytes)
{
    if (wanted_of(task) > 0)
        memcpy(task->value, bytes, wanted_of(task));
    task->bytes = task->place.bytes;
    end(task, KV_OK);
}

static struct task *next_of(struct worker *worker)
{
    struct task *task = worker->next;

    worker->next = NULL;
    return task != NULL ? task : kv_ring_pop(worker->tasks);
}

/* Reads a value, and those behind it that are wanted and lie behind it in the file: what was written
 * together is read together. */
static void run_reads(struct extents_disk *disk, struct worker *worker, struct task *first)
{
    struct task *tasks[READ_TASKS] = {first}, *task;
    const uint32_t page = first->place.page; /* a read that has ended is not ours */
    uint32_t n_pages = kv_place_pages(first->place.bytes);
    unsigned n = 1;
    kv_status_t status;

    while (n < READ_TASKS && (task = next_of(worker)) != NULL) {
        if (task->place.page != page + n_pages ||
            (n_pages + kv_place_pages(task->place.bytes)) * (size_t)PAGE > EXTENT_BYTES) {
            worker->next = task;
            break;
        }
        n_pages += kv_place_pages(task->place.bytes);
        tasks[n++] = task;
    }
    status = read_pages(disk, worker->buffer, page,
                        n == 1 ? wanted_of(first) : (size_t)n_pages * PAGE);
    for (unsigned i = 0; i < n; i++) {
        if (status == KV_OK)
            end_read(tasks[i], worker->buffer + (size_t)(tasks[i]->place.page - page) * PAGE);
        else if (n == 1)
            end(tasks[i], status);
        else if (read_pages(disk, worker->buffer, tasks[i]->place.page, wanted_of(tasks[i])) ==
                 KV_OK)
            end_read(tasks[i], worker->buffer);
        else
            end(tasks[i], status);
    }
}

static void run_sync(struct extents_disk *disk, struct task *task)
{
    end(task, fdatasync(disk->fd) == 0 ? KV_OK : system_status("sync"));
}

static int by_page(const void *a, const void *b)
{
    const struct kv_place *one = a, *other = b;

    return (one->page > other->page) - (one->page < other->page);
}

/* What was removed is gone, too, and its room is the file system's, where that can do so: neighbors
 * at once, since each hole is an entry in its journal. */
static void run_punch(struct extents_disk *disk, struct task *task)
{
    const struct kv_place_list *freed = &task->freed;
    uint32_t begin = 0, end_page = 0;

    qsort(freed->list, freed->n, sizeof(freed->list[0]), by_page);
    for (size_t i = 0; i <= freed->n; i++) {
        const uint32_t page = i < freed->n ? freed->list[i].page : 0;

        if (page == end_page && i < freed->n) {
            end_page += kv_place_pages(freed->list[i].bytes);
            continue;
        }
        if (end_page > begin)
            (void)fallocate(disk->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                            (off_t)(begin - 1) * PAGE, (off_t)(end_page - begin) * PAGE);
        begin = page;
        end_page = page + (i < freed->n ? kv_place_pages(freed->list[i].bytes) : 0);
    }
    kv_lock_take(disk->lock);
    for (size_t i = 0; i < task->freed.n; i++)
        kv_place_free(disk->places, task->freed.list[i]);
    kv_lock_release(disk->lock);
    end(task, KV_OK);
}

static void work(void *arg)
{
    struct worker *worker = arg;
    struct task *task;
    int fd = kv_signal_fd(worker->signal);

    for (;;) {
        kv_signal_clear(worker->signal);
        while ((task = next_of(worker)) != NULL) {
            if (task->kind == TASK_WRITE)
                run_write(worker->disk, worker, task);
            else if (task->kind == TASK_READ)
                run_reads(worker->disk, worker, task);
            else if (task->kind == TASK_SYNC)
                run_sync(worker->disk, task);
            else
                run_punch(worker->disk, task);
        }
        if (atomic_load(&worker->disk->stopping))
            return;
        kv_sleep_fds(&fd, 1, SLEEP_US);
    }
}

static kv_status_t give(struct worker *worker, struct task *task)
{
    struct extents_queue *queue = task->queue;

    if (!kv_ring_push(worker->tasks, task)) {
        free(task);
        return KV_BUSY;
    }
    queue->n_under_way++;
    kv_signal_raise(worker->signal);
    return KV_OK;
}

/* ---- what a queue's own thread does ------------------------------------------------------- */

static struct extents_disk *disk_of(const struct task *task)
{
    return (struct extents_disk *)task->queue->base.disk;
}

static void task_over(struct task *task, kv_status_t status)
{
    struct extents_queue *queue = task->queue;

    queue->n_under_way--;
    if (task->done != NULL && !queue->is_closing)
        task->done(task->arg, status, task->bytes);
    free(task->freed.list);
    free(task);
}

/* The other disk has the keys of what was written. */
static void keys_written(void *arg, kv_status_t status, size_t bytes)
{
    struct task *task = arg;
    struct extents_disk *disk = disk_of(task);

    (void)bytes;
    /* A write that has failed may have taken effect: its places are in doubt until the disk is
     * opened next.  After RocksDB has failed to write, every later write fails, too. */
    if (status == KV_IO)
        atomic_store(&disk->are_keys_lost, true);
    kv_lock_take(disk->lock);
    for (unsigned i = 0; i < task->n && status == KV_OK; i++)
        if (!set_place(disk, task->writes[i].key, task->writes[i].key_bytes, task->places[i]))
            status = KV_NO_MEMORY;
    kv_lock_release(disk->lock);
    task_over(task, status);
}

/* A sync has failed: what was freed before it is not free yet. */
static void keep_freed(struct task *task)
{
    struct extents_disk *disk = disk_of(task);

    kv_lock_take(disk->lock);
    for (size_t i = 0; i < task->freed.n; i++)
        (void)kv_place_list_add(&disk->freed, task->freed.list[i]);
    kv_lock_release(disk->lock);
}

/* The other disk is synced: what was freed before may be used again. */
static void keys_synced(void *arg, kv_status_t status, size_t bytes)
{
    struct task *task = arg;
    struct worker *syncer = &disk_of(task)->workers[SYNCER];

    (void)bytes;
    if (status == KV_OK && task->freed.n > 0) {
        task->kind = TASK_PUNCH;
        if (kv_ring_push(syncer->tasks, task)) {
            kv_signal_raise(syncer->signal);
            return;
        }
    }
    if (task->freed.n > 0)
        keep_freed(task);
    task_over(task, status);
}

static kv_status_t start_keys(struct task *task)
{
    struct extents_queue *queue = task->queue;
    struct kv_disk_write *writes = task->writes;

    if (task->kind == TASK_SYNC)
        return kv_disk_sync(queue->keys, keys_synced, task);
    for (unsigned i = 0; i < task->n; i++) {
        writes[i].value = writes[i].value != NULL ? &task->places[i] : NULL;
        writes[i].value_bytes = sizeof(task->places[i]);
        writes[i].tail_bytes = 0;
    }
    return kv_disk_write(queue->keys, KV_DISK_ROWS, writes, task->n, keys_written, task);
}

/* A worker has done its part of a write or a sync, whose other part could not begin. */
static void fail(struct task *task, kv_status_t status)
{
    if (task->kind == TASK_SYNC)
        keep_freed(task);
    else
        give_places_back(disk_of(task), task);
    task_over(task, status);
}

/* A worker has done its part. */
static void go_on(struct task *task)
{
    kv_status_t status = KV_OK;

    if (task->kind == TASK_READ || task->kind == TASK_PUNCH ||
        (task->kind == TASK_WRITE && task->status != KV_OK)) {
        task_over(task, task->status);
        return;
    }
    if (task->status == KV_OK)
        status = start_keys(task);
    if (task->status != KV_OK || (status != KV_OK && status != KV_BUSY)) {
        fail(task, task->status != KV_OK ? task->status : status);
        return;
    }
    if (status == KV_OK)
        return;
    task->next = NULL;
    *task->queue->held_end = task;
    task->queue->held_end = &task->next;
}

static unsigned progress(struct kv_disk_queue *base)
{
    struct extents_queue *queue = (struct extents_queue *)base;
    const unsigned n_before = queue->n_under_way;
    struct task *held = queue->held, *next, *task;
    unsigned n;

    (void)kv_disk_progress(queue->keys);
    queue->held = NULL;
    queue->held_end = &queue->held;
    for (; held != NULL; held = next) {
        next = held->next;
        go_on(held);
    }
    /* What the callbacks start is for a later call; and nothing passes what is held. */
    for (n = 0; n < n_before && queue->held == NULL; n++) {
        task = kv_ring_pop(queue->ended);
        if (task == NULL)
            break;
        go_on(task);
    }
    return n_before > queue->n_under_way ? n_before - queue->n_under_way : n;
}

static kv_status_t queue_open(struct kv_disk *base,
                              void (*wake)(void *arg),
                              void *arg,
                              struct kv_disk_queue **ret_queue)
{
    struct extents_disk *disk = (struct extents_disk *)base;
    struct extents_queue *queue = calloc(1, sizeof(*queue));
    kv_status_t status = KV_NO_MEMORY;

    if (queue == NULL)
        return KV_NO_MEMORY;
    queue->ended = kv_ring_create(KV_DISK_QUEUE_MAX);
    if (queue->ended != NULL)
        status = disk->keys->ops->queue_open(disk->keys, wake, arg, &queue->keys);
    if (status != KV_OK) {
        kv_ring_destroy(queue->ended);
        free(queue);
        return status;
    }
    queue->held_end = &queue->held;
    queue->base.disk = base;
    queue->wake = wake;
    queue->wake_arg = arg;
    *ret_queue = &queue->base;
    return KV_OK;
}

/* What is under way takes effect; nobody hears of it. */
static void queue_close(struct kv_disk_queue *base)
{
    struct extents_queue *queue = (struct extents_queue *)base;

    queue->is_closing = true;
    while (queue->n_under_way > 0 || atomic_load(&queue->n_ending) > 0)
        if (progress(base) == 0)
            kv_sleep_fds(NULL, 0, CLOSE_US);
    queue->keys->disk->ops->queue_close(queue->keys);
    kv_ring_destroy(queue->ended);
    free(queue);
}

/* ---- the table ---------------------------------------------------------------------------- */

static void others_done(void *arg, kv_status_t status, size_t bytes)
{
    struct task *task = arg;

    task->bytes = bytes;
    task_over(task, status);
}

/* Returns a task with room for n keys of so many bytes together. */
static struct task *task_create(struct kv_disk_queue *queue,
                                enum task_kind kind,
                                unsigned n,
                                size_t keys_bytes,
                                kv_disk_done_fn done,
                                void *arg)
{
    const size_t each = sizeof(struct kv_disk_write) + sizeof(struct kv_place);
    struct task *task = malloc(sizeof(*task) + n * each + keys_bytes);

    if (task == NULL)
        return NULL;
    *task = (struct task){
        .queue = (struct extents_queue *)queue, .kind = kind, .done = done, .arg = arg, .n = n};
    task->places = (struct kv_place *)&task->writes[n];
    return task;
}

/* Begins what the other disk does alone; `status` is that of giving it there. */
static kv_status_t others_begun(struct task *task, kv_status_t status)
{
    if (status == KV_OK)
        task->queue->n_under_way++;
    else
        free(task);
    return status;
}

static kv_status_t write_keys(struct kv_disk_queue *base,
                              enum kv_disk_space space,
                              const struct kv_disk_write *writes,
                              unsigned n,
                              kv_disk_done_fn done,
                              void *arg)
{
    struct extents_queue *queue = (struct extents_queue *)base;
    struct extents_disk *disk = (struct extents_disk *)base->disk;
    size_t keys_bytes = 0;

    if (queue->n_under_way == KV_DISK_QUEUE_MAX)
        return KV_BUSY;
    if (space == KV_DISK_RECORDS) {
        struct task *task = task_create(base, TASK_OTHERS, 0, 0, done, arg);

        return task == NULL ? KV_NO_MEMORY
                            : others_begun(task, kv_disk_write(queue->keys, space, writes, n,
                                                               others_done, task));
    }
    for (unsigned i = 0; i < n; i++) {
        if (writes[i].value != NULL &&
            writes[i].value_bytes + writes[i].tail_bytes > EXTENT_BYTES)
            return KV_TOO_LARGE;
        keys_bytes += writes[i].key_bytes;
    }
    struct task *task = task_create(base, TASK_WRITE, n, keys_bytes, done, arg);
    if (task == NULL)
        return KV_NO_MEMORY;
    char *keys = (char *)(task->places + n);
    for (unsigned i = 0; i < n; i++) {
        task->writes[i] = writes[i];
        task->writes[i].key = memcpy(keys, writes[i].key, writes[i].key_bytes);
        keys += writes[i].key_bytes;
    }
    return give(&disk->workers[WRITER], task);
}

static kv_status_t read_key(struct kv_disk_queue *base,
                            enum kv_disk_space space,
                            const void *key,
                            size_t key_bytes,
                            void *value,
                            size_t room,
                            kv_disk_done_fn done,
                            void *arg)
{
    struct extents_queue *queue = (struct extents_queue *)base;
    struct extents_disk *disk = (struct extents_disk *)base->disk;
    struct task *task;

    if (queue->n_under_way == KV_DISK_QUEUE_MAX)
        return KV_BUSY;
    task =
        task_create(base, space == KV_DISK_RECORDS ? TASK_OTHERS : TASK_READ, 0, 0, done, arg);
    if (task == NULL)
        return KV_NO_MEMORY;
    if (space == KV_DISK_RECORDS)
        return others_begun(task, kv_disk_read(queue->keys, space, key, key_bytes, value, room,
                                               others_done, task));
    const struct kv_id128 hash = kv_hash128(key, key_bytes);
    kv_lock_take(disk->lock);
    task->place = place_of(kv_map_get(disk->map, &hash));
    kv_lock_release(disk->lock);
    task->value = value;
    task->room = room;
    if (task->place.page != 0)
        return give(&disk->workers[(task->place.page - 1) / READ_SPAN % READERS], task);
    queue->n_under_way++;
    end(task, KV_NOT_FOUND);
    return KV_OK;
}

static kv_status_t sync_all(struct kv_disk_queue *base, kv_disk_done_fn done, void *arg)
{
    struct extents_disk *disk = (struct extents_disk *)base->disk;
    struct extents_queue *queue = (struct extents_queue *)base;
    struct task *task;

    if (queue->n_under_way == KV_DISK_QUEUE_MAX)
        return KV_BUSY;
    task = task_create(base, TASK_SYNC, 0, 0, done, arg);
    if (task == NULL)
        return KV_NO_MEMORY;
    kv_lock_take(disk->lock);
    task->freed = disk->freed;
    disk->freed = (struct kv_place_list){0};
    kv_lock_release(disk->lock);
    if (kv_ring_push(disk->workers[SYNCER].tasks, task)) {
        queue->n_under_way++;
        kv_signal_raise(disk->workers[SYNCER].signal);
        return KV_OK;
    }
    keep_freed(task);
    free(task->freed.list);
    free(task);
    return KV_BUSY;
}

struct scan {
    struct extents_disk *disk;
    uint8_t *buffer;
    kv_disk_each_fn each;
    void *arg;
    kv_status_t status;
};

/* Returns false if the record is none of a place that can be. */
static bool place_from(const void *record, size_t bytes, struct kv_place *ret_place)
{
    if (bytes != sizeof(*ret_place))
        return false;
    memcpy(ret_place, record, sizeof(*ret_place));
    return ret_place->page != 0 && ret_place->bytes <= EXTENT_BYTES;
}

static void
scan_one(void *arg, const void *key, size_t key_bytes, const void *record, size_t record_bytes)
{
    struct scan *scan = arg;
    struct kv_place place;

    if (scan->status != KV_OK || !place_from(record, record_bytes, &place))
        return;
    scan->status = read_pages(scan->disk, scan->buffer, place.page, place.bytes);
    if (scan->status == KV_OK)
        scan->each(scan->arg, key, key_bytes, scan->buffer, place.bytes);
}

static kv_status_t scan(struct kv_disk *base,
                        enum kv_disk_space space,
                        const void *prefix,
                        size_t prefix_bytes,
                        kv_disk_each_fn each,
                        void *arg)
{
    struct extents_disk *disk = (struct extents_disk *)base;
    struct scan of = {.disk = disk, .each = each, .arg = arg};
    kv_status_t status;

    if (space == KV_DISK_RECORDS)
        return kv_disk_scan(disk->keys, space, prefix, prefix_bytes, each, arg);
    of.buffer = aligned_alloc(PAGE, EXTENT_BYTES);
    if (of.buffer == NULL)
        return KV_NO_MEMORY;
    status = kv_disk_scan(disk->keys, space, prefix, prefix_bytes, scan_one, &of);
    free(of.buffer);
    return status != KV_OK ? status : of.status;
}

static void usage(const struct kv_disk *base, struct kv_disk_usage *ret_usage)
{
    const struct extents_disk *disk = (const struct extents_disk *)base;

    kv_disk_get_usage(disk->keys, ret_usage);
    kv_lock_take(disk->lock);
    ret_usage->bytes += kv_places_pages_used(disk->places) * PAGE;
    ret_usage->live_bytes += disk->live_bytes;
    kv_lock_release(disk->lock);
}

/* ---- open and close ----------------------------------------------------------------------- */

static void close_disk(struct kv_disk *base)
{
    struct extents_disk *disk = (struct extents_disk *)base;

    atomic_store(&disk->stopping, true);
    for (unsigned i = 0; i < WORKERS; i++) {
        if (disk->workers[i].thread != NULL)
            kv_signal_raise(disk->workers[i].signal);
        kv_thread_join(disk->workers[i].thread);
        kv_signal_destroy(disk->workers[i].signal);
        kv_ring_destroy(disk->workers[i].tasks);
        free(disk->workers[i].buffer);
    }
    if (disk->fd >= 0)
        close(disk->fd);
    kv_disk_close(disk->keys);
    kv_map_destroy(disk->map);
    kv_lock_destroy(disk->lock);
    kv_places_destroy(disk->places);
    free(disk->freed.list);
    free(disk);
}

static const struct kv_disk_ops extents_ops = {
    .name = "extents",
    .queue_open = queue_open,
    .queue_close = queue_close,
    .write = write_keys,
    .read = read_key,
    .sync = sync_all,
    .progress = progress,
    .scan = scan,
    .usage = usage,
    .close = close_disk,
};

struct loading {
    struct extents_disk *disk;
    uint64_t file_pages, n_bad;
    bool is_out_of_memory;
};

/* A key leads to a place in the file that no other has; else it is as if it were not there. */
static void
load_key(void *arg, const void *key, size_t key_bytes, const void *record, size_t record_bytes)
{
    struct loading *loading = arg;
    struct extents_disk *disk = loading->disk;
    const struct kv_id128 hash = kv_hash128(key, key_bytes);
    struct kv_place place;

    kv_status_t status = KV_INVALID;

    if (place_from(record, record_bytes, &place) &&
        place.page - 1 + (uint64_t)kv_place_pages(place.bytes) <= loading->file_pages)
        status = kv_place_claim(disk->places, place);
    if (status != KV_OK) {
        loading->n_bad++;
        loading->is_out_of_memory = loading->is_out_of_memory || status == KV_NO_MEMORY;
        return;
    }
    disk->live_bytes += place.bytes;
    if (!kv_map_set(disk->map, &hash, value_of(place)))
        loading->is_out_of_memory = true;
}

static kv_status_t load_keys(struct extents_disk *disk, char *detail, size_t detail_bytes)
{
    const off_t end = lseek(disk->fd, 0, SEEK_END);
    struct loading loading = {.disk = disk, .file_pages = (uint64_t)(end > 0 ? end : 0) / PAGE};
    kv_status_t status = kv_disk_scan(disk->keys, KV_DISK_ROWS, "", 0, load_key, &loading);

    kv_places_found(disk->places);
    if (loading.is_out_of_memory)
        status = KV_NO_MEMORY;
    if (status != KV_OK)
        snprintf(
            detail, detail_bytes,
            "disk: where rows are in the file cannot be read: %s: move the data directory "
            "away to start without what is saved, or give --disk none to leave it as it is",
            kv_status_name(status));
    if (loading.n_bad > 0)
        kv_log(KV_LOG_WARN,
               "disk: rows: the file has been cut or replaced: %llu values of it are lost",
               (unsigned long long)loading.n_bad);
    return status;
}

static kv_status_t
open_file(struct extents_disk *disk, const char *path, char *detail, size_t detail_bytes)
{
    disk->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600);
    /* Not every file system can. */
    if (disk->fd < 0 && errno == EINVAL)
        disk->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (disk->fd >= 0)
        return KV_OK;
    snprintf(detail, detail_bytes, "disk: %s: %s", path, strerror(errno));
    return KV_IO;
}

static kv_status_t start_workers(struct extents_disk *disk)
{
    for (unsigned i = 0; i < WORKERS; i++) {
        struct worker *worker = &disk->workers[i];
        kv_status_t status;

        worker->disk = disk;
        worker->tasks = kv_ring_create(RING_TASKS);
        worker->signal = kv_signal_create();
        worker->buffer = i == SYNCER ? NULL : aligned_alloc(PAGE, EXTENT_BYTES);
        if (worker->tasks == NULL || worker->signal == NULL ||
            (worker->buffer == NULL && i != SYNCER))
            return KV_NO_MEMORY;
        status = kv_thread_start(i == WRITER   ? "kv-rows-write"
                                 : i == SYNCER ? "kv-rows-sync"
                                               : "kv-rows-read",
                                 work, worker, &worker->thread);
        if (status != KV_OK)
            return status;
    }
    return KV_OK;
}

kv_status_t kv_disk_extents_open(const char *path,
                                 struct kv_disk *keys,
                                 struct kv_disk **ret_disk,
                                 char *detail,
                                 size_t detail_bytes)
{
    struct extents_disk *disk = calloc(1, sizeof(*disk));
    kv_status_t status = KV_NO_MEMORY;

    if (disk == NULL) {
        snprintf(detail, detail_bytes, "disk: out of memory");
        kv_disk_close(keys);
        return KV_NO_MEMORY;
    }
    disk->base.ops = &extents_ops;
    disk->keys = keys;
    disk->fd = -1;
    disk->lock = kv_lock_create();
    disk->map = kv_map_create(1); /* keys are hashes that nobody chooses */
    disk->places = kv_places_create();
    snprintf(detail, detail_bytes, "disk: out of memory");
    if (disk->lock != NULL && disk->map != NULL && disk->places != NULL)
        status = open_file(disk, path, detail, detail_bytes);
    if (status == KV_OK)
        status = load_keys(disk, detail, detail_bytes);
    if (status == KV_OK) {
        status = start_workers(disk);
        if (status != KV_OK)
            snprintf(detail, detail_bytes, "disk: cannot start %d threads", WORKERS);
    }
    if (status != KV_OK) {
        close_disk(&disk->base);
        return status;
    }
    *ret_disk = &disk->base;
    return KV_OK;
}
