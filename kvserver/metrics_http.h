/* metrics_http.h - the HTTP page that watches the node: /metrics, /health, /ready.
 *
 *   /metrics  200, Prometheus text
 *   /health   200 while the process does its work, else 503
 *   /ready    200 while it takes new sessions; 503 when it starts or drains
 *
 * Everything else is 404; methods other than GET and HEAD are 405.  A connection has ten
 * seconds for all that it wants; what comes in one piece is answered however many others drip.
 *
 * Threads: a thread of its own, which nothing else delays, calls the source's functions.
 * create/destroy: start-up.
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

/* Listens on "HOST:PORT" and serves; port 0 takes a free one.  Copies the source.
 * KV_INVALID, KV_IO: `detail` says what was wrong. */
kv_status_t kvs_metrics_http_create(const char *address,
                                    const struct kvs_metrics_source *source,
                                    struct kvs_metrics_http **ret_http,
                                    char *detail,
                                    size_t detail_bytes);

/* Nothing of the source is called after this.  NULL is allowed. */
void kvs_metrics_http_destroy(struct kvs_metrics_http *http);

uint16_t kvs_metrics_http_port(const struct kvs_metrics_http *http);

#endif
