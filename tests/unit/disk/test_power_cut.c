/* test_power_cut.c - rows in a file, records and keys in RocksDB, on a medium that loses power.
 *
 *     disk_extents.c, librocksdb -> pwrite(), fdatasync() of this file -> the real ones
 *                                           |
 *                        what pages were before, how much of a log is safe
 *
 * A cut takes a copy of the folder in which any pages of the file that no sync covers are as before,
 * and each log of RocksDB ends at any byte behind what is synced; the disk goes on with that copy.
 * What disk.h promises must be there:
 *
 *   rows      the value at the last sync, or a later one, of which only its size is sure; that of the
 *             last sync byte by byte
 *   records   those at the last sync, and the first of later ones
 */
#define _GNU_SOURCE
#include "kvserver/base/random.h"
#include "kvserver/base/thread.h"
#include "kvserver/disk/disk.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    PAGE = KV_DISK_PAGE,
    SEEDS = 6,
    CUTS = 6, /* of one seed */
    ROUNDS = 12,
    N_KEYS = 24,
    WRITES = 4, /* under way at once, and beside a sync */
    KEYS_OF_WRITE = 5,
    VERSIONS_MAX = 2 * ROUNDS * WRITES + 2,
    SIZES = 1000, /* a version's number is in its size */
    PAGES_MAX = 40,
    LOGS_MAX = 64,
    PATIENCE_MS = 60000,
};

/* ---- the medium --------------------------------------------------------------------------- */

struct page_before {
    uint64_t page;
    uint8_t bytes[PAGE];
};

struct log_synced {
    ino_t inode;
    off_t bytes;
};

static struct {
    pthread_mutex_t lock; /* of all that follows; syncs and writes have threads of their own */
    int fd;               /* of the file of rows; -1: nothing is noted */
    ino_t inode;
    struct page_before *pages; /* as they were, in the order of writes, since the last sync */
    size_t n_pages, room;
    struct log_synced logs[LOGS_MAX];
    unsigned n_logs;
} medium = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

static bool is_rows(int fd)
{
    struct stat status;

    return medium.fd >= 0 && fstat(fd, &status) == 0 && status.st_ino == medium.inode;
}

static void note_page(uint64_t page)
{
    if (medium.n_pages == medium.room) {
        medium.room = medium.room * 2 + 1024;
        medium.pages = realloc(medium.pages, medium.room * sizeof(medium.pages[0]));
        if (medium.pages == NULL)
            abort();
    }
    struct page_before *before = &medium.pages[medium.n_pages++];

    *before = (struct page_before){.page = page};
    (void)!pread(medium.fd, before->bytes, PAGE,
                 (off_t)page * PAGE); /* behind the end: zeros */
}

__attribute__((visibility("default"))) ssize_t
pwrite(int fd, const void *bytes, size_t n, off_t at)
{
    pthread_mutex_lock(&medium.lock);
    if (is_rows(fd))
        for (uint64_t page = (uint64_t)at / PAGE; page * PAGE < (uint64_t)at + n; page++)
            note_page(page);
    pthread_mutex_unlock(&medium.lock);
    return syscall(SYS_pwrite64, fd, bytes, n, at);
}

static void note_log(const struct stat *status)
{
    unsigned i = 0;

    while (i < medium.n_logs && medium.logs[i].inode != status->st_ino)
        i++;
    if (i == LOGS_MAX)
        abort();
    medium.n_logs += i == medium.n_logs;
    medium.logs[i] = (struct log_synced){status->st_ino, status->st_size};
}

/* What was written when it is called is safe when it returns.  RocksDB's library finds this one, too. */
__attribute__((visibility("default"))) int fdatasync(int fd)
{
    struct stat status;
    size_t n_pages;
    bool of_rows;
    int ret;

    pthread_mutex_lock(&medium.lock);
    of_rows = is_rows(fd);
    n_pages = medium.n_pages;
    pthread_mutex_unlock(&medium.lock);
    if (fstat(fd, &status) != 0)
        return -1;
    ret = (int)syscall(SYS_fdatasync, fd);
    if (ret != 0)
        return ret;
    pthread_mutex_lock(&medium.lock);
    if (of_rows) {
        medium.n_pages -= n_pages;
        memmove(medium.pages, medium.pages + n_pages, medium.n_pages * sizeof(medium.pages[0]));
    } else if (medium.fd >= 0) {
        note_log(&status); /* or another file of RocksDB's, of which nothing is lost */
    }
    pthread_mutex_unlock(&medium.lock);
    return 0;
}

