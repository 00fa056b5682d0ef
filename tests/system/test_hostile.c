/* Whoever can reach a port can send it anything.  Random bytes, broken HTTP/2 and connections
 * that never get on are refused or dropped; the node serves on, in as much memory as before. */
#include "system.h"

#include "random.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    N_RANDOM = 300, /* connections of random bytes, for each port */
    RANDOM_BYTES_MAX = 8192,
    N_SLOW = 80,
    N_CROWD = 1000,
    N_TOKENS = 100,
};
/* The node's memory, which it touches ahead of use and in its own time, and something for the
 * libraries. */
#define RSS_GROWTH ((64 + 48 * PROCESS_MEMORY_FACTOR) << 20)

static const char *const small[] = {"--memory", "64M", NULL};

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
    scene->client = system_open(scene->node.control, "tcp", 0);
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
    /* Their time on both ports ends while they are still there. */
    assert_true(process_until(is_healthy, scene.node.metrics, PROCESS_PATIENCE_MS));
    assert_true(process_until(takes_clients, scene.node.control, PROCESS_PATIENCE_MS));
    for (unsigned i = 0; i < 2 * N_SLOW; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    end_scene(&scene);
}

static void a_crowd(void **state)
{
    int fds[N_CROWD];
    struct rlimit limit;
    struct scene scene;

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    begin_scene(&scene);
    for (unsigned i = 0; i < N_CROWD; i++)
        fds[i] = process_connect(scene.node.control);
    still_serves(&scene);
    for (unsigned i = 0; i < N_CROWD; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    end_scene(&scene);
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(at_the_control_port), cmocka_unit_test(broken_frames),
        cmocka_unit_test(at_the_metrics_port), cmocka_unit_test(at_the_data_ports),
        cmocka_unit_test(slow_ones),           cmocka_unit_test(a_crowd),
    };

    (void)argc;
    (void)argv;
    return cmocka_run_group_tests_name("system.hostile", tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return system_main(argc, argv, work, NULL);
}
