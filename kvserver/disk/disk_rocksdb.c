/* disk_rocksdb.c - a disk in RocksDB: the only file that knows it.
 *
 *     queue -- ring --> the writer     gathers what is queued into one batch
 *                       the syncer     flushes rows beside the writer; the log is theirs in turn
 *                       the readers    a read each: one at a time would leave a disk idle
 *           <- ring --  what is done
 *
 * Each space is a column family.  That of rows has no log, and its memory is flushed by a sync: a
 * log would be every row written twice.  Where rows are some bytes each, that would be a small file for
 * each sync, and all of these compacted: there is a log for them.  Rows have checksums of their own,
 * which whoever reads them compares; so where rows are in blob files, whose checksums Debian's build
 * computes slowly, RocksDB does not verify what it reads of them.
 *
 * Debian's build ends the process (an assertion) when a file is written to again after that has failed: its
 * log, which a sync touches while writes are refused, or the text file of its messages, one of which each
 * sync is.  So the log is written and synced in turn, neither after one of them has failed; nothing is
 * begun where little room is left (free_space.h); and it has hardly any messages. */
#include "kvserver/disk/disk.h"

#include "kvserver/base/log.h"
#include "kvserver/base/ring.h"
#include "kvserver/base/thread.h"
#include "kvserver/disk/free_space.h"

#include <errno.h>
#include <rocksdb/c.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
    READERS = 8,
    WRITER = READERS,
    SYNCER,
    WORKERS,
    RING_TASKS = 8 * KV_DISK_QUEUE_MAX,
    GATHER_TASKS = 64, /* written at once */
    GATHER_BYTES = 8 << 20,
    SLEEP_US = 1000000,
    CLOSE_US = 1000, /* between two looks at what is under way */
    BUFFER_BYTES = 64 << 20,
    BUFFERS = 4,
    LOG_BYTES = 16 << 20,     /* of what is logged, before it is flushed */
    TEXT_LOG_BYTES = 1 << 20, /* of RocksDB's messages, twice */
    TEXT_LOG_LEVEL = 4,       /* fatal: beside what it says when it is opened */
    SYNC_BYTES = 1 << 20,     /* given to the disk at once, not gathered by the system */
    FILTER_BITS = 10,
};

struct layout {
    struct kv_disk_layout base;
    int compaction;
    bool has_blobs;
    bool is_bounded; /* drops its oldest files at a size */
    bool is_logged;  /* rows are logged, too: a sync need not flush them */
};

static const struct layout layouts[] = {
    {.base = {"level", "levelled compaction"}, .compaction = rocksdb_level_compaction},
    {.base = {"universal", "universal compaction"}, .compaction = rocksdb_universal_compaction},
    {.base = {"fifo", "no compaction: the oldest files are dropped at a size"},
     .compaction = rocksdb_fifo_compaction,
     .is_bounded = true},
    {.base = {"blob", "levelled compaction of keys, values in blob files"},
     .compaction = rocksdb_level_compaction,
     .has_blobs = true},
    {.base = {KV_DISK_LAYOUT_KEYS, "levelled compaction, and a log: for small values"},
     .compaction = rocksdb_level_compaction,
     .is_logged = true},
};
enum {
    LAYOUTS = sizeof(layouts) / sizeof(layouts[0])
};

struct rocks_disk;

struct rocks_queue {
    struct kv_disk_queue base;
    struct kv_ring *ended;
    unsigned n_under_way;
    _Atomic unsigned n_ending; /* tasks that workers are handing back */
    void (*wake)(void *arg);
    void *wake_arg;
};

enum task_kind {
    TASK_WRITE,
    TASK_READ,
    TASK_SYNC,
};

struct task {
    struct rocks_queue *queue;
    enum task_kind kind;
    enum kv_disk_space space;
    kv_disk_done_fn done;
    void *arg;
    kv_status_t status;
    size_t bytes; /* write: of all values; read: the value's */
    void *value;  /* read: where to */
    size_t room;
    unsigned n;
    struct kv_disk_write writes[]; /* (n) then their keys; of a read, the key alone */
};

