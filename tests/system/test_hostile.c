/* Whoever can reach a port can send it anything.  Random bytes, broken HTTP/2 and connections
 * that never get on are refused or dropped; the node serves on, in as much memory as before. */
#include "tests/system/system.h"

#include "kvserver/base/random.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    N_RANDOM = 300, /* connections of random bytes, for each port */
    RANDOM_BYTES_MAX = 8192,
    N_SLOW = 80,
    N_CROWD = 1000,
    N_PLACES = 2 * 256 + 256, /* of the control port, with --clients 256 */
    N_DRIPS = 120,
    DRIPS_US = 6000000,
    DRIP_EVERY_US = 100000,
    N_RESETTERS = 8,
    RESETS_EACH = 20000,
    RESETS_PER_SEND = 100,
    RESETS_US = PROCESS_PATIENCE_MS * 1000,
    N_TOKENS = 100,
};
/* The node's memory, which it touches ahead of use and in its own time, and something for the
 * libraries. */
#define RSS_GROWTH ((64 + 48 * PROCESS_MEMORY_FACTOR) << 20)

static const char *const small[] = {"--memory", "64M", "--clients", "256", NULL};

struct scene {
    struct process_node node;
    struct kv_client *client;
    struct kv_session *session;
    struct kv_buffer *buffer;
    struct kv_random random;
    uint64_t rss;
};

static void begin_scene(struct scene *scene)
{
    memset(scene, 0, sizeof(*scene));
    system_node_start(&scene->node, small);
    scene->client = system_open(scene->node.control, "tcp");
    scene->buffer = system_buffer(scene->client, 1 << 20);
    scene->session = system_session(scene->client, system_model(), 0);
    system_put(scene->client, scene->session, scene->buffer, 0, N_TOKENS, 1);
    kv_random_init(&scene->random, 4711);
    scene->rss = process_rss(scene->node.process.pid);
}

static void still_serves(struct scene *scene)
{
    system_read(scene->client, scene->session, scene->buffer, 0, N_TOKENS, 1);
    assert_true(process_rss(scene->node.process.pid) < scene->rss + RSS_GROWTH);
}

static bool is_healthy(void *arg)
{
    return process_http_get(arg, "/health", NULL, 0) == 200;
}

/* A client that comes new: the control port takes connections. */
static bool takes_clients(void *arg)
{
    const struct kv_client_options options = {.nodes = arg, .transport = "tcp"};
    struct kv_client *client;

    if (kv_client_open(&options, &client, NULL, 0) != KV_OK)
        return false;
    kv_client_close(client);
    return true;
}

static void end_scene(struct scene *scene)
{
    still_serves(scene);
    print_message("resident %+.1f MB\n",
                  ((double)process_rss(scene->node.process.pid) - (double)scene->rss) / 1e6);
    assert_true(process_until(is_healthy, scene->node.metrics, PROCESS_PATIENCE_MS));
    assert_true(process_until(takes_clients, scene->node.control, PROCESS_PATIENCE_MS));
    kv_client_close(scene->client);
    system_node_stop(&scene->node);
}

