/* ucx_private.h - declarations shared by the files of the UCX transport.  ucx.c explains how it
 * works.
 *
 * This is the only file that includes ucp.h, and only ucx*.c of this folder include this one.
 *
 * Threads: a port and all its objects are used by its owner's thread alone, except its address
 * and port_wake(), which any thread may use.
 */
#ifndef KV_KVSERVER_NET_UCX_UCX_PRIVATE_H
#define KV_KVSERVER_NET_UCX_UCX_PRIVATE_H

#include "kvserver/net/transport.h"
#include "kvserver/net/ucx/memory_file.h"
#include "kvserver/net/ucx/offer.h"
#include "kvserver/net/ucx/peer_files.h"

#include <stdatomic.h>
#include <ucp/api/ucp.h>

enum kv_ucx_link_kind {
    KV_UCX_LINK_SHARED, /* first, because it is faster to poll */
    KV_UCX_LINK_NETWORK,
    KV_UCX_N_LINKS,
};

enum {
    KV_UCX_AM_ID = 1,
    KV_UCX_PROBE_ID = 2,
    KV_UCX_ADDRESS_MAGIC = 0x7563766b,
    KV_UCX_ADDRESS_BYTES_MAX = 4096,
    KV_UCX_LANES_MAX = 16, /* of an endpoint, to describe */
    KV_UCX_PEERS = 64,     /* lists of channels of this host */
    KV_UCX_DEVICES_BYTES_MAX = 256,

    /* Larger data goes by rendezvous: over shared memory as an offer.  Measured with fetches of
     * 64 KB: over tcp a rendezvous costs one and a half round trips, over shared memory less
     * than the second copy. */
    KV_UCX_NETWORK_EAGER_MAX = 192 << 10,
    KV_UCX_SHARED_EAGER_MAX = 8 << 10,

    /* Progress calls after a close, in which UCX releases an endpoint's requests. */
    KV_UCX_SETTLE_ROUNDS = 64,
    KV_UCX_CLOSE_ROUNDS_MAX = 20000, /* progress calls that a close waits for at most */
    /* How long a channel that was closed waits for the peer to accept it. */
    KV_UCX_LINGER_US = 2000000,
    KV_UCX_LINGER_ROUNDS_MAX = 10000, /* in kv_ucx_port_close() */
    /* Polling the network costs a system call.  While shared memory is busy, the network is
     * polled once per this many progress calls. */
    KV_UCX_NETWORK_TURNS = 8,
    /* Progress calls between two checks for dead peers on this host. */
    KV_UCX_WATCH_ROUNDS = 4096,
    /* Read from the memory of peers in one progress call, or a little more: some 30 us.  UCX
     * hands over up to 16 messages in one call, and data may be as large as a peer likes. */
    KV_UCX_READ_BYTES = 256 << 10,
    KV_UCX_WATCH_EVENTS_MAX = 16,    /* dead peers handled per check */
    KV_UCX_PROBE_EVERY_US = 1000000, /* between two probes of the shared queue */
    KV_UCX_PROBE_LOST_US = 1000000,  /* a probe not received after this time is lost */
    KV_UCX_PROBE_STEP_US = 250000,   /* counted at most between two looks at the queue */
    /* How long UCX may receive for a channel that was closed before the queue is replaced. */
    KV_UCX_LEFT_US = 1000000,
    /* How long what a closed channel left behind may keep the port awake: without other
     * channels, which would have to connect again; if no message has come of late; at most. */
    KV_UCX_AWAKE_ALONE_US = 1000000,
    KV_UCX_AWAKE_US = 10000000,
    KV_UCX_QUIET_US = 500000,
    KV_UCX_AWAKE_MAX_US = 60000000,
};

/* A port's address: this prefix, and then one address of a UCX worker per link, in the order of
 * enum kv_ucx_link_kind. */
struct kv_ucx_address_prefix {
    uint32_t magic;
    uint32_t crc; /* CRC32C of what follows it */
    uint32_t process;
    uint16_t bytes[KV_UCX_N_LINKS];
};

struct kv_mapping {
    ucp_mem_h handles[KV_UCX_N_LINKS];
    void *base; /* of memory that was allocated with it; NULL: the caller's */
    size_t bytes;
    bool is_in_file;
};

struct kv_ucx_transport {
    struct kv_transport base;
    ucp_context_h contexts[KV_UCX_N_LINKS]; /* NULL: not in use */
    bool has_cuda;
    bool is_users_choice; /* UCX_TLS is set: the network link may have shared memory */
    bool trusts_peers;    /* kv_transport_config */
    struct kv_memory_file memory_file;
    struct kv_peer_files *peer_files; /* NULL: without shared memory, or the system has none */
};