struct worker {
    struct rocks_disk *disk;
    struct kv_ring *tasks;
    struct kv_signal *signal;
    struct kv_thread *thread;
    struct task *next; /* the writer's: popped, and not for the batch that was being gathered */
};

struct rocks_disk {
    struct kv_disk base;
    rocksdb_t *db;
    rocksdb_options_t *options[KV_DISK_SPACES];
    rocksdb_column_family_handle_t *families[KV_DISK_SPACES];
    rocksdb_writeoptions_t *write_options[KV_DISK_SPACES];
    rocksdb_readoptions_t *read_options[KV_DISK_SPACES];
    rocksdb_flushoptions_t *flush_options; /* NULL: rows are logged */
    struct worker workers[WORKERS];
    _Atomic bool stopping;
    struct kv_lock *log_lock; /* whoever has it writes to the log, or syncs it */
    _Atomic bool is_broken; /* a write or a sync has failed; set before log_lock is released */
    _Atomic unsigned turn;  /* of readers */
    char *folder;
};

/* Logs an error, unless there is none, and frees it. */
static kv_status_t outcome(const char *what, char *error)
{
    kv_status_t status;

    if (error == NULL)
        return KV_OK;
    KV_LOG_EVERY(KV_LOG_ERROR, "disk: %s: %s", what, error);
    /* The C API gives only the message. */
    status = strstr(error, "No space left") != NULL ? KV_NO_MEMORY : KV_IO;
    rocksdb_free(error);
    return status;
}

/* ---- workers ------------------------------------------------------------------------------ */

/* Hands a task back to its queue, which may be closed as soon as that is done. */
static void end(struct task *task, kv_status_t status)
{
    struct rocks_queue *queue = task->queue;

    task->status = status;
    atomic_fetch_add(&queue->n_ending, 1);
    /* As many fit as may be under way. */
    (void)kv_ring_push(queue->ended, task);
    if (queue->wake != NULL)
        queue->wake(queue->wake_arg);
    atomic_fetch_sub(&queue->n_ending, 1);
}

static void run_read(struct rocks_disk *disk, struct task *task)
{
    char *error = NULL;
    rocksdb_pinnableslice_t *slice = rocksdb_get_pinned_cf(
        disk->db, disk->read_options[task->space], disk->families[task->space],
        task->writes[0].key, task->writes[0].key_bytes, &error);

    if (slice == NULL) {
        end(task, error != NULL ? outcome("read", error) : KV_NOT_FOUND);
        return;
    }
    const char *value = rocksdb_pinnableslice_value(slice, &task->bytes);
    const size_t n = task->bytes < task->room ? task->bytes : task->room;
    if (n > 0)
        memcpy(task->value, value, n);
    rocksdb_pinnableslice_destroy(slice);
    end(task, KV_OK);
}

/* Logs and frees the error of a write or a sync, if there is one: RocksDB cannot go on after it. */
static kv_status_t outcome_of_write(struct rocks_disk *disk, const char *what, char *error)
{
    const kv_status_t status = outcome(what, error);

    if (status != KV_OK && !atomic_exchange(&disk->is_broken, true))
        kv_log(KV_LOG_ERROR,
               "disk: %s: nothing is written any more until the node is started again",
               disk->folder);
    return status;
}

/* Returns KV_OK, or why nothing can be written now. */
static kv_status_t check_writable(struct rocks_disk *disk)
{
    if (atomic_load(&disk->is_broken))
        return KV_IO;
    const uint64_t free_bytes = kv_free_space(disk->folder);

    if (free_bytes >= KV_FREE_FOR_KEYS)
        return KV_OK;
    KV_LOG_EVERY(KV_LOG_ERROR,
                 "disk: %s: the file system is full: %llu MiB are free, of which %d are kept",
                 disk->folder, (unsigned long long)(free_bytes >> 20), KV_FREE_FOR_KEYS >> 20);
    return KV_NO_MEMORY;
}

