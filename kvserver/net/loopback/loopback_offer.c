/* loopback_offer.c - large data that the receiver copies from the sender's memory.
 *
 * loopback.c shows the states of an offer and says who frees it.
 */
#include "kvserver/net/loopback/loopback_private.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    SPARE_OFFERS_MAX = 256, /* offers kept for reuse, per port */
};

struct kv_loopback_offer *kv_loopback_offer_get(struct kv_loopback_port *port)
{
    struct kv_loopback_offer *offer = port->spare;

    if (offer != NULL) {
        port->spare = offer->next;
        port->n_spare--;
    } else {
        offer = malloc(sizeof(*offer));
        if (offer == NULL)
            return NULL;
    }
    memset(offer, 0, sizeof(*offer));
    atomic_init(&offer->state, KV_LOOPBACK_OFFERED);
    return offer;
}

void kv_loopback_offer_put(struct kv_loopback_port *port, struct kv_loopback_offer *offer)
{
    if (port->n_spare >= SPARE_OFFERS_MAX) {
        free(offer);
        return;
    }
    offer->next = port->spare;
    port->spare = offer;
    port->n_spare++;
}

void kv_loopback_offer_link(struct kv_loopback_port *port, struct kv_loopback_offer *offer)
{
    offer->previous = NULL;
    offer->next = port->offers;
    if (port->offers != NULL)
        port->offers->previous = offer;
    port->offers = offer;
}

void kv_loopback_offer_unlink(struct kv_loopback_port *port, struct kv_loopback_offer *offer)
{
    if (offer->previous != NULL)
        offer->previous->next = offer->next;
    else
        port->offers = offer->next;
    if (offer->next != NULL)
        offer->next->previous = offer->previous;
}

/* Changes the state from OFFERED to `state`.  Returns false if the other side was first.
 * Sequentially consistent: the winner's reads and writes of the data come after the swap. */
static bool offer_leave(struct kv_loopback_offer *offer, enum kv_loopback_offer_state state)
{
    int expected = KV_LOOPBACK_OFFERED;

    return atomic_compare_exchange_strong(&offer->state, &expected, state);
}

/* Receiver's side: ends an offer that this side moved out of OFFERED, and gives it back to the
 * sender with `status`. */
static void offer_finish(struct kv_loopback_offer *offer, kv_status_t status)
{
    struct kv_loopback_receive_queue *sender = offer->sender;
    bool raise;

    offer->status = status;
    offer->next_finished = NULL;
    kv_lock_take(sender->lock);
    atomic_store(&offer->state, KV_LOOPBACK_FINISHED);
    if (sender->last_finished != NULL)
        sender->last_finished->next_finished = offer;
    else
        sender->first_finished = offer;
    sender->last_finished = offer;
    atomic_fetch_add_explicit(&sender->n_waiting, 1, memory_order_relaxed);
    raise = kv_loopback_must_raise(sender);
    kv_lock_release(sender->lock);
    /* The offer is the sender's now; its reference to the receive queue is still ours. */
    if (raise)
        kv_signal_raise(sender->signal);
    kv_loopback_receive_queue_unref(sender);
}

/* Receiver's side: frees an offer that the sender has withdrawn. */
void kv_loopback_offer_retire(struct kv_loopback_offer *offer)
{
    assert(atomic_load(&offer->state) == KV_LOOPBACK_WITHDRAWN);
    kv_loopback_receive_queue_unref(offer->sender);
    free(offer);
}

/* Receiver's side: the offer is OFFERED or WITHDRAWN. */
void kv_loopback_offer_decline(struct kv_loopback_offer *offer, kv_status_t status)
{
    if (offer_leave(offer, KV_LOOPBACK_COPYING))
        offer_finish(offer, status);
    else
        kv_loopback_offer_retire(offer);
}

/* Sender's side.  Returns false if the receiver has finished or is copying. */
bool kv_loopback_offer_withdraw(struct kv_loopback_port *port, struct kv_loopback_offer *offer)
{
    kv_transport_done_fn done = offer->done;
    void *arg = offer->arg;

    /* Unlinked before the swap, because the receiver may free the offer after it. */
    kv_loopback_offer_unlink(port, offer);
    if (!offer_leave(offer, KV_LOOPBACK_WITHDRAWN)) {
        kv_loopback_offer_link(port, offer);
        return false;
    }
    done(arg, KV_UNREACHABLE);
    return true;
}

bool kv_loopback_complete_one(struct kv_loopback_port *port)
{
    struct kv_loopback_receive_queue *receive_queue = port->receive_queue;
    struct kv_loopback_offer *offer;
    kv_status_t status;

    kv_lock_take(receive_queue->lock);
    offer = receive_queue->first_finished;
    if (offer != NULL) {
        receive_queue->first_finished = offer->next_finished;
        if (receive_queue->first_finished == NULL)
            receive_queue->last_finished = NULL;
        atomic_fetch_sub_explicit(&receive_queue->n_waiting, 1, memory_order_relaxed);
    }
    kv_lock_release(receive_queue->lock);
    if (offer == NULL)
        return false;

    kv_transport_done_fn done = offer->done;
    void *arg = offer->arg;

    status = offer->channel != NULL ? offer->status : KV_UNREACHABLE;
    kv_loopback_offer_unlink(port, offer);
    kv_loopback_offer_put(port, offer);
    done(arg, status);
    return true;
}

