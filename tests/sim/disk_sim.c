#include "tests/sim/disk_sim.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/random.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* A key's value after a write. */
struct version {
    uint64_t write; /* its number */
    bool exists;
    size_t bytes;
    unsigned char *value;
};

struct record {
    size_t key_bytes;
    unsigned char *key;
    struct version *versions; /* (n) the newest last; the first one stays */
    uint32_t n;
};

struct space {
    struct record *records; /* (n) in key order */
    size_t n, room;
};

/* What has begun and has not been told. */
struct pending {
    struct pending *next;
    uint64_t ready_us;
    kv_disk_done_fn done;
    void *arg;
    kv_status_t status;
    size_t bytes;
    uint64_t number;  /* of the write; 0: it is none */
    uint64_t covers;  /* sync: versions up to this write stay, */
    uint64_t *except; /* (n_except) but for these, which had not been told; owned */
    unsigned n_except;
};

struct sim_queue;

struct sim_disk {
    struct kv_disk base;
    const struct kv_clock *clock;
    struct kv_random random;
    struct disk_sim_faults faults;
    struct disk_sim_counts counts;
    struct space spaces[KV_DISK_SPACES];
    struct sim_queue *queues;
    uint64_t n_writes; /* numbers begin at 1 */
    uint64_t bytes;
};

struct sim_queue {
    struct kv_disk_queue base;
    struct sim_queue *next;
    struct pending *first; /* in the order in which they are ready */
    uint64_t ordered_us;   /* when the last write is */
    unsigned n_pending;
};

static bool one_in(struct sim_disk *disk, uint32_t n)
{
    return n > 0 && kv_random_below(&disk->random, n) == 0;
}

static struct sim_disk *disk_of(struct kv_disk_queue *queue)
{
    return (struct sim_disk *)queue->disk;
}

/* ---- records ------------------------------------------------------------------------------ */

static int compare(const struct record *record, const void *key, size_t key_bytes)
{
    return kv_disk_key_compare(record->key, record->key_bytes, key, key_bytes);
}

