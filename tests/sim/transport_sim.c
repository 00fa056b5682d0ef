#include "tests/sim/transport_sim.h"

#include "kvserver/base/hash.h"
#include "kvserver/base/memory.h"
#include "kvserver/base/random.h"
#include "tests/support/failing_memory.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ADDRESS_MAGIC = 0x6d69736b,
    LATENCY_LEAST_US = 3,
    LATENCY_SPREAD_US = 40,
    LATENCY_TAIL_US = 2000,
    LATENCY_TAIL_OF = 64, /* one message of so many takes up to that */
    LATENCY_LONG_US = 20000000,
    NOTICE_US = 100000, /* until a peer's death is noticed, mostly */
    NOTICE_LONG_US = 3000000,
    BYTES_PER_US = 5000,
    PROGRESS_MAX = 8, /* messages delivered in one progress */
    MILLION = 1000000,
};

struct completion {
    struct completion *next;
    struct message *message;
    kv_transport_done_fn done;
    void *arg;
    kv_status_t status;
    bool is_open; /* `done` is still to be called */
};

/* A message, from send() until both sides have let go of it. */
struct message {
    struct kv_incoming base; /* large data: what the receiver is given */
    struct net_channel *channel;
    unsigned refs;
    bool is_large;
    bool withdrawn; /* the sender's memory is not ours any more */
    bool corrupts;
    bool is_lost;        /* its sender will hear of it */
    bool breaks;         /* its data ceases to come in the middle */
    uint64_t done_bytes; /* of large data, copied */
    const uint8_t *data; /* the sender's, or our copy */
    uint8_t *copy;
    size_t data_bytes;
    size_t header_bytes;
    struct completion sent, received;
    struct message *next_sending, **sending_link; /* of the sender's port */

    /* Receiving. */
    struct net_port *receiver;
    struct kv_iov iov[KV_IOV_MAX];
    unsigned n_iov;
    bool is_held; /* by the owner of the port */
    struct message *next_held, **held_link;
    struct message *next_inbox;

    uint8_t header[KV_TRANSPORT_HEADER_MAX] __attribute__((aligned(16)));
};

enum event_kind {
    EVENT_DEPART,
    EVENT_ARRIVE,
    EVENT_COPY,
    EVENT_SENT, /* the sender hears that it is done */
    EVENT_LOST, /* the sender's transport gives a large message up */
    EVENT_FAIL, /* of a channel */
};

struct event {
    uint64_t at_us;
    uint64_t number;
    enum event_kind kind;
    struct message *message;
    struct net_channel *channel;
};

struct address {
    uint32_t magic;
    uint32_t zero;
    uint64_t number;
};

struct net_transport {
    struct kv_transport base;
    struct sim_net *net;
    unsigned place;
    bool is_dead;
    struct net_transport *next;
};

struct net_port {
    struct kv_port base;
    struct net_transport *transport;
    struct kv_port_events events;
    void *owner;
    struct address address;
    bool is_closed;
    unsigned n_reports; /* channels whose failure the owner has not heard of */
    struct message *inbox, **inbox_end;
    struct message *sending; /* whose `sent` is open */
    struct message *held;    /* given to the owner, not answered or still landing */
    struct completion *completions, **completions_end;
    struct net_port *next;
};

struct net_channel {
    struct kv_channel base;
    struct net_port *port, *peer;
    enum kv_channel_mode mode;
    void *arg;
    bool is_closed;
    bool has_failed;
    bool must_report;
    struct net_channel *next;
};

struct sim_net {
    const struct kv_clock *clock;
    struct kv_random random;
    struct sim_net_faults faults;
    size_t inline_bytes; /* larger data is not copied on its way */
    struct net_transport *transports;
    struct net_port *ports;
    struct net_channel *channels;
    uint64_t n_ports, n_events;
    struct event *heap;
    size_t n_heap, heap_room;
    struct {
        uint64_t until_us;
        bool loses;
    } cuts[SIM_PLACES_MAX][SIM_PLACES_MAX];
    uint64_t hash;
};

static const struct kv_transport_ops net_row;

/* ---- chance and time --------------------------------------------------------------------- */

static bool happens(struct sim_net *net, uint32_t in_a_million)
{
    return in_a_million > 0 && kv_random_below(&net->random, MILLION) < in_a_million;
}