static void begin_to_note(const char *rows)
{
    struct stat status;

    pthread_mutex_lock(&medium.lock);
    medium.n_pages = 0;
    medium.n_logs = 0;
    medium.fd = open(rows, O_RDONLY | O_CLOEXEC);
    assert_true(medium.fd >= 0 && fstat(medium.fd, &status) == 0);
    medium.inode = status.st_ino;
    pthread_mutex_unlock(&medium.lock);
}

static void end_to_note(void)
{
    pthread_mutex_lock(&medium.lock);
    close(medium.fd);
    medium.fd = -1;
    pthread_mutex_unlock(&medium.lock);
}

/* ---- a cut -------------------------------------------------------------------------------- */

static char top[] = "/tmp/kv_power.XXXXXX";
static struct kv_random random_numbers;

static unsigned below(unsigned bound)
{
    return (unsigned)kv_random_below(&random_numbers, bound);
}

/* Copies the first bytes of a file; what is zero takes no room. */
static void copy_file(int in, const char *to, off_t bytes)
{
    static const char zeros[PAGE];
    const int out = open(to, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    off_t at = 0;

    assert_true(out >= 0 && ftruncate(out, bytes) == 0);
    while (at < bytes) {
        char buffer[PAGE];
        const size_t left = (size_t)(bytes - at);
        const ssize_t n = pread(in, buffer, left < PAGE ? left : PAGE, at);

        assert_true(n > 0);
        if (memcmp(buffer, zeros, (size_t)n) != 0)
            assert_int_equal(syscall(SYS_pwrite64, out, buffer, n, at), n);
        at += n;
    }
    close(out);
}

/* Each page that is not safe is as it was before some write of it, or as after the last. */
static void lose_pages(const char *path)
{
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat status;
    uint8_t *is_decided;

    assert_true(fd >= 0 && fstat(fd, &status) == 0);
    is_decided = calloc(1, (size_t)(status.st_size / PAGE) + 1);
    assert_non_null(is_decided);
    for (size_t i = medium.n_pages; i-- > 0;) {
        const struct page_before *before = &medium.pages[i];

        if (is_decided[before->page])
            continue;
        if (below(2) == 0)
            is_decided[before->page] = 1;
        else
            assert_int_equal(
                syscall(SYS_pwrite64, fd, before->bytes, PAGE, (off_t)before->page * PAGE),
                PAGE);
    }
    free(is_decided);
    close(fd);
}

/* Returns how much of a log is there after the cut. */
static off_t kept_of_log(const struct stat *log)
{
    off_t synced = 0;

    for (unsigned i = 0; i < medium.n_logs; i++)
        if (medium.logs[i].inode == log->st_ino)
            synced = medium.logs[i].bytes;
    switch (below(4)) {
    case 0:
        return synced;
    case 1:
        return log->st_size;
    default:
        return synced + (off_t)below((unsigned)(log->st_size - synced) + 1);
    }
}

static void cut(const char *from, const char *to)
{
    char source[640], target[640];
    struct stat status;
    struct dirent *entry;
    DIR *keys;

    pthread_mutex_lock(&medium.lock);
    snprintf(target, sizeof(target), "%s/keys", to);
    assert_true(mkdir(to, 0700) == 0 && mkdir(target, 0700) == 0);
    snprintf(target, sizeof(target), "%s/rows", to);
    assert_int_equal(fstat(medium.fd, &status), 0);
    copy_file(medium.fd, target, status.st_size);
    lose_pages(target);
    snprintf(source, sizeof(source), "%s/keys", from);
    keys = opendir(source);
    assert_non_null(keys);
    while ((entry = readdir(keys)) != NULL) {
        snprintf(source, sizeof(source), "%s/keys/%s", from, entry->d_name);
        snprintf(target, sizeof(target), "%s/keys/%s", to, entry->d_name);
        const char *ending = strrchr(entry->d_name, '.');
        const int in = open(source, O_RDONLY | O_CLOEXEC);

        if (in < 0) /* RocksDB has just removed it */
            continue;
        assert_int_equal(fstat(in, &status), 0);
        if (S_ISREG(status.st_mode))
            copy_file(in, target,
                      ending != NULL && strcmp(ending, ".log") == 0 ? kept_of_log(&status)
                                                                    : status.st_size);
        close(in);
    }
    closedir(keys);
    pthread_mutex_unlock(&medium.lock);
}

/* ---- the disk ----------------------------------------------------------------------------- */

static char folder[256];
static struct kv_disk *disk;
static struct kv_disk_queue *queue;

static void open_disk(void)
{
    char path[512], detail[512] = "";
    struct kv_disk *keys = NULL;

    snprintf(path, sizeof(path), "%s/keys", folder);
    if (kv_disk_rocksdb_open(
            &(struct kv_disk_rocksdb_options){.folder = path, .layout = KV_DISK_LAYOUT_KEYS},
            &keys, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    snprintf(path, sizeof(path), "%s/rows", folder);
    if (kv_disk_extents_open(path, keys, &disk, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    assert_int_equal(disk->ops->queue_open(disk, NULL, NULL, &queue), KV_OK);
    begin_to_note(path);
}

static void close_disk(void)
{
    end_to_note();
    disk->ops->queue_close(queue);
    kv_disk_close(disk);
}

struct ended {
    bool is_over;
    kv_status_t status;
    size_t bytes;
};

static void done(void *arg, kv_status_t status, size_t bytes)
{
    *(struct ended *)arg = (struct ended){true, status, bytes};
}

static void wait_for(const struct ended *ended)
{
    for (unsigned i = 0; !ended->is_over; i++) {
        assert_true(i < 10 * PATIENCE_MS);
        if (kv_disk_progress(queue) == 0)
            kv_sleep_fds(NULL, 0, 100);
    }
}

static struct ended
get(enum kv_disk_space space, const void *key, size_t key_bytes, void *value, size_t room)
{
    struct ended ended = {0};

    assert_int_equal(kv_disk_read(queue, space, key, key_bytes, value, room, done, &ended),
                     KV_OK);
    wait_for(&ended);
    return ended;
}

/* ---- what there may be -------------------------------------------------------------------- */

struct version {
    unsigned number; /* 0: the key is not there */
    size_t bytes;
};

/* Of a key: [0] at the last sync, then what was written since. */
struct fact {
    struct version may[VERSIONS_MAX];
    unsigned n, n_numbers;
};

static struct fact facts[N_KEYS];
static unsigned record, record_synced; /* the last one that was written */

static void fill(uint8_t *value, unsigned key, struct version version)
{
    for (size_t i = 0; i < version.bytes; i++)
        value[i] = (uint8_t)(key * 131 + version.number * 17 + i * 7 + (i >> 8) * 13);
}

static struct version next_version(struct fact *fact)
{
    static const unsigned pages[] = {1, 1, 2, 5, PAGES_MAX};
    struct version version = {0};

    if (below(4) > 0) {
        version.number = ++fact->n_numbers;
        version.bytes = pages[below(5)] * PAGE - version.number % SIZES;
    }
    return version;
}

struct writing {
    struct ended ended;
    uint8_t keys[KEYS_OF_WRITE];
    uint8_t *values[KEYS_OF_WRITE];
};

/* Writes some keys at once, and then a record that counts them. */
static void begin_write(struct writing *writing, struct writing *counting)
{
    struct kv_disk_write writes[KEYS_OF_WRITE];
    const unsigned n = 1 + below(KEYS_OF_WRITE), first = below(N_KEYS);
    char name[32];

    memset(writing, 0, sizeof(*writing));
    for (unsigned i = 0; i < n; i++) {
        const unsigned key = (first + 5 * i) % N_KEYS;
        struct fact *fact = &facts[key];
        const struct version version = next_version(fact);

        assert_true(fact->n < VERSIONS_MAX);
        fact->may[fact->n++] = version;
        writing->keys[i] = (uint8_t)key;
        writes[i] = (struct kv_disk_write){.key = &writing->keys[i], .key_bytes = 1};
        if (version.number == 0)
            continue;
        writing->values[i] = malloc(version.bytes);
        assert_non_null(writing->values[i]);
        fill(writing->values[i], key, version);
        writes[i].value = writing->values[i];
        writes[i].value_bytes = version.bytes;
    }
    assert_int_equal(kv_disk_write(queue, KV_DISK_ROWS, writes, n, done, &writing->ended),
                     KV_OK);
    memset(counting, 0, sizeof(*counting));
    snprintf(name, sizeof(name), "%06u", ++record);
    writes[0] =
        (struct kv_disk_write){.key = name, .key_bytes = 6, .value = "there", .value_bytes = 5};
    assert_int_equal(kv_disk_write(queue, KV_DISK_RECORDS, writes, 1, done, &counting->ended),
                     KV_OK);
}

static void end_write(struct writing *writing)
{
    wait_for(&writing->ended);
    assert_int_equal(writing->ended.status, KV_OK);
    for (unsigned i = 0; i < KEYS_OF_WRITE; i++)
        free(writing->values[i]);
}

static void write_some(unsigned n, struct writing writing[])
{
    for (unsigned i = 0; i < n; i++)
        begin_write(&writing[2 * i], &writing[2 * i + 1]);
}

static void end_writes(unsigned n, struct writing writing[])
{
    for (unsigned i = 0; i < 2 * n; i++)
        end_write(&writing[i]);
}

/* With writes beside it, which it need not cover. */
static void sync_beside(unsigned n)
{
    struct writing writing[2 * WRITES];
    unsigned covered[N_KEYS];
    const unsigned covered_record = record;
    struct ended ended = {0};

    for (unsigned i = 0; i < N_KEYS; i++)
        covered[i] = facts[i].n - 1;
    assert_int_equal(kv_disk_sync(queue, done, &ended), KV_OK);
    write_some(n, writing);
    wait_for(&ended);
    assert_int_equal(ended.status, KV_OK);
    end_writes(n, writing);
    for (unsigned i = 0; i < N_KEYS; i++) {
        facts[i].n -= covered[i];
        memmove(facts[i].may, facts[i].may + covered[i], facts[i].n * sizeof(facts[i].may[0]));
    }
    record_synced = covered_record;
}

/* ---- what there is ------------------------------------------------------------------------ */

static void check_key(unsigned key)
{
    static uint8_t got[PAGES_MAX * PAGE], wanted[PAGES_MAX * PAGE];
    struct fact *fact = &facts[key];
    const uint8_t name = (uint8_t)key;
    const struct ended ended = get(KV_DISK_ROWS, &name, 1, got, sizeof(got));
    struct version is = {0};
    unsigned i = 0;

    assert_true(ended.status == KV_OK || ended.status == KV_NOT_FOUND);
    if (ended.status == KV_OK)
        is.bytes = ended.bytes;
    while (i < fact->n && fact->may[i].bytes != is.bytes)
        i++;
    if (i == fact->n)
        fail_msg("key %u: %zu bytes: no version that may be there has as many", key, is.bytes);
    is = fact->may[i];
    fill(wanted, key, is);
    if (i == 0 && memcmp(got, wanted, is.bytes) != 0)
        fail_msg("key %u: version %u, which was synced, has other bytes", key, is.number);
    fact->may[0] = is;
    fact->n = 1;
    if (is.number > 0 &&
        memcmp(got, wanted, is.bytes) != 0) { /* partly lost: removed, as a reader would */
        struct ended removed = {0};

        assert_int_equal(kv_disk_write(queue, KV_DISK_ROWS,
                                       &(struct kv_disk_write){.key = &name, .key_bytes = 1}, 1,
                                       done, &removed),
                         KV_OK);
        wait_for(&removed);
        fact->may[0] = (struct version){0};
    }
}

static void check_records(void)
{
    unsigned n = 0;
    char name[32], value[8];

    for (unsigned i = 1; i <= record; i++) {
        snprintf(name, sizeof(name), "%06u", i);
        if (get(KV_DISK_RECORDS, name, 6, value, sizeof(value)).status != KV_OK)
            continue;
        if (n + 1 != i)
            fail_msg("record %u is there, and %u is not", i, n + 1);
        n = i;
    }
    if (n < record_synced)
        fail_msg("records up to %u are there, of %u that were synced", n, record_synced);
    record = n;
}

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *walk)
{
    (void)status;
    (void)kind;
    (void)walk;
    return remove(path);
}

static int remove_all(const char *path)
{
    return nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static void power_is_cut(void **state)
{
    struct writing writing[2 * WRITES];
    char next[256];

    (void)state;
    for (unsigned seed = 1; seed <= SEEDS; seed++) {
        print_message("seed %u\n", seed);
        kv_random_init(&random_numbers, seed);
        memset(facts, 0, sizeof(facts));
        for (unsigned i = 0; i < N_KEYS; i++)
            facts[i].n = 1;
        record = record_synced = 0;
        snprintf(folder, sizeof(folder), "%s/%u.0", top, seed);
        assert_int_equal(mkdir(folder, 0700), 0);
        open_disk();
        for (unsigned n = 1; n <= CUTS; n++) {
            for (unsigned round = 0; round < ROUNDS; round++) {
                const unsigned n_writes = 1 + below(WRITES);

                write_some(n_writes, writing);
                end_writes(n_writes, writing);
                if (below(4) == 0)
                    sync_beside(below(WRITES));
            }
            snprintf(next, sizeof(next), "%s/%u.%u", top, seed, n);
            cut(folder, next);
            close_disk();
            remove_all(folder);
            memcpy(folder, next, sizeof(folder));
            open_disk();
            for (unsigned key = 0; key < N_KEYS; key++)
                check_key(key);
            check_records();
            sync_beside(0);
        }
        close_disk();
    }
}

static int set_up(void **state)
{
    (void)state;
    return mkdtemp(top) != NULL ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    free(medium.pages);
    return remove_all(top);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(power_is_cut)};

    if (kv_disk_rocksdb_layout(0) == NULL) {
        printf("skipped: no RocksDB in this build\n");
        return 77;
    }
    return cmocka_run_group_tests_name("power cut", tests, set_up, tear_down);
}
