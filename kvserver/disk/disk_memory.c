/* A disk in memory: a sorted array, which is enough for the few records that a node keeps.
 * Writes take effect at once and are reported later, so that tests see the time in between. */
#include "kvserver/disk/disk.h"

#include "kvserver/base/clock.h"

#include <stdlib.h>
#include <string.h>

struct record {
    size_t key_bytes, value_bytes;
    unsigned char *bytes; /* key, then value */
};

struct pending {
    struct pending *next;
    uint64_t ready_us;
    kv_disk_done_fn done;
    void *arg;
};

struct memory_disk {
    struct kv_disk base;
    const struct kv_clock *clock;
    uint64_t write_us;
    struct record *records; /* in key order */
    size_t n_records, room;
    struct pending *first, **last;
};

static int compare(const struct record *record, const void *key, size_t key_bytes)
{
    size_t common = record->key_bytes < key_bytes ? record->key_bytes : key_bytes;
    int order = memcmp(record->bytes, key, common);

    if (order != 0)
        return order;
    return record->key_bytes < key_bytes ? -1 : record->key_bytes > key_bytes;
}

/* Returns the index of the first record that is not before the key. */
static size_t lower_bound(const struct memory_disk *disk, const void *key, size_t key_bytes)
{
    size_t begin = 0, end = disk->n_records;

    while (begin < end) {
        size_t middle = begin + (end - begin) / 2;
        if (compare(&disk->records[middle], key, key_bytes) < 0)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

static kv_status_t put(struct kv_disk *base,
                       const void *key,
                       size_t key_bytes,
                       const void *value,
                       size_t value_bytes,
                       kv_disk_done_fn done,
                       void *arg)
{
    struct memory_disk *disk = (struct memory_disk *)base;
    size_t at = lower_bound(disk, key, key_bytes);
    struct pending *pending = malloc(sizeof(*pending));
    unsigned char *bytes = malloc(key_bytes + value_bytes + 1);

    if (pending == NULL || bytes == NULL)
        goto err_free;
    if (at == disk->n_records || compare(&disk->records[at], key, key_bytes) != 0) {
        if (disk->n_records == disk->room) {
            size_t room = disk->room > 0 ? 2 * disk->room : 16;
            struct record *records = realloc(disk->records, room * sizeof(*records));
            if (records == NULL)
                goto err_free;
            disk->records = records;
            disk->room = room;
        }
        memmove(&disk->records[at + 1], &disk->records[at],
                (disk->n_records - at) * sizeof(*disk->records));
        /* From here on nothing fails: an array with a hole would not be sorted. */
        disk->records[at].bytes = NULL;
        disk->n_records++;
    }
    memcpy(bytes, key, key_bytes);
    memcpy(bytes + key_bytes, value, value_bytes);
    free(disk->records[at].bytes);
    disk->records[at] = (struct record){key_bytes, value_bytes, bytes};
    *pending = (struct pending){NULL, kv_clock_now(disk->clock) + disk->write_us, done, arg};
    *disk->last = pending;
    disk->last = &pending->next;
    return KV_OK;

err_free:
    free(pending);
    free(bytes);
    return KV_NO_MEMORY;
}

static void remove_key(struct kv_disk *base, const void *key, size_t key_bytes)
{
    struct memory_disk *disk = (struct memory_disk *)base;
    size_t at = lower_bound(disk, key, key_bytes);

    if (at == disk->n_records || compare(&disk->records[at], key, key_bytes) != 0)
        return;
    free(disk->records[at].bytes);
    memmove(&disk->records[at], &disk->records[at + 1],
            (--disk->n_records - at) * sizeof(*disk->records));
}

static kv_status_t scan(struct kv_disk *base,
                        const void *prefix,
                        size_t prefix_bytes,
                        kv_disk_each_fn each,
                        void *arg)
{
    struct memory_disk *disk = (struct memory_disk *)base;

    for (size_t i = lower_bound(disk, prefix, prefix_bytes); i < disk->n_records; i++) {
        const struct record *record = &disk->records[i];
        if (record->key_bytes < prefix_bytes ||
            memcmp(record->bytes, prefix, prefix_bytes) != 0)
            break;
        each(arg, record->bytes, record->key_bytes, record->bytes + record->key_bytes,
             record->value_bytes);
    }
    return KV_OK;
}

static unsigned progress(struct kv_disk *base)
{
    struct memory_disk *disk = (struct memory_disk *)base;
    uint64_t now_us = kv_clock_now(disk->clock);
    unsigned n = 0;

    while (disk->first != NULL && disk->first->ready_us <= now_us) {
        struct pending *pending = disk->first;
        disk->first = pending->next;
        if (disk->first == NULL)
            disk->last = &disk->first;
        /* Unlinked before the call, which may start another write. */
        pending->done(pending->arg, KV_OK);
        free(pending);
        n++;
    }
    return n;
}

static void close_disk(struct kv_disk *base)
{
    struct memory_disk *disk = (struct memory_disk *)base;

    for (struct pending *pending = disk->first, *next; pending != NULL; pending = next) {
        next = pending->next;
        free(pending);
    }
    for (size_t i = 0; i < disk->n_records; i++)
        free(disk->records[i].bytes);
    free(disk->records);
    free(disk);
}

static const struct kv_disk_ops kv_disk_memory = {
    .name = "memory",
    .put = put,
    .remove = remove_key,
    .scan = scan,
    .progress = progress,
    .close = close_disk,
};

struct kv_disk *kv_disk_memory_open(const struct kv_clock *clock, uint64_t write_us)
{
    struct memory_disk *disk = calloc(1, sizeof(*disk));

    if (disk == NULL)
        return NULL;
    disk->base.ops = &kv_disk_memory;
    disk->clock = clock;
    disk->write_us = write_us;
    disk->last = &disk->first;
    return &disk->base;
}