void kv_loopback_held_unlink(struct kv_loopback_offer *offer)
{
    struct kv_loopback_port *port = offer->receiver;

    if (offer->previous_held != NULL)
        offer->previous_held->next_held = offer->next_held;
    else
        port->held = offer->next_held;
    if (offer->next_held != NULL)
        offer->next_held->previous_held = offer->previous_held;
}

/* Copies some of an offer that this side moved out of OFFERED.  Returns whether that was all. */
static bool copy_some(struct kv_loopback_offer *offer, const struct kv_iov *pieces)
{
    size_t room = KV_LOOPBACK_COPY_MAX;

    while (room > 0 && offer->n_copied < offer->data_bytes) {
        const struct kv_iov *piece = &pieces[offer->at];
        const size_t left = piece->bytes - offer->filled;
        const size_t n = left < room ? left : room;

        memcpy((uint8_t *)piece->base + offer->filled, offer->data + offer->n_copied, n);
        offer->n_copied += n;
        offer->filled += n;
        offer->receiver->copied += n;
        room -= n;
        if (offer->filled == piece->bytes) {
            offer->at++;
            offer->filled = 0;
        }
    }
    return offer->n_copied == offer->data_bytes;
}

/* Copies some.  KV_IN_PROGRESS: there is more, and the sender may withdraw it meanwhile.
 * Otherwise the offer is no longer this side's. */
static kv_status_t receive_some(struct kv_loopback_offer *offer, const struct kv_iov *pieces)
{
    if (!offer_leave(offer, KV_LOOPBACK_COPYING)) {
        free(offer->pieces);
        kv_loopback_offer_retire(offer);
        return KV_UNREACHABLE;
    }
    if (!copy_some(offer, pieces)) {
        atomic_store(&offer->state, KV_LOOPBACK_OFFERED);
        return KV_IN_PROGRESS;
    }
    free(offer->pieces);
    offer_finish(offer, KV_OK);
    return KV_OK;
}

static void append_received(struct kv_loopback_port *port, struct kv_loopback_offer *offer)
{
    offer->next_received = NULL;
    *port->received_end = offer;
    port->received_end = &offer->next_received;
}

static struct kv_loopback_offer *take_received(struct kv_loopback_port *port)
{
    struct kv_loopback_offer *offer = port->received;

    port->received = offer->next_received;
    if (port->received == NULL)
        port->received_end = &port->received;
    return offer;
}

kv_status_t kv_loopback_receive(struct kv_incoming *incoming,
                                const struct kv_iov *iov,
                                unsigned n_iov,
                                kv_transport_done_fn done,
                                void *arg)
{
    struct kv_loopback_offer *offer = (struct kv_loopback_offer *)incoming;
    struct kv_loopback_port *port = offer->receiver;
    size_t bytes = 0;

    assert(n_iov >= 1 && n_iov <= KV_IOV_MAX);
    for (unsigned i = 0; i < n_iov; i++)
        bytes += iov[i].bytes;
    assert(bytes == offer->data_bytes);

    kv_loopback_held_unlink(offer);
    if (bytes <= KV_TRANSPORT_PROMPT_BYTES ||
        (bytes <= KV_LOOPBACK_COPY_MAX && port->copied < KV_LOOPBACK_COPY_MAX))
        return receive_some(offer, iov);
    offer->pieces = malloc(n_iov * sizeof(*iov));
    if (offer->pieces == NULL) {
        kv_loopback_offer_decline(offer, KV_OK);
        return KV_NO_MEMORY;
    }
    memcpy(offer->pieces, iov, n_iov * sizeof(*iov));
    offer->received = done;
    offer->received_arg = arg;
    append_received(port, offer);
    return KV_IN_PROGRESS;
}

unsigned kv_loopback_receive_on(struct kv_loopback_port *port)
{
    unsigned n = 0;

    for (; port->received != NULL && port->copied < KV_LOOPBACK_COPY_MAX; n++) {
        struct kv_loopback_offer *offer = take_received(port);
        const kv_transport_done_fn done = offer->received;
        void *arg = offer->received_arg;
        const kv_status_t status = receive_some(offer, offer->pieces);

        if (status == KV_IN_PROGRESS)
            append_received(port, offer);
        else
            done(arg, status);
    }
    return n;
}

void kv_loopback_receive_none(struct kv_loopback_port *port)
{
    while (port->received != NULL) {
        struct kv_loopback_offer *offer = take_received(port);
        const kv_transport_done_fn done = offer->received;
        void *arg = offer->received_arg;

        free(offer->pieces);
        kv_loopback_offer_decline(offer, KV_UNREACHABLE);
        done(arg, KV_UNREACHABLE);
    }
}

void kv_loopback_refuse(struct kv_incoming *incoming)
{
    struct kv_loopback_offer *offer = (struct kv_loopback_offer *)incoming;

    kv_loopback_held_unlink(offer);
    kv_loopback_offer_decline(offer, KV_OK);
}
