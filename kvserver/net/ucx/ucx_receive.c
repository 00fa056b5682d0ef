/* ucx_receive.c - delivers messages to the port's owner, and receives large data.
 *
 * Small data is handed over inside UCX's callback.  Large data is an incoming, which the owner
 * holds until it receives or refuses it.  Over shared memory it is read from the sender's
 * memory (offer.h); UCX moves it where the system forbids that or the sender could make it wait,
 * and over tcp.
 */
#include "kvserver/net/ucx/ucx_private.h"

#include <assert.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static struct kv_ucx_incoming *incoming_get(struct kv_ucx_port *port)
{
    struct kv_ucx_incoming *incoming = port->spare_incomings;

    if (incoming != NULL)
        port->spare_incomings = incoming->next;
    else
        incoming = malloc(sizeof(*incoming));
    if (incoming == NULL)
        return NULL;
    memset(incoming, 0, offsetof(struct kv_ucx_incoming, pieces));
    incoming->base.ops = port->base.ops;
    incoming->next = port->incomings;
    if (port->incomings != NULL)
        port->incomings->previous = incoming;
    port->incomings = incoming;
    return incoming;
}

static void incoming_unlink(struct kv_ucx_incoming *incoming)
{
    struct kv_ucx_port *port = incoming->link->port;

    if (incoming->previous != NULL)
        incoming->previous->next = incoming->next;
    else
        port->incomings = incoming->next;
    if (incoming->next != NULL)
        incoming->next->previous = incoming->previous;
}

void kv_ucx_incoming_spare(struct kv_ucx_port *port, struct kv_ucx_incoming *incoming)
{
    incoming->next = port->spare_incomings;
    port->spare_incomings = incoming;
}

static void incoming_put(struct kv_ucx_incoming *incoming)
{
    struct kv_ucx_port *port = incoming->link->port;

    incoming_unlink(incoming);
    kv_ucx_incoming_spare(port, incoming);
}

/* Ends an incoming without receiving its data; UCX then completes the sender's request. */
void kv_ucx_incoming_release(struct kv_ucx_incoming *incoming)
{
    /* Inside the handler UCX still owns the descriptor and does this itself. */
    if (incoming->answer != NULL)
        *incoming->answer = UCS_OK;
    else
        ucp_am_data_release(incoming->link->worker, incoming->descriptor);
    incoming_put(incoming);
}

static void on_received(void *request, ucs_status_t ucs, size_t bytes, void *user_data)
{
    struct kv_ucx_incoming *incoming = user_data;
    kv_transport_done_fn done = incoming->done;
    void *arg = incoming->arg;

    (void)bytes;
    ucp_request_free(request);
    if (incoming->is_dead)
        return;
    if (incoming->in_call) {
        incoming->over = true;
        incoming->status = kv_ucx_status_of(ucs);
        return;
    }
    incoming_put(incoming);
    done(arg, kv_ucx_status_of(ucs));
}

/* Reads an offer of a process that the port has a channel to: whoever sends one names the
 * process, and may name no other.  Files stay open no longer than there are channels. */
static enum kv_offer_outcome read_peer(const struct kv_ucx_incoming *incoming,
                                       const struct kv_offer_tail *tail,
                                       size_t bytes,
                                       const struct kv_iov *iov,
                                       unsigned n)
{
    const struct kv_ucx_port *port = incoming->link->port;
    const struct kv_ucx_transport *transport = port->transport;
    struct kv_ucx_channel *channel = kv_ucx_find_peer(port, tail->process);
    enum kv_offer_outcome outcome = channel == NULL ? KV_OFFER_ABSENT : KV_OFFER_REFUSED;

    if (channel != NULL && tail->file != 0 && transport->peer_files != NULL) {
        outcome = kv_peer_files_read(transport->peer_files, tail, bytes, iov, n);
        channel->has_file |= outcome == KV_OFFER_WHOLE;
    } else if (channel != NULL && transport->trusts_peers) {
        outcome = kv_offer_read(tail, bytes, iov, n);
    }
    if (outcome != KV_OFFER_ABSENT)
        return outcome;
    /* UCX does not need to find a file, but does not notice that a process is gone, either; nor
     * need it move what a peer sent before its channel was closed. */
    if (channel != NULL ? channel->has_file : incoming->is_of_peer)
        return KV_OFFER_GONE;
    return kv_ucx_has_ended(channel, tail->process) ? KV_OFFER_GONE : KV_OFFER_REFUSED;
}