static void run_sync(struct rocks_disk *disk, struct task *task)
{
    char *error = NULL;
    kv_status_t status;

    if (disk->flush_options != NULL && !atomic_load(&disk->is_broken))
        rocksdb_flush_cf(disk->db, disk->flush_options, disk->families[KV_DISK_ROWS], &error);
    status = outcome_of_write(disk, "flush", error);
    error = NULL;
    kv_lock_take(disk->log_lock);
    if (status == KV_OK && atomic_load(&disk->is_broken))
        status = KV_IO;
    if (status == KV_OK) {
        rocksdb_flush_wal(disk->db, 1, &error);
        status = outcome_of_write(disk, "sync", error);
    }
    kv_lock_release(disk->log_lock);
    end(task, status);
}

static void add_to(rocksdb_writebatch_t *batch,
                   rocksdb_column_family_handle_t *family,
                   const struct task *task)
{
    for (unsigned i = 0; i < task->n; i++) {
        const struct kv_disk_write *write = &task->writes[i];

        const char *const key = write->key, *const pieces[] = {write->value, write->tail};
        const size_t sizes[] = {write->value_bytes, write->tail_bytes};

        if (write->value == NULL)
            rocksdb_writebatch_delete_cf(batch, family, key, write->key_bytes);
        else
            rocksdb_writebatch_putv_cf(batch, family, 1, &key, &write->key_bytes,
                                       write->tail_bytes > 0 ? 2 : 1, pieces, sizes);
    }
}

static kv_status_t write_batch(struct rocks_disk *disk, struct task *const *tasks, unsigned n)
{
    const enum kv_disk_space space = tasks[0]->space;
    const bool is_logged = space == KV_DISK_RECORDS || disk->flush_options == NULL;
    rocksdb_writebatch_t *batch = rocksdb_writebatch_create();
    char *error = NULL;
    kv_status_t status;

    for (unsigned i = 0; i < n; i++)
        add_to(batch, disk->families[space], tasks[i]);
    if (is_logged)
        kv_lock_take(disk->log_lock);
    status = check_writable(disk);
    if (status == KV_OK) {
        rocksdb_write(disk->db, disk->write_options[space], batch, &error);
        status = outcome_of_write(disk, "write", error);
    }
    if (is_logged)
        kv_lock_release(disk->log_lock);
    rocksdb_writebatch_destroy(batch);
    return status;
}

/* Writes the task, and those behind it of the same space, as one batch; if that fails, each by
 * itself. */
static void run_writes(struct rocks_disk *disk, struct worker *writer, struct task *first)
{
    struct task *tasks[GATHER_TASKS] = {first}, *task;
    size_t bytes = first->bytes;
    unsigned n = 1;
    kv_status_t status;

    while ((task = kv_ring_pop(writer->tasks)) != NULL) {
        if (task->space != first->space || n == GATHER_TASKS ||
            bytes + task->bytes > GATHER_BYTES) {
            writer->next = task;
            break;
        }
        bytes += task->bytes;
        tasks[n++] = task;
    }
    status = write_batch(disk, tasks, n);
    for (unsigned i = 0; i < n; i++)
        end(tasks[i], status == KV_OK || n == 1 ? status : write_batch(disk, &tasks[i], 1));
}

static struct task *next_of(struct worker *worker)
{
    struct task *task = worker->next;

    worker->next = NULL;
    return task != NULL ? task : kv_ring_pop(worker->tasks);
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
                run_writes(worker->disk, worker, task);
            else if (task->kind == TASK_READ)
                run_read(worker->disk, task);
            else
                run_sync(worker->disk, task);
        }
        if (atomic_load(&worker->disk->stopping))
            return;
        kv_sleep_fds(&fd, 1, SLEEP_US);
    }
}

static kv_status_t give(struct worker *worker, struct task *task)
{
    struct rocks_queue *queue = task->queue;

    if (queue->n_under_way == KV_DISK_QUEUE_MAX || !kv_ring_push(worker->tasks, task)) {
        free(task);
        return KV_BUSY;
    }
    queue->n_under_way++;
    kv_signal_raise(worker->signal);
    return KV_OK;
}

/* ---- the table ---------------------------------------------------------------------------- */

