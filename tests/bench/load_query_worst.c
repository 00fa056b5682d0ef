/* The other client of query.worst: it does what a client may do, as badly as it can.
 *
 *   rows     its credits are full of puts of a quarter of a megabyte and more, begun from the
 *            last to the first, so that the node must keep the later ones until the first comes
 *   index    then codes of all its rows, of the most expensive kind, and all of it again
 *   objects  two of 64 MiB at any time
 *
 * All of it is sent from memory that is never there when somebody reads it: its pages are
 * dropped again and again, and where the system lets a program answer its own page faults, each
 * answer comes late.  Whoever reads this memory waits, and be it the node's data thread.
 *
 * What fails is begun again: a client at its worst does not mind.  SIGTERM ends it in order, so
 * that it leaves nothing in the node. */
#define _GNU_SOURCE
#include "tests/bench/bench.h"

#include "kvserver/base/thread.h"

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
    OBJECT_BYTES = 64 << 20,
    N_OBJECTS = 2,
    N_SESSIONS = 2,
    N_LAYERS = 4,
    N_HEADS = 3,
    D = 64,
    PUT_TOKENS = 256,
    N_PUTS = 32, /* of a session, all in flight */
    PUT_BYTES = N_LAYERS * N_HEADS * PUT_TOKENS * D * 4,
    FAULT_BYTES = 64 << 10, /* that one answer brings */
    FAULT_LATE_US = 100,
    DROP_US = 1000,
    LEASE_MS = 10000,
    DEADLINE_MS = 10000,
    GOODBYE_MS = 3000,
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

/* ---- what it does ------------------------------------------------------------------------ */

/* One object: deleted and put, in turn. */
struct object_work {
    char name[32];
    struct kv_object object;
    struct kv_op *op;
    bool is_put;
};

/* One session: opened, filled, indexed, closed, in turn. */
enum rows_phase {
    ROWS_OPEN,
    ROWS_PUT,
    ROWS_INDEX,
    ROWS_CLOSE,
    N_ROWS_PHASES,
};

struct rows_work {
    enum rows_phase phase;
    struct kv_session *session;
    struct kv_op *ops[N_PUTS];
    unsigned n_ops;
};

struct worst {
    struct kv_client *client;
    struct kv_model_info model;
    struct slow_memory memory;
    struct kv_buffer *buffer;
    struct object_work objects[N_OBJECTS];
    struct rows_work rows[N_SESSIONS];
    bool has_object, has_index; /* begun so far */
};

/* Frees the operations if all have ended. */
static bool have_ended(struct kv_op **ops, unsigned *n_ops)
{
    for (unsigned i = 0; i < *n_ops; i++)
        if (kv_op_status(ops[i]) == KV_IN_PROGRESS)
            return false;
    for (unsigned i = 0; i < *n_ops; i++)
        kv_op_free(ops[i]);
    *n_ops = 0;
    return true;
}

static void step_object(struct worst *worst, struct object_work *work)
{
    const enum kv_object_verb verb = work->is_put ? KV_OBJECT_DELETE : KV_OBJECT_PUT;
    unsigned n_ops = work->op != NULL ? 1 : 0;

    if (!have_ended(&work->op, &n_ops))
        return;
    work->object =
        (struct kv_object){.name = work->name, .buffer = worst->buffer, .bytes = OBJECT_BYTES};
    if (kv_objects_begin(worst->client, verb, &work->object, 1, DEADLINE_MS, &work->op) !=
        KV_OK)
        work->op = NULL;
    work->is_put = !work->is_put;
    worst->has_object = worst->has_object || work->is_put;
}

static void begin_open(struct worst *worst, struct rows_work *work)
{
    const struct kv_session_options options = {.lease_ms = LEASE_MS};

    if (kv_open_begin(worst->client, &worst->model, &options, DEADLINE_MS, work->ops) == KV_OK)
        work->n_ops = 1;
}

/* From the last to the first. */
static void begin_puts(struct worst *worst, struct rows_work *work)
{
    for (unsigned i = N_PUTS; i-- > 0;) {
        const struct kv_rows box = {0, N_LAYERS, 0, 0, i * PUT_TOKENS, PUT_TOKENS};
        const struct kv_rows_io io = {.buffer = worst->buffer, .offset = (size_t)i * PUT_BYTES};

        if (kv_put_begin(work->session, &box, &io, DEADLINE_MS, &work->ops[work->n_ops]) ==
            KV_OK)
            work->n_ops++;
    }
}

