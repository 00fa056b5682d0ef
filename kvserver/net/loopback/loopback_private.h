/* loopback_private.h - declarations shared by the files of the loopback transport.  loopback.c
 * explains how it works and in which order locks are taken.
 */
#ifndef KV_KVSERVER_NET_LOOPBACK_LOOPBACK_PRIVATE_H
#define KV_KVSERVER_NET_LOOPBACK_LOOPBACK_PRIVATE_H

#include "kvserver/base/thread.h"
#include "kvserver/net/transport.h"

#include <stdatomic.h>

enum {
    KV_LOOPBACK_INLINE_MAX = 64 << 10, /* larger data is offered */
    KV_LOOPBACK_COPY_MAX = 256 << 10,  /* of offers in a call of progress; the next goes on */
};

/* loopback.c shows the transitions. */
enum kv_loopback_offer_state {
    KV_LOOPBACK_OFFERED,
    KV_LOOPBACK_COPYING,
    KV_LOOPBACK_FINISHED,
    KV_LOOPBACK_WITHDRAWN,
};

/* Large data of one send.  The sender's port creates it; the state in which it ends says which
 * side frees it (loopback.c). */
struct kv_loopback_offer {
    struct kv_incoming base; /* what the receiver is given */
    _Atomic int state;
    const uint8_t *data; /* the sender's; read in COPYING only */
    size_t data_bytes;
    struct kv_loopback_receive_queue *sender; /* holds a reference */

    /* Sender's thread only. */
    struct kv_loopback_channel *channel; /* NULL: closed */
    kv_transport_done_fn done;
    void *arg;
    struct kv_loopback_offer *previous, *next; /* in its port's `offers` */

    kv_status_t status;                      /* written before FINISHED */
    struct kv_loopback_offer *next_finished; /* under sender->lock */

    /* Receiver's thread only, while its owner holds the incoming. */
    struct kv_loopback_port *receiver;
    struct kv_loopback_offer *previous_held, *next_held;
    /* While it is being received: more than one call copies. */
    struct kv_loopback_offer *next_received;
    size_t n_copied; /* bytes */
    unsigned at;     /* the piece that is next, from `filled` on */
    size_t filled;
    struct kv_iov *pieces; /* (n_pieces); owned */
    unsigned n_pieces;
    kv_transport_done_fn received;
    void *received_arg;
};

/* A message in a receive queue.  The queue owns it, also while a sender fills it. */
struct kv_loopback_message {
    struct kv_loopback_message *next;
    struct kv_loopback_offer *offer; /* NULL: the data is in this message */
    size_t header_bytes;
    size_t data_bytes; /* of `data` */
    bool is_large;     /* capacity KV_LOOPBACK_INLINE_MAX, not SMALL_MAX */
    unsigned char header[KV_TRANSPORT_HEADER_MAX];
    unsigned char data[] __attribute__((aligned(64)));
};

/* A port's receive queue.  Reference counted, because channels to the port and offers from it
 * outlive the port. */
struct kv_loopback_receive_queue {
    uint64_t number; /* of the port; never reused */
    struct kv_lock *lock;
    struct kv_signal *signal;
    _Atomic unsigned refs;
    _Atomic bool open;
    _Atomic unsigned n_waiting; /* messages and finished offers; read without the lock */
    struct kv_loopback_receive_queue *next; /* under the registry's lock */

    /* Under lock. */
    struct kv_loopback_message *first, *last;
    unsigned n_messages; /* queued or being filled */
    size_t n_bytes;
    struct kv_loopback_offer *first_finished, *last_finished;
    struct kv_loopback_message *spare_small, *spare_large;
    unsigned n_spare_small, n_spare_large;
    bool sleeping; /* armed: the next message raises the signal */
    bool woken;    /* by port_wake() since the last arm */
};

/* The address of a port: valid in the process that opened it only. */
struct kv_loopback_address {
    uint32_t magic;
    uint32_t process;
    uint64_t number;
};

struct kv_loopback_port {
    struct kv_port base;
    struct kv_port_events events;
    void *owner;
    struct kv_loopback_receive_queue *receive_queue;
    struct kv_loopback_address address;
    struct kv_loopback_channel *channels;
    struct kv_loopback_offer *offers; /* sent and not done */
    struct kv_loopback_offer
        *held; /* delivered to the owner, and neither received nor refused */
    struct kv_loopback_offer *spare;
    unsigned n_spare;
    unsigned closed_seen; /* registry.n_closed when the channels were last checked */
    size_t copied;        /* bytes of offers, since the last call of progress began */
    /* Offers that take more calls, the first of them next. */
    struct kv_loopback_offer *received, **received_end;
};

