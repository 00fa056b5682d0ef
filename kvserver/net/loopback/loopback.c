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
#include "kvserver/net/transport.h"

#include "kvserver/base/thread.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    INLINE_MAX = 64 << 10,      /* larger data is offered */
    SMALL_MAX = 4 << 10,        /* data of a small message node */
    INBOX_MESSAGES_MAX = 4096,  /* waiting in one inbox, then KV_BUSY */
    INBOX_BYTES_MAX = 64 << 20, /* the same for their data */
    SPARE_SMALL_MAX = 256,      /* nodes kept for reuse, per inbox */
    SPARE_LARGE_MAX = 32,       /* the same for nodes of INLINE_MAX */
    SPARE_OFFERS_MAX = 256,     /* offers kept for reuse, per port */
    PROGRESS_MESSAGES_MAX = 64, /* delivered in one progress */
    SPINS_MAX = 1000,           /* before a wait for a copying receiver sleeps */
    ADDRESS_MAGIC = 0x6c76616b,
};

enum offer_state {
    OFFERED,
    COPYING,
    FINISHED,
    WITHDRAWN,
};

struct offer {
    struct kv_incoming base; /* what the receiver is given */
    _Atomic int state;
    const void *data; /* the sender's; read in COPYING only */
    size_t data_bytes;
    struct inbox *sender; /* holds a reference */

    /* Sender's thread only. */
    struct loopback_channel *channel; /* NULL: closed since */
    kv_transport_done_fn done;
    void *arg;
    struct offer *previous, *next; /* in its port's `offers` */

    kv_status_t status;          /* written before FINISHED */
    struct offer *next_finished; /* under sender->lock */

    /* Receiver's thread only, while its owner holds the incoming. */
    struct loopback_port *receiver;
    struct offer *previous_held, *next_held;
};

struct message {
    struct message *next;
    struct offer *offer; /* NULL: the data is here */
    size_t header_bytes;
    size_t data_bytes; /* of `data` */
    bool is_large;     /* room for INLINE_MAX rather than SMALL_MAX */
    unsigned char header[KV_TRANSPORT_HEADER_MAX];
    unsigned char data[] __attribute__((aligned(64)));
};

struct inbox {
    uint64_t number;
    struct kv_lock *lock;
    struct kv_signal *signal;
    _Atomic unsigned refs;
    _Atomic bool open;
    _Atomic unsigned n_waiting; /* messages and finished offers: a look without the lock */
    struct inbox *next;         /* under the registry's lock */

    /* Under lock. */
    struct message *first, *last;
    unsigned n_messages; /* queued or being filled */
    size_t n_bytes;
    struct offer *first_finished, *last_finished;
    struct message *spare_small, *spare_large;
    unsigned n_spare_small, n_spare_large;
    bool sleeping; /* armed: the next message raises the signal */
    bool woken;    /* by port_wake() since the last arm */
};

struct address {
    uint32_t magic;
    uint32_t process;
    uint64_t number;
};

struct kv_mapping {
    void *base;
    size_t bytes;
};

struct loopback_port {
    struct kv_port base;
    struct kv_port_events events;
    void *owner;
    struct inbox *inbox;
    struct address address;
    struct loopback_channel *channels;
    struct offer *offers; /* sent and not done */
    struct offer *held;   /* received, given to the owner and not answered */
    struct offer *spare;
    unsigned n_spare;
    unsigned closed_seen; /* value of registry.n_closed when channels were looked at last */
};

struct loopback_channel {
    struct kv_channel base;
    struct loopback_port *port;
    struct inbox *peer;
    enum kv_channel_mode mode;
    void *channel_arg;
    bool reported; /* events->failed() was called */
    struct loopback_channel *previous, *next;
};

/* All open ports of the process.  For port_open(), port_close() and connect(). */
static struct {
    _Atomic(struct kv_lock *) lock;
    struct inbox *inboxes;
    uint64_t last_number;
    _Atomic unsigned
        n_closed; /* ports closed so far: tells the others to look at their channels */
} registry;

static struct loopback_port *port_of(struct kv_port *port)
{
    return (struct loopback_port *)port;
}

/* The lock is made by whoever comes first, and lives as long as the process. */
static kv_status_t registry_init(void)
{
    struct kv_lock *expected = NULL;
    struct kv_lock *lock;

    if (atomic_load(&registry.lock) != NULL)
        return KV_OK;
    lock = kv_lock_create();
    if (lock == NULL)
        return KV_NO_MEMORY;
    if (!atomic_compare_exchange_strong(&registry.lock, &expected, lock))
        kv_lock_destroy(lock);
    return KV_OK;
}

static void registry_take(void)
{
    kv_lock_take(atomic_load(&registry.lock));
}

