/* transport.h - the interface of transports, which carry messages between ports.
 *
 *   transport   one per process and kind: devices, registered memory      (UCX: context)
 *   port        one per thread: where messages arrive                     (UCX: worker)
 *   channel     from one port to another port's address                   (UCX: endpoint)
 *
 * A message is a header of at most KV_TRANSPORT_HEADER_MAX bytes and data of any size.  Small
 * data arrives with the message.  Large data stays at the sender until the receiver has chosen
 * where to write it (rendezvous):
 *
 *   sender: kv_channel_send() ------> events->message()            small: complete
 *                             ------> events->incoming()           large: then, now or later,
 *                                       kv_incoming_receive() or kv_incoming_refuse()
 *
 * A message arrives whole or not at all, and at most once.  The receiver checks it
 * nevertheless.  Messages of one channel may overtake each other.
 *
 * Threads: a port, its channels and incomings belong to the thread that drives it, one at a
 * time; only port_wake() may be called from another one.  Callbacks run inside
 * kv_port_progress(), or inside a call that completes at once if its contract says so.
 *
 * Memory: each call says what it borrows (during the call) or keeps (until `done`).
 */
#ifndef KV_KVSERVER_NET_TRANSPORT_H
#define KV_KVSERVER_NET_TRANSPORT_H

#include "kvserver/base/iov.h"
#include "proto/kv_status.h"
#include "proto/kv_types.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KV_TRANSPORT_HEADER_MAX = 256,
    /* Data that is read from the sender's memory is read in kv_incoming_receive(), if it is not
     * larger.  Of larger data that may be some, and later calls of kv_port_progress() go on. */
    KV_TRANSPORT_PROMPT_BYTES = 128 << 10,
};

enum kv_channel_mode {
    KV_CHANNEL_NETWORK, /* any host; events->failed() reports the end of a peer */
    KV_CHANNEL_SHARED,  /* same host, shared memory; the end of a peer may go unreported */
};

struct kv_transport_config {
    const char *transports; /* "auto" (tcp and shared memory), "tcp" or "shm" */
    const char *devices;    /* network devices, comma-separated: "lo"; NULL or "": "lo" */
    bool trusts_peers;      /* may wait for as long as a peer on this host likes while it reads
                             * the peer's memory; the peers need not do so: clients */
};

struct kv_port;
struct kv_channel;
struct kv_incoming;
struct kv_mapping;

/* Called once, from the port's thread. */
typedef void (*kv_transport_done_fn)(void *arg, kv_status_t status);

struct kv_port_events {
    /* A complete message.  Header and data are valid during the call. */
    void (*message)(void *owner,
                    const void *header,
                    size_t header_bytes,
                    const void *data,
                    size_t data_bytes);
    /* A message whose data is still at the sender.  The header is valid during the call.  The
     * owner must call exactly one of kv_incoming_receive() and kv_incoming_refuse(), now or
     * later. */
    void (*incoming)(void *owner,
                     const void *header,
                     size_t header_bytes,
                     size_t data_bytes,
                     struct kv_incoming *incoming);
    /* The peer has failed or ended (network mode only).  All sends of the channel are completed
     * with KV_UNREACHABLE, before or after this call.  The owner must call channel_close(). */
    void (*failed)(void *owner, void *channel_arg, kv_status_t status);
};

/* The first member of each implementation's structs. */
struct kv_transport {
    const struct kv_transport_ops *ops;
};
struct kv_port {
    const struct kv_transport_ops *ops;
    bool has_queue; /* peers write into a queue of its own, which has room only while it is
                     * driven: whoever closes it should wait until they have stopped */
};
struct kv_channel {
    const struct kv_transport_ops *ops;
    size_t pair_max; /* most bytes for send_pair; 0: not supported */
};
struct kv_incoming {
    const struct kv_transport_ops *ops;
};

struct kv_transport_ops {
    const char *name;

