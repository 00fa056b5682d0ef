/* ucx.c - the transport over UCX: tcp between hosts, shared memory within one.
 *
 * Two contexts, and so two workers per port, because UCX chooses the wires of an endpoint by
 * context and not by endpoint:
 *
 *   network   tcp on the named devices                      KV_CHANNEL_NETWORK
 *   shared    posix shared memory; large data is read       KV_CHANNEL_SHARED
 *             straight from the sender's memory
 *
 * All endpoints have error mode PEER.  Mode NONE would let UCX read large data through CMA, but
 * its endpoints cannot be closed while the peer does not answer, and the peer might read memory
 * of a send that was completed long ago.  Mode PEER leaves CMA out for that reason, so large
 * data goes as an offer (offer.h): its message is UCX's RTS, and the ATS that answers it ends
 * the send.  Where the system forbids the read, UCX moves the data itself, which is slower.
 *
 * UCX calls back in the middle of its own work.  What must not happen there waits for the end
 * of kv_port_progress(): endpoints are closed, and failures reported, from there.
 *
 * This UCX has assertions compiled in, and a damaged worker address or message aborts the
 * process: addresses travel in an envelope with a checksum, and peers are trusted (README).
 */
#include "kvserver/net/transport.h"

#include "kernels/checksum.h"
#include "kvserver/base/clock.h"
#include "kvserver/net/ucx/offer.h"

#include <assert.h>
#include <errno.h>
#include <net/if.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

enum wire_kind {
    WIRE_SHARED, /* first: it is the faster one to look at */
    WIRE_NETWORK,
    N_WIRES,
};

enum {
    AM_ID = 1,
    PROBE_ID = 2,
    ADDRESS_MAGIC = 0x7563766b,
    ADDRESS_BYTES_MAX = 4096,
    LANES_MAX = 16, /* of an endpoint, to describe */
    DEVICES_BYTES_MAX = 256,

    /* Larger data is offered.  Measured on one machine, 64 KB fetches: over tcp a rendezvous
     * costs a round trip and a half, over shared memory less than the second copy. */
    NETWORK_EAGER_MAX = 192 << 10,
    SHARED_EAGER_MAX = 8 << 10,

    /* Progress calls after a close, in which UCX lets go of an endpoint's requests. */
    SETTLE_ROUNDS = 64,
    CLOSE_ROUNDS_MAX = 20000,
    /* A look at the network costs a system call: where shared memory is busy, one in so many.
     */
    NETWORK_TURNS = 8,
    /* Rounds of progress between two looks for dead peers on this host. */
    WATCH_ROUNDS = 4096,
    WATCH_EVENTS_MAX = 16,
    PROBE_EVERY_US = 1000000,
    PROBE_LOST_US = 1000000,
};

/* The envelope of a port's address: this, then the network address, then the shared one. */
struct address_prefix {
    uint32_t magic;
    uint32_t crc; /* CRC32C of what follows it */
    uint32_t process;
    uint16_t bytes[N_WIRES];
};

struct kv_mapping {
    ucp_mem_h handles[N_WIRES];
};

struct ucx_transport {
    struct kv_transport base;
    ucp_context_h contexts[N_WIRES]; /* NULL: not in use */
    bool has_cuda;
};

/* A send in flight; lives in the space that UCX keeps for us in front of each request. */
struct flight {
    struct ucx_port *port; /* NULL: given up, its owner knows */
    struct wire *wire;
    struct ucx_channel *channel; /* NULL: closed since */
    kv_transport_done_fn done;   /* NULL: the owner was told, UCX has still to let go */
    void *arg;
    struct kv_offer *offer; /* NULL: none, the data went as a message */
    struct flight *previous, *next;
};

/* A worker of a port, and what goes over it. */
struct wire {
    struct ucx_port *port;
    enum wire_kind kind;
    ucp_worker_h worker;
    ucp_ep_h probe; /* to the wire itself; NULL: none yet */
    unsigned n_channels;
    struct wire *next; /* of those that are retired */
};

/* What others connect to.  Replaced, never changed: any thread may be reading the one before.
 */
struct address {
    struct address *before;
    size_t bytes;
    unsigned char data[];
};

struct ucx_incoming {
    struct kv_incoming base;
    struct wire *wire;
    void *descriptor;
    size_t data_bytes;
    struct kv_offer_tail tail; /* WIRE_SHARED */
    ucs_status_t *answer;      /* what the handler will return; NULL: it has returned */
    bool receiving;            /* UCX has the descriptor */
    bool in_call;              /* ucp_am_recv_data_nbx() has not returned */
    bool over;                 /* completed while in_call */
    bool is_dead;              /* given up, its owner knows */
    kv_status_t status;
    kv_transport_done_fn done;
    void *arg;
    struct ucx_incoming *previous, *next; /* of the port; `next` also of its spares */
    ucp_dt_iov_t pieces[KV_IOV_MAX];
};

struct ucx_channel {
    struct kv_channel base;
    struct ucx_port *port;
    struct wire *wire;
    ucp_ep_h endpoint;
    int process_fd; /* readable when the peer's process is dead; -1: not watched */
    void *channel_arg;
    bool failed;
    bool reported;
    kv_status_t status;
    struct ucx_channel *previous, *next; /* of the port; `next` also of those to close */
};

struct ucx_port {
    struct kv_port base;
    struct ucx_transport *transport;
    struct kv_port_events events;
    void *owner;
    struct wire *wires[N_WIRES]; /* NULL: not in use */
    struct wire *retired;        /* until nobody holds anything of them */
    uint32_t process;            /* this one */
    int watch_fd;                /* over the process_fd of channels; -1 without shared memory */
    int epoll_fd; /* over the workers, watch_fd and wake_fd; -1 where one worker is all */
    int wake_fd;  /* kv_port_wake(), where there is epoll_fd */
    int fd;       /* what kv_port_arm() gives */
    _Atomic(struct address *) address;

    struct ucx_channel *channels;
    struct ucx_channel *to_close;
    struct flight *flights;
    struct ucx_incoming *incomings; /* held by the owner, or being received */
    struct ucx_incoming *spare_incomings;
    struct kv_offers offers;
    unsigned n_failures; /* not reported yet */
    unsigned settle;     /* rounds of progress due after a close */
    unsigned turns;
    unsigned watch;    /* rounds until the next look at watch_fd, and at the queue */
    uint64_t probe_us; /* when the last probe was sent */
    bool is_probing;   /* it has not come back */
    bool must_probe;   /* a peer may have left the queue half written */
    bool in_progress;
    bool closing;
};

