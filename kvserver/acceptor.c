#define _GNU_SOURCE /* accept4 */
#include "kvserver/acceptor.h"

#include "kvserver/address.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/log.h"
#include "kvserver/base/thread.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    BUFFER_BYTES = 16 << 10, /* per direction */
    EVENTS_MAX = 64,
    ROUNDS_MAX = 8, /* reads of a full buffer before other connections get a turn */
    SLEEP_MS = 60000,
    LOOK_US = 200000,       /* interval between checks of connections' ages */
    THROTTLED_US = 5000,    /* until throttled connections get another turn */
    RETRY_US = 100000,      /* after a temporary failure: out of descriptors or memory */
    STRANGER_US = 10000000, /* allowed without an answered call */

    /* Rates are per second; bursts may pass at once. */
    FRAMES_RATE = 4000, /* per connection; DATA frames are free */
    FRAMES_BURST = 1024,
    CALLS_RATE = 8000, /* for all connections: gRPC uses about 5 KB per queued call */
    CALLS_BURST = 2048,
    RESETS_RATE = 100, /* per connection; exceeding it closes the connection */
    RESETS_BURST = 512,
};

/* HTTP/2 (RFC 9113). */
static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
enum {
    PREFACE_BYTES = sizeof(preface) - 1,
    FRAME_HEADER_BYTES = 9, /* length (3), type, flags, stream (4) */
    FRAME_DATA = 0,
    FRAME_HEADERS = 1,
    FRAME_RST_STREAM = 3,
    FLAG_END_STREAM = 1,
};

struct bucket {
    /* A token bucket: limits a rate, and allows bursts. */
    uint64_t at_us;
    uint64_t level; /* in millionths of a token */
};

/* One direction of a connection: bytes read from one socket, and not yet written to the
 * other. */
struct way {
    int from, to;
    bool may_read, may_write; /* until a call returns EAGAIN */
    bool ended;               /* `from` has closed its end */
    uint32_t begin, end;      /* the bytes in use */
    uint32_t checked;         /* bytes before this offset have been checked and may be
                               * forwarded */
    uint32_t frame_left;      /* bytes left of the current frame */
    uint8_t *bytes;           /* (BUFFER_BYTES) */
};

struct connection {
    bool open;
    bool greeted;  /* the preface arrived, and gRPC has the other end of `inner` */
    bool answered; /* gRPC has answered a call, and has not closed its end */
    bool waits;    /* throttled, or out of turn */
    int outer, inner;
    struct sockaddr_storage client; /* port set to 0 */
    uint64_t since_us;
    struct bucket frames, resets;
    struct way in, out;
};

struct kvs_acceptor {
    int fd;
    uint16_t port;
    kvs_acceptor_take_fn take;
    void *arg;
    struct kv_thread *thread;
    struct kv_signal *wake, *stopped;
    atomic_bool stopping, is_stopped, ending;
    int epoll_fd;
    uint64_t now_us;
    uint64_t deaf_us; /* no connection is accepted until then; 0: not suspended */
    uint64_t look_us; /* next check of all connections; UINT64_MAX: none needed */
    uint8_t *buffers; /* two per connection */
    struct bucket calls;
    uint32_t connections_max, n_connections;
    uint32_t first; /* the connection that is served first in the next round */
    struct connection connections[];
};

/* What an epoll event refers to; other values are 2 * connection + is_inner. */
#define ABOUT_LISTENER UINT64_MAX
#define ABOUT_WAKE     (UINT64_MAX - 1)

/* Takes one token.  Returns false if none is left. */
static bool draw(struct bucket *bucket, uint64_t now_us, uint64_t rate, uint64_t burst)
{
    uint64_t most = burst * 1000000;
    uint64_t passed_us = now_us - bucket->at_us;

    bucket->at_us = now_us;
    bucket->level = passed_us > most / rate ? most : bucket->level + passed_us * rate;
    if (bucket->level > most)
        bucket->level = most;
    if (bucket->level < 1000000)
        return false;
    bucket->level -= 1000000;
    return true;
}

/* ---- one connection ---------------------------------------------------------------------- */

static void connection_close(struct kvs_acceptor *acceptor, struct connection *connection)
{
    close(connection->outer);
    if (connection->inner >= 0)
        close(connection->inner);
    connection->open = false;
    acceptor->n_connections--;
}

