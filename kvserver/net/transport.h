/* transport.h - the table of transports: how messages travel.
 *
 *   transport   one per process and row: devices, registered memory      (UCX: context)
 *   port        one per thread: what messages arrive at                   (UCX: worker)
 *   channel     from one port to another port's address                   (UCX: endpoint)
 *
 * A message is a header of at most KV_TRANSPORT_HEADER_MAX bytes and data of any size.  Small
 * data arrives with the message; large data stays at the sender until the receiver says where
 * it goes (rendezvous):
 *
 *   sender: kv_channel_send() ------> events->message()            small: all there
 *                             ------> events->incoming()           large: then, now or later,
 *                                       kv_incoming_receive() or kv_incoming_refuse()
 *
 * A message arrives whole or not at all, once, and is checked by the receiver all the same.
 * Messages of one channel may overtake each other.
 *
 * Threads: a port, its channels and incomings belong to the thread that drives it; only
 * port_wake() may be called from another.  Callbacks run inside kv_port_progress(), or
 * inside the call that completes at once where that is said.
 *
 * Memory: each call says whether it borrows (during the call) or keeps (until done).
 */
#ifndef KV_KVSERVER_NET_TRANSPORT_H
#define KV_KVSERVER_NET_TRANSPORT_H

#include "kvserver/base/iov.h"
#include "proto/kv_status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KV_TRANSPORT_HEADER_MAX = 256
};

enum kv_memory_type {
    KV_MEMORY_HOST = 0,
    KV_MEMORY_CUDA = 1,
};

enum kv_channel_mode {
    KV_CHANNEL_NETWORK, /* any host; a dead peer is reported by events->failed() */
    KV_CHANNEL_SHARED,  /* same host, shared memory; nobody reports a dead peer */
};

struct kv_transport_config {
    const char *transports; /* "auto" (tcp and shared memory), "tcp" or "shm" */
    const char *devices;    /* network devices, comma-separated: "lo"; NULL or "": "lo" */
};

struct kv_port;
struct kv_channel;
struct kv_incoming;
struct kv_mapping;

/* Called once, from the port's thread. */
typedef void (*kv_transport_done_fn)(void *arg, kv_status_t status);

struct kv_port_events {
    /* A whole message.  Lends header and data for the call. */
    void (*message)(void *owner,
                    const void *header,
                    size_t header_bytes,
                    const void *data,
                    size_t data_bytes);
    /* A message whose data is still at the sender.  Lends header for the call.  Exactly one of
     * kv_incoming_receive() and kv_incoming_refuse() must follow, now or later. */
    void (*incoming)(void *owner,
                     const void *header,
                     size_t header_bytes,
                     size_t data_bytes,
                     struct kv_incoming *incoming);
    /* The peer is gone (network mode only).  All sends of the channel are completed with
     * KV_UNREACHABLE, before or after; the owner calls channel_close(). */
    void (*failed)(void *owner, void *channel_arg, kv_status_t status);
};

/* What every implementation begins with. */
struct kv_transport {
    const struct kv_transport_ops *ops;
};
struct kv_port {
    const struct kv_transport_ops *ops;
};
struct kv_channel {
    const struct kv_transport_ops *ops;
    size_t pair_max; /* bytes that send_pair takes; 0: the row has none */
};
struct kv_incoming {
    const struct kv_transport_ops *ops;
};

struct kv_transport_ops {
    const char *name;

    /* KV_UNSUPPORTED, KV_INVALID, KV_IO: `detail` says what is missing, and where. */
    kv_status_t (*open)(const struct kv_transport_config *config,
                        struct kv_transport **ret_transport,
                        char *detail,
                        size_t detail_bytes);
    void (*close)(struct kv_transport *transport);
    /* Registers memory for transfers; optional for speed, refused where the kind of memory
     * cannot be used: KV_UNSUPPORTED. */
    kv_status_t (*map)(struct kv_transport *transport,
                       void *base,
                       size_t bytes,
                       enum kv_memory_type type,
                       struct kv_mapping **ret_mapping);
    void (*unmap)(struct kv_transport *transport, struct kv_mapping *mapping);
    /* What is in use, for people: "tcp/lo posix/memory cma/memory". */
    void (*describe)(struct kv_transport *transport, char *text, size_t text_bytes);