/* An in-flight send.  It is in the space before each UCX request that UCX reserves for its user
 * (ucp_params_t.request_size), so a send needs no allocation. */
struct kv_ucx_pending_send {
    struct kv_ucx_port *port; /* NULL: given up, `done` was called */
    struct kv_ucx_link *link;
    struct kv_ucx_channel *channel; /* NULL: closed */
    kv_transport_done_fn done;      /* NULL: was called, UCX still has the request */
    void *arg;
    struct kv_offer *offer; /* NULL: none, the data went as a message */
    struct kv_ucx_pending_send *previous, *next;
};

/* Lives in the same space, of the flush that a closed channel waits for. */
struct kv_ucx_flush {
    struct kv_ucx_channel *channel; /* NULL: no longer waits */
};

/* A UCX worker of a port. */
struct kv_ucx_link {
    struct kv_ucx_port *port;
    enum kv_ucx_link_kind kind;
    ucp_worker_h worker;
    ucp_ep_h probe; /* to the link itself; NULL: none yet */
    unsigned n_channels;
    struct kv_ucx_link *next; /* in the port's list `retired` */
};

/* What peers connect to.  It is replaced, never changed, and old ones are kept until the port
 * is closed, because any thread may still read one. */
struct kv_ucx_address {
    struct kv_ucx_address *before;
    size_t bytes;
    unsigned char data[];
};

struct kv_ucx_incoming {
    struct kv_incoming base;
    struct kv_ucx_link *link;
    void *descriptor;
    size_t data_bytes;
    struct kv_offer_tail tail; /* KV_UCX_LINK_SHARED */
    bool is_of_peer;      /* the port had a channel to the tail's process when it arrived */
    bool is_left;         /* UCX had the descriptor when a channel to that process was closed */
    ucs_status_t *answer; /* what the handler will return; NULL: it has returned */
    bool receiving;       /* UCX has the descriptor */
    bool in_call;         /* ucp_am_recv_data_nbx() has not returned */
    bool over;            /* completed while in_call */
    bool is_dead;         /* given up, `done` was called */
    kv_status_t status;
    kv_transport_done_fn done;
    void *arg;
    struct kv_ucx_incoming *previous, *next; /* of the port; `next` also of its spares */
    bool is_due;                             /* to be read on by a later kv_port_progress() */
    size_t n_read;                           /* bytes so far */
    struct kv_ucx_incoming *due_next;
    unsigned n_pieces;
    ucp_dt_iov_t pieces[KV_IOV_MAX];
};

struct kv_ucx_channel {
    struct kv_channel base;
    struct kv_ucx_port *port;
    struct kv_ucx_link *link;
    ucp_ep_h endpoint;
    uint32_t process; /* the peer's, over shared memory; 0: unknown */
    int process_fd;   /* readable when the peer's process is dead; -1: not watched */
    bool has_file;    /* a memory file of the process was read */
    struct kv_ucx_channel *next_peer; /* in its list of port->peers */
    void *channel_arg;
    bool failed;
    bool reported;
    bool may_linger;            /* closed, with nothing that must end at once */
    struct kv_ucx_flush *flush; /* closed, and waits for this; NULL: over */
    uint64_t linger_until_us;
    kv_status_t status;
    struct kv_ucx_channel *previous, *next; /* of the port; `next` also of those that close */
};

struct kv_ucx_port {
    struct kv_port base;
    struct kv_ucx_transport *transport;
    struct kv_port_events events;
    void *owner;
    struct kv_ucx_link *links[KV_UCX_N_LINKS]; /* NULL: not in use */
    struct kv_ucx_link *retired;               /* replaced, with objects still in use */
    uint32_t process;                          /* this one */
    int watch_fd; /* over the process_fd of channels; -1 without shared memory */
    int epoll_fd; /* over the workers, watch_fd and wake_fd; -1 where one worker is all */
    int wake_fd;  /* port_wake(), where there is epoll_fd */
    int fd;       /* what port_arm() gives */
    _Atomic(struct kv_ucx_address *) address;

