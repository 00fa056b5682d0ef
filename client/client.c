#define _GNU_SOURCE /* program_invocation_short_name */
#include "client/client.h"

#include "kvserver/base/hash.h"
#include "kvserver/base/thread.h"
#include "proto/kvstore.pb-c.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    DEADLINE_MS = 5000,
    PEER_TIMEOUT_MS = 2000,
    RETRY_MS = 1000,
    OPS_MAX = 1024,
    SPIN_US = 50,            /* in which nothing came, before a wait sleeps */
    NAP_CALLS_US = 1000,     /* longest sleep while a carrier that wakes nobody has calls */
    NAP_ATTACHED_US = 10000, /* the same while it only watches a node */
    NAP_MAX_US = 1000000,
    NAP_BLIND_US = 100, /* where the port has nothing to sleep on */
    CONTROL_EVERY_US = 1000,
    PROGRESS_MAX = 64, /* turns of the port in one poll */
};

/* ---- making and ending ------------------------------------------------------------------- */

static void destroy(struct kv_client *client)
{
    if (client->port != NULL)
        client->port->row->port_close(client->port);
    /* Nothing touches memory for the client any more. */
    kv_control_message_fini(client);
    kv_trips_fini(client);
    while (!kv_list_empty(&client->buffers))
        kv_buffer_destroy(KV_LIST_ENTRY(client->buffers.next, struct kv_buffer, of_client));
    while (!kv_list_empty(&client->calls)) {
        struct kv_list *link = client->calls.next;

        kv_list_remove(link);
        free(KV_LIST_ENTRY(link, struct kv_call, of_client));
    }
    while (client->free_errands != NULL) {
        struct kv_errand *next = client->free_errands->next;

        free(client->free_errands);
        client->free_errands = next;
    }
    for (uint32_t i = 0; client->remotes != NULL && i < client->n_remotes; i++)
        free(client->remotes[i].address);
    free(client->remotes);
    for (uint32_t i = 0; client->op_pool != NULL && i < kv_pool_size(client->op_pool); i++)
        free(((struct kv_op *)kv_pool_at(client->op_pool, i))->room);
    kv_pool_destroy(client->op_pool);
    if (client->owns_transport)
        client->transport->row->close(client->transport);
    free(client);
}

static uint64_t micros(uint32_t ms, uint32_t fallback_ms)
{
    return (uint64_t)(ms > 0 ? ms : fallback_ms) * 1000;
}

kv_status_t kv_client_create(const struct kv_client_setup *setup, struct kv_client **ret_client)
{
    struct kv_client *client;
    kv_status_t status = KV_NO_MEMORY;

    if (setup->n_nodes == 0 || setup->n_nodes > KV_NODES_MAX)
        return KV_INVALID;
    client = calloc(1, sizeof(*client));
    if (client == NULL)
        return KV_NO_MEMORY;
    kv_list_init(&client->ops);
    kv_list_init(&client->sessions);
    kv_list_init(&client->buffers);
    kv_list_init(&client->calls);
    kv_list_init(&client->receipts);
    kv_list_init(&client->control_messages);
    client->clock = setup->clock;
    client->transport = setup->transport;
    client->open_control = setup->open_control;
    client->tenant = setup->tenant;
    client->credits = setup->credits;
    client->deadline_us = micros(setup->deadline_ms, DEADLINE_MS);
    client->peer_timeout_us = micros(setup->peer_timeout_ms, PEER_TIMEOUT_MS);
    client->retry_us = micros(setup->retry_ms, RETRY_MS);
    client->next_us = UINT64_MAX;
    client->now_us = client->polled_us = kv_clock_now(client->clock);
    snprintf(client->name, sizeof(client->name), "%s", setup->name != NULL ? setup->name : "");
    if (setup->seed != 0)
        kv_random_init(&client->random, setup->seed);
    else
        kv_random_init_secure(&client->random);
    kv_random_fill(&client->random, &client->attempts, sizeof(client->attempts));
    kv_placement_init(&client->placement, setup->n_nodes);

    client->remotes = calloc(setup->n_nodes, sizeof(*client->remotes));
    if (client->remotes == NULL)
        goto err_destroy;
    client->n_remotes = setup->n_nodes;
    for (uint32_t i = 0; i < setup->n_nodes; i++) {
        struct kv_remote *remote = &client->remotes[i];

        remote->client = client;
        remote->index = i;
        remote->mode = remote->first_mode = setup->nodes[i].mode;
        remote->may_fall_back = setup->nodes[i].may_fall_back;
        remote->address = strdup(setup->nodes[i].address);
        if (remote->address == NULL)
            goto err_destroy;
    }
    client->op_pool =
        kv_pool_create(setup->ops_max > 0 ? setup->ops_max : OPS_MAX, sizeof(struct kv_op));
    if (client->op_pool == NULL)
        goto err_destroy;
    status = kv_trips_init(client);
    if (status != KV_OK)
        goto err_destroy;
    status = client->transport->row->port_open(client->transport, &kv_client_events, client,
                                               &client->port);
    if (status != KV_OK)
        goto err_destroy;
    *ret_client = client;
    return KV_OK;

err_destroy:
    destroy(client);
    return status;
}