/* Returns the index of the first record that is not before the key. */
static size_t lower_bound(const struct space *space, const void *key, size_t key_bytes)
{
    size_t begin = 0, end = space->n;

    while (begin < end) {
        const size_t middle = begin + (end - begin) / 2;

        if (compare(&space->records[middle], key, key_bytes) < 0)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

static struct record *find(const struct space *space, const void *key, size_t key_bytes)
{
    const size_t at = lower_bound(space, key, key_bytes);

    return at < space->n && compare(&space->records[at], key, key_bytes) == 0
               ? &space->records[at]
               : NULL;
}

static void *copy_of(const void *bytes, size_t n)
{
    void *copy = malloc(n > 0 ? n : 1);

    if (copy != NULL && n > 0)
        memcpy(copy, bytes, n);
    return copy;
}

/* Returns the key's record, which is made if there is none; NULL: no memory. */
static struct record *get_record(struct space *space, const void *key, size_t key_bytes)
{
    const size_t at = lower_bound(space, key, key_bytes);
    struct record *record = find(space, key, key_bytes);
    void *copy;

    if (record != NULL)
        return record;
    if (space->n == space->room) {
        const size_t room = space->room > 0 ? 2 * space->room : 64;
        struct record *records = realloc(space->records, room * sizeof(*records));

        if (records == NULL)
            return NULL;
        space->records = records;
        space->room = room;
    }
    copy = copy_of(key, key_bytes);
    if (copy == NULL)
        return NULL;
    record = &space->records[at];
    memmove(record + 1, record, (space->n++ - at) * sizeof(*record));
    *record = (struct record){.key_bytes = key_bytes, .key = copy};
    return record;
}

static bool add_version(struct sim_disk *disk,
                        struct record *record,
                        const struct kv_disk_write *write,
                        uint64_t number)
{
    struct version *versions = realloc(record->versions, (record->n + 1) * sizeof(versions[0]));
    struct version version = {.write = number, .exists = write->value != NULL};

    if (versions == NULL)
        return false;
    record->versions = versions;
    if (version.exists) {
        version.bytes = write->value_bytes + write->tail_bytes;
        version.value = malloc(version.bytes > 0 ? version.bytes : 1);
        if (version.value == NULL)
            return false;
        kv_disk_join(write, version.value);
    }
    record->versions[record->n++] = version;
    disk->bytes += version.bytes + record->key_bytes;
    return true;
}

/* Drops the versions before `begin`, and those from `end` on. */
static void
keep_versions(struct sim_disk *disk, struct record *record, uint32_t begin, uint32_t end)
{
    for (uint32_t i = 0; i < record->n; i++) {
        if (i >= begin && i < end)
            continue;
        disk->bytes -= record->versions[i].bytes + record->key_bytes;
        free(record->versions[i].value);
    }
    record->n = end - begin;
    memmove(record->versions, record->versions + begin,
            record->n * sizeof(record->versions[0]));
}

/* Frees the records of which nothing is left, or that do not exist and never come back. */
static void sweep(struct sim_disk *disk, struct space *space)
{
    size_t n = 0;

    for (size_t i = 0; i < space->n; i++) {
        struct record *record = &space->records[i];

        if (record->n == 1 && !record->versions[0].exists)
            keep_versions(disk, record, 0, 0);
        if (record->n > 0) {
            space->records[n++] = *record;
            continue;
        }
        free(record->key);
        free(record->versions);
    }
    space->n = n;
}

static bool covers(const struct pending *sync, uint64_t write)
{
    for (unsigned i = 0; i < sync->n_except; i++)
        if (sync->except[i] == write)
            return false;
    return write <= sync->covers;
}

/* The versions that the sync covers stay: those that they have replaced are not needed. */
static void make_last(struct sim_disk *disk, const struct pending *sync)
{
    for (unsigned at = 0; at < KV_DISK_SPACES; at++) {
        struct space *space = &disk->spaces[at];

        for (size_t i = 0; i < space->n; i++) {
            struct record *record = &space->records[i];
            uint32_t newest = 0;

            for (uint32_t v = 0; v < record->n; v++)
                if (covers(sync, record->versions[v].write)) {
                    record->versions[v].write = 0; /* it stays */
                    newest = v;
                }
            keep_versions(disk, record, newest, record->n);
        }
        sweep(disk, space);
    }
}

static const struct version *now(const struct record *record)
{
    const struct version *version =
        record != NULL && record->n > 0 ? &record->versions[record->n - 1] : NULL;

    return version != NULL && version->exists ? version : NULL;
}

/* ---- what is under way -------------------------------------------------------------------- */

static void pending_free(struct pending *pending)
{
    free(pending->except);
    free(pending);
}

static kv_status_t append(struct kv_disk_queue *base,
                          bool is_ordered,
                          kv_disk_done_fn done,
                          void *arg,
                          struct pending **ret_pending)
{
    struct sim_queue *queue = (struct sim_queue *)base;
    struct sim_disk *disk = disk_of(base);
    struct pending *pending, **link = &queue->first;

    if (queue->n_pending == KV_DISK_QUEUE_MAX)
        return KV_BUSY;
    pending = calloc(1, sizeof(*pending));
    if (pending == NULL)
        return KV_NO_MEMORY;
    pending->ready_us = kv_clock_now(disk->clock);
    if (disk->faults.write_us > 0)
        pending->ready_us += kv_random_below(&disk->random, disk->faults.write_us + 1);
    if (one_in(disk, disk->faults.stalls))
        pending->ready_us += kv_random_below(&disk->random, disk->faults.stall_us + 1);
    if (is_ordered && pending->ready_us < queue->ordered_us)
        pending->ready_us = queue->ordered_us;
    if (is_ordered)
        queue->ordered_us = pending->ready_us;
    pending->done = done;
    pending->arg = arg;
    while (*link != NULL && (*link)->ready_us <= pending->ready_us)
        link = &(*link)->next;
    pending->next = *link;
    *link = pending;
    queue->n_pending++;
    *ret_pending = pending;
    return KV_OK;
}

/* ---- the table ---------------------------------------------------------------------------- */

static kv_status_t queue_open(struct kv_disk *disk,
                              void (*wake)(void *arg),
                              void *arg,
                              struct kv_disk_queue **ret_queue)
{
    struct sim_queue *queue = calloc(1, sizeof(*queue));

    (void)wake;
    (void)arg;
    if (queue == NULL)
        return KV_NO_MEMORY;
    queue->base.disk = disk;
    queue->next = ((struct sim_disk *)disk)->queues;
    ((struct sim_disk *)disk)->queues = queue;
    *ret_queue = &queue->base;
    return KV_OK;
}

static void queue_close(struct kv_disk_queue *base)
{
    struct sim_queue *queue = (struct sim_queue *)base, **link = &disk_of(base)->queues;

    while (*link != queue)
        link = &(*link)->next;
    *link = queue->next;
    for (struct pending *pending = queue->first, *next; pending != NULL; pending = next) {
        next = pending->next;
        pending_free(pending);
    }
    free(queue);
}

/* Lists the writes that have not been told yet.  Returns false if there is no memory. */
static bool list_untold(const struct sim_disk *disk, struct pending *sync)
{
    unsigned room = 0;

    for (const struct sim_queue *queue = disk->queues; queue != NULL; queue = queue->next)
        room += queue->n_pending;
    sync->except = malloc(room * sizeof(sync->except[0])); /* one is the sync's own */
    if (sync->except == NULL)
        return false;
    for (const struct sim_queue *queue = disk->queues; queue != NULL; queue = queue->next)
        for (const struct pending *pending = queue->first; pending != NULL;
             pending = pending->next)
            if (pending->number > 0)
                sync->except[sync->n_except++] = pending->number;
    return true;
}

/* Undoes a write that has not got all its memory. */
static void drop_write(struct sim_disk *disk, struct space *space, uint64_t number)
{
    for (size_t i = 0; i < space->n; i++) {
        struct record *record = &space->records[i];

        if (record->n > 0 && record->versions[record->n - 1].write == number)
            keep_versions(disk, record, 0, record->n - 1);
    }
    sweep(disk, space);
}

static kv_status_t write_keys(struct kv_disk_queue *base,
                              enum kv_disk_space at,
                              const struct kv_disk_write *writes,
                              unsigned n,
                              kv_disk_done_fn done,
                              void *arg)
{
    struct sim_disk *disk = disk_of(base);
    struct space *space = &disk->spaces[at];
    struct pending *pending;
    uint64_t bytes = 0;
    kv_status_t status = append(base, true, done, arg, &pending);

    if (status != KV_OK)
        return status;
    disk->counts.n_writes++;
    for (unsigned i = 0; i < n; i++)
        bytes += writes[i].value != NULL
                     ? writes[i].key_bytes + writes[i].value_bytes + writes[i].tail_bytes
                     : 0;
    if (disk->faults.bytes_max > 0 && bytes > 0 &&
        disk->bytes + bytes > disk->faults.bytes_max) {
        disk->counts.n_full++;
        pending->status = KV_NO_MEMORY;
        return KV_OK;
    }
    if (one_in(disk, disk->faults.fails)) {
        disk->counts.n_failed++;
        pending->status = KV_IO;
        if (kv_random_below(&disk->random, 2) == 0)
            return KV_OK;
    }
    pending->number = ++disk->n_writes;
    for (unsigned i = 0; i < n; i++) {
        struct record *record = get_record(space, writes[i].key, writes[i].key_bytes);

        if (record != NULL && add_version(disk, record, &writes[i], disk->n_writes))
            continue;
        drop_write(disk, space, disk->n_writes);
        pending->status = KV_NO_MEMORY;
        break;
    }
    return KV_OK;
}

static void rot(struct sim_disk *disk, const struct version *version)
{
    const size_t bit = (size_t)kv_random_below(&disk->random, version->bytes * 8);

    version->value[bit / 8] ^= (unsigned char)(1 << bit % 8);
    disk->counts.n_rotten++;
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
    struct sim_disk *disk = disk_of(base);
    const struct version *version = now(find(&disk->spaces[at], key, key_bytes));
    struct pending *pending;
    const kv_status_t status = append(base, false, done, arg, &pending);

    if (status != KV_OK)
        return status;
    if (version == NULL) {
        pending->status = KV_NOT_FOUND;
        return KV_OK;
    }
    if (at == KV_DISK_ROWS && one_in(disk, disk->faults.unread)) {
        disk->counts.n_unread++;
        pending->status = KV_IO;
        return KV_OK;
    }
    if (at == KV_DISK_ROWS && version->bytes > 0 && one_in(disk, disk->faults.rots))
        rot(disk, version);
    pending->bytes = version->bytes;
    if (room > version->bytes)
        room = version->bytes;
    if (room > 0)
        memcpy(value, version->value, room);
    return KV_OK;
}

static kv_status_t sync_all(struct kv_disk_queue *base, kv_disk_done_fn done, void *arg)
{
    struct sim_disk *disk = disk_of(base);
    struct pending *pending;
    const kv_status_t status = append(base, false, done, arg, &pending);

    if (status != KV_OK)
        return status;
    disk->counts.n_syncs++;
    if (one_in(disk, disk->faults.fails)) {
        disk->counts.n_failed++;
        pending->status = KV_IO;
    } else if (list_untold(disk, pending)) {
        pending->covers = disk->n_writes;
    } else {
        pending->status = KV_NO_MEMORY;
    }
    return KV_OK;
}

static unsigned progress(struct kv_disk_queue *base)
{
    struct sim_queue *queue = (struct sim_queue *)base;
    struct sim_disk *disk = disk_of(base);
    const uint64_t now_us = kv_clock_now(disk->clock);
    const unsigned n_before = queue->n_pending;
    unsigned n = 0;

    /* What the callbacks start is for a later call. */
    while (n < n_before && queue->first != NULL && queue->first->ready_us <= now_us) {
        struct pending *pending = queue->first;

        queue->first = pending->next;
        queue->n_pending--;
        if (pending->covers > 0)
            make_last(disk, pending);
        if (pending->done != NULL)
            pending->done(pending->arg, pending->status, pending->bytes);
        pending_free(pending);
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
    const struct space *space = &((const struct sim_disk *)base)->spaces[at];

    for (size_t i = lower_bound(space, prefix, prefix_bytes); i < space->n; i++) {
        const struct record *record = &space->records[i];
        const struct version *version = now(record);

        if (record->key_bytes < prefix_bytes || memcmp(record->key, prefix, prefix_bytes) != 0)
            break;
        if (version != NULL)
            each(arg, record->key, record->key_bytes, version->value, version->bytes);
    }
    return KV_OK;
}

static void usage(const struct kv_disk *base, struct kv_disk_usage *ret_usage)
{
    const struct sim_disk *disk = (const struct sim_disk *)base;

    *ret_usage = (struct kv_disk_usage){.bytes = disk->bytes};
    for (unsigned at = 0; at < KV_DISK_SPACES; at++)
        for (size_t i = 0; i < disk->spaces[at].n; i++) {
            const struct version *version = now(&disk->spaces[at].records[i]);

            if (version != NULL)
                ret_usage->live_bytes += version->bytes + disk->spaces[at].records[i].key_bytes;
        }
}

static void close_disk(struct kv_disk *base)
{
    struct sim_disk *disk = (struct sim_disk *)base;

    for (unsigned at = 0; at < KV_DISK_SPACES; at++) {
        struct space *space = &disk->spaces[at];

        for (size_t i = 0; i < space->n; i++)
            keep_versions(disk, &space->records[i], 0, 0);
        sweep(disk, space);
        free(space->records);
    }
    assert(disk->bytes == 0);
    free(disk);
}

static const struct kv_disk_ops disk_sim_ops = {
    .name = "simulated",
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

struct kv_disk *disk_sim_open(const struct kv_clock *clock, uint64_t seed)
{
    struct sim_disk *disk = calloc(1, sizeof(*disk));

    if (disk == NULL)
        return NULL;
    disk->base.ops = &disk_sim_ops;
    disk->clock = clock;
    kv_random_init(&disk->random, seed);
    return &disk->base;
}

void disk_sim_set_faults(struct kv_disk *base, const struct disk_sim_faults *faults)
{
    ((struct sim_disk *)base)->faults = *faults;
}

void disk_sim_get_counts(const struct kv_disk *base, struct disk_sim_counts *ret_counts)
{
    *ret_counts = ((const struct sim_disk *)base)->counts;
}

/* ---- crashes ------------------------------------------------------------------------------ */

/* Whether a write of rows has reached the medium by itself: all its keys have the same answer. */
static bool reached(uint64_t salt, uint64_t write)
{
    return kv_mix64(salt ^ write) & 1;
}

/* Some pages of it have not reached the medium, or all have. */
static void tear(struct sim_disk *disk, const struct version *version)
{
    uint64_t left = 0; /* a bit for each of 64 pages */
    bool is_torn = false;

    if (kv_random_below(&disk->random, 2) == 0)
        return;
    for (size_t at = 0, page = 0; at < version->bytes; at += KV_DISK_PAGE, page++) {
        const size_t end =
            at + KV_DISK_PAGE < version->bytes ? at + KV_DISK_PAGE : version->bytes;

        if (page % 64 == 0)
            left = kv_random_next(&disk->random);
        if ((left >> page % 64 & 1) != 0)
            continue;
        memset(version->value + at, 0, end - at);
        is_torn = true;
    }
    disk->counts.n_torn += is_torn;
}

void disk_sim_crash(struct kv_disk *base, bool power_fails)
{
    struct sim_disk *disk = (struct sim_disk *)base;
    const uint64_t salt = kv_random_next(&disk->random);
    const uint64_t end =
        power_fails ? kv_random_below(&disk->random, disk->n_writes + 1) : disk->n_writes;

    disk->counts.n_crashes++;
    for (unsigned at = 0; at < KV_DISK_SPACES; at++) {
        struct space *space = &disk->spaces[at];

        for (size_t i = 0; i < space->n; i++) {
            struct record *record = &space->records[i];
            uint32_t n = 0;

            for (uint32_t v = 0; v < record->n; v++) {
                struct version *version = &record->versions[v];

                if (version->write == 0 || (at == KV_DISK_ROWS ? reached(salt, version->write)
                                                               : version->write <= end)) {
                    struct version kept = *version;

                    if (kept.write > 0 && at == KV_DISK_ROWS && power_fails)
                        tear(disk, &kept);
                    kept.write = 0;
                    *version = record->versions[n];
                    record->versions[n++] = kept;
                } else {
                    disk->counts.n_lost++;
                }
            }
            /* The last of those that are kept is what is there. */
            keep_versions(disk, record, n > 0 ? n - 1 : 0, n);
        }
        sweep(disk, space);
    }
}