static uint64_t latency(struct sim_net *net)
{
    uint64_t us = LATENCY_LEAST_US + kv_random_below(&net->random, LATENCY_SPREAD_US);

    if (kv_random_below(&net->random, LATENCY_TAIL_OF) == 0)
        us += kv_random_below(&net->random, LATENCY_TAIL_US);
    return us;
}

static uint64_t trip_time(struct sim_net *net)
{
    if (happens(net, net->faults.delayed))
        return kv_random_below(&net->random, LATENCY_LONG_US);
    return latency(net);
}

static uint64_t large_time(struct sim_net *net)
{
    if (happens(net, net->faults.large_delayed))
        return kv_random_below(&net->random, LATENCY_LONG_US);
    return trip_time(net);
}

static uint64_t notice_time(struct sim_net *net)
{
    uint64_t bound = kv_random_below(&net->random, 8) == 0 ? NOTICE_LONG_US : NOTICE_US;

    return kv_random_below(&net->random, bound);
}

static void remember(struct sim_net *net, uint64_t what)
{
    net->hash = kv_mix64(net->hash ^ what);
}

/* ---- the queue --------------------------------------------------------------------------- */

static bool is_before(const struct event *a, const struct event *b)
{
    return a->at_us != b->at_us ? a->at_us < b->at_us : a->number < b->number;
}

static void schedule(struct sim_net *net,
                     uint64_t after_us,
                     enum event_kind kind,
                     struct message *message,
                     struct net_channel *channel)
{
    struct event event = {
        .at_us = kv_clock_now(net->clock) + after_us,
        .number = ++net->n_events,
        .kind = kind,
        .message = message,
        .channel = channel,
    };
    size_t at = net->n_heap++;

    if (message != NULL)
        message->refs++;
    if (net->n_heap > net->heap_room) {
        size_t n_room = net->heap_room * 2 + 64;
        struct event *larger = failing_memory_sure(n_room, sizeof(event));

        if (net->heap_room > 0)
            memcpy(larger, net->heap, net->heap_room * sizeof(event));
        free(net->heap);
        net->heap = larger;
        net->heap_room = n_room;
    }
    for (; at > 0 && is_before(&event, &net->heap[(at - 1) / 2]); at = (at - 1) / 2)
        net->heap[at] = net->heap[(at - 1) / 2];
    net->heap[at] = event;
}

static struct event take_first(struct sim_net *net)
{
    struct event first = net->heap[0];
    struct event last = net->heap[--net->n_heap];
    size_t at = 0, child;

    while ((child = 2 * at + 1) < net->n_heap) {
        if (child + 1 < net->n_heap && is_before(&net->heap[child + 1], &net->heap[child]))
            child++;
        if (!is_before(&net->heap[child], &last))
            break;
        net->heap[at] = net->heap[child];
        at = child;
    }
    if (net->n_heap > 0)
        net->heap[at] = last;
    return first;
}

/* ---- messages ---------------------------------------------------------------------------- */

static void __attribute__((noinline)) unref(struct message *message)
{
    if (--message->refs > 0)
        return;
    free(message->copy);
    free(message);
}

static void hold(struct net_port *port, struct message *message)
{
    message->refs++;
    message->is_held = true;
    message->receiver = port;
    message->next_held = port->held;
    message->held_link = &port->held;
    if (port->held != NULL)
        port->held->held_link = &message->next_held;
    port->held = message;
}

static void let_go(struct message *message)
{
    message->is_held = false;
    *message->held_link = message->next_held;
    if (message->next_held != NULL)
        message->next_held->held_link = message->held_link;
    unref(message);
}

static void sending_begin(struct net_port *port, struct message *message)
{
    message->refs++;
    message->sent.is_open = true;
    message->next_sending = port->sending;
    message->sending_link = &port->sending;
    if (port->sending != NULL)
        port->sending->sending_link = &message->next_sending;
    port->sending = message;
}

/* Calls `done` of a send that was under way. */
static void sending_end(struct message *message, kv_status_t status)
{
    message->sent.is_open = false;
    *message->sending_link = message->next_sending;
    if (message->next_sending != NULL)
        message->next_sending->sending_link = message->sending_link;
    message->sent.done(message->sent.arg, status);
    unref(message);
}