/* An option that must not depend on the environment, unless the user set that very one. */
struct option {
    const char *name;
    const char *variable; /* NULL: not the user's to set */
    const char *value;
};

/* Each list is ended by a row of zeros. */
static const struct option common_options[] = {
    /* A peer's death is reported by status; UCX would write to stdout. */
    {"LOG_LEVEL", "UCX_LOG_LEVEL", "fatal"},
    {"WARN_UNUSED_ENV_VARS", "UCX_WARN_UNUSED_ENV_VARS", "n"},
    /* Off: it follows a null pointer where a peer dies before it is fully connected, and needs
     * three seconds to see a death.  The kernel's sockets and begin_watch() do its work. */
    {"KEEPALIVE_INTERVAL", NULL, "inf"},
    {NULL, NULL, NULL},
};

static const struct option wire_options[N_WIRES][10] = {
    [WIRE_NETWORK] = {{"TLS", "UCX_TLS", "tcp"},
                      /* Without a copy, a send that a dead peer cuts short is completed twice
                       * and aborts the process (UCX 1.13).  Large segments, the same on both
                       * sides, make the copy cost what the round trips of a rendezvous with
                       * PUT did. */
                      {"ZCOPY_THRESH", NULL, "inf"},
                      {"RNDV_SCHEME", NULL, "am"},
                      {"TX_SEG_SIZE", NULL, "256k"},
                      {"RX_SEG_SIZE", NULL, "256k"},
                      {"MAX_NUM_EPS", "UCX_TCP_MAX_NUM_EPS", "8192"},
                      {"KEEPIDLE", "UCX_TCP_KEEPIDLE", "1s"},
                      {"KEEPINTVL", "UCX_TCP_KEEPINTVL", "1s"},
                      {"KEEPCNT", "UCX_TCP_KEEPCNT", "3"}},
    /* cma: its part here is to ask the system that peers may read this process. */
    [WIRE_SHARED] = {{"TLS", "UCX_TLS", "posix,cma"},
                     {"MM_ERROR_HANDLING", "UCX_POSIX_ERROR_HANDLING", "y"}},
};

static struct ucx_port *port_of(struct kv_port *port)
{
    return (struct ucx_port *)port;
}

static kv_status_t status_of(ucs_status_t status)
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
        /* Cancelled, reset, timed out, not connected, rejected: for the owner it is one thing.
         */
        return KV_UNREACHABLE;
    }
}

/* Reading what UCX prints, the only place where it names devices. */

/* Appends `word` to `text` unless it is there. */
static void add_word(char *text, size_t text_bytes, const char *word, size_t word_bytes)
{
    size_t used = strlen(text);

    for (const char *at = text; *at != '\0';) {
        size_t length = strcspn(at, " ");

        if (length == word_bytes && memcmp(at, word, length) == 0)
            return;
        at += length + strspn(at + length, " ");
    }
    if (used + (used > 0) + word_bytes + 1 > text_bytes)
        return;
    if (used > 0)
        text[used++] = ' ';
    memcpy(text + used, word, word_bytes);
    text[used + word_bytes] = '\0';
}

/* Adds the transport and device ("tcp/lo") that follows `mark` in each line. */
static void add_resources(char *text, size_t text_bytes, const char *printed, const char *mark)
{
    const char *at = printed;

    while ((at = strstr(at, mark)) != NULL) {
        const char *colon;
        size_t length;

        at += strlen(mark);
        at += strspn(at, " ");
        length = strcspn(at, " \n");
        /* A lane is printed as "0:tcp/lo.0": the resource's number and the path's. */
        colon = memchr(at, ':', length);
        if (colon != NULL && colon > at && strspn(at, "0123456789") == (size_t)(colon - at)) {
            length -= (size_t)(colon + 1 - at);
            at = colon + 1;
            if (length > 2 && memcmp(at + length - 2, ".0", 2) == 0)
                length -= 2;
        }
        if (memchr(at, '/', length) != NULL)
            add_word(text, text_bytes, at, length);
    }
}

/* false: no memory. */
static bool describe_context(ucp_context_h context, char *text, size_t text_bytes)
{
    char *printed = NULL;
    size_t bytes;
    FILE *stream = open_memstream(&printed, &bytes);
    bool is_whole;

    if (stream == NULL)
        return false;
    ucp_context_print_info(context, stream);
    is_whole = fclose(stream) == 0;
    if (is_whole)
        add_resources(text, text_bytes, printed, "flags -- ");
    free(printed);
    return is_whole;
}

static void describe_endpoint(ucp_ep_h endpoint, char *text, size_t text_bytes)
{
    char *printed = NULL;
    size_t bytes;
    FILE *stream = open_memstream(&printed, &bytes);

    if (stream == NULL)
        return;
    ucp_ep_print_info(endpoint, stream);
    if (fclose(stream) == 0) {
        char mark[16];

        for (unsigned lane = 0; lane < LANES_MAX; lane++) {
            snprintf(mark, sizeof(mark), "lane[%u]:", lane);
            add_resources(text, text_bytes, printed, mark);
        }
    }
    free(printed);
}

/* The transport */

/* Calls `check` with each name of a comma-separated list, until one says no. */
static bool each_device(const char *devices,
                        bool (*check)(const char *device, const void *arg),
                        const void *arg,
                        char *ret_device,
                        size_t device_bytes)
{
    while (*devices != '\0') {
        size_t length = strcspn(devices, ",");

        if (length > 0) {
            snprintf(ret_device, device_bytes, "%.*s", (int)length, devices);
            if (!check(ret_device, arg))
                return false;
        }
        devices += length + (devices[length] == ',');
    }
    return true;
}

static bool device_exists(const char *device, const void *arg)
{
    (void)arg;
    return if_nametoindex(device) != 0;
}

static bool device_in_use(const char *device, const void *arg)
{
    char word[DEVICES_BYTES_MAX + 2];

    /* Words of `arg` are separated by spaces, and so is its end. */
    snprintf(word, sizeof(word), "/%s ", device);
    return strstr(arg, word) != NULL;
}

static kv_status_t set_option(ucp_config_t *config, const struct option *option)
{
    if (option->variable != NULL && getenv(option->variable) != NULL)
        return KV_OK;
    return status_of(ucp_config_modify(config, option->name, option->value));
}

