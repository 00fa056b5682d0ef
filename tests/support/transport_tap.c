#include "tests/support/transport_tap.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tap {
    struct kv_transport base;
    struct kv_transport *below;
    tap_fn sent;
    void *arg;
    struct tap_port *ports[TAP_PORTS_MAX]; /* NULL: closed */
    unsigned n_ports;
};

struct tap_port {
    struct kv_port base;
    struct kv_port *below;
    struct tap *tap;
    struct tap_channel *channels;
    unsigned number;
    char address[TAP_ADDRESS_BYTES];
};

struct tap_channel {
    struct kv_channel base;
    struct kv_channel *below;
    struct tap_port *port;
    unsigned to;
    struct tap_channel *next;
};

static const struct kv_transport_ops tap_row;

void tap_address(unsigned number, char ret_address[TAP_ADDRESS_BYTES])
{
    char text[TAP_ADDRESS_BYTES + 8];

    snprintf(text, sizeof(text), "port-%02u", number % 100);
    memcpy(ret_address, text, TAP_ADDRESS_BYTES);
}

/* ---- the transport ----------------------------------------------------------------------- */

kv_status_t tap_open(tap_fn sent, void *arg, struct kv_transport **ret_transport)
{
    const struct kv_transport_config config = {0};
    struct tap *tap = calloc(1, sizeof(*tap));
    char detail[128];
    kv_status_t status;

    if (tap == NULL)
        return KV_NO_MEMORY;
    status = kv_transport_loopback.open(&config, &tap->below, detail, sizeof(detail));
    if (status != KV_OK) {
        free(tap);
        return status;
    }
    tap->base.ops = &tap_row;
    tap->sent = sent;
    tap->arg = arg;
    *ret_transport = &tap->base;
    return KV_OK;
}

static void tap_close(struct kv_transport *base)
{
    struct tap *tap = (struct tap *)base;

    tap->below->ops->close(tap->below);
    free(tap);
}

static kv_status_t tap_map(struct kv_transport *base,
                           void *memory,
                           size_t bytes,
                           enum kv_memory_type type,
                           struct kv_mapping **ret_mapping)
{
    struct tap *tap = (struct tap *)base;

    return tap->below->ops->map(tap->below, memory, bytes, type, ret_mapping);
}

static kv_status_t tap_alloc(struct kv_transport *base,
                             size_t bytes,
                             void **ret_memory,
                             struct kv_mapping **ret_mapping)
{
    struct tap *tap = (struct tap *)base;

    return tap->below->ops->alloc(tap->below, bytes, ret_memory, ret_mapping);
}

static void tap_unmap(struct kv_transport *base, struct kv_mapping *mapping)
{
    struct tap *tap = (struct tap *)base;

    tap->below->ops->unmap(tap->below, mapping);
}

static void tap_describe(struct kv_transport *base, char *text, size_t text_bytes)
{
    struct tap *tap = (struct tap *)base;

    tap->below->ops->describe(tap->below, text, text_bytes);
}

/* ---- ports ------------------------------------------------------------------------------- */

static kv_status_t port_open(struct kv_transport *base,
                             const struct kv_port_events *events,
                             void *owner,
                             struct kv_port **ret_port)
{
    struct tap *tap = (struct tap *)base;
    struct tap_port *port;
    kv_status_t status;

    if (tap->n_ports == TAP_PORTS_MAX)
        return KV_NO_MEMORY;
    port = calloc(1, sizeof(*port));
    if (port == NULL)
        return KV_NO_MEMORY;
    status = tap->below->ops->port_open(tap->below, events, owner, &port->below);
    if (status != KV_OK) {
        free(port);
        return status;
    }
    port->base.ops = &tap_row;
    port->tap = tap;
    port->number = tap->n_ports++;
    tap_address(port->number, port->address);
    tap->ports[port->number] = port;
    *ret_port = &port->base;
    return KV_OK;
}

static void port_close(struct kv_port *base)
{
    struct tap_port *port = (struct tap_port *)base;

    port->below->ops->port_close(port->below);
    while (port->channels != NULL) {
        struct tap_channel *channel = port->channels;

        port->channels = channel->next;
        free(channel);
    }
    port->tap->ports[port->number] = NULL;
    free(port);
}

static void port_address(struct kv_port *base, const void **ret_address, size_t *ret_bytes)
{
    *ret_address = ((struct tap_port *)base)->address;
    *ret_bytes = TAP_ADDRESS_BYTES;
}

static unsigned port_progress(struct kv_port *base)
{
    return kv_port_progress(((struct tap_port *)base)->below);
}

