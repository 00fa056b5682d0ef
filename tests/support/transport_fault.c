#include "tests/support/transport_fault.h"

#include "kvserver/net/message.h"
#include "proto/kv_wire.h"

#include <stdlib.h>
#include <string.h>

enum {
    RULES_MAX = 8,
};

struct fault_transport {
    struct kv_transport base;
    struct kv_transport *inner;
    struct fault_rule rules[RULES_MAX];
    unsigned n_seen[RULES_MAX];
    unsigned n_rules;
    unsigned n_held, n_hits;
    unsigned n_release; /* of those held, let go in the next progress of their ports */
};

/* A message on its way, or a landing. */
struct parcel {
    struct parcel *next;
    struct fault_incoming *incoming; /* NULL: a small one, or one going out */
    size_t header_bytes, data_bytes;
    uint8_t header[KV_TRANSPORT_HEADER_MAX];
    const void *data; /* the sender's, or `copy` */
    uint8_t *copy;

    /* A landing, or a send that is held. */
    struct fault_channel *channel; /* out; NULL: in */
    kv_transport_done_fn done;     /* NULL: not a landing */
    void *arg;
    struct kv_iov iov[KV_IOV_MAX];
    unsigned n_iov;
};

struct fault_port {
    struct kv_port base;
    struct kv_port *inner;
    struct fault_transport *transport;
    struct kv_port_events events;
    void *owner;
    struct parcel *held, **held_end;
};

struct fault_channel {
    struct kv_channel base;
    struct kv_channel *inner;
    struct fault_port *port;
};

struct fault_incoming {
    struct kv_incoming base;
    struct kv_incoming *inner;
    struct fault_port *port;
    bool holds_landing, garbles;
    size_t bytes;
};

/* What outlives a call: a changed copy that is being sent, or data that is changed when it has
 * landed. */
struct errand {
    kv_transport_done_fn done;
    void *arg;
    uint8_t *landed; /* byte to change, or NULL */
    uint8_t header[KV_TRANSPORT_HEADER_MAX];
    uint8_t data[];
};

static const struct kv_transport_ops fault_row;

static struct fault_port *port_of(struct kv_port *port)
{
    return (struct fault_port *)port;
}

/* ---- rules ------------------------------------------------------------------------------- */

/* NULL: the message passes.
 *   data  of a message that has arrived or is sent whole, or NULL */
static const struct fault_rule *rule_for(struct fault_transport *transport,
                                         enum fault_way way,
                                         const void *message,
                                         size_t message_bytes,
                                         const void *data)
{
    struct kv_wire_header header, first = {.kind = KV_WIRE_REQUEST};
    unsigned kind;

    if (message_bytes != sizeof(header))
        return NULL;
    memcpy(&header, message, sizeof(header));
    /* What happens to a request or a reply happens to the batch whose first it is. */
    if (header.kind == KV_WIRE_BATCH && data != NULL && header.body_bytes >= sizeof(first))
        memcpy(&first, data, sizeof(first));
    kind = header.kind == KV_WIRE_BATCH ? first.kind : header.kind;
    for (unsigned i = 0; i < transport->n_rules; i++) {
        const struct fault_rule *rule = &transport->rules[i];

        if (rule->way != way || rule->kind != kind || (rule->op != 0 && rule->op != header.op))
            continue;
        unsigned seen = transport->n_seen[i]++;
        if (seen < rule->skip || (rule->count > 0 && seen >= rule->skip + rule->count))
            continue;
        transport->n_hits++;
        return rule;
    }
    return NULL;
}

/* Changes the last byte of the data: of the last row, where there are rows. */
static void garble(uint8_t *header, uint8_t *data, size_t data_bytes, bool forge)
{
    struct kv_wire_header copy;

    if (data_bytes > 0)
        data[data_bytes - 1] ^= 0x40;
    if (!forge)
        return;
    memcpy(&copy, header, sizeof(copy));
    kv_message_seal(&copy, data, copy.body_bytes);
    memcpy(header, &copy, sizeof(copy));
}

static void hold(struct fault_port *port, struct parcel *parcel)
{
    parcel->next = NULL;
    *port->held_end = parcel;
    port->held_end = &parcel->next;
    port->transport->n_held++;
}

static struct parcel *parcel_create(const void *header, size_t header_bytes)
{
    struct parcel *parcel = calloc(1, sizeof(*parcel));