static kv_status_t open_context(enum wire_kind kind,
                                const char *devices,
                                ucp_context_h *ret_context,
                                char *detail,
                                size_t detail_bytes)
{
    struct option net_devices = {"NET_DEVICES", "UCX_NET_DEVICES", devices};
    ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_REQUEST_SIZE,
        .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
        .request_size = sizeof(struct flight),
    };
    ucp_config_t *config;
    kv_status_t status;
    ucs_status_t ucs;

    ucs = ucp_config_read(NULL, NULL, &config);
    if (ucs != UCS_OK) {
        snprintf(detail, detail_bytes, "ucx: configuration: %s", ucs_status_string(ucs));
        return KV_INVALID;
    }
    status = set_option(config, &net_devices);
    for (const struct option *option = common_options; option->name != NULL; option++)
        if (status == KV_OK)
            status = set_option(config, option);
    for (const struct option *option = wire_options[kind]; option->name != NULL; option++)
        if (status == KV_OK)
            status = set_option(config, option);
    if (status != KV_OK) {
        ucp_config_release(config);
        snprintf(detail, detail_bytes, "ucx: an option is unknown to this version");
        return KV_UNSUPPORTED;
    }

    ucs = ucp_init(&params, config, ret_context);
    ucp_config_release(config);
    if (ucs != UCS_OK) {
        snprintf(detail, detail_bytes, "ucx: %s: %s",
                 kind == WIRE_NETWORK ? devices : "shared memory", ucs_status_string(ucs));
        return ucs == UCS_ERR_NO_DEVICE ? KV_UNSUPPORTED : KV_IO;
    }
    return KV_OK;
}

static void ucx_close(struct kv_transport *base)
{
    struct ucx_transport *transport = (struct ucx_transport *)base;

    for (unsigned kind = 0; kind < N_WIRES; kind++)
        if (transport->contexts[kind] != NULL)
            ucp_cleanup(transport->contexts[kind]);
    free(transport);
}

static kv_status_t open_network(struct ucx_transport *transport,
                                const char *devices,
                                char *detail,
                                size_t detail_bytes)
{
    char device[DEVICES_BYTES_MAX];
    char in_use[1024] = "";
    kv_status_t status;
    size_t used;

    if (strlen(devices) >= DEVICES_BYTES_MAX) {
        snprintf(detail, detail_bytes, "ucx: the list of devices is too long");
        return KV_INVALID;
    }
    /* UCX itself only warns, and goes on with the others. */
    if (!each_device(devices, device_exists, NULL, device, sizeof(device))) {
        snprintf(detail, detail_bytes, "ucx: network device %s: does not exist", device);
        return KV_UNSUPPORTED;
    }
    status = open_context(WIRE_NETWORK, devices, &transport->contexts[WIRE_NETWORK], detail,
                          detail_bytes);
    if (status != KV_OK || getenv("UCX_NET_DEVICES") != NULL || getenv("UCX_TLS") != NULL)
        return status;

    if (!describe_context(transport->contexts[WIRE_NETWORK], in_use, sizeof(in_use) - 1)) {
        snprintf(detail, detail_bytes, "ucx: out of memory");
        return KV_NO_MEMORY;
    }
    used = strlen(in_use);
    in_use[used] = ' ';
    in_use[used + 1] = '\0';
    if (!each_device(devices, device_in_use, in_use, device, sizeof(device))) {
        snprintf(detail, detail_bytes, "ucx: network device %s: down, or no address", device);
        return KV_UNSUPPORTED;
    }
    return KV_OK;
}

static kv_status_t ucx_open(const struct kv_transport_config *config,
                            struct kv_transport **ret_transport,
                            char *detail,
                            size_t detail_bytes)
{
    const char *transports = config->transports != NULL ? config->transports : "auto";
    const char *devices =
        config->devices != NULL && config->devices[0] != '\0' ? config->devices : "lo";
    bool is_auto = strcmp(transports, "auto") == 0;
    bool network = is_auto || strcmp(transports, "tcp") == 0;
    /* Whoever names UCX's transports himself gets them in one context, not twice. */
    bool shared = (is_auto && getenv("UCX_TLS") == NULL) || strcmp(transports, "shm") == 0;
    struct ucx_transport *transport;
    char device[DEVICES_BYTES_MAX];
    kv_status_t status = KV_OK;

    if (!network && !shared) {
        snprintf(detail, detail_bytes, "ucx: transport %s: not auto, tcp or shm", transports);
        return KV_INVALID;
    }
    transport = calloc(1, sizeof(*transport));
    if (transport == NULL) {
        snprintf(detail, detail_bytes, "ucx: out of memory");
        return KV_NO_MEMORY;
    }
    transport->base.row = &kv_transport_ucx;
    if (network)
        status = open_network(transport, devices, detail, detail_bytes);
    /* UCX looks for devices in /sys; without it (a bare chroot) auto is shared memory alone. */
    if (status == KV_UNSUPPORTED && is_auto && shared && access("/sys/class/net", F_OK) != 0 &&
        each_device(devices, device_exists, NULL, device, sizeof(device)))
        status = KV_OK;
    if (status == KV_OK && shared)
        status = open_context(WIRE_SHARED, devices, &transport->contexts[WIRE_SHARED], detail,
                              detail_bytes);
    if (status != KV_OK) {
        ucx_close(&transport->base);
        return status;
    }

    transport->has_cuda = true;
    for (unsigned kind = 0; kind < N_WIRES; kind++) {
        ucp_context_attr_t attr = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};

        if (transport->contexts[kind] == NULL)
            continue;
        if (ucp_context_query(transport->contexts[kind], &attr) != UCS_OK ||
            (attr.memory_types & (1u << UCS_MEMORY_TYPE_CUDA)) == 0)
            transport->has_cuda = false;
    }
    *ret_transport = &transport->base;
    return KV_OK;
}

static void ucx_unmap(struct kv_transport *base, struct kv_mapping *mapping)
{
    struct ucx_transport *transport = (struct ucx_transport *)base;

    for (unsigned kind = 0; kind < N_WIRES; kind++)
        if (mapping->handles[kind] != NULL)
            ucp_mem_unmap(transport->contexts[kind], mapping->handles[kind]);
    free(mapping);
}

