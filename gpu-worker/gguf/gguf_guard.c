#include "gpu-worker/gguf/gguf_guard.h"

#include "gpu-worker/gguf/gguf.h"

#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

/* The table is lock-free because the signal handler reads it: a handler must not take a lock
 * that the interrupted thread may have.  An entry is claimed by setting `begin` from NULL, and
 * valid once `path` is set; `bytes` is written between the two. */
static struct {
    _Atomic(const char *) begin;
    size_t bytes;
    _Atomic(const char *) path;
} guarded[KVW_GGUF_GUARDED_MAX];

static const char *guard_program;
static struct sigaction previous;

void kvw_gguf_guard_add(const void *data, size_t bytes, const char *path)
{
    for (size_t i = 0; i < KVW_GGUF_GUARDED_MAX; i++) {
        const char *none = NULL;

        if (atomic_compare_exchange_strong(&guarded[i].begin, &none, data)) {
            guarded[i].bytes = bytes;
            atomic_store(&guarded[i].path, path);
            return;
        }
    }
}

void kvw_gguf_guard_remove(const void *data)
{
    for (size_t i = 0; i < KVW_GGUF_GUARDED_MAX; i++) {
        if (atomic_load(&guarded[i].begin) == data) {
            atomic_store(&guarded[i].path, NULL);
            atomic_store(&guarded[i].begin, NULL);
            return;
        }
    }
}

/* Async-signal-safe, unlike stdio. */
static void print(const char *text)
{
    if (write(STDERR_FILENO, text, strlen(text)) < 0)
        return;
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    (void)context;
    for (size_t i = 0; i < KVW_GGUF_GUARDED_MAX; i++) {
        const char *begin = atomic_load(&guarded[i].begin);
        const char *path = atomic_load(&guarded[i].path);
        const char *at = info->si_addr;

        /* Only signals from the kernel, with codes above 0, have si_addr. */
        if (info->si_code <= 0 || path == NULL || at < begin || at >= begin + guarded[i].bytes)
            continue;
        print(guard_program);
        print(": model file changed or unreadable while in use: ");
        print(path);
        print("\n");
        _exit(1);
    }
    /* Any other fault: restores the previous handler and returns, so that the instruction
     * faults again.  A signal that another process sent does not repeat, and is raised
     * again. */
    sigaction(SIGBUS, &previous, NULL);
    if (info->si_code <= 0)
        raise(number);
}

void kvw_gguf_guard(const char *program)
{
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO};

    guard_program = program;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &previous);
}
