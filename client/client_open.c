/* kv_client_open(): selects the transports that the options name and connects to the nodes. */
#define _GNU_SOURCE /* program_invocation_short_name */
#include "client/client.h"
#include "client/control.h"
#include "client/control_message.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/net_devices.h"
#include "client/node.h"
#include "client/node_connect.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/cpu_quota.h"
#include "kvserver/base/thread.h"
#include "kvserver/cluster/members.h"
#include "kvserver/net/transport.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool is_loopback(const char *address)
{
    return strncmp(address, "loopback:", 9) == 0;
}

#ifdef KV_WITH_GRPC
static kv_status_t open_grpc(struct kv_client *client,
                             uint32_t node_index,
                             const char *address,
                             struct kvc_control **ret_control)
{
    (void)node_index;
    /* Without a descriptor for it, a wait looks every millisecond. */
    if (client->woken == NULL)
        client->woken = kv_signal_create();
    return kvc_control_grpc_open(address, client->peer_timeout_us / 1000, client->woken,
                                 ret_control);
}
#endif

/* Selects the transport and the control transport, and each node's channel mode. */
static kv_status_t choose_rows(const struct kv_client_options *options,
                               const struct kv_members *map,
                               struct kvc_client_setup *setup,
                               struct kvc_node_setup *nodes,
                               char *detail,
                               size_t detail_bytes)
{
    const char *wanted = options->transport != NULL ? options->transport : "auto";
    const char *const first = map->members[0].address; /* a list has one at least */
    const char *addresses[KV_NODES_MAX];

    if (strcmp(wanted, "auto") != 0 && strcmp(wanted, "tcp") != 0 &&
        strcmp(wanted, "shm") != 0) {
        snprintf(detail, detail_bytes, "transport: %s: must be auto, tcp or shm", wanted);
        return KV_INVALID;
    }
    for (uint32_t i = 0; i < map->n_members; i++) {
        addresses[i] = map->members[i].address;
        nodes[i] = (struct kvc_node_setup){.address = addresses[i],
                                           .name = map->members[i].name,
                                           .weight = map->members[i].weight,
                                           .mode = KV_CHANNEL_NETWORK};
        if (is_loopback(addresses[i]) != is_loopback(first)) {
            snprintf(detail, detail_bytes, "nodes: %s: embedded and network nodes in one list",
                     addresses[i]);
            return KV_INVALID;
        }
    }
    if (is_loopback(first)) {
        const struct kv_transport_config config = {0};

        setup->open_control = kvc_control_message_open;
        return kv_transport_loopback.open(&config, &setup->transport, detail, detail_bytes);
    }
#if defined(KV_WITH_UCX) && defined(KV_WITH_GRPC)
    char devices[512];
    struct kv_transport_config config = {
        .transports = wanted, .devices = options->net_devices, .trusts_peers = true};

    if (config.devices == NULL) {
        kv_status_t status = kvc_device_find(addresses, setup->n_nodes, devices,
                                             sizeof(devices), detail, detail_bytes);
        if (status != KV_OK)
            return status;
        config.devices = devices;
    }
    for (uint32_t i = 0; i < setup->n_nodes; i++) {
        bool is_guess = strcmp(wanted, "auto") == 0 && kvc_device_is_local(addresses[i]);

        if (is_guess || strcmp(wanted, "shm") == 0)
            nodes[i].mode = KV_CHANNEL_SHARED;
        nodes[i].may_fall_back = is_guess;
    }
    setup->open_control = open_grpc;
    return kv_transport_ucx.open(&config, &setup->transport, detail, detail_bytes);
#else
    snprintf(detail, detail_bytes, "nodes: %s: this build has no network support", first);
    return KV_UNSUPPORTED;
#endif
}

/* Whether open must fail although other nodes connect: this node replies, but not as a node of
 * the list. */
static bool is_refused(const struct kvc_node *node)
{
    switch (node->last_failure) {
    case KV_OK:
    case KV_UNREACHABLE:
    case KV_DEADLINE:
    case KV_BUSY:
    case KV_NO_MEMORY:
    case KV_DRAINING:
        return false;
    default:
        return true;
    }
}

/* Appends a node's failure to `detail`. */
static void
tell_failure(const struct kvc_node *node, uint64_t begin_us, char *detail, size_t detail_bytes)
{
    bool is_over = node->last_failure != KV_OK && node->state == KVC_NODE_IDLE;
    size_t used = strlen(detail);

    snprintf(detail + used, detail_bytes - used, "%snode %s: open: %s: after %.3f s: %s",
             used > 0 ? "; " : "", node->address,
             kv_status_name(is_over ? node->last_failure : KV_UNREACHABLE),
             (double)(node->client->loop.now_us - begin_us) / 1e6,
             is_over ? node->failure_text : "no reply");
}