static kv_status_t queue_open(struct kv_disk *disk,
                              void (*wake)(void *arg),
                              void *arg,
                              struct kv_disk_queue **ret_queue)
{
    struct rocks_queue *queue = calloc(1, sizeof(*queue));

    if (queue != NULL)
        queue->ended = kv_ring_create(KV_DISK_QUEUE_MAX);
    if (queue == NULL || queue->ended == NULL) {
        free(queue);
        return KV_NO_MEMORY;
    }
    queue->base.disk = disk;
    queue->wake = wake;
    queue->wake_arg = arg;
    *ret_queue = &queue->base;
    return KV_OK;
}

static void queue_close(struct kv_disk_queue *base)
{
    struct rocks_queue *queue = (struct rocks_queue *)base;
    struct task *task;

    for (;;) {
        while ((task = kv_ring_pop(queue->ended)) != NULL) {
            queue->n_under_way--;
            free(task);
        }
        if (queue->n_under_way == 0 && atomic_load(&queue->n_ending) == 0)
            break;
        kv_sleep_fds(NULL, 0, CLOSE_US);
    }
    kv_ring_destroy(queue->ended);
    free(queue);
}

/* Returns a task with room for n keys of so many bytes together. */
static struct task *
task_create(struct kv_disk_queue *queue, enum task_kind kind, unsigned n, size_t keys_bytes)
{
    const size_t bytes = sizeof(struct task) + n * sizeof(struct kv_disk_write);
    struct task *task = malloc(bytes + keys_bytes);

    if (task == NULL)
        return NULL;
    memset(task, 0, bytes);
    task->queue = (struct rocks_queue *)queue;
    task->kind = kind;
    task->n = n;
    return task;
}

static kv_status_t write_keys(struct kv_disk_queue *queue,
                              enum kv_disk_space space,
                              const struct kv_disk_write *writes,
                              unsigned n,
                              kv_disk_done_fn done,
                              void *arg)
{
    struct rocks_disk *disk = (struct rocks_disk *)queue->disk;
    size_t keys_bytes = 0;

    for (unsigned i = 0; i < n; i++)
        keys_bytes += writes[i].key_bytes;
    struct task *task = task_create(queue, TASK_WRITE, n, keys_bytes);
    if (task == NULL)
        return KV_NO_MEMORY;
    char *keys = (char *)&task->writes[n];
    for (unsigned i = 0; i < n; i++) {
        task->writes[i] = writes[i];
        task->writes[i].key = memcpy(keys, writes[i].key, writes[i].key_bytes);
        task->bytes += writes[i].value_bytes + writes[i].tail_bytes;
        keys += writes[i].key_bytes;
    }
    task->space = space;
    task->done = done;
    task->arg = arg;
    return give(&disk->workers[WRITER], task);
}

static kv_status_t read_key(struct kv_disk_queue *queue,
                            enum kv_disk_space space,
                            const void *key,
                            size_t key_bytes,
                            void *value,
                            size_t room,
                            kv_disk_done_fn done,
                            void *arg)
{
    struct rocks_disk *disk = (struct rocks_disk *)queue->disk;
    struct task *task = task_create(queue, TASK_READ, 1, key_bytes);

    if (task == NULL)
        return KV_NO_MEMORY;
    task->writes[0].key = memcpy(&task->writes[1], key, key_bytes);
    task->writes[0].key_bytes = key_bytes;
    task->space = space;
    task->value = value;
    task->room = room;
    task->done = done;
    task->arg = arg;
    return give(&disk->workers[atomic_fetch_add(&disk->turn, 1) % READERS], task);
}

static kv_status_t sync_all(struct kv_disk_queue *queue, kv_disk_done_fn done, void *arg)
{
    struct rocks_disk *disk = (struct rocks_disk *)queue->disk;
    struct task *task = task_create(queue, TASK_SYNC, 0, 0);

    if (task == NULL)
        return KV_NO_MEMORY;
    task->done = done;
    task->arg = arg;
    return give(&disk->workers[SYNCER], task);
}

