#include "kvserver/server.h"

#include "kvserver/address.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/config.h"
#include "kvserver/base/log.h"
#include "kvserver/base/memory.h"
#include "kvserver/base/thread.h"
#include "kvserver/data_dir.h"
#include "kvserver/disk/disk.h"
#include "kvserver/disk/free_space.h"
#include "kvserver/event_feed.h"
#include "kvserver/grpc_server.h"
#include "kvserver/metrics_http.h"
#include "kvserver/net/transport.h"
#include "kvserver/store/node.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum {
    TURN_IDLE_US = 100000,
    TURN_BUSY_US = 1000,
    STUCK_US = 5000000, /* /health fails once a thread has made no step for this long */
};

enum phase {
    STARTING,
    SERVING,
    DRAINING,
};

struct kvs_server {
    struct kvs_server_info info;
    struct kvs_data_dir *data_dir;
    struct kvs_grpc_server *grpc;
    struct kvs_event_feed *feed; /* NULL: none */
    struct kvs_metrics_http *http;
    struct kv_disk *disk;
    struct kv_transport *transport;
    struct kvs_node *node;
    bool node_runs;

    /* read by the metrics thread */
    struct kvs_node *_Atomic shown_node;
    atomic_int phase;
    _Atomic uint64_t turn_us; /* time of the control thread's last step */
};

/* ---- what the metrics thread asks -------------------------------------------------------- */

static void write_metrics(void *arg, FILE *out)
{
    struct kvs_server *server = arg;
    struct kvs_node *node = atomic_load(&server->shown_node);

    if (node != NULL)
        kvs_node_metrics(node, out);
    if (server->feed != NULL)
        kvs_event_feed_metrics(server->feed, out);
}

static bool is_healthy(void *arg)
{
    struct kvs_server *server = arg;
    const struct kvs_node *node = atomic_load(&server->shown_node);
    uint64_t last_us = atomic_load(&server->turn_us);
    uint64_t now_us;

    /* Reserving much memory takes long; that is not a failure. */
    if (atomic_load(&server->phase) == STARTING)
        return true;
    if (node != NULL && kvs_node_last_step_us(node) < last_us)
        last_us = kvs_node_last_step_us(node);
    now_us = kv_clock_now(&kv_clock_real);
    return now_us < last_us || now_us - last_us < STUCK_US;
}

static bool is_ready(void *arg)
{
    struct kvs_server *server = arg;

    return atomic_load(&server->phase) == SERVING;
}

/* ---- startup ----------------------------------------------------------------------------- */

/* Each client needs several descriptors: for its control connection and for its data
 * channels. */
