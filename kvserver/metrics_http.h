/* metrics_http.h - the HTTP server for monitoring: /metrics, /health, /ready.
 *
 *   /metrics  200, Prometheus text
 *   /health   200 while all threads make progress, else 503
 *   /ready    200 while the node accepts new sessions; 503 while it starts or drains
 *
 * Everything else is 404; methods other than GET and HEAD are 405.  A connection may live for
 * ten seconds in all.  Slow connections cannot keep complete requests from being answered.
 *
 * Threads: a thread of its own, which no other work delays, calls the source's functions.
 * create/destroy: startup.
 */
#ifndef KV_KVSERVER_METRICS_HTTP_H
#define KV_KVSERVER_METRICS_HTTP_H

#include "proto/kv_status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct kvs_metrics_http;

struct kvs_metrics_source {
    void (*write)(void *arg, FILE *out);
    bool (*healthy)(void *arg);
    bool (*ready)(void *arg);
    void *arg;
};

/* Listens on "HOST:PORT" and serves; port 0 picks a free port.  Copies the source.  Fails with
 * KV_INVALID or KV_IO; `detail` has the reason. */
kv_status_t kvs_metrics_http_create(const char *address,
                                    const struct kvs_metrics_source *source,
                                    struct kvs_metrics_http **ret_http,
                                    char *detail,
                                    size_t detail_bytes);

/* Stops serving.  After it returns, no function of the source is called.  NULL is allowed. */
void kvs_metrics_http_destroy(struct kvs_metrics_http *http);

uint16_t kvs_metrics_http_port(const struct kvs_metrics_http *http);

#endif