static void registry_release(void)
{
    kv_lock_release(atomic_load(&registry.lock));
}

/* Inboxes */

static void free_messages(struct message *message)
{
    while (message != NULL) {
        struct message *next = message->next;

        free(message);
        message = next;
    }
}

static void inbox_unref(struct inbox *inbox)
{
    if (inbox == NULL || atomic_fetch_sub(&inbox->refs, 1) > 1)
        return;
    assert(inbox->first == NULL && inbox->first_finished == NULL);
    free_messages(inbox->spare_small);
    free_messages(inbox->spare_large);
    kv_signal_destroy(inbox->signal);
    kv_lock_destroy(inbox->lock);
    free(inbox);
}

static struct inbox *inbox_create(void)
{
    struct inbox *inbox = calloc(1, sizeof(*inbox));

    if (inbox == NULL)
        return NULL;
    inbox->lock = kv_lock_create();
    inbox->signal = kv_signal_create();
    if (inbox->lock == NULL || inbox->signal == NULL) {
        if (inbox->lock != NULL)
            kv_lock_destroy(inbox->lock);
        if (inbox->signal != NULL)
            kv_signal_destroy(inbox->signal);
        free(inbox);
        return NULL;
    }
    atomic_init(&inbox->refs, 1);
    atomic_init(&inbox->open, true);
    return inbox;
}

/* Call with the lock held; returns what to do after its release. */
static bool must_raise(struct inbox *inbox)
{
    bool raise = inbox->sleeping;

    inbox->sleeping = false;
    return raise;
}

/* Takes a place in the inbox and a node for it. */
static kv_status_t
inbox_reserve(struct inbox *inbox, size_t data_bytes, struct message **ret_message)
{
    bool is_large = data_bytes > SMALL_MAX;
    struct message *message = NULL;
    kv_status_t status = KV_OK;

    kv_lock_take(inbox->lock);
    if (!atomic_load(&inbox->open)) {
        status = KV_UNREACHABLE;
    } else if (inbox->n_messages >= INBOX_MESSAGES_MAX ||
               inbox->n_bytes + data_bytes > INBOX_BYTES_MAX) {
        status = KV_BUSY;
    } else {
        struct message **spare = is_large ? &inbox->spare_large : &inbox->spare_small;
        unsigned *n_spare = is_large ? &inbox->n_spare_large : &inbox->n_spare_small;

        message = *spare;
        if (message != NULL) {
            *spare = message->next;
            --*n_spare;
        }
        inbox->n_messages++;
        inbox->n_bytes += data_bytes;
    }
    kv_lock_release(inbox->lock);
    if (status != KV_OK)
        return status;

    if (message == NULL) {
        size_t bytes = sizeof(*message) + (is_large ? INLINE_MAX : SMALL_MAX);

        message = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
        if (message == NULL) {
            kv_lock_take(inbox->lock);
            inbox->n_messages--;
            inbox->n_bytes -= data_bytes;
            kv_lock_release(inbox->lock);
            return KV_NO_MEMORY;
        }
        message->is_large = is_large;
    }
    message->next = NULL;
    message->offer = NULL;
    message->data_bytes = data_bytes;
    *ret_message = message;
    return KV_OK;
}

/* Gives a node back; call with the lock held. */
static void inbox_recycle(struct inbox *inbox, struct message *message)
{
    struct message **spare = message->is_large ? &inbox->spare_large : &inbox->spare_small;
    unsigned *n_spare = message->is_large ? &inbox->n_spare_large : &inbox->n_spare_small;
    unsigned max = message->is_large ? SPARE_LARGE_MAX : SPARE_SMALL_MAX;

    inbox->n_messages--;
    inbox->n_bytes -= message->data_bytes;
    if (*n_spare >= max) {
        free(message);
        return;
    }
    message->next = *spare;
    *spare = message;
    ++*n_spare;
}

/* Queues a filled node.  KV_UNREACHABLE: the port has closed since it was reserved; the node is
 * gone. */
static kv_status_t inbox_push(struct inbox *inbox, struct message *message)
{
    bool raise;

    kv_lock_take(inbox->lock);
    if (!atomic_load(&inbox->open)) {
        inbox_recycle(inbox, message);
        kv_lock_release(inbox->lock);
        return KV_UNREACHABLE;
    }
    if (inbox->last != NULL)
        inbox->last->next = message;
    else
        inbox->first = message;
    inbox->last = message;
    atomic_fetch_add_explicit(&inbox->n_waiting, 1, memory_order_relaxed);
    raise = must_raise(inbox);
    kv_lock_release(inbox->lock);
    if (raise)
        kv_signal_raise(inbox->signal);
    return KV_OK;
}

/* Offers */

static struct offer *offer_get(struct loopback_port *port)
{
    struct offer *offer = port->spare;