static kv_status_t watch(struct kvs_acceptor *acceptor, int fd, uint64_t about, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.u64 = about};

    return epoll_ctl(acceptor->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0 ? KV_OK : KV_IO;
}

/* Creates the inner pair of sockets, and passes gRPC its end.  Returns false on failure. */
static bool introduce(struct kvs_acceptor *acceptor, struct connection *connection)
{
    uint64_t number = (uint64_t)(connection - acceptor->connections);
    int pair[2];

    if (atomic_load(&acceptor->stopping) ||
        socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0)
        return false;
    if (watch(acceptor, pair[0], number << 1 | 1, EPOLLIN | EPOLLOUT | EPOLLET) != KV_OK) {
        close(pair[0]);
        close(pair[1]);
        return false;
    }
    connection->inner = connection->in.to = connection->out.from = pair[0];
    connection->in.may_write = true;
    connection->greeted = true;
    acceptor->take(acceptor->arg, pair[1]);
    return true;
}

/* Charges a frame that the client sent.  Returns false if it has to wait, or if the connection
 * has to be closed, which sets *ret_is_bad. */
static bool admit_frame(struct kvs_acceptor *acceptor,
                        struct connection *connection,
                        unsigned type,
                        uint32_t bytes,
                        bool *ret_is_bad)
{
    if (type == FRAME_DATA && bytes > 0)
        return true;
    if (!draw(&connection->frames, acceptor->now_us, FRAMES_RATE, FRAMES_BURST))
        return false;
    if (type == FRAME_RST_STREAM)
        *ret_is_bad = !draw(&connection->resets, acceptor->now_us, RESETS_RATE, RESETS_BURST);
    return !*ret_is_bad && (type != FRAME_HEADERS ||
                            draw(&acceptor->calls, acceptor->now_us, CALLS_RATE, CALLS_BURST));
}

/* Checks the frames that have arrived.  Returns false if the connection has to be closed. */
static bool look(struct kvs_acceptor *acceptor, struct connection *connection, struct way *way)
{
    bool is_in = way == &connection->in, is_bad = false;

    while (way->checked < way->end) {
        const uint8_t *at = way->bytes + way->checked;
        uint32_t n = way->end - way->checked;

        if (way->frame_left > 0) {
            n = n < way->frame_left ? n : way->frame_left;
            way->checked += n;
            way->frame_left -= n;
            continue;
        }
        if (is_in && !connection->greeted) {
            if (memcmp(at, preface, n < PREFACE_BYTES ? n : PREFACE_BYTES) != 0)
                return false;
            if (n < PREFACE_BYTES)
                break;
            if (!introduce(acceptor, connection))
                return false;
            way->checked += PREFACE_BYTES;
            continue;
        }
        if (n < FRAME_HEADER_BYTES)
            break;
        uint32_t bytes = (uint32_t)at[0] << 16 | (uint32_t)at[1] << 8 | at[2];
        if (is_in && !admit_frame(acceptor, connection, at[3], bytes, &is_bad)) {
            connection->waits = true;
            acceptor->look_us = 0;
            break;
        }
        /* A call that gRPC rejects has END_STREAM in its first frame: it is not an answer. */
        if (!is_in && at[3] == FRAME_HEADERS && (at[4] & FLAG_END_STREAM) == 0)
            connection->answered = true;
        way->checked += FRAME_HEADER_BYTES;
        way->frame_left = bytes;
    }
    return !is_bad;
}

/* Reads as much as is available and fits.  Returns false if `from` is broken. */
static bool way_read(struct way *way)
{
    if (way->begin > 0) {
        memmove(way->bytes, way->bytes + way->begin, way->end - way->begin);
        way->end -= way->begin;
        way->checked -= way->begin;
        way->begin = 0;
    }
    while (way->may_read && !way->ended && way->end < BUFFER_BYTES) {
        ssize_t n = recv(way->from, way->bytes + way->end, BUFFER_BYTES - way->end, 0);

        if (n > 0)
            way->end += (uint32_t)n;
        else if (n == 0)
            way->ended = true;
        else if (errno == EAGAIN)
            way->may_read = false;
        else if (errno != EINTR)
            return false;
    }
    return true;
}

static bool way_write(struct way *way)
{
    while (way->may_write && way->begin < way->checked) {
        ssize_t n =
            send(way->to, way->bytes + way->begin, way->checked - way->begin, MSG_NOSIGNAL);

        if (n >= 0)
            way->begin += (uint32_t)n;
        else if (errno == EAGAIN)
            way->may_write = false;
        else if (errno != EINTR)
            return false;
    }
    return true;
}