/* Reads from the sender's memory what is next of the data; n_read says how far that is. */
static enum kv_offer_outcome read_offer(struct kv_ucx_incoming *incoming)
{
    struct kv_ucx_port *port = incoming->link->port;
    struct kv_offer_tail tail = incoming->tail;
    enum kv_offer_outcome outcome;
    size_t skip = incoming->n_read, bytes = 0;
    struct kv_iov iov[KV_IOV_MAX];
    unsigned n = 0;

    for (unsigned i = 0; i < incoming->n_pieces && bytes < KV_UCX_READ_BYTES; i++) {
        const ucp_dt_iov_t *piece = &incoming->pieces[i];
        const size_t room = KV_UCX_READ_BYTES - bytes;

        if (skip >= piece->length) {
            skip -= piece->length;
            continue;
        }
        iov[n].base = (uint8_t *)piece->buffer + skip;
        iov[n].bytes = piece->length - skip < room ? piece->length - skip : room;
        bytes += iov[n++].bytes;
        skip = 0;
    }
    tail.data += incoming->n_read;
    port->bytes_read += bytes;
    outcome = read_peer(incoming, &tail, bytes, iov, n);
    if (outcome == KV_OFFER_WHOLE)
        incoming->n_read += bytes;
    return outcome;
}

static void make_due(struct kv_ucx_incoming *incoming)
{
    struct kv_ucx_port *port = incoming->link->port;

    incoming->is_due = true;
    incoming->due_next = NULL;
    *port->due_end = incoming;
    port->due_end = &incoming->due_next;
}

/* Returns as kv_incoming_receive() does; the incoming has ended unless it is KV_IN_PROGRESS. */
static kv_status_t receive_now(struct kv_ucx_incoming *incoming)
{
    const bool is_one = incoming->n_pieces == 1;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_DATATYPE,
        .cb.recv_am = on_received,
        .user_data = incoming,
        .datatype = is_one ? ucp_dt_make_contig(1) : UCP_DATATYPE_IOV,
    };
    ucs_status_ptr_t request;
    kv_status_t status;

    if (incoming->link->kind == KV_UCX_LINK_SHARED) {
        const enum kv_offer_outcome outcome = read_offer(incoming);

        if (outcome == KV_OFFER_WHOLE && incoming->n_read < incoming->data_bytes) {
            make_due(incoming);
            return KV_IN_PROGRESS;
        }
        if (outcome != KV_OFFER_REFUSED) {
            kv_ucx_incoming_release(incoming);
            return outcome == KV_OFFER_WHOLE ? KV_OK : KV_UNREACHABLE;
        }
    }

    incoming->receiving = true;
    incoming->in_call = true;
    request =
        ucp_am_recv_data_nbx(incoming->link->worker, incoming->descriptor,
                             is_one ? incoming->pieces[0].buffer : (void *)incoming->pieces,
                             is_one ? incoming->pieces[0].length : incoming->n_pieces, &param);
    incoming->in_call = false;
    if (UCS_PTR_IS_PTR(request) && !incoming->over)
        return KV_IN_PROGRESS;
    status = incoming->over ? incoming->status : kv_ucx_status_of(UCS_PTR_STATUS(request));
    incoming_put(incoming);
    return status;
}

kv_status_t kv_ucx_receive(struct kv_incoming *base,
                           const struct kv_iov *iov,
                           unsigned n_iov,
                           kv_transport_done_fn done,
                           void *arg)
{
    struct kv_ucx_incoming *incoming = (struct kv_ucx_incoming *)base;
    struct kv_ucx_port *port = incoming->link->port;
    size_t bytes = 0;

    assert(n_iov >= 1 && n_iov <= KV_IOV_MAX && !incoming->receiving && !incoming->is_due);
    for (unsigned i = 0; i < n_iov; i++) {
        incoming->pieces[i].buffer = iov[i].base;
        incoming->pieces[i].length = iov[i].bytes;
        bytes += iov[i].bytes;
    }
    assert(bytes == incoming->data_bytes);
    incoming->n_pieces = n_iov;
    incoming->done = done;
    incoming->arg = arg;
    if (incoming->link->kind != KV_UCX_LINK_SHARED || bytes <= KV_TRANSPORT_PROMPT_BYTES ||
        port->bytes_read < KV_UCX_READ_BYTES)
        return receive_now(incoming);
    make_due(incoming);
    return KV_IN_PROGRESS;
}

