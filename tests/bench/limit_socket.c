/* The limit of tcp: one connection over loopback whose two ends never sleep.
 *
 * Requests and answers have fixed sizes, told before each measurement.  Blocking sockets would
 * be no limit: a processor that fell asleep takes tens of microseconds to wake.
 */
#define _GNU_SOURCE
#include "tests/bench/bench.h"

#include "kvserver/base/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    BUFFER_BYTES = 4 << 20,
};

struct bench_socket {
    int control; /* socket to the peer: jobs go there, the port comes from there */
    int fd;
    pid_t pid;
    uint8_t *memory;
    size_t bytes;
};

struct job {
    uint64_t out_bytes, back_bytes;
    uint64_t n;
};

/* A stream of equal messages in one direction, from or to cold memory. */
struct flow {
    uint8_t *memory;
    size_t bytes;
    size_t cursor;
    size_t message_bytes;
    size_t at;    /* within the message */
    size_t whole; /* messages moved */
};

static uint8_t *flow_next(struct flow *flow, size_t *ret_bytes)
{
    if (flow->at == 0 && flow->cursor + flow->message_bytes > flow->bytes)
        flow->cursor = 0;
    *ret_bytes = flow->message_bytes - flow->at;
    return flow->memory + flow->cursor + flow->at;
}

/* Moves what can be moved now, at most one message.  false: the connection broke. */
static bool flow_turn(struct flow *flow, int fd, bool is_out)
{
    size_t bytes;
    uint8_t *at = flow_next(flow, &bytes);
    ssize_t n = is_out ? send(fd, at, bytes, MSG_DONTWAIT | MSG_NOSIGNAL)
                       : recv(fd, at, bytes, MSG_DONTWAIT);

    if (n < 0)
        return errno == EAGAIN || errno == EINTR;
    if (n == 0)
        return false;
    flow->at += (size_t)n;
    if (flow->at == flow->message_bytes) {
        flow->cursor += flow->message_bytes;
        flow->at = 0;
        flow->whole++;
    }
    return true;
}

static void tune(int fd)
{
    int on = 1, bytes = BUFFER_BYTES;

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
}

/* ---- the peer ---------------------------------------------------------------------------- */

static bool answer(int fd, const struct job *job, uint8_t *memory, size_t bytes)
{
    struct flow in = {.memory = memory, .bytes = bytes, .message_bytes = job->out_bytes};
    struct flow out = in;

    out.message_bytes = job->back_bytes;
    while (out.whole < job->n) {
        if (in.whole < job->n && !flow_turn(&in, fd, false))
            return false;
        if (out.whole < in.whole && !flow_turn(&out, fd, true))
            return false;
    }
    return true;
}

int bench_socket_peer(uint64_t data_bytes, int cpu)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET,
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
    };
    socklen_t address_bytes = sizeof(address);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    uint8_t *memory = kv_memory_reserve(data_bytes);
    struct job job;
    int fd;

    bench_pin(cpu);
    if (memory == NULL || listener < 0)
        return EXIT_FAILURE;
    tune(listener);
    if (bind(listener, (struct sockaddr *)&address, sizeof(address)) != 0 ||
        listen(listener, 1) != 0 ||
        getsockname(listener, (struct sockaddr *)&address, &address_bytes) != 0 ||
        write(STDIN_FILENO, &address.sin_port, sizeof(address.sin_port)) !=
            (ssize_t)sizeof(address.sin_port))
        return EXIT_FAILURE;
    bench_fill(memory, data_bytes, 1);
    fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0)
        return EXIT_FAILURE;
    tune(fd);
    while (read(STDIN_FILENO, &job, sizeof(job)) == (ssize_t)sizeof(job))
        if (!answer(fd, &job, memory, data_bytes))
            return EXIT_FAILURE;
    return EXIT_SUCCESS;
}

/* ---- the caller's side ------------------------------------------------------------------- */

bool bench_socket_open(struct bench *bench, struct bench_socket **ret_socket)
{
    struct bench_socket *self = calloc(1, sizeof(*self));
    struct sockaddr_in address = {
        .sin_family = AF_INET,
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
    };
    char bytes_text[32], cpu_text[16];
    char *const argv[] = {
        (char *)"/proc/self/exe",
        (char *)"--peer",
        (char *)"socket",
        (char *)"tcp",
        bytes_text,
        cpu_text,
        NULL,
    };

    if (self == NULL)
        return false;
    self->fd = -1;
    snprintf(bytes_text, sizeof(bytes_text), "%llu", (unsigned long long)bench->data_bytes);
    snprintf(cpu_text, sizeof(cpu_text), "%d", bench->server_cpu);
    if (!bench_spawn(argv, bench->server_cpu, NULL, NULL, &self->control, &self->pid)) {
        free(self);
        return false;
    }
    self->bytes = bench->data_bytes;
    self->memory = kv_memory_reserve(self->bytes);
    self->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (self->memory == NULL || self->fd < 0 ||
        read(self->control, &address.sin_port, sizeof(address.sin_port)) !=
            (ssize_t)sizeof(address.sin_port))
        goto err;
    tune(self->fd);
    if (connect(self->fd, (struct sockaddr *)&address, sizeof(address)) != 0)
        goto err;
    bench_fill(self->memory, self->bytes, 2);
    *ret_socket = self;
    return true;

err:
    bench_complain("socket pair: cannot open: %s", strerror(errno));
    bench_socket_close(self);
    return false;
}

void bench_socket_close(struct bench_socket *self)
{
    if (self == NULL)
        return;
    if (self->fd >= 0)
        close(self->fd);
    close(self->control);
    if (self->memory != NULL)
        kv_memory_release(self->memory, self->bytes);
    bench_reap(self->pid);
    free(self);
}

bool bench_socket_measure(void *arg, struct bench_sample *ret_sample)
{
    const struct bench_exchange *exchange = arg;
    struct bench_socket *self = exchange->socket;
    struct job job = {exchange->out_bytes, exchange->back_bytes, exchange->n};
    struct flow out = {
        .memory = self->memory,
        .bytes = self->bytes,
        .message_bytes = job.out_bytes,
    };
    struct flow in = out;
    double begins[BENCH_WINDOW_MAX];
    struct bench_stall stall = {0};
    struct bench_watch watch;

    in.message_bytes = job.back_bytes;
    if (write(self->control, &job, sizeof(job)) != (ssize_t)sizeof(job) ||
        !bench_watch_start(&watch, job.n))
        return false;
    while (in.whole < job.n) {
        size_t seen = in.whole;

        if (out.whole < job.n && out.whole - in.whole < exchange->window) {
            if (out.at == 0)
                begins[out.whole % exchange->window] = bench_now();
            if (!flow_turn(&out, self->fd, true))
                break;
        }
        if (in.whole < out.whole && !flow_turn(&in, self->fd, false))
            break;
        if (in.whole > seen)
            bench_watch_add(&watch, bench_now() - begins[seen % exchange->window]);
        if (bench_stalled(&stall, in.whole > seen))
            break;
    }
    if (exchange->times)
        bench_watch_times(&watch, ret_sample);
    else
        bench_watch_rate(&watch,
                         job.back_bytes > job.out_bytes ? job.back_bytes : job.out_bytes,
                         ret_sample);
    return in.whole == job.n;
}
