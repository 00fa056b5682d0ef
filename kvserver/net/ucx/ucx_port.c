/* ucx_port.c - opens, drives, arms and closes ports, with their links and their address.
 *
 * A link is a UCX worker.  A port has one for each context of its transport, and the shared
 * links that were replaced (ucx_probe.c) for as long as objects of them are in use.
 */
#include "kvserver/net/ucx/ucx_private.h"

#include "kernels/checksum.h"

#include <assert.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

static unsigned progress_workers(struct kv_ucx_port *port)
{
    unsigned n = 0;

    for (unsigned kind = 0; kind < KV_UCX_N_LINKS; kind++) {
        if (port->links[kind] == NULL)
            continue;
        if (kind == KV_UCX_LINK_NETWORK && n > 0 && ++port->turns % KV_UCX_NETWORK_TURNS != 0)
            continue;
        n += ucp_worker_progress(port->links[kind]->worker);
    }
    for (struct kv_ucx_link *link = port->retired; link != NULL; link = link->next)
        n += ucp_worker_progress(link->worker);
    if (port->settle > 0 && --port->settle == 0)
        kv_ucx_abandon_offers(port);
    return n;
}

/* Links */

static kv_status_t
set_handler(struct kv_ucx_link *link, unsigned id, ucp_am_recv_callback_t handler)
{
    ucp_am_handler_param_t param = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = id,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = handler,
        .arg = link,
    };

    return kv_ucx_status_of(ucp_worker_set_am_recv_handler(link->worker, &param));
}

void kv_ucx_close_link(struct kv_ucx_link *link)
{
    struct kv_ucx_incoming *dead;

    kv_ucx_give_up_pending_sends(link);
    dead = kv_ucx_give_up_incomings(link);
    ucp_worker_destroy(link->worker); /* and the probe with it */
    while (dead != NULL) {
        struct kv_ucx_incoming *next = dead->next;

        kv_ucx_incoming_spare(link->port, dead);
        dead = next;
    }
    free(link);
}

kv_status_t kv_ucx_open_link(struct kv_ucx_port *port,
                             enum kv_ucx_link_kind kind,
                             struct kv_ucx_link **ret_link)
{
    ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        /* Threads may take turns, under a lock of theirs: UCX takes none for that. */
        .thread_mode = UCS_THREAD_MODE_SERIALIZED,
    };
    struct kv_ucx_link *link = calloc(1, sizeof(*link));
    kv_status_t status;

    if (link == NULL)
        return KV_NO_MEMORY;
    link->port = port;
    link->kind = kind;
    status = kv_ucx_status_of(
        ucp_worker_create(port->transport->contexts[kind], &params, &link->worker));
    if (status != KV_OK) {
        free(link);
        return status;
    }
    status = set_handler(link, KV_UCX_AM_ID, kv_ucx_on_message);
    if (status == KV_OK)
        status = set_handler(link, KV_UCX_PROBE_ID, kv_ucx_on_probe);
    if (status != KV_OK) {
        kv_ucx_close_link(link);
        return status;
    }
    *ret_link = link;
    return KV_OK;
}

kv_status_t kv_ucx_make_address(struct kv_ucx_port *port)
{
    ucp_address_t *parts[KV_UCX_N_LINKS] = {NULL};
    size_t bytes[KV_UCX_N_LINKS] = {0};
    struct kv_ucx_address_prefix prefix = {.magic = KV_UCX_ADDRESS_MAGIC,
                                           .process = port->process};
    size_t crc_begin = offsetof(struct kv_ucx_address_prefix, process);
    size_t total = sizeof(prefix);
    kv_status_t status = KV_OK;
    struct kv_ucx_address *address;
    unsigned char *at;

    for (unsigned kind = 0; kind < KV_UCX_N_LINKS; kind++) {
        if (port->links[kind] == NULL)
            continue;
        if (ucp_worker_get_address(port->links[kind]->worker, &parts[kind], &bytes[kind]) !=
            UCS_OK) {
            parts[kind] = NULL;
            status = KV_IO;
            goto out;
        }
        total += bytes[kind];
    }
    if (total > KV_UCX_ADDRESS_BYTES_MAX) {
        status = KV_TOO_LARGE;
        goto out;
    }
    address = malloc(sizeof(*address) + total);
    if (address == NULL) {
        status = KV_NO_MEMORY;
        goto out;
    }
    address->before = atomic_load(&port->address);
    address->bytes = total;
    at = address->data;
    for (unsigned kind = 0; kind < KV_UCX_N_LINKS; kind++)
        prefix.bytes[kind] = (uint16_t)bytes[kind];
    memcpy(at, &prefix, sizeof(prefix));
    at += sizeof(prefix);
    for (unsigned kind = 0; kind < KV_UCX_N_LINKS; kind++) {
        if (bytes[kind] > 0)
            memcpy(at, parts[kind], bytes[kind]);
        at += bytes[kind];
    }
    at = address->data;
    prefix.crc = kv_crc32c(0, at + crc_begin, total - crc_begin);
    memcpy(at, &prefix, sizeof(prefix));
    atomic_store(&port->address, address);

out:
    for (unsigned kind = 0; kind < KV_UCX_N_LINKS; kind++)
        if (parts[kind] != NULL)
            ucp_worker_release_address(port->links[kind]->worker, parts[kind]);
    return status;
}

