/* The HTTP library limits how long a connection may be silent, not how long a request may take:
 * a client that sends a byte now and then would keep its place for ever.  So connections are
 * limited here.  Each one may live for ten seconds; when most places are taken, each new
 * connection closes the oldest one of the address that has the most.  A complete request, such
 * as a health check, is answered long before either limit.
 */
#include "kvserver/metrics_http.h"

#include "kvserver/address.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/thread.h"

#include <microhttpd.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    CONNECTIONS_MAX = 64,
    CONNECTIONS_CALM = 48, /* above this, each new connection closes an old one */
    CONNECTION_BYTES = 16 << 10,
    CONNECTION_US = 10000000,
    LOOK_US = 200000, /* interval between checks of connections' ages */
    SLEEP_US = 60000000,
};

struct connection {
    struct kvs_metrics_http *http; /* NULL: not in use */
    bool ended;                    /* shut down; the library has yet to notice */
    int fd;
    uint64_t since_us;
    unsigned char address[16];
};

struct kvs_metrics_http {
    struct MHD_Daemon *daemon;
    struct kvs_metrics_source source;
    uint16_t port;
    struct kv_thread *thread;
    struct kv_signal *stop;
    atomic_bool stopping;
    struct connection connections[CONNECTIONS_MAX];
    unsigned n_connections; /* that have not been shut down */
};

static enum MHD_Result respond(struct MHD_Connection *connection,
                               unsigned code,
                               const char *type,
                               void *text,
                               size_t text_bytes,
                               enum MHD_ResponseMemoryMode mode)
{
    struct MHD_Response *response = MHD_create_response_from_buffer(text_bytes, text, mode);
    enum MHD_Result result;