    kv_status_t (*port_open)(struct kv_transport *transport,
                             const struct kv_port_events *events,
                             void *owner,
                             struct kv_port **ret_port);
    void (*port_close)(struct kv_port *port);
    /* The bytes that a peer needs for connect; lent until the port closes. */
    void (*port_address)(struct kv_port *port, const void **ret_address, size_t *ret_bytes);
    /* Does what is to do now; returns how much (0: nothing). */
    unsigned (*port_progress)(struct kv_port *port);
    /* Prepares to sleep.  KV_OK: *ret_fd becomes readable when there is something to do.
     * KV_BUSY: there is something already.  A negative fd: the row has none. */
    kv_status_t (*port_arm)(struct kv_port *port, int *ret_fd);
    void (*port_wake)(struct kv_port *port); /* any thread */

    /* Copies the address.  KV_UNREACHABLE, KV_INVALID: not an address of this row. */
    kv_status_t (*connect)(struct kv_port *port,
                           const void *address,
                           size_t address_bytes,
                           enum kv_channel_mode mode,
                           void *channel_arg,
                           struct kv_channel **ret_channel);
    /* Sends still in flight are completed with KV_UNREACHABLE, now or later in progress, and
     * never touch their memory after that.  No event names the channel again. */
    void (*channel_close)(struct kv_channel *channel);
    void (*channel_describe)(struct kv_channel *channel, char *text, size_t text_bytes);

    /* KV_OK: done, header and data are the caller's again; `done` is not called.
     * KV_IN_PROGRESS: keeps header and data until `done`.  Negative: not sent, not called. */
    kv_status_t (*send)(struct kv_channel *channel,
                        const void *header,
                        size_t header_bytes,
                        const void *data,
                        size_t data_bytes,
                        kv_transport_done_fn done,
                        void *arg);
    /* The same for one message whose data lies in two pieces of channel->pair_max bytes
     * together at most; keeps the array, too.  It arrives as any small message. */
    kv_status_t (*send_pair)(struct kv_channel *channel,
                             const void *header,
                             size_t header_bytes,
                             const struct kv_iov pieces[2],
                             kv_transport_done_fn done,
                             void *arg);
    /* Takes the data into the pieces of `iov`, whose sizes add up to data_bytes; borrows the
     * array, keeps the memory until `done`.  Return as for send; `incoming` is gone after. */
    kv_status_t (*receive)(struct kv_incoming *incoming,
                           const struct kv_iov *iov,
                           unsigned n_iov,
                           kv_transport_done_fn done,
                           void *arg);
    void (*refuse)(struct kv_incoming *incoming); /* drops the data; `incoming` is gone after */
};

enum {
    KV_IOV_MAX = 64
};

/* In-process: ports of one process by number.  Its own folder: loopback/. */
extern const struct kv_transport_ops kv_transport_loopback;

#ifdef KV_WITH_UCX
/* ucx/, target kv_transport_ucx: only ucx_private.h there includes ucp.h. */
extern const struct kv_transport_ops kv_transport_ucx;
#endif

static inline unsigned kv_port_progress(struct kv_port *port)
{
    return port->ops->port_progress(port);
}

static inline kv_status_t kv_channel_send(struct kv_channel *channel,
                                          const void *header,
                                          size_t header_bytes,
                                          const void *data,
                                          size_t data_bytes,
                                          kv_transport_done_fn done,
                                          void *arg)
{
    return channel->ops->send(channel, header, header_bytes, data, data_bytes, done, arg);
}

static inline kv_status_t kv_channel_send_pair(struct kv_channel *channel,
                                               const void *header,
                                               size_t header_bytes,
                                               const struct kv_iov pieces[2],
                                               kv_transport_done_fn done,
                                               void *arg)
{
    return channel->ops->send_pair(channel, header, header_bytes, pieces, done, arg);
}

static inline kv_status_t kv_incoming_receive(struct kv_incoming *incoming,
                                              const struct kv_iov *iov,
                                              unsigned n_iov,
                                              kv_transport_done_fn done,
                                              void *arg)
{
    return incoming->ops->receive(incoming, iov, n_iov, done, arg);
}

static inline void kv_incoming_refuse(struct kv_incoming *incoming)
{
    incoming->ops->refuse(incoming);
}

#endif