    struct kv_ucx_channel *channels;
    struct kv_ucx_channel *peers[KV_UCX_PEERS]; /* those with a process, by its hash */
    struct kv_ucx_channel *to_close;
    struct kv_ucx_channel *lingering;
    struct kv_ucx_pending_send *pending_sends;
    struct kv_ucx_incoming *incomings; /* held by the owner, or being received */
    struct kv_ucx_incoming *spare_incomings;
    struct kv_ucx_incoming *due, **due_end; /* in the order in which they were to be read */
    size_t bytes_read; /* from the memory of peers, since kv_port_progress() began */
    struct kv_offers offers;
    unsigned n_failures; /* not reported yet */
    unsigned settle;     /* rounds of progress due after a close */
    unsigned turns;      /* progress calls until the network is polled */
    unsigned watch;      /* progress calls until watch_fd and the queue are checked */
    uint64_t probe_us;   /* when the last probe was sent */
    uint64_t look_us;    /* when the queue was last looked at */
    uint64_t waited_us;  /* for the probe, while the port made progress */
    bool is_probing;     /* it has not been received yet */
    bool must_probe;     /* a peer may have left the queue half written */
    bool must_look;      /* a closed channel may have left requests that UCX does not end */
    bool is_restless;    /* one was closed, and UCX has not been idle since */
    bool is_kept_awake;  /* since the last look the owner wanted to sleep, and UCX was busy */
    bool is_quiet;       /* no message has come since the last look */
    /* While the port was driven: */
    uint64_t left_us;  /* how long UCX has received for a closed channel */
    uint64_t awake_us; /* how long UCX has kept it awake since it became restless */
    uint64_t quiet_us; /* how long no message has come */
    bool in_progress;
    bool closing;
};

static inline struct kv_ucx_port *kv_ucx_port_of(struct kv_port *port)
{
    return (struct kv_ucx_port *)port;
}

static inline kv_status_t kv_ucx_status_of(ucs_status_t status)
{
    switch (status) {
    case UCS_OK:
        return KV_OK;
    case UCS_INPROGRESS:
        return KV_IN_PROGRESS;
    case UCS_ERR_NO_MEMORY:
        return KV_NO_MEMORY;
    case UCS_ERR_NO_RESOURCE:
    case UCS_ERR_BUSY:
        return KV_BUSY;
    case UCS_ERR_INVALID_PARAM:
    case UCS_ERR_INVALID_ADDR:
        return KV_INVALID;
    case UCS_ERR_UNSUPPORTED:
    case UCS_ERR_NO_DEVICE:
        return KV_UNSUPPORTED;
    case UCS_ERR_IO_ERROR:
        return KV_IO;
    default:
        /* Canceled, reset, timed out, not connected, rejected: one status for the owner. */
        return KV_UNREACHABLE;
    }
}

/* ucx_context.c */

kv_status_t kv_ucx_open(const struct kv_transport_config *config,
                        struct kv_transport **ret_transport,
                        char *detail,
                        size_t detail_bytes);
void kv_ucx_close(struct kv_transport *base);
kv_status_t kv_ucx_map(struct kv_transport *base,
                       void *memory,
                       size_t bytes,
                       enum kv_memory_type type,
                       struct kv_mapping **ret_mapping);
void kv_ucx_unmap(struct kv_transport *base, struct kv_mapping *mapping);
kv_status_t kv_ucx_alloc(struct kv_transport *base,
                         size_t bytes,
                         void **ret_memory,
                         struct kv_mapping **ret_mapping);
void kv_ucx_describe(struct kv_transport *base, char *text, size_t text_bytes);

/* Adds the words for large data over shared memory, which goes beside UCX (ucx.c). */
void kv_ucx_add_direct(char *text, size_t text_bytes);

/* Appends the transports and devices of an endpoint, as "tcp/lo", to `text`. */
void kv_ucx_describe_endpoint(ucp_ep_h endpoint, char *text, size_t text_bytes);

/* ucx_send.c */

kv_status_t kv_ucx_send(struct kv_channel *base,
                        const void *header,
                        size_t header_bytes,
                        const void *data,
                        size_t data_bytes,
                        kv_transport_done_fn done,
                        void *arg);
kv_status_t kv_ucx_send_pair(struct kv_channel *base,
                             const void *header,
                             size_t header_bytes,
                             const struct kv_iov pieces[2],
                             kv_transport_done_fn done,
                             void *arg);

/* Ends the sends of closed channels whose data was offered; UCX may keep the requests. */
void kv_ucx_abandon_offers(struct kv_ucx_port *port);

/* Ends all sends of a link that is about to be closed. */
void kv_ucx_give_up_pending_sends(const struct kv_ucx_link *link);

/* ucx_receive.c */