/* In a later progress of its port. */
static void complete(struct net_port *port, struct completion *completion, kv_status_t status)
{
    completion->status = status;
    completion->next = NULL;
    completion->message->refs++;
    *port->completions_end = completion;
    port->completions_end = &completion->next;
}

static void sent_later(struct sim_net *net, struct message *message, kv_status_t status)
{
    if (!message->sent.is_open || message->sent.status != KV_IN_PROGRESS)
        return;
    message->sent.status = status;
    schedule(net, latency(net), EVENT_SENT, message, NULL);
}

static void withdraw(struct message *message)
{
    message->withdrawn = true;
    if (message->copy == NULL)
        message->data = NULL;
}

static void inbox_put(struct net_port *port, struct message *message)
{
    message->refs++;
    message->next_inbox = NULL;
    *port->inbox_end = message;
    port->inbox_end = &message->next_inbox;
}

/* ---- failing ----------------------------------------------------------------------------- */

static void channel_fail_later(struct net_channel *channel, uint64_t after_us)
{
    if (channel->mode == KV_CHANNEL_NETWORK && !channel->is_closed)
        schedule(channel->port->transport->net, after_us, EVENT_FAIL, NULL, channel);
}

static void on_fail(struct net_channel *channel)
{
    struct message *message;

    if (channel->is_closed || channel->has_failed || channel->port->is_closed)
        return;
    channel->has_failed = channel->must_report = true;
    channel->port->n_reports++;
    for (message = channel->port->sending; message != NULL; message = message->next_sending) {
        if (message->channel != channel || message->sent.status != KV_IN_PROGRESS)
            continue;
        withdraw(message);
        message->sent.status = KV_UNREACHABLE;
        complete(channel->port, &message->sent, KV_UNREACHABLE);
    }
}

/* Whoever has a connection to the port will notice. */
static void tell_peers(struct net_port *port)
{
    struct sim_net *net = port->transport->net;

    for (struct net_channel *channel = net->channels; channel != NULL; channel = channel->next)
        if (channel->peer == port && !channel->is_closed)
            channel_fail_later(channel, notice_time(net));
}

/* ---- what happens ------------------------------------------------------------------------ */

/* 0: the one can reach the other now; else how long not. */
static uint64_t cut_left_from(const struct sim_net *net, unsigned from, unsigned to)
{
    uint64_t now_us = kv_clock_now(net->clock);
    uint64_t until_us = net->cuts[from][to].until_us;

    return until_us > now_us ? until_us - now_us : 0;
}

static uint64_t cut_left(const struct sim_net *net, const struct message *message)
{
    return cut_left_from(net, message->channel->port->transport->place,
                         message->channel->peer->transport->place);
}

/* The same of what the receiver says to the sender. */
static uint64_t cut_left_back(const struct sim_net *net, const struct message *message)
{
    return cut_left_from(net, message->channel->peer->transport->place,
                         message->channel->port->transport->place);
}

/* Large data moves while both hear each other. */
static uint64_t cut_left_both(const struct sim_net *net, const struct message *message)
{
    uint64_t there_us = cut_left(net, message), back_us = cut_left_back(net, message);

    return there_us > back_us ? there_us : back_us;
}

static bool cut_loses(const struct sim_net *net, const struct message *message)
{
    return net
        ->cuts[message->channel->port->transport->place]
              [message->channel->peer->transport->place]
        .loses;
}

static void take_copy(struct message *message)
{
    uint8_t *copy = failing_memory_sure(1, message->data_bytes + 1);

    if (message->data_bytes > 0)
        memcpy(copy, message->data, message->data_bytes);
    message->copy = copy;
    message->data = copy;
}

static void flip(struct sim_net *net, uint8_t *bytes, size_t n_bytes)
{
    if (n_bytes > 0)
        bytes[kv_random_below(&net->random, n_bytes)] ^=
            (uint8_t)(1 << kv_random_below(&net->random, 8));
}

static void on_depart(struct sim_net *net, struct message *message)
{
    if (message->withdrawn || message->channel->port->transport->is_dead)
        return;
    take_copy(message);
    sent_later(net, message, KV_OK);
    schedule(net, trip_time(net), EVENT_ARRIVE, message, NULL);
}