static unsigned progress(struct kv_disk_queue *base)
{
    struct rocks_queue *queue = (struct rocks_queue *)base;
    const unsigned n_before = queue->n_under_way;
    struct task *task;
    unsigned n = 0;

    /* What the callbacks start is for a later call. */
    while (n < n_before && (task = kv_ring_pop(queue->ended)) != NULL) {
        queue->n_under_way--;
        if (task->done != NULL)
            task->done(task->arg, task->status, task->bytes);
        free(task);
        n++;
    }
    return n;
}

static kv_status_t scan(struct kv_disk *base,
                        enum kv_disk_space space,
                        const void *prefix,
                        size_t prefix_bytes,
                        kv_disk_each_fn each,
                        void *arg)
{
    struct rocks_disk *disk = (struct rocks_disk *)base;
    rocksdb_iterator_t *iterator =
        rocksdb_create_iterator_cf(disk->db, disk->read_options[space], disk->families[space]);
    char *error = NULL;

    for (rocksdb_iter_seek(iterator, prefix, prefix_bytes); rocksdb_iter_valid(iterator);
         rocksdb_iter_next(iterator)) {
        size_t key_bytes, value_bytes;
        const char *key = rocksdb_iter_key(iterator, &key_bytes);
        const char *value = rocksdb_iter_value(iterator, &value_bytes);

        if (key_bytes < prefix_bytes || memcmp(key, prefix, prefix_bytes) != 0)
            break;
        each(arg, key, key_bytes, value, value_bytes);
    }
    rocksdb_iter_get_error(iterator, &error);
    rocksdb_iter_destroy(iterator);
    return outcome("scan", error);
}

static uint64_t
property(const struct rocks_disk *disk, enum kv_disk_space space, const char *name)
{
    uint64_t value = 0;

    return rocksdb_property_int_cf(disk->db, disk->families[space], name, &value) == 0 ? value
                                                                                       : 0;
}

static void usage(const struct kv_disk *base, struct kv_disk_usage *ret_usage)
{
    const struct rocks_disk *disk = (const struct rocks_disk *)base;

    *ret_usage = (struct kv_disk_usage){0};
    for (unsigned space = 0; space < KV_DISK_SPACES; space++) {
        ret_usage->bytes += property(disk, space, "rocksdb.total-sst-files-size") +
                            property(disk, space, "rocksdb.total-blob-file-size");
        ret_usage->live_bytes += property(disk, space, "rocksdb.estimate-live-data-size");
        /* Of these the log has a copy. */
        if (disk->flush_options == NULL)
            ret_usage->bytes += property(disk, space, "rocksdb.cur-size-all-mem-tables");
    }
}

/* ---- open and close ----------------------------------------------------------------------- */

static void close_disk(struct kv_disk *base)
{
    struct rocks_disk *disk = (struct rocks_disk *)base;

    atomic_store(&disk->stopping, true);
    for (unsigned i = 0; i < WORKERS; i++) {
        if (disk->workers[i].thread != NULL)
            kv_signal_raise(disk->workers[i].signal);
        kv_thread_join(disk->workers[i].thread);
        kv_signal_destroy(disk->workers[i].signal);
        kv_ring_destroy(disk->workers[i].tasks);
    }
    for (unsigned space = 0; space < KV_DISK_SPACES; space++) {
        if (disk->families[space] != NULL)
            rocksdb_column_family_handle_destroy(disk->families[space]);
    }
    /* Flushes what is left. */
    if (disk->db != NULL)
        rocksdb_close(disk->db);
    for (unsigned space = 0; space < KV_DISK_SPACES; space++) {
        if (disk->options[space] != NULL)
            rocksdb_options_destroy(disk->options[space]);
        if (disk->write_options[space] != NULL)
            rocksdb_writeoptions_destroy(disk->write_options[space]);
        if (disk->read_options[space] != NULL)
            rocksdb_readoptions_destroy(disk->read_options[space]);
    }
    if (disk->flush_options != NULL)
        rocksdb_flushoptions_destroy(disk->flush_options);
    kv_lock_destroy(disk->log_lock);
    free(disk->folder);
    free(disk);
}

