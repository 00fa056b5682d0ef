/* ucx_port.c - opens, drives, arms and closes ports, with their wires and their address.
 *
 * A wire is a UCX worker.  A port has one for each context of its transport, and until nothing
 * is held of them the shared wires that were replaced (ucx_probe.c).
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

static unsigned progress_workers(struct ucx_port *port)
{
    unsigned n = 0;

    for (unsigned kind = 0; kind < N_WIRES; kind++) {
        if (port->wires[kind] == NULL)
            continue;
        if (kind == WIRE_NETWORK && n > 0 && ++port->turns % NETWORK_TURNS != 0)
            continue;
        n += ucp_worker_progress(port->wires[kind]->worker);
    }
    for (struct wire *wire = port->retired; wire != NULL; wire = wire->next)
        n += ucp_worker_progress(wire->worker);
    if (port->settle > 0 && --port->settle == 0)
        kv_ucx_abandon_offers(port);
    return n;
}

/* Wires */

static kv_status_t set_handler(struct wire *wire, unsigned id, ucp_am_recv_callback_t handler)
{
    ucp_am_handler_param_t param = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = id,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = handler,
        .arg = wire,
    };

    return status_of(ucp_worker_set_am_recv_handler(wire->worker, &param));
}

void kv_ucx_close_wire(struct wire *wire)
{
    struct ucx_incoming *dead;

    kv_ucx_give_up_flights(wire);
    dead = kv_ucx_give_up_incomings(wire);
    ucp_worker_destroy(wire->worker); /* and the probe with it */
    while (dead != NULL) {
        struct ucx_incoming *next = dead->next;

        kv_ucx_incoming_spare(wire->port, dead);
        dead = next;
    }
    free(wire);
}

kv_status_t kv_ucx_open_wire(struct ucx_port *port, enum wire_kind kind, struct wire **ret_wire)
{
    ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    struct wire *wire = calloc(1, sizeof(*wire));
    kv_status_t status;

    if (wire == NULL)
        return KV_NO_MEMORY;
    wire->port = port;
    wire->kind = kind;
    status =
        status_of(ucp_worker_create(port->transport->contexts[kind], &params, &wire->worker));
    if (status != KV_OK) {
        free(wire);
        return status;
    }
    status = set_handler(wire, AM_ID, kv_ucx_on_message);
    if (status == KV_OK)
        status = set_handler(wire, PROBE_ID, kv_ucx_on_probe);
    if (status != KV_OK) {
        kv_ucx_close_wire(wire);
        return status;
    }
    *ret_wire = wire;
    return KV_OK;
}