static kv_status_t ucx_map(struct kv_transport *base,
                           void *memory,
                           size_t bytes,
                           enum kv_memory_type type,
                           struct kv_mapping **ret_mapping)
{
    struct ucx_transport *transport = (struct ucx_transport *)base;
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = memory,
        .length = bytes,
        .memory_type = type == KV_MEMORY_CUDA ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST,
    };
    struct kv_mapping *mapping;

    if (type == KV_MEMORY_CUDA && !transport->has_cuda)
        return KV_UNSUPPORTED;
    mapping = calloc(1, sizeof(*mapping));
    if (mapping == NULL)
        return KV_NO_MEMORY;
    for (unsigned kind = 0; kind < N_WIRES; kind++) {
        ucs_status_t ucs;

        if (transport->contexts[kind] == NULL)
            continue;
        ucs = ucp_mem_map(transport->contexts[kind], &params, &mapping->handles[kind]);
        if (ucs != UCS_OK) {
            mapping->handles[kind] = NULL;
            ucx_unmap(base, mapping);
            return status_of(ucs);
        }
    }
    *ret_mapping = mapping;
    return KV_OK;
}

static void ucx_describe(struct kv_transport *base, char *text, size_t text_bytes)
{
    struct ucx_transport *transport = (struct ucx_transport *)base;

    if (text_bytes == 0)
        return;
    text[0] = '\0';
    for (unsigned kind = N_WIRES; kind-- > 0;)
        if (transport->contexts[kind] != NULL)
            describe_context(transport->contexts[kind], text, text_bytes);
}

/* Sends in flight */

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
static void abandon_offers(struct ucx_port *port)
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

static kv_status_t ucx_send(struct kv_channel *base,
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

static kv_status_t ucx_send_pair(struct kv_channel *base,
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

/* Incoming data */

static struct ucx_incoming *incoming_get(struct ucx_port *port)
{
    struct ucx_incoming *incoming = port->spare_incomings;

    if (incoming != NULL)
        port->spare_incomings = incoming->next;
    else
        incoming = malloc(sizeof(*incoming));
    if (incoming == NULL)
        return NULL;
    memset(incoming, 0, offsetof(struct ucx_incoming, pieces));
    incoming->base.row = port->base.row;
    incoming->next = port->incomings;
    if (port->incomings != NULL)
        port->incomings->previous = incoming;
    port->incomings = incoming;
    return incoming;
}

static void incoming_unlink(struct ucx_incoming *incoming)
{
    struct ucx_port *port = incoming->wire->port;

    if (incoming->previous != NULL)
        incoming->previous->next = incoming->next;
    else
        port->incomings = incoming->next;
    if (incoming->next != NULL)
        incoming->next->previous = incoming->previous;
}

static void incoming_spare(struct ucx_port *port, struct ucx_incoming *incoming)
{
    incoming->next = port->spare_incomings;
    port->spare_incomings = incoming;
}

static void incoming_put(struct ucx_incoming *incoming)
{
    struct ucx_port *port = incoming->wire->port;

    incoming_unlink(incoming);
    incoming_spare(port, incoming);
}

/* Tells the sender that its data is needed no longer. */
static void incoming_release(struct ucx_incoming *incoming)
{
    /* Inside the handler UCX still owns the descriptor and does this itself. */
    if (incoming->answer != NULL)
        *incoming->answer = UCS_OK;
    else
        ucp_am_data_release(incoming->wire->worker, incoming->descriptor);
    incoming_put(incoming);
}

static void on_received(void *request, ucs_status_t ucs, size_t bytes, void *user_data)
{
    struct ucx_incoming *incoming = user_data;
    kv_transport_done_fn done = incoming->done;
    void *arg = incoming->arg;

    (void)bytes;
    ucp_request_free(request);
    if (incoming->is_dead)
        return;
    if (incoming->in_call) {
        incoming->over = true;
        incoming->status = status_of(ucs);
        return;
    }
    incoming_put(incoming);
    done(arg, status_of(ucs));
}

static kv_status_t ucx_receive(struct kv_incoming *base,
                               const struct kv_iov *iov,
                               unsigned n_iov,
                               kv_transport_done_fn done,
                               void *arg)
{
    struct ucx_incoming *incoming = (struct ucx_incoming *)base;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_DATATYPE,
        .cb.recv_am = on_received,
        .user_data = incoming,
        .datatype = n_iov == 1 ? ucp_dt_make_contig(1) : UCP_DATATYPE_IOV,
    };
    ucs_status_ptr_t request;
    kv_status_t status;
    size_t bytes = 0;

    assert(n_iov >= 1 && n_iov <= KV_IOV_MAX && !incoming->receiving);
    for (unsigned i = 0; i < n_iov; i++) {
        incoming->pieces[i].buffer = iov[i].base;
        incoming->pieces[i].length = iov[i].bytes;
        bytes += iov[i].bytes;
    }
    assert(bytes == incoming->data_bytes);

    if (incoming->wire->kind == WIRE_SHARED) {
        enum kv_offer_outcome outcome =
            kv_offer_read(&incoming->tail, incoming->data_bytes, iov, n_iov);

        if (outcome != KV_OFFER_REFUSED) {
            incoming_release(incoming);
            return outcome == KV_OFFER_WHOLE ? KV_OK : KV_UNREACHABLE;
        }
    }

    incoming->done = done;
    incoming->arg = arg;
    incoming->receiving = true;
    incoming->in_call = true;
    request = ucp_am_recv_data_nbx(incoming->wire->worker, incoming->descriptor,
                                   n_iov == 1 ? iov[0].base : (void *)incoming->pieces,
                                   n_iov == 1 ? iov[0].bytes : n_iov, &param);
    incoming->in_call = false;
    if (UCS_PTR_IS_PTR(request) && !incoming->over)
        return KV_IN_PROGRESS;
    status = incoming->over ? incoming->status : status_of(UCS_PTR_STATUS(request));
    incoming_put(incoming);
    return status;
}

static void ucx_refuse(struct kv_incoming *base)
{
    incoming_release((struct ucx_incoming *)base);
}

/* The header and the data of a small message lie wherever UCX has them, at any alignment. */
static ucs_status_t on_message(void *arg,
                               const void *header,
                               size_t header_bytes,
                               void *data,
                               size_t data_bytes,
                               const ucp_am_recv_param_t *param)
{
    struct wire *wire = arg;
    struct ucx_port *port = wire->port;
    struct ucx_incoming *incoming;
    ucs_status_t answer = UCS_INPROGRESS;

    if (port->closing)
        return UCS_OK;
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0) {
        if (header_bytes <= KV_TRANSPORT_HEADER_MAX)
            port->events.message(port->owner, header, header_bytes, data, data_bytes);
        return UCS_OK;
    }

    if (wire->kind == WIRE_SHARED) {
        if (header_bytes < sizeof(struct kv_offer_tail))
            return UCS_OK;
        header_bytes -= sizeof(struct kv_offer_tail);
    }
    if (header_bytes > KV_TRANSPORT_HEADER_MAX)
        return UCS_OK;
    incoming = incoming_get(port);
    if (incoming == NULL)
        return UCS_OK; /* the sender is told that it is over; its owner's deadline does the rest
                        */
    incoming->wire = wire;
    incoming->descriptor = data;
    incoming->data_bytes = data_bytes;
    if (wire->kind == WIRE_SHARED)
        memcpy(&incoming->tail, (const char *)header + header_bytes,
               sizeof(struct kv_offer_tail));
    incoming->answer = &answer;
    port->events.incoming(port->owner, header, header_bytes, data_bytes, &incoming->base);
    /* It may be gone, and its memory another's; only if nothing answered it is surely this one.
     */
    for (struct ucx_incoming *held = port->incomings; held != NULL; held = held->next) {
        if (held->answer == &answer) {
            held->answer = NULL;
            break;
        }
    }
    return answer;
}