    /* Fails with KV_UNSUPPORTED, KV_INVALID or KV_IO; `detail` then says what is missing. */
    kv_status_t (*open)(const struct kv_transport_config *config,
                        struct kv_transport **ret_transport,
                        char *detail,
                        size_t detail_bytes);
    void (*close)(struct kv_transport *transport);
    /* Registers memory for transfers; for speed only.  Fails with KV_UNSUPPORTED if the
     * transport cannot use this type of memory. */
    kv_status_t (*map)(struct kv_transport *transport,
                       void *base,
                       size_t bytes,
                       enum kv_memory_type type,
                       struct kv_mapping **ret_mapping);
    /* As map, of memory that it allocates, in huge pages where the system grants them; `bytes`
     * are whole pages.  Large data is best sent from there.  Fails with KV_NO_MEMORY, too. */
    kv_status_t (*alloc)(struct kv_transport *transport,
                         size_t bytes,
                         void **ret_memory,
                         struct kv_mapping **ret_mapping);
    /* Ends a registration; frees memory of alloc. */
    void (*unmap)(struct kv_transport *transport, struct kv_mapping *mapping);
    /* Describes what is in use: "tcp/lo posix/memory memfd/memory cma/memory". */
    void (*describe)(struct kv_transport *transport, char *text, size_t text_bytes);

    kv_status_t (*port_open)(struct kv_transport *transport,
                             const struct kv_port_events *events,
                             void *owner,
                             struct kv_port **ret_port);
    void (*port_close)(struct kv_port *port);
    /* Returns the bytes that a peer needs for connect; valid until the port closes. */
    void (*port_address)(struct kv_port *port, const void **ret_address, size_t *ret_bytes);
    /* Handles pending events; returns their number. */
    unsigned (*port_progress)(struct kv_port *port);
    /* Prepares to sleep.  KV_OK: *ret_fd becomes readable when an event is pending; a negative
     * fd: the transport has none.  KV_BUSY: an event is already pending. */
    kv_status_t (*port_arm)(struct kv_port *port, int *ret_fd);
    void (*port_wake)(struct kv_port *port); /* any thread */

    /* Opens a channel.  Copies the address.  Fails with KV_UNREACHABLE, or with KV_INVALID if
     * it is not an address of this transport. */
    kv_status_t (*connect)(struct kv_port *port,
                           const void *address,
                           size_t address_bytes,
                           enum kv_channel_mode mode,
                           void *channel_arg,
                           struct kv_channel **ret_channel);
    /* Closes a channel.  Outstanding sends are completed with KV_UNREACHABLE, now or in a later
     * progress call, and do not access their memory after that.  No later event names the
     * channel. */
    void (*channel_close)(struct kv_channel *channel);
    void (*channel_describe)(struct kv_channel *channel, char *text, size_t text_bytes);

    /* Sends a message.  KV_OK: completed, the caller may reuse header and data; `done` is not
     * called.  KV_IN_PROGRESS: keeps header and data until `done`.  Negative: not sent, and
     * `done` is not called. */
    kv_status_t (*send)(struct kv_channel *channel,
                        const void *header,
                        size_t header_bytes,
                        const void *data,
                        size_t data_bytes,
                        kv_transport_done_fn done,
                        void *arg);
    /* As send, for data in two pieces of together at most channel->pair_max bytes; keeps the
     * array, too.  The message arrives like any small message. */
    kv_status_t (*send_pair)(struct kv_channel *channel,
                             const void *header,
                             size_t header_bytes,
                             const struct kv_iov pieces[2],
                             kv_transport_done_fn done,
                             void *arg);
    /* Receives the data into the pieces of `iov`, whose sizes sum to data_bytes.  Borrows the
     * array, keeps the memory until `done`.  Returns as send.  `incoming` is invalid after the
     * call. */
    kv_status_t (*receive)(struct kv_incoming *incoming,
                           const struct kv_iov *iov,
                           unsigned n_iov,
                           kv_transport_done_fn done,
                           void *arg);
    void (*refuse)(
        struct kv_incoming *incoming); /* drops the data; `incoming` is invalid after */
};

enum {
    KV_IOV_MAX = 64
};

/* In-process: ports of one process, by number (loopback/). */
extern const struct kv_transport_ops kv_transport_loopback;

#ifdef KV_WITH_UCX
/* UCX (ucx/, target kv_transport_ucx): only ucx_private.h includes ucp.h. */
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
