#include "metrics_http.h"

#include "address.h"

#include <microhttpd.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    CONNECTIONS_MAX = 64,
    TIMEOUT_S = 10,
    CONNECTION_BYTES = 16 << 10,
};

struct kv_metrics_http {
    struct MHD_Daemon *daemon;
    struct kv_metrics_source source;
    uint16_t port;
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
                                       const struct kv_metrics_source *source)
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
    const struct kv_metrics_http *http = arg;
    const struct kv_metrics_source *source = &http->source;

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

kv_status_t kv_metrics_http_create(const char *address,
                                   const struct kv_metrics_source *source,
                                   struct kv_metrics_http **ret_http,
                                   char *detail,
                                   size_t detail_bytes)
{
    struct kv_metrics_http *http = calloc(1, sizeof(*http));
    kv_status_t status;
    int fd;

    if (http == NULL) {
        snprintf(detail, detail_bytes, "metrics: out of memory");
        return KV_NO_MEMORY;
    }
    http->source = *source;
    status = kv_address_listen("metrics", address, &fd, &http->port, detail, detail_bytes);
    if (status != KV_OK) {
        free(http);
        return status;
    }
    http->daemon = MHD_start_daemon(
        MHD_USE_AUTO_INTERNAL_THREAD, 0, NULL, NULL, on_request, http, MHD_OPTION_LISTEN_SOCKET,
        fd, MHD_OPTION_CONNECTION_LIMIT, (unsigned)CONNECTIONS_MAX,
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)TIMEOUT_S, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)CONNECTION_BYTES, MHD_OPTION_END);
    if (http->daemon == NULL) {
        snprintf(detail, detail_bytes, "metrics: %s: no thread or memory", address);
        close(fd);
        free(http);
        return KV_IO;
    }
    *ret_http = http;
    return KV_OK;
}

void kv_metrics_http_destroy(struct kv_metrics_http *http)
{
    if (http == NULL)
        return;
    MHD_stop_daemon(http->daemon);
    free(http);
}

uint16_t kv_metrics_http_port(const struct kv_metrics_http *http)
{
    return http->port;
}