    if (parcel == NULL)
        abort();
    memcpy(parcel->header, header, header_bytes);
    parcel->header_bytes = header_bytes;
    return parcel;
}

static struct errand *errand_create(kv_transport_done_fn done, void *arg, size_t bytes)
{
    struct errand *errand = calloc(1, sizeof(*errand) + bytes);

    if (errand == NULL)
        abort();
    errand->done = done;
    errand->arg = arg;
    return errand;
}

static void errand_done(void *arg, kv_status_t status)
{
    struct errand *errand = arg;

    if (errand->landed != NULL && status == KV_OK)
        *errand->landed ^= 0x40;
    if (errand->done != NULL)
        errand->done(errand->arg, status);
    free(errand);
}

/* ---- in ---------------------------------------------------------------------------------- */

static void on_message(
    void *owner, const void *header, size_t header_bytes, const void *data, size_t data_bytes)
{
    struct fault_port *port = owner;
    const struct fault_rule *rule =
        rule_for(port->transport, FAULT_IN, header, header_bytes, data);

    if (rule == NULL || rule->action == FAULT_HOLD_LANDING || rule->action == FAULT_TWICE) {
        port->events.message(port->owner, header, header_bytes, data, data_bytes);
        return;
    }
    if (rule->action == FAULT_DROP)
        return;
    struct parcel *parcel = parcel_create(header, header_bytes);
    parcel->copy = malloc(data_bytes + 1);
    if (parcel->copy == NULL)
        abort();
    memcpy(parcel->copy, data, data_bytes);
    parcel->data = parcel->copy;
    parcel->data_bytes = data_bytes;
    if (rule->action == FAULT_HOLD) {
        hold(port, parcel);
        return;
    }
    garble(parcel->header, parcel->copy, data_bytes, rule->action == FAULT_FORGE);
    port->events.message(port->owner, parcel->header, header_bytes, parcel->copy, data_bytes);
    free(parcel->copy);
    free(parcel);
}

static void on_incoming(void *owner,
                        const void *header,
                        size_t header_bytes,
                        size_t data_bytes,
                        struct kv_incoming *inner)
{
    struct fault_port *port = owner;
    const struct fault_rule *rule =
        rule_for(port->transport, FAULT_IN, header, header_bytes, NULL);
    struct fault_incoming *incoming;

    if (rule != NULL && rule->action == FAULT_DROP) {
        kv_incoming_refuse(inner);
        return;
    }
    incoming = calloc(1, sizeof(*incoming));
    if (incoming == NULL)
        abort();
    incoming->base.ops = &fault_row;
    incoming->inner = inner;
    incoming->port = port;
    incoming->bytes = data_bytes;
    if (rule != NULL) {
        incoming->holds_landing = rule->action == FAULT_HOLD_LANDING;
        incoming->garbles = rule->action == FAULT_GARBLE || rule->action == FAULT_FORGE;
    }
    if (rule != NULL && rule->action == FAULT_HOLD) {
        struct parcel *parcel = parcel_create(header, header_bytes);
        parcel->incoming = incoming;
        parcel->data_bytes = data_bytes;
        hold(port, parcel);
        return;
    }
    port->events.incoming(port->owner, header, header_bytes, data_bytes, &incoming->base);
}

static void on_failed(void *owner, void *channel_arg, kv_status_t status)
{
    struct fault_port *port = owner;

    port->events.failed(port->owner, channel_arg, status);
}

static kv_status_t receive(struct kv_incoming *base,
                           const struct kv_iov *iov,
                           unsigned n_iov,
                           kv_transport_done_fn done,
                           void *arg)
{
    struct fault_incoming *incoming = (struct fault_incoming *)base;
    struct kv_incoming *inner = incoming->inner;
    kv_status_t status;

    if (incoming->holds_landing) {
        struct parcel *parcel = parcel_create("", 0);
        parcel->incoming = incoming;
        parcel->done = done;
        parcel->arg = arg;
        parcel->n_iov = n_iov;
        memcpy(parcel->iov, iov, n_iov * sizeof(*iov));
        hold(incoming->port, parcel);
        return KV_IN_PROGRESS;
    }
    if (!incoming->garbles) {
        free(incoming);
        return kv_incoming_receive(inner, iov, n_iov, done, arg);
    }
    struct errand *errand = errand_create(done, arg, 0);
    errand->landed = (uint8_t *)iov[n_iov - 1].base + iov[n_iov - 1].bytes - 1;
    free(incoming);
    status = kv_incoming_receive(inner, iov, n_iov, errand_done, errand);
    if (status != KV_IN_PROGRESS) {
        errand->done = NULL;
        errand_done(errand, status);
    }
    return status;
}