    if (offer != NULL) {
        port->spare = offer->next;
        port->n_spare--;
    } else {
        offer = malloc(sizeof(*offer));
        if (offer == NULL)
            return NULL;
    }
    memset(offer, 0, sizeof(*offer));
    atomic_init(&offer->state, OFFERED);
    return offer;
}

static void offer_put(struct loopback_port *port, struct offer *offer)
{
    if (port->n_spare >= SPARE_OFFERS_MAX) {
        free(offer);
        return;
    }
    offer->next = port->spare;
    port->spare = offer;
    port->n_spare++;
}

static void offer_link(struct loopback_port *port, struct offer *offer)
{
    offer->previous = NULL;
    offer->next = port->offers;
    if (port->offers != NULL)
        port->offers->previous = offer;
    port->offers = offer;
}

static void offer_unlink(struct loopback_port *port, struct offer *offer)
{
    if (offer->previous != NULL)
        offer->previous->next = offer->next;
    else
        port->offers = offer->next;
    if (offer->next != NULL)
        offer->next->previous = offer->previous;
}

static bool offer_leave(struct offer *offer, enum offer_state state)
{
    int expected = OFFERED;

    return atomic_compare_exchange_strong(&offer->state, &expected, state);
}

/* The receiver has no more to do with the offer, which left OFFERED by its hand. */
static void offer_finish(struct offer *offer, kv_status_t status)
{
    struct inbox *sender = offer->sender;
    bool raise;

    offer->status = status;
    offer->next_finished = NULL;
    kv_lock_take(sender->lock);
    atomic_store(&offer->state, FINISHED);
    if (sender->last_finished != NULL)
        sender->last_finished->next_finished = offer;
    else
        sender->first_finished = offer;
    sender->last_finished = offer;
    atomic_fetch_add_explicit(&sender->n_waiting, 1, memory_order_relaxed);
    raise = must_raise(sender);
    kv_lock_release(sender->lock);
    /* The offer is the sender's now; its reference to the inbox is still ours. */
    if (raise)
        kv_signal_raise(sender->signal);
    inbox_unref(sender);
}

/* Receiver's side: the sender took the offer back. */
static void offer_bury(struct offer *offer)
{
    assert(atomic_load(&offer->state) == WITHDRAWN);
    inbox_unref(offer->sender);
    free(offer);
}

/* Receiver's side, from any state that it can meet. */
static void offer_decline(struct offer *offer, kv_status_t status)
{
    if (offer_leave(offer, COPYING))
        offer_finish(offer, status);
    else
        offer_bury(offer);
}

/* Sender's side.  Returns false where the receiver has answered already, or is copying. */
static bool offer_withdraw(struct loopback_port *port, struct offer *offer)
{
    kv_transport_done_fn done = offer->done;
    void *arg = offer->arg;

    /* Unlinked first: from the swap on the receiver may free it. */
    offer_unlink(port, offer);
    if (!offer_leave(offer, WITHDRAWN)) {
        offer_link(port, offer);
        return false;
    }
    done(arg, KV_UNREACHABLE);
    return true;
}

static bool complete_one(struct loopback_port *port)
{
    struct inbox *inbox = port->inbox;
    struct offer *offer;
    kv_status_t status;

    kv_lock_take(inbox->lock);
    offer = inbox->first_finished;
    if (offer != NULL) {
        inbox->first_finished = offer->next_finished;
        if (inbox->first_finished == NULL)
            inbox->last_finished = NULL;
        atomic_fetch_sub_explicit(&inbox->n_waiting, 1, memory_order_relaxed);
    }
    kv_lock_release(inbox->lock);
    if (offer == NULL)
        return false;

    kv_transport_done_fn done = offer->done;
    void *arg = offer->arg;

    status = offer->channel != NULL ? offer->status : KV_UNREACHABLE;
    offer_unlink(port, offer);
    offer_put(port, offer);
    done(arg, status);
    return true;
}

static void held_unlink(struct offer *offer)
{
    struct loopback_port *port = offer->receiver;

    if (offer->previous_held != NULL)
        offer->previous_held->next_held = offer->next_held;
    else
        port->held = offer->next_held;
    if (offer->next_held != NULL)
        offer->next_held->previous_held = offer->previous_held;
}

static kv_status_t loopback_receive(struct kv_incoming *incoming,
                                    const struct kv_iov *iov,
                                    unsigned n_iov,
                                    kv_transport_done_fn done,
                                    void *arg)
{
    struct offer *offer = (struct offer *)incoming;
    const unsigned char *from;
    size_t bytes = 0;

    (void)done; /* a copy is over at once */
    (void)arg;
    assert(n_iov <= KV_IOV_MAX);
    for (unsigned i = 0; i < n_iov; i++)
        bytes += iov[i].bytes;
    assert(bytes == offer->data_bytes);

    held_unlink(offer);
    if (!offer_leave(offer, COPYING)) {
        offer_bury(offer);
        return KV_UNREACHABLE;
    }
    from = offer->data;
    for (unsigned i = 0; i < n_iov; i++) {
        memcpy(iov[i].base, from, iov[i].bytes);
        from += iov[i].bytes;
    }
    offer_finish(offer, KV_OK);
    return KV_OK;
}