/* What was sent need not be taken: the other end may close before. */
static void send_and_close(const char *address, const void *data, size_t bytes)
{
    int fd = process_connect(address);

    if (fd < 0)
        return;
    (void)!send(fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    close(fd);
}

static void random_bytes(struct scene *scene, const char *address, const char *before)
{
    char data[64 + RANDOM_BYTES_MAX];

    for (unsigned i = 0; i < N_RANDOM; i++) {
        size_t bytes = strlen(before);
        size_t more = kv_random_below(&scene->random, RANDOM_BYTES_MAX);

        memcpy(data, before, bytes);
        kv_random_fill(&scene->random, data + bytes, more);
        send_and_close(address, data, bytes + more);
    }
    still_serves(scene);
}

#define PREFACE "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

static void at_the_control_port(void **state)
{
    struct scene scene;

    (void)state;
    begin_scene(&scene);
    random_bytes(&scene, scene.node.control, "");
    random_bytes(&scene, scene.node.control, PREFACE);
    random_bytes(&scene, scene.node.control, "GET / HTTP/1.1\r\n");
    end_scene(&scene);
}

/* Frames that are none: length (3 bytes), type, flags, stream (4 bytes), payload. */
static void broken_frames(void **state)
{
    struct scene scene;

    (void)state;
    begin_scene(&scene);
    for (unsigned i = 0; i < N_RANDOM; i++) {
        unsigned char data[512] = PREFACE;
        size_t at = sizeof(PREFACE) - 1;

        memcpy(data + at, "\0\0\0\4\0\0\0\0\0", 9); /* empty SETTINGS */
        at += 9;
        while (at < sizeof(data) - 32) {
            size_t bytes = kv_random_below(&scene.random, 20);

            kv_random_fill(&scene.random, data + at, 9 + bytes);
            data[at] = 0;
            data[at + 1] = (unsigned char)(kv_random_below(&scene.random, 8) == 0 ? 0xff : 0);
            data[at + 2] = (unsigned char)bytes;
            data[at + 3] = (unsigned char)kv_random_below(&scene.random, 11);
            data[at + 5] = data[at + 6] = data[at + 7] = 0;
            data[at + 8] &= 7;
            at += 9 + bytes;
        }
        send_and_close(scene.node.control, data, at);
    }
    end_scene(&scene);
}

static void at_the_metrics_port(void **state)
{
    struct scene scene;

    (void)state;
    begin_scene(&scene);
    random_bytes(&scene, scene.node.metrics, "");
    random_bytes(&scene, scene.node.metrics, "GET /metrics HTTP/1.1\r\nX: ");
    random_bytes(&scene, scene.node.metrics, "POST /health HTTP/1.1\r\nContent-Length: -1\r\n");
    end_scene(&scene);
}

static void at_the_data_ports(void **state)
{
    struct process_listener listeners[PROCESS_LISTENERS_MAX];
    struct scene scene;
    unsigned n, n_data = 0;

    (void)state;
    begin_scene(&scene);
    n = process_listeners(scene.node.process.pid, listeners);
    for (unsigned i = 0; i < n; i++) {
        char address[80];

        snprintf(address, sizeof(address), "%.63s:%u", listeners[i].host, listeners[i].port);
        if (strcmp(address, scene.node.control) == 0 ||
            strcmp(address, scene.node.metrics) == 0)
            continue;
        n_data++;
        random_bytes(&scene, address, "");
    }
    assert_true(n_data > 0);
    end_scene(&scene);
}

/* Whether the node has closed it; what it has sent before is of no interest. */
static bool is_closed(void *arg)
{
    const int *fd = arg;
    char bytes[4096];
    ssize_t n;

    if (*fd < 0)
        return true;
    do
        n = recv(*fd, bytes, sizeof(bytes), MSG_DONTWAIT);
    while (n > 0);
    return n == 0 || errno != EAGAIN;
}

/* They send a byte and no more. */
static void slow_ones(void **state)
{
    int fds[2 * N_SLOW];
    struct scene scene;

    (void)state;
    begin_scene(&scene);
    for (unsigned i = 0; i < 2 * N_SLOW; i++) {
        const char *address = i % 2 == 0 ? scene.node.control : scene.node.metrics;

        fds[i] = process_connect(address);
        if (fds[i] >= 0)
            (void)!send(fds[i], i % 2 == 0 ? "P" : "G", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    still_serves(&scene);
    assert_true(process_until(is_healthy, scene.node.metrics, PROCESS_PATIENCE_MS));
    assert_true(process_until(takes_clients, scene.node.control, PROCESS_PATIENCE_MS));
    /* Their time on both ports ends while they are still there. */
    for (unsigned i = 0; i < 2 * N_SLOW; i++)
        assert_true(process_until(is_closed, &fds[i], PROCESS_PATIENCE_MS));
    for (unsigned i = 0; i < 2 * N_SLOW; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    end_scene(&scene);
}

#define SETTINGS "\0\0\0\4\0\0\0\0\0" /* an empty frame of them */

/* Idle ones: silent from the begin on, or after a greeting.  New clients get in all the same,
 * and the one that is there keeps its connection. */
static void a_crowd(void **state)
{
    static const char greeting[] = PREFACE SETTINGS;
    int fds[N_CROWD];
    unsigned n_open = 0;
    struct rlimit limit;
    struct scene scene;

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    begin_scene(&scene);
    for (unsigned i = 0; i < N_CROWD; i++) {
        fds[i] = process_connect(scene.node.control);
        if (fds[i] >= 0 && i % 2 == 0)
            (void)!send(fds[i], greeting, sizeof(greeting) - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    assert_true(process_until(takes_clients, scene.node.control, PROCESS_PATIENCE_MS));
    /* One address has half of the places at most. */
    for (unsigned i = 0; i < N_CROWD; i++)
        n_open += !is_closed(&fds[i]);
    assert_true(n_open <= N_PLACES / 2);
    still_serves(&scene);
    assert_int_equal(system_number(scene.client, 0, "stats", "clients_lost"), 0);
    for (unsigned i = 0; i < N_CROWD; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    end_scene(&scene);
}

struct drips {
    const char *address;
    int fds[N_DRIPS];
    unsigned n_back;
    uint64_t drip_us; /* when they last did */
};

static void drip(struct drips *drips)
{
    if (process_now_us() - drips->drip_us <= DRIP_EVERY_US)
        return;
    for (unsigned i = 0; i < N_DRIPS; i++) {
        int *fd = &drips->fds[i];

        if (*fd >= 0 && send(*fd, "X: y\r\n", 6, MSG_NOSIGNAL | MSG_DONTWAIT) == 6)
            continue;
        if (*fd >= 0)
            close(*fd);
        drips->n_back += *fd >= 0;
        *fd = process_connect(drips->address);
        if (*fd >= 0)
            (void)!send(*fd, "GET / HTTP/1.1\r\n", 16, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    drips->drip_us = process_now_us();
}

/* Asks for health while the others drip on: whom they hold up is held up as long as they do. */
static bool is_healthy_beside(void *arg)
{
    static const char question[] = "GET /health HTTP/1.0\r\nHost: node\r\n\r\n";
    struct drips *drips = arg;
    struct pollfd in = {.fd = process_connect(drips->address), .events = POLLIN};
    uint64_t begin_us = process_now_us();
    char answer[1024] = "";
    unsigned code = 0;

    if (in.fd < 0)
        return false;
    (void)!send(in.fd, question, sizeof(question) - 1, MSG_NOSIGNAL);
    while (poll(&in, 1, DRIP_EVERY_US / 1000) == 0 &&
           process_now_us() - begin_us < PROCESS_PATIENCE_MS * UINT64_C(1000))
        drip(drips);
    (void)!recv(in.fd, answer, sizeof(answer) - 1, MSG_DONTWAIT);
    close(in.fd);
    return sscanf(answer, "HTTP/%*s %u", &code) == 1 && code == 200;
}

/* Each sends a line of a request that never ends, now and then, and comes again when it is shut
 * out.  Who asks for health is answered in between. */
static void drips(void **state)
{
    struct drips drips = {0};
    unsigned n_asked = 0;
    struct scene scene;
    uint64_t begin_us;

    (void)state;
    begin_scene(&scene);
    drips.address = scene.node.metrics;
    for (unsigned i = 0; i < N_DRIPS; i++)
        drips.fds[i] = -1;
    begin_us = process_now_us();
    while (process_now_us() - begin_us < DRIPS_US) {
        drip(&drips);
        assert_true(process_until(is_healthy_beside, &drips, PROCESS_PATIENCE_MS));
        n_asked++;
    }
    print_message("%u connections that drip came %u times again; /health asked %u times\n",
                  N_DRIPS, drips.n_back, n_asked);
    for (unsigned i = 0; i < N_DRIPS; i++)
        if (drips.fds[i] >= 0)
            close(drips.fds[i]);
    end_scene(&scene);
}

/* ---- resets ------------------------------------------------------------------------------ */

static size_t put_frame(unsigned char *to,
                        unsigned type,
                        unsigned flags,
                        uint32_t stream,
                        const void *data,
                        size_t n)
{
    const unsigned char header[9] = {0,
                                     0,
                                     (unsigned char)n,
                                     (unsigned char)type,
                                     (unsigned char)flags,
                                     (unsigned char)(stream >> 24),
                                     (unsigned char)(stream >> 16),
                                     (unsigned char)(stream >> 8),
                                     (unsigned char)stream};

    memcpy(to, header, 9);
    memcpy(to + 9, data, n);
    return 9 + n;
}

/* A field of a header block, as HPACK writes one that is in no table. */
static size_t put_field(unsigned char *to, const char *name, const char *value)
{
    size_t n = strlen(name), m = strlen(value);

    to[0] = 0;
    to[1] = (unsigned char)n;
    memcpy(to + 2, name, n);
    to[2 + n] = (unsigned char)m;
    memcpy(to + 3 + n, value, m);
    return 3 + n + m;
}

/* Calls that are begun and taken back at once: RESETS_PER_SEND of them. */
static size_t make_resets(unsigned char *to, uint32_t *stream)
{
    unsigned char block[256];
    size_t n = 0, at = 0;

    n += put_field(block + n, ":method", "POST");
    n += put_field(block + n, ":scheme", "http");
    n += put_field(block + n, ":path", "/topkv.Store/Table");
    n += put_field(block + n, ":authority", "x");
    n += put_field(block + n, "te", "trailers");
    n += put_field(block + n, "content-type", "application/grpc");
    for (unsigned i = 0; i < RESETS_PER_SEND; i++, *stream += 2) {
        at += put_frame(to + at, 1, 4, *stream, block, n);       /* HEADERS, complete */
        at += put_frame(to + at, 3, 0, *stream, "\0\0\0\10", 4); /* RST_STREAM: cancelled */
    }
    return at;
}

struct resetter {
    int fd;
    uint32_t stream;
    size_t begin, end;
    unsigned char bytes[RESETS_PER_SEND * 512];
};

/* Sends as much as the node takes now.  false: it has shut the connection, or all is sent. */
static bool reset_on(struct resetter *resetter)
{
    static char answers[64 << 10];
    ssize_t n = 0;

    while (recv(resetter->fd, answers, sizeof(answers), MSG_DONTWAIT) > 0)
        ;
    while (resetter->stream < 2 * RESETS_EACH) {
        if (resetter->begin == resetter->end) {
            resetter->begin = 0;
            resetter->end = make_resets(resetter->bytes, &resetter->stream);
        }
        n = send(resetter->fd, resetter->bytes + resetter->begin,
                 resetter->end - resetter->begin, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0)
            return errno == EAGAIN;
        resetter->begin += (size_t)n;
    }
    return false;
}

/* Rapid resets cost the node neither its memory nor its health. */
static void rapid_resets(void **state)
{
    struct resetter *resetters = calloc(N_RESETTERS, sizeof(*resetters));
    const int small_buffer = 16 << 10;
    unsigned n_open = N_RESETTERS, n_sent = 0;
    uint64_t begin_us, most = 0;
    struct scene scene;

    (void)state;
    assert_non_null(resetters);
    begin_scene(&scene);
    for (unsigned i = 0; i < N_RESETTERS; i++) {
        resetters[i].fd = process_connect(scene.node.control);
        resetters[i].stream = 1;
        assert_true(resetters[i].fd >= 0);
        /* What the node does not take stays unsent. */
        setsockopt(resetters[i].fd, SOL_SOCKET, SO_SNDBUF, &small_buffer, sizeof(small_buffer));
        assert_true(send(resetters[i].fd, PREFACE SETTINGS, sizeof(PREFACE SETTINGS) - 1,
                         MSG_NOSIGNAL) > 0);
    }
    begin_us = process_now_us();
    while (n_open > 0 && process_now_us() - begin_us < RESETS_US) {
        for (unsigned i = 0; i < N_RESETTERS; i++) {
            if (resetters[i].fd < 0 || reset_on(&resetters[i]))
                continue;
            close(resetters[i].fd);
            resetters[i].fd = -1;
            n_open--;
        }
        if (process_rss(scene.node.process.pid) > most)
            most = process_rss(scene.node.process.pid);
        assert_true(process_until(is_healthy, scene.node.metrics, PROCESS_PATIENCE_MS));
    }
    assert_true(process_until(is_healthy, scene.node.metrics, PROCESS_PATIENCE_MS));
    assert_true(process_until(takes_clients, scene.node.control, PROCESS_PATIENCE_MS));
    if (process_rss(scene.node.process.pid) > most)
        most = process_rss(scene.node.process.pid);
    for (unsigned i = 0; i < N_RESETTERS; i++) {
        n_sent += resetters[i].stream / 2;
        if (resetters[i].fd >= 0)
            close(resetters[i].fd);
    }
    print_message("%u calls begun and taken back: resident %+.1f MB at most\n", n_sent,
                  ((double)most - (double)scene.rss) / 1e6);
    assert_int_equal(n_open, 0); /* each was shut out, and soon */
    assert_true(n_sent < N_RESETTERS * RESETS_EACH / 4);
    assert_true(most < scene.rss + RSS_GROWTH);
    free(resetters);
    end_scene(&scene);
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(at_the_control_port),
        cmocka_unit_test(broken_frames),
        cmocka_unit_test(at_the_metrics_port),
        cmocka_unit_test(at_the_data_ports),
        cmocka_unit_test(slow_ones),
        cmocka_unit_test(a_crowd),
        cmocka_unit_test(drips),
        cmocka_unit_test(rapid_resets),
    };

    (void)argc;
    (void)argv;
    return cmocka_run_group_tests_name("system.hostile", tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return system_main(argc, argv, work, NULL);
}
