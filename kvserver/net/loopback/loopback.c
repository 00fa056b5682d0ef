/* loopback.c - the transport between ports of one process.
 *
 * Each port has a receive queue, which outlives it: channels to the port and offers from it
 * hold a reference.  Small data is copied into the receive queue of the receiver.  Large data
 * is offered: the receive queue gets a header and a struct kv_loopback_offer, and the receiver
 * copies from the sender's memory.
 *
 *           copying some more                  all copied
 *   OFFERED <-------------------> COPYING -----------> FINISHED    the sender frees the offer
 *      |            refuse(), or the receiver closes       ^
 *      +---------------------------------------------------+
 *      |   channel_close(), port_close() of the sender
 *      +---------------------------------------------> WITHDRAWN   the receiver frees the offer
 *
 * The compare-and-swap that leaves OFFERED decides who owns the sender's memory, so a receiver
 * never reads memory after its owner has been told that it is free.  FINISHED offers return
 * through a list in the sender's receive queue that needs no allocation; the sender's thread
 * then calls `done`.
 *
 * Locks: registry before receive queue, never two receive queues at once.  No lock is held
 * during a callback or a copy of data.
 */
#include "kvserver/base/memory.h"
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
    bool is_owned; /* base is to be freed with it */
};

/* Channels */

static kv_status_t loopback_connect(struct kv_port *base,
                                    const void *address,
                                    size_t address_bytes,
                                    enum kv_channel_mode mode,
                                    void *channel_arg,
                                    struct kv_channel **ret_channel)
{
    struct kv_loopback_port *port = kv_loopback_port_of(base);
    struct kv_loopback_channel *channel;
    struct kv_loopback_address peer;
    struct kv_loopback_receive_queue *receive_queue;

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
    for (receive_queue = kv_loopback_registry.receive_queues; receive_queue != NULL;
         receive_queue = receive_queue->next)
        if (receive_queue->number == peer.number)
            break;
    if (receive_queue != NULL)
        atomic_fetch_add(&receive_queue->refs, 1);
    kv_loopback_registry_release();
    if (receive_queue == NULL) {
        free(channel);
        return KV_UNREACHABLE;
    }

    channel->base.ops = port->base.ops;
    channel->base.pair_max = KV_LOOPBACK_INLINE_MAX;
    channel->port = port;
    channel->peer = receive_queue;
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
    struct kv_loopback_channel *channel = (struct kv_loopback_channel *)base;
    struct kv_loopback_port *port = channel->port;
    struct kv_loopback_offer *offer;

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
    kv_loopback_receive_queue_unref(channel->peer);
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
    struct kv_loopback_channel *channel = (struct kv_loopback_channel *)base;
    struct kv_loopback_port *port = channel->port;
    bool is_offer = data_bytes > KV_LOOPBACK_INLINE_MAX;
    struct kv_loopback_message *message;
    struct kv_loopback_offer *offer;
    kv_status_t status;

    if (header_bytes > KV_TRANSPORT_HEADER_MAX)
        return KV_INVALID;
    status =
        kv_loopback_receive_queue_reserve(channel->peer, is_offer ? 0 : data_bytes, &message);
    if (status != KV_OK)
        return status;
    message->header_bytes = header_bytes;
    if (header_bytes > 0)
        memcpy(message->header, header, header_bytes);
    if (!is_offer) {
        if (data_bytes > 0)
            memcpy(message->data, data, data_bytes);
        return kv_loopback_receive_queue_push(channel->peer, message);
    }