/* Forwards what it can.  Returns false if the connection is over. */
static bool
way_pump(struct kvs_acceptor *acceptor, struct connection *connection, struct way *way)
{
    for (unsigned round = 0;; round++) {
        uint32_t before;

        if (!way_read(way) || !look(acceptor, connection, way))
            return false;
        before = way->begin;
        if (!way_write(way))
            return false;
        if (way->begin == before || !way->may_read || way->ended)
            break;
        if (round == ROUNDS_MAX) {
            connection->waits = true;
            acceptor->look_us = 0;
            break;
        }
    }
    /* After the sender has closed, its remaining bytes are forwarded first. */
    return !way->ended || (way->begin < way->checked && way->to >= 0);
}

static void pump(struct kvs_acceptor *acceptor, struct connection *connection)
{
    connection->waits = false;
    if (!way_pump(acceptor, connection, &connection->in) ||
        (connection->greeted && !way_pump(acceptor, connection, &connection->out))) {
        connection_close(acceptor, connection);
    } else if (connection->out.ended && connection->answered) {
        /* gRPC has closed: the client has limited time to receive the remaining bytes. */
        connection->answered = false;
        connection->since_us = acceptor->now_us;
        acceptor->look_us = 0;
    }
}

/* ---- all connections --------------------------------------------------------------------- */

static bool same_client(const struct connection *connection,
                        const struct sockaddr_storage *client)
{
    return memcmp(&connection->client, client, sizeof(*client)) == 0;
}

/* Clears the port: connections are counted per host. */
static void forget_port(struct sockaddr_storage *client)
{
    if (client->ss_family == AF_INET)
        ((struct sockaddr_in *)(void *)client)->sin_port = 0;
    else if (client->ss_family == AF_INET6)
        ((struct sockaddr_in6 *)(void *)client)->sin6_port = 0;
}

/* Closes the oldest connection that gRPC has not answered; only those of `client`, unless it is
 * NULL. */
static bool evict(struct kvs_acceptor *acceptor, const struct sockaddr_storage *client)
{
    struct connection *oldest = NULL;

    for (uint32_t i = 0; i < acceptor->connections_max; i++) {
        struct connection *connection = &acceptor->connections[i];

        if (connection->open && !connection->answered &&
            (client == NULL || same_client(connection, client)) &&
            (oldest == NULL || connection->since_us < oldest->since_us))
            oldest = connection;
    }
    if (oldest == NULL)
        return false;
    connection_close(acceptor, oldest);
    return true;
}

/* Returns a place for a connection from that address, or NULL. */
static struct connection *place_for(struct kvs_acceptor *acceptor,
                                    const struct sockaddr_storage *client)
{
    struct connection *place = NULL;
    uint32_t n_same = 0;

    for (uint32_t i = 0; i < acceptor->connections_max; i++)
        if (acceptor->connections[i].open)
            n_same += same_client(&acceptor->connections[i], client);
    /* One address gets at most half of the places, so it cannot lock out the others. */
    if (n_same >= acceptor->connections_max / 2 && !evict(acceptor, client))
        return NULL;
    if (acceptor->n_connections == acceptor->connections_max && !evict(acceptor, NULL))
        return NULL;
    for (uint32_t i = 0; i < acceptor->connections_max && place == NULL; i++)
        if (!acceptor->connections[i].open)
            place = &acceptor->connections[i];
    return place;
}

static void way_open(struct way *way, int from, int to)
{
    way->from = from;
    way->to = to;
    way->may_read = way->may_write = true;
    way->ended = false;
    way->begin = way->end = way->checked = way->frame_left = 0;
}