struct kv_loopback_channel {
    struct kv_channel base;
    struct kv_loopback_port *port;
    struct kv_loopback_receive_queue *peer;
    enum kv_channel_mode mode;
    void *channel_arg;
    bool reported; /* events->failed() was called */
    struct kv_loopback_channel *previous, *next;
};

/* All open ports of the process.  For port_open(), port_close() and connect(). */
struct kv_loopback_registry {
    _Atomic(struct kv_lock *) lock;
    struct kv_loopback_receive_queue *receive_queues;
    uint64_t last_number;
    _Atomic unsigned
        n_closed; /* ports closed so far; a change makes the others check their channels */
};

extern struct kv_loopback_registry kv_loopback_registry;

static inline struct kv_loopback_port *kv_loopback_port_of(struct kv_port *port)
{
    return (struct kv_loopback_port *)port;
}

/* inbox.c */

/* Makes the registry's lock, which lives as long as the process.  Every transport calls it
 * before it opens a port. */
kv_status_t kv_loopback_registry_init(void);
void kv_loopback_registry_take(void);
void kv_loopback_registry_release(void);

/* Creates an open receive queue with one reference, which is not in the registry. */
struct kv_loopback_receive_queue *kv_loopback_receive_queue_create(void);

/* Drops a reference; frees a receive queue that has none left.  NULL does nothing. */
void kv_loopback_receive_queue_unref(struct kv_loopback_receive_queue *receive_queue);

/* Reserves a place in the receive queue and a node for it.  Fails with KV_UNREACHABLE if the
 * port is closed, and with KV_BUSY if the receive queue is full. */
kv_status_t kv_loopback_receive_queue_reserve(struct kv_loopback_receive_queue *receive_queue,
                                              size_t data_bytes,
                                              struct kv_loopback_message **ret_message);

/* Queues a node that was reserved and filled.  Fails with KV_UNREACHABLE, and takes the node
 * back, if the port has closed in between. */
kv_status_t kv_loopback_receive_queue_push(struct kv_loopback_receive_queue *receive_queue,
                                           struct kv_loopback_message *message);

/* Takes a node back.  Call with the lock held. */
void kv_loopback_receive_queue_recycle(struct kv_loopback_receive_queue *receive_queue,
                                       struct kv_loopback_message *message);

/* Returns whether to raise the receive queue's signal once its lock is released.  Call with it
 * held. */
bool kv_loopback_must_raise(struct kv_loopback_receive_queue *receive_queue);

/* loopback_offer.c */

kv_status_t kv_loopback_receive(struct kv_incoming *incoming,
                                const struct kv_iov *iov,
                                unsigned n_iov,
                                kv_transport_done_fn done,
                                void *arg);
void kv_loopback_refuse(struct kv_incoming *incoming);

/* Receiver: goes on with offers that take more than one call.  Returns how many it looked at. */
unsigned kv_loopback_receive_on(struct kv_loopback_port *port);

/* Receiver: ends them, without the rest of their data. */
void kv_loopback_receive_none(struct kv_loopback_port *port);

struct kv_loopback_offer *kv_loopback_offer_get(struct kv_loopback_port *port);
void kv_loopback_offer_put(struct kv_loopback_port *port, struct kv_loopback_offer *offer);
void kv_loopback_offer_link(struct kv_loopback_port *port, struct kv_loopback_offer *offer);
void kv_loopback_offer_unlink(struct kv_loopback_port *port, struct kv_loopback_offer *offer);

/* Sender: takes an offer back and ends the send.  Returns false if the receiver has answered
 * or is copying. */
bool kv_loopback_offer_withdraw(struct kv_loopback_port *port, struct kv_loopback_offer *offer);

/* Sender: ends one send whose offer is finished.  Returns false if there is none. */
bool kv_loopback_complete_one(struct kv_loopback_port *port);

/* Receiver: frees an offer that the sender withdrew. */
void kv_loopback_offer_retire(struct kv_loopback_offer *offer);

/* Receiver: ends an offer without its data, whether or not the sender withdrew it. */
void kv_loopback_offer_decline(struct kv_loopback_offer *offer, kv_status_t status);

/* Receiver: takes an offer from its port's list of those held. */
void kv_loopback_held_unlink(struct kv_loopback_offer *offer);

#endif
