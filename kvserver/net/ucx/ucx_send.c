/* ucx_send.c - sends messages and pairs, and keeps the list of what is in flight.
 *
 * A send that UCX does not complete at once is a flight.  Each flight ends once: when UCX
 * completes it, when the offer of a closed channel is abandoned, or when its wire is closed.
 */
#include "kvserver/net/ucx/ucx_private.h"

#include <assert.h>
#include <stddef.h>

static void flight_link(struct flight *flight)
{
    struct ucx_port *port = flight->port;

    flight->previous = NULL;
    flight->next = port->flights;
    if (port->flights != NULL)
        port->flights->previous = flight;
    port->flights = flight;
}

static void flight_unlink(struct flight *flight)
{
    if (flight->previous != NULL)
        flight->previous->next = flight->next;
    else
        flight->port->flights = flight->next;
    if (flight->next != NULL)
        flight->next->previous = flight->previous;
}

static void on_sent(void *request, ucs_status_t ucs, void *user_data)
{
    struct flight *flight = request;
    struct ucx_port *port = flight->port;
    kv_transport_done_fn done = flight->done;
    void *arg = flight->arg;

    (void)user_data;
    if (port == NULL) {
        ucp_request_free(request);
        return;
    }
    flight_unlink(flight);
    if (flight->offer != NULL)
        kv_offer_put(&port->offers, flight->offer);
    ucp_request_free(request);
    if (done != NULL)
        done(arg, status_of(ucs));
}

/* Over shared memory UCX waits for room in the peer's queue before it gives up the offers of a
 * closed endpoint: for ever, if the peer was killed.  It does not look at their data any more,
 * and a peer that still does finds that the offer is over. */
void kv_ucx_abandon_offers(struct ucx_port *port)
{
    struct flight *flight = port->flights;

    while (flight != NULL) {
        kv_transport_done_fn done = flight->done;

        if (flight->channel != NULL || flight->offer == NULL || done == NULL) {
            flight = flight->next;
            continue;
        }
        kv_offer_end(flight->offer);
        flight->done = NULL;
        done(flight->arg, KV_UNREACHABLE);
        flight = port->flights; /* `done` may have sent something */
    }
}

/* What has become of a send that UCX was given. */
static kv_status_t sent(struct ucx_channel *channel,
                        ucs_status_ptr_t request,
                        struct kv_offer *offer,
                        kv_transport_done_fn done,
                        void *arg)
{
    struct flight *flight = request;

    if (!UCS_PTR_IS_PTR(request)) {
        if (offer != NULL)
            kv_offer_put(&channel->port->offers, offer);
        return status_of(UCS_PTR_STATUS(request));
    }
    flight->port = channel->port;
    flight->wire = channel->wire;
    flight->channel = channel;
    flight->done = done;
    flight->arg = arg;
    flight->offer = offer;
    flight_link(flight);
    return KV_IN_PROGRESS;
}

kv_status_t kv_ucx_send(struct kv_channel *base,
                        const void *header,
                        size_t header_bytes,
                        const void *data,
                        size_t data_bytes,
                        kv_transport_done_fn done,
                        void *arg)
{
    struct ucx_channel *channel = (struct ucx_channel *)base;
    struct ucx_port *port = channel->port;
    bool is_shared = channel->wire->kind == WIRE_SHARED;
    size_t eager_max = is_shared ? SHARED_EAGER_MAX : NETWORK_EAGER_MAX;
    bool is_offer = data_bytes > eager_max;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_FLAGS,
        .cb.send = on_sent,
        .flags = is_offer ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER,
    };
    struct kv_offer *offer = NULL;

    if (header_bytes > KV_TRANSPORT_HEADER_MAX)
        return KV_INVALID;
    if (channel->failed)
        return KV_UNREACHABLE;
    if (is_offer && is_shared) {
        offer = kv_offer_take(&port->offers);
        if (offer == NULL)
            return KV_NO_MEMORY;
        header_bytes = kv_offer_write(offer, header, header_bytes, data, port->process);
        header = offer->message;
    }

    return sent(channel,
                ucp_am_send_nbx(channel->endpoint, AM_ID, header, header_bytes, data,
                                data_bytes, &param),
                offer, done, arg);
}

static_assert(sizeof(struct kv_iov) == sizeof(ucp_dt_iov_t) &&
                  offsetof(struct kv_iov, base) == offsetof(ucp_dt_iov_t, buffer) &&
                  offsetof(struct kv_iov, bytes) == offsetof(ucp_dt_iov_t, length),
              "pieces can be handed to UCX as they are");

kv_status_t kv_ucx_send_pair(struct kv_channel *base,
                             const void *header,
                             size_t header_bytes,
                             const struct kv_iov pieces[2],
                             kv_transport_done_fn done,
                             void *arg)
{
    struct ucx_channel *channel = (struct ucx_channel *)base;
    ucp_request_param_t param = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_DATATYPE,
        .cb.send = on_sent,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .datatype = ucp_dt_make_iov(),
    };

    if (header_bytes > KV_TRANSPORT_HEADER_MAX || pieces[0].bytes > base->pair_max ||
        pieces[1].bytes > base->pair_max - pieces[0].bytes)
        return KV_INVALID;
    if (channel->failed)
        return KV_UNREACHABLE;
    return sent(
        channel,
        ucp_am_send_nbx(channel->endpoint, AM_ID, header, header_bytes, pieces, 2, &param),
        NULL, done, arg);
}

/* Where a peer's queue has no room UCX never lets go of what is in flight, but completes it
 * once more while the worker is destroyed: the owner is told first, and that is not passed on.
 */
void kv_ucx_give_up_flights(const struct wire *wire)
{
    struct ucx_port *port = wire->port;
    struct flight *flight = port->flights;

    while (flight != NULL) {
        kv_transport_done_fn done = flight->done;
        void *arg = flight->arg;

        if (flight->wire != wire) {
            flight = flight->next;
            continue;
        }
        flight_unlink(flight);
        if (flight->offer != NULL)
            kv_offer_put(&port->offers, flight->offer);
        flight->port = NULL;
        if (done != NULL)
            done(arg, KV_UNREACHABLE);
        flight = port->flights; /* `done` may have sent something */
    }
}
