/* Every disk keeps what its interface says.  The same tests for all: a disk that is new is a row of
 * main()'s. */
#define _GNU_SOURCE
#include "kvserver/base/clock.h"
#include "kvserver/base/random.h"
#include "kvserver/base/thread.h"
#include "kvserver/disk/disk.h"
#include "tests/sim/disk_sim.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    PATIENCE_MS = 60000,
    VALUE_MAX = 70000,
    N_KEYS = 40,
    N_STEPS = 3000,
};

static char folder[] = "/tmp/kv_disk.XXXXXX";

/* ---- disks -------------------------------------------------------------------------------- */

static struct kv_disk *make_memory(const char *layout)
{
    (void)layout;
    return kv_disk_memory_open(&kv_clock_real, 0);
}

static struct kv_disk *make_simulated(const char *layout)
{
    (void)layout;
    return disk_sim_open(&kv_clock_real, 1);
}

static struct kv_disk *make_rocksdb(const char *layout)
{
    char path[256], detail[512] = "";
    struct kv_disk *disk = NULL;

    snprintf(path, sizeof(path), "%s/%s", folder, layout);
    if (kv_disk_rocksdb_open(
            &(struct kv_disk_rocksdb_options){.folder = path, .layout = layout}, &disk, detail,
            sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    return disk;
}

static struct kv_disk *make_over(struct kv_disk *keys)
{
    struct kv_disk *disk = NULL;
    char path[256], detail[512] = "";

    snprintf(path, sizeof(path), "%s/rows", folder);
    if (kv_disk_extents_open(path, keys, &disk, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    return disk;
}

/* Keys in RocksDB, rows in a file. */
static struct kv_disk *make_extents(const char *layout)
{
    return make_over(make_rocksdb(layout));
}

/* Keys that are lost with the process: also where there is no RocksDB, under the thread sanitizer. */
static struct kv_disk *make_lost_extents(const char *layout)
{
    return make_over(make_memory(layout));
}

/* The disk that a test is of. */
static struct kv_disk *(*make)(const char *layout);
static const char *layout;
static bool lasts; /* what is done outlasts the process */

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *walk)
{
    (void)status;
    (void)kind;
    (void)walk;
    return remove(path);
}

static int set_up(void **state)
{
    (void)state;
    memcpy(folder + strlen(folder) - 6, "XXXXXX", 6);
    return mkdtemp(folder) != NULL ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return nftw(folder, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

/* ---- what is under way -------------------------------------------------------------------- */

struct ended {
    bool is_over;
    kv_status_t status;
    size_t bytes;
};

static void done(void *arg, kv_status_t status, size_t bytes)
{
    struct ended *ended = arg;

    assert_false(ended->is_over);
    *ended = (struct ended){true, status, bytes};
}

static void wait_for(struct kv_disk_queue *queue, const struct ended *ended)
{
    for (unsigned i = 0; !ended->is_over; i++) {
        assert_true(i < PATIENCE_MS);
        if (kv_disk_progress(queue) == 0)
            kv_sleep_fds(NULL, 0, 1000);
    }
}

static void write_all(struct kv_disk_queue *queue,
                      enum kv_disk_space space,
                      const struct kv_disk_write *writes,
                      unsigned n)
{
    struct ended ended = {0};

    assert_int_equal(kv_disk_write(queue, space, writes, n, done, &ended), KV_OK);
    wait_for(queue, &ended);
    assert_int_equal(ended.status, KV_OK);
}

static void put(struct kv_disk_queue *queue,
                enum kv_disk_space space,
                const char *key,
                const void *value,
                size_t bytes)
{
    write_all(queue, space,
              &(struct kv_disk_write){
                  .key = key, .key_bytes = strlen(key), .value = value, .value_bytes = bytes},
              1);
}

static void remove_key(struct kv_disk_queue *queue, enum kv_disk_space space, const char *key)
{
    write_all(queue, space, &(struct kv_disk_write){.key = key, .key_bytes = strlen(key)}, 1);
}

static void sync_all(struct kv_disk_queue *queue)
{
    struct ended ended = {0};

    assert_int_equal(kv_disk_sync(queue, done, &ended), KV_OK);
    wait_for(queue, &ended);
    assert_int_equal(ended.status, KV_OK);
}

static struct ended get(struct kv_disk_queue *queue,
                        enum kv_disk_space space,
                        const char *key,
                        void *value,
                        size_t room)
{
    struct ended ended = {0};

    assert_int_equal(kv_disk_read(queue, space, key, strlen(key), value, room, done, &ended),
                     KV_OK);
    wait_for(queue, &ended);
    return ended;
}

static void expect(struct kv_disk_queue *queue,
                   enum kv_disk_space space,
                   const char *key,
                   const void *value,
                   size_t bytes)
{
    static unsigned char got[VALUE_MAX];
    const struct ended ended = get(queue, space, key, got, sizeof(got));

    assert_int_equal(ended.status, KV_OK);
    assert_int_equal(ended.bytes, bytes);
    assert_memory_equal(got, value, bytes);
}

static void expect_none(struct kv_disk_queue *queue, enum kv_disk_space space, const char *key)
{
    char value[8];

    assert_int_equal(get(queue, space, key, value, sizeof(value)).status, KV_NOT_FOUND);
}

static struct kv_disk_queue *open_queue(struct kv_disk *disk)
{
    struct kv_disk_queue *queue;

    assert_int_equal(disk->ops->queue_open(disk, NULL, NULL, &queue), KV_OK);
    return queue;
}

/* ---- tests -------------------------------------------------------------------------------- */

static void values_come_back(void **state)
{
    struct kv_disk *disk = make(layout);
    struct kv_disk_queue *queue = open_queue(disk);
    char little[4] = "....";

    (void)state;
    expect_none(queue, KV_DISK_RECORDS, "a");
    put(queue, KV_DISK_RECORDS, "a", "one", 3);
    put(queue, KV_DISK_ROWS, "a", "rows", 4);
    put(queue, KV_DISK_RECORDS, "nothing", "", 0);
    expect(queue, KV_DISK_RECORDS, "a", "one", 3);
    expect(queue, KV_DISK_ROWS, "a", "rows", 4);
    expect(queue, KV_DISK_RECORDS, "nothing", "", 0);
    put(queue, KV_DISK_RECORDS, "a", "other", 5);
    expect(queue, KV_DISK_RECORDS, "a", "other", 5);
    /* As much as fits. */
    assert_int_equal(get(queue, KV_DISK_RECORDS, "a", little, 2).bytes, 5);
    assert_memory_equal(little, "ot..", 4);
    /* Of two pieces. */
    write_all(queue, KV_DISK_ROWS,
              &(struct kv_disk_write){.key = "b",
                                      .key_bytes = 1,
                                      .value = "rows",
                                      .value_bytes = 4,
                                      .tail = " and more",
                                      .tail_bytes = 9},
              1);
    expect(queue, KV_DISK_ROWS, "b", "rows and more", 13);
    remove_key(queue, KV_DISK_RECORDS, "a");
    remove_key(queue, KV_DISK_RECORDS, "never");
    expect_none(queue, KV_DISK_RECORDS, "a");
    expect(queue, KV_DISK_ROWS, "a", "rows", 4);
    sync_all(queue);
    expect(queue, KV_DISK_ROWS, "a", "rows", 4);
    disk->ops->queue_close(queue);
    kv_disk_close(disk);
}

struct seen {
    char keys[256];
    size_t values_bytes;
};

static void see(void *arg, const void *key, size_t key_bytes, const void *value, size_t bytes)
{
    struct seen *seen = arg;
    const size_t n = strlen(seen->keys);

    snprintf(seen->keys + n, sizeof(seen->keys) - n, "%.*s ", (int)key_bytes,
             (const char *)key);
    assert_true(bytes == 0 || value != NULL);
    seen->values_bytes += bytes;
}

/* One write of several keys; a scan has those of a prefix, in order, and no other space's. */
static void scans_are_in_order(void **state)
{
    struct kv_disk *disk = make(layout);
    struct kv_disk_queue *queue = open_queue(disk);
    const struct kv_disk_write writes[] = {
        {.key = "m/b", .key_bytes = 3, .value = "2", .value_bytes = 1},
        {.key = "n", .key_bytes = 1, .value = "3", .value_bytes = 1},
        {.key = "m/a", .key_bytes = 3, .value = "11", .value_bytes = 2},
        {.key = "m", .key_bytes = 1, .value = "0", .value_bytes = 1},
        {.key = "m/c", .key_bytes = 3},
    };
    struct seen seen = {0};

    (void)state;
    put(queue, KV_DISK_RECORDS, "m/c", "4", 1);
    put(queue, KV_DISK_ROWS, "m/z", "5", 1);
    write_all(queue, KV_DISK_RECORDS, writes, sizeof(writes) / sizeof(writes[0]));
    assert_int_equal(kv_disk_scan(disk, KV_DISK_RECORDS, "m/", 2, see, &seen), KV_OK);
    assert_string_equal(seen.keys, "m/a m/b ");
    assert_int_equal(seen.values_bytes, 3);
    seen = (struct seen){0};
    assert_int_equal(kv_disk_scan(disk, KV_DISK_RECORDS, "", 0, see, &seen), KV_OK);
    assert_string_equal(seen.keys, "m m/a m/b n ");
    disk->ops->queue_close(queue);
    kv_disk_close(disk);
}

static unsigned n_woken;

static void wake(void *arg)
{
    __atomic_fetch_add((unsigned *)arg, 1, __ATOMIC_SEQ_CST);
}

/* Writes to a key take effect in their order, however many are under way; more than may be is
 * refused. */
static void order_is_kept(void **state)
{
    struct kv_disk *disk = make(layout);
    struct kv_disk_queue *queue;
    static struct ended ended[KV_DISK_QUEUE_MAX];
    static uint32_t values[KV_DISK_QUEUE_MAX + 1];
    struct kv_disk_write write = {
        .key = "key", .key_bytes = 3, .value_bytes = sizeof(values[0])};

    (void)state;
    memset(ended, 0, sizeof(ended));
    n_woken = 0;
    assert_int_equal(disk->ops->queue_open(disk, wake, &n_woken, &queue), KV_OK);
    for (uint32_t i = 0; i < KV_DISK_QUEUE_MAX; i++) {
        values[i] = i;
        write.value = &values[i];
        assert_int_equal(kv_disk_write(queue, KV_DISK_ROWS, &write, 1, done, &ended[i]), KV_OK);
    }
    assert_int_equal(kv_disk_write(queue, KV_DISK_ROWS, &write, 1, done, NULL), KV_BUSY);
    for (uint32_t i = 0; i < KV_DISK_QUEUE_MAX; i++) {
        wait_for(queue, &ended[i]);
        assert_int_equal(ended[i].status, KV_OK);
    }
    expect(queue, KV_DISK_ROWS, "key", &values[KV_DISK_QUEUE_MAX - 1], sizeof(values[0]));
    /* A disk with threads of its own wakes whoever sleeps. */
    assert_int_equal(__atomic_load_n(&n_woken, __ATOMIC_SEQ_CST) > 0,
                     lasts || make == make_lost_extents);
    disk->ops->queue_close(queue);
    kv_disk_close(disk);
}

/* What is under way when a queue is closed is done, and nobody is called. */
static void closing_calls_nobody(void **state)
{
    struct kv_disk *disk = make(layout);
    struct kv_disk_queue *queue = open_queue(disk), *other = open_queue(disk);
    struct ended ended[64] = {{0}};
    static unsigned char value[VALUE_MAX];

    (void)state;
    for (unsigned i = 0; i < 64; i++) {
        const struct kv_disk_write write = {
            .key = "closed", .key_bytes = 6, .value = value, .value_bytes = sizeof(value)};

        assert_int_equal(kv_disk_write(queue, KV_DISK_ROWS, &write, 1, done, &ended[i]), KV_OK);
    }
    disk->ops->queue_close(queue);
    for (unsigned i = 0; i < 64; i++)
        assert_false(ended[i].is_over);
    expect(other, KV_DISK_ROWS, "closed", value, sizeof(value));
    disk->ops->queue_close(other);
    kv_disk_close(disk);
}

/* A value follows from its number. */
static size_t make_value(uint64_t number, unsigned char *value)
{
    struct kv_random random;
    size_t bytes;

    kv_random_init(&random, number);
    bytes = (size_t)kv_random_below(&random, VALUE_MAX);
    kv_random_fill(&random, value, bytes);
    return bytes;
}

/* What a disk says that it holds. */
static void usage_is_told(void **state)
{
    struct kv_disk *disk = make(layout);
    struct kv_disk_queue *queue = open_queue(disk);
    static unsigned char value[VALUE_MAX];
    struct kv_disk_usage usage;
    char key[16];

    (void)state;
    for (unsigned i = 0; i < 20; i++) {
        snprintf(key, sizeof(key), "%u", i);
        put(queue, KV_DISK_ROWS, key, value, sizeof(value));
    }
    sync_all(queue);
    kv_disk_get_usage(disk, &usage);
    assert_true(usage.live_bytes <= usage.bytes);
    if (lasts)
        assert_true(usage.bytes >= 20 * sizeof(value));
    disk->ops->queue_close(queue);
    kv_disk_close(disk);
}

/* What a callback starts is done by a later call. */
struct chain {
    struct kv_disk_queue *queue;
    unsigned n;
};

static void go_on(void *arg, kv_status_t status, size_t bytes)
{
    struct chain *chain = arg;

    (void)bytes;
    assert_int_equal(status, KV_OK);
    chain->n++;
    assert_int_equal(kv_disk_sync(chain->queue, go_on, chain), KV_OK);
}

static void callbacks_may_start_more(void **state)
{
    struct kv_disk *disk = make(layout);
    struct chain chain = {.queue = open_queue(disk)};

    (void)state;
    assert_int_equal(kv_disk_sync(chain.queue, go_on, &chain), KV_OK);
    for (unsigned i = 0; chain.n < 3; i++) {
        const unsigned before = chain.n;

        assert_true(i < PATIENCE_MS);
        (void)kv_disk_progress(chain.queue);
        assert_true(chain.n <= before + 1);
        if (chain.n == before)
            kv_sleep_fds(NULL, 0, 1000);
    }
    disk->ops->queue_close(chain.queue);
    kv_disk_close(disk);
}

/* Puts and removals at random, against an array. */
static void is_what_an_array_is(void **state)
{
    static unsigned char value[VALUE_MAX];
    struct kv_disk *disk = make(layout);
    struct kv_disk_queue *queue = open_queue(disk);
    uint64_t numbers[KV_DISK_SPACES][N_KEYS] = {{0}}; /* 0: not there */
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 7);
    for (unsigned step = 1; step <= N_STEPS; step++) {
        const unsigned at = (unsigned)kv_random_below(&random, N_KEYS);
        const enum kv_disk_space space = (enum kv_disk_space)kv_random_below(&random, 2);
        char key[32];

        snprintf(key, sizeof(key), "key-%u", at);
        switch (kv_random_below(&random, 5)) {
        case 0:
        case 1:
            put(queue, space, key, value, make_value(step, value));
            numbers[space][at] = step;
            break;
        case 2:
            remove_key(queue, space, key);
            numbers[space][at] = 0;
            break;
        default:
            if (numbers[space][at] == 0) {
                expect_none(queue, space, key);
            } else {
                const size_t bytes = make_value(numbers[space][at], value);

                expect(queue, space, key, value, bytes);
            }
        }
        if (step % 1000 == 0)
            sync_all(queue);
        if (step % 1500 == 0 && lasts) {
            disk->ops->queue_close(queue);
            kv_disk_close(disk);
            disk = make(layout);
            queue = open_queue(disk);
        }
    }
    disk->ops->queue_close(queue);
    kv_disk_close(disk);
}

/* What the process does that is killed: `test_unit_disk LAYOUT FOLDER`.  One of its own, because
 * RocksDB's threads do not survive a fork. */
static int be_killed(void)
{
    struct kv_disk *disk = make(layout);
    struct kv_disk_queue *queue = open_queue(disk);

    put(queue, KV_DISK_ROWS, "synced", "rows", 4);
    sync_all(queue);
    put(queue, KV_DISK_RECORDS, "record", "known", 5);
    put(queue, KV_DISK_ROWS, "later", "lost", 4);
    return puts("ready") >= 0 && fflush(stdout) == 0 && pause() == 0;
}

/* A process is killed: its records are there, and of its rows those before a sync. */
static void survives_a_kill(void **state)
{
    int out[2], status;
    char line[16] = "";
    pid_t pid;

    (void)state;
    if (!lasts)
        return;
    assert_int_equal(pipe(out), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(out[1], STDOUT_FILENO);
        execl("/proc/self/exe", "test_unit_disk", make == make_extents ? "extents" : layout,
              folder, (char *)NULL);
        _exit(1);
    }
    close(out[1]);
    if (poll(&(struct pollfd){.fd = out[0], .events = POLLIN}, 1, PATIENCE_MS) == 1)
        (void)!read(out[0], line, sizeof(line) - 1);
    close(out[0]);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_string_equal(line, "ready\n");
    assert_true(WIFSIGNALED(status));

    struct kv_disk *disk = make(layout);
    struct kv_disk_queue *queue = open_queue(disk);
    char value[8];

    expect(queue, KV_DISK_ROWS, "synced", "rows", 4);
    expect(queue, KV_DISK_RECORDS, "record", "known", 5);
    /* Not promised, but it is as it was written or not there. */
    const struct ended ended = get(queue, KV_DISK_ROWS, "later", value, sizeof(value));
    assert_true(ended.status == KV_NOT_FOUND ||
                (ended.bytes == 4 && memcmp(value, "lost", 4) == 0));
    disk->ops->queue_close(queue);
    kv_disk_close(disk);
}

/* What cannot be opened is refused with its name. */
static void what_is_wrong_is_refused(void **state)
{
    char path[256], detail[512] = "";
    struct kv_disk *disk = NULL;
    FILE *file;

    (void)state;
    if (make != make_rocksdb)
        return;
    const struct kv_disk_rocksdb_options unknown = {.folder = folder, .layout = "ring"};
    assert_int_equal(kv_disk_rocksdb_open(&unknown, &disk, detail, sizeof(detail)), KV_INVALID);
    assert_string_equal(detail, "disk: unknown layout: ring");
    snprintf(path, sizeof(path), "%s/a file", folder);
    file = fopen(path, "w");
    assert_non_null(file);
    fclose(file);
    const struct kv_disk_rocksdb_options options = {.folder = path, .layout = layout};
    assert_int_equal(kv_disk_rocksdb_open(&options, &disk, detail, sizeof(detail)), KV_IO);
    assert_non_null(strstr(detail, path));
    /* In use by another one. */
    struct kv_disk *first = make(layout);
    char own[300];
    snprintf(own, sizeof(own), "%s/%s", folder, layout);
    const struct kv_disk_rocksdb_options again = {.folder = own, .layout = layout};
    assert_int_equal(kv_disk_rocksdb_open(&again, &disk, detail, sizeof(detail)), KV_IO);
    kv_disk_close(first);
}

/* Keys that lead behind the end of the file lead nowhere, and two to one place only once. */
static void keys_may_lead_nowhere(void **state)
{
    const char place[8] = {1, 0, 0, 0, 0, 16, 0, 0}; /* page 1, 4,096 bytes */
    static const char *const names[] = {"a", "b", "c", "d"};
    static char values[4][8 << 10];
    char path[256];
    struct kv_disk_queue *queue;
    struct kv_disk *disk;

    (void)state;
    if (make != make_extents)
        return;
    disk = make(layout);
    queue = open_queue(disk);
    for (unsigned i = 0; i < 4; i++) {
        memset(values[i], 'a' + (int)i, sizeof(values[i]));
        put(queue, KV_DISK_ROWS, names[i], values[i], sizeof(values[i]));
    }
    sync_all(queue);
    disk->ops->queue_close(queue);
    kv_disk_close(disk);

    /* The third place ends behind the end; one key has another's place, one has none. */
    snprintf(path, sizeof(path), "%s/rows", folder);
    assert_int_equal(truncate(path, 2 * sizeof(values[0]) + 4096), 0);
    disk = make_rocksdb(layout);
    queue = open_queue(disk);
    put(queue, KV_DISK_ROWS, "half", place, sizeof(place));
    put(queue, KV_DISK_ROWS, "short", place, 5);
    put(queue, KV_DISK_ROWS, "zero", "\0\0\0\0\0\0\0", 8);
    put(queue, KV_DISK_ROWS, "far", "\xff\xff\xff\xff\xff\xff\xff\x7f", 8);
    sync_all(queue);
    disk->ops->queue_close(queue);
    kv_disk_close(disk);

    disk = make(layout);
    queue = open_queue(disk);
    expect(queue, KV_DISK_ROWS, "a", values[0], sizeof(values[0]));
    expect(queue, KV_DISK_ROWS, "b", values[1], sizeof(values[1]));
    expect_none(queue, KV_DISK_ROWS, "c");
    expect_none(queue, KV_DISK_ROWS, "d");
    expect_none(queue, KV_DISK_ROWS, "half");
    expect_none(queue, KV_DISK_ROWS, "short");
    expect_none(queue, KV_DISK_ROWS, "zero");
    expect_none(queue, KV_DISK_ROWS, "far");
    /* What is free is used again, and nothing else. */
    for (unsigned i = 0; i < 4; i++)
        put(queue, KV_DISK_ROWS, names[i], values[i], sizeof(values[i]));
    for (unsigned i = 0; i < 4; i++)
        expect(queue, KV_DISK_ROWS, names[i], values[i], sizeof(values[i]));
    disk->ops->queue_close(queue);
    kv_disk_close(disk);
}

static struct kv_disk_ops failing_ops;
static bool keys_fail;

struct failing {
    kv_disk_done_fn done;
    void *arg;
};

static void fail_done(void *arg, kv_status_t status, size_t bytes)
{
    struct failing failing = *(struct failing *)arg;

    free(arg);
    (void)status;
    failing.done(failing.arg, KV_IO, bytes);
}

static const struct kv_disk_ops *memory_ops;

static kv_status_t fail_write(struct kv_disk_queue *queue,
                              enum kv_disk_space space,
                              const struct kv_disk_write *writes,
                              unsigned n,
                              kv_disk_done_fn on_done,
                              void *arg)
{
    struct failing *failing;

    if (!keys_fail)
        return memory_ops->write(queue, space, writes, n, on_done, arg);
    failing = malloc(sizeof(*failing));
    assert_non_null(failing);
    *failing = (struct failing){on_done, arg};
    return memory_ops->write(queue, space, writes, n, fail_done, failing);
}

/* Once keys could not be written no row is written any more: its place would be in doubt, too. */
static void lost_keys_stop_the_rows(void **state)
{
    static unsigned char value[VALUE_MAX];
    const struct kv_disk_write write = {
        .key = "b", .key_bytes = 1, .value = value, .value_bytes = sizeof(value)};
    struct kv_disk_usage before, after;
    struct kv_disk_queue *queue;
    struct kv_disk *keys, *disk;

    (void)state;
    if (make != make_lost_extents)
        return;
    keys = make_memory(layout);
    memory_ops = keys->ops;
    failing_ops = *memory_ops;
    failing_ops.write = fail_write;
    keys->ops = &failing_ops;
    disk = make_over(keys);
    queue = open_queue(disk);
    put(queue, KV_DISK_ROWS, "a", value, sizeof(value));
    for (unsigned i = 0; i < 3; i++) {
        struct ended ended = {0};

        keys_fail = i == 0;
        assert_int_equal(kv_disk_write(queue, KV_DISK_ROWS, &write, 1, done, &ended), KV_OK);
        wait_for(queue, &ended);
        assert_int_equal(ended.status, KV_IO);
        kv_disk_get_usage(disk, i == 0 ? &before : &after);
    }
    assert_int_equal(after.bytes, before.bytes);
    expect(queue, KV_DISK_ROWS, "a", value, sizeof(value));
    disk->ops->queue_close(queue);
    kv_disk_close(disk);
}

static uint64_t blocks_of_rows(void)
{
    struct stat status;
    char path[256];

    snprintf(path, sizeof(path), "%s/rows", folder);
    assert_int_equal(stat(path, &status), 0);
    return (uint64_t)status.st_blocks;
}

/* A file system that can have holes. */
static bool has_holes(void)
{
    char path[256];
    bool has;
    int fd;

    snprintf(path, sizeof(path), "%s/holes", folder);
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0 && ftruncate(fd, 8192) == 0);
    has = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0;
    close(fd);
    return has;
}

/* What is removed is gone from the file, too, after a sync; what is beside it is not. */
static void what_is_removed_leaves_the_file(void **state)
{
    static unsigned char value[VALUE_MAX];
    struct kv_disk_queue *queue;
    struct kv_disk *disk;
    uint64_t n_blocks;
    char key[16];

    (void)state;
    if ((make != make_extents && make != make_lost_extents) || !has_holes())
        return;
    disk = make(layout);
    queue = open_queue(disk);
    memset(value, 'x', sizeof(value));
    for (unsigned i = 0; i < 40; i++) {
        snprintf(key, sizeof(key), "%u", i);
        put(queue, KV_DISK_ROWS, key, value, sizeof(value));
    }
    sync_all(queue);
    n_blocks = blocks_of_rows();
    assert_true(n_blocks * 512 >= 40 * sizeof(value));
    for (unsigned i = 4; i < 40; i++) {
        snprintf(key, sizeof(key), "%u", i);
        remove_key(queue, KV_DISK_ROWS, key);
    }
    sync_all(queue);
    assert_true(blocks_of_rows() <= n_blocks / 4);
    for (unsigned i = 0; i < 4; i++) {
        snprintf(key, sizeof(key), "%u", i);
        expect(queue, KV_DISK_ROWS, key, value, sizeof(value));
    }
    disk->ops->queue_close(queue);
    kv_disk_close(disk);
}

/* A file as the first version wrote it: extents of 8 MiB, places of one size in each, of whole pages of
 * 4,096 bytes that are counted from 1 on; keys lead to page and size. */
static void a_file_of_the_first_version(void **state)
{
    static const struct {
        const char *key;
        uint32_t place[2];
    } keys[] = {
        {"first", {1, 4096}},
        {"last of an extent", {2048, 100}},
        {"of three pages", {2049 + 3 * 400, 3 * 4096 - 5}},
        {"last of three", {2049 + 3 * 681, 2 * 4096 + 1}},
    };
    static unsigned char value[3 * 4096];
    struct kv_disk_queue *queue;
    struct kv_disk *disk;
    char path[256];
    int fd;

    (void)state;
    if (make != make_extents)
        return;
    snprintf(path, sizeof(path), "%s/rows", folder);
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0 && ftruncate(fd, 16 << 20) == 0);
    disk = make_rocksdb(layout);
    queue = open_queue(disk);
    for (unsigned i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        memset(value, 'a' + (int)i, sizeof(value));
        assert_int_equal(
            pwrite(fd, value, keys[i].place[1], (off_t)(keys[i].place[0] - 1) * 4096),
            keys[i].place[1]);
        put(queue, KV_DISK_ROWS, keys[i].key, keys[i].place, sizeof(keys[i].place));
    }
    close(fd);
    disk->ops->queue_close(queue);
    kv_disk_close(disk);

    disk = make(layout);
    queue = open_queue(disk);
    for (unsigned i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        memset(value, 'a' + (int)i, sizeof(value));
        expect(queue, KV_DISK_ROWS, keys[i].key, value, keys[i].place[1]);
    }
    disk->ops->queue_close(queue);
    kv_disk_close(disk);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(values_come_back, set_up, tear_down),
        cmocka_unit_test_setup_teardown(scans_are_in_order, set_up, tear_down),
        cmocka_unit_test_setup_teardown(order_is_kept, set_up, tear_down),
        cmocka_unit_test_setup_teardown(closing_calls_nobody, set_up, tear_down),
        cmocka_unit_test_setup_teardown(usage_is_told, set_up, tear_down),
        cmocka_unit_test_setup_teardown(callbacks_may_start_more, set_up, tear_down),
        cmocka_unit_test_setup_teardown(is_what_an_array_is, set_up, tear_down),
        cmocka_unit_test_setup_teardown(survives_a_kill, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_is_wrong_is_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(keys_may_lead_nowhere, set_up, tear_down),
        cmocka_unit_test_setup_teardown(lost_keys_stop_the_rows, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_is_removed_leaves_the_file, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_file_of_the_first_version, set_up, tear_down),
    };
    int failed;

    if (argc == 3) {
        make = strcmp(argv[1], "extents") == 0 ? make_extents : make_rocksdb;
        layout = make == make_extents ? KV_DISK_LAYOUT_KEYS : argv[1];
        snprintf(folder, sizeof(folder), "%s", argv[2]);
        return be_killed();
    }
    make = make_memory;
    layout = "memory";
    failed = cmocka_run_group_tests_name("memory", tests, NULL, NULL);
    make = make_simulated;
    layout = "simulated";
    failed += cmocka_run_group_tests_name(layout, tests, NULL, NULL);
    make = make_lost_extents;
    layout = "extents";
    failed += cmocka_run_group_tests_name("extents over memory", tests, NULL, NULL);
    if (kv_disk_rocksdb_layout(0) == NULL)
        return failed;
    lasts = true;
    make = make_extents;
    layout = KV_DISK_LAYOUT_KEYS;
    failed += cmocka_run_group_tests_name("extents", tests, NULL, NULL);
    make = make_rocksdb;
    for (unsigned i = 0; kv_disk_rocksdb_layout(i) != NULL; i++) {
        layout = kv_disk_rocksdb_layout(i)->name;
        failed += cmocka_run_group_tests_name(layout, tests, NULL, NULL);
    }
    return failed;
}
