/* load_disk.c - what a disk does with the rows of sessions that come and go for hours.
 *
 * Sessions are written through a quota: key after key in the order that a session has, values of
 * 8 to 64 KB, one size a session, a block of 32 units at a time.  When the quota is full, one of
 * the older half of the sessions is deleted, key by key.  Meanwhile a key at random of those that
 * live is read, one at a time, and compared.  After each 64 MiB comes a sync, as a node does it.
 *
 *   disk.LAYOUT.put     GB/s of values; limit: O_DIRECT writes of 1 MB, four at once
 *   disk.LAYOUT.stall   seconds: the longest wait for any of the writes under way
 *   disk.LAYOUT.get     microseconds of a read meanwhile
 *   disk.LAYOUT.times   bytes that the process had written for each byte of values
 *   disk.LAYOUT.space   the most bytes in the folder for each byte that lived
 *   disk.LAYOUT.lost    share of the reads of rows that live and are not there: a layout that drops
 *                       the oldest rows by itself loses some
 *
 * LAYOUT is one of RocksDB's (kvserver/disk/disk.h).
 */
#define _GNU_SOURCE
#include "tests/bench/bench.h"

#include "kvserver/base/random.h"
#include "kvserver/base/thread.h"
#include "kvserver/disk/disk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum {
    UNITS = 32,
    SESSION_BLOCKS = 64,
    VALUE_STEP = 8 << 10,
    VALUE_MAX = 64 << 10,
    WINDOW = 4, /* blocks under way */
    SESSIONS_MAX = 1 << 16,
    LOOK_BLOCKS = 256,      /* written between two looks at the folder */
    ROOM_TIMES = 4,         /* of the quota, for what is written and not compacted yet; */
    ROOM_TIMES_EXTENTS = 2, /* where nothing is */
    SYNC_BYTES = 64 << 20,
};

/* ---- sessions ----------------------------------------------------------------------------- */

struct session {
    uint64_t id;
    uint32_t value_bytes;
    uint32_t n_blocks; /* written */
};

struct key {
    uint8_t bytes[sizeof(uint64_t) + sizeof(uint32_t)];
};

/* In the order of the session's blocks and units. */
static struct key key_of(const struct session *session, uint32_t block, uint32_t unit)
{
    const uint32_t at = __builtin_bswap32(block * UNITS + unit);
    struct key key;

    memcpy(key.bytes, &session->id, sizeof(session->id));
    memcpy(key.bytes + sizeof(session->id), &at, sizeof(at));
    return key;
}

struct slot {
    struct run *run;
    uint8_t *values; /* (UNITS, VALUE_MAX) */
    double begin;
    bool is_busy;
};

struct run {
    struct bench *bench;
    struct kv_disk *disk;
    struct kv_disk_queue *queue;
    struct kv_random random;
    char folder[PATH_MAX];
    uint64_t total, quota; /* bytes of values */
    uint64_t written, live;
    uint64_t n_syncs;
    uint64_t room_times;
    struct session *sessions; /* (n_sessions) the oldest first; the last one is being written */
    uint32_t n_sessions;
    struct slot slots[WINDOW];
    double longest;
    uint64_t space; /* the most bytes in the folder for a byte that lived, in thousandths */
    bool failed;

    /* The read under way. */
    bool reads;
    double read_begin;
    struct key read_key;
    uint64_t read_id; /* of its session */
    uint8_t *read_value;
    struct bench_watch watch;
    uint64_t n_reads, n_lost;
};

/* Values begin with their keys, and the rest is random. */
static void make_values(struct run *run,
                        struct slot *slot,
                        const struct session *session,
                        uint32_t block,
                        struct kv_disk_write writes[UNITS],
                        struct key keys[UNITS])
{
    for (uint32_t unit = 0; unit < UNITS; unit++) {
        uint8_t *value = slot->values + (size_t)unit * VALUE_MAX;
        const uint64_t noise = kv_random_next(&run->random);

        keys[unit] = key_of(session, block, unit);
        memcpy(value, keys[unit].bytes, sizeof(keys[unit]));
        /* Else the same bytes again and again. */
        for (size_t at = 64; at + sizeof(noise) <= session->value_bytes; at += 4096)
            memcpy(value + at, &noise, sizeof(noise));
        writes[unit] = (struct kv_disk_write){.key = &keys[unit],
                                              .key_bytes = sizeof(keys[unit]),
                                              .value = value,
                                              .value_bytes = session->value_bytes};
    }
}

