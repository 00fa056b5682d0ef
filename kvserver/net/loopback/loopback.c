/* loopback.c - ports of one process, by number.
 *
 * Each port has an inbox, which outlives it: channels to the port and offers from it hold a
 * reference.  Small data is copied into the inbox of the receiver.  Large data is offered: the
 * inbox gets a header and a `struct offer`, and the receiver copies from the sender's memory.
 *
 *             receive() begins               copied
 *   OFFERED --------------------> COPYING -----------> FINISHED    the sender frees the offer
 *      |            refuse(), or the receiver closes       ^
 *      +---------------------------------------------------+
 *      |   channel_close(), port_close() of the sender
 *      +---------------------------------------------> WITHDRAWN   the receiver frees the offer
 *
 * The one compare-and-swap that leaves OFFERED decides who owns the sender's memory, so that a
 * receiver never reads memory which its owner has been told is free.  FINISHED offers travel
 * back through a list in the sender's inbox that needs no space, and `done` is called there, by
 * the sender's thread.
 *
 * Locks: registry before inbox, never two inboxes at once; none is held during a callback or a
 * copy of data.
 */
#include "kvserver/net/loopback/loopback_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    PROGRESS_MESSAGES_MAX = 64, /* delivered in one progress */
    SPINS_MAX = 1000,           /* before a wait for a copying receiver sleeps */
    ADDRESS_MAGIC = 0x6c76616b,
};

struct kv_mapping {
    void *base;
    size_t bytes;
};

/* Channels */

static kv_status_t loopback_connect(struct kv_port *base,
                                    const void *address,
                                    size_t address_bytes,
                                    enum kv_channel_mode mode,
                                    void *channel_arg,
                                    struct kv_channel **ret_channel)
{
    struct loopback_port *port = port_of(base);
    struct loopback_channel *channel;
    struct address peer;
    struct inbox *inbox;

    if (address_bytes != sizeof(peer))
        return KV_INVALID;
    memcpy(&peer, address, sizeof(peer));
    if (peer.magic != ADDRESS_MAGIC)
        return KV_INVALID;
    if (peer.process != (uint32_t)getpid())
        return KV_UNREACHABLE;

    channel = calloc(1, sizeof(*channel));
    if (channel == NULL)
        return KV_NO_MEMORY;
    kv_loopback_registry_take();
    for (inbox = kv_loopback_registry.inboxes; inbox != NULL; inbox = inbox->next)
        if (inbox->number == peer.number)
            break;
    if (inbox != NULL)
        atomic_fetch_add(&inbox->refs, 1);
    kv_loopback_registry_release();
    if (inbox == NULL) {
        free(channel);
        return KV_UNREACHABLE;
    }

    channel->base.row = port->base.row;
    channel->base.pair_max = INLINE_MAX;
    channel->port = port;
    channel->peer = inbox;
    channel->mode = mode;
    channel->channel_arg = channel_arg;
    channel->next = port->channels;
    if (port->channels != NULL)
        port->channels->previous = channel;
    port->channels = channel;
    *ret_channel = &channel->base;
    return KV_OK;
}

static void loopback_channel_close(struct kv_channel *base)
{
    struct loopback_channel *channel = (struct loopback_channel *)base;
    struct loopback_port *port = channel->port;
    struct offer *offer;

    /* `done` may send on other channels, so the walk starts again after each. */
    for (offer = port->offers; offer != NULL;) {
        if (offer->channel != channel) {
            offer = offer->next;
            continue;
        }
        offer->channel = NULL;
        /* What the receiver is copying is completed in progress. */
        (void)kv_loopback_offer_withdraw(port, offer);
        offer = port->offers;
    }

    if (channel->previous != NULL)
        channel->previous->next = channel->next;
    else
        port->channels = channel->next;
    if (channel->next != NULL)
        channel->next->previous = channel->previous;
    kv_loopback_inbox_unref(channel->peer);
    free(channel);
}

static void loopback_channel_describe(struct kv_channel *channel, char *text, size_t text_bytes)
{
    (void)channel;
    snprintf(text, text_bytes, "loopback");
}