void kv_client_close(struct kv_client *client)
{
    if (client == NULL)
        return;
    client->is_closing = true;
    for (uint32_t i = 0; i < kv_pool_size(client->op_pool); i++) {
        struct kv_op *op = kv_pool_at(client->op_pool, i);

        if (op->is_lent)
            kv_op_free(op);
    }
    while (!kv_list_empty(&client->sessions))
        kv_session_free(KV_LIST_ENTRY(client->sessions.next, struct kv_session, of_client));
    for (uint32_t i = 0; i < client->n_remotes; i++) {
        struct kv_remote *remote = &client->remotes[i];

        if (remote->state == KV_REMOTE_CONNECTED && remote->failure == KV_OK)
            kv_remote_goodbye(remote);
        kv_remote_close(remote);
    }
    destroy(client);
}

/* ---- opening by options ------------------------------------------------------------------ */

/* Cuts "A,B" in place; returns how many, 0: too many or an empty one. */
static uint32_t split(char *text, const char *ret_parts[KV_NODES_MAX])
{
    uint32_t n_parts = 0;
    char *rest = text;

    while (rest != NULL) {
        char *comma = strchr(rest, ',');

        if (comma != NULL)
            *comma = 0;
        if (rest[0] == 0 || n_parts == KV_NODES_MAX)
            return 0;
        ret_parts[n_parts++] = rest;
        rest = comma != NULL ? comma + 1 : NULL;
    }
    return n_parts;
}

static bool is_loopback(const char *address)
{
    return strncmp(address, "loopback:", 9) == 0;
}

#ifdef KV_WITH_GRPC
static kv_status_t open_grpc(struct kv_client *client,
                             uint32_t node,
                             const char *address,
                             struct kv_control **ret_control)
{
    (void)client;
    (void)node;
    return kv_control_grpc_open(address, ret_control);
}
#endif

/* The rows of the tables that the options name. */
static kv_status_t choose_rows(const struct kv_client_options *options,
                               const char *const *addresses,
                               struct kv_client_setup *setup,
                               struct kv_remote_setup *nodes,
                               char *detail,
                               size_t detail_bytes)
{
    const char *wanted = options->transport != NULL ? options->transport : "auto";

    if (strcmp(wanted, "auto") != 0 && strcmp(wanted, "tcp") != 0 &&
        strcmp(wanted, "shm") != 0) {
        snprintf(detail, detail_bytes, "transport: not auto, tcp or shm: %s", wanted);
        return KV_INVALID;
    }
    for (uint32_t i = 0; i < setup->n_nodes; i++) {
        nodes[i] =
            (struct kv_remote_setup){.address = addresses[i], .mode = KV_CHANNEL_NETWORK};
        if (is_loopback(addresses[i]) != is_loopback(addresses[0])) {
            snprintf(detail, detail_bytes, "nodes: embedded and others in one list: %s",
                     addresses[i]);
            return KV_INVALID;
        }
        for (uint32_t j = 0; j < i; j++) {
            if (strcmp(addresses[i], addresses[j]) == 0) {
                snprintf(detail, detail_bytes, "nodes: twice in the list: %s", addresses[i]);
                return KV_INVALID;
            }
        }
    }
    if (is_loopback(addresses[0])) {
        const struct kv_transport_config config = {0};

        setup->open_control = kv_control_message_open;
        return kv_transport_loopback.open(&config, &setup->transport, detail, detail_bytes);
    }
#if defined(KV_WITH_UCX) && defined(KV_WITH_GRPC)
    char devices[512];
    struct kv_transport_config config = {.transports = wanted, .devices = options->net_devices};

    if (config.devices == NULL) {
        kv_status_t status = kv_device_find(addresses, setup->n_nodes, devices, sizeof(devices),
                                            detail, detail_bytes);
        if (status != KV_OK)
            return status;
        config.devices = devices;
    }
    for (uint32_t i = 0; i < setup->n_nodes; i++) {
        bool is_guess = strcmp(wanted, "auto") == 0 && kv_device_is_local(addresses[i]);

        if (is_guess || strcmp(wanted, "shm") == 0)
            nodes[i].mode = KV_CHANNEL_SHARED;
        nodes[i].may_fall_back = is_guess;
    }
    setup->open_control = open_grpc;
    return kv_transport_ucx.open(&config, &setup->transport, detail, detail_bytes);
#else
    snprintf(detail, detail_bytes, "nodes: this build has no network: %s", addresses[0]);
    return KV_UNSUPPORTED;
#endif
}