    offer = kv_loopback_offer_get(port);
    if (offer == NULL) {
        kv_lock_take(channel->peer->lock);
        kv_loopback_receive_queue_recycle(channel->peer, message);
        kv_lock_release(channel->peer->lock);
        return KV_NO_MEMORY;
    }
    offer->base.ops = port->base.ops;
    offer->data = data;
    offer->data_bytes = data_bytes;
    offer->sender = port->receive_queue;
    atomic_fetch_add(&port->receive_queue->refs, 1);
    offer->channel = channel;
    offer->done = done;
    offer->arg = arg;
    kv_loopback_offer_link(port, offer);
    message->offer = offer;
    status = kv_loopback_receive_queue_push(channel->peer, message);
    if (status != KV_OK) {
        kv_loopback_receive_queue_unref(offer->sender);
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
    struct kv_loopback_channel *channel = (struct kv_loopback_channel *)base;
    struct kv_loopback_message *message;
    kv_status_t status;

    (void)done;
    (void)arg;
    if (header_bytes > KV_TRANSPORT_HEADER_MAX || pieces[0].bytes > base->pair_max ||
        pieces[1].bytes > base->pair_max - pieces[0].bytes)
        return KV_INVALID;
    status = kv_loopback_receive_queue_reserve(channel->peer, pieces[0].bytes + pieces[1].bytes,
                                               &message);
    if (status != KV_OK)
        return status;
    message->header_bytes = header_bytes;
    memcpy(message->header, header, header_bytes);
    if (pieces[0].bytes > 0)
        memcpy(message->data, pieces[0].base, pieces[0].bytes);
    if (pieces[1].bytes > 0)
        memcpy(message->data + pieces[0].bytes, pieces[1].base, pieces[1].bytes);
    return kv_loopback_receive_queue_push(channel->peer, message);
}

/* Ports */

static void loopback_port_close(struct kv_port *base)
{
    struct kv_loopback_port *port = kv_loopback_port_of(base);
    struct kv_loopback_receive_queue *receive_queue = port->receive_queue;
    struct kv_loopback_message *message;

    kv_loopback_registry_take();
    for (struct kv_loopback_receive_queue **link = &kv_loopback_registry.receive_queues;
         *link != NULL; link = &(*link)->next) {
        if (*link == receive_queue) {
            *link = receive_queue->next;
            break;
        }
    }
    kv_lock_take(receive_queue->lock);
    atomic_store(&receive_queue->open, false);
    message = receive_queue->first;
    receive_queue->first = receive_queue->last = NULL;
    kv_lock_release(receive_queue->lock);
    /* Everybody looks at his channels: one of them may lead here. */
    atomic_fetch_add(&kv_loopback_registry.n_closed, 1);
    for (struct kv_loopback_receive_queue *other = kv_loopback_registry.receive_queues;
         other != NULL; other = other->next)
        kv_signal_raise(other->signal);
    kv_loopback_registry_release();

    while (message != NULL) {
        struct kv_loopback_message *next = message->next;

        if (message->offer != NULL)
            kv_loopback_offer_decline(message->offer, KV_UNREACHABLE);
        free(message);
        message = next;
    }
    while (port->held != NULL) {
        struct kv_loopback_offer *offer = port->held;

        kv_loopback_held_unlink(offer);
        kv_loopback_offer_decline(offer, KV_UNREACHABLE);
    }

    kv_loopback_receive_none(port);

    while (port->channels != NULL)
        loopback_channel_close(&port->channels->base);
    /* What is left was being copied by a receiver at that moment. */
    for (unsigned spins = 0; port->offers != NULL; spins++) {
        if (kv_loopback_complete_one(port) || kv_loopback_offer_withdraw(port, port->offers))
            continue;
        if (spins < SPINS_MAX)
            kv_relax();
        else
            kv_sleep_fds(NULL, 0, 50);
    }

    while (port->spare != NULL) {
        struct kv_loopback_offer *offer = port->spare;

        port->spare = offer->next;
        free(offer);
    }
    kv_loopback_receive_queue_unref(receive_queue);
    free(port);
}

static kv_status_t loopback_port_open(struct kv_transport *transport,
                                      const struct kv_port_events *events,
                                      void *owner,
                                      struct kv_port **ret_port)
{
    struct kv_loopback_port *port = calloc(1, sizeof(*port));

    if (port == NULL)
        return KV_NO_MEMORY;
    port->receive_queue = kv_loopback_receive_queue_create();
    if (port->receive_queue == NULL) {
        free(port);
        return KV_NO_MEMORY;
    }
    port->base.ops = transport->ops;
    port->events = *events;
    port->owner = owner;
    port->received_end = &port->received;
    port->closed_seen = atomic_load(&kv_loopback_registry.n_closed);

    kv_loopback_registry_take();
    port->receive_queue->number = ++kv_loopback_registry.last_number;
    port->receive_queue->next = kv_loopback_registry.receive_queues;
    kv_loopback_registry.receive_queues = port->receive_queue;
    kv_loopback_registry_release();