static void refuse(struct kv_incoming *base)
{
    struct fault_incoming *incoming = (struct fault_incoming *)base;

    kv_incoming_refuse(incoming->inner);
    free(incoming);
}

/* ---- out --------------------------------------------------------------------------------- */

static kv_status_t send_changed(struct fault_channel *channel,
                                const void *header,
                                size_t header_bytes,
                                const void *data,
                                size_t data_bytes,
                                bool forge,
                                kv_transport_done_fn done,
                                void *arg)
{
    struct errand *errand = errand_create(done, arg, data_bytes);
    kv_status_t status;

    memcpy(errand->header, header, header_bytes);
    if (data_bytes > 0)
        memcpy(errand->data, data, data_bytes);
    garble(errand->header, errand->data, data_bytes, forge);
    status = kv_channel_send(channel->inner, errand->header, header_bytes, errand->data,
                             data_bytes, errand_done, errand);
    if (status != KV_IN_PROGRESS)
        free(errand);
    return status;
}

static void send_copy(struct fault_channel *channel,
                      const void *header,
                      size_t header_bytes,
                      const void *data,
                      size_t data_bytes)
{
    struct errand *errand = errand_create(NULL, NULL, data_bytes);

    memcpy(errand->header, header, header_bytes);
    if (data_bytes > 0)
        memcpy(errand->data, data, data_bytes);
    if (kv_channel_send(channel->inner, errand->header, header_bytes, errand->data, data_bytes,
                        errand_done, errand) != KV_IN_PROGRESS)
        free(errand);
}

static kv_status_t send(struct kv_channel *base,
                        const void *header,
                        size_t header_bytes,
                        const void *data,
                        size_t data_bytes,
                        kv_transport_done_fn done,
                        void *arg)
{
    struct fault_channel *channel = (struct fault_channel *)base;
    const struct fault_rule *rule =
        rule_for(channel->port->transport, FAULT_OUT, header, header_bytes, data);
    struct parcel *parcel;

    if (rule != NULL) {
        switch (rule->action) {
        case FAULT_DROP:
            return KV_OK;
        case FAULT_HOLD:
            parcel = parcel_create(header, header_bytes);
            parcel->channel = channel;
            parcel->data = data;
            parcel->data_bytes = data_bytes;
            parcel->done = done;
            parcel->arg = arg;
            hold(channel->port, parcel);
            return KV_IN_PROGRESS;
        case FAULT_GARBLE:
        case FAULT_FORGE:
            return send_changed(channel, header, header_bytes, data, data_bytes,
                                rule->action == FAULT_FORGE, done, arg);
        case FAULT_TWICE:
            send_copy(channel, header, header_bytes, data, data_bytes);
            break;
        case FAULT_HOLD_LANDING:
            break;
        }
    }
    return kv_channel_send(channel->inner, header, header_bytes, data, data_bytes, done, arg);
}

/* One piece after the other: the receiver cannot tell. */
static kv_status_t send_pair(struct kv_channel *base,
                             const void *header,
                             size_t header_bytes,
                             const struct kv_iov pieces[2],
                             kv_transport_done_fn done,
                             void *arg)
{
    size_t bytes = pieces[0].bytes + pieces[1].bytes;
    struct errand *errand = errand_create(done, arg, bytes);
    kv_status_t status;

    /* An empty piece may be nowhere. */
    if (pieces[0].bytes > 0)
        memcpy(errand->data, pieces[0].base, pieces[0].bytes);
    if (pieces[1].bytes > 0)
        memcpy(errand->data + pieces[0].bytes, pieces[1].base, pieces[1].bytes);
    status = send(base, header, header_bytes, errand->data, bytes, errand_done, errand);
    if (status != KV_IN_PROGRESS)
        free(errand);
    return status;
}

/* ---- ports ------------------------------------------------------------------------------- */