    if (response == NULL) {
        if (mode == MHD_RESPMEM_MUST_FREE)
            free(text);
        return MHD_NO;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
    if (code == MHD_HTTP_METHOD_NOT_ALLOWED)
        MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    result = MHD_queue_response(connection, code, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result
respond_text(struct MHD_Connection *connection, unsigned code, const char *text)
{
    return respond(connection, code, "text/plain; charset=utf-8", (void *)text, strlen(text),
                   MHD_RESPMEM_PERSISTENT);
}

static enum MHD_Result respond_metrics(struct MHD_Connection *connection,
                                       const struct kvs_metrics_source *source)
{
    char *text = NULL;
    size_t text_bytes = 0;
    FILE *out = open_memstream(&text, &text_bytes);
    bool whole;

    if (out == NULL)
        return respond_text(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "out of memory\n");
    source->write(source->arg, out);
    whole = !ferror(out);
    if (fclose(out) != 0 || !whole) {
        free(text);
        return respond_text(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "out of memory\n");
    }
    return respond(connection, MHD_HTTP_OK, "text/plain; version=0.0.4; charset=utf-8", text,
                   text_bytes, MHD_RESPMEM_MUST_FREE);
}

static enum MHD_Result on_request(void *arg,
                                  struct MHD_Connection *connection,
                                  const char *url,
                                  const char *method,
                                  const char *version,
                                  const char *body,
                                  size_t *body_bytes,
                                  void **request)
{
    const struct kvs_metrics_http *http = arg;
    const struct kvs_metrics_source *source = &http->source;

    (void)version;
    (void)body;
    (void)body_bytes;
    (void)request;
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return respond_text(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "GET or HEAD only\n");
    if (strcmp(url, "/metrics") == 0)
        return respond_metrics(connection, source);
    if (strcmp(url, "/health") == 0) {
        return source->healthy(source->arg)
                   ? respond_text(connection, MHD_HTTP_OK, "ok\n")
                   : respond_text(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "stuck\n");
    }
    if (strcmp(url, "/ready") == 0) {
        return source->ready(source->arg)
                   ? respond_text(connection, MHD_HTTP_OK, "ready\n")
                   : respond_text(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "not ready\n");
    }
    return respond_text(connection, MHD_HTTP_NOT_FOUND, "/metrics, /health or /ready\n");
}

/* ---- connections ------------------------------------------------------------------------- */

static void end(struct connection *connection)
{
    shutdown(connection->fd, SHUT_RDWR);
    connection->ended = true;
    connection->http->n_connections--;
}

static unsigned n_of_address(const struct kvs_metrics_http *http, const unsigned char *address)
{
    unsigned n = 0;

    for (unsigned i = 0; i < CONNECTIONS_MAX; i++) {
        const struct connection *connection = &http->connections[i];

        n += connection->http != NULL && !connection->ended &&
             memcmp(connection->address, address, sizeof(connection->address)) == 0;
    }
    return n;
}

/* Ends the oldest connection of the address that has the most. */
static void end_one(struct kvs_metrics_http *http)
{
    struct connection *oldest = NULL;
    unsigned n_most = 0;

    for (unsigned i = 0; i < CONNECTIONS_MAX; i++) {
        struct connection *connection = &http->connections[i];
        unsigned n;

        if (connection->http == NULL || connection->ended)
            continue;
        n = n_of_address(http, connection->address);
        if (oldest == NULL || n > n_most ||
            (n == n_most && connection->since_us < oldest->since_us)) {
            oldest = connection;
            n_most = n;
        }
    }
    if (oldest != NULL)
        end(oldest);
}

static void read_address(const struct sockaddr *from, unsigned char address[16])
{
    memset(address, 0, 16);
    if (from->sa_family == AF_INET)
        memcpy(address, &((const struct sockaddr_in *)(const void *)from)->sin_addr, 4);
    else if (from->sa_family == AF_INET6)
        memcpy(address, &((const struct sockaddr_in6 *)(const void *)from)->sin6_addr, 16);
}

static void on_connection(void *arg,
                          struct MHD_Connection *opened,
                          void **ret_connection,
                          enum MHD_ConnectionNotificationCode what)
{
    struct kvs_metrics_http *http = arg;
    struct connection *connection = *ret_connection;

    if (what == MHD_CONNECTION_NOTIFY_CLOSED) {
        if (connection != NULL) {
            http->n_connections -= !connection->ended;
            connection->http = NULL;
        }
        return;
    }
    for (unsigned i = 0; i < CONNECTIONS_MAX && connection == NULL; i++)
        if (http->connections[i].http == NULL)
            connection = &http->connections[i];
    if (connection == NULL)
        return; /* cannot happen: the library's limit is the same */
    *connection = (struct connection){
        .http = http,
        .fd = MHD_get_connection_info(opened, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd,
        .since_us = kv_clock_now(&kv_clock_real),
    };
    read_address(
        MHD_get_connection_info(opened, MHD_CONNECTION_INFO_CLIENT_ADDRESS)->client_addr,
        connection->address);
    http->n_connections++;
    *ret_connection = connection;
    if (http->n_connections > CONNECTIONS_CALM)
        end_one(http);
}

static void end_old(struct kvs_metrics_http *http)
{
    uint64_t now_us = kv_clock_now(&kv_clock_real);

    for (unsigned i = 0; i < CONNECTIONS_MAX; i++) {
        struct connection *connection = &http->connections[i];

        if (connection->http != NULL && !connection->ended &&
            now_us - connection->since_us > CONNECTION_US)
            end(connection);
    }
}

static void run(void *arg)
{
    struct kvs_metrics_http *http = arg;
    const int fds[2] = {
        MHD_get_daemon_info(http->daemon, MHD_DAEMON_INFO_EPOLL_FD)->epoll_fd,
        kv_signal_fd(http->stop),
    };

    while (!atomic_load(&http->stopping)) {
        uint64_t sleep_us = http->n_connections > 0 ? LOOK_US : SLEEP_US;
        unsigned long long ms;

        if (MHD_get_timeout(http->daemon, &ms) == MHD_YES && ms * 1000 < sleep_us)
            sleep_us = ms * 1000;
        kv_sleep_fds(fds, 2, sleep_us);
        MHD_run(http->daemon);
        end_old(http);
    }
}

/* ---- life -------------------------------------------------------------------------------- */

static kv_status_t
serve(struct kvs_metrics_http *http, int fd, const char *address, char *detail, size_t bytes)
{
    http->stop = kv_signal_create();
    if (http->stop != NULL)
        http->daemon = MHD_start_daemon(
            MHD_USE_EPOLL, 0, NULL, NULL, on_request, http, MHD_OPTION_LISTEN_SOCKET, fd,
            MHD_OPTION_CONNECTION_LIMIT, (unsigned)CONNECTIONS_MAX,
            MHD_OPTION_NOTIFY_CONNECTION, on_connection, http,
            MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_BYTES, MHD_OPTION_END);
    if (http->daemon == NULL)
        close(fd);
    if (http->daemon == NULL ||
        kv_thread_start("kv-metrics", run, http, &http->thread) != KV_OK) {
        snprintf(detail, bytes, "metrics: %s: cannot start a thread, or out of memory",
                 address);
        return KV_IO;
    }
    return KV_OK;
}

kv_status_t kvs_metrics_http_create(const char *address,
                                    const struct kvs_metrics_source *source,
                                    struct kvs_metrics_http **ret_http,
                                    char *detail,
                                    size_t detail_bytes)
{
    struct kvs_metrics_http *http = calloc(1, sizeof(*http));
    kv_status_t status;
    int fd;

    if (http == NULL) {
        snprintf(detail, detail_bytes, "out of memory: metrics");
        return KV_NO_MEMORY;
    }
    http->source = *source;
    status = kvs_address_listen("metrics", address, &fd, &http->port, detail, detail_bytes);
    if (status == KV_OK)
        status = serve(http, fd, address, detail, detail_bytes);
    if (status != KV_OK) {
        kvs_metrics_http_destroy(http);
        return status;
    }
    *ret_http = http;
    return KV_OK;
}

void kvs_metrics_http_destroy(struct kvs_metrics_http *http)
{
    if (http == NULL)
        return;
    atomic_store(&http->stopping, true);
    if (http->thread != NULL) {
        kv_signal_raise(http->stop);
        kv_thread_join(http->thread);
    }
    if (http->daemon != NULL)
        MHD_stop_daemon(http->daemon);
    if (http->stop != NULL)
        kv_signal_destroy(http->stop);
    free(http);
}

uint16_t kvs_metrics_http_port(const struct kvs_metrics_http *http)
{
    return http->port;
}