static kv_status_t add_to_epoll(int epoll_fd, int fd)
{
    struct epoll_event event = {.events = EPOLLIN};

    return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0 ? KV_OK : KV_IO;
}

kv_status_t kv_ucx_watch_link(const struct kv_ucx_port *port, const struct kv_ucx_link *link)
{
    int fd;

    if (ucp_worker_get_efd(link->worker, &fd) != UCS_OK)
        return KV_IO;
    return add_to_epoll(port->epoll_fd, fd);
}

/* Ports */

unsigned kv_ucx_port_progress(struct kv_port *base)
{
    struct kv_ucx_port *port = kv_ucx_port_of(base);
    unsigned n;

    assert(!port->in_progress); /* UCX must not be entered twice */
    port->in_progress = true;
    n = kv_ucx_read_due(port);
    n += progress_workers(port);
    if (port->watch_fd >= 0 && port->watch-- == 0) {
        port->watch = KV_UCX_WATCH_ROUNDS;
        kv_ucx_look_for_dead_peers(port);
        kv_ucx_look_at_queue(port);
    }
    while (port->n_failures > 0) {
        struct kv_ucx_channel *channel = port->channels;

        while (!channel->failed || channel->reported)
            channel = channel->next;
        channel->reported = true;
        port->n_failures--;
        port->events.failed(port->owner, channel->channel_arg, channel->status);
        n++;
    }
    kv_ucx_close_endpoints(port);
    kv_ucx_end_lingering(port, false);
    if (port->retired != NULL)
        kv_ucx_retire_links(port);
    port->in_progress = false;
    return n;
}

void kv_ucx_port_close(struct kv_port *base)
{
    struct kv_ucx_port *port = kv_ucx_port_of(base);

    assert(!port->in_progress);
    port->closing = true;
    port->in_progress = true; /* so that channels closed by callbacks wait */
    kv_ucx_give_up_due(port);
    for (struct kv_ucx_incoming *incoming = port->incomings; incoming != NULL;) {
        struct kv_ucx_incoming *next = incoming->next;

        if (!incoming->receiving)
            kv_ucx_incoming_release(incoming);
        incoming = next;
    }
    while (port->channels != NULL)
        kv_ucx_channel_close(&port->channels->base);
    kv_ucx_close_endpoints(port);

    /* UCX completes what is in flight, and tells peers; it must not take for ever. */
    for (unsigned round = 0; round < KV_UCX_CLOSE_ROUNDS_MAX; round++) {
        if (port->settle == 0 && port->pending_sends == NULL && port->incomings == NULL &&
            port->lingering == NULL)
            break;
        progress_workers(port);
        kv_ucx_close_endpoints(port);
        kv_ucx_end_lingering(port, round == KV_UCX_LINGER_ROUNDS_MAX);
    }
    for (unsigned kind = 0; kind < KV_UCX_N_LINKS; kind++)
        if (port->links[kind] != NULL)
            kv_ucx_close_link(port->links[kind]);
    while (port->retired != NULL) {
        struct kv_ucx_link *link = port->retired;

        port->retired = link->next;
        kv_ucx_close_link(link);
    }
    while (port->spare_incomings != NULL) {
        struct kv_ucx_incoming *incoming = port->spare_incomings;

        port->spare_incomings = incoming->next;
        free(incoming);
    }
    kv_offers_fini(&port->offers);
    if (port->watch_fd >= 0)
        close(port->watch_fd);
    if (port->epoll_fd >= 0)
        close(port->epoll_fd);
    if (port->wake_fd >= 0)
        close(port->wake_fd);
    for (struct kv_ucx_address *address = atomic_load(&port->address); address != NULL;) {
        struct kv_ucx_address *before = address->before;

        free(address);
        address = before;
    }
    free(port);
}