kv_status_t kv_ucx_receive(struct kv_incoming *base,
                           const struct kv_iov *iov,
                           unsigned n_iov,
                           kv_transport_done_fn done,
                           void *arg);
void kv_ucx_refuse(struct kv_incoming *base);

/* Reads what is due, up to KV_UCX_READ_BYTES.  Returns how many there were. */
unsigned kv_ucx_read_due(struct kv_ucx_port *port);

/* Ends what is due without reading it. */
void kv_ucx_give_up_due(struct kv_ucx_port *port);

/* Marks what UCX is receiving from the process: a channel to it is being closed. */
void kv_ucx_mark_left(struct kv_ucx_port *port, uint32_t process);

/* UCX's callback for messages. */
ucs_status_t kv_ucx_on_message(void *arg,
                               const void *header,
                               size_t header_bytes,
                               void *data,
                               size_t data_bytes,
                               const ucp_am_recv_param_t *param);

/* Ends an incoming that is not being received. */
void kv_ucx_incoming_release(struct kv_ucx_incoming *incoming);

/* Keeps the memory of an incoming that is not in the port's list for reuse. */
void kv_ucx_incoming_spare(struct kv_ucx_port *port, struct kv_ucx_incoming *incoming);

/* Ends all receives of a link that is about to be closed.  Returns a list of those that must
 * outlive the worker, for kv_ucx_incoming_spare(). */
struct kv_ucx_incoming *kv_ucx_give_up_incomings(const struct kv_ucx_link *link);

/* ucx_channel.c */

kv_status_t kv_ucx_connect(struct kv_port *base,
                           const void *address,
                           size_t address_bytes,
                           enum kv_channel_mode mode,
                           void *channel_arg,
                           struct kv_channel **ret_channel);
void kv_ucx_channel_close(struct kv_channel *base);
void kv_ucx_channel_describe(struct kv_channel *base, char *text, size_t text_bytes);

/* UCX's callback for endpoints that fail.  The failure is reported by kv_port_progress(). */
void kv_ucx_on_failure(void *arg, ucp_ep_h endpoint, ucs_status_t ucs);

/* Returns a channel to the process; NULL: the port has none. */
struct kv_ucx_channel *kv_ucx_find_peer(const struct kv_ucx_port *port, uint32_t process);

/* Whether the process is dead.  channel: to it; NULL: none */
bool kv_ucx_has_ended(const struct kv_ucx_channel *channel, uint32_t process);

/* Fails the channels whose peer's process is dead. */
void kv_ucx_look_for_dead_peers(struct kv_ucx_port *port);

/* Closes the endpoints in `to_close`, or lets them linger. */
void kv_ucx_close_endpoints(struct kv_ucx_port *port);

/* Closes the endpoints that have lingered long enough, or all of them. */
void kv_ucx_end_lingering(struct kv_ucx_port *port, bool is_all);

/* ucx_port.c */

kv_status_t kv_ucx_port_open(struct kv_transport *base,
                             const struct kv_port_events *events,
                             void *owner,
                             struct kv_port **ret_port);
void kv_ucx_port_close(struct kv_port *base);
void kv_ucx_port_address(struct kv_port *port, const void **ret_address, size_t *ret_bytes);
unsigned kv_ucx_port_progress(struct kv_port *base);
kv_status_t kv_ucx_port_arm(struct kv_port *base, int *ret_fd);
void kv_ucx_port_wake(struct kv_port *base);

kv_status_t kv_ucx_open_link(struct kv_ucx_port *port,
                             enum kv_ucx_link_kind kind,
                             struct kv_ucx_link **ret_link);
void kv_ucx_close_link(struct kv_ucx_link *link);

/* Gives the port an address that names its present links. */
kv_status_t kv_ucx_make_address(struct kv_ucx_port *port);

/* Has the port's descriptor wake for the link. */
kv_status_t kv_ucx_watch_link(const struct kv_ucx_port *port, const struct kv_ucx_link *link);

/* ucx_probe.c */

/* UCX's callback for probes. */
ucs_status_t kv_ucx_on_probe(void *arg,
                             const void *header,
                             size_t header_bytes,
                             void *data,
                             size_t data_bytes,
                             const ucp_am_recv_param_t *param);

/* Sends a probe of the shared queue when one is due.  Replaces a queue that lost one, or that
 * UCX waits over for a peer whose channel was closed. */
void kv_ucx_look_at_queue(struct kv_ucx_port *port);

/* Closes the retired links of which nothing is held. */
void kv_ucx_retire_links(struct kv_ucx_port *port);

#endif