static void put_done(void *arg, kv_status_t status, size_t bytes)
{
    struct slot *slot = arg;
    struct run *run = slot->run;
    const double seconds = bench_now() - slot->begin;

    (void)bytes;
    slot->is_busy = false;
    if (seconds > run->longest)
        run->longest = seconds;
    if (status != KV_OK) {
        bench_complain("disk: write: %s", kv_status_name(status));
        run->failed = true;
    }
}

static bool session_begin(struct run *run)
{
    if (run->n_sessions == SESSIONS_MAX) {
        bench_complain("disk: more than %d sessions at once", SESSIONS_MAX);
        return false;
    }
    run->sessions[run->n_sessions++] = (struct session){
        .id = kv_random_next(&run->random),
        .value_bytes = (uint32_t)(VALUE_STEP *
                                  (1 + kv_random_below(&run->random, VALUE_MAX / VALUE_STEP))),
    };
    return true;
}

/* A write or a sync that nobody waits for. */
static void settled(void *arg, kv_status_t status, size_t bytes)
{
    struct run *run = arg;

    (void)bytes;
    if (status == KV_OK)
        return;
    bench_complain("disk: delete or sync: %s", kv_status_name(status));
    run->failed = true;
}

/* Deletes one of the older half. */
static void session_delete(struct run *run)
{
    const uint32_t at = (uint32_t)kv_random_below(&run->random, run->n_sessions / 2);
    const struct session session = run->sessions[at];
    struct kv_disk_write writes[UNITS];
    struct key keys[UNITS];

    memmove(&run->sessions[at], &run->sessions[at + 1],
            (--run->n_sessions - at) * sizeof(run->sessions[0]));
    run->live -= (uint64_t)session.n_blocks * UNITS * session.value_bytes;
    for (uint32_t block = 0; block < session.n_blocks && !run->failed; block++) {
        kv_status_t status;

        for (uint32_t unit = 0; unit < UNITS; unit++) {
            keys[unit] = key_of(&session, block, unit);
            writes[unit] =
                (struct kv_disk_write){.key = &keys[unit], .key_bytes = sizeof(keys[unit])};
        }
        while ((status = kv_disk_write(run->queue, KV_DISK_ROWS, writes, UNITS, settled,
                                       run)) == KV_BUSY)
            if (kv_disk_progress(run->queue) == 0)
                kv_relax();
        if (status != KV_OK)
            settled(run, status, 0);
    }
}

static bool put_block(struct run *run, struct slot *slot)
{
    struct kv_disk_write writes[UNITS];
    struct key keys[UNITS];
    struct session *session;
    kv_status_t status;

    if (run->n_sessions == 0 || run->sessions[run->n_sessions - 1].n_blocks == SESSION_BLOCKS) {
        while (run->n_sessions > 2 && run->live >= run->quota)
            session_delete(run);
        if (!session_begin(run))
            return false;
    }
    session = &run->sessions[run->n_sessions - 1];
    make_values(run, slot, session, session->n_blocks, writes, keys);
    slot->begin = bench_now();
    status = kv_disk_write(run->queue, KV_DISK_ROWS, writes, UNITS, put_done, slot);
    if (status == KV_BUSY)
        return true;
    if (status != KV_OK) {
        bench_complain("disk: write: %s", kv_status_name(status));
        return false;
    }
    slot->is_busy = true;
    session->n_blocks++;
    run->written += (uint64_t)UNITS * session->value_bytes;
    if (run->written / SYNC_BYTES > run->n_syncs) {
        run->n_syncs++;
        status = kv_disk_sync(run->queue, settled, run);
        if (status != KV_OK && status != KV_BUSY)
            settled(run, status, 0);
    }
    run->live += (uint64_t)UNITS * session->value_bytes;
    return true;
}

static void read_done(void *arg, kv_status_t status, size_t bytes)
{
    struct run *run = arg;

    (void)bytes;
    run->reads = false;
    bench_watch_add(&run->watch, bench_now() - run->read_begin);
    run->n_reads++;
    if (status == KV_OK &&
        memcmp(run->read_value, run->read_key.bytes, sizeof(run->read_key)) == 0)
        return;
    for (uint32_t i = 0; i < run->n_sessions; i++)
        if (status == KV_NOT_FOUND && run->sessions[i].id == run->read_id)
            run->n_lost++;
    if (status != KV_NOT_FOUND) {
        bench_complain("disk: read: %s",
                       status == KV_OK ? "wrong bytes" : kv_status_name(status));
        run->failed = true;
    }
}

