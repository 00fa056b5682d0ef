#include "kvserver/base/memory.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    HUGE_PAGE = 2 << 20
};

void *kv_memory_reserve(size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t padded = bytes + page + HUGE_PAGE;

    if (padded < bytes)
        return NULL;
    bytes = (bytes + page - 1) / page * page;
    char *raw = mmap(NULL, padded, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED)
        return NULL;

    /* Align to 2 MiB and unmap what is before and after. */
    char *base = (char *)(((uintptr_t)raw + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    if (base > raw)
        munmap(raw, (size_t)(base - raw));
    if (raw + padded > base + bytes)
        munmap(base + bytes, (size_t)(raw + padded - (base + bytes)));
    madvise(base, bytes, MADV_HUGEPAGE);
    madvise(base, bytes, MADV_DONTDUMP);
    return base;
}

void kv_memory_release(void *base, size_t bytes)
{
    if (base != NULL)
        munmap(base, bytes);
}

void kv_memory_provide(void *from, size_t bytes)
{
#ifdef MADV_POPULATE_WRITE
    madvise(from, bytes, MADV_POPULATE_WRITE);
#else
    (void)from;
    (void)bytes;
#endif
}

void kv_memory_drop(void *from, size_t bytes)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = ((uintptr_t)from + page - 1) & ~(page - 1);
    const uintptr_t end = ((uintptr_t)from + bytes) & ~(page - 1);

    if (begin < end)
        madvise((void *)begin, end - begin, MADV_DONTNEED);
}

static uint64_t group_limit(const char *path)
{
    unsigned long long limit = 0;
    FILE *file = fopen(path, "r");

    if (file == NULL)
        return UINT64_MAX;
    int n = fscanf(file, "%llu", &limit);
    fclose(file);
    return n == 1 && limit > 0 ? limit : UINT64_MAX;
}

uint64_t kv_memory_total(void)
{
    uint64_t total = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t v2 = group_limit("/sys/fs/cgroup/memory.max");
    uint64_t v1 = group_limit("/sys/fs/cgroup/memory/memory.limit_in_bytes");

    total = v2 < total ? v2 : total;
    return v1 < total ? v1 : total;
}
