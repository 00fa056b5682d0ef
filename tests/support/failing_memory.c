#include "tests/support/failing_memory.h"

#include <errno.h>
#include <execinfo.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

static _Atomic uint64_t n_calls, first;
static _Atomic bool all_after;
static bool traces;

void failing_memory_arm(uint64_t nth, bool and_on)
{
    atomic_store(&first, 0);
    atomic_store(&n_calls, 0);
    atomic_store(&all_after, and_on);
    atomic_store(&first, nth);
}

uint64_t failing_memory_calls(void)
{
    return atomic_load(&n_calls);
}

static bool fails(void)
{
    const uint64_t call = atomic_fetch_add(&n_calls, 1) + 1, nth = atomic_load(&first);

    if (nth == 0 || (atomic_load(&all_after) ? call < nth : call != nth))
        return false;
    if (traces && call == nth) {
        void *frames[16];

        backtrace_symbols_fd(frames, backtrace(frames, 16), 2);
    }
    errno = ENOMEM;
    return true;
}

#define WRAP(type, name, parameters, arguments)          \
    type __real_##name parameters;                       \
    type __wrap_##name parameters;                       \
    type __wrap_##name parameters                        \
    {                                                    \
        return fails() ? NULL : __real_##name arguments; \
    }

WRAP(void *, malloc, (size_t bytes), (bytes))
WRAP(void *, calloc, (size_t n, size_t bytes), (n, bytes))
WRAP(void *, realloc, (void *old, size_t bytes), (old, bytes))
WRAP(void *, aligned_alloc, (size_t alignment, size_t bytes), (alignment, bytes))
WRAP(char *, strdup, (const char *text), (text))
WRAP(char *, strndup, (const char *text, size_t bytes), (text, bytes))
WRAP(FILE *, open_memstream, (char **text, size_t *bytes), (text, bytes))

void *failing_memory_sure(size_t n, size_t bytes)
{
    void *memory = __real_calloc(n > 0 ? n : 1, bytes > 0 ? bytes : 1);

    if (memory == NULL) {
        fprintf(stderr, "test: out of memory: %zu times %zu bytes\n", n, bytes);
        abort();
    }
    return memory;
}

void *__real_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    return fails() ? MAP_FAILED : __real_mmap(at, bytes, protection, flags, fd, offset);
}

int __real_pthread_create(pthread_t *thread,
                          const pthread_attr_t *attributes,
                          void *(*run)(void *),
                          void *arg);
int __wrap_pthread_create(pthread_t *thread,
                          const pthread_attr_t *attributes,
                          void *(*run)(void *),
                          void *arg);
int __wrap_pthread_create(pthread_t *thread,
                          const pthread_attr_t *attributes,
                          void *(*run)(void *),
                          void *arg)
{
    return fails() ? EAGAIN : __real_pthread_create(thread, attributes, run, arg);
}

__attribute__((constructor)) static void read_environment(void)
{
    const char *text = getenv("KV_FAIL_MEMORY");
    char *end;

    traces = getenv("KV_FAIL_MEMORY_TRACE") != NULL;
    if (text != NULL) {
        const uint64_t nth = strtoull(text, &end, 10);

        failing_memory_arm(nth, *end == '+');
    }
}

__attribute__((destructor)) static void write_calls(void)
{
    const char *path = getenv("KV_FAIL_MEMORY_FILE");
    FILE *file = path != NULL ? fopen(path, "w") : NULL;

    if (file == NULL)
        return;
    fprintf(file, "%llu\n", (unsigned long long)failing_memory_calls());
    fclose(file);
}