/* Reads a key of a session that is complete, and whose writes are done. */
static void read_one(struct run *run)
{
    if (run->reads || run->n_sessions < 3)
        return;
    const struct session *session =
        &run->sessions[kv_random_below(&run->random, run->n_sessions - 2)];

    run->read_id = session->id;
    run->read_key = key_of(session, (uint32_t)kv_random_below(&run->random, SESSION_BLOCKS),
                           (uint32_t)kv_random_below(&run->random, UNITS));
    run->read_begin = bench_now();
    run->reads = kv_disk_read(run->queue, KV_DISK_ROWS, &run->read_key, sizeof(run->read_key),
                              run->read_value, VALUE_MAX, read_done, run) == KV_OK;
}

/* Bytes that the system has given to the files of the folder. */
static uint64_t folder_bytes(const char *path)
{
    DIR *folder = opendir(path);
    struct dirent *entry;
    struct stat found;
    uint64_t bytes = 0;

    if (folder == NULL)
        return 0;
    while ((entry = readdir(folder)) != NULL)
        if (fstatat(dirfd(folder), entry->d_name, &found, 0) == 0 && S_ISREG(found.st_mode))
            bytes += (uint64_t)found.st_blocks * 512;
    closedir(folder);
    return bytes;
}

/* Whether the disk has room for a layout that compacts late. */
static bool has_room(const struct run *run)
{
    const uint64_t wanted = run->room_times * run->quota;
    struct statvfs found;

    if (statvfs(run->bench->folder, &found) != 0) {
        bench_complain("disk: %s: %s", run->bench->folder, strerror(errno));
        return false;
    }
    const uint64_t there = (uint64_t)found.f_bavail * found.f_frsize;
    if (there >= wanted)
        return true;
    bench_complain(
        "disk: %s: %.1f GB free, %.1f needed; TMPDIR names another folder, and --quick "
        "takes a tenth",
        run->bench->folder, (double)there / 1e9, (double)wanted / 1e9);
    return false;
}

static void show_progress(const struct run *run)
{
    if (isatty(STDERR_FILENO))
        fprintf(stderr, "\r%s: %.1f of %.1f GB\033[K", strrchr(run->folder, '/') + 1,
                (double)run->written / 1e9, (double)run->total / 1e9);
}

static void look_at_space(struct run *run)
{
    const uint64_t space = folder_bytes(run->folder) * 1000 / (run->live > 0 ? run->live : 1);

    /* Before, the folder has what little there is, and its buffers. */
    if (run->live >= run->quota * 9 / 10 && space > run->space)
        run->space = space;
}

/* Bytes that this process has had written to disks. */
static uint64_t bytes_written(void)
{
    FILE *file = fopen("/proc/self/io", "r");
    char line[128];
    unsigned long long bytes = 0;

    if (file == NULL)
        return 0;
    while (fgets(line, sizeof(line), file) != NULL)
        if (sscanf(line, "write_bytes: %llu", &bytes) == 1)
            break;
    fclose(file);
    return bytes;
}

static bool write_all(struct run *run)
{
    unsigned n_looked = 0;

    while (run->written < run->total && !run->failed) {
        for (unsigned i = 0; i < WINDOW; i++)
            if (!run->slots[i].is_busy) {
                if (!put_block(run, &run->slots[i]))
                    return false;
                if (++n_looked % LOOK_BLOCKS == 0) {
                    look_at_space(run);
                    show_progress(run);
                }
            }
        read_one(run);
        if (kv_disk_progress(run->queue) == 0)
            kv_relax();
    }
    if (isatty(STDERR_FILENO))
        fprintf(stderr, "\r\033[K");
    return !run->failed;
}

static void synced(void *arg, kv_status_t status, size_t bytes)
{
    (void)bytes;
    *(kv_status_t *)arg = status;
}

static bool sync_all(struct run *run)
{
    kv_status_t status = KV_IN_PROGRESS;

    if (kv_disk_sync(run->queue, synced, &status) != KV_OK)
        return false;
    while (status == KV_IN_PROGRESS || run->reads)
        if (kv_disk_progress(run->queue) == 0)
            kv_sleep_fds(NULL, 0, 1000);
    return status == KV_OK && !run->failed;
}

static void report(const struct run *run,
                   const char *layout,
                   const char *what,
                   const char *unit,
                   double value,
                   double p99,
                   double limit)
{
    char name[64];

    snprintf(name, sizeof(name), "disk.%s.%s", layout, what);
    bench_report(run->bench, &(struct bench_figure){.name = name,
                                                    .unit = unit,
                                                    .value = value,
                                                    .p99 = p99,
                                                    .limit_name = limit > 0 ? "raw disk" : NULL,
                                                    .limit = limit,
                                                    .ratio = limit > 0 ? value / limit : 0});
}