/* Channels */

static void on_failure(void *arg, ucp_ep_h endpoint, ucs_status_t ucs)
{
    struct ucx_channel *channel = arg;

    (void)endpoint;
    if (channel->failed)
        return;
    channel->failed = true;
    channel->status = status_of(ucs);
    channel->port->n_failures++;
}

static void channel_unlink(struct ucx_channel *channel)
{
    if (channel->previous != NULL)
        channel->previous->next = channel->next;
    else
        channel->port->channels = channel->next;
    if (channel->next != NULL)
        channel->next->previous = channel->previous;
}

static void end_watch(struct ucx_channel *channel)
{
    if (channel->process_fd < 0)
        return;
    epoll_ctl(channel->port->watch_fd, EPOLL_CTL_DEL, channel->process_fd, NULL);
    close(channel->process_fd);
    channel->process_fd = -1;
}

/* Without it (a kernel before 5.3, no descriptor left) nobody reports a dead peer. */
static void begin_watch(struct ucx_channel *channel, uint32_t process)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = channel};

    channel->process_fd = (int)syscall(SYS_pidfd_open, (pid_t)process, 0);
    if (channel->process_fd >= 0 &&
        epoll_ctl(channel->port->watch_fd, EPOLL_CTL_ADD, channel->process_fd, &event) != 0)
        end_watch(channel);
}

static void look_for_dead_peers(struct ucx_port *port)
{
    struct epoll_event ready[WATCH_EVENTS_MAX];
    int n = epoll_wait(port->watch_fd, ready, WATCH_EVENTS_MAX, 0);

    for (int i = 0; i < n; i++) {
        struct ucx_channel *channel = ready[i].data.ptr;

        end_watch(channel);
        on_failure(channel, channel->endpoint, UCS_ERR_CONNECTION_RESET);
    }
}

static void close_endpoint(struct ucx_channel *channel)
{
    struct ucx_port *port = channel->port;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_EP_CLOSE_FLAG_FORCE,
    };
    ucs_status_ptr_t request = ucp_ep_close_nbx(channel->endpoint, &param);

    if (UCS_PTR_IS_PTR(request))
        ucp_request_free(request);
    port->settle = SETTLE_ROUNDS;
    channel->wire->n_channels--;
    if (channel->wire->kind == WIRE_SHARED)
        port->must_probe = true;
    free(channel);
}

static void ucx_channel_close(struct kv_channel *base)
{
    struct ucx_channel *channel = (struct ucx_channel *)base;
    struct ucx_port *port = channel->port;

    channel_unlink(channel);
    for (struct flight *flight = port->flights; flight != NULL; flight = flight->next)
        if (flight->channel == channel)
            flight->channel = NULL;
    if (channel->failed && !channel->reported)
        port->n_failures--;
    end_watch(channel);
    /* Nothing may name it from now on, not even a failure that comes before it is closed. */
    channel->failed = true;
    if (!port->in_progress) {
        close_endpoint(channel);
        return;
    }
    channel->next = port->to_close;
    port->to_close = channel;
}

static kv_status_t read_address(const void *address,
                                size_t address_bytes,
                                const unsigned char *ret_parts[N_WIRES],
                                struct address_prefix *ret_prefix)
{
    const unsigned char *at = address;
    struct address_prefix prefix;
    size_t bytes = sizeof(prefix);
    size_t crc_begin = offsetof(struct address_prefix, process);

    if (address_bytes < sizeof(prefix) || address_bytes > ADDRESS_BYTES_MAX)
        return KV_INVALID;
    memcpy(&prefix, at, sizeof(prefix));
    for (unsigned kind = 0; kind < N_WIRES; kind++)
        bytes += prefix.bytes[kind];
    if (prefix.magic != ADDRESS_MAGIC || bytes != address_bytes ||
        prefix.crc != kv_crc32c(0, at + crc_begin, address_bytes - crc_begin))
        return KV_INVALID;
    at += sizeof(prefix);
    for (unsigned kind = 0; kind < N_WIRES; kind++) {
        ret_parts[kind] = at;
        at += prefix.bytes[kind];
    }
    *ret_prefix = prefix;
    return KV_OK;
}

static kv_status_t ucx_connect(struct kv_port *base,
                               const void *address,
                               size_t address_bytes,
                               enum kv_channel_mode mode,
                               void *channel_arg,
                               struct kv_channel **ret_channel)
{
    struct ucx_port *port = port_of(base);
    const unsigned char *parts[N_WIRES];
    struct address_prefix prefix;
    struct ucx_channel *channel;
    char lanes[256] = "";
    enum wire_kind kind;
    void *part;
    ucs_status_t ucs;
    kv_status_t status;

