/* A disk in memory: a sorted array for each space, which is enough for the few records that a node
 * keeps.  Writes take effect at once and are reported later, so that tests see the time in
 * between. */
#include "kvserver/disk/disk.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/thread.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct record {
    size_t key_bytes, value_bytes;
    unsigned char *bytes; /* key, then value */
};

struct space {
    struct record *records; /* in key order */
    size_t n_records, room;
};

struct pending {
    struct pending *next;
    uint64_t ready_us;
    kv_disk_done_fn done;
    void *arg;
    kv_status_t status;
    size_t bytes;
};

struct memory_disk {
    struct kv_disk base;
    const struct kv_clock *clock;
    uint64_t write_us;
    struct kv_lock *lock; /* of the spaces: each queue may be another thread's */
    struct space spaces[KV_DISK_SPACES];
};

struct memory_queue {
    struct kv_disk_queue base;
    struct pending *first, **last;
    unsigned n_pending;
};

/* ---- records ------------------------------------------------------------------------------ */

static int compare(const struct record *record, const void *key, size_t key_bytes)
{
    return kv_disk_key_compare(record->bytes, record->key_bytes, key, key_bytes);
}

/* Returns the index of the first record that is not before the key. */
static size_t lower_bound(const struct space *space, const void *key, size_t key_bytes)
{
    size_t begin = 0, end = space->n_records;

    while (begin < end) {
        size_t middle = begin + (end - begin) / 2;
        if (compare(&space->records[middle], key, key_bytes) < 0)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

/* Returns the key's record, or NULL; *ret_at is where it is or would be. */
static struct record *
find(const struct space *space, const void *key, size_t key_bytes, size_t *ret_at)
{
    size_t at = lower_bound(space, key, key_bytes);

    *ret_at = at;
    if (at == space->n_records || compare(&space->records[at], key, key_bytes) != 0)
        return NULL;
    return &space->records[at];
}

static void remove_record(struct space *space, const struct kv_disk_write *write)
{
    size_t at;
    struct record *record = find(space, write->key, write->key_bytes, &at);

    if (record == NULL)
        return;
    free(record->bytes);
    memmove(record, record + 1, (--space->n_records - at) * sizeof(*record));
}

/* There is room for one more.  `bytes` is the record's. */
static void put_record(struct space *space, const struct kv_disk_write *write, void *bytes)
{
    size_t at;
    struct record *record = find(space, write->key, write->key_bytes, &at);

    if (record == NULL) {
        record = &space->records[at];
        memmove(record + 1, record, (space->n_records - at) * sizeof(*record));
        space->n_records++;
    } else {
        free(record->bytes);
    }
    memcpy(bytes, write->key, write->key_bytes);
    kv_disk_join(write, (unsigned char *)bytes + write->key_bytes);
    *record = (struct record){write->key_bytes, write->value_bytes + write->tail_bytes, bytes};
}

static bool make_room(struct space *space, unsigned n)
{
    size_t room = space->room > 0 ? space->room : 16;
    struct record *records;

    while (room < space->n_records + n)
        room *= 2;
    if (room == space->room)
        return true;
    records = realloc(space->records, room * sizeof(*records));
    if (records == NULL)
        return false;
    space->records = records;
    space->room = room;
    return true;
}

/* ---- the table ---------------------------------------------------------------------------- */

static kv_status_t queue_open(struct kv_disk *disk,
                              void (*wake)(void *arg),
                              void *arg,
                              struct kv_disk_queue **ret_queue)
{
    struct memory_queue *queue = calloc(1, sizeof(*queue));

    /* Time passes by itself: who sleeps looks again. */
    (void)wake;
    (void)arg;
    if (queue == NULL)
        return KV_NO_MEMORY;
    queue->base.disk = disk;
    queue->last = &queue->first;
    *ret_queue = &queue->base;
    return KV_OK;
}

static void queue_close(struct kv_disk_queue *base)
{
    struct memory_queue *queue = (struct memory_queue *)base;

    for (struct pending *pending = queue->first, *next; pending != NULL; pending = next) {
        next = pending->next;
        free(pending);
    }
    free(queue);
}

/* Appends what has been done.  Returns NULL if there is too much, or no memory. */
static struct pending *
append(struct memory_queue *queue, kv_disk_done_fn done, void *arg, kv_status_t *ret_status)
{
    const struct memory_disk *disk = (const struct memory_disk *)queue->base.disk;
    struct pending *pending = NULL;

    *ret_status = KV_BUSY;
    if (queue->n_pending == KV_DISK_QUEUE_MAX)
        return NULL;
    pending = malloc(sizeof(*pending));
    *ret_status = pending != NULL ? KV_OK : KV_NO_MEMORY;
    if (pending == NULL)
        return NULL;
    *pending = (struct pending){
        .ready_us = kv_clock_now(disk->clock) + disk->write_us, .done = done, .arg = arg};
    *queue->last = pending;
    queue->last = &pending->next;
    queue->n_pending++;
    return pending;
}

static kv_status_t write_keys(struct kv_disk_queue *base,
                              enum kv_disk_space at,
                              const struct kv_disk_write *writes,
                              unsigned n,
                              kv_disk_done_fn done,
                              void *arg)
{
    struct memory_queue *queue = (struct memory_queue *)base;
    struct space *space = &((struct memory_disk *)base->disk)->spaces[at];
    struct kv_lock *lock = ((struct memory_disk *)base->disk)->lock;
    void **bytes = calloc(n, sizeof(*bytes));
    kv_status_t status = KV_NO_MEMORY;
    unsigned i = 0;

    kv_lock_take(lock);
    if (bytes != NULL && make_room(space, n))
        for (; i < n; i++) {
            bytes[i] =
                malloc(writes[i].key_bytes + writes[i].value_bytes + writes[i].tail_bytes);
            if (bytes[i] == NULL)
                break;
        }
    if (i == n)
        (void)append(queue, done, arg, &status);
    if (status != KV_OK) {
        kv_lock_release(lock);
        while (i > 0)
            free(bytes[--i]);
        free(bytes);
        return status;
    }
    for (i = 0; i < n; i++) {
        if (writes[i].value != NULL) {
            put_record(space, &writes[i], bytes[i]);
        } else {
            remove_record(space, &writes[i]);
            free(bytes[i]);
        }
    }
    kv_lock_release(lock);
    free(bytes);
    return KV_OK;
}

static kv_status_t read_key(struct kv_disk_queue *base,
                            enum kv_disk_space at,
                            const void *key,
                            size_t key_bytes,
                            void *value,
                            size_t room,
                            kv_disk_done_fn done,
                            void *arg)
{
    struct memory_disk *disk = (struct memory_disk *)base->disk;
    kv_status_t status;
    struct pending *pending = append((struct memory_queue *)base, done, arg, &status);
    size_t place;

    if (pending == NULL)
        return status;
    kv_lock_take(disk->lock);
    const struct record *record = find(&disk->spaces[at], key, key_bytes, &place);
    if (record == NULL) {
        pending->status = KV_NOT_FOUND;
    } else {
        pending->bytes = record->value_bytes;
        if (room > record->value_bytes)
            room = record->value_bytes;
        if (room > 0)
            memcpy(value, record->bytes + record->key_bytes, room);
    }
    kv_lock_release(disk->lock);
    return KV_OK;
}

static kv_status_t sync_all(struct kv_disk_queue *base, kv_disk_done_fn done, void *arg)
{
    kv_status_t status;

    (void)append((struct memory_queue *)base, done, arg, &status);
    return status;
}

static unsigned progress(struct kv_disk_queue *base)
{
    struct memory_queue *queue = (struct memory_queue *)base;
    uint64_t now_us = kv_clock_now(((const struct memory_disk *)base->disk)->clock);
    const unsigned n_before = queue->n_pending;
    unsigned n = 0;

    /* What the callbacks start is for a later call. */
    while (n < n_before && queue->first != NULL && queue->first->ready_us <= now_us) {
        struct pending *pending = queue->first;
        queue->first = pending->next;
        if (queue->first == NULL)
            queue->last = &queue->first;
        queue->n_pending--;
        /* Unlinked before the call, which may start something else. */
        if (pending->done != NULL)
            pending->done(pending->arg, pending->status, pending->bytes);
        free(pending);
        n++;
    }
    return n;
}

static kv_status_t scan(struct kv_disk *base,
                        enum kv_disk_space at,
                        const void *prefix,
                        size_t prefix_bytes,
                        kv_disk_each_fn each,
                        void *arg)
{
    const struct space *space = &((const struct memory_disk *)base)->spaces[at];

    for (size_t i = lower_bound(space, prefix, prefix_bytes); i < space->n_records; i++) {
        const struct record *record = &space->records[i];
        if (record->key_bytes < prefix_bytes ||
            memcmp(record->bytes, prefix, prefix_bytes) != 0)
            break;
        each(arg, record->bytes, record->key_bytes, record->bytes + record->key_bytes,
             record->value_bytes);
    }
    return KV_OK;
}

/* What is in memory is on no medium. */
static void usage(const struct kv_disk *disk, struct kv_disk_usage *ret_usage)
{
    (void)disk;
    *ret_usage = (struct kv_disk_usage){0};
}

static void close_disk(struct kv_disk *base)
{
    struct memory_disk *disk = (struct memory_disk *)base;

    for (unsigned at = 0; at < KV_DISK_SPACES; at++) {
        struct space *space = &disk->spaces[at];

        for (size_t i = 0; i < space->n_records; i++)
            free(space->records[i].bytes);
        free(space->records);
    }
    kv_lock_destroy(disk->lock);
    free(disk);
}

static const struct kv_disk_ops kv_disk_memory = {
    .name = "memory",
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

struct kv_disk *kv_disk_memory_open(const struct kv_clock *clock, uint64_t write_us)
{
    struct memory_disk *disk = calloc(1, sizeof(*disk));

    if (disk == NULL)
        return NULL;
    disk->lock = kv_lock_create();
    if (disk->lock == NULL) {
        free(disk);
        return NULL;
    }
    disk->base.ops = &kv_disk_memory;
    disk->clock = clock;
    disk->write_us = write_us;
    return &disk->base;
}