static void on_arrive(struct sim_net *net, struct message *message)
{
    struct net_port *peer = message->channel->peer;
    uint64_t left_us = cut_left(net, message);

    if (left_us > 0) {
        if (message->is_large || !cut_loses(net, message))
            schedule(net, left_us + latency(net), EVENT_ARRIVE, message, NULL);
        return;
    }
    if (peer->is_closed || peer->transport->is_dead || message->withdrawn)
        return;
    if (happens(net, net->faults.corrupted)) {
        if (message->is_large)
            message->corrupts = true;
        else if (message->data_bytes > 0 && kv_random_below(&net->random, 2) == 0)
            flip(net, message->copy, message->data_bytes);
        else
            flip(net, message->header, message->header_bytes);
    }
    inbox_put(peer, message);
}

/* Moves large data as far as `end`. */
static void copy_to(struct message *message, size_t end)
{
    size_t at = 0;

    for (unsigned i = 0; i < message->n_iov && at < end; at += message->iov[i++].bytes) {
        size_t bytes = message->iov[i].bytes < end - at ? message->iov[i].bytes : end - at;
        size_t skip = message->done_bytes > at ? message->done_bytes - at : 0;

        if (skip < bytes)
            memcpy((uint8_t *)message->iov[i].base + skip, message->data + at + skip,
                   bytes - skip);
    }
    message->done_bytes = end;
}

static void copy_rest(struct sim_net *net, struct message *message)
{
    copy_to(message, message->data_bytes);
    if (message->corrupts) {
        const struct kv_iov *iov = &message->iov[kv_random_below(&net->random, message->n_iov)];

        flip(net, iov->base, iov->bytes);
    }
}

static void on_copy(struct sim_net *net, struct message *message)
{
    uint64_t left_us = cut_left_both(net, message);
    kv_status_t status = KV_OK;

    if (!message->received.is_open || message->received.status != KV_IN_PROGRESS)
        return;
    if (message->withdrawn || message->channel->port->transport->is_dead || message->breaks) {
        status = KV_UNREACHABLE;
    } else if (left_us > 0) {
        schedule(net, left_us + latency(net), EVENT_COPY, message, NULL);
        return;
    } else {
        copy_rest(net, message);
        sent_later(net, message, KV_OK);
    }
    message->received.status = status;
    complete(message->receiver, &message->received, status);
}

/* A small message has left when the sender says so; a large one when its receiver does. */
static void on_sent(struct sim_net *net, struct message *message)
{
    uint64_t left_us = message->is_large ? cut_left_back(net, message) : 0;

    if (!message->sent.is_open)
        return;
    if (left_us > 0)
        schedule(net, left_us + latency(net), EVENT_SENT, message, NULL);
    else
        complete(message->channel->port, &message->sent, message->sent.status);
}

static void on_lost(struct message *message)
{
    if (!message->sent.is_open || message->sent.status != KV_IN_PROGRESS)
        return;
    withdraw(message);
    message->sent.status = KV_UNREACHABLE;
    complete(message->channel->port, &message->sent, KV_UNREACHABLE);
}

static void happen(struct sim_net *net, const struct event *event)
{
    struct message *message = event->message;

    switch (event->kind) {
    case EVENT_DEPART:
        on_depart(net, message);
        break;
    case EVENT_ARRIVE:
        on_arrive(net, message);
        break;
    case EVENT_COPY:
        on_copy(net, message);
        break;
    case EVENT_SENT:
        on_sent(net, message);
        break;
    case EVENT_LOST:
        on_lost(message);
        break;
    case EVENT_FAIL:
        on_fail(event->channel);
        break;
    }
    if (message != NULL)
        unref(message);
}

uint64_t sim_net_step(struct sim_net *net)
{
    uint64_t now_us = kv_clock_now(net->clock);

    while (net->n_heap > 0 && net->heap[0].at_us <= now_us) {
        struct event event = take_first(net);

        remember(net, event.at_us);
        remember(net, event.number << 8 | event.kind);
        happen(net, &event);
    }
    return net->n_heap > 0 ? net->heap[0].at_us : UINT64_MAX;
}

/* ---- channels ---------------------------------------------------------------------------- */

