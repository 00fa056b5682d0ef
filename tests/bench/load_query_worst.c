/* The other client of query.worst (worst_client.h).
 *
 * What it sends comes from memory that is never there when somebody reads it: its pages are
 * dropped again and again, and where the system lets a program answer its own page faults, each
 * answer comes late.  Whoever reads this memory waits, and be it the node's data thread.
 *
 * SIGTERM ends it in order, so that it leaves nothing in the node. */
#define _GNU_SOURCE
#include "tests/bench/bench.h"

#include "kvserver/base/thread.h"
#include "tests/support/worst_client.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    FAULT_BYTES = 64 << 10, /* that one answer brings */
    FAULT_LATE_US = 100,
    DROP_US = 1000,
};

static volatile sig_atomic_t must_stop;

static void on_stop(int number)
{
    (void)number;
    must_stop = 1;
}

/* ---- memory that is slow ----------------------------------------------------------------- */

struct slow_memory {
    uint8_t *base;
    size_t bytes;
    int faults; /* a userfaultfd; -1: the system answers page faults itself */
    _Atomic bool stop;
    struct kv_thread *thread;
};

/* Answers one page fault, late. */
static void answer(struct slow_memory *memory)
{
    struct uffd_msg message;
    struct uffdio_zeropage zero = {.range.len = FAULT_BYTES};

    if (read(memory->faults, &message, sizeof(message)) != sizeof(message) ||
        message.event != UFFD_EVENT_PAGEFAULT)
        return;
    usleep(FAULT_LATE_US);
    zero.range.start = message.arg.pagefault.address / FAULT_BYTES * FAULT_BYTES;
    if (ioctl(memory->faults, UFFDIO_ZEROPAGE, &zero) == 0 || errno == ENOENT)
        return;
    /* Some of them are there: then the one page, or whoever waits tries again. */
    zero = (struct uffdio_zeropage){
        .range = {message.arg.pagefault.address & ~(uint64_t)4095, 4096}};
    if (ioctl(memory->faults, UFFDIO_ZEROPAGE, &zero) != 0)
        ioctl(memory->faults, UFFDIO_WAKE, &zero.range);
}

static void slow_main(void *arg)
{
    struct slow_memory *memory = arg;
    double drop_at = 0;

    while (!atomic_load(&memory->stop)) {
        struct pollfd ready = {.fd = memory->faults, .events = POLLIN};

        if (bench_now() > drop_at) {
            madvise(memory->base, memory->bytes, MADV_DONTNEED);
            drop_at = bench_now() + DROP_US * 1e-6;
        }
        if (memory->faults < 0)
            usleep(DROP_US);
        else if (poll(&ready, 1, 1) > 0)
            answer(memory);
    }
}

/* A descriptor through which this program answers page faults of the memory; -1: it may not. */
static int open_faults(const struct slow_memory *memory)
{
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register range = {
        .range = {(uintptr_t)memory->base, memory->bytes},
        .mode = UFFDIO_REGISTER_MODE_MISSING,
    };
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);

    if (fd >= 0 &&
        (ioctl(fd, UFFDIO_API, &api) != 0 || ioctl(fd, UFFDIO_REGISTER, &range) != 0)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static bool open_slow(struct slow_memory *memory, size_t bytes)
{
    memory->bytes = bytes;
    memory->base =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory->base == MAP_FAILED)
        return false;
    madvise(memory->base, bytes, MADV_NOHUGEPAGE);
    memory->faults = open_faults(memory);
    return true;
}

static struct kv_buffer *open_memory(struct kv_client *client, struct slow_memory *memory)
{
    struct kv_buffer *buffer;

    return open_slow(memory, WORST_CLIENT_BYTES) &&
                   kv_buffer_map(client, memory->base, memory->bytes, KV_MEMORY_HOST,
                                 &buffer) == KV_OK &&
                   kv_thread_start("slow", slow_main, memory, &memory->thread) == KV_OK
               ? buffer
               : NULL;
}

int bench_worst_peer(const char *address, const char *transport)
{
    static struct slow_memory memory;
    struct bench_node node = {0};
    struct kv_client *client;
    struct kv_buffer *buffer;
    struct worst_client *worst;
    bool is_told = false;

    signal(SIGTERM, on_stop);
    snprintf(node.address, sizeof(node.address), "%s", address);
    client = bench_client_open(&node, transport);
    buffer = client != NULL ? open_memory(client, &memory) : NULL;
    worst = buffer != NULL ? worst_client_open(client, buffer) : NULL;
    if (worst == NULL)
        return 1;
    while (!must_stop) {
        worst_client_step(worst);
        if (!is_told && worst_client_is_at_work(worst)) {
            is_told = true;
            printf("at its worst\n");
            fflush(stdout);
        }
        kv_client_wait(client, 1000);
    }
    worst_client_leave(worst);
    worst_client_close(worst);
    kv_client_close(client);
    atomic_store(&memory.stop, true);
    kv_thread_join(memory.thread);
    return 0;
}