static void admit(struct kvs_acceptor *acceptor, int fd, struct sockaddr_storage *client)
{
    struct connection *connection;
    int one = 1;

    forget_port(client);
    connection = place_for(acceptor, client);
    if (connection == NULL) {
        KV_LOG_EVERY(KV_LOG_WARN, "listen: port %u: connection closed: %u are already open",
                     (unsigned)acceptor->port, acceptor->n_connections);
        close(fd);
        return;
    }
    uint64_t number = (uint64_t)(connection - acceptor->connections);
    if (watch(acceptor, fd, number << 1, EPOLLIN | EPOLLOUT | EPOLLET) != KV_OK) {
        close(fd);
        return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    connection->open = true;
    connection->greeted = connection->answered = connection->waits = false;
    connection->outer = fd;
    connection->inner = -1;
    connection->client = *client;
    connection->since_us = acceptor->now_us;
    connection->frames = connection->resets = (struct bucket){0};
    way_open(&connection->in, fd, -1);
    connection->in.may_write = false;
    way_open(&connection->out, -1, fd);
    connection->in.bytes = acceptor->buffers + 2 * number * BUFFER_BYTES;
    connection->out.bytes = connection->in.bytes + BUFFER_BYTES;
    acceptor->n_connections++;
    acceptor->look_us = 0;
    pump(acceptor, connection);
}

static void take_new(struct kvs_acceptor *acceptor)
{
    while (!atomic_load(&acceptor->stopping)) {
        struct sockaddr_storage client = {0};
        socklen_t bytes = sizeof(client);
        int fd = accept4(acceptor->fd, (struct sockaddr *)&client, &bytes,
                         SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (fd >= 0) {
            admit(acceptor, fd, &client);
        } else if (errno == EAGAIN) {
            return;
        } else if (errno != EINTR && errno != ECONNABORTED) {
            KV_LOG_EVERY(KV_LOG_WARN, "listen: port %u: cannot accept, will retry: %s",
                         (unsigned)acceptor->port, strerror(errno));
            acceptor->deaf_us = acceptor->now_us + RETRY_US;
            return;
        }
    }
}

/* A socket became readable or writable, or it failed, which the next read or write will
 * show. */
static void on_event(struct kvs_acceptor *acceptor, const struct epoll_event *event)
{
    struct connection *connection = &acceptor->connections[event->data.u64 >> 1];
    bool is_inner = event->data.u64 & 1;

    if (!connection->open || (is_inner && !connection->greeted))
        return; /* closed earlier in this round */
    struct way *reads = is_inner ? &connection->out : &connection->in;
    struct way *writes = is_inner ? &connection->in : &connection->out;
    if (event->events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        reads->may_read = true;
    if (event->events & (EPOLLOUT | EPOLLHUP | EPOLLERR))
        writes->may_write = true;
    pump(acceptor, connection);
}

/* Serves connections that wait, beginning with a different one each time, and closes those that
 * gRPC has not answered in time. */
static void take_turns(struct kvs_acceptor *acceptor)
{
    uint64_t now_us = acceptor->now_us, look_us = UINT64_MAX;

    acceptor->first++;
    for (uint32_t i = 0; i < acceptor->connections_max; i++) {
        struct connection *connection =
            &acceptor->connections[(acceptor->first + i) % acceptor->connections_max];

        if (connection->open && connection->waits)
            pump(acceptor, connection);
        if (connection->open && !connection->answered &&
            now_us - connection->since_us > STRANGER_US)
            connection_close(acceptor, connection);
        if (connection->open && connection->waits)
            look_us = now_us + THROTTLED_US;
        else if (connection->open && !connection->answered && look_us > now_us + LOOK_US)
            look_us = now_us + LOOK_US;
    }
    acceptor->look_us = look_us;
}

/* Returns the milliseconds until something is due without an event. */
static int nap(const struct kvs_acceptor *acceptor)
{
    uint64_t until_us = acceptor->look_us;

    if (acceptor->deaf_us != 0 && acceptor->deaf_us < until_us)
        until_us = acceptor->deaf_us;
    if (until_us <= acceptor->now_us)
        return 0;
    until_us = (until_us - acceptor->now_us + 999) / 1000;
    return until_us < SLEEP_MS ? (int)until_us : SLEEP_MS;
}

static void handle(struct kvs_acceptor *acceptor, const struct epoll_event *events, int n)
{
    bool is_new = acceptor->deaf_us != 0;

    for (int i = 0; i < n; i++) {
        if (events[i].data.u64 == ABOUT_LISTENER)
            is_new = true;
        else if (events[i].data.u64 == ABOUT_WAKE)
            kv_signal_clear(acceptor->wake);
        else
            on_event(acceptor, &events[i]);
    }
    if (is_new && acceptor->now_us >= acceptor->deaf_us) {
        acceptor->deaf_us = 0;
        take_new(acceptor);
    }
}

static void run(void *arg)
{
    struct kvs_acceptor *acceptor = arg;
    struct epoll_event events[EVENTS_MAX];

    while (!atomic_load(&acceptor->ending)) {
        int n = epoll_wait(acceptor->epoll_fd, events, EVENTS_MAX, nap(acceptor));

        acceptor->now_us = kv_clock_now(&kv_clock_real);
        handle(acceptor, events, n);
        if (acceptor->now_us >= acceptor->look_us)
            take_turns(acceptor);
        if (atomic_load(&acceptor->stopping) && !atomic_load(&acceptor->is_stopped)) {
            atomic_store(&acceptor->is_stopped, true);
            kv_signal_raise(acceptor->stopped);
        }
    }
}

/* ---- life -------------------------------------------------------------------------------- */

kv_status_t kvs_acceptor_create(const char *address,
                                uint32_t connections_max,
                                struct kvs_acceptor **ret_acceptor,
                                char *detail,
                                size_t detail_bytes)
{
    struct kvs_acceptor *acceptor =
        calloc(1, sizeof(*acceptor) + connections_max * sizeof(acceptor->connections[0]));
    kv_status_t status = KV_NO_MEMORY;

    snprintf(detail, detail_bytes, "out of memory: listen: %s", address);
    if (acceptor == NULL)
        return status;
    acceptor->connections_max = connections_max;
    acceptor->fd = -1;
    acceptor->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    acceptor->wake = kv_signal_create();
    acceptor->stopped = kv_signal_create();
    /* calloc() of this size gets untouched zero pages: a connection costs only the pages it
     * uses. */
    acceptor->buffers = calloc(connections_max, (size_t)2 * BUFFER_BYTES);
    if (acceptor->epoll_fd < 0 || acceptor->wake == NULL || acceptor->stopped == NULL ||
        acceptor->buffers == NULL)
        goto err;
    status = kvs_address_listen("listen", address, &acceptor->fd, &acceptor->port, detail,
                                detail_bytes);
    if (status == KV_OK)
        status = watch(acceptor, acceptor->fd, ABOUT_LISTENER, EPOLLIN | EPOLLET);
    if (status == KV_OK)
        status = watch(acceptor, kv_signal_fd(acceptor->wake), ABOUT_WAKE, EPOLLIN);
    if (status != KV_OK)
        goto err;
    *ret_acceptor = acceptor;
    return KV_OK;

err:
    kvs_acceptor_destroy(acceptor);
    return status;
}

uint16_t kvs_acceptor_port(const struct kvs_acceptor *acceptor)
{
    return acceptor->port;
}

kv_status_t
kvs_acceptor_start(struct kvs_acceptor *acceptor, kvs_acceptor_take_fn take, void *arg)
{
    acceptor->take = take;
    acceptor->arg = arg;
    acceptor->now_us = kv_clock_now(&kv_clock_real);
    acceptor->deaf_us = acceptor->now_us; /* accept at once */
    kv_signal_raise(acceptor->wake);
    return kv_thread_start("kv-accept", run, acceptor, &acceptor->thread);
}

void kvs_acceptor_stop(struct kvs_acceptor *acceptor)
{
    int fd = kv_signal_fd(acceptor->stopped);

    atomic_store(&acceptor->stopping, true);
    kv_signal_raise(acceptor->wake);
    while (acceptor->thread != NULL && !atomic_load(&acceptor->is_stopped))
        kv_sleep_fds(&fd, 1, LOOK_US);
}

void kvs_acceptor_destroy(struct kvs_acceptor *acceptor)
{
    if (acceptor == NULL)
        return;
    atomic_store(&acceptor->stopping, true);
    atomic_store(&acceptor->ending, true);
    if (acceptor->thread != NULL) {
        kv_signal_raise(acceptor->wake);
        kv_thread_join(acceptor->thread);
    }
    for (uint32_t i = 0; i < acceptor->connections_max; i++) {
        struct connection *connection = &acceptor->connections[i];

        if (!connection->open)
            continue;
        connection->in.may_read = connection->out.may_read = true;
        pump(acceptor, connection);
        if (connection->open)
            connection_close(acceptor, connection);
    }
    if (acceptor->wake != NULL)
        kv_signal_destroy(acceptor->wake);
    if (acceptor->stopped != NULL)
        kv_signal_destroy(acceptor->stopped);
    if (acceptor->fd >= 0)
        close(acceptor->fd);
    if (acceptor->epoll_fd >= 0)
        close(acceptor->epoll_fd);
    free(acceptor->buffers);
    free(acceptor);
}