static kv_status_t net_connect(struct kv_port *base,
                               const void *address,
                               size_t address_bytes,
                               enum kv_channel_mode mode,
                               void *channel_arg,
                               struct kv_channel **ret_channel)
{
    struct net_port *port = (struct net_port *)base;
    struct sim_net *net = port->transport->net;
    struct net_channel *channel;
    struct net_port *peer;
    struct address wanted;

    if (address_bytes != sizeof(wanted))
        return KV_INVALID;
    memcpy(&wanted, address, sizeof(wanted));
    if (wanted.magic != ADDRESS_MAGIC)
        return KV_INVALID;
    for (peer = net->ports; peer != NULL; peer = peer->next)
        if (peer->address.number == wanted.number)
            break;
    if (peer == NULL)
        return KV_UNREACHABLE;
    if ((peer->is_closed || peer->transport->is_dead) &&
        (mode == KV_CHANNEL_SHARED || kv_random_below(&net->random, 2) == 0))
        return KV_UNREACHABLE;

    channel = failing_memory_sure(1, sizeof(*channel));
    channel->base.ops = &net_row;
    channel->port = port;
    channel->peer = peer;
    channel->mode = mode;
    channel->arg = channel_arg;
    channel->next = net->channels;
    net->channels = channel;
    if (peer->is_closed || peer->transport->is_dead)
        channel_fail_later(channel, notice_time(net));
    *ret_channel = &channel->base;
    return KV_OK;
}

static void net_channel_close(struct kv_channel *base)
{
    struct net_channel *channel = (struct net_channel *)base;
    struct net_port *port = channel->port;
    struct sim_net *net = port->transport->net;
    bool is_now = kv_random_below(&net->random, 2) == 0;
    struct message *message;

    assert(!channel->is_closed);
    channel->is_closed = true;
    for (message = port->sending; message != NULL; message = message->next_sending)
        if (message->channel == channel)
            withdraw(message);
again:
    for (message = port->sending; message != NULL; message = message->next_sending) {
        if (message->channel != channel || message->sent.status != KV_IN_PROGRESS)
            continue;
        message->sent.status = KV_UNREACHABLE;
        if (!is_now) {
            complete(port, &message->sent, KV_UNREACHABLE);
            continue;
        }
        /* `done` may send and close others: the list is another one after it. */
        sending_end(message, KV_UNREACHABLE);
        goto again;
    }
}

static void net_channel_describe(struct kv_channel *channel, char *text, size_t text_bytes)
{
    (void)channel;
    snprintf(text, text_bytes, "sim");
}

/* The same message once more, with its bytes as they are now. */
static void send_twin(struct sim_net *net, const struct message *message, uint64_t after_us)
{
    struct message *twin = failing_memory_sure(1, sizeof(*twin));

    *twin = *message;
    twin->refs = 1;
    twin->sent = (struct completion){.message = twin};
    take_copy(twin);
    schedule(net, after_us, EVENT_ARRIVE, twin, NULL);
    unref(twin);
}

/* What is lost stays with its sender until that gives it up. */
static kv_status_t send_large(struct sim_net *net, struct message *message)
{
    const bool is_lost = happens(net, net->faults.large_lost);

    message->is_lost = is_lost;
    if (happens(net, net->faults.large_doubled))
        send_twin(net, message, large_time(net));
    sending_begin(message->channel->port, message);
    message->breaks = is_lost && kv_random_below(&net->random, 2) == 0;
    if (!is_lost || message->breaks)
        schedule(net, large_time(net), EVENT_ARRIVE, message, NULL);
    if (is_lost)
        schedule(net, kv_random_below(&net->random, LATENCY_LONG_US), EVENT_LOST, message,
                 NULL);
    unref(message);
    return KV_IN_PROGRESS;
}