/* What was held goes on as if it came now. */
static void let_go(struct fault_port *port, struct parcel *parcel)
{
    struct fault_incoming *incoming = parcel->incoming;
    kv_status_t status;

    if (parcel->channel != NULL) {
        /* The header must outlive the parcel: the transport reads it until the send is done. */
        struct errand *errand = errand_create(parcel->done, parcel->arg, 0);

        memcpy(errand->header, parcel->header, parcel->header_bytes);
        status = kv_channel_send(parcel->channel->inner, errand->header, parcel->header_bytes,
                                 parcel->data, parcel->data_bytes, errand_done, errand);
        if (status != KV_IN_PROGRESS)
            errand_done(errand, status);
    } else if (parcel->done != NULL) {
        incoming->holds_landing = false;
        status =
            receive(&incoming->base, parcel->iov, parcel->n_iov, parcel->done, parcel->arg);
        if (status != KV_IN_PROGRESS)
            parcel->done(parcel->arg, status);
    } else if (incoming != NULL) {
        port->events.incoming(port->owner, parcel->header, parcel->header_bytes,
                              parcel->data_bytes, &incoming->base);
    } else {
        port->events.message(port->owner, parcel->header, parcel->header_bytes, parcel->data,
                             parcel->data_bytes);
    }
    free(parcel->copy);
    free(parcel);
}

static struct parcel *take_held(struct fault_port *port)
{
    struct parcel *parcel = port->held;

    if (parcel == NULL)
        return NULL;
    port->held = parcel->next;
    if (port->held == NULL)
        port->held_end = &port->held;
    port->transport->n_held--;
    return parcel;
}

static unsigned port_progress(struct kv_port *base)
{
    struct fault_port *port = port_of(base);
    unsigned n = kv_port_progress(port->inner);

    while (port->transport->n_release > 0 && port->held != NULL) {
        port->transport->n_release--;
        let_go(port, take_held(port));
        n++;
    }
    return n;
}

static kv_status_t port_open(struct kv_transport *base,
                             const struct kv_port_events *events,
                             void *owner,
                             struct kv_port **ret_port)
{
    static const struct kv_port_events inner_events = {on_message, on_incoming, on_failed};
    struct fault_transport *transport = (struct fault_transport *)base;
    struct fault_port *port = calloc(1, sizeof(*port));
    kv_status_t status;

    if (port == NULL)
        return KV_NO_MEMORY;
    port->base.ops = &fault_row;
    port->transport = transport;
    port->events = *events;
    port->owner = owner;
    port->held_end = &port->held;
    status =
        transport->inner->ops->port_open(transport->inner, &inner_events, port, &port->inner);
    if (status != KV_OK) {
        free(port);
        return status;
    }
    *ret_port = &port->base;
    return KV_OK;
}

static void port_close(struct kv_port *base)
{
    struct fault_port *port = port_of(base);
    struct parcel *parcel;

    while ((parcel = take_held(port)) != NULL) {
        if (parcel->incoming != NULL)
            refuse(&parcel->incoming->base);
        if (parcel->done != NULL)
            parcel->done(parcel->arg, KV_UNREACHABLE);
        free(parcel->copy);
        free(parcel);
    }
    port->inner->ops->port_close(port->inner);
    free(port);
}

static void port_address(struct kv_port *base, const void **ret_address, size_t *ret_bytes)
{
    struct kv_port *inner = port_of(base)->inner;

    inner->ops->port_address(inner, ret_address, ret_bytes);
}

static kv_status_t port_arm(struct kv_port *base, int *ret_fd)
{
    struct fault_port *port = port_of(base);

    if (port->transport->n_release > 0 && port->held != NULL)
        return KV_BUSY;
    return port->inner->ops->port_arm(port->inner, ret_fd);
}

static void port_wake(struct kv_port *base)
{
    struct kv_port *inner = port_of(base)->inner;

    inner->ops->port_wake(inner);
}

static kv_status_t connect(struct kv_port *base,
                           const void *address,
                           size_t address_bytes,
                           enum kv_channel_mode mode,
                           void *channel_arg,
                           struct kv_channel **ret_channel)
{
    struct fault_port *port = port_of(base);
    struct fault_channel *channel = calloc(1, sizeof(*channel));
    kv_status_t status;

    if (channel == NULL)
        return KV_NO_MEMORY;
    channel->base.ops = &fault_row;
    channel->port = port;
    status = port->inner->ops->connect(port->inner, address, address_bytes, mode, channel_arg,
                                       &channel->inner);
    if (status != KV_OK) {
        free(channel);
        return status;
    }
    channel->base.pair_max = channel->inner->pair_max;
    *ret_channel = &channel->base;
    return KV_OK;
}