static bool measure(struct run *run, const char *layout)
{
    struct bench_sample sample = {0};
    double raw;

    if (!bench_raw_disk(run->bench, run->total / 15, false, &raw))
        return false;
    const uint64_t before = bytes_written();
    const double begin = bench_now();
    if (!write_all(run) || !sync_all(run))
        return false;
    const double seconds = bench_now() - begin;
    const double n_written = (double)(bytes_written() - before);
    bench_watch_times(&run->watch, &sample);
    report(run, layout, "put", "GB/s", (double)run->written / seconds / 1e9, 0, raw);
    report(run, layout, "stall", "s", run->longest, 0, 0);
    report(run, layout, "get", "us", sample.value, sample.p99, 0);
    report(run, layout, "times", "x", n_written / (double)run->written, 0, 0);
    report(run, layout, "space", "x", (double)run->space / 1000, 0, 0);
    report(run, layout, "lost", "%",
           run->n_reads > 0 ? 100.0 * (double)run->n_lost / (double)run->n_reads : 0, 0, 0);
    return true;
}

/* Extents: the keys are RocksDB's, the rows in a file in its folder. */
static kv_status_t open_layout(const struct kv_disk_rocksdb_options *options,
                               bool is_extents,
                               struct kv_disk **ret_disk,
                               char *detail,
                               size_t detail_bytes)
{
    struct kv_disk *keys;
    char path[512];
    kv_status_t status = kv_disk_rocksdb_open(options, &keys, detail, detail_bytes);

    if (status != KV_OK || !is_extents) {
        *ret_disk = status == KV_OK ? keys : NULL;
        return status;
    }
    snprintf(path, sizeof(path), "%s/rows", options->folder);
    return kv_disk_extents_open(path, keys, ret_disk, detail, detail_bytes);
}

static bool run_layout(struct bench *bench, const struct bench_load *load)
{
    const char *layout = strchr(load->name, '.') + 1;
    const bool is_extents = strcmp(layout, "extents") == 0;
    struct run run = {.bench = bench};
    char detail[512] = "";
    bool is_good = false;

    run.total = bench->smoke ? 192ull << 20 : bench->quick ? 6ull << 30 : 60ull << 30;
    run.quota = run.total / 3;
    run.room_times = is_extents ? ROOM_TIMES_EXTENTS : ROOM_TIMES;
    snprintf(run.folder, sizeof(run.folder), "%s/%s", bench->folder, layout);
    if (!has_room(&run))
        return false;
    kv_random_init(&run.random, 1);
    run.sessions = calloc(SESSIONS_MAX, sizeof(run.sessions[0]));
    run.read_value = malloc(VALUE_MAX);
    for (unsigned i = 0; i < WINDOW; i++) {
        run.slots[i] = (struct slot){.run = &run, .values = malloc((size_t)UNITS * VALUE_MAX)};
        if (run.slots[i].values == NULL) {
            bench_complain("disk: out of memory");
            goto out;
        }
        bench_fill(run.slots[i].values, (size_t)UNITS * VALUE_MAX, i);
    }
    if (run.sessions == NULL || run.read_value == NULL ||
        !bench_watch_start(&run.watch, 4 << 20)) {
        bench_complain("disk: out of memory");
        goto out;
    }
    const struct kv_disk_rocksdb_options options = {
        .folder = run.folder,
        .layout = is_extents ? NULL : layout,
        .bytes_max = run.quota + run.quota / 10,
    };
    if (open_layout(&options, is_extents, &run.disk, detail, sizeof(detail)) != KV_OK ||
        run.disk->ops->queue_open(run.disk, NULL, NULL, &run.queue) != KV_OK) {
        bench_complain("%s", detail[0] != '\0' ? detail : "disk: out of memory");
        goto out;
    }
    is_good = measure(&run, layout);
    run.disk->ops->queue_close(run.queue);
out:
    kv_disk_close(run.disk);
    bench_remove(run.folder); /* the next one needs the room */
    for (unsigned i = 0; i < WINDOW; i++)
        free(run.slots[i].values);
    free(run.read_value);
    free(run.sessions);
    return is_good;
}

const struct bench_load bench_disk_loads[] = {
    {"disk.level", "60 GB of rows through 20: RocksDB, levelled", run_layout, 0},
    {"disk.universal", "the same, universal compaction", run_layout, 0},
    {"disk.fifo", "the same, the oldest files are dropped", run_layout, 0},
    {"disk.blob", "the same, values in blob files", run_layout, 0},
    {"disk.extents", "the same, in a file of its own, only keys in RocksDB", run_layout, 0},
    {NULL, NULL, NULL, 0},
};