static kv_status_t net_send(struct kv_channel *base,
                            const void *header,
                            size_t header_bytes,
                            const void *data,
                            size_t data_bytes,
                            kv_transport_done_fn done,
                            void *arg)
{
    struct net_channel *channel = (struct net_channel *)base;
    struct net_port *port = channel->port;
    struct sim_net *net = port->transport->net;
    struct message *message;

    assert(!channel->is_closed && !port->is_closed);
    if (header_bytes > KV_TRANSPORT_HEADER_MAX)
        return KV_INVALID;
    if (channel->has_failed)
        return KV_UNREACHABLE;
    if (port->transport->is_dead)
        return KV_OK;
    if (happens(net, net->faults.full))
        return KV_BUSY;
    if (happens(net, net->faults.reset))
        channel_fail_later(channel, latency(net));

    message = failing_memory_sure(1, sizeof(*message));
    message->base.ops = &net_row;
    message->refs = 1;
    message->channel = channel;
    message->is_large = data_bytes > net->inline_bytes;
    message->header_bytes = header_bytes;
    memcpy(message->header, header, header_bytes);
    message->data = data;
    message->data_bytes = data_bytes;
    message->sent = (struct completion){
        .message = message, .done = done, .arg = arg, .status = KV_IN_PROGRESS};
    remember(net, kv_clock_now(net->clock));
    for (size_t i = 0; i + 8 <= header_bytes; i += 8) {
        uint64_t word;

        memcpy(&word, message->header + i, sizeof(word));
        remember(net, word);
    }

    if (message->is_large)
        return send_large(net, message);
    if (kv_random_below(&net->random, 4) == 0) {
        sending_begin(port, message);
        schedule(net, kv_random_below(&net->random, LATENCY_SPREAD_US), EVENT_DEPART, message,
                 NULL);
        unref(message);
        return KV_IN_PROGRESS;
    }
    take_copy(message);
    if (!happens(net, net->faults.lost))
        schedule(net, trip_time(net), EVENT_ARRIVE, message, NULL);
    if (happens(net, net->faults.doubled))
        send_twin(net, message, trip_time(net));
    unref(message);
    return KV_OK;
}

static kv_status_t net_receive(struct kv_incoming *incoming,
                               const struct kv_iov *iov,
                               unsigned n_iov,
                               kv_transport_done_fn done,
                               void *arg)
{
    struct message *message = (struct message *)incoming;
    struct sim_net *net = message->receiver->transport->net;
    size_t bytes = 0;

    assert(message->is_held && n_iov > 0 && n_iov <= KV_IOV_MAX);
    for (unsigned i = 0; i < n_iov; i++)
        bytes += iov[i].bytes;
    assert(bytes == message->data_bytes);
    if (message->withdrawn || message->channel->port->transport->is_dead) {
        let_go(message);
        return KV_UNREACHABLE;
    }
    memcpy(message->iov, iov, n_iov * sizeof(*iov));
    message->n_iov = n_iov;
    if (!message->breaks && kv_random_below(&net->random, 3) == 0 &&
        cut_left_both(net, message) == 0) {
        copy_rest(net, message);
        sent_later(net, message, KV_OK);
        let_go(message);
        return KV_OK;
    }
    copy_to(message, kv_random_below(&net->random, bytes));
    message->received = (struct completion){.message = message,
                                            .done = done,
                                            .arg = arg,
                                            .status = KV_IN_PROGRESS,
                                            .is_open = true};
    schedule(
        net,
        (message->breaks ? kv_random_below(&net->random, LATENCY_LONG_US) : large_time(net)) +
            bytes / BYTES_PER_US,
        EVENT_COPY, message, NULL);
    return KV_IN_PROGRESS;
}

static void net_refuse(struct kv_incoming *incoming)
{
    struct message *message = (struct message *)incoming;

    assert(message->is_held && !message->received.is_open);
    sent_later(message->receiver->transport->net, message, KV_OK);
    let_go(message);
}

/* ---- ports ------------------------------------------------------------------------------- */

static kv_status_t net_port_open(struct kv_transport *base,
                                 const struct kv_port_events *events,
                                 void *owner,
                                 struct kv_port **ret_port)
{
    struct net_transport *transport = (struct net_transport *)base;
    struct sim_net *net = transport->net;
    struct net_port *port = failing_memory_sure(1, sizeof(*port));

    port->base.ops = &net_row;
    port->transport = transport;
    port->events = *events;
    port->owner = owner;
    port->address = (struct address){.magic = ADDRESS_MAGIC, .number = ++net->n_ports};
    port->inbox_end = &port->inbox;
    port->completions_end = &port->completions;
    port->next = net->ports;
    net->ports = port;
    *ret_port = &port->base;
    return KV_OK;
}

static void receiving_end(struct message *message, kv_status_t status)
{
    message->received.is_open = false;
    message->received.done(message->received.arg, status);
    let_go(message);
}