/* Makes one descriptor for everything that wakes the port. */
static kv_status_t make_fd(struct kv_ucx_port *port)
{
    if (port->links[KV_UCX_LINK_SHARED] == NULL)
        return ucp_worker_get_efd(port->links[KV_UCX_LINK_NETWORK]->worker, &port->fd) == UCS_OK
                   ? KV_OK
                   : KV_IO;
    port->watch_fd = epoll_create1(EPOLL_CLOEXEC);
    port->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    port->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (port->watch_fd < 0 || port->epoll_fd < 0 || port->wake_fd < 0 ||
        add_to_epoll(port->epoll_fd, port->watch_fd) != KV_OK ||
        add_to_epoll(port->epoll_fd, port->wake_fd) != KV_OK)
        return KV_IO;
    for (unsigned kind = 0; kind < KV_UCX_N_LINKS; kind++)
        if (port->links[kind] != NULL && kv_ucx_watch_link(port, port->links[kind]) != KV_OK)
            return KV_IO;
    port->fd = port->epoll_fd;
    return KV_OK;
}

kv_status_t kv_ucx_port_open(struct kv_transport *base,
                             const struct kv_port_events *events,
                             void *owner,
                             struct kv_port **ret_port)
{
    struct kv_ucx_transport *transport = (struct kv_ucx_transport *)base;
    struct kv_ucx_port *port = calloc(1, sizeof(*port));
    kv_status_t status = KV_OK;

    if (port == NULL)
        return KV_NO_MEMORY;
    port->base.ops = base->ops;
    port->base.has_queue = transport->contexts[KV_UCX_LINK_SHARED] != NULL;
    port->transport = transport;
    port->events = *events;
    port->owner = owner;
    port->due_end = &port->due;
    kv_offers_init(&port->offers, transport->trusts_peers ? &transport->memory_file : NULL);
    port->process = (uint32_t)getpid();
    port->watch_fd = -1;
    port->epoll_fd = -1;
    port->wake_fd = -1;
    for (unsigned kind = 0; kind < KV_UCX_N_LINKS && status == KV_OK; kind++)
        if (transport->contexts[kind] != NULL)
            status = kv_ucx_open_link(port, kind, &port->links[kind]);
    if (status == KV_OK)
        status = kv_ucx_make_address(port);
    if (status == KV_OK)
        status = make_fd(port);
    if (status != KV_OK) {
        kv_ucx_port_close(&port->base);
        return status;
    }
    *ret_port = &port->base;
    return KV_OK;
}

void kv_ucx_port_address(struct kv_port *port, const void **ret_address, size_t *ret_bytes)
{
    struct kv_ucx_address *address = atomic_load(&kv_ucx_port_of(port)->address);

    *ret_address = address->data;
    *ret_bytes = address->bytes;
}

/* What a closed channel left behind may keep it from sleeping (ucx_probe.c). */
static ucs_status_t arm_shared(struct kv_ucx_port *port)
{
    const ucs_status_t ucs = port->must_look
                                 ? UCS_ERR_BUSY
                                 : ucp_worker_arm(port->links[KV_UCX_LINK_SHARED]->worker);

    if (ucs == UCS_ERR_BUSY) {
        port->is_kept_awake = true;
    } else {
        port->is_restless = false;
        port->left_us = port->awake_us = 0;
    }
    return ucs;
}

kv_status_t kv_ucx_port_arm(struct kv_port *base, int *ret_fd)
{
    struct kv_ucx_port *port = kv_ucx_port_of(base);

    uint64_t wakes;

    if (port->settle > 0 || port->n_failures > 0 || port->is_probing || port->retired != NULL ||
        port->due != NULL)
        return KV_BUSY;
    if (port->wake_fd >= 0 && read(port->wake_fd, &wakes, sizeof(wakes)) > 0)
        return KV_BUSY;
    for (unsigned kind = 0; kind < KV_UCX_N_LINKS; kind++) {
        ucs_status_t ucs;

        if (port->links[kind] == NULL)
            continue;
        ucs = kind == KV_UCX_LINK_SHARED ? arm_shared(port)
                                         : ucp_worker_arm(port->links[kind]->worker);
        if (ucs != UCS_OK)
            return ucs == UCS_ERR_BUSY ? KV_BUSY : KV_IO;
    }
    port->watch = 0; /* whoever sleeps may be woken for that */
    *ret_fd = port->fd;
    return KV_OK;
}

void kv_ucx_port_wake(struct kv_port *base)
{
    struct kv_ucx_port *port = kv_ucx_port_of(base);

    const uint64_t one = 1;

    /* A shared link may be replaced while another thread is here. */
    if (port->wake_fd < 0)
        ucp_worker_signal(port->links[KV_UCX_LINK_NETWORK]->worker);
    else if (write(port->wake_fd, &one, sizeof(one)) < 0)
        assert(errno == EAGAIN); /* full of wakes */
}