kv_status_t kv_ucx_make_address(struct ucx_port *port)
{
    ucp_address_t *parts[N_WIRES] = {NULL};
    size_t bytes[N_WIRES] = {0};
    struct address_prefix prefix = {.magic = ADDRESS_MAGIC, .process = port->process};
    size_t crc_begin = offsetof(struct address_prefix, process);
    size_t total = sizeof(prefix);
    kv_status_t status = KV_OK;
    struct address *address;
    unsigned char *at;

    for (unsigned kind = 0; kind < N_WIRES; kind++) {
        if (port->wires[kind] == NULL)
            continue;
        if (ucp_worker_get_address(port->wires[kind]->worker, &parts[kind], &bytes[kind]) !=
            UCS_OK) {
            parts[kind] = NULL;
            status = KV_IO;
            goto out;
        }
        total += bytes[kind];
    }
    if (total > ADDRESS_BYTES_MAX) {
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
    for (unsigned kind = 0; kind < N_WIRES; kind++)
        prefix.bytes[kind] = (uint16_t)bytes[kind];
    memcpy(at, &prefix, sizeof(prefix));
    at += sizeof(prefix);
    for (unsigned kind = 0; kind < N_WIRES; kind++) {
        if (bytes[kind] > 0)
            memcpy(at, parts[kind], bytes[kind]);
        at += bytes[kind];
    }
    at = address->data;
    prefix.crc = kv_crc32c(0, at + crc_begin, total - crc_begin);
    memcpy(at, &prefix, sizeof(prefix));
    atomic_store(&port->address, address);

out:
    for (unsigned kind = 0; kind < N_WIRES; kind++)
        if (parts[kind] != NULL)
            ucp_worker_release_address(port->wires[kind]->worker, parts[kind]);
    return status;
}

static kv_status_t add_to_epoll(int epoll_fd, int fd)
{
    struct epoll_event event = {.events = EPOLLIN};

    return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0 ? KV_OK : KV_IO;
}

kv_status_t kv_ucx_watch_wire(const struct ucx_port *port, const struct wire *wire)
{
    int fd;

    if (ucp_worker_get_efd(wire->worker, &fd) != UCS_OK)
        return KV_IO;
    return add_to_epoll(port->epoll_fd, fd);
}

/* Ports */

unsigned kv_ucx_port_progress(struct kv_port *base)
{
    struct ucx_port *port = port_of(base);
    unsigned n;

    assert(!port->in_progress); /* UCX must not be entered twice */
    port->in_progress = true;
    n = progress_workers(port);
    if (port->watch_fd >= 0 && port->watch-- == 0) {
        port->watch = WATCH_ROUNDS;
        kv_ucx_look_for_dead_peers(port);
        kv_ucx_look_at_queue(port);
    }
    while (port->n_failures > 0) {
        struct ucx_channel *channel = port->channels;

        while (!channel->failed || channel->reported)
            channel = channel->next;
        channel->reported = true;
        port->n_failures--;
        port->events.failed(port->owner, channel->channel_arg, channel->status);
        n++;
    }
    kv_ucx_close_endpoints(port);
    if (port->retired != NULL)
        kv_ucx_bury_wires(port);
    port->in_progress = false;
    return n;
}

void kv_ucx_port_close(struct kv_port *base)
{
    struct ucx_port *port = port_of(base);

    assert(!port->in_progress);
    port->closing = true;
    port->in_progress = true; /* so that channels closed by callbacks wait */
    for (struct ucx_incoming *incoming = port->incomings; incoming != NULL;) {
        struct ucx_incoming *next = incoming->next;

        if (!incoming->receiving)
            kv_ucx_incoming_release(incoming);
        incoming = next;
    }
    while (port->channels != NULL)
        kv_ucx_channel_close(&port->channels->base);
    kv_ucx_close_endpoints(port);

    /* UCX completes what is in flight, and tells peers; it must not take for ever. */
    for (unsigned round = 0; round < CLOSE_ROUNDS_MAX; round++) {
        if (port->settle == 0 && port->flights == NULL && port->incomings == NULL)
            break;
        progress_workers(port);
        kv_ucx_close_endpoints(port);
    }
    for (unsigned kind = 0; kind < N_WIRES; kind++)
        if (port->wires[kind] != NULL)
            kv_ucx_close_wire(port->wires[kind]);
    while (port->retired != NULL) {
        struct wire *wire = port->retired;

        port->retired = wire->next;
        kv_ucx_close_wire(wire);
    }
    while (port->spare_incomings != NULL) {
        struct ucx_incoming *incoming = port->spare_incomings;

        port->spare_incomings = incoming->next;
        free(incoming);
    }
    kv_offers_free(&port->offers);
    if (port->watch_fd >= 0)
        close(port->watch_fd);
    if (port->epoll_fd >= 0)
        close(port->epoll_fd);
    if (port->wake_fd >= 0)
        close(port->wake_fd);
    for (struct address *address = atomic_load(&port->address); address != NULL;) {
        struct address *before = address->before;

        free(address);
        address = before;
    }
    free(port);
}

/* One descriptor for all that wakes the port. */
static kv_status_t make_fd(struct ucx_port *port)
{
    if (port->wires[WIRE_SHARED] == NULL)
        return ucp_worker_get_efd(port->wires[WIRE_NETWORK]->worker, &port->fd) == UCS_OK
                   ? KV_OK
                   : KV_IO;
    port->watch_fd = epoll_create1(EPOLL_CLOEXEC);
    port->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    port->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (port->watch_fd < 0 || port->epoll_fd < 0 || port->wake_fd < 0 ||
        add_to_epoll(port->epoll_fd, port->watch_fd) != KV_OK ||
        add_to_epoll(port->epoll_fd, port->wake_fd) != KV_OK)
        return KV_IO;
    for (unsigned kind = 0; kind < N_WIRES; kind++)
        if (port->wires[kind] != NULL && kv_ucx_watch_wire(port, port->wires[kind]) != KV_OK)
            return KV_IO;
    port->fd = port->epoll_fd;
    return KV_OK;
}

kv_status_t kv_ucx_port_open(struct kv_transport *base,
                             const struct kv_port_events *events,
                             void *owner,
                             struct kv_port **ret_port)
{
    struct ucx_transport *transport = (struct ucx_transport *)base;
    struct ucx_port *port = calloc(1, sizeof(*port));
    kv_status_t status = KV_OK;

    if (port == NULL)
        return KV_NO_MEMORY;
    port->base.row = base->row;
    port->transport = transport;
    port->events = *events;
    port->owner = owner;
    port->process = (uint32_t)getpid();
    port->watch_fd = -1;
    port->epoll_fd = -1;
    port->wake_fd = -1;
    for (unsigned kind = 0; kind < N_WIRES && status == KV_OK; kind++)
        if (transport->contexts[kind] != NULL)
            status = kv_ucx_open_wire(port, kind, &port->wires[kind]);
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
    struct address *address = atomic_load(&port_of(port)->address);

    *ret_address = address->data;
    *ret_bytes = address->bytes;
}

kv_status_t kv_ucx_port_arm(struct kv_port *base, int *ret_fd)
{
    struct ucx_port *port = port_of(base);

    uint64_t wakes;

    if (port->settle > 0 || port->n_failures > 0 || port->is_probing || port->retired != NULL)
        return KV_BUSY;
    if (port->wake_fd >= 0 && read(port->wake_fd, &wakes, sizeof(wakes)) > 0)
        return KV_BUSY;
    for (unsigned kind = 0; kind < N_WIRES; kind++) {
        ucs_status_t ucs;

        if (port->wires[kind] == NULL)
            continue;
        ucs = ucp_worker_arm(port->wires[kind]->worker);
        if (ucs != UCS_OK)
            return ucs == UCS_ERR_BUSY ? KV_BUSY : KV_IO;
    }
    port->watch = 0; /* whoever sleeps may be woken for that */
    *ret_fd = port->fd;
    return KV_OK;
}

void kv_ucx_port_wake(struct kv_port *base)
{
    struct ucx_port *port = port_of(base);

    const uint64_t one = 1;

    /* A shared wire may be replaced while another thread is here. */
    if (port->wake_fd < 0)
        ucp_worker_signal(port->wires[WIRE_NETWORK]->worker);
    else if (write(port->wake_fd, &one, sizeof(one)) < 0)
        assert(errno == EAGAIN); /* full of wakes */
}