static bool complete_one(struct net_port *port)
{
    struct completion *completion = port->completions;
    struct message *message;

    if (completion == NULL)
        return false;
    message = completion->message;
    port->completions = completion->next;
    if (port->completions == NULL)
        port->completions_end = &port->completions;
    if (completion->is_open) {
        if (completion == &message->sent)
            sending_end(message, completion->status);
        else
            receiving_end(message, completion->status);
    }
    unref(message);
    return true;
}

static void net_port_close(struct kv_port *base)
{
    struct net_port *port = (struct net_port *)base;
    struct sim_net *net = port->transport->net;

    while (port->inbox != NULL) {
        struct message *message = port->inbox;

        port->inbox = message->next_inbox;
        unref(message);
    }
    for (struct net_channel *channel = net->channels; channel != NULL; channel = channel->next)
        if (channel->port == port && !channel->is_closed)
            net_channel_close(&channel->base);
    while (complete_one(port))
        ;
    for (struct message *message; (message = port->sending) != NULL;) {
        message->refs++;
        withdraw(message);
        sending_end(message, KV_UNREACHABLE);
        unref(message);
    }
    while (port->held != NULL) {
        struct message *message = port->held;

        if (message->received.is_open)
            receiving_end(message, KV_UNREACHABLE);
        else
            let_go(message);
    }
    port->is_closed = true;
    tell_peers(port);
}

static void net_port_address(struct kv_port *port, const void **ret_address, size_t *ret_bytes)
{
    *ret_address = &((struct net_port *)port)->address;
    *ret_bytes = sizeof(struct address);
}

static void deliver(struct net_port *port, struct message *message)
{
    if (!message->is_large) {
        port->events.message(port->owner, message->header, message->header_bytes, message->data,
                             message->data_bytes);
        return;
    }
    if (message->withdrawn)
        return;
    hold(port, message);
    port->events.incoming(port->owner, message->header, message->header_bytes,
                          message->data_bytes, &message->base);
}

static unsigned net_port_progress(struct kv_port *base)
{
    struct net_port *port = (struct net_port *)base;
    struct sim_net *net = port->transport->net;
    uint64_t most;
    unsigned n = 0;

    for (struct net_channel *channel = port->n_reports > 0 ? net->channels : NULL;
         channel != NULL; channel = channel->next) {
        if (channel->port != port || !channel->must_report)
            continue;
        channel->must_report = false;
        port->n_reports--;
        if (channel->is_closed)
            continue;
        port->events.failed(port->owner, channel->arg, KV_UNREACHABLE);
        n++;
    }
    if (port->completions == NULL && port->inbox == NULL)
        return n;
    while (complete_one(port))
        n++;
    most = 1 + kv_random_below(&net->random, PROGRESS_MAX);
    for (uint64_t i = 0; i < most && port->inbox != NULL; i++, n++) {
        struct message *message = port->inbox;

        port->inbox = message->next_inbox;
        if (port->inbox == NULL)
            port->inbox_end = &port->inbox;
        deliver(port, message);
        unref(message);
    }
    return n;
}

static kv_status_t net_port_arm(struct kv_port *port, int *ret_fd)
{
    (void)port;
    *ret_fd = -1;
    return KV_OK;
}

static void net_port_wake(struct kv_port *port)
{
    (void)port;
}

/* ---- the transport ----------------------------------------------------------------------- */

static kv_status_t net_open(const struct kv_transport_config *config,
                            struct kv_transport **ret_transport,
                            char *detail,
                            size_t detail_bytes)
{
    (void)config;
    (void)ret_transport;
    snprintf(detail, detail_bytes, "sim: its transports come from a net");
    return KV_UNSUPPORTED;
}

static void net_close(struct kv_transport *transport)
{
    (void)transport;
}

/* Of memory that was allocated; `brought` is for all other. */
struct kv_mapping {
    void *base;
    size_t bytes;
};
static struct kv_mapping brought;

static kv_status_t net_map(struct kv_transport *transport,
                           void *base,
                           size_t bytes,
                           enum kv_memory_type type,
                           struct kv_mapping **ret_mapping)
{
    (void)transport;
    (void)base;
    (void)bytes;
    if (type != KV_MEMORY_HOST)
        return KV_UNSUPPORTED;
    *ret_mapping = &brought;
    return KV_OK;
}

