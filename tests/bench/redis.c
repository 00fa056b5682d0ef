/* Redis beside us: a server of its own over loopback tcp, which saves nothing, and one connection.
 * A value is written from where it lies, as hiredis would not; a reply is hiredis's. */
#include "tests/bench/bench.h"

#ifdef KV_BENCH_HIREDIS

#include <errno.h>
#include <hiredis/hiredis.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum {
    READY_TRIES = 200, /* of 50 ms */
};

struct bench_redis {
    pid_t pid;
    int out;
    redisContext *context;
    char name[64];
};

/* Returns a port that was free a moment ago; 0: there is none. */
static unsigned free_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof(address);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    unsigned port = 0;

    if (fd >= 0 && bind(fd, (struct sockaddr *)&address, bytes) == 0 &&
        getsockname(fd, (struct sockaddr *)&address, &bytes) == 0)
        port = ntohs(address.sin_port);
    if (fd >= 0)
        close(fd);
    return port;
}

static bool connect_to(struct bench_redis *self, unsigned port)
{
    const struct timespec pause = {.tv_nsec = 50000000};

    for (int i = 0; i < READY_TRIES; i++) {
        self->context = redisConnect("127.0.0.1", (int)port);
        if (self->context != NULL && self->context->err == 0)
            return true;
        redisFree(self->context);
        self->context = NULL;
        nanosleep(&pause, NULL);
    }
    return false;
}

static void find_version(struct bench_redis *self)
{
    redisReply *reply = redisCommand(self->context, "INFO server");
    const char *at = reply != NULL && reply->type == REDIS_REPLY_STRING
                         ? strstr(reply->str, "redis_version:")
                         : NULL;
    char version[32] = "?";

    if (at != NULL)
        (void)sscanf(at, "redis_version:%31[^\r\n]", version);
    snprintf(self->name, sizeof(self->name), "redis %s", version);
    freeReplyObject(reply);
}

bool bench_redis_open(struct bench *bench, struct bench_redis **ret_redis)
{
    struct bench_redis *self = calloc(1, sizeof(*self));
    char port_text[16];
    char *const argv[] = {(char *)bench->redis,
                          (char *)"--port",
                          port_text,
                          (char *)"--bind",
                          (char *)"127.0.0.1",
                          (char *)"--save",
                          (char *)"",
                          (char *)"--appendonly",
                          (char *)"no",
                          NULL};
    const unsigned port = free_port();

    if (self == NULL)
        return false;
    snprintf(port_text, sizeof(port_text), "%u", port);
    if (port == 0 || !bench_spawn(argv, -1, NULL, &self->out, NULL, &self->pid)) {
        bench_complain("redis: %s: cannot be started", bench->redis);
        free(self);
        return false;
    }
    if (!connect_to(self, port)) {
        bench_complain("redis: %s: does not answer at 127.0.0.1:%u", bench->redis, port);
        bench_redis_close(self);
        return false;
    }
    find_version(self);
    *ret_redis = self;
    return true;
}

void bench_redis_close(struct bench_redis *self)
{
    if (self == NULL)
        return;
    if (self->context != NULL) {
        freeReplyObject(redisCommand(self->context, "SHUTDOWN NOSAVE"));
        redisFree(self->context);
    }
    close(self->out);
    bench_reap(self->pid);
    free(self);
}

const char *bench_redis_name(const struct bench_redis *self)
{
    return self->name;
}

/* Writes all of it; iov is used up. */
static bool write_all(int fd, struct iovec *iov, int n_iov)
{
    while (n_iov > 0) {
        ssize_t done = writev(fd, iov, n_iov);

        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return false;
        for (; n_iov > 0 && (size_t)done >= iov->iov_len; iov++, n_iov--)
            done -= (ssize_t)iov->iov_len;
        if (n_iov > 0) {
            iov->iov_base = (char *)iov->iov_base + done;
            iov->iov_len -= (size_t)done;
        }
    }
    return true;
}

static bool put(struct bench_redis *self, size_t i, uint8_t *value, size_t bytes)
{
    char key[32], head[128];
    const int key_bytes = snprintf(key, sizeof(key), "object-%zu", i);
    const int head_bytes = snprintf(
        head, sizeof(head), "*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%zu\r\n", key_bytes, key, bytes);
    struct iovec iov[] = {{head, (size_t)head_bytes}, {value, bytes}, {(char *)"\r\n", 2}};
    void *reply = NULL;
    bool is_good;

    if (!write_all(self->context->fd, iov, 3) ||
        redisGetReply(self->context, &reply) != REDIS_OK)
        return false;
    is_good = ((redisReply *)reply)->type == REDIS_REPLY_STATUS;
    freeReplyObject(reply);
    return is_good;
}

static bool get(struct bench_redis *self, size_t i, const uint8_t *value, size_t bytes)
{
    redisReply *reply = redisCommand(self->context, "GET object-%llu", (unsigned long long)i);
    const bool is_good = reply != NULL && reply->type == REDIS_REPLY_STRING &&
                         reply->len == bytes && memcmp(reply->str, value, 64) == 0;

    freeReplyObject(reply);
    return is_good;
}

bool bench_redis_measure(void *arg, struct bench_sample *ret_sample)
{
    const struct bench_redis_load *load = arg;
    const double begun = bench_now();
    bool is_good = true;

    for (size_t i = 0; is_good && i < load->n; i++) {
        uint8_t *value = load->values + i * load->bytes;

        is_good = load->is_put ? put(load->redis, i, value, load->bytes)
                               : get(load->redis, i, value, load->bytes);
    }
    if (!is_good) {
        bench_complain("redis: %s: %s", load->is_put ? "SET" : "GET",
                       load->redis->context->err != 0 ? load->redis->context->errstr
                                                      : "another answer than expected");
        return false;
    }
    ret_sample->value = (double)load->bytes * (double)load->n / (bench_now() - begun) / 1e9;
    return true;
}

#else

bool bench_redis_open(struct bench *bench, struct bench_redis **ret_redis)
{
    (void)ret_redis;
    bench_complain("redis: %s: kv_bench was built without hiredis (libhiredis-dev)",
                   bench->redis);
    return false;
}

void bench_redis_close(struct bench_redis *self)
{
    (void)self;
}

const char *bench_redis_name(const struct bench_redis *self)
{
    (void)self;
    return "redis";
}

bool bench_redis_measure(void *arg, struct bench_sample *ret_sample)
{
    (void)arg;
    (void)ret_sample;
    return false;
}

#endif
