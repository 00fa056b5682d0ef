/* limit_disk.c - what the disk writes and reads at best, as far as a program can ask: large pieces,
 * several at once, not through the system's memory. */
#define _GNU_SOURCE
#include "tests/bench/bench.h"

#include "kvserver/base/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    RAW_THREADS = 4,
    RAW_BYTES = 1 << 20,
};

struct raw_worker {
    int fd;
    uint64_t begin, end;
    uint8_t *bytes; /* (RAW_BYTES) */
    bool reads, failed;
};

static void raw_work(void *arg)
{
    struct raw_worker *worker = arg;

    for (uint64_t at = worker->begin; at < worker->end && !worker->failed; at += RAW_BYTES)
        worker->failed = (worker->reads ? pread(worker->fd, worker->bytes, RAW_BYTES, (off_t)at)
                                        : pwrite(worker->fd, worker->bytes, RAW_BYTES,
                                                 (off_t)at)) != RAW_BYTES;
}

/* All of the file, once.  Returns false if that failed. */
static bool raw_pass(int fd, uint64_t bytes, bool reads)
{
    struct raw_worker workers[RAW_THREADS] = {0};
    struct kv_thread *threads[RAW_THREADS] = {0};
    bool is_good = true;

    bytes /= RAW_THREADS;
    for (unsigned i = 0; i < RAW_THREADS && is_good; i++) {
        workers[i] = (struct raw_worker){
            .fd = fd, .begin = i * bytes, .end = (i + 1) * bytes, .reads = reads};
        is_good = posix_memalign((void **)&workers[i].bytes, 4096, RAW_BYTES) == 0;
        if (!is_good)
            break;
        bench_fill(workers[i].bytes, RAW_BYTES, i);
        is_good = kv_thread_start("raw", raw_work, &workers[i], &threads[i]) == KV_OK;
    }
    for (unsigned i = 0; i < RAW_THREADS; i++) {
        kv_thread_join(threads[i]);
        is_good = is_good && !workers[i].failed;
        free(workers[i].bytes);
    }
    return is_good;
}

bool bench_raw_disk(struct bench *bench, uint64_t bytes, bool reads, double *ret_rate)
{
    char path[PATH_MAX];
    bool is_good;
    double begin;
    int fd;

    snprintf(path, sizeof(path), "%s/raw", bench->folder);
    fd = open(path, O_CREAT | O_RDWR | O_DIRECT, 0600);
    if (fd < 0)
        fd = open(path, O_CREAT | O_RDWR | O_SYNC, 0600); /* in memory, as tmpfs is */
    if (fd < 0) {
        bench_complain("disk: cannot create: %s: %s", path, strerror(errno));
        return false;
    }
    bytes = bytes / RAW_THREADS / RAW_BYTES * RAW_THREADS * RAW_BYTES;
    begin = bench_now();
    is_good = raw_pass(fd, bytes, false) && fdatasync(fd) == 0;
    if (is_good && reads) {
        begin = bench_now();
        is_good = raw_pass(fd, bytes, true);
    }
    *ret_rate = (double)bytes / (bench_now() - begin) / 1e9;
    if (!is_good)
        bench_complain("disk: %s: %s", path, strerror(errno));
    close(fd);
    unlink(path);
    return is_good;
}