static const struct kv_disk_ops rocksdb_ops = {
    .name = "rocksdb",
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

static rocksdb_options_t *family_options(void)
{
    rocksdb_options_t *options = rocksdb_options_create();
    rocksdb_block_based_table_options_t *table = rocksdb_block_based_options_create();

    /* Who reads a value keeps it: a cache would hold it twice. */
    rocksdb_block_based_options_set_no_block_cache(table, 1);
    rocksdb_block_based_options_set_filter_policy(
        table, rocksdb_filterpolicy_create_bloom_full(FILTER_BITS));
    rocksdb_options_set_block_based_table_factory(options, table);
    rocksdb_block_based_options_destroy(table);
    rocksdb_options_set_compression(options, rocksdb_no_compression);
    return options;
}

/* Of the family of records, and of the database as a whole. */
static rocksdb_options_t *records_options(void)
{
    rocksdb_options_t *options = family_options();
    const unsigned cores = kv_thread_cores();

    rocksdb_options_set_create_if_missing(options, 1);
    rocksdb_options_set_create_missing_column_families(options, 1);
    rocksdb_options_set_max_background_jobs(options, cores < 2 ? 2 : (int)cores);
    rocksdb_options_set_bytes_per_sync(options, SYNC_BYTES);
    rocksdb_options_set_max_total_wal_size(options, LOG_BYTES);
    rocksdb_options_set_keep_log_file_num(options, 2);
    rocksdb_options_set_max_log_file_size(options, TEXT_LOG_BYTES);
    rocksdb_options_set_info_log_level(options, TEXT_LOG_LEVEL);
    return options;
}

static rocksdb_options_t *rows_options(const struct layout *layout, uint64_t bytes_max)
{
    rocksdb_options_t *options = family_options();

    rocksdb_options_set_write_buffer_size(options,
                                          layout->is_logged ? LOG_BYTES : BUFFER_BYTES);
    rocksdb_options_set_max_write_buffer_number(options, BUFFERS);
    rocksdb_options_set_target_file_size_base(options, BUFFER_BYTES);
    rocksdb_options_set_max_bytes_for_level_base(options, 8ull * BUFFER_BYTES);
    rocksdb_options_set_compaction_style(options, layout->compaction);
    if (layout->is_bounded) {
        rocksdb_fifo_compaction_options_t *fifo = rocksdb_fifo_compaction_options_create();

        rocksdb_fifo_compaction_options_set_max_table_files_size(
            fifo, bytes_max > 0 ? bytes_max : UINT64_MAX);
        rocksdb_options_set_fifo_compaction_options(options, fifo);
        rocksdb_fifo_compaction_options_destroy(fifo);
    }
    if (layout->has_blobs) {
        rocksdb_options_set_enable_blob_files(options, 1);
        rocksdb_options_set_min_blob_size(options, 1024);
        rocksdb_options_set_enable_blob_gc(options, 1);
    }
    return options;
}

static const struct layout *layout_of(const char *name)
{
    for (unsigned i = 0; i < LAYOUTS; i++)
        if (name == NULL || strcmp(layouts[i].base.name, name) == 0)
            return &layouts[i];
    return NULL;
}

const struct kv_disk_layout *kv_disk_rocksdb_layout(unsigned number)
{
    return number < LAYOUTS ? &layouts[number].base : NULL;
}

static kv_status_t open_db(struct rocks_disk *disk,
                           const char *folder,
                           const struct layout *layout,
                           uint64_t bytes_max,
                           char *detail,
                           size_t detail_bytes)
{
    /* RocksDB requires a family named default. */
    static const char *const names[KV_DISK_SPACES] = {"default", "rows"};
    /* By default files of 30 days are dropped, or written again. */
    static const char *const no_age[] = {"ttl", "periodic_compaction_seconds"};
    static const char *const zeros[] = {"0", "0"};
    char *error = NULL;

    disk->options[KV_DISK_RECORDS] = records_options();
    disk->options[KV_DISK_ROWS] = rows_options(layout, bytes_max);
    for (unsigned space = 0; space < KV_DISK_SPACES; space++) {
        disk->write_options[space] = rocksdb_writeoptions_create();
        disk->read_options[space] = rocksdb_readoptions_create();
    }
    if (!layout->is_logged) {
        rocksdb_writeoptions_disable_WAL(disk->write_options[KV_DISK_ROWS], 1);
        disk->flush_options = rocksdb_flushoptions_create();
    }
    rocksdb_readoptions_set_verify_checksums(disk->read_options[KV_DISK_ROWS],
                                             !layout->has_blobs);
    disk->db = rocksdb_open_column_families(
        disk->options[KV_DISK_RECORDS], folder, KV_DISK_SPACES, names,
        (const rocksdb_options_t *const *)disk->options, disk->families, &error);
    if (error == NULL)
        rocksdb_set_options_cf(disk->db, disk->families[KV_DISK_ROWS],
                               sizeof(no_age) / sizeof(no_age[0]), no_age, zeros, &error);
    if (error == NULL)
        return KV_OK;
    kv_log(KV_LOG_ERROR, "disk: %s: %s", folder, error);
    snprintf(detail, detail_bytes,
             "disk: %s: what is saved cannot be used: move it away to start without, or give "
             "--disk none to leave it as it is",
             folder);
    rocksdb_free(error);
    return KV_IO;
}

/* Opening needs room, too: for what the log has, and lists of files. */
static kv_status_t check_room(const char *folder, char *detail, size_t detail_bytes)
{
    const uint64_t free_bytes = kv_free_space(folder);

    if (free_bytes >= KV_FREE_FOR_KEYS)
        return KV_OK;
    snprintf(
        detail, detail_bytes,
        "disk: %s: %llu MiB of the file system are free, and %d are needed to save anything: "
        "make room, or give --disk none to leave what is saved as it is",
        folder, (unsigned long long)(free_bytes >> 20), KV_FREE_FOR_KEYS >> 20);
    return KV_NO_MEMORY;
}

static kv_status_t start_workers(struct rocks_disk *disk)
{
    for (unsigned i = 0; i < WORKERS; i++) {
        struct worker *worker = &disk->workers[i];
        kv_status_t status;

        worker->disk = disk;
        worker->tasks = kv_ring_create(RING_TASKS);
        worker->signal = kv_signal_create();
        if (worker->tasks == NULL || worker->signal == NULL)
            return KV_NO_MEMORY;
        status = kv_thread_start(i == WRITER   ? "kv-disk-write"
                                 : i == SYNCER ? "kv-disk-sync"
                                               : "kv-disk-read",
                                 work, worker, &worker->thread);
        if (status != KV_OK)
            return status;
    }
    return KV_OK;
}

kv_status_t kv_disk_rocksdb_open(const struct kv_disk_rocksdb_options *options,
                                 struct kv_disk **ret_disk,
                                 char *detail,
                                 size_t detail_bytes)
{
    const struct layout *layout = layout_of(options->layout);
    struct rocks_disk *disk;
    kv_status_t status;

    if (layout == NULL) {
        snprintf(detail, detail_bytes, "disk: unknown layout: %s", options->layout);
        return KV_INVALID;
    }
    disk = calloc(1, sizeof(*disk));
    if (disk != NULL) {
        disk->base.ops = &rocksdb_ops;
        disk->folder = strdup(options->folder);
        disk->log_lock = kv_lock_create();
    }
    if (disk == NULL || disk->folder == NULL || disk->log_lock == NULL) {
        snprintf(detail, detail_bytes, "disk: out of memory");
        kv_disk_close(disk != NULL ? &disk->base : NULL);
        return KV_NO_MEMORY;
    }
    if (mkdir(disk->folder, 0700) != 0 && errno != EEXIST) {
        snprintf(detail, detail_bytes, "disk: cannot create: %s: %s", disk->folder,
                 strerror(errno));
        close_disk(&disk->base);
        return KV_IO;
    }
    status = check_room(disk->folder, detail, detail_bytes);
    if (status == KV_OK)
        status =
            open_db(disk, options->folder, layout, options->bytes_max, detail, detail_bytes);
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
