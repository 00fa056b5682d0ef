/* ucx_send.c - sends messages and pairs, and keeps the list of what is in flight.
 *
 * A send that UCX does not complete at once is a pending send.  Each ends once: when UCX
 * completes it, when the offer of a closed channel is abandoned, or when its link is closed.
 */
#include "kvserver/net/ucx/ucx_private.h"

#include <assert.h>
#include <stddef.h>

static void pending_send_link(struct kv_ucx_pending_send *pending_send)
{
    struct kv_ucx_port *port = pending_send->port;

    pending_send->previous = NULL;
    pending_send->next = port->pending_sends;
    if (port->pending_sends != NULL)
        port->pending_sends->previous = pending_send;
    port->pending_sends = pending_send;
}

static void pending_send_unlink(struct kv_ucx_pending_send *pending_send)
{
    if (pending_send->previous != NULL)
        pending_send->previous->next = pending_send->next;
    else
        pending_send->port->pending_sends = pending_send->next;
    if (pending_send->next != NULL)
        pending_send->next->previous = pending_send->previous;
}

static void on_sent(void *request, ucs_status_t ucs, void *user_data)
{
    struct kv_ucx_pending_send *pending_send = request;
    struct kv_ucx_port *port = pending_send->port;
    kv_transport_done_fn done = pending_send->done;
    void *arg = pending_send->arg;

    (void)user_data;
    if (port == NULL) {
        ucp_request_free(request);
        return;
    }
    pending_send_unlink(pending_send);
    if (pending_send->offer != NULL)
        kv_offer_put(&port->offers, pending_send->offer);
    ucp_request_free(request);
    if (done != NULL)
        done(arg, kv_ucx_status_of(ucs));
}

/* Over shared memory UCX waits for room in the peer's queue before it completes the sends of a
 * closed endpoint; if the peer was killed, it waits forever.  UCX no longer reads their data,
 * and a peer that still reads it finds that the offer has ended. */
void kv_ucx_abandon_offers(struct kv_ucx_port *port)
{
    struct kv_ucx_pending_send *pending_send = port->pending_sends;

    while (pending_send != NULL) {
        kv_transport_done_fn done = pending_send->done;

        if (pending_send->channel != NULL || pending_send->offer == NULL || done == NULL) {
            pending_send = pending_send->next;
            continue;
        }
        kv_offer_end(pending_send->offer);
        pending_send->done = NULL;
        done(pending_send->arg, KV_UNREACHABLE);
        pending_send = port->pending_sends; /* `done` may have sent something */
    }
}

/* Returns the status of a send that was passed to UCX. */
static kv_status_t sent(struct kv_ucx_channel *channel,
                        ucs_status_ptr_t request,
                        struct kv_offer *offer,
                        kv_transport_done_fn done,
                        void *arg)
{
    struct kv_ucx_pending_send *pending_send = request;

    if (!UCS_PTR_IS_PTR(request)) {
        if (offer != NULL)
            kv_offer_put(&channel->port->offers, offer);
        return kv_ucx_status_of(UCS_PTR_STATUS(request));
    }
    pending_send->port = channel->port;
    pending_send->link = channel->link;
    pending_send->channel = channel;
    pending_send->done = done;
    pending_send->arg = arg;
    pending_send->offer = offer;
    pending_send_link(pending_send);
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
    struct kv_ucx_channel *channel = (struct kv_ucx_channel *)base;
    struct kv_ucx_port *port = channel->port;
    bool is_shared = channel->link->kind == KV_UCX_LINK_SHARED;
    size_t eager_max = is_shared ? KV_UCX_SHARED_EAGER_MAX : KV_UCX_NETWORK_EAGER_MAX;
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
        offer = kv_offer_take(&port->offers, data, data_bytes);
        if (offer == NULL)
            return KV_NO_MEMORY;
        header_bytes =
            kv_offer_write(&port->offers, offer, header, header_bytes, port->process);
        header = offer->message;
        data = offer->data;
    }

    return sent(channel,
                ucp_am_send_nbx(channel->endpoint, KV_UCX_AM_ID, header, header_bytes, data,
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
    struct kv_ucx_channel *channel = (struct kv_ucx_channel *)base;
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
    return sent(channel,
                ucp_am_send_nbx(channel->endpoint, KV_UCX_AM_ID, header, header_bytes, pieces,
                                2, &param),
                NULL, done, arg);
}

/* If a peer's queue has no room, UCX keeps its requests until the worker is destroyed, and
 * completes them then.  `done` is called here, before that, and the later completion is
 * ignored. */
void kv_ucx_give_up_pending_sends(const struct kv_ucx_link *link)
{
    struct kv_ucx_port *port = link->port;
    struct kv_ucx_pending_send *pending_send = port->pending_sends;

    while (pending_send != NULL) {
        kv_transport_done_fn done = pending_send->done;
        void *arg = pending_send->arg;

        if (pending_send->link != link) {
            pending_send = pending_send->next;
            continue;
        }
        pending_send_unlink(pending_send);
        if (pending_send->offer != NULL)
            kv_offer_put(&port->offers, pending_send->offer);
        pending_send->port = NULL;
        if (done != NULL)
            done(arg, KV_UNREACHABLE);
        pending_send = port->pending_sends; /* `done` may have sent something */
    }
}
