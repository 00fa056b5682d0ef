#define _GNU_SOURCE /* memfd_create, fallocate */
#include "kvserver/net/ucx/memory_file.h"

#include "kvserver/base/hash.h"
#include "kvserver/base/memory.h"
#include "kvserver/base/random.h"
#include "kvserver/base/thread.h"

#include <assert.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

enum {
    PAGE_BYTES = 4096,
    HUGE_PAGE = 2 << 20,
    PROVIDED_MAX = 256 << 20,
};

#ifndef MADV_COLLAPSE /* Linux 6.1 */
#define MADV_COLLAPSE 25
#endif

/* Of the file: more than the memory of a host, where the process may have so many addresses. */
static const size_t bytes_max = (size_t)1 << 40;
static const size_t bytes_min = (size_t)64 << 20;

struct kv_memory_file_piece {
    struct kv_memory_file_piece *next;
    size_t from, bytes; /* in the file */
};

static size_t round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

void kv_memory_file_init(struct kv_memory_file *file)
{
    *file = (struct kv_memory_file){.fd = -1, .lock = kv_lock_create()};
    file->has_failed = file->lock == NULL;
}

/* The process that was forked must leave the pages to the other one. */
static bool is_mine(const struct kv_memory_file *file)
{
    return file->process == (int)getpid();
}

void kv_memory_file_fini(struct kv_memory_file *file)
{
    const uintptr_t base = atomic_load(&file->base);

    while (file->pieces != NULL)
        kv_memory_file_free(file, (void *)(base + file->pieces->from));
    if (base != 0)
        munmap((void *)base, file->bytes);
    if (file->fd >= 0)
        close(file->fd);
    if (file->lock != NULL)
        kv_lock_destroy(file->lock);
}

/* Takes addresses that nothing else will have; no memory. */
static void *reserve(size_t *ret_bytes)
{
    for (size_t bytes = bytes_max; bytes >= bytes_min; bytes /= 2) {
        char *raw = mmap(NULL, bytes + HUGE_PAGE, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        char *base;

        if (raw == MAP_FAILED)
            continue;
        base = (char *)round_up((uintptr_t)raw, HUGE_PAGE);
        if (base > raw)
            munmap(raw, (size_t)(base - raw));
        munmap(base + bytes, (size_t)(raw + HUGE_PAGE - base));
        *ret_bytes = bytes;
        return base;
    }
    return NULL;
}

/* A file beyond the limit would not fail, but end the process by a signal. */
static bool may_have_file(size_t bytes)
{
    struct rlimit limit;

    return getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
           (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= bytes);
}

static bool prepare(int fd, size_t bytes, uintptr_t base)
{
    const struct kv_memory_file_head head = {KV_MEMORY_FILE_MAGIC, base};

    return may_have_file(bytes) && ftruncate(fd, (off_t)bytes) == 0 &&
           pwrite(fd, &head, sizeof(head), 0) == (ssize_t)sizeof(head) &&
           fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
}

static bool create(struct kv_memory_file *file)
{
    struct kv_random random;
    void *base = reserve(&file->bytes);

    if (base == NULL)
        return false;
    file->fd = memfd_create("topkv", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file->fd < 0 || !prepare(file->fd, file->bytes, (uintptr_t)base)) {
        if (file->fd >= 0)
            close(file->fd);
        file->fd = -1;
        munmap(base, file->bytes);
        return false;
    }
    kv_random_init_secure(&random);
    kv_random_fill(&random, &file->seed, sizeof(file->seed));
    file->process = (int)getpid();
    atomic_store_explicit(&file->base, (uintptr_t)base, memory_order_release);
    return true;
}

/* Returns the link after which there is room for the piece, and where. */
static struct kv_memory_file_piece **
find_room(struct kv_memory_file *file, size_t bytes, size_t *ret_from)
{
    const size_t unit = bytes >= HUGE_PAGE ? HUGE_PAGE : PAGE_BYTES;
    struct kv_memory_file_piece **link = &file->pieces;
    size_t from = KV_MEMORY_FILE_PIECES;

    while (*link != NULL && (from > (*link)->from || bytes > (*link)->from - from)) {
        from = round_up((*link)->from + (*link)->bytes, unit);
        link = &(*link)->next;
    }
    if (from > file->bytes || bytes > file->bytes - from)
        return NULL;
    *ret_from = from;
    return link;
}

static void *alloc(struct kv_memory_file *file, size_t bytes)
{
    const uintptr_t base = atomic_load(&file->base);
    size_t from;
    struct kv_memory_file_piece **link = find_room(file, bytes, &from);
    struct kv_memory_file_piece *piece;
    void *at;

    if (link == NULL)
        return NULL;
    piece = malloc(sizeof(*piece));
    if (piece == NULL)
        return NULL;
    at = mmap((void *)(base + from), bytes, PROT_READ | PROT_WRITE,
              MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file->fd, (off_t)from);
    if (at == MAP_FAILED) {
        free(piece);
        return NULL;
    }
    madvise(at, bytes, MADV_HUGEPAGE);
    madvise(at, bytes, MADV_DONTDUMP);
    *piece = (struct kv_memory_file_piece){.next = *link, .from = from, .bytes = bytes};
    *link = piece;
    return at;
}

void *kv_memory_file_alloc(struct kv_memory_file *file, size_t bytes)
{
    void *at = NULL;

    if (bytes == 0 || bytes > bytes_max || file->lock == NULL)
        return NULL;
    kv_lock_take(file->lock);
    if (atomic_load(&file->base) == 0 && !file->has_failed)
        file->has_failed = !create(file);
    if (!file->has_failed && is_mine(file))
        at = alloc(file, round_up(bytes, PAGE_BYTES));
    kv_lock_release(file->lock);
    return at;
}

void kv_memory_file_provide(void *piece, size_t bytes)
{
    char *at = piece;
    char *end = at + (bytes < PROVIDED_MAX ? bytes : PROVIDED_MAX);

    for (; end - at >= HUGE_PAGE && (uintptr_t)at % HUGE_PAGE == 0; at += HUGE_PAGE) {
        /* It makes one page of those that are there; there must be one. */
        kv_memory_provide(at, PAGE_BYTES);
        if (madvise(at, HUGE_PAGE, MADV_COLLAPSE) != 0)
            break;
    }
    if (at < end)
        kv_memory_provide(at, (size_t)(end - at));
}

void kv_memory_file_free(struct kv_memory_file *file, void *at)
{
    const size_t from = (uintptr_t)at - atomic_load(&file->base);
    struct kv_memory_file_piece **link = &file->pieces, *piece;

    kv_lock_take(file->lock);
    while (*link != NULL && (*link)->from != from)
        link = &(*link)->next;
    piece = *link;
    assert(piece != NULL);
    *link = piece->next;
    /* A peer that has the file open keeps no page of it that way. */
    if (is_mine(file))
        (void)fallocate(file->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from,
                        (off_t)piece->bytes);
    mmap(at, piece->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE,
         -1, 0);
    kv_lock_release(file->lock);
    free(piece);
}

uint64_t kv_memory_file_number(struct kv_memory_file *file)
{
    uint64_t number;

    /* kv_mix64() is a bijection, so numbers differ; one of them is 0. */
    do {
        number = kv_mix64(file->seed +
                          atomic_fetch_add_explicit(&file->n_numbers, 1, memory_order_relaxed));
    } while (number == 0);
    return number;
}