static kv_status_t loopback_send(struct kv_channel *base,
                                 const void *header,
                                 size_t header_bytes,
                                 const void *data,
                                 size_t data_bytes,
                                 kv_transport_done_fn done,
                                 void *arg)
{
    struct loopback_channel *channel = (struct loopback_channel *)base;
    struct loopback_port *port = channel->port;
    bool is_offer = data_bytes > INLINE_MAX;
    struct message *message;
    struct offer *offer;
    kv_status_t status;

    if (header_bytes > KV_TRANSPORT_HEADER_MAX)
        return KV_INVALID;
    status = kv_loopback_inbox_reserve(channel->peer, is_offer ? 0 : data_bytes, &message);
    if (status != KV_OK)
        return status;
    message->header_bytes = header_bytes;
    if (header_bytes > 0)
        memcpy(message->header, header, header_bytes);
    if (!is_offer) {
        if (data_bytes > 0)
            memcpy(message->data, data, data_bytes);
        return kv_loopback_inbox_push(channel->peer, message);
    }

    offer = kv_loopback_offer_get(port);
    if (offer == NULL) {
        kv_lock_take(channel->peer->lock);
        kv_loopback_inbox_recycle(channel->peer, message);
        kv_lock_release(channel->peer->lock);
        return KV_NO_MEMORY;
    }
    offer->base.row = port->base.row;
    offer->data = data;
    offer->data_bytes = data_bytes;
    offer->sender = port->inbox;
    atomic_fetch_add(&port->inbox->refs, 1);
    offer->channel = channel;
    offer->done = done;
    offer->arg = arg;
    kv_loopback_offer_link(port, offer);
    message->offer = offer;
    status = kv_loopback_inbox_push(channel->peer, message);
    if (status != KV_OK) {
        kv_loopback_inbox_unref(offer->sender);
        kv_loopback_offer_unlink(port, offer);
        kv_loopback_offer_put(port, offer);
        return status;
    }
    return KV_IN_PROGRESS;
}

static kv_status_t loopback_send_pair(struct kv_channel *base,
                                      const void *header,
                                      size_t header_bytes,
                                      const struct kv_iov pieces[2],
                                      kv_transport_done_fn done,
                                      void *arg)
{
    struct loopback_channel *channel = (struct loopback_channel *)base;
    struct message *message;
    kv_status_t status;

    (void)done;
    (void)arg;
    if (header_bytes > KV_TRANSPORT_HEADER_MAX || pieces[0].bytes > base->pair_max ||
        pieces[1].bytes > base->pair_max - pieces[0].bytes)
        return KV_INVALID;
    status =
        kv_loopback_inbox_reserve(channel->peer, pieces[0].bytes + pieces[1].bytes, &message);
    if (status != KV_OK)
        return status;
    message->header_bytes = header_bytes;
    memcpy(message->header, header, header_bytes);
    if (pieces[0].bytes > 0)
        memcpy(message->data, pieces[0].base, pieces[0].bytes);
    if (pieces[1].bytes > 0)
        memcpy(message->data + pieces[0].bytes, pieces[1].base, pieces[1].bytes);
    return kv_loopback_inbox_push(channel->peer, message);
}

/* Ports */