/* Returns the status of an open without any connected node: that of all nodes if they agree,
 * else KV_UNREACHABLE. */
static kv_status_t tell_failures(const struct kv_client *client,
                                 uint64_t begin_us,
                                 char *detail,
                                 size_t detail_bytes)
{
    kv_status_t status = client->nodes[0].last_failure;

    detail[0] = '\0';
    for (uint32_t i = 0; i < client->n_nodes; i++) {
        tell_failure(&client->nodes[i], begin_us, detail, detail_bytes);
        if (client->nodes[i].last_failure != status)
            status = KV_UNREACHABLE;
    }
    return status != KV_OK ? status : KV_UNREACHABLE;
}

/* Tries a failed node once more: gRPC considers a connection failed if a library call between
 * its own calls changes errno, as malloc() does in a system without /sys. */
static bool try_again(struct kvc_node *node)
{
    if (node->last_failure != KV_UNREACHABLE || node->is_second_try)
        return false;
    node->is_second_try = true;
    kvc_node_connect(node);
    return true;
}

/* Begins to connect to all nodes and waits until each has connected or failed: at most until
 * the deadline and, once one has connected, at most peer_timeout_us from the start.  Other
 * connections continue in the background. */
static kv_status_t connect_all(struct kv_client *client, char *detail, size_t detail_bytes)
{
    uint64_t begin_us = client->loop.now_us;
    uint64_t until_us = begin_us + client->deadline_us;

    for (uint32_t i = 0; i < client->n_nodes; i++)
        kvc_node_connect(&client->nodes[i]);
    while (true) {
        uint32_t n_connected = 0, n_pending = 0;

        kvc_client_step(client);
        kvc_nodes_step(client);
        for (uint32_t i = 0; i < client->n_nodes; i++) {
            struct kvc_node *node = &client->nodes[i];

            if (is_refused(node)) {
                detail[0] = '\0';
                tell_failure(node, begin_us, detail, detail_bytes);
                return node->last_failure;
            }
            n_connected += node->state == KVC_NODE_CONNECTED;
            n_pending += node->state == KVC_NODE_CONNECTING || try_again(node);
        }
        if (n_connected > 0 && until_us > begin_us + client->peer_timeout_us)
            until_us = begin_us + client->peer_timeout_us;
        if (n_pending == 0 || client->loop.now_us >= until_us)
            return n_connected > 0 ? KV_OK
                                   : tell_failures(client, begin_us, detail, detail_bytes);
        kvc_client_wait_for_event(client, until_us);
    }
}

kv_status_t kv_client_open(const struct kv_client_options *options,
                           struct kv_client **ret_client,
                           char *detail,
                           size_t detail_bytes)
{
    struct kvc_node_setup nodes[KV_NODES_MAX];
    struct kvc_client_setup setup = {
        .nodes = nodes,
        .clock = &kv_clock_real,
        .name = options->name,
        .tenant = options->tenant,
        .salt = options->salt,
        .salt_bytes = options->salt_bytes,
        .ops_max = options->ops_max,
        .deadline_ms = options->deadline_ms,
        .peer_timeout_ms = options->peer_timeout_ms,
    };
    char name[KV_NAME_BYTES_MAX + 1];
    char none[1];
    struct kv_members *map = NULL;
    struct kv_client *client = NULL;
    enum kv_idle_mode idle;
    kv_status_t status;

    if (detail_bytes == 0) {
        detail = none;
        detail_bytes = sizeof(none);
    }
    if (!kv_idle_find(options->poll, &idle)) {
        snprintf(detail, detail_bytes, "poll: %.40s: must be adaptive, busy or sleep",
                 options->poll);
        return KV_INVALID;
    }
    status = kv_members_static.get("nodes", options->nodes != NULL ? options->nodes : "", &map,
                                   detail, detail_bytes);
    if (status != KV_OK)
        return status;
    setup.n_nodes = map->n_members;
    if (setup.name == NULL) {
        snprintf(name, sizeof(name), "%s %ld", program_invocation_short_name, (long)getpid());
        setup.name = name;
    }
    status = choose_rows(options, map, &setup, nodes, detail, detail_bytes);
    if (status != KV_OK)
        goto out;
    status = kvc_client_create(&setup, &client);
    if (status != KV_OK) {
        snprintf(detail, detail_bytes, "open: %s", kv_status_name(status));
        setup.transport->ops->close(setup.transport);
        goto out;
    }
    client->owns_transport = true;
    client->idle.mode = kv_idle_within(idle, 1, kv_cpu_quota());
    status = connect_all(client, detail, detail_bytes);
    if (status == KV_OK && options->progress_thread)
        status = kvc_client_start_thread(client, detail, detail_bytes);
    if (status != KV_OK) {
        kv_client_close(client);
        goto out;
    }
    snprintf(detail, detail_bytes, "%s", "");
    *ret_client = client;

out:
    free(map);
    return status;
}