static void raise_descriptor_limit(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static kv_status_t find_data_dir(
    const char *option, char *dir, size_t dir_bytes, char *detail, size_t detail_bytes)
{
    const char *data = getenv("XDG_DATA_HOME");
    const char *home = getenv("HOME");
    int length;

    if (option[0] != 0) {
        length = snprintf(dir, dir_bytes, "%s", option);
    } else if (data != NULL && data[0] == '/') {
        length = snprintf(dir, dir_bytes, "%s/topkv", data);
    } else if (home != NULL && home[0] == '/') {
        length = snprintf(dir, dir_bytes, "%s/.local/share/topkv", home);
    } else {
        snprintf(detail, detail_bytes,
                 "data directory: --dir is not given and HOME is not set");
        return KV_INVALID;
    }
    if ((size_t)length >= dir_bytes) {
        snprintf(detail, detail_bytes, "data directory: path too long: %s", dir);
        return KV_INVALID;
    }
    return KV_OK;
}

/* The node's configuration but for what has to be opened first: name, transport and disk. */
static struct kvs_node_config node_config(const struct kvs_server_options *options,
                                          const struct kvs_server_info *info)
{
    return (struct kvs_node_config){
        .memory_bytes = info->memory,
        .scrub_bytes = options->scrub,
        .scrub_disk_bytes = options->scrub_disk,
        .n_threads = info->n_threads,
        .sessions_max = (uint32_t)options->sessions,
        .root_sessions = (uint32_t)options->root_sessions,
        .clients_max = (uint32_t)options->clients,
        .credits = (uint32_t)options->credits,
        .lease_ms = (uint32_t)options->lease_ms,
        .object_ttl_s = (uint32_t)options->object_ttl,
        .poll = options->poll,
        .eviction = options->eviction,
        .tenant_quota = options->tenant_quota,
        .clock = &kv_clock_real,
    };
}

/* Reads --disk.  Returns false if it is nothing that it may be; *ret_bytes is UINT64_MAX for
 * auto. */
static bool disk_option(const char *option, uint64_t *ret_bytes)
{
    *ret_bytes = strcmp(option, "auto") == 0 ? UINT64_MAX : 0;
    return strcmp(option, "auto") == 0 || strcmp(option, "none") == 0 ||
           kv_config_parse_size(option, ret_bytes);
}

static struct kvs_event_feed_config feed_config(const struct kvs_server_options *options)
{
    return (struct kvs_event_feed_config){
        .endpoint = options->events,
        .replay_endpoint = options->events_replay,
        .topic = options->events_topic,
        .int_hashes = strcmp(options->events_hashes, "int") == 0,
        .buffer_bytes = options->events_buffer,
    };
}

static kv_status_t
check_feed(const struct kvs_server_options *options, char *detail, size_t detail_bytes)
{
    const struct kvs_event_feed_config config = feed_config(options);

    if (options->events[0] != 0)
        return kvs_event_feed_check(&config, detail, detail_bytes);
    if (options->events_replay[0] == 0)
        return KV_OK;
    snprintf(detail, detail_bytes, "events-replay: %s: needs --events as well",
             options->events_replay);
    return KV_INVALID;
}

/* Fills `info` and checks what can be checked before anything starts: a value that is wrong is
 * named even if something else is in use. */
static kv_status_t settle_options(const struct kvs_server_options *options,
                                  struct kvs_server_info *info,
                                  char *detail,
                                  size_t detail_bytes)
{
    char host[KVS_ADDRESS_HOST_BYTES], have[16], want[16];
    uint64_t total = kv_memory_total();
    kv_status_t status;

    status = kvs_address_host("metrics", options->metrics, host, detail, detail_bytes);
    if (status == KV_OK)
        status = kvs_address_host("listen", options->listen, host, detail, detail_bytes);
    if (status == KV_OK && options->net_devices[0] != 0)
        snprintf(info->devices, sizeof(info->devices), "%s", options->net_devices);
    else if (status == KV_OK)
        status = kvs_address_devices("listen", options->listen, info->devices,
                                     sizeof(info->devices), detail, detail_bytes);
    if (status == KV_OK)
        status =
            find_data_dir(options->dir, info->dir, sizeof(info->dir), detail, detail_bytes);
    if (status == KV_OK)
        status = check_feed(options, detail, detail_bytes);
    if (status != KV_OK)
        return status;
    if (!disk_option(options->disk, &info->disk)) {
        snprintf(detail, detail_bytes, "disk: %s: not a size, auto or none", options->disk);
        return KV_INVALID;
    }

    info->exposed = !kvs_address_is_loopback(options->listen);
    info->n_threads = (uint32_t)options->threads;
    if (info->n_threads == 0)
        info->n_threads = kv_thread_cores();
    if (info->n_threads > KV_THREADS_MAX)
        info->n_threads = KV_THREADS_MAX;
    info->memory = options->memory != 0 ? options->memory : total / 4;
    if (total != 0 && info->memory > total) {
        snprintf(detail, detail_bytes, "memory: %s: more than the %s available",
                 kv_config_format_size(info->memory, want, sizeof(want)),
                 kv_config_format_size(total, have, sizeof(have)));
        return KV_NO_MEMORY;
    }
    struct kvs_node_config config = node_config(options, info);
    config.name = options->name[0] != 0 ? options->name : NULL;
    return kvs_node_check_config(&config, detail, detail_bytes);
}

/* Formats the address as given, with the port that was actually bound. */
static void format_address(const char *option, uint16_t port, char *text, size_t text_bytes)
{
    int host_bytes = (int)(strrchr(option, ':') - option);

    snprintf(text, text_bytes, "%.*s:%u", host_bytes, option, (unsigned)port);
}

static kv_status_t open_feed(struct kvs_server *server,
                             const struct kvs_server_options *options,
                             char *detail,
                             size_t detail_bytes)
{
    const struct kvs_event_feed_config config = feed_config(options);
    struct kvs_server_info *info = &server->info;
    kv_status_t status = KV_OK;

    if (options->events[0] != 0)
        status = kvs_event_feed_create(&config, &server->feed, detail, detail_bytes);
    if (server->feed != NULL) {
        snprintf(info->events, sizeof(info->events), "%s",
                 kvs_event_feed_endpoint(server->feed));
        snprintf(info->events_replay, sizeof(info->events_replay), "%s",
                 kvs_event_feed_replay_endpoint(server->feed));
        info->events_exposed = !kvs_event_feed_is_local(server->feed);
    }
    return status;
}

static kv_status_t open_ports(struct kvs_server *server,
                              const struct kvs_server_options *options,
                              char *detail,
                              size_t detail_bytes)
{
    struct kvs_server_info *info = &server->info;
    struct kvs_metrics_source source = {write_metrics, is_healthy, is_ready, server};
    char host[128] = "";
    kv_status_t status;

    status = kvs_grpc_server_create(options->listen, (uint32_t)options->clients, &server->grpc,
                                    detail, detail_bytes);
    if (status != KV_OK)
        return status;
    format_address(options->listen, kvs_grpc_server_port(server->grpc), info->control,
                   sizeof(info->control));
    status = open_feed(server, options, detail, detail_bytes);
    if (status != KV_OK)
        return status;
    status =
        kvs_metrics_http_create(options->metrics, &source, &server->http, detail, detail_bytes);
    if (status != KV_OK)
        return status;
    format_address(options->metrics, kvs_metrics_http_port(server->http), info->metrics,
                   sizeof(info->metrics));

    if (options->name[0] != 0) {
        snprintf(info->name, sizeof(info->name), "%s", options->name);
    } else {
        gethostname(host, sizeof(host) - 1);
        snprintf(info->name, sizeof(info->name), "%s:%u", host,
                 (unsigned)kvs_grpc_server_port(server->grpc));
    }
    return KV_OK;
}

static kv_status_t open_transport(struct kvs_server *server,
                                  const struct kvs_server_options *options,
                                  char *detail,
                                  size_t detail_bytes)
{
    struct kvs_server_info *info = &server->info;
    struct kv_transport_config config = {.transports = options->transport,
                                         .devices = info->devices};
    kv_status_t status;

    status = kv_transport_ucx.open(&config, &server->transport, detail, detail_bytes);
    if (status != KV_OK)
        return status;
    server->transport->ops->describe(server->transport, info->transports,
                                     sizeof(info->transports));
    for (char *c = info->transports; *c != 0; c++) {
        if (*c == ' ')
            *c = ',';
    }
    return KV_OK;
}

static kv_status_t open_node(struct kvs_server *server,
                             const struct kvs_server_options *options,
                             char *detail,
                             size_t detail_bytes)
{
    struct kvs_server_info *info = &server->info;
    struct kvs_node_config config = node_config(options, info);
    char memory[16];
    kv_status_t status;

    config.name = info->name;
    config.transport = server->transport;
    config.disk = server->disk;
    config.disk_bytes = info->disk;
    config.events = server->feed != NULL ? kvs_event_feed_sink(server->feed) : NULL;
    status = kvs_node_create(&config, &server->node, detail, detail_bytes);
    if (status == KV_NO_MEMORY)
        snprintf(detail, detail_bytes, "memory: cannot reserve %s",
                 kv_config_format_size(info->memory, memory, sizeof(memory)));
    if (status != KV_OK)
        return status;
    kvs_node_set_control_waker(server->node, kvs_grpc_server_wake, server->grpc);
    status = kvs_node_start(server->node, false);
    if (status != KV_OK) {
        snprintf(detail, detail_bytes, "threads: cannot start %u data threads",
                 info->n_threads);
        return status;
    }
    server->node_runs = true;
    return KV_OK;
}

/* Opens what outlasts the process: records and keys in RocksDB, rows in a file. */
static kv_status_t open_files(struct kvs_server *server, char *detail, size_t detail_bytes)
{
    char folder[sizeof(server->info.dir) + 8], rows[sizeof(server->info.dir) + 8];
    const struct kv_disk_rocksdb_options options = {.folder = folder,
                                                    .layout = KV_DISK_LAYOUT_KEYS};
    struct kv_disk *keys;
    kv_status_t status;

    snprintf(folder, sizeof(folder), "%s/keys", server->info.dir);
    snprintf(rows, sizeof(rows), "%s/rows", server->info.dir);
    status = kv_disk_rocksdb_open(&options, &keys, detail, detail_bytes);
    if (status == KV_OK)
        status = kv_disk_extents_open(rows, keys, &server->disk, detail, detail_bytes);
    if (status == KV_OK)
        kvs_data_dir_sync(server->data_dir);
    return status;
}

/* Whether an earlier node may have saved something there. */
static bool has_saved(const struct kvs_server_info *info)
{
    char file[sizeof(info->dir) + 16];

    snprintf(file, sizeof(file), "%s/keys/CURRENT", info->dir);
    return access(file, F_OK) == 0;
}

/* Opens the disk in the data directory, unless nothing is to be saved. */
static kv_status_t open_disk(struct kvs_server *server, char *detail, size_t detail_bytes)
{
    struct kvs_server_info *info = &server->info;
    const bool is_auto = info->disk == UINT64_MAX;
    const uint64_t room = kvs_data_dir_room(server->data_dir);
    const uint64_t room_of_rows = room > KV_FREE_FOR_ROWS ? room - KV_FREE_FOR_ROWS : 0;
    kv_status_t status = KV_UNSUPPORTED;
    char text[16];

    if (is_auto)
        info->disk = room / 2 < room_of_rows || room_of_rows == 0 ? room / 2 : room_of_rows;
    if (info->disk > room_of_rows)
        kv_log(KV_LOG_WARN, "disk: %s: %s, %s: nothing is saved any more when %d MiB are left",
               info->dir, is_auto ? "there is little room" : "--disk is more than there is",
               kv_config_format_size(room, text, sizeof(text)), KV_FREE_FOR_ROWS >> 20);
    if (info->disk > 0)
        status = open_files(server, detail, detail_bytes);
    if (status == KV_OK)
        return status;
    if (is_auto && status == KV_NO_MEMORY && !has_saved(info)) {
        kv_log(KV_LOG_WARN, "%s: nothing is saved", detail);
        status = KV_UNSUPPORTED;
    }
    if (info->disk > 0 && !(is_auto && status == KV_UNSUPPORTED))
        return status;
    info->disk = 0;
    server->disk = kv_disk_memory_open(&kv_clock_real, 0);
    if (server->disk != NULL)
        return KV_OK;
    snprintf(detail, detail_bytes, "disk: out of memory");
    return KV_NO_MEMORY;
}

kv_status_t kvs_server_create(const struct kvs_server_options *options,
                              struct kvs_server **ret_server,
                              char *detail,
                              size_t detail_bytes)
{
    struct kvs_server *server = calloc(1, sizeof(*server));
    kv_status_t status;

    if (server == NULL) {
        snprintf(detail, detail_bytes, "out of memory");
        return KV_NO_MEMORY;
    }
    raise_descriptor_limit();
    status = settle_options(options, &server->info, detail, detail_bytes);
    if (status != KV_OK)
        goto err;
    status = kvs_data_dir_open(server->info.dir, &server->data_dir, detail, detail_bytes);
    if (status != KV_OK)
        goto err;
    status = open_ports(server, options, detail, detail_bytes);
    if (status != KV_OK)
        goto err;
    status = open_disk(server, detail, detail_bytes);
    if (status != KV_OK)
        goto err;
    status = open_transport(server, options, detail, detail_bytes);
    if (status != KV_OK)
        goto err;
    status = open_node(server, options, detail, detail_bytes);
    if (status != KV_OK)
        goto err;
    status = kvs_grpc_server_start(server->grpc, server->node);
    if (status != KV_OK) {
        snprintf(detail, detail_bytes, "listen: %s: cannot start a thread",
                 server->info.control);
        goto err;
    }

    atomic_store(&server->turn_us, kv_clock_now(&kv_clock_real));
    atomic_store(&server->shown_node, server->node);
    atomic_store(&server->phase, SERVING);
    *ret_server = server;
    return KV_OK;

err:
    kvs_server_destroy(server);
    return status;
}

void kvs_server_destroy(struct kvs_server *server)
{
    if (server == NULL)
        return;
    kvs_metrics_http_destroy(server->http); /* first: it reads what is destroyed next */
    if (server->node_runs)
        kvs_node_stop(server->node);
    kvs_node_destroy(server->node);
    kvs_event_feed_destroy(server->feed); /* after the node, which tells it of events */
    if (server->transport != NULL)
        server->transport->ops->close(server->transport);
    kv_disk_close(server->disk);
    kvs_grpc_server_destroy(server->grpc); /* after the node, whose threads may still wake it */
    kvs_data_dir_close(server->data_dir);
    free(server);
}

const struct kvs_server_info *kvs_server_get_info(const struct kvs_server *server)
{
    return &server->info;
}

/* ---- serving ----------------------------------------------------------------------------- */

void kvs_server_step(struct kvs_server *server)
{
    bool busy = kvs_node_control_step(server->node);

    atomic_store(&server->turn_us, kv_clock_now(&kv_clock_real));
    kvs_grpc_server_step(server->grpc, busy ? TURN_BUSY_US : TURN_IDLE_US);
}

void kvs_server_drain(struct kvs_server *server)
{
    atomic_store(&server->phase, DRAINING);
    kvs_node_drain(server->node);
}

bool kvs_server_drained(struct kvs_server *server)
{
    return kvs_node_drained(server->node);
}

bool kvs_server_drain_requested(const struct kvs_server *server)
{
    return kvs_node_drain_requested(server->node);
}