static kv_status_t port_arm(struct kv_port *base, int *ret_fd)
{
    struct kv_port *below = ((struct tap_port *)base)->below;

    return below->ops->port_arm(below, ret_fd);
}

static void port_wake(struct kv_port *base)
{
    struct kv_port *below = ((struct tap_port *)base)->below;

    below->ops->port_wake(below);
}

/* ---- channels ---------------------------------------------------------------------------- */

/* NULL: no open port has that address. */
static struct tap_port *find(const struct tap *tap, const void *address, size_t bytes)
{
    for (unsigned i = 0; bytes == TAP_ADDRESS_BYTES && i < tap->n_ports; i++)
        if (tap->ports[i] != NULL && memcmp(tap->ports[i]->address, address, bytes) == 0)
            return tap->ports[i];
    return NULL;
}

static kv_status_t connect_to(struct kv_port *base,
                              const void *address,
                              size_t address_bytes,
                              enum kv_channel_mode mode,
                              void *channel_arg,
                              struct kv_channel **ret_channel)
{
    struct tap_port *port = (struct tap_port *)base;
    const struct tap_port *peer = find(port->tap, address, address_bytes);
    struct tap_channel *channel;
    kv_status_t status;

    if (peer == NULL)
        return KV_UNREACHABLE;
    channel = calloc(1, sizeof(*channel));
    if (channel == NULL)
        return KV_NO_MEMORY;
    peer->below->ops->port_address(peer->below, &address, &address_bytes);
    status = port->below->ops->connect(port->below, address, address_bytes, mode, channel_arg,
                                       &channel->below);
    if (status != KV_OK) {
        free(channel);
        return status;
    }
    channel->base.ops = &tap_row;
    channel->base.pair_max = channel->below->pair_max;
    channel->port = port;
    channel->to = peer->number;
    channel->next = port->channels;
    port->channels = channel;
    *ret_channel = &channel->base;
    return KV_OK;
}

static void channel_close(struct kv_channel *base)
{
    struct tap_channel *channel = (struct tap_channel *)base;
    struct tap_channel **link = &channel->port->channels;

    channel->below->ops->channel_close(channel->below);
    while (*link != channel)
        link = &(*link)->next;
    *link = channel->next;
    free(channel);
}

static void channel_describe(struct kv_channel *base, char *text, size_t text_bytes)
{
    struct kv_channel *below = ((struct tap_channel *)base)->below;

    below->ops->channel_describe(below, text, text_bytes);
}

/* ---- messages ---------------------------------------------------------------------------- */

static void show(const struct tap_channel *channel,
                 const void *header,
                 size_t header_bytes,
                 const struct kv_iov data[2],
                 kv_status_t status)
{
    const struct tap *tap = channel->port->tap;

    if (status >= KV_OK)
        tap->sent(tap->arg, channel->port->number, channel->to, header, header_bytes, data);
}

static kv_status_t tap_send(struct kv_channel *base,
                            const void *header,
                            size_t header_bytes,
                            const void *data,
                            size_t data_bytes,
                            kv_transport_done_fn done,
                            void *arg)
{
    const struct tap_channel *channel = (struct tap_channel *)base;
    const struct kv_iov pieces[2] = {{.base = (void *)data, .bytes = data_bytes}};
    const kv_status_t status =
        kv_channel_send(channel->below, header, header_bytes, data, data_bytes, done, arg);

    show(channel, header, header_bytes, pieces, status);
    return status;
}

static kv_status_t tap_send_pair(struct kv_channel *base,
                                 const void *header,
                                 size_t header_bytes,
                                 const struct kv_iov pieces[2],
                                 kv_transport_done_fn done,
                                 void *arg)
{
    const struct tap_channel *channel = (struct tap_channel *)base;
    const kv_status_t status =
        kv_channel_send_pair(channel->below, header, header_bytes, pieces, done, arg);

    show(channel, header, header_bytes, pieces, status);
    return status;
}

/* What arrives is the loopback's own, receive() and refuse() with it. */
static const struct kv_transport_ops tap_row = {
    .name = "tap",
    .close = tap_close,
    .map = tap_map,
    .alloc = tap_alloc,
    .unmap = tap_unmap,
    .describe = tap_describe,
    .port_open = port_open,
    .port_close = port_close,
    .port_address = port_address,
    .port_progress = port_progress,
    .port_arm = port_arm,
    .port_wake = port_wake,
    .connect = connect_to,
    .channel_close = channel_close,
    .channel_describe = channel_describe,
    .send = tap_send,
    .send_pair = tap_send_pair,
};