    status = read_address(address, address_bytes, parts, &prefix);
    if (status != KV_OK)
        return status;
    /* With one kind of wire, both modes use it. */
    kind = mode == KV_CHANNEL_SHARED ? WIRE_SHARED : WIRE_NETWORK;
    if (port->wires[kind] == NULL)
        kind = kind == WIRE_SHARED ? WIRE_NETWORK : WIRE_SHARED;
    if (prefix.bytes[kind] == 0)
        return KV_UNREACHABLE;

    channel = calloc(1, sizeof(*channel));
    part = malloc(prefix.bytes[kind]);
    if (channel == NULL || part == NULL) {
        free(part);
        free(channel);
        return KV_NO_MEMORY;
    }
    memcpy(part, parts[kind], prefix.bytes[kind]); /* aligned, as UCX gave it */
    channel->base.row = port->base.row;
    channel->port = port;
    channel->wire = port->wires[kind];
    channel->process_fd = -1;
    channel->channel_arg = channel_arg;
    ucs = ucp_ep_create(channel->wire->worker,
                        &(ucp_ep_params_t){
                            .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                          UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                          UCP_EP_PARAM_FIELD_ERR_HANDLER,
                            .address = part,
                            .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                            .err_handler = {on_failure, channel},
                        },
                        &channel->endpoint);
    free(part);
    if (ucs != UCS_OK) {
        free(channel);
        return ucs == UCS_ERR_NO_MEMORY ? KV_NO_MEMORY : KV_UNREACHABLE;
    }

    channel->base.pair_max = kind == WIRE_SHARED ? SHARED_EAGER_MAX : NETWORK_EAGER_MAX;
    channel->wire->n_channels++;
    channel->next = port->channels;
    if (port->channels != NULL)
        port->channels->previous = channel;
    port->channels = channel;
    if (mode == KV_CHANNEL_SHARED && kind != WIRE_SHARED) {
        /* Only the user's own choice of transports can make this shared memory. */
        describe_endpoint(channel->endpoint, lanes, sizeof(lanes));
        if (strstr(lanes, "/memory") == NULL) {
            ucx_channel_close(&channel->base);
            return KV_UNREACHABLE;
        }
    }
    if (kind == WIRE_SHARED)
        begin_watch(channel, prefix.process);
    *ret_channel = &channel->base;
    return KV_OK;
}

static void ucx_channel_describe(struct kv_channel *base, char *text, size_t text_bytes)
{
    struct ucx_channel *channel = (struct ucx_channel *)base;

    if (text_bytes == 0)
        return;
    text[0] = '\0';
    describe_endpoint(channel->endpoint, text, text_bytes);
    /* Large data goes beside UCX, see above. */
    if (channel->wire->kind == WIRE_SHARED)
        add_word(text, text_bytes, "cma/memory", strlen("cma/memory"));
}

/* Ports */

static void close_endpoints(struct ucx_port *port)
{
    while (port->to_close != NULL) {
        struct ucx_channel *channel = port->to_close;

        port->to_close = channel->next;
        close_endpoint(channel);
    }
}

static unsigned progress_workers(struct ucx_port *port)
{
    unsigned n = 0;

    for (unsigned kind = 0; kind < N_WIRES; kind++) {
        if (port->wires[kind] == NULL)
            continue;
        if (kind == WIRE_NETWORK && n > 0 && ++port->turns % NETWORK_TURNS != 0)
            continue;
        n += ucp_worker_progress(port->wires[kind]->worker);
    }
    for (struct wire *wire = port->retired; wire != NULL; wire = wire->next)
        n += ucp_worker_progress(wire->worker);
    if (port->settle > 0 && --port->settle == 0)
        abandon_offers(port);
    return n;
}

/* Wires */

static ucs_status_t on_probe(void *arg,
                             const void *header,
                             size_t header_bytes,
                             void *data,
                             size_t data_bytes,
                             const ucp_am_recv_param_t *param)
{
    struct wire *wire = arg;

    (void)header;
    (void)header_bytes;
    (void)data;
    (void)data_bytes;
    (void)param;
    /* An old queue that goes on after all says nothing of the one in use. */
    if (wire == wire->port->wires[WIRE_SHARED])
        wire->port->is_probing = false;
    return UCS_OK;
}

static kv_status_t set_handler(struct wire *wire, unsigned id, ucp_am_recv_callback_t handler)
{
    ucp_am_handler_param_t param = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = id,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = handler,
        .arg = wire,
    };

    return status_of(ucp_worker_set_am_recv_handler(wire->worker, &param));
}

/* Where a peer's queue has no room UCX never lets go of what is in flight, but completes it
 * once more while the worker is destroyed: the owner is told first, and that is not passed on.
 */

static void give_up_flights(const struct wire *wire)
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

/* Returns a list of those that must outlive the worker. */
static struct ucx_incoming *give_up_incomings(const struct wire *wire)
{
    struct ucx_port *port = wire->port;
    struct ucx_incoming *incoming = port->incomings, *dead = NULL;