    port->address.magic = ADDRESS_MAGIC;
    port->address.process = (uint32_t)getpid();
    port->address.number = port->receive_queue->number;
    *ret_port = &port->base;
    return KV_OK;
}

static void
loopback_port_address(struct kv_port *port, const void **ret_address, size_t *ret_bytes)
{
    *ret_address = &kv_loopback_port_of(port)->address;
    *ret_bytes = sizeof(struct kv_loopback_address);
}

/* Reports one channel that leads to a closed port; false: there is none. */
static bool report_one(struct kv_loopback_port *port)
{
    struct kv_loopback_channel *channel;

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

static void deliver(struct kv_loopback_port *port, struct kv_loopback_message *message)
{
    struct kv_loopback_offer *offer = message->offer;

    if (offer == NULL) {
        port->events.message(port->owner, message->header, message->header_bytes, message->data,
                             message->data_bytes);
        return;
    }
    if (atomic_load(&offer->state) == KV_LOOPBACK_WITHDRAWN) {
        kv_loopback_offer_retire(offer);
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
    struct kv_loopback_port *port = kv_loopback_port_of(base);
    struct kv_loopback_receive_queue *receive_queue = port->receive_queue;
    unsigned n_closed = atomic_load(&kv_loopback_registry.n_closed);
    struct kv_loopback_message *message = NULL;
    unsigned n = 0;

    port->copied = 0;
    if (n_closed != port->closed_seen) {
        port->closed_seen = n_closed;
        while (report_one(port))
            n++;
    }
    n += kv_loopback_receive_on(port);
    /* Relaxed is enough: a message that is missed here raises the signal or is seen next time,
     * and the lock orders its contents. */
    if (atomic_load_explicit(&receive_queue->n_waiting, memory_order_relaxed) == 0)
        return n;

    while (kv_loopback_complete_one(port))
        n++;
    for (unsigned i = 0;; i++) {
        const bool is_enough =
            i >= PROGRESS_MESSAGES_MAX || port->copied >= KV_LOOPBACK_COPY_MAX;

        kv_lock_take(receive_queue->lock);
        receive_queue->sleeping = false;
        if (message != NULL)
            kv_loopback_receive_queue_recycle(receive_queue, message);
        message = is_enough ? NULL : receive_queue->first;
        if (message != NULL) {
            receive_queue->first = message->next;
            if (receive_queue->first == NULL)
                receive_queue->last = NULL;
            atomic_fetch_sub_explicit(&receive_queue->n_waiting, 1, memory_order_relaxed);
        }
        kv_lock_release(receive_queue->lock);
        if (message == NULL)
            break;
        deliver(port, message);
        n++;
    }
    return n;
}

static kv_status_t loopback_port_arm(struct kv_port *base, int *ret_fd)
{
    struct kv_loopback_port *port = kv_loopback_port_of(base);
    struct kv_loopback_receive_queue *receive_queue = port->receive_queue;
    bool busy;

    kv_signal_clear(receive_queue->signal);
    kv_lock_take(receive_queue->lock);
    busy = receive_queue->first != NULL || receive_queue->first_finished != NULL ||
           receive_queue->woken;
    receive_queue->woken = false;
    receive_queue->sleeping = !busy;
    kv_lock_release(receive_queue->lock);
    /* After the clear: a port that closes from here on raises the signal again. */
    if (busy || port->received != NULL ||
        atomic_load(&kv_loopback_registry.n_closed) != port->closed_seen)
        return KV_BUSY;
    *ret_fd = kv_signal_fd(receive_queue->signal);
    return KV_OK;
}

static void loopback_port_wake(struct kv_port *port)
{
    struct kv_loopback_receive_queue *receive_queue = kv_loopback_port_of(port)->receive_queue;

    kv_lock_take(receive_queue->lock);
    receive_queue->woken = true;
    kv_lock_release(receive_queue->lock);
    kv_signal_raise(receive_queue->signal);
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
    transport->ops = &kv_transport_loopback;
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
    mapping->is_owned = false;
    *ret_mapping = mapping;
    return KV_OK;
}

static kv_status_t loopback_alloc(struct kv_transport *transport,
                                  size_t bytes,
                                  void **ret_memory,
                                  struct kv_mapping **ret_mapping)
{
    void *memory = kv_memory_reserve(bytes);
    kv_status_t status = KV_NO_MEMORY;

    if (memory != NULL)
        status = loopback_map(transport, memory, bytes, KV_MEMORY_HOST, ret_mapping);
    if (status != KV_OK) {
        kv_memory_release(memory, bytes);
        return status;
    }
    (*ret_mapping)->is_owned = true;
    *ret_memory = memory;
    return KV_OK;
}

static void loopback_unmap(struct kv_transport *transport, struct kv_mapping *mapping)
{
    (void)transport;
    if (mapping->is_owned)
        kv_memory_release(mapping->base, mapping->bytes);
    free(mapping);
}

static void loopback_describe(struct kv_transport *transport, char *text, size_t text_bytes)
{
    (void)transport;
    snprintf(text, text_bytes, "loopback");
}

const struct kv_transport_ops kv_transport_loopback = {
    .name = "loopback",
    .open = loopback_open,
    .close = loopback_close,
    .map = loopback_map,
    .alloc = loopback_alloc,
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