static struct kv_ucx_incoming *take_due(struct kv_ucx_port *port)
{
    struct kv_ucx_incoming *incoming = port->due;

    port->due = incoming->due_next;
    if (port->due == NULL)
        port->due_end = &port->due;
    incoming->is_due = false;
    return incoming;
}

unsigned kv_ucx_read_due(struct kv_ucx_port *port)
{
    unsigned n = 0;

    port->bytes_read = 0;
    while (port->due != NULL && port->bytes_read < KV_UCX_READ_BYTES) {
        struct kv_ucx_incoming *incoming = take_due(port);
        const kv_transport_done_fn done = incoming->done;
        void *arg = incoming->arg;
        const kv_status_t status = receive_now(incoming);

        if (status != KV_IN_PROGRESS)
            done(arg, status);
        n++;
    }
    return n;
}

void kv_ucx_give_up_due(struct kv_ucx_port *port)
{
    while (port->due != NULL) {
        struct kv_ucx_incoming *incoming = take_due(port);
        const kv_transport_done_fn done = incoming->done;
        void *arg = incoming->arg;

        kv_ucx_incoming_release(incoming);
        done(arg, KV_UNREACHABLE);
    }
}

void kv_ucx_mark_left(struct kv_ucx_port *port, uint32_t process)
{
    for (struct kv_ucx_incoming *incoming = port->incomings; incoming != NULL;
         incoming = incoming->next)
        if (incoming->link->kind == KV_UCX_LINK_SHARED && incoming->tail.process == process)
            incoming->is_left = incoming->receiving;
}

void kv_ucx_refuse(struct kv_incoming *base)
{
    kv_ucx_incoming_release((struct kv_ucx_incoming *)base);
}

/* UCX's callback.  The header, and the data of a small message, are in UCX's memory, at any
 * alignment, and valid during the call. */
ucs_status_t kv_ucx_on_message(void *arg,
                               const void *header,
                               size_t header_bytes,
                               void *data,
                               size_t data_bytes,
                               const ucp_am_recv_param_t *param)
{
    struct kv_ucx_link *link = arg;
    struct kv_ucx_port *port = link->port;
    struct kv_ucx_incoming *incoming;
    ucs_status_t answer = UCS_INPROGRESS;

    if (port->closing)
        return UCS_OK;
    port->is_quiet = false;
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0) {
        if (header_bytes <= KV_TRANSPORT_HEADER_MAX)
            port->events.message(port->owner, header, header_bytes, data, data_bytes);
        return UCS_OK;
    }

    if (link->kind == KV_UCX_LINK_SHARED) {
        if (header_bytes < sizeof(struct kv_offer_tail))
            return UCS_OK;
        header_bytes -= sizeof(struct kv_offer_tail);
    }
    if (header_bytes > KV_TRANSPORT_HEADER_MAX)
        return UCS_OK;
    incoming = incoming_get(port);
    if (incoming == NULL)
        return UCS_OK; /* out of memory: the send completes, and its owner's deadline expires */
    incoming->link = link;
    incoming->descriptor = data;
    incoming->data_bytes = data_bytes;
    if (link->kind == KV_UCX_LINK_SHARED) {
        memcpy(&incoming->tail, (const char *)header + header_bytes,
               sizeof(struct kv_offer_tail));
        incoming->is_of_peer = kv_ucx_find_peer(port, incoming->tail.process) != NULL;
    }
    incoming->answer = &answer;
    port->events.incoming(port->owner, header, header_bytes, data_bytes, &incoming->base);
    /* The owner may have ended the incoming, and its memory may have been reused.  None came
     * after it, so if it is still there, it is the first. */
    if (port->incomings != NULL && port->incomings->answer == &answer)
        port->incomings->answer = NULL;
    return answer;
}

/* Returns a list of those that must outlive the worker. */
struct kv_ucx_incoming *kv_ucx_give_up_incomings(const struct kv_ucx_link *link)
{
    struct kv_ucx_port *port = link->port;
    struct kv_ucx_incoming *incoming = port->incomings, *dead = NULL;

    while (incoming != NULL) {
        if (incoming->link != link) {
            incoming = incoming->next;
            continue;
        }
        assert(incoming->receiving);
        incoming_unlink(incoming);
        incoming->is_dead = true;
        incoming->next = dead;
        dead = incoming;
        incoming->done(incoming->arg, KV_UNREACHABLE);
        incoming = port->incomings;
    }
    return dead;
}