static void loopback_port_close(struct kv_port *base)
{
    struct loopback_port *port = port_of(base);
    struct inbox *inbox = port->inbox;
    struct message *message;

    kv_loopback_registry_take();
    for (struct inbox **link = &kv_loopback_registry.inboxes; *link != NULL;
         link = &(*link)->next) {
        if (*link == inbox) {
            *link = inbox->next;
            break;
        }
    }
    kv_lock_take(inbox->lock);
    atomic_store(&inbox->open, false);
    message = inbox->first;
    inbox->first = inbox->last = NULL;
    kv_lock_release(inbox->lock);
    /* Everybody looks at his channels: one of them may lead here. */
    atomic_fetch_add(&kv_loopback_registry.n_closed, 1);
    for (struct inbox *other = kv_loopback_registry.inboxes; other != NULL; other = other->next)
        kv_signal_raise(other->signal);
    kv_loopback_registry_release();

    while (message != NULL) {
        struct message *next = message->next;

        if (message->offer != NULL)
            kv_loopback_offer_decline(message->offer, KV_UNREACHABLE);
        free(message);
        message = next;
    }
    while (port->held != NULL) {
        struct offer *offer = port->held;

        kv_loopback_held_unlink(offer);
        kv_loopback_offer_decline(offer, KV_UNREACHABLE);
    }

    while (port->channels != NULL)
        loopback_channel_close(&port->channels->base);
    /* What is left is being copied by a receiver at this moment, or was. */
    for (unsigned spins = 0; port->offers != NULL; spins++) {
        if (kv_loopback_complete_one(port))
            continue;
        if (spins < SPINS_MAX)
            kv_relax();
        else
            kv_sleep_fds(NULL, 0, 50);
    }

    while (port->spare != NULL) {
        struct offer *offer = port->spare;

        port->spare = offer->next;
        free(offer);
    }
    kv_loopback_inbox_unref(inbox);
    free(port);
}

static kv_status_t loopback_port_open(struct kv_transport *transport,
                                      const struct kv_port_events *events,
                                      void *owner,
                                      struct kv_port **ret_port)
{
    struct loopback_port *port = calloc(1, sizeof(*port));

    if (port == NULL)
        return KV_NO_MEMORY;
    port->inbox = kv_loopback_inbox_create();
    if (port->inbox == NULL) {
        free(port);
        return KV_NO_MEMORY;
    }
    port->base.row = transport->row;
    port->events = *events;
    port->owner = owner;
    port->closed_seen = atomic_load(&kv_loopback_registry.n_closed);

    kv_loopback_registry_take();
    port->inbox->number = ++kv_loopback_registry.last_number;
    port->inbox->next = kv_loopback_registry.inboxes;
    kv_loopback_registry.inboxes = port->inbox;
    kv_loopback_registry_release();

    port->address.magic = ADDRESS_MAGIC;
    port->address.process = (uint32_t)getpid();
    port->address.number = port->inbox->number;
    *ret_port = &port->base;
    return KV_OK;
}

static void
loopback_port_address(struct kv_port *port, const void **ret_address, size_t *ret_bytes)
{
    *ret_address = &port_of(port)->address;
    *ret_bytes = sizeof(struct address);
}

/* Reports one channel that leads to a closed port; false: there is none. */
static bool report_one(struct loopback_port *port)
{
    struct loopback_channel *channel;

    for (channel = port->channels; channel != NULL; channel = channel->next) {
        if (channel->reported || channel->mode != KV_CHANNEL_NETWORK ||
            atomic_load(&channel->peer->open))
            continue;
        channel->reported = true;
        port->events.failed(port->owner, channel->channel_arg, KV_UNREACHABLE);
        return true;
    }
    return false;
}

static void deliver(struct loopback_port *port, struct message *message)
{
    struct offer *offer = message->offer;

    if (offer == NULL) {
        port->events.message(port->owner, message->header, message->header_bytes, message->data,
                             message->data_bytes);
        return;
    }
    if (atomic_load(&offer->state) == WITHDRAWN) {
        kv_loopback_offer_bury(offer);
        return;
    }
    offer->receiver = port;
    offer->previous_held = NULL;
    offer->next_held = port->held;
    if (port->held != NULL)
        port->held->previous_held = offer;
    port->held = offer;
    port->events.incoming(port->owner, message->header, message->header_bytes,
                          offer->data_bytes, &offer->base);
}