    while (incoming != NULL) {
        if (incoming->wire != wire) {
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

static void close_wire(struct wire *wire)
{
    struct ucx_incoming *dead;

    give_up_flights(wire);
    dead = give_up_incomings(wire);
    ucp_worker_destroy(wire->worker); /* and the probe with it */
    while (dead != NULL) {
        struct ucx_incoming *next = dead->next;

        incoming_spare(wire->port, dead);
        dead = next;
    }
    free(wire);
}

static kv_status_t open_wire(struct ucx_port *port, enum wire_kind kind, struct wire **ret_wire)
{
    ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    struct wire *wire = calloc(1, sizeof(*wire));
    kv_status_t status;

    if (wire == NULL)
        return KV_NO_MEMORY;
    wire->port = port;
    wire->kind = kind;
    status =
        status_of(ucp_worker_create(port->transport->contexts[kind], &params, &wire->worker));
    if (status != KV_OK) {
        free(wire);
        return status;
    }
    status = set_handler(wire, AM_ID, on_message);
    if (status == KV_OK)
        status = set_handler(wire, PROBE_ID, on_probe);
    if (status != KV_OK) {
        close_wire(wire);
        return status;
    }
    *ret_wire = wire;
    return KV_OK;
}

static kv_status_t make_address(struct ucx_port *port)
{
    ucp_address_t *parts[N_WIRES] = {NULL};
    size_t bytes[N_WIRES] = {0};
    struct address_prefix prefix = {.magic = ADDRESS_MAGIC, .process = port->process};
    size_t crc_begin = offsetof(struct address_prefix, process);
    size_t total = sizeof(prefix);
    kv_status_t status = KV_OK;
    struct address *address;
    unsigned char *at;

    for (unsigned kind = 0; kind < N_WIRES; kind++) {
        if (port->wires[kind] == NULL)
            continue;
        if (ucp_worker_get_address(port->wires[kind]->worker, &parts[kind], &bytes[kind]) !=
            UCS_OK) {
            parts[kind] = NULL;
            status = KV_IO;
            goto out;
        }
        total += bytes[kind];
    }
    if (total > ADDRESS_BYTES_MAX) {
        status = KV_TOO_LARGE;
        goto out;
    }
    address = malloc(sizeof(*address) + total);
    if (address == NULL) {
        status = KV_NO_MEMORY;
        goto out;
    }
    address->before = atomic_load(&port->address);
    address->bytes = total;
    at = address->data;
    for (unsigned kind = 0; kind < N_WIRES; kind++)
        prefix.bytes[kind] = (uint16_t)bytes[kind];
    memcpy(at, &prefix, sizeof(prefix));
    at += sizeof(prefix);
    for (unsigned kind = 0; kind < N_WIRES; kind++) {
        if (bytes[kind] > 0)
            memcpy(at, parts[kind], bytes[kind]);
        at += bytes[kind];
    }
    at = address->data;
    prefix.crc = kv_crc32c(0, at + crc_begin, total - crc_begin);
    memcpy(at, &prefix, sizeof(prefix));
    atomic_store(&port->address, address);

out:
    for (unsigned kind = 0; kind < N_WIRES; kind++)
        if (parts[kind] != NULL)
            ucp_worker_release_address(port->wires[kind]->worker, parts[kind]);
    return status;
}

static kv_status_t add_to_epoll(int epoll_fd, int fd)
{
    struct epoll_event event = {.events = EPOLLIN};

    return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0 ? KV_OK : KV_IO;
}

static kv_status_t watch_wire(const struct ucx_port *port, const struct wire *wire)
{
    int fd;

    if (ucp_worker_get_efd(wire->worker, &fd) != UCS_OK)
        return KV_IO;
    return add_to_epoll(port->epoll_fd, fd);
}

/* Peers write into the port's shared queue themselves, and one that is killed, or stopped, in
 * the middle of a message holds up all that come behind it.  So the port writes to itself now
 * and then; what does not arrive says that the queue is stuck, and it gets another. */

static void send_probe(struct ucx_port *port, uint64_t now_us)
{
    struct wire *wire = port->wires[WIRE_SHARED];
    ucp_request_param_t param = {.op_attr_mask = 0};
    ucp_address_t *address;
    ucs_status_ptr_t request;
    size_t bytes;

    port->probe_us = now_us;
    if (wire->probe == NULL) {
        ucs_status_t ucs = ucp_worker_get_address(wire->worker, &address, &bytes);

        if (ucs != UCS_OK)
            return;
        ucs = ucp_ep_create(wire->worker,
                            &(ucp_ep_params_t){
                                .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                              UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
                                .address = address,
                                .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                            },
                            &wire->probe);
        ucp_worker_release_address(wire->worker, address);
        if (ucs != UCS_OK) {
            wire->probe = NULL;
            return;
        }
    }
    port->is_probing = true;
    port->must_probe = false;
    request = ucp_am_send_nbx(wire->probe, PROBE_ID, NULL, 0, NULL, 0, &param);
    if (UCS_PTR_IS_PTR(request))
        ucp_request_free(request);
    else if (UCS_PTR_IS_ERR(request))
        port->is_probing = false;
}

/* The channels over the old queue have failed; their owners connect to the new one. */
static void replace_queue(struct ucx_port *port)
{
    struct wire *old = port->wires[WIRE_SHARED], *fresh;

    port->is_probing = false;
    if (open_wire(port, WIRE_SHARED, &fresh) != KV_OK)
        return; /* the next probe tries again */
    port->wires[WIRE_SHARED] = fresh;
    if (watch_wire(port, fresh) != KV_OK || make_address(port) != KV_OK) {
        port->wires[WIRE_SHARED] = old;
        close_wire(fresh);
        return;
    }
    for (struct ucx_channel *channel = port->channels; channel != NULL; channel = channel->next)
        if (channel->wire == old)
            on_failure(channel, channel->endpoint, UCS_ERR_CONNECTION_RESET);
    old->next = port->retired;
    port->retired = old;
}

static void look_at_queue(struct ucx_port *port)
{
    const struct wire *wire = port->wires[WIRE_SHARED];
    uint64_t now_us;

    if (wire == NULL || port->closing || (wire->n_channels == 0 && !port->is_probing))
        return;
    now_us = kv_clock_now(&kv_clock_real);
    if (port->is_probing) {
        if (now_us - port->probe_us > PROBE_LOST_US)
            replace_queue(port);
    } else if (port->must_probe || now_us - port->probe_us > PROBE_EVERY_US) {
        send_probe(port, now_us);
    }
}

/* By an owner, that is; what UCX holds is given up. */
static bool is_held(const struct wire *wire)
{
    if (wire->n_channels > 0)
        return true;
    for (const struct ucx_incoming *incoming = wire->port->incomings; incoming != NULL;
         incoming = incoming->next)
        if (incoming->wire == wire && !incoming->receiving)
            return true;
    return false;
}

static void bury_wires(struct ucx_port *port)
{
    struct wire **link = &port->retired;

    if (port->settle > 0)
        return;
    while (*link != NULL) {
        struct wire *wire = *link;

        if (is_held(wire)) {
            link = &wire->next;
            continue;
        }
        *link = wire->next;
        close_wire(wire);
    }
}

static unsigned ucx_port_progress(struct kv_port *base)
{
    struct ucx_port *port = port_of(base);
    unsigned n;

    assert(!port->in_progress); /* UCX must not be entered twice */
    port->in_progress = true;
    n = progress_workers(port);
    if (port->watch_fd >= 0 && port->watch-- == 0) {
        port->watch = WATCH_ROUNDS;
        look_for_dead_peers(port);
        look_at_queue(port);
    }
    while (port->n_failures > 0) {
        struct ucx_channel *channel = port->channels;

        while (!channel->failed || channel->reported)
            channel = channel->next;
        channel->reported = true;
        port->n_failures--;
        port->events.failed(port->owner, channel->channel_arg, channel->status);
        n++;
    }
    close_endpoints(port);
    if (port->retired != NULL)
        bury_wires(port);
    port->in_progress = false;
    return n;
}

static void ucx_port_close(struct kv_port *base)
{
    struct ucx_port *port = port_of(base);

    assert(!port->in_progress);
    port->closing = true;
    port->in_progress = true; /* so that channels closed by callbacks wait */
    for (struct ucx_incoming *incoming = port->incomings; incoming != NULL;) {
        struct ucx_incoming *next = incoming->next;

        if (!incoming->receiving)
            incoming_release(incoming);
        incoming = next;
    }
    while (port->channels != NULL)
        ucx_channel_close(&port->channels->base);
    close_endpoints(port);

    /* UCX completes what is in flight, and tells peers; it must not take for ever. */
    for (unsigned round = 0; round < CLOSE_ROUNDS_MAX; round++) {
        if (port->settle == 0 && port->flights == NULL && port->incomings == NULL)
            break;
        progress_workers(port);
        close_endpoints(port);
    }
    for (unsigned kind = 0; kind < N_WIRES; kind++)
        if (port->wires[kind] != NULL)
            close_wire(port->wires[kind]);
    while (port->retired != NULL) {
        struct wire *wire = port->retired;

        port->retired = wire->next;
        close_wire(wire);
    }
    while (port->spare_incomings != NULL) {
        struct ucx_incoming *incoming = port->spare_incomings;

        port->spare_incomings = incoming->next;
        free(incoming);
    }
    kv_offers_free(&port->offers);
    if (port->watch_fd >= 0)
        close(port->watch_fd);
    if (port->epoll_fd >= 0)
        close(port->epoll_fd);
    if (port->wake_fd >= 0)
        close(port->wake_fd);
    for (struct address *address = atomic_load(&port->address); address != NULL;) {
        struct address *before = address->before;

        free(address);
        address = before;
    }
    free(port);
}

/* One descriptor for all that wakes the port. */
static kv_status_t make_fd(struct ucx_port *port)
{
    if (port->wires[WIRE_SHARED] == NULL)
        return ucp_worker_get_efd(port->wires[WIRE_NETWORK]->worker, &port->fd) == UCS_OK
                   ? KV_OK
                   : KV_IO;
    port->watch_fd = epoll_create1(EPOLL_CLOEXEC);
    port->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    port->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (port->watch_fd < 0 || port->epoll_fd < 0 || port->wake_fd < 0 ||
        add_to_epoll(port->epoll_fd, port->watch_fd) != KV_OK ||
        add_to_epoll(port->epoll_fd, port->wake_fd) != KV_OK)
        return KV_IO;
    for (unsigned kind = 0; kind < N_WIRES; kind++)
        if (port->wires[kind] != NULL && watch_wire(port, port->wires[kind]) != KV_OK)
            return KV_IO;
    port->fd = port->epoll_fd;
    return KV_OK;
}

static kv_status_t ucx_port_open(struct kv_transport *base,
                                 const struct kv_port_events *events,
                                 void *owner,
                                 struct kv_port **ret_port)
{
    struct ucx_transport *transport = (struct ucx_transport *)base;
    struct ucx_port *port = calloc(1, sizeof(*port));
    kv_status_t status = KV_OK;

    if (port == NULL)
        return KV_NO_MEMORY;
    port->base.row = base->row;
    port->transport = transport;
    port->events = *events;
    port->owner = owner;
    port->process = (uint32_t)getpid();
    port->watch_fd = -1;
    port->epoll_fd = -1;
    port->wake_fd = -1;
    for (unsigned kind = 0; kind < N_WIRES && status == KV_OK; kind++)
        if (transport->contexts[kind] != NULL)
            status = open_wire(port, kind, &port->wires[kind]);
    if (status == KV_OK)
        status = make_address(port);
    if (status == KV_OK)
        status = make_fd(port);
    if (status != KV_OK) {
        ucx_port_close(&port->base);
        return status;
    }
    *ret_port = &port->base;
    return KV_OK;
}

static void ucx_port_address(struct kv_port *port, const void **ret_address, size_t *ret_bytes)
{
    struct address *address = atomic_load(&port_of(port)->address);

    *ret_address = address->data;
    *ret_bytes = address->bytes;
}

static kv_status_t ucx_port_arm(struct kv_port *base, int *ret_fd)
{
    struct ucx_port *port = port_of(base);

    uint64_t wakes;

    if (port->settle > 0 || port->n_failures > 0 || port->is_probing || port->retired != NULL)
        return KV_BUSY;
    if (port->wake_fd >= 0 && read(port->wake_fd, &wakes, sizeof(wakes)) > 0)
        return KV_BUSY;
    for (unsigned kind = 0; kind < N_WIRES; kind++) {
        ucs_status_t ucs;

        if (port->wires[kind] == NULL)
            continue;
        ucs = ucp_worker_arm(port->wires[kind]->worker);
        if (ucs != UCS_OK)
            return ucs == UCS_ERR_BUSY ? KV_BUSY : KV_IO;
    }
    port->watch = 0; /* whoever sleeps may be woken for that */
    *ret_fd = port->fd;
    return KV_OK;
}

static void ucx_port_wake(struct kv_port *base)
{
    struct ucx_port *port = port_of(base);

    const uint64_t one = 1;

    /* A shared wire may be replaced while another thread is here. */
    if (port->wake_fd < 0)
        ucp_worker_signal(port->wires[WIRE_NETWORK]->worker);
    else if (write(port->wake_fd, &one, sizeof(one)) < 0)
        assert(errno == EAGAIN); /* full of wakes */
}

const struct kv_transport_row kv_transport_ucx = {
    .name = "ucx",
    .open = ucx_open,
    .close = ucx_close,
    .map = ucx_map,
    .unmap = ucx_unmap,
    .describe = ucx_describe,
    .port_open = ucx_port_open,
    .port_close = ucx_port_close,
    .port_address = ucx_port_address,
    .port_progress = ucx_port_progress,
    .port_arm = ucx_port_arm,
    .port_wake = ucx_port_wake,
    .connect = ucx_connect,
    .channel_close = ucx_channel_close,
    .channel_describe = ucx_channel_describe,
    .send = ucx_send,
    .send_pair = ucx_send_pair,
    .receive = ucx_receive,
    .refuse = ucx_refuse,
};