static void loopback_refuse(struct kv_incoming *incoming)
{
    struct offer *offer = (struct offer *)incoming;

    held_unlink(offer);
    offer_decline(offer, KV_OK);
}

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
    registry_take();
    for (inbox = registry.inboxes; inbox != NULL; inbox = inbox->next)
        if (inbox->number == peer.number)
            break;
    if (inbox != NULL)
        atomic_fetch_add(&inbox->refs, 1);
    registry_release();
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
        (void)offer_withdraw(port, offer);
        offer = port->offers;
    }

    if (channel->previous != NULL)
        channel->previous->next = channel->next;
    else
        port->channels = channel->next;
    if (channel->next != NULL)
        channel->next->previous = channel->previous;
    inbox_unref(channel->peer);
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
    status = inbox_reserve(channel->peer, is_offer ? 0 : data_bytes, &message);
    if (status != KV_OK)
        return status;
    message->header_bytes = header_bytes;
    if (header_bytes > 0)
        memcpy(message->header, header, header_bytes);
    if (!is_offer) {
        if (data_bytes > 0)
            memcpy(message->data, data, data_bytes);
        return inbox_push(channel->peer, message);
    }

    offer = offer_get(port);
    if (offer == NULL) {
        kv_lock_take(channel->peer->lock);
        inbox_recycle(channel->peer, message);
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
    offer_link(port, offer);
    message->offer = offer;
    status = inbox_push(channel->peer, message);
    if (status != KV_OK) {
        inbox_unref(offer->sender);
        offer_unlink(port, offer);
        offer_put(port, offer);
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
    status = inbox_reserve(channel->peer, pieces[0].bytes + pieces[1].bytes, &message);
    if (status != KV_OK)
        return status;
    message->header_bytes = header_bytes;
    memcpy(message->header, header, header_bytes);
    if (pieces[0].bytes > 0)
        memcpy(message->data, pieces[0].base, pieces[0].bytes);
    if (pieces[1].bytes > 0)
        memcpy(message->data + pieces[0].bytes, pieces[1].base, pieces[1].bytes);
    return inbox_push(channel->peer, message);
}

/* Ports */

static void loopback_port_close(struct kv_port *base)
{
    struct loopback_port *port = port_of(base);
    struct inbox *inbox = port->inbox;
    struct message *message;

    registry_take();
    for (struct inbox **link = &registry.inboxes; *link != NULL; link = &(*link)->next) {
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
    atomic_fetch_add(&registry.n_closed, 1);
    for (struct inbox *other = registry.inboxes; other != NULL; other = other->next)
        kv_signal_raise(other->signal);
    registry_release();

    while (message != NULL) {
        struct message *next = message->next;

        if (message->offer != NULL)
            offer_decline(message->offer, KV_UNREACHABLE);
        free(message);
        message = next;
    }
    while (port->held != NULL) {
        struct offer *offer = port->held;

        held_unlink(offer);
        offer_decline(offer, KV_UNREACHABLE);
    }

    while (port->channels != NULL)
        loopback_channel_close(&port->channels->base);
    /* What is left is being copied by a receiver at this moment, or was. */
    for (unsigned spins = 0; port->offers != NULL; spins++) {
        if (complete_one(port))
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
    inbox_unref(inbox);
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
    port->inbox = inbox_create();
    if (port->inbox == NULL) {
        free(port);
        return KV_NO_MEMORY;
    }
    port->base.row = transport->row;
    port->events = *events;
    port->owner = owner;
    port->closed_seen = atomic_load(&registry.n_closed);

    registry_take();
    port->inbox->number = ++registry.last_number;
    port->inbox->next = registry.inboxes;
    registry.inboxes = port->inbox;
    registry_release();

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
        offer_bury(offer);
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
    unsigned n_closed = atomic_load(&registry.n_closed);
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

    while (complete_one(port))
        n++;
    for (unsigned i = 0; i <= PROGRESS_MESSAGES_MAX; i++) {
        kv_lock_take(inbox->lock);
        inbox->sleeping = false;
        if (message != NULL)
            inbox_recycle(inbox, message);
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
    if (busy || atomic_load(&registry.n_closed) != port->closed_seen)
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
    if (transport == NULL || registry_init() != KV_OK) {
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
    .receive = loopback_receive,
    .refuse = loopback_refuse,
};