static void channel_close(struct kv_channel *base)
{
    struct fault_channel *channel = (struct fault_channel *)base;
    struct fault_port *port = channel->port;

    for (struct parcel **link = &port->held; *link != NULL;) {
        struct parcel *parcel = *link;

        if (parcel->channel != channel) {
            link = &parcel->next;
            continue;
        }
        *link = parcel->next;
        if (*link == NULL)
            port->held_end = link;
        port->transport->n_held--;
        parcel->done(parcel->arg, KV_UNREACHABLE);
        free(parcel);
    }
    channel->inner->ops->channel_close(channel->inner);
    free(channel);
}

static void channel_describe(struct kv_channel *base, char *text, size_t text_bytes)
{
    struct kv_channel *inner = ((struct fault_channel *)base)->inner;

    inner->ops->channel_describe(inner, text, text_bytes);
}

/* ---- the transport ----------------------------------------------------------------------- */

static void close_transport(struct kv_transport *base)
{
    struct fault_transport *transport = (struct fault_transport *)base;

    transport->inner->ops->close(transport->inner);
    free(transport);
}

static kv_status_t map(struct kv_transport *base,
                       void *memory,
                       size_t bytes,
                       enum kv_memory_type type,
                       struct kv_mapping **ret_mapping)
{
    struct kv_transport *inner = ((struct fault_transport *)base)->inner;

    return inner->ops->map(inner, memory, bytes, type, ret_mapping);
}

static kv_status_t alloc(struct kv_transport *base,
                         size_t bytes,
                         void **ret_memory,
                         struct kv_mapping **ret_mapping)
{
    struct kv_transport *inner = ((struct fault_transport *)base)->inner;

    return inner->ops->alloc(inner, bytes, ret_memory, ret_mapping);
}

static void unmap(struct kv_transport *base, struct kv_mapping *mapping)
{
    struct kv_transport *inner = ((struct fault_transport *)base)->inner;

    inner->ops->unmap(inner, mapping);
}

static void describe(struct kv_transport *base, char *text, size_t text_bytes)
{
    struct kv_transport *inner = ((struct fault_transport *)base)->inner;

    inner->ops->describe(inner, text, text_bytes);
}

static const struct kv_transport_ops fault_row = {
    .name = "fault",
    .close = close_transport,
    .map = map,
    .alloc = alloc,
    .unmap = unmap,
    .describe = describe,
    .port_open = port_open,
    .port_close = port_close,
    .port_address = port_address,
    .port_progress = port_progress,
    .port_arm = port_arm,
    .port_wake = port_wake,
    .connect = connect,
    .channel_close = channel_close,
    .channel_describe = channel_describe,
    .send = send,
    .send_pair = send_pair,
    .receive = receive,
    .refuse = refuse,
};

kv_status_t fault_open(const struct kv_transport_ops *row,
                       const char *transports,
                       struct kv_transport **ret_transport)
{
    struct kv_transport_config config = {.transports = transports};
    struct fault_transport *transport = calloc(1, sizeof(*transport));
    char detail[256];
    kv_status_t status;

    if (transport == NULL)
        return KV_NO_MEMORY;
    transport->base.ops = &fault_row;
    status = row->open(&config, &transport->inner, detail, sizeof(detail));
    if (status != KV_OK) {
        free(transport);
        return status;
    }
    *ret_transport = &transport->base;
    return KV_OK;
}

void fault_add(struct kv_transport *base, const struct fault_rule *rule)
{
    struct fault_transport *transport = (struct fault_transport *)base;

    if (transport->n_rules == RULES_MAX)
        abort();
    transport->n_seen[transport->n_rules] = 0;
    transport->rules[transport->n_rules++] = *rule;
}

void fault_clear(struct kv_transport *base)
{
    ((struct fault_transport *)base)->n_rules = 0;
}

void fault_release(struct kv_transport *base)
{
    struct fault_transport *transport = (struct fault_transport *)base;

    transport->n_release = transport->n_held;
}

unsigned fault_held(const struct kv_transport *base)
{
    return ((const struct fault_transport *)base)->n_held;
}

unsigned fault_hits(const struct kv_transport *base)
{
    return ((const struct fault_transport *)base)->n_hits;
}