static unsigned loopback_port_progress(struct kv_port *base)
{
    struct loopback_port *port = port_of(base);
    struct inbox *inbox = port->inbox;
    unsigned n_closed = atomic_load(&kv_loopback_registry.n_closed);
    struct message *message = NULL;
    unsigned n = 0;

    if (n_closed != port->closed_seen) {
        port->closed_seen = n_closed;
        while (report_one(port))
            n++;
    }
    /* Relaxed is enough: a message that is missed here raises the signal or is seen next time,
     * and the lock orders its contents. */
    if (atomic_load_explicit(&inbox->n_waiting, memory_order_relaxed) == 0)
        return n;

    while (kv_loopback_complete_one(port))
        n++;
    for (unsigned i = 0; i <= PROGRESS_MESSAGES_MAX; i++) {
        kv_lock_take(inbox->lock);
        inbox->sleeping = false;
        if (message != NULL)
            kv_loopback_inbox_recycle(inbox, message);
        message = i < PROGRESS_MESSAGES_MAX ? inbox->first : NULL;
        if (message != NULL) {
            inbox->first = message->next;
            if (inbox->first == NULL)
                inbox->last = NULL;
            atomic_fetch_sub_explicit(&inbox->n_waiting, 1, memory_order_relaxed);
        }
        kv_lock_release(inbox->lock);
        if (message == NULL)
            break;
        deliver(port, message);
        n++;
    }
    return n;
}

static kv_status_t loopback_port_arm(struct kv_port *base, int *ret_fd)
{
    struct loopback_port *port = port_of(base);
    struct inbox *inbox = port->inbox;
    bool busy;

    kv_signal_clear(inbox->signal);
    kv_lock_take(inbox->lock);
    busy = inbox->first != NULL || inbox->first_finished != NULL || inbox->woken;
    inbox->woken = false;
    inbox->sleeping = !busy;
    kv_lock_release(inbox->lock);
    /* After the clear: a port that closes from here on raises the signal again. */
    if (busy || atomic_load(&kv_loopback_registry.n_closed) != port->closed_seen)
        return KV_BUSY;
    *ret_fd = kv_signal_fd(inbox->signal);
    return KV_OK;
}

static void loopback_port_wake(struct kv_port *port)
{
    struct inbox *inbox = port_of(port)->inbox;

    kv_lock_take(inbox->lock);
    inbox->woken = true;
    kv_lock_release(inbox->lock);
    kv_signal_raise(inbox->signal);
}

/* The transport */

static kv_status_t loopback_open(const struct kv_transport_config *config,
                                 struct kv_transport **ret_transport,
                                 char *detail,
                                 size_t detail_bytes)
{
    struct kv_transport *transport;

    (void)config;
    transport = calloc(1, sizeof(*transport));
    if (transport == NULL || kv_loopback_registry_init() != KV_OK) {
        free(transport);
        snprintf(detail, detail_bytes, "loopback: out of memory");
        return KV_NO_MEMORY;
    }
    transport->row = &kv_transport_loopback;
    *ret_transport = transport;
    return KV_OK;
}

static void loopback_close(struct kv_transport *transport)
{
    free(transport);
}

static kv_status_t loopback_map(struct kv_transport *transport,
                                void *base,
                                size_t bytes,
                                enum kv_memory_type type,
                                struct kv_mapping **ret_mapping)
{
    struct kv_mapping *mapping;

    (void)transport;
    if (type != KV_MEMORY_HOST)
        return KV_UNSUPPORTED;
    mapping = malloc(sizeof(*mapping));
    if (mapping == NULL)
        return KV_NO_MEMORY;
    mapping->base = base;
    mapping->bytes = bytes;
    *ret_mapping = mapping;
    return KV_OK;
}

static void loopback_unmap(struct kv_transport *transport, struct kv_mapping *mapping)
{
    (void)transport;
    free(mapping);
}

static void loopback_describe(struct kv_transport *transport, char *text, size_t text_bytes)
{
    (void)transport;
    snprintf(text, text_bytes, "loopback");
}

const struct kv_transport_row kv_transport_loopback = {
    .name = "loopback",
    .open = loopback_open,
    .close = loopback_close,
    .map = loopback_map,
    .unmap = loopback_unmap,
    .describe = loopback_describe,
    .port_open = loopback_port_open,
    .port_close = loopback_port_close,
    .port_address = loopback_port_address,
    .port_progress = loopback_port_progress,
    .port_arm = loopback_port_arm,
    .port_wake = loopback_port_wake,
    .connect = loopback_connect,
    .channel_close = loopback_channel_close,
    .channel_describe = loopback_channel_describe,
    .send = loopback_send,
    .send_pair = loopback_send_pair,
    .receive = kv_loopback_receive,
    .refuse = kv_loopback_refuse,
};