static kv_status_t net_alloc(struct kv_transport *transport,
                             size_t bytes,
                             void **ret_memory,
                             struct kv_mapping **ret_mapping)
{
    struct kv_mapping *mapping = malloc(sizeof(*mapping));
    void *memory = kv_memory_reserve(bytes);

    (void)transport;
    if (mapping == NULL || memory == NULL) {
        free(mapping);
        kv_memory_release(memory, bytes);
        return KV_NO_MEMORY;
    }
    *mapping = (struct kv_mapping){memory, bytes};
    *ret_memory = memory;
    *ret_mapping = mapping;
    return KV_OK;
}

static void net_unmap(struct kv_transport *transport, struct kv_mapping *mapping)
{
    (void)transport;
    if (mapping == &brought)
        return;
    kv_memory_release(mapping->base, mapping->bytes);
    free(mapping);
}

static void net_describe(struct kv_transport *transport, char *text, size_t text_bytes)
{
    (void)transport;
    snprintf(text, text_bytes, "sim");
}

/* Its name is what carriers of control messages look for in an address. */
static const struct kv_transport_ops net_row = {
    .name = "loopback",
    .open = net_open,
    .close = net_close,
    .map = net_map,
    .alloc = net_alloc,
    .unmap = net_unmap,
    .describe = net_describe,
    .port_open = net_port_open,
    .port_close = net_port_close,
    .port_address = net_port_address,
    .port_progress = net_port_progress,
    .port_arm = net_port_arm,
    .port_wake = net_port_wake,
    .connect = net_connect,
    .channel_close = net_channel_close,
    .channel_describe = net_channel_describe,
    .send = net_send,
    .receive = net_receive,
    .refuse = net_refuse,
};

/* ---- the net ----------------------------------------------------------------------------- */

struct sim_net *sim_net_create(const struct kv_clock *clock, uint64_t seed)
{
    static const size_t inline_bytes[] = {4 << 10, 16 << 10, 64 << 10};
    struct sim_net *net = failing_memory_sure(1, sizeof(*net));

    net->clock = clock;
    kv_random_init(&net->random, seed);
    net->inline_bytes = inline_bytes[kv_random_below(&net->random, 3)];
    return net;
}

void sim_net_destroy(struct sim_net *net)
{
    while (net->n_heap > 0) {
        struct event event = take_first(net);

        if (event.message != NULL)
            unref(event.message);
    }
    while (net->channels != NULL) {
        struct net_channel *next = net->channels->next;

        free(net->channels);
        net->channels = next;
    }
    while (net->ports != NULL) {
        struct net_port *next = net->ports->next;

        assert(net->ports->is_closed);
        free(net->ports);
        net->ports = next;
    }
    while (net->transports != NULL) {
        struct net_transport *next = net->transports->next;

        free(net->transports);
        net->transports = next;
    }
    free(net->heap);
    free(net);
}

struct sim_net_faults *sim_net_faults(struct sim_net *net)
{
    return &net->faults;
}

struct kv_transport *sim_net_transport(struct sim_net *net, unsigned place)
{
    struct net_transport *transport = failing_memory_sure(1, sizeof(*transport));

    assert(place < SIM_PLACES_MAX);
    transport->base.ops = &net_row;
    transport->net = net;
    transport->place = place;
    transport->next = net->transports;
    net->transports = transport;
    return &transport->base;
}

void sim_transport_kill(struct kv_transport *base)
{
    struct net_transport *transport = (struct net_transport *)base;

    transport->is_dead = true;
    for (struct net_port *port = transport->net->ports; port != NULL; port = port->next)
        if (port->transport == transport && !port->is_closed)
            tell_peers(port);
}

void sim_net_cut(struct sim_net *net, unsigned from, unsigned to, uint64_t until_us, bool loses)
{
    net->cuts[from][to].until_us = until_us;
    net->cuts[from][to].loses = loses;
}

void sim_net_heal(struct sim_net *net)
{
    memset(net->cuts, 0, sizeof(net->cuts));
    for (struct net_port *port = net->ports; port != NULL; port = port->next)
        for (struct message *message = port->sending; message != NULL;
             message = message->next_sending)
            if (message->is_lost)
                on_lost(message);
}

uint64_t sim_net_hash(const struct sim_net *net)
{
    return net->hash;
}