static void begin_index(struct rows_work *work)
{
    const struct kv_index_options index = {
        .tokens = N_PUTS * PUT_TOKENS,
        .chapter_blocks = KV_CHAPTER_BLOCKS_MIN,
        .m = 4,
        .bits = KV_CODE_BITS_MAX,
        .iterations = KV_KMEANS_ITERATIONS_MAX,
        .summaries = 64,
        .wait = true,
    };

    if (kv_index_begin(work->session, &index, DEADLINE_MS, work->ops) == KV_OK)
        work->n_ops = 1;
}

static void begin_close(struct rows_work *work)
{
    if (kv_close_begin(work->session, DEADLINE_MS, work->ops) == KV_OK)
        work->n_ops = 1;
}

static void step_rows(struct worst *worst, struct rows_work *work)
{
    struct kv_session *opened = NULL;

    if (work->phase == ROWS_OPEN && work->n_ops == 1 && kv_op_status(work->ops[0]) == KV_OK)
        opened = kv_op_session(work->ops[0]);
    if (opened != NULL)
        work->session = opened;
    if (!have_ended(work->ops, &work->n_ops))
        return;
    work->phase = (work->phase + 1) % N_ROWS_PHASES;
    if (work->session == NULL || work->phase == ROWS_OPEN) {
        kv_session_free(work->session);
        work->session = NULL;
        work->phase = ROWS_OPEN;
        begin_open(worst, work);
    } else if (work->phase == ROWS_PUT)
        begin_puts(worst, work);
    else if (work->phase == ROWS_INDEX) {
        worst->has_index = true;
        begin_index(work);
    } else
        begin_close(work);
}

/* Cancels everything, and removes what the node has of it. */
static void leave(struct worst *worst)
{
    for (unsigned i = 0; i < N_OBJECTS; i++) {
        struct object_work *work = &worst->objects[i];

        kv_op_free(work->op);
        work->object.name = work->name;
        if (kv_objects_begin(worst->client, KV_OBJECT_DELETE, &work->object, 1, GOODBYE_MS,
                             &work->op) == KV_OK)
            kv_finish(work->op);
    }
    for (unsigned i = 0; i < N_SESSIONS; i++) {
        struct rows_work *work = &worst->rows[i];
        struct kv_op *op;

        for (unsigned j = 0; j < work->n_ops; j++)
            kv_op_free(work->ops[j]);
        if (work->session != NULL && kv_close_begin(work->session, GOODBYE_MS, &op) == KV_OK)
            kv_finish(op);
    }
    kv_client_close(worst->client);
}

static bool open_worst(struct worst *worst, const char *address, const char *transport)
{
    struct bench_node node = {0};

    snprintf(node.address, sizeof(node.address), "%s", address);
    snprintf(worst->model.name, sizeof(worst->model.name), "bench-worst");
    memcpy(worst->model.fingerprint.bytes, "bench-worst", 11);
    kv_schema_uniform(&worst->model.schema, N_LAYERS, N_HEADS, D, D, KV_BF16);
    for (unsigned i = 0; i < N_OBJECTS; i++)
        snprintf(worst->objects[i].name, sizeof(worst->objects[i].name), "worst-%u", i);
    for (unsigned i = 0; i < N_SESSIONS; i++)
        worst->rows[i].phase = ROWS_CLOSE; /* the next is to open one */
    worst->client = bench_client_open(&node, transport);
    return worst->client != NULL && open_slow(&worst->memory, OBJECT_BYTES) &&
           kv_buffer_map(worst->client, worst->memory.base, OBJECT_BYTES, KV_MEMORY_HOST,
                         &worst->buffer) == KV_OK &&
           kv_thread_start("slow", slow_main, &worst->memory, &worst->memory.thread) == KV_OK;
}

int bench_worst_peer(const char *address, const char *transport)
{
    static struct worst worst;
    bool is_told = false;

    signal(SIGTERM, on_stop);
    if (!open_worst(&worst, address, transport))
        return 1;
    while (!must_stop) {
        for (unsigned i = 0; i < N_OBJECTS; i++)
            step_object(&worst, &worst.objects[i]);
        for (unsigned i = 0; i < N_SESSIONS; i++)
            step_rows(&worst, &worst.rows[i]);
        if (!is_told && worst.has_object && worst.has_index) {
            is_told = true;
            printf("at its worst\n");
            fflush(stdout);
        }
        kv_client_wait(worst.client, 1000);
    }
    leave(&worst);
    atomic_store(&worst.memory.stop, true);
    kv_thread_join(worst.memory.thread);
    return 0;
}
