/* loopback_private.h - what the files of the loopback transport share.  loopback.c says how it
 * works, and in which order locks are taken.
 */
#ifndef KV_KVSERVER_NET_LOOPBACK_LOOPBACK_PRIVATE_H
#define KV_KVSERVER_NET_LOOPBACK_LOOPBACK_PRIVATE_H

#include "kvserver/base/thread.h"
#include "kvserver/net/transport.h"

#include <stdatomic.h>

enum {
    INLINE_MAX = 64 << 10, /* larger data is offered */
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
struct registry {
    _Atomic(struct kv_lock *) lock;
    struct inbox *inboxes;
    uint64_t last_number;
    _Atomic unsigned
        n_closed; /* ports closed so far: tells the others to look at their channels */
};

extern struct registry kv_loopback_registry;

static inline struct loopback_port *port_of(struct kv_port *port)
{
    return (struct loopback_port *)port;
}

/* inbox.c */

/* Makes the registry's lock, which lives as long as the process.  Every transport calls it
 * before it opens a port. */
kv_status_t kv_loopback_registry_init(void);
void kv_loopback_registry_take(void);
void kv_loopback_registry_release(void);

/* Creates an open inbox with one reference, which is not in the registry. */
struct inbox *kv_loopback_inbox_create(void);

/* Drops a reference; frees an inbox that has none left.  NULL does nothing. */
void kv_loopback_inbox_unref(struct inbox *inbox);

/* Reserves a place in the inbox and a node for it.  Fails with KV_UNREACHABLE if the port is
 * closed, and with KV_BUSY if the inbox is full. */
kv_status_t
kv_loopback_inbox_reserve(struct inbox *inbox, size_t data_bytes, struct message **ret_message);

/* Queues a node that was reserved and filled.  Fails with KV_UNREACHABLE, and takes the node
 * back, if the port has closed in between. */
kv_status_t kv_loopback_inbox_push(struct inbox *inbox, struct message *message);

/* Takes a node back.  Call with the lock held. */
void kv_loopback_inbox_recycle(struct inbox *inbox, struct message *message);

/* Returns whether to raise the inbox's signal once its lock is released.  Call with it held. */
bool kv_loopback_must_raise(struct inbox *inbox);

/* offer.c */

kv_status_t kv_loopback_receive(struct kv_incoming *incoming,
                                const struct kv_iov *iov,
                                unsigned n_iov,
                                kv_transport_done_fn done,
                                void *arg);
void kv_loopback_refuse(struct kv_incoming *incoming);

struct offer *kv_loopback_offer_get(struct loopback_port *port);
void kv_loopback_offer_put(struct loopback_port *port, struct offer *offer);
void kv_loopback_offer_link(struct loopback_port *port, struct offer *offer);
void kv_loopback_offer_unlink(struct loopback_port *port, struct offer *offer);

/* Sender: takes an offer back and ends the send.  Returns false if the receiver has answered
 * or is copying. */
bool kv_loopback_offer_withdraw(struct loopback_port *port, struct offer *offer);

/* Sender: ends one send whose offer is finished.  Returns false if there is none. */
bool kv_loopback_complete_one(struct loopback_port *port);

/* Receiver: frees an offer that the sender withdrew. */
void kv_loopback_offer_bury(struct offer *offer);

/* Receiver: ends an offer without its data, whether or not the sender withdrew it. */
void kv_loopback_offer_decline(struct offer *offer, kv_status_t status);

/* Receiver: takes an offer from its port's list of those held. */
void kv_loopback_held_unlink(struct offer *offer);

#endif