/* Another node does not make up for it: this one answers, but not as one of this list would. */
static bool is_refused(const struct kv_remote *remote)
{
    switch (remote->last_failure) {
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

/* Appends what became of a node to the texts of those before it. */
static void tell_failure(const struct kv_remote *remote,
                         uint64_t begin_us,
                         char *detail,
                         size_t detail_bytes)
{
    bool is_over = remote->last_failure != KV_OK && remote->state == KV_REMOTE_IDLE;
    size_t used = strlen(detail);

    snprintf(detail + used, detail_bytes - used, "%snode %s: open: %s: after %.3f s: %s",
             used > 0 ? "; " : "", remote->address,
             kv_status_name(is_over ? remote->last_failure : KV_UNREACHABLE),
             (double)(remote->client->now_us - begin_us) / 1e6,
             is_over ? remote->failure_text : "no answer");
}

/* How open ends when no node has answered: as each of them, if that is the same. */
static kv_status_t tell_failures(const struct kv_client *client,
                                 uint64_t begin_us,
                                 char *detail,
                                 size_t detail_bytes)
{
    kv_status_t status = client->remotes[0].last_failure;

    detail[0] = '\0';
    for (uint32_t i = 0; i < client->n_remotes; i++) {
        tell_failure(&client->remotes[i], begin_us, detail, detail_bytes);
        if (client->remotes[i].last_failure != status)
            status = KV_UNREACHABLE;
    }
    return status != KV_OK ? status : KV_UNREACHABLE;
}

/* A node that has failed is tried once more: gRPC takes a connection for failed when a library
 * call between its own changes errno, as malloc() does where there is no /sys. */
static bool try_again(struct kv_remote *remote)
{
    if (remote->last_failure != KV_UNREACHABLE || remote->is_second_try)
        return false;
    remote->is_second_try = true;
    kv_remote_connect(remote);
    return true;
}

/* Begins to connect to all nodes and waits until each has answered or failed: for as long as
 * the deadline allows, but once one is connected not beyond the time after which silence is a
 * failure.  Connections that are not made by then are on their way, as any other later. */
static kv_status_t connect_all(struct kv_client *client, char *detail, size_t detail_bytes)
{
    uint64_t begin_us = client->now_us;
    uint64_t until_us = begin_us + client->deadline_us;

    for (uint32_t i = 0; i < client->n_remotes; i++)
        kv_remote_connect(&client->remotes[i]);
    while (true) {
        uint32_t n_connected = 0, n_pending = 0;

        kv_client_step(client);
        kv_remotes_step(client);
        for (uint32_t i = 0; i < client->n_remotes; i++) {
            struct kv_remote *remote = &client->remotes[i];

            if (is_refused(remote)) {
                detail[0] = '\0';
                tell_failure(remote, begin_us, detail, detail_bytes);
                return remote->last_failure;
            }
            n_connected += remote->state == KV_REMOTE_CONNECTED;
            n_pending += remote->state == KV_REMOTE_CONNECTING || try_again(remote);
        }
        if (n_connected > 0 && until_us > begin_us + client->peer_timeout_us)
            until_us = begin_us + client->peer_timeout_us;
        if (n_pending == 0 || client->now_us >= until_us)
            return n_connected > 0 ? KV_OK
                                   : tell_failures(client, begin_us, detail, detail_bytes);
        kv_client_nap(client, until_us);
    }
}

kv_status_t kv_client_open(const struct kv_client_options *options,
                           struct kv_client **ret_client,
                           char *detail,
                           size_t detail_bytes)
{
    const char *addresses[KV_NODES_MAX];
    struct kv_remote_setup nodes[KV_NODES_MAX];
    struct kv_client_setup setup = {
        .nodes = nodes,
        .clock = &kv_clock_real,
        .name = options->name,
        .tenant = options->tenant,
        .ops_max = options->ops_max,
        .deadline_ms = options->deadline_ms,
        .peer_timeout_ms = options->peer_timeout_ms,
    };
    char name[KV_NAME_BYTES_MAX + 1];
    char none[1];
    char *list = strdup(options->nodes != NULL ? options->nodes : "");
    struct kv_client *client = NULL;
    kv_status_t status = KV_NO_MEMORY;

    if (detail_bytes == 0) {
        detail = none;
        detail_bytes = sizeof(none);
    }
    snprintf(detail, detail_bytes, "open: out of memory");
    if (list == NULL)
        goto out;
    setup.n_nodes = split(list, addresses);
    if (setup.n_nodes == 0) {
        snprintf(detail, detail_bytes, "nodes: not HOST:PORT,...: %.200s",
                 options->nodes != NULL ? options->nodes : "");
        status = KV_INVALID;
        goto out;
    }
    if (setup.name == NULL) {
        snprintf(name, sizeof(name), "%s %ld", program_invocation_short_name, (long)getpid());
        setup.name = name;
    }
    status = choose_rows(options, addresses, &setup, nodes, detail, detail_bytes);
    if (status != KV_OK)
        goto out;
    status = kv_client_create(&setup, &client);
    if (status != KV_OK) {
        snprintf(detail, detail_bytes, "open: %s", kv_status_name(status));
        setup.transport->row->close(setup.transport);
        goto out;
    }
    client->owns_transport = true;
    status = connect_all(client, detail, detail_bytes);
    if (status != KV_OK) {
        kv_client_close(client);
        goto out;
    }
    snprintf(detail, detail_bytes, "%s", "");
    *ret_client = client;

out:
    free(list);
    return status;
}

/* ---- turning ----------------------------------------------------------------------------- */

void kv_client_pump(struct kv_client *client)
{
    while (client->must_pump) {
        struct kv_list *link, *follow;

        client->must_pump = false;
        if (client->n_preparing > 0) {
            KV_LIST_EACH(link, follow, &client->ops) {
                struct kv_op *op = KV_LIST_ENTRY(link, struct kv_op, of_client);

                if (op->stage == KV_STAGE_PREPARING)
                    kv_op_prepare(op);
            }
        }
        kv_lanes_pump(client);
    }
}

static void timers(struct kv_client *client)
{
    uint64_t next_us = UINT64_MAX;
    struct kv_list *link, *follow;

    client->next_us = UINT64_MAX;
    KV_LIST_EACH(link, follow, &client->ops) {
        struct kv_op *op = KV_LIST_ENTRY(link, struct kv_op, of_client);

        if (op->deadline_us <= client->now_us)
            kv_op_expire(op);
        else if (op->deadline_us < next_us)
            next_us = op->deadline_us;
    }
    kv_trips_timers(client, &next_us);
    kv_calls_timers(client, &next_us);
    kv_sessions_timers(client, &next_us);
    kv_remotes_timers(client);
    for (uint32_t i = 0; i < client->n_remotes; i++)
        if (client->remotes[i].owed_us != 0)
            kv_client_timer(client, client->now_us + client->peer_timeout_us / 8);
    kv_client_timer(client, next_us);
}

/* `from` moved on by `us`, at most to `now`: it may have begun within the gap. */
static uint64_t later(uint64_t from_us, uint64_t us, uint64_t now_us)
{
    return us < now_us - from_us ? from_us + us : now_us;
}

/* Time in which the caller did not poll is not a node's silence. */
static void forgive(struct kv_client *client)
{
    uint64_t gap_us = client->now_us - client->polled_us;
    uint64_t most_us = client->peer_timeout_us / 8;

    client->polled_us = client->now_us;
    if (gap_us <= most_us)
        return;
    for (uint32_t i = 0; i < client->n_remotes; i++)
        if (client->remotes[i].owed_us != 0)
            client->remotes[i].owed_us =
                later(client->remotes[i].owed_us, gap_us - most_us, client->now_us);
}

void kv_client_step(struct kv_client *client)
{
    client->now_us = kv_clock_now(client->clock);
    forgive(client);
    for (unsigned i = 0; i < PROGRESS_MAX; i++)
        if (kv_port_progress(client->port) > 0)
            client->moved_us = client->now_us;
        else
            break;
    for (uint32_t i = 0; i < client->n_remotes; i++) {
        struct kv_remote *remote = &client->remotes[i];

        if (remote->control == NULL ||
            (remote->n_calls == 0 &&
             (!remote->has_attached || client->now_us - remote->control_us < CONTROL_EVERY_US)))
            continue;
        remote->control_us = client->now_us;
        remote->control->row->progress(remote->control);
    }
    if (client->now_us >= client->next_us)
        timers(client);
    kv_client_pump(client);
}

unsigned kv_poll(struct kv_client *client)
{
    unsigned n_ended;

    kv_client_step(client);
    kv_remotes_step(client);
    kv_client_pump(client);
    n_ended = client->n_ended;
    client->n_ended = 0;
    return n_ended;
}

void kv_client_nap(struct kv_client *client, uint64_t until_us)
{
    uint64_t now_us = kv_clock_now(client->clock);
    uint64_t wake_us = until_us < client->next_us ? until_us : client->next_us;
    uint64_t nap_us = wake_us > now_us ? wake_us - now_us : 0;
    int fd = -1;

    if (nap_us > NAP_MAX_US)
        nap_us = NAP_MAX_US;
    for (uint32_t i = 0; i < client->n_remotes; i++) {
        const struct kv_remote *remote = &client->remotes[i];

        if (remote->n_calls > 0 && nap_us > NAP_CALLS_US)
            nap_us = NAP_CALLS_US;
        if (remote->has_attached && nap_us > NAP_ATTACHED_US)
            nap_us = NAP_ATTACHED_US;
    }
    if (nap_us == 0 || client->n_failed > 0 || client->must_pump ||
        client->port->row->port_arm(client->port, &fd) != KV_OK)
        return;
    if (fd < 0 && nap_us > NAP_BLIND_US)
        nap_us = NAP_BLIND_US;
    kv_sleep_fds(&fd, 1, nap_us);
    /* The nodes could have woken us. */
    client->polled_us = kv_clock_now(client->clock);
}

static unsigned wait(struct kv_client *client, const struct kv_op *op, uint64_t until_us)
{
    unsigned n_ended = kv_poll(client);
    uint64_t spin_us = client->now_us + SPIN_US;

    while (op != NULL ? op->stage != KV_STAGE_ENDED : n_ended == 0) {
        if (client->now_us >= until_us)
            break;
        if (client->now_us < spin_us || client->now_us - client->moved_us < SPIN_US) {
            kv_relax();
        } else {
            kv_client_nap(client, until_us);
            spin_us = client->polled_us + SPIN_US;
        }
        n_ended += kv_poll(client);
    }
    return n_ended;
}

void kv_client_sleep(struct kv_client *client, const struct kv_op *op, uint64_t until_us)
{
    (void)wait(client, op, until_us);
}

unsigned kv_client_wait(struct kv_client *client, uint64_t timeout_us)
{
    uint64_t now_us = kv_clock_now(client->clock);

    return wait(client, NULL,
                timeout_us < UINT64_MAX - now_us ? now_us + timeout_us : UINT64_MAX);
}

/* ---- looking ----------------------------------------------------------------------------- */

uint64_t kv_client_now_us(const struct kv_client *client)
{
    return kv_clock_now(client->clock);
}

const char *kv_client_detail(const struct kv_client *client)
{
    return client->detail;
}

uint32_t kv_client_n_nodes(const struct kv_client *client)
{
    return client->n_remotes;
}

void kv_client_node(const struct kv_client *client,
                    uint32_t node,
                    struct kv_node_info *ret_info)
{
    const struct kv_remote *remote = &client->remotes[node < client->n_remotes ? node : 0];

    *ret_info = (struct kv_node_info){
        .address = remote->address,
        .name = remote->name,
        .transport = remote->transport,
        .transports = remote->transports,
        .state = remote->state == KV_REMOTE_CONNECTED ? KV_NODE_CONNECTED
                 : remote->has_connected              ? KV_NODE_LOST
                                                      : KV_NODE_UNREACHED,
        .detail = remote->failure_text,
        .n_threads = remote->n_lanes,
        .memory_bytes = remote->memory_bytes,
        .requests = remote->requests,
        .rows_in = remote->rows_in,
        .rows_out = remote->rows_out,
        .reconnects = remote->reconnects,
    };
}

struct kv_id128 kv_client_block_name(const struct kv_id128 *parent,
                                     const struct kv_id128 *fingerprint,
                                     const struct kv_id128 *salt,
                                     const uint32_t *tokens,
                                     size_t n_tokens)
{
    return kv_block_name(parent, fingerprint, salt, tokens, n_tokens);
}

const char *kv_client_version(void)
{
    return KV_VERSION_TEXT;
}
